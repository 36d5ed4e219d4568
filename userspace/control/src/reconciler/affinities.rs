//! Reset of thread affinities after a cgroup got other CPUs.
//!
//! # Problem
//! A thread that reads its affinity while its cgroup has few CPUs, and sets it again, keeps these CPUs after the cgroup has got
//! more (see [`ThreadMasks`]). CPU isolation, automatic placement and guarantees change the CPUs of cgroups.
//!
//! # Algorithm
//! Each cgroup with changed CPUs is queued for the thread `affinities`, which resets the threads of all queued cgroups, and again
//! after some seconds: the kernel may give the CPUs of a removed partition late, and a thread may set the affinity that it has read
//! before. The ledger has the queued cgroups, so that a restart continues.

use std::{
    mem,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupPath, Hierarchy};
use numaward_enforce::{PendingReset, ResetThreads};
use numaward_model::health;
use tokio_util::sync::CancellationToken;

use super::{Controller, ControllerEvent, interrupts::join_names};
use crate::{core::Core, worker::Worker};

/// Time limit for the threads of one cgroup and its descendants.
const RESET_TIMEOUT: Duration = Duration::from_secs(5);
/// Time without a heartbeat after which the thread counts as hung.
const HEARTBEAT_LIMIT: Duration = Duration::from_mins(1);
/// Maximum number of queued cgroups. The threads of further cgroups keep their CPUs.
const MAX_WAITING: usize = 4096;

/// Delays of the second and the third pass.
const PASS_DELAYS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(5)];

/// A cgroup and the affinities that its threads may have kept.
type Reset = (CgroupPath, PendingReset);

/// A pass over the threads of a cgroup.
#[derive(Debug)]
struct Job {
    reset: Reset,
    /// Number of passes before this one.
    passes: usize,
    due: Instant,
}

type FinishedJob = (Job, ResetThreads);

/// Queue of cgroups and the thread that resets their threads.
#[derive(Debug)]
pub(super) struct Affinities {
    waiting: Vec<Job>,
    worker: Option<Worker<Vec<Job>, Vec<FinishedJob>>>,
    stop: CancellationToken,
}

impl Affinities {
    pub(super) fn new(stop: CancellationToken) -> Self {
        Self { waiting: Vec::new(), worker: None, stop }
    }

    /// Queues the cgroups that an earlier run has left.
    pub(super) fn adopt(core: &mut Core) {
        let left = core.store.state.resets.iter();
        let left: Vec<Reset> = left.map(|(path, reset)| (path.clone(), PendingReset::clone(reset))).collect();
        core.effects.widened.extend(left);
    }

    /// Returns true if a cgroup is queued or in progress.
    pub(super) fn is_busy(&self, core: &Core) -> bool {
        let is_working = self.worker.as_ref().is_some_and(Worker::is_busy);
        is_working || !self.waiting.is_empty() || !core.effects.widened.is_empty()
    }

    pub(super) fn tick(&mut self, core: &mut Core) {
        let now = Instant::now();
        let widened = mem::take(&mut core.effects.widened).into_iter();
        self.waiting.extend(widened.map(|reset| Job { reset, passes: 0, due: now }));
        if self.waiting.len() > MAX_WAITING {
            tracing::warn!(
                "too many cgroups got other CPUs at once: threads of some cgroups may keep their old CPUs"
            );
            let excess: Vec<Reset> = self.waiting.drain(MAX_WAITING..).map(|job| job.reset).collect();
            core.forget_resets(&excess);
        }
        let done = self.worker.as_mut().and_then(Worker::take).into_iter().flatten();
        for (job, ResetThreads { reset, refused, unread }) in done {
            let (cgroup, _) = &job.reset;
            if reset > 0 {
                tracing::info!(%cgroup, threads = reset, "affinities were reset: the threads may use all CPUs of their cgroup again");
            }
            let is_last = job.passes == PASS_DELAYS.len();
            if is_last && (refused > 0 || !unread.is_empty()) {
                let unread: Vec<String> = unread.iter().map(ToString::to_string).collect();
                let unread = join_names(&unread);
                tracing::warn!(%cgroup, refused, unread, "the affinities of some threads could not be reset: they may use only the old CPUs of their cgroup, also below the unread cgroups");
            }
            match PASS_DELAYS.get(job.passes) {
                Some(delay) => {
                    self.waiting.push(Job { passes: job.passes + 1, due: now + *delay, ..job });
                }
                None => core.forget_resets(&[job.reset]),
            }
        }
        if !self.waiting.iter().any(|job| job.due <= now) {
            return;
        }
        if self.worker.is_none() {
            self.start(core);
        }
        if let Some(worker) = self.worker.as_mut().filter(|worker| !worker.is_busy()) {
            let (due, later) = mem::take(&mut self.waiting).into_iter().partition(|job| job.due <= now);
            self.waiting = later;
            worker.give(due);
        }
    }

