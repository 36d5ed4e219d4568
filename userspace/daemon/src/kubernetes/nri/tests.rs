//! Tests of the NRI plugin with a fake container runtime, on a tree of plain files.

mod claims;
mod faults;
mod fleet;
mod pods;
mod policy;
mod quota;
mod refusals;
mod sandboxes;
mod tenant;
mod uninstall;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use numaward_api::{EnforcementMode, EventKind};
use numaward_cgroup::CgroupPath;
use numaward_config::{
    Config,
    kubernetes::Kubernetes,
    policy::{StrategyKind, TopologyManagerPolicy},
};
use numaward_control::{testing as fixture, testing::TestHost};
use numaward_enforce::Systemd;
use numaward_engine::{ContainerRequest, Resources};
use numaward_guarantee::{ports::Ports as ReconcilerPorts, reconciler::ReconcilerHandle};
use numaward_kube::{
    api::ClaimReader,
    cgroup_path,
    nri::{
        Options,
        fake::{self, ContainerSpec, FakeRuntime, PodSpec},
        types::{self, Online},
    },
    pod::{self, NoPods, Notice, PodId, PodSource},
};
use numaward_model::port::ObservedHost as _;
use numaward_topology::{Bytes, CpuSet, Machine};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{DeviceTimeouts, NriMetrics, Refusals, plugin};

const PLUGIN: &str = "90-numaward";

/// Time limit of an answer in tests that are not about late ones: a busy host may delay any.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(10);

/// Source of pods in place of an API server.
#[derive(Default)]
pub(super) struct FakePods {
    pods: Mutex<BTreeMap<String, Arc<pod::Pod>>>,
    pub(super) notices: Mutex<Vec<Notice>>,
    synced: AtomicBool,
}

impl PodSource for FakePods {
    fn pod(&self, id: &PodId) -> Option<Arc<pod::Pod>> {
        self.pods.lock().unwrap().get(&id.uid).filter(|pod| pod.id == *id).cloned()
    }

    fn is_synced(&self) -> bool {
        self.synced.load(Ordering::Relaxed)
    }

    fn notify(&self, notice: Notice) {
        self.notices.lock().unwrap().push(notice);
    }
}

/// A host with a container runtime, on which the daemon can be started several times.
struct NriBench {
    dir: tempfile::TempDir,
    host: Arc<TestHost>,
    runtime: FakeRuntime,
    pods: Arc<dyn PodSource>,
    claims: ClaimReader,
    config: Config,
    device_timeouts: DeviceTimeouts,
}

/// A running daemon.
struct NriDaemon {
    reconciler: ReconcilerHandle,
    thread: Option<JoinHandle<()>>,
    stop: CancellationToken,
    figures: NriMetrics,
    refusals: Refusals,
    /// The present settings.
    kubernetes: watch::Sender<Kubernetes>,
}

impl NriDaemon {
    /// Stops the daemon like a kill: without a message to the runtime.
    async fn stop(mut self, runtime: &FakeRuntime) {
        self.stop.cancel();
        let thread = self.thread.take().unwrap();
        tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap();
        assert!(runtime.has_plugins(&[]).await);
    }
}

impl NriMetrics {
    /// Returns the number of containers that started unpinned for this reason.
    fn unpinned_for(&self, reason: &'static str) -> u64 {
        self.unpinned.get_or_create(&[("reason", reason)]).get()
    }
}

