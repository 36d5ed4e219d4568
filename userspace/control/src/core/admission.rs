//! Admission of requested guarantees: checks, decision, and enforcement.

use std::{collections::BTreeSet, fs, io, path::Path, time::Instant};

use numaward_api::{self as api, EnforcementMode};
use numaward_cgroup::{CgroupId, CgroupPath, EXEC_PARENT, read};
use numaward_config::resctrl;
use numaward_enforce::{Owner, SettingsChange};
use numaward_engine::{self as engine, Allocation, Grant, Ledger, Terms, policy::StartProblem};
use numaward_guarantee::{
    error::{AdmissionError, describe_rejection},
    explain,
    narrowing::Narrowing,
    policy::PolicyError,
    request::{FieldError, Request, Target},
    state::Guarantee,
};
use numaward_model::Settings;
use numaward_store::fault;
use numaward_topology::{Bytes, NodeSet, sysfs};

use super::{
    Attempt, Core, HeldChange, burstable_home, conditions, cpu_isolation, huge_pages, settings, shared_pool,
};
use crate::spans;

#[cfg(test)]
use super::disorder::{self, Disorder};

/// Requirement on a unit in a request, for error messages.
const UNIT_REQUIREMENT: &str = "a unit that runs on this host";
/// Slice of the system's services.
const SYSTEM_SLICE: &str = "system.slice";

/// Returns true if this cgroup's name is that of a unit of the system's manager, not of a user's manager. Without systemd, only services in
/// [`SYSTEM_SLICE`] count.
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
        "{unit} has no cgroup in /{SYSTEM_SLICE}, and systemd, which could find it elsewhere, is not the init system of this host"
    );
    FieldError::new("target.unit", problem, format!("a unit in /{SYSTEM_SLICE}, or the path of a cgroup"))
}

/// Outcome of an admission.
#[derive(Debug)]
pub(crate) enum Admission {
    /// The request was admitted and its knobs were written.
    Admitted,
    /// The request was a dry run.
    DryRun(Box<api::DryRun>),
}

/// Positive decision on a request, before its knobs are written.
pub(super) struct AdmissionDecision {
    pub(super) path: CgroupPath,
    pub(super) allocation: Allocation,
    pub(super) settings: Settings,
    /// The ledger with this guarantee.
    pub(super) ledger: Ledger,
    explanation: api::Explanation,
}

/// Returns the allocation of a request with a single container.
pub(super) fn only_allocation(grants: Vec<Grant>) -> Allocation {
    grants.into_iter().next().map(|grant| grant.allocation).unwrap_or_default()
}

pub(super) fn log_guarantee(request: &Request, granted: &AdmissionDecision) {
    let AdmissionDecision { path, allocation, .. } = granted;
    tracing::info!(
        name = request.name, cgroup = %path,
        cpus = %allocation.cpus.clone().unwrap_or_default(), nodes = %allocation.memory_nodes(),
        "guarantee given"
    );
}

/// Returns the cgroup of a request; that of a command does not exist yet.
pub(crate) fn cgroup(core: &Core, request: &Request) -> Result<CgroupPath, AdmissionError> {
    let path = match &request.target {
        Target::Exec => {
            let root = CgroupPath::root().child(EXEC_PARENT);
            return root.and_then(|parent| parent.child(&request.name)).map_err(|error| {
                AdmissionError::Field(FieldError::new("name", error.to_string(), "the name of a directory"))
            });
        }
        Target::Cgroup(path) => path.clone(),
        Target::Container(_) => {
            return Err(AdmissionError::Conflict(numaward_guarantee::request::runtime_owned_error()));
        }
        Target::Unit(unit) => {
            let cgroups = core.hierarchy.walk();
            let cgroups = cgroups
                .map_err(|error| FieldError::new("target.unit", error.to_string(), UNIT_REQUIREMENT))?;
            let is_asked = core.execution.enforcer.has_systemd();
            let mut paths = cgroups.into_iter().map(|cgroup| cgroup.path);
            paths.find(|path| is_unit(path, unit, is_asked)).ok_or_else(|| no_unit(unit, is_asked))?
        }
    };
    Ok(path)
}

