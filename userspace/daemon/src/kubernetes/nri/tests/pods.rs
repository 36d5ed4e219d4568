//! Pods: memory protection at every level, pod-level resources, containers that are pinned late, and guarantees of a kubelet.

use numaward_config::{kubernetes::Kubernetes, memory_qos::MemoryReservationPolicy};
use numaward_engine::{Quantity, Request};
use numaward_guarantee::{policy, state::State};
use numaward_kube::pod_resources::{
    AssignmentSource,
    messages::{AllocatableResponse, AssignedPodResources, ContainerDevices, ContainerResources},
    serve,
};
use numaward_store::Store;

use super::*;
use crate::kubernetes::export::{
    self,
    assigned::{CallMetrics, PodReporter},
    devices::LatestDevices,
};

fn resources(cpus: &str, memory: &str) -> Resources {
    Resources::none().with_cpu(cpus.parse().unwrap()).with_memory(memory.parse().unwrap())
}

fn plain(name: &str, requests: Resources, limits: Resources) -> ContainerRequest {
    ContainerRequest { name: name.into(), restartable: false, requests, limits }
}

impl FakePods {
    /// Adds a pod. `pod_level` are its pod-level resources.
    pub(super) fn add_pod(&self, uid: &str, containers: Vec<ContainerRequest>, pod_level: Option<Resources>) {
        self.add_pod_with_overhead(uid, containers, pod_level, Resources::none());
    }

    /// Adds a pod with the overhead of a `RuntimeClass`.
    fn add_pod_with_overhead(
        &self,
        uid: &str,
        containers: Vec<ContainerRequest>,
        pod_level: Option<Resources>,
        overhead: Resources,
    ) {
        let id = PodId { namespace: "default".to_owned(), name: format!("pod-{uid}"), uid: uid.to_owned() };
        let resources =
            pod_level.map(|all| numaward_engine::PodResources { requests: all.clone(), limits: all });
        let pod = pod::Pod { id, containers, resources, overhead, ..pod::Pod::default() };
        self.pods.lock().unwrap().insert(uid.to_owned(), Arc::new(pod));
    }
}