impl Drop for NriDaemon {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl NriBench {
    fn new(pods: Arc<dyn PodSource>, runtime: impl FnOnce(Online) -> fake::FakeRuntimeConfig) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let machine = Machine::builder().nodes(4).sockets(4).cores_per_node(16).memory(Bytes::gib(64));
        // The first core (CPU 0) is reserved for the system.
        let machine = machine.build().unwrap();
        let runtime = FakeRuntime::new(fake::FakeRuntimeConfig {
            registration_timeout: ANSWER_TIMEOUT,
            request_timeout: ANSWER_TIMEOUT,
            ..runtime(Online::from(&machine))
        });
        let config = Config {
            state_directory: dir.path().join("state"),
            host_root: dir.path().to_owned(),
            ..Config::default()
        };
        let host = Arc::new(TestHost::new(machine));
        let device_timeouts =
            DeviceTimeouts { kubelet: ANSWER_TIMEOUT, api_server: ANSWER_TIMEOUT, files: ANSWER_TIMEOUT };
        let bench =
            Self { dir, host, runtime, pods, claims: ClaimReader::default(), config, device_timeouts };
        for path in ["", "kubepods", "kubepods/burstable", "kubepods/besteffort"] {
            bench.cgroup(path);
        }
        bench
    }

    fn cgroup(&self, path: &str) {
        fixture::cgroup(&self.dir.path().join("cgroup").join(path), &self.host.machine());
    }

    fn knob(&self, path: &str) -> String {
        fixture::line(&self.dir.path().join("cgroup").join(path))
    }

    async fn start(&self) -> NriDaemon {
        let daemon = self.start_unconnected();
        assert!(self.runtime.has_plugins(&[PLUGIN]).await);
        daemon
    }

    fn start_unconnected(&self) -> NriDaemon {
        self.start_with(None)
    }

    fn start_with(&self, systemd: Option<Systemd>) -> NriDaemon {
        let root = self.dir.path().join("cgroup");
        let (reconciler, thread, stop) =
            fixture::reconciler(&self.config, &root, ReconcilerPorts::new(self.host.clone()), None, systemd);
        let kubernetes = watch::Sender::new(self.config.kubernetes.clone());
        let (figures, refusals) = (
            NriMetrics::default(),
            Refusals::new(kubernetes.subscribe(), self.config.strategy == StrategyKind::Native),
        );
        let options = Options {
            plugin: self.config.kubernetes.nri.clone(),
            answer_within: ANSWER_TIMEOUT,
            ..Options::default()
        };
        let plugin = plugin(
            options,
            (&self.config, kubernetes.subscribe()),
            reconciler.clone(),
            self.host.clone(),
            (self.pods.clone(), self.claims.clone(), self.device_timeouts),
            (figures.clone(), refusals.clone()),
            &stop,
        );
        tokio::spawn(plugin.run_with(self.runtime.connector(), stop.clone()));
        NriDaemon { reconciler, thread: Some(thread), stop, figures, refusals, kubernetes }
    }

    /// Creates the cgroup of a pod, and runs its sandbox.
    async fn pod(&self, uid: &str, class: &str, annotations: &[(&str, &str)]) -> Result<PodSpec, String> {
        let pod = self.spec(uid, class, annotations);
        self.runtime.run_pod(&pod).await?;
        Ok(pod)
    }

    fn spec(&self, uid: &str, class: &str, annotations: &[(&str, &str)]) -> PodSpec {
        let parent = format!("/kubepods{class}/pod{uid}");
        self.cgroup(parent.trim_start_matches('/'));
        PodSpec {
            id: format!("sandbox-{uid}"),
            name: format!("pod-{uid}"),
            namespace: "default".to_owned(),
            uid: uid.to_owned(),
            annotations: annotations.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            cgroup_parent: parent,
            ..PodSpec::default()
        }
    }

    /// Creates a container, and its cgroup with the settings that the runtime applies.
    async fn create(&self, spec: &ContainerSpec) -> Result<(), String> {
        let created = self.runtime.create_container(spec).await?;
        let path = path_of(spec);
        self.cgroup(&path);
        let dir = self.dir.path().join("cgroup").join(path);
        for (knob, value) in &created.resources.unified {
            fs::write(dir.join(knob), format!("{value}\n")).unwrap();
        }
        if let Some(cpus) = created.resources.cpus {
            fs::write(dir.join("cpuset.cpus"), format!("{cpus}\n")).unwrap();
        }
        if let Some(mems) = created.resources.mems {
            fs::write(dir.join("cpuset.mems"), format!("{mems}\n")).unwrap();
        }
        if let Some(types::Limit::At(quota)) = created.resources.cpu_quota {
            fs::write(dir.join("cpu.max"), format!("{} 100000\n", quota.as_micros())).unwrap();
        }
        Ok(())
    }