/// Refuses a cgroup that does not exist, or that uses more memory than the requested limit.
pub(crate) fn check_cgroup(core: &Core, path: &CgroupPath, request: &Request) -> Result<(), AdmissionError> {
    let dir = core.hierarchy.dir(path);
    if !matches!(core.hierarchy.id_of(path), Ok(Some(_))) {
        let problem = format!("{path} does not exist (there is no directory {})", dir.display());
        return Err(FieldError::new("target.cgroup", problem, "a cgroup that exists").into());
    }
    check_memory_use(core, path, request.limit)
}

/// Refuses a memory limit below the present use of a cgroup.
pub(crate) fn check_memory_use(
    core: &Core,
    path: &CgroupPath,
    limit: Option<Bytes>,
) -> Result<(), AdmissionError> {
    let used = read::memory_current(&core.hierarchy.dir(path)).ok();
    if let Some((used, limit)) = used.zip(limit).filter(|(used, limit)| used > limit) {
        let problem = format!("{path} uses {used} now, more than the requested limit of {limit}");
        return Err(FieldError::new("memory", problem, format!("at least {used}")).into());
    }
    Ok(())
}

/// Refuses nodes without room for the memory that a running cgroup has on other nodes: the kernel would move it there, and kill processes.
/// If the memory of the workload or of a node cannot be read, nothing is refused.
pub(crate) fn check_room(
    core: &Core,
    path: &CgroupPath,
    mems: Option<&NodeSet>,
) -> Result<(), AdmissionError> {
    let Some(mems) = mems else { return Ok(()) };
    let by_node = read::memory_numa_stat(&core.hierarchy.dir(path)).unwrap_or_default();
    let outside = by_node.iter().filter(|(node, _)| !mems.contains(**node));
    let resident =
        outside.fold(0_u64, |sum, (_, of)| sum.saturating_add(of.anon.0).saturating_add(of.shmem.0));
    let mut room = 0_u64;
    for node in mems.iter() {
        let Ok(of) = sysfs::node_memory(&core.config.host_root, node) else { return Ok(()) };
        let parts = [of.free, of.active_file, of.inactive_file, of.kernel_reclaimable];
        room = parts.iter().fold(room, |sum, part| sum.saturating_add(part.0));
    }
    if resident <= room {
        return Ok(());
    }
    let (resident, room) = (Bytes(resident), Bytes(room));
    Err(AdmissionError::conflict(
        "target",
        format!("{path}: it has {resident} on other nodes than {mems}, which have room for {room}"),
        "nodes with room for the memory of the workload, or a workload that is started with its guarantee",
    ))
}

pub(crate) fn admit(core: &mut Core, request: &Request, dry_run: bool) -> Result<Admission, AdmissionError> {
    let path = target_cgroup(core, request, dry_run)?;
    admit_at(core, request, &path, dry_run, Attempt::First)
}

/// Returns the cgroup of a request; that of a command does not exist yet. This blocks if systemd must be queried.
pub(crate) fn target_cgroup(
    core: &mut Core,
    request: &Request,
    dry_run: bool,
) -> Result<CgroupPath, AdmissionError> {
    if core.mode() == EnforcementMode::Off && !dry_run {
        return Err(AdmissionError::Off);
    }
    check_name(core, &request.name)?;
    match &request.target {
        // Another cgroup may have the same name, so systemd is queried.
        Target::Unit(unit) if core.execution.enforcer.has_systemd() => {
            Ok(core.query_unit_cgroup(unit)?.ok_or_else(|| no_unit(unit, true))?)
        }
        _ => cgroup(core, request),
    }
}

