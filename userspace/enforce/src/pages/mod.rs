//! Migration of some pages of a cgroup from one node to another.
//!
//! # Problem
//! A workload that may use several nodes has more memory on one of them than it should have there. `cpuset.mems` moves
//! all pages or none; here some pages are moved while the workload is running.
//!
//! # Terms
//! A *window* is an aligned range of addresses of 2 MiB, so that a transparent huge page is in one window; it is moved
//! as a whole.
//!
//! # Algorithm
//! For each process of the cgroup and of its descendants, beginning with any of them, the mappings with pages on the node are processed, coldest
//! first (`mappings.rs`), window by window: query which pages are on the node, move those, query again. A page that has
//! left the node was moved; for the other pages, the kernel's answer is the reason. Between windows the thread sleeps
//! as the rate requires.
//!
//! # Invariants
//! - Pages that other processes map as well are not moved (`MPOL_MF_MOVE`), because they may belong to another cgroup.
//! - Pools of huge pages are not moved.
//! - A process that ends, or a mapping that disappears, is no error.
//! - A move ends at the latest after one window. The mappings of a process are read for at most [`MAX_READ_TIME`]; then the pages of
//!   those that were read are moved. Such processes do not keep the moves from the others for good, because each move begins elsewhere.
//!
//! Source: `move_pages(2)`, `mm/migrate.c`.

mod huge;
mod mappings;
mod policies;
mod reclaim;
mod sys;

pub use huge::untouched_huge_pages;
#[cfg(feature = "testing")]
pub use mappings::mappings_on_node;
pub use policies::{NamedNodes, named_nodes};
pub use reclaim::reclaim;

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use numaward_cgroup::read::{self, FoundProcesses};
use numaward_topology::{Bytes, NodeId, NodeSet};

/// Size of a window, in bytes.
const WINDOW_SIZE: usize = 2 << 20;
/// Maximum duration of reading the mappings of a process, which chooses their number and the lengths of their names.
const MAX_READ_TIME: Duration = Duration::from_secs(5);
/// The longest sleep between two checks whether the move is over.
const MAX_SLEEP: Duration = Duration::from_millis(250);

/// Result of the attempt to move a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum PageOutcome {
    /// The page is on the destination node.
    Moved,
    /// Several processes map the page.
    Shared,
    /// The kernel was using the page, or it belongs to the kernel.
    Busy,
    /// The destination node has no free memory.
    NoRoom,
    /// The daemon may not move the page: `CAP_SYS_PTRACE` is missing, or the cgroup may not use the destination node.
    Refused,
    /// The location of the page could not be read, or not in time, or its process has more mappings than are read.
    Skipped,
    /// The kernel gave another reason.
    Other,
    /// The page belonged to unmapped page cache, which cannot be moved, and was dropped.
    Reclaimed,
}

impl PageOutcome {
    /// All outcomes.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// Returns the value of the metric label `outcome`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns the outcome of a page that has not moved, by the kernel's answer.
    fn from_answer(answer: i32) -> Self {
        match -answer {
            libc::EACCES => Self::Shared,
            libc::EBUSY | libc::EAGAIN => Self::Busy,
            libc::ENOMEM => Self::NoRoom,
            libc::EPERM | libc::ENODEV => Self::Refused,
            // The answer is the node or 0: the kernel tried, and the page stayed.
            _ if answer >= 0 => Self::Busy,
            _ => Self::Other,
        }
    }
}

/// Order to move pages.
#[derive(Clone, Debug)]
pub struct PageMove {
    /// Directories of the cgroups.
    pub dirs: Vec<PathBuf>,
    /// Node that the pages should leave.
    pub from: NodeId,
    /// Destination node.
    pub to: NodeId,
    /// Maximum amount to move; up to one window more if the last page is part of a huge page.
    pub bytes: Bytes,
    /// Maximum amount per second.
    pub rate: Bytes,
    /// If true, pages with a memory policy that names nodes are not moved, because their process has chosen the node.
    pub heeds_policy: bool,
}

/// Amount of memory by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagesMoved(pub BTreeMap<PageOutcome, Bytes>);

impl PagesMoved {
    /// Returns the amount with this outcome.
    pub fn bytes(&self, outcome: PageOutcome) -> Bytes {
        self.0.get(&outcome).copied().unwrap_or_default()
    }

