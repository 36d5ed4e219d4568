//! Containers of pods: placed while the runtime creates them, and looked after like every other guarantee.
//!
//! Problem: a container's CPUs and nodes must be decided before its cgroup exists, and in time; the runtime
//! writes them, may fail to, may be restarted, and so may we.
//!
//! Terms: an *owner* is what the engine decides on: a pod as a whole where the API server has reported it (its
//! owner is the pod's UID), else one container (`UID/NAME`). A container is *placed* when what it gets has been
//! decided and stored; it is *bound* when its cgroup exists and is held: from then on it is a guarantee like
//! others if anything is promised to it, else it keeps to the shared pool.
//!
//! Algorithm: [`Core::run_pod`] admits pods as a whole. [`Core::create`] admits what is not admitted yet, and answers
//! with settings for the runtime. [`Core::bind`] runs when the process exists but not its program: whatever the
//! runtime has not written is written then, ancestors included, and the probes are informed. [`Core::synchronize`]
//! compares all of that with what runs. When the shared pool changes, containers that hold no CPUs follow; the
//! runtime is informed later, so that it repeats the new pool in what it writes itself. [`ending`] releases what is
//! over. [`unbound`] tries again to bind those that could not be, and gives up those that were never started.
//! [`uninstall`] gives containers back what they would hold without us. [`waiting`] has who runs without what it asks
//! for, [`memory`] what protects memory.
//!
//! Invariants: what the runtime is answered is stored; a container that runs is never refused, whatever the
//! engine says about it.

mod commands;
mod ending;
mod memory;
mod resize;
mod synchronize;
#[cfg(test)]
mod tests;
mod unbound;
mod uninstall;
mod waiting;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    slice,
    sync::Arc,
    time::Instant,
};

use numaward_api::{self as api, EnforcementMode};
use numaward_cgroup::{
    CgroupPath,
    knob::{Knob, Limit, Quota},
};
use numaward_config::kubernetes::CpuQuota;
use numaward_enforce::{EnforceError, EnforcementReport, SettingsChange};
use numaward_engine::{
    self as engine, Allocation, OwnerId, Terms,
    policy::{FULL_PCPUS_ONLY, go_bool},
};
use numaward_guarantee::{
    error::AdmissionError,
    explain,
    narrowing::Narrowing,
    pod::{
        AdmittedPod, ContainerPlacementRequest, PlacedContainer, PodClaim, PodPlacementRequest,
        UnpinnedReason, Update, check_account,
    },
    request::Target,
    state::Guarantee,
};
use numaward_model::{
    Settings,
    pod::{GuaranteeSource, PodContainer},
};
use numaward_topology::{Bytes, CpuSet};
use tokio::sync::mpsc;

use self::{unbound::UnboundContainer, waiting::UnplacedContainers};
use super::{Attempt, Core, HeldChange};
use crate::{metrics::KubeletRules, spans};

/// Shared containers that are held against the shared pool in one turn.
const CHECKS_PER_TURN: usize = 16;

/// `memory.min`, `memory.low` and `memory.high`; none: not managed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MemoryKnobs {
    min: Option<Bytes>,
    low: Option<Bytes>,
    high: Option<Bytes>,
}

/// More than so many refused owners are not remembered: they are counted anew.
const MAX_REFUSED_OWNERS: usize = 1000;

/// What of pods is remembered, but not over a restart.
#[derive(Default)]
pub(super) struct Pods {
    /// Containers whose cgroups are held.
    bound: BTreeSet<String>,
    /// Containers to bind as soon as there is time.
    to_bind: VecDeque<String>,
    /// Containers that are not bound yet.
    unbound: BTreeMap<String, UnboundContainer>,
    /// Containers that ended and could not be released yet.
    ended: BTreeSet<String>,
    /// Pods with such containers that are over: their UIDs and sandboxes.
    over: BTreeSet<(String, String)>,
    /// The pool that shared containers were given last.
    pool: CpuSet,
    /// Whether the applied settings of some are those of another pool.
    is_behind: bool,
    /// The container that was looked at last.
    last_checked: Option<String>,
    /// Those that run without what they ask for.
    waiting: UnplacedContainers,
    /// The owners that were refused last.
    refused: BTreeSet<String>,
    /// Containers of which the runtime was asked to take back what we said.
    taken_back: BTreeSet<String>,
    /// Where to inform the runtime of what we have written.
    updates: Option<mpsc::UnboundedSender<Vec<Update>>>,
}

