//! `numaward status`: state of the daemon.

use std::{
    cmp::Reverse,
    fmt::{self, Write},
    time::Duration,
};

use numaward_api::{
    Allocations, ConfinementState, ContainerRuntime, Drift, DriftState, ExclusiveCpu, NodeHeadroom, Probe,
    Status, Workload, WorkloadCount,
};
use serde::Serialize;

use crate::{
    affinity::BoundThreads,
    table::{or_dash, row, seconds, size, table, wrap},
    top::Totals,
};

/// Maximum number of workloads in the table; JSON and YAML contain all.
const MAX_TABLE_WORKLOADS: usize = 20;

/// Answers of the daemon, with values that this program adds.
#[derive(Debug, Serialize)]
pub(crate) struct StatusReport {
    #[serde(flatten)]
    pub(crate) status: Status,
    #[serde(rename = "workloadList")]
    pub(crate) workloads: Vec<Workload>,
    /// Guarantees; absent if the daemon does not provide them, as one that only observes.
    #[serde(rename = "promised", skip_serializing_if = "Option::is_none")]
    pub(crate) allocations: Option<Allocations>,
    /// Threads with a guarantee that are bound to fewer CPUs than their cgroup has; empty for a daemon of another host.
    #[serde(rename = "narrow", skip_serializing_if = "Vec::is_empty")]
    pub(crate) bound_threads: Vec<BoundThreads>,
    /// Cost of the probes, if it was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cost: Option<ProbeCosts>,
}

/// Cost of the probes in a span of time.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProbeCosts {
    seconds: f64,
    probes: Vec<ProbeCost>,
}

/// Cost of one probe in a span of time.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct ProbeCost {
    probe: String,
    /// Number of runs on all CPUs.
    runs: u64,
    /// Duration of all runs.
    nanoseconds: u64,
}

impl ProbeCosts {
    /// Returns the cost between two answers of the daemon. A probe that is missing in one of them is skipped.
    pub(crate) fn between(before: &Status, after: &Status, span: Duration) -> Self {
        let cost = |probe: &Probe| {
            let before = before.probes.iter().find(|before| before.probe == probe.probe)?;
            Some(ProbeCost {
                probe: probe.probe.clone(),
                runs: probe.measured_runs?.checked_sub(before.measured_runs?)?,
                nanoseconds: probe.measured_nanoseconds?.checked_sub(before.measured_nanoseconds?)?,
            })
        };
        Self { seconds: span.as_secs_f64(), probes: after.probes.iter().filter_map(cost).collect() }
    }

    fn render(&self) -> String {
        let rows = self.probes.iter().map(|cost| {
            let per_run = or_dash(cost.nanoseconds.checked_div(cost.runs));
            let runs = as_float(cost.runs) / self.seconds;
            let share = as_float(cost.nanoseconds) / self.seconds / 1e7;
            row([&cost.probe, &format!("{runs:.0}"), &per_run, &format!("{share:.4} %")])
        });
        table(["COST OF", "RUNS/S", "NS/RUN", "OF ONE CPU"], rows)
    }
}

/// Converts a number, exactly up to 2^53.
#[expect(clippy::cast_precision_loss, reason = "the output has few digits")]
fn as_float(number: u64) -> f64 {
    number as f64
}

fn allocation_table(allocations: &Allocations) -> String {
    let rows = allocations.allocations.iter().map(|allocation| {
        let memory = allocation.memory.iter().map(|block| block.bytes).sum();
        let is_present = |drift: &&Drift| drift.state != DriftState::Repaired;
        let drift: Vec<&str> =
            allocation.drift.iter().filter(is_present).map(|drift| drift.knob.as_str()).collect();
        let drift = if drift.is_empty() { "none".to_owned() } else { drift.join(" ") };
        let cpus = if allocation.cpus.is_empty() { "shared" } else { &allocation.cpus };
        let name = match (allocation.releasing, allocation.stopped) {
            (true, _) => &format!("{} (releasing)", allocation.name),
            (false, true) => &format!("{} (stopped)", allocation.name),
            (false, false) => &allocation.name,
        };
        let nodes = match allocation.placement.memory_policy {
            Some(policy) => &format!("{} ({})", allocation.nodes, policy.as_str()),
            None => &allocation.nodes,
        };
        row([name, cpus, nodes, &size(memory), &drift])
    });
    table(["ALLOCATION", "CPUS", "NODES", "MEMORY", "DRIFT"], rows)
}

