//! Allocations: requests, guarantees that are held, and reasons for a refusal.
//!
//! The API calls the guarantee that a workload holds its *allocation*.

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
    enforcement::{Drift, DriftState, Enforcement},
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
    /// The workload that gets the guarantee.
    pub target: Target,
    /// CPUs, above 0. Whole CPUs are exclusive, a fraction (`500m`, `1.5`) uses the shared pool. Absent: the shared
    /// pool.
    pub cpus: Option<Cpus>,
    /// Memory to guarantee on the nodes of the allocation, as a Kubernetes quantity. Absent: no memory is guaranteed or
    /// bound to nodes; then `cpus` must be whole CPUs. A command may request neither: it is then a named workload
    /// without a guarantee.
    #[schema(examples("8Gi"))]
    pub memory: Option<String>,
    /// The maximum memory of the workload; absent: `memory`. If both are equal, the guaranteed memory is protected
    /// strictly (`memory.min`), otherwise by best effort (`memory.low`).
    #[schema(examples("12Gi"))]
    pub memory_limit: Option<String>,
    /// Hugepages in bytes, by page size.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(examples(json!({"2Mi": "64Mi"})))]
    pub hugepages: BTreeMap<String, String>,
    /// The topology policy: how CPUs and memory must be aligned to nodes; absent: the configured policy.
    pub policy: Option<TopologyManagerPolicy>,
    /// The partition type of the CPUs, which can make them a separate scheduling domain; absent: `member`, no
    /// partition.
    pub partition: Option<PartitionKind>,
    /// Further conditions for the placement.
    #[serde(default, skip_serializing_if = "Placement::is_default")]
    pub placement: Placement,
}

impl AllocationRequest {
    /// Creates a request for memory only.
    pub fn new(name: impl Into<String>, target: Target, memory: impl Into<String>) -> Self {
        Self { memory: Some(memory.into()), ..Self::without_guarantee(name, target) }
    }

    /// Creates a request for a named cgroup without a guarantee.
    pub fn without_guarantee(name: impl Into<String>, target: Target) -> Self {
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

/// The partition type (`cpuset.cpus.partition`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PartitionKind {
    /// No partition: the scheduler balances the CPUs together with all others.
    Member,
    /// A separate scheduling domain.
    Root,
    /// A separate scheduling domain, in which the scheduler does not balance load among the CPUs.
    Isolated,
}

/// The workload that gets a guarantee.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Target {
    /// A cgroup that is created for the allocation and removed with it. The allocation ends when the cgroup is empty
    /// again, or when no process entered it for a minute.
    #[default]
    Exec,
    /// An existing cgroup, as a path below the cgroup mount.
    #[schema(examples("/batch/render"))]
    Cgroup(String),
    /// A running systemd unit.
    #[schema(examples("postgresql@17-main.service"))]
    Unit(String),
    /// A container of a pod. Only in answers: containers are placed when the runtime creates them.
    Container(PodContainer),
}

/// A container of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PodContainer {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub pod: String,
    /// The name of the container within the pod.
    pub container: String,
    /// The UID of the pod, as the container runtime reports it.
    pub pod_uid: String,
    /// True if the container uses a guarantee of the pod, which it shares with other containers of the pod.
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
    /// The CPUs of the shared pool, as a list.
    #[schema(examples("0-1"))]
    pub shared_cpus: String,
    /// The capacity of each node for further guarantees.
    pub nodes: Vec<NodeCapacity>,
    /// The state of enforcement: how much of this is written to the kernel.
    pub enforcement: Enforcement,
    /// Cgroups that do not hold the guarantee that is declared for them.
    pub waiting: Vec<PendingGuarantee>,
    /// Experimental: resource claims for which CPUs and memory are reserved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<ReservedClaim>,
}

