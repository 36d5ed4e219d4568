//! Free capacity and placement groups, as numbers by resource and node position.

use std::{cmp::Reverse, collections::BTreeMap, sync::Arc};

use numaward_topology::{Bytes, ZoneKind};

use super::{
    host::{CPU, HostModel, column},
    rank::{RankedPlacement, amounts},
};
use crate::{
    conditions::{HostConditions, WithheldMemory},
    cores::{CoreRun, find_counts_with_sum},
    decision::Shortfall,
    hint::Resource,
    ledger::Ledger,
    request::ContainerName,
    terms::Terms,
};

/// Capacity that is left for a request, by resource and position.
#[derive(Clone, Debug)]
pub(super) struct FreeCapacity {
    pub(super) free: Vec<Vec<u64>>,
    /// Allocatable amounts of the idle machine.
    pub(super) capacity: Vec<Vec<u64>>,
    /// Number of CPUs that are taken together.
    pub(super) cpu_granularity: u64,
    /// Free whole cores by position, largest first, if only whole cores are taken and their sizes differ. Otherwise
    /// empty.
    pub(super) cores: Vec<Vec<CoreRun>>,
    /// Index of the resource base memory, if memory is managed.
    pub(super) memory: Option<usize>,
    /// Free but withheld amounts. They affect whether a group fits, but not which placement is better. Empty if
    /// nothing is withheld.
    pub(super) withheld: Vec<Vec<u64>>,
    conditions: Arc<HostConditions>,
}

impl FreeCapacity {
    /// Computes the capacity that a ledger leaves for requests with these terms, under the current host conditions.
    pub(super) fn new(host: &HostModel, ledger: &Ledger, terms: &Terms) -> Self {
        let mut free = Vec::with_capacity(host.resources.len());
        for resource in &host.resources {
            free.push(match (resource, &host.cpus) {
                (&Resource::Memory(kind), _) => offered(host, ledger, kind),
                (_, Some(cpus)) => cpus.count(&cpus.available(ledger, terms).cpus),
                (_, None) => vec![0; host.len()],
            });
        }
        let mut withheld = Vec::new();
        if !ledger.conditions().withheld.is_empty() {
            let rest = |(resource, offered): (&Resource, &Vec<u64>)| match *resource {
                Resource::Memory(kind) => {
                    let all = column(&host.ids, &ledger.nodes, kind, |account| account.free);
                    all.iter().zip(offered).map(|(all, offered)| all.saturating_sub(*offered)).collect()
                }
                _ => vec![0; host.len()],
            };
            withheld = host.resources.iter().zip(&free).map(rest).collect();
        }
        let mut capacity = host.capacity.clone();
        if let Some(cpus) = host.cpus.as_ref().filter(|_| !terms.cpu_kinds.is_empty() || terms.hide_siblings)
        {
            capacity[CPU] = cpus.capacity_for(terms);
        }
        Self {
            free,
            capacity,
            cores: host.cpus.as_ref().map(|cpus| cpus.unequal_cores(ledger, terms)).unwrap_or_default(),
            cpu_granularity: host.cpus.as_ref().map_or(1, |cpus| cpus.granularity(terms)),
            memory: host.number_of(ZoneKind::Memory),
            withheld,
            conditions: ledger.conditions().clone(),
        }
    }

    /// Returns the capacity of the idle machine.
    pub(super) fn empty(&self) -> Self {
        // Core sizes are ignored here.
        Self { free: self.capacity.clone(), withheld: Vec::new(), cores: Vec::new(), ..self.clone() }
    }

    /// Returns the capacity including withheld amounts.
    pub(super) fn with_withheld(&self) -> Self {
        let mut all = self.clone();
        for (free, withheld) in all.free.iter_mut().zip(std::mem::take(&mut all.withheld)) {
            for (free, withheld) in free.iter_mut().zip(withheld) {
                *free = free.saturating_add(withheld);
            }
        }
        all
    }

    /// Returns the withheld amounts of a resource by position; empty if there are none.
    pub(super) fn withheld_of(&self, resource: usize) -> &[u64] {
        self.withheld.get(resource).map_or(&[], Vec::as_slice)
    }

    /// Returns the withheld memory of a resource by node.
    pub(super) fn withheld_by_node(&self, host: &HostModel, resource: usize) -> Vec<WithheldMemory> {
        let Resource::Memory(kind) = host.resources[resource] else { return Vec::new() };
        let of = host.ids.iter().zip(self.withheld_of(resource)).filter(|(_, bytes)| **bytes > 0);
        of.map(|(&node, &bytes)| WithheldMemory { node, kind, bytes: Bytes(bytes) }).collect()
    }

