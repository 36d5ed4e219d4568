//! Knobs: the files of a cgroup that hold its settings.
//!
//! A knob is opened without `create` and `truncate`: if it is missing, the error has the path and the data, and no
//! plain file is created. A value is written by a single write(2), which the kernel accepts or refuses as a whole.
//!
//! The kernel may store a value in another form than the written one: it sorts and merges lists, rounds limits down to
//! its granule and shows the highest limits as `max`. [`Knob::holds`] takes this into account.
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

/// A file of a cgroup that holds a setting. It is displayed as the name of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub enum Knob {
    /// `cpuset.cpus`: the requested CPUs; empty = those of the parent.
    #[display("cpuset.cpus")]
    CpusetCpus,
    /// `cpuset.cpus.effective`: the online CPUs that its tasks can use. Read-only.
    #[display("cpuset.cpus.effective")]
    CpusetCpusEffective,
    /// `cpuset.cpus.exclusive`: CPUs that may become a partition here or below (Linux 6.7).
    #[display("cpuset.cpus.exclusive")]
    CpusetCpusExclusive,
    /// `cpuset.cpus.partition`: the partition type, which makes the CPUs a separate scheduling domain.
    #[display("cpuset.cpus.partition")]
    CpusetPartition,
    /// `cpuset.mems`: the requested nodes; empty = those of the parent. A write moves pages.
    #[display("cpuset.mems")]
    CpusetMems,
    /// `cpuset.mems.effective`: the online nodes that its tasks can use. Read-only.
    #[display("cpuset.mems.effective")]
    CpusetMemsEffective,
    /// `memory.min`: memory that is never reclaimed. Limited by the values of all ancestors.
    #[display("memory.min")]
    MemoryMin,
    /// `memory.low`: memory that is reclaimed last. Limited by the values of all ancestors.
    #[display("memory.low")]
    MemoryLow,
    /// `memory.high`: the usage above which allocations are throttled and have to reclaim.
    #[display("memory.high")]
    MemoryHigh,
    /// `memory.max`: the usage above which the cgroup is out of memory.
    #[display("memory.max")]
    MemoryMax,
    /// `hugetlb.<size>.max`: the limit for huge pages of one size.
    #[display("hugetlb.{}.max", hugetlb_size(*_0))]
    HugetlbMax(HugepageSize),
    /// `cpu.max`: the CPU time per period.
    #[display("cpu.max")]
    CpuMax,
    /// `cgroup.subtree_control`: the controllers of the children. Written as `+name -name`.
    #[display("cgroup.subtree_control")]
    SubtreeControl,
    /// `cgroup.procs`: the processes in the cgroup itself. Writing a process id moves the process here.
    #[display("cgroup.procs")]
    Procs,
}

/// The value of a knob. It is displayed in the form that is written to the knob.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
pub enum KnobValue {
    /// The value of `cpuset.cpus` and similar knobs.
    Cpus(CpuSet),
    /// The value of `cpuset.mems` and similar knobs.
    Nodes(NodeSet),
    /// The value of `memory.*` and `hugetlb.*.max`.
    Limit(Limit),
    /// The value of `cpu.max`.
    Quota(Quota),
    /// The value of `cpuset.cpus.partition`.
    Partition(PartitionState),
    /// The value of `cgroup.subtree_control`.
    #[display("{}", join_items(_0, " "))]
    Controllers(BTreeSet<String>),
    /// The value of `cgroup.procs`: process ids in this PID namespace; 0 for processes of another one.
    #[display("{}", join_items(_0, "\n"))]
    Processes(Vec<u32>),
}

/// A limit or a protection in bytes. `Max` is greater than every number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
pub enum Limit {
    /// A number of bytes. `Bytes` would display it with a unit.
    #[display("{}", _0.0)]
    Bytes(Bytes),
    /// No limit; for a protection: all memory in use.
    #[display("max")]
    Max,
}

/// A limit of CPU time, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum Quota {
    /// No limit. The period stays unchanged.
    #[display("max")]
    Max,
    /// A limited time in each period.
    #[display("{quota} {period}")]
    Limited { quota: u64, period: u64 },
}

