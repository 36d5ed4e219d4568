//! The headroom guard: checks whether the nodes can keep the guarantees placed on them, and reports if not. Modules
//! that act on a shortage read its snapshot ([`ObservedHost`](numaward_model::port::ObservedHost)).
//!
//! # Algorithm
//! Each second the guard reads the memory of the nodes, one file for each. Reading the resident memory of workloads
//! with a guarantee takes longer, about 50 µs each. A page that such a workload allocates or frees changes the
//! available memory and its unused guarantee alike, so the guard reads these workloads only every [`CLAIMS_INTERVAL`] and
//! whenever a node seems low. It reads workloads without a guarantee if a node is low and the configuration asks for
//! an action. If guaranteed memory is to be kept free, it also reads them every [`CACHE_INTERVAL`] while a node is tight.
//!
//! With the strategy `native`, the guard also measures the memory in use without a guarantee ([`crate::conditions`])
//! and the load of the nodes ([`crate::load`]), even if there is no guarantee; workloads with a guarantee are then
//! read each second.
//!
//! # Invariants
//! - Without a guarantee of memory nothing is read, unless the strategy is `native`.
//! - Reading cgroups takes at most a fiftieth of the time, except that new guarantees are read in the next iteration.
//! - A node is declared low only by readings of a single iteration.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_cgroup::{
    CgroupId, CgroupPath, Hierarchy, ReadError, pod_cgroup,
    read::{self, hugetlb_numa_stat, memory_numa_stat},
};
use numaward_config::{guard::GuardMode, policy::StrategyKind};
use numaward_engine::HostConditions;
use numaward_model::{
    EventReport, Guarantees, WorkloadGuarantee,
    headroom::{Headroom, NodeHeadroom, PodUsage, UnguaranteedWorkload},
    health,
    snapshot::ResidentFigures,
};
use numaward_probes::SlotId;
use numaward_topology::{Bytes, NodeId, ZoneKind, sysfs};
use tokio_util::sync::CancellationToken;

use crate::{
    conditions::{self, GuaranteedUsage},
    headroom::{Claims, HeadroomChange, LowNodes, TightNodes, margin},
    load::LoadClasses,
    node_memory::NodeMemory,
    observer::Observer,
    reading::read_allocations,
    registry::StateSnapshot,
    residency,
    shares::shares,
    table::Table,
};

/// Interval at which the nodes' memory is read.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which workloads with a guarantee are read while no node seems low.
const CLAIMS_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the page cache of workloads without a guarantee is read while guaranteed memory is not free.
const CACHE_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which the watermarks are read. They rarely change, and the file is long.
const WATERMARKS_INTERVAL: Duration = Duration::from_mins(1);
/// Inverse of the largest share of the time that reading cgroups may take.
const TIME_SHARE_INVERSE: u32 = 50;

/// State of the guard between iterations.
#[derive(Debug, Default)]
struct Guard {
    lows: LowNodes,
    tights: TightNodes,
    /// Earliest time at which page cache is read again.
    cache_not_before: Option<Instant>,
    claims: Claims,
    /// The guarantees from which `claims` was computed.
    guarantees: Option<Arc<Guarantees>>,
    read: Option<Instant>,
    /// Earliest time at which a cgroup is read again.
    not_before: Option<Instant>,
    watermarks_read: Option<Instant>,
    load: LoadClasses,
    /// Host conditions that placement decisions use.
    conditions: Arc<HostConditions>,
}

/// Runs the guard until `stop` is cancelled. The caller that cancels it also wakes the thread.
pub(crate) fn run_guard(observer: &Observer, stop: &CancellationToken) {
    let mut guard = Guard::default();
    while !stop.is_cancelled() {
        health::beat();
        guard.check(observer);
        thread::park_timeout(POLL_INTERVAL);
    }
}