    /// Excludes a node for a resource.
    pub(super) fn exclude(&mut self, resource: usize, at: usize) {
        self.free[resource][at] = 0;
        if let Some(withheld) = self.withheld.get_mut(resource) {
            withheld[at] = 0;
        }
    }

    /// Excludes all other nodes.
    pub(super) fn keep_only(&mut self, nodes: &[usize]) {
        for resource in 0..self.free.len() {
            for at in (0..self.free[resource].len()).filter(|at| !nodes.contains(at)) {
                self.exclude(resource, at);
            }
        }
    }

    /// Returns the work of one check of whole cores. Usually the largest cores add up. Otherwise, there is one bit for
    /// each sum.
    pub(super) fn matching_work(&self, set: &[usize], needed: u64) -> usize {
        let runs: usize = set.iter().filter_map(|&at| self.cores.get(at)).map(Vec::len).sum();
        10 + 2 * runs.saturating_add(usize::try_from(needed / 64).unwrap_or(usize::MAX / 4))
    }

    /// Returns whether some whole cores of these nodes have the needed number of CPUs in total.
    pub(super) fn has_matching_cores(&self, set: &[usize], needed: u64) -> bool {
        let mut counts: BTreeMap<Reverse<usize>, usize> = BTreeMap::new();
        for run in set.iter().flat_map(|&at| &self.cores[at]) {
            *counts.entry(Reverse(run.size)).or_insert(0) += run.count;
        }
        let runs: Vec<CoreRun> =
            counts.into_iter().map(|(Reverse(size), count)| CoreRun { size, count }).collect();
        usize::try_from(needed).is_ok_and(|needed| find_counts_with_sum(&runs, needed).is_some())
    }

    /// Returns how many CPUs each node of a set gives as whole cores, if core sizes differ. Nodes with the fewest
    /// free CPUs come first.
    pub(super) fn whole_cores(&self, set: &[usize], needed: u64) -> Option<Vec<(usize, u64)>> {
        let mut order = set.to_vec();
        order.sort_by_key(|&at| (self.free[CPU][at], at));
        let all = order.iter().flat_map(|&at| self.cores[at].iter().map(move |&run| (at, run)));
        let (nodes, runs): (Vec<usize>, Vec<CoreRun>) = all.unzip();
        let mut shares = BTreeMap::new();
        let counts = find_counts_with_sum(&runs, usize::try_from(needed).ok()?)?;
        for ((at, run), count) in nodes.into_iter().zip(runs).zip(counts).filter(|(_, count)| *count > 0) {
            *shares.entry(at).or_insert(0) += (run.size * count) as u64;
        }
        Some(shares.into_iter().collect())
    }

    /// Takes whole cores of a node with `count` CPUs in total.
    pub(super) fn take_cores(&mut self, at: usize, count: u64) {
        let Some(runs) = self.cores.get_mut(at) else { return };
        let taken = usize::try_from(count).ok().and_then(|count| find_counts_with_sum(runs, count));
        for (run, count) in runs.iter_mut().zip(taken.into_iter().flatten()) {
            run.count -= count;
        }
        runs.retain(|run| run.count > 0);
    }

    /// Returns the amounts by resource and node for a placement of the group.
    pub(super) fn shares(
        &self,
        host: &HostModel,
        group: &PlacementGroup,
        placement: &RankedPlacement,
    ) -> AmountsByResource {
        let of = |(resource, set): (usize, &Vec<usize>)| match set.as_slice() {
            [] => Vec::new(),
            set => amounts(host, self, resource, set, group.need[resource]),
        };
        placement.sets.iter().enumerate().map(of).collect()
    }

    /// Takes the amounts of a group and returns them by resource and node.
    pub(super) fn take(
        &mut self,
        host: &HostModel,
        group: &PlacementGroup,
        placement: &RankedPlacement,
    ) -> AmountsByResource {
        let shares = self.shares(host, group, placement);
        for (free, of) in self.free.iter_mut().zip(&shares) {
            for &(at, share) in of {
                free[at] = free[at].saturating_sub(share);
            }
        }
        for &(at, share) in shares.first().into_iter().flatten() {
            self.take_cores(at, share);
        }
        shares
    }

    /// Returns amounts that were taken. Does not restore core sizes.
    pub(super) fn restore(&mut self, shares: &AmountsByResource) {
        for (resource, of) in shares.iter().enumerate() {
            for &(at, share) in of {
                self.free[resource][at] += share;
            }
        }
    }

