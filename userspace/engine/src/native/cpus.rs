//! Exclusive CPUs: how many each node has to give, and which of them are taken.
//!
//! How many CPUs come from which node is decided before, for all resources together. Within a node whole cores go
//! first, then single CPUs of cores that are in use already, so that large free parts stay whole. The options of the
//! static CPU policy mean here:
//!
//! | option | effect |
//! |---|---|
//! | `full-pcpus-only` | only whole cores count as free, and a request is for what these add up to; of a core with hidden siblings, one CPU is taken |
//! | `distribute-cpus-across-numa` | several nodes give equally many |
//! | `distribute-cpus-across-cores` | one CPU a core, in turn |
//! | `prefer-align-cpus-by-uncorecache` | from as few last-level caches as possible |
//! | `align-by-socket` | under `restricted`, what finds no least set may be on any nodes of one socket |
//! | `strict-cpu-reservation` | the shared pool has no reserved CPUs |
//!
//! Unlike the kubelet, this counts what a core really has: of cores of 2, 2 and 1 CPUs, three can be given.

use std::collections::BTreeMap;

use numaward_topology::{CpuSet, Machine, NodeId, NodeSet};

use crate::{
    cores::find_sizes_with_sum,
    decision::ResizeError,
    kubelet::cpu::{CpuError, StaticCpuManager},
    ledger::Ledger,
    policy::{CpuKind, CpuOptions},
    terms::Terms,
};

/// The CPUs of a node.
#[derive(Debug)]
struct NodeCpus {
    all: CpuSet,
    /// By the lowest CPU of each.
    cores: Vec<CpuSet>,
    /// Last-level caches; one for the whole node where the platform reports none.
    caches: Vec<CpuSet>,
}

/// The CPUs of the machine.
#[derive(Debug)]
pub(super) struct MachineCpus {
    nodes: Vec<NodeCpus>,
    pub(super) manager: StaticCpuManager,
    pub(super) options: CpuOptions,
    /// The CPUs that can become exclusive.
    pub(super) allocatable: CpuSet,
    /// The shared pool while nobody has exclusive CPUs.
    pub(super) idle_pool: CpuSet,
    /// What the sizes of all cores are multiples of: the size of each, where they are equal.
    per_core: usize,
    /// Whether they are not.
    unequal: bool,
    kinds: BTreeMap<CpuKind, CpuSet>,
}

/// Which CPUs can be taken, and how.
#[derive(Clone, Debug, Default)]
pub(super) struct AvailableCpus {
    /// The CPUs that can become exclusive now.
    pub(super) cpus: CpuSet,
    /// Take CPUs that share a last-level cache where possible.
    pub(super) by_cache: bool,
    /// Take whole cores only.
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
        // Where it is not known which are of a kind, none is promised to be.
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

    /// How many CPUs each node could give on the empty machine, by position.
    pub(super) fn capacity(&self) -> Vec<u64> {
        self.count(&self.whole(&self.allocatable))
    }

    /// The same of those that a request takes.
    pub(super) fn capacity_for(&self, terms: &Terms) -> Vec<u64> {
        self.count(&self.takeable(&self.allocatable, terms))
    }

    /// The CPUs that can become exclusive now, whole cores or not.
    pub(super) fn free(&self, ledger: &Ledger) -> CpuSet {
        &offered(&ledger.shared_pool, ledger) & &self.allocatable
    }

    /// Which CPUs a request can take now.
    pub(super) fn available(&self, ledger: &Ledger, terms: &Terms) -> AvailableCpus {
        AvailableCpus {
            cpus: self.takeable(&self.free(ledger), terms),
            by_cache: terms.same_cache,
            whole_cores: self.needs_whole_cores(terms),
        }
    }

    fn takeable(&self, free: &CpuSet, terms: &Terms) -> CpuSet {
        let wanted = self.wanted(free, terms);
        if self.needs_whole_cores(terms) { self.whole(&wanted) } else { wanted }
    }

