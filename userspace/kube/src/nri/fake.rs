//! A container runtime with NRI, for tests.
//!
//! It behaves towards plugins like containerd:
//!
//! - A frame that does not fit the read buffer closes the connection (4096 bytes, see the module `wire`), and so do more than 256
//!   unread frames.
//! - If a call takes longer than [`FakeRuntimeConfig::request_timeout`], the plugin is disconnected and the operation continues without
//!   it.
//! - A plugin that subscribes to an unknown event is disconnected.
//! - The running pods and containers are reported in parts of at most [`FakeRuntimeConfig::message_limit`] bytes. The plugin must
//!   acknowledge each part except the last one without updates.
//! - Plugins are called in the order of their index. Each one receives the settings of the previous ones. If two plugins set the same
//!   field, the creation fails.
//! - One lock serializes all calls, and a plugin must not call `UpdateContainers` during a call.
//! - An empty set of CPUs or nodes means "unchanged". Sets that the kernel would refuse fail when the container starts.
//! - Messages to the plugin are sent in frames of at most 4096 bytes.
//!
//! It uses Tokio's clock, so tests can pause the time. Connections are in memory, unless [`FakeRuntime::listen`] is used.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use numaward_topology::{Bytes, CpuSet, NodeSet};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, DuplexStream},
    net::UnixListener,
    sync::{Mutex as Lock, mpsc, watch},
    time::Instant,
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Code;

use super::{
    EventMask, NriVersion, convert,
    link::{CallError, Link},
    messages::{
        self, ContainerRequest, LinuxResources, PLUGIN_SERVICE, RUNTIME_SERVICE, TtrpcRequest, TtrpcResponse,
        Updates,
    },
    status,
    types::{Container, ContainerState, Online},
    version::EventKind,
    wire::{self, Connection, MAX_FRAME, MAX_MESSAGE, MESSAGE_HEADER, Message, TooLong},
};

/// Size of the runtime's read buffer in bytes.
const READ_BUFFER: usize = 4096;
/// Maximum number of unread frames of one connection.
const MAX_UNREAD_FRAMES: usize = 256;
/// Size of the buffer of a stream in memory, in bytes.
const STREAM_BUFFER: usize = 64 << 10;

/// Identity, timeouts and features of the runtime.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "runtimes differ in each of them")]
pub struct FakeRuntimeConfig {
    pub name: String,
    pub version: String,
    /// Version of NRI, if the runtime reports it.
    pub nri_version: Option<NriVersion>,
    /// Supported events.
    pub events: EventMask,
    /// True if each event has its own method (from NRI 0.12 on). False if events are sent as `StateChange`.
    pub dedicated_calls: bool,
    /// Time limit of a plugin's registration.
    pub registration_timeout: Duration,
    /// Time limit of an answer.
    pub request_timeout: Duration,
    /// True if the runtime reports its timeouts to the plugin.
    pub reports_timeouts: bool,
    /// Maximum size of a part of a `Synchronize` in bytes.
    pub message_limit: usize,
    /// True if `unified` resources (files of cgroup v2) are reported (from NRI 0.10 on).
    pub reports_unified: bool,
    /// True if calls are serialized, as in all real runtimes.
    pub serial: bool,
    /// CPUs and nodes that the kernel accepts.
    pub online: Online,
}

impl FakeRuntimeConfig {
    /// Returns the configuration of containerd 1.7.24: NRI 0.6.1, reports neither its version nor its timeouts.
    pub fn containerd_1_7(online: Online) -> Self {
        Self {
            name: "containerd".to_owned(),
            version: "1.7.24~ds1".to_owned(),
            nri_version: None,
            events: EventMask::BASIC,
            dedicated_calls: false,
            registration_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(2),
            reports_timeouts: false,
            message_limit: MAX_MESSAGE,
            reports_unified: false,
            serial: true,
            online,
        }
    }

    /// Returns the configuration of containerd 2.1.9: NRI 0.8.0.
    pub fn containerd_2_1(online: Online) -> Self {
        Self { version: "v2.1.9".to_owned(), reports_timeouts: true, ..Self::containerd_1_7(online) }
    }

    /// Returns the configuration of containerd 2.3.0: NRI 0.12.0, with all events, each of which has its own method.
    pub fn containerd_2_3(online: Online) -> Self {
        Self {
            version: "v2.3.0".to_owned(),
            nri_version: Some(NriVersion::new(0, 12, 0)),
            events: EventMask(0x3fff),
            dedicated_calls: true,
            reports_unified: true,
            ..Self::containerd_2_1(online)
        }
    }
}

/// A pod to run.
#[derive(Clone, Debug, Default)]
pub struct PodSpec {
    /// Id of the sandbox.
    pub id: String,
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    /// Handler of the pod's `RuntimeClass`.
    pub runtime_handler: String,
    /// Cgroup that the kubelet created for the pod.
    pub cgroup_parent: String,
}

/// A container to create.
#[derive(Clone, Debug, Default)]
pub struct ContainerSpec {
    pub id: String,
    /// Id of the pod's sandbox.
    pub pod_id: String,
    pub name: String,
    pub annotations: BTreeMap<String, String>,
    /// `linux.cgroupsPath` of the OCI specification.
    pub cgroups_path: String,
    /// `cpuset.cpus` that the kubelet requests; empty: none.
    pub cpus: String,
    /// `cpuset.mems` that the kubelet requests; empty: none.
    pub mems: String,
    pub cpu_shares: Option<u64>,
    /// CPU time in each 100 ms, in microseconds.
    pub cpu_quota: Option<i64>,
    pub memory_limit: Option<Bytes>,
    /// Limits on huge pages: page size such as `2MB`, and bytes.
    pub hugepage_limits: Vec<(String, u64)>,
    /// Files of cgroup v2 and their contents.
    pub unified: BTreeMap<String, String>,
    /// Names of devices by the Container Device Interface.
    pub cdi_devices: Vec<String>,
}

