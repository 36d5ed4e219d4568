//! Resources of a Kubernetes node, as its kubelet reports them to the API server.

use std::collections::BTreeMap;

use futures_util::{FutureExt as _, future::BoxFuture};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{ApiResource, DynamicObject},
};
use numaward_engine::Quantity;
use numaward_topology::Bytes;
use serde_json::Value;

use super::{Cause, RequestError};

/// Prefix of the names of hugepages.
const HUGEPAGES_PREFIX: &str = "hugepages-";

/// Capacity and allocatable resources in the status of a Kubernetes node, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeResources {
    capacity: BTreeMap<String, Quantity>,
    allocatable: BTreeMap<String, Quantity>,
}

/// CPUs and memory of a Kubernetes node. The memory has no hugepages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeAmounts {
    /// CPU time in thousandths of a CPU.
    pub cpu_millis: u64,
    pub memory: Bytes,
}

impl NodeResources {
    /// Reads the resources from the field `status` of a node. Values that are no quantities are ignored.
    pub fn from_status(status: &Value) -> Self {
        let resources = |key: &str| {
            let fields = status[key].as_object().into_iter().flatten();
            let fields = fields.filter_map(|(name, amount)| Some((name, amount.as_str()?.parse().ok()?)));
            fields.map(|(name, amount)| (name.clone(), amount)).collect()
        };
        Self { capacity: resources("capacity"), allocatable: resources("allocatable") }
    }

    /// Returns the allocatable CPUs and memory. Returns a message if one is missing.
    pub fn allocatable_amounts(&self) -> Result<NodeAmounts, String> {
        amounts(&self.allocatable, "allocatable")
    }

    /// Returns the CPUs and the memory that are reserved: the part of the capacity that is not allocatable. Returns a message if one is
    /// missing.
    pub fn reserved(&self) -> Result<NodeAmounts, String> {
        let (capacity, allocatable) = (amounts(&self.capacity, "capacity")?, self.allocatable_amounts()?);
        let pools = self.allocatable.iter().filter(|(name, _)| name.starts_with(HUGEPAGES_PREFIX));
        let pools = pools.fold(0, |sum: u64, (_, amount)| sum.saturating_add(amount.units().unwrap_or(0)));
        let other = allocatable.memory.0.saturating_add(pools);
        Ok(NodeAmounts {
            cpu_millis: capacity.cpu_millis.saturating_sub(allocatable.cpu_millis),
            memory: Bytes(capacity.memory.0.saturating_sub(other)),
        })
    }
}

fn amounts(resources: &BTreeMap<String, Quantity>, of: &str) -> Result<NodeAmounts, String> {
    let find = |name: &str, read: fn(Quantity) -> Option<u64>| {
        let found = resources.get(name).copied().and_then(read);
        found.ok_or_else(|| format!("the node reports no status.{of}.{name}"))
    };
    Ok(NodeAmounts {
        cpu_millis: find("cpu", Quantity::millis)?,
        memory: Bytes(find("memory", Quantity::units)?),
    })
}

/// Returns the UID of a Kubernetes node. Without it, objects of the node are still written, but outlive it.
pub(crate) async fn node_uid(client: &kube::Client, node: &str) -> Option<String> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<Node>(&()));
    match api.get(node).await.map_err(RequestError::from) {
        Ok(node) => node.metadata.uid,
        Err(error) => {
            tracing::debug!(%error, node, "the UID of the Kubernetes node is not known");
            None
        }
    }
}

/// Returns the resources that a Kubernetes node reports.
pub fn node_resources(client: kube::Client, node: &str) -> BoxFuture<'_, Result<NodeResources, String>> {
    async move {
        let api: Api<DynamicObject> = Api::all_with(client, &ApiResource::erase::<Node>(&()));
        let node = api.get(node).await.map_err(|error| RequestError::from(error).to_string())?;
        Ok(NodeResources::from_status(&node.data["status"]))
    }
    .boxed()
}

/// Returns the value of a label of a Kubernetes node; `None` if the node does not have it.
pub fn node_label<'a>(
    client: kube::Client,
    node: &'a str,
    label: &'a str,
) -> BoxFuture<'a, Result<Option<String>, String>> {
    async move {
        let api: Api<DynamicObject> = Api::all_with(client, &ApiResource::erase::<Node>(&()));
        let node = api.get_metadata(node).await.map_err(|error| RequestError::from(error).to_string())?;
        Ok(node.metadata.labels.and_then(|mut labels| labels.remove(label)))
    }
    .boxed()
}

/// Returns the `KubeletConfiguration` of the kubelet that the client is connected to ([`super::connect_to_kubelet`]).
///
/// The kubelet asks the API server whether the caller may get `nodes/configz`, which gives no other right (Kubernetes 1.33, by default).
/// Through the API server, the same request needs `nodes/proxy`, with which commands run in every container of the cluster.
pub fn kubelet_configuration(kubelet: kube::Client) -> BoxFuture<'static, Result<Value, String>> {
    async move {
        let request = http::Request::get("/configz").body(Vec::new()).map_err(kube::Error::HttpError);
        let answer = match request {
            Ok(request) => kubelet.request::<Value>(request).await,
            Err(error) => Err(error),
        };
        let mut answer = answer.map_err(|error| {
            let error = RequestError::from(error);
            let hint = match error.cause {
                Cause::Forbidden => "; the service account needs the verb get of the resource nodes/configz",
                _ => "",
            };
            format!("{error}{hint}")
        })?;
        match answer["kubeletconfig"].take() {
            configuration @ Value::Object(_) => Ok(configuration),
            _ => Err("the answer has no kubeletconfig".to_owned()),
        }
    }
    .boxed()
}
