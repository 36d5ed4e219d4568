//! Migration of pages by a write to `cpuset.mems`.
//!
//! cgroup v2 moves the pages of a cgroup's processes to the new nodes before the write returns, however long this
//! takes. The new set is in effect from the start of the write, so the caller waits for a limited time and a thread
//! continues to wait. The amount of moved memory is read from `memory.numa_stat` before and after; the kernel's
//! counters lag by up to about 64 pages per CPU.
//!
//! The kernel moves pages from the nodes that it has noted for a cpuset. If it creates the cpusets of several cgroups
//! at once, as when the controller is enabled in a slice, it notes them for one of these cgroups only
//! (`cpuset_attach`): the first write to `cpuset.mems` of another one moves nothing. Each write that changes the set
//! notes the nodes. If memory [`stayed`], the set is therefore widened and written once more.
//!
//! Before Linux 5.15, a write to `cpuset.mems` moves nothing in cgroup v2. Almost all memory stays then, and
//! `migrate_pages(2)` moves it, process by process.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use numaward_cgroup::{knob::KnobError, read};
use numaward_topology::{Bytes, NodeId, NodeSet};

use super::{EnforceError, writers::Writers};

/// User memory by node.
pub type MemoryByNode = BTreeMap<NodeId, Bytes>;

/// Result of a write to `cpuset.mems`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Nodes that the cgroup may use now.
    pub nodes: NodeSet,
    /// User memory (`anon` and `file`) by node before the write.
    pub before: MemoryByNode,
    /// User memory by node after the write.
    pub after: MemoryByNode,
    /// Duration of the write.
    pub took: Duration,
}

impl Migration {
    /// Returns the user memory that was outside the nodes and is no longer: moved, or freed meanwhile.
    pub fn moved(&self) -> Bytes {
        Bytes(outside(&self.before, &self.nodes).0.saturating_sub(self.left().0))
    }

    /// Returns the user memory that is still outside the nodes because the kernel could not move it.
    pub fn left(&self) -> Bytes {
        outside(&self.after, &self.nodes)
    }
}

/// Returns the nodes outside `nodes` that hold memory.
pub(super) fn left_on(resident: &MemoryByNode, nodes: &NodeSet) -> NodeSet {
    let holds = |(node, bytes): (&NodeId, &Bytes)| (bytes.0 > 0 && !nodes.contains(*node)).then_some(*node);
    resident.iter().filter_map(holds).collect()
}

/// Returns whether almost all memory outside the nodes is still there after a write.
pub(super) fn stayed(before: &MemoryByNode, after: &MemoryByNode, nodes: &NodeSet) -> bool {
    let (before, after) = (outside(before, nodes).0, outside(after, nodes).0);
    before > 0 && after >= before - before / 8
}

fn outside(resident: &MemoryByNode, nodes: &NodeSet) -> Bytes {
    Bytes(resident.iter().filter(|(node, _)| !nodes.contains(**node)).map(|(_, bytes)| bytes.0).sum())
}

/// State of a migration.
#[derive(Debug)]
pub enum MigrationState {
    /// The migration has ended.
    Done(Migration),
    /// The new set is in effect, and pages are still being moved. The channel delivers the result.
    Running(Receiver<Result<Migration, KnobError>>),
}

/// Runs `write`, which writes `nodes` to `cpuset.mems` of the cgroup with this directory, and waits at most `wait` for
/// the pages to follow. `before` is the memory before an earlier write that may have moved some; by default, it is read
/// now.
pub(super) fn migrate(
    writers: &Writers,
    dir: &Path,
    nodes: NodeSet,
    before: Option<MemoryByNode>,
    wait: Duration,
    write: impl FnOnce() -> Result<(), KnobError> + Send + 'static,
) -> Result<MigrationState, EnforceError> {
    let (sender, receiver) = mpsc::channel();
    let dir: PathBuf = dir.to_owned();
    writers
        .run(move || {
            // A cgroup without the memory controller has no counters, but its pages move too.
            let before = before.unwrap_or_else(|| resident(&dir));
            let started = Instant::now();
            let written = write();
            let took = started.elapsed();
            // The receiver is gone while the daemon is ending.
            let _ = sender.send(written.map(|()| Migration { nodes, before, after: resident(&dir), took }));
        })
        .map_err(EnforceError::Thread)?;
    match receiver.recv_timeout(wait) {
        Ok(result) => Ok(MigrationState::Done(result?)),
        Err(RecvTimeoutError::Timeout) => Ok(MigrationState::Running(receiver)),
        Err(RecvTimeoutError::Disconnected) => {
            Err(EnforceError::Thread(std::io::Error::other("the thread that writes cpuset.mems panicked")))
        }
    }
}