impl Pods {
    fn send(&self, updates: Vec<Update>) {
        if let Some(sender) = self.updates.as_ref().filter(|_| !updates.is_empty()) {
            // Who listened is gone at the end only.
            let _ = sender.send(updates);
        }
    }
}

impl Core {
    /// Admits a pod as a whole.
    fn run_pod(&mut self, ask: &PodPlacementRequest, attempt: Attempt) -> Result<(), AdmissionError> {
        let PodClaim::Pod(request) = &ask.asked else { return Ok(()) };
        let _span = spans::admit(request.owner.as_str(), false);
        let mut change = self.begin();
        change.admit_owner(request, ask, (None, None), attempt)?;
        change.store()
    }

    /// Lets the engine decide, unless the owner holds something already. Nothing is stored yet. It may run already, in this
    /// cgroup.
    fn admit_owner(
        &mut self,
        request: &engine::Request,
        ask: &PodPlacementRequest,
        (container, cgroup): (Option<&str>, Option<&CgroupPath>),
        attempt: Attempt,
    ) -> Result<(), AdmissionError> {
        let owner = request.owner.as_str();
        if let Some(admitted) = self.store.state.pods.get_mut(owner) {
            admitted.sandbox.clone_from(&ask.sandbox);
            return Ok(());
        }
        if self.take_over_imported(ask) {
            return Ok(());
        }
        self.check_fit()?;
        let mut notes = ask.notes.clone();
        let mut terms = ask.terms.clone();
        self.without_unknown_class(&mut terms, &mut notes);
        if let Err(problem) = self.check_terms(&terms) {
            notes.push(format!("the pod's own terms cannot be applied: {problem}"));
            // One may do without the other.
            let (policy, preferences) = (terms.policy, terms.preferences.clone());
            terms.policy = None;
            if self.check_terms(&terms).is_err() {
                terms = Terms { policy, scope: terms.scope, preferences, ..Terms::default() };
                if self.check_terms(&terms).is_err() {
                    terms.policy = None;
                }
            }
        }
        check_account(request, &terms).map_err(|rejection| {
            AdmissionError::Rejected(
                rejection,
                api::Explanation { notes: notes.clone(), ..api::Explanation::default() },
            )
        })?;
        let started = Instant::now();
        let ledger = self.ledger_for(cgroup, None);
        let decision = spans::decide(&*self.policy.strategy, &ledger, request, &terms);
        if attempt == Attempt::First || decision.outcome.is_ok() {
            let took = started.elapsed();
            self.metrics.decided(request, &decision, took);
            // The runtime asks again for what was refused; the kubelet would have let it go.
            let (refused, is_refused) = (&mut self.pods.refused, decision.outcome.is_err());
            let was_refused = refused.remove(owner);
            if refused.len() >= MAX_REFUSED_OWNERS {
                refused.clear();
            }
            if is_refused {
                refused.insert(owner.to_owned());
            }
            if !(is_refused && was_refused) {
                let options = &self.config.cpu_manager_policy_options;
                let rules = KubeletRules {
                    policy: terms.policy.unwrap_or_else(|| self.config.topology_policy()),
                    scope: terms.scope.unwrap_or_else(|| self.config.topology_scope()),
                    has_whole_cores: options
                        .get(FULL_PCPUS_ONLY)
                        .and_then(|value| go_bool(value))
                        .unwrap_or_default(),
                    machine: &self.policy.machine,
                };
                self.metrics.decided_on_pod(request, &decision, &rules, took);
            }
        }
        let mut explanation = explain::explanation(&decision.explanation);
        explanation.notes = notes;
        match decision.outcome {
            Ok(_) => {
                self.store.state.ledger = decision.ledger;
                let admitted = AdmittedPod {
                    pod: ask.pod.clone(),
                    sandbox: ask.sandbox.clone(),
                    container: container.map(str::to_owned),
                    explanation,
                };
                self.store.state.pods.insert(owner.to_owned(), admitted);
                Ok(())
            }
            Err(rejection) => {
                let refused = AdmissionError::Rejected(explain::rejection(&rejection), explanation);
                if attempt == Attempt::First {
                    let pod = format!("{}/{}", ask.pod.namespace, ask.pod.name);
                    tracing::info!(pod, container, reason = %refused, "refused");
                }
                Err(refused)
            }
        }
    }

