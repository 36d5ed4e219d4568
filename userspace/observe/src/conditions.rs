//! Memory that processes without a guarantee use on each node beyond the reservation. It is not available to the next
//! request.
//!
//! # Terms
//! Memory is *in use* if it cannot be allocated: pages taken from a hugepage pool, and base pages outside the pools
//! that are neither free nor reclaimable.
//!
//! # Algorithm
//! The memory that workloads have within their guarantees is subtracted from the memory in use on a node. It counts
//! first on the nodes where it is guaranteed, then on the other nodes; so the pages of a workload that is being
//! moved, or that are not on the preferred node, do not count as used by another program. The remainder beyond the
//! reservation is withheld. For base pages it is rounded to steps, and it stays unchanged while the difference is
//! less than a step, because each change affects decisions and reports.
//!
//! This module reads no file: the caller passes readings.

use std::collections::BTreeMap;

use numaward_engine::{HostConditions, Ledger};
use numaward_topology::{Bytes, NodeId, ZoneKind, sysfs::NodeMeminfo};

/// Memory in use that workloads have within their guarantees, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GuaranteedUsage(BTreeMap<(ZoneKind, NodeId), u64>);

impl GuaranteedUsage {
    /// Adds a guarantee of a kind of memory: the bytes placed on each node, and the bytes that the workloads that
    /// share it have (`has`). If `has` is not known, the workloads count as having all guaranteed memory.
    pub(crate) fn add(
        &mut self,
        kind: ZoneKind,
        placed: &BTreeMap<NodeId, Bytes>,
        has: Option<&BTreeMap<NodeId, Bytes>>,
    ) {
        let mut left: u64 = placed.values().map(|bytes| bytes.0).sum();
        let mut own = |node: NodeId, bytes: u64| *self.0.entry((kind, node)).or_default() += bytes;
        let Some(has) = has else {
            return placed.iter().for_each(|(node, bytes)| own(*node, bytes.0));
        };
        let mut elsewhere = Vec::new();
        for (&node, bytes) in has {
            let within = bytes.0.min(placed.get(&node).map_or(0, |bytes| bytes.0));
            own(node, within);
            left = left.saturating_sub(within);
            elsewhere.push((node, bytes.0 - within));
        }
        for (node, bytes) in elsewhere {
            let within = bytes.min(left);
            own(node, within);
            left -= within;
        }
    }

    fn on(&self, kind: ZoneKind, node: NodeId) -> u64 {
        self.0.get(&(kind, node)).copied().unwrap_or(0)
    }
}

/// Returns the memory that is withheld from new guarantees, by kind and node. `obtainable` returns the available base pages of
/// a node, and `before` are the previous conditions. If a node's memory could not be read, its withheld memory is unchanged.
pub(crate) fn withheld(
    ledger: &Ledger,
    memory: &[(NodeId, Option<NodeMeminfo>)],
    obtainable: impl Fn(NodeId, &NodeMeminfo) -> Bytes,
    owned: &GuaranteedUsage,
    before: &HostConditions,
) -> BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>> {
    let mut withheld: BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>> = BTreeMap::new();
    for (node, memory) in memory {
        let Some(account) = ledger.nodes().get(node) else { continue };
        for (&kind, account) in &account.kinds {
            let before = before.withheld_on(kind, *node).0;
            let beyond = |memory: &NodeMeminfo| {
                let (in_use, step) = match kind {
                    ZoneKind::Memory => {
                        let in_use = memory.base().0.saturating_sub(obtainable(*node, memory).0);
                        (in_use, step(memory.total))
                    }
                    ZoneKind::Hugepages(size) => {
                        let pool = memory.hugepages.get(&size).copied().unwrap_or_default();
                        (pool.total.saturating_sub(pool.free).saturating_mul(size.0.0), 1)
                    }
                };
                let beyond = in_use.saturating_sub(owned.on(kind, *node)).saturating_sub(account.reserved.0);
                let is_as_before = beyond.abs_diff(before) < step;
                if is_as_before { before } else { beyond.checked_next_multiple_of(step).unwrap_or(beyond) }
            };
            let bytes = memory.as_ref().map_or(before, beyond);
            if bytes > 0 {
                withheld.entry(kind).or_default().insert(*node, Bytes(bytes));
            }
        }
    }
    withheld
}

/// Returns the step in which base pages are withheld: 1/1024 of the node's memory, at least 1 MiB.
fn step(total: Bytes) -> u64 {
    (total.0 >> 10).max(Bytes::mib(1).0)
}

