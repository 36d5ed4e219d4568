//! `numaward-load` creates a known memory load: a number of pages, touched from given CPUs, under a given memory
//! policy.
//!
//! # Problem
//! A test of page counters needs a program with few and known pages of its own that reports the node of each of its
//! pages.
//!
//! # Algorithm
//! Map the memory, enter the cgroup, and start one thread per CPU. Each thread takes an equal share of the pages, sets
//! its memory policy and touches page by page. Then query the node of each page (`move_pages(2)` without a
//! destination), print a report, and hold the memory (or keep walking) under the same policy until the end is
//! requested. The policy matters during the hold too: NUMA balancing may move a page of a mapping without a policy of
//! its own depending on the policy of the running thread.
//!
//! # Invariants
//! - No memory is touched before the cgroup is entered.
//! - The report is printed after the last first touch and before the hold, so the memory is there when the report is
//!   read.
//! - The program itself needs about one page per thousand pages of a 64 MiB load.

mod arguments;
mod error;
mod memory;
mod policy;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use arguments::{Arguments, MemoryKind, ReportFormat};
use clap::Parser as _;
use error::Error;
use memory::Memory;
use numaward_topology::{CpuId, CpuSet, NodeSet};
use rustix::thread::{CpuSet as AffinityMask, sched_setaffinity};
use serde::Serialize;

/// The interval at which a holding process checks whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Stack size of a thread, in bytes. The default of 2 MiB may be a whole transparent huge page, which would be counted.
const STACK_SIZE: usize = 128 << 10;

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    check_nodes(arguments, Path::new("/sys/devices/system/node/has_memory"))?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGTERM, libc::SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(Error::Signal)?;
    }
    let memory = Memory::map(arguments)?;
    if let Some(cgroup) = &arguments.cgroup {
        let path = cgroup.join("cgroup.procs");
        // Opened without `create`, so that no file is created on another file system than cgroupfs.
        let mut procs = fs::OpenOptions::new().write(true).open(&path).map_err(Error::cgroup(&path))?;
        procs.write_all(b"0").map_err(Error::cgroup(&path))?;
    }

    let cpus: Vec<CpuId> = arguments.cpus.iter().flat_map(CpuSet::iter).collect();
    let threads = arguments.threads.unwrap_or(cpus.len().max(1));
    let started = Instant::now();
    let deadline =
        |hold: f64| Duration::try_from_secs_f64(hold).ok().and_then(|hold| Instant::now().checked_add(hold));
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|index| {
                let cpu = (!cpus.is_empty()).then(|| cpus[index % cpus.len()]);
                let memory = &memory;
                let work = move || touch(arguments, memory, cpu, index, threads);
                thread::Builder::new().stack_size(STACK_SIZE).spawn_scoped(scope, work).map_err(Error::Spawn)
            })
            .collect();
        for worker in workers {
            worker?.join().map_err(|_| Error::Thread)??;
        }
        report(arguments, &memory, threads, started.elapsed())
    })?;

    // The walking threads inherit it.
    arguments.policy.apply()?;
    let end = arguments.hold.map(deadline);
    let is_over =
        || stop.load(Ordering::Relaxed) || end.is_some_and(|end| end.is_none_or(|end| Instant::now() >= end));
    thread::scope(|scope| {
        if arguments.walk {
            for index in 0..threads {
                let cpu = (!cpus.is_empty()).then(|| cpus[index % cpus.len()]);
                let (memory, is_over) = (&memory, &is_over);
                scope.spawn(move || {
                    // The thread was pinned to this CPU before. If that is not possible any more, it walks on another
                    // CPU.
                    let _ = pin(cpu);
                    let (index, threads) = if arguments.shared { (0, 1) } else { (index, threads) };
                    memory.walk(arguments.walk_size, index, threads, is_over);
                });
            }
        }
        while !is_over() {
            thread::sleep(POLL_INTERVAL);
        }
    });
    Ok(())
}

fn touch(
    arguments: &Arguments,
    memory: &Memory,
    cpu: Option<CpuId>,
    index: usize,
    threads: usize,
) -> Result<(), Error> {
    pin(cpu)?;
    arguments.policy.apply()?;
    if arguments.untouched { Ok(()) } else { memory.touch(index, threads) }
}

