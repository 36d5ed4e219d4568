//! Rings of samples that the kernel writes for each CPU. Units that write packets beside a ring instead are read by
//! [`SampledThreads`].

use std::{collections::BTreeSet, io};

use numaward_topology::CpuId;
use perf_event::{Builder, Counter, ReadFormat, SampleFlag, Sampler, data::Record, events::Raw};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{
    SampledError,
    pmu::{OutputForm, PerfEvent, SamplingUnit},
    source::AccessSource,
    threads::SampledThreads,
};

/// Size of a ring. A sample has 40 bytes, so the ring holds 3000 samples, far more than come between two readings.
const RING_BYTES: usize = 128 << 10;
/// Maximum number of records that are read from a ring in one go, so that a ring that fills as fast does not delay the
/// reading of the next rings.
const MAX_RECORDS_PER_READING: usize = 16 << 10;
// Mode of the CPU in a record's field `misc`: `PERF_RECORD_MISC_CPUMODE_MASK` and `PERF_RECORD_MISC_USER`.
const CPU_MODE_MASK: u16 = 7;
const CPU_MODE_USER: u16 = 2;

/// An access of a program to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SampledAccess {
    pub(super) pid: u32,
    pub(super) address: u64,
    pub(super) cpu: CpuId,
    pub(super) source: AccessSource,
}

/// Counts of the records that were read, over all processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReadCounts {
    /// Samples of user space with an address.
    pub(super) accesses: u64,
    /// Samples without an address, as the instruction does not access memory.
    pub(super) without_address: u64,
    /// Samples that did not fit into the ring. Before Linux 6.0, samples lost after the last record are not included.
    pub(super) lost: u64,
    /// Number of pauses that the kernel made on a CPU because sampling took too much time.
    pub(super) throttled: u64,
    /// Number of gaps that the kernel reported for a thread. The number of missing samples is not known.
    pub(super) gaps: u64,
    /// Maximum number of the workload's threads that were not sampled at the same time.
    pub(super) skipped_threads: usize,
    /// Records that could not be parsed.
    pub(super) unreadable: u64,
}

/// Rings of units: one for each CPU, or one for each thread of the workload.
#[derive(Default)]
pub(super) struct Rings {
    cpus: Vec<Ring>,
    threads: Vec<SampledThreads>,
}

struct Ring {
    sampler: Sampler,
    /// Leader of the sampler's group: opened first, closed last.
    leader: Option<Counter>,
    /// Lost samples, as counted by records.
    lost: u64,
}

