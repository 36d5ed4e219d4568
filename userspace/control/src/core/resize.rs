//! Resizing of guarantees on request.
//!
//! # Problem
//! A running workload is to get more or fewer resources. It must not lose its present guarantee meanwhile, nor after a failure.
//!
//! # Algorithm
//! The engine changes the ledger within the nodes of the guarantee, or refuses. Other workloads leave the CPUs that the workload gains;
//! then the ledger is stored, and the knobs are written in an order that breaks no guarantee (see `numaward_enforce`): limits rise before
//! the sets change, and fall afterwards. A failed write is undone.
//!
//! Containers are resized by their runtime, see `pods::resize`.

use numaward_api::{self as api, EnforcementMode};
use numaward_cgroup::{
    CgroupPath,
    knob::{Limit, Partition},
    read,
};
use numaward_config::enforcement::DeclaredGuarantee;
use numaward_enforce::SettingsChange;
use numaward_engine::{self as engine, Allocation, ContainerName, Ledger, OwnerId, Quantity, Resources};
use numaward_guarantee::{
    error::AdmissionError,
    explain,
    request::{FieldError, Request, Resize, Target, check_limit},
    state::Guarantee,
};
use numaward_topology::{Bytes, ZoneKind};

use super::{
    Admission, Attempt, Core, admission, burstable_home, conditions, cpu_isolation, huge_pages, release,
    settings, shared_pool,
};
use crate::spans;

/// The present state of a guarantee that is to be resized.
struct ResizeTarget {
    guarantee: Guarantee,
    container: ContainerName,
    allocation: Allocation,
    request: Request,
}

/// Returns the requested bytes of a kind of memory.
fn requested_bytes(request: &engine::Request, kind: ZoneKind) -> Bytes {
    let amounts = request.containers.iter().filter_map(|of| of.requests.memory.get(&kind)?.units());
    Bytes(amounts.fold(0, u64::saturating_add))
}

/// Resizes a guarantee on request; after a failure, it is unchanged.
pub(crate) fn resize_requested(
    core: &mut Core,
    asked: &Resize,
    dry_run: bool,
) -> Result<Admission, AdmissionError> {
    if core.mode() == EnforcementMode::Off && !dry_run {
        return Err(AdmissionError::Off);
    }
    let held = resize_target(core, &asked.name)?;
    if let Some(declared) = &held.guarantee.declared {
        let problem = format!("it is declared in the configuration, for {:?}", declared.pattern());
        let allowed = "a guarantee that was requested; change the configuration for this one";
        return Err(AdmissionError::conflict("name", problem, allowed));
    }
    let limit = new_limit(&held, asked)?;
    check_cpus(&held, asked)?;
    if asked.memory.is_some() && held.request.terms.without_memory {
        let problem = "it has no guaranteed memory, and cannot get any while it runs";
        let allowed = "nothing; release it and send a new request with memory";
        return Err(FieldError::new("memory", problem, allowed).into());
    }
    resize_guarantee(core, &held, asked, limit, dry_run)
}

/// Changes a declared guarantee to its present rule: in place if only amounts differ and its nodes have enough free resources,
/// otherwise by a new decision. If neither is possible, the guarantee is unchanged.
pub(crate) fn update_declared(
    core: &mut Core,
    name: &str,
    request: &Request,
    path: &CgroupPath,
) -> Result<(), AdmissionError> {
    let mut held = resize_target(core, name)?;
    let is_same = name == request.name && held.guarantee.target == request.target;
    let rules = held.guarantee.declared.as_ref().zip(request.declared.as_ref());
    let mut refused = None;
    if is_same && rules.is_some_and(|(was, now)| differs_in_amounts(was, now)) {
        held.guarantee.declared.clone_from(&request.declared);
        match resize_guarantee(core, &held, &amounts_of(request), request.limit, false) {
            Err(error @ AdmissionError::Rejected(..)) => refused = Some(error),
            resized => return resized.map(drop),
        }
    }
    check_replacement(core, name, request, path).map_err(|error| refused.unwrap_or(error))?;
    let is_due = core.effects.declared;
    release::release(core, name)?;
    let Err(error) = admission::admit_at(core, request, path, false, Attempt::First) else { return Ok(()) };
    let ResizeTarget { guarantee, request: before, .. } = held;
    match admission::admit_at(core, &before, &guarantee.cgroup, false, Attempt::First) {
        // No resources became free. Otherwise, this change would be retried without end.
        Ok(_) => core.effects.declared = is_due,
        Err(error) => {
            tracing::error!(name, %error, "the guarantee was released to be changed, and cannot be given again");
        }
    }
    Err(error)
}

