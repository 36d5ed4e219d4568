//! NUMA placement of containers, in the encoding `numaplacement`.
//!
//! # Problem
//! A scheduler that preempts pods must know on which NUMA node each container has its resources, to compute what the end of a pod frees there.
//! A list of the names would be too large for the object.
//!
//! # Algorithm (version `v001`)
//! For each container, the 64-bit xxHash of namespace, pod and container is computed, with a zero byte between them. The sorted hashes number
//! the containers. Each zone has a vector with the numbers of its containers: the first number, then the differences, as base-89 text. The
//! zone with the most containers has no vector. The scheduler computes the same hashes from the containers that it knows; if their count
//! differs from that in the metadata, it ignores the placement.
//!
//! Source: `k8stopologyawareschedwg/numaplacement` v0.1.0, and its use in the plugin `NodeResourceTopologyMatch`.

use std::collections::BTreeMap;

use numaward_topology::NodeId;
use twox_hash::XxHash64;

/// Attribute of the object with the counts.
pub const METADATA_ATTRIBUTE: &str = "topology.node.k8s.io/numaplacement-metadata";
/// Attribute of a zone with its containers.
pub const VECTOR_ATTRIBUTE: &str = "topology.node.k8s.io/numaplacement-vector";

/// Number of digits that end a number.
const TERMINALS: u32 = 64;
/// Number of digits before the last one.
const CONTINUATIONS: u32 = 25;

/// A container with all of its exclusive resources on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedContainer<'a> {
    pub namespace: &'a str,
    pub pod: &'a str,
    pub container: &'a str,
    pub node: NodeId,
}

/// The encoded placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaPlacement {
    pub metadata: String,
    /// The vectors by node, without that of the node with the most containers.
    pub vectors: BTreeMap<NodeId, String>,
}

impl NumaPlacement {
    /// Encodes the placement of containers. All ids of nodes are below `node_count`.
    pub fn encode<'a>(containers: impl IntoIterator<Item = PlacedContainer<'a>>, node_count: u32) -> Self {
        let hash = |of: PlacedContainer<'a>| {
            let name = [of.namespace, of.pod, of.container].join("\0");
            (XxHash64::oneshot(0, name.as_bytes()), of.node)
        };
        let by_hash: BTreeMap<u64, NodeId> = containers.into_iter().map(hash).collect();
        let mut numbers: BTreeMap<NodeId, Vec<u32>> = BTreeMap::new();
        for (number, node) in (0..).zip(by_hash.values()) {
            numbers.entry(*node).or_default().push(number);
        }
        // Of nodes with the same count, the first.
        let busiest = numbers.iter().rev().max_by_key(|(_, numbers)| numbers.len()).map(|(node, _)| *node);
        let busiest = busiest.unwrap_or(NodeId(0));
        numbers.remove(&busiest);
        let metadata = format!("npv0v001::ve=leb89::cc={}::nn={node_count}::bn={busiest}", by_hash.len());
        let vectors = numbers.into_iter().map(|(node, numbers)| (node, encode_vector(&numbers))).collect();
        Self { metadata, vectors }
    }
}

/// Encodes ascending numbers.
fn encode_vector(numbers: &[u32]) -> String {
    let mut previous = 0;
    let mut text = String::new();
    for number in numbers {
        encode_number(number - previous, &mut text);
        previous = *number;
    }
    text
}

fn encode_number(number: u32, text: &mut String) {
    let (mut rest, terminal) = match number.checked_sub(TERMINALS) {
        None => (None, number),
        Some(above) => (Some(above / TERMINALS), above % TERMINALS),
    };
    let mut continuations = Vec::new();
    while let Some(value) = rest {
        continuations.push(TERMINALS + value % CONTINUATIONS);
        rest = Some(value / CONTINUATIONS).filter(|rest| *rest > 0);
    }
    text.extend(continuations.into_iter().rev().chain([terminal]).filter_map(digit));
}

/// Returns a digit: the printable characters that JSON and HTML leave as they are, in the order of ASCII.
fn digit(value: u32) -> Option<char> {
    let safe = ('!'..='~').filter(|c| !['"', '&', '<', '>', '\\'].contains(c));
    safe.take((TERMINALS + CONTINUATIONS) as usize).nth(value as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placed(pod: &'static str, container: &'static str, node: u32) -> PlacedContainer<'static> {
        PlacedContainer { namespace: "ns-0", pod, container, node: NodeId(node) }
    }

    /// The data of the scheduler plugin's test `TestNRTStoreUpdateWithPods`.
    #[test]
    fn matches_test_data_of_scheduler() {
        let containers = [
            placed("pod-0", "container-0", 1),
            placed("pod-1", "container-1", 0),
            placed("pod-1", "container-2", 1),
        ];
        let placement = NumaPlacement::encode(containers, 2);
        assert_eq!(placement.metadata, "npv0v001::ve=leb89::cc=3::nn=2::bn=1");
        assert_eq!(placement.vectors, [(NodeId(0), "!".to_owned())].into());
    }

    /// The lengths are those of the test `TestLeb89EncodeDecode` of the encoding.
    #[test]
    fn encodes_numbers_like_reference() {
        let text = |number| {
            let mut text = String::new();
            encode_number(number, &mut text);
            text
        };
        for (number, length) in [
            (0, 1),
            (63, 1),
            (64, 2),
            (1663, 2),
            (1664, 3),
            (2047, 3),
            (40_063, 3),
            (40_064, 4),
            (100_000, 4),
        ] {
            assert_eq!(text(number).len(), length, "{number}");
        }
        assert_eq!([text(0), text(63), text(64), text(1663)], ["!", "e", "f!", "~e"]);
        assert_eq!(encode_vector(&[0, 1, 65]), "!#f!");
    }

    #[test]
    fn first_of_equal_nodes_has_no_vector() {
        let placement = NumaPlacement::encode([placed("a", "c", 1), placed("b", "c", 3)], 4);
        assert!(placement.metadata.ends_with("cc=2::nn=4::bn=1"), "{}", placement.metadata);
        assert_eq!(placement.vectors.keys().collect::<Vec<_>>(), [&NodeId(3)]);
        assert_eq!(NumaPlacement::encode([], 2).metadata, "npv0v001::ve=leb89::cc=0::nn=2::bn=0");
    }
}
