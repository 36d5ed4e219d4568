//! More or fewer exclusive CPUs for a container that runs.

use numaward_topology::{CpuSet, NodeId, NodeSet};

use super::StaticCpus;
use crate::{
    decision::{ResizeError, Shortfall},
    hint::Resource,
};

impl StaticCpus {
    /// The CPUs that a container has instead of `held` when it is to have `wanted`: fewer of the same, or those and
    /// more of this shared pool on these nodes. Whole cores are kept, and filled up, first. With `whole_cores`, only what
    /// makes up whole cores together with what it has can be taken.
    pub(crate) fn resized(
        &self,
        pool: &CpuSet,
        held: &CpuSet,
        wanted: usize,
        nodes: &NodeSet,
        whole_cores: bool,
    ) -> Result<CpuSet, ResizeError> {
        let cores = || self.topology.cores.iter().map(|core| &core.cpus);
        let mut left = wanted;
        let mut chosen = CpuSet::new();
        let mut take = |cpus: CpuSet| {
            for cpu in cpus.iter().take(left) {
                chosen.insert(cpu);
            }
            left = left.saturating_sub(cpus.len());
        };
        // What it has, whole cores first.
        let (whole, parts): (Vec<_>, Vec<_>) =
            cores().filter(|core| core.intersects(held)).partition(|core| core.is_subset(held));
        for core in whole.iter().chain(&parts) {
            take(*core & held);
        }
        // Then the rest of its cores, whole free cores of its nodes, and what these have left.
        let free = &(pool & &self.allocatable()) - held;
        let on_nodes = self.of_nodes(nodes);
        let mut free = &free & &on_nodes;
        if whole_cores {
            let its = &free | held;
            let whole = cores().filter(|core| core.is_subset(&its)).flat_map(CpuSet::iter).collect();
            free = &free & &whole;
        }
        for core in &parts {
            take(*core & &free);
        }
        let rest: Vec<_> = cores().filter(|core| !core.intersects(held)).collect();
        let (whole, parts): (Vec<_>, Vec<_>) = rest.into_iter().partition(|core| core.is_subset(&free));
        for core in whole.iter().chain(&parts) {
            take(*core & &free);
        }
        if left == 0 {
            return Ok(chosen);
        }
        let requested = wanted.saturating_sub(held.len()) as u64;
        let shortfall = |(node, cpus): (_, CpuSet)| {
            Shortfall::new(node, Resource::Cpu, requested, (&free & &cpus).len() as u64)
        };
        Err(ResizeError::Shortfall(self.by_node(nodes).map(shortfall).collect()))
    }

    fn by_node<'a>(&'a self, nodes: &'a NodeSet) -> impl Iterator<Item = (NodeId, CpuSet)> + 'a {
        let of = self.topology.nodes.iter().zip(&self.topology.positions);
        of.filter_map(|(domain, &position)| Some((*self.nodes.ids().get(position)?, domain.cpus.clone())))
            .filter(|(node, _)| nodes.contains(*node))
    }

    /// The CPUs of these nodes.
    fn of_nodes(&self, nodes: &NodeSet) -> CpuSet {
        self.by_node(nodes).flat_map(|(_, cpus)| cpus.iter().collect::<Vec<_>>()).collect()
    }

    /// The nodes on which these CPUs are.
    pub(crate) fn nodes_of(&self, cpus: &CpuSet) -> NodeSet {
        let of = self.topology.nodes.iter().zip(&self.topology.positions);
        of.filter(|(domain, _)| domain.cpus.intersects(cpus))
            .filter_map(|(_, &position)| self.nodes.ids().get(position).copied())
            .collect()
    }
}
