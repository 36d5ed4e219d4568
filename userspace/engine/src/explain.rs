//! Why a decision came out as it did, as data.
//!
//! An explanation keeps every hint of every provider and the result of each merge. What follows from these,
//! the candidates of a merge and why each lost, is worked out when asked for: on a large machine there are
//! many, and nobody looks at most of them.

use std::{fmt, sync::Arc};

use numaward_topology::{CpuSet, NodeSet};

use crate::{
    conditions::WithheldMemory,
    hint::{Hint, Provider, ProviderHints},
    placement_search::PlacementSearch,
    request::ContainerName,
};

/// Why a decision came out as it did.
#[derive(Clone, Debug, Default)]
pub struct Explanation {
    /// The merges, in order. Without a topology policy there are none.
    pub merges: Vec<Merge>,
    /// The searches of the strategy `native`, in the order in which they were decided. The kubelet's has none.
    pub searches: Vec<PlacementSearch>,
    /// How much the strategy `native` looked at, in nodes and resources; it ends at [`crate::native::MAX_WORK`].
    pub work: u64,
    /// Whether the request was refused because nothing of that was left: there may be a placement that was not seen.
    pub work_limit_reached: bool,
    /// What was free and not offered to this request, as others use it.
    pub withheld: Vec<WithheldMemory>,
    /// CPUs that are offline, if CPUs are asked for.
    pub offline_cpus: CpuSet,
    /// CPUs of other programs' cpuset partitions, likewise.
    pub partition_cpus: CpuSet,
}

/// One merge of hints.
#[derive(Clone, Debug)]
pub struct Merge {
    /// For which container; `None` for all of them together.
    pub container: Option<ContainerName>,
    /// What each provider said.
    pub hints: Vec<(Provider, ProviderHints)>,
    /// The result.
    pub best: Hint,
    /// Whether the topology policy took it.
    pub accepted: bool,
    pub(crate) ranking: Arc<dyn Ranking>,
}

/// A set of nodes that could have been the result of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeCandidate {
    /// The nodes.
    pub affinity: NodeSet,
    /// Whether every resource prefers just these nodes.
    pub preferred: bool,
    /// What became of it.
    pub verdict: MergeVerdict,
}

/// What became of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum MergeVerdict {
    /// It is the result.
    #[display("chosen")]
    Chosen,
    /// The policy takes one node only, preferred by every resource.
    #[display("not one node that every resource prefers")]
    NotOnePreferredNode,
    /// Another is preferred, this is not.
    #[display("not preferred by every resource, while another is")]
    NotPreferred,
    /// It has more nodes than the chosen one.
    #[display("{nodes} nodes where {chosen} do")]
    Wider {
        /// How many it has.
        nodes: u32,
        /// How many the chosen one has.
        chosen: u32,
    },
    /// It has fewer nodes than the most demanding resource needs, and the chosen one comes closer.
    #[display("{nodes} nodes where a resource needs {needed}")]
    TooNarrow {
        /// How many it has.
        nodes: u32,
        /// How many are needed.
        needed: u32,
    },
    /// Its nodes are farther from each other.
    #[display("distances add up to {distance}, those of the chosen nodes to {chosen}")]
    Farther {
        /// The sum of its distances.
        distance: u64,
        /// The sum of the distances of the chosen one.
        chosen: u64,
    },
    /// It is as good, but the chosen one has lower node ids.
    #[display("as good, but its node ids are higher")]
    HigherIds,
}

/// Works out the candidates of a merge. The strategy that merged knows how.
pub(crate) trait Ranking: fmt::Debug + Send + Sync {
    /// All candidates, best first, and why each but the chosen one lost.
    fn candidates(&self, merge: &Merge) -> Vec<MergeCandidate>;
}

impl Merge {
    /// All candidates, best first, and why each but the first lost.
    ///
    /// With the strategy `kubelet` this takes n·2ⁿ steps for n nodes.
    pub fn candidates(&self) -> Vec<MergeCandidate> {
        self.ranking.candidates(self)
    }
}
