//! What a workload did between two readings, and whether a home was of use to it.

use std::collections::BTreeMap;

use numaward_topology::{Bytes, NodeId};

use crate::{auto_placement_worker::Reading, page_worker::ByNode};

/// So many accesses say something.
pub(super) const ENOUGH: u64 = 200;

/// What a workload did between two readings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Measured {
    /// Accesses that were counted.
    pub(super) accesses: u64,
    /// How many of them were remote, in thousandths.
    pub(super) remote: u32,
    /// By the node of the memory, as far as that is known.
    pub(super) memory: BTreeMap<NodeId, u64>,
    /// CPU time in thousandths of one CPU.
    pub(super) cpu: u64,
    /// Its user memory in the end.
    pub(super) resident: ByNode,
}

impl Measured {
    /// Between these; `None` where they cannot be compared, as the counters began anew or others count.
    pub(super) fn between(start: &Reading, end: &Reading) -> Option<Self> {
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
            accesses,
            remote: part(remote, accesses),
            memory: memory.collect(),
            cpu: u64::try_from(cpu).unwrap_or(u64::MAX),
            resident: end.resident.clone(),
        })
    }

    /// Whether so much was counted that the share of remote accesses says something.
    pub(super) fn is_enough(&self) -> bool {
        self.accesses >= ENOUGH
    }

    /// All its user memory.
    pub(super) fn total(&self) -> Bytes {
        Bytes(self.resident.values().fold(0, |sum, bytes| sum.saturating_add(bytes.0)))
    }

    /// How much of its memory is on a node.
    pub(super) fn on(&self, node: NodeId) -> Bytes {
        self.resident.get(&node).copied().unwrap_or_default()
    }

    /// How well a node suits: the share of the memory that is there, and of the accesses that go there; 2000 at most.
    pub(super) fn score(&self, node: NodeId) -> u32 {
        let all = self.memory.values().fold(0_u64, |sum, count| sum.saturating_add(*count));
        let accessed = self.memory.get(&node).copied().unwrap_or(0);
        part(self.on(node).0, self.total().0).saturating_add(part(accessed, all))
    }
}

/// A part in thousandths of the whole; 0 of nothing.
fn part(part: u64, whole: u64) -> u32 {
    let share = (u128::from(part) * 1000).checked_div(u128::from(whole)).unwrap_or(0);
    u32::try_from(share.min(1000)).unwrap_or(1000)
}

/// Whether the share of remote accesses has fallen by so many percent of what it was.
pub(super) fn has_fallen(before: u32, now: u32, percent: u32) -> bool {
    u64::from(now) * 100 <= u64::from(before) * u64::from(100 - percent.min(100))
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::{Duration, Instant};

    use numaward_cgroup::CgroupId;
    use numaward_model::accesses::{Accesses, CountingMethod};

    use super::*;

    /// What a cgroup has used: accesses to local and to remote memory, all of it on node 1, memory in MiB, CPU seconds.
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
    fn two_readings_give_the_share_of_remote_accesses_and_the_cpus_in_use() {
        let start = Instant::now();
        let before = reading("/a", start, [1000, 1000], [9, 9], 100);
        let after = reading("/a", start + Duration::from_secs(10), [1100, 1300], [30, 10], 115);
        let found = Measured::between(&before, &after).unwrap();
        assert_eq!((found.accesses, found.remote, found.cpu), (400, 750, 1500));
        assert_eq!(
            (found.total(), found.on(NodeId(1)), found.on(NodeId(7))),
            (Bytes::mib(40), Bytes::mib(10), Bytes(0))
        );
        assert_eq!([0, 1].map(|node| found.score(NodeId(node))), [750, 1250]);
        assert!(found.is_enough() && !Measured { accesses: ENOUGH - 1, ..found }.is_enough());
        let nothing = Measured::between(&after, &after).unwrap();
        assert_eq!((nothing.accesses, nothing.remote, nothing.cpu), (0, 0, 0));
    }

    #[test]
    fn what_began_anew_or_was_counted_otherwise_is_not_compared() {
        let before = reading("/a", Instant::now(), [5, 5], [1, 1], 1);
        let mut less = before.clone();
        less.accesses.remote = 4;
        assert_eq!(Measured::between(&before, &less), None);
        let mut other = before.clone();
        other.accesses.by = CountingMethod::Hardware;
        assert_eq!(Measured::between(&before, &other), None);
        let mut new = before.clone();
        new.id = CgroupId(2);
        assert_eq!(Measured::between(&before, &new), None);
    }

    #[test]
    fn a_share_has_to_fall_by_the_percent_that_are_configured() {
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
