//! What a scrape serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use numaward_cgroup::{classify, read::hugetlb_numa_stat};
use numaward_model::{
    Promises, error_chain,
    snapshot::{
        self, Allocated, KindPromised, Lacking, MapFigures, Missed, OverBudget, ProbeFigures, PromiseFigures,
        SnapshotSource, WorkloadFigures,
    },
};
use numaward_probes::{self as probes, Counters, NodeCounters, Pages, SlotId};
use numaward_topology::{Bytes, NodeId, ZoneKind, sysfs};

use crate::{
    headroom::Claims,
    hugepages::pools,
    naming::OTHER,
    observer::Observer,
    part::Part,
    reading::Read,
    sampling::{Sampled, Sampling},
    table,
};

impl SnapshotSource for Observer {
    fn snapshot(&self) -> snapshot::Snapshot {
        let memory = self.node_memory();
        let nodes: Vec<NodeId> = memory.iter().map(|(node, _)| *node).collect();
        let exclusive_cpus = self.cpu_figures();
        self.ask();
        let read = self.read();
        let (sampled, counted) = (self.sampled.borrow().clone(), &read.counted);
        // Nodes may have come since.
        let as_before = read.machine.nodes.keys().eq(&nodes);
        let mut activity = read.activity_figures(&sampled, &nodes);
        let mut workloads: Vec<_> = read
            .table
            .series()
            .map(|(name, series)| {
                let allocated = counted.as_ref().and_then(|counted| series.counters(&counted.slots));
                let trouble = series.trouble();
                WorkloadFigures {
                    name: name.clone(),
                    allocated: allocated.map(|allocated| self.bytes(&nodes, &allocated)),
                    resident: series.resident().filter(|_| as_before),
                    hugepages: if as_before { series.hugepages() } else { Arc::default() },
                    pressure: trouble.pressure,
                    oom_kills: trouble.oom_kills,
                    activity: activity.remove(name),
                }
            })
            .collect();
        if let Some(counted) = counted {
            workloads.push(WorkloadFigures {
                name: OTHER.into(),
                allocated: Some(self.bytes(&nodes, &read.table.other(&counted.other))),
                resident: None,
                hugepages: Arc::default(),
                pressure: None,
                oom_kills: None,
                activity: activity.remove(OTHER),
            });
        }
        let promises = self.promise_figures(&read, &memory);
        let probing = self.probing();
        let costs = probing.stats();
        let probes: Vec<_> = probing
            .probes
            .reports()
            .iter()
            .map(|report| {
                let cost = costs.iter().find(|cost| cost.probe == report.probe);
                ProbeFigures {
                    probe: report.probe.to_string(),
                    mode: sampled.mode(report),
                    reason: self.reason(report).unwrap_or_default(),
                    runtime: cost.map(|cost| cost.run_time),
                    runs: cost.map(|cost| cost.run_count),
                    sampled_ratio: probing.sampled_ratio(report),
                    events_lost: cost.map(|cost| cost.events_lost),
                }
            })
            .collect();
        let maps: Vec<_> = probing
            .probes
            .map_usage()
            .into_iter()
            .map(|usage| MapFigures { map: usage.map, entries: usage.entries, capacity: usage.capacity })
            .collect();
        let map_memory = probing.probes.map_memory().collect();
        drop(probing);
        let (workloads_with_slot, workloads_without_slot) = read.table.slots();
        snapshot::Snapshot {
            nodes: memory.iter().map(node_figures).collect(),
            workloads,
            page_size: Bytes(self.page_size),
            accesses: read.accesses().map(|accesses| pairs(&accesses)),
            exclusive_cpus,
            unknown_node: counted.as_ref().map(|counted| self.bytes_of(counted.unknown_node)),
            probes,
            maps,
            map_memory,
            workloads_with_slot,
            workloads_without_slot,
            degraded: self.health.degraded().keys().map(|part| part.name()).collect(),
            promises,
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

/// A node's memory; nothing of it where that could not be read.
pub(crate) fn node_figures((node, memory): &(NodeId, Option<sysfs::NodeMemory>)) -> snapshot::NodeMemory {
    snapshot::NodeMemory { node: *node, kinds: memory.as_ref().map(kinds).unwrap_or_default() }
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

impl Observer {
    /// The memory of each node as it is now.
    pub(crate) fn node_memory(&self) -> Vec<(NodeId, Option<sysfs::NodeMemory>)> {
        let machine = self.machine();
        let mut failed = None;
        let nodes = machine.nodes.keys().map(|&node| {
            let memory = sysfs::node_memory(&self.config.host_root, node);
            (node, memory.map_err(|error| failed = Some(error_chain(&error))).ok())
        });
        let nodes = nodes.collect();
        self.note(Part::NodeMemory, failed.map_or(Ok(()), Err));
        nodes
    }

    /// Pages as bytes. What is too large is the largest number, so that it does not go down.
    pub(crate) fn bytes_of(&self, pages: Pages) -> Bytes {
        Bytes(pages.0.saturating_mul(self.page_size))
    }

    /// Pages as bytes, in the order of `nodes`.
    fn bytes(&self, nodes: &[NodeId], counters: &NodeCounters) -> Vec<Allocated> {
        nodes.iter().map(|node| self.in_bytes(counters.get(node))).collect()
    }

    /// Those of one node.
    pub(crate) fn in_bytes(&self, counters: Option<&Counters>) -> Allocated {
        let counters = counters.copied().unwrap_or_default();
        Allocated {
            local: self.bytes_of(counters.user_local),
            remote: self.bytes_of(counters.user_remote),
            kernel: self.bytes_of(counters.kernel),
        }
    }

    /// What could still be had of each kind of memory on each node, less what is promised there and not yet used.
    fn headroom(
        &self,
        read: &Read,
        memory: &[(NodeId, Option<sysfs::NodeMemory>)],
    ) -> Vec<(NodeId, ZoneKind, i64)> {
        let nodes: Vec<NodeId> = read.machine.nodes.keys().copied().collect();
        let (mut claims, mut unused) = (Claims::default(), BTreeMap::<(NodeId, ZoneKind), u64>::new());
        for promise in read.promises.workloads() {
            let resident = read.table.member(promise.id).and_then(|member| member.resident.as_ref());
            claims.add(promise, |node| {
                let index = nodes.iter().position(|other| *other == node)?;
                resident?.get(index).copied()
            });
            for (kind, node, bytes) in &promise.placed {
                let ZoneKind::Hugepages(size) = kind else { continue };
                let used = read.hierarchy.as_ref().map_or(0, |hierarchy| {
                    hugetlb_numa_stat(&hierarchy.dir(&promise.cgroup), *size)
                        .map_or(0, |by_node| by_node.get(node).map_or(0, |bytes| bytes.0))
                });
                *unused.entry((*node, *kind)).or_default() += bytes.0.saturating_sub(used);
            }
        }
        let mut headroom = Vec::new();
        for (node, memory) in memory {
            let Some(memory) = memory else { continue };
            for (size, pool) in &memory.hugepages {
                let (kind, free) = (ZoneKind::Hugepages(*size), pool.free.saturating_mul(size.0.0));
                let unused = unused.get(&(*node, kind)).copied().unwrap_or(0);
                headroom.push((*node, kind, free.cast_signed().saturating_sub_unsigned(unused)));
            }
            let left = claims.left(*node, self.obtainable(*node, memory)).0.cast_signed();
            headroom.push((*node, ZoneKind::Memory, left.saturating_sub_unsigned(claims.unused(*node).0)));
        }
        headroom
    }

    /// What workloads with memory on several nodes have there above their shares, where they are held to these.
    fn over_budget(&self, read: &Read) -> Vec<OverBudget> {
        if !self.config.holds_budgets() {
            return Vec::new();
        }
        let nodes: Vec<NodeId> = read.machine.nodes.keys().copied().collect();
        let mut over = Vec::new();
        for promise in read.promises.workloads() {
            let placed = promise.placed.iter().filter(|(kind, ..)| *kind == ZoneKind::Memory);
            let shares: Vec<(NodeId, Bytes)> = placed.map(|(_, node, bytes)| (*node, *bytes)).collect();
            let name = read.table.name(promise.id);
            let resident = read.table.member(promise.id).and_then(|member| member.resident.as_ref());
            let (Some(name), Some(resident), 2..) = (name, resident, shares.len()) else { continue };
            let above = |(node, Bytes(share)): (NodeId, Bytes)| {
                let index = nodes.iter().position(|other| *other == node)?;
                let of = resident.get(index)?;
                Some((node, Bytes(of.anon.0.saturating_add(of.file.0).saturating_sub(share))))
            };
            let bytes = shares.into_iter().filter_map(above).collect();
            over.push(OverBudget { workload: name.clone(), bytes });
        }
        over
    }

    /// What is promised and not there, by the label of the workload.
    fn missing(&self, promises: &Promises) -> Vec<Lacking> {
        let state = self.lock();
        let mut missing: BTreeMap<String, Lacking> = BTreeMap::new();
        for promise in promises.workloads() {
            let name = state.name_of(&classify(&promise.cgroup, |path| *path == promise.cgroup));
            let of_name = missing.entry(name).or_insert_with_key(|name| Lacking {
                workload: name.as_str().into(),
                offline_cpus: 0,
                uncovered: Bytes(0),
            });
            of_name.offline_cpus += promise.offline_cpus.len() as u64;
            of_name.uncovered.0 += promise.uncovered.iter().map(|block| block.bytes.0).sum::<u64>();
        }
        missing.into_values().collect()
    }

    /// What is promised, and which pages lie elsewhere.
    fn promise_figures(&self, read: &Read, memory: &[(NodeId, Option<sysfs::NodeMemory>)]) -> PromiseFigures {
        let (promises, machine) = (&read.promises, &read.machine);
        if promises.ledger.nodes().is_empty() && promises.workloads().is_empty() {
            return PromiseFigures::default();
        }
        let bytes = |pages| self.bytes_of(pages);
        let missed = read.table.series().filter_map(|(name, series)| {
            let counters = series.counters(&read.counted.as_ref()?.slots)?;
            let is_promised = read.is_promised(series);
            // Misses of a promise that ended stay counted.
            if !is_promised && counters.values().all(|counters| counters.user_outside.0 == 0) {
                return None;
            }
            let of = |node: &NodeId| bytes(counters.get(node).map_or(Pages(0), |of| of.user_outside));
            Some(Missed {
                workload: name.clone(),
                bytes: machine.nodes.keys().map(|node| (*node, of(node))).collect(),
            })
        });
        let missed = missed.collect();
        let headroom = self.headroom(read, memory);
        let exclusive: Vec<_> = promises.workloads().iter().flat_map(|promise| promise.cpus.iter()).collect();
        PromiseFigures {
            missed,
            missed_hugepages: read.missed_hugepages(),
            misplaced_hugepages: read.misplaced_hugepages(),
            kinds: promises
                .ledger
                .memory()
                .into_iter()
                .flat_map(|(node, kinds)| {
                    kinds.into_iter().map(move |(kind, account)| KindPromised {
                        node,
                        kind,
                        reserved: account.reserved,
                        allocatable: account.allocatable,
                        promised: account.promised,
                        free: account.free,
                    })
                })
                .collect(),
            exclusive_cpus: machine
                .nodes
                .iter()
                .map(|(&node, data)| {
                    (node, exclusive.iter().filter(|&&cpu| data.cpus.contains(cpu)).count() as u64)
                })
                .collect(),
            lacks: self.missing(promises),
            headroom,
            low: self.headroom.borrow().nodes.iter().map(|of| (of.node, of.is_low)).collect(),
            over_budget: self.over_budget(read),
            shared_pool_cpus: Some(promises.ledger.shared_pool().len() as u64),
        }
    }
}

impl Read {
    /// What is served of what the workloads did apart from allocating, by name.
    fn activity_figures(
        &self,
        sampled: &Sampled,
        nodes: &[NodeId],
    ) -> BTreeMap<Arc<str>, snapshot::WorkloadActivity> {
        let pools = pools(&self.machine);
        let of = |(name, series): (&Arc<str>, &table::Series<SlotId>)| {
            let activity = series.activity(&self.done.slots);
            let seen = || series.members.keys().filter_map(|id| sampled.seen.get(id));
            let states: BTreeSet<Sampling> = seen().map(|seen| seen.state).collect();
            let moved = seen().filter_map(|seen| seen.moved).reduce(u64::saturating_add);
            let figures = snapshot::WorkloadActivity {
                moved,
                sampling: states.into_iter().map(Into::into).collect(),
                estimated_remote_permille: sampled.estimates.mean(series.members.keys()),
                ..self.attached.figures(&activity, nodes, &pools)
            };
            (name.clone(), figures)
        };
        let other = (OTHER.into(), self.attached.figures(&self.done.other, nodes, &pools));
        self.table.series().map(of).chain([other]).collect()
    }
}
