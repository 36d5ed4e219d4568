//! Moves interrupts and other kernel work off exclusive CPUs: `enforcement.interrupts`.
//!
//! # Algorithm
//! All affinities are read when the exclusive CPUs change, and every few seconds while there are any, because drivers
//! are loaded and other programs write the same files. Those that contain exclusive CPUs are written, see
//! [`numaward_enforce::interrupts`]. irqbalance is asked first to avoid these CPUs, and last to use them again.
//!
//! # Invariants
//! The original value is stored before a file is written. A failed write is reported once, and retried only when the
//! exclusive CPUs change.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_enforce::{
    interrupts::{Affinities, AffinityChange, AffinityError, AffinityWrite, MovedAffinities, plan},
    irqbalance::Irqbalance,
};
use numaward_guarantee::error::AdmissionError;
use numaward_model::EventReport;
use numaward_topology::CpuSet;

use crate::core::Core;

/// Interval for reading the affinities.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of names in an event.
const MAX_NAMES_IN_EVENT: usize = 20;

/// Controller of interrupt affinities.
#[derive(Debug)]
pub(super) struct Interrupts {
    root: PathBuf,
    affinities: Affinities,
    /// CPUs that interrupts avoid.
    avoid: CpuSet,
    last_check: Option<Instant>,
    /// Failed writes by file: name of the interrupt, and the error; `None` if the affinity can never be changed.
    refused: BTreeMap<String, (String, Option<String>)>,
    /// Interrupts that could not be moved, as reported last.
    left: BTreeSet<String>,
    /// CPUs that each irqbalance process was asked to avoid.
    ban_requests: Vec<(Irqbalance, CpuSet)>,
}

