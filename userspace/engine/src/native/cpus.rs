//! Exclusive CPUs: counts the CPUs of each node and selects the CPUs of an allocation.
//!
//! The search decides earlier how many CPUs come from which node, for all resources together. Within a node, whole
//! cores are taken first, then single CPUs of partially used cores, so that large free parts stay whole. The options
//! of the static CPU policy have these effects:
//!
//! | option | effect |
//! |---|---|
//! | `full-pcpus-only` | only whole free cores count, and a request must be a sum of core sizes; with hidden siblings, one CPU of each core is taken |
//! | `distribute-cpus-across-numa` | several nodes give equal numbers of CPUs |
//! | `distribute-cpus-across-cores` | one CPU of each core in turn |
//! | `prefer-align-cpus-by-uncorecache` | CPUs of as few last-level caches as possible |
//! | `align-by-socket` | with `restricted`, a request that does not fit a smallest set of nodes may use any nodes of one socket |
//! | `strict-cpu-reservation` | the shared pool has no reserved CPUs |
//!
//! In contrast to the kubelet, actual core sizes count: cores of 2, 2 and 1 CPUs can provide three CPUs.

use std::collections::BTreeMap;

use numaward_topology::{CpuSet, Machine, NodeId, NodeSet};

use crate::{
    cores::{CoreRun, core_runs, find_sizes_with_sum},
    decision::ResizeError,
    kubelet::cpu::{CpuError, StaticCpuManager},
    ledger::Ledger,
    policy::{CpuKind, CpuOptions},
    terms::Terms,
};

/// CPUs of a node.
#[derive(Debug)]
struct NodeCpus {
    all: CpuSet,
    /// Cores, ordered by lowest CPU.
    cores: Vec<CpuSet>,
    /// Last-level caches; one for the whole node if the platform reports none.
    caches: Vec<CpuSet>,
}

/// CPUs of the machine.
#[derive(Debug)]
pub(super) struct MachineCpus {
    nodes: Vec<NodeCpus>,
    pub(super) manager: StaticCpuManager,
    pub(super) options: CpuOptions,
    /// CPUs that can become exclusive.
    pub(super) allocatable: CpuSet,
    /// Shared pool without exclusive CPUs.
    pub(super) idle_pool: CpuSet,
    /// Greatest common divisor of all core sizes.
    per_core: usize,
    /// True if core sizes differ.
    unequal: bool,
    kinds: BTreeMap<CpuKind, CpuSet>,
}

/// CPUs that a request can take, with the rules for taking them.
#[derive(Clone, Debug, Default)]
pub(super) struct AvailableCpus {
    /// CPUs that can become exclusive now.
    pub(super) cpus: CpuSet,
    /// True if CPUs that share a last-level cache are preferred.
    pub(super) by_cache: bool,
    /// True if only whole cores are taken.
    pub(super) whole_cores: bool,
}

impl MachineCpus {
    pub(super) fn new(machine: &Machine, manager: StaticCpuManager, options: CpuOptions) -> Self {
        let groups = |by: BTreeMap<u32, CpuSet>| -> Vec<CpuSet> {
            let by_lowest: BTreeMap<_, CpuSet> = by.into_values().map(|cpus| (cpus.first(), cpus)).collect();
            by_lowest.into_values().collect()
        };
        let of_node = |id: &NodeId| {
            let mut all = CpuSet::new();
            let (mut cores, mut caches) = (BTreeMap::<_, CpuSet>::new(), BTreeMap::<_, CpuSet>::new());
            for (&cpu, data) in machine.cpus.iter().filter(|(_, data)| data.node == *id) {
                all.insert(cpu);
                cores.entry(data.core.0).or_default().insert(cpu);
                caches
                    .entry(data.last_level_cache.map_or(u32::MAX, |cache| cache.0))
                    .or_default()
                    .insert(cpu);
            }
            NodeCpus { all, cores: groups(cores), caches: groups(caches) }
        };
        let nodes: Vec<NodeCpus> = machine.nodes.keys().map(of_node).collect();
        let sizes = || nodes.iter().flat_map(|node| &node.cores).map(CpuSet::len);
        let per_core = sizes().fold(0, greatest_common_divisor);
        // If it is unknown which CPUs have a kind, no CPU has it.
        let kinds =
            CpuKind::ALL.iter().map(|&kind| (kind, kind.cpus_of(machine).unwrap_or_default())).collect();
        Self {
            allocatable: manager.allocatable(),
            idle_pool: manager.idle_pool(),
            unequal: sizes().any(|size| size != per_core),
            per_core: per_core.max(1),
            nodes,
            manager,
            options,
            kinds,
        }
    }