/// A resource claim for which CPUs and memory are reserved, from its preparation for the kubelet until its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReservedClaim {
    /// The namespace of the claim and its pod.
    pub namespace: String,
    /// The name of the claim.
    #[schema(examples("db-main-x7k2p"))]
    pub name: String,
    /// The UID of the pod that the claim is reserved for.
    pub pod_uid: String,
    /// The exclusive CPUs, as a list.
    #[schema(examples("2-3"))]
    pub cpus: String,
    /// The nodes of the memory, as a list.
    #[schema(examples("0"))]
    pub nodes: String,
    /// The reserved memory.
    pub memory: Vec<MemoryBlock>,
    /// True if a container uses the claim. Its guarantee is an allocation then.
    pub used: bool,
}

/// A cgroup that does not hold the guarantee that is declared for it. The daemon tries again when capacity is released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Waiting)]
pub struct PendingGuarantee {
    /// The path of the cgroup.
    #[schema(examples("/batch/render"))]
    pub cgroup: String,
    /// The pattern of the declared guarantee in the configuration.
    #[schema(examples("/batch/*"))]
    pub declared: String,
    /// The reason why the guarantee is not held.
    pub reason: String,
    /// The decision of the engine, if the engine refused the guarantee.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejection: Option<Rejection>,
}

/// The capacity of a node: guaranteed and free.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = NodePromises)]
pub struct NodeCapacity {
    /// The node.
    pub node: u32,
    /// CPUs that can still become exclusive, as a list.
    pub free_cpus: String,
    /// The capacity by kind of memory.
    pub memory: Vec<KindCapacity>,
}

/// The capacity of one kind of memory on one node. `allocatableBytes` is `promisedBytes` plus `freeBytes`, except if the
/// node lost guaranteed memory, or if memory guaranteed on several nodes was released to other nodes of the set than it
/// was taken from (as the kubelet does).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = KindPromises)]
pub struct KindCapacity {
    /// The kind of memory.
    #[schema(examples("memory", "hugepages-2Mi"))]
    pub kind: String,
    /// The total memory of this kind.
    pub total_bytes: u64,
    /// Memory reserved for the system.
    pub reserved_bytes: u64,
    /// Memory that can be guaranteed in total.
    pub allocatable_bytes: u64,
    /// Memory that is guaranteed.
    #[serde(rename = "promisedBytes")]
    pub guaranteed_bytes: u64,
    /// Memory that can still be guaranteed.
    pub free_bytes: u64,
    /// The part of `freeBytes` that is not offered now, because workloads without an allocation use it beyond the
    /// reservation. Only with the strategy `native`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub withheld_bytes: u64,
}

/// The guarantee that a workload holds.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[expect(clippy::struct_excessive_bools, reason = "the flags are independent")]
pub struct Allocation {
    /// The name of the workload.
    pub name: String,
    /// The workload that holds the guarantee.
    pub target: Target,
    /// The cgroup of the workload, as a path below the cgroup mount.
    #[schema(examples("/numaward/redis"))]
    pub cgroup: String,
    /// The directory of the cgroup on the host.
    #[schema(examples("/sys/fs/cgroup/numaward/redis"))]
    pub directory: String,
    /// The exclusive CPUs, as a list; empty if the workload uses the shared pool.
    #[schema(examples("2-3"))]
    pub cpus: String,
    /// The SMT siblings of these CPUs that no workload may use (`hideSiblings`), as a list.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(examples("10-11"))]
    pub hidden_cpus: String,
    /// The nodes of the guaranteed memory, as a list.
    #[schema(examples("1"))]
    pub nodes: String,
    /// The guaranteed memory.
    pub memory: Vec<MemoryBlock>,
    /// True if the guarantee is written to the kernel; false in a dry run (`enforcement.mode`), and if the write was
    /// refused and is tried again.
    pub enforced: bool,
    /// The pattern of the guarantee in the configuration, if it is declared there.
    pub declared: Option<String>,
    /// The topology policy of this allocation, if it differs from the configured one.
    pub policy: Option<TopologyManagerPolicy>,
    /// The further conditions of the request.
    #[serde(default, skip_serializing_if = "Placement::is_default")]
    pub placement: Placement,
    /// The values that numaward writes to the cgroup, by knob.
    #[schema(examples(json!({"cpuset.cpus": "2-3", "cpuset.mems": "1"})))]
    pub settings: BTreeMap<String, String>,
    /// Knobs of the cgroup and its ancestors that were found with another value than the written one since the daemon
    /// started.
    pub drift: Vec<Drift>,
    /// True if the workload is throttled at `memory.high` and makes no progress.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stalled: bool,
    /// True if the unit does not run. The guarantee is kept for a day.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stopped: bool,
    /// True if the release has started but not all old values could be restored. The daemon tries again; until then,
    /// nothing of the guarantee is given to other workloads.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub releasing: bool,
    /// Pages that were moved since the daemon started because the guarantee changed to other nodes; absent if none were
    /// moved.
    pub moved: Option<MovedPages>,
    /// The guaranteed capacity that the machine does not have (any more); absent if the machine has all of it.
    pub missing: Option<MissingCapacity>,
    /// The explanation of the placement; absent for an allocation that exists only as a decision.
    pub explanation: Option<Explanation>,
}

