//! `numaward regions --sampled`: which areas of a workload's memory are accessed, and from which nodes, by addresses that
//! the processor samples.
//!
//! The processor picks one of many micro-ops or loads, and writes down its address, its CPU and where the data came from
//! (AMD: IBS, Intel: PEBS). Unlike the kernel's monitor of accesses (`--hot`), this sees which CPU accessed a page, so what
//! is remote is seen, not estimated. It sees all processes of the host; those of others are passed over.

mod pmu;
mod rings;
mod source;
mod tally;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io,
    path::{Path, PathBuf},
    pin::pin,
    time::{Duration, Instant},
};

use numaward_topology::Machine;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde_with_macros::skip_serializing_none;
use tokio::time::{interval, sleep};

use self::{
    pmu::Unit,
    rings::{Counts, Rings},
    source::Sources,
    tally::{Tally, percent_of},
};
use super::{ROWS, Share, ends::Ends, maps, percent, sys, workload::Workload};
use crate::{
    client::Server,
    table::{columns, or_dash, row, size},
    text::clean,
};

/// How often the rings are read: ten times a second, and each tenth time the samples are folded and processes looked for.
const PAUSE: Duration = Duration::from_millis(100);
const FOLD: u32 = 10;

/// Why nothing can be sampled.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SampledError {
    /// No unit for it.
    #[error(
        "{}: nothing there samples addresses: neither ibs_op (AMD) nor mem-loads of cpu, cpu_core or cpu_atom (Intel). \
         Most virtual machines have none. --hot shows what is accessed without it",
        _0.display()
    )]
    Absent(PathBuf),
    /// Arm's, which writes something else.
    #[error("{}: samples of this unit (Arm SPE) are not supported; --hot shows what is accessed without it", _0.display())]
    Arm(PathBuf),
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
    #[error("{unit} on CPU {cpu}: {source}{}", hint(source))]
    Refused { unit: String, cpu: u32, source: io::Error },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; --sampled takes root on the workload's own host, and lockdown or an LSM may forbid it"
        }
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ResourceBusy => {
            "; somebody else holds that unit, as another --sampled does: wait until that has ended"
        }
        _ if error.raw_os_error() == Some(libc::EMFILE) => {
            "; each CPU takes up to two descriptors: raise `ulimit -Hn`"
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
    /// The share of them that came from a CPU of another node than that of the page; absent if no page's node is known.
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
    /// The share of samples from a CPU of another node than that of the page; absent if no page's node is known.
    remote_percent: Option<f64>,
    /// The share whose data came from memory, of those where the processor says; absent if it says so for none.
    dram_percent: Option<f64>,
    /// The nodes of the pages, by samples; empty if none was in memory when it was asked for.
    nodes: Vec<Share>,
    sources: Sources,
}

/// Samples the accesses of a workload for some time, or until the user has enough.
pub(crate) async fn watch(server: &Server, name: &str, span: Duration) -> anyhow::Result<Sampled> {
    let machine = numaward_topology::sysfs::read(Path::new("/"))?;
    let units = pmu::find(Path::new("/"), &machine.cpu_ids())?;
    let workload = Workload::find(server, name).await?;
    let commands = workload.processes()?.into_iter().collect();
    let mut ends = Ends::new()?;
    let rings = Rings::start(&units)?;
    let over = async {
        tokio::select! {
            () = sleep(span) => {}
            () = ends.next() => {}
        }
    };
    let mut seen = Seen::new(&machine, commands);
    seen.follow(rings, || workload.ids(), over).await;
    Ok(seen.report(units))
}

/// What was sampled so far.
struct Seen {
    began: Instant,
    tally: Tally,
    counts: Counts,
    /// All processes that were looked at, also those that have ended.
    commands: BTreeMap<u32, String>,
}

impl Seen {
    /// Of these processes.
    fn new(machine: &Machine, commands: BTreeMap<u32, String>) -> Self {
        let (tally, counts) = (Tally::new(machine), Counts::default());
        Self { began: Instant::now(), tally, counts, commands }
    }

