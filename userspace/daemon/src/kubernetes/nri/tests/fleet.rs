//! A fleet on paper beside daemons: what the simulation has each host decide, step by step, a daemon on such a host decides too.
//!
//! The scheduler is that of the simulation; the kubelet is played here: it runs a pod's sandbox and creates its containers, tries
//! those of a refused pod again when the simulation does, and takes a pod away.

use numaward_config::kubernetes::RefusedPolicy;
use numaward_engine::{
    Request,
    simulation::{
        fleet::{Deciders, Fleet, Member, RefusalPolicy, Step},
        trace::Trace,
        variant::Variant,
    },
};
use numaward_guarantee::policy;
use serde_json::{Value, json};

use super::*;

const HOSTS: usize = 3;

/// CPUs and nodes of memory of a container.
type HeldByContainer = BTreeMap<String, (CpuSet, String)>;

/// A step of the simulation, and what its host holds afterwards.
struct ObservedStep {
    host: usize,
    pod: Request,
    step: Step,
    held: HeldByContainer,
}

/// Pods of one or two containers, which come faster than they go.
fn trace() -> Trace {
    let pods = (0..60_u64).map(|number| {
        let of = |name: &str, salt: u64| {
            let (cpus, gib) = (1 + (number * 7 + salt) % 11, 1 + (number * 13 + salt) % 37);
            json!({"name": name, "resources": {"cpu": cpus.to_string(), "memory": format!("{gib}Gi")}})
        };
        let side = (number % 3 == 0).then(|| of("side", 5));
        let containers: Vec<Value> = [of("main", 0)].into_iter().chain(side).collect();
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

fn bench(refused: RefusedPolicy) -> (Arc<Known>, Bench) {
    let known = Arc::new(Known::default());
    let mut bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    bench.config.topology_manager_policy = Some(TopologyManagerPolicy::SingleNumaNode);
    bench.config.kubernetes.refused = refused;
    bench.config.kubernetes.node_name = Some("node".to_owned());
    (known, bench)
}

/// The steps of a fleet of hosts like this one.
fn simulated(bench: &Bench, refused: RefusalPolicy) -> Vec<ObservedStep> {
    let (trace, machine) = (trace(), Machine::clone(&bench.host.machine()));
    let policy = policy::engine_config(&bench.config, &machine).unwrap();
    let requests = trace.pods.iter().map(|pod| pod.pod.request().unwrap()).collect();
    let member = Member { trace: &trace, machine, policy, requests };
    let fleet = Fleet::new(vec![member], HOSTS, 3).unwrap();
    let host = Some(Variant::Native { tiers: bench.config.tiers });
    let deciders = Deciders { host, refused, topology_match: false };
    let mut seen = Vec::new();
    let outcome = fleet.groups[0].run_watched(deciders, &mut |host, pod, step, ledger| {
        let held = ledger.allocations().map(|(owner, container, held)| {
            (format!("{owner}/{container}"), (held.held_cpus(), held.memory_nodes().to_string()))
        });
        seen.push(ObservedStep { host, pod: pod.clone(), step, held: held.collect() });
    });
    assert_eq!(outcome.unwrap().faults, [""; 0]);
    seen
}

/// What a daemon has promised.
fn held(daemon: &Daemon) -> HeldByContainer {
    let held = daemon.reconciler.allocations();
    let of = |of: &Arc<numaward_api::Allocation>| {
        let name = of.name.trim_start_matches("default/pod-").to_owned();
        let nodes = of.memory.iter().map(|block| block.nodes.clone()).collect::<Vec<_>>().join(",");
        (name, (of.cpus.parse().unwrap(), nodes))
    };
    held.allocations.iter().map(of).collect()
}

/// A host, and what runs on it.
struct FakeHost {
    known: Arc<Known>,
    bench: Bench,
    daemon: Daemon,
    pods: BTreeMap<String, (PodSpec, Vec<ContainerSpec>)>,
}

impl FakeHost {
    /// Whether a pod's containers are created; if not, none of them is.
    async fn creates(&self, uid: &str) -> bool {
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
        self.known.tell(uid, request.containers.clone(), None);
        let pod = self.bench.pod(uid, "", &[]).await.unwrap();
        let spec = |of: &ContainerRequest| {
            let cpus = of.requests.cpu.unwrap().units().unwrap();
            let memory = of.requests.memory.values().next().unwrap().units().unwrap();
            container(&pod, &of.name.to_string(), cpus, Bytes(memory))
        };
        let containers = request.containers.iter().map(spec).collect();
        self.pods.insert(uid.to_owned(), (pod, containers));
        self.creates(uid).await
    }

    async fn take_away(&mut self, uid: &str, has_run: bool) {
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
        for _ in 0..HOSTS {
            let (known, bench) = bench(setting);
            let daemon = bench.start().await;
            hosts.push(FakeHost { known, bench, daemon, pods: BTreeMap::new() });
        }
        for (number, ObservedStep { host, pod, step, held: expected }) in steps.iter().enumerate() {
            // Each is a pod of its own.
            let (uid, played) = (pod.owner.to_string(), &mut hosts[*host]);
            let what = format!("{setting:?}, step {number}, host {host}: pod {uid}: {step:?}");
            match *step {
                Step::Bound { is_admitted } => {
                    assert_eq!(played.bind(&uid, pod).await, is_admitted, "{what}");
                    let is_named = !is_admitted && setting == RefusedPolicy::Evict;
                    assert_eq!(played.is_to_be_evicted(&uid), is_named, "{what}");
                }
                Step::Again { is_admitted } => {
                    assert_eq!(played.creates(&uid).await, is_admitted, "{what}");
                    assert!(!is_admitted || !played.is_to_be_evicted(&uid), "{what}");
                }
                Step::Left => played.take_away(&uid, true).await,
                Step::GivenUp => played.take_away(&uid, false).await,
                Step::Evicted => {
                    // Another one may have been refused before, and be evicted for another host's sake.
                    assert!(played.is_to_be_evicted(&uid), "{what}");
                    played.take_away(&uid, false).await;
                }
            }
            assert_eq!(&held(&played.daemon), expected, "{what}");
        }
        let count = |wanted: Step| steps.iter().filter(|seen| seen.step == wanted).count();
        let refusals = count(Step::Bound { is_admitted: false });
        let (later, evicted) = (count(Step::Again { is_admitted: true }), count(Step::Evicted));
        assert!(steps.len() > 150 && refusals > 5 && later > 0, "{} {refusals} {later}", steps.len());
        assert_eq!(evicted > 0, setting == RefusedPolicy::Evict);
    }
}
