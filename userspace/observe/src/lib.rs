//! What this host does: its machine, its workloads, and what the probes count.
//!
//! One [`Observer`] holds the state; two threads keep it up to date ([`spawn`]): one follows the cgroups and
//! the machine, the other reads where each workload's memory lies, but only while somebody asks. Scrapes
//! and the API read the probes' counters at once and the rest from memory.
//!
//! Nothing here ends the daemon. What does not work is logged once, listed by `/api/v1/status`, and
//! tried again.

#![forbid(unsafe_code)]

mod activity;
mod affinity;
mod containers;
mod cost;
mod estimate;
pub mod events;
mod exclusive;
mod follow;
mod foreign;
mod hotplug;
mod interest;
mod intrusions;
mod naming;
mod promises;
mod residency;
mod sampling;
mod table;
mod told;

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::Thread,
    time::Instant,
};

use numaward_api as api;
use numaward_cgroup::{Hierarchy, WorkloadKind};
use numaward_config::Config;
use numaward_model::{
    Promises,
    port::CgroupListener,
    snapshot::{self, Allocated, MapFigures, ProbeFigures, Resident, SnapshotSource, WorkloadFigures},
};
use numaward_probes::{
    self as probes, Counters, Mode, NodeCounters, Pages, Probe, ProbeReport, ProbeStats, Probes, SelfCheck,
    SlotId,
};
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind, sysfs};

use self::{
    activity::{Activities, Attached, Counted, micros},
    cost::Cost,
    estimate::Estimates,
    exclusive::Exclusive,
    interest::Interest,
    intrusions::Intrusions,
    naming::OTHER,
    sampling::{Sampling, Seen},
    table::{Table, Trouble},
};
pub use self::{
    follow::{CgroupSource, Latches, spawn},
    foreign::ForeignPromises,
};
use crate::{affinity::Affinity, events::Events};

/// A part of the daemon that can work less well than it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Reading the machine.
    Topology,
    /// Telling the probes of nodes and memory that came.
    ProbeNodes,
    /// Finding workloads.
    Cgroups,
    /// Noticing new workloads without looking for them.
    CgroupWatch,
    /// Giving workloads counters of their own.
    Slots,
    /// Reading the nodes' memory.
    NodeMemory,
    /// Counting.
    Counters,
    /// Counting what workloads do beside allocating.
    Activity,
    /// Being told of misses, kills and stalls.
    ProbeEvents,
    /// Reading what the probes cost.
    ProbeStats,
    /// Attaching the allocation probe for a part of the time.
    DutyCycle,
    /// Reading where memory lies.
    Residency,
    /// Reading what the kubelet promised.
    Kubelet,
    /// Reading pods from the API server.
    KubernetesApi,
    /// Telling the scheduler what is free.
    NodeResourceTopology,
    /// Telling who runs on exclusive CPUs.
    Intruders,
    /// Counting interrupts on exclusive CPUs.
    Interrupts,
}

impl Part {
    const fn name(self) -> &'static str {
        match self {
            Self::Topology => "topology",
            Self::ProbeNodes => "probe nodes",
            Self::Cgroups => "cgroups",
            Self::CgroupWatch => "cgroup watch",
            Self::Slots => "slots",
            Self::NodeMemory => "node memory",
            Self::Counters => "counters",
            Self::Activity => "activity",
            Self::ProbeEvents => "probe events",
            Self::ProbeStats => "probe statistics",
            Self::DutyCycle => "duty cycle",
            Self::Residency => "residency",
            Self::Kubelet => "kubelet",
            Self::KubernetesApi => "Kubernetes API",
            Self::NodeResourceTopology => "NodeResourceTopology",
            Self::Intruders => "intruders",
            Self::Interrupts => "interrupts",
        }
    }
}

/// Somebody who is told of cgroups that come and go.
struct Listening(CgroupListener);

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listening")
    }
}

