//! Events of which the first one of each slot is reported, and then none for a while: see `ebpf/src/event_gate.rs`.
//!
//! A slot's gate is opened when the slot begins to be of interest, closed by the event itself, and opened again [`PAUSE`]
//! after that event was read.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use aya::maps::{Array, MapData, RingBuf};

use crate::{MapAccessError, ProbeEvent, error::Refusal, family::Family, maps::set};

/// Time from one event of a slot to the next: a minute, and some more, so that a reader that allows one a minute takes
/// it.
const PAUSE: Duration = Duration::from_secs(61);

/// The gates' map, in each object that has one.
pub(crate) const MAP: &str = "EVENT_GATE";

/// Which slots are of interest, and since when the gate of one is closed.
pub(crate) struct EventGate {
    map: Array<MapData, u64>,
    events: RingBuf<MapData>,
    schedule: Schedule,
}

impl EventGate {
    /// No slot is of interest yet. `events` is the name of the ring buffer.
    pub(crate) fn new(family: &mut Family, events: &'static str) -> Result<Self, Refusal> {
        Ok(Self { map: family.take(MAP)?, events: family.take(events)?, schedule: Schedule::default() })
    }

    /// The first event of this slot is to be reported, from now on. One that is of interest already stays as it is.
    pub(crate) fn watch(&mut self, slot: u32) -> Result<(), MapAccessError> {
        if self.schedule.watch(slot) { set(&mut self.map, MAP, slot, &1) } else { Ok(()) }
    }

    /// No event of this slot is to be reported.
    pub(crate) fn forget(&mut self, slot: u32) -> Result<(), MapAccessError> {
        if self.schedule.forget(slot) { set(&mut self.map, MAP, slot, &0) } else { Ok(()) }
    }

    /// What was reported since the last call. Opens the gates that were closed for long enough.
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
                |event: &ProbeEvent| event.slot.is_some_and(|slot| self.schedule.passed(slot.0, now));
            events.extend(read(&item).filter(passed));
        }
        Ok(events)
    }
}

/// By slot of interest: when its last event was read; `None` while its gate is open.
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

    /// An event of this slot was read, and its gate is closed; `false` if it is of no interest any more, or another CPU
    /// passed the gate in the same instant.
    fn passed(&mut self, slot: u32, now: Instant) -> bool {
        self.0.get_mut(&slot).is_some_and(|closed| closed.replace(now).is_none())
    }

    fn due(&self, now: Instant) -> Vec<u32> {
        let is_due = |closed: &Option<Instant>| closed.is_some_and(|at| now.duration_since(at) >= PAUSE);
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
    fn a_gate_opens_again_after_a_pause() {
        let start = Instant::now();
        let mut schedule = Schedule::default();
        assert!(schedule.watch(3));
        assert!(!schedule.watch(3), "its gate is open already");
        assert_eq!(schedule.due(start + 10 * PAUSE), [0_u32; 0], "nothing happened yet");
        assert!(schedule.passed(3, start));
        assert!(!schedule.passed(3, start), "two CPUs in the same instant are one event");
        assert!(!schedule.watch(3), "a new promise does not open the gate");
        assert_eq!(schedule.due(start + PAUSE.saturating_sub(Duration::from_nanos(1))), [0_u32; 0]);
        assert_eq!(schedule.due(start + PAUSE), [3]);
        schedule.opened(3);
        assert_eq!(schedule.due(start + 2 * PAUSE), [0_u32; 0]);
        assert!(schedule.forget(3));
        assert!(!schedule.forget(3));
        assert!(!schedule.passed(3, start), "an event that was under way");
        assert_eq!(schedule.due(start + PAUSE), [0_u32; 0]);
    }
}