    /// Where a request takes whole cores only and these are of unequal size: the sizes of those that are free, by position, the
    /// largest first. Else none.
    pub(super) fn unequal_core_sizes(&self, ledger: &Ledger, terms: &Terms) -> Vec<Vec<usize>> {
        if !self.unequal || !self.needs_whole_cores(terms) {
            return Vec::new();
        }
        let free = self.available(ledger, terms).cpus;
        let of_node = |node: &NodeCpus| {
            let whole = node.cores.iter().filter(|core| core.is_subset(&free));
            let mut sizes: Vec<usize> = whole.map(CpuSet::len).collect();
            sizes.sort_unstable_by(|a, b| b.cmp(a));
            sizes
        };
        self.nodes.iter().map(of_node).collect()
    }

    /// Whether a request takes whole cores only. Of a core whose siblings are hidden it takes one CPU.
    fn needs_whole_cores(&self, terms: &Terms) -> bool {
        self.options.full_pcpus_only && !terms.hide_siblings
    }

    /// Those of these CPUs that a request wants: they are of all its kinds, and where their siblings are to be hidden, one
    /// of each core that is wholly among these.
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

    /// What is hidden beside these CPUs on these terms: the other threads of their cores.
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

    /// Those of these CPUs that can become exclusive.
    pub(super) fn allocatable_of(&self, cpus: &CpuSet) -> CpuSet {
        self.whole(&(cpus & &self.allocatable))
    }

    /// How many of these CPUs each node has, by position.
    pub(super) fn count(&self, cpus: &CpuSet) -> Vec<u64> {
        self.nodes.iter().map(|node| shared(&node.all, cpus)).collect()
    }

    /// The positions of the nodes on which these CPUs are.
    pub(super) fn nodes_of(&self, cpus: &CpuSet) -> Vec<usize> {
        (0..self.nodes.len()).filter(|&at| self.nodes[at].all.intersects(cpus)).collect()
    }

    /// The CPUs that a container with these terms has instead of those it holds when it is to have so many, on these nodes.
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

    /// With `full-pcpus-only` those that make up whole cores, else all.
    pub(super) fn whole(&self, cpus: &CpuSet) -> CpuSet {
        if !self.options.full_pcpus_only {
            return cpus.clone();
        }
        self.cores().filter(|core| core.is_subset(cpus)).flat_map(CpuSet::iter).collect()
    }

    /// Where a request takes whole cores only: whether so many CPUs are a number of them.
    pub(super) fn check_cores(&self, requested: u64, terms: &Terms) -> Result<(), CpuError> {
        let requested = usize::try_from(requested).unwrap_or(usize::MAX);
        if self.needs_whole_cores(terms) && !requested.is_multiple_of(self.per_core) {
            return Err(CpuError::NotWholeCores { requested, cpus_per_core: self.per_core });
        }
        Ok(())
    }

    /// How many CPUs a request takes at once.
    pub(super) fn granularity(&self, terms: &Terms) -> u64 {
        if self.needs_whole_cores(terms) { self.per_core as u64 } else { 1 }
    }

    /// Divides a number of CPUs over the nodes of a set, of which each has so many free and gives so many at once.
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
        // Those with the least free first: what they cannot give the others give.
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

    /// Takes CPUs of a node. `None` where there are not enough, or cores of the right sizes.
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
            // The fullest that suffices, else the emptiest.
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
        // Cores that are in use already before those that are whole.
        rest.sort_by_key(|(size, _)| *size);
        for cpu in rest.iter().flat_map(|(_, part)| part.iter()).take(left) {
            taken.insert(cpu);
        }
        (taken.len() == count).then_some(taken)
    }
}

/// A shared pool without CPUs that are offline, as one that went offline a moment ago is still in the pool, and without those
/// of other programs' partitions.
pub(super) fn offered(pool: &CpuSet, ledger: &Ledger) -> CpuSet {
    let conditions = ledger.conditions();
    &(pool - &conditions.offline_cpus) - &conditions.partition_cpus
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// Number of CPUs that two sets share.
fn shared(a: &CpuSet, b: &CpuSet) -> u64 {
    a.words().iter().zip(b.words()).map(|(a, b)| u64::from((a & b).count_ones())).sum()
}
