//! This host as a node of a Kubernetes cluster: follows its pods at the API server, evicts pods, and publishes the resources of the node.
//!
//! The API server may start late and become unreachable at any time. Tasks that need it start after the first connection; until then,
//! they are reported as degraded with the reason.

use std::{cmp::Reverse, collections::BTreeSet, os::unix::net::UnixListener, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use numaward_api::EnforcementMode;
use numaward_config::{
    Config, OperatingMode,
    cluster::{HostDevice, NodeAllocatable},
    guard::GuardMode,
    kubernetes::{Kubernetes, UnpinnedPolicy},
    policy::{StrategyKind, TopologyManagerScope},
};
use numaward_engine::{
    QosClass,
    claims::{
        allocator::Device,
        devices::{self, NodeDevices},
    },
    policy::{CpuOptions, TopologyManagerPolicy},
};
use numaward_guarantee::{
    policy as configured,
    reconciler::{CrowdedNode, CrowdingPod, ReconcilerHandle},
};
use numaward_kube::{
    api::{
        self, ClaimReader, EventQueue, EventWriter, EvictionReason, EvictionSource, EvictionTiming, Evictor,
        Pods, StoredPod, TaintRemover, TaintTiming,
    },
    dra::{
        claim::AllocationReader,
        slices::{Publication, PublishedDevices, SlicePublisher},
        status::StatusWriter,
    },
    node_topology::{NodeTopology, Publisher, fingerprint},
    pod::{PodId, PodSource as _},
    pod_resources,
};
use numaward_model::{headroom::Headroom, pod::container_name, port::ObservedHost as _};
use numaward_observe::{DaemonPart, Observer};
use numaward_topology::Bytes;
use prometheus_client::registry::Registry;
use tokio::{
    sync::watch,
    time::{interval, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    dra::{self, RefusedRequests},
    export::{
        AssignedResources, Source,
        assigned::{CallMetrics, PodReporter},
        devices::{Devices, LatestDevices},
        load::NodeLoad,
        placement::placement,
    },
    kubelet::{Policies, pod_resources_socket},
    nri::Refusals,
};
use crate::socket::{self, SocketError};

/// The interval of attempts to create the client of the API server.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// The interval at which the published topology is compared with the free resources.
const UPDATE_INTERVAL: Duration = Duration::from_secs(1);
/// The number of updates for one update of the load of the nodes, which reads all counters and needs a longer time for its shares.
const UPDATES_PER_LOAD: u32 = 30;

/// Metrics of the API server and the PodResources API. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct ClusterMetrics {
    api: api::ApiMetrics,
    calls: CallMetrics,
}

impl ClusterMetrics {
    pub fn register(&self, registry: &mut Registry) {
        self.api.register(registry);
        self.calls.register(registry);
    }
}

/// Returns true once pods that start on this host are placed.
pub type IsReady = Arc<dyn Fn() -> bool + Send + Sync>;

/// This host as a node of a cluster.
pub struct Cluster {
    config: Config,
    observer: Arc<Observer>,
    metrics: ClusterMetrics,
    mode: OperatingMode,
    policies: Policies,
    socket: Option<UnixListener>,
    pods: Option<(Pods, EventQueue, String)>,
    eviction_source: Option<EvictionSource>,
    claims: ClaimReader,
    /// The present settings.
    kubernetes: watch::Receiver<Kubernetes>,
    /// The reconciler that reserves resource claims.
    reconciler: Option<ReconcilerHandle>,
}

impl Cluster {
    /// Creates the socket of the PodResources API, which needs privileges that the daemon drops later. Starts no task.
    pub fn prepare(
        config: &Config,
        mode: OperatingMode,
        policies: Policies,
        observer: &Arc<Observer>,
        metrics: ClusterMetrics,
    ) -> Result<Self, SocketError> {
        let socket = config.kubernetes.pod_resources.socket.as_deref();
        let socket = socket.map(|path| socket::listen(path, "kubernetes.podResources.socket")).transpose()?;
        let pods = config.kubernetes.node_name.clone().map(|node| {
            let (writer, queue) = EventWriter::new(metrics.api.clone());
            (Pods::new(writer), queue, node)
        });
        let kubernetes = watch::Sender::new(config.kubernetes.clone()).subscribe();
        let (config, observer) = (config.clone(), observer.clone());
        Ok(Self {
            config,
            observer,
            metrics,
            mode,
            policies,
            socket,
            pods,
            eviction_source: None,
            claims: ClaimReader::default(),
            kubernetes,
            reconciler: None,
        })
    }

    /// Returns the pods of this host; `None` if `kubernetes.nodeName` is not set.
    pub fn pods(&self) -> Option<Pods> {
        self.pods.as_ref().map(|(pods, ..)| pods.clone())
    }

    /// Returns the reader of resource claims, which reads nothing before the first connection to the API server.
    pub fn claims(&self) -> ClaimReader {
        self.claims.clone()
    }

    /// Sets the source of the settings that change while the daemon runs. Without it, they are those of the start.
    #[must_use]
    pub fn with_settings(self, kubernetes: watch::Receiver<Kubernetes>) -> Self {
        Self { kubernetes, ..self }
    }

    /// Returns the present settings.
    pub fn settings(&self) -> watch::Receiver<Kubernetes> {
        self.kubernetes.clone()
    }

    /// Sets the reconciler that reserves resource claims. Without it, the kubelet's plugin is not served.
    pub fn reserve_claims(&mut self, reconciler: Option<&ReconcilerHandle>) {
        self.reconciler = reconciler.cloned();
    }

    /// Prepares the configured evictions: of pods that run without their requested resources, of refused pods, and of pods that the
    /// guard names. Returns the store in which the NRI plugin notes refused pods.
    pub fn evict(&mut self, reconciler: Option<&ReconcilerHandle>) -> Refusals {
        let Config { kubernetes, guard, enforcement, .. } = &self.config;
        let evicts_unplaced = kubernetes.nri.enabled && kubernetes.unpinned == UnpinnedPolicy::Evict;
        let evicts_crowded = *guard == GuardMode::Evict && enforcement.mode == EnforcementMode::On;
        let refusals = Refusals::new(self.settings(), self.config.strategy == StrategyKind::Native);
        let evicts_refused = kubernetes.nri.enabled && refusals.evicts();
        let evicts_any = evicts_unplaced || evicts_refused || evicts_crowded;
        let Some(reconciler) = reconciler.filter(|_| evicts_any).cloned() else { return refusals };
        let (pods, refused) = (self.pods(), refusals.clone());
        self.eviction_source = Some(Arc::new(move || {
            let unplaced = if evicts_unplaced { reconciler.unplaced() } else { Vec::new() };
            let unplaced = unplaced.into_iter().map(|id| (id, EvictionReason::Unplaced));
            // Empty unless `guard: evict` is configured.
            let crowded = reconciler.crowded();
            let known = pods.iter().filter(|_| !crowded.is_empty()).flat_map(Pods::all).collect::<Vec<_>>();
            // Refused pods hold nothing that another workload waits for, so they are the last.
            let refused =
                refused.to_evict().into_iter().filter(|(id, _)| !reconciler.has_room_for_pod(&id.uid));
            let refused = refused.map(|(id, after)| (id, EvictionReason::Refused { after }));
            unplaced.chain(pods_to_evict(&crowded, &known)).chain(refused).collect()
        }));
        refusals
    }

    /// Starts the configured tasks. `source` returns the assigned resources; `None` if this host can have no guarantees. `is_ready`
    /// returns true once pods that start are placed. Must be called within a runtime of tokio.
    pub fn start(mut self, source: Option<Source>, is_ready: IsReady, stop: &CancellationToken) {
        let kubernetes = &self.config.kubernetes;
        let (devices, is_published) = (LatestDevices::default(), kubernetes.node_resource_topology.enabled);
        let pods = self.pods();
        if source.is_some() && (self.socket.is_some() || is_published) {
            let following = devices.follow(pod_resources_socket(&self.config), pods.as_ref());
            tokio::spawn(stop.clone().run_until_cancelled_owned(following).boxed());
        }
        if let (Some(socket), Some(source)) = (self.socket.take(), &source) {
            let reporter =
                PodReporter::new(source.clone(), pods, devices.clone(), self.metrics.calls.clone());
            tokio::spawn(serve_pod_resources(socket, reporter, stop.clone()).boxed());
        }
        let mut slice_source = source.clone().filter(|_| kubernetes.dra.enabled);
        if kubernetes.dra.enabled
            && let Some(reason) = obstacle_for_claims(&self.config, self.mode)
        {
            slice_source = None;
            self.observer.note(DaemonPart::ResourceSlices, Err(format!("kubernetes.dra: {reason}")));
        }
        let source = source.filter(|_| is_published).map(|source| (source, devices));
        let Some((pods, queue, node)) = self.pods.take() else {
            if self.eviction_source.is_some() {
                let reason =
                    "kubernetes.nodeName is not set: numaward cannot read pods and evicts none".to_owned();
                self.observer.note(DaemonPart::Evictions, Err(reason));
            }
            if is_published {
                let reason =
                    "kubernetes.nodeName is not set: the name of this Kubernetes node is unknown".to_owned();
                self.observer.note(DaemonPart::NodeResourceTopology, Err(reason));
            }
            if kubernetes.dra.enabled {
                let reason =
                    "kubernetes.nodeName is not set: the name of this Kubernetes node is unknown".to_owned();
                self.observer.note(DaemonPart::ResourceSlices, Err(reason));
            }
            if kubernetes.startup_taint.is_some() {
                let reason =
                    "kubernetes.nodeName is not set: the name of this Kubernetes node is unknown".to_owned();
                self.observer.note(DaemonPart::StartupTaint, Err(reason));
            }
            return;
        };
        if self.mode == OperatingMode::Enforce && !kubernetes.nri.enabled {
            // With NRI, the runtime reports the names earlier.
            let naming = name_containers(pods.clone(), self.observer.clone());
            tokio::spawn(stop.clone().run_until_cancelled_owned(naming).boxed());
        }
        let following = self.follow((pods, queue, node), (source, slice_source), is_ready, stop.clone());
        tokio::spawn(stop.clone().run_until_cancelled_owned(following).boxed());
    }

    /// Connects to the API server and starts the tasks that need it.
    async fn follow(
        self,
        (pods, queue, node): (Pods, EventQueue, String),
        (source, slice_source): (Option<(Source, LatestDevices)>, Option<Source>),
        is_ready: IsReady,
        stop: CancellationToken,
    ) {
        let (kubernetes, metrics) = (&self.config.kubernetes, self.metrics.api);
        let client = loop {
            match api::connect(kubernetes.kubeconfig.as_deref()).await {
                Ok(client) => break client,
                // A missing file may appear later.
                Err(error) => self.observer.note(DaemonPart::KubernetesApi, Err(error.to_string())),
            }
            sleep(CONNECT_RETRY_INTERVAL).await;
        };
        self.claims.connect(client.clone(), node.clone(), metrics.clone());
        let report = |part| -> api::Report {
            let observer = self.observer.clone();
            Arc::new(move |result| observer.note(part, result))
        };
        tokio::spawn(queue.run(client.clone(), node.clone(), metrics.clone(), stop.clone()));
        if let Some(to_evict) = self.eviction_source {
            let evictor = Evictor {
                pods: pods.clone(),
                to_evict,
                kubernetes: self.kubernetes.clone(),
                own_pod: kubernetes.pod_uid.clone(),
                timing: EvictionTiming::default(),
                metrics: metrics.clone(),
                report: report(DaemonPart::Evictions),
            };
            tokio::spawn(evictor.run(client.clone(), node.clone(), stop.clone()));
        }
        if let Some(key) = &kubernetes.startup_taint {
            let remover = TaintRemover {
                client: client.clone(),
                node: node.clone(),
                key: key.to_string(),
                is_ready,
                timing: TaintTiming::default(),
                metrics: metrics.clone(),
                report: report(DaemonPart::StartupTaint),
            };
            tokio::spawn(remover.run(stop.clone()));
        }
        if let Some(source) = source {
            let publisher = Publisher {
                client: client.clone(),
                node: node.clone(),
                interval: kubernetes.node_resource_topology.interval.0,
                metrics: metrics.clone(),
                report: report(DaemonPart::NodeResourceTopology),
            };
            let latest = watch::Sender::new(None);
            tokio::spawn(publisher.run(latest.subscribe(), stop.clone()));
            let policy = policy(&self.config, self.mode, &self.policies);
            let updating = update_topology(self.observer.clone(), source, pods.clone(), policy, latest);
            tokio::spawn(stop.clone().run_until_cancelled_owned(updating).boxed());
        }
        if let Some(source) = slice_source {
            let (publication, refused) = (Publication::default(), RefusedRequests::default());
            let publisher = SlicePublisher {
                client: client.clone(),
                node: node.clone(),
                interval: kubernetes.dra.interval.0,
                has_node_allocatable: kubernetes.dra.node_allocatable == NodeAllocatable::Auto,
                metrics: metrics.clone(),
                report: report(DaemonPart::ResourceSlices),
                publication: publication.clone(),
            };
            let latest = watch::Sender::new(None);
            tokio::spawn(publisher.run(latest.subscribe(), stop.clone()));
            let of_host = (publication.clone(), refused.clone());
            let updating = update_slices(self.config.clone(), self.observer.clone(), source, of_host, latest);
            tokio::spawn(stop.clone().run_until_cancelled_owned(updating).boxed());
            if let Some(reconciler) = self.reconciler {
                let service = ClaimService {
                    config: self.config.clone(),
                    settings: self.kubernetes,
                    observer: self.observer.clone(),
                    reconciler,
                    pods: pods.clone(),
                    publication,
                    refused,
                };
                let reader =
                    AllocationReader { client: client.clone(), node: node.clone(), metrics: metrics.clone() };
                service.start(reader, report(DaemonPart::ResourceClaims), &stop);
            }
        }
        pods.follow(client, node, metrics, report(DaemonPart::KubernetesApi), stop).await;
    }
}

/// The parts that serve resource claims.
struct ClaimService {
    config: Config,
    settings: watch::Receiver<Kubernetes>,
    observer: Arc<Observer>,
    reconciler: ReconcilerHandle,
    pods: Pods,
    publication: Publication,
    refused: RefusedRequests,
}

impl ClaimService {
    /// Starts the kubelet's plugin, the placement of claims of the whole host, and the reports in the status of claims.
    fn start(self, reader: AllocationReader, report: api::Report, stop: &CancellationToken) {
        let Self { config, settings, observer, reconciler, pods, publication, refused } = self;
        let spawn = |task: futures_util::future::BoxFuture<'static, ()>| {
            tokio::spawn(stop.clone().run_until_cancelled_owned(task));
        };
        let host: dra::HostReader = {
            let observer = observer.clone();
            Arc::new(move || (observer.guarantees(), observer.machine()))
        };
        let (client, node) = (reader.client.clone(), reader.node.clone());
        let writer = StatusWriter { client: client.clone(), metrics: reader.metrics.clone() };
        let reporter = dra::StatusReporter {
            writer: writer.clone(),
            node: node.clone(),
            reconciler: reconciler.clone(),
            host: host.clone(),
            workloads: Arc::new(move || observer.workloads()),
        };
        spawn(reporter.run().boxed());
        let nominated = pods.other();
        let preparer = dra::ClaimPreparer::new((&config, settings), reader, pods, (reconciler, host));
        if publishes_host(&config) {
            let (nominated, stop) = (nominated.clone(), stop.clone());
            let report: api::Report = Arc::new(|result| {
                if let Err(error) = result {
                    tracing::debug!(error, "the nominated pods cannot be followed");
                }
            });
            spawn(async move { nominated.follow_nominated(client, node, report, stop).await }.boxed());
        }
        let placer = dra::HostPlacer { preparer: preparer.clone(), nominated, writer, publication, refused };
        spawn(placer.run().boxed());
        let sockets = dra::PluginSockets::new(&config);
        tokio::spawn(dra::serve(preparer, sockets, report, stop.clone()).boxed());
    }
}

