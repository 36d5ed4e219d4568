//! Workloads that share a guarantee, and the memory that they use of it.
//!
//! Containers of a pod that hold their memory as a whole have a single guarantee. It is stored with one of them, and
//! all of them use it.

use std::collections::{BTreeMap, BTreeSet};

use numaward_model::{
    Guarantees, WorkloadGuarantee,
    snapshot::ResidentFigures,
    verdict::{ResidencySplit, UserMemory},
};
use numaward_probes::SlotId;
use numaward_topology::{Bytes, HugepageSize, NodeId, ZoneKind};

use crate::{
    hugepages::pools,
    reading::CounterReading,
    table::{Member, Table},
};

/// Workloads that share a guarantee; usually a single one.
#[derive(Debug)]
pub(crate) struct Share<'a> {
    pub(crate) workloads: Vec<&'a WorkloadGuarantee>,
    /// Guarantee of all of them together, by kind of memory and the node that is charged.
    pub(crate) placed: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>,
}

/// Groups all guarantees by the workloads that share them.
pub(crate) fn shares(guarantees: &Guarantees) -> Vec<Share<'_>> {
    let mut shares = BTreeMap::new();
    for guarantee in guarantees.workloads() {
        let shares_pod = guarantee.container.as_ref().is_some_and(|of| of.shares_pod);
        let key = (&guarantee.owner, (!shares_pod).then_some(guarantee.id));
        let none = || Share { workloads: Vec::new(), placed: BTreeMap::new() };
        let share = shares.entry(key).or_insert_with(none);
        share.workloads.push(guarantee);
        for (kind, node, bytes) in &guarantee.placed {
            let sum = share.placed.entry(*kind).or_default().entry(*node).or_default();
            sum.0 = sum.0.saturating_add(bytes.0);
        }
    }
    shares.into_values().collect()
}

/// Memory of workloads and their descendants, from the latest readings.
#[derive(Debug)]
pub(crate) struct Holdings<'a> {
    nodes: Vec<NodeId>,
    /// Sizes of hugepages that the host has pools of.
    pools: BTreeSet<HugepageSize>,
    table: &'a Table<SlotId>,
    /// Sorted by path, so descendants directly follow their ancestor.
    members: Vec<&'a Member<SlotId>>,
}

impl<'a> Holdings<'a> {
    pub(crate) fn new(read: &'a CounterReading) -> Self {
        let mut members: Vec<_> = read.table.members().map(|(_, member)| member).collect();
        members.sort_by(|a, b| a.path.cmp(&b.path));
        let nodes = read.machine.nodes.keys().copied().collect();
        Self { nodes, pools: pools(&read.machine), table: &read.table, members }
    }

    /// Returns whether the memory of all these workloads is known.
    pub(crate) fn are_known(&self, workloads: &[&WorkloadGuarantee]) -> bool {
        let mut members = workloads.iter().map(|of| self.table.member(of.id));
        members.all(|member| member.is_some_and(|member| member.resident.is_some()))
    }

    /// Returns the resident memory of these workloads on each node, as far as it is known.
    pub(crate) fn resident(&self, workloads: &[&WorkloadGuarantee]) -> BTreeMap<NodeId, ResidentFigures> {
        let mut sum: BTreeMap<NodeId, ResidentFigures> = BTreeMap::new();
        for resident in self.within(workloads).filter_map(|member| member.resident.as_ref()) {
            for (node, more) in self.nodes.iter().zip(resident.iter()) {
                let sum = sum.entry(*node).or_default();
                *sum = sum.plus(*more);
            }
        }
        sum
    }

    /// Returns their resident hugepages.
    pub(crate) fn hugepages(
        &self,
        workloads: &[&WorkloadGuarantee],
        size: HugepageSize,
    ) -> BTreeMap<NodeId, Bytes> {
        let mut sum: BTreeMap<NodeId, Bytes> = BTreeMap::new();
        for hugepages in self.within(workloads).filter_map(|member| member.hugepages.get(&size)) {
            for (node, more) in self.nodes.iter().zip(hugepages) {
                let sum = sum.entry(*node).or_default();
                sum.0 = sum.0.saturating_add(more.0);
            }
        }
        sum
    }

    /// Returns the memory of a workload and its descendants on and off its guaranteed nodes, by kind, as far as it is
    /// known; nothing without a memory guarantee.
    pub(crate) fn by_kind(&self, guarantee: &WorkloadGuarantee) -> BTreeMap<ZoneKind, ResidencySplit> {
        let mut splits = BTreeMap::new();
        if guarantee.nodes.is_empty() {
            return splits;
        }
        let mut add = |kind, memory: BTreeMap<NodeId, UserMemory>| {
            if !memory.is_empty() {
                splits.insert(kind, ResidencySplit::new(guarantee, kind, memory));
            }
        };
        if self.are_known(&[guarantee]) {
            let resident = self.resident(&[guarantee]);
            add(ZoneKind::Memory, resident.into_iter().map(|(node, of)| (node, of.into())).collect());
        }
        for &size in &self.pools {
            let resident = self.hugepages(&[guarantee], size).into_iter();
            let memory = resident.map(|(node, of)| (node, UserMemory::hugepages(of))).collect();
            add(ZoneKind::Hugepages(size), memory);
        }
        splits
    }

    /// Returns these workloads and their descendants. The figures of each exclude its descendants.
    fn within(&self, workloads: &[&WorkloadGuarantee]) -> impl Iterator<Item = &'a Member<SlotId>> {
        workloads.iter().flat_map(|of| {
            let first = self.members.partition_point(|member| member.path < of.cgroup);
            let rest = self.members.iter().skip(first).copied();
            rest.take_while(move |member| of.cgroup.contains(&member.path))
        })
    }
}
