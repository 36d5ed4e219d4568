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
use numaward_topology::{NodeId, ZoneKind};
use serde::Serialize;

pub use self::publish::Publisher;

/// A resource of a zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// `None` for CPUs, in whole ones; else memory of a kind, in bytes.
    pub kind: Option<ZoneKind>,
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

/// The object as the API server takes it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Object<'a> {
    api_version: &'static str,
    kind: &'static str,
    metadata: Metadata<'a>,
    topology_policies: [&'static str; 1],
    attributes: Vec<Attribute<'a>>,
    zones: Vec<ObjectZone>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Metadata<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    owner_references: Vec<OwnerReference<'a>>,
}

/// With its Kubernetes node gone, the object is too.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct OwnerReference<'a> {
    api_version: &'static str,
    kind: &'static str,
    name: &'a str,
    uid: &'a str,
}

#[derive(Debug, Serialize)]
struct Attribute<'a> {
    name: &'static str,
    value: &'a str,
}

#[derive(Debug, Serialize)]
struct ObjectZone {
    name: String,
    r#type: &'static str,
    costs: Vec<Cost>,
    resources: Vec<ObjectResource>,
}

#[derive(Debug, Serialize)]
struct Cost {
    name: String,
    value: u32,
}

#[derive(Debug, Serialize)]
struct ObjectResource {
    name: String,
    capacity: String,
    allocatable: String,
    available: String,
}

/// The group of the API, its version and what belongs to them.
const GROUP: &str = "topology.node.k8s.io";
const VERSION: &str = "v1alpha2";
const API_VERSION: &str = "topology.node.k8s.io/v1alpha2";
const KIND: &str = "NodeResourceTopology";
const PLURAL: &str = "noderesourcetopologies";

fn zone_name(node: NodeId) -> String {
    format!("node-{node}")
}

impl NodeTopology {
    /// The object for the Kubernetes node `name`, whose UID is `uid` if that is known.
    fn object<'a>(&'a self, name: &'a str, uid: Option<&'a str>) -> Object<'a> {
        let mut attributes = vec![
            Attribute { name: "topologyManagerPolicy", value: self.policy.as_str() },
            Attribute { name: "topologyManagerScope", value: self.scope.as_str() },
        ];
        if let Some(fingerprint) = &self.fingerprint {
            attributes.push(Attribute { name: fingerprint::ATTRIBUTE, value: fingerprint });
            attributes.push(Attribute { name: fingerprint::METHOD_ATTRIBUTE, value: fingerprint::METHOD });
        }
        let resource = |resource: &Resource| ObjectResource {
            name: resource.kind.map_or_else(|| "cpu".to_owned(), |kind| kind.to_string()),
            capacity: resource.capacity.to_string(),
            allocatable: resource.allocatable.to_string(),
            available: resource.available.to_string(),
        };
        let zone = |zone: &Zone| ObjectZone {
            name: zone_name(zone.node),
            r#type: "Node",
            costs: zone
                .distances
                .iter()
                .map(|&(node, value)| Cost { name: zone_name(node), value })
                .collect(),
            resources: zone.resources.iter().map(resource).collect(),
        };
        let owner = |uid| OwnerReference { api_version: "v1", kind: "Node", name, uid };
        Object {
            api_version: API_VERSION,
            kind: KIND,
            metadata: Metadata { name, owner_references: uid.map(owner).into_iter().collect() },
            topology_policies: [with_scope(self.policy, self.scope)],
            attributes,
            zones: self.zones.iter().map(zone).collect(),
        }
    }
}
