//! Usage of a workload between two readings, and the comparison of its remote accesses.

use std::collections::BTreeMap;

use numaward_model::accesses::CountingMethod;
use numaward_topology::{Bytes, NodeId};

use crate::{auto_placement_worker::Reading, page_worker::ByNode};

/// Minimum number of accesses for a meaningful share of remote accesses.
pub(super) const MIN_ACCESSES: u64 = 200;

/// Usage of a workload between two readings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WindowUsage {
    /// Method by which the accesses were counted.
    pub(super) by: CountingMethod,
    /// Number of counted accesses.
    pub(super) accesses: u64,
    /// Share of remote accesses, in thousandths.
    pub(super) remote: u32,
    /// Accesses by the node of the memory, as far as that is known.
    pub(super) memory: BTreeMap<NodeId, u64>,
    /// CPU use in thousandths of one CPU.
    pub(super) cpu: u64,
    /// User memory at the second reading.
    pub(super) resident: ByNode,
}

impl WindowUsage {
    /// Returns the usage; `None` if the readings cannot be compared, because the cgroup or the counting method changed or the
    /// counters were reset.
    pub(super) fn from_readings(start: &Reading, end: &Reading) -> Option<Self> {
        let (before, after) = (&start.accesses, &end.accesses);
        if start.id != end.id || before.by != after.by {
            return None;
        }
        let local = after.local.checked_sub(before.local)?;
        let remote = after.remote.checked_sub(before.remote)?;
        let memory = after.memory.iter().map(|(node, count)| {
            let so_far = before.memory.get(node).copied().unwrap_or(0);
            (*node, count.saturating_sub(so_far))
        });
        let accesses = local.saturating_add(remote);
        let millis = end.at.saturating_duration_since(start.at).as_millis().max(1);
        let cpu = end.cpu.saturating_sub(start.cpu).as_millis() * 1000 / millis;
        Some(Self {
            by: after.by,
            accesses,
            remote: permille(remote, accesses),
            memory: memory.collect(),
            cpu: u64::try_from(cpu).unwrap_or(u64::MAX),
            resident: end.resident.clone(),
        })
    }

    /// Returns true if enough accesses were counted for a meaningful share of remote accesses.
    pub(super) fn has_enough_accesses(&self) -> bool {
        self.accesses >= MIN_ACCESSES
    }

    /// Returns the user memory on all nodes.
    pub(super) fn total(&self) -> Bytes {
        Bytes(self.resident.values().fold(0, |sum, bytes| sum.saturating_add(bytes.0)))
    }

    /// Returns the user memory on a node.
    pub(super) fn on(&self, node: NodeId) -> Bytes {
        self.resident.get(&node).copied().unwrap_or_default()
    }

    /// Returns the score of a node, at most 2000: the shares of memory and of accesses on the node, both in thousandths.
    pub(super) fn score(&self, node: NodeId) -> u32 {
        let all = self.memory.values().fold(0_u64, |sum, count| sum.saturating_add(*count));
        let accessed = self.memory.get(&node).copied().unwrap_or(0);
        permille(self.on(node).0, self.total().0).saturating_add(permille(accessed, all))
    }
}

/// Returns a part in thousandths of the whole; 0 if the whole is 0.
fn permille(part: u64, whole: u64) -> u32 {
    let share = (u128::from(part) * 1000).checked_div(u128::from(whole)).unwrap_or(0);
    u32::try_from(share.min(1000)).unwrap_or(1000)
}

/// Returns true if the share of remote accesses has fallen by at least the given percentage of its previous value.
pub(super) fn has_fallen(before: u32, now: u32, percent: u32) -> bool {
    u64::from(now) * 100 <= u64::from(before) * u64::from(100 - percent.min(100))
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::{Duration, Instant};

    use numaward_cgroup::CgroupId;
    use numaward_model::accesses::Accesses;

    use super::*;

    /// Returns a reading of a cgroup: local and remote accesses (all to memory of node 1), memory in MiB by node, CPU seconds.
    pub(in super::super) fn reading(
        path: &str,
        at: Instant,
        [local, remote]: [u64; 2],
        mib: [u64; 2],
        cpu: u64,
    ) -> Reading {
        let memory = [(NodeId(1), local + remote)].into();
        Reading {
            cgroup: path.parse().unwrap(),
            id: CgroupId(1),
            at,
            accesses: Accesses { by: CountingMethod::Sampling, local, remote, memory },
            resident: [0, 1].map(NodeId).into_iter().zip(mib.map(Bytes::mib)).collect(),
            cpu: Duration::from_secs(cpu),
        }
    }

    #[test]
    fn usage_is_difference_of_readings() {
        let start = Instant::now();
        let before = reading("/a", start, [1000, 1000], [9, 9], 100);
        let after = reading("/a", start + Duration::from_secs(10), [1100, 1300], [30, 10], 115);
        let found = WindowUsage::from_readings(&before, &after).unwrap();
        assert_eq!((found.accesses, found.remote, found.cpu), (400, 750, 1500));
        assert_eq!(
            (found.total(), found.on(NodeId(1)), found.on(NodeId(7))),
            (Bytes::mib(40), Bytes::mib(10), Bytes(0))
        );
        assert_eq!([0, 1].map(|node| found.score(NodeId(node))), [750, 1250]);
        assert!(
            found.has_enough_accesses()
                && !WindowUsage { accesses: MIN_ACCESSES - 1, ..found }.has_enough_accesses()
        );
        let nothing = WindowUsage::from_readings(&after, &after).unwrap();
        assert_eq!((nothing.accesses, nothing.remote, nothing.cpu), (0, 0, 0));
    }

    #[test]
    fn incomparable_readings_give_no_usage() {
        let before = reading("/a", Instant::now(), [5, 5], [1, 1], 1);
        let mut less = before.clone();
        less.accesses.remote = 4;
        assert_eq!(WindowUsage::from_readings(&before, &less), None);
        let mut other = before.clone();
        other.accesses.by = CountingMethod::Hardware;
        assert_eq!(WindowUsage::from_readings(&before, &other), None);
        let mut new = before.clone();
        new.id = CgroupId(2);
        assert_eq!(WindowUsage::from_readings(&before, &new), None);
    }

    #[test]
    fn share_has_to_fall_by_percentage() {
        for (before, now, percent, expected) in [
            (500, 350, 30, true),
            (500, 351, 30, false),
            (500, 500, 1, false),
            (500, 0, 100, true),
            (500, 1, 100, false),
        ] {
            assert_eq!(has_fallen(before, now, percent), expected, "{before} {now} {percent}");
        }
    }
}
