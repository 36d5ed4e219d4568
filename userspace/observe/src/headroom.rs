//! Headroom of nodes: available memory compared with the guaranteed memory that is not used yet.
//!
//! # Problem
//! Guaranteed memory that is not used yet is free, so other processes can take it. The guarantee then fails later,
//! when the workload allocates.
//!
//! # Terms
//! - *available*: free or reclaimable memory of a node, less the kernel's own reserve.
//! - *held*: page cache and slab that a workload has within its guarantee. It counts as used, so it is not available
//!   to other processes.
//! - *room*: available memory, less the held memory and less the guaranteed memory that is not used yet.
//!
//! # Algorithm
//! A node becomes *low* as soon as its room is below a margin: a fiftieth of its base pages, at least 32 MiB, but no
//! more than the unused guaranteed memory. It recovers when its room has been at least twice the margin for half a
//! minute. A node is *tight* while so little is free that the kernel would have to reclaim memory when workloads
//! allocate the rest of their guarantees.
//!
//! This module reads no file and no clock: the caller passes readings and times.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use numaward_model::{
    headroom::{NodeHeadroom, RECOVERY_TIME},
    snapshot::ResidentFigures,
};
use numaward_topology::{Bytes, NodeId};

/// Memory of each node that guarantees claim, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Claims {
    /// Guaranteed memory that is not used yet.
    unused: BTreeMap<NodeId, u64>,
    /// Droppable memory (page cache, slab) that workloads have within their guarantees.
    held: BTreeMap<NodeId, u64>,
}

impl Claims {
    /// Adds a guarantee: the memory placed on each node, and the resident memory of the workloads that share it.
    pub(crate) fn add(
        &mut self,
        placed: &BTreeMap<NodeId, Bytes>,
        resident: &BTreeMap<NodeId, ResidentFigures>,
    ) {
        for (node, Bytes(placed)) in placed {
            let of = resident.get(node).copied().unwrap_or_default();
            let used = of.sum().0;
            *self.unused.entry(*node).or_default() += placed.saturating_sub(used);
            *self.held.entry(*node).or_default() +=
                of.droppable.0.saturating_sub(used.saturating_sub(*placed));
        }
    }

    /// Returns the nodes with guaranteed memory.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = NodeId> {
        self.unused.keys().copied()
    }

    /// Returns the guaranteed memory of a node that is not used yet.
    pub(crate) fn unused(&self, node: NodeId) -> Bytes {
        Bytes(self.unused.get(&node).copied().unwrap_or(0))
    }

    /// Returns the obtainable memory of a node, less the memory that guarantees hold.
    pub(crate) fn left(&self, node: NodeId, obtainable: Bytes) -> Bytes {
        Bytes(obtainable.0.saturating_sub(self.held.get(&node).copied().unwrap_or(0)))
    }
}

/// Returns the room that a node with `base` bytes in base pages should have.
pub(crate) fn margin(base: Bytes) -> Bytes {
    Bytes((base.0 / 50).max(Bytes::mib(32).0))
}

/// Low nodes.
#[derive(Debug, Default)]
pub(crate) struct LowNodes(BTreeMap<NodeId, LowState>);

/// State of a low node.
#[derive(Debug)]
struct LowState {
    /// The room has been negative since the node became low.
    was_broken: bool,
    /// The time since which the node has had enough room, if it has.
    enough_since: Option<Instant>,
}

/// Tight nodes.
#[derive(Debug, Default)]
pub(crate) struct TightNodes(BTreeSet<NodeId>);

impl TightNodes {
    /// Returns whether any of the nodes would be judged tight.
    pub(crate) fn has_tight(&self, nodes: &[NodeHeadroom]) -> bool {
        nodes.iter().any(|of| of.becomes_tight(self.0.contains(&of.node)))
    }

    /// Judges which nodes are tight, and stores the result.
    pub(crate) fn judge(&mut self, nodes: &mut [NodeHeadroom]) {
        for of in &mut *nodes {
            of.is_tight = of.becomes_tight(self.0.contains(&of.node));
        }
        self.0 = nodes.iter().filter(|of| of.is_tight).map(|of| of.node).collect();
    }

