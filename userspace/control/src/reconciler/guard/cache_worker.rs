//! The thread that drops page cache: that takes as long as the disk does.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_cgroup::{CgroupId, CgroupPath, ReadError, read};
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
    /// What came of the last time.
    pub(super) last: Option<Dropped>,
}

/// Page cache that was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dropped {
    /// How much less the node has.
    pub(super) bytes: Bytes,
    /// How much of all nodes was asked for.
    pub(super) asked: Bytes,
    /// What of the cgroup's page cache has been read again, up to then, that was dropped before.
    pub(super) refaulted: Bytes,
}

/// What came of it: nothing was done where most of what was dropped the last time has been read again.
pub(super) type Outcome = io::Result<Option<Dropped>>;

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
/// nodes goes in proportion.
fn drop_on(proc: &Path, order: &CacheDrop) -> Outcome {
    let dir = order.dir.as_path();
    let on = |of: &BTreeMap<NodeId, u64>| of.get(&order.node).copied().unwrap_or(0);
    let again = refaulted(dir).map_err(io::Error::other)?;
    let is_used = |last: Dropped| again.0.saturating_sub(last.refaulted.0) > last.asked.0 / 2;
    if order.last.is_some_and(is_used) {
        return Ok(None);
    }
    let before = loose(dir).map_err(io::Error::other)?;
    let all = before.values().copied().fold(0, u64::saturating_add);
    let share = u128::from(order.bytes.0) * u128::from(all) / u128::from(on(&before).max(1));
    let asked = Bytes(u64::try_from(share).unwrap_or(u64::MAX).min(all));
    pages::reclaim(proc, dir, asked)?;
    let after = loose(dir).map_err(io::Error::other)?;
    let bytes = Bytes(on(&before).saturating_sub(on(&after)));
    Ok(Some(Dropped { bytes, asked, refaulted: refaulted(dir).map_err(io::Error::other)? }))
}

/// Page cache that was dropped and has been read again, since the cgroup was made.
fn refaulted(dir: &Path) -> Result<Bytes, ReadError> {
    let page = rustix::param::page_size() as u64;
    Ok(Bytes(read::file_refaults(dir)?.saturating_mul(page)))
}

/// Page cache that nobody maps, by node.
fn loose(dir: &Path) -> Result<BTreeMap<NodeId, u64>, ReadError> {
    let read = read::memory_numa_stat(dir)?;
    Ok(read.iter().map(|(node, of)| (*node, of.loose_cache().0)).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn as_much_goes_as_is_to_go_on_the_node_unless_it_is_read_again() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        let stat =
            format!("anon N0={MIB} N1={MIB}\nfile N0={} N1={}\nshmem N0={MIB} N1=0\n", 5 * MIB, 12 * MIB);
        fs::write(dir.join("memory.numa_stat"), stat).unwrap();
        let refaults = |pages: u64| {
            fs::write(dir.join("memory.stat"), format!("anon 5\nworkingset_refault_file {pages}\n")).unwrap();
        };
        let mut order = CacheDrop {
            cgroup: CgroupPath::root(),
            id: CgroupId(1),
            dir: dir.to_owned(),
            node: NodeId(1),
            bytes: Bytes::mib(6),
            last: None,
        };
        let mut asked = || {
            fs::write(dir.join("memory.reclaim"), "").unwrap();
            order.last = drop_on(&dir.join("proc"), &order).unwrap();
            (fs::read_to_string(dir.join("memory.reclaim")).unwrap(), order.last)
        };
        refaults(100);
        let page = rustix::param::page_size() as u64;
        // Of 16 MiB, 12 are on the node: for 6 of these, 8 have to go. The made-up files do not change.
        let dropped = Dropped { bytes: Bytes(0), asked: Bytes::mib(8), refaulted: Bytes(100 * page) };
        assert_eq!(asked(), (format!("{} swappiness=0", 8 * MIB), Some(dropped)));
        refaults(100 + 4 * MIB / page);
        assert!(asked().1.is_some(), "half of it was read again");
        refaults(101 + 8 * MIB / page);
        assert_eq!(asked(), (String::new(), None), "more than half of it was read again");
        assert!(asked().1.is_some(), "it begins anew");
        fs::remove_file(dir.join("memory.stat")).unwrap();
        assert!(drop_on(&dir.join("proc"), &order).is_err());
    }
}