/// Returns the user memory of a cgroup and its descendants by node; empty if it cannot be read.
pub(super) fn resident(dir: &Path) -> MemoryByNode {
    let nodes = read::memory_numa_stat(dir).unwrap_or_default();
    nodes.into_iter().map(|(node, memory)| (node, Bytes(memory.anon.0 + memory.file.0))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_memory_that_stayed() {
        let resident =
            |outside: u64| MemoryByNode::from([(NodeId(0), Bytes(outside)), (NodeId(1), Bytes(99))]);
        let stayed = |before, after| stayed(&resident(before), &resident(after), &"1".parse().unwrap());
        assert!(stayed(800, 800) && stayed(800, 700) && stayed(800, 900) && stayed(1, 1));
        assert!(!stayed(800, 699) && !stayed(800, 0) && !stayed(0, 0) && !stayed(0, 1));
    }

    #[test]
    fn finds_nodes_with_remaining_memory() {
        let resident =
            MemoryByNode::from([(NodeId(0), Bytes(0)), (NodeId(1), Bytes(9)), (NodeId(2), Bytes(9))]);
        assert_eq!(left_on(&resident, &"2-3".parse().unwrap()).to_string(), "1");
    }

    #[test]
    fn counts_pages_of_earlier_write() {
        let dir = tempfile::tempdir().unwrap();
        // The pages moved before the memory was read.
        std::fs::write(dir.path().join("memory.numa_stat"), "anon N0=8192 N1=0\nfile N0=0 N1=4096\n")
            .unwrap();
        let before = MemoryByNode::from([(NodeId(0), Bytes(0)), (NodeId(1), Bytes(12288))]);
        let writers = Writers::default();
        let moved = |before| {
            let moving = migrate(
                &writers,
                dir.path(),
                "0".parse().unwrap(),
                before,
                Duration::from_mins(1),
                || Ok(()),
            );
            let MigrationState::Done(migration) = moving.unwrap() else { panic!("it waits") };
            (migration.moved(), migration.left())
        };
        assert_eq!(moved(Some(before)), (Bytes(8192), Bytes(4096)));
        assert_eq!(moved(None), (Bytes(0), Bytes(4096)));
    }

    #[test]
    fn user_memory_is_anon_and_file() {
        let dir = tempfile::tempdir().unwrap();
        let text = "anon N0=4096 N1=8192\nfile N0=4096 N1=0\nkernel_stack N0=99 N1=99\nshmem N0=4096 N1=0\n";
        std::fs::write(dir.path().join("memory.numa_stat"), text).unwrap();
        assert_eq!(resident(dir.path()), [(NodeId(0), Bytes(8192)), (NodeId(1), Bytes(8192))].into());
    }

    #[test]
    fn moved_counts_memory_outside_nodes() {
        let resident = |n0, n1| [(NodeId(0), Bytes(n0)), (NodeId(1), Bytes(n1))].into();
        let migration = Migration {
            nodes: "0".parse().unwrap(),
            before: resident(10, 100),
            after: resident(90, 20),
            took: Duration::ZERO,
        };
        assert_eq!((migration.moved(), migration.left()), (Bytes(80), Bytes(20)));
    }

    #[test]
    fn slow_write_returns_running() {
        let dir = tempfile::tempdir().unwrap();
        let (go, wait_for_go) = mpsc::channel::<()>();
        let (writers, nodes) = (Writers::default(), "1".parse().unwrap());
        let moving = migrate(&writers, dir.path(), nodes, None, Duration::from_millis(20), move || {
            wait_for_go.recv().unwrap();
            Ok(())
        });
        let Ok(MigrationState::Running(result)) = moving else { panic!("{moving:?}") };
        go.send(()).unwrap();
        let migration = result.recv().unwrap().unwrap();
        assert_eq!(migration.nodes.to_string(), "1");
    }
}
