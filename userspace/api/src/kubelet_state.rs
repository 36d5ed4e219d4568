//! Guarantees in the format of the kubelet's state files.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// All guarantees in the format of the kubelet's state files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct KubeletState {
    /// The content of `cpu_manager_state`.
    pub cpu_manager_state: String,
    /// The content of `memory_manager_state`.
    pub memory_manager_state: String,
    /// Entries that are not containers of pods, by name. Such an entry has the name of the workload in the place of the
    /// pod's UID.
    pub others: Vec<String>,
    /// Entries that a kubelet with the same policies would not accept unchanged, with the reason.
    pub problems: Vec<String>,
}
