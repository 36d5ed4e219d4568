//! The strategy `kubelet`: repeats the decisions of the kubelet's CPU manager, memory manager and topology manager of
//! Kubernetes v1.32.10 or v1.36.2 exactly.
//!
//! # Algorithm
//! An admission asks each hint provider (CPUs, memory) for the sets of nodes that can serve a container, or all
//! containers of a pod in pod scope. It merges the hints into one set of nodes, the *affinity*, and lets each
//! provider allocate there. Without a topology policy there are no hints, and each provider selects nodes on its own.
//!
//! | part | module |
//! |---|---|
//! | exclusive CPUs | `cpu` |
//! | memory and huge pages | `memory` |
//! | merge of hints | `merge` |
//! | pods with pod-level resources | `pod_level_resources` here, in `cpu` and in `memory` |
//! | restore of a previous state | `restore` |
//! | defects of the kubelet | `defects` |
//!
//! # Limits
//! All sets of nodes are enumerated, 2ⁿ for n nodes, hence [`MAX_NODES`].

pub(crate) mod cpu;
pub(crate) mod defects;
mod explain;
pub(crate) mod memory;
pub(crate) mod merge;
pub(crate) mod numa;
mod pod_level_resources;
mod preferences;
pub(crate) mod resize;
pub(crate) mod restore;

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use numaward_topology::{Bytes, CpuId, CpuSet, Machine, NodeId, ZoneKind, set::MAX_ID};

pub use self::restore::{Checkpoints, RestoreOutcome, SharedCpus};
use self::{
    cpu::StaticCpuManager, explain::RuleRanking, memory::StaticMemoryManager, merge::MergeRule,
    numa::Distances, pod_level_resources::message,
};
use crate::{
    decision::{Cause, Decision, Grant, Rejection, ResizeError, Shortfall},
    explain::{Explanation, Merge},
    hint::{Hint, Mask, NodeIndex, Provider, ProviderHints, Scope},
    ledger::Ledger,
    moves::{PlanError, RebalanceLimits, RebalancePlan},
    policy::{
        Component, CpuManagerPolicy, MachineProblem, MemoryManagerPolicy, PodLevelSupport, PolicyConfig,
        StartError, StartPhase, StartProblem, TopologyManagerPolicy, TopologyManagerScope, TopologyOptions,
    },
    preferences::PlacementPreferences,
    request::{ContainerName, ContainerRequest, OwnerId, Request, Resources},
    strategy::{Allocatable, DecisionStage, Strategy},
    terms::Terms,
};

/// Returns the machine as cAdvisor reports it to the kubelet. This affects the option
/// `prefer-align-cpus-by-uncorecache`.
///
/// - A last-level cache that covers a whole node is not reported, so the socket replaces it.
/// - cAdvisor reads the cache of the first CPU of each core, so siblings have the same cache, even in virtual
///   machines where they do not.
///
/// Source: `addCacheInfo` in cAdvisor's `utils/sysinfo`; the second point was observed with a kubelet v1.36.2.
pub fn as_reported_to_kubelet(machine: &Machine) -> Machine {
    let mut sizes: BTreeMap<_, usize> = BTreeMap::new();
    for cpu in machine.cpus.values() {
        *sizes.entry(cpu.last_level_cache).or_default() += 1;
    }
    let mut reported = machine.clone();
    let mut of_cores = BTreeMap::new();
    for cpu in reported.cpus.values_mut() {
        cpu.last_level_cache = *of_cores.entry(cpu.core).or_insert(cpu.last_level_cache);
        let of_node = machine.nodes.get(&cpu.node).map(|node| node.cpus.len());
        if sizes.get(&cpu.last_level_cache).copied() == of_node {
            cpu.last_level_cache = None;
        }
    }
    reported
}

