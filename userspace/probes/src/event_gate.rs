//! Limits the events of each slot to one per [`REOPEN_INTERVAL`]: see `ebpf/src/event_gate.rs`.
//!
//! A slot's gate is opened when the slot is first watched, closed by an event, and opened again [`REOPEN_INTERVAL`]
//! after that event was read.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use aya::maps::{Array, MapData, RingBuf};

use crate::{MapAccessError, ProbeEvent, error::ProbeError, family::Family, maps::set};

/// The minimum time between two events of a slot: a little more than a minute, so that a reader that accepts one event
/// per minute accepts each.
const REOPEN_INTERVAL: Duration = Duration::from_secs(61);

/// The name of the gates' map, in each object that has one.
pub(crate) const MAP: &str = "EVENT_GATE";

/// The size of the ring buffer in bytes: room for more than a thousand unread misses.
pub(crate) const EVENTS_BYTES: u32 = 1 << 16;

/// The gates of the watched slots, and the ring buffer of their events.
pub(crate) struct EventGate {
    map: Array<MapData, u64>,
    events: RingBuf<MapData>,
    schedule: Schedule,
}

impl EventGate {
    /// Creates gates without watched slots. `events` is the name of the ring buffer.
    pub(crate) fn new(family: &mut Family, events: &'static str) -> Result<Self, ProbeError> {
        Ok(Self { map: family.take(MAP)?, events: family.take(events)?, schedule: Schedule::default() })
    }

    /// Watches a slot: its next event is reported. No change if it is already watched.
    pub(crate) fn watch(&mut self, slot: u32) -> Result<(), MapAccessError> {
        if self.schedule.watch(slot) { set(&mut self.map, MAP, slot, &1) } else { Ok(()) }
    }

    /// Stops watching a slot.
    pub(crate) fn forget(&mut self, slot: u32) -> Result<(), MapAccessError> {
        if self.schedule.forget(slot) { set(&mut self.map, MAP, slot, &0) } else { Ok(()) }
    }

    /// Returns the events since the last call, and opens the gates that were closed long enough.
    pub(crate) fn events(
        &mut self,
        now: Instant,
        read: impl Fn(&[u8]) -> Option<ProbeEvent>,
    ) -> Result<Vec<ProbeEvent>, MapAccessError> {
        for slot in self.schedule.due(now) {
            set(&mut self.map, MAP, slot, &1)?;
            self.schedule.opened(slot);
        }
        let mut events = Vec::new();
        while let Some(item) = self.events.next() {
            let passed =
                |event: &ProbeEvent| event.slot.is_some_and(|slot| self.schedule.note_event(slot.0, now));
            events.extend(read(&item).filter(passed));
        }
        Ok(events)
    }
}

/// The watched slots, with the time at which the last event was read; `None` while the gate is open.
#[derive(Debug, Default)]
struct Schedule(BTreeMap<u32, Option<Instant>>);

impl Schedule {
    /// Returns `true` if the slot was not watched before.
    fn watch(&mut self, slot: u32) -> bool {
        let known = self.0.contains_key(&slot);
        self.0.entry(slot).or_default();
        !known
    }

    /// Returns `true` if the slot was watched.
    fn forget(&mut self, slot: u32) -> bool {
        self.0.remove(&slot).is_some()
    }

    /// Notes that an event of this slot was read and its gate is closed. Returns `false` if the slot is no longer
    /// watched, or if another CPU passed the gate in the same instant.
    fn note_event(&mut self, slot: u32, now: Instant) -> bool {
        self.0.get_mut(&slot).is_some_and(|closed| closed.replace(now).is_none())
    }

    fn due(&self, now: Instant) -> Vec<u32> {
        let is_due =
            |closed: &Option<Instant>| closed.is_some_and(|at| now.duration_since(at) >= REOPEN_INTERVAL);
        self.0.iter().filter(|(_, closed)| is_due(closed)).map(|(&slot, _)| slot).collect()
    }

    fn opened(&mut self, slot: u32) {
        if let Some(closed) = self.0.get_mut(&slot) {
            *closed = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_reopens_after_interval() {
        let start = Instant::now();
        let mut schedule = Schedule::default();
        assert!(schedule.watch(3));
        assert!(!schedule.watch(3), "its gate is open already");
        assert_eq!(schedule.due(start + 10 * REOPEN_INTERVAL), [0_u32; 0], "nothing happened yet");
        assert!(schedule.note_event(3, start));
        assert!(!schedule.note_event(3, start), "two CPUs in the same instant are one event");
        assert!(!schedule.watch(3), "a new guarantee does not open the gate");
        assert_eq!(schedule.due(start + REOPEN_INTERVAL.saturating_sub(Duration::from_nanos(1))), [0_u32; 0]);
        assert_eq!(schedule.due(start + REOPEN_INTERVAL), [3]);
        schedule.opened(3);
        assert_eq!(schedule.due(start + 2 * REOPEN_INTERVAL), [0_u32; 0]);
        assert!(schedule.forget(3));
        assert!(!schedule.forget(3));
        assert!(!schedule.note_event(3, start), "an event that was under way");
        assert_eq!(schedule.due(start + REOPEN_INTERVAL), [0_u32; 0]);
    }
}
