//! Samples of a unit that writes packets of its own beside a ring (Arm's SPE), by thread.
//!
//! The packets do not say which process it was, unless the kernel was built for that. So each thread has an event, with a
//! ring and an area of its own. The kernel closes a piece of the area when the thread leaves a CPU or the area is full, and
//! writes into the ring where the piece lies and on which CPU that was. A piece is therefore of one thread and one CPU.
//!
//! An event is stopped while it is read. That closes the last piece, starts an event again that the kernel stopped because
//! its area was full, and nothing writes meanwhile.

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
    aux::Area,
    pmu::Unit,
    rings::{Access, Counts},
    source::Source,
    spe,
};

/// Threads that are sampled at once: what follows is for each of them.
pub(super) const MOST: usize = 64;
/// Bytes of a ring. What it says about a piece has 40.
const RING: usize = 64 << 10;
/// Bytes of an area. A sample has 64, and a thread that is busy all of the time has some hundreds between two readings. Both
/// are of whole pages, which some kernels for Arm have of 64 KiB.
const AREA: usize = 256 << 10;
/// `PERF_RECORD_LOST` and `PERF_RECORD_AUX` (`linux/perf_event.h`).
const LOST: u32 = 2;
const PIECE: u32 = 11;
/// Flags of a piece that say that samples are missing: `PERF_AUX_FLAG_TRUNCATED`, `_PARTIAL` and `_COLLISION`.
const MISSING: u64 = 0x1 | 0x4 | 0x8;

/// A thread by its id and when it began, as ids are used again.
type Id = (i32, u64);

/// The threads of a workload that are sampled by one unit.
pub(super) struct Threads {
    unit: Unit,
    says_source: bool,
    open: BTreeMap<Id, Thread>,
    /// The CPU time of the workload's threads when one looked last, in clock ticks.
    ran: BTreeMap<Id, u64>,
    has_stopped: bool,
    /// Whether a thread was refused and that was said.
    has_refused: bool,
}

struct Thread {
    // Before the ring, which it is mapped beside.
    area: Area,
    ring: Sampler,
    process: u32,
    /// It is to be read once more, then closed.
    is_leaving: bool,
}

/// A thread that runs now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Running {
    process: u32,
    /// Its CPU time so far, in clock ticks.
    ticks: u64,
}

/// What the kernel says about a part of an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    start: u64,
    length: u64,
    flags: u64,
    cpu: CpuId,
}

impl Threads {
    pub(super) fn new(unit: &Unit, says_source: bool) -> Self {
        Self {
            unit: unit.clone(),
            says_source,
            open: BTreeMap::new(),
            ran: BTreeMap::new(),
            has_stopped: false,
            has_refused: false,
        }
    }

    /// Samples the threads of these processes that ran most since the last time, and no others. Says once that a thread is
    /// refused.
    pub(super) fn watch(
        &mut self,
        processes: &BTreeSet<u32>,
        counts: &mut Counts,
    ) -> Result<(), SampledError> {
        let running = running(processes);
        let chosen = choose(&running, &self.ran, |id| self.open.contains_key(id), MOST);
        counts.passed_over = counts.passed_over.max(running.len() - chosen.len());
        for (id, thread) in &mut self.open {
            thread.is_leaving = !chosen.contains(id);
        }
        let mut refused = None;
        for id in chosen {
            let Some(Running { process, .. }) = running.get(&id).filter(|_| !self.open.contains_key(&id))
            else {
                continue;
            };
            match Thread::open(&self.unit, id.0, *process) {
                Ok(thread) => {
                    self.open.insert(id, thread);
                }
                // It ended meanwhile.
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                Err(source) => {
                    let place = format!("thread {} of process {process}", id.0);
                    let unit = self.unit.name.clone();
                    refused.get_or_insert(SampledError::Refused { unit, place, source });
                }
            }
        }
        self.ran = running.into_iter().map(|(id, thread)| (id, thread.ticks)).collect();
        match refused.filter(|_| !self.has_refused) {
            None => Ok(()),
            Some(refused) => {
                self.has_refused = true;
                Err(refused)
            }
        }
    }

    /// Stops sampling. What was sampled can still be read.
    pub(super) fn stop(&mut self) {
        self.has_stopped = true;
        for thread in self.open.values_mut() {
            // One that cannot be stopped goes on until it is closed.
            let _ = thread.ring.disable();
        }
    }