/// The requested type of a partition.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, derive_more::Display,
)]
#[serde(rename_all = "lowercase")]
#[display(rename_all = "lowercase")]
pub enum Partition {
    /// No partition: the CPUs are shared with the parent.
    Member,
    /// A separate scheduling domain.
    Root,
    /// A separate scheduling domain in which the scheduler does not balance load.
    Isolated,
}

/// The state in `cpuset.cpus.partition`: an impossible partition keeps its type and is marked as invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionState {
    /// The requested type.
    pub partition: Partition,
    /// The kernel's reason why the partition is not in force; may be empty. `None` if it is in force.
    pub invalid: Option<String>,
}

/// A knob cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum KnobError {
    /// The cgroup does not exist (any more).
    #[error("{path}: the cgroup is gone{}", data_note(.data.as_ref()), path = .path.display())]
    Gone {
        path: PathBuf,
        /// The data to be written; `None` for a read.
        data: Option<String>,
    },
    /// The cgroup exists, but the knob does not.
    #[error(
        "{path}: no such knob{}: its controller is not enabled in the parent's cgroup.subtree_control, \
         or this kernel does not have it",
        data_note(.data.as_ref()), path = .path.display()
    )]
    Missing {
        path: PathBuf,
        /// The data to be written; `None` for a read.
        data: Option<String>,
    },
    /// The kernel refused the read or write.
    #[error("{path}: {source}{}{}", data_note(.data.as_ref()), meaning_note(.meaning), path = .path.display())]
    Refused {
        path: PathBuf,
        /// The data to be written; `None` for a read.
        data: Option<String>,
        /// The meaning of the errno for this knob; may be empty.
        meaning: &'static str,
        source: io::Error,
    },
    /// The content is not a valid value of this knob.
    #[error("{path}: {text:?} is not {expected}", path = .path.display())]
    Malformed {
        path: PathBuf,
        /// The content.
        text: String,
        /// A description of valid values.
        expected: &'static str,
    },
}

fn data_note(data: Option<&String>) -> String {
    data.map_or_else(String::new, |data| format!(" (writing {data:?})"))
}

fn meaning_note(meaning: &str) -> String {
    if meaning.is_empty() { String::new() } else { format!(": {meaning}") }
}

impl KnobError {
    /// Returns true if the cgroup is gone, so that nothing remains to be done for it.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone { .. })
    }

    fn from_io(knob: Knob, dir: &Path, data: Option<&str>, source: io::Error) -> Self {
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

/// Returns the meaning of an errno when `data` is written to this knob, if it is known.
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
        // Every kernel knows this type. Kernels from 6.1 on accept the write and show in the file why the partition is
        // invalid.
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
    /// All knobs except those of huge pages, which have a size.
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

    /// Returns the knob's path in a cgroup's directory.
    pub fn path(self, dir: &Path) -> PathBuf {
        dir.join(self.to_string())
    }

    /// Returns the controller of the knob; `None` for knobs that every cgroup has.
    pub fn controller(self) -> Option<&'static str> {
        let name = self.to_string();
        let prefix = name.split('.').next();
        ["cpu", "cpuset", "memory", "hugetlb"].into_iter().find(|&controller| Some(controller) == prefix)
    }

    /// Reads the knob of the cgroup with this directory.
    pub fn read(self, dir: &Path) -> Result<KnobValue, KnobError> {
        let path = self.path(dir);
        let text =
            std::fs::read_to_string(&path).map_err(|error| KnobError::from_io(self, dir, None, error))?;
        self.parse(&text).map_err(|expected| KnobError::Malformed { path, text, expected })
    }

    /// Writes `data` to the knob of the cgroup with this directory, with a single write(2).
    pub fn write(self, dir: &Path, data: &str) -> Result<(), KnobError> {
        let fail = |error| KnobError::from_io(self, dir, Some(data), error);
        let mut file = OpenOptions::new().write(true).open(self.path(dir)).map_err(fail)?;
        let line = format!("{data}\n");
        match file.write(line.as_bytes()) {
            Ok(written) if written == line.len() => Ok(()),
            Ok(_) => Err(fail(io::ErrorKind::WriteZero.into())),
            Err(error) => Err(fail(error)),
        }
    }

    /// Parses the text of the knob. The error is a description of valid values.
    pub fn parse(self, text: &str) -> Result<KnobValue, &'static str> {
        // The kernel never writes more than one line, except for processes.
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

    /// Returns true if the read value `found` is equivalent to `wanted`: the same set, the same partition in force, the
    /// same limit after the kernel's rounding.
    pub fn holds(self, wanted: &KnobValue, found: &KnobValue, page_size: Bytes) -> bool {
        match (wanted, found) {
            (KnobValue::Limit(wanted), KnobValue::Limit(found)) => {
                let granule = self.granule(page_size);
                wanted.as_stored(granule) == found.as_stored(granule)
            }
            _ => wanted == found,
        }
    }

    /// Returns the granule to which the kernel rounds values of this knob down.
    fn granule(self, page_size: Bytes) -> Bytes {
        match self {
            Self::HugetlbMax(HugepageSize(size)) => size,
            _ => page_size,
        }
    }
}

