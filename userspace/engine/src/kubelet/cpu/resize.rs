//! Resizing the exclusive CPUs of a running container.

use std::cmp::Reverse;

use numaward_topology::{CpuSet, NodeId, NodeSet};

use super::StaticCpuManager;
use crate::{
    cores::find_sizes_with_sum,
    decision::{ResizeError, Shortfall},
    hint::Resource,
};

impl StaticCpuManager {
    /// Returns the CPUs that replace `held` when the container needs `wanted`: a subset, or the same CPUs and more
    /// from `pool` on these nodes. Whole cores are preferred, both for keeping and for filling up. With
    /// `whole_cores`, additional CPUs must complete whole cores.
    pub(crate) fn resized(
        &self,
        pool: &CpuSet,
        held: &CpuSet,
        wanted: usize,
        nodes: &NodeSet,
        whole_cores: bool,
    ) -> Result<CpuSet, ResizeError> {
        let free = &(&(pool & &self.allocatable()) - held) & &self.of_nodes(nodes);
        let parts = self.parts(&free, held, wanted, whole_cores);
        let mut chosen = CpuSet::new();
        if whole_cores {
            let sizes: Vec<usize> = parts.iter().map(CpuSet::len).collect();
            // A growing container keeps all its CPUs.
            let kept = if wanted < held.len() { &CpuSet::new() } else { held };
            if let Some(places) = find_sizes_with_sum(&sizes, wanted - kept.len()) {
                chosen.extend(kept.iter().chain(places.into_iter().flat_map(|place| parts[place].iter())));
            }
        } else {
            chosen.extend(parts.iter().flat_map(CpuSet::iter).take(wanted));
        }
        if chosen.len() == wanted {
            return Ok(chosen);
        }
        if wanted < held.len() {
            return Err(ResizeError::Cores(format!("none of its cores add up to {wanted} CPUs")));
        }
        let free = if whole_cores { parts.iter().flat_map(CpuSet::iter).collect() } else { free };
        let free = &free - held;
        let requested = wanted.saturating_sub(held.len()) as u64;
        let shortfall = |(node, cpus): (_, CpuSet)| {
            Shortfall::new(node, Resource::Cpu, requested, (&free & &cpus).len() as u64)
        };
        Err(ResizeError::Shortfall(self.by_node(nodes).map(shortfall).collect()))
    }

    /// Returns the CPUs that each core can contribute, in the order of preference.
    fn parts(&self, free: &CpuSet, held: &CpuSet, wanted: usize, whole_cores: bool) -> Vec<CpuSet> {
        let cores = || self.topology.cores.iter().map(|core| &core.cpus);
        // Preference: whole cores that it holds, the rest of its cores, whole free cores, then remaining CPUs.
        let (its_whole, its_parts): (Vec<_>, Vec<_>) =
            cores().filter(|core| core.intersects(held)).partition(|core| core.is_subset(held));
        let rest = cores().filter(|core| !core.intersects(held));
        let (mut whole, parts): (Vec<_>, Vec<_>) = rest.partition(|core| core.is_subset(free));
        let held_first = || its_whole.iter().chain(&its_parts).map(|core| *core & held);
        let beside = || its_parts.iter().map(|core| *core & free);
        if !whole_cores {
            let others = whole.iter().chain(&parts).map(|core| *core & free);
            return held_first().chain(beside()).chain(others).collect();
        }
        if wanted < held.len() {
            return held_first().collect();
        }
        whole.sort_by_key(|core| Reverse(core.len()));
        let filled = its_parts.iter().filter(|core| (**core - held).is_subset(free)).map(|core| *core & free);
        filled.chain(whole.into_iter().cloned()).collect()
    }

    fn by_node<'a>(&'a self, nodes: &'a NodeSet) -> impl Iterator<Item = (NodeId, CpuSet)> + 'a {
        let of = self.topology.nodes.iter().zip(&self.topology.positions);
        of.filter_map(|(domain, &position)| Some((*self.nodes.ids().get(position)?, domain.cpus.clone())))
            .filter(|(node, _)| nodes.contains(*node))
    }

    fn of_nodes(&self, nodes: &NodeSet) -> CpuSet {
        self.by_node(nodes).flat_map(|(_, cpus)| cpus.iter().collect::<Vec<_>>()).collect()
    }

    /// Returns the nodes that have some of these CPUs.
    pub(crate) fn nodes_of(&self, cpus: &CpuSet) -> NodeSet {
        let of = self.topology.nodes.iter().zip(&self.topology.positions);
        of.filter(|(domain, _)| domain.cpus.intersects(cpus))
            .filter_map(|(_, &position)| self.nodes.ids().get(position).copied())
            .collect()
    }
}
