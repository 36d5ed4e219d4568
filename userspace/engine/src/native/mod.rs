//! The strategy `native`: the topology policies of the kubelet, without its known defects.
//!
//! # Problem
//! Give containers exclusive CPUs, memory and huge pages on as few and as near nodes as their topology policy
//! demands, and leave as much usable capacity as possible for later requests.
//!
//! The policies mean:
//!
//! | policy | meaning |
//! |---|---|
//! | `none`, `best-effort` | any request that fits the machine is admitted, on the fewest and nearest nodes possible |
//! | `restricted` | each resource is on the smallest number of nodes that could hold it on the idle machine; smaller sets are subsets of larger ones |
//! | `single-numa-node` | all resources are on one node |
//!
//! # Algorithm
//! Placement groups (containers or, in pod scope, all running containers together) are placed in the order of size,
//! depth first: the best few placements of each group are tried until all groups fit. Nothing is charged before.
//! CPUs, memory and huge pages are placed jointly. Placements are ranked by the number of nodes, then by distances,
//! then by the usable capacity that remains (see [`crate::placement_search`]).
//!
//! Init containers end before the app containers start, so they never affect the placement of these. Each must fit
//! the free capacity plus the shares of later containers, and is only charged for the difference.
//!
//! # Properties
//! - **Complete**: a request is placed completely, or the ledger does not change.
//! - **Exclusive**: no CPU is in two allocations, and no node's allocations exceed its capacity.
//! - **Exact accounts**: the guaranteed memory of a node is the sum of the placed bytes, so a release returns exactly
//!   the same bytes.
//! - **Deterministic**: a decision depends only on the machine, the configuration, the ledger, the request and the
//!   terms.
//! - **Optimal** for the first group on up to `MAX_EXACT_NODES` = 20 nodes, unless a bound below ends the search: no
//!   permitted placement has a better rank. On larger machines `MAX_SETS` = 500 sets are considered, and the
//!   explanation mentions an incomplete search.
//! - **Best few** for later groups: the `MAX_PLACEMENTS` = 8 best placements of each earlier group are tried.
//! - **Bounded**: a decision ends after [`MAX_WORK`] = 2,000,000 units (10 ms), and an unplaced request is then
//!   refused. The operation in progress can exceed the limit. One search ends after a part of the remaining work (an
//!   eighth, `SEARCH_DIVISOR`, or less if more than four init containers are left), with the best placement so far. If
//!   it ends before the smallest number of nodes with attached nodes is known, `restricted` uses no attached nodes. The
//!   explanation mentions an incomplete search and the limit.
//! - **Bounded plans**: a plan ends after `MAX_PLAN_WORK` = 10,000,000 units. It considers `MAX_SETS` sets of nodes
//!   and for each the `MAX_MOVABLE_GROUPS` = 64 smallest groups; an attempt costs `TRY_COST` = 2,500 units per node.
//!
//! # Parts
//! | part | module |
//! |---|---|
//! | machine model | `host` |
//! | needs of a request, and groups | `placement_groups`, `free_capacity` |
//! | search for placements | `search` |
//! | ranking | `rank` |
//! | admission | `decide`, `init` |
//! | selection of CPUs | `cpus` |
//! | limit of the work | `work_budget` |
//! | change of the machine | `rebase` |
//! | change of a request | `resize` |
//! | plans of moves | [`plan`] |
//! | refusals | [`PlacementRefusal`] |

mod accounts;
mod cpus;
mod decide;
mod free_capacity;
mod host;
mod init;
mod placement_groups;
pub mod plan;
mod rank;
mod rebase;
mod refusal;
mod resize;
mod search;
mod work_budget;

use std::{cmp::Ordering, collections::BTreeMap};

use numaward_topology::{Bytes, Machine, NodeId, NumaNode, ZoneKind};
use serde::{Deserialize, Serialize};

use self::{cpus::MachineCpus, host::HostModel};
pub use self::{
    refusal::{ContainerKind, PlacementRefusal},
    work_budget::MAX_WORK,
};
use crate::{
    decision::{Cause, Decision, Rejection, ResizeError},
    explain::Explanation,
    hint::NodeIndex,
    kubelet::{
        check_machine, check_request, check_reservations, cpu::StaticCpuManager, memory::StaticMemoryManager,
    },
    ledger::Ledger,
    moves::{PlanError, RebalanceLimits, RebalancePlan},
    policy::{
        Component, CpuManagerPolicy, CpuOptions, MachineProblem, MemoryManagerPolicy, MemoryTier,
        PolicyConfig, StartError, StartPhase, StartProblem, Tiers, TopologyManagerPolicy,
        TopologyManagerScope, TopologyOptions,
    },
    rebase::UncoveredMemory,
    request::{ContainerName, OwnerId, Request, Resources},
    strategy::{Allocatable, DecisionStage, Strategy},
    terms::Terms,
};

