//! Areas of a workload's memory by the accesses that the processor samples, with their source nodes.
//!
//! The processor selects one of many micro-ops or loads and records its address, its CPU and the source of the data
//! (AMD: IBS, Intel: PEBS, Arm: SPE). In contrast to the kernel's monitor of accesses (`--hot`), the CPU of an access
//! is known, so that remote accesses are measured instead of estimated. IBS and PEBS sample all processes of the host;
//! samples of other workloads are skipped. SPE does not record the process, so single threads of the workload are
//! sampled.

mod aux;
mod pmu;
mod rings;
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
use tokio::time::{MissedTickBehavior, interval};

pub use self::source::SourceCounts;
use self::{
    pmu::{OutputForm, SamplingUnit},
    rings::{ReadCounts, Rings},
    tally::Tally,
};
use crate::{NodeShare, maps, processes::WorkloadProcesses, sys};

/// Interval at which the rings are read.
const READ_INTERVAL: Duration = Duration::from_millis(100);
/// Number of readings after which the samples are folded and new processes are looked up.
const READINGS_PER_FOLD: u32 = 10;

/// Reason why accesses cannot be sampled.
#[derive(Debug, thiserror::Error)]
pub enum SampledError {
    /// The host has no unit that samples addresses.
    #[error(
        "{}: nothing there samples addresses: neither ibs_op (AMD), mem-loads of cpu, cpu_core or cpu_atom (Intel), nor \
         arm_spe_0 (Arm). Most virtual machines have none. --hot shows what is accessed without it",
        _0.display()
    )]
    Absent(PathBuf),
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    /// A file has unexpected content.
    #[error("{}: {text:?} is not {expected}", path.display())]
    Malformed { path: PathBuf, text: String, expected: &'static str },
    /// An event has a parameter that the unit does not have.
    #[error("{}: {parameter} does not fit into the unit's parameters, see its folder format", path.display())]
    Parameter { path: PathBuf, parameter: String },
    /// The kernel refuses the event.
    #[error("{unit} on {place}: {source}{}", hint(source))]
    Refused { unit: String, place: String, source: io::Error },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; --sampled requires root on the workload's own host, and lockdown or an LSM may forbid it"
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ResourceBusy => {
            "; no counter is free: another program holds it (another --sampled, perf, the NMI watchdog)"
        }
        _ if error.raw_os_error() == Some(libc::EMFILE) => {
            "; each CPU requires up to two descriptors, each thread one: raise `ulimit -Hn`"
        }
        _ => "; --hot shows the accessed areas without it",
    }
}

/// Areas of a workload's memory with their sampled accesses.
#[derive(Debug, Default, Serialize)]
#[skip_serializing_none]
#[serde(rename_all = "camelCase")]
pub struct SampledAreas {
    /// Duration of the sampling in seconds.
    pub seconds: f64,
    /// Name of the processor model.
    pub processor: String,
    pub units: Vec<UsedUnit>,
    /// Number of the workload's samples in the areas.
    pub samples: u64,
    /// Number of samples for which the nodes of the page and of the CPU are known.
    pub placed_samples: u64,
    /// Share of the placed samples with the CPU on another node than the page; absent if there are none.
    pub remote_percent: Option<f64>,
    /// Sources of the data, as the processor reports them.
    pub sources: SourceCounts,
    /// CPU time of this command. The kernel's time for sampling is not included.
    pub reading_millis: u64,
    pub processes: Vec<SampledProcess>,
    /// Missing parts, with the reasons.
    pub notes: Vec<String>,
    /// Areas, most samples first.
    pub areas: Vec<SampledArea>,
}

/// A unit that sampled.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsedUnit {
    pub name: String,
    pub cpus: String,
    /// Sampling period: one of so many operations was sampled.
    pub period: u64,
    /// Kind of the counted operations.
    pub counts: String,
}

/// A process with samples.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SampledProcess {
    pub pid: u32,
    pub command: String,
    pub samples: u64,
    /// Shares of its samples by the node of the CPU.
    pub from: Vec<NodeShare>,
}

/// Adjacent blocks of a region with similar numbers of samples, most of them on the same node.
#[skip_serializing_none]
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SampledArea {
    pub pid: u32,
    /// Name as in the regions: `[heap]`, `[stack]`, `[anonymous]`, or a file.
    pub region: String,
    /// First address, and the one after the last, in hexadecimal.
    pub start: String,
    pub end: String,
    pub bytes: u64,
    pub samples: u64,
    /// Number of samples for which the nodes of the page and of the CPU are known.
    pub placed_samples: u64,
    /// Share of the placed samples with the CPU on another node than the page; absent if there are none.
    pub remote_percent: Option<f64>,
    /// Share of the samples with data from memory among those with a known source; absent if no source is known.
    pub dram_percent: Option<f64>,
    /// Nodes of the pages that were found, by their samples; empty if no page was in memory when it was looked up.
    pub nodes: Vec<NodeShare>,
    pub sources: SourceCounts,
}

