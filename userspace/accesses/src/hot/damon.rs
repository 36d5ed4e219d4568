//! The kernel's monitor of data accesses (DAMON), through its files in sysfs
//! (<https://docs.kernel.org/admin-guide/mm/damon/usage.html>).
//!
//! Each process gets a monitor of its own, a kernel thread called `kdamond`, because the result files of a monitor do
//! not name the process.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    mem,
    path::{Path, PathBuf},
    str::FromStr,
    thread,
    time::Duration,
};

use rustix::fs::{FlockOperation, flock};

/// Directory of the monitors, below the root.
const KDAMONDS_DIR: &str = "sys/kernel/mm/damon/admin/kdamonds";
/// Intervals at which a page of each area is checked, and at which the checks are summed up, in microseconds: the
/// kernel's defaults.
const SAMPLE_MICROS: u32 = 5_000;
pub(super) const AGGREGATION_MICROS: u32 = 100_000;
/// Number of checks that are summed up.
pub(super) const CHECKS_PER_AGGREGATION: u32 = AGGREGATION_MICROS / SAMPLE_MICROS;
/// Minimum and maximum number of areas of a process: the kernel's defaults.
const AREA_LIMITS: [(&str, u32); 2] = [("min", 10), ("max", 1000)];
// While a monitor uses its files, the kernel refuses other accesses to them with EBUSY.
const MAX_ATTEMPTS: u32 = 20;
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// Upper limits of the scheme's access pattern, which all areas match.
const MAX_ACCESS_PATTERN: [(&str, u64); 3] =
    [("sz", u64::MAX), ("nr_accesses", CHECKS_PER_AGGREGATION as u64), ("age", u32::MAX as u64)];

/// Reason why memory cannot be monitored.
#[derive(Debug, thiserror::Error)]
pub(super) enum DamonError {
    /// The kernel has no DAMON, or an old one.
    #[error(
        "{}: this kernel has no {what} there: --hot requires Linux 6.2 or newer with CONFIG_DAMON_SYSFS and CONFIG_DAMON_VADDR",
        path.display()
    )]
    Absent { path: PathBuf, what: &'static str },
    /// Another program has monitors.
    #[error(
        "{}: another program uses DAMON (monitors: {count}), which serves one program at a time; if that program has ended, \
         write off into the file state of each, and then 0 into this one",
        path.display()
    )]
    InUse { path: PathBuf, count: usize },
    /// Another process of numaward has monitors.
    #[error("{}: another numaward watches a workload on this host: wait until it has ended", _0.display())]
    Locked(PathBuf),
    /// The monitored process has ended.
    #[error("the process has ended")]
    Ended,
    /// A file cannot be read or written.
    #[error("{}: {source}{}", path.display(), hint(source))]
    File { path: PathBuf, source: io::Error },
    /// A file does not contain a number.
    #[error("{}: {text:?} is not a number", path.display())]
    NotANumber { path: PathBuf, text: String },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; --hot requires root on the workload's own host",
        io::ErrorKind::ReadOnlyFilesystem => "; --hot requires a writable /sys",
        io::ErrorKind::ResourceBusy => {
            "; the kernel uses DAMON itself if one of \
             /sys/module/{damon_stat,damon_reclaim,damon_lru_sort}/parameters/enabled is Y: write N there"
        }
        _ => "",
    }
}

/// An area of a process's memory with pages that are accessed about equally often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MonitoredArea {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Number of the [`CHECKS_PER_AGGREGATION`] checks that found the checked page accessed.
    pub(super) accesses: u32,
    /// Number of aggregations for which this has been stable.
    pub(super) age: u32,
}

/// Monitors of processes, which end when this value is dropped.
#[derive(Debug)]
pub(super) struct Monitors {
    kdamonds: PathBuf,
    /// Result of the start of each monitor.
    started: Vec<Result<(), DamonError>>,
    /// Exclusive lock against other processes of numaward.
    _lock: File,
}

