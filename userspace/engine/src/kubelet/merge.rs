//! The merge of hints: selects one set of nodes from the hints of all resources.
//!
//! # Problem
//! The kubelet tries every combination of one hint per resource. The *affinity* of a combination is the intersection
//! of its hints. It is *preferred* if all its hints are preferred and equal. The best combination wins. The number of
//! combinations is the product of the list lengths, 2³² for two resources on 16 idle nodes.
//!
//! # Algorithm
//! There are few different affinities, and the best one does not depend on the order of the search because
//! [`MergeRule::compare`] is a total order. Two computations suffice:
//!
//! 1. Preferred affinities: sets that every list has as preferred.
//! 2. If there are none, all affinities: pairwise intersections of two families of sets, list after list. The number
//!    of pairs with an intersection that includes *S* is the product of the numbers of sets in each family that
//!    include *S*. The number of pairs with exactly the intersection *S* follows by a Möbius transform over
//!    supersets, in n·2ⁿ additions for n nodes.
//!
//! # Invariant
//! The result equals that of the kubelet's loop. A property test compares both.

use std::{cmp::Ordering, collections::BTreeSet, sync::Arc};

use super::{Affinity, numa::Distances};
use crate::{
    hint::{Mask, ProviderHints},
    policy::TopologyManagerPolicy,
};

/// Hints of one resource.
#[derive(Clone, Debug)]
pub(crate) enum ResourceHints {
    /// Any nodes are acceptable (preferred), or the resource cannot be served (not preferred).
    Any {
        /// True if the resource can be served.
        preferred: bool,
    },
    /// Masks, each with whether it is preferred.
    Masks(Vec<(Mask, bool)>),
}

/// Order of candidates.
#[derive(Clone, Debug)]
pub(crate) struct MergeRule {
    pub(crate) policy: TopologyManagerPolicy,
    /// Distances, if the policy option `prefer-closest-numa-nodes` is set.
    pub(crate) distances: Option<Arc<Distances>>,
}

/// Returns the hints of all resources of all providers. A provider without resources accepts any nodes.
pub(crate) fn hints_by_resource<'a>(
    hints: impl IntoIterator<Item = &'a ProviderHints>,
) -> Vec<ResourceHints> {
    let mut lists = Vec::new();
    for hints in hints {
        match hints {
            ProviderHints::ByResource(resources) => {
                lists.extend(resources.iter().map(|(_, hints)| {
                    if hints.is_empty() {
                        ResourceHints::Any { preferred: false }
                    } else {
                        ResourceHints::Masks(hints.masks().collect())
                    }
                }));
            }
            ProviderHints::NoPreference => lists.push(ResourceHints::Any { preferred: true }),
            ProviderHints::NothingFeasible => {
                lists.push(ResourceHints::Any {
                    preferred: super::defects::NOTHING_FEASIBLE_IS_NO_PREFERENCE,
                });
            }
        }
    }
    lists
}

impl MergeRule {
    /// Merges the hints. `all` is the mask of all nodes.
    pub(crate) fn merge(&self, all: Mask, lists: &[ResourceHints]) -> Affinity {
        let single = self.policy == TopologyManagerPolicy::SingleNumaNode;
        let (mask, preferred) = match self.best(&self.preferred(all, lists), 0) {
            Some(mask) => (mask, true),
            // Different sets of one node have an empty intersection.
            None if single => (all, false),
            None => (self.best(&affinities(all, lists), aim(lists)).unwrap_or(all), false),
        };
        Affinity { mask: Some(mask).filter(|&mask| !single || mask != all), preferred }
    }

    /// Returns whether the policy accepts the result.
    pub(crate) fn accepts(&self, best: Affinity) -> bool {
        match self.policy {
            TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort => true,
            TopologyManagerPolicy::Restricted | TopologyManagerPolicy::SingleNumaNode => best.preferred,
        }
    }

