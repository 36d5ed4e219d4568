//! Beside a kubelet that pins containers itself, on a directory that looks like a host: its promises are followed, its
//! containers named, and both are reported to others.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use numaward_api::{Allocation, EventFilter, EventKind, Target};
use numaward_config::{
    Config, Interval, OperatingMode,
    guard::GuardMode,
    policy::{KubeletVersion, StrategyKind},
};
use numaward_daemon::kubernetes::{
    cluster::{Cluster, ClusterMetrics},
    kubelet::{self, Policies, view::LastRead},
};
use numaward_engine::{
    MemoryBlock,
    checkpoint::{CpuCheckpoint, MemoryCheckpoint},
    ledger::{KindAccount, NodeAccount},
};
use numaward_guarantee::reconciler::View;
use numaward_kube::{
    api::fake::FakeApiServer,
    pod_resources::{
        AssignmentSource, Client,
        messages::{
            AllocatableResponse, ContainerDevices, ContainerMemory, ContainerResources, PodResources, cpu_set,
        },
        serve,
    },
};
use numaward_model::{
    health::{Heartbeats, Readiness},
    port::ContainerNames as _,
    snapshot::SnapshotSource as _,
};
use numaward_observe::{CgroupSource, Latches, Observer, spawn};
use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, ZoneKind};
use serde_json::json;
use tokio_util::sync::{CancellationToken, DropGuard};

const GIB: u64 = 1 << 30;
const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // As the kubelet does: by renaming.
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(&new, path).unwrap();
}

async fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = async {
        loop {
            if let Some(found) = look() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), until)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"))
}

/// Two nodes with two CPUs each, a kubelet, and cgroups.
struct Host {
    root: tempfile::TempDir,
    cgroups: tempfile::TempDir,
    config: Config,
}