impl Guard {
    /// Reads the memory and publishes the headroom of the nodes.
    fn check(&mut self, observer: &Observer) {
        let (hierarchy, table, guarantees) = {
            let state = observer.registry.lock();
            (state.hierarchy.clone(), state.table.clone(), state.guarantees.clone())
        };
        let has_guarantee = |guarantee: &WorkloadGuarantee| {
            guarantee.placed.iter().any(|(kind, ..)| *kind == ZoneKind::Memory)
        };
        let uses_conditions = observer.config.strategy == StrategyKind::Native;
        let is_any = uses_conditions || guarantees.workloads().iter().any(|of| has_guarantee(of));
        let Some(hierarchy) = hierarchy.filter(|_| is_any) else {
            if self.guarantees.is_some() {
                let over = self.lows.judge(&mut [], Instant::now());
                report(observer, &over);
                *self = Self::default();
                observer.latest.publish_headroom(Headroom::default());
            }
            return;
        };
        let now = Instant::now();
        if self.watermarks_read.is_none_or(|marks| now.duration_since(marks) >= WATERMARKS_INTERVAL) {
            self.watermarks_read = Some(now);
            observer.node_memory.read_watermarks();
        }
        let memory = observer.node_memory.read(&observer.machine());
        let is_new = self.guarantees.as_ref().is_none_or(|of| !Arc::ptr_eq(of, &guarantees));
        let is_old =
            uses_conditions || self.read.is_none_or(|read| now.duration_since(read) >= CLAIMS_INTERVAL);
        let (mut nodes, mut spare) = judge(&observer.node_memory, &memory, &self.claims);
        let seems_low = nodes.iter().any(NodeHeadroom::is_short) || self.lows.is_any();
        let may_read = self.not_before.is_none_or(|not_before| now >= not_before);
        if seems_low && !is_new && !may_read {
            // The last readings of the workloads are too old to judge the nodes by.
            return;
        }
        let may_reclaim = may_read
            && observer.config.drops_page_cache()
            && self.cache_not_before.is_none_or(|not_before| now >= not_before);
        let seems_tight = may_reclaim && self.tights.has_tight(&nodes);
        let reads = is_new || may_read && (is_old || seems_low || seems_tight);
        if reads {
            let owned;
            (self.claims, owned) = read_claims(&hierarchy, &guarantees);
            if uses_conditions {
                self.read_load(observer);
                self.read_conditions(observer, &memory, &guarantees, &owned);
            }
            (self.guarantees, self.read) = (Some(guarantees.clone()), Some(now));
            (nodes, spare) = judge(&observer.node_memory, &memory, &self.claims);
        }
        let changes = self.lows.judge(&mut nodes, now);
        report(observer, &changes);
        let low: BTreeSet<NodeId> = nodes.iter().filter(|of| of.is_low).map(|of| of.node).collect();
        // Usage that was read at another time cannot be used for a judgement.
        if observer.config.drops_page_cache() && reads {
            self.tights.judge(&mut nodes);
        } else {
            self.tights.mark(&mut nodes);
        }
        let acts = observer.config.guard.acts() && !low.is_empty() && may_read;
        let is_cache_read = may_reclaim && reads && nodes.iter().any(|of| of.is_tight);
        let started = Instant::now();
        let others = if acts || is_cache_read {
            unguaranteed_workloads(&hierarchy, &table, &guarantees, &low, is_cache_read)
        } else {
            Vec::new()
        };
        let pods = if acts && observer.config.guard == GuardMode::Evict {
            pod_usage(&hierarchy, &table, &guarantees, &low)
        } else {
            Vec::new()
        };
        // The time spent on page cache alone must not delay the check of a node that becomes low.
        let mut apart = Duration::ZERO;
        if is_cache_read {
            let took = started.elapsed();
            self.cache_not_before = Some(now + CACHE_INTERVAL.max(took * TIME_SHARE_INVERSE));
            apart = if acts { Duration::ZERO } else { took };
        }
        self.not_before = Some(now + now.elapsed().saturating_sub(apart) * TIME_SHARE_INVERSE)
            .filter(|_| may_read || is_new)
            .or(self.not_before);
        let conditions = self.conditions.clone();
        observer.latest.publish_headroom(Headroom {
            look: 0,
            nodes,
            spare,
            others,
            pods,
            is_cache_read,
            conditions,
        });
    }

    /// Computes the host conditions from these readings.
    fn read_conditions(
        &mut self,
        observer: &Observer,
        memory: &[(NodeId, Option<sysfs::NodeMeminfo>)],
        guarantees: &Guarantees,
        owned: &GuaranteedUsage,
    ) {
        let obtainable = |node, memory: &sysfs::NodeMeminfo| observer.node_memory.obtainable(node, memory);
        let withheld = conditions::withheld(&guarantees.ledger, memory, obtainable, owned, &self.conditions);
        let offline_cpus = sysfs::offline_cpus(&observer.config.host_root).unwrap_or_else(|error| {
            tracing::debug!(%error, "the offline CPUs cannot be read: the previous set stays in use");
            self.conditions.offline_cpus.clone()
        });
        let load = self.load.classes().clone();
        // The thread with the ledger reads the CPUs of partitions.
        let conditions = HostConditions { withheld, offline_cpus, load, ..HostConditions::default() };
        if *self.conditions != conditions {
            self.conditions = Arc::new(conditions);
        }
    }

    /// Reads how much memory of each node the CPUs of other nodes allocated, if the interval has passed. Does nothing
    /// if no probe counts these allocations.
    fn read_load(&mut self, observer: &Observer) {
        let period =
            observer.config.probes.allocation.duty_cycle.map_or(Duration::ZERO, |cycle| cycle.period.0);
        let now = Instant::now();
        if !self.load.is_due(period, now) {
            return;
        }
        let maps = observer.registry.probing().probes.counter_maps();
        let Some(counters) = read_allocations(&maps, &observer.health) else { return };
        let StateSnapshot { table, holders, .. } = observer.registry.snapshot();
        let counted = counters.decode(&holders);
        let mut taken: BTreeMap<NodeId, Bytes> = BTreeMap::new();
        for (node, counters) in table.sum(|slot| counted.slots.get(slot), &counted.other).iter() {
            taken.insert(node, observer.page_size.bytes_of(counters.user_remote));
        }
        self.load.set(taken, now);
    }
}