/// Checks that a request for a cgroup would be admitted after the release of the guarantee of this name.
fn check_replacement(
    core: &mut Core,
    name: &str,
    request: &Request,
    path: &CgroupPath,
) -> Result<(), AdmissionError> {
    let untouched = huge_pages::untouched_huge_pages(core, path);
    if name != request.name {
        admission::check_name(core, &request.name)?;
    }
    admission::check_cgroup(core, path, request)?;
    core.policy.check_fit()?;
    let terms = burstable_home::with_preferred_node(core, &request.terms, &request.name, path);
    admission::check_terms(core, &terms)?;
    let strategy = &core.policy.strategy;
    let ledger = strategy.release(&conditions::ledger_for(core, Some(path), None), &OwnerId::from(name));
    let decision = spans::decide(&**strategy, &ledger, &request.engine, &terms);
    let grants = decision.outcome.map_err(|rejection| {
        AdmissionError::Rejected(
            explain::rejection(&rejection),
            explain::explanation(&decision.explanation).into(),
        )
    })?;
    let settings = settings::request_settings(core, request, &admission::only_allocation(grants));
    huge_pages::check_nodes(core, path, settings.mems.as_ref(), untouched)?;
    admission::check_room(core, path, settings.mems.as_ref())
}

/// Resizes a guarantee to these amounts and this limit. `held.guarantee.declared` is the rule that applies afterwards, if any.
fn resize_guarantee(
    core: &mut Core,
    held: &ResizeTarget,
    asked: &Resize,
    limit: Option<Bytes>,
    dry_run: bool,
) -> Result<Admission, AdmissionError> {
    let cgroup = &held.guarantee.cgroup;
    check_hugepages(core, held, asked)?;
    admission::check_memory_use(core, cgroup, limit.filter(|limit| Some(*limit) < held.request.limit))?;
    core.policy.check_fit()?;
    let owner = OwnerId::from(asked.name.as_str());
    let ledger = conditions::ledger_for(core, Some(cgroup), Some(&held.allocation));
    let resized = core.policy.strategy.resize(&ledger, &owner, &held.container, &amounts(asked));
    let ledger = match resized {
        Ok(ledger) => ledger,
        Err(refused) => {
            let (rejection, explanation) = (explain::resize(&refused), api::Explanation::default());
            if !dry_run {
                return Err(AdmissionError::Rejected(rejection, explanation.into()));
            }
            return Ok(Admission::DryRun(Box::new(api::DryRun::refused(rejection, explanation))));
        }
    };
    enforce_resized(core, held, limit, ledger, dry_run)
}