impl Interrupts {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            affinities: Affinities::new(&root),
            root,
            avoid: CpuSet::new(),
            last_check: None,
            refused: BTreeMap::new(),
            left: BTreeSet::new(),
            ban_requests: Vec::new(),
        }
    }

    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        let is_on = core.config.enforcement.moves_interrupts();
        let avoid = if is_on { core.store.state.ledger.all_exclusive_cpus() } else { CpuSet::new() };
        let is_idle = avoid.is_empty() && core.store.state.interrupts.is_empty();
        let is_due = self.last_check.is_none_or(|last_check| now.duration_since(last_check) >= POLL_INTERVAL);
        if avoid == self.avoid && (is_idle || !is_due) {
            return;
        }
        if avoid != self.avoid {
            self.refused.retain(|_, (_, reason)| reason.is_none());
        }
        (self.avoid, self.last_check) = (avoid, Some(now));
        if let Err(error) = self.reconcile(core) {
            tracing::error!(%error, "interrupts are not moved: their original affinities cannot be stored");
        }
    }

    fn reconcile(&mut self, core: &mut Core) -> Result<(), AdmissionError> {
        let mut left = BTreeSet::new();
        if !self.avoid.is_empty() {
            left.extend(self.ban(core)?);
        }
        let before = core.store.state.interrupts.affinities.clone();
        let mut seen = self.affinities.read_all(&before);
        for affinity in &mut seen {
            let is_refused = self.refused.get(&affinity.path).is_some_and(|(name, _)| *name == affinity.name);
            // Restores are always retried.
            affinity.is_fixed |= is_refused && !self.avoid.is_empty();
        }
        let mut plan = plan(&seen, &before, &self.avoid, &core.policy.machine);
        let stored = |core: &mut Core, affinities| {
            core.save_part(
                |state| &mut state.interrupts,
                MovedAffinities { affinities, ..core.store.state.interrupts.clone() },
            )
        };
        stored(core, plan.moved.clone())?;
        let (mut moved, mut restored, mut returned) = (Vec::new(), Vec::new(), Vec::new());
        for write in plan.writes {
            let AffinityWrite { path, name, way, .. } = &write;
            let written = self.affinities.write(&write);
            core.metrics.wrote_affinity(&written);
            match written {
                Ok(()) => match way {
                    AffinityChange::Away => moved.push(name.clone()),
                    AffinityChange::AwayAgain => returned.push(name.clone()),
                    AffinityChange::Back => {
                        plan.moved.remove(path);
                        restored.push(name.clone());
                    }
                },
                Err(error) => {
                    if !before.contains_key(path) {
                        plan.moved.remove(path);
                    }
                    plan.stay.insert(path.clone(), name.clone());
                    let reason = (!matches!(error, AffinityError::Fixed)).then(|| error.to_string());
                    tracing::debug!(name, %error, "the affinity cannot be written");
                    self.refused.insert(path.clone(), (name.clone(), reason));
                }
            }
        }
        stored(core, plan.moved)?;
        let is_there = |path: &String| {
            let affinity = seen.iter().find(|affinity| affinity.path == *path);
            affinity.is_some_and(|of| self.affinities.effective(of).intersects(&self.avoid))
        };
        let stay = plan.stay.into_iter().filter(|(path, _)| is_there(path));
        left.extend(stay.map(|(path, name)| match self.refused.get(&path) {
            Some((_, Some(reason))) => format!("{name}: {reason}"),
            _ => name,
        }));
        if self.avoid.is_empty() {
            left.extend(self.lift_ban(core)?);
        }
        core.metrics.affinities(core.store.state.interrupts.affinities.len(), left.len());
        self.report(core, [moved, restored, returned], left);
        Ok(())
    }

    /// Asks irqbalance to avoid the CPUs. Returns the reason if it does not.
    fn ban(&mut self, core: &mut Core) -> Result<Option<String>, AdmissionError> {
        let all = Irqbalance::all(&self.root);
        self.ban_requests.retain(|(one, _)| all.contains(one));
        for one in all {
            let found = match core.store.state.interrupts.banned.clone().map_or_else(|| one.banned(), Ok) {
                Ok(found) => found,
                Err(error) => return Ok(Some(self.irqbalance_hint(&error.to_string()))),
            };
            let wanted = (one.clone(), &found | &self.avoid);
            if self.ban_requests.contains(&wanted) {
                continue;
            }
            core.save_part(
                |state| &mut state.interrupts,
                MovedAffinities { banned: Some(found), ..core.store.state.interrupts.clone() },
            )?;
            if let Err(error) = one.ban(&wanted.1) {
                return Ok(Some(self.irqbalance_hint(&error.to_string())));
            }
            tracing::info!(cpus = %wanted.1, "asked irqbalance to keep interrupts off these CPUs");
            self.ban_requests.retain(|(other, _)| *other != one);
            self.ban_requests.push(wanted);
        }
        Ok(None)
    }

    /// Lets irqbalance use all CPUs of its own configuration again. Returns the reason if it does not.
    fn lift_ban(&mut self, core: &mut Core) -> Result<Option<String>, AdmissionError> {
        let Some(found) = core.store.state.interrupts.banned.clone() else { return Ok(None) };
        self.ban_requests.clear();
        for one in Irqbalance::all(&self.root) {
            if let Err(error) = one.ban(&found) {
                return Ok(Some(format!("irqbalance still avoids the released CPUs: {error}")));
            }
        }
        core.save_part(
            |state| &mut state.interrupts,
            MovedAffinities { banned: None, ..core.store.state.interrupts.clone() },
        )?;
        Ok(None)
    }

    fn irqbalance_hint(&self, reason: &str) -> String {
        format!(
            "irqbalance moves interrupts there ({reason}): start it with IRQBALANCE_BANNED_CPULIST={}",
            self.avoid
        )
    }

    fn report(&mut self, core: &Core, [moved, restored, returned]: [Vec<String>; 3], left: BTreeSet<String>) {
        let avoid = &self.avoid;
        let events = [
            (moved, Severity::Info, format!("Moved off exclusive CPUs {avoid}")),
            (restored, Severity::Info, "Restored the original CPUs".to_owned()),
            (
                returned,
                Severity::Warning,
                format!(
                    "Another program moved these to exclusive CPUs {avoid}, and they were moved off again (if it is irqbalance, \
                     start it with IRQBALANCE_BANNED_CPULIST={avoid})"
                ),
            ),
        ];
        let report = |severity, what: &str, names: &[String]| {
            let report =
                EventReport::new(EventKind::InterruptsMoved, format!("{what}: {}.", join_names(names)));
            core.report(None, report.severity(severity).detail("cpus", avoid).detail("count", names.len()));
        };
        for (names, severity, what) in events.iter().filter(|(names, ..)| !names.is_empty()) {
            report(*severity, what, names);
        }
        if left != self.left && !left.is_empty() {
            let names: Vec<String> = left.iter().cloned().collect();
            report(Severity::Warning, &format!("These stay on exclusive CPUs {avoid}"), &names);
        }
        self.left = left;
    }
}

