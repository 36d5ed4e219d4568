//! Measures the cost of the allocation probe, compared with an empty program on the same hook, and the additional cost
//! of call chains.
//!
//! There are two loads on one CPU: a pipe that is written and read in steps of 64 KiB (almost only page allocations),
//! and first accesses to anonymous memory (page faults). Each round measures every variant in CPU time, between two
//! runs without any program, in an order that differs from round to round. The output contains the medians of the
//! differences, with their 95 % confidence intervals. `run_time` is the minimum of the time in the program itself
//! according to the kernel's BPF statistics; at least 30 ns of it are spent on reading the clock.

use std::{
    fmt,
    hint::black_box,
    io::{self, Read as _, Write as _},
    time::Duration,
};

use aya::{
    Btf, Ebpf,
    programs::{BtfTracePoint, TracePoint},
    sys::{Stats, enable_stats},
};
use numaward_probes::{CgroupId, ChainOptions, Mode, Probe, ProbeOptions, Probes, TestOverrides};
use numaward_topology::{Machine, NodeId};
use rustix::time::{ClockId, clock_gettime};

use crate::{Result, YARDSTICKS, count, median, nanoseconds};

const ROUNDS: usize = 40;
const PIPE_STEPS: u32 = 1500;
/// The size of the touched memory: more than the C library keeps after it is freed, so that it is mapped again each
/// time.
const TOUCHED: usize = 48 << 20;
const PAGE: usize = 4096;
/// The maximum cost of the probe in multiples of an empty program (DESIGN.md).
const BUDGET: f64 = 2.0;

/// The maximum cost with call chains in multiples of the allocation probe alone, if no page is remote.
const CHAINS_BUDGET: f64 = 1.25;

/// The default of `observe.callChains`.
const CHAINS: ChainOptions = ChainOptions { sample_every: 64, max_stacks: 4096 };

#[derive(Clone, Copy)]
enum Variant {
    Empty(Mode),
    /// Two empty programs: the minimum cost of a second program on the tracepoint.
    EmptyTwice,
    Ours(Mode),
    /// The allocation probe with the program for call chains. With a number N, each page is remote, and one chain is
    /// taken for every N pages.
    Chains(Option<u32>),
}

const VARIANTS: [(&str, Variant); 8] = [
    ("empty, tp_btf", Variant::Empty(Mode::TpBtf)),
    ("empty twice, tp_btf", Variant::EmptyTwice),
    ("probe, tp_btf", Variant::Ours(Mode::TpBtf)),
    ("call chains, all local", Variant::Chains(None)),
    ("all remote, 1 of 64", Variant::Chains(Some(CHAINS.sample_every))),
    ("all remote, each", Variant::Chains(Some(1))),
    ("empty, tracepoint", Variant::Empty(Mode::Tracepoint)),
    ("probe, tracepoint", Variant::Ours(Mode::Tracepoint)),
];

/// An attached variant.
enum AttachedVariant {
    Empty(Ebpf, &'static str),
    EmptyTwice(Box<[Self; 2]>),
    Ours(Box<Probes>),
}

impl AttachedVariant {
    fn new(variant: Variant, machine: &Machine) -> Result<Self> {
        match variant {
            Variant::Empty(mode) => {
                let mut ebpf = Ebpf::load(YARDSTICKS)?;
                let name = if mode == Mode::TpBtf { "empty_tp_btf" } else { "empty_tracepoint" };
                let program = ebpf.program_mut(name).ok_or("the object has no such program")?;
                if mode == Mode::TpBtf {
                    let program: &mut BtfTracePoint = program.try_into()?;
                    program.load("mm_page_alloc", &Btf::from_sys_fs()?)?;
                    program.attach()?;
                } else {
                    let program: &mut TracePoint = program.try_into()?;
                    program.load()?;
                    program.attach("kmem", "mm_page_alloc")?;
                }
                Ok(Self::Empty(ebpf, name))
            }
            Variant::EmptyTwice => {
                let empty = || Self::new(Variant::Empty(Mode::TpBtf), machine);
                Ok(Self::EmptyTwice(Box::new([empty()?, empty()?])))
            }
            Variant::Ours(mode) => Self::ours(machine, mode, None, TestOverrides::default()),
            Variant::Chains(every) => {
                let chains = ChainOptions { sample_every: every.unwrap_or(CHAINS.sample_every), ..CHAINS };
                // A node that the machine does not have.
                let fakes = TestOverrides { cpu_node: every.map(|_| NodeId(77)), ..TestOverrides::default() };
                Self::ours(machine, Mode::TpBtf, Some(chains), fakes)
            }
        }
    }

