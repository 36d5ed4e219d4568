//! What the strategy `native` chose from, and by which rule each candidate lost.
//!
//! An explanation keeps the best candidates of each search with the numbers by which they compare. Why one lost is
//! worked out when asked for: it is the first number that differs from the chosen one's.

use std::fmt;

use numaward_topology::NodeSet;

use crate::{hint::Resource, policy_names::TopologyManagerPolicy, request::ContainerName};

/// By what candidates compare; the first number that differs decides, the smaller one wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// Nodes in all, those of devices included.
    pub nodes: u64,
    /// Nodes of each resource, added up.
    pub nodes_per_resource: u64,
    /// Nodes that are not wished for.
    pub not_preferred: u64,
    /// Distances from devices to the nodes, added up.
    pub from_devices: u64,
    /// Distances between nodes of CPUs, added up; each pair once.
    pub cpu_to_cpu: u64,
    /// Distances from each node of CPUs to each node of memory, added up. Without exclusive CPUs it is the distance from
    /// the nearest node with CPUs to each.
    pub cpu_to_memory: u64,
    /// Distances between nodes of memory, added up; each pair once.
    pub memory_to_memory: u64,
    /// By how much the sum over all nodes of free CPUs times free bytes of base memory goes down.
    pub stranded: u128,
    /// How much the nodes are used by others, added up ([`crate::HostConditions::load`]).
    pub load: u64,
}

/// A rule by which candidates compare, in the order in which they are applied.
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
    /// The ids of the nodes.
    Ids,
}

/// A placement that was possible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementCandidate {
    /// All its nodes.
    pub nodes: NodeSet,
    /// The nodes of each resource.
    pub by_resource: Vec<(Resource, NodeSet)>,
    /// By what it compares.
    pub rank: Rank,
}

/// What became of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementVerdict {
    /// It is the result.
    Chosen,
    /// It is better, but then another container of the same request had no room.
    LeavesNoRoom,
    /// The request was refused.
    Refused,
    /// The chosen one is better by this rule.
    Worse {
        /// The rule.
        by: RankCriterion,
        /// Its number.
        own: u128,
        /// The number of the chosen one.
        chosen: u128,
    },
}

impl fmt::Display for PlacementVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chosen => f.write_str("chosen"),
            Self::LeavesNoRoom => {
                f.write_str("better, but leaves no room for another container of the request")
            }
            Self::Refused => f.write_str("possible, but the request was refused for another container"),
            Self::Worse { by, own, chosen } => match by {
                RankCriterion::Nodes => write!(f, "{own} nodes where {chosen} do"),
                RankCriterion::NodesPerResource => {
                    write!(f, "{own} nodes over all resources where {chosen} do")
                }
                RankCriterion::NotPreferred => {
                    write!(f, "{own} nodes that are not wished for, the chosen one has {chosen}")
                }
                RankCriterion::Devices => {
                    write!(f, "farther from its devices: {own}, the chosen one {chosen}")
                }
                RankCriterion::CpuToCpu => {
                    write!(f, "CPUs farther from each other: {own}, the chosen one {chosen}")
                }
                RankCriterion::CpuToMemory => {
                    write!(f, "memory farther from the CPUs: {own}, the chosen one {chosen}")
                }
                RankCriterion::MemoryToMemory => {
                    write!(f, "memory farther from each other: {own}, the chosen one {chosen}")
                }
                RankCriterion::Stranded => f.write_str(
                    "leaves more CPUs without memory, or memory without CPUs, than the chosen one",
                ),
                RankCriterion::Load => f.write_str("as good, but other nodes use its nodes more"),
                RankCriterion::Ids => f.write_str("as good, but its node ids are higher"),
            },
        }
    }
}

/// One search: for a container, or for all that run together.
#[derive(Clone, Debug)]
pub struct PlacementSearch {
    /// For which container; `None` for all of them together.
    pub container: Option<ContainerName>,
    /// The topology policy that had to be met.
    pub policy: TopologyManagerPolicy,
    /// How many candidates were compared.
    pub considered: u64,
    /// Whether the machine was too large to look at every set of nodes, so that there may be better ones.
    pub is_incomplete: bool,
    /// The best candidates, best first. More were considered than are kept.
    pub candidates: Vec<PlacementCandidate>,
    /// Which of them is the result.
    pub chosen: Option<usize>,
}

impl PlacementSearch {
    /// What became of each candidate, in their order.
    pub fn verdicts(&self) -> Vec<PlacementVerdict> {
        let chosen = self.chosen.and_then(|index| self.candidates.get(index));
        let verdict = |(index, candidate): (usize, &PlacementCandidate)| match (chosen, self.chosen) {
            (Some(_), Some(chosen)) if index == chosen => PlacementVerdict::Chosen,
            (Some(_), Some(chosen)) if index < chosen => PlacementVerdict::LeavesNoRoom,
            (Some(chosen), _) => compare(&candidate.rank, &chosen.rank),
            (None, _) => PlacementVerdict::Refused,
        };
        self.candidates.iter().enumerate().map(verdict).collect()
    }
}

/// The first rule by which two differ.
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
