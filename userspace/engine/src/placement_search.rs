//! Searches of the strategy `native`, for explanations.
//!
//! An explanation has the best candidates of each search with their ranks. The reason why a candidate lost is
//! computed on demand: the first criterion in which its rank differs from that of the chosen candidate.

use std::fmt;

use numaward_topology::NodeSet;

use crate::{hint::Resource, policy_names::TopologyManagerPolicy, request::ContainerName};

/// Rank of a candidate. The first criterion that differs decides, and the smaller value wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// Number of nodes, including those of devices.
    pub nodes: u64,
    /// Sum of the numbers of nodes of each resource.
    pub nodes_per_resource: u64,
    /// Number of nodes that are not preferred.
    pub not_preferred: u64,
    /// Sum of the distances from devices to the nodes.
    pub from_devices: u64,
    /// Sum of the distances between nodes of CPUs; each pair counts once.
    pub cpu_to_cpu: u64,
    /// Sum of the distances from each node of CPUs to each node of memory. Without exclusive CPUs, sum of the
    /// distances from each node to the nearest node with CPUs.
    pub cpu_to_memory: u64,
    /// Sum of the distances between nodes of memory; each pair counts once.
    pub memory_to_memory: u64,
    /// Decrease of the sum over all nodes of free CPUs times free bytes of base memory.
    pub stranded: u128,
    /// Sum of the load by other nodes ([`crate::HostConditions::load`]).
    pub load: u64,
}

/// Criterion of a rank, in order of precedence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RankCriterion {
    /// [`Rank::nodes`]
    Nodes,
    /// [`Rank::nodes_per_resource`]
    NodesPerResource,
    /// [`Rank::not_preferred`]
    NotPreferred,
    /// [`Rank::from_devices`]
    Devices,
    /// [`Rank::cpu_to_cpu`]
    CpuToCpu,
    /// [`Rank::cpu_to_memory`]
    CpuToMemory,
    /// [`Rank::memory_to_memory`]
    MemoryToMemory,
    /// [`Rank::stranded`]
    Stranded,
    /// [`Rank::load`]
    Load,
    /// Node ids.
    Ids,
}

/// Possible placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementCandidate {
    /// All nodes.
    pub nodes: NodeSet,
    /// Nodes by resource.
    pub by_resource: Vec<(Resource, NodeSet)>,
    pub rank: Rank,
}

/// Reason why a candidate won or lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementVerdict {
    Chosen,
    /// The candidate is better, but another container of the request would not fit.
    BlocksOtherContainer,
    /// The request was refused.
    Refused,
    /// The chosen candidate is better by this criterion.
    Worse {
        by: RankCriterion,
        /// Value of the candidate.
        own: u128,
        /// Value of the chosen candidate.
        chosen: u128,
    },
}

impl fmt::Display for PlacementVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chosen => f.write_str("chosen"),
            Self::BlocksOtherContainer => {
                f.write_str("better, but another container of the request would not fit")
            }
            Self::Refused => f.write_str("possible, but the request was refused for another container"),
            Self::Worse { by, own, chosen } => match by {
                RankCriterion::Nodes => write!(f, "{own} nodes; the chosen candidate has {chosen}"),
                RankCriterion::NodesPerResource => {
                    write!(f, "{own} nodes over all resources; the chosen candidate has {chosen}")
                }
                RankCriterion::NotPreferred => {
                    write!(f, "{own} nodes that are not preferred; the chosen candidate has {chosen}")
                }
                RankCriterion::Devices => {
                    write!(
                        f,
                        "sum of distances from its devices {own}; that of the chosen candidate is {chosen}"
                    )
                }
                RankCriterion::CpuToCpu => {
                    write!(
                        f,
                        "sum of distances between its CPUs {own}; that of the chosen candidate is {chosen}"
                    )
                }
                RankCriterion::CpuToMemory => {
                    write!(
                        f,
                        "sum of distances from CPUs to memory {own}; that of the chosen candidate is {chosen}"
                    )
                }
                RankCriterion::MemoryToMemory => {
                    write!(
                        f,
                        "sum of distances between its memory {own}; that of the chosen candidate is {chosen}"
                    )
                }
                RankCriterion::Stranded => f.write_str(
                    "leaves more CPUs without memory, or memory without CPUs, than the chosen candidate",
                ),
                RankCriterion::Load => f.write_str("equally good, but other nodes use its nodes more"),
                RankCriterion::Ids => f.write_str("equally good, but its node ids are higher"),
            },
        }
    }
}

/// Search for one container, or for all running containers together.
#[derive(Clone, Debug)]
pub struct PlacementSearch {
    /// `None` for all containers together.
    pub container: Option<ContainerName>,
    /// Topology policy of the search.
    pub policy: TopologyManagerPolicy,
    /// Number of compared candidates.
    pub considered: u64,
    /// True if sets of nodes were skipped, so that better candidates may exist.
    pub is_incomplete: bool,
    /// Best candidates, best first. More may have been considered.
    pub candidates: Vec<PlacementCandidate>,
    /// Index of the chosen candidate.
    pub chosen: Option<usize>,
}

impl PlacementSearch {
    /// Returns the verdicts in the order of the candidates.
    pub fn verdicts(&self) -> Vec<PlacementVerdict> {
        let chosen = self.chosen.and_then(|index| self.candidates.get(index));
        let verdict = |(index, candidate): (usize, &PlacementCandidate)| match (chosen, self.chosen) {
            (Some(_), Some(chosen)) if index == chosen => PlacementVerdict::Chosen,
            (Some(_), Some(chosen)) if index < chosen => PlacementVerdict::BlocksOtherContainer,
            (Some(chosen), _) => compare(&candidate.rank, &chosen.rank),
            (None, _) => PlacementVerdict::Refused,
        };
        self.candidates.iter().enumerate().map(verdict).collect()
    }
}

/// Returns the first criterion in which two ranks differ.
fn compare(own: &Rank, chosen: &Rank) -> PlacementVerdict {
    let numbers = |rank: &Rank| {
        [
            (RankCriterion::Nodes, rank.nodes.into()),
            (RankCriterion::NodesPerResource, rank.nodes_per_resource.into()),
            (RankCriterion::NotPreferred, rank.not_preferred.into()),
            (RankCriterion::Devices, rank.from_devices.into()),
            (RankCriterion::CpuToCpu, rank.cpu_to_cpu.into()),
            (RankCriterion::CpuToMemory, rank.cpu_to_memory.into()),
            (RankCriterion::MemoryToMemory, rank.memory_to_memory.into()),
            (RankCriterion::Stranded, rank.stranded),
            (RankCriterion::Load, rank.load.into()),
        ]
    };
    let both = numbers(own).into_iter().zip(numbers(chosen));
    let differing =
        both.map(|((by, own), (_, chosen))| (by, own, chosen)).find(|(_, own, chosen)| own != chosen);
    let (by, own, chosen) = differing.unwrap_or((RankCriterion::Ids, 0, 0));
    PlacementVerdict::Worse { by, own, chosen }
}
