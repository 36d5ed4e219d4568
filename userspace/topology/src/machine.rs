//! The machine as plain data: NUMA nodes, CPUs, cores, sockets, last-level caches, memory.
//!
//! The readers create it from sysfs; [`Machine::builder`] creates synthetic machines for tests and simulations.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    set::{CpuId, CpuSet, NodeId, NodeSet},
    units::{Bytes, HugepageSize},
};

/// The distance of a node to itself (ACPI SLIT; the kernel's `LOCAL_DISTANCE`).
pub const LOCAL_DISTANCE: u32 = 10;
/// The distance between two nodes if the firmware reports none (the kernel's `REMOTE_DISTANCE`).
pub const REMOTE_DISTANCE: u32 = 20;

/// The size of a section of [`Machine::memory_sections`].
pub const SECTION_SIZE: Bytes = Bytes::mib(128);

/// The CPUs and the memory of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// The online NUMA nodes by id.
    pub nodes: BTreeMap<NodeId, NumaNode>,
    /// Nodes that can come online; includes the online ones.
    pub possible_nodes: NodeSet,
    /// The online CPUs by id.
    pub cpus: BTreeMap<CpuId, Cpu>,
    /// CPUs that can come online; includes the online ones.
    pub possible_cpus: CpuSet,
    /// CPUs that are excluded from the scheduler's load balancing (`isolcpus=`).
    pub isolated_cpus: CpuSet,
    /// CPUs that stop their tick while one task runs (`nohz_full=`).
    pub nohz_full_cpus: CpuSet,
    /// CPUs of slower cores than the fastest ones of the machine (E-cores, LITTLE); empty if all are alike.
    pub efficiency_cpus: CpuSet,
    /// CPUs that do not reach the frequency of the fastest ones of the machine; empty if all are alike. `None` while
    /// the kernel cannot report frequencies because the driver changes.
    pub lower_frequency_cpus: Option<CpuSet>,
    /// The size of the memory blocks in [`NumaNode::memory_blocks`]; zero if sysfs has none.
    pub memory_block_size: Bytes,
}

/// A NUMA node. It may have no CPUs (a memory-only node) or no memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNode {
    /// The online CPUs.
    pub cpus: CpuSet,
    /// `MemTotal` of the node: usable memory, including pages in hugepage pools.
    pub memory: Bytes,
    /// Hugepage pools by page size. Every size of the machine is listed, even if the pool is empty.
    pub hugepages: BTreeMap<HugepageSize, HugepagePool>,
    /// The relative distance to each node (10 to itself), as in the ACPI SLIT.
    pub distances: BTreeMap<NodeId, u32>,
    /// The numbers of the memory blocks on this node; block `n` starts at `n * memory_block_size`.
    pub memory_blocks: Vec<u64>,
    /// The kernel's memory tier: N of `memory_tierN`. A lower number stands for faster memory. `None` if the kernel
    /// reports none.
    pub memory_tier: Option<u32>,
}

/// A hugepage pool: the pages of one size on one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugepagePool {
    /// Pages in the pool (`nr_hugepages`).
    pub total: u64,
    /// Unused pages (`free_hugepages`).
    pub free: u64,
    /// Pages above the configured number (`surplus_hugepages`).
    pub surplus: u64,
}

/// A physical core, identified by its lowest logical CPU. Unique in the machine, unlike `core_id` of sysfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CoreId(pub u32);

/// A socket: `physical_package_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SocketId(pub u32);

/// A last-level cache, identified by its lowest logical CPU. Kubernetes calls it the uncore cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CacheId(pub u32);

/// A logical CPU, with the core, the socket and the cache that it shares with other CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    pub node: NodeId,
    /// The core; CPUs with the same core are SMT siblings.
    pub core: CoreId,
    pub socket: SocketId,
    /// The last-level cache, if the platform reports one.
    pub last_level_cache: Option<CacheId>,
}

impl Machine {
    /// Returns the ids of all nodes.
    pub fn node_ids(&self) -> NodeSet {
        self.nodes.keys().copied().collect()
    }

    /// Returns the online CPUs.
    pub fn cpu_ids(&self) -> CpuSet {
        self.cpus.keys().copied().collect()
    }

    /// Returns the CPUs of several nodes. Nodes that the machine does not have are ignored.
    pub fn cpus_of(&self, nodes: &NodeSet) -> CpuSet {
        nodes.iter().filter_map(|node| self.nodes.get(&node)).flat_map(|node| node.cpus.iter()).collect()
    }

    /// Returns the distance between two nodes, if the machine reports one.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        self.nodes.get(&from)?.distances.get(&to).copied()
    }

    /// Returns the node of each section of physical memory, by section number: section `n` starts at `n *`
    /// [`SECTION_SIZE`].
    ///
    /// A section that two nodes share is skipped, because its pages cannot be distinguished by their address. This
    /// happens if a memory block spans nodes or is smaller than a section.
    pub fn memory_sections(&self) -> impl Iterator<Item = (u64, NodeId)> + use<> {
        let mut sections: BTreeMap<u64, Option<NodeId>> = BTreeMap::new();
        let size = self.memory_block_size.0;
        for (&id, node) in &self.nodes {
            for (first, end) in node.memory_blocks.iter().filter_map(|&block| {
                let start = block.checked_mul(size)?;
                Some((start / SECTION_SIZE.0, start.checked_add(size)?.div_ceil(SECTION_SIZE.0)))
            }) {
                for section in first..end {
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
    fn section_of_two_nodes_is_skipped() {
        assert_eq!(sections(Bytes::mib(128), &[(0, &[0, 1]), (1, &[1, 2])]), [(0, 0), (2, 1)]);
        assert_eq!(sections(Bytes::mib(16), &[(0, &[0, 1, 8]), (1, &[9, 16])]), [(0, 0), (2, 1)]);
    }

    #[test]
    fn invalid_blocks_have_no_sections() {
        assert_eq!(sections(Bytes(0), &[(0, &[0, 1])]), []);
        assert_eq!(sections(Bytes::gib(2), &[(0, &[u64::MAX])]), []);
    }
}