/// A container runtime in memory. Clones share it. It stops when the last one is dropped.
#[derive(Clone)]
pub struct FakeRuntime {
    inner: Arc<Inner>,
    _stops: Arc<DropGuard>,
}

struct Inner {
    config: FakeRuntimeConfig,
    /// Serializes calls to and from plugins.
    lock: Lock<()>,
    /// Serializes the handshakes, as in all real runtimes: a further connection is accepted after the end of the previous handshake.
    accepting: Lock<()>,
    state: Mutex<FakeRuntimeState>,
    /// Index and name of each synchronized plugin.
    names: watch::Sender<BTreeSet<String>>,
    stop: CancellationToken,
}

#[derive(Default)]
struct FakeRuntimeState {
    pods: BTreeMap<String, messages::PodSandbox>,
    containers: BTreeMap<String, messages::Container>,
    plugins: BTreeMap<String, Arc<Peer>>,
    connections: Vec<CancellationToken>,
    log: Vec<String>,
    is_stopped: bool,
    failing_updates: BTreeSet<String>,
    updates_received: usize,
    memory_policies: BTreeMap<String, messages::LinuxMemoryPolicy>,
    replies: Vec<(String, Duration)>,
}

/// A connected plugin.
struct Peer {
    /// Index and name.
    name: String,
    link: Arc<Link>,
    events: EventMask,
}

impl FakeRuntime {
    /// Creates a runtime without pods.
    pub fn new(config: FakeRuntimeConfig) -> Self {
        let stop = CancellationToken::new();
        let inner = Inner {
            config,
            lock: Lock::default(),
            accepting: Lock::default(),
            state: Mutex::default(),
            names: watch::Sender::default(),
            stop: stop.clone(),
        };
        Self { inner: Arc::new(inner), _stops: Arc::new(stop.drop_guard()) }
    }

