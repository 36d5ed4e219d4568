//! What is promised, as the kubelet writes it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What is promised, as the kubelet's state files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct KubeletState {
    /// The content of `cpu_manager_state`.
    pub cpu_manager_state: String,
    /// The content of `memory_manager_state`.
    pub memory_manager_state: String,
    /// What is in them and is no container of a pod, by name. Where a pod has its UID, a workload has its name.
    pub others: Vec<String>,
    /// What a kubelet with the same policies would not take over as it is, and why.
    pub problems: Vec<String>,
}
