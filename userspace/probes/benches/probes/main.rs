//! Measures the cost of the probes, compared with empty programs on the same hooks.
//!
//! Run it as root on an otherwise idle host: `cargo xtask bench probes`

#![cfg_attr(not(numaward_ebpf), expect(unused, reason = "without probes there is nothing to measure"))]

mod alloc;
mod families;

use std::{
    fs::read_dir,
    path::Path,
    process::{Command, ExitCode},
    time::Duration,
};

use numaward_topology::{NodeId, sysfs};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// The object with empty programs.
#[cfg(numaward_ebpf)]
static YARDSTICKS: &[u8] = aya::include_bytes_aligned!(concat!(env!("NUMAWARD_EBPF_DIR"), "/yardsticks"));
#[cfg(not(numaward_ebpf))]
static YARDSTICKS: &[u8] = &[];

#[cfg(not(numaward_ebpf))]
fn main() -> ExitCode {
    eprintln!("probes: this build has none: {}", env!("NUMAWARD_EBPF_MISSING"));
    ExitCode::FAILURE
}

#[cfg(numaward_ebpf)]
fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("probes: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool> {
    let mut arguments = std::env::args().skip(1).skip_while(|argument| argument.starts_with('-'));
    if let Some(role) = arguments.next() {
        let (first, second) = arguments.next().zip(arguments.next()).ok_or("two arguments are expected")?;
        let place = Path::new(&first);
        let done = match role.as_str() {
            families::RECLAIM => families::reclaim(place, Path::new(&second)),
            families::GROW => families::grow(place),
            families::REACH => families::reach(NodeId(first.parse()?)),
            _ => Err(format!("there is no role {role}").into()),
        };
        return done.map(|()| true);
    }
    let machine = sysfs::read(Path::new("/"))?;
    if read_dir("/sys/kernel/tracing").is_ok_and(|mut entries| entries.next().is_none()) {
        Command::new("mount").args(["-t", "tracefs", "tracefs", "/sys/kernel/tracing"]).status()?;
    }
    let cpu = stay_on_one_cpu()?;
    families::run(&machine, cpu);
    println!();
    alloc::run(&machine)
}

fn count(number: u64) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

fn nanoseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e9
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Restricts this process to one CPU. Returns the CPU.
fn stay_on_one_cpu() -> Result<u32> {
    let allowed = sched_getaffinity(None)?;
    let last = (0..CpuSet::MAX_CPU).rev().find(|&cpu| allowed.is_set(cpu)).ok_or("no CPU to run on")?;
    let mut one = CpuSet::new();
    one.set(last);
    sched_setaffinity(None, &one)?;
    Ok(u32::try_from(last)?)
}