impl Monitors {
    /// Starts a monitor for each process. Fails if none of them starts.
    pub(super) fn start(root: &Path, processes: &[u32]) -> Result<Self, DamonError> {
        let kdamonds = root.join(KDAMONDS_DIR);
        let number = kdamonds.join("nr_kdamonds");
        if !number.exists() {
            return Err(DamonError::Absent { path: kdamonds, what: "nr_kdamonds" });
        }
        let lock = File::open(&number).map_err(|source| DamonError::File { path: number.clone(), source })?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(DamonError::Locked(number));
        }
        match read(&number)? {
            0 => write(&number, &processes.len())?,
            count => return Err(DamonError::InUse { path: number, count }),
        }
        let started = processes.iter().map(|_| Err(DamonError::Ended)).collect();
        let mut all = Self { kdamonds, started, _lock: lock };
        for (at, process) in processes.iter().enumerate() {
            all.prepare(at, *process)?;
        }
        all.started = (0..processes.len()).map(|at| write(&all.dir(at).join("state"), "on")).collect();
        if all.started.iter().all(Result::is_err)
            && let Some(Err(error)) = all.started.pop()
        {
            return Err(error);
        }
        Ok(all)
    }

    fn dir(&self, at: usize) -> PathBuf {
        self.kdamonds.join(at.to_string())
    }

    fn context(&self, at: usize) -> PathBuf {
        self.dir(at).join("contexts/0")
    }

    fn prepare(&self, at: usize, process: u32) -> Result<(), DamonError> {
        write(&self.dir(at).join("contexts/nr_contexts"), &1)?;
        let context = self.context(at);
        let operations = context.join("avail_operations");
        if !fs::read_to_string(&operations).is_ok_and(|all| all.lines().any(|name| name == "vaddr")) {
            return Err(DamonError::Absent { path: operations, what: "vaddr" });
        }
        write(&context.join("operations"), "vaddr")?;
        let attributes = context.join("monitoring_attrs");
        for (name, micros) in [("sample_us", SAMPLE_MICROS), ("aggr_us", AGGREGATION_MICROS)] {
            write(&attributes.join("intervals").join(name), &micros)?;
        }
        for (name, areas) in AREA_LIMITS {
            write(&attributes.join("nr_regions").join(name), &areas)?;
        }
        write(&context.join("targets/nr_targets"), &1)?;
        write(&context.join("targets/0/pid_target"), &process)?;
        // A scheme with the action `stat` only counts, and makes the areas readable.
        write(&context.join("schemes/nr_schemes"), &1)?;
        let scheme = context.join("schemes/0");
        if !scheme.join("tried_regions").exists() {
            return Err(DamonError::Absent { path: scheme, what: "tried_regions" });
        }
        write(&scheme.join("action"), "stat")?;
        for (name, max) in MAX_ACCESS_PATTERN {
            write(&scheme.join("access_pattern").join(name).join("max"), &max)?;
        }
        Ok(())
    }

    /// Returns the current areas of a process. Waits for the end of the current aggregation.
    pub(super) fn areas(&mut self, at: usize) -> Result<Vec<MonitoredArea>, DamonError> {
        mem::replace(self.started.get_mut(at).ok_or(DamonError::Ended)?, Ok(()))?;
        write(&self.dir(at).join("state"), "update_schemes_tried_regions").map_err(|error| match error {
            // A monitor ends with its process.
            DamonError::File { source, .. } if source.kind() == io::ErrorKind::InvalidInput => {
                DamonError::Ended
            }
            error => error,
        })?;
        let tried = self.context(at).join("schemes/0/tried_regions");
        let failed = |source| DamonError::File { path: tried.clone(), source };
        let mut areas = Vec::new();
        for entry in fs::read_dir(&tried).map_err(failed)? {
            let dir = entry.map_err(failed)?.path();
            // Newer kernels have files beside the areas.
            if !dir.is_dir() {
                continue;
            }
            areas.push(MonitoredArea {
                start: read(&dir.join("start"))?,
                end: read(&dir.join("end"))?,
                accesses: read(&dir.join("nr_accesses"))?,
                age: read(&dir.join("age"))?,
            });
        }
        areas.sort_by_key(|area| area.start);
        if areas.is_empty() { Err(DamonError::Ended) } else { Ok(areas) }
    }

    /// Returns the thread id of a monitor; `None` if it has ended with its process.
    pub(super) fn thread(&self, at: usize) -> Option<i32> {
        read(&self.dir(at).join("pid")).ok().filter(|&thread| thread > 0)
    }
}

