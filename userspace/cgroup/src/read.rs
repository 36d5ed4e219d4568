//! Readers of a cgroup's usage: memory by node, events, pressure, processes.
//!
//! Each takes the cgroup's directory ([`Hierarchy::dir`](crate::Hierarchy::dir)). Values that some kernels do not have are
//! optional; a missing file is [`ReadError::Absent`], a vanished cgroup [`ReadError::Gone`].
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst, Documentation/accounting/psi.rst.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufReader},
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_topology::{Bytes, HugepageSize, NodeId};
use rustix::io::Errno;

use crate::{TruncatedLines, gone::is_gone, knob::Knob};

pub use crate::subtree::{Subtree, subtree, subtree_with};

/// Maximum number of cgroups in which [`processes_below`] searches. A user can have more in a delegated subtree.
pub const MAX_CGROUPS: usize = 65_536;

/// A file of a cgroup cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The cgroup has vanished. This is normal, because cgroups are removed at any time.
    #[error("the cgroup {path} is gone", path = path.display())]
    Gone { path: PathBuf },
    /// The cgroup exists, but the file does not, or this kernel refuses to fill it.
    #[error("{path} is not available: {reason}", path = path.display())]
    Absent {
        path: PathBuf,
        /// The possible reason and the remedy.
        reason: &'static str,
    },
    /// The system refuses to read the file.
    #[error("cannot read {path}: {source}", path = path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    /// A line is not in the documented format.
    #[error("{path}:{line}: {content:?} is not {expected}", path = path.display())]
    Malformed {
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// The content of the line, shortened.
        content: String,
        /// The expected format.
        expected: &'static str,
    },
    /// A value is missing that the kernel always has.
    #[error("{path} has no `{key}`", path = path.display())]
    Incomplete {
        path: PathBuf,
        /// The name of the value.
        key: &'static str,
    },
}

impl ReadError {
    /// Returns true if the cgroup has vanished.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }

    /// Returns true if the cgroup exists without the file.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent { .. })
    }
}

/// The text of a cgroup's file.
struct CgroupFile {
    path: PathBuf,
    text: String,
}

impl CgroupFile {
    fn read(dir: &Path, file: &str) -> Result<Self, ReadError> {
        let path = dir.join(file);
        match fs::read(&path) {
            // All values are ASCII; the parser of a line reports anything else as malformed.
            Ok(bytes) => Ok(Self { path, text: String::from_utf8_lossy(&bytes).into_owned() }),
            Err(error) => Err(read_error(dir, file, error)),
        }
    }

    fn lines(&self) -> impl Iterator<Item = (&str, usize)> {
        self.text.lines().zip(1..)
    }

    fn malformed(&self, line: usize, expected: &'static str) -> ReadError {
        malformed(self.path.clone(), line, self.text.lines().nth(line - 1).unwrap_or_default(), expected)
    }

    fn incomplete(&self, key: &'static str) -> ReadError {
        ReadError::Incomplete { path: self.path.clone(), key }
    }

    /// Parses a file with lines `KEY VALUE`.
    fn flat_keyed(&self) -> Result<BTreeMap<&str, u64>, ReadError> {
        self.lines()
            .map(|(line, number)| {
                let pair =
                    line.split_once(' ').and_then(|(key, value)| Some((key, value.trim().parse().ok()?)));
                pair.ok_or_else(|| self.malformed(number, "`KEY NUMBER`"))
            })
            .collect()
    }
}

fn malformed(path: PathBuf, line: usize, content: &str, expected: &'static str) -> ReadError {
    ReadError::Malformed { path, line, content: content.chars().take(120).collect(), expected }
}

/// Returns the error for a file that cannot be opened or read.
fn read_error(dir: &Path, file: &str, error: io::Error) -> ReadError {
    let path = dir.join(file);
    if is_gone(&error) {
        if error.kind() != io::ErrorKind::NotFound || !dir.is_dir() {
            return ReadError::Gone { path: dir.into() };
        }
        let reason = match file.split_once('.') {
            Some(("cgroup", _)) => "this kernel does not have it for this cgroup",
            Some((_, "pressure")) => "this kernel has no pressure stall information; boot with `psi=1`",
            _ => {
                "the root cgroup or this kernel does not have it, or its controller is not enabled in the \
                 parent's cgroup.subtree_control"
            }
        };
        return ReadError::Absent { path, reason };
    }
    if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) {
        let reason = match file.split_once('.') {
            Some((_, "pressure")) => "pressure stall information is disabled; boot with `psi=1`",
            _ => "a threaded cgroup does not have it; read the file of its domain cgroup",
        };
        return ReadError::Absent { path, reason };
    }
    ReadError::Unreadable { path, source: error }
}

