//! The numbering of the machine's nodes, and its extension when nodes and memory are added.
//!
//! Maps are indexed by dense *node indices* (see `numaward_abi`). A node gets its index when it is first seen and keeps
//! it, so that its counters stay its own. Maps cannot grow: rows and sections for nodes that may come online, and for
//! memory at higher addresses, are reserved at the start.
//!
//! `NODE_TABLE` maps a node's id to its index and to the memory node of its CPUs. `SECTION_NODE`, which the classic
//! tracepoint needs, maps a section of physical memory to the index of its node.

use std::{collections::BTreeMap, io};

use numaward_abi::{MAX_NODE_IDS, MAX_NODES, NodeTable, UNKNOWN_NODE};
use numaward_topology::{Machine, NodeId, NodeSet, machine::SECTION_SIZE};
use rustix::param::page_size;

/// The maximum number of reserved rows. Firmware may list far more possible nodes than will ever come online.
const SPARE_NODES: usize = 8;

/// The minimum number of sections in `SECTION_NODE`: 8 TiB of physical address space in 512 KiB.
const MIN_SECTIONS: usize = 1 << 16;

/// The maximum number of sections in `SECTION_NODE`: 512 TiB.
const MAX_SECTIONS: usize = 1 << 22;

/// The shift that makes all memory one section.
const ONE_SECTION: u32 = 63;

/// The assigned node indices.
#[derive(Debug, Default)]
pub(crate) struct NodeNumbering {
    /// Node ids by node index.
    ids: Vec<NodeId>,
    /// The maximum number of node indices.
    capacity: usize,
    /// The memory node of every CPU, in tests.
    fake_memory_node: Option<NodeId>,
}

impl NodeNumbering {
    /// Numbers the machine's nodes in the order of their ids.
    pub(crate) fn new(machine: &Machine, fake_memory_node: Option<NodeId>) -> Self {
        let online = machine.nodes.len();
        let spare = machine.possible_nodes.len().saturating_sub(online).min(SPARE_NODES);
        let capacity = (online + spare).clamp(1, MAX_NODES);
        let mut numbering = Self { ids: Vec::new(), capacity, fake_memory_node };
        numbering.extend(machine);
        numbering
    }

    /// Numbers new nodes. Returns those for which there is no room.
    pub(crate) fn extend(&mut self, machine: &Machine) -> NodeSet {
        let mut no_room = NodeSet::new();
        for &id in machine.nodes.keys() {
            if self.ids.contains(&id) {
                continue;
            }
            if self.ids.len() < self.capacity && (id.0 as usize) < MAX_NODE_IDS {
                self.ids.push(id);
            } else {
                no_room.insert(id);
            }
        }
        no_room
    }

    pub(crate) fn ids(&self) -> &[NodeId] {
        &self.ids
    }

    /// Returns the maximum number of node indices, which is the number of rows per slot.
    pub(crate) fn capacity(&self) -> u32 {
        u32::try_from(self.capacity).unwrap_or(u32::MAX)
    }

    fn indices(&self) -> BTreeMap<NodeId, u16> {
        self.ids.iter().copied().zip(0..).collect()
    }

    /// Returns a mask with a bit for each node index; all bits are set without a guarantee. Nodes without an index are
    /// ignored: no page there is counted.
    pub(crate) fn allowed_mask(&self, allowed: Option<&NodeSet>) -> [u64; MAX_NODES / 64] {
        let Some(allowed) = allowed else { return [u64::MAX; MAX_NODES / 64] };
        let mut mask = [0; MAX_NODES / 64];
        for (index, _) in self.ids.iter().enumerate().filter(|&(_, &node)| allowed.contains(node)) {
            mask[index / 64] |= 1 << (index % 64);
        }
        mask
    }

    /// Returns the contents of `NODE_TABLE`: for each numbered node its index, and that of the [`nearest_memory_node`].
    pub(crate) fn table(&self, machine: &Machine) -> NodeTable {
        let index_of = self.indices();
        let mut table =
            NodeTable { index: [UNKNOWN_NODE; MAX_NODE_IDS], memory_node: [UNKNOWN_NODE; MAX_NODE_IDS] };
        for (&id, &index) in &index_of {
            let memory_node =
                self.fake_memory_node.unwrap_or_else(|| nearest_memory_node(machine, id, &self.ids));
            let memory_node = index_of.get(&memory_node).copied();
            table.index[id.0 as usize] = index;
            // A test's node that the machine does not have gets the index of no row: all pages are remote to it.
            table.memory_node[id.0 as usize] = memory_node.unwrap_or(UNKNOWN_NODE - 1);
        }
        table
    }
}

