//! Room for refused pods.

use numaward_config::{Interval, kubernetes::RefusedPolicy};
use numaward_engine as engine;
use numaward_guarantee::claim::{PlacedClaim, ReservedClaim, ReservedPart};
use numaward_topology::Bytes;

use super::*;
use crate::core::{claims, pods::room};

/// Returns a bench in which `a` and `b` fill node 0, and `c` node 1; each has 1.3 GiB left.
fn bench(refused: RefusedPolicy) -> RebalanceBench {
    let mut bench = RebalanceBench::new(RebalanceMode::Off);
    bench.config.kubernetes.refused = refused;
    bench.restart();
    bench
}

fn pod() -> PodPlacementRequest {
    let amounts = engine::Resources::none().with_cpu("1".parse().unwrap());
    let container = engine::ContainerRequest::guaranteed("c", amounts.with_memory("2Gi".parse().unwrap()));
    let request = engine::Request {
        containers: vec![container],
        ..engine::Request::workload("uid", engine::Resources::none())
    };
    PodPlacementRequest {
        pod: PodId { namespace: "n".to_owned(), name: "p".to_owned(), uid: "uid".to_owned() },
        sandbox: "sandbox".to_owned(),
        asked: PodClaim::Pod(request),
        terms: numaward_engine::Terms::default(),
        notes: Vec::new(),
    }
}

impl RebalanceBench {
    fn run_sandbox(&mut self) -> Result<(), AdmissionError> {
        self.run_new_sandbox("sandbox")
    }

    fn run_new_sandbox(&mut self, sandbox: &str) -> Result<(), AdmissionError> {
        let (answer, mut result) = oneshot::channel();
        let ask = PodPlacementRequest { sandbox: sandbox.to_owned(), ..pod() };
        self.runtime(PodCommand::RunPod { ask: Box::new(ask), answer });
        result.try_recv().unwrap()
    }

    fn stop_sandbox(&mut self) {
        self.stop_one_sandbox("sandbox");
    }

    fn stop_one_sandbox(&mut self, sandbox: &str) {
        let (answer, _stopped) = oneshot::channel();
        let (uid, sandbox) = ("uid".to_owned(), sandbox.to_owned());
        self.runtime(PodCommand::PodStopped { uid, sandbox, answer });
    }

    /// Returns the steps with the pods that their reports are about.
    pub(super) fn pods_in_reports(&self) -> Vec<(String, String)> {
        let happened = self.host.happened.lock().unwrap();
        let details = happened.iter().map(|(_, report)| &report.details);
        let of_pods = details.filter_map(|details| Some((details, details.get("pod")?)));
        of_pods.map(|(of, pod)| (of["step"].clone(), format!("{pod} {}", of["uid"]))).collect()
    }

    fn has_room_for_pod(&mut self) -> bool {
        self.reconciler.run_maintenance();
        self.reconciler.placed_pods.read().contains("uid")
    }
}

#[test]
fn refused_pod_gets_room() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    assert!(matches!(bench.run_sandbox(), Err(AdmissionError::Rejected(..))));
    assert!(bench.has_room_for_pod(), "it is not evicted meanwhile");
    let over = bench.until_over();
    assert_eq!((over.state, over.request.as_deref()), (RebalanceState::Done, Some("n/p")));
    assert!(over.automatic);
    let nodes = bench.nodes();
    assert!(nodes.contains(&("uid".to_owned(), "0".to_owned())), "the room is reserved: {nodes:?}");
    assert!(nodes.contains(&("a".to_owned(), "1".to_owned())), "{nodes:?}");
    assert_eq!(bench.knobs("a")[1], "1");
    assert!(bench.has_room_for_pod());
    assert_eq!(bench.pods_in_reports(), [("done".to_owned(), "n/p uid".to_owned())]);
    // Another request does not take the room before the kubelet tries again.
    bench.admit("new", "2Gi").unwrap_err();
    bench.run_sandbox().unwrap();
    bench.run_pod(&pod().asked, GuaranteeSource::Own, &["c"]);
    assert_eq!(bench.knobs("kubepods/pod/c")[1], "0");
    bench.stop_sandbox();
    assert!(!bench.has_room_for_pod());
}

