//! The machine as plain data: NUMA nodes, CPUs, cores, sockets, last-level caches, memory.
//!
//! The readers make it from sysfs; [`Machine::builder`] makes synthetic ones for tests and
//! simulations. Users of this module need not know where it came from.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    set::{CpuId, CpuSet, NodeId, NodeSet},
    units::{Bytes, HugepageSize},
};

/// The distance of a node to itself (ACPI SLIT; `LOCAL_DISTANCE` of the kernel).
pub const LOCAL_DISTANCE: u32 = 10;
/// The distance between two nodes where the firmware has none (`REMOTE_DISTANCE` of the kernel).
pub const REMOTE_DISTANCE: u32 = 20;

/// Size of the sections of memory that [`Machine::memory_sections`] numbers.
pub const SECTION_SIZE: Bytes = Bytes::mib(128);

/// A host's CPUs and memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// The online NUMA nodes by id.
    pub nodes: BTreeMap<NodeId, NumaNode>,
    /// Nodes that may ever come online; at least the online ones.
    pub possible_nodes: NodeSet,
    /// The online CPUs by id.
    pub cpus: BTreeMap<CpuId, Cpu>,
    /// CPUs that may ever come online; at least the online ones.
    pub possible_cpus: CpuSet,
    /// CPUs kept from the scheduler's load balancing (`isolcpus=`).
    pub isolated_cpus: CpuSet,
    /// CPUs whose tick stops while one task runs (`nohz_full=`).
    pub nohz_full_cpus: CpuSet,
    /// CPUs of cores that are slower than the fastest of the machine (E-cores, LITTLE); empty where all are alike.
    pub efficiency_cpus: CpuSet,
    /// CPUs that do not reach the frequency of the fastest of the machine; empty where all are alike. `None` while the kernel
    /// does not say, as it changes the driver.
    pub lower_frequency_cpus: Option<CpuSet>,
    /// Size of the memory blocks that [`NumaNode::memory_blocks`] number. Zero where sysfs has none.
    pub memory_block_size: Bytes,
}

/// A NUMA node. It may have no CPUs (a memory-only node) or no memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// Its online CPUs.
    pub cpus: CpuSet,
    /// `MemTotal` of the node: usable memory, pages in hugepage pools included.
    pub memory: Bytes,
    /// Its hugepage pools by page size. Every size of the machine is listed, also where empty.
    pub hugepages: BTreeMap<HugepageSize, HugepagePool>,
    /// Relative distance to each node (10 = itself), as in the ACPI SLIT.
    pub distances: BTreeMap<NodeId, u32>,
    /// Numbers of the memory blocks on this node; block `n` starts at `n * memory_block_size`.
    pub memory_blocks: Vec<u64>,
    /// The kernel's memory tier of the node: N of `memory_tierN`. They are numbered by abstract distance, so the lower,
    /// the faster. `None` where the kernel reports none.
    pub memory_tier: Option<u32>,
}

/// Huge pages of one size on one node, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugepagePool {
    /// Pages in the pool (`nr_hugepages`).
    pub total: u64,
    /// Pages not in use (`free_hugepages`).
    pub free: u64,
    /// Pages above the configured number (`surplus_hugepages`).
    pub surplus: u64,
}

/// A physical core, named by its lowest logical CPU. Unique in the machine, unlike `core_id` of sysfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CoreId(pub u32);

/// A socket: `physical_package_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SocketId(pub u32);

/// A last-level cache, named by its lowest logical CPU. Kubernetes calls it the uncore cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CacheId(pub u32);

/// A logical CPU and what it shares with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// The NUMA node it belongs to.
    pub node: NodeId,
    /// Its core; CPUs with the same core are SMT siblings.
    pub core: CoreId,
    /// Its socket.
    pub socket: SocketId,
    /// Its last-level cache, where the platform reports one.
    pub last_level_cache: Option<CacheId>,
}

impl Machine {
    /// The ids of all nodes.
    pub fn node_ids(&self) -> NodeSet {
        self.nodes.keys().copied().collect()
    }

    /// The online CPUs.
    pub fn cpu_ids(&self) -> CpuSet {
        self.cpus.keys().copied().collect()
    }

    /// The CPUs of all these nodes. Nodes that the machine does not have count as empty.
    pub fn cpus_of(&self, nodes: &NodeSet) -> CpuSet {
        nodes.iter().filter_map(|node| self.nodes.get(&node)).flat_map(|node| node.cpus.iter()).collect()
    }

    /// The distance between two nodes, where the machine reports one.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        self.nodes.get(&from)?.distances.get(&to).copied()
    }

    /// The node of each section of physical memory, by section number: section `n` starts at
    /// `n *` [`SECTION_SIZE`].
    ///
    /// A section that two nodes share (a memory block may span nodes, or be smaller than a section) is
    /// skipped: its pages cannot be distinguished by their address.
    pub fn memory_sections(&self) -> impl Iterator<Item = (u64, NodeId)> + use<> {
        let mut sections: BTreeMap<u64, Option<NodeId>> = BTreeMap::new();
        let size = self.memory_block_size.0;
        for (&id, node) in &self.nodes {
            for (first, past) in node.memory_blocks.iter().filter_map(|&block| {
                let start = block.checked_mul(size)?;
                Some((start / SECTION_SIZE.0, start.checked_add(size)?.div_ceil(SECTION_SIZE.0)))
            }) {
                for section in first..past {
                    sections
                        .entry(section)
                        .and_modify(|owner| *owner = owner.filter(|&owner| owner == id))
                        .or_insert(Some(id));
                }
            }
        }
        sections.into_iter().filter_map(|(section, node)| Some((section, node?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sections(block: Bytes, blocks: &[(u32, &[u64])]) -> Vec<(u64, u32)> {
        let nodes = blocks.iter().map(|&(id, blocks)| {
            (NodeId(id), NumaNode { memory_blocks: blocks.to_vec(), ..NumaNode::default() })
        });
        let machine = Machine { nodes: nodes.collect(), memory_block_size: block, ..Machine::default() };
        machine.memory_sections().map(|(section, node)| (section, node.0)).collect()
    }

    #[test]
    fn each_section_has_the_node_of_its_block() {
        assert_eq!(sections(Bytes::mib(128), &[(0, &[0, 1]), (1, &[4])]), [(0, 0), (1, 0), (4, 1)]);
        assert_eq!(sections(Bytes::mib(256), &[(0, &[0]), (3, &[2])]), [(0, 0), (1, 0), (4, 3), (5, 3)]);
    }

    #[test]
    fn a_section_of_two_nodes_is_left_out() {
        assert_eq!(sections(Bytes::mib(128), &[(0, &[0, 1]), (1, &[1, 2])]), [(0, 0), (2, 1)]);
        assert_eq!(sections(Bytes::mib(16), &[(0, &[0, 1, 8]), (1, &[9, 16])]), [(0, 0), (2, 1)]);
    }

    #[test]
    fn without_blocks_or_beyond_all_addresses_there_is_none() {
        assert_eq!(sections(Bytes(0), &[(0, &[0, 1])]), []);
        assert_eq!(sections(Bytes::gib(2), &[(0, &[u64::MAX])]), []);
    }
}
