//! Knobs: the files of a cgroup that hold a setting, what they mean, and how they are written.
//!
//! A knob is opened without `create` and without `truncate`: a missing one is an error that names the
//! path and the data, never a new plain file. A value goes out in one write(2), which the kernel takes or
//! refuses as a whole.
//!
//! What is read back is not always what was written: the kernel sorts and merges lists, rounds limits down
//! to its granule and prints the highest of them as `max`. [`Knob::holds`] knows this.
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst.

use std::{
    collections::BTreeSet,
    fmt,
    fs::OpenOptions,
    io::{self, Write as _},
    path::{Path, PathBuf},
    str::FromStr,
};

use numaward_topology::{Bytes, CpuSet, HugepageSize, NodeSet, serde_as_text};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// A file of a cgroup that holds a setting. Printed as the name of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub enum Knob {
    /// `cpuset.cpus`: the CPUs asked for; empty = those of the parent.
    #[display("cpuset.cpus")]
    CpusetCpus,
    /// `cpuset.cpus.effective`: the online CPUs that its tasks may really use. Read-only.
    #[display("cpuset.cpus.effective")]
    CpusetCpusEffective,
    /// `cpuset.cpus.exclusive`: CPUs that may become a partition here or below (Linux 6.7).
    #[display("cpuset.cpus.exclusive")]
    CpusetCpusExclusive,
    /// `cpuset.cpus.partition`: whether the CPUs are a scheduling domain of their own.
    #[display("cpuset.cpus.partition")]
    CpusetPartition,
    /// `cpuset.mems`: the nodes asked for; empty = those of the parent. A write moves pages.
    #[display("cpuset.mems")]
    CpusetMems,
    /// `cpuset.mems.effective`: the online nodes that its tasks may really use. Read-only.
    #[display("cpuset.mems.effective")]
    CpusetMemsEffective,
    /// `memory.min`: memory that is never reclaimed. Bounded by every ancestor's.
    #[display("memory.min")]
    MemoryMin,
    /// `memory.low`: memory that is reclaimed last. Bounded by every ancestor's.
    #[display("memory.low")]
    MemoryLow,
    /// `memory.high`: above it, allocations are throttled and reclaim.
    #[display("memory.high")]
    MemoryHigh,
    /// `memory.max`: above it, the cgroup is out of memory.
    #[display("memory.max")]
    MemoryMax,
    /// `hugetlb.<size>.max`: huge pages of one size that may be in use.
    #[display("hugetlb.{}.max", hugetlb_size(*_0))]
    HugetlbMax(HugepageSize),
    /// `cpu.max`: the CPU time that may be used in each period.
    #[display("cpu.max")]
    CpuMax,
    /// `cgroup.subtree_control`: the controllers of the children. Written as `+name -name`.
    #[display("cgroup.subtree_control")]
    SubtreeControl,
    /// `cgroup.procs`: the processes in the cgroup itself. A written one moves here.
    #[display("cgroup.procs")]
    Procs,
}

/// The value of a knob. Printed as it is written to the knob.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub enum KnobValue {
    /// Of `cpuset.cpus` and its kin.
    Cpus(CpuSet),
    /// Of `cpuset.mems` and its kin.
    Nodes(NodeSet),
    /// Of `memory.*` and `hugetlb.*.max`.
    Limit(Limit),
    /// Of `cpu.max`.
    Quota(Quota),
    /// Of `cpuset.cpus.partition`.
    Partition(PartitionState),
    /// Of `cgroup.subtree_control`.
    #[display("{}", joined(_0, " "))]
    Controllers(BTreeSet<String>),
    /// Of `cgroup.procs`: process ids as seen from here; 0 for those of another PID namespace.
    #[display("{}", joined(_0, "\n"))]
    Processes(Vec<u32>),
}

/// A limit or a protection in bytes. `max` is above every number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub enum Limit {
    /// So many bytes.
    // Not through `Bytes`, which prints units.
    #[display("{}", _0.0)]
    Bytes(Bytes),
    /// No limit; for a protection: all that is in use.
    #[display("max")]
    Max,
}

