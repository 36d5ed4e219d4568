//! Errors of a configuration, a machine or a saved state.
//!
//! The texts are the kubelet's own, including misspellings, if the kubelet has one.

use std::{collections::BTreeMap, error::Error, fmt};

use numaward_topology::{Bytes, CpuId, CpuSet, NodeId, ZoneKind};
use serde::{Deserialize, Serialize};

use crate::{
    checkpoint::CheckpointError,
    policy_names::TopologyManagerPolicy,
    quantity::Quantity,
    request::{ContainerName, OwnerId},
};

/// Part of the engine that can refuse to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Component {
    /// Check of the configuration and the machine, before the managers start.
    Configuration,
    /// Merge of hints.
    TopologyManager,
    /// Exclusive CPUs.
    CpuManager,
    /// Memory and huge pages.
    MemoryManager,
}

/// Phase in which a component refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartPhase {
    /// Initialization with the configuration and the machine.
    New,
    /// Restore of the previous state.
    Start,
}

/// Refusal of a component to start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartError {
    pub component: Component,
    pub phase: StartPhase,
    /// Reason. Its text is the whole message.
    pub problem: Box<StartProblem>,
}

impl StartError {
    /// Returns a function that adds a component and a phase to a problem.
    pub(crate) fn with_context(component: Component, phase: StartPhase) -> impl Fn(StartProblem) -> Self {
        move |problem| Self { component, phase, problem: Box::new(problem) }
    }
}

