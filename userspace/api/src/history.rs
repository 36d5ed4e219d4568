//! The last hour, as the daemon remembers it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Workloads whose past is kept, at most.
pub const MAX_HISTORIES: usize = 1000;

/// The last hour of the host. Each list of figures has one entry a step, the latest last; it is shorter than the time it
/// covers if the daemon, or the node, has been there for less. `null` is a step of which nothing is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// Workloads whose past is kept.
    pub kept: u64,
    /// Workloads whose past is not kept, because there are more than 1,000: those without a guarantee that have been idle
    /// the longest.
    pub dropped: u64,
    /// The last ten minutes.
    pub recent: HostSeries,
    /// The last hour.
    pub hour: HostSeries,
}

/// Figures of the host, step by step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostSeries {
    /// How long a step is.
    pub step_seconds: u32,
    /// When the last step ended, in milliseconds since the daemon started, as in the samples of the stream.
    pub end_millis: u64,
    /// The nodes, by id.
    pub nodes: Vec<NodeSeries>,
    /// What all workloads with a guarantee allocated outside the nodes promised to them, per second.
    pub missed_bytes_per_second: Vec<Option<u64>>,
}

/// Figures of a node, step by step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSeries {
    /// The node.
    pub node: u32,
    /// User memory allocated on it by its own CPUs, per second on average.
    pub local_bytes_per_second: Vec<Option<u64>>,
    /// User memory allocated on it by CPUs of other nodes, per second on average.
    pub remote_bytes_per_second: Vec<Option<u64>>,
    /// What was not in use at the end of the step, hugepages apart.
    pub free_bytes: Vec<Option<u64>>,
}

/// The last hour of a workload. Its lists are as those of [`History`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadHistory {
    /// The last ten minutes.
    pub recent: WorkloadSeries,
    /// The last hour.
    pub hour: WorkloadSeries,
}

/// Figures of a workload, step by step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadSeries {
    /// How long a step is.
    pub step_seconds: u32,
    /// When the last step ended, in milliseconds since the daemon started, as in the samples of the stream.
    pub end_millis: u64,
    /// User memory and hugepages that it allocated on the node of the CPU that asked, per second on average.
    pub local_bytes_per_second: Vec<Option<u64>>,
    /// The same, on other nodes.
    pub remote_bytes_per_second: Vec<Option<u64>>,
    /// What it allocated outside the nodes promised to it, per second on average; 0 where nothing is promised to it.
    pub missed_bytes_per_second: Vec<Option<u64>>,
    /// Its memory, hugepages included, at the end of the step. Known only while somebody scrapes or watches: the daemon
    /// reads where memory lies for those who ask, not for the history.
    pub resident_bytes: Vec<Option<u64>>,
}

/// The last ten minutes of all workloads, in few points.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trends {
    /// How long a step is.
    pub step_seconds: u32,
    /// When the last step ended, in milliseconds since the daemon started, as in the samples of the stream.
    pub end_millis: u64,
    /// The workloads, by key.
    pub workloads: Vec<Trend>,
}

/// The last ten minutes of a workload. Lists are empty if it allocated nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Trend {
    /// What distinguishes it: its cgroup, or its name where there is none.
    pub key: String,
    /// As in [`WorkloadSeries`].
    pub local_bytes_per_second: Vec<Option<u64>>,
    /// As in [`WorkloadSeries`].
    pub remote_bytes_per_second: Vec<Option<u64>>,
}