/// Renders the threads that are bound to fewer CPUs than their cgroup has.
fn bound_threads_table(bound: &[BoundThreads]) -> String {
    let rows = bound.iter().map(|threads| {
        row([&threads.workload, &threads.threads.to_string(), &threads.cpus, &threads.available])
    });
    table(["THREADS ON FEWER CPUS", "THREADS", "RUN ON", "OF CPUS"], rows)
}

/// Renders the use of exclusive CPUs since they became exclusive: by the workload itself, and by other programs.
fn exclusive_cpus(cpus: &[ExclusiveCpu]) -> String {
    let head =
        ["EXCLUSIVE CPU", "OWN", "KERNEL", "HOST", "OTHER WORKLOADS", "INTERRUPTS", "SOFTIRQS", "WORKLOAD"];
    let seconds = |micros| seconds(micros) + "s";
    let rows = cpus.iter().map(|cpu| {
        row([
            &cpu.cpu.to_string(),
            &seconds(cpu.own_micros),
            &seconds(cpu.kernel_thread_micros),
            &seconds(cpu.host_micros),
            &seconds(cpu.workload_micros),
            &or_dash(cpu.hard_interrupts),
            &or_dash(cpu.soft_interrupts),
            &cpu.workload,
        ])
    });
    table(head, rows)
}

/// Renders whether the nodes have enough available memory for the guarantees on them.
fn headroom(nodes: &[NodeHeadroom]) -> String {
    let rows = nodes.iter().map(|node| {
        let state = if node.low { "low" } else { "ok" };
        let [obtainable, unused] = [node.obtainable_bytes, node.unused_bytes].map(size);
        row([&node.node.to_string(), &obtainable, &unused, state])
    });
    table(["HEADROOM OF NODE", "AVAILABLE", "GUARANTEED, UNUSED", "STATE"], rows)
}

/// Renders the memory that is free in the ledger but in use outside of it; `None` if there is none.
fn withheld(allocations: &Allocations) -> Option<String> {
    let mut rows = allocations
        .nodes
        .iter()
        .flat_map(|node| {
            let withheld = node.memory.iter().filter(|memory| memory.withheld_bytes > 0);
            withheld.map(|memory| {
                row([
                    &node.node.to_string(),
                    &memory.kind,
                    &size(memory.free_bytes),
                    &size(memory.withheld_bytes),
                ])
            })
        })
        .peekable();
    rows.peek()?;
    Some(table(["NODE", "KIND", "FREE", "IN USE OUTSIDE THE LEDGER"], rows))
}

/// Renders the modes of enforcement and CPU isolation, the confined cgroups, pending restores and waiting workloads.
fn enforcement(allocations: &Allocations) -> String {
    let Allocations { enforcement, waiting, shared_cpus, .. } = allocations;
    let isolation = &enforcement.herding;
    let (mode, isolation_mode) = (api_name(enforcement.mode), api_name(isolation.mode));
    let mut text = format!("enforcement {mode}, CPU isolation {isolation_mode}, shared CPUs {shared_cpus}\n");
    if !isolation.cgroups.is_empty() {
        let rows = isolation.cgroups.iter().map(|confined| {
            let state = match (confined.state, &confined.reason) {
                (ConfinementState::Confined, _) => "confined",
                (ConfinementState::DryRun, _) => "dry run",
                (ConfinementState::Refused, None) => "refused",
                (ConfinementState::Refused, Some(reason)) => reason,
            };
            row([&confined.cgroup, if confined.cpus.is_empty() { "-" } else { &confined.cpus }, state])
        });
        let _ = write!(text, "\n{}", table(["CONFINED CGROUP", "CPUS", "STATE"], rows));
    }
    if let Some(count) = isolation.processes_in_root.filter(|count| *count > 0) {
        let _ = writeln!(text, "{count} processes in the root cgroup cannot be confined");
    }
    if !enforcement.homes.is_empty() {
        let rows = enforcement.homes.iter().map(|home| {
            let state = if home.kept { "kept" } else { "on trial" };
            let before = format!("{} %", home.remote_percent_before);
            row([&home.cgroup, &home.node.to_string(), &home.cpus, &before, state])
        });
        let _ = write!(
            text,
            "\n{}",
            table(["AUTOMATIC PLACEMENT", "NODE", "CPUS", "REMOTE BEFORE", "STATE"], rows)
        );
    }
    if !enforcement.pending_restores.is_empty() {
        let rows = enforcement.pending_restores.iter().map(|restore| {
            let value = |value: &str| if value.is_empty() { "-".to_owned() } else { value.to_owned() };
            let reason = restore.reason.as_deref().unwrap_or("-");
            row([&restore.cgroup, &restore.knob, &value(&restore.written), &value(&restore.found), reason])
        });
        let _ = write!(text, "\n{}", table(["PENDING RESTORE", "KNOB", "NOW", "BEFORE", "REASON"], rows));
    }
    if !waiting.is_empty() {
        let rows =
            waiting.iter().map(|workload| row([&workload.cgroup, &workload.declared, &workload.reason]));
        let _ = write!(text, "\n{}", table(["WAITING", "DECLARED", "REASON"], rows));
    }
    text
}

