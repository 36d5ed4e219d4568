//! The static CPU manager: exclusive CPUs for Guaranteed containers that request whole CPUs.
//!
//! # Terms
//! - *shared pool*: CPUs that no container has exclusively. Containers without exclusive CPUs run there.
//! - *reserved*: CPUs that never become exclusive. They belong to the shared pool, unless `strict-cpu-reservation` is
//!   set.
//! - *available*: the shared pool without the reserved CPUs.
//!
//! # Algorithm
//! A set of nodes is a hint if it has enough available CPUs and contains all nodes of reusable CPUs of init
//! containers. Hints of the smallest size that would suffice on an idle machine are preferred.
//!
//! CPUs are allocated from the nodes of the chosen affinity first, then from any node; see [`take`] and
//! [`distribute`]. The containers after an init container reuse its CPUs.

mod distribute;
mod pod_level_resources;
mod resize;
mod take;
mod topology;

use numaward_topology::{CpuSet, Machine, NodeId};

pub(crate) use self::topology::cache;
use self::{
    take::{Packing, PackingOrder},
    topology::CpuTopology,
};
use super::{Affinity, HintProvider, defects};
use crate::{
    decision::{Cause, Shortfall},
    hint::{HintList, Mask, NodeIndex, ProviderHints, Resource, Scope, for_each_subset, positions},
    ledger::{Ledger, ReusableCpus},
    policy::{
        CpuOptions, KubeletVersion, PolicyConfig, StartProblem, StaticCpuProblem, TopologyManagerPolicy,
    },
    qos::QosClass,
    request::{ContainerName, ContainerRequest, OwnerId, Request},
};

/// Reason why CPUs cannot be allocated. The texts are the kubelet's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CpuError {
    /// With `full-pcpus-only`: the request is not a multiple of the core size.
    #[error("SMT Alignment Error: requested {requested} cpus not multiple cpus per core = {cpus_per_core}")]
    NotWholeCores { requested: usize, cpus_per_core: usize },
    /// With `full-pcpus-only`: there are too few free cores. `available` counts the CPUs of cores without a reserved
    /// CPU.
    #[error(
        "SMT Alignment Error: not enough free physical CPUs: available physical CPUs = {available}, requested \
         CPUs = {requested}, CPUs per core = {cpus_per_core}"
    )]
    NotEnoughCores { available: usize, requested: usize, cpus_per_core: usize },
    #[error("not enough cpus available to satisfy request: requested={requested}, available={available}")]
    NotEnough { requested: usize, available: usize },
    /// There are enough CPUs, but no step could take them.
    #[error("failed to allocate cpus")]
    Failed,
    /// The distribution over nodes took too few CPUs.
    #[error("accounting error, not enough CPUs allocated, remaining: {0}")]
    TooFewDistributed(i64),
    /// The distribution over nodes took too many CPUs. The value is negative.
    #[error("accounting error, too many CPUs allocated, remaining: {0}")]
    TooManyDistributed(i64),
}

impl From<CpuError> for Cause {
    fn from(error: CpuError) -> Self {
        match error {
            CpuError::NotWholeCores { .. } | CpuError::NotEnoughCores { .. } => {
                Self::Cores(error.to_string())
            }
            _ => Self::Cpus(error.to_string()),
        }
    }
}

/// CPU manager with the policy `static`.
#[derive(Clone, Debug)]
pub(crate) struct StaticCpuManager {
    topology: CpuTopology,
    nodes: NodeIndex,
    options: CpuOptions,
    version: KubeletVersion,
    reserved: CpuSet,
    /// Reserved CPUs and their siblings.
    reserved_cores: CpuSet,
    /// Number of all CPUs by node position.
    capacity: Vec<usize>,
}