    /// Returns the number of CPUs that each node can give on the idle machine, by position.
    pub(super) fn capacity(&self) -> Vec<u64> {
        self.count(&self.whole(&self.allocatable))
    }

    /// Returns the number of CPUs that each node can give to a request with these terms on the idle machine, by
    /// position.
    pub(super) fn capacity_for(&self, terms: &Terms) -> Vec<u64> {
        self.count(&self.filter_takeable(&self.allocatable, terms))
    }

    /// Returns the CPUs that can become exclusive now, including those of partially used cores.
    pub(super) fn free(&self, ledger: &Ledger) -> CpuSet {
        &offered(&ledger.shared_pool, ledger) & &self.allocatable
    }

    /// Returns the CPUs that a request with these terms can take now.
    pub(super) fn available(&self, ledger: &Ledger, terms: &Terms) -> AvailableCpus {
        AvailableCpus {
            cpus: self.filter_takeable(&self.free(ledger), terms),
            by_cache: terms.same_cache,
            whole_cores: self.needs_whole_cores(terms),
        }
    }

    fn filter_takeable(&self, free: &CpuSet, terms: &Terms) -> CpuSet {
        let wanted = self.wanted(free, terms);
        if self.needs_whole_cores(terms) { self.whole(&wanted) } else { wanted }
    }

    /// Returns the free whole cores by node position, largest first, if a request takes whole cores only and core sizes
    /// differ. Otherwise returns an empty list.
    pub(super) fn unequal_cores(&self, ledger: &Ledger, terms: &Terms) -> Vec<Vec<CoreRun>> {
        if !self.unequal || !self.needs_whole_cores(terms) {
            return Vec::new();
        }
        let free = self.available(ledger, terms).cpus;
        let of_node = |node: &NodeCpus| {
            let whole = node.cores.iter().filter(|core| core.is_subset(&free));
            let mut sizes: Vec<usize> = whole.map(CpuSet::len).collect();
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            core_runs(&sizes)
        };
        self.nodes.iter().map(of_node).collect()
    }

    /// Returns whether a request takes whole cores only. If siblings are hidden, it takes one CPU of each core
    /// instead.
    fn needs_whole_cores(&self, terms: &Terms) -> bool {
        self.options.full_pcpus_only && !terms.hide_siblings
    }

    /// Returns whether a CPU of the machine is of this kind.
    pub(super) fn has_kind(&self, kind: CpuKind) -> bool {
        self.kinds.get(&kind).is_some_and(|cpus| !cpus.is_empty())
    }

    /// Filters CPUs by the terms: all requested kinds and, if siblings are to be hidden, one CPU of each core that is
    /// completely among `cpus`.
    pub(super) fn wanted(&self, cpus: &CpuSet, terms: &Terms) -> CpuSet {
        let of_kind = |cpus: CpuSet, kind| self.kinds.get(kind).map_or_else(CpuSet::new, |of| &cpus & of);
        let of_kinds = terms.cpu_kinds.iter().fold(cpus.clone(), of_kind);
        if !terms.hide_siblings {
            return of_kinds;
        }
        self.cores()
            .filter(|core| core.is_subset(cpus))
            .filter_map(|core| (core & &of_kinds).first())
            .collect()
    }

