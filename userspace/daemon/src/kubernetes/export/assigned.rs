//! The assigned resources in the messages of the PodResources API.
//!
//! Like the kubelet, the daemon reports all pods of the host that have not ended, also pods without assigned resources: the topology
//! updater of Node Feature Discovery computes its fingerprint from all of them. A pod has its containers and sidecars. Only pods are
//! reported, as a client looks each of them up at the API server; the resources of workloads outside Kubernetes are subtracted from the
//! allocatable ones instead.
//!
//! The kubelet assigns devices, also those of resource claims: its report of them is passed on, so that a client needs one socket only.

use std::collections::{BTreeMap, BTreeSet};

use numaward_engine::ContainerRequest;
use numaward_kube::{
    api::Pods,
    pod_resources::{
        self,
        messages::{AllocatableResponse, AssignedPodResources, ContainerMemory, ContainerResources, cpu_ids},
    },
};
use numaward_topology::{Bytes, NodeSet, ZoneKind};
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use super::{Source, devices::LatestDevices};

/// Metrics of the calls of the PodResources API. Clones share the counts.
#[derive(Clone, Debug, Default)]
pub struct CallMetrics(Family<[(&'static str, &'static str); 2], Counter>);

impl CallMetrics {
    /// Registers the metrics. Each label combination exists from the start, with the value 0.
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

/// Server of the PodResources API that reports the assigned resources.
pub struct PodReporter {
    source: Source,
    pods: Option<Pods>,
    devices: LatestDevices,
    calls: CallMetrics,
}

impl PodReporter {
    /// Creates a reporter of the resources of `source` and of `devices`. `pods` adds the pods without assigned resources.
    pub fn new(source: Source, pods: Option<Pods>, devices: LatestDevices, calls: CallMetrics) -> Self {
        Self { source, pods, devices, calls }
    }
}

fn memory(kind: ZoneKind, bytes: Bytes, nodes: &NodeSet) -> ContainerMemory {
    ContainerMemory::new(kind.to_string(), bytes, nodes)
}

impl pod_resources::AssignmentSource for PodReporter {
    fn pods(&self) -> Vec<AssignedPodResources> {
        let mut pods: BTreeMap<(String, String), AssignedPodResources> = BTreeMap::new();
        let mut containers: BTreeMap<(String, String, String), ContainerResources> = BTreeMap::new();
        // Init containers are not reported: the containers of the pod get their resources afterwards.
        let mut init_containers = BTreeSet::new();
        let known = self.pods.as_ref().map(Pods::all).unwrap_or_default();
        for pod in known.iter().map(|stored| &stored.pod).filter(|pod| !pod.is_terminal) {
            let (namespace, name) = (&pod.id.namespace, &pod.id.name);
            let key =
                |container: &ContainerRequest| (namespace.clone(), name.clone(), container.name.to_string());
            let (sidecars, init): (Vec<_>, Vec<_>) =
                pod.init_containers.iter().partition(|container| container.restartable);
            init_containers.extend(init.into_iter().map(key));
            let lasting = sidecars.into_iter().chain(&pod.containers);
            containers.extend(lasting.map(|container| (key(container), ContainerResources::default())));
        }
        for held in (self.source)().held {
            // A client cannot look up a pod without a name.
            let Some(container) = held.container.filter(|container| !container.pod.is_empty()) else {
                continue;
            };
            let cpu_ids = cpu_ids(&held.cpus);
            let blocks = held.blocks.iter().map(|block| memory(block.kind, block.bytes, &block.affinity));
            let memory = blocks.collect();
            let mut resources = ContainerResources::default();
            // Pod-level resources are reported once, for the pod and not for its containers.
            if container.shares_pod {
                let pod_level = AssignedPodResources { cpu_ids, memory, ..AssignedPodResources::default() };
                pods.insert((container.namespace.clone(), container.pod.clone()), pod_level);
            } else {
                (resources.cpu_ids, resources.memory) = (cpu_ids, memory);
            }
            containers.insert((container.namespace, container.pod, container.container), resources);
        }
        let devices = self.devices.get();
        for (container, held) in &devices.held {
            containers.entry(container.clone()).or_default().devices.clone_from(held);
        }
        for (container, claimed) in &devices.claimed {
            containers.entry(container.clone()).or_default().dynamic_resources.clone_from(claimed);
        }
        containers.retain(|key, _| !init_containers.contains(key));
        for ((namespace, pod, name), resources) in containers {
            let pod = pods.entry((namespace, pod)).or_default();
            pod.containers.push(ContainerResources { name, ..resources });
        }
        let with_name = |((namespace, name), pod)| AssignedPodResources { namespace, name, ..pod };
        pods.into_iter().map(with_name).collect()
    }