    /// Connects a plugin in memory.
    pub fn connect(&self) -> io::Result<DuplexStream> {
        if self.inner.state.lock().is_stopped {
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused));
        }
        let (ours, theirs) = tokio::io::duplex(STREAM_BUFFER);
        self.inner.accept(ours);
        Ok(theirs)
    }

    /// Returns the argument of [`super::Plugin::run_with`] that connects to this runtime.
    pub fn connector(&self) -> impl FnMut() -> std::future::Ready<io::Result<DuplexStream>> + Send + use<> {
        let runtime = self.clone();
        move || std::future::ready(runtime.connect())
    }

    /// Accepts plugins at a socket until [`stop`](Self::stop).
    pub fn listen(&self, socket: &Path) -> io::Result<()> {
        let listener = UnixListener::bind(socket)?;
        let inner = Arc::clone(&self.inner);
        let ends = inner.stop.child_token();
        inner.state.lock().connections.push(ends.clone());
        tokio::spawn(ends.run_until_cancelled_owned(async move {
            while let Ok((stream, _)) = listener.accept().await {
                inner.accept(stream);
            }
        }));
        Ok(())
    }

    /// Stops the runtime: closes all connections and accepts no new ones. Containers keep running.
    pub fn stop(&self) {
        let mut state = self.inner.state.lock();
        state.is_stopped = true;
        state.connections.drain(..).for_each(|connection| connection.cancel());
        for peer in std::mem::take(&mut state.plugins).values() {
            peer.link.close();
        }
        drop(state);
        self.inner.names.send_modify(BTreeSet::clear);
    }

    /// Starts the runtime again.
    pub fn start(&self) {
        self.inner.state.lock().is_stopped = false;
    }

    /// Waits until exactly these plugins (such as `90-numaward`) are synchronized. Returns false after ten minutes.
    #[must_use]
    pub async fn has_plugins(&self, names: &[&str]) -> bool {
        let names: BTreeSet<String> = names.iter().map(|&name| name.to_owned()).collect();
        let mut now = self.inner.names.subscribe();
        let there = tokio::time::timeout(Duration::from_mins(10), now.wait_for(|now| *now == names));
        matches!(there.await, Ok(Ok(_)))
    }

    /// Returns the log of the runtime: plugins that connected, and the reasons of disconnections.
    pub fn log(&self) -> Vec<String> {
        self.inner.state.lock().log.clone()
    }

    /// Returns a container with its current resources.
    pub fn container(&self, id: &str) -> Option<Container> {
        self.inner.state.lock().containers.get(id).cloned().map(convert::container)
    }

    /// Returns the memory policy with which a container was created: mode and nodes, such as `Interleave:0-1`.
    pub fn memory_policy(&self, id: &str) -> Option<String> {
        let state = self.inner.state.lock();
        state.memory_policies.get(id).map(|policy| format!("{:?}:{}", policy.mode(), policy.nodes))
    }

    /// Returns the ids of all containers.
    pub fn containers(&self) -> Vec<String> {
        self.inner.state.lock().containers.keys().cloned().collect()
    }

    /// Returns the number of container updates that plugins have requested, including those in answers.
    pub fn updates_received(&self) -> usize {
        self.inner.state.lock().updates_received
    }

    /// Returns the time that plugins took for each answer to a call of this method.
    pub fn reply_times(&self, method: &str) -> Vec<Duration> {
        let state = self.inner.state.lock();
        state.replies.iter().filter(|(of, _)| of == method).map(|(_, took)| *took).collect()
    }

    /// Makes all updates of this container fail from now on.
    pub fn fail_updates_of(&self, id: &str) {
        self.inner.state.lock().failing_updates.insert(id.to_owned());
    }

    /// Adds a pod and a running container without calling plugins, as if they had started before the plugins connected.
    pub fn add_running(&self, pod: &PodSpec, container: &ContainerSpec) {
        let mut state = self.inner.state.lock();
        state.pods.insert(pod.id.clone(), pod.message());
        let container =
            messages::Container { state: ContainerState::Running as i32, pid: 1000, ..container.message() };
        state.containers.insert(container.id.clone(), container);
    }

    /// Writes arbitrary bytes to a plugin's connection.
    pub async fn send_raw(&self, plugin: &str, bytes: &[u8]) -> Result<(), String> {
        let peer = self.inner.plugin(plugin)?;
        peer.link.send(bytes.to_vec()).await.map_err(|error| error.to_string())
    }

    /// Calls an arbitrary method of a plugin. An error contains the status code and message.
    pub async fn call_raw(
        &self,
        plugin: &str,
        service: &str,
        method: &str,
        payload: &[u8],
    ) -> Result<(), String> {
        let peer = self.inner.plugin(plugin)?;
        let timeout = self.inner.config.request_timeout;
        let called = peer.link.call_encoded(service, method, payload.to_vec(), timeout).await;
        called.map(drop).map_err(|error| match error {
            CallError::Status { code, message } => format!("{code} {message}"),
            error => error.to_string(),
        })
    }

    /// Runs a pod's sandbox.
    pub async fn run_pod(&self, pod: &PodSpec) -> Result<(), String> {
        let _lock = self.inner.lock().await;
        let message = pod.message();
        self.inner.notify(EventKind::RunPodSandbox, &message, None).await?;
        self.inner.state.lock().pods.insert(pod.id.clone(), message);
        Ok(())
    }

    /// Changes the resources of a pod; without `cpu_shares`, only those of its memory. Calls only plugins that subscribed to this event.
    pub async fn update_pod(
        &self,
        id: &str,
        cpu_shares: Option<u64>,
        memory_limit: Bytes,
    ) -> Result<(), String> {
        let _lock = self.inner.lock().await;
        let pod = self.inner.pod(id)?;
        let memory = messages::LinuxMemory { limit: Some(signed(memory_limit)) };
        let cpu = cpu_shares
            .map(|shares| messages::LinuxCpu { shares: Some(shares), ..messages::LinuxCpu::default() });
        let request = messages::UpdatePodSandboxRequest {
            pod: Some(pod.clone()),
            linux_resources: Some(LinuxResources { memory: Some(memory), cpu, ..LinuxResources::default() }),
            ..messages::UpdatePodSandboxRequest::default()
        };
        for peer in self.inner.subscribers(EventKind::UpdatePodSandbox) {
            let _: Option<()> = self.inner.call(&peer, "UpdatePodSandbox", &request).await?;
        }
        self.inner.notify(EventKind::PostUpdatePodSandbox, &pod, None).await
    }

    /// Stops and removes a pod's sandbox and all of its containers.
    pub async fn remove_pod(&self, id: &str) -> Result<(), String> {
        let pod = self.inner.pod(id)?;
        let containers: Vec<String> = {
            let state = self.inner.state.lock();
            let own = state.containers.values().filter(|container| container.pod_sandbox_id == id);
            own.map(|container| container.id.clone()).collect()
        };
        for container in containers {
            self.stop_container(&container).await?;
            self.remove_container(&container).await?;
        }
        let _lock = self.inner.lock().await;
        for event in [EventKind::StopPodSandbox, EventKind::RemovePodSandbox] {
            let _logged_only = self.inner.notify(event, &pod, None).await;
        }
        self.inner.state.lock().pods.remove(id);
        Ok(())
    }

    /// Creates a container.
    pub async fn create_container(&self, container: &ContainerSpec) -> Result<Container, String> {
        let _lock = self.inner.lock().await;
        let pod = self.inner.pod(&container.pod_id)?;
        let mut message = container.message();
        let mut owners = Owners::default();
        let mut updates = Vec::new();
        for peer in self.inner.subscribers(EventKind::CreateContainer) {
            let request =
                ContainerRequest { pod: Some(pod.clone()), container: Some(self.inner.reported(&message)) };
            let asked = self.inner.call(&peer, "CreateContainer", &request).await;
            let applied = asked.and_then(|answer: Option<messages::CreateContainerResponse>| {
                let Some(answer) = answer else { return Ok(()) };
                let linux = answer.adjust.and_then(|adjust| adjust.linux).unwrap_or_default();
                let knows = self.inner.config.nri_version >= Some(NriVersion::new(0, 12, 0));
                if let Some(policy) = linux.memory_policy.filter(|_| knows) {
                    self.inner.state.lock().memory_policies.insert(container.id.clone(), policy);
                }
                if let Some(requested) = linux.resources {
                    owners.claim(&container.id, &peer.name, &requested)?;
                    merge(resources_of(&mut message), &requested);
                }
                for update in answer.update {
                    if update.container_id == container.id {
                        return Err(format!(
                            "plugin {:?} asked update of {:?} during creation",
                            peer.name, container.id
                        ));
                    }
                    owners.claim(&update.container_id, &peer.name, &requested_by(&update))?;
                    updates.push(update);
                }
                Ok(())
            });
            if let Err(error) = applied {
                // A failed creation is undone.
                self.inner.stopped(&pod, &message).await;
                let _logged_only = self.inner.notify(EventKind::RemoveContainer, &pod, Some(&message)).await;
                return Err(format!("failed to get NRI adjustment for container: {error}"));
            }
        }
        message.state = ContainerState::Created as i32;
        self.inner.state.lock().containers.insert(container.id.clone(), message.clone());
        self.inner.apply(&updates);
        let _logged_only = self.inner.notify(EventKind::PostCreateContainer, &pod, Some(&message)).await;
        Ok(convert::container(message))
    }

    /// Starts a container. Fails if the kernel would refuse its settings, which are written now for the first time.
    pub async fn start_container(&self, id: &str) -> Result<(), String> {
        let _lock = self.inner.lock().await;
        let (pod, mut container) = self.inner.container(id)?;
        container.pid = 1000;
        self.inner.check(resources_of(&mut container))?;
        self.inner.notify(EventKind::StartContainer, &pod, Some(&container)).await?;
        container.state = ContainerState::Running as i32;
        self.inner.state.lock().containers.insert(id.to_owned(), container.clone());
        let _logged_only = self.inner.notify(EventKind::PostStartContainer, &pod, Some(&container)).await;
        Ok(())
    }

    /// Changes the resources of a container, as the kubelet does. Empty fields and `None` are not changed.
    pub async fn update_container(&self, id: &str, to: &ContainerSpec) -> Result<Container, String> {
        let _lock = self.inner.lock().await;
        let (pod, mut container) = self.inner.container(id)?;
        let mut requested = to.resources();
        let mut owners = Owners::default();
        let mut updates = Vec::new();
        for peer in self.inner.subscribers(EventKind::UpdateContainer) {
            let request = messages::UpdateContainerRequest {
                pod: Some(pod.clone()),
                container: Some(self.inner.reported(&container)),
                linux_resources: Some(requested.clone()),
            };
            let answer: Option<Updates> = self.inner.call(&peer, "UpdateContainer", &request).await?;
            for update in answer.unwrap_or_default().update {
                owners.claim(&update.container_id, &peer.name, &requested_by(&update))?;
                if update.container_id == id {
                    merge(&mut requested, &requested_by(&update));
                } else {
                    updates.push(update);
                }
            }
        }
        self.inner.check(&requested)?;
        merge(resources_of(&mut container), &requested);
        self.inner.state.lock().containers.insert(id.to_owned(), container.clone());
        self.inner.apply(&updates);
        let _logged_only = self.inner.notify(EventKind::PostUpdateContainer, &pod, Some(&container)).await;
        Ok(convert::container(container))
    }

    /// Stops a container.
    pub async fn stop_container(&self, id: &str) -> Result<(), String> {
        let _lock = self.inner.lock().await;
        let (pod, mut container) = self.inner.container(id)?;
        self.inner.stopped(&pod, &container).await;
        container.state = ContainerState::Stopped as i32;
        self.inner.state.lock().containers.insert(id.to_owned(), container);
        Ok(())
    }

    /// Removes a container.
    pub async fn remove_container(&self, id: &str) -> Result<(), String> {
        let _lock = self.inner.lock().await;
        let (pod, container) = self.inner.container(id)?;
        let _logged_only = self.inner.notify(EventKind::RemoveContainer, &pod, Some(&container)).await;
        self.inner.state.lock().containers.remove(id);
        Ok(())
    }
}