/// CPU time, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum Quota {
    /// No limit. The period stays as it is.
    #[display("max")]
    Max,
    /// So much of each period.
    #[display("{quota} {period}")]
    Limited {
        /// The time.
        quota: u64,
        /// The period.
        period: u64,
    },
}

/// What `cpuset.cpus.partition` is asked to be.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, derive_more::Display,
)]
#[serde(rename_all = "lowercase")]
#[display(rename_all = "lowercase")]
pub enum Partition {
    /// No partition: the CPUs are shared with the parent's.
    Member,
    /// A scheduling domain of its own.
    Root,
    /// The same, and the scheduler does not balance load among its CPUs.
    Isolated,
}

/// What `cpuset.cpus.partition` says: a partition that is not possible keeps its name and is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionState {
    /// What was asked for.
    pub partition: Partition,
    /// Why it is not in force. The kernel's words; may be empty.
    pub invalid: Option<String>,
}

/// A knob could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KnobError {
    /// The cgroup itself is not there (any more).
    #[error("{path}: the cgroup is gone{}", writing(.data.as_ref()), path = .path.display())]
    Gone {
        /// The knob's file.
        path: PathBuf,
        /// What was to be written; `None` when reading.
        data: Option<String>,
    },
    /// The cgroup is there, the knob is not.
    #[error(
        "{path}: no such knob{}: its controller is not enabled in the parent's cgroup.subtree_control, \
         or this kernel does not have it",
        writing(.data.as_ref()), path = .path.display()
    )]
    Missing {
        /// The knob's file.
        path: PathBuf,
        /// What was to be written; `None` when reading.
        data: Option<String>,
    },
    /// The kernel refused.
    #[error("{path}: {source}{}{}", writing(.data.as_ref()), explained(.meaning), path = .path.display())]
    Refused {
        /// The knob's file.
        path: PathBuf,
        /// What was to be written; `None` when reading.
        data: Option<String>,
        /// What the errno means for this knob; may be empty.
        meaning: &'static str,
        /// The errno.
        source: io::Error,
    },
    /// What was read is no value of this knob.
    #[error("{path}: {text:?} is not {expected}", path = .path.display())]
    Malformed {
        /// The knob's file.
        path: PathBuf,
        /// What it holds.
        text: String,
        /// What a value of this knob is.
        expected: &'static str,
    },
}

fn writing(data: Option<&String>) -> String {
    data.map_or_else(String::new, |data| format!(" (writing {data:?})"))
}

fn explained(meaning: &str) -> String {
    if meaning.is_empty() { String::new() } else { format!(": {meaning}") }
}

impl KnobError {
    /// Whether the cgroup is gone, so that nothing is left to do for it.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }

    fn of(knob: Knob, dir: &Path, data: Option<&str>, source: io::Error) -> Self {
        let path = knob.path(dir);
        let meaning = |errno| meaning(knob, data, errno);
        let data = data.map(str::to_owned);
        match Errno::from_io_error(&source) {
            Some(Errno::NOENT) if dir.is_dir() => Self::Missing { path, data },
            Some(Errno::NODEV | Errno::NOENT | Errno::NOTDIR) => Self::Gone { path, data },
            errno => Self::Refused { path, meaning: meaning(errno), data, source },
        }
    }
}

