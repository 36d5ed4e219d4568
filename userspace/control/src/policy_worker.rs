//! The thread that reads the memory policies of workloads without a guarantee, before one is kept off a node or
//! placed, and the huge pages that they have reserved: the kernel goes through their page tables and mappings for
//! that.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_enforce::pages;
use numaward_model::health;
use numaward_topology::Bytes;
use tokio_util::sync::CancellationToken;

use crate::{core::Core, worker::Worker};

/// How long reading one process may take before the thread counts as hung.
const HANG_TIMEOUT: Duration = Duration::from_mins(10);

/// Time to read the mappings of the processes of a workload.
const MAPPINGS_TIMEOUT: Duration = Duration::from_secs(1);

/// What keeps the nodes of a workload from being narrowed.
#[derive(Clone, Debug)]
pub(crate) struct PolicyFinding {
    /// Why its memory policies do.
    pub(crate) policies: Result<(), String>,
    /// The huge pages that it has mapped and not touched; why they are not known.
    pub(crate) untouched: Result<Bytes, String>,
    /// Whether the daemon may not read its policies.
    pub(crate) is_denied: bool,
}

/// A cgroup that is to be read.
type Job = (CgroupPath, CgroupId, PathBuf);

/// What is known of memory policies.
#[derive(Debug)]
pub(crate) struct PolicyReader {
    name: &'static str,
    worker: Option<Worker<Job, (CgroupPath, CgroupId, PolicyFinding)>>,
    pub(crate) known: BTreeMap<CgroupPath, (CgroupId, PolicyFinding)>,
    stop: CancellationToken,
}

impl PolicyReader {
    /// Nothing is known yet. The thread has this name.
    pub(crate) fn new(name: &'static str, stop: CancellationToken) -> Self {
        Self { name, worker: None, known: BTreeMap::new(), stop }
    }

    /// Takes what was read since; whether there is anything.
    pub(crate) fn take(&mut self) -> bool {
        let Some((path, id, finding)) = self.worker.as_mut().and_then(Worker::take) else { return false };
        self.known.insert(path, (id, finding));
        true
    }

    /// What was found of a cgroup; `None` while it is read. A cgroup that may be narrowed, as far as its policies go,
    /// is read again the next time.
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

    /// The thread, which is started when it is needed first.
    fn worker(&mut self, core: &Core) -> Option<&mut Worker<Job, (CgroupPath, CgroupId, PolicyFinding)>> {
        if self.worker.is_none() {
            let (proc, ended) = (core.config.host_root.join("proc"), self.stop.clone());
            let perform = move |(path, id, dir): Job| {
                let is_over = || {
                    health::beat();
                    ended.is_cancelled()
                };
                let mut is_denied = false;
                let policies = match pages::named_nodes(&proc, &dir, is_over) {
                    Ok(None) => Ok(()),
                    Ok(Some(named)) => Err(format!("{named}, and its nodes would be remapped")),
                    Err(error) => {
                        is_denied = error.kind() == io::ErrorKind::PermissionDenied;
                        Err(format!(
                            "its memory policies cannot be read, which takes CAP_SYS_PTRACE and the host's process ids: {error}"
                        ))
                    }
                };
                let untouched = pages::untouched_huge_pages(&proc, &dir, Instant::now() + MAPPINGS_TIMEOUT);
                let untouched = untouched.map_err(|error| error.to_string());
                let finding = PolicyFinding { policies, untouched, is_denied };
                (path, id, finding)
            };
            match Worker::start(self.name, HANG_TIMEOUT, &core.ports.heartbeats, &self.stop, perform) {
                Ok(worker) => self.worker = Some(worker),
                Err(error) => {
                    tracing::error!(%error, "no memory policies are known: no thread can be started");
                }
            }
        }
        self.worker.as_mut()
    }

    /// Whether something is being read.
    #[cfg(test)]
    pub(crate) fn is_busy(&self) -> bool {
        self.worker.as_ref().is_some_and(Worker::is_busy)
    }
}
