//! Checks that the daemon's answer, its ledger, its metrics and the kernel agree.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use numaward_api as api;
use numaward_topology::{CpuSet, NodeSet};

use crate::daemon::{DaemonFolder, metrics};

/// Parent of the cgroups that the daemon makes for commands.
const EXEC_PARENT: &str = "/sys/fs/cgroup/numaward";

/// The time limit for the ledger file to be stored, in an emulated machine.
const STORE_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits until the daemon, its ledger, its metrics and the kernel agree. Returns the duration.
pub(crate) fn wait(home: &DaemonFolder, limit: Duration) -> Result<Duration> {
    let start = Instant::now();
    loop {
        let held = home.client().allocations().and_then(|held| held.context("the daemon does not answer"));
        let agrees = held.and_then(|held| check(home, &held));
        if matches!(agrees, Ok(true)) {
            return Ok(start.elapsed());
        }
        if start.elapsed() > limit {
            return agrees.and_then(|_| bail!("the daemon serves no metrics"));
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Checks all guarantees. Returns false if the daemon died before it served its metrics.
pub(crate) fn check(home: &DaemonFolder, held: &api::Allocations) -> Result<bool> {
    if let Some(path) = home.damaged()? {
        anyhow::bail!("{}: a ledger was damaged", path.display());
    }
    no_cpu_twice(held)?;
    for allocation in &held.allocations {
        knobs(allocation)?;
    }
    strays(held)?;
    if !ledger(home, held)? {
        return Ok(false);
    }
    let Some(metrics) = metrics()? else { return Ok(false) };
    figures(&metrics, held)?;
    Ok(true)
}

fn no_cpu_twice(held: &api::Allocations) -> Result<()> {
    let mut taken = held.shared_cpus.parse::<CpuSet>()?;
    for allocation in &held.allocations {
        let cpus: CpuSet = allocation.cpus.parse()?;
        let twice = &taken & &cpus;
        ensure!(twice.is_empty(), "{}: CPUs {twice} are guaranteed twice or shared", allocation.name);
        taken = &taken | &cpus;
    }
    let online: CpuSet = fs::read_to_string("/sys/devices/system/cpu/online")?.trim().parse()?;
    ensure!(taken == online, "CPUs {taken} are shared or exclusive, {online} are online");
    Ok(())
}

/// Checks that the knobs of a guarantee hold the values of the daemon's answer.
fn knobs(allocation: &api::Allocation) -> Result<()> {
    ensure!(allocation.drift.is_empty(), "{}: drift {:?}", allocation.name, allocation.drift);
    let dir = Path::new(&allocation.directory);
    let wanted = |knob: &str| allocation.settings.get(knob).map(String::as_str);
    let mut effective = vec![("mems", &allocation.nodes)];
    // Without exclusive CPUs, a workload may use the shared pool.
    if !allocation.cpus.is_empty() {
        effective.push(("cpus", &allocation.cpus));
    }
    for (what, guaranteed) in &effective {
        ensure!(wanted(&format!("cpuset.{what}")) == Some(guaranteed), "{allocation:?}");
    }
    for (knob, wanted) in &allocation.settings {
        let found = knob_of(dir, knob)?;
        ensure!(found == *wanted, "{}: {knob} is {found}, the daemon says {wanted}", allocation.name);
    }
    for (what, guaranteed) in effective {
        let knob = format!("cpuset.{what}.effective");
        let found = knob_of(dir, &knob)?;
        ensure!(
            found == *guaranteed,
            "{}: {knob} is {found}, the guarantee is {guaranteed}",
            allocation.name
        );
    }
    Ok(())
}

/// Reads a knob.
pub(crate) fn knob_of(dir: &Path, knob: &str) -> Result<String> {
    let path = dir.join(knob);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    Ok(text.trim().to_owned())
}

/// Checks that nothing is left of commands without a guarantee, and that ancestors protect the memory of their
/// children.
fn strays(held: &api::Allocations) -> Result<()> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(EXEC_PARENT)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.insert(entry.path().display().to_string());
        }
    }
    let of_commands = || held.allocations.iter().filter(|held| held.target == api::Target::Exec);
    let expected: BTreeSet<_> = of_commands().map(|held| held.directory.clone()).collect();
    ensure!(found == expected, "cgroups of commands are {found:?}, should be {expected:?}");
    let claimed: u64 = of_commands().map(|held| claim(held)).sum::<Result<u64>>()?;
    let parent: u64 = knob_of(Path::new(EXEC_PARENT), "memory.min")?.parse()?;
    ensure!(parent == claimed, "{EXEC_PARENT} has memory.min {parent}, its children claim {claimed}");
    Ok(())
}

