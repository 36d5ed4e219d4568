//! Random sequences of requests to the daemon.

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use fastrand::Rng;
use serde_json::Value;

use crate::{
    bystander::{self, Bystanders, CGROUPS, UNIT},
    snapshot::HostSnapshot,
};

const CONFIG: &str = "/tmp/harm.yaml";
const LOG: &str = "/tmp/daemon.log";
/// The time limit of a start of the daemon.
const START_TIMEOUT: Duration = Duration::from_mins(1);
/// The time limit of a command.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(90);
/// Part of the configuration without which the daemon loads all probes.
const NO_PROBES: &str = "probes: {allocation: {enabled: false}, accesses: {enabled: false}, stalls: {enabled: false}, \
                         oomKills: {enabled: false}, intruders: {enabled: false}}\n";
/// The bystanders that get guarantees, with the MiB that each needs at least. The memory policy of `/interleave` and the huge pages of
/// `/huge_pages` would not survive a guarantee, as documented.
const TARGETS: &[(&str, u64)] =
    &[("/growth", 64), ("/tight", 48), ("/delegated/a", 32), ("/tmpfs", 48), ("/page_cache", 64), (UNIT, 64)];

/// A running sequence.
struct Sequence<'a> {
    bystanders: &'a mut Bystanders,
    before: HostSnapshot,
    random: Rng,
    daemon: Option<Child>,
    /// Processes of `numaward exec`, with the names of their guarantees.
    commands: Vec<(String, Child)>,
    /// Names of guarantees that were given.
    given: Vec<String>,
    number: u32,
}

/// Makes this number of steps, removes the daemon, and compares.
pub(crate) fn run(bystanders: &mut Bystanders, before: &HostSnapshot, seed: u64, steps: u32) -> Result<()> {
    let mut sequence = Sequence {
        bystanders,
        before: before.clone(),
        random: Rng::with_seed(seed),
        daemon: None,
        commands: Vec::new(),
        given: Vec::new(),
        number: 0,
    };
    sequence.configure()?;
    sequence.start_daemon()?;
    for _ in 0..steps {
        sequence.step()?;
        // Each bystander must be alive after each step.
        sequence.bystanders.processes()?;
    }
    sequence.remove()
}

