//! Replays the traces of a directory with both strategies, by default those of this repository.
//!
//! `cargo run --profile dist -p numaward-engine --example simulate -- [DIR]`

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use numaward_simulation::trace::Trace;

use self::compare::Comparison;

#[path = "../tests/compare/mod.rs"]
mod compare;
#[path = "../tests/folder/mod.rs"]
mod folder;

fn all(directory: &Path) -> Result<Comparison, String> {
    let mut comparison = Comparison::new();
    for (_, traces) in folder::read::<Trace>(directory)? {
        for trace in &traces {
            comparison.add(trace);
        }
    }
    Ok(comparison)
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let directory = match arguments.as_slice() {
        [] => folder::own("traces"),
        [directory] => PathBuf::from(directory),
        _ => {
            eprintln!("usage: simulate [DIR]");
            return ExitCode::from(2);
        }
    };
    match all(&directory) {
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