/// The memory of a cgroup and its descendants on one node (`memory.numa_stat`).
///
/// Hugepages from pools are not included. Values that the kernel does not report are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupNodeMemory {
    /// Anonymous memory, including transparent huge pages.
    pub anon: Bytes,
    /// Page cache, including tmpfs and shared memory.
    pub file: Bytes,
    /// The part of `file` that is mapped.
    pub file_mapped: Bytes,
    /// The part of `file` that is tmpfs and shared memory: it can be swapped, but not dropped.
    pub shmem: Bytes,
    /// Kernel memory: stacks, page tables and slab. (Other kernel memory is not reported by node.)
    pub kernel: Bytes,
    /// The part of all this that the kernel drops when memory is needed: page cache and reclaimable slab. It includes
    /// neither locked memory nor tmpfs and shared memory.
    pub droppable: Bytes,
    /// Migrations between this node and slower memory; `None` if the kernel does not report them (before Linux 6.12).
    pub tiering: Option<TierMigrations>,
}

/// The number of pages that the kernel has moved between memory tiers since the cgroup was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierMigrations {
    /// Pages moved to slower memory.
    pub demoted: u64,
    /// Pages moved to faster memory.
    pub promoted: u64,
}

impl CgroupNodeMemory {
    /// Returns the user memory: anonymous memory and page cache.
    pub fn user(&self) -> Bytes {
        Bytes(self.anon.0.saturating_add(self.file.0))
    }

    /// Returns the user and kernel memory that cannot be dropped.
    pub fn undroppable(&self) -> Bytes {
        Bytes(self.user().0.saturating_add(self.kernel.0).saturating_sub(self.droppable.0))
    }

    /// Returns the page cache without tmpfs and shared memory.
    pub fn page_cache(&self) -> Bytes {
        Bytes(self.file.0.saturating_sub(self.shmem.0))
    }

    /// Returns the page cache that no process maps and that can be dropped, if necessary after writeback.
    pub fn unmapped_page_cache(&self) -> Bytes {
        Bytes(self.file.0.saturating_sub(self.file_mapped.0.max(self.shmem.0)))
    }

    /// Adds the number of a line of this kind, in bytes or pages. Returns `false` if the line is not used.
    fn count(&mut self, kind: &str, number: u64) -> bool {
        let fields: &mut [&mut Bytes] = match kind {
            "anon" => &mut [&mut self.anon],
            "file" => &mut [&mut self.file],
            "file_mapped" => &mut [&mut self.file_mapped],
            "shmem" => &mut [&mut self.shmem],
            "kernel_stack" | "pagetables" | "sec_pagetables" | "slab_unreclaimable" => {
                &mut [&mut self.kernel]
            }
            "slab_reclaimable" => &mut [&mut self.kernel, &mut self.droppable],
            "active_file" | "inactive_file" => &mut [&mut self.droppable],
            _ => return self.count_moved(kind, number),
        };
        for field in fields {
            field.0 = field.0.saturating_add(number);
        }
        true
    }

    fn count_moved(&mut self, kind: &str, pages: u64) -> bool {
        let is_demotion = kind.starts_with("pgdemote_");
        let is_counted = is_demotion || kind == "pgpromote_success";
        if is_counted {
            let tiering = self.tiering.get_or_insert_default();
            let sum = if is_demotion { &mut tiering.demoted } else { &mut tiering.promoted };
            *sum = sum.saturating_add(pages);
        }
        is_counted
    }
}

