//! Simulations of small fleets with known outcomes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use numaward_engine::policy::Tiers;
use numaward_simulation::{
    fleet::{
        Deciders, Fleet, FleetError, HostEvent, Member, MoveLimits, Outcome, RefusalPolicy, SchedulerPlugin,
    },
    trace::Trace,
    variant::Variant,
};
use numaward_topology::Bytes;
use serde_json::{Value, json};

/// Returns a pod with its arrival and lifetime in ticks, its CPUs and its memory in GiB.
fn pod(name: &str, (at, life): (u64, u64), cpus: u64, gib: u64) -> Value {
    let resources = json!({"cpu": cpus.to_string(), "memory": format!("{gib}Gi")});
    json!({
        "at": at, "life": life, "guaranteed": true,
        "held": {"cpu_milli": cpus * 1000, "memory_mib": gib * 1024},
        "pod": {"name": name, "containers": [{"name": "c", "resources": resources}]},
    })
}

/// Returns a trace for hosts with two nodes of four CPUs and 64 GiB. One CPU and 1 GiB of node 0 are reserved.
fn trace(retry_after: u64, pods: &[Value]) -> Trace {
    trace_with_policy("single-numa-node", retry_after, pods)
}

fn trace_with_policy(policy: &str, retry_after: u64, pods: &[Value]) -> Trace {
    let node = |id: u64| {
        let cpus: Vec<Value> = (4 * id..4 * id + 4).map(|cpu| json!([cpu, cpu, id, id])).collect();
        let distances = if id == 0 { [10, 20] } else { [20, 10] };
        json!({"id": id, "memory_bytes": 64_u64 << 30, "distances": distances, "cpus": cpus})
    };
    serde_json::from_value(json!({
        "name": "small", "retry_after": retry_after, "pods": pods,
        "machine": {"nodes": [node(0), node(1)]},
        "config": {
            "memory_manager_policy": "Static", "cpu_manager_policy": "static", "reserved_cpus": "0",
            "reserved_memory": [{"node": 0, "limits": {"memory": 1_u64 << 30}}],
            "topology_manager_policy": policy, "topology_manager_scope": "container",
        },
    }))
    .unwrap()
}

fn fleet(traces: &[Trace], hosts: usize, seed: u64) -> Result<Fleet<'_>, FleetError> {
    let member = |trace| {
        let (machine, policy, requests) = Trace::parts(trace).unwrap();
        Member { trace, machine, policy, requests }
    };
    Fleet::new(traces.iter().map(member).collect(), hosts, seed)
}

const KUBELET: Deciders =
    Deciders { host: Some(Variant::Kubelet), refused: RefusalPolicy::Fail, plugin: SchedulerPlugin::None };
const WITH_PLUGIN: Deciders = Deciders { plugin: SchedulerPlugin::NodeResourceTopologyMatch, ..KUBELET };
const NO_NUMA: Deciders = Deciders { host: None, ..KUBELET };
const WAITS: Deciders = native(RefusalPolicy::Wait);
const EVICTED: Deciders = native(RefusalPolicy::Evict { after: 1 });

const MOVE_LIMITS: MoveLimits = MoveLimits { moves: 3, bytes: Bytes::gib(16), window: 60, dwell: 10 };

const fn makes_room(limits: MoveLimits) -> Deciders {
    native(RefusalPolicy::MakeRoom { after: 1, limits })
}

const fn native(refused: RefusalPolicy) -> Deciders {
    Deciders { host: Some(Variant::Native { tiers: Tiers::Strict }), refused, plugin: SchedulerPlugin::None }
}

/// Returns the numbers of admitted pods, refusals and new pods.
fn counts(outcome: &Outcome) -> (u64, u64, u64) {
    assert_eq!(outcome.faults, Vec::<String>::new());
    assert_eq!(outcome.sums.guaranteed, outcome.sums.admitted() + outcome.sums.dropped);
    (outcome.sums.admitted(), outcome.refusals, outcome.retries)
}

