//! Allocations: what is asked for, what is held, and why something is refused.

use std::{collections::BTreeMap, sync::Arc};

use numaward_engine::ledger::KindAccount;
pub use numaward_engine::policy::{
    CpuKind, MemoryPolicy, MemoryTier, Tiers, TopologyManagerPolicy, UnknownName,
};
use numaward_topology::ZoneKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

use super::{
    enforcement::{Drift, Enforcement},
    placement::{Cpus, Placement},
};

/// A request for an allocation.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AllocationRequest {
    /// The name of the workload; must not be in use.
    #[schema(examples("redis"))]
    pub name: String,
    /// What the allocation is for.
    pub target: Target,
    /// CPUs, above 0: whole ones are exclusive, a part of a CPU (`500m`, `1.5`) stays shared. Absent: shared.
    pub cpus: Option<Cpus>,
    /// Memory, as Kubernetes writes quantities; promised on the nodes of the allocation. Absent: none is promised, and
    /// none is bound to nodes; whole CPUs are to be asked for then. A command may ask for neither: it is a workload with
    /// this name, and nothing is promised.
    #[schema(examples("8Gi"))]
    pub memory: Option<String>,
    /// The most memory that the workload may use; absent: `memory`. What is promised is protected for good
    /// (`memory.min`) if both are equal, else as far as possible (`memory.low`).
    #[schema(examples("12Gi"))]
    pub memory_limit: Option<String>,
    /// Huge pages, in bytes by page size.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(examples(json!({"2Mi": "64Mi"})))]
    pub hugepages: BTreeMap<String, String>,
    /// How the nodes of CPUs and memory have to agree; absent: as the configuration has it.
    pub policy: Option<TopologyManagerPolicy>,
    /// Whether its CPUs are a scheduling domain of their own; absent: `member`, no.
    pub partition: Option<PartitionKind>,
    /// How it wants to be placed besides.
    #[serde(default, skip_serializing_if = "Placement::is_default")]
    pub placement: Placement,
}

impl AllocationRequest {
    /// A request for nothing but so much memory.
    pub fn new(name: impl Into<String>, target: Target, memory: impl Into<String>) -> Self {
        Self { memory: Some(memory.into()), ..Self::unpromised(name, target) }
    }

    /// A request for a cgroup with a name, and nothing else.
    pub fn unpromised(name: impl Into<String>, target: Target) -> Self {
        Self {
            name: name.into(),
            target,
            cpus: None,
            memory: None,
            memory_limit: None,
            hugepages: BTreeMap::new(),
            policy: None,
            partition: None,
            placement: Placement::default(),
        }
    }
}

/// A kind of `cpuset.cpus.partition`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PartitionKind {
    /// None: the scheduler balances its CPUs with all others.
    Member,
    /// A scheduling domain of its own.
    Root,
    /// The same, and the scheduler does not balance load among its CPUs.
    Isolated,
}

/// What an allocation is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Target {
    /// A cgroup that is made for the allocation and removed with it. The allocation ends when the cgroup
    /// is empty again, or when nothing entered it for a minute.
    #[default]
    Exec,
    /// A cgroup that exists: its path below the cgroup mount.
    #[schema(examples("/batch/render"))]
    Cgroup(String),
    /// A unit of systemd that runs.
    #[schema(examples("postgresql@17-main.service"))]
    Unit(String),
    /// A container of a pod. Only reported: containers are placed when the runtime creates them.
    Container(PodContainer),
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodContainer {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// The container's name within the pod.
    pub container: String,
    /// The pod's UID, as the container runtime knows it.
    pub pod_uid: String,
    /// Whether what it holds is the pod's as a whole, and shared with other containers of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shares_pod: bool,
}

/// The allocations of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Allocations {
    /// The allocations, by name.
    #[schema(value_type = Vec<Allocation>)]
    pub allocations: Vec<Arc<Allocation>>,
    /// CPUs that are exclusive to nobody, as a list.
    #[schema(examples("0-1"))]
    pub shared_cpus: String,
    /// What each node can still promise.
    pub nodes: Vec<NodeCapacity>,
    /// How much of all this is written to the kernel.
    pub enforcement: Enforcement,
    /// Cgroups for which a guarantee is declared that they do not hold.
    pub waiting: Vec<PendingGuarantee>,
}

/// A cgroup for which a guarantee is declared that it does not hold. It is tried again when something is freed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Waiting)]
pub struct PendingGuarantee {
    /// The path of the cgroup.
    #[schema(examples("/batch/render"))]
    pub cgroup: String,
    /// The pattern of the guarantee in the configuration.
    #[schema(examples("/batch/*"))]
    pub declared: String,
    /// Why it is not held.
    pub reason: String,
    /// The engine's decision, if it was that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejection: Option<Rejection>,
}

