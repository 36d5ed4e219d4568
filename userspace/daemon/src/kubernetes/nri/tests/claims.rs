//! Devices of resource claims: pods get CPUs and memory on the nodes of their devices.

use numaward_config::kubernetes::Kubernetes;
use numaward_engine::Quantity;
use numaward_guarantee::claim::{ReservedClaim, ReservedPart};
use numaward_kube::{
    api::{self, ApiMetrics, fake::FakeApiServer},
    pod::ClaimUse,
    pod_resources::{
        AssignmentSource,
        messages::{
            AllocatableResponse, AssignedPodResources, ClaimResource, ContainerResources, DynamicResource,
        },
        serve,
    },
};
use numaward_topology::NodeId;
use serde_json::{Value, json};

use super::*;

/// A kubelet with the same devices for container `db` of each pod.
struct Kubelet(Vec<ClaimResource>, Vec<&'static str>);

impl AssignmentSource for Kubelet {
    fn pods(&self) -> Vec<AssignedPodResources> {
        let claim = DynamicResource { claim_resources: self.0.clone(), ..DynamicResource::default() };
        let container = ContainerResources {
            name: "db".to_owned(),
            dynamic_resources: vec![claim],
            ..ContainerResources::default()
        };
        let pod = |name: &&str| AssignedPodResources {
            name: format!("pod-{name}"),
            namespace: "default".to_owned(),
            containers: vec![container.clone()],
            ..AssignedPodResources::default()
        };
        self.1.iter().map(pod).collect()
    }

    fn allocatable(&self) -> AllocatableResponse {
        AllocatableResponse::default()
    }
}

fn claimed(device: &str, cdi_devices: &[&str]) -> ClaimResource {
    ClaimResource {
        cdi_devices: cdi_devices.iter().map(|&name| name.to_owned()).collect(),
        driver_name: "gpu.example".to_owned(),
        pool_name: "n1".to_owned(),
        device_name: device.to_owned(),
    }
}

/// Returns a host without a preference of the strategy for a node in use.
fn bench(pods: Arc<dyn PodSource>, runtime: impl FnOnce(Online) -> fake::FakeRuntimeConfig) -> NriBench {
    let mut bench = NriBench::new(pods, runtime);
    bench.config.kubernetes = Kubernetes {
        kubelet: numaward_config::cluster::Kubelet {
            pod_resources_socket: Some("/kubelet.sock".into()),
            ..Default::default()
        },
        ..Kubernetes::default()
    };
    bench.config.strategy = StrategyKind::Kubelet;
    bench
}

/// Connects the reader of claims to an API server with one slice, and devices on the nodes 1 and 3.
async fn connect(bench: &NriBench) -> FakeApiServer {
    let server = FakeApiServer::start().await.unwrap();
    let path = bench.dir.path().join("kubeconfig");
    fs::write(&path, server.kubeconfig()).unwrap();
    let client = api::connect(Some(&path)).await.unwrap();
    bench.claims.connect(client, "n1".to_owned(), ApiMetrics::default());
    server.put_slice(json!({"metadata": {"name": "n1-gpu"}, "spec": {
        "driver": "gpu.example", "nodeName": "n1", "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        "devices": [
            {"name": "on-1", "attributes": {"resource.kubernetes.io/numaNode": {"int": 1}}},
            {"name": "on-3", "attributes": {"resource.kubernetes.io/pcieRoot": {"string": "pci0000:80"}}},
            {"name": "plain", "attributes": {"model": {"string": "A1"}}}]}}));
    let device = bench.dir.path().join("sys/devices/pci0000:80/0000:80:01.0");
    fs::create_dir_all(&device).unwrap();
    fs::write(device.join("numa_node"), "3\n").unwrap();
    server
}

fn put_claim(server: &FakeApiServer, name: &str, device: &Value) {
    server.put_claim(
        json!({"metadata": {"name": format!("claim-{name}"), "namespace": "default"}, "status": {
        "reservedFor": [{"resource": "pods", "name": format!("pod-{name}"), "uid": name}],
        "allocation": {"devices": {"results": [
            {"request": "gpu", "driver": "gpu.example", "pool": "n1", "device": device}]}}}}),
    );
}

fn container_request() -> ContainerRequest {
    let amounts = Resources::none().with_cpu("2".parse().unwrap()).with_memory("1Gi".parse().unwrap());
    ContainerRequest::guaranteed("db", amounts)
}

impl FakePods {
    /// Adds a pod whose container `db` uses the claim with the name of the pod.
    fn add_pod_with_claim(&self, uid: &str) {
        self.add_pod_with(uid, &format!("claim-{uid}"));
    }

