//! Seeing at once that a knob was written, and by whom.
//!
//! fanotify reports every write(2) to a marked file, with the id of the process that wrote, which inotify does
//! not. It does not report what the kernel changes by itself (hotplug, a parent that was narrowed), and a mark
//! may be lost: marks do not pin the inode (or a removed cgroup would stay in memory on older kernels), so the
//! kernel drops them when it needs the memory. A watch is a hint that is fast; the truth is read, now and then.
//! Marks are set again at each of these times: setting one twice does no harm.
//!
//! Seen to work for every knob on Linux 6.1, 6.12 and 7.2, and on 5.10 from 5.10.220 on, which took over marks that do not pin
//! (5.19). Needs `CAP_SYS_ADMIN`.
//!
//! Source: fanotify(7), `fanotify_mark(2)`.

use std::{
    fmt,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    path::{Path, PathBuf},
};

use crate::{CgroupPath, knob::Knob};
use nix::{
    errno::Errno,
    sys::fanotify::{EventFFlags, Fanotify, InitFlags, MarkFlags, MaskFlags},
};

/// How often at most the kernel is asked for more in one go: otherwise a process that writes without end keeps it without end.
const READINGS: usize = 64;

/// Watches knobs of cgroups.
#[derive(Debug)]
pub struct KnobWatch {
    root: PathBuf,
    fanotify: Fanotify,
    own_pid: i32,
    /// How far the root of the hierarchy is above what processes' paths begin at.
    hidden: usize,
}

/// Knobs cannot be watched: they have to be polled.
#[derive(Debug, thiserror::Error)]
pub enum KnobWatchError {
    /// The kernel gives no fanotify group.
    #[error("cannot watch knobs (fanotify_init): {0}; it needs CAP_SYS_ADMIN")]
    Init(#[source] std::io::Error),
    /// A knob cannot be marked.
    #[error("{path}: cannot be watched (fanotify_mark): {source}", path = .path.display())]
    Mark {
        /// The knob's file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Events cannot be read.
    #[error("cannot read what happened to knobs: {0}")]
    Read(#[source] std::io::Error),
}

/// A process that wrote a knob.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnobWriter {
    /// Its id as seen from here.
    pub pid: u32,
    /// Its name, if it was still there to be asked. Not its arguments: they may hold secrets.
    pub name: Option<String>,
    /// The path of its cgroup, likewise.
    pub cgroup: Option<String>,
}

impl fmt::Display for KnobWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            // Every process chooses its own name, and may put the end of a line into it.
            Some(name) => write!(f, "{} (process {}", name.escape_debug(), self.pid)?,
            None => write!(f, "a process that has ended ({}", self.pid)?,
        }
        self.cgroup.iter().try_for_each(|cgroup| write!(f, ", cgroup {cgroup}"))?;
        f.write_str(")")
    }
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnobEvent {
    /// Somebody else wrote a knob.
    Write {
        /// The cgroup.
        cgroup: CgroupPath,
        /// The knob.
        knob: Knob,
        /// Who; `None` for a process outside of our PID namespace.
        by: Option<KnobWriter>,
    },
    /// Too much happened at once: look at everything.
    Overflow,
}

impl KnobWatch {
    /// A watch on a hierarchy mounted at `root`, with nothing watched yet.
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
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let hidden = levels_hidden(&mounts, &root);
        Ok(Self { root, fanotify, own_pid, hidden })
    }

    /// Watches a knob of a cgroup; `false` if it is not there.
    pub fn add(&self, cgroup: &CgroupPath, knob: Knob) -> Result<bool, KnobWatchError> {
        self.mark(MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_EVICTABLE, cgroup, knob)
    }

    /// Stops watching a knob. A cgroup that is gone needs it not.
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

    /// What happened since the last call; does not wait. Our own writes are skipped.
    ///
    /// To wait, poll the file descriptor for reading.
    pub fn read(&self) -> Result<Vec<KnobEvent>, KnobWatchError> {
        let mut touched = Vec::new();
        for _ in 0..READINGS {
            let events = match self.fanotify.read_events() {
                Ok(events) => events,
                Err(Errno::EAGAIN) => break,
                // The kernel opens each file that it reports. This one is gone with its cgroup.
                Err(Errno::ENODEV | Errno::ENOENT) => continue,
                // What is lost may have been any knob's.
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
                    touched.push(KnobEvent::Write { cgroup, knob, by: writer(event.pid(), self.hidden) });
                }
            }
        }
        Ok(touched)
    }

    /// Which knob an open file is; `None` if its cgroup is gone.
    fn knob_of(&self, file: BorrowedFd<'_>) -> Option<(CgroupPath, Knob)> {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        let knob = path.file_name()?.to_str()?.parse().ok()?;
        let below = path.parent()?.strip_prefix(&self.root).ok()?.to_str()?;
        Some((format!("/{below}").parse().ok()?, knob))
    }
}

impl AsFd for KnobWatch {
    /// Readable when something happened.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fanotify.as_fd()
    }
}

