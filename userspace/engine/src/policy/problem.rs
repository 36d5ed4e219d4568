//! What can be wrong with a configuration, a machine or a saved state.
//!
//! The texts are the kubelet's own, spelling included, wherever the kubelet has one.

use std::{collections::BTreeMap, error::Error, fmt};

use numaward_topology::{Bytes, CpuId, CpuSet, NodeId, ZoneKind};
use serde::{Deserialize, Serialize};

use crate::{checkpoint::CheckpointError, quantity::Quantity};

/// A part of the engine that can refuse to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Component {
    /// The check of the configuration and the machine, before any manager is made.
    Configuration,
    /// Merges hints.
    TopologyManager,
    /// Exclusive CPUs.
    CpuManager,
    /// Memory and hugepages.
    MemoryManager,
}

/// When a component refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// While it was made from the configuration and the machine.
    New,
    /// While it took over its earlier state.
    Start,
}

/// A component refuses to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError {
    /// Which one.
    pub component: Component,
    /// When.
    pub phase: Phase,
    /// Why. Its text is the whole message.
    pub problem: Box<StartProblem>,
}

impl StartError {
    pub(crate) fn new(component: Component, phase: Phase, problem: StartProblem) -> Self {
        Self { component, phase, problem: Box::new(problem) }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.fmt(f)
    }
}

impl Error for StartError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.problem.source()
    }
}