/// Returns the name of a value in the API.
fn api_name(value: impl Serialize) -> String {
    fmt::from_fn(|f| value.serialize(f)).to_string()
}

/// Renders a note about a part of the daemon.
fn noted(part: &str, note: &str) -> String {
    let head = format!("{part}: ");
    format!("{head}{}\n", wrap(note, head.len(), 2))
}

/// Renders the report as text.
pub(crate) fn render(report: &StatusReport) -> String {
    let StatusReport { status, workloads, allocations, bound_threads, cost } = report;
    let rows = status.probes.iter().map(|probe| {
        let mode = match &probe.duty_cycle {
            Some(cycle) => format!("{} {cycle}", probe.mode),
            None => probe.mode.clone(),
        };
        let [runs, cost, lost] =
            [probe.measured_runs, probe.nanoseconds_per_event, probe.events_lost].map(or_dash);
        row([&probe.probe, &mode, &runs, &cost, &lost])
    });
    let probes = table(["PROBE", "MODE", "RUNS", "NS/RUN", "LOST"], rows);
    let mut notes = String::new();
    for probe in &status.probes {
        let check = probe.self_check.as_ref().map(|check| format!("self-check {check}"));
        let coverage = probe.coverage_permille.map(|permille| {
            format!(
                "{}.{} % of the pages that the kernel allocated in the last hour were seen",
                permille / 10,
                permille % 10
            )
        });
        let all = probe.reason.iter().chain(&check).chain(&coverage);
        notes.extend(all.map(|note| noted(&probe.probe, note)));
    }
    let mut parts = vec![format!("numaward {}, up {}\n", status.version, uptime(status.uptime_seconds))];
    match cost {
        Some(cost) => parts.extend([probes, cost.render(), notes]),
        None => parts.push(probes + &notes),
    }
    if !status.maps.is_empty() {
        let maps = status.maps.iter();
        let rows = maps.map(|map| row([&map.map, &map.entries.to_string(), &map.capacity.to_string()]));
        let mut maps = table(["MAP", "ENTRIES", "CAPACITY"], rows);
        let memory = status.map_memory.iter().map(|(family, bytes)| format!("{family} {}", size(*bytes)));
        let memory = memory.collect::<Vec<_>>().join(", ");
        if !memory.is_empty() {
            let _ = writeln!(maps, "memory of all maps: {memory}");
        }
        parts.push(maps);
    }
    if let Some(allocations) = allocations {
        if !allocations.allocations.is_empty() {
            parts.push(allocation_table(allocations));
        }
        if !bound_threads.is_empty() {
            parts.push(bound_threads_table(bound_threads));
        }
        parts.extend(withheld(allocations));
        parts.push(enforcement(allocations));
    }
    if !status.exclusive_cpus.is_empty() {
        parts.push(exclusive_cpus(&status.exclusive_cpus));
    }
    if !status.headroom.is_empty() {
        parts.push(headroom(&status.headroom));
    }
    parts.extend(status.degraded.iter().map(|degraded| noted(&degraded.part, &degraded.reason)));
    parts.extend(status.reservations.iter().map(|origin| {
        let excess = origin.excess.iter().map(|excess| format!("; {excess}"));
        noted("reservations", &format!("{}{}", origin.source, excess.collect::<String>()))
    }));
    parts.extend(status.container_runtime.iter().map(container_runtime));
    let WorkloadCount { own, other } = status.workloads;
    parts.push(format!("Cgroups of workloads with their own counters: {own}, without: {other}\n"));
    if !workloads.is_empty() {
        parts.push(workload_table(workloads));
    }
    parts.join("\n")
}