/// Returns the headroom of each node with guaranteed memory, not yet judged, and the spare memory of every node.
fn judge(
    node_memory: &NodeMemory,
    memory: &[(NodeId, Option<sysfs::NodeMeminfo>)],
    claims: &Claims,
) -> (Vec<NodeHeadroom>, BTreeMap<NodeId, Bytes>) {
    let read = memory.iter().filter_map(|(node, memory)| Some((*node, memory.as_ref()?)));
    let mut nodes: Vec<_> = read
        .map(|(node, memory)| NodeHeadroom {
            node,
            obtainable: claims.left(node, node_memory.obtainable(node, memory)),
            free: node_memory.watermarks(node).free(memory),
            unused: claims.unused(node),
            margin: margin(memory.base()),
            is_low: false,
            is_tight: false,
        })
        .collect();
    let spare = nodes.iter().map(|of| (of.node, of.spare())).collect();
    let guaranteed: BTreeSet<NodeId> = claims.nodes().collect();
    nodes.retain(|of| guaranteed.contains(&of.node));
    (nodes, spare)
}

fn report(observer: &Observer, changes: &[HeadroomChange]) {
    for change in changes {
        observer.events.report(headroom_event(change));
    }
}

/// Formats a change of a node's state as an event.
fn headroom_event(changes: &HeadroomChange) -> EventReport {
    let mib = |bytes: Bytes| format!("{} MiB", bytes.0 >> 20);
    let numbers = |of: &NodeHeadroom| {
        let (obtainable, unused) = (mib(of.obtainable), mib(of.unused));
        format!("{obtainable} can be allocated there, {unused} of the guaranteed memory are not used yet")
    };
    match changes {
        HeadroomChange::BecameLow(of) | HeadroomChange::BecameNegative(of) => {
            let is_broken = of.headroom_bytes() < 0;
            let may = if is_broken { "does not have" } else { "may soon not have" };
            let message =
                format!("Node {} {may} the memory that is guaranteed on it: {}.", of.node, numbers(of));
            let severity = if is_broken { Severity::Critical } else { Severity::Warning };
            let report = EventReport::new(EventKind::HeadroomLow, message).severity(severity).node(of.node);
            report.detail("obtainableBytes", of.obtainable.0).detail("unusedBytes", of.unused.0)
        }
        HeadroomChange::Recovered(of) => {
            let message =
                format!("Node {} has the memory that is guaranteed on it: {}.", of.node, numbers(of));
            EventReport::new(EventKind::HeadroomLow, message).severity(Severity::Info).node(of.node)
        }
        HeadroomChange::Unmonitored(node) => {
            let message = format!(
                "Node {node} is no longer watched: no memory is guaranteed on it any more, or its memory cannot be read."
            );
            EventReport::new(EventKind::HeadroomLow, message).severity(Severity::Info).node(*node)
        }
    }
}

/// Reads how much of their guarantees the workloads use. A workload without a cgroup uses nothing.
fn read_claims(hierarchy: &Hierarchy, guarantees: &Guarantees) -> (Claims, GuaranteedUsage) {
    let (mut claims, mut owned) = (Claims::default(), GuaranteedUsage::default());
    for share in shares(guarantees) {
        let dirs: Vec<PathBuf> = share.workloads.iter().map(|of| hierarchy.dir(&of.cgroup)).collect();
        for (&kind, placed) in &share.placed {
            let has = match kind {
                ZoneKind::Memory => {
                    let read: Vec<_> = dirs.iter().map(|dir| memory_numa_stat(dir)).collect();
                    let mut resident: BTreeMap<NodeId, ResidentFigures> = BTreeMap::new();
                    for (node, of) in read.iter().flatten().flatten() {
                        let sum = resident.entry(*node).or_default();
                        *sum = sum.plus(residency::resident(*of));
                    }
                    claims.add(placed, &resident);
                    let undroppable = |of: BTreeMap<NodeId, read::CgroupNodeMemory>| {
                        of.into_iter().map(|(node, of)| (node, of.undroppable())).collect()
                    };
                    sum_by_node(read.into_iter().map(|read| read.map(undroppable)))
                }
                ZoneKind::Hugepages(size) => sum_by_node(dirs.iter().map(|dir| hugetlb_numa_stat(dir, size))),
            };
            owned.add(kind, placed, has.as_ref());
        }
    }
    (claims, owned)
}