impl Inner {
    async fn lock(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        if self.config.serial { Some(self.lock.lock().await) } else { None }
    }

    fn log(&self, line: String) {
        self.state.lock().log.push(line);
    }

    fn plugin(&self, name: &str) -> Result<Arc<Peer>, String> {
        self.state.lock().plugins.get(name).cloned().ok_or_else(|| format!("no plugin {name}"))
    }

    fn pod(&self, id: &str) -> Result<messages::PodSandbox, String> {
        self.state.lock().pods.get(id).cloned().ok_or_else(|| format!("no pod {id:?}"))
    }

    fn container(&self, id: &str) -> Result<(messages::PodSandbox, messages::Container), String> {
        let container = self.state.lock().containers.get(id).cloned();
        let container = container.ok_or_else(|| format!("no container {id:?}"))?;
        Ok((self.pod(&container.pod_sandbox_id)?, container))
    }

    fn subscribers(&self, event: EventKind) -> Vec<Arc<Peer>> {
        let bit = 1 << (event as i32 - 1);
        self.state.lock().plugins.values().filter(|peer| peer.events.0 & bit != 0).cloned().collect()
    }

    /// Calls a plugin. Returns `None` if the plugin failed to answer in time; it is then disconnected.
    async fn call<Q: prost::Message, P: prost::Message + Default>(
        &self,
        peer: &Peer,
        method: &str,
        request: &Q,
    ) -> Result<Option<P>, String> {
        let (timeout, asked) = (self.config.request_timeout, Instant::now());
        let answer = peer.link.call(PLUGIN_SERVICE, method, request, timeout).await;
        self.state.lock().replies.push((method.to_owned(), asked.elapsed()));
        match answer {
            Ok(answer) => Ok(Some(answer)),
            Err(CallError::Status { code, message }) => {
                Err(format!("rpc error: code = {code} desc = {message}"))
            }
            Err(error) => {
                self.disconnect(&peer.name, &peer.link, &format!("{method}: {error}"));
                Ok(None)
            }
        }
    }

