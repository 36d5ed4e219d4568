//! The outcome of an admission.
//!
//! Nothing here belongs to one strategy. What a strategy has to say beyond these words is the text of a [`Cause`].

use std::fmt;

use numaward_topology::NodeId;

use crate::{
    explain::Explanation,
    hint::{Provider, Resource},
    ledger::{Allocation, Ledger},
    quantity::Quantity,
    request::{ContainerName, OwnerId},
};

/// What became of a request, and the ledger afterwards.
///
/// The ledger is the successor in either case: with the strategy `kubelet` a rejection can change it too (what
/// was given to the first containers stays until the next admission). Who only wants to know what would happen
/// drops it.
#[derive(Clone, Debug)]
pub struct Decision {
    /// What is given, or why nothing is.
    pub outcome: Result<Vec<Grant>, Box<Rejection>>,
    /// How it came about.
    pub explanation: Explanation,
    /// The ledger from now on.
    pub ledger: Ledger,
}

/// What one container is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The container.
    pub container: ContainerName,
    /// What it holds. Empty for a container that uses the shared pool and any memory.
    pub allocation: Allocation,
}

/// Why a request is rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct Rejection {
    /// Whose request.
    pub owner: OwnerId,
    /// The container at which it failed; `None` if all were considered together.
    pub container: Option<ContainerName>,
    /// In a word.
    pub reason: Reason,
    /// In a sentence; the strategy's.
    pub message: String,
    /// What was wrong, as data.
    pub cause: Cause,
    /// Missing capacity: what was requested and what was free, by node and resource, just before.
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

/// A rejection in a word: the kubelet's, as its users know these.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, derive_more::Display)]
pub enum Reason {
    /// The hints cannot be merged as the topology policy demands.
    TopologyAffinityError,
    /// Whole cores cannot be given.
    #[display("SMTAlignmentError")]
    SmtAlignmentError,
    /// Containers that share what their pod has would be left with nothing.
    EmptyPodSharedPoolError,
    /// Something could not be given after all.
    UnexpectedAdmissionError,
    /// The request contradicts itself.
    InvalidRequest,
}

/// What was wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// No nodes are such as the topology policy demands.
    #[error("no nodes can serve all resources as the topology policy demands")]
    Topology,
    /// Whole cores could not be given.
    #[error("{0}")]
    Cores(String),
    /// Some containers of a pod have all that it has as a whole, and others nothing.
    #[error("{1}")]
    NothingToShare(Provider, String),
    /// Exclusive CPUs could not be given.
    #[error("{0}")]
    Cpus(String),
    /// Memory could not be given.
    #[error("{0}")]
    Memory(String),
    /// No nodes that the topology policy allows have enough of everything.
    #[error("{0}")]
    InsufficientCapacity(String),
    /// Two containers have the same name.
    #[error("the request has two containers named {0:?}")]
    DuplicateContainer(String),
    /// Its terms do not go with the configuration or the machine.
    #[error("{0}")]
    Terms(String),
    /// There is nothing to admit.
    #[error("the request has no containers")]
    NoContainers,
}

impl Cause {
    /// The word for it.
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

/// Missing capacity: what a node had for a request that was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortfall {
    /// The node.
    pub node: NodeId,
    /// The resource.
    pub resource: Resource,
    /// What was requested in all: CPUs, or bytes.
    pub requested: u64,
    /// What this node had free: CPUs, or bytes.
    pub free: u64,
    /// What it would have had besides, if others did not use it beyond what is reserved: bytes.
    pub withheld: u64,
}

impl Shortfall {
    /// Where nothing is withheld.
    pub(crate) fn new(node: NodeId, resource: Resource, requested: u64, free: u64) -> Self {
        Self { node, resource, requested, free, withheld: 0 }
    }
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, resource, requested, free, withheld } = self;
        write!(f, "node {node}: {resource} requested {requested}, free {free}")?;
        if *withheld > 0 {
            write!(f, " ({withheld} more are in use outside the ledger)")?;
        }
        Ok(())
    }
}

/// Why a container's resources cannot be changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResizeError {
    /// Exclusive CPUs are whole ones.
    #[error("{0} CPUs are not a whole number: a container with exclusive CPUs keeps to whole CPUs")]
    NotWholeCpus(Quantity),
    /// Cores must stay whole.
    #[error("{0}")]
    Cores(String),
    /// An amount is more than any machine has.
    #[error("{resource}: {amount} is more than any machine has")]
    TooLarge {
        /// The resource.
        resource: Resource,
        /// The amount.
        amount: Quantity,
    },
    /// With `strict-cpu-reservation`: the shared pool would have no CPU left although somebody runs there.
    #[error(
        "cpu requested {requested}, free {free}: the shared pool would have no CPU left for those that run there"
    )]
    SharedPool {
        /// CPUs that are missing to what it is to have.
        requested: u64,
        /// CPUs that the shared pool has.
        free: u64,
    },
    /// It has a part of what its pod has as a whole.
    #[error("its pod has resources as a whole, which stay as they were divided among its containers")]
    PartOfWhole,
    /// Capacity is missing on its nodes.
    #[error("what is missing is not free on its nodes: {}", listed(.0))]
    Shortfall(Vec<Shortfall>),
}

fn listed(shortfalls: &[Shortfall]) -> String {
    shortfalls.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
