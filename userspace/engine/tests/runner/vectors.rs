//! The format of the vectors.

use std::collections::BTreeSet;

use numaward_engine::simulation::format::{ConfigVector, MachineVector, PodVector};
use serde::Deserialize;
use serde_json::Value;

/// A state file, and the text over which its checksum is taken.
#[derive(Deserialize)]
pub(super) struct StateFile {
    pub(super) file: String,
    pub(super) content: String,
    /// Recorded with a program of one's own only: a kubelet that runs does not show it.
    pub(super) hash_input: Option<String>,
}

/// A machine, a configuration, and what the kubelet did with them.
#[derive(Deserialize)]
pub(super) struct Scenario {
    pub(super) machine: MachineVector,
    pub(super) config: ConfigVector,
    pub(super) initial: Value,
    /// What was recorded of each answer; else all.
    pub(super) compared: Option<BTreeSet<String>>,
    pub(super) steps: Vec<Step>,
}

#[derive(Deserialize)]
pub(super) struct Step {
    pub(super) op: String,
    pub(super) pod: Option<PodVector>,
    pub(super) pod_name: Option<String>,
    pub(super) container: Option<String>,
    /// `"none"`: the containers of an admitted pod are not started.
    pub(super) start: Option<String>,
    #[serde(default)]
    pub(super) order: Vec<String>,
    pub(super) machine: Option<MachineVector>,
    pub(super) config: Option<ConfigVector>,
    pub(super) expect: Option<Value>,
}
