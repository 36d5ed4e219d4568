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
    fs,
    path::Path,
    time::{Duration, Instant},
};

use numaward_api::{self as api, EnforcementMode, EventKind};
use numaward_cgroup::{
    CgroupEvent, CgroupPath, EXEC_PARENT, Hierarchy,
    knob::{Knob, KnobValue},
};
use numaward_config::enforcement::CgroupPattern;
use numaward_enforce::{Owner, SettingsChange};
use numaward_engine::Ledger;
use numaward_guarantee::{error::AdmissionError, narrowing::Narrowing};
use numaward_model::{EventReport, Settings};
use numaward_topology::CpuSet;

use super::{Core, execution::STEPS_PER_POLL, machine::has_exclusive_cpus};

/// Number of cgroups in a dry-run report up to which the next report is not delayed.
const SMALL_REPORT_LEN: usize = 100;
/// Delay from the start of a larger or interrupted report to the next one, as a multiple of the time that it took.
const REPORT_DELAY_FACTOR: u32 = 20;
/// Upper bound of the delay between two reports.
const MAX_REPORT_DELAY: Duration = Duration::from_mins(1);

/// State of CPU isolation.
#[derive(Debug, Default)]
pub(crate) struct CpuIsolation {
    /// The configured mode.
    mode: EnforcementMode,
    /// The effective mode: also on while a workload requests isolation.
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
    let processes = fs::read_to_string(hierarchy.root().join("cgroup.procs")).ok()?;
    let is_kernels = |process: &str| {
        let stat = fs::read_to_string(host_root.join("proc").join(process).join("stat")).ok()?;
        // The name, in brackets, may hold any character. The flags are the seventh field after it (proc(5)).
        let flags = stat.rsplit_once(") ")?.1.split(' ').nth(6)?.parse::<u64>().ok()?;
        Some(flags & KERNEL_THREAD != 0)
    };
    let mut count = 0;
    for process in processes.lines() {
        if is_interrupted() {
            return None;
        }
        count += u64::from(is_kernels(process) == Some(false));
    }
    Some(count)
}

/// Returns all CPUs except those of workloads that request isolation; `None` if no workload does.
fn cpus_outside_isolated_workloads(ledger: &Ledger, shared_pool: CpuSet) -> Option<CpuSet> {
    let (mut isolated, mut others) = (CpuSet::new(), shared_pool);
    for (_, account) in ledger.owners() {
        let of = if account.terms.isolate { &mut isolated } else { &mut others };
        account.containers.values().for_each(|held| of.extend(held.held_cpus().iter()));
    }
    (!isolated.is_empty()).then_some(others)
}

impl CpuIsolation {
    pub(crate) fn new(mode: EnforcementMode, system: Vec<CgroupPattern>) -> Self {
        Self { mode, effective: mode, system, ..Self::default() }
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
}

impl Core {
    /// Confines and restores cgroups according to the current guarantees.
    pub(crate) fn update_confinement(&mut self, retry: bool) {
        self.confine_except(&[], retry);
    }

    /// Like [`update_confinement`](Self::update_confinement), but a dry-run report waits until no other work is
    /// pending, and after a costly report until its delay is over.
    pub(crate) fn update_confinement_when_idle(&mut self, is_busy: bool) {
        self.isolation.is_outdated = !self.writes_confinement();
        if !self.isolation.is_outdated || (self.is_dry_run_report_due() && !is_busy) {
            self.update_confinement(false);
        }
    }

    /// Returns true if a dry-run report is pending and its delay is over.
    pub(crate) fn is_dry_run_report_due(&self) -> bool {
        self.isolation.is_outdated && self.isolation.next_report.is_none_or(|next| Instant::now() >= next)
    }

    /// Confines other cgroups off the CPUs that these cgroups are about to get, and restores the ancestors of these.
    pub(super) fn confine_others(&mut self, paths: &[&CgroupPath]) {
        for path in paths {
            self.widen_around(path);
        }
        // The report follows once the guarantee is given.
        if self.writes_confinement() {
            self.confine_except(paths, false);
        }
    }

    /// Returns true if confining by the current guarantees would write CPU sets.
    fn writes_confinement(&self) -> bool {
        !self.store.state.isolated().is_empty()
            || self.mode_and_pool(&self.store.state.ledger).0 == EnforcementMode::On
    }

