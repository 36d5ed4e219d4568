//! Rebalancing: moves of running workloads to make room for a request.

use std::time::Duration;

use educe::Educe;
use numaward_topology::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{enforcement::Size, types::Interval};

/// The mode of rebalancing, if a request is refused because the right nodes have no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RebalanceMode {
    /// Workloads are moved only on request (`numaward rebalance --apply`).
    #[default]
    Off,
    /// Workloads are also moved automatically for requests of commands, cgroups and units, but not of containers of
    /// pods, because their runtime does not wait.
    Auto,
}

/// Moves of workloads that run, to make room for a request. Only for the strategy `native`.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Rebalance {
    /// The mode: `off` or `auto`.
    pub mode: RebalanceMode,
    /// The maximum number of workloads that may be moved automatically for one request.
    #[schemars(range(min = 1, max = 16))]
    #[educe(Default = 3)]
    pub max_moves: u32,
    /// The maximum memory that may be moved automatically in an hour.
    #[educe(Default(expression = Size(Bytes::gib(16))))]
    pub max_bytes_per_hour: Size,
    /// The time for which a moved workload is not moved again automatically.
    #[educe(Default(expression = Interval(Duration::from_mins(10))))]
    pub dwell_time: Interval,
}