    /// Returns the most frequent outcome of pages that were not moved.
    pub fn obstacle(&self) -> Option<PageOutcome> {
        let is_done = |outcome| matches!(outcome, PageOutcome::Moved | PageOutcome::Reclaimed);
        let others = self.0.iter().filter(|(outcome, bytes)| !is_done(**outcome) && bytes.0 > 0);
        others.max_by_key(|(_, bytes)| bytes.0).map(|(outcome, _)| *outcome)
    }

    /// Adds to the amount with this outcome.
    pub fn add(&mut self, outcome: PageOutcome, bytes: u64) {
        let sum = self.0.entry(outcome).or_default();
        sum.0 = sum.0.saturating_add(bytes);
    }
}

/// Moves pages. Blocks until they are moved; `is_over` is called before each window, during longer pauses, and for each line that is
/// read. If not all mappings are read in time, or not all cgroups can be searched, one page stands for the rest ([`PageOutcome::Skipped`]).
pub fn move_pages(proc: &Path, order: &PageMove, is_over: impl Fn() -> bool) -> PagesMoved {
    move_found_pages(proc, order, MAX_READ_TIME, is_over)
}

/// Moves pages, of each process those of the mappings that are found within `read_time`.
fn move_found_pages(
    proc: &Path,
    order: &PageMove,
    read_time: Duration,
    is_over: impl Fn() -> bool,
) -> PagesMoved {
    let mut run =
        MoveProgress { order, moved: PagesMoved::default(), answers: Vec::new(), started: Instant::now() };
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let FoundProcesses { ids, is_partial } = processes(&order.dirs);
    if is_partial {
        run.moved.add(PageOutcome::Skipped, page_size());
    }
    'processes: for process in beginning_at(ids, since_epoch.subsec_nanos()) {
        if run.is_done() {
            break;
        }
        if is_over() {
            run.moved.add(PageOutcome::Skipped, page_size());
            break;
        }
        let started = Instant::now();
        let is_read_over = || started.elapsed() >= read_time || is_over();
        let found = match mappings::on_node(&proc.join(process.to_string()), order.from, &is_read_over) {
            Ok(found) => found,
            Err(error) => {
                // The amount is not known, so one page stands for it.
                match error.kind() {
                    io::ErrorKind::PermissionDenied => run.moved.add(PageOutcome::Refused, page_size()),
                    _ if has_ended(&error) => {}
                    _ => run.moved.add(PageOutcome::Skipped, page_size()),
                }
                continue;
            }
        };
        if found.is_partial {
            run.moved.add(PageOutcome::Skipped, page_size());
        }
        if found.skipped > 0 {
            run.moved.add(PageOutcome::Skipped, found.skipped.saturating_mul(page_size()));
        }
        for mapping in found.mappings {
            if order.heeds_policy && mapping.is_bound {
                continue;
            }
            let mut left = mapping.pages;
            for window in windows(&mapping.addresses) {
                if run.is_done() || is_over() {
                    return run.moved;
                }
                let Ok(found) = run.window(process, &window) else { continue 'processes };
                run.keep_to_rate(&is_over);
                left = left.saturating_sub(found);
                // The rest of a large mapping can be empty.
                if left == 0 {
                    break;
                }
            }
        }
    }
    run.moved
}

/// Moves all pages of the processes of a cgroup and of its descendants off some nodes, as a write to `cpuset.mems` does
/// since Linux 5.15. Blocks until they are moved; `is_over` is called before each process. The caller has to read how
/// much memory stayed.
pub(super) fn migrate(dir: &Path, from: &NodeSet, to: &NodeSet, is_over: impl Fn() -> bool) {
    for process in processes(&[dir.to_owned()]).ids {
        if is_over() {
            return;
        }
        // A process that has ended, or that the daemon may not trace, must not keep the other ones from being moved.
        let _best_effort = sys::migrate_pages(process, from, to);
    }
}

/// Returns whether an error means that a process or a thread has ended.
pub(super) fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Returns the processes of cgroups and of their descendants, except the calling one.
fn processes(dirs: &[PathBuf]) -> FoundProcesses {
    let mut found = FoundProcesses::default();
    for dir in dirs {
        let below = read::processes_below(dir, usize::MAX);
        found.ids.extend(below.ids);
        found.is_partial |= below.is_partial;
    }
    found.ids.retain(|&process| process != std::process::id());
    found.ids.sort_unstable();
    found.ids.dedup();
    found
}

