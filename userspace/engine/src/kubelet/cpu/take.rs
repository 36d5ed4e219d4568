//! Packed selection of CPUs: whole sockets and nodes first, then whole last-level caches, whole cores, single CPUs.
//!
//! At each step the domain with the fewest sufficient free CPUs is preferred, so that large free domains stay whole:
//! domains are tried in ascending order of free CPUs, then of ids. If a socket has several nodes, nodes are ordered
//! within sockets, otherwise sockets within nodes. Cores are ordered within both.

use numaward_topology::CpuSet;

use super::{
    CpuError,
    topology::{CpuTopology, Domain, shared},
};
use crate::policy::KubeletVersion;

/// Order in which single CPUs are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackingOrder {
    /// Core by core.
    Packed,
    /// Across cores: CPUs are ordered by id within a socket. As siblings have distant ids on most machines, this
    /// takes one CPU of each core.
    Spread,
}

/// Rules for taking CPUs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    pub(crate) order: PackingOrder,
    /// If set, prefers CPUs that share a last-level cache, like a kubelet of this version.
    pub(crate) by_cache: Option<KubeletVersion>,
}

/// Collector of CPUs.
pub(crate) struct Accumulator<'a> {
    topology: &'a CpuTopology,
    /// CPUs that can be taken.
    pub(crate) free: CpuSet,
    /// Number of missing CPUs; negative if too many were taken.
    pub(crate) needed: i64,
    pub(crate) taken: CpuSet,
}

