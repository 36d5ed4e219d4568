//! `numaward recommend`: which workloads should get a guarantee, how much and on which node, from the usage of the last hour.
//!
//! # Rules
//! - A workload is observed for [`MIN_OBSERVED_SECONDS`] before it gets advice.
//! - It should get a guarantee if at least [`MIN_REMOTE_PERCENT`] of its accesses or its allocations are remote, and it is not small. If
//!   accesses are not measured, they count as spread over all of its memory, from where it ran.
//! - The amounts are the peak plus a quarter. Workloads that keep less than half a CPU busy stay on the shared pool.
//! - The node is the one with most of the workload's memory, then with most of its CPU time, among those that have the amounts free.
//!   Larger gains come first.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use numaward_api::{
    Allocation, Allocations, Cpus, Placement, Topology, Usage, UsageLevels, Workload, WorkloadUsage,
    Workloads,
};
use numaward_config::{
    enforcement::{CgroupPattern, DeclaredGuarantee, Size, UnitPattern},
    yaml,
};
use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet};
use serde::Serialize;
use serde_with_macros::skip_serializing_none;

use crate::{
    client::{ClientError, Server},
    table::{or_dash, row, size, table},
};

/// Minimum time of observation.
const MIN_OBSERVED_SECONDS: u64 = 600;
/// Minimum share of remote accesses, remote allocations or memory on other nodes.
const MIN_REMOTE_PERCENT: u64 = 10;
/// Minimum peak of busy CPUs, in thousandths, for exclusive CPUs.
const MIN_CPU_MILLIS: u64 = 500;
/// Minimum peak of memory for a guarantee of a workload without exclusive CPUs.
const MIN_MEMORY: u64 = 256 << 20;
/// Amounts of memory are multiples of this.
const MEMORY_STEP: u64 = 64 << 20;
/// Minimum number of sampled accesses, and of allocated bytes, for a share that means something.
const MIN_SAMPLED_PAGES: u64 = 1000;
const MIN_ALLOCATED: u64 = 64 << 20;
/// Minimum CPU time, in microseconds, for a place where a workload runs.
const MIN_CPU_MICROS: u64 = 10_000_000;

/// Kind of a recommendation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Advice {
    /// Declare a guarantee.
    Guarantee,
    /// The workload has a guarantee.
    Keep,
    /// A guarantee would not help, or is not possible.
    None,
    /// Too little is known.
    Unknown,
}

impl Advice {
    fn as_str(self) -> &'static str {
        match self {
            Self::Guarantee => "guarantee",
            Self::Keep => "keep",
            Self::None => "none",
            Self::Unknown => "unknown",
        }
    }
}

/// The advice for a workload, with the figures that it is based on.
#[skip_serializing_none]
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Recommendation {
    workload: String,
    cgroup: String,
    advice: Advice,
    reason: String,
    /// The guarantee to declare.
    guarantee: Option<DeclaredGuarantee>,
    node: Option<u32>,
    observed_seconds: u64,
    cpu_millis: UsageLevels,
    memory_bytes: Option<UsageLevels>,
    remote_percent: Option<u64>,
    missed_bytes: Option<u64>,
}

impl Recommendation {
    /// Returns true if the workload has this name, or its cgroup this path.
    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.workload == name || self.cgroup.trim_start_matches('/') == name
    }
}

/// Everything that recommendations are based on.
#[derive(Debug)]
pub(crate) struct HostUsage {
    pub(crate) usage: Usage,
    pub(crate) workloads: Vec<Workload>,
    pub(crate) topology: Topology,
    /// `None` if the daemon gives no guarantees.
    pub(crate) allocations: Option<Allocations>,
}

/// CPUs and memory of a node.
#[derive(Clone, Copy, Debug, Default)]
struct Capacity {
    cpus: u64,
    memory: u64,
}

/// Amounts of a guarantee. Without CPUs, the workload stays on the shared pool.
#[derive(Clone, Copy, Debug)]
struct Amounts {
    cpus: Option<u32>,
    memory: u64,
}

impl Amounts {
    fn from_usage(usage: &WorkloadUsage, memory: UsageLevels) -> Self {
        let with_headroom = |peak: u64| peak.saturating_add(peak.div_ceil(4));
        let cpus = with_headroom(usage.cpu_millis.peak).div_ceil(1000);
        let cpus = (usage.cpu_millis.peak >= MIN_CPU_MILLIS).then(|| u32::try_from(cpus).unwrap_or(u32::MAX));
        let memory = with_headroom(memory.peak).div_ceil(MEMORY_STEP).max(1).saturating_mul(MEMORY_STEP);
        Self { cpus, memory }
    }