/// Returns the pods that the guard names in the order of eviction: `BestEffort` before `Burstable`, and within a class the pod with the
/// most memory on the node first. A pod stays if it has a guarantee, is Guaranteed, or is not known, as one that was ignored. So does a pod
/// that has less than such a pod on the same node.
fn pods_to_evict(crowded: &[CrowdedNode], pods: &[Arc<StoredPod>]) -> Vec<(PodId, EvictionReason)> {
    let evictable = |crowding: &CrowdingPod| {
        let stored = pods.iter().find(|stored| stored.pod.id.uid == crowding.uid)?;
        let rank = match stored.pod.request().qos() {
            _ if crowding.has_guarantee => return None,
            QosClass::BestEffort => 0,
            QosClass::Burstable => 1,
            QosClass::Guaranteed => return None,
        };
        Some((rank, stored))
    };
    let known = crowded.iter().flat_map(|crowded| {
        let (mut known, mut stays) = (Vec::new(), Bytes(0));
        for crowding in &crowded.pods {
            match evictable(crowding) {
                Some((rank, stored)) => known.push((rank, crowding.memory, stored)),
                None => stays = stays.max(crowding.memory),
            }
        }
        known.retain(|(_, has, _)| *has >= stays);
        known.into_iter().map(|(rank, has, stored)| {
            (rank, Reverse(has), stored.pod.id.clone(), EvictionReason::NodeShort { node: crowded.node, has })
        })
    });
    let mut known: Vec<_> = known.collect();
    known.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2)));
    known.into_iter().map(|(_, _, id, reason)| (id, reason)).collect()
}

