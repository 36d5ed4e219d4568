//! The CPU time and memory that workloads used in the last hour.

use serde::{Deserialize, Serialize};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// The CPU time and memory that workloads used in the last hour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// The workloads, by cgroup; at most 1,000. Workloads that were read only once are missing.
    pub workloads: Vec<WorkloadUsage>,
}

/// The CPU time and memory that a workload and the cgroups below it used. They are read about once a minute.
#[skip_serializing_none]
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadUsage {
    /// The cgroup of the workload.
    pub cgroup: String,
    /// The name of the workload.
    pub workload: String,
    /// The time that the readings cover, at most about an hour.
    pub observed_seconds: u64,
    /// The mean number of busy CPUs between two readings, in thousandths.
    pub cpu_millis: UsageLevels,
    /// Memory at a reading, without page cache that the kernel can drop at once; absent if it cannot be read.
    pub memory_bytes: Option<UsageLevels>,
    /// The CPU time by node in the last half hour to hour, or since the daemon started; empty if it cannot be read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpu_by_node: Vec<NodeCpuUsage>,
    /// Memory that the workload allocated in the last hour; absent if it is not counted separately.
    pub allocated: Option<HourlyAllocations>,
}

/// The time for which a workload kept CPUs of a node busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeCpuUsage {
    /// The node of the CPUs.
    pub node: u32,
    /// The time in microseconds.
    pub micros: u64,
}

/// The distribution of a figure over the readings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct UsageLevels {
    /// The median.
    pub median: u64,
    /// The 95th percentile.
    pub p95: u64,
    /// The maximum.
    pub peak: u64,
}

/// Bytes that a workload allocated in the full minutes of the last hour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HourlyAllocations {
    /// Memory on the node of the allocating CPU.
    pub local_bytes: u64,
    /// Memory on other nodes.
    pub remote_bytes: u64,
    /// Memory outside the guaranteed nodes; 0 without a memory guarantee.
    pub missed_bytes: u64,
}