    fn fits(self, capacity: Capacity) -> bool {
        u64::from(self.cpus.unwrap_or(0)) <= capacity.cpus && self.memory <= capacity.memory
    }

    fn describe(self) -> String {
        let cpus = self.cpus.map(|cpus| format!("{} and ", count(u64::from(cpus), "CPU")));
        format!("{}{} of memory", cpus.unwrap_or_default(), size(self.memory))
    }
}

/// Requests the figures and computes the recommendations.
pub(crate) async fn fetch(server: &Server) -> Result<Vec<Recommendation>, ClientError> {
    let Workloads { workloads } = server.get("/api/v1/workloads").await?;
    let observed = HostUsage {
        usage: server.get("/api/v1/usage").await?,
        workloads,
        topology: server.get("/api/v1/topology").await?,
        allocations: server.allocations().await.ok(),
    };
    Ok(recommend(&observed))
}

/// Returns the recommendation for each workload, guarantees first.
pub(crate) fn recommend(observed: &HostUsage) -> Vec<Recommendation> {
    let by_cgroup: BTreeMap<&str, &Workload> = observed
        .workloads
        .iter()
        .filter_map(|workload| Some((workload.cgroup.as_deref()?, workload)))
        .collect();
    let paths: BTreeSet<&str> = by_cgroup.keys().copied().collect();
    let (totals, mut free) = capacities(observed);
    let mut ranked: Vec<(u64, &WorkloadUsage, &Workload)> = observed
        .usage
        .workloads
        .iter()
        .filter_map(|usage| Some((usage, *by_cgroup.get(usage.cgroup.as_str())?)))
        .map(|(usage, workload)| {
            let peak = usage.memory_bytes.unwrap_or_default().peak;
            (remote_percent(usage, workload).unwrap_or(0).saturating_mul(peak), usage, workload)
        })
        .collect();
    ranked.sort_by_key(|(gain, usage, _)| (Reverse(*gain), &usage.cgroup));
    let mut all: Vec<Recommendation> = ranked
        .into_iter()
        .map(|(_, usage, workload)| {
            let held = observed.allocations.iter().flat_map(|all| &all.allocations);
            let held = held.map(|held| &**held).find(|held| held.cgroup == usage.cgroup);
            let is_outer = has_path_below(&paths, &usage.cgroup);
            let promise = observed.allocations.as_ref().and_then(|all| existing_promise(all, &usage.cgroup));
            let mut recommended = Recommendation {
                workload: usage.workload.clone(),
                cgroup: usage.cgroup.clone(),
                advice: Advice::None,
                reason: String::new(),
                guarantee: None,
                node: None,
                observed_seconds: usage.observed_seconds,
                cpu_millis: usage.cpu_millis,
                memory_bytes: usage.memory_bytes,
                remote_percent: remote_percent(usage, workload),
                missed_bytes: held.and(usage.allocated).map(|allocated| allocated.missed_bytes),
            };
            match held {
                Some(held) => {
                    (recommended.advice, recommended.reason) = (Advice::Keep, compare(held, usage));
                }
                None if promise.is_some() => recommended.reason = promise.unwrap_or_default(),
                None => advise(&mut recommended, (usage, workload, is_outer), &totals, &mut free),
            }
            recommended
        })
        .collect();
    let order = |advice: Advice| match advice {
        Advice::Guarantee => 0,
        Advice::Keep => 1,
        Advice::Unknown => 2,
        Advice::None => 3,
    };
    all.sort_by_key(|one| order(one.advice));
    all
}

