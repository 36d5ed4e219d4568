//! Measures the cost of the secondary probes.
//!
//! Each probe is attached together with an empty program on the same hook, while a load triggers the event. The
//! kernel's BPF statistics measure both. The output contains the medians, over several rounds, of the time per run.
//! Some 30 ns of each are spent on reading the clock, so the ratio is a little less than that of the programs
//! themselves. Two further programs are measured for comparison: one adds to a counter, one reads the clock.
//!
//! Sampled accesses need a machine with several nodes; they and OOM kills need a kernel with `fentry`. If these are
//! missing, the reason is printed. `cargo xtask bench probes --vm` provides such a machine.

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
/// The number of rounds for loads that take seconds.
const SLOW_LOAD_ROUNDS: usize = 3;
/// Roles of this program as a child process: it has to reclaim memory, exceeds its memory limit, or has its memory on
/// another node.
pub(crate) const RECLAIM: &str = "reclaim";
pub(crate) const GROW: &str = "grow";
pub(crate) const REACH: &str = "reach";
/// The size of files and memory in bytes: more than the limit of the cgroup.
const FILE_SIZE: usize = 64 << 20;
const CGROUP_LIMIT: u64 = 16 << 20;

/// The time for which memory is accessed: NUMA balancing begins one second after the start of a process.
const ACCESS_TIME: Duration = Duration::from_secs(5);
const SWITCH_OF_BALANCING: &str = "/proc/sys/kernel/numa_balancing";

/// A function that triggers an event.
type MakeEvents = fn(&Machine, u32) -> Result<()>;

/// Each probe with its hooks, of which the first one that the kernel has is used, the function that triggers the event, and
/// the number of rounds.
const FAMILIES: [(Probe, &[&str], MakeEvents, usize); 8] = [
    (Probe::Charge, &["charge_memcg", "__mem_cgroup_charge", "mem_cgroup_charge"], touch, ROUNDS),
    (Probe::Switch, &["sched_switch"], switch_tasks, ROUNDS),
    (Probe::Hardware, &["sched_switch"], switch_tasks, ROUNDS),
    (Probe::Migrate, &["mm_migrate_pages"], compact, ROUNDS),
    (Probe::Stall, &["mm_vmscan_memcg_reclaim_begin"], reclaim_in_cgroup, ROUNDS),
    (Probe::OomKill, &["oom_kill_process"], kill_in_cgroup, ROUNDS),
    (Probe::Hint, &["task_numa_fault"], reach_another_node, SLOW_LOAD_ROUNDS),
    (Probe::Scan, &["vma_policy_mof"], reach_another_node, SLOW_LOAD_ROUNDS),
];

/// Programs that do one thing, for hooks that support them.
const COMPARISONS: [&str; 2] = ["counter_tp_btf", "clock_tp_btf"];

