//! Random admissions and releases, from one death of the daemon to the next.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use fastrand::Rng;
use numaward_api as api;

use crate::{
    agreement::{self, knob_of},
    client::{ControlClient, RequestOutcome},
    daemon::{DaemonFolder, Death, RunningDaemon},
    workload::{Watch, WorkloadProcess},
};

/// Fault points that a round can reach; with enough kills, each is tried. Those of the creation of a journal are
/// reached only once, and are covered by the store's own tests.
const FAULT_POINTS: [&str; 14] = [
    "enforce.enable",
    "enforce.write",
    "enforce.written",
    "file.created",
    "file.older-removed",
    "file.previous-kept",
    "file.renamed",
    "file.synced",
    "guarantee.made",
    "guarantee.released",
    "guarantee.removed",
    "ledger.half-written",
    "ledger.saved",
    "ledger.written",
];
/// Maximum number of fault points until a kill. An admission and a release reach about 50.
const MAX_POINTS_TO_KILL: u32 = 150;
/// Maximum number of requests in a round, which is far more than necessary to reach any fault point.
const MAX_STEPS: u32 = 500;
/// Number of workload names for each kind of target, with or without a guarantee.
const MAX_NAMES: usize = 4;
/// Parent of cgroups that exist before their guarantee.
const CGROUP_PARENT: &str = "/sys/fs/cgroup/crash";

/// A workload with a guarantee.
struct GuaranteedWorkload {
    allocation: api::Allocation,
    workload: WorkloadProcess,
}

/// The last request, which was not answered.
enum Pending {
    Admission { name: String, workload: Option<WorkloadProcess> },
    Release { name: String, held: Box<GuaranteedWorkload> },
}

struct Script {
    home: DaemonFolder,
    client: ControlClient,
    random: Rng,
    watch: Watch,
    held: BTreeMap<String, GuaranteedWorkload>,
    pending: Option<Pending>,
    admitted: u32,
    released: u32,
    refused: u32,
}

/// Kills the daemon `kills` times, with random requests by `seed`. Returns a summary.
pub(crate) fn run(kills: u32, seed: u64) -> Result<String> {
    let home = DaemonFolder::new("/run/crash-check")?;
    fs::create_dir(CGROUP_PARENT).with_context(|| CGROUP_PARENT.to_owned())?;
    let mut script = Script {
        client: home.client(),
        home,
        random: Rng::with_seed(seed),
        watch: Watch::start(),
        held: BTreeMap::new(),
        pending: None,
        admitted: 0,
        released: 0,
        refused: 0,
    };
    let mut deaths: BTreeMap<String, u32> = BTreeMap::new();
    for kill in 0..kills {
        let death = script.choose(kill, kills);
        let point = script.life(&death).with_context(|| {
            let words = script.home.log_tail();
            format!("seed {seed}, kill {kill} ({death:?}); the daemon's last words:\n{words}\n")
        })?;
        *deaths.entry(point).or_default() += 1;
    }
    script.end().with_context(|| format!("seed {seed}, after all kills"))?;
    let looks = script.watch.end()?;
    ensure!(looks > u64::from(kills), "workloads were looked at only {looks} times");
    if kills >= 4 * u32::try_from(FAULT_POINTS.len())? {
        let missing: Vec<_> = FAULT_POINTS.iter().filter(|point| !deaths.contains_key(**point)).collect();
        ensure!(missing.is_empty(), "no death at {missing:?}");
    }
    let points: Vec<_> = deaths.iter().map(|(point, count)| format!("{point} {count}")).collect();
    let Script { admitted, released, refused, .. } = script;
    Ok(format!(
        "{kills} kills ({}), {admitted} admitted, {released} released, {refused} refused, workloads looked at {looks} times",
        points.join(", ")
    ))
}

impl Script {
    /// Chooses each fault point in turn, then random ones and kills from outside.
    fn choose(&mut self, kill: u32, kills: u32) -> Death {
        let random = &mut self.random;
        let in_turn = usize::try_from(kill).ok().and_then(|kill| FAULT_POINTS.get(kill / 2));
        match in_turn {
            Some(point) if kills as usize >= 4 * FAULT_POINTS.len() => {
                // After a start, the script waits for the file, which may not be written again for a long time.
                let times = if point.starts_with("file.") { 1 } else { random.u32(1..=6) };
                Death::At(format!("{point}@{times}"))
            }
            _ if kill % 4 == 3 => Death::After(Duration::from_millis(random.u64(0..=1000))),
            _ => Death::At(format!("any@{}", random.u32(1..=MAX_POINTS_TO_KILL))),
        }
    }