/// Refuses a name that is in use by a guarantee.
pub(crate) fn check_name(core: &Core, name: &str) -> Result<(), AdmissionError> {
    let Some(held) = core.store.state.guarantees.get(name) else { return Ok(()) };
    let problem = format!("the name {name:?} is in use by {}", held.cgroup);
    Err(AdmissionError::conflict("name", problem, "a name that is not in use"))
}

/// Refuses a request that conflicts with present guarantees, or that the cgroup, the configuration or the machine does not permit.
/// Returns the terms for the decision.
fn check(core: &Core, request: &Request, path: &CgroupPath) -> Result<Terms, AdmissionError> {
    check_name(core, &request.name)?;
    if core.store.state.pods.contains_key(&request.name) {
        let problem = format!("the name {:?} is in use by a pod", request.name);
        return Err(AdmissionError::conflict("name", problem, "a name that is not in use"));
    }
    if request.target != Target::Exec {
        check_cgroup(core, path, request)?;
    }
    let mut guarantees = core.store.state.guarantees.iter();
    if let Some((name, held)) = guarantees.find(|(_, held)| path.overlaps(&held.cgroup)) {
        let problem = format!("{path} overlaps with {}, which has the guarantee {name:?}", held.cgroup);
        let allowed = "a cgroup neither above nor below one that has a guarantee";
        return Err(AdmissionError::conflict("target", problem, allowed));
    }

    core.policy.check_fit()?;
    let terms = burstable_home::with_preferred_node(core, &request.terms, &request.name, path);
    check_terms(core, &terms)?;
    Ok(terms)
}

/// Admits a request for this cgroup; that of a command does not exist yet.
pub(crate) fn admit_at(
    core: &mut Core,
    request: &Request,
    path: &CgroupPath,
    dry_run: bool,
    attempt: Attempt,
) -> Result<Admission, AdmissionError> {
    let _span = spans::admit(&request.name, dry_run);
    if dry_run {
        return Ok(Admission::DryRun(Box::new(decide_dry_run(core, request, path)?)));
    }
    let granted = grant(core, request, path, attempt)?;
    #[cfg(test)]
    if disorder::is_injected(Disorder::StaleDecision) {
        disorder::handle_between_decision_and_entry(core);
    }
    enforce_or_undo(core, request, &granted)
}

/// Enforces a decision. If that fails, no guarantee remains.
pub(super) fn enforce_or_undo(
    core: &mut Core,
    request: &Request,
    granted: &AdmissionDecision,
) -> Result<Admission, AdmissionError> {
    match enforce_decision(core, request, granted) {
        Ok(()) => {
            log_guarantee(request, granted);
            Ok(Admission::Admitted)
        }
        Err(refused) => {
            // Other cgroups may use these CPUs again.
            core.effects.isolate = true;
            remove_exec_cgroup(core, request, &granted.path);
            Err(refused)
        }
    }
}

/// Decides on a request without changing the state.
fn decide_dry_run(core: &Core, request: &Request, path: &CgroupPath) -> Result<api::DryRun, AdmissionError> {
    let terms = check(core, request, path)?;
    let ledger = conditions::ledger_for(core, Some(path), None);
    let decision = spans::decide(&*core.policy.strategy, &ledger, &request.engine, &terms);
    let explanation = explain::explanation(&decision.explanation);
    Ok(match decision.outcome {
        Ok(grants) => {
            let allocation = only_allocation(grants);
            let settings = settings::request_settings(core, request, &allocation);
            let shown = (&allocation, &terms);
            let allocation = describe(core, &request.name, &request.target, path, shown, &settings);
            api::DryRun::admitted(allocation, explanation)
        }
        Err(rejection) => api::DryRun::refused(explain::rejection(&rejection), explanation),
    })
}

