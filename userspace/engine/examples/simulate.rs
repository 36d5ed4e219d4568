//! Replays the traces of a directory with both strategies.
//!
//! `cargo run --release -p numaward-engine --example simulate -- DIR`

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use numaward_engine::simulation::{compare::Comparison, trace::Trace};

fn compare(directory: &Path) -> Result<Comparison, String> {
    let at = |path: &Path, error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(|error| at(directory, &error))? {
        let path = entry.map_err(|error| at(directory, &error))?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            files.push(path);
        }
    }
    files.sort();
    let mut comparison = Comparison::new();
    for file in &files {
        let text = fs::read_to_string(file).map_err(|error| at(file, &error))?;
        let traces: Vec<Trace> = serde_json::from_str(&text).map_err(|error| at(file, &error))?;
        for trace in &traces {
            comparison.add(trace);
        }
    }
    if comparison.traces() == 0 {
        return Err(at(directory, &"no traces (files *.json) in this directory"));
    }
    Ok(comparison)
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [directory] = arguments.as_slice() else {
        eprintln!("usage: simulate DIR");
        return ExitCode::from(2);
    };
    match compare(&PathBuf::from(directory)) {
        Ok(comparison) => {
            println!("{comparison}");
            if comparison.failures().is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