/// The state of this host as last seen.
#[derive(Debug)]
pub struct Observer {
    config: Config,
    events: Events,
    start: Instant,
    page_size: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    machine: Arc<Machine>,
    probes: Probes,
    table: Table<SlotId>,
    /// Where cgroups are found, once that is known.
    hierarchy: Option<Hierarchy>,
    /// What is promised.
    promises: Arc<Promises>,
    /// Who is told of cgroups that come and go.
    cgroup_listeners: Vec<Listening>,
    /// How often that changed.
    revision: u64,
    /// Somebody else's promises, where they are taken for our own.
    foreign: Option<Arc<dyn ForeignPromises>>,
    /// The names of containers of pods.
    containers: containers::Names,
    /// Is notified of containers to which nothing is known to be promised.
    containers_came: Arc<tokio::sync::Notify>,
    /// What workloads do beside allocating.
    activities: Activities,
    /// Whether their accesses are sampled.
    sampling: BTreeMap<numaward_cgroup::CgroupId, Seen>,
    /// Where they are not, and that is asked for: how many would be remote.
    estimates: Estimates,
    /// Whether `memory.stat` tells of sampling, where the probes do not.
    memory_stat_serves: bool,
    exclusive: Exclusive,
    /// What others did there.
    intrusions: Intrusions,
    /// Who gets a slot.
    interest: Interest,
    /// While the kernel measures the probes.
    cost: Option<Cost>,
    degraded: BTreeMap<Part, String>,
    /// When somebody last asked for the workloads' figures.
    asked: Option<Instant>,
    /// Who reads them then.
    reader: Option<Thread>,
    /// Where our own threads run, if they are to keep off exclusive CPUs.
    affinity: Option<Affinity>,
}

impl Observer {
    /// Reads the machine and attaches the probes. What fails is noted, not returned: the rest works.
    ///
    /// Attaching needs privileges; nothing later does.
    pub fn new(config: &Config) -> Self {
        let mut degraded = BTreeMap::new();
        let machine = sysfs::read(&config.host_root).unwrap_or_else(|error| {
            tracing::error!(error = %chain(&error), "the machine cannot be read: no figures by node");
            degraded.insert(Part::Topology, chain(&error));
            Machine::default()
        });
        // Before they are loaded: they check themselves at once.
        let cost = Cost::measure(Instant::now());
        let probes = Probes::load(&probe_options(config, &machine));
        for report in probes.reports() {
            let (probe, mode) = (report.probe, report.mode);
            let reason = report.reason.as_deref();
            match mode {
                Mode::Absent if !config.probes.is_enabled(probe).0 => tracing::info!(%probe, "switched off"),
                Mode::Absent => {
                    tracing::warn!(%probe, reason, "cannot be attached; `numaward doctor` says more");
                }
                _ => tracing::info!(%probe, %mode, reason, "attached"),
            }
        }
        let machine = Arc::new(machine);
        let asked = Some(Instant::now());
        let state = State {
            machine,
            probes,
            table: Table::default(),
            hierarchy: None,
            promises: Arc::default(),
            cgroup_listeners: Vec::new(),
            revision: 0,
            foreign: None,
            containers: containers::Names::default(),
            containers_came: Arc::default(),
            activities: Activities::default(),
            sampling: BTreeMap::new(),
            estimates: Estimates::default(),
            memory_stat_serves: false,
            exclusive: Exclusive::default(),
            intrusions: Intrusions::default(),
            interest: Interest::default(),
            cost,
            degraded,
            asked,
            reader: None,
            affinity: None,
        };
        Self {
            config: config.clone(),
            events: Events::default(),
            start: Instant::now(),
            page_size: rustix::param::page_size() as u64,
            state: Mutex::new(state),
        }
    }

    /// Where what happens is reported.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The machine as last read.
    pub fn machine(&self) -> Arc<Machine> {
        self.lock().machine.clone()
    }

    /// Grows with each change of what is promised.
    pub fn revision(&self) -> u64 {
        self.lock().revision
    }

    /// The nodes and what happens on them.
    pub fn nodes(&self) -> api::Nodes {
        let memory = self.node_memory();
        let mut state = self.lock();
        let machine = state.machine.clone();
        let allocated = state.counters().map(|counted| {
            let mut sum = state.table.other(&counted.other);
            for (_, series) in state.table.series() {
                series.add_to(&mut sum, &counted.slots);
            }
            sum
        });
        let counted = state.read_activity();
        let accesses = state.all_accesses(&counted);
        drop(state);
        let bytes = |pages: Pages| self.bytes_of(pages).0;
        let nodes = memory.into_iter().map(|memory| {
            let kinds = memory.kinds.iter().map(|(kind, total, free)| api::NodeMemory {
                kind: kind.to_string(),
                total_bytes: total.0,
                free_bytes: free.map(|free| free.0),
            });
            api::Node {
                node: memory.node.0,
                cpus: machine.nodes.get(&memory.node).map_or(String::new(), |node| node.cpus.to_string()),
                memory: kinds.collect(),
                allocated: allocated.as_ref().map(|sum| {
                    let of = sum.get(&memory.node).copied().unwrap_or_default();
                    api::Allocated {
                        local_bytes: bytes(of.user_local),
                        remote_bytes: bytes(of.user_remote),
                        kernel_bytes: bytes(of.kernel),
                    }
                }),
            }
        });
        api::Nodes {
            nodes: nodes.collect(),
            accesses: accesses.map(|accesses| accesses.iter().map(activity::accesses).collect()),
        }
    }

