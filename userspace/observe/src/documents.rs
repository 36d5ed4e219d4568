//! Documents of the API.

use std::{sync::Arc, time::Duration};

use numaward_api as api;
use numaward_cgroup::WorkloadKind;
use numaward_model::{
    headroom::NodeHeadroom,
    snapshot::{ResidentFigures, ResidentHugepages},
    verdict::{ResidencySplit, UserMemory},
};
use numaward_probes::{self as probes, Counters, IntruderClass, NodeCounters, Probe, SelfCheck, SlotId};
use numaward_topology::{NodeId, ZoneKind};

use crate::{
    activity::{self, micros},
    cpus::{self, CpuUse},
    history_worker, hugepages,
    naming::OTHER,
    observer::Observer,
    probe_costs::ProbeReadings,
    reading::CounterReading,
    shares::Holdings,
    snapshot::node_figures,
    table::PressureStats,
};

/// Resident memory of a workload by node.
#[derive(Clone, Copy)]
struct ResidentMemory<'a> {
    resident: Option<&'a Arc<[ResidentFigures]>>,
    hugepages: &'a ResidentHugepages,
}

impl Observer {
    /// Returns the nodes and their activity.
    pub fn nodes(&self) -> api::Nodes {
        let memory = self.node_memory.read(&self.machine());
        let read = self.read();
        let machine = &read.machine;
        let allocated = read
            .counted
            .as_ref()
            .map(|counted| read.table.sum(|slot| counted.slots.get(slot), &counted.other));
        let accesses = read.accesses();
        let nodes = memory.iter().map(node_figures).map(|memory| {
            let kinds = memory.kinds.iter().map(|(kind, total, free)| api::NodeMemory {
                kind: kind.to_string(),
                total_bytes: total.0,
                free_bytes: free.map(|free| free.0),
            });
            api::Node {
                node: memory.node.0,
                cpus: machine.nodes.get(&memory.node).map_or(String::new(), |node| node.cpus.to_string()),
                memory: kinds.collect(),
                allocated: allocated.as_ref().map(|sum| self.allocated(sum.get(memory.node))),
            }
        });
        api::Nodes {
            nodes: nodes.collect(),
            accesses: accesses.map(|accesses| accesses.iter().map(activity::accesses).collect()),
        }
    }

    /// Returns the workloads.
    pub fn workloads(&self) -> api::Workloads {
        self.demand.record();
        self.workloads_from(&self.read())
    }

    /// Returns the workloads with the figures of a reading.
    pub(crate) fn workloads_from(&self, read: &CounterReading) -> api::Workloads {
        let sampled = self.latest.sampled.borrow().clone();
        let intruded = self.latest.intruded_cpus.borrow().clone();
        let CounterReading { counted, activity_counts, attached, .. } = read;
        let nodes: Vec<NodeId> = read.machine.nodes.keys().copied().collect();
        let by_node = |allocated: Option<&NodeCounters>,
                       memory_of: ResidentMemory<'_>,
                       activity: Option<&probes::Activity>,
                       cpu: &dyn Fn(NodeId) -> Option<Duration>,
                       can_miss: bool| {
            let missed = allocated.filter(|_| can_miss);
            let nodes = nodes.iter().enumerate().map(|(index, node)| api::WorkloadNode {
                node: node.0,
                allocated: allocated.map(|counters| self.allocated(counters.get(*node))),
                missed_bytes: missed.map(|counters| {
                    self.page_size.bytes_of(counters.get(*node).copied().unwrap_or_default().user_outside).0
                }),
                resident: memory_of.resident.and_then(|resident| resident.get(index)).map(resident),
                cpu_micros: cpu(*node).map(micros),
                hugepages: hugepages::of_node((index, *node), memory_of.hugepages, activity, can_miss),
            });
            nodes.collect()
        };
        let served = |activity: &probes::Activity| Some(attached.to_api(activity, self.page_size));
        let slots = counted.as_ref().map(|counted| &counted.slots);
        let none = ResidentHugepages::new();
        let nowhere = ResidentMemory { resident: None, hugepages: &none };
        let holdings = (!read.guarantees.workloads().is_empty()).then(|| Holdings::new(read));
        let residency = |id| {
            let splits = holdings.as_ref().zip(read.guarantees.get(id)).map(|(all, of)| all.by_kind(of));
            splits.into_iter().flatten().map(residency).collect()
        };
        let cpu_times = self.registry.cpu_times.read(&read.table, &read.machine, &self.health);
        let mut workloads = Vec::new();
        for (name, series) in read.table.series() {
            if series.members.is_empty() {
                let allocated = slots.and_then(|slots| series.counters(|slot| slots.get(slot)));
                let activity = series.activity(|slot| activity_counts.slots.get(slot));
                let cpu = |node| cpu_times.as_ref().map(|times| times.of_name(name, node));
                let nodes = by_node(allocated.as_deref(), nowhere, Some(&activity), &cpu, false);
                let removed = row(name, series.kind, api::Counters::Removed, nodes, series.pressure_stats());
                let activity = served(&activity);
                workloads.push(api::Workload { activity, ..removed });
            }
            for (&id, member) in series.members.iter() {
                let counters = match member.slot {
                    _ if slots.is_none() => api::Counters::None,
                    Some(_) => api::Counters::Own,
                    None => api::Counters::Other,
                };
                let allocated = member.slot.and_then(|slot| slots?.get(slot));
                let memory_of =
                    ResidentMemory { resident: member.resident.as_ref(), hugepages: &member.hugepages };
                let activity = member.slot.and_then(|slot| activity_counts.slots.get(slot));
                let cpu = |node| cpu_times.as_ref().map(|times| times.of_member(id, node));
                let can_miss = read.guarantees.binding_nodes_of(id).is_some();
                let nodes = by_node(allocated, memory_of, activity, &cpu, can_miss);
                workloads.push(api::Workload {
                    cgroup: Some(member.path.to_string()),
                    container: member.container.as_ref().map(|container| api::Container {
                        id: container.id.clone(),
                        pod_uid: container.pod_uid.clone(),
                        runtime: container.runtime.clone(),
                    }),
                    activity: activity.and_then(served).map(|of| {
                        let sampling: &str = sampled.state(id).into();
                        let percent = sampled.estimates.get(id).map(|share| share / 10);
                        api::Activity {
                            sampling: Some(sampling.to_owned()),
                            estimated_remote_percent: percent,
                            ..of
                        }
                    }),
                    residency: residency(id),
                    intruded_cpus: intruded.get(&id).map(ToString::to_string),
                    ..row(name, member.kind, counters, nodes, member.pressure_stats)
                });
            }
        }
        if let Some(counted) = counted {
            let nodes =
                by_node(Some(&counted.other), nowhere, Some(&activity_counts.other), &|_| None, false);
            let other = row(OTHER, WorkloadKind::Root, api::Counters::Own, nodes, PressureStats::default());
            let activity = served(&activity_counts.other);
            workloads.push(api::Workload { kind: OTHER.to_owned(), activity, ..other });
        }
        api::Workloads { workloads }
    }

