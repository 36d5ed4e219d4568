//! The NRI plugin against a runtime that enforces the rules of the real ones.
//!
//! Time is paused unless a comment says otherwise, so the results do not depend on the speed of the machine.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "what cannot be unwrapped fails the test"
)]

use std::{
    collections::BTreeMap,
    future::{Ready, pending, ready},
    io,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use numaward_config::{
    kubernetes::{Nri, PinnedPolicy},
    policy::MemoryPolicy,
};
use numaward_kube::nri::{
    Disconnect, EventMask, Handler, NriVersion, Options, Phase, Plugin, Status, WireError,
    fake::{ContainerSpec, FakeRuntime, FakeRuntimeConfig, PodSpec},
    types::{
        Call, Container, ContainerState, Creation, Event, Limit, NoAnswer, NoAnswerReason, Online, Pod,
        Refusal, Resources, Settings, Snapshot, Update,
    },
};
use numaward_topology::{Bytes, CpuId, CpuSet, NodeSet};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

const PLUGIN: &str = "90-numaward";
const SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";

/// Behavior of the handler for creations.
#[derive(Clone, Debug, Default)]
enum Behavior {
    /// Assigns a CPU to each container.
    #[default]
    Place,
    /// Waits before it assigns a CPU.
    Slow(Duration),
    Panic,
    Refuse(String),
    /// Returns this answer.
    Answer(Creation),
}

#[derive(Default)]
struct Records {
    behavior: Behavior,
    pins: BTreeMap<String, CpuId>,
    /// Calls and events in order.
    events: Vec<String>,
    no_answers: Vec<NoAnswer>,
    snapshots: Vec<Snapshot>,
    /// Bytes of the labels and annotations of each call.
    sizes: Vec<usize>,
    refuses_pods: bool,
}

fn size(texts: &BTreeMap<String, String>) -> usize {
    texts.iter().map(|(key, value)| key.len() + value.len()).sum()
}

/// A handler for a machine with 64 CPUs on two nodes. It assigns one CPU, and its node, to each container.
#[derive(Default)]
struct Allocator(Mutex<Records>);

impl Allocator {
    fn records(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap()
    }

    fn saw(&self, event: impl Into<String>) {
        self.records().events.push(event.into());
    }

    fn measure(&self, pod: &Pod, container: Option<&Container>) {
        let of_container = container.map_or(0, |container| size(&container.annotations));
        self.records().sizes.push(size(&pod.labels) + size(&pod.annotations) + of_container);
    }

    fn pin(&self, id: &str) -> Settings {
        let mut records = self.records();
        let taken: CpuSet = records.pins.values().copied().collect();
        let free = (&online().cpus - &taken).first().expect("a free CPU");
        settings(*records.pins.entry(id.to_owned()).or_insert(free))
    }

    fn no_answers(&self) -> Vec<(Call, Option<String>, NoAnswerReason)> {
        let name = |call: &NoAnswer| call.container.as_ref().map(|container| container.id.clone());
        self.records().no_answers.iter().map(|call| (call.call, name(call), call.reason.clone())).collect()
    }
}

fn online() -> Online {
    Online { cpus: "0-63".parse().unwrap(), mems: "0-1".parse().unwrap() }
}

fn settings(cpu: CpuId) -> Settings {
    let node = if cpu.0 < 32 { "0" } else { "1" };
    Settings { cpus: Some(CpuSet::single(cpu)), mems: Some(node.parse().unwrap()), ..Settings::default() }
}

fn update(container: &str, settings: Settings) -> Update {
    Update { container: container.to_owned(), settings, ignore_failure: false }
}

impl Handler for Allocator {
    fn online(&self) -> Online {
        online()
    }

    async fn synchronize(&self, snapshot: Snapshot) -> Vec<Update> {
        let behavior = self.records().behavior.clone();
        if let Behavior::Slow(time) = behavior {
            sleep(time).await;
        }
        let ids: Vec<String> = snapshot.containers.iter().map(|container| container.id.clone()).collect();
        self.records().snapshots.push(snapshot);
        ids.iter().map(|id| update(id, self.pin(id))).collect()
    }

    async fn run_pod(&self, pod: Pod) -> Result<(), Refusal> {
        self.measure(&pod, None);
        self.saw(format!("run {}", pod.name));
        if self.records().refuses_pods { Err(Refusal("no room for the pod".to_owned())) } else { Ok(()) }
    }

    async fn update_pod(&self, pod: Pod, resources: Resources) -> Result<(), Refusal> {
        self.saw(format!("update {} to {:?}", pod.name, resources.memory_limit));
        if self.records().refuses_pods { Err(Refusal("no room for more".to_owned())) } else { Ok(()) }
    }

    async fn create_container(&self, pod: Pod, container: Container) -> Result<Creation, Refusal> {
        self.measure(&pod, Some(&container));
        let id = container.id;
        let behavior = self.records().behavior.clone();
        self.saw(format!("create {id}"));
        match behavior {
            Behavior::Place => {}
            Behavior::Slow(time) => sleep(time).await,
            Behavior::Panic => panic!("as asked"),
            Behavior::Refuse(why) => return Err(Refusal(why)),
            Behavior::Answer(creation) => return Ok(creation),
        }
        Ok(Creation { settings: self.pin(&id), memory_policy: None, updates: Vec::new() })
    }

    async fn update_container(
        &self,
        pod: Pod,
        container: Container,
        requested: Resources,
    ) -> Result<Vec<Update>, Refusal> {
        self.measure(&pod, Some(&container));
        self.saw(format!("update {} to {:?}", container.id, requested.cpu_shares));
        let behavior = self.records().behavior.clone();
        match behavior {
            Behavior::Refuse(why) => Err(Refusal(why)),
            _ => Ok(vec![update(&container.id, self.pin(&container.id))]),
        }
    }

    async fn stop_container(&self, pod: Pod, container: Container) -> Vec<Update> {
        self.measure(&pod, Some(&container));
        self.saw(format!("stop {}", container.id));
        self.records().pins.remove(&container.id);
        Vec::new()
    }

    async fn event(&self, event: Event) {
        match &event {
            Event::Pod(_, pod) => self.measure(pod, None),
            Event::Container(_, pod, container) => self.measure(pod, Some(container)),
        }
        self.saw(match event {
            Event::Pod(what, pod) => format!("pod {what:?} {}", pod.name),
            Event::Container(what, pod, container) => {
                format!("container {what:?} {}/{} pid {:?}", pod.name, container.id, container.pid)
            }
        });
    }

    fn no_answer(&self, call: NoAnswer) {
        self.records().no_answers.push(call);
    }
}

/// Waits for a state. The timeout takes no real time, because a paused clock advances while all tasks are idle.
async fn wait(status: &watch::Receiver<Status>, is: impl FnMut(&Status) -> bool) -> Status {
    let mut following = status.clone();
    let reached = timeout(Duration::from_mins(10), following.wait_for(is)).await.map(Result::unwrap);
    let Ok(status) = reached else { panic!("the state did not come: {:?}", status.borrow()) };
    status.clone()
}

async fn disconnected_why(status: &watch::Receiver<Status>) -> Arc<Disconnect> {
    wait(status, |status| status.last_disconnect.is_some()).await.last_disconnect.unwrap()
}

/// A runtime and a connected plugin.
struct Rig {
    runtime: FakeRuntime,
    allocator: Arc<Allocator>,
    status: watch::Receiver<Status>,
    shutdown: CancellationToken,
    task: JoinHandle<()>,
}

impl Rig {
    async fn new(config: FakeRuntimeConfig) -> Self {
        let rig = Self::on(&FakeRuntime::new(config), Options::default());
        rig.connected().await;
        rig
    }

    /// Does not wait for the connection.
    fn on(runtime: &FakeRuntime, options: Options) -> Self {
        Self::through(runtime, options, runtime.connector())
    }

    fn through<C>(runtime: &FakeRuntime, options: Options, connect: C) -> Self
    where
        C: FnMut() -> Ready<io::Result<DuplexStream>> + Send + 'static,
    {
        let allocator = Arc::new(Allocator::default());
        let plugin = Plugin::new(options, Arc::clone(&allocator));
        let status = plugin.status();
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(plugin.run_with(connect, shutdown.clone()));
        Self { runtime: runtime.clone(), allocator, status, shutdown, task }
    }

    async fn is(&self, phase: Phase) {
        wait(&self.status, |status| status.phase == phase).await;
    }

    async fn connected(&self) {
        self.is(Phase::Connected).await;
    }

    /// Waits until the plugin is connected, after more than `connections` connections in total.
    async fn connected_again(&self, connections: u64) {
        wait(&self.status, |now| now.connections > connections && now.phase == Phase::Connected).await;
    }

    async fn disconnected_why(&self) -> Arc<Disconnect> {
        disconnected_why(&self.status).await
    }

    fn behavior(&self, behavior: Behavior) {
        self.allocator.records().behavior = behavior;
    }

    fn pins(&self, id: &str) -> (String, String) {
        pins(&self.runtime, id)
    }
}

fn pins(runtime: &FakeRuntime, id: &str) -> (String, String) {
    let resources = runtime.container(id).unwrap_or_else(|| panic!("{id} exists")).resources;
    (
        resources.cpus.as_ref().map(CpuSet::to_string).unwrap_or_default(),
        resources.mems.as_ref().map(NodeSet::to_string).unwrap_or_default(),
    )
}

fn pinned(cpus: &str, mems: &str) -> (String, String) {
    (cpus.to_owned(), mems.to_owned())
}

fn pod(id: &str) -> PodSpec {
    PodSpec {
        id: id.to_owned(),
        name: format!("name-{id}"),
        namespace: "default".to_owned(),
        uid: "0f2bd7cf-3ba1-4f26-a0a6-3b8a6d5c6b55".to_owned(),
        cgroup_parent: "/kubepods/pod0f2bd7cf-3ba1-4f26-a0a6-3b8a6d5c6b55".to_owned(),
        ..PodSpec::default()
    }
}

fn container(id: &str) -> ContainerSpec {
    ContainerSpec {
        id: id.to_owned(),
        pod_id: "p1".to_owned(),
        name: "main".to_owned(),
        cgroups_path: format!("kubepods-pod0f2bd7cf_3ba1_4f26_a0a6_3b8a6d5c6b55.slice:cri-containerd:{id}"),
        cpu_shares: Some(512),
        memory_limit: Some(Bytes::mib(256)),
        hugepage_limits: vec![("2MB".to_owned(), 4 << 20)],
        ..ContainerSpec::default()
    }
}

#[tokio::test(start_paused = true)]
async fn all_runtimes_report_lifecycle() {
    for (config, nri, events) in [
        (FakeRuntimeConfig::containerd_1_7(online()), NriVersion::new(0, 6, 1), 0x7ff),
        (FakeRuntimeConfig::containerd_2_1(online()), NriVersion::new(0, 8, 0), 0x7ff),
        (FakeRuntimeConfig::containerd_2_3(online()), NriVersion::new(0, 12, 0), 0x1fff),
    ] {
        let version = config.version.clone();
        let rig = Rig::new(config).await;
        let status = rig.status.borrow().clone();
        let runtime = status.runtime.unwrap();
        assert_eq!((runtime.name.as_str(), &runtime.version), ("containerd", &version));
        assert_eq!((runtime.nri_version, runtime.events), (Some(nri), EventMask(events)));
        assert_eq!(runtime.request_timeout, Duration::from_secs(2));
        assert_eq!((status.connections, status.disconnects), (1, 0));

        rig.runtime.run_pod(&pod("p1")).await.unwrap();
        let created = rig.runtime.create_container(&container("c1")).await.unwrap();
        assert_eq!(rig.pins("c1"), pinned("0", "0"));
        assert_eq!(created.state, ContainerState::Created);
        assert_eq!(
            created.cgroup.as_deref(),
            Some(
                "/kubepods.slice/kubepods-pod0f2bd7cf_3ba1_4f26_a0a6_3b8a6d5c6b55.slice/cri-containerd-c1.scope"
            )
        );
        rig.runtime.start_container("c1").await.unwrap();
        rig.runtime.remove_pod("p1").await.unwrap();
        assert_eq!(
            rig.allocator.records().events,
            [
                "run name-p1",
                "create c1",
                "container Created name-p1/c1 pid None",
                "container Starting name-p1/c1 pid Some(1000)",
                "container Started name-p1/c1 pid Some(1000)",
                "stop c1",
                "container Removed name-p1/c1 pid Some(1000)",
                "pod Stopped name-p1",
                "pod Removed name-p1",
            ],
            "{version}"
        );
        assert_eq!(rig.allocator.no_answers(), []);
        assert_eq!(rig.runtime.log(), ["plugin 90-numaward synchronized"]);
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_fails_only_creation() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.behavior(Behavior::Refuse("memory on node 1: 8Gi requested, 2Gi free".to_owned()));
    let error = rig.runtime.create_container(&container("c1")).await.unwrap_err();
    assert_eq!(
        error,
        "failed to get NRI adjustment for container: rpc error: code = 9 desc = \
         memory on node 1: 8Gi requested, 2Gi free"
    );
    assert_eq!(rig.runtime.container("c1"), None);
    rig.behavior(Behavior::Place);
    rig.runtime.create_container(&container("c2")).await.unwrap();
    assert_eq!(rig.pins("c2"), pinned("0", "0"));
    let events = rig.allocator.records().events.clone();
    assert_eq!(
        events[1..4],
        ["create c1", "stop c1", "container Removed name-p1/c1 pid None"],
        "the undo is reported"
    );
    assert_eq!(rig.allocator.no_answers(), []);

    rig.allocator.records().refuses_pods = true;
    let error = rig.runtime.run_pod(&pod("p2")).await.unwrap_err();
    assert!(error.ends_with("desc = no room for the pod"), "{error}");
    rig.is(Phase::Connected).await;
}

#[tokio::test(start_paused = true)]
async fn refuses_pod_changes() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_3(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.runtime.update_pod("p1", None, Bytes::mib(1)).await.unwrap();
    rig.allocator.records().refuses_pods = true;
    let error = rig.runtime.update_pod("p1", None, Bytes::gib(1)).await.unwrap_err();
    assert!(error.contains("no room for more"), "{error}");
    let events = rig.allocator.records().events.clone();
    assert_eq!(
        events[1..],
        [
            "update name-p1 to Some(At(Bytes(1048576)))",
            "pod Updated name-p1",
            "update name-p1 to Some(At(Bytes(1073741824)))"
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn late_handler_keeps_connection() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.behavior(Behavior::Slow(Duration::from_hours(1)));
    rig.runtime.create_container(&container("c1")).await.unwrap();
    assert_eq!(rig.pins("c1"), pinned("", ""));
    assert_eq!(
        rig.allocator.no_answers(),
        [(Call::CreateContainer, Some("c1".to_owned()), NoAnswerReason::Late(Duration::from_millis(1500)))]
    );
    assert!(rig.allocator.records().pins.is_empty(), "the handler's future was dropped");

    // An update in the next answer pins the container.
    let updates = vec![update("c1", rig.allocator.pin("c1"))];
    rig.behavior(Behavior::Answer(Creation { settings: Settings::default(), memory_policy: None, updates }));
    rig.runtime.create_container(&container("c2")).await.unwrap();
    assert_eq!(rig.pins("c1"), pinned("0", "0"));
    assert_eq!(rig.status.borrow().disconnects, 0);
}

#[tokio::test(start_paused = true)]
async fn answers_before_shorter_deadline() {
    for (request_timeout, late) in [(1200, 700), (600, 300), (20_000, 1500)] {
        let request_timeout = Duration::from_millis(request_timeout);
        let rig =
            Rig::new(FakeRuntimeConfig { request_timeout, ..FakeRuntimeConfig::containerd_2_1(online()) })
                .await;
        rig.runtime.run_pod(&pod("p1")).await.unwrap();
        rig.behavior(Behavior::Slow(Duration::from_hours(1)));
        rig.runtime.create_container(&container("c1")).await.unwrap();
        let (_, _, reason) = rig.allocator.no_answers().remove(0);
        assert_eq!(reason, NoAnswerReason::Late(Duration::from_millis(late)), "{request_timeout:?}");
        assert_eq!(rig.status.borrow().disconnects, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn handler_panic_keeps_connection() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.behavior(Behavior::Panic);
    rig.runtime.create_container(&container("c1")).await.unwrap();
    rig.behavior(Behavior::Place);
    rig.runtime.create_container(&container("c2")).await.unwrap();
    assert_eq!((rig.pins("c1"), rig.pins("c2")), (pinned("", ""), pinned("0", "0")));
    let reasons: Vec<_> = rig.allocator.no_answers().into_iter().map(|(_, _, reason)| reason).collect();
    assert_eq!(reasons, [NoAnswerReason::HandlerPanicked]);
}

/// A handler that blocks its thread until a message arrives.
struct Blocking {
    until: Mutex<mpsc::Receiver<()>>,
    no_answers: Mutex<Vec<NoAnswerReason>>,
}

impl Handler for Blocking {
    fn online(&self) -> Online {
        online()
    }
    async fn synchronize(&self, _: Snapshot) -> Vec<Update> {
        Vec::new()
    }
    async fn run_pod(&self, _: Pod) -> Result<(), Refusal> {
        Ok(())
    }
    async fn update_pod(&self, _: Pod, _: Resources) -> Result<(), Refusal> {
        Ok(())
    }
    async fn create_container(&self, _: Pod, _: Container) -> Result<Creation, Refusal> {
        self.until.lock().unwrap().recv_timeout(Duration::from_mins(1)).unwrap();
        Ok(Creation { settings: settings(CpuId(0)), memory_policy: None, updates: Vec::new() })
    }
    async fn update_container(&self, _: Pod, _: Container, _: Resources) -> Result<Vec<Update>, Refusal> {
        Ok(Vec::new())
    }
    async fn stop_container(&self, _: Pod, _: Container) -> Vec<Update> {
        Vec::new()
    }
    async fn event(&self, _: Event) {}
    fn no_answer(&self, call: NoAnswer) {
        self.no_answers.lock().unwrap().push(call.reason);
    }
}

/// In real time: the handler is released only after the answer was sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn answers_despite_blocked_handler() {
    let (release, until) = mpsc::channel();
    let handler = Arc::new(Blocking { until: Mutex::new(until), no_answers: Mutex::default() });
    let runtime = FakeRuntime::new(FakeRuntimeConfig {
        request_timeout: Duration::from_mins(10),
        ..FakeRuntimeConfig::containerd_2_1(online())
    });
    let options = Options { answer_within: Duration::from_millis(20), ..Options::default() };
    let plugin = Plugin::new(options, Arc::clone(&handler));
    tokio::spawn(plugin.run_with(runtime.connector(), CancellationToken::new()));
    assert!(runtime.has_plugins(&[PLUGIN]).await);
    runtime.run_pod(&pod("p1")).await.unwrap();
    runtime.create_container(&container("c1")).await.unwrap();
    assert_eq!(pins(&runtime, "c1"), pinned("", ""));
    assert!(matches!(handler.no_answers.lock().unwrap()[..], [NoAnswerReason::Late(_)]));
    release.send(()).unwrap();
}

/// Connects through a stream with a buffer of `buffer` bytes, which delays the plugin's messages while `slow` is true.
fn slow_stream(runtime: &FakeRuntime, slow: &Arc<AtomicBool>, buffer: usize) -> io::Result<DuplexStream> {
    let (mut from_runtime, mut to_runtime) = tokio::io::split(runtime.connect()?);
    let (plugin, between) = tokio::io::duplex(buffer);
    let (mut from_plugin, mut to_plugin) = tokio::io::split(between);
    let slow = Arc::clone(slow);
    let up = async move {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = from_plugin.read(&mut buffer).await {
            if slow.load(Ordering::Relaxed) {
                sleep(Duration::from_secs(1)).await;
            }
            if to_runtime.write_all(&buffer[..length]).await.is_err() {
                break;
            }
        }
    };
    tokio::spawn(async move {
        tokio::select! {
            () = up => {}
            _ = tokio::io::copy(&mut from_runtime, &mut to_plugin) => {}
        }
    });
    Ok(plugin)
}

#[tokio::test(start_paused = true)]
async fn late_answer_is_repaired_after_reconnect() {
    let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_1_7(online()));
    let slow = Arc::new(AtomicBool::new(false));
    let connect = {
        let (runtime, slow) = (runtime.clone(), Arc::clone(&slow));
        move || ready(slow_stream(&runtime, &slow, 1 << 16))
    };
    let rig = Rig::through(&runtime, Options::default(), connect);
    rig.connected().await;
    runtime.run_pod(&pod("p1")).await.unwrap();
    slow.store(true, Ordering::Relaxed);
    rig.behavior(Behavior::Slow(Duration::from_millis(1400)));
    runtime.create_container(&container("c1")).await.unwrap();
    slow.store(false, Ordering::Relaxed);
    rig.behavior(Behavior::Place);
    assert_eq!(rig.pins("c1"), pinned("", ""));
    let log = runtime.log();
    assert_eq!(
        log.last().unwrap(),
        "closing plugin 90-numaward, CreateContainer: there was no answer within 2s"
    );
    assert_eq!(rig.allocator.no_answers(), [], "the plugin cannot notice");
    rig.connected_again(1).await;
    assert!(runtime.has_plugins(&[PLUGIN]).await);
    assert_eq!(rig.pins("c1"), pinned("0", "0"));
    let status = rig.status.borrow().clone();
    assert_eq!((status.connections, status.disconnects), (2, 1));
    assert!(matches!(*status.last_disconnect.unwrap(), Disconnect::Closed(Phase::Connected)));
}

#[tokio::test(start_paused = true)]
async fn reports_unsent_answer() {
    for is_slow_handler in [true, false] {
        let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(online()));
        let slow = Arc::new(AtomicBool::new(false));
        let connect = {
            let (runtime, slow) = (runtime.clone(), Arc::clone(&slow));
            move || ready(slow_stream(&runtime, &slow, 16))
        };
        let rig = Rig::through(&runtime, Options::default(), connect);
        rig.connected().await;
        runtime.run_pod(&pod("p1")).await.unwrap();
        if is_slow_handler {
            rig.behavior(Behavior::Slow(Duration::from_secs(1)));
        } else {
            slow.store(true, Ordering::Relaxed);
        }
        let create = tokio::spawn({
            let runtime = runtime.clone();
            async move { runtime.create_container(&container("c1")).await }
        });
        sleep(Duration::from_millis(500)).await;
        assert_eq!(
            rig.allocator.records().pins.is_empty(),
            is_slow_handler,
            "only the fast handler has answered"
        );
        runtime.stop();
        create.await.unwrap().unwrap();
        rig.is(Phase::Disconnected).await;
        assert_eq!(
            rig.allocator.no_answers(),
            [(Call::CreateContainer, Some("c1".to_owned()), NoAnswerReason::ConnectionLost)]
        );
        assert_eq!(rig.pins("c1"), pinned("", ""));
        assert_eq!(rig.allocator.records().pins.is_empty(), is_slow_handler, "the handler was cancelled");
    }
}

#[tokio::test(start_paused = true)]
async fn dead_plugin_leaves_container_unpinned() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.behavior(Behavior::Slow(Duration::from_secs(1)));
    let create = tokio::spawn({
        let runtime = rig.runtime.clone();
        async move { runtime.create_container(&container("c1")).await }
    });
    sleep(Duration::from_millis(500)).await;
    rig.task.abort();
    create.await.unwrap().unwrap();
    assert_eq!(rig.pins("c1"), pinned("", ""));

    let next = Rig::on(&rig.runtime, Options::default());
    next.connected().await;
    assert_eq!(rig.pins("c1"), pinned("0", "0"), "the next plugin pins the container");
}

#[tokio::test(start_paused = true)]
async fn pins_running_containers_on_connect() {
    let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(online()));
    runtime.add_running(&pod("p1"), &container("c1"));
    runtime.add_running(&pod("p1"), &container("c2"));
    let rig = Rig::on(&runtime, Options::default());
    rig.connected().await;
    assert!(runtime.has_plugins(&[PLUGIN]).await);
    assert_eq!((rig.pins("c1"), rig.pins("c2")), (pinned("0", "0"), pinned("1", "0")));
    let snapshots = rig.allocator.records().snapshots.clone();
    let [snapshot] = &snapshots[..] else { panic!("one snapshot") };
    assert_eq!(snapshot.pods["p1"].name, "name-p1");
    assert_eq!(snapshot.containers[0].state, ContainerState::Running);
    assert_eq!(snapshot.containers[0].resources.memory_limit, Some(Limit::At(Bytes::mib(256))));
    assert_eq!(snapshot.unreadable, 0);
}

#[tokio::test(start_paused = true)]
async fn survives_runtime_restart() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    for id in ["c1", "c2"] {
        rig.runtime.create_container(&container(id)).await.unwrap();
        rig.runtime.start_container(id).await.unwrap();
    }
    rig.runtime.stop();
    rig.is(Phase::Disconnected).await;
    sleep(Duration::from_mins(1)).await;
    assert!(matches!(*rig.disconnected_why().await, Disconnect::Connect { .. }));
    // A container has started while the plugin was disconnected.
    rig.runtime.add_running(&pod("p1"), &container("c3"));
    rig.runtime.start();
    rig.connected_again(1).await;
    assert_eq!(
        [rig.pins("c1"), rig.pins("c2"), rig.pins("c3")],
        [pinned("0", "0"), pinned("1", "0"), pinned("2", "0")]
    );
    let status = rig.status.borrow().clone();
    assert_eq!((status.connections, status.disconnects), (2, 1));
    assert_eq!(rig.allocator.no_answers(), []);
}