/// Returns the processes in a cycle that begins at one of them, by this number.
fn beginning_at(mut processes: Vec<u32>, number: u32) -> Vec<u32> {
    if let Some(first) = (number as usize).checked_rem(processes.len()) {
        processes.rotate_left(first);
    }
    processes
}

/// Cuts a range of addresses at multiples of [`WINDOW_SIZE`].
fn windows(addresses: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { mut start, end } = addresses.clone();
    std::iter::from_fn(move || {
        if start >= end {
            return None;
        }
        let next = (start - start % WINDOW_SIZE).saturating_add(WINDOW_SIZE).min(end);
        Some(std::mem::replace(&mut start, next)..next)
    })
}

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// Progress of a move.
struct MoveProgress<'a> {
    order: &'a PageMove,
    moved: PagesMoved,
    answers: Vec<i32>,
    started: Instant,
}

impl MoveProgress<'_> {
    /// Returns whether enough was moved, or the destination node is full.
    fn is_done(&self) -> bool {
        self.moved.bytes(PageOutcome::Moved) >= self.order.bytes
            || self.moved.bytes(PageOutcome::NoRoom).0 > 0
    }

    /// Moves the pages of a window, and returns the number of pages found there. An error means that the process has
    /// ended, or that the daemon may not trace it.
    fn window(&mut self, process: u32, window: &Range<usize>) -> io::Result<u64> {
        let addresses: Vec<usize> = window.clone().step_by(rustix::param::page_size()).collect();
        let mut here = self.on_node(process, &addresses)?;
        let found = here.len() as u64;
        let left = self.order.bytes.0.saturating_sub(self.moved.bytes(PageOutcome::Moved).0);
        here.truncate(usize::try_from(left.div_ceil(page_size())).unwrap_or(usize::MAX));
        if here.is_empty() {
            return Ok(found);
        }
        let tried = sys::move_pages(process, &here, Some(self.order.to), &mut self.answers);
        let answers = std::mem::take(&mut self.answers);
        let stayed = match (tried, self.on_node(process, &here)) {
            // The process has ended meanwhile.
            (_, Err(_)) => return Err(io::ErrorKind::NotFound.into()),
            (Err(error), Ok(stayed)) => {
                let outcome = PageOutcome::from_answer(-error.raw_os_error().unwrap_or(0));
                self.moved.add(outcome, stayed.len() as u64 * page_size());
                self.moved.add(PageOutcome::Moved, (here.len() - stayed.len()) as u64 * page_size());
                return Err(error);
            }
            (Ok(()), Ok(stayed)) => stayed,
        };
        let mut kept = stayed.iter().peekable();
        for (address, answer) in here.iter().zip(answers) {
            let has_stayed = kept.next_if_eq(&address).is_some();
            let outcome = if has_stayed { PageOutcome::from_answer(answer) } else { PageOutcome::Moved };
            self.moved.add(outcome, page_size());
        }
        Ok(found)
    }

    /// Returns those of these pages that are on the source node.
    fn on_node(&mut self, process: u32, addresses: &[usize]) -> io::Result<Vec<usize>> {
        if let Err(error) = sys::move_pages(process, addresses, None, &mut self.answers) {
            if error.kind() == io::ErrorKind::PermissionDenied {
                self.moved.add(PageOutcome::Refused, page_size());
            }
            return Err(error);
        }
        let from = i32::try_from(self.order.from.0).unwrap_or(-1);
        let found = addresses.iter().zip(&self.answers).filter(|(_, answer)| **answer == from);
        Ok(found.map(|(address, _)| *address).collect())
    }

    /// Sleeps until the moved amount is within the rate, or the move is over.
    fn keep_to_rate(&self, is_over: &impl Fn() -> bool) {
        let moved = self.moved.bytes(PageOutcome::Moved).0;
        #[expect(clippy::cast_precision_loss, reason = "a time to sleep")]
        let due = Duration::try_from_secs_f64(moved as f64 / self.order.rate.0.max(1) as f64);
        let due = due.unwrap_or_default().saturating_sub(self.started.elapsed());
        let mut left = due.min(Duration::from_secs(10));
        while !left.is_zero() && !is_over() {
            let nap = left.min(MAX_SLEEP);
            thread::sleep(nap);
            left -= nap;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        ffi::OsStr,
        fs::{self, File},
        io::{BufWriter, Write as _},
        os::unix::ffi::OsStrExt as _,
    };

    use numaward_tests_support::{is_alone, resident};
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn windows_are_aligned() {
        let cut = |range: Range<usize>| windows(&range).collect::<Vec<_>>();
        assert_eq!(
            cut(0x10_0000..0x50_1000),
            [0x10_0000..0x20_0000, 0x20_0000..0x40_0000, 0x40_0000..0x50_1000]
        );
        assert_eq!(cut(0x20_0000..0x40_0000), vec![0x20_0000..0x40_0000; 1]);
        assert_eq!(cut(8..8), []);
        let last = usize::MAX - 4095;
        assert_eq!(cut(last..usize::MAX), vec![last..usize::MAX; 1]);
    }

    #[test]
    fn finds_processes_of_descendants() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        for (path, text) in
            [("cgroup.procs", "7\n0\n"), ("a/cgroup.procs", "5\n7\n"), ("a/b/cgroup.procs", "x\n")]
        {
            fs::write(dir.path().join(path), text).unwrap();
        }
        assert_eq!(processes(&[dir.path().to_owned()]).ids, [5, 7]);
        assert_eq!(processes(&[dir.path().join("gone")]), FoundProcesses::default());
        let first: Vec<u32> = (8..12).map(|number| beginning_at(vec![5, 7, 9], number)[0]).collect();
        assert_eq!(first, [9, 5, 7, 9], "each is the first one in turn");
        assert_eq!(beginning_at(vec![5, 7, 9], 1), [7, 9, 5], "and none is left out");
        assert!(beginning_at(Vec::new(), 1).is_empty());
    }

    #[test]
    fn maps_answers_to_outcomes() {
        for (answer, outcome) in [
            (-libc::EACCES, PageOutcome::Shared),
            (-libc::EBUSY, PageOutcome::Busy),
            (0, PageOutcome::Busy),
            (-libc::ENOMEM, PageOutcome::NoRoom),
            (-libc::EPERM, PageOutcome::Refused),
            (-libc::EFAULT, PageOutcome::Other),
        ] {
            assert_eq!(PageOutcome::from_answer(answer), outcome, "{answer}");
        }
        let moved = PagesMoved(BTreeMap::from([
            (PageOutcome::Moved, Bytes(9)),
            (PageOutcome::Shared, Bytes(4)),
            (PageOutcome::Busy, Bytes(5)),
        ]));
        assert_eq!(moved.obstacle(), Some(PageOutcome::Busy));
        assert_eq!(PagesMoved(BTreeMap::from([(PageOutcome::Moved, Bytes(9))])).obstacle(), None);
    }

    #[test]
    fn pause_ends_when_move_is_over() {
        let order = PageMove {
            dirs: Vec::new(),
            from: NodeId(0),
            to: NodeId(1),
            bytes: Bytes::mib(2),
            rate: Bytes(1),
            heeds_policy: false,
        };
        let moved = PagesMoved(BTreeMap::from([(PageOutcome::Moved, Bytes::mib(1))]));
        let run = MoveProgress { order: &order, moved, answers: Vec::new(), started: Instant::now() };
        let asked = std::cell::Cell::new(0);
        run.keep_to_rate(&|| asked.replace(asked.get() + 1) > 0);
        assert_eq!(asked.get(), 2);
        assert!(run.started.elapsed() < Duration::from_secs(5));
    }

    /// Tries to move a child's pages to a node that does not exist, which is refused on any machine.
    #[test]
    fn moves_no_page_to_missing_node() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        fs::write(dir.path().join("cgroup.procs"), format!("{}\n", child.id())).unwrap();
        thread::sleep(Duration::from_millis(100));
        let process = PathBuf::from(format!("/proc/{}", child.id()));
        let on_node = |node| mappings::on_node(&process, NodeId(node), &|| false).unwrap().mappings;
        let from = (0..1023).find(|&node| !on_node(node).is_empty()).unwrap();
        let first = on_node(from).swap_remove(0);
        let order = order(dir.path(), from, 1023);
        let moved = move_pages(Path::new("/proc"), &order, || false);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(moved.bytes(PageOutcome::Moved), Bytes(0), "{moved:?}");
        let refused = moved.bytes(PageOutcome::Refused).0;
        assert!(refused > 0 && refused <= first.pages * page_size(), "after the first: {moved:?}");
        let gone = move_pages(Path::new("/proc"), &order, || false);
        assert_eq!(gone, PagesMoved::default(), "it has ended");
    }

    /// A program with a name that is not UTF-8 is subject to its budget too.
    #[test]
    fn reads_process_with_non_utf8_name() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join(OsStr::from_bytes(b"sl\xffeep"));
        fs::copy("/bin/sleep", &program).unwrap();
        let mut child = std::process::Command::new(program).arg("60").spawn().unwrap();
        fs::write(dir.path().join("cgroup.procs"), format!("{}\n", child.id())).unwrap();
        thread::sleep(Duration::from_millis(100));
        let refused = |from| {
            let moved = move_pages(Path::new("/proc"), &order(dir.path(), from, 1023), || false);
            moved.bytes(PageOutcome::Refused).0
        };
        let is_read = (0..1023).any(|from| refused(from) > 0);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(is_read);
    }

    /// Reads `maps` and `numa_maps` as any local user can make them, with more than 100 MB of names each.
    #[test]
    fn bounds_memory_for_long_maps() {
        const NAMES: usize = 30_000;
        const CEILING: u64 = 16 << 20;
        if !is_alone() {
            return;
        }
        let (host, proc) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // No process has this id.
        let process = proc.path().join("2147483000");
        fs::write(host.path().join("cgroup.procs"), "2147483000\n").unwrap();
        fs::create_dir(&process).unwrap();
        let start = resident();
        let writer = |file: &str, line: fn(usize, &str) -> String| {
            let path = process.join(file);
            mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
            thread::spawn(move || {
                let mut pipe = BufWriter::new(File::options().write(true).open(path).unwrap());
                let (name, mut most) = ("x\\012".repeat(800), 0);
                for number in 0..NAMES {
                    pipe.write_all(line(0x7f00_0000_0000 + (number << 13), &name).as_bytes()).unwrap();
                    most = if number % 100 == 0 { resident().max(most) } else { most };
                }
                most
            })
        };
        let maps = writer("maps", |at, name| format!("{at:x}-{:x} r--p 0 08:01 1 /{name}\n", at + 4096));
        let numa_maps =
            writer("numa_maps", |at, name| format!("{at:x} default file=/{name} mapped=1 N0=1\n"));
        let moved = move_found_pages(proc.path(), &order(host.path(), 0, 1), Duration::MAX, || false);
        let most = numa_maps.join().unwrap().max(maps.join().unwrap());
        assert!(most < start + CEILING, "{} KiB became {} KiB", start >> 10, most >> 10);
        assert_eq!(moved, PagesMoved::default(), "it has ended");
    }

    #[test]
    fn reports_mappings_that_were_not_read_in_time() {
        let (host, proc) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // No process has this id.
        let process = proc.path().join("2147483000");
        fs::create_dir(&process).unwrap();
        fs::write(host.path().join("cgroup.procs"), "2147483000\n").unwrap();
        fs::write(process.join("maps"), "7f0000000000-7f0000001000 rw-p 0 0:0 0\n").unwrap();
        fs::write(process.join("numa_maps"), "7f0000000000 default anon=1 N0=1\n").unwrap();
        let moved = |read_time| move_found_pages(proc.path(), &order(host.path(), 0, 1), read_time, || false);
        assert_eq!(moved(Duration::ZERO).obstacle(), Some(PageOutcome::Skipped));
        assert_eq!(moved(Duration::MAX), PagesMoved::default(), "it has ended");
    }

    fn order(dir: &Path, from: u32, to: u32) -> PageMove {
        PageMove {
            dirs: vec![dir.to_owned()],
            from: NodeId(from),
            to: NodeId(to),
            bytes: Bytes::mib(1),
            rate: Bytes::mib(64),
            heeds_policy: false,
        }
    }
}
