//! Descriptions of the guarantees for the API and for other parts of the daemon.
//!
//! # Problem
//! All guarantees are published whenever one changes, and describing a thousand takes longer than admitting one.
//!
//! # Algorithm
//! Each description is cached together with the data it was made of, and used again while the data is equal.

use std::{collections::BTreeSet, sync::Arc};

use numaward_api as api;
use numaward_enforce::Record;
use numaward_engine::{Allocation, Ledger, OwnerAccount, OwnerId, ledger::KindAccount};
use numaward_guarantee::{request::Target, state::Guarantee};
use numaward_model::{WorkloadGuarantee, placed};
use numaward_topology::{CpuSet, NodeId, ZoneKind};

use super::{controllers::Controllers, drift::DriftController, mode};
use crate::core::{Core, MissingCapacity, admission, claims, preferred_node};

/// Descriptions by name of the guarantee, in ascending order.
#[derive(Debug, Default)]
pub(super) struct ReadModel(Vec<(String, Description)>);

/// Cached description of a guarantee.
#[derive(Debug)]
struct Description {
    of: Source,
    allocation: Arc<api::Allocation>,
    guarantee_report: Arc<WorkloadGuarantee>,
}

/// Data from which a description is made. Most of it is shared, so that comparing the pointers is enough.
#[derive(Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties of a guarantee")]
struct Source {
    guarantee: Arc<Guarantee>,
    account: Option<Arc<OwnerAccount>>,
    record: Option<Arc<Record>>,
    drift: Vec<api::Drift>,
    missing: Option<MissingCapacity>,
    moved: Option<api::MovedPages>,
    is_enforced: bool,
    stalled: bool,
    stopped: bool,
    releasing: bool,
    /// True if the memory of the pod is already listed with another container of the pod.
    is_listed_elsewhere: bool,
    /// Allocation before a move, while the pages are being migrated.
    allocation_before_move: Option<Allocation>,
}

impl ReadModel {
    /// Returns the description of a guarantee for the API.
    pub(super) fn allocation(&self, name: &str) -> Option<api::Allocation> {
        let place = self.0.binary_search_by(|(other, _)| other.as_str().cmp(name)).ok()?;
        self.0.get(place).map(|(_, entry)| api::Allocation::clone(&entry.allocation))
    }

    /// Returns all guarantees for other parts of the daemon.
    pub(super) fn guarantees(&self) -> Vec<Arc<WorkloadGuarantee>> {
        self.0.iter().map(|(_, entry)| entry.guarantee_report.clone()).collect()
    }

    /// Updates the descriptions of changed guarantees.
    pub(super) fn update(&mut self, core: &Core, controllers: &Controllers) {
        let Controllers { drift, throttling, liveness, .. } = controllers;
        let mut before = std::mem::take(&mut self.0).into_iter().peekable();
        let mut shared = BTreeSet::new();
        let mut now = Vec::with_capacity(core.store.state.guarantees.len());
        for (name, guarantee) in &core.store.state.guarantees {
            // The share of a pod is listed once, even if several containers use it.
            let is_listed_elsewhere = match &guarantee.target {
                Target::Container(of) => of.shares_pod() && !shared.insert(&of.owner),
                _ => false,
            };
            let owner = guarantee.owner(name);
            let stopped = liveness.is_stopped(name);
            let releasing = core.store.state.releasing.contains(name);
            // Nothing is written for a stopped unit, nor any more for a guarantee that is being released.
            let is_settled = stopped || releasing || mode::is_written(core, guarantee);
            let source = Source {
                guarantee: guarantee.clone(),
                account: core.store.state.ledger.owner(&OwnerId::from(owner)).cloned(),
                record: core.store.state.applied.get(&guarantee.cgroup).cloned(),
                drift: drift.drift_of(&guarantee.cgroup),
                missing: core.policy.missing.get(owner).cloned(),
                moved: core.execution.migrations.pages_of(&guarantee.cgroup),
                is_enforced: core.mode() == api::EnforcementMode::On && is_settled,
                stalled: throttling.stalls(name),
                stopped,
                releasing,
                is_listed_elsewhere,
                allocation_before_move: allocation_before_move(core, owner, &guarantee.target),
            };
            while before.next_if(|(old, _)| old < name).is_some() {}
            let entry = match before.next_if(|(old, entry)| old == name && entry.of == source) {
                Some(entry) => entry,
                None => (name.clone(), Description::new(core, name, source)),
            };
            now.push(entry);
        }
        self.0 = now;
    }

