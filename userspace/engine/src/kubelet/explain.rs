//! Candidates of a merge, and the reason why each won or lost.

use super::merge::{self, MergeRule};
use crate::{
    explain::{Merge, MergeCandidate, MergeVerdict, Ranking},
    hint::{Mask, NodeIndex},
    policy::TopologyManagerPolicy,
};

/// Ranking by a merge rule.
#[derive(Debug)]
pub(super) struct RuleRanking {
    pub(super) rule: MergeRule,
    pub(super) nodes: NodeIndex,
}

impl Ranking for RuleRanking {
    fn candidates(&self, merge: &Merge) -> Vec<MergeCandidate> {
        let lists = merge::hints_by_resource(merge.hints.iter().map(|(_, hints)| hints));
        let candidates = merge::candidates(&self.rule, self.nodes.all(), &lists);
        let best = &merge.best;
        let chosen = best.affinity.as_ref().map_or(self.nodes.all(), |set| self.nodes.mask(set));
        let found = candidates.iter().any(|&(mask, _)| mask == chosen);
        let aim = merge::aim(&lists);
        let candidate = |(mask, preferred)| {
            let verdict = if (mask, preferred) == (chosen, best.preferred) {
                MergeVerdict::Chosen
            } else if self.rule.policy == TopologyManagerPolicy::SingleNumaNode && !preferred || !found {
                MergeVerdict::NotOnePreferredNode
            } else if best.preferred && !preferred {
                MergeVerdict::NotPreferred
            } else {
                self.losing_reason(chosen, mask, aim)
            };
            MergeCandidate { affinity: self.nodes.set(mask), preferred, verdict }
        };
        candidates.into_iter().map(candidate).collect()
    }
}

impl RuleRanking {
    /// Returns the reason why one of two candidates with equal preference lost. `aim` is the number of nodes that the
    /// most demanding resource needs.
    fn losing_reason(&self, chosen: Mask, lost: Mask, aim: u32) -> MergeVerdict {
        let (nodes, best) = (lost.count_ones(), chosen.count_ones());
        if nodes < best {
            return MergeVerdict::TooNarrow { nodes, needed: aim };
        }
        if nodes > best {
            return MergeVerdict::Wider { nodes, chosen: best };
        }
        match (self.rule.distance(lost), self.rule.distance(chosen)) {
            (Some(distance), Some(chosen)) if distance > chosen => MergeVerdict::Farther { distance, chosen },
            _ => MergeVerdict::HigherIds,
        }
    }
}