/// Returns whether the kubelet counts these CPUs as aligned to one last-level cache (boundary `uncore_cache`).
/// `machine` is the machine as reported to the kubelet.
pub fn share_one_cache(machine: &Machine, cpus: &CpuSet) -> bool {
    let cache = |id: CpuId| machine.cpus.get(&id).map(cpu::cache);
    let mut caches = cpus.iter().map(cache);
    let first = caches.next();
    // A single CPU is always aligned.
    caches.all(|cache| cache.is_some() && Some(cache) == first)
}

/// Maximum number of NUMA nodes, unless nothing is managed. Every set of nodes is enumerated, a million for 20 nodes.
pub const MAX_NODES: usize = 20;

/// Result of a merge: the nodes for the allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Affinity {
    /// `None` for any nodes.
    pub(crate) mask: Option<Mask>,
    pub(crate) preferred: bool,
}

/// Provider that can also allocate. `hints` and the allocating functions first release stale allocations, as the
/// kubelet's managers do.
trait HintProvider {
    /// Returns the sets of nodes that can serve a request.
    fn hints(&self, ledger: &mut Ledger, request: &Request, scope: Scope<'_>) -> ProviderHints;

    /// Allocates for a container, on these nodes if possible. A failure changes nothing.
    fn allocate(
        &self,
        ledger: &mut Ledger,
        request: &Request,
        container: &ContainerRequest,
        affinity: Affinity,
    ) -> Result<(), Cause>;

    /// Allocates pod-level resources, on these nodes if possible, and divides them among the containers.
    fn allocate_pod(&self, ledger: &mut Ledger, request: &Request, affinity: Affinity) -> Result<(), Cause>;

    /// Releases the allocation of a container.
    fn remove(&self, ledger: &mut Ledger, owner: &OwnerId, container: &ContainerName);

    /// Releases the allocations of containers that belong to no active owner.
    fn remove_stale(&self, ledger: &mut Ledger) {
        if ledger.notes.restoring {
            return;
        }
        for (owner, container) in ledger.stale() {
            self.remove(ledger, &owner, &container);
        }
    }

    /// Returns the requested and the free amounts by node.
    fn shortfalls(&self, ledger: &Ledger, request: &Request, scope: Scope<'_>) -> Vec<Shortfall>;
}

/// Topology policy: how the nodes of several resources have to be aligned.
#[derive(Clone, Debug)]
struct TopologyPolicy {
    options: TopologyOptions,
    rule: MergeRule,
}

/// Request under admission.
#[derive(Clone, Copy)]
struct AdmissionContext<'a> {
    request: &'a Request,
    terms: &'a Terms,
    /// Preferences of the terms, or those that remain when the preferred nodes are dropped.
    preferences: &'a PlacementPreferences,
    topology_policy: &'a TopologyPolicy,
    watch: &'a dyn Fn(DecisionStage),
}

/// The strategy `kubelet`.
#[derive(Debug)]
pub struct KubeletStrategy {
    nodes: NodeIndex,
    /// Policy for requests without one of their own.
    configured: TopologyPolicy,
    /// Policies that requests can select, or the reason why a policy is incompatible with the configuration or the
    /// machine.
    by_policy: BTreeMap<TopologyManagerPolicy, Result<TopologyPolicy, StartError>>,
    cpus: Option<StaticCpuManager>,
    memory: Option<StaticMemoryManager>,
    pod_level_support: PodLevelSupport,
}

impl KubeletStrategy {
    /// Checks a configuration against a machine, in the order in which the kubelet starts its managers.
    pub fn new(machine: &Machine, config: &PolicyConfig) -> Result<Self, StartError> {
        let nodes = nodes(machine, config).map_err(start_error(Component::Configuration))?;
        let configured =
            topology_policy(machine, &nodes, config).map_err(start_error(Component::TopologyManager))?;
        let cpus = cpus(machine, &nodes, config, configured.options.policy)
            .map_err(start_error(Component::CpuManager))?;
        let memory = memory(machine, &nodes, config).map_err(start_error(Component::MemoryManager))?;
        let with_policy = |&policy| (policy, with_policy(machine, config, cpus.as_ref(), policy));
        let by_policy = TopologyManagerPolicy::ALL.iter().map(with_policy).collect();
        Ok(Self { nodes, configured, by_policy, cpus, memory, pod_level_support: config.pod_level_support() })
    }