    /// The workloads.
    pub fn workloads(&self) -> api::Workloads {
        let mut state = self.lock();
        state.ask();
        let counted = state.counters();
        let done = state.read_activity();
        let attached = Attached::of(state.probes.reports());
        let machine = state.machine.clone();
        let nodes: Vec<NodeId> = machine.nodes.keys().copied().collect();
        let by_node =
            |allocated: Option<&NodeCounters>, resident: Option<&Arc<[Resident]>>, promised: bool| {
                let missed = allocated.filter(|_| promised);
                let allocated = allocated.map(|allocated| self.bytes(&nodes, allocated));
                let nodes = nodes.iter().enumerate().map(|(index, node)| api::WorkloadNode {
                    node: node.0,
                    allocated: allocated.as_ref().map(|allocated| api::Allocated {
                        local_bytes: allocated[index].local.0,
                        remote_bytes: allocated[index].remote.0,
                        kernel_bytes: allocated[index].kernel.0,
                    }),
                    missed_bytes: missed.map(|counters| {
                        self.bytes_of(counters.get(node).copied().unwrap_or_default().user_outside).0
                    }),
                    resident: resident.and_then(|resident| resident.get(index)).map(|bytes| api::Resident {
                        anon_bytes: bytes.anon.0,
                        file_bytes: bytes.file.0,
                        kernel_bytes: bytes.kernel.0,
                    }),
                });
                nodes.collect()
            };
        let row = |name: &str, kind: WorkloadKind, counters, nodes, trouble: Trouble| api::Workload {
            workload: name.to_owned(),
            kind: kind.as_str().to_owned(),
            cgroup: None,
            container: None,
            counters,
            nodes,
            pressure: trouble.pressure.map(|pressure| api::Pressure {
                waiting_micros: micros(pressure.waiting),
                stalled_micros: micros(pressure.stalled),
            }),
            oom_kills: trouble.oom_kills,
            activity: None,
        };
        let served = |activity: &probes::Activity| Some(attached.served(activity, self.page_size));
        let slots = counted.as_ref().map(|counted| &counted.slots);
        let mut workloads = Vec::new();
        for (name, series) in state.table.series() {
            if series.members.is_empty() {
                let allocated = slots.and_then(|slots| series.counters(slots));
                let nodes = by_node(allocated.as_ref(), None, false);
                let removed = row(name, series.kind, api::Counters::Removed, nodes, series.trouble());
                let activity = served(&state.activities.of(name, series, &done.slots));
                workloads.push(api::Workload { activity, ..removed });
            }
            for (&id, member) in &series.members {
                let counters = match member.slot {
                    _ if slots.is_none() => api::Counters::None,
                    Some(_) => api::Counters::Own,
                    None => api::Counters::Other,
                };
                let allocated = member.slot.and_then(|slot| slots?.get(&slot));
                let nodes =
                    by_node(allocated, member.resident.as_ref(), state.promises.nodes_of(id).is_some());
                workloads.push(api::Workload {
                    cgroup: Some(member.path.to_string()),
                    container: member.container.as_ref().map(|container| api::Container {
                        id: container.id.clone(),
                        pod_uid: container.pod_uid.clone(),
                        runtime: container.runtime.clone(),
                    }),
                    activity: member.slot.and_then(|slot| done.slots.get(&slot)).and_then(served).map(|of| {
                        let sampling = state.sampling.get(&id).map(|seen| seen.state).unwrap_or_default();
                        let percent = state.estimates.of(id).map(|share| share.0 / 10);
                        api::Activity {
                            sampling: Some(sampling.as_str().to_owned()),
                            estimated_remote_percent: percent,
                            ..of
                        }
                    }),
                    ..row(name, member.kind, counters, nodes, member.trouble)
                });
            }
        }
        if let Some(counted) = &counted {
            let nodes = by_node(Some(&state.table.other(&counted.other)), None, false);
            let other = row(OTHER, WorkloadKind::Root, api::Counters::Own, nodes, Trouble::default());
            let activity = served(&done.other);
            workloads.push(api::Workload { kind: OTHER.to_owned(), activity, ..other });
        }
        api::Workloads { workloads }
    }

