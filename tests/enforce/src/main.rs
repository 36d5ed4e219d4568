//! `numaward-enforce-check` checks enforcement and the ledger store against the kernel it runs on.
//!
//! The problem: what the kernel makes of a knob is not in any document; only a kernel shows it. Trees of plain files
//! stand for cgroups in the unit tests, and believe everything.
//!
//! Algorithm: each check makes cgroups of its own below the root, gives and takes settings through the library, and
//! looks with its own eyes: at cgroupfs, at `/proc/PID/status`. It prints `ok NAME` or `FAILED NAME: why`.
//!
//! To be run as root on a machine that nobody needs, with CPUs 0-3, nodes 0-1 and cgroup v2 at /sys/fs/cgroup. The
//! checks of systemd run where it is the init.

#![forbid(unsafe_code)]

mod check;
mod checks;
mod child;
mod ledger;
mod systemd;

use std::{process::ExitCode, time::Instant};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(String::as_str).collect();
    if let ["child", rest @ ..] = &words[..] {
        return match child::main(rest) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let mut failed = 0;
    for (name, check) in checks::ALL.iter().chain(ledger::ALL).chain(systemd::all()) {
        if !words.is_empty() && !words.iter().any(|word| name.contains(word)) {
            continue;
        }
        let started = Instant::now();
        match check() {
            Ok(said) => println!("ok {name}: {said} ({} ms)", started.elapsed().as_millis()),
            Err(error) => {
                println!("FAILED {name}: {error:#}");
                failed += 1;
            }
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
