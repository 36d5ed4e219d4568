//! Moving pages of a cgroup from one node to another, a few at a time.
//!
//! Problem: a workload that may use several nodes has more on one of them than it is to have there. `cpuset.mems` moves
//! all pages or none; here some are to be moved while it runs.
//!
//! Terms: a *window* is a range of addresses of 2 MiB at a multiple of that, so that a transparent huge page is in one
//! window; it is moved as a whole.
//!
//! Algorithm: for each process of the cgroup and of those below it, the mappings with pages on the node, coldest first
//! (`mappings.rs`), window by window: ask which pages are on the node, move those, ask again. What is no longer on the
//! node has moved; of the others the kernel's answer says why not. Between windows the thread sleeps as long as the rate
//! asks for.
//!
//! Invariants: pages that other processes map as well are left where they are (`MPOL_MF_MOVE`): they may be another
//! cgroup's. Pools of huge pages are left alone. A process that ends, or a mapping that goes, is no error. Nothing is
//! held up longer than one window takes.
//!
//! Source: `move_pages(2)`, `mm/migrate.c`.

mod huge;
mod mappings;
mod policies;
mod reclaim;
mod sys;

pub use huge::untouched_huge_pages;
pub use policies::{NamedNodes, named_nodes};
pub use reclaim::reclaim;

use std::{
    collections::BTreeMap,
    io,
    ops::Range,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use numaward_cgroup::read;
use numaward_topology::{Bytes, NodeId, NodeSet};

/// Bytes of a window.
const WINDOW: usize = 2 << 20;
/// As long as it sleeps without a look at whether it is over.
const NAP: Duration = Duration::from_millis(250);

/// What became of pages that were to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum PageOutcome {
    /// They lie on the node they were to go to.
    Moved,
    /// Several processes map them.
    Shared,
    /// The kernel had them in use at the moment, or they belong to it.
    Busy,
    /// The other node had no room.
    NoRoom,
    /// The kernel does not let us: `CAP_SYS_PTRACE` is missing, or the cgroup may not use the other node.
    Refused,
    /// Where they lie could not be read, or their process has more mappings than are read.
    Skipped,
    /// The kernel gave another reason.
    Other,
    /// Page cache that nobody maps: it cannot be moved, and was dropped.
    Reclaimed,
}

impl PageOutcome {
    /// All of them.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// The word for the label `outcome`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// That of a page that is still where it was, by the kernel's answer.
    fn of(answer: i32) -> Self {
        match -answer {
            libc::EACCES => Self::Shared,
            libc::EBUSY | libc::EAGAIN => Self::Busy,
            libc::ENOMEM => Self::NoRoom,
            libc::EPERM | libc::ENODEV => Self::Refused,
            // It says the node, or nothing: the kernel tried, and the page stayed.
            _ if answer >= 0 => Self::Busy,
            _ => Self::Other,
        }
    }
}

/// What is to be moved.
#[derive(Clone, Debug)]
pub struct PageMove {
    /// The directories of the cgroups.
    pub dirs: Vec<PathBuf>,
    /// Where the pages lie.
    pub from: NodeId,
    /// Where they are to go.
    pub to: NodeId,
    /// How much of them, at most; up to one window more where the last page is part of a huge page.
    pub bytes: Bytes,
    /// How much in a second, at most.
    pub rate: Bytes,
    /// Whether pages stay whose memory policy names nodes: their process has chosen where they are.
    pub heeds_policy: bool,
}

/// What was moved, and what was not, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PagesMoved(pub BTreeMap<PageOutcome, Bytes>);

impl PagesMoved {
    /// How much had this outcome.
    pub fn bytes(&self, outcome: PageOutcome) -> Bytes {
        self.0.get(&outcome).copied().unwrap_or_default()
    }

