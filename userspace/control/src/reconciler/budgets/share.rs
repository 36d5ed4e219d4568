//! What one workload has on each of its nodes against its share there: when that begins to matter, and what to move.
//!
//! No clock and no file here: the caller passes readings and times.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use numaward_topology::{Bytes, NodeId};

use crate::page_worker::{ByNode, MIN_MOVE_SIZE};

/// For how long more has to be on a node until that matters.
const DWELL: Duration = Duration::from_secs(2);
/// How many moves that came to nothing are tried one after the other.
const TRIES: u32 = 3;
/// How long to wait after them.
const RETRY: Duration = Duration::from_secs(30);

/// How far above its share a workload may be: a fiftieth, at least 4 MiB.
fn tolerance(share: Bytes) -> Bytes {
    Bytes((share.0 / 50).max(Bytes::mib(4).0))
}

/// A workload with shares of several nodes.
#[derive(Clone, Debug, Default)]
pub(super) struct Shares {
    /// What is promised to it on each node.
    placed: ByNode,
    /// What it has there, as last read.
    resident: ByNode,
    over: BTreeMap<NodeId, Over>,
}

/// More than its share is on a node.
#[derive(Clone, Copy, Debug)]
struct Over {
    since: Instant,
    is_reported: bool,
    tries: u32,
    /// When it is tried again.
    not_before: Option<Instant>,
}

/// What is news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// It has had this much more than its share for a while.
    Begins(NodeId, Bytes),
    /// It no longer has.
    Ends(NodeId),
    /// It has, and there is nowhere to move it.
    Unmet(NodeId, Bytes),
}

/// Pages to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) from: NodeId,
    pub(super) to: NodeId,
    pub(super) bytes: Bytes,
}

impl Shares {
    /// Those that are promised now. What was known stays.
    pub(super) fn set(&mut self, placed: ByNode) {
        self.over.retain(|node, _| placed.contains_key(node));
        self.placed = placed;
    }

    /// What a node has above the share; 0 where it has less.
    fn excess(&self, node: NodeId) -> Bytes {
        let of = |map: &ByNode| map.get(&node).map_or(0, |bytes| bytes.0);
        Bytes(of(&self.resident).saturating_sub(of(&self.placed)))
    }

    /// What a node could take without having more than the share.
    fn space(&self, node: NodeId) -> Bytes {
        let of = |map: &ByNode| map.get(&node).map_or(0, |bytes| bytes.0);
        Bytes(of(&self.placed).saturating_sub(of(&self.resident)))
    }

    /// Whether anything is above its share, or was a moment ago.
    pub(super) fn is_over(&self) -> bool {
        !self.over.is_empty()
    }

    /// Takes a reading.
    pub(super) fn take(&mut self, resident: ByNode, now: Instant) -> Vec<News> {
        self.resident = resident;
        let mut news = Vec::new();
        let nodes: Vec<(NodeId, Bytes)> = self.placed.iter().map(|(node, share)| (*node, *share)).collect();
        for (node, share) in nodes {
            let (excess, tolerance) = (self.excess(node), tolerance(share));
            match self.over.get_mut(&node) {
                None if excess > tolerance => {
                    let over = Over { since: now, is_reported: false, tries: 0, not_before: None };
                    self.over.insert(node, over);
                }
                Some(over) if excess.0 <= tolerance.0 / 2 => {
                    if over.is_reported {
                        news.push(News::Ends(node));
                    }
                    self.over.remove(&node);
                }
                Some(over) if !over.is_reported && now.duration_since(over.since) >= DWELL => {
                    over.is_reported = true;
                    news.push(News::Begins(node, excess));
                }
                _ => {}
            }
        }
        news
    }

    /// What to move next: from the node with the most above its share to the nearest that has less. Where there is none,
    /// that is said once in a while.
    pub(super) fn next(
        &mut self,
        distance: impl Fn(NodeId, NodeId) -> u32,
        now: Instant,
    ) -> (Option<Wanted>, Option<News>) {
        let due = self.over.iter().filter(|(_, over)| {
            over.is_reported && over.not_before.is_none_or(|not_before| now >= not_before)
        });
        let due: BTreeSet<NodeId> = due.map(|(node, _)| *node).collect();
        let Some(from) = due.into_iter().max_by_key(|node| (self.excess(*node), std::cmp::Reverse(*node)))
        else {
            return (None, None);
        };
        let excess = self.excess(from);
        let others = self.placed.keys().filter(|to| **to != from && self.space(**to) >= MIN_MOVE_SIZE);
        let to = others.min_by_key(|to| (distance(from, **to), std::cmp::Reverse(self.space(**to)), **to));
        match to.copied() {
            Some(to) => (Some(Wanted { from, to, bytes: excess.min(self.space(to)) }), None),
            None => (None, self.gives_up(from, now)),
        }
    }

