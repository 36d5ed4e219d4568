//! The merge of hints: one set of nodes out of the lists of all resources.
//!
//! The kubelet tries every combination of one hint from each list. A combination's *affinity* is what its
//! hints have in common; it is *preferred* if all its hints are preferred and name the same nodes. The best
//! one wins.
//!
//! The number of combinations is the product of the lengths of the lists: 2³² for two resources on 16 idle
//! nodes. But only few different affinities come out, and which of them is best does not depend on the order
//! in which they are found, since [`MergeRule::compare`] orders them totally. So it suffices to know
//!
//! 1. the preferred affinities: sets that every list names as preferred; and, only where there are none,
//! 2. all affinities: the pairwise intersections of two families of sets, list after list. How many pairs
//!    have the intersection *S* follows from how many have one that includes *S*, which is the product of the
//!    numbers of sets in each family that include *S*. Summing over supersets and taking the sums apart
//!    again costs n·2ⁿ additions for n nodes.
//!
//! Invariant, tested against the product itself: the result is that of the kubelet's loop.

use std::{cmp::Ordering, collections::BTreeSet, sync::Arc};

use super::{Affinity, numa::Distances};
use crate::{
    hint::{Mask, ProviderHints},
    policy::TopologyManagerPolicy,
};

/// What the hints of one resource say.
#[derive(Clone, Debug)]
pub(crate) enum ResourceHints {
    /// Any nodes will do; or, if not preferred, none will.
    Any {
        /// Whether the resource can be given.
        preferred: bool,
    },
    /// These, and whether they are preferred.
    Masks(Vec<(Mask, bool)>),
}

/// How candidates compare.
#[derive(Clone, Debug)]
pub(crate) struct MergeRule {
    pub(crate) policy: TopologyManagerPolicy,
    /// Where sets of equal size are compared by distance.
    pub(crate) distances: Option<Arc<Distances>>,
}

/// The lists of all resources of all providers. A provider without resources counts as one that does not mind.
pub(crate) fn lists<'a>(hints: impl IntoIterator<Item = &'a ProviderHints>) -> Vec<ResourceHints> {
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
    /// Merges the lists. `all` are all nodes of the machine.
    pub(crate) fn merge(&self, all: Mask, lists: &[ResourceHints]) -> Affinity {
        let single = self.policy == TopologyManagerPolicy::SingleNumaNode;
        let (mask, preferred) = match self.best(&self.preferred(all, lists), 0) {
            Some(mask) => (mask, true),
            // Sets of one node that are not the same have nothing in common.
            None if single => (all, false),
            None => (self.best(&affinities(all, lists), aim(lists)).unwrap_or(all), false),
        };
        Affinity { mask: Some(mask).filter(|&mask| !single || mask != all), preferred }
    }

    /// Whether the policy takes the result.
    pub(crate) fn accepts(&self, best: Affinity) -> bool {
        match self.policy {
            TopologyManagerPolicy::None | TopologyManagerPolicy::BestEffort => true,
            TopologyManagerPolicy::Restricted | TopologyManagerPolicy::SingleNumaNode => best.preferred,
        }
    }

    /// The affinities of preferred combinations.
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

    /// The best of some affinities.
    fn best(&self, masks: &[Mask], aim: u32) -> Option<Mask> {
        masks.iter().copied().min_by(|&a, &b| self.compare(a, b, aim))
    }

    /// Which of two affinities of equal preference is better: `Less` is better. `aim` is the number of nodes
    /// that the most demanding resource needs; zero among preferred ones.
    ///
    /// First come sets of just as many nodes as `aim`, then smaller ones, of these the largest, then larger
    /// ones, of these the smallest. (With an aim of zero this is: the smallest.)
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

    /// The sum of distances within a set, where distances count. Compared only between sets of equal size,
    /// for which it orders as the average does.
    pub(crate) fn distance(&self, mask: Mask) -> Option<u64> {
        match self.policy {
            TopologyManagerPolicy::SingleNumaNode => None,
            _ => self.distances.as_ref().map(|distances| distances.sum(mask)),
        }
    }
}

/// The number of nodes that the most demanding resource needs.
pub(crate) fn aim(lists: &[ResourceHints]) -> u32 {
    let least = |list: &ResourceHints| match list {
        ResourceHints::Any { .. } => None,
        ResourceHints::Masks(masks) => masks.iter().map(|(mask, _)| mask.count_ones()).min(),
    };
    lists.iter().filter_map(least).max().unwrap_or(0)
}

/// The affinities of all combinations, in the order of their numbers, without the empty one.
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

/// The sets that are the intersection of one set of each family. Families are 0 or 1 by set.
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

/// Visits, node by node, each set without the node together with the set that has the node as well.
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

/// All candidates and whether they are preferred, best first.
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

    /// The kubelet's own comparison of a candidate with the best one so far.
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

    /// The merge as the kubelet does it: all combinations, one after another.
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
