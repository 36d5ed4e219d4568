//! Search for the placements of a group.
//!
//! # Problem
//! Find the best few placements, by the criteria of module `rank`, among all sets of nodes that the policy permits
//! and that have enough free capacity. Each resource has its own set, and n nodes have 2ⁿ sets.
//!
//! # Rules
//! | rule | nodes |
//! |---|---|
//! | [`NodeCountRule::Anywhere`] (`none`, `best-effort`) | as few as possible in total, then as few as possible per resource |
//! | [`NodeCountRule::Sized`] (`single-numa-node`, `restricted`) | a fixed number per resource; smaller sets are subsets of larger ones |
//!
//! With [`NodeCountRule::Sized`] a memory-only node can count together with the nearest nodes with CPUs (*attached*).
//! Then sets of nodes with CPUs are searched as if these had the memory of their attached nodes, and each kind of
//! memory is placed on as few of all these nodes as possible. Placements without attached nodes remain permitted.
//!
//! # Algorithm
//! On up to [`MAX_EXACT_NODES`] nodes, all candidate sets are visited (module `sets`), small ones first. Within a
//! set, each resource gets its smallest subsets. Branches that cannot improve the result are dropped. On larger
//! machines, sets of several nodes come from module `large`, which stops after a fixed number of steps. A search also
//! stops when its share of the work is exhausted. If better placements may have been missed, the result is marked as
//! incomplete.

mod large;
mod sets;

use std::cmp::Reverse;

use self::{
    large::LargeSearch,
    sets::{CoreCheck, Demand, NodeSets},
};
use super::{
    free_capacity::{FreeCapacity, PlacementGroup},
    host::{CPU, HostModel},
    rank::{RankedPlacement, common_rank, pairs, rank, stranded_capacity},
    work_budget::{WorkBudget, WorkShare},
};
use crate::placement_search::Rank;

/// Maximum number of nodes for which all sets are enumerated.
pub(super) const MAX_EXACT_NODES: usize = 20;
/// Maximum number of sets of nodes that are considered where not all are enumerated.
pub(super) const MAX_SETS: usize = 500;
/// Maximum number of placements that a search returns.
pub(super) const MAX_PLACEMENTS: usize = 8;

/// Numbers of nodes that a policy permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NodeCountRule {
    Anywhere,
    /// Fixed number of nodes for each resource; smaller sets are subsets of larger ones.
    Sized {
        /// Number of nodes by resource.
        sizes: Vec<usize>,
        /// Number of nodes with CPUs by resource, if attached nodes count with them. `None` if they do not.
        with_attached: Option<Vec<usize>>,
        /// True if the number of nodes with attached nodes is unknown, so that only placements without them are
        /// searched.
        is_incomplete: bool,
    },
}

/// Result of a search.
#[derive(Clone, Debug, Default)]
pub(super) struct SearchResult {
    /// Best placements, best first; at most [`MAX_PLACEMENTS`].
    pub(super) placements: Vec<RankedPlacement>,
    /// Number of compared placements.
    pub(super) considered: u64,
    /// True if better placements may have been missed.
    pub(super) is_incomplete: bool,
}

/// Extent of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SearchExtent {
    /// The best placements are searched.
    Best,
    /// Any placement suffices.
    Any,
}

/// Searches placements of a group.
pub(super) fn search(
    host: &HostModel,
    free_capacity: &FreeCapacity,
    group: &PlacementGroup,
    rule: &NodeCountRule,
    extent: SearchExtent,
    work: &WorkBudget,
) -> SearchResult {
    let share = work.share();
    share.charge(60 + 2 * host.len() * group.need.len());
    let needed = group.resources().collect();
    let mut search = SearchState {
        host,
        free_capacity,
        group,
        needed,
        share,
        extent,
        lead: None,
        cores_match: false,
        found: SearchResult::default(),
    };
    match rule {
        NodeCountRule::Anywhere => search.anywhere(),
        NodeCountRule::Sized { sizes, with_attached, is_incomplete } => {
            search.found.is_incomplete = *is_incomplete;
            search.sized(sizes);
            if let Some(sizes) = with_attached.as_ref().filter(|_| !search.is_done()) {
                search.attached(sizes);
            }
        }
    }
    search.found
}