/// Updates the names of containers in the observer after each change of the pods.
async fn name_containers(pods: Pods, observer: Arc<Observer>) {
    let mut changes = pods.changes();
    loop {
        let named = pods.all().into_iter().flat_map(|stored| {
            let PodId { namespace, name, .. } = &stored.pod.id;
            let named = stored.container_ids.iter();
            let named = named.map(|(id, container)| (id.clone(), container_name(namespace, name, container)));
            named.collect::<Vec<_>>()
        });
        observer.update_containers(named.collect(), true);
        if changes.changed().await.is_err() {
            return;
        }
    }
}

async fn serve_pod_resources(socket: UnixListener, reporter: PodReporter, stop: CancellationToken) {
    let listener = match tokio::net::UnixListener::from_std(socket) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "the PodResources API cannot be served"),
    };
    if let Err(error) = pod_resources::serve(listener, Arc::new(reporter), stop).await {
        tracing::error!(%error, "the daemon stopped serving the PodResources API");
    }
}

/// Returns the topology policy and scope to publish: the configured ones or, in the mode `observe`, those of the kubelet.
fn policy(
    config: &Config,
    mode: OperatingMode,
    policies: &Policies,
) -> (TopologyManagerPolicy, TopologyManagerScope) {
    if mode == OperatingMode::Observe {
        let Policies { topology, scope, .. } = policies;
        let policy = topology.as_ref().and_then(|found| found.policy.parse().ok());
        let scope = scope.as_ref().and_then(|found| found.policy.parse().ok());
        return (policy.unwrap_or_default(), scope.unwrap_or_default());
    }
    (config.topology_policy(), config.topology_scope())
}