/// Returns traces after which one host has three free CPUs on its node 0, but less memory than the other, which has three free
/// CPUs on two nodes. The scheduler sends the last pod, with three CPUs, to the host with more free memory.
fn split_host(retry_after: u64) -> [Trace; 2] {
    let long = (0, 100);
    let pods = [pod("a", long, 4, 40), pod("b", long, 2, 1), pod("c", long, 2, 1), pod("d", long, 3, 1)];
    [trace(retry_after, &pods), trace(retry_after, &[])]
}

#[test]
fn the_default_scheduler_sends_a_pod_where_the_kubelet_refuses_it_and_node_resource_topology_does_not() {
    let traces = split_host(3);
    for seed in 0..8 {
        let fleet = fleet(&traces, 2, seed).unwrap();
        let [group] = fleet.groups.as_slice() else { panic!("one group") };
        let run = |deciders| counts(&group.run(deciders).unwrap());
        // Refusals at the arrival, at once again, a tick later, and after three ticks.
        assert_eq!(run(KUBELET), (3, 4, 3));
        assert_eq!(run(WITH_PLUGIN), (4, 0, 0));
        assert_eq!(run(NO_NUMA), (4, 0, 0));
        // The pod is bound once.
        assert_eq!(run(WAITS), (3, 1, 0));
        // A new pod is created a tick after each refusal, three times in three ticks.
        assert_eq!(run(EVICTED), (3, 4, 3));
        assert_eq!(run(Deciders { plugin: SchedulerPlugin::NodeResourceTopologyMatch, ..WAITS }), (4, 0, 0));
    }
}

#[test]
fn resource_claims_send_a_pod_to_the_host_with_a_node_for_it() {
    let traces = split_host(3);
    let plugin = SchedulerPlugin::ResourceClaims { has_host_device: false };
    for seed in 0..8 {
        let fleet = fleet(&traces, 2, seed).unwrap();
        let outcome = fleet.groups[0].run(Deciders { plugin, ..WAITS }).unwrap();
        assert_eq!(counts(&outcome), (4, 0, 0));
    }
}

#[test]
fn claims_of_restricted_pods_have_the_smallest_possible_number_of_nodes() {
    // Six CPUs are two equal parts: three CPUs of node 0 are allocatable.
    let traces = [trace_with_policy("restricted", 3, &[pod("a", (0, 100), 6, 60)])];
    let fleet = fleet(&traces, 1, 1).unwrap();
    let plugin = SchedulerPlugin::ResourceClaims { has_host_device: false };
    assert_eq!(counts(&fleet.groups[0].run(Deciders { plugin, ..WAITS }).unwrap()), (1, 0, 0));
}

#[test]
fn host_device_makes_room_before_a_pod_is_bound() {
    // The first two pods share node 0, which then has one free CPU. Five CPUs are free in all.
    let long = (0, 100);
    let pods = [pod("a", long, 1, 1), pod("b", long, 1, 1), pod("c", long, 5, 60)];
    let traces = [trace_with_policy("best-effort", 3, &pods)];
    let fleet = fleet(&traces, 1, 1).unwrap();
    let run = |has_host_device| {
        let plugin = SchedulerPlugin::ResourceClaims { has_host_device };
        let outcome = fleet.groups[0].run(Deciders { plugin, ..makes_room(MOVE_LIMITS) }).unwrap();
        counts(&outcome)
    };
    // Two equal parts do not fit: there is an odd CPU.
    assert_eq!(run(false), (2, 0, 0));
    assert_eq!(run(true), (3, 0, 0));
}

#[test]
fn moves_make_room_within_limits() {
    let traces = split_host(3);
    for seed in 0..8 {
        let fleet = fleet(&traces, 2, seed).unwrap();
        let run = |limits| {
            let outcome = fleet.groups[0].run(makes_room(limits)).unwrap();
            (counts(&outcome), outcome.started_later, outcome.moves, outcome.moved)
        };
        assert_eq!(run(MOVE_LIMITS), ((4, 1, 0), 1, 1, Bytes::gib(1)));
        let none = ((3, 4, 3), 0, 0, Bytes(0));
        assert_eq!(run(MoveLimits { moves: 0, ..MOVE_LIMITS }), none);
        assert_eq!(run(MoveLimits { bytes: Bytes::mib(1023), ..MOVE_LIMITS }), none);
    }
}

