//! Choice of the preferred node of a workload.
//!
//! # Algorithm
//! 1. A node is suitable if its shared CPUs suffice for the CPU use of the workload and of the workloads placed there already,
//!    and if its memory has room for the pages of the workload that are on other nodes.
//! 2. Among the suitable nodes, the best score wins: the share of the workload's memory plus the share of its accesses on the
//!    node, in steps of one twentieth.
//! 3. Nodes with equal scores are ordered by the memory to move (least first), then by free CPUs and free memory (most first).

use std::cmp::Reverse;

use numaward_topology::{Bytes, NodeId};

use super::measure::WindowUsage;
use crate::metrics::auto_placement::PlacementRefusal;

/// Percentage of a node's shared CPUs that placed workloads may use.
const MAX_USED_PERCENT: u64 = 80;
/// Step in which scores (at most 2000) are compared.
const SCORE_STEP: u32 = 100;

/// A node that may become the preferred node of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CandidateNode {
    pub(super) node: NodeId,
    /// Number of shared CPUs, in thousandths.
    pub(super) cpus: u64,
    /// CPU use of the workloads placed there, in thousandths of one CPU.
    pub(super) used: u64,
    /// Free memory.
    pub(super) room: Bytes,
}

impl CandidateNode {
    fn cpus_left(&self) -> u64 {
        (self.cpus * MAX_USED_PERCENT / 100).saturating_sub(self.used)
    }

    /// Subtracts the use of a workload from the free capacity.
    pub(super) fn charge(&mut self, cpu: u64, bytes: Bytes) {
        self.used = self.used.saturating_add(cpu);
        self.room.0 = self.room.0.saturating_sub(bytes.0);
    }
}

/// Returns the best node for a workload, and the amount of its memory on other nodes.
pub(super) fn choose(
    usage: &WindowUsage,
    nodes: &[CandidateNode],
) -> Result<(NodeId, Bytes), PlacementRefusal> {
    let elsewhere =
        |candidate: &CandidateNode| Bytes(usage.total().0.saturating_sub(usage.on(candidate.node).0));
    let with_cpus: Vec<&CandidateNode> =
        nodes.iter().filter(|candidate| candidate.cpus_left() >= usage.cpu).collect();
    if with_cpus.is_empty() {
        return Err(PlacementRefusal::Cpus);
    }
    let suitable = with_cpus.into_iter().filter(|candidate| elsewhere(candidate) <= candidate.room);
    let best = suitable.min_by_key(|candidate| {
        let left = (Reverse(candidate.cpus_left()), Reverse(candidate.room));
        (Reverse(usage.score(candidate.node) / SCORE_STEP), elsewhere(candidate), left, candidate.node)
    });
    best.map(|candidate| (candidate.node, elsewhere(candidate))).ok_or(PlacementRefusal::Memory)
}

#[cfg(test)]
mod tests {
    use numaward_model::accesses::CountingMethod;

    use super::*;

    fn candidate(node: u32, cpus: u64, room: u64) -> CandidateNode {
        CandidateNode { node: NodeId(node), cpus: cpus * 1000, used: 0, room: Bytes::mib(room) }
    }

    /// Returns the usage of a workload: memory in MiB and accesses on nodes 0 and 1, CPU use in thousandths.
    fn workload(mib: [u64; 2], memory: [u64; 2], cpu: u64) -> WindowUsage {
        let nodes = || [0, 1].map(NodeId).into_iter();
        WindowUsage {
            by: CountingMethod::Sampling,
            accesses: 1000,
            remote: 500,
            memory: nodes().zip(memory).collect(),
            cpu,
            resident: nodes().zip(mib.map(Bytes::mib)).collect(),
        }
    }

    #[test]
    fn node_with_most_used_memory_wins() {
        let places = [candidate(0, 4, 1000), candidate(1, 4, 1000)];
        let of = |mib, memory| choose(&workload(mib, memory, 500), &places).unwrap();
        assert_eq!(of([100, 300], [5, 5]), (NodeId(1), Bytes::mib(100)));
        assert_eq!(of([300, 100], [5, 5]), (NodeId(0), Bytes::mib(100)));
        assert_eq!(of([200, 200], [9, 1]), (NodeId(0), Bytes::mib(200)), "accesses decide");
        assert_eq!(of([220, 180], [0, 1000]), (NodeId(1), Bytes::mib(220)), "they outweigh some memory");
        assert_eq!(of([204, 200], [0, 0]), (NodeId(0), Bytes::mib(200)), "the least has to be moved");
        let uneven = [candidate(0, 4, 1000), candidate(1, 8, 1000)];
        assert_eq!(
            choose(&workload([200, 200], [5, 5], 500), &uneven).unwrap().0,
            NodeId(1),
            "more CPUs are left"
        );
        let uneven = [candidate(0, 4, 1000), candidate(1, 4, 1001)];
        assert_eq!(
            choose(&workload([200, 200], [5, 5], 500), &uneven).unwrap().0,
            NodeId(1),
            "more memory is left"
        );
    }

    #[test]
    fn node_needs_cpus_and_memory() {
        let of = workload([100, 300], [1, 9], 1600);
        assert_eq!(choose(&of, &[candidate(0, 2, 1000), candidate(1, 2, 1000)]).unwrap().0, NodeId(1));
        assert_eq!(
            choose(&of, &[candidate(0, 2, 1000), candidate(1, 1, 1000)]).unwrap().0,
            NodeId(0),
            "the second best"
        );
        assert_eq!(choose(&of, &[candidate(0, 1, 1000), candidate(1, 1, 1000)]), Err(PlacementRefusal::Cpus));
        assert_eq!(
            choose(&of, &[candidate(0, 2, 299), candidate(1, 1, 1000)]),
            Err(PlacementRefusal::Memory)
        );
        assert_eq!(choose(&of, &[]), Err(PlacementRefusal::Cpus));
        let more = WindowUsage { cpu: 1601, ..of };
        assert_eq!(
            choose(&more, &[candidate(1, 2, 1000)]),
            Err(PlacementRefusal::Cpus),
            "some CPUs stay free"
        );
    }

    #[test]
    fn charged_node_is_not_chosen_twice() {
        let mut places = [candidate(0, 2, 1000), candidate(1, 2, 150)];
        let of = workload([100, 300], [1, 9], 900);
        let (node, bytes) = choose(&of, &places).unwrap();
        assert_eq!(node, NodeId(1));
        places[1].charge(of.cpu, bytes);
        assert_eq!(choose(&of, &places).unwrap().0, NodeId(0));
        let light = WindowUsage { cpu: 100, ..of };
        assert_eq!(choose(&light, &places).unwrap().0, NodeId(0), "it has the CPUs, but not the memory");
    }
}