    /// Confines all cgroups except these and those with a guarantee.
    fn confine_except(&mut self, paths: &[&CgroupPath], retry: bool) {
        let (effective, pool) = self.mode_and_pool(&self.store.state.ledger);
        self.isolation.effective = effective;
        self.isolation.is_outdated = false;
        if !self.isolation.is_on() || pool.is_none() {
            self.isolation.processes_in_root = None;
        } else if retry || self.isolation.processes_in_root.is_none() {
            let is_report = !self.writes_confinement();
            let is_interrupted = self.execution.interrupt_condition(is_report);
            let processes = processes_in_root(&self.config.host_root, &self.hierarchy, is_interrupted);
            self.isolation.processes_in_root = processes.or(self.isolation.processes_in_root);
        }
        if self.has_nothing_to_confine() {
            return;
        }
        let mut guaranteed = self.guaranteed_cgroups();
        guaranteed.extend(paths.iter().copied().cloned());
        let start = Instant::now();
        let is_complete = self.confine_to_pool(&guaranteed, pool.as_ref(), retry);
        let took = start.elapsed();
        let is_costly = !is_complete || self.isolation.dry_run.len() > SMALL_REPORT_LEN;
        self.isolation.is_outdated = !is_complete;
        self.isolation.next_report =
            is_costly.then(|| start + (took * REPORT_DELAY_FACTOR).min(MAX_REPORT_DELAY));
    }

    /// Returns the mode and the shared pool with the guarantees of this ledger; no pool if no CPU is exclusive.
    fn mode_and_pool(&self, ledger: &Ledger) -> (EnforcementMode, Option<CpuSet>) {
        let (mode, pool) = (self.isolation.mode, self.policy.shared_pool(ledger));
        let asked = cpus_outside_isolated_workloads(ledger, pool.clone())
            .filter(|_| mode != EnforcementMode::On && self.mode() == EnforcementMode::On);
        match asked {
            Some(pool) => (EnforcementMode::On, Some(pool)),
            None => (mode, Some(pool).filter(|_| has_exclusive_cpus(ledger))),
        }
    }

    /// Returns true if no cgroup is confined, nor to be confined.
    fn has_nothing_to_confine(&self) -> bool {
        !self.isolation.is_on() && self.store.state.isolated().is_empty() && self.isolation.dry_run.is_empty()
    }

    /// Returns the settings of a cgroup after its guarantee ends: its confined CPU set, or `None` to restore the original.
    pub(super) fn settings_after_release(&mut self, path: &CgroupPath, after: &Ledger) -> Option<Settings> {
        if let (EnforcementMode::On, Some(pool)) = self.mode_and_pool(after) {
            let mut guaranteed = self.guaranteed_cgroups();
            guaranteed.remove(path);
            let children = |parent: &CgroupPath| parent.children(self.hierarchy.root());
            let plan = plan_confinement(children, &self.isolation.system, &guaranteed, || false);
            let is_confined = plan.is_some_and(|plan| plan.confined.contains(path));
            let cpus = is_confined.then(|| self.confined_cpus(path, &pool));
            if let Some(Ok(Some(cpus))) = cpus {
                let narrowing = Narrowing { is_isolated: true, ..Narrowing::default() };
                self.store.state.set_narrowing(path, narrowing);
                return Some(Settings { cpus: Some(cpus), ..Settings::default() });
            }
        }
        None
    }

    pub(super) fn guaranteed_cgroups(&self) -> BTreeSet<CgroupPath> {
        let guaranteed =
            self.store.state.guarantees.values().filter(|guarantee| !guarantee.has_no_guarantee());
        let guaranteed = guaranteed.map(|guarantee| &guarantee.cgroup);
        // Containers keep to the shared pool by themselves.
        let placed = self.store.state.containers.values().map(|placed| &placed.cgroup);
        guaranteed.chain(placed).cloned().collect()
    }

