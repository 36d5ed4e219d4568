//! Access to the files of resctrl.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, BufReader, Write as _},
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_cgroup::{TruncatedLines, read};
use rustix::io::Errno;

use super::schemata::{
    BANDWIDTH, Bandwidth, Caches, GroupTarget, Info, Monitoring, Schemata, WayMasks, line,
};

/// `RDTGROUP_SUPER_MAGIC` of linux/magic.h.
const MAGIC: u64 = 0x0765_5821;
/// File that marks a fake for tests. The kernel's file system does not have it.
pub const FAKE_MARKER: &str = "MADE-UP";
/// Prefix of the names of the daemon's groups.
pub(super) const PREFIX: &str = "numaward-";
/// Directories in the root that are not groups.
const NO_GROUPS: [&str; 3] = ["info", "mon_groups", "mon_data"];
/// Maximum number of threads of a workload in a group.
const MAX_THREADS: usize = 1 << 18;
/// Maximum number of cgroups of a workload that are read.
const MAX_CGROUPS: usize = 1 << 16;
/// Time for which the cgroups of a workload are read.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Operations on the file system. The fake for tests imitates the kernel's reaction to them.
pub trait ResctrlKernel: fmt::Debug + Send + Sync {
    /// Creates a group.
    fn make(&self, dir: &Path) -> io::Result<()>;
    /// Removes a group.
    fn remove(&self, dir: &Path) -> io::Result<()>;
    /// Writes an existing file in one call.
    fn write(&self, file: &Path, text: &str) -> io::Result<()>;
}

/// The kernel of this host.
#[derive(Clone, Copy, Debug)]
pub struct HostKernel;

impl ResctrlKernel for HostKernel {
    fn make(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        fs::remove_dir(dir)
    }

    fn write(&self, file: &Path, text: &str) -> io::Result<()> {
        OpenOptions::new().write(true).open(file)?.write_all(text.as_bytes())
    }
}

/// Error of an access to resctrl.
#[derive(Debug, thiserror::Error)]
pub enum ResctrlError {
    /// The file system is not mounted.
    #[error(
        "resctrl is not mounted at {path} (where processor and kernel have it: mount -t resctrl resctrl {path})",
        path = .0.display()
    )]
    NotMounted(PathBuf),
    /// The kernel refuses, or the daemon has no permission.
    #[error("{}: {source}{}", .path.display(), status(.said.as_deref()))]
    Refused {
        /// The file or directory.
        path: PathBuf,
        source: io::Error,
        /// The kernel's message in `info/last_cmd_status`.
        said: Option<String>,
    },
    /// A file is not in the documented format.
    #[error("{path}: {text:?} is not {expected}", path = .path.display())]
    Malformed {
        path: PathBuf,
        /// Content of the file, shortened.
        text: String,
        /// Expected format.
        expected: &'static str,
    },
    /// The threads of a cgroup cannot be read.
    #[error(transparent)]
    Cgroup(#[from] read::ReadError),
    /// The workload has more threads than are moved.
    #[error(
        "it has more than {MAX_THREADS} threads, which are not all moved to its group; limit its pids.max"
    )]
    TooManyThreads,
    /// The workload has more cgroups than are read.
    #[error(
        "it has more than {MAX_CGROUPS} cgroups, or they cannot be read within {} s: their threads are not all moved to its group; limit \
         its cgroup.max.descendants", READ_TIMEOUT.as_secs()
    )]
    TooManyCgroups,
    /// The kernel holds another value than the written one.
    #[error("{path}: it holds {found:?} after {wanted:?} was written", path = .path.display())]
    Different { path: PathBuf, wanted: String, found: String },
    /// Memory bandwidth is not in percent on this host.
    #[error(
        "{path}: memory bandwidth is not in percent on this host (it shows {shown}: AMD's unit, or mounted with mba_MBps), \
         so memoryBandwidthPercent cannot be given",
        path = .path.display()
    )]
    NoPercent {
        path: PathBuf,
        /// Value in the file.
        shown: u64,
    },
}

fn status(said: Option<&str>) -> String {
    said.map(|said| format!(" (the kernel says: {said})")).unwrap_or_default()
}

fn shortened(text: &str) -> String {
    text.trim().chars().take(80).collect()
}

/// Returns whether a thread has ended.
fn has_ended(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::SRCH)
}

/// The resctrl file system of a host, or a fake for tests.
#[derive(Clone, Debug)]
pub(super) struct ResctrlTree {
    pub(super) root: PathBuf,
    kernel: Arc<dyn ResctrlKernel>,
    pub(super) is_made_up: bool,
}