    fn ours(
        machine: &Machine,
        mode: Mode,
        chains: Option<ChainOptions>,
        fakes: TestOverrides,
    ) -> Result<Self> {
        let options = ProbeOptions {
            alloc_modes: &[mode],
            self_check: false,
            secondary: Vec::new(),
            call_chains: chains,
            fakes,
            ..ProbeOptions::new(machine)
        };
        let mut probes = Probes::load(&options);
        let is_in =
            |probe, mode| probes.reports().iter().any(|report| report.probe == probe && report.mode == mode);
        if !is_in(Probe::Alloc, mode) || chains.is_some() && !is_in(Probe::AllocChains, Mode::TpBtf) {
            return Err(format!("a probe is not attached: {:?}", probes.reports()).into());
        }
        // The root of all cgroups: chains are taken only of registered workloads.
        probes.register(CgroupId(1), None)?;
        Ok(Self::Ours(Box::new(probes)))
    }

    /// Returns the total time in the programs, and the number of runs of the first one.
    fn stats(&self) -> Result<(Duration, u64)> {
        match self {
            Self::Empty(ebpf, name) => {
                let info = ebpf.program(name).ok_or("the object has no such program")?.info()?;
                Ok((info.run_time(), info.run_count()))
            }
            Self::EmptyTwice(both) => {
                let ((first, runs), (second, _)) = (both[0].stats()?, both[1].stats()?);
                Ok((first + second, runs))
            }
            Self::Ours(probes) => {
                let stats = probes.costs().read()?;
                let of_hook = [Probe::Alloc, Probe::AllocChains];
                let of_hook = || stats.iter().filter(|stats| of_hook.contains(&stats.probe));
                let first = of_hook().next().ok_or("no statistics")?;
                Ok((of_hook().map(|stats| stats.run_time).sum(), first.run_count))
            }
        }
    }
}

/// The measured load.
struct AllocLoad {
    reader: io::PipeReader,
    writer: io::PipeWriter,
    buffer: Vec<u8>,
}

impl AllocLoad {
    fn new() -> Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self { reader, writer, buffer: vec![1; 1 << 16] })
    }

    /// Writes 64 KiB to a pipe and reads them, [`PIPE_STEPS`] times. Returns the CPU time.
    fn pipe(&mut self) -> Result<Duration> {
        let start = cpu_time();
        for _ in 0..PIPE_STEPS {
            self.writer.write_all(&self.buffer)?;
            self.reader.read_exact(&mut self.buffer)?;
        }
        Ok(cpu_time().saturating_sub(start))
    }

    /// Returns the nanoseconds per allocation in the pipe, which makes `events` of them, and per page fault. Each load
    /// is warmed up.
    fn measure(&mut self, events: f64) -> Result<(f64, f64)> {
        self.pipe()?;
        let event = nanoseconds(self.pipe()?) / events;
        touch();
        Ok((event, nanoseconds(touch()) / count((TOUCHED / PAGE) as u64)))
    }
}

/// Writes to fresh memory page by page. Returns the CPU time.
fn touch() -> Duration {
    let mut memory = vec![0u8; TOUCHED];
    let start = cpu_time();
    for byte in memory.iter_mut().step_by(PAGE) {
        *byte = 1;
    }
    black_box(&memory);
    cpu_time().saturating_sub(start)
}

/// Returns the CPU time of this thread, which excludes other threads on the same CPU.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// The measurements of a variant in all rounds.
#[derive(Default)]
struct Samples {
    /// Nanoseconds per allocation, minus those without a program.
    event: Vec<f64>,
    /// The additional time of a page fault in percent of the time without a program.
    fault: Vec<f64>,
    /// Nanoseconds in the program per run.
    run_time: Vec<f64>,
}

/// Runs the measurement. Returns true if all budgets are kept.
pub(crate) fn run(machine: &Machine) -> Result<bool> {
    no_huge_pages()?;
    let mut load = AllocLoad::new()?;

    let events = count(events(&mut load, machine)?);
    let mut seen: [Samples; VARIANTS.len()] = std::array::from_fn(|_| Samples::default());
    let (mut base_event, mut base_fault) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        eprint!("\rround {} of {ROUNDS}", round + 1);
        let mut before = load.measure(events)?;
        for place in 0..VARIANTS.len() {
            let chosen = (place + round) % VARIANTS.len();
            let (Some((_, variant)), Some(seen)) = (VARIANTS.get(chosen), seen.get_mut(chosen)) else {
                continue;
            };
            let attached = AttachedVariant::new(*variant, machine)?;
            let with = load.measure(events)?;

            let window = enable_stats(Stats::RunTime)?;
            let (time, runs) = attached.stats()?;
            load.pipe()?;
            let (time_after, runs_after) = attached.stats()?;
            drop(window);
            seen.run_time.push(nanoseconds(time_after.saturating_sub(time)) / count(runs_after - runs));

            drop(attached);
            let after = load.measure(events)?;
            let base = (f64::midpoint(before.0, after.0), f64::midpoint(before.1, after.1));
            seen.event.push(with.0 - base.0);
            seen.fault.push(100.0 * (with.1 - base.1) / base.1);
            base_event.push(base.0);
            base_fault.push(base.1);
            before = after;
        }
    }
    eprintln!();
    Ok(report(&mut seen, median(&mut base_event), median(&mut base_fault)))
}