fn container_runtime(runtime: &ContainerRuntime) -> String {
    let version = format!("{} {}", runtime.name, runtime.version);
    let faults = runtime.faults.iter().map(|fault| fault.finding.clone());
    noted("container runtime", &[version].into_iter().chain(faults).collect::<Vec<_>>().join("; "))
}

fn workload_table(workloads: &[Workload]) -> String {
    let mut sorted: Vec<_> =
        workloads.iter().map(|workload| (Totals::from_workload(workload), workload)).collect();
    // User memory: all, and the remote part.
    let allocated = |totals: &Totals| totals.allocated.map(|(local, remote)| (local + remote, remote));
    sorted.sort_by_key(|(totals, _)| Reverse((totals.resident_bytes(), allocated(totals))));
    let rows = sorted.iter().take(MAX_TABLE_WORKLOADS).map(|(totals, workload)| {
        let remote = allocated(totals).filter(|(all, _)| *all > 0).map(|(all, remote)| {
            // In tenths of a percent. The 128 bits are enough for a thousand times any size.
            let share = u128::from(remote) * 1000 / u128::from(all);
            format!("{}.{} %", share / 10, share % 10)
        });
        let sampling = workload.activity.as_ref().and_then(|activity| activity.sampling.as_ref());
        row([
            &or_dash(totals.resident_bytes().map(size)),
            &or_dash(allocated(totals).map(|(all, _)| size(all))),
            &or_dash(remote),
            &or_dash(sampling),
            &api_name(workload.counters),
            &workload.workload,
        ])
    });
    let mut text = table(["RESIDENT", "ALLOCATED", "REMOTE", "SAMPLED", "COUNTERS", "WORKLOAD"], rows);
    if sorted.len() > MAX_TABLE_WORKLOADS {
        let _ = writeln!(text, "and {} more: -o json lists all", sorted.len() - MAX_TABLE_WORKLOADS);
    }
    text
}

