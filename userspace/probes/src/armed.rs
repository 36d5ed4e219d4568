//! Events of which the first of each slot is told, and then none for a while: see `ebpf/src/tell.rs`.
//!
//! A slot is *armed* when it begins to be of interest, disarmed by the event itself, and armed again [`PAUSE`] after
//! that event was read.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use aya::maps::{Array, MapData};

use crate::{
    MapAccessError,
    alloc::{Refusal, set, typed},
};

/// Time from one event of a slot to the next: a minute, and some more, so that whoever allows one a minute takes it.
const PAUSE: Duration = Duration::from_secs(61);

const MAP: &str = "ARMED";

/// Which slots are of interest, and since when one is silent.
pub(crate) struct Armed {
    map: Array<MapData, u64>,
    schedule: Schedule,
}

impl Armed {
    /// No slot is of interest yet.
    pub(crate) fn new(map: aya::maps::Map) -> Result<Self, Refusal> {
        Ok(Self { map: typed(map, MAP)?, schedule: Schedule::default() })
    }

    /// The first event of this slot is to be told, from now on. One that is of interest already stays as it is.
    pub(crate) fn watch(&mut self, slot: u32) -> Result<(), MapAccessError> {
        if self.schedule.watch(slot) { set(&mut self.map, MAP, slot, &1) } else { Ok(()) }
    }

    /// No event of this slot is to be told.
    pub(crate) fn forget(&mut self, slot: u32) -> Result<(), MapAccessError> {
        if self.schedule.forget(slot) { set(&mut self.map, MAP, slot, &0) } else { Ok(()) }
    }

    /// An event of this slot was read; `false` if it is of no interest any more.
    pub(crate) fn told(&mut self, slot: u32, now: Instant) -> bool {
        self.schedule.told(slot, now)
    }

    /// Arms those that were silent for long enough.
    pub(crate) fn arm_due(&mut self, now: Instant) -> Result<(), MapAccessError> {
        for slot in self.schedule.due(now) {
            set(&mut self.map, MAP, slot, &1)?;
            self.schedule.armed(slot);
        }
        Ok(())
    }
}

/// By slot of interest: when its last event was read; `None` while it is armed.
#[derive(Debug, Default)]
struct Schedule(BTreeMap<u32, Option<Instant>>);

impl Schedule {
    /// `true` if the slot was of no interest before.
    fn watch(&mut self, slot: u32) -> bool {
        let known = self.0.contains_key(&slot);
        self.0.entry(slot).or_default();
        !known
    }

    /// `true` if the slot was of interest.
    fn forget(&mut self, slot: u32) -> bool {
        self.0.remove(&slot).is_some()
    }

    fn told(&mut self, slot: u32, now: Instant) -> bool {
        self.0.get_mut(&slot).map(|told| *told = Some(now)).is_some()
    }

    fn due(&self, now: Instant) -> Vec<u32> {
        let silent = |told: &Option<Instant>| told.is_some_and(|told| now.duration_since(told) >= PAUSE);
        self.0.iter().filter(|(_, told)| silent(told)).map(|(&slot, _)| slot).collect()
    }

    fn armed(&mut self, slot: u32) {
        if let Some(told) = self.0.get_mut(&slot) {
            *told = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_armed_again_after_a_pause() {
        let start = Instant::now();
        let mut schedule = Schedule::default();
        assert!(schedule.watch(3));
        assert!(!schedule.watch(3), "it is armed already");
        assert_eq!(schedule.due(start + 10 * PAUSE), [0_u32; 0], "nothing happened yet");
        assert!(schedule.told(3, start));
        assert!(!schedule.watch(3), "a new promise does not end the silence");
        assert_eq!(schedule.due(start + PAUSE.saturating_sub(Duration::from_nanos(1))), [0_u32; 0]);
        assert_eq!(schedule.due(start + PAUSE), [3]);
        schedule.armed(3);
        assert_eq!(schedule.due(start + 2 * PAUSE), [0_u32; 0]);
        assert!(schedule.forget(3));
        assert!(!schedule.forget(3));
        assert!(!schedule.told(3, start), "an event that was under way");
        assert_eq!(schedule.due(start + PAUSE), [0_u32; 0]);
    }
}
