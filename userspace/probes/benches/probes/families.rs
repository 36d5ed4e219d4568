//! What the probes other than that of allocations cost.
//!
//! Each is attached together with a program that does nothing on the same hook, and a load makes that event happen. The
//! kernel's BPF statistics measure both; of several rounds, the medians of the time per run are printed. Some 30 ns
//! of each are the statistics' own clock, so a ratio is a little less than that of the programs themselves. Two other
//! programs are there for comparison: one adds to a counter, one reads the clock.
//!
//! Sampled accesses need a machine with several nodes, and a kernel with `fentry`, as OOM kills do: elsewhere it is
//! printed why they are not measured. `cargo xtask bench probes --vm` has such a machine.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read as _, Seek as _, Write as _},
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    ptr, thread,
    time::{Duration, Instant},
};

use aya::{
    Btf, Ebpf,
    programs::{BtfTracePoint, FEntry},
};
use numaward_probes::{
    CgroupId, Mode, Probe, ProbeOptions, Probes, TestOverrides,
    pmu::{DramEvents, PerfEvent},
    stats_window,
};
use numaward_topology::{CpuId, Machine, NodeId};

use crate::{Result, YARDSTICKS, count, median, nanoseconds};

const ROUNDS: usize = 15;
/// For loads that take seconds.
const FEW_ROUNDS: usize = 3;
/// What makes this program a process that has to reclaim memory, one that has too much of it, or one whose memory is on
/// another node.
pub(crate) const RECLAIM: &str = "reclaim";
pub(crate) const GROW: &str = "grow";
pub(crate) const REACH: &str = "reach";
/// Larger than what its cgroup may have.
const FILE_SIZE: usize = 64 << 20;
const LIMIT: u64 = 16 << 20;

/// For how long memory is accessed: NUMA balancing begins a second after the start of a process.
const REACHED: Duration = Duration::from_secs(5);
const SWITCH_OF_BALANCING: &str = "/proc/sys/kernel/numa_balancing";

/// Makes an event happen.
type MakeEvents = fn(&Machine, u32) -> Result<()>;

/// A probe, its hook, what makes that event happen, and how often it does.
const FAMILIES: [(Probe, &str, MakeEvents, usize); 7] = [
    (Probe::Switch, "sched_switch", switch_tasks, ROUNDS),
    (Probe::Hardware, "sched_switch", switch_tasks, ROUNDS),
    (Probe::Migrate, "mm_migrate_pages", compact, ROUNDS),
    (Probe::Stall, "mm_vmscan_memcg_reclaim_begin", reclaim_in_cgroup, ROUNDS),
    (Probe::OomKill, "oom_kill_process", kill_in_cgroup, ROUNDS),
    (Probe::Hint, "task_numa_fault", reach_another_node, FEW_ROUNDS),
    (Probe::Scan, "vma_policy_mof", reach_another_node, FEW_ROUNDS),
];

/// Programs that do one thing, on the hooks that take them.
const OTHERS: [&str; 2] = ["counter_tp_btf", "clock_tp_btf"];

/// Measures and prints.
pub(crate) fn run(machine: &Machine, cpu: u32) {
    println!("nanoseconds per run; in brackets: times an empty program on the same hook in the same run");
    println!("{:<10} {:<30} {:>16} {:>16} {:>16}", "probe", "hook", "ours", "a counter", "the clock");
    for (probe, hook, make_events, rounds) in FAMILIES {
        match (Load { machine, cpu, hook, make_events, rounds }).all(probe) {
            Ok(measured) => {
                print!("{probe:<10} {hook:<30}");
                for (time, empty) in measured {
                    print!(" {:>16}", format!("{time:.1} ({:.2})", time / empty));
                }
                println!();
            }
            Err(error) => println!("{probe:<10} {hook:<30} not measured: {error}"),
        }
    }
}

/// A hook, and what makes that event happen.
struct Load<'m> {
    machine: &'m Machine,
    cpu: u32,
    hook: &'static str,
    make_events: MakeEvents,
    rounds: usize,
}

