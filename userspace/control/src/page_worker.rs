//! The thread that reads the memory of workloads by node and moves pages. Both may block in the kernel for an unlimited time.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    slice,
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupPath,
    read::{self, CgroupNodeMemory},
};
use numaward_enforce::{
    DetachedReads,
    pages::{self, PageMove, PageOutcome, PagesMoved},
};
use numaward_model::health::Heartbeats;
use numaward_topology::{Bytes, NodeId, sysfs};
use tokio_util::sync::CancellationToken;

use crate::worker::Worker;

/// Minimum amount of memory to move or drop.
pub(crate) const MIN_MOVE_SIZE: Bytes = Bytes::mib(2);
/// Divisor for the part of a node's memory that stays free when pages are moved there.
const RESERVED_FRACTION: u64 = 64;

/// Maximum duration of a move with its readings: a process chooses the length of its `numa_maps`, and other workloads wait. An order is
/// for 10 s at the configured rate.
pub(crate) const MAX_MOVE_TIME: Duration = Duration::from_secs(20);

/// Time after which a move counts as hung: a process can keep the kernel from reading its memory. Dropping page cache waits for the disk.
const HANG_TIMEOUT: Duration = Duration::from_mins(2);

/// Time after which the thread counts as hung.
pub(crate) const WORKER_TIMEOUT: Duration = Duration::from_mins(10);

/// User memory by node.
pub(crate) type ByNode = BTreeMap<NodeId, Bytes>;

/// A job of the thread.
#[derive(Debug)]
pub(crate) enum Job {
    /// Read the memory of workloads: names, and the directories of their cgroups.
    Read(Vec<(String, Vec<PathBuf>)>),
    /// Move pages of the workload with this name, of which `cgroup` is the first.
    Move { name: String, cgroup: CgroupPath, order: PageMove },
}

/// The result of a job.
#[derive(Debug)]
pub(crate) enum JobOutcome {
    /// The memory of each workload that could be read, and the duration.
    Read {
        found: BTreeMap<String, ByNode>,
        took: Duration,
    },
    Moved {
        name: String,
        order: PageMove,
        moved: PagesMoved,
    },
}

pub(crate) type PageWorker = Worker<Job, JobOutcome>;

pub(crate) fn start(
    host_root: &Path,
    heartbeats: &Heartbeats,
    stop: &CancellationToken,
) -> io::Result<PageWorker> {
    let (root, ended, detached) = (host_root.to_owned(), stop.clone(), DetachedReads::default());
    Worker::start("pages", WORKER_TIMEOUT, heartbeats, stop, move |job| {
        perform(&root, job, &ended, &detached)
    })
}

fn perform(root: &Path, job: Job, stop: &CancellationToken, detached: &DetachedReads) -> JobOutcome {
    match job {
        Job::Read(workloads) => {
            let started = Instant::now();
            let found =
                workloads.into_iter().filter_map(|(name, dirs)| Some((name, user_memory(&dirs)?))).collect();
            JobOutcome::Read { found, took: started.elapsed() }
        }
        Job::Move { name, cgroup, order } => {
            let (root, stop) = (root.to_owned(), stop.clone());
            let moved = detached_move(detached, &cgroup, &order, HANG_TIMEOUT, move |order| {
                move_or_drop(&root, order, Instant::now() + MAX_MOVE_TIME, &stop)
            });
            JobOutcome::Moved { name, order, moved }
        }
    }
}

/// Returns the function that tells a move to end: after the deadline, and when the daemon ends.
pub(crate) fn is_over(deadline: Instant, stop: &CancellationToken) -> impl Fn() -> bool {
    move || stop.is_cancelled() || Instant::now() >= deadline
}

/// Moves pages of a workload on a thread of its own. Without a result within `timeout`, the pages count as skipped.
pub(crate) fn detached_move(
    detached: &DetachedReads,
    cgroup: &CgroupPath,
    order: &PageMove,
    timeout: Duration,
    perform: impl FnOnce(&PageMove) -> PagesMoved + Send + 'static,
) -> PagesMoved {
    let own = order.clone();
    let dir = order.dirs.first().map_or_else(|| Path::new(""), PathBuf::as_path);
    detached.run(cgroup, dir, timeout, move || perform(&own)).unwrap_or_else(|error| {
        tracing::warn!(%cgroup, %error, "its pages are not moved");
        let mut moved = PagesMoved::default();
        moved.add(PageOutcome::Skipped, order.bytes.0);
        moved
    })
}

/// Returns the memory of each cgroup by node; `None` if a cgroup cannot be read.
fn numa_stat(dirs: &[PathBuf]) -> Option<BTreeMap<NodeId, Vec<CgroupNodeMemory>>> {
    let mut sum: BTreeMap<NodeId, Vec<CgroupNodeMemory>> = BTreeMap::new();
    for dir in dirs {
        for (node, memory) in read::memory_numa_stat(dir).ok()? {
            sum.entry(node).or_default().push(memory);
        }
    }
    Some(sum)
}

