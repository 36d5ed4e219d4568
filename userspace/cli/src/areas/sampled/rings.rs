//! What the kernel writes for each CPU into a ring of memory: samples, and that some were lost. Units that write packets
//! instead, beside a ring, are those of [`Threads`].

use std::{collections::BTreeSet, io};

use numaward_topology::CpuId;
use perf_event::{Builder, Counter, ReadFormat, SampleFlag, Sampler, data::Record, events::Raw};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{
    SampledError,
    pmu::{Event, Form, Unit},
    source::Source,
    threads::Threads,
};

/// Bytes of a ring. A sample has 40, so this is for 3000 of them, which take much longer than the time between two readings.
const RING: usize = 128 << 10;
/// Records that are read of a ring at once, so that one that fills as fast does not hold up the others.
const AT_ONCE: usize = 16 << 10;
/// Where the CPU was, in `misc` of a record: `PERF_RECORD_MISC_CPUMODE_MASK` and `PERF_RECORD_MISC_USER`.
const MODE: u16 = 7;
const USER: u16 = 2;

/// An access of a program to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Access {
    pub(super) pid: u32,
    pub(super) address: u64,
    pub(super) cpu: CpuId,
    pub(super) source: Source,
}

/// What was read, of all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Samples with an address, from programs.
    pub(super) accesses: u64,
    /// Samples without one: what was sampled does not access memory.
    pub(super) without_address: u64,
    /// Samples that found no room in the ring. Before Linux 6.0, those at the very end are not in it.
    pub(super) lost: u64,
    /// How often the kernel stopped sampling on a CPU for a moment, because it took too much time.
    pub(super) throttled: u64,
    /// How often the kernel said that samples are missing of a thread, not how many.
    pub(super) gaps: u64,
    /// Threads of the workload that were not sampled at once with others, at most.
    pub(super) passed_over: usize,
    /// Records that could not be parsed.
    pub(super) unreadable: u64,
}

/// The rings of units, one for each of their CPUs, or one for each thread of the workload.
#[derive(Default)]
pub(super) struct Rings {
    cpus: Vec<Ring>,
    threads: Vec<Threads>,
}

struct Ring {
    sampler: Sampler,
    /// What leads the group of the sampler: opened first, closed last.
    leader: Option<Counter>,
    /// Samples that were lost, by the records that say so.
    lost: u64,
}

impl Rings {
    /// Opens the rings of all CPUs of these units, and starts to sample. Those of threads are opened by [`Self::watch`].
    pub(super) fn start(units: &[Unit]) -> Result<Self, SampledError> {
        raise_descriptors();
        let refused = |unit: &Unit, cpu: CpuId| {
            let (unit, place) = (unit.name.clone(), format!("CPU {}", cpu.0));
            move |source| SampledError::Refused { unit, place, source }
        };
        let (mut rings, mut threads) = (Vec::new(), Vec::new());
        for unit in units {
            if let Form::Packets { says_source } = unit.form {
                threads.push(Threads::new(unit, says_source));
                continue;
            }
            for cpu in unit.cpus.iter() {
                rings.push((Ring::open(unit, Some(cpu)).map_err(refused(unit, cpu))?, unit, cpu));
            }
        }
        for (ring, unit, cpu) in &mut rings {
            ring.start().map_err(refused(unit, *cpu))?;
        }
        Ok(Self { cpus: rings.into_iter().map(|(ring, ..)| ring).collect(), threads })
    }

    /// Which processes the workload has now: units that sample threads take theirs from now on. What was read before stays.
    pub(super) fn watch(
        &mut self,
        processes: &BTreeSet<u32>,
        counts: &mut Counts,
    ) -> Result<(), SampledError> {
        // What one unit refuses is none of the others' business.
        let mut result = Ok(());
        for threads in &mut self.threads {
            result = result.and(threads.watch(processes, counts));
        }
        result
    }

    /// Stops sampling. What is in the rings can still be read.
    pub(super) fn stop(&mut self) {
        for ring in &mut self.cpus {
            // One that cannot be stopped goes on until it is closed.
            let _ = ring.first().disable();
        }
        for threads in &mut self.threads {
            threads.stop();
        }
    }

