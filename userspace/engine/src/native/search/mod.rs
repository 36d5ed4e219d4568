//! The search for where a unit can be placed.
//!
//! Problem: of all sets of nodes that the policy allows and that have enough free, find the best few by the rules of
//! module `rank`. Each resource has its own set; of n nodes there are 2ⁿ.
//!
//! What a policy allows:
//!
//! | rule | nodes |
//! |---|---|
//! | [`Rule::Anywhere`] (`none`, `best-effort`) | as few as possible in all; of these as few as possible per resource |
//! | [`Rule::Sized`] (`single-numa-node`, `restricted`) | exactly so many per resource, the smaller sets within the larger ones |
//!
//! With [`Rule::Sized`] a memory-only node can count together with the nearest nodes with CPUs (*attached*): then sets
//! of nodes with CPUs are looked for as if these had the memory of what is attached, and each kind of memory is placed
//! on as few nodes of those as possible. What the rule allows without attached nodes it allows as well.
//!
//! Up to [`EXACT`] nodes every set is looked at, small ones first. On larger machines sets come from module `large`,
//! which gives up after a number of steps. A search ends when it has used its share of the decision's work.

mod large;

use self::large::{Large, Wanted};
use super::{
    host::{CPU, Host},
    rank::{Placement, rank, stranded},
    room::{Room, Unit},
    work::{Share, Work},
};

/// The most nodes of which every set is looked at.
pub(crate) const EXACT: usize = 8;
/// As many placements are kept of a search.
pub(super) const KEPT: usize = 8;

/// What a policy allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Any set.
    Anywhere,
    /// Exactly so many nodes for each resource, nested.
    Sized {
        /// By resource; nodes as they are.
        sizes: Vec<usize>,
        /// By resource; nodes with what is attached to them. `None` where that does not count.
        with_attached: Option<Vec<usize>>,
    },
}

/// What a search found.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    /// The best placements, best first; at most [`KEPT`].
    pub(super) placements: Vec<Placement>,
    /// How many were compared.
    pub(super) considered: u64,
    /// Whether it gave up before it had seen everything.
    pub(super) cut_off: bool,
}

/// Looks for placements of a unit.
pub(super) fn search(host: &Host, room: &Room, unit: &Unit, rule: &Rule, work: &Work) -> Found {
    let share = work.share();
    share.charge(60 + 2 * host.len() * unit.need.len());
    let needed = unit.resources().collect();
    let mut search = Search { host, room, unit, needed, share, found: Found::default() };
    match rule {
        Rule::Anywhere => search.anywhere(),
        Rule::Sized { sizes, with_attached } => {
            search.sized(sizes);
            if let Some(sizes) = with_attached {
                search.attached(sizes);
            }
        }
    }
    search.found
}

/// The fewest nodes that could hold an amount, if all of them together can.
pub(super) fn fewest(free: impl IntoIterator<Item = u64>, needed: u64) -> Option<usize> {
    let mut free: Vec<u64> = free.into_iter().collect();
    free.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0u64;
    for (index, free) in free.into_iter().enumerate() {
        sum = sum.saturating_add(free);
        if sum >= needed {
            return Some(index + 1);
        }
    }
    None
}

/// The fewest nodes with CPUs that could hold an amount together with what is attached to them.
pub(super) fn fewest_with_attached(host: &Host, free: &[u64], needed: u64) -> Option<usize> {
    let anchors: Vec<usize> = anchors(host);
    let sum = |set: &[usize]| members(host, set).iter().fold(0u64, |sum, &at| sum.saturating_add(free[at]));
    if sum(&anchors) < needed {
        return None;
    }
    if anchors.len() <= EXACT {
        let enough = |size: &usize| {
            let mut enough = false;
            subsets(&anchors, *size, &mut |set| enough |= sum(set) >= needed);
            enough
        };
        return (1..=anchors.len()).find(enough);
    }
    // Largest first. Where several share a memory-only node this can be one too many.
    let mut order = anchors;
    order.sort_by_key(|&at| (std::cmp::Reverse(sum(&[at])), at));
    (1..=order.len()).find(|&size| sum(&order[..size]) >= needed)
}