/// Fills in the advice for a workload without a guarantee. Takes the amounts of a recommended guarantee from `free`.
fn advise(
    recommended: &mut Recommendation,
    (usage, workload, is_outer): (&WorkloadUsage, &Workload, bool),
    totals: &BTreeMap<u32, Capacity>,
    free: &mut BTreeMap<u32, Capacity>,
) {
    let mut conclude = |advice, reason: String| (recommended.advice, recommended.reason) = (advice, reason);
    if let Some(reason) = exclusion(usage, workload, is_outer) {
        return conclude(Advice::None, reason.to_owned());
    }
    if totals.values().filter(|node| node.memory > 0).count() < 2 {
        return conclude(Advice::None, "the host has one node".to_owned());
    }
    if usage.observed_seconds < MIN_OBSERVED_SECONDS {
        let (seen, least) = (usage.observed_seconds / 60, MIN_OBSERVED_SECONDS / 60);
        return conclude(Advice::Unknown, format!("the past is too short: {seen} of {least} minutes"));
    }
    let Some(memory) = usage.memory_bytes else {
        return conclude(Advice::Unknown, "its memory cannot be read: no memory controller".to_owned());
    };
    if usage.cpu_millis.peak < MIN_CPU_MILLIS && memory.peak < MIN_MEMORY {
        return conclude(
            Advice::None,
            format!("it is small: it never uses half a CPU or {}", size(MIN_MEMORY)),
        );
    }
    let Some(remote) = remote_percent(usage, workload) else {
        return conclude(
            Advice::Unknown,
            "no accesses, allocations or nodes of its memory are known".to_owned(),
        );
    };
    if remote < MIN_REMOTE_PERCENT {
        return conclude(Advice::None, format!("{} % of it is local already", 100 - remote));
    }
    let amounts = Amounts::from_usage(usage, memory);
    let needs = amounts.describe();
    if !totals.values().any(|total| amounts.fits(*total)) {
        let reason =
            format!("no node can give {needs}: several nodes need policy: best-effort, and their own test");
        return conclude(Advice::None, reason);
    }
    let (resident, ran) = (residents(workload), cpu_times(usage));
    let mut nodes: Vec<u32> =
        free.iter().filter(|(_, free)| amounts.fits(**free)).map(|(node, _)| *node).collect();
    let of = |amounts: &BTreeMap<u32, u64>, node| Reverse(amounts.get(&node).copied().unwrap_or(0));
    nodes.sort_by_key(|&node| (of(&resident, node), of(&ran, node), node));
    let Some((&node, guarantee)) =
        nodes.first().and_then(|node| Some((node, declare(usage, amounts, *node)?)))
    else {
        return conclude(Advice::None, format!("no node has {needs} free now"));
    };
    if let Some(free) = free.get_mut(&node) {
        free.cpus = free.cpus.saturating_sub(u64::from(amounts.cpus.unwrap_or(0)));
        free.memory = free.memory.saturating_sub(amounts.memory);
    }
    conclude(Advice::Guarantee, format!("{remote} % of it is remote"));
    (recommended.guarantee, recommended.node) = (Some(guarantee), Some(node));
}

/// Returns the reason why a workload of this kind gets no declared guarantee.
fn exclusion(usage: &WorkloadUsage, workload: &Workload, is_outer: bool) -> Option<&'static str> {
    let name = usage.cgroup.rsplit('/').next().unwrap_or_default();
    match workload.kind.as_str() {
        _ if is_outer => Some("the workloads in it count on their own"),
        "container" => Some("the runtime chooses its cgroup: request it for the container"),
        "exec" => Some("it ends with its command"),
        "unit" if name == "numaward.service" => Some("it is numaward"),
        "unit" if usage.cgroup.contains("/user@") => Some("it is a unit of a user's own manager"),
        "unit" if name.strip_suffix(".scope").is_some() => Some("a scope has another name the next time"),
        "unit" | "cgroup" => None,
        _ => Some("it is no unit or cgroup of its own"),
    }
}

/// Returns the reason why a guarantee that exists already excludes another one for the cgroup.
fn existing_promise(allocations: &Allocations, cgroup: &str) -> Option<String> {
    let is_above = |above: &str| cgroup.strip_prefix(above).is_some_and(|rest| rest.starts_with('/'));
    if let Some(held) = allocations.allocations.iter().find(|held| is_above(&held.cgroup)) {
        return Some(format!("{}, in which it is, has a guarantee", held.name));
    }
    let waiting = allocations.waiting.iter().find(|waiting| waiting.cgroup == cgroup)?;
    Some(format!("{} is declared for it and waits", waiting.declared))
}

/// Returns the declaration of a guarantee; `None` if the workload cannot be named.
fn declare(usage: &WorkloadUsage, amounts: Amounts, node: u32) -> Option<DeclaredGuarantee> {
    let name = usage.cgroup.rsplit('/').next().unwrap_or_default();
    let unit: Option<UnitPattern> = name.parse().ok();
    let cgroup = match unit {
        Some(_) => None,
        // The first of the patterns matches the cgroup alone.
        None => Some(CgroupPattern::subtree(&usage.cgroup.parse().ok()?).into_iter().next()?),
    };
    let preferred: NodeSet = [NodeId(node)].into_iter().collect();
    Some(DeclaredGuarantee {
        unit,
        cgroup,
        cpus: amounts.cpus.map(Cpus::whole),
        memory: Some(Size(Bytes(amounts.memory))),
        memory_limit: Some(Size(Bytes(amounts.memory.saturating_mul(2)))),
        hugepages: BTreeMap::new(),
        policy: None,
        partition: None,
        placement: Placement { preferred_nodes: Some(preferred), ..Placement::default() },
    })
}

