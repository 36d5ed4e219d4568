//! `numaward doctor`: the checks as text.

use std::fmt::Write;

use numaward_api::doctor::{CheckResult, HostCheck};

use crate::table::wrap;

/// Maximum length of a check's name in the first column. Longer names have a line of their own.
const MAX_NAME_CHARS: usize = 16;

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
