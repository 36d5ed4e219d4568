//! Memory measurements of a test's process.

use std::{
    env,
    fs::{self, File},
    io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

/// Runs the calling test in a separate process, in which no other test uses memory. Returns true in that process, and
/// false after the test has passed there.
///
/// # Panics
///
/// If the test fails there, or the process cannot be started.
#[must_use]
pub fn is_alone() -> bool {
    /// Variable that is set in the separate process.
    const SEPARATE_PROCESS: &str = "NUMAWARD_TEST_ALONE";
    let thread = thread::current();
    // Without threads for tests, all tests run on the first thread, one after the other.
    let Some(name) = thread.name().filter(|name| *name != "main" && env::var_os(SEPARATE_PROCESS).is_none())
    else {
        return true;
    };
    let program = env::current_exe().unwrap_or_else(|error| panic!("{error}"));
    let run =
        Command::new(program).args([name, "--exact", "--nocapture"]).env(SEPARATE_PROCESS, "1").output();
    let run = run.unwrap_or_else(|error| panic!("{error}"));
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&run.stderr)
    );
    false
}

/// Returns the resident memory of this process in bytes.
///
/// # Panics
///
/// If procfs cannot be read.
pub fn resident() -> u64 {
    status_bytes("VmRSS:")
}

/// Returns the largest resident memory of this process since [`reset_peak`], in bytes.
///
/// # Panics
///
/// If procfs cannot be read.
pub fn peak() -> u64 {
    status_bytes("VmHWM:")
}

/// Resets the value of [`peak`] to the present one. (proc(5), `clear_refs`.)
///
/// # Panics
///
/// If procfs cannot be written.
pub fn reset_peak() {
    fs::write("/proc/self/clear_refs", "5").unwrap_or_else(|error| panic!("/proc/self/clear_refs: {error}"));
}

/// Creates this number of directories with paths of some 3.7 KB, and `file` with this text in each of them and in their ancestors. Returns
/// the number of directories below `root`.
///
/// # Panics
///
/// If they cannot be created.
pub fn create_long_paths(root: &Path, directories: usize, file: &str, text: &str) -> usize {
    const LEVELS: usize = 14;
    let create = |dir: &Path| {
        let created = fs::create_dir_all(dir).and_then(|()| fs::write(dir.join(file), text));
        created.unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    };
    let mut dir = root.to_owned();
    create(&dir);
    for _ in 0..LEVELS {
        dir.push("x".repeat(250));
        create(&dir);
    }
    for number in 0..directories {
        create(&dir.join(format!("{number:0200}")));
    }
    LEVELS + directories
}

/// Creates nested directories with a path that is too long to be opened (`PATH_MAX`), and a file in the last one.
///
/// # Panics
///
/// If it cannot be created.
pub fn create_too_long_path(root: &Path, file: &str, text: &str) {
    let fail = |error: io::Error| -> File { panic!("{}: {error}", root.display()) };
    let below = |dir: &File, name: &str| PathBuf::from(format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()));
    let mut last = File::open(root).unwrap_or_else(fail);
    for _ in 0..17 {
        let dir = below(&last, &"x".repeat(250));
        last = fs::create_dir(&dir).and_then(|()| File::open(&dir)).unwrap_or_else(fail);
    }
    fs::write(below(&last, file), text).unwrap_or_else(|error| panic!("{}: {error}", root.display()));
}

fn status_bytes(name: &str) -> u64 {
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
    fn peak_counts_freed_memory() {
        if !is_alone() {
            return;
        }
        reset_peak();
        let start = peak();
        drop(std::hint::black_box(vec![1_u8; 64 << 20]));
        assert!(peak() >= start + (60 << 20) && resident() < start + (32 << 20));
    }
}
