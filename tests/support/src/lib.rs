//! Shared by the tests of all crates: detection of CI, and comparison with checked-in files.
//!
//! It depends on no crate of the workspace, so the tests of any crate may use it.

#![forbid(unsafe_code)]
#![expect(clippy::panic, reason = "a library of tests")]

mod golden;

use std::{
    env,
    ffi::OsStr,
    fmt,
    io::{self, Write as _},
    process::Command,
    thread,
};

pub use self::golden::{Sections, UPDATE, assert_golden};

/// The variable that is set where no test may be skipped.
pub const CI: &str = "CI";

/// Returns true if this is a run in which no test may be skipped: the variable `CI` is set, and is not empty, `0` or `false`.
pub fn is_ci() -> bool {
    is_on(env::var_os(CI).as_deref())
}

/// Interprets the value of a switch in the environment.
fn is_on(value: Option<&OsStr>) -> bool {
    value.is_some_and(|value| !["", "0", "false"].iter().any(|off| value.eq_ignore_ascii_case(off)))
}

/// Reports that the calling test, or a part of it, cannot run on this host.
///
/// # Panics
///
/// In CI, where no test may be skipped.
#[track_caller]
pub fn skip_outside_ci(reason: impl fmt::Display) {
    assert!(!is_ci(), "this test cannot run: {reason}");
    report(&format!("skipped: {reason}"));
}

/// Runs the calling test in a process of its own, where no other test uses memory meanwhile; returns true in that process, and false
/// when it has passed there.
///
/// # Panics
///
/// If it fails there, or cannot be started.
#[must_use]
pub fn is_alone() -> bool {
    /// Set in that process.
    const ALONE: &str = "NUMAWARD_TEST_ALONE";
    let thread = thread::current();
    // Without threads for tests, all run on the first one, one after the other.
    let Some(name) = thread.name().filter(|name| *name != "main" && env::var_os(ALONE).is_none()) else {
        return true;
    };
    let program = env::current_exe().unwrap_or_else(|error| panic!("{error}"));
    let run = Command::new(program).args([name, "--exact", "--nocapture"]).env(ALONE, "1").output();
    let run = run.unwrap_or_else(|error| panic!("{error}"));
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&run.stderr)
    );
    false
}

/// Prints a line that is visible although the test passes: the test harness captures `eprintln!`.
fn report(line: &str) {
    // A closed stderr is no reason for a test to fail.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_is_to_be_alone_passes_in_a_process_of_its_own() {
        let is_alone = is_alone();
        println!("process {}, alone: {is_alone}", std::process::id());
    }

    #[test]
    fn ci_is_off_only_if_unset_empty_zero_or_false() {
        for off in [None, Some(""), Some("0"), Some("false"), Some("False"), Some("FALSE")] {
            assert!(!is_on(off.map(OsStr::new)), "{off:?}");
        }
        for on in ["1", "true", "True", "yes", "github", "00", " "] {
            assert!(is_on(Some(OsStr::new(on))), "{on:?}");
        }
    }
}