    fn disconnect(&self, name: &str, link: &Arc<Link>, why: &str) {
        self.log(format!("closing plugin {name}, {why}"));
        link.close();
        let mut state = self.state.lock();
        if state.plugins.get(name).is_some_and(|peer| Arc::ptr_eq(&peer.link, link)) {
            state.plugins.remove(name);
            self.names.send_if_modified(|names| names.remove(name));
        }
    }

    /// Sends an event, the answer to which has no content.
    async fn notify(
        &self,
        event: EventKind,
        pod: &messages::PodSandbox,
        container: Option<&messages::Container>,
    ) -> Result<(), String> {
        for peer in self.subscribers(event) {
            let (pod, container) = (Some(pod.clone()), container.map(|container| self.reported(container)));
            if self.config.dedicated_calls {
                let request = ContainerRequest { pod, container };
                let _: Option<()> = self.call(&peer, event.into(), &request).await?;
            } else {
                let change = messages::StateChangeEvent { event: event as i32, pod, container };
                let _: Option<()> = self.call(&peer, "StateChange", &change).await?;
            }
        }
        Ok(())
    }

    async fn stopped(&self, pod: &messages::PodSandbox, container: &messages::Container) {
        for peer in self.subscribers(EventKind::StopContainer) {
            let request =
                ContainerRequest { pod: Some(pod.clone()), container: Some(self.reported(container)) };
            match self.call(&peer, "StopContainer", &request).await {
                Ok(answer) => {
                    let answer: Updates = answer.unwrap_or_default();
                    self.apply(&answer.update);
                }
                Err(error) => self.log(format!("StopContainer: {error}")),
            }
        }
    }

    /// Applies updates and returns the failed ones. Updates of unknown containers are skipped without an error.
    fn apply(&self, updates: &[messages::ContainerUpdate]) -> Vec<messages::ContainerUpdate> {
        let mut failed = Vec::new();
        let mut state = self.state.lock();
        state.updates_received += updates.len();
        for update in updates {
            let requested = requested_by(update);
            let fails =
                state.failing_updates.contains(&update.container_id) || self.check(&requested).is_err();
            let Some(container) = state.containers.get_mut(&update.container_id) else { continue };
            if fails {
                if !update.ignore_failure {
                    failed.push(update.clone());
                }
            } else {
                merge(resources_of(container), &requested);
            }
        }
        failed
    }

    /// Returns the error of the kernel for settings that it would refuse.
    fn check(&self, resources: &LinuxResources) -> Result<(), String> {
        let cpu = resources.cpu.clone().unwrap_or_default();
        let refused =
            |file: &str, value: &str| format!("failed to write {value:?}: {file}: invalid argument");
        let online = &self.config.online;
        if !cpu.cpus.parse().is_ok_and(|cpus: CpuSet| cpus.is_subset(&online.cpus)) {
            return Err(refused("cpuset.cpus", &cpu.cpus));
        }
        if !cpu.mems.parse().is_ok_and(|mems: NodeSet| mems.is_subset(&online.mems)) {
            return Err(refused("cpuset.mems", &cpu.mems));
        }
        Ok(())
    }