impl Host {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys/devices/system");
        write(&sys.join("cpu/online"), "0-3\n");
        write(&sys.join("node/online"), "0-1\n");
        for (node, cpus) in [(0, "0-1"), (1, "2-3")] {
            let dir = sys.join(format!("node/node{node}"));
            write(&dir.join("cpulist"), &format!("{cpus}\n"));
            write(&dir.join("distance"), if node == 0 { "10 21\n" } else { "21 10\n" });
            let kib = 4 << 20;
            write(
                &dir.join("meminfo"),
                &format!("Node {node} MemTotal: {kib} kB\nNode {node} MemFree: {kib} kB\n"),
            );
        }
        let mut config = Config { host_root: root.path().to_owned(), ..Config::default() };
        config.probes.allocation.enabled = false;
        config.kubernetes.node_resource_topology.interval = Interval(Duration::from_millis(1));
        Self { root, cgroups: tempfile::tempdir().unwrap(), config }
    }

    fn kubelet(&self) -> PathBuf {
        self.root.path().join("var/lib/kubelet")
    }

    /// Promises CPUs and a gibibyte on nodes, by the UID of the pod; all containers are called `main`.
    fn promise(&self, pods: &[(&str, &str, &str)]) {
        let taken: CpuSet = pods
            .iter()
            .flat_map(|(_, cpus, _)| cpus.parse::<CpuSet>().unwrap().iter().collect::<Vec<_>>())
            .collect();
        let shared = "0-3".parse::<CpuSet>().unwrap().iter().filter(|&cpu| !taken.contains(cpu)).collect();
        let cpus = pods
            .iter()
            .filter(|(_, cpus, _)| !cpus.is_empty())
            .map(|(uid, cpus, _)| ((*uid).into(), BTreeMap::from([("main".into(), cpus.parse().unwrap())])));
        let cpus = CpuCheckpoint {
            policy: "static".to_owned(),
            shared_pool: shared,
            entries: cpus.collect(),
            pods: None,
        };
        let node = |id: u32| {
            let promised = pods.iter().filter(|(_, _, nodes)| *nodes == id.to_string()).count() as u64 * GIB;
            let account = KindAccount {
                total: Bytes(4 * GIB),
                reserved: Bytes(GIB),
                allocatable: Bytes(3 * GIB),
                guaranteed: Bytes(promised),
                free: Bytes(3 * GIB - promised),
            };
            let kinds = BTreeMap::from([(ZoneKind::Memory, account)]);
            (NodeId(id), NodeAccount { assignments: 0, group: [NodeId(id)].into_iter().collect(), kinds })
        };
        let entries = pods.iter().map(|(uid, _, nodes)| {
            let block =
                MemoryBlock { kind: ZoneKind::Memory, affinity: nodes.parse().unwrap(), bytes: Bytes(GIB) };
            ((*uid).into(), BTreeMap::from([("main".into(), vec![block])]))
        });
        let memory = MemoryCheckpoint {
            policy: "Static".to_owned(),
            nodes: [0, 1].map(node).into(),
            entries: entries.collect(),
            pods: None,
        };
        write(&self.kubelet().join(CpuCheckpoint::FILE), &cpus.write().unwrap());
        write(&self.kubelet().join(MemoryCheckpoint::FILE), &memory.write().unwrap());
    }

    fn container(&self, path: &str) {
        fs::create_dir_all(self.cgroups.path().join(path)).unwrap();
    }

    /// Starts to follow, and what is configured.
    fn start(&self) -> Run {
        let config = &self.config;
        let policies = Policies::read(&config.host_root, &config.kubernetes.kubelet.directory);
        assert_eq!(kubelet::mode(config, &policies), Ok(OperatingMode::Observe));
        let observer = Arc::new(Observer::new(config));
        let (mut readiness, stop) = (Readiness::default(), CancellationToken::new());
        let source = CgroupSource::Directory(self.cgroups.path().into());
        spawn(&observer, source, Latches::new(&mut readiness), &Heartbeats::default(), &stop).unwrap();
        let cluster =
            Cluster::prepare(config, OperatingMode::Observe, policies, &observer, ClusterMetrics::default())
                .unwrap();
        let last = LastRead::default();
        let follow =
            kubelet::follow(config.clone(), observer.clone(), cluster.pods(), last.clone(), stop.clone());
        tokio::spawn(follow);
        let view = last.clone().view(observer.clone());
        cluster.start(Some(last.source(observer.clone())), &stop);
        Run { observer, view, _stop: stop.drop_guard() }
    }
}

struct Run {
    observer: Arc<Observer>,
    view: View,
    _stop: DropGuard,
}

impl Run {
    fn of(&self, uid: &str) -> Option<Arc<Allocation>> {
        let is_asked = |allocation: &&Arc<Allocation>| match &allocation.target {
            Target::Container(container) => container.pod_uid == uid,
            _ => false,
        };
        (self.view)().allocations.iter().find(is_asked).cloned()
    }

    fn degraded(&self, part: &str) -> Option<String> {
        let found = self.observer.status().degraded.into_iter().find(|degraded| degraded.part == part);
        found.map(|degraded| degraded.reason)
    }