    fn allocated(&self, counters: Option<&Counters>) -> api::AllocatedBytes {
        let allocated = self.page_size.allocated(counters);
        api::AllocatedBytes {
            local_bytes: allocated.local.0,
            remote_bytes: allocated.remote.0,
            kernel_bytes: allocated.kernel.0,
        }
    }

    /// Returns the exclusive CPUs and their use by intruders.
    pub fn exclusive_cpus(&self) -> Vec<api::ExclusiveCpu> {
        let used = cpus::cpu_use(self);
        let table = self.registry.lock().table.clone();
        let known = used.into_iter().filter_map(|CpuUse { cpu, owner, by, interrupts }| {
            let of = |class| micros(by.time_of(class));
            Some(api::ExclusiveCpu {
                cpu: cpu.0,
                workload: table.name_of_slot(owner?)?.to_string(),
                own_micros: micros(by.own),
                kernel_thread_micros: of(IntruderClass::KernelThread),
                host_micros: of(IntruderClass::Host),
                workload_micros: of(IntruderClass::Workload),
                hard_interrupts: interrupts.map(|interrupts| interrupts.hard),
                soft_interrupts: interrupts.map(|interrupts| interrupts.soft),
            })
        });
        known.collect()
    }

    /// Returns the intruders on the exclusive CPUs of the workloads of a name, the longest first; `None` if there is
    /// no such workload.
    pub fn intruders(&self, name: &str) -> Option<api::Intruders> {
        let cpus = self.exclusive_cpus().into_iter().filter(|cpu| cpu.workload == name).collect();
        let (found, watching, table) = {
            let probing = self.registry.probing();
            (probing.intruders(), probing.probes.is_watching_cpus(), self.registry.lock().table.clone())
        };
        let (_, series) = table.series().find(|(found, _)| &***found == name)?;
        let slots: Vec<SlotId> = series.members.values().filter_map(|member| member.slot).collect();
        let mut intruders: Vec<api::Intruder> = found
            .into_iter()
            .filter(|intruder| slots.contains(&intruder.owner))
            .map(|intruder| api::Intruder {
                class: intruder.class.as_str().to_owned(),
                workload: intruder
                    .workload
                    .and_then(|slot| table.name_of_slot(slot))
                    .map(ToString::to_string),
                command: intruder.command,
                micros: micros(intruder.time),
                runs: intruder.runs,
            })
            .collect();
        intruders.sort_by(|a, b| b.micros.cmp(&a.micros).then_with(|| a.command.cmp(&b.command)));
        intruders.truncate(api::MAX_INTRUDERS);
        Some(api::Intruders { watching, cpus, intruders })
    }

    /// Returns the last hour of the host.
    pub fn history(&self) -> api::History {
        self.past.lock().history.host(self.start)
    }

    /// Returns the last hour of the workload with this cgroup, or the sum of all with this name; `None` if there is
    /// no history.
    pub fn workload_history(&self, key_or_name: &str) -> Option<api::WorkloadHistory> {
        self.past.lock().history.workload(self.start, key_or_name)
    }