/// Options of `native` beyond the kubelet's configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NativeOptions {
    /// Treatment of memory-only nodes, unless a request has its own setting.
    pub tiers: Tiers,
    /// Type of memory by node. A node with CPUs that is absent has ordinary memory; another absent node does not
    /// serve requests for a type of memory.
    pub memory_tiers: BTreeMap<NodeId, MemoryTier>,
}

/// Returns the type of memory of a node according to the kernel's memory tier. A node with CPUs but without a tier
/// has ordinary memory. Returns `None` if the type is unknown.
///
/// Source: `MEMTIER_ADISTANCE_DRAM` and `MEMTIER_CHUNK_BITS` of linux/memory-tiers.h. Tiers are numbered by abstract
/// distance, and ordinary memory is in tier 4.
pub fn memory_tier(node: &NumaNode) -> Option<MemoryTier> {
    const DRAM: u32 = 4;
    match node.memory_tier.map(|tier| tier.cmp(&DRAM)) {
        Some(Ordering::Less) => Some(MemoryTier::Hbm),
        Some(Ordering::Equal) => Some(MemoryTier::Dram),
        Some(Ordering::Greater) => Some(MemoryTier::Cxl),
        None => (!node.cpus.is_empty()).then_some(MemoryTier::Dram),
    }
}

/// The strategy `native`.
#[derive(Debug)]
pub struct NativeStrategy {
    host: HostModel,
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    options: NativeOptions,
}

impl NativeStrategy {
    /// Checks a configuration against a machine. Errors have the kubelet's words. In contrast to the kubelet, the
    /// number of nodes is unlimited, and distances always count.
    pub fn new(
        machine: &Machine,
        config: &PolicyConfig,
        options: &NativeOptions,
    ) -> Result<Self, StartError> {
        let mut problems = Vec::new();
        let native = Self::make(machine, config, options, &mut problems);
        match (native, problems.into_iter().next()) {
            (Some(native), None) => Ok(native),
            (_, Some(problem)) => Err(problem),
            // `make` only returns `None` together with a problem.
            (None, None) => {
                let problem = StartProblem::Machine(MachineProblem::NoNodes);
                Err(StartError::with_context(Component::Configuration, StartPhase::New)(problem))
            }
        }
    }

    /// Returns all errors of a configuration for a machine, at most one for each component.
    pub fn problems(machine: &Machine, config: &PolicyConfig) -> Vec<StartError> {
        let mut problems = Vec::new();
        Self::make(machine, config, &NativeOptions::default(), &mut problems);
        problems
    }

    fn make(
        machine: &Machine,
        config: &PolicyConfig,
        options: &NativeOptions,
        problems: &mut Vec<StartError>,
    ) -> Option<Self> {
        let checked =
            check_machine(machine).map_err(StartProblem::from).and_then(|()| check_reservations(config));
        if let Err(problem) = checked {
            problems.push(StartError::with_context(Component::Configuration, StartPhase::New)(problem));
            return None;
        }
        let nodes = NodeIndex::new(machine.nodes.keys().copied());
        // Zero nodes: the number of nodes is unlimited.
        let topology = keep(problems, Component::TopologyManager, TopologyOptions::parse(config, 0));
        let cpus = keep(problems, Component::CpuManager, cpus(machine, &nodes, config));
        let idle = match config.memory_manager_policy {
            MemoryManagerPolicy::None => Ok(BTreeMap::new()),
            MemoryManagerPolicy::Static => {
                StaticMemoryManager::new(machine, &nodes, config).map(|memory| memory.idle().clone())
            }
        };
        let idle = keep(problems, Component::MemoryManager, idle);
        let host = HostModel::new(machine, cpus?, idle?);
        let (policy, scope) = (topology?.policy, config.topology_manager_scope);
        Some(Self { host, policy, scope, options: options.clone() })
    }