/// Why a component refuses to start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartProblem {
    /// The machine is not one that the strategy can work with.
    #[error(transparent)]
    Machine(#[from] MachineProblem),
    /// A node and kind is reserved twice.
    #[error(
        "the reserved memory has a duplicate value for NUMA node {node} and type {kind}: {first} and {second}"
    )]
    DuplicateReservation {
        /// The node.
        node: NodeId,
        /// The kind of memory.
        kind: ZoneKind,
        /// What was stated first.
        first: Quantity,
        /// What was stated again.
        second: Quantity,
    },
    /// Nothing is reserved, in so many words.
    #[error(
        "the reserved memory of type {kind} on NUMA node {node} is zero; it must be greater, or left out"
    )]
    ZeroReservation {
        /// The node.
        node: NodeId,
        /// The kind of memory.
        kind: ZoneKind,
    },
    /// An option of the topology policy.
    #[error(transparent)]
    TopologyOption(OptionProblem),
    /// The machine has more nodes than the topology policy allows.
    #[error("unsupported on machines with more than {allowed} NUMA Nodes")]
    TooManyNodes {
        /// What `max-allowable-numa-nodes` says, or its default.
        allowed: u64,
        /// What the machine has.
        nodes: usize,
    },
    /// `prefer-closest-numa-nodes` on a machine that does not say all distances.
    #[error(
        "cannot discover NUMA topology: error getting NUMA distances: none from node {from} to node {to}"
    )]
    NoDistances {
        /// The node that has no distance …
        from: NodeId,
        /// … to this node.
        to: NodeId,
    },
    /// The policy that manages no CPUs has no options.
    #[error("new none policy error: None policy: received unsupported options=map[{}]", go_map(.0))]
    OptionsWithoutPolicy(BTreeMap<String, String>),
    /// The machine has no CPUs.
    #[error("could not detect number of cpus")]
    NoCpus,
    /// The static CPU policy needs a reservation.
    #[error("[cpumanager] unable to determine reserved CPU resources for static policy")]
    NoCpuReservation,
    /// The static CPU policy needs more than a reservation of zero.
    #[error(
        "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
    )]
    ZeroCpuReservation,
    /// The static CPU policy cannot be made.
    #[error("new static policy error: {0}")]
    StaticCpu(StaticCpuProblem),
    /// The static Memory Manager needs a reservation.
    #[error("[memorymanager] you should specify the system reserved memory")]
    NoMemoryReservation,
    /// A reservation names a node that does not exist.
    #[error(
        "the reserved memory configuration references a NUMA node {node} that does not exist on this machine"
    )]
    ReservationOnUnknownNode {
        /// The node.
        node: NodeId,
    },
    /// The reservations by node do not add up to that of the whole machine.
    #[error(
        "the total amount \"{reserved}\" of type \"{kind}\" is not equal to the value \"{node_reservation}\" \
         determined by Node Allocatable feature"
    )]
    ReservationMismatch {
        /// The kind of memory.
        kind: ZoneKind,
        /// The sum over the nodes.
        reserved: Bytes,
        /// The reservation of the whole machine.
        node_reservation: Bytes,
    },
    /// A reservation is not a whole number of bytes in integer form.
    #[error(
        "could not covert a variable of type Quantity to int64: {quantity} of {kind} on NUMA node {node}"
    )]
    ReservationNotInteger {
        /// The node.
        node: NodeId,
        /// The kind of memory.
        kind: ZoneKind,
        /// What was stated.
        quantity: Quantity,
    },
    /// A reservation is of a hugepage size that the node does not have.
    #[error("the reserved memory of type {kind} on NUMA node {node}: the node has no such hugepages")]
    ReservationOfUnknownKind {
        /// The node.
        node: NodeId,
        /// The kind of memory.
        kind: ZoneKind,
    },
    /// A reservation is larger than what there is.
    #[error(
        "the reserved memory of type {kind} on NUMA node {node} is {reserved}, more than the {available} it has"
    )]
    ReservationTooLarge {
        /// The node.
        node: NodeId,
        /// The kind of memory.
        kind: ZoneKind,
        /// What is to be reserved.
        reserved: Bytes,
        /// What the node has of this kind; of base pages, what its hugepage pools leave.
        available: Bytes,
    },
    /// The saved state cannot be used.
    #[error(
        "could not restore state from checkpoint: {problem}, please drain this node and delete the {manager} \
         checkpoint file \"{file}\" before restarting Kubelet"
    )]
    Restore {
        /// `CPU manager` or `memory manager`.
        manager: &'static str,
        /// The file.
        file: String,
        /// What is wrong with it.
        #[source]
        problem: Box<RestoreProblem>,
    },
    /// The shared pool is empty although there are allocations.
    #[error("default cpuset cannot be empty")]
    EmptySharedPool,
    /// Reserved CPUs are not in the shared pool.
    #[error("not all reserved cpus: \"{reserved}\" are present in defaultCpuSet: \"{shared_pool}\"")]
    ReservedNotShared {
        /// The reserved CPUs.
        reserved: CpuSet,
        /// The shared pool.
        shared_pool: CpuSet,
    },
    /// Strictly reserved CPUs are in the shared pool.
    #[error("some of strictly reserved cpus: \"{shared}\" are present in defaultCpuSet: \"{shared_pool}\"")]
    ReservedShared {
        /// The reserved CPUs that are shared.
        shared: CpuSet,
        /// The shared pool.
        shared_pool: CpuSet,
    },
    /// CPUs are exclusive and shared at once.
    #[error(
        "pod: {owner}, container: {container} cpuset: \"{cpus}\" overlaps with default cpuset \"{shared_pool}\""
    )]
    ExclusiveAndShared {
        /// The owner of the container.
        owner: String,
        /// The container.
        container: String,
        /// Its exclusive CPUs.
        cpus: CpuSet,
        /// The shared pool.
        shared_pool: CpuSet,
    },
    /// The machine's CPUs are not those of the state.
    #[error("current set of available CPUs \"{machine}\" doesn't match with CPUs in state \"{state}\"")]
    OtherCpus {
        /// What the machine has to give.
        machine: CpuSet,
        /// What the state has.
        state: CpuSet,
    },
    /// There are allocations of memory but no nodes.
    #[error("[memorymanager] machine state can not be empty when it has memory assignments")]
    NoMachineState,
    /// A block is on a node that does not exist.
    #[error(
        "[memorymanager] (pod: {owner}, container: {container}) the memory assignment uses the NUMA that does \
         not exist"
    )]
    BlockOnUnknownNode {
        /// The owner of the container.
        owner: String,
        /// The container.
        container: String,
    },
    /// A block is of a kind that a node does not have.
    #[error(
        "[memorymanager] (pod: {owner}, container: {container}) the memory assignment uses memory resource \
         that does not exist"
    )]
    BlockOfUnknownKind {
        /// The owner of the container.
        owner: String,
        /// The container.
        container: String,
    },
    /// The machine, the configuration or the allocations are not those of the state.
    #[error("[memorymanager] the expected machine state is different from the real one")]
    OtherMachineState {
        /// The first difference: the node, and what of it.
        node: NodeId,
        /// What is different there.
        field: StateField,
    },
}

/// What of a node can differ between the saved state and the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateField {
    /// Whether there is such a node at all.
    Presence,
    /// The number of blocks that name it.
    Assignments,
    /// Its group.
    Group,
    /// Which kinds of memory it has.
    Kinds,
    /// The size, the reservation or what is allocatable of a kind.
    Size(ZoneKind),
    /// What is free of a kind in its group.
    Free(ZoneKind),
    /// What is promised of a kind in its group.
    Promised(ZoneKind),
}

/// Why a saved state cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreProblem {
    /// It was written by another CPU policy.
    #[error("configured policy \"{configured}\" differs from state checkpoint policy \"{saved}\"")]
    OtherCpuPolicy {
        /// The policy that runs now.
        configured: String,
        /// The policy that wrote it.
        saved: String,
    },
    /// It was written by another memory policy.
    #[error(
        "[memorymanager] configured policy \"{configured}\" differs from state checkpoint policy \"{saved}\""
    )]
    OtherMemoryPolicy {
        /// The policy that runs now.
        configured: String,
        /// The policy that wrote it.
        saved: String,
    },
    /// It is damaged.
    #[error("checkpoint is corrupted")]
    Corrupt(#[source] CheckpointError),
}