/// Reads `memory.numa_stat`: the memory of a cgroup and its descendants, by node.
///
/// This costs the kernel some 50 µs per cgroup: read only the necessary cgroups, every few seconds.
pub fn memory_numa_stat(dir: &Path) -> Result<BTreeMap<NodeId, CgroupNodeMemory>, ReadError> {
    const EXPECTED: &str = "`TYPE N0=BYTES N1=BYTES …`";
    let text = CgroupFile::read(dir, "memory.numa_stat")?;
    let mut nodes: BTreeMap<NodeId, CgroupNodeMemory> = BTreeMap::new();
    let mut anon_seen = false;
    for (line, number) in text.lines() {
        let malformed = || text.malformed(number, EXPECTED);
        let (kind, values) = line.split_once(' ').ok_or_else(malformed)?;
        anon_seen |= kind == "anon";
        if !CgroupNodeMemory::default().count(kind, 0) {
            continue;
        }
        for value in values.split_ascii_whitespace() {
            let (node, bytes) = bytes_of_node(value).ok_or_else(malformed)?;
            nodes.entry(node).or_default().count(kind, bytes.0);
        }
    }
    if !anon_seen {
        return Err(text.incomplete("anon"));
    }
    Ok(nodes)
}

/// Parses `N0=BYTES`.
fn bytes_of_node(value: &str) -> Option<(NodeId, Bytes)> {
    let (node, bytes) = value.strip_prefix('N')?.split_once('=')?;
    Some((NodeId(node.parse().ok()?), Bytes(bytes.parse().ok()?)))
}

/// Reads `hugetlb.<size>.numa_stat` (Linux 5.17): huge pages of a cgroup and its descendants, in bytes by node.
pub fn hugetlb_numa_stat(dir: &Path, size: HugepageSize) -> Result<BTreeMap<NodeId, Bytes>, ReadError> {
    const EXPECTED: &str = "`total=BYTES N0=BYTES N1=BYTES …`";
    let limit = Knob::HugetlbMax(size).to_string();
    let text = CgroupFile::read(dir, &format!("{}.numa_stat", limit.trim_end_matches(".max")))?;
    let of_all = text.lines().find(|(line, _)| line.starts_with("total="));
    let Some((line, number)) = of_all else { return Err(text.incomplete("total")) };
    let values = line.split_ascii_whitespace().skip(1);
    values.map(|value| bytes_of_node(value).ok_or_else(|| text.malformed(number, EXPECTED))).collect()
}

/// The number of times that a cgroup and its descendants reached their limits since it was created (`memory.events`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEvents {
    /// Throttled allocations above `memory.high`.
    pub high: u64,
    /// Processes killed by any kind of OOM killer.
    pub oom_kill: u64,
}

/// Reads `memory.events`. The root cgroup has none.
pub fn memory_events(dir: &Path) -> Result<MemoryEvents, ReadError> {
    let text = CgroupFile::read(dir, "memory.events")?;
    let values = text.flat_keyed()?;
    let value = |key| values.get(key).copied().ok_or_else(|| text.incomplete(key));
    Ok(MemoryEvents { high: value("high")?, oom_kill: value("oom_kill")? })
}

/// Reads the number of file pages that were read again soon after they were reclaimed, since the cgroup was created:
/// `workingset_refault_file` of `memory.stat`.
pub fn file_refaults(dir: &Path) -> Result<u64, ReadError> {
    const KEY: &str = "workingset_refault_file";
    let text = CgroupFile::read(dir, "memory.stat")?;
    text.flat_keyed()?.get(KEY).copied().ok_or_else(|| text.incomplete(KEY))
}

/// The time that tasks of a cgroup have waited for memory since it was created (`memory.pressure`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryPressure {
    /// The time in which at least one task waited.
    pub some: Duration,
    /// The time in which all non-idle tasks waited.
    pub full: Duration,
}

/// Reads `memory.pressure`. [`ReadError::Absent`] if the kernel has no PSI or it is disabled.
pub fn memory_pressure(dir: &Path) -> Result<MemoryPressure, ReadError> {
    const EXPECTED: &str = "`some|full avg10=PERCENT avg60=PERCENT avg300=PERCENT total=MICROSECONDS`";
    let text = CgroupFile::read(dir, "memory.pressure")?;
    let (mut some, mut full) = (None, None);
    for (line, number) in text.lines() {
        let malformed = || text.malformed(number, EXPECTED);
        let (kind, values) = line.split_once(' ').ok_or_else(malformed)?;
        let waited = match kind {
            "some" => &mut some,
            "full" => &mut full,
            _ => return Err(malformed()),
        };
        let total = values.split(' ').find_map(|value| value.strip_prefix("total=")?.parse().ok());
        *waited = Some(Duration::from_micros(total.ok_or_else(malformed)?));
    }
    Ok(MemoryPressure {
        some: some.ok_or_else(|| text.incomplete("some"))?,
        full: full.ok_or_else(|| text.incomplete("full"))?,
    })
}

