//! Readers of what a cgroup uses: memory by node, events, pressure, processes.
//!
//! Each takes the cgroup's directory ([`Hierarchy::dir`](crate::Hierarchy::dir)). Values that a kernel may not
//! have are optional; a missing file is [`ReadError::Absent`], a vanished cgroup [`ReadError::Gone`].
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst, Documentation/accounting/psi.rst.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_topology::{Bytes, HugepageSize, NodeId};

use crate::{gone::is_gone, knob::Knob};

/// A file of a cgroup cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The cgroup has vanished. That is the way of cgroups, and no reason for alarm.
    #[error("the cgroup {path} is gone", path = path.display())]
    Gone {
        /// The cgroup's directory.
        path: PathBuf,
    },
    /// The cgroup is there, the file is not, or this kernel refuses to fill it.
    #[error("{path} is not available: {reason}", path = path.display())]
    Absent {
        /// The file.
        path: PathBuf,
        /// Why that may be, and what to do.
        reason: &'static str,
    },
    /// The system refuses to read it.
    #[error("cannot read {path}: {source}", path = path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A line is not what the kernel documents.
    #[error("{path}:{line}: {content:?} is not {expected}", path = path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What it holds, shortened.
        content: String,
        /// What was expected.
        expected: &'static str,
    },
    /// A value that the kernel always has is missing.
    #[error("{path} has no `{key}`", path = path.display())]
    Incomplete {
        /// The file.
        path: PathBuf,
        /// The missing value's name.
        key: &'static str,
    },
}

impl ReadError {
    /// Whether the cgroup has vanished.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }

    /// Whether the cgroup is there but has no such file.
    pub fn is_absent(&self) -> bool {
        matches!(self, Self::Absent { .. })
    }
}

/// The text of a cgroup's file.
struct Text {
    path: PathBuf,
    text: String,
}

impl Text {
    fn read(dir: &Path, file: &str) -> Result<Self, ReadError> {
        let path = dir.join(file);
        match fs::read(&path) {
            // Every value is ASCII; anything else is told as malformed by who reads the line.
            Ok(bytes) => Ok(Self { path, text: String::from_utf8_lossy(&bytes).into_owned() }),
            Err(error) if is_gone(&error) => {
                if error.raw_os_error() == Some(libc::ENOENT) && dir.is_dir() {
                    let reason = match file.split_once('.') {
                        Some(("cgroup", _)) => "this kernel does not have it for this cgroup",
                        Some((_, "pressure")) => "this kernel has no pressure figures; boot with `psi=1`",
                        _ => {
                            "the root cgroup or this kernel does not have it, or its controller is not \
                             enabled in the parent's cgroup.subtree_control"
                        }
                    };
                    Err(ReadError::Absent { path, reason })
                } else {
                    Err(ReadError::Gone { path: dir.into() })
                }
            }
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                let reason = match file.split_once('.') {
                    Some((_, "pressure")) => "pressure figures are switched off; boot with `psi=1`",
                    _ => "it has none in a threaded cgroup; read those of its domain",
                };
                Err(ReadError::Absent { path, reason })
            }
            Err(source) => Err(ReadError::Unreadable { path, source }),
        }
    }

    fn lines(&self) -> impl Iterator<Item = (&str, usize)> {
        self.text.lines().zip(1..)
    }

    fn malformed(&self, line: usize, expected: &'static str) -> ReadError {
        let content = self.text.lines().nth(line - 1).unwrap_or_default().chars().take(120).collect();
        ReadError::Malformed { path: self.path.clone(), line, content, expected }
    }

    fn incomplete(&self, key: &'static str) -> ReadError {
        ReadError::Incomplete { path: self.path.clone(), key }
    }

    /// The values of a file of lines `KEY VALUE`.
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

/// The words of a one-line file.
pub(crate) fn read_words(dir: &Path, file: &str) -> Result<BTreeSet<String>, ReadError> {
    Ok(Text::read(dir, file)?.text.split_ascii_whitespace().map(str::to_owned).collect())
}

