//! `numaward doctor`: the checks as text.

use std::fmt::Write;

use numaward_api::{
    ContainerRuntime,
    doctor::{CheckResult, HostCheck},
};

use crate::table::wrap;

/// Maximum length of a check's name in the first column. Longer names have a line of their own.
const MAX_NAME_CHARS: usize = 16;

/// Returns the check of the container runtime that is connected to the daemon. A fault that no release repairs is no warning.
pub(crate) fn container_runtime(runtime: &ContainerRuntime) -> HostCheck {
    let faults = runtime.faults.iter();
    let version = format!("{} {}", runtime.name, runtime.version);
    let findings = faults.clone().map(|fault| format!("{} ({})", fault.finding, fault.fix));
    let finding = [version].into_iter().chain(findings).collect::<Vec<_>>().join("; ");
    let repaired: Vec<&str> = faults.filter(|fault| fault.repaired).map(|fault| fault.fix.as_str()).collect();
    HostCheck {
        check: "container runtime".to_owned(),
        verdict: if repaired.is_empty() { CheckResult::Ok } else { CheckResult::Warn },
        finding,
        fix: (!repaired.is_empty()).then(|| repaired.join("; ")),
    }
}

/// Renders the checks.
pub(crate) fn render(checks: &[HostCheck]) -> String {
    let lengths = checks.iter().map(|check| check.check.chars().count());
    let name = lengths.filter(|&length| length <= MAX_NAME_CHARS).max().unwrap_or(0);
    // The verdict, two spaces, the name, two spaces.
    let indent = 4 + 2 + name + 2;
    let mut text = String::new();
    for check in checks {
        let verdict = match check.verdict {
            CheckResult::Ok => "ok",
            CheckResult::Unknown => "?",
            CheckResult::Warn => "warn",
            CheckResult::Fail => "FAIL",
        };
        let finding = wrap(&check.finding, indent, indent);
        let _ = if check.check.chars().count() > name {
            writeln!(text, "{verdict:4}  {}\n{:indent$}{finding}", check.check, "")
        } else {
            writeln!(text, "{verdict:4}  {:name$}  {finding}", check.check)
        };
        if let Some(fix) = &check.fix {
            let _ = writeln!(text, "{:indent$}> {}", "", wrap(fix, indent + 2, indent + 2));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use numaward_api::RuntimeFault;

    use super::*;

    #[test]
    fn warns_of_repaired_runtime_faults() {
        let fault = |fix: &str, repaired| RuntimeFault {
            finding: "a fault".to_owned(),
            fix: fix.to_owned(),
            repaired,
        };
        let check = |faults| {
            let (name, version) = ("containerd".to_owned(), "2.1.4".to_owned());
            container_runtime(&ContainerRuntime { name, version, faults })
        };
        let warned = check(vec![fault("update", true), fault("wait", false)]);
        assert_eq!((warned.verdict, warned.fix.as_deref()), (CheckResult::Warn, Some("update")));
        assert_eq!(warned.finding, "containerd 2.1.4; a fault (update); a fault (wait)");
        let open = check(vec![fault("wait", false)]);
        assert_eq!((open.verdict, open.fix), (CheckResult::Ok, None));
        assert_eq!(check(Vec::new()).finding, "containerd 2.1.4");
    }
}
