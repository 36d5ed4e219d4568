//! Comparison of a simulated fleet with daemons: in each step, the daemon of a host decides like the simulated host.
//!
//! The simulation includes the scheduler. This test acts as the kubelet: it runs the sandbox of a pod, creates its containers, retries the
//! containers of a refused pod in the same steps as the simulation, and removes pods.

use numaward_config::kubernetes::RefusedPolicy;
use numaward_engine::Request;
use numaward_guarantee::policy;
use numaward_simulation::{
    fleet::{Deciders, Fleet, HostEvent, Member, RefusalPolicy, SchedulerPlugin},
    trace::Trace,
    variant::Variant,
};
use serde_json::{Value, json};

use super::*;

const HOST_COUNT: usize = 3;

/// CPUs and memory nodes by container.
type HeldByContainer = BTreeMap<String, (CpuSet, String)>;

/// A step of the simulation, and the guarantees on its host after it.
struct ObservedStep {
    host: usize,
    pod: Request,
    step: HostEvent,
    held: HeldByContainer,
}

/// Returns a trace of pods with one or two containers, more of which start than end.
fn trace() -> Trace {
    let pods = (0..60_u64).map(|number| {
        let container = |name: &str, salt: u64| {
            let (cpus, gib) = (1 + (number * 7 + salt) % 11, 1 + (number * 13 + salt) % 37);
            json!({"name": name, "resources": {"cpu": cpus.to_string(), "memory": format!("{gib}Gi")}})
        };
        let side = (number % 3 == 0).then(|| container("side", 5));
        let containers: Vec<Value> = [container("main", 0)].into_iter().chain(side).collect();
        json!({"at": number / 2, "life": 5 + number % 13, "guaranteed": true,
            "pod": {"name": format!("p{number}"), "containers": containers}})
    });
    let config = json!({"memory_manager_policy": "Static", "cpu_manager_policy": "static",
        "topology_manager_policy": "single-numa-node", "topology_manager_scope": "container"});
    let pods: Vec<Value> = pods.collect();
    let trace =
        json!({"name": "small", "retry_after": 6, "machine": {"nodes": []}, "config": config, "pods": pods});
    serde_json::from_value(trace).unwrap()
}

fn bench(refused: RefusedPolicy) -> (Arc<FakePods>, NriBench) {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    bench.config.topology_manager_policy = Some(TopologyManagerPolicy::SingleNumaNode);
    bench.config.kubernetes.refused = refused;
    bench.config.kubernetes.node_name = Some("node".to_owned());
    (known, bench)
}

/// Returns the simulated steps of a fleet of hosts like this one.
fn simulated(bench: &NriBench, refused: RefusalPolicy) -> Vec<ObservedStep> {
    let (trace, machine) = (trace(), Machine::clone(&bench.host.machine()));
    let policy = policy::engine_config(&bench.config, &machine).unwrap();
    let requests = trace.pods.iter().map(|pod| pod.pod.request().unwrap()).collect();
    let member = Member { trace: &trace, machine, policy, requests };
    let fleet = Fleet::new(vec![member], HOST_COUNT, 3).unwrap();
    let host = Some(Variant::Native { tiers: bench.config.tiers });
    let deciders = Deciders { host, refused, plugin: SchedulerPlugin::None };
    let mut steps = Vec::new();
    let outcome = fleet.groups[0].run_watched(deciders, &mut |host, pod, step, ledger| {
        let held = ledger.allocations().map(|(owner, container, held)| {
            (format!("{owner}/{container}"), (held.held_cpus(), held.memory_nodes().to_string()))
        });
        steps.push(ObservedStep { host, pod: pod.clone(), step, held: held.collect() });
    });
    assert_eq!(outcome.unwrap().faults, [""; 0]);
    steps
}

/// Returns the guarantees that a daemon has given.
fn held(daemon: &NriDaemon) -> HeldByContainer {
    let held = daemon.reconciler.allocations();
    let row = |held: &Arc<numaward_api::Allocation>| {
        let name = held.name.trim_start_matches("default/pod-").to_owned();
        let nodes = held.memory.iter().map(|block| block.nodes.clone()).collect::<Vec<_>>().join(",");
        (name, (held.cpus.parse().unwrap(), nodes))
    };
    held.allocations.iter().map(row).collect()
}