    fn allocatable(&self) -> AllocatableResponse {
        let assigned = (self.source)();
        let accounts = assigned.memory.iter().flat_map(|(&node, kinds)| {
            kinds
                .iter()
                .map(move |(&kind, account)| memory(kind, account.allocatable, &NodeSet::single(node)))
        });
        AllocatableResponse {
            devices: self.devices.get().all.clone(),
            cpu_ids: cpu_ids(&assigned.pod_cpus),
            memory: accounts.collect(),
        }
    }

    fn record_call(&self, method: &'static str, is_ok: bool) {
        let result = if is_ok { "ok" } else { "not_found" };
        self.calls.0.get_or_create(&[("method", method), ("result", result)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use numaward_api::PodContainer;
    use numaward_kube::{
        api::{self, ApiMetrics, EventWriter, fake::FakeApiServer},
        pod::PodSource as _,
        pod_resources::AssignmentSource as _,
    };
    use numaward_topology::CpuSet;
    use serde_json::{Value, json};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::kubernetes::export::{AssignedResources, HeldResources};

    fn pod(name: &str, phase: &str, spec: &Value) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod", "spec": spec, "status": { "phase": phase },
            "metadata": { "name": name, "namespace": "n", "uid": name },
        })
    }

    fn held(pod: &str, container: &str, cpus: &str) -> HeldResources {
        let [namespace, pod, container] = ["n", pod, container].map(str::to_owned);
        let container = PodContainer { namespace, pod_uid: pod.clone(), pod, container, shares_pod: false };
        let (cpus, hidden_cpus) = (cpus.parse().unwrap(), CpuSet::new());
        HeldResources { container: Some(container), cpus, hidden_cpus, blocks: Vec::new() }
    }

    #[tokio::test]
    async fn reports_all_pods_that_have_not_ended() {
        let server = FakeApiServer::start().await.unwrap();
        let plain = json!({ "nodeName": "node", "containers": [{ "name": "a" }, { "name": "b" }] });
        let several = json!({
            "nodeName": "node",
            "initContainers": [{ "name": "init" }, { "name": "sidecar", "restartPolicy": "Always" }],
            "containers": [{ "name": "main" }],
        });
        for (name, phase, spec) in
            [("plain", "Pending", &plain), ("over", "Failed", &plain), ("several", "Running", &several)]
        {
            server.put_pod(pod(name, phase, spec));
        }
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        std::fs::write(&kubeconfig, server.kubeconfig()).unwrap();
        let client = api::connect(Some(&kubeconfig)).await.unwrap();
        let pods = Pods::new(EventWriter::new(ApiMetrics::default()).0);
        let (following, stop) = (pods.clone(), CancellationToken::new());
        let _stopped = stop.clone().drop_guard();
        let report: api::Report = Arc::new(|_| {});
        tokio::spawn(async move {
            following.follow(client, "node".to_owned(), ApiMetrics::default(), report, stop).await;
        });
        while !pods.is_synced() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // A pod that the API server does not know is reported too.
        let all =
            vec![held("several", "main", "1"), held("several", "init", "1"), held("static", "c", "2-3")];
        let source: Source = Arc::new(move || AssignedResources {
            held: all.clone(),
            free_cpus: CpuSet::new(),
            pod_cpus: CpuSet::new(),
            memory: BTreeMap::new(),
            charged: BTreeMap::new(),
            charged_to_host: BTreeMap::new(),
        });
        let reporter = PodReporter::new(source, Some(pods), LatestDevices::default(), CallMetrics::default());
        let found = reporter.pods().into_iter().map(|pod| {
            let containers = pod.containers.into_iter().map(|container| (container.name, container.cpu_ids));
            (pod.namespace, pod.name, containers.collect::<Vec<_>>())
        });
        let containers = |all: &[(&str, &[i64])]| -> Vec<(String, Vec<i64>)> {
            all.iter().map(|(name, cpus)| ((*name).to_owned(), cpus.to_vec())).collect()
        };
        let expected = [
            ("plain", containers(&[("a", &[]), ("b", &[])])),
            ("several", containers(&[("main", &[1]), ("sidecar", &[])])),
            ("static", containers(&[("c", &[2, 3])])),
        ];
        let expected = expected.map(|(name, containers)| ("n".to_owned(), name.to_owned(), containers));
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
