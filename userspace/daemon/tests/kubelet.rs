//! Tests of the mode `observe` on a host of plain files: the guarantees of a kubelet that pins containers itself are followed, its
//! containers get names, and both are published.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::http::StatusCode;
use numaward_api::{Allocation, EventFilter, EventKind, Target};
use numaward_config::{
    Config, Interval, OperatingMode,
    cluster::KubeletAddress,
    guard::GuardMode,
    policy::{KubeletVersion, StrategyKind},
};
use numaward_daemon::kubernetes::{
    cluster::{Cluster, ClusterMetrics},
    kubelet::{self, KubeletTiming, Policies, view::LatestGuarantees},
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
            AllocatableResponse, AssignedPodResources, ContainerDevices, ContainerMemory, ContainerResources,
            cpu_set,
        },
        serve,
    },
};
use numaward_model::{
    health::{Heartbeats, Readiness},
    port::ObservedHost as _,
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
    // Like the kubelet, rename a new file over the old one.
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(&new, path).unwrap();
}

async fn wait<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let until = async {
        loop {
            if let Some(found) = find() {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), until)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"))
}

/// A host with two nodes of two CPUs each, the directory of a kubelet, and cgroups.
struct KubeletHost {
    root: tempfile::TempDir,
    cgroups: tempfile::TempDir,
    config: Config,
}

