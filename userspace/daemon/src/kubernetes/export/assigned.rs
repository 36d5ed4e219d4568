//! What is assigned, as the PodResources API tells it.
//!
//! Only pods are told of: whoever reads this looks each of them up in the API server. What workloads outside
//! Kubernetes hold is left out of what is allocatable instead.
//!
//! Devices are the kubelet's: what it tells of them is passed on, so that a reader needs but one socket.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use numaward_api::{self as api, PodContainer, Target};
use numaward_kube::pod_resources::{
    Assigned, Client,
    messages::{
        AllocatableResponse, ContainerDevices, ContainerMemory, ContainerResources, PodResources, cpu_ids,
    },
};
use numaward_topology::{Bytes, CpuSet, NodeId};
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};
use tokio_util::sync::CancellationToken;

use super::{
    View,
    free::{Foreign, exclusive},
    list,
};

/// How often the kubelet is asked for devices.
const ASK: Duration = Duration::from_secs(10);

/// Calls of the PodResources API. Clones share the counts.
#[derive(Clone, Debug)]
pub struct Calls(Family<[(&'static str, &'static str); 2], Counter>);

impl Default for Calls {
    /// All at zero.
    fn default() -> Self {
        let calls = Family::<[(&'static str, &'static str); 2], Counter>::default();
        for (method, result) in
            [("List", "ok"), ("Get", "ok"), ("Get", "not_found"), ("GetAllocatableResources", "ok")]
        {
            drop(calls.get_or_create(&[("method", method), ("result", result)]));
        }
        Self(calls)
    }
}

impl Calls {
    /// Registers them.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "pod_resources_calls",
            "Calls of the PodResources API, by method and how they ended",
            self.0.clone(),
        );
    }
}

/// The kubelet's devices, by namespace, pod and container; and all there are.
#[derive(Debug, Default)]
struct Devices {
    held: BTreeMap<(String, String, String), Vec<ContainerDevices>>,
    all: Vec<ContainerDevices>,
}

/// Tells what is assigned.
pub struct Teller {
    view: View,
    devices: Arc<RwLock<Devices>>,
    calls: Calls,
}

impl Teller {
    /// Tells what `view` gives.
    pub fn new(view: View, calls: Calls) -> Self {
        Self { view, devices: Arc::default(), calls }
    }

    /// Keeps asking the kubelet for its devices until the token is cancelled.
    pub fn ask_kubelet(&self, socket: PathBuf, stop: CancellationToken) -> impl Future<Output = ()> + use<> {
        let devices = self.devices.clone();
        async move {
            let ask = async {
                let mut ticks = tokio::time::interval(ASK);
                loop {
                    ticks.tick().await;
                    match devices_of(&socket).await {
                        Ok(now) => *devices.write().unwrap_or_else(PoisonError::into_inner) = now,
                        Err(error) => tracing::debug!(%error, "the kubelet does not tell its devices"),
                    }
                }
            };
            stop.run_until_cancelled(ask).await;
        }
    }
}

async fn devices_of(socket: &std::path::Path) -> Result<Devices, numaward_kube::pod_resources::CallError> {
    let client = Client::connect(socket).await?;
    let (pods, allocatable) = (client.list().await?, client.allocatable().await?);
    let mut held = BTreeMap::new();
    for pod in pods {
        for container in pod.containers.into_iter().filter(|container| !container.devices.is_empty()) {
            held.insert((pod.namespace.clone(), pod.name.clone(), container.name), container.devices);
        }
    }
    Ok(Devices { held, all: allocatable.devices })
}

fn memory(of: &api::Allocation) -> Vec<ContainerMemory> {
    of.memory
        .iter()
        .map(|block| ContainerMemory::new(&block.kind, Bytes(block.bytes), &list(&block.nodes)))
        .collect()
}

impl Assigned for Teller {
    fn pods(&self) -> Vec<PodResources> {
        let devices = self.devices.read().unwrap_or_else(PoisonError::into_inner);
        let mut pods: BTreeMap<(String, String), BTreeMap<String, ContainerResources>> = BTreeMap::new();
        // What a pod holds as a whole is told once, and not of its containers.
        let mut wholes: BTreeMap<(String, String), (Vec<i64>, Vec<ContainerMemory>)> = BTreeMap::new();
        for allocation in &(self.view)().allocations {
            let Target::Container(PodContainer { namespace, pod, container, shares_pod, .. }) =
                &allocation.target
            else {
                continue;
            };
            // A pod that nobody can look up is of no use to a reader.
            if pod.is_empty() {
                continue;
            }
            let mut resources =
                ContainerResources { name: container.clone(), ..ContainerResources::default() };
            let held = (cpu_ids(&list(&allocation.cpus)), memory(allocation));
            if *shares_pod {
                wholes.insert((namespace.clone(), pod.clone()), held);
            } else {
                (resources.cpu_ids, resources.memory) = held;
            }
            pods.entry((namespace.clone(), pod.clone())).or_default().insert(container.clone(), resources);
        }
        for ((namespace, pod, container), held) in &devices.held {
            let of_pod = pods.entry((namespace.clone(), pod.clone())).or_default();
            let resources = of_pod.entry(container.clone()).or_insert_with(|| ContainerResources {
                name: container.clone(),
                ..ContainerResources::default()
            });
            resources.devices.clone_from(held);
        }
        let mut pod = |(of, containers): ((String, String), BTreeMap<_, _>)| {
            let (cpu_ids, memory) = wholes.remove(&of).unwrap_or_default();
            let (namespace, name) = of;
            PodResources { name, namespace, containers: containers.into_values().collect(), cpu_ids, memory }
        };
        pods.into_iter().map(&mut pod).collect()
    }

    fn allocatable(&self) -> AllocatableResponse {
        let allocations = (self.view)();
        let foreign = Foreign::of(&allocations);
        let free = allocations
            .nodes
            .iter()
            .flat_map(|node| list::<CpuSet>(&node.free_cpus).iter().collect::<Vec<_>>());
        let cpus: CpuSet =
            free.chain(exclusive(&allocations).iter()).filter(|&cpu| !foreign.cpus.contains(cpu)).collect();
        let blocks = allocations.nodes.iter().flat_map(|node| {
            let foreign = &foreign;
            node.memory.iter().map(move |of| {
                let bytes = of.allocatable_bytes.saturating_sub(foreign.memory(node.node, &of.kind));
                ContainerMemory::new(&of.kind, Bytes(bytes), &[NodeId(node.node)].into_iter().collect())
            })
        });
        AllocatableResponse {
            devices: self.devices.read().unwrap_or_else(PoisonError::into_inner).all.clone(),
            cpu_ids: cpu_ids(&cpus),
            memory: blocks.collect(),
        }
    }

    fn called(&self, method: &'static str, is_ok: bool) {
        self.calls
            .0
            .get_or_create(&[("method", method), ("result", if is_ok { "ok" } else { "not_found" })])
            .inc();
    }
}