/// Enables the missing controllers of `wanted` for the children of the cgroup with this directory.
///
/// Fails if the cgroup contains processes: the kernel would refuse `memory`, and `cpuset` would silently turn the
/// cgroup into a threaded domain.
pub fn enable_controllers(dir: &Path, wanted: &BTreeSet<&str>) -> Result<(), KnobError> {
    let KnobValue::Controllers(enabled) = Knob::SubtreeControl.read(dir)? else { return Ok(()) };
    let missing: Vec<_> =
        wanted.iter().filter(|name| !enabled.contains(**name)).map(|name| format!("+{name}")).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let data = missing.join(" ");
    // The root of the hierarchy is exempt from this rule and has no cgroup.type.
    if dir.join("cgroup.type").exists()
        && matches!(Knob::Procs.read(dir)?, KnobValue::Processes(processes) if !processes.is_empty())
    {
        return Err(KnobError::from_io(Knob::SubtreeControl, dir, Some(&data), Errno::BUSY.into()));
    }
    Knob::SubtreeControl.write(dir, &data)
}

/// Returns a size of huge pages as it appears in the names of knobs: `2MB`.
fn hugetlb_size(HugepageSize(Bytes(size)): HugepageSize) -> String {
    match size {
        _ if size >> 30 > 0 => format!("{}GB", size >> 30),
        _ if size >> 20 > 0 => format!("{}MB", size >> 20),
        _ => format!("{}KB", size >> 10),
    }
}

/// The name of a knob is unknown.
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
            // Each knob has one name: the kernel uses `1GB`, not `1024MB`.
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

fn join_items<T: ToString>(items: impl IntoIterator<Item = T>, separator: &str) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(separator)
}

impl Limit {
    /// Returns the limit as the kernel stores it: rounded down to the granule, and `max` if it exceeds the kernel's
    /// counters.
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

    /// Returns the sum, which is `max` if one of the two is.
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

/// An error in the text of a limit.
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

/// An error in the text of a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a number of microseconds or `max`, and a period")]
pub struct QuotaError;

impl FromStr for Quota {
    type Err = QuotaError;

    fn from_str(text: &str) -> Result<Self, QuotaError> {
        // The period of a new cgroup.
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

/// An error in the text of a partition state.
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
    fn names_match_files() {
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
    fn parses_values_of_the_kernel() {
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
            // No kernel has such names. The value is displayed as it was read.
            (Knob::SubtreeControl, "memory\u{b}\tcpuset\n", "cpuset memory"),
            (Knob::Procs, "12\n7\n", "12\n7"),
            (Knob::Procs, "", ""),
        ] {
            assert_eq!(knob.parse(text).unwrap().to_string(), printed, "{knob} {text:?}");
        }
    }

    #[test]
    fn refuses_malformed_values() {
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
    fn holds_accepts_kernel_rounding() {
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
    fn write_never_creates_a_file() {
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
    fn error_explains_errno() {
        let dir = Path::new("/sys/fs/cgroup/a");
        let error = |knob, errno: Errno| KnobError::from_io(knob, dir, Some("7"), errno.into()).to_string();
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
    fn enables_missing_controllers_only() {
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
