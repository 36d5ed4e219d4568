//! Guarantees that change while they hold, because somebody asks for it.
//!
//! Problem: a workload that runs is to have more or less, and must not lose what it has meanwhile, nor if it cannot be.
//!
//! Algorithm: the engine changes the ledger within the nodes of the guarantee, or refuses. Others leave the CPUs that it
//! gains; then the ledger is stored and the knobs are written in the order in which no promise is broken (see
//! `numaward_enforce`): limits rise before, and fall after the sets change. What cannot be written is undone.
//!
//! Containers are changed by their runtime, see `pods::resize`.

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

use super::{Admission, Attempt, Core};
use crate::spans;

/// What is to be changed, as it is now.
struct ResizeTarget {
    guarantee: Guarantee,
    container: ContainerName,
    allocation: Allocation,
    request: Request,
}

/// The bytes of a kind of memory that a request promises.
fn promised(request: &engine::Request, kind: ZoneKind) -> Bytes {
    let amounts = request.containers.iter().filter_map(|of| of.requests.memory.get(&kind)?.units());
    Bytes(amounts.fold(0, u64::saturating_add))
}

impl Core {
    /// Changes what a workload is promised, all of it or nothing.
    pub(crate) fn resize_requested(
        &mut self,
        asked: &Resize,
        dry_run: bool,
    ) -> Result<Admission, AdmissionError> {
        if self.mode() == EnforcementMode::Off && !dry_run {
            return Err(AdmissionError::Off);
        }
        let held = self.resize_target(&asked.name)?;
        if let Some(declared) = &held.guarantee.declared {
            let problem = format!("it is declared in the configuration, for {:?}", declared.pattern());
            let allowed = "one that was asked for; change the configuration for this one";
            return Err(AdmissionError::conflict("name", problem, allowed));
        }
        let limit = new_limit(&held, asked)?;
        check_cpus(&held, asked)?;
        if asked.memory.is_some() && held.request.terms.without_memory {
            let problem = "it holds no memory, and gets none while it runs";
            let allowed = "nothing; release it and ask again with memory";
            return Err(FieldError::new("memory", problem, allowed).into());
        }
        self.resize_held(&held, asked, limit, dry_run)
    }

    /// Changes a declared guarantee to what its rule says now: in place if only amounts differ and its nodes have
    /// them, else by a new decision. Where neither is possible, it keeps what it holds.
    pub(crate) fn follow_rule(
        &mut self,
        name: &str,
        request: &Request,
        path: &CgroupPath,
    ) -> Result<(), AdmissionError> {
        let mut held = self.resize_target(name)?;
        let is_same = name == request.name && held.guarantee.target == request.target;
        let rules = held.guarantee.declared.as_ref().zip(request.declared.as_ref());
        let mut refused = None;
        if is_same && rules.is_some_and(|(was, now)| differs_in_amounts(was, now)) {
            held.guarantee.declared.clone_from(&request.declared);
            match self.resize_held(&held, &amounts_of(request), request.limit, false) {
                Err(error @ AdmissionError::Rejected(..)) => refused = Some(error),
                resized => return resized.map(drop),
            }
        }
        self.check_anew(name, request, path).map_err(|error| refused.unwrap_or(error))?;
        self.release(name)?;
        self.admit_at(request, path, false, Attempt::First).map(drop)
    }

    /// Refuses a request for a cgroup that would not be admitted if the guarantee of this name ended.
    fn check_anew(&self, name: &str, request: &Request, path: &CgroupPath) -> Result<(), AdmissionError> {
        if name != request.name {
            self.check_name(&request.name)?;
        }
        self.check_cgroup(path, request)?;
        self.check_fit()?;
        let terms = self.with_home(&request.terms, &request.name, path);
        self.check_terms(&terms)?;
        let strategy = &self.policy.strategy;
        let ledger = strategy.release(&self.ledger_for(Some(path), None), &OwnerId::from(name));
        let decision = spans::decide(&**strategy, &ledger, &request.engine, &terms);
        decision.outcome.map(drop).map_err(|rejection| {
            AdmissionError::Rejected(
                explain::rejection(&rejection),
                explain::explanation(&decision.explanation),
            )
        })
    }