/// Returns the sum of several cgroups' memory by node, or `None` if one of them cannot be read. A removed cgroup has
/// none.
fn sum_by_node(
    read: impl Iterator<Item = Result<BTreeMap<NodeId, Bytes>, ReadError>>,
) -> Option<BTreeMap<NodeId, Bytes>> {
    let mut sum: BTreeMap<NodeId, Bytes> = BTreeMap::new();
    for read in read {
        match read {
            Ok(read) => {
                for (node, bytes) in read {
                    let sum = sum.entry(node).or_default();
                    sum.0 = sum.0.saturating_add(bytes.0);
                }
            }
            Err(error) if error.is_gone() => {}
            Err(_) => return None,
        }
    }
    Some(sum)
}

/// Returns the workloads without a guarantee that have memory (or page cache, on request) on these nodes. Workloads
/// with a guarantee above or below them, or with another workload below them, are excluded.
fn unguaranteed_workloads(
    hierarchy: &Hierarchy,
    table: &Table<SlotId>,
    guarantees: &Guarantees,
    low: &BTreeSet<NodeId>,
    with_cache: bool,
) -> Vec<UnguaranteedWorkload> {
    let kept: BTreeSet<&CgroupPath> =
        guarantees.workloads().iter().map(|guarantee| &guarantee.cgroup).collect();
    let mut members: Vec<(CgroupId, &CgroupPath)> =
        table.members().map(|(id, member)| (id, &member.path)).collect();
    members.sort_by(|a, b| a.1.cmp(b.1));
    let mut found = Vec::new();
    for (index, (id, path)) in members.iter().enumerate() {
        // Descendants directly follow their ancestor.
        let is_outer = members.get(index + 1).is_some_and(|(_, next)| path.contains(next));
        let has_guarantee = |other: &&CgroupPath| path.contains(other) || other.contains(path);
        if is_outer || path.is_root() || kept.iter().any(has_guarantee) {
            continue;
        }
        let read = memory_numa_stat(&hierarchy.dir(path)).unwrap_or_default();
        let on = |node: &NodeId| read.get(node).map(|of| Bytes(of.anon.0.saturating_add(of.shmem.0)));
        let resident: Vec<_> =
            low.iter().filter_map(|node| Some((*node, on(node)?))).filter(|(_, bytes)| bytes.0 > 0).collect();
        let loose = read.iter().filter(|_| with_cache).map(|(node, of)| (*node, of.unmapped_page_cache()));
        let cache: Vec<_> = loose.filter(|(_, bytes)| bytes.0 > 0).collect();
        if !resident.is_empty() || !cache.is_empty() {
            found.push(UnguaranteedWorkload { cgroup: (*path).clone(), id: *id, resident, cache });
        }
    }
    found
}

/// Returns the memory of pods on these nodes beyond their guarantees. Pods in a cgroup with a guarantee are excluded: it covers them.
fn pod_usage(
    hierarchy: &Hierarchy,
    table: &Table<SlotId>,
    guarantees: &Guarantees,
    low: &BTreeSet<NodeId>,
) -> Vec<PodUsage> {
    let mut pods: BTreeMap<String, BTreeSet<CgroupPath>> = BTreeMap::new();
    for (uid, cgroup) in table.members().filter_map(|(_, member)| pod_cgroup(&member.path)) {
        pods.entry(uid).or_default().insert(cgroup);
    }
    let usage = pods.into_iter().filter_map(|(uid, cgroups)| {
        let is_within = |other: &CgroupPath| cgroups.iter().any(|cgroup| cgroup.contains(other));
        let covers =
            |other: &CgroupPath| cgroups.iter().any(|cgroup| cgroup != other && other.contains(cgroup));
        let workloads = guarantees.workloads();
        if workloads.iter().any(|of| covers(&of.cgroup)) {
            return None;
        }
        let mut used: BTreeMap<NodeId, u64> = BTreeMap::new();
        for cgroup in &cgroups {
            for (node, of) in memory_numa_stat(&hierarchy.dir(cgroup)).unwrap_or_default() {
                let sum = used.entry(node).or_default();
                *sum = sum.saturating_add(of.anon.0).saturating_add(of.shmem.0);
            }
        }
        let placed = workloads.iter().filter(|of| is_within(&of.cgroup)).flat_map(|of| &of.placed);
        let mut charged: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (_, node, bytes) in placed.filter(|(kind, ..)| *kind == ZoneKind::Memory) {
            let sum = charged.entry(*node).or_default();
            *sum = sum.saturating_add(bytes.0);
        }
        let beyond: Vec<_> = beyond_guarantee(used, &charged)
            .into_iter()
            .filter(|(node, bytes)| low.contains(node) && *bytes > 0)
            .map(|(node, bytes)| (node, Bytes(bytes)))
            .collect();
        (!beyond.is_empty()).then(|| PodUsage { uid, cgroups: cgroups.into_iter().collect(), beyond })
    });
    usage.collect()
}