    fn accept<S: AsyncRead + AsyncWrite + Send + 'static>(self: &Arc<Self>, stream: S) {
        let inner = Arc::clone(self);
        let ends = inner.stop.child_token();
        inner.state.lock().connections.push(ends.clone());
        tokio::spawn(async move {
            ends.run_until_cancelled(inner.serve(stream)).await;
        });
    }

    /// Serves a plugin until its connection is closed.
    async fn serve<S: AsyncRead + AsyncWrite + Send + 'static>(&self, stream: S) {
        let accepting = Mutex::new(Some(self.accepting.lock().await));
        let is_configured = AtomicBool::new(false);
        let (reader, writer) = tokio::io::split(stream);
        let (link, writing) = Link::new(Connection::Plugin, encode_as_go, writer);
        let link = Arc::new(link);
        let (to_answers, answers) = mpsc::channel(MAX_UNREAD_FRAMES);
        let (to_calls, calls) = mpsc::channel(MAX_UNREAD_FRAMES);
        let name = Mutex::new("??".to_owned());
        let (registered, is_registered) = watch::channel(None);
        let end = tokio::select! {
            result = writing => format!("writing: {result:?}"),
            why = read_frames(reader, &to_answers, &to_calls) => why,
            why = read_answers(&link, BufferedReader::new(answers)) => why,
            why = self.serve_calls(&link, BufferedReader::new(calls), &registered) => why,
            why = self.shake_hands(&link, is_registered, &name, &is_configured, &accepting) => why,
            () = link.closed.cancelled() => "the connection was closed".to_owned(),
        };
        let name = name.lock().clone();
        self.disconnect(&name, &link, &end);
        let unfinished = accepting.lock().take();
        if unfinished.is_some() && is_configured.load(Ordering::Relaxed) {
            // The runtime does not notice the end of the connection while it waits for its lock.
            drop(self.lock().await);
        }
    }

    /// Runs the handshake. Returns the reason if it failed, and never returns if it succeeded.
    async fn shake_hands(
        &self,
        link: &Arc<Link>,
        mut registered: watch::Receiver<Option<messages::RegisterPluginRequest>>,
        name: &Mutex<String>,
        is_configured: &AtomicBool,
        accepting: &Mutex<Option<tokio::sync::MutexGuard<'_, ()>>>,
    ) -> String {
        let config = &self.config;
        let registration =
            tokio::time::timeout(config.registration_timeout, registered.wait_for(Option::is_some)).await;
        let Ok(Ok(Some(registration))) = registration.map(|known| known.map(|known| known.clone())) else {
            return "plugin registration timed out".to_owned();
        };
        let full_name = format!("{}-{}", registration.plugin_idx, registration.plugin_name);
        name.lock().clone_from(&full_name);
        let reported = |timeout: Duration| {
            if config.reports_timeouts { i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX) } else { 0 }
        };
        let request = messages::ConfigureRequest {
            runtime_name: config.name.clone(),
            runtime_version: config.version.clone(),
            registration_timeout: reported(config.registration_timeout),
            request_timeout: reported(config.request_timeout),
            nri_version: config.nri_version.map(|version| version.to_string()).unwrap_or_default(),
        };
        let timeout = config.request_timeout;
        let configured = link.call(PLUGIN_SERVICE, "Configure", &request, timeout).await;
        let events = match configured {
            Ok(messages::ConfigureResponse { events: 0 }) => config.events,
            Ok(messages::ConfigureResponse { events }) if events & !config.events.0 == 0 => EventMask(events),
            Ok(messages::ConfigureResponse { events }) => {
                return format!("invalid plugin events: {:#x}", events & !config.events.0);
            }
            Err(error) => return format!("failed to configure plugin: {error}"),
        };
        is_configured.store(true, Ordering::Relaxed);
        let lock = self.lock().await;
        match self.synchronize(link).await {
            Ok(updates) => drop(self.apply(&updates)),
            Err(error) => return error,
        }
        self.log(format!("plugin {full_name} synchronized"));
        let peer = Arc::new(Peer { name: full_name.clone(), link: Arc::clone(link), events });
        self.state.lock().plugins.insert(full_name.clone(), peer);
        self.names.send_if_modified(|names| names.insert(full_name));
        drop(lock);
        accepting.lock().take();
        std::future::pending().await
    }

    async fn synchronize(&self, link: &Link) -> Result<Vec<messages::ContainerUpdate>, String> {
        let deadline = Instant::now() + self.config.request_timeout;
        for request in self.parts() {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer: messages::SynchronizeResponse = link
                .call(PLUGIN_SERVICE, "Synchronize", &request, left)
                .await
                .map_err(|error| format!("failed to synchronize plugin: {error}"))?;
            if !request.more {
                return Ok(answer.update);
            }
            if !answer.more || !answer.update.is_empty() {
                return Err("plugin does not handle split sync requests".to_owned());
            }
        }
        Ok(Vec::new())
    }

    /// Returns a container as it is reported to plugins.
    fn reported(&self, container: &messages::Container) -> messages::Container {
        let mut container = container.clone();
        if !self.config.reports_unified {
            resources_of(&mut container).unified.clear();
        }
        container
    }

    /// Returns all pods and all containers that have not ended, in parts.
    fn parts(&self) -> Vec<messages::SynchronizeRequest> {
        let limit = self.config.message_limit;
        let mut parts = vec![messages::SynchronizeRequest::default()];
        let state = self.state.lock();
        let pods = state.pods.values().map(|pod| (true, pod.encode_to_vec()));
        let running =
            state.containers.values().filter(|container| container.state() != ContainerState::Stopped);
        let mut length = 0;
        for (is_pod, object) in
            pods.chain(running.map(|container| (false, self.reported(container).encode_to_vec())))
        {
            // Each object has a tag, and a length of at most four bytes.
            length += object.len() + 5;
            if length > limit {
                length = object.len() + 5;
                parts.push(messages::SynchronizeRequest::default());
            }
            if let Some(part) = parts.last_mut() {
                if is_pod { part.pods.push(object) } else { part.containers.push(object) }
            }
        }
        let last = parts.len() - 1;
        for part in &mut parts[..last] {
            part.more = true;
        }
        parts
    }

    /// Serves the plugin's calls one at a time. Returns the reason why it stopped.
    async fn serve_calls(
        &self,
        link: &Link,
        mut calls: BufferedReader,
        registered: &watch::Sender<Option<messages::RegisterPluginRequest>>,
    ) -> String {
        loop {
            let message = match calls.message().await {
                Ok(message) => message,
                Err(why) => return why,
            };
            let response = match TtrpcRequest::decode(&*message.payload) {
                Ok(request) => serve_call(&request, registered),
                Err(error) => return format!("a call that cannot be decoded: {error}"),
            };
            if link.answer(Connection::Runtime, message.stream, &response).await.is_err() {
                return "the connection was closed".to_owned();
            }
        }
    }
}

/// Returns the answer to a plugin's call.
fn serve_call(
    request: &TtrpcRequest,
    registered: &watch::Sender<Option<messages::RegisterPluginRequest>>,
) -> TtrpcResponse {
    match (request.service.as_str(), request.method.as_str()) {
        (RUNTIME_SERVICE, "RegisterPlugin") => {
            let Ok(registration) = messages::RegisterPluginRequest::decode(&*request.payload) else {
                return status(Code::InvalidArgument, "not a registration");
            };
            registered.send_replace(Some(registration));
            TtrpcResponse { status: None, payload: Vec::new() }
        }
        (service, method) => status(Code::Unimplemented, &format!("{service}/{method}")),
    }
}