/// Returns the smallest number of nodes that can hold an amount, or `None` if all together cannot.
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

/// Smallest number of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FewestNodes {
    Known(usize),
    /// All nodes together are not enough.
    Impossible,
    /// The search ended at its share of the work.
    Unknown,
}

/// Returns the smallest number of nodes with CPUs that can hold an amount together with their attached nodes.
pub(super) fn fewest_with_attached(
    host: &HostModel,
    free: &[u64],
    needed: u64,
    work: &WorkBudget,
) -> FewestNodes {
    let share = work.share();
    let anchors = nodes_with_cpus(host);
    // Largest first; a node that is attached to several counts once.
    let mut counted = vec![false; host.len()];
    let mut largest = anchors.clone();
    largest.sort_by_key(|&at| Reverse(free[at]));
    let gain = |&at: &usize| {
        share.charge(2 + host.attached(at).len());
        let attached = host.attached(at).iter().filter(|&&of| !std::mem::replace(&mut counted[of], true));
        attached.fold(free[at], |sum, &of| sum.saturating_add(free[of]))
    };
    let gains: Vec<u64> = largest.iter().map(gain).collect();
    // Exact if any two nodes have the same attached nodes or no common one, otherwise an upper bound.
    let Some(most) = fewest(gains, needed) else { return FewestNodes::Impossible };
    if host.attached_apart() {
        return FewestNodes::Known(most);
    }
    let sum = |set: &[usize]| {
        let members = with_attached_nodes(host, set);
        share.charge(4 * (set.len() + members.len()));
        members.iter().fold(0u64, |sum, &at| sum.saturating_add(free[at]))
    };
    // Nodes that share an attached node have less in total.
    let column: Vec<u64> = (0..host.len()).map(|at| sum(&[at])).collect();
    let least = fewest(anchors.iter().map(|&at| column[at]), needed).unwrap_or(most);
    let wanted = [Demand { need: needed, free: &column, count: None, cores: None }];
    for size in least..most {
        if share.is_spent() {
            return FewestNodes::Unknown;
        }
        let mut found = false;
        let all = NodeSets::new(&anchors, &|at| at, size, &wanted, share).each(false, &mut |set| {
            found = sum(set) >= needed;
            !found
        });
        if found {
            return FewestNodes::Known(size);
        }
        if !all {
            return FewestNodes::Unknown;
        }
    }
    FewestNodes::Known(most)
}

/// Returns the nodes with CPUs.
fn nodes_with_cpus(host: &HostModel) -> Vec<usize> {
    (0..host.len()).filter(|&at| host.has_cpus(at)).collect()
}

/// Returns these nodes and their attached nodes in ascending order.
pub(super) fn with_attached_nodes(host: &HostModel, set: &[usize]) -> Vec<usize> {
    let mut members: Vec<usize> = set.to_vec();
    members.extend(set.iter().flat_map(|&at| host.attached(at)));
    members.sort_unstable();
    members.dedup();
    members
}

/// Visits all subsets of a size in lexicographic order.
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

struct SearchState<'a> {
    host: &'a HostModel,
    free_capacity: &'a FreeCapacity,
    group: &'a PlacementGroup,
    /// Resources with a need.
    needed: Vec<usize>,
    share: WorkShare<'a>,
    extent: SearchExtent,
    /// Common part of the ranks of all placements on the current nodes; the other criteria are zero.
    lead: Option<Rank>,
    /// True if whole cores of any set of CPUs added up since this was reset.
    cores_match: bool,
    found: SearchResult,
}

/// Choice of a set for one resource: `size` nodes of the domain or, without a domain, of the nodes chosen before.
#[derive(Clone, Copy)]
struct SearchLevel<'a> {
    resource: usize,
    size: usize,
    domain: Option<&'a [usize]>,
}

impl<'a> SearchState<'a> {
    /// Returns whether the search has found enough.
    fn is_done(&self) -> bool {
        self.extent == SearchExtent::Any && !self.found.placements.is_empty()
    }

    /// Returns whether a placement with this rank or a worse one would be dropped.
    fn cannot_be_kept(&self, rank: &Rank) -> bool {
        let placements = &self.found.placements;
        placements.len() == MAX_PLACEMENTS && placements.last().is_some_and(|worst| worst.key < *rank)
    }

