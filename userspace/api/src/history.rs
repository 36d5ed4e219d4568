//! The history of the last hour that the daemon keeps.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The maximum number of workloads with a history.
pub const MAX_HISTORIES: usize = 1000;

/// The last hour of the host. Each list has one value per step, the latest last. A list is shorter than its period if
/// the daemon or the node has been present for less time. `null`: unknown in that step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// The number of workloads with a history.
    pub kept: u64,
    /// The number of workloads without a history because there are more than 1,000: those without a guarantee that have
    /// been idle longest.
    pub dropped: u64,
    /// The last ten minutes.
    pub recent: HostSeries,
    /// The last hour.
    pub hour: HostSeries,
}

/// Time series of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostSeries {
    /// The length of a step.
    pub step_seconds: u32,
    /// The end of the last step, in milliseconds since the daemon started, as in the samples of the stream.
    pub end_millis: u64,
    /// The nodes, by id.
    pub nodes: Vec<NodeSeries>,
    /// Memory that all workloads with a guarantee allocated outside their guaranteed nodes, per second.
    pub missed_bytes_per_second: Vec<Option<u64>>,
}

/// Time series of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSeries {
    /// The node.
    pub node: u32,
    /// User memory that CPUs of the node allocated on it, average per second.
    pub local_bytes_per_second: Vec<Option<u64>>,
    /// User memory that CPUs of other nodes allocated on it, average per second.
    pub remote_bytes_per_second: Vec<Option<u64>>,
    /// Memory that was not in use at the end of the step, without hugepages.
    pub free_bytes: Vec<Option<u64>>,
}

/// The last hour of a workload. The lists have the same form as those of [`History`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadHistory {
    /// The last ten minutes.
    pub recent: WorkloadSeries,
    /// The last hour.
    pub hour: WorkloadSeries,
}

/// Time series of a workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadSeries {
    /// The length of a step.
    pub step_seconds: u32,
    /// The end of the last step, in milliseconds since the daemon started, as in the samples of the stream.
    pub end_millis: u64,
    /// User memory and hugepages that the workload allocated on the node of the allocating CPU, average per second.
    pub local_bytes_per_second: Vec<Option<u64>>,
    /// User memory and hugepages that the workload allocated on other nodes, average per second.
    pub remote_bytes_per_second: Vec<Option<u64>>,
    /// Memory that the workload allocated outside its guaranteed nodes, average per second; 0 without a memory
    /// guarantee.
    pub missed_bytes_per_second: Vec<Option<u64>>,
    /// The memory of the workload at the end of the step, hugepages included. Known only while a client scrapes or
    /// streams: the daemon reads this for clients, not for the history.
    pub resident_bytes: Vec<Option<u64>>,
}

/// The last ten minutes of all workloads, at low resolution.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trends {
    /// The length of a step.
    pub step_seconds: u32,
    /// The end of the last step, in milliseconds since the daemon started, as in the samples of the stream.
    pub end_millis: u64,
    /// The workloads, by key.
    pub workloads: Vec<Trend>,
}

/// The last ten minutes of a workload. The lists are empty if it allocated nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trend {
    /// The key of the workload: its cgroup, or its name if it has none.
    pub key: String,
    /// See [`WorkloadSeries`].
    pub local_bytes_per_second: Vec<Option<u64>>,
    /// See [`WorkloadSeries`].
    pub remote_bytes_per_second: Vec<Option<u64>>,
}
