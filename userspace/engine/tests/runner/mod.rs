//! Runs conformance vectors: records of the real kubelet that the strategy `kubelet` must repeat.
//!
//! A directory of vectors has files `*.json` or `*.json.gz`. Each is an array of *scenarios* (a machine, a
//! configuration, and steps with the kubelet's answers) or of *state files* (with the text that their checksums
//! cover). A scenario or a state file counts as one vector. The README next to the vectors describes the format.

mod scenario;
mod vectors;

use std::{fmt, path::Path};

use numaward_engine::{
    checkpoint::{CpuCheckpoint, MemoryCheckpoint},
    policy::KubeletVersion,
};
use serde_json::Value;

use self::vectors::Scenario;
use self::vectors::StateFile;

/// Results of a run.
#[derive(Default)]
pub(crate) struct ConformanceReport {
    /// Number of scenarios that passed.
    pub(crate) scenarios: usize,
    /// Number of state files that passed.
    pub(crate) state_files: usize,
    /// Number of vectors without a record.
    pub(crate) unrecorded: usize,
    /// Number of scenarios in which the kubelet starts with an invalid state; here the start is refused, as desired.
    pub(crate) refused: usize,
    pub(crate) failures: Vec<VectorFailure>,
}

/// Vector that failed.
pub(crate) struct VectorFailure {
    /// File and name.
    pub(crate) vector: String,
    /// Differences in order.
    pub(crate) differences: Vec<String>,
}

impl fmt::Display for ConformanceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_FAILURES_SHOWN: usize = 10;
        for failure in self.failures.iter().take(MAX_FAILURES_SHOWN) {
            writeln!(f, "{}", failure.vector)?;
            for difference in failure.differences.iter().take(3) {
                writeln!(f, "  {difference}")?;
            }
        }
        if self.failures.len() > MAX_FAILURES_SHOWN {
            writeln!(f, "… and {} more", self.failures.len() - MAX_FAILURES_SHOWN)?;
        }
        let (scenarios, files) = (self.scenarios, self.state_files);
        write!(f, "{} passed, {} failed", scenarios + files, self.failures.len())?;
        write!(f, " (passed: {scenarios} scenarios, {files} state files")?;
        if self.unrecorded > 0 {
            write!(f, "; {} scenarios without a record", self.unrecorded)?;
        }
        if self.refused > 0 {
            write!(f, "; {} refused at the start, as desired", self.refused)?;
        }
        write!(f, ")")
    }
}

/// Runs all vectors of a directory.
pub(crate) fn run(directory: &Path) -> Result<ConformanceReport, String> {
    let mut report = ConformanceReport::default();
    for (name, vectors) in crate::folder::read::<Value>(directory)? {
        for (index, vector) in vectors.into_iter().enumerate() {
            let title =
                vector.get("name").and_then(Value::as_str).map_or_else(|| index.to_string(), Into::into);
            run_vector(&mut report, format!("{name}: {title}"), vector);
        }
    }
    if report.scenarios + report.state_files + report.unrecorded + report.failures.len() == 0 {
        return Err(format!("{}: no vectors in these files", directory.display()));
    }
    Ok(report)
}

fn run_vector(report: &mut ConformanceReport, vector: String, value: Value) {
    if value.pointer("/kubelet/record") == Some(&Value::Bool(false)) {
        report.unrecorded += 1;
        return;
    }
    let wants_refusal = |check: &Value| check["step"] == -1 && check["start"] == "refused";
    let checks = value.pointer("/desired/checks").and_then(Value::as_array);
    let wants_refusal = checks.is_some_and(|checks| checks.iter().any(wants_refusal));
    if wants_refusal && serde_json::from_value::<Scenario>(value.clone()).is_ok_and(|of| of.is_refused()) {
        report.refused += 1;
        return;
    }
    let is_state_file = value.get("content").is_some();
    let differences = if is_state_file {
        serde_json::from_value(value).map(|file| check_state_file(&file))
    } else {
        serde_json::from_value::<Scenario>(value).map(|scenario| scenario.run())
    };
    let differences = differences.unwrap_or_else(|error| vec![format!("not a vector: {error}")]);
    if !differences.is_empty() {
        report.failures.push(VectorFailure { vector, differences });
    } else if is_state_file {
        report.state_files += 1;
    } else {
        report.scenarios += 1;
    }
}

/// Reads and writes a state file.
fn check_state_file(vector: &StateFile) -> Vec<String> {
    let read_and_write = || {
        if vector.file == CpuCheckpoint::FILE {
            let state = CpuCheckpoint::read(&vector.content)?;
            Ok((state.hash_input(), state.write()?))
        } else {
            let state = MemoryCheckpoint::read(&vector.content, KubeletVersion::V1_32)?;
            Ok((state.hash_input()?, state.write()?))
        }
    };
    if ![CpuCheckpoint::FILE, MemoryCheckpoint::FILE].contains(&vector.file.as_str()) {
        return vec![format!("unknown state file {:?}", vector.file)];
    }
    let mut differences = Vec::new();
    match read_and_write() {
        Err(error) => {
            let error: numaward_engine::CheckpointError = error;
            differences.push(format!("cannot be read: {error}"));
        }
        Ok((hash_input, content)) => {
            let expected = vector.hash_input.as_ref().unwrap_or(&hash_input);
            differ(&mut differences, "hash_input", expected, &hash_input);
            // The content includes the checksum.
            differ(&mut differences, "content", &vector.content, &content);
        }
    }
    differences
}

/// Adds a difference if the values differ.
fn differ<T: PartialEq + fmt::Debug + ?Sized>(
    differences: &mut Vec<String>,
    what: &str,
    expected: &T,
    got: &T,
) {
    if expected != got {
        differences.push(format!("{what}: expected {expected:?}, got {got:?}"));
    }
}
