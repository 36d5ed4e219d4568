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

/// A host's CPUs and memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// The online NUMA nodes by id.
    pub nodes: BTreeMap<NodeId, Node>,
    /// The online CPUs by id.
    pub cpus: BTreeMap<CpuId, Cpu>,
    /// CPUs that may ever come online; at least the online ones.
    pub possible_cpus: CpuSet,
    /// CPUs kept from the scheduler's load balancing (`isolcpus=`).
    pub isolated_cpus: CpuSet,
    /// Size of the memory blocks that [`Node::memory_blocks`] number. Zero where sysfs has none.
    pub memory_block_size: Bytes,
}

/// A NUMA node. It may have no CPUs (a memory-only node) or no memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
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
}
