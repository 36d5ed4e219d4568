//! Quality of placements: distances of admitted pods to their memory, and fragmentation of the free resources.
//!
//! # Terms
//! - *distance*: mean distance from the exclusive CPUs of a container to its memory at its admission, weighted by bytes and
//!   by the lifetime. The value 10 means that all memory is local.
//! - *fragmentation*: share of the free resources that the average pod of the trace cannot use, because they are on a node
//!   on which the pod does not fit. The definition follows "Beware of Fragmentation" (USENIX ATC 2023), with the nodes of a
//!   machine in place of the nodes of a cluster. It ignores that some pods may use several nodes, so it is only suitable to
//!   compare strategies.

use std::collections::BTreeSet;

use numaward_topology::{Machine, NodeId, ZoneKind};

use super::trace::Trace;
use numaward_engine::{
    ledger::{Allocation, Ledger},
    strategy::Allocatable,
};

/// Sums over one or several replays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quality {
    /// Guaranteed pods that were placed on several nodes.
    pub on_several_nodes: u64,
    distance: u128,
    distance_of: u128,
    free_cpus: u128,
    unusable_cpus: u128,
    free_memory: u128,
    unusable_memory: u128,
}

impl Quality {
    /// Adds the sums of another replay.
    pub const fn add(&mut self, other: &Self) {
        self.on_several_nodes += other.on_several_nodes;
        self.distance = self.distance.saturating_add(other.distance);
        self.distance_of = self.distance_of.saturating_add(other.distance_of);
        self.free_cpus = self.free_cpus.saturating_add(other.free_cpus);
        self.unusable_cpus = self.unusable_cpus.saturating_add(other.unusable_cpus);
        self.free_memory = self.free_memory.saturating_add(other.free_memory);
        self.unusable_memory = self.unusable_memory.saturating_add(other.unusable_memory);
    }

    /// Returns the mean distance from CPUs to memory in hundredths; `None` if no container had both.
    pub fn distance_in_hundredths(&self) -> Option<u64> {
        ratio(self.distance.saturating_mul(100), self.distance_of)
    }

    /// Returns the fragmentation of the CPUs in tenths of a percent; `None` if none were free.
    pub fn unusable_cpus_per_mille(&self) -> Option<u64> {
        ratio(self.unusable_cpus.saturating_mul(1000), self.free_cpus)
    }

    /// Returns the fragmentation of the memory in tenths of a percent; `None` if none was free.
    pub fn unusable_memory_per_mille(&self) -> Option<u64> {
        ratio(self.unusable_memory.saturating_mul(1000), self.free_memory)
    }

    /// Adds the placement of an admitted pod with a lifetime of `ticks`.
    pub(super) fn add_placement<'a>(
        &mut self,
        machine: &Machine,
        allocations: impl Iterator<Item = &'a Allocation>,
        ticks: u64,
    ) {
        let mut nodes: BTreeSet<NodeId> = BTreeSet::new();
        for held in allocations {
            nodes.extend(held.memory_nodes().iter());
            let Some(cpus) = &held.cpus else { continue };
            let of_cpus: Vec<NodeId> =
                cpus.iter().filter_map(|cpu| Some(machine.cpus.get(&cpu)?.node)).collect();
            nodes.extend(&of_cpus);
            let placed = held.placed.values().flatten();
            for ((&memory, bytes), &cpu) in placed.flat_map(|at| of_cpus.iter().map(move |cpu| (at, cpu))) {
                let Some(distance) = machine.distance(cpu, memory) else { continue };
                let weight = u128::from(bytes.0).saturating_mul(ticks.into()) / of_cpus.len() as u128;
                self.distance = self.distance.saturating_add(weight.saturating_mul(distance.into()));
                self.distance_of = self.distance_of.saturating_add(weight);
            }
        }
        self.on_several_nodes += u64::from(nodes.len() > 1);
    }
}

/// Returns `part` of `whole` in tenths of a percent, rounded to the nearest.
pub fn per_mille(part: u64, whole: u64) -> u64 {
    let (part, whole) = (u128::from(part), u128::from(whole.max(1)));
    u64::try_from((part * 2000 + whole) / (whole * 2)).unwrap_or(u64::MAX)
}

fn ratio(part: u128, whole: u128) -> Option<u64> {
    part.checked_add(whole / 2)?.checked_div(whole).and_then(|ratio| u64::try_from(ratio).ok())
}

/// Sizes of the Guaranteed pods of a trace: thousandths of CPUs, and MiB of memory.
pub(super) struct PodSizes(Vec<(u64, u64)>);

impl PodSizes {
    pub(super) fn from_trace(trace: &Trace) -> Self {
        let guaranteed = trace.pods.iter().filter(|pod| pod.guaranteed);
        Self(guaranteed.map(|pod| (pod.held.cpu_milli, pod.held.memory_mib)).collect())
    }

