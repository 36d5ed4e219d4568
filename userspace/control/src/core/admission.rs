//! Guarantees that are asked for, and their end.

use std::{collections::BTreeSet, fs, io, path::Path, time::Instant};

use numaward_api::{self as api, EnforcementMode};
use numaward_cgroup::{
    CgroupId, CgroupPath, EXEC_PARENT,
    knob::{Limit, Partition},
    read,
};
use numaward_config::resctrl;
use numaward_enforce::{EnforceError, Owner, SettingsChange};
use numaward_engine::{
    self as engine, Allocation, Grant, Ledger, Terms,
    policy::{StartProblem, TopologyManagerPolicy},
};
use numaward_guarantee::{
    error::{AdmissionError, describe_rejection, list_problems},
    explain,
    narrowing::Narrowing,
    policy,
    request::{FieldError, Request, Target},
    state::Guarantee,
};
use numaward_model::Settings;
use numaward_store::fault;
use numaward_topology::{Bytes, CpuSet, NodeSet};

#[cfg(test)]
use super::disorder::{self, Disorder};
use super::{Attempt, Core, HeldChange};
use crate::spans;

/// What a unit has to be to be given something.
const UNIT_REQUIREMENT: &str = "a unit that runs on this host";
/// Where the system's services are.
const SYSTEM_SLICE: &str = "system.slice";

/// Whether this looks like the cgroup of a unit of the system's manager: not of a user's. Without systemd, only services
/// of the system do.
fn is_unit(path: &CgroupPath, unit: &str, has_systemd: bool) -> bool {
    matches!(Owner::under_systemd(path), Owner::Systemd(found) if found == unit)
        && (has_systemd || path.components().next() == Some(SYSTEM_SLICE))
}

fn no_unit(unit: &str, has_systemd: bool) -> FieldError {
    if has_systemd {
        let problem = format!("{unit} has no cgroup: there is no such unit, or it does not run");
        return FieldError::new("target.unit", problem, UNIT_REQUIREMENT);
    }
    let problem = format!(
        "{unit} has no cgroup in /{SYSTEM_SLICE}, and systemd, which would know it elsewhere, is not the init of this host"
    );
    FieldError::new("target.unit", problem, format!("a unit in /{SYSTEM_SLICE}, or the path of a cgroup"))
}

/// What a request for an allocation comes to.
#[derive(Debug)]
pub(crate) enum Admission {
    /// It was admitted, and the kernel holds it.
    Admitted,
    /// It was a dry run.
    DryRun(Box<api::DryRun>),
}

/// What was decided for a request, and is yet to be held.
pub(super) struct AdmissionDecision {
    pub(super) path: CgroupPath,
    pub(super) allocation: Allocation,
    pub(super) settings: Settings,
    /// What is promised with it.
    pub(super) ledger: Ledger,
    explanation: api::Explanation,
}

/// What the only container of a request is given.
fn only_allocation(grants: Vec<Grant>) -> Allocation {
    grants.into_iter().next().map(|grant| grant.allocation).unwrap_or_default()
}

pub(super) fn log_guarantee(request: &Request, granted: &AdmissionDecision) {
    let AdmissionDecision { path, allocation, .. } = granted;
    tracing::info!(
        name = request.name, cgroup = %path,
        cpus = %allocation.cpus.clone().unwrap_or_default(), nodes = %allocation.memory_nodes(),
        "promised"
    );
}

impl Core {
    /// The settings that follow from an allocation.
    pub(super) fn settings(&self, request: &Request, allocation: &Allocation) -> Settings {
        // It is herded like all that has nothing promised.
        if request.has_no_guarantee() {
            return Settings::default();
        }
        let nodes = allocation.memory_nodes();
        let memory = policy::memory_settings(&self.config, &request.limited());
        Settings {
            cpus: allocation.cpus.clone().or_else(|| self.shared_cpus(&request.terms, &nodes)),
            // What has a home is not bound to it.
            mems: (!nodes.is_empty() && !request.terms.burstable).then_some(nodes),
            memory_min: memory.min.map(Limit::Bytes),
            memory_low: memory.low.map(Limit::Bytes),
            memory_high: memory.high.map(Limit::Bytes),
            memory_max: request.limit.map(Limit::Bytes),
            partition: Some(request.partition).filter(|partition| *partition != Partition::Member),
            hugetlb: request.hugepages().map(|(size, bytes)| (size, Limit::Bytes(bytes))).collect(),
            ..Settings::default()
        }
    }

