//! Checks of the cgroupfs backend, of the knob watch, and of drift.

use std::{
    fs,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use numaward_cgroup::{
    CgroupPath, KnobEvent, KnobWatch,
    knob::{Knob, Limit, Partition},
};
use numaward_enforce::{
    AppliedSettings, ConflictBackoff, ConflictPolicy, DriftCause, DriftVerdict, EnforceError,
    EnforcementReport, Enforcer, EnforcerOptions, Migration, MigrationState, SettingsChange,
};
use numaward_model::Settings;
use numaward_topology::{Bytes, HugepageSize, NodeId};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::{check::Check, child::ChildProcess};

pub(crate) const ROOT: &str = "/sys/fs/cgroup";

pub(crate) const ALL: &[Check] = &[
    ("knobs", knobs),
    ("ancestors", ancestors),
    ("migration", migration),
    ("migration-first", first_migration),
    ("never-empty-never-wider", never_wider),
    ("partition", partition),
    ("partition-nested", nested_partition),
    ("partition-refused", refused_partition),
    ("sibling-partition", sibling_partition),
    ("watch", watch),
    ("fight", fight),
    ("gone", gone),
    ("refused", refused),
    ("many", many),
];

/// A subtree for a check, which is removed on drop.
pub(crate) struct TestSubtree {
    pub(crate) enforcer: Enforcer,
    top: PathBuf,
}

impl TestSubtree {
    pub(crate) fn new(top: &str) -> Result<Self> {
        let top = Path::new(ROOT).join(top);
        fs::create_dir(&top)?;
        Ok(Self { enforcer: Enforcer::new(ROOT.into(), None, options()?), top })
    }

    pub(crate) fn apply(
        &self,
        applied: &AppliedSettings,
        change: &SettingsChange,
    ) -> Result<(AppliedSettings, EnforcementReport)> {
        apply(&self.enforcer, applied, change)
    }

    fn hold(
        &self,
        applied: &AppliedSettings,
        cgroup: &str,
        settings: Settings,
    ) -> Result<(AppliedSettings, EnforcementReport)> {
        self.apply(applied, &SettingsChange::Hold(path(cgroup)?, settings))
    }

    fn release(&self, applied: &AppliedSettings, cgroup: &str) -> Result<AppliedSettings> {
        Ok(self.apply(applied, &SettingsChange::Release(path(cgroup)?))?.0)
    }
}

impl Drop for TestSubtree {
    fn drop(&mut self) {
        // A killed process leaves its cgroup with a short delay.
        for _ in 0..50 {
            if remove(&self.top).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        println!("note: {} cannot be removed", self.top.display());
    }
}

/// Removes a cgroup and those below it. Partitions end first: the kernel gives the CPUs of a removed one back only
/// after `rmdir` has returned (`css_killed_work_fn` in kernel/cgroup/cgroup.c), and the next check needs them.
fn remove(dir: &Path) -> std::io::Result<()> {
    let partition = dir.join("cpuset.cpus.partition");
    if partition.exists() {
        fs::write(partition, "member")?;
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

pub(crate) fn options() -> Result<EnforcerOptions> {
    let possible = |what| fs::read_to_string(format!("/sys/devices/system/{what}/possible"));
    Ok(EnforcerOptions::new(possible("cpu")?.parse()?, possible("node")?.parse()?))
}

/// Plans and executes a change, and checks that no writes remain.
pub(crate) fn apply(
    enforcer: &Enforcer,
    applied: &AppliedSettings,
    change: &SettingsChange,
) -> Result<(AppliedSettings, EnforcementReport)> {
    let plan = enforcer.plan(applied, change)?;
    let report = enforcer.execute(&plan).map_err(|failure| anyhow!("{failure}"))?;
    let outcome = plan.outcome_of(&report);
    let left = enforcer.plan(&outcome, &SettingsChange::Upkeep)?;
    ensure!(left.steps().len() == report.owed.len(), "left to do: {:?}", left.steps());
    Ok((outcome, report))
}

pub(crate) fn path(text: &str) -> Result<CgroupPath> {
    Ok(text.parse()?)
}

fn dir(cgroup: &str) -> Result<PathBuf> {
    Ok(path(cgroup)?.dir(Path::new(ROOT)))
}

fn make(cgroup: &str) -> Result<PathBuf> {
    let dir = dir(cgroup)?;
    fs::create_dir_all(&dir)?;
    Ok(dir)
}

pub(crate) fn get(cgroup: &str, file: &str) -> Result<String> {
    let path = dir(cgroup)?.join(file);
    Ok(fs::read_to_string(&path).with_context(|| path.display().to_string())?.trim().to_owned())
}

fn write_file(cgroup: &str, file: &str, value: &str) -> Result<()> {
    let path = dir(cgroup)?.join(file);
    fs::write(&path, value).with_context(|| format!("{} = {value}", path.display()))
}

pub(crate) fn expect(what: &str, found: &str, wanted: &str) -> Result<()> {
    ensure!(found == wanted, "{what} is {found:?}, should be {wanted:?}");
    Ok(())
}

pub(crate) fn pinned(cpus: &str, mems: &str) -> Result<Settings> {
    Ok(Settings { cpus: Some(cpus.parse()?), mems: Some(mems.parse()?), ..Settings::default() })
}

pub(crate) fn mib(count: u64) -> Limit {
    Limit::Bytes(Bytes::mib(count))
}

pub(crate) fn bytes(mib: u64) -> String {
    (mib << 20).to_string()
}

/// Writes and restores every knob of a nested cgroup with a process.
fn knobs() -> Result<String> {
    let ground = TestSubtree::new("check-knobs")?;
    let leaf = make("/check-knobs/a/b")?;
    let process = ChildProcess::holding(4, &leaf)?;
    let settings = Settings {
        memory_min: Some(Limit::Bytes(Bytes(10_000_000))),
        memory_low: Some(mib(16)),
        memory_high: Some(mib(64)),
        memory_max: Some(mib(96)),
        hugetlb: [(HugepageSize(Bytes::mib(2)), Limit::Bytes(Bytes(5_000_000)))].into(),
        ..pinned("2-3", "1")?
    };
    let (applied, _) = ground.hold(&AppliedSettings::default(), "/check-knobs/a/b", settings)?;
    for (file, wanted) in [
        ("cpuset.cpus", "2-3"),
        ("cpuset.cpus.effective", "2-3"),
        ("cpuset.mems", "1"),
        ("memory.min", "9998336"),
        ("memory.low", "16777216"),
        ("memory.high", "67108864"),
        ("memory.max", "100663296"),
        ("hugetlb.2MB.max", "4194304"),
    ] {
        expect(file, &get("/check-knobs/a/b", file)?, wanted)?;
    }
    expect("Cpus_allowed_list", &process.status("Cpus_allowed_list")?, "2-3")?;
    expect("Mems_allowed_list", &process.status("Mems_allowed_list")?, "1")?;
    ensure!(ground.enforcer.drift(&applied, &path("/check-knobs/a/b")?)?.is_empty(), "drift");

    let applied = ground.release(&applied, "/check-knobs/a/b")?;
    ensure!(applied.is_empty(), "{applied:?}");
    expect("Cpus_allowed_list", &process.status("Cpus_allowed_list")?, "0-3")?;
    expect("Mems_allowed_list", &process.status("Mems_allowed_list")?, "0-1")?;
    for (file, wanted) in [
        ("memory.min", "0"),
        ("memory.low", "0"),
        ("memory.high", "max"),
        ("memory.max", "max"),
        ("hugetlb.2MB.max", "max"),
    ] {
        expect(file, &get("/check-knobs/a/b", file)?, wanted)?;
    }
    let left = (get("/check-knobs/a/b", "cpuset.cpus")?, get("/check-knobs/a/b", "cpuset.mems")?);

    // Without processes, the empty set is restored.
    drop(process);
    make("/check-knobs/empty")?;
    let (applied, _) = ground.hold(&AppliedSettings::default(), "/check-knobs/empty", pinned("1", "0")?)?;
    ground.release(&applied, "/check-knobs/empty")?;
    expect("cpuset.cpus", &get("/check-knobs/empty", "cpuset.cpus")?, "")?;
    Ok(format!("released with tasks: cpuset.cpus={:?} cpuset.mems={:?}", left.0, left.1))
}

fn ancestors() -> Result<String> {
    let ground = TestSubtree::new("check-ancestors")?;
    make("/check-ancestors/a/b")?;
    make("/check-ancestors/a/c")?;
    make("/check-ancestors/other")?;
    let protected =
        |min| Settings { memory_min: Some(mib(min)), memory_low: Some(mib(2 * min)), ..Settings::default() };
    let all = |file: &str| -> Result<String> {
        let cgroups = ["/check-ancestors", "/check-ancestors/a", "/check-ancestors/a/b"];
        Ok(cgroups.iter().map(|cgroup| get(cgroup, file)).collect::<Result<Vec<_>>>()?.join(" "))
    };
    let (applied, _) = ground.hold(&AppliedSettings::default(), "/check-ancestors/a/b", protected(8))?;
    write_file("/check-ancestors/other", "memory.min", &bytes(3))?;
    ground.enforcer.refresh();
    let (applied, _) = ground.hold(&applied, "/check-ancestors/a/c", protected(4))?;
    expect("memory.min", &all("memory.min")?, &[15, 12, 8].map(bytes).join(" "))?;
    expect("memory.low", &all("memory.low")?, &[24, 24, 16].map(bytes).join(" "))?;
    let applied = ground.release(&applied, "/check-ancestors/a/b")?;
    expect("memory.min", &all("memory.min")?, &[7, 4, 0].map(bytes).join(" "))?;
    let applied = ground.release(&applied, "/check-ancestors/a/c")?;
    expect("memory.min", &all("memory.min")?, "0 0 0")?;
    expect("memory.low", &all("memory.low")?, "0 0 0")?;
    ensure!(applied.is_empty(), "{applied:?}");
    Ok("15, 12 and 8 MiB, and back".to_owned())
}

/// Migrates 128 MiB from node 1 to node 0.
fn migration() -> Result<String> {
    const MIB: u64 = 128;
    let ground = TestSubtree::new("check-migration")?;
    let (applied, _) = ground.hold(&AppliedSettings::default(), "/check-migration", pinned("2-3", "1")?)?;
    let process = ChildProcess::holding(MIB, &dir("/check-migration")?)?;
    let (_, report) = ground.hold(&applied, "/check-migration", pinned("0-1", "0")?)?;
    let migration = moved(&report)?;
    let stat = get("/check-migration", "memory.numa_stat")?;
    let anon = stat.lines().find(|line| line.starts_with("anon")).unwrap_or_default().to_owned();
    // On older kernels, the earlier amount is inexact by up to 64 pages per CPU.
    ensure!(migration.moved() >= Bytes::mib(MIB - 1), "{migration:?}");
    ensure!(migration.left() <= Bytes::mib(1), "{migration:?}");
    ensure!(process.status("Mems_allowed_list")? == "0", "still elsewhere");
    Ok(format!(
        "moved {} KiB in {} ms, {} KiB left; {anon}",
        migration.moved().0 >> 10,
        migration.took.as_millis(),
        migration.left().0 >> 10
    ))
}

/// Returns the result of the only migration.
fn moved(report: &EnforcementReport) -> Result<Migration> {
    let [(_, moving)] = &report.moving[..] else { bail!("{:?}", report.moving) };
    Ok(match moving {
        MigrationState::Done(migration) => migration.clone(),
        MigrationState::Running(result) => result.recv()??,
    })
}

/// Checks that pages follow the first write too, in cgroups with cpusets that the kernel creates together.
fn first_migration() -> Result<String> {
    const MIB: u64 = 32;
    let ground = TestSubtree::new("check-first")?;
    write_file("/check-first", "cgroup.subtree_control", "+memory")?;
    let cgroups = ["/check-first/a", "/check-first/b", "/check-first/c"];
    let hold = |cgroup: &&str| ChildProcess::holding(MIB, &make(cgroup)?);
    let processes = cgroups.iter().map(hold).collect::<Result<Vec<_>>>()?;
    ensure!(get(cgroups[0], "cpuset.mems").is_err(), "there are cpusets already");
    let mut applied = AppliedSettings::default();
    let mut said = Vec::new();
    for cgroup in cgroups {
        let nodes = numaward_cgroup::read::memory_numa_stat(&dir(cgroup)?)?;
        let on = |node| nodes.get(&NodeId(node)).map_or(0, |memory| memory.anon.0);
        let (settings, elsewhere) =
            if on(0) > on(1) { (pinned("2-3", "1")?, on(0)) } else { (pinned("0-1", "0")?, on(1)) };
        let (now, report) = ground.hold(&applied, cgroup, settings)?;
        applied = now;
        let migration = moved(&report)?;
        ensure!(migration.moved().0 + (1 << 20) >= elsewhere, "{cgroup}: {elsewhere}, {migration:?}");
        ensure!(migration.left() <= Bytes::mib(1), "{cgroup}: {migration:?}");
        said.push(format!("{} KiB", migration.moved().0 >> 10));
    }
    drop(processes);
    Ok(format!("moved {}", said.join(", ")))
}

/// Checks that a reader sees either the old or the new settings while they change back and forth.
///
/// Writer and reader run on one CPU: while the kernel changes the nodes of a process, its mask is the union of both
/// sets (`cpuset_change_task_nodemask` in kernel/cgroup/cpuset.c), with interrupts disabled, so that only another CPU
/// can see it.
fn never_wider() -> Result<String> {
    const ROUNDS: usize = 30;
    let ground = TestSubtree::new("check-order")?;
    let leaf = make("/check-order/a")?;
    let process = ChildProcess::holding(1, &leaf)?;
    // The process has its CPUs already; the threads that write and read inherit this one.
    let everywhere = sched_getaffinity(None)?;
    run_on(0)?;
    let changed = change_beside_reader(&ground, &leaf, &process, ROUNDS);
    sched_setaffinity(None, &everywhere)?;
    let looks = changed?;
    ensure!(looks > ROUNDS, "only {looks} looks");
    Ok(format!("{ROUNDS} changes, {looks} looks"))
}

/// Restricts the calling thread to this CPU.
fn run_on(cpu: usize) -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu);
    Ok(sched_setaffinity(None, &cpus)?)
}

/// Changes the settings of the cgroup `rounds` times, and returns the number of reads.
fn change_beside_reader(
    ground: &TestSubtree,
    leaf: &Path,
    process: &ChildProcess,
    rounds: usize,
) -> Result<usize> {
    let (mut applied, _) = ground.hold(&AppliedSettings::default(), "/check-order/a", pinned("0", "0")?)?;
    let stop = Arc::new(AtomicBool::new(false));
    let looking = {
        let (stop, leaf) = (Arc::clone(&stop), leaf.to_owned());
        let status = format!("/proc/{}/status", process.child.id());
        thread::spawn(move || -> Result<usize> {
            let mut looks = 0;
            while !stop.load(Ordering::Relaxed) {
                for (file, allowed) in [
                    ("cpuset.cpus", ["0", "2-3"]),
                    ("cpuset.cpus.effective", ["0", "2-3"]),
                    ("cpuset.mems", ["0", "1"]),
                    ("cpuset.mems.effective", ["0", "1"]),
                ] {
                    let found = fs::read_to_string(leaf.join(file))?;
                    ensure!(allowed.contains(&found.trim()), "{file} was {found:?}");
                }
                // The masks, not the lists, because the kernel prints a list while it walks the live mask.
                let text = fs::read_to_string(&status)?;
                for (key, allowed) in [("Cpus_allowed:\t", ["1", "c"]), ("Mems_allowed:\t", ["1", "2"])] {
                    let found = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
                    let mask = found.trim_start_matches(['0', ',']);
                    ensure!(allowed.contains(&mask), "{key}{found:?}");
                }
                looks += 1;
                thread::sleep(Duration::from_micros(200));
            }
            Ok(looks)
        })
    };
    for round in 0..rounds {
        let settings = if round % 2 == 0 { pinned("2-3", "1")? } else { pinned("0", "0")? };
        applied = ground.hold(&applied, "/check-order/a", settings)?.0;
    }
    stop.store(true, Ordering::Relaxed);
    looking.join().map_err(|_| anyhow!("the looking thread panicked"))?
}

/// Returns whether the kernel supports isolated partitions (Linux 6.1).
fn knows_isolated() -> Result<bool> {
    let _ground = TestSubtree::new("check-kind")?;
    write_file("/check-kind", "cpuset.cpus", "1")?;
    Ok(write_file("/check-kind", "cpuset.cpus.partition", "isolated").is_ok())
}

fn partition() -> Result<String> {
    let ground = TestSubtree::new("check-partition")?;
    let leaf = dir("/check-partition")?;
    let process = ChildProcess::holding(1, &leaf)?;
    let mut applied = AppliedSettings::default();
    let knows_isolated = knows_isolated()?;
    for (kind, cpus, rest) in [
        (Partition::Root, "2-3", "0-1"),
        (Partition::Isolated, "1", "0,2-3"),
        (Partition::Root, "1-2", "0,3"),
    ] {
        let settings = Settings { partition: Some(kind), ..pinned(cpus, "1")? };
        if kind == Partition::Isolated && !knows_isolated {
            let Err(refused) = ground.hold(&applied, "/check-partition", settings) else {
                bail!("it is isolated")
            };
            ensure!(
                refused.to_string().contains("not a kind of partition that this kernel knows"),
                "{refused}"
            );
            expect("partition", &get("/check-partition", "cpuset.cpus.partition")?, "root")?;
            expect("the root's CPUs", &get("/", "cpuset.cpus.effective")?, "0-1")?;
            continue;
        }
        applied = ground.hold(&applied, "/check-partition", settings)?.0;
        expect("partition", &get("/check-partition", "cpuset.cpus.partition")?, &kind.to_string())?;
        expect("the root's CPUs", &get("/", "cpuset.cpus.effective")?, rest)?;
        expect("Cpus_allowed_list", &process.status("Cpus_allowed_list")?, cpus)?;
        ensure!(ground.enforcer.drift(&applied, &path("/check-partition")?)?.is_empty(), "drift");
    }
    ground.release(&applied, "/check-partition")?;
    expect("partition", &get("/check-partition", "cpuset.cpus.partition")?, "member")?;
    expect("the root's CPUs", &get("/", "cpuset.cpus.effective")?, "0-3")?;
    expect("Cpus_allowed_list", &process.status("Cpus_allowed_list")?, "0-3")?;
    let said = if knows_isolated { "" } else { ", isolated is refused" };
    Ok(format!("root, isolated, moved, and back{said}"))
}

fn nested_partition() -> Result<String> {
    let ground = TestSubtree::new("check-nested")?;
    make("/check-nested/a/b")?;
    make("/check-nested/a/c")?;
    let root = |cpus| -> Result<Settings> {
        Ok(Settings { partition: Some(Partition::Root), ..pinned(cpus, "1")? })
    };
    if !Path::new(ROOT).join("cpuset.cpus.isolated").exists() {
        let refused = ground
            .enforcer
            .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/check-nested/a/b")?, root("2")?));
        ensure!(matches!(refused, Err(EnforceError::NestedPartition { .. })), "{refused:?}");
        return Ok("refused: this kernel has none".to_owned());
    }
    let (applied, _) = ground.hold(&AppliedSettings::default(), "/check-nested/a/b", root("2")?)?;
    let (applied, _) = ground.hold(&applied, "/check-nested/a/c", root("1")?)?;
    expect("exclusive", &get("/check-nested", "cpuset.cpus.exclusive")?, "1-2")?;
    expect("the root's CPUs", &get("/", "cpuset.cpus.effective")?, "0,3")?;
    let (applied, _) = ground.hold(&applied, "/check-nested/a/b", root("3")?)?;
    expect("partition", &get("/check-nested/a/b", "cpuset.cpus.partition")?, "root")?;
    expect("effective", &get("/check-nested/a/b", "cpuset.cpus.effective")?, "3")?;
    expect("exclusive", &get("/check-nested", "cpuset.cpus.exclusive")?, "1,3")?;
    let applied = ground.release(&applied, "/check-nested/a/b")?;
    let applied = ground.release(&applied, "/check-nested/a/c")?;
    ensure!(applied.is_empty(), "{applied:?}");
    expect("exclusive", &get("/check-nested", "cpuset.cpus.exclusive")?, "")?;
    expect("the root's CPUs", &get("/", "cpuset.cpus.effective")?, "0-3")?;
    Ok("two beside each other, one moved, and back".to_owned())
}

/// Checks that an invalid partition undoes the other writes, and that CPUs of another partition are not changed.
fn refused_partition() -> Result<String> {
    let root = |cpus| -> Result<Settings> {
        Ok(Settings { partition: Some(Partition::Root), memory_max: Some(mib(64)), ..pinned(cpus, "1")? })
    };
    let ground = TestSubtree::new("check-refused")?;
    let plan = ground
        .enforcer
        .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/check-refused")?, root("0-3")?))?;
    let Err(failure) = ground.enforcer.execute(&plan) else {
        bail!("the root has tasks and gave all CPUs away")
    };
    // Kernels before Linux 6.1 refuse the write.
    let expected = match (&failure.error, knows_isolated()?) {
        (EnforceError::InvalidPartition { .. }, is_new) => is_new,
        (error, is_new) => !is_new && error.to_string().contains("none would remain outside"),
    };
    ensure!(expected, "{failure}");
    let is_as_before = || -> Result<()> {
        expect("memory.max", &get("/check-refused", "memory.max")?, "max")?;
        expect("cpuset.cpus", &get("/check-refused", "cpuset.cpus")?, "")?;
        expect("partition", &get("/check-refused", "cpuset.cpus.partition")?, "member")
    };
    is_as_before()?;

    // The plan is made while the CPU is free, and executed when it is not.
    let plan = ground
        .enforcer
        .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/check-refused")?, root("2-3")?))?;
    let other = TestSubtree::new("check-refused-other")?;
    let (applied, _) = other.hold(&AppliedSettings::default(), "/check-refused-other", root("2")?)?;
    let Err(late) = ground.enforcer.execute(&plan) else { bail!("two partitions have CPU 2") };
    ensure!(matches!(late.error, EnforceError::Excluded { .. }), "{late}");
    is_as_before()?;
    expect("the other's", &get("/check-refused-other", "cpuset.cpus.partition")?, "root")?;
    other.release(&applied, "/check-refused-other")?;
    Ok(failure.to_string())
}

/// Restores the CPUs of a running cgroup while a sibling's partition has some of them, and after it ended.
fn sibling_partition() -> Result<String> {
    const THIS: &str = "/check-sibling";
    const OTHER: &str = "/check-sibling-other";
    let ground = TestSubtree::new("check-sibling")?;
    let _other = TestSubtree::new("check-sibling-other")?;
    let process = ChildProcess::holding(1, &dir(THIS)?)?;
    let mut applied = AppliedSettings::default();
    let mut said = Vec::new();
    for (found, partition, reduced) in [("", "3", "0-2"), ("0-2", "2-3", "0-1")] {
        if !found.is_empty() {
            write_file(THIS, "cpuset.cpus", found)?;
        }
        applied = ground.hold(&applied, THIS, pinned("1", "0")?)?.0;
        let settings = Settings { partition: Some(Partition::Root), ..pinned(partition, "1")? };
        applied = ground.hold(&applied, OTHER, settings)?.0;
        applied = ground.release(&applied, THIS)?;
        expect("Cpus_allowed_list", &process.status("Cpus_allowed_list")?, reduced)?;
        expect("the other's", &get(OTHER, "cpuset.cpus.partition")?, "root")?;
        said.push(get(THIS, "cpuset.cpus")?);
        applied = ground.release(&applied, OTHER)?;
        ensure!(applied.is_empty(), "not restored: {applied:?}");
        let whole = if found.is_empty() { "0-3" } else { found };
        expect("Cpus_allowed_list after it", &process.status("Cpus_allowed_list")?, whole)?;
        said.push(get(THIS, "cpuset.cpus")?);
    }
    Ok(format!("cpuset.cpus beside it and after it: {}", said.join(", ")))
}

/// The time limit for the report of another program's write, from the start of that program.
const MAX_REPORT_LATENCY: Duration = Duration::from_millis(100);

fn wait_for(watch: &KnobWatch, what: impl Fn(&KnobEvent) -> bool) -> Result<KnobEvent> {
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until {
        if let Some(touched) = watch.read()?.into_iter().find(&what) {
            return Ok(touched);
        }
        thread::sleep(Duration::from_millis(1));
    }
    bail!("nothing was reported")
}

fn events_are_read(watch: &KnobWatch) -> Result<bool> {
    watch.read()?;
    let mut files = [rustix::event::PollFd::new(watch, rustix::event::PollFlags::IN)];
    Ok(rustix::event::poll(&mut files, Some(&rustix::time::Timespec::default()))? == 0)
}

/// Checks that writes of other programs are reported with their process, and that marks end with their cgroup.
fn watch() -> Result<String> {
    let ground = TestSubtree::new("check-watch")?;
    make("/check-watch/a")?;
    let settings = Settings { memory_min: Some(mib(8)), memory_high: Some(mib(64)), ..pinned("1", "1")? };
    let (applied, _) = ground.hold(&AppliedSettings::default(), "/check-watch/a", settings)?;
    let watch = KnobWatch::new(Path::new(ROOT))?;
    let cgroup = path("/check-watch/a")?;
    let knobs = [Knob::CpusetCpus, Knob::CpusetMems, Knob::MemoryMin, Knob::MemoryHigh];
    for knob in knobs {
        ensure!(watch.add(&cgroup, knob)?, "{knob} is not there");
    }
    Knob::CpusetCpus.write(&dir("/check-watch/a")?, "1")?;
    ensure!(watch.read()?.is_empty(), "our own write was reported");
    let mut slowest = Duration::ZERO;
    for (knob, value) in knobs.into_iter().zip(["0-2", "0", "0", "max"]) {
        let file = knob.path(&dir("/check-watch/a")?);
        let mut other = ChildProcess::writer(&file, value)?;
        let started = Instant::now();
        other.write()?;
        let touched = wait_for(
            &watch,
            |touched| matches!(touched, KnobEvent::Write { knob: found, .. } if *found == knob),
        )?;
        slowest = slowest.max(started.elapsed());
        let KnobEvent::Write { by: Some(by), .. } = touched else { bail!("{touched:?}") };
        ensure!(by.pid == other.child.id(), "{by:?} is not {}", other.child.id());
        ensure!(by.name.as_deref() == Some("numaward-enforc"), "{by:?}");
        let drifts = ground.enforcer.drift(&applied, &cgroup)?;
        let [drift] = &drifts[..] else { bail!("{drifts:?}") };
        ensure!(drift.knob == knob, "{drift}");
        ground.enforcer.repair(&applied, drift)?;
        let left = ground.enforcer.drift(&applied, &cgroup)?;
        ensure!(left.is_empty(), "{drift} was repaired, and then there was {left:?}");
    }
    ground.release(&applied, "/check-watch/a")?;
    let marks = || -> Result<usize> {
        let number = std::os::fd::AsRawFd::as_raw_fd(&watch.as_fd());
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
        Ok(info.lines().filter(|line| line.starts_with("fanotify ino")).count())
    };
    // An unread event keeps its file open.
    while !events_are_read(&watch)? {}
    let before = marks()?;
    fs::remove_dir(dir("/check-watch/a")?)?;
    let after = marks()?;
    // Older kernels keep the inodes of removed cgroups until memory is needed, and the watch must not prevent their
    // removal.
    fs::write("/proc/sys/vm/drop_caches", "2")?;
    let dropped = marks()?;
    ensure!(slowest < MAX_REPORT_LATENCY, "reported after {slowest:?}");
    ensure!(
        before == knobs.len() && dropped == 0,
        "{before} marks, {after} after the cgroup went, then {dropped}"
    );
    Ok(format!(
        "reported within {} ms; {before} marks, {after} after the cgroup went, then 0",
        slowest.as_millis()
    ))
}

/// Rewrites a knob every 100 ms as another program: it is repaired with growing delays, and then given up.
fn fight() -> Result<String> {
    let ground = TestSubtree::new("check-fight")?;
    let (applied, _) = ground.hold(&AppliedSettings::default(), "/check-fight", pinned("1", "1")?)?;
    let cgroup = path("/check-fight")?;
    let file = Knob::CpusetCpus.path(&dir("/check-fight")?);
    let other = ChildProcess::start(&["write", &file.display().to_string(), "0-2", "100"])?;
    let policy = ConflictPolicy { repairs: 5, ..ConflictPolicy::default() };
    let mut conflicts = ConflictBackoff::new(policy);
    let started = Instant::now();
    let (mut repairs, mut overtaken) = (Vec::new(), 0);
    loop {
        let now = started.elapsed();
        ensure!(now < Duration::from_secs(30), "still fighting: {repairs:?}");
        for drift in ground.enforcer.drift(&applied, &cgroup)? {
            match conflicts.drifted(&cgroup, drift.knob, DriftCause::Written, now) {
                DriftVerdict::Repair => match ground.enforcer.repair(&applied, &drift) {
                    Ok(_) => repairs.push(now.as_millis()),
                    // The other program wrote between the write and the check, which rarely happens twice: the next
                    // check finds the drift.
                    Err(EnforceError::NotTaken { .. }) if overtaken == 0 => overtaken += 1,
                    Err(error) => return Err(error.into()),
                },
                DriftVerdict::GiveUp => {
                    ensure!(conflicts.given_up().eq([(&cgroup, Knob::CpusetCpus)]), "not flagged");
                    drop(other);
                    return Ok(format!("repaired after {repairs:?} ms, then given up"));
                }
                DriftVerdict::Wait(_) | DriftVerdict::GivenUp => {}
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Removes a cgroup during the work on it.
fn gone() -> Result<String> {
    let ground = TestSubtree::new("check-gone")?;
    make("/check-gone/a")?;
    let settings = Settings { memory_min: Some(mib(8)), ..pinned("1", "1")? };
    let plan = ground
        .enforcer
        .plan(&AppliedSettings::default(), &SettingsChange::Hold(path("/check-gone/a")?, settings.clone()))?;
    fs::remove_dir(dir("/check-gone/a")?)?;
    let Err(failure) = ground.enforcer.execute(&plan) else { bail!("written into nothing") };
    ensure!(failure.error.is_gone() && failure.undo.is_empty(), "{failure}");
    expect("memory.min", &get("/check-gone", "memory.min")?, "0")?;

    make("/check-gone/a")?;
    let (applied, _) = ground.hold(&AppliedSettings::default(), "/check-gone/a", settings.clone())?;
    expect("memory.min", &get("/check-gone", "memory.min")?, &bytes(8))?;
    fs::remove_dir(dir("/check-gone/a")?)?;
    let drift = ground.enforcer.drift(&applied, &path("/check-gone/a")?);
    ensure!(drift.as_ref().is_err_and(EnforceError::is_gone), "{drift:?}");
    make("/check-gone/a")?;
    let drift = ground.enforcer.drift(&applied, &path("/check-gone/a")?);
    ensure!(drift.as_ref().is_err_and(EnforceError::is_gone), "another of the same name: {drift:?}");
    let (applied, _) = ground.apply(&applied, &SettingsChange::Upkeep)?;
    ensure!(applied.is_empty(), "{applied:?}");
    expect("memory.min", &get("/check-gone", "memory.min")?, "0")?;
    Ok(failure.to_string())
}

/// Checks that impossible settings are refused with a reason, and nothing is written.
fn refused() -> Result<String> {
    let ground = TestSubtree::new("check-no")?;
    let inner = make("/check-no/a")?;
    write_file("/check-no", "cgroup.subtree_control", "+cpuset +memory")?;
    write_file("/check-no/a", "cpuset.cpus", "0-1")?;
    make("/check-no/a/b")?;
    let refused = ground.enforcer.plan(
        &AppliedSettings::default(),
        &SettingsChange::Hold(path("/check-no/a/b")?, pinned("1-2", "0")?),
    );
    ensure!(matches!(refused, Err(EnforceError::Excluded { .. })), "{refused:?}");

    // A parent with processes of its own cannot enable controllers for its children.
    let process = ChildProcess::holding(1, &inner)?;
    let plan = ground.enforcer.plan(
        &AppliedSettings::default(),
        &SettingsChange::Hold(path("/check-no/a/b")?, pinned("1", "0")?),
    )?;
    let Err(failure) = ground.enforcer.execute(&plan) else { bail!("the parent holds a process") };
    ensure!(failure.to_string().contains("holds processes itself"), "{failure}");
    expect("cgroup.type", &get("/check-no/a/b", "cgroup.type")?, "domain")?;
    drop(process);

    let mut said = Vec::new();
    for (knob, data) in [(Knob::CpusetCpus, "700"), (Knob::CpusetMems, "70"), (Knob::MemoryMin, "much")] {
        let Err(error) = knob.write(&inner, data) else { bail!("{knob} took {data}") };
        ensure!(
            error.to_string().contains(&format!("{knob}: ")) && error.to_string().contains(data),
            "{error}"
        );
        said.push(error.to_string());
    }
    Ok(said.join("; "))
}

/// Measures the time for one more cgroup besides many.
fn many() -> Result<String> {
    const COUNT: usize = 200;
    let ground = TestSubtree::new("check-many")?;
    let mut applied = AppliedSettings::default();
    let mut times = Vec::new();
    for number in 0..COUNT {
        let name = format!("/check-many/w{number}");
        make(&name)?;
        let settings = Settings { memory_min: Some(Limit::Bytes(Bytes::kib(64))), ..pinned("1", "1")? };
        let started = Instant::now();
        let plan = ground.enforcer.plan(&applied, &SettingsChange::Hold(path(&name)?, settings))?;
        ground.enforcer.execute(&plan).map_err(|failure| anyhow!("{failure}"))?;
        times.push(started.elapsed());
        applied = plan.outcome;
    }
    expect("memory.min", &get("/check-many", "memory.min")?, &(COUNT << 16).to_string())?;
    let last = &mut times[COUNT - 100..];
    last.sort_unstable();
    Ok(format!(
        "of the last 100 of {COUNT}: median {} µs, p99 {} µs",
        last[50].as_micros(),
        last[98].as_micros()
    ))
}
