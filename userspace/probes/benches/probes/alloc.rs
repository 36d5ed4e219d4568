//! What the allocation probe costs, next to a program that does nothing on the same hook.
//!
//! Two loads on one CPU: a pipe that is written and read in 64 KiB steps (next to nothing but page
//! allocations), and first touches of anonymous memory (page faults). Each round measures every variant
//! between two runs without any program, in CPU time; the medians of the differences are printed. `run_time` is
//! the time in the program itself as the kernel's BPF statistics have it, at its least; at least 30 ns
//! of it are the statistics' own clock.

use std::{
    hint::black_box,
    io::{self, Read as _, Write as _},
    time::Duration,
};

use aya::{
    Btf, Ebpf,
    programs::{BtfTracePoint, TracePoint},
    sys::{Stats, enable_stats},
};
use numaward_probes::{Mode, Options, Probes};
use numaward_topology::Machine;
use rustix::time::{ClockId, clock_gettime};

use crate::{EMPTY, Result, count, median, nanoseconds};

const ROUNDS: usize = 40;
const PIPE_STEPS: u32 = 1500;
/// Larger than what the C library may keep after it is freed, so that it is mapped anew each time.
const TOUCHED: usize = 48 << 20;
const PAGE: usize = 4096;
/// DESIGN.md: ours takes at most this much more than an empty program.
const BUDGET: f64 = 2.0;

#[derive(Clone, Copy)]
enum Variant {
    Empty(Mode),
    Ours(Mode),
}

const VARIANTS: [(&str, Variant); 4] = [
    ("empty, tp_btf", Variant::Empty(Mode::TpBtf)),
    ("ours, tp_btf", Variant::Ours(Mode::TpBtf)),
    ("empty, tracepoint", Variant::Empty(Mode::Tracepoint)),
    ("ours, tracepoint", Variant::Ours(Mode::Tracepoint)),
];

/// An attached program.
enum Attached {
    Empty(Ebpf, &'static str),
    Ours(Box<Probes>),
}

impl Attached {
    fn new(variant: Variant, machine: &Machine) -> Result<Self> {
        match variant {
            Variant::Empty(mode) => {
                let mut ebpf = Ebpf::load(EMPTY)?;
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
            Variant::Ours(mode) => {
                let modes = [mode];
                let options = Options {
                    alloc_modes: &modes,
                    self_check: false,
                    others: Vec::new(),
                    ..Options::new(machine)
                };
                let probes = Probes::load(&options);
                match probes.reports() {
                    [report] if report.mode == mode => Ok(Self::Ours(Box::new(probes))),
                    reports => Err(format!("the probe is not attached: {reports:?}").into()),
                }
            }
        }
    }

    /// Time in the program, and runs, so far.
    fn stats(&self) -> Result<(Duration, u64)> {
        match self {
            Self::Empty(ebpf, name) => {
                let info = ebpf.program(name).ok_or("the object has no such program")?.info()?;
                Ok((info.run_time(), info.run_count()))
            }
            Self::Ours(probes) => {
                let stats = probes.stats()?;
                let stats = stats.first().ok_or("no statistics")?;
                Ok((stats.run_time, stats.run_count))
            }
        }
    }
}

/// What is measured.
struct Load {
    reader: io::PipeReader,
    writer: io::PipeWriter,
    buffer: Vec<u8>,
}

impl Load {
    fn new() -> Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self { reader, writer, buffer: vec![1; 1 << 16] })
    }

    /// Writes 64 KiB to a pipe and reads them, [`PIPE_STEPS`] times.
    fn pipe(&mut self) -> Result<Duration> {
        let start = cpu_time();
        for _ in 0..PIPE_STEPS {
            self.writer.write_all(&self.buffer)?;
            self.reader.read_exact(&mut self.buffer)?;
        }
        Ok(cpu_time().saturating_sub(start))
    }

    /// Nanoseconds per allocation, of `events` in the pipe, and per page fault; each warmed up.
    fn measure(&mut self, events: f64) -> Result<(f64, f64)> {
        self.pipe()?;
        let event = nanoseconds(self.pipe()?) / events;
        touch();
        Ok((event, nanoseconds(touch()) / count((TOUCHED / PAGE) as u64)))
    }
}

