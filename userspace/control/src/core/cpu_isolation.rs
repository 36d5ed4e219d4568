//! CPU isolation: keeps all other cgroups off the CPUs that a workload holds exclusively.
//!
//! # Problem
//! The kernel limits the CPUs of a whole subtree, so confining a cgroup high in the tree changes few knobs. An
//! ancestor of a workload with exclusive CPUs cannot be confined itself: the workload would lose its CPUs.
//!
//! # Terms
//! - *confined*: `cpuset.cpus` is limited to the shared pool.
//! - *descended*: not confined, because a cgroup with a guarantee or one of `systemSlices` may be below it; its
//!   children are confined instead. The root is always descended.
//!
//! # Algorithm
//! While any CPU is exclusive, each highest cgroup that is neither descended, nor has a guarantee, nor is one of
//! `systemSlices`, is confined: to the intersection of its original set and the shared pool, or to the whole pool if
//! it had no set. A cgroup that is no longer confined gets its original set again. This happens before CPUs become
//! exclusive, after they are released, when a descended cgroup gets a new child, and periodically.
//!
//! If the configuration does not isolate, a workload can request it (`isolate`): while it holds exclusive CPUs, other
//! cgroups are confined to all CPUs except those of the workloads that request isolation.
//!
//! # Invariants
//! - The ledger stores the original and the new CPU set before the knob is written.
//! - A confined set is a non-empty subset of the original set.
//! - A cgroup that cannot be confined is reported and keeps its CPUs.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::{Duration, Instant},
};

use numaward_api::{self as api, EnforcementMode, EventKind};
use numaward_cgroup::{
    CgroupEvent, CgroupPath, EXEC_PARENT, Hierarchy,
    knob::{Knob, KnobValue},
    read, read_lossy,
};
use numaward_config::enforcement::CgroupPattern;
use numaward_enforce::{Owner, SettingsChange};
use numaward_engine::Ledger;
use numaward_guarantee::{error::AdmissionError, narrowing::Narrowing, state::State};
use numaward_model::{EventReport, Settings};
use numaward_topology::CpuSet;

use super::{Core, execution::STEPS_PER_POLL, narrowing};

/// Number of cgroups in a dry-run report up to which the next report is not delayed.
const SMALL_REPORT_LEN: usize = 100;
/// Delay from the start of a larger or interrupted report to the next one, as a multiple of the time that it took.
const REPORT_DELAY_FACTOR: u32 = 20;
/// Upper bound of the delay between two reports.
const MAX_REPORT_DELAY: Duration = Duration::from_mins(1);

/// State of CPU isolation.
#[derive(Debug, Default)]
pub(crate) struct CpuIsolation {
    /// The effective mode: the configured one, or on while a workload requests isolation.
    effective: EnforcementMode,
    system: Vec<CgroupPattern>,
    descended: BTreeSet<CgroupPath>,
    /// CPU sets that a dry run would write.
    dry_run: BTreeMap<CgroupPath, CpuSet>,
    refused: BTreeMap<CgroupPath, ConfineError>,
    processes_in_root: Option<u64>,
    /// True if the dry-run report is out of date.
    is_outdated: bool,
    /// Earliest time of the next dry-run report; `None` if it is not delayed.
    pub(crate) next_report: Option<Instant>,
}

/// Reason why a cgroup cannot be confined.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ConfineError {
    /// The CPU set that was intended; `None` if it could not be determined.
    wanted: Option<CpuSet>,
    reason: String,
}

/// Partition of the cgroup tree into confined and descended cgroups.
#[derive(Debug, Default, PartialEq, Eq)]
struct ConfinementPlan {
    confined: Vec<CgroupPath>,
    descended: BTreeSet<CgroupPath>,
}

/// Returns the highest cgroups that may be confined; `None` if the search was interrupted.
fn plan_confinement<C: IntoIterator<Item = CgroupPath>>(
    children: impl Fn(&CgroupPath) -> C,
    system: &[CgroupPattern],
    guaranteed: &BTreeSet<CgroupPath>,
    mut is_interrupted: impl FnMut() -> bool,
) -> Option<ConfinementPlan> {
    let mut plan = ConfinementPlan::default();
    let mut open = vec![CgroupPath::root()];
    let commands = CgroupPath::root().child(EXEC_PARENT).ok();
    while let Some(parent) = open.pop() {
        for child in children(&parent) {
            if is_interrupted() {
                return None;
            }
            if guaranteed.contains(&child) || system.iter().any(|pattern| pattern.matches(&child)) {
                continue;
            }
            let is_above = guaranteed.range(&child..).next().is_some_and(|below| child.contains(below));
            if is_above
                || commands.as_ref() == Some(&child)
                || system.iter().any(|pattern| pattern.may_match_below(&child))
            {
                open.push(child);
            } else {
                plan.confined.push(child);
            }
        }
        plan.descended.insert(parent);
    }
    Some(plan)
}