    /// Returns the confined CPU set of a cgroup; `None` if its original set is already within the pool.
    fn confined_cpus(&mut self, path: &CgroupPath, pool: &CpuSet) -> Result<Option<CpuSet>, String> {
        let found = match self.isolation.effective {
            // A report uses the set in the kernel: asking systemd each time would take too long.
            EnforcementMode::DryRun if self.store.state.applied.get(path).is_none() => {
                match Knob::CpusetCpus.read(&self.hierarchy.dir(path)).map_err(|error| error.to_string())? {
                    KnobValue::Cpus(cpus) => cpus,
                    _ => CpuSet::new(),
                }
            }
            _ => self.cpus_found(path).map_err(|error| error.to_string())?,
        };
        let narrowing = Narrowing { is_isolated: true, ..self.store.state.narrowing(path) };
        match self.narrowed_cpus_within(path, &narrowing, &found, Some(pool)) {
            Some(share) => Ok(Some(share).filter(|share| *share != found)),
            None if pool.is_empty() => Err("the shared pool is empty".to_owned()),
            None => {
                Err(format!("it was set to the CPUs {found}, of which none is in the shared pool {pool}"))
            }
        }
    }

    /// Returns the shared pool of isolated cgroups; `None` if no CPU is exclusive.
    pub(super) fn pool_of_isolated(&self) -> Option<CpuSet> {
        self.mode_and_pool(&self.store.state.ledger).1
    }

