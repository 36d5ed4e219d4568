//! Memory `QoS`: how requests and limits become `memory.min`, `memory.low` and `memory.high`.

use numaward_engine::memory_qos as engine;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// Whether what is promised is protected from reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MemoryReservationPolicy {
    /// It is not.
    None,
    /// For good (`memory.min`) where the limit is no more than what is promised, else as far as possible
    /// (`memory.low`).
    TieredReservation,
}

impl From<MemoryReservationPolicy> for engine::MemoryReservationPolicy {
    fn from(policy: MemoryReservationPolicy) -> Self {
        match policy {
            MemoryReservationPolicy::None => Self::None,
            MemoryReservationPolicy::TieredReservation => Self::TieredReservation,
        }
    }
}

/// A fraction of more than 0 and at most 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Factor(pub engine::ThrottlingFactor);

inline_schema!(Factor, { "type": ["number", "string"], "examples": [0.9] });

/// What is done beside the kubelet's rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MemoryQos {
    /// Whether `memory.high` of a workload is raised that is slowed down there and makes no progress: half the way to its
    /// limit each time, and at last taken away. It is reported in any case.
    pub raise_high_on_stall: bool,
}
