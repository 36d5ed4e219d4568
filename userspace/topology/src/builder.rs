//! Synthetic machines for tests and simulations.
//!
//! The builder describes a regular machine (all nodes alike) and then overrides single nodes. Nodes with CPUs are
//! assigned to sockets in id order. CPU ids are assigned to nodes in id order: first one thread of every core, then the
//! siblings (as x86 firmware does). Memory starts at address 0, in node order.
//!
//! [`MachineBuilder::build`] returns the machine, or an error that names the invalid value. The machine has the same
//! properties as one that is read from sysfs: every node has its distance to every node and lists every hugepage size.
//!
//! ```
//! use numaward_topology::{Bytes, HugepageSize, Machine, NodeId};
//!
//! // Two sockets of two nodes, and a memory-only node 8 as CXL memory makes it.
//! let machine = Machine::builder()
//!     .nodes(4)
//!     .sockets(2)
//!     .cores_per_node(8)
//!     .smt(2)
//!     .memory(Bytes::gib(64))
//!     .hugepages(HugepageSize(Bytes::gib(1)), 4)
//!     .node(NodeId(8), |node| node.cores(0).memory(Bytes::gib(256)))
//!     .build()?;
//! assert_eq!(machine.nodes[&NodeId(1)].cpus.to_string(), "8-15,40-47");
//! assert!(machine.nodes[&NodeId(8)].cpus.is_empty());
//! # Ok::<(), numaward_topology::builder::BuildError>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    machine::{
        CacheId, CoreId, Cpu, HugepagePool, LOCAL_DISTANCE, Machine, NumaNode, REMOTE_DISTANCE, SocketId,
    },
    set::{CpuId, CpuSet, MAX_ID, NodeId},
    units::{Bytes, HugepageSize},
};

/// The description of a machine; [`Machine::builder`] creates it.
///
/// Default: one socket, one node with one core of one thread, 1 GiB, no hugepages, one last-level cache per node, and
/// the kernel's default distances (10 and 20).
#[derive(Clone, Debug)]
pub struct MachineBuilder {
    node_ids: BTreeSet<NodeId>,
    common: Spec,
    caches_per_node: u32,
    overrides: BTreeMap<NodeId, NodeBuilder>,
    sockets: u32,
    smt: u32,
    distances: Distances,
    isolated_cpus: CpuSet,
    nohz_full_cpus: CpuSet,
    efficiency_cpus: CpuSet,
    lower_frequency_cpus: CpuSet,
}

/// The description of one node; [`MachineBuilder::node`] creates it. Values that are not set are the machine's.
#[derive(Clone, Debug, Default)]
pub struct NodeBuilder {
    cores: Option<u32>,
    memory: Option<Bytes>,
    hugepages: BTreeMap<HugepageSize, u64>,
}

#[derive(Clone, Debug)]
enum Distances {
    BySocket { within: u32, between: u32 },
    Matrix(Vec<Vec<u32>>),
}

/// An error in a machine's description: the invalid value and the expected one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BuildError(String);

impl Machine {
    /// Starts the description of a synthetic machine.
    pub fn builder() -> MachineBuilder {
        MachineBuilder {
            node_ids: BTreeSet::from([NodeId(0)]),
            common: Spec { cores: 1, memory: Bytes::gib(1), hugepages: BTreeMap::new() },
            caches_per_node: 1,
            overrides: BTreeMap::new(),
            sockets: 1,
            smt: 1,
            distances: Distances::BySocket { within: REMOTE_DISTANCE, between: REMOTE_DISTANCE },
            isolated_cpus: CpuSet::new(),
            nohz_full_cpus: CpuSet::new(),
            efficiency_cpus: CpuSet::new(),
            lower_frequency_cpus: CpuSet::new(),
        }
    }
}

impl MachineBuilder {
    /// Sets the nodes to 0 to `count - 1`.
    #[must_use]
    pub fn nodes(self, count: u32) -> Self {
        // At most one more than allowed: `build` then refuses it, without a list of four billion ids.
        self.node_ids((0..count.min(MAX_ID + 2)).map(NodeId))
    }