/// The work of automatic NUMA balancing for a cgroup and its descendants (`numa_*` of `memory.stat`), in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NumaBalancing {
    /// Pages that were made to fault, to sample accesses.
    pub pte_updates: u64,
    /// Pages that were moved to the node of the CPU that accesses them.
    pub pages_migrated: u64,
}

/// Reads the `numa_*` lines of `memory.stat`; `None` if the kernel has none (before Linux 6.12).
pub fn numa_balancing(dir: &Path) -> Result<Option<NumaBalancing>, ReadError> {
    let text = CgroupFile::read(dir, "memory.stat")?;
    let values = text.flat_keyed()?;
    if !values.contains_key("anon") {
        return Err(text.incomplete("anon"));
    }
    let all = || {
        Some(NumaBalancing {
            pte_updates: *values.get("numa_pte_updates")?,
            pages_migrated: *values.get("numa_pages_migrated")?,
        })
    };
    Ok(all())
}

/// Reads `usage_usec` of `cpu.stat`: the CPU time of a cgroup and all its past and present descendants. Every cgroup
/// has it; it is zero before the first process has run.
pub fn cpu_time(dir: &Path) -> Result<Duration, ReadError> {
    let text = CgroupFile::read(dir, "cpu.stat")?;
    let usage = text.lines().find_map(|(line, number)| Some((line.strip_prefix("usage_usec ")?, number)));
    let Some((usage, number)) = usage else { return Err(text.incomplete("usage_usec")) };
    let micros = usage.trim().parse().map_err(|_| text.malformed(number, "a number of microseconds"))?;
    Ok(Duration::from_micros(micros))
}

/// Reads `populated` of `cgroup.events`: true if the cgroup or a descendant has a process.
pub fn populated(dir: &Path) -> Result<bool, ReadError> {
    let text = CgroupFile::read(dir, "cgroup.events")?;
    let values = text.flat_keyed()?;
    values.get("populated").map(|&value| value != 0).ok_or_else(|| text.incomplete("populated"))
}

/// Reads `cgroup.procs`: the processes in the cgroup itself. 0 stands for a process of another PID namespace. Ends when `visit` returns
/// false: a cgroup can have millions of processes.
pub fn visit_processes(dir: &Path, visit: impl FnMut(u32) -> bool) -> Result<(), ReadError> {
    visit_ids(dir, "cgroup.procs", visit)
}

/// Processes of a cgroup and its descendants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FoundProcesses {
    pub ids: Vec<u32>,
    /// True if not all cgroups were searched.
    pub is_partial: bool,
}

/// Returns at most `most` processes in the first [`MAX_CGROUPS`] of a cgroup and its descendants. A cgroup that cannot be
/// read counts as empty: it is gone, or it is threaded and its processes are listed in the domain above. Processes of
/// another PID namespace are not returned.
pub fn processes_below(dir: &Path, most: usize) -> FoundProcesses {
    let (mut found, mut dirs) = (Vec::new(), subtree(dir));
    for dir in dirs.by_ref().take(MAX_CGROUPS) {
        let _absent = visit_processes(&dir, |process| {
            found.extend((process != 0).then_some(process));
            found.len() < most
        });
        if found.len() >= most {
            break;
        }
    }
    FoundProcesses { ids: found, is_partial: dirs.next().is_some() || !dirs.is_complete() }
}

/// Reads `cgroup.threads`: at most `most` threads in the cgroup itself. 0 stands for a thread of another PID namespace.
pub fn threads(dir: &Path, most: usize) -> Result<Vec<u32>, ReadError> {
    let mut found = Vec::new();
    visit_threads(dir, |thread| {
        found.push(thread);
        found.len() < most
    })?;
    Ok(found)
}

/// Reads `cgroup.threads`: the threads in the cgroup itself. 0 stands for a thread of another PID namespace. Ends when `visit` returns false.
pub fn visit_threads(dir: &Path, visit: impl FnMut(u32) -> bool) -> Result<(), ReadError> {
    visit_ids(dir, "cgroup.threads", visit)
}

