//! Assignment of the probes' slots to workloads as cgroups are created and removed.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupEvent, CgroupId, WorkloadKind, classify, read::cpu_time};
use numaward_model::error_chain;
use numaward_probes::{self as probes, NodeCounters, RegisterError};
use parking_lot::MutexGuard;

use crate::{
    observer::Observer,
    part::DaemonPart,
    probing::Probing,
    slot_policy::{READ_INTERVAL, SlotCandidate, SlotPolicy, exchanges},
    state::ObserverState,
    table::Member,
};

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
            match self.probing.probes.register(probes::CgroupId(id.0), guarantees.nodes_of(id)) {
                Ok(slot) => self.state.table_mut().assign_slot(Some(slot)),
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
    fn take_slot(&mut self, id: CgroupId) {
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
        let set = self.probing.probes.set_allowed(slot, guarantees.nodes_of(id));
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
}

impl Observer {
    /// Locks the probes and the state to change slots.
    pub(crate) fn lock_slots(&self) -> SlotLocks<'_> {
        let probing = self.probing();
        SlotLocks { probing, state: self.lock() }
    }

    /// Reads the CPU times of cgroups, if the interval has passed and a workload waits for a slot, and reassigns
    /// slots to the busiest workloads.
    pub(crate) fn follow_slot_policy(&self, now: Instant) {
        let targets: Vec<_> = {
            let SlotLocks { probing, mut state } = self.lock_slots();
            if state.table.waiting().next().is_none() || probing.attached.is_empty() {
                // The readings are of no use later.
                state.slot_policy = SlotPolicy::default();
                return;
            }
            if state
                .slot_policy
                .last_read
                .is_some_and(|last_read| now.duration_since(last_read) < READ_INTERVAL)
            {
                return;
            }
            state.slot_policy.last_read = Some(now);
            let Some(hierarchy) = &state.hierarchy else { return };
            state.table.members().map(|(id, member)| (id, hierarchy.dir(&member.path))).collect()
        };
        // A cgroup that was removed meanwhile counts as idle.
        let used = targets.into_iter().filter_map(|(id, dir)| Some((id, cpu_time(&dir).ok()?))).collect();
        let mut locks = self.lock_slots();
        let state = &mut *locks.state;
        state.slot_policy.record(used);
        let waiting: BTreeSet<CgroupId> = state.table.waiting().collect();
        let candidates: Vec<SlotCandidate> = state
            .table
            .members()
            .filter(|(id, member)| member.slot.is_some() || waiting.contains(id))
            .map(|(id, member)| SlotCandidate {
                id,
                has_slot: member.slot.is_some(),
                has_guarantee: state.guarantees.nodes_of(id).is_some(),
                busy: state.slot_policy.busy(id),
            })
            .collect();
        for (giver, taker) in exchanges(&candidates) {
            locks.take_slot(giver);
            locks.state.table_mut().prefer(taker);
        }
        // Workloads with a guarantee first.
        let state = &mut *locks.state;
        let guaranteed: Vec<CgroupId> =
            state.table.waiting().filter(|id| state.guarantees.nodes_of(*id).is_some()).collect();
        for id in guaranteed {
            state.table_mut().prefer(id);
        }
    }
}