#[test]
fn waiting_pod_moves_no_workload() {
    for refused in [RefusedPolicy::Wait, RefusedPolicy::Evict] {
        let mut bench = bench(refused);
        bench.run_sandbox().unwrap_err();
        assert!(bench.reconciler.rebalancing.run.is_none());
        assert_eq!(bench.steps(), [""; 0]);
        assert!(!bench.has_room_for_pod());
    }
}

#[test]
fn no_room_is_made_for_ended_pod() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    let before = bench.nodes();
    bench.run_sandbox().unwrap_err();
    bench.until(|status| status.moves.iter().any(|of| of.state == Some(MoveState::Moving)));
    bench.stop_sandbox();
    let over = bench.until_over();
    assert_eq!(over.state, RebalanceState::Cancelled);
    assert_eq!(over.reason.as_deref(), Some("the pod has ended"));
    assert_eq!(bench.nodes(), before);
    assert!(!bench.has_room_for_pod());
}

#[test]
fn absent_sandbox_ends_its_rebalance() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    bench.run_sandbox().unwrap_err();
    let (answer, _result) = oneshot::channel();
    let (containers, sandboxes) = (Vec::new(), BTreeMap::new());
    bench.runtime(PodCommand::Synchronize { containers, sandboxes, complete: true, answer });
    assert_eq!(bench.until_over().state, RebalanceState::Cancelled);
}

#[test]
fn admitted_pod_ends_the_moves() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    bench.run_sandbox().unwrap_err();
    assert_eq!(bench.status().state, RebalanceState::Running);
    // Room becomes free before the first move.
    release::release(&mut bench.reconciler.core, "b").unwrap();
    bench.run_sandbox().unwrap();
    let over = bench.until_over();
    assert_eq!(over.state, RebalanceState::Done);
    assert_eq!(bench.reconciler.core.store.state.moving.running, None);
    assert!(bench.nodes().contains(&("a".to_owned(), "0".to_owned())), "{:?}", bench.nodes());
}

#[test]
fn pod_without_possible_moves_may_be_evicted() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    bench.config.rebalance.max_bytes_per_hour = Size(Bytes::mib(512));
    bench.restart();
    bench.run_sandbox().unwrap_err();
    assert!(bench.reconciler.rebalancing.run.is_none());
    assert!(!bench.has_room_for_pod());
}

#[test]
fn ended_pod_starts_no_moves() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    let before = bench.nodes();
    // The runtime stops the sandbox before the reconciler plans.
    let (answer, _refused) = oneshot::channel();
    let command = PodCommand::RunPod { ask: Box::new(pod()), answer };
    commands::pod_command(&mut bench.reconciler.core, RuntimeCommand { number: 0, command }, false);
    bench.stop_sandbox();
    assert!(bench.reconciler.rebalancing.run.is_none());
    assert_eq!((bench.nodes(), bench.steps()), (before, Vec::new()));
}

#[test]
fn pod_keeps_its_new_sandbox() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    bench.run_sandbox().unwrap_err();
    release::release(&mut bench.reconciler.core, "b").unwrap();
    bench.stop_sandbox();
    bench.run_new_sandbox("second").unwrap();
    bench.until_over();
    let admitted = &bench.reconciler.core.store.state.pods["uid"];
    assert_eq!(admitted.sandbox, "second");
    bench.stop_one_sandbox("second");
    assert!(!bench.has_room_for_pod());
}

#[test]
fn replaced_sandbox_is_tried_again() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    bench.config.rebalance.dwell_time = Interval(Duration::ZERO);
    bench.restart();
    bench.run_sandbox().unwrap_err();
    bench.until(|status| status.moves.iter().any(|of| of.state == Some(MoveState::Moving)));
    // Moves are noted by the second.
    std::thread::sleep(Duration::from_millis(1100));
    bench.stop_sandbox();
    bench.reconciler.rebalance();
    bench.run_new_sandbox("second").unwrap_err();
    bench.until(|status| status.state == RebalanceState::Done);
    assert_eq!(bench.reconciler.core.store.state.pods["uid"].sandbox, "second");
}

#[test]
fn failed_moves_are_retried_ever_later() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    let mut delays = Vec::new();
    for _ in 0..3 {
        bench.run_sandbox().unwrap_err();
        bench.cancel();
        assert_eq!(bench.until_over().state, RebalanceState::Cancelled);
        let attempt = bench.reconciler.rebalancing.failed_attempts.get_mut("uid").unwrap();
        delays.push(attempt.retry_at.saturating_duration_since(Instant::now()).as_secs() / 590);
        attempt.retry_at = Instant::now();
    }
    assert_eq!(delays, [1, 2, 4]);
}

