//! What the probes beside that of allocations cost.
//!
//! Each is attached together with a program that does nothing on the same hook, and a load makes that event happen. The
//! kernel's BPF statistics measure both; of several rounds, the medians of the time per run are printed. Some 30 ns
//! of each are the statistics' own clock, so a ratio is a little less than that of the programs themselves.
//!
//! Sampled accesses need several nodes and OOM kills need victims: no load here makes them.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{Read as _, Seek as _, Write as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use aya::{Btf, Ebpf, programs::BtfTracePoint};
use numaward_probes::{
    CgroupId, Fakes, Mode, Options, Probe, Probes,
    pmu::{Event, Events},
    stats_window,
};
use numaward_topology::{CpuId, Machine};

use crate::{EMPTY, Result, count, median, nanoseconds};

const ROUNDS: usize = 15;
/// What makes this program a process that has to reclaim memory.
pub(crate) const RECLAIM: &str = "reclaim";
/// Larger than what its cgroup may have.
const FILE_SIZE: usize = 64 << 20;
const LIMIT: u64 = 16 << 20;

/// What makes an event happen.
type Load = fn() -> Result<()>;

/// A probe, its hook, and what makes that event happen.
const FAMILIES: [(Probe, &str, Load); 4] = [
    (Probe::Switch, "sched_switch", switch_tasks),
    (Probe::Hardware, "sched_switch", switch_tasks),
    (Probe::Migrate, "mm_migrate_pages", compact),
    (Probe::Stall, "mm_vmscan_memcg_reclaim_begin", reclaim_in_cgroup),
];

/// Measures and prints.
pub(crate) fn run(machine: &Machine, cpu: u32) {
    println!("{:<10} {:<30} {:>10} {:>10} {:>8}", "probe", "hook", "ns/run", "empty", "ratio");
    for (probe, hook, load) in FAMILIES {
        match measure(machine, cpu, probe, hook, load) {
            Ok((ours, empty)) => {
                println!("{probe:<10} {hook:<30} {ours:>10.1} {empty:>10.1} {:>8.2}", ours / empty);
            }
            Err(error) => println!("{probe:<10} {hook:<30} not measured: {error}"),
        }
    }
    for probe in [Probe::Hint, Probe::Scan, Probe::OomKill] {
        println!("{probe:<10} not measured: no load here makes such events");
    }
}

/// Nanoseconds per run, of the probe and of a program that does nothing.
fn measure(machine: &Machine, cpu: u32, probe: Probe, hook: &str, load: Load) -> Result<(f64, f64)> {
    // Software events: what they count does not matter, reading them does.
    let dram_events =
        Some(Events { local: Some(Event { kind: 1, config: 5 }), remote: Event { kind: 1, config: 2 } });
    let fakes = Fakes { dram_events, ..Fakes::default() };
    let options =
        Options { alloc_modes: &[], others: vec![probe], self_check: false, fakes, ..Options::new(machine) };
    let mut probes = Probes::load(&options);
    let report = probes.reports().iter().find(|report| report.probe == probe).ok_or("no report")?;
    if report.mode != Mode::TpBtf {
        return Err(format!("{}: {}", report.mode, report.reason.as_deref().unwrap_or_default()).into());
    }
    // Nobody is in this cgroup: whoever runs is an intruder, which is the longest way.
    let owner = probes.register(CgroupId(1), None)?;
    probes.set_exclusive(&BTreeMap::from([(CpuId(cpu), owner)]))?;
    let mut empty = Ebpf::load(EMPTY)?;
    let program: &mut BtfTracePoint =
        empty.program_mut("empty_tp_btf").ok_or("the object has no such program")?.try_into()?;
    program.load(hook, &Btf::from_sys_fs()?)?;
    program.attach()?;
    let stats = || -> Result<[(f64, u64); 2]> {
        let ours = probes.stats()?;
        let ours = ours.iter().find(|stats| stats.probe == probe).ok_or("no statistics")?;
        let info = empty.program("empty_tp_btf").ok_or("the object has no such program")?.info()?;
        let empty = (nanoseconds(info.run_time()), info.run_count());
        Ok([(nanoseconds(ours.run_time), ours.run_count), empty])
    };
    load()?;
    let _window = stats_window()?;
    let mut seen = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let before = stats()?;
        load()?;
        let after = stats()?;
        for ((seen, before), after) in seen.iter_mut().zip(before).zip(after) {
            if after.1 > before.1 {
                seen.push((after.0 - before.0) / count(after.1 - before.1));
            }
        }
    }
    let [ours, empty] = &mut seen;
    if ours.is_empty() || empty.is_empty() {
        return Err("the load made no such event".into());
    }
    Ok((median(ours), median(empty)))
}

