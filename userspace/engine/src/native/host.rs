//! Static data for the search: the machine and the configuration.
//!
//! A node is referenced by its *position* among the machine's nodes in ascending order of ids, so ids and their
//! number are unlimited. A resource is referenced by an index: [`CPU`], then one for each kind of memory.

use std::collections::BTreeMap;

use numaward_topology::{
    Bytes, Machine, NodeId, NodeSet, ZoneKind,
    machine::{LOCAL_DISTANCE, REMOTE_DISTANCE},
};

use super::cpus::MachineCpus;
use crate::{
    hint::Resource,
    ledger::{KindAccount, NodeAccount},
};

/// Index of the resource CPU.
pub(super) const CPU: usize = 0;

/// Machine model for the search.
#[derive(Debug)]
pub(super) struct HostModel {
    /// Node ids by position.
    pub(super) ids: Vec<NodeId>,
    /// Matrix of distances, row by row. An unknown distance has the kernel's default.
    distances: Vec<u64>,
    /// Attached memory-only nodes by position: no other node with CPUs is nearer to them.
    attached: Vec<Vec<usize>>,
    /// True if any two nodes with CPUs have the same attached nodes or no common one.
    attached_apart: bool,
    /// CPUs, if they are managed.
    pub(super) cpus: Option<MachineCpus>,
    /// Memory accounts without guarantees; empty if memory is not managed.
    pub(super) idle: BTreeMap<NodeId, NodeAccount>,
    /// Resources by index.
    pub(super) resources: Vec<Resource>,
    /// Allocatable amounts of the idle machine, by resource and position.
    pub(super) capacity: Vec<Vec<u64>>,
    with_cpus: Vec<bool>,
    /// Nodes of each socket. Memory-only nodes belong to none.
    pub(super) sockets: Vec<Vec<usize>>,
    /// Distance to the nearest node with CPUs, by position.
    from_cpus: Vec<u64>,
    /// Class of interchangeable nodes, by position: such nodes have equal distances to all other nodes.
    twins: Vec<usize>,
    /// Smallest distance between two nodes.
    nearest: u64,
}

impl HostModel {
    pub(super) fn new(
        machine: &Machine,
        cpus: Option<MachineCpus>,
        idle: BTreeMap<NodeId, NodeAccount>,
    ) -> Self {
        let ids: Vec<NodeId> = machine.nodes.keys().copied().collect();
        let between = |from, to| {
            let default = if from == to { LOCAL_DISTANCE } else { REMOTE_DISTANCE };
            u64::from(machine.distance(from, to).unwrap_or(default))
        };
        let distances: Vec<u64> =
            ids.iter().flat_map(|&from| ids.iter().map(move |&to| between(from, to))).collect();
        let with_cpus: Vec<usize> = (0..ids.len())
            .filter(|&at| machine.nodes.get(&ids[at]).is_some_and(|of| !of.cpus.is_empty()))
            .collect();
        let mut attached = vec![Vec::new(); ids.len()];
        for memory in (0..ids.len()).filter(|at| !with_cpus.contains(at)) {
            let distance = |cpu: usize| distances[cpu * ids.len() + memory];
            let nearest = with_cpus.iter().map(|&cpu| distance(cpu)).min();
            for &cpu in with_cpus.iter().filter(|&&cpu| Some(distance(cpu)) == nearest) {
                attached[cpu].push(memory);
            }
        }
        let mut kinds: Vec<ZoneKind> =
            idle.values().flat_map(|account| account.kinds.keys().copied()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let resources: Vec<Resource> =
            [Resource::Cpu].into_iter().chain(kinds.iter().map(|&kind| Resource::Memory(kind))).collect();
        let mut capacity = vec![cpus.as_ref().map_or_else(|| vec![0; ids.len()], MachineCpus::capacity)];
        let of_kind = |kind| column(&ids, &idle, kind, |account| account.allocatable);
        capacity.extend(kinds.iter().map(|&kind| of_kind(kind)));
        let mut sockets: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for cpu in machine.cpus.values() {
            if let Ok(at) = ids.binary_search(&cpu.node) {
                let nodes = sockets.entry(cpu.socket.0).or_default();
                if !nodes.contains(&at) {
                    nodes.push(at);
                }
            }
        }
        let sockets = sockets.into_values().collect();
        let from_cpus =
            |at: usize| with_cpus.iter().map(|&cpu| distances[cpu * ids.len() + at]).min().unwrap_or(0);
        let from_cpus = (0..ids.len()).map(from_cpus).collect();
        let twins = twins(&distances, ids.len());
        let pairs = (0..ids.len()).flat_map(|from| (0..ids.len()).map(move |to| (from, to)));
        let pairs = pairs.filter(|(from, to)| from != to);
        let nearest = pairs.map(|(from, to)| distances[from * ids.len() + to]).min().unwrap_or(0);
        let with_cpus = (0..ids.len()).map(|at| with_cpus.contains(&at)).collect();
        Self {
            ids,
            distances,
            attached_apart: are_equal_or_apart(&attached),
            attached,
            cpus,
            idle,
            resources,
            capacity,
            with_cpus,
            sockets,
            from_cpus,
            twins,
            nearest,
        }
    }

    pub(super) fn has_cpus(&self, at: usize) -> bool {
        self.with_cpus[at]
    }

    /// Returns the distance from the nearest node with CPUs.
    pub(super) fn distance_from_cpus(&self, at: usize) -> u64 {
        self.from_cpus[at]
    }

    /// Returns the class of interchangeable nodes.
    pub(super) fn twins(&self, at: usize) -> usize {
        self.twins[at]
    }

    /// Returns the smallest distance between two nodes.
    pub(super) fn nearest(&self) -> u64 {
        self.nearest
    }

    /// Returns the number of nodes.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(super) fn id(&self, at: usize) -> NodeId {
        self.ids[at]
    }