/// Compares a guarantee with the usage.
fn compare(held: &Allocation, usage: &WorkloadUsage) -> String {
    let cpus: u64 = held.cpus.parse::<CpuSet>().map_or(0, |cpus| cpus.len() as u64);
    let guaranteed: u64 = held.memory.iter().filter(|of| of.kind == "memory").map(|of| of.bytes).sum();
    let mut reason = Vec::new();
    if cpus > 0 {
        reason.push(format!("{} of {cpus} CPUs at the peak", millis(usage.cpu_millis.peak)));
    }
    if guaranteed > 0 {
        let peak = usage.memory_bytes.map_or(0, |memory| memory.peak);
        reason.push(format!("{} of {} at the peak", size(peak), size(guaranteed)));
    }
    if let Some(missed) = usage.allocated.map(|allocated| allocated.missed_bytes).filter(|missed| *missed > 0)
    {
        reason.push(format!("{} missed its nodes in the last hour", size(missed)));
    }
    reason.join("; ")
}

/// Returns the share of remote accesses, or that of remote allocations if it is larger, in percent; `None` if neither is known. If accesses
/// are not measured, memory that is remote from where the workload runs counts instead.
fn remote_percent(usage: &WorkloadUsage, workload: &Workload) -> Option<u64> {
    let share = |part: u64, rest: u64, least: u64| {
        let whole = part.saturating_add(rest);
        (whole >= least)
            .then(|| u64::try_from(u128::from(part) * 100 / u128::from(whole.max(1))).unwrap_or(100))
    };
    let activity = workload.activity.as_ref();
    let accesses = activity.and_then(|of| of.accesses.as_ref()).and_then(|nodes| {
        let (local, remote) = nodes.iter().fold((0_u64, 0_u64), |(local, remote), node| {
            (local.saturating_add(node.local_pages), remote.saturating_add(node.remote_pages))
        });
        share(remote, local, MIN_SAMPLED_PAGES)
    });
    let estimated = activity.and_then(|of| of.estimated_remote_percent).map(u64::from);
    let allocated = usage.allocated.and_then(|of| share(of.remote_bytes, of.local_bytes, MIN_ALLOCATED));
    let accesses = accesses.or(estimated).or_else(|| remote_memory_percent(usage, workload));
    [accesses, allocated].into_iter().flatten().max()
}

/// Returns the share of its memory that is on another node than the CPU, in percent, if the workload accesses all of it alike: the mean
/// over its CPU time by node. If too little CPU time is known, it counts as running on the node with most of the memory.
fn remote_memory_percent(usage: &WorkloadUsage, workload: &Workload) -> Option<u64> {
    let (resident, mut ran) = (residents(workload), cpu_times(usage));
    let total =
        |amounts: &BTreeMap<u32, u64>| amounts.values().map(|&amount| u128::from(amount)).sum::<u128>();
    let (memory, mut time) = (total(&resident), total(&ran));
    if memory < u128::from(MIN_ALLOCATED) {
        return None;
    }
    if time < u128::from(MIN_CPU_MICROS) {
        let (&node, _) = resident.iter().max_by_key(|(_, bytes)| **bytes)?;
        (ran, time) = (BTreeMap::from([(node, 1)]), 1);
    }
    let remote_to = |node| memory - u128::from(resident.get(node).copied().unwrap_or(0));
    // The share of each node has a million parts, so that the products fit.
    let parts = ran.iter().map(|(node, ran)| u128::from(*ran) * 1_000_000 / time * remote_to(node));
    u64::try_from(parts.sum::<u128>() / 1_000_000 * 100 / memory).ok()
}

/// Returns the CPU time of a workload by node, in microseconds.
fn cpu_times(usage: &WorkloadUsage) -> BTreeMap<u32, u64> {
    usage.cpu_by_node.iter().map(|of| (of.node, of.micros)).collect()
}

/// Returns the memory of a workload by node, without page cache.
fn residents(workload: &Workload) -> BTreeMap<u32, u64> {
    let nodes = workload.nodes.iter();
    nodes
        .filter_map(|node| Some((node.node, node.resident?)))
        .map(|(node, resident)| (node, resident.anon_bytes.saturating_add(resident.shmem_bytes)))
        .collect()
}

