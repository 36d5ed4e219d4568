//! Pending restores: knobs whose original value could not be written back yet.
//!
//! # Problem
//! When no feature needs a written value any more, the original value of the knob is restored. The write may fail:
//! CPUs may belong to a partition, or a limit may be below the present usage.
//!
//! # Algorithm
//! The record of such a knob stays in the ledger. The write is retried, first after 5 seconds, at last every minute,
//! until it succeeds, another program writes the knob, or the cgroup is removed. Meanwhile the knob is not checked
//! for drift.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_api as api;
use numaward_cgroup::CgroupPath;
use numaward_enforce::AppliedSettings;
use numaward_model::Retry;

use crate::core::Core;

/// Delay before the first retry of a failed write.
pub(super) const FIRST_RETRY: Duration = Duration::from_secs(5);
/// Maximum delay between retries.
pub(super) const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// Retries the restores that failed.
#[derive(Debug, Default)]
pub(super) struct Restores {
    /// Applied settings at the last update.
    followed: AppliedSettings,
    pending: BTreeMap<CgroupPath, RetryState>,
}

#[derive(Debug, Default)]
struct RetryState {
    /// `None` before the first retry.
    retry: Option<Retry>,
    /// Error of the last try.
    reason: Option<String>,
}

impl Restores {
    /// Updates the pending restores. Returns true if they changed.
    pub(super) fn update(&mut self, applied: &AppliedSettings) -> bool {
        let before = std::mem::replace(&mut self.followed, applied.clone());
        let changed = applied.records().changed_since(before.records());
        // Settings of an ancestor are pending as soon as no descendant needs them.
        let above = changed.iter().flat_map(|path| path.ancestors().skip(1)).collect::<Vec<_>>();
        let mut has_changed = false;
        for path in changed.into_iter().chain(above) {
            if applied.pending_knobs(&path).is_empty() {
                has_changed |= self.pending.remove(&path).is_some();
            } else {
                has_changed |= !self.pending.contains_key(&path);
                self.pending.entry(path).or_default();
            }
        }
        has_changed
    }