/// Runs the measurements and prints the results.
pub(crate) fn run(machine: &Machine, cpu: u32) {
    println!("nanoseconds per run; in brackets: times an empty program on the same hook in the same run");
    println!("{:<10} {:<30} {:>16} {:>16} {:>16}", "probe", "hook", "ours", "a counter", "the clock");
    for (probe, hooks, make_events, rounds) in FAMILIES {
        let is_usable = |hook: &&str| hooks.len() == 1 || has_function(hook);
        let hook = hooks.iter().copied().find(is_usable).unwrap_or(hooks[0]);
        match (FamilyLoad { machine, cpu, hook, make_events, rounds }).all(probe) {
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

/// A hook and the function that triggers its event.
struct FamilyLoad<'m> {
    machine: &'m Machine,
    cpu: u32,
    hook: &'static str,
    make_events: MakeEvents,
    rounds: usize,
}

impl FamilyLoad<'_> {
    /// Returns the nanoseconds per run of the probe and of the programs for comparison, each with those of an empty
    /// program. They are measured one after the other, because the first program on a hook runs with colder processor
    /// caches than the following ones.
    fn all(&self, probe: Probe) -> Result<Vec<(f64, f64)>> {
        let (ours, by_btf) = self.ours(probe)?;
        let mut all = vec![ours];
        if by_btf {
            for yardstick in COMPARISONS {
                let ebpf = self.attached(yardstick, true)?;
                all.push(self.beside_empty(true, || stats_of(&ebpf, yardstick))?);
            }
        }
        Ok(all)
    }

    /// Measures the probe. The second value is true if its hook is a tracepoint.
    fn ours(&self, probe: Probe) -> Result<((f64, f64), bool)> {
        // Software events: only the cost of reading them matters.
        let dram_events = Some(DramEvents {
            local: Some(PerfEvent { kind: 1, config: 5 }),
            remote: PerfEvent { kind: 1, config: 2 },
        });
        let options = ProbeOptions {
            // That probe is not loaded alone.
            alloc_modes: if probe == Probe::Charge { &[Mode::TpBtf, Mode::Tracepoint] } else { &[] },
            secondary: vec![probe],
            self_check: false,
            fakes: TestOverrides { dram_events, ..TestOverrides::default() },
            charges_memory: charges_memory(),
            ..ProbeOptions::new(self.machine)
        };
        let mut probes = Probes::load(&options);
        let report = probes.reports().iter().find(|report| report.probe == probe).ok_or("no report")?;
        if ![Mode::TpBtf, Mode::Fentry, Mode::Fexit].contains(&report.mode) {
            return Err(format!("{}: {}", report.mode, report.reason.as_deref().unwrap_or_default()).into());
        }
        let by_btf = report.mode == Mode::TpBtf;
        // No process is in this cgroup: every task is an intruder, which is the longest path.
        let owner = probes.register(CgroupId(u64::MAX), None)?;
        probes.set_exclusive(&BTreeMap::from([(CpuId(self.cpu), owner)]))?;
        let measured = self.beside_empty(by_btf, || {
            let stats = probes.costs().read()?;
            let stats = stats.iter().find(|stats| stats.probe == probe).ok_or("no statistics")?;
            Ok((nanoseconds(stats.run_time), stats.run_count))
        })?;
        Ok((measured, by_btf))
    }

    /// Attaches a program of the yardsticks object to the hook.
    fn attached(&self, name: &str, by_btf: bool) -> Result<Ebpf> {
        let (mut ebpf, btf) = (Ebpf::load(YARDSTICKS)?, Btf::from_sys_fs()?);
        let program = ebpf.program_mut(name).ok_or("the object has no such program")?;
        if by_btf {
            let program: &mut BtfTracePoint = program.try_into()?;
            program.load(self.hook, &btf)?;
            program.attach()?;
        } else {
            // Also for probes at a function's exit: an empty program costs the same at the entry.
            let program: &mut FEntry = program.try_into()?;
            program.load(self.hook, &btf)?;
            program.attach()?;
        }
        Ok(ebpf)
    }

    /// Returns the nanoseconds per run of the attached program, and of an empty one.
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

/// Returns the nanoseconds and the number of runs of a program.
fn stats_of(ebpf: &Ebpf, program: &str) -> Result<(f64, u64)> {
    let info = ebpf.program(program).ok_or("the object has no such program")?.info()?;
    Ok((nanoseconds(info.run_time()), info.run_count()))
}

/// Returns true if programs can be attached to a function of the kernel.
/// Returns true if cgroups v2 have the controller `memory`.
fn charges_memory() -> bool {
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    controllers.split_whitespace().any(|name| name == "memory")
}

fn has_function(name: &str) -> bool {
    let list = fs::read_to_string("/sys/kernel/tracing/available_filter_functions").unwrap_or_default();
    list.lines().any(|line| line == name)
}

/// Touches pages for the first time, which are all on nodes that the process may use.
fn touch(_: &Machine, _: u32) -> Result<()> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(FILE_SIZE)?;
    memory.resize(FILE_SIZE, 1_u8);
    std::hint::black_box(memory);
    Ok(())
}

/// Switches between two threads on one CPU that wait for each other.
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

/// Triggers compaction, which moves pages to create large free areas.
fn compact(_: &Machine, _: u32) -> Result<()> {
    // Every second page is freed, so that the free memory is fragmented.
    let mut pages: Vec<Vec<u8>> = (0..4096).map(|_| vec![1; 8192]).collect();
    let mut keep = false;
    pages.retain(|_| {
        keep = !keep;
        keep
    });
    fs::write("/proc/sys/vm/compact_memory", "1")?;
    Ok(())
}

/// Runs a process that reads more than the limit of its cgroup.
fn reclaim_in_cgroup(_: &Machine, _: u32) -> Result<()> {
    let cgroup = LimitedCgroup::new()?;
    let file = tempfile::NamedTempFile::new()?;
    let status = this_as([RECLAIM.as_ref(), cgroup.0.as_os_str(), file.path().as_os_str()])?;
    if status.success() { Ok(()) } else { Err(format!("reclaiming failed: {status}").into()) }
}

/// Runs a process that exceeds the limit of its cgroup and is killed.
fn kill_in_cgroup(_: &Machine, _: u32) -> Result<()> {
    let cgroup = LimitedCgroup::new()?;
    let status = this_as([GROW.as_ref(), cgroup.0.as_os_str(), "".as_ref()])?;
    if status.code().is_none() { Ok(()) } else { Err(format!("it was not killed: {status}").into()) }
}

/// Runs a process that accesses memory of another node, which NUMA balancing samples.
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

/// Runs this program as another process.
fn this_as(arguments: [&OsStr; 3]) -> Result<ExitStatus> {
    Ok(Command::new(std::env::current_exe()?).args(arguments).status()?)
}

/// A cgroup with a memory limit; removed when dropped.
struct LimitedCgroup(PathBuf);

impl LimitedCgroup {
    fn new() -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        // cgroup v2, or the memory controller of v1.
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
        fs::write(cgroup.0.join(knob), CGROUP_LIMIT.to_string())?;
        Ok(cgroup)
    }
}

impl Drop for LimitedCgroup {
    fn drop(&mut self) {
        let _best_effort = fs::remove_dir(&self.0);
    }
}

/// The process that reclaims.
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

/// The process with its memory on another node.
pub(crate) fn reach(node: NodeId) -> Result<()> {
    let mask = 1_u64.checked_shl(node.0).ok_or("the node's id is 64 or above")?;
    set_policy(libc::MPOL_BIND, Some(mask))?;
    let mut memory = vec![1_u8; FILE_SIZE];
    // Bound memory is not sampled.
    set_policy(libc::MPOL_DEFAULT, None)?;
    let start = Instant::now();
    while start.elapsed() < ACCESS_TIME {
        memory.iter_mut().step_by(4096).for_each(|byte| *byte = byte.wrapping_add(1));
        std::hint::black_box(&mut memory);
    }
    Ok(())
}

/// Calls `set_mempolicy(2)` for this thread and the nodes 0 to 63.
fn set_policy(mode: i32, mask: Option<u64>) -> io::Result<()> {
    let nodes = mask.as_ref().map_or(ptr::null(), ptr::from_ref);
    // The kernel uses one bit less than this number.
    let bits = u64::BITS + 1;
    // SAFETY: `nodes` is null or points to the bits that the kernel reads; the kernel keeps no pointer to it.
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes, bits) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