/// Returns the CPUs and the memory of each node that can be guaranteed in total and now.
fn capacities(observed: &HostUsage) -> (BTreeMap<u32, Capacity>, BTreeMap<u32, Capacity>) {
    let cpus = |list: &str| list.parse::<CpuSet>().map_or(0, |cpus| cpus.len() as u64);
    let nodes = observed.topology.nodes.iter();
    let mut totals: BTreeMap<u32, Capacity> = nodes
        .map(|node| (node.node, Capacity { cpus: cpus(&node.cpus), memory: node.memory_bytes }))
        .collect();
    let Some(allocations) = &observed.allocations else { return (totals.clone(), totals) };
    let mut free = BTreeMap::new();
    for node in &allocations.nodes {
        let memory = node.memory.iter().find(|of| of.kind == "memory");
        let available = memory.map_or(0, |of| of.free_bytes.saturating_sub(of.withheld_bytes));
        free.insert(node.node, Capacity { cpus: cpus(&node.free_cpus), memory: available });
        if let (Some(total), Some(memory)) = (totals.get_mut(&node.node), memory) {
            total.memory = memory.allocatable_bytes;
        }
    }
    (totals, free)
}

fn has_path_below(paths: &BTreeSet<&str>, cgroup: &str) -> bool {
    let below = format!("{cgroup}/");
    paths.range(below.as_str()..).next().is_some_and(|path| path.starts_with(&below))
}