/// Joins names and appends the matching form of "to be".
fn with_to_be(names: &[&str]) -> String {
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

/// Reason why a component refuses to start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartProblem {
    /// The strategy does not support the machine.
    #[error(transparent)]
    Machine(#[from] MachineProblem),
    /// A node and kind is reserved twice; the two amounts.
    #[error("the reserved memory has a duplicate value for NUMA node {0} and type {1}: {2} and {3}")]
    DuplicateReservation(NodeId, ZoneKind, Quantity, Quantity),
    /// A reservation of zero is stated explicitly.
    #[error("the reserved memory of type {1} on NUMA node {0} is zero; it must be greater, or absent")]
    ZeroReservation(NodeId, ZoneKind),
    /// An option of the topology policy is invalid.
    #[error(transparent)]
    TopologyOption(#[from] OptionProblem),
    /// The machine has more nodes than the topology policy permits (`max-allowable-numa-nodes`).
    #[error("unsupported on machines with more than {0} NUMA Nodes")]
    TooManyNodes(u64),
    /// `prefer-closest-numa-nodes` is set, but the machine does not report all distances.
    #[error(
        "cannot discover NUMA topology: error getting NUMA distances: none from node {from} to node {to}"
    )]
    NoDistances {
        /// Source of the missing distance.
        from: NodeId,
        /// Destination of the missing distance.
        to: NodeId,
    },
    /// The terms need the strategy `native`.
    #[error("{} known only to the strategy native", with_to_be(.0))]
    NativeOnly(Vec<&'static str>),
    /// Options are set for the CPU policy `none`.
    #[error("new none policy error: None policy: received unsupported options=map[{}]", go_map(.0))]
    OptionsWithoutPolicy(BTreeMap<String, String>),
    #[error("could not detect number of cpus")]
    NoCpus,
    /// The static CPU policy needs a reservation.
    #[error("[cpumanager] unable to determine reserved CPU resources for static policy")]
    NoCpuReservation,
    /// The static CPU policy needs a reservation greater than zero.
    #[error(
        "[cpumanager] the static policy requires systemreserved.cpu + kubereserved.cpu to be greater than zero"
    )]
    ZeroCpuReservation,
    /// The static CPU policy cannot be initialized.
    #[error("new static policy error: {0}")]
    StaticCpu(StaticCpuProblem),
    /// The static memory manager needs a reservation.
    #[error("[memorymanager] you should specify the system reserved memory")]
    NoMemoryReservation,
    /// A reservation is for a node that does not exist.
    #[error(
        "the reserved memory configuration references a NUMA node {0} that does not exist on this machine"
    )]
    ReservationOnUnknownNode(NodeId),
    /// The sum of the reservations differs from the reservation of the whole machine.
    #[error(
        "the total amount \"{reserved}\" of type \"{kind}\" is not equal to the value \"{node_reservation}\" \
         determined by Node Allocatable feature"
    )]
    ReservationMismatch {
        kind: ZoneKind,
        /// Sum over the nodes.
        reserved: Bytes,
        /// Reservation of the whole machine.
        node_reservation: Bytes,
    },
    /// A reservation is not a whole number of bytes in integer form.
    #[error("could not covert a variable of type Quantity to int64: {2} of {1} on NUMA node {0}")]
    ReservationNotInteger(NodeId, ZoneKind, Quantity),
    /// A reservation is for a huge page size that the node does not have.
    #[error("the reserved memory of type {1} on NUMA node {0}: the node has no such hugepages")]
    ReservationOfUnknownKind(NodeId, ZoneKind),
    /// A reservation exceeds the memory of the node.
    #[error(
        "the reserved memory of type {kind} on NUMA node {node} is {reserved}, more than the {available} it has"
    )]
    ReservationTooLarge {
        node: NodeId,
        kind: ZoneKind,
        /// Reserved bytes.
        reserved: Bytes,
        /// Memory of this kind on the node; for base pages, without huge page pools.
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
        /// Path of the file.
        file: String,
        #[source]
        problem: Box<RestoreProblem>,
    },
    /// The shared pool is empty although there are allocations.
    #[error("default cpuset cannot be empty")]
    EmptySharedPool,
    /// Reserved CPUs are missing in the shared pool.
    #[error("not all reserved cpus: \"{reserved}\" are present in defaultCpuSet: \"{shared_pool}\"")]
    ReservedNotShared {
        /// Reserved CPUs.
        reserved: CpuSet,
        shared_pool: CpuSet,
    },
    /// Strictly reserved CPUs are in the shared pool.
    #[error("some of strictly reserved cpus: \"{shared}\" are present in defaultCpuSet: \"{shared_pool}\"")]
    ReservedShared {
        /// Reserved CPUs that are shared.
        shared: CpuSet,
        shared_pool: CpuSet,
    },
    /// CPUs are both exclusive and shared.
    #[error(
        "pod: {owner}, container: {container} cpuset: \"{cpus}\" overlaps with default cpuset \"{shared_pool}\""
    )]
    ExclusiveAndShared {
        owner: OwnerId,
        container: ContainerName,
        /// Exclusive CPUs of the container.
        cpus: CpuSet,
        shared_pool: CpuSet,
    },
    /// The CPUs of the state differ from those of the machine.
    #[error("current set of available CPUs \"{machine}\" doesn't match with CPUs in state \"{state}\"")]
    OtherCpus {
        /// CPUs that the machine can give.
        machine: CpuSet,
        /// CPUs in the state.
        state: CpuSet,
    },
    /// The state has memory allocations but no nodes.
    #[error("[memorymanager] machine state can not be empty when it has memory assignments")]
    NoMachineState,
    /// A block is on a node that does not exist.
    #[error(
        "[memorymanager] (pod: {0}, container: {1}) the memory assignment uses the NUMA that does not exist"
    )]
    BlockOnUnknownNode(OwnerId, ContainerName),
    /// A block is of a kind that its node does not have.
    #[error(
        "[memorymanager] (pod: {0}, container: {1}) the memory assignment uses memory resource that does not exist"
    )]
    BlockOfUnknownKind(OwnerId, ContainerName),
    /// The machine, the configuration or the allocations differ from the state.
    #[error("[memorymanager] the expected machine state is different from the real one")]
    OtherMachineState,
}

/// Reason why a saved state cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RestoreProblem {
    /// Another CPU policy wrote the state.
    #[error("configured policy \"{configured}\" differs from state checkpoint policy \"{saved}\"")]
    OtherCpuPolicy {
        /// Configured policy.
        configured: &'static str,
        /// Policy in the state.
        saved: String,
    },
    /// Another memory policy wrote the state.
    #[error(
        "[memorymanager] configured policy \"{configured}\" differs from state checkpoint policy \"{saved}\""
    )]
    OtherMemoryPolicy {
        /// Configured policy.
        configured: &'static str,
        /// Policy in the state.
        saved: String,
    },
    /// The state is damaged.
    #[error("checkpoint is corrupted")]
    Corrupt(#[source] CheckpointError),
}

