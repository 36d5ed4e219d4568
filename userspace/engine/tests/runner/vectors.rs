//! Format of the vectors.

use std::collections::BTreeSet;

use numaward_simulation::format::{ConfigVector, MachineVector, PodVector};
use serde::Deserialize;
use serde_json::Value;

/// State file with the text that its checksum covers.
#[derive(Deserialize)]
pub(super) struct StateFile {
    pub(super) file: String,
    pub(super) content: String,
    /// Only recorded with a modified program; a running kubelet does not expose it.
    pub(super) hash_input: Option<String>,
}

/// Machine and configuration with the kubelet's record.
#[derive(Deserialize)]
pub(super) struct Scenario {
    pub(super) machine: MachineVector,
    pub(super) config: ConfigVector,
    pub(super) initial: Value,
    /// Recorded members of each answer; all if absent.
    pub(super) compared: Option<BTreeSet<String>>,
    pub(super) steps: Vec<VectorStep>,
}

#[derive(Deserialize)]
pub(super) struct VectorStep {
    pub(super) op: String,
    pub(super) pod: Option<PodVector>,
    pub(super) pod_name: Option<String>,
    pub(super) container: Option<String>,
    /// With `"none"`, the containers of an admitted pod are not started.
    pub(super) start: Option<String>,
    #[serde(default)]
    pub(super) order: Vec<String>,
    pub(super) machine: Option<MachineVector>,
    pub(super) config: Option<ConfigVector>,
    pub(super) expect: Option<Value>,
}
