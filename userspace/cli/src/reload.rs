//! Output of `numaward reload`.

use numaward_api::{ChangedKey, Reload};

/// Renders the result of a reload for people.
pub(crate) fn render(reload: &Reload) -> String {
    let Reload { files: _, applied, needs_restart, waiting, warnings } = reload;
    let mut lines: Vec<String> = warnings.iter().map(|warning| format!("warning: {warning}")).collect();
    lines.extend(applied.iter().map(|changed| format!("applied: {}", describe(changed))));
    lines.extend(needs_restart.iter().map(|changed| format!("needs a restart: {}", describe(changed))));
    if applied.is_empty() && needs_restart.is_empty() {
        lines.push("no key has changed".to_owned());
    }
    lines.extend(waiting.iter().map(|waiting| {
        format!("no guarantee yet: {}, declared for {}: {}", waiting.cgroup, waiting.declared, waiting.reason)
    }));
    lines.join("\n") + "\n"
}

fn describe(ChangedKey { key, source }: &ChangedKey) -> String {
    format!("{key} ({})", source.as_deref().unwrap_or("default"))
}

#[cfg(test)]
mod tests {
    use numaward_api::PendingGuarantee;

    use super::*;

    #[test]
    fn renders_each_result_on_a_line() {
        let changed = |key: &str, source: Option<&str>| ChangedKey {
            key: key.to_owned(),
            source: source.map(str::to_owned),
        };
        let mut reload = Reload {
            files: Vec::new(),
            applied: Vec::new(),
            needs_restart: Vec::new(),
            waiting: Vec::new(),
            warnings: Vec::new(),
        };
        assert_eq!(render(&reload), "no key has changed\n");
        reload.applied.push(changed("guarantees", Some("/etc/numaward/guarantees.d/db.yaml:2:3")));
        reload.needs_restart.push(changed("probes.slots", None));
        reload.waiting.push(PendingGuarantee {
            cgroup: "/batch/c".to_owned(),
            declared: "/batch/*".to_owned(),
            reason: "node 0: cpu requested 9, free 3".to_owned(),
            rejection: None,
        });
        assert_eq!(
            render(&reload),
            "applied: guarantees (/etc/numaward/guarantees.d/db.yaml:2:3)\n\
             needs a restart: probes.slots (default)\n\
             no guarantee yet: /batch/c, declared for /batch/*: node 0: cpu requested 9, free 3\n"
        );
    }
}