/// Updates the topology to publish after each change of the assigned resources, the devices or the load.
async fn update_topology(
    observer: Arc<Observer>,
    (source, devices): (Source, LatestDevices),
    pods: Pods,
    policy: (TopologyManagerPolicy, TopologyManagerScope),
    latest: watch::Sender<Option<Arc<NodeTopology>>>,
) {
    let (mut ticks, mut load) = (interval(UPDATE_INTERVAL), NodeLoad::default());
    for update in (0..UPDATES_PER_LOAD).cycle() {
        ticks.tick().await;
        if update == 0 {
            let observer = observer.clone();
            // This call blocks: it reads files and takes locks.
            if let Ok(nodes) = tokio::task::spawn_blocking(move || observer.nodes()).await {
                load.update(&nodes);
            }
        }
        // The devices are older than the pods and the assigned resources. A pod counts once the report of its devices is known.
        let (devices, assigned, machine) = (devices.get(), source(), observer.machine());
        let mut topology = assigned.topology(&machine, policy);
        if pods.is_synced() {
            let included = included_pods(&pods.all(), &assigned, &devices);
            let names = included.iter().map(|stored| &stored.pod.id);
            let names = names.map(|id| (id.namespace.as_str(), id.name.as_str()));
            topology.fingerprint = Some(fingerprint::from_pods(names));
            // The scheduler reads the placement with this policy only.
            if policy.0 == TopologyManagerPolicy::SingleNumaNode {
                topology.placement = placement(&included, &assigned, &devices, &machine);
            }
        }
        devices.add_to(&mut topology);
        load.add_to(&mut topology);
        let now = Some(Arc::new(topology));
        latest.send_if_modified(|published| std::mem::replace(published, now.clone()) != now);
    }
}