/// What is promised on a node, and what can still be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = NodePromises)]
pub struct NodeCapacity {
    /// The node.
    pub node: u32,
    /// CPUs that can still become exclusive, as a list.
    pub free_cpus: String,
    /// By kind of memory.
    pub memory: Vec<KindCapacity>,
}

/// What is promised of one kind of memory on one node. `allocatable = promised + free`, unless the node lost memory that
/// is promised, or memory promised on several nodes was returned to other nodes of the set than it was taken from (as the
/// kubelet does).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = KindPromises)]
pub struct KindCapacity {
    /// The kind.
    #[schema(examples("memory", "hugepages-2Mi"))]
    pub kind: String,
    /// All of it.
    pub total_bytes: u64,
    /// Kept for the system.
    pub reserved_bytes: u64,
    /// What can be promised at all.
    pub allocatable_bytes: u64,
    /// What is promised.
    pub promised_bytes: u64,
    /// What can still be promised.
    pub free_bytes: u64,
    /// Part of `freeBytes` that is not offered for now: others than those with an allocation use it, beyond what is
    /// reserved. Only with the strategy `native`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub withheld_bytes: u64,
}

/// What a workload holds.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[expect(clippy::struct_excessive_bools, reason = "each may be so beside the others")]
pub struct Allocation {
    /// The name of the workload.
    pub name: String,
    /// What the allocation is for.
    pub target: Target,
    /// The path of its cgroup below the cgroup mount.
    #[schema(examples("/numaward/redis"))]
    pub cgroup: String,
    /// The directory of its cgroup on the host.
    #[schema(examples("/sys/fs/cgroup/numaward/redis"))]
    pub directory: String,
    /// Its exclusive CPUs, as a list; empty where it shares those that are exclusive to nobody.
    #[schema(examples("2-3"))]
    pub cpus: String,
    /// The other threads of their cores, as a list, where nobody may use them (`hideSiblings`).
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(examples("10-11"))]
    pub hidden_cpus: String,
    /// The nodes on which memory is promised to it, as a list.
    #[schema(examples("1"))]
    pub nodes: String,
    /// Memory promised to it.
    pub memory: Vec<MemoryBlock>,
    /// Whether it is written to the kernel; not in a dry run by `enforcement.mode`.
    pub enforced: bool,
    /// The pattern of the guarantee in the configuration, if it was declared there.
    pub declared: Option<String>,
    /// Its own topology policy, if it has one.
    pub policy: Option<TopologyManagerPolicy>,
    /// How it wanted to be placed besides.
    #[serde(default, skip_serializing_if = "Placement::is_default")]
    pub placement: Placement,
    /// What its cgroup is to hold: values by knob.
    #[schema(examples(json!({"cpuset.cpus": "2-3", "cpuset.mems": "1"})))]
    pub settings: BTreeMap<String, String>,
    /// Knobs of its cgroup and the ancestors that did not hold what was written, since the daemon started.
    pub drift: Vec<Drift>,
    /// Whether it is slowed down at `memory.high` and makes no progress.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stalled: bool,
    /// True while its unit does not run. The guarantee is kept for a day.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// Whether its release was begun and not everything could be given back yet: that is tried again, and until then
    /// nothing of it is promised to others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub releasing: bool,
    /// Pages that were moved because other nodes were promised to it, since the daemon started; absent if none were.
    pub moved: Option<MovedPages>,
    /// What is promised to it and not there (any more); absent if all is there.
    pub missing: Option<MissingCapacity>,
    /// Why it was placed there; absent for an allocation that was only decided about.
    pub explanation: Option<Explanation>,
}

/// Pages that were moved to the nodes of an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Moved)]
pub struct MovedPages {
    /// Whether pages are still being moved.
    pub running: bool,
    /// User memory that was elsewhere and is no longer.
    pub moved_bytes: u64,
    /// User memory that stayed elsewhere the last time: the kernel could not move it.
    pub left_bytes: u64,
}

/// What is promised to a workload and not there (any more): the machine changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MissingCapacity {
    /// Its CPUs that are offline, as a list.
    pub cpus: String,
    /// Its CPUs that are not of a kind that it asked for, by kind: the kernel was started in another way.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<MissingKind>,
    /// Memory that its nodes do not have.
    pub memory: Vec<MemoryBlock>,
}

/// CPUs that are not of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MissingKind {
    /// The kind.
    #[schema(value_type = CpuKind)]
    pub kind: CpuKind,
    /// The CPUs, as a list.
    pub cpus: String,
}

/// Memory of one kind promised on a set of nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Block)]
pub struct MemoryBlock {
    /// The kind.
    #[schema(examples("memory", "hugepages-2Mi"))]
    pub kind: String,
    /// The nodes, as a list.
    pub nodes: String,
    /// How much, over all these nodes.
    pub bytes: u64,
}

