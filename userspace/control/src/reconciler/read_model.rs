//! What is told of each guarantee, to those who ask and to the listener.
//!
//! Problem: everybody is told of all guarantees whenever one changes. To describe a thousand takes longer than to give
//! one.
//!
//! Algorithm: each description is kept with what it was made of, and serves until that is something else.

use std::{
    collections::BTreeSet,
    sync::{Arc, PoisonError},
};

use numaward_api as api;
use numaward_api::EnforcementMode;
use numaward_cgroup::CgroupPath;
use numaward_enforce::Record;
use numaward_engine::{Allocation, OwnerAccount, OwnerId};
use numaward_model::{Promise, Promises, Settings};
use numaward_topology::{Bytes, NodeId, ZoneKind};

use super::{Guarantee, ReconcilerLoop, Target, machine::MissingCapacity};

/// What is told of all of them, in the order of their names.
#[derive(Debug, Default)]
pub(super) struct ReadModel(Vec<(String, Description)>);

/// What is told of a guarantee.
#[derive(Debug)]
struct Description {
    of: Source,
    allocation: Arc<api::Allocation>,
    promise: Arc<Promise>,
}

/// What it is made of. Most of it is shared, and compared by where it is.
#[derive(Debug, PartialEq, Eq)]
struct Source {
    guarantee: Arc<Guarantee>,
    account: Option<Arc<OwnerAccount>>,
    record: Option<Arc<Record>>,
    drift: Vec<api::Drift>,
    lack: Option<MissingCapacity>,
    moved: Option<api::Moved>,
    stalled: bool,
    /// Whether what its pod holds is told of another container.
    is_told: bool,
}

impl ReadModel {
    /// What is told of the guarantee with this name.
    pub(super) fn of(&self, name: &str) -> Option<api::Allocation> {
        let place = self.0.binary_search_by(|(other, _)| other.as_str().cmp(name)).ok()?;
        self.0.get(place).map(|(_, told)| api::Allocation::clone(&told.allocation))
    }

    /// What is told to those who ask.
    pub(super) fn allocations(&self) -> Vec<Arc<api::Allocation>> {
        self.0.iter().map(|(_, told)| told.allocation.clone()).collect()
    }

    /// What is told to the listener.
    pub(super) fn promises(&self) -> Vec<Arc<Promise>> {
        self.0.iter().map(|(_, told)| told.promise.clone()).collect()
    }
}

impl ReconcilerLoop {
    /// Describes what changed.
    pub(super) fn describe_changed(&mut self) {
        let mut before = std::mem::take(&mut self.read_model.0).into_iter().peekable();
        let mut shared = BTreeSet::new();
        let mut now = Vec::with_capacity(self.state.guarantees.len());
        for (name, guarantee) in &self.state.guarantees {
            // What a pod holds as a whole is there once, however many containers share it.
            let is_told = match &guarantee.target {
                Target::Container(of) => of.shares_pod() && !shared.insert(&of.owner),
                _ => false,
            };
            let source = self.source(name, guarantee, is_told);
            while before.next_if(|(old, _)| old < name).is_some() {}
            let told = match before.next_if(|(old, told)| old == name && told.of == source) {
                Some(told) => told,
                None => (name.clone(), self.description(name, source)),
            };
            now.push(told);
        }
        self.read_model.0 = now;
    }

    /// Tells others what is promised.
    pub(super) fn publish(&mut self) {
        self.due.herd = true;
        self.due.declared = true;
        self.throttled.outdated();
        self.follow_pool();
        self.drift.follow(&self.state.book);
        self.describe_changed();
        self.ports.assignments.assigned(Promises::new(self.read_model.promises(), self.state.ledger.clone()));
        self.show();
    }

    /// Tells what is held to whoever asks.
    pub(super) fn publish_view(&mut self) {
        self.describe_changed();
        self.show();
    }

    fn show(&mut self) {
        self.is_outdated = false;
        *self.view.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(self.allocations());
    }

