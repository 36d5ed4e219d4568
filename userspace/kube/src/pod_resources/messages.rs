//! Messages of the PodResources API. The protocol defines their field numbers and types. The decoder skips fields
//! that are not listed, so newer peers may send more.

use numaward_topology::{Bytes, CpuId, CpuSet, NodeId, NodeSet};
use prost::Message;

/// Response of `List`: all pods.
#[derive(Clone, PartialEq, Message)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub pod_resources: Vec<AssignedPodResources>,
}

/// Request of `Get`: one pod by namespace and name.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct GetRequest {
    #[prost(string, tag = "1")]
    pub pod_name: String,
    #[prost(string, tag = "2")]
    pub pod_namespace: String,
}

/// Response of `Get`: one pod.
#[derive(Clone, PartialEq, Message)]
pub struct GetResponse {
    #[prost(message, optional, tag = "1")]
    pub pod_resources: Option<AssignedPodResources>,
}

/// Response of `GetAllocatableResources`: all resources that can be assigned, including those that are.
#[derive(Clone, PartialEq, Message)]
pub struct AllocatableResponse {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<ContainerDevices>,
    #[prost(int64, repeated, tag = "2")]
    pub cpu_ids: Vec<i64>,
    /// Memory: one entry for each node and kind.
    #[prost(message, repeated, tag = "3")]
    pub memory: Vec<ContainerMemory>,
}

/// Resources that are assigned to a pod.
#[derive(Clone, PartialEq, Message)]
pub struct AssignedPodResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
    /// CPUs that the pod holds as a whole, shared by its containers.
    #[prost(int64, repeated, tag = "4")]
    pub cpu_ids: Vec<i64>,
    /// Memory that the pod holds as a whole.
    #[prost(message, repeated, tag = "5")]
    pub memory: Vec<ContainerMemory>,
}

/// Resources that are assigned to a container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerResources {
    #[prost(string, tag = "1")]
    pub name: String,
    /// Devices of device plugins.
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
    /// Exclusive CPUs; empty for a container on the shared pool.
    #[prost(int64, repeated, tag = "3")]
    pub cpu_ids: Vec<i64>,
    /// Memory by node set and kind.
    #[prost(message, repeated, tag = "4")]
    pub memory: Vec<ContainerMemory>,
    /// Devices of DRA drivers, by resource claims.
    #[prost(message, repeated, tag = "5")]
    pub dynamic_resources: Vec<DynamicResource>,
}

/// Devices of a resource claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DynamicResource {
    #[prost(string, tag = "2")]
    pub claim_name: String,
    #[prost(string, tag = "3")]
    pub claim_namespace: String,
    #[prost(message, repeated, tag = "4")]
    pub claim_resources: Vec<ClaimResource>,
}

/// A device of a resource claim.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ClaimResource {
    /// Names by the Container Device Interface. In the protocol, each is a message with the name as field 1, which is prost's encoding
    /// of a plain text.
    #[prost(message, repeated, tag = "1")]
    pub cdi_devices: Vec<String>,
    #[prost(string, tag = "2")]
    pub driver_name: String,
    #[prost(string, tag = "3")]
    pub pool_name: String,
    #[prost(string, tag = "4")]
    pub device_name: String,
}

/// Memory of one kind on a set of nodes.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerMemory {
    /// `memory`, `hugepages-2Mi`, `hugepages-1Gi`.
    #[prost(string, tag = "1")]
    pub memory_type: String,
    /// Size in bytes.
    #[prost(uint64, tag = "2")]
    pub size: u64,
    #[prost(message, optional, tag = "3")]
    pub topology: Option<TopologyInfo>,
}

/// Devices of one resource.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct ContainerDevices {
    /// The resource, such as `vendor.example/nic`.
    #[prost(string, tag = "1")]
    pub resource_name: String,
    /// Ids that the device plugin reported.
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
    /// Nodes of the devices, if the device plugin reports them.
    #[prost(message, optional, tag = "3")]
    pub topology: Option<TopologyInfo>,
}

/// A set of nodes.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct TopologyInfo {
    /// Ids of the nodes. In the protocol, each is a message with the id as field 1, which is prost's encoding of a plain number.
    #[prost(message, repeated, tag = "1")]
    pub nodes: Vec<i64>,
}

impl ContainerMemory {
    pub fn new(kind: impl Into<String>, size: Bytes, nodes: &NodeSet) -> Self {
        Self { memory_type: kind.into(), size: size.0, topology: Some(nodes.into()) }
    }

