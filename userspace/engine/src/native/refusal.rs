//! Why a request is refused: what was asked for, and what each node has of it.

use std::fmt;

use numaward_topology::ZoneKind;

use crate::{
    decision::{Cause, Shortfall},
    hint::Resource,
    policy::TopologyManagerPolicy,
    quantity::Quantity,
    request::ContainerName,
};

/// As many nodes are named in a sentence; the data has all.
const MAX_NODES_IN_MESSAGE: usize = 16;

/// Why the strategy `native` refuses a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementRefusal {
    /// No nodes that the policy allows have enough free.
    NoRoom {
        /// The container; `None` for all that run together.
        container: Option<ContainerName>,
        /// The policy.
        policy: TopologyManagerPolicy,
        /// Whether the empty machine would have had room.
        ever: bool,
        /// For whom there is no room.
        what: ContainerKind,
        /// What is requested and free by node.
        missing: Vec<Shortfall>,
    },
    /// More would have to be looked at than a decision may. What was found first.
    GaveUp(Box<PlacementRefusal>),
    /// With `strict-cpu-reservation`: the shared pool would have no CPU left although somebody runs there.
    SharedPool {
        /// CPUs that were requested.
        requested: u64,
        /// CPUs that the shared pool has.
        free: u64,
    },
    /// With `full-pcpus-only`: not a number of whole cores.
    Cores(String),
    /// CPUs were counted that could not be taken.
    Uncollected {
        /// The container.
        container: ContainerName,
    },
    /// The machine has no memory of a kind.
    UnknownKind {
        /// The kind.
        kind: ZoneKind,
        /// What was requested.
        requested: Quantity,
    },
    /// An amount is more than any machine has.
    TooLarge {
        /// The resource.
        resource: Resource,
        /// The amount.
        amount: Quantity,
    },
    /// All containers together ask for more than any machine has.
    SumTooLarge,
}

impl PlacementRefusal {
    /// What is requested and free by node.
    pub(super) fn shortfalls(&self) -> &[Shortfall] {
        match self {
            Self::NoRoom { missing, .. } => missing,
            Self::GaveUp(first) => first.shortfalls(),
            _ => &[],
        }
    }
}

/// What there was no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerKind {
    /// A container that goes on running, or all of these.
    Running,
    /// A container that ends before the others start.
    Init,
}

impl fmt::Display for PlacementRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoom { container, policy, ever, what, missing } => {
                match (container, what) {
                    (Some(name), ContainerKind::Running) => write!(f, "container {name}")?,
                    (Some(name), ContainerKind::Init) => write!(f, "init container {name}")?,
                    (None, _) => f.write_str("the containers together")?,
                }
                let rule = match policy {
                    TopologyManagerPolicy::SingleNumaNode => "cannot have all on one node",
                    TopologyManagerPolicy::Restricted => {
                        "cannot have each resource on its least number of nodes, the smaller sets within the larger"
                    }
                    TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort => {
                        "cannot be placed on any nodes"
                    }
                };
                write!(f, " {rule} (policy {policy}): ")?;
                if !ever {
                    f.write_str("not even the empty machine could hold it; ")?;
                }
                for (index, shortfall) in missing.iter().take(MAX_NODES_IN_MESSAGE).enumerate() {
                    write!(f, "{}{shortfall}", if index > 0 { "; " } else { "" })?;
                }
                if missing.len() > MAX_NODES_IN_MESSAGE {
                    write!(f, "; and {} more", missing.len() - MAX_NODES_IN_MESSAGE)?;
                }
                Ok(())
            }
            Self::GaveUp(first) => {
                write!(f, "{first}; the search ended before everything was tried: the request is too complex")
            }
            Self::SharedPool { requested, free } => write!(
                f,
                "cpu requested {requested}, free {free}: the shared pool would have no CPU left for those that run there"
            ),
            Self::Cores(error) => f.write_str(error),
            Self::Uncollected { container } => {
                write!(f, "container {container}: the free CPUs cannot be put together to whole cores")
            }
            Self::UnknownKind { kind, requested } => {
                write!(f, "{kind} requested {requested}, free 0: no node has any")
            }
            Self::TooLarge { resource, amount } => {
                write!(f, "{resource} requested {amount}: more than any machine has")
            }
            Self::SumTooLarge => f.write_str("all containers together request more than any machine has"),
        }
    }
}

impl std::error::Error for PlacementRefusal {}

impl From<PlacementRefusal> for Cause {
    fn from(refusal: PlacementRefusal) -> Self {
        match refusal {
            PlacementRefusal::Cores(error) => Self::Cores(error),
            refusal => Self::InsufficientCapacity(refusal.to_string()),
        }
    }
}