    /// How the daemon itself is doing.
    pub fn status(&self) -> api::Status {
        let mut state = self.lock();
        let costs = state.stats();
        let probes = state.probes.reports().iter().map(|report| {
            let cost = costs.iter().find(|cost| cost.probe == report.probe);
            api::Probe {
                probe: report.probe.to_string(),
                mode: state.mode(report),
                reason: self.reason(report),
                self_check: report.self_check.as_ref().map(|check| match check {
                    SelfCheck::Passed(nodes) => format!("passed on nodes {nodes}"),
                    SelfCheck::Unchecked(reason) => format!("not done: {reason}"),
                }),
                nanoseconds_per_event: cost.and_then(|cost| {
                    let runs = u128::from(cost.run_count);
                    u64::try_from(cost.run_time.as_nanos().checked_div(runs)?).ok()
                }),
                measured_runs: cost.map(|cost| cost.run_count),
                measured_nanoseconds: cost
                    .map(|cost| u64::try_from(cost.run_time.as_nanos()).unwrap_or(u64::MAX)),
                events_lost: cost.map(|cost| cost.events_lost),
                duty_cycle: state
                    .sampled_ratio(report)
                    .is_some_and(|ratio| ratio < 1.0)
                    .then(|| self.config.probes.allocation.duty_cycle.map(|cycle| cycle.to_string()))
                    .flatten(),
            }
        });
        let maps = state.probes.map_usage().into_iter().map(|usage| api::Map {
            map: usage.map.to_owned(),
            entries: usage.entries,
            capacity: usage.capacity,
        });
        let (own, other) = state.table.slots();
        api::Status {
            version: numaward_api::VERSION.to_owned(),
            uptime_seconds: self.start.elapsed().as_secs(),
            probes: probes.collect(),
            maps: maps.collect(),
            map_memory: state.map_memory().map(|(family, bytes)| (family.to_owned(), bytes)).collect(),
            workloads: api::WorkloadCount { own, other },
            exclusive_cpus: state.exclusive_cpus(&self.config.host_root),
            degraded: state
                .degraded
                .iter()
                .map(|(part, reason)| api::Degraded { part: part.name().to_owned(), reason: reason.clone() })
                .collect(),
        }
    }

    /// Why a probe is not attached better.
    fn reason(&self, report: &ProbeReport) -> Option<String> {
        if let (false, key) = self.config.probes.is_enabled(report.probe) {
            return Some(format!("switched off by {key}"));
        }
        report.reason.clone()
    }

    /// The memory of each node as it is now.
    fn node_memory(&self) -> Vec<snapshot::NodeMemory> {
        let machine = self.machine();
        let mut failed = None;
        let nodes = machine.nodes.keys().map(|&node| {
            let kinds = match sysfs::node_memory(&self.config.host_root, node) {
                Ok(memory) => kinds(&memory),
                Err(error) => {
                    failed = Some(chain(&error));
                    Vec::new()
                }
            };
            snapshot::NodeMemory { node, kinds }
        });
        let nodes = nodes.collect();
        self.note(Part::NodeMemory, failed.map_or(Ok(()), Err));
        nodes
    }

    /// Pages as bytes. What is too large is the largest number, so that it does not go down.
    fn bytes_of(&self, pages: Pages) -> Bytes {
        Bytes(pages.0.saturating_mul(self.page_size))
    }

    /// The exclusive CPUs and how clean each was.
    pub fn exclusive_cpus(&self) -> Vec<api::ExclusiveCpu> {
        self.lock().exclusive_cpus(&self.config.host_root)
    }