    /// Returns the nodes of the memory; empty if they are not reported.
    pub fn nodes(&self) -> NodeSet {
        self.topology.as_ref().map(TopologyInfo::node_set).unwrap_or_default()
    }
}

impl From<&NodeSet> for TopologyInfo {
    fn from(nodes: &NodeSet) -> Self {
        Self { nodes: nodes.iter().map(|node| node.0.into()).collect() }
    }
}

impl TopologyInfo {
    /// Returns the nodes. Invalid ids are ignored.
    pub fn node_set(&self) -> NodeSet {
        self.nodes.iter().filter_map(|&id| u32::try_from(id).ok().map(NodeId)).collect()
    }
}

/// Converts CPUs to the protocol's representation.
pub fn cpu_ids(cpus: &CpuSet) -> Vec<i64> {
    cpus.iter().map(|cpu| cpu.0.into()).collect()
}

/// Converts CPUs from the protocol's representation. Invalid ids are ignored.
pub fn cpu_set(ids: &[i64]) -> CpuSet {
    ids.iter().filter_map(|&id| u32::try_from(id).ok().map(CpuId)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected bytes are those of a client that was generated from the published protocol.
    #[test]
    fn messages_match_published_protocol() {
        let pod = AssignedPodResources {
            name: "p".to_owned(),
            namespace: "n".to_owned(),
            containers: vec![ContainerResources {
                name: "c".to_owned(),
                devices: vec![ContainerDevices {
                    resource_name: "r".to_owned(),
                    device_ids: vec!["d".to_owned()],
                    topology: None,
                }],
                cpu_ids: vec![2, 3],
                memory: vec![ContainerMemory::new("memory", Bytes(5), &"1".parse().unwrap())],
                dynamic_resources: vec![DynamicResource {
                    claim_name: "g".to_owned(),
                    claim_namespace: "n".to_owned(),
                    claim_resources: vec![ClaimResource {
                        cdi_devices: vec!["x".to_owned()],
                        driver_name: "d".to_owned(),
                        pool_name: "p".to_owned(),
                        device_name: "v".to_owned(),
                    }],
                }],
            }],
            cpu_ids: vec![7],
            memory: vec![],
        };
        let memory = [&[0x0a, 6][..], b"memory", &[0x10, 5, 0x1a, 4, 0x0a, 2, 0x08, 1]].concat();
        let device = [&[0x0a, 1][..], b"r", &[0x12, 1], b"d"].concat();
        let claimed =
            [&[0x0a, 3, 0x0a, 1][..], b"x", &[0x12, 1], b"d", &[0x1a, 1], b"p", &[0x22, 1], b"v"].concat();
        let claim =
            [&[0x12, 1][..], b"g", &[0x1a, 1], b"n", &[0x22, u8::try_from(claimed.len()).unwrap()], &claimed]
                .concat();
        let container = [
            &[0x0a, 1][..],
            b"c",
            &[0x12, 6],
            &device,
            &[0x1a, 2, 2, 3, 0x22, u8::try_from(memory.len()).unwrap()],
            &memory,
            &[0x2a, u8::try_from(claim.len()).unwrap()],
            &claim,
        ]
        .concat();
        let expected = [
            &[0x0a, 1][..],
            b"p",
            &[0x12, 1],
            b"n",
            &[0x1a, u8::try_from(container.len()).unwrap()],
            &container,
            &[0x22, 1, 7],
        ]
        .concat();
        assert_eq!(pod.encode_to_vec(), expected);
        assert_eq!(AssignedPodResources::decode(&expected[..]), Ok(pod));
        let allocatable = AllocatableResponse {
            devices: vec![],
            cpu_ids: vec![1],
            memory: vec![ContainerMemory::new("m", Bytes(1), &NodeSet::new())],
        };
        assert_eq!(allocatable.encode_to_vec(), [0x12, 1, 1, 0x1a, 7, 0x0a, 1, b'm', 0x10, 1, 0x1a, 0]);
    }

    #[test]
    fn ignores_invalid_ids() {
        assert_eq!(cpu_set(&[-1, 0, 3, i64::MAX]).to_string(), "0,3");
        let topology = TopologyInfo { nodes: vec![-1, 1, 1 << 40] };
        assert_eq!(topology.node_set().to_string(), "1");
    }

    /// Fields of newer peers are skipped.
    #[test]
    fn skips_unknown_fields() {
        let bytes = [0x0a, 1, b'c', 0x7a, 2, 0x12, 0, 0x18, 4];
        let container = ContainerResources::decode(&bytes[..]).unwrap();
        assert_eq!((container.name.as_str(), container.cpu_ids), ("c", vec![4]));
    }
}