    /// Returns the free amounts of the resources by node.
    pub(super) fn shortfalls(
        &self,
        host: &HostModel,
        group: &PlacementGroup,
        resources: &[usize],
    ) -> Vec<Shortfall> {
        let mut shortfalls = Vec::new();
        for &number in resources {
            let resource = host.resources[number];
            let of = |at: usize| {
                let (node, free) = (host.id(at), self.free[number][at]);
                let withheld = self.withheld_of(number).get(at).copied().unwrap_or(0);
                Shortfall { node, resource, requested: group.need[number], free, withheld }
            };
            shortfalls.extend((0..host.len()).map(of));
        }
        shortfalls
    }

    /// Returns whether two nodes are interchangeable for all groups of the request.
    pub(super) fn are_alike(&self, host: &HostModel, group: &PlacementGroup, a: usize, b: usize) -> bool {
        let same = |columns: &[Vec<u64>]| columns.iter().all(|column| column[a] == column[b]);
        host.twins(a) == host.twins(b)
            && host.has_cpus(a) == host.has_cpus(b)
            && same(&self.free)
            && same(&self.capacity)
            && same(&self.withheld)
            && self.cores.get(a) == self.cores.get(b)
            && !group.named.iter().any(|&named| named == a || named == b)
            && self.load(host, &[a]) == self.load(host, &[b])
    }

    /// Returns whether a node between two others, in the order of ids, has the same free amount of a resource and is not
    /// alike. Nodes with equal free amounts give in the order of ids, so it matters on which side of it a node is.
    pub(super) fn has_tie_between(
        &self,
        host: &HostModel,
        group: &PlacementGroup,
        a: usize,
        b: usize,
    ) -> bool {
        let free = |resource: usize, at: usize| {
            let withheld = self.withheld_of(resource).get(at).copied().unwrap_or(0);
            self.free[resource][at].saturating_add(withheld)
        };
        let needed = (0..self.free.len()).filter(|&resource| group.need[resource] > 0).collect::<Vec<_>>();
        let ties = |at: usize| needed.iter().any(|&resource| free(resource, at) == free(resource, a));
        (a + 1..b).any(|at| ties(at) && !self.are_alike(host, group, a, at))
    }

    /// Returns the load of other nodes on a set of nodes.
    pub(super) fn load(&self, host: &HostModel, nodes: &[usize]) -> u64 {
        let of = |at: &usize| self.conditions.load.get(&host.id(*at)).copied().unwrap_or(0);
        if self.conditions.load.is_empty() { 0 } else { nodes.iter().map(of).fold(0, u64::saturating_add) }
    }
}

/// Returns the free bytes of a kind that are not withheld, by position.
pub(super) fn offered(host: &HostModel, ledger: &Ledger, kind: ZoneKind) -> Vec<u64> {
    let mut free = column(&host.ids, &ledger.nodes, kind, |account| account.free);
    if let Some(withheld) = ledger.conditions().withheld.get(&kind) {
        for (free, node) in free.iter_mut().zip(&host.ids) {
            *free = free.saturating_sub(withheld.get(node).map_or(0, |bytes| bytes.0));
        }
    }
    free
}

/// Amounts by resource and node position.
pub(super) type AmountsByResource = Vec<Vec<(usize, u64)>>;

/// Containers that are placed together: one or, in pod scope, all that run at the same time.
#[derive(Clone, Debug)]
pub(super) struct PlacementGroup {
    /// `None` for several containers.
    pub(super) container: Option<ContainerName>,
    /// Needed amount by resource.
    pub(super) need: Vec<u64>,
    /// Nodes of the devices.
    pub(super) devices: Vec<usize>,
    /// Flags of nodes that are not preferred, by position. Empty if there are no preferences.
    pub(super) not_preferred: Vec<bool>,
    /// Nodes that any container of the request names, as device nodes or preferences.
    pub(super) named: Vec<usize>,
}

impl PlacementGroup {
    /// Returns the resources that the group needs.
    pub(super) fn resources(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.need.len()).filter(|&resource| self.need[resource] > 0)
    }

    /// Returns the largest share of the idle machine over all resources, in millionths.
    pub(super) fn dominant_share(&self, free_capacity: &FreeCapacity) -> u128 {
        let share = |resource: usize| {
            let all: u128 = free_capacity.capacity[resource].iter().map(|&of| u128::from(of)).sum();
            u128::from(self.need[resource]) * 1_000_000 / all.max(1)
        };
        self.resources().map(share).max().unwrap_or(0)
    }
}