/// What a cgroup and all below it have in the memory of one node (`memory.numa_stat`).
///
/// Hugepages of pools are not in it. What a kernel does not report is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// Anonymous memory, transparent huge pages included.
    pub anon: Bytes,
    /// Page cache, tmpfs and shared memory included.
    pub file: Bytes,
    /// Kernel stacks.
    pub kernel_stack: Bytes,
    /// Page tables.
    pub pagetables: Bytes,
    /// Page tables of virtual machines and IOMMUs.
    pub sec_pagetables: Bytes,
    /// The part of `file` that is tmpfs and shared memory.
    pub shmem: Bytes,
    /// The part of `file` that is mapped.
    pub file_mapped: Bytes,
    /// The part of `file` that waits to be written.
    pub file_dirty: Bytes,
    /// The part of `file` that is being written.
    pub file_writeback: Bytes,
    /// The part of `anon` in transparent huge pages.
    pub anon_thp: Bytes,
    /// The part of `file` in transparent huge pages, without `shmem_thp`.
    pub file_thp: Bytes,
    /// The part of `shmem` in transparent huge pages.
    pub shmem_thp: Bytes,
    /// Memory that reclaim leaves alone.
    pub unevictable: Bytes,
    /// Slab memory that is given back under pressure.
    pub slab_reclaimable: Bytes,
    /// Slab memory that is not.
    pub slab_unreclaimable: Bytes,
}

impl NodeMemory {
    /// Memory of the kernel: stacks, page tables and slab. (The kernel has more that it does not tell by node.)
    pub fn kernel(&self) -> Bytes {
        let parts = [
            self.kernel_stack,
            self.pagetables,
            self.sec_pagetables,
            self.slab_reclaimable,
            self.slab_unreclaimable,
        ];
        Bytes(parts.iter().fold(0, |sum, part| part.0.saturating_add(sum)))
    }

    fn field(&mut self, name: &str) -> Option<&mut Bytes> {
        Some(match name {
            "anon" => &mut self.anon,
            "file" => &mut self.file,
            "kernel_stack" => &mut self.kernel_stack,
            "pagetables" => &mut self.pagetables,
            "sec_pagetables" => &mut self.sec_pagetables,
            "shmem" => &mut self.shmem,
            "file_mapped" => &mut self.file_mapped,
            "file_dirty" => &mut self.file_dirty,
            "file_writeback" => &mut self.file_writeback,
            "anon_thp" => &mut self.anon_thp,
            "file_thp" => &mut self.file_thp,
            "shmem_thp" => &mut self.shmem_thp,
            "unevictable" => &mut self.unevictable,
            "slab_reclaimable" => &mut self.slab_reclaimable,
            "slab_unreclaimable" => &mut self.slab_unreclaimable,
            _ => return None,
        })
    }
}

/// Reads `memory.numa_stat`: the memory of a cgroup and all below it, by node.
///
/// Costs the kernel some 50 µs a cgroup: read what is looked at, every few seconds.
pub fn memory_numa_stat(dir: &Path) -> Result<BTreeMap<NodeId, NodeMemory>, ReadError> {
    const EXPECTED: &str = "`TYPE N0=BYTES N1=BYTES …`";
    let text = Text::read(dir, "memory.numa_stat")?;
    let mut nodes: BTreeMap<NodeId, NodeMemory> = BTreeMap::new();
    let mut anon_seen = false;
    for (line, number) in text.lines() {
        let malformed = || text.malformed(number, EXPECTED);
        let (kind, values) = line.split_once(' ').ok_or_else(malformed)?;
        anon_seen |= kind == "anon";
        if NodeMemory::default().field(kind).is_none() {
            continue;
        }
        for value in values.split_ascii_whitespace() {
            let parsed = value.strip_prefix('N').and_then(|value| {
                let (node, bytes) = value.split_once('=')?;
                Some((NodeId(node.parse().ok()?), Bytes(bytes.parse().ok()?)))
            });
            let (node, bytes) = parsed.ok_or_else(malformed)?;
            if let Some(field) = nodes.entry(node).or_default().field(kind) {
                *field = bytes;
            }
        }
    }
    if !anon_seen {
        return Err(text.incomplete("anon"));
    }
    Ok(nodes)
}

/// Reads `hugetlb.<size>.numa_stat` (Linux 5.17): huge pages of a cgroup and all below it, in bytes by node.
pub fn hugetlb_numa_stat(dir: &Path, size: HugepageSize) -> Result<BTreeMap<NodeId, Bytes>, ReadError> {
    const EXPECTED: &str = "`hierarchical_total=BYTES N0=BYTES N1=BYTES …`";
    let limit = Knob::HugetlbMax(size).to_string();
    let text = Text::read(dir, &format!("{}.numa_stat", limit.trim_end_matches(".max")))?;
    let of_all = text.lines().find(|(line, _)| line.starts_with("hierarchical_total="));
    let Some((line, number)) = of_all else { return Err(text.incomplete("hierarchical_total")) };
    let parse = |value: &str| {
        let (node, bytes) = value.strip_prefix('N')?.split_once('=')?;
        Some((NodeId(node.parse().ok()?), Bytes(bytes.parse().ok()?)))
    };
    let values = line.split_ascii_whitespace().skip(1);
    values.map(|value| parse(value).ok_or_else(|| text.malformed(number, EXPECTED))).collect()
}