fn user_memory(dirs: &[PathBuf]) -> Option<ByNode> {
    let sum = |all: &Vec<CgroupNodeMemory>| all.iter().map(|of| of.user().0).fold(0, u64::saturating_add);
    Some(numa_stat(dirs)?.iter().map(|(node, all)| (*node, Bytes(sum(all)))).collect())
}

/// Returns the amount of unmapped page cache on a node, which can be dropped.
fn loose_cache(dirs: &[PathBuf], node: NodeId) -> Bytes {
    let found = numa_stat(dirs).and_then(|mut found| found.remove(&node)).unwrap_or_default();
    Bytes(found.iter().map(|of| of.unmapped_page_cache().0).fold(0, u64::saturating_add))
}

/// Moves as many pages as the target node has room for until the deadline, and then drops unmapped page cache that was not moved.
fn move_or_drop(root: &Path, order: &PageMove, deadline: Instant, stop: &CancellationToken) -> PagesMoved {
    let proc = root.join("proc");
    let wanted = order.bytes;
    let order = PageMove { bytes: wanted.min(room(root, order.to)), ..order.clone() };
    let mut moved = PagesMoved::default();
    if order.bytes < MIN_MOVE_SIZE {
        moved.add(PageOutcome::NoRoom, wanted.0);
        return moved;
    }
    moved = pages::move_pages(&proc, &order, is_over(deadline, stop));
    let left = Bytes(order.bytes.0.saturating_sub(moved.bytes(PageOutcome::Moved).0));
    let loose = loose_cache(&order.dirs, order.from).min(left);
    if loose < MIN_MOVE_SIZE || stop.is_cancelled() {
        return moved;
    }
    drop_cache(&proc, &order, loose);
    let after = loose_cache(&order.dirs, order.from);
    moved.add(PageOutcome::Reclaimed, loose.0.saturating_sub(after.min(loose).0));
    moved
}

/// Drops an amount of page cache of the cgroups, of each at most its unmapped page cache on the node.
fn drop_cache(proc: &Path, order: &PageMove, mut rest: Bytes) {
    for dir in &order.dirs {
        let bytes = loose_cache(slice::from_ref(dir), order.from).min(rest);
        if bytes.0 == 0 {
            continue;
        }
        rest.0 -= bytes.0;
        if let Err(error) = pages::reclaim(proc, dir, bytes) {
            tracing::debug!(dir = %dir.display(), %error, "page cache cannot be dropped");
        }
    }
}