/// Two threads on one CPU, each of which waits for the other.
fn switch_tasks() -> Result<()> {
    const SWITCHES: usize = 5_000;
    let (mut there, mut send) = std::io::pipe()?;
    let (mut receive, mut back) = std::io::pipe()?;
    let other = thread::spawn(move || {
        let mut byte = [0];
        while there.read_exact(&mut byte).is_ok() && back.write_all(&byte).is_ok() {}
    });
    let mut byte = [0];
    for _ in 0..SWITCHES {
        send.write_all(&byte)?;
        receive.read_exact(&mut byte)?;
    }
    drop(send);
    other.join().map_err(|_| "the other thread panicked")?;
    Ok(())
}

/// Moves pages, if any are in the way of large free areas.
fn compact() -> Result<()> {
    // Every second page is given back: what is left lies scattered.
    let mut pages: Vec<Vec<u8>> = (0..4096).map(|_| vec![1; 8192]).collect();
    let mut keep = false;
    pages.retain(|_| {
        keep = !keep;
        keep
    });
    fs::write("/proc/sys/vm/compact_memory", "1")?;
    Ok(())
}

/// A process reads more than its cgroup may have.
fn reclaim_in_cgroup() -> Result<()> {
    let cgroup = Limited::new()?;
    let file = tempfile::NamedTempFile::new()?;
    let this = std::env::current_exe()?;
    let status = Command::new(this).arg(RECLAIM).arg(&cgroup.0).arg(file.path()).status()?;
    if status.success() { Ok(()) } else { Err(format!("reclaiming failed: {status}").into()) }
}

/// A cgroup with a limit; removed when dropped.
struct Limited(PathBuf);

impl Limited {
    fn new() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        // Of version 2, or the memory controller of version 1.
        let place = mounts.lines().find_map(|line| {
            let mut fields = line.split(' ').skip(1);
            let (path, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
            let controllers = fs::read_to_string(Path::new(path).join("cgroup.subtree_control"));
            let knob = match kind {
                "cgroup2" if controllers.ok()?.contains("memory") => "memory.max",
                "cgroup" if options.split(',').any(|option| option == "memory") => "memory.limit_in_bytes",
                _ => return None,
            };
            Some((path.to_owned(), knob))
        });
        let (path, knob) = place.ok_or("no hierarchy of cgroups has the memory controller")?;
        let cgroup = Self(Path::new(&path).join(format!("numaward-bench-{}", std::process::id())));
        fs::create_dir(&cgroup.0)?;
        fs::write(cgroup.0.join(knob), LIMIT.to_string())?;
        Ok(cgroup)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let _best_effort = fs::remove_dir(&self.0);
    }
}

/// The process itself.
pub(crate) fn reclaim(cgroup: &Path, path: &Path) -> Result<()> {
    fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string())?;
    let mut file = File::options().read(true).write(true).open(path)?;
    let mut buffer = vec![1; 1 << 20];
    for _ in 0..FILE_SIZE / buffer.len() {
        file.write_all(&buffer)?;
    }
    file.sync_all()?;
    for _ in 0..3 {
        file.rewind()?;
        while file.read(&mut buffer)? > 0 {}
    }
    Ok(())
}