impl NriBench {
    /// Returns `memory.min`, `memory.low` and `memory.high` of a cgroup, amounts in MiB.
    fn memory(&self, path: &str) -> [String; 3] {
        ["memory.min", "memory.low", "memory.high"].map(|knob| {
            let text = self.knob(&format!("{path}/{knob}"));
            text.parse::<u64>().map_or(text, |bytes| (bytes >> 20).to_string())
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn protects_memory_at_every_level() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
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
    // A small part of `memory.min` stays reclaimable within the pod: see `core::pods::memory` of `numaward_control`.
    let protected = ["992", "1024", "max"];
    let nothing = ["0", "0", "max"];
    assert_eq!(levels(&db, "kubepods/burstable"), [protected, protected, protected, nothing]);

    // The annotation guarantees the memory request of a Burstable container, which is protected then.
    known.add_pod("web", vec![plain("web", resources("1", "256Mi"), resources("2", "512Mi"))], None);
    let wish = [("numaward.io/guarantee", "memory")];
    let web_pod = bench.pod("web", "/burstable", &wish).await.unwrap();
    let web = container(&web_pod, "web", 1, Bytes::mib(512));
    bench.run(&web).await.unwrap();
    let low = ["0", "256", "max"];
    assert_eq!(
        levels(&web, "kubepods/burstable"),
        [["0", "256", "384"], low, ["992", "1280", "max"], low],
        "memory.high is half of the way from the request to the limit"
    );
    assert_eq!(bench.mems(&web), "0");
    // A container without the annotation is not protected, but throttled before its limit.
    known.add_pod("log", vec![plain("log", resources("1", "64Mi"), resources("2", "128Mi"))], None);
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
async fn protects_pod_overhead() {
    let known = Arc::new(FakePods::default());
    let bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let containers = ["db", "log"].map(|name| ContainerRequest::guaranteed(name, resources("1", "1Gi")));
    known.add_pod_with_overhead("vm", containers.into(), None, resources("250m", "128Mi"));
    let pod = bench.pod("vm", "", &[]).await.unwrap();
    let [db, log] = ["db", "log"].map(|name| container(&pod, name, 1, Bytes::gib(1)));
    bench.run(&db).await.unwrap();
    let levels = || [path_of(&db).as_str(), "kubepods/podvm", "kubepods"].map(|path| bench.memory(path));
    let one = ["1120", "1152", "max"];
    assert_eq!(levels(), [["992", "1024", "max"], one, one]);
    bench.run(&log).await.unwrap();
    let both = ["2112", "2176", "max"];
    assert_eq!(levels(), [["992", "1024", "max"], both, both], "the overhead counts once");

    // The protection is the same after a restart.
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    until("both have guarantees", || daemon.reconciler.allocations().allocations.len() == 2).await;
    assert_eq!(levels()[1..], [both, both]);
    bench.remove(&db).await;
    assert_eq!(bench.memory("kubepods/podvm"), one);
    bench.remove(&log).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(bench.memory("kubepods"), ["0", "0", "max"]);
}

/// Runs a pod with the pod-level resources 5 CPUs and 8Gi: one container gets 2 CPUs and 4Gi of them, two share the rest.
async fn pod_that_shares(bench: &NriBench, known: &FakePods) -> (PodSpec, [ContainerSpec; 3]) {
    let none = Resources::none;
    let containers = vec![
        ContainerRequest::guaranteed("db", resources("2", "4Gi")),
        plain("web", none(), none()),
        plain("log", none(), none()),
    ];
    known.add_pod("all", containers, Some(resources("5", "8Gi")));
    let pod = bench.pod("all", "", &[]).await.unwrap();
    let [web, log] = ["web", "log"].map(|name| container(&pod, name, 0, Bytes(0)));
    let specs = [container(&pod, "db", 2, Bytes::gib(4)), web, log];
    for spec in &specs {
        bench.run(spec).await.unwrap();
    }
    (pod, specs)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resizes_pod_level_or_refuses() {
    let known = Arc::new(FakePods::default());
    let bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_3);
    let daemon = bench.start().await;
    let (pod, [db, web, log]) = pod_that_shares(&bench, &known).await;
    let (own, three) = (bench.cpus(&db), bench.cpus(&web));
    let resize = |cpus: u64, memory| bench.runtime.update_pod(&pod.id, Some(cpus * 1024), memory);

    resize(6, Bytes::gib(10)).await.unwrap();
    let four = bench.cpus(&web);
    assert!(four.len() == 4 && three.is_subset(&four) && (&four & &own).is_empty(), "{four} beside {own}");
    assert_eq!(bench.cpus(&log), four);
    let shared = |daemon: &NriDaemon| {
        let held = daemon.reconciler.allocations();
        let held = held.allocations.iter().find(|held| held.name == "default/pod-all/web").unwrap();
        (held.cpus.parse::<CpuSet>().unwrap(), held.memory[0].bytes)
    };
    assert_eq!(shared(&daemon), (four.clone(), Bytes::gib(6).0));
    bench.await_update(&log).await;

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
    // The resize of an unknown pod, or of a pod without shared resources, is not refused.
    let other = bench.pod("other", "", &[]).await.unwrap();
    bench.runtime.update_pod(&other.id, Some(1 << 20), Bytes::gib(900)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn protects_memory_of_systemd_slices() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    // Every memory request is protected, as with the memory QoS of Kubernetes.
    bench.config.memory_reservation_policy = Some(MemoryReservationPolicy::TieredReservation);
    let daemon = bench.start().await;
    known.add_pod("web", vec![plain("web", resources("1", "256Mi"), resources("2", "512Mi"))], None);
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
async fn containers_share_pod_level_rest() {
    let known = Arc::new(FakePods::default());
    let bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
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
            numaward_api::Target::Container(container) => {
                (container.container.as_str(), container.shares_pod)
            }
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(shares, [("db", false), ("log", true), ("web", true)]);
    // The shared memory counts once.
    let placed = |guarantees: &numaward_model::Guarantees| {
        guarantees.workloads().iter().filter(|workload| !workload.placed.is_empty()).count()
    };
    assert_eq!(placed(&bench.host.assigned.lock().unwrap()), 2);
    let host = bench.host.clone();
    let source =
        move || export::AssignedResources::from_guarantees(&host.assigned.lock().unwrap(), &host.machine());
    let served = PodReporter::new(Arc::new(source), None, LatestDevices::default(), CallMetrics::default());
    let [reported] = served.pods().try_into().unwrap();
    assert_eq!((reported.cpu_ids.len(), reported.memory[0].size), (3, Bytes::gib(4).0));
    let counts: Vec<_> = reported
        .containers
        .iter()
        .map(|container| (container.name.as_str(), container.cpu_ids.len()))
        .collect();
    assert_eq!(counts, [("db", 2), ("log", 0), ("web", 0)]);

    for spec in [&web, &log, &db] {
        bench.remove(spec).await;
    }
    assert_eq!(
        daemon.reconciler.allocations().shared_cpus.parse::<CpuSet>().unwrap().len(),
        59,
        "the pod has its guarantee until it ends"
    );
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
}

/// Starts containers that use all CPUs, and one, the last, that does not fit.
fn run_until_full(bench: &NriBench) -> Vec<(PodSpec, ContainerSpec)> {
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
async fn unanswered_creation_is_confined() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let running = run_until_full(&bench);
    let daemon = bench.start().await;
    until("the four have guarantees", || daemon.reconciler.allocations().allocations.len() == 4).await;
    let unanswered = |name: &str, cpus: &str| {
        let pod = bench.spec(name, "", &[]);
        let spec = ContainerSpec { cpus: cpus.to_owned(), ..container(&pod, name, 2, Bytes::gib(1)) };
        bench.runtime.add_running(&pod, &spec);
        bench.cgroup(&path_of(&spec));
        spec
    };
    let (own, foreign) = (unanswered("own", ""), unanswered("foreign", "40-41"));
    for spec in [&own, &foreign] {
        bench.runtime.start_container(&spec.id).await.unwrap();
    }
    until("the container is confined", || bench.cpus(&own) == "0".parse().unwrap()).await;
    bench.await_update(&own).await;

    let (pod, freed) = &running[2];
    let freed_cpus = bench.cpus(freed);
    bench.remove(freed).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    until("the container is pinned", || bench.cpus(&own).len() == 2).await;
    assert!(bench.cpus(&own).is_subset(&freed_cpus));
    assert_eq!(bench.cpus(&foreign), CpuSet::new(), "another plugin has pinned it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pins_late_when_resources_are_free() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let running = run_until_full(&bench);
    let daemon = bench.start().await;
    let names = || daemon.reconciler.allocations().allocations.len();
    until("the four have guarantees", || names() == 4).await;
    assert_eq!(daemon.figures.unpinned_for("does_not_fit"), 1);
    let late = &running[4].1;
    until("the late container is confined", || bench.cpus(late) == "0".parse().unwrap()).await;
    let unplaced = || daemon.reconciler.unplaced().into_iter().map(|pod| pod.uid).collect::<Vec<_>>();
    until("only this pod is unplaced", || unplaced() == [running[4].0.uid.clone()]).await;

    let (pod, freed) = &running[2];
    let freed_cpus = bench.cpus(freed);
    bench.remove(freed).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    until("the late container is pinned", || bench.cpus(late).len() == 4).await;
    until("none is unplaced", || unplaced().is_empty()).await;
    assert!(bench.cpus(late).is_subset(&freed_cpus));
    bench.await_update(late).await;
    assert_eq!(names(), 4);
    assert_eq!(daemon.figures.unpinned_for("does_not_fit"), 1);

    // The late container keeps its CPUs after a restart.
    daemon.stop(&bench.runtime).await;
    let daemon = bench.start().await;
    until("all have guarantees again", || daemon.reconciler.allocations().allocations.len() == 4).await;
    assert_eq!(bench.cpus(late).len(), 4);
    assert_eq!(daemon.figures.unpinned_for("does_not_fit"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_remembers_unplaced() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let running = run_until_full(&bench);
    let daemon = bench.start().await;
    until("the four have guarantees", || daemon.reconciler.allocations().allocations.len() == 4).await;
    daemon.stop(&bench.runtime).await;
    let (pod, freed) = &running[1];
    bench.remove(freed).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    let daemon = bench.start().await;
    until("the late container is pinned", || bench.cpus(&running[4].1).len() == 4).await;
    assert_eq!(daemon.figures.unpinned_for("does_not_fit"), 0, "it was counted before the restart");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn released_memory_covers_lost_memory() {
    let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
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
    bench.host = Arc::new(TestHost::new(smaller));
    let daemon = bench.start().await;
    let of_node = || daemon.reconciler.allocations().nodes[0].memory[0].clone();
    let short_of_memory =
        || daemon.reconciler.allocations().allocations.iter().filter(|held| held.missing.is_some()).count();
    until("both have guarantees", || daemon.reconciler.allocations().allocations.len() == 2).await;
    assert_eq!((short_of_memory(), of_node().guaranteed_bytes >> 30, of_node().free_bytes), (1, 50, 0));
    let (pod, spec) = &running[0];
    bench.remove(spec).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    until("the other pod has all of its memory again", || short_of_memory() == 0).await;
    assert_eq!((of_node().guaranteed_bytes >> 30, of_node().free_bytes >> 30), (20, 20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keeps_imported_kubelet_guarantees() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    // The ledger is as after `numaward import-kubelet-state`.
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
    until("the container has a guarantee", || !daemon.reconciler.allocations().allocations.is_empty()).await;
    assert_eq!(bench.cpus(&db), "7-9".parse().unwrap());
    let held = daemon.reconciler.allocations();
    let [held] = held.allocations.as_slice() else { panic!("{held:?}") };
    assert_eq!(
        (held.name.as_str(), held.cpus.as_str(), held.nodes.as_str()),
        ("default/pod-runs/db", "7-9", "0")
    );
    let notes = &held.explanation.as_ref().unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("from the state of the kubelet")), "{notes:?}");
    // The guarantee of the ended pod is released.
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-6,10-63");
    assert_eq!(daemon.figures.unpinned_for("away"), 0, "the kubelet had pinned it");
    bench.remove(&db).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
}

/// A kubelet that has assigned a device on node 2 to a container.
struct DeviceOnNode2;

impl AssignmentSource for DeviceOnNode2 {
    fn pods(&self) -> Vec<AssignedPodResources> {
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
        vec![AssignedPodResources {
            name: "pod-nic".to_owned(),
            namespace: "default".to_owned(),
            containers: vec![container],
            ..AssignedPodResources::default()
        }]
    }

    fn allocatable(&self) -> AllocatableResponse {
        AllocatableResponse::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn assigned_devices_are_topology_hints() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let socket = bench.dir.path().join("kubelet.sock");
    bench.config.kubernetes = Kubernetes {
        kubelet: numaward_config::cluster::Kubelet {
            pod_resources_socket: Some("/kubelet.sock".into()),
            ..Default::default()
        },
        ..Kubernetes::default()
    };
    // Without hints, this strategy starts at node 0; the native one would prefer a node that is in use.
    bench.config.strategy = StrategyKind::Kubelet;
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(serve(listener, Arc::new(DeviceOnNode2), CancellationToken::new()));
    let daemon = bench.start().await;
    let containers = || vec![ContainerRequest::guaranteed("db", resources("2", "1Gi"))];
    for uid in ["nic", "other", "late"] {
        known.add_pod(uid, containers(), None);
    }
    let place = async |uid: &str| {
        let pod = bench.pod(uid, "", &[]).await.unwrap();
        let db = container(&pod, "db", 2, Bytes::gib(1));
        bench.run(&db).await.unwrap();
        bench.mems(&db)
    };
    assert_eq!(place("nic").await, "2");
    assert_eq!(place("other").await, "0");
    // A stopped kubelet delays no pod.
    server.abort();
    fs::remove_file(&socket).unwrap();
    assert_eq!(place("late").await, "0");
    assert_eq!(daemon.reconciler.allocations().allocations.len(), 3);
}
