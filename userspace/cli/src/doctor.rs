//! `numaward doctor`: the checks as text.

use std::fmt::Write;

use numaward_api::doctor::{Check, Verdict};

use crate::table::wrap;

/// The checks for people.
pub(crate) fn render(checks: &[Check]) -> String {
    let name = checks.iter().map(|check| check.check.chars().count()).max().unwrap_or(0);
    // Verdict, two blanks, name, two blanks.
    let indent = 4 + 2 + name + 2;
    let mut text = String::new();
    for check in checks {
        let verdict = match check.verdict {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        let _ =
            writeln!(text, "{verdict:4}  {:name$}  {}", check.check, wrap(&check.finding, indent, indent));
        if let Some(fix) = &check.fix {
            let _ = writeln!(text, "{:indent$}> {}", "", wrap(fix, indent + 2, indent + 2));
        }
    }
    text
}
