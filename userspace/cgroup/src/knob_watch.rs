//! Immediate detection of writes to knobs, with the writing process.
//!
//! fanotify reports every write(2) to a marked file with the id of the writing process, which inotify does not. It does
//! not report changes by the kernel itself (hotplug, a smaller set of the parent). Marks can be lost: evictable marks
//! do not pin the inode (on older kernels they would keep a removed cgroup in memory), so the kernel drops them when it
//! needs the memory. A watch is therefore only a fast hint: callers also read the knobs periodically, and set the marks
//! again each time. Setting a mark twice does no harm.
//!
//! Tested for every knob on Linux 6.1, 6.12 and 7.2, and on 5.10 from 5.10.220 on, to which evictable marks (5.19) were
//! backported. Needs `CAP_SYS_ADMIN`.
//!
//! Source: fanotify(7), `fanotify_mark(2)`.

use std::{
    fmt,
    fs::File,
    io::{BufRead, BufReader},
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};

use crate::{CgroupPath, TruncatedLines, files::read_lossy, knob::Knob};
use nix::{
    errno::Errno,
    sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags},
};

/// The maximum number of reads in one call, so that a process that writes continuously cannot block the caller.
const MAX_READS: usize = 64;

/// A watch on knobs of cgroups.
#[derive(Debug)]
pub struct KnobWatch {
    root: PathBuf,
    fanotify: Fanotify,
    own_pid: i32,
    /// The number of levels by which the root of the hierarchy is above the root of this process's cgroup namespace.
    levels_above: usize,
}

/// Knobs cannot be watched; they have to be polled.
#[derive(Debug, thiserror::Error)]
pub enum KnobWatchError {
    /// The kernel refuses a fanotify group.
    #[error("cannot watch knobs (fanotify_init): {0}; it needs CAP_SYS_ADMIN")]
    Init(#[source] std::io::Error),
    /// A knob cannot be marked.
    #[error("cannot watch {path} (fanotify_mark): {source}", path = .path.display())]
    Mark { path: PathBuf, source: std::io::Error },
    /// Events cannot be read.
    #[error("cannot read the events of watched knobs: {0}")]
    Read(#[source] std::io::Error),
}

/// A process that wrote a knob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnobWriter {
    /// Its id in this PID namespace.
    pub pid: u32,
    /// Its name, if it had not ended before the name was read. Its arguments are not read, because they may contain
    /// secrets.
    pub name: Option<String>,
    /// The path of its cgroup, if it had not ended.
    pub cgroup: Option<String>,
}

impl fmt::Display for KnobWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            // Every process chooses its own name, which may contain line ends.
            Some(name) => write!(f, "{} (process {}", name.escape_debug(), self.pid)?,
            None => write!(f, "a process that has ended ({}", self.pid)?,
        }
        self.cgroup.iter().try_for_each(|cgroup| write!(f, ", cgroup {cgroup}"))?;
        f.write_str(")")
    }
}

/// An event of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnobEvent {
    /// Another process wrote a knob.
    Write {
        cgroup: CgroupPath,
        knob: Knob,
        /// The writing process; `None` for a process outside this PID namespace.
        by: Option<KnobWriter>,
    },
    /// Events were lost: the caller has to check all knobs.
    Overflow,
}

impl KnobWatch {
    /// Creates a watch on the hierarchy mounted at `root`, without any knob.
    pub fn new(root: &Path) -> Result<Self, KnobWatchError> {
        let flags = InitFlags::FAN_CLASS_NOTIF
            | InitFlags::FAN_CLOEXEC
            | InitFlags::FAN_NONBLOCK
            | InitFlags::FAN_UNLIMITED_MARKS;
        let fanotify = Fanotify::init(flags, EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC)
            .map_err(|errno| KnobWatchError::Init(errno.into()))?;
        let own_pid = rustix::process::getpid().as_raw_pid();
        // The paths of events have no symbolic links.
        let root = root.canonicalize().unwrap_or_else(|_| root.to_owned());
        let mounts = File::open("/proc/self/mountinfo").map(BufReader::new);
        let levels_above = mounts.map_or(0, |mounts| count_levels_above(mounts, &root));
        Ok(Self { root, fanotify, own_pid, levels_above })
    }

    /// Watches a knob of a cgroup. Returns `false` if it does not exist.
    pub fn add(&self, cgroup: &CgroupPath, knob: Knob) -> Result<bool, KnobWatchError> {
        self.mark(MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_EVICTABLE, cgroup, knob)
    }

    /// Stops watching a knob. Not necessary for a cgroup that is gone.
    pub fn remove(&self, cgroup: &CgroupPath, knob: Knob) -> Result<(), KnobWatchError> {
        self.mark(MarkFlags::FAN_MARK_REMOVE, cgroup, knob).map(drop)
    }

