//! Output of `numaward import-kubelet-state`.

use serde::Serialize;

use super::MemoryBlock;

/// The guarantees that were imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ImportReport {
    /// The guarantee of each container.
    pub containers: Vec<Container>,
    /// The CPUs of the shared pool, as a list.
    pub shared_cpus: String,
    /// Resources of pods as a whole, which their containers share or divide.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<Pod>,
    /// Faults of the files that did not keep them from being read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// The imported guarantee of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Container {
    /// The UID of the pod.
    pub pod_uid: String,
    /// The name of the container.
    pub container: String,
    /// The exclusive CPUs, as a list; empty if there are none.
    pub cpus: String,
    /// The guaranteed memory.
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