impl Allocation {
    /// Returns the drift of its own cgroup that is not repaired.
    pub fn present_drift(&self) -> impl Iterator<Item = &Drift> {
        self.drift.iter().filter(|drift| drift.state != DriftState::Repaired && drift.cgroup == self.cgroup)
    }
}

/// Pages that were moved to the nodes of an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Moved)]
pub struct MovedPages {
    /// True if pages are still being moved.
    pub running: bool,
    /// User memory that was moved to the nodes.
    pub moved_bytes: u64,
    /// User memory that the kernel could not move the last time.
    pub left_bytes: u64,
}

/// Guaranteed capacity that is missing because the machine changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MissingCapacity {
    /// Exclusive CPUs that are offline, as a list.
    pub cpus: String,
    /// Exclusive CPUs that are not of a requested kind, by kind, because the kernel was booted with other parameters.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<MissingKind>,
    /// Guaranteed memory that the nodes do not have.
    pub memory: Vec<MemoryBlock>,
}

/// CPUs that are not of a requested kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MissingKind {
    /// The requested kind.
    #[schema(value_type = CpuKind)]
    pub kind: CpuKind,
    /// The CPUs, as a list.
    pub cpus: String,
}

/// Guaranteed memory of one kind on a set of nodes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Block)]
pub struct MemoryBlock {
    /// The kind of memory.
    #[schema(examples("memory", "hugepages-2Mi"))]
    pub kind: String,
    /// The nodes, as a list.
    pub nodes: String,
    /// The bytes on all these nodes together.
    pub bytes: u64,
}

