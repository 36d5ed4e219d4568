//! What is promised, as far as observing needs it: which pages are misses.

use std::{collections::BTreeMap, sync::Arc};

use numaward_cgroup::{CgroupId, CgroupPath, classify};
use numaward_model::{
    Promises, Report,
    port::{AssignmentSink, CgroupEvents, CgroupListener, EventSink, MachineSource},
    snapshot::{KindPromised, Lacking, Missed, PromiseFigures},
};
use numaward_probes as probes;
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind, sysfs};

use super::{Listening, Observer, Part, State, chain, table::Member};

impl MachineSource for Observer {
    fn machine(&self) -> Arc<Machine> {
        Self::machine(self)
    }
}

impl EventSink for Observer {
    fn report(&self, cgroup: Option<&CgroupPath>, report: Report) {
        let name = cgroup.map(|cgroup| self.lock().name_of(&classify(cgroup, |path| path == cgroup)));
        self.events().report(match name {
            Some(name) => report.workload(name),
            None => report,
        });
    }
}

impl CgroupEvents for Observer {
    fn subscribe(&self, listener: CgroupListener) {
        self.lock().cgroup_listeners.push(Listening(listener));
    }
}

impl AssignmentSink for Observer {
    /// The probes know the nodes of a workload when this returns: its first page is judged by them.
    fn assigned(&self, promises: Promises) {
        // While it is known what was promised before.
        self.report_probe_events();
        let mut state = self.lock();
        state.revision += 1;
        let before = std::mem::replace(&mut state.promises, Arc::new(promises));
        let now = state.promises.clone();
        for ended in before.workloads().iter().filter(|promise| !now.has(promise.id)) {
            state.allow(ended.id);
        }
        for promise in now.workloads() {
            if state.table.slot(promise.id).is_some() {
                let was = before.of(promise.id);
                let is_same = was.is_some_and(|was| Arc::ptr_eq(was, promise));
                if !is_same && before.nodes_of(promise.id) != now.nodes_of(promise.id) {
                    state.allow(promise.id);
                }
                continue;
            }
            let workload = classify(&promise.cgroup, |path| *path == promise.cgroup);
            let name = state.name_of(&workload);
            let member = Member::new(promise.cgroup.clone(), workload.kind, workload.container);
            state.table.add(promise.id, &name, member);
            state.table.prefer(promise.id);
        }
        state.keep_books(self.config.observe.keep_removed.0);
        state.follow_exclusive_cpus(&self.config.host_root);
        state.step_aside();
    }
}

impl State {
    /// Tells the probes which nodes a workload may use.
    fn allow(&mut self, id: CgroupId) {
        let Some(slot) = self.table.slot(id) else { return };
        let promises = self.promises.clone();
        let told = self.probes.set_allowed(slot, promises.nodes_of(id)).map_err(|error| chain(&error));
        self.note(Part::Slots, told);
    }
}

impl Observer {
    /// What could still be had of each kind of memory on each node, less what is promised there and not yet used.
    fn headroom(&self, state: &State, promises: &Promises) -> Vec<(NodeId, ZoneKind, i64)> {
        let nodes: Vec<NodeId> = state.machine.nodes.keys().copied().collect();
        let mut unused: BTreeMap<(NodeId, ZoneKind), u64> = BTreeMap::new();
        for promise in promises.workloads() {
            let member = state.table.member(promise.id);
            for (kind, node, bytes) in &promise.placed {
                let used = match kind {
                    ZoneKind::Memory => member
                        .and_then(|member| member.resident.as_ref())
                        .zip(nodes.iter().position(|other| other == node))
                        .and_then(|(resident, index)| resident.get(index))
                        .map_or(0, |bytes| bytes.sum().0),
                    ZoneKind::Hugepages(size) => state.hierarchy.as_ref().map_or(0, |hierarchy| {
                        numaward_cgroup::read::hugetlb_numa_stat(&hierarchy.dir(&promise.cgroup), *size)
                            .map_or(0, |by_node| by_node.get(node).map_or(0, |bytes| bytes.0))
                    }),
                };
                *unused.entry((*node, *kind)).or_default() += bytes.0.saturating_sub(used);
            }
        }
        let mut headroom = Vec::new();
        for node in nodes {
            let Ok(memory) = sysfs::node_memory(&self.config.host_root, node) else { continue };
            let base = [memory.free, memory.active_file, memory.inactive_file, memory.kernel_reclaimable];
            let pools = memory
                .hugepages
                .iter()
                .map(|(size, pool)| (ZoneKind::Hugepages(*size), pool.free.saturating_mul(size.0.0)));
            let base = (ZoneKind::Memory, base.iter().map(|bytes| bytes.0).sum());
            for (kind, available) in pools.chain([base]) {
                let unused = unused.get(&(node, kind)).copied().unwrap_or(0);
                headroom.push((node, kind, available.cast_signed().saturating_sub_unsigned(unused)));
            }
        }
        headroom
    }

    /// What is promised and not there, by the label of the workload.
    fn lacks(state: &State, promises: &Promises) -> Vec<Lacking> {
        let mut lacks: BTreeMap<String, Lacking> = BTreeMap::new();
        for promise in promises.workloads() {
            let name = state.name_of(&classify(&promise.cgroup, |path| *path == promise.cgroup));
            let of_name = lacks.entry(name).or_insert_with_key(|name| Lacking {
                workload: name.as_str().into(),
                offline_cpus: 0,
                uncovered: Bytes(0),
            });
            of_name.offline_cpus += promise.offline_cpus.len() as u64;
            of_name.uncovered.0 += promise.uncovered.iter().map(|block| block.bytes.0).sum::<u64>();
        }
        lacks.into_values().collect()
    }

    /// What is promised, and which pages lie elsewhere.
    pub(super) fn promise_figures(&self) -> PromiseFigures {
        let mut state = self.lock();
        let promises = state.promises.clone();
        let machine = state.machine.clone();
        if promises.ledger.nodes().is_empty() && promises.workloads().is_empty() {
            return PromiseFigures::default();
        }
        let counted = state.counters();
        let bytes = |pages| self.bytes_of(pages);
        let missed = state.table.series().filter_map(|(name, series)| {
            let counters = series.counters(&counted.as_ref()?.slots)?;
            let is_promised = series.members.keys().any(|&id| promises.nodes_of(id).is_some());
            // Misses of a promise that ended stay counted.
            if !is_promised && counters.values().all(|counters| counters.user_outside.0 == 0) {
                return None;
            }
            let of = |node: &NodeId| bytes(counters.get(node).map_or(probes::Pages(0), |of| of.user_outside));
            Some(Missed {
                workload: name.clone(),
                bytes: machine.nodes.keys().map(|node| (*node, of(node))).collect(),
            })
        });
        let missed = missed.collect();
        let headroom = self.headroom(&state, &promises);
        let exclusive: Vec<_> = promises.workloads().iter().flat_map(|promise| promise.cpus.iter()).collect();
        PromiseFigures {
            missed,
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
            lacks: Self::lacks(&state, &promises),
            headroom,
            shared_pool_cpus: Some(promises.ledger.shared_pool().len() as u64),
        }
    }
}
