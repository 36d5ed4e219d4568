//! Keeps the kernel's own work off exclusive CPUs: `enforcement.interrupts`.
//!
//! Algorithm: when other CPUs are exclusive than before, and every few seconds while any are, as drivers come and others
//! write the same files, all affinities are read and those that reach exclusive CPUs are written, see
//! [`numaward_enforce::interrupts`]. irqbalance is asked first to keep off these CPUs, and last to use them again.
//!
//! Invariants: what was found is stored before anything is written. What cannot be moved is reported once, and not tried
//! again until other CPUs are exclusive.

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

/// How often it is looked what came or was written by others.
const LOOK: Duration = Duration::from_secs(10);
/// How many are named in an event.
const NAMES: usize = 20;

/// Moves interrupts and the like.
#[derive(Debug)]
pub(super) struct Interrupts {
    root: PathBuf,
    affinities: Affinities,
    /// The CPUs that are kept free.
    avoid: CpuSet,
    looked: Option<Instant>,
    /// What cannot be written, by file: what it is of, and the reason where it is not the kernel's nature.
    refused: BTreeMap<String, (String, Option<String>)>,
    /// What could not be moved, as reported last.
    left: BTreeSet<String>,
    /// What processes of irqbalance were asked to keep off.
    asked: Vec<(Irqbalance, CpuSet)>,
}

impl Interrupts {
    pub(super) fn new(root: PathBuf) -> Self {
        Self {
            affinities: Affinities::new(&root),
            root,
            avoid: CpuSet::new(),
            looked: None,
            refused: BTreeMap::new(),
            left: BTreeSet::new(),
            asked: Vec::new(),
        }
    }

    pub(super) fn turn(&mut self, core: &mut Core, now: Instant) {
        let is_on = core.config.enforcement.moves_interrupts();
        let avoid = if is_on { core.store.state.ledger.all_exclusive_cpus() } else { CpuSet::new() };
        let is_idle = avoid.is_empty() && core.store.state.interrupts.is_empty();
        let is_due = self.looked.is_none_or(|looked| now.duration_since(looked) >= LOOK);
        if avoid == self.avoid && (is_idle || !is_due) {
            return;
        }
        if avoid != self.avoid {
            self.refused.retain(|_, (_, reason)| reason.is_none());
        }
        (self.avoid, self.looked) = (avoid, Some(now));
        if let Err(error) = self.follow(core) {
            tracing::error!(%error, "interrupts are left where they are, as what was found cannot be stored");
        }
    }

    fn follow(&mut self, core: &mut Core) -> Result<(), AdmissionError> {
        let mut left = BTreeSet::new();
        if !self.avoid.is_empty() {
            left.extend(self.ban(core)?);
        }
        let before = core.store.state.interrupts.affinities.clone();
        let mut seen = self.affinities.read_all(&before);
        for affinity in &mut seen {
            let is_refused = self.refused.get(&affinity.path).is_some_and(|(name, _)| *name == affinity.name);
            // What is to be given back is tried again and again.
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
        let (mut moved, mut back, mut returned) = (Vec::new(), Vec::new(), Vec::new());
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
                        back.push(name.clone());
                    }
                },
                Err(error) => {
                    if !before.contains_key(path) {
                        plan.moved.remove(path);
                    }
                    plan.stay.insert(path.clone(), name.clone());
                    let reason = (!matches!(error, AffinityError::Fixed)).then(|| error.to_string());
                    tracing::debug!(name, %error, "not moved");
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
        self.report(core, [moved, back, returned], left);
        Ok(())
    }

    /// Asks irqbalance to keep off the CPUs too; why it does not.
    fn ban(&mut self, core: &mut Core) -> Result<Option<String>, AdmissionError> {
        let all = Irqbalance::all(&self.root);
        self.asked.retain(|(one, _)| all.contains(one));
        for one in all {
            let found = match core.store.state.interrupts.banned.clone().map_or_else(|| one.banned(), Ok) {
                Ok(found) => found,
                Err(error) => return Ok(Some(self.unheeded(&error.to_string()))),
            };
            let wanted = (one.clone(), &found | &self.avoid);
            if self.asked.contains(&wanted) {
                continue;
            }
            core.save_part(
                |state| &mut state.interrupts,
                MovedAffinities { banned: Some(found), ..core.store.state.interrupts.clone() },
            )?;
            if let Err(error) = one.ban(&wanted.1) {
                return Ok(Some(self.unheeded(&error.to_string())));
            }
            tracing::info!(cpus = %wanted.1, "irqbalance is asked to keep interrupts off");
            self.asked.retain(|(other, _)| *other != one);
            self.asked.push(wanted);
        }
        Ok(None)
    }

    /// Lets irqbalance use all CPUs again that its configuration lets it use; why it does not.
    fn lift_ban(&mut self, core: &mut Core) -> Result<Option<String>, AdmissionError> {
        let Some(found) = core.store.state.interrupts.banned.clone() else { return Ok(None) };
        self.asked.clear();
        for one in Irqbalance::all(&self.root) {
            if let Err(error) = one.ban(&found) {
                return Ok(Some(format!("irqbalance still keeps off them: {error}")));
            }
        }
        core.save_part(
            |state| &mut state.interrupts,
            MovedAffinities { banned: None, ..core.store.state.interrupts.clone() },
        )?;
        Ok(None)
    }