/// The nodes with which memory-only nodes can count.
fn anchors(host: &Host) -> Vec<usize> {
    (0..host.len()).filter(|&at| host.has_cpus(at)).collect()
}

/// Nodes and what is attached to them, ascending.
pub(super) fn members(host: &Host, set: &[usize]) -> Vec<usize> {
    let mut members: Vec<usize> = set.to_vec();
    members.extend(set.iter().flat_map(|&at| host.attached(at)));
    members.sort_unstable();
    members.dedup();
    members
}

/// Visits all subsets of a size, in the order of their members.
pub(super) fn subsets(of: &[usize], size: usize, visit: &mut dyn FnMut(&[usize])) {
    fn extend(of: &[usize], missing: usize, chosen: &mut Vec<usize>, visit: &mut dyn FnMut(&[usize])) {
        if missing == 0 {
            return visit(chosen);
        }
        for index in 0..(of.len() + 1).saturating_sub(missing) {
            chosen.push(of[index]);
            extend(&of[index + 1..], missing - 1, chosen, visit);
            chosen.pop();
        }
    }
    extend(of, size, &mut Vec::with_capacity(size), visit);
}

struct Search<'a> {
    host: &'a Host,
    room: &'a Room,
    unit: &'a Unit,
    /// The resources of which something is needed.
    needed: Vec<usize>,
    share: Share<'a>,
    found: Found,
}

