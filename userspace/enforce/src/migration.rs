//! Moving pages: what a write to `cpuset.mems` does besides setting the knob.
//!
//! cgroup v2 moves the pages of a cgroup's processes to the new nodes before the write returns, however long
//! that takes. The knob holds from the start of the write, so the caller waits for the pages only so long,
//! and a thread goes on waiting. What moved is read from `memory.numa_stat` before and after; the kernel's
//! counters lag by up to some 64 pages a CPU.
//!
//! The kernel moves pages from the nodes that it has noted for a cpuset. Where it makes the cpusets of several cgroups at
//! once, as it does when the controller is turned on for what is in a slice, it notes them for one of these cgroups only
//! (`cpuset_attach`): the first write to `cpuset.mems` of another moves nothing. Each write that changes
//! something notes them, so [`stayed`] says when to widen the set and write it once more.
//!
//! Before Linux 5.15 a write to `cpuset.mems` moves nothing in cgroup v2. There nearly everything stays, and
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

/// What a write to `cpuset.mems` moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    /// The nodes that the cgroup may use now.
    pub nodes: NodeSet,
    /// User memory (`anon` and `file`) by node before the write.
    pub before: MemoryByNode,
    /// The same afterwards.
    pub after: MemoryByNode,
    /// How long the write took.
    pub took: Duration,
}

impl Migration {
    /// User memory that was outside the nodes and is no longer: moved, or freed meanwhile.
    pub fn moved(&self) -> Bytes {
        Bytes(outside(&self.before, &self.nodes).0.saturating_sub(self.left().0))
    }

    /// User memory that is still outside the nodes: the kernel could not move it.
    pub fn left(&self) -> Bytes {
        outside(&self.after, &self.nodes)
    }
}

/// Nodes outside of `nodes` that hold memory.
pub(super) fn left_on(resident: &MemoryByNode, nodes: &NodeSet) -> NodeSet {
    let holds = |(node, bytes): (&NodeId, &Bytes)| (bytes.0 > 0 && !nodes.contains(*node)).then_some(*node);
    resident.iter().filter_map(holds).collect()
}

/// Whether a write has moved next to nothing of what was outside the nodes.
pub(super) fn stayed(before: &MemoryByNode, after: &MemoryByNode, nodes: &NodeSet) -> bool {
    let (before, after) = (outside(before, nodes).0, outside(after, nodes).0);
    before > 0 && after >= before - before / 8
}

fn outside(resident: &MemoryByNode, nodes: &NodeSet) -> Bytes {
    Bytes(resident.iter().filter(|(node, _)| !nodes.contains(**node)).map(|(_, bytes)| bytes.0).sum())
}

/// A migration that was begun.
#[derive(Debug)]
pub enum MigrationState {
    /// All is said.
    Done(Migration),
    /// The knob holds, the pages are still being moved. The result comes here.
    Running(Receiver<Result<Migration, KnobError>>),
}

/// Runs `write`, which makes `cpuset.mems` of the cgroup with this directory hold `nodes`, and waits at most
/// `wait` for the pages to follow. What was moved is what was outside `before`, where an earlier write may have moved
/// some, or else now.
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
            // A cgroup without the memory controller moves pages all the same, uncounted.
            let before = before.unwrap_or_else(|| resident(&dir));
            let started = Instant::now();
            let written = write();
            let took = started.elapsed();
            // Nobody waits any more where the daemon is ending.
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

/// User memory of a cgroup and its descendants by node; empty where it cannot be known.
pub(super) fn resident(dir: &Path) -> MemoryByNode {
    let nodes = read::memory_numa_stat(dir).unwrap_or_default();
    nodes.into_iter().map(|(node, memory)| (node, Bytes(memory.anon.0 + memory.file.0))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_is_nearly_all_of_what_is_outside() {
        let resident =
            |outside: u64| MemoryByNode::from([(NodeId(0), Bytes(outside)), (NodeId(1), Bytes(99))]);
        let stayed = |before, after| stayed(&resident(before), &resident(after), &"1".parse().unwrap());
        assert!(stayed(800, 800) && stayed(800, 700) && stayed(800, 900) && stayed(1, 1));
        assert!(!stayed(800, 699) && !stayed(800, 0) && !stayed(0, 0) && !stayed(0, 1));
    }

    #[test]
    fn memory_is_left_on_nodes_that_hold_some() {
        let resident =
            MemoryByNode::from([(NodeId(0), Bytes(0)), (NodeId(1), Bytes(9)), (NodeId(2), Bytes(9))]);
        assert_eq!(left_on(&resident, &"2-3".parse().unwrap()).to_string(), "1");
    }

    #[test]
    fn what_an_earlier_write_has_moved_counts() {
        let dir = tempfile::tempdir().unwrap();
        // It followed before anybody looked.
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
    fn what_is_outside_the_nodes_counts() {
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
    fn a_slow_write_is_not_waited_for() {
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