    /// The CPUs of a workload that has none of its own: the shared pool, and of that what is on its nodes where its
    /// topology policy ties CPUs to memory. None where no CPUs are managed.
    pub(super) fn shared_cpus(&self, terms: &Terms, nodes: &NodeSet) -> Option<CpuSet> {
        let pool = self.shared_pool();
        let policy = terms.policy.unwrap_or(self.config.topology_policy());
        let is_tied = !terms.burstable
            && matches!(policy, TopologyManagerPolicy::Restricted | TopologyManagerPolicy::SingleNumaNode);
        let of_nodes = nodes.iter().filter_map(|node| self.policy.machine.nodes.get(&node));
        let near: CpuSet = of_nodes.flat_map(|node| node.cpus.iter()).filter(|_| is_tied).collect();
        let near = &near & &pool;
        Some(if near.is_empty() { pool } else { near }).filter(|cpus| !cpus.is_empty())
    }

    /// The cgroup of a request. That of a command is not there yet.
    pub(super) fn cgroup(&self, request: &Request) -> Result<CgroupPath, AdmissionError> {
        let path = match &request.target {
            Target::Exec => {
                let root = CgroupPath::root().child(EXEC_PARENT);
                return root.and_then(|parent| parent.child(&request.name)).map_err(|error| {
                    AdmissionError::Field(FieldError::new(
                        "name",
                        error.to_string(),
                        "the name of a directory",
                    ))
                });
            }
            Target::Cgroup(path) => path.clone(),
            Target::Container(_) => {
                return Err(AdmissionError::Conflict(numaward_guarantee::request::runtime_owned_error()));
            }
            Target::Unit(unit) => {
                let cgroups = self.hierarchy.walk();
                let cgroups = cgroups
                    .map_err(|error| FieldError::new("target.unit", error.to_string(), UNIT_REQUIREMENT))?;
                let is_asked = self.execution.enforcer.has_systemd();
                let mut paths = cgroups.into_iter().map(|cgroup| cgroup.path);
                paths.find(|path| is_unit(path, unit, is_asked)).ok_or_else(|| no_unit(unit, is_asked))?
            }
        };
        Ok(path)
    }

    /// Refuses a cgroup that is not there, or that uses more than it is to have.
    pub(super) fn check_cgroup(&self, path: &CgroupPath, request: &Request) -> Result<(), AdmissionError> {
        let dir = self.hierarchy.dir(path);
        if !matches!(self.hierarchy.id_of(path), Ok(Some(_))) {
            let problem = format!("{path} does not exist (there is no directory {})", dir.display());
            return Err(FieldError::new("target.cgroup", problem, "a cgroup that exists").into());
        }
        self.check_used(path, request.limit)
    }

    /// Refuses a limit of memory below what a cgroup uses.
    pub(super) fn check_used(&self, path: &CgroupPath, limit: Option<Bytes>) -> Result<(), AdmissionError> {
        let used = read::memory_current(&self.hierarchy.dir(path)).ok();
        if let Some((used, limit)) = used.zip(limit).filter(|(used, limit)| used > limit) {
            let problem = format!("{path} uses {used} now, more than the {limit} asked for");
            return Err(FieldError::new("memory", problem, format!("at least {used}")).into());
        }
        Ok(())
    }

    pub(crate) fn admit(&mut self, request: &Request, dry_run: bool) -> Result<Admission, AdmissionError> {
        let path = self.target_of(request, dry_run)?;
        self.admit_at(request, &path, dry_run, Attempt::First)
    }

    /// The cgroup of a request. That of a command is not there yet. Where systemd has to be asked for it, this waits.
    pub(super) fn target_of(
        &mut self,
        request: &Request,
        dry_run: bool,
    ) -> Result<CgroupPath, AdmissionError> {
        if self.mode() == EnforcementMode::Off && !dry_run {
            return Err(AdmissionError::Off);
        }
        self.check_name(&request.name)?;
        match &request.target {
            // By its name alone, another cgroup may look like it.
            Target::Unit(unit) if self.execution.enforcer.has_systemd() => {
                Ok(self.query_unit_cgroup(unit)?.ok_or_else(|| no_unit(unit, true))?)
            }
            _ => self.cgroup(request),
        }
    }

