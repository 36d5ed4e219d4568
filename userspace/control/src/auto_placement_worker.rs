//! The thread that reads the usage of workloads without a guarantee and moves their pages: both may block in the kernel.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupId, CgroupPath, Hierarchy, read};
use numaward_config::home::Home;
use numaward_enforce::{
    DetachedReads,
    pages::{self, PageMove, PageOutcome, PagesMoved},
};
use numaward_model::{
    accesses::{Accesses, WorkloadAccesses},
    health::{self, Heartbeats},
    port::ObservedHost,
};
use numaward_topology::{Bytes, NodeId};
use tokio_util::sync::CancellationToken;

use crate::{
    page_worker::{ByNode, MAX_MOVE_TIME, MIN_MOVE_SIZE, WORKER_TIMEOUT, detached_move, is_over, room},
    worker::Worker,
};

/// Time after which a move counts as hung: a process can keep the kernel from reading its memory.
const HANG_TIMEOUT: Duration = Duration::from_mins(1);

/// A job of the thread.
#[derive(Debug)]
pub(crate) enum Job {
    /// Read all workloads, and the free memory of these nodes.
    Survey(Vec<NodeId>),
    /// Move pages of this workload.
    Move(CgroupPath, PageMove),
}

/// The result of a job.
#[derive(Debug)]
pub(crate) enum JobOutcome {
    Surveyed(Survey),
    Moved { cgroup: CgroupPath, order: PageMove, moved: PagesMoved },
}

/// The readings of one round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Survey {
    /// The workloads whose accesses are counted and whose files could be read.
    pub(crate) workloads: Vec<Reading>,
    /// Free memory of each node.
    pub(crate) room: ByNode,
    /// Duration of the round.
    pub(crate) took: Duration,
}

/// The counters of a workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) cgroup: CgroupPath,
    /// The identity of the cgroup: a new cgroup may have the same path.
    pub(crate) id: CgroupId,
    /// Time of the reading.
    pub(crate) at: Instant,
    pub(crate) accesses: Accesses,
    pub(crate) resident: ByNode,
    pub(crate) cpu: Duration,
}

pub(crate) type AutoPlacementWorker = Worker<Job, JobOutcome>;

/// The sources of the readings.
pub(crate) struct Sources {
    pub(crate) host_root: PathBuf,
    pub(crate) hierarchy: Hierarchy,
    pub(crate) host: Arc<dyn ObservedHost>,
    /// The configuration, which selects the eligible workloads.
    pub(crate) config: Home,
}

pub(crate) fn start(
    sources: Sources,
    heartbeats: &Heartbeats,
    stop: &CancellationToken,
) -> io::Result<AutoPlacementWorker> {
    let (ended, detached) = (stop.clone(), DetachedReads::default());
    Worker::start("homes", WORKER_TIMEOUT, heartbeats, stop, move |job| match job {
        Job::Survey(nodes) => JobOutcome::Surveyed(sources.survey(&nodes)),
        Job::Move(cgroup, order) => {
            let (root, ended) = (sources.host_root.clone(), ended.clone());
            let moved = detached_move(&detached, &cgroup, &order, HANG_TIMEOUT, move |order| {
                move_pages(&root, order, &ended)
            });
            JobOutcome::Moved { cgroup, order, moved }
        }
    })
}

impl Sources {
    pub(crate) fn survey(&self, nodes: &[NodeId]) -> Survey {
        let started = Instant::now();
        let workloads = self.host.accesses().into_iter().filter_map(|of| self.read(of)).collect();
        let room = nodes.iter().map(|node| (*node, room(&self.host_root, *node))).collect();
        Survey { workloads, room, took: started.elapsed() }
    }

    /// Returns the counters of one workload; `None` if it is not eligible or cannot be read.
    fn read(&self, of: WorkloadAccesses) -> Option<Reading> {
        health::beat();
        let WorkloadAccesses { cgroup, id, accesses } = of;
        if !self.config.admits(&cgroup) {
            return None;
        }
        let (accesses, dir) = (accesses?, self.hierarchy.dir(&cgroup));
        let resident: BTreeMap<NodeId, Bytes> =
            read::memory_numa_stat(&dir).ok()?.into_iter().map(|(node, of)| (node, of.user())).collect();
        let cpu = read::cpu_time(&dir).ok()?;
        Some(Reading { cgroup, id, at: Instant::now(), accesses, resident, cpu })
    }
}

/// Moves as many pages as the target node has room for.
fn move_pages(host_root: &Path, order: &PageMove, stop: &CancellationToken) -> PagesMoved {
    let bytes = order.bytes.min(room(host_root, order.to));
    if bytes < MIN_MOVE_SIZE {
        let mut moved = PagesMoved::default();
        moved.add(PageOutcome::NoRoom, order.bytes.0);
        return moved;
    }
    let is_over = is_over(Instant::now() + MAX_MOVE_TIME, stop);
    pages::move_pages(&host_root.join("proc"), &PageMove { bytes, ..order.clone() }, is_over)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use numaward_config::enforcement::CgroupPattern;
    use numaward_model::accesses::CountingMethod;

    use super::*;
    use crate::testing::TestHost;

    #[test]
    fn surveys_eligible_readable_workloads() {
        let root = tempfile::tempdir().unwrap();
        let node = root.path().join("sys/devices/system/node/node1");
        fs::create_dir_all(&node).unwrap();
        fs::write(node.join("meminfo"), "Node 1 MemTotal: 65536 kB\nNode 1 MemFree: 9216 kB\n").unwrap();
        let host = TestHost::small();
        let accesses =
            Accesses { by: CountingMethod::Sampling, local: 1, remote: 2, memory: BTreeMap::new() };
        for (id, path) in (1..).zip(["/a/x", "/a/out", "/b", "/a/silent", "/a/gone"]) {
            let accesses = (path != "/a/silent").then(|| accesses.clone());
            let of = WorkloadAccesses { cgroup: path.parse().unwrap(), id: CgroupId(id), accesses };
            host.accesses.lock().unwrap().push(of);
            if path != "/a/gone" {
                let dir = root.path().join(&path[1..]);
                fs::create_dir_all(&dir).unwrap();
                fs::write(dir.join("memory.numa_stat"), "anon N0=4096 N1=8192\nfile N0=1 N1=0\n").unwrap();
                fs::write(dir.join("cpu.stat"), "usage_usec 1500000\nuser_usec 1\nsystem_usec 1\n").unwrap();
            }
        }
        let pattern = |text: &str| CgroupPattern::new(text).unwrap();
        let mut sources = Sources {
            host_root: root.path().to_owned(),
            hierarchy: Hierarchy::at(root.path()),
            host: Arc::new(host),
            config: Home {
                include: vec![pattern("/a/*")],
                exclude: vec![pattern("/a/out")],
                ..Home::default()
            },
        };
        let survey = sources.survey(&[NodeId(1)]);
        assert_eq!(survey.room, [(NodeId(1), Bytes::mib(8))].into());
        let [found] = &survey.workloads[..] else { panic!("{survey:?}") };
        assert_eq!((found.cgroup.as_str(), found.cpu), ("/a/x", Duration::from_millis(1500)));
        assert_eq!(found.resident, [(NodeId(0), Bytes(4097)), (NodeId(1), Bytes(8192))].into());
        sources.config.include.clear();
        let all = sources.survey(&[]).workloads;
        assert_eq!(all.iter().map(|of| of.cgroup.as_str()).collect::<Vec<_>>(), ["/a/x", "/b"]);
    }
}
