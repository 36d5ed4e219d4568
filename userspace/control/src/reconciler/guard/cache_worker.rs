//! The thread that drops page cache: that takes as long as the disk does.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_cgroup::{
    CgroupId, CgroupPath, ReadError,
    knob::{Knob, KnobValue, Limit},
    read::{self, CgroupNodeMemory},
};
use numaward_enforce::pages;
use numaward_model::health::Heartbeats;
use numaward_topology::{Bytes, NodeId};
use tokio_util::sync::CancellationToken;

use crate::worker::Worker;

/// How long one call to the kernel may take before the thread counts as hung.
const LIMIT: Duration = Duration::from_mins(10);

/// Page cache to be dropped.
#[derive(Debug)]
pub(super) struct CacheDrop {
    /// Whose it is.
    pub(super) cgroup: CgroupPath,
    /// Which cgroup of that path.
    pub(super) id: CgroupId,
    pub(super) dir: PathBuf,
    pub(super) node: NodeId,
    /// How much of the node.
    pub(super) bytes: Bytes,
    /// How much of all nodes, at most.
    pub(super) most: Bytes,
    /// What came of the last time.
    pub(super) last: Option<Dropped>,
}

/// Page cache that was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dropped {
    /// How much less the node has.
    pub(super) bytes: Bytes,
    /// How much less all nodes have.
    pub(super) all: Bytes,
    /// What of the cgroup's page cache has been read again, up to then, that was dropped before.
    pub(super) refaulted: Bytes,
}