#[test]
fn pods_wait_for_rebalance_in_progress() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    bench.run_sandbox().unwrap_err();
    assert!(bench.reconciler.rebalancing.is_running());
    let other = PodId { uid: "other".to_owned(), ..pod().pod };
    let PodClaim::Pod(request) = pod().asked else { panic!() };
    let request = engine::Request { owner: "other".into(), ..request };
    let ask = PodPlacementRequest {
        pod: other,
        sandbox: "of other".to_owned(),
        asked: PodClaim::Pod(request),
        ..pod()
    };
    let (answer, mut result) = oneshot::channel();
    bench.runtime(PodCommand::RunPod { ask: Box::new(ask), answer });
    assert!(result.try_recv().unwrap().is_err());
    assert!(room::has_next(&bench.reconciler.core));
    bench.until_over();
    // Planned after the end: no moves make room for it.
    assert!(!room::has_next(&bench.reconciler.core));
    assert!(bench.reconciler.rebalancing.failed_attempts.contains_key("other"));
}

/// Returns a claim of the whole host with the same amounts as the pod.
fn host_claim() -> ReservedClaim {
    let consumed =
        [("cpu".into(), engine::Quantity::whole(1)), ("memory".into(), engine::Quantity::whole(2 << 30))];
    ReservedClaim {
        namespace: "n".to_owned(),
        name: "claim".to_owned(),
        pod: "uid".to_owned(),
        parts: vec![ReservedPart { node: None, consumed: consumed.into(), terms: engine::Terms::default() }],
        pending: true,
    }
}

impl RebalanceBench {
    fn place(&mut self, uid: &str) -> Result<PlacedClaim, AdmissionError> {
        let placed = self.reconciler.place_claim(uid, host_claim(), None);
        self.reconciler.process_effects();
        placed
    }
}

#[test]
fn claim_of_the_host_gets_room() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    assert_eq!(bench.place("u").unwrap(), PlacedClaim::MakesRoom);
    assert_eq!(bench.place("u").unwrap(), PlacedClaim::MakesRoom);
    // Another one waits for the moves in progress.
    assert_eq!(bench.place("v").unwrap(), PlacedClaim::MakesRoom);
    let over = bench.until_over();
    assert_eq!((over.state, over.request.as_deref()), (RebalanceState::Done, Some("resource claim n/claim")));
    assert!(over.automatic);
    assert!(bench.nodes().contains(&("a".to_owned(), "1".to_owned())), "{:?}", bench.nodes());
    // The room is reserved before the next request.
    bench.admit("new", "2Gi").unwrap_err();
    assert_eq!(bench.place("u").unwrap(), PlacedClaim::Reserved);
    assert!(matches!(bench.place("v"), Err(AdmissionError::Rejected(..))), "nothing else can be moved");
    let core = &bench.reconciler.core;
    assert!(core.store.state.claims.get("u").unwrap().pending);
    assert_eq!(core.store.state.claims.len(), 1);
    assert!(!claims::is_waiting(core, "u") && !claims::is_waiting(core, "v"));
}

#[test]
fn released_claim_ends_its_moves() {
    let mut bench = bench(RefusedPolicy::MakeRoom);
    let before = bench.nodes();
    assert_eq!(bench.place("u").unwrap(), PlacedClaim::MakesRoom);
    bench.until(|status| status.moves.iter().any(|of| of.state == Some(MoveState::Moving)));
    claims::release(&mut bench.reconciler.core, "u").unwrap();
    assert_eq!(bench.until_over().state, RebalanceState::Cancelled);
    assert_eq!(bench.nodes(), before);
    assert!(bench.reconciler.core.store.state.claims.get("u").is_none());
}

#[test]
fn claim_moves_nothing_unless_pods_may() {
    let mut bench = bench(RefusedPolicy::Wait);
    assert!(matches!(bench.place("u"), Err(AdmissionError::Rejected(..))));
    assert!(bench.reconciler.rebalancing.run.is_none());
    assert!(!claims::is_waiting(&bench.reconciler.core, "u"));
}
