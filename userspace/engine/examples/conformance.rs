//! Runs the conformance vectors of a directory, by default those of this repository.
//!
//! `cargo run --profile dist -p numaward-engine --example conformance -- [DIR]`

use std::{path::PathBuf, process::ExitCode};

#[path = "../tests/folder/mod.rs"]
mod folder;
#[path = "../tests/runner/mod.rs"]
mod runner;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let directory = match arguments.as_slice() {
        [] => folder::own("conformance"),
        [directory] => PathBuf::from(directory),
        _ => {
            eprintln!("usage: conformance [DIR]");
            return ExitCode::from(2);
        }
    };
    match runner::run(&directory) {
        Ok(report) => {
            println!("{report}");
            if report.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