impl Search<'_> {
    /// Whether there is work left for one more set of so many nodes.
    fn may_go_on(&mut self, nodes: usize) -> bool {
        self.share.charge(nodes * self.needed.len());
        let may = !self.share.is_spent();
        self.found.cut_off |= !may;
        may
    }

    fn sum(&self, resource: usize, set: &[usize]) -> u64 {
        let free = &self.room.free[resource];
        set.iter().fold(0, |sum, &at| sum.saturating_add(free[at]))
    }

    fn enough(&self, resource: usize, set: &[usize]) -> bool {
        self.sum(resource, set) >= self.unit.need[resource]
    }

    /// Compares a placement with those found so far.
    fn offer(&mut self, sets: &[&[usize]]) {
        if !self.room.adds_up(sets[CPU], self.unit.need[CPU]) {
            return;
        }
        let (mut key, nodes) = rank(self.host, self.unit, sets);
        self.share.charge(24 + 2 * nodes.len() * nodes.len());
        self.found.considered += 1;
        let placements = &mut self.found.placements;
        let full = placements.len() == KEPT;
        // What it strands decides only where all else is the same.
        if full && placements.last().is_some_and(|worst| worst.key < key) {
            return;
        }
        key.stranded = stranded(self.host, self.room, self.unit, sets, &nodes);
        key.load = self.room.load(self.host, &nodes);
        if full && placements.last().is_some_and(|worst| worst.key < key) {
            return;
        }
        let placement = Placement { key, nodes, sets: sets.iter().map(|set| set.to_vec()).collect() };
        if let Err(index) = placements.binary_search(&placement) {
            placements.insert(index, placement);
            placements.truncate(KEPT);
        }
    }

    /// Whether a placement on so many nodes, and so many per resource, is worth a look.
    fn worth(&self, nodes: usize, per_resource: usize) -> bool {
        let placements = &self.found.placements;
        placements.len() < KEPT
            || placements.last().is_none_or(|worst| {
                (nodes as u64, per_resource as u64) <= (worst.key.nodes, worst.key.nodes_per_resource)
            })
    }

    /// Everything on one node.
    fn on_one(&mut self, at: usize) -> bool {
        let fits =
            self.needed.iter().all(|&resource| self.room.free[resource][at] >= self.unit.need[resource])
                && self.room.adds_up(&[at], self.unit.need[CPU]);
        if fits {
            let set = [at];
            let sets: Vec<&[usize]> =
                self.unit.need.iter().map(|&need| if need > 0 { &set[..] } else { &[][..] }).collect();
            self.offer(&sets);
        }
        fits
    }

    fn anywhere(&mut self) {
        let columns = self.room.free.iter();
        let least = self.needed.iter().map(|&resource| {
            columns
                .clone()
                .nth(resource)
                .and_then(|free| fewest(free.iter().copied(), self.unit.need[resource]))
        });
        let Some(least) = least.collect::<Option<Vec<_>>>().map(|least| least.into_iter().max().unwrap_or(0))
        else {
            return;
        };
        // Nodes of devices count: a larger set that has them can be as good.
        let mut beyond = self.unit.devices.len();
        let mut found = false;
        if least == 1 {
            self.share.charge(self.host.len() * self.needed.len());
            for at in 0..self.host.len() {
                found |= self.on_one(at);
            }
            if found && beyond == 0 {
                return;
            }
        }
        if self.host.len() > EXACT {
            if !found {
                self.anywhere_large(least.max(2));
            }
            return;
        }
        let all: Vec<usize> = (0..self.host.len()).collect();
        for size in least.max(2)..=all.len() {
            if found {
                if beyond == 0 {
                    return;
                }
                beyond -= 1;
            }
            subsets(&all, size, &mut |set| {
                self.share.charge(set.len() * self.needed.len());
                if self.needed.iter().all(|&resource| self.enough(resource, set)) {
                    found = true;
                    self.within(set);
                }
            });
        }
    }

    fn anywhere_large(&mut self, least: usize) {
        let wanted = |&resource: &usize| Wanted {
            need: self.unit.need[resource],
            free: self.room.free[resource].clone(),
            count: None,
        };
        let wanted = self.needed.iter().map(wanted).collect();
        let all = (0..self.host.len()).collect();
        let mut large = Large::new(self.host, all, wanted, self.share.half());
        let sets = large.search(least, self.host.len());
        self.found.cut_off |= large.cut_off;
        for set in sets {
            self.within(&set);
        }
    }

    /// Each resource on its fewest nodes of a set.
    fn within(&mut self, set: &[usize]) {
        let domains: Vec<&[usize]> =
            self.unit.need.iter().map(|&need| if need > 0 { set } else { &[] }).collect();
        self.combine(&domains);
    }

    /// Each resource on its fewest nodes of a set of its own.
    fn combine(&mut self, domains: &[&[usize]]) {
        let mut sizes = Vec::with_capacity(domains.len());
        for (resource, domain) in domains.iter().enumerate() {
            let free = &self.room.free[resource];
            let size = match self.unit.need[resource] {
                0 => Some(0),
                need => fewest(domain.iter().map(|&at| free[at]), need),
            };
            let Some(size) = size else { return };
            sizes.push(size);
        }
        let per_resource = sizes.iter().sum();
        let least = sizes.iter().copied().max().unwrap_or(0);
        if !self.worth(least, per_resource) {
            return;
        }
        if sizes.iter().zip(domains).all(|(size, domain)| *size == domain.len()) {
            return self.offer(domains);
        }
        // The first is looked at in any case.
        if !self.found.placements.is_empty() && !self.may_go_on(least) {
            return;
        }
        let mut options: Vec<Vec<Vec<usize>>> = Vec::with_capacity(domains.len());
        for (resource, domain) in domains.iter().enumerate() {
            let near = options.first().and_then(|of| of.first()).map_or(&[][..], Vec::as_slice);
            let of = self.options(resource, domain, sizes[resource], near);
            options.push(of);
        }
        self.product(&options, &mut Vec::with_capacity(options.len()));
    }

    /// The sets of a size within a domain that have enough of a resource.
    fn options(&mut self, resource: usize, domain: &[usize], size: usize, near: &[usize]) -> Vec<Vec<usize>> {
        let mut options = Vec::new();
        if size == domain.len() || size == 0 {
            options.push(domain[..size].to_vec());
        } else if domain.len() <= EXACT || size == 1 {
            subsets(domain, size, &mut |set| {
                self.share.charge(set.len());
                if self.enough(resource, set) {
                    options.push(set.to_vec());
                }
            });
        } else {
            // The largest have enough; of equally large ones the nearest to the CPUs.
            let free = &self.room.free[resource];
            let distance = |at: usize| near.iter().map(|&from| self.host.distance(from, at)).sum::<u64>();
            let mut order = domain.to_vec();
            order.sort_by_key(|&at| (std::cmp::Reverse(free[at]), distance(at), at));
            order.truncate(size);
            order.sort_unstable();
            options.push(order);
            self.found.cut_off = true;
        }
        options
    }

    fn product<'b>(&mut self, options: &'b [Vec<Vec<usize>>], chosen: &mut Vec<&'b [usize]>) {
        let Some(of) = options.get(chosen.len()) else { return self.offer(chosen) };
        for set in of {
            if !self.found.placements.is_empty() && !self.may_go_on(set.len()) {
                return;
            }
            chosen.push(set);
            self.product(options, chosen);
            chosen.pop();
        }
    }

    /// The resources of which something is needed, largest sets first.
    fn by_size(&self, sizes: &[usize]) -> Vec<usize> {
        let mut order = self.needed.clone();
        order.sort_by_key(|&resource| (std::cmp::Reverse(sizes[resource]), resource));
        order
    }

    /// Sets of nodes of which the largest suffices for as many of each resource as its size says.
    fn outer_sets(
        &mut self,
        items: &[usize],
        columns: &[Vec<u64>],
        sizes: &[usize],
        size: usize,
    ) -> Vec<Vec<usize>> {
        if size == 1 {
            return items.iter().map(|&at| vec![at]).collect();
        }
        if items.len() <= EXACT {
            let mut sets = Vec::new();
            subsets(items, size, &mut |set| sets.push(set.to_vec()));
            return sets;
        }
        let wanted = |&resource: &usize| Wanted {
            need: self.unit.need[resource],
            free: columns[resource].clone(),
            count: Some(sizes[resource]),
        };
        let wanted = self.needed.iter().map(wanted).collect();
        let mut large = Large::new(self.host, items.to_vec(), wanted, self.share.half());
        let sets = large.search(size, size);
        self.found.cut_off |= large.cut_off;
        sets
    }

    fn sized(&mut self, sizes: &[usize]) {
        let order = self.by_size(sizes);
        let Some(size) = order.first().map(|&resource| sizes[resource]) else { return };
        if size == 0 || size > self.host.len() {
            return;
        }
        if size == 1 {
            self.share.charge(self.host.len() * self.needed.len());
            for at in 0..self.host.len() {
                if self.devices_allow(&[at]) {
                    self.on_one(at);
                }
            }
            return;
        }
        let all: Vec<usize> = (0..self.host.len()).collect();
        for set in self.outer_sets(&all, &self.room.free, sizes, size) {
            if self.devices_allow(&set) {
                let mut chain = vec![Vec::new(); self.unit.need.len()];
                self.chain(&order, sizes, &set, &mut chain, &mut |search, chain| {
                    let sets: Vec<&[usize]> = chain.iter().map(Vec::as_slice).collect();
                    search.offer(&sets);
                });
            }
        }
    }

    /// Devices are where they are: they count as a resource with a set of its own.
    fn devices_allow(&self, set: &[usize]) -> bool {
        let devices = &self.unit.devices;
        if devices.len() >= set.len() {
            devices.is_empty() || set.iter().all(|at| devices.contains(at))
        } else {
            devices.iter().all(|at| set.contains(at))
        }
    }

    /// Visits all chains of sets, each within the one before, that have enough.
    fn chain(
        &mut self,
        order: &[usize],
        sizes: &[usize],
        outer: &[usize],
        chain: &mut Vec<Vec<usize>>,
        visit: &mut dyn FnMut(&mut Self, &[Vec<usize>]),
    ) {
        let Some((&resource, rest)) = order.split_first() else { return visit(self, chain) };
        let size = sizes[resource];
        let mut sets = Vec::new();
        if size == outer.len() {
            sets.push(outer.to_vec());
        } else if outer.len() <= EXACT || size == 1 {
            subsets(outer, size, &mut |set| sets.push(set.to_vec()));
        } else {
            let free = &self.room.free[resource];
            let mut largest = outer.to_vec();
            largest.sort_by_key(|&at| (std::cmp::Reverse(free[at]), at));
            largest.truncate(size);
            largest.sort_unstable();
            sets.push(largest);
            self.found.cut_off = true;
        }
        for set in sets {
            if !self.may_go_on(set.len()) {
                return;
            }
            if self.enough(resource, &set) {
                chain[resource].clone_from(&set);
                self.chain(rest, sizes, &set, chain, visit);
            }
        }
    }

    /// As [`Self::sized`], with sets of nodes with CPUs that have the memory of what is attached to them.
    fn attached(&mut self, sizes: &[usize]) {
        let order = self.by_size(sizes);
        let Some(size) = order.first().map(|&resource| sizes[resource]) else { return };
        let anchors = anchors(self.host);
        if size == 0 || size > anchors.len() {
            return;
        }
        let column = |(resource, free): (usize, &Vec<u64>)| -> Vec<u64> {
            let with_attached = |at: usize| {
                let attached = if resource == CPU { &[][..] } else { self.host.attached(at) };
                attached.iter().fold(free[at], |sum, &of| sum.saturating_add(free[of]))
            };
            (0..self.host.len()).map(with_attached).collect()
        };
        let columns: Vec<Vec<u64>> = self.room.free.iter().enumerate().map(column).collect();
        for set in self.outer_sets(&anchors, &columns, sizes, size) {
            if self.devices_allow(&members(self.host, &set)) || self.devices_allow(&set) {
                self.anchor_chain(&order, sizes, &set, &mut vec![Vec::new(); self.unit.need.len()]);
            }
        }
    }

    /// Visits all chains of sets of nodes with CPUs that have enough together with what is attached to them.
    fn anchor_chain(
        &mut self,
        order: &[usize],
        sizes: &[usize],
        outer: &[usize],
        chain: &mut Vec<Vec<usize>>,
    ) {
        let Some((&resource, rest)) = order.split_first() else {
            let domains: Vec<&[usize]> = chain.iter().map(Vec::as_slice).collect();
            return self.combine(&domains);
        };
        let mut sets = Vec::new();
        if outer.len() <= EXACT || sizes[resource] == 1 {
            subsets(outer, sizes[resource], &mut |set| sets.push(set.to_vec()));
        } else if sizes[resource] == outer.len() {
            sets.push(outer.to_vec());
        } else {
            let of = |at: usize| if resource == CPU { vec![at] } else { members(self.host, &[at]) };
            let mut largest = outer.to_vec();
            largest.sort_by_key(|&at| (std::cmp::Reverse(self.sum(resource, &of(at))), at));
            largest.truncate(sizes[resource]);
            largest.sort_unstable();
            sets.push(largest);
            self.found.cut_off = true;
        }
        for set in sets {
            if !self.may_go_on(set.len()) {
                return;
            }
            let domain = if resource == CPU { set.clone() } else { members(self.host, &set) };
            if self.enough(resource, &domain) {
                chain[resource] = domain;
                self.anchor_chain(rest, sizes, &set, chain);
            }
        }
    }
}