#[tokio::test(start_paused = true)]
async fn stable_connection_resets_delays() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    for (connections, held, at_most) in [
        // A failure after the first connection, one after a stable connection, and one right after a connection.
        (1, Duration::from_secs(20), Duration::from_millis(100)),
        (2, Duration::from_secs(20), Duration::from_millis(100)),
        (3, Duration::ZERO, Duration::from_millis(200)),
    ] {
        sleep(held).await;
        let began = Instant::now();
        rig.runtime.stop();
        rig.is(Phase::Disconnected).await;
        rig.runtime.start();
        rig.connected_again(connections).await;
        assert!(began.elapsed() <= at_most, "{:?} to the connection after {connections}", began.elapsed());
    }
    rig.runtime.stop();
    sleep(Duration::from_mins(1)).await;
    rig.runtime.start();
    let began = Instant::now();
    rig.connected_again(4).await;
    assert!(began.elapsed() <= Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn accepts_snapshot_in_parts() {
    let runtime = FakeRuntime::new(FakeRuntimeConfig {
        message_limit: 2000,
        ..FakeRuntimeConfig::containerd_2_1(online())
    });
    for i in 0..60 {
        runtime.add_running(&pod(&format!("p{i}")), &container(&format!("c{i:02}")));
    }
    runtime.add_running(&pod("p1"), &ContainerSpec { name: "in p1".to_owned(), ..container("last") });
    let rig = Rig::on(&runtime, Options::default());
    rig.connected().await;
    let snapshots = rig.allocator.records().snapshots.clone();
    let [snapshot] = &snapshots[..] else { panic!("the handler is asked once") };
    assert_eq!((snapshot.pods.len(), snapshot.containers.len()), (60, 61));
    let all: CpuSet = rig.allocator.records().pins.values().copied().collect();
    assert_eq!(all.len(), 61);
    assert!(runtime.has_plugins(&[PLUGIN]).await);
    assert_eq!(rig.pins("last"), pinned("60", "1"));
}

/// Encodes a field of type bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut encoded = vec![number << 3 | 2];
    prost::encode_length_delimiter(bytes.len(), &mut encoded).unwrap();
    encoded.extend_from_slice(bytes);
    encoded
}

