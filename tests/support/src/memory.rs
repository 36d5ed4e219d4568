//! The memory of the process of a test.

use std::{env, fs, process::Command, thread};

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

/// Returns the bytes that this process has in memory now.
///
/// # Panics
///
/// If procfs cannot be read.
pub fn resident() -> u64 {
    of_status("VmRSS:")
}

/// Returns the most bytes that this process had in memory since [`reset_peak`].
///
/// # Panics
///
/// If procfs cannot be read.
pub fn peak() -> u64 {
    of_status("VmHWM:")
}

/// Lets [`peak`] begin with what this process has now. (proc(5), `clear_refs`.)
///
/// # Panics
///
/// If procfs cannot be written.
pub fn reset_peak() {
    fs::write("/proc/self/clear_refs", "5").unwrap_or_else(|error| panic!("/proc/self/clear_refs: {error}"));
}

fn of_status(name: &str) -> u64 {
    let text =
        fs::read_to_string("/proc/self/status").unwrap_or_else(|error| panic!("/proc/self/status: {error}"));
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or_else(|| panic!("no {name} in {text}")) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_counts_what_was_freed_since() {
        if !is_alone() {
            return;
        }
        reset_peak();
        let start = peak();
        drop(std::hint::black_box(vec![1_u8; 64 << 20]));
        assert!(peak() >= start + (60 << 20) && resident() < start + (32 << 20));
    }
}
