//! What is assigned, as the PodResources API reports it.
//!
//! Only pods are reported: a reader looks each of them up in the API server. What workloads outside
//! Kubernetes hold is subtracted from what is allocatable instead.
//!
//! Devices are the kubelet's: what it reports of them is passed on, so that a reader needs but one socket.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use numaward_kube::pod_resources::{
    self, CallError, Client,
    messages::{
        AllocatableResponse, ContainerDevices, ContainerMemory, ContainerResources, PodResources, cpu_ids,
    },
};
use numaward_topology::{Bytes, NodeSet, ZoneKind};
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use super::Source;

/// How often the kubelet is asked for devices.
const ASK: Duration = Duration::from_secs(10);

/// Calls of the PodResources API. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct Calls(Family<[(&'static str, &'static str); 2], Counter>);

impl Calls {
    /// Registers them, all at zero.
    pub fn register(&self, registry: &mut Registry) {
        for (method, result) in
            [("List", "ok"), ("Get", "ok"), ("Get", "not_found"), ("GetAllocatableResources", "ok")]
        {
            drop(self.0.get_or_create(&[("method", method), ("result", result)]));
        }
        let help = "Calls of the PodResources API, by method and how they ended";
        registry.register("pod_resources_calls", help, self.0.clone());
    }
}

/// The kubelet's devices, by namespace, pod and container; and all there are.
#[derive(Debug, Default)]
struct Devices {
    held: BTreeMap<(String, String, String), Vec<ContainerDevices>>,
    all: Vec<ContainerDevices>,
}

impl Devices {
    async fn ask(socket: &Path) -> Result<Self, CallError> {
        let client = Client::connect(socket).await?;
        let (pods, allocatable) = (client.list().await?, client.allocatable().await?);
        let held = pods.into_iter().flat_map(|PodResources { namespace, name, containers, .. }| {
            let named =
                move |of: ContainerResources| ((namespace.clone(), name.clone(), of.name), of.devices);
            containers.into_iter().map(named)
        });
        let held = held.filter(|(_, devices)| !devices.is_empty()).collect();
        Ok(Self { held, all: allocatable.devices })
    }
}

/// Answers from what is assigned.
pub struct Teller {
    source: Source,
    devices: Arc<RwLock<Devices>>,
    calls: Calls,
}

impl Teller {
    /// Answers with what `source` gives.
    pub fn new(source: Source, calls: Calls) -> Self {
        Self { source, devices: Arc::default(), calls }
    }

    /// Keeps asking the kubelet for its devices.
    pub fn ask_kubelet(&self, socket: PathBuf) -> impl Future<Output = ()> + use<> {
        let devices = self.devices.clone();
        async move {
            let mut ticks = tokio::time::interval(ASK);
            loop {
                ticks.tick().await;
                match Devices::ask(&socket).await {
                    Ok(now) => *devices.write().unwrap_or_else(PoisonError::into_inner) = now,
                    Err(error) => tracing::debug!(%error, "the kubelet does not report its devices"),
                }
            }
        }
    }
}

fn memory(kind: ZoneKind, bytes: Bytes, nodes: &NodeSet) -> ContainerMemory {
    ContainerMemory::new(kind.to_string(), bytes, nodes)
}

impl pod_resources::Assigned for Teller {
    fn pods(&self) -> Vec<PodResources> {
        let mut pods: BTreeMap<(String, String), PodResources> = BTreeMap::new();
        let mut containers: BTreeMap<(String, String, String), ContainerResources> = BTreeMap::new();
        for held in (self.source)().held {
            // A pod that nobody can look up is of no use to a reader.
            let Some(of) = held.container.filter(|of| !of.pod.is_empty()) else { continue };
            let cpu_ids = cpu_ids(&held.cpus);
            let blocks = held.blocks.iter().map(|block| memory(block.kind, block.bytes, &block.affinity));
            let memory = blocks.collect();
            let mut resources = ContainerResources::default();
            // What a pod holds as a whole is reported once, and not of its containers.
            if of.shares_pod {
                let whole = PodResources { cpu_ids, memory, ..PodResources::default() };
                pods.insert((of.namespace.clone(), of.pod.clone()), whole);
            } else {
                (resources.cpu_ids, resources.memory) = (cpu_ids, memory);
            }
            containers.insert((of.namespace, of.pod, of.container), resources);
        }
        for (container, held) in &self.devices.read().unwrap_or_else(PoisonError::into_inner).held {
            containers.entry(container.clone()).or_default().devices.clone_from(held);
        }
        for ((namespace, pod, name), resources) in containers {
            let of = pods.entry((namespace, pod)).or_default();
            of.containers.push(ContainerResources { name, ..resources });
        }
        let named = |((namespace, name), of)| PodResources { namespace, name, ..of };
        pods.into_iter().map(named).collect()
    }

    fn allocatable(&self) -> AllocatableResponse {
        let assigned = (self.source)();
        let accounts = assigned.memory.iter().flat_map(|(&node, kinds)| {
            kinds.iter().map(move |(&kind, of)| memory(kind, of.allocatable, &NodeSet::single(node)))
        });
        AllocatableResponse {
            devices: self.devices.read().unwrap_or_else(PoisonError::into_inner).all.clone(),
            cpu_ids: cpu_ids(&assigned.pod_cpus),
            memory: accounts.collect(),
        }
    }

    fn called(&self, method: &'static str, is_ok: bool) {
        let result = if is_ok { "ok" } else { "not_found" };
        self.calls.0.get_or_create(&[("method", method), ("result", result)]).inc();
    }
}