    /// Adds a placement to the result if it is good enough. The caller has checked whole cores.
    fn consider(&mut self, sets: &[&[usize]]) {
        let (mut key, nodes) = rank(self.host, self.group, sets);
        self.share.charge(24 + 2 * nodes.len() * nodes.len());
        self.found.considered += 1;
        // Stranding is expensive to compute and only matters if all previous criteria are equal.
        if self.cannot_be_kept(&key) {
            return;
        }
        key.stranded = stranded_capacity(self.host, self.free_capacity, self.group, sets, &nodes);
        key.load = self.free_capacity.load(self.host, &nodes);
        if self.cannot_be_kept(&key) {
            return;
        }
        let placement = RankedPlacement { key, nodes, sets: sets.iter().map(|set| set.to_vec()).collect() };
        let placements = &mut self.found.placements;
        if let Err(index) = placements.binary_search(&placement) {
            placements.insert(index, placement);
            placements.truncate(MAX_PLACEMENTS);
        }
    }

    /// Returns the check of whole cores, if it is necessary.
    fn core_check(&self) -> Option<CoreCheck<'a>> {
        let needed = self.group.need[CPU];
        let is_necessary = needed > 0 && !self.free_capacity.cores.is_empty();
        is_necessary.then_some(CoreCheck { free_capacity: self.free_capacity, needed, share: self.share })
    }

    /// Returns whether whole cores of these nodes add up to the needed CPUs. The caller has checked the total.
    fn has_matching_cores(&self, set: &[usize]) -> bool {
        self.core_check().is_none_or(|check| check.matches(set))
    }

    /// Considers the placement of everything on one node.
    fn on_one(&mut self, at: usize) {
        let fits = self
            .needed
            .iter()
            .all(|&resource| self.free_capacity.free[resource][at] >= self.group.need[resource])
            && self.has_matching_cores(&[at]);
        if fits {
            let set = [at];
            let sets: Vec<&[usize]> =
                self.group.need.iter().map(|&need| if need > 0 { &set[..] } else { &[][..] }).collect();
            self.consider(&sets);
        }
    }

    /// Returns the demand by resource. With `sizes`, at most that many nodes of a set give a resource.
    fn wanted<'b>(&self, columns: &'b [Vec<u64>], sizes: Option<&[usize]>) -> Vec<Demand<'b>>
    where
        'a: 'b,
    {
        let of = |&resource: &usize| Demand {
            need: self.group.need[resource],
            free: &columns[resource],
            count: sizes.map(|sizes| sizes[resource]),
            cores: self.core_check().filter(|_| resource == CPU),
        };
        self.needed.iter().map(of).collect()
    }

    /// Visits the sufficient sets of a size.
    fn each_set(
        &mut self,
        (items, columns): (&[usize], &[Vec<u64>]),
        size: usize,
        sizes: Option<&[usize]>,
        visit: &mut dyn FnMut(&mut Self, &[usize]),
    ) {
        let wanted = self.wanted(columns, sizes);
        let mut found = false;
        if items.len() <= MAX_EXACT_NODES {
            let (host, free_capacity, group) = (self.host, self.free_capacity, self.group);
            let alike = |at: usize| {
                let before = items.iter().copied().take_while(|&before| before < at);
                before
                    .into_iter()
                    .find(|&before| {
                        free_capacity.are_alike(host, group, before, at)
                            && !free_capacity.has_tie_between(host, group, before, at)
                    })
                    .unwrap_or(at)
            };
            self.share.charge(items.len() * items.len());
            let sets = NodeSets::new(items, &alike, size, &wanted, self.share);
            let all = sets.each(false, &mut |set| {
                found = true;
                visit(self, set);
                !self.is_done()
            });
            self.found.is_incomplete |= !all;
            if found || all {
                return;
            }
        }
        // More sets may exist.
        self.found.is_incomplete = true;
        let most = if sizes.is_some() { size } else { items.len() };
        let mut large = LargeSearch::new(self.host, items.to_vec(), &wanted, self.extent, self.share.half());
        for set in large.search(size, most) {
            if found && self.share.is_spent() || self.is_done() {
                break;
            }
            found = true;
            visit(self, &set);
        }
    }

    fn anywhere(&mut self) {
        let least = self.needed.iter().map(|&resource| {
            fewest(self.free_capacity.free[resource].iter().copied(), self.group.need[resource])
        });
        let Some(least) = least.collect::<Option<Vec<_>>>().map(|least| least.into_iter().max().unwrap_or(0))
        else {
            return;
        };
        let all: Vec<usize> = (0..self.host.len()).collect();
        let mut most = all.len();
        for size in least.max(1)..=all.len() {
            if size == 1 {
                self.share.charge(all.len() * self.needed.len());
                for &at in &all {
                    self.on_one(at);
                }
            } else {
                self.each_set((&all, &self.free_capacity.free), size, None, &mut |search, set| {
                    search.within(set);
                });
            }
            // Nodes of devices count for the rank, so a larger set that includes them can be as good.
            if let Some(best) = self.found.placements.first() {
                most = usize::try_from(best.key.nodes).unwrap_or(most);
            }
            // The search on a larger machine has found larger sets as well.
            if size >= most || size > 1 && (all.len() > MAX_EXACT_NODES || self.share.is_spent()) {
                self.found.is_incomplete |= size < most;
                return;
            }
        }
    }

    /// Places each resource on its smallest subsets of a set.
    fn within(&mut self, set: &[usize]) {
        let domains: Vec<&[usize]> =
            self.group.need.iter().map(|&need| if need > 0 { set } else { &[] }).collect();
        self.combine(&domains, Some(set));
    }

    /// Places each resource on its smallest subsets of its own domain. With `all`, the placement uses exactly these
    /// nodes.
    fn combine(&mut self, domains: &[&[usize]], all: Option<&[usize]>) {
        let mut levels = Vec::with_capacity(self.needed.len());
        for &resource in &self.needed {
            let (domain, free) = (domains[resource], &self.free_capacity.free[resource]);
            self.share.charge(20 + 4 * domain.len());
            let size = fewest(domain.iter().map(|&at| free[at]), self.group.need[resource]);
            let Some(size) = size else { return };
            levels.push(SearchLevel { resource, size, domain: Some(domain) });
        }
        let of_cpus = self.core_check().and_then(|_| levels.iter().position(|level| level.resource == CPU));
        while !self.combine_sizes(&levels, domains.len(), all) {
            // More nodes are necessary if whole cores of no smaller set add up.
            let Some(level) = of_cpus.and_then(|of_cpus| levels.get_mut(of_cpus)) else { return };
            if level.size >= domains[CPU].len() || self.share.is_spent() {
                return;
            }
            level.size += 1;
        }
    }

    /// Places each resource on subsets of the given sizes. Returns false if whole cores of no such set add up.
    fn combine_sizes(&mut self, levels: &[SearchLevel<'_>], resources: usize, all: Option<&[usize]>) -> bool {
        let sizes = levels.iter().map(|level| level.size);
        let per_resource = sizes.clone().sum::<usize>() as u64;
        let lead = match all {
            Some(nodes) => common_rank(self.host, self.group, nodes, per_resource),
            // A lower bound.
            None => Rank {
                nodes: sizes.max().unwrap_or(0) as u64,
                nodes_per_resource: per_resource,
                ..Rank::default()
            },
        };
        if self.cannot_be_kept(&lead) {
            return true;
        }
        self.lead = all.is_some().then_some(lead);
        self.cores_match = false;
        self.choose(levels, &[], None, &mut vec![Vec::new(); resources]);
        self.cores_match
    }

    /// Chooses the sets of all resources, level by level. With `attached`, the columns include attached nodes, and
    /// the final domains do as well.
    fn choose(
        &mut self,
        levels: &[SearchLevel<'_>],
        outer: &[usize],
        attached: Option<&[Vec<u64>]>,
        sets: &mut [Vec<usize>],
    ) {
        let Some((level, rest)) = levels.split_first() else {
            if attached.is_some() {
                // Each resource goes to its smallest subsets of these nodes and their attached nodes.
                let with = |(resource, set): (usize, &Vec<usize>)| {
                    if resource == CPU { set.clone() } else { with_attached_nodes(self.host, set) }
                };
                let domains: Vec<Vec<usize>> = sets.iter().enumerate().map(with).collect();
                self.share.charge(8 * domains.iter().map(Vec::len).sum::<usize>());
                return self.combine(&domains.iter().map(Vec::as_slice).collect::<Vec<_>>(), None);
            }
            return self.consider(&sets.iter().map(Vec::as_slice).collect::<Vec<_>>());
        };
        let &SearchLevel { resource, size, domain } = level;
        let (domain, need) = (domain.unwrap_or(outer), self.group.need[resource]);
        let free_capacity = self.free_capacity;
        let column = &attached.unwrap_or(&free_capacity.free)[resource];
        let wanted = [Demand { need, free: column, count: None, cores: None }];
        let sets_of = NodeSets::new(domain, &|at| at, size, &wanted, self.share);
        let all = sets_of.each(self.found.placements.is_empty(), &mut |set| {
            let with_attached = attached.is_some() && resource != CPU;
            let domain = if with_attached { &with_attached_nodes(self.host, set) } else { set };
            self.share.charge(10 + 4 * domain.len());
            let sum = domain
                .iter()
                .fold(0u64, |sum, &at| sum.saturating_add(self.free_capacity.free[resource][at]));
            if sum < need {
                return true;
            }
            if resource == CPU && attached.is_none() {
                if !self.has_matching_cores(set) {
                    return true;
                }
                self.cores_match = true;
            }
            if let (CPU, None, Some(lead)) = (resource, attached, self.lead) {
                self.share.charge(set.len() * set.len());
                if self.cannot_be_kept(&Rank { cpu_to_cpu: pairs(self.host, set), ..lead }) {
                    return true;
                }
            }
            sets[resource] = set.to_vec();
            self.choose(rest, set, attached, sets);
            !self.is_done()
        });
        self.found.is_incomplete |= !all;
    }

    /// Returns the free amounts by node including attached nodes.
    fn column(&self, resource: usize) -> Vec<u64> {
        let free = &self.free_capacity.free[resource];
        let with_attached = |at: usize| {
            let attached = if resource == CPU { &[][..] } else { self.host.attached(at) };
            attached.iter().fold(free[at], |sum, &of| sum.saturating_add(free[of]))
        };
        (0..self.host.len()).map(with_attached).collect()
    }

    /// Returns the levels, largest sets first, each a subset of the previous one.
    fn nested(&self, sizes: &[usize]) -> Vec<SearchLevel<'static>> {
        let level = |&resource: &usize| SearchLevel { resource, size: sizes[resource], domain: None };
        let mut levels: Vec<SearchLevel<'_>> = self.needed.iter().map(level).collect();
        levels.sort_by_key(|level| (Reverse(level.size), level.resource));
        levels
    }

    fn sized(&mut self, sizes: &[usize]) {
        let levels = self.nested(sizes);
        let size = levels.first().map_or(0, |level| level.size);
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
        let per_resource = levels.iter().map(|level| level.size as u64).sum();
        self.each_set((&all, &self.free_capacity.free), size, Some(sizes), &mut |search, set| {
            let lead = common_rank(search.host, search.group, set, per_resource);
            if search.devices_allow(set) && !search.cannot_be_kept(&lead) {
                search.lead = Some(lead);
                search.choose(&levels, set, None, &mut vec![Vec::new(); sizes.len()]);
            }
        });
    }

    /// Returns whether the nodes of devices fit this set: like a resource, they must be nested with it.
    fn devices_allow(&self, set: &[usize]) -> bool {
        let devices = &self.group.devices;
        if devices.len() >= set.len() {
            devices.is_empty() || set.iter().all(|at| devices.contains(at))
        } else {
            devices.iter().all(|at| set.contains(at))
        }
    }

    /// Like [`Self::sized`], but with nodes that count together with their attached nodes.
    fn attached(&mut self, sizes: &[usize]) {
        let levels = self.nested(sizes);
        let size = levels.first().map_or(0, |level| level.size);
        let anchors = nodes_with_cpus(self.host);
        if size == 0 || size > anchors.len() {
            return;
        }
        let columns: Vec<Vec<u64>> = (0..sizes.len()).map(|resource| self.column(resource)).collect();
        self.each_set((&anchors, &columns), size, Some(sizes), &mut |search, set| {
            if search.devices_allow(&with_attached_nodes(search.host, set)) || search.devices_allow(set) {
                search.choose(&levels, set, Some(&columns), &mut vec![Vec::new(); sizes.len()]);
            }
        });
    }
}