impl StaticCpuManager {
    /// Checks the options and the reservation against the machine.
    pub(crate) fn new(
        machine: &Machine,
        nodes: &NodeIndex,
        config: &PolicyConfig,
        topology_policy: TopologyManagerPolicy,
    ) -> Result<Self, StartProblem> {
        let topology = CpuTopology::new(machine, nodes);
        if topology.size == 0 {
            return Err(StartProblem::NoCpus);
        }
        let needed = match config.reserved_system_cpus.len() {
            0 => {
                let reservation = config.cpu_reservation.ok_or(StartProblem::NoCpuReservation)?;
                reservation.millis().unwrap_or(u64::MAX).div_ceil(1000)
            }
            explicit => explicit as u64,
        };
        if needed == 0 {
            return Err(StartProblem::ZeroCpuReservation);
        }
        let options = CpuOptions::parse(config).map_err(StartProblem::StaticCpu)?;
        let mut manager = Self {
            capacity: topology.count_by_position(&topology.all),
            topology,
            nodes: nodes.clone(),
            options,
            version: config.kubelet_version,
            reserved: config.reserved_system_cpus.clone(),
            reserved_cores: CpuSet::new(),
        };
        manager.check_machine(topology_policy).map_err(StartProblem::StaticCpu)?;
        manager.reserve(needed).map_err(StartProblem::StaticCpu)?;
        Ok(manager)
    }

    /// Checks whether the options are compatible with a topology policy.
    pub(crate) fn check_policy(&self, policy: TopologyManagerPolicy) -> Result<(), StaticCpuProblem> {
        if self.options.align_by_socket && policy == TopologyManagerPolicy::SingleNumaNode {
            return Err(StaticCpuProblem::IncompatibleTopologyPolicy(policy));
        }
        Ok(())
    }

    fn check_machine(&self, topology_policy: TopologyManagerPolicy) -> Result<(), StaticCpuProblem> {
        self.check_policy(topology_policy)?;
        if self.options.align_by_socket && self.topology.sockets.len() > self.topology.nodes.len() {
            return Err(StaticCpuProblem::MoreSocketsThanNodes);
        }
        Ok(())
    }

    /// Selects the reserved CPUs, unless the configuration names them, and their siblings.
    fn reserve(&mut self, needed: u64) -> Result<(), StaticCpuProblem> {
        if self.reserved.is_empty() {
            let count = usize::try_from(needed).unwrap_or(usize::MAX);
            self.reserved = self.take(&self.topology.all, count).unwrap_or_default();
        }
        if self.reserved.len() as u64 != needed {
            return Err(StaticCpuProblem::CannotReserve { reserved: self.reserved.clone(), needed });
        }
        if let Some(cpu) = (&self.reserved - &self.topology.all).first() {
            return Err(StaticCpuProblem::UnknownReservedCpu(cpu));
        }
        let cores = self.topology.cores.iter().filter(|core| core.cpus.intersects(&self.reserved));
        self.reserved_cores = cores.flat_map(|core| core.cpus.iter()).collect();
        Ok(())
    }

    /// Returns the shared pool of an idle machine.
    pub(crate) fn idle_pool(&self) -> CpuSet {
        if self.options.strict_reservation { self.allocatable() } else { self.topology.all.clone() }
    }

    /// Returns the CPUs that can become exclusive.
    pub(crate) fn allocatable(&self) -> CpuSet {
        &self.topology.all - &self.reserved
    }

    /// Returns the reserved CPUs that no container has.
    fn free_reserved(&self, ledger: &Ledger) -> CpuSet {
        let held = ledger.owners().flat_map(|(_, of)| of.exclusive_cpus());
        held.fold(self.reserved.clone(), |free, held| &free - held)
    }

    /// Checks the shared pool and the allocations of an earlier run. An empty state is replaced by the idle one.
    pub(crate) fn check(&self, ledger: &mut Ledger) -> Result<(), StartProblem> {
        let idle = self.idle_pool();
        let shared_pool = ledger.shared_pool.clone();
        let exclusive: Vec<_> = ledger
            .allocations()
            .filter_map(|(owner, container, allocation)| {
                allocation.cpus.clone().map(|cpus| (owner.clone(), container.clone(), cpus))
            })
            .collect();
        if shared_pool.is_empty() {
            if exclusive.is_empty() {
                ledger.shared_pool = idle;
                return Ok(());
            }
            if defects::EMPTY_POOL_IS_REFUSED {
                return Err(StartProblem::EmptySharedPool);
            }
        }
        let reserved_and_shared = &self.reserved & &shared_pool;
        if self.options.strict_reservation {
            if !reserved_and_shared.is_empty() {
                return Err(StartProblem::ReservedShared { shared: reserved_and_shared, shared_pool });
            }
        } else if reserved_and_shared != self.reserved {
            return Err(StartProblem::ReservedNotShared { reserved: self.reserved.clone(), shared_pool });
        }
        let of_pods = ledger.owners().filter_map(|(_, account)| account.pod_level.cpus.as_ref());
        let mut known = of_pods.fold(shared_pool.clone(), |known, cpus| &known | cpus);
        for (owner, container, cpus) in exclusive {
            if cpus.intersects(&shared_pool) {
                return Err(StartProblem::ExclusiveAndShared { owner, container, cpus, shared_pool });
            }
            known = &known | &cpus;
        }
        if known == idle { Ok(()) } else { Err(StartProblem::OtherCpus { machine: idle, state: known }) }
    }