/// Reads `memory.current`: all memory charged to a cgroup and all below it. The root cgroup has none.
pub fn memory_current(dir: &Path) -> Result<Bytes, ReadError> {
    let text = Text::read(dir, "memory.current")?;
    text.text.trim().parse().map(Bytes).map_err(|_| text.malformed(1, "a number of bytes"))
}

/// How often a cgroup or one below it met its limits (`memory.events`). Counts since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEvents {
    /// Reclaimed although below its `memory.low`.
    pub low: u64,
    /// Throttled because above `memory.high`.
    pub high: u64,
    /// About to exceed `memory.max`.
    pub max: u64,
    /// An allocation was about to fail at the limit.
    pub oom: u64,
    /// Processes killed by any kind of OOM killer.
    pub oom_kill: u64,
    /// OOM kills of the whole group (Linux 5.17).
    pub oom_group_kill: Option<u64>,
}

/// Reads `memory.events`. The root cgroup has none.
pub fn memory_events(dir: &Path) -> Result<MemoryEvents, ReadError> {
    let text = Text::read(dir, "memory.events")?;
    let values = text.flat_keyed()?;
    let value = |key| values.get(key).copied().ok_or_else(|| text.incomplete(key));
    Ok(MemoryEvents {
        low: value("low")?,
        high: value("high")?,
        max: value("max")?,
        oom: value("oom")?,
        oom_kill: value("oom_kill")?,
        oom_group_kill: values.get("oom_group_kill").copied(),
    })
}

/// How long tasks of a cgroup waited for memory (`memory.pressure`).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// At least one task waited.
    pub some: Stall,
    /// All tasks that could have run waited.
    pub full: Stall,
}

/// One line of a pressure file.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stall {
    /// Share of the last 10 seconds, in percent.
    pub avg10_percent: f32,
    /// Share of the last minute, in percent.
    pub avg60_percent: f32,
    /// Share of the last five minutes, in percent.
    pub avg300_percent: f32,
    /// All time so far.
    pub total: Duration,
}

/// Reads `memory.pressure`. [`ReadError::Absent`] where the kernel has no PSI or it is switched off.
pub fn memory_pressure(dir: &Path) -> Result<Pressure, ReadError> {
    const EXPECTED: &str = "`some|full avg10=PERCENT avg60=PERCENT avg300=PERCENT total=MICROSECONDS`";
    let text = Text::read(dir, "memory.pressure")?;
    let (mut some, mut full) = (None, None);
    for (line, number) in text.lines() {
        let (kind, values) = line.split_once(' ').unwrap_or((line, ""));
        let value =
            |name: &str| values.split(' ').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        let percent = |name| value(name)?.parse().ok();
        let stall = || {
            Some(Stall {
                avg10_percent: percent("avg10")?,
                avg60_percent: percent("avg60")?,
                avg300_percent: percent("avg300")?,
                total: Duration::from_micros(value("total")?.parse().ok()?),
            })
        };
        let line = match kind {
            "some" => &mut some,
            "full" => &mut full,
            _ => return Err(text.malformed(number, EXPECTED)),
        };
        *line = Some(stall().ok_or_else(|| text.malformed(number, EXPECTED))?);
    }
    Ok(Pressure {
        some: some.ok_or_else(|| text.incomplete("some"))?,
        full: full.ok_or_else(|| text.incomplete("full"))?,
    })
}

/// The work of automatic NUMA balancing for a cgroup and all below it (`numa_*` of `memory.stat`), in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NumaBalancing {
    /// Pages made to fault, to sample who accesses them.
    pub pte_updates: u64,
    /// Such faults. Of a transparent huge page, one fault.
    pub hint_faults: u64,
    /// Pages moved to the node that accesses them.
    pub pages_migrated: u64,
}

