//! The interface of a strategy: how requests become allocations.
//!
//! A strategy is made for a machine and a configuration and does not change. All that changes is in the
//! ledger, which goes in and comes out: every method is a pure function.
//!
//! Code that holds one as `dyn Strategy` needs to know nothing else of it. What only one strategy has, such as the
//! kubelet's state files, is in its own module and on its own type.

use std::{collections::BTreeMap, fmt};

use numaward_topology::{Bytes, CpuSet, NodeId, ZoneKind};

use crate::{
    decision::{Decision, ResizeError},
    ledger::Ledger,
    moves::{PlanError, RebalanceLimits, RebalancePlan},
    policy::StartError,
    rebase::UncoveredMemory,
    request::{ContainerName, OwnerId, Request, Resources},
    terms::Terms,
};

/// What a decision goes through, for each container or for all of a pod together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionStage {
    /// All providers are asked for hints.
    Hints,
    /// They are merged.
    Merge,
    /// CPUs and memory are taken.
    Allocate,
}

/// What a strategy can promise at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocatable {
    /// CPUs that can become exclusive.
    pub cpus: CpuSet,
    /// Bytes by node and kind, without zeros.
    pub memory: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>,
}

/// Decides who gets which CPUs and memory.
pub trait Strategy: fmt::Debug + Send + Sync {
    /// The ledger of the machine while nothing is promised.
    fn idle(&self) -> Ledger;

    /// What can be promised at most.
    fn allocatable(&self) -> Allocatable;

    /// Whether requests can be admitted on these terms, with this configuration and machine.
    fn check_terms(&self, terms: &Terms) -> Result<(), StartError>;

    /// Decides on a request on its terms, and keeps them with its owner. It counts as active from now on, until it
    /// is rejected or removed. The explanation of the decision has what it was chosen from.
    ///
    /// `watch` is called when each stage begins, to measure it. The decision does not depend on it.
    fn admit_watched(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        watch: &dyn Fn(DecisionStage),
    ) -> Decision;

    /// Decides on a request without terms of its own.
    fn admit(&self, ledger: &Ledger, request: &Request) -> Decision {
        self.admit_watched(ledger, request, &Terms::default(), &|_| {})
    }

    /// A container of an admitted owner was started. What came before it may have ended.
    fn note_started(&self, ledger: &Ledger, owner: &OwnerId, container: &ContainerName) -> Ledger;

    /// An owner is gone, with all its containers.
    fn release(&self, ledger: &Ledger, owner: &OwnerId) -> Ledger;

    /// Changes what a container that runs is promised to these amounts; what is not given stays. It stays where it
    /// is, and where that is not possible nothing changes. The ledger afterwards.
    ///
    /// A container that holds nothing is only noted to ask for them.
    fn resize(
        &self,
        ledger: &Ledger,
        owner: &OwnerId,
        container: &ContainerName,
        to: &Resources,
    ) -> Result<Ledger, ResizeError>;

    /// Few and small moves of those that run that make a request fit, in an order in which each has room on both sides; or
    /// why there are none. [`crate::in_flight`] has what is charged while they are made.
    fn plan(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        limits: &RebalanceLimits,
    ) -> Result<RebalancePlan, PlanError>;

    /// Carries what is promised over to this machine, as after a restart, or after the machine changed: who runs
    /// keeps what it holds. The ledger afterwards, and what of it the machine does not have.
    fn rebase(&self, ledger: &Ledger) -> (Ledger, Vec<UncoveredMemory>) {
        let mut next = ledger.clone();
        let uncovered = next.rebase(&self.idle());
        (next, uncovered)
    }
}
