//! What decisions have to heed beside the ledger: what others use of the host.
//!
//! The guard reads it on its own thread ([`HeadroomSource`](numaward_model::port::HeadroomSource)); here it is only handed
//! to the ledger. What a cgroup already uses that is to have a promise now is not others' use.

use std::{collections::BTreeMap, sync::Arc};

use numaward_cgroup::{CgroupPath, read};
use numaward_engine::{Allocation, Ledger};
use numaward_topology::{Bytes, NodeId, ZoneKind};

use super::Core;

impl Core {
    /// Takes over what was seen last. What is declared and has no room is tried again when that changed.
    ///
    /// A ledger [for one cgroup](Self::ledger_for) keeps its own conditions until the next look.
    pub(crate) fn update_conditions(&mut self) {
        let seen = self.ports.headroom.headroom();
        if Arc::ptr_eq(&seen, &self.last_headroom) {
            return;
        }
        if *self.store.state.ledger.conditions() != seen.conditions {
            let before = self.store.state.ledger.conditions().partition_cpus.clone();
            self.store.state.ledger.set_conditions(seen.conditions.clone());
            // What is free is published.
            self.effects.guarantees |= before != seen.conditions.partition_cpus;
            self.effects.view = true;
            self.effects.declared = true;
        }
        self.last_headroom = seen;
    }

    /// The ledger for a decision about this cgroup, which may not exist: what it uses beyond what it holds is there for it.
    pub(super) fn ledger_for(&self, path: Option<&CgroupPath>, held: Option<&Allocation>) -> Ledger {
        let mut ledger = self.store.state.ledger.clone();
        let conditions = ledger.conditions().clone();
        let Some(path) = path.filter(|_| !conditions.withheld.is_empty()) else { return ledger };
        let dir = self.hierarchy.dir(path);
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
}