    /// Checks that the kubelet took only free CPUs since the notes were cleared. See [`defects`].
    pub(super) fn check_no_overlap(ledger: &Ledger) -> Result<(), Cause> {
        match &ledger.notes.not_free {
            cpus if cpus.is_empty() => Ok(()),
            cpus => Err(Cause::Cpus(format!(
                "as sockets or cores differ in size, the kubelet would give CPUs that are not free: {cpus}"
            ))),
        }
    }

    /// Returns the CPUs that can become exclusive now.
    fn available(&self, ledger: &Ledger) -> CpuSet {
        &ledger.shared_pool - &self.reserved
    }

    /// Returns the number of exclusive CPUs of a container; zero for most containers.
    fn exclusive_cpus(request: &Request, container: &ContainerRequest) -> usize {
        let is_part = request.resources.is_some();
        if request.qos() != QosClass::Guaranteed || is_part && !container.is_guaranteed() {
            return 0;
        }
        let cpus = container.requests.cpu.and_then(crate::quantity::Quantity::whole_cpus).unwrap_or(0);
        usize::try_from(cpus).unwrap_or(usize::MAX)
    }

    /// Returns the number of exclusive CPUs of an owner: the maximum of what all running containers need together and
    /// what each init container needs together with the sidecars before it.
    fn exclusive_cpus_of_owner(request: &Request) -> usize {
        if let Some(whole) = Self::exclusive_cpus_of_pod(request) {
            return whole;
        }
        let (mut init, mut sidecars) = (0usize, 0usize);
        for container in &request.init_containers {
            let cpus = Self::exclusive_cpus(request, container);
            if container.restartable {
                sidecars = sidecars.saturating_add(cpus);
            } else {
                init = init.max(sidecars.saturating_add(cpus));
            }
        }
        let apps = request.containers.iter().map(|container| Self::exclusive_cpus(request, container));
        init.max(apps.fold(sidecars, usize::saturating_add))
    }

    /// Returns the hints for `needed` CPUs out of the available and the reusable ones.
    fn calculate_hints(&self, available: &CpuSet, reusable: &CpuSet, needed: usize) -> HintList {
        let free = self.topology.count_by_position(available);
        let handed_on = self.topology.count_by_position(reusable);
        let must_have: Mask =
            (0..handed_on.len()).filter(|&at| handed_on[at] > 0).fold(0, |mask, at| mask | 1 << at);
        let reused: usize = handed_on.iter().sum();
        let mut least = self.topology.nodes.len();
        let mut masks = Vec::new();
        let sum = |counts: &[usize], mask: Mask| positions(mask).map(|at| counts[at]).sum::<usize>();
        for_each_subset(self.topology.nodes_with_cpus(), |mask| {
            let size = mask.count_ones() as usize;
            if size < least && sum(&self.capacity, mask) >= needed {
                least = size;
            }
            if must_have & !mask == 0 && sum(&free, mask) + reused >= needed {
                masks.push(mask);
            }
        });
        let aligned = |mask: Mask| self.options.align_by_socket && self.is_socket_aligned(mask, least);
        HintList::new(&self.nodes, masks, u32::try_from(least).unwrap_or(u32::MAX), aligned)
    }

    /// Returns whether a set of nodes spans as few sockets as the smallest sufficient number of nodes would.
    fn is_socket_aligned(&self, mask: Mask, least: usize) -> bool {
        let nodes_per_socket = self.topology.nodes.len() / self.topology.sockets.len();
        nodes_per_socket > 0 && self.topology.sockets_of(mask).len() == least.div_ceil(nodes_per_socket)
    }