/// Joins the first names, with the number of omitted ones.
pub(super) fn join_names(names: &[String]) -> String {
    let listed = names[..names.len().min(MAX_NAMES_IN_EVENT)].join(", ");
    match names.len().saturating_sub(MAX_NAMES_IN_EVENT) {
        0 => listed,
        more => format!("{listed}, and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, sync::Arc};

    use numaward_api as api;
    use numaward_config::{Config, enforcement};
    use numaward_guarantee::request::Request;

    use super::*;
    use crate::core::release;
    use crate::{
        reconciler::{AdmissionOutcome, ReconcilerLoop, tests::reconciler_loop},
        testing::{self as fixture, TestHost},
    };

    /// Host with one cgroup, a movable interrupt, a fixed interrupt on CPU 1, and workqueues.
    struct InterruptBench {
        dir: tempfile::TempDir,
        host: Arc<TestHost>,
        config: Config,
    }

    impl InterruptBench {
        fn new() -> Self {
            let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(TestHost::small()));
            for cgroup in ["", "a"] {
                fixture::cgroup(&dir.path().join("cgroup").join(cgroup), &host.machine.lock().unwrap());
            }
            let put = |path: &str, text: &str| {
                let path = dir.path().join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, format!("{text}\n")).unwrap();
            };
            put("sys/kernel/irq/24/actions", "eth0");
            put("proc/irq/24/smp_affinity_list", "0-7");
            put("sys/kernel/irq/25/actions", "nvme0q2");
            put("proc/irq/25/smp_affinity_list", "1-2");
            let fixed: fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o444);
            fs::set_permissions(dir.path().join("proc/irq/25/smp_affinity_list"), fixed).unwrap();
            put("sys/devices/virtual/workqueue/cpumask", "ff");
            let mut config = Config {
                state_directory: dir.path().join("state"),
                host_root: dir.path().to_owned(),
                ..Config::default()
            };
            config.enforcement.interrupts = enforcement::Interrupts::MoveAway;
            Self { dir, host, config }
        }

        fn start(&self) -> ReconcilerLoop {
            reconciler_loop(&self.config, &self.dir.path().join("cgroup"), &self.host)
        }

        fn read(&self, path: &str) -> String {
            fixture::line(&self.dir.path().join(path))
        }

        fn affinity(&self, number: u32) -> String {
            self.read(&format!("proc/irq/{number}/smp_affinity_list"))
        }

        fn happened(&self) -> Vec<String> {
            let happened = std::mem::take(&mut *self.host.happened.lock().unwrap());
            let of = happened.into_iter().filter(|(_, report)| report.kind == EventKind::InterruptsMoved);
            of.map(|(_, report)| report.message).collect()
        }
    }

    fn admit(reconciler: &mut ReconcilerLoop) {
        let request = Request::new(&api::AllocationRequest {
            cpus: Some(api::Cpus::whole(3)),
            ..api::AllocationRequest::new("a", api::Target::Cgroup("/a".to_owned()), "256Mi")
        });
        assert!(matches!(reconciler.admit(&request.unwrap(), false), Ok(AdmissionOutcome::Admitted(_))));
    }

    fn tick(reconciler: &mut ReconcilerLoop) {
        let ReconcilerLoop { controllers, core, .. } = reconciler;
        controllers.host.interrupts.tick(core, Instant::now());
    }

    fn is_untouched(path: &Path) -> bool {
        !path.join("state/ledger.json").exists()
            || !fs::read_to_string(path.join("state/ledger.json")).unwrap().contains("affinities")
    }

    #[test]
    fn interrupts_move_until_release() {
        let bench = InterruptBench::new();
        let mut reconciler = bench.start();
        tick(&mut reconciler);
        assert!(bench.happened().is_empty(), "nothing is exclusive");
        admit(&mut reconciler);
        tick(&mut reconciler);
        let exclusive = reconciler.core.store.state.ledger.all_exclusive_cpus();
        assert_eq!(exclusive, "1-3".parse().unwrap());
        assert_eq!((bench.affinity(24).as_str(), bench.affinity(25).as_str()), ("0,4-7", "1-2"));
        assert_eq!(bench.read("sys/devices/virtual/workqueue/cpumask"), "000000f1");
        assert_eq!(
            bench.happened(),
            [
                "Moved off exclusive CPUs 1-3: unbound workqueues, interrupt 24 (eth0).",
                "These stay on exclusive CPUs 1-3: interrupt 25 (nvme0q2)."
            ]
        );
        tick(&mut reconciler);
        assert!(bench.happened().is_empty(), "it is said once");
        // The daemon is restarted before the release.
        drop(reconciler);
        let mut reconciler = bench.start();
        tick(&mut reconciler);
        assert_eq!(bench.affinity(24), "0,4-7");
        release::release(&mut reconciler.core, "a").unwrap();
        tick(&mut reconciler);
        assert_eq!((bench.affinity(24).as_str(), bench.affinity(25).as_str()), ("0-7", "1-2"));
        assert_eq!(bench.read("sys/devices/virtual/workqueue/cpumask"), "000000ff");
        let happened = bench.happened();
        let last = "Restored the original CPUs: unbound workqueues, interrupt 24 (eth0).";
        assert_eq!(happened.last().map(String::as_str), Some(last));
        assert!(reconciler.core.store.state.interrupts.is_empty());
    }

    #[test]
    fn disabled_setting_restores_affinities() {
        let mut bench = InterruptBench::new();
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        tick(&mut reconciler);
        assert_eq!(bench.affinity(24), "0,4-7");
        drop(reconciler);
        bench.config.enforcement.interrupts = enforcement::Interrupts::Leave;
        drop(bench.start());
        assert_eq!(bench.affinity(24), "0-7");
    }

    #[test]
    fn is_inactive_by_default() {
        let mut bench = InterruptBench::new();
        bench.config.enforcement.interrupts = enforcement::Interrupts::default();
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        tick(&mut reconciler);
        assert_eq!(
            (bench.affinity(24).as_str(), reconciler.controllers.host.interrupts.last_check),
            ("0-7", None)
        );
        assert!(bench.happened().is_empty() && is_untouched(bench.dir.path()));
    }
}