    /// Returns the affinities of preferred combinations.
    pub(crate) fn preferred(&self, all: Mask, lists: &[ResourceHints]) -> Vec<Mask> {
        let mut common: Option<Vec<Mask>> = None;
        for list in lists {
            match list {
                ResourceHints::Any { preferred: true } => {}
                ResourceHints::Any { preferred: false } => return Vec::new(),
                ResourceHints::Masks(masks) => {
                    let eligible = |&(mask, preferred): &(Mask, bool)| {
                        preferred
                            && (self.policy != TopologyManagerPolicy::SingleNumaNode
                                || mask.is_power_of_two())
                    };
                    let mut named: Vec<Mask> =
                        masks.iter().filter(|hint| eligible(hint)).map(|&(mask, _)| mask).collect();
                    named.sort_unstable();
                    match &mut common {
                        None => common = Some(named),
                        Some(common) => common.retain(|mask| named.binary_search(mask).is_ok()),
                    }
                }
            }
        }
        common.unwrap_or_else(|| vec![all])
    }

    /// Returns the best affinity.
    fn best(&self, masks: &[Mask], aim: u32) -> Option<Mask> {
        masks.iter().copied().min_by(|&a, &b| self.compare(a, b, aim))
    }

    /// Compares two affinities of equal preference; the better one is `Less`. `aim` is the number of nodes that the
    /// most demanding resource needs, and zero for preferred affinities.
    ///
    /// The order is: sets of exactly `aim` nodes, then smaller sets starting with the largest, then larger sets
    /// starting with the smallest.
    pub(crate) fn compare(&self, a: Mask, b: Mask, aim: u32) -> Ordering {
        let rank = |mask: Mask| {
            let size = mask.count_ones();
            match size.cmp(&aim) {
                Ordering::Equal => (0, 0),
                Ordering::Less => (1, aim - size),
                Ordering::Greater => (2, size - aim),
            }
        };
        rank(a).cmp(&rank(b)).then_with(|| self.distance(a).cmp(&self.distance(b))).then(a.cmp(&b))
    }

    /// Returns the sum of distances within a set, if the policy considers distances. Only used for sets of equal
    /// size, for which the sum has the same order as the kubelet's average.
    pub(crate) fn distance(&self, mask: Mask) -> Option<u64> {
        match self.policy {
            TopologyManagerPolicy::SingleNumaNode => None,
            _ => self.distances.as_ref().map(|distances| distances.sum(mask)),
        }
    }
}

/// Returns the number of nodes that the most demanding resource needs.
pub(crate) fn aim(lists: &[ResourceHints]) -> u32 {
    let least = |list: &ResourceHints| match list {
        ResourceHints::Any { .. } => None,
        ResourceHints::Masks(masks) => masks.iter().map(|(mask, _)| mask.count_ones()).min(),
    };
    lists.iter().filter_map(least).max().unwrap_or(0)
}

/// Returns the non-empty affinities of all combinations in ascending order.
pub(crate) fn affinities(all: Mask, lists: &[ResourceHints]) -> Vec<Mask> {
    let bits = all.count_ones();
    let size = 1usize << bits;
    let mut family: Option<Vec<u64>> = None;
    for list in lists {
        let ResourceHints::Masks(masks) = list else { continue };
        let mut named = vec![0u64; size];
        for &(mask, _) in masks {
            named[mask as usize] = 1;
        }
        family = Some(match family {
            None => named,
            Some(family) => intersections(family, named, bits),
        });
    }
    match family {
        None => vec![all],
        Some(family) => {
            (1..).zip(family.into_iter().skip(1)).filter(|&(_, n)| n > 0).map(|(mask, _)| mask).collect()
        }
    }
}

