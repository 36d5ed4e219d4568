//! The kernel's monitor of data accesses (DAMON), by its files in sysfs
//! (<https://docs.kernel.org/admin-guide/mm/damon/usage.html>).
//!
//! Each process gets a monitor of its own, a thread called `kdamond`: the files with what was found do not name the
//! process.

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

/// Where the monitors are, below the root.
const KDAMONDS: &str = "sys/kernel/mm/damon/admin/kdamonds";
/// How often a page of each area is looked at, and how often the looks are added up, in microseconds. The kernel's defaults.
const SAMPLE: u32 = 5_000;
pub(super) const AGGREGATE: u32 = 100_000;
/// Looks that are added up.
pub(super) const LOOKS: u32 = AGGREGATE / SAMPLE;
/// How many areas a process has, at least and at most. The kernel's defaults.
const AREAS: [(&str, u32); 2] = [("min", 10), ("max", 1000)];
/// While a monitor is at its files, the kernel refuses others: how often, and after which time, that is tried again.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(10);
/// The most of each that an area may have so that the scheme counts it: all do.
const PATTERN: [(&str, u64); 3] = [("sz", u64::MAX), ("nr_accesses", LOOKS as u64), ("age", u32::MAX as u64)];

/// Why nothing can be monitored.
#[derive(Debug, thiserror::Error)]
pub(super) enum DamonError {
    /// This kernel has none, or one that is too old.
    #[error(
        "{}: this kernel has no {what} there: --hot takes Linux 6.2 or newer with CONFIG_DAMON_SYSFS and CONFIG_DAMON_VADDR",
        path.display()
    )]
    Absent { path: PathBuf, what: &'static str },
    /// Somebody else has monitors.
    #[error(
        "{}: somebody else uses DAMON (monitors: {count}), and it serves one at a time; if the one who made them is gone, \
         write off into the file state of each, and then 0 into this one",
        path.display()
    )]
    InUse { path: PathBuf, count: usize },
    /// So does another numaward.
    #[error("{}: another numaward watches a workload on this host: wait until it has ended", _0.display())]
    Locked(PathBuf),
    /// What was watched is no longer there.
    #[error("it has ended")]
    Ended,
    /// A file cannot be read or written.
    #[error("{}: {source}{}", path.display(), hint(source))]
    File { path: PathBuf, source: io::Error },
    /// A file has something else than a number.
    #[error("{}: {text:?} is no number", path.display())]
    NoNumber { path: PathBuf, text: String },
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => "; --hot takes root on the workload's own host",
        io::ErrorKind::ReadOnlyFilesystem => "; --hot takes a /sys that can be written",
        io::ErrorKind::ResourceBusy => {
            "; the kernel uses DAMON itself if one of \
             /sys/module/{damon_stat,damon_reclaim,damon_lru_sort}/parameters/enabled is Y: write N there"
        }
        _ => "",
    }
}

/// An area of a process's memory, whose pages are accessed about equally often.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Accessed {
    pub(super) start: u64,
    pub(super) end: u64,
    /// In how many of [`LOOKS`] the page that was looked at had been accessed.
    pub(super) looks: u32,
    /// For how many aggregations this has been so.
    pub(super) age: u32,
}

/// Monitors of processes. They go when this is dropped.
#[derive(Debug)]
pub(super) struct Monitors {
    kdamonds: PathBuf,
    /// By monitor, whether it has started, or why not.
    started: Vec<Result<(), DamonError>>,
    /// Held locked: another numaward may come at the same time.
    _lock: File,
}

impl Monitors {
    /// Makes a monitor for each of some processes, of which one at least has to start.
    pub(super) fn start(root: &Path, processes: &[u32]) -> Result<Self, DamonError> {
        let kdamonds = root.join(KDAMONDS);
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
        if !fs::read_to_string(&operations).is_ok_and(|all| all.lines().any(|one| one == "vaddr")) {
            return Err(DamonError::Absent { path: operations, what: "vaddr" });
        }
        write(&context.join("operations"), "vaddr")?;
        let attributes = context.join("monitoring_attrs");
        for (name, micros) in [("sample_us", SAMPLE), ("aggr_us", AGGREGATE)] {
            write(&attributes.join("intervals").join(name), &micros)?;
        }
        for (name, areas) in AREAS {
            write(&attributes.join("nr_regions").join(name), &areas)?;
        }
        write(&context.join("targets/nr_targets"), &1)?;
        write(&context.join("targets/0/pid_target"), &process)?;
        // Areas can be read where a scheme has them: one that only counts.
        write(&context.join("schemes/nr_schemes"), &1)?;
        let scheme = context.join("schemes/0");
        if !scheme.join("tried_regions").exists() {
            return Err(DamonError::Absent { path: scheme, what: "tried_regions" });
        }
        write(&scheme.join("action"), "stat")?;
        for (name, most) in PATTERN {
            write(&scheme.join("access_pattern").join(name).join("max"), &most)?;
        }
        Ok(())
    }

    /// What the monitor of a process knows now. Waits for the next time that looks are added up.
    pub(super) fn areas(&mut self, at: usize) -> Result<Vec<Accessed>, DamonError> {
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
            // Beside the areas, newer kernels have files there.
            if !dir.is_dir() {
                continue;
            }
            areas.push(Accessed {
                start: read(&dir.join("start"))?,
                end: read(&dir.join("end"))?,
                looks: read(&dir.join("nr_accesses"))?,
                age: read(&dir.join("age"))?,
            });
        }
        areas.sort_by_key(|area| area.start);
        if areas.is_empty() { Err(DamonError::Ended) } else { Ok(areas) }
    }

    /// The thread that monitors; `None` if it has ended, with its process.
    pub(super) fn thread(&self, at: usize) -> Option<i32> {
        read(&self.dir(at).join("pid")).ok().filter(|&thread| thread > 0)
    }
}