/// Returns the amount of memory that can be moved to a node: free memory and inactive page cache, minus a reserve.
pub(crate) fn room(root: &Path, node: NodeId) -> Bytes {
    match sysfs::node_memory(root, node) {
        Ok(memory) => {
            let there = memory.free.0.saturating_add(memory.inactive_file.0);
            Bytes(there.saturating_sub(memory.total.0 / RESERVED_FRACTION))
        }
        Err(error) => {
            tracing::warn!(%node, %error, "cannot read the free memory of the node: no pages are moved there");
            Bytes(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        io::Write as _,
        thread,
    };

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn cgroup(root: &Path, name: &str, stat: &str) -> PathBuf {
        let dir = root.join(name);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("memory.numa_stat"), stat).unwrap();
        dir
    }

    #[test]
    fn sums_cgroups_of_a_workload() {
        let root = tempfile::tempdir().unwrap();
        let stat = "anon N0=100 N1=5\nfile N0=40 N1=0\nfile_mapped N0=10 N1=0\nshmem N0=4 N1=0\n";
        let dirs = [cgroup(root.path(), "a", stat), cgroup(root.path(), "b", "anon N0=1 N1=1\n")];
        assert_eq!(user_memory(&dirs), Some([(NodeId(0), Bytes(141)), (NodeId(1), Bytes(6))].into()));
        assert_eq!(loose_cache(&dirs, NodeId(0)), Bytes(30));
        let gone = [dirs[0].clone(), root.path().join("gone")];
        assert_eq!(user_memory(&gone), None, "a partial sum is no result");
    }

    #[test]
    fn drop_is_limited_by_cgroup_cache() {
        let root = tempfile::tempdir().unwrap();
        let dirs = [("a", 30), ("b", 0), ("c", 50), ("d", 50)].map(|(name, loose)| {
            let dir = cgroup(root.path(), name, &format!("anon N0=9 N1=9\nfile N0={loose} N1=70\n"));
            fs::write(dir.join("memory.reclaim"), "").unwrap();
            dir
        });
        let order = PageMove {
            dirs: dirs.to_vec(),
            from: NodeId(0),
            to: NodeId(1),
            bytes: Bytes::mib(64),
            rate: Bytes::mib(64),
            heeds_policy: false,
        };
        drop_cache(&root.path().join("proc"), &order, Bytes(100));
        let written = dirs.map(|dir| fs::read_to_string(dir.join("memory.reclaim")).unwrap());
        assert_eq!(written, ["30 swappiness=0", "", "50 swappiness=0", "20 swappiness=0"]);
    }

    /// Other workloads wait for the thread, so a process with mappings without end must not keep it.
    #[test]
    fn move_ends_at_deadline() {
        let root = tempfile::tempdir().unwrap();
        let (dir, node) = (root.path().join("a"), root.path().join("sys/devices/system/node/node1"));
        // No process has this id.
        let process = root.path().join("proc/2147483000");
        for dir in [&dir, &node, &process] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(node.join("meminfo"), "Node 1 MemTotal: 65536 kB\nNode 1 MemFree: 65536 kB\n").unwrap();
        fs::write(dir.join("cgroup.procs"), "2147483000\n").unwrap();
        fs::write(process.join("maps"), "").unwrap();
        let numa_maps = process.join("numa_maps");
        mknodat(CWD, &numa_maps, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let writer = thread::spawn(move || {
            let mut pipe = File::options().write(true).open(numa_maps).unwrap();
            let start = Instant::now();
            // The reader closes the pipe.
            while start.elapsed() < MAX_MOVE_TIME && pipe.write_all(b"7f00 default N1=1\n").is_ok() {}
            start.elapsed()
        });
        let order = PageMove {
            dirs: vec![dir],
            from: NodeId(0),
            to: NodeId(1),
            bytes: Bytes::mib(4),
            rate: Bytes::mib(64),
            heeds_policy: false,
        };
        let deadline = Instant::now() + Duration::from_millis(200);
        let moved = move_or_drop(root.path(), &order, deadline, &CancellationToken::new());
        assert_eq!(moved.obstacle(), Some(PageOutcome::Skipped));
        assert!(writer.join().unwrap() < MAX_MOVE_TIME);
    }

    /// A process can hold the lock of its memory map for ever; a pipe that nothing writes hangs likewise.
    #[test]
    fn hung_process_delays_no_other_workload() {
        let root = tempfile::tempdir().unwrap();
        let (dir, process) = (root.path().join("a"), root.path().join("proc/2147483000"));
        let node = root.path().join("sys/devices/system/node/node1");
        for dir in [&dir, &node, &process] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(node.join("meminfo"), "Node 1 MemTotal: 65536 kB\nNode 1 MemFree: 65536 kB\n").unwrap();
        fs::write(dir.join("cgroup.procs"), "2147483000\n").unwrap();
        let numa_maps = process.join("numa_maps");
        mknodat(CWD, &numa_maps, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let order = |dirs| PageMove {
            dirs,
            from: NodeId(0),
            to: NodeId(1),
            bytes: Bytes::mib(4),
            rate: Bytes::mib(64),
            heeds_policy: false,
        };
        let detached = DetachedReads::default();
        let moved = |path: &str, order: &PageMove| {
            let root = root.path().to_owned();
            let cgroup = path.parse().unwrap();
            detached_move(&detached, &cgroup, order, Duration::from_millis(200), move |order| {
                move_or_drop(&root, order, Instant::now() + MAX_MOVE_TIME, &CancellationToken::new())
            })
        };
        for _ in 0..2 {
            let hung = moved("/hung", &order(vec![dir.clone()]));
            assert_eq!(hung, PagesMoved([(PageOutcome::Skipped, Bytes::mib(4))].into()));
        }
        assert_eq!(moved("/other", &order(Vec::new())), PagesMoved::default());
        // The thread ends.
        drop(File::options().write(true).open(numa_maps).unwrap());
    }

    #[test]
    fn full_node_gets_no_pages() {
        let root = tempfile::tempdir().unwrap();
        let node = root.path().join("sys/devices/system/node/node1");
        fs::create_dir_all(&node).unwrap();
        let meminfo = |free: u64| {
            let text = format!("Node 1 MemTotal: 65536 kB\nNode 1 MemFree: {free} kB\n");
            fs::write(node.join("meminfo"), text).unwrap();
        };
        meminfo(1024 + 2047);
        let order = PageMove {
            dirs: Vec::new(),
            from: NodeId(0),
            to: NodeId(1),
            bytes: Bytes::mib(64),
            rate: Bytes::mib(64),
            heeds_policy: false,
        };
        let deadline = Instant::now() + MAX_MOVE_TIME;
        let moved = move_or_drop(root.path(), &order, deadline, &CancellationToken::new());
        assert_eq!(moved, PagesMoved([(PageOutcome::NoRoom, Bytes::mib(64))].into()));
        meminfo(1024 + 4096);
        assert_eq!(room(root.path(), NodeId(1)), Bytes::mib(4));
        let moved = move_or_drop(root.path(), &order, deadline, &CancellationToken::new());
        assert_eq!(moved.obstacle(), None);
        assert_eq!(room(root.path(), NodeId(2)), Bytes(0), "unknown");
    }
}
