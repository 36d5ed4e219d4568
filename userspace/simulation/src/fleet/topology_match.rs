//! Simulation of the scheduler's plugin `NodeResourceTopologyMatch`, which uses the amounts that hosts publish per NUMA node.
//!
//! # Algorithm
//! - The *filter* applies to the policy `single-numa-node`: all requests of a container (in pod scope, of the pod) must fit on
//!   one node. Each container is charged to the node with the lowest id on which it fits; init containers are not charged.
//! - The *score* (`LeastNUMANodes`) applies to every policy. A host loses 12 of 100 points for each node that the pod, or the
//!   container with the most nodes, needs. It gets 6 points if no other set of the same size has shorter distances.
//!
//! The plugin only considers Guaranteed pods. It compares amounts, and ignores other constraints of the host: nodes of
//! previous containers, whole cores, groups of nodes, reserved CPUs.
//!
//! # Limits
//! The published amounts are always up to date here. In a cluster they arrive late.
//!
//! Source: `pkg/noderesourcetopology` of `kubernetes-sigs/scheduler-plugins`: `filter.go`, `score.go`, `least_numa.go`,
//! `numaresources.go`, `pluginhelpers.go`.

use std::{cmp::Reverse, iter};

use numaward_topology::Machine;

use super::scheduler::Amounts;
use numaward_engine::policy::{PolicyConfig, TopologyManagerPolicy, TopologyManagerScope};

/// Divisor of the full score: the plugin's default for the largest number of nodes.
const MAX_NODES: u64 = 8;
const FULL_SCORE: u64 = 100;
/// Distance between nodes without a published distance.
const UNKNOWN_DISTANCE: u32 = 255;

/// Most nodes of a host in a simulation.
const MAX_SIMULATED_NODES: usize = 16;

/// Bit set of the positions of nodes.
type NodeBits = u32;

/// Requests of a Guaranteed pod: the amounts per resource of each container, in the order of a node's amounts.
#[derive(Clone, Debug)]
pub struct AlignedRequests {
    pub init_containers: Vec<Vec<u64>>,
    pub containers: Vec<Vec<u64>>,
    /// Amounts of the whole pod.
    pub pod: Vec<u64>,
}

/// The plugin for equal hosts.
#[derive(Debug)]
pub struct TopologyMatch {
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    /// Number of amounts per node.
    width: usize,
    /// Sets of nodes by size, in the order in which they are tried, each with the sum of its distances.
    sets: Vec<Vec<(NodeBits, u64)>>,
}

impl TopologyMatch {
    /// Creates the plugin for hosts with this machine and configuration, and `width` amounts per node. Returns `None` if there are
    /// more than [`MAX_SIMULATED_NODES`] nodes, because the plugin enumerates all their sets.
    pub fn new(machine: &Machine, policy: &PolicyConfig, width: usize) -> Option<Self> {
        let nodes: Vec<_> = machine.nodes.keys().copied().collect();
        if nodes.len() > MAX_SIMULATED_NODES {
            return None;
        }
        let distance = |from: usize, to: usize| {
            u64::from(machine.distance(nodes[from], nodes[to]).unwrap_or(UNKNOWN_DISTANCE))
        };
        let mut sets = vec![Vec::new(); nodes.len()];
        for set in 1..1_u32 << nodes.len() {
            let pairs = positions(set).flat_map(|from| positions(set).map(move |to| (from, to)));
            let sum = pairs.map(|(from, to)| distance(from, to)).sum();
            sets[set.count_ones() as usize - 1].push((set, sum));
        }
        // Sorted by the first position, then by the second, and so on.
        for sets in &mut sets {
            sets.sort_by_key(|(set, _)| Reverse(set.reverse_bits()));
        }
        let (policy, scope) = (policy.topology_manager_policy, policy.topology_manager_scope);
        Some(Self { policy, scope, width, sets })
    }

