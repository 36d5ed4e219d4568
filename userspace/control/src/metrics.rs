//! What was decided and done, counted: the promise and the enforced families.

mod caches;
pub(crate) mod homes;
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

pub(super) use self::{caches::CacheLabels, kubelet::KubeletRules};
use self::{caches::CacheMetrics, homes::HomeMetrics, host::HostMetrics, kubelet::KubeletMetrics};

/// Counters by labels.
type LabeledCounter<const N: usize> = Family<[(&'static str, String); N], Counter>;
/// Numbers of cgroups by state.
type StateGauge = Family<[(&'static str, &'static str); 1], Gauge>;

/// The knobs that are counted from the start. Those of huge pages join as they are used.
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
/// The engine's words for a rejection by a manager.
const REASONS: [&str; 3] = ["UnexpectedAdmissionError", "SMTAlignmentError", "EmptyPodSharedPoolError"];

/// Counts since the daemon started. Clones share them.
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
    caches: CacheMetrics,
    homes: HomeMetrics,
    stalls: Counter,
    raised: Counter,
    herd: StateGauge,
    declared: StateGauge,
    rebalances: LabeledCounter<1>,
    moves: LabeledCounter<1>,
    moved: Counter,
    rebalancing: Gauge,
    /// What the kubelet has in another form.
    kubelet: KubeletMetrics,
}

/// What was asked of a manager, by the number of containers, and for what reason one of them did not get it.
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

/// What was asked of the managers of CPUs and of memory: for each container that is to have some for itself, until one
/// cannot have it. A container is asked for after the topology policy has agreed to it.
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
    // Decided all together, none came before it.
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

/// Shows a family with these values of its label from the start.
fn start<V: Clone + Hash + Eq + From<&'static str>, M>(
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
    /// Registers them, under the kubelet's names where it has one, and all at zero from the start.
    pub fn register(&self, registry: &mut Registry) {
        self.start();
        registry.register(
            "topology_manager_admission_requests",
            "Requests that the engine decided on",
            self.topology_requests.clone(),
        );
        registry.register(
            "topology_manager_admission_errors",
            "Requests refused because the nodes of their resources cannot be made to agree",
            self.topology_errors.clone(),
        );
        registry.register_with_unit(
            "topology_manager_admission_duration",
            "Time taken to decide",
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
            "Containers whose memory was to be promised on nodes",
            self.memory_requests.clone(),
        );
        registry.register(
            "memory_manager_pinning_errors",
            "Containers whose memory could not be promised on nodes",
            self.memory_errors.clone(),
        );
        registry.register(
            "enforcement_writes",
            "Knobs written, by who writes them and whether the kernel took it; in a dry run: would be written",
            self.writes.clone(),
        );
        registry.register(
            "drift",
            "Knobs found to hold something other than what was written",
            self.drift.clone(),
        );
        registry.register(
            "drift_repaired",
            "Knobs that drifted and were written again",
            self.repaired.clone(),
        );
        registry.register_with_unit(
            "guarantee_migrated",
            "User memory that moved because its workload was promised other nodes",
            Unit::Bytes,
            self.migrated.clone(),
        );
        registry.register_with_unit(
            "budget_moved",
            "User memory of workloads that had more on a node than their share there, by what became of it when it was \
             to be moved",
            Unit::Bytes,
            self.budget_moved.clone(),
        );
        registry.register(
            "guard_steered_cgroups",
            "Cgroups without a guarantee that are kept off a node that may soon not have what is promised on it",
            self.steered.clone(),
        );
        registry.register_with_unit(
            "guard_reclaimed",
            "Page cache of cgroups without a guarantee that was dropped on the node, so that what is promised there is free; only with guardReclaim",
            Unit::Bytes,
            self.reclaimed.clone(),
        );
        self.host.register(registry);
        self.caches.register(registry);
        self.homes.register(registry);
        registry.register(
            "memory_high_stalls",
            "Workloads found to be slowed down at memory.high without making progress",
            self.stalls.clone(),
        );
        registry.register(
            "memory_high_raised",
            "Times that memory.high was raised for a workload that made no progress",
            self.raised.clone(),
        );
        registry.register(
            "herd_cgroups",
            "Cgroups kept off exclusive CPUs, those that would be if this were no dry run, and those that cannot be",
            self.herd.clone(),
        );
        registry.register(
            "declared_guarantees",
            "Cgroups that hold a guarantee declared in the configuration, and those that were refused theirs",
            self.declared.clone(),
        );
        self.register_rebalancing(registry);
    }

    fn start(&self) {
        start(&self.herd, "state", &["herded", "dry_run", "refused"]);
        start(&self.declared, "state", &["held", "refused"]);
        start(&self.rebalances, "outcome", &["done", "failed", "cancelled"]);
        start(&self.moves, "outcome", &["moved", "taken_back", "stays", "gone"]);
        for outcome in PageOutcome::ALL {
            start(&self.budget_moved, "outcome", &[outcome.as_str()]);
        }
        start(&self.cpu_errors, "reason", &REASONS);
        start(&self.memory_errors, "reason", &REASONS);
        for knob in KNOBS.map(|knob| knob.to_string()) {
            drop(self.drift.get_or_create(&[("knob", knob.clone())]));
            drop(self.repaired.get_or_create(&[("knob", knob.clone())]));
            for (backend, result) in BACKENDS.iter().flat_map(|of| RESULTS.map(|result| (of, result))) {
                drop(self.writes.get_or_create(&write_labels(backend, &knob, result)));
            }
        }
    }

    fn register_rebalancing(&self, registry: &mut Registry) {
        registry.register(
            "rebalances",
            "Rebalances that are over: all moves made, or all of them undone",
            self.rebalances.clone(),
        );
        registry.register(
            "rebalance_moves",
            "Workloads that were moved to make room, moved back, could not be moved back, or ended meanwhile",
            self.moves.clone(),
        );
        registry.register_with_unit(
            "rebalance_moved",
            "User memory that left its nodes because its workload was moved to make room, or moved back",
            Unit::Bytes,
            self.moved.clone(),
        );
        registry.register(
            "rebalance_running",
            "Whether workloads are being moved to make room, or moved back (1), or not (0)",
            self.rebalancing.clone(),
        );
    }

    /// Registers what the kubelet counts too, under its own names (pkg/kubelet/metrics/metrics.go), for
    /// dashboards and alerts that know those.
    pub fn register_kubelet(&self, registry: &mut Registry) {
        self.kubelet.register(registry);
    }

    /// The engine decided on a request.
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

    /// Requests that were decided on.
    #[cfg(test)]
    pub(super) fn requests(&self) -> u64 {
        self.topology_requests.get()
    }

    /// The same of a pod that the kubelet would decide on: not one that it would have let go when it was refused before.
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
        // Without a policy, there is nothing that could go wrong but with the managers.
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

    /// Knobs were written.
    pub(super) fn enforced(&self, report: &EnforcementReport) {
        report.written.iter().for_each(|step| self.wrote(step, "ok"));
    }

    /// Knobs could not all be written.
    pub(super) fn failed(&self, failure: &EnforcementFailure) {
        self.enforced(&failure.report);
        failure.step.iter().for_each(|step| self.wrote(step, "error"));
    }

    /// A knob would have been written.
    pub(super) fn would_write(&self, step: &WriteStep) {
        self.wrote(step, "dry_run");
    }

    /// Who is herded now.
    pub(super) fn confined(&self, confined: usize, would: usize, refused: usize) {
        set(&self.herd, [("herded", confined), ("dry_run", would), ("refused", refused)]);
    }

    /// Who has what is declared for it now.
    pub(super) fn declared(&self, held: usize, refused: usize) {
        set(&self.declared, [("held", held), ("refused", refused)]);
    }

    /// A knob drifted.
    pub(super) fn drifted(&self, knob: Knob) {
        self.drift.get_or_create(&[("knob", knob.to_string())]).inc();
    }

    /// A knob that drifted holds again.
    pub(super) fn repaired(&self, knob: Knob) {
        self.repaired.get_or_create(&[("knob", knob.to_string())]).inc();
    }

    /// A workload makes no progress at `memory.high`.
    pub(super) fn stalled(&self) {
        self.stalls.inc();
    }

    /// `memory.high` was raised for one.
    pub(super) fn raised(&self) {
        self.raised.inc();
    }

    /// Whether workloads are being moved to make room.
    pub(super) fn rebalancing(&self, is_running: bool) {
        self.rebalancing.set(i64::from(is_running));
    }

    /// A rebalance is over.
    pub(super) fn rebalanced(&self, outcome: &str) {
        self.rebalances.get_or_create(&[("outcome", outcome.to_owned())]).inc();
    }

    /// A workload was moved to make room, or is where it was.
    pub(super) fn relocated(&self, outcome: &str, bytes: Bytes) {
        self.moves.get_or_create(&[("outcome", outcome.to_owned())]).inc();
        self.moved.inc_by(bytes.0);
    }

    /// Pages above a budget were to be moved.
    pub(super) fn budget_moved(&self, moved: &PagesMoved) {
        for (outcome, bytes) in &moved.0 {
            self.budget_moved.get_or_create(&[("outcome", outcome.as_str().to_owned())]).inc_by(bytes.0);
        }
    }

    /// So many cgroups are steered now.
    pub(super) fn steered(&self, steered: usize) {
        self.steered.set(i64::try_from(steered).unwrap_or(i64::MAX));
    }

    /// A figure of each node, for the pages that list them.
    #[cfg(any(test, feature = "testing"))]
    pub fn show_reclaimed(&self) {
        self.reclaimed(NodeId(0), Bytes(0));
    }

    /// Page cache was dropped on a node.
    pub(super) fn reclaimed(&self, node: NodeId, bytes: Bytes) {
        self.reclaimed.get_or_create(&[("numa_node", node.to_string())]).inc_by(bytes.0);
    }

    /// Pages were moved.
    pub(super) fn migrated(&self, bytes: Bytes) {
        self.migrated.inc_by(bytes.0);
    }
}

#[cfg(test)]
mod tests;