    /// Pages as bytes, in the order of `nodes`.
    fn bytes(&self, nodes: &[NodeId], counters: &NodeCounters) -> Vec<Allocated> {
        let bytes = |pages| self.bytes_of(pages);
        let of = |node| {
            let counters: Counters = counters.get(node).copied().unwrap_or_default();
            Allocated {
                local: bytes(counters.user_local),
                remote: bytes(counters.user_remote),
                kernel: bytes(counters.kernel),
            }
        };
        nodes.iter().map(of).collect()
    }

    /// Notes that a part works, or why not; logs what changed.
    pub fn note(&self, part: Part, result: Result<(), String>) {
        self.lock().note(part, result);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic of another thread leaves at worst one workload's books incomplete.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether a probe counts allocations.
    fn is_counting(&self) -> bool {
        let counts = |report: &ProbeReport| report.probe == Probe::Alloc && report.mode != Mode::Absent;
        self.probes.reports().iter().any(counts)
    }

    /// Whether any probe counts by workload.
    fn needs_slots(&self) -> bool {
        self.probes.reports().iter().any(|report| report.mode != Mode::Absent)
    }

    /// How a probe is attached, or what serves in its place.
    fn mode(&self, report: &ProbeReport) -> String {
        match (report.probe, report.mode) {
            (Probe::Hint, Mode::Absent) if self.memory_stat_serves => "memory_stat".to_owned(),
            (Probe::OomKill, Mode::Absent) => "memory_events".to_owned(),
            (_, mode) => mode.to_string(),
        }
    }

    /// What is served of what the workloads did beside allocating, by name.
    fn activity_figures(
        &self,
        counted: &Counted,
        nodes: &[NodeId],
    ) -> BTreeMap<Arc<str>, snapshot::WorkloadActivity> {
        let attached = Attached::of(self.probes.reports());
        let of = |(name, series): (&Arc<str>, &table::Series<SlotId>)| {
            let activity = self.activities.of(name, series, &counted.slots);
            let seen = || series.members.keys().filter_map(|id| self.sampling.get(id));
            let states: std::collections::BTreeSet<Sampling> = seen().map(|seen| seen.state).collect();
            let moved = seen().filter_map(|seen| seen.moved).reduce(u64::saturating_add);
            let figures = snapshot::WorkloadActivity {
                moved,
                sampling: states.into_iter().map(Sampling::as_str).collect(),
                estimated_remote_permille: self.estimates.mean(series.members.keys()).map(|share| share.0),
                ..attached.figures(&activity, nodes)
            };
            (name.clone(), figures)
        };
        let other = (OTHER.into(), attached.figures(&counted.other, nodes));
        self.table.series().map(of).chain([other]).collect()
    }

    /// What the probes counted; `None` where none counts.
    fn counters(&mut self) -> Option<probes::Snapshot> {
        if !self.is_counting() {
            return None;
        }
        let counted = self.probes.counters().map_err(|error| chain(&error));
        self.note(Part::Counters, counted.as_ref().map(|_| ()).map_err(Clone::clone));
        counted.ok()
    }

    /// What the probes cost; nothing where that cannot be read.
    fn stats(&mut self) -> Vec<ProbeStats> {
        let stats = self.probes.stats().map_err(|error| chain(&error));
        self.note(Part::ProbeStats, stats.as_ref().map(|_| ()).map_err(Clone::clone));
        stats.unwrap_or_default()
    }

    fn note(&mut self, part: Part, result: Result<(), String>) {
        match result {
            Ok(()) => {
                if self.degraded.remove(&part).is_some() {
                    tracing::info!(part = part.name(), "works again");
                }
            }
            Err(reason) => {
                if self.degraded.get(&part) != Some(&reason) {
                    tracing::warn!(part = part.name(), reason, "works less well than it should");
                    self.degraded.insert(part, reason);
                }
            }
        }
    }
}

impl SnapshotSource for Observer {
    fn promises(&self) -> snapshot::PromiseFigures {
        self.promise_figures()
    }

