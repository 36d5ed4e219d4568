//! This host as a node of a Kubernetes cluster: its pods, known from the API server, and what is reported about it.
//!
//! The API server may come late and go at any time; whatever needs it starts when it is there, and says meanwhile what
//! is missing.

use std::{cmp::Reverse, os::unix::net::UnixListener, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use numaward_api::EnforcementMode;
use numaward_config::{
    Config, OperatingMode, guard::GuardMode, kubernetes::UnpinnedPolicy, policy::TopologyManagerScope,
};
use numaward_engine::{QosClass, policy::TopologyManagerPolicy};
use numaward_guarantee::reconciler::{CrowdedNode, ReconcilerHandle};
use numaward_kube::{
    api::{
        self, EventQueue, EventWriter, EvictionReason, EvictionSource, EvictionTiming, Evictor, Pods,
        StoredPod,
    },
    node_topology::{NodeTopology, Publisher, fingerprint},
    pod::{PodId, PodSource as _},
    pod_resources,
};
use numaward_model::{
    pod::{PodName, container_name},
    port::ContainerNames as _,
};
use numaward_observe::{DaemonPart, Observer};
use prometheus_client::registry::Registry;
use tokio::{
    sync::watch,
    time::{interval, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    export::{
        Assigned, Source,
        assigned::{Calls, PodReporter},
        devices::LastReported,
        load::Load,
    },
    kubelet::{Policies, pod_resources_socket},
    nri::Refusals,
};
use crate::socket::{self, SocketError};

/// How long to wait before a client that could not be made is tried again.
const RETRY: Duration = Duration::from_secs(30);
/// How often what is free is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// At how many of these looks what is observed is looked at too: it takes reading all counters, and a share needs some
/// time to be one.
const LOOKS_OF_LOAD: u32 = 30;

/// What is counted. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct ClusterMetrics {
    api: api::ApiMetrics,
    calls: Calls,
}

impl ClusterMetrics {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        self.api.register(registry);
        self.calls.register(registry);
    }
}

/// This host as a node of a cluster.
pub struct Cluster {
    config: Config,
    observer: Arc<Observer>,
    metrics: ClusterMetrics,
    mode: OperatingMode,
    policies: Policies,
    socket: Option<UnixListener>,
    pods: Option<(Pods, EventQueue, String)>,
    to_evict: Option<EvictionSource>,
}

