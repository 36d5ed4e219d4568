//! What a merge chose from, and why each candidate lost.

use super::merge::{self, Rule};
use crate::{
    explain::{Candidate, Merge, Ranking, Verdict},
    hint::{Mask, NodeIndex},
    policy::TopologyManagerPolicy,
};

/// By what the candidates of a merge compare.
#[derive(Debug)]
pub(super) struct ByRule {
    pub(super) rule: Rule,
    pub(super) nodes: NodeIndex,
}

impl Ranking for ByRule {
    fn candidates(&self, merge: &Merge) -> Vec<Candidate> {
        let lists = merge::lists(merge.hints.iter().map(|(_, hints)| hints));
        let candidates = merge::candidates(&self.rule, &self.nodes, &lists);
        let best = merge.best.affinity.as_ref().map_or(self.nodes.all(), |set| self.nodes.mask(set));
        let chosen = Chosen {
            mask: best,
            preferred: merge.best.preferred,
            found: candidates.iter().any(|candidate| candidate.mask == best),
            aim: merge::aim(&lists),
        };
        candidates
            .into_iter()
            .map(|candidate| Candidate {
                affinity: self.nodes.set(candidate.mask),
                preferred: candidate.preferred,
                verdict: self.verdict(candidate, &chosen),
            })
            .collect()
    }
}

/// What was chosen.
struct Chosen {
    mask: Mask,
    preferred: bool,
    /// Whether it is one of the candidates.
    found: bool,
    /// The number of nodes that the most demanding resource needs.
    aim: u32,
}

impl ByRule {
    fn verdict(&self, candidate: merge::Candidate, chosen: &Chosen) -> Verdict {
        if candidate.mask == chosen.mask && candidate.preferred == chosen.preferred {
            return Verdict::Chosen;
        }
        if self.rule.policy == TopologyManagerPolicy::SingleNumaNode && !candidate.preferred || !chosen.found
        {
            return Verdict::NotOnePreferredNode;
        }
        if chosen.preferred && !candidate.preferred {
            return Verdict::NotPreferred;
        }
        let (nodes, best) = (candidate.mask.count_ones(), chosen.mask.count_ones());
        if nodes < best {
            return Verdict::TooNarrow { nodes, needed: chosen.aim };
        }
        if nodes > best {
            return Verdict::Wider { nodes, chosen: best };
        }
        match (self.rule.distance(candidate.mask), self.rule.distance(chosen.mask)) {
            (Some(distance), Some(chosen)) if distance > chosen => Verdict::Farther { distance, chosen },
            _ => Verdict::HigherIds,
        }
    }
}
