//! Rate at which CPUs of other nodes allocate memory of each node. Among equally good nodes, the strategy `native`
//! prefers those with a lower rate.
//!
//! # Terms
//! The *class* of a rate is the binary logarithm of its MiB per second; 0 below 64 MiB/s.
//!
//! # Algorithm
//! The rate is computed from two readings of the allocation probe. A higher class applies at once. A class is left
//! when the rate falls below half of the rate where the class begins, so that it does not oscillate.
//!
//! This module reads no map and no clock: the caller passes readings and times.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_topology::{Bytes, NodeId};

/// Interval between readings, which hold locks on the probes.
const READ_INTERVAL: Duration = Duration::from_secs(10);
/// Rate in MiB per second below which the class is 0.
const MIN_RATE_MIB: u64 = 64;

/// The class of each node.
#[derive(Debug, Default)]
pub(crate) struct LoadClasses {
    read: Option<Instant>,
    taken: BTreeMap<NodeId, Bytes>,
    classes: BTreeMap<NodeId, u64>,
}

impl LoadClasses {
    /// Returns whether another reading is due. The probe counts only during a part of each `period`, so readings are
    /// at least that far apart.
    pub(crate) fn is_due(&self, period: Duration, now: Instant) -> bool {
        self.read.is_none_or(|read| now.duration_since(read) >= READ_INTERVAL.max(period))
    }

    /// Stores the bytes that were allocated on each node so far, and updates the classes.
    pub(crate) fn set(&mut self, taken: BTreeMap<NodeId, Bytes>, now: Instant) {
        let before = std::mem::replace(&mut self.taken, taken);
        let Some(read) = self.read.replace(now) else { return };
        let millis = now.duration_since(read).as_millis().max(1);
        let class_of = |(node, taken): (&NodeId, &Bytes)| {
            let more = taken.0.saturating_sub(before.get(node).unwrap_or(taken).0);
            let rate = u128::from(more >> 20) * 1000 / millis;
            let was = self.classes.get(node).copied().unwrap_or(0);
            let class = class(u64::try_from(rate).unwrap_or(u64::MAX), was);
            (class > 0).then_some((*node, class))
        };
        self.classes = self.taken.iter().filter_map(class_of).collect();
    }

    /// Returns the nodes with a class above 0.
    pub(crate) fn classes(&self) -> &BTreeMap<NodeId, u64> {
        &self.classes
    }
}

/// Returns the class of a rate in MiB per second, given the previous class.
fn class(rate: u64, was: u64) -> u64 {
    let class = if rate < MIN_RATE_MIB { 0 } else { u64::from(rate.ilog2()) };
    let begins = |class: u64| 1_u64 << class;
    if class < was && rate >= begins(was) / 2 { was } else { class }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_ends_at_half_its_start() {
        for (was, rate, class) in [
            (0, 63, 0),
            (0, 64, 6),
            (6, 63, 6),
            (6, 32, 6),
            (6, 31, 0),
            (6, 127, 6),
            (6, 128, 7),
            (7, 64, 7),
            (7, 63, 0),
            (10, 511, 8),
            (10, 512, 10),
            (0, u64::MAX, 63),
            (63, u64::MAX, 63),
        ] {
            assert_eq!(super::class(rate, was), class, "{rate} MiB/s, before {was}");
        }
    }

    #[test]
    fn rate_covers_time_since_last_reading() {
        let (start, mut load) = (Instant::now(), LoadClasses::default());
        let mut at = |seconds: u64, mib: [u64; 2]| {
            let taken = [0, 1].map(NodeId).into_iter().zip(mib.map(Bytes::mib)).collect();
            load.set(taken, start + Duration::from_secs(seconds));
            load.classes().clone()
        };
        assert_eq!(at(0, [1 << 20, 0]), BTreeMap::new(), "what was before the first reading is no rate");
        assert_eq!(at(10, [1 << 20, 2000]), [(NodeId(1), 7)].into());
        assert_eq!(at(20, [(1 << 20) + 640, 2640]), [(NodeId(0), 6), (NodeId(1), 7)].into());
        assert_eq!(at(30, [0, 2640]), BTreeMap::new(), "a counter that starts anew");
        assert!(!load.is_due(Duration::ZERO, start + Duration::from_secs(39)));
        assert!(load.is_due(Duration::ZERO, start + Duration::from_secs(40)));
        assert!(!load.is_due(Duration::from_mins(1), start + Duration::from_secs(89)));
    }
}