/// Tenants choose the size of their pods' environments, labels and annotations. Large ones must not prevent the synchronization.
#[tokio::test(start_paused = true)]
async fn synchronizes_pods_of_any_size() {
    const OBJECTS: u8 = 40;
    const MIB: usize = 1 << 20;
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.allocator.records().snapshots.clear();
    let text = |number: u8, key: &str| {
        field(number, &[field(1, key.as_bytes()), field(2, &vec![b'x'; MIB])].concat())
    };
    for number in 0..OBJECTS {
        let id = field(1, &[b'a' + number / 10, b'0' + number % 10]);
        // The large texts are labels, annotations, the environment of a container, and its annotations.
        let asked = field(6, &[field(1, b"numaward.io/placement"), field(2, b"shared")].concat());
        let labels = field(5, &[field(1, b"app"), field(2, b"db")].concat());
        let pod =
            [&id[..], &labels, &text(5, "large"), &text(6, "z.numaward.io/large"), &text(6, "other"), &asked]
                .concat();
        let container = [&id[..], &field(9, &vec![b'x'; MIB]), &text(6, "large")].concat();
        let more = [3 << 3, u8::from(number + 1 < OBJECTS)];
        let first = [field(1, &pod), vec![3 << 3, 1]].concat();
        rig.runtime.call_raw(PLUGIN, SERVICE, "Synchronize", &first).await.unwrap();
        let second = [field(2, &container), more.to_vec()].concat();
        rig.runtime.call_raw(PLUGIN, SERVICE, "Synchronize", &second).await.unwrap();
    }
    let snapshot = rig.allocator.records().snapshots.pop().unwrap();
    let objects = usize::from(OBJECTS);
    assert_eq!((snapshot.pods.len(), snapshot.containers.len(), snapshot.unreadable), (objects, objects, 0));
    for pod in snapshot.pods.values() {
        assert_eq!(pod.annotations["numaward.io/placement"], "shared");
        assert_eq!(pod.labels["app"], "db");
        assert_eq!(pod.ignored, 1, "the large label");
        assert!(size(&pod.labels) + size(&pod.annotations) < 128 << 10);
    }
    assert!(snapshot.containers.iter().all(|container| size(&container.annotations) == 0));
}

