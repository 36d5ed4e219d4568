//! The memory policies of a cgroup's processes that name nodes.
//!
//! # Problem
//! A narrower `cpuset.mems` changes them for good ([`numaward_cgroup::memory_policy`]).
//!
//! # Algorithm
//! The policy of a thread needs one line of its `numa_maps`. The policies of mappings require the whole `numa_maps` of the process, which the kernel generates from its
//! page tables: 10 to 23 ms for each GiB of small pages. Latency-critical threads should not read it.

use std::{
    fs::{self, File},
    io::{self, BufReader},
    path::Path,
};

use numaward_cgroup::{
    TruncatedLines,
    memory_policy::{policy_of, policy_of_thread},
    read,
};

use super::has_ended;

/// A memory policy that names nodes.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("process {process} has the memory policy {policy}")]
pub struct NamedNodes {
    /// Process with this policy, or with a mapping that has it.
    pub process: u32,
    /// The policy in the kernel's notation: `interleave:0-1`.
    pub policy: String,
}

/// Returns the first memory policy that names nodes, among the processes of a cgroup and of its descendants. Blocks
/// while the kernel reads page tables; `is_over` is called before each process and thread, and for each line.
///
/// # Errors
///
/// A process cannot be read: the daemon may not trace it (`CAP_SYS_PTRACE`), or it belongs to another PID namespace.
/// [`io::ErrorKind::Interrupted`] if `is_over` returns true.
pub fn named_nodes(proc: &Path, dir: &Path, is_over: impl Fn() -> bool) -> io::Result<Option<NamedNodes>> {
    let in_time = || if is_over() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) };
    for process in visible_processes(dir, in_time)? {
        if is_over() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match policy_in(&proc.join(process.to_string()), &is_over) {
            Ok(Some(policy)) => return Ok(Some(NamedNodes { process, policy })),
            Err(error) if !has_ended(&error) => return Err(error),
            // The process has ended, or has no policy that names nodes.
            Ok(None) | Err(_) => {}
        }
    }
    Ok(None)
}

/// Returns the processes of a cgroup and of its descendants.
///
/// # Errors
///
/// A process belongs to another PID namespace, or a cgroup cannot be read. Or that of `in_time`, which is called for each cgroup: it may have no process.
pub(super) fn visible_processes(dir: &Path, in_time: impl Fn() -> io::Result<()>) -> io::Result<Vec<u32>> {
    let (mut found, mut is_hidden) = (Vec::new(), false);
    let mut dirs = read::subtree(dir);
    for dir in dirs.by_ref() {
        in_time()?;
        let _absent = read::visit_processes(&dir, |process| {
            is_hidden |= process == 0;
            found.push(process);
            !is_hidden
        });
    }
    if !dirs.is_complete() {
        return Err(io::Error::other("some of its cgroups cannot be read, or there are too many"));
    }
    if is_hidden {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "processes of another PID namespace"));
    }
    Ok(found)
}

/// Returns the first policy that names nodes of a process, of its threads or of its mappings.
fn policy_in(process: &Path, is_over: &impl Fn() -> bool) -> io::Result<Option<String>> {
    for thread in fs::read_dir(process.join("task"))? {
        if is_over() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match policy_of_thread(&thread?.path()) {
            Ok(None) => {}
            // The other threads may be running.
            Err(error) if has_ended(&error) => {}
            found => return found,
        }
    }
    let mut lines = TruncatedLines::new(BufReader::new(File::open(process.join("numa_maps"))?));
    while let Some(line) = lines.next_line()? {
        if is_over() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if let Some(policy) = policy_of(&String::from_utf8_lossy(line)) {
            return Ok(Some(policy));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_policies_of_threads_and_mappings() {
        let (dir, proc) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir(dir.path().join("below")).unwrap();
        let maps = |file: &str, text: &str| {
            let path = proc.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let found =
            || named_nodes(proc.path(), dir.path(), || false).map(|found| found.map(|of| of.to_string()));
        let plain = "55d0 default file=/bin/a mapped=1 N0=1\n55d1 default heap\n";
        for file in ["7/numa_maps", "7/task/7/numa_maps", "7/task/8/numa_maps"] {
            maps(file, plain);
        }
        fs::write(dir.path().join("below/cgroup.procs"), "7\n9\n").unwrap();
        assert_eq!(found().unwrap(), None, "9 has ended");
        maps("7/numa_maps", &format!("{plain}7f00 bind:1 anon=1 N1=1\n"));
        assert_eq!(found().unwrap().unwrap(), "process 7 has the memory policy bind:1");
        maps("7/numa_maps", plain);
        // A user chooses the number of the cgroups and threads, and the length of `numa_maps`.
        let checks = std::cell::Cell::new(0);
        let is_over = |most: u32| checks.replace(checks.get() + 1) >= most;
        for most in 0..7 {
            checks.set(0);
            let error = named_nodes(proc.path(), dir.path(), || is_over(most)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted, "after {most} checks");
        }
        // A thread that has ended.
        fs::create_dir_all(proc.path().join("7/task/0")).unwrap();
        maps("7/task/8/numa_maps", "55d0 interleave:0-1 file=/bin/a\n");
        assert_eq!(found().unwrap().unwrap(), "process 7 has the memory policy interleave:0-1");
        fs::write(dir.path().join("cgroup.procs"), "0\n").unwrap();
        assert!(found().unwrap_err().to_string().contains("another PID namespace"));
    }

    #[test]
    fn reads_policy_of_own_process() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.procs"), format!("{}\n", std::process::id())).unwrap();
        assert_eq!(named_nodes(Path::new("/proc"), dir.path(), || false).unwrap(), None);
    }
}