impl Rings {
    /// Opens the rings of all CPUs of these units and starts sampling. [`Self::watch`] opens those of threads.
    pub(super) fn start(units: &[SamplingUnit]) -> Result<Self, SampledError> {
        raise_descriptors();
        let refused = |unit: &SamplingUnit, cpu: CpuId| {
            let (unit, place) = (unit.name.clone(), format!("CPU {}", cpu.0));
            move |source| SampledError::Refused { unit, place, source }
        };
        let (mut rings, mut threads) = (Vec::new(), Vec::new());
        for unit in units {
            if let OutputForm::Packets { says_source } = unit.form {
                threads.push(SampledThreads::new(unit, says_source));
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

    /// Sets the current processes of the workload. Their threads are sampled from now on; earlier samples stay.
    pub(super) fn watch(
        &mut self,
        processes: &BTreeSet<u32>,
        counts: &mut ReadCounts,
    ) -> Result<(), SampledError> {
        // The refusal of one unit does not affect the other units.
        let mut result = Ok(());
        for threads in &mut self.threads {
            result = result.and(threads.watch(processes, counts));
        }
        result
    }

    /// Stops sampling. Samples in the rings can still be read.
    pub(super) fn stop(&mut self) {
        for ring in &mut self.cpus {
            // A ring that cannot be stopped samples until it is closed.
            let _ = ring.first().disable();
        }
        for threads in &mut self.threads {
            threads.stop();
        }
    }

    /// Reads the records in the rings.
    pub(super) fn read(&mut self, counts: &mut ReadCounts, mut each: impl FnMut(SampledAccess)) {
        for threads in &mut self.threads {
            threads.read(counts, &mut each);
        }
        for ring in &mut self.cpus {
            for _ in 0..MAX_RECORDS_PER_READING {
                let Some(record) = ring.sampler.next_record() else { break };
                let is_program = record.misc() & CPU_MODE_MASK == CPU_MODE_USER;
                match record.parse_record() {
                    Ok(Record::Sample(sample)) if is_program => {
                        let place =
                            (sample.pid(), sample.addr().filter(|address| *address != 0), sample.cpu());
                        let (Some(pid), Some(address), Some(cpu)) = place else {
                            counts.without_address += 1;
                            continue;
                        };
                        counts.accesses += 1;
                        let source =
                            sample.data_src().map_or(AccessSource::Unknown, AccessSource::from_data_source);
                        each(SampledAccess { pid, address, cpu: CpuId(cpu), source });
                    }
                    Ok(Record::Lost(record)) => {
                        counts.lost += record.lost;
                        ring.lost += record.lost;
                    }
                    Ok(Record::Throttle(_)) => counts.throttled += 1,
                    Ok(_) => {}
                    Err(_) => counts.unreadable += 1,
                }
            }
        }
    }

    /// Counts samples that were lost after the last record. The rings must be stopped and read.
    pub(super) fn count_lost(&mut self, counts: &mut ReadCounts) {
        for ring in &mut self.cpus {
            // Before Linux 6.0, the kernel does not provide the number.
            let all = ring.sampler.as_counter_mut().read_full().ok().and_then(|data| data.lost());
            let rest = all.unwrap_or_default().saturating_sub(ring.lost);
            counts.lost += rest;
            ring.lost += rest;
        }
    }
}

impl Ring {
    /// Opens a ring for all processes on a CPU, or for this thread on all CPUs.
    fn open(unit: &SamplingUnit, cpu: Option<CpuId>) -> io::Result<Self> {
        let builder = |event: PerfEvent| {
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
        // Otherwise, Intel's processors collect many samples before the kernel writes them into the ring (large PEBS).
        // They would arrive too late to be matched with the mappings and nodes of their time.
        samples.wakeup_events(1);
        // The leader is pinned, so that it counts always or never; `start` detects the latter. The other events follow
        // it.
        let mut leader = unit.leader.map(|event| builder(event).pinned(true).build()).transpose()?;
        let mut open = |format| {
            samples.read_format(format);
            match &mut leader {
                None => samples.pinned(true).build(),
                Some(leader) => samples.enabled(true).build_with_group(leader),
            }
        };
        let counter = match open(ReadFormat::LOST) {
            // Linux before 6.0 does not support it.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => open(ReadFormat::empty())?,
            opened => opened?,
        };
        Ok(Self { sampler: counter.sampled(RING_BYTES)?, leader, lost: 0 })
    }

    fn first(&mut self) -> &mut Counter {
        self.leader.as_mut().unwrap_or_else(|| self.sampler.as_counter_mut())
    }

    /// Starts sampling. Fails with [`io::ErrorKind::UnexpectedEof`] if another program uses the unit.
    fn start(&mut self) -> io::Result<()> {
        let first = self.first();
        first.enable()?;
        first.read().map(drop)
    }
}

/// Raises the limit of descriptors: each CPU requires one or two, and the usual 1024 are too few for some machines. If
/// this fails, opening the rings fails.
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
    use crate::{
        maps,
        sampled::tally::Tally,
        sys::{self, tests::map_by_page},
    };

    /// `PERF_TYPE_SOFTWARE` and `PERF_COUNT_SW_PAGE_FAULTS`: each fault is a sample with the address that was accessed.
    pub(in super::super) fn faults(cpus: CpuSet) -> SamplingUnit {
        SamplingUnit {
            name: "page faults".to_owned(),
            cpus,
            event: PerfEvent { kind: 1, config: [2, 0, 0] },
            leader: None,
            period: 1,
            counts: "faults".to_owned(),
            skid: SampleSkid::Arbitrary,
            takes_exclude_kernel: true,
            takes_exclude_guest: false,
            form: OutputForm::Samples,
        }
    }

    /// Returns the opened value; `None` if the user of the tests may not open it, unless all tests have to run.
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

    /// Opens a ring for page faults of this thread; `None` if the user may not see them.
    pub(in super::super) fn rings_of_this_thread() -> Option<Rings> {
        open_on_this_thread(&faults(CpuSet::default()))
    }

    fn open_on_this_thread(unit: &SamplingUnit) -> Option<Rings> {
        let mut ring = unless_refused(Ring::open(unit, None))?;
        ring.start().unwrap();
        Some(Rings { cpus: vec![ring], threads: Vec::new() })
    }

    /// Larger than the memory that an allocator keeps for reuse, so that all pages are accessed for the first time.
    const BUFFER_BYTES: usize = 64 << 20;
    /// End of the touched part, which has fewer samples than the ring's capacity. The first block is not touched, as
    /// the allocator has written to it.
    const TOUCHED_BYTES: usize = 32 << 20;
    const BLOCK_BYTES: usize = 2 << 20;
    const STEP_BYTES: usize = 64 << 10;

    /// Touches memory while `rings` sample. Returns the memory, its samples, and the counts.
    fn touch(mut rings: Rings) -> (Vec<u8>, Vec<SampledAccess>, ReadCounts) {
        let mut memory = vec![0_u8; BUFFER_BYTES];
        map_by_page(&mut memory);
        // Samples of other processes may have filled the rings meanwhile.
        rings.read(&mut ReadCounts::default(), |_| {});
        for byte in memory.iter_mut().take(TOUCHED_BYTES).skip(BLOCK_BYTES).step_by(STEP_BYTES) {
            *byte = 1;
        }
        rings.stop();
        let range = memory.as_ptr_range();
        let (mut counts, mut found) = (ReadCounts::default(), Vec::new());
        rings.read(&mut counts, |access| {
            let is_ours = access.pid == id() && range.contains(&(access.address as *const u8));
            found.extend(Some(access).filter(|_| is_ours));
        });
        rings.count_lost(&mut counts);
        (memory, found, counts)
    }

    /// Returns the numbers of the blocks that contain some addresses.
    fn blocks(addresses: impl Iterator<Item = u64>) -> BTreeSet<u64> {
        addresses.map(|address| address / BLOCK_BYTES as u64).collect()
    }

    fn is_complete(memory: &[u8], found: &[SampledAccess]) -> bool {
        let first = memory.as_ptr().addr();
        let touched = (BLOCK_BYTES..TOUCHED_BYTES).step_by(STEP_BYTES).map(|at| (first + at) as u64);
        blocks(found.iter().map(|access| access.address)) == blocks(touched)
    }

    /// Checks that the samples contain all touched blocks, and that the areas have the right addresses, regions and
    /// nodes.
    fn check(memory: &[u8], found: &[SampledAccess], counts: ReadCounts) {
        let machine = numaward_topology::sysfs::read(Path::new("/")).unwrap();
        assert_eq!(counts.unreadable, 0, "{counts:?}");
        assert!(is_complete(memory, found), "{counts:?}: {found:x?}");
        let first = memory.as_ptr().addr();
        let mut tally = Tally::new(&machine);
        for access in found {
            assert!(machine.cpus.contains_key(&access.cpu), "{access:?}");
            assert_eq!(access.source, AccessSource::Unknown, "a fault has no source");
            tally.add(access);
        }
        let (first, last) = (first as u64, (first + BUFFER_BYTES) as u64);
        tally.fold(|pid| maps::read(Path::new("/proc"), pid), sys::nodes_of_pages);
        let areas = tally.areas();
        let samples: u64 = areas.iter().map(|area| area.samples).sum();
        assert_eq!(samples, found.len() as u64, "{areas:?}");
        for area in &areas {
            let bound = |text: &str| u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap();
            assert!(bound(&area.start) < last && first < bound(&area.end), "{area:?}");
            assert_eq!((area.pid, area.region.as_str()), (id(), "[anonymous]"));
            let on: f64 = area.nodes.iter().map(|share| share.percent).sum();
            assert!((on - 100.0).abs() < 1e-6, "all of its pages are in memory: {area:?}");
            assert!(area.remote_percent.is_some() && area.dram_percent.is_none(), "{area:?}");
        }
    }

    #[test]
    fn samples_accesses_of_this_thread() {
        let Some(rings) = rings_of_this_thread() else { return };
        let (memory, found, counts) = touch(rings);
        assert_eq!(counts.lost, 0, "{counts:?}");
        check(&memory, &found, counts);
    }

    #[test]
    fn leader_starts_sampling_event() {
        // `PERF_COUNT_SW_DUMMY`, which counts nothing.
        let leader = Some(PerfEvent { kind: 1, config: [9, 0, 0] });
        let Some(rings) = open_on_this_thread(&SamplingUnit { leader, ..faults(CpuSet::default()) }) else {
            return;
        };
        let (memory, found, counts) = touch(rings);
        assert_eq!(counts.lost, 0, "{counts:?}");
        check(&memory, &found, counts);
    }

    #[test]
    fn samples_all_processes_by_cpu() {
        let cpus = numaward_topology::sysfs::read(Path::new("/")).unwrap().cpu_ids();
        for attempts_left in (0..10).rev() {
            let rings = match Rings::start(&[faults(cpus.clone())]) {
                Err(SampledError::Refused { source, .. }) => Err(source),
                other => Ok(other.unwrap()),
            };
            let Some(rings) = unless_refused(rings) else { return };
            assert_eq!(rings.cpus.len(), cpus.len());
            let (memory, found, counts) = touch(rings);
            // On a busy machine, faults of other processes can fill a ring before it is read.
            if is_complete(&memory, &found) || attempts_left == 0 {
                check(&memory, &found, counts);
                return;
            }
        }
    }

    #[test]
    fn counts_lost_samples_to_the_end() {
        let Some(mut rings) = rings_of_this_thread() else { return };
        let page = rustix::param::page_size();
        // A sample has 40 bytes, so half of these samples do not fit.
        let pages = RING_BYTES / 20;
        let mut memory = vec![0_u8; (pages + 2) * page];
        map_by_page(&mut memory);
        memory.iter_mut().skip(page).step_by(page).for_each(|byte| *byte = 1);
        rings.stop();
        let mut counts = ReadCounts::default();
        rings.read(&mut counts, |_| {});
        assert_eq!(counts.lost, 0, "no record reports the loss");
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
    fn refusal_names_missing_unit() {
        let mut unit = faults(CpuSet::single(CpuId(0)));
        unit.event.kind = u32::MAX;
        let refused = Rings::start(&[unit]).err().unwrap().to_string();
        assert!(refused.starts_with("page faults on CPU 0: "), "{refused}");
    }
}
