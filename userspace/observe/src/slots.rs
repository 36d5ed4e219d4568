//! Workloads come and go, and slots pass between them.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupId, Event, WorkloadKind, classify, read::cpu_usage};
use numaward_probes::{self as probes, RegisterError};

use crate::{
    observer::Observer,
    part::{Part, chain},
    slot_policy::{Candidate, LOOK, SlotPolicy, exchanges},
    state::State,
    table::Member,
};

impl State {
    pub(crate) fn take(&mut self, event: Event) {
        match event {
            Event::Added(cgroup) => {
                let workload = classify(&cgroup.path, |_| false);
                // Deeper cgroups fold into their workload. What the root cgroup has is `other`: a slot
                // for it would take what those without a slot allocate.
                if workload.root != cgroup.path || workload.kind == WorkloadKind::Root {
                    return;
                }
                let container = workload.container.as_ref();
                let name = self.name_of(&workload);
                tracing::debug!(workload = name, cgroup = %cgroup.path, "workload appeared");
                self.container_came(cgroup.id, &cgroup.path, container);
                let member = Member::new(cgroup.path, workload.kind, workload.container);
                self.table.add(cgroup.id, &name, member);
            }
            Event::Removed(cgroup) => {
                self.container_went(cgroup.id);
                self.give_up(cgroup.id);
            }
        }
    }

    /// Takes a cgroup from the table; its last counts stay with its name.
    pub(crate) fn give_up(&mut self, id: CgroupId) {
        self.keep_activity(id);
        let counted = match self.table.slot(id).map(|slot| self.probes.release(slot)) {
            None => None,
            Some(Ok(counted)) => Some(counted),
            Some(Err(error)) => {
                tracing::warn!(cgroup = id.0, error = chain(&error), "last counts are lost");
                None
            }
        };
        self.table.remove(id, &counted.unwrap_or_default(), Instant::now());
    }

    /// Gives free slots to workloads that wait, and takes from the list what has been gone for `keep`.
    pub(crate) fn keep_books(&mut self, keep: Duration) {
        self.table.expire(Instant::now(), keep);
        let table = &self.table;
        self.activities.keep(|name| table.is_listed(name));
        if !self.needs_slots() {
            return;
        }
        let mut outcome = Ok(());
        while let Some(id) = self.table.next_waiting() {
            let promises = self.promises.clone();
            match self.probes.register(probes::CgroupId(id.0), promises.nodes_of(id)) {
                Ok(slot) => self.table.settle_waiting(Some(slot)),
                Err(RegisterError::NoSlot { .. }) if self.make_room() => break,
                Err(error @ RegisterError::NoSlot { .. }) => {
                    let reason =
                        format!("{error} (probes.slots); workloads without one are counted as other");
                    outcome = Err(reason);
                    break;
                }
                Err(error) => {
                    tracing::warn!(
                        cgroup = id.0,
                        error = chain(&error),
                        "a workload cannot be counted by itself"
                    );
                    self.table.settle_waiting(None);
                }
            }
        }
        self.note(Part::Slots, outcome);
    }

    /// Takes slots from workloads without a promise for those with one that wait. Says whether some are on their way.
    pub(crate) fn make_room(&mut self) -> bool {
        let waiting = self.table.waiting().filter(|id| self.promises.nodes_of(*id).is_some()).count();
        let mut coming = self.probes.cooling_slots();
        while coming < waiting {
            // Whoever was least busy when it was looked last.
            let held = self.table.members().filter(|(_, member)| member.slot.is_some());
            let unpromised = held.map(|(id, _)| id).filter(|id| self.promises.nodes_of(*id).is_none());
            let Some(id) = unpromised.min_by_key(|id| self.slot_policy.busy(*id)) else { break };
            self.take_slot(id);
            coming += 1;
        }
        waiting > 0 && coming > 0
    }

    /// Takes a workload's slot back; it waits for another.
    fn take_slot(&mut self, id: CgroupId) {
        self.keep_activity(id);
        let Some(slot) = self.table.slot(id) else { return };
        match self.probes.release(slot) {
            Ok(counted) => self.table.suspend(id, &counted),
            Err(error) => {
                tracing::warn!(cgroup = id.0, error = chain(&error), "its slot cannot be taken back");
            }
        }
    }

    /// Keeps what a workload had counted, before it gives back its slot.
    pub(crate) fn keep_activity(&mut self, id: CgroupId) {
        let (Some(slot), Some(name)) = (self.table.slot(id), self.table.name(id)) else { return };
        match self.probes.activity_of(slot) {
            Ok(last) => self.activities.release(name, &last),
            Err(error) => {
                tracing::warn!(workload = %name, error = chain(&error), "last counts are lost");
            }
        }
    }

    /// Tells the probes which nodes a workload may use.
    pub(crate) fn allow(&mut self, id: CgroupId) {
        let Some(slot) = self.table.slot(id) else { return };
        let promises = self.promises.clone();
        let told = self.probes.set_allowed(slot, promises.nodes_of(id)).map_err(|error| chain(&error));
        self.note(Part::Slots, told);
    }
}

impl Observer {
    /// Looks who is busy, if it is time and somebody waits for a slot, and lets the busiest have some.
    pub(crate) fn follow_slot_policy(&self, now: Instant) {
        let targets: Vec<_> = {
            let mut state = self.lock();
            if state.table.waiting().next().is_none() || !state.needs_slots() {
                // What was seen is of no use later.
                state.slot_policy = SlotPolicy::default();
                return;
            }
            if state.slot_policy.looked.is_some_and(|looked| now.duration_since(looked) < LOOK) {
                return;
            }
            state.slot_policy.looked = Some(now);
            let Some(hierarchy) = &state.hierarchy else { return };
            state.table.members().map(|(id, member)| (id, hierarchy.dir(&member.path))).collect()
        };
        // A cgroup that vanishes meanwhile is not busy.
        let used = targets.into_iter().filter_map(|(id, dir)| Some((id, cpu_usage(&dir).ok()?))).collect();
        let mut state = self.lock();
        state.slot_policy.look(used);
        let waiting: BTreeSet<CgroupId> = state.table.waiting().collect();
        let candidates: Vec<Candidate> = state
            .table
            .members()
            .filter(|(id, member)| member.slot.is_some() || waiting.contains(id))
            .map(|(id, member)| Candidate {
                id,
                has_slot: member.slot.is_some(),
                is_promised: state.promises.nodes_of(id).is_some(),
                busy: state.slot_policy.busy(id),
            })
            .collect();
        for (giver, taker) in exchanges(&candidates) {
            state.take_slot(giver);
            state.table.prefer(taker);
        }
        // Those with a promise before all others.
        let promised: Vec<CgroupId> =
            state.table.waiting().filter(|id| state.promises.nodes_of(*id).is_some()).collect();
        for id in promised {
            state.table.prefer(id);
        }
    }
}