impl From<(&ZoneKind, &KindAccount)> for KindCapacity {
    fn from((kind, account): (&ZoneKind, &KindAccount)) -> Self {
        Self {
            kind: kind.to_string(),
            total_bytes: account.total.0,
            reserved_bytes: account.reserved.0,
            allocatable_bytes: account.allocatable.0,
            guaranteed_bytes: account.guaranteed.0,
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

/// The result of a dry run.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DryRun {
    /// True if the request would be admitted.
    pub admitted: bool,
    /// The allocation that would be held; absent if the request would be refused.
    pub allocation: Option<Allocation>,
    /// The reason for the refusal; absent if the request would be admitted.
    pub rejection: Option<Rejection>,
    /// The explanation of the decision.
    pub explanation: Explanation,
}

impl DryRun {
    /// Creates the result for a request that would be admitted.
    pub fn admitted(allocation: Allocation, explanation: Explanation) -> Self {
        Self { admitted: true, allocation: Some(allocation), rejection: None, explanation }
    }

    /// Creates the result for a request that would be refused.
    pub fn refused(rejection: Rejection, explanation: Explanation) -> Self {
        Self { admitted: false, allocation: None, rejection: Some(rejection), explanation }
    }
}

/// The result of a change of a guarantee.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[schema(as = Resized)]
pub enum ResizeOutcome {
    /// The change is applied: the allocation that is held now.
    Applied(Box<Allocation>),
    /// The result of a dry run.
    DryRun(Box<DryRun>),
}

/// The reason why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Rejection {
    /// The reason, as one word.
    #[schema(examples("TopologyAffinityError"))]
    pub reason: String,
    /// The reason, as a sentence.
    pub message: String,
    /// The requested amount and the free capacity, by node and resource.
    pub shortfalls: Vec<Shortfall>,
}

/// The free capacity of a node, compared with a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Shortfall {
    /// The node.
    pub node: u32,
    /// The resource.
    #[schema(examples("cpu", "memory", "hugepages-2Mi"))]
    pub resource: String,
    /// The requested amount in total: CPUs or bytes.
    pub requested: u64,
    /// The free capacity of the node: CPUs or bytes.
    pub free: u64,
    /// Further bytes that would be free if workloads without an allocation did not use them beyond the reservation.
    /// Only with the strategy `native`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub withheld: u64,
}

/// The explanation of a decision.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    /// The merges of topology hints, in order; none without a topology policy.
    // The list can be long and is cloned with the decision that it explains.
    #[schema(value_type = Vec<Merge>)]
    pub merges: Arc<[Merge]>,
    /// Further facts that influenced the decision, such as missing information.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// The nodes that the request names and the machine does not have, in the kernel's list format. The other named
    /// nodes are used.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schema(examples("7"))]
    pub absent_nodes: String,
}

impl Explanation {
    /// Returns a sentence on the nodes that the machine does not have.
    pub fn absent_nodes_note(&self) -> Option<String> {
        let nodes = &self.absent_nodes;
        (!nodes.is_empty()).then(|| format!("there is no node {nodes} here: the other nodes are used"))
    }
}

/// A merge of topology hints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Merge {
    /// The hints of each resource.
    pub hints: Vec<ResourceHints>,
    /// The candidate sets of nodes, best first; at most 256.
    pub candidates: Vec<MergeCandidate>,
    /// The number of candidates that are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub candidates_omitted: u64,
    /// The resulting nodes, as a list; absent if all nodes are equally good, empty if no set of nodes is possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nodes: Option<String>,
    /// True if the topology policy accepts the result.
    pub accepted: bool,
}

/// The hints of a resource: the sets of nodes on which it could be provided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceHints {
    /// The resource, or the part of the engine that has no preference.
    #[schema(examples("cpu", "memory"))]
    pub resource: String,
    /// The sets, smallest first; at most 256. Empty: the resource cannot be provided. Absent: no preference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sets: Option<Vec<Hint>>,
    /// The number of sets that are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub omitted: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A set of nodes on which a resource could be provided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Hint {
    /// The nodes, as a list.
    pub nodes: String,
    /// True if no smaller set is sufficient.
    pub preferred: bool,
}

/// A candidate set of nodes in a merge.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Candidate)]
pub struct MergeCandidate {
    /// The nodes, as a list.
    pub nodes: String,
    /// True if every resource prefers exactly these nodes.
    pub preferred: bool,
    /// The result for this candidate.
    pub verdict: String,
}

/// The reason why an allocation is not created, changed or released (RFC 9457). The type is always `about:blank`.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Refusal)]
pub struct GuaranteeRefusal {
    /// The HTTP status as text.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The problem, and what to do.
    pub detail: String,
    /// The path of the request.
    pub instance: String,
    /// The invalid field of the request.
    pub field: Option<String>,
    /// The allowed values of the field.
    pub allowed: Option<String>,
    /// The decision of the engine.
    pub rejection: Option<Rejection>,
    /// The explanation of the decision.
    pub explanation: Option<Explanation>,
}