    fn mark(&self, flags: MarkFlags, cgroup: &CgroupPath, knob: Knob) -> Result<bool, KnobWatchError> {
        let path = knob.path(&cgroup.dir(&self.root));
        match self.fanotify.mark(flags, MaskFlags::FAN_MODIFY, rustix::fs::CWD, Some(&path)) {
            Ok(()) => Ok(true),
            Err(Errno::ENOENT | Errno::ENODEV) => Ok(false),
            Err(errno) => Err(KnobWatchError::Mark { path, source: errno.into() }),
        }
    }

    /// Returns the events since the last call, without this process's own writes. Does not wait.
    ///
    /// To wait, poll the file descriptor for reading.
    pub fn read(&self) -> Result<Vec<KnobEvent>, KnobWatchError> {
        let mut touched = Vec::new();
        for _ in 0..MAX_READS {
            let events = match self.fanotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => break,
                // The kernel opens each reported file. This one is gone with its cgroup.
                Err(Errno::ENODEV | Errno::ENOENT) => continue,
                // The lost event may be about any knob.
                Err(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) => {
                    touched.push(KnobEvent::Overflow);
                    continue;
                }
                Err(errno) => return Err(KnobWatchError::Read(errno.into())),
            };
            for event in &events {
                if event.mask().contains(MaskFlags::FAN_Q_OVERFLOW) {
                    touched.push(KnobEvent::Overflow);
                    continue;
                }
                let Some(file) = event.fd().filter(|_| event.pid() != self.own_pid) else { continue };
                if let Some((cgroup, knob)) = self.knob_of(file) {
                    touched.push(KnobEvent::Write {
                        cgroup,
                        knob,
                        by: writer(event.pid(), self.levels_above),
                    });
                }
            }
        }
        Ok(touched)
    }

    /// Returns the cgroup and the knob of an open file; `None` if the cgroup is gone.
    fn knob_of(&self, file: BorrowedFd<'_>) -> Option<(CgroupPath, Knob)> {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        let knob = path.file_name()?.to_str()?.parse().ok()?;
        let below = path.parent()?.strip_prefix(&self.root).ok()?.to_str()?;
        Some((format!("/{below}").parse().ok()?, knob))
    }
}

impl AsFd for KnobWatch {
    /// Becomes readable when an event occurs.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fanotify.as_fd()
    }
}

/// Returns the number of levels by which the root of the hierarchy mounted at `root` is above the root of this
/// process's cgroup namespace (`cgroup_namespaces(7)`), for example in a container. The mount shows them as `/../..`.
fn count_levels_above(mounts: impl BufRead, root: &Path) -> usize {
    let (mut lines, mut levels) = (TruncatedLines::new(mounts), 0);
    while let Ok(Some(line)) = lines.next_line() {
        let line = String::from_utf8_lossy(line);
        // The fourth and fifth field of `proc_pid_mountinfo(5)`.
        let mut fields = line.split(' ').skip(3);
        if let Some((mounted_root, at)) = fields.next().zip(fields.next())
            && Path::new(at) == root
        {
            // The last mount covers earlier ones.
            levels = mounted_root.split('/').filter(|&part| part == "..").count();
        }
    }
    levels
}

/// Converts a path from the root of this namespace to one from the hierarchy's root. Returns it unchanged if it does
/// not lead up to a common ancestor.
fn from_root(path: &str, levels_above: usize) -> String {
    let up = "/..".repeat(levels_above);
    match path.strip_prefix(&up) {
        Some("") => "/".to_owned(),
        Some(rest) if rest.starts_with('/') && !rest.starts_with("/../") && rest != "/.." => rest.to_owned(),
        _ => path.to_owned(),
    }
}

fn writer(pid: i32, levels_above: usize) -> Option<KnobWriter> {
    let pid = u32::try_from(pid).ok().filter(|&pid| pid != 0)?;
    let read = |file| read_lossy(Path::new(&format!("/proc/{pid}/{file}"))).ok();
    let name = read("comm").map(|name| name.trim_end().to_owned());
    let cgroup = read("cgroup").and_then(|text| {
        let of_v2 = |line: &str| line.strip_prefix("0::").map(|path| from_root(path, levels_above));
        text.lines().find_map(of_v2)
    });
    Some(KnobWriter { pid, name, cgroup })
}

#[cfg(test)]
mod tests {
    use numaward_tests_support::skip_outside_ci;

    use crate::Hierarchy;

    use super::*;

    /// Returns `None` if the test cannot run, which is a failure in CI.
    fn require<T, E: fmt::Display>(what: Result<T, E>) -> Option<T> {
        match what {
            Ok(there) => Some(there),
            Err(error) => {
                skip_outside_ci(error);
                None
            }
        }
    }