    /// Places a container: decides, stores, takes its CPUs away from those who share, and says what the runtime is to
    /// set.
    fn create(
        &mut self,
        ask: &ContainerPlacementRequest,
        attempt: Attempt,
    ) -> Result<(Settings, Option<UnpinnedReason>), AdmissionError> {
        let _span = spans::admit(&ask.id, false);
        let mut change = self.begin();
        let (owner, unpinned) = match change.place(ask, attempt) {
            Ok(owner) => (owner, None),
            Err(refused @ AdmissionError::Rejected(..)) => return Err(refused),
            // No fault of the container's.
            Err(error) => {
                tracing::error!(container = ask.id, %error, "a container gets no guarantee");
                (ask.container_owner(), Some(UnpinnedReason::Unfit))
            }
        };
        let placed = change.note_placed(ask, owner);
        let settings = change.settings_of(&placed);
        match change.store() {
            Ok(()) => {
                if !self.pods.bound.contains(&ask.id) {
                    self.pods.unbound.insert(ask.id.clone(), UnboundContainer::new(Instant::now()));
                }
                self.follow_pool();
                Ok((settings, unpinned))
            }
            Err(error) => {
                // It must keep off what is promised to others, even if nothing can be promised to it.
                tracing::error!(container = ask.id, %error, "a container gets no guarantee");
                Ok((self.shared(), Some(UnpinnedReason::Ledger)))
            }
        }
    }

    /// Admits what is asked for with a container; says who its owner is. Nothing is stored yet.
    fn place(&mut self, ask: &ContainerPlacementRequest, attempt: Attempt) -> Result<String, AdmissionError> {
        let alone = |request: &engine::Request| engine::Request {
            owner: ask.container_owner().into(),
            init_containers: Vec::new(),
            containers: request
                .all_containers()
                .filter(|asked| asked.name.as_str() == ask.name)
                .cloned()
                .collect(),
            resources: None,
        };
        let request = match &ask.pod.asked {
            // A pod that was begun container by container goes on so.
            PodClaim::Pod(request) if self.is_split(&ask.pod.pod.uid) => alone(request),
            PodClaim::Pod(request) => {
                let pod = ask.cgroup.parent().filter(|pod| !pod.is_root());
                self.admit_owner(request, &ask.pod, (None, pod.as_ref()), attempt)?;
                return Ok(request.owner.to_string());
            }
            // What a kubelet promised, it promised to the pod.
            PodClaim::Container(_)
                if self.take_over_imported(&ask.pod) || self.is_whole(&ask.pod.pod.uid) =>
            {
                return Ok(ask.pod.pod.uid.clone());
            }
            PodClaim::Container(request) => request.clone(),
            PodClaim::Nothing => return Ok(ask.container_owner()),
        };
        if !request.containers.is_empty() {
            self.admit_owner(&request, &ask.pod, (Some(&ask.name), Some(&ask.cgroup)), attempt)?;
        }
        Ok(request.owner.to_string())
    }

    /// Whether containers of this pod were admitted one by one.
    fn is_split(&self, uid: &str) -> bool {
        let of_pod = |admitted: &Arc<AdmittedPod>| admitted.pod.uid == uid && admitted.container.is_some();
        self.store.state.pods.values().any(of_pod)
    }

    /// Whether this pod was admitted as a whole.
    fn is_whole(&self, uid: &str) -> bool {
        self.store.state.pods.get(uid).is_some_and(|admitted| admitted.container.is_none())
    }

    fn note_placed(&mut self, ask: &ContainerPlacementRequest, owner: String) -> PlacedContainer {
        let of = PodContainer {
            pod: ask.pod.pod.clone(),
            container: ask.name.clone(),
            id: ask.id.clone(),
            sandbox: ask.pod.sandbox.clone(),
            slice: if owner == ask.pod.pod.uid { ask.slice } else { GuaranteeSource::Own },
            owner,
        };
        let known = self.store.state.containers.get(&ask.id).and_then(|known| known.without_us.clone());
        let without_us = known.or_else(|| self.without_us(&ask.has));
        let (cgroup, memory, keeps_pod_quota) = (ask.cgroup.clone(), ask.memory, ask.keeps_pod_quota);
        let placed = PlacedContainer { of, cgroup, memory, keeps_pod_quota, without_us };
        self.store.state.containers.insert(ask.id.clone(), placed.clone());
        placed
    }