    /// Sets the nodes. Their ids need not be contiguous.
    #[must_use]
    pub fn node_ids(mut self, ids: impl IntoIterator<Item = NodeId>) -> Self {
        self.node_ids = ids.into_iter().collect();
        self
    }

    /// Sets the number of sockets. With fewer sockets than nodes, each has several nodes; with more, each node has
    /// several.
    #[must_use]
    pub fn sockets(mut self, count: u32) -> Self {
        self.sockets = count;
        self
    }

    /// Sets the number of physical cores of each node.
    #[must_use]
    pub fn cores_per_node(mut self, count: u32) -> Self {
        self.common.cores = count;
        self
    }

    /// Sets the number of threads of each core.
    #[must_use]
    pub fn smt(mut self, threads: u32) -> Self {
        self.smt = threads;
        self
    }

    /// Sets the number of last-level caches of each node (one per CCX on AMD); 0 stands for a platform that reports
    /// none.
    #[must_use]
    pub fn caches_per_node(mut self, count: u32) -> Self {
        self.caches_per_node = count;
        self
    }

    /// Sets the memory of each node.
    #[must_use]
    pub fn memory(mut self, bytes: Bytes) -> Self {
        self.common.memory = bytes;
        self
    }

    /// Sets the number of hugepages of one size in the pool of each node, all of them free.
    #[must_use]
    pub fn hugepages(mut self, size: HugepageSize, pages: u64) -> Self {
        self.common.hugepages.insert(size, pages);
        self
    }

    /// Overrides values of one node. Adds the node if the machine does not have it yet.
    #[must_use]
    pub fn node(mut self, id: NodeId, describe: impl FnOnce(NodeBuilder) -> NodeBuilder) -> Self {
        self.node_ids.insert(id);
        let node = describe(self.overrides.remove(&id).unwrap_or_default());
        self.overrides.insert(id, node);
        self
    }

    /// Sets the distances, one row per node in id order.
    #[must_use]
    pub fn distances<R: AsRef<[u32]>>(mut self, rows: impl IntoIterator<Item = R>) -> Self {
        self.distances = Distances::Matrix(rows.into_iter().map(|row| row.as_ref().to_vec()).collect());
        self
    }

    /// Sets the distances between two nodes of one socket, and between nodes of two sockets (such as 12 and 32 on AMD).
    /// A node without CPUs belongs to no socket and is as far away as another socket.
    #[must_use]
    pub fn socket_distances(mut self, within: u32, between: u32) -> Self {
        self.distances = Distances::BySocket { within, between };
        self
    }

    /// Sets the CPUs that are excluded from the scheduler's load balancing.
    #[must_use]
    pub fn isolated_cpus(mut self, cpus: CpuSet) -> Self {
        self.isolated_cpus = cpus;
        self
    }

    /// Sets the CPUs that stop their tick while one task runs.
    #[must_use]
    pub fn nohz_full_cpus(mut self, cpus: CpuSet) -> Self {
        self.nohz_full_cpus = cpus;
        self
    }

    /// Sets the CPUs of slower cores.
    #[must_use]
    pub fn efficiency_cpus(mut self, cpus: CpuSet) -> Self {
        self.efficiency_cpus = cpus;
        self
    }

    /// Sets the CPUs that do not reach the highest frequency.
    #[must_use]
    pub fn lower_frequency_cpus(mut self, cpus: CpuSet) -> Self {
        self.lower_frequency_cpus = cpus;
        self
    }