/// How many levels of the hierarchy that is mounted at `root` are above the root of our cgroup namespace
/// (`cgroup_namespaces(7)`), that of a container for instance: the mount then shows them as `/../..`.
fn levels_hidden(mounts: &str, root: &Path) -> usize {
    // What is mounted last covers the others.
    let seen_as = mounts.lines().rev().find_map(|line| {
        // The fourth and fifth field of `proc_pid_mountinfo(5)`.
        let mut fields = line.split(' ').skip(3);
        let (seen_as, at) = (fields.next()?, fields.next()?);
        (Path::new(at) == root).then_some(seen_as)
    });
    seen_as.map_or(0, |path| path.split('/').filter(|&part| part == "..").count())
}

/// The path from the hierarchy's root, of one from the root of our namespace. One that does not lead up to where they
/// meet stays as it is.
fn from_root(path: &str, hidden: usize) -> String {
    let up = "/..".repeat(hidden);
    match path.strip_prefix(&up) {
        Some("") => "/".to_owned(),
        Some(rest) if rest.starts_with('/') && !rest.starts_with("/../") && rest != "/.." => rest.to_owned(),
        _ => path.to_owned(),
    }
}

fn writer(pid: i32, hidden: usize) -> Option<KnobWriter> {
    let pid = u32::try_from(pid).ok().filter(|&pid| pid != 0)?;
    let read = |file| std::fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let name = read("comm").map(|name| name.trim_end().to_owned());
    let cgroup = read("cgroup").and_then(|text| {
        let of_v2 = |line: &str| line.strip_prefix("0::").map(|path| from_root(path, hidden));
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
    fn needed<T, E: fmt::Display>(what: Result<T, E>) -> Option<T> {
        match what {
            Ok(there) => Some(there),
            Err(error) => {
                skip_outside_ci(error);
                None
            }
        }
    }

    #[test]
    fn a_cgroup_that_goes_with_its_last_write_does_not_end_the_watch() {
        let Some(hierarchy) = needed(Hierarchy::open()) else { return };
        let Some(watch) = needed(KnobWatch::new(hierarchy.root())) else { return };
        let name = |which: &str| format!("/numaward-test-{which}-{}", std::process::id()).parse().unwrap();
        let (goes, stays): (CgroupPath, CgroupPath) = (name("goes"), name("stays"));
        for path in [&goes, &stays] {
            let Some(()) = needed(std::fs::create_dir(hierarchy.dir(path))) else { return };
            assert!(watch.add(path, Knob::SubtreeControl).unwrap());
        }
        // No controller is named, so that this works also where there are none.
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
    fn a_writers_name_stays_in_its_line() {
        let writer = KnobWriter { pid: 7, name: Some("a\nERROR \x1b[2J".to_owned()), cgroup: None };
        assert_eq!(writer.to_string(), r"a\nERROR \u{1b}[2J (process 7)");
    }

    #[test]
    fn writers_are_named_from_the_hosts_root() {
        let mounts = "20 1 0:30 / /sys rw - sysfs sysfs rw\n\
            31 20 0:26 / /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n\
            38 20 0:26 /../../.. /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n\
            39 20\n";
        let hidden = |root: &str| levels_hidden(mounts, Path::new(root));
        assert_eq!((hidden("/sys/fs/cgroup"), hidden("/sys"), hidden("/elsewhere")), (3, 0, 0));
        for (path, expected) in [
            ("/../../..", "/"),
            ("/../../../system.slice/a.service", "/system.slice/a.service"),
            ("/../../../..a", "/..a"),
            // Of the same pod, whose name is not known here.
            ("/../other", "/../other"),
            ("/", "/"),
        ] {
            assert_eq!(from_root(path, 3), expected);
        }
        assert_eq!((from_root("/a", 0).as_str(), from_root("/", 0).as_str()), ("/a", "/"));
    }

    /// fanotify works on any file, so ordinary ones stand for knobs here.
    #[test]
    fn writes_of_others_are_reported_with_their_names() {
        let root = tempfile::tempdir().unwrap();
        let Some(watch) = needed(KnobWatch::new(root.path())) else { return };
        let path: CgroupPath = "/a b/c".parse().unwrap();
        std::fs::create_dir_all(path.dir(root.path())).unwrap();
        let file = Knob::CpusetCpus.path(&path.dir(root.path()));
        std::fs::write(&file, "0\n").unwrap();
        assert!(watch.add(&path, Knob::CpusetCpus).unwrap());
        assert!(!watch.add(&path, Knob::CpusetMems).unwrap(), "not there");
        assert!(!watch.add(&"/gone".parse().unwrap(), Knob::CpusetMems).unwrap());

        Knob::CpusetCpus.write(&path.dir(root.path()), "1").unwrap();
        assert_eq!(watch.read().unwrap(), [], "our own");

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
        let own = writer(std::process::id().cast_signed(), watch.hidden).unwrap();
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