/// Each call has the pod and the container again.
#[tokio::test(start_paused = true)]
async fn calls_keep_no_large_texts() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    let text = |number: u8, key: &str| {
        field(number, &[field(1, key.as_bytes()), field(2, &vec![b'x'; 512 << 10])].concat())
    };
    let texts = |number: u8| ["a", "z.numaward.io/large"].map(|key| text(number, key)).concat();
    let pod = [field(1, b"p"), texts(5), texts(6)].concat();
    let container = [field(1, b"c"), texts(6), field(9, &vec![b'x'; 512 << 10])].concat();
    let both = [field(1, &pod), field(2, &container)].concat();
    for method in ["RunPodSandbox", "CreateContainer", "UpdateContainer", "StopContainer", "StartContainer"] {
        rig.allocator.records().sizes.clear();
        rig.runtime.call_raw(PLUGIN, SERVICE, method, &both).await.unwrap();
        let sizes = rig.allocator.records().sizes.clone();
        assert!(!sizes.is_empty(), "{method} does not reach the handler");
        assert!(sizes.iter().all(|size| *size < 256 << 10), "{method}: {sizes:?} bytes");
    }
}

#[tokio::test(start_paused = true)]
async fn skips_unreadable_pods() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    // Field 1: a pod with one invalid byte. Field 2: likewise a container, and a container with the id "x".
    let payload = b"\x0a\x01\xff\x12\x01\xff\x12\x03\x0a\x01x";
    rig.runtime.call_raw(PLUGIN, SERVICE, "Synchronize", payload).await.unwrap();
    let snapshot = rig.allocator.records().snapshots.pop().unwrap();
    assert_eq!((snapshot.pods.len(), snapshot.unreadable), (0, 2));
    assert_eq!(snapshot.containers[0].id, "x");

    let many = [0x12, 0].repeat(70_000);
    rig.runtime.call_raw(PLUGIN, SERVICE, "Synchronize", &many).await.unwrap();
    let snapshot = rig.allocator.records().snapshots.pop().unwrap();
    assert_eq!((snapshot.containers.len(), snapshot.unreadable), (1 << 16, 70_000 - (1 << 16)));
}

