//! `numaward simulate --hosts`: a fleet, and a scheduler that sends pods to its hosts.

use std::{
    fmt::Write as _,
    num::NonZero,
    panic,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use anyhow::bail;
use numaward_api::simulation::{FleetGroup, FleetOutcome, PodTotals, SimulatedFleet};
use numaward_config::Config;
use numaward_simulation::{
    fleet::{Deciders, Fleet, Group, MoveLimits, Outcome, RefusalPolicy, SchedulerPlugin},
    quality::per_mille,
    trace::Sums,
    variant::Variant,
};
use numaward_topology::Bytes;

use super::{PolicyConversion, amounts, members, named, percent, share, title, traces, variants};
use crate::{
    args::Simulate,
    table::{size, table},
};

/// A tick is taken for at least a minute: by then a pod is evicted with the default `kubernetes.refusedAfter` and pace.
const EVICTED: RefusalPolicy = RefusalPolicy::Evict { after: 1 };

/// The same, and moves within the default limits of `rebalance`.
const MAKES_ROOM: RefusalPolicy = RefusalPolicy::MakeRoom {
    after: 1,
    limits: MoveLimits { moves: 3, bytes: Bytes::gib(16), window: 60, dwell: 10 },
};

/// The deciders in the order of the rows. The last one is the reference for the losses of the other ones.
fn deciders(variants: &[Variant]) -> Vec<Deciders> {
    let mut deciders = Vec::new();
    for &variant in variants {
        let settings: &[RefusalPolicy] = match variant {
            Variant::Kubelet => &[RefusalPolicy::Fail],
            Variant::Native { .. } => &[RefusalPolicy::Wait, EVICTED, MAKES_ROOM],
        };
        let host = Some(variant);
        let plugins = [SchedulerPlugin::None, SchedulerPlugin::NodeResourceTopologyMatch];
        for &refused in settings {
            deciders.extend(plugins.map(|plugin| Deciders { host, refused, plugin }));
        }
        if let Variant::Native { .. } = variant {
            let claims = [(RefusalPolicy::Wait, false), (MAKES_ROOM, true)];
            deciders.extend(claims.map(|(refused, has_host_device)| {
                let plugin = SchedulerPlugin::ResourceClaims { has_host_device };
                Deciders { host, refused, plugin }
            }));
        }
    }
    deciders.push(Deciders { host: None, refused: RefusalPolicy::Fail, plugin: SchedulerPlugin::None });
    deciders
}

/// Returns the handling of a refused pod in one word.
const fn refused(by: Deciders) -> &'static str {
    match by.refused {
        RefusalPolicy::Fail => "fail",
        RefusalPolicy::Wait => "wait",
        RefusalPolicy::Evict { .. } => "evict",
        RefusalPolicy::MakeRoom { .. } => "make-room",
    }
}

