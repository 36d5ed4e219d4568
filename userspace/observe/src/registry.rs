//! Workloads, guarantees and probes of this host, with the locks on them.

use std::{
    collections::BTreeSet,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupEvent, CgroupId, Hierarchy, read::cpu_time};
use numaward_model::Guarantees;
use numaward_probes::{Probe, SlotHolders, SlotId};
use numaward_topology::Machine;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::{
    activity::AttachedProbes,
    cpu_time::CpuTimes,
    foreign::ForeignGuarantees,
    probing::{EventSubject, Probing},
    slot_policy::{READ_INTERVAL, SlotCandidate, SlotPolicy, exchanges},
    slots::{MAX_BATCH, SlotLocks},
    state::ObserverState,
    table::Table,
};

/// Most events that wait to be reported. Further events stay in the probes, which count lost ones.
const MAX_UNREPORTED_EVENTS: usize = 1024;

/// Interval at which the memory controllers of workloads with a guarantee are looked up.
const CHARGES_INTERVAL: Duration = Duration::from_secs(10);

/// Consistent copy of the workloads and of the holders of the probes' slots.
pub(crate) struct StateSnapshot {
    pub(crate) table: Arc<Table<SlotId>>,
    pub(crate) holders: SlotHolders,
    pub(crate) machine: Arc<Machine>,
    pub(crate) guarantees: Arc<Guarantees>,
    pub(crate) attached: Arc<AttachedProbes>,
}

/// Workloads, guarantees and probes of this host.
///
/// Locks are taken in the order of the fields. No file is read while a lock is held: the code under it only takes
/// short steps in memory and reads or writes single slots of the probes' maps; it never reads a whole map, because the
/// time for that grows with the map's size.
pub(crate) struct WorkloadRegistry {
    probing: Mutex<Probing>,
    state: Mutex<ObserverState>,
    /// Replaced under the lock of `state`.
    machine: watch::Sender<Arc<Machine>>,
    /// CPU time of workloads. Never locked together with another field.
    pub(crate) cpu_times: CpuTimes,
    /// Time for which a name without a member is kept.
    keep_removed: Duration,
}

impl WorkloadRegistry {
    pub(crate) fn new(mut probing: Probing, machine: Machine, keep_removed: Duration) -> Self {
        Self {
            cpu_times: CpuTimes::new(probing.probes.take_cpu_times(), &machine),
            probing: Mutex::new(probing),
            state: Mutex::default(),
            machine: watch::Sender::new(Arc::new(machine)),
            keep_removed,
        }
    }