/// What a strategy cannot work with in a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MachineProblem {
    /// There is no node.
    #[error("the machine has no NUMA nodes")]
    NoNodes,
    /// The strategy enumerates sets of nodes, which is exponential.
    #[error(
        "the machine has {nodes} NUMA nodes; the strategy `kubelet` looks at every set of nodes and takes at \
         most {limit} (use the strategy `native`)"
    )]
    TooManyNodes {
        /// What the machine has.
        nodes: usize,
        /// What the strategy takes.
        limit: usize,
    },
    /// An id is beyond all bounds.
    #[error("the machine has {what} {id}; ids above {max} are not supported", max = numaward_topology::set::MAX_ID)]
    IdTooLarge {
        /// `NUMA node` or `CPU`.
        what: &'static str,
        /// The id.
        id: u32,
    },
    /// A CPU is on a node that the machine does not have.
    #[error("CPU {cpu} is on NUMA node {node}, which the machine does not have")]
    CpuOnUnknownNode {
        /// The CPU.
        cpu: CpuId,
        /// Its node.
        node: NodeId,
    },
    /// The hugepage pools of a node are larger than its memory.
    #[error("the hugepages of NUMA node {node} are {hugepages}, more than its memory of {memory}")]
    HugepagesTooLarge {
        /// The node.
        node: NodeId,
        /// The size of all its pools.
        hugepages: Bytes,
        /// Its memory.
        memory: Bytes,
    },
    /// The sizes add up to more than 64 bits can hold.
    #[error("the memory of the machine is more than 2^64 bytes (counted up to NUMA node {node})")]
    MemoryTooLarge {
        /// The node at which the sum overflows.
        node: NodeId,
    },
}

/// Why the static CPU policy cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaticCpuProblem {
    /// An option.
    #[error(transparent)]
    Option(#[from] OptionProblem),
    /// Two options exclude each other.
    #[error("static policy options {0} and {1} can not be used at the same time")]
    Incompatible(&'static str, &'static str),
    /// `align-by-socket` excludes the topology policy.
    #[error(
        "Topolgy manager {topology_policy} policy is incompatible with CPUManager {option} policy option"
    )]
    IncompatibleTopologyPolicy {
        /// The topology policy.
        topology_policy: &'static str,
        /// The option of the CPU policy.
        option: &'static str,
    },
    /// `align-by-socket` needs at least a node a socket.
    #[error(
        "Align by socket is not compatible with hardware where number of sockets are more than number of NUMA"
    )]
    MoreSocketsThanNodes {
        /// Sockets.
        sockets: usize,
        /// Nodes with CPUs.
        nodes: usize,
    },
    /// The reserved CPUs are not as many as the reservation says.
    #[error(
        "[cpumanager] unable to reserve the required amount of CPUs (size of {reserved} did not equal {needed})"
    )]
    CannotReserve {
        /// The CPUs that could be reserved.
        reserved: CpuSet,
        /// How many are needed.
        needed: u64,
    },
    /// A reserved CPU does not exist.
    #[error(
        "[cpumanager] unable to build the reserved physical CPUs from the reserved set: unknown CPU ID: {cpu}"
    )]
    UnknownReservedCpu {
        /// The CPU.
        cpu: CpuId,
    },
}

/// What is wrong with an option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionProblem {
    /// No such option.
    #[error("unknown {manager} Manager Policy option: {option:?}")]
    Unknown {
        /// `CPU` or `Topology`.
        manager: &'static str,
        /// The option.
        option: String,
    },
    /// The option's group is switched off.
    #[error("{manager} Manager Policy {level}-level Options not enabled, but option {option:?} provided")]
    NotEnabled {
        /// `CPU` or `Topology`.
        manager: &'static str,
        /// `Alpha` or `Beta`.
        level: &'static str,
        /// The option.
        option: String,
    },
    /// Neither true nor false.
    #[error("bad value for option {option:?}: strconv.ParseBool: parsing {value:?}: invalid syntax")]
    NotBool {
        /// The option.
        option: String,
        /// Its value.
        value: String,
    },
    /// Not a number.
    #[error(
        "unable to convert policy option to integer {option:?}: strconv.Atoi: parsing {value:?}: {problem}"
    )]
    NotInteger {
        /// The option.
        option: String,
        /// Its value.
        value: String,
        /// `invalid syntax` or `value out of range`.
        problem: &'static str,
    },
    /// A number below the least one.
    #[error("the minimum value of {option:?} should not be less than {minimum}")]
    BelowMinimum {
        /// The option.
        option: String,
        /// The least value.
        minimum: u64,
    },
}

/// As Go prints a map.
fn go_map(map: &BTreeMap<String, String>) -> String {
    map.iter().map(|(key, value)| format!("{key}:{value}")).collect::<Vec<_>>().join(" ")
}
