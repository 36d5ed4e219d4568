//! This host as a node of a Kubernetes cluster: its pods, known from the API server, and what is told about it.
//!
//! The API server may come late and go at any time; whatever needs it starts when it is there, and says meanwhile what
//! is missing.

use std::{path::PathBuf, sync::Arc, time::Duration};

use numaward_config::{Config, OperatingMode, policy::TopologyManagerScope};
use numaward_engine::policy::TopologyManagerPolicy;
use numaward_kube::{
    api::{self, EventQueue, EventWriter, Pods},
    node_topology::{NodeTopology, Publisher, fingerprint},
    pod::{PodId, PodSource as _},
    pod_resources,
};
use numaward_model::{pod::container_name, port::ContainerNames as _};
use numaward_observe::{Observer, Part};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    kubernetes::{
        export::{
            View,
            assigned::{Calls, Teller},
            free,
        },
        kubelet::{Policies, pod_resources_socket},
    },
    socket::{self, SocketError},
};

/// How long to wait before a client that could not be made is tried again.
const RETRY: Duration = Duration::from_secs(30);
/// How often what is free is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What is counted. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    api: api::Figures,
    calls: Calls,
}

impl Figures {
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
    figures: Figures,
    mode: OperatingMode,
    policies: Policies,
    socket: Option<std::os::unix::net::UnixListener>,
    pods: Option<(Pods, EventQueue, String)>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("mode", &self.mode).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Makes what must be made while there are privileges: the socket. Nothing runs yet.
    pub fn prepare(
        config: &Config,
        mode: OperatingMode,
        policies: Policies,
        observer: &Arc<Observer>,
        figures: Figures,
    ) -> Result<Self, SocketError> {
        let socket = match &config.kubernetes.pod_resources.socket {
            Some(path) => Some(socket::listen(path, "kubernetes.podResources.socket")?),
            None => None,
        };
        let pods = config.kubernetes.node_name.clone().map(|node| {
            let (writer, queue) = EventWriter::new(figures.api.clone());
            (Pods::new(writer), queue, node)
        });
        let (config, observer) = (config.clone(), observer.clone());
        Ok(Self { config, observer, figures, mode, policies, socket, pods })
    }

    /// The pods, where the API server is to be asked for them.
    pub fn pods(&self) -> Option<Pods> {
        self.pods.as_ref().map(|(pods, ..)| pods.clone())
    }

    /// Starts what is configured. `allocations` gives what is assigned, where anything can be. To be called within a
    /// runtime of tokio.
    pub fn start(self, allocations: Option<View>, stop: &CancellationToken) {
        if let (Some(socket), Some(view)) = (self.socket, &allocations) {
            let teller = Teller::new(view.clone(), self.figures.calls.clone());
            tokio::spawn(teller.ask_kubelet(pod_resources_socket(&self.config), stop.clone()));
            tokio::spawn(serve_pod_resources(socket, teller, stop.clone()));
        }
        let Some((pods, queue, node)) = self.pods else {
            if self.config.kubernetes.node_resource_topology.enabled {
                let reason = "kubernetes.nodeName is not set: it is not known which node this is".to_owned();
                self.observer.note(Part::NodeResourceTopology, Err(reason));
            }
            return;
        };
        if self.mode == OperatingMode::Enforce && !self.config.kubernetes.nri.enabled {
            // With it, the runtime tells, and tells sooner.
            let naming = name_containers(pods.clone(), self.observer.clone());
            tokio::spawn(stop.clone().run_until_cancelled_owned(naming));
        }
        let scheduler = allocations.filter(|_| self.config.kubernetes.node_resource_topology.enabled);
        let publishing = scheduler.map(|view| {
            let topology = policy(&self.config, self.mode, &self.policies);
            let interval = self.config.kubernetes.node_resource_topology.interval.0;
            Publishing { observer: self.observer.clone(), view, pods: pods.clone(), topology, interval }
        });
        let link = Link {
            kubeconfig: self.config.kubernetes.kubeconfig,
            node,
            observer: self.observer,
            figures: self.figures.api,
        };
        tokio::spawn(stop.clone().run_until_cancelled_owned(link.run(pods, queue, publishing, stop.clone())));
    }
}

