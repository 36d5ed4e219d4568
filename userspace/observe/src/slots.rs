//! Assignment of the probes' slots to workloads as cgroups are created and removed.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupEvent, CgroupId, WorkloadKind, classify};
use numaward_model::{Guarantees, error_chain};
use numaward_probes::{self as probes, NodeCounters, RegisterError};
use parking_lot::MutexGuard;

use crate::{part::DaemonPart, probing::Probing, state::ObserverState, table::Member};

/// Most slots that are assigned before the locks are released for other threads.
pub(crate) const MAX_BATCH: usize = 256;

/// Locks on the probes and the state together. Slots only change while both are held, so a reader of the counters
/// sees the assignment before or after a change. The probes are locked first.
pub(crate) struct SlotLocks<'a> {
    pub(crate) probing: MutexGuard<'a, Probing>,
    pub(crate) state: MutexGuard<'a, ObserverState>,
}

impl SlotLocks<'_> {
    /// Handles the creation or removal of a cgroup.
    pub(crate) fn handle(&mut self, event: CgroupEvent) {
        match event {
            CgroupEvent::Added(cgroup) => {
                let workload = classify(&cgroup.path, |_| false);
                // Descendant cgroups count for their workload. Allocations of the root cgroup count as `other`: a
                // slot for it would also count the allocations of all workloads without a slot.
                if workload.root != cgroup.path || workload.kind == WorkloadKind::Root {
                    return;
                }
                let container = workload.container.as_ref();
                let name = self.state.name_of(&workload);
                tracing::debug!(workload = name, cgroup = %cgroup.path, "workload appeared");
                self.state.handle_new_container(cgroup.id, &cgroup.path, container);
                let member = Member::new(cgroup.path, workload.kind, workload.container);
                self.state.table_mut().add(cgroup.id, &name, member);
            }
            CgroupEvent::Removed(cgroup) => {
                self.state.handle_removed_container(cgroup.id);
                self.remove_cgroup(cgroup.id);
            }
        }
    }

    /// Removes a cgroup from the table; its last counts are added to its name.
    pub(crate) fn remove_cgroup(&mut self, id: CgroupId) {
        let counted = self.release(id, "the workload's last counts are lost").unwrap_or_default();
        self.state.table_mut().remove(id, &counted, Instant::now());
    }

    /// Assigns free slots to at most `at_once` waiting workloads, and removes names without a member
    /// for `keep`. Returns whether there is more to do.
    pub(crate) fn assign_slots(&mut self, keep: Duration, at_once: usize) -> bool {
        // The check avoids a copy of the table, which readers may hold, if nothing has expired.
        let now = Instant::now();
        if self.state.table.has_expired(now, keep) {
            self.state.table_mut().expire(now, keep);
        }
        if self.probing.attached.is_empty() {
            return false;
        }
        let mut outcome = Ok(());
        let mut given = 0;
        while let Some(id) = self.state.table.next_waiting() {
            if given == at_once {
                return true;
            }
            given += 1;
            let guarantees = self.state.guarantees.clone();
            match self.probing.probes.register(probes::CgroupId(id.0), guarantees.binding_nodes_of(id)) {
                Ok(slot) => {
                    self.state.table_mut().assign_slot(Some(slot));
                    self.state.charges_read = None;
                }
                Err(RegisterError::NoSlot { .. }) if self.free_slots_for_guarantees() => break,
                Err(error @ RegisterError::NoSlot { .. }) => {
                    let reason =
                        format!("{error} (probes.slots); workloads without one are counted as other");
                    outcome = Err(reason);
                    break;
                }
                Err(error) => {
                    tracing::warn!(
                        cgroup = id.0,
                        error = error_chain(&error),
                        "this workload gets no counters of its own: it cannot be registered with the probes"
                    );
                    self.state.table_mut().assign_slot(None);
                }
            }
        }
        self.probing.health.note(DaemonPart::Slots, outcome);
        false
    }

    /// Releases slots of workloads without a guarantee for waiting workloads with one. Returns whether some of these
    /// slots are not free yet.
    pub(crate) fn free_slots_for_guarantees(&mut self) -> bool {
        let waiting =
            self.state.table.waiting().filter(|id| self.state.guarantees.nodes_of(*id).is_some()).count();
        let mut coming = self.probing.probes.cooling_slots();
        while coming < waiting {
            // The least busy workload at the last reading.
            let held = self.state.table.members().filter(|(_, member)| member.slot.is_some());
            let without_guarantee =
                held.map(|(id, _)| id).filter(|id| self.state.guarantees.nodes_of(*id).is_none());
            let Some(id) = without_guarantee.min_by_key(|id| self.state.slot_policy.busy(*id)) else { break };
            self.take_slot(id);
            coming += 1;
        }
        waiting > 0 && coming > 0
    }

    /// Releases a workload's slot; the workload waits for another one.
    pub(crate) fn take_slot(&mut self, id: CgroupId) {
        if let Some(counted) = self.release(id, "the workload's slot cannot be released") {
            self.state.table_mut().suspend(id, &counted);
        }
    }

    /// Releases a workload's slot in the probes. Returns the allocations it had counted; its other counts are kept in
    /// the table.
    fn release(&mut self, id: CgroupId, failure: &'static str) -> Option<NodeCounters> {
        let (slot, name) = (self.state.table.slot(id)?, self.state.table.name(id)?.clone());
        match self.probing.probes.activity_of(slot) {
            Ok(last) => self.state.table_mut().keep_activity(id, &last),
            Err(error) => {
                tracing::warn!(workload = %name, error = error_chain(&error), "the workload's last counts are lost");
            }
        }
        let released = self.probing.probes.release(slot);
        released
            .inspect_err(|error| tracing::warn!(cgroup = id.0, error = error_chain(error), "{failure}"))
            .ok()
    }

    /// Writes the nodes that a workload may use to the probes.
    pub(crate) fn write_allowed_nodes(&mut self, id: CgroupId) {
        let Some(slot) = self.state.table.slot(id) else { return };
        let guarantees = self.state.guarantees.clone();
        let set = self.probing.probes.set_allowed(slot, guarantees.binding_nodes_of(id));
        self.probing.health.note_result(DaemonPart::Slots, set);
    }

    /// Writes to the probes whether the kernel charges a workload's pages to it.
    pub(crate) fn write_charged(&mut self, id: CgroupId, is_charged: bool) {
        let Some(slot) = self.state.table.slot(id) else { return };
        let set = self.probing.probes.set_charged(slot, is_charged);
        self.probing.health.note_result(DaemonPart::Slots, set);
    }

    /// Moves workloads to their name after it has become known.
    pub(crate) fn rename(&mut self) {
        let renamed: Vec<_> = self
            .state
            .renamed()
            .map(|(id, label, member)| {
                (id, label, Member::new(member.path.clone(), member.kind, member.container.clone()))
            })
            .collect();
        for (id, label, member) in renamed {
            self.remove_cgroup(id);
            self.state.table_mut().add(id, &label, member);
        }
    }

    /// Writes the owners of exclusive CPUs to the probe if they changed.
    pub(crate) fn follow_exclusive_cpus(&mut self) {
        let mut owners = BTreeMap::new();
        for guarantee in self.state.guarantees.workloads() {
            if let Some(slot) = self.state.table.slot(guarantee.id) {
                owners.extend(guarantee.held_cpus().iter().map(|cpu| (cpu, slot)));
            }
        }
        if owners == self.state.exclusive.owners {
            return;
        }
        let set = self.probing.probes.set_exclusive(&owners);
        self.state.exclusive.set_owners(owners);
        self.probing.health.note_result(DaemonPart::Intruders, set);
    }

    /// Replaces the guarantees. Names without a member are kept for `keep`.
    pub(crate) fn assign(&mut self, guarantees: Guarantees, keep: Duration) {
        let now = Arc::new(guarantees);
        self.state.revision += 1;
        let before = std::mem::replace(&mut self.state.guarantees, now.clone());
        for ended in before.workloads().iter().filter(|guarantee| !now.has(guarantee.id)) {
            self.write_allowed_nodes(ended.id);
        }
        for guarantee in now.workloads() {
            if self.state.table.slot(guarantee.id).is_some() {
                let was = before.get(guarantee.id);
                let is_same = was.is_some_and(|was| Arc::ptr_eq(was, guarantee));
                if !is_same && before.binding_nodes_of(guarantee.id) != now.binding_nodes_of(guarantee.id) {
                    self.write_allowed_nodes(guarantee.id);
                }
                continue;
            }
            // A workload that had a guarantee and is no longer known is gone, and no later event would report that.
            if before.has(guarantee.id) && self.state.table.name(guarantee.id).is_none() {
                continue;
            }
            let workload = classify(&guarantee.cgroup, |path| *path == guarantee.cgroup);
            let name = self.state.name_of(&workload);
            let member = Member::new(guarantee.cgroup.clone(), workload.kind, workload.container);
            let table = self.state.table_mut();
            table.add(guarantee.id, &name, member);
            table.prefer(guarantee.id);
        }
        self.assign_slots(keep, MAX_BATCH.max(now.workloads().len()));
        self.follow_exclusive_cpus();
    }
}