/// A host and its pods.
struct FakeHost {
    known: Arc<FakePods>,
    bench: NriBench,
    daemon: NriDaemon,
    pods: BTreeMap<String, (PodSpec, Vec<ContainerSpec>)>,
}

impl FakeHost {
    /// Creates the containers of a pod. Returns false if the first one is refused.
    async fn create(&self, uid: &str) -> bool {
        let (_, containers) = &self.pods[uid];
        for (number, container) in containers.iter().enumerate() {
            if let Err(error) = self.bench.run(container).await {
                assert!(number == 0 && error.contains("numaward cannot place pod"), "{uid}: {error}");
                return false;
            }
        }
        true
    }

    async fn bind(&mut self, uid: &str, request: &Request) -> bool {
        self.known.add_pod(uid, request.containers.clone(), None);
        let pod = self.bench.pod(uid, "", &[]).await.unwrap();
        let spec = |request: &ContainerRequest| {
            let cpus = request.requests.cpu.unwrap().units().unwrap();
            let memory = request.requests.memory.values().next().unwrap().units().unwrap();
            container(&pod, &request.name.to_string(), cpus, Bytes(memory))
        };
        let containers = request.containers.iter().map(spec).collect();
        self.pods.insert(uid.to_owned(), (pod, containers));
        self.create(uid).await
    }

    async fn remove(&mut self, uid: &str, has_run: bool) {
        let (pod, containers) = self.pods.remove(uid).unwrap();
        for container in containers.iter().filter(|_| has_run) {
            self.bench.remove(container).await;
        }
        self.bench.runtime.remove_pod(&pod.id).await.unwrap();
    }

    fn is_to_be_evicted(&self, uid: &str) -> bool {
        self.daemon.refusals.to_evict().iter().any(|(id, _)| id.uid == uid)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_repeat_simulated_hosts() {
    for (setting, refused) in [
        (RefusedPolicy::Wait, RefusalPolicy::Wait),
        (RefusedPolicy::Evict, RefusalPolicy::Evict { after: 1 }),
    ] {
        let steps = simulated(&bench(setting).1, refused);
        let mut hosts = Vec::new();
        for _ in 0..HOST_COUNT {
            let (known, bench) = bench(setting);
            let daemon = bench.start().await;
            hosts.push(FakeHost { known, bench, daemon, pods: BTreeMap::new() });
        }
        for (number, ObservedStep { host, pod, step, held: expected }) in steps.iter().enumerate() {
            let (uid, played) = (pod.owner.to_string(), &mut hosts[*host]);
            let what = format!("{setting:?}, step {number}, host {host}: pod {uid}: {step:?}");
            match *step {
                HostEvent::Bound { is_admitted } => {
                    assert_eq!(played.bind(&uid, pod).await, is_admitted, "{what}");
                    let is_named = !is_admitted && setting == RefusedPolicy::Evict;
                    assert_eq!(played.is_to_be_evicted(&uid), is_named, "{what}");
                }
                HostEvent::Again { is_admitted } => {
                    assert_eq!(played.create(&uid).await, is_admitted, "{what}");
                    assert!(!is_admitted || !played.is_to_be_evicted(&uid), "{what}");
                }
                HostEvent::Left => played.remove(&uid, true).await,
                HostEvent::GivenUp => played.remove(&uid, false).await,
                HostEvent::Evicted => {
                    assert!(played.is_to_be_evicted(&uid), "{what}");
                    played.remove(&uid, false).await;
                }
            }
            assert_eq!(&held(&played.daemon), expected, "{what}");
        }
        let count = |wanted: HostEvent| steps.iter().filter(|step| step.step == wanted).count();
        let refusals = count(HostEvent::Bound { is_admitted: false });
        let (later, evicted) = (count(HostEvent::Again { is_admitted: true }), count(HostEvent::Evicted));
        assert!(steps.len() > 150 && refusals > 5 && later > 0, "{} {refusals} {later}", steps.len());
        assert_eq!(evicted > 0, setting == RefusedPolicy::Evict);
    }
}