/// Reads frames into the queues of the two connections. Returns the reason why it stopped.
async fn read_frames<R: AsyncRead + Unpin>(
    mut reader: R,
    answers: &mpsc::Sender<Vec<u8>>,
    calls: &mpsc::Sender<Vec<u8>>,
) -> String {
    loop {
        let (Ok(connection), Ok(length)) = (reader.read_u32().await, reader.read_u32().await) else {
            return "the plugin closed the connection".to_owned();
        };
        // A real runtime would try to allocate this length.
        let Some(length) = usize::try_from(length).ok().filter(|&length| length <= MAX_FRAME) else {
            return format!("a frame claims {length} bytes");
        };
        let mut frame = vec![0; length];
        if reader.read_exact(&mut frame).await.is_err() {
            return "the plugin closed the connection within a frame".to_owned();
        }
        let queue = match connection {
            1 => answers,
            2 => calls,
            _ => continue,
        };
        if queue.try_send(frame).is_err() {
            return format!("more than {MAX_UNREAD_FRAMES} frames are unread");
        }
        // In a real runtime, the readers run concurrently.
        tokio::task::yield_now().await;
    }
}

async fn read_answers(link: &Link, mut answers: BufferedReader) -> String {
    loop {
        match answers.message().await {
            Ok(message) => link.answered(message),
            Err(why) => return why,
        }
    }
}

/// Reader of one connection, like that of the runtime: it has a buffer of 4096 bytes, and receives only whole frames.
struct BufferedReader {
    frames: mpsc::Receiver<Vec<u8>>,
    buffer: Vec<u8>,
}

impl BufferedReader {
    fn new(frames: mpsc::Receiver<Vec<u8>>) -> Self {
        Self { frames, buffer: Vec::new() }
    }

    async fn message(&mut self) -> Result<Message, String> {
        let header = self.read_full(MESSAGE_HEADER).await?;
        let length = wire::be_u32(&header, 0) as usize;
        if length > MAX_MESSAGE {
            return Err(format!("a message claims {length} bytes"));
        }
        let payload = self.read_full(length).await?;
        Ok(Message { stream: wire::be_u32(&header, 4), kind: header[8], payload })
    }

    /// Reads exactly `length` bytes. If at least 4096 bytes are missing, the next frame is read without the buffer.
    async fn read_full(&mut self, length: usize) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let missing = length - bytes.len();
            if self.buffer.is_empty() {
                let frame = self.frames.recv().await.ok_or("the connection was closed")?;
                let room = missing.max(READ_BUFFER);
                if frame.len() > room {
                    return Err(format!(
                        "cannot allocate memory: a frame of {} bytes for a buffer of {room}",
                        frame.len()
                    ));
                }
                if missing >= READ_BUFFER {
                    bytes.extend(frame);
                    continue;
                }
                self.buffer = frame;
            }
            bytes.extend(self.buffer.drain(..missing.min(self.buffer.len())));
        }
        Ok(bytes)
    }
}

/// Encodes a message like the runtime, which writes through a buffer of 4096 bytes.
fn encode_as_go(connection: Connection, message: &Message) -> Result<Vec<u8>, TooLong> {
    let encoded = wire::encode(connection, message)?;
    let header = &encoded[wire::FRAME_HEADER..wire::FRAME_HEADER + MESSAGE_HEADER];
    let stream = [header, &message.payload].concat();
    let frames = stream.chunks(READ_BUFFER).map(|part| {
        let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
        [&(connection as u32).to_be_bytes()[..], &length.to_be_bytes(), part].concat()
    });
    Ok(frames.collect::<Vec<_>>().concat())
}

/// Owner of each field: container and field, and the plugin that set it. Only fields that numaward sets are checked.
#[derive(Default)]
struct Owners(HashMap<(String, String), String>);

impl Owners {
    fn claim(&mut self, container: &str, plugin: &str, requested: &LinuxResources) -> Result<(), String> {
        let cpu = requested.cpu.clone().unwrap_or_default();
        let fields = [
            (!cpu.cpus.is_empty(), "CPU pinning".to_owned()),
            (!cpu.mems.is_empty(), "memory pinning".to_owned()),
            (cpu.quota.is_some(), "CPU quota".to_owned()),
        ];
        let unified = requested.unified.keys().map(|key| (true, format!("unified resource {key}")));
        for (_, field) in fields.into_iter().chain(unified).filter(|(is_set, _)| *is_set) {
            let key = (container.to_owned(), field);
            if let Some(other) = self.0.get(&key) {
                return Err(format!("plugins {plugin:?} and {other:?} both tried to set {}", key.1));
            }
            self.0.insert(key, plugin.to_owned());
        }
        Ok(())
    }
}

fn requested_by(update: &messages::ContainerUpdate) -> LinuxResources {
    update.linux.as_ref().and_then(|linux| linux.resources.clone()).unwrap_or_default()
}

fn resources_of(container: &mut messages::Container) -> &mut LinuxResources {
    container.linux.get_or_insert_default().resources.get_or_insert_default()
}

/// Merges new settings into the current ones. Empty and absent fields are not changed; hugepage limits are appended.
fn merge(now: &mut LinuxResources, requested: &LinuxResources) {
    if let Some(cpu) = &requested.cpu {
        let now = now.cpu.get_or_insert_default();
        now.shares = cpu.shares.or(now.shares);
        now.quota = cpu.quota.or(now.quota);
        now.period = cpu.period.or(now.period);
        for (now, requested) in [(&mut now.cpus, &cpu.cpus), (&mut now.mems, &cpu.mems)] {
            if !requested.is_empty() {
                now.clone_from(requested);
            }
        }
    }
    if let Some(memory) = &requested.memory {
        let now = now.memory.get_or_insert_default();
        now.limit = memory.limit.or(now.limit);
    }
    now.hugepage_limits.extend(requested.hugepage_limits.iter().cloned());
    now.unified.extend(requested.unified.clone());
}

fn signed(bytes: Bytes) -> i64 {
    i64::try_from(bytes.0).unwrap_or(i64::MAX)
}

