//! Reset of thread affinities after a cgroup got other CPUs.
//!
//! # Problem
//! A thread that reads its affinity while its cgroup has few CPUs, and sets it again, keeps these CPUs after the cgroup has got
//! more (see [`ThreadMasks`]). CPU isolation, automatic placement and guarantees change the CPUs of cgroups.
//!
//! # Algorithm
//! Each cgroup with changed CPUs is queued for the thread `affinities`, which resets the threads of one cgroup after the other.

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
                "too many cgroups got other CPUs at once: threads of some cgroups may keep their old CPUs"
            );
            self.waiting.truncate(MAX_WAITING);
        }
        if let Some((cgroup, ResetThreads { reset, refused, is_partial })) =
            self.worker.as_mut().and_then(Worker::take)
        {
            if reset > 0 {
                tracing::info!(%cgroup, threads = reset, "affinities were reset: the threads may use all CPUs of their cgroup again");
            }
            if refused > 0 || is_partial {
                tracing::warn!(%cgroup, refused, is_partial, "the affinities of some threads could not be reset: they may use only the old CPUs of their cgroup");
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
                tracing::error!(%error, "affinities are not reset and threads may keep old CPUs: the worker thread cannot be started");
                self.waiting.clear();
            }
        }
    }
}

fn reset(hierarchy: &Hierarchy, path: &CgroupPath, id: CgroupId, masks: &ThreadMasks) -> ResetThreads {
    if hierarchy.id_of(path).is_ok_and(|now| now == Some(id)) {
        // The daemon's threads set their own affinities, without exclusive CPUs.
        masks.reset(hierarchy.root(), path, hierarchy.own_cgroup().as_ref(), RESET_TIMEOUT)
    } else {
        ResetThreads::default()
    }
}