    #[test]
    fn watch_survives_removed_cgroup() {
        let Some(hierarchy) = require(Hierarchy::open()) else { return };
        let Some(watch) = require(KnobWatch::new(hierarchy.root())) else { return };
        let name = |which: &str| format!("/numaward-test-{which}-{}", std::process::id()).parse().unwrap();
        let (goes, stays): (CgroupPath, CgroupPath) = (name("goes"), name("stays"));
        for path in [&goes, &stays] {
            let Some(()) = require(std::fs::create_dir(hierarchy.dir(path))) else { return };
            assert!(watch.add(path, Knob::SubtreeControl).unwrap());
        }
        // The data contains no controller, so that the write works on hosts without controllers.
        let write = |path| {
            let file = Knob::SubtreeControl.path(&hierarchy.dir(path));
            std::process::Command::new("sh").arg("-c").arg("echo > \"$0\"").arg(file).status().unwrap()
        };
        assert!(write(&goes).success());
        std::fs::remove_dir(hierarchy.dir(&goes)).unwrap();
        let first = watch.read();
        let status = write(&stays);
        let second = watch.read();
        std::fs::remove_dir(hierarchy.dir(&stays)).unwrap();
        assert!(status.success());
        assert_eq!(first.unwrap(), []);
        let second = second.unwrap();
        assert!(
            matches!(&second[..], [KnobEvent::Write { cgroup, knob: Knob::SubtreeControl, .. }] if *cgroup == stays),
            "{second:?}"
        );
    }

    #[test]
    fn writer_name_is_escaped() {
        let writer = KnobWriter { pid: 7, name: Some("a\nERROR \x1b[2J".to_owned()), cgroup: None };
        assert_eq!(writer.to_string(), r"a\nERROR \u{1b}[2J (process 7)");
    }

    #[test]
    fn cgroup_is_named_from_host_root() {
        let mounts = "20 1 0:30 / /sys rw - sysfs sysfs rw\n\
            31 20 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n\
            38 20 0:26 /../../.. /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n\
            39 20\n";
        let levels_above = |root: &str| count_levels_above(mounts.as_bytes(), Path::new(root));
        assert_eq!(
            (levels_above("/sys/fs/cgroup"), levels_above("/sys"), levels_above("/elsewhere")),
            (3, 0, 0)
        );
        for (path, expected) in [
            ("/../../..", "/"),
            ("/../../../system.slice/a.service", "/system.slice/a.service"),
            ("/../../../..a", "/..a"),
            // A cgroup of the same pod; its name is unknown here.
            ("/../other", "/../other"),
            ("/", "/"),
        ] {
            assert_eq!(from_root(path, 3), expected);
        }
        assert_eq!((from_root("/a", 0).as_str(), from_root("/", 0).as_str()), ("/a", "/"));
    }

    /// fanotify works on any file, so the test uses plain files instead of knobs.
    #[test]
    fn reports_writes_by_other_processes() {
        let root = tempfile::tempdir().unwrap();
        let Some(watch) = require(KnobWatch::new(root.path())) else { return };
        let path: CgroupPath = "/a b/c".parse().unwrap();
        std::fs::create_dir_all(path.dir(root.path())).unwrap();
        let file = Knob::CpusetCpus.path(&path.dir(root.path()));
        std::fs::write(&file, "0\n").unwrap();
        assert!(watch.add(&path, Knob::CpusetCpus).unwrap());
        assert!(!watch.add(&path, Knob::CpusetMems).unwrap(), "not there");
        assert!(!watch.add(&"/gone".parse().unwrap(), Knob::CpusetMems).unwrap());

        Knob::CpusetCpus.write(&path.dir(root.path()), "1").unwrap();
        assert_eq!(watch.read().unwrap(), [], "own writes are not reported");

        let mut shell = std::process::Command::new("sh");
        let mut child = shell.arg("-c").arg("echo 2 > \"$0\"; read _").arg(&file);
        child = child.stdin(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut events = Vec::new();
        for _ in 0..200 {
            events.extend(watch.read().unwrap());
            if !events.is_empty() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let own = writer(std::process::id().cast_signed(), watch.levels_above).unwrap();
        let by = Some(KnobWriter { pid: child.id(), name: Some("sh".to_owned()), cgroup: own.cgroup });
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(
            events.first(),
            Some(&KnobEvent::Write { cgroup: path.clone(), knob: Knob::CpusetCpus, by })
        );

        watch.remove(&path, Knob::CpusetCpus).unwrap();
        watch.read().unwrap();
        std::process::Command::new("sh").arg("-c").arg("echo 3 > \"$0\"").arg(&file).status().unwrap();
        assert_eq!(watch.read().unwrap(), []);
    }
}