impl Drop for Monitors {
    fn drop(&mut self) {
        for at in 0..self.started.len() {
            // The kernel refuses this for a monitor that has ended or was never on.
            let _ = write(&self.dir(at).join("state"), "off");
        }
        if let Err(error) = write(&self.kdamonds.join("nr_kdamonds"), &0) {
            eprintln!("numaward: the monitors of DAMON could not be removed: {error}");
        }
    }
}

fn write(path: &Path, value: &(impl ToString + ?Sized)) -> Result<(), DamonError> {
    let text = value.to_string();
    retry_while_busy(path, || File::options().write(true).open(path)?.write_all(text.as_bytes()))
}

fn read<T: FromStr>(path: &Path) -> Result<T, DamonError> {
    let text = retry_while_busy(path, || fs::read_to_string(path))?;
    let text = text.trim();
    text.parse().map_err(|_| DamonError::NotANumber { path: path.to_owned(), text: text.to_owned() })
}

fn retry_while_busy<T>(path: &Path, mut work: impl FnMut() -> io::Result<T>) -> Result<T, DamonError> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        match work() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && attempts < MAX_ATTEMPTS => {
                thread::sleep(RETRY_PAUSE);
            }
            result => return result.map_err(|source| DamonError::File { path: path.to_owned(), source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a tree like that of a kernel with one monitor. Its files only store the written text.
    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let kdamonds = root.path().join(KDAMONDS_DIR);
        let context = "0/contexts/0";
        let files = [
            ("nr_kdamonds", "0\n"),
            ("0/state", "off\n"),
            ("0/pid", "77\n"),
            ("0/contexts/nr_contexts", "0\n"),
            (&format!("{context}/avail_operations"), "vaddr\nfvaddr\npaddr\n"),
            (&format!("{context}/operations"), "vaddr\n"),
            (&format!("{context}/monitoring_attrs/intervals/sample_us"), "1\n"),
            (&format!("{context}/monitoring_attrs/intervals/aggr_us"), "1\n"),
            (&format!("{context}/monitoring_attrs/nr_regions/min"), "1\n"),
            (&format!("{context}/monitoring_attrs/nr_regions/max"), "1\n"),
            (&format!("{context}/targets/nr_targets"), "0\n"),
            (&format!("{context}/targets/0/pid_target"), "0\n"),
            (&format!("{context}/schemes/nr_schemes"), "0\n"),
            (&format!("{context}/schemes/0/action"), "stat\n"),
            (&format!("{context}/schemes/0/access_pattern/sz/max"), "0\n"),
            (&format!("{context}/schemes/0/access_pattern/nr_accesses/max"), "0\n"),
            (&format!("{context}/schemes/0/access_pattern/age/max"), "0\n"),
            (&format!("{context}/schemes/0/tried_regions/total_bytes"), "8192\n"),
        ];
        for (name, text) in files {
            let path = kdamonds.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        for (at, start, end, accesses) in [(10, 8192, 12288, 0), (9, 4096, 8192, 20)] {
            let dir = kdamonds.join(format!("{context}/schemes/0/tried_regions/{at}"));
            fs::create_dir_all(&dir).unwrap();
            for (name, value) in [("start", start), ("end", end), ("nr_accesses", accesses), ("age", 3)] {
                fs::write(dir.join(name), format!("{value}\n")).unwrap();
            }
        }
        root
    }

    fn content(root: &Path, name: &str) -> String {
        fs::read_to_string(root.join(KDAMONDS_DIR).join(name)).unwrap()
    }

    #[test]
    fn starts_reads_and_ends_monitor() {
        let root = tree();
        let root = root.path();
        let mut monitors = Monitors::start(root, &[4711]).unwrap();
        assert!(content(root, "nr_kdamonds").starts_with('1'));
        assert!(content(root, "0/contexts/0/targets/0/pid_target").starts_with("4711"));
        assert!(content(root, "0/state").starts_with("on"));
        let intervals = "0/contexts/0/monitoring_attrs/intervals";
        assert!(content(root, &format!("{intervals}/sample_us")).starts_with("5000"));
        for (name, most) in [("sz", "18446744073709551615"), ("nr_accesses", "20"), ("age", "4294967295")] {
            let pattern = format!("0/contexts/0/schemes/0/access_pattern/{name}/max");
            assert!(content(root, &pattern).starts_with(most), "{name}");
        }
        let another = Monitors::start(root, &[1]).unwrap_err();
        assert!(matches!(another, DamonError::Locked(_)), "{another}");
        let areas = monitors.areas(0).unwrap();
        let area = |start, accesses| MonitoredArea { start, end: start + 4096, accesses, age: 3 };
        assert_eq!(areas, [area(4096, 20), area(8192, 0)]);
        assert_eq!(monitors.thread(0), Some(77));
        drop(monitors);
        assert!(content(root, "0/state").starts_with("off"));
        assert!(content(root, "nr_kdamonds").starts_with('0'));
    }

    #[test]
    fn keeps_monitors_of_other_programs() {
        let root = tree();
        fs::write(root.path().join(KDAMONDS_DIR).join("nr_kdamonds"), "2\n").unwrap();
        let refused = Monitors::start(root.path(), &[1]).unwrap_err();
        assert!(matches!(refused, DamonError::InUse { count: 2, .. }), "{refused}");
        assert_eq!(content(root.path(), "nr_kdamonds"), "2\n");
        assert_eq!(content(root.path(), "0/state"), "off\n");
    }

    #[test]
    fn names_monitor_that_does_not_start() {
        let root = tree();
        let root = root.path();
        let kdamonds = root.join(KDAMONDS_DIR);
        let copied =
            std::process::Command::new("cp").arg("-r").args(["0", "1"]).current_dir(&kdamonds).status();
        assert!(copied.unwrap().success());
        let refuse = |at: u32| {
            let state = kdamonds.join(at.to_string()).join("state");
            fs::remove_file(&state).unwrap();
            fs::create_dir(&state).unwrap();
        };
        refuse(1);
        let mut monitors = Monitors::start(root, &[1, 2]).unwrap();
        assert_eq!(monitors.areas(0).unwrap().len(), 2);
        let failed = monitors.areas(1).unwrap_err().to_string();
        assert!(failed.contains("kdamonds/1/state: "), "{failed}");
        fs::remove_dir_all(kdamonds.join("0/contexts/0/schemes/0/tried_regions/9")).unwrap();
        fs::remove_dir_all(kdamonds.join("0/contexts/0/schemes/0/tried_regions/10")).unwrap();
        assert!(matches!(monitors.areas(0), Err(DamonError::Ended)), "a process without areas has ended");
        drop(monitors);
        refuse(0);
        let failed = Monitors::start(root, &[1, 2]).unwrap_err();
        assert!(matches!(failed, DamonError::File { .. }), "{failed}");
        assert!(content(root, "nr_kdamonds").starts_with('0'));
    }

    #[test]
    fn names_missing_kernel_feature() {
        let nothing = tempfile::tempdir().unwrap();
        let absent = Monitors::start(nothing.path(), &[1]).unwrap_err().to_string();
        assert!(absent.contains("Linux 6.2"), "{absent}");
        for (name, text, what) in [
            ("avail_operations", Some("paddr\n"), "vaddr"),
            ("schemes/0/tried_regions", None, "tried_regions"),
        ] {
            let root = tree();
            let path = root.path().join(KDAMONDS_DIR).join("0/contexts/0").join(name);
            match text {
                Some(text) => fs::write(path, text).unwrap(),
                None => fs::remove_dir_all(path).unwrap(),
            }
            let absent = Monitors::start(root.path(), &[1]).unwrap_err();
            assert!(absent.to_string().contains(&format!("has no {what} there")), "{absent}");
            assert!(content(root.path(), "nr_kdamonds").starts_with('0'));
        }
    }
}
