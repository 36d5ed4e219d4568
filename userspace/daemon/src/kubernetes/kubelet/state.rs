//! What the kubelet promised, from its state files `cpu_manager_state` and `memory_manager_state`.
//!
//! The kubelet writes them when it admits a pod, before the first container of it exists, by renaming a new file over
//! the old. Both are read with their checksums; a damaged one is told, and what was read before stays.

use std::{collections::BTreeMap, io, path::Path};

use numaward_engine::{
    Ledger,
    checkpoint::{CpuCheckpoint, MemoryCheckpoint},
    kubelet::Checkpoints,
};

use super::policies::read_text;

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

/// Reads the state files in the kubelet's directory as the ledger that they make, by the UID of the pod and the name of
/// the container. None at all: nothing is promised.
pub fn read(directory: &Path) -> Result<Ledger, StateError> {
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
    Ok(read.ledger())
}
