//! Thread that drops page cache on a node. A separate thread, because writing `memory.reclaim` may wait for the disk.

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

/// Time for one write to `memory.reclaim`, after which the thread counts as hung.
const RECLAIM_TIMEOUT: Duration = Duration::from_mins(10);

/// Order to drop page cache of a cgroup.
#[derive(Debug)]
pub(super) struct CacheDropOrder {
    pub(super) cgroup: CgroupPath,
    /// Id of the cgroup, which distinguishes it from earlier cgroups at the path.
    pub(super) id: CgroupId,
    pub(super) dir: PathBuf,
    pub(super) node: NodeId,
    /// Bytes to drop on the node.
    pub(super) bytes: Bytes,
    /// Maximum bytes to drop on all nodes.
    pub(super) max_total: Bytes,
    /// Result of the previous order for this cgroup.
    pub(super) previous: Option<DroppedCache>,
}

/// Page cache that an order dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DroppedCache {
    /// Decrease on the node of the order.
    pub(super) on_node: Bytes,
    /// Decrease on all nodes.
    pub(super) total: Bytes,
    /// Counter of refaults afterwards: page cache of the cgroup that was read again after it had been dropped, in bytes since
    /// the cgroup was created.
    pub(super) refaulted: Bytes,
}

/// Error of an order.
#[derive(Debug, thiserror::Error)]
pub(super) enum DropError {
    /// The usage or the protection of the cgroup cannot be read.
    #[error(transparent)]
    Unreadable(#[from] ReadError),
    /// The kernel refused the write.
    #[error("memory.reclaim: {0}")]
    Refused(#[source] io::Error),
}

/// Result of an order. `Ok(None)` if nothing was dropped because the workload has read most of the previously dropped page
/// cache again.
pub(super) type DropResult = Result<Option<DroppedCache>, DropError>;

pub(super) type CacheWorker = Worker<CacheDropOrder, (CacheDropOrder, DropResult)>;

pub(super) fn start(
    host_root: &Path,
    heartbeats: &Heartbeats,
    stop: &CancellationToken,
) -> io::Result<CacheWorker> {
    let proc = host_root.join("proc");
    let perform = move |order: CacheDropOrder| {
        let result = drop_cache(&proc, &order);
        (order, result)
    };
    Worker::start("page_cache", RECLAIM_TIMEOUT, heartbeats, stop, perform)
}

/// Drops page cache of a cgroup until the node has the requested bytes less of it. `memory.reclaim` takes no node, so page
/// cache of the other nodes is dropped in proportion. Memory that `memory.min` and `memory.low` of the cgroup protect is
/// kept here, because the kernel ignores the protection of the cgroup to which `memory.reclaim` belongs.
fn drop_cache(proc: &Path, order: &CacheDropOrder) -> DropResult {
    let dir = order.dir.as_path();
    let refaulted_before = refaulted(dir)?;
    let is_used = |previous: DroppedCache| {
        refaulted_before.0.saturating_sub(previous.refaulted.0) > previous.total.0 / 2
    };
    if order.previous.is_some_and(is_used) {
        return Ok(None);
    }
    let before = read::memory_numa_stat(dir)?;
    let unmapped = |of: &CgroupNodeMemory| of.unmapped_page_cache().0;
    let on_node = before.get(&order.node).map_or(0, unmapped);
    let total = before.values().map(unmapped).fold(0, u64::saturating_add);
    let proportional = u128::from(order.bytes.0) * u128::from(total) / u128::from(on_node.max(1));
    let proportional = u64::try_from(proportional).unwrap_or(u64::MAX);
    let requested = Bytes(proportional.min(total).min(order.max_total.0).min(unprotected(dir)?.0));
    if requested.0 > 0 {
        pages::reclaim(proc, dir, requested).map_err(DropError::Refused)?;
    }
    let after = read::memory_numa_stat(dir)?;
    let cache =
        |of: &BTreeMap<NodeId, CgroupNodeMemory>, node| of.get(&node).map_or(0, |of| of.page_cache().0);
    let decrease = |node| cache(&before, node).saturating_sub(cache(&after, node));
    let total = before.keys().map(|node| decrease(*node)).fold(0, u64::saturating_add);
    Ok(Some(DroppedCache {
        on_node: Bytes(decrease(order.node)),
        total: Bytes(total),
        refaulted: refaulted(dir)?,
    }))
}

/// Returns the page cache that was read again after it had been dropped, since the cgroup was created.
fn refaulted(dir: &Path) -> Result<Bytes, ReadError> {
    let page = rustix::param::page_size() as u64;
    Ok(Bytes(read::file_refaults(dir)?.saturating_mul(page)))
}

/// Returns the memory of a cgroup beyond its protection (`memory.min`, `memory.low`).
fn unprotected(dir: &Path) -> Result<Bytes, ReadError> {
    let protected = [Knob::MemoryMin, Knob::MemoryLow].map(|knob| match knob.read(dir) {
        Ok(KnobValue::Limit(Limit::Bytes(bytes))) => bytes.0,
        Ok(KnobValue::Limit(Limit::Max)) => u64::MAX,
        // A kernel without the file does not protect the cgroup.
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
    fn drops_unused_unprotected_cache() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        let write = |file: &str, text: String| fs::write(dir.join(file), text).unwrap();
        write(
            "memory.numa_stat",
            format!("anon N0=0 N1=0\nfile N0={} N1={}\nshmem N0={MIB} N1=0\n", 5 * MIB, 12 * MIB),
        );
        write("memory.current", format!("{}\n", 40 * MIB));
        let refaults = |pages: u64| write("memory.stat", format!("workingset_refault_file {pages}\n"));
        let mut order = CacheDropOrder {
            cgroup: CgroupPath::root(),
            id: CgroupId(1),
            dir: dir.to_owned(),
            node: NodeId(1),
            bytes: Bytes::mib(6),
            max_total: Bytes::mib(9),
            previous: None,
        };
        let execute = |order: &CacheDropOrder| {
            write("memory.reclaim", String::new());
            let dropped = drop_cache(&dir.join("proc"), order).unwrap();
            (fs::read_to_string(dir.join("memory.reclaim")).unwrap(), dropped)
        };
        let swappiness = |mib: u64| format!("{} swappiness=0", mib * MIB);
        refaults(100);
        let page = rustix::param::page_size() as u64;
        // 12 of 16 MiB are on the node, so 6 of them need a request for 8. The fake files do not change.
        let nothing = DroppedCache { on_node: Bytes(0), total: Bytes(0), refaulted: Bytes(100 * page) };
        assert_eq!(execute(&order), (swappiness(8), Some(nothing)));
        order.bytes = Bytes::mib(12);
        assert_eq!(execute(&order).0, swappiness(9), "limited by max_total");
        order.previous = Some(DroppedCache { total: Bytes::mib(8), ..nothing });
        refaults(100 + 4 * MIB / page);
        assert!(execute(&order).1.is_some(), "half of it was read again");
        refaults(101 + 4 * MIB / page);
        assert_eq!(execute(&order), (String::new(), None), "more than half of it was read again");
        order.previous = None;
        for (file, protected, expected) in
            [("memory.low", "38", swappiness(2)), ("memory.min", "max", String::new())]
        {
            let bytes = protected.parse::<u64>().map_or("max".to_owned(), |mib| (mib * MIB).to_string());
            write(file, format!("{bytes}\n"));
            assert_eq!(execute(&order).0, expected, "{file}");
        }
        fs::remove_file(dir.join("memory.stat")).unwrap();
        assert!(matches!(drop_cache(&dir.join("proc"), &order), Err(DropError::Unreadable(_))));
    }

    #[test]
    fn distinguishes_refusal_from_read_error() {
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
        let (bytes, max_total) = (Bytes::mib(1), Bytes::mib(1));
        let order = CacheDropOrder { cgroup, id, dir, node: NodeId(0), bytes, max_total, previous: None };
        let refused = drop_cache(root.path(), &order);
        assert!(
            matches!(&refused, Err(DropError::Refused(of)) if of.kind() == io::ErrorKind::NotFound),
            "{refused:?}"
        );
    }
}