/// Reason why a strategy does not support a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MachineProblem {
    #[error("the machine has no NUMA nodes")]
    NoNodes,
    /// The strategy enumerates sets of nodes; their number is exponential.
    #[error(
        "the machine has {nodes} NUMA nodes; the strategy `kubelet` enumerates all sets of nodes and supports at \
         most {limit} (use the strategy `native`)"
    )]
    TooManyNodes {
        /// Number of nodes of the machine.
        nodes: usize,
        /// Maximum of the strategy.
        limit: usize,
    },
    /// The id of a `NUMA node` or `CPU` is too large.
    #[error("the machine has {0} {1}; ids above {max} are not supported", max = numaward_topology::set::MAX_ID)]
    IdTooLarge(&'static str, u32),
    /// A CPU is on a node that does not exist.
    #[error("CPU {0} is on NUMA node {1}, which the machine does not have")]
    CpuOnUnknownNode(CpuId, NodeId),
    /// The huge page pools of a node exceed its memory.
    #[error("the hugepages of NUMA node {node} are {hugepages}, more than its memory of {memory}")]
    HugepagesTooLarge {
        node: NodeId,
        /// Size of all pools of the node.
        hugepages: Bytes,
        /// Memory of the node.
        memory: Bytes,
    },
    /// The sum of the memory sizes exceeds 64 bits at this node.
    #[error("the memory of the machine is more than 2^64 bytes (counted up to NUMA node {0})")]
    MemoryTooLarge(NodeId),
}

/// Reason why the static CPU policy cannot be initialized.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StaticCpuProblem {
    /// An option is invalid.
    #[error(transparent)]
    Option(#[from] OptionProblem),
    /// Two options exclude each other.
    #[error("static policy options {0} and {1} can not be used at the same time")]
    Incompatible(&'static str, &'static str),
    /// `align-by-socket` excludes this topology policy.
    #[error("Topolgy manager {0} policy is incompatible with CPUManager align-by-socket policy option")]
    IncompatibleTopologyPolicy(TopologyManagerPolicy),
    /// `align-by-socket` needs at least one node with CPUs for each socket.
    #[error(
        "Align by socket is not compatible with hardware where number of sockets are more than number of NUMA"
    )]
    MoreSocketsThanNodes,
    /// The number of CPUs that can be reserved differs from the required number.
    #[error(
        "[cpumanager] unable to reserve the required amount of CPUs (size of {reserved} did not equal {needed})"
    )]
    CannotReserve {
        /// CPUs that can be reserved.
        reserved: CpuSet,
        /// Required number.
        needed: u64,
    },
    /// A reserved CPU does not exist.
    #[error(
        "[cpumanager] unable to build the reserved physical CPUs from the reserved set: unknown CPU ID: {0}"
    )]
    UnknownReservedCpu(CpuId),
}

/// Error of an option. The first field is its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionProblem {
    /// The `CPU` or `Topology` manager has no such option.
    #[error("unknown {1} Manager Policy option: {0:?}")]
    Unknown(String, &'static str),
    /// The feature gate of the option's maturity is off.
    #[error("{manager} Manager Policy {level}-level Options not enabled, but option {option:?} provided")]
    NotEnabled {
        option: String,
        /// `CPU` or `Topology`.
        manager: &'static str,
        /// `Alpha` or `Beta`.
        level: &'static str,
    },
    /// The value is not a boolean.
    #[error("bad value for option {0:?}: strconv.ParseBool: parsing {1:?}: invalid syntax")]
    NotBool(String, String),
    /// The value is not a number: `invalid syntax` or `value out of range`.
    #[error("unable to convert policy option to integer {0:?}: strconv.Atoi: parsing {1:?}: {2}")]
    NotInteger(String, String, &'static str),
    /// The value is below the minimum.
    #[error("the minimum value of {0:?} should not be less than {1}")]
    BelowMinimum(String, u64),
}

/// Formats a map as Go does.
fn go_map(map: &BTreeMap<String, String>) -> String {
    map.iter().map(|(key, value)| format!("{key}:{value}")).collect::<Vec<_>>().join(" ")
}