    /// Returns the machine.
    ///
    /// # Errors
    ///
    /// A value is invalid; the error names the first one.
    pub fn build(self) -> Result<Machine, BuildError> {
        let specs = self.specs()?;
        let cpus = self.cpus(&specs)?;
        let distances = self.node_distances(&specs, &cpus)?;
        let online: CpuSet = cpus.keys().copied().collect();
        for (cpus, what) in [
            (&self.isolated_cpus, "isolated"),
            (&self.nohz_full_cpus, "without a tick"),
            (&self.efficiency_cpus, "of slower cores"),
            (&self.lower_frequency_cpus, "of a lower frequency"),
        ] {
            let missing = cpus - &online;
            if !missing.is_empty() {
                let text = format!("CPUs {missing} are {what}, but the machine has only {online}");
                return Err(BuildError(text));
            }
        }

        let total = specs.values().fold(0, |sum: u64, spec| sum.saturating_add(spec.memory.0));
        // The same rule as on x86: 128 MiB below 64 GiB, else 2 GiB.
        let block = if total < Bytes::gib(64).0 { Bytes::mib(128) } else { Bytes::gib(2) };
        let mut next_block = 0;
        let nodes: BTreeMap<NodeId, NumaNode> = specs
            .iter()
            .zip(distances)
            .map(|((&id, spec), distances)| {
                let first = next_block;
                next_block += spec.memory.0.div_ceil(block.0);
                let node = NumaNode {
                    cpus: cpus.iter().filter(|(_, cpu)| cpu.node == id).map(|(&id, _)| id).collect(),
                    memory: spec.memory,
                    hugepages: spec
                        .hugepages
                        .iter()
                        .map(|(&size, &pages)| (size, HugepagePool { total: pages, free: pages, surplus: 0 }))
                        .collect(),
                    distances,
                    memory_blocks: (first..next_block).collect(),
                    memory_tier: None,
                };
                (id, node)
            })
            .collect();
        Ok(Machine {
            possible_nodes: nodes.keys().copied().collect(),
            nodes,
            cpus,
            possible_cpus: online,
            isolated_cpus: self.isolated_cpus,
            nohz_full_cpus: self.nohz_full_cpus,
            efficiency_cpus: self.efficiency_cpus,
            lower_frequency_cpus: Some(self.lower_frequency_cpus),
            memory_block_size: block,
        })
    }

    /// Returns the values of each node, defaults included, after checking each value.
    fn specs(&self) -> Result<BTreeMap<NodeId, Spec>, BuildError> {
        for (what, value) in [("sockets", self.sockets), ("smt", self.smt)] {
            if value == 0 {
                return Err(BuildError(format!("{what} is 0 (expected at least 1)")));
            }
        }
        let no_nodes = || BuildError("the machine has no nodes (expected at least one)".to_owned());
        let highest = self.node_ids.last().ok_or_else(no_nodes)?;
        if highest.0 > MAX_ID {
            return Err(BuildError(format!("node id {highest} is above {MAX_ID}")));
        }
        let overrides = self.overrides.values().map(|node| &node.hugepages);
        let sizes: BTreeSet<HugepageSize> =
            overrides.chain([&self.common.hugepages]).flat_map(BTreeMap::keys).copied().collect();
        if let Some(&size) = sizes.iter().find(|size| !size.0.0.is_power_of_two() || size.0 <= Bytes::kib(4))
        {
            let text = format!("{size} is not a hugepage size (expected a power of two above 4Ki)");
            return Err(BuildError(text));
        }

        let mut specs = BTreeMap::new();
        for &id in &self.node_ids {
            let own = self.overrides.get(&id);
            let cores = own.and_then(|node| node.cores).unwrap_or(self.common.cores);
            let memory = own.and_then(|node| node.memory).unwrap_or(self.common.memory);
            let caches = self.caches_per_node;
            if caches > 0 && !cores.is_multiple_of(caches) {
                return Err(uneven_error(id, cores, caches, "last-level caches"));
            }
            let hugepages: BTreeMap<HugepageSize, u64> = sizes
                .iter()
                .map(|&size| {
                    let own = own.and_then(|node| node.hugepages.get(&size));
                    (size, own.or(self.common.hugepages.get(&size)).copied().unwrap_or(0))
                })
                .collect();
            let pools = hugepages
                .iter()
                .fold(0, |sum: u64, (size, &pages)| sum.saturating_add(pages.saturating_mul(size.0.0)));
            if pools > memory.0 {
                let pools = Bytes(pools);
                let text = format!("node {id} has {memory} of memory but {pools} in hugepage pools");
                return Err(BuildError(text));
            }
            specs.insert(id, Spec { cores, memory, hugepages });
        }
        Ok(specs)
    }