#[tokio::test(start_paused = true)]
async fn parts_share_one_deadline() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    // Field 3: more parts follow.
    rig.runtime.call_raw(PLUGIN, SERVICE, "Synchronize", &[0x18, 0x01]).await.unwrap();
    sleep(Duration::from_millis(1200)).await;
    rig.behavior(Behavior::Slow(Duration::from_secs(1)));
    rig.runtime.call_raw(PLUGIN, SERVICE, "Synchronize", &[]).await.unwrap();
    let late = NoAnswerReason::Late(Duration::from_millis(300));
    assert_eq!(rig.allocator.no_answers(), [(Call::Synchronize, None, late)]);
}

/// A snapshot is compared even if its answer is late: the runtime sends no other one. What happens later comes later.
#[tokio::test(start_paused = true)]
async fn late_comparison_is_completed() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.allocator.records().snapshots.clear();
    rig.behavior(Behavior::Slow(Duration::from_secs(2)));
    // Field 2: a container with the id "x".
    rig.runtime.call_raw(PLUGIN, SERVICE, "Synchronize", b"\x12\x03\x0a\x01x").await.unwrap();
    assert!(matches!(rig.allocator.no_answers()[..], [(Call::Synchronize, None, NoAnswerReason::Late(_))]));
    assert!(rig.allocator.records().snapshots.is_empty());
    rig.behavior(Behavior::Place);
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    let snapshots: Vec<_> =
        rig.allocator.records().snapshots.iter().map(|found| found.containers.len()).collect();
    assert_eq!(snapshots, [1], "the pod waits for it");
    assert_eq!(rig.allocator.no_answers().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn messages_may_exceed_read_buffer() {
    let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(online()));
    let pin = |i: u32| settings(CpuId(i % 64));
    let id = |i: u32| format!("container-with-a-long-id-0123456789abcdef0123456789abcdef-{i:03}");
    runtime.add_running(&pod("p1"), &ContainerSpec { cpus: "63".to_owned(), ..container("old") });
    for i in 0..60 {
        runtime.add_running(&pod("p1"), &container(&id(i)));
    }
    let rig = Rig::on(&runtime, Options::default());
    rig.connected().await;
    assert!(runtime.has_plugins(&[PLUGIN]).await);
    assert_eq!(runtime.updates_received(), 61, "as the answer to Synchronize");

    for i in 60..100 {
        runtime.add_running(&pod("p1"), &container(&id(i)));
    }
    let updates: Vec<Update> = (0..100).map(|i| update(&id(i), pin(i))).collect();
    rig.behavior(Behavior::Answer(Creation {
        settings: pin(5),
        memory_policy: None,
        updates: updates.clone(),
    }));
    // The annotation makes the request span several frames.
    let annotations = BTreeMap::from([("long".to_owned(), "x".repeat(20_000))]);
    runtime.create_container(&ContainerSpec { annotations, ..container("new") }).await.unwrap();
    assert_eq!(runtime.updates_received(), 161, "as the answer to a creation");
    assert_eq!(rig.pins(&id(99)), pinned("35", "1"));
    assert_eq!(runtime.container("new").unwrap().annotations["long"].len(), 20_000);
    assert_eq!(runtime.log(), ["plugin 90-numaward synchronized"]);
    assert_eq!(rig.allocator.no_answers(), []);
}