    /// Takes CPUs as the options demand.
    fn take(&self, available: &CpuSet, needed: usize) -> Result<CpuSet, CpuError> {
        let order =
            if self.options.distribute_across_cores { PackingOrder::Spread } else { PackingOrder::Packed };
        let packing = Packing { order, by_cache: self.options.align_by_cache.then_some(self.version) };
        if self.options.distribute_across_numa {
            let group = if self.options.full_pcpus_only { self.topology.cpus_per_core } else { 1 };
            distribute::distributed(&self.topology, available, needed, group, packing)
        } else {
            take::packed(&self.topology, available, needed, packing)
        }
    }

    /// Returns the CPUs of the affinity; with `align-by-socket`, of all its sockets.
    fn aligned(&self, mask: Mask) -> CpuSet {
        if self.options.align_by_socket {
            let sockets = self.topology.sockets_of(mask);
            sockets.into_iter().flat_map(|socket| self.topology.sockets[socket].cpus.iter()).collect()
        } else {
            positions(mask).filter_map(|at| self.topology.cpus_at(at)).flat_map(CpuSet::iter).collect()
        }
    }

    /// Chooses CPUs, from the nodes of the affinity first, then from any node.
    fn choose(&self, allocatable: &CpuSet, needed: usize, affinity: Affinity) -> Result<CpuSet, CpuError> {
        let mut chosen = CpuSet::new();
        if let Some(mask) = affinity.mask {
            let aligned = allocatable & &self.aligned(mask);
            chosen = self.take(&aligned, needed.min(aligned.len()))?;
        }
        let rest = self.take(&(allocatable - &chosen), needed.saturating_sub(chosen.len()))?;
        Ok(&chosen | &rest)
    }

    /// Returns whether `full-pcpus-only` is set.
    pub(super) fn requires_whole_cores(&self) -> bool {
        self.options.full_pcpus_only
    }

    /// With `full-pcpus-only`: checks that the request is a multiple of the core size.
    pub(crate) fn check_whole_cores(&self, requested: usize) -> Result<(), CpuError> {
        let cpus_per_core = self.topology.cpus_per_core;
        if self.options.full_pcpus_only && cpus_per_core > 0 && !requested.is_multiple_of(cpus_per_core) {
            return Err(CpuError::NotWholeCores { requested, cpus_per_core });
        }
        Ok(())
    }

    /// With `full-pcpus-only`: checks that enough whole cores are free.
    fn check_cores(&self, ledger: &Ledger, requested: usize) -> Result<(), CpuError> {
        self.check_whole_cores(requested)?;
        let cpus_per_core = self.topology.cpus_per_core;
        if !self.options.full_pcpus_only || cpus_per_core == 0 {
            return Ok(());
        }
        let available = (&ledger.shared_pool - &self.reserved_cores).len();
        if requested > available {
            return Err(CpuError::NotEnoughCores { available, requested, cpus_per_core });
        }
        Ok(())
    }
}

impl HintProvider for StaticCpuManager {
    fn hints(&self, ledger: &mut Ledger, request: &Request, scope: Scope<'_>) -> ProviderHints {
        self.remove_stale(ledger);
        let owner = &request.owner;
        let needed = match scope {
            Scope::Container(container) => Self::exclusive_cpus(request, container),
            Scope::Owner => Self::exclusive_cpus_of_owner(request),
        };
        if needed == 0 {
            return ProviderHints::NoPreference;
        }
        let by_cpu = |hints| ProviderHints::ByResource(vec![(Resource::Cpu, hints)]);
        let impossible = || by_cpu(HintList::new(&self.nodes, Vec::new(), 0, |_| false));
        if matches!(scope, Scope::Owner) && Self::check_shared_part(request).is_err() {
            return impossible();
        }
        let mut held = CpuSet::new();
        match scope {
            Scope::Container(container) => {
                if let Some(cpus) = ledger.exclusive_cpus(owner, &container.name) {
                    if cpus.len() != needed {
                        return impossible();
                    }
                    return by_cpu(self.calculate_hints(cpus, &CpuSet::new(), needed));
                }
            }
            Scope::Owner => {
                for container in request.all_containers() {
                    let Some(cpus) = ledger.exclusive_cpus(owner, &container.name) else { continue };
                    if cpus.len() != Self::exclusive_cpus(request, container) {
                        return impossible();
                    }
                    held = &held | cpus;
                }
                if held.len() == needed {
                    return by_cpu(self.calculate_hints(&held, &CpuSet::new(), needed));
                }
            }
        }
        let reusable = &ledger.notes.reusable_cpus.of_owner(owner) | &held;
        by_cpu(self.calculate_hints(&self.available(ledger), &reusable, needed))
    }

