//! `numaward regions --sampled`: which areas of a workload's memory are accessed, and from which nodes, by addresses that
//! the processor samples.
//!
//! The processor picks one of many micro-ops or loads, and writes down its address, its CPU and where the data came from
//! (AMD: IBS, Intel: PEBS, Arm: SPE). Unlike the kernel's monitor of accesses (`--hot`), this sees which CPU accessed a page,
//! so what is remote is seen, not estimated. IBS and PEBS see all processes of the host; those of others are passed over. SPE
//! does not say which process it was, and is asked for threads of the workload.

mod aux;
mod pmu;
mod rings;
mod show;
mod source;
mod spe;
mod tally;
mod threads;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
    pin::pin,
    time::{Duration, Instant},
};

use numaward_topology::Machine;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde_with_macros::skip_serializing_none;
use tokio::time::{MissedTickBehavior, interval, sleep};

pub(crate) use self::show::render;
use self::{
    pmu::{Form, Unit},
    rings::{Counts, Rings},
    source::Sources,
    tally::Tally,
};
use super::{Share, ends::Ends, maps, sys, workload::Workload};
use crate::client::Server;

/// How often the rings are read: ten times a second, and each tenth time the samples are folded and processes looked for.
const PAUSE: Duration = Duration::from_millis(100);
const FOLD: u32 = 10;

/// Why nothing can be sampled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SampledError {
    /// No unit for it.
    #[error(
        "{}: nothing there samples addresses: neither ibs_op (AMD), mem-loads of cpu, cpu_core or cpu_atom (Intel), nor \
         arm_spe_0 (Arm). Most virtual machines have none. --hot shows what is accessed without it",
        _0.display()
    )]
    Absent(PathBuf),
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    /// A file has something else than it should.
    #[error("{}: {text:?} is not {what}", path.display())]
    Malformed { path: PathBuf, text: String, what: &'static str },
    /// An event sets what the unit does not have.
    #[error("{}: {parameter} does not fit into the unit's parameters, see its folder format", path.display())]
    Parameter { path: PathBuf, parameter: String },
    /// The kernel refuses.
    #[error("{unit} on {place}: {source}{}", hint(source))]
    Refused { unit: String, place: String, source: io::Error },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; --sampled takes root on the workload's own host, and lockdown or an LSM may forbid it"
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ResourceBusy => {
            "; no counter is free: somebody else holds it (another --sampled, perf, the NMI watchdog)"
        }
        _ if error.raw_os_error() == Some(libc::EMFILE) => {
            "; each CPU takes up to two descriptors, each thread one: raise `ulimit -Hn`"
        }
        _ => "; --hot shows what is accessed without it",
    }
}

/// Which areas of a workload's memory were accessed, and from where.
#[derive(Debug, Default, Serialize)]
#[skip_serializing_none]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sampled {
    /// For how long it was looked at.
    seconds: f64,
    /// As it calls itself.
    processor: String,
    units: Vec<Used>,
    /// Samples of the workload in the areas.
    samples: u64,
    /// Those of them of which the node of the page is known, and that of the CPU.
    placed_samples: u64,
    /// The share of these from a CPU of another node than that of the page; absent if there are none.
    remote_percent: Option<f64>,
    /// Where their data came from, as the processor says.
    sources: Sources,
    /// CPU time that this command took itself. What the kernel took for sampling is not in it.
    reading_millis: u64,
    processes: Vec<Process>,
    /// What is missing, and why.
    notes: Vec<String>,
    /// Those with the most samples first.
    areas: Vec<Area>,
}

/// A unit that sampled.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Used {
    name: String,
    cpus: String,
    /// One of so many was sampled.
    period: u64,
    /// Of what.
    counts: String,
}

/// A process with samples.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Process {
    pid: u32,
    command: String,
    samples: u64,
    /// The nodes of the CPUs.
    from: Vec<Share>,
}

/// Adjacent parts of a region that are accessed about equally often, on one node for the most part.
#[skip_serializing_none]
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Area {
    pid: u32,
    /// As in the regions: `[heap]`, `[stack]`, `[anonymous]`, or a file.
    region: String,
    /// The first address, and the one behind the last, in hexadecimal.
    start: String,
    end: String,
    bytes: u64,
    samples: u64,
    /// Those of them of which the node of the page is known, and that of the CPU.
    placed_samples: u64,
    /// The share of these from a CPU of another node than that of the page; absent if there are none.
    remote_percent: Option<f64>,
    /// The share whose data came from memory, of those where the processor says; absent if it says so for none.
    dram_percent: Option<f64>,
    /// The nodes of the pages, by the samples whose page was found; empty if none was in memory when it was asked for.
    nodes: Vec<Share>,
    sources: Sources,
}