/// Returns the guarantee of this name, unless it must be changed by another interface or cannot be changed now.
fn resize_target(core: &Core, name: &str) -> Result<ResizeTarget, AdmissionError> {
    let conflict = |problem: String, allowed| AdmissionError::conflict("name", problem, allowed);
    let unknown = || AdmissionError::Unknown(name.to_owned());
    let guarantee = Guarantee::clone(core.store.state.guarantees.get(name).ok_or_else(unknown)?);
    if let Target::Container(_) = guarantee.target {
        let problem = "a container of a pod is changed by Kubernetes (in-place resize of the pod)";
        return Err(conflict(problem.to_owned(), "a cgroup, a unit or a command"));
    }
    if guarantee.has_no_guarantee() {
        let problem = format!("{name:?} has no guarantee: it is only a workload with a name");
        return Err(conflict(
            problem,
            "a workload with a guarantee; release this name and request a guarantee",
        ));
    }
    if core.store.state.releasing.contains(name) {
        let problem = format!("{name:?} is being released");
        return Err(conflict(problem, "a guarantee that is not being released"));
    }
    let owner = OwnerId::from(name);
    if core.store.state.moving.is_moved(&owner) {
        let problem = format!("{name:?} is being moved to other nodes");
        return Err(conflict(
            problem,
            "a guarantee that is not being moved; wait for the moves to end, or cancel them",
        ));
    }
    let account = core.store.state.ledger.owner(&owner).ok_or_else(unknown)?;
    let engine = account.request.as_deref().cloned().ok_or_else(unknown)?;
    let container = engine.containers.first().map(|of| of.name.clone()).ok_or_else(unknown)?;
    let settings = &guarantee.settings;
    let request = Request {
        name: name.to_owned(),
        target: guarantee.target.clone(),
        limit: match settings.memory_max {
            Some(Limit::Bytes(limit)) => Some(limit),
            Some(Limit::Max) | None => None,
        },
        terms: account.terms.clone(),
        partition: settings.partition.unwrap_or(Partition::Member),
        declared: guarantee.declared.clone(),
        engine,
    };
    let allocation = account.containers.get(&container).cloned().unwrap_or_default();
    Ok(ResizeTarget { guarantee, container, allocation, request })
}

/// Refuses sizes of huge pages that the guarantee does not have, and amounts below the present use.
fn check_hugepages(core: &Core, held: &ResizeTarget, asked: &Resize) -> Result<(), AdmissionError> {
    for (&size, &bytes) in &asked.hugepages {
        let field = format!("hugepages.{size}");
        let kind = ZoneKind::Hugepages(size);
        if !held.allocation.blocks.iter().any(|block| block.kind == kind) {
            let problem = "it has no huge pages of this size, and cannot get any while it runs";
            let allowed = "a size that it has; to get another size, release it and send a new request";
            return Err(FieldError::new(field, problem, allowed).into());
        }
        let used = read::hugetlb_current(&core.hierarchy.dir(&held.guarantee.cgroup), size).ok();
        if let Some(used) = used.filter(|used| *used > bytes) {
            let problem = format!("{} uses {used} now", held.guarantee.cgroup);
            return Err(FieldError::new(field, problem, format!("at least {used}")).into());
        }
    }
    Ok(())
}

/// Stores a ledger with a resized guarantee, and writes its knobs.
fn enforce_resized(
    core: &mut Core,
    held: &ResizeTarget,
    limit: Option<Bytes>,
    ledger: Ledger,
    dry_run: bool,
) -> Result<Admission, AdmissionError> {
    let ResizeTarget { guarantee, container, request, .. } = held;
    let cgroup = &guarantee.cgroup;
    let owner = OwnerId::from(request.name.as_str());
    let mut change = core.begin();
    change.state().ledger = ledger;
    let account = change.store.state.ledger.owner(&owner).cloned().unwrap_or_default();
    let engine = account.request.as_deref().unwrap_or(&request.engine).clone();
    let allocation = account.containers.get(container).cloned().unwrap_or_default();
    let resized = Request { engine, limit, ..request.clone() };
    let settings = settings::request_settings(&change, &resized, &allocation);
    if dry_run {
        let held = (&allocation, &resized.terms);
        let allocation =
            admission::describe(&change, &resized.name, &resized.target, cgroup, held, &settings);
        let dry = api::DryRun::admitted(allocation, api::Explanation::default());
        return Ok(Admission::DryRun(Box::new(dry)));
    }
    shared_pool::note_settings(change.state(), cgroup, &settings);
    if let Some(kept) = change.state().guarantees.get_mut(&resized.name) {
        kept.declared.clone_from(&guarantee.declared);
    }
    cpu_isolation::confine_others(change.core(), &[cgroup]);
    shared_pool::change_held(change, SettingsChange::Hold(cgroup.clone(), settings))?;
    let cpus = allocation.cpus.unwrap_or_default();
    tracing::info!(name = resized.name, %cgroup, %cpus, "resized");
    shared_pool::note_guarantees_changed(core);
    Ok(Admission::Admitted)
}

