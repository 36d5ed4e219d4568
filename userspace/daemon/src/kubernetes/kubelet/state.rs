//! What the kubelet promised, from its state files `cpu_manager_state` and `memory_manager_state`.
//!
//! The kubelet writes them when it admits a pod, before the first container of it exists, by renaming a new file over
//! the old. Both are read with their checksums; a damaged one is told, and what was read before stays.

use std::{collections::BTreeMap, io, path::Path};

use numaward_engine::{
    Allocation, ContainerName, Ledger, OwnerId,
    checkpoint::{CpuCheckpoint, MemoryCheckpoint},
    kubelet::Checkpoints,
};
use numaward_topology::{CpuSet, NodeSet};

use super::policies::read_text;

/// What the kubelet promised, by the UID of the pod and the name of the container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promised {
    /// The ledger that its state files make.
    pub ledger: Ledger,
    /// Init containers and others alike.
    pub pods: BTreeMap<OwnerId, BTreeMap<ContainerName, Allocation>>,
}

/// The state files cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file cannot be read.
    #[error("{path}: cannot be read: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// A file is not what the kubelet writes.
    #[error(transparent)]
    Checkpoint(#[from] numaward_engine::StartError),
}

impl Promised {
    /// Reads the state files in the kubelet's directory. None at all: nothing is promised.
    pub fn read(directory: &Path) -> Result<Self, StateError> {
        let text = |file: &str| {
            let path = directory.join(file);
            match read_text(&path) {
                Ok(text) => Ok(Some(text)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(source) => Err(StateError::Read { path: path.display().to_string(), source }),
            }
        };
        let (cpus, memory) = (text(CpuCheckpoint::FILE)?, text(MemoryCheckpoint::FILE)?);
        let directory = directory.display().to_string();
        let read = Checkpoints::read(cpus.as_deref(), memory.as_deref(), &directory)?;
        Ok(Self::of(&read))
    }

    fn of(checkpoints: &Checkpoints) -> Self {
        let ledger = checkpoints.ledger();
        let mut pods: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
        for (owner, container, allocation) in ledger.allocations() {
            pods.entry(owner.clone()).or_default().insert(container.clone(), allocation.clone());
        }
        Self { ledger, pods }
    }

    /// On which nodes the memory of a container is to be. Where it is not known which container it is, this is
    /// wherever any of the pod's may be. None: nothing is promised.
    pub fn nodes_of(&self, pod: &str, container: Option<&str>) -> Option<NodeSet> {
        let containers = self.pods.get(&pod.into())?;
        let nodes: NodeSet = match container {
            Some(container) => containers.get(&container.into())?.memory_nodes(),
            None => containers.values().flat_map(|of| of.memory_nodes().iter().collect::<Vec<_>>()).collect(),
        };
        (!nodes.is_empty()).then_some(nodes)
    }

    /// The exclusive CPUs of a container; all of the pod's where it is not known which container it is.
    pub fn cpus_of(&self, pod: &str, container: Option<&str>) -> CpuSet {
        let Some(containers) = self.pods.get(&pod.into()) else { return CpuSet::new() };
        containers
            .iter()
            .filter(|(name, _)| container.is_none_or(|container| name.as_str() == container))
            .filter_map(|(_, of)| of.cpus.as_ref())
            .flat_map(CpuSet::iter)
            .collect()
    }
}