    /// Takes what came of a move; news if it is given up for a while.
    pub(super) fn moved(&mut self, from: NodeId, bytes: Bytes, now: Instant) -> Option<News> {
        let over = self.over.get_mut(&from)?;
        if bytes >= MIN_MOVE_SIZE {
            over.tries = 0;
            return None;
        }
        over.tries += 1;
        if over.tries < TRIES { None } else { self.gives_up(from, now) }
    }

    fn gives_up(&mut self, node: NodeId, now: Instant) -> Option<News> {
        let excess = self.excess(node);
        let over = self.over.get_mut(&node)?;
        let is_new = over.not_before.is_none();
        (over.tries, over.not_before) = (0, Some(now + RETRY));
        is_new.then_some(News::Unmet(node, excess))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn by_node(of: &[u64]) -> ByNode {
        (0..).map(NodeId).zip(of.iter().map(|mib| Bytes(mib * MIB))).collect()
    }

    fn shares(of: &[u64]) -> Shares {
        let mut shares = Shares::default();
        shares.set(by_node(of));
        shares
    }

    fn flat(_: NodeId, _: NodeId) -> u32 {
        20
    }

    #[test]
    fn an_excess_matters_after_a_while_and_ends_well_below_where_it_began() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut of = shares(&[200, 300]);
        assert_eq!(of.take(by_node(&[203, 100]), at(0)), [], "within 2 % and 4 MiB");
        assert!(!of.is_over());
        assert_eq!(of.take(by_node(&[300, 100]), at(1)), []);
        assert_eq!(of.next(flat, at(1)), (None, None), "it may be over in a moment");
        assert_eq!(of.take(by_node(&[300, 100]), at(3)), [News::Begins(NodeId(0), Bytes::mib(100))]);
        let wanted = Wanted { from: NodeId(0), to: NodeId(1), bytes: Bytes::mib(100) };
        assert_eq!(of.next(flat, at(3)), (Some(wanted), None));
        assert_eq!(of.moved(NodeId(0), Bytes::mib(97), at(4)), None);
        assert_eq!(of.take(by_node(&[203, 197]), at(4)), [], "still, as it began above 204");
        let wanted = Wanted { bytes: Bytes::mib(3), ..wanted };
        assert_eq!(of.next(flat, at(4)), (Some(wanted), None));
        assert_eq!(of.take(by_node(&[202, 198]), at(5)), [News::Ends(NodeId(0))]);
        assert!(!of.is_over());
        assert_eq!(of.take(by_node(&[204, 196]), at(6)), [], "no ping-pong");
    }

    #[test]
    fn a_short_excess_is_no_news() {
        let start = Instant::now();
        let mut of = shares(&[200, 300]);
        assert_eq!(of.take(by_node(&[300, 100]), start), []);
        assert_eq!(of.take(by_node(&[200, 100]), start + Duration::from_secs(1)), []);
        assert_eq!(of.take(by_node(&[300, 100]), start + Duration::from_secs(2)), [], "it begins anew");
    }

    #[test]
    fn the_worst_node_gives_first_and_the_nearest_with_space_takes() {
        let start = Instant::now();
        let mut of = shares(&[100, 100, 100, 100]);
        let resident = by_node(&[120, 150, 40, 20]);
        drop(of.take(resident.clone(), start));
        assert_eq!(of.take(resident, start + DWELL).len(), 2);
        let distance = |a: NodeId, b: NodeId| if a.0 == 1 && b.0 == 2 { 12 } else { 20 };
        let wanted = Wanted { from: NodeId(1), to: NodeId(2), bytes: Bytes::mib(50) };
        assert_eq!(of.next(distance, start + DWELL), (Some(wanted), None));
        let wanted = Wanted { to: NodeId(3), ..wanted };
        assert_eq!(of.next(flat, start + DWELL), (Some(wanted), None), "the one with the most space");
    }

    #[test]
    fn what_cannot_be_met_is_said_once_and_tried_again_later() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut of = shares(&[100, 100]);
        for seconds in [0, 2] {
            drop(of.take(by_node(&[150, 100]), at(seconds)));
        }
        let unmet = News::Unmet(NodeId(0), Bytes::mib(50));
        assert_eq!(of.next(flat, at(2)), (None, Some(unmet)), "the other node has its share");
        assert_eq!(of.next(flat, at(3)), (None, None));
        assert_eq!(of.next(flat, at(33)), (None, None), "said already");

        let mut of = shares(&[100, 100]);
        for seconds in [0, 2] {
            drop(of.take(by_node(&[150, 40]), at(seconds)));
        }
        for _ in 1..TRIES {
            assert!(of.next(flat, at(2)).0.is_some());
            assert_eq!(of.moved(NodeId(0), Bytes(0), at(2)), None);
        }
        assert_eq!(of.moved(NodeId(0), Bytes(4096), at(2)), Some(unmet));
        assert_eq!(of.next(flat, at(3)), (None, None));
        assert!(of.next(flat, at(40)).0.is_some());
        of.set(by_node(&[0, 200]));
        assert!(of.is_over(), "a new share of the same nodes");
        of.set([(NodeId(1), Bytes::mib(200))].into());
        assert!(!of.is_over(), "the node is no longer one of its own");
    }
}
