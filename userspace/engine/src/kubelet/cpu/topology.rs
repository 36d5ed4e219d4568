//! CPUs of a machine by node, socket, core and last-level cache.
//!
//! All of these are *domains*: sets of CPUs with an id. Domains of one kind are sorted by id and referenced by index.
//!
//! As in the kubelet, the id of a core is its lowest CPU, and if the platform reports no last-level cache, the socket
//! replaces it.

use std::collections::BTreeMap;

use numaward_topology::{Cpu, CpuId, CpuSet, Machine};

use crate::hint::{Mask, NodeIndex};

/// Set of CPUs of one node, socket, core or cache.
#[derive(Clone, Debug)]
pub(crate) struct Domain {
    pub(crate) cpus: CpuSet,
    pub(crate) size: usize,
}

/// CPU topology of a machine.
#[derive(Clone, Debug)]
pub(crate) struct CpuTopology {
    pub(crate) all: CpuSet,
    pub(crate) size: usize,
    /// Nodes with CPUs; `positions` has their positions among all nodes.
    pub(crate) nodes: Vec<Domain>,
    pub(crate) positions: Vec<usize>,
    pub(crate) sockets: Vec<Domain>,
    pub(crate) cores: Vec<Domain>,
    pub(crate) caches: Vec<Domain>,
    /// Indices of sockets with CPUs on a node, by position of the node.
    pub(crate) sockets_of_node: Vec<Vec<usize>>,
    /// Mean sizes, rounded down. They are wrong for some domains if sizes differ.
    pub(crate) cpus_per_core: usize,
    pub(crate) cpus_per_socket: usize,
    pub(crate) cpus_per_cache: usize,
}

/// Returns the number of common CPUs.
pub(crate) fn shared(a: &CpuSet, b: &CpuSet) -> usize {
    a.words().iter().zip(b.words()).map(|(a, b)| (a & b).count_ones() as usize).sum()
}

/// Returns whether three sets have a common CPU.
fn have_common_cpu(a: &CpuSet, b: &CpuSet, c: &CpuSet) -> bool {
    a.words().iter().zip(b.words()).zip(c.words()).any(|((a, b), c)| a & b & c != 0)
}

/// Returns the id of a CPU's last-level cache, or of the socket that replaces it.
pub(crate) fn cache(cpu: &Cpu) -> u32 {
    cpu.last_level_cache.map_or(cpu.socket.0, |cache| cache.0)
}

fn domains<K: Ord>(members: BTreeMap<K, CpuSet>) -> Vec<Domain> {
    members.into_values().map(|cpus| Domain { size: cpus.len(), cpus }).collect()
}

impl CpuTopology {
    /// Groups the CPUs into domains. Every CPU must be on one of `nodes`.
    pub(crate) fn new(machine: &Machine, nodes: &NodeIndex) -> Self {
        let mut by_node: BTreeMap<usize, CpuSet> = BTreeMap::new();
        let mut by_socket: BTreeMap<_, CpuSet> = BTreeMap::new();
        let mut by_core: BTreeMap<_, CpuSet> = BTreeMap::new();
        let mut by_cache: BTreeMap<u32, CpuSet> = BTreeMap::new();
        let mut cores_by_node = std::collections::BTreeSet::new();
        for (&id, cpu) in &machine.cpus {
            let Some(position) = nodes.position(cpu.node) else { continue };
            by_node.entry(position).or_default().insert(id);
            by_socket.entry(cpu.socket).or_default().insert(id);
            by_core.entry(cpu.core).or_default().insert(id);
            by_cache.entry(cache(cpu)).or_default().insert(id);
            cores_by_node.insert((position, cpu.core));
        }
        let positions: Vec<usize> = by_node.keys().copied().collect();
        let nodes_with_cpus = domains(by_node);
        let sockets = domains(by_socket);
        // Ordered by lowest CPU, not by core id.
        let cores: BTreeMap<Option<CpuId>, CpuSet> =
            by_core.into_values().map(|cpus| (cpus.first(), cpus)).collect();
        let caches = domains(by_cache);
        let all: CpuSet = nodes_with_cpus.iter().flat_map(|node| node.cpus.iter()).collect();
        let size = all.len();
        let mut sockets_of_node = vec![Vec::new(); nodes.ids().len()];
        for (node, &position) in nodes_with_cpus.iter().zip(&positions) {
            sockets_of_node[position] =
                (0..sockets.len()).filter(|&socket| sockets[socket].cpus.intersects(&node.cpus)).collect();
        }
        let mean = |domains: usize| size.checked_div(domains).unwrap_or(0);
        Self {
            cpus_per_core: mean(cores_by_node.len()),
            cpus_per_socket: mean(sockets.len()),
            cpus_per_cache: mean(caches.len()),
            all,
            size,
            nodes: nodes_with_cpus,
            positions,
            sockets,
            cores: domains(cores),
            caches,
            sockets_of_node,
        }
    }

    /// Counts these CPUs by position of their node.
    pub(crate) fn count_by_position(&self, cpus: &CpuSet) -> Vec<usize> {
        let mut counts = vec![0; self.sockets_of_node.len()];
        for (node, &position) in self.nodes.iter().zip(&self.positions) {
            counts[position] = shared(&node.cpus, cpus);
        }
        counts
    }

    /// Returns the nodes with CPUs.
    pub(crate) fn nodes_with_cpus(&self) -> Mask {
        self.positions.iter().fold(0, |mask, position| mask | 1 << position)
    }

    pub(crate) fn cpus_at(&self, position: usize) -> Option<&CpuSet> {
        let index = self.positions.binary_search(&position).ok()?;
        Some(&self.nodes[index].cpus)
    }

    /// Returns the sockets with CPUs on these nodes, in ascending order.
    pub(crate) fn sockets_of(&self, mask: Mask) -> Vec<usize> {
        let mut sockets: Vec<usize> = crate::hint::positions(mask)
            .filter_map(|position| self.sockets_of_node.get(position))
            .flatten()
            .copied()
            .collect();
        sockets.sort_unstable();
        sockets.dedup();
        sockets
    }

    /// Returns the indices of those domains in `of` that share a free CPU with `domain`.
    pub(crate) fn within<'a>(
        of: &'a [Domain],
        domain: &'a Domain,
        free: &'a CpuSet,
    ) -> impl Iterator<Item = usize> + 'a {
        (0..of.len()).filter(move |&index| have_common_cpu(&of[index].cpus, &domain.cpus, free))
    }
}
