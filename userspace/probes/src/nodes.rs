//! The machine's nodes as the probes know them, and how they learn of nodes and memory that come later.
//!
//! Maps are indexed by dense *node indices* (see `numaward_abi`). A node gets its index when it is first seen and keeps
//! it: counters must not change hands. Maps cannot grow, so rows and sections are set aside at the start
//! for what may come: nodes that are possible but not online, and memory at higher addresses.
//!
//! The tables: `NODE_TABLE` leads from a node's id to its index and to the home node of its CPUs; `SECTION_NODE`,
//! which the tracepoint needs, from a section of physical memory to the index of its node.

use std::collections::BTreeMap;

use numaward_abi::{MAX_NODE_IDS, MAX_NODES, NodeTable, UNKNOWN_NODE};
use numaward_topology::{Machine, NodeId, NodeSet, machine::SECTION_SIZE};
use rustix::param::page_size;

/// Rows set aside for nodes that are possible and not online. Firmware may list far more than will ever come.
const SPARE_NODES: usize = 8;

/// Sections that `SECTION_NODE` has at least: 8 TiB of physical address space in 512 KiB.
const LEAST_SECTIONS: usize = 1 << 16;

/// Sections that `SECTION_NODE` has at most: 512 TiB.
const MOST_SECTIONS: usize = 1 << 22;

/// The shift that makes all memory one section.
const ONE_SECTION: u32 = 63;

/// The node indices given so far.
#[derive(Debug, Default)]
pub(crate) struct Numbering {
    /// By node index.
    ids: Vec<NodeId>,
    /// Nodes that can have an index.
    capacity: usize,
    /// Stands for the home of every CPU, in tests.
    fake_home: Option<NodeId>,
}

impl Numbering {
    /// Numbers the machine's nodes in the order of their ids.
    pub(crate) fn new(machine: &Machine, fake_home: Option<NodeId>) -> Self {
        let online = machine.nodes.len();
        let spare = machine.possible_nodes.len().saturating_sub(online).min(SPARE_NODES);
        let capacity = (online + spare).clamp(1, MAX_NODES);
        let mut numbering = Self { ids: Vec::new(), capacity, fake_home };
        numbering.extend(machine);
        numbering
    }

    /// Numbers the nodes that came, as far as there is room. Returns those for which there is none.
    pub(crate) fn extend(&mut self, machine: &Machine) -> NodeSet {
        let mut without_room = NodeSet::new();
        for &id in machine.nodes.keys() {
            if self.ids.contains(&id) {
                continue;
            }
            if self.ids.len() < self.capacity && (id.0 as usize) < MAX_NODE_IDS {
                self.ids.push(id);
            } else {
                without_room.insert(id);
            }
        }
        without_room
    }

    pub(crate) fn ids(&self) -> &[NodeId] {
        &self.ids
    }

    /// Nodes that can have an index: rows that a slot needs.
    pub(crate) fn capacity(&self) -> u32 {
        u32::try_from(self.capacity).unwrap_or(u32::MAX)
    }

    fn indices(&self) -> BTreeMap<NodeId, u16> {
        self.ids.iter().copied().zip(0..).collect()
    }

    /// A bit for each node index. Nodes that have none cannot be given to the probe; it counts no page there.
    pub(crate) fn mask_of(&self, allowed: Option<&NodeSet>) -> [u64; MAX_NODES / 64] {
        let Some(allowed) = allowed else { return [u64::MAX; MAX_NODES / 64] };
        let mut mask = [0; MAX_NODES / 64];
        for (index, _) in self.ids.iter().enumerate().filter(|&(_, &node)| allowed.contains(node)) {
            mask[index / 64] |= 1 << (index % 64);
        }
        mask
    }

    /// What `NODE_TABLE` holds, for nodes that are numbered: a node's index, and that of the [`nearest_memory_node`] of its CPUs.
    pub(crate) fn table(&self, machine: &Machine) -> NodeTable {
        let index_of = self.indices();
        let mut table = NodeTable { index: [UNKNOWN_NODE; MAX_NODE_IDS], home: [UNKNOWN_NODE; MAX_NODE_IDS] };
        for (&id, &index) in &index_of {
            let home = self.fake_home.unwrap_or_else(|| nearest_memory_node(machine, id, &self.ids));
            let home = index_of.get(&home).copied();
            table.index[id.0 as usize] = index;
            // A fake that the machine does not have gets an index of no row: all pages are remote to it.
            table.home[id.0 as usize] = home.unwrap_or(UNKNOWN_NODE - 1);
        }
        table
    }
}

