//! Pending restores: knobs that could not be set to their original value yet.
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
use numaward_cgroup::{CgroupPath, knob::Knob};
use numaward_enforce::{AppliedSettings, SettingsChange};
use numaward_model::Retry;

use super::{Controller, ControllerEvent};
use crate::core::{Core, HeldChange};

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
            let reason = retry_restore(core, &path).err();
            let Some(pending) = self.pending.get_mut(&path) else { continue };
            core.effects.view |= pending.reason != reason;
            pending.reason = reason;
            let retry = &mut pending.retry;
            retry.get_or_insert_with(|| Retry::new(now, FIRST_RETRY, LONGEST_RETRY)).postpone(now);
        }
        core.effects.view |= self.update(&core.store.state.applied);
    }

    /// Returns the pending restores for the API.
    pub(super) fn pending(&self) -> Vec<api::PendingRestore> {
        let of_cgroup = |(path, pending): (&CgroupPath, &RetryState)| {
            let record = self.followed.get(path);
            let knobs = self.followed.pending_knobs(path).into_iter();
            let restores = knobs.filter_map(|knob| {
                Some(api::PendingRestore {
                    cgroup: path.to_string(),
                    knob: knob.to_string(),
                    written: record?.written.0.get(&knob)?.to_string(),
                    found: record?.found.0.get(&knob)?.to_string(),
                    reason: pending.reason.clone(),
                })
            });
            restores.collect::<Vec<_>>()
        };
        self.pending.iter().flat_map(of_cgroup).collect()
    }
}

impl Controller for Restores {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Tick(now) => self.tick(core, now),
            ControllerEvent::StateChanged => drop(self.update(&core.store.state.applied)),
            _ => {}
        }
    }
}

/// Retries to restore the original values of a cgroup in knobs that no longer need to be set. An error contains the reason, without the
/// name of the cgroup.
pub(crate) fn retry_restore(core: &mut Core, path: &CgroupPath) -> Result<(), String> {
    let of_cgroup = format!("{path}: ");
    restore_pending(core, path).map_err(|error| match error.strip_prefix(&of_cgroup) {
        Some(reason) => reason.to_owned(),
        None => error,
    })
}

