//! Reset of the affinities of threads that have kept the CPUs of a narrowed cgroup (see [`ThreadMasks`]).
//!
//! CPU isolation, automatic placement and guarantees narrow cgroups. Each cgroup that gets other CPUs is queued for the thread
//! `affinities`, which resets one after the other.

use std::{collections::VecDeque, mem, time::Duration};

use numaward_cgroup::{CgroupId, CgroupPath, Hierarchy};
use numaward_enforce::{ResetThreads, ThreadMasks};
use tokio_util::sync::CancellationToken;

use crate::{
    core::{Core, WidenedCgroup},
    worker::Worker,
};

/// Time limit for the threads of one cgroup and its descendants.
const RESET_TIMEOUT: Duration = Duration::from_secs(5);
/// Time without a heartbeat after which the thread counts as hung.
const HEARTBEAT_LIMIT: Duration = Duration::from_mins(1);
/// Maximum number of queued cgroups. The threads of further cgroups keep their CPUs.
const MAX_WAITING: usize = 4096;

/// Queue of cgroups and the thread that resets their threads.
#[derive(Debug)]
pub(super) struct Affinities {
    waiting: VecDeque<WidenedCgroup>,
    worker: Option<Worker<WidenedCgroup, (CgroupPath, ResetThreads)>>,
    stop: CancellationToken,
}

impl Affinities {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { waiting: VecDeque::new(), worker: None, stop }
    }

    /// Returns true if a cgroup is queued or in progress.
    pub(super) fn is_busy(&self, core: &Core) -> bool {
        let is_working = self.worker.as_ref().is_some_and(Worker::is_busy);
        is_working || !self.waiting.is_empty() || !core.effects.widened.is_empty()
    }

    pub(super) fn turn(&mut self, core: &mut Core) {
        self.waiting.extend(mem::take(&mut core.effects.widened));
        if self.waiting.len() > MAX_WAITING {
            tracing::warn!(
                "too many cgroups got other CPUs at once: threads of some may keep those that they had"
            );
            self.waiting.truncate(MAX_WAITING);
        }
        if let Some((cgroup, ResetThreads { reset, refused, is_partial })) =
            self.worker.as_mut().and_then(Worker::take)
        {
            if reset > 0 {
                tracing::info!(%cgroup, threads = reset, "threads that had kept the CPUs of their narrowed cgroup may use all of its CPUs again");
            }
            if refused > 0 || is_partial {
                tracing::warn!(%cgroup, refused, is_partial, "threads may have kept the CPUs of their narrowed cgroup");
            }
        }
        if self.waiting.is_empty() {
            return;
        }
        if self.worker.is_none() {
            self.start(core);
        }
        if let Some(worker) = self.worker.as_mut().filter(|worker| !worker.is_busy())
            && let Some(job) = self.waiting.pop_front()
        {
            worker.give(job);
        }
    }

    fn start(&mut self, core: &Core) {
        let hierarchy = core.hierarchy.clone();
        let perform = move |(path, id, masks): WidenedCgroup| {
            let done = reset(&hierarchy, &path, id, &masks);
            (path, done)
        };
        match Worker::start("affinities", HEARTBEAT_LIMIT, &core.ports.heartbeats, &self.stop, perform) {
            Ok(worker) => self.worker = Some(worker),
            Err(error) => {
                tracing::error!(%error, "threads may keep the CPUs of their narrowed cgroups: no thread can be started");
                self.waiting.clear();
            }
        }
    }
}

fn reset(hierarchy: &Hierarchy, path: &CgroupPath, id: CgroupId, masks: &ThreadMasks) -> ResetThreads {
    if hierarchy.id_of(path).is_ok_and(|now| now == Some(id)) {
        // The daemon's own threads keep off exclusive CPUs by themselves.
        masks.reset(hierarchy.root(), path, hierarchy.own_cgroup().as_ref(), RESET_TIMEOUT)
    } else {
        ResetThreads::default()
    }
}