/// Returns the number of user processes in the root cgroup; `None` if they cannot be read, or if it was interrupted.
fn processes_in_root(
    host_root: &Path,
    hierarchy: &Hierarchy,
    mut is_interrupted: impl FnMut() -> bool,
) -> Option<u64> {
    /// `PF_KTHREAD` of linux/sched.h.
    const KERNEL_THREAD: u64 = 0x0020_0000;
    let is_kernels = |process: u32| {
        let stat = read_lossy(&host_root.join("proc").join(process.to_string()).join("stat")).ok()?;
        // The name, in brackets, may hold any character. The flags are the seventh field after it (proc(5)).
        let flags = stat.rsplit_once(") ")?.1.split(' ').nth(6)?.parse::<u64>().ok()?;
        Some(flags & KERNEL_THREAD != 0)
    };
    let (mut count, mut is_complete) = (0, true);
    let read = read::visit_processes(hierarchy.root(), |process| {
        is_complete = !is_interrupted();
        count += u64::from(is_complete && is_kernels(process) == Some(false));
        is_complete
    });
    (read.is_ok() && is_complete).then_some(count)
}

impl CpuIsolation {
    pub(crate) fn new(mode: EnforcementMode, system: Vec<CgroupPattern>) -> Self {
        Self { effective: mode, system, ..Self::default() }
    }

    /// Returns true if cgroups are confined, or reported by a dry run.
    pub(crate) fn is_on(&self) -> bool {
        self.effective != EnforcementMode::Off
    }

    /// Returns true if this event may change the set of confined cgroups.
    pub(crate) fn concerns(&self, event: &CgroupEvent) -> bool {
        let (CgroupEvent::Added(cgroup) | CgroupEvent::Removed(cgroup)) = event;
        self.is_on() && cgroup.path.parent().is_some_and(|parent| self.descended.contains(&parent))
    }

    /// Returns true if a dry-run report is pending and its delay is over.
    pub(crate) fn is_report_due(&self, now: Instant) -> bool {
        self.is_outdated && self.next_report.is_none_or(|next| now >= next)
    }

    /// Records the end of a report or change that began at `start`. A costly report delays the next one.
    fn note_end(&mut self, is_complete: bool, start: Instant, took: Duration) {
        let is_costly = !is_complete || self.dry_run.len() > SMALL_REPORT_LEN;
        self.is_outdated = !is_complete;
        self.next_report = is_costly.then(|| start + (took * REPORT_DELAY_FACTOR).min(MAX_REPORT_DELAY));
    }

    /// Returns the refusal of a cgroup for the CPUs that it was to get, which remains until the cgroup is confined.
    fn refusal_of(&self, path: &CgroupPath) -> Option<&ConfineError> {
        self.refused.get(path).filter(|refused| refused.wanted.is_some())
    }

    /// Takes over the CPU sets that a dry run would write; returns true if they changed.
    fn report_dry_run(&mut self, wanted: BTreeMap<CgroupPath, CpuSet>) -> bool {
        let is_changed = self.dry_run != wanted;
        if is_changed {
            // There may be thousands of cgroups, and all of them change whenever CPUs become exclusive.
            tracing::info!(
                cgroups = wanted.len(),
                "dry run: cgroups would be confined; `numaward status` lists them"
            );
        }
        self.dry_run = wanted;
        is_changed
    }