    /// Adds a pod whose container `db` uses a claim.
    fn add_pod_with(&self, uid: &str, claim: &str) {
        let id = PodId { namespace: "default".to_owned(), name: format!("pod-{uid}"), uid: uid.to_owned() };
        let used = ClaimUse { container: "db".to_owned(), claim: claim.to_owned(), request: None };
        let pod = pod::Pod {
            id,
            api_uid: uid.to_owned(),
            containers: vec![container_request()],
            claims: vec![used],
            ..pod::Pod::default()
        };
        self.pods.lock().unwrap().insert(uid.to_owned(), Arc::new(pod));
    }
}

/// Runs a pod with 2 CPUs and 1 GiB. Returns the nodes of its memory and CPUs.
async fn place(bench: &NriBench, uid: &str, cdi_devices: &[&str]) -> [String; 2] {
    let pod = bench.pod(uid, "", &[]).await.unwrap();
    let cdi_devices = cdi_devices.iter().map(|&name| name.to_owned()).collect();
    let db = ContainerSpec { cdi_devices, ..container(&pod, "db", 2, Bytes::gib(1)) };
    bench.run(&db).await.unwrap();
    let nodes: BTreeSet<u32> = bench.cpus(&db).iter().map(|cpu| cpu.0 / 16).collect();
    let [node] = nodes.into_iter().collect::<Vec<_>>()[..] else { panic!("CPUs {}", bench.cpus(&db)) };
    [bench.mems(&db), node.to_string()]
}