impl PodSpec {
    fn message(&self) -> messages::PodSandbox {
        messages::PodSandbox {
            id: self.id.clone(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            labels: self.labels.clone(),
            annotations: self.annotations.clone(),
            runtime_handler: self.runtime_handler.clone(),
            linux: Some(messages::LinuxPodSandbox {
                cgroup_parent: self.cgroup_parent.clone(),
                pod_overhead: None,
            }),
        }
    }
}

impl ContainerSpec {
    fn message(&self) -> messages::Container {
        messages::Container {
            id: self.id.clone(),
            pod_sandbox_id: self.pod_id.clone(),
            name: self.name.clone(),
            annotations: self.annotations.clone(),
            cdi_devices: self.cdi_devices.clone(),
            linux: Some(messages::LinuxContainer {
                resources: Some(self.resources()),
                cgroups_path: self.cgroups_path.clone(),
                ..messages::LinuxContainer::default()
            }),
            ..messages::Container::default()
        }
    }

    fn resources(&self) -> LinuxResources {
        let limits = self.hugepage_limits.iter();
        LinuxResources {
            memory: Some(messages::LinuxMemory { limit: self.memory_limit.map(signed) }),
            cpu: Some(messages::LinuxCpu {
                shares: self.cpu_shares,
                quota: self.cpu_quota,
                period: self.cpu_quota.map(|_| 100_000),
                cpus: self.cpus.clone(),
                mems: self.mems.clone(),
            }),
            hugepage_limits: limits
                .map(|(size, limit)| messages::HugepageLimit { page_size: size.clone(), limit: *limit })
                .collect(),
            unified: self.unified.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    fn online() -> Online {
        Online { cpus: "0-3".parse().unwrap(), mems: "0-1".parse().unwrap() }
    }

    fn call(stream: u32, method: &str, payload: Vec<u8>) -> Message {
        let request = TtrpcRequest {
            service: RUNTIME_SERVICE.to_owned(),
            method: method.to_owned(),
            payload,
            timeout_nano: 0,
        };
        Message { stream, kind: wire::REQUEST, payload: request.encode_to_vec() }
    }

    fn one_frame(message: &Message) -> Vec<u8> {
        let two = wire::encode(Connection::Runtime, message).unwrap();
        let header = &two[wire::FRAME_HEADER..wire::FRAME_HEADER + MESSAGE_HEADER];
        frame(&[header, &message.payload].concat())
    }

    fn frame(payload: &[u8]) -> Vec<u8> {
        [&2u32.to_be_bytes()[..], &u32::try_from(payload.len()).unwrap().to_be_bytes(), payload].concat()
    }

    /// Returns the runtime's log for a plugin that writes these bytes.
    async fn log_after(bytes: &[u8]) -> String {
        let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(online()));
        let mut stream = runtime.connect().unwrap();
        let _closed_halfway = stream.write_all(bytes).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        runtime.log().concat()
    }

    #[tokio::test(start_paused = true)]
    async fn long_frame_must_be_payload_only() {
        let update = |length| call(1, "UpdateContainers", vec![0; length]);
        let overhead = update(0).payload.len() + MESSAGE_HEADER + 3;
        for (bytes, closes) in [
            (one_frame(&update(1000)), false),
            (one_frame(&update(4096 - overhead)), false),
            (one_frame(&update(4096 - overhead + 1)), true),
            (wire::encode(Connection::Runtime, &update(4096)).unwrap(), false),
            (wire::encode(Connection::Runtime, &update(1 << 20)).unwrap(), false),
        ] {
            let log = log_after(&bytes).await;
            assert_eq!(log.contains("cannot allocate memory"), closes, "{} bytes: {log}", bytes.len());
            assert_eq!(log.is_empty(), !closes, "{} bytes: {log}", bytes.len());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn garbage_closes_connection() {
        for (bytes, why) in [
            ([2u32.to_be_bytes(), u32::MAX.to_be_bytes()].concat(), "a frame claims 4294967295 bytes"),
            (frame(&[0xff; 10]), "a message claims 4294967295 bytes"),
            (frame(&[0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0xff]), "a call that cannot be decoded"),
            ([0; 8].repeat(1000), ""),
            ([1u32.to_be_bytes(), 0u32.to_be_bytes()].concat().repeat(100), ""),
        ] {
            let log = log_after(&bytes).await;
            assert!(log.contains(why) && log.is_empty() == why.is_empty(), "{why}: {log}");
        }
        let runtime = FakeRuntime::new(FakeRuntimeConfig::containerd_2_1(online()));
        let _silent = runtime.connect().unwrap();
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(runtime.log(), ["closing plugin ??, plugin registration timed out"]);
    }

    #[test]
    fn snapshot_parts_fit_message_limit() {
        let runtime = FakeRuntime::new(FakeRuntimeConfig {
            message_limit: 1000,
            ..FakeRuntimeConfig::containerd_2_1(online())
        });
        let pod = PodSpec { id: "p".to_owned(), ..PodSpec::default() };
        for i in 0..100 {
            let container =
                ContainerSpec { id: format!("c{i}"), pod_id: "p".to_owned(), ..ContainerSpec::default() };
            runtime.add_running(&pod, &container);
        }
        let parts = runtime.inner.parts();
        assert!(parts.len() > 1);
        assert!(parts.iter().all(|part| part.encode_to_vec().len() <= 1000));
        assert_eq!(parts.iter().map(|part| part.containers.len()).sum::<usize>(), 100);
        assert!(parts.iter().rev().skip(1).all(|part| part.more));
        assert!(parts.last().is_some_and(|part| !part.more));
    }
}