    /// Adds the free resources of a period of `ticks`.
    pub(super) fn add_free(
        &self,
        quality: &mut Quality,
        ledger: &Ledger,
        machine: &Machine,
        allocatable: &Allocatable,
        ticks: u64,
    ) {
        let shapes = self.0.len().max(1) as u128;
        let free = ledger.shared_pool() & &allocatable.cpus;
        for (id, node) in &machine.nodes {
            let account = ledger.nodes().get(id).and_then(|node| node.kinds.get(&ZoneKind::Memory));
            let memory = account.map_or(0, |account| account.free.0 >> 20);
            let cpus = 1000 * (&free & &node.cpus).len() as u64;
            let unfit = self.0.iter().filter(|&&(cpu, mib)| cpu > cpus || mib > memory).count();
            let (ticks, unfit) = (u128::from(ticks), unfit as u128);
            add(&mut quality.free_cpus, &mut quality.unusable_cpus, cpus, (ticks, unfit, shapes));
            add(&mut quality.free_memory, &mut quality.unusable_memory, memory, (ticks, unfit, shapes));
        }
    }
}

fn add(free: &mut u128, unusable: &mut u128, amount: u64, (ticks, unfit, shapes): (u128, u128, u128)) {
    let offered = u128::from(amount).saturating_mul(ticks);
    *free = free.saturating_add(offered);
    *unusable = unusable.saturating_add(offered.saturating_mul(unfit) / shapes);
}

#[cfg(test)]
mod tests {
    use numaward_topology::{Bytes, CpuSet};

    use super::*;

    fn machine() -> Machine {
        Machine::builder()
            .nodes(2)
            .sockets(2)
            .cores_per_node(2)
            .socket_distances(10, 30)
            .memory(Bytes::gib(4))
            .build()
            .expect("is a machine")
    }

    #[test]
    fn distance_is_weighted_by_bytes_and_time() {
        let machine = machine();
        let of = |cpus: &str, nodes: &[(u32, u64)]| Allocation {
            cpus: Some(cpus.parse::<CpuSet>().expect("a list")),
            blocks: Vec::new(),
            placed: [(
                ZoneKind::Memory,
                nodes.iter().map(|&(node, gib)| (NodeId(node), Bytes::gib(gib))).collect(),
            )]
            .into(),
            ..Allocation::default()
        };
        let mut quality = Quality::default();
        quality.add_placement(&machine, [of("0", &[(0, 1)])].iter(), 3);
        assert_eq!(quality.distance_in_hundredths(), Some(1000));
        quality.add_placement(&machine, [of("0", &[(1, 3)])].iter(), 1);
        assert_eq!(quality.distance_in_hundredths(), Some(2000), "as many byte-ticks at 30 as at 10");
        quality.add_placement(&machine, [of("0,2", &[(0, 6)])].iter(), 1);
        assert_eq!(quality.distance_in_hundredths(), Some(2000), "from both of its nodes");
        assert_eq!(quality.on_several_nodes, 1, "without blocks, those of its CPUs count");
    }

    #[test]
    fn free_resources_too_small_are_unusable() {
        use numaward_engine::{
            NativeStrategy, PolicyConfig, Quantity, Strategy as _,
            native::NativeOptions,
            policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation},
        };
        let machine = machine();
        let kept = MemoryReservation {
            numa_node: NodeId(0),
            limits: [(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))].into(),
        };
        let config = PolicyConfig {
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![kept],
            cpu_manager_policy: CpuManagerPolicy::Static,
            cpu_reservation: Some(Quantity::whole(1)),
            ..PolicyConfig::default()
        };
        let native = NativeStrategy::new(&machine, &config, &NativeOptions::default()).expect("fits");
        let (ledger, allocatable) = (native.idle(), native.allocatable());
        let unusable = |shapes: &[(u64, u64)]| {
            let mut quality = Quality::default();
            PodSizes(shapes.to_vec()).add_free(&mut quality, &ledger, &machine, &allocatable, 6);
            (quality.unusable_cpus_per_mille(), quality.unusable_memory_per_mille())
        };
        // Node 0 has a CPU and 3 GiB, node 1 two and 4 GiB.
        assert_eq!(unusable(&[(1000, 1024)]), (Some(0), Some(0)));
        assert_eq!(unusable(&[(1000, 1024), (2000, 1024)]), (Some(167), Some(214)), "half of node 0");
        assert_eq!(unusable(&[(1000, 4096)]), (Some(333), Some(429)), "all of node 0");
        assert_eq!(unusable(&[(3000, 1024)]), (Some(1000), Some(1000)));
    }
}