    /// Returns the topology policy and scope for these terms.
    fn policy_and_scope(&self, terms: &Terms) -> (TopologyManagerPolicy, TopologyManagerScope) {
        (terms.policy.unwrap_or(self.policy), terms.scope.unwrap_or(self.scope))
    }

    fn check(&self, terms: &Terms) -> Result<(), StartError> {
        let (policy, _) = self.policy_and_scope(terms);
        let checked = self.host.cpus.as_ref().map_or(Ok(()), |cpus| cpus.manager.check_policy(policy));
        let problem = |problem| {
            StartError::with_context(Component::CpuManager, StartPhase::New)(StartProblem::StaticCpu(problem))
        };
        checked.map_err(problem)
    }
}

/// Collects the error of a component.
fn keep<T>(
    problems: &mut Vec<StartError>,
    component: Component,
    result: Result<T, StartProblem>,
) -> Option<T> {
    result
        .map_err(|problem| problems.push(StartError::with_context(component, StartPhase::New)(problem)))
        .ok()
}

fn cpus(
    machine: &Machine,
    nodes: &NodeIndex,
    config: &PolicyConfig,
) -> Result<Option<MachineCpus>, StartProblem> {
    let options = &config.cpu_manager_policy_options;
    match config.cpu_manager_policy {
        CpuManagerPolicy::None if options.is_empty() => Ok(None),
        CpuManagerPolicy::None => Err(StartProblem::OptionsWithoutPolicy(options.clone())),
        CpuManagerPolicy::Static => {
            let manager = StaticCpuManager::new(machine, nodes, config, config.topology_manager_policy)?;
            let options = CpuOptions::parse(config).map_err(StartProblem::StaticCpu)?;
            Ok(Some(MachineCpus::new(machine, manager, options)))
        }
    }
}

fn rejected(ledger: &Ledger, request: &Request, container: Option<ContainerName>, cause: Cause) -> Decision {
    let message = cause.to_string();
    let rejection = Rejection::new(&request.owner, container, cause, message, Vec::new());
    Decision {
        outcome: Err(Box::new(rejection)),
        explanation: Explanation::default(),
        ledger: ledger.clone(),
    }
}

impl Strategy for NativeStrategy {
    fn idle(&self) -> Ledger {
        let shared_pool = self.host.cpus.as_ref().map(|cpus| cpus.idle_pool.clone()).unwrap_or_default();
        Ledger::idle(self.host.idle.clone(), shared_pool)
    }

    fn allocatable(&self) -> Allocatable {
        let mut memory: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>> = BTreeMap::new();
        for (&node, account) in &self.host.idle {
            for (&kind, account) in account.kinds.iter().filter(|(_, account)| account.allocatable.0 > 0) {
                memory.entry(kind).or_default().insert(node, account.allocatable);
            }
        }
        let cpus = self.host.cpus.as_ref().map(|cpus| cpus.allocatable.clone()).unwrap_or_default();
        Allocatable { cpus, memory }
    }

    fn check_terms(&self, terms: &Terms) -> Result<(), StartError> {
        self.check(terms)
    }

    fn admit_watched(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        watch: &dyn Fn(DecisionStage),
    ) -> Decision {
        let checked = check_request(request)
            .and_then(|()| self.check(terms).map_err(|problem| Cause::Terms(problem.to_string())));
        match checked {
            Ok(()) => self.decide(ledger, request, terms, watch),
            Err(cause) => rejected(ledger, request, None, cause),
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
            if !init.restartable {
                accounts::release(&self.host, &mut next, owner, &init.name);
            }
        }
        next
    }

    fn release(&self, ledger: &Ledger, owner: &OwnerId) -> Ledger {
        let mut next = ledger.clone();
        accounts::remove(&self.host, &mut next, owner);
        next
    }

    fn resize(
        &self,
        ledger: &Ledger,
        owner: &OwnerId,
        container: &ContainerName,
        to: &Resources,
    ) -> Result<Ledger, ResizeError> {
        resize::resized(self, ledger, owner, container, to)
    }

    fn plan(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        limits: &RebalanceLimits,
    ) -> Result<RebalancePlan, PlanError> {
        let limits = RebalanceLimits { in_order: true, ..limits.clone() };
        self.plan_or_rejection(ledger, request, terms, &limits)
            .map_err(|rejection| PlanError { reason: "no moves within the limits make it fit", rejection })
    }

    fn rebase(&self, ledger: &Ledger) -> (Ledger, Vec<UncoveredMemory>) {
        rebase::rebase(self, ledger)
    }
}