    /// Reads what is in the rings.
    pub(super) fn read(&mut self, counts: &mut Counts, mut each: impl FnMut(Access)) {
        for threads in &mut self.threads {
            threads.read(counts, &mut each);
        }
        for ring in &mut self.cpus {
            for _ in 0..AT_ONCE {
                let Some(record) = ring.sampler.next_record() else { break };
                let is_program = record.misc() & MODE == USER;
                match record.parse_record() {
                    Ok(Record::Sample(sample)) if is_program => {
                        let place =
                            (sample.pid(), sample.addr().filter(|address| *address != 0), sample.cpu());
                        let (Some(pid), Some(address), Some(cpu)) = place else {
                            counts.without_address += 1;
                            continue;
                        };
                        counts.accesses += 1;
                        let source = sample.data_src().map_or(Source::Unknown, Source::of);
                        each(Access { pid, address, cpu: CpuId(cpu), source });
                    }
                    Ok(Record::Lost(of)) => {
                        counts.lost += of.lost;
                        ring.lost += of.lost;
                    }
                    Ok(Record::Throttle(_)) => counts.throttled += 1,
                    Ok(_) => {}
                    Err(_) => counts.unreadable += 1,
                }
            }
        }
    }

    /// Counts samples that were lost after the last one that found room: no record says so. The rings are stopped and read.
    pub(super) fn count_lost(&mut self, counts: &mut Counts) {
        for ring in &mut self.cpus {
            // Before Linux 6.0, the kernel does not say.
            let all = ring.sampler.as_counter_mut().read_full().ok().and_then(|data| data.lost());
            let rest = all.unwrap_or_default().saturating_sub(ring.lost);
            counts.lost += rest;
            ring.lost += rest;
        }
    }
}

impl Ring {
    /// Of all processes on a CPU, or of this thread on all of them.
    fn open(unit: &Unit, cpu: Option<CpuId>) -> io::Result<Self> {
        let builder = |event: Event| {
            let [config, config1, config2] = event.config;
            let mut builder = Builder::new(Raw::new(config).config1(config1).config2(config2));
            builder.attrs_mut().type_ = event.kind;
            if let Some(cpu) = cpu {
                builder.any_pid().one_cpu(cpu.0 as usize);
            }
            builder.exclude_kernel(unit.takes_exclude_kernel).exclude_hv(unit.takes_exclude_kernel);
            builder.exclude_guest(unit.takes_exclude_guest).read_format(ReadFormat::empty());
            builder
        };
        let mut samples = builder(unit.event);
        samples.sample_period(unit.period).precise_ip(unit.skid);
        samples.sample(SampleFlag::TID | SampleFlag::ADDR | SampleFlag::CPU | SampleFlag::DATA_SRC);
        // Without it, Intel's processors gather many samples before the kernel puts them into the ring (large PEBS), and they
        // come too late for the mappings and the nodes of their time.
        samples.wakeup_events(1);
        // What leads is pinned: all of the time or not at all, which `start` sees. The others follow it.
        let mut leader = unit.leader.map(|event| builder(event).pinned(true).build()).transpose()?;
        let mut open = |format| {
            samples.read_format(format);
            match &mut leader {
                None => samples.pinned(true).build(),
                Some(leader) => samples.enabled(true).build_with_group(leader),
            }
        };
        let counter = match open(ReadFormat::LOST) {
            // Linux before 6.0 does not know it.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => open(ReadFormat::empty())?,
            opened => opened?,
        };
        Ok(Self { sampler: counter.sampled(RING)?, leader, lost: 0 })
    }

    fn first(&mut self) -> &mut Counter {
        self.leader.as_mut().unwrap_or_else(|| self.sampler.as_counter_mut())
    }

    /// Starts to sample. [`io::ErrorKind::UnexpectedEof`] if somebody else has the unit.
    fn start(&mut self) -> io::Result<()> {
        let first = self.first();
        first.enable()?;
        first.read().map(drop)
    }
}

