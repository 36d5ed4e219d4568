//! `numaward-enforce-check` checks enforcement and the ledger store against the running kernel.
//!
//! # Problem
//! The effect of a knob is not fully documented; only a kernel shows it. The trees of plain files in the unit tests
//! accept every write.
//!
//! # Algorithm
//! Each check creates cgroups below the root, applies and releases settings through the library, and reads the effect
//! by itself: from cgroupfs and `/proc/PID/status`. It prints `ok NAME` or `FAILED: NAME: REASON`.
//!
//! Run it as root on a machine that can be discarded, with CPUs 0-3, nodes 0-1 and cgroup v2 at /sys/fs/cgroup. The
//! checks of systemd run if it is the init.

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
                println!("FAILED: {name}: {error:#}");
                failed += 1;
            }
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