    /// Returns all descriptions for the API.
    pub(super) fn allocations(
        &self,
        core: &Core,
        drift: &DriftController,
        waiting: Vec<api::PendingGuarantee>,
        pending_restores: Vec<api::PendingRestore>,
    ) -> api::Allocations {
        let ledger = &core.store.state.ledger;
        let free_cpus = core.free_cpus();
        let memory = ledger.memory();
        let nodes = core.policy.machine.nodes.iter().map(|(&id, node)| api::NodeCapacity {
            node: id.0,
            free_cpus: (&free_cpus & &node.cpus).to_string(),
            memory: memory.get(&id).into_iter().flatten().map(|of| kind(ledger, id, of)).collect(),
        });
        api::Allocations {
            allocations: self.0.iter().map(|(_, entry)| entry.allocation.clone()).collect(),
            shared_cpus: core.shared_pool().to_string(),
            nodes: nodes.collect(),
            enforcement: api::Enforcement {
                mode: core.mode(),
                herding: core.isolation.status(&core.store.state, |cgroup| drift.drift_of(cgroup)),
                homes: preferred_node::describe(core),
                pending_restores,
            },
            waiting,
            claims: claims::describe(core),
        }
    }
}

impl Description {
    fn new(core: &Core, name: &str, of: Source) -> Self {
        let guarantee = &of.guarantee;
        let held = match &guarantee.target {
            Target::Container(container) => core.allocation_for(container),
            _ => of.account.as_ref().and_then(|account| account.containers.values().next()),
        };
        let held = held.cloned().unwrap_or_default();
        let terms = of.account.as_ref().map(|account| account.terms.clone()).unwrap_or_default();
        let settings = of.record.as_ref().map_or(&guarantee.settings, |record| &record.settings);
        let allocation = api::Allocation {
            declared: guarantee.declared.as_ref().map(|rule| rule.pattern().to_owned()),
            drift: of.drift.clone(),
            enforced: of.is_enforced,
            stalled: of.stalled,
            stopped: of.stopped,
            missing: of.missing.as_ref().map(api::MissingCapacity::from),
            explanation: Some(guarantee.explanation.clone()),
            ..admission::describe(core, name, &guarantee.target, &guarantee.cgroup, (&held, &terms), settings)
        };
        let missing = of.missing.clone().unwrap_or_default();
        // Until its pages have arrived, both the old and the new CPUs and nodes belong to the workload.
        let (mut nodes, mut cpus) = (held.memory_nodes(), held.cpus.clone().unwrap_or_default());
        let mut hidden_cpus = held.hidden_cpus.clone();
        if let Some(left) = &of.allocation_before_move {
            nodes.extend(left.memory_nodes().iter());
            cpus = &cpus | left.cpus.as_ref().unwrap_or(&CpuSet::new());
            hidden_cpus = &(&hidden_cpus | &left.hidden_cpus) - &cpus;
        }
        let guarantee_report = WorkloadGuarantee {
            cgroup: guarantee.cgroup.clone(),
            id: guarantee.id,
            owner: guarantee.owner(name).into(),
            container: match &guarantee.target {
                Target::Container(of) => Some(of.into()),
                _ => None,
            },
            nodes,
            is_burstable: terms.burstable,
            blocks: held.blocks.clone(),
            placed: if of.is_listed_elsewhere { Vec::new() } else { placed(&held) },
            cpus,
            hidden_cpus,
            offline_cpus: missing.cpus,
            uncovered: missing.memory,
        };
        Self { of, allocation: allocation.into(), guarantee_report: guarantee_report.into() }
    }
}

/// Returns the guaranteed, free and withheld memory of a kind on a node.
fn kind(ledger: &Ledger, node: NodeId, of: (&ZoneKind, &KindAccount)) -> api::KindCapacity {
    let withheld = ledger.conditions().withheld_on(*of.0, node).0;
    let guarantees = api::KindCapacity::from(of);
    api::KindCapacity { withheld_bytes: withheld.min(guarantees.free_bytes), ..guarantees }
}

/// Returns the allocation of a guarantee before a move, while its pages are being migrated.
fn allocation_before_move(core: &Core, owner: &str, target: &Target) -> Option<Allocation> {
    let container = match target {
        Target::Container(of) => of.ledger_name(),
        _ => owner.into(),
    };
    core.store.state.moving.allocation_before_move(&OwnerId::from(owner), &container).cloned()
}
