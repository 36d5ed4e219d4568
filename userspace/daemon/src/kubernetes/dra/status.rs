//! Status that is written into prepared claims: their CPUs and memory, and whether this host keeps them.
//!
//! A new problem is written at once; its end, another reason, and figures that moved, at most once in [`FIGURES_INTERVAL`]. The verdicts are those of
//! `numaward get`, the page and the alerts.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use numaward_api as api;
use numaward_cgroup::CgroupPath;
use numaward_engine::{
    Ledger, OwnerId,
    claims::devices::{self, CPU, HOST},
};
use numaward_guarantee::{claim, claim::ReservedClaim, reconciler::ReconcilerHandle};
use numaward_kube::dra::{
    messages::ClaimId,
    status::{AllocatedDevice, DeviceCondition, DeviceStatus, StatusError, StatusWriter},
};
use numaward_model::Guarantees;
use numaward_topology::{Bytes, CpuSet, Machine, NodeId, NodeSet};
use serde_json::{Value, json};
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};

use super::HostReader;

/// Interval at which claims are compared with their status.
const INTERVAL: Duration = Duration::from_secs(30);
/// Minimum time between two writes of figures of a claim.
const FIGURES_INTERVAL: Duration = Duration::from_mins(5);
/// Time after which a refused write is tried again.
const RETRY_INTERVAL: Duration = Duration::from_mins(5);
/// Maximum number of writes in an interval, so that a change of all claims does not load the API server.
const MAX_WRITES: usize = 20;
/// Part of a figure by which it has to move to be written.
const MIN_CHANGE: f64 = 0.05;
/// Bytes and parts of one by which a figure has to move, too.
const MIN_BYTES: f64 = 1_048_576.0;
const MIN_RATIO: f64 = 0.01;

const READY_CONDITION: &str = "Ready";
const KEPT_CONDITION: &str = "numaward.io/kept";

/// Reader of the figures of all workloads.
pub(in crate::kubernetes) type WorkloadReader = Arc<dyn Fn() -> api::Workloads + Send + Sync>;

/// Reporter of the status of claims.
pub(in crate::kubernetes) struct StatusReporter {
    pub(in crate::kubernetes) writer: StatusWriter,
    /// Name of this Kubernetes node, and of the pool of its NUMA nodes.
    pub(in crate::kubernetes) node: String,
    pub(in crate::kubernetes) reconciler: ReconcilerHandle,
    pub(in crate::kubernetes) host: HostReader,
    pub(in crate::kubernetes) workloads: WorkloadReader,
}