fn uptime(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match () {
        () if days > 0 => format!("{days}d {hours}h"),
        () if hours > 0 => format!("{hours}h {minutes}m"),
        () if minutes > 0 => format!("{minutes}m {}s", seconds % 60),
        () => format!("{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use numaward_api::{
        Activity, AllocatedBytes, Allocation, AutoPlacedWorkload, ConfinedCgroup, Counters, CpuIsolation,
        DegradedPart, Enforcement, EnforcementMode, KindCapacity, Map, NodeCapacity, PendingGuarantee,
        PendingRestore, Resident, RuntimeFault, WorkloadNode,
    };
    use std::{collections::BTreeMap, sync::Arc};

    use super::*;

    #[test]
    fn lists_pending_restores() {
        let pending = |reason: Option<&str>| PendingRestore {
            cgroup: "/r".to_owned(),
            knob: "cpuset.mems".to_owned(),
            written: "0".to_owned(),
            found: String::new(),
            reason: reason.map(str::to_owned),
        };
        let pending_restores = vec![pending(Some("busy")), pending(None)];
        let enforcement = Enforcement { pending_restores, ..Enforcement::default() };
        let text = super::enforcement(&Allocations { enforcement, ..Allocations::default() });
        let expected = "\
PENDING RESTORE  KNOB         NOW  BEFORE  REASON
/r               cpuset.mems  0    -       busy
/r               cpuset.mems  0    -       -
";
        assert!(text.ends_with(expected), "{text}");
    }

    fn bound_threads() -> BoundThreads {
        let [workload, cpus, available] = ["db.service", "6-7", "6-9"].map(str::to_owned);
        BoundThreads { workload, threads: 3, cpus, available }
    }

    fn degraded() -> DegradedPart {
        DegradedPart { part: "cgroups".to_owned(), reason: "none mounted".to_owned() }
    }

    const RESIDENT: Resident =
        Resident { anon_bytes: 1 << 20, file_bytes: 0, shmem_bytes: 0, kernel_bytes: 512 << 10 };

    fn workload(name: &str, counters: Counters, remote_bytes: u64, resident: Option<Resident>) -> Workload {
        Workload {
            workload: name.to_owned(),
            kind: "unit".to_owned(),
            cgroup: Some(format!("/{name}")),
            container: None,
            counters,
            nodes: vec![WorkloadNode {
                node: 0,
                missed_bytes: None,
                allocated: Some(AllocatedBytes { local_bytes: 3 << 20, remote_bytes, kernel_bytes: 0 }),
                resident,
                cpu_micros: None,
                hugepages: vec![],
            }],
            residency: Vec::new(),
            intruded_cpus: None,
            pressure: None,
            oom_kills: None,
            tiering: None,
            activity: resident
                .map(|_| Activity { sampling: Some("skipped_cpuset".to_owned()), ..Activity::default() }),
        }
    }

    #[test]
    fn renders_report() {
        let confined = |cgroup: &str, cpus: &str, reason: Option<&str>| ConfinedCgroup {
            cgroup: cgroup.to_owned(),
            cpus: cpus.to_owned(),
            state: if reason.is_some() { ConfinementState::Refused } else { ConfinementState::DryRun },
            reason: reason.map(str::to_owned),
            drift: Vec::new(),
        };
        let kind = |kind: &str, withheld_bytes: u64| KindCapacity {
            kind: kind.to_owned(),
            total_bytes: 1 << 30,
            reserved_bytes: 0,
            allocatable_bytes: 1 << 30,
            guaranteed_bytes: 0,
            free_bytes: 1 << 30,
            withheld_bytes,
        };
        let report = StatusReport {
            status: Status {
                host: "box".to_owned(),
                version: "1.2.3".to_owned(),
                uptime_seconds: 3 * 3600 + 65,
                probes: vec![Probe {
                    probe: "alloc".to_owned(),
                    mode: "tp_btf".to_owned(),
                    reason: Some("no BTF".to_owned()),
                    self_check: None,
                    nanoseconds_per_event: Some(41),
                    measured_runs: Some(1000),
                    measured_nanoseconds: Some(41_500),
                    events_lost: None,
                    coverage_permille: Some(985),
                    duty_cycle: Some("5s/1m".to_owned()),
                }],
                maps: vec![Map { map: "LEAF".to_owned(), entries: 3, capacity: 16 }],
                map_memory: BTreeMap::from([("alloc".to_owned(), 3 << 20), ("switch".to_owned(), 512 << 10)]),
                workloads: WorkloadCount { own: 1, other: 0 },
                exclusive_cpus: vec![ExclusiveCpu {
                    cpu: 3,
                    workload: "a.service".to_owned(),
                    own_micros: 61_234_567,
                    kernel_thread_micros: 1999,
                    host_micros: 0,
                    workload_micros: 0,
                    hard_interrupts: Some(17),
                    soft_interrupts: None,
                }],
                headroom: vec![NodeHeadroom {
                    node: 1,
                    obtainable_bytes: 300 << 20,
                    unused_bytes: 280 << 20,
                    margin_bytes: 32 << 20,
                    low: true,
                }],
                degraded: vec![degraded()],
                reservations: None,
                container_runtime: None,
            },
            bound_threads: vec![bound_threads()],
            allocations: Some(Allocations {
                shared_cpus: "0-1".to_owned(),
                enforcement: Enforcement {
                    mode: EnforcementMode::On,
                    herding: CpuIsolation {
                        mode: EnforcementMode::DryRun,
                        cgroups: vec![confined("/a", "0-1", None), confined("/b", "", Some("its own"))],
                        processes_in_root: Some(2),
                    },
                    homes: vec![AutoPlacedWorkload {
                        cgroup: "/h".to_owned(),
                        node: 1,
                        cpus: "4-7".to_owned(),
                        kept: false,
                        remote_percent_before: 52,
                    }],
                    ..Enforcement::default()
                },
                claims: Vec::new(),
                waiting: vec![PendingGuarantee {
                    cgroup: "/c".to_owned(),
                    declared: "/*".to_owned(),
                    reason: "no room".to_owned(),
                    rejection: None,
                }],
                nodes: vec![NodeCapacity {
                    node: 1,
                    free_cpus: "3".to_owned(),
                    memory: vec![kind("memory", 0), kind("hugepages-2Mi", 512 << 20)],
                }],
                ..Allocations::default()
            }),
            cost: None,
            workloads: vec![
                workload("other", Counters::Own, 0, None),
                workload("a.service", Counters::Removed, 1 << 20, Some(RESIDENT)),
            ],
        };
        let before = Status {
            probes: vec![Probe {
                measured_runs: Some(800),
                measured_nanoseconds: Some(31_500),
                ..report.status.probes[0].clone()
            }],
            ..report.status.clone()
        };
        let cost = ProbeCosts::between(&before, &report.status, Duration::from_secs(2));
        assert_eq!((cost.probes[0].runs, cost.probes[0].nanoseconds), (200, 10_000));
        let backwards = ProbeCosts::between(&report.status, &before, Duration::from_secs(2));
        assert_eq!(backwards.probes, [], "the daemon has restarted");
        let report = StatusReport { cost: Some(cost), ..report };
        let expected = "\
numaward 1.2.3, up 3h 1m

PROBE  MODE          RUNS  NS/RUN  LOST
alloc  tp_btf 5s/1m  1000  41      -

COST OF  RUNS/S  NS/RUN  OF ONE CPU
alloc    100     50      0.0005 %

alloc: no BTF
alloc: 98.5 % of the pages that the kernel allocated in the last hour were seen

MAP   ENTRIES  CAPACITY
LEAF  3        16
memory of all maps: alloc 3.0 MiB, switch 512.0 KiB

THREADS ON FEWER CPUS  THREADS  RUN ON  OF CPUS
db.service             3        6-7     6-9

NODE  KIND           FREE     IN USE OUTSIDE THE LEDGER
1     hugepages-2Mi  1.0 GiB  512.0 MiB

enforcement on, CPU isolation dry-run, shared CPUs 0-1

CONFINED CGROUP  CPUS  STATE
/a               0-1   dry run
/b               -     its own
2 processes in the root cgroup cannot be confined

AUTOMATIC PLACEMENT  NODE  CPUS  REMOTE BEFORE  STATE
/h                   1     4-7   52 %           on trial

WAITING  DECLARED  REASON
/c       /*        no room

EXCLUSIVE CPU  OWN      KERNEL  HOST    OTHER WORKLOADS  INTERRUPTS  SOFTIRQS  WORKLOAD
3              61.234s  0.001s  0.000s  0.000s           17          -         a.service

HEADROOM OF NODE  AVAILABLE  GUARANTEED, UNUSED  STATE
1                 300.0 MiB  280.0 MiB           low

cgroups: none mounted

Cgroups of workloads with their own counters: 1, without: 0

RESIDENT  ALLOCATED  REMOTE  SAMPLED         COUNTERS  WORKLOAD
1.5 MiB   4.0 MiB    25.0 %  skipped_cpuset  removed   a.service
-         3.0 MiB    0.0 %   -               own       other
";
        assert_eq!(render(&report), expected);
    }

    #[test]
    fn shows_runtime_with_faults() {
        let fault = |finding: &str| RuntimeFault {
            finding: finding.to_owned(),
            fix: "update it".to_owned(),
            repaired: true,
        };
        let runtime = ContainerRuntime {
            name: "containerd".to_owned(),
            version: "2.1.4".to_owned(),
            faults: vec![fault("one"), fault("two")],
        };
        assert_eq!(container_runtime(&runtime), "container runtime: containerd 2.1.4; one; two\n");
    }

    #[test]
    fn shows_memory_policy() {
        let allocation = |name: &str, placement: &str| -> Arc<Allocation> {
            let text = format!(
                r#"{{"name":"{name}","target":{{"cgroup":"/{name}"}},"cgroup":"/{name}","directory":"/x","cpus":"","nodes":"0-1",
                "memory":[],"enforced":true,"placement":{placement},"settings":{{}},"drift":[]}}"#
            );
            Arc::new(serde_json::from_str(&text).unwrap())
        };
        let allocations = Allocations {
            allocations: vec![allocation("scan", r#"{"memoryPolicy":"interleave"}"#), allocation("db", "{}")],
            ..Allocations::default()
        };
        let text = allocation_table(&allocations);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["scan", "shared", "0-1", "(interleave)", "0", "B", "none"]);
        assert_eq!(lines[2], ["db", "shared", "0-1", "0", "B", "none"]);
    }
}
