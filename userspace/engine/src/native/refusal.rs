//! Refusals of the strategy `native`: the requested and the free amounts.

use std::fmt;

use numaward_topology::ZoneKind;

use crate::{
    decision::{Cause, Shortfall},
    hint::Resource,
    policy::TopologyManagerPolicy,
    quantity::Quantity,
    request::ContainerName,
};

/// Reason why the strategy `native` refuses a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementRefusal {
    /// No set of nodes that the policy permits has enough free capacity.
    InsufficientCapacity {
        /// `None` for the only container, and for all running containers together.
        container: Option<ContainerName>,
        policy: TopologyManagerPolicy,
        /// True if the idle machine could serve the request.
        fits_idle_machine: bool,
        /// Kind of containers that do not fit.
        kind: ContainerKind,
        /// Requested and free amounts by node.
        missing: Vec<Shortfall>,
    },
    /// No node or CPU of the machine meets a term of the request.
    UnmetTerm(String),
    /// The work limit was reached. Contains the first refusal that was found.
    WorkLimitReached(Box<PlacementRefusal>),
    /// With `strict-cpu-reservation`: containers without exclusive CPUs run, but no CPU would remain in the shared
    /// pool.
    SharedPool {
        /// Number of requested CPUs.
        requested: u64,
        /// Number of free CPUs in the shared pool.
        free: u64,
    },
    /// With `full-pcpus-only`: the request is not a sum of core sizes.
    Cores(String),
    /// The free CPUs suffice, but whole cores do not add up to the request.
    CoresDoNotAddUp,
    /// The machine has no memory of this kind.
    UnknownMemoryKind(ZoneKind),
    /// The amount exceeds every possible machine.
    TooLarge { resource: Resource, amount: Quantity },
    /// The sum over all containers exceeds every possible machine.
    SumTooLarge,
}

impl PlacementRefusal {
    /// Returns the refusal of a request with one container, which needs no name.
    pub(super) fn of_only_container(mut self) -> Self {
        match &mut self {
            Self::InsufficientCapacity { container, .. } => *container = None,
            Self::WorkLimitReached(first) => {
                return Self::WorkLimitReached(Box::new(first.clone().of_only_container()));
            }
            _ => {}
        }
        self
    }

    /// Returns the requested and free amounts by node.
    pub(super) fn shortfalls(&self) -> &[Shortfall] {
        match self {
            Self::InsufficientCapacity { missing, .. } => missing,
            Self::WorkLimitReached(first) => first.shortfalls(),
            _ => &[],
        }
    }
}

/// Kind of containers in a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContainerKind {
    /// A container that keeps running, or all of them.
    Running,
    /// An init container that ends before the next container starts.
    Init,
}

impl fmt::Display for PlacementRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InsufficientCapacity { container, policy, fits_idle_machine, kind, .. } => {
                match (container, kind) {
                    (Some(name), ContainerKind::Running) => write!(f, "container {name}")?,
                    (Some(name), ContainerKind::Init) => write!(f, "init container {name}")?,
                    (None, _) => f.write_str("the request")?,
                }
                let rule = match policy {
                    TopologyManagerPolicy::SingleNumaNode => "does not fit on one node",
                    TopologyManagerPolicy::Restricted => {
                        "does not fit with each resource on the smallest number of nodes that could hold it"
                    }
                    TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort => {
                        "does not fit on any set of nodes"
                    }
                };
                write!(f, " {rule} (policy {policy})")?;
                if !fits_idle_machine {
                    f.write_str("; not even an idle machine could hold it")?;
                }
                Ok(())
            }
            Self::WorkLimitReached(first) => {
                write!(f, "{first}; the search stopped at its work limit: the request is too complex")
            }
            Self::SharedPool { requested, free } => write!(
                f,
                "cpu requested {requested}, free {free}: the shared pool would have no CPU left for the containers that run there"
            ),
            Self::UnmetTerm(problem) | Self::Cores(problem) => f.write_str(problem),
            Self::CoresDoNotAddUp => f.write_str("the free whole cores do not add up to the requested CPUs"),
            Self::UnknownMemoryKind(kind) => write!(f, "no node has {kind}"),
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
