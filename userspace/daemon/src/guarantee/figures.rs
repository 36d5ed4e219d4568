//! What was decided and done, counted: the promise and the enforced families.

use std::time::Duration;

use numaward_cgroup::knob::Knob;
use numaward_engine::{Cause, Decision, kubelet::AllocateError};
use numaward_topology::Bytes;
use prometheus_client::{
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use crate::enforce::{Failure, Report, Step};

/// Counters by labels.
type By<const N: usize> = Family<[(&'static str, String); N], Counter>;
/// Numbers of cgroups by state.
type ByState = Family<[(&'static str, &'static str); 1], Gauge>;

/// The knobs that are counted from the start. Those of huge pages join as they are used.
const KNOBS: [Knob; 7] = [
    Knob::CpusetCpus,
    Knob::CpusetMems,
    Knob::CpusetPartition,
    Knob::MemoryMin,
    Knob::MemoryLow,
    Knob::MemoryHigh,
    Knob::MemoryMax,
];
const BACKENDS: [&str; 2] = ["cgroupfs", "systemd"];
/// The engine's words for a rejection by a manager.
const REASONS: [&str; 2] = ["UnexpectedAdmissionError", "SMTAlignmentError"];

/// Counts since the daemon started. Clones share them.
#[derive(Clone, Debug)]
pub struct Figures {
    topology_requests: Counter,
    topology_errors: Counter,
    topology_duration: Histogram,
    cpu_requests: Counter,
    cpu_errors: By<1>,
    memory_requests: Counter,
    memory_errors: By<1>,
    writes: By<3>,
    drift: By<1>,
    repaired: By<1>,
    migrated: Counter,
    stalls: Counter,
    raised: Counter,
    herd: ByState,
    declared: ByState,
}

impl Default for Figures {
    /// All at zero.
    fn default() -> Self {
        let figures = Self {
            topology_requests: Counter::default(),
            topology_errors: Counter::default(),
            topology_duration: Histogram::new([0.000_01, 0.000_1, 0.001, 0.01, 0.1, 1.0, 10.0]),
            cpu_requests: Counter::default(),
            cpu_errors: By::default(),
            memory_requests: Counter::default(),
            memory_errors: By::default(),
            writes: By::default(),
            drift: By::default(),
            repaired: By::default(),
            migrated: Counter::default(),
            stalls: Counter::default(),
            raised: Counter::default(),
            herd: ByState::default(),
            declared: ByState::default(),
        };
        figures.herd(0, 0, 0);
        figures.declared(0, 0);
        for reason in REASONS.map(str::to_owned) {
            drop(figures.cpu_errors.get_or_create(&[("reason", reason.clone())]));
            drop(figures.memory_errors.get_or_create(&[("reason", reason)]));
        }
        for knob in KNOBS.map(|knob| knob.to_string()) {
            drop(figures.drift.get_or_create(&[("knob", knob.clone())]));
            drop(figures.repaired.get_or_create(&[("knob", knob.clone())]));
            for backend in BACKENDS {
                for result in ["ok", "error", "dry_run"] {
                    drop(figures.writes.get_or_create(&write_labels(backend, &knob, result)));
                }
            }
        }
        figures
    }
}

fn set<const N: usize>(family: &ByState, counts: [(&'static str, usize); N]) {
    for (state, count) in counts {
        family.get_or_create(&[("state", state)]).set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

fn write_labels(backend: &str, knob: &str, result: &str) -> [(&'static str, String); 3] {
    [("backend", backend.to_owned()), ("knob", knob.to_owned()), ("result", result.to_owned())]
}

impl Figures {
    /// Registers them, under the kubelet's names where it has one.
    pub fn register(&self, registry: &mut Registry) {
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
            "Requests whose CPUs were to be made exclusive",
            self.cpu_requests.clone(),
        );
        registry.register(
            "cpu_manager_pinning_errors",
            "Requests whose CPUs could not be made exclusive",
            self.cpu_errors.clone(),
        );
        registry.register(
            "memory_manager_pinning_requests",
            "Requests whose memory was to be promised on nodes",
            self.memory_requests.clone(),
        );
        registry.register(
            "memory_manager_pinning_errors",
            "Requests whose memory could not be promised on nodes",
            self.memory_errors.clone(),
        );
        registry.register(
            "enforcement_writes",
            "Knobs written, by who writes them and whether the kernel took it; in a dry run: would be written",
            self.writes.clone(),
        );
        registry.register("drift", "Knobs found to hold something else than was written", self.drift.clone());
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
        registry.register(
            "memory_high_stalls",
            "Workloads found to be slowed down at memory.high without getting on",
            self.stalls.clone(),
        );
        registry.register(
            "memory_high_raised",
            "Times that memory.high was raised for a workload that did not get on",
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
    }

    /// The engine decided.
    pub(super) fn decided(&self, decision: &Decision, took: Duration) {
        self.topology_requests.inc();
        self.topology_duration.observe(took.as_secs_f64());
        let rejection = match &decision.outcome {
            Ok(_) => None,
            Err(rejection) => Some((&rejection.cause, rejection.reason.to_string())),
        };
        match rejection {
            Some((Cause::Topology, _)) => drop(self.topology_errors.inc()),
            Some((Cause::Allocate(AllocateError::Cpus(_)), reason)) => {
                self.cpu_requests.inc();
                self.cpu_errors.get_or_create(&[("reason", reason)]).inc();
            }
            Some((Cause::Allocate(AllocateError::Memory(_)), reason)) => {
                self.cpu_requests.inc();
                self.memory_requests.inc();
                self.memory_errors.get_or_create(&[("reason", reason)]).inc();
            }
            Some(_) => {}
            None => {
                self.cpu_requests.inc();
                self.memory_requests.inc();
            }
        }
    }

    fn wrote(&self, step: &Step, result: &str) {
        let labels = write_labels(step.owner.backend(), &step.knob.to_string(), result);
        self.writes.get_or_create(&labels).inc();
    }

    /// Knobs were written.
    pub(super) fn enforced(&self, report: &Report) {
        report.written.iter().for_each(|step| self.wrote(step, "ok"));
    }

    /// Knobs could not all be written.
    pub(super) fn failed(&self, failure: &Failure) {
        self.enforced(&failure.report);
        failure.step.iter().for_each(|step| self.wrote(step, "error"));
    }

    /// A knob would have been written.
    pub(super) fn would_write(&self, step: &Step) {
        self.wrote(step, "dry_run");
    }

    /// Who is herded now.
    pub(super) fn herd(&self, herded: usize, would: usize, refused: usize) {
        set(&self.herd, [("herded", herded), ("dry_run", would), ("refused", refused)]);
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

    /// A workload does not get on at `memory.high`.
    pub(super) fn stalled(&self) {
        self.stalls.inc();
    }

    /// `memory.high` was raised for one.
    pub(super) fn raised(&self) {
        self.raised.inc();
    }

    /// Pages were moved.
    pub(super) fn migrated(&self, bytes: Bytes) {
        self.migrated.inc_by(bytes.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_starts_at_zero() {
        let mut registry = Registry::with_prefix("numaward");
        Figures::default().register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "numaward_topology_manager_admission_requests_total 0",
            "numaward_memory_manager_pinning_errors_total{reason=\"UnexpectedAdmissionError\"} 0",
            "numaward_enforcement_writes_total{backend=\"cgroupfs\",knob=\"cpuset.mems\",result=\"error\"} 0",
            "numaward_drift_total{knob=\"cpuset.cpus\"} 0",
            "numaward_drift_repaired_total{knob=\"memory.min\"} 0",
            "numaward_guarantee_migrated_bytes_total 0",
            "numaward_memory_high_stalls_total 0",
            "numaward_memory_high_raised_total 0",
            "numaward_herd_cgroups{state=\"refused\"} 0",
            "numaward_declared_guarantees{state=\"held\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
