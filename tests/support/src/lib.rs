//! Shared by the tests of all crates: detection of CI, and comparison with checked-in files.
//!
//! It depends on no crate of the workspace, so the tests of any crate may use it.

#![forbid(unsafe_code)]
#![expect(clippy::panic, reason = "a library of tests")]

mod golden;
mod memory;

use std::{
    env,
    ffi::OsStr,
    fmt,
    io::{self, Write as _},
};

pub use self::{
    golden::{Sections, UPDATE, assert_golden},
    memory::{create_long_paths, create_too_long_path, is_alone, peak, reset_peak, resident},
};

/// Name of the variable that is set if no test may be skipped.
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

/// Prints a line that is visible although the test passes: the test harness captures `eprintln!`.
fn report(line: &str) {
    // A closed stderr is no reason for a test to fail.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recognizes_ci() {
        for off in [None, Some(""), Some("0"), Some("false"), Some("False"), Some("FALSE")] {
            assert!(!is_on(off.map(OsStr::new)), "{off:?}");
        }
        for on in ["1", "true", "True", "yes", "github", "00", " "] {
            assert!(is_on(Some(OsStr::new(on))), "{on:?}");
        }
    }
}
