//! The thread that reads the memory policies and the reserved huge pages of workloads without a guarantee, before one is kept off
//! a node or placed. The kernel walks the page tables and mappings of the processes for that, which may take long.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_enforce::{DetachedReads, pages};
use numaward_topology::Bytes;
use tokio_util::sync::CancellationToken;

use crate::{core::Core, page_worker::is_over, worker::Worker};

/// Time after which the thread counts as hung.
const WORKER_TIMEOUT: Duration = Duration::from_mins(10);

/// Time after which the read of a workload counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_mins(1);

/// Time to read the memory policies of the processes of a workload, which choose the length of `numa_maps`: other workloads wait.
const POLICIES_TIMEOUT: Duration = Duration::from_secs(30);

/// Time to read the mappings of the processes of a workload.
const MAPPINGS_TIMEOUT: Duration = Duration::from_secs(1);

/// Properties of a workload that may forbid a restriction of its nodes.
#[derive(Clone, Debug)]
pub(crate) struct PolicyFinding {
    /// The error is the reason why the memory policies forbid it.
    pub(crate) policies: Result<(), String>,
    /// Amount of mapped but untouched huge pages. The error is the reason why it is unknown.
    pub(crate) untouched: Result<Bytes, String>,
    /// True if the policies are not known: the daemon has no permission to read them, or the time did not suffice. Such a workload is no
    /// reason to evict pods.
    pub(crate) is_unknown: bool,
}

/// A cgroup to read, and its directory.
type Job = (CgroupPath, CgroupId, PathBuf);

/// Reader and cache of memory policies.
#[derive(Debug)]
pub(crate) struct PolicyReader {
    name: &'static str,
    worker: Option<Worker<Job, (CgroupPath, CgroupId, PolicyFinding)>>,
    pub(crate) known: BTreeMap<CgroupPath, (CgroupId, PolicyFinding)>,
    stop: CancellationToken,
}

impl PolicyReader {
    /// Creates a reader without results. `name` is the name of the thread.
    pub(crate) fn new(name: &'static str, stop: CancellationToken) -> Self {
        Self { name, worker: None, known: BTreeMap::new(), stop }
    }

    /// Stores the result of the thread. Returns false if there is none.
    pub(crate) fn take(&mut self) -> bool {
        let Some((path, id, finding)) = self.worker.as_mut().and_then(Worker::take) else { return false };
        self.known.insert(path, (id, finding));
        true
    }

    /// Returns the result for a cgroup; `None` while it is being read. A result that allows a restriction is returned once, and the
    /// cgroup is read again the next time.
    pub(crate) fn result_for(
        &mut self,
        core: &Core,
        path: &CgroupPath,
        id: CgroupId,
    ) -> Option<PolicyFinding> {
        match self.known.get(path).filter(|(known, _)| *known == id) {
            Some((_, finding)) if finding.policies.is_ok() => {
                self.known.remove(path).map(|(_, finding)| finding)
            }
            Some((_, refused)) => Some(refused.clone()),
            None => {
                self.read(core, path, id);
                None
            }
        }
    }

    /// Reads a cgroup, unless another one is being read.
    pub(crate) fn read(&mut self, core: &Core, path: &CgroupPath, id: CgroupId) {
        let dir = core.hierarchy.dir(path);
        if let Some(worker) = self.worker(core) {
            worker.give((path.clone(), id, dir));
        }
    }

    /// Returns the thread, and starts it before its first use.
    fn worker(&mut self, core: &Core) -> Option<&mut Worker<Job, (CgroupPath, CgroupId, PolicyFinding)>> {
        if self.worker.is_none() {
            let (proc, ended) = (core.config.host_root.join("proc"), self.stop.clone());
            let reads = DetachedReads::default();
            let perform = move |(path, id, dir): Job| {
                let (proc, own_dir, ended) = (proc.clone(), dir.clone(), ended.clone());
                let found = reads.run(&path, &dir, HANG_TIMEOUT, move || finding_of(&proc, &own_dir, &ended));
                let finding = found.unwrap_or_else(|error| {
                    let reason = format!("its memory policies cannot be read: {error}");
                    PolicyFinding { policies: Err(reason.clone()), untouched: Err(reason), is_unknown: true }
                });
                (path, id, finding)
            };
            match Worker::start(self.name, WORKER_TIMEOUT, &core.ports.heartbeats, &self.stop, perform) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => {
                    tracing::error!(%error, "memory policies are not read: cannot start the thread");
                }
            }
        }
        self.worker.as_mut()
    }

    #[cfg(test)]
    pub(crate) fn is_busy(&self) -> bool {
        self.worker.as_ref().is_some_and(Worker::is_busy)
    }
}

/// Reads the memory policies and the mappings of the processes of a cgroup.
fn finding_of(proc: &Path, dir: &Path, stop: &CancellationToken) -> PolicyFinding {
    let mut is_unknown = false;
    let is_over = is_over(Instant::now() + POLICIES_TIMEOUT, stop);
    let policies = match pages::named_nodes(proc, dir, is_over) {
        Ok(None) => Ok(()),
        Ok(Some(named)) => Err(format!("{named}, and its nodes would be remapped")),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            is_unknown = true;
            let seconds = POLICIES_TIMEOUT.as_secs();
            Err(format!("its processes have more mappings than can be read in {seconds} s"))
        }
        Err(error) => {
            is_unknown = error.kind() == io::ErrorKind::PermissionDenied;
            Err(format!(
                "its memory policies cannot be read, which requires CAP_SYS_PTRACE and the host's PID namespace: {error}"
            ))
        }
    };
    let untouched = pages::untouched_huge_pages(proc, dir, Instant::now() + MAPPINGS_TIMEOUT);
    PolicyFinding { policies, untouched: untouched.map_err(|error| error.to_string()), is_unknown }
}
