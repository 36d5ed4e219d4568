//! The kubelet's state files: `cpu_manager_state` and `memory_manager_state`.
//!
//! Both are compact JSON with a checksum over a dump of the data in Go's notation (module `dump`). Reading
//! checks everything; nothing is repaired and nothing guessed. Writing gives the kubelet's bytes, except that the
//! order of a container's blocks of memory is not defined there (it is random); here it is that of the kinds.
//!
//! This module makes and reads text. Who writes files is elsewhere, and must not overwrite one that could not be
//! read.

mod cpu;
mod data;
mod dump;
mod memory;

use std::fmt::Write as _;

use numaward_topology::set::ListError;

pub use self::{cpu::CpuCheckpoint, data::unverified_data, memory::MemoryCheckpoint};

/// A state file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// It is no JSON of the expected form.
    #[error("the checkpoint is no JSON of the expected form: {problem} (line {line}, column {column})")]
    Json {
        /// What is wrong.
        problem: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// The checksum does not fit the data: it is damaged, or was edited.
    #[error("the checkpoint is corrupted: its checksum is {stored}, that of its data is {computed}")]
    Checksum {
        /// As in the file.
        stored: u64,
        /// As it should be.
        computed: u64,
    },
    /// The part `data` does not have its checksum.
    #[error(
        "the checkpoint is damaged, or of a kubelet that is not known: its dataChecksum is {stored}, that of its data is {computed}"
    )]
    DataChecksum {
        /// As in the file.
        stored: u64,
        /// As it should be.
        computed: u64,
    },
    /// What is in one place is not a set of CPUs.
    #[error("the checkpoint is corrupted: {0}: {1}")]
    Cpus(String, ListError),
    /// What is in one place is not the id of a node.
    #[error("the checkpoint is corrupted: {0}: {1:?} is not the id of a NUMA node")]
    Node(String, String),
    /// What is in one place is not a kind of memory.
    #[error("the checkpoint is corrupted: {0}: {1:?} is not a kind of memory")]
    Kind(String, String),
    /// The account of a node contradicts itself.
    #[error(
        "the checkpoint is corrupted: node {node}, {kind}: {reserved} bytes promised and {free} free do not \
         add up to {allocatable} allocatable"
    )]
    Account {
        /// The node.
        node: u32,
        /// The kind of memory.
        kind: String,
        /// Bytes that are promised.
        reserved: u64,
        /// Bytes that are free.
        free: u64,
        /// Bytes that can be promised.
        allocatable: u64,
    },
    /// It has what pods have as a whole, of which the kubelet knows with the gate `PodLevelResourceManagers` only.
    #[error("the checkpoint is of a version that needs the gate PodLevelResourceManagers")]
    OtherVersion,
    /// A version 1 file names a container that nobody knows.
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