    /// What is held, as it was described last.
    pub(super) fn allocations(&self) -> api::Allocations {
        let ledger = &self.state.ledger;
        let free_cpus = &self.strategy.allocatable().cpus & ledger.shared_pool();
        let memory = ledger.memory();
        let nodes = self.machine.nodes.iter().map(|(&id, node)| api::NodePromises {
            node: id.0,
            free_cpus: (&free_cpus & &node.cpus).to_string(),
            memory: memory.get(&id).into_iter().flatten().map(Into::into).collect(),
        });
        api::Allocations {
            allocations: self.read_model.allocations(),
            shared_cpus: ledger.shared_pool().to_string(),
            nodes: nodes.collect(),
            enforcement: api::Enforcement { mode: self.mode(), herding: self.herding() },
            waiting: self.declarations.waiting(),
        }
    }

    pub(super) fn describe(
        &self,
        name: &str,
        target: &Target,
        cgroup: &CgroupPath,
        allocation: &Allocation,
        settings: &Settings,
        drift: &[api::Drift],
    ) -> api::Allocation {
        api::Allocation {
            name: name.to_owned(),
            target: target.into(),
            cgroup: cgroup.to_string(),
            directory: self.hierarchy.dir(cgroup).display().to_string(),
            cpus: allocation.cpus.clone().unwrap_or_default().to_string(),
            nodes: allocation.memory_nodes().to_string(),
            memory: allocation.blocks.iter().map(Into::into).collect(),
            settings: settings
                .values()
                .0
                .into_iter()
                .map(|(knob, value)| (knob.to_string(), value.to_string()))
                .collect(),
            enforced: self.mode() == EnforcementMode::On,
            declared: None,
            drift: drift.to_vec(),
            stalled: self.throttled.stalls(name),
            moved: self.moved_of(cgroup),
            lack: None,
            explanation: None,
        }
    }

    fn source(&self, name: &str, guarantee: &Arc<Guarantee>, is_told: bool) -> Source {
        let owner = guarantee.owner(name);
        Source {
            guarantee: guarantee.clone(),
            account: self.state.ledger.owner(&OwnerId::from(owner)).cloned(),
            record: self.state.book.get(&guarantee.cgroup).cloned(),
            drift: self.drift.of(&guarantee.cgroup),
            lack: self.lacks.get(owner).cloned(),
            moved: self.moved_of(&guarantee.cgroup),
            stalled: self.throttled.stalls(name),
            is_told,
        }
    }

    fn description(&self, name: &str, of: Source) -> Description {
        let guarantee = &of.guarantee;
        let held = match &guarantee.target {
            Target::Container(container) => self.allocation_for(container),
            _ => of.account.as_ref().and_then(|account| account.containers.values().next()),
        };
        let held = held.cloned().unwrap_or_default();
        let settings = of.record.as_ref().map_or(&guarantee.settings, |record| &record.settings);
        let mut allocation =
            self.describe(name, &guarantee.target, &guarantee.cgroup, &held, settings, &of.drift);
        allocation.explanation = Some(guarantee.explanation.clone());
        allocation.lack = of.lack.as_ref().map(api::Lack::from);
        allocation.declared = guarantee.declared.as_ref().map(|rule| rule.pattern().to_owned());
        let lack = of.lack.clone().unwrap_or_default();
        let promise = Promise {
            cgroup: guarantee.cgroup.clone(),
            id: guarantee.id,
            nodes: held.memory_nodes(),
            placed: if of.is_told { Vec::new() } else { placed(&held) },
            cpus: held.cpus.unwrap_or_default(),
            offline_cpus: lack.cpus,
            uncovered: lack.memory,
        };
        Description { of, allocation: allocation.into(), promise: promise.into() }
    }
}

/// Memory of an allocation, by kind and node.
fn placed(allocation: &Allocation) -> Vec<(ZoneKind, NodeId, Bytes)> {
    let by_kind = allocation.placed.iter();
    by_kind.flat_map(|(kind, nodes)| nodes.iter().map(|(node, bytes)| (*kind, *node, *bytes))).collect()
}