/// Keeps telling which containers are whose.
async fn name_containers(pods: Pods, observer: Arc<Observer>) {
    let mut changes = pods.changes();
    loop {
        let named = pods.all().into_iter().flat_map(|stored| {
            let PodId { namespace, name, .. } = &stored.pod.id;
            let named = stored.container_ids.iter();
            let named = named.map(|(id, container)| (id.clone(), container_name(namespace, name, container)));
            named.collect::<Vec<_>>()
        });
        observer.containers_are(named.collect(), true);
        if changes.changed().await.is_err() {
            return;
        }
    }
}

async fn serve_pod_resources(
    socket: std::os::unix::net::UnixListener,
    teller: Teller,
    stop: CancellationToken,
) {
    let listener = match tokio::net::UnixListener::from_std(socket) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "the PodResources API cannot be served"),
    };
    if let Err(error) = pod_resources::serve(listener, Arc::new(teller), stop).await {
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
        let word = |found: &Option<crate::kubernetes::kubelet::policies::Found>| {
            found.as_ref().map(|found| found.policy.clone()).unwrap_or_default()
        };
        let policy = word(&policies.topology).parse().unwrap_or_default();
        return (policy, word(&policies.scope).parse().unwrap_or_default());
    }
    let policy = config.topology_manager_policy.unwrap_or(TopologyManagerPolicy::Restricted);
    (policy, config.topology_manager_scope.unwrap_or_default())
}

struct Link {
    kubeconfig: Option<PathBuf>,
    node: String,
    observer: Arc<Observer>,
    figures: api::Figures,
}

impl Link {
    async fn run(
        self,
        pods: Pods,
        queue: EventQueue,
        publishing: Option<Publishing>,
        stop: CancellationToken,
    ) {
        let client = loop {
            match api::connect(self.kubeconfig.as_deref()).await {
                Ok(client) => break client,
                // Files that are not there yet may come.
                Err(error) => self.observer.note(Part::KubernetesApi, Err(error.to_string())),
            }
            tokio::time::sleep(RETRY).await;
        };
        let report = |part| -> api::Report {
            let observer = self.observer.clone();
            Arc::new(move |result| observer.note(part, result))
        };
        tokio::spawn(queue.run(client.clone(), self.node.clone(), self.figures.clone(), stop.clone()));
        if let Some(publishing) = publishing {
            let publisher = Publisher {
                client: client.clone(),
                node: self.node.clone(),
                interval: publishing.interval,
                figures: self.figures.clone(),
                report: report(Part::NodeResourceTopology),
            };
            let latest = watch::Sender::new(None);
            tokio::spawn(publisher.run(latest.subscribe(), stop.clone()));
            tokio::spawn(stop.clone().run_until_cancelled_owned(publishing.run(latest)));
        }
        pods.follow(client, self.node, self.figures, report(Part::KubernetesApi), stop).await;
    }
}

/// Keeps up to date what is published of what is free.
struct Publishing {
    observer: Arc<Observer>,
    view: View,
    pods: Pods,
    topology: (TopologyManagerPolicy, TopologyManagerScope),
    interval: Duration,
}

impl Publishing {
    async fn run(self, latest: watch::Sender<Option<Arc<NodeTopology>>>) {
        let mut look = tokio::time::interval(LOOK);
        loop {
            look.tick().await;
            let allocations = (self.view)();
            let fingerprint = self.fingerprint(&allocations);
            let topology = free::topology(&self.observer.machine(), &allocations, self.topology, fingerprint);
            latest.send_if_modified(|known| {
                let is_new = known.as_deref() != Some(&topology);
                if is_new {
                    *known = Some(Arc::new(topology));
                }
                is_new
            });
        }
    }

    /// Over the pods that are accounted for: those that hold an allocation, and those that run without one. A pod that
    /// was bound to this node but is not placed yet is none, so the scheduler goes on counting with its request.
    fn fingerprint(&self, allocations: &numaward_api::Allocations) -> Option<String> {
        if !self.pods.is_synced() {
            return None;
        }
        let holds = |uid: &str| {
            allocations.allocations.iter().any(|allocation| match &allocation.target {
                numaward_api::Target::Container(container) => container.pod_uid == uid,
                _ => false,
            })
        };
        let pods = self.pods.all();
        let accounted = pods
            .iter()
            .filter(|stored| !stored.pod.is_terminal && (stored.is_running || holds(&stored.pod.id.uid)))
            .map(|stored| (stored.pod.id.namespace.as_str(), stored.pod.id.name.as_str()));
        Some(fingerprint::of(accounted))
    }
}
