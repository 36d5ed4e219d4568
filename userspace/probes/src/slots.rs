//! The assignment of slots to workloads.
//!
//! A slot is free, held by a workload, or *cooling*: freed less than [`COOLING_TIME`] ago. An event that was being
//! processed on another CPU while the slot was freed may still be booked to it. This takes far less than a microsecond
//! unless the hypervisor stops that CPU, so a second is ample.
//!
//! Counters in the maps are never reset. A slot's holder gets their growth since it took the slot (`base`), so no
//! counter ever decreases, and reading needs no lock against the probes.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_abi::OTHER_SLOT;
use numaward_topology::NodeSet;

use crate::{
    Activity, CgroupId,
    activity::growth,
    tables::{CounterLayout, CounterTable},
};

/// The time for which a freed slot is not assigned again.
pub(crate) const COOLING_TIME: Duration = Duration::from_secs(1);

/// The counters of a slot when its holder took it. Empty ones stand for zeros.
#[derive(Debug, Default)]
pub(crate) struct BaseCounters {
    /// Counters of allocations: the slot's row for each node index.
    pub(crate) rows: Vec<u64>,
    /// Counters of the secondary probes.
    pub(crate) tables: BTreeMap<CounterTable, Vec<u64>>,
}

impl BaseCounters {
    /// Returns the activity since then. `now` are the current counters.
    pub(crate) fn decode_activity<'a>(
        &self,
        layout: &CounterLayout,
        now: impl Iterator<Item = (CounterTable, &'a [u64])>,
    ) -> Activity {
        layout.decode(now.map(|(of, now)| (of, growth(self.tables.get(&of).map_or(&[], Vec::as_slice), now))))
    }
}

/// A workload that holds a slot.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    /// The root of its cgroups.
    pub(crate) cgroup: CgroupId,
    /// Shared only by copies of this holder, so that its address identifies the holder.
    pub(crate) base: Arc<BaseCounters>,
    pub(crate) allowed: Option<NodeSet>,
    /// True if the kernel charges pages to the cgroup itself; false if it charges them to an ancestor.
    pub(crate) is_charged: bool,
}

/// The workloads that hold slots, at one instant. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct SlotHolders(Arc<BTreeMap<u32, Holder>>);

impl SlotHolders {
    /// Returns the slots with the same holder in `other`, and their counters when it took them.
    pub(crate) fn unchanged_in(&self, other: &Self) -> impl Iterator<Item = (u32, &BaseCounters)> {
        self.0.iter().filter_map(|(&slot, holder)| {
            let was = other.0.get(&slot)?;
            Arc::ptr_eq(&was.base, &holder.base).then_some((slot, &*holder.base))
        })
    }

    /// Returns the number of slots, including [`OTHER_SLOT`], that may have counts.
    pub(crate) fn used_slots(&self) -> u32 {
        self.0.keys().next_back().map_or(1, |&last| last + 1)
    }
}

#[derive(Debug)]
pub(crate) struct Slots {
    /// The number of slots, including [`OTHER_SLOT`].
    capacity: u32,
    held: SlotHolders,
    cooling: BTreeMap<u32, Instant>,
    /// The lowest slot that was never held.
    fresh: u32,
}