/// Binds this thread to a CPU.
fn pin(cpu: Option<CpuId>) -> Result<(), Error> {
    let Some(cpu) = cpu else { return Ok(()) };
    let index = usize::try_from(cpu.0).unwrap_or(usize::MAX);
    let refused = |source: io::Error| Error::Pin { cpu: cpu.0, source };
    if index >= AffinityMask::MAX_CPU {
        return Err(refused(io::ErrorKind::InvalidInput.into()));
    }
    let mut mask = AffinityMask::new();
    mask.set(index);
    sched_setaffinity(None, &mask).map_err(|errno| refused(errno.into()))
}

/// Checks that the nodes exist, because the kernel's own error would not name the missing node.
fn check_nodes(arguments: &Arguments, path: &Path) -> Result<(), Error> {
    let text = fs::read_to_string(path).map_err(|source| Error::Nodes { path: path.to_owned(), source })?;
    let there: NodeSet = text
        .trim()
        .parse()
        .map_err(|error| Error::Nodes { path: path.to_owned(), source: io::Error::other(error) })?;
    match arguments.policy.nodes().iter().find(|&node| !there.contains(node)) {
        Some(node) => Err(Error::NoNode { node: node.0, there: there.to_string() }),
        None => Ok(()),
    }
}

/// Report of the touched memory and of the nodes that the kernel has put it on.
#[derive(Serialize)]
struct PlacementReport {
    pid: u32,
    kind: MemoryKind,
    policy: String,
    threads: usize,
    bytes: u64,
    /// Start of the memory.
    address: usize,
    /// Number of 4 KiB pages, regardless of their folio's size.
    pages: usize,
    pages_by_node: BTreeMap<u32, usize>,
    /// Pages that were touched and are gone since (swapped out or reclaimed).
    absent_pages: usize,
    /// The part of `bytes` in transparent huge pages.
    transparent_huge_bytes: u64,
    touch_seconds: f64,
}

fn report(arguments: &Arguments, memory: &Memory, threads: usize, took: Duration) -> Result<(), Error> {
    let nodes = memory.nodes_of_pages()?;
    let mut pages_by_node = BTreeMap::new();
    for node in nodes.iter().flatten() {
        *pages_by_node.entry(*node).or_default() += 1;
    }
    let placement = PlacementReport {
        pid: std::process::id(),
        kind: arguments.kind,
        policy: arguments.policy.to_string(),
        threads,
        bytes: arguments.size,
        address: memory.address(),
        pages: nodes.len(),
        absent_pages: nodes.iter().filter(|node| node.is_none()).count(),
        transparent_huge_bytes: memory.transparent_huge_bytes(Path::new("/proc/self/smaps"))?,
        pages_by_node,
        touch_seconds: took.as_secs_f64(),
    };
    let mut out = io::stdout().lock();
    match arguments.report {
        ReportFormat::Json => {
            serde_json::to_writer(&mut out, &placement).map_err(|error| Error::Print(error.into()))?;
            writeln!(out)
        }
        ReportFormat::Text => {
            let PlacementReport { pages, kind, policy, absent_pages, touch_seconds, .. } = &placement;
            let nodes: Vec<_> =
                placement.pages_by_node.iter().map(|(node, pages)| format!("node {node}: {pages}")).collect();
            writeln!(
                out,
                "{pages} pages ({kind}, policy {policy}) touched in {touch_seconds:.3} s; {}; absent: {absent_pages}; in transparent huge pages: {}",
                nodes.join(", "),
                placement.transparent_huge_bytes / memory::page() as u64,
            )
        }
    }
    .and_then(|()| out.flush())
    .map_err(Error::Print)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("has_memory");
        let check = |policy: &str| {
            let arguments =
                Arguments::try_parse_from(["numaward-load", "--size", "1M", "--policy", policy]).unwrap();
            check_nodes(&arguments, &path).map_err(|error| error.to_string())
        };
        assert!(check("bind:0").unwrap_err().contains("has_memory"));
        fs::write(&path, "x\n").unwrap();
        assert!(check("bind:0").unwrap_err().contains("has_memory"));
        fs::write(&path, "0,2\n").unwrap();
        assert_eq!(check("interleave:0,2"), Ok(()));
        assert_eq!(check("bind:0-1").unwrap_err(), "there is no node 1 with memory: this machine has 0,2");
    }
}
