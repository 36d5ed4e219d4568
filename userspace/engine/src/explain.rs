//! Explanations of decisions, as data.
//!
//! An explanation has all hints of all providers and the result of each merge. The candidates of a merge, and why
//! each lost, are computed on demand: a large machine has many candidates, and most explanations are never read.

use std::{fmt, sync::Arc};

use numaward_topology::{CpuSet, NodeSet};

use crate::{
    conditions::WithheldMemory,
    hint::{Hint, Provider, ProviderHints},
    placement_search::PlacementSearch,
    request::ContainerName,
};

/// Explanation of a decision.
#[derive(Clone, Debug, Default)]
pub struct Explanation {
    /// Merges of hints, in order. Empty without a topology policy.
    pub merges: Vec<Merge>,
    /// Searches of the strategy `native`, in order. Empty with the strategy `kubelet`.
    pub searches: Vec<PlacementSearch>,
    /// Work that the strategy `native` spent, about one unit for each node and resource it looked at. Limited by
    /// [`crate::native::MAX_WORK`].
    pub work: u64,
    /// True if the request was refused because the work limit was reached. An acceptable placement may exist.
    pub work_limit_reached: bool,
    /// Memory that is free in the ledger but was not offered, because programs without a guarantee use it.
    pub withheld: Vec<WithheldMemory>,
    /// CPUs that are offline, if the request needs CPUs.
    pub offline_cpus: CpuSet,
    /// CPUs in cpuset partitions of other programs, if the request needs CPUs.
    pub partition_cpus: CpuSet,
    /// Nodes that the terms name and the machine does not have.
    pub absent_nodes: NodeSet,
}

/// One merge of hints.
#[derive(Clone, Debug)]
pub struct Merge {
    /// Container for which hints were merged; `None` for all containers together.
    pub container: Option<ContainerName>,
    /// Hints by provider.
    pub hints: Vec<(Provider, ProviderHints)>,
    /// Result of the merge.
    pub best: Hint,
    /// True if the topology policy accepts the result.
    pub accepted: bool,
    pub(crate) ranking: Arc<dyn Ranking>,
}

/// Set of nodes that could have been the result of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeCandidate {
    pub affinity: NodeSet,
    /// True if every resource prefers exactly these nodes.
    pub preferred: bool,
    pub verdict: MergeVerdict,
}

/// Reason why a candidate won or lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum MergeVerdict {
    #[display("chosen")]
    Chosen,
    /// The policy only accepts one node that every resource prefers.
    #[display("the policy requires one node that every resource prefers")]
    NotOnePreferredNode,
    /// Another candidate is preferred, this one is not.
    #[display("not preferred by every resource, while another candidate is")]
    NotPreferred,
    /// The candidate has more nodes than the chosen one.
    #[display("{nodes} nodes; the chosen candidate has {chosen}")]
    Wider { nodes: u32, chosen: u32 },
    /// The candidate has fewer nodes than the most demanding resource needs, and the chosen one is closer to that
    /// number.
    #[display("{nodes} nodes; a resource needs {needed}")]
    TooNarrow { nodes: u32, needed: u32 },
    /// The distances within the candidate are larger.
    #[display("sum of distances {distance}; that of the chosen candidate is {chosen}")]
    Farther {
        /// Sum of the distances within the candidate.
        distance: u64,
        /// Sum of the distances within the chosen candidate.
        chosen: u64,
    },
    /// The candidate is equally good, but the chosen one has lower node ids.
    #[display("equally good, but its node ids are higher")]
    HigherIds,
}

/// Computes the candidates of a merge. Implemented by the strategy that merged.
pub(crate) trait Ranking: fmt::Debug + Send + Sync {
    /// Returns all candidates, best first, with the reason why each won or lost.
    fn candidates(&self, merge: &Merge) -> Vec<MergeCandidate>;
}

impl Merge {
    /// Returns all candidates, best first, with the reason why each won or lost.
    ///
    /// With the strategy `kubelet` this takes n·2ⁿ steps for n nodes.
    pub fn candidates(&self) -> Vec<MergeCandidate> {
        self.ranking.candidates(self)
    }
}