impl KubeletHost {
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
        let state_directory = root.path().join("state");
        let mut config = Config { host_root: root.path().to_owned(), state_directory, ..Config::default() };
        config.probes.allocation.enabled = false;
        config.kubernetes.node_resource_topology.interval = Interval(Duration::from_millis(1));
        Self { root, cgroups: tempfile::tempdir().unwrap(), config }
    }

    fn kubelet(&self) -> PathBuf {
        self.root.path().join("var/lib/kubelet")
    }

    /// Writes state files with guarantees of CPUs and 1 GiB on nodes, by the UID of the pod. All containers have the name `main`.
    fn guarantee(&self, pods: &[(&str, &str, &str)]) {
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
            let guaranteed =
                pods.iter().filter(|(_, _, nodes)| *nodes == id.to_string()).count() as u64 * GIB;
            let account = KindAccount {
                total: Bytes(4 * GIB),
                reserved: Bytes(GIB),
                allocatable: Bytes(3 * GIB),
                guaranteed: Bytes(guaranteed),
                free: Bytes(3 * GIB - guaranteed),
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

    /// Starts to follow the kubelet, and starts the configured tasks.
    fn start(&self) -> RunningObserver {
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
        let latest = LatestGuarantees::default();
        let follow =
            kubelet::follow(config.clone(), observer.clone(), cluster.pods(), latest.clone(), stop.clone());
        tokio::spawn(follow);
        let view = latest.clone().view(observer.clone());
        cluster.start(Some(latest.source(observer.clone())), Arc::new(|| true), &stop);
        RunningObserver { observer, view, _stop: stop.drop_guard() }
    }
}

struct RunningObserver {
    observer: Arc<Observer>,
    view: View,
    _stop: DropGuard,
}

impl RunningObserver {
    fn allocation(&self, uid: &str) -> Option<Arc<Allocation>> {
        let is_of_pod = |allocation: &&Arc<Allocation>| match &allocation.target {
            Target::Container(container) => container.pod_uid == uid,
            _ => false,
        };
        (self.view)().allocations.iter().find(is_of_pod).cloned()
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
async fn follows_kubelet_guarantees() {
    let host = KubeletHost::new();
    host.guarantee(&[("u1", "2", "1")]);
    host.container(&format!("kubepods/podu1/{ID}"));
    let run = host.start();
    let found = wait("the first", || run.allocation("u1").filter(|found| !found.cgroup.is_empty())).await;
    assert_eq!((found.cpus.as_str(), found.nodes.as_str()), ("2", "1"));
    assert_eq!(found.cgroup, format!("/kubepods/podu1/{ID}"));
    assert_eq!(found.name, "u1/main", "the name is unknown");

    host.guarantee(&[("u1", "2", "1"), ("u2", "1", "0")]);
    wait("the second", || run.allocation("u2")).await;
    assert!(run.allocation("u2").unwrap().cgroup.is_empty(), "its container does not run yet");
    host.container(&format!("kubepods.slice/kubepods-podu2.slice/cri-containerd-{ID}.scope"));
    wait("its cgroup", || run.allocation("u2").filter(|found| found.cgroup.contains(".scope"))).await;
    // The metrics.
    let guarantees = || run.observer.snapshot().guarantees;
    let exclusive = wait("the metrics", || {
        let exclusive = guarantees().exclusive_cpus;
        (exclusive.iter().map(|(_, count)| count).sum::<u64>() == 2).then_some(exclusive)
    })
    .await;
    assert_eq!(exclusive, [(NodeId(0), 1), (NodeId(1), 1)]);
    let kinds: Vec<_> = guarantees().kinds.iter().map(|kind| kind.guaranteed).collect();
    assert_eq!(kinds, [Bytes(GIB), Bytes(GIB)]);

    // A damaged file is reported, and the guarantees stay.
    let path = host.kubelet().join(MemoryCheckpoint::FILE);
    let good = fs::read_to_string(&path).unwrap();
    write(&path, &good.replace("Static", "Statik"));
    let problem = wait("the problem", || run.degraded("kubelet")).await;
    assert!(problem.contains("memory_manager_state") && problem.contains("corrupted"), "{problem}");
    assert!(run.allocation("u1").is_some() && run.allocation("u2").is_some());
    write(&path, &good);
    wait("the repair", || run.degraded("kubelet").is_none().then_some(())).await;

    host.guarantee(&[("u2", "1", "0")]);
    wait("the end", || run.allocation("u1").is_none().then_some(())).await;
    fs::remove_dir_all(host.kubelet()).unwrap();
    wait("the end of all", || (run.view)().allocations.is_empty().then_some(())).await;
    // The directory is a new one.
    host.guarantee(&[("u3", "3", "1")]);
    wait("the kubelet's return", || run.allocation("u3")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_low_headroom_without_writes() {
    let mut host = KubeletHost::new();
    host.config.guard = GuardMode::Act;
    host.guarantee(&[("u1", "2", "1")]);
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
    let found =
        wait("the headroom", || run.observer.status().headroom.into_iter().find(|headroom| headroom.low))
            .await;
    assert_eq!((found.node, found.obtainable_bytes, found.unused_bytes), (1, GIB / 2, GIB * 3 / 4));
    let page = run.observer.events().page(&EventFilter { limit: 100, ..EventFilter::default() });
    let low = page.events.iter().find(|event| event.kind == EventKind::HeadroomLow).unwrap();
    assert!(low.message.starts_with("Node 1 does not have the memory that is guaranteed on it"), "{low:?}");
    let headroom = wait("the metrics", || {
        let of_node = |(node, _, bytes): &(NodeId, ZoneKind, i64)| (*node == NodeId(1)).then_some(*bytes);
        let headroom = run.observer.snapshot().guarantees.headroom.iter().find_map(of_node)?;
        (headroom != i64::try_from(GIB).map(|gib| -gib / 2).unwrap()).then_some(headroom)
    })
    .await;
    assert_eq!(headroom, -(1 << 28), "minus the memory of the workload");
    let mems = fs::read_to_string(host.cgroups.path().join("hog/cpuset.mems")).unwrap();
    assert_eq!(mems, "\n", "no workload is confined");
}

/// A kubelet that reports assigned resources by the names of pods.
struct FakeKubelet;

impl AssignmentSource for FakeKubelet {
    fn pods(&self) -> Vec<AssignedPodResources> {
        let container = ContainerResources {
            name: "main".to_owned(),
            devices: vec![ContainerDevices {
                resource_name: "vendor.example/nic".to_owned(),
                device_ids: vec!["7".to_owned()],
                topology: None,
            }],
            cpu_ids: vec![2],
            memory: vec![ContainerMemory::new("memory", Bytes(GIB), &"1".parse().unwrap())],
            ..ContainerResources::default()
        };
        let (name, namespace) = ("db".to_owned(), "prod".to_owned());
        vec![AssignedPodResources {
            name,
            namespace,
            containers: vec![container],
            ..AssignedPodResources::default()
        }]
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
async fn names_pods_from_the_kubelet() {
    let mut host = KubeletHost::new();
    host.guarantee(&[("u1", "2", "1"), ("u2", "", "0")]);
    host.container(&format!("kubepods/podu1/{ID}"));
    let kubelet = host.kubelet().join("pod-resources/kubelet.sock");
    fs::create_dir_all(kubelet.parent().unwrap()).unwrap();
    let listener = tokio::net::UnixListener::bind(&kubelet).unwrap();
    let _server = tokio::spawn(serve(listener, Arc::new(FakeKubelet), CancellationToken::new()));
    let socket = host.root.path().join("pod-resources.sock");
    host.config.kubernetes.pod_resources.socket = Some(socket.clone());
    let run = host.start();
    wait("the name", || run.allocation("u1").filter(|allocation| allocation.name == "prod/db/main")).await;
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
    // A pod without a known name is not listed: a client could not look it up.
    let [pod] = listed.as_slice() else { panic!("{listed:#?}") };
    assert_eq!((pod.namespace.as_str(), pod.name.as_str()), ("prod", "db"));
    let container = &pod.containers[0];
    let served = run.allocation("u1").unwrap();
    assert_eq!(cpu_set(&container.cpu_ids).to_string(), served.cpus);
    let nodes: NodeSet =
        container.memory.iter().flat_map(|memory| memory.nodes().iter().collect::<Vec<_>>()).collect();
    assert_eq!(nodes.to_string(), served.nodes);
    assert_eq!(container.devices[0].device_ids, ["7"]);
    assert_eq!(client.get("prod", "db").await.unwrap().as_ref(), Some(pod));

    let allocatable = client.allocatable().await.unwrap();
    assert_eq!(cpu_set(&allocatable.cpu_ids).to_string(), "1-3");
    // The names of the two containers are unknown, so both have the guarantee of their pod.
    host.container(&format!("kubepods/podu1/{}", "a".repeat(64)));
    let guarantees = || run.observer.snapshot().guarantees;
    wait("both containers", || (run.observer.guarantees().workloads().len() == 2).then_some(())).await;
    let exclusive: u64 = guarantees().exclusive_cpus.iter().map(|(_, cpus)| cpus).sum();
    assert_eq!((exclusive, guarantees().shared_pool_cpus, guarantees().free_cpus), (1, Some(3), 2));
    let memory: Vec<_> = allocatable
        .memory
        .iter()
        .map(|memory| (memory.memory_type.as_str(), memory.nodes().to_string(), memory.size))
        .collect();
    assert_eq!(memory, [("memory", "0".to_owned(), 3 * GIB), ("memory", "1".to_owned(), 3 * GIB)]);
    assert_eq!(allocatable.devices[0].resource_name, "vendor.example/nic");
}

#[tokio::test(flavor = "multi_thread")]
async fn publishes_topology_with_api_server() {
    let server = FakeApiServer::start().await.unwrap();
    let pod = |name: &str, uid: &str, id: &str| {
        json!({"metadata": {"name": name, "namespace": "prod", "uid": uid},
            "spec": {"nodeName": "n1", "containers": [{"name": "main"}]},
            "status": {"phase": "Running",
                "containerStatuses": [{"name": "main", "containerID": format!("containerd://{id}")}]}})
    };
    server.put_pod(pod("db", "u1", ID));
    let mut host = KubeletHost::new();
    write(
        &host.kubelet().join("config.yaml"),
        "cpuManagerPolicy: static\nmemoryManagerPolicy: Static\ntopologyManagerPolicy: single-numa-node\n",
    );
    host.guarantee(&[("u1", "2", "1")]);
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
            resources
                .iter()
                .map(|resource| resource["available"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
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
    // The pod is removed from the state files and from the API server: all is free again.
    server.delete_pod("prod", "db");
    host.guarantee(&[]);
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
async fn names_containers_in_mode_enforce() {
    let other = "f".repeat(64);
    let server = FakeApiServer::start().await.unwrap();
    server.put_pod(json!({"metadata": {"name": "db", "namespace": "prod", "uid": "u1"},
        "spec": {"nodeName": "n1", "containers": [{"name": "main"}]},
        "status": {"phase": "Running",
            "containerStatuses": [{"name": "main", "containerID": format!("containerd://{ID}")}]}}));
    let mut host = KubeletHost::new();
    host.container(&format!("kubepods/podu1/{ID}"));
    host.container(&format!("kubepods/podu2/{other}"));
    let kubeconfig = host.root.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    host.config.kubernetes.node_name = Some("n1".to_owned());
    host.config.kubernetes.kubeconfig = Some(kubeconfig);
    server.put_node("n1", "uid-n1", "v1.36.2");
    server.put_taints("n1", &json!([{"key": "numaward.io/not-ready", "effect": "NoSchedule"}]));
    host.config.kubernetes.startup_taint = Some("numaward.io/not-ready".parse().unwrap());
    let observer = Arc::new(Observer::new(&host.config));
    let (mut readiness, stop) = (Readiness::default(), CancellationToken::new());
    let source = CgroupSource::Directory(host.cgroups.path().into());
    spawn(&observer, source, Latches::new(&mut readiness), &Heartbeats::default(), &stop).unwrap();
    let names = || {
        let workloads = observer.workloads().workloads;
        workloads.into_iter().map(|workload| (workload.workload, workload.cgroup)).collect::<BTreeMap<_, _>>()
    };
    let cgroup = |uid: &str, id: &str| Some(format!("/kubepods/pod{uid}/{id}"));
    wait("both, without names", || names().contains_key("pods").then_some(())).await;

    // Without NRI, the names are from the API server.
    let cluster = Cluster::prepare(
        &host.config,
        OperatingMode::Enforce,
        Policies::default(),
        &observer,
        ClusterMetrics::default(),
    );
    let started = readiness.clone();
    cluster.unwrap().start(None, Arc::new(move || started.is_ready()), &stop);
    wait("the removal of the taint", || (server.taints("n1") == json!([])).then_some(())).await;
    assert!(readiness.is_ready());
    wait("the name", || (names().get("prod/db/main") == Some(&cgroup("u1", ID))).then_some(())).await;
    assert_eq!(names().get("pods"), Some(&cgroup("u2", &other)));
    stop.cancel();

    // With NRI, the names are from the runtime. A removed container keeps its name as long as its cgroup exists.
    observer.update_containers(vec![(other.clone(), "prod/web/main".to_owned())], true);
    assert_eq!(names().get("prod/web/main"), Some(&cgroup("u2", &other)));
    assert!(names().contains_key("prod/db/main"));
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_missing_cluster_settings() {
    let mut host = KubeletHost::new();
    host.guarantee(&[]);
    host.config.kubernetes.node_resource_topology.enabled = true;
    host.config.kubernetes.startup_taint = Some("numaward.io/not-ready".parse().unwrap());
    let run = host.start();
    let reason = wait("the reason", || run.degraded("node_resource_topology")).await;
    assert!(reason.contains("kubernetes.nodeName"), "{reason}");
    let reason = wait("the reason", || run.degraded("startup_taint")).await;
    assert!(reason.contains("kubernetes.nodeName"), "{reason}");

    host.config.kubernetes.node_name = Some("n1".to_owned());
    host.config.kubernetes.kubeconfig = Some("/nonexistent/kubeconfig".into());
    let run = host.start();
    let reason = wait("the reason", || run.degraded("kubernetes_api")).await;
    assert!(reason.contains("/nonexistent/kubeconfig"), "{reason}");

    // The socket of another process is not replaced.
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

/// The strategy `kubelet` uses the version of the node unless the configuration has one.
#[tokio::test(flavor = "multi_thread")]
async fn reads_kubelet_version_of_node() {
    use KubeletVersion::{V1_32, V1_36};
    let server = FakeApiServer::start().await.unwrap();
    server.put_node("old", "u1", "v1.32.10");
    server.put_node("new", "u2", "v1.35.0+k3s1");
    server.put_node("odd", "u3", "unknown");
    server.put_node("next", "u4", "v1.37.1");
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = dir.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    let config = |node: &str, strategy, kubelet_version| {
        let mut config = Config { strategy, kubelet_version, ..Config::default() };
        config.kubernetes.node_name = Some(node.to_owned());
        config.kubernetes.kubeconfig = Some(kubeconfig.clone());
        config
    };
    for (node, configured, version, degraded) in [
        ("old", None, Some(V1_32), ""),
        ("new", None, Some(V1_36), ""),
        ("next", None, Some(V1_36), "the kubelet v1.37.1 is newer than any with recorded decisions"),
        ("next", Some(V1_36), Some(V1_36), ""),
        ("old", Some(V1_36), Some(V1_36), ""),
        ("odd", None, None, "the version of the kubelet is unknown"),
        ("gone", None, None, "the version of the kubelet is unknown"),
    ] {
        let config = config(node, StrategyKind::Kubelet, configured);
        let observer = Observer::new(&config);
        let found = kubelet::with_kubelet_version(&config, &observer).await;
        assert_eq!(found.kubelet_version, version, "{node}");
        let noted = observer.status().degraded;
        let noted = noted.iter().find(|part| part.part == "kubelet_version").map(|part| part.reason.as_str());
        assert!(noted.unwrap_or_default().starts_with(degraded), "{node}: {noted:?}");
        assert_eq!(noted.is_some(), !degraded.is_empty(), "{node}: {noted:?}");
    }
    let count = server.requests().len();
    let native = config("old", StrategyKind::Native, None);
    let observer = Observer::new(&native);
    assert_eq!(kubelet::with_kubelet_version(&native, &observer).await, native);
    let nowhere = Config { strategy: StrategyKind::Kubelet, ..Config::default() };
    assert_eq!(kubelet::with_kubelet_version(&nowhere, &observer).await, nowhere);
    assert_eq!(server.requests().len(), count);
}

/// A kubelet whose managers assign resources only if the first value is true.
struct RestartedKubelet(AtomicBool);

impl AssignmentSource for RestartedKubelet {
    fn pods(&self) -> Vec<AssignedPodResources> {
        Vec::new()
    }

    fn allocatable(&self) -> AllocatableResponse {
        if !self.0.load(Ordering::Relaxed) {
            return AllocatableResponse::default();
        }
        let memory = ContainerMemory::new("memory", Bytes(GIB), &"1".parse().unwrap());
        AllocatableResponse { cpu_ids: vec![1, 2, 3], memory: vec![memory], ..AllocatableResponse::default() }
    }
}

/// A daemon that enforces beside a kubelet.
struct EnforcingDaemon {
    observer: Arc<Observer>,
    _stop: DropGuard,
}

impl EnforcingDaemon {
    async fn start(config: &Config) -> Self {
        let timing = KubeletTiming {
            check_interval: Duration::from_millis(20),
            comparison_interval: Duration::from_millis(20),
            retry_delay: Duration::from_millis(20),
        };
        let (observer, stop) = (Arc::new(Observer::new(config)), CancellationToken::new());
        let (config, origin) = kubelet::with_kubelet_reservations(config, &observer).await;
        tokio::spawn(kubelet::watch(config, origin, observer.clone(), timing, stop.clone()));
        Self { observer, _stop: stop.drop_guard() }
    }

    fn degraded(&self, part: &str) -> Option<String> {
        let degraded = self.observer.status().degraded.into_iter();
        degraded.filter(|degraded| degraded.part == part).map(|degraded| degraded.reason).next()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_kubelet_that_gets_static() {
    let host = KubeletHost::new();
    let daemon = EnforcingDaemon::start(&host.config).await;
    assert_eq!(daemon.degraded("kubelet"), None);

    // The kubelet starts again: its socket is a new one.
    let (kubelet, stop) = (Arc::new(RestartedKubelet(AtomicBool::new(false))), CancellationToken::new());
    let socket = host.kubelet().join("pod-resources/kubelet.sock");
    fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    tokio::spawn(serve(listener, kubelet.clone(), stop.clone()));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(daemon.degraded("kubelet"), None, "its managers assign nothing");
    kubelet.0.store(true, Ordering::Relaxed);
    let reason = wait("the report", || daemon.degraded("kubelet")).await;
    for words in
        ["cpuManagerPolicy: static", "memoryManagerPolicy: Static", "kubelet.sock", "restart numaward"]
    {
        assert!(reason.contains(words), "{reason}");
    }
    kubelet.0.store(false, Ordering::Relaxed);
    wait("the end", || daemon.degraded("kubelet").is_none().then_some(())).await;
    stop.cancel();

    // A file that is replaced is read again.
    write(&host.kubelet().join("config.yaml"), "cpuManagerPolicy: none\n");
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(daemon.degraded("kubelet"), None);
    write(&host.kubelet().join("config.yaml"), "cpuManagerPolicy: static\n");
    let reason = wait("the report", || daemon.degraded("kubelet")).await;
    assert!(reason.contains("static in /var/lib/kubelet/config.yaml"), "{reason}");
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_configuration_of_kubelet_api() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_kubelet_configuration(json!({"cpuManagerPolicy": "none"}));
    let mut host = KubeletHost::new();
    let kubeconfig = host.root.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    host.config.kubernetes.kubeconfig = Some(kubeconfig);
    host.config.kubernetes.kubelet.address = Some(KubeletAddress(server.address()));
    let daemon = EnforcingDaemon::start(&host.config).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(server.requests().iter().any(|request| request == "GET /configz"), "{:?}", server.requests());
    assert_eq!((daemon.degraded("kubelet"), daemon.degraded("kubelet_configuration")), (None, None));
    server.put_kubelet_configuration(json!({"cpuManagerPolicy": "static"}));
    let reason = wait("the report", || daemon.degraded("kubelet")).await;
    assert!(reason.contains(&format!("https://{}/configz", server.address())), "{reason}");

    server.refuse(Some(("/configz", StatusCode::FORBIDDEN)));
    let reason = wait("the report", || daemon.degraded("kubelet_configuration")).await;
    assert!(reason.contains("nodes/configz"), "{reason}");
}

/// The most complete source that answers counts: the kubelet's API, its file, its Kubernetes node.
#[tokio::test(flavor = "multi_thread")]
async fn reserves_what_kubelet_reserves() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_node("n1", "u1", "v1.36.2");
    let capacity = json!({"cpu": "4", "memory": "8388608Ki"});
    server.put_resources("n1", &capacity, &json!({"cpu": "3", "memory": "7Gi"}));
    let mut host = KubeletHost::new();
    let observer = Observer::new(&host.config);
    let (config, origin) = kubelet::with_kubelet_reservations(&host.config, &observer).await;
    assert_eq!((&config, origin), (&host.config, None), "there is no kubelet");

    let kubeconfig = host.root.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    host.config.kubernetes.kubeconfig = Some(kubeconfig);
    host.config.kubernetes.node_name = Some("n1".to_owned());
    let reserved = async |config: &Config| {
        let (config, origin) = kubelet::with_kubelet_reservations(config, &observer).await;
        let memory = config.reserved_memory.unwrap_or_default();
        let memory =
            memory.iter().flat_map(|of| of.limits.values()).map(|amount| amount.0.units().unwrap() >> 20);
        (memory.collect::<Vec<_>>(), origin.unwrap().source)
    };
    let (memory, source) = reserved(&host.config).await;
    assert!(memory == [512, 512] && source.contains("the Kubernetes node n1"), "{memory:?} {source}");

    write(&host.kubelet().join("config.yaml"), "kubeReserved:\n  memory: 300Mi\n");
    let (memory, source) = reserved(&host.config).await;
    assert!(memory == [200, 200] && source == "/var/lib/kubelet/config.yaml", "{memory:?} {source}");
    server.put_kubelet_configuration(json!({"systemReserved": {"memory": "500Mi"}}));
    host.config.kubernetes.kubelet.address = Some(KubeletAddress(server.address()));
    let (memory, source) = reserved(&host.config).await;
    assert!(memory == [300, 300] && source.ends_with("/configz"), "{memory:?} {source}");

    // While the configuration cannot be read, its last known reservations count, also if the Kubernetes node answers or no source does.
    fs::remove_file(host.kubelet().join("config.yaml")).unwrap();
    for refused in ["/configz", "/"] {
        server.refuse(Some((refused, StatusCode::FORBIDDEN)));
        let (memory, source) = reserved(&host.config).await;
        assert!(
            memory == [300, 300] && source.contains("as stored at an earlier start"),
            "{memory:?} {source}"
        );
    }
    let (memory, source) = reserved(&host.config).await;
    assert!(memory == [300, 300] && source.contains("as stored at an earlier start"), "{memory:?} {source}");
    assert!(source.contains("/configz") && source.contains("403"), "{source}");

    // A source that cannot be read is named.
    fs::write(host.config.state_directory.join("kubelet-reservations.json"), "nonsense").unwrap();
    let (memory, source) = reserved(&host.config).await;
    assert!(memory.is_empty() && source.contains("kubelet-reservations.json"), "{memory:?} {source}");
    fs::remove_file(host.config.state_directory.join("kubelet-reservations.json")).unwrap();
    let (memory, source) = reserved(&host.config).await;
    assert!(memory.is_empty() && source.contains("defaults") && source.contains("403"), "{source}");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_names_excess_of_node() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_node("n1", "u1", "v1.36.2");
    let capacity = json!({"cpu": "4", "memory": "8388608Ki"});
    server.put_resources("n1", &capacity, &json!({"cpu": "3", "memory": "7Gi"}));
    let mut host = KubeletHost::new();
    let kubeconfig = host.root.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    host.config.kubernetes.kubeconfig = Some(kubeconfig);
    host.config.kubernetes.node_name = Some("n1".to_owned());
    let daemon = EnforcingDaemon::start(&host.config).await;
    let origin = wait("the origin", || daemon.observer.status().reservations).await;
    assert!(origin.excess.is_none() && origin.source.contains("the Kubernetes node n1"), "{origin:?}");
    // The kubelet is started again and reserves less.
    server.put_resources("n1", &capacity, &json!({"cpu": "4", "memory": "7Gi"}));
    let excess = wait("the excess", || daemon.observer.status().reservations?.excess).await;
    assert!(excess.contains("4 CPUs, and numaward 3") && !excess.contains("MiB"), "{excess}");
}

#[tokio::test(flavor = "multi_thread")]
async fn finds_memory_qos_of_kubelet() {
    let server = FakeApiServer::start().await.unwrap();
    let mut host = KubeletHost::new();
    let kubeconfig = host.root.path().join("kubeconfig");
    fs::write(&kubeconfig, server.kubeconfig()).unwrap();
    host.config.kubernetes.kubeconfig = Some(kubeconfig);
    host.config.kubernetes.node_name = Some("n1".to_owned());
    let find = async |config: &Config| {
        kubelet::find_memory_qos(config).await.map_or_else(String::new, |found| found.setting)
    };
    for (version, expected) in [("v1.36.2", ""), ("v1.37.0", "on by default in the kubelet v1.37.0")] {
        server.put_node("n1", "u1", version);
        assert_eq!(find(&host.config).await, expected);
    }
    for gate in ["MemoryQoS", "AllBeta"] {
        write(&host.kubelet().join("config.yaml"), &format!("featureGates: {{{gate}: false}}\n"));
        assert_eq!(find(&host.config).await, "");
    }
    host.config.kubernetes.kubelet.address = Some(KubeletAddress(server.address()));
    server.put_kubelet_configuration(json!({"featureGates": {"MemoryQoS": true}}));
    let expected = format!("featureGates.MemoryQoS: true in https://{}/configz", server.address());
    assert_eq!(find(&host.config).await, expected);
}
