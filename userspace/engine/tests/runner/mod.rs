//! Runs conformance vectors: records of what the real kubelet did, which the strategy `kubelet` must repeat.
//!
//! A directory of vectors has files `*.json` or `*.json.gz`. Each is an array of *scenarios* (a machine, a
//! configuration, and steps with what the kubelet answered) or of *state files* (with the text over which
//! their checksums are taken). One scenario or one state file counts as one vector. The format is described in
//! the README beside the vectors.

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

/// What a run found.
#[derive(Default)]
pub(crate) struct Report {
    /// Scenarios that passed.
    pub(crate) scenarios: usize,
    /// State files that passed.
    pub(crate) state_files: usize,
    /// Vectors that say that nothing was recorded.
    pub(crate) unrecorded: usize,
    /// Scenarios in which the kubelet starts with nonsense, which is not repeated: the start is refused, as desired.
    pub(crate) refused: usize,
    /// The vectors that failed.
    pub(crate) failures: Vec<Failure>,
}

/// A vector that failed.
pub(crate) struct Failure {
    /// File and name.
    pub(crate) vector: String,
    /// What was different, the first first.
    pub(crate) differences: Vec<String>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 10;
        for failure in self.failures.iter().take(SHOWN) {
            writeln!(f, "{}", failure.vector)?;
            for difference in failure.differences.iter().take(3) {
                writeln!(f, "  {difference}")?;
            }
        }
        if self.failures.len() > SHOWN {
            writeln!(f, "… and {} more", self.failures.len() - SHOWN)?;
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
pub(crate) fn run(directory: &Path) -> Result<Report, String> {
    let mut report = Report::default();
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

fn run_vector(report: &mut Report, vector: String, value: Value) {
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
        report.failures.push(Failure { vector, differences });
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
            // The checksum is a part of it.
            differ(&mut differences, "content", &vector.content, &content);
        }
    }
    differences
}

/// Notes a difference.
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