    pub(crate) fn allocation_for(&self, of: &PodContainer) -> Option<&Allocation> {
        self.store.state.ledger.allocation(&OwnerId::from(of.owner.as_str()), &of.ledger_name())
    }

    /// On which terms a container was admitted.
    fn terms_of(&self, of: &PodContainer) -> Option<&Terms> {
        self.store.state.ledger.owner(&OwnerId::from(of.owner.as_str())).map(|account| &account.terms)
    }

    /// What a container is to hold now.
    pub(super) fn settings_of(&self, placed: &PlacedContainer) -> Settings {
        let limit = |bytes: Option<Bytes>| bytes.map(Limit::Bytes);
        let memory = self.memory_knobs(placed);
        let mut settings = Settings {
            memory_min: limit(memory.min),
            memory_low: limit(memory.low),
            memory_high: limit(memory.high),
            beside: placed.memory.overhead.filter(|_| memory.min.is_some() || memory.low.is_some()),
            ..self.shared()
        };
        if let Some(allocation) = self.allocation_for(&placed.of) {
            let has_own = allocation.cpus.is_some() && !placed.of.shares_pod();
            if has_own && self.config.kubernetes.cpu_quota == CpuQuota::Remove {
                (settings.cpu_max, settings.lifts_parent) = (Some(Quota::Max), !placed.keeps_pod_quota);
            }
            settings.cpus = allocation.cpus.clone().or(settings.cpus);
            // What has a home is not bound to it.
            let is_bound = !self.terms_of(&placed.of).is_some_and(|terms| terms.burstable);
            settings.mems = Some(allocation.memory_nodes()).filter(|nodes| is_bound && !nodes.is_empty());
        }
        settings
    }

    /// What a container is to hold to which nothing is promised.
    fn shared(&self) -> Settings {
        // The empty set would mean all CPUs.
        let cpus = Some(self.shared_pool()).filter(|pool| !pool.is_empty());
        Settings { cpus, ..Settings::default() }
    }

    /// Whether a container is held to more than the shared pool.
    fn is_promised(&self, placed: &PlacedContainer) -> bool {
        self.allocation_for(&placed.of).is_some() || self.memory_knobs(placed) != MemoryKnobs::default()
    }

    fn try_bind(&mut self, placed: &PlacedContainer) -> Result<(), AdmissionError> {
        let gone = || EnforceError::Gone { cgroup: placed.cgroup.clone() };
        let id = self.hierarchy.id_of(&placed.cgroup).ok().flatten().ok_or_else(gone)?;
        let mut change = self.begin();
        if placed.of.slice != GuaranteeSource::PodInit {
            // Init containers that ran before it have ended, and leave what they held.
            let owner = OwnerId::from(placed.of.owner.as_str());
            change.store.state.ledger = change.policy.strategy.note_started(
                &change.store.state.ledger,
                &owner,
                &placed.of.ledger_name(),
            );
        }
        let settings = change.settings_of(placed);
        if !change.is_promised(placed) {
            change.keep_to_pool([&placed.cgroup]).pop().transpose()?;
            if change.is_change() {
                change.store()?;
                self.note_guarantees_changed();
            }
            return Ok(());
        }
        change.widen_around(&placed.cgroup);
        if let Some(without_us) = placed.without_us.as_ref().filter(|_| change.mode() == EnforcementMode::On)
        {
            let (enforcer, knobs) = (change.enforcer().clone(), settings.values().0.into_keys());
            enforcer.record_created(&mut change.store.state.applied, &placed.cgroup, without_us, knobs);
        }
        let plan = change.plan(SettingsChange::Hold(placed.cgroup.clone(), settings.clone()))?;
        change.store.state.set_narrowing(&placed.cgroup, Narrowing::default());
        let mut name = placed.of.full_name();
        if change.store.state.guarantees.get(&name).is_some_and(|held| held.cgroup != placed.cgroup) {
            // The container before it has not been removed yet.
            name = format!("{name}@{}", placed.of.id);
        }
        let admitted = change.store.state.pods.get(&placed.of.owner);
        let guarantee = Guarantee {
            target: Target::Container(placed.of.clone()),
            cgroup: placed.cgroup.clone(),
            id,
            settings,
            declared: None,
            explanation: admitted.map(|admitted| admitted.explanation.clone()).unwrap_or_default(),
        };
        change.store.state.guarantees.insert(name.clone(), guarantee);
        change.enforce(plan)?;
        self.store.storage.decisions.note(&name, &self.store.state);
        self.effects.held.push(HeldChange::Given(name.clone()));
        self.note_guarantees_changed();
        let allocation = self.allocation_for(&placed.of).cloned().unwrap_or_default();
        tracing::info!(
            name, cgroup = %placed.cgroup, cpus = %allocation.cpus.clone().unwrap_or_default(),
            nodes = %allocation.memory_nodes(), "promised"
        );
        Ok(())
    }

