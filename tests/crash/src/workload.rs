//! Workloads with guarantees, and the thread that checks that they are not disturbed.

use std::{
    fs,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use numaward_api as api;

/// The interval of checks of the workloads.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// Enters a cgroup, prints that it did, and waits until its standard input ends.
pub(crate) fn main(cgroup: &Path) -> Result<()> {
    let procs = cgroup.join("cgroup.procs");
    // Opened without `create`, so that a cgroup that is gone does not become a file.
    fs::OpenOptions::new()
        .write(true)
        .open(&procs)
        .and_then(|mut file| file.write_all(b"0"))
        .with_context(|| procs.display().to_string())?;
    println!("in");
    io::stdout().flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A process in a cgroup. The process ends on drop.
pub(crate) struct WorkloadProcess {
    child: Child,
}

impl WorkloadProcess {
    pub(crate) fn start(cgroup: &Path) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("workload")
            .arg(cgroup)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut said = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut said)?;
        let workload = Self { child };
        ensure!(said == "in\n", "the workload could not enter {}", cgroup.display());
        Ok(workload)
    }

    /// Returns the CPUs and nodes that the process may use, as the kernel reports them.
    pub(crate) fn allowed(&self) -> Result<[String; 2]> {
        allowed(self.child.id())
    }

    /// Ends the process, and waits for its end.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for WorkloadProcess {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the CPUs and nodes that a process may use.
fn allowed(pid: u32) -> Result<[String; 2]> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).with_context(|| path.clone())?;
    let find = |key: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(":\t"));
        value.map(str::to_owned).with_context(|| format!("{path} has no {key}"))
    };
    Ok([find("Cpus_allowed_list")?, find("Mems_allowed_list")?])
}

/// The CPUs and nodes that a workload must be able to use.
struct ExpectedSets {
    name: String,
    pid: u32,
    dir: PathBuf,
    cpus: String,
    nodes: String,
}

impl ExpectedSets {
    fn holds(&self) -> Result<()> {
        let knob = |file: &str| {
            let path = self.dir.join(file);
            fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        let (found, wanted) = (allowed(self.pid)?, [&self.cpus, &self.nodes]);
        ensure!(found.each_ref() == wanted, "{} may use {found:?}, the guarantee is {wanted:?}", self.name);
        for (what, wanted) in [("cpuset.cpus", &self.cpus), ("cpuset.mems", &self.nodes)] {
            let found = knob(what)?;
            ensure!(
                found.trim() == wanted,
                "{}: {what} is {}, the guarantee is {wanted}",
                self.name,
                found.trim()
            );
        }
        Ok(())
    }
}

/// Thread that checks all workloads with a guarantee, including when there is no daemon.
pub(crate) struct Watch {
    expected: Arc<Mutex<Vec<ExpectedSets>>>,
    stop: Arc<AtomicBool>,
    looking: Option<JoinHandle<Result<u64>>>,
}

fn lock(expected: &Mutex<Vec<ExpectedSets>>) -> MutexGuard<'_, Vec<ExpectedSets>> {
    expected.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    pub(crate) fn start() -> Self {
        let expected: Arc<Mutex<Vec<ExpectedSets>>> = Arc::default();
        let stop = Arc::new(AtomicBool::new(false));
        let looking = {
            let (expected, stop) = (Arc::clone(&expected), Arc::clone(&stop));
            thread::spawn(move || {
                let mut looks = 0;
                while !stop.load(Ordering::Relaxed) {
                    for expected in lock(&expected).iter() {
                        expected.holds().context("a running workload was disturbed")?;
                        looks += 1;
                    }
                    thread::sleep(CHECK_INTERVAL);
                }
                Ok(looks)
            })
        };
        Self { expected, stop, looking: Some(looking) }
    }

    /// Checks a workload from now on.
    pub(crate) fn add(&self, held: &api::Allocation, workload: &WorkloadProcess) {
        lock(&self.expected).push(ExpectedSets {
            name: held.name.clone(),
            pid: workload.child.id(),
            dir: PathBuf::from(&held.directory),
            cpus: held.cpus.clone(),
            nodes: held.nodes.clone(),
        });
    }

    /// Stops the checks of a workload, before its guarantee changes.
    pub(crate) fn remove(&self, name: &str) {
        lock(&self.expected).retain(|expected| expected.name != name);
    }

    /// Returns an error if a workload was disturbed.
    pub(crate) fn check(&mut self) -> Result<()> {
        if self.looking.as_ref().is_some_and(JoinHandle::is_finished) { self.end().map(drop) } else { Ok(()) }
    }

    /// Stops the thread, and returns the number of checks.
    pub(crate) fn end(&mut self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let looking = self.looking.take().context("the thread has ended")?;
        looking.join().map_err(|_| anyhow!("the looking thread panicked"))?
    }
}
