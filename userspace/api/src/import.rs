//! What `numaward import-kubelet-state` took over.

use serde::Serialize;

use super::MemoryBlock;

/// What was taken over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImportReport {
    /// What each container holds.
    pub containers: Vec<Container>,
    /// CPUs that are exclusive to nobody, as a list.
    pub shared_cpus: String,
    /// Resources of pods as a whole, which their containers share or divide.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<Pod>,
    /// Faults of the files that did not keep them from being read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
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
    pub memory: Vec<MemoryBlock>,
}

/// The resources of a pod as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    pub uid: String,
    /// Its exclusive CPUs, as a list; empty if it has none.
    pub cpus: String,
    pub memory: Vec<MemoryBlock>,
}
