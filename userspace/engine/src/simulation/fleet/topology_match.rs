//! The scheduler's plugin `NodeResourceTopologyMatch`: what it makes of the amounts that hosts publish by node.
//!
//! - Under `single-numa-node` it *filters*: each container (in pod scope the pod) must find all that it requests on one
//!   node. Containers take from the node with the lowest id on which they fit; init containers take nothing.
//! - It *scores* by `LeastNUMANodes`, under every policy: 12 of 100 points are lost for each node that the container
//!   spread widest (or the pod) needs, and 6 are won where no set of as many nodes is closer together.
//!
//! It looks at Guaranteed pods only; of these at amounts, and not at what the host does to find CPUs and memory
//! together: which nodes a container may have after those before it, whole cores, groups of nodes, reserved CPUs in use.
//!
//! What is published is taken to be fresh always. In a cluster it lags.
//!
//! Source: `pkg/noderesourcetopology` of `kubernetes-sigs/scheduler-plugins`: `filter.go`, `score.go`, `least_numa.go`,
//! `numaresources.go`, `pluginhelpers.go`.

use std::{cmp::Reverse, iter};

use numaward_topology::Machine;

use super::scheduler::Amounts;
use crate::policy::{PolicyConfig, TopologyManagerPolicy, TopologyManagerScope};

/// What the plugin divides a full score by: the most nodes, if nothing is published about it.
const MAX_NODES: u64 = 8;
const FULL_SCORE: u64 = 100;
/// The distance to a node of which none is published.
const UNKNOWN_DISTANCE: u32 = 255;

/// On the most nodes it is replayed.
const MOST_NODES: usize = 16;

/// A set of nodes: their positions.
type Set = u32;

/// What a Guaranteed pod asks for: of each container as many amounts as a node has.
#[derive(Clone, Debug)]
pub struct AlignedRequests {
    /// Of its init containers.
    pub init_containers: Vec<Vec<u64>>,
    /// Of its containers.
    pub containers: Vec<Vec<u64>>,
    /// Of the pod.
    pub pod: Vec<u64>,
}

/// The plugin, for hosts alike.
#[derive(Debug)]
pub struct TopologyMatch {
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    /// How many amounts a node has.
    width: usize,
    /// Sets of nodes by their size, in the order in which they are tried, with the sum of all distances in them.
    sets: Vec<Vec<(Set, u64)>>,
}

impl TopologyMatch {
    /// For hosts with this machine and configuration, whose nodes have so many amounts. `None` where there are too many
    /// nodes: the plugin looks at all their sets.
    pub fn new(machine: &Machine, policy: &PolicyConfig, width: usize) -> Option<Self> {
        let nodes: Vec<_> = machine.nodes.keys().copied().collect();
        if nodes.len() > MOST_NODES {
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
        // By the first position, then by the second.
        for sets in &mut sets {
            sets.sort_by_key(|(set, _)| Reverse(set.reverse_bits()));
        }
        let (policy, scope) = (policy.topology_manager_policy, policy.topology_manager_scope);
        Some(Self { policy, scope, width, sets })
    }

    /// Whether a host passes the filter of which this is available: of each node in turn, the amounts.
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

    /// The score of a host.
    pub(super) fn score(&self, available: &[u64], asked: &AlignedRequests) -> u64 {
        let (mut most, mut is_closest) = (0, true);
        if self.scope == TopologyManagerScope::Pod {
            let Some((set, closest)) = self.least(available, &asked.pod) else { return 0 };
            (most, is_closest) = (set.count_ones(), closest);
        } else {
            let mut left = available.to_vec();
            for wanted in asked.init_containers.iter().chain(&asked.containers) {
                let Some((set, closest)) = self.least(&left, wanted) else { return 0 };
                most = most.max(set.count_ones());
                is_closest &= closest;
                self.take(&mut left, wanted, set);
            }
        }
        let of_node = FULL_SCORE / MAX_NODES;
        let score = FULL_SCORE.saturating_sub(of_node * u64::from(most));
        if is_closest { score + of_node / 2 } else { score }
    }

    /// The set of the fewest nodes that together have what is wanted, the closest of these; and whether no other set of as
    /// many is closer.
    fn least(&self, available: &[u64], wanted: &Amounts) -> Option<(Set, bool)> {
        let fits = |set: Set| {
            wanted.iter().enumerate().all(|(resource, &wanted)| {
                let of = positions(set).map(|node| available[node * self.width + resource]);
                of.fold(0, u64::saturating_add) >= wanted
            })
        };
        // What is more than all nodes have together, no set has.
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

    /// Takes what a container gets from the nodes of a set, the lowest first.
    fn take(&self, available: &mut [u64], wanted: &Amounts, set: Set) {
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

fn positions(mut set: Set) -> impl Iterator<Item = usize> {
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

    /// Four nodes on two sockets, each with CPUs and memory.
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
    fn the_filter_wants_one_node_for_each_container_or_for_the_pod() {
        use TopologyManagerPolicy::{Restricted, SingleNumaNode};
        use TopologyManagerScope::{Container, Pod};
        let available = [3, 3, 2, 9, 0, 0, 1, 1];
        let fits = |policy, scope, asked: &AlignedRequests| plugin(policy, scope).fits(&available, asked);
        let two = asked(&[], &[[2, 2], [2, 2]], [4, 4]);
        assert!(fits(SingleNumaNode, Container, &two));
        assert!(!fits(SingleNumaNode, Pod, &two));
        assert!(fits(Restricted, Pod, &two));
        // The first took what the second would need.
        assert!(!fits(SingleNumaNode, Container, &asked(&[], &[[2, 2], [2, 2], [2, 1]], [6, 5])));
        assert!(fits(SingleNumaNode, Container, &asked(&[], &[[2, 2], [2, 2], [1, 1]], [5, 5])));
        // Init containers take nothing, but must fit.
        assert!(fits(SingleNumaNode, Container, &asked(&[[3, 3], [3, 3]], &[[3, 3]], [3, 3])));
        assert!(!fits(SingleNumaNode, Container, &asked(&[[4, 1]], &[[1, 1]], [4, 1])));
        // CPUs on one node and memory on another are no match.
        assert!(!fits(SingleNumaNode, Pod, &asked(&[], &[[3, 9]], [3, 9])));
    }

    #[test]
    fn the_score_counts_nodes_and_whether_they_are_close() {
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
        // The container that is spread widest counts, after what those before it took.
        let two = asked(&[], &[[5, 1], [4, 1]], [9, 2]);
        assert_eq!(score(Container, [4; 8], &two), 82);
        assert_eq!(score(Container, [4, 4, 4, 4, 1, 1, 2, 2], &two), 76);
    }

    #[test]
    fn sets_of_a_size_are_in_the_order_of_their_positions() {
        let plugin = plugin(TopologyManagerPolicy::None, TopologyManagerScope::Pod);
        let pairs: Vec<Vec<usize>> =
            plugin.sets[1].iter().map(|&(set, _)| positions(set).collect()).collect();
        assert_eq!(pairs, [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
        // 10 + 10 + twice the distance.
        assert_eq!(plugin.sets[1].iter().map(|&(_, sum)| sum).collect::<Vec<_>>(), [44, 84, 84, 84, 84, 44]);
    }
}