/// What an errno means when this is written to this knob, where that is known.
fn meaning(knob: Knob, data: Option<&str>, errno: Option<Errno>) -> &'static str {
    use Knob::{
        CpuMax, CpusetCpus, CpusetCpusExclusive, CpusetMems, CpusetPartition, HugetlbMax, MemoryHigh,
        MemoryLow, MemoryMax, MemoryMin, Procs, SubtreeControl,
    };
    match (errno, knob) {
        (Some(Errno::ACCESS | Errno::PERM), _) => "this process may not write here; run as root",
        (Some(Errno::ROFS), _) => "the cgroup file system is mounted read-only",
        (Some(Errno::BUSY), SubtreeControl) => {
            "the cgroup holds processes itself, or a child still needs the controller"
        }
        (Some(Errno::BUSY), Procs) => {
            "the cgroup has controllers enabled for children, so it may not hold processes"
        }
        (Some(Errno::BUSY), CpusetCpus | CpusetCpusExclusive | CpusetPartition | CpusetMems) => {
            "its deadline tasks need more CPU time than these CPUs have"
        }
        (Some(Errno::INVAL | Errno::RANGE), CpusetCpus) => {
            "a CPU that this machine does not have, or one that is exclusive to another cgroup"
        }
        (Some(Errno::INVAL | Errno::RANGE), CpusetCpusExclusive) => {
            "a CPU that this machine does not have, or one that a sibling has exclusively"
        }
        (Some(Errno::INVAL | Errno::RANGE), CpusetMems) => {
            "a node that this machine does not have or that has no memory"
        }
        // Every kernel knows that kind. Those from 6.1 on take the write, and say in the file why it is invalid.
        (Some(Errno::INVAL), CpusetPartition) if data == Some("root") => {
            "some of its CPUs are not available, or none would remain outside"
        }
        (Some(Errno::INVAL), CpusetPartition) => "not a kind of partition that this kernel knows",
        (Some(Errno::INVAL), MemoryMin | MemoryLow | MemoryHigh | MemoryMax | HugetlbMax(_)) => {
            "not a number of bytes"
        }
        (Some(Errno::INVAL | Errno::RANGE), CpuMax) => "a quota or a period that the kernel does not allow",
        (Some(Errno::INVAL), SubtreeControl) => "a controller that this kernel does not have",
        (Some(Errno::NOSPC), _) => "the set would be empty while tasks need it",
        (Some(Errno::OPNOTSUPP), _) => "the cgroup is threaded, or would become the child of a threaded one",
        (Some(Errno::SRCH), Procs) => "no such process",
        _ => "",
    }
}

impl Knob {
    /// All but those of huge pages, which have a size.
    pub const PLAIN: [Self; 13] = [
        Self::CpusetCpus,
        Self::CpusetCpusEffective,
        Self::CpusetCpusExclusive,
        Self::CpusetPartition,
        Self::CpusetMems,
        Self::CpusetMemsEffective,
        Self::MemoryMin,
        Self::MemoryLow,
        Self::MemoryHigh,
        Self::MemoryMax,
        Self::CpuMax,
        Self::SubtreeControl,
        Self::Procs,
    ];

    /// The knob's file in a cgroup's directory.
    pub fn path(self, dir: &Path) -> PathBuf {
        dir.join(self.to_string())
    }

