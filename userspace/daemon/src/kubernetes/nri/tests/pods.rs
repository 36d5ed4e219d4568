//! Pods as a whole: their memory at every level, what they hold beside their containers, those that wait, and those
//! that a kubelet placed.

use numaward_config::{kubernetes::Kubernetes, memory_qos::MemoryReservationPolicy};
use numaward_engine::{Quantity, Request};
use numaward_guarantee::{policy, state::State};
use numaward_kube::pod_resources::{
    AssignmentSource,
    messages::{AllocatableResponse, ContainerDevices, ContainerResources, PodResources},
    serve,
};
use numaward_store::Store;

use super::*;
use crate::kubernetes::export::{
    self,
    assigned::{Calls, PodReporter},
    devices::LastReported,
};

fn resources(cpus: &str, memory: &str) -> Resources {
    Resources::none().with_cpu(cpus.parse().unwrap()).with_memory(memory.parse().unwrap())
}

fn plain(name: &str, requests: Resources, limits: Resources) -> ContainerRequest {
    ContainerRequest { name: name.into(), restartable: false, requests, limits }
}

impl Known {
    /// The API server reports a pod.
    pub(super) fn tell(&self, uid: &str, containers: Vec<ContainerRequest>, of_pod: Option<Resources>) {
        self.tell_with(uid, containers, of_pod, Resources::none());
    }

    /// The same, of a pod whose `RuntimeClass` adds an overhead.
    fn tell_with(
        &self,
        uid: &str,
        containers: Vec<ContainerRequest>,
        of_pod: Option<Resources>,
        overhead: Resources,
    ) {
        let id = PodId { namespace: "default".to_owned(), name: format!("pod-{uid}"), uid: uid.to_owned() };
        let of_pod = of_pod.map(|all| numaward_engine::PodResources { requests: all.clone(), limits: all });
        let pod = pod::Pod { id, containers, resources: of_pod, overhead, ..pod::Pod::default() };
        self.pods.lock().unwrap().insert(uid.to_owned(), Arc::new(pod));
    }
}