#[cfg(test)]
mod tests {
    use numaward_engine::{
        NativeOptions, NativeStrategy, PolicyConfig, Quantity, Strategy as _,
        policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation},
    };
    use numaward_topology::{HugepagePool, HugepageSize, Machine};

    use super::*;

    const HUGE: ZoneKind = ZoneKind::Hugepages(HugepageSize(Bytes::mib(2)));

    fn mib(nodes: &[(u32, u64)]) -> BTreeMap<NodeId, Bytes> {
        nodes.iter().map(|(node, mib)| (NodeId(*node), Bytes::mib(*mib))).collect()
    }

    /// Returns a ledger for two nodes with 4 GiB each, 1 GiB of it in a hugepage pool. 256 MiB of base pages and 64 MiB of
    /// hugepages are reserved on node 0.
    fn ledger() -> Ledger {
        let size = HugepageSize(Bytes::mib(2));
        let machine =
            Machine::builder().nodes(2).cores_per_node(2).memory(Bytes::gib(4)).hugepages(size, 512);
        let mib = |mib: u64| Quantity::whole(mib << 20);
        let config = PolicyConfig {
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![MemoryReservation {
                numa_node: NodeId(0),
                limits: [(ZoneKind::Memory, mib(256)), (HUGE, mib(64))].into(),
            }],
            cpu_manager_policy: CpuManagerPolicy::None,
            ..PolicyConfig::default()
        };
        NativeStrategy::new(&machine.build().unwrap(), &config, &NativeOptions::default()).unwrap().idle()
    }

    /// Returns a node with `obtainable` MiB of available base pages and `free` free hugepages.
    fn memory(obtainable: u64, free: u64) -> NodeMeminfo {
        NodeMeminfo {
            total: Bytes::gib(4),
            free: Bytes::mib(obtainable),
            active_file: Bytes(0),
            inactive_file: Bytes(0),
            kernel_reclaimable: Bytes(0),
            hugepages: [(HugepageSize(Bytes::mib(2)), HugepagePool { total: 512, free, surplus: 0 })].into(),
        }
    }

    fn seen(nodes: &[NodeMeminfo; 2], owned: &GuaranteedUsage) -> Vec<(ZoneKind, u32, u64)> {
        let nodes: Vec<_> = [0, 1].map(NodeId).into_iter().zip(nodes.iter().cloned().map(Some)).collect();
        let withheld =
            withheld(&ledger(), &nodes, |_, memory| memory.free, owned, &HostConditions::default());
        let by_node = |(kind, nodes): (&ZoneKind, &BTreeMap<NodeId, Bytes>)| {
            nodes.iter().map(|(node, bytes)| (*kind, node.0, bytes.0 >> 20)).collect::<Vec<_>>()
        };
        withheld.iter().flat_map(by_node).collect()
    }

    #[test]
    fn withholds_use_beyond_reservation() {
        let none = GuaranteedUsage::default();
        assert_eq!(seen(&[memory(3072, 512), memory(3072, 512)], &none), []);
        assert_eq!(seen(&[memory(3072 - 256, 480), memory(3072, 512)], &none), [], "as reserved");
        let expected = [(HUGE, 0, 2), (HUGE, 1, 1024), (ZoneKind::Memory, 0, 44), (ZoneKind::Memory, 1, 100)];
        assert_eq!(
            seen(&[memory(3072 - 300, 479), memory(3072 - 99, 0)], &none),
            expected,
            "in steps of 4 MiB"
        );
    }

    #[test]
    fn guaranteed_use_is_not_withheld() {
        let nodes = [memory(3072, 512), memory(3072 - 1000, 512 - 100)];
        let mut owned = GuaranteedUsage::default();
        owned.add(ZoneKind::Memory, &mib(&[(1, 600)]), Some(&mib(&[(1, 400)])));
        owned.add(HUGE, &mib(&[(1, 150)]), Some(&mib(&[(1, 200)])));
        assert_eq!(seen(&nodes, &owned), [(HUGE, 1, 50), (ZoneKind::Memory, 1, 600)]);

        // Pages that are being moved from another node count as the workload's own.
        let mut moving = GuaranteedUsage::default();
        moving.add(ZoneKind::Memory, &mib(&[(0, 600)]), Some(&mib(&[(0, 300), (1, 400)])));
        moving.add(HUGE, &mib(&[(0, 150)]), None);
        assert_eq!(seen(&nodes, &moving), [(HUGE, 1, 200), (ZoneKind::Memory, 1, 700)]);
    }

    #[test]
    fn small_and_unknown_changes_are_ignored() {
        let mut before = HostConditions::default();
        let mut seen = |memory: Option<NodeMeminfo>| {
            let nodes = [(NodeId(1), memory)];
            let owned = GuaranteedUsage::default();
            before.withheld = withheld(&ledger(), &nodes, |_, memory| memory.free, &owned, &before);
            before.withheld_on(ZoneKind::Memory, NodeId(1)).0 >> 20
        };
        let steps = [(3, 0), (4, 4), (1, 4), (7, 4), (8, 8), (5, 8), (9, 8), (12, 12), (8, 8), (0, 0)];
        for (in_use, expected) in steps {
            assert_eq!(seen(Some(memory(3072 - in_use, 512))), expected, "{in_use} MiB");
        }
        assert_eq!(seen(Some(memory(3072 - 101, 512))), 104);
        assert_eq!(seen(None), 104);
    }
}