fn to_i64(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

impl<'a> Accumulator<'a> {
    /// Checks that there are enough CPUs.
    pub(crate) fn new(
        topology: &'a CpuTopology,
        available: &CpuSet,
        needed: usize,
    ) -> Result<Self, CpuError> {
        let free = available & &topology.all;
        if needed > free.len() {
            return Err(CpuError::NotEnough { requested: needed, available: available.len() });
        }
        Ok(Self { topology, free, needed: to_i64(needed), taken: CpuSet::new() })
    }

    pub(crate) fn done(&self) -> bool {
        self.needed < 1
    }

    fn needs(&self, count: usize) -> bool {
        self.needed >= to_i64(count)
    }

    /// Takes CPUs. Counts all of them, including CPUs that were already taken or were not free.
    pub(crate) fn take(&mut self, cpus: &CpuSet) {
        self.taken = &self.taken | cpus;
        self.free = &self.free - &self.taken;
        self.needed -= to_i64(cpus.len());
    }

    pub(crate) fn free_in(&self, domain: &Domain) -> usize {
        shared(&domain.cpus, &self.free)
    }

    /// Sorts domains by free CPUs, then by ids.
    fn sorted(&self, of: &[Domain], members: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut members: Vec<(usize, usize)> =
            members.map(|index| (self.free_in(&of[index]), index)).collect();
        members.sort_unstable();
        members.into_iter().map(|(_, index)| index).collect()
    }

    /// Returns the domains with free CPUs, sorted.
    fn available(&self, of: &[Domain]) -> Vec<usize> {
        self.sorted(of, (0..of.len()).filter(|&index| self.free_in(&of[index]) > 0))
    }

    /// Returns the inner domains with free CPUs, sorted within each of the outer domains.
    fn nested(&self, outer: &[Domain], order: &[usize], inner: &[Domain]) -> Vec<usize> {
        order
            .iter()
            .flat_map(|&index| self.sorted(inner, CpuTopology::within(inner, &outer[index], &self.free)))
            .collect()
    }

    /// Returns whether each node has at least one socket, so that nodes come before sockets.
    fn nodes_first(&self) -> bool {
        self.topology.sockets.len() >= self.topology.nodes.len()
    }

    /// Returns the nodes with free CPUs, in the order of the search.
    pub(crate) fn nodes(&self) -> Vec<usize> {
        let CpuTopology { nodes, sockets, .. } = self.topology;
        if self.nodes_first() {
            self.available(nodes)
        } else {
            self.nested(sockets, &self.available(sockets), nodes)
        }
    }

    fn sockets(&self) -> Vec<usize> {
        let CpuTopology { nodes, sockets, .. } = self.topology;
        if self.nodes_first() {
            self.nested(nodes, &self.available(nodes), sockets)
        } else {
            self.available(sockets)
        }
    }

    fn cores(&self) -> Vec<usize> {
        let CpuTopology { nodes, sockets, cores, .. } = self.topology;
        if self.nodes_first() {
            self.nested(sockets, &self.sockets(), cores)
        } else {
            self.nested(nodes, &self.nodes(), cores)
        }
    }

    fn caches(&self) -> Vec<usize> {
        let CpuTopology { nodes, caches, .. } = self.topology;
        self.nested(nodes, &self.nodes(), caches)
    }

    fn cpus(&self, order: PackingOrder) -> Vec<numaward_topology::CpuId> {
        let (of, domains) = match order {
            PackingOrder::Packed => (&self.topology.cores, self.cores()),
            PackingOrder::Spread => (&self.topology.sockets, self.sockets()),
        };
        domains
            .into_iter()
            .flat_map(|index| (&of[index].cpus & &self.free).iter().collect::<Vec<_>>())
            .collect()
    }

    /// Takes each domain that is completely free and no larger than the missing number. A domain is complete if it
    /// has `full_size` free CPUs, by default its own size.
    fn take_full(&mut self, of: &[Domain], order: &[usize], full_size: Option<usize>) {
        let is_full = |&index: &usize| self.free_in(&of[index]) == full_size.unwrap_or(of[index].size);
        for index in order.iter().copied().filter(is_full).collect::<Vec<_>>() {
            if self.needs(of[index].size) {
                self.take(&of[index].cpus);
            }
        }
    }

    fn take_full_nodes(&mut self) {
        self.take_full(&self.topology.nodes, &self.nodes(), None);
    }

    fn take_full_sockets(&mut self) {
        self.take_full(&self.topology.sockets, &self.sockets(), Some(self.topology.cpus_per_socket));
    }

    fn take_full_cores(&mut self) {
        self.take_full(&self.topology.cores, &self.cores(), Some(self.topology.cpus_per_core));
    }

    /// Takes whole caches. Takes the rest from one cache if a cache has exactly enough.
    fn take_caches(&mut self, version: KubeletVersion) {
        for index in self.caches() {
            if self.needs(self.topology.cpus_per_cache) {
                self.take_full(&self.topology.caches, &self.caches(), None);
            }
            if self.done() {
                return;
            }
            self.take_part_of_cache(&self.topology.caches[index], version);
            if self.done() {
                return;
            }
        }
    }

    /// Takes the free CPUs of the lowest cores of a cache if their number equals the missing one. v1.32 counts whole
    /// cores only. v1.36 also considers a core of which only a part is needed, and excludes its highest CPU.
    fn take_part_of_cache(&mut self, cache: &Domain, version: KubeletVersion) {
        let (needed, per_core) = (usize::try_from(self.needed).unwrap_or(0), self.topology.cpus_per_core);
        let cores_needed = match version {
            KubeletVersion::V1_32 => needed.checked_div(per_core).unwrap_or(0),
            KubeletVersion::V1_36 => needed.div_ceil(per_core.max(1)),
        };
        let cores = &self.topology.cores;
        let mut part: CpuSet = CpuTopology::within(cores, cache, &self.free)
            .take(cores_needed)
            .flat_map(|index| (&cores[index].cpus & &self.free).iter().collect::<Vec<_>>())
            .collect();
        let is_odd = version == KubeletVersion::V1_36 && per_core > 1 && needed % 2 != 0;
        if let Some(last) = part.last().filter(|_| is_odd && part.len() > needed) {
            part.remove(last);
        }
        if to_i64(part.len()) == self.needed {
            self.take(&part);
        }
    }

    fn take_single(&mut self, order: PackingOrder) {
        for cpu in self.cpus(order) {
            self.take(&CpuSet::single(cpu));
            if self.done() {
                return;
            }
        }
    }
}

/// Takes `needed` of the available CPUs.
pub(crate) fn packed(
    topology: &CpuTopology,
    available: &CpuSet,
    needed: usize,
    packing: Packing,
) -> Result<CpuSet, CpuError> {
    let mut accumulator = Accumulator::new(topology, available, needed)?;
    let steps: [fn(&mut Accumulator<'_>, Packing); 5] = [
        |a, _| if a.nodes_first() { a.take_full_nodes() } else { a.take_full_sockets() },
        |a, _| if a.nodes_first() { a.take_full_sockets() } else { a.take_full_nodes() },
        |a, packing| {
            if let Some(version) = packing.by_cache {
                a.take_caches(version);
            }
        },
        |a, packing| {
            if packing.order == PackingOrder::Packed {
                a.take_full_cores();
            }
        },
        |a, packing| a.take_single(packing.order),
    ];
    for step in steps {
        if accumulator.done() {
            break;
        }
        step(&mut accumulator, packing);
    }
    if accumulator.done() { Ok(accumulator.taken) } else { Err(CpuError::Failed) }
}
