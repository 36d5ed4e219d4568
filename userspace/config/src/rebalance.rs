//! Moves of workloads that run, without being asked for.

use std::time::Duration;

use educe::Educe;
use numaward_topology::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{enforcement::Size, types::Interval};

/// Whether workloads that run are moved where a request is refused because the right nodes have no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RebalanceMode {
    /// Only where somebody asks for it (`numaward rebalance --apply`).
    #[default]
    Off,
    /// Also by itself, for commands, cgroups and units: not for containers of pods, as their runtime does not wait.
    Auto,
}

/// Moves of workloads that run, to make room for a request. Only for the strategy `native`.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Rebalance {
    /// Whether workloads are moved without being asked for.
    pub mode: RebalanceMode,
    /// How many of them may be moved for one request, where nobody asks for it.
    #[schemars(range(min = 1, max = 16))]
    #[educe(Default = 3)]
    pub max_moves: u32,
    /// How much memory may be moved in an hour, where nobody asks for it.
    #[educe(Default(expression = Size(Bytes::gib(16))))]
    pub max_bytes_per_hour: Size,
    /// For how long a workload that was moved stays where it is, unless somebody asks for its move.
    #[educe(Default(expression = Interval(Duration::from_mins(10))))]
    pub dwell_time: Interval,
}