    /// Confines all cgroups except these to this shared pool; without a pool, confines none. Returns `false` if a
    /// report was interrupted because a container runtime waits for an answer: reading the knobs of thousands of
    /// cgroups takes longer than the runtime may wait.
    fn confine_to_pool(
        &mut self,
        guaranteed: &BTreeSet<CgroupPath>,
        pool: Option<&CpuSet>,
        retry: bool,
    ) -> bool {
        let mut wanted = BTreeMap::new();
        let mut refused = BTreeMap::new();
        let mut descended = BTreeSet::from([CgroupPath::root()]);
        if let Some(pool) = pool.filter(|_| self.isolation.is_on()) {
            let is_report = !self.writes_confinement();
            let children = |parent: &CgroupPath| parent.children(self.hierarchy.root());
            let is_interrupted = self.execution.interrupt_condition(is_report);
            let Some(plan) = plan_confinement(children, &self.isolation.system, guaranteed, is_interrupted)
            else {
                return false;
            };
            descended = plan.descended;
            for (index, path) in (0_u32..).zip(plan.confined) {
                if is_report && index.is_multiple_of(STEPS_PER_POLL) && self.execution.is_runtime_waiting() {
                    return false;
                }
                if !matches!(self.hierarchy.id_of(&path), Ok(Some(_))) {
                    continue;
                }
                match self.confined_cpus(&path, pool) {
                    Err(reason) => drop(refused.insert(path, ConfineError { wanted: None, reason })),
                    Ok(None) => {}
                    Ok(Some(share)) => {
                        // Until it is herded after all.
                        let before = self
                            .isolation
                            .refused
                            .get(&path)
                            .filter(|before| before.wanted.is_some())
                            .cloned();
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
        self.isolation.descended = descended;
        if self.isolation.effective == EnforcementMode::On {
            for (path, refusal) in &refused {
                self.report_refused(path, refusal);
            }
        }
        let was = std::mem::replace(&mut self.isolation.refused, refused);
        let (would, wanted) = match self.isolation.effective {
            EnforcementMode::DryRun => (wanted, BTreeMap::new()),
            EnforcementMode::Off | EnforcementMode::On => (BTreeMap::new(), wanted),
        };
        let changes = self.changes(&wanted, guaranteed);
        let is_news = self.report_dry_run(would) | self.apply(changes);
        self.count_confined();
        if is_news || was != self.isolation.refused {
            self.effects.view = true;
        }
        true
    }

    /// Returns the differences between the current and the intended confined sets.
    fn changes(
        &self,
        wanted: &BTreeMap<CgroupPath, CpuSet>,
        guaranteed: &BTreeSet<CgroupPath>,
    ) -> Vec<(CgroupPath, Option<CpuSet>)> {
        let has = |path: &CgroupPath| {
            let record = self.store.state.applied.get(path)?;
            // A cgroup that was created again at this path has none of these settings.
            let is_it = record.owner != Owner::Cgroupfs
                || self.hierarchy.id_of(path).is_ok_and(|id| id == Some(record.id));
            record.settings.cpus.as_ref().filter(|_| is_it)
        };
        let comes = wanted
            .iter()
            .filter(|(path, share)| !self.store.state.isolated().contains(*path) || has(path) != Some(*share))
            .map(|(path, share)| (path.clone(), Some(share.clone())));
        // A cgroup with a new guarantee gets its new settings in place of these.
        let goes = self
            .store
            .state
            .isolated()
            .iter()
            .filter(|path| !wanted.contains_key(*path) && !guaranteed.contains(*path));
        comes.chain(goes.map(|path| (path.clone(), None))).collect()
    }

    /// Writes the changes; returns `true` if there were any.
    fn apply(&mut self, changes: Vec<(CgroupPath, Option<CpuSet>)>) -> bool {
        if changes.is_empty() {
            return false;
        }
        if let Err(error) = self.apply_batch(&changes) {
            tracing::debug!(%error, "not all can be herded together: one by one");
            for (path, share) in changes {
                self.apply_alone(&path, share);
            }
        }
        true
    }

    fn apply_batch(&mut self, changes: &[(CgroupPath, Option<CpuSet>)]) -> Result<(), AdmissionError> {
        let (mut narrowings, mut settings) = (Vec::new(), Vec::new());
        for (path, share) in changes {
            let narrowing = Narrowing { is_isolated: share.is_some(), ..self.store.state.narrowing(path) };
            let cpus = match share {
                Some(share) => Some(share.clone()),
                None => self.narrowed_cpus(path, &narrowing)?,
            };
            settings.push((path.clone(), self.narrowed_settings(path, &narrowing, cpus)));
            narrowings.push((path.clone(), narrowing));
        }
        let plan = self.plan(SettingsChange::Each(settings))?;
        self.carry_out_narrowings(narrowings, plan)?;
        for (path, share) in changes {
            self.isolation.refused.remove(path);
            if let Some(share) = share {
                tracing::info!(cgroup = %path, cpus = %share, "herded");
            } else {
                tracing::info!(cgroup = %path, "no longer herded");
            }
        }
        Ok(())
    }

    fn apply_alone(&mut self, path: &CgroupPath, share: Option<CpuSet>) {
        let Err(refused) = self.narrow(path, |narrowing| narrowing.is_isolated = share.is_some()) else {
            self.isolation.refused.remove(path);
            return;
        };
        // The failed joint plan may have left its intent among the applied settings.
        self.widen(path, |narrowing| narrowing.is_isolated = false);
        let is_gone = match &refused {
            AdmissionError::Enforce(error) => error.is_gone(),
            AdmissionError::Failed(failure) => failure.error.is_gone(),
            _ => false,
        };
        if share.is_some() && !is_gone {
            let refusal = ConfineError { wanted: share, reason: refused.to_string() };
            self.report_refused(path, &refusal);
            self.isolation.refused.insert(path.clone(), refusal);
        }
    }

    fn report_refused(&self, path: &CgroupPath, refusal: &ConfineError) {
        if self.isolation.refused.get(path) != Some(refusal) {
            let message = format!("{path} cannot be kept off exclusive CPUs: {}", refusal.reason);
            self.ports.events.report(Some(path), EventReport::new(EventKind::NotHerded, message));
        }
    }

    /// Reports the changes that a dry run would make since the last report.
    fn report_dry_run(&mut self, wanted: BTreeMap<CgroupPath, CpuSet>) -> bool {
        let changed = self.isolation.dry_run != wanted;
        if changed {
            // There may be thousands of cgroups, and all of them change whenever CPUs become exclusive.
            tracing::info!(cgroups = wanted.len(), "dry run: would be herded, as `numaward status` lists");
        }
        self.isolation.dry_run = wanted;
        changed
    }

    fn count_confined(&self) {
        let (herded, would) = (self.store.state.isolated().len(), self.isolation.dry_run.len());
        self.metrics.confined(herded, would, self.isolation.refused.len());
    }

    /// Returns the state of CPU isolation for the API.
    pub(crate) fn cpu_isolation_status(
        &self,
        drift: impl Fn(&CgroupPath) -> Vec<api::Drift>,
    ) -> api::CpuIsolation {
        let confined = |path: &CgroupPath, cpus: &CpuSet, state| api::ConfinedCgroup {
            cgroup: path.to_string(),
            cpus: cpus.to_string(),
            state,
            reason: None,
            drift: drift(path),
        };
        let held = self.store.state.isolated().iter().filter_map(|path| {
            let cpus = self.store.state.applied.get(path)?.settings.cpus.as_ref()?;
            Some(confined(path, cpus, api::ConfinementState::Confined))
        });
        let would = self
            .isolation
            .dry_run
            .iter()
            .map(|(path, cpus)| confined(path, cpus, api::ConfinementState::DryRun));
        let refused = self.isolation.refused.iter().map(|(path, refusal)| api::ConfinedCgroup {
            reason: Some(refusal.reason.clone()),
            ..confined(path, &CpuSet::new(), api::ConfinementState::Refused)
        });
        let mut cgroups: Vec<_> = held.chain(would).chain(refused).collect();
        cgroups.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
        api::CpuIsolation {
            mode: self.isolation.effective,
            cgroups,
            processes_in_root: self.isolation.processes_in_root,
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_config::Config;
    use numaward_engine::{ContainerRequest, Quantity, Request, Resources, Terms};
    use numaward_guarantee::policy;
    use numaward_topology::{Bytes, Machine};

    use super::*;

    fn path(text: &str) -> CgroupPath {
        text.parse().unwrap()
    }

    /// Returns the confined cgroups in a tree of these cgroups.
    fn herd(cgroups: &[&str], system: &[&str], guaranteed: &[&str]) -> Vec<String> {
        let cgroups: Vec<CgroupPath> = cgroups.iter().map(|text| path(text)).collect();
        let children = |parent: &CgroupPath| {
            cgroups.iter().filter(|path| path.parent().as_ref() == Some(parent)).cloned().collect::<Vec<_>>()
        };
        let system: Vec<_> = system.iter().map(|text| CgroupPattern::new(text).unwrap()).collect();
        let guaranteed = guaranteed.iter().map(|text| path(text)).collect();
        let plan = plan_confinement(children, &system, &guaranteed, || false).unwrap();
        let mut herd: Vec<_> = plan.confined.iter().map(ToString::to_string).collect();
        herd.sort();
        herd
    }

    #[test]
    fn a_choice_among_many_is_given_up_within_a_few_steps() {
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
    fn the_highest_are_herded_and_those_beside_what_is_promised_or_exempt() {
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
        assert_eq!(herd(&tree, &init, &[]), ["/numaward/x", "/numaward/y", "/system.slice", "/user.slice"]);
        assert_eq!(
            herd(&tree, &[], &["/system.slice", "/numaward/x"]),
            ["/init.scope", "/numaward/y", "/user.slice"]
        );
        assert_eq!(
            herd(&tree, &init, &["/user.slice/c/d", "/numaward/x", "/numaward/y"]),
            ["/system.slice", "/user.slice/c/e"]
        );
        assert_eq!(
            herd(&tree, &["/*.slice/b.service", "/init.scope"], &[]),
            ["/numaward/x", "/numaward/y", "/system.slice/a.service", "/user.slice/c"]
        );
    }

    #[test]
    fn processes_of_the_root_are_told_from_the_kernels() {
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
    fn isolation_covers_hidden_siblings() {
        let config: Config = serde_json::from_str(r#"{"strategy": "native"}"#).unwrap();
        let machine = Machine::builder().cores_per_node(4).smt(2).memory(Bytes::gib(4)).build().unwrap();
        let strategy = policy::strategy(&config, &machine).unwrap();
        let admit = |ledger: &Ledger, name: &str, terms: &Terms| {
            let resources = Resources::none().with_cpu(Quantity::whole(1));
            let resources = resources.with_memory(Quantity::whole(Bytes::gib(1).0));
            let request = Request {
                owner: name.into(),
                init_containers: Vec::new(),
                containers: vec![ContainerRequest::guaranteed(name, resources)],
                resources: None,
            };
            let decision = strategy.admit_watched(ledger, &request, terms, &|_| {});
            (decision.outcome.unwrap()[0].allocation.clone(), decision.ledger)
        };
        let hidden = Terms { hide_siblings: true, ..Terms::default() };
        let isolated = Terms { isolate: true, ..hidden.clone() };
        let (other, ledger) = admit(&strategy.idle(), "other", &hidden);
        let beside = |ledger: &Ledger| cpus_outside_isolated_workloads(ledger, ledger.shared_pool().clone());
        assert_eq!(beside(&ledger), None);
        let (alone, ledger) = admit(&ledger, "alone", &isolated);
        assert_eq!((other.hidden_cpus.len(), alone.hidden_cpus.len()), (1, 1));
        assert_eq!(beside(&ledger), Some(&machine.cpu_ids() - &alone.held_cpus()));
    }
}