/// Returns used memory beyond the charged one, by node. A guarantee can be charged on several nodes; its memory may be on any of them.
fn beyond_guarantee(used: BTreeMap<NodeId, u64>, charged: &BTreeMap<NodeId, u64>) -> BTreeMap<NodeId, u64> {
    let unused =
        charged.iter().map(|(node, bytes)| bytes.saturating_sub(used.get(node).copied().unwrap_or(0)));
    let mut unused = unused.fold(0_u64, u64::saturating_add);
    let mut beyond = used;
    for (node, bytes) in charged {
        if let Some(left) = beyond.get_mut(node) {
            *left = left.saturating_sub(*bytes);
            let within = unused.min(*left);
            (*left, unused) = (*left - within, unused - within);
        }
    }
    beyond
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use numaward_api::{EnforcementMode, PodContainer};
    use numaward_cgroup::WorkloadKind;
    use numaward_config::{Config, guard::GuardMode};
    use numaward_engine::Ledger;
    use numaward_engine::{
        NativeOptions, NativeStrategy, PolicyConfig, Quantity, Strategy as _,
        policy::{MemoryManagerPolicy, MemoryReservation},
    };
    use numaward_model::{snapshot::SnapshotSource as _, testing};
    use numaward_topology::Machine;

    use super::*;
    use crate::table::Member;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Writes a machine with two nodes of 1 GiB; `free` MiB of node 1 are free.
    fn machine(root: &Path, free: u64) {
        write(root, "sys/devices/system/cpu/online", "0-1\n");
        write(root, "sys/devices/system/node/online", "0-1\n");
        for (node, free) in [(0, 900), (1, free)] {
            let dir = format!("sys/devices/system/node/node{node}");
            write(root, &format!("{dir}/cpulist"), &format!("{node}\n"));
            let line = |key: &str, mib: u64| format!("Node {node} {key}: {} kB\n", mib << 10);
            let text = [line("MemTotal", 1024), line("MemFree", free), line("Inactive(file)", 10)].concat();
            write(root, &format!("{dir}/meminfo"), &text);
        }
    }

    fn memory_guarantee(path: &str, id: u64, mib: u64) -> Arc<WorkloadGuarantee> {
        testing::workload_guarantee(path, id, &[(ZoneKind::Memory, 1, Bytes::mib(mib))]).into()
    }

    /// Creates an observer of this host with these guarantees.
    fn observer(
        root: &Path,
        config: Config,
        guarantees: Vec<Arc<WorkloadGuarantee>>,
        ledger: Ledger,
    ) -> Observer {
        let observer = Observer::new(&Config { host_root: root.into(), ..config });
        observer.registry.lock().hierarchy = Some(Hierarchy::at(root));
        observer.registry.lock().guarantees = Arc::new(Guarantees::new(guarantees, ledger));
        observer
    }

    /// Host conditions of the strategy `native` without guarantees: 200 MiB of node 0 are reserved.
    fn ledger() -> Ledger {
        let nodes = Machine::builder().nodes(2).cores_per_node(2).memory(Bytes::gib(1)).build().unwrap();
        let reserved = MemoryReservation {
            numa_node: NodeId(0),
            limits: [(ZoneKind::Memory, Quantity::whole(Bytes::mib(200).0))].into(),
        };
        let policy = PolicyConfig {
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![reserved],
            ..PolicyConfig::default()
        };
        NativeStrategy::new(&nodes, &policy, &NativeOptions::default()).unwrap().idle()
    }

    /// Returns a container of a pod with one guarantee for all its containers; it is stored with one of them.
    fn of_pod(path: &str, id: u64, mib: u64) -> Arc<WorkloadGuarantee> {
        let pod = PodContainer {
            namespace: "n".to_owned(),
            pod: "p".to_owned(),
            container: path.trim_start_matches('/').to_owned(),
            pod_uid: "u".to_owned(),
            shares_pod: true,
        };
        let placed = (mib > 0).then_some((ZoneKind::Memory, 1, Bytes::mib(mib)));
        let of = testing::workload_guarantee(path, id, placed.as_slice());
        Arc::new(WorkloadGuarantee { owner: "u".into(), container: Some(pod), ..of })
    }

    #[test]
    fn reports_low_node_with_unguaranteed_use() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path(), 600);
        let config = Config { host_root: root.path().into(), guard: GuardMode::Act, ..Config::default() };
        let observer = Observer::new(&config);
        let mut guard = Guard::default();
        guard.check(&observer);
        assert_eq!(observer.latest.headroom.borrow().look, 0, "without a guarantee nothing is read");

        for (id, path) in (1..).zip(["/kept", "/kept/below", "/outer", "/outer/hog", "/hog", "/elsewhere"]) {
            let bytes = if path == "/elsewhere" { "N0=4096 N1=0" } else { "N0=4096 N1=104857600" };
            write(
                root.path(),
                &format!("{path}/memory.numa_stat")[1..],
                &format!("anon {bytes}\nfile {bytes}\ninactive_file {bytes}\n"),
            );
            let member = Member::new(path.parse().unwrap(), WorkloadKind::TopLevel, None);
            observer.registry.lock().table_mut().add(CgroupId(id), path, member);
        }
        observer.registry.lock().hierarchy = Some(Hierarchy::at(root.path()));
        let guarantees = Guarantees::new(vec![memory_guarantee("/kept", 1, 700)], Ledger::default());
        observer.registry.lock().guarantees = Arc::new(guarantees);
        guard.check(&observer);
        // 700 MiB, of which 200 are used; of the page cache nothing is available: the guarantee holds it.
        let seen = observer.latest.headroom.borrow().clone();
        let of = seen.node(NodeId(1)).unwrap();
        assert_eq!((of.unused, of.obtainable), (Bytes::mib(500), Bytes::mib(510)));
        assert!(of.is_low && of.is_short() && seen.node(NodeId(0)).is_none());
        // Node 0 has no guarantee: of 910 MiB, only the margin is not spare.
        assert_eq!(seen.spare, [(NodeId(0), Bytes::mib(910 - 32)), (NodeId(1), Bytes(0))].into());
        let others: Vec<&str> = seen.others.iter().map(|other| other.cgroup.as_str()).collect();
        assert_eq!(others, ["/hog", "/outer/hog"]);
        assert_eq!(seen.others[0].on(NodeId(1)), Bytes::mib(100), "page cache is not in the way");
        let events = observer.events().page(&numaward_api::EventFilter { limit: 10, ..Default::default() });
        assert_eq!(events.events.len(), 1, "{events:?}");
        assert!(
            events.events[0].message.contains("Node 1 may soon not have the memory that is guaranteed on it")
        );

        observer.registry.lock().guarantees = Arc::default();
        guard.check(&observer);
        assert!(observer.latest.headroom.borrow().nodes.is_empty());
    }

    #[test]
    fn pods_are_judged_by_memory_beyond_guarantees() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path(), 600);
        let config = Config { guard: GuardMode::Evict, ..Config::default() };
        let split = |path: &str, id| -> Arc<WorkloadGuarantee> {
            let placed = [(ZoneKind::Memory, 0, Bytes::mib(61)), (ZoneKind::Memory, 1, Bytes::mib(40))];
            testing::workload_guarantee(path, id, &placed).into()
        };
        let kept = vec![
            memory_guarantee("/kubepods/podp/guaranteed", 1, 800),
            memory_guarantee("/kept/podq/x", 9, 1),
            split("/kubepods/podsplit/x", 10),
            split("/kubepods/podwide/x", 12),
        ];
        let observer = observer(root.path(), config, kept, Ledger::default());
        for (id, path, anon) in [
            (1, "kubepods/podp/guaranteed", 100),
            (2, "kubepods/podp/plain", 700),
            (3, "kubepods/podp", 900),
            (4, "kubepods/podr/one", 1),
            (5, "kubepods/podr/two/below", 1),
            // The rest is that of a container that has ended.
            (6, "kubepods/podr", 300),
            (7, "kubepods/podsmall/one", 10),
            (8, "kubepods/podsmall", 10),
            (9, "kept/podq/x", 500),
            (10, "kubepods/podsplit/x", 100),
            (11, "kubepods/podsplit", 100),
            (12, "kubepods/podwide/x", 123),
            (13, "kubepods/podwide", 123),
        ] {
            let text = format!("anon N0=4096 N1={}\nfile N0=0 N1=0\nshmem N0=0 N1=0\n", anon << 20);
            write(root.path(), &format!("{path}/memory.numa_stat"), &text);
            let path = format!("/{path}");
            let member = Member::new(path.parse().unwrap(), WorkloadKind::TopLevel, None);
            observer.registry.lock().table_mut().add(CgroupId(id), &path, member);
        }
        Guard::default().check(&observer);
        let seen = observer.latest.headroom.borrow().clone();
        assert!(seen.node(NodeId(1)).unwrap().is_low);
        let pods: Vec<_> =
            seen.pods.iter().map(|pod| (pod.uid.as_str(), pod.on(NodeId(1)).0 >> 20)).collect();
        assert_eq!(pods, [("p", 100), ("r", 300), ("small", 10), ("wide", 22)]);
    }

    #[test]
    fn guarantee_on_several_nodes_counts_as_a_whole() {
        let by_node = |nodes: &[(u32, u64)]| nodes.iter().map(|(node, gib)| (NodeId(*node), *gib)).collect();
        let charged = by_node(&[(0, 6), (1, 4)]);
        for (used, expected) in [
            (&[(0, 0), (1, 10)][..], &[(0, 0), (1, 0)][..]),
            (&[(1, 10)], &[(1, 0)]),
            (&[(0, 0), (1, 12)], &[(0, 0), (1, 2)]),
            (&[(0, 7), (1, 5)], &[(0, 1), (1, 1)]),
            (&[(0, 8), (1, 3)], &[(0, 1), (1, 0)]),
            // No guarantee is charged on node 2.
            (&[(0, 1), (1, 4), (2, 3)], &[(0, 0), (1, 0), (2, 3)]),
        ] {
            assert_eq!(beyond_guarantee(by_node(used), &charged), by_node(expected), "{used:?}");
        }
    }

    #[test]
    fn reads_page_cache_while_node_is_tight() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path(), 600);
        write(
            root.path(),
            "hog/memory.numa_stat",
            "anon N0=0 N1=0\nfile N0=1048576 N1=3145728\nfile_mapped N0=0 N1=1048576\n",
        );
        let look = |enabled: bool, guard: GuardMode, times: usize| {
            let mut config = Config { guard, ..Config::default() };
            (config.guard_reclaim.enabled, config.enforcement.mode) = (enabled, EnforcementMode::On);
            let observer =
                observer(root.path(), config, vec![memory_guarantee("/kept", 1, 580)], Ledger::default());
            let member = Member::new("/hog".parse().unwrap(), WorkloadKind::TopLevel, None);
            observer.registry.lock().table_mut().add(CgroupId(2), "/hog", member);
            let mut guard = Guard::default();
            for _ in 0..times {
                guard.not_before = None;
                guard.check(&observer);
            }
            observer.latest.headroom.borrow().clone()
        };
        // 580 MiB and a margin of 20 (32 at least) are to be there: 600 are free, and 10 are page cache.
        let seen = look(true, GuardMode::Act, 1);
        let of = seen.node(NodeId(1)).unwrap();
        assert_eq!((of.is_tight, of.is_low, of.bytes_to_free()), (true, true, Bytes::mib(44)));
        let [hog] = &seen.others[..] else { panic!("{:?}", seen.others) };
        assert_eq!(hog.cgroup.as_str(), "/hog");
        assert_eq!(
            [0, 1].map(|node| hog.cache_on(NodeId(node))),
            [Bytes::mib(1), Bytes::mib(2)],
            "what is mapped stays"
        );
        assert!(look(true, GuardMode::Act, 2).others.is_empty(), "read a moment ago");
        for (enabled, guard) in [(false, GuardMode::Act), (true, GuardMode::Report)] {
            let seen = look(enabled, guard, 1);
            assert!(!seen.node(NodeId(1)).unwrap().is_tight && seen.others.is_empty(), "{enabled} {guard:?}");
        }
    }

    #[test]
    fn native_reads_conditions_when_idle() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path(), 600);
        write(root.path(), "sys/devices/system/cpu/present", "0-1,3\n");
        let seen = |strategy, guarantees: Vec<Arc<WorkloadGuarantee>>| {
            let config = Config { strategy, ..Config::default() };
            let observer = observer(root.path(), config, guarantees, ledger());
            let mut guard = Guard::default();
            guard.check(&observer);
            let first = observer.latest.headroom.borrow().conditions.clone();
            guard.check(&observer);
            assert!(Arc::ptr_eq(&first, &observer.latest.headroom.borrow().conditions), "nothing changed");
            assert_eq!(
                first.offline_cpus.to_string(),
                if strategy == StrategyKind::Native { "3" } else { "" }
            );
            [0, 1].map(|node| first.withheld_on(ZoneKind::Memory, NodeId(node)).0 >> 20)
        };
        assert_eq!(seen(StrategyKind::Kubelet, Vec::new()), [0, 0]);
        // Of node 0, 114 MiB are in use and 200 reserved; of node 1, 414 are in use.
        assert_eq!(seen(StrategyKind::Native, Vec::new()), [0, 414]);
        write(root.path(), "kept/memory.numa_stat", "anon N0=0 N1=209715200\nfile N0=0 N1=104857600\n");
        assert_eq!(
            seen(StrategyKind::Native, vec![memory_guarantee("/kept", 1, 150)]),
            [0, 264],
            "150 of them are its own"
        );
        write(
            root.path(),
            "sys/devices/system/node/node1/meminfo",
            "Node 1 MemTotal: 1048576 kB\nNode 1 MemFree: 1048576 kB\n",
        );
        assert_eq!(seen(StrategyKind::Native, Vec::new()), [0, 0]);
    }

    #[test]
    fn conditions_have_offline_cpus() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path(), 600);
        write(root.path(), "sys/devices/system/cpu/present", "0-3\n");
        let observer = observer(root.path(), Config::default(), Vec::new(), Ledger::default());
        Guard::default().check(&observer);
        assert_eq!(observer.latest.headroom.borrow().conditions.offline_cpus.to_string(), "2-3");
    }

    #[test]
    fn old_claims_declare_no_node_low() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path(), 600);
        let stat = |mib: u64| {
            write(root.path(), "kept/memory.numa_stat", &format!("anon N0=0 N1={}\n", mib << 20));
        };
        stat(0);
        let observer = observer(
            root.path(),
            Config::default(),
            vec![memory_guarantee("/kept", 1, 500)],
            Ledger::default(),
        );
        let mut guard = Guard::default();
        guard.check(&observer);
        assert!(!observer.latest.headroom.borrow().nodes[0].is_low);
        // It takes 400 MiB of its guarantee.
        machine(root.path(), 200);
        stat(400);
        guard.not_before = Some(Instant::now() + Duration::from_mins(1));
        guard.check(&observer);
        assert!(!guard.lows.is_any() && observer.latest.headroom.borrow().look == 1);
        guard.not_before = None;
        guard.check(&observer);
        let of = *observer.latest.headroom.borrow().node(NodeId(1)).unwrap();
        assert_eq!((of.unused, of.obtainable, of.is_low), (Bytes::mib(100), Bytes::mib(210), false));

        // A scrape returns the guard's readings.
        machine(root.path(), 50);
        let headroom = observer.snapshot().guarantees.headroom;
        assert!(headroom.contains(&(NodeId(1), ZoneKind::Memory, of.headroom_bytes())), "{headroom:?}");
        assert!(headroom.contains(&(NodeId(0), ZoneKind::Memory, 910 << 20)), "{headroom:?}");
    }

    #[test]
    fn shared_pod_memory_counts_once() {
        let root = tempfile::tempdir().unwrap();
        for path in ["a", "b"] {
            let stat = format!("anon N0={} N1={}\n", 10 << 20, 200 << 20);
            write(root.path(), &format!("{path}/memory.numa_stat"), &stat);
        }
        let hierarchy = Hierarchy::at(root.path());
        let guarantees = vec![of_pod("/a", 1, 500), of_pod("/b", 2, 0), of_pod("/gone", 3, 0)];
        let (claims, owned) =
            read_claims(&hierarchy, &Guarantees::new(guarantees.clone(), Ledger::default()));
        assert_eq!(claims.unused(NodeId(1)), Bytes::mib(100));
        let expected = |nodes: &[(u32, u64)]| {
            let mut owned = GuaranteedUsage::default();
            let has = nodes.iter().map(|(node, mib)| (NodeId(*node), Bytes::mib(*mib))).collect();
            owned.add(ZoneKind::Memory, &[(NodeId(1), Bytes::mib(500))].into(), Some(&has));
            owned
        };
        assert_eq!(owned, expected(&[(0, 20), (1, 400)]));
        // If a cgroup cannot be read, all guaranteed memory counts as used.
        fs::create_dir_all(root.path().join("gone/memory.numa_stat")).unwrap();
        let (_, owned) = read_claims(&hierarchy, &Guarantees::new(guarantees, Ledger::default()));
        assert_eq!(owned, expected(&[(1, 500)]));
    }

    #[test]
    fn unreadable_hugepages_count_as_used() {
        let root = tempfile::tempdir().unwrap();
        let kind = ZoneKind::Hugepages(numaward_topology::HugepageSize(Bytes::mib(2)));
        let guarantee = Arc::new(testing::workload_guarantee("/a", 1, &[(kind, 0, Bytes::mib(8))]));
        let guarantees = Guarantees::new(vec![guarantee], Ledger::default());
        let owned = || read_claims(&Hierarchy::at(root.path()), &guarantees).1;
        assert_eq!(owned(), GuaranteedUsage::default());
        fs::create_dir(root.path().join("a")).unwrap();
        let mut all = GuaranteedUsage::default();
        all.add(kind, &[(NodeId(0), Bytes::mib(8))].into(), None);
        assert_eq!(owned(), all);
    }

    #[test]
    fn unreadable_conditions_stay() {
        let root = tempfile::tempdir().unwrap();
        machine(root.path(), 600);
        write(root.path(), "sys/devices/system/cpu/present", "0-1,3\n");
        let config = Config { strategy: StrategyKind::Native, ..Config::default() };
        let observer = observer(root.path(), config, Vec::new(), ledger());
        let mut guard = Guard::default();
        guard.check(&observer);
        let before = observer.latest.headroom.borrow().conditions.clone();
        assert_eq!(before.withheld_on(ZoneKind::Memory, NodeId(1)), Bytes::mib(414));
        fs::remove_file(root.path().join("sys/devices/system/node/node1/meminfo")).unwrap();
        write(root.path(), "sys/devices/system/cpu/present", "all\n");
        guard.not_before = None;
        guard.check(&observer);
        assert!(Arc::ptr_eq(&before, &observer.latest.headroom.borrow().conditions));
        assert_eq!(before.offline_cpus.to_string(), "3");
    }
}