/// Returns the assumptions of a row.
fn assumptions(by: Deciders) -> Vec<String> {
    let hosts = if by.host.is_some() {
        "hosts: each decides by its strategy, with the reservations of its trace or of --config"
    } else {
        "hosts: each is one node with what its nodes have and with their reservations, and decides as the kubelet does"
    };
    let scheduler = match by.plugin {
        SchedulerPlugin::NodeResourceTopologyMatch => {
            "scheduler: NodeResourcesFit, LeastAllocated and NodeResourceTopologyMatch with LeastNUMANodes over all hosts; what hosts \
             publish of nodes is always fresh, and without pods that are bound and refused"
        }
        SchedulerPlugin::ResourceClaims { has_host_device: false } => {
            "scheduler: NodeResourcesFit, LeastAllocated and DynamicResources over all hosts, for claims of devices of single nodes, \
             on several nodes in equal parts; slices are always fresh, the fullest node first"
        }
        SchedulerPlugin::ResourceClaims { has_host_device: true } => {
            "scheduler: NodeResourcesFit, LeastAllocated and DynamicResources over all hosts, for claims as without the host device; as \
             the last alternative, policies that allow several nodes have the host device: the host places the pod before it is bound, \
             with moves if needed, or it is sent elsewhere"
        }
        SchedulerPlugin::None => {
            "scheduler: NodeResourcesFit and LeastAllocated over all hosts, which knows sums of a host only"
        }
    };
    let refused = match by.refused {
        RefusalPolicy::Fail => {
            "refused pods: have failed and hold nothing; their controller makes a new one at once, then after 1, 2, 4, 8 … ticks"
        }
        RefusalPolicy::Wait => {
            "refused pods (kubernetes.refused: wait): keep what they request reserved, and are tried again on that host when pods \
             have left it"
        }
        RefusalPolicy::MakeRoom { .. } => {
            "refused pods (kubernetes.refused: make-room): up to 3 running containers of the host are moved so that the pod fits, up to \
             16 GiB in 60 ticks, each once in 10 ticks, in no time; if that does not help, they are evicted"
        }
        RefusalPolicy::Evict { .. } => {
            "refused pods (kubernetes.refused: evict): the same for a tick, which is taken for a minute; then they are evicted, one \
             of each host a tick, and their controller makes a new one at once; pods of Jobs, which stay in a cluster, are evicted too"
        }
    };
    let order = "order of a tick: pods leave or are given up, hosts try refused pods again, evictions, pods made anew and pods \
         without a host, arrivals; the oldest first";
    [hosts, scheduler, refused, order].map(str::to_owned).to_vec()
}

/// The outcome of a group, or of all groups.
#[derive(Clone, Default)]
struct Tally {
    outcome: Outcome,
    not_started: u64,
    reason: Option<String>,
}

impl Tally {
    fn from_group(group: &Group<'_>, deciders: Deciders) -> anyhow::Result<Self> {
        match group.run(deciders) {
            // A fault of `native` is a bug of numaward, like in a replay on one host.
            Ok(outcome) => match (deciders.host, outcome.faults.first()) {
                (Some(variant @ Variant::Native { .. }), Some(fault)) => {
                    bail!("{}, {variant}: {fault}; please report it as a bug", name(group))
                }
                _ => Ok(Self { outcome, ..Self::default() }),
            },
            Err(reason) => {
                let outcome = Outcome::default();
                Ok(Self { outcome, not_started: group.hosts as u64, reason: Some(reason) })
            }
        }
    }

    fn add(&mut self, other: &Self) {
        self.outcome.add(&other.outcome);
        self.not_started += other.not_started;
        if self.reason.is_none() {
            self.reason.clone_from(&other.reason);
        }
    }

    /// `without_numa`: the memory time that is admitted where each host is one node.
    fn document(&self, deciders: Deciders, asked: &Sums, without_numa: u64) -> FleetOutcome {
        let Outcome { sums, refusals, started_later, retries, moves, moved, .. } = &self.outcome;
        let (strategy, tiers) = deciders.host.map_or(("none", None), named);
        let lost =
            i64::try_from(without_numa).unwrap_or(i64::MAX).saturating_sub_unsigned(sums.memory_mib_ticks);
        let scheduler = match deciders.plugin {
            SchedulerPlugin::None => "NodeResourcesFit",
            SchedulerPlugin::NodeResourceTopologyMatch => "NodeResourceTopologyMatch",
            SchedulerPlugin::ResourceClaims { has_host_device: false } => "ResourceClaims",
            SchedulerPlugin::ResourceClaims { has_host_device: true } => "ResourceClaims, host device",
        };
        FleetOutcome {
            strategy: strategy.to_owned(),
            tiers,
            scheduler: scheduler.to_owned(),
            refused: refused(deciders).to_owned(),
            assumptions: assumptions(deciders),
            not_started_hosts: self.not_started,
            reason: self.reason.clone(),
            admitted: PodTotals { pods: sums.admitted(), ..amounts(sums) },
            lost_to_numa_mib_ticks: lost,
            refusals: *refusals,
            started_later: *started_later,
            retries: *retries,
            moves: *moves,
            moved_bytes: moved.0,
            never_placed: asked.guaranteed - sums.admitted(),
        }
    }
}