/// Returns the memory node of a node's CPUs: the node itself or, if it has no memory, the nearest one of `all` with
/// memory; of several, the one with the lowest id.
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

pub(crate) fn count_memory_nodes(table: &NodeTable) -> u32 {
    let memory_nodes: std::collections::BTreeSet<_> =
        table.memory_node.iter().filter(|&&memory_node| memory_node != UNKNOWN_NODE).collect();
    u32::try_from(memory_nodes.len()).unwrap_or(u32::MAX)
}

/// The memory blocks are unknown, so the node of a page cannot be derived from its address.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the kernel does not show which node each memory block is on; it needs CONFIG_MEMORY_HOTPLUG")]
pub struct NoSections;

/// The contents of `SECTION_NODE`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Sections {
    /// The shift that turns a page frame number into a section number.
    pub(crate) shift: u32,
    /// The index of the node plus one, by section number; 0 if unknown.
    pub(crate) nodes: Vec<u16>,
}

/// Returns one more than the highest possible CPU, as ids may have gaps.
pub(crate) fn count_cpus(machine: &Machine) -> io::Result<u32> {
    let highest = machine.possible_cpus.iter().last().map_or(0, |cpu| cpu.0 as usize + 1);
    let cpus = aya::util::nr_cpus().map_err(|(_, error)| error)?.max(highest);
    Ok(u32::try_from(cpus).unwrap_or(u32::MAX))
}

impl Sections {
    /// Returns the sections for a probe that does not use them.
    pub(crate) fn unused() -> Self {
        Self { shift: ONE_SECTION, nodes: Vec::new() }
    }

    pub(crate) fn new(machine: &Machine, nodes: &NodeNumbering) -> Result<Self, NoSections> {
        let index_of = nodes.indices();
        let mut by_section = Vec::new();
        for (section, node) in machine.memory_sections() {
            let section = usize::try_from(section).ok().filter(|&section| section < MAX_SECTIONS);
            let (Some(section), Some(index)) = (section, index_of.get(&node)) else { continue };
            by_section.resize(by_section.len().max(section + 1), 0);
            by_section[section] = index + 1;
        }
        match (by_section.len(), machine.nodes.len()) {
            // With one node, all pages are on it.
            (0, 1) => Ok(Self { shift: ONE_SECTION, nodes: vec![1] }),
            (0, 2..) => Err(NoSections),
            _ => Ok(Self { shift: SECTION_SIZE.0.ilog2() - page_size().ilog2(), nodes: by_section }),
        }
    }