/// Returns true if the whole host is a device.
fn publishes_host(config: &Config) -> bool {
    match config.kubernetes.dra.host_device {
        HostDevice::Off => false,
        HostDevice::Auto => config.topology_policy() != TopologyManagerPolicy::SingleNumaNode,
        HostDevice::On => true,
    }
}

/// Updates the devices to publish after each change of the assigned resources.
async fn update_slices(
    config: Config,
    observer: Arc<Observer>,
    source: Source,
    (publication, refused): (Publication, RefusedRequests),
    latest: watch::Sender<Option<Arc<PublishedDevices>>>,
) {
    let (mut ticks, mut requests) = (interval(UPDATE_INTERVAL), publication.requests());
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            // The sender is in `publication`.
            _ = requests.changed() => {}
        }
        // The devices include everything that was assigned before the request.
        let number = *requests.borrow_and_update();
        let (assigned, machine) = (source(), observer.machine());
        let options = configured::engine_config(&config, &machine).ok();
        let options = options.and_then(|policy| CpuOptions::parse(&policy).ok());
        let has_whole_cores = options.is_some_and(|options| options.full_pcpus_only);
        let devices =
            NodeDevices::new(&machine, &configured::memory_tiers(&config, &machine), has_whole_cores);
        let free = assigned.free_amounts(&machine, &devices);
        let host = publishes_host(&config).then(|| {
            let refused = refused.with(&free);
            devices.publish_host(&free, &assigned.charged_to_host, &refused)
        });
        let devices = devices.publish(&free, &assigned.charged);
        let short_of_memory = low_devices(&devices, &observer.headroom());
        let now = Some(Arc::new(PublishedDevices { devices, host, short_of_memory, number }));
        latest.send_if_modified(|published| std::mem::replace(published, now.clone()) != now);
    }
}

