//! The memory policies of a cgroup's processes that name nodes.
//!
//! Problem: when `cpuset.mems` changes, the kernel remaps the nodes of each policy (`mpol_rebind_task`, `mpol_rebind_mm`), and what
//! a narrow set made of them is not undone by a wider one: `interleave:0-1` in `cpuset.mems=1` is `interleave:1` for good.
//!
//! Algorithm: the policy of a thread is that of its first mapping without one of its own, so one line of its `numa_maps` has it.
//! Those of mappings take the whole `numa_maps` of the process, which the kernel makes from its page tables: 10 to 23 ms for each
//! GiB of small pages. Not for threads that others wait for.
//!
//! Source: `numa(7)`, `mm/mempolicy.c` (`mpol_to_str`).

use std::{
    fs::{self, File},
    io::{self, BufRead as _, BufReader},
    path::Path,
};

use numaward_cgroup::{TruncatedLines, read};

use super::{has_ended, mappings::nodes_of};

/// Enough of a line for what comes before the name of a file. The kernel makes no more lines than are read.
const LINE: usize = 128;

/// A memory policy that names nodes.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("process {process} has the memory policy {policy}")]
pub struct NamedNodes {
    /// The process that has it, or a mapping with it.
    pub process: u32,
    /// It, as the kernel shows it: `interleave:0-1`.
    pub policy: String,
}

/// The first memory policy that names nodes, of the processes of a cgroup and of those below it. Blocks for as long as the kernel
/// takes; `is_over` is asked before each process, and for each line.
///
/// # Errors
///
/// One of them cannot be read: the daemon may not trace it (`CAP_SYS_PTRACE`), or it is of another PID namespace.
pub fn named_nodes(proc: &Path, dir: &Path, is_over: impl Fn() -> bool) -> io::Result<Option<NamedNodes>> {
    for process in visible_processes(dir)? {
        if is_over() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        match policy_in(&proc.join(process.to_string()), &is_over) {
            Ok(Some(policy)) => return Ok(Some(NamedNodes { process, policy })),
            Err(error) if !has_ended(&error) => return Err(error),
            // It has ended, or has no policy of its own.
            Ok(None) | Err(_) => {}
        }
    }
    Ok(None)
}

/// The processes of a cgroup and of those below it.
///
/// # Errors
///
/// One of them is of another PID namespace.
pub(super) fn visible_processes(dir: &Path) -> io::Result<Vec<u32>> {
    let (mut found, mut open) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = open.pop() {
        let processes = read::processes(&dir).unwrap_or_default();
        if processes.contains(&0) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "processes of another PID namespace",
            ));
        }
        found.extend(processes);
        let below = fs::read_dir(&dir).into_iter().flatten().flatten();
        let is_dir = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
        open.extend(below.filter(is_dir).map(|entry| entry.path()));
    }
    Ok(found)
}

/// The first policy of a process, of one of its threads or of one of its mappings that names nodes.
fn policy_in(process: &Path, is_over: &impl Fn() -> bool) -> io::Result<Option<String>> {
    for thread in fs::read_dir(process.join("task"))? {
        match policy_of_thread(&thread?.path()) {
            Ok(None) => {}
            // That a thread ends says nothing about the others.
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

fn policy_of_thread(thread: &Path) -> io::Result<Option<String>> {
    let mut lines = BufReader::with_capacity(LINE, File::open(thread.join("numa_maps"))?);
    Ok(policy_of(&String::from_utf8_lossy(lines.fill_buf()?)))
}

/// The policy in a line of `numa_maps`, if it names nodes. It comes after the address and has a space at most.
fn policy_of(line: &str) -> Option<String> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let first = words.next()?;
    if nodes_of(first).is_some() {
        return Some(first.to_owned());
    }
    let second = words.next().filter(|word| !word.contains('=') && nodes_of(word).is_some())?;
    Some(format!("{first} {second}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_that_name_nodes_are_told_from_others() {
        for (line, expected) in [
            ("55d0 default file=/bin/a:0 mapped=1 N0=1", None),
            ("55d0 local anon=1 N0=1", None),
            ("55d0 interleave:0-1 anon=1 N0=1", Some("interleave:0-1")),
            ("55d0 bind=static:1 file=/bin/a", Some("bind=static:1")),
            ("55d0 prefer (many):0,2 heap", Some("prefer (many):0,2")),
            ("55d0 weighted interleave:0-1", Some("weighted interleave:0-1")),
            ("55d0 bind=static|balancing:1 stack", Some("bind=static|balancing:1")),
            ("55d0 default", None),
            ("", None),
        ] {
            assert_eq!(policy_of(line).as_deref(), expected, "{line}");
        }
    }

    #[test]
    fn policies_of_processes_threads_and_mappings_are_found() {
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
        // A thread that has ended.
        fs::create_dir_all(proc.path().join("7/task/0")).unwrap();
        maps("7/task/8/numa_maps", "55d0 interleave:0-1 file=/bin/a\n");
        assert_eq!(found().unwrap().unwrap(), "process 7 has the memory policy interleave:0-1");
        fs::write(dir.path().join("cgroup.procs"), "0\n").unwrap();
        assert!(found().unwrap_err().to_string().contains("another PID namespace"));
    }

    #[test]
    fn own_process_has_a_policy_as_the_kernel_shows_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.procs"), format!("{}\n", std::process::id())).unwrap();
        assert_eq!(named_nodes(Path::new("/proc"), dir.path(), || false).unwrap(), None);
    }
}