    /// Refuses a name that a guarantee has.
    pub(super) fn check_name(&self, name: &str) -> Result<(), AdmissionError> {
        let Some(held) = self.store.state.guarantees.get(name) else { return Ok(()) };
        let problem = format!("{name:?} is held by {}", held.cgroup);
        Err(AdmissionError::conflict("name", problem, "a name that is not in use"))
    }

    /// Refuses what conflicts with what is held, or does not go with cgroup, configuration or machine; gives the terms.
    fn check(&self, request: &Request, path: &CgroupPath) -> Result<Terms, AdmissionError> {
        self.check_name(&request.name)?;
        if self.store.state.pods.contains_key(&request.name) {
            let problem = format!("{:?} is held by a pod", request.name);
            return Err(AdmissionError::conflict("name", problem, "a name that is not in use"));
        }
        if request.target != Target::Exec {
            self.check_cgroup(path, request)?;
        }
        let mut guarantees = self.store.state.guarantees.iter();
        if let Some((name, held)) = guarantees.find(|(_, held)| path.overlaps(&held.cgroup)) {
            let problem =
                format!("{path} overlaps with {}, which the allocation {name:?} holds", held.cgroup);
            let allowed = "a cgroup neither above nor below one that has an allocation";
            return Err(AdmissionError::conflict("target", problem, allowed));
        }

        self.check_fit()?;
        let terms = self.with_home(&request.terms, &request.name, path);
        self.check_terms(&terms)?;
        Ok(terms)
    }

    /// Asks for an allocation for this cgroup. That of a command is not there yet.
    pub(crate) fn admit_at(
        &mut self,
        request: &Request,
        path: &CgroupPath,
        dry_run: bool,
        attempt: Attempt,
    ) -> Result<Admission, AdmissionError> {
        let _span = spans::admit(&request.name, dry_run);
        if dry_run {
            return Ok(Admission::DryRun(Box::new(self.decide_dry_run(request, path)?)));
        }
        let granted = self.grant(request, path, attempt)?;
        #[cfg(test)]
        if disorder::is_injected(Disorder::StaleDecision) {
            self.handle_between_decision_and_entry();
        }
        self.hold_or_undo(request, &granted)
    }

    /// Holds what was granted, or nothing.
    pub(super) fn hold_or_undo(
        &mut self,
        request: &Request,
        granted: &AdmissionDecision,
    ) -> Result<Admission, AdmissionError> {
        match self.hold(request, granted) {
            Ok(()) => {
                log_guarantee(request, granted);
                Ok(Admission::Admitted)
            }
            Err(refused) => {
                // The others may have their CPUs back.
                self.effects.isolate = true;
                self.remove_exec_cgroup(request, &granted.path);
                Err(refused)
            }
        }
    }

    /// What would be decided.
    fn decide_dry_run(&self, request: &Request, path: &CgroupPath) -> Result<api::DryRun, AdmissionError> {
        let terms = self.check(request, path)?;
        let ledger = self.ledger_for(Some(path), None);
        let decision = spans::decide(&*self.policy.strategy, &ledger, &request.engine, &terms);
        let explanation = explain::explanation(&decision.explanation);
        Ok(match decision.outcome {
            Ok(grants) => {
                let allocation = only_allocation(grants);
                let settings = self.settings(request, &allocation);
                let shown = (&allocation, &terms);
                let allocation = self.describe(&request.name, &request.target, path, shown, &settings);
                api::DryRun::admitted(allocation, explanation)
            }
            Err(rejection) => api::DryRun::refused(explain::rejection(&rejection), explanation),
        })
    }

    /// Decides on a request for this cgroup, and makes that of a command. The state is as it was.
    pub(super) fn grant(
        &mut self,
        request: &Request,
        path: &CgroupPath,
        attempt: Attempt,
    ) -> Result<AdmissionDecision, AdmissionError> {
        let is_running = request.target != Target::Exec;
        let untouched = if is_running { self.untouched_huge_pages(path) } else { None };
        let terms = self.check(request, path)?;
        let started = Instant::now();
        let ledger = self.ledger_for(Some(path), None);
        let decision = spans::decide(&*self.policy.strategy, &ledger, &request.engine, &terms);
        let explanation = explain::explanation(&decision.explanation);
        if attempt == Attempt::First || attempt == Attempt::Again && decision.outcome.is_ok() {
            self.metrics.decided(&request.engine, &decision, started.elapsed());
        }
        let grants = match decision.outcome {
            Ok(grants) => grants,
            Err(rejection) => {
                let rejection = explain::rejection(&rejection);
                // One that is declared is tried again and again, and reported once.
                if request.declared.is_none() {
                    tracing::info!(name = request.name, reason = describe_rejection(&rejection), "refused");
                }
                return Err(AdmissionError::Rejected(rejection, explanation));
            }
        };
        let allocation = only_allocation(grants);
        let settings = self.settings(request, &allocation);
        if is_running {
            self.check_nodes_for_huge_pages(path, settings.mems.as_ref(), untouched)?;
        } else {
            self.create_exec_cgroup(path)?;
        }
        let ledger = self.start_all(decision.ledger, &request.engine);
        Ok(AdmissionDecision { path: path.clone(), allocation, settings, ledger, explanation })
    }