    /// The controller that provides the knob; `None` for those that every cgroup has.
    pub fn controller(self) -> Option<&'static str> {
        let name = self.to_string();
        let prefix = name.split('.').next();
        ["cpu", "cpuset", "memory", "hugetlb"].into_iter().find(|&controller| Some(controller) == prefix)
    }

    /// Reads the knob of the cgroup with this directory.
    pub fn read(self, dir: &Path) -> Result<KnobValue, KnobError> {
        let path = self.path(dir);
        let text = std::fs::read_to_string(&path).map_err(|error| KnobError::of(self, dir, None, error))?;
        self.parse(&text).map_err(|expected| KnobError::Malformed { path, text, expected })
    }

    /// Writes `data` to the knob of the cgroup with this directory, in one write(2).
    pub fn write(self, dir: &Path, data: &str) -> Result<(), KnobError> {
        let fail = |error| KnobError::of(self, dir, Some(data), error);
        let mut file = OpenOptions::new().write(true).open(self.path(dir)).map_err(fail)?;
        let line = format!("{data}\n");
        match file.write(line.as_bytes()) {
            Ok(written) if written == line.len() => Ok(()),
            Ok(_) => Err(fail(io::ErrorKind::WriteZero.into())),
            Err(error) => Err(fail(error)),
        }
    }

    /// Reads the text of the knob. The error says what was expected.
    pub fn parse(self, text: &str) -> Result<KnobValue, &'static str> {
        // One line, but for the processes: the kernel never writes more.
        let line = text.lines().next().unwrap_or_default().trim();
        match self {
            Self::CpusetCpus | Self::CpusetCpusEffective | Self::CpusetCpusExclusive => {
                line.parse().map(KnobValue::Cpus).map_err(|_| "a CPU list such as `0-3,8`")
            }
            Self::CpusetMems | Self::CpusetMemsEffective => {
                line.parse().map(KnobValue::Nodes).map_err(|_| "a node list such as `0-1`")
            }
            Self::MemoryMin | Self::MemoryLow | Self::MemoryHigh | Self::MemoryMax | Self::HugetlbMax(_) => {
                line.parse().map(KnobValue::Limit).map_err(|LimitError| "a number of bytes or `max`")
            }
            Self::CpuMax => line.parse().map(KnobValue::Quota).map_err(|QuotaError| "such as `max 100000`"),
            Self::CpusetPartition => line
                .parse()
                .map(KnobValue::Partition)
                .map_err(|PartitionError| "`member`, `root`, `isolated` or one of them with `invalid`"),
            Self::SubtreeControl => {
                Ok(KnobValue::Controllers(line.split_whitespace().map(str::to_owned).collect()))
            }
            Self::Procs => text
                .lines()
                .map(str::parse)
                .collect::<Result<_, _>>()
                .map(KnobValue::Processes)
                .map_err(|_| "process ids, one a line"),
        }
    }

    /// Whether a knob that says `found` holds `wanted`: the same set, the same partition in force, the
    /// same limit as the kernel rounds it.
    pub fn holds(self, wanted: &KnobValue, found: &KnobValue, page_size: Bytes) -> bool {
        match (wanted, found) {
            (KnobValue::Limit(wanted), KnobValue::Limit(found)) => {
                let granule = self.granule(page_size);
                wanted.as_stored(granule) == found.as_stored(granule)
            }
            _ => wanted == found,
        }
    }

    /// What the kernel rounds values of this knob down to.
    fn granule(self, page_size: Bytes) -> Bytes {
        match self {
            Self::HugetlbMax(HugepageSize(size)) => size,
            _ => page_size,
        }
    }
}

/// Enables these controllers for the children of the cgroup with this directory, where they are not yet.
///
/// Refused where the cgroup holds processes: the kernel would refuse `memory`, and for `cpuset` it would
/// silently turn the cgroup into a threaded domain.
pub fn enable_controllers(dir: &Path, wanted: &BTreeSet<&str>) -> Result<(), KnobError> {
    let KnobValue::Controllers(enabled) = Knob::SubtreeControl.read(dir)? else { return Ok(()) };
    let missing: Vec<_> =
        wanted.iter().filter(|name| !enabled.contains(**name)).map(|name| format!("+{name}")).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let data = missing.join(" ");
    // The root of the hierarchy has no such rule, and no cgroup.type either.
    if dir.join("cgroup.type").exists()
        && matches!(Knob::Procs.read(dir)?, KnobValue::Processes(processes) if !processes.is_empty())
    {
        return Err(KnobError::of(Knob::SubtreeControl, dir, Some(&data), Errno::BUSY.into()));
    }
    Knob::SubtreeControl.write(dir, &data)
}

/// A size of huge pages as the kernel spells it in the names of knobs: `2MB`.
fn hugetlb_size(HugepageSize(Bytes(size)): HugepageSize) -> String {
    match size {
        _ if size >> 30 > 0 => format!("{}GB", size >> 30),
        _ if size >> 20 > 0 => format!("{}MB", size >> 20),
        _ => format!("{}KB", size >> 10),
    }
}

/// A text names no knob that is known here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a knob (expected a name such as `cpuset.cpus`, `memory.min` or `hugetlb.2MB.max`)")]
pub struct KnobNameError(pub String);

impl FromStr for Knob {
    type Err = KnobNameError;