    /// Changes what a workload is promised to these amounts and this limit. `held` has the rule by which it is
    /// declared from then on, if any.
    fn resize_held(
        &mut self,
        held: &ResizeTarget,
        asked: &Resize,
        limit: Option<Bytes>,
        dry_run: bool,
    ) -> Result<Admission, AdmissionError> {
        let cgroup = &held.guarantee.cgroup;
        self.check_hugepages(held, asked)?;
        self.check_used(cgroup, limit.filter(|limit| Some(*limit) < held.request.limit))?;
        self.check_fit()?;
        let owner = OwnerId::from(asked.name.as_str());
        let ledger = self.ledger_for(Some(cgroup), Some(&held.allocation));
        let resized = self.policy.strategy.resize(&ledger, &owner, &held.container, &amounts(asked));
        let ledger = match resized {
            Ok(ledger) => ledger,
            Err(refused) => {
                let (rejection, explanation) = (explain::resize(&refused), api::Explanation::default());
                if !dry_run {
                    return Err(AdmissionError::Rejected(rejection, explanation));
                }
                return Ok(Admission::DryRun(Box::new(api::DryRun::refused(rejection, explanation))));
            }
        };
        self.hold_resized(held, limit, ledger, dry_run)
    }

    /// What holds under this name, unless it is somebody else's to change.
    fn resize_target(&self, name: &str) -> Result<ResizeTarget, AdmissionError> {
        let conflict = |problem: String, allowed| AdmissionError::conflict("name", problem, allowed);
        let unknown = || AdmissionError::Unknown(name.to_owned());
        let guarantee = Guarantee::clone(self.store.state.guarantees.get(name).ok_or_else(unknown)?);
        if let Target::Container(_) = guarantee.target {
            let problem = "a container of a pod is changed by Kubernetes (in-place resize of the pod)";
            return Err(conflict(problem.to_owned(), "a cgroup, a unit or a command"));
        }
        if guarantee.has_no_guarantee() {
            let problem = format!("nothing is promised to {name:?}: it is a workload with a name");
            return Err(conflict(problem, "one with a guarantee; release this one and ask for a guarantee"));
        }
        if self.store.state.releasing.contains(name) {
            let problem = format!("{name:?} is being released");
            return Err(conflict(problem, "one that is not"));
        }
        let owner = OwnerId::from(name);
        if self.store.state.moving.is_moved(&owner) {
            let problem = format!("{name:?} is being moved to other nodes");
            return Err(conflict(problem, "one that is not; wait for the moves to end, or cancel them"));
        }
        let account = self.store.state.ledger.owner(&owner).ok_or_else(unknown)?;
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
            declared: None,
            engine,
        };
        let allocation = account.containers.get(&container).cloned().unwrap_or_default();
        Ok(ResizeTarget { guarantee, container, allocation, request })
    }

    /// Refuses huge pages of sizes of which none are held, and fewer than are in use.
    fn check_hugepages(&self, held: &ResizeTarget, asked: &Resize) -> Result<(), AdmissionError> {
        for (&size, &bytes) in &asked.hugepages {
            let field = format!("hugepages.{size}");
            let kind = ZoneKind::Hugepages(size);
            if !held.allocation.blocks.iter().any(|block| block.kind == kind) {
                let problem = "it holds no huge pages of this size, and gets none while it runs";
                let allowed = "a size that it holds; release it and ask again for others";
                return Err(FieldError::new(field, problem, allowed).into());
            }
            let used = read::hugetlb_current(&self.hierarchy.dir(&held.guarantee.cgroup), size).ok();
            if let Some(used) = used.filter(|used| *used > bytes) {
                let problem = format!("{} uses {used} now", held.guarantee.cgroup);
                return Err(FieldError::new(field, problem, format!("at least {used}")).into());
            }
        }
        Ok(())
    }

    /// Stores a ledger in which a guarantee changed, and writes what follows.
    fn hold_resized(
        &mut self,
        held: &ResizeTarget,
        limit: Option<Bytes>,
        ledger: Ledger,
        dry_run: bool,
    ) -> Result<Admission, AdmissionError> {
        let ResizeTarget { guarantee, container, request, .. } = held;
        let cgroup = &guarantee.cgroup;
        let owner = OwnerId::from(request.name.as_str());
        let mut change = self.begin();
        change.store.state.ledger = ledger;
        let account = change.store.state.ledger.owner(&owner).cloned().unwrap_or_default();
        let engine = account.request.as_deref().unwrap_or(&request.engine).clone();
        let allocation = account.containers.get(container).cloned().unwrap_or_default();
        let resized = Request { engine, limit, ..request.clone() };
        let settings = change.settings(&resized, &allocation);
        if dry_run {
            let held = (&allocation, &resized.terms);
            let allocation = change.describe(&resized.name, &resized.target, cgroup, held, &settings);
            let dry = api::DryRun::admitted(allocation, api::Explanation::default());
            return Ok(Admission::DryRun(Box::new(dry)));
        }
        change.note_settings(cgroup, &settings);
        if let Some(kept) = change.store.state.guarantees.get_mut(&resized.name) {
            kept.declared.clone_from(&guarantee.declared);
        }
        change.confine_others(&[cgroup]);
        change.change_held(SettingsChange::Hold(cgroup.clone(), settings))?;
        let cpus = allocation.cpus.unwrap_or_default();
        tracing::info!(name = resized.name, %cgroup, %cpus, "resized");
        self.note_guarantees_changed();
        Ok(Admission::Admitted)
    }
}