/// Reads the `numa_*` lines of `memory.stat`; `None` where the kernel has none (before Linux 6.12).
pub fn numa_balancing(dir: &Path) -> Result<Option<NumaBalancing>, ReadError> {
    let text = Text::read(dir, "memory.stat")?;
    let values = text.flat_keyed()?;
    if !values.contains_key("anon") {
        return Err(text.incomplete("anon"));
    }
    let all = || {
        Some(NumaBalancing {
            pte_updates: *values.get("numa_pte_updates")?,
            hint_faults: *values.get("numa_hint_faults")?,
            pages_migrated: *values.get("numa_pages_migrated")?,
        })
    };
    Ok(all())
}

/// Reads `usage_usec` of `cpu.stat`: the CPU time of a cgroup and all below it. Every cgroup has it.
pub fn cpu_usage(dir: &Path) -> Result<Duration, ReadError> {
    let text = Text::read(dir, "cpu.stat")?;
    let usage = text.lines().find_map(|(line, number)| Some((line.strip_prefix("usage_usec ")?, number)));
    let Some((usage, number)) = usage else { return Err(text.incomplete("usage_usec")) };
    let micros = usage.trim().parse().map_err(|_| text.malformed(number, "a number of microseconds"))?;
    Ok(Duration::from_micros(micros))
}

/// Reads `populated` of `cgroup.events`: whether the cgroup or one below it has a process.
pub fn populated(dir: &Path) -> Result<bool, ReadError> {
    let text = Text::read(dir, "cgroup.events")?;
    let values = text.flat_keyed()?;
    values.get("populated").map(|&value| value != 0).ok_or_else(|| text.incomplete("populated"))
}

/// Reads `usage_usec` of `cpu.stat`: the CPU time of a cgroup and all that was ever below it. None was ever used where no
/// process has run yet.
pub fn cpu_time(dir: &Path) -> Result<Duration, ReadError> {
    let text = Text::read(dir, "cpu.stat")?;
    let values = text.flat_keyed()?;
    values.get("usage_usec").copied().map(Duration::from_micros).ok_or_else(|| text.incomplete("usage_usec"))
}

/// Reads `cgroup.procs`: the processes in the cgroup itself. 0 is one of another PID namespace.
pub fn processes(dir: &Path) -> Result<Vec<u32>, ReadError> {
    ids(dir, "cgroup.procs")
}

/// Reads `cgroup.threads`: the threads in the cgroup itself. 0 is one of another PID namespace.
pub fn threads(dir: &Path) -> Result<Vec<u32>, ReadError> {
    ids(dir, "cgroup.threads")
}