    /// Returns the last ten minutes of all workloads.
    pub fn trends(&self) -> api::Trends {
        self.past.lock().history.trends(self.start)
    }

    /// Returns the CPU time and memory that workloads used in the last hour.
    pub fn usage(&self) -> api::Usage {
        let table = self.registry.lock().table.clone();
        let cpu_times = history_worker::cpu_times_by_node(self, &table).unwrap_or_default();
        let past = self.past.lock();
        let mut workloads = past.usage.workloads();
        let mut cpu_by_node = past.usage.cpu_by_node(&cpu_times);
        for usage in &mut workloads {
            usage.cpu_by_node = cpu_by_node.remove(&usage.cgroup).unwrap_or_default();
            usage.allocated = past.history.hourly(&usage.cgroup);
        }
        api::Usage { workloads }
    }

    /// Returns the state of the daemon itself.
    pub fn status(&self) -> api::Status {
        let (table, sampled) = (self.registry.lock().table.clone(), self.latest.sampled.borrow().clone());
        let exclusive_cpus = self.exclusive_cpus();
        let figures = ProbeReadings::take(self);
        let probes = figures.reports.iter().map(|report| {
            let cost = figures.cost(report.probe);
            api::Probe {
                probe: report.probe.to_string(),
                mode: sampled.mode(report),
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
                coverage_permille: self
                    .latest
                    .coverage_permille
                    .borrow()
                    .filter(|_| report.probe == Probe::Alloc),
                duty_cycle: figures
                    .sampled_ratio(report)
                    .is_some_and(|ratio| ratio < 1.0)
                    .then(|| self.config.probes.allocation.duty_cycle.map(|cycle| cycle.to_string()))
                    .flatten(),
            }
        });
        let maps = figures.maps.iter().map(|usage| api::Map {
            map: usage.map.to_owned(),
            entries: usage.entries,
            capacity: usage.capacity,
        });
        let (own, other) = table.slots();
        let node_name = self.config.kubernetes.node_name.clone();
        api::Status {
            host: node_name.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into()),
            version: numaward_api::VERSION.to_owned(),
            uptime_seconds: self.start.elapsed().as_secs(),
            probes: probes.collect(),
            maps: maps.collect(),
            map_memory: figures
                .map_memory
                .iter()
                .map(|(family, bytes)| ((*family).to_owned(), *bytes))
                .collect(),
            workloads: api::WorkloadCount { own, other },
            exclusive_cpus,
            headroom: self.latest.headroom.borrow().nodes.iter().map(headroom).collect(),
            degraded: self
                .health
                .degraded()
                .iter()
                .map(|(part, reason)| api::DegradedPart {
                    part: part.name().to_owned(),
                    reason: reason.clone(),
                })
                .collect(),
            reservations: self.latest.reservations.borrow().clone(),
            container_runtime: self.latest.container_runtime.borrow().clone(),
        }
    }
}

/// Returns a workload without the figures that only a workload with a cgroup has.
fn row(
    name: &str,
    kind: WorkloadKind,
    counters: api::Counters,
    nodes: Vec<api::WorkloadNode>,
    pressure_stats: PressureStats,
) -> api::Workload {
    api::Workload {
        workload: name.to_owned(),
        kind: kind.as_str().to_owned(),
        cgroup: None,
        container: None,
        counters,
        nodes,
        residency: Vec::new(),
        intruded_cpus: None,
        pressure: pressure_stats.pressure.map(|pressure| api::Pressure {
            waiting_micros: micros(pressure.waiting),
            stalled_micros: micros(pressure.stalled),
        }),
        oom_kills: pressure_stats.oom_kills,
        tiering: pressure_stats.tiering.map(|tiering| api::Tiering {
            demoted_bytes: tiering.demoted.0,
            promoted_bytes: tiering.promoted.0,
        }),
        activity: None,
    }
}

/// Converts a workload's memory on a node for the API.
fn resident(bytes: &ResidentFigures) -> api::Resident {
    api::Resident {
        anon_bytes: bytes.anon.0,
        file_bytes: bytes.file.0,
        shmem_bytes: bytes.shmem.0,
        kernel_bytes: bytes.kernel.0,
    }
}

/// Converts a workload's memory of a kind for the API.
fn residency((kind, split): (ZoneKind, ResidencySplit)) -> api::GuaranteeResidency {
    let memory = |of: UserMemory| api::UserMemory {
        anon_bytes: of.anon.0,
        shmem_bytes: of.shmem.0,
        file_bytes: of.file.0,
    };
    api::GuaranteeResidency {
        kind: kind.to_string(),
        on: memory(split.on),
        off: memory(split.off),
        broken: split.is_broken(),
    }
}

/// Converts a node's headroom for the API.
fn headroom(of: &NodeHeadroom) -> api::NodeHeadroom {
    api::NodeHeadroom {
        node: of.node.0,
        obtainable_bytes: of.obtainable.0,
        unused_bytes: of.unused.0,
        margin_bytes: of.margin.0,
        low: of.is_low,
    }
}
