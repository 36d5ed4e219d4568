//! Search for sets of nodes on machines with too many nodes for an enumeration.
//!
//! # Problem
//! Find the smallest sets of nodes with enough of every resource and, among these, the sets with the smallest
//! distances.
//!
//! # Algorithm
//! Branch and bound. The sorted free amounts give a lower bound of the size. Greedy seeds give an upper bound and
//! fallback results: around every node, nearest nodes first and largest nodes first within rings of distance; and
//! anywhere, the node with most of the missing amounts next. Each seed alone can need more nodes than necessary. Then
//! sets are built node by node for each size, starting with the lower bound. A partial set is dropped if even the
//! largest nodes cannot complete it, or if it cannot become nearer than the sets found so far. Of interchangeable
//! nodes (same free amounts, same distances to all other nodes) only the first is tried. After [`MAX_SETS`] partial sets
//! the search returns its best result so far.

use std::cmp::Reverse;

use super::{MAX_PLACEMENTS, MAX_SETS, SearchExtent, sets::Demand};
use crate::{
    cores::CoreRun,
    native::{host::HostModel, work_budget::WorkShare},
};

/// Returns the free whole cores of a node if their sizes count.
fn cores_of<'a>(wanted: &[Demand<'a>], at: usize) -> Option<&'a [CoreRun]> {
    let check = wanted.iter().find_map(|of| of.cores)?;
    check.free_capacity.cores.get(at).map(Vec::as_slice)
}

pub(super) struct LargeSearch<'a> {
    host: &'a HostModel,
    items: Vec<usize>,
    wanted: &'a [Demand<'a>],
    /// Class of interchangeable nodes, by position.
    classes: Vec<usize>,
    /// Sum of the n largest free amounts, by resource and n.
    largest: Vec<Vec<u64>>,
    /// Smallest distance between two nodes.
    nearest: u64,
    /// Partial sets that may still be built.
    sets_left: usize,
    extent: SearchExtent,
    share: WorkShare<'a>,
    /// Best sets of one size, each with the sum of its distances.
    best: Vec<(u64, Vec<usize>)>,
}