impl Bench {
    /// `memory.min`, `memory.low` and `memory.high` of a cgroup, in MiB where they are amounts.
    fn memory(&self, path: &str) -> [String; 3] {
        ["memory.min", "memory.low", "memory.high"].map(|knob| {
            let text = self.knob(&format!("{path}/{knob}"));
            text.parse::<u64>().map_or(text, |bytes| (bytes >> 20).to_string())
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_protected_at_every_level_and_given_back() {
    let known = Arc::new(Known::default());
    let mut bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    bench.config.memory_throttling_factor = Some(serde_json::from_str("0.5").unwrap());
    let daemon = bench.start().await;
    let levels = |container: &ContainerSpec, class: &str| {
        let path = path_of(container);
        let pod = path.rsplit_once('/').unwrap().0.to_owned();
        let kubepods = ["kubepods", class].map(|path| bench.memory(path)).to_vec();
        [vec![bench.memory(&path), bench.memory(&pod)], kubepods].concat()
    };

    let pod = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    // A little is left to reclaim within the pod: see `core::pods::memory` of `numaward_control`.
    let protected = ["992", "1024", "max"];
    let nothing = ["0", "0", "max"];
    assert_eq!(levels(&db, "kubepods/burstable"), [protected, protected, protected, nothing]);

    // The memory that a Burstable container requests is promised on demand, and then protected as far as possible.
    known.tell("web", vec![plain("web", resources("1", "256Mi"), resources("2", "512Mi"))], None);
    let wish = [("numaward.io/guarantee", "memory")];
    let web_pod = bench.pod("web", "/burstable", &wish).await.unwrap();
    let web = container(&web_pod, "web", 1, Bytes::mib(512));
    bench.run(&web).await.unwrap();
    let low = ["0", "256", "max"];
    assert_eq!(
        levels(&web, "kubepods/burstable"),
        [["0", "256", "384"], low, ["992", "1280", "max"], low],
        "half of what is above the request"
    );
    assert_eq!(bench.mems(&web), "0");
    // One without the wish is not protected, but slowed down before its limit.
    known.tell("log", vec![plain("log", resources("1", "64Mi"), resources("2", "128Mi"))], None);
    let log_pod = bench.pod("log", "/burstable", &[]).await.unwrap();
    let log = container(&log_pod, "log", 1, Bytes::mib(128));
    bench.run(&log).await.unwrap();
    assert_eq!(levels(&log, "kubepods/burstable")[..2], [["0", "0", "96"], nothing]);
    let unified = |id: &str| bench.runtime.container(id).unwrap().resources.unified;
    assert_eq!(unified(&db.id)["memory.low"], Bytes::gib(1).0.to_string());

    // In-place resize.
    let more = container(&pod, "db", 2, Bytes::gib(2));
    let resized = bench.runtime.update_container(&db.id, &more).await.unwrap();
    assert_eq!(resized.resources.unified["memory.min"], Bytes::mib(1984).0.to_string());
    assert_eq!(levels(&db, "kubepods/burstable")[..2], [["1984", "2048", "max"]; 2]);

    for (spec, pod) in [(&db, &pod), (&web, &web_pod), (&log, &log_pod)] {
        bench.remove(spec).await;
        bench.runtime.remove_pod(&pod.id).await.unwrap();
    }
    for path in ["kubepods", "kubepods/burstable", "kubepods/poddb", "kubepods/burstable/podweb"] {
        assert_eq!(bench.memory(path), nothing, "{path}");
    }
    assert_eq!(daemon.reconciler.allocations().allocations, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_pods_sandbox_costs_is_protected_in_the_pod() {
    let known = Arc::new(Known::default());
    let bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    let daemon = bench.start().await;
    let containers = ["db", "log"].map(|name| ContainerRequest::guaranteed(name, resources("1", "1Gi")));
    known.tell_with("vm", containers.into(), None, resources("250m", "128Mi"));
    let pod = bench.pod("vm", "", &[]).await.unwrap();
    let [db, log] = ["db", "log"].map(|name| container(&pod, name, 1, Bytes::gib(1)));
    bench.run(&db).await.unwrap();
    let levels = || [path_of(&db).as_str(), "kubepods/podvm", "kubepods"].map(|path| bench.memory(path));
    let one = ["1120", "1152", "max"];
    assert_eq!(levels(), [["992", "1024", "max"], one, one]);
    bench.run(&log).await.unwrap();
    let both = ["2112", "2176", "max"];
    assert_eq!(levels(), [["992", "1024", "max"], both, both], "it costs this once");

    // Also after a restart.
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    until("both are held", || daemon.reconciler.allocations().allocations.len() == 2).await;
    assert_eq!(levels()[1..], [both, both]);
    bench.remove(&db).await;
    assert_eq!(bench.memory("kubepods/podvm"), one);
    bench.remove(&log).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(bench.memory("kubepods"), ["0", "0", "max"]);
}

/// A pod with 5 CPUs and 8Gi as a whole that runs: one container holds 2 and 4Gi of them, two share the rest.
async fn pod_that_shares(bench: &Bench, known: &Known) -> (PodSpec, [ContainerSpec; 3]) {
    let none = Resources::none;
    let containers = vec![
        ContainerRequest::guaranteed("db", resources("2", "4Gi")),
        plain("web", none(), none()),
        plain("log", none(), none()),
    ];
    known.tell("all", containers, Some(resources("5", "8Gi")));
    let pod = bench.pod("all", "", &[]).await.unwrap();
    let [web, log] = ["web", "log"].map(|name| container(&pod, name, 0, Bytes(0)));
    let specs = [container(&pod, "db", 2, Bytes::gib(4)), web, log];
    for spec in &specs {
        bench.run(spec).await.unwrap();
    }
    (pod, specs)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_as_a_whole_is_resized_within_the_promise_or_not() {
    let known = Arc::new(Known::default());
    let bench = Bench::new(known.clone(), fake::Config::containerd_2_3);
    let daemon = bench.start().await;
    let (pod, [db, web, log]) = pod_that_shares(&bench, &known).await;
    let (own, three) = (bench.cpus(&db), bench.cpus(&web));
    let resize = |cpus: u64, memory| bench.runtime.update_pod(&pod.id, Some(cpus * 1024), memory);

    resize(6, Bytes::gib(10)).await.unwrap();
    let four = bench.cpus(&web);
    assert!(four.len() == 4 && three.is_subset(&four) && (&four & &own).is_empty(), "{four} beside {own}");
    assert_eq!(bench.cpus(&log), four);
    let shared = |daemon: &Daemon| {
        let held = daemon.reconciler.allocations();
        let held = held.allocations.iter().find(|held| held.name == "default/pod-all/web").unwrap();
        (held.cpus.parse::<CpuSet>().unwrap(), held.memory[0].bytes)
    };
    assert_eq!(shared(&daemon), (four.clone(), Bytes::gib(6).0));
    bench.learns(&log).await;

    // A node has 16 CPUs and 64Gi.
    for (cpus, memory, words) in [
        (40, Bytes::gib(10), "cpu requested"),
        (6, Bytes::gib(90), "memory requested"),
        (2, Bytes::gib(10), "not a whole number"),
    ] {
        let error = resize(cpus, memory).await.unwrap_err();
        assert!(
            error.contains("numaward cannot resize pod default/pod-all") && error.contains(words),
            "{error}"
        );
        assert_eq!(shared(&daemon), (four.clone(), Bytes::gib(6).0));
        assert_eq!(bench.cpus(&web), four);
    }
    resize(5, Bytes::gib(8)).await.unwrap();
    assert_eq!((bench.cpus(&web), shared(&daemon).1), (three, Bytes::gib(4).0));
    // A pod that is not known, or shares nothing, is not ours to refuse.
    let other = bench.pod("other", "", &[]).await.unwrap();
    bench.runtime.update_pod(&other.id, Some(1 << 20), Bytes::gib(900)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_systemd_drivers_cgroups_are_protected_too() {
    let known = Arc::new(Known::default());
    let mut bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    // As Kubernetes does it: every request counts.
    bench.config.memory_reservation_policy = Some(MemoryReservationPolicy::TieredReservation);
    let daemon = bench.start().await;
    known.tell("web", vec![plain("web", resources("1", "256Mi"), resources("2", "512Mi"))], None);
    let slices = ["kubepods", "kubepods-burstable", "kubepods-burstable-podweb"];
    let mut path = String::new();
    for slice in slices {
        path = format!("{path}/{slice}.slice");
        bench.cgroup(path.trim_start_matches('/'));
    }
    let pod = PodSpec { cgroup_parent: path.clone(), ..bench.spec("web", "/burstable", &[]) };
    bench.runtime.run_pod(&pod).await.unwrap();
    let web = ContainerSpec {
        cgroups_path: "kubepods-burstable-podweb.slice:cri-containerd:web-web".to_owned(),
        ..container(&pod, "web", 1, Bytes::mib(512))
    };
    bench.run(&web).await.unwrap();
    assert_eq!(path_of(&web), format!("{}/cri-containerd-web-web.scope", path.trim_start_matches('/')));
    let cgroup: CgroupPath = format!("/{}", path_of(&web)).parse().unwrap();
    let above: Vec<String> = cgroup.ancestors().map(|path| path.to_string()).collect();
    for path in above.iter().filter(|path| *path != "/") {
        assert_eq!(bench.memory(path.trim_start_matches('/')), ["0", "256", "max"], "{path}");
    }
    bench.remove(&web).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(bench.memory("kubepods.slice"), ["0", "0", "max"]);
    assert_eq!(daemon.reconciler.allocations().allocations, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_pod_holds_as_a_whole_its_containers_share() {
    let known = Arc::new(Known::default());
    let bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    let daemon = bench.start().await;
    let (pod, [db, web, log]) = pod_that_shares(&bench, &known).await;
    assert_eq!((bench.cpus(&db).len(), bench.cpus(&web).len()), (2, 3));
    assert_eq!(bench.cpus(&web), bench.cpus(&log));
    assert!((&bench.cpus(&web) & &bench.cpus(&db)).is_empty());
    assert_eq!(bench.mems(&web), bench.mems(&log));
    let held = daemon.reconciler.allocations();
    let shares: Vec<_> = held
        .allocations
        .iter()
        .map(|held| match &held.target {
            numaward_api::Target::Container(of) => (of.container.as_str(), of.shares_pod),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(shares, [("db", false), ("log", true), ("web", true)]);
    // The memory that is shared is there once.
    let placed = |promises: &numaward_model::Guarantees| {
        promises.workloads().iter().filter(|of| !of.placed.is_empty()).count()
    };
    assert_eq!(placed(&bench.host.assigned.lock().unwrap()), 2);
    let host = bench.host.clone();
    let source = move || export::Assigned::promised(&host.assigned.lock().unwrap(), &host.machine());
    let served = PodReporter::new(Arc::new(source), None, LastReported::default(), Calls::default());
    let [reported] = served.pods().try_into().unwrap();
    assert_eq!((reported.cpu_ids.len(), reported.memory[0].size), (3, Bytes::gib(4).0));
    let of: Vec<_> = reported.containers.iter().map(|of| (of.name.as_str(), of.cpu_ids.len())).collect();
    assert_eq!(of, [("db", 2), ("log", 0), ("web", 0)]);

    for spec in [&web, &log, &db] {
        bench.remove(spec).await;
    }
    assert_eq!(
        daemon.reconciler.allocations().shared_cpus.parse::<CpuSet>().unwrap().len(),
        59,
        "until it is over"
    );
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
}

/// Containers that run and ask for all that there is, and one, the last, that finds nothing left.
fn full_house(bench: &Bench) -> Vec<(PodSpec, ContainerSpec)> {
    let run = |(name, cpus)| {
        let pod = bench.spec(name, "", &[]);
        let spec = container(&pod, name, cpus, Bytes::gib(1));
        bench.runtime.add_running(&pod, &spec);
        bench.cgroup(&path_of(&spec));
        (pod, spec)
    };
    [("a", 15), ("b", 16), ("c", 16), ("d", 16), ("late", 4)].map(run).into()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whose_creation_was_not_answered_keeps_off_what_is_promised_from_its_start() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let running = full_house(&bench);
    let daemon = bench.start().await;
    until("the four are held", || daemon.reconciler.allocations().allocations.len() == 4).await;
    let unanswered = |name: &str, cpus: &str| {
        let pod = bench.spec(name, "", &[]);
        let spec = ContainerSpec { cpus: cpus.to_owned(), ..container(&pod, name, 2, Bytes::gib(1)) };
        bench.runtime.add_running(&pod, &spec);
        bench.cgroup(&path_of(&spec));
        spec
    };
    let (ours, theirs) = (unanswered("ours", ""), unanswered("theirs", "40-41"));
    for spec in [&ours, &theirs] {
        bench.runtime.start_container(&spec.id).await.unwrap();
    }
    until("it keeps off their CPUs", || bench.cpus(&ours) == "0".parse().unwrap()).await;
    bench.learns(&ours).await;

    let (pod, freed) = &running[2];
    let freed_cpus = bench.cpus(freed);
    bench.remove(freed).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    until("it is pinned", || bench.cpus(&ours).len() == 2).await;
    assert!(bench.cpus(&ours).is_subset(&freed_cpus));
    assert_eq!(bench.cpus(&theirs), CpuSet::new(), "somebody else sees to it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_was_started_without_what_it_asks_for_gets_it_when_it_is_there() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let running = full_house(&bench);
    let daemon = bench.start().await;
    let names = || daemon.reconciler.allocations().allocations.len();
    until("the four are held", || names() == 4).await;
    assert_eq!(daemon.figures.unpinned_for("does_not_fit"), 1);
    let late = &running[4].1;
    until("it keeps off their CPUs", || bench.cpus(late) == "0".parse().unwrap()).await;
    let unplaced = || daemon.reconciler.unplaced().into_iter().map(|pod| pod.uid).collect::<Vec<_>>();
    until("it is the only one without", || unplaced() == [running[4].0.uid.clone()]).await;

    let (pod, freed) = &running[2];
    let freed_cpus = bench.cpus(freed);
    bench.remove(freed).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    until("it is pinned", || bench.cpus(late).len() == 4).await;
    until("none is unplaced", || unplaced().is_empty()).await;
    assert!(bench.cpus(late).is_subset(&freed_cpus));
    bench.learns(late).await;
    assert_eq!(names(), 4);
    assert_eq!(daemon.figures.unpinned_for("does_not_fit"), 1);

    // Also after a restart in between, with others in its place.
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    until("all are held again", || daemon.reconciler.allocations().allocations.len() == 4).await;
    assert_eq!(bench.cpus(late).len(), 4);
    assert_eq!(daemon.figures.unpinned_for("does_not_fit"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_is_not_forgotten_by_a_restart() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let running = full_house(&bench);
    let daemon = bench.start().await;
    until("the four are held", || daemon.reconciler.allocations().allocations.len() == 4).await;
    daemon.stop(&bench.runtime).await;
    let (pod, freed) = &running[1];
    bench.remove(freed).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    let daemon = bench.start().await;
    until("it is pinned", || bench.cpus(&running[4].1).len() == 4).await;
    assert_eq!(daemon.figures.unpinned_for("does_not_fit"), 0, "it was counted before");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_pod_gives_back_covers_another_whose_node_lost_memory() {
    let mut bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    let daemon = bench.start().await;
    let mut running = Vec::new();
    for (name, memory) in [("a", 30), ("b", 20)] {
        let pod = bench.pod(name, "", &[]).await.unwrap();
        let spec = container(&pod, name, 2, Bytes::gib(memory));
        bench.run(&spec).await.unwrap();
        assert_eq!(bench.mems(&spec), "0");
        running.push((pod, spec));
    }
    daemon.stop(&bench.runtime).await;
    let mut smaller = Machine::clone(&bench.host.machine());
    smaller.nodes.get_mut(&numaward_topology::NodeId(0)).unwrap().memory = Bytes::gib(41);
    bench.host = Arc::new(Host::new(smaller));
    let daemon = bench.start().await;
    let of_node = || daemon.reconciler.allocations().nodes[0].memory[0].clone();
    let short_of_memory =
        || daemon.reconciler.allocations().allocations.iter().filter(|held| held.missing.is_some()).count();
    until("both are held", || daemon.reconciler.allocations().allocations.len() == 2).await;
    assert_eq!((short_of_memory(), of_node().promised_bytes >> 30, of_node().free_bytes), (1, 50, 0));
    let (pod, spec) = &running[0];
    bench.remove(spec).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    until("the other has all of its memory again", || short_of_memory() == 0).await;
    assert_eq!((of_node().promised_bytes >> 30, of_node().free_bytes >> 30), (20, 20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_kubelet_promised_is_kept_by_those_that_run() {
    let bench = Bench::new(Arc::new(NoPods), fake::Config::containerd_2_1);
    // As `numaward import-kubelet-state` leaves it.
    let strategy = policy::strategy(&bench.config, &bench.host.machine()).unwrap();
    let mut ledger = strategy.idle();
    for (uid, container, cpus) in [("gone", "x", 6), ("runs", "db", 3)] {
        let amounts = Resources::none().with_cpu(Quantity::whole(cpus)).with_memory("2Gi".parse().unwrap());
        let request = Request {
            owner: uid.into(),
            init_containers: Vec::new(),
            containers: vec![ContainerRequest::guaranteed(container, amounts)],
            resources: None,
        };
        let decision = strategy.admit(&ledger, &request);
        decision.outcome.unwrap();
        ledger = decision.ledger;
    }
    let (mut store, _) = Store::<State>::open(&bench.config.state_directory).unwrap();
    store.save(&State::with_ledger(ledger)).unwrap();
    drop(store);
    let pod = bench.spec("runs", "", &[]);
    let db = ContainerSpec {
        cpus: "7-9".to_owned(),
        mems: "0".to_owned(),
        ..container(&pod, "db", 3, Bytes::gib(2))
    };
    bench.runtime.add_running(&pod, &db);
    bench.cgroup(&path_of(&db));

    let daemon = bench.start().await;
    until("it is held", || !daemon.reconciler.allocations().allocations.is_empty()).await;
    assert_eq!(bench.cpus(&db), "7-9".parse().unwrap());
    let held = daemon.reconciler.allocations();
    let [held] = held.allocations.as_slice() else { panic!("{held:?}") };
    assert_eq!(
        (held.name.as_str(), held.cpus.as_str(), held.nodes.as_str()),
        ("default/pod-runs/db", "7-9", "0")
    );
    let notes = &held.explanation.as_ref().unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("from the state of the kubelet")), "{notes:?}");
    // What was promised to a pod that is gone is free.
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-6,10-63");
    assert_eq!(daemon.figures.unpinned_for("away"), 0, "the kubelet had pinned it");
    bench.remove(&db).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
}

/// A kubelet that has given a device on node 2 to a container.
struct DeviceOnNode2;

impl AssignmentSource for DeviceOnNode2 {
    fn pods(&self) -> Vec<PodResources> {
        let device = ContainerDevices {
            resource_name: "vendor.example/nic".to_owned(),
            device_ids: vec!["7".to_owned()],
            topology: Some((&"2".parse::<numaward_topology::NodeSet>().unwrap()).into()),
        };
        let container = ContainerResources {
            name: "db".to_owned(),
            devices: vec![device],
            ..ContainerResources::default()
        };
        vec![PodResources {
            name: "pod-nic".to_owned(),
            namespace: "default".to_owned(),
            containers: vec![container],
            ..PodResources::default()
        }]
    }

    fn allocatable(&self) -> AllocatableResponse {
        AllocatableResponse::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_that_the_kubelet_has_assigned_are_hints_for_the_whole_pod() {
    let known = Arc::new(Known::default());
    let mut bench = Bench::new(known.clone(), fake::Config::containerd_2_1);
    let socket = bench.dir.path().join("kubelet.sock");
    bench.config.kubernetes = Kubernetes {
        kubelet: numaward_config::cluster::Kubelet {
            pod_resources_socket: Some("/kubelet.sock".into()),
            ..Default::default()
        },
        ..Kubernetes::default()
    };
    // Without hints it starts at node 0; the other strategy would go on where something runs already.
    bench.config.strategy = StrategyKind::Kubelet;
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(serve(listener, Arc::new(DeviceOnNode2), CancellationToken::new()));
    let daemon = bench.start().await;
    let containers = || vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))];
    for uid in ["nic", "other", "late"] {
        known.tell(uid, containers(), None);
    }
    let place = async |uid: &str| {
        let pod = bench.pod(uid, "", &[]).await.unwrap();
        let db = container(&pod, "db", 2, Bytes::gib(1));
        bench.run(&db).await.unwrap();
        bench.mems(&db)
    };
    assert_eq!(place("nic").await, "2");
    assert_eq!(place("other").await, "0");
    // A kubelet that is away holds nothing up.
    server.abort();
    fs::remove_file(&socket).unwrap();
    assert_eq!(place("late").await, "0");
    assert_eq!(daemon.reconciler.allocations().allocations.len(), 3);
}