/// Returns `memory.min` of a guarantee's own cgroup.
fn claim(held: &api::Allocation) -> Result<u64> {
    Ok(knob_of(Path::new(&held.directory), "memory.min")?.parse()?)
}

/// Checks that the ledger file names the same workloads, after pending stores. Returns false if the daemon died before.
fn ledger(home: &DaemonFolder, held: &api::Allocations) -> Result<bool> {
    let said: BTreeSet<_> = held.allocations.iter().map(|held| held.name.as_str()).collect();
    let start = Instant::now();
    loop {
        let mut found = BTreeSet::new();
        if let Some(text) = home.ledger()? {
            let stored: serde_json::Value = serde_json::from_str(&text).context("the ledger file")?;
            let names =
                stored["ledger"]["guarantees"].as_object().context("the ledger file has no guarantees")?;
            found.extend(names.keys().cloned());
            if found.iter().map(String::as_str).eq(said.iter().copied()) {
                return Ok(true);
            }
        }
        if metrics()?.is_none() {
            return Ok(false);
        }
        ensure!(start.elapsed() < STORE_TIMEOUT, "the ledger file holds {found:?}, the daemon says {said:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Checks that the metrics agree with the answer.
fn figures(metrics: &str, held: &api::Allocations) -> Result<()> {
    let value = |series: &str| -> Result<u64> {
        let found = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        Ok(found.with_context(|| format!("no {series}"))?.parse()?)
    };
    let same = |series: &str, expected: u64| {
        let found = value(series)?;
        ensure!(found == expected, "{series} is {found}, should be {expected}");
        anyhow::Ok(())
    };
    let shared: CpuSet = held.shared_cpus.parse()?;
    same("numaward_cpu_manager_shared_pool_cpus", u64::try_from(shared.len())?)?;
    let mut guaranteed: BTreeMap<u32, u64> = BTreeMap::new();
    for block in held.allocations.iter().flat_map(|held| &held.memory).filter(|block| block.kind == "memory")
    {
        let nodes: NodeSet = block.nodes.parse()?;
        let node = nodes.iter().next().context("a block without nodes")?;
        ensure!(nodes.len() == 1, "this script asks for no more than a node has: {block:?}");
        *guaranteed.entry(node.0).or_default() += block.bytes;
    }
    for node in &held.nodes {
        let cpus: CpuSet = fs::read_to_string(format!("/sys/devices/system/node/node{}/cpulist", node.node))?
            .trim()
            .parse()?;
        let mut exclusive = 0;
        for allocation in &held.allocations {
            exclusive += u64::try_from((&allocation.cpus.parse::<CpuSet>()? & &cpus).len())?;
        }
        same(&format!("numaward_cpu_manager_exclusive_cpus{{numa_node=\"{}\"}}", node.node), exclusive)?;
        let expected = guaranteed.get(&node.node).copied().unwrap_or_default();
        let series = |state: &str| {
            format!(
                "numaward_node_memory_bytes{{numa_node=\"{}\",kind=\"memory\",state=\"{state}\"}}",
                node.node
            )
        };
        same(&series("promised"), expected)?;
        let memory = node.memory.iter().find(|memory| memory.kind == "memory").context("no memory")?;
        ensure!(
            memory.guaranteed_bytes == expected,
            "node {}: {memory:?}, blocks sum to {expected}",
            node.node
        );
    }
    Ok(())
}
