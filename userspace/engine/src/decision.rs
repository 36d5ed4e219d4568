//! The outcome of an admission.

use std::{error::Error, fmt};

use numaward_topology::NodeId;

use crate::{
    explain::Explanation,
    hint::Resource,
    kubelet::AllocateError,
    ledger::{Allocation, Ledger},
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Whose request.
    pub owner: OwnerId,
    /// The container at which it failed; `None` if all were considered together.
    pub container: Option<ContainerName>,
    /// In a word.
    pub reason: Reason,
    /// In a sentence; the kubelet's.
    pub message: String,
    /// What was wrong, as data.
    pub cause: Cause,
    /// What was requested and what was free, by node and resource, just before.
    pub shortfalls: Vec<Shortfall>,
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason, self.message)
    }
}

impl Error for Rejection {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.source()
    }
}

/// The kubelet's word for a rejection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The hints cannot be merged as the topology policy demands.
    TopologyAffinityError,
    /// Whole cores cannot be given.
    SmtAlignmentError,
    /// Something could not be given after all.
    UnexpectedAdmissionError,
    /// The request contradicts itself.
    InvalidRequest,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TopologyAffinityError => "TopologyAffinityError",
            Self::SmtAlignmentError => "SMTAlignmentError",
            Self::UnexpectedAdmissionError => "UnexpectedAdmissionError",
            Self::InvalidRequest => "InvalidRequest",
        })
    }
}

/// What was wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cause {
    /// The merge of hints was refused.
    #[error("Resources cannot be allocated with Topology locality")]
    Topology,
    /// A resource could not be given.
    #[error(transparent)]
    Allocate(#[from] AllocateError),
    /// Two containers have the same name.
    #[error("the request has two containers named {0:?}")]
    DuplicateContainer(String),
    /// There is nothing to admit.
    #[error("the request has no containers")]
    NoContainers,
}

impl Cause {
    /// The kubelet's word for it.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Topology => Reason::TopologyAffinityError,
            Self::Allocate(AllocateError::Cpus(error)) if error.is_alignment() => Reason::SmtAlignmentError,
            Self::Allocate(_) => Reason::UnexpectedAdmissionError,
            Self::DuplicateContainer(_) | Self::NoContainers => Reason::InvalidRequest,
        }
    }

    /// The kubelet's sentence for it.
    pub fn message(&self) -> String {
        match self.reason() {
            Reason::UnexpectedAdmissionError => {
                format!("Allocate failed due to {self}, which is unexpected")
            }
            _ => self.to_string(),
        }
    }
}

/// What a node had for a request that was rejected.
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
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, resource, requested, free } = self;
        write!(f, "node {node}: {resource} requested {requested}, free {free}")
    }
}