#[tokio::test(start_paused = true)]
async fn second_pinning_plugin_may_yield() {
    for when_pinned in [PinnedPolicy::Override, PinnedPolicy::Yield] {
        let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
        let plugin = Nri {
            plugin_name: "second".parse().unwrap(),
            plugin_index: "95".parse().unwrap(),
            when_pinned,
            ..Nri::default()
        };
        let options = Options { plugin, ..Options::default() };
        let second = Rig::on(&rig.runtime, options);
        assert!(rig.runtime.has_plugins(&[PLUGIN, "95-second"]).await);
        rig.runtime.run_pod(&pod("p1")).await.unwrap();
        let created = rig.runtime.create_container(&container("c1")).await;
        if when_pinned == PinnedPolicy::Override {
            let error = created.unwrap_err();
            assert!(
                error.contains(r#"plugins "95-second" and "90-numaward" both tried to set CPU pinning"#),
                "{error}"
            );
        } else {
            created.unwrap();
            assert_eq!(rig.pins("c1"), pinned("0", "0"));
            assert_eq!(
                second.allocator.no_answers(),
                [(Call::CreateContainer, Some("c1".to_owned()), NoAnswerReason::PinnedByOther)]
            );
            assert!(!second.allocator.records().events.contains(&"create c1".to_owned()), "not asked");
        }
        assert_eq!(rig.allocator.no_answers(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn concurrent_creations_share_no_cpu() {
    for serial in [true, false] {
        let rig = Rig::new(FakeRuntimeConfig { serial, ..FakeRuntimeConfig::containerd_2_1(online()) }).await;
        rig.runtime.run_pod(&pod("p1")).await.unwrap();
        // Calls overlap if they are not serialized, and none is late if they are.
        rig.behavior(Behavior::Slow(Duration::from_millis(10)));
        let creations: Vec<_> = (0..40)
            .map(|i| {
                let runtime = rig.runtime.clone();
                tokio::spawn(async move { runtime.create_container(&container(&format!("c{i}"))).await })
            })
            .collect();
        let mut cpus = CpuSet::new();
        for creation in creations {
            let resources = creation.await.unwrap().unwrap().resources;
            let cpu = resources.cpus.unwrap();
            assert!(!cpus.intersects(&cpu), "{cpu} twice");
            cpus = &cpus | &cpu;
        }
        assert_eq!(cpus, "0-39".parse().unwrap());
        assert_eq!(rig.allocator.no_answers(), []);
    }
}

#[tokio::test(start_paused = true)]
async fn pin_survives_kubelet_update() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.runtime.create_container(&container("c1")).await.unwrap();
    let to = ContainerSpec { cpus: "0-3".to_owned(), cpu_shares: Some(200), ..ContainerSpec::default() };
    let updated = rig.runtime.update_container("c1", &to).await.unwrap().resources;
    assert_eq!(updated.cpus, Some("0".parse().unwrap()));
    assert_eq!(updated.cpu_shares, Some(200));
    assert_eq!(updated.hugepage_limits.len(), 1);
    rig.behavior(Behavior::Refuse("no room to grow".to_owned()));
    let error = rig.runtime.update_container("c1", &to).await.unwrap_err();
    assert!(error.contains("no room to grow"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn full_sets_remove_pin() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.runtime.create_container(&container("c1")).await.unwrap();
    let answer = async |id: &str, settings| {
        let updates = vec![update("c1", settings)];
        rig.behavior(Behavior::Answer(Creation {
            settings: Settings::default(),
            memory_policy: None,
            updates,
        }));
        rig.runtime.create_container(&container(id)).await.unwrap();
    };
    let only_memory = Settings { memory_min: Some(Limit::At(Bytes::mib(1))), ..Settings::default() };
    answer("c2", only_memory).await;
    assert_eq!(rig.pins("c1"), pinned("0", "0"), "unset fields are not changed");
    answer("c3", Settings::unpinned(&online())).await;
    assert_eq!(rig.pins("c1"), pinned("0-63", "0-1"));
    let unified = rig.runtime.container("c1").unwrap().resources.unified;
    assert_eq!(unified["memory.min"], "1048576");
}

#[tokio::test(start_paused = true)]
async fn invalid_settings_are_not_sent() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    let of = |mems: &str| Settings { mems: Some(mems.parse().unwrap()), ..Settings::default() };
    let policy = |nodes: &str| Some((MemoryPolicy::Bind, nodes.parse().unwrap()));
    for (creation, problem) in [
        (Creation { settings: of("7"), memory_policy: None, updates: vec![] }, "nodes 7 that have no memory"),
        (Creation { settings: of(""), memory_policy: None, updates: vec![] }, "cpuset.mems is empty"),
        (
            Creation { settings: of("0"), memory_policy: None, updates: vec![update("c1", of("0"))] },
            "c1 is updated while it is being created",
        ),
        (
            Creation {
                settings: of("0"),
                memory_policy: None,
                updates: vec![update("x", of("0")), update("x", of("1"))],
            },
            "x is updated twice",
        ),
        (
            Creation { settings: of("0"), memory_policy: None, updates: vec![update("x", of("0,9"))] },
            "nodes 9",
        ),
        (
            Creation { settings: of("0"), memory_policy: policy("1"), updates: vec![] },
            "the memory policy is over nodes 1, none of which the container may use",
        ),
        (
            Creation { settings: Settings::default(), memory_policy: policy(""), updates: vec![] },
            "the node set of the memory policy is empty",
        ),
    ] {
        rig.behavior(Behavior::Answer(creation));
        rig.runtime.create_container(&container("c1")).await.unwrap();
        assert_eq!(rig.pins("c1"), pinned("", ""));
        rig.runtime.start_container("c1").await.unwrap();
        let (call, id, reason) = rig.allocator.no_answers().pop().unwrap();
        assert_eq!((call, id.as_deref()), (Call::CreateContainer, Some("c1")));
        assert!(reason.to_string().contains(problem), "{reason}");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_update_does_not_fail_creation() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    for id in ["c1", "c2"] {
        rig.runtime.create_container(&container(id)).await.unwrap();
    }
    rig.runtime.fail_updates_of("c2");
    let updates = ["c1", "c2", "unknown"].map(|id| update(id, settings(CpuId(40)))).to_vec();
    rig.behavior(Behavior::Answer(Creation { settings: settings(CpuId(2)), memory_policy: None, updates }));
    rig.runtime.create_container(&container("c3")).await.unwrap();
    assert_eq!(
        [rig.pins("c1"), rig.pins("c2"), rig.pins("c3")],
        [pinned("40", "1"), pinned("1", "0"), pinned("2", "0")]
    );
}

#[tokio::test(start_paused = true)]
async fn subscribes_to_basic_events_if_refused() {
    let rig = Rig::on(
        &FakeRuntime::new(FakeRuntimeConfig {
            events: EventMask::BASIC,
            ..FakeRuntimeConfig::containerd_2_3(online())
        }),
        Options::default(),
    );
    rig.connected().await;
    assert!(rig.runtime.log()[0].contains("invalid plugin events: 0x1800"), "{:?}", rig.runtime.log());
    let status = rig.status.borrow().clone();
    assert_eq!(status.runtime.unwrap().events, EventMask::BASIC);
    assert!(matches!(*status.last_disconnect.unwrap(), Disconnect::Closed(Phase::Synchronizing)));
}

#[tokio::test(start_paused = true)]
async fn reconnects_after_garbage() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.runtime.create_container(&container("c1")).await.unwrap();
    let claim = |connection: u32, length: u32| [connection.to_be_bytes(), length.to_be_bytes()].concat();
    let frame = |payload: &[u8]| [&claim(1, u32::try_from(payload.len()).unwrap())[..], payload].concat();
    let mut connections = 1;
    for (bytes, why) in [
        (claim(1, u32::MAX), WireError::FrameTooLong { connection: 1, length: u32::MAX }),
        (claim(7, 5 << 20), WireError::FrameTooLong { connection: 7, length: 5 << 20 }),
        (frame(&[0xff; 10]), WireError::MessageTooLong { length: u32::MAX }),
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
            WireError::FrameTooLong { connection: 0x4854_5450, length: 0x2f31_2e31 },
        ),
    ] {
        rig.runtime.send_raw(PLUGIN, &bytes).await.unwrap();
        rig.connected_again(connections).await;
        connections += 1;
        let last = rig.disconnected_why().await;
        assert!(matches!(&*last, Disconnect::Wire(error) if *error == why), "{last}");
        assert!(rig.runtime.has_plugins(&[PLUGIN]).await);
        assert_eq!(rig.pins("c1"), pinned("0", "0"));
    }
    // These frames are valid, so the connection is kept: an unknown connection, an answer without a call, a message of an unused type,
    // and a request that cannot be decoded.
    for bytes in [
        [claim(9, 3), vec![1, 2, 3]].concat(),
        [claim(2, 10), vec![0, 0, 0, 0, 0, 0, 0, 99, 2, 0]].concat(),
        frame(&[0, 0, 0, 0, 0, 0, 0, 99, 3, 0]),
        frame(&[0, 0, 0, 1, 0, 0, 0, 99, 1, 0, 0xff]),
    ] {
        rig.runtime.send_raw(PLUGIN, &bytes).await.unwrap();
    }
    rig.runtime.create_container(&container("c2")).await.unwrap();
    assert_eq!(rig.pins("c2"), pinned("1", "0"));
    assert_eq!(rig.status.borrow().connections, connections);
}

#[tokio::test(start_paused = true)]
async fn answers_invalid_calls() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    let garbage = [0xff; 20];
    // A pod without an id, and no container.
    let incomplete = [0x0a, 0x00];
    for (service, method, payload, answer) in [
        (SERVICE, "FlyToTheMoon", &[][..], Err(r#"12 no method "FlyToTheMoon""#)),
        ("other.Service", "CreateContainer", &[], Err(r#"12 no service "other.Service""#)),
        (SERVICE, "Configure", &garbage, Err("3 the request could not be read")),
        (SERVICE, "Configure", &[], Err("9 this plugin is configured already")),
        (SERVICE, "Synchronize", &garbage, Err("3 the request could not be read")),
        (SERVICE, "ValidateContainerAdjustment", &garbage, Ok(())),
        (SERVICE, "Shutdown", &[], Ok(())),
        // An unknown event.
        (SERVICE, "StateChange", &[0x08, 0x63], Ok(())),
        (SERVICE, "CreateContainer", &garbage, Ok(())),
        (SERVICE, "CreateContainer", &incomplete, Ok(())),
        (SERVICE, "UpdateContainer", &incomplete, Ok(())),
        (SERVICE, "StopContainer", &incomplete, Ok(())),
        (SERVICE, "RunPodSandbox", &incomplete, Ok(())),
        (SERVICE, "UpdatePodSandbox", &garbage, Ok(())),
        (SERVICE, "RemoveContainer", &garbage, Ok(())),
        (SERVICE, "StateChange", &garbage, Ok(())),
    ] {
        let got = rig.runtime.call_raw(PLUGIN, service, method, payload).await;
        match (&got, answer) {
            (Ok(()), Ok(())) => {}
            (Err(got), Err(text)) if got.starts_with(text) => {}
            _ => panic!("{method}: {got:?} instead of {answer:?}"),
        }
    }
    let reported = rig.allocator.no_answers();
    assert_eq!(reported.len(), 8, "{reported:?}");
    assert!(reported.iter().all(|(_, _, reason)| matches!(reason, NoAnswerReason::Unreadable(_))));
    let calls: Vec<Call> = reported.iter().map(|&(call, _, _)| call).collect();
    assert_eq!(
        calls,
        [
            Call::CreateContainer,
            Call::CreateContainer,
            Call::UpdateContainer,
            Call::StopContainer,
            Call::RunPod,
            Call::UpdatePod,
            Call::Event,
            Call::Event
        ]
    );
    rig.connected().await;
}

#[tokio::test(start_paused = true)]
async fn silent_runtime_times_out() {
    let plugin = Plugin::new(Options::default(), Arc::new(Allocator::default()));
    let mut status = plugin.status();
    let (ours, _silent) = tokio::io::duplex(1 << 16);
    let mut streams = vec![ours];
    let connect = move || {
        let stream = streams.pop();
        async move {
            match stream {
                Some(stream) => Ok(stream),
                None => pending().await,
            }
        }
    };
    tokio::spawn(plugin.run_with(connect, CancellationToken::new()));
    let end = timeout(Duration::from_hours(3), status.wait_for(|now| now.last_disconnect.is_some())).await;
    let end = end.unwrap().unwrap().last_disconnect.clone().unwrap();
    assert_eq!(end.to_string(), "the runtime did not register the plugin: there was no answer within 7200s");
}

/// Starts a runtime whose lock is held by the creation of a container, for which another plugin takes this long.
async fn busy_runtime(time: Duration) -> (FakeRuntime, Rig, JoinHandle<Result<Container, String>>) {
    let runtime = FakeRuntime::new(FakeRuntimeConfig {
        request_timeout: Duration::from_hours(1),
        ..FakeRuntimeConfig::containerd_2_1(online())
    });
    let first = Rig::on(
        &runtime,
        Options {
            plugin: Nri { plugin_name: "first".parse().unwrap(), ..Nri::default() },
            answer_within: Duration::from_mins(50),
            ..Options::default()
        },
    );
    first.connected().await;
    runtime.run_pod(&pod("p1")).await.unwrap();
    first.behavior(Behavior::Slow(time));
    let create = tokio::spawn({
        let runtime = runtime.clone();
        async move { runtime.create_container(&container("c1")).await }
    });
    sleep(Duration::from_millis(10)).await;
    (runtime, first, create)
}

#[tokio::test(start_paused = true)]
async fn late_synchronize_is_awaited() {
    let (runtime, _first, create) = busy_runtime(Duration::from_secs(100)).await;
    let rig = Rig::on(&runtime, Options::default());
    create.await.unwrap().unwrap();
    // The registration that has waited is used: there was no second one.
    rig.connected().await;
    let status = rig.status.borrow().clone();
    assert!(status.connections == 1 && status.last_disconnect.is_none(), "{status:?}");
}

/// A daemon that is replaced during a long stop: its registration is still in the runtime, which accepts no further one.
#[tokio::test(start_paused = true)]
async fn second_registration_waits_in_one_connection() {
    let (runtime, _first, create) = busy_runtime(Duration::from_mins(10)).await;
    let replaced = Rig::on(&runtime, Options::default());
    replaced.is(Phase::Synchronizing).await;
    replaced.shutdown.cancel();
    replaced.task.await.unwrap();

    let attempts = Arc::new(AtomicUsize::new(0));
    let connect = {
        let (runtime, attempts) = (runtime.clone(), Arc::clone(&attempts));
        move || {
            attempts.fetch_add(1, Ordering::Relaxed);
            ready(runtime.connect())
        }
    };
    let rig = Rig::through(&runtime, Options::default(), connect);
    create.await.unwrap().unwrap();
    let released = Instant::now();
    wait(&rig.status, |status| status.phase == Phase::Connected).await;
    assert_eq!(attempts.load(Ordering::Relaxed), 1, "attempts that the runtime has to accept one by one");
    assert!(released.elapsed() < Duration::from_secs(1), "connected {:?} after the stop", released.elapsed());
}

#[tokio::test(start_paused = true)]
async fn answers_pending_calls_on_shutdown() {
    let rig = Rig::new(FakeRuntimeConfig::containerd_2_1(online())).await;
    rig.runtime.run_pod(&pod("p1")).await.unwrap();
    rig.behavior(Behavior::Slow(Duration::from_secs(1)));
    let create = tokio::spawn({
        let runtime = rig.runtime.clone();
        async move { runtime.create_container(&container("c1")).await }
    });
    sleep(Duration::from_millis(100)).await;
    rig.shutdown.cancel();
    create.await.unwrap().unwrap();
    assert_eq!(rig.pins("c1"), pinned("0", "0"));
    rig.task.await.unwrap();
    let status = rig.status.borrow().clone();
    assert_eq!(status.phase, Phase::Disconnected);
    assert!(matches!(*status.last_disconnect.unwrap(), Disconnect::Stopped));
}

/// In real time, with a real socket.
#[tokio::test]
async fn finds_late_socket() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nri.sock");
    let allocator = Arc::new(Allocator::default());
    let milliseconds = Duration::from_millis;
    let options = Options {
        plugin: Nri { socket: socket.clone(), ..Nri::default() },
        backoff: Options::default().backoff.with_min_delay(milliseconds(1)).with_max_delay(milliseconds(20)),
        ..Options::default()
    };
    let plugin = Plugin::new(options, Arc::clone(&allocator));
    let status = plugin.status();
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(plugin.run(shutdown.clone()));
    let why = disconnected_why(&status).await.to_string();
    assert!(why.contains(&*socket.to_string_lossy()) && why.contains("disable = false"), "{why}");

    let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(online()));
    runtime.listen(&socket).unwrap();
    assert!(runtime.has_plugins(&[PLUGIN]).await);
    runtime.run_pod(&pod("p1")).await.unwrap();
    runtime.create_container(&container("c1")).await.unwrap();
    assert_eq!(pins(&runtime, "c1"), pinned("0", "0"));
    shutdown.cancel();
    task.await.unwrap();
}
