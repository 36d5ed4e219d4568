//! The interface of a strategy, which decides requests.
//!
//! A strategy is made for one machine and one configuration and is immutable. The state is the ledger, an argument
//! and a result of the methods: every method is a pure function.
//!
//! Callers use `dyn Strategy`. Features of a single strategy, such as the kubelet's state files, are in the module of
//! its type.

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

/// Stage of a decision, for each container or for all containers of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionStage {
    /// Collecting hints of all providers.
    Hints,
    /// Merging hints.
    Merge,
    /// Allocating CPUs and memory.
    Allocate,
}

/// Maximum capacity for guarantees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocatable {
    /// CPUs that can become exclusive.
    pub cpus: CpuSet,
    /// Bytes by kind and node, without zeros.
    pub memory: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>,
}

/// Strategy for placing requests.
pub trait Strategy: fmt::Debug + Send + Sync {
    /// Returns the ledger of the machine without guarantees.
    fn idle(&self) -> Ledger;

    /// Returns the maximum capacity for guarantees.
    fn allocatable(&self) -> Allocatable;

    /// Checks whether requests can be admitted with these terms.
    fn check_terms(&self, terms: &Terms) -> Result<(), StartError>;

    /// Decides a request. On admission the terms are stored with the owner, which is active until it is released.
    ///
    /// `watch` is called at the begin of each stage, for measurements. It does not affect the decision.
    fn admit_watched(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        watch: &dyn Fn(DecisionStage),
    ) -> Decision;

    /// Decides a request without terms.
    fn admit(&self, ledger: &Ledger, request: &Request) -> Decision {
        self.admit_watched(ledger, request, &Terms::default(), &|_| {})
    }

    /// Records that a container of an admitted owner was started. Earlier init containers may release their
    /// allocations.
    fn note_started(&self, ledger: &Ledger, owner: &OwnerId, container: &ContainerName) -> Ledger;

    /// Releases all containers of an owner.
    fn release(&self, ledger: &Ledger, owner: &OwnerId) -> Ledger;

    /// Changes the guarantee of a running container to these amounts; absent amounts do not change. The container
    /// keeps its place; if that is impossible, an error is returned. Returns the next ledger.
    ///
    /// For a container without a guarantee, only the request is updated.
    fn resize(
        &self,
        ledger: &Ledger,
        owner: &OwnerId,
        container: &ContainerName,
        to: &Resources,
    ) -> Result<Ledger, ResizeError>;

    /// Returns few and small moves of running containers that make a request fit, in an order in which each move has
    /// capacity on both sides, or the reason why there are none. See [`crate::in_flight`] for the accounting during
    /// the execution.
    fn plan(
        &self,
        ledger: &Ledger,
        request: &Request,
        terms: &Terms,
        limits: &RebalanceLimits,
    ) -> Result<RebalancePlan, PlanError>;

    /// Carries all guarantees over to this machine, after a restart or a change of the machine. Running workloads
    /// keep their allocations. Returns the next ledger, and the memory that the machine does not have.
    fn rebase(&self, ledger: &Ledger) -> (Ledger, Vec<UncoveredMemory>) {
        let mut next = ledger.clone();
        let uncovered = next.rebase(&self.idle());
        (next, uncovered)
    }
}