    /// Marks the nodes that the latest judgement found tight.
    pub(crate) fn mark(&self, nodes: &mut [NodeHeadroom]) {
        for of in nodes {
            of.is_tight = self.0.contains(&of.node);
        }
    }
}

/// Change of a node's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadroomChange {
    /// The node became low.
    BecameLow(NodeHeadroom),
    /// The room of the low node became negative.
    BecameNegative(NodeHeadroom),
    /// The node has recovered.
    Recovered(NodeHeadroom),
    /// The low node is no longer monitored.
    Unmonitored(NodeId),
}

impl LowNodes {
    pub(crate) fn is_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Judges which nodes are low, stores the result and returns the changes.
    pub(crate) fn judge(&mut self, nodes: &mut [NodeHeadroom], now: Instant) -> Vec<HeadroomChange> {
        let mut changes = Vec::new();
        let there: BTreeSet<NodeId> = nodes.iter().map(|of| of.node).collect();
        self.0.retain(|node, _| {
            let stays = there.contains(node);
            if !stays {
                changes.push(HeadroomChange::Unmonitored(*node));
            }
            stays
        });
        for of in nodes {
            let (has_enough, is_broken) = (of.has_recovered(), of.headroom_bytes() < 0);
            let Some(low) = self.0.get_mut(&of.node) else {
                of.is_low = of.is_short();
                if of.is_low {
                    self.0.insert(of.node, LowState { was_broken: is_broken, enough_since: None });
                    changes.push(HeadroomChange::BecameLow(*of));
                }
                continue;
            };
            of.is_low = true;
            if is_broken && !low.was_broken {
                low.was_broken = true;
                changes.push(HeadroomChange::BecameNegative(*of));
            }
            if !has_enough {
                low.enough_since = None;
            } else if now.duration_since(*low.enough_since.get_or_insert(now)) >= RECOVERY_TIME {
                self.0.remove(&of.node);
                of.is_low = false;
                changes.push(HeadroomChange::Recovered(*of));
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn placed(nodes: &[(u32, u64)]) -> BTreeMap<NodeId, Bytes> {
        nodes.iter().map(|(node, mib)| (NodeId(*node), Bytes::mib(*mib))).collect()
    }

    fn resident(anon: u64, file: u64, droppable: u64) -> ResidentFigures {
        let [anon, file, droppable] = [anon, file, droppable].map(Bytes::mib);
        ResidentFigures { anon, file, droppable, ..ResidentFigures::default() }
    }

    #[test]
    fn used_memory_ends_claims() {
        for (of, unused, held) in [
            (resident(0, 0, 0), 100, 0),
            (resident(30, 20, 20), 50, 20),
            (resident(30, 20, 5), 50, 5),
            (resident(60, 60, 60), 0, 40),
            (resident(150, 60, 60), 0, 0),
        ] {
            let mut claims = Claims::default();
            claims.add(&placed(&[(0, 100)]), &[(NodeId(0), of)].into());
            assert_eq!(claims.unused(NodeId(0)), Bytes(unused * MIB), "{of:?}");
            let left = claims.left(NodeId(0), Bytes(200 * MIB));
            assert_eq!(left, Bytes((200 - held) * MIB), "{of:?}");
        }
    }

    #[test]
    fn claims_are_per_node() {
        let mut claims = Claims::default();
        claims.add(&placed(&[(0, 100), (1, 50)]), &[(NodeId(0), resident(120, 0, 0))].into());
        claims.add(&placed(&[(1, 10)]), &BTreeMap::new());
        assert_eq!(claims.unused(NodeId(0)), Bytes(0), "what is too much there helps no other node");
        assert_eq!(claims.unused(NodeId(1)), Bytes::mib(60));
        assert!(claims.nodes().eq([NodeId(0), NodeId(1)]));
    }

    #[test]
    fn low_node_recovers_after_a_delay() {
        let start = Instant::now();
        let mut lows = LowNodes::default();
        let mut at = |seconds: u64, obtainable: u64| {
            let mut nodes = [NodeHeadroom {
                node: NodeId(1),
                obtainable: Bytes(obtainable * MIB),
                free: Bytes(0),
                unused: Bytes::mib(100),
                margin: margin(Bytes::gib(1)),
                is_low: false,
                is_tight: false,
            }];
            let changes = lows.judge(&mut nodes, start + Duration::from_secs(seconds));
            (nodes[0].is_low, changes.len(), lows.is_any())
        };
        assert_eq!(at(0, 200), (false, 0, false));
        assert_eq!(at(1, 131), (true, 1, true), "the margin is 32 MiB");
        assert_eq!(at(2, 163), (true, 0, true), "enough would be 164");
        assert_eq!(at(3, 164), (true, 0, true));
        assert_eq!(at(20, 150), (true, 0, true));
        assert_eq!(at(21, 300), (true, 0, true), "it begins anew");
        assert_eq!(at(50, 300), (true, 0, true));
        assert_eq!(at(51, 300), (false, 1, false));
        assert_eq!(at(52, 90), (true, 1, true));
        assert!(matches!(lows.judge(&mut [], start)[..], [HeadroomChange::Unmonitored(NodeId(1))]));
        assert!(!lows.is_any());
    }

    #[test]
    fn broken_low_node_is_reported_again() {
        let start = Instant::now();
        let mut lows = LowNodes::default();
        let mut at = |seconds: u64, obtainable: u64| {
            let mut nodes = [NodeHeadroom {
                node: NodeId(1),
                obtainable: Bytes::mib(obtainable),
                free: Bytes(0),
                unused: Bytes::mib(100),
                margin: margin(Bytes::gib(1)),
                is_low: false,
                is_tight: false,
            }];
            lows.judge(&mut nodes, start + Duration::from_secs(seconds))
        };
        assert!(matches!(at(0, 131)[..], [HeadroomChange::BecameLow(_)]));
        assert!(matches!(at(1, 99)[..], [HeadroomChange::BecameNegative(_)]));
        assert!(at(2, 120).is_empty() && at(3, 99).is_empty(), "once until the node has recovered");
        assert!(at(4, 300).is_empty());
        assert!(matches!(at(34, 300)[..], [HeadroomChange::Recovered(_)]));
        assert!(matches!(at(35, 99)[..], [HeadroomChange::BecameLow(_)]));
    }

    #[test]
    fn fully_used_guarantee_is_not_low() {
        let judged = |obtainable: u64, unused: u64| {
            let mut nodes = [NodeHeadroom {
                node: NodeId(1),
                obtainable: Bytes::mib(obtainable),
                free: Bytes(0),
                unused: Bytes::mib(unused),
                margin: margin(Bytes::gib(1)),
                is_low: false,
                is_tight: false,
            }];
            LowNodes::default().judge(&mut nodes, Instant::now());
            nodes[0].is_low
        };
        assert_eq!([judged(0, 0), judged(5, 0)], [false; 2]);
        assert_eq!([judged(3, 2), judged(4, 2)], [true, false]);
    }

    #[test]
    fn tight_until_twice_the_margin_is_free() {
        let mut tights = TightNodes::default();
        let mut at = |free: u64, unused: u64| {
            let mut nodes = [NodeHeadroom {
                node: NodeId(1),
                obtainable: Bytes::gib(1),
                free: Bytes(free * MIB),
                unused: Bytes::mib(unused),
                margin: Bytes::mib(32),
                is_low: false,
                is_tight: false,
            }];
            let has_tight = tights.has_tight(&nodes);
            tights.judge(&mut nodes);
            assert_eq!(nodes[0].is_tight, has_tight);
            (has_tight, nodes[0].bytes_to_free().0 / MIB)
        };
        assert_eq!(at(132, 100), (false, 32));
        assert_eq!(at(131, 100), (true, 33));
        assert_eq!(at(163, 100), (true, 1), "it stays so");
        assert_eq!(at(164, 100), (false, 0));
        assert_eq!(at(140, 100), (false, 24));
        assert_eq!(at(0, 0), (false, 0), "all guaranteed memory is used");
        assert_eq!(at(0, 1), (true, 2), "the margin is at most the guaranteed memory");
        tights.judge(&mut []);
        assert!(tights.0.is_empty());
    }
}