    /// Removes the cgroup of a command that is not to be.
    pub(super) fn remove_exec_cgroup(&self, request: &Request, path: &CgroupPath) {
        if request.target == Target::Exec {
            let _ = fs::remove_dir(self.hierarchy.dir(path));
        }
    }

    /// An allocation as it is shown, without what only time shows.
    pub(crate) fn describe(
        &self,
        name: &str,
        target: &Target,
        cgroup: &CgroupPath,
        (allocation, terms): (&Allocation, &Terms),
        settings: &Settings,
    ) -> api::Allocation {
        let settings = settings.values().0.into_iter();
        let preferred = &terms.preferences.preferred;
        let preferred: NodeSet = preferred.values().flat_map(NodeSet::iter).collect();
        api::Allocation {
            name: name.to_owned(),
            target: target.into(),
            cgroup: cgroup.to_string(),
            directory: self.hierarchy.dir(cgroup).display().to_string(),
            cpus: allocation.cpus.clone().unwrap_or_default().to_string(),
            hidden_cpus: allocation.hidden_cpus.to_string(),
            nodes: allocation.memory_nodes().to_string(),
            memory: allocation.blocks.iter().map(Into::into).collect(),
            policy: terms.policy,
            placement: api::Placement::from_terms(terms, Some(preferred).filter(|nodes| !nodes.is_empty())),
            settings: settings.map(|(knob, value)| (knob.to_string(), value.to_string())).collect(),
            enforced: self.mode() == EnforcementMode::On,
            releasing: self.store.state.releasing.contains(name),
            moved: self.moved_of(cgroup),
            // The caller adds the rest of what is known of one that is held.
            ..api::Allocation::default()
        }
    }

    /// Refuses terms that do not go with the configuration or the machine.
    pub(super) fn check_terms(&self, terms: &Terms) -> Result<(), AdmissionError> {
        if let Some(problem) = self.unknown_class(terms) {
            let allowed = "nothing, or the name of a class";
            return Err(FieldError::new("placement.resctrlClass", problem, allowed).into());
        }
        self.policy.strategy.check_terms(terms).map_err(|problem| {
            let (field, allowed) = match *problem.problem {
                StartProblem::NativeOnly(_) => {
                    ("placement", "preferredNodes alone; or strategy: native in the daemon's configuration")
                }
                _ => ("policy", "a policy that goes with topologyManagerPolicyOptions and the machine"),
            };
            FieldError::new(field, list_problems(&[problem.into()]), allowed).into()
        })
    }

    /// What is wrong with the class of L3 caches and memory bandwidth, if anything.
    fn unknown_class(&self, terms: &Terms) -> Option<String> {
        resctrl::unknown_class_problem(&self.config.resctrl, terms.resctrl_class.as_deref()?)
    }

    /// Takes an unknown class for none, and says so: a typing error in an annotation must not keep a pod from running.
    pub(super) fn without_unknown_class(&self, terms: &mut Terms, notes: &mut Vec<String>) {
        if let Some(problem) = self.unknown_class(terms) {
            notes.push(format!("numaward.io/resctrl-class is ignored: {problem}"));
            terms.resctrl_class = None;
        }
    }

    /// What is promised counts as running from the start: there is no later moment at which we would learn of it.
    fn start_all(&self, ledger: Ledger, request: &engine::Request) -> Ledger {
        request.containers.iter().fold(ledger, |ledger, container| {
            self.policy.strategy.note_started(&ledger, &request.owner, &container.name)
        })
    }