/// Samples the accesses of a workload for some time, or until the user has enough.
pub(crate) async fn watch(server: &Server, name: &str, span: Duration) -> anyhow::Result<Sampled> {
    let machine = numaward_topology::sysfs::read(Path::new("/"))?;
    let units = pmu::find(Path::new("/"), &machine.cpu_ids())?;
    let workload = Workload::find(server, name).await?;
    let mut seen = Seen::new(&machine);
    let ids = workload.ids(&mut seen.notes);
    if ids.is_empty() {
        return Err(workload.no_process());
    }
    let mut ends = Ends::new()?;
    let mut rings = Rings::start(&units)?;
    rings.watch(&ids, &mut seen.counts)?;
    let over = async {
        tokio::select! {
            () = sleep(span) => {}
            () = ends.next() => {}
        }
    };
    seen.follow(rings, ids, |notes| workload.ids(notes), over).await;
    Ok(seen.report(units))
}

/// What was sampled so far.
struct Seen {
    began: Instant,
    tally: Tally,
    counts: Counts,
    /// The processes with samples, also those that have ended.
    commands: BTreeMap<u32, String>,
    /// What is missing of the processes.
    notes: BTreeSet<String>,
}

impl Seen {
    fn new(machine: &Machine) -> Self {
        Self {
            began: Instant::now(),
            tally: Tally::new(machine),
            counts: Counts::default(),
            commands: BTreeMap::new(),
            notes: BTreeSet::new(),
        }
    }

    /// Reads rings until it is over: samples of these processes, and once a second asks which there are now.
    async fn follow(
        &mut self,
        mut rings: Rings,
        mut ids: BTreeSet<u32>,
        mut processes: impl FnMut(&mut BTreeSet<String>) -> BTreeSet<u32>,
        over: impl Future<Output = ()>,
    ) {
        let mut over = pin!(over);
        let mut ticks = interval(PAUSE);
        // What folding takes longer than that is not made up for.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for tick in 1_u32.. {
            let is_over = tokio::select! {
                // Where each tick is late, it ends all the same.
                biased;
                () = &mut over => true,
                _ = ticks.tick() => false,
            };
            if is_over {
                rings.stop();
            }
            rings.read(&mut self.counts, |access| {
                if ids.contains(&access.pid) {
                    self.commands.entry(access.pid).or_insert_with(|| command(access.pid));
                    self.tally.add(&access);
                    if self.tally.is_full() {
                        fold(&mut self.tally);
                    }
                }
            });
            if is_over || tick % FOLD == 0 {
                fold(&mut self.tally);
            }
            if is_over {
                rings.count_lost(&mut self.counts);
                break;
            }
            if tick % FOLD == 0 {
                // Processes that began meanwhile count from now on.
                ids = processes(&mut self.notes);
                if let Err(refused) = rings.watch(&ids, &mut self.counts) {
                    self.notes.insert(refused.to_string());
                }
            }
        }
    }

    fn report(&self, units: Vec<Unit>) -> Sampled {
        let total = self.tally.total();
        Sampled {
            seconds: self.began.elapsed().as_secs_f64(),
            processor: pmu::processor(Path::new("/")),
            samples: total.samples,
            placed_samples: total.placed,
            remote_percent: total.remote_percent,
            sources: total.sources,
            reading_millis: cpu_millis(),
            processes: self.tally.processes(|pid| self.commands.get(&pid).cloned().unwrap_or_default()),
            notes: [notes(&units, self.counts), self.notes.iter().cloned().collect(), self.tally.notes()]
                .concat(),
            areas: self.tally.areas(),
            units: units.into_iter().map(used).collect(),
        }
    }
}

fn fold(tally: &mut Tally) {
    tally.fold(|pid| maps::read(Path::new("/proc"), pid), sys::nodes);
}

fn command(pid: u32) -> String {
    let stat = i32::try_from(pid).ok().and_then(|pid| procfs::process::Process::new(pid).ok()?.stat().ok());
    stat.map(|stat| stat.comm).unwrap_or_default()
}

/// The CPU time of this process.
fn cpu_millis() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec * 1000 + time.tv_nsec / 1_000_000).unwrap_or_default()
}

fn used(unit: Unit) -> Used {
    Used { name: unit.name, cpus: unit.cpus.to_string(), period: unit.period, counts: unit.counts }
}