/// The units of this host that sample addresses.
#[derive(Debug)]
pub struct Sampler {
    machine: Machine,
    units: Vec<SamplingUnit>,
}

impl Sampler {
    /// Finds the units. Fails if there are none.
    pub fn find() -> anyhow::Result<Self> {
        let machine = numaward_topology::sysfs::read(Path::new("/"))?;
        let units = pmu::find(Path::new("/"), &machine.cpu_ids())?;
        Ok(Self { machine, units })
    }

    /// Samples the accesses of a workload until `over` ends.
    pub async fn watch(
        self,
        workload: &WorkloadProcesses,
        over: impl Future<Output = ()>,
    ) -> anyhow::Result<SampledAreas> {
        let mut session = SamplingSession::new(&self.machine);
        let ids = workload.process_ids(&mut session.notes);
        if ids.is_empty() {
            return Err(workload.no_process_error());
        }
        let mut rings = Rings::start(&self.units)?;
        rings.watch(&ids, &mut session.counts)?;
        session.follow(rings, ids, |notes| workload.process_ids(notes), over).await;
        Ok(session.report(self.units))
    }
}

/// Samples and processes so far.
struct SamplingSession {
    began: Instant,
    tally: Tally,
    counts: ReadCounts,
    /// Commands of the processes with samples, including ended ones.
    commands: BTreeMap<u32, String>,
    /// Notes about processes that are not included.
    notes: BTreeSet<String>,
}

impl SamplingSession {
    fn new(machine: &Machine) -> Self {
        Self {
            began: Instant::now(),
            tally: Tally::new(machine),
            counts: ReadCounts::default(),
            commands: BTreeMap::new(),
            notes: BTreeSet::new(),
        }
    }

    /// Reads rings until `over` ends. Counts the samples of the workload's processes, which `processes` looks up once a
    /// second.
    async fn follow(
        &mut self,
        mut rings: Rings,
        mut ids: BTreeSet<u32>,
        mut processes: impl FnMut(&mut BTreeSet<String>) -> BTreeSet<u32>,
        over: impl Future<Output = ()>,
    ) {
        let mut over = pin!(over);
        let mut ticks = interval(READ_INTERVAL);
        // A reading that is late because of folding is not repeated.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for tick in 1_u32.. {
            let is_over = tokio::select! {
                // `biased`, so that sampling ends even if each reading is late.
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
            if is_over || tick % READINGS_PER_FOLD == 0 {
                fold(&mut self.tally);
            }
            if is_over {
                rings.count_lost(&mut self.counts);
                break;
            }
            if tick % READINGS_PER_FOLD == 0 {
                // New processes are counted from now on.
                ids = processes(&mut self.notes);
                if let Err(refused) = rings.watch(&ids, &mut self.counts) {
                    self.notes.insert(refused.to_string());
                }
            }
        }
    }

    fn report(&self, units: Vec<SamplingUnit>) -> SampledAreas {
        let total = self.tally.total();
        SampledAreas {
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
            units: units.into_iter().map(used_unit).collect(),
        }
    }
}

fn fold(tally: &mut Tally) {
    tally.fold(|pid| maps::read(Path::new("/proc"), pid), sys::nodes_of_pages);
}

fn command(pid: u32) -> String {
    let stat = i32::try_from(pid).ok().and_then(|pid| procfs::process::Process::new(pid).ok()?.stat().ok());
    stat.map(|stat| stat.comm).unwrap_or_default()
}

/// Returns the CPU time of this process.
fn cpu_millis() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    u64::try_from(time.tv_sec * 1000 + time.tv_nsec / 1_000_000).unwrap_or_default()
}

fn used_unit(unit: SamplingUnit) -> UsedUnit {
    UsedUnit { name: unit.name, cpus: unit.cpus.to_string(), period: unit.period, counts: unit.counts }
}