    /// Returns the managers in the order in which they give hints and allocate. A manager with the policy `none` is
    /// absent: it has no preference and allocates nothing.
    fn managers(&self) -> [(Provider, Option<&dyn HintProvider>); 2] {
        [
            (Provider::Cpus, self.cpus.as_ref().map(|cpus| cpus as &dyn HintProvider)),
            (Provider::Memory, self.memory.as_ref().map(|memory| memory as &dyn HintProvider)),
        ]
    }

    fn providers(&self) -> impl Iterator<Item = &dyn HintProvider> {
        self.managers().into_iter().filter_map(|(_, manager)| manager)
    }

    /// Returns all errors of a configuration for a machine, at most one for each component.
    pub fn problems(machine: &Machine, config: &PolicyConfig) -> Vec<StartError> {
        let nodes = match nodes(machine, config) {
            Ok(nodes) => nodes,
            Err(problem) => return vec![start_error(Component::Configuration)(problem)],
        };
        let topology = topology_policy(machine, &nodes, config);
        let policy = topology.as_ref().map_or(TopologyManagerPolicy::None, |of| of.options.policy);
        [
            topology.err().map(start_error(Component::TopologyManager)),
            cpus(machine, &nodes, config, policy).err().map(start_error(Component::CpuManager)),
            memory(machine, &nodes, config).err().map(start_error(Component::MemoryManager)),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Returns the name of the CPU policy, as written in a checkpoint.
    pub(crate) fn cpu_policy(&self) -> &'static str {
        let managed = self.cpus.as_ref().map(|_| CpuManagerPolicy::Static);
        managed.unwrap_or_default().as_str()
    }

    /// Returns the name of the memory policy, as written in a checkpoint.
    pub(crate) fn memory_policy(&self) -> &'static str {
        let managed = self.memory.as_ref().map(|_| MemoryManagerPolicy::Static);
        managed.unwrap_or_default().as_str()
    }

    /// Returns whether pods with pod-level resources are placed, and state files have pod entries.
    pub(crate) fn places_pod_level_resources(&self) -> bool {
        self.pod_level_support == PodLevelSupport::Placed
    }

    /// Returns whether no manager handles this pod because it has pod-level resources.
    fn is_unmanaged(&self, request: &Request) -> bool {
        self.pod_level_support == PodLevelSupport::Unmanaged && request.resources.is_some()
    }

    /// Returns the topology policy for a request with these terms.
    fn topology_policy(&self, terms: &Terms) -> Result<TopologyPolicy, StartError> {
        let own = terms.policy.and_then(|policy| self.by_policy.get(&policy));
        let mut topology_policy = own.cloned().unwrap_or_else(|| Ok(self.configured.clone()))?;
        topology_policy.options.scope = terms.scope.unwrap_or(topology_policy.options.scope);
        Ok(topology_policy)
    }

    /// Returns the topology policy for a request, or an error if the terms need the strategy `native`.
    fn resolve_policy(&self, terms: &Terms) -> Result<TopologyPolicy, StartError> {
        match terms.native_only() {
            unknown if unknown.is_empty() => self.topology_policy(terms),
            unknown => Err(start_error(Component::Configuration)(StartProblem::NativeOnly(unknown))),
        }
    }

