//! Kubernetes: the operating mode, the kubelet of this host, and reports to other programs.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use educe::Educe;
use numaward_topology::serde_as_text;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Interval;

/// The operating mode, which determines whether numaward places workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OperatingMode {
    /// numaward gives guarantees and enforces them.
    Enforce,
    /// numaward only observes, and checks the guarantees of the kubelet. Nothing is written.
    Observe,
}

/// The kubelet of this host.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Kubelet {
    /// The directory of the kubelet, with its configuration and its state files; a path of the host.
    #[educe(Default(expression = PathBuf::from("/var/lib/kubelet")))]
    pub directory: PathBuf,
    /// The socket of the kubelet's PodResources API; a path of the host. Default: in its directory.
    pub pod_resources_socket: Option<PathBuf>,
    /// The address of the kubelet's own API, such as `192.0.2.7`; port 10250 unless one is given. The kubelet's
    /// configuration is then read there, also while numaward runs, by the service account that reads pods. It needs
    /// permission to get `nodes/configz`, and the kubelet a certificate of the cluster's authority. Default: only the
    /// files in `directory` are read.
    #[schemars(with = "Option<String>", example = &"192.0.2.7")]
    pub address: Option<KubeletAddress>,
}

/// The port of the kubelet's API.
const KUBELET_PORT: u16 = 10250;

/// The address of a kubelet's API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub struct KubeletAddress(pub SocketAddr);

impl FromStr for KubeletAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let with_default = |ip: IpAddr| SocketAddr::new(ip, KUBELET_PORT);
        let address = text.parse().or_else(|_| text.parse().map(with_default));
        address.map(Self).map_err(|_| format!("{text:?} is not an address (expected such as `192.0.2.7`)"))
    }
}

serde_as_text!(KubeletAddress);

/// Reports of the assigned resources to other programs, in the kubelet's format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PodResources {
    /// The socket on which the PodResources API is served, in another directory than `controlSocket`, as agents mount it. Default: it is
    /// not served.
    pub socket: Option<PathBuf>,
}

/// Reports of the free resources of each node to the cluster's scheduler, as a NodeResourceTopology.
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NodeResourceTopology {
    /// Publishes the reports. Needs `kubernetes.nodeName`.
    pub enabled: bool,
    /// The minimum time between two updates.
    #[educe(Default(expression = Interval(Duration::from_secs(5))))]
    pub interval: Interval,
}

/// The NUMA nodes of this host as devices of resource claims (Dynamic Resource Allocation).
#[derive(Clone, Debug, Educe, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[educe(Default)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Dra {
    /// Publishes the devices, and prepares claims of them for the kubelet. Needs `kubernetes.nodeName`, the strategy `native` and
    /// `enforcement.mode: on`.
    pub enabled: bool,
    /// The minimum time between two updates.
    #[educe(Default(expression = Interval(Duration::from_secs(5))))]
    pub interval: Interval,
    /// The folder of the container runtime for specifications of the Container Device Interface (CDI).
    #[educe(Default(expression = PathBuf::from("/var/run/cdi")))]
    pub cdi_directory: PathBuf,
    /// The counting of claims of these devices as requests of the Kubernetes node.
    pub node_allocatable: NodeAllocatable,
    /// Experimental: a device `host` with the CPUs and memory of all nodes together, for claims that fit on no single node. The scheduler waits
    /// until numaward has chosen the nodes, with moves of running workloads if `kubernetes.refused` is `make-room`.
    pub host_device: HostDevice,
}

/// Publication of the device of the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HostDevice {
    /// The host is no device.
    #[default]
    Off,
    /// The host is a device unless the topology policy is `single-numa-node`, which gives a pod one node only.
    Auto,
    /// The host is a device.
    On,
}

/// Handling of claims as requests of the Kubernetes node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum NodeAllocatable {
    /// Claims count as such requests if the API server supports it: Kubernetes 1.36 or newer with the feature gate `DRANodeAllocatableResources`.
    #[default]
    Auto,
    /// Claims do not count as such requests.
    Off,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in docs/kubernetes.md is computed from this interval.
    #[test]
    fn update_interval_matches_docs() {
        let page = include_str!("../../../docs/kubernetes.md");
        let line = page.lines().find(|line| line.starts_with("| NodeResourceTopologies: patch")).unwrap();
        let seconds = NodeResourceTopology::default().interval.0.as_secs();
        let (each, all) = (format!("at most once in {seconds} s"), format!("| {},000 requests", 5 / seconds));
        assert!(line.contains(&each) && line.contains(&all), "{line}");
    }
}