impl Cluster {
    /// Makes what must be made while there are privileges: the socket. Nothing runs yet.
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
        let (config, observer) = (config.clone(), observer.clone());
        Ok(Self { config, observer, metrics, mode, policies, socket, pods, to_evict: None })
    }

    /// The pods, where the API server is to be asked for them.
    pub fn pods(&self) -> Option<Pods> {
        self.pods.as_ref().map(|(pods, ..)| pods.clone())
    }

    /// Evicts pods that run without what they ask for, those that are refused, and those that the guard names, if that is
    /// configured. Returns where refused pods are to be noted.
    pub fn evict(&mut self, reconciler: Option<&ReconcilerHandle>) -> Refusals {
        let Config { kubernetes, guard, enforcement, .. } = &self.config;
        let of_unplaced = kubernetes.nri.enabled && kubernetes.unpinned == UnpinnedPolicy::Evict;
        let of_crowded = *guard == GuardMode::Evict && enforcement.mode == EnforcementMode::On;
        let refusals = Refusals::new(kubernetes);
        let of_refused = kubernetes.nri.enabled && refusals.evicts();
        let is_any = of_unplaced || of_refused || of_crowded;
        let Some(reconciler) = reconciler.filter(|_| is_any).cloned() else { return refusals };
        let (pods, refused) = (self.pods(), refusals.clone());
        let id = |PodName { namespace, name, uid }| PodId { namespace, name, uid };
        self.to_evict = Some(Arc::new(move || {
            let unplaced = if of_unplaced { reconciler.unplaced() } else { Vec::new() };
            let unplaced = unplaced.into_iter().map(|name| (id(name), EvictionReason::Unplaced));
            // Only `guard: evict` names any.
            let crowded = reconciler.crowded();
            let known = pods.iter().filter(|_| !crowded.is_empty()).flat_map(Pods::all).collect::<Vec<_>>();
            // Others wait for nothing of theirs, so they come last.
            let refused =
                refused.to_evict().into_iter().map(|(id, after)| (id, EvictionReason::Refused { after }));
            unplaced.chain(in_the_way(&crowded, &known)).chain(refused).collect()
        }));
        refusals
    }

    /// Starts what is configured. `source` gives what is assigned, where anything can be. To be called within a
    /// runtime of tokio.
    pub fn start(mut self, source: Option<Source>, stop: &CancellationToken) {
        let kubernetes = &self.config.kubernetes;
        let (devices, is_published) = (LastReported::default(), kubernetes.node_resource_topology.enabled);
        let pods = self.pods();
        if source.is_some() && (self.socket.is_some() || is_published) {
            let asking = devices.follow(pod_resources_socket(&self.config), pods.as_ref());
            tokio::spawn(stop.clone().run_until_cancelled_owned(asking).boxed());
        }
        if let (Some(socket), Some(source)) = (self.socket.take(), &source) {
            let reporter =
                PodReporter::new(source.clone(), pods, devices.clone(), self.metrics.calls.clone());
            tokio::spawn(serve_pod_resources(socket, reporter, stop.clone()).boxed());
        }
        let source = source.filter(|_| is_published).map(|source| (source, devices));
        let Some((pods, queue, node)) = self.pods.take() else {
            if self.to_evict.is_some() {
                let reason =
                    "kubernetes.nodeName is not set: pods cannot be read, and none is evicted".to_owned();
                self.observer.note(DaemonPart::Evictions, Err(reason));
            }
            if is_published {
                let reason = "kubernetes.nodeName is not set: it is not known which node this is".to_owned();
                self.observer.note(DaemonPart::NodeResourceTopology, Err(reason));
            }
            return;
        };
        if self.mode == OperatingMode::Enforce && !kubernetes.nri.enabled {
            // With it, the runtime names them, and sooner.
            let naming = name_containers(pods.clone(), self.observer.clone());
            tokio::spawn(stop.clone().run_until_cancelled_owned(naming).boxed());
        }
        let following = self.follow(pods, queue, node, source, stop.clone());
        tokio::spawn(stop.clone().run_until_cancelled_owned(following).boxed());
    }

    /// Connects to the API server, and starts what needs it.
    async fn follow(
        self,
        pods: Pods,
        queue: EventQueue,
        node: String,
        source: Option<(Source, LastReported)>,
        stop: CancellationToken,
    ) {
        let (kubernetes, metrics) = (&self.config.kubernetes, self.metrics.api);
        let client = loop {
            match api::connect(kubernetes.kubeconfig.as_deref()).await {
                Ok(client) => break client,
                // Files that are not there yet may come.
                Err(error) => self.observer.note(DaemonPart::KubernetesApi, Err(error.to_string())),
            }
            sleep(RETRY).await;
        };
        let report = |part| -> api::Report {
            let observer = self.observer.clone();
            Arc::new(move |result| observer.note(part, result))
        };
        tokio::spawn(queue.run(client.clone(), node.clone(), metrics.clone(), stop.clone()));
        if let Some(to_evict) = self.to_evict {
            let evictor = Evictor {
                pods: pods.clone(),
                to_evict,
                spared: kubernetes.placement_off_namespaces.clone(),
                own_pod: kubernetes.pod_uid.clone(),
                pace: EvictionTiming::default(),
                metrics: metrics.clone(),
                report: report(DaemonPart::Evictions),
            };
            tokio::spawn(evictor.run(client.clone(), node.clone(), stop.clone()));
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
            let looking = look_at_free(self.observer.clone(), source, pods.clone(), policy, latest);
            tokio::spawn(stop.clone().run_until_cancelled_owned(looking).boxed());
        }
        pods.follow(client, node, metrics, report(DaemonPart::KubernetesApi), stop).await;
    }
}

/// The pods that the guard names, in the order in which they are to go: those of the class `BestEffort` first, and of a
/// class those with the most. Guaranteed pods do not go, nor any that has less than one of them.
fn in_the_way(crowded: &[CrowdedNode], pods: &[Arc<StoredPod>]) -> Vec<(PodId, EvictionReason)> {
    let find = |uid: &String| pods.iter().find(|stored| stored.pod.id.uid == *uid);
    let is_guaranteed =
        |uid: &String| find(uid).is_some_and(|of| of.pod.request().qos() == QosClass::Guaranteed);
    let named = crowded.iter().flat_map(|of| {
        let stay = of.pods.iter().filter(|(uid, _)| is_guaranteed(uid)).map(|(_, has)| *has).max();
        let may_go = of.pods.iter().filter(move |(_, has)| stay.is_none_or(|stay| *has >= stay));
        may_go.map(|(uid, has)| (of.node, uid, *has))
    });
    let known = named.filter_map(|(node, uid, has)| {
        let of = find(uid)?;
        let rank = match of.pod.request().qos() {
            QosClass::BestEffort => 0,
            QosClass::Burstable => 1,
            QosClass::Guaranteed => return None,
        };
        Some((rank, Reverse(has), of.pod.id.clone(), EvictionReason::NodeShort { node, has }))
    });
    let mut known: Vec<_> = known.collect();
    known.sort_by(|a, b| (a.0, a.1, &a.2).cmp(&(b.0, b.1, &b.2)));
    known.into_iter().map(|(_, _, id, why)| (id, why)).collect()
}