    /// Collects the hints of all providers and merges them.
    fn merge(
        &self,
        ledger: &mut Ledger,
        context: AdmissionContext<'_>,
        scope: Scope<'_>,
    ) -> (Affinity, Merge) {
        let AdmissionContext {
            request,
            preferences,
            topology_policy: TopologyPolicy { rule, .. },
            watch,
            ..
        } = context;
        watch(DecisionStage::Hints);
        let mut hints = Vec::new();
        for (provider, manager) in self.managers() {
            let of_manager = manager.map(|manager| {
                if self.is_unmanaged(request) {
                    manager.remove_stale(ledger);
                    return ProviderHints::NoPreference;
                }
                manager.hints(ledger, request, scope)
            });
            hints.push((provider, of_manager.unwrap_or(ProviderHints::NoPreference)));
        }
        hints.extend(preferences::hints(preferences, &self.nodes, request, scope));
        watch(DecisionStage::Merge);
        let best =
            rule.merge(self.nodes.all(), &merge::hints_by_resource(hints.iter().map(|(_, hints)| hints)));
        let accepted = rule.accepts(best);
        let container = match scope {
            Scope::Container(container) => Some(container.name.clone()),
            Scope::Owner => None,
        };
        let hint = Hint { affinity: best.mask.map(|mask| self.nodes.set(mask)), preferred: best.preferred };
        let ranking = Arc::new(RuleRanking { rule: rule.clone(), nodes: self.nodes.clone() });
        (best, Merge { container, hints, best: hint, accepted, ranking })
    }

    fn allocate(
        &self,
        ledger: &mut Ledger,
        request: &Request,
        container: &ContainerRequest,
        affinity: Affinity,
    ) -> Result<(), Cause> {
        let name = &container.name;
        if ledger.notes.restoring
            && !defects::INIT_CONTAINERS_ARE_ALLOCATED_AGAIN
            && request.is_regular_init(name)
            && ledger.allocation(&request.owner, name).is_none()
        {
            return Ok(());
        }
        for provider in self.providers() {
            if self.is_unmanaged(request) {
                provider.remove_stale(ledger);
            } else {
                provider.allocate(ledger, request, container, affinity)?;
            }
        }
        Ok(())
    }

    /// Allocates for all containers. On failure returns the container, unless all containers were considered
    /// together.
    fn attempt(
        &self,
        ledger: &mut Ledger,
        context: AdmissionContext<'_>,
        merges: &mut Vec<Merge>,
    ) -> Result<(), (Option<ContainerName>, Cause)> {
        let AdmissionContext { request, topology_policy: TopologyPolicy { options, .. }, watch, .. } =
            context;
        let mut affinity_for = |ledger: &mut Ledger, scope: Scope<'_>| {
            let (affinity, merge) = self.merge(ledger, context, scope);
            let failed_at = merge.container.clone();
            let accepted = merge.accepted;
            merges.push(merge);
            if accepted { Ok(affinity) } else { Err((failed_at, Cause::Topology)) }
        };
        let anywhere = Affinity { mask: None, preferred: false };
        let for_all = match (options.policy, options.scope) {
            (TopologyManagerPolicy::None, _) => Some(anywhere),
            (_, TopologyManagerScope::Pod) => Some(affinity_for(ledger, Scope::Owner)?),
            (_, TopologyManagerScope::Container) => None,
        };
        if let Some(affinity) = for_all
            && options.policy != TopologyManagerPolicy::None
            && request.resources.is_some()
            && self.places_pod_level_resources()
        {
            watch(DecisionStage::Allocate);
            return self.providers().try_for_each(|provider| {
                provider.allocate_pod(ledger, request, affinity).map_err(|cause| (None, cause))
            });
        }
        for container in request.all_containers() {
            let affinity = match for_all {
                Some(affinity) => affinity,
                None => affinity_for(ledger, Scope::Container(container))?,
            };
            watch(DecisionStage::Allocate);
            self.allocate(ledger, request, container, affinity)
                .map_err(|cause| (Some(container.name.clone()), cause))?;
        }
        Ok(())
    }

    fn rejection(
        &self,
        ledger: &Ledger,
        AdmissionContext { request, topology_policy, .. }: AdmissionContext<'_>,
        (container, cause): (Option<ContainerName>, Cause),
    ) -> Rejection {
        let failed = container.as_ref().and_then(|name| request.all_containers().find(|c| &c.name == name));
        let scope = failed.map_or(Scope::Owner, Scope::Container);
        let shortfalls =
            self.providers().flat_map(|provider| provider.shortfalls(ledger, request, scope)).collect();
        let is_whole = self.places_pod_level_resources() && request.resources.is_some();
        let message = message(&cause, is_whole.then_some(topology_policy.options.scope));
        Rejection::new(&request.owner, container, cause, message, shortfalls)
    }

