//! Assignment of counter slots if there are more workloads than slots.
//!
//! Workloads with a guarantee have priority, because their misses matter most. The busiest workloads follow, by the
//! CPU time of their cgroups: a workload that does not run allocates nothing. The remaining workloads are counted
//! together under the name `other`.
//!
//! While a workload waits for a slot, the CPU times of all cgroups are read once per [`READ_INTERVAL`], and a few slots are
//! reassigned. A slot is only taken from a workload that is far less busy, so that two similar workloads do not
//! alternate. A released slot stays unused for a second before it is assigned again.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_cgroup::CgroupId;

/// Interval at which CPU times are read while a workload waits for a slot.
pub(crate) const READ_INTERVAL: Duration = Duration::from_mins(1);

/// Least ratio of the CPU times of the new and the previous owner of a slot.
const MIN_BUSY_RATIO: u32 = 4;

/// CPU time per interval below which a workload counts as idle.
const MAX_IDLE_TIME: Duration = Duration::from_millis(10);

/// Most slots that are reassigned per interval.
const MAX_EXCHANGES: usize = 16;

/// CPU times from which slots are assigned.
#[derive(Debug, Default)]
pub(crate) struct SlotPolicy {
    pub(crate) last_read: Option<Instant>,
    /// CPU time of each cgroup at the last reading, and (`busy`) its growth since the reading before.
    used: BTreeMap<CgroupId, Duration>,
    busy: BTreeMap<CgroupId, Duration>,
}

/// A workload that has a slot or waits for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotCandidate {
    pub(crate) id: CgroupId,
    pub(crate) has_slot: bool,
    pub(crate) has_guarantee: bool,
    /// CPU time between the last two readings; `None` if it is not known yet.
    pub(crate) busy: Option<Duration>,
}

/// Returns pairs of a slot's owner and its successor: the least busy owner with the busiest waiting workload first.
pub(crate) fn exchanges(candidates: &[SlotCandidate]) -> Vec<(CgroupId, CgroupId)> {
    let known = |has_slot| {
        let mut found: Vec<(Duration, CgroupId)> = candidates
            .iter()
            .filter(|of| of.has_slot == has_slot && !(has_slot && of.has_guarantee))
            .filter_map(|of| Some((of.busy?, of.id)))
            .collect();
        found.sort_unstable();
        found
    };
    let (givers, takers) = (known(true), known(false));
    let pairs = givers.into_iter().zip(takers.into_iter().rev()).take(MAX_EXCHANGES);
    pairs
        .take_while(|((gives, _), (takes, _))| {
            *takes > MAX_IDLE_TIME && *takes >= gives.saturating_mul(MIN_BUSY_RATIO)
        })
        .map(|((_, giver), (_, taker))| (giver, taker))
        .collect()
}

impl SlotPolicy {
    /// Stores a reading of the CPU times, and computes their growth.
    pub(crate) fn record(&mut self, used: BTreeMap<CgroupId, Duration>) {
        let grown = used.iter().filter_map(|(id, now)| Some((*id, now.checked_sub(*self.used.get(id)?)?)));
        self.busy = grown.collect();
        self.used = used;
    }

    /// Returns the CPU time of a cgroup between the last two readings; `None` if it is not known.
    pub(crate) fn busy(&self, id: CgroupId) -> Option<Duration> {
        self.busy.get(&id).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: u64, has_slot: bool, millis: u64) -> SlotCandidate {
        let busy = Some(Duration::from_millis(millis));
        SlotCandidate { id: CgroupId(id), has_slot, has_guarantee: false, busy }
    }

    #[test]
    fn busiest_workloads_take_slots() {
        let (slot, waits) = (true, false);
        let pairs = |candidates: &[SlotCandidate]| {
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
        let guaranteed = SlotCandidate { has_guarantee: true, ..candidate(1, slot, 0) };
        assert_eq!(
            pairs(&[guaranteed, candidate(2, waits, 1000)]),
            [],
            "a workload with a guarantee keeps its slot"
        );
        let unknown = SlotCandidate { busy: None, ..candidate(1, slot, 0) };
        assert_eq!(pairs(&[unknown, candidate(2, waits, 1000)]), [], "nobody knows what it does");
        let many: Vec<_> =
            (0..100).map(|id| candidate(id, id < 50, if id < 50 { 0 } else { 1000 })).collect();
        assert_eq!(exchanges(&many).len(), MAX_EXCHANGES);
    }

    #[test]
    fn busy_time_is_growth_between_readings() {
        let used = |times: &[(u64, u64)]| {
            times.iter().map(|&(id, seconds)| (CgroupId(id), Duration::from_secs(seconds))).collect()
        };
        let mut policy = SlotPolicy::default();
        let mut look = |times: &[(u64, u64)]| {
            policy.record(used(times));
            policy.busy.clone()
        };
        assert_eq!(look(&[(1, 10), (2, 5)]), used(&[]));
        assert_eq!(look(&[(1, 13), (3, 7)]), used(&[(1, 3)]), "2 is gone, 3 is new");
        assert_eq!(look(&[(1, 2), (3, 9)]), used(&[(3, 2)]), "1 went back");
    }
}
