//! Detection of changes of the machine: CPUs, nodes and memory that are added or removed.
//!
//! Reading the whole machine takes milliseconds, and the kernel reports changes only by uevents, which do not reach
//! every container. So a few small files are compared every second, and the machine is read when they differ.

use std::{collections::BTreeSet, fs, path::Path};

use numaward_api::EventKind;
use numaward_model::EventReport;
use numaward_topology::{Bytes, Machine};

/// Values of small files that differ after the machine has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Fingerprint(Vec<Option<String>>);

impl Fingerprint {
    /// Reads the files. An unreadable value is unknown; the periodic reading of the whole machine finds such changes.
    pub(crate) fn take(root: &Path) -> Self {
        let read = |file: &str| fs::read_to_string(root.join(file)).ok();
        // `MemTotal` changes with the memory that is online, `Hugetlb` with the pools of all page sizes.
        let meminfo = read("proc/meminfo").map(|text| {
            let matters = |line: &&str| line.starts_with("MemTotal:") || line.starts_with("Hugetlb:");
            text.lines().filter(matters).collect()
        });
        let sets = ["cpu/online", "node/online", "node/has_memory"];
        Self(
            sets.map(|set| read(&format!("sys/devices/system/{set}"))).into_iter().chain([meminfo]).collect(),
        )
    }
}

/// Returns the changes of a machine as events, one for each part.
pub(crate) fn changes(before: &Machine, after: &Machine) -> Vec<EventReport> {
    let mut reports = Vec::new();
    let mut report = |message: String| reports.push(EventReport::new(EventKind::MachineChange, message));
    let (were, are) = (before.cpu_ids(), after.cpu_ids());
    for (cpus, what) in [(&were - &are, "went offline"), (&are - &were, "came online")] {
        if !cpus.is_empty() {
            report(format!("CPUs {cpus} {what}."));
        }
    }
    let nodes: BTreeSet<_> = before.nodes.keys().chain(after.nodes.keys()).copied().collect();
    for id in nodes {
        match (before.nodes.get(&id), after.nodes.get(&id)) {
            (Some(_), None) => report(format!("Node {id} went offline.")),
            (None, Some(node)) => report(format!("Node {id} came online, with {} of memory.", node.memory)),
            (Some(was), Some(is)) => {
                if was.memory != is.memory {
                    report(format!("Node {id} has {} of memory, it had {}.", is.memory, was.memory));
                }
                for (size, pool) in &is.hugepages {
                    let bytes = |pages: u64| Bytes(pages.saturating_mul(size.0.0));
                    let had = was.hugepages.get(size).map_or(0, |pool| pool.total);
                    if had != pool.total {
                        report(format!(
                            "Node {id} has {} in huge pages of {size}, it had {}.",
                            bytes(pool.total),
                            bytes(had)
                        ));
                    }
                }
            }
            (None, None) => {}
        }
    }
    reports
}

#[cfg(test)]
mod tests {
    use numaward_topology::{CpuId, HugepageSize, NodeId};

    use super::*;

    #[test]
    fn reports_machine_changes() {
        let size = HugepageSize(Bytes::mib(2));
        let machine = || {
            let builder = Machine::builder().nodes(3).cores_per_node(2).memory(Bytes::gib(2));
            builder.hugepages(size, 8).build().unwrap()
        };
        let (before, mut after) = (machine(), machine());
        assert_eq!(changes(&before, &after), []);
        after.cpus.remove(&CpuId(1));
        after.nodes.remove(&NodeId(2));
        let node = after.nodes.get_mut(&NodeId(0)).unwrap();
        node.memory = Bytes::gib(1);
        node.hugepages.get_mut(&size).unwrap().total = 4;
        let reported = |before, after| format!("{:?}", changes(before, after));
        let text = reported(&before, &after);
        for words in [
            "CPUs 1 went offline",
            "Node 0 has 1Gi of memory, it had 2Gi",
            "Node 0 has 8Mi in huge",
            "Node 2 went",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
        let text = reported(&after, &before);
        for words in ["CPUs 1 came online", "Node 2 came online"] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn fingerprint_detects_file_changes() {
        let root = tempfile::tempdir().unwrap();
        let missing = Fingerprint::take(root.path());
        assert_eq!(Fingerprint::take(root.path()), missing);
        for dir in ["proc", "sys/devices/system/cpu"] {
            fs::create_dir_all(root.path().join(dir)).unwrap();
        }
        let put = |file: &str, text: &str| fs::write(root.path().join(file), text).unwrap();
        put("proc/meminfo", "MemTotal: 10 kB\nMemFree: 5 kB\n");
        put("sys/devices/system/cpu/online", "0-3\n");
        let all = Fingerprint::take(root.path());
        assert_ne!(all, missing);
        put("proc/meminfo", "MemTotal: 10 kB\nMemFree: 4 kB\n");
        assert_eq!(Fingerprint::take(root.path()), all, "what is free changes all the time");
        put("sys/devices/system/cpu/online", "0-2\n");
        let fewer = Fingerprint::take(root.path());
        assert_ne!(fewer, all);
        put("proc/meminfo", "MemTotal: 9 kB\n");
        assert_ne!(Fingerprint::take(root.path()), fewer);
    }
}
