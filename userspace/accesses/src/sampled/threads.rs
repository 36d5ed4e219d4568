//! Samples, by thread, of a unit that writes packets beside a ring (Arm's SPE).
//!
//! The packets do not name the process, unless the kernel was built for that. Each thread therefore has an event with a
//! ring and an AUX area of its own. When the thread leaves a CPU or the area is full, the kernel closes a piece of the
//! area, and writes its position and CPU into the ring. A piece thus belongs to one thread and one CPU.
//!
//! While an event is read, it is stopped. This closes the last piece, prevents writes, and later restarts an event that
//! the kernel stopped because its area was full.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    io,
};

use numaward_topology::CpuId;
use perf_event::{Builder, ReadFormat, SampleFlag, Sampler, events::Raw};
use procfs::process::Process;

use super::{
    SampledError,
    aux::AuxArea,
    pmu::SamplingUnit,
    rings::{ReadCounts, SampledAccess},
    source::AccessSource,
    spe,
};

/// Maximum number of threads that are sampled at once. Each one has a ring and an area.
pub(super) const MAX_THREADS: usize = 64;
/// Size of a ring. A record about a piece has 40 bytes.
const RING_BYTES: usize = 64 << 10;
/// Size of an area. A sample has 64 bytes, and a busy thread has some hundreds of samples between two readings. Ring
/// and area are multiples of the page size, which is 64 KiB for some Arm kernels.
const AREA_BYTES: usize = 256 << 10;
// Types of records: `PERF_RECORD_LOST` and `PERF_RECORD_AUX` (`linux/perf_event.h`).
const LOST_RECORD: u32 = 2;
const AUX_RECORD: u32 = 11;
/// Flags of a piece with missing samples: `PERF_AUX_FLAG_TRUNCATED`, `_PARTIAL` and `_COLLISION`.
const INCOMPLETE_FLAGS: u64 = 0x1 | 0x4 | 0x8;

/// A thread's id and its start time, as ids are reused.
type ThreadId = (i32, u64);

/// Threads of a workload that one unit samples.
pub(super) struct SampledThreads {
    unit: SamplingUnit,
    says_source: bool,
    open: BTreeMap<ThreadId, SampledThread>,
    /// CPU time of the workload's threads at the previous lookup, in clock ticks.
    last_ticks: BTreeMap<ThreadId, u64>,
    has_stopped: bool,
    /// True once a refused thread was reported.
    has_refused: bool,
}

struct SampledThread {
    // Dropped before the ring that it is mapped beside.
    area: AuxArea,
    ring: Sampler,
    process: u32,
    /// True if the thread is read once more and then closed.
    is_leaving: bool,
}

/// A running thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RunningThread {
    process: u32,
    /// CPU time so far, in clock ticks.
    ticks: u64,
}

/// A piece of an area, as the kernel describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AuxPiece {
    start: u64,
    length: u64,
    flags: u64,
    cpu: CpuId,
}

impl SampledThreads {
    pub(super) fn new(unit: &SamplingUnit, says_source: bool) -> Self {
        Self {
            unit: unit.clone(),
            says_source,
            open: BTreeMap::new(),
            last_ticks: BTreeMap::new(),
            has_stopped: false,
            has_refused: false,
        }
    }