/// Returns the number of allocations of the pipe load. The kernel counts those of the whole host, so the minimum is
/// used.
fn events(load: &mut AllocLoad, machine: &Machine) -> Result<u64> {
    let attached = AttachedVariant::new(Variant::Empty(Mode::TpBtf), machine)?;
    let _window = enable_stats(Stats::RunTime)?;
    let mut least = u64::MAX;
    for _ in 0..ROUNDS {
        let before = attached.stats()?.1;
        load.pipe()?;
        least = least.min(attached.stats()?.1 - before);
    }
    Ok(least)
}

/// A median and its distribution-free 95 % confidence interval.
struct Median {
    value: f64,
    low: f64,
    high: f64,
}

impl Median {
    fn from_values(values: &mut [f64]) -> Self {
        let value = median(values);
        // From the binomial distribution of the number of values below the median: 0.98 times the root, rounded up.
        let half_width = values.len().isqrt() + 1;
        let at = |place: usize| values.get(place).copied().unwrap_or(f64::NAN);
        let middle = values.len() / 2;
        Self { value, low: at(middle.saturating_sub(half_width)), high: at(middle + half_width) }
    }
}

impl fmt::Display for Median {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:.2} ({:.2} to {:.2})", self.value, self.low, self.high))
    }
}

/// Prints the table. Returns true if all budgets are kept.
fn report(seen: &mut [Samples; VARIANTS.len()], base_event: f64, base_fault: f64) -> bool {
    println!(
        "without a program: {base_event:.0} ns per allocation (pipe), {base_fault:.0} ns per page fault"
    );
    println!(
        "{:<22} {:>15} {:>22} {:>12} {:>6} {:>24}",
        "", "ns/allocation", "times empty", "run_time ns", "ratio", "page fault, %"
    );
    let mut kept = true;
    let mut checked = Vec::new();
    let mut empty = (Vec::new(), f64::NAN);
    let mut alone = Vec::new();
    for ((name, variant), seen) in VARIANTS.iter().zip(seen) {
        let run_time = seen.run_time.iter().copied().fold(f64::INFINITY, f64::min);
        if matches!(variant, Variant::Empty(_)) {
            empty = (seen.event.clone(), run_time);
        }
        if matches!(variant, Variant::Ours(Mode::TpBtf)) {
            alone.clone_from(&seen.event);
        }
        // The ratio is computed per round, because the load of the host changes over time.
        let by_round = |base: &[f64]| seen.event.iter().zip(base).map(|(ours, base)| ours / base).collect();
        let mut ratios: Vec<f64> = by_round(&empty.0);
        match variant {
            Variant::Ours(mode) => {
                checked.push((format!("probes/{mode}"), median(&mut ratios.clone()), BUDGET));
            }
            Variant::Chains(None) => {
                checked.push(("probes/chains".to_owned(), median(&mut by_round(&alone)), CHAINS_BUDGET));
            }
            _ => {}
        }
        let (event, ratio, fault) = (
            Median::from_values(&mut seen.event),
            Median::from_values(&mut ratios),
            Median::from_values(&mut seen.fault),
        );
        // An empty program takes time. If it seems not to, the measurement failed.
        kept &= median(&mut empty.0.clone()) > 1.0;
        println!(
            "{name:<22} {:>+15.1} {ratio:>22} {run_time:>12.1} {:>6.2} {fault:>24}",
            event.value,
            run_time / empty.1,
        );
    }
    // `cargo xtask bench budgets` parses these lines.
    for (name, figure, limit) in checked {
        println!("budget: {name} {figure:.4} times {limit}");
        kept &= figure <= limit;
    }
    println!("{}", if kept { "kept" } else { "EXCEEDED, or the host is too busy to measure it" });
    kept
}

/// Disables huge pages: otherwise a page fault would allocate 512 pages.
fn no_huge_pages() -> Result<()> {
    let (yes, unused) = (1, 0);
    // SAFETY: no pointers are involved.
    let result = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, yes, unused, unused, unused) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error().into()) }
}