/// Returns notes about missing samples.
fn notes(units: &[SamplingUnit], counts: ReadCounts) -> Vec<String> {
    let mut notes = Vec::new();
    if counts.accesses == 0 && counts.without_address > 0 {
        notes.push(format!(
            "none of {} samples has an address: AMD's ibs_op provides it since Linux 6.2",
            counts.without_address
        ));
    }
    if counts.accesses + counts.without_address == 0 {
        let names: Vec<&str> = units.iter().map(|unit| unit.name.as_str()).collect();
        let by_thread = units.iter().any(|unit| matches!(unit.form, OutputForm::Packets { .. }));
        let target = if by_thread { "the workload's threads" } else { "any process" };
        notes.push(format!("{} has no samples of {target}", names.join(", ")));
    }
    if counts.lost > 0 {
        notes.push(format!("{} samples were lost: they came faster than they were read", counts.lost));
    }
    if counts.throttled > 0 {
        notes.push(format!(
            "the kernel paused sampling {} times, as samples came too fast (kernel.perf_event_max_sample_rate) or took too \
             much time (kernel.perf_cpu_time_max_percent): busy CPUs have too few samples",
            counts.throttled
        ));
    }
    if counts.gaps > 0 {
        notes.push(format!(
            "samples are missing: the kernel reported {} gaps, as the buffer of a thread was full or samples came too close",
            counts.gaps
        ));
    }
    if counts.skipped_threads > 0 {
        notes.push(format!(
            "only the {} threads with the most CPU time were sampled at once: up to {} threads were not",
            threads::MAX_THREADS,
            counts.skipped_threads
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

    /// Larger than the memory that an allocator keeps for reuse.
    const BUFFER_BYTES: usize = 64 << 20;

    /// Tests everything but the processor: page faults of this thread replace its samples.
    #[test]
    fn follows_processes_until_the_end() {
        let machine = numaward_topology::sysfs::read(Path::new("/")).unwrap();
        let own = std::process::id();
        let Some(rings) = rings::tests::rings_of_this_thread() else { return };
        let mut session = SamplingSession::new(&machine);
        let lookups = Cell::new(0);
        let mut memory = [vec![0_u8; BUFFER_BYTES], vec![0_u8; BUFFER_BYTES]];
        // At first, this process does not belong to the workload, so that nothing counts before the first lookup.
        let over = async {
            for (at, memory) in memory.iter_mut().enumerate() {
                while lookups.get() < at {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                memory
                    .iter_mut()
                    .skip(BUFFER_BYTES / 2)
                    .take(1 << 20)
                    .step_by(4096)
                    .for_each(|byte| *byte = 1);
            }
        };
        let processes = |_: &mut BTreeSet<String>| {
            lookups.set(lookups.get() + 1);
            [own].into()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(session.follow(rings, BTreeSet::new(), processes, over));
        let report = session.report(vec![rings::tests::faults(CpuSet::default())]);
        let process = &report.processes[0];
        assert_eq!((process.pid, process.samples, process.command.is_empty()), (own, report.samples, false));
        let found = |memory: &Vec<u8>| {
            let place = (memory.as_ptr().addr() + BUFFER_BYTES / 2) as u64;
            let bound = |text: &str| u64::from_str_radix(&text[2..], 16).unwrap();
            report.areas.iter().any(|area| (bound(&area.start)..bound(&area.end)).contains(&place))
        };
        assert!(!found(&memory[0]), "accesses before the process belonged to the workload");
        assert!(found(&memory[1]), "{:?}", report.areas);
        let unit = &report.units[0];
        assert_eq!((unit.name.as_str(), unit.period, unit.counts.as_str()), ("page faults", 1, "faults"));
    }

    #[test]
    fn notes_missing_samples() {
        assert!(notes(&[], ReadCounts { accesses: 1, ..ReadCounts::default() }).is_empty());
        let old = notes(&[], ReadCounts { without_address: 5, ..ReadCounts::default() });
        assert!(old.len() == 1 && old[0].contains("Linux 6.2"), "{old:?}");
        let all = ReadCounts {
            accesses: 1,
            lost: 2,
            throttled: 3,
            gaps: 5,
            skipped_threads: 6,
            unreadable: 4,
            without_address: 0,
        };
        let all = notes(&[], all).join("; ");
        for expected in [
            "2 samples were lost",
            "paused sampling 3 times",
            "kernel.perf_event_max_sample_rate",
            "reported 5 gaps",
            "the 64 threads with the most CPU time were sampled at once: up to 6 threads",
            "4 records",
        ] {
            assert!(all.contains(expected), "{all}");
        }
        assert!(notes(&[], ReadCounts::default())[0].contains("has no samples of any process"));
        let form = OutputForm::Packets { says_source: true };
        let arm = SamplingUnit { form, ..rings::tests::faults(CpuSet::default()) };
        assert!(
            notes(&[arm], ReadCounts::default())[0].ends_with("has no samples of the workload's threads")
        );
    }

    #[test]
    fn refusals_have_hints() {
        let refused = |source| {
            SampledError::Refused { unit: "ibs_op".into(), place: "CPU 3".into(), source }.to_string()
        };
        for (source, expected) in [
            (io::Error::from_raw_os_error(libc::EACCES), "requires root"),
            (io::Error::from_raw_os_error(libc::EPERM), "requires root"),
            (io::ErrorKind::UnexpectedEof.into(), "the NMI watchdog"),
            (io::Error::from_raw_os_error(libc::EMFILE), "ulimit"),
            (io::Error::from_raw_os_error(libc::EOPNOTSUPP), "--hot"),
        ] {
            let text = refused(source);
            assert!(text.starts_with("ibs_op on CPU 3: ") && text.contains(expected), "{text}");
        }
    }
}