    /// Runs a round. Returns the fault point at which the daemon died.
    fn life(&mut self, death: &Death) -> Result<String> {
        let mut daemon = RunningDaemon::start(&self.home, death)?;
        if daemon.comes_up(&self.client)? {
            // If the daemon dies meanwhile, the next round checks its state instead.
            if let Some(held) = self.ask()?
                && self.check_guarantees(&held)?
            {
                let mut steps = 0;
                while self.step()? {
                    self.watch.check()?;
                    steps += 1;
                    ensure!(steps < MAX_STEPS, "{steps} steps, and the daemon still lives");
                }
            }
        }
        let point = daemon.dies()?;
        self.watch.check()?;
        Ok(point)
    }

    /// Runs a round without a death: releases everything, and checks that nothing is left.
    fn end(&mut self) -> Result<()> {
        let mut daemon = RunningDaemon::start(&self.home, &Death::Never)?;
        ensure!(daemon.comes_up(&self.client)?, "the daemon did not come up: {}", self.home.log_tail());
        let held = self.ask()?.context("the daemon does not answer")?;
        ensure!(self.check_guarantees(&held)?, "the daemon died");
        self.watch.check()?;
        for name in self.held.keys().cloned().collect::<Vec<_>>() {
            ensure!(self.release(&name)?, "the daemon died");
        }
        let held = self.ask()?.context("the daemon does not answer")?;
        ensure!(self.check_guarantees(&held)?, "the daemon died");
        ensure!(held.allocations.is_empty(), "{held:?}");
        daemon.stop()
    }

    /// Returns the guarantees; `None` if the daemon is dead.
    fn ask(&self) -> Result<Option<api::Allocations>> {
        self.client.allocations()
    }

    /// Checks after a start that answered requests have taken effect, and an unanswered one completely or not at all.
    /// Returns false if the daemon died.
    fn check_guarantees(&mut self, now: &api::Allocations) -> Result<bool> {
        let find = |name: &str| now.allocations.iter().find(|held| held.name == name);
        match self.pending.take() {
            None => {}
            Some(Pending::Admission { name, workload }) => match (find(&name), workload) {
                (Some(held), workload) => {
                    self.admitted += 1;
                    let workload =
                        workload.map_or_else(|| WorkloadProcess::start(held.directory.as_ref()), Ok)?;
                    self.hold(api::Allocation::clone(held), workload);
                }
                (None, Some(workload)) => is_untouched(&name, workload)?,
                (None, None) => {}
            },
            Some(Pending::Release { name, held: before }) => match find(&name) {
                Some(held) => {
                    // A command has ended, but the daemon does not know it, so another process takes its place.
                    let workload = match held.target {
                        api::Target::Exec => WorkloadProcess::start(held.directory.as_ref())?,
                        _ => before.workload,
                    };
                    is_same(&before.allocation, held)?;
                    self.hold(api::Allocation::clone(held), workload);
                }
                None => self.note_released(&name, *before)?,
            },
        }
        let names: BTreeSet<_> = now.allocations.iter().map(|held| &held.name).collect();
        let expected: BTreeSet<_> = self.held.keys().collect();
        ensure!(names == expected, "the daemon holds {names:?}, should hold {expected:?}");
        for (name, held) in &self.held {
            is_same(&held.allocation, find(name).context("was found before")?)?;
        }
        let lives = agreement::check(&self.home, now)?;
        let mut claimed = 0;
        for held in now.allocations.iter().filter(|held| held.target != api::Target::Exec) {
            claimed += knob_of(held.directory.as_ref(), "memory.min")?.parse::<u64>()?;
        }
        let found: u64 = knob_of(CGROUP_PARENT.as_ref(), "memory.min")?.parse()?;
        ensure!(found == claimed, "{CGROUP_PARENT} has memory.min {found}, its descendants claim {claimed}");
        Ok(lives)
    }

    /// Makes a random admission or release. Returns false if the daemon is dead.
    fn step(&mut self) -> Result<bool> {
        let number = self.random.usize(0..MAX_NAMES);
        let name = if self.random.bool() { format!("command{number}") } else { format!("batch{number}") };
        if self.held.contains_key(&name) { self.release(&name) } else { self.admit(&name) }
    }