    async fn run(&self, spec: &ContainerSpec) -> Result<(), String> {
        self.create(spec).await?;
        self.runtime.start_container(&spec.id).await
    }

    async fn remove(&self, spec: &ContainerSpec) {
        fs::remove_dir_all(self.dir.path().join("cgroup").join(path_of(spec))).unwrap();
        self.runtime.stop_container(&spec.id).await.unwrap();
        self.runtime.remove_container(&spec.id).await.unwrap();
    }

    /// Gives the runtime and the requests for devices the time limits of a real host.
    fn limit_times(&mut self) {
        let online = Online::from(&*self.host.machine());
        self.runtime = FakeRuntime::new(fake::FakeRuntimeConfig::containerd_2_1(online));
        self.device_timeouts = DeviceTimeouts::default();
    }

    /// Runs other containers until the answer about one of them updates the CPUs of this container in the runtime.
    async fn await_update(&self, spec: &ContainerSpec) {
        let caller = self.pod("caller", "/besteffort", &[]).await.unwrap();
        let caller = container(&caller, "caller", 0, Bytes(0));
        for _ in 0..100 {
            self.run(&caller).await.unwrap();
            self.remove(&caller).await;
            if self.runtime.container(&spec.id).unwrap().resources.cpus == Some(self.cpus(spec)) {
                return self.runtime.remove_pod(&caller.pod_id).await.unwrap();
            }
        }
        panic!("the runtime knows {:?}", self.runtime.container(&spec.id));
    }

    fn cpus(&self, spec: &ContainerSpec) -> CpuSet {
        self.knob(&format!("{}/cpuset.cpus", path_of(spec))).parse().unwrap()
    }

    fn mems(&self, spec: &ContainerSpec) -> String {
        self.knob(&format!("{}/cpuset.mems", path_of(spec)))
    }
}

/// Returns a container with whole CPUs and memory as the kubelet passes them to the runtime.
fn container(pod: &PodSpec, name: &str, cpus: u64, memory: Bytes) -> ContainerSpec {
    let id = format!("{name}-{}", pod.uid);
    ContainerSpec {
        cgroups_path: format!("{}/{id}", pod.cgroup_parent),
        id,
        pod_id: pod.id.clone(),
        name: name.to_owned(),
        cpu_shares: Some((cpus * 1024).max(2)),
        memory_limit: (memory.0 > 0).then_some(memory),
        ..ContainerSpec::default()
    }
}

