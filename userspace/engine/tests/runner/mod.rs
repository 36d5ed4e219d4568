//! Runs conformance vectors: records of what the real kubelet did, which the strategy `kubelet` must repeat.
//!
//! A directory of vectors has files `*.json` or `*.json.gz`. Each is an array of *scenarios* (a machine, a
//! configuration, and steps with what the kubelet answered) or of *state files* (with the text over which
//! their checksums are taken). One scenario or one state file counts as one vector. The format is described in
//! the README beside the vectors.

mod scenario;
mod vectors;

use std::{
    fmt, fs,
    io::Read as _,
    path::{Path, PathBuf},
};

use numaward_engine::checkpoint::{CpuCheckpoint, MemoryCheckpoint};
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
        match self.unrecorded {
            0 => write!(f, ")"),
            unrecorded => write!(f, "; {unrecorded} scenarios without a record)"),
        }
    }
}

/// The vectors that come with the sources.
pub(crate) fn own_vectors() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/conformance")
}

/// Runs all vectors of a directory.
pub(crate) fn run(directory: &Path) -> Result<Report, String> {
    let at = |path: &Path, error: &dyn fmt::Display| format!("{}: {error}", path.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(|error| at(directory, &error))? {
        let path = entry.map_err(|error| at(directory, &error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let plain = name.strip_suffix(".gz").unwrap_or(&name);
        if Path::new(plain).extension().is_some_and(|extension| extension == "json") {
            files.push((name, path));
        }
    }
    if files.is_empty() {
        return Err(at(directory, &"no vectors (files *.json or *.json.gz) in this directory"));
    }
    files.sort();
    let mut report = Report::default();
    for (name, path) in files {
        let text = read(&path).map_err(|error| at(&path, &error))?;
        let vectors: Vec<Value> = serde_json::from_str(&text).map_err(|error| at(&path, &error))?;
        for (index, vector) in vectors.into_iter().enumerate() {
            let title =
                vector.get("name").and_then(Value::as_str).map_or_else(|| index.to_string(), Into::into);
            run_vector(&mut report, format!("{name}: {title}"), vector);
        }
    }
    if report.scenarios + report.state_files + report.failures.len() == 0 {
        return Err(at(directory, &"no vectors in these files"));
    }
    Ok(report)
}

fn read(path: &Path) -> std::io::Result<String> {
    let file = fs::File::open(path)?;
    let mut text = String::new();
    if path.extension().is_some_and(|extension| extension == "gz") {
        flate2::read::GzDecoder::new(file).read_to_string(&mut text)?;
    } else {
        std::io::BufReader::new(file).read_to_string(&mut text)?;
    }
    Ok(text)
}

fn run_vector(report: &mut Report, vector: String, value: Value) {
    if value.pointer("/kubelet/record") == Some(&Value::Bool(false)) {
        report.unrecorded += 1;
        return;
    }
    let is_state_file = value.get("hash_input").is_some();
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
            let state = MemoryCheckpoint::read(&vector.content)?;
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
            differ(&mut differences, "hash_input", &vector.hash_input, &hash_input);
            differ(&mut differences, "content", &vector.content, &content);
            let checksum = format!("\"checksum\":{}}}", vector.checksum);
            if !content.ends_with(&checksum) {
                differences.push(format!("checksum: expected {checksum}, written {content}"));
            }
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