impl<'a> LargeSearch<'a> {
    pub(super) fn new(
        host: &'a HostModel,
        items: Vec<usize>,
        wanted: &'a [Demand<'a>],
        extent: SearchExtent,
        share: WorkShare<'a>,
    ) -> Self {
        share.charge(8 * items.len() * wanted.len());
        // A node without any needed resource is never part of a smallest set.
        let items: Vec<usize> =
            items.into_iter().filter(|&at| wanted.iter().any(|of| of.free[at] > 0)).collect();
        let mut classes = vec![0; host.len()];
        let mut seen = std::collections::BTreeMap::new();
        for &at in &items {
            let amounts: Vec<u64> = wanted.iter().map(|of| of.free[at].min(of.need)).collect();
            let next = seen.len();
            let cores = cores_of(wanted, at);
            classes[at] = *seen.entry((host.twins(at), amounts, cores)).or_insert(next);
        }
        let largest = |of: &Demand<'_>| {
            let mut free: Vec<u64> = items.iter().map(|&at| of.free[at]).collect();
            free.sort_unstable_by(|a, b| b.cmp(a));
            let mut sum = 0u64;
            let mut sums = vec![0];
            sums.extend(free.into_iter().map(|free| {
                sum = sum.saturating_add(free);
                sum
            }));
            sums
        };
        let largest = wanted.iter().map(largest).collect();
        Self {
            host,
            nearest: host.nearest(),
            items,
            wanted,
            classes,
            largest,
            sets_left: MAX_SETS,
            extent,
            share,
            best: Vec::new(),
        }
    }

    /// Returns whether a set has enough of every resource.
    fn enough(&self, set: &[usize]) -> bool {
        self.wanted.iter().all(|of| of.enough(set))
    }

    /// Returns the part of the need that a node can give, in 1/1024, summed over all resources.
    fn weight(&self, at: usize) -> u64 {
        let share = |of: &Demand<'_>| {
            let share = u128::from(of.free[at].min(of.need)) * 1024 / u128::from(of.need.max(1));
            u64::try_from(share).unwrap_or(u64::MAX)
        };
        self.wanted.iter().map(share).sum()
    }

    fn spread(&self, set: &[usize]) -> u64 {
        let to_later = |(index, &from): (usize, &usize)| {
            set[index + 1..].iter().map(|&to| self.host.distance(from, to)).sum::<u64>()
        };
        set.iter().enumerate().map(to_later).sum()
    }

    fn keep(&mut self, mut set: Vec<usize>) {
        set.sort_unstable();
        self.share.charge(set.len() * set.len());
        if self.best.first().is_some_and(|(_, best)| best.len() > set.len()) {
            self.best.clear();
        }
        if self.best.first().is_some_and(|(_, best)| best.len() < set.len()) {
            return;
        }
        let entry = (self.spread(&set), set);
        if let Err(index) = self.best.binary_search(&entry) {
            self.best.insert(index, entry);
            self.best.truncate(MAX_PLACEMENTS);
        }
    }

    /// Returns the best sets of the smallest size between `least` and `most`, nearest first.
    pub(super) fn search(&mut self, least: usize, most: usize) -> Vec<Vec<usize>> {
        let roots = self.roots();
        let seeding = self.share.half();
        if let Some(&root) = roots.first().filter(|&&at| cores_of(self.wanted, at).is_some()) {
            self.seed(root, most, &seeding);
        }
        self.seed_by_missing(most);
        let seeding = self.share.half();
        for &root in &roots {
            if seeding.is_spent() || self.has_any() {
                break;
            }
            self.seed(root, most, &seeding);
        }
        let upper = self.best.first().map_or(most.min(self.items.len()), |(_, set)| set.len());
        for size in least..=upper {
            let possible = self
                .wanted
                .iter()
                .zip(&self.largest)
                .all(|(of, largest)| largest[size.min(largest.len() - 1)] >= of.need);
            if !possible {
                continue;
            }
            // Whether all sets with a root of this class have been visited.
            let mut seen = vec![false; self.host.len()];
            for &root in &roots {
                // Sets with an earlier root have been visited. Nodes of the class of this root can still be members.
                let later: Vec<usize> = {
                    let mut later: Vec<usize> = self
                        .items
                        .iter()
                        .copied()
                        .filter(|&at| at != root && !seen[self.classes[at]])
                        .collect();
                    seen[self.classes[root]] = true;
                    later.sort_by_key(|&at| {
                        (self.host.distance(root, at), Reverse(self.weight(at)), self.classes[at], at)
                    });
                    later
                };
                let mut chosen = Vec::with_capacity(size);
                chosen.push(root);
                let mut sums: Vec<u64> = self.wanted.iter().map(|of| of.free[root]).collect();
                self.share.charge(8 * later.len());
                self.extend(&later, size, &mut chosen, 0, &mut sums);
                if self.is_exhausted() {
                    break;
                }
            }
            if self.best.first().is_some_and(|(_, set)| set.len() == size) || self.is_exhausted() {
                break;
            }
        }
        self.best.iter().map(|(_, set)| set.clone()).collect()
    }

    /// Returns whether any set suffices and one was found.
    fn has_any(&self) -> bool {
        self.extent == SearchExtent::Any && !self.best.is_empty()
    }

    fn is_exhausted(&self) -> bool {
        self.sets_left == 0 || self.share.is_spent() || self.has_any()
    }

    /// Returns one node of each class: those with most different cores first, then those with the largest amounts.
    fn roots(&self) -> Vec<usize> {
        let mut seen = std::collections::BTreeSet::new();
        let mut roots: Vec<usize> =
            self.items.iter().copied().filter(|&at| seen.insert(self.classes[at])).collect();
        let sizes = |at: usize| cores_of(self.wanted, at).map_or(0, <[_]>::len);
        roots.sort_by_key(|&at| (Reverse(sizes(at)), Reverse(self.weight(at)), at));
        roots
    }

    fn seed(&mut self, root: usize, most: usize, seeding: &WorkShare<'_>) {
        self.share.charge(8 * self.items.len());
        let mut by_distance: Vec<usize> = self.items.iter().copied().filter(|&at| at != root).collect();
        by_distance.sort_by_key(|&at| (self.host.distance(root, at), Reverse(self.weight(at)), at));
        self.grow_greedily(root, &by_distance, most);
        // Largest nodes first, within each ring of distance.
        let mut rings: Vec<u64> = by_distance.iter().map(|&at| self.host.distance(root, at)).collect();
        rings.dedup();
        for ring in rings {
            self.share.charge(8 * self.items.len());
            if seeding.is_spent() {
                return;
            }
            let mut within: Vec<usize> =
                by_distance.iter().copied().filter(|&at| self.host.distance(root, at) <= ring).collect();
            within.sort_by_key(|&at| (Reverse(self.weight(at)), self.host.distance(root, at), at));
            if self.grow_greedily(root, &within, most) {
                return;
            }
        }
    }

    /// Adds nodes in this order until the set has enough. Returns whether it has.
    fn grow_greedily(&mut self, root: usize, order: &[usize], most: usize) -> bool {
        let mut set = vec![root];
        let mut order = order.iter();
        while !self.enough(&set) {
            self.share.charge(set.len() * self.wanted.len());
            match order.next() {
                Some(&at) if set.len() < most => set.push(at),
                _ => return false,
            }
        }
        self.keep_needed(set);
        true
    }

    /// Adds the node with most of the missing amounts until nothing is missing: once with equal weights, and once for
    /// each resource with a double weight.
    fn seed_by_missing(&mut self, most: usize) {
        for twice in std::iter::once(None).chain((0..self.wanted.len()).map(Some)) {
            if !self.best.is_empty() && self.is_exhausted() {
                return;
            }
            let mut missing: Vec<u64> = self.wanted.iter().map(|of| of.need).collect();
            let mut rest = self.items.clone();
            let mut set = Vec::new();
            while !self.enough(&set) && set.len() < most {
                self.share.charge(2 * rest.len() * self.wanted.len());
                let covers = |&(_, &at): &(usize, &usize)| {
                    let of_resource = |(index, of): (usize, &Demand<'_>)| {
                        let factor = if twice == Some(index) { 2048 } else { 1024 };
                        u128::from(of.free[at].min(missing[index])) * factor / u128::from(of.need.max(1))
                    };
                    let covered: u128 = self.wanted.iter().enumerate().map(of_resource).sum();
                    (covered, Reverse(at))
                };
                let Some((place, _)) = rest.iter().enumerate().max_by_key(covers) else { return };
                let at = rest.swap_remove(place);
                for (missing, of) in missing.iter_mut().zip(self.wanted) {
                    *missing = missing.saturating_sub(of.free[at]);
                }
                set.push(at);
            }
            if self.enough(&set) {
                self.keep_needed(set);
            }
        }
    }

    /// Removes unnecessary nodes from a sufficient set, and keeps the set.
    fn keep_needed(&mut self, mut set: Vec<usize>) {
        let mut index = 0;
        while index < set.len() {
            self.share.charge(set.len() * self.wanted.len());
            let mut without = set.clone();
            without.remove(index);
            if !without.is_empty() && self.enough(&without) {
                set = without;
            } else {
                index += 1;
            }
        }
        self.keep(set);
    }

    /// Completes a partial set to the given size with nodes of the list.
    fn extend(
        &mut self,
        list: &[usize],
        size: usize,
        chosen: &mut Vec<usize>,
        spread: u64,
        sums: &mut Vec<u64>,
    ) {
        let missing = size - chosen.len();
        if missing == 0 {
            if self.enough(chosen) {
                self.keep(chosen.clone());
            }
            return;
        }
        let mut skipped = None;
        for (index, &at) in list.iter().enumerate() {
            if list.len() - index < missing || self.is_exhausted() {
                return;
            }
            if skipped == Some(self.classes[at]) {
                continue;
            }
            skipped = Some(self.classes[at]);
            self.sets_left -= 1;
            self.share.charge(4 + chosen.len() + 2 * self.wanted.len());
            let added: u64 = chosen.iter().map(|&of| self.host.distance(of, at)).sum();
            let left = missing - 1;
            // Lower bound of the distances that the missing nodes add.
            let more = self.nearest * (left * (chosen.len() + 1) + left * left.saturating_sub(1) / 2) as u64;
            let full = self.best.len() == MAX_PLACEMENTS
                && self.best.first().is_some_and(|(_, set)| set.len() == size);
            if full && self.best.last().is_some_and(|(worst, _)| spread + added + more >= *worst) {
                continue;
            }
            let possible = self.wanted.iter().zip(&*sums).zip(&self.largest).all(|((of, sum), largest)| {
                let rest = largest[left.min(largest.len() - 1)];
                sum.saturating_add(of.free[at]).saturating_add(rest) >= of.need
            });
            if !possible {
                continue;
            }
            let before = sums.clone();
            for (sum, of) in sums.iter_mut().zip(self.wanted) {
                *sum = sum.saturating_add(of.free[at]);
            }
            chosen.push(at);
            self.extend(&list[index + 1..], size, chosen, spread + added, sums);
            chosen.pop();
            *sums = before;
        }
    }
}