/// Returns all events in their order, with the names of the pods: the number of the pod in the trace, a dot, and the number of its
/// refusals.
fn steps(fleet: &Fleet<'_>, deciders: Deciders) -> (Outcome, Vec<(String, HostEvent)>) {
    let mut steps = Vec::new();
    let outcome = fleet.groups[0].run_watched(deciders, &mut |_, request, step, _| {
        steps.push((request.owner.to_string(), step));
    });
    (outcome.unwrap(), steps)
}

const REFUSED: HostEvent = HostEvent::Bound { is_admitted: false };
const STUCK: HostEvent = HostEvent::Again { is_admitted: false };
const STARTS: HostEvent = HostEvent::Again { is_admitted: true };

#[test]
fn a_refused_pod_that_waits_keeps_what_it_requests_and_starts_on_its_host_when_there_is_room() {
    let long = (0, 100);
    // A pod leaves the host of the refused pod, and another pod with the same requests arrives.
    let (a, b, c) = (pod("a", long, 4, 40), pod("b", long, 2, 1), pod("c", (0, 3), 2, 1));
    let pods = [a, b, c, pod("d", long, 3, 1), pod("e", long, 3, 1)];
    for seed in 0..8 {
        let traces = [trace(3, &pods), trace(3, &[])];
        let fleet = fleet(&traces, 2, seed).unwrap();
        let (outcome, steps) = steps(&fleet, WAITS);
        // The requests of the refused pod count on its host, so the other pod is sent to the second host.
        assert_eq!((counts(&outcome), outcome.started_later), ((5, 1, 0), 1));
        let of_d: Vec<_> = steps.iter().filter(|(name, _)| name == "3.0").map(|(_, step)| *step).collect();
        assert_eq!(of_d, [REFUSED, STARTS, HostEvent::Left]);
    }
}

/// Returns a trace for one host: node 0 has two free CPUs and 1 GiB, node 1 has much memory and no free
/// CPU. No pod with one CPU and 10 GiB fits.
fn torn_host(retry_after: u64, life: u64) -> Trace {
    let long = (0, 100);
    let stuck = |name: &str| pod(name, long, 1, 10);
    trace(retry_after, &[pod("a", (0, life), 4, 1), pod("b", long, 1, 62), stuck("c"), stuck("d")])
}

#[test]
fn of_the_pods_that_a_host_refused_one_is_evicted_at_a_time_and_that_first_which_was_refused_first() {
    let traces = [torn_host(3, 100)];
    let (outcome, steps) = steps(&fleet(&traces, 1, 1).unwrap(), EVICTED);
    assert_eq!(counts(&outcome), (2, 5, 3));
    let of = |name: &str, step| (name.to_owned(), step);
    let expected = [
        of("2.0", REFUSED),
        of("3.0", REFUSED),
        of("2.0", HostEvent::Evicted),
        of("2.1", REFUSED),
        of("3.0", HostEvent::Evicted),
        of("3.1", REFUSED),
        of("2.1", HostEvent::Evicted),
        of("2.2", REFUSED),
        of("2.2", HostEvent::GivenUp),
        of("3.1", HostEvent::GivenUp),
    ];
    assert_eq!(steps[2..12], expected);
}

#[test]
fn refused_pods_are_tried_again_on_their_host_before_they_are_evicted() {
    let traces = [torn_host(3, 1)];
    for deciders in [WAITS, EVICTED] {
        let (outcome, steps) = steps(&fleet(&traces, 1, 1).unwrap(), deciders);
        assert_eq!((counts(&outcome), outcome.started_later), ((4, 2, 0), 2));
        let names =
            |wanted| steps.iter().filter(move |(_, step)| *step == wanted).map(|(name, _)| name.as_str());
        assert_eq!(names(STARTS).collect::<Vec<_>>(), ["2.0", "3.0"]);
        assert_eq!(names(STUCK).count(), 0);
    }
}

#[test]
fn a_pod_without_patience_is_tried_once() {
    let traces = split_host(0);
    let fleet = fleet(&traces, 2, 1).unwrap();
    assert_eq!(counts(&fleet.groups[0].run(KUBELET).unwrap()), (3, 1, 0));
}