    /// Assigns CPU ids, cores, sockets and caches to the nodes.
    fn cpus(&self, specs: &BTreeMap<NodeId, Spec>) -> Result<BTreeMap<CpuId, Cpu>, BuildError> {
        let with_cpus: Vec<(NodeId, &Spec)> =
            specs.iter().filter(|(_, spec)| spec.cores > 0).map(|(&id, spec)| (id, spec)).collect();
        let cores: u64 = with_cpus.iter().map(|(_, spec)| u64::from(spec.cores)).sum();
        let threads = cores.saturating_mul(self.smt.into());
        let (Ok(cores), true) = (u32::try_from(cores), threads <= u64::from(MAX_ID) + 1) else {
            return Err(BuildError(format!("number of CPUs {threads} is above {MAX_ID}")));
        };
        let node_count = u32::try_from(with_cpus.len()).unwrap_or(u32::MAX);
        if node_count == 0 {
            let text = "no node has a CPU (expected at least one node with cores)";
            return Err(BuildError(text.to_owned()));
        }
        if self.sockets > node_count && !self.sockets.is_multiple_of(node_count) {
            let text = format!(
                "{} sockets cannot be divided among {node_count} nodes with CPUs (expected at most {node_count}, or a \
                 multiple of it)",
                self.sockets
            );
            return Err(BuildError(text));
        }
        let sockets_per_node = (self.sockets / node_count).max(1);

        let cpu_id = |core: u32, thread: u32| CpuId(thread * cores + core);
        let mut cpus = BTreeMap::new();
        let mut first_core = 0;
        for ((node, spec), rank) in with_cpus.into_iter().zip(0u32..) {
            if !spec.cores.is_multiple_of(sockets_per_node) {
                return Err(uneven_error(node, spec.cores, sockets_per_node, "sockets"));
            }
            let cores_per_socket = spec.cores / sockets_per_node;
            for index in 0..spec.cores {
                let socket = if self.sockets > node_count {
                    rank * sockets_per_node + index / cores_per_socket
                } else {
                    rank * self.sockets / node_count
                };
                let cache = (self.caches_per_node > 0).then(|| {
                    let cores_per_cache = spec.cores / self.caches_per_node;
                    CacheId(cpu_id(first_core + index / cores_per_cache * cores_per_cache, 0).0)
                });
                let core = CoreId(cpu_id(first_core + index, 0).0);
                for thread in 0..self.smt {
                    let cpu = Cpu { node, core, socket: SocketId(socket), last_level_cache: cache };
                    cpus.insert(cpu_id(first_core + index, thread), cpu);
                }
            }
            first_core += spec.cores;
        }
        Ok(cpus)
    }