impl Drop for Monitors {
    fn drop(&mut self) {
        for at in 0..self.started.len() {
            // One that has ended, or was never on, refuses.
            let _ = write(&self.dir(at).join("state"), "off");
        }
        if let Err(error) = write(&self.kdamonds.join("nr_kdamonds"), &0) {
            eprintln!("numaward: DAMON's monitors stay: {error}");
        }
    }
}

fn write(path: &Path, value: &(impl ToString + ?Sized)) -> Result<(), DamonError> {
    let text = value.to_string();
    unless_busy(path, || File::options().write(true).open(path)?.write_all(text.as_bytes()))
}

fn read<T: FromStr>(path: &Path) -> Result<T, DamonError> {
    let text = unless_busy(path, || fs::read_to_string(path))?;
    let text = text.trim();
    text.parse().map_err(|_| DamonError::NoNumber { path: path.to_owned(), text: text.to_owned() })
}

fn unless_busy<T>(path: &Path, mut work: impl FnMut() -> io::Result<T>) -> Result<T, DamonError> {
    let mut tries = 0;
    loop {
        tries += 1;
        match work() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && tries < TRIES => {
                thread::sleep(PAUSE);
            }
            done => return done.map_err(|source| DamonError::File { path: path.to_owned(), source }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up tree in the state in which one monitor was made. Its files only keep what is written.
    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let kdamonds = root.path().join(KDAMONDS);
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
        for (at, start, end, looks) in [(10, 8192, 12288, 0), (9, 4096, 8192, 20)] {
            let dir = kdamonds.join(format!("{context}/schemes/0/tried_regions/{at}"));
            fs::create_dir_all(&dir).unwrap();
            for (name, value) in [("start", start), ("end", end), ("nr_accesses", looks), ("age", 3)] {
                fs::write(dir.join(name), format!("{value}\n")).unwrap();
            }
        }
        root
    }

    fn shown(root: &Path, name: &str) -> String {
        fs::read_to_string(root.join(KDAMONDS).join(name)).unwrap()
    }

    #[test]
    fn a_monitor_is_made_read_and_taken_away() {
        let root = tree();
        let root = root.path();
        let mut monitors = Monitors::start(root, &[4711]).unwrap();
        assert!(shown(root, "nr_kdamonds").starts_with('1'));
        assert!(shown(root, "0/contexts/0/targets/0/pid_target").starts_with("4711"));
        assert!(shown(root, "0/state").starts_with("on"));
        let intervals = "0/contexts/0/monitoring_attrs/intervals";
        assert!(shown(root, &format!("{intervals}/sample_us")).starts_with("5000"));
        for (name, most) in [("sz", "18446744073709551615"), ("nr_accesses", "20"), ("age", "4294967295")] {
            let pattern = format!("0/contexts/0/schemes/0/access_pattern/{name}/max");
            assert!(shown(root, &pattern).starts_with(most), "{name}");
        }
        let another = Monitors::start(root, &[1]).unwrap_err();
        assert!(matches!(another, DamonError::Locked(_)), "{another}");
        let areas = monitors.areas(0).unwrap();
        let area = |start, looks| Accessed { start, end: start + 4096, looks, age: 3 };
        assert_eq!(areas, [area(4096, 20), area(8192, 0)]);
        assert_eq!(monitors.thread(0), Some(77));
        drop(monitors);
        assert!(shown(root, "0/state").starts_with("off"));
        assert!(shown(root, "nr_kdamonds").starts_with('0'));
    }

    #[test]
    fn monitors_of_somebody_else_are_left_alone() {
        let root = tree();
        fs::write(root.path().join(KDAMONDS).join("nr_kdamonds"), "2\n").unwrap();
        let refused = Monitors::start(root.path(), &[1]).unwrap_err();
        assert!(matches!(refused, DamonError::InUse { count: 2, .. }), "{refused}");
        assert_eq!(shown(root.path(), "nr_kdamonds"), "2\n");
        assert_eq!(shown(root.path(), "0/state"), "off\n");
    }

    #[test]
    fn one_that_does_not_start_is_named_and_without_any_nothing_stays() {
        let root = tree();
        let root = root.path();
        let kdamonds = root.join(KDAMONDS);
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
        assert!(shown(root, "nr_kdamonds").starts_with('0'));
    }

    #[test]
    fn what_a_kernel_does_not_have_is_named_and_nothing_stays() {
        let nothing = tempfile::tempdir().unwrap();
        let absent = Monitors::start(nothing.path(), &[1]).unwrap_err().to_string();
        assert!(absent.contains("Linux 6.2"), "{absent}");
        for (name, text, what) in [
            ("avail_operations", Some("paddr\n"), "vaddr"),
            ("schemes/0/tried_regions", None, "tried_regions"),
        ] {
            let root = tree();
            let path = root.path().join(KDAMONDS).join("0/contexts/0").join(name);
            match text {
                Some(text) => fs::write(path, text).unwrap(),
                None => fs::remove_dir_all(path).unwrap(),
            }
            let absent = Monitors::start(root.path(), &[1]).unwrap_err();
            assert!(absent.to_string().contains(&format!("has no {what} there")), "{absent}");
            assert!(shown(root.path(), "nr_kdamonds").starts_with('0'));
        }
    }
}
