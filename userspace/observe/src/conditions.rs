//! What others than those with a promise use of the nodes' memory, beyond what is reserved: it is not there for whoever
//! asks next.
//!
//! Terms: memory is in *use* if it can be had by nobody: pages taken from a hugepage pool; of base pages those that are
//! neither free nor reclaimable, pools left out.
//!
//! Algorithm: of what is in use on a node, what workloads with a promise have is left out, up to what is promised to each.
//! It counts first on the nodes on which it is promised, then on the others: who is being moved, or has its home on
//! another node than its pages, is nobody else for that. What is left beyond the reservation is withheld.
//!
//! No file here: the caller passes readings.

use std::collections::BTreeMap;

use numaward_engine::Ledger;
use numaward_model::Promise;
use numaward_topology::{Bytes, NodeId, ZoneKind, sysfs::NodeMemory};

type ByKind = BTreeMap<ZoneKind, BTreeMap<NodeId, Bytes>>;

/// What workloads with a promise have of what is in use, within their promises.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owned(BTreeMap<(ZoneKind, NodeId), u64>);

impl Owned {
    /// Adds what a workload has of a kind. Where that is not known it counts as having all that it is promised.
    pub(crate) fn add(&mut self, promise: &Promise, kind: ZoneKind, has: Option<&BTreeMap<NodeId, Bytes>>) {
        let mut placed: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (_, node, bytes) in promise.placed.iter().filter(|(of, ..)| *of == kind) {
            *placed.entry(*node).or_default() += bytes.0;
        }
        let mut left: u64 = placed.values().sum();
        let mut own = |node: NodeId, bytes: u64| *self.0.entry((kind, node)).or_default() += bytes;
        let Some(has) = has else {
            return placed.into_iter().for_each(|(node, bytes)| own(node, bytes));
        };
        let mut elsewhere = Vec::new();
        for (&node, bytes) in has {
            let within = bytes.0.min(placed.get(&node).copied().unwrap_or(0));
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

/// What is withheld of the memory that the ledger gives out. `obtainable` is what can be had of a node's base pages.
pub(crate) fn withheld<'a>(
    ledger: &Ledger,
    memory: impl IntoIterator<Item = (NodeId, &'a NodeMemory)>,
    obtainable: impl Fn(NodeId, &NodeMemory) -> Bytes,
    owned: &Owned,
) -> ByKind {
    let mut withheld = ByKind::new();
    for (node, memory) in memory {
        let Some(account) = ledger.nodes().get(&node) else { continue };
        for (&kind, account) in &account.kinds {
            let (in_use, step) = match kind {
                ZoneKind::Memory => {
                    let pools = memory.hugepages.iter();
                    let pools = pools.fold(0, |sum: u64, (size, pool)| {
                        sum.saturating_add(pool.total.saturating_mul(size.0.0))
                    });
                    let base = memory.total.0.saturating_sub(pools);
                    (base.saturating_sub(obtainable(node, memory).0), step(memory.total))
                }
                ZoneKind::Hugepages(size) => {
                    let pool = memory.hugepages.get(&size).copied().unwrap_or_default();
                    (pool.total.saturating_sub(pool.free).saturating_mul(size.0.0), 1)
                }
            };
            let beyond = in_use.saturating_sub(owned.on(kind, node)).saturating_sub(account.reserved.0);
            if beyond > 0 {
                let bytes = Bytes(beyond.checked_next_multiple_of(step).unwrap_or(beyond));
                withheld.entry(kind).or_default().insert(node, bytes);
            }
        }
    }
    withheld
}

/// Base pages are withheld in steps of so much, so that what is said does not change all the time: a thousandth of the
/// node, at least 1 MiB.
fn step(total: Bytes) -> u64 {
    (total.0 >> 10).max(Bytes::mib(1).0)
}

#[cfg(test)]
mod tests {
    use numaward_cgroup::CgroupId;
    use numaward_engine::{
        Native, NativeOptions, PolicyConfig, Quantity, Strategy as _,
        policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation},
    };
    use numaward_topology::{CpuSet, HugepagePool, HugepageSize, Machine};

    use super::*;

    const HUGE: ZoneKind = ZoneKind::Hugepages(HugepageSize(Bytes::mib(2)));

    fn promise(placed: &[(ZoneKind, u32, u64)]) -> Promise {
        Promise {
            cgroup: "/a".parse().unwrap(),
            id: CgroupId(1),
            container: None,
            nodes: "0".parse().unwrap(),
            cpus: CpuSet::new(),
            blocks: Vec::new(),
            placed: placed.iter().map(|(kind, node, mib)| (*kind, NodeId(*node), Bytes::mib(*mib))).collect(),
            offline_cpus: CpuSet::new(),
            uncovered: Vec::new(),
        }
    }

    fn has(nodes: &[(u32, u64)]) -> BTreeMap<NodeId, Bytes> {
        nodes.iter().map(|(node, mib)| (NodeId(*node), Bytes::mib(*mib))).collect()
    }

    /// Two nodes with 4 GiB, of which 1 GiB is a pool; on node 0, 256 MiB and 64 MiB of huge pages are reserved.
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
        Native::new(&machine.build().unwrap(), &config, &NativeOptions::default()).unwrap().idle()
    }

    /// So much of a node's base pages can be had, in MiB, and so many of its huge pages are free.
    fn memory(obtainable: u64, free: u64) -> NodeMemory {
        NodeMemory {
            total: Bytes::gib(4),
            free: Bytes::mib(obtainable),
            active_file: Bytes(0),
            inactive_file: Bytes(0),
            kernel_reclaimable: Bytes(0),
            hugepages: [(HugepageSize(Bytes::mib(2)), HugepagePool { total: 512, free, surplus: 0 })].into(),
        }
    }

    fn seen(nodes: &[NodeMemory; 2], owned: &Owned) -> Vec<(ZoneKind, u32, u64)> {
        let nodes = [NodeId(0), NodeId(1)].into_iter().zip(nodes);
        let withheld = withheld(&ledger(), nodes, |_, memory| memory.free, owned);
        let by_node = |(kind, nodes): (&ZoneKind, &BTreeMap<NodeId, Bytes>)| {
            nodes.iter().map(|(node, bytes)| (*kind, node.0, bytes.0 >> 20)).collect::<Vec<_>>()
        };
        withheld.iter().flat_map(by_node).collect()
    }

    #[test]
    fn what_is_in_use_beyond_the_reservation_is_withheld() {
        let none = Owned::default();
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
    fn what_those_with_a_promise_have_is_theirs_up_to_what_is_promised() {
        let nodes = [memory(3072, 512), memory(3072 - 1000, 512 - 100)];
        let promise = promise(&[(ZoneKind::Memory, 1, 600), (HUGE, 1, 150)]);
        let mut owned = Owned::default();
        owned.add(&promise, ZoneKind::Memory, Some(&has(&[(1, 400)])));
        owned.add(&promise, HUGE, Some(&has(&[(1, 200)])));
        assert_eq!(seen(&nodes, &owned), [(HUGE, 1, 50), (ZoneKind::Memory, 1, 600)]);

        // What is on its way from another node is its own as well.
        let mut moving = Owned::default();
        let away = self::promise(&[(ZoneKind::Memory, 0, 600), (HUGE, 0, 150)]);
        moving.add(&away, ZoneKind::Memory, Some(&has(&[(0, 300), (1, 400)])));
        moving.add(&away, HUGE, None);
        assert_eq!(seen(&nodes, &moving), [(HUGE, 1, 200), (ZoneKind::Memory, 1, 700)]);
    }
}