/// Decides on a request for this cgroup, and creates the cgroup of a command. The state is not changed.
pub(super) fn grant(
    core: &mut Core,
    request: &Request,
    path: &CgroupPath,
    attempt: Attempt,
) -> Result<AdmissionDecision, AdmissionError> {
    let is_running = request.target != Target::Exec;
    let untouched = if is_running { huge_pages::untouched_huge_pages(core, path) } else { None };
    let terms = check(core, request, path)?;
    let started = Instant::now();
    let ledger = conditions::ledger_for(core, Some(path), None);
    let decision = spans::decide(&*core.policy.strategy, &ledger, &request.engine, &terms);
    let explanation = explain::explanation(&decision.explanation);
    if attempt == Attempt::First || attempt == Attempt::Again && decision.outcome.is_ok() {
        core.metrics.decided(&request.engine, &decision, started.elapsed());
    }
    let grants = match decision.outcome {
        Ok(grants) => grants,
        Err(rejection) => {
            let rejection = explain::rejection(&rejection);
            // A declared guarantee is retried many times, and its refusal is reported once.
            if request.declared.is_none() {
                tracing::info!(
                    name = request.name,
                    reason = describe_rejection(&rejection),
                    "the request is refused"
                );
            }
            return Err(AdmissionError::Rejected(rejection, explanation.into()));
        }
    };
    let allocation = only_allocation(grants);
    let settings = settings::request_settings(core, request, &allocation);
    if is_running {
        huge_pages::check_nodes(core, path, settings.mems.as_ref(), untouched)?;
        check_room(core, path, settings.mems.as_ref())?;
    } else {
        create_exec_cgroup(core, path)?;
    }
    let ledger = note_all_started(core, decision.ledger, &request.engine);
    Ok(AdmissionDecision { path: path.clone(), allocation, settings, ledger, explanation })
}

/// Removes the cgroup of a command that was not admitted.
pub(crate) fn remove_exec_cgroup(core: &Core, request: &Request, path: &CgroupPath) {
    if request.target == Target::Exec {
        let _ = fs::remove_dir(core.hierarchy.dir(path));
    }
}

/// Converts an allocation for the API, without measured values.
pub(crate) fn describe(
    core: &Core,
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
        directory: core.hierarchy.dir(cgroup).display().to_string(),
        cpus: allocation.cpus.clone().unwrap_or_default().to_string(),
        hidden_cpus: allocation.hidden_cpus.to_string(),
        nodes: allocation.memory_nodes().to_string(),
        memory: allocation.blocks.iter().map(Into::into).collect(),
        policy: terms.policy,
        placement: api::Placement::from_terms(terms, Some(preferred).filter(|nodes| !nodes.is_empty())),
        settings: settings.map(|(knob, value)| (knob.to_string(), value.to_string())).collect(),
        enforced: core.mode() == EnforcementMode::On,
        releasing: core.store.state.releasing.contains(name),
        moved: core.execution.migrations.pages_of(cgroup),
        // The caller adds the remaining fields of an admitted guarantee.
        ..api::Allocation::default()
    }
}

/// Refuses terms that the configuration or the machine does not permit.
pub(crate) fn check_terms(core: &Core, terms: &Terms) -> Result<(), AdmissionError> {
    if let Some(problem) = unknown_class(core, terms) {
        let allowed = "nothing, or the name of a class";
        return Err(FieldError::new("placement.resctrlClass", problem, allowed).into());
    }
    core.policy.strategy.check_terms(terms).map_err(|problem| {
        let (field, allowed) = match *problem.problem {
            StartProblem::NativeOnly(_) => {
                ("placement", "preferredNodes alone; or strategy: native in the daemon's configuration")
            }
            _ => ("policy", "a policy that topologyManagerPolicyOptions and the machine permit"),
        };
        FieldError::new(field, PolicyError::from(problem).to_string(), allowed).into()
    })
}

/// Returns the problem with the class of L3 caches and memory bandwidth, if it is unknown.
fn unknown_class(core: &Core, terms: &Terms) -> Option<String> {
    resctrl::unknown_class_problem(&core.config.resctrl, terms.resctrl_class.as_deref()?)
}