    /// Samples those threads of these processes that used the most CPU time since the previous call, and no other
    /// threads. Reports a refused thread only once.
    pub(super) fn watch(
        &mut self,
        processes: &BTreeSet<u32>,
        counts: &mut ReadCounts,
    ) -> Result<(), SampledError> {
        let running = running_threads(processes);
        let chosen = choose(&running, &self.last_ticks, |id| self.open.contains_key(id), MAX_THREADS);
        counts.skipped_threads = counts.skipped_threads.max(running.len() - chosen.len());
        for (id, thread) in &mut self.open {
            thread.is_leaving = !chosen.contains(id);
        }
        let mut refused = None;
        for id in chosen {
            let Some(RunningThread { process, .. }) =
                running.get(&id).filter(|_| !self.open.contains_key(&id))
            else {
                continue;
            };
            match SampledThread::open(&self.unit, id.0, *process) {
                Ok(thread) => {
                    self.open.insert(id, thread);
                }
                // The thread has ended meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(source) => {
                    let place = format!("thread {} of process {process}", id.0);
                    let unit = self.unit.name.clone();
                    refused.get_or_insert(SampledError::Refused { unit, place, source });
                }
            }
        }
        self.last_ticks = running.into_iter().map(|(id, thread)| (id, thread.ticks)).collect();
        match refused.filter(|_| !self.has_refused) {
            None => Ok(()),
            Some(refused) => {
                self.has_refused = true;
                Err(refused)
            }
        }
    }

    /// Stops sampling. Samples so far can still be read.
    pub(super) fn stop(&mut self) {
        self.has_stopped = true;
        for thread in self.open.values_mut() {
            // A thread that cannot be stopped is sampled until it is closed.
            let _ = thread.ring.disable();
        }
    }

    /// Reads the samples so far.
    pub(super) fn read(&mut self, counts: &mut ReadCounts, mut each: impl FnMut(SampledAccess)) {
        for thread in self.open.values_mut() {
            thread.read(self.says_source, counts, &mut each);
            if !self.has_stopped && !thread.is_leaving {
                // A thread that cannot be started has ended.
                let _ = thread.ring.enable();
            }
        }
        self.open.retain(|_, thread| !thread.is_leaving);
    }
}

impl SampledThread {
    /// Opens the event of a thread and starts sampling.
    fn open(unit: &SamplingUnit, thread: i32, process: u32) -> io::Result<Self> {
        let [config, config1, config2] = unit.event.config;
        let mut builder = Builder::new(Raw::new(config).config1(config1).config2(config2));
        builder.attrs_mut().type_ = unit.event.kind;
        builder.observe_pid(thread).sample_period(unit.period);
        builder.exclude_kernel(unit.takes_exclude_kernel).exclude_hv(unit.takes_exclude_kernel);
        // Each record ends with the CPU.
        builder.sample(SampleFlag::CPU).sample_id_all(true).read_format(ReadFormat::empty());
        let ring = builder.build()?.sampled(RING_BYTES)?;
        let area = AuxArea::map(&ring, RING_BYTES, AREA_BYTES)?;
        let mut thread = Self { area, ring, process, is_leaving: false };
        thread.ring.enable()?;
        Ok(thread)
    }

    /// Stops the event and reads the samples.
    fn read(&mut self, says_source: bool, counts: &mut ReadCounts, each: impl FnMut(SampledAccess)) {
        let is_stopped = self.ring.disable().is_ok();
        let head = self.area.head();
        let mut pieces = Vec::new();
        // Limits the loop to more records than fit into the ring, in case the event does not stop.
        for _ in 0..RING_BYTES / 8 {
            let Some(record) = self.ring.next_record() else { break };
            match record.ty() {
                AUX_RECORD => match parse_piece(&record.to_contiguous()) {
                    Some(piece) => pieces.push(piece),
                    None => counts.unreadable += 1,
                },
                // The pieces of lost records are not read, as their CPU is not known.
                LOST_RECORD => counts.gaps += 1,
                _ => {}
            }
        }
        if is_stopped {
            decode(&self.area, self.process, &pieces, says_source, counts, each);
        }
        self.area.release(head);
    }
}

