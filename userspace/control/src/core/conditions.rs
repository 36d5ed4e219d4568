//! Conditions of decisions that are not in the ledger: the use of the host by workloads without a guarantee.
//!
//! The guard reads them on its own thread ([`ObservedHost`](numaward_model::port::ObservedHost)); this module copies them into the
//! ledger. The use of a cgroup that requests a guarantee does not count against its own request.

use std::{collections::BTreeMap, sync::Arc};

use numaward_cgroup::{CgroupPath, Hierarchy, read};
use numaward_engine::{Allocation, HostConditions, Ledger};
use numaward_model::headroom::Headroom;
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

use super::{Core, shared_pool};

/// Returns the latest conditions, with the CPUs of this machine that partitions of other programs have now.
pub(super) fn present_conditions(
    headroom: &Headroom,
    hierarchy: &Hierarchy,
    machine: &Machine,
    ledger: &Ledger,
) -> HostConditions {
    let conditions = HostConditions::clone(&headroom.conditions);
    let partition_cpus = hierarchy.partition_cpus(ledger.shared_pool());
    let partition_cpus = &(&partition_cpus & &machine.cpu_ids()) - &conditions.offline_cpus;
    HostConditions { partition_cpus, ..conditions }
}

/// Copies the latest conditions into the ledger. If they changed, refused declared guarantees are retried; if the CPUs of partitions
/// changed, the shared pool did, too.
///
/// A ledger [for one cgroup](ledger_for) keeps its own conditions until the next call.
pub(crate) fn update(core: &mut Core) {
    let ledger = &core.store.state.ledger;
    let headroom = core.ports.host.headroom();
    let conditions = present_conditions(&headroom, &core.hierarchy, &core.policy.machine, ledger);
    let before = core.store.state.ledger.conditions().clone();
    if *before == conditions {
        return;
    }
    let is_pool_changed = before.partition_cpus != conditions.partition_cpus;
    core.store.state.ledger.set_conditions(Arc::new(conditions));
    if is_pool_changed {
        shared_pool::note_guarantees_changed(core);
    }
    core.effects.view = true;
    core.effects.declared = true;
}

/// Returns the ledger for a decision about this cgroup, which may not exist. Memory that it uses beyond its present allocation counts
/// as free for it.
pub(crate) fn ledger_for(core: &Core, path: Option<&CgroupPath>, held: Option<&Allocation>) -> Ledger {
    let mut ledger = core.store.state.ledger.clone();
    let conditions = ledger.conditions().clone();
    let Some(path) = path.filter(|_| !conditions.withheld.is_empty()) else { return ledger };
    let dir = core.hierarchy.dir(path);
    let used = |kind: &ZoneKind| -> BTreeMap<NodeId, Bytes> {
        match *kind {
            ZoneKind::Memory => {
                let by_node = read::memory_numa_stat(&dir).unwrap_or_default().into_iter();
                by_node.map(|(node, of)| (node, of.undroppable())).collect()
            }
            ZoneKind::Hugepages(size) => read::hugetlb_numa_stat(&dir, size).unwrap_or_default(),
        }
    };
    let beyond = |kind: &ZoneKind| {
        let placed = held.and_then(|held| held.placed.get(kind));
        let placed = |node: &NodeId| placed.and_then(|of| of.get(node)).map_or(0, |bytes| bytes.0);
        let used = used(kind).into_iter();
        used.map(|(node, bytes)| (node, Bytes(bytes.0.saturating_sub(placed(&node))))).collect()
    };
    let used = conditions.withheld.keys().map(|kind| (*kind, beyond(kind))).collect();
    ledger.set_conditions(Arc::new(conditions.without(&used)));
    ledger
}