    /// Retries the restores that are due. A guarantee that is being released has its own retries.
    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        core.effects.view |= self.update(&core.store.state.applied);
        let due = self.pending.iter().filter(|(path, pending)| {
            pending.retry.as_ref().is_none_or(|retry| retry.is_due(now)) && !core.is_releasing(path)
        });
        let due: Vec<CgroupPath> = due.map(|(path, _)| path.clone()).collect();
        for path in due {
            let reason = core.retry_restore(&path).err();
            let Some(pending) = self.pending.get_mut(&path) else { continue };
            core.effects.view |= pending.reason != reason;
            pending.reason = reason;
            let retry = &mut pending.retry;
            retry.get_or_insert_with(|| Retry::new(now, FIRST_RETRY, LONGEST_RETRY)).postpone(now);
        }
        core.effects.view |= self.update(&core.store.state.applied);
    }

    /// Returns the pending restores for the API.
    pub(super) fn shown(&self) -> Vec<api::PendingRestore> {
        let of_cgroup = |(path, pending): (&CgroupPath, &RetryState)| {
            let record = self.followed.get(path);
            let knobs = self.followed.pending_knobs(path).into_iter();
            let shown = knobs.filter_map(|knob| {
                Some(api::PendingRestore {
                    cgroup: path.to_string(),
                    knob: knob.to_string(),
                    written: record?.written.0.get(&knob)?.to_string(),
                    found: record?.found.0.get(&knob)?.to_string(),
                    reason: pending.reason.clone(),
                })
            });
            shown.collect::<Vec<_>>()
        };
        self.pending.iter().flat_map(of_cgroup).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use numaward_config::Config;
    use numaward_guarantee::{error::AdmissionError, request::Request};
    use numaward_topology::Bytes;

    use super::*;
    use crate::{
        reconciler::{ReconcilerLoop, controllers::Controllers, tests::reconciler_loop},
        testing::{self as fixture, Host},
    };

    struct Bench {
        dir: tempfile::TempDir,
        host: Arc<Host>,
        config: Config,
        reconciler: Option<ReconcilerLoop>,
        now: Instant,
    }

    impl Bench {
        fn new(cgroups: &[&str], config: &str) -> Self {
            let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(Host::small()));
            for cgroup in [""].iter().chain(cgroups) {
                fixture::cgroup(&dir.path().join("cgroup").join(cgroup), &host.machine.lock().unwrap());
            }
            let config: Config = serde_json::from_str(config).unwrap();
            let config = Config { state_directory: dir.path().join("state"), ..config };
            let mut bench = Self { dir, host, config, reconciler: None, now: Instant::now() };
            bench.restart();
            bench
        }

        fn restart(&mut self) {
            drop(self.reconciler.take());
            let root = self.dir.path().join("cgroup");
            self.reconciler = Some(reconciler_loop(&self.config, &root, &self.host));
        }

        fn knob(&self, file: &str) -> String {
            fixture::line(&self.dir.path().join("cgroup").join(file))
        }

        fn put(&self, file: &str, text: &str) {
            let file = self.dir.path().join("cgroup").join(file);
            let _ = fs::remove_file(&file);
            fs::write(file, format!("{text}\n")).unwrap();
        }

        fn admit(&mut self, name: &str) -> Result<(), AdmissionError> {
            let target = api::Target::Cgroup(format!("/{name}"));
            let request = Request::new(&api::AllocationRequest {
                cpus: Some(api::Cpus::whole(2)),
                ..api::AllocationRequest::new(name, target, "256Mi")
            });
            self.reconciler.as_mut().unwrap().admit(&request.unwrap(), false).map(drop)
        }

        fn release(&mut self, name: &str) {
            let reconciler = self.reconciler.as_mut().unwrap();
            reconciler.core.release(name).unwrap();
            reconciler.process_effects();
        }

        /// Retries after this time and returns the restores that are still pending.
        fn pending_after(&mut self, seconds: u64) -> Vec<(String, String, String)> {
            self.now += Duration::from_secs(seconds);
            let ReconcilerLoop { controllers: Controllers { restores, .. }, core, .. } =
                self.reconciler.as_mut().unwrap();
            restores.tick(core, self.now);
            let shown = restores.shown().into_iter();
            shown.map(|of| (of.cgroup, of.knob, of.reason.unwrap_or_default())).collect()
        }
    }

    fn mib(count: u64) -> String {
        Bytes::mib(count).0.to_string()
    }

    #[test]
    fn release_keeps_limit_above_usage() {
        let mut bench = Bench::new(&["a"], "{}");
        bench.put("a/memory.max", &mib(128));
        bench.admit("a").unwrap();
        assert_eq!(bench.knob("a/memory.max"), mib(256));
        bench.put("a/memory.current", &mib(200));
        bench.release("a");
        assert_eq!((bench.knob("a/memory.max"), bench.knob("a/cpuset.cpus")), (mib(256), String::new()));
        let [(cgroup, knob, reason)] = &bench.pending_after(0)[..] else { panic!() };
        assert_eq!((cgroup.as_str(), knob.as_str()), ("/a", "memory.max"));
        assert_eq!(reason, "memory.max stays 268435456: 200Mi are in use, more than 128Mi");
        assert_eq!(bench.reconciler.as_ref().unwrap().view.read().enforcement.pending_restores.len(), 1);

        // The daemon continues after a restart, also if enforcement is off.
        bench.config.enforcement.mode = api::EnforcementMode::Off;
        bench.restart();
        assert_eq!((bench.knob("a/memory.max"), bench.pending_after(0).len()), (mib(256), 1));
        bench.put("a/memory.current", &mib(100));
        assert_eq!(bench.pending_after(6), []);
        assert_eq!(bench.knob("a/memory.max"), mib(128));
        assert!(bench.reconciler.as_ref().unwrap().core.store.state.applied.is_empty());
    }

    #[test]
    fn failed_undo_is_retried() {
        let mut bench = Bench::new(&["a"], "{}");
        bench.put("a/memory.max", &mib(128));
        bench.put("a/memory.current", &mib(200));
        let refused = fixture::refuse(&bench.dir.path().join("cgroup/a/cpuset.mems"));
        assert!(matches!(bench.admit("a"), Err(AdmissionError::Failed(_))));
        assert_eq!(bench.knob("a/memory.max"), mib(256));
        bench.restart();
        assert!(bench.reconciler.as_ref().unwrap().core.store.state.guarantees.is_empty());
        assert_eq!(bench.pending_after(0).len(), 1);
        bench.put("a/memory.current", &mib(100));
        assert_eq!(bench.pending_after(6), []);
        assert_eq!(bench.knob("a/memory.max"), mib(128));
        drop(refused);
    }

    #[test]
    fn restore_of_confined_cpus_is_retried() {
        let mut bench = Bench::new(&["a", "b"], r#"{"enforcement": {"herding": {"mode": "on"}}}"#);
        bench.admit("a").unwrap();
        assert_eq!(bench.knob("b/cpuset.cpus"), "0,3-7");
        let refused = fixture::refuse(&bench.dir.path().join("cgroup/b/cpuset.cpus"));
        bench.release("a");
        assert_eq!(bench.pending_after(0).len(), 1);
        drop(refused);
        bench.put("b/cpuset.cpus", "0,3-7");
        assert_eq!(bench.pending_after(6), []);
        assert_eq!(bench.knob("b/cpuset.cpus"), "");
    }
}