    /// Reads rings until it is over, and asks once a second which processes there are.
    async fn follow(
        &mut self,
        mut rings: Rings,
        mut processes: impl FnMut() -> BTreeSet<u32>,
        over: impl Future<Output = ()>,
    ) {
        let mut ids: BTreeSet<u32> = self.commands.keys().copied().collect();
        let mut over = pin!(over);
        let mut ticks = interval(PAUSE);
        for tick in 1_u32.. {
            let is_over = tokio::select! {
                _ = ticks.tick() => false,
                () = &mut over => true,
            };
            if is_over {
                rings.stop();
            }
            rings.read(&mut self.counts, |access| {
                if ids.contains(&access.pid) {
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
                break;
            }
            if tick % FOLD == 0 {
                // Processes that began meanwhile count from now on.
                ids = processes();
                for pid in &ids {
                    self.commands.entry(*pid).or_insert_with(|| command(*pid));
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
            remote_percent: total.remote_percent,
            sources: total.sources,
            reading_millis: cpu_millis(),
            processes: self.tally.processes(|pid| self.commands.get(&pid).cloned().unwrap_or_default()),
            notes: notes(&units, self.counts).into_iter().chain(self.tally.notes()).collect(),
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
        notes.push(format!("{} sampled nothing, of any process", names.join(", ")));
    }
    if counts.lost > 0 {
        notes.push(format!("{} samples were lost: they came faster than they were read", counts.lost));
    }
    if counts.throttled > 0 {
        notes.push(format!(
            "the kernel paused sampling {} times, as it took too much time (kernel.perf_cpu_time_max_percent): \
             busy CPUs have fewer samples than they should",
            counts.throttled
        ));
    }
    if counts.unreadable > 0 {
        notes.push(format!("{} records could not be read", counts.unreadable));
    }
    notes
}

/// For people: the areas with the most samples, and what all of them come to.
pub(crate) fn render(sampled: &Sampled) -> String {
    let mut text = String::new();
    if sampled.areas.is_empty() {
        text.push_str("no access of the workload was sampled\n");
    } else {
        text.push_str(&table(&sampled.areas));
        if let Some(more) = sampled.areas.len().checked_sub(ROWS).filter(|more| *more > 0) {
            let _ = writeln!(text, "{more} more areas have fewer samples: -o json has all");
        }
    }
    let units: Vec<String> = sampled
        .units
        .iter()
        .map(|unit| format!("{} (one of {} {})", unit.name, unit.period, unit.counts))
        .collect();
    let remote = sampled.remote_percent.map(|share| format!(", {} of them remote", percent(share)));
    let _ = writeln!(
        text,
        "{} samples in {:.1} s{}, by {} of {}",
        sampled.samples,
        sampled.seconds,
        remote.unwrap_or_default(),
        units.join(" and "),
        clean(&sampled.processor)
    );
    if sampled.samples > 0 {
        let sources = &sampled.sources;
        let shares = [
            ("local memory", sources.local_memory),
            ("remote memory", sources.remote_memory),
            ("caches of other nodes", sources.remote_cache),
            ("other caches", sources.cache),
            ("unknown", sources.unknown),
        ];
        let shares =
            shares.map(|(name, count)| format!("{name} {}", percent(percent_of(count, sampled.samples))));
        let _ = writeln!(text, "the data came from: {}", shares.join(", "));
    }
    for process in sampled.processes.iter().take(ROWS) {
        let from = process.from.iter().map(|share| format!("node {} {}", share.node, percent(share.percent)));
        let from = from.collect::<Vec<_>>().join(", ");
        let _ = writeln!(text, "process {} ({}) accessed from: {from}", process.pid, clean(&process.command));
    }
    if let Some(more) = sampled.processes.len().checked_sub(ROWS).filter(|more| *more > 0) {
        let _ = writeln!(text, "{more} more processes have fewer samples: -o json has all");
    }
    let _ =
        writeln!(text, "reading took {} ms of CPU time, sampling itself not counted", sampled.reading_millis);
    for note in &sampled.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}

fn table(areas: &[Area]) -> String {
    let shown = areas.get(..ROWS).unwrap_or(areas);
    let nodes: BTreeSet<u32> = shown.iter().flat_map(|area| area.nodes.iter().map(|on| on.node)).collect();
    let mut titles = row(["PID", "ADDRESS", "SIZE", "REGION", "SAMPLES", "REMOTE", "DRAM"]);
    titles.extend(nodes.iter().map(|node| format!("NODE {node}")));
    let cells = |area: &Area| {
        let mut cells = row([&area.pid.to_string(), &area.start, &size(area.bytes), &area.region]);
        cells.push(area.samples.to_string());
        cells.push(or_dash(area.remote_percent.map(percent)));
        cells.push(or_dash(area.dram_percent.map(percent)));
        let on = |node: &u32| area.nodes.iter().find(|on| on.node == *node).map_or(0.0, |on| on.percent);
        cells.extend(nodes.iter().map(|node| percent(on(node))));
        cells
    };
    columns(&std::iter::once(titles).chain(shown.iter().map(cells)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use numaward_topology::CpuSet;

    use super::*;

    fn area(start: u64, samples: u64) -> Area {
        Area {
            pid: 7,
            region: "/a\nb".to_owned(),
            start: format!("{start:#x}"),
            end: format!("{:#x}", start + (2 << 20)),
            bytes: 2 << 20,
            samples,
            remote_percent: Some(98.4),
            dram_percent: None,
            nodes: vec![Share { node: 1, percent: 100.0 }],
            sources: Sources { unknown: samples, ..Sources::default() },
        }
    }

    fn sampled(areas: Vec<Area>) -> Sampled {
        Sampled {
            seconds: 10.0,
            processor: "AMD EPYC\n".to_owned(),
            units: vec![Used {
                name: "ibs_op".to_owned(),
                cpus: "0-3".to_owned(),
                period: 1024,
                counts: "micro-ops".to_owned(),
            }],
            samples: 200,
            remote_percent: Some(98.4),
            sources: Sources {
                local_memory: 20,
                remote_memory: 100,
                cache: 60,
                unknown: 20,
                ..Sources::default()
            },
            reading_millis: 12,
            processes: vec![Process {
                pid: 7,
                command: "db\n".to_owned(),
                samples: 200,
                from: vec![Share { node: 0, percent: 75.0 }, Share { node: 1, percent: 25.0 }],
            }],
            notes: vec!["something is missing".to_owned()],
            areas,
        }
    }

    #[test]
    fn people_see_what_is_accessed_and_from_where() {
        let text = render(&sampled((0..22).map(|at| area(at << 22, 100 - at)).collect()));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["PID", "ADDRESS", "SIZE", "REGION", "SAMPLES", "REMOTE", "DRAM", "NODE", "1"]);
        assert_eq!(lines[1].join(" "), "7 0x0 2.0 MiB /a\\nb 100 98 % - 100 %");
        assert_eq!(lines[21].join(" "), "2 more areas have fewer samples: -o json has all");
        for expected in [
            "200 samples in 10.0 s, 98 % of them remote, by ibs_op (one of 1024 micro-ops) of AMD EPYC\\n\n",
            "local memory 10 %, remote memory 50 %, caches of other nodes 0 %, other caches 30 %, unknown 10 %\n",
            "process 7 (db\\n) accessed from: node 0 75 %, node 1 25 %\n",
            "reading took 12 ms of CPU time, sampling itself not counted\nsomething is missing\n",
        ] {
            assert!(text.contains(expected), "{text}");
        }
        let nothing = render(&Sampled::default());
        assert!(nothing.starts_with("no access of the workload was sampled\n0 samples"), "{nothing}");
    }

    #[test]
    fn programs_see_all_areas() {
        let json = serde_json::to_value(sampled(vec![area(4096, 3)])).unwrap();
        assert_eq!(json["units"][0]["counts"], "micro-ops");
        assert_eq!(json["sources"]["remoteMemory"], 100);
        let area = &json["areas"][0];
        assert_eq!((&area["start"], &area["samples"]), (&"0x1000".into(), &3.into()));
        assert!(area.get("dramPercent").is_none(), "what is not known is absent: {area}");
    }

    /// The whole way but for the processor: page faults of this thread instead of its samples.
    #[test]
    fn a_process_is_followed_until_it_is_over() {
        let machine = numaward_topology::sysfs::read(Path::new("/")).unwrap();
        let own = std::process::id();
        let mut seen = Seen::new(&machine, BTreeMap::new());
        let memory = RefCell::new(Vec::new());
        // It is no process of the workload at first, so that nothing counts before one looks again.
        let over = async {
            for _ in 0..30 {
                sleep(Duration::from_millis(100)).await;
                let mut more = vec![0_u8; 64 << 20];
                more.iter_mut().skip(32 << 20).take(1 << 20).step_by(4096).for_each(|byte| *byte = 1);
                memory.borrow_mut().push(more);
            }
        };
        let looks = Cell::new(0);
        let processes = || {
            looks.set(looks.get() + 1);
            [own].into()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(seen.follow(rings::tests::of_this_thread(), processes, over));
        let report = seen.report(vec![rings::tests::faults(CpuSet::default())]);
        assert!(looks.get() >= 2, "{}", looks.get());
        let process = &report.processes[0];
        assert_eq!((process.pid, process.samples, process.command.is_empty()), (own, report.samples, false));
        let found = |memory: &Vec<u8>| {
            let place = memory.as_ptr().addr() as u64 + (32 << 20);
            let bound = |text: &str| u64::from_str_radix(&text[2..], 16).unwrap();
            report.areas.iter().any(|area| (bound(&area.start)..bound(&area.end)).contains(&place))
        };
        let memory = memory.into_inner();
        assert!(!found(&memory[0]), "before it was a process of the workload");
        assert!(memory[15..].iter().all(found), "{:?}", report.areas);
        let text = render(&report);
        assert!(text.contains(", by page faults (one of 1 faults) of "), "{text}");
        assert!(text.contains(&format!("process {own} (")), "{text}");
    }

    #[test]
    fn what_is_missing_is_said() {
        assert!(notes(&[], Counts { accesses: 1, ..Counts::default() }).is_empty());
        let old = notes(&[], Counts { without_address: 5, ..Counts::default() });
        assert!(old.len() == 1 && old[0].contains("Linux 6.2"), "{old:?}");
        let all = Counts { accesses: 1, lost: 2, throttled: 3, unreadable: 4, without_address: 0 };
        let all = notes(&[], all).join("; ");
        for expected in ["2 samples were lost", "paused sampling 3 times", "4 records"] {
            assert!(all.contains(expected), "{all}");
        }
        assert!(notes(&[], Counts::default())[0].contains("sampled nothing"));
    }

    #[test]
    fn refusals_say_what_to_do() {
        let refused = |source| SampledError::Refused { unit: "ibs_op".into(), cpu: 3, source }.to_string();
        for (source, expected) in [
            (io::Error::from_raw_os_error(libc::EACCES), "takes root"),
            (io::Error::from_raw_os_error(libc::EPERM), "takes root"),
            (io::ErrorKind::UnexpectedEof.into(), "somebody else holds"),
            (io::Error::from_raw_os_error(libc::EMFILE), "ulimit"),
            (io::Error::from_raw_os_error(libc::EOPNOTSUPP), "--hot"),
        ] {
            let text = refused(source);
            assert!(text.starts_with("ibs_op on CPU 3: ") && text.contains(expected), "{text}");
        }
    }
}