fn ids(dir: &Path, file: &str) -> Result<Vec<u32>, ReadError> {
    let text = Text::read(dir, file)?;
    text.lines()
        .map(|(line, number)| line.parse().map_err(|_| text.malformed(number, "a process id")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cgroup(file: &str, content: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(file), content).unwrap();
        dir
    }

    /// Reads good content, a missing file, a missing cgroup, and corrupt contents.
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
    fn huge_pages_are_told_by_node() {
        let size = HugepageSize(Bytes::mib(2));
        let dir = tempfile::tempdir().unwrap();
        let read = |text: &str| {
            fs::write(dir.path().join("hugetlb.2MB.numa_stat"), text).unwrap();
            hugetlb_numa_stat(dir.path(), size)
        };
        let found = read("total=0 N0=0 N1=0\nhierarchical_total=4194304 N0=0 N1=4194304\n").unwrap();
        assert_eq!(found, [(NodeId(0), Bytes(0)), (NodeId(1), Bytes::mib(4))].into());
        for (text, words) in [("", "hierarchical_total"), ("hierarchical_total=1 0=1\n", "numa_stat:1")] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text:?}: {error}");
        }
        fs::remove_file(dir.path().join("hugetlb.2MB.numa_stat")).unwrap();
        assert!(hugetlb_numa_stat(dir.path(), size).unwrap_err().is_absent());
    }

    #[test]
    fn memory_by_node() {
        let stat = "anon N0=4096 N2=8192\nfile N0=100 N2=0\nkernel_stack N0=1 N2=0\npagetables N0=2 N2=0\n\
                    sec_pagetables N0=3 N2=0\nshmem N0=50 N2=0\nfile_mapped N0=6 N2=0\nfile_dirty N0=7 N2=0\n\
                    file_writeback N0=8 N2=0\nswapcached N0=99 N2=0\nanon_thp N0=9 N2=0\nfile_thp N0=10 N2=0\n\
                    shmem_thp N0=11 N2=0\ninactive_anon N0=99 N2=0\nunevictable N0=12 N2=0\n\
                    slab_reclaimable N0=13 N2=0\nslab_unreclaimable N0=14 N2=0\nworkingset_refault_anon N0=9 N2=0\n";
        let node0 = NodeMemory {
            anon: Bytes(4096),
            file: Bytes(100),
            kernel_stack: Bytes(1),
            pagetables: Bytes(2),
            sec_pagetables: Bytes(3),
            shmem: Bytes(50),
            file_mapped: Bytes(6),
            file_dirty: Bytes(7),
            file_writeback: Bytes(8),
            anon_thp: Bytes(9),
            file_thp: Bytes(10),
            shmem_thp: Bytes(11),
            unevictable: Bytes(12),
            slab_reclaimable: Bytes(13),
            slab_unreclaimable: Bytes(14),
        };
        assert_eq!(node0.kernel(), Bytes(33));
        let node2 = NodeMemory { anon: Bytes(8192), ..NodeMemory::default() };
        let least = NodeMemory { anon: Bytes(1), ..NodeMemory::default() };
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
    fn current_memory() {
        check(
            "memory.current",
            memory_current,
            &[("12288\n", Bytes(12288))],
            &[("", "memory.current:1"), ("max\n", "\"max\" is not a number of bytes")],
        );
    }

    #[test]
    fn events_of_memory() {
        let old = "low 0\nhigh 274\nmax 3\noom 2\noom_kill 1\n";
        let new = format!("{old}oom_group_kill 4\nsock_throttled 0\n");
        let events = MemoryEvents { low: 0, high: 274, max: 3, oom: 2, oom_kill: 1, oom_group_kill: None };
        check(
            "memory.events",
            memory_events,
            &[(old, events), (&new, MemoryEvents { oom_group_kill: Some(4), ..events })],
            &[("", "has no `low`"), ("low 0\nhigh\n", "memory.events:2"), ("low x\n", "memory.events:1")],
        );
    }

    #[test]
    fn pressure_of_memory() {
        let pressure = Pressure {
            some: Stall {
                avg10_percent: 1.5,
                avg60_percent: 0.25,
                avg300_percent: 0.0,
                total: Duration::from_millis(7600),
            },
            full: Stall { total: Duration::from_micros(5), ..Stall::default() },
        };
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
                (&format!("{some}full avg10=x avg60=0 avg300=0 total=0\n"), "memory.pressure:2"),
            ],
        );
    }

    #[test]
    fn time_on_cpus() {
        check(
            "cpu.stat",
            cpu_usage,
            &[("usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n", Duration::from_micros(1500))],
            &[("", "has no `usage_usec`"), ("user_usec 1\nusage_usec -5\n", "cpu.stat:2")],
        );
    }

    #[test]
    fn numa_balancing_of_new_kernels() {
        let old = "anon 4096\nfile 0\n";
        let new = format!("{old}numa_pages_migrated 3\nnuma_pte_updates 1\nnuma_hint_faults 2\n");
        check(
            "memory.stat",
            numa_balancing,
            &[(old, None), (&new, Some(NumaBalancing { pte_updates: 1, hint_faults: 2, pages_migrated: 3 }))],
            &[("", "has no `anon`"), ("anon 1\nfile -1\n", "memory.stat:2")],
        );
    }

    #[test]
    fn populated_or_not() {
        check(
            "cgroup.events",
            populated,
            &[("populated 0\nfrozen 0\n", false), ("populated 1\nfrozen 0\n", true)],
            &[("frozen 0\n", "has no `populated`"), ("populated yes\n", "cgroup.events:1")],
        );
    }

    #[test]
    fn cpu_time_of_a_cgroup() {
        check(
            "cpu.stat",
            cpu_time,
            &[("usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n", Duration::from_micros(1500))],
            &[("user_usec 1\n", "has no `usage_usec`"), ("usage_usec -1\n", "cpu.stat:1")],
        );
    }

    #[test]
    fn processes_of_a_cgroup() {
        check(
            "cgroup.procs",
            processes,
            &[("", vec![]), ("1\n0\n42\n", vec![1, 0, 42])],
            &[("1\nx\n", "cgroup.procs:2: \"x\" is not a process id")],
        );
    }

    #[test]
    fn controllers_are_words() {
        let dir = cgroup("cgroup.controllers", "cpuset cpu memory\n");
        let words = read_words(dir.path(), "cgroup.controllers").unwrap();
        assert_eq!(words.into_iter().collect::<Vec<_>>(), ["cpu", "cpuset", "memory"]);
        assert!(read_words(&dir.path().join("gone"), "cgroup.controllers").unwrap_err().is_gone());
    }
}
