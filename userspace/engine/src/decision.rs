//! The outcome of an admission.
//!
//! These types are common to all strategies. Details that only one strategy has are in the text of a [`Cause`].

use std::fmt;

use numaward_topology::{Bytes, NodeId};

use crate::{
    explain::Explanation,
    hint::{Provider, Resource},
    ledger::{Allocation, Ledger},
    quantity::Quantity,
    request::{ContainerName, OwnerId},
};

/// Outcome of a request and the resulting ledger.
///
/// The ledger replaces the previous one in either case: with the strategy `kubelet`, a rejection can change it too,
/// because the allocations of the first containers stay until the next admission. A caller that only asks what would
/// happen drops the ledger.
#[derive(Clone, Debug)]
pub struct Decision {
    /// Grants by container, or the reason for the rejection.
    pub outcome: Result<Vec<Grant>, Box<Rejection>>,
    pub explanation: Explanation,
    /// Ledger after the decision.
    pub ledger: Ledger,
}

/// Allocation for one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub container: ContainerName,
    /// Empty if the container uses the shared pool and any memory.
    pub allocation: Allocation,
}

/// Reason why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({reason})")]
pub struct Rejection {
    pub owner: OwnerId,
    /// Container that could not be served; `None` if all containers were considered together.
    pub container: Option<ContainerName>,
    /// Reason in one word.
    pub reason: Reason,
    /// Explanation in one sentence, in the words of the strategy.
    pub message: String,
    /// Cause as data.
    pub cause: Cause,
    /// Missing capacity by node and resource, immediately before the rejection.
    pub shortfalls: Vec<Shortfall>,
}

impl Rejection {
    pub(crate) fn new(
        owner: &OwnerId,
        container: Option<ContainerName>,
        cause: Cause,
        message: String,
        shortfalls: Vec<Shortfall>,
    ) -> Self {
        Self { owner: owner.clone(), container, reason: cause.reason(), message, cause, shortfalls }
    }
}

/// Rejection reason in one word. The kubelet uses the same words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, derive_more::Display)]
pub enum Reason {
    /// No NUMA nodes satisfy the topology policy.
    TopologyAffinityError,
    /// The request cannot be served with whole cores.
    #[display("SMTAlignmentError")]
    SmtAlignmentError,
    /// The other containers would have no part of the pod-level resources.
    EmptyPodSharedPoolError,
    /// Allocation failed after the topology policy had accepted the nodes.
    UnexpectedAdmissionError,
    /// The request is contradictory.
    InvalidRequest,
}

/// Cause of a rejection.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// No NUMA nodes satisfy the topology policy.
    #[error("no nodes can serve all resources as the topology policy demands")]
    Topology,
    /// The request cannot be served with whole cores.
    #[error("{0}")]
    Cores(String),
    /// Some containers use all pod-level resources, and the remaining ones would have nothing.
    #[error("{1}")]
    NothingToShare(Provider, String),
    /// Exclusive CPUs cannot be allocated.
    #[error("{0}")]
    Cpus(String),
    /// Memory cannot be allocated.
    #[error("{0}")]
    Memory(String),
    /// No nodes that the topology policy allows have enough free capacity.
    #[error("{0}")]
    InsufficientCapacity(String),
    #[error("the request has two containers named {0:?}")]
    DuplicateContainer(String),
    /// The terms are incompatible with the configuration or the machine.
    #[error("{0}")]
    Terms(String),
    #[error("the request has no containers")]
    NoContainers,
}

impl Cause {
    pub fn reason(&self) -> Reason {
        match self {
            Self::Topology | Self::InsufficientCapacity(_) => Reason::TopologyAffinityError,
            Self::Cores(_) => Reason::SmtAlignmentError,
            Self::NothingToShare(..) => Reason::EmptyPodSharedPoolError,
            Self::Cpus(_) | Self::Memory(_) => Reason::UnexpectedAdmissionError,
            Self::DuplicateContainer(_) | Self::NoContainers | Self::Terms(_) => Reason::InvalidRequest,
        }
    }
}

/// Free capacity of one node for a rejected request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    pub node: NodeId,
    pub resource: Resource,
    /// Requested amount over all nodes: CPUs or bytes.
    pub requested: u64,
    /// Free amount on this node: CPUs or bytes.
    pub free: u64,
    /// Bytes that are free in the ledger but that programs without a guarantee use.
    pub withheld: u64,
}

impl Shortfall {
    /// Makes a shortfall without withheld memory.
    pub(crate) fn new(node: NodeId, resource: Resource, requested: u64, free: u64) -> Self {
        Self { node, resource, requested, free, withheld: 0 }
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, resource, requested, free, withheld } = *self;
        let amount = |amount: u64| match resource {
            Resource::Memory(_) => Bytes(amount).rounded(),
            _ => amount.to_string(),
        };
        write!(f, "node {node}: {resource} requested {}, free {}", amount(requested), amount(free))?;
        if withheld > 0 {
            write!(f, " ({} more are used by workloads without a guarantee)", amount(withheld))?;
        }
        Ok(())
    }
}

/// Reason why the resources of a running container cannot be changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// A container with exclusive CPUs needs a whole number of CPUs.
    #[error("{0} CPUs are not a whole number: a container with exclusive CPUs needs whole CPUs")]
    NotWholeCpus(Quantity),
    /// The request cannot be served with whole cores.
    #[error("{0}")]
    Cores(String),
    /// The amount exceeds every possible machine.
    #[error("{resource}: {amount} is more than any machine has")]
    TooLarge { resource: Resource, amount: Quantity },
    /// With `strict-cpu-reservation`: containers without exclusive CPUs run, but no CPU would remain in the shared
    /// pool.
    #[error(
        "cpu requested {requested}, free {free}: the shared pool would have no CPU left for the containers that run there"
    )]
    SharedPool {
        /// Number of additional CPUs that are needed.
        requested: u64,
        /// Number of free CPUs in the shared pool.
        free: u64,
    },
    /// The container has a part of pod-level resources.
    #[error("its pod has pod-level resources, and their division among the containers cannot change")]
    PartOfWhole,
    /// The nodes of the container have too little free capacity.
    #[error("its nodes have too little free capacity: {}", listed(.0))]
    Shortfall(Vec<Shortfall>),
}

fn listed(shortfalls: &[Shortfall]) -> String {
    shortfalls.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
