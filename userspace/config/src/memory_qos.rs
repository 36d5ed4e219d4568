//! Memory `QoS`: computation of `memory.min`, `memory.low` and `memory.high` from requests and limits.

use numaward_engine::memory_qos as engine;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// The protection of guaranteed memory from reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MemoryReservationPolicy {
    /// No protection.
    None,
    /// Strict protection (`memory.min`) if the limit is not above the guarantee, otherwise protection by best effort
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

/// A fraction above 0 and at most 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Factor(pub engine::ThrottlingFactor);

inline_schema!(Factor, { "type": ["number", "string"], "examples": [0.9] });

/// Measures that go beyond the kubelet's rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MemoryQos {
    /// Raises `memory.high` of a throttled workload that makes no progress: by half of the distance to its limit each
    /// time, and finally removes it. The stall is reported in any case.
    pub raise_high_on_stall: bool,
}