impl Load<'_> {
    /// Nanoseconds per run of the probe, and of the other programs that its hook takes; each with those of an empty program.
    /// They are measured one after the other: the first program on a hook finds the processor's caches as the kernel left
    /// them, and those after it find more.
    fn all(&self, probe: Probe) -> Result<Vec<(f64, f64)>> {
        let (ours, by_btf) = self.ours(probe)?;
        let mut all = vec![ours];
        if by_btf {
            for yardstick in OTHERS {
                let ebpf = self.attached(yardstick, true)?;
                all.push(self.beside_empty(true, || stats_of(&ebpf, yardstick))?);
            }
        }
        Ok(all)
    }

    /// The probe; and whether its hook is a tracepoint.
    fn ours(&self, probe: Probe) -> Result<((f64, f64), bool)> {
        // Software events: what they count does not matter, reading them does.
        let dram_events = Some(DramEvents {
            local: Some(PerfEvent { kind: 1, config: 5 }),
            remote: PerfEvent { kind: 1, config: 2 },
        });
        let options = ProbeOptions {
            alloc_modes: &[],
            secondary: vec![probe],
            self_check: false,
            fakes: TestOverrides { dram_events, ..TestOverrides::default() },
            ..ProbeOptions::new(self.machine)
        };
        let mut probes = Probes::load(&options);
        let report = probes.reports().iter().find(|report| report.probe == probe).ok_or("no report")?;
        if ![Mode::TpBtf, Mode::Fentry, Mode::Fexit].contains(&report.mode) {
            return Err(format!("{}: {}", report.mode, report.reason.as_deref().unwrap_or_default()).into());
        }
        let by_btf = report.mode == Mode::TpBtf;
        // Nobody is in this cgroup: every task is an intruder, which is the longest way.
        let owner = probes.register(CgroupId(u64::MAX), None)?;
        probes.set_exclusive(&BTreeMap::from([(CpuId(self.cpu), owner)]))?;
        let measured = self.beside_empty(by_btf, || {
            let stats = probes.costs().read()?;
            let stats = stats.iter().find(|stats| stats.probe == probe).ok_or("no statistics")?;
            Ok((nanoseconds(stats.run_time), stats.run_count))
        })?;
        Ok((measured, by_btf))
    }

    /// A program of the object with the yardsticks, on the hook.
    fn attached(&self, name: &str, by_btf: bool) -> Result<Ebpf> {
        let (mut ebpf, btf) = (Ebpf::load(YARDSTICKS)?, Btf::from_sys_fs()?);
        let program = ebpf.program_mut(name).ok_or("the object has no such program")?;
        if by_btf {
            let program: &mut BtfTracePoint = program.try_into()?;
            program.load(self.hook, &btf)?;
            program.attach()?;
        } else {
            // At the function's entry also where ours is at its exit: a program that does nothing costs the same.
            let program: &mut FEntry = program.try_into()?;
            program.load(self.hook, &btf)?;
            program.attach()?;
        }
        Ok(ebpf)
    }

    /// Nanoseconds per run of what is attached already, and of an empty program.
    fn beside_empty(&self, by_btf: bool, stats: impl Fn() -> Result<(f64, u64)>) -> Result<(f64, f64)> {
        let name = if by_btf { "empty_tp_btf" } else { "empty_fentry" };
        let empty = self.attached(name, by_btf)?;
        let run = || (self.make_events)(self.machine, self.cpu);
        let stats = || -> Result<[(f64, u64); 2]> { Ok([stats()?, stats_of(&empty, name)?]) };
        run()?;
        let _window = stats_window()?;
        let mut seen = [Vec::new(), Vec::new()];
        for _ in 0..self.rounds {
            let before = stats()?;
            run()?;
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
}

/// The nanoseconds and runs of a program.
fn stats_of(ebpf: &Ebpf, program: &str) -> Result<(f64, u64)> {
    let info = ebpf.program(program).ok_or("the object has no such program")?.info()?;
    Ok((nanoseconds(info.run_time()), info.run_count()))
}

/// Two threads on one CPU, each of which waits for the other.
fn switch_tasks(_: &Machine, _: u32) -> Result<()> {
    const SWITCHES: usize = 5_000;
    let (mut there, mut send) = io::pipe()?;
    let (mut receive, mut back) = io::pipe()?;
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
fn compact(_: &Machine, _: u32) -> Result<()> {
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
fn reclaim_in_cgroup(_: &Machine, _: u32) -> Result<()> {
    let cgroup = Limited::new()?;
    let file = tempfile::NamedTempFile::new()?;
    let status = this_as([RECLAIM.as_ref(), cgroup.0.as_os_str(), file.path().as_os_str()])?;
    if status.success() { Ok(()) } else { Err(format!("reclaiming failed: {status}").into()) }
}

/// A process takes more than its cgroup may have, and is killed.
fn kill_in_cgroup(_: &Machine, _: u32) -> Result<()> {
    let cgroup = Limited::new()?;
    let status = this_as([GROW.as_ref(), cgroup.0.as_os_str(), "".as_ref()])?;
    if status.code().is_none() { Ok(()) } else { Err(format!("it was not killed: {status}").into()) }
}

/// A process accesses memory of another node, which balancing samples.
fn reach_another_node(machine: &Machine, cpu: u32) -> Result<()> {
    let mut nodes = machine.nodes.iter();
    let other = nodes.find(|(_, node)| node.memory.0 > 0 && !node.cpus.contains(CpuId(cpu)));
    let (other, _) = other.ok_or("the machine has one node")?;
    let before = fs::read_to_string(SWITCH_OF_BALANCING)?;
    fs::write(SWITCH_OF_BALANCING, "1")?;
    let status = this_as([REACH.as_ref(), other.0.to_string().as_ref(), "".as_ref()]);
    fs::write(SWITCH_OF_BALANCING, before)?;
    let status = status?;
    if status.success() { Ok(()) } else { Err(format!("reaching failed: {status}").into()) }
}

/// This program, as another process.
fn this_as(arguments: [&OsStr; 3]) -> Result<ExitStatus> {
    Ok(Command::new(std::env::current_exe()?).args(arguments).status()?)
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

/// The process that is killed.
pub(crate) fn grow(cgroup: &Path) -> Result<()> {
    fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string())?;
    std::hint::black_box(vec![1_u8; FILE_SIZE]);
    Ok(())
}

/// The process whose memory is on another node.
pub(crate) fn reach(node: NodeId) -> Result<()> {
    let mask = 1_u64.checked_shl(node.0).ok_or("the node's id is 64 or above")?;
    set_policy(libc::MPOL_BIND, Some(mask))?;
    let mut memory = vec![1_u8; FILE_SIZE];
    // What is bound is not sampled.
    set_policy(libc::MPOL_DEFAULT, None)?;
    let start = Instant::now();
    while start.elapsed() < REACHED {
        memory.iter_mut().step_by(4096).for_each(|byte| *byte = byte.wrapping_add(1));
        std::hint::black_box(&mut memory);
    }
    Ok(())
}

/// `set_mempolicy(2)` of this thread, for the nodes 0 to 63.
fn set_policy(mode: i32, mask: Option<u64>) -> io::Result<()> {
    let nodes = mask.as_ref().map_or(ptr::null(), ptr::from_ref);
    // The kernel reads one bit less than the number says.
    let bits = u64::BITS + 1;
    // SAFETY: `nodes` is null or has the bits that the kernel reads; it keeps no pointer to it.
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes, bits) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
