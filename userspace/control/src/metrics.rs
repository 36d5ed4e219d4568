//! Metrics of decisions, of enforcement, and of the reconciler's controllers.

pub(crate) mod auto_placement;
mod caches;
mod host;
mod kubelet;

use std::{hash::Hash, time::Duration};

use educe::Educe;
use numaward_cgroup::knob::Knob;
use numaward_enforce::{
    EnforcementFailure, EnforcementReport, WriteStep,
    pages::{PageOutcome, PagesMoved},
};
use numaward_engine::{
    Cause, ContainerRequest, Decision, QosClass, Quantity, Request, hint::Provider,
    policy::TopologyManagerPolicy,
};
use numaward_topology::{Bytes, NodeId};
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use self::{
    auto_placement::PlacementMetrics, caches::CacheMetrics, host::HostMetrics, kubelet::KubeletMetrics,
};
pub(super) use self::{caches::CacheLabels, kubelet::KubeletRules};

/// Counters by labels.
type LabeledCounter<const N: usize> = Family<[(&'static str, String); N], Counter>;
/// Numbers of cgroups by state.
type StateGauge = Family<[(&'static str, &'static str); 1], Gauge>;

/// Knobs whose series are exported from the start. Those of huge pages are added on first use.
const KNOBS: [Knob; 8] = [
    Knob::CpusetCpus,
    Knob::CpusetMems,
    Knob::CpusetPartition,
    Knob::MemoryMin,
    Knob::MemoryLow,
    Knob::MemoryHigh,
    Knob::MemoryMax,
    Knob::CpuMax,
];
const BACKENDS: [&str; 2] = ["cgroupfs", "systemd"];
const RESULTS: [&str; 3] = ["ok", "error", "dry_run"];
/// Reasons for which a manager rejects a request, as the engine names them.
const REASONS: [&str; 3] = ["UnexpectedAdmissionError", "SMTAlignmentError", "EmptyPodSharedPoolError"];

/// Counters since the start of the daemon. Clones share them.
#[derive(Clone, Debug, Educe)]
#[educe(Default)]
pub struct ControlMetrics {
    topology_requests: Counter,
    topology_errors: Counter,
    #[educe(Default(expression = Histogram::new([0.000_01, 0.000_1, 0.001, 0.01, 0.1, 1.0, 10.0])))]
    topology_duration: Histogram,
    cpu_requests: Counter,
    cpu_errors: LabeledCounter<1>,
    memory_requests: Counter,
    memory_errors: LabeledCounter<1>,
    writes: LabeledCounter<3>,
    drift: LabeledCounter<1>,
    repaired: LabeledCounter<1>,
    migrated: Counter,
    budget_moved: LabeledCounter<1>,
    steered: Gauge,
    reclaimed: LabeledCounter<1>,
    host: HostMetrics,
    pub(crate) caches: CacheMetrics,
    placements: PlacementMetrics,
    stalls: Counter,
    raised: Counter,
    herd: StateGauge,
    declared: StateGauge,
    rebalances: LabeledCounter<1>,
    moves: LabeledCounter<1>,
    moved: Counter,
    rebalancing: Gauge,
    /// The kubelet's versions of the metrics of the managers.
    kubelet: KubeletMetrics,
}

/// Number of containers of a request for which a manager was called, and the reason if it rejected one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ManagerRequests {
    containers: u64,
    error: Option<String>,
}

impl ManagerRequests {
    fn count(&self, requests: &Counter, errors: &LabeledCounter<1>) {
        requests.inc_by(self.containers);
        if let Some(reason) = &self.error {
            errors.get_or_create(&[("reason", reason.clone())]).inc();
        }
    }

    fn count_as_kubelet(&self, requests: &Counter, errors: &Counter) {
        requests.inc_by(self.containers);
        errors.inc_by(u64::from(self.error.is_some()));
    }
}

/// Returns the calls of the CPU manager and of the memory manager for a request. A manager is called for each container with
/// exclusive resources, after the topology policy has accepted the container, up to the first rejected container.
fn manager_requests(request: &Request, decision: &Decision) -> [ManagerRequests; 2] {
    let rejection = match &decision.outcome {
        Ok(grants) => {
            let cpus = grants.iter().filter(|of| of.allocation.cpus.is_some()).count() as u64;
            let memory = grants.iter().filter(|of| !of.allocation.blocks.is_empty()).count() as u64;
            return [cpus, memory].map(|containers| ManagerRequests { containers, error: None });
        }
        Err(rejection) => rejection,
    };
    let is_guaranteed = request.qos() == QosClass::Guaranteed;
    let wants = |of: &ContainerRequest| {
        let cpus = of.requests.cpu.and_then(Quantity::whole_cpus).is_some_and(|cpus| cpus > 0);
        [is_guaranteed && cpus, is_guaranteed && !of.requests.memory.is_empty()].map(u64::from)
    };
    let add = |[cpus, memory]: [u64; 2], of: &ContainerRequest| {
        let more = wants(of);
        [cpus + more[0], memory + more[1]]
    };
    let mut containers = request.all_containers();
    // In the pod scope, the rejection names no container, and no container was decided before.
    let failed = rejection.container.as_ref();
    let before = containers.by_ref().take_while(|of| failed.is_some_and(|failed| of.name != *failed));
    let before = before.fold([0; 2], add);
    let failed = failed.and_then(|name| request.all_containers().find(|of| of.name == *name));
    let reason = Some(rejection.reason.to_string());
    let (more, errors) = match &rejection.cause {
        Cause::Cores(_) | Cause::Cpus(_) | Cause::NothingToShare(Provider::Cpus, _) => {
            ([1, 0], [reason, None])
        }
        Cause::Memory(_) | Cause::NothingToShare(..) => {
            ([failed.map_or(0, |of| wants(of)[0]), 1], [None, reason])
        }
        _ => ([0, 0], [None, None]),
    };
    let [cpus, memory] = [before[0] + more[0], before[1] + more[1]];
    let [cpu_error, memory_error] = errors;
    [
        ManagerRequests { containers: cpus, error: cpu_error },
        ManagerRequests { containers: memory, error: memory_error },
    ]
}

/// Creates the series of a family with these values of its label.
fn create_series<V: Clone + Hash + Eq + From<&'static str>, M>(
    family: &Family<[(&'static str, V); 1], M>,
    label: &'static str,
    values: &[&'static str],
) {
    for value in values {
        drop(family.get_or_create(&[(label, V::from(value))]));
    }
}

fn set<const N: usize>(family: &StateGauge, counts: [(&'static str, usize); N]) {
    for (state, count) in counts {
        family.get_or_create(&[("state", state)]).set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

fn write_labels(backend: &str, knob: &str, result: &str) -> [(&'static str, String); 3] {
    [("backend", backend.to_owned()), ("knob", knob.to_owned()), ("result", result.to_owned())]
}

impl ControlMetrics {
    /// Registers all metrics. Metrics that the kubelet has too have its names. All series start at zero.
    pub fn register(&self, registry: &mut Registry) {
        self.create_all_series();
        registry.register(
            "topology_manager_admission_requests",
            "Requests that the engine has decided",
            self.topology_requests.clone(),
        );
        registry.register(
            "topology_manager_admission_errors",
            "Requests refused because their resources are not available on a common set of nodes",
            self.topology_errors.clone(),
        );
        registry.register_with_unit(
            "topology_manager_admission_duration",
            "Duration of a decision",
            Unit::Seconds,
            self.topology_duration.clone(),
        );
        registry.register(
            "cpu_manager_pinning_requests",
            "Containers whose CPUs were to be made exclusive",
            self.cpu_requests.clone(),
        );
        registry.register(
            "cpu_manager_pinning_errors",
            "Containers whose CPUs could not be made exclusive",
            self.cpu_errors.clone(),
        );
        registry.register(
            "memory_manager_pinning_requests",
            "Containers whose memory was to be guaranteed on nodes",
            self.memory_requests.clone(),
        );
        registry.register(
            "memory_manager_pinning_errors",
            "Containers whose memory could not be guaranteed on nodes",
            self.memory_errors.clone(),
        );
        registry.register(
            "enforcement_writes",
            "Writes of knobs, by backend and result; dry_run: would have been written",
            self.writes.clone(),
        );
        registry.register("drift", "Knobs found with a value other than the written one", self.drift.clone());
        registry.register(
            "drift_repaired",
            "Knobs with drift that were written again",
            self.repaired.clone(),
        );
        registry.register_with_unit(
            "guarantee_migrated",
            "User memory that was migrated because the guarantee of its workload moved to other nodes",
            Unit::Bytes,
            self.migrated.clone(),
        );
        registry.register_with_unit(
            "budget_moved",
            "User memory above the budget of its workload on a node, by the outcome of the attempt to move it",
            Unit::Bytes,
            self.budget_moved.clone(),
        );
        registry.register(
            "guard_steered_cgroups",
            "Cgroups without a guarantee that are kept off a node whose guaranteed memory may soon not be available",
            self.steered.clone(),
        );
        registry.register_with_unit(
            "guard_reclaimed",
            "Page cache of cgroups without a guarantee that was dropped on the node to free guaranteed memory; only with guardReclaim",
            Unit::Bytes,
            self.reclaimed.clone(),
        );
        self.host.register(registry);
        self.caches.register(registry);
        self.placements.register(registry);
        registry.register(
            "memory_high_stalls",
            "Workloads found to be throttled at memory.high without making progress",
            self.stalls.clone(),
        );
        registry.register(
            "memory_high_raised",
            "Times that memory.high was raised for a workload that made no progress",
            self.raised.clone(),
        );
        registry.register(
            "herd_cgroups",
            "Cgroups that are confined to the shared pool, that would be without the dry run, and that cannot be confined",
            self.herd.clone(),
        );
        registry.register(
            "declared_guarantees",
            "Cgroups with a guarantee declared in the configuration, by whether it is held or was refused",
            self.declared.clone(),
        );
        self.register_rebalancing(registry);
    }

    fn create_all_series(&self) {
        create_series(&self.herd, "state", &["herded", "dry_run", "refused"]);
        create_series(&self.declared, "state", &["held", "refused"]);
        create_series(&self.rebalances, "outcome", &["done", "failed", "cancelled"]);
        create_series(&self.moves, "outcome", &["moved", "taken_back", "stays", "gone"]);
        for outcome in PageOutcome::ALL {
            create_series(&self.budget_moved, "outcome", &[outcome.as_str()]);
        }
        create_series(&self.cpu_errors, "reason", &REASONS);
        create_series(&self.memory_errors, "reason", &REASONS);
        for knob in KNOBS.map(|knob| knob.to_string()) {
            drop(self.drift.get_or_create(&[("knob", knob.clone())]));
            drop(self.repaired.get_or_create(&[("knob", knob.clone())]));
            for (backend, result) in BACKENDS.iter().flat_map(|of| RESULTS.map(|result| (of, result))) {
                drop(self.writes.get_or_create(&write_labels(backend, &knob, result)));
            }
        }
    }

    fn register_rebalancing(&self, registry: &mut Registry) {
        registry.register("rebalances", "Rebalances that have ended, by outcome", self.rebalances.clone());
        registry.register(
            "rebalance_moves",
            "Workloads moved by rebalances, by outcome: moved, moved back, could not be moved back, or ended meanwhile",
            self.moves.clone(),
        );
        registry.register_with_unit(
            "rebalance_moved",
            "User memory that left its nodes because a rebalance moved its workload, or moved it back",
            Unit::Bytes,
            self.moved.clone(),
        );
        registry.register(
            "rebalance_running",
            "1 while a rebalance moves workloads or moves them back, else 0",
            self.rebalancing.clone(),
        );
    }

    /// Registers the metrics that the kubelet has too, under its full names (pkg/kubelet/metrics/metrics.go), for existing
    /// dashboards and alerts.
    pub fn register_kubelet(&self, registry: &mut Registry) {
        self.kubelet.register(registry);
    }

    /// Counts a decision of the engine.
    pub(super) fn decided(&self, request: &Request, decision: &Decision, took: Duration) {
        self.topology_requests.inc();
        self.topology_duration.observe(took.as_secs_f64());
        let cause = decision.outcome.as_ref().err().map(|rejection| &rejection.cause);
        if matches!(cause, Some(Cause::Topology | Cause::InsufficientCapacity(_))) {
            self.topology_errors.inc();
        }
        let [cpus, memory] = manager_requests(request, decision);
        cpus.count(&self.cpu_requests, &self.cpu_errors);
        memory.count(&self.memory_requests, &self.memory_errors);
    }

    /// Returns the number of decided requests.
    #[cfg(test)]
    pub(super) fn requests(&self) -> u64 {
        self.topology_requests.get()
    }

    /// Counts a decision on a pod as the kubelet does. The caller omits repeated refusals, because the kubelet decides once.
    pub(super) fn decided_on_pod(
        &self,
        request: &Request,
        decision: &Decision,
        rules: &KubeletRules<'_>,
        took: Duration,
    ) {
        let kubelet = &self.kubelet;
        kubelet.topology_requests.inc();
        kubelet.topology_duration.observe(took.as_secs_f64() * 1e3);
        // Without a policy, only the managers can reject a pod.
        if decision.outcome.is_err() && rules.policy != TopologyManagerPolicy::None {
            kubelet.topology_errors.inc();
        }
        let [cpus, memory] = manager_requests(request, decision);
        cpus.count_as_kubelet(&kubelet.cpu_requests, &kubelet.cpu_errors);
        memory.count_as_kubelet(&kubelet.memory_requests, &kubelet.memory_errors);
        kubelet.count_aligned(request, decision, rules, &cpus);
    }

    fn wrote(&self, step: &WriteStep, result: &str) {
        let labels = write_labels(step.owner.backend(), &step.knob.to_string(), result);
        self.writes.get_or_create(&labels).inc();
    }

    pub(super) fn enforced(&self, report: &EnforcementReport) {
        report.written.iter().for_each(|step| self.wrote(step, "ok"));
    }

    /// Counts the writes of a failed change: those before the failure, and the failed one.
    pub(super) fn failed(&self, failure: &EnforcementFailure) {
        self.enforced(&failure.report);
        failure.step.iter().for_each(|step| self.wrote(step, "error"));
    }

    /// Counts a write that a dry run omitted.
    pub(super) fn would_write(&self, step: &WriteStep) {
        self.wrote(step, "dry_run");
    }

    /// Sets the numbers of cgroups that are confined, that would be without the dry run, and that cannot be confined.
    pub(super) fn confined(&self, confined: usize, dry_run: usize, refused: usize) {
        set(&self.herd, [("herded", confined), ("dry_run", dry_run), ("refused", refused)]);
    }

    /// Sets the numbers of declared guarantees that are held and refused.
    pub(super) fn declared(&self, held: usize, refused: usize) {
        set(&self.declared, [("held", held), ("refused", refused)]);
    }

    pub(super) fn drifted(&self, knob: Knob) {
        self.drift.get_or_create(&[("knob", knob.to_string())]).inc();
    }

    pub(super) fn repaired(&self, knob: Knob) {
        self.repaired.get_or_create(&[("knob", knob.to_string())]).inc();
    }

    /// Counts a workload without progress at `memory.high`.
    pub(super) fn stalled(&self) {
        self.stalls.inc();
    }

    /// Counts a raise of `memory.high`.
    pub(super) fn raised(&self) {
        self.raised.inc();
    }

    pub(super) fn rebalancing(&self, is_running: bool) {
        self.rebalancing.set(i64::from(is_running));
    }

    /// Counts the end of a rebalance.
    pub(super) fn rebalanced(&self, outcome: &str) {
        self.rebalances.get_or_create(&[("outcome", outcome.to_owned())]).inc();
    }

    /// Counts a move of a workload by a rebalance, or its rollback.
    pub(super) fn relocated(&self, outcome: &str, bytes: Bytes) {
        self.moves.get_or_create(&[("outcome", outcome.to_owned())]).inc();
        self.moved.inc_by(bytes.0);
    }

    /// Counts memory above a budget by the outcome of the attempt to move it.
    pub(super) fn budget_moved(&self, moved: &PagesMoved) {
        for (outcome, bytes) in &moved.0 {
            self.budget_moved.get_or_create(&[("outcome", outcome.as_str().to_owned())]).inc_by(bytes.0);
        }
    }

    /// Sets the number of steered cgroups.
    pub(super) fn steered(&self, steered: usize) {
        self.steered.set(i64::try_from(steered).unwrap_or(i64::MAX));
    }

    /// Creates series of a container and of a command, for the reference of all metrics.
    #[cfg(any(test, feature = "testing"))]
    pub fn show_caches(&self) {
        let of = |labels: &[(&'static str, &str)]| -> CacheLabels {
            labels.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
        };
        let workloads = [
            of(&[("workload", "web.service")]),
            of(&[("namespace", "shop"), ("pod", "web-0"), ("container", "main")]),
        ];
        let counted =
            numaward_enforce::resctrl::CacheCounters { occupancy: Some(1), total: Some(2), local: Some(1) };
        self.caches.set_readings(workloads.iter().map(|labels| (labels, 0, counted)));
    }

    /// Creates one series, for the reference of all metrics.
    #[cfg(any(test, feature = "testing"))]
    pub fn show_reclaimed(&self) {
        self.reclaimed(NodeId(0), Bytes(0));
    }

    /// Counts page cache that was dropped on a node.
    pub(super) fn reclaimed(&self, node: NodeId, bytes: Bytes) {
        self.reclaimed.get_or_create(&[("numa_node", node.to_string())]).inc_by(bytes.0);
    }

    /// Counts migrated user memory.
    pub(super) fn migrated(&self, bytes: Bytes) {
        self.migrated.inc_by(bytes.0);
    }
}

#[cfg(test)]
mod tests;
