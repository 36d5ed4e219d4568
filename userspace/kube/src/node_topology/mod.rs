//! NodeResourceTopology: the free resources of each NUMA node, published for the cluster's scheduler.
//!
//! The scheduler knows the free resources of a Kubernetes node, but not those of its NUMA nodes, and so assigns pods
//! that do not fit. The plugin `NodeResourceTopologyMatch` reads these objects and filters out such nodes.
//!
//! The plugin reads: zones of type `Node`, named `node-N`, with costs to other zones by the same names; of each
//! resource the amount `available`; the attributes `topologyManagerPolicy` and `topologyManagerScope` in the
//! kubelet's words; the [`fingerprint`] of the pods that are included; and, for preemption, the [`numa_placement`] of
//! their containers. Without a matching fingerprint, a scheduler that reserves resources ahead does not trust the object.
//!
//! Sources: the API `topology.node.k8s.io/v1alpha2`, KEP-1858 and the scheduler plugin's documentation.

pub mod fingerprint;
pub mod numa_placement;
mod publish;

use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
use numaward_topology::NodeId;
use serde_json::{Value, json};

use self::numa_placement::NumaPlacement;
pub use self::publish::Publisher;

/// A resource of a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// The name in the requests of pods: `cpu`, in whole CPUs; a kind of memory, in bytes; or devices, such as `vendor.example/nic`.
    pub name: String,
    /// The total amount.
    pub capacity: u64,
    /// The amount for pods.
    pub allocatable: u64,
    /// The free amount for pods.
    pub available: u64,
}

/// A NUMA node and its resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    pub node: NodeId,
    /// Relative distance to each node.
    pub distances: Vec<(NodeId, u32)>,
    pub resources: Vec<Resource>,
    /// Further attributes by name. The scheduler plugin does not read them.
    pub attributes: Vec<(&'static str, String)>,
}

/// Returns the value of `topologyPolicies`, which older schedulers read.
const fn policy_with_scope(policy: TopologyManagerPolicy, scope: TopologyManagerScope) -> &'static str {
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

/// Contents of the published object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTopology {
    pub policy: TopologyManagerPolicy,
    pub scope: TopologyManagerScope,
    pub zones: Vec<Zone>,
    /// The [`fingerprint`] of the included pods; `None` while they are not known.
    pub fingerprint: Option<String>,
    /// The nodes of the containers of these pods; `None` unless each container with exclusive resources has one node.
    pub placement: Option<NumaPlacement>,
}

/// Group, version, kind and plural of the resource.
const GROUP: &str = "topology.node.k8s.io";
const VERSION: &str = "v1alpha2";
const KIND: &str = "NodeResourceTopology";
const PLURAL: &str = "noderesourcetopologies";

fn zone_name(node: NodeId) -> String {
    format!("node-{node}")
}

impl NodeTopology {
    /// Returns the object for the Kubernetes node `name`. If the node's UID is known, the API server deletes the
    /// object together with the node.
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
        if let Some(placement) = &self.placement {
            attributes.push(attribute(numa_placement::METADATA_ATTRIBUTE, &placement.metadata));
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
            let vector = self.placement.as_ref().and_then(|placement| placement.vectors.get(&zone.node));
            let vector = vector.map(|vector| attribute(numa_placement::VECTOR_ATTRIBUTE, vector));
            let attributes = zone.attributes.iter().map(|(name, value)| attribute(name, value)).chain(vector);
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
            "topologyPolicies": [policy_with_scope(self.policy, self.scope)],
            "attributes": attributes,
            "zones": self.zones.iter().map(zone).collect::<Value>(),
        })
    }
}