    fn from_str(name: &str) -> Result<Self, KnobNameError> {
        let hugetlb = || {
            let size = name.strip_prefix("hugetlb.")?.strip_suffix(".max")?;
            let (count, unit) = size.split_at_checked(size.len().checked_sub(2)?)?;
            let shift = match unit {
                "KB" => 10,
                "MB" => 20,
                "GB" => 30,
                _ => return None,
            };
            let count: u64 = count.parse().ok().filter(|&count| count > 0)?;
            let knob = Self::HugetlbMax(HugepageSize(Bytes(count.checked_mul(1 << shift)?)));
            // One name a knob: `1024MB` is not how the kernel spells `1GB`.
            (knob.to_string() == name).then_some(knob)
        };
        Self::PLAIN
            .into_iter()
            .find(|knob| knob.to_string() == name)
            .or_else(hugetlb)
            .ok_or_else(|| KnobNameError(name.to_owned()))
    }
}

serde_as_text!(Knob);

fn joined<T: ToString>(items: impl IntoIterator<Item = T>, separator: &str) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(separator)
}

impl Limit {
    /// The limit as the kernel keeps it: rounded down to the granule; what its counters cannot hold is `max`.
    #[must_use]
    pub fn as_stored(self, granule: Bytes) -> Self {
        // The kernel counts pages in a signed long: `PAGE_COUNTER_MAX`.
        const HIGHEST: u64 = i64::MAX.cast_unsigned();
        let down = |bytes: u64| bytes - bytes.checked_rem(granule.0).unwrap_or(0);
        match self {
            Self::Bytes(Bytes(bytes)) if down(bytes) < down(HIGHEST) => Self::Bytes(Bytes(down(bytes))),
            _ => Self::Max,
        }
    }

    /// The sum; `max` absorbs.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        match (self, other) {
            (Self::Bytes(a), Self::Bytes(b)) => {
                a.0.checked_add(b.0).map_or(Self::Max, |sum| Self::Bytes(Bytes(sum)))
            }
            _ => Self::Max,
        }
    }
}

/// A text is no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a number of bytes or `max`")]
pub struct LimitError;

impl FromStr for Limit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        match text {
            "max" => Ok(Self::Max),
            _ if text.starts_with(|c: char| c.is_ascii_digit()) => {
                text.parse().map(|bytes| Self::Bytes(Bytes(bytes))).map_err(|_| LimitError)
            }
            _ => Err(LimitError),
        }
    }
}

/// A text is no quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a number of microseconds or `max`, and a period")]
pub struct QuotaError;

impl FromStr for Quota {
    type Err = QuotaError;

    fn from_str(text: &str) -> Result<Self, QuotaError> {
        // A new cgroup has this period.
        let (quota, period) = text.split_once(' ').unwrap_or((text, "100000"));
        let number = |text: &str| text.parse().map_err(|_| QuotaError);
        let period = number(period)?;
        Ok(if quota == "max" { Self::Max } else { Self::Limited { quota: number(quota)?, period } })
    }
}

impl From<Partition> for PartitionState {
    fn from(partition: Partition) -> Self {
        Self { partition, invalid: None }
    }
}

impl fmt::Display for PartitionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.invalid {
            None => self.partition.fmt(f),
            Some(reason) if reason.is_empty() => write!(f, "{} invalid", self.partition),
            Some(reason) => write!(f, "{} invalid ({reason})", self.partition),
        }
    }
}

/// A text is no state of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected `member`, `root`, `isolated` or one of them with `invalid`")]
pub struct PartitionError;

impl FromStr for PartitionState {
    type Err = PartitionError;

    fn from_str(text: &str) -> Result<Self, PartitionError> {
        let (word, rest) = text.split_once(' ').unwrap_or((text, ""));
        let partition = [Partition::Member, Partition::Root, Partition::Isolated]
            .into_iter()
            .find(|partition| partition.to_string() == word)
            .ok_or(PartitionError)?;
        let invalid = match rest.strip_prefix("invalid") {
            Some(reason) => {
                let reason = reason.trim();
                Some(reason.strip_prefix('(').and_then(|r| r.strip_suffix(')')).unwrap_or(reason).to_owned())
            }
            None if rest.is_empty() => None,
            None => return Err(PartitionError),
        };
        Ok(Self { partition, invalid })
    }
}

