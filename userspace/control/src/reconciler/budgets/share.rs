//! Comparison of the memory of one workload on each of its nodes with its share there, and choice of the pages to move.
//!
//! This module reads neither a clock nor files: the caller passes readings and times.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use numaward_topology::{Bytes, NodeId};

use crate::page_worker::{ByNode, MIN_MOVE_SIZE};

/// Duration of an excess after which it is reported and moved.
const DWELL_TIME: Duration = Duration::from_secs(2);
/// Number of successive moves without effect after which moving pauses.
const MAX_ATTEMPTS: u32 = 3;
/// Length of that pause.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// Returns the tolerated excess over a share: one fiftieth, at least 4 MiB.
fn tolerance(share: Bytes) -> Bytes {
    Bytes((share.0 / 50).max(Bytes::mib(4).0))
}

/// A workload with shares of several nodes.
#[derive(Clone, Debug, Default)]
pub(super) struct MemoryShares {
    /// Guaranteed memory of each node.
    placed: ByNode,
    /// Memory on each node at the last reading.
    resident: ByNode,
    excesses: BTreeMap<NodeId, Excess>,
}

/// State of a node with more memory of the workload than its share.
#[derive(Clone, Copy, Debug)]
struct Excess {
    since: Instant,
    is_reported: bool,
    /// Number of successive moves without effect.
    attempts: u32,
    /// End of the pause after [`MAX_ATTEMPTS`].
    not_before: Option<Instant>,
}

/// A change of an excess, to be reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExcessChange {
    /// The excess has lasted for the dwell time.
    Begins(NodeId, Bytes),
    Ends(NodeId),
    /// The excess cannot be moved to another node.
    Unmet(NodeId, Bytes),
}

/// An amount of memory to move between two nodes of the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShareMove {
    pub(super) from: NodeId,
    pub(super) to: NodeId,
    pub(super) bytes: Bytes,
}

impl MemoryShares {
    /// Replaces the shares. Excesses on nodes that still have a share are kept.
    pub(super) fn set(&mut self, placed: ByNode) {
        self.excesses.retain(|node, _| placed.contains_key(node));
        self.placed = placed;
    }

    /// Returns the amount above the share of a node.
    fn excess(&self, node: NodeId) -> Bytes {
        let of = |map: &ByNode| map.get(&node).map_or(0, |bytes| bytes.0);
        Bytes(of(&self.resident).saturating_sub(of(&self.placed)))
    }

    /// Returns the amount by which a node is below its share.
    fn free_share(&self, node: NodeId) -> Bytes {
        let of = |map: &ByNode| map.get(&node).map_or(0, |bytes| bytes.0);
        Bytes(of(&self.placed).saturating_sub(of(&self.resident)))
    }

    /// Returns true if a node was above its share at the last reading, even if the dwell time has not passed.
    pub(super) fn has_excess(&self) -> bool {
        !self.excesses.is_empty()
    }

    /// Records a reading and returns the changes to report.
    pub(super) fn record_reading(&mut self, resident: ByNode, now: Instant) -> Vec<ExcessChange> {
        self.resident = resident;
        let mut changes = Vec::new();
        let nodes: Vec<(NodeId, Bytes)> = self.placed.iter().map(|(node, share)| (*node, *share)).collect();
        for (node, share) in nodes {
            let (excess, tolerance) = (self.excess(node), tolerance(share));
            match self.excesses.get_mut(&node) {
                None if excess > tolerance => {
                    let new = Excess { since: now, is_reported: false, attempts: 0, not_before: None };
                    self.excesses.insert(node, new);
                }
                Some(known) if excess.0 <= tolerance.0 / 2 => {
                    if known.is_reported {
                        changes.push(ExcessChange::Ends(node));
                    }
                    self.excesses.remove(&node);
                }
                Some(known) if !known.is_reported && now.duration_since(known.since) >= DWELL_TIME => {
                    known.is_reported = true;
                    changes.push(ExcessChange::Begins(node, excess));
                }
                _ => {}
            }
        }
        changes
    }

    /// Returns the next move: from the node with the largest excess to the nearest node below its share. If there is no such
    /// node, moving pauses for [`RETRY_INTERVAL`], and the change is returned the first time.
    pub(super) fn next_move(
        &mut self,
        distance: impl Fn(NodeId, NodeId) -> u32,
        now: Instant,
    ) -> (Option<ShareMove>, Option<ExcessChange>) {
        let due = self.excesses.iter().filter(|(_, excess)| {
            excess.is_reported && excess.not_before.is_none_or(|not_before| now >= not_before)
        });
        let due: BTreeSet<NodeId> = due.map(|(node, _)| *node).collect();
        let Some(from) = due.into_iter().max_by_key(|node| (self.excess(*node), std::cmp::Reverse(*node)))
        else {
            return (None, None);
        };
        let excess = self.excess(from);
        let targets = self.placed.keys().filter(|to| **to != from && self.free_share(**to) >= MIN_MOVE_SIZE);
        let to =
            targets.min_by_key(|to| (distance(from, **to), std::cmp::Reverse(self.free_share(**to)), **to));
        match to.copied() {
            Some(to) => (Some(ShareMove { from, to, bytes: excess.min(self.free_share(to)) }), None),
            None => (None, self.pause(from, now)),
        }
    }

    /// Records the number of bytes that a move has moved. Returns the change if moving pauses for the first time.
    pub(super) fn record_move(&mut self, from: NodeId, bytes: Bytes, now: Instant) -> Option<ExcessChange> {
        let excess = self.excesses.get_mut(&from)?;
        if bytes >= MIN_MOVE_SIZE {
            excess.attempts = 0;
            return None;
        }
        excess.attempts += 1;
        if excess.attempts < MAX_ATTEMPTS { None } else { self.pause(from, now) }
    }