    /// Locks the probes. Must be locked before the state if both are needed.
    pub(crate) fn probing(&self) -> MutexGuard<'_, Probing> {
        self.probing.lock()
    }

    /// Locks the state.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ObserverState> {
        self.state.lock()
    }

    /// Locks the probes and the state to change slots.
    pub(crate) fn lock_slots(&self) -> SlotLocks<'_> {
        let probing = self.probing();
        SlotLocks { probing, state: self.lock() }
    }

    /// Returns the machine as last read.
    pub(crate) fn machine(&self) -> Arc<Machine> {
        self.machine.borrow().clone()
    }

    /// Replaces the machine. Resident memory is indexed by node and becomes unknown if the nodes changed.
    pub(crate) fn replace_machine(&self, machine: Machine) {
        let mut state = self.lock();
        if machine.node_ids() != self.machine().node_ids() {
            state.table_mut().clear_resident();
        }
        self.machine.send_replace(Arc::new(machine));
    }

    /// Returns a consistent snapshot of the hierarchy, the workloads and the machine; `None` while the hierarchy is
    /// not open.
    pub(crate) fn placed(&self) -> Option<(Hierarchy, Arc<Table<SlotId>>, Arc<Machine>)> {
        let state = self.lock();
        Some((state.hierarchy.clone()?, state.table.clone(), self.machine()))
    }

    /// Follows the CPU time of new and removed cgroups. The removed ones must still be in the table.
    pub(crate) fn follow_cpu_times(&self, events: &[CgroupEvent]) {
        if let Some((hierarchy, table, _)) = self.placed() {
            self.cpu_times.follow(events, &hierarchy, &table);
        }
    }

    /// Copies the current state. Counters must be read before this call.
    pub(crate) fn snapshot(&self) -> StateSnapshot {
        let probing = self.probing();
        let state = self.lock();
        StateSnapshot {
            table: state.table.clone(),
            holders: probing.probes.holders(),
            machine: self.machine(),
            guarantees: state.guarantees.clone(),
            attached: probing.attached.clone(),
        }
    }

    /// Reads the probes' events while the owners of slots and the guarantees they refer to are still known.
    pub(crate) fn read_events(&self) {
        let mut probing = self.probing();
        if probing.events.len() >= MAX_UNREPORTED_EVENTS {
            return;
        }
        let Some(events) = probing.events() else { return };
        let state = self.lock();
        let subject = |slot| {
            let (id, _) = state.table.members().find(|(_, member)| member.slot == Some(slot))?;
            let name = state.table.name(id)?.clone();
            Some(EventSubject { name, guaranteed: state.guarantees.nodes_of(id).cloned() })
        };
        probing.events.extend(events.into_iter().map(|event| {
            let subject = event.slot.and_then(subject);
            (event, subject)
        }));
    }

    /// Replaces the guarantees.
    pub(crate) fn assign(&self, guarantees: Guarantees) {
        // While the previous guarantees are still known.
        self.read_events();
        self.lock_slots().assign(guarantees, self.keep_removed);
    }

    /// Assigns free slots to waiting workloads, and writes the owners of exclusive CPUs to the probe.
    pub(crate) fn assign_slots(&self) -> SlotLocks<'_> {
        while self.lock_slots().assign_slots(self.keep_removed, MAX_BATCH) {
            thread::yield_now();
        }
        let mut locks = self.lock_slots();
        locks.follow_exclusive_cpus();
        locks
    }

    /// Adopts the guarantees of another program from now on. Guarantees that are already known, by identity, change
    /// nothing.
    pub(crate) fn adopt(&self, foreign: &Arc<dyn ForeignGuarantees>) {
        self.read_events();
        let mut locks = self.lock_slots();
        if locks.state.foreign.as_ref().is_some_and(|held| Arc::ptr_eq(held, foreign)) {
            return;
        }
        locks.state.foreign = Some(foreign.clone());
        locks.rename();
        let members = locks.state.table.members();
        let containers = members
            .filter_map(|(id, member)| foreign.guarantee(id, &member.path, member.container.as_ref()?))
            .map(Arc::new)
            .collect();
        let mut guarantees = Guarantees::new(containers, foreign.ledger().clone());
        guarantees.free_cpus = foreign.free_cpus();
        // Still under the lock, so a container that appears meanwhile gets its guarantee afterwards.
        locks.assign(guarantees, self.keep_removed);
    }

    /// Tells the probes which workloads with a guarantee have the memory controller, so that the kernel charges their pages
    /// to them: if the guarantees changed, or the interval has passed.
    pub(crate) fn follow_charges(&self, now: Instant) {
        let targets: Vec<_> = {
            let SlotLocks { probing, mut state } = self.lock_slots();
            let revision = state.revision;
            let is_recent = |(at_revision, at): (u64, Instant)| {
                at_revision == revision && now.duration_since(at) < CHARGES_INTERVAL
            };
            if !probing.attached.has(Probe::Charge) || state.charges_read.is_some_and(is_recent) {
                return;
            }
            let Some(hierarchy) = state.hierarchy.clone() else { return };
            state.charges_read = Some((revision, now));
            let guarantees = state.guarantees.workloads().iter();
            guarantees.map(|guarantee| (guarantee.id, hierarchy.dir(&guarantee.cgroup))).collect()
        };
        let charged: Vec<_> =
            targets.into_iter().map(|(id, dir)| (id, dir.join("memory.current").exists())).collect();
        let mut locks = self.lock_slots();
        for (id, is_charged) in charged {
            locks.write_charged(id, is_charged);
        }
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