    /// Returns the sibling threads of these CPUs if the terms hide them.
    pub(super) fn hidden_beside(&self, cpus: &CpuSet, terms: &Terms) -> CpuSet {
        if !terms.hide_siblings {
            return CpuSet::new();
        }
        let cores: CpuSet =
            self.cores().filter(|core| core.intersects(cpus)).flat_map(CpuSet::iter).collect();
        &cores - cpus
    }

    fn cores(&self) -> impl Iterator<Item = &CpuSet> {
        self.nodes.iter().flat_map(|node| &node.cores)
    }

    /// Returns those CPUs that can become exclusive.
    pub(super) fn allocatable_of(&self, cpus: &CpuSet) -> CpuSet {
        self.whole(&(cpus & &self.allocatable))
    }

    /// Counts CPUs by node position.
    pub(super) fn count(&self, cpus: &CpuSet) -> Vec<u64> {
        self.nodes.iter().map(|node| shared(&node.all, cpus)).collect()
    }

    /// Returns the positions of the nodes with some of these CPUs.
    pub(super) fn nodes_of(&self, cpus: &CpuSet) -> Vec<usize> {
        (0..self.nodes.len()).filter(|&at| self.nodes[at].all.intersects(cpus)).collect()
    }

    /// Returns the CPUs that replace `held` if the container needs `wanted` CPUs on these nodes.
    pub(super) fn resized(
        &self,
        ledger: &Ledger,
        terms: &Terms,
        held: &CpuSet,
        wanted: usize,
        nodes: &NodeSet,
    ) -> Result<CpuSet, ResizeError> {
        self.check_cores(wanted as u64, terms).map_err(|error| ResizeError::Cores(error.to_string()))?;
        let pool = self.wanted(&self.free(ledger), terms);
        self.manager.resized(&pool, held, wanted, nodes, self.needs_whole_cores(terms))
    }

    /// With `full-pcpus-only` returns only the CPUs of completely included cores, otherwise all CPUs.
    pub(super) fn whole(&self, cpus: &CpuSet) -> CpuSet {
        if !self.options.full_pcpus_only {
            return cpus.clone();
        }
        self.cores().filter(|core| core.is_subset(cpus)).flat_map(CpuSet::iter).collect()
    }

    /// Checks that the request is a sum of core sizes, if it takes whole cores only.
    pub(super) fn check_cores(&self, requested: u64, terms: &Terms) -> Result<(), CpuError> {
        let requested = usize::try_from(requested).unwrap_or(usize::MAX);
        if self.needs_whole_cores(terms) && !requested.is_multiple_of(self.per_core) {
            return Err(CpuError::NotWholeCores { requested, cpus_per_core: self.per_core });
        }
        Ok(())
    }

    /// Returns the number of CPUs that are taken together.
    pub(super) fn granularity(&self, terms: &Terms) -> u64 {
        if self.needs_whole_cores(terms) { self.per_core as u64 } else { 1 }
    }

    /// Divides a number of CPUs among the nodes of a set, given the free CPUs by position and the number taken
    /// together.
    pub(super) fn split(
        &self,
        free: &[u64],
        set: &[usize],
        needed: u64,
        granularity: u64,
    ) -> Vec<(usize, u64)> {
        if !self.options.distribute_across_numa || set.len() < 2 {
            return super::rank::split(free, &[], set, needed);
        }
        let mut left = needed;
        let mut shares: Vec<(usize, u64)> = set.iter().map(|&at| (at, 0)).collect();
        // The nodes with the fewest free CPUs come first; the remaining nodes give the rest.
        shares.sort_by_key(|&(at, _)| (free[at], at));
        let count = shares.len() as u64;
        for (index, (at, share)) in (0u64..).zip(&mut shares) {
            let even = left.div_ceil(count - index).next_multiple_of(granularity);
            *share = even.min(free[*at]).min(left);
            left -= *share;
        }
        shares.sort_unstable();
        shares
    }