/// Decodes the accesses in pieces of an area.
fn decode(
    area: &AuxArea,
    process: u32,
    pieces: &[AuxPiece],
    says_source: bool,
    counts: &mut ReadCounts,
    mut each: impl FnMut(SampledAccess),
) {
    let mut bytes = Vec::new();
    for piece in pieces {
        counts.gaps += u64::from(piece.flags & INCOMPLETE_FLAGS != 0);
        bytes.clear();
        if !area.copy(piece.start, piece.length, &mut bytes) {
            counts.unreadable += 1;
            continue;
        }
        counts.unreadable += spe::decode(&bytes, piece.start, |operation| {
            counts.accesses += 1;
            let source = if says_source { operation.source() } else { AccessSource::Unknown };
            each(SampledAccess { pid: process, address: operation.address, cpu: piece.cpu, source });
        });
    }
}

/// Parses `aux_offset`, `aux_size` and `flags` of `PERF_RECORD_AUX` and the CPU after them, in the kernel's byte order.
fn parse_piece(record: &[u8]) -> Option<AuxPiece> {
    let (start, rest) = record.split_first_chunk()?;
    let (length, rest) = rest.split_first_chunk()?;
    let (flags, rest) = rest.split_first_chunk()?;
    let (cpu, _) = rest.split_first_chunk()?;
    Some(AuxPiece {
        start: u64::from_ne_bytes(*start),
        length: u64::from_ne_bytes(*length),
        flags: u64::from_ne_bytes(*flags),
        cpu: CpuId(u32::from_ne_bytes(*cpu)),
    })
}

/// Returns the threads of processes. Ended processes and threads are skipped.
fn running_threads(processes: &BTreeSet<u32>) -> BTreeMap<ThreadId, RunningThread> {
    let mut found = BTreeMap::new();
    for &process in processes {
        let tasks = i32::try_from(process).ok().and_then(|pid| Process::new(pid).ok()?.tasks().ok());
        for stat in tasks.into_iter().flatten().flatten().filter_map(|task| task.stat().ok()) {
            found.insert(
                (stat.pid, stat.starttime),
                RunningThread { process, ticks: stat.utime + stat.stime },
            );
        }
    }
    found
}

/// Selects the threads with the most CPU time since the previous lookup. Among equal threads, open ones are preferred.
fn choose(
    running: &BTreeMap<ThreadId, RunningThread>,
    before: &BTreeMap<ThreadId, u64>,
    is_open: impl Fn(&ThreadId) -> bool,
    most: usize,
) -> BTreeSet<ThreadId> {
    let recent = |id: &ThreadId, thread: &RunningThread| {
        thread.ticks.saturating_sub(before.get(id).copied().unwrap_or(0))
    };
    let mut ranked: Vec<_> =
        running.iter().map(|(id, thread)| (Reverse(recent(id, thread)), !is_open(id), *id)).collect();
    ranked.sort_unstable();
    ranked.into_iter().take(most).map(|(.., id)| id).collect()
}

#[cfg(test)]
mod tests {
    use numaward_topology::CpuSet;

    use super::{
        super::{
            aux,
            rings::tests::{faults, unless_refused},
        },
        *,
    };

    /// Encodes a load of `address` from DRAM in 32 bytes.
    fn load(address: u16) -> [u8; 32] {
        let mut bytes = [0; 32];
        let [low, high] = address.to_le_bytes();
        bytes[..14].copy_from_slice(&[0x49, 0, 0xb2, low, high, 0, 0, 0, 0, 0, 0, 0x43, 0x0e, 0x01]);
        bytes
    }