    fn decide(&self, ledger: &Ledger, context: AdmissionContext<'_>) -> Decision {
        let AdmissionContext { request, terms, .. } = context;
        let mut next = ledger.clone();
        next.notes.not_free = CpuSet::new();
        let account = next.owner_mut(&request.owner);
        account.request = Some(Arc::new(request.clone()));
        account.terms.clone_from(terms);
        let mut merges = Vec::new();
        let attempted = self.attempt(&mut next, context, &mut merges).and_then(|()| {
            StaticCpuManager::check_no_overlap(&next).map_err(|cause| {
                next = ledger.clone();
                (None, cause)
            })
        });
        let outcome = match attempted {
            Ok(()) => {
                let grant = |container: &ContainerRequest| Grant {
                    container: container.name.clone(),
                    allocation: next.allocation(&request.owner, &container.name).cloned().unwrap_or_default(),
                };
                Ok(request.all_containers().map(grant).collect())
            }
            Err(failure) => {
                let rejection = self.rejection(&next, context, failure);
                if !defects::REJECTED_OWNERS_KEEP_ALLOCATIONS {
                    next = ledger.clone();
                }
                deactivate(&mut next, &request.owner);
                Err(Box::new(rejection))
            }
        };
        Decision { outcome, explanation: Explanation { merges, ..Explanation::default() }, ledger: next }
    }
}

impl Strategy for KubeletStrategy {
    /// The ledger of the kubelet's managers without state files.
    fn idle(&self) -> Ledger {
        let nodes = self.memory.as_ref().map(|memory| memory.idle().clone()).unwrap_or_default();
        let shared_pool = self.cpus.as_ref().map(StaticCpuManager::idle_pool).unwrap_or_default();
        Ledger::idle(nodes, shared_pool)
    }

    fn allocatable(&self) -> Allocatable {
        let mut memory: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>> = BTreeMap::new();
        for (&node, account) in self.memory.iter().flat_map(StaticMemoryManager::idle) {
            for (&kind, account) in account.kinds.iter().filter(|(_, account)| account.allocatable.0 > 0) {
                memory.entry(kind).or_default().insert(node, account.allocatable);
            }
        }
        Allocatable {
            cpus: self.cpus.as_ref().map(StaticCpuManager::allocatable).unwrap_or_default(),
            memory,
        }
    }

    fn check_terms(&self, terms: &Terms) -> Result<(), StartError> {
        self.resolve_policy(terms).map(drop)
    }

    fn admit_watched(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        watch: &dyn Fn(DecisionStage),
    ) -> Decision {
        let of_terms = || self.resolve_policy(terms).map_err(|problem| Cause::Terms(problem.to_string()));
        let topology_policy = match check_request(request).and_then(|()| of_terms()) {
            Ok(topology_policy) => topology_policy,
            Err(cause) => {
                let message = message(&cause, None);
                let rejection = Rejection::new(&request.owner, None, cause, message, Vec::new());
                let explanation = Explanation::default();
                return Decision { outcome: Err(Box::new(rejection)), explanation, ledger: ledger.clone() };
            }
        };
        let request = &match self.pod_level_support {
            PodLevelSupport::Ignored if request.resources.is_some() => {
                Cow::Owned(Request { resources: None, ..request.clone() })
            }
            _ => Cow::Borrowed(request),
        };
        let preferences = &terms.preferences;
        let context =
            AdmissionContext { request, terms, preferences, topology_policy: &topology_policy, watch };
        let decision = self.decide(ledger, context);
        match preferences.without_preferred_nodes() {
            Some(devices) if decision.outcome.is_err() || !is_preferred(&decision) => {
                self.decide(ledger, AdmissionContext { preferences: &devices, ..context })
            }
            _ => decision,
        }
    }

