//! Who gets counters of its own where there are more workloads than slots.
//!
//! Workloads with a promise come first, for theirs are the misses that matter; then the busiest, by the CPU time of
//! their cgroups: who does not run allocates nothing. The others are counted together as `other`.
//!
//! While somebody waits, all cgroups' CPU times are read once in [`LOOK`], and a few slots change hands: only from one
//! that is far less busy, so that two that are alike do not take turns. A slot that is given back rests for a second
//! before it counts for another.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_cgroup::{CgroupId, read::cpu_usage};

use super::{Observer, State};

/// How often it is looked who is busy, while somebody waits.
const LOOK: Duration = Duration::from_mins(1);

/// Who takes a slot was at least so many times as busy.
const FACTOR: u32 = 4;

/// Less CPU time than this since the last look is none.
const IDLE: Duration = Duration::from_millis(10);

/// Slots that change hands at one look, at most.
const AT_ONCE: usize = 16;

/// What is known of who is busy.
#[derive(Debug, Default)]
pub(super) struct Interest {
    looked: Option<Instant>,
    /// The CPU time of each cgroup at the last look, and by how much it grew since the one before.
    used: BTreeMap<CgroupId, Duration>,
    busy: BTreeMap<CgroupId, Duration>,
}

/// A workload that has a slot, or wants one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidate {
    id: CgroupId,
    has_slot: bool,
    is_promised: bool,
    /// CPU time since the last look; `None` where that is not known yet.
    busy: Option<Duration>,
}

/// Who gives a slot to whom: the least busy to the busiest of those that wait.
fn exchanges(candidates: &[Candidate]) -> Vec<(CgroupId, CgroupId)> {
    let known = |has_slot| {
        let mut found: Vec<(Duration, CgroupId)> = candidates
            .iter()
            .filter(|of| of.has_slot == has_slot && !(has_slot && of.is_promised))
            .filter_map(|of| Some((of.busy?, of.id)))
            .collect();
        found.sort_unstable();
        found
    };
    let (givers, takers) = (known(true), known(false));
    let pairs = givers.into_iter().zip(takers.into_iter().rev()).take(AT_ONCE);
    pairs
        .take_while(|((gives, _), (takes, _))| *takes > IDLE && *takes >= gives.saturating_mul(FACTOR))
        .map(|((_, giver), (_, taker))| (giver, taker))
        .collect()
}

impl Interest {
    /// Looks who was how busy since the last look.
    fn look(&mut self, used: BTreeMap<CgroupId, Duration>) {
        let grown = used.iter().filter_map(|(id, now)| Some((*id, now.checked_sub(*self.used.get(id)?)?)));
        self.busy = grown.collect();
        self.used = used;
    }

    /// How busy a cgroup was between the last two looks; `None` where that is not known.
    fn busy(&self, id: CgroupId) -> Option<Duration> {
        self.busy.get(&id).copied()
    }
}

impl State {
    /// Takes slots from workloads without a promise for those with one that wait. Says whether some are on their way.
    pub(super) fn make_room(&mut self) -> bool {
        let waiting = self.table.waiting().filter(|id| self.promises.nodes_of(*id).is_some()).count();
        let mut coming = self.probes.cooling_slots();
        while coming < waiting {
            // Whoever was least busy when it was looked last.
            let held = self.table.members().filter(|(_, member)| member.slot.is_some());
            let unpromised = held.map(|(id, _)| id).filter(|id| self.promises.nodes_of(*id).is_none());
            let Some(id) = unpromised.min_by_key(|id| self.interest.busy(*id)) else { break };
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
                tracing::warn!(cgroup = id.0, error = super::chain(&error), "its slot cannot be taken back");
            }
        }
    }
}

impl Observer {
    /// Looks who is busy, if it is time and somebody waits for a slot, and lets the busiest have some.
    pub(super) fn follow_interest(&self, now: Instant) {
        let targets: Vec<_> = {
            let mut state = self.lock();
            if state.table.waiting().next().is_none() || !state.needs_slots() {
                // What was seen is of no use later.
                state.interest = Interest::default();
                return;
            }
            if state.interest.looked.is_some_and(|looked| now.duration_since(looked) < LOOK) {
                return;
            }
            state.interest.looked = Some(now);
            let Some(hierarchy) = &state.hierarchy else { return };
            state.table.members().map(|(id, member)| (id, hierarchy.dir(&member.path))).collect()
        };
        // A cgroup that vanishes meanwhile is not busy.
        let used = targets.into_iter().filter_map(|(id, dir)| Some((id, cpu_usage(&dir).ok()?))).collect();
        let mut state = self.lock();
        state.interest.look(used);
        let waiting: std::collections::BTreeSet<CgroupId> = state.table.waiting().collect();
        let candidates: Vec<Candidate> = state
            .table
            .members()
            .filter(|(id, member)| member.slot.is_some() || waiting.contains(id))
            .map(|(id, member)| Candidate {
                id,
                has_slot: member.slot.is_some(),
                is_promised: state.promises.nodes_of(id).is_some(),
                busy: state.interest.busy(id),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: u64, has_slot: bool, millis: u64) -> Candidate {
        let busy = Some(Duration::from_millis(millis));
        Candidate { id: CgroupId(id), has_slot, is_promised: false, busy }
    }

    #[test]
    fn the_busiest_take_slots_from_those_that_are_far_less_busy() {
        let (slot, waits) = (true, false);
        let pairs = |candidates: &[Candidate]| {
            exchanges(candidates).into_iter().map(|(giver, taker)| (giver.0, taker.0)).collect::<Vec<_>>()
        };
        let busy = [
            candidate(1, slot, 0),
            candidate(2, slot, 100),
            candidate(3, slot, 50),
            candidate(4, waits, 300),
            candidate(5, waits, 1000),
            candidate(6, waits, 20),
        ];
        assert_eq!(pairs(&busy), [(1, 5), (3, 4)]);
        assert_eq!(pairs(&[candidate(1, slot, 100), candidate(2, waits, 399)]), []);
        assert_eq!(pairs(&[candidate(1, slot, 0), candidate(2, waits, 10)]), [], "it hardly runs");
        let promised = Candidate { is_promised: true, ..candidate(1, slot, 0) };
        assert_eq!(pairs(&[promised, candidate(2, waits, 1000)]), [], "who is promised something keeps it");
        let unknown = Candidate { busy: None, ..candidate(1, slot, 0) };
        assert_eq!(pairs(&[unknown, candidate(2, waits, 1000)]), [], "nobody knows what it does");
        let many: Vec<_> =
            (0..100).map(|id| candidate(id, id < 50, if id < 50 { 0 } else { 1000 })).collect();
        assert_eq!(exchanges(&many).len(), AT_ONCE);
    }

    #[test]
    fn it_counts_what_was_done_since_the_last_look() {
        let used = |times: &[(u64, u64)]| {
            times.iter().map(|&(id, seconds)| (CgroupId(id), Duration::from_secs(seconds))).collect()
        };
        let mut interest = Interest::default();
        let mut look = |times: &[(u64, u64)]| {
            interest.look(used(times));
            interest.busy.clone()
        };
        assert_eq!(look(&[(1, 10), (2, 5)]), used(&[]));
        assert_eq!(look(&[(1, 13), (3, 7)]), used(&[(1, 3)]), "2 is gone, 3 is new");
        assert_eq!(look(&[(1, 2), (3, 9)]), used(&[(3, 2)]), "1 went back");
    }
}