    /// Returns whether a host passes the filter. `available` are its amounts, node by node.
    pub fn fits(&self, available: &[u64], asked: &AlignedRequests) -> bool {
        if self.policy != TopologyManagerPolicy::SingleNumaNode {
            return true;
        }
        let node_for = |available: &[u64], wanted: &Amounts| {
            available
                .chunks(self.width)
                .position(|node| node.iter().zip(wanted).all(|(have, want)| have >= want))
        };
        if self.scope == TopologyManagerScope::Pod {
            return node_for(available, &asked.pod).is_some();
        }
        let mut left = available.to_vec();
        asked.init_containers.iter().all(|wanted| node_for(available, wanted).is_some())
            && asked.containers.iter().all(|wanted| {
                let node = node_for(&left, wanted);
                node.is_some_and(|node| {
                    let of_node = left.iter_mut().skip(node * self.width);
                    of_node.zip(wanted).for_each(|(left, wanted)| *left -= wanted);
                    true
                })
            })
    }

    /// Returns the score of a host; 0 if the pod does not fit.
    pub(super) fn score(&self, available: &[u64], asked: &AlignedRequests) -> u64 {
        let (mut most, mut is_closest) = (0, true);
        if self.scope == TopologyManagerScope::Pod {
            let Some((set, closest)) = self.smallest_set(available, &asked.pod) else { return 0 };
            (most, is_closest) = (set.count_ones(), closest);
        } else {
            let mut left = available.to_vec();
            for wanted in asked.init_containers.iter().chain(&asked.containers) {
                let Some((set, closest)) = self.smallest_set(&left, wanted) else { return 0 };
                most = most.max(set.count_ones());
                is_closest &= closest;
                self.take(&mut left, wanted, set);
            }
        }
        let of_node = FULL_SCORE / MAX_NODES;
        let score = FULL_SCORE.saturating_sub(of_node * u64::from(most));
        if is_closest { score + of_node / 2 } else { score }
    }

    /// Returns the smallest set of nodes that has the wanted amounts, and among these the one with the shortest distances; and
    /// whether no other set of the same size has shorter distances.
    fn smallest_set(&self, available: &[u64], wanted: &Amounts) -> Option<(NodeBits, bool)> {
        let fits = |set: NodeBits| {
            wanted.iter().enumerate().all(|(resource, &wanted)| {
                let of = positions(set).map(|node| available[node * self.width + resource]);
                of.fold(0, u64::saturating_add) >= wanted
            })
        };
        // If all nodes together do not suffice, no set does.
        let all = self.sets.last()?.first()?.0;
        if !fits(all) {
            return None;
        }
        self.sets.iter().find_map(|sets| {
            let closest = sets.iter().map(|&(_, sum)| sum).min();
            let fitting = sets.iter().filter(|&&(set, _)| fits(set));
            let &(set, sum) = fitting.min_by_key(|&&(_, sum)| sum)?;
            Some((set, Some(sum) == closest))
        })
    }

    /// Subtracts the amounts of a container from the nodes of a set, the lowest first.
    fn take(&self, available: &mut [u64], wanted: &Amounts, set: NodeBits) {
        for (resource, &wanted) in wanted.iter().enumerate() {
            let mut wanted = wanted;
            for node in positions(set) {
                let have = &mut available[node * self.width + resource];
                let taken = wanted.min(*have);
                *have -= taken;
                wanted -= taken;
            }
        }
    }
}

fn positions(mut set: NodeBits) -> impl Iterator<Item = usize> {
    iter::from_fn(move || {
        let position = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(position)
    })
}

#[cfg(test)]
mod tests {
    use numaward_topology::Bytes;

    use super::*;