impl From<(&ZoneKind, &KindAccount)> for KindCapacity {
    fn from((kind, account): (&ZoneKind, &KindAccount)) -> Self {
        Self {
            kind: kind.to_string(),
            total_bytes: account.total.0,
            reserved_bytes: account.reserved.0,
            allocatable_bytes: account.allocatable.0,
            promised_bytes: account.guaranteed.0,
            free_bytes: account.free.0,
            withheld_bytes: 0,
        }
    }
}

impl From<&numaward_engine::MemoryBlock> for MemoryBlock {
    fn from(block: &numaward_engine::MemoryBlock) -> Self {
        Self { kind: block.kind.to_string(), nodes: block.affinity.to_string(), bytes: block.bytes.0 }
    }
}

/// What would happen now.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DryRun {
    /// Whether the request would be admitted.
    pub admitted: bool,
    /// What it would hold; absent if it would be refused.
    pub allocation: Option<Allocation>,
    /// Why it would be refused.
    pub rejection: Option<Rejection>,
    /// How the decision comes about.
    pub explanation: Explanation,
}

impl DryRun {
    /// The request would be admitted.
    pub fn admitted(allocation: Allocation, explanation: Explanation) -> Self {
        Self { admitted: true, allocation: Some(allocation), rejection: None, explanation }
    }

    /// The request would be refused.
    pub fn refused(rejection: Rejection, explanation: Explanation) -> Self {
        Self { admitted: false, allocation: None, rejection: Some(rejection), explanation }
    }
}

/// What became of a change: what is held now or, of a dry run, what would happen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Resized)]
pub enum ResizeOutcome {
    /// What is held now.
    Applied(Box<Allocation>),
    /// What would happen.
    DryRun(Box<DryRun>),
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rejection {
    /// In a word.
    #[schema(examples("TopologyAffinityError"))]
    pub reason: String,
    /// In a sentence.
    pub message: String,
    /// What was requested and what was free, by node and resource.
    pub shortfalls: Vec<Shortfall>,
}

/// What a node has for a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Shortfall {
    /// The node.
    pub node: u32,
    /// The resource.
    #[schema(examples("cpu", "memory", "hugepages-2Mi"))]
    pub resource: String,
    /// What was requested in all: CPUs, or bytes.
    pub requested: u64,
    /// What this node has free: CPUs, or bytes.
    pub free: u64,
    /// What it would have free besides, if others did not use it beyond what is reserved: bytes. Only with the strategy
    /// `native`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub withheld: u64,
}

/// How a decision came about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The merges of hints, in order. Without a topology policy there are none.
    // They can be many, and are cloned with what they explain.
    #[schema(value_type = Vec<Merge>)]
    pub merges: Arc<[Merge]>,
    /// Other things that matter for the decision, such as what was not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One merge of hints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Merge {
    /// What each resource could be served on.
    pub hints: Vec<ResourceHints>,
    /// The sets of nodes that could be the result, best first; at most 256.
    pub candidates: Vec<MergeCandidate>,
    /// How many more there are.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub candidates_omitted: u64,
    /// The result, as a list; absent if every node is as good, empty if none will do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<String>,
    /// Whether the topology policy takes the result.
    pub accepted: bool,
}

/// On which sets of nodes a resource could be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceHints {
    /// The resource, or the part of the engine that has nothing to say.
    #[schema(examples("cpu", "memory"))]
    pub resource: String,
    /// The sets, small ones first; at most 256. None: it cannot be served at all.
    /// Absent: it has no preference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sets: Option<Vec<Hint>>,
    /// How many more there are.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub omitted: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A set of nodes on which a resource could be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Hint {
    /// The nodes, as a list.
    pub nodes: String,
    /// Whether no smaller set could do.
    pub preferred: bool,
}

/// A set of nodes that could be the result of a merge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Candidate)]
pub struct MergeCandidate {
    /// The nodes, as a list.
    pub nodes: String,
    /// Whether every resource prefers just these.
    pub preferred: bool,
    /// What became of it.
    pub verdict: String,
}

/// Why an allocation is not given, changed or released (RFC 9457). The type is always `about:blank`.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Refusal)]
pub struct GuaranteeRefusal {
    /// The status as words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What was wrong, and what to do.
    pub detail: String,
    /// The path that was asked for.
    pub instance: String,
    /// The field of the request that is wrong.
    pub field: Option<String>,
    /// What is allowed there.
    pub allowed: Option<String>,
    /// The engine's decision.
    pub rejection: Option<Rejection>,
    /// How it came about.
    pub explanation: Option<Explanation>,
}