    /// Reads what was sampled.
    pub(super) fn read(&mut self, counts: &mut Counts, mut each: impl FnMut(Access)) {
        for thread in self.open.values_mut() {
            thread.read(self.says_source, counts, &mut each);
            if !self.has_stopped && !thread.is_leaving {
                // One that cannot be started has ended.
                let _ = thread.ring.enable();
            }
        }
        self.open.retain(|_, thread| !thread.is_leaving);
    }
}

impl Thread {
    /// Opens the event of a thread, and starts to sample.
    fn open(unit: &Unit, thread: i32, process: u32) -> io::Result<Self> {
        let [config, config1, config2] = unit.event.config;
        let mut builder = Builder::new(Raw::new(config).config1(config1).config2(config2));
        builder.attrs_mut().type_ = unit.event.kind;
        builder.observe_pid(thread).sample_period(unit.period);
        builder.exclude_kernel(unit.takes_exclude_kernel).exclude_hv(unit.takes_exclude_kernel);
        // Each record ends with the CPU.
        builder.sample(SampleFlag::CPU).sample_id_all(true).read_format(ReadFormat::empty());
        let ring = builder.build()?.sampled(RING)?;
        let area = Area::map(&ring, RING, AREA)?;
        let mut thread = Self { area, ring, process, is_leaving: false };
        thread.ring.enable()?;
        Ok(thread)
    }

    /// Stops the event, and reads what was sampled.
    fn read(&mut self, says_source: bool, counts: &mut Counts, each: impl FnMut(Access)) {
        let is_stopped = self.ring.disable().is_ok();
        let head = self.area.head();
        let mut pieces = Vec::new();
        // More than the ring has room for, should it not stop.
        for _ in 0..RING / 8 {
            let Some(record) = self.ring.next_record() else { break };
            match record.ty() {
                PIECE => match piece(&record.to_contiguous()) {
                    Some(piece) => pieces.push(piece),
                    None => counts.unreadable += 1,
                },
                // Their pieces are not read, as nobody knows the CPU.
                LOST => counts.gaps += 1,
                _ => {}
            }
        }
        if is_stopped {
            decode(&self.area, self.process, &pieces, says_source, counts, each);
        }
        self.area.release(head);
    }
}

/// Reads the accesses in pieces of an area.
fn decode(
    area: &Area,
    process: u32,
    pieces: &[Piece],
    says_source: bool,
    counts: &mut Counts,
    mut each: impl FnMut(Access),
) {
    let mut bytes = Vec::new();
    for piece in pieces {
        counts.gaps += u64::from(piece.flags & MISSING != 0);
        bytes.clear();
        if !area.copy(piece.start, piece.length, &mut bytes) {
            counts.unreadable += 1;
            continue;
        }
        counts.unreadable += spe::decode(&bytes, piece.start, |operation| {
            counts.accesses += 1;
            let source = if says_source { operation.source() } else { Source::Unknown };
            each(Access { pid: process, address: operation.address, cpu: piece.cpu, source });
        });
    }
}

/// `aux_offset`, `aux_size` and `flags` of `PERF_RECORD_AUX`, and behind them the CPU, in the kernel's order of bytes.
fn piece(record: &[u8]) -> Option<Piece> {
    let (start, rest) = record.split_first_chunk()?;
    let (length, rest) = rest.split_first_chunk()?;
    let (flags, rest) = rest.split_first_chunk()?;
    let (cpu, _) = rest.split_first_chunk()?;
    Some(Piece {
        start: u64::from_ne_bytes(*start),
        length: u64::from_ne_bytes(*length),
        flags: u64::from_ne_bytes(*flags),
        cpu: CpuId(u32::from_ne_bytes(*cpu)),
    })
}

/// The threads of processes. Those that ended are passed over.
fn running(processes: &BTreeSet<u32>) -> BTreeMap<Id, Running> {
    let mut found = BTreeMap::new();
    for &process in processes {
        let tasks = i32::try_from(process).ok().and_then(|pid| Process::new(pid).ok()?.tasks().ok());
        for stat in tasks.into_iter().flatten().flatten().filter_map(|task| task.stat().ok()) {
            found.insert((stat.pid, stat.starttime), Running { process, ticks: stat.utime + stat.stime });
        }
    }
    found
}