/// Returns the path of a container's cgroup, relative to the root of the hierarchy.
fn path_of(spec: &ContainerSpec) -> String {
    cgroup_path::container_path(&spec.cgroups_path).unwrap().trim_start_matches('/').to_owned()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_mins(1), "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_isolates_and_releases() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;

    let shared = bench.pod("burst", "/burstable", &[]).await.unwrap();
    let shared = container(&shared, "web", 4, Bytes(0));
    bench.run(&shared).await.unwrap();
    assert_eq!(bench.cpus(&shared), "0-63".parse().unwrap());
    let opted_out = PodSpec {
        namespace: "kube-system".to_owned(),
        ..bench.spec("own", "/burstable", &[("numaward.io/placement", "off")])
    };
    bench.runtime.run_pod(&opted_out).await.unwrap();
    let opted_out = container(&opted_out, "own", 1, Bytes(0));
    bench.run(&opted_out).await.unwrap();
    assert_eq!(bench.cpus(&opted_out), CpuSet::new());

    let pod = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    assert_eq!((bench.cpus(&db), bench.mems(&db).as_str()), ("1-2".parse().unwrap(), "0"));
    let held = daemon.reconciler.allocations();
    let held = &held.allocations[0];
    assert_eq!((held.name.as_str(), held.cpus.as_str()), ("default/pod-db/db", "1-2"));
    let notes = &held.explanation.as_ref().unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("the API server has not reported")), "{notes:?}");
    assert_eq!(bench.host.assigned.lock().unwrap().workloads()[0].nodes, "0".parse().unwrap());
    // The other container was confined before the new one started, and the runtime gets its new CPUs.
    assert_eq!(bench.cpus(&shared), "0,3-63".parse().unwrap());
    bench.await_update(&shared).await;
    assert_eq!(bench.cpus(&opted_out), CpuSet::new());

    // A request over HTTP cannot release the guarantee of a container.
    let error = daemon.reconciler.release("default/pod-db/db".to_owned()).await.unwrap_err();
    assert!(error.to_string().contains("placed when the runtime creates it"), "{error}");

    bench.remove(&db).await;
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().allocations, []);
    assert_eq!(bench.cpus(&shared), "0-63".parse().unwrap());
    for reason in ["late", "away", "ledger", "enforcement"] {
        assert_eq!(daemon.figures.unpinned_for(reason), 0, "{reason}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opt_out_needs_listed_namespace() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let db = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&db, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    let pod = bench.pod("own", "/burstable", &[("own.numaward.io/placement", "off")]).await.unwrap();
    let own = container(&pod, "own", 1, Bytes(0));
    bench.run(&own).await.unwrap();
    assert_eq!(bench.cpus(&own), "0,3-63".parse().unwrap(), "all but the exclusive CPUs");
    let notices = || known.notices.lock().unwrap().clone();
    let [notice] = &notices()[..] else { panic!("{:?}", notices()) };
    assert!(notice.is_warning && notice.pod.uid == "own", "{notice:?}");
    assert!(notice.message.contains("kubernetes.placementOffNamespaces"), "{notice:?}");
    // There is no second notice after a restart of the runtime.
    bench.runtime.stop();
    bench.runtime.start();
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    assert_eq!(notices().len(), 1);

    daemon.stop(&bench.runtime).await;
    bench.config.kubernetes.placement_off_namespaces = ["default".to_owned()].into();
    let _daemon = bench.start().await;
    let free = container(&pod, "own", 1, Bytes(0));
    let free = ContainerSpec {
        id: "again".to_owned(),
        cgroups_path: format!("{}/again", pod.cgroup_parent),
        ..free
    };
    bench.run(&free).await.unwrap();
    assert_eq!(bench.cpus(&free), CpuSet::new());
    assert_eq!(notices().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_does_not_block_the_next() {
    let mut bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_1_7);
    bench.config.topology_manager_policy = Some(TopologyManagerPolicy::SingleNumaNode);
    let daemon = bench.start().await;
    let pod = bench.pod("big", "", &[]).await.unwrap();
    let big = container(&pod, "big", 14, Bytes::gib(1));
    bench.run(&big).await.unwrap();
    let second = container(&pod, "second", 17, Bytes::gib(1));
    let error = bench.run(&second).await.unwrap_err();
    assert!(error.contains("numaward cannot place container second of pod default/pod-big"), "{error}");
    assert!(error.contains("node 1: cpu requested 17, free 16"), "{error}");
    let small = container(&pod, "small", 2, Bytes::gib(1));
    bench.run(&small).await.unwrap();
    assert!((&bench.cpus(&small) & &bench.cpus(&big)).is_empty());
    assert_eq!(daemon.reconciler.allocations().allocations.len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admits_known_pod_as_a_whole() {
    let known = Arc::new(FakePods::default());
    let bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_3);
    let daemon = bench.start().await;
    let resources =
        |cpus: &str| Resources::none().with_cpu(cpus.parse().unwrap()).with_memory("1Gi".parse().unwrap());
    let add_pod = |uid: &str, init: &str, app: &str| {
        let id = PodId { namespace: "default".to_owned(), name: format!("pod-{uid}"), uid: uid.to_owned() };
        let pod = pod::Pod {
            id,
            init_containers: vec![ContainerRequest::guaranteed("init", resources(init))],
            containers: vec![
                ContainerRequest::guaranteed("app", resources(app)),
                ContainerRequest::guaranteed("side", resources("500m")),
            ],
            ..pod::Pod::default()
        };
        known.pods.lock().unwrap().insert(uid.to_owned(), Arc::new(pod));
    };
    add_pod("a", "4", "4");
    let pod = bench.pod("a", "", &[]).await.unwrap();
    // The CPUs of the pod are guaranteed before its first container is created.
    let init = container(&pod, "init", 4, Bytes::gib(1));
    let app = container(&pod, "app", 4, Bytes::gib(1));
    let side = ContainerSpec { cpu_shares: Some(512), ..container(&pod, "side", 1, Bytes::gib(1)) };
    for spec in [&init, &app, &side] {
        bench.run(spec).await.unwrap();
    }
    // Later containers get the CPUs of an init container.
    assert_eq!(bench.cpus(&init), bench.cpus(&app));
    assert_eq!(bench.cpus(&app).len(), 4);
    assert_eq!(bench.cpus(&side), &"0-63".parse::<CpuSet>().unwrap() - &bench.cpus(&app));
    assert_eq!(bench.mems(&side), "0");

    add_pod("b", "1", "70");
    // A running sandbox is not refused, so that containerd need not clean it up: the first container is refused at each attempt.
    let refused = bench.pod("b", "", &[]).await.unwrap();
    assert!(known.notices.lock().unwrap().is_empty());
    let error = bench.run(&container(&refused, "init", 1, Bytes::gib(1))).await.unwrap_err();
    assert!(error.contains("numaward cannot place pod default/pod-b"), "{error}");
    assert!(error.contains("cpu requested 70"), "{error}");
    let notices = known.notices.lock().unwrap().clone();
    let [notice] = &notices[..] else { panic!("{notices:?}") };
    assert!(notice.is_warning && notice.pod.uid == "b", "{notice:?}");
    assert_eq!(notice.reason, "NumaPlacementRefused");
    for words in [
        "TopologyAffinityError",
        "cpu requested 70",
        "does not move the pod",
        "delete the pod",
        "request less",
    ] {
        assert!(notice.message.contains(words), "{words}: {}", notice.message);
    }

    // The end of the sandbox releases everything, even without events of the containers.
    bench.runtime.remove_pod(&pod.id).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_listed_namespaces_only() {
    let mut bench = NriBench::new(Arc::new(FakePods::default()), fake::FakeRuntimeConfig::containerd_2_1);
    bench.config.kubernetes.placement_namespaces = Some(["other".to_owned()].into());
    let daemon = bench.start().await;
    let first = bench.pod("first", "", &[]).await.unwrap();
    let shared = container(&first, "shared", 2, Bytes::gib(1));
    bench.run(&shared).await.unwrap();
    assert_eq!(daemon.reconciler.allocations().shared_cpus, "0-63");

    daemon.stop(&bench.runtime).await;
    bench.config.kubernetes.placement_namespaces = Some(["default".to_owned()].into());
    let _daemon = bench.start().await;
    let second = bench.pod("second", "", &[]).await.unwrap();
    let exclusive = container(&second, "exclusive", 2, Bytes::gib(1));
    bench.run(&exclusive).await.unwrap();
    assert_eq!(bench.cpus(&exclusive).len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_pod_starts_no_container() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
    bench.config.kubernetes.placement_off_namespaces.insert("default".to_owned());
    let daemon = bench.start().await;
    let guaranteed = |name: &str, cpus: &str| {
        let amounts = Resources::none().with_cpu(cpus.parse().unwrap()).with_memory("1Gi".parse().unwrap());
        ContainerRequest::guaranteed(name, amounts)
    };
    known.add_pod("first", vec![guaranteed("db", "40")], None);
    let first = bench.pod("first", "", &[]).await.unwrap();
    bench.run(&container(&first, "db", 40, Bytes::gib(1))).await.unwrap();
    // One of its containers opts out.
    known.add_pod("second", vec![guaranteed("log", "1"), guaranteed("db", "40")], None);
    let second = bench.pod("second", "", &[("log.numaward.io/placement", "off")]).await.unwrap();
    let log = container(&second, "log", 1, Bytes::gib(1));
    let db = container(&second, "db", 40, Bytes::gib(1));
    for spec in [&log, &db, &log] {
        let error = bench.run(spec).await.unwrap_err();
        assert!(error.contains("numaward cannot place pod default/pod-second"), "{error}");
    }
    assert_eq!((daemon.figures.placed.get(), daemon.figures.refused.get()), (1, 3));
    bench.runtime.remove_pod(&first.id).await.unwrap();
    for spec in [&log, &db] {
        bench.run(spec).await.unwrap();
    }
    assert_eq!(bench.cpus(&db).len(), 40);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusal_names_reason_and_fixes() {
    let whole_cores: BTreeMap<_, _> = [("full-pcpus-only".to_owned(), "true".to_owned())].into();
    for (policy, options, cpus, words) in [
        (
            TopologyManagerPolicy::SingleNumaNode,
            BTreeMap::new(),
            "17",
            ["TopologyAffinityError", "numaward.io/topology-policy"],
        ),
        (TopologyManagerPolicy::None, whole_cores, "3", ["SMTAlignmentError", "whole cores"]),
    ] {
        let known = Arc::new(FakePods::default());
        let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_1);
        let machine = Machine::builder().nodes(4).sockets(4).cores_per_node(8).smt(2).memory(Bytes::gib(64));
        bench.host = Arc::new(TestHost::new(machine.build().unwrap()));
        bench.config.topology_manager_policy = Some(policy);
        bench.config.cpu_manager_policy_options = options;
        let _daemon = bench.start().await;
        let amounts = Resources::none().with_cpu(cpus.parse().unwrap()).with_memory("1Gi".parse().unwrap());
        known.add_pod("a", vec![ContainerRequest::guaranteed("db", amounts)], None);
        let pod = bench.pod("a", "", &[]).await.unwrap();
        bench.run(&container(&pod, "db", 17, Bytes::gib(1))).await.unwrap_err();
        let message = known.notices.lock().unwrap()[0].message.clone();
        assert!(words.iter().all(|words| message.contains(words)), "{message}");
        assert!(message.contains("delete the pod"), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarts_keep_guarantees() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    // The daemon starts after the container, and adopts it.
    let early = bench.spec("early", "", &[]);
    let db = container(&early, "db", 3, Bytes::gib(1));
    bench.runtime.add_running(&early, &db);
    bench.cgroup(db.cgroups_path.trim_start_matches('/'));
    let daemon = bench.start().await;
    until("the container is pinned", || !bench.cpus(&db).is_empty() && !bench.mems(&db).is_empty()).await;
    assert_eq!((bench.cpus(&db), bench.mems(&db).as_str()), ("1-3".parse().unwrap(), "0"));
    assert_eq!(bench.runtime.container(&db.id).unwrap().resources.cpus, Some("1-3".parse().unwrap()));
    assert_eq!(daemon.figures.unpinned_for("away"), 1);

    // The runtime restarts.
    bench.runtime.stop();
    bench.runtime.start();
    assert!(bench.runtime.has_plugins(&[PLUGIN]).await);
    let pod = bench.pod("next", "", &[]).await.unwrap();
    let next = container(&pod, "next", 2, Bytes::gib(1));
    bench.run(&next).await.unwrap();
    assert_eq!(bench.cpus(&next), "4-5".parse().unwrap());
    assert_eq!(daemon.figures.unpinned_for("away"), 1);

    // The daemon is killed; meanwhile, one container ends and one starts.
    daemon.stop(&bench.runtime).await;
    bench.remove(&db).await;
    bench.runtime.remove_pod(&early.id).await.unwrap();
    let late = bench.pod("late", "", &[]).await.unwrap();
    let late = container(&late, "late", 2, Bytes::gib(1));
    bench.run(&late).await.unwrap();
    assert_eq!(bench.cpus(&late), CpuSet::new());
    let daemon = bench.start().await;
    until("the new container is pinned", || bench.cpus(&late).len() == 2).await;
    assert_eq!(bench.cpus(&next), "4-5".parse().unwrap(), "a running container keeps its CPUs");
    assert!((&bench.cpus(&late) & &bench.cpus(&next)).is_empty());
    assert_eq!(daemon.figures.unpinned_for("away"), 1);
    until("both have guarantees", || {
        let held = daemon.reconciler.allocations();
        let names: BTreeSet<_> = held.allocations.iter().map(|held| held.name.clone()).collect();
        names == ["default/pod-late/late".to_owned(), "default/pod-next/next".to_owned()].into()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn resizes_container_or_refuses() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let shared = bench.pod("burst", "/burstable", &[]).await.unwrap();
    let shared = container(&shared, "web", 1, Bytes(0));
    bench.run(&shared).await.unwrap();
    let pod = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    bench.run(&db).await.unwrap();
    let to = |cpus, memory| container(&pod, "db", cpus, memory);
    let updated = bench.runtime.update_container(&db.id, &to(4, Bytes::gib(2))).await.unwrap();
    assert_eq!(
        (updated.resources.cpus.unwrap(), updated.resources.cpu_shares),
        ("1-4".parse().unwrap(), Some(4096))
    );
    assert_eq!(bench.cpus(&db), "1-4".parse().unwrap());
    assert_eq!(bench.cpus(&shared), "0,5-63".parse().unwrap());
    let held = daemon.reconciler.allocations().allocations[0].clone();
    assert_eq!((held.cpus.as_str(), held.memory[0].bytes), ("1-4", Bytes::gib(2).0));
    // The node has 15 CPUs for guarantees.
    let error = bench.runtime.update_container(&db.id, &to(16, Bytes::gib(2))).await.unwrap_err();
    assert!(error.contains("numaward cannot resize container db of pod default/pod-db"), "{error}");
    assert!(error.contains("node 0: cpu requested 12, free 11"), "{error}");
    assert_eq!(bench.cpus(&db), "1-4".parse().unwrap());
    let updated = bench.runtime.update_container(&db.id, &to(1, Bytes::gib(1))).await.unwrap();
    assert_eq!(updated.resources.cpus.unwrap(), "1".parse().unwrap());
    assert_eq!(bench.cpus(&shared), "0,2-63".parse().unwrap());
    // A container without a guarantee gets the shared pool.
    let updated =
        bench.runtime.update_container(&shared.id, &container(&pod, "web", 3, Bytes(0))).await.unwrap();
    assert_eq!(updated.resources.cpus.unwrap(), "0,2-63".parse().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dry_run_only_reports() {
    let known = Arc::new(FakePods::default());
    let mut bench = NriBench::new(known.clone(), fake::FakeRuntimeConfig::containerd_2_3);
    bench.config.enforcement.mode = EnforcementMode::DryRun;
    bench.config.topology_manager_policy = Some(TopologyManagerPolicy::SingleNumaNode);
    // This container starts before numaward.
    let early = bench.spec("early", "", &[]);
    let first = container(&early, "db", 3, Bytes::gib(1));
    bench.runtime.add_running(&early, &first);
    bench.cgroup(first.cgroups_path.trim_start_matches('/'));
    let daemon = bench.start().await;
    until("the container has a guarantee", || daemon.reconciler.allocations().allocations.len() == 1).await;

    let shared = bench.pod("burst", "/burstable", &[]).await.unwrap();
    let shared = container(&shared, "web", 4, Bytes(0));
    let pod = bench.pod("db", "", &[]).await.unwrap();
    let db = container(&pod, "db", 2, Bytes::gib(1));
    let large = container(&pod, "large", 17, Bytes::gib(1));
    for spec in [&shared, &db, &large] {
        bench.run(spec).await.unwrap();
    }
    let updated = bench.runtime.update_container(&db.id, &container(&pod, "db", 18, Bytes::gib(1))).await;
    assert_eq!(updated.unwrap().resources.cpus, None);
    let large_pod = pod::Pod {
        id: PodId { namespace: "default".to_owned(), name: "pod-whole".to_owned(), uid: "whole".to_owned() },
        containers: vec![ContainerRequest::guaranteed(
            "app",
            Resources::none().with_cpu("70".parse().unwrap()).with_memory("1Gi".parse().unwrap()),
        )],
        ..pod::Pod::default()
    };
    known.pods.lock().unwrap().insert("whole".to_owned(), Arc::new(large_pod));
    let whole = bench.pod("whole", "", &[]).await.unwrap();
    let app = container(&whole, "app", 70, Bytes::gib(1));
    bench.run(&app).await.unwrap();

    for spec in [&first, &shared, &db, &large, &app] {
        assert_eq!((bench.cpus(spec), bench.mems(spec).as_str()), (CpuSet::new(), ""), "{}", spec.id);
        let resources = bench.runtime.container(&spec.id).unwrap().resources;
        assert_eq!((resources.cpus, resources.mems), (None, None), "{}", spec.id);
        assert!(resources.unified.is_empty(), "{}: {:?}", spec.id, resources.unified);
    }
    let notices = known.notices.lock().unwrap().clone();
    let reasons: Vec<_> =
        notices.iter().map(|notice| (notice.pod.uid.as_str(), notice.reason.as_str())).collect();
    let (placed, refused) = ("NumaPlacementDryRun", "NumaRefusalDryRun");
    assert_eq!(
        reasons,
        [("db", placed), ("db", refused), ("db", refused), ("whole", refused)],
        "{notices:?}"
    );
    assert!(notices.iter().all(|notice| !notice.is_warning), "{notices:?}");
    let message =
        "Dry run: container db of pod default/pod-db would have had CPUs 4-5, 1Gi of memory on node 0.";
    assert_eq!(notices[0].message, message);
    let words = "Dry run: container large of pod default/pod-db would have been refused: ";
    assert!(notices[1].message.starts_with(words), "{}", notices[1].message);
    let happened = bench.host.happened.lock().unwrap();
    let kinds: BTreeSet<_> = happened.iter().map(|(_, report)| report.kind).collect();
    assert_eq!(kinds, [EventKind::Decided].into(), "{happened:?}");
    for reason in ["away", "late", "does_not_fit"] {
        assert_eq!(daemon.figures.unpinned_for(reason), 0, "{reason}");
    }
    assert_eq!((daemon.figures.placed.get(), daemon.figures.refused.get()), (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_creations_share_no_cpu() {
    let bench = Arc::new(NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1));
    let daemon = bench.start().await;
    let mut running = tokio::task::JoinSet::new();
    for i in 0..40 {
        let bench = Arc::clone(&bench);
        running.spawn(async move {
            let pod = bench.pod(&format!("p{i}"), "", &[]).await.unwrap();
            let spec = container(&pod, "c", 1, Bytes::mib(64));
            bench.run(&spec).await.unwrap();
            spec
        });
    }
    let mut taken = CpuSet::new();
    while let Some(spec) = running.join_next().await {
        let spec = spec.unwrap();
        let cpus = bench.cpus(&spec);
        assert_eq!(cpus.len(), 1, "{}", spec.id);
        assert!((&taken & &cpus).is_empty(), "{cpus} are used twice");
        taken = &taken | &cpus;
    }
    assert_eq!(taken.len(), 40);
    // The published guarantees follow the answers.
    until("all guarantees are published", || daemon.reconciler.allocations().allocations.len() == 40).await;
    assert_eq!(daemon.figures.unpinned_for("late"), 0);
    let mut took = bench.runtime.reply_times("CreateContainer");
    took.sort_unstable();
    assert_eq!(took.len(), 40);
    println!("reply to CreateContainer: median {:?}, p99 and longest {:?}", took[20], took[39]);
}