impl ResctrlTree {
    /// Opens the file system at `root`: the kernel's, or a directory with [`FAKE_MARKER`].
    pub(super) fn open(root: &Path, kernel: Arc<dyn ResctrlKernel>) -> Result<Self, ResctrlError> {
        let not_mounted = || ResctrlError::NotMounted(root.to_owned());
        let status = rustix::fs::statfs(root).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => not_mounted(),
            errno => ResctrlError::Refused { path: root.to_owned(), source: errno.into(), said: None },
        })?;
        // The type of the field differs by architecture.
        let is_kernels = u64::try_from(status.f_type).unwrap_or(0) == MAGIC;
        let is_made_up = !is_kernels && root.join(FAKE_MARKER).exists();
        if !is_kernels && !is_made_up {
            return Err(not_mounted());
        }
        Ok(Self { root: root.to_owned(), kernel, is_made_up })
    }

    /// Returns the directory of a class.
    pub(super) fn class(&self, name: &str) -> PathBuf {
        self.root.join(format!("{PREFIX}{name}"))
    }

    /// Reads the capabilities of the host.
    pub(super) fn info(&self) -> Result<Info, ResctrlError> {
        let info = self.root.join("info");
        let is_there = |name: &str| info.join(name).is_dir();
        let resources: Vec<&'static str> = if is_there("L3") {
            vec!["L3"]
        } else {
            ["L3CODE", "L3DATA"].into_iter().filter(|name| is_there(name)).collect()
        };
        let caches = resources.first().map(|name| {
            let dir = info.join(name);
            let mask = self.text(&dir.join("cbm_mask"))?;
            let number = u64::from_str_radix(mask.trim(), 16).ok().filter(|mask| *mask != 0);
            let path = dir.join("cbm_mask");
            let expected = "a mask of bits that is not zero";
            let wrong = || ResctrlError::Malformed { path, text: shortened(&mask), expected };
            Ok::<_, ResctrlError>(Caches {
                mask: number.ok_or_else(wrong)?,
                least: self.number(&dir.join("min_cbm_bits"))?,
                groups: self.number(&dir.join("num_closids"))?,
                resources: resources.clone(),
            })
        });
        let bandwidth = is_there(BANDWIDTH).then(|| {
            let dir = info.join(BANDWIDTH);
            Ok::<_, ResctrlError>(Bandwidth {
                least: self.number(&dir.join("min_bandwidth"))?,
                step: self.number(&dir.join("bandwidth_gran"))?,
                groups: self.number(&dir.join("num_closids"))?,
            })
        });
        let monitoring = is_there("L3_MON").then(|| {
            let dir = info.join("L3_MON");
            let events = self.text(&dir.join("mon_features"))?;
            let events = events.lines().map(str::trim).filter(|name| !name.is_empty());
            Ok::<_, ResctrlError>(Monitoring {
                events: events.map(str::to_owned).collect(),
                groups: self.number(&dir.join("num_rmids"))?,
            })
        });
        Ok(Info {
            caches: caches.transpose()?,
            bandwidth: bandwidth.transpose()?,
            monitoring: monitoring.transpose()?,
        })
    }

    /// Returns the groups directly below the root, or in a directory `mon_groups`: the daemon's, and those of other
    /// programs.
    pub(super) fn groups(&self, dir: &Path) -> Result<(Vec<PathBuf>, Vec<PathBuf>), ResctrlError> {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            // Without monitoring, the directory does not exist.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((Vec::new(), Vec::new())),
            Err(error) => return Err(self.refused(dir, error)),
        };
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for entry in entries {
            let entry = entry.map_err(|error| self.refused(dir, error))?;
            let name = entry.file_name();
            let is_group = entry.file_type().is_ok_and(|kind| kind.is_dir())
                && !NO_GROUPS.iter().any(|other| name == *other);
            if is_group {
                let is_ours = name.to_str().is_some_and(|name| name.starts_with(PREFIX));
                if is_ours { &mut ours } else { &mut others }.push(entry.path());
            }
        }
        ours.sort();
        others.sort();
        Ok((ours, others))
    }

    pub(super) fn make(&self, dir: &Path) -> Result<(), ResctrlError> {
        self.kernel.make(dir).map_err(|error| self.refused(dir, error))
    }

    /// Removes a group. Its threads move to the parent group.
    pub(super) fn remove(&self, dir: &Path) -> Result<(), ResctrlError> {
        match self.kernel.remove(dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(self.refused(dir, error)),
            _ => Ok(()),
        }
    }

    /// Reads the shares of a group.
    fn schemata(&self, group: &Path) -> Result<Schemata, ResctrlError> {
        let path = group.join("schemata");
        let text = self.text(&path)?;
        Schemata::parse(&text).map_err(|line| ResctrlError::Malformed {
            path,
            text: shortened(&line),
            expected: "a line such as L3:0=fff;1=fff",
        })
    }

    /// Returns whether a group has less than the kernel's default of a resource that its class does not name any more.
    pub(super) fn is_reduced(
        &self,
        group: &Path,
        target: GroupTarget,
        info: &Info,
    ) -> Result<bool, ResctrlError> {
        let now = self.schemata(group)?;
        let is_cut = |caches: &Caches| {
            let masks = caches.resources.iter().filter_map(|of| now.masks(of));
            masks.flat_map(BTreeMap::into_values).any(|mask| mask != caches.mask)
        };
        let is_cut = target.mask.is_none() && info.caches.as_ref().is_some_and(is_cut);
        let is_slowed = now.bandwidth().is_some_and(|of| of.values().any(|percent| *percent < 100));
        Ok(is_cut || (target.bandwidth.is_none() && is_slowed))
    }

    /// Writes the shares of a group. Returns the written lines.
    pub(super) fn apply(
        &self,
        group: &Path,
        target: GroupTarget,
        info: &Info,
    ) -> Result<Vec<String>, ResctrlError> {
        let now = self.schemata(group)?;
        let mut written = Vec::new();
        if let (Some(mask), Some(caches)) = (target.mask, &info.caches) {
            for resource in &caches.resources {
                let holds = |of: &Schemata| of.masks(resource).filter(|masks| !masks.is_empty());
                let caches = holds(&now).unwrap_or_default();
                if caches.is_empty() || caches.values().any(|shown| *shown != mask) {
                    let text = line(resource, caches.keys().map(|cache| (*cache, format!("{mask:x}"))));
                    let is_held =
                        |of: &Schemata| holds(of).is_some_and(|of| of.values().all(|now| *now == mask));
                    written.push(self.set(group, &text, is_held)?);
                }
            }
        }
        if let (Some(percent), Some(bandwidth)) = (target.bandwidth, &info.bandwidth) {
            let shown = now.bandwidth().unwrap_or_default();
            if let Some(shown) = shown.values().find(|shown| **shown > 100) {
                return Err(ResctrlError::NoPercent { path: group.join("schemata"), shown: *shown });
            }
            if shown.is_empty() || !shown.values().all(|shown| bandwidth.holds(percent, *shown)) {
                let text = line(BANDWIDTH, shown.keys().map(|cache| (*cache, percent.to_string())));
                let is_held = |of: &Schemata| {
                    let now = of.bandwidth().filter(|now| !now.is_empty());
                    now.is_some_and(|now| now.values().all(|now| bandwidth.holds(percent, *now)))
                };
                written.push(self.set(group, &text, is_held)?);
            }
        }
        Ok(written)
    }

    /// Reads the ways of a group, by resource and cache.
    pub(super) fn masks(&self, group: &Path, caches: &Caches) -> Result<WayMasks, ResctrlError> {
        let now = self.schemata(group)?;
        let masks = caches.resources.iter().map(|resource| Some((*resource, now.masks(resource)?)));
        masks.collect::<Option<_>>().ok_or_else(|| ResctrlError::Malformed {
            path: group.join("schemata"),
            text: format!("{now:?}").chars().take(80).collect(),
            expected: "a mask of ways for each L3 cache",
        })
    }

    /// Writes the ways of a group on these caches. Returns the written line.
    pub(super) fn set_masks(
        &self,
        group: &Path,
        resource: &str,
        masks: &BTreeMap<u32, u64>,
    ) -> Result<String, ResctrlError> {
        let text = line(resource, masks.iter().map(|(cache, mask)| (*cache, format!("{mask:x}"))));
        self.set(group, &text, |of| {
            let now = of.masks(resource).unwrap_or_default();
            masks.iter().all(|(cache, mask)| now.get(cache) == Some(mask))
        })
    }

    /// Writes a line of `schemata`, and reads it back.
    fn set(
        &self,
        group: &Path,
        text: &str,
        is_held: impl Fn(&Schemata) -> bool,
    ) -> Result<String, ResctrlError> {
        let path = group.join("schemata");
        self.kernel.write(&path, text).map_err(|error| self.refused(&path, error))?;
        if !is_held(&self.schemata(group)?) {
            let (wanted, found) = (text.trim().to_owned(), shortened(&self.text(&path)?));
            return Err(ResctrlError::Different { path, wanted, found });
        }
        Ok(text.trim().to_owned())
    }

    /// Reads the threads of a group.
    pub(super) fn tasks(&self, group: &Path) -> Result<BTreeSet<u32>, ResctrlError> {
        let path = group.join("tasks");
        let file = File::open(&path).map_err(|error| self.refused(&path, error))?;
        let mut lines = TruncatedLines::new(BufReader::new(file));
        let mut found = BTreeSet::new();
        while let Some(line) = lines.next_line().map_err(|error| self.refused(&path, error))? {
            let line = String::from_utf8_lossy(line);
            let thread = line.trim().parse().map_err(|_| ResctrlError::Malformed {
                path: path.clone(),
                text: shortened(&line),
                expected: "a thread",
            })?;
            found.insert(thread);
        }
        Ok(found)
    }

    /// Moves a thread to a group. Returns false if the thread has ended.
    pub(super) fn add(&self, group: &Path, thread: u32) -> Result<bool, ResctrlError> {
        let path = group.join("tasks");
        match self.kernel.write(&path, &format!("{thread}\n")) {
            Ok(()) => Ok(true),
            Err(error) if has_ended(&error) => Ok(false),
            Err(error) => Err(self.refused(&path, error)),
        }
    }

    /// Reads the counters of a group by cache. A value that the kernel does not know is `None`.
    pub(super) fn counted(&self, group: &Path) -> Result<Vec<(u32, CacheCounters)>, ResctrlError> {
        let dir = group.join("mon_data");
        let entries = fs::read_dir(&dir).map_err(|error| self.refused(&dir, error))?;
        let mut counted = Vec::new();
        for entry in entries.filter_map(Result::ok) {
            let name = entry.file_name();
            let cache = name.to_str().and_then(|name| name.strip_prefix("mon_L3_"));
            let Some(cache) = cache.and_then(|cache| cache.parse().ok()) else { continue };
            // "Unavailable", "Unassigned" and "Error" are no numbers.
            let figure = |file: &str| fs::read_to_string(entry.path().join(file)).ok()?.trim().parse().ok();
            let of = CacheCounters {
                occupancy: figure("llc_occupancy"),
                total: figure("mbm_total_bytes"),
                local: figure("mbm_local_bytes"),
            };
            counted.push((cache, of));
        }
        counted.sort_by_key(|(cache, _)| *cache);
        Ok(counted)
    }

    fn text(&self, path: &Path) -> Result<String, ResctrlError> {
        fs::read_to_string(path).map_err(|error| self.refused(path, error))
    }

    fn number<N: FromStr>(&self, path: &Path) -> Result<N, ResctrlError> {
        let text = self.text(path)?;
        let wrong = |_| ResctrlError::Malformed {
            path: path.to_owned(),
            text: shortened(&text),
            expected: "a number",
        };
        text.trim().parse().map_err(wrong)
    }

    fn refused(&self, path: &Path, source: io::Error) -> ResctrlError {
        let said = fs::read_to_string(self.root.join("info/last_cmd_status")).ok();
        let said = said.map(|said| shortened(&said)).filter(|said| !said.is_empty() && said != "ok");
        ResctrlError::Refused { path: path.to_owned(), source, said }
    }
}