/// Calls `visit` for each line of a file of ids until it returns false. The file is not read as a whole.
fn visit_ids(dir: &Path, file: &str, mut visit: impl FnMut(u32) -> bool) -> Result<(), ReadError> {
    let fail = |error| read_error(dir, file, error);
    let mut lines = TruncatedLines::new(BufReader::new(File::open(dir.join(file)).map_err(fail)?));
    let mut number = 0;
    while let Some(line) = lines.next_line().map_err(fail)? {
        number += 1;
        let line = String::from_utf8_lossy(line);
        let id = line.parse().map_err(|_| malformed(dir.join(file), number, &line, "a process id"))?;
        if !visit(id) {
            break;
        }
    }
    Ok(())
}

/// Reads `memory.current`: all memory that is charged to a cgroup and its descendants. The root cgroup has none.
pub fn memory_current(dir: &Path) -> Result<Bytes, ReadError> {
    bytes_in(dir, "memory.current")
}

/// Reads the memory that is charged to a cgroup and its descendants and that the kernel cannot drop at once: everything
/// except clean page cache (`memory.current`, `memory.stat`). Without `memory.stat`, it is `memory.current`.
pub fn memory_in_use(dir: &Path) -> Result<Bytes, ReadError> {
    let current = memory_current(dir)?;
    let text = match CgroupFile::read(dir, "memory.stat") {
        Err(error) if error.is_absent() => return Ok(current),
        text => text?,
    };
    let values = text.flat_keyed()?;
    let sum = |keys: [&str; 2]| {
        keys.iter().filter_map(|key| values.get(key)).fold(0, |a: u64, b| a.saturating_add(*b))
    };
    let clean = sum(["active_file", "inactive_file"]).saturating_sub(sum(["file_dirty", "file_writeback"]));
    Ok(Bytes(current.0.saturating_sub(clean)))
}

/// Reads `hugetlb.<size>.current`: huge pages of a cgroup and its descendants.
pub fn hugetlb_current(dir: &Path, size: HugepageSize) -> Result<Bytes, ReadError> {
    let limit = Knob::HugetlbMax(size).to_string();
    bytes_in(dir, &format!("{}.current", limit.trim_end_matches(".max")))
}

fn bytes_in(dir: &Path, file: &str) -> Result<Bytes, ReadError> {
    let text = CgroupFile::read(dir, file)?;
    text.text.trim().parse().map(Bytes).map_err(|_| text.malformed(1, "a number of bytes"))
}

#[cfg(test)]
mod tests {
    use numaward_tests_support::{is_alone, peak, reset_peak};

    use super::*;