/// The most memory that the workload may use from now on.
fn new_limit(held: &ResizeTarget, asked: &Resize) -> Result<Option<Bytes>, AdmissionError> {
    let before = promised(&held.request.engine, ZoneKind::Memory);
    let memory = asked.memory.unwrap_or(before);
    let kept = held.request.limit;
    let limit = match asked.limit {
        Some(limit) => Some(limit),
        // Who had no more than was promised goes on so.
        None if kept == Some(before) => Some(memory),
        None => kept,
    };
    check_limit(memory, limit)?;
    Ok(limit)
}

/// Refuses to make shared CPUs of exclusive ones, and the other way round.
fn check_cpus(held: &ResizeTarget, asked: &Resize) -> Result<(), AdmissionError> {
    let Some(cpus) = asked.cpus else { return Ok(()) };
    let (problem, allowed) = match (held.allocation.cpus.is_some(), cpus.whole_cpus()) {
        (true, None) => ("it has exclusive CPUs", "a whole number of CPUs"),
        (false, Some(_)) => {
            ("it shares CPUs", "a part of a CPU such as 500m; release it and ask for whole ones")
        }
        _ => return Ok(()),
    };
    Err(FieldError::new("cpus", format!("{cpus}: {problem}"), allowed).into())
}

/// Whether two rules differ in amounts and in whom they are for, and in nothing else that a workload that runs cannot follow.
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
    let is_like = is_exclusive(was.cpus) == is_exclusive(cpus) && was.hugepages.keys().eq(hugepages.keys());
    let changed = DeclaredGuarantee { unit, cgroup, cpus, memory, memory_limit, hugepages, ..was.clone() };
    is_like && changed == *now
}

/// The amounts that a request asks for.
fn amounts_of(request: &Request) -> Resize {
    let container = request.engine.containers.first();
    Resize {
        name: request.name.clone(),
        cpus: container.and_then(|container| container.requests.cpu),
        memory: Some(promised(&request.engine, ZoneKind::Memory)),
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
