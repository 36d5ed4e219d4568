//! Who holds which slot.
//!
//! A slot is free, held by a workload, or *cooling*: freed less than [`COOLING`] ago. An event that
//! was under way on another CPU while the slot was freed may still be booked to it. Such an event is
//! over in well under a microsecond unless the hypervisor stops that CPU, so a second is ample.
//!
//! Counters in the maps are never reset. A slot's holder is given their growth since it took the slot
//! (`base`), so no count is ever taken down, and reading them needs no lock against the probes.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_abi::OTHER_SLOT;
use numaward_topology::NodeSet;

use crate::CgroupId;

/// How long a freed slot is not given to another workload.
pub(crate) const COOLING: Duration = Duration::from_secs(1);

/// A workload that holds a slot.
#[derive(Debug)]
pub(crate) struct Holder {
    /// The root of its cgroups.
    pub(crate) cgroup: CgroupId,
    /// The slot's row of counters for each node index, when it took the slot.
    pub(crate) base: Vec<u64>,
    pub(crate) allowed: Option<NodeSet>,
}

#[derive(Debug)]
pub(crate) struct Slots {
    /// All slots, [`OTHER_SLOT`] included.
    capacity: u32,
    held: BTreeMap<u32, Holder>,
    cooling: BTreeMap<u32, Instant>,
    /// No slot from here on was ever held.
    fresh: u32,
}

impl Slots {
    /// `slots` for workloads, and one for all else.
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            capacity: slots.saturating_add(1),
            held: BTreeMap::new(),
            cooling: BTreeMap::new(),
            fresh: OTHER_SLOT + 1,
        }
    }

    /// The lowest slot that may be taken now: low ones keep the part of the maps that is read short.
    pub(crate) fn next(&self, now: Instant) -> Option<u32> {
        let cooled = self.cooling.iter().find(|&(_, &freed)| now.saturating_duration_since(freed) >= COOLING);
        cooled.map(|(&slot, _)| slot).or((self.fresh < self.capacity).then_some(self.fresh))
    }

    /// Gives `slot`, of [`Slots::next`], to a holder.
    pub(crate) fn take(&mut self, slot: u32, holder: Holder) {
        self.cooling.remove(&slot);
        self.fresh = self.fresh.max(slot + 1);
        self.held.insert(slot, holder);
    }

    pub(crate) fn free(&mut self, slot: u32, now: Instant) -> Option<Holder> {
        let holder = self.held.remove(&slot)?;
        self.cooling.insert(slot, now);
        Some(holder)
    }

    pub(crate) fn set_allowed(&mut self, slot: u32, allowed: Option<&NodeSet>) {
        if let Some(holder) = self.held.get_mut(&slot) {
            holder.allowed = allowed.cloned();
        }
    }

    pub(crate) fn holder(&self, slot: u32) -> Option<&Holder> {
        self.held.get(&slot)
    }

    pub(crate) fn holders(&self) -> impl Iterator<Item = (u32, &Holder)> {
        self.held.iter().map(|(&slot, holder)| (slot, holder))
    }

    pub(crate) fn is_registered(&self, cgroup: CgroupId) -> bool {
        self.held.values().any(|holder| holder.cgroup == cgroup)
    }

    /// Number of slots, [`OTHER_SLOT`] included, that may hold counts.
    pub(crate) fn in_use_up_to(&self) -> u32 {
        self.held.keys().next_back().map_or(1, |&last| last + 1)
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity - 1
    }

    /// Slots that nobody may take yet.
    pub(crate) fn cooling(&self, now: Instant) -> usize {
        self.cooling.values().filter(|&&freed| now.saturating_duration_since(freed) < COOLING).count()
    }

    pub(crate) fn held(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(cgroup: u64) -> Holder {
        Holder { cgroup: CgroupId(cgroup), base: Vec::new(), allowed: None }
    }

    #[test]
    fn a_freed_slot_cools_before_it_is_taken_again() {
        let start = Instant::now();
        let later = start + COOLING;
        let mut slots = Slots::new(2);
        for cgroup in [10, 11] {
            let slot = slots.next(start).unwrap();
            slots.take(slot, holder(cgroup));
        }
        assert_eq!((slots.held(), slots.capacity(), slots.in_use_up_to()), (2, 2, 3));
        assert_eq!(slots.next(later), None, "all are held");
        assert!(slots.is_registered(CgroupId(10)));

        assert_eq!(slots.free(1, start).map(|holder| holder.cgroup), Some(CgroupId(10)));
        assert!(!slots.is_registered(CgroupId(10)));
        assert!(slots.free(1, start).is_none(), "freed already");
        assert_eq!(slots.next(later.checked_sub(Duration::from_nanos(1)).unwrap()), None);
        assert_eq!((slots.cooling(start), slots.cooling(later)), (1, 0));
        assert_eq!(slots.next(later), Some(1));
        assert_eq!(slots.in_use_up_to(), 3, "slot 2 is still held");
    }

    #[test]
    fn the_slot_of_all_else_is_never_given_away() {
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
        assert_eq!(slots.next(start + COOLING), Some(2));
    }
}