    fn cgroup(file: &str, content: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(file), content).unwrap();
        dir
    }

    /// Checks a reader with valid content, a missing file, a missing cgroup, and corrupt contents.
    fn check<T: PartialEq + std::fmt::Debug>(
        file: &str,
        read: fn(&Path) -> Result<T, ReadError>,
        good: &[(&str, T)],
        corrupt: &[(&str, &str)],
    ) {
        for (content, expected) in good {
            assert_eq!(&read(cgroup(file, content).path()).unwrap(), expected, "{content:?}");
        }
        let empty = tempfile::tempdir().unwrap();
        let error = read(empty.path()).unwrap_err();
        assert!(error.is_absent() && error.to_string().contains(file), "{error}");
        let error = read(&empty.path().join("vanished")).unwrap_err();
        assert!(error.is_gone() && error.to_string().contains("vanished"), "{error}");
        for (content, message) in corrupt {
            let error = read(cgroup(file, content).path()).unwrap_err().to_string();
            assert!(error.contains(message) && error.contains(file), "{content:?}: {error}");
        }
        fs::create_dir(empty.path().join(file)).unwrap();
        let error = read(empty.path()).unwrap_err();
        assert!(matches!(error, ReadError::Unreadable { .. }), "{error}");
    }

    #[test]
    fn clean_page_cache_is_not_in_use() {
        let dir = cgroup("memory.current", "1000\n");
        let read = |stat: &str| {
            fs::write(dir.path().join("memory.stat"), stat).unwrap();
            memory_in_use(dir.path())
        };
        assert_eq!(memory_in_use(dir.path()).unwrap(), Bytes(1000));
        let stat = "anon 500\ninactive_file 200\nactive_file 100\nfile_dirty 30\nfile_writeback 20\n";
        assert_eq!(read(stat).unwrap(), Bytes(750));
        assert_eq!(read("active_file 2000\n").unwrap(), Bytes(0));
        assert_eq!(read("active_file 10\nfile_dirty 20\n").unwrap(), Bytes(1000));
        assert!(read("active_file many\n").unwrap_err().to_string().contains("memory.stat:1"));
        assert!(memory_in_use(&dir.path().join("vanished")).unwrap_err().is_gone());
        fs::remove_file(dir.path().join("memory.current")).unwrap();
        assert!(memory_in_use(dir.path()).unwrap_err().is_absent());
    }

    #[test]
    fn reads_hugepages_by_node() {
        let size = HugepageSize(Bytes::mib(2));
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            fs::write(dir.path().join("hugetlb.2MB.numa_stat"), text).unwrap();
            hugetlb_numa_stat(dir.path(), size)
        };
        let found = read("total=4194304 N0=0 N1=4194304\n").unwrap();
        assert_eq!(found, [(NodeId(0), Bytes(0)), (NodeId(1), Bytes::mib(4))].into());
        for (text, words) in [("", "`total`"), ("total=1 0=1\n", "numa_stat:1")] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text:?}: {error}");
        }
        fs::remove_file(dir.path().join("hugetlb.2MB.numa_stat")).unwrap();
        assert!(hugetlb_numa_stat(dir.path(), size).unwrap_err().is_absent());
    }

    #[test]
    fn reads_memory_by_node() {
        let stat = "anon N0=4096 N2=8192\nfile N0=100 N2=0\nkernel_stack N0=1 N2=0\npagetables N0=2 N2=0\n\
                    sec_pagetables N0=3 N2=0\nshmem N0=50 N2=0\nfile_mapped N0=6 N2=0\nfile_dirty N0=7 N2=0\n\
                    file_writeback N0=8 N2=0\nswapcached N0=99 N2=0\nanon_thp N0=9 N2=0\nfile_thp N0=10 N2=0\n\
                    shmem_thp N0=11 N2=0\ninactive_anon N0=99 N2=0\nactive_file N0=20 N2=0\n\
                    inactive_file N0=18 N2=0\nunevictable N0=12 N2=0\n\
                    slab_reclaimable N0=13 N2=0\nslab_unreclaimable N0=14 N2=0\nworkingset_refault_anon N0=9 N2=0\n\
                    pgdemote_kswapd N0=15 N2=0\npgdemote_direct N0=16 N2=0\npgpromote_success N0=17 N2=0\n";
        let node0 = CgroupNodeMemory {
            anon: Bytes(4096),
            file: Bytes(100),
            file_mapped: Bytes(6),
            shmem: Bytes(50),
            kernel: Bytes(33),
            droppable: Bytes(20 + 18 + 13),
            tiering: Some(TierMigrations { demoted: 15 + 16, promoted: 17 }),
        };
        assert_eq!(node0.undroppable(), Bytes(4096 + 50 + 12 + 20), "of the page cache, 12 are locked");
        let node2 = CgroupNodeMemory {
            anon: Bytes(8192),
            tiering: Some(TierMigrations::default()),
            ..CgroupNodeMemory::default()
        };
        let least = CgroupNodeMemory { anon: Bytes(1), ..CgroupNodeMemory::default() };
        check(
            "memory.numa_stat",
            memory_numa_stat,
            &[
                (stat, BTreeMap::from([(NodeId(0), node0), (NodeId(2), node2)])),
                ("anon N0=1\n", BTreeMap::from([(NodeId(0), least)])),
            ],
            &[
                ("", "has no `anon`"),
                ("file N0=1\n", "has no `anon`"),
                ("anon\n", "numa_stat:1: \"anon\" is not `TYPE N0=BYTES"),
                ("anon N0=1\nfile N0=1 N1\n", "numa_stat:2: \"file N0=1 N1\" is not"),
                ("anon 0=1\n", "numa_stat:1"),
                ("anon N0=-1\n", "numa_stat:1"),
                ("anon N0=99999999999999999999\n", "numa_stat:1"),
                ("anon N\u{0}=1\n", "numa_stat:1"),
            ],
        );
    }

    #[test]
    fn reads_memory_events() {
        let old = "low 0\nhigh 274\nmax 3\noom 2\noom_kill 1\n";
        let new = format!("{old}oom_group_kill 4\nsock_throttled 0\n");
        let events = MemoryEvents { high: 274, oom_kill: 1 };
        check(
            "memory.events",
            memory_events,
            &[(old, events), (&new, events)],
            &[("", "has no `high`"), ("low 0\nhigh\n", "memory.events:2"), ("low x\n", "memory.events:1")],
        );
    }

    #[test]
    fn reads_memory_pressure() {
        let pressure = MemoryPressure { some: Duration::from_millis(7600), full: Duration::from_micros(5) };
        let some = "some avg10=1.50 avg60=0.25 avg300=0.00 total=7600000\n";
        let text = format!("{some}full avg10=0.00 avg60=0.00 avg300=0.00 total=5\n");
        check(
            "memory.pressure",
            memory_pressure,
            &[(&text, pressure)],
            &[
                ("", "has no `some`"),
                (some, "has no `full`"),
                ("some avg10=1.50\n", "memory.pressure:1"),
                ("most avg10=0 avg60=0 avg300=0 total=0\n", "memory.pressure:1"),
                (&format!("{some}full avg10=0 avg60=0 avg300=0 total=x\n"), "memory.pressure:2"),
            ],
        );
    }

    #[test]
    fn reads_cpu_time() {
        check(
            "cpu.stat",
            cpu_time,
            &[("usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n", Duration::from_micros(1500))],
            &[("", "has no `usage_usec`"), ("user_usec 1\nusage_usec -5\n", "cpu.stat:2")],
        );
    }

    #[test]
    fn reads_numa_balancing() {
        let old = "anon 4096\nfile 0\n";
        let new = format!("{old}numa_pages_migrated 3\nnuma_pte_updates 1\nnuma_hint_faults 2\n");
        check(
            "memory.stat",
            numa_balancing,
            &[(old, None), (&new, Some(NumaBalancing { pte_updates: 1, pages_migrated: 3 }))],
            &[("", "has no `anon`"), ("anon 1\nfile -1\n", "memory.stat:2")],
        );
    }

    #[test]
    fn reads_populated() {
        check(
            "cgroup.events",
            populated,
            &[("populated 0\nfrozen 0\n", false), ("populated 1\nfrozen 0\n", true)],
            &[("frozen 0\n", "has no `populated`"), ("populated yes\n", "cgroup.events:1")],
        );
    }

    #[test]
    fn reads_charged_memory() {
        let corrupt = [("", "is not a number of bytes"), ("max\n", "current:1: \"max\"")];
        check("memory.current", memory_current, &[("4096\n", Bytes(4096))], &corrupt);
        let huge = |dir: &Path| hugetlb_current(dir, HugepageSize(Bytes::mib(2)));
        check("hugetlb.2MB.current", huge, &[("2097152\n", Bytes::mib(2))], &corrupt);
    }

    #[test]
    fn reads_processes() {
        let all = |dir: &Path| {
            let mut found = Vec::new();
            visit_processes(dir, |process| {
                found.push(process);
                true
            })?;
            Ok(found)
        };
        check(
            "cgroup.procs",
            all,
            &[("", vec![]), ("1\n0\n42\n", vec![1, 0, 42])],
            &[("1\nx\n", "cgroup.procs:2: \"x\" is not a process id")],
        );
    }

    #[test]
    fn reads_no_more_ids_than_needed() {
        // The malformed fourth line is only an error if it is read.
        let dir = cgroup("cgroup.threads", "7\n8\n9\nx\n");
        assert_eq!(threads(dir.path(), 3).unwrap(), [7, 8, 9]);
        assert!(threads(dir.path(), 4).unwrap_err().to_string().contains("cgroup.threads:4"));
    }

    /// Any user can have as many processes as the limits permit, and a pod up to millions.
    #[test]
    fn bounds_memory_for_many_processes() {
        const PROCESSES: usize = 2 << 20;
        const CEILING: u64 = 4 << 20;
        if !is_alone() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.procs"), "4194304\n".repeat(PROCESSES)).unwrap();
        reset_peak();
        let before = peak();
        assert_eq!(processes_below(dir.path(), 4096).ids.len(), 4096);
        let mut count = 0;
        visit_processes(dir.path(), |_| {
            count += 1;
            true
        })
        .unwrap();
        let most = peak();
        assert_eq!(count, PROCESSES);
        assert!(most < before + CEILING, "{} KiB became {} KiB", before >> 10, most >> 10);
    }
}
