//! What can be wrong with a configuration, a machine or a saved state.
//!
//! The texts are the kubelet's own, spelling included, wherever the kubelet has one.

use std::{collections::BTreeMap, error::Error, fmt};

use numaward_topology::{Bytes, CpuId, CpuSet, NodeId, ZoneKind};
use serde::{Deserialize, Serialize};

use crate::{
    checkpoint::CheckpointError,
    policy_names::TopologyManagerPolicy,
    quantity::Quantity,
    request::{ContainerName, OwnerId},
};

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
pub enum StartPhase {
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
    pub phase: StartPhase,
    /// Why. Its text is the whole message.
    pub problem: Box<StartProblem>,
}

impl StartError {
    /// Makes an error of a component's problem.
    pub(crate) fn with_context(component: Component, phase: StartPhase) -> impl Fn(StartProblem) -> Self {
        move |problem| Self { component, phase, problem: Box::new(problem) }
    }
}

/// Names, and what follows them in a sentence.
fn are(names: &[&str]) -> String {
    format!("{} {}", names.join(", "), if names.len() == 1 { "is" } else { "are" })
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
    /// A node and kind is reserved twice: what was stated first, and what again.
    #[error("the reserved memory has a duplicate value for NUMA node {0} and type {1}: {2} and {3}")]
    DuplicateReservation(NodeId, ZoneKind, Quantity, Quantity),
    /// Nothing is reserved, in so many words.
    #[error("the reserved memory of type {1} on NUMA node {0} is zero; it must be greater, or absent")]
    ZeroReservation(NodeId, ZoneKind),
    /// An option of the topology policy.
    #[error(transparent)]
    TopologyOption(#[from] OptionProblem),
    /// The machine has more nodes than the topology policy allows (`max-allowable-numa-nodes`, or its default).
    #[error("unsupported on machines with more than {0} NUMA Nodes")]
    TooManyNodes(u64),
    /// `prefer-closest-numa-nodes` on a machine that does not report all distances.
    #[error(
        "cannot discover NUMA topology: error getting NUMA distances: none from node {from} to node {to}"
    )]
    NoDistances {
        /// The node that has no distance …
        from: NodeId,
        /// … to this node.
        to: NodeId,
    },
    /// Terms that the strategy `kubelet` does not know.
    #[error("{} known only to the strategy native", are(.0))]
    NativeOnly(Vec<&'static str>),
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
        "the reserved memory configuration references a NUMA node {0} that does not exist on this machine"
    )]
    ReservationOnUnknownNode(NodeId),
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
    #[error("could not covert a variable of type Quantity to int64: {2} of {1} on NUMA node {0}")]
    ReservationNotInteger(NodeId, ZoneKind, Quantity),
    /// A reservation is of a hugepage size that the node does not have.
    #[error("the reserved memory of type {1} on NUMA node {0}: the node has no such hugepages")]
    ReservationOfUnknownKind(NodeId, ZoneKind),
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
        owner: OwnerId,
        /// The container.
        container: ContainerName,
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
        "[memorymanager] (pod: {0}, container: {1}) the memory assignment uses the NUMA that does not exist"
    )]
    BlockOnUnknownNode(OwnerId, ContainerName),
    /// A block is of a kind that a node does not have.
    #[error(
        "[memorymanager] (pod: {0}, container: {1}) the memory assignment uses memory resource that does not exist"
    )]
    BlockOfUnknownKind(OwnerId, ContainerName),
    /// The machine, the configuration or the allocations are not those of the state.
    #[error("[memorymanager] the expected machine state is different from the real one")]
    OtherMachineState,
}

/// Why a saved state cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreProblem {
    /// It was written by another CPU policy.
    #[error("configured policy \"{configured}\" differs from state checkpoint policy \"{saved}\"")]
    OtherCpuPolicy {
        /// The policy that runs now.
        configured: &'static str,
        /// The policy that wrote it.
        saved: String,
    },
    /// It was written by another memory policy.
    #[error(
        "[memorymanager] configured policy \"{configured}\" differs from state checkpoint policy \"{saved}\""
    )]
    OtherMemoryPolicy {
        /// The policy that runs now.
        configured: &'static str,
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
    /// The id of a `NUMA node` or a `CPU` is beyond all bounds.
    #[error("the machine has {0} {1}; ids above {max} are not supported", max = numaward_topology::set::MAX_ID)]
    IdTooLarge(&'static str, u32),
    /// A CPU is on a node that the machine does not have.
    #[error("CPU {0} is on NUMA node {1}, which the machine does not have")]
    CpuOnUnknownNode(CpuId, NodeId),
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
    /// The sizes add up to more than 64 bits can hold, at this node.
    #[error("the memory of the machine is more than 2^64 bytes (counted up to NUMA node {0})")]
    MemoryTooLarge(NodeId),
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
    /// `align-by-socket` excludes this topology policy.
    #[error("Topolgy manager {0} policy is incompatible with CPUManager align-by-socket policy option")]
    IncompatibleTopologyPolicy(TopologyManagerPolicy),
    /// `align-by-socket` needs at least a node with CPUs a socket.
    #[error(
        "Align by socket is not compatible with hardware where number of sockets are more than number of NUMA"
    )]
    MoreSocketsThanNodes,
    /// The CPUs that could be reserved are not as many as are needed.
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
        "[cpumanager] unable to build the reserved physical CPUs from the reserved set: unknown CPU ID: {0}"
    )]
    UnknownReservedCpu(CpuId),
}

/// What is wrong with an option, which is named first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionProblem {
    /// The `CPU` or `Topology` Manager has no such option.
    #[error("unknown {1} Manager Policy option: {0:?}")]
    Unknown(String, &'static str),
    /// The option's group is switched off.
    #[error("{manager} Manager Policy {level}-level Options not enabled, but option {option:?} provided")]
    NotEnabled {
        /// The option.
        option: String,
        /// `CPU` or `Topology`.
        manager: &'static str,
        /// `Alpha` or `Beta`.
        level: &'static str,
    },
    /// The value is neither true nor false.
    #[error("bad value for option {0:?}: strconv.ParseBool: parsing {1:?}: invalid syntax")]
    NotBool(String, String),
    /// The value is not a number: `invalid syntax` or `value out of range`.
    #[error("unable to convert policy option to integer {0:?}: strconv.Atoi: parsing {1:?}: {2}")]
    NotInteger(String, String, &'static str),
    /// The value is below the least one.
    #[error("the minimum value of {0:?} should not be less than {1}")]
    BelowMinimum(String, u64),
}

/// As Go prints a map.
fn go_map(map: &BTreeMap<String, String>) -> String {
    map.iter().map(|(key, value)| format!("{key}:{value}")).collect::<Vec<_>>().join(" ")
}