/// What is missing.
fn notes(units: &[Unit], counts: Counts) -> Vec<String> {
    let mut notes = Vec::new();
    if counts.accesses == 0 && counts.without_address > 0 {
        notes.push(format!(
            "none of {} samples has an address: with AMD's ibs_op that takes Linux 6.2 or newer",
            counts.without_address
        ));
    }
    if counts.accesses + counts.without_address == 0 {
        let names: Vec<&str> = units.iter().map(|unit| unit.name.as_str()).collect();
        let by_thread = units.iter().any(|unit| matches!(unit.form, Form::Packets { .. }));
        let whose = if by_thread { "the workload's threads" } else { "any process" };
        notes.push(format!("{} sampled nothing, of {whose}", names.join(", ")));
    }
    if counts.lost > 0 {
        notes.push(format!("{} samples were lost: they came faster than they were read", counts.lost));
    }
    if counts.throttled > 0 {
        notes.push(format!(
            "the kernel paused sampling {} times, as samples came too fast (kernel.perf_event_max_sample_rate) or took too \
             much time (kernel.perf_cpu_time_max_percent): busy CPUs have fewer samples than they should",
            counts.throttled
        ));
    }
    if counts.gaps > 0 {
        notes.push(format!(
            "samples are missing: the kernel said so {} times, as a thread's room was full or samples came too close",
            counts.gaps
        ));
    }
    if counts.passed_over > 0 {
        notes.push(format!(
            "only the {} threads that ran most were sampled at once: up to {} others were not",
            threads::MOST,
            counts.passed_over
        ));
    }
    if counts.unreadable > 0 {
        notes.push(format!("{} records could not be read", counts.unreadable));
    }
    notes
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use numaward_topology::CpuSet;

    use super::*;

    /// More than what an allocator keeps to use again.
    const BYTES: usize = 64 << 20;

    /// The whole way but for the processor: page faults of this thread instead of its samples.
    #[test]
    fn a_process_is_followed_until_it_is_over() {
        let machine = numaward_topology::sysfs::read(Path::new("/")).unwrap();
        let own = std::process::id();
        let Some(rings) = rings::tests::of_this_thread() else { return };
        let mut seen = Seen::new(&machine);
        let looks = Cell::new(0);
        let mut memory = [vec![0_u8; BYTES], vec![0_u8; BYTES]];
        // It is no process of the workload at first, so that nothing counts before one looks again.
        let over = async {
            for (at, memory) in memory.iter_mut().enumerate() {
                while looks.get() < at {
                    sleep(Duration::from_millis(10)).await;
                }
                memory.iter_mut().skip(BYTES / 2).take(1 << 20).step_by(4096).for_each(|byte| *byte = 1);
            }
        };
        let processes = |_: &mut BTreeSet<String>| {
            looks.set(looks.get() + 1);
            [own].into()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(seen.follow(rings, BTreeSet::new(), processes, over));
        let report = seen.report(vec![rings::tests::faults(CpuSet::default())]);
        let process = &report.processes[0];
        assert_eq!((process.pid, process.samples, process.command.is_empty()), (own, report.samples, false));
        let found = |memory: &Vec<u8>| {
            let place = (memory.as_ptr().addr() + BYTES / 2) as u64;
            let bound = |text: &str| u64::from_str_radix(&text[2..], 16).unwrap();
            report.areas.iter().any(|area| (bound(&area.start)..bound(&area.end)).contains(&place))
        };
        assert!(!found(&memory[0]), "before it was a process of the workload");
        assert!(found(&memory[1]), "{:?}", report.areas);
        let text = render(&report);
        assert!(text.contains(", by page faults (1 in 1 faults) of "), "{text}");
        assert!(text.contains(&format!("process {own} (")), "{text}");
    }

    #[test]
    fn what_is_missing_is_said() {
        assert!(notes(&[], Counts { accesses: 1, ..Counts::default() }).is_empty());
        let old = notes(&[], Counts { without_address: 5, ..Counts::default() });
        assert!(old.len() == 1 && old[0].contains("Linux 6.2"), "{old:?}");
        let all = Counts {
            accesses: 1,
            lost: 2,
            throttled: 3,
            gaps: 5,
            passed_over: 6,
            unreadable: 4,
            without_address: 0,
        };
        let all = notes(&[], all).join("; ");
        for expected in [
            "2 samples were lost",
            "paused sampling 3 times",
            "kernel.perf_event_max_sample_rate",
            "said so 5 times",
            "the 64 threads that ran most were sampled at once: up to 6 others",
            "4 records",
        ] {
            assert!(all.contains(expected), "{all}");
        }
        assert!(notes(&[], Counts::default())[0].contains("sampled nothing, of any process"));
        let form = Form::Packets { says_source: true };
        let arm = Unit { form, ..rings::tests::faults(CpuSet::default()) };
        assert!(notes(&[arm], Counts::default())[0].ends_with("sampled nothing, of the workload's threads"));
    }

    #[test]
    fn refusals_say_what_to_do() {
        let refused = |source| {
            SampledError::Refused { unit: "ibs_op".into(), place: "CPU 3".into(), source }.to_string()
        };
        for (source, expected) in [
            (io::Error::from_raw_os_error(libc::EACCES), "takes root"),
            (io::Error::from_raw_os_error(libc::EPERM), "takes root"),
            (io::ErrorKind::UnexpectedEof.into(), "the NMI watchdog"),
            (io::Error::from_raw_os_error(libc::EMFILE), "ulimit"),
            (io::Error::from_raw_os_error(libc::EOPNOTSUPP), "--hot"),
        ] {
            let text = refused(source);
            assert!(text.starts_with("ibs_op on CPU 3: ") && text.contains(expected), "{text}");
        }
    }
}