fn restore_pending(core: &mut Core, path: &CgroupPath) -> Result<(), String> {
    let settings = core.applied_settings(path).filter(|settings| !settings.is_empty()).cloned();
    let plan =
        core.plan(SettingsChange::Each(vec![(path.clone(), settings)])).map_err(|error| error.to_string())?;
    let done = core.write(plan).map_err(|error| error.to_string())?;
    if !done.is_stored {
        core.store_outcome();
    }
    core.effects.held.push(HeldChange::Rewritten(path.clone()));
    if let Some(late) = done.late.into_iter().next() {
        return Err(late.error.to_string());
    }
    done.result.map_err(|failure| failure.to_string())?;
    let record = core.store.state.applied.get(path);
    match record
        .filter(|record| record.has_pending_cpus())
        .and_then(|record| record.written.0.get(&Knob::CpusetCpus))
    {
        Some(cpus) => {
            Err(format!("it has CPUs {cpus} so far: cpuset partitions of other cgroups hold the rest"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use numaward_config::Config;
    use numaward_guarantee::{
        error::AdmissionError,
        narrowing::{Narrowing, PreferredNode},
        request::Request,
    };
    use numaward_topology::{Bytes, NodeId, NodeSet};

    use super::*;
    use crate::core::{cpu_isolation, narrowing, preferred_node, release};
    use crate::{
        reconciler::{ReconcilerLoop, controllers::Controllers, tests::reconciler_loop},
        testing::{self as fixture, TestHost},
    };

    struct RestoreBench {
        dir: tempfile::TempDir,
        host: Arc<TestHost>,
        config: Config,
        reconciler: Option<ReconcilerLoop>,
        now: Instant,
    }

    impl RestoreBench {
        fn new(cgroups: &[&str], config: &str) -> Self {
            let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
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

        fn write_knob(&self, file: &str, text: &str) {
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
            release::release(&mut reconciler.core, name).unwrap();
            reconciler.process_effects();
        }

        /// Retries the releases that have begun.
        fn release_ended(&mut self) {
            let ReconcilerLoop { controllers: Controllers { liveness, .. }, core, .. } =
                self.reconciler.as_mut().unwrap();
            liveness.release_gone(core, self.now, false);
        }

        /// Retries after this time and returns the restores that are still pending.
        fn pending_after(&mut self, seconds: u64) -> Vec<(String, String, String)> {
            self.now += Duration::from_secs(seconds);
            let ReconcilerLoop { controllers: Controllers { restores, .. }, core, .. } =
                self.reconciler.as_mut().unwrap();
            restores.tick(core, self.now);
            let pending = restores.pending().into_iter();
            pending.map(|of| (of.cgroup, of.knob, of.reason.unwrap_or_default())).collect()
        }
    }

    fn mib(count: u64) -> String {
        Bytes::mib(count).0.to_string()
    }

    #[test]
    fn release_keeps_limit_above_usage() {
        let mut bench = RestoreBench::new(&["a"], "{}");
        bench.write_knob("a/memory.max", &mib(128));
        bench.admit("a").unwrap();
        assert_eq!(bench.knob("a/memory.max"), mib(256));
        bench.write_knob("a/memory.current", &mib(200));
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
        bench.write_knob("a/memory.current", &mib(100));
        assert_eq!(bench.pending_after(6), []);
        assert_eq!(bench.knob("a/memory.max"), mib(128));
        assert!(bench.reconciler.as_ref().unwrap().core.store.state.applied.is_empty());
    }

    #[test]
    fn failed_undo_is_retried() {
        let mut bench = RestoreBench::new(&["a"], "{}");
        bench.write_knob("a/memory.max", &mib(128));
        bench.write_knob("a/memory.current", &mib(200));
        let refused = fixture::refuse(&bench.dir.path().join("cgroup/a/cpuset.mems"));
        assert!(matches!(bench.admit("a"), Err(AdmissionError::Failed(_))));
        assert_eq!(bench.knob("a/memory.max"), mib(256));
        bench.restart();
        assert!(bench.reconciler.as_ref().unwrap().core.store.state.guarantees.is_empty());
        assert_eq!(bench.pending_after(0).len(), 1);
        bench.write_knob("a/memory.current", &mib(100));
        assert_eq!(bench.pending_after(6), []);
        assert_eq!(bench.knob("a/memory.max"), mib(128));
        drop(refused);
    }

    #[test]
    fn unplanned_restore_is_retried() {
        let mut bench = RestoreBench::new(&["a", "b"], "{}");
        let (a, b): (CgroupPath, CgroupPath) = ("/a".parse().unwrap(), "/b".parse().unwrap());
        let core = &mut bench.reconciler.as_mut().unwrap().core;
        narrowing::keep_off(core, &a, &"1".parse().unwrap()).unwrap();
        preferred_node::assign(core, &b, PreferredNode::new(NodeId(0), 500)).unwrap();
        assert_eq!((bench.knob("a/cpuset.mems"), bench.knob("b/cpuset.cpus")), ("0".into(), "0-3".into()));
        bench.write_knob("a/cpuset.mems", "unreadable");
        bench.write_knob("b/cpuset.cpus", "unreadable");
        let core = &mut bench.reconciler.as_mut().unwrap().core;
        narrowing::widen(core, &a, |narrowing| narrowing.off = NodeSet::new());
        // Automatic placement is off after the restart.
        bench.restart();
        let state = &bench.reconciler.as_ref().unwrap().core.store.state;
        assert!(state.narrowed().is_empty());
        assert_eq!(bench.pending_after(0).len(), 2);
        bench.write_knob("a/cpuset.mems", "0");
        bench.write_knob("b/cpuset.cpus", "0-3");
        assert_eq!(bench.pending_after(6), []);
        assert_eq!(
            (bench.knob("a/cpuset.mems"), bench.knob("b/cpuset.cpus")),
            (String::new(), String::new())
        );
    }

    #[test]
    fn nodes_of_forgotten_steering_are_restored() {
        let mut bench = RestoreBench::new(&["a", "b"], r#"{"enforcement": {"herding": {"mode": "on"}}}"#);
        bench.admit("a").unwrap();
        let (b, core) = ("/b".parse().unwrap(), &mut bench.reconciler.as_mut().unwrap().core);
        narrowing::keep_off(core, &b, &"1".parse().unwrap()).unwrap();
        // A ledger that was rebuilt without its previous version does not name the guard.
        core.store.state.set_narrowing(&b, Narrowing { is_isolated: true, ..Narrowing::default() });
        cpu_isolation::update(core, true);
        assert_eq!(
            (bench.knob("b/cpuset.cpus"), bench.knob("b/cpuset.mems")),
            ("0,3-7".into(), String::new())
        );
    }

    #[test]
    fn unplanned_restores_of_a_mode_are_retried() {
        for mode in [api::EnforcementMode::Off, api::EnforcementMode::DryRun] {
            let config = r#"{"enforcement": {"herding": {"mode": "on"}}}"#;
            let mut bench = RestoreBench::new(&["a", "b", "c"], config);
            bench.admit("a").unwrap();
            assert_eq!(
                (bench.knob("a/cpuset.cpus"), bench.knob("b/cpuset.cpus")),
                ("1-2".into(), "0,3-7".into())
            );
            for knob in ["a/memory.min", "b/cpuset.cpus"] {
                bench.write_knob(knob, "unreadable");
            }
            bench.config.enforcement.mode = mode;
            bench.restart();
            bench.write_knob("a/memory.min", &mib(256));
            bench.write_knob("b/cpuset.cpus", "0,3-7");
            bench.release_ended();
            bench.pending_after(0);
            assert_eq!(bench.pending_after(6), []);
            let knobs = ["a/cpuset.cpus", "b/cpuset.cpus", "c/cpuset.cpus"].map(|knob| bench.knob(knob));
            assert_eq!((knobs, bench.knob("a/memory.min")), (["", "", ""].map(str::to_owned), "0".into()));
            let state = &bench.reconciler.as_ref().unwrap().core.store.state;
            assert_eq!(state.guarantees.is_empty(), mode == api::EnforcementMode::Off);
        }
    }

    #[test]
    fn restore_of_confined_cpus_is_retried() {
        let mut bench = RestoreBench::new(&["a", "b"], r#"{"enforcement": {"herding": {"mode": "on"}}}"#);
        bench.admit("a").unwrap();
        assert_eq!(bench.knob("b/cpuset.cpus"), "0,3-7");
        let refused = fixture::refuse(&bench.dir.path().join("cgroup/b/cpuset.cpus"));
        bench.release("a");
        assert_eq!(bench.pending_after(0).len(), 1);
        drop(refused);
        bench.write_knob("b/cpuset.cpus", "0,3-7");
        assert_eq!(bench.pending_after(6), []);
        assert_eq!(bench.knob("b/cpuset.cpus"), "");
    }
}
