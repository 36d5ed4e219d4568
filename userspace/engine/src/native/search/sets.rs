//! Enumeration of all sufficient sets of nodes of a size.
//!
//! The search is depth first, node by node. A partial set is dropped as soon as the largest remaining nodes cannot
//! complete it, so nearly every visited partial set leads to a result. Interchangeable nodes are used in a fixed
//! order, because sets that differ only in such nodes are equally good.

use crate::native::{free_capacity::FreeCapacity, work_budget::WorkShare};

/// Check whether whole cores of different sizes add up to the needed CPUs.
#[derive(Clone, Copy)]
pub(super) struct CoreCheck<'a> {
    pub(super) free_capacity: &'a FreeCapacity,
    pub(super) needed: u64,
    pub(super) share: WorkShare<'a>,
}

impl CoreCheck<'_> {
    /// Returns whether whole cores of these nodes add up. The caller has checked the total.
    pub(super) fn matches(&self, set: &[usize]) -> bool {
        self.share.charge(self.free_capacity.matching_work(set, self.needed));
        self.free_capacity.has_matching_cores(set, self.needed)
    }
}

/// Needed amount of a resource.
pub(super) struct Demand<'a> {
    pub(super) need: u64,
    /// Free amount by position.
    pub(super) free: &'a [u64],
    /// Maximum number of nodes of a set that give this resource; `None` for all.
    pub(super) count: Option<usize>,
    /// Check of the whole set, if all of its nodes may give this resource.
    pub(super) cores: Option<CoreCheck<'a>>,
}

impl Demand<'_> {
    /// Returns whether a set has enough.
    pub(super) fn enough(&self, set: &[usize]) -> bool {
        let sum = |free: &mut dyn Iterator<Item = u64>| free.fold(0u64, u64::saturating_add) >= self.need;
        let all = || set.iter().map(|&at| self.free[at]);
        match self.count.filter(|&count| count < set.len()) {
            Some(count) => {
                let mut free: Vec<u64> = all().collect();
                free.sort_unstable_by(|a, b| b.cmp(a));
                sum(&mut free.into_iter().take(count))
            }
            None => sum(&mut all()) && self.cores.is_none_or(|check| check.matches(set)),
        }
    }
}

/// Nodes, and the demand that their subsets must meet.
pub(super) struct NodeSets<'a> {
    /// Nodes; interchangeable ones are adjacent.
    items: Vec<usize>,
    /// Flags of items that are interchangeable with the previous item.
    alike: Vec<bool>,
    size: usize,
    wanted: &'a [Demand<'a>],
    /// Sum of the n largest amounts of the items from an index on, by resource, index and n.
    most: Vec<u64>,
    share: WorkShare<'a>,
}

impl<'a> NodeSets<'a> {
    /// Prepares the enumeration of sets of a size. `alike` maps interchangeable nodes to the lowest of them.
    pub(super) fn new(
        of: &[usize],
        alike: &dyn Fn(usize) -> usize,
        size: usize,
        wanted: &'a [Demand<'a>],
        share: WorkShare<'a>,
    ) -> Self {
        let mut items: Vec<(usize, usize)> = of.iter().map(|&at| (alike(at), at)).collect();
        items.sort_unstable();
        // Bounds are unnecessary if the set has to contain all items.
        let bounded = if size < items.len() { wanted } else { &[] };
        share.charge(4 * items.len() + bounded.len() * items.len() * (size + 1) / 2);
        let mut most = vec![0; bounded.len() * (items.len() + 1) * (size + 1)];
        let mut row = 0;
        for of in bounded {
            let mut largest: Vec<u64> = Vec::with_capacity(items.len());
            for left in 0..=items.len() {
                if let Some((_, at)) = items.len().checked_sub(left).and_then(|place| items.get(place)) {
                    let free = of.free[*at];
                    largest.insert(largest.partition_point(|&larger| larger >= free), free);
                    largest.truncate(size);
                }
                let place = row + items.len() - left;
                let mut sum = 0u64;
                for (count, free) in largest.iter().enumerate() {
                    sum = sum.saturating_add(*free);
                    most[place * (size + 1) + count + 1] = sum;
                }
                // Sums do not grow beyond the number of remaining items.
                for count in largest.len()..size {
                    most[place * (size + 1) + count + 1] = sum;
                }
            }
            row += items.len() + 1;
        }
        let alike = (0..items.len()).map(|place| place > 0 && items[place].0 == items[place - 1].0).collect();
        Self { items: items.into_iter().map(|(_, at)| at).collect(), alike, size, wanted, most, share }
    }

    /// Visits the sets, each in ascending order, until `visit` returns false or the share is exhausted. With `one`,
    /// the first set is visited in any case. Returns whether all sets were visited.
    pub(super) fn each(&self, mut one: bool, visit: &mut dyn FnMut(&[usize]) -> bool) -> bool {
        if self.size == self.items.len() {
            let mut all = self.items.clone();
            all.sort_unstable();
            return !self.wanted.iter().all(|of| of.enough(&all)) || visit(&all);
        }
        let mut sums = vec![0; self.wanted.len()];
        self.extend(0, &mut Vec::with_capacity(self.size), &mut sums, &mut one, visit)
    }

    /// Returns whether the items from an index on can complete a partial set.
    fn can_complete(&self, place: usize, missing: usize, sums: &[u64]) -> bool {
        sums.iter().zip(self.wanted).enumerate().all(|(resource, (sum, of))| {
            let row = resource * (self.items.len() + 1) + place;
            sum.saturating_add(self.most[row * (self.size + 1) + missing]) >= of.need
        })
    }

    fn extend(
        &self,
        from: usize,
        chosen: &mut Vec<usize>,
        sums: &mut Vec<u64>,
        one: &mut bool,
        visit: &mut dyn FnMut(&[usize]) -> bool,
    ) -> bool {
        let missing = self.size - chosen.len();
        if missing == 0 {
            let mut set = chosen.clone();
            set.sort_unstable();
            if !self.wanted.iter().all(|of| of.enough(&set)) {
                return true;
            }
            *one = false;
            return visit(&set);
        }
        for place in from..(self.items.len() + 1).saturating_sub(missing) {
            if self.share.is_spent() && !*one {
                return false;
            }
            self.share.charge(2 + self.wanted.len());
            if !self.can_complete(place, missing, sums) {
                return true;
            }
            if place > from && self.alike[place] {
                continue;
            }
            let at = self.items[place];
            let before = sums.clone();
            for (sum, of) in sums.iter_mut().zip(self.wanted) {
                *sum = sum.saturating_add(of.free[at]);
            }
            chosen.push(at);
            let go_on = !self.can_complete(place + 1, missing - 1, sums)
                || self.extend(place + 1, chosen, sums, one, visit);
            chosen.pop();
            *sums = before;
            if !go_on {
                return false;
            }
        }
        true
    }
}
