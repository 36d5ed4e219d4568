//! Detection of threads with a CPU affinity smaller than their cgroup's CPU set.
//!
//! A thread that has set its affinity (`sched_setaffinity(2)`, or systemd's `CPUAffinity=` before it started) runs on
//! those of its CPUs that are in its cgroup's set. From Linux 6.2 on, the kernel remembers the affinity that was set.
//! If a thread reads its affinity while its cgroup is confined and sets the same value again, it keeps the smaller
//! affinity after the cgroup is no longer confined.

use std::path::Path;

use numaward_topology::CpuSet;

use crate::{
    files::read_lossy,
    knob::{Knob, KnobValue},
    read::{ReadError, threads},
};

/// The threads of a cgroup that may use fewer CPUs than the cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NarrowThreads {
    /// The number of these threads.
    pub threads: usize,
    /// The CPUs that at least one of them may use.
    pub cpus: CpuSet,
    /// The CPUs of the cgroup.
    pub available: CpuSet,
}

/// Returns the threads in a cgroup itself, without those in its descendants, that may use fewer CPUs than the cgroup;
/// `None` if there are none. `proc` is the mounted procfs. Threads that end meanwhile are ignored.
pub fn narrow_threads(proc: &Path, dir: &Path) -> Result<Option<NarrowThreads>, ReadError> {
    let threads = threads(dir, usize::MAX)?;
    let Some(available) = available_cpus(dir) else { return Ok(None) };
    let mut narrow = NarrowThreads { threads: 0, cpus: CpuSet::new(), available };
    for thread in threads {
        let status = read_lossy(&proc.join(format!("{thread}/status"))).unwrap_or_default();
        let cpus = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        let Some(Ok(cpus)) = cpus.map(|list| list.trim().parse::<CpuSet>()) else { continue };
        if !narrow.available.is_subset(&cpus) {
            narrow.threads += 1;
            narrow.cpus = &narrow.cpus | &(&cpus & &narrow.available);
        }
    }
    Ok((narrow.threads > 0).then_some(narrow))
}

/// The CPUs that a cgroup has. Without the controller, these are those of the nearest one above that has it.
pub fn available_cpus(dir: &Path) -> Option<CpuSet> {
    dir.ancestors().find_map(|dir| match Knob::CpusetCpusEffective.read(dir) {
        Ok(KnobValue::Cpus(cpus)) if !cpus.is_empty() => Some(cpus),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn counts_threads_with_fewer_cpus() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &[u8]| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let narrow = |dir: &str| {
            let found =
                narrow_threads(&root.path().join("proc"), &root.path().join("cgroup").join(dir)).unwrap();
            found.map(|narrow| (narrow.threads, narrow.cpus.to_string(), narrow.available.to_string()))
        };
        file("cgroup/a/cgroup.threads", b"7\n8\n9\n10\n");
        for (thread, cpus) in [(7, "6-7"), (8, "0-9"), (9, "9")] {
            // A thread may have any name.
            let status = [b"Name:\td\xffb\nCpus_allowed_list:\t", cpus.as_bytes(), b"\n"].concat();
            file(&format!("proc/{thread}/status"), &status);
        }
        assert_eq!(narrow("a"), None, "the cgroup's CPUs are unknown");
        file("cgroup/a/cpuset.cpus.effective", b"6-9\n");
        assert_eq!(narrow("a"), Some((2, "6-7,9".to_owned(), "6-9".to_owned())));
        file("cgroup/a/below/cgroup.threads", b"8\n");
        assert_eq!(narrow("a/below"), None);
        file("cgroup/a/below/cgroup.threads", b"9\n");
        assert_eq!(narrow("a/below"), Some((1, "9".to_owned(), "6-9".to_owned())), "by the parent's CPUs");
    }
}
