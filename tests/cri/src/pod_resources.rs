//! Resources of containers, as a client of the kubelet's PodResources API reads them.
//!
//! Source: k8s.io/kubelet, `pkg/apis/podresources/v1`: the fields' numbers.

use prost::Message;
use serde_json::{Value, json};

use crate::{
    grpc::{CallError, GrpcClient},
    messages::Empty,
};

const LISTER: &str = "v1.PodResourcesLister";

#[derive(Clone, PartialEq, Message)]
struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pod_resources: Vec<AssignedPod>,
}

#[derive(Clone, PartialEq, Message)]
struct AssignedPod {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    namespace: String,
    #[prost(message, repeated, tag = "3")]
    containers: Vec<AssignedContainer>,
}

#[derive(Clone, PartialEq, Message)]
struct AssignedContainer {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int64, repeated, tag = "3")]
    cpu_ids: Vec<i64>,
    #[prost(message, repeated, tag = "4")]
    memory: Vec<Memory>,
}

#[derive(Clone, PartialEq, Message)]
struct Memory {
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(uint64, tag = "2")]
    size: u64,
    #[prost(message, optional, tag = "3")]
    topology: Option<Topology>,
}

#[derive(Clone, PartialEq, Message)]
struct Topology {
    #[prost(message, repeated, tag = "1")]
    nodes: Vec<TopologyNode>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct TopologyNode {
    #[prost(int64, tag = "1")]
    id: i64,
}

fn memory(of: &Memory) -> Value {
    let nodes: Vec<i64> =
        of.topology.iter().flat_map(|topology| &topology.nodes).map(|node| node.id).collect();
    json!({"type": of.kind, "size": of.size, "nodes": nodes})
}

/// Lists all containers with resources.
pub(crate) async fn list(client: &mut GrpcClient) -> Result<Value, CallError> {
    let listed: ListResponse = client.call_of(LISTER, "List", Empty {}).await?;
    let mut containers = Vec::new();
    for pod in &listed.pod_resources {
        let of_pod = pod.containers.iter().filter(|of| !of.cpu_ids.is_empty() || !of.memory.is_empty());
        containers.extend(of_pod.map(|of| {
            json!({
                "name": format!("{}/{}/{}", pod.namespace, pod.name, of.name),
                "cpus": of.cpu_ids,
                "memory": of.memory.iter().map(memory).collect::<Vec<_>>(),
            })
        }));
    }
    Ok(containers.into())
}