    /// Returns the state of CPU isolation for the API.
    pub(crate) fn status(
        &self,
        state: &State,
        drift: impl Fn(&CgroupPath) -> Vec<api::Drift>,
    ) -> api::CpuIsolation {
        let confined = |path: &CgroupPath, cpus: &CpuSet, state| api::ConfinedCgroup {
            cgroup: path.to_string(),
            cpus: cpus.to_string(),
            state,
            reason: None,
            drift: drift(path),
        };
        let held = state.isolated().iter().filter_map(|path| {
            let cpus = state.applied.get(path)?.settings.cpus.as_ref()?;
            Some(confined(path, cpus, api::ConfinementState::Confined))
        });
        let would =
            self.dry_run.iter().map(|(path, cpus)| confined(path, cpus, api::ConfinementState::DryRun));
        let refused = self.refused.iter().map(|(path, refusal)| api::ConfinedCgroup {
            reason: Some(refusal.reason.clone()),
            ..confined(path, &CpuSet::new(), api::ConfinementState::Refused)
        });
        let mut cgroups: Vec<_> = held.chain(would).chain(refused).collect();
        cgroups.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
        api::CpuIsolation { mode: self.effective, cgroups, processes_in_root: self.processes_in_root }
    }
}

/// Confines and restores cgroups according to the current guarantees.
pub(crate) fn update(core: &mut Core, retry: bool) {
    confine_except(core, &[], retry);
}

/// Like [`update`], but a dry-run report waits until no other work is
/// pending, and after a costly report until its delay is over.
pub(crate) fn update_when_idle(core: &mut Core, is_busy: bool) {
    core.isolation.is_outdated = !writes_confinement(core);
    if !core.isolation.is_outdated || (core.isolation.is_report_due(Instant::now()) && !is_busy) {
        update(core, false);
    }
}

/// Confines other cgroups off the CPUs that these cgroups are about to get, and restores the ancestors of these.
pub(crate) fn confine_others(core: &mut Core, paths: &[&CgroupPath]) {
    for path in paths {
        narrowing::widen_around(core, path);
    }
    // The report follows once the guarantee is given.
    if writes_confinement(core) {
        confine_except(core, paths, false);
    }
}

/// Returns true if confining by the current guarantees would write CPU sets.
fn writes_confinement(core: &Core) -> bool {
    !core.store.state.isolated().is_empty()
        || core.policy.isolation(core.mode(), &core.store.state.ledger).0 == EnforcementMode::On
}

/// Confines all cgroups except these and those with a guarantee.
fn confine_except(core: &mut Core, paths: &[&CgroupPath], retry: bool) {
    let (effective, pool) = core.policy.isolation(core.mode(), &core.store.state.ledger);
    core.isolation.effective = effective;
    core.isolation.is_outdated = false;
    if !core.isolation.is_on() || pool.is_none() {
        core.isolation.processes_in_root = None;
    } else if retry || core.isolation.processes_in_root.is_none() {
        let is_report = !writes_confinement(core);
        let is_interrupted = core.execution.interrupt_condition(is_report);
        let processes = processes_in_root(&core.config.host_root, &core.hierarchy, is_interrupted);
        core.isolation.processes_in_root = processes.or(core.isolation.processes_in_root);
    }
    let isolation = &core.isolation;
    if !isolation.is_on() && core.store.state.isolated().is_empty() && isolation.dry_run.is_empty() {
        return;
    }
    let mut guaranteed = core.guaranteed_cgroups();
    guaranteed.extend(paths.iter().copied().cloned());
    let start = Instant::now();
    let is_complete = confine_to_pool(core, &guaranteed, pool.as_ref(), retry);
    core.isolation.note_end(is_complete, start, start.elapsed());
}

/// Returns the settings of a cgroup after its guarantee ends: its confined CPU set, or `None` to restore the original.
pub(crate) fn settings_after_release(core: &mut Core, path: &CgroupPath, after: &Ledger) -> Option<Settings> {
    if let (EnforcementMode::On, Some(pool)) = core.policy.isolation(core.mode(), after) {
        let mut guaranteed = core.guaranteed_cgroups();
        guaranteed.remove(path);
        let children = |parent: &CgroupPath| parent.children(core.hierarchy.root());
        let plan = plan_confinement(children, &core.isolation.system, &guaranteed, || false);
        let is_confined = plan.is_some_and(|plan| plan.confined.contains(path));
        let cpus = is_confined.then(|| confined_cpus(core, path, &pool));
        if let Some(Ok(Some(cpus))) = cpus {
            let narrowing = Narrowing { is_isolated: true, ..Narrowing::default() };
            core.store.state.set_narrowing(path, narrowing);
            return Some(Settings { cpus: Some(cpus), ..Settings::default() });
        }
    }
    None
}