/// Returns the new memory limit of the workload.
fn new_limit(held: &ResizeTarget, asked: &Resize) -> Result<Option<Bytes>, AdmissionError> {
    let before = requested_bytes(&held.request.engine, ZoneKind::Memory);
    let memory = asked.memory.unwrap_or(before);
    let kept = held.request.limit;
    let limit = match asked.limit {
        Some(limit) => Some(limit),
        // A limit that was equal to the guaranteed memory stays equal to it.
        None if kept == Some(before) => Some(memory),
        None => kept,
    };
    check_limit(memory, limit)?;
    Ok(limit)
}

/// Refuses to change exclusive CPUs to shared CPUs, or the reverse.
fn check_cpus(held: &ResizeTarget, asked: &Resize) -> Result<(), AdmissionError> {
    let Some(cpus) = asked.cpus else { return Ok(()) };
    let (problem, allowed) = match (held.allocation.cpus.is_some(), cpus.whole_cpus()) {
        (true, None) => ("it has exclusive CPUs", "a whole number of CPUs"),
        (false, Some(_)) => (
            "it has no exclusive CPUs",
            "a part of a CPU such as 500m; to get whole CPUs, release it and send a new request",
        ),
        _ => return Ok(()),
    };
    Err(FieldError::new("cpus", format!("{}: {problem}", cpus.decimal()), allowed).into())
}

/// Returns true if two rules differ only in their amounts and targets, which a running workload can follow.
fn differs_in_amounts(was: &DeclaredGuarantee, now: &DeclaredGuarantee) -> bool {
    let DeclaredGuarantee {
        unit,
        cgroup,
        cpus,
        memory,
        memory_limit,
        hugepages,
        policy: _,
        partition: _,
        placement: _,
    } = now.clone();
    let is_exclusive = |cpus: Option<api::Cpus>| cpus.is_some_and(|cpus| cpus.0.whole_cpus().is_some());
    let is_like = is_exclusive(was.cpus) == is_exclusive(cpus)
        && was.memory.is_some() == memory.is_some()
        && was.hugepages.keys().eq(hugepages.keys());
    let changed = DeclaredGuarantee { unit, cgroup, cpus, memory, memory_limit, hugepages, ..was.clone() };
    is_like && changed == *now
}

/// Converts the amounts of a request.
fn amounts_of(request: &Request) -> Resize {
    let container = request.engine.containers.first();
    Resize {
        name: request.name.clone(),
        cpus: container.and_then(|container| container.requests.cpu),
        memory: Some(requested_bytes(&request.engine, ZoneKind::Memory)).filter(|memory| memory.0 > 0),
        limit: request.limit,
        hugepages: request.hugepages().collect(),
    }
}

fn amounts(asked: &Resize) -> Resources {
    let memory = asked.memory.map(|bytes| (ZoneKind::Memory, bytes));
    let hugepages = asked.hugepages.iter().map(|(&size, &bytes)| (ZoneKind::Hugepages(size), bytes));
    let memory = memory.into_iter().chain(hugepages);
    Resources {
        cpu: asked.cpus,
        memory: memory.map(|(kind, bytes)| (kind, Quantity::whole(bytes.0))).collect(),
    }
}