/// Keeps the names of containers up to date.
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
        tracing::error!(%error, "the PodResources API is not served any more");
    }
}

/// The policy in the words of the scheduler: ours, or that of the kubelet that is observed.
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

/// Keeps up to date what is to be published of what is free.
async fn look_at_free(
    observer: Arc<Observer>,
    (source, devices): (Source, LastReported),
    pods: Pods,
    policy: (TopologyManagerPolicy, TopologyManagerScope),
    latest: watch::Sender<Option<Arc<NodeTopology>>>,
) {
    let (mut look, mut load) = (interval(LOOK), Load::default());
    for turn in (0..LOOKS_OF_LOAD).cycle() {
        look.tick().await;
        if turn == 0 {
            let observer = observer.clone();
            // It reads files and takes locks.
            if let Ok(seen) = tokio::task::spawn_blocking(move || observer.nodes()).await {
                load.look(&seen);
            }
        }
        let assigned = source();
        let fingerprint = pods.is_synced().then(|| fingerprint_of(&pods, &assigned));
        let mut topology = assigned.topology(&observer.machine(), policy, fingerprint);
        devices.get().add_to(&mut topology);
        load.add_to(&mut topology);
        let now = Some(Arc::new(topology));
        latest.send_if_modified(|known| std::mem::replace(known, now.clone()) != now);
    }
}

/// Over the pods that are accounted for: those that hold an allocation, and those that run without one. A pod that
/// was bound to this node but is not placed yet is none, so the scheduler goes on counting with its request.
fn fingerprint_of(pods: &Pods, assigned: &Assigned) -> String {
    let holds = |uid: &str| {
        assigned.held.iter().filter_map(|held| held.container.as_ref()).any(|of| of.pod_uid == uid)
    };
    let pods = pods.all();
    let accounted = pods
        .iter()
        .filter(|stored| !stored.pod.is_terminal && (stored.is_running || holds(&stored.pod.id.uid)))
        .map(|stored| (stored.pod.id.namespace.as_str(), stored.pod.id.name.as_str()));
    fingerprint::from_pods(accounted)
}

#[cfg(test)]
mod tests {
    use numaward_topology::{Bytes, NodeId};

    use super::*;

    fn pod(name: &str, requests: &str, limits: &str) -> Arc<StoredPod> {
        let text = format!(
            r#"{{"metadata": {{"name": "{name}", "namespace": "ns", "uid": "uid-{name}"}}, "spec": {{"containers":
            [{{"name": "main", "resources": {{"requests": {requests}, "limits": {limits}}}}}]}}}}"#
        );
        api::read_pod(text.as_bytes()).unwrap().into()
    }

    #[test]
    fn best_effort_pods_go_before_burstable_ones_and_of_these_the_largest_first() {
        let (some, all) = (r#"{"memory": "1Gi"}"#, r#"{"cpu": "1", "memory": "1Gi"}"#);
        let pods = [
            pod("burstable", some, "{}"),
            pod("small", "{}", "{}"),
            pod("large", "{}", "{}"),
            pod("guaranteed", all, all),
            pod("elsewhere", "{}", "{}"),
        ];
        let of = |name: &str, mib| (format!("uid-{name}"), Bytes::mib(mib));
        let crowded = [CrowdedNode {
            node: NodeId(1),
            pods: vec![of("burstable", 800), of("large", 30), of("small", 20), of("unknown", 10)],
        }];
        let to_go = in_the_way(&crowded, &pods);
        let names: Vec<&str> = to_go.iter().map(|(id, _)| id.name.as_str()).collect();
        assert_eq!(names, ["large", "small", "burstable"]);
        assert_eq!(to_go[0].1, EvictionReason::NodeShort { node: NodeId(1), has: Bytes::mib(30) });
        let mut behind = crowded;
        behind[0].pods.push(of("guaranteed", 30));
        let names = in_the_way(&behind, &pods).into_iter().map(|(id, _)| id.name).collect::<Vec<_>>();
        assert_eq!(names, ["large", "burstable"], "none that has less than one that stays");
    }
}