impl Slots {
    /// Creates `slots` slots for workloads, and one for all other tasks.
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            capacity: slots.saturating_add(1),
            held: SlotHolders::default(),
            cooling: BTreeMap::new(),
            fresh: OTHER_SLOT + 1,
        }
    }

    /// Returns the lowest available slot: low slots keep the part of the maps short that has to be read.
    pub(crate) fn next(&self, now: Instant) -> Option<u32> {
        let cooled =
            self.cooling.iter().find(|&(_, &freed)| now.saturating_duration_since(freed) >= COOLING_TIME);
        cooled.map(|(&slot, _)| slot).or((self.fresh < self.capacity).then_some(self.fresh))
    }

    /// Assigns `slot`, a result of [`Slots::next`], to a holder.
    pub(crate) fn take(&mut self, slot: u32, holder: Holder) {
        self.cooling.remove(&slot);
        self.fresh = self.fresh.max(slot + 1);
        self.held_mut().insert(slot, holder);
    }

    pub(crate) fn free(&mut self, slot: u32, now: Instant) -> Option<Holder> {
        let holder = self.held_mut().remove(&slot)?;
        self.cooling.insert(slot, now);
        Some(holder)
    }

    pub(crate) fn set_allowed(&mut self, slot: u32, allowed: Option<&NodeSet>) {
        if let Some(holder) = self.held_mut().get_mut(&slot) {
            holder.allowed = allowed.cloned();
        }
    }

    pub(crate) fn set_charged(&mut self, slot: u32, is_charged: bool) {
        if let Some(holder) = self.held_mut().get_mut(&slot) {
            holder.is_charged = is_charged;
        }
    }

    pub(crate) fn holder(&self, slot: u32) -> Option<&Holder> {
        self.held.0.get(&slot)
    }

    pub(crate) fn holders(&self) -> impl Iterator<Item = (u32, &Holder)> {
        self.held.0.iter().map(|(&slot, holder)| (slot, holder))
    }

    /// Returns the current holders.
    pub(crate) fn held(&self) -> &SlotHolders {
        &self.held
    }

    fn held_mut(&mut self) -> &mut BTreeMap<u32, Holder> {
        Arc::make_mut(&mut self.held.0)
    }

    pub(crate) fn is_registered(&self, cgroup: CgroupId) -> bool {
        self.held.0.values().any(|holder| holder.cgroup == cgroup)
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity - 1
    }

    /// Returns the number of slots that are cooling.
    pub(crate) fn count_cooling(&self, now: Instant) -> usize {
        self.cooling.values().filter(|&&freed| now.saturating_duration_since(freed) < COOLING_TIME).count()
    }

    pub(crate) fn count_held(&self) -> usize {
        self.held.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(cgroup: u64) -> Holder {
        Holder { cgroup: CgroupId(cgroup), base: Arc::default(), allowed: None, is_charged: true }
    }

    #[test]
    fn freed_slot_cools() {
        let start = Instant::now();
        let later = start + COOLING_TIME;
        let mut slots = Slots::new(2);
        for cgroup in [10, 11] {
            let slot = slots.next(start).unwrap();
            slots.take(slot, holder(cgroup));
        }
        assert_eq!((slots.count_held(), slots.capacity(), slots.held().used_slots()), (2, 2, 3));
        assert_eq!(slots.next(later), None, "all are held");
        assert!(slots.is_registered(CgroupId(10)));

        assert_eq!(slots.free(1, start).map(|holder| holder.cgroup), Some(CgroupId(10)));
        assert!(!slots.is_registered(CgroupId(10)));
        assert!(slots.free(1, start).is_none(), "freed already");
        assert_eq!(slots.next(later.checked_sub(Duration::from_nanos(1)).unwrap()), None);
        assert_eq!((slots.count_cooling(start), slots.count_cooling(later)), (1, 0));
        assert_eq!(slots.next(later), Some(1));
        assert_eq!(slots.held().used_slots(), 3, "slot 2 is still held");
    }

    #[test]
    fn other_slot_is_never_assigned() {
        let now = Instant::now();
        assert_eq!(Slots::new(0).next(now), None);
        assert_eq!(Slots::new(1).next(now), Some(1));
        assert!(Slots::new(1).free(OTHER_SLOT, now).is_none());
    }

    #[test]
    fn low_slots_are_taken_first() {
        let start = Instant::now();
        let mut slots = Slots::new(10);
        for cgroup in 0..3 {
            slots.take(slots.next(start).unwrap(), holder(cgroup));
        }
        slots.free(2, start);
        assert_eq!(slots.next(start), Some(4), "2 is cooling");
        assert_eq!(slots.next(start + COOLING_TIME), Some(2));
    }

    #[test]
    fn reassigned_slot_has_no_old_counters() {
        let start = Instant::now();
        let mut slots = Slots::new(4);
        for (slot, cgroup) in [(1, 10), (2, 11), (3, 12)] {
            slots.take(slot, holder(cgroup));
        }
        let before = slots.held().clone();
        slots.free(1, start);
        slots.free(2, start);
        // The same cgroup again: its earlier counts were returned when it released its slot.
        slots.take(2, holder(11));
        slots.set_allowed(3, Some(&"0".parse().unwrap()));
        slots.take(4, holder(13));
        let same: Vec<u32> = slots.held().unchanged_in(&before).map(|(slot, _)| slot).collect();
        assert_eq!(same, [3]);
        assert_eq!(before.unchanged_in(&before).count(), 3);
    }
}