    fn start(&mut self, core: &Core) {
        let hierarchy = core.hierarchy.clone();
        let stop = self.stop.clone();
        let perform = move |jobs: Vec<Job>| {
            let each = jobs.into_iter().take_while(|_| !stop.is_cancelled()).map(|job| {
                health::beat();
                let done = reset(&hierarchy, &job.reset);
                (job, done)
            });
            each.collect()
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

impl Controller for Affinities {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        if let ControllerEvent::Tick(_) = *event {
            self.tick(core);
        }
    }
}

fn reset(hierarchy: &Hierarchy, (path, PendingReset { id, masks }): &Reset) -> ResetThreads {
    if hierarchy.id_of(path).is_ok_and(|now| now == Some(*id)) {
        // The daemon's threads set their own affinities, without exclusive CPUs.
        masks.reset(hierarchy.root(), path, hierarchy.own_cgroup().as_ref(), RESET_TIMEOUT)
    } else {
        ResetThreads::default()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc, thread};

    use numaward_api as api;
    use numaward_config::Config;
    use numaward_guarantee::request::Request;
    use numaward_topology::{
        CpuId, CpuSet,
        affinity::{affinity, set_affinity},
    };

    use super::*;
    use crate::core::release;
    use crate::{
        reconciler::tests::reconciler_loop,
        testing::{self as fixture, TestHost},
    };

    #[test]
    fn restart_continues_reset() {
        let all = affinity(None).unwrap();
        let shared: CpuSet = &all & &"0,3-7".parse().unwrap();
        if !all.contains(CpuId(1)) || shared.is_empty() {
            return;
        }
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        for cgroup in ["", "a", "b"] {
            fixture::cgroup(&root.join(cgroup), &host.machine.lock().unwrap());
        }
        let (started, id) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let runtime = thread::spawn(move || {
            started.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            let _ = ended.recv();
        });
        let id = id.recv().unwrap();
        fs::write(root.join("b/cgroup.threads"), id.to_string()).unwrap();
        fs::write(root.join("b/cpuset.cpus.effective"), all.to_string()).unwrap();
        let config: Config =
            serde_json::from_value(serde_json::json!({"enforcement": {"herding": {"mode": "on"}}})).unwrap();
        let config = Config { state_directory: dir.path().join("state"), ..config };

        let mut reconciler = reconciler_loop(&config, &root, &host);
        let request = api::AllocationRequest {
            cpus: Some(api::Cpus::whole(2)),
            ..api::AllocationRequest::new("a", api::Target::Cgroup("/a".to_owned()), "256Mi")
        };
        reconciler.admit(&Request::new(&request).unwrap(), false).unwrap();
        reconciler.process_effects();
        assert_eq!(fixture::line(&root.join("b/cpuset.cpus")), "0,3-7");
        set_affinity(Some(id), &shared).unwrap();
        release::release(&mut reconciler.core, "a").unwrap();
        reconciler.process_effects();
        assert_eq!(fixture::line(&root.join("b/cpuset.cpus")), "");
        assert!(!reconciler.core.store.state.resets.is_empty());

        // The daemon dies before it resets the thread.
        drop(reconciler);
        assert_eq!(affinity(Some(id)).unwrap(), shared);
        let mut reconciler = reconciler_loop(&config, &root, &host);
        assert!(reconciler.controllers.affinities.is_busy(&reconciler.core));
        let (until, mut is_repeated) = (Instant::now() + Duration::from_secs(20), false);
        while reconciler.controllers.affinities.is_busy(&reconciler.core) && Instant::now() < until {
            reconciler.run_maintenance();
            thread::sleep(Duration::from_millis(10));
            // The runtime sets the affinity that it has read before.
            if !is_repeated && affinity(Some(id)).unwrap() == all {
                set_affinity(Some(id), &shared).unwrap();
                is_repeated = true;
            }
        }
        assert!(is_repeated);
        assert_eq!(affinity(Some(id)).unwrap(), all);
        assert!(reconciler.core.store.state.resets.is_empty());
        drop(end);
        runtime.join().unwrap();
    }

    #[test]
    fn due_cgroups_are_reset_at_once() {
        let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
        let root = dir.path().join("cgroup");
        fixture::cgroup(&root, &host.machine.lock().unwrap());
        let config = Config { state_directory: dir.path().join("state"), ..Config::default() };
        let mut core = reconciler_loop(&config, &root, &host).core;
        let mut affinities = Affinities::new(CancellationToken::new());
        for number in 0..100 {
            let reset = PendingReset { id: numaward_cgroup::CgroupId(number), masks: Arc::default() };
            core.effects.widened.push((format!("/c{number}").parse().unwrap(), reset));
        }
        affinities.tick(&mut core);
        let until = Instant::now() + Duration::from_secs(20);
        while affinities.worker.as_ref().is_some_and(Worker::is_busy) && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
            affinities.tick(&mut core);
        }
        assert_eq!(affinities.waiting.iter().filter(|job| job.passes == 1).count(), 100);
    }
}
