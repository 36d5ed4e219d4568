//! Admits and releases at random, from one death of the daemon to the next.

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
    client::{Answer, Client},
    daemon::{Daemon, Death, Home},
    workload::{Watch, Workload},
};

/// The fault points that a life passes. Every one is tried where there are kills enough. Those of a journal that is
/// made are passed once for all, and are a matter of the store's own tests.
const POINTS: [&str; 14] = [
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
/// An admission and a release pass some 50 points.
const FARTHEST: u32 = 150;
/// Far more than it takes to come to any point.
const MOST_STEPS: u32 = 500;
/// Names that are in use or not, so many of each kind of target.
const NAMES: usize = 4;
/// Where cgroups are that exist before their guarantee.
const GROUND: &str = "/sys/fs/cgroup/crash";

/// A workload with a guarantee.
struct Held {
    allocation: api::Allocation,
    workload: Workload,
}

/// What was asked for last, and not answered.
enum Pending {
    Admission { name: String, workload: Option<Workload> },
    Release { name: String, held: Box<Held> },
}

struct Script {
    home: Home,
    client: Client,
    random: Rng,
    watch: Watch,
    held: BTreeMap<String, Held>,
    pending: Option<Pending>,
    admitted: u32,
    released: u32,
    refused: u32,
}

/// Kills the daemon so often; the script follows from `seed`. Returns what was seen.
pub(crate) fn run(kills: u32, seed: u64) -> Result<String> {
    let home = Home::new("/run/crash-check")?;
    fs::create_dir(GROUND).with_context(|| GROUND.to_owned())?;
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
    if kills >= 4 * u32::try_from(POINTS.len())? {
        let missing: Vec<_> = POINTS.iter().filter(|point| !deaths.contains_key(**point)).collect();
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
    /// Every fault point in turn first; then any, and from outside.
    fn choose(&mut self, kill: u32, kills: u32) -> Death {
        let random = &mut self.random;
        let in_turn = usize::try_from(kill).ok().and_then(|kill| POINTS.get(kill / 2));
        match in_turn {
            Some(point) if kills as usize >= 4 * POINTS.len() => {
                // After a start the file is waited for, and then may not be written for long.
                let times = if point.starts_with("file.") { 1 } else { random.u32(1..=6) };
                Death::At(format!("{point}@{times}"))
            }
            _ if kill % 4 == 3 => Death::After(Duration::from_millis(random.u64(0..=1000))),
            _ => Death::At(format!("any@{}", random.u32(1..=FARTHEST))),
        }
    }

    /// A life of the daemon. Returns where it died.
    fn life(&mut self, death: &Death) -> Result<String> {
        let mut daemon = Daemon::start(&self.home, death)?;
        if daemon.comes_up(&self.client)? {
            // It may die meanwhile: then the next life is looked at instead.
            if let Some(held) = self.ask()?
                && self.settle(&held)?
            {
                let mut steps = 0;
                while self.step()? {
                    self.watch.check()?;
                    steps += 1;
                    ensure!(steps < MOST_STEPS, "{steps} steps, and the daemon still lives");
                }
            }
        }
        let point = daemon.dies()?;
        self.watch.check()?;
        Ok(point)
    }

    /// A life without a death: all is released, and nothing is left.
    fn end(&mut self) -> Result<()> {
        let mut daemon = Daemon::start(&self.home, &Death::Never)?;
        ensure!(daemon.comes_up(&self.client)?, "the daemon did not come up: {}", self.home.log_tail());
        let held = self.ask()?.context("the daemon does not answer")?;
        ensure!(self.settle(&held)?, "the daemon died");
        self.watch.check()?;
        for name in self.held.keys().cloned().collect::<Vec<_>>() {
            ensure!(self.release(&name)?, "the daemon died");
        }
        let held = self.ask()?.context("the daemon does not answer")?;
        ensure!(self.settle(&held)?, "the daemon died");
        ensure!(held.allocations.is_empty(), "{held:?}");
        daemon.stop()
    }

    /// What the daemon says; none if it is dead.
    fn ask(&self) -> Result<Option<api::Allocations>> {
        self.client.allocations()
    }

    /// After a start: what was answered stands, what was not is there in whole or not at all. False if the daemon died.
    fn settle(&mut self, now: &api::Allocations) -> Result<bool> {
        let find = |name: &str| now.allocations.iter().find(|held| held.name == name);
        match self.pending.take() {
            None => {}
            Some(Pending::Admission { name, workload }) => match (find(&name), workload) {
                (Some(held), workload) => {
                    self.admitted += 1;
                    let workload = workload.map_or_else(|| Workload::start(held.directory.as_ref()), Ok)?;
                    self.hold(api::Allocation::clone(held), workload);
                }
                (None, Some(workload)) => is_untouched(&name, workload)?,
                (None, None) => {}
            },
            Some(Pending::Release { name, held: before }) => match find(&name) {
                Some(held) => {
                    // A command has ended; as nobody knows, another takes its place.
                    let workload = match held.target {
                        api::Target::Exec => Workload::start(held.directory.as_ref())?,
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
        let found: u64 = knob_of(GROUND.as_ref(), "memory.min")?.parse()?;
        ensure!(found == claimed, "{GROUND} has memory.min {found}, its descendants claim {claimed}");
        Ok(lives)
    }

    /// Admits or releases something. False if the daemon is dead.
    fn step(&mut self) -> Result<bool> {
        let number = self.random.usize(0..NAMES);
        let name = if self.random.bool() { format!("command{number}") } else { format!("batch{number}") };
        if self.held.contains_key(&name) { self.release(&name) } else { self.admit(&name) }
    }

    fn admit(&mut self, name: &str) -> Result<bool> {
        let (target, workload) = if name.starts_with("batch") {
            let dir = ground(name);
            fs::create_dir_all(&dir)?;
            let workload = Workload::start(&dir)?;
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
            Answer::Done(held) => {
                let workload = workload.map_or_else(|| Workload::start(held.directory.as_ref()), Ok)?;
                self.hold(*held, workload);
                self.admitted += 1;
                Ok(true)
            }
            Answer::Refused => {
                self.refused += 1;
                workload.map_or(Ok(()), |workload| is_untouched(name, workload))?;
                Ok(true)
            }
            Answer::None => {
                self.pending = Some(Pending::Admission { name: name.to_owned(), workload });
                Ok(false)
            }
            Answer::Unknown => bail!("{name}: an admission of something unknown"),
        }
    }

    fn hold(&mut self, allocation: api::Allocation, workload: Workload) {
        self.watch.add(&allocation, &workload);
        self.held.insert(allocation.name.clone(), Held { allocation, workload });
    }

    fn release(&mut self, name: &str) -> Result<bool> {
        self.watch.remove(name);
        let mut held = self.held.remove(name).context("not held")?;
        if held.allocation.target == api::Target::Exec {
            held.workload.end()?;
        }
        match self.client.release(name)? {
            // The daemon saw the command's end before it was asked.
            Answer::Unknown if held.allocation.target == api::Target::Exec => {}
            Answer::Done(()) => {}
            Answer::None => {
                self.pending = Some(Pending::Release { name: name.to_owned(), held: Box::new(held) });
                return Ok(false);
            }
            Answer::Refused | Answer::Unknown => bail!("{name}: the daemon does not know it"),
        }
        self.note_released(name, held)?;
        Ok(true)
    }

    fn note_released(&mut self, name: &str, held: Held) -> Result<()> {
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

/// The cgroup of a workload that runs before it has a guarantee.
fn ground(name: &str) -> PathBuf {
    Path::new(GROUND).join(name).join("work")
}

/// Nothing is different after a restart or an answer.
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

/// A workload without a guarantee has what it had before, and ends.
fn is_untouched(name: &str, workload: Workload) -> Result<()> {
    let dir = ground(name);
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
        // Its parent has not handed the controller down: there was no guarantee at all.
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

/// Removes a cgroup whose last process has just ended.
fn remove(dir: &Path) -> Result<()> {
    let mut tries = 0;
    while let Err(error) = fs::remove_dir(dir) {
        tries += 1;
        ensure!(tries < 1000, "{}: {error}", dir.display());
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
