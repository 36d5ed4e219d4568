//! NodeResourceTopology: what is free on each NUMA node, published for the cluster's scheduler.
//!
//! The scheduler knows how much a Kubernetes node has free, not on which NUMA node; so it sends pods that cannot fit.
//! The plugin `NodeResourceTopologyMatch` reads these objects and keeps such pods away.
//!
//! What it reads is narrow: zones of type `Node`, named `node-N`, with costs to other zones by the same names; of each
//! resource the amount `available`; the attributes `topologyManagerPolicy` and `topologyManagerScope` in the kubelet's
//! words; and the [`fingerprint`] of the pods that are accounted for, without which a scheduler that reserves ahead
//! never trusts the object again.
//!
//! Sources: the API `topology.node.k8s.io/v1alpha2`, KEP-1858 and the scheduler plugin's documentation.

pub mod fingerprint;
mod publish;

use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
use numaward_topology::NodeId;
use serde_json::{Value, json};

pub use self::publish::Publisher;

/// A resource of a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// As pods ask for it: `cpu`, in whole ones; memory of a kind, in bytes; or devices, such as `vendor.example/nic`.
    pub name: String,
    /// All there is.
    pub capacity: u64,
    /// What pods can have.
    pub allocatable: u64,
    /// What they can still have.
    pub available: u64,
}

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Which.
    pub node: NodeId,
    /// Its relative distance to each node.
    pub distances: Vec<(NodeId, u32)>,
    /// Its resources.
    pub resources: Vec<Resource>,
    /// Its other attributes, by name. The scheduler plugin does not read it.
    pub attributes: Vec<(&'static str, String)>,
}

/// The word of `topologyPolicies`, which older schedulers read.
const fn with_scope(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> &'static str {
    use TopologyManagerPolicy::{BestEffort, None, Restricted, SingleNumaNode};
    use TopologyManagerScope::{Container, Pod};
    match (policy, scope) {
        (None, _) => "None",
        (BestEffort, Container) => "BestEffortContainerLevel",
        (BestEffort, Pod) => "BestEffortPodLevel",
        (Restricted, Container) => "RestrictedContainerLevel",
        (Restricted, Pod) => "RestrictedPodLevel",
        (SingleNumaNode, Container) => "SingleNUMANodeContainerLevel",
        (SingleNumaNode, Pod) => "SingleNUMANodePodLevel",
    }
}

/// What is published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTopology {
    /// The policy by which pods are placed.
    pub policy: TopologyManagerPolicy,
    /// Its scope.
    pub scope: TopologyManagerScope,
    /// The nodes.
    pub zones: Vec<Zone>,
    /// The [`fingerprint`] of the pods that are accounted for; none while they are not known.
    pub fingerprint: Option<String>,
}

/// The group of the API, its version and what belongs to them.
const GROUP: &str = "topology.node.k8s.io";
const VERSION: &str = "v1alpha2";
const KIND: &str = "NodeResourceTopology";
const PLURAL: &str = "noderesourcetopologies";

fn zone_name(node: NodeId) -> String {
    format!("node-{node}")
}

impl NodeTopology {
    /// The object for the Kubernetes node `name`, whose UID is `uid` if that is known: with its Kubernetes node gone, the
    /// object is too.
    fn object(&self, name: &str, uid: Option<&str>) -> Value {
        let attribute = |name: &str, value: &str| json!({"name": name, "value": value});
        let mut attributes = vec![
            attribute("topologyManagerPolicy", self.policy.as_str()),
            attribute("topologyManagerScope", self.scope.as_str()),
        ];
        if let Some(fingerprint) = &self.fingerprint {
            attributes.push(attribute(fingerprint::ATTRIBUTE, fingerprint));
            attributes.push(attribute(fingerprint::METHOD_ATTRIBUTE, fingerprint::METHOD));
        }
        let cost = |&(node, value): &(NodeId, u32)| json!({"name": zone_name(node), "value": value});
        let resource = |resource: &Resource| {
            json!({
                "name": resource.name,
                "capacity": resource.capacity.to_string(),
                "allocatable": resource.allocatable.to_string(),
                "available": resource.available.to_string(),
            })
        };
        let zone = |zone: &Zone| {
            let attributes = zone.attributes.iter().map(|(name, value)| attribute(name, value));
            json!({
                "name": zone_name(zone.node),
                "type": "Node",
                "attributes": attributes.collect::<Value>(),
                "costs": zone.distances.iter().map(cost).collect::<Value>(),
                "resources": zone.resources.iter().map(resource).collect::<Value>(),
            })
        };
        let mut metadata = json!({"name": name});
        if let Some(uid) = uid {
            metadata["ownerReferences"] =
                json!([{"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}]);
        }
        json!({
            "apiVersion": format!("{GROUP}/{VERSION}"),
            "kind": KIND,
            "metadata": metadata,
            "topologyPolicies": [with_scope(self.policy, self.scope)],
            "attributes": attributes,
            "zones": self.zones.iter().map(zone).collect::<Value>(),
        })
    }
}