/// Touches fresh memory page by page.
fn touch() -> Duration {
    let mut memory = vec![0u8; TOUCHED];
    let start = cpu_time();
    for byte in memory.iter_mut().step_by(PAGE) {
        *byte = 1;
    }
    black_box(&memory);
    cpu_time().saturating_sub(start)
}

/// CPU time of this thread: that of others on the same CPU does not count.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// What was seen of a variant in all rounds.
#[derive(Default)]
struct Seen {
    /// Nanoseconds per allocation, beyond those without a program.
    event: Vec<f64>,
    /// Nanoseconds per page fault, beyond those without a program.
    fault: Vec<f64>,
    /// Nanoseconds in the program per run.
    run_time: Vec<f64>,
}

/// Measures; returns whether the budget is kept.
pub(crate) fn run(machine: &Machine) -> Result<bool> {
    no_huge_pages()?;
    let mut load = Load::new()?;

    let events = count(events(&mut load, machine)?);
    let mut seen: [Seen; VARIANTS.len()] = std::array::from_fn(|_| Seen::default());
    let (mut base_event, mut base_fault) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        eprint!("\rround {} of {ROUNDS}", round + 1);
        let mut before = load.measure(events)?;
        for ((_, variant), seen) in VARIANTS.iter().zip(&mut seen) {
            let attached = Attached::new(*variant, machine)?;
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
            seen.fault.push(with.1 - base.1);
            base_event.push(base.0);
            base_fault.push(base.1);
            before = after;
        }
    }
    eprintln!();
    Ok(report(&mut seen, median(&mut base_event), median(&mut base_fault)))
}

/// How many allocations the pipe makes. The kernel counts those of the whole host, so the least is right.
fn events(load: &mut Load, machine: &Machine) -> Result<u64> {
    let attached = Attached::new(Variant::Empty(Mode::TpBtf), machine)?;
    let _window = enable_stats(Stats::RunTime)?;
    let mut least = u64::MAX;
    for _ in 0..ROUNDS {
        let before = attached.stats()?.1;
        load.pipe()?;
        least = least.min(attached.stats()?.1 - before);
    }
    Ok(least)
}

/// Prints the table; returns whether the budget is kept.
fn report(seen: &mut [Seen; VARIANTS.len()], base_event: f64, base_fault: f64) -> bool {
    println!(
        "without a program: {base_event:.0} ns per allocation (pipe), {base_fault:.0} ns per page fault"
    );
    println!(
        "{:<18} {:>16} {:>8} {:>13} {:>8} {:>16}",
        "", "ns/allocation", "ratio", "run_time ns", "ratio", "ns/page fault"
    );
    let mut kept = true;
    let mut empty = (f64::NAN, f64::NAN);
    for ((name, variant), seen) in VARIANTS.iter().zip(seen) {
        let event = median(&mut seen.event);
        let fault = median(&mut seen.fault);
        let run_time = seen.run_time.iter().copied().fold(f64::INFINITY, f64::min);
        if matches!(variant, Variant::Empty(_)) {
            empty = (event, run_time);
        }
        let ratios = (event / empty.0, run_time / empty.1);
        // An empty program takes time; where it seems not to, nothing was measured.
        kept &= empty.0 > 1.0 && ratios.0 <= BUDGET;
        println!(
            "{name:<18} {event:>+16.1} {:>8.2} {run_time:>13.1} {:>8.2} {fault:>+8.0} ({:>+4.1} %)",
            ratios.0,
            ratios.1,
            100.0 * fault / base_fault
        );
    }
    println!(
        "budget: at most {BUDGET} times an empty program: {}",
        if kept { "kept" } else { "EXCEEDED, or the host is too busy to measure it" }
    );
    kept
}

/// Else a fault would bring 512 pages.
fn no_huge_pages() -> Result<()> {
    let (yes, unused) = (1, 0);
    // SAFETY: no pointers are involved.
    let result = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, yes, unused, unused, unused) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error().into()) }
}