    /// Returns the number of entries of the map, with room for memory that is added later.
    pub(crate) fn capacity(&self) -> u32 {
        let entries = match self.shift {
            ONE_SECTION => 1,
            _ => (2 * self.nodes.len()).clamp(MIN_SECTIONS, MAX_SECTIONS),
        };
        u32::try_from(entries).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use numaward_topology::{Bytes, CpuSet, machine::NumaNode};

    use super::*;

    /// Creates a machine from nodes with their memory in MiB, memory blocks of 128 MiB, and distances to the nodes in
    /// order.
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

    fn memory_nodes(machine: &Machine, fake: Option<NodeId>) -> Vec<u16> {
        let table = NodeNumbering::new(machine, fake).table(machine);
        machine.nodes.keys().map(|id| table.memory_node[id.0 as usize]).collect()
    }

    #[test]
    fn cpus_use_nearest_node_with_memory() {
        let machine = machine(&[
            (0, 0, &[], &[10, 30, 20, 20]),
            (1, 512, &[0], &[30, 10, 40, 40]),
            (4, 512, &[1], &[20, 40, 10, 20]),
            (7, 512, &[2], &[20, 40, 20, 10]),
        ]);
        assert_eq!(
            memory_nodes(&machine, None),
            [2, 1, 2, 3],
            "node 4, index 2, is as near to node 0 as node 7"
        );
        assert_eq!(count_memory_nodes(&NodeNumbering::new(&machine, None).table(&machine)), 3);
        assert_eq!(memory_nodes(&machine, Some(NodeId(7))), [3; 4]);
        assert!(
            memory_nodes(&machine, Some(NodeId(9)))
                .iter()
                .all(|&memory_node| memory_node as usize > machine.nodes.len())
        );
    }

    #[test]
    fn node_ids_get_dense_indices() {
        let machine = machine(&[(0, 1, &[], &[]), (8, 1, &[], &[]), (252, 1, &[], &[])]);
        let nodes = NodeNumbering::new(&machine, None);
        let table = nodes.table(&machine);
        assert_eq!([table.index[0], table.index[8], table.index[252]], [0, 1, 2]);
        assert_eq!((table.index[1], table.memory_node[1]), (UNKNOWN_NODE, UNKNOWN_NODE));
        let allowed: NodeSet = "8,9".parse().unwrap();
        assert_eq!(nodes.allowed_mask(Some(&allowed)), [0b010, 0, 0, 0]);
        assert_eq!(nodes.allowed_mask(None), [u64::MAX; 4]);
    }

    #[test]
    fn added_nodes_get_next_indices() {
        let mut before = machine(&[(1, 1, &[], &[]), (3, 0, &[], &[]), (4, 1, &[], &[])]);
        before.possible_nodes = "0-4".parse().unwrap();
        let mut nodes = NodeNumbering::new(&before, None);
        assert_eq!((nodes.ids().len(), nodes.capacity()), (3, 5));
        let nothing: NodeSet = NodeSet::new();

        // Node 0 is added, node 4 is removed, node 3 gets memory.
        let after = machine(&[(0, 1, &[], &[]), (1, 1, &[], &[]), (3, 1, &[], &[])]);
        assert_eq!(nodes.extend(&after), nothing);
        assert_eq!(nodes.ids(), [1, 3, 4, 0].map(NodeId));
        let table = nodes.table(&after);
        assert_eq!(table.index[..5], [3, 0, UNKNOWN_NODE, 1, 2]);
        assert_eq!((table.memory_node[3], table.memory_node[0]), (1, 3), "each is its own memory node now");

        // There is room for one more node.
        let more = machine(&[(2, 1, &[], &[]), (5, 1, &[], &[]), (2000, 1, &[], &[])]);
        assert_eq!(nodes.extend(&more).to_string(), "5,2000");
        assert_eq!(nodes.ids().last(), Some(&NodeId(2)));
    }

    #[test]
    fn reserved_rows_are_limited() {
        let capacity = |online: &[u32], possible: &str| {
            let nodes: Vec<_> = online.iter().map(|&id| (id, 1, &[][..], &[][..])).collect();
            let mut machine = machine(&nodes);
            machine.possible_nodes = possible.parse().unwrap();
            NodeNumbering::new(&machine, None).capacity()
        };
        assert_eq!(capacity(&[0, 1], "0-1"), 2);
        assert_eq!(capacity(&[0, 1], "0-255"), 10);
        assert_eq!(capacity(&[], ""), 1);
        assert_eq!(capacity(&(0..256).collect::<Vec<_>>(), "0-1023"), 256);
    }

    #[test]
    fn sections_without_node_are_unknown() {
        let two_nodes = machine(&[(0, 1, &[0, 1], &[]), (3, 1, &[3], &[])]);
        let sections = Sections::new(&two_nodes, &NodeNumbering::new(&two_nodes, None)).unwrap();
        assert_eq!(sections.nodes, [1, 1, 0, 2]);
        assert_eq!(1u64 << sections.shift, SECTION_SIZE.0 / page_size() as u64);
        assert_eq!(sections.capacity(), 1 << 16);

        let one_node = machine(&[(0, 1, &[], &[])]);
        let all = Sections::new(&one_node, &NodeNumbering::new(&one_node, None)).unwrap();
        assert_eq!((all.capacity(), all), (1, Sections { shift: ONE_SECTION, nodes: vec![1] }));
        let blind = machine(&[(0, 1, &[], &[]), (1, 1, &[], &[])]);
        assert_eq!(Sections::new(&blind, &NodeNumbering::new(&blind, None)), Err(NoSections));

        let unread =
            Sections::new(&Machine::default(), &NodeNumbering::new(&Machine::default(), None)).unwrap();
        assert_eq!((unread.nodes.len(), unread.shift, unread.capacity()), (0, sections.shift, 1 << 16));

        let large = machine(&[(0, 1, &[100_000, 1 << 40], &[])]);
        let sections = Sections::new(&large, &NodeNumbering::new(&large, None)).unwrap();
        assert_eq!((sections.nodes.len(), sections.capacity()), (100_001, 200_002), "room for as much again");
    }
}