    fn note_started(&self, ledger: &Ledger, owner: &OwnerId, container: &ContainerName) -> Ledger {
        let mut next = ledger.clone();
        let Some(request) = next.owner(owner).and_then(|account| account.request.clone()) else {
            return next;
        };
        if !request.has_container(container) {
            return next;
        }
        next.owner_mut(owner).started.insert(container.clone());
        for init in request.init_containers.iter().take_while(|init| &init.name != container) {
            if init.restartable {
                continue;
            }
            memory::release(&mut next, owner, &init.name);
            if !defects::INIT_CONTAINERS_KEEP_CPUS {
                cpu::release(&mut next, owner, &init.name);
            }
        }
        next
    }

    fn release(&self, ledger: &Ledger, owner: &OwnerId) -> Ledger {
        let mut next = ledger.clone();
        let Some(account) = next.owner(owner) else { return next };
        let started = account.started.clone();
        let request = account.request.clone();
        for container in request.iter().flat_map(|request| request.all_containers()) {
            for provider in self.providers().filter(|_| started.contains(&container.name)) {
                provider.remove(&mut next, owner, &container.name);
            }
        }
        deactivate(&mut next, owner);
        next
    }

    fn resize(
        &self,
        ledger: &Ledger,
        owner: &OwnerId,
        container: &ContainerName,
        to: &Resources,
    ) -> Result<Ledger, ResizeError> {
        self.resized(ledger, owner, container, to)
    }

    fn plan(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        _: &RebalanceLimits,
    ) -> Result<RebalancePlan, PlanError> {
        let decision = self.admit_watched(ledger, request, terms, &|_| {});
        match decision.outcome {
            Ok(_) => Ok(RebalancePlan { moves: Vec::new(), bytes: Bytes(0), decision }),
            Err(rejection) => Err(PlanError { reason: "the strategy kubelet moves no workloads", rejection }),
        }
    }
}

/// Returns whether the result of every merge is preferred by all resources.
fn is_preferred(decision: &Decision) -> bool {
    decision.explanation.merges.iter().all(|merge| merge.best.preferred)
}

/// Makes an owner inactive. Its remaining allocations become stale.
fn deactivate(ledger: &mut Ledger, owner: &OwnerId) {
    if ledger.owner(owner).is_some() {
        let account = ledger.owner_mut(owner);
        account.request = None;
        account.terms = Terms::default();
        account.started.clear();
        ledger.drop_empty(owner, None);
    }
}

fn start_error(component: Component) -> impl Fn(StartProblem) -> StartError {
    StartError::with_context(component, StartPhase::New)
}

/// Checks the machine, and the conditions that must hold before any manager starts.
fn nodes(machine: &Machine, config: &PolicyConfig) -> Result<NodeIndex, StartProblem> {
    check_machine(machine)?;
    let nodes = machine.nodes.len();
    let manages = config.memory_manager_policy != MemoryManagerPolicy::None
        || config.cpu_manager_policy != CpuManagerPolicy::None
        || config.topology_manager_policy != TopologyManagerPolicy::None;
    if manages && nodes > MAX_NODES {
        return Err(MachineProblem::TooManyNodes { nodes, limit: MAX_NODES }.into());
    }
    check_reservations(config)?;
    Ok(NodeIndex::new(machine.nodes.keys().copied()))
}

fn topology_policy(
    machine: &Machine,
    nodes: &NodeIndex,
    config: &PolicyConfig,
) -> Result<TopologyPolicy, StartProblem> {
    let options = TopologyOptions::parse(config, nodes.ids().len())?;
    let distances = options.prefer_closest.then(|| Distances::new(machine, nodes)).transpose()?;
    let rule = MergeRule { policy: options.policy, distances: distances.map(Arc::new) };
    Ok(TopologyPolicy { options, rule })
}