/// Returns the names of the devices of nodes with low headroom.
fn low_devices(devices: &[Device], headroom: &Headroom) -> BTreeSet<String> {
    let is_low = |device: &&Device| {
        let node = devices::node_of_device(&device.name).and_then(|node| headroom.node(node));
        node.is_some_and(|node| node.is_low)
    };
    devices.iter().filter(is_low).map(|device| device.name.to_string()).collect()
}

/// Returns the reason why this host cannot prepare claims.
fn obstacle_for_claims(config: &Config, mode: OperatingMode) -> Option<&'static str> {
    if mode == OperatingMode::Observe {
        return Some("in the mode observe, numaward prepares no claims");
    }
    if config.enforcement.mode != EnforcementMode::On {
        return Some("enforcement.mode is not on, and numaward prepares no claims without enforcement");
    }
    (config.strategy != StrategyKind::Native)
        .then_some("claims need strategy: native, which places them on the nodes that the scheduler chose")
}

/// Returns the pods that the topology accounts for: pods with a guarantee, and running pods without one, once the kubelet has reported their
/// devices. Any other pod that is bound to this node is not included, so that the scheduler continues to subtract its request.
fn included_pods(
    pods: &[Arc<StoredPod>],
    assigned: &AssignedResources,
    devices: &Devices,
) -> Vec<Arc<StoredPod>> {
    let holds = |uid: &str| {
        assigned
            .held
            .iter()
            .filter_map(|held| held.container.as_ref())
            .any(|container| container.pod_uid == uid)
    };
    let is_included = |stored: &&Arc<StoredPod>| {
        let id = &stored.pod.id;
        !stored.pod.is_terminal && (stored.is_running || holds(&id.uid)) && devices.include(id)
    };
    pods.iter().filter(is_included).cloned().collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use numaward_kube::pod_resources::messages::ContainerDevices;
    use numaward_model::headroom::NodeHeadroom;
    use numaward_topology::{CpuSet, Machine, NodeId};

    use super::*;

    fn pod(name: &str, requests: &str, limits: &str) -> Arc<StoredPod> {
        let text = format!(
            r#"{{"metadata": {{"name": "{name}", "namespace": "ns", "uid": "uid-{name}"}}, "spec": {{"containers":
            [{{"name": "main", "resources": {{"requests": {requests}, "limits": {limits}}}}}]}}}}"#
        );
        api::read_pod(text.as_bytes()).unwrap().into()
    }

    #[test]
    fn device_of_low_node_is_short() {
        let machine = Machine::builder().nodes(2).cores_per_node(4).memory(Bytes::gib(8)).build().unwrap();
        let devices = NodeDevices::new(&machine, &BTreeMap::new(), false);
        let devices = devices.publish(&BTreeMap::new(), &BTreeMap::new());
        assert_eq!(devices.len(), 2);
        let node = |node, is_low| NodeHeadroom {
            node: NodeId(node),
            obtainable: Bytes(0),
            free: Bytes(0),
            unused: Bytes(0),
            margin: Bytes(0),
            is_low,
            is_tight: true,
        };
        for (nodes, expected) in
            [(vec![], &[][..]), (vec![node(0, false), node(1, true), node(7, true)], &["node-1"])]
        {
            let headroom = Headroom { nodes, ..Headroom::default() };
            assert!(low_devices(&devices, &headroom).iter().eq(expected), "{headroom:?}");
        }
    }

    #[test]
    fn pod_counts_once_its_devices_are_known() {
        let stored = |name: &str| {
            let running = pod(name, "{}", "{}");
            Arc::new(StoredPod { is_running: true, ..(*running).clone() })
        };
        let assigned = AssignedResources {
            held: Vec::new(),
            free_cpus: CpuSet::new(),
            pod_cpus: CpuSet::new(),
            memory: BTreeMap::new(),
            charged: BTreeMap::new(),
            charged_to_host: BTreeMap::new(),
        };
        let pods = [stored("old"), stored("new"), pod("pending", "{}", "{}")];
        let names = |devices: &Devices| {
            let included = included_pods(&pods, &assigned, devices);
            included.iter().map(|stored| stored.pod.id.name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&Devices::default()), ["old", "new"]);
        let pods = [(("ns".to_owned(), "old".to_owned()), None)].into();
        assert_eq!(
            names(&Devices { pods, all: vec![ContainerDevices::default()], ..Devices::default() }),
            ["old"]
        );
    }

    #[test]
    fn evicts_best_effort_and_large_first() {
        let (some, all) = (r#"{"memory": "1Gi"}"#, r#"{"cpu": "1", "memory": "1Gi"}"#);
        let pods = [
            pod("burstable", some, "{}"),
            pod("small", "{}", "{}"),
            pod("large", "{}", "{}"),
            pod("guaranteed", all, all),
            pod("elsewhere", "{}", "{}"),
        ];
        let usage = |name: &str, mib| CrowdingPod {
            uid: format!("uid-{name}"),
            memory: Bytes::mib(mib),
            has_guarantee: false,
        };
        let usages = [usage("burstable", 800), usage("large", 30), usage("small", 20)];
        let crowded = [CrowdedNode { node: NodeId(1), pods: usages.to_vec() }];
        let evicted = pods_to_evict(&crowded, &pods);
        let names: Vec<&str> = evicted.iter().map(|(id, _)| id.name.as_str()).collect();
        assert_eq!(names, ["large", "small", "burstable"]);
        assert_eq!(evicted[0].1, EvictionReason::NodeShort { node: NodeId(1), has: Bytes::mib(30) });
        let with_staying = |staying: CrowdingPod| {
            let pods_there = usages.iter().cloned().chain([staying]).collect();
            let evicted = pods_to_evict(&[CrowdedNode { node: NodeId(1), pods: pods_there }], &pods);
            evicted.into_iter().map(|(id, _)| id.name).collect::<Vec<_>>()
        };
        assert_eq!(with_staying(usage("guaranteed", 30)), ["large", "burstable"]);
        assert_eq!(with_staying(usage("ignored", 30)), ["large", "burstable"]);
        assert_eq!(with_staying(usage("ignored", 900)), [""; 0]);
        let elsewhere = CrowdingPod { has_guarantee: true, ..usage("elsewhere", 31) };
        assert_eq!(with_staying(elsewhere), ["burstable"]);
    }
}