    fn admit(&mut self, name: &str) -> Result<bool> {
        let (target, workload) = if name.starts_with("batch") {
            let dir = existing_cgroup(name);
            fs::create_dir_all(&dir)?;
            let workload = WorkloadProcess::start(&dir)?;
            (api::Target::Cgroup(format!("/crash/{name}/work")), Some(workload))
        } else {
            (api::Target::Exec, None)
        };
        let asked = serde_json::from_value(serde_json::json!({
            "name": name,
            "target": target,
            "cpus": self.random.u32(1..=2),
            "memory": format!("{}Mi", self.random.u32(16..=48)),
        }))?;
        match self.client.admit(&asked)? {
            RequestOutcome::Done(held) => {
                let workload =
                    workload.map_or_else(|| WorkloadProcess::start(held.directory.as_ref()), Ok)?;
                self.hold(*held, workload);
                self.admitted += 1;
                Ok(true)
            }
            RequestOutcome::Refused => {
                self.refused += 1;
                workload.map_or(Ok(()), |workload| is_untouched(name, workload))?;
                Ok(true)
            }
            RequestOutcome::None => {
                self.pending = Some(Pending::Admission { name: name.to_owned(), workload });
                Ok(false)
            }
            RequestOutcome::Unknown => bail!("{name}: an admission of something unknown"),
        }
    }

    fn hold(&mut self, allocation: api::Allocation, workload: WorkloadProcess) {
        self.watch.add(&allocation, &workload);
        self.held.insert(allocation.name.clone(), GuaranteedWorkload { allocation, workload });
    }

    fn release(&mut self, name: &str) -> Result<bool> {
        self.watch.remove(name);
        let mut held = self.held.remove(name).context("not held")?;
        if held.allocation.target == api::Target::Exec {
            held.workload.end()?;
        }
        match self.client.release(name)? {
            // The daemon noticed the end of the command before the release.
            RequestOutcome::Unknown if held.allocation.target == api::Target::Exec => {}
            RequestOutcome::Done(()) => {}
            RequestOutcome::None => {
                self.pending = Some(Pending::Release { name: name.to_owned(), held: Box::new(held) });
                return Ok(false);
            }
            RequestOutcome::Refused | RequestOutcome::Unknown => bail!("{name}: the daemon does not know it"),
        }
        self.note_released(name, held)?;
        Ok(true)
    }

    fn note_released(&mut self, name: &str, held: GuaranteedWorkload) -> Result<()> {
        self.released += 1;
        match held.allocation.target {
            api::Target::Exec => {
                let dir = Path::new(&held.allocation.directory);
                ensure!(!dir.exists(), "{}: left after its release", dir.display());
                Ok(())
            }
            _ => is_untouched(name, held.workload),
        }
    }
}

/// Returns the cgroup of a workload that runs before it has a guarantee.
fn existing_cgroup(name: &str) -> PathBuf {
    Path::new(CGROUP_PARENT).join(name).join("work")
}

/// Checks that a restart or an answer has changed nothing.
fn is_same(before: &api::Allocation, now: &api::Allocation) -> Result<()> {
    let what = |held: &api::Allocation| {
        (
            held.cpus.clone(),
            held.nodes.clone(),
            held.memory.clone(),
            held.cgroup.clone(),
            held.settings.clone(),
        )
    };
    ensure!(what(before) == what(now), "{}: was {:?}, is {:?}", before.name, what(before), what(now));
    Ok(())
}

/// Checks that a workload without a guarantee has its original values, and ends it.
fn is_untouched(name: &str, workload: WorkloadProcess) -> Result<()> {
    let dir = existing_cgroup(name);
    let parent = dir.parent().context("it has a parent")?;
    let all = |what: &str| fs::read_to_string(format!("/sys/devices/system/{what}/online"));
    let expected = [
        (dir.as_path(), "memory.min", "0".to_owned()),
        (&dir, "memory.max", "max".to_owned()),
        (&dir, "cpuset.cpus.effective", all("cpu")?),
        (&dir, "cpuset.mems.effective", all("node")?),
        (parent, "memory.min", "0".to_owned()),
    ];
    for (dir, knob, wanted) in expected {
        // The parent has not enabled the controller, so there was no guarantee.
        if !dir.join(knob).exists() {
            continue;
        }
        let found = knob_of(dir, knob)?;
        ensure!(found == wanted.trim(), "{}: {knob} is {found}, was {wanted}", dir.display());
    }
    let allowed = workload.allowed()?;
    ensure!(allowed == [all("cpu")?.trim(), all("node")?.trim()], "{name} may use {allowed:?}");
    drop(workload);
    remove(&dir)?;
    remove(parent)
}

/// Removes a cgroup after its last process has ended.
fn remove(dir: &Path) -> Result<()> {
    let mut tries = 0;
    while let Err(error) = fs::remove_dir(dir) {
        tries += 1;
        ensure!(tries < 1000, "{}: {error}", dir.display());
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