/// Each CPU takes a descriptor or two, and 1024 are too few for some machines. Where this fails, opening does.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

#[cfg(test)]
pub(super) mod tests {
    use std::{collections::BTreeSet, path::Path, process::id};

    use numaward_tests_support::skip_outside_ci;
    use numaward_topology::CpuSet;
    use perf_event::SampleSkid;

    use super::*;
    use crate::areas::{
        maps,
        sampled::tally::Tally,
        sys::{self, tests::map_by_page},
    };

    /// `PERF_TYPE_SOFTWARE` and `PERF_COUNT_SW_PAGE_FAULTS`: each fault is a sample with the address that was accessed.
    pub(in super::super) fn faults(cpus: CpuSet) -> Unit {
        Unit {
            name: "page faults".to_owned(),
            cpus,
            event: Event { kind: 1, config: [2, 0, 0] },
            leader: None,
            period: 1,
            counts: "faults".to_owned(),
            skid: SampleSkid::Arbitrary,
            takes_exclude_kernel: true,
            takes_exclude_guest: false,
            form: Form::Samples,
        }
    }

    /// What was opened; `None` if that is refused to who runs the tests, unless all of them have to run.
    pub(in super::super) fn unless_refused<T>(opened: io::Result<T>) -> Option<T> {
        match opened {
            Ok(opened) => Some(opened),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                skip_outside_ci(format!("CAP_PERFMON is needed: {error}"));
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Faults of this thread; `None` where it may not see them.
    pub(in super::super) fn of_this_thread() -> Option<Rings> {
        on_this_thread(&faults(CpuSet::default()))
    }

    fn on_this_thread(unit: &Unit) -> Option<Rings> {
        let mut ring = unless_refused(Ring::open(unit, None))?;
        ring.start().unwrap();
        Some(Rings { cpus: vec![ring], threads: Vec::new() })
    }

    /// More than what an allocator keeps to use again: its pages are accessed for the first time.
    const BYTES: usize = 64 << 20;
    /// What is touched of it: fewer places than a ring has room for. Not the first block: the allocator has written to it.
    const TOUCHED: usize = 32 << 20;
    const BLOCK: usize = 2 << 20;
    const STEP: usize = 64 << 10;

    /// Memory that is touched while `rings` sample, and what they have of it: the addresses, and how much was lost.
    fn touch(mut rings: Rings) -> (Vec<u8>, Vec<Access>, Counts) {
        let mut memory = vec![0_u8; BYTES];
        map_by_page(&mut memory);
        // Others may have filled the rings meanwhile.
        rings.read(&mut Counts::default(), |_| {});
        for byte in memory.iter_mut().take(TOUCHED).skip(BLOCK).step_by(STEP) {
            *byte = 1;
        }
        rings.stop();
        let range = memory.as_ptr_range();
        let (mut counts, mut found) = (Counts::default(), Vec::new());
        rings.read(&mut counts, |access| {
            let is_ours = access.pid == id() && range.contains(&(access.address as *const u8));
            found.extend(Some(access).filter(|_| is_ours));
        });
        rings.count_lost(&mut counts);
        (memory, found, counts)
    }

    /// The blocks of some addresses.
    fn blocks(addresses: impl Iterator<Item = u64>) -> BTreeSet<u64> {
        addresses.map(|address| address / BLOCK as u64).collect()
    }

    fn is_complete(memory: &[u8], found: &[Access]) -> bool {
        let first = memory.as_ptr().addr();
        let touched = (BLOCK..TOUCHED).step_by(STEP).map(|at| (first + at) as u64);
        blocks(found.iter().map(|access| access.address)) == blocks(touched)
    }

    /// Whether the samples have all that was touched, by areas of these addresses, and the nodes of their pages.
    fn check(memory: &[u8], found: &[Access], counts: Counts) {
        let machine = numaward_topology::sysfs::read(Path::new("/")).unwrap();
        assert_eq!(counts.unreadable, 0, "{counts:?}");
        assert!(is_complete(memory, found), "{counts:?}: {found:x?}");
        let first = memory.as_ptr().addr();
        let mut tally = Tally::new(&machine);
        for access in found {
            assert!(machine.cpus.contains_key(&access.cpu), "{access:?}");
            assert_eq!(access.source, Source::Unknown, "a fault says nothing about it");
            tally.add(access);
        }
        let (first, last) = (first as u64, (first + BYTES) as u64);
        tally.fold(|pid| maps::read(Path::new("/proc"), pid), sys::nodes);
        let areas = tally.areas();
        let samples: u64 = areas.iter().map(|area| area.samples).sum();
        assert_eq!(samples, found.len() as u64, "{areas:?}");
        for area in &areas {
            let bound = |text: &str| u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap();
            assert!(bound(&area.start) < last && first < bound(&area.end), "{area:?}");
            assert_eq!((area.pid, area.region.as_str()), (id(), "[anonymous]"));
            let on: f64 = area.nodes.iter().map(|on| on.percent).sum();
            assert!((on - 100.0).abs() < 1e-6, "all of its pages are in memory: {area:?}");
            assert!(area.remote_percent.is_some() && area.dram_percent.is_none(), "{area:?}");
        }
    }

    #[test]
    fn accesses_of_this_thread_are_found_where_they_were() {
        let Some(rings) = of_this_thread() else { return };
        let (memory, found, counts) = touch(rings);
        assert_eq!(counts.lost, 0, "{counts:?}");
        check(&memory, &found, counts);
    }

    #[test]
    fn an_event_that_leads_starts_the_one_that_samples() {
        // `PERF_COUNT_SW_DUMMY`, which counts nothing.
        let leader = Some(Event { kind: 1, config: [9, 0, 0] });
        let Some(rings) = on_this_thread(&Unit { leader, ..faults(CpuSet::default()) }) else { return };
        let (memory, found, counts) = touch(rings);
        assert_eq!(counts.lost, 0, "{counts:?}");
        check(&memory, &found, counts);
    }

    #[test]
    fn accesses_are_found_among_those_of_all_processes() {
        let cpus = numaward_topology::sysfs::read(Path::new("/")).unwrap().cpu_ids();
        for attempts_left in (0..10).rev() {
            let rings = match Rings::start(&[faults(cpus.clone())]) {
                Err(SampledError::Refused { source, .. }) => Err(source),
                other => Ok(other.unwrap()),
            };
            let Some(rings) = unless_refused(rings) else { return };
            assert_eq!(rings.cpus.len(), cpus.len());
            let (memory, found, counts) = touch(rings);
            // On a busy machine, faults of others fill a ring before it is read.
            if is_complete(&memory, &found) || attempts_left == 0 {
                check(&memory, &found, counts);
                return;
            }
        }
    }

    #[test]
    fn samples_without_room_are_counted_up_to_the_end() {
        let Some(mut rings) = of_this_thread() else { return };
        let page = rustix::param::page_size();
        // A sample has 40 bytes, so half of these find no room.
        let pages = RING / 20;
        let mut memory = vec![0_u8; (pages + 2) * page];
        map_by_page(&mut memory);
        memory.iter_mut().skip(page).step_by(page).for_each(|byte| *byte = 1);
        rings.stop();
        let mut counts = Counts::default();
        rings.read(&mut counts, |_| {});
        assert_eq!(counts.lost, 0, "no record says so");
        if rings.cpus[0].sampler.as_counter_mut().read_full().unwrap().lost().is_none() {
            return skip_outside_ci("Linux 6.0 or newer is needed");
        }
        rings.count_lost(&mut counts);
        assert!(counts.lost > 0 && counts.accesses + counts.lost >= pages as u64, "{counts:?}");
        let once = counts;
        rings.count_lost(&mut counts);
        assert_eq!(counts, once, "each counts once");
    }

    #[test]
    fn a_unit_that_is_not_there_is_refused_with_its_name() {
        let mut unit = faults(CpuSet::single(CpuId(0)));
        unit.event.kind = u32::MAX;
        let refused = Rings::start(&[unit]).err().unwrap().to_string();
        assert!(refused.starts_with("page faults on CPU 0: "), "{refused}");
    }
}