    #[test]
    fn accesses_have_cpu_of_their_piece() {
        // The pieces are around the end of the area.
        let page = rustix::param::page_size() as u64;
        let (tail, head) = (3 * page - 48, 3 * page + 80);
        let written: Vec<u8> = (1..=4).flat_map(|at| load(at * 0x1000)).collect();
        let (_file, area) = aux::tests::area(tail, head, |at| written[usize::try_from(at - tail).unwrap()]);
        let piece = |first: u64, count: u64, cpu, flags| AuxPiece {
            start: tail + first * 32,
            length: count * 32,
            flags,
            cpu: CpuId(cpu),
        };
        let pieces = [
            piece(0, 2, 5, 0),
            piece(2, 1, 6, 0x1),
            // A piece with a collision, cut short; one after the head; and an empty one with a flag that no sample is
            // missing.
            AuxPiece { length: 20, ..piece(3, 1, 7, 0x8) },
            piece(4, 1, 8, 0),
            piece(4, 0, 8, 0x2),
        ];
        for (says_source, source) in [(true, AccessSource::LocalMemory), (false, AccessSource::Unknown)] {
            let (mut counts, mut found) = (ReadCounts::default(), Vec::new());
            decode(&area, 77, &pieces, says_source, &mut counts, |access| found.push(access));
            let expected = [(1, 5), (2, 5), (3, 6), (4, 7)].map(|(at, cpu)| SampledAccess {
                pid: 77,
                address: at * 0x1000,
                cpu: CpuId(cpu),
                source,
            });
            assert_eq!(found, expected);
            assert_eq!((counts.accesses, counts.gaps, counts.unreadable), (4, 2, 1), "{counts:?}");
        }
    }

    #[test]
    fn parses_aux_record() {
        let words = [7_u64, 8, 9].map(u64::to_ne_bytes).concat();
        let record = [words.as_slice(), &5_u32.to_ne_bytes(), &[0; 4]].concat();
        assert_eq!(parse_piece(&record), Some(AuxPiece { start: 7, length: 8, flags: 9, cpu: CpuId(5) }));
        assert_eq!(parse_piece(&words), None);
    }

    #[test]
    fn chooses_threads_with_most_cpu_time() {
        let now: BTreeMap<ThreadId, RunningThread> = [(1, 100), (2, 60), (3, 60), (4, 90)]
            .map(|(id, ticks)| ((id, 0), RunningThread { process: 1, ticks }))
            .into();
        let chosen = |before: &[(i32, u64)], open: i32, most| {
            let before = before.iter().map(|(id, ticks)| ((*id, 0), *ticks)).collect();
            let chosen = choose(&now, &before, |id| id.0 == open, most);
            chosen.into_iter().map(|id| id.0).collect::<Vec<_>>()
        };
        assert_eq!(chosen(&[], 0, 2), [1, 4]);
        assert_eq!(chosen(&[(1, 99), (2, 10), (3, 10), (4, 80)], 3, 1), [3]);
        assert_eq!(chosen(&[(1, 99), (2, 10), (3, 10), (4, 80)], 0, 9), [1, 2, 3, 4]);
    }

    #[test]
    fn finds_threads_of_this_process() {
        let own = std::process::id();
        let found = running_threads(&[own].into());
        assert!(found.keys().any(|(thread, _)| u32::try_from(*thread).ok() == Some(own)), "{found:?}");
        assert!(found.values().all(|thread| thread.process == own));
    }

    /// The kernel accepts the event, its ring, and the position of the area, but page faults have no area, which it
    /// reports last.
    #[test]
    fn reports_refused_unit_once() {
        let own = std::process::id();
        let unit = faults(CpuSet::default());
        let opened = SampledThread::open(&unit, i32::try_from(own).unwrap(), own).map(drop);
        let Err(error) = opened else { panic!("page faults have no area") };
        if error.kind() == io::ErrorKind::PermissionDenied {
            unless_refused(Err::<(), _>(error));
            return;
        }
        // `ENOTSUPP`, a code for the kernel's own use that older kernels return.
        assert!([Some(libc::EOPNOTSUPP), Some(524)].contains(&error.raw_os_error()), "{error:?}");
        let mut threads = SampledThreads::new(&unit, true);
        let refused = threads.watch(&[own].into(), &mut ReadCounts::default()).unwrap_err().to_string();
        assert!(refused.starts_with("page faults on thread ") && refused.contains("of process"), "{refused}");
        assert!(threads.watch(&[own].into(), &mut ReadCounts::default()).is_ok(), "reported once");
        threads.read(&mut ReadCounts::default(), |_| {});
        threads.stop();
    }
}
