//! What `numaward import-kubelet-state` took over.

use serde::Serialize;

use super::Block;

/// What was taken over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Imported {
    /// What each container holds.
    pub containers: Vec<Container>,
    /// CPUs that are exclusive to nobody, as a list.
    pub shared_cpus: String,
}

/// What a container holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// The UID of its pod.
    pub pod_uid: String,
    /// Its name.
    pub container: String,
    /// Its exclusive CPUs, as a list; empty if it has none.
    pub cpus: String,
    /// Memory promised to it.
    pub memory: Vec<Block>,
}