/// Returns the notes in the explanation of a pod's guarantee.
fn notes(daemon: &NriDaemon, uid: &str) -> Vec<String> {
    let held = daemon.reconciler.allocations();
    let name = format!("default/pod-{uid}/db");
    let found = held.allocations.iter().find(|held| held.name == name).unwrap();
    found.explanation.clone().unwrap().notes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claimed_devices_are_topology_hints() {
    let known = Arc::new(FakePods::default());
    let bench = bench(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let server = connect(&bench).await;
    let daemon = bench.start().await;
    for (uid, device) in [("one", "on-1"), ("three", "on-3"), ("plain", "plain"), ("missing", "gone")] {
        known.add_pod_with_claim(uid);
        put_claim(&server, uid, &json!(device));
    }
    for (uid, node) in [("one", "1"), ("three", "3"), ("plain", "0"), ("missing", "0")] {
        assert_eq!(place(&bench, uid, &[]).await, [node; 2], "{uid}");
        let is_noted =
            notes(&daemon, uid).iter().any(|note| note.contains("NUMA node of the device gpu.example/n1/"));
        assert_eq!(is_noted, node == "0", "{uid}: {:?}", notes(&daemon, uid));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_api_server_delays_no_pod() {
    let known = Arc::new(FakePods::default());
    let mut bench = bench(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    bench.limit_times();
    let server = connect(&bench).await;
    let daemon = bench.start().await;
    for uid in ["forbidden", "slow"] {
        known.add_pod_with_claim(uid);
        put_claim(&server, uid, &json!("on-1"));
    }
    server.refuse(Some(("resource.k8s.io", axum::http::StatusCode::FORBIDDEN)));
    assert_eq!(place(&bench, "forbidden", &[]).await, ["0", "0"]);
    server.refuse(None);
    server.delay(Duration::from_secs(10));
    assert_eq!(place(&bench, "slow", &[]).await, ["0", "0"]);
    for reason in ["late", "away"] {
        assert_eq!(daemon.figures.unpinned_for(reason), 0, "{reason}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubelet_names_claimed_devices() {
    let known = Arc::new(FakePods::default());
    let bench = bench(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let listener = tokio::net::UnixListener::bind(bench.dir.path().join("kubelet.sock")).unwrap();
    let kubelet = Kubelet(vec![claimed("on-1", &[])], vec!["named"]);
    let server = tokio::spawn(serve(listener, Arc::new(kubelet), CancellationToken::new()));
    let api_server = connect(&bench).await;
    let _daemon = bench.start().await;
    // The claim itself is not readable.
    known.add_pod_with_claim("named");
    assert_eq!(place(&bench, "named", &[]).await, ["1", "1"]);
    let requests = api_server.requests();
    assert!(requests.iter().all(|request| request.contains("resourceslices")), "{requests:?}");
    server.abort();
}

/// Without the API server, the kubelet and the runtime name the devices, and CDI files have their device files.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cdi_files_are_enough_without_api() {
    let bench = bench(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_3);
    let device = bench.dir.path().join("sys/devices/pci0000:c0/0000:c0:01.0");
    fs::create_dir_all(&device).unwrap();
    fs::write(device.join("numa_node"), "2\n").unwrap();
    let numbers = bench.dir.path().join("sys/dev/char");
    fs::create_dir_all(&numbers).unwrap();
    std::os::unix::fs::symlink(device, numbers.join("240:1")).unwrap();
    let folder = bench.dir.path().join("var/run/cdi");
    fs::create_dir_all(&folder).unwrap();
    let specification = "cdiVersion: 0.6.0\nkind: gpu.example/claim\ndevices:\n- name: u1\n  containerEdits:\n    \
                         deviceNodes: [{path: /dev/x, type: c, major: 240, minor: 1}]\n";
    fs::write(folder.join("gpu.yaml"), specification).unwrap();
    let listener = tokio::net::UnixListener::bind(bench.dir.path().join("kubelet.sock")).unwrap();
    let kubelet = Kubelet(vec![claimed("x", &["gpu.example/claim=u1"])], vec!["kubelet"]);
    let server = tokio::spawn(serve(listener, Arc::new(kubelet), CancellationToken::new()));
    let _daemon = bench.start().await;
    assert_eq!(place(&bench, "kubelet", &[]).await, ["2", "2"]);
    assert_eq!(place(&bench, "runtime", &["gpu.example/claim=u1"]).await, ["2", "2"]);
    assert_eq!(place(&bench, "none", &["gpu.example/claim=u2"]).await, ["0", "0"]);
    server.abort();
}

/// The container runtime or the API server says which container uses the claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prepared_claims_are_used() {
    let known = Arc::new(FakePods::default());
    let mut bench = bench(known.clone(), fake::FakeRuntimeConfig::containerd_2_3);
    bench.config.strategy = StrategyKind::Native;
    let daemon = bench.start().await;
    known.add_pod_with_claim("named");
    for pod in ["named", "reported"] {
        let consumed = [("cpu".into(), Quantity::whole(3)), ("memory".into(), Quantity::whole(1 << 30))];
        let claim = ReservedClaim {
            namespace: "default".to_owned(),
            name: format!("claim-{pod}"),
            pod: pod.to_owned(),
            parts: vec![ReservedPart {
                node: Some(NodeId(2)),
                consumed: consumed.into(),
                terms: numaward_engine::Terms::default(),
            }],
            pending: false,
        };
        daemon.reconciler.reserve_claim(format!("of-{pod}"), claim, None).await.unwrap();
    }
    let held = |uid: &str| {
        let (held, name) = (daemon.reconciler.allocations(), format!("default/pod-{uid}/db"));
        let found = held.allocations.iter().find(|held| held.name == name).unwrap();
        found.cpus.parse::<CpuSet>().unwrap()
    };
    let reported = "numaward.io/claim=claim-of-reported";
    for (uid, devices) in [("named", &[][..]), ("reported", &[reported])] {
        assert_eq!(place(&bench, uid, devices).await, ["2"; 2], "{uid}");
        assert_eq!(held(uid).len(), 3, "{uid}");
    }
    let stranger = ContainerSpec {
        cdi_devices: vec![reported.to_owned()],
        ..container(&bench.pod("other", "", &[]).await.unwrap(), "db", 2, Bytes::gib(1))
    };
    let refused = bench.run(&stranger).await.unwrap_err();
    assert!(refused.contains("default/claim-reported, which is prepared for another pod"), "{refused}");
    assert!((&held("named") & &held("reported")).is_empty());
    // The kubelet names the pod that it had the claim prepared for, and that has ended.
    known.add_pod_with("heir", "claim-gone");
    let part = |cpus| ReservedPart {
        node: Some(NodeId(2)),
        consumed: [("cpu".into(), Quantity::whole(cpus))].into(),
        terms: numaward_engine::Terms::default(),
    };
    let claim = ReservedClaim {
        namespace: "default".to_owned(),
        name: "claim-gone".to_owned(),
        pod: "gone".to_owned(),
        parts: vec![part(1)],
        pending: false,
    };
    daemon.reconciler.reserve_claim("of-gone".to_owned(), claim, None).await.unwrap();
    place(&bench, "heir", &["numaward.io/claim=claim-of-gone"]).await;
    assert_eq!(held("heir").len(), 1);
    let claims = daemon.reconciler.reserved_claims().await.unwrap();
    assert_eq!(claims["of-gone"].pod, "heir");
}