    /// What kept most of those that were not moved.
    pub fn obstacle(&self) -> Option<PageOutcome> {
        let is_done = |outcome| matches!(outcome, PageOutcome::Moved | PageOutcome::Reclaimed);
        let others = self.0.iter().filter(|(outcome, bytes)| !is_done(**outcome) && bytes.0 > 0);
        others.max_by_key(|(_, bytes)| bytes.0).map(|(outcome, _)| *outcome)
    }

    /// Adds to what had this outcome.
    pub fn add(&mut self, outcome: PageOutcome, bytes: u64) {
        let sum = self.0.entry(outcome).or_default();
        sum.0 = sum.0.saturating_add(bytes);
    }
}

/// Moves pages. Blocks for as long as that takes; `is_over` is asked before each window, and in longer pauses.
pub fn move_pages(proc: &Path, order: &PageMove, is_over: impl Fn() -> bool) -> PagesMoved {
    let mut run = Run { order, moved: PagesMoved::default(), answers: Vec::new(), started: Instant::now() };
    'processes: for process in processes(&order.dirs) {
        if run.is_done() || is_over() {
            break;
        }
        let found = match mappings::on_node(&proc.join(process.to_string()), order.from, &is_over) {
            Ok(found) => found,
            Err(error) => {
                // How much that would have been is not known: one page stands for it.
                match error.kind() {
                    io::ErrorKind::PermissionDenied => run.moved.add(PageOutcome::Refused, page_size()),
                    io::ErrorKind::Interrupted => return run.moved,
                    _ if has_ended(&error) => {}
                    _ => run.moved.add(PageOutcome::Skipped, page_size()),
                }
                continue;
            }
        };
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

/// Moves all pages of a cgroup's processes, and of those below it, off some nodes: what a write to `cpuset.mems` does from
/// Linux 5.15 on. Blocks for as long as that takes; `is_over` is asked before each process. What stays is seen where the memory lies.
pub(super) fn migrate(dir: &Path, from: &NodeSet, to: &NodeSet, is_over: impl Fn() -> bool) {
    for process in processes(&[dir.to_owned()]) {
        if is_over() {
            return;
        }
        // One that has ended, or that is not ours to trace, keeps no other from being moved.
        let _best_effort = sys::migrate_pages(process, from, to);
    }
}

/// Whether an error means that a process, or a thread, is no more.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// The processes of cgroups and of those below them, without this one.
fn processes(dirs: &[PathBuf]) -> Vec<u32> {
    let mut found: Vec<_> = dirs.iter().flat_map(|dir| read::processes_below(dir, usize::MAX)).collect();
    found.retain(|&process| process != std::process::id());
    found.sort_unstable();
    found.dedup();
    found
}

/// A range of addresses, cut at multiples of [`WINDOW`].
fn windows(addresses: &Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { mut start, end } = addresses.clone();
    std::iter::from_fn(move || {
        if start >= end {
            return None;
        }
        let next = (start - start % WINDOW).saturating_add(WINDOW).min(end);
        Some(std::mem::replace(&mut start, next)..next)
    })
}

fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// A move on its way.
struct Run<'a> {
    order: &'a PageMove,
    moved: PagesMoved,
    answers: Vec<i32>,
    started: Instant,
}