fn count(number: u64, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// Formats thousandths of CPUs.
fn millis(millis: u64) -> String {
    format!("{}.{}", millis / 1000, millis % 1000 / 100)
}

/// Renders recommendations as a table.
pub(crate) fn render(all: &[Recommendation]) -> String {
    if all.is_empty() {
        return "no workload was observed for long enough: the daemon reads each about once a minute\n"
            .to_owned();
    }
    let titles = [
        "WORKLOAD",
        "ADVICE",
        "CPUS",
        "MEMORY",
        "NODE",
        "BUSY MEDIAN",
        "PEAK",
        "MEMORY PEAK",
        "REMOTE",
        "REASON",
    ];
    let rows = all.iter().map(|one| {
        let guarantee = one.guarantee.as_ref();
        row([
            &one.workload,
            one.advice.as_str(),
            &or_dash(guarantee.and_then(|of| of.cpus)),
            &or_dash(guarantee.and_then(|of| of.memory).map(|of| size(of.0.0))),
            &or_dash(one.node),
            &millis(one.cpu_millis.median),
            &millis(one.cpu_millis.peak),
            &or_dash(one.memory_bytes.map(|of| size(of.peak))),
            &or_dash(one.remote_percent.map(|percent| format!("{percent} %"))),
            &one.reason,
        ])
    });
    let observed = all.iter().map(|one| one.observed_seconds).max().unwrap_or(0) / 60;
    format!(
        "{}\nObserved for up to {}. Amounts: the peak plus a quarter, CPUs from half a busy CPU on.\n",
        table(titles, rows),
        count(observed, "minute")
    )
}

/// Renders the recommended guarantees as a file for `guarantees.d`.
pub(crate) fn render_guarantees(all: &[Recommendation]) -> serde_json::Result<String> {
    let mut text = "# Written by numaward recommend: the peak of the last hour plus a quarter. memoryLimit is the most memory that a\n\
                    # workload may use; without it, that is memory, which is then protected from reclaim in any case (memory.min).\n"
        .to_owned();
    for kept in all.iter().filter(|one| one.advice == Advice::Keep) {
        let _ = writeln!(text, "# Not in this file: {} has a guarantee.", kept.workload);
    }
    let recommended: Vec<_> = all.iter().filter_map(|one| Some((one, one.guarantee.as_ref()?))).collect();
    if recommended.is_empty() {
        return Ok(text + "guarantees: []\n");
    }
    text.push_str("guarantees:\n");
    for (one, guarantee) in recommended {
        let memory = one.memory_bytes.map_or(0, |memory| memory.peak);
        // Names have no line breaks, which would end the comment: `clean` escapes them when this is printed.
        let _ = writeln!(
            text,
            "# Peak: {} busy CPUs, {}. {}.",
            millis(one.cpu_millis.peak),
            size(memory),
            one.reason
        );
        text.push_str(&yaml(&serde_json::to_value([guarantee])?));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{DirBuilderExt as _, PermissionsExt as _},
        sync::Arc,
    };

    use numaward_api::{
        Activity, HourlyAllocations, KindCapacity, NodeAccesses, NodeCapacity, NodeCpuUsage,
        PendingGuarantee, Resident,
    };
    use numaward_config::{Sources, load};
    use numaward_topology::Machine;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn level(peak: u64) -> UsageLevels {
        UsageLevels { median: peak / 2, p95: peak, peak }
    }

    fn usage(cgroup: &str, cpu_millis: u64, memory: u64) -> WorkloadUsage {
        WorkloadUsage {
            cgroup: cgroup.to_owned(),
            workload: cgroup.rsplit('/').next().unwrap().to_owned(),
            observed_seconds: 3600,
            cpu_millis: level(cpu_millis),
            memory_bytes: Some(level(memory)),
            cpu_by_node: Vec::new(),
            allocated: Some(HourlyAllocations { local_bytes: GIB, remote_bytes: 0, missed_bytes: 0 }),
        }
    }

    /// Returns a workload with this anonymous memory on each node.
    fn workload(cgroup: &str, kind: &str, memory: [u64; 2]) -> Workload {
        let nodes: Vec<_> = memory.iter().enumerate().map(|(node, bytes)| {
            serde_json::json!({"node": node, "resident": {"anonBytes": bytes, "fileBytes": 0, "kernelBytes": 0}})
        }).collect();
        let json = serde_json::json!({
            "workload": cgroup.rsplit('/').next(), "kind": kind, "cgroup": cgroup, "counters": "own", "nodes": nodes,
        });
        serde_json::from_value(json).unwrap()
    }

    /// Host with two nodes of eight CPUs and 16 GiB.
    fn observed(workloads: Vec<(WorkloadUsage, Workload)>) -> HostUsage {
        let machine = Machine::builder().nodes(2).cores_per_node(8).memory(Bytes::gib(16)).build().unwrap();
        let node = |node: u32, free_cpus: &str| NodeCapacity {
            node,
            free_cpus: free_cpus.to_owned(),
            memory: vec![KindCapacity {
                kind: "memory".to_owned(),
                total_bytes: 16 * GIB,
                reserved_bytes: GIB,
                allocatable_bytes: 15 * GIB,
                guaranteed_bytes: 0,
                free_bytes: 15 * GIB,
                withheld_bytes: 0,
            }],
        };
        let (usage, workloads) = workloads.into_iter().unzip();
        HostUsage {
            usage: Usage { workloads: usage },
            workloads,
            topology: Topology::from(&machine),
            allocations: Some(Allocations {
                nodes: vec![node(0, "1-7"), node(1, "8-15")],
                ..Allocations::default()
            }),
        }
    }

    fn summary(all: &[Recommendation]) -> Vec<(&str, Advice, &str)> {
        all.iter().map(|one| (one.workload.as_str(), one.advice, one.reason.as_str())).collect()
    }

    #[test]
    fn each_workload_has_advice_with_a_reason() {
        let pair = |name: &str, kind: &str, cpu_millis: u64, memory: [u64; 2]| {
            let path = format!("/system.slice/{name}");
            (usage(&path, cpu_millis, memory[0] + memory[1]), workload(&path, kind, memory))
        };
        let mut young = pair("young.service", "unit", 4000, [GIB, GIB]);
        young.0.observed_seconds = 180;
        let mut accesses = pair("accesses.service", "unit", 2100, [4 * GIB, 0]);
        accesses.1.activity = Some(Activity {
            accesses: Some(vec![NodeAccesses {
                node: 0,
                local_pages: 600,
                remote_pages: 400,
                remote: vec![],
            }]),
            ..Activity::default()
        });
        let mut dark = pair("dark.service", "unit", 1000, [0, 0]);
        (dark.0.allocated, dark.0.memory_bytes) = (None, Some(level(GIB)));
        let mut held = observed(vec![
            pair("local.service", "unit", 2000, [4 * GIB, 0]),
            pair("spread.service", "unit", 3300, [GIB, 3 * GIB]),
            accesses,
            pair("memory.service", "unit", 100, [GIB, GIB]),
            pair("small.service", "unit", 100, [100 << 20, 100 << 20]),
            young,
            dark,
            pair("huge.service", "unit", 9000, [GIB, GIB]),
            pair("session-1.scope", "unit", 2000, [GIB, GIB]),
            pair("0123456789ab", "container", 2000, [GIB, GIB]),
            pair("outer.slice", "unit", 2000, [GIB, GIB]),
            pair("outer.slice/inner", "cgroup", 1000, [GIB / 8, GIB / 8]),
            pair("late.service", "unit", 6000, [GIB / 4, GIB / 4]),
            pair("held.service", "unit", 1500, [GIB, 0]),
        ]);
        let allocations = held.allocations.as_mut().unwrap();
        let json = serde_json::json!({
            "name": "held.service", "target": {"unit": "held.service"}, "cgroup": "/system.slice/held.service", "directory": "",
            "cpus": "0-3", "nodes": "0", "memory": [{"kind": "memory", "nodes": "0", "bytes": 8 * GIB}], "enforced": true,
            "settings": {}, "drift": [],
        });
        allocations.allocations.push(Arc::new(serde_json::from_value(json).unwrap()));
        let all = recommend(&held);
        let remote = |percent: u64| format!("{percent} % of it is remote");
        let (r40, r50, r25) = (remote(40), remote(50), remote(25));
        let expected = [
            ("accesses.service", Advice::Guarantee, r40.as_str()),
            ("memory.service", Advice::Guarantee, &r50),
            ("spread.service", Advice::Guarantee, &r25),
            ("inner", Advice::Guarantee, &r50),
            ("held.service", Advice::Keep, "1.5 of 4 CPUs at the peak; 1.0 GiB of 8.0 GiB at the peak"),
            ("young.service", Advice::Unknown, "the past is too short: 3 of 10 minutes"),
            ("dark.service", Advice::Unknown, "no accesses, allocations or nodes of its memory are known"),
            ("0123456789ab", Advice::None, "the runtime chooses its cgroup: request it for the container"),
            (
                "huge.service",
                Advice::None,
                "no node can give 12 CPUs and 2.5 GiB of memory: several nodes need policy: best-effort, and their own test",
            ),
            ("outer.slice", Advice::None, "the workloads in it count on their own"),
            ("session-1.scope", Advice::None, "a scope has another name the next time"),
            ("late.service", Advice::None, "no node has 8 CPUs and 640.0 MiB of memory free now"),
            ("small.service", Advice::None, "it is small: it never uses half a CPU or 256.0 MiB"),
            ("local.service", Advice::None, "100 % of it is local already"),
        ];
        assert_eq!(summary(&all), expected);
        let given: Vec<_> = all.iter().filter_map(|one| one.guarantee.as_ref().zip(one.node)).collect();
        let given: Vec<_> = given
            .iter()
            .map(|(of, node)| {
                (of.pattern(), of.cpus.map(|cpus| cpus.to_string()), of.memory.unwrap().0.0, *node)
            })
            .collect();
        let cpus = |number: u32| Some(number.to_string());
        let expected = [
            ("accesses.service", cpus(3), 5 * GIB, 0),
            ("memory.service", None, 5 * GIB / 2, 0),
            ("spread.service", cpus(5), 5 * GIB, 1),
            ("/system.slice/outer.slice/inner", cpus(2), 5 * GIB / 16, 0),
        ];
        assert_eq!(given, expected);

        let table = render(&all);
        assert!(table.contains("WORKLOAD") && table.contains("Observed for up to 60 minutes."), "{table}");
    }

    #[test]
    fn existing_guarantees_exclude_others() {
        let pair = |path: &str| (usage(path, 2000, 2 * GIB), workload(path, "unit", [GIB, GIB]));
        let mut all = observed(vec![pair("/a.slice/b.service"), pair("/c.service")]);
        let allocations = all.allocations.as_mut().unwrap();
        let json = serde_json::json!({
            "name": "a.slice", "target": {"unit": "a.slice"}, "cgroup": "/a.slice", "directory": "", "cpus": "",
            "nodes": "0", "memory": [], "enforced": true, "settings": {}, "drift": [],
        });
        allocations.allocations.push(Arc::new(serde_json::from_value(json).unwrap()));
        allocations.waiting.push(PendingGuarantee {
            cgroup: "/c.service".to_owned(),
            declared: "*.service".to_owned(),
            reason: "no room".to_owned(),
            rejection: None,
        });
        let recommended = recommend(&all);
        let expected = [
            ("b.service", Advice::None, "a.slice, in which it is, has a guarantee"),
            ("c.service", Advice::None, "*.service is declared for it and waits"),
        ];
        assert_eq!(summary(&recommended), expected);
        assert!(render_guarantees(&recommended).unwrap().ends_with("guarantees: []\n"));
    }

    #[test]
    fn memory_is_remote_from_where_the_workload_runs() {
        let percent = |memory: [u64; 2], seconds: [Option<u64>; 2]| {
            let on = |(node, seconds): (u32, Option<u64>)| {
                seconds.map(|seconds| NodeCpuUsage { node, micros: seconds * 1_000_000 })
            };
            let cpu_by_node = (0..).zip(seconds).filter_map(on).collect();
            let usage = WorkloadUsage { cpu_by_node, ..usage("/a.service", 1000, GIB) };
            remote_memory_percent(&usage, &workload("/a.service", "unit", memory))
        };
        assert_eq!(percent([4 * GIB, 0], [Some(900), Some(0)]), Some(0));
        assert_eq!(percent([4 * GIB, 0], [Some(0), Some(900)]), Some(100), "all of it on the other node");
        assert_eq!(percent([4 * GIB, 0], [Some(450), Some(450)]), Some(50));
        assert_eq!(percent([3 * GIB, GIB], [Some(900), Some(0)]), Some(25));
        assert_eq!(percent([3 * GIB, GIB], [None, None]), Some(25), "no CPU time by node");
        assert_eq!(percent([GIB, 3 * GIB], [Some(9), Some(0)]), Some(25), "too little CPU time");
        assert_eq!(percent([GIB >> 6, 0], [Some(0), Some(900)]), None, "too little memory");
        assert_eq!(percent([u64::MAX, 0], [Some(u64::MAX / 1_000_000), Some(0)]), Some(0));

        // Without memory of its own on a node, the workload's node is the one where it runs.
        let mut cpus = (usage("/b.service", 2000, GIB), workload("/b.service", "unit", [GIB, GIB]));
        cpus.0.cpu_by_node = vec![NodeCpuUsage { node: 1, micros: 900_000_000 }];
        let all = recommend(&observed(vec![cpus]));
        assert_eq!((all[0].node, all[0].remote_percent), (Some(1), Some(50)), "{:?}", summary(&all));
    }

    /// PostgreSQL's buffers are shared memory.
    #[test]
    fn shared_memory_counts_where_it_lies() {
        let mut database = (usage("/db.service", 2000, 8 * GIB), workload("/db.service", "unit", [GIB, 0]));
        let node = database.1.nodes.iter_mut().find(|node| node.node == 1).unwrap();
        node.resident =
            Some(Resident { file_bytes: 8 * GIB, shmem_bytes: 7 * GIB, ..node.resident.unwrap_or_default() });
        let all = recommend(&observed(vec![database]));
        assert_eq!(all[0].node, Some(1), "{:?}", summary(&all));
    }

    #[test]
    fn daemon_accepts_the_file_as_it_stands() {
        let pair = |path: &str, kind: &str, cpu_millis: u64, memory: [u64; 2]| {
            (usage(path, cpu_millis, memory[0] + memory[1]), workload(path, kind, memory))
        };
        let all = recommend(&observed(vec![
            pair("/system.slice/db@1.service", "unit", 2100, [3 * GIB, GIB]),
            pair("/batch/[a]*", "cgroup", 100, [GIB, GIB]),
        ]));
        let text = render_guarantees(&all).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::DirBuilder::new().mode(0o755).create(folder.path().join("guarantees.d")).unwrap();
        fs::write(folder.path().join("config.yaml"), "").unwrap();
        let file = folder.path().join("guarantees.d/recommended.yaml");
        fs::write(&file, &text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        let sources = Sources { file: Some(folder.path().join("config.yaml")), ..Sources::default() };
        let loaded = load(&sources).unwrap_or_else(|problems| panic!("{problems}:\n{text}"));
        let recommended: Vec<_> = all.iter().filter_map(|one| one.guarantee.clone()).collect();
        assert_eq!((&loaded.config.guarantees, recommended.len()), (&recommended, 2), "{text}");
        let cgroup = loaded.config.guarantees.iter().find_map(|of| of.cgroup.as_ref()).unwrap();
        assert!(
            cgroup.matches(&"/batch/[a]*".parse().unwrap()) && !cgroup.matches(&"/batch/ab".parse().unwrap())
        );
        let lines = [
            "# Peak: 2.1 busy CPUs, 4.0 GiB. 25 % of it is remote.",
            "  unit: db@1.service",
            "- cpus: 3",
            "  memory: 5Gi",
            "  memoryLimit: 10Gi",
            "    preferredNodes: \"0\"",
        ];
        for line in lines {
            assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
        }
    }

    #[test]
    fn one_node_needs_no_guarantee() {
        let path = "/system.slice/a.service";
        let mut observed = observed(vec![(usage(path, 4000, 4 * GIB), workload(path, "unit", [4 * GIB, 0]))]);
        observed.topology.nodes.truncate(1);
        observed.allocations = None;
        let all = recommend(&observed);
        assert_eq!(summary(&all), [("a.service", Advice::None, "the host has one node")]);
        let text = render_guarantees(&all).unwrap();
        assert!(text.ends_with("guarantees: []\n"), "{text}");
        assert!(render(&[]).contains("no workload was observed"));
    }
}