/// Replays a fleet with this number of hosts.
pub(crate) fn simulate(
    args: &Simulate,
    hosts: u16,
    config: Option<&Config>,
    to_policy: PolicyConversion,
) -> anyhow::Result<SimulatedFleet> {
    let traces = traces::read(&args.traces)?;
    let fleet = Fleet::new(members(&traces, args, config, to_policy)?, hosts.into(), args.seed)?;
    let deciders = deciders(&variants(args, config));
    let results = run(&fleet, &deciders)?;
    let documents = |asked: &Sums, results: &[Tally]| {
        let without_numa = results.last().map_or(0, |last| last.outcome.sums.memory_mib_ticks);
        let document = |(&by, result): (&Deciders, &Tally)| result.document(by, asked, without_numa);
        deciders.iter().zip(results).map(document).collect::<Vec<_>>()
    };
    let mut total = vec![Tally::default(); deciders.len()];
    let mut all = Sums::default();
    let mut groups = Vec::with_capacity(fleet.groups.len());
    for (group, results) in fleet.groups.iter().zip(results.chunks(deciders.len())) {
        let asked = group.asked();
        all.add(&asked);
        total.iter_mut().zip(results).for_each(|(total, result)| total.add(result));
        groups.push(FleetGroup {
            nodes: group.machine.nodes.len() as u64,
            cpus: group.machine.cpus.len() as u64,
            memory_bytes: group.machine.nodes.values().map(|node| node.memory.0).fold(0, u64::saturating_add),
            policy: group.policy.topology_manager_policy.to_string(),
            scope: group.policy.topology_manager_scope.to_string(),
            traces: group.traces().map(|trace| trace.name.clone()).collect(),
            hosts: group.hosts as u64,
            window_ticks: group.window,
            offered: amounts(&asked),
            outcomes: documents(&asked, results),
        });
    }
    Ok(SimulatedFleet {
        machine: args.machine.clone(),
        hosts: hosts.into(),
        seed: args.seed,
        offered: amounts(&all),
        outcomes: documents(&all, &total),
        groups,
    })
}

/// The results of each group in turn, on all CPUs. They do not depend on what ran where.
fn run(fleet: &Fleet<'_>, deciders: &[Deciders]) -> anyhow::Result<Vec<Tally>> {
    let jobs: Vec<_> =
        fleet.groups.iter().flat_map(|group| deciders.iter().map(move |&by| (group, by))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(group, by)) = jobs.get(number) else { return done };
            done.push((number, Tally::from_group(group, by)));
        }
    };
    let mut done = thread::scope(|scope| {
        let workers = thread::available_parallelism().map_or(1, NonZero::get);
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        let joined = workers.into_iter().map(thread::ScopedJoinHandle::join);
        joined.flat_map(|done| done.unwrap_or_else(|error| panic::resume_unwind(error))).collect::<Vec<_>>()
    });
    done.sort_by_key(|&(number, _)| number);
    done.into_iter().map(|(_, result)| result).collect()
}

fn name(group: &Group<'_>) -> String {
    let (nodes, cpus) = (group.machine.nodes.len(), group.machine.cpus.len());
    format!("hosts with {nodes} nodes, {cpus} CPUs, {}", group.policy.topology_manager_policy)
}

