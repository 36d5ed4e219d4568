//! `numaward uninstall`: the restored settings as text.

use std::fmt::Write as _;

use numaward_api::restore::RestoreReport;

use crate::table::{row, table};

/// Renders the restored settings.
pub(crate) fn render(restored: &RestoreReport) -> String {
    let rows = restored.cgroups.iter().flat_map(|restored| {
        // An empty list means that the cgroup inherits its parent's.
        let word = |value: &str| if value.is_empty() { "-".to_owned() } else { value.to_owned() };
        restored.knobs.iter().map(move |(knob, value)| row([&restored.cgroup, knob, &word(value)]))
    });
    let rows: Vec<_> = rows.collect();
    let mut text = String::new();
    if !rows.is_empty() {
        text = table(["CGROUP", "KNOB", "RESTORED"], rows) + "\n";
    }
    let _ = writeln!(text, "{} cgroups have their previous settings.", restored.cgroups.len());
    for left in &restored.left {
        let reason = left.reason.as_deref().unwrap_or("standard error has the reason");
        let _ = writeln!(text, "{} could not be restored: {reason}.", left.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use numaward_api::restore::{RestoredCgroup, UnrestoredItem};

    use super::*;

    #[test]
    fn renders_restored_settings() {
        let knobs =
            [("cpuset.cpus", ""), ("memory.min", "0")].map(|(knob, value)| (knob.into(), value.into()));
        let cgroup = RestoredCgroup { cgroup: "/system.slice/db.service".to_owned(), knobs: knobs.into() };
        let expected = "\
CGROUP                    KNOB         RESTORED
/system.slice/db.service  cpuset.cpus  -
/system.slice/db.service  memory.min   0

1 cgroups have their previous settings.
/a could not be restored: standard error has the reason.
/b could not be restored: the controller cpuset stays enabled, as it is in use.
";
        let reason = "the controller cpuset stays enabled, as it is in use".to_owned();
        let left = vec![
            UnrestoredItem { name: "/a".to_owned(), reason: None },
            UnrestoredItem { name: "/b".to_owned(), reason: Some(reason) },
        ];
        assert_eq!(render(&RestoreReport { cgroups: vec![cgroup], left }), expected);
        assert_eq!(render(&RestoreReport::default()), "0 cgroups have their previous settings.\n");
    }
}
