//! Watches where cgroups allocate their pages.
//!
//! `watch [--tracepoint] CGROUP-DIRECTORY[=NODES]…` prints how the probes are attached, then, for each line on
//! its input, what has been counted since the start: per cgroup and node, in pages. `NODES` are the
//! nodes promised to the cgroup, such as `0-1`; what is elsewhere is outside.

use std::{
    fs,
    io::{BufRead as _, stdin},
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::ExitCode,
};

use numaward_probes::{CgroupId, Mode, NodeCounters, Options, Probes};
use numaward_topology::{NodeSet, sysfs};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("watch: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let machine = sysfs::read(Path::new("/"))?;
    let (flags, directories): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let mut options = Options::new(&machine);
    match flags.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {}
        ["--tracepoint"] => options.alloc_modes = &[Mode::Tracepoint],
        _ => return Err(format!("unknown flags {flags:?}; the only one is --tracepoint").into()),
    }
    let mut probes = Probes::load(&options);
    for report in probes.reports() {
        let reason = report.reason.as_deref().unwrap_or("-");
        println!(
            "probe {} mode {} self-check {:?} reason {reason}",
            report.probe, report.mode, report.self_check
        );
    }
    let mut watched = Vec::new();
    for directory in &directories {
        let (path, allowed) =
            directory.split_once('=').map_or((&**directory, None), |(path, nodes)| (path, Some(nodes)));
        let allowed = allowed.map(str::parse::<NodeSet>).transpose()?;
        let id = fs::metadata(path).map_err(|error| format!("{path}: {error}"))?.ino();
        watched.push((path, probes.register(CgroupId(id), allowed.as_ref())?));
    }
    println!("ready");
    for line in stdin().lock().lines() {
        line?;
        let now = probes.counters()?;
        for &(path, slot) in &watched {
            if let Some(counters) = now.slots.get(&slot) {
                print(path, counters);
            }
        }
        print("other", &now.other);
        println!("unknown-node {}", now.unknown_node.0);
        for stats in probes.stats()? {
            println!("events-lost {}", stats.events_lost);
        }
    }
    Ok(())
}

fn print(name: &str, counters: &NodeCounters) {
    for (node, pages) in counters {
        println!(
            "{name} node {node} local {} remote {} outside {} kernel {}",
            pages.user_local.0, pages.user_remote.0, pages.user_outside.0, pages.kernel.0
        );
    }
}