/// Formats the outcomes as text.
pub(crate) fn render(fleet: &SimulatedFleet, each: bool) -> String {
    let mut text = String::new();
    for group in fleet.groups.iter().filter(|_| each) {
        let FleetGroup { nodes, cpus, memory_bytes, policy, scope, hosts, offered, .. } = group;
        let memory = size(*memory_bytes);
        let _ = writeln!(
            text,
            "{hosts} hosts of {nodes} nodes, {cpus} CPUs, {memory}; {policy}, {scope}; {} Guaranteed pods",
            offered.pods
        );
        text += &outcomes(offered, &group.outcomes);
        text.push('\n');
    }
    let (hosts, groups, pods) = (fleet.hosts, fleet.groups.len(), fleet.offered.pods);
    let on = fleet.machine.as_ref().map_or_else(String::new, |machine| format!(" on {machine}"));
    let time = size(fleet.offered.memory_mib_ticks.saturating_mul(1 << 20));
    let _ = writeln!(
        text,
        "{hosts} hosts in {groups} groups{on}, seed {}: {pods} Guaranteed pods, memory time {time} ticks",
        fleet.seed
    );
    text += &outcomes(&fleet.offered, &fleet.outcomes);
    for outcome in &fleet.outcomes {
        if let Some(reason) = &outcome.reason {
            let (strategy, hosts) = (&outcome.strategy, outcome.not_started_hosts);
            let _ = writeln!(text, "\n{strategy} does not start on {hosts} hosts: {reason}");
        }
    }
    text += "\nPODS, CPU TIME and MEMORY TIME: admitted, of what was asked for. LOST TO NUMA: memory time, against hosts of one \
             node.\nREFUSALS: pods that a host refused when they were bound to it. STARTED LATER: on the host that had refused \
             them.\nMADE ANEW: pods for refused ones. MOVES: of running \
             containers, MOVED: their memory. NEVER PLACED: not within their trace's retry_after.\n\nWhat the rows rest \
             on:\n";
    let mut lines: Vec<(&str, Vec<String>)> = Vec::new();
    for (number, outcome) in fleet.outcomes.iter().enumerate() {
        for text in &outcome.assumptions {
            let row = (number + 1).to_string();
            match lines.iter_mut().find(|(known, _)| known == text) {
                Some((_, rows)) => rows.push(row),
                None => lines.push((text, vec![row])),
            }
        }
    }
    lines.sort_by_key(|(text, _)| text.split_once(':').map(|(what, _)| what));
    for (line, rows) in lines {
        let of = if rows.len() == 1 { "row" } else { "rows" };
        let _ = writeln!(text, "- {line} ({of} {})", rows.join(", "));
    }
    text
}

fn outcomes(offered: &PodTotals, outcomes: &[FleetOutcome]) -> String {
    let rows = outcomes.iter().enumerate().map(|(number, outcome)| {
        let FleetOutcome { strategy, tiers, admitted, refused, .. } = outcome;
        let hosts = match strategy.as_str() {
            "none" => "no NUMA".to_owned(),
            strategy => title(strategy, tiers.as_deref()),
        };
        let lost = outcome.lost_to_numa_mib_ticks;
        let sign = if lost < 0 { "-" } else { "" };
        vec![
            (number + 1).to_string(),
            hosts,
            outcome.scheduler.clone(),
            refused.clone(),
            share(admitted.pods, offered.pods),
            share(admitted.cpu_milli_ticks, offered.cpu_milli_ticks),
            share(admitted.memory_mib_ticks, offered.memory_mib_ticks),
            format!("{sign}{}", percent(per_mille(lost.unsigned_abs(), offered.memory_mib_ticks))),
            outcome.refusals.to_string(),
            outcome.started_later.to_string(),
            outcome.retries.to_string(),
            outcome.moves.to_string(),
            size(outcome.moved_bytes),
            outcome.never_placed.to_string(),
        ]
    });
    table(
        [
            "ROW",
            "HOSTS",
            "SCHEDULER",
            "REFUSED PODS",
            "PODS",
            "CPU TIME",
            "MEMORY TIME",
            "LOST TO NUMA",
            "REFUSALS",
            "STARTED LATER",
            "MADE ANEW",
            "MOVES",
            "MOVED",
            "NEVER PLACED",
        ],
        rows,
    )
}