/// State of a claim.
#[derive(Clone, Debug, PartialEq)]
struct ClaimReport {
    /// Reason and message if the claim is not kept.
    problem: Option<(&'static str, String)>,
    parts: Vec<PartReport>,
    /// Part of the allocated memory that was outside the nodes of the claim; `None` if it is not counted.
    miss_ratio: Option<f64>,
    /// Part of the accesses that reached other nodes than that of the CPU; `None` if none was counted.
    remote_ratio: Option<f64>,
}

/// State of a device of a claim.
#[derive(Clone, Debug, PartialEq)]
struct PartReport {
    device: String,
    /// The nodes of the CPUs and of the memory.
    nodes: NodeSet,
    cpus: CpuSet,
    /// Guaranteed memory.
    memory: u64,
    /// User memory on the nodes; `None` if it was not read yet, or if no container uses the claim.
    resident: Option<u64>,
}

/// The last written report of a claim.
pub(super) struct Written {
    report: ClaimReport,
    at: Instant,
    /// False if the API server has refused it.
    is_complete: bool,
}

impl StatusReporter {
    /// Reports until the future is dropped.
    pub(in crate::kubernetes) async fn run(self) {
        let mut written = BTreeMap::new();
        let mut refusal = None;
        loop {
            sleep(INTERVAL).await;
            match self.report(&mut written).await {
                Ok(()) => refusal = None,
                Err(error) => {
                    let text = error.to_string();
                    // The requests differ by the name of the claim only.
                    if refusal.is_none() {
                        tracing::warn!(
                            error = text,
                            "claims do not show what the host does for them; this is tried again"
                        );
                    }
                    refusal = Some(text);
                    sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }

    /// Writes the reports that are due, up to [`MAX_WRITES`].
    pub(super) async fn report(&self, written: &mut BTreeMap<String, Written>) -> Result<(), StatusError> {
        let Ok(claims) = self.reconciler.reserved_claims().await else { return Ok(()) };
        written.retain(|uid, _| claims.contains_key(uid));
        if claims.is_empty() {
            return Ok(());
        }
        let read = self.workloads.clone();
        let Ok(workloads) = spawn_blocking(move || read()).await else { return Ok(()) };
        let (guarantees, machine) = (self.host)();
        let allocations = self.reconciler.allocations();
        let host = HostView::new(&guarantees, &machine, &workloads, &allocations);
        let (now, mut writes) = (Instant::now(), 0);
        // A pending claim has no pod on this host yet.
        for (uid, claim) in claims.iter().filter(|(_, claim)| !claim.pending) {
            let report = host.report(uid, claim);
            if !is_due(written.get(uid), &report, now) {
                continue;
            }
            if writes == MAX_WRITES {
                break;
            }
            writes += 1;
            let id =
                ClaimId { namespace: claim.namespace.clone(), uid: uid.clone(), name: claim.name.clone() };
            let result = self.write(&id, &report).await;
            // After a failure, this claim is tried again later, and the next ones are written.
            written.insert(uid.clone(), Written { report, at: now, is_complete: result.is_ok() });
            match result {
                // The claim has ended, and the kubelet will have it unprepared.
                Ok(()) | Err(StatusError::NotAllocated) => {}
                Err(StatusError::Request(error)) => {
                    tracing::debug!(
                        claim = claim.name,
                        namespace = claim.namespace,
                        error,
                        "a claim does not show its state"
                    );
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl StatusReporter {
    async fn write(&self, claim: &ClaimId, report: &ClaimReport) -> Result<(), StatusError> {
        let host_pool = devices::host_pool(&self.node);
        let devices = report.devices();
        let status_of = |AllocatedDevice { pool, device, .. }: AllocatedDevice<'_>| {
            let is_own = pool == if device == HOST { &host_pool } else { &self.node };
            devices.get(device).filter(|_| is_own).cloned()
        };
        self.writer.write(claim, &status_of).await
    }
}

/// Returns true if a report has to be written.
fn is_due(written: Option<&Written>, report: &ClaimReport, now: Instant) -> bool {
    let Some(Written { report: before, at, is_complete }) = written else { return true };
    let is_old = now.duration_since(*at) >= FIGURES_INTERVAL;
    if !is_complete {
        return is_old;
    }
    let given = |report: &ClaimReport| {
        let parts = report.parts.iter().map(|part| (part.device.clone(), part.cpus.clone(), part.memory));
        parts.collect::<Vec<_>>()
    };
    // The message has figures, which may change each time.
    let problem = |report: &ClaimReport| report.problem.as_ref().map(|(reason, _)| *reason);
    if given(report) != given(before) || problem(before).is_none() && problem(report).is_some() {
        return true;
    }
    // A problem that comes and goes is written once.
    if problem(report) != problem(before) {
        return is_old;
    }
    let moved = report
        .figures()
        .zip(before.figures())
        .any(|((now, least), (before, _))| has_moved(now, before, least));
    moved && is_old
}

fn has_moved(now: Option<f64>, before: Option<f64>, least: f64) -> bool {
    match (now, before) {
        (Some(now), Some(before)) => {
            (now - before).abs() >= least && (now - before).abs() >= MIN_CHANGE * now.max(before)
        }
        (now, before) => now.is_some() != before.is_some(),
    }
}

impl ClaimReport {
    /// Returns the figures in a fixed order, each with the least change that counts.
    fn figures(&self) -> impl Iterator<Item = (Option<f64>, f64)> {
        #[expect(clippy::cast_precision_loss, reason = "only differences of some per cent count")]
        let resident = self.parts.iter().map(|part| (part.resident.map(|bytes| bytes as f64), MIN_BYTES));
        let ratios = [(self.miss_ratio, MIN_RATIO), (self.remote_ratio, MIN_RATIO)];
        resident.chain(ratios)
    }

    /// Returns the status of each device, by name.
    fn devices(&self) -> BTreeMap<String, DeviceStatus> {
        let condition = |name, is_true, reason: &str, message: &str| DeviceCondition {
            name,
            is_true,
            reason: reason.to_owned(),
            message: message.to_owned(),
        };
        let kept = match &self.problem {
            None => condition(KEPT_CONDITION, true, "Kept", ""),
            Some((reason, message)) => condition(KEPT_CONDITION, false, reason, message),
        };
        let conditions = vec![condition(READY_CONDITION, true, "Prepared", ""), kept];
        let device = |part: &PartReport| {
            let mut data = json!({ "nodes": part.nodes.to_string(), "cpus": part.cpus.to_string(), "memoryBytes": part.memory });
            let mut add = |name: &str, figure: Option<Value>| {
                if let Some(figure) = figure {
                    data[name] = figure;
                }
            };
            add("residentBytes", part.resident.map(Into::into));
            add("missRatio", self.miss_ratio.map(rounded));
            add("remoteRatio", self.remote_ratio.map(rounded));
            (part.device.clone(), DeviceStatus { conditions: conditions.clone(), data: Some(data) })
        };
        self.parts.iter().map(device).collect()
    }
}

/// Returns a ratio with four decimals.
fn rounded(ratio: f64) -> Value {
    ((ratio * 1e4).round() / 1e4).into()
}

/// Guarantees and figures of this host.
struct HostView<'a> {
    guarantees: &'a Guarantees,
    machine: &'a Machine,
    /// By path of the cgroup.
    workloads: BTreeMap<&'a str, &'a api::Workload>,
    allocations: BTreeMap<&'a str, &'a api::Allocation>,
}

impl<'a> HostView<'a> {
    fn new(
        guarantees: &'a Guarantees,
        machine: &'a Machine,
        workloads: &'a api::Workloads,
        allocations: &'a api::Allocations,
    ) -> Self {
        let by_cgroup = |workload: &'a api::Workload| Some((workload.cgroup.as_deref()?, workload));
        Self {
            guarantees,
            machine,
            workloads: workloads.workloads.iter().filter_map(by_cgroup).collect(),
            allocations: allocations.allocations.iter().map(|of| (of.cgroup.as_str(), &**of)).collect(),
        }
    }

    fn report(&self, uid: &str, claim: &ReservedClaim) -> ClaimReport {
        let owner = claim::owner(uid);
        let users = self.guarantees.workloads().iter().filter(|guarantee| guarantee.owner == owner);
        let cgroups: BTreeSet<&CgroupPath> = users.map(|guarantee| &guarantee.cgroup).collect();
        let workloads: Vec<_> =
            cgroups.iter().filter_map(|path| self.workloads.get(path.as_str()).copied()).collect();
        let held = Held::new(&self.guarantees.ledger, self.machine, &owner);
        let nodes: BTreeSet<Option<NodeId>> = claim.parts.iter().map(|part| part.node).collect();
        let parts = nodes.into_iter().map(|node| self.part(claim, node, &held, &workloads)).collect();
        let problems = cgroups.iter().filter_map(|path| self.problem(path.as_str()));
        let sum = |figure: &dyn Fn(&api::Workload) -> Option<[u64; 2]>| {
            let figures = workloads.iter().filter_map(|workload| figure(workload));
            figures.fold([0_u64; 2], |sum, of| [sum[0].saturating_add(of[0]), sum[1].saturating_add(of[1])])
        };
        ClaimReport {
            problem: problems.into_iter().next(),
            parts,
            miss_ratio: ratio(sum(&misses)),
            remote_ratio: ratio(sum(&accesses)),
        }
    }

    /// Returns the state of the device of a node, or of that of the whole host.
    fn part(
        &self,
        claim: &ReservedClaim,
        node: Option<NodeId>,
        held: &Held,
        workloads: &[&api::Workload],
    ) -> PartReport {
        let of_node = claim.parts.iter().filter(|part| part.node == node);
        let consumed = |name: &str| {
            let amounts = of_node.clone().filter_map(|part| part.consumed.get(name)?.units());
            amounts.fold(0_u64, u64::saturating_add)
        };
        let (device, nodes, cpus) = match node {
            Some(node) => {
                let data = self.machine.nodes.get(&node);
                let has_cpus = data.is_some_and(|data| !data.cpus.is_empty()) || consumed(CPU) > 0;
                let cpus = data.map(|data| &data.cpus & &held.cpus).unwrap_or_default();
                (devices::device_name(node, has_cpus), NodeSet::single(node), cpus)
            }
            None => (HOST.to_owned(), held.nodes.clone(), held.cpus.clone()),
        };
        let figures = workloads.iter().flat_map(|workload| &workload.nodes);
        let figures = figures.filter(|of| nodes.contains(NodeId(of.node)));
        let resident =
            figures.filter_map(|of| of.resident).map(|of| of.anon_bytes.saturating_add(of.file_bytes));
        PartReport {
            device,
            cpus,
            memory: consumed("memory"),
            resident: resident.reduce(u64::saturating_add),
            nodes,
        }
    }

    /// Returns the reason why the guarantee of a container is not kept, if it is not.
    fn problem(&self, cgroup: &str) -> Option<(&'static str, String)> {
        if let Some(workload) = self.workloads.get(cgroup) {
            if let Some(broken) = workload.residency.iter().find(|kind| kind.broken) {
                let off = Bytes(broken.off.total_bytes());
                let kind = &broken.kind;
                return Some((
                    "MemoryElsewhere",
                    format!("{off} of {kind} of {} are on other nodes.", workload.workload),
                ));
            }
            if let Some(cpus) = &workload.intruded_cpus {
                return Some((
                    "CpusShared",
                    format!("Other tasks ran on CPUs {cpus} of {}.", workload.workload),
                ));
            }
        }
        let allocation = self.allocations.get(cgroup)?;
        let name = &allocation.name;
        if !allocation.enforced {
            return Some(("NotEnforced", format!("The guarantee of {name} is not written to the kernel.")));
        }
        if allocation.missing.is_some() {
            return Some(("CapacityMissing", format!("CPUs or memory of {name} are gone from this host.")));
        }
        let drift = allocation.present_drift().next()?;
        let found = drift.found.as_deref().unwrap_or("gone");
        let message = format!("{} of {name} is {found}, and not {}.", drift.knob, drift.wanted);
        Some(("KnobChanged", message))
    }
}

/// CPUs and nodes of a claim in the ledger.
struct Held {
    cpus: CpuSet,
    nodes: NodeSet,
}

impl Held {
    fn new(ledger: &Ledger, machine: &Machine, owner: &OwnerId) -> Self {
        let held = ledger.owner(owner).into_iter().flat_map(|account| account.containers.values());
        let cpus: CpuSet =
            held.clone().filter_map(|held| held.cpus.as_ref()).flat_map(CpuSet::iter).collect();
        let of_memory = held.flat_map(|held| &held.blocks).flat_map(|block| block.affinity.iter());
        let of_cpus = machine.nodes.iter().filter(|(_, data)| data.cpus.iter().any(|cpu| cpus.contains(cpu)));
        let nodes = of_memory.chain(of_cpus.map(|(node, _)| *node)).collect();
        Self { cpus, nodes }
    }
}

/// Returns the missed and all allocated bytes of a workload, hugepages included; `None` if they are not counted.
fn misses(workload: &api::Workload) -> Option<[u64; 2]> {
    let mut counted = None;
    for node in &workload.nodes {
        let Some(allocated) = node.allocated else { continue };
        // Absent without guaranteed nodes, and if memory beyond the guarantee may be on any node.
        let Some(missed_bytes) = node.missed_bytes else { continue };
        let [missed, all] = counted.get_or_insert([0_u64; 2]);
        *missed = missed.saturating_add(missed_bytes);
        *all = all.saturating_add(allocated.local_bytes).saturating_add(allocated.remote_bytes);
        for hugepages in &node.hugepages {
            *missed = missed.saturating_add(hugepages.missed_bytes.unwrap_or(0));
            let pages = hugepages.allocated.unwrap_or_default();
            *all = all.saturating_add(pages.local_bytes).saturating_add(pages.remote_bytes);
        }
    }
    counted
}

/// Returns the remote and all accesses of a workload by NUMA balancing's samples; `None` if they are not counted.
fn accesses(workload: &api::Workload) -> Option<[u64; 2]> {
    let accesses = workload.activity.as_ref()?.accesses.as_ref()?;
    let sum =
        |figure: fn(&api::NodeAccesses) -> u64| accesses.iter().map(figure).fold(0, u64::saturating_add);
    let remote = sum(|of| of.remote_pages);
    Some([remote, remote.saturating_add(sum(|of| of.local_pages))])
}

/// Returns a part of a whole, at most 1; `None` without a whole.
#[expect(clippy::cast_precision_loss, reason = "four decimals are shown")]
fn ratio([part, whole]: [u64; 2]) -> Option<f64> {
    (whole > 0).then(|| (part as f64 / whole as f64).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(problem: Option<&'static str>, resident: u64, miss_ratio: f64) -> ClaimReport {
        let part = PartReport {
            device: "node-1".to_owned(),
            nodes: NodeSet::single(NodeId(1)),
            cpus: "4-5".parse().unwrap(),
            memory: 1 << 30,
            resident: Some(resident),
        };
        let problem = problem.map(|reason| (reason, format!("{resident} bytes")));
        ClaimReport { problem, parts: vec![part], miss_ratio: Some(miss_ratio), remote_ratio: None }
    }

    #[test]
    fn new_problems_are_written_at_once() {
        let start = Instant::now();
        let due = |before: ClaimReport, now: &ClaimReport, after: Duration| {
            is_due(Some(&Written { report: before, at: start, is_complete: true }), now, start + after)
        };
        let (soon, later) = (Duration::from_secs(30), FIGURES_INTERVAL);
        let same = report(None, 100 << 20, 0.0);
        assert!(is_due(None, &same, start));
        assert!(!due(same.clone(), &same, later));
        let broken = report(Some("MemoryElsewhere"), 100 << 20, 0.0);
        assert!(due(same.clone(), &broken, soon));
        assert!(!due(broken.clone(), &same, soon) && due(broken.clone(), &same, later));
        let other = report(Some("CpusShared"), 100 << 20, 0.0);
        assert!(!due(broken.clone(), &other, soon) && due(broken.clone(), &other, later));
        let refused = Written { report: same.clone(), at: start, is_complete: false };
        assert!(
            !is_due(Some(&refused), &broken, start + soon) && is_due(Some(&refused), &same, start + later)
        );
        assert!(
            !due(broken.clone(), &report(Some("MemoryElsewhere"), 101 << 20, 0.0), later),
            "another message"
        );
        let mut other_cpus = same.clone();
        other_cpus.parts[0].cpus = "4-6".parse().unwrap();
        assert!(due(same.clone(), &other_cpus, soon));
    }

    #[test]
    fn figures_are_written_if_they_moved() {
        let start = Instant::now();
        let due = |before: &ClaimReport, now: &ClaimReport, after: Duration| {
            is_due(
                Some(&Written { report: before.clone(), at: start, is_complete: true }),
                now,
                start + after,
            )
        };
        let before = report(None, 100 << 20, 0.2);
        let (early, later) = (Duration::from_secs(299), FIGURES_INTERVAL);
        for (resident, misses, expected) in [
            (104 << 20, 0.2, false),
            (106 << 20, 0.2, true),
            (90 << 20, 0.2, true),
            (100 << 20, 0.205, false),
            (100 << 20, 0.25, true),
        ] {
            let now = report(None, resident, misses);
            assert!(!due(&before, &now, early));
            assert_eq!(due(&before, &now, later), expected, "{resident} {misses}");
        }
        // Little memory may double without a write.
        assert!(!due(&report(None, 4096, 0.0), &report(None, 8192, 0.0), later));
        let mut unread = before.clone();
        unread.parts[0].resident = None;
        assert!(due(&unread, &before, later));
    }

    #[test]
    fn status_has_conditions_and_data() {
        let mut broken = report(Some("CpusShared"), 4096, 1.0 / 3.0);
        broken.remote_ratio = Some(0.25);
        let devices = broken.devices();
        let status = &devices["node-1"];
        let conditions: Vec<_> = status
            .conditions
            .iter()
            .map(|of| (of.name, of.is_true, of.reason.as_str(), of.message.as_str()))
            .collect();
        let expected =
            [("Ready", true, "Prepared", ""), ("numaward.io/kept", false, "CpusShared", "4096 bytes")];
        assert_eq!(conditions, expected);
        let data = json!({ "nodes": "1", "cpus": "4-5", "memoryBytes": 1 << 30, "residentBytes": 4096,
            "missRatio": 0.3333, "remoteRatio": 0.25 });
        assert_eq!(status.data, Some(data));
    }
}