/// Which threads to sample: those that ran most since the last time. Of two that are alike, the one that is open stays.
fn choose(
    running: &BTreeMap<Id, Running>,
    before: &BTreeMap<Id, u64>,
    is_open: impl Fn(&Id) -> bool,
    most: usize,
) -> BTreeSet<Id> {
    let recent =
        |id: &Id, thread: &Running| thread.ticks.saturating_sub(before.get(id).copied().unwrap_or(0));
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

    /// A load of `address` from DRAM, in 32 bytes.
    fn load(address: u16) -> [u8; 32] {
        let mut bytes = [0; 32];
        let [low, high] = address.to_le_bytes();
        bytes[..14].copy_from_slice(&[0x49, 0, 0xb2, low, high, 0, 0, 0, 0, 0, 0, 0x43, 0x0e, 0x01]);
        bytes
    }

    #[test]
    fn accesses_are_of_the_cpu_of_their_piece() {
        // Around the end of the area.
        let page = rustix::param::page_size() as u64;
        let (tail, head) = (3 * page - 48, 3 * page + 80);
        let written: Vec<u8> = (1..=4).flat_map(|at| load(at * 0x1000)).collect();
        let (_file, area) = aux::tests::area(tail, head, |at| written[usize::try_from(at - tail).unwrap()]);
        let piece = |first: u64, count: u64, cpu, flags| Piece {
            start: tail + first * 32,
            length: count * 32,
            flags,
            cpu: CpuId(cpu),
        };
        let pieces = [
            piece(0, 2, 5, 0),
            piece(2, 1, 6, 0x1),
            // Collided, and cut; behind the head; and only that the kernel chose another place.
            Piece { length: 20, ..piece(3, 1, 7, 0x8) },
            piece(4, 1, 8, 0),
            piece(4, 0, 8, 0x2),
        ];
        for (says_source, source) in [(true, Source::LocalMemory), (false, Source::Unknown)] {
            let (mut counts, mut found) = (Counts::default(), Vec::new());
            decode(&area, 77, &pieces, says_source, &mut counts, |access| found.push(access));
            let expected = [(1, 5), (2, 5), (3, 6), (4, 7)].map(|(at, cpu)| Access {
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
    fn what_the_kernel_says_about_a_piece_is_read() {
        let words = [7_u64, 8, 9].map(u64::to_ne_bytes).concat();
        let record = [words.as_slice(), &5_u32.to_ne_bytes(), &[0; 4]].concat();
        assert_eq!(piece(&record), Some(Piece { start: 7, length: 8, flags: 9, cpu: CpuId(5) }));
        assert_eq!(piece(&words), None);
    }

    #[test]
    fn those_that_ran_most_since_the_last_time_are_chosen() {
        let now: BTreeMap<Id, Running> = [(1, 100), (2, 60), (3, 60), (4, 90)]
            .map(|(id, ticks)| ((id, 0), Running { process: 1, ticks }))
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
    fn the_threads_of_this_process_are_found() {
        let own = std::process::id();
        let found = running(&[own].into());
        assert!(found.keys().any(|(thread, _)| u32::try_from(*thread).ok() == Some(own)), "{found:?}");
        assert!(found.values().all(|thread| thread.process == own));
    }

    /// The kernel takes the event, its ring, and where the area is to be. It has none for page faults, and says so last.
    #[test]
    fn a_unit_that_writes_no_packets_is_refused_once() {
        let own = std::process::id();
        let unit = faults(CpuSet::default());
        let opened = Thread::open(&unit, i32::try_from(own).unwrap(), own).map(drop);
        let Err(error) = opened else { panic!("page faults have no area") };
        if error.kind() == io::ErrorKind::PermissionDenied {
            unless_refused(Err::<(), _>(error));
            return;
        }
        // `ENOTSUPP`, which is for the kernel only, of older ones.
        assert!([Some(libc::EOPNOTSUPP), Some(524)].contains(&error.raw_os_error()), "{error:?}");
        let mut threads = Threads::new(&unit, true);
        let refused = threads.watch(&[own].into(), &mut Counts::default()).unwrap_err().to_string();
        assert!(refused.starts_with("page faults on thread ") && refused.contains("of process"), "{refused}");
        assert!(threads.watch(&[own].into(), &mut Counts::default()).is_ok(), "said once");
        threads.read(&mut Counts::default(), |_| {});
        threads.stop();
    }
}