impl Run<'_> {
    /// Whether enough was moved, or the other node is full.
    fn is_done(&self) -> bool {
        self.moved.bytes(PageOutcome::Moved) >= self.order.bytes
            || self.moved.bytes(PageOutcome::NoRoom).0 > 0
    }

    /// Moves the pages of a window, and says how many were there. An error says that the process is gone, or not ours
    /// to ask.
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
            // Ended meanwhile: its pages are nowhere.
            (_, Err(_)) => return Err(io::ErrorKind::NotFound.into()),
            (Err(error), Ok(stayed)) => {
                let outcome = PageOutcome::of(-error.raw_os_error().unwrap_or(0));
                self.moved.add(outcome, stayed.len() as u64 * page_size());
                self.moved.add(PageOutcome::Moved, (here.len() - stayed.len()) as u64 * page_size());
                return Err(error);
            }
            (Ok(()), Ok(stayed)) => stayed,
        };
        let mut kept = stayed.iter().peekable();
        for (address, answer) in here.iter().zip(answers) {
            let has_stayed = kept.next_if_eq(&address).is_some();
            let outcome = if has_stayed { PageOutcome::of(answer) } else { PageOutcome::Moved };
            self.moved.add(outcome, page_size());
        }
        Ok(found)
    }

    /// Those of these pages that lie on the node they are to leave.
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

    /// Sleeps until what was moved is no more than the rate allows, or it is over.
    fn keep_to_rate(&self, is_over: &impl Fn() -> bool) {
        let moved = self.moved.bytes(PageOutcome::Moved).0;
        #[expect(clippy::cast_precision_loss, reason = "a time to sleep")]
        let due = Duration::try_from_secs_f64(moved as f64 / self.order.rate.0.max(1) as f64);
        let due = due.unwrap_or_default().saturating_sub(self.started.elapsed());
        let mut left = due.min(Duration::from_secs(10));
        while !left.is_zero() && !is_over() {
            let nap = left.min(NAP);
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
    fn windows_end_at_multiples_of_their_size() {
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
    fn processes_of_nested_cgroups_are_found_and_those_elsewhere_are_not() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        for (path, text) in
            [("cgroup.procs", "7\n0\n"), ("a/cgroup.procs", "5\n7\n"), ("a/b/cgroup.procs", "x\n")]
        {
            fs::write(dir.path().join(path), text).unwrap();
        }
        assert_eq!(processes(&[dir.path().to_owned()]), [5, 7]);
        assert!(processes(&[dir.path().join("gone")]).is_empty());
    }

    #[test]
    fn what_the_kernel_answers_has_a_word() {
        for (answer, outcome) in [
            (-libc::EACCES, PageOutcome::Shared),
            (-libc::EBUSY, PageOutcome::Busy),
            (0, PageOutcome::Busy),
            (-libc::ENOMEM, PageOutcome::NoRoom),
            (-libc::EPERM, PageOutcome::Refused),
            (-libc::EFAULT, PageOutcome::Other),
        ] {
            assert_eq!(PageOutcome::of(answer), outcome, "{answer}");
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
    fn a_pause_ends_when_it_is_over() {
        let order = PageMove {
            dirs: Vec::new(),
            from: NodeId(0),
            to: NodeId(1),
            bytes: Bytes::mib(2),
            rate: Bytes(1),
            heeds_policy: false,
        };
        let moved = PagesMoved(BTreeMap::from([(PageOutcome::Moved, Bytes::mib(1))]));
        let run = Run { order: &order, moved, answers: Vec::new(), started: Instant::now() };
        let asked = std::cell::Cell::new(0);
        run.keep_to_rate(&|| asked.replace(asked.get() + 1) > 0);
        assert_eq!(asked.get(), 2);
        assert!(run.started.elapsed() < Duration::from_secs(5));
    }

    /// On any machine: a child's pages are on some node, and to move them to a node that is not there is refused.
    #[test]
    fn a_node_that_is_not_there_takes_no_page() {
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

    /// A program under a name that is not UTF-8 is held to its budget like any other.
    #[test]
    fn names_that_are_not_utf8_keep_no_process_from_being_read() {
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

    /// `maps` and `numa_maps` as any local user can make them: more than 100 MB of names each.
    #[test]
    fn memory_is_bounded_whatever_a_process_maps() {
        const NAMES: usize = 30_000;
        const CEILING: u64 = 16 << 20;
        if !is_alone() {
            return;
        }
        let (host, proc) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // None has this id.
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
        let moved = move_pages(proc.path(), &order(host.path(), 0, 1), || false);
        let most = numa_maps.join().unwrap().max(maps.join().unwrap());
        assert!(most < start + CEILING, "{} KiB became {} KiB", start >> 10, most >> 10);
        assert_eq!(moved, PagesMoved::default(), "it has ended");
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
