//! Threads that have kept the CPUs of a time when their cgroup was narrowed: they may run on all of its CPUs again.
//!
//! Problem: see [`ThreadMasks`]. CPU isolation, homes and guarantees narrow the CPUs of cgroups.
//!
//! Algorithm: each cgroup that has got other CPUs is handed to a thread of its own, one after the other.

use std::{collections::VecDeque, mem, time::Duration};

use numaward_cgroup::{CgroupId, CgroupPath, Hierarchy};
use numaward_enforce::{ResetThreads, ThreadMasks};
use tokio_util::sync::CancellationToken;

use crate::{
    core::{Core, Widened},
    worker::Worker,
};

/// Time for the threads of one cgroup and of those below it.
const TIME: Duration = Duration::from_secs(5);
/// The time after which the thread counts as hung.
const LIMIT: Duration = Duration::from_mins(1);
/// Cgroups that wait. The threads of others keep their CPUs.
const MAX_WAITING: usize = 4096;

/// Hands cgroups to the thread.
#[derive(Debug)]
pub(super) struct Affinities {
    waiting: VecDeque<Widened>,
    worker: Option<Worker<Widened, (CgroupPath, ResetThreads)>>,
    stop: CancellationToken,
}

impl Affinities {
    /// None has got other CPUs yet.
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { waiting: VecDeque::new(), worker: None, stop }
    }

    /// Whether there are cgroups whose threads are yet to be looked at.
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
                tracing::info!(%cgroup, threads = reset, "threads that had kept the CPUs of their narrowed cgroup may run on all again");
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
        let perform = move |(path, id, masks): Widened| {
            let done = reset(&hierarchy, &path, id, &masks);
            (path, done)
        };
        match Worker::start("affinities", LIMIT, &core.ports.heartbeats, &self.stop, perform) {
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
        masks.reset(hierarchy.root(), path, hierarchy.own_cgroup().as_ref(), TIME)
    } else {
        ResetThreads::default()
    }
}