/// Returns the topology policy as if this policy were configured, after the same checks.
fn with_policy(
    machine: &Machine,
    config: &PolicyConfig,
    cpus: Option<&StaticCpuManager>,
    policy: TopologyManagerPolicy,
) -> Result<TopologyPolicy, StartError> {
    let config = PolicyConfig { topology_manager_policy: policy, ..config.clone() };
    let nodes = nodes(machine, &config).map_err(start_error(Component::Configuration))?;
    let topology_policy =
        topology_policy(machine, &nodes, &config).map_err(start_error(Component::TopologyManager))?;
    let checked = cpus.map_or(Ok(()), |cpus| cpus.check_policy(policy));
    checked.map_err(StartProblem::StaticCpu).map_err(start_error(Component::CpuManager))?;
    Ok(topology_policy)
}

fn cpus(
    machine: &Machine,
    nodes: &NodeIndex,
    config: &PolicyConfig,
    topology_policy: TopologyManagerPolicy,
) -> Result<Option<StaticCpuManager>, StartProblem> {
    let options = &config.cpu_manager_policy_options;
    match config.cpu_manager_policy {
        CpuManagerPolicy::None if options.is_empty() => Ok(None),
        CpuManagerPolicy::None => Err(StartProblem::OptionsWithoutPolicy(options.clone())),
        CpuManagerPolicy::Static => StaticCpuManager::new(machine, nodes, config, topology_policy).map(Some),
    }
}

fn memory(
    machine: &Machine,
    nodes: &NodeIndex,
    config: &PolicyConfig,
) -> Result<Option<StaticMemoryManager>, StartProblem> {
    match config.memory_manager_policy {
        MemoryManagerPolicy::None => Ok(None),
        MemoryManagerPolicy::Static => StaticMemoryManager::new(machine, nodes, config).map(Some),
    }
}

pub(crate) fn check_request(request: &Request) -> Result<(), Cause> {
    if request.containers.is_empty() {
        return Err(Cause::NoContainers);
    }
    let mut seen = std::collections::BTreeSet::new();
    match request.all_containers().find(|container| !seen.insert(&container.name)) {
        Some(container) => Err(Cause::DuplicateContainer(container.name.to_string())),
        None => Ok(()),
    }
}

/// Checks the assumptions that the arithmetic relies on.
pub(crate) fn check_machine(machine: &Machine) -> Result<(), MachineProblem> {
    if machine.nodes.is_empty() {
        return Err(MachineProblem::NoNodes);
    }
    let mut memory = 0u64;
    let mut hugepages: BTreeMap<_, u64> = BTreeMap::new();
    for (&node, data) in &machine.nodes {
        if node.0 > MAX_ID {
            return Err(MachineProblem::IdTooLarge("NUMA node", node.0));
        }
        let too_large = MachineProblem::MemoryTooLarge(node);
        memory = memory.checked_add(data.memory.0).ok_or(too_large)?;
        for (&size, pool) in &data.hugepages {
            let sum = hugepages.entry(size).or_default();
            *sum =
                pool.total.checked_mul(size.0.0).and_then(|pool| sum.checked_add(pool)).ok_or(too_large)?;
        }
    }
    for (&cpu, data) in &machine.cpus {
        if cpu.0 > MAX_ID {
            return Err(MachineProblem::IdTooLarge("CPU", cpu.0));
        }
        if !machine.nodes.contains_key(&data.node) {
            return Err(MachineProblem::CpuOnUnknownNode(cpu, data.node));
        }
    }
    Ok(())
}

/// Performs the kubelet's checks of memory reservations before it starts its managers.
pub(crate) fn check_reservations(config: &PolicyConfig) -> Result<(), StartProblem> {
    let mut seen = BTreeMap::new();
    for reservation in &config.reserved_memory {
        let node = reservation.numa_node;
        for (&kind, &quantity) in &reservation.limits {
            if quantity.is_zero() {
                return Err(StartProblem::ZeroReservation(node, kind));
            }
            if let Some(first) = seen.insert((node, kind), quantity) {
                return Err(StartProblem::DuplicateReservation(node, kind, first, quantity));
            }
        }
    }
    Ok(())
}
