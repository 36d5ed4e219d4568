//! Threads that run on fewer CPUs than their cgroup has.
//!
//! A thread that has asked for CPUs (`sched_setaffinity(2)`, or systemd's `CPUAffinity=` before it started) runs on those of them that
//! its cgroup has. From Linux 6.2 on, the kernel remembers the CPUs of that call. So a thread that reads its affinity while its cgroup is
//! narrow, and sets it again, stays narrow when the cgroup is wide again.

use std::{fs, path::Path};

use numaward_topology::CpuSet;

use crate::{
    knob::{Knob, KnobValue},
    read::{ReadError, threads},
};

/// Threads of a cgroup that run on fewer CPUs than it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NarrowThreads {
    /// How many.
    pub threads: usize,
    /// The CPUs that any of them may use.
    pub cpus: CpuSet,
    /// The CPUs that the cgroup has.
    pub available: CpuSet,
}

/// The threads in a cgroup itself that run on fewer CPUs than it has, by `proc`; `None` if there are none. Threads that end meanwhile
/// do not count.
pub fn narrow_threads(proc: &Path, dir: &Path) -> Result<Option<NarrowThreads>, ReadError> {
    let threads = threads(dir)?;
    let Some(available) = available_cpus(dir) else { return Ok(None) };
    let mut narrow = NarrowThreads { threads: 0, cpus: CpuSet::new(), available };
    for thread in threads {
        let status = fs::read_to_string(proc.join(format!("{thread}/status"))).unwrap_or_default();
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
    use super::*;

    #[test]
    fn threads_with_fewer_cpus_than_their_cgroup_are_counted() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let narrow = |dir: &str| {
            let found =
                narrow_threads(&root.path().join("proc"), &root.path().join("cgroup").join(dir)).unwrap();
            found.map(|of| (of.threads, of.cpus.to_string(), of.available.to_string()))
        };
        file("cgroup/a/cgroup.threads", "7\n8\n9\n10\n");
        for (thread, cpus) in [(7, "6-7"), (8, "0-9"), (9, "9")] {
            file(&format!("proc/{thread}/status"), &format!("Name:\tdb\nCpus_allowed_list:\t{cpus}\n"));
        }
        assert_eq!(narrow("a"), None, "it is not known what the cgroup has");
        file("cgroup/a/cpuset.cpus.effective", "6-9\n");
        assert_eq!(narrow("a"), Some((2, "6-7,9".to_owned(), "6-9".to_owned())));
        file("cgroup/a/below/cgroup.threads", "8\n");
        assert_eq!(narrow("a/below"), None);
        file("cgroup/a/below/cgroup.threads", "9\n");
        assert_eq!(narrow("a/below"), Some((1, "9".to_owned(), "6-9".to_owned())), "by what is above");
    }
}