/// Returns all intersections of a set of `a` with a set of `b`. A family has the value 0 or 1 for each set.
fn intersections(mut a: Vec<u64>, mut b: Vec<u64>, bits: u32) -> Vec<u64> {
    for family in [&mut a, &mut b] {
        for_each_edge(bits, |set, superset| family[set] += family[superset]);
    }
    for (a, b) in a.iter_mut().zip(b) {
        *a *= b;
    }
    for_each_edge(bits, |set, superset| a[set] -= a[superset]);
    for count in &mut a {
        *count = u64::from(*count > 0);
    }
    a
}

/// Visits, node by node, each set without the node together with the same set including it.
fn for_each_edge(bits: u32, mut visit: impl FnMut(usize, usize)) {
    for bit in 0..bits {
        let step = 1usize << bit;
        for block in (0..1usize << bits).step_by(2 * step) {
            for set in block..block + step {
                visit(set, set + step);
            }
        }
    }
}

/// Returns all candidates, best first, each with whether it is preferred.
pub(crate) fn candidates(rule: &MergeRule, all: Mask, lists: &[ResourceHints]) -> Vec<(Mask, bool)> {
    let mut preferred = rule.preferred(all, lists);
    preferred.sort_by(|&a, &b| rule.compare(a, b, 0));
    let mut others = affinities(all, lists);
    let chosen: BTreeSet<Mask> = preferred.iter().copied().collect();
    others.retain(|mask| !chosen.contains(mask));
    let aim = aim(lists);
    others.sort_by(|&a, &b| rule.compare(a, b, aim));
    let preferred = preferred.into_iter().map(|mask| (mask, true));
    preferred.chain(others.into_iter().map(|mask| (mask, false))).collect()
}

#[cfg(test)]
mod tests {
    use numaward_topology::{Bytes, Machine};
    use proptest::{collection, prelude::*};

    use super::*;

    /// The kubelet's comparison of a candidate with the best one so far.
    fn better(rule: &MergeRule, best: (Mask, bool), candidate: (Mask, bool), aim: u32) -> (Mask, bool) {
        let fitter = || {
            let size = |mask: Mask| mask.count_ones();
            let closer = if size(best.0) == size(candidate.0) { rule.distance(best.0) } else { None };
            let is_fitter = match (closer, rule.distance(candidate.0)) {
                (Some(best_distance), Some(distance)) if best_distance != distance => {
                    distance < best_distance
                }
                _ => (size(candidate.0), candidate.0) < (size(best.0), best.0),
            };
            if is_fitter { candidate } else { best }
        };
        let (now, then) = (best.0.count_ones(), candidate.0.count_ones());
        match (best.1, candidate.1) {
            (false, true) => candidate,
            (true, false) => best,
            (true, true) => fitter(),
            (false, false) if now > aim => fitter(),
            (false, false) if now == aim => {
                if then == aim {
                    fitter()
                } else {
                    best
                }
            }
            (false, false) if then > aim => best,
            (false, false) if then == aim => candidate,
            (false, false) => match then.cmp(&now) {
                Ordering::Greater => candidate,
                Ordering::Less => best,
                Ordering::Equal => fitter(),
            },
        }
    }