/// Counters of a group on one cache; `None` if the kernel does not know the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Used bytes of the cache.
    pub occupancy: Option<u64>,
    /// Bytes transferred between this cache and memory since the group was created.
    pub total: Option<u64>,
    /// The part of `total` that was transferred to or from memory of the same node.
    pub local: Option<u64>,
}

/// Reads the threads of a cgroup and of its descendants into `found`. The error is the first one; the other cgroups are read nevertheless,
/// up to [`MAX_CGROUPS`] and for [`READ_TIMEOUT`] at most.
pub(super) fn read_threads(dir: &Path, found: &mut BTreeSet<u32>) -> Result<(), ResctrlError> {
    let (mut outcome, deadline) = (Ok(()), Instant::now() + READ_TIMEOUT);
    let mut dirs = read::subtree(dir);
    for (number, dir) in dirs.by_ref().enumerate() {
        if number == MAX_CGROUPS || Instant::now() >= deadline {
            return Err(ResctrlError::TooManyCgroups);
        }
        let read = read::visit_threads(&dir, |thread| {
            // 0 is a thread that is not visible in this PID namespace.
            if thread != 0 {
                found.insert(thread);
            }
            found.len() <= MAX_THREADS
        });
        if found.len() > MAX_THREADS {
            return Err(ResctrlError::TooManyThreads);
        }
        match read {
            Err(error) if !error.is_gone() => outcome = outcome.and(Err(error.into())),
            _ => {}
        }
    }
    if !dirs.is_complete() {
        return Err(ResctrlError::TooManyCgroups);
    }
    outcome
}