/// The home node of a node's CPUs: the node itself or, where it has no memory, the nearest of `all` that has; the lowest of
/// several.
pub fn nearest_memory_node<'a>(
    machine: &Machine,
    node: NodeId,
    all: impl IntoIterator<Item = &'a NodeId>,
) -> NodeId {
    let has_memory = |id: &NodeId| machine.nodes.get(id).is_some_and(|of| of.memory.0 > 0);
    if has_memory(&node) {
        return node;
    }
    let distance = |to: &NodeId| (machine.distance(node, *to).unwrap_or(u32::MAX), *to);
    all.into_iter().copied().filter(has_memory).min_by_key(distance).unwrap_or(node)
}

pub(crate) fn count_homes(table: &NodeTable) -> u32 {
    let homes: std::collections::BTreeSet<_> =
        table.home.iter().filter(|&&home| home != UNKNOWN_NODE).collect();
    u32::try_from(homes.len()).unwrap_or(u32::MAX)
}

/// Memory blocks are not known, so that a page's address does not say its node.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the machine's memory blocks are not known (CONFIG_MEMORY_HOTPLUG), and it has several nodes")]
pub struct NoSections;

/// What `SECTION_NODE` holds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sections {
    /// Where the section number begins in a page frame number.
    pub(crate) shift: u32,
    /// By section number: the index of its node plus one, 0 where that is not known.
    pub(crate) nodes: Vec<u16>,
}

impl Sections {
    /// For a probe that does not use them.
    pub(crate) fn none() -> Self {
        Self { shift: ONE_SECTION, nodes: Vec::new() }
    }

    pub(crate) fn new(machine: &Machine, nodes: &Numbering) -> Result<Self, NoSections> {
        let index_of = nodes.indices();
        let mut by_section = Vec::new();
        for (section, node) in machine.memory_sections() {
            let section = usize::try_from(section).ok().filter(|&section| section < MOST_SECTIONS);
            let (Some(section), Some(index)) = (section, index_of.get(&node)) else { continue };
            by_section.resize(by_section.len().max(section + 1), 0);
            by_section[section] = index + 1;
        }
        match (by_section.len(), machine.nodes.len()) {
            // With one node there is nothing to distinguish.
            (0, 1) => Ok(Self { shift: ONE_SECTION, nodes: vec![1] }),
            (0, 2..) => Err(NoSections),
            _ => Ok(Self { shift: SECTION_SIZE.0.ilog2() - page_size().ilog2(), nodes: by_section }),
        }
    }