serde_as_text!(Limit);
serde_as_text!(PartitionState);

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: Bytes = Bytes::kib(4);
    const HUGE: Knob = Knob::HugetlbMax(HugepageSize(Bytes::mib(2)));

    #[test]
    fn names_are_those_of_the_files() {
        for name in [
            "cpuset.cpus",
            "cpuset.cpus.effective",
            "cpuset.cpus.exclusive",
            "cpuset.cpus.partition",
            "cpuset.mems",
            "cpuset.mems.effective",
            "memory.min",
            "memory.low",
            "memory.high",
            "memory.max",
            "hugetlb.64KB.max",
            "hugetlb.2MB.max",
            "hugetlb.1GB.max",
            "cpu.max",
            "cgroup.subtree_control",
            "cgroup.procs",
        ] {
            let knob: Knob = name.parse().unwrap();
            assert_eq!(knob.to_string(), name);
            assert_eq!(serde_json::to_string(&knob).unwrap(), format!("{name:?}"));
        }
        for name in [
            "",
            "cpuset",
            "hugetlb.max",
            "hugetlb.1024MB.max",
            "hugetlb.0MB.max",
            "hugetlb.é.max",
            "hugetlb.2MB.rsvd.max",
        ] {
            assert!(name.parse::<Knob>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn values_read_as_the_kernel_writes_them() {
        for (knob, text, printed) in [
            (Knob::CpusetCpus, "\n", ""),
            (Knob::CpusetCpus, "0-3,8\n", "0-3,8"),
            (Knob::CpusetMems, "1\n", "1"),
            (Knob::MemoryMin, "0\n", "0"),
            (Knob::MemoryHigh, "max\n", "max"),
            (HUGE, "2097152\n", "2097152"),
            (Knob::CpusetPartition, "member\n", "member"),
            (Knob::CpusetPartition, "isolated\n", "isolated"),
            (Knob::CpusetPartition, "root invalid\n", "root invalid"),
            (
                Knob::CpusetPartition,
                "root invalid (Parent is not a partition root)\n",
                "root invalid (Parent is not a partition root)",
            ),
            (Knob::SubtreeControl, "memory cpuset\n", "cpuset memory"),
            (Knob::SubtreeControl, "\n", ""),
            // No kernel has such names. What is read is printed as it is read.
            (Knob::SubtreeControl, "memory\u{b}\tcpuset\n", "cpuset memory"),
            (Knob::Procs, "12\n7\n", "12\n7"),
            (Knob::Procs, "", ""),
        ] {
            assert_eq!(knob.parse(text).unwrap().to_string(), printed, "{knob} {text:?}");
        }
    }

    #[test]
    fn what_is_no_value_is_refused() {
        for (knob, text) in [
            (Knob::CpusetCpus, "a"),
            (Knob::CpusetMems, "1-0"),
            (Knob::MemoryMin, ""),
            (Knob::MemoryMin, "-1"),
            (Knob::MemoryMin, "+1"),
            (Knob::MemoryMin, "5M"),
            (HUGE, "99999999999999999999"),
            (Knob::CpusetPartition, ""),
            (Knob::CpusetPartition, "root but not really"),
            (Knob::Procs, "1 2"),
        ] {
            assert!(knob.parse(text).is_err(), "{knob} {text:?}");
        }
    }

    #[test]
    fn a_knob_holds_what_the_kernel_makes_of_it() {
        let limit = |text: &str| KnobValue::Limit(text.parse().unwrap());
        for (knob, wanted, found, holds) in [
            (Knob::MemoryMin, "5000", "4096", true),
            (Knob::MemoryMin, "4096", "8192", false),
            (Knob::MemoryMin, "4095", "0", true),
            (Knob::MemoryMax, "9223372036854775807", "max", true),
            (Knob::MemoryMax, "18446744073709551615", "max", true),
            (Knob::MemoryMax, "max", "max", true),
            (Knob::MemoryMax, "max", "9223372036854767616", false),
            (Knob::MemoryMax, "4096", "max", false),
            (HUGE, "3000000", "2097152", true),
            (HUGE, "4194304", "2097152", false),
        ] {
            assert_eq!(knob.holds(&limit(wanted), &limit(found), PAGE), holds, "{knob} {wanted} {found}");
        }
        let cpus = |text: &str| KnobValue::Cpus(text.parse().unwrap());
        assert!(Knob::CpusetCpus.holds(&cpus("0,1,2"), &cpus("0-2"), PAGE));
        assert!(!Knob::CpusetCpus.holds(&cpus("0-2"), &cpus(""), PAGE));
        let partition = |text: &str| KnobValue::Partition(text.parse().unwrap());
        assert!(!Knob::CpusetPartition.holds(&partition("root"), &partition("root invalid (x)"), PAGE));
    }

    #[test]
    fn a_write_neither_creates_nor_outlives_the_cgroup() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a");
        std::fs::create_dir(&dir).unwrap();

        let error = Knob::CpusetCpus.write(&dir, "0-1").unwrap_err();
        assert!(matches!(error, KnobError::Missing { .. }));
        assert!(error.to_string().contains("a/cpuset.cpus: no such knob (writing \"0-1\")"), "{error}");
        assert!(!Knob::CpusetCpus.path(&dir).exists());

        std::fs::write(dir.join("cpuset.cpus"), "0-15\n").unwrap();
        Knob::CpusetCpus.write(&dir, "1").unwrap();
        assert_eq!(Knob::CpusetCpus.read(&dir).unwrap().to_string(), "1");

        std::fs::remove_dir_all(&dir).unwrap();
        assert!(Knob::CpusetCpus.write(&dir, "1").unwrap_err().is_gone());
        assert!(Knob::CpusetCpus.read(&dir).unwrap_err().is_gone());
    }

    #[test]
    fn errors_say_what_the_errno_means() {
        let dir = Path::new("/sys/fs/cgroup/a");
        let error = |knob, errno: Errno| KnobError::of(knob, dir, Some("7"), errno.into()).to_string();
        assert!(error(Knob::CpusetMems, Errno::NODEV).contains("the cgroup is gone (writing \"7\")"));
        for (knob, errno, words) in [
            (Knob::CpusetCpus, Errno::INVAL, "does not have"),
            (Knob::CpusetCpus, Errno::RANGE, "does not have"),
            (Knob::CpusetMems, Errno::INVAL, "has no memory"),
            (Knob::CpusetCpus, Errno::BUSY, "deadline"),
            (Knob::CpusetCpus, Errno::NOSPC, "empty"),
            (Knob::MemoryMin, Errno::ACCESS, "run as root"),
            (Knob::SubtreeControl, Errno::BUSY, "holds processes itself"),
            (Knob::Procs, Errno::BUSY, "enabled for children"),
        ] {
            let text = error(knob, errno);
            assert!(text.starts_with(&format!("/sys/fs/cgroup/a/{knob}: ")), "{text}");
            assert!(text.contains("(writing \"7\")") && text.contains(words), "{text}");
        }
    }

    #[test]
    fn controllers_are_enabled_once_and_never_beside_processes() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path();
        let control = || std::fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap();
        std::fs::write(dir.join("cgroup.subtree_control"), "memory\n").unwrap();
        std::fs::write(dir.join("cgroup.type"), "domain\n").unwrap();
        std::fs::write(dir.join("cgroup.procs"), "12\n").unwrap();

        enable_controllers(dir, &["memory"].into()).unwrap();
        let error = enable_controllers(dir, &["cpuset", "memory"].into()).unwrap_err().to_string();
        assert!(error.contains("\"+cpuset\"") && error.contains("holds processes itself"), "{error}");
        assert_eq!(control(), "memory\n");

        std::fs::write(dir.join("cgroup.procs"), "").unwrap();
        enable_controllers(dir, &["cpuset", "memory"].into()).unwrap();
        assert_eq!(control().lines().next(), Some("+cpuset"));
    }
}
