//! The subjects of commits, as CONTRIBUTING.md demands them.

use std::process::Command;

use anyhow::{Result, ensure};

use crate::command;

/// The time of the rule; older commits are as they are.
const SINCE: &str = "--since=2026-11-29T00:00:00Z";
const MAX_CHARACTERS: usize = 72;

/// Fails if the subject of a commit is too long or ends like a sentence.
pub(crate) fn check() -> Result<()> {
    let mut log = Command::new("git");
    log.args(["log", "--no-merges", "--format=%h %s", SINCE]).current_dir(command::root());
    let subjects = command::read(&mut log)?;
    let faults: Vec<_> = subjects.lines().filter_map(fault).collect();
    ensure!(faults.is_empty(), "subjects of commits:\n  {}", faults.join("\n  "));
    println!("the subjects of {} commits are as CONTRIBUTING.md demands", subjects.lines().count());
    Ok(())
}

/// Returns the fault of a line with the hash and the subject of a commit.
fn fault(line: &str) -> Option<String> {
    let (hash, subject) = line.split_once(' ')?;
    let count = subject.chars().count();
    if count > MAX_CHARACTERS {
        return Some(format!("{hash}: {count} characters, at most {MAX_CHARACTERS} are allowed: {subject}"));
    }
    subject.ends_with('.').then(|| format!("{hash}: it ends with a full stop: {subject}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subject_is_short_and_no_sentence() {
        assert_eq!(fault("0123abc Restore CPUs after a sibling partition ends"), None);
        assert_eq!(fault(&format!("0123abc {}", "x".repeat(72))), None);
        assert!(fault(&format!("0123abc {}", "x".repeat(73))).is_some());
        assert!(fault("0123abc Restore CPUs.").is_some());
    }
}