/// Nothing was dropped.
#[derive(Debug, thiserror::Error)]
pub(super) enum DropError {
    /// It is not known what there is.
    #[error(transparent)]
    Unknown(#[from] ReadError),
    /// The kernel does not.
    #[error("memory.reclaim: {0}")]
    Refused(#[source] io::Error),
}

/// What came of it: nothing was done where most of what was dropped the last time has been read again.
pub(super) type Outcome = Result<Option<Dropped>, DropError>;

/// Gives orders to the thread.
pub(super) type CacheWorker = Worker<CacheDrop, (CacheDrop, Outcome)>;

/// Starts the thread.
pub(super) fn start(
    host_root: &Path,
    heartbeats: &Heartbeats,
    stop: &CancellationToken,
) -> io::Result<CacheWorker> {
    let proc = host_root.join("proc");
    let perform = move |order: CacheDrop| {
        let outcome = drop_on(&proc, &order);
        (order, outcome)
    };
    Worker::start("page_cache", LIMIT, heartbeats, stop, perform)
}

/// Drops page cache of a cgroup until a node has so much less of it. The kernel takes no node for that, so as much of the other
/// nodes goes in proportion. What is protected from reclaim stays: the kernel does not heed that of the cgroup it is asked about.
fn drop_on(proc: &Path, order: &CacheDrop) -> Outcome {
    let dir = order.dir.as_path();
    let again = refaulted(dir)?;
    let is_used = |last: Dropped| again.0.saturating_sub(last.refaulted.0) > last.all.0 / 2;
    if order.last.is_some_and(is_used) {
        return Ok(None);
    }
    let before = read::memory_numa_stat(dir)?;
    let loose = |of: &CgroupNodeMemory| of.unmapped_page_cache().0;
    let on = before.get(&order.node).map_or(0, loose);
    let all = before.values().map(loose).fold(0, u64::saturating_add);
    let share = u128::from(order.bytes.0) * u128::from(all) / u128::from(on.max(1));
    let share = u64::try_from(share).unwrap_or(u64::MAX);
    let asked = Bytes(share.min(all).min(order.most.0).min(unprotected(dir)?.0));
    if asked.0 > 0 {
        pages::reclaim(proc, dir, asked).map_err(DropError::Refused)?;
    }
    let after = read::memory_numa_stat(dir)?;
    let cache =
        |of: &BTreeMap<NodeId, CgroupNodeMemory>, node| of.get(&node).map_or(0, |of| of.page_cache().0);
    let less = |node| cache(&before, node).saturating_sub(cache(&after, node));
    let all = before.keys().map(|node| less(*node)).fold(0, u64::saturating_add);
    Ok(Some(Dropped { bytes: Bytes(less(order.node)), all: Bytes(all), refaulted: refaulted(dir)? }))
}

/// Page cache that was dropped and has been read again, since the cgroup was made.
fn refaulted(dir: &Path) -> Result<Bytes, ReadError> {
    let page = rustix::param::page_size() as u64;
    Ok(Bytes(read::file_refaults(dir)?.saturating_mul(page)))
}

/// What a cgroup has beyond the protection that somebody gave it (`memory.min`, `memory.low`).
fn unprotected(dir: &Path) -> Result<Bytes, ReadError> {
    let protected = [Knob::MemoryMin, Knob::MemoryLow].map(|knob| match knob.read(dir) {
        Ok(KnobValue::Limit(Limit::Bytes(bytes))) => bytes.0,
        Ok(KnobValue::Limit(Limit::Max)) => u64::MAX,
        // A kernel without it gives none.
        _ => 0,
    });
    let protected = protected.into_iter().max().unwrap_or_default();
    Ok(Bytes(read::memory_current(dir)?.0.saturating_sub(protected)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn as_much_goes_as_is_to_go_on_the_node_unless_it_is_read_again_or_protected() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        let write = |file: &str, text: String| fs::write(dir.join(file), text).unwrap();
        write(
            "memory.numa_stat",
            format!("anon N0=0 N1=0\nfile N0={} N1={}\nshmem N0={MIB} N1=0\n", 5 * MIB, 12 * MIB),
        );
        write("memory.current", format!("{}\n", 40 * MIB));
        let refaults = |pages: u64| write("memory.stat", format!("workingset_refault_file {pages}\n"));
        let mut order = CacheDrop {
            cgroup: CgroupPath::root(),
            id: CgroupId(1),
            dir: dir.to_owned(),
            node: NodeId(1),
            bytes: Bytes::mib(6),
            most: Bytes::mib(9),
            last: None,
        };
        let asked = |order: &CacheDrop| {
            write("memory.reclaim", String::new());
            let outcome = drop_on(&dir.join("proc"), order).unwrap();
            (fs::read_to_string(dir.join("memory.reclaim")).unwrap(), outcome)
        };
        let swappiness = |mib: u64| format!("{} swappiness=0", mib * MIB);
        refaults(100);
        let page = rustix::param::page_size() as u64;
        // Of 16 MiB, 12 are on the node: for 6 of these, 8 have to go. The made-up files do not change.
        let nothing = Dropped { bytes: Bytes(0), all: Bytes(0), refaulted: Bytes(100 * page) };
        assert_eq!(asked(&order), (swappiness(8), Some(nothing)));
        order.bytes = Bytes::mib(12);
        assert_eq!(asked(&order).0, swappiness(9), "no more at once");
        order.last = Some(Dropped { all: Bytes::mib(8), ..nothing });
        refaults(100 + 4 * MIB / page);
        assert!(asked(&order).1.is_some(), "half of it was read again");
        refaults(101 + 4 * MIB / page);
        assert_eq!(asked(&order), (String::new(), None), "more than half of it was read again");
        order.last = None;
        for (file, protected, expected) in
            [("memory.low", "38", swappiness(2)), ("memory.min", "max", String::new())]
        {
            let bytes = protected.parse::<u64>().map_or("max".to_owned(), |mib| (mib * MIB).to_string());
            write(file, format!("{bytes}\n"));
            assert_eq!(asked(&order).0, expected, "{file}");
        }
        fs::remove_file(dir.join("memory.stat")).unwrap();
        assert!(matches!(drop_on(&dir.join("proc"), &order), Err(DropError::Unknown(_))));
    }

    #[test]
    fn a_kernel_that_refuses_is_told_from_what_cannot_be_read() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        for (file, text) in [
            ("memory.numa_stat", "anon N0=0\nfile N0=8388608\n"),
            ("memory.current", "8388608\n"),
            ("memory.stat", "workingset_refault_file 0\n"),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
        let (cgroup, id, dir) = (CgroupPath::root(), CgroupId(1), dir.to_owned());
        let (bytes, most) = (Bytes::mib(1), Bytes::mib(1));
        let order = CacheDrop { cgroup, id, dir, node: NodeId(0), bytes, most, last: None };
        let refused = drop_on(root.path(), &order);
        assert!(
            matches!(&refused, Err(DropError::Refused(of)) if of.kind() == io::ErrorKind::NotFound),
            "{refused:?}"
        );
    }
}
