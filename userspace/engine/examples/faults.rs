//! Runs the fault scenarios of a directory, by default those of this repository: the strategy `kubelet` is compared
//! with the record, `native` with the desired outcomes.
//!
//! `cargo run --profile dist -p numaward-engine --example faults -- [DIR]`

use std::{path::PathBuf, process::ExitCode};

#[path = "../tests/desired/mod.rs"]
mod desired;
#[path = "../tests/folder/mod.rs"]
mod folder;
#[path = "../tests/runner/mod.rs"]
mod runner;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let directory = match arguments.as_slice() {
        [] => folder::own("faults"),
        [directory] => PathBuf::from(directory),
        _ => {
            eprintln!("usage: faults [DIR]");
            return ExitCode::from(2);
        }
    };
    let both = desired::run(&directory).and_then(|native| Ok((runner::run(&directory)?, native)));
    match both {
        Ok((kubelet, native)) => {
            println!("kubelet, against the record: {kubelet}");
            println!("native, against what is desired: {native}");
            let failed = kubelet.failures.len() + native.failed.len();
            println!("{} scenarios, {failed} failures", native.passed + native.failed.len());
            if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