    /// Entries that the map gets, with room for memory that comes later.
    pub(crate) fn capacity(&self) -> u32 {
        let entries = match self.shift {
            ONE_SECTION => 1,
            _ => (2 * self.nodes.len()).clamp(LEAST_SECTIONS, MOST_SECTIONS),
        };
        u32::try_from(entries).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use numaward_topology::{Bytes, CpuSet, machine::NumaNode};

    use super::*;

    /// Nodes with their memory in MiB, memory blocks of 128 MiB, and distances to the others in order.
    fn machine(nodes: &[(u32, u64, &[u64], &[u32])]) -> Machine {
        let ids: Vec<NodeId> = nodes.iter().map(|&(id, ..)| NodeId(id)).collect();
        let node = |&(id, memory, blocks, distances): &(u32, u64, &[u64], &[u32])| {
            let node = NumaNode {
                cpus: CpuSet::new(),
                memory: Bytes::mib(memory),
                memory_blocks: blocks.to_vec(),
                distances: ids.iter().copied().zip(distances.iter().copied()).collect(),
                ..NumaNode::default()
            };
            (NodeId(id), node)
        };
        let nodes: BTreeMap<_, _> = nodes.iter().map(node).collect();
        Machine {
            possible_nodes: ids.into_iter().collect(),
            nodes,
            memory_block_size: Bytes::mib(128),
            ..Machine::default()
        }
    }

    fn homes(machine: &Machine, fake: Option<NodeId>) -> Vec<u16> {
        let table = Numbering::new(machine, fake).table(machine);
        machine.nodes.keys().map(|id| table.home[id.0 as usize]).collect()
    }

    #[test]
    fn cpus_without_memory_are_at_home_on_the_nearest_node_that_has_some() {
        let machine = machine(&[
            (0, 0, &[], &[10, 30, 20, 20]),
            (1, 512, &[0], &[30, 10, 40, 40]),
            (4, 512, &[1], &[20, 40, 10, 20]),
            (7, 512, &[2], &[20, 40, 20, 10]),
        ]);
        assert_eq!(homes(&machine, None), [2, 1, 2, 3], "node 4, index 2, is as near to node 0 as node 7");
        assert_eq!(count_homes(&Numbering::new(&machine, None).table(&machine)), 3);
        assert_eq!(homes(&machine, Some(NodeId(7))), [3; 4]);
        assert!(homes(&machine, Some(NodeId(9))).iter().all(|&home| home as usize > machine.nodes.len()));
    }

    #[test]
    fn node_ids_with_gaps_get_dense_indices() {
        let machine = machine(&[(0, 1, &[], &[]), (8, 1, &[], &[]), (252, 1, &[], &[])]);
        let nodes = Numbering::new(&machine, None);
        let table = nodes.table(&machine);
        assert_eq!([table.index[0], table.index[8], table.index[252]], [0, 1, 2]);
        assert_eq!((table.index[1], table.home[1]), (UNKNOWN_NODE, UNKNOWN_NODE));
        let allowed: NodeSet = "8,9".parse().unwrap();
        assert_eq!(nodes.mask_of(Some(&allowed)), [0b010, 0, 0, 0]);
        assert_eq!(nodes.mask_of(None), [u64::MAX; 4]);
    }

    #[test]
    fn nodes_that_come_later_get_the_next_indices_and_none_changes_hands() {
        let mut before = machine(&[(1, 1, &[], &[]), (3, 0, &[], &[]), (4, 1, &[], &[])]);
        before.possible_nodes = "0-4".parse().unwrap();
        let mut nodes = Numbering::new(&before, None);
        assert_eq!((nodes.ids().len(), nodes.capacity()), (3, 5));
        let nothing: NodeSet = NodeSet::new();

        // Node 0 comes, node 4 goes, node 3 gets memory.
        let after = machine(&[(0, 1, &[], &[]), (1, 1, &[], &[]), (3, 1, &[], &[])]);
        assert_eq!(nodes.extend(&after), nothing);
        assert_eq!(nodes.ids(), [1, 3, 4, 0].map(NodeId));
        let table = nodes.table(&after);
        assert_eq!(table.index[..5], [3, 0, UNKNOWN_NODE, 1, 2]);
        assert_eq!((table.home[3], table.home[0]), (1, 3), "each is its own home now");

        // Room for one more.
        let more = machine(&[(2, 1, &[], &[]), (5, 1, &[], &[]), (2000, 1, &[], &[])]);
        assert_eq!(nodes.extend(&more).to_string(), "5,2000");
        assert_eq!(nodes.ids().last(), Some(&NodeId(2)));
    }

    #[test]
    fn room_for_nodes_to_come_is_bounded() {
        let capacity = |online: &[u32], possible: &str| {
            let nodes: Vec<_> = online.iter().map(|&id| (id, 1, &[][..], &[][..])).collect();
            let mut machine = machine(&nodes);
            machine.possible_nodes = possible.parse().unwrap();
            Numbering::new(&machine, None).capacity()
        };
        assert_eq!(capacity(&[0, 1], "0-1"), 2);
        assert_eq!(capacity(&[0, 1], "0-255"), 10);
        assert_eq!(capacity(&[], ""), 1);
        assert_eq!(capacity(&(0..256).collect::<Vec<_>>(), "0-1023"), 256);
    }

    #[test]
    fn sections_that_no_node_has_are_unknown() {
        let two_nodes = machine(&[(0, 1, &[0, 1], &[]), (3, 1, &[3], &[])]);
        let sections = Sections::new(&two_nodes, &Numbering::new(&two_nodes, None)).unwrap();
        assert_eq!(sections.nodes, [1, 1, 0, 2]);
        assert_eq!(1u64 << sections.shift, SECTION_SIZE.0 / page_size() as u64);
        assert_eq!(sections.capacity(), 1 << 16);

        let one_node = machine(&[(0, 1, &[], &[])]);
        let all = Sections::new(&one_node, &Numbering::new(&one_node, None)).unwrap();
        assert_eq!((all.capacity(), all), (1, Sections { shift: ONE_SECTION, nodes: vec![1] }));
        let blind = machine(&[(0, 1, &[], &[]), (1, 1, &[], &[])]);
        assert_eq!(Sections::new(&blind, &Numbering::new(&blind, None)), Err(NoSections));

        let unread = Sections::new(&Machine::default(), &Numbering::new(&Machine::default(), None)).unwrap();
        assert_eq!((unread.nodes.len(), unread.shift, unread.capacity()), (0, sections.shift, 1 << 16));

        let large = machine(&[(0, 1, &[100_000, 1 << 40], &[])]);
        let sections = Sections::new(&large, &Numbering::new(&large, None)).unwrap();
        assert_eq!((sections.nodes.len(), sections.capacity()), (100_001, 200_002), "as much again may come");
    }
}