/// Removes an unknown class from the terms and adds a note: a typing error in an annotation must not prevent a pod from running.
pub(crate) fn without_unknown_class(core: &Core, terms: &mut Terms, notes: &mut Vec<String>) {
    if let Some(problem) = unknown_class(core, terms) {
        notes.push(format!("numaward.io/resctrl-class is ignored: {problem}"));
        terms.resctrl_class = None;
    }
}

/// Marks the containers of a request as started: there is no later event from which the daemon would learn of their start.
pub(super) fn note_all_started(core: &Core, ledger: Ledger, request: &engine::Request) -> Ledger {
    request.containers.iter().fold(ledger, |ledger, container| {
        core.policy.strategy.note_started(&ledger, &request.owner, &container.name)
    })
}

/// Creates the cgroup of a command.
fn create_exec_cgroup(core: &Core, path: &CgroupPath) -> Result<(), AdmissionError> {
    let dir = core.hierarchy.dir(path);
    let made = match (fs::create_dir(&dir), dir.parent()) {
        // Another program has removed the parent, which the daemon created at its start.
        (Err(error), Some(parent)) if error.kind() == io::ErrorKind::NotFound => {
            fs::create_dir(parent).and_then(|()| fs::create_dir(&dir))
        }
        (made, _) => made,
    };
    made.map_err(|source| AdmissionError::Make { path: dir, source })?;
    fault::point("guarantee.made");
    Ok(())
}

fn enforce_decision(
    core: &mut Core,
    request: &Request,
    granted: &AdmissionDecision,
) -> Result<(), AdmissionError> {
    let path = &granted.path;
    let mut change = core.begin();
    // From now on, no other request can get these resources.
    change.state().ledger = granted.ledger.clone();
    change.state().admitting.insert(request.name.clone());
    cpu_isolation::confine_others(change.core(), &[path]);
    let id = change.id_of(path)?;
    let plan = change.plan(SettingsChange::Hold(path.clone(), granted.settings.clone()))?;
    insert_guarantee(change.core(), request, granted, id);
    change.enforce(plan)?;
    record_admission(core, request);
    shared_pool::note_guarantees_changed(core);
    Ok(())
}

/// Adds a guarantee to the state.
pub(super) fn insert_guarantee(
    core: &mut Core,
    request: &Request,
    granted: &AdmissionDecision,
    id: CgroupId,
) {
    core.store.state.set_narrowing(&granted.path, Narrowing::default());
    let guarantee = Guarantee {
        target: request.target.clone(),
        cgroup: granted.path.clone(),
        id,
        settings: granted.settings.clone(),
        declared: request.declared.clone(),
        explanation: granted.explanation.clone(),
    };
    core.store.state.guarantees.insert(request.name.clone(), guarantee);
    core.store.state.admitting.remove(&request.name);
}

/// Stores the explanation of a guarantee, and records the effects of its admission.
pub(crate) fn record_admission(core: &mut Core, request: &Request) {
    core.store.storage.decisions.note(&request.name, &core.store.state);
    core.effects.held.push(HeldChange::Given(request.name.clone()));
    core.effects.isolate |= request.has_no_guarantee();
}

/// Removes cgroups of commands without a guarantee. They remain if the daemon died during an admission, or if the command went on after
/// its release.
pub(crate) fn remove_stray_cgroups(core: &Core) {
    let held: BTreeSet<_> = core.store.state.guarantees.values().map(|guarantee| &guarantee.cgroup).collect();
    let Ok(parent) = CgroupPath::root().child(EXEC_PARENT) else { return };
    let strays = parent.children(core.hierarchy.root()).filter(|path| !held.contains(path));
    for path in strays.collect::<Vec<_>>() {
        // A cgroup with processes is not removed.
        let _ = fs::remove_dir(core.hierarchy.dir(&path));
    }
}

/// Removes the directory of a cgroup that was created for a guarantee, after its release.
pub(crate) fn remove_cgroup(cgroup: &CgroupPath, dir: &Path) {
    if let Err(error) = fs::remove_dir(dir)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(%cgroup, %error, "the cgroup is still in use and is not removed");
    }
    fault::point("guarantee.removed");
}