    /// Starts the pause of a node.
    fn pause(&mut self, node: NodeId, now: Instant) -> Option<ExcessChange> {
        let bytes = self.excess(node);
        let excess = self.excesses.get_mut(&node)?;
        let is_new = excess.not_before.is_none();
        (excess.attempts, excess.not_before) = (0, Some(now + RETRY_INTERVAL));
        is_new.then_some(ExcessChange::Unmet(node, bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn by_node(mib: &[u64]) -> ByNode {
        (0..).map(NodeId).zip(mib.iter().map(|mib| Bytes(mib * MIB))).collect()
    }

    fn new_shares(mib: &[u64]) -> MemoryShares {
        let mut shares = MemoryShares::default();
        shares.set(by_node(mib));
        shares
    }

    fn equal_distance(_: NodeId, _: NodeId) -> u32 {
        20
    }

    #[test]
    fn excess_has_dwell_time_and_hysteresis() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut shares = new_shares(&[200, 300]);
        assert_eq!(shares.record_reading(by_node(&[203, 100]), at(0)), [], "within 2 % and 4 MiB");
        assert!(!shares.has_excess());
        assert_eq!(shares.record_reading(by_node(&[300, 100]), at(1)), []);
        assert_eq!(shares.next_move(equal_distance, at(1)), (None, None), "the dwell time has not passed");
        assert_eq!(
            shares.record_reading(by_node(&[300, 100]), at(3)),
            [ExcessChange::Begins(NodeId(0), Bytes::mib(100))]
        );
        let share_move = ShareMove { from: NodeId(0), to: NodeId(1), bytes: Bytes::mib(100) };
        assert_eq!(shares.next_move(equal_distance, at(3)), (Some(share_move), None));
        assert_eq!(shares.record_move(NodeId(0), Bytes::mib(97), at(4)), None);
        assert_eq!(
            shares.record_reading(by_node(&[203, 197]), at(4)),
            [],
            "the excess ends below half of the tolerance"
        );
        let share_move = ShareMove { bytes: Bytes::mib(3), ..share_move };
        assert_eq!(shares.next_move(equal_distance, at(4)), (Some(share_move), None));
        assert_eq!(shares.record_reading(by_node(&[202, 198]), at(5)), [ExcessChange::Ends(NodeId(0))]);
        assert!(!shares.has_excess());
        assert_eq!(shares.record_reading(by_node(&[204, 196]), at(6)), [], "within the tolerance");
    }

    #[test]
    fn ignores_short_excess() {
        let start = Instant::now();
        let mut shares = new_shares(&[200, 300]);
        assert_eq!(shares.record_reading(by_node(&[300, 100]), start), []);
        assert_eq!(shares.record_reading(by_node(&[200, 100]), start + Duration::from_secs(1)), []);
        assert_eq!(
            shares.record_reading(by_node(&[300, 100]), start + Duration::from_secs(2)),
            [],
            "the dwell time starts again"
        );
    }

    #[test]
    fn moves_largest_excess_to_nearest_node() {
        let start = Instant::now();
        let mut shares = new_shares(&[100, 100, 100, 100]);
        let resident = by_node(&[120, 150, 40, 20]);
        drop(shares.record_reading(resident.clone(), start));
        assert_eq!(shares.record_reading(resident, start + DWELL_TIME).len(), 2);
        let distance = |a: NodeId, b: NodeId| if a.0 == 1 && b.0 == 2 { 12 } else { 20 };
        let share_move = ShareMove { from: NodeId(1), to: NodeId(2), bytes: Bytes::mib(50) };
        assert_eq!(shares.next_move(distance, start + DWELL_TIME), (Some(share_move), None));
        let share_move = ShareMove { to: NodeId(3), ..share_move };
        assert_eq!(
            shares.next_move(equal_distance, start + DWELL_TIME),
            (Some(share_move), None),
            "the node with the largest free share"
        );
    }

    #[test]
    fn unmet_excess_is_retried_after_pause() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut shares = new_shares(&[100, 100]);
        for seconds in [0, 2] {
            drop(shares.record_reading(by_node(&[150, 100]), at(seconds)));
        }
        let unmet = ExcessChange::Unmet(NodeId(0), Bytes::mib(50));
        assert_eq!(
            shares.next_move(equal_distance, at(2)),
            (None, Some(unmet)),
            "the other node has its share"
        );
        assert_eq!(shares.next_move(equal_distance, at(3)), (None, None));
        assert_eq!(shares.next_move(equal_distance, at(33)), (None, None), "reported already");

        let mut shares = new_shares(&[100, 100]);
        for seconds in [0, 2] {
            drop(shares.record_reading(by_node(&[150, 40]), at(seconds)));
        }
        for _ in 1..MAX_ATTEMPTS {
            assert!(shares.next_move(equal_distance, at(2)).0.is_some());
            assert_eq!(shares.record_move(NodeId(0), Bytes(0), at(2)), None);
        }
        assert_eq!(shares.record_move(NodeId(0), Bytes(4096), at(2)), Some(unmet));
        assert_eq!(shares.next_move(equal_distance, at(3)), (None, None));
        assert!(shares.next_move(equal_distance, at(40)).0.is_some());
        shares.set(by_node(&[0, 200]));
        assert!(shares.has_excess(), "a new share of the same nodes");
        shares.set([(NodeId(1), Bytes::mib(200))].into());
        assert!(!shares.has_excess(), "the node has no share any more");
    }
}