#[test]
fn a_pod_for_which_no_host_has_room_waits_until_others_have_left() {
    // Each host has room for one at a time, wherever it is; the third comes to the front in time, the fourth does not.
    let pods: Vec<Value> = ["a", "b", "c", "d"]
        .iter()
        .zip([4, 6, 2, 2])
        .map(|(name, life)| pod(name, (0, life), 4, 1))
        .collect();
    for (patience, admitted) in [(3, 2), (4, 3), (5, 3), (6, 4)] {
        let traces = [trace(patience, &pods), trace(patience, &[])];
        let fleet = fleet(&traces, 2, 1).unwrap();
        for deciders in [KUBELET, WITH_PLUGIN, NO_NUMA] {
            let outcome = fleet.groups[0].run(deciders).unwrap();
            assert_eq!(outcome.sums.admitted(), admitted, "{patience} {deciders:?}");
        }
    }
}

#[test]
fn the_load_of_a_host_is_that_of_the_trace() {
    let pods: Vec<Value> =
        (0..20).map(|at| pod(&format!("p{at}"), (at, 5), 1 + at % 3, 1 + at % 7)).collect();
    let traces = [trace(5, &pods)];
    let one = traces[0].offered();
    for seed in [0, 1, u64::MAX] {
        let fleet = fleet(&traces, 7, seed).unwrap();
        let asked = fleet.groups[0].asked();
        assert_eq!(asked.guaranteed, 7 * one.guaranteed);
        assert_eq!(asked.memory_mib_ticks, 7 * one.memory_mib_ticks);
    }
    // A trace that is half as long comes twice.
    let short = trace(5, &pods[..10]);
    let traces = [trace(5, &pods), short.clone()];
    let fleet = fleet(&traces, 3, 1).unwrap();
    assert_eq!((fleet.groups.len(), fleet.groups[0].window), (1, 20));
    let expected = 2 * one.memory_mib_ticks + 2 * short.offered().memory_mib_ticks;
    assert_eq!(fleet.groups[0].asked().memory_mib_ticks, expected);
}

#[test]
fn the_same_seed_is_the_same_fleet() {
    let pods: Vec<Value> = (0..60).map(|at| pod(&format!("p{at}"), (at / 2, 9), 1 + at % 4, 20)).collect();
    let traces = [trace(5, &pods)];
    let run = |seed| {
        let fleet = fleet(&traces, 9, seed).unwrap();
        [KUBELET, WITH_PLUGIN, WAITS, EVICTED, NO_NUMA].map(|by| fleet.groups[0].run(by).unwrap())
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
}

#[test]
fn a_fleet_that_cannot_be_says_why() {
    let traces = [trace(5, &[]), trace(5, &[pod("a", (0, 1), 1, 1)])];
    for hosts in [0, 1] {
        assert_eq!(fleet(&traces, hosts, 1).err(), Some(FleetError::TooFewHosts { hosts, traces: 2 }));
    }
    assert_eq!(fleet(&[], 5, 1).err(), Some(FleetError::TooFewHosts { hosts: 5, traces: 0 }));
    // The short one would come again for all of the long one's ticks.
    let far = trace(5, &[pod("a", (u64::MAX, 1), 1, 1)]);
    let error = fleet(&[traces[1].clone(), far], 2, 1).err();
    assert!(matches!(error, Some(FleetError::TooManyPods(_))), "{error:?}");
}

#[test]
fn hosts_that_differ_are_groups_of_their_own() {
    let one = trace(5, &[pod("a", (0, 1), 1, 1)]);
    let members = ["single-numa-node", "restricted", "single-numa-node"].map(|policy| {
        let (machine, mut config, requests) = one.parts().unwrap();
        config.topology_manager_policy = policy.parse().unwrap();
        Member { trace: &one, machine, policy: config, requests }
    });
    let fleet = Fleet::new(members.to_vec(), 10, 1).unwrap();
    // 4, 3, 3: the first gets what remains.
    assert_eq!(fleet.groups.iter().map(|group| group.hosts).collect::<Vec<_>>(), [7, 3]);
}
