//! What is assigned, as the PodResources API reports it.
//!
//! As of the kubelet, all pods of the host are reported that have not ended, also those that hold nothing: the topology
//! updater of Node Feature Discovery makes its fingerprint of all of them. Of a pod, there are the containers and the
//! sidecars. Only pods are reported: a reader looks each of them up in the API server. What workloads outside
//! Kubernetes hold is subtracted from what is allocatable instead.
//!
//! Devices are the kubelet's: what it reports of them is passed on, so that a reader needs but one socket.

use std::collections::{BTreeMap, BTreeSet};

use numaward_engine::ContainerRequest;
use numaward_kube::{
    api::Pods,
    pod_resources::{
        self,
        messages::{AllocatableResponse, ContainerMemory, ContainerResources, PodResources, cpu_ids},
    },
};
use numaward_topology::{Bytes, NodeSet, ZoneKind};
use prometheus_client::{
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use super::{Source, devices::LastReported};

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

/// Answers from what is assigned.
pub struct PodReporter {
    source: Source,
    pods: Option<Pods>,
    devices: LastReported,
    calls: Calls,
}

impl PodReporter {
    /// Answers with what `source` gives, and with these devices. Of these pods, also those that hold nothing are there.
    pub fn new(source: Source, pods: Option<Pods>, devices: LastReported, calls: Calls) -> Self {
        Self { source, pods, devices, calls }
    }
}

fn memory(kind: ZoneKind, bytes: Bytes, nodes: &NodeSet) -> ContainerMemory {
    ContainerMemory::new(kind.to_string(), bytes, nodes)
}

impl pod_resources::AssignmentSource for PodReporter {
    fn pods(&self) -> Vec<PodResources> {
        let mut pods: BTreeMap<(String, String), PodResources> = BTreeMap::new();
        let mut containers: BTreeMap<(String, String, String), ContainerResources> = BTreeMap::new();
        // What an init container holds is its pod's afterwards.
        let mut passing = BTreeSet::new();
        let known = self.pods.as_ref().map(Pods::all).unwrap_or_default();
        for pod in known.iter().map(|stored| &stored.pod).filter(|pod| !pod.is_terminal) {
            let (namespace, name) = (&pod.id.namespace, &pod.id.name);
            let named = |of: &ContainerRequest| (namespace.clone(), name.clone(), of.name.to_string());
            let (sidecars, init): (Vec<_>, Vec<_>) =
                pod.init_containers.iter().partition(|of| of.restartable);
            passing.extend(init.into_iter().map(named));
            let lasting = sidecars.into_iter().chain(&pod.containers);
            containers.extend(lasting.map(|of| (named(of), ContainerResources::default())));
        }
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
        for (container, held) in &self.devices.get().held {
            containers.entry(container.clone()).or_default().devices.clone_from(held);
        }
        containers.retain(|named, _| !passing.contains(named));
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
    use crate::kubernetes::export::{Assigned, Held};

    fn pod(name: &str, phase: &str, spec: &Value) -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod", "spec": spec, "status": { "phase": phase },
            "metadata": { "name": name, "namespace": "n", "uid": name },
        })
    }

    fn held(pod: &str, container: &str, cpus: &str) -> Held {
        let [namespace, pod, container] = ["n", pod, container].map(str::to_owned);
        let of = PodContainer { namespace, pod_uid: pod.clone(), pod, container, shares_pod: false };
        let (cpus, hidden_cpus) = (cpus.parse().unwrap(), CpuSet::new());
        Held { container: Some(of), cpus, hidden_cpus, blocks: Vec::new() }
    }

    #[tokio::test]
    async fn all_pods_are_reported_that_have_not_ended() {
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
        // One that the API server does not know holds something too.
        let all =
            vec![held("several", "main", "1"), held("several", "init", "1"), held("static", "c", "2-3")];
        let source: Source = Arc::new(move || Assigned {
            held: all.clone(),
            free_cpus: CpuSet::new(),
            pod_cpus: CpuSet::new(),
            memory: BTreeMap::new(),
        });
        let reporter = PodReporter::new(source, Some(pods), LastReported::default(), Calls::default());
        let found = reporter.pods().into_iter().map(|pod| {
            let containers = pod.containers.into_iter().map(|of| (of.name, of.cpu_ids));
            (pod.namespace, pod.name, containers.collect::<Vec<_>>())
        });
        let all = |of: &[(&str, &[i64])]| -> Vec<(String, Vec<i64>)> {
            of.iter().map(|(name, cpus)| ((*name).to_owned(), cpus.to_vec())).collect()
        };
        let expected = [
            ("plain", all(&[("a", &[]), ("b", &[])])),
            ("several", all(&[("main", &[1]), ("sidecar", &[])])),
            ("static", all(&[("c", &[2, 3])])),
        ];
        let expected = expected.map(|(name, containers)| ("n".to_owned(), name.to_owned(), containers));
        assert_eq!(found.collect::<Vec<_>>(), expected);
    }
}
