//! The kubelet's state files: `cpu_manager_state` and `memory_manager_state`.
//!
//! Both are compact JSON with a checksum over a dump of the data in Go notation (module `dump`). Reading validates
//! everything and repairs nothing. A written file equals the kubelet's byte for byte, except for the order of a
//! container's memory blocks: the kubelet's is random, here blocks are sorted by kind.
//!
//! This module only converts between text and data. The caller that writes a file must not overwrite one that could
//! not be read.

mod cpu;
mod data;
mod dump;
mod memory;

use std::fmt::Write as _;

use numaward_topology::set::ListError;

pub use self::{cpu::CpuCheckpoint, data::unverified_data, memory::MemoryCheckpoint};

/// Reason why a state file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The file is not JSON of the expected form.
    #[error("the checkpoint is not JSON of the expected form: {problem} (line {line}, column {column})")]
    Json {
        problem: String,
        /// Line number, starting at 1.
        line: usize,
        /// Column number, starting at 1.
        column: usize,
    },
    /// The checksum does not match the data: the file is damaged or was edited.
    #[error("the checkpoint is corrupted: its checksum is {stored}, that of its data is {computed}")]
    Checksum {
        /// Checksum in the file.
        stored: u64,
        /// Checksum of the data in the file.
        computed: u64,
    },
    /// The part `data` does not have its checksum.
    #[error(
        "the checkpoint is damaged, or of a kubelet that is not known: its dataChecksum is {stored}, that of its data is {computed}"
    )]
    DataChecksum { stored: u64, computed: u64 },
    /// A value is not a CPU list. The first field is its place in the file.
    #[error("the checkpoint is corrupted: {0}: {1}")]
    Cpus(String, ListError),
    /// A value is not the id of a NUMA node. The first field is its place in the file.
    #[error("the checkpoint is corrupted: {0}: {1:?} is not the id of a NUMA node")]
    Node(String, String),
    /// A value is not a kind of memory. The first field is its place in the file.
    #[error("the checkpoint is corrupted: {0}: {1:?} is not a kind of memory")]
    Kind(String, String),
    /// The amounts of a node contradict each other.
    #[error(
        "the checkpoint is corrupted: node {node}, {kind}: {reserved} bytes guaranteed and {free} free do not \
         add up to {allocatable} allocatable"
    )]
    Account {
        node: u32,
        kind: String,
        /// Guaranteed bytes.
        reserved: u64,
        free: u64,
        /// Bytes that can be guaranteed.
        allocatable: u64,
    },
    /// The file has pod entries, which a kubelet only reads with the feature gate `PodLevelResourceManagers`.
    #[error("the checkpoint is of a version that needs the gate PodLevelResourceManagers")]
    OtherVersion,
    /// A file of version 1 has a container, and its pod cannot be determined.
    #[error("containerID '{0}' not found in initial containers list")]
    UnknownContainer(String),
}

impl From<serde_json::Error> for CheckpointError {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        let problem = error.to_string();
        // serde_json repeats the place at the end of its message.
        let problem = problem.split(" at line ").next().unwrap_or_default().to_owned();
        Self::Json { problem, line, column }
    }
}

/// JSON as Go writes it: `<`, `>` and `&` are escaped, as are the two line separators of Unicode.
fn go_json(value: &impl serde::Serialize) -> Result<String, CheckpointError> {
    let plain = serde_json::to_string(value)?;
    let mut text = String::with_capacity(plain.len());
    for char in plain.chars() {
        // These occur within strings only.
        match char {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => {
                // Writing to a String does not fail.
                let _ = write!(text, "\\u{:04x}", u32::from(char));
            }
            _ => text.push(char),
        }
    }
    Ok(text)
}