    /// Makes the cgroup of a command.
    fn create_exec_cgroup(&self, path: &CgroupPath) -> Result<(), AdmissionError> {
        let dir = self.hierarchy.dir(path);
        let made = match (fs::create_dir(&dir), dir.parent()) {
            // Somebody has removed the one above, which the start made.
            (Err(error), Some(parent)) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir(parent).and_then(|()| fs::create_dir(&dir))
            }
            (made, _) => made,
        };
        made.map_err(|source| AdmissionError::Make { path: dir, source })?;
        fault::point("guarantee.made");
        Ok(())
    }

    fn hold(&mut self, request: &Request, granted: &AdmissionDecision) -> Result<(), AdmissionError> {
        let path = &granted.path;
        let mut change = self.begin();
        // From now on nobody else is promised any of it.
        change.store.state.ledger = granted.ledger.clone();
        change.store.state.admitting.insert(request.name.clone());
        change.confine_others(&[path]);
        let id = change.id_of(path)?;
        let plan = change.plan(SettingsChange::Hold(path.clone(), granted.settings.clone()))?;
        change.enter(request, granted, id);
        change.enforce(plan)?;
        self.note_given(request);
        self.note_guarantees_changed();
        Ok(())
    }

    /// The id of a cgroup that is to be there.
    pub(super) fn id_of(&self, path: &CgroupPath) -> Result<CgroupId, EnforceError> {
        let id = self.hierarchy.id_of(path).ok().flatten();
        id.ok_or_else(|| EnforceError::Gone { cgroup: path.clone() })
    }

    /// Enters a guarantee into the state.
    pub(super) fn enter(&mut self, request: &Request, granted: &AdmissionDecision, id: CgroupId) {
        self.store.state.set_narrowing(&granted.path, Narrowing::default());
        let guarantee = Guarantee {
            target: request.target.clone(),
            cgroup: granted.path.clone(),
            id,
            settings: granted.settings.clone(),
            declared: request.declared.clone(),
            explanation: granted.explanation.clone(),
        };
        self.store.state.guarantees.insert(request.name.clone(), guarantee);
        self.store.state.admitting.remove(&request.name);
    }

    /// Keeps why a guarantee was given, and notes who is to know.
    pub(super) fn note_given(&mut self, request: &Request) {
        self.store.storage.decisions.note(&request.name, &self.store.state);
        self.effects.held.push(HeldChange::Given(request.name.clone()));
        self.effects.isolate |= request.has_no_guarantee();
    }

    /// Refuses to release what is declared: it would be given again at once; and what is a container's.
    pub(super) fn check_release(&self, name: &str) -> Result<(), AdmissionError> {
        let Some(held) = self.store.state.guarantees.get(name) else { return Ok(()) };
        if let Target::Container(_) = held.target {
            return Err(AdmissionError::Conflict(numaward_guarantee::request::runtime_owned_error()));
        }
        if let Some(declared) = &held.declared {
            let problem = format!("it is declared in the configuration, for {:?}", declared.pattern());
            let allowed =
                "one that was asked for; take this one out of the configuration and restart the daemon";
            return Err(AdmissionError::conflict("name", problem, allowed));
        }
        Ok(())
    }

    /// Whether the cgroup of a guarantee is there, or may be.
    pub(super) fn is_there(&self, guarantee: &Guarantee) -> bool {
        self.hierarchy.id_of(&guarantee.cgroup).map_or(true, |id| id == Some(guarantee.id))
    }

    /// Cgroups made for commands that are promised nothing: the daemon died in between, or the command went on running
    /// after its release.
    pub(crate) fn remove_strays(&self) {
        let held: BTreeSet<_> =
            self.store.state.guarantees.values().map(|guarantee| &guarantee.cgroup).collect();
        let Ok(parent) = CgroupPath::root().child(EXEC_PARENT) else { return };
        let strays = parent.children(self.hierarchy.root()).filter(|path| !held.contains(path));
        for path in strays.collect::<Vec<_>>() {
            // One that is not empty stays: somebody runs in it.
            let _ = fs::remove_dir(self.hierarchy.dir(&path));
        }
    }
}

/// Removes the directory of a cgroup that was made for a guarantee and is released.
pub(crate) fn remove_cgroup(cgroup: &CgroupPath, dir: &Path) {
    if let Err(error) = fs::remove_dir(dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%cgroup, %error, "the cgroup is still in use and stays");
    }
    fault::point("guarantee.removed");
}