/// Returns the confined CPU set of a cgroup; `None` if its original set is already within the pool.
fn confined_cpus(core: &mut Core, path: &CgroupPath, pool: &CpuSet) -> Result<Option<CpuSet>, String> {
    let found = match core.isolation.effective {
        // A report uses the set in the kernel: asking systemd each time would take too long.
        EnforcementMode::DryRun if core.store.state.applied.get(path).is_none() => {
            match Knob::CpusetCpus.read(&core.hierarchy.dir(path)).map_err(|error| error.to_string())? {
                KnobValue::Cpus(cpus) => cpus,
                _ => CpuSet::new(),
            }
        }
        _ => core.cpus_found(path).map_err(|error| error.to_string())?,
    };
    let narrowing = Narrowing { is_isolated: true, ..core.store.state.narrowing(path) };
    match narrowing::narrowed_cpus_within(core, path, &narrowing, &found, Some(pool)) {
        Some(share) => Ok(Some(share).filter(|share| *share != found)),
        None if pool.is_empty() => Err("the shared pool is empty".to_owned()),
        None => Err(format!("it was set to the CPUs {found}, none of which is in the shared pool {pool}")),
    }
}

/// Confines all cgroups except these to this shared pool; without a pool, confines none. Returns `false` if a
/// report was interrupted because a container runtime waits for an answer: reading the knobs of thousands of
/// cgroups takes longer than the runtime may wait.
fn confine_to_pool(
    core: &mut Core,
    guaranteed: &BTreeSet<CgroupPath>,
    pool: Option<&CpuSet>,
    retry: bool,
) -> bool {
    let mut wanted = BTreeMap::new();
    let mut refused = BTreeMap::new();
    let mut descended = BTreeSet::from([CgroupPath::root()]);
    if let Some(pool) = pool.filter(|_| core.isolation.is_on()) {
        let is_report = !writes_confinement(core);
        let children = |parent: &CgroupPath| parent.children(core.hierarchy.root());
        let is_interrupted = core.execution.interrupt_condition(is_report);
        let Some(plan) = plan_confinement(children, &core.isolation.system, guaranteed, is_interrupted)
        else {
            return false;
        };
        descended = plan.descended;
        for (index, path) in (0_u32..).zip(plan.confined) {
            if is_report && index.is_multiple_of(STEPS_PER_POLL) && core.execution.is_runtime_waiting() {
                return false;
            }
            if !matches!(core.hierarchy.id_of(&path), Ok(Some(_))) {
                continue;
            }
            match confined_cpus(core, &path, pool) {
                Err(reason) => drop(refused.insert(path, ConfineError { wanted: None, reason })),
                Ok(None) => {}
                Ok(Some(share)) => {
                    let before = core.isolation.refusal_of(&path).cloned();
                    let is_tried =
                        before.as_ref().is_some_and(|before| before.wanted.as_ref() == Some(&share));
                    refused.extend(before.map(|before| (path.clone(), before)));
                    if retry || !is_tried {
                        wanted.insert(path, share);
                    }
                }
            }
        }
    }
    core.isolation.descended = descended;
    if core.isolation.effective == EnforcementMode::On {
        for (path, refusal) in &refused {
            report_refused(core, path, refusal);
        }
    }
    let was = std::mem::replace(&mut core.isolation.refused, refused);
    let (would, wanted) = match core.isolation.effective {
        EnforcementMode::DryRun => (wanted, BTreeMap::new()),
        EnforcementMode::Off | EnforcementMode::On => (BTreeMap::new(), wanted),
    };
    let changes = changes(core, &wanted, guaranteed);
    let is_news = core.isolation.report_dry_run(would) | apply(core, changes);
    count_confined(core);
    if is_news || was != core.isolation.refused {
        core.effects.view = true;
    }
    true
}