    fn workloads(&self) -> Vec<(String, Option<String>)> {
        let workloads = self.observer.workloads().workloads;
        workloads.into_iter().map(|workload| (workload.workload, workload.cgroup)).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn promises_are_followed_as_the_kubelet_makes_and_ends_them() {
    let host = Host::new();
    host.promise(&[("u1", "2", "1")]);
    host.container(&format!("kubepods/podu1/{ID}"));
    let run = host.start();
    let found = wait("the first", || run.of("u1").filter(|of| !of.cgroup.is_empty())).await;
    assert_eq!((found.cpus.as_str(), found.nodes.as_str()), ("2", "1"));
    assert_eq!(found.cgroup, format!("/kubepods/podu1/{ID}"));
    assert_eq!(found.name, "u1/main", "nobody knows its name");

    host.promise(&[("u1", "2", "1"), ("u2", "1", "0")]);
    wait("the second", || run.of("u2")).await;
    assert!(run.of("u2").unwrap().cgroup.is_empty(), "it does not run yet");
    host.container(&format!("kubepods.slice/kubepods-podu2.slice/cri-containerd-{ID}.scope"));
    wait("its cgroup", || run.of("u2").filter(|of| of.cgroup.contains(".scope"))).await;
    // What is served as metrics.
    let promised = || run.observer.snapshot().promises;
    let exclusive = wait("the metrics", || {
        let exclusive = promised().exclusive_cpus;
        (exclusive.iter().map(|(_, count)| count).sum::<u64>() == 2).then_some(exclusive)
    })
    .await;
    assert_eq!(exclusive, [(NodeId(0), 1), (NodeId(1), 1)]);
    let kinds: Vec<_> = promised().kinds.iter().map(|of| of.promised).collect();
    assert_eq!(kinds, [Bytes(GIB), Bytes(GIB)]);

    // Damage is reported, and nothing is forgotten.
    let path = host.kubelet().join(MemoryCheckpoint::FILE);
    let good = fs::read_to_string(&path).unwrap();
    write(&path, &good.replace("Static", "Statik"));
    let problem = wait("the problem", || run.degraded("kubelet")).await;
    assert!(problem.contains("memory_manager_state") && problem.contains("corrupted"), "{problem}");
    assert!(run.of("u1").is_some() && run.of("u2").is_some());
    write(&path, &good);
    wait("the repair", || run.degraded("kubelet").is_none().then_some(())).await;

    host.promise(&[("u2", "1", "0")]);
    wait("the end", || run.of("u1").is_none().then_some(())).await;
    fs::remove_dir_all(host.kubelet()).unwrap();
    wait("the end of all", || (run.view)().allocations.is_empty().then_some(())).await;
    // The directory is another one now.
    host.promise(&[("u3", "3", "1")]);
    wait("the kubelet's return", || run.of("u3")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_may_not_keep_what_the_kubelet_promised_is_reported_and_nothing_is_written() {
    let mut host = Host::new();
    host.config.guard = GuardMode::Act;
    host.promise(&[("u1", "2", "1")]);
    let (cgroup, hog) = (format!("kubepods/podu1/{ID}"), "hog");
    for (path, stat) in [(cgroup.as_str(), "anon N0=0 N1=268435456\n"), (hog, "anon N0=0 N1=3221225472\n")] {
        host.container(path);
        write(&host.cgroups.path().join(path).join("memory.numa_stat"), stat);
        write(&host.cgroups.path().join(path).join("cpuset.mems"), "\n");
    }
    let kib = 4 << 20;
    let meminfo = format!("Node 1 MemTotal: {kib} kB\nNode 1 MemFree: {} kB\n", 512 << 10);
    write(&host.root.path().join("sys/devices/system/node/node1/meminfo"), &meminfo);
    let run = host.start();
    let found = wait("the headroom", || run.observer.status().headroom.into_iter().find(|of| of.low)).await;
    assert_eq!((found.node, found.obtainable_bytes, found.unused_bytes), (1, GIB / 2, GIB * 3 / 4));
    let page = run.observer.events().page(&EventFilter { limit: 100, ..EventFilter::default() });
    let low = page.events.iter().find(|event| event.kind == EventKind::HeadroomLow).unwrap();
    assert!(low.message.starts_with("Node 1 does not have what is promised on it"), "{low:?}");
    let headroom = wait("the metrics", || {
        let of_node = |(node, _, bytes): &(NodeId, ZoneKind, i64)| (*node == NodeId(1)).then_some(*bytes);
        let headroom = run.observer.snapshot().promises.headroom.iter().find_map(of_node)?;
        (headroom != i64::try_from(GIB).map(|gib| -gib / 2).unwrap()).then_some(headroom)
    })
    .await;
    assert_eq!(headroom, -(1 << 28), "less what the workload has");
    let mems = fs::read_to_string(host.cgroups.path().join("hog/cpuset.mems")).unwrap();
    assert_eq!(mems, "\n", "nobody is kept off");
}

/// A kubelet that reports what it assigned, by the names of pods.
struct Assignments;

impl AssignmentSource for Assignments {
    fn pods(&self) -> Vec<PodResources> {
        let container = ContainerResources {
            name: "main".to_owned(),
            devices: vec![ContainerDevices {
                resource_name: "vendor.example/nic".to_owned(),
                device_ids: vec!["7".to_owned()],
                topology: None,
            }],
            cpu_ids: vec![2],
            memory: vec![ContainerMemory::new("memory", Bytes(GIB), &"1".parse().unwrap())],
        };
        let (name, namespace) = ("db".to_owned(), "prod".to_owned());
        vec![PodResources { name, namespace, containers: vec![container], ..PodResources::default() }]
    }

    fn allocatable(&self) -> AllocatableResponse {
        AllocatableResponse {
            devices: self.pods()[0].containers[0].devices.clone(),
            // CPU 0 is reserved.
            cpu_ids: vec![1, 2, 3],
            memory: Vec::new(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kubelet_itself_tells_the_names_and_a_client_lists_what_status_says() {
    let mut host = Host::new();
    host.promise(&[("u1", "2", "1"), ("u2", "", "0")]);
    host.container(&format!("kubepods/podu1/{ID}"));
    let kubelet = host.kubelet().join("pod-resources/kubelet.sock");
    fs::create_dir_all(kubelet.parent().unwrap()).unwrap();
    let listener = tokio::net::UnixListener::bind(&kubelet).unwrap();
    let _server = tokio::spawn(serve(listener, Arc::new(Assignments), CancellationToken::new()));
    let socket = host.root.path().join("pod-resources.sock");
    host.config.kubernetes.pod_resources.socket = Some(socket.clone());
    let run = host.start();
    wait("the name", || run.of("u1").filter(|of| of.name == "prod/db/main")).await;
    let cgroup = format!("/kubepods/podu1/{ID}");
    wait("its own series", || {
        run.workloads().contains(&("prod/db".into(), Some(cgroup.clone()))).then_some(())
    })
    .await;

    let client = Client::connect(&socket).await.unwrap();
    let devices = async {
        loop {
            let listed = client.list().await.unwrap();
            if listed.first().is_some_and(|pod| !pod.containers[0].devices.is_empty()) {
                return listed;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let listed = tokio::time::timeout(Duration::from_mins(1), devices).await.unwrap();
    // The pod whose name nobody knows is not listed: a reader could not look it up.
    let [pod] = listed.as_slice() else { panic!("{listed:#?}") };
    assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("prod", "db"));
    let container = &pod.containers[0];
    let status = run.of("u1").unwrap();
    assert_eq!(cpu_set(&container.cpu_ids).to_string(), status.cpus);
    let nodes: NodeSet =
        container.memory.iter().flat_map(|of| of.nodes().iter().collect::<Vec<_>>()).collect();
    assert_eq!(nodes.to_string(), status.nodes);
    assert_eq!(container.devices[0].device_ids, ["7"]);
    assert_eq!(client.get("prod", "db").await.unwrap().as_ref(), Some(pod));

    let allocatable = client.allocatable().await.unwrap();
    assert_eq!(cpu_set(&allocatable.cpu_ids).to_string(), "1-3");
    // Both containers of the pod have what their pod has, as it is not known which is which.
    host.container(&format!("kubepods/podu1/{}", "a".repeat(64)));
    let promised = || run.observer.snapshot().promises;
    wait("both containers", || (run.observer.guarantees().workloads().len() == 2).then_some(())).await;
    let exclusive: u64 = promised().exclusive_cpus.iter().map(|(_, cpus)| cpus).sum();
    assert_eq!((exclusive, promised().shared_pool_cpus, promised().free_cpus), (1, Some(3), 2));
    let memory: Vec<_> = allocatable
        .memory
        .iter()
        .map(|of| (of.memory_type.as_str(), of.nodes().to_string(), of.size))
        .collect();
    assert_eq!(memory, [("memory", "0".to_owned(), 3 * GIB), ("memory", "1".to_owned(), 3 * GIB)]);
    assert_eq!(allocatable.devices[0].resource_name, "vendor.example/nic");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_tells_who_is_who_and_the_scheduler_is_told_what_is_free() {
    let server = FakeApiServer::start().await.unwrap();
    let pod = |name: &str, uid: &str, id: &str| {
        json!({"metadata": {"name": name, "namespace": "prod", "uid": uid},
            "spec": {"nodeName": "n1", "containers": [{"name": "main"}]},
            "status": {"phase": "Running",
                "containerStatuses": [{"name": "main", "containerID": format!("containerd://{id}")}]}})
    };
    server.put_pod(pod("db", "u1", ID));
    let mut host = Host::new();
    write(
        &host.kubelet().join("config.yaml"),
        "cpuManagerPolicy: static\nmemoryManagerPolicy: Static\ntopologyManagerPolicy: single-numa-node\n",
    );
    host.promise(&[("u1", "2", "1")]);
    host.container(&format!("kubepods/podu1/{ID}"));
    let kubeconfig = host.root.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    host.config.kubernetes.node_name = Some("n1".to_owned());
    host.config.kubernetes.kubeconfig = Some(kubeconfig);
    host.config.kubernetes.node_resource_topology.enabled = true;
    let run = host.start();
    let series = ("prod/db/main".to_owned(), Some(format!("/kubepods/podu1/{ID}")));
    wait("the name of the container", || run.workloads().contains(&series).then_some(())).await;

    let available = |server: &FakeApiServer| {
        let topology = server.topology("n1")?;
        Some(["0", "1"].map(|node| {
            let zones = topology["zones"].as_array().unwrap();
            let zone = zones.iter().find(|zone| zone["name"] == format!("node-{node}")).unwrap();
            let resources = zone["resources"].as_array().unwrap();
            resources.iter().map(|of| of["available"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        }))
    };
    let expected = [vec!["2".to_owned(), (3 * GIB).to_string()], vec!["1".to_owned(), (2 * GIB).to_string()]];
    wait("the topology", || (available(&server)? == expected).then_some(())).await;
    let attribute = |name: &str| {
        let topology = server.topology("n1")?;
        let attributes = topology["attributes"].as_array()?.clone();
        attributes.iter().find(|attribute| attribute["name"] == name).map(|found| found["value"].clone())
    };
    assert_eq!(attribute("topologyManagerPolicy"), Some(json!("single-numa-node")));
    let one = wait("the fingerprint", || attribute("nodeTopologyPodsFingerprint")).await;
    // The pod is gone from the state files and from the API server: all is free again.
    server.delete_pod("prod", "db");
    host.promise(&[]);
    let expected = [2, 2].map(|cpus: u64| vec![cpus.to_string(), (3 * GIB).to_string()]);
    wait("the freed node", || {
        let is_new = attribute("nodeTopologyPodsFingerprint").is_some_and(|fingerprint| fingerprint != one);
        (available(&server)? == expected && is_new).then_some(())
    })
    .await;
    assert_eq!(run.degraded("kubernetes_api"), None);
    assert_eq!(run.degraded("node_resource_topology"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn containers_are_served_under_their_names_where_numaward_places_them() {
    let other = "f".repeat(64);
    let server = FakeApiServer::start().await.unwrap();
    server.put_pod(json!({"metadata": {"name": "db", "namespace": "prod", "uid": "u1"},
        "spec": {"nodeName": "n1", "containers": [{"name": "main"}]},
        "status": {"phase": "Running",
            "containerStatuses": [{"name": "main", "containerID": format!("containerd://{ID}")}]}}));
    let mut host = Host::new();
    host.container(&format!("kubepods/podu1/{ID}"));
    host.container(&format!("kubepods/podu2/{other}"));
    let kubeconfig = host.root.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    host.config.kubernetes.node_name = Some("n1".to_owned());
    host.config.kubernetes.kubeconfig = Some(kubeconfig);
    let observer = Arc::new(Observer::new(&host.config));
    let (mut readiness, stop) = (Readiness::default(), CancellationToken::new());
    let source = CgroupSource::Directory(host.cgroups.path().into());
    spawn(&observer, source, Latches::new(&mut readiness), &Heartbeats::default(), &stop).unwrap();
    let names = || {
        let workloads = observer.workloads().workloads;
        workloads.into_iter().map(|of| (of.workload, of.cgroup)).collect::<BTreeMap<_, _>>()
    };
    let cgroup = |uid: &str, id: &str| Some(format!("/kubepods/pod{uid}/{id}"));
    wait("both, without names", || names().contains_key("pods").then_some(())).await;

    // Without NRI the API server names them.
    let cluster = Cluster::prepare(
        &host.config,
        OperatingMode::Enforce,
        Policies::default(),
        &observer,
        ClusterMetrics::default(),
    );
    cluster.unwrap().start(None, &stop);
    wait("the name", || (names().get("prod/db/main") == Some(&cgroup("u1", ID))).then_some(())).await;
    assert_eq!(names().get("pods"), Some(&cgroup("u2", &other)));
    stop.cancel();

    // With it, the runtime does; who is not there any more is forgotten, and served as long as its cgroup is.
    observer.update_containers(vec![(other.clone(), "prod/web/main".to_owned())], true);
    assert_eq!(names().get("prod/web/main"), Some(&cgroup("u2", &other)));
    assert!(names().contains_key("prod/db/main"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_for_the_cluster_is_told() {
    let mut host = Host::new();
    host.promise(&[]);
    host.config.kubernetes.node_resource_topology.enabled = true;
    let run = host.start();
    let reason = wait("the reason", || run.degraded("node_resource_topology")).await;
    assert!(reason.contains("kubernetes.nodeName"), "{reason}");

    host.config.kubernetes.node_name = Some("n1".to_owned());
    host.config.kubernetes.kubeconfig = Some("/nonexistent/kubeconfig".into());
    let run = host.start();
    let reason = wait("the reason", || run.degraded("kubernetes_api")).await;
    assert!(reason.contains("/nonexistent/kubeconfig"), "{reason}");

    // Somebody else's socket is left alone.
    let socket = host.root.path().join("taken.sock");
    let _taken = UnixListener::bind(&socket).unwrap();
    host.config.kubernetes.pod_resources.socket = Some(socket);
    let policies = Policies::default();
    let refused = Cluster::prepare(
        &host.config,
        OperatingMode::Observe,
        policies,
        &run.observer,
        ClusterMetrics::default(),
    );
    let refused = refused.err().unwrap().to_string();
    assert!(
        refused.contains("taken.sock") && refused.contains("kubernetes.podResources.socket"),
        "{refused}"
    );
}

/// Without a version in the configuration, that of the node counts, for who repeats the kubelet's decisions.
#[tokio::test(flavor = "multi_thread")]
async fn the_node_says_which_kubelet_it_has() {
    use KubeletVersion::{V1_32, V1_36};
    let server = FakeApiServer::start().await.unwrap();
    server.put_node("old", "u1", "v1.32.10");
    server.put_node("new", "u2", "v1.35.0+k3s1");
    server.put_node("odd", "u3", "unknown");
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    let config = |node: &str, strategy, kubelet_version| {
        let mut config = Config { strategy, kubelet_version, ..Config::default() };
        config.kubernetes.node_name = Some(node.to_owned());
        config.kubernetes.kubeconfig = Some(kubeconfig.clone());
        config
    };
    for (node, configured, version) in [
        ("old", None, Some(V1_32)),
        ("new", None, Some(V1_36)),
        ("old", Some(V1_36), Some(V1_36)),
        ("odd", None, None),
        ("gone", None, None),
    ] {
        let found = kubelet::with_version(&config(node, StrategyKind::Kubelet, configured)).await;
        assert_eq!(found.kubelet_version, version, "{node}");
    }
    let asked = server.requests().len();
    let native = config("old", StrategyKind::Native, None);
    assert_eq!(kubelet::with_version(&native).await, native);
    let nowhere = Config { strategy: StrategyKind::Kubelet, ..Config::default() };
    assert_eq!(kubelet::with_version(&nowhere).await, nowhere);
    assert_eq!(server.requests().len(), asked);
}