    /// Returns the plugin for four nodes on two sockets, each with CPUs and memory.
    fn plugin(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> TopologyMatch {
        let machine = Machine::builder()
            .nodes(4)
            .sockets(2)
            .cores_per_node(4)
            .socket_distances(12, 32)
            .memory(Bytes::gib(4))
            .build()
            .unwrap();
        let policy = PolicyConfig {
            topology_manager_policy: policy,
            topology_manager_scope: scope,
            ..PolicyConfig::default()
        };
        TopologyMatch::new(&machine, &policy, 2).unwrap()
    }

    fn asked(init_containers: &[[u64; 2]], containers: &[[u64; 2]], pod: [u64; 2]) -> AlignedRequests {
        let all = |of: &[[u64; 2]]| of.iter().map(|of| of.to_vec()).collect();
        AlignedRequests {
            init_containers: all(init_containers),
            containers: all(containers),
            pod: pod.to_vec(),
        }
    }

    #[test]
    fn filter_requires_one_node() {
        use TopologyManagerPolicy::{Restricted, SingleNumaNode};
        use TopologyManagerScope::{Container, Pod};
        let available = [3, 3, 2, 9, 0, 0, 1, 1];
        let fits = |policy, scope, asked: &AlignedRequests| plugin(policy, scope).fits(&available, asked);
        let two = asked(&[], &[[2, 2], [2, 2]], [4, 4]);
        assert!(fits(SingleNumaNode, Container, &two));
        assert!(!fits(SingleNumaNode, Pod, &two));
        assert!(fits(Restricted, Pod, &two));
        // The first two containers use the resources that the third one needs.
        assert!(!fits(SingleNumaNode, Container, &asked(&[], &[[2, 2], [2, 2], [2, 1]], [6, 5])));
        assert!(fits(SingleNumaNode, Container, &asked(&[], &[[2, 2], [2, 2], [1, 1]], [5, 5])));
        // Init containers are not charged, but must fit.
        assert!(fits(SingleNumaNode, Container, &asked(&[[3, 3], [3, 3]], &[[3, 3]], [3, 3])));
        assert!(!fits(SingleNumaNode, Container, &asked(&[[4, 1]], &[[1, 1]], [4, 1])));
        // CPUs on one node and memory on another do not match.
        assert!(!fits(SingleNumaNode, Pod, &asked(&[], &[[3, 9]], [3, 9])));
    }

    #[test]
    fn score_prefers_few_close_nodes() {
        use TopologyManagerScope::{Container, Pod};
        let score = |scope, available: [u64; 8], asked: &AlignedRequests| {
            plugin(TopologyManagerPolicy::BestEffort, scope).score(&available, asked)
        };
        let pod = |cpus, bytes| asked(&[], &[[cpus, bytes]], [cpus, bytes]);
        assert_eq!(score(Pod, [4; 8], &pod(4, 4)), 94);
        assert_eq!(score(Pod, [4; 8], &pod(5, 1)), 82, "two of a socket");
        assert_eq!(score(Pod, [4, 4, 0, 0, 4, 4, 0, 0], &pod(5, 1)), 76, "two of different sockets");
        assert_eq!(score(Pod, [4, 4, 0, 0, 4, 4, 4, 4], &pod(5, 5)), 82, "the closer pair");
        assert_eq!(score(Pod, [4; 8], &pod(16, 16)), 58, "all");
        assert_eq!(score(Pod, [4; 8], &pod(17, 1)), 0, "not enough");
        // The container with the most nodes counts, after previous containers were charged.
        let two = asked(&[], &[[5, 1], [4, 1]], [9, 2]);
        assert_eq!(score(Container, [4; 8], &two), 82);
        assert_eq!(score(Container, [4, 4, 4, 4, 1, 1, 2, 2], &two), 76);
    }

    #[test]
    fn sets_are_sorted_by_positions() {
        let plugin = plugin(TopologyManagerPolicy::None, TopologyManagerScope::Pod);
        let pairs: Vec<Vec<usize>> =
            plugin.sets[1].iter().map(|&(set, _)| positions(set).collect()).collect();
        assert_eq!(pairs, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
        // 10 + 10 + twice the distance.
        assert_eq!(plugin.sets[1].iter().map(|&(_, sum)| sum).collect::<Vec<_>>(), [44, 84, 84, 84, 84, 44]);
    }
}