    /// Returns the distances from each node to each node, in id order.
    fn node_distances(
        &self,
        specs: &BTreeMap<NodeId, Spec>,
        cpus: &BTreeMap<CpuId, Cpu>,
    ) -> Result<Vec<BTreeMap<NodeId, u32>>, BuildError> {
        let sockets: BTreeMap<NodeId, SocketId> = cpus.values().map(|cpu| (cpu.node, cpu.socket)).collect();
        let nodes = specs.len();
        if let Distances::Matrix(rows) = &self.distances {
            let columns = |row| rows.get(row).map_or(0, Vec::len);
            if let Some(row) = (0..nodes.max(rows.len())).find(|&row| row >= nodes || columns(row) != nodes) {
                return Err(BuildError(format!(
                    "row {row} of the distances has {} values (expected {nodes} rows and columns, one a node)",
                    columns(row)
                )));
            }
        }
        let mut all = Vec::with_capacity(nodes);
        for (row, &from) in specs.keys().enumerate() {
            let mut distances = BTreeMap::new();
            for (column, &to) in specs.keys().enumerate() {
                let distance = match &self.distances {
                    Distances::Matrix(rows) => rows[row][column],
                    Distances::BySocket { .. } if from == to => LOCAL_DISTANCE,
                    Distances::BySocket { within, between } => match (sockets.get(&from), sockets.get(&to)) {
                        (Some(a), Some(b)) if a == b => *within,
                        _ => *between,
                    },
                };
                if !(LOCAL_DISTANCE..=254).contains(&distance) || (from == to && distance != LOCAL_DISTANCE) {
                    return Err(BuildError(format!(
                        "the distance from node {from} to node {to} is {distance} (expected 10 to itself, 10 to \
                         254 to others)"
                    )));
                }
                distances.insert(to, distance);
            }
            all.push(distances);
        }
        Ok(all)
    }
}

fn uneven_error(node: NodeId, cores: u32, parts: u32, what: &str) -> BuildError {
    BuildError(format!("{cores} cores of node {node} cannot be split evenly into {parts} {what}"))
}

/// The values of a node.
#[derive(Clone, Debug)]
struct Spec {
    cores: u32,
    memory: Bytes,
    hugepages: BTreeMap<HugepageSize, u64>,
}

impl NodeBuilder {
    /// Sets the number of physical cores; 0 for a memory-only node.
    #[must_use]
    pub fn cores(mut self, count: u32) -> Self {
        self.cores = Some(count);
        self
    }

    /// Sets the memory; 0 for a node without memory.
    #[must_use]
    pub fn memory(mut self, bytes: Bytes) -> Self {
        self.memory = Some(bytes);
        self
    }