    /// Takes CPUs of a node. Returns `None` if there are too few, or no cores of suitable sizes.
    pub(super) fn pick(&self, at: usize, from: &AvailableCpus, count: u64) -> Option<CpuSet> {
        let node = self.nodes.get(at)?;
        let count = usize::try_from(count).ok()?;
        let free = &node.all & &from.cpus;
        let by_cache = (self.options.align_by_cache || from.by_cache) && node.caches.len() > 1;
        let by_cache = if by_cache { self.pick_by_cache(node, &free, count, from.whole_cores) } else { None };
        by_cache.or_else(|| self.pick_cores(node, &free, count, from.whole_cores))
    }

    fn pick_by_cache(
        &self,
        node: &NodeCpus,
        free: &CpuSet,
        count: usize,
        whole_cores: bool,
    ) -> Option<CpuSet> {
        let (mut free, mut taken) = (free.clone(), CpuSet::new());
        while taken.len() < count {
            let left = count - taken.len();
            let sizes = node.caches.iter().map(|cache| (cache & &free).len());
            let sizes: Vec<(usize, usize)> = sizes.zip(0..).filter(|(size, _)| *size > 0).collect();
            // The cache with the fewest sufficient CPUs, otherwise the one with most CPUs.
            let enough = sizes.iter().filter(|(size, _)| *size >= left).min();
            let &(size, index) = enough
                .or_else(|| sizes.iter().max_by_key(|(size, index)| (*size, node.caches.len() - index)))?;
            let part = self.pick_cores(node, &(&node.caches[index] & &free), left.min(size), whole_cores)?;
            free = &free - &part;
            taken = &taken | &part;
        }
        Some(taken)
    }

    fn pick_cores(&self, node: &NodeCpus, free: &CpuSet, count: usize, whole_cores: bool) -> Option<CpuSet> {
        if free.len() == count {
            return Some(free.clone());
        }
        let mut taken = CpuSet::new();
        let mut left = count;
        if whole_cores {
            let mut whole: Vec<&CpuSet> = node.cores.iter().filter(|core| core.is_subset(free)).collect();
            whole.sort_by_key(|core| std::cmp::Reverse(core.len()));
            let sizes: Vec<usize> = whole.iter().map(|core| core.len()).collect();
            return Some(
                find_sizes_with_sum(&sizes, count)?
                    .into_iter()
                    .flat_map(|place| whole[place].iter())
                    .collect(),
            );
        }
        let parts = || node.cores.iter().map(|core| (core, core & free)).filter(|(_, part)| !part.is_empty());
        if self.options.distribute_across_cores {
            let mut parts: Vec<_> =
                parts().map(|(_, part)| part.iter().collect::<Vec<_>>().into_iter()).collect();
            while left > 0 {
                let before = left;
                for cpu in parts.iter_mut().filter_map(Iterator::next) {
                    if left > 0 {
                        taken.insert(cpu);
                        left -= 1;
                    }
                }
                if left == before {
                    return None;
                }
            }
            return Some(taken);
        }
        let mut rest = Vec::new();
        for (core, part) in parts() {
            let size = part.len();
            if part == *core && size <= left {
                left -= size;
                taken.extend(part.iter());
            } else {
                rest.push((size, part));
            }
        }
        // Partially used cores come before whole ones.
        rest.sort_by_key(|(size, _)| *size);
        for cpu in rest.iter().flat_map(|(_, part)| part.iter()).take(left) {
            taken.insert(cpu);
        }
        (taken.len() == count).then_some(taken)
    }
}

/// Returns the shared pool without offline CPUs, which stay in the pool for a moment, and without CPUs of other
/// programs' cpuset partitions.
pub(super) fn offered(pool: &CpuSet, ledger: &Ledger) -> CpuSet {
    let conditions = ledger.conditions();
    &(pool - &conditions.offline_cpus) - &conditions.partition_cpus
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Returns the number of common CPUs.
fn shared(a: &CpuSet, b: &CpuSet) -> u64 {
    a.words().iter().zip(b.words()).map(|(a, b)| u64::from((a & b).count_ones())).sum()
}