    /// Writes the shared pool into the cgroups of containers that hold no CPUs: of each, whether that was to be done.
    fn keep_to_pool<'a>(
        &mut self,
        cgroups: impl IntoIterator<Item = &'a CgroupPath>,
    ) -> Vec<Result<bool, EnforceError>> {
        let cgroups = cgroups.into_iter();
        let Some(pool) = self.shared().cpus else { return cgroups.map(|_| Ok(false)).collect() };
        let wanted: Vec<_> = cgroups.map(|cgroup| (cgroup.clone(), pool.clone())).collect();
        self.set_cpus(&wanted)
    }

    /// Has cgroups run on these CPUs at once: of each, whether it did not.
    fn set_cpus(&mut self, wanted: &[(CgroupPath, CpuSet)]) -> Vec<Result<bool, EnforceError>> {
        if self.mode() != EnforcementMode::On {
            return wanted.iter().map(|_| Ok(false)).collect();
        }
        let mut written = self.execution.enforcer.set_cpus(wanted);
        for (one, written) in wanted.iter().zip(&mut written) {
            if written.as_ref().is_err_and(EnforceError::is_missing) {
                let enabled = self.enable_above(&one.0, Knob::CpusetCpus);
                *written = enabled.and_then(|()| {
                    let again = self.execution.enforcer.set_cpus(slice::from_ref(one)).pop();
                    again.unwrap_or_else(|| Ok(EnforcementReport::default()))
                });
            }
        }
        let note = |written: EnforcementReport| {
            self.metrics.enforced(&written);
            !written.written.is_empty()
        };
        written.into_iter().map(|written| written.map(note)).collect()
    }

    /// Containers whose CPUs are those of the shared pool, and whose cgroups exist.
    fn sharing(&self) -> impl Iterator<Item = &Arc<PlacedContainer>> {
        self.store.state.containers.values().filter(|placed| {
            let holds = self.allocation_for(&placed.of).is_some_and(|held| held.cpus.is_some());
            !holds && self.pods.bound.contains(&placed.of.id)
        })
    }

    /// Informs the runtime of what we have written.
    pub(super) fn send_updates(&self, updates: Vec<Update>) {
        self.pods.send(updates);
    }

    /// Containers that hold no CPUs leave those that were just promised, and get those that were given back.
    pub(crate) fn follow_pool(&mut self) {
        let pool = self.shared_pool();
        if pool == self.pods.pool && (!self.pods.is_behind || self.execution.busy.is_some()) {
            return;
        }
        (self.pods.pool, self.pods.is_behind) = (pool, false);
        let (mut updates, mut changes) = (Vec::new(), Vec::new());
        let sharing: Vec<_> = self.sharing().cloned().collect();
        let kept = self.keep_to_pool(sharing.iter().map(|placed| &placed.cgroup));
        for (placed, kept) in sharing.into_iter().zip(kept) {
            match kept {
                Ok(_) => {}
                Err(error) if error.is_gone() => continue,
                Err(error) => {
                    tracing::error!(cgroup = %placed.cgroup, %error, "a container does not follow the shared pool");
                }
            }
            let mut settings = Settings { cpus: Some(self.pods.pool.clone()), ..Settings::default() };
            // Of those with promised memory the CPUs are applied settings.
            if self
                .store
                .state
                .applied
                .get(&placed.cgroup)
                .is_some_and(|record| record.settings.cpus.is_some())
            {
                settings = self.settings_of(&placed);
                changes.push((placed.cgroup.clone(), Some(settings.clone())));
            }
            updates.push(Update { id: placed.of.id.clone(), settings });
        }
        let off_pool = self.guarantees_off_pool();
        self.leave_cpus(&off_pool);
        for (path, settings) in off_pool {
            self.note_settings(&path, &settings);
            changes.push((path, Some(settings)));
        }
        // One that is gone must not keep the others from it.
        changes.retain(|(path, _)| !matches!(self.hierarchy.id_of(path), Ok(None)));
        if self.execution.busy.is_some() {
            self.pods.is_behind |= !changes.is_empty();
        } else if !changes.is_empty() {
            let plan = self.plan(SettingsChange::Each(changes)).map_err(AdmissionError::from);
            match plan.and_then(|plan| self.carry_out(plan)) {
                Ok(()) => {}
                // It went just now.
                Err(AdmissionError::Enforce(error)) if error.is_gone() => self.pods.is_behind = true,
                Err(error) => tracing::error!(%error, "not all containers follow the shared pool"),
            }
        }
        updates.retain(|update| update.settings.cpus.as_ref().is_some_and(|cpus| !cpus.is_empty()));
        if self.mode() == EnforcementMode::On {
            self.pods.send(updates);
        }
    }

    /// Guarantees without CPUs of their own, but for containers, that are to have other CPUs of the shared pool than they
    /// have; and all that they are to hold.
    fn guarantees_off_pool(&self) -> Vec<(CgroupPath, Settings)> {
        let wanted = |(name, held): (&String, &Arc<Guarantee>)| {
            let is_other = matches!(held.target, Target::Container(_)) || held.has_no_guarantee();
            if is_other || self.store.state.releasing.contains(name) {
                return None;
            }
            let account = self.store.state.ledger.owner(&OwnerId::from(name.as_str()))?;
            let allocation = account.containers.values().next().filter(|held| held.cpus.is_none())?;
            let cpus = self.shared_cpus(&account.terms, &allocation.memory_nodes())?;
            let held_settings = &self.store.state.applied.get(&held.cgroup)?.settings;
            // During a wait, what was written last is in the guarantee only.
            [&held_settings.cpus, &held.settings.cpus]
                .iter()
                .any(|held| held.as_ref() != Some(&cpus))
                .then(|| (held.cgroup.clone(), Settings { cpus: Some(cpus), ..held_settings.clone() }))
        };
        self.store.state.guarantees.iter().filter_map(wanted).collect()
    }

    /// Has cgroups run on the CPUs of these settings at once: others may be waiting for those that they leave.
    fn leave_cpus(&mut self, given: &[(CgroupPath, Settings)]) {
        let cpus = |(path, settings): &(CgroupPath, Settings)| Some((path.clone(), settings.cpus.clone()?));
        let wanted: Vec<_> = given.iter().filter_map(cpus).collect();
        for ((cgroup, _), left) in wanted.iter().zip(self.set_cpus(&wanted)) {
            if let Err(error) = left
                && !error.is_gone()
            {
                tracing::error!(%cgroup, %error, "a workload does not follow the shared pool");
            }
        }
    }

    /// Notes the shared pool in the applied settings, where a wait has kept that from being done.
    pub(crate) fn catch_up_with_pool(&mut self) {
        if self.pods.is_behind {
            self.follow_pool();
        }
    }

    /// One container that waits for it is bound; a few that share are held against the pool.
    pub(super) fn maintain_pods(&mut self, now: Instant) {
        self.follow_pool();
        self.try_waiting();
        self.maintain_unbound(now);
        self.go_on_ending();
        let after = self.pods.last_checked.take();
        let mut next: Vec<Arc<PlacedContainer>> = self
            .sharing()
            .filter(|placed| after.as_ref().is_none_or(|after| placed.of.id > *after))
            .take(CHECKS_PER_TURN)
            .cloned()
            .collect();
        next.retain(|placed| !self.store.state.guarantees.values().any(|held| held.cgroup == placed.cgroup));
        self.pods.last_checked = next.last().map(|placed| placed.of.id.clone());
        let kept = self.keep_to_pool(next.iter().map(|placed| &placed.cgroup));
        for (placed, kept) in next.into_iter().zip(kept) {
            match kept {
                Ok(false) => {}
                Ok(true) => {
                    tracing::warn!(cgroup = %placed.cgroup, "cpuset.cpus was not the shared pool; written again");
                    self.metrics.drifted(Knob::CpusetCpus);
                    self.metrics.repaired(Knob::CpusetCpus);
                }
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    tracing::debug!(cgroup = %placed.cgroup, %error, "cannot be held to the shared pool");
                }
            }
        }
    }
}