/// Returns the differences between the current and the intended confined sets.
fn changes(
    core: &Core,
    wanted: &BTreeMap<CgroupPath, CpuSet>,
    guaranteed: &BTreeSet<CgroupPath>,
) -> Vec<(CgroupPath, Option<CpuSet>)> {
    let has = |path: &CgroupPath| {
        let record = core.store.state.applied.get(path)?;
        // A cgroup that was created again at this path has none of these settings.
        let is_it = record.owner != Owner::Cgroupfs
            || core.hierarchy.id_of(path).is_ok_and(|id| id == Some(record.id));
        // Nodes that the guard no longer requires are still to be restored.
        let is_steered = core.store.state.steered().contains_key(path);
        record.settings.cpus.as_ref().filter(|_| is_it && (is_steered || record.settings.mems.is_none()))
    };
    let comes = wanted
        .iter()
        .filter(|(path, share)| !core.store.state.isolated().contains(*path) || has(path) != Some(*share))
        .map(|(path, share)| (path.clone(), Some(share.clone())));
    // A cgroup with a new guarantee gets its new settings in place of these.
    let goes = core
        .store
        .state
        .isolated()
        .iter()
        .filter(|path| !wanted.contains_key(*path) && !guaranteed.contains(*path));
    comes.chain(goes.map(|path| (path.clone(), None))).collect()
}

/// Writes the changes; returns `true` if there were any.
fn apply(core: &mut Core, changes: Vec<(CgroupPath, Option<CpuSet>)>) -> bool {
    if changes.is_empty() {
        return false;
    }
    if let Err(error) = apply_batch(core, &changes) {
        tracing::debug!(%error, "the cgroups cannot be confined as one batch and are confined one by one");
        for (path, share) in changes {
            apply_alone(core, &path, share);
        }
    }
    true
}

fn apply_batch(core: &mut Core, changes: &[(CgroupPath, Option<CpuSet>)]) -> Result<(), AdmissionError> {
    let (mut narrowings, mut settings) = (Vec::new(), Vec::new());
    for (path, share) in changes {
        let narrowing = Narrowing { is_isolated: share.is_some(), ..core.store.state.narrowing(path) };
        let cpus = match share {
            Some(share) => Some(share.clone()),
            None => narrowing::narrowed_cpus(core, path, &narrowing)?,
        };
        settings.push((path.clone(), narrowing::narrowed_settings(core, path, &narrowing, cpus)));
        narrowings.push((path.clone(), narrowing));
    }
    let plan = core.plan(SettingsChange::Each(settings))?;
    narrowing::execute_narrowings(core, narrowings, plan)?;
    for (path, share) in changes {
        core.isolation.refused.remove(path);
        if let Some(share) = share {
            tracing::info!(cgroup = %path, cpus = %share, "confined to the shared pool");
        } else {
            tracing::info!(cgroup = %path, "no longer confined to the shared pool");
        }
    }
    Ok(())
}

fn apply_alone(core: &mut Core, path: &CgroupPath, share: Option<CpuSet>) {
    let Err(refused) = narrowing::narrow(core, path, |narrowing| narrowing.is_isolated = share.is_some())
    else {
        core.isolation.refused.remove(path);
        return;
    };
    // The failed joint plan may have left its intent among the applied settings.
    narrowing::widen(core, path, |narrowing| narrowing.is_isolated = false);
    let is_gone = match &refused {
        AdmissionError::Enforce(error) => error.is_gone(),
        AdmissionError::Failed(failure) => failure.error.is_gone(),
        _ => false,
    };
    if share.is_some() && !is_gone {
        let refusal = ConfineError { wanted: share, reason: refused.to_string() };
        report_refused(core, path, &refusal);
        core.isolation.refused.insert(path.clone(), refusal);
    }
}

fn report_refused(core: &Core, path: &CgroupPath, refusal: &ConfineError) {
    if core.isolation.refused.get(path) != Some(refusal) {
        let message = format!("{path} cannot be kept off exclusive CPUs: {}", refusal.reason);
        core.ports.host.report(Some(path), EventReport::new(EventKind::NotHerded, message));
    }
}