    fn snapshot(&self) -> snapshot::Snapshot {
        let node_memory = self.node_memory();
        let nodes: Vec<NodeId> = node_memory.iter().map(|memory| memory.node).collect();
        let mut state = self.lock();
        state.ask();
        let counted = state.counters();
        // Nodes may have come since.
        let as_before = state.machine.nodes.keys().eq(&nodes);
        let done = state.read_activity();
        let accesses = state.all_accesses(&done);
        let mut activity = state.activity_figures(&done, &nodes);
        let exclusive_cpus = state.cpu_figures(&self.config.host_root);
        let mut workloads: Vec<_> = state
            .table
            .series()
            .map(|(name, series)| {
                let allocated = counted.as_ref().and_then(|counted| series.counters(&counted.slots));
                let trouble = series.trouble();
                WorkloadFigures {
                    name: name.clone(),
                    allocated: allocated.map(|allocated| self.bytes(&nodes, &allocated)),
                    resident: series.resident().filter(|_| as_before),
                    pressure: trouble.pressure,
                    oom_kills: trouble.oom_kills,
                    activity: activity.remove(name),
                }
            })
            .collect();
        if let Some(counted) = &counted {
            workloads.push(WorkloadFigures {
                name: OTHER.into(),
                allocated: Some(self.bytes(&nodes, &state.table.other(&counted.other))),
                resident: None,
                pressure: None,
                oom_kills: None,
                activity: activity.remove(OTHER),
            });
        }
        let costs = state.stats();
        let probes = state.probes.reports().iter().map(|report| {
            let cost = costs.iter().find(|cost| cost.probe == report.probe);
            ProbeFigures {
                probe: report.probe.to_string(),
                mode: state.mode(report),
                reason: self.reason(report).unwrap_or_default(),
                runtime: cost.map(|cost| cost.run_time),
                runs: cost.map(|cost| cost.run_count),
                sampled_ratio: state.sampled_ratio(report),
                events_lost: cost.map(|cost| cost.events_lost),
            }
        });
        let maps = state.probes.map_usage().into_iter().map(|usage| MapFigures {
            map: usage.map,
            entries: usage.entries,
            capacity: usage.capacity,
        });
        let (workloads_with_slot, workloads_without_slot) = state.table.slots();
        snapshot::Snapshot {
            nodes: node_memory,
            workloads,
            page_size: Bytes(self.page_size),
            accesses: accesses.map(|accesses| pairs(&accesses)),
            exclusive_cpus,
            unknown_node: counted.map(|counted| self.bytes_of(counted.unknown_node)),
            probes: probes.collect(),
            maps: maps.collect(),
            map_memory: state.map_memory().collect(),
            workloads_with_slot,
            workloads_without_slot,
            degraded: state.degraded.keys().map(|part| part.name()).collect(),
        }
    }
}

/// Accesses by the node of the CPU and that of the memory.
fn pairs(accesses: &[probes::NodeAccesses]) -> Vec<(NodeId, Option<NodeId>, u64)> {
    let of = |from: &probes::NodeAccesses| {
        let local = (from.node, Some(from.node), from.local.0);
        let remote = from.remote_by_memory.iter().map(|(memory, pages)| (from.node, *memory, pages.0));
        std::iter::once(local).chain(remote).collect::<Vec<_>>()
    };
    accesses.iter().flat_map(of).collect()
}

/// Hugepages by size and what they leave of the node's memory.
fn kinds(memory: &sysfs::NodeMemory) -> Vec<(ZoneKind, Bytes, Option<Bytes>)> {
    let mut base = memory.total.0;
    let mut kinds = Vec::new();
    for (&size, pool) in &memory.hugepages {
        let bytes = |pages: u64| Bytes(pages.saturating_mul(size.0.0));
        base = base.saturating_sub(bytes(pool.total).0);
        kinds.push((ZoneKind::Hugepages(size), bytes(pool.total), Some(bytes(pool.free))));
    }
    kinds.push((ZoneKind::Memory, Bytes(base), Some(memory.free)));
    kinds
}

fn probe_options<'a>(config: &Config, machine: &'a Machine) -> probes::Options<'a> {
    let defaults = probes::Options::new(machine);
    probes::Options {
        slots: config.probes.slots,
        duty_cycle: config
            .probes
            .allocation
            .duty_cycle
            .and_then(|cycle| probes::DutyCycle::new(cycle.on.0, cycle.period.0).ok()),
        alloc_modes: if config.probes.allocation.enabled { defaults.alloc_modes } else { &[] },
        others: Probe::OTHERS.into_iter().filter(|probe| config.probes.is_enabled(*probe).0).collect(),
        long_stall: config.probes.stalls.event_from.0,
        debug_log: config.probes.allocation.debug_log,
        ..defaults
    }
}

/// An error with its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        // Some errors repeat their cause.
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
        source = error.source();
    }
    text
}