    /// Returns the positions of a set in ascending order. Nodes that the machine does not have are skipped.
    pub(super) fn positions(&self, nodes: &NodeSet) -> Vec<usize> {
        nodes.iter().filter_map(|id| self.ids.binary_search(&id).ok()).collect()
    }

    /// Returns the node set of these positions.
    pub(super) fn set(&self, positions: &[usize]) -> NodeSet {
        positions.iter().map(|&at| self.ids[at]).collect()
    }

    pub(super) fn distance(&self, from: usize, to: usize) -> u64 {
        self.distances[from * self.ids.len() + to]
    }

    /// Returns the memory-only nodes to which no other node with CPUs is nearer.
    pub(super) fn attached(&self, at: usize) -> &[usize] {
        &self.attached[at]
    }

    /// Returns whether any two nodes with CPUs have the same attached nodes or no common one.
    pub(super) fn attached_apart(&self) -> bool {
        self.attached_apart
    }

    /// Returns whether any memory-only node is attached to a node with CPUs.
    pub(super) fn has_attached(&self) -> bool {
        self.attached.iter().any(|of| !of.is_empty())
    }

    /// Returns the index of a kind of memory.
    pub(super) fn number_of(&self, kind: ZoneKind) -> Option<usize> {
        self.resources.iter().position(|&of| of == Resource::Memory(kind))
    }
}

/// Returns whether any two lists are equal or have no common member.
fn are_equal_or_apart(lists: &[Vec<usize>]) -> bool {
    let mut by_member: BTreeMap<usize, &[usize]> = BTreeMap::new();
    lists.iter().all(|list| list.iter().all(|&member| *by_member.entry(member).or_insert(list) == list))
}

/// Returns the classes of interchangeable nodes by position.
fn twins(distances: &[u64], len: usize) -> Vec<usize> {
    let distance = |from: usize, to: usize| distances[from * len + to];
    let alike = |a: usize, b: usize| {
        distance(a, a) == distance(b, b)
            && distance(a, b) == distance(b, a)
            && (0..len)
                .filter(|&of| of != a && of != b)
                .all(|of| distance(a, of) == distance(b, of) && distance(of, a) == distance(of, b))
    };
    let mut twins: Vec<usize> = Vec::with_capacity(len);
    for at in 0..len {
        let first = (0..at).find(|&before| twins[before] == before && alike(before, at));
        twins.push(first.unwrap_or(at));
    }
    twins
}

/// Returns a column of the accounts by position; zero for a kind that a node does not have.
pub(super) fn column(
    ids: &[NodeId],
    accounts: &BTreeMap<NodeId, NodeAccount>,
    kind: ZoneKind,
    value: fn(&KindAccount) -> Bytes,
) -> Vec<u64> {
    let of = |id| {
        accounts.get(id).and_then(|account| account.kinds.get(&kind)).map_or(0, |account| value(account).0)
    };
    ids.iter().map(of).collect()
}