fn count_confined(core: &Core) {
    let (herded, would) = (core.store.state.isolated().len(), core.isolation.dry_run.len());
    core.metrics.confined(herded, would, core.isolation.refused.len());
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn path(text: &str) -> CgroupPath {
        text.parse().unwrap()
    }

    /// Returns the confined cgroups in a tree of these cgroups.
    fn confined(cgroups: &[&str], system: &[&str], guaranteed: &[&str]) -> Vec<String> {
        let cgroups: Vec<CgroupPath> = cgroups.iter().map(|text| path(text)).collect();
        let children = |parent: &CgroupPath| {
            cgroups.iter().filter(|path| path.parent().as_ref() == Some(parent)).cloned().collect::<Vec<_>>()
        };
        let system: Vec<_> = system.iter().map(|text| CgroupPattern::new(text).unwrap()).collect();
        let guaranteed = guaranteed.iter().map(|text| path(text)).collect();
        let plan = plan_confinement(children, &system, &guaranteed, || false).unwrap();
        let mut confined: Vec<_> = plan.confined.iter().map(ToString::to_string).collect();
        confined.sort();
        confined
    }

    #[test]
    fn confinement_plan_is_interruptible() {
        let mut steps = 0;
        let children = |parent: &CgroupPath| {
            let parent = parent.clone();
            (0..1000).map(move |number| parent.child(&number.to_string()).unwrap())
        };
        let plan = plan_confinement(children, &[], &BTreeSet::new(), || {
            steps += 1;
            steps == 3
        });
        assert_eq!((plan, steps), (None, 3));
    }

    #[test]
    fn confines_highest_permitted_cgroups() {
        let tree = [
            "/init.scope",
            "/system.slice",
            "/system.slice/a.service",
            "/system.slice/b.service",
            "/user.slice",
            "/user.slice/c",
            "/user.slice/c/d",
            "/user.slice/c/e",
            "/numaward",
            "/numaward/x",
            "/numaward/y",
        ];
        let init = ["/init.scope"];
        assert_eq!(
            confined(&tree, &init, &[]),
            ["/numaward/x", "/numaward/y", "/system.slice", "/user.slice"]
        );
        assert_eq!(
            confined(&tree, &[], &["/system.slice", "/numaward/x"]),
            ["/init.scope", "/numaward/y", "/user.slice"]
        );
        assert_eq!(
            confined(&tree, &init, &["/user.slice/c/d", "/numaward/x", "/numaward/y"]),
            ["/system.slice", "/user.slice/c/e"]
        );
        assert_eq!(
            confined(&tree, &["/*.slice/b.service", "/init.scope"], &[]),
            ["/numaward/x", "/numaward/y", "/system.slice/a.service", "/user.slice/c"]
        );
    }

    #[test]
    fn counts_user_processes_in_root() {
        let root = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        put("cgroup/cgroup.procs", "2\n7\n8\n9\n");
        put("proc/2/stat", "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0");
        put("proc/7/stat", "7 (a) b) c) S 1 7 7 0 -1 4194560 0 0");
        put("proc/8/stat", "corrupt");
        let hierarchy = Hierarchy::at(&root.path().join("cgroup"));
        assert_eq!(processes_in_root(root.path(), &hierarchy, || false), Some(1));
        assert_eq!(processes_in_root(root.path(), &Hierarchy::at(root.path()), || false), None);
    }

    #[test]
    fn costly_report_delays_the_next() {
        let (mut isolation, start) = (CpuIsolation::default(), Instant::now());
        assert!(!isolation.is_report_due(start), "nothing has changed");
        isolation.is_outdated = true;
        assert!(isolation.is_report_due(start));
        let took = Duration::from_millis(100);
        isolation.note_end(false, start, took);
        assert!(!isolation.is_report_due(start + took * (REPORT_DELAY_FACTOR - 1)));
        assert!(isolation.is_report_due(start + took * REPORT_DELAY_FACTOR), "it was interrupted");
        isolation.note_end(false, start, MAX_REPORT_DELAY);
        assert!(isolation.is_report_due(start + MAX_REPORT_DELAY));
        isolation.note_end(true, start, took);
        assert!(isolation.next_report.is_none() && !isolation.is_report_due(start + MAX_REPORT_DELAY));
    }

    #[test]
    fn changed_dry_run_is_reported_once() {
        let mut isolation = CpuIsolation::new(EnforcementMode::DryRun, Vec::new());
        let wanted = BTreeMap::from([(path("/a"), "0-3".parse().unwrap())]);
        assert!(isolation.report_dry_run(wanted.clone()) && !isolation.report_dry_run(wanted));
        let status = isolation.status(&State::default(), |_| Vec::new());
        let [cgroup] = &status.cgroups[..] else { panic!("{status:?}") };
        assert_eq!((cgroup.cgroup.as_str(), cgroup.cpus.as_str()), ("/a", "0-3"));
        assert_eq!(cgroup.state, api::ConfinementState::DryRun);
    }
}