    fn allocate(
        &self,
        ledger: &mut Ledger,
        request: &Request,
        container: &ContainerRequest,
        affinity: Affinity,
    ) -> Result<(), Cause> {
        self.remove_stale(ledger);
        let (owner, name) = (&request.owner, &container.name);
        let needed = Self::exclusive_cpus(request, container);
        if needed == 0 {
            return Ok(());
        }
        let held = ledger.exclusive_cpus(owner, name).cloned();
        if defects::CORES_ARE_CHECKED_BEFORE_HELD_CPUS || held.is_none() {
            self.check_cores(ledger, needed)?;
        }
        if let Some(cpus) = held {
            ledger.notes.reusable_cpus.update(request, name, &cpus);
            return Ok(());
        }
        let allocatable = &self.available(ledger) | &ledger.notes.reusable_cpus.of_owner(owner);
        let cpus = self.choose(&allocatable, needed, affinity)?;
        let free = &allocatable | &self.free_reserved(ledger);
        ledger.notes.note_taken(&cpus, &free);
        ledger.shared_pool = &ledger.shared_pool - &cpus;
        ledger.notes.reusable_cpus.update(request, name, &cpus);
        ledger.allocation_mut(owner, name).cpus = Some(cpus);
        Ok(())
    }

    fn allocate_pod(&self, ledger: &mut Ledger, request: &Request, affinity: Affinity) -> Result<(), Cause> {
        self.remove_stale(ledger);
        self.divide(ledger, request, affinity)
    }

    fn remove(&self, ledger: &mut Ledger, owner: &OwnerId, container: &ContainerName) {
        release(ledger, owner, container);
    }

    fn shortfalls(&self, ledger: &Ledger, request: &Request, scope: Scope<'_>) -> Vec<Shortfall> {
        let requested = match scope {
            Scope::Container(container) => Self::exclusive_cpus(request, container),
            Scope::Owner => Self::exclusive_cpus_of_owner(request),
        };
        if requested == 0 {
            return Vec::new();
        }
        let free = self.topology.count_by_position(&self.available(ledger));
        let shortfall = |(&node, free): (&NodeId, usize)| {
            Shortfall::new(node, Resource::Cpu, requested as u64, free as u64)
        };
        self.nodes.ids().iter().zip(free).map(shortfall).collect()
    }
}

/// Releases the exclusive CPUs of a container, except those that another container also holds. Sharing happens
/// between an init container and its successors, and in states that were taken over.
pub(crate) fn release(ledger: &mut Ledger, owner: &OwnerId, container: &ContainerName) {
    if ledger.exclusive_cpus(owner, container).is_none() {
        return;
    }
    let held = ledger.allocation_mut(owner, container);
    // Another strategy may have hidden sibling threads.
    let cpus = held.held_cpus();
    (held.cpus, held.hidden_cpus) = (None, CpuSet::new());
    if pod_level_resources::is_part(ledger, owner) {
        pod_level_resources::release(ledger, owner, container);
        return;
    }
    let in_use = ledger.cpus_of_other_containers(owner, container);
    ledger.drop_empty(owner, Some(container));
    ledger.shared_pool = &ledger.shared_pool | &(&cpus - &in_use);
}

impl ReusableCpus {
    /// Returns the reusable CPUs of the owner's init containers.
    fn of_owner(&self, owner: &OwnerId) -> CpuSet {
        self.0.as_ref().filter(|(of, _)| of == owner).map_or_else(CpuSet::new, |(_, cpus)| cpus.clone())
    }

    /// Updates the reusable CPUs: an init container adds its CPUs, another container removes them.
    fn update(&mut self, request: &Request, container: &ContainerName, cpus: &CpuSet) {
        let before = self.of_owner(&request.owner);
        let after = if request.is_regular_init(container) { &before | cpus } else { &before - cpus };
        self.0 = Some((request.owner.clone(), after));
    }
}
