//! `numaward uninstall --restore`: what was given back, as text.

use std::fmt::Write as _;

use numaward_api::restore::RestoreReport;

use crate::table::{row, table};

/// What was given back, for people.
pub(crate) fn render(restored: &RestoreReport) -> String {
    let rows = restored.cgroups.iter().flat_map(|of| {
        // An empty list stands for what the cgroup above has.
        let word = |value: &str| if value.is_empty() { "-".to_owned() } else { value.to_owned() };
        of.knobs.iter().map(move |(knob, value)| row([&of.cgroup, knob, &word(value)]))
    });
    let rows: Vec<_> = rows.collect();
    let mut text = String::new();
    if !rows.is_empty() {
        text = table(["CGROUP", "KNOB", "AGAIN"], rows) + "\n";
    }
    let _ = writeln!(text, "{} cgroups have what they had before.", restored.cgroups.len());
    for left in &restored.left {
        let reason = left.reason.as_deref().unwrap_or("standard error says why");
        let _ = writeln!(text, "{} could not be given back what it had: {reason}.", left.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use numaward_api::restore::{RestoredCgroup, UnrestoredItem};

    use super::*;

    #[test]
    fn what_was_given_back_is_a_table() {
        let knobs =
            [("cpuset.cpus", ""), ("memory.min", "0")].map(|(knob, value)| (knob.into(), value.into()));
        let of = RestoredCgroup { cgroup: "/system.slice/db.service".to_owned(), knobs: knobs.into() };
        let expected = "\
CGROUP                    KNOB         AGAIN
/system.slice/db.service  cpuset.cpus  -
/system.slice/db.service  memory.min   0

1 cgroups have what they had before.
/a could not be given back what it had: standard error says why.
/b could not be given back what it had: the controller cpuset stays enabled, as it is in use.
";
        let reason = "the controller cpuset stays enabled, as it is in use".to_owned();
        let left = vec![
            UnrestoredItem { name: "/a".to_owned(), reason: None },
            UnrestoredItem { name: "/b".to_owned(), reason: Some(reason) },
        ];
        assert_eq!(render(&RestoreReport { cgroups: vec![of], left }), expected);
        assert_eq!(render(&RestoreReport::default()), "0 cgroups have what they had before.\n");
    }
}