    fn unheeded(&self, reason: &str) -> String {
        format!(
            "irqbalance moves interrupts there ({reason}): start it with IRQBALANCE_BANNED_CPULIST={}",
            self.avoid
        )
    }

    fn report(&mut self, core: &Core, [moved, back, returned]: [Vec<String>; 3], left: BTreeSet<String>) {
        let avoid = &self.avoid;
        let events = [
            (moved, Severity::Info, format!("Moved off exclusive CPUs {avoid}")),
            (back, Severity::Info, "Given back the CPUs that they had before".to_owned()),
            (
                returned,
                Severity::Warning,
                format!(
                    "Somebody moved these to exclusive CPUs {avoid}, and they were moved off again (if it is irqbalance, \
                     start it with IRQBALANCE_BANNED_CPULIST={avoid})"
                ),
            ),
        ];
        let report = |severity, what: &str, names: &[String]| {
            let report =
                EventReport::new(EventKind::InterruptsMoved, format!("{what}: {}.", in_words(names)));
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

/// The first of many, and how many there are.
fn in_words(names: &[String]) -> String {
    let shown = names[..names.len().min(NAMES)].join(", ");
    match names.len().saturating_sub(NAMES) {
        0 => shown,
        more => format!("{shown}, and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, sync::Arc};

    use numaward_api as api;
    use numaward_config::{Config, enforcement};
    use numaward_guarantee::request::Request;

    use super::*;
    use crate::{
        reconciler::{Answer, ReconcilerLoop, tests::reconciler_loop},
        testing::{self as fixture, Host},
    };

    /// A host with one cgroup, an interrupt and a fixed one on CPU 1, and workqueues.
    struct Bench {
        dir: tempfile::TempDir,
        host: Arc<Host>,
        config: Config,
    }

    impl Bench {
        fn new() -> Self {
            let (dir, host) = (tempfile::tempdir().unwrap(), Arc::new(Host::small()));
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

        fn of(&self, number: u32) -> String {
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
        assert!(matches!(reconciler.admit(&request.unwrap(), false), Ok(Answer::Admitted(_))));
    }

    fn turn(reconciler: &mut ReconcilerLoop) {
        let ReconcilerLoop { controllers, core, .. } = reconciler;
        controllers.host.interrupts.turn(core, Instant::now());
    }

    fn is_untouched(path: &Path) -> bool {
        !path.join("state/ledger.json").exists()
            || !fs::read_to_string(path.join("state/ledger.json")).unwrap().contains("affinities")
    }

    #[test]
    fn interrupts_leave_with_the_guarantee_and_come_back_with_its_release() {
        let bench = Bench::new();
        let mut reconciler = bench.start();
        turn(&mut reconciler);
        assert!(bench.happened().is_empty(), "nothing is exclusive");
        admit(&mut reconciler);
        turn(&mut reconciler);
        let exclusive = reconciler.core.store.state.ledger.all_exclusive_cpus();
        assert_eq!(exclusive, "1-3".parse().unwrap());
        assert_eq!((bench.of(24).as_str(), bench.of(25).as_str()), ("0,4-7", "1-2"));
        assert_eq!(bench.read("sys/devices/virtual/workqueue/cpumask"), "000000f1");
        assert_eq!(
            bench.happened(),
            [
                "Moved off exclusive CPUs 1-3: unbound workqueues, interrupt 24 (eth0).",
                "These stay on exclusive CPUs 1-3: interrupt 25 (nvme0q2)."
            ]
        );
        turn(&mut reconciler);
        assert!(bench.happened().is_empty(), "it is said once");
        // The daemon dies, and another one releases.
        drop(reconciler);
        let mut reconciler = bench.start();
        turn(&mut reconciler);
        assert_eq!(bench.of(24), "0,4-7");
        reconciler.core.release("a").unwrap();
        turn(&mut reconciler);
        assert_eq!((bench.of(24).as_str(), bench.of(25).as_str()), ("0-7", "1-2"));
        assert_eq!(bench.read("sys/devices/virtual/workqueue/cpumask"), "000000ff");
        let happened = bench.happened();
        let last = "Given back the CPUs that they had before: unbound workqueues, interrupt 24 (eth0).";
        assert_eq!(happened.last().map(String::as_str), Some(last));
        assert!(reconciler.core.store.state.interrupts.is_empty());
    }

    #[test]
    fn a_start_without_the_setting_gives_all_back() {
        let mut bench = Bench::new();
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        turn(&mut reconciler);
        assert_eq!(bench.of(24), "0,4-7");
        drop(reconciler);
        bench.config.enforcement.interrupts = enforcement::Interrupts::Leave;
        drop(bench.start());
        assert_eq!(bench.of(24), "0-7");
    }

    #[test]
    fn nothing_is_read_or_written_by_default() {
        let mut bench = Bench::new();
        bench.config.enforcement.interrupts = enforcement::Interrupts::default();
        let mut reconciler = bench.start();
        admit(&mut reconciler);
        turn(&mut reconciler);
        assert_eq!((bench.of(24).as_str(), reconciler.controllers.host.interrupts.looked), ("0-7", None));
        assert!(bench.happened().is_empty() && is_untouched(bench.dir.path()));
    }
}