    /// Sets the number of hugepages of one size in the node's pool, all of them free.
    #[must_use]
    pub fn hugepages(mut self, size: HugepageSize, pages: u64) -> Self {
        self.hugepages.insert(size, pages);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(describe: impl FnOnce(MachineBuilder) -> MachineBuilder) -> Machine {
        describe(Machine::builder()).build().unwrap()
    }

    #[test]
    fn regular_machine_is_numbered_in_id_order() {
        let machine = build(|m| {
            m.nodes(4)
                .sockets(2)
                .cores_per_node(4)
                .smt(2)
                .caches_per_node(2)
                .socket_distances(12, 32)
                .hugepages(HugepageSize(Bytes::mib(2)), 8)
                .isolated_cpus("3,19".parse().unwrap())
        });
        let cpu = |id| machine.cpus[&CpuId(id)];
        assert_eq!(machine.cpu_ids().to_string(), "0-31");
        assert_eq!(machine.nodes[&NodeId(1)].cpus.to_string(), "4-7,20-23");
        assert_eq!((cpu(22).node, cpu(22).core, cpu(22).socket), (NodeId(1), CoreId(6), SocketId(0)));
        assert_eq!(cpu(22).last_level_cache, Some(CacheId(6)));
        assert_eq!(cpu(21).last_level_cache, Some(CacheId(4)));
        assert_eq!(cpu(8).socket, SocketId(1));
        assert_eq!(machine.distance(NodeId(2), NodeId(2)), Some(10));
        assert_eq!(machine.distance(NodeId(2), NodeId(3)), Some(12));
        assert_eq!(machine.distance(NodeId(2), NodeId(1)), Some(32));
        let pool = machine.nodes[&NodeId(3)].hugepages[&HugepageSize(Bytes::mib(2))];
        assert_eq!((pool.total, pool.free), (8, 8));
        assert_eq!(machine.nodes[&NodeId(1)].memory_blocks, (8..16).collect::<Vec<_>>());
        assert_eq!(machine.isolated_cpus.to_string(), "3,19");
    }

    #[test]
    fn single_nodes_can_be_overridden() {
        let size = HugepageSize(Bytes::gib(1));
        let machine = build(|m| {
            m.node_ids([NodeId(1), NodeId(8)])
                .sockets(2)
                .cores_per_node(2)
                .smt(2)
                .memory(Bytes::gib(64))
                .node(NodeId(252), |n| n.cores(0).memory(Bytes::gib(100)).hugepages(size, 3))
                .node(NodeId(8), |n| n.memory(Bytes(0)))
        });
        assert_eq!(machine.node_ids().to_string(), "1,8,252");
        assert_eq!(machine.nodes[&NodeId(8)].cpus.to_string(), "2-3,6-7");
        assert_eq!(machine.cpus[&CpuId(7)].core, CoreId(3));
        assert_eq!(machine.cpus[&CpuId(7)].socket, SocketId(1));
        assert!(machine.nodes[&NodeId(8)].memory_blocks.is_empty());
        assert_eq!(machine.nodes[&NodeId(252)].hugepages[&size].total, 3);
        assert_eq!(machine.nodes[&NodeId(1)].hugepages[&size].total, 0);
        assert_eq!(machine.memory_block_size, Bytes::gib(2));
        assert_eq!(machine.distance(NodeId(252), NodeId(1)), Some(20));
    }

    #[test]
    fn a_node_may_span_sockets() {
        let machine = build(|m| m.sockets(2).cores_per_node(4));
        let sockets: Vec<u32> = machine.cpus.values().map(|cpu| cpu.socket.0).collect();
        assert_eq!(sockets, [0, 0, 1, 1]);
    }

    #[test]
    fn distance_matrix_is_kept() {
        let machine = build(|m| m.nodes(2).distances([[10, 21], [31, 10]]));
        assert_eq!(machine.distance(NodeId(0), NodeId(1)), Some(21));
        assert_eq!(machine.distance(NodeId(1), NodeId(0)), Some(31));
    }

    #[test]
    fn refuses_invalid_descriptions() {
        type Describe = fn(MachineBuilder) -> MachineBuilder;
        let cases: [(Describe, &str); 15] = [
            (|m| m.nodes(0), "no nodes"),
            (|m| m.nodes(u32::MAX), "node id 65536 is above"),
            (|m| m.sockets(0), "sockets is 0"),
            (|m| m.smt(0), "smt is 0"),
            (|m| m.cores_per_node(0), "no node has a CPU"),
            (|m| m.cores_per_node(u32::MAX).nodes(3).smt(u32::MAX), "number of CPUs"),
            (|m| m.nodes(2).sockets(3).cores_per_node(3), "3 sockets cannot be divided among 2 nodes"),
            (|m| m.sockets(2).cores_per_node(3), "3 cores of node 0 cannot be split evenly into 2 sockets"),
            (|m| m.cores_per_node(3).caches_per_node(2), "into 2 last-level caches"),
            (|m| m.nodes(2).distances([[10, 20]]), "row 1 of the distances has 0 values"),
            (|m| m.distances([[10, 20]]), "row 0 of the distances has 2 values"),
            (|m| m.nodes(2).distances([[10, 9], [20, 10]]), "from node 0 to node 1 is 9"),
            (|m| m.hugepages(HugepageSize(Bytes::mib(3)), 1), "3Mi is not a hugepage size"),
            (|m| m.hugepages(HugepageSize(Bytes::gib(1)), 2), "1Gi of memory but 2Gi in hugepage pools"),
            (|m| m.isolated_cpus("0-4".parse().unwrap()), "CPUs 1-4 are isolated"),
        ];
        for (describe, message) in cases {
            let error = describe(Machine::builder()).build().unwrap_err().to_string();
            assert!(error.contains(message), "{error:?} does not say {message:?}");
        }
    }

    #[test]
    fn the_largest_machine_builds() {
        let machine = build(|m| m.nodes(64).sockets(8).cores_per_node(64).smt(2).memory(Bytes::gib(512)));
        assert_eq!(machine.cpus.len(), 8192);
    }
}