impl Sequence<'_> {
    fn step(&mut self) -> Result<()> {
        match self.random.u32(0..20) {
            0..=3 => self.exec()?,
            4 => self.end_command()?,
            5..=8 => self.guarantee(),
            9 | 10 => self.resize(),
            11 | 12 => self.release(),
            13 | 14 => self.fill_node()?,
            15 | 16 => {
                self.configure()?;
                self.stop_daemon(false)?;
                self.start_daemon()?;
            }
            17 => {
                println!("  kill the daemon");
                self.stop_daemon(true)?;
                self.start_daemon()?;
            }
            18 => {
                self.remove()?;
                self.start_daemon()?;
            }
            _ => {
                println!("  wait");
                thread::sleep(Duration::from_secs(self.random.u64(2..12)));
            }
        }
        Ok(())
    }

    /// Writes another configuration for the next start.
    fn configure(&mut self) -> Result<()> {
        let mode = ["on", "on", "on", "dry-run", "off"][self.random.usize(0..5)];
        let isolation = ["on", "off"][self.random.usize(0..2)];
        let guard = ["act", "act", "report"][self.random.usize(0..3)];
        let home = ["place", "off"][self.random.usize(0..2)];
        // Probes take most of the time of a start in an emulated machine.
        let are_probed = self.random.u32(0..4) == 0;
        let (of, probes) = if are_probed { ("with", "") } else { ("without", NO_PROBES) };
        println!(
            "  configuration: mode {mode}, herding {isolation}, guard {guard}, home {home}, {of} probes"
        );
        let declared =
            if self.random.bool() { "guarantees:\n- {cgroup: \"/growth\", memory: 64Mi}\n" } else { "" };
        let text = format!(
            "guard: {guard}\n\
             enforcement:\n  mode: {mode}\n  herding: {{mode: {isolation}}}\n\
             home: {{mode: {home}, minMemory: 8Mi, minRemotePercent: 1, minCpuPercent: 1, window: 10s}}\n\
             {probes}{declared}"
        );
        fs::write(CONFIG, text).context(CONFIG)
    }

    fn start_daemon(&mut self) -> Result<()> {
        let log = fs::OpenOptions::new().create(true).append(true).open(LOG)?;
        let daemon = Command::new("numaward")
            .args(["run", "--config", CONFIG])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        self.daemon = Some(daemon);
        let until = Instant::now() + START_TIMEOUT;
        while !Self::ask(&["status"]) {
            let ended = self.daemon.as_mut().map(Child::try_wait).transpose()?.flatten();
            ensure!(ended.is_none(), "the daemon ended: {ended:?}; its log ends so:\n{}", end_of_log());
            ensure!(Instant::now() < until, "the daemon does not answer; its log ends so:\n{}", end_of_log());
            thread::sleep(Duration::from_millis(500));
        }
        Ok(())
    }

    fn stop_daemon(&mut self, is_killed: bool) -> Result<()> {
        let Some(mut daemon) = self.daemon.take() else { return Ok(()) };
        if is_killed {
            daemon.kill()?;
        } else {
            bystander::run(Command::new("kill").arg(daemon.id().to_string()))?;
        }
        daemon.wait()?;
        Ok(())
    }

    fn exec(&mut self) -> Result<()> {
        self.number += 1;
        let name = format!("command{}", self.number);
        let (cpus, memory) = (self.random.u32(1..4), self.random.u32(1..12) * 16);
        println!("  exec {name} with {cpus} CPUs and {memory} MiB");
        let child = Command::new("numaward")
            .args(["exec", "--name", &name, "--cpus", &cpus.to_string(), "--memory", &format!("{memory}Mi")])
            .args(["--", "sleep", "100000"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        self.commands.push((name, child));
        thread::sleep(Duration::from_secs(1));
        Ok(())
    }

    fn end_command(&mut self) -> Result<()> {
        if self.commands.is_empty() {
            return Ok(());
        }
        let (name, child) = self.commands.swap_remove(self.random.usize(0..self.commands.len()));
        println!("  end {name}");
        end(child)
    }

    fn guarantee(&mut self) {
        let (target, least) = TARGETS[self.random.usize(0..TARGETS.len())];
        let memory = format!("{}Mi", least + self.random.u64(0..4) * 16);
        let mut arguments = vec!["guarantee", target, "--memory", &memory];
        if self.random.bool() {
            arguments.extend(["--cpus", "1"]);
        }
        let is_given = Self::ask(&arguments);
        println!("  {}: {}", arguments.join(" "), if is_given { "given" } else { "refused" });
        if is_given {
            self.given.push(target.to_owned());
        }
    }

    fn resize(&mut self) {
        let Some(name) = self.random.choice(&self.given).cloned() else { return };
        let memory = format!("{}Mi", 64 + self.random.u64(0..6) * 16);
        let is_done = Self::ask(&["resize", &name, "--memory", &memory]);
        println!("  resize {name} to {memory}: {is_done}");
    }

    fn release(&mut self) {
        if self.given.is_empty() {
            return;
        }
        let name = self.given.swap_remove(self.random.usize(0..self.given.len()));
        let is_done = Self::ask(&["release", &name]);
        println!("  release {name}: {is_done}");
    }

    /// Fills most of a node for a while.
    fn fill_node(&mut self) -> Result<()> {
        let node = self.random.u32(0..2);
        let free = free_mib(node)?.saturating_sub(60);
        println!("  fill node {node} with {free} MiB");
        let cgroup = Path::new(CGROUPS).join("filler");
        fs::create_dir_all(&cgroup)?;
        let mut filler = Command::new("numaward-load")
            .args([
                "--policy",
                &format!("preferred:{node}"),
                "--size",
                &format!("{}M", free.max(1)),
                "--cgroup",
            ])
            .arg(&cgroup)
            .stdout(Stdio::null())
            .spawn()?;
        thread::sleep(Duration::from_secs(self.random.u64(4..16)));
        filler.kill()?;
        filler.wait()?;
        let until = Instant::now() + COMMAND_TIMEOUT;
        while let Err(error) = fs::remove_dir(&cgroup) {
            ensure!(Instant::now() < until, "the filled cgroup cannot be removed: {error}");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Ends all started processes, removes the daemon, and compares.
    fn remove(&mut self) -> Result<()> {
        println!("  remove");
        for (_, child) in self.commands.drain(..) {
            end(child)?;
        }
        self.given.clear();
        let is_killed = self.random.bool();
        self.stop_daemon(is_killed)?;
        restore()?;
        let after = HostSnapshot::take(self.bystanders)?;
        let differences = self.before.differences(&after);
        if !differences.is_empty() {
            bail!("not as it was:\n  {}", differences.join("\n  "));
        }
        Ok(())
    }

    /// Returns whether a command of the client succeeds within the time limit.
    fn ask(arguments: &[&str]) -> bool {
        let child = Command::new("numaward")
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let Ok(mut child) = child else { return false };
        let until = Instant::now() + COMMAND_TIMEOUT;
        while Instant::now() < until {
            if let Ok(Some(status)) = child.try_wait() {
                return status.success();
            }
            thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        let _ = child.wait();
        false
    }
}

/// Ends a command as a terminal does: `numaward exec` forwards the signal. The command may have ended by itself.
fn end(mut child: Child) -> Result<()> {
    if child.try_wait()?.is_none() {
        bystander::run(Command::new("kill").arg(child.id().to_string()))?;
    }
    child.wait()?;
    Ok(())
}

/// Restores everything that was written. Names the knobs that the kernel refuses while a partition of another program has the CPUs.
fn restore() -> Result<()> {
    let done = Command::new("numaward")
        .args(["uninstall", "--config", CONFIG, "-o", "json"])
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    fs::OpenOptions::new().append(true).open(LOG)?.write_all(said.as_bytes())?;
    let restored: Value = serde_json::from_slice(&done.stdout).with_context(|| said.to_string())?;
    for left in restored["left"].as_array().context("no list of what is left")? {
        let is_partition = left["reason"].as_str().is_some_and(|reason| reason.contains("cpuset partitions"));
        ensure!(is_partition, "not restored: {left}\n{said}");
        println!("  left: {left}");
    }
    Ok(())
}

fn end_of_log() -> String {
    let log = fs::read_to_string(LOG).unwrap_or_default();
    let lines: Vec<&str> = log.lines().rev().take(5).collect();
    lines.into_iter().rev().collect::<Vec<_>>().join("\n")
}

fn free_mib(node: u32) -> Result<u64> {
    let path = format!("/sys/devices/system/node/node{node}/meminfo");
    let text = fs::read_to_string(&path)?;
    let free = text.lines().find(|line| line.contains("MemFree:")).context("no MemFree")?;
    let kib: u64 = free.split_whitespace().nth(3).context("no number")?.parse()?;
    Ok(kib / 1024)
}