    /// The kubelet's merge: a loop over all combinations.
    fn product(rule: &MergeRule, all: Mask, lists: &[ResourceHints]) -> Affinity {
        let single = rule.policy == TopologyManagerPolicy::SingleNumaNode;
        let hints = |list: &ResourceHints| -> Vec<(Option<Mask>, bool)> {
            let hints: Vec<_> = match list {
                ResourceHints::Any { preferred } => vec![(None, *preferred)],
                ResourceHints::Masks(masks) => {
                    masks.iter().map(|&(mask, preferred)| (Some(mask), preferred)).collect()
                }
            };
            let one = |mask: Option<Mask>| mask.is_none_or(Mask::is_power_of_two);
            hints.into_iter().filter(|&(mask, preferred)| !single || preferred && one(mask)).collect()
        };
        let lists: Vec<Vec<(Option<Mask>, bool)>> = lists.iter().map(hints).collect();
        let least = |list: &Vec<(Option<Mask>, bool)>| {
            list.iter().filter_map(|(mask, _)| mask.map(Mask::count_ones)).min()
        };
        let aim = lists.iter().filter_map(least).max().unwrap_or(0);
        let mut combinations: Vec<Vec<(Option<Mask>, bool)>> = vec![vec![]];
        for list in &lists {
            combinations = combinations
                .iter()
                .flat_map(|before| list.iter().map(|&hint| [before.as_slice(), &[hint]].concat()))
                .collect();
        }
        let mut best: Option<(Mask, bool)> = None;
        for combination in combinations {
            let masks: Vec<Mask> = combination.iter().filter_map(|(mask, _)| *mask).collect();
            let mask = masks.iter().fold(all, |common, mask| common & mask);
            let equal = masks.iter().all(|mask| *mask == masks[0]);
            let preferred = equal && combination.iter().all(|(_, preferred)| *preferred);
            if mask != 0 {
                let candidate = (mask, preferred);
                best = Some(best.map_or(candidate, |best| better(rule, best, candidate, aim)));
            }
        }
        let (mask, preferred) = best.unwrap_or((all, false));
        Affinity { mask: (!single || mask != all).then_some(mask), preferred }
    }

    fn list(nodes: u32) -> impl Strategy<Value = ResourceHints> {
        let masks = collection::btree_map(1..1u32 << nodes, any::<bool>(), 1..8);
        prop_oneof![
            5 => masks.prop_map(|masks| ResourceHints::Masks(masks.into_iter().collect())),
            1 => any::<bool>().prop_map(|preferred| ResourceHints::Any { preferred }),
        ]
    }

    fn rule(nodes: u32) -> impl Strategy<Value = MergeRule> {
        let policy = prop_oneof![
            Just(TopologyManagerPolicy::BestEffort),
            Just(TopologyManagerPolicy::Restricted),
            Just(TopologyManagerPolicy::SingleNumaNode),
        ];
        let distances = collection::vec(collection::vec(11u32..15, 5), 5);
        (policy, proptest::option::of(distances)).prop_map(move |(policy, rows)| {
            let distances = rows.map(|rows| {
                let machine = Machine::builder().nodes(nodes).memory(Bytes::mib(1)).build();
                let mut machine = machine.unwrap_or_else(|error| panic!("{error}"));
                for (node, row) in machine.nodes.values_mut().zip(rows) {
                    for (distance, random) in node.distances.values_mut().zip(row) {
                        *distance = random;
                    }
                }
                let index = crate::hint::NodeIndex::new(machine.nodes.keys().copied());
                Arc::new(Distances::new(&machine, &index).unwrap_or_else(|error| panic!("{error}")))
            });
            MergeRule { policy, distances }
        })
    }

    fn case() -> impl Strategy<Value = (u32, MergeRule, Vec<ResourceHints>)> {
        (1u32..=5).prop_flat_map(|nodes| (Just(nodes), rule(nodes), collection::vec(list(nodes), 0..=3)))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn merge_equals_full_enumeration((nodes, rule, lists) in case()) {
            let all = (1 << nodes) - 1;
            prop_assert_eq!(rule.merge(all, &lists), product(&rule, all, &lists));
        }

        #[test]
        fn affinities_equal_full_enumeration((nodes, _, lists) in case()) {
            let all = (1 << nodes) - 1;
            let mut expected = BTreeSet::from([all]);
            for list in &lists {
                if let ResourceHints::Masks(masks) = list {
                    let with = |&common: &Mask| masks.iter().map(move |(mask, _)| common & mask);
                    expected = expected.iter().flat_map(with).collect();
                }
            }
            expected.remove(&0);
            prop_assert_eq!(affinities(all, &lists), expected.into_iter().collect::<Vec<_>>());
        }
    }
}
