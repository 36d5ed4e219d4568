//! Nodes of the devices of a container.
//!
//! The runtime lists the device files of a container when it creates the container. In sysfs, the major and minor number of a device file
//! lead to the device; the nearest ancestor of it on a bus has the node (`numa_node`, -1 if the platform does not report it).
//!
//! The kubelet assigns devices before it runs the pod. It reports them, with the nodes from the device plugins, by its PodResources API. It
//! also reports the devices of resource claims; [`claims`](super::claims) finds their nodes.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_config::Config;
use numaward_engine::ContainerName;
use numaward_kube::{
    api::ClaimedDevice,
    nri::types::{Device, DeviceKind},
    pod_resources::{Client, PodResourcesError, messages::AssignedPodResources},
};
use numaward_topology::{NodeId, NodeSet, sysfs};
use tokio::{sync::Mutex, time::timeout};

use crate::kubernetes::kubelet::pod_resources_socket;

/// The maximum number of devices of resource claims of a container: as many as a claim may have.
const MAX_CLAIMED_DEVICES: usize = 256;

/// Time limits of the requests for devices. The runtime waits meanwhile, and a pod is placed without what comes later.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTimeouts {
    /// For the kubelet, which answers from memory.
    pub(super) kubelet: Duration,
    /// For the claims of a pod, and for the places of their devices.
    pub(super) api_server: Duration,
    /// For the files of the Container Device Interface.
    pub(super) files: Duration,
}

impl Default for DeviceTimeouts {
    fn default() -> Self {
        Self {
            kubelet: Duration::from_millis(200),
            api_server: Duration::from_millis(300),
            files: Duration::from_millis(200),
        }
    }
}

/// Devices of a pod by container, as the kubelet reports them.
#[derive(Debug, Default)]
pub(super) struct AssignedDevices {
    /// Nodes of the devices of device plugins.
    pub(super) nodes: BTreeMap<ContainerName, NodeSet>,
    pub(super) claimed: BTreeMap<ContainerName, Vec<NamedDevice>>,
}

/// A device of a resource claim, with its names in CDI files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedDevice {
    pub(super) device: ClaimedDevice,
    pub(super) cdi_names: Vec<String>,
}

/// Client for the devices of a pod at the kubelet.
#[derive(Debug)]
pub(super) struct DeviceClient {
    socket: PathBuf,
    client: Mutex<Option<Client>>,
}

impl DeviceClient {
    pub(super) fn new(config: &Config) -> Self {
        Self { socket: pod_resources_socket(config), client: Mutex::new(None) }
    }

    /// Returns the devices of each container of a pod. It is empty if the kubelet does not report them in time.
    pub(super) async fn assigned(&self, namespace: &str, pod: &str, limit: Duration) -> AssignedDevices {
        if !self.socket.exists() {
            return AssignedDevices::default();
        }
        match timeout(limit, self.request(namespace, pod)).await {
            Ok(Ok(found)) => return found.as_ref().map(assigned_devices).unwrap_or_default(),
            Ok(Err(error)) => {
                tracing::debug!(namespace, pod, %error, "the kubelet does not report the pod's devices");
            }
            Err(_) => {
                tracing::debug!(namespace, pod, "the kubelet does not report the pod's devices in time");
            }
        }
        AssignedDevices::default()
    }

    async fn request(
        &self,
        namespace: &str,
        pod: &str,
    ) -> Result<Option<AssignedPodResources>, PodResourcesError> {
        let client = {
            let mut known = self.client.lock().await;
            match &*known {
                Some(client) => client.clone(),
                None => known.insert(Client::connect(&self.socket).await?).clone(),
            }
        };
        match client.get(namespace, pod).await {
            // Older kubelets have the call List only, and a feature gate can switch Get off.
            Err(_) => {
                let pods = client.list().await?;
                Ok(pods.into_iter().find(|found| found.namespace == namespace && found.name == pod))
            }
            found => found,
        }
    }
}

fn assigned_devices(pod: &AssignedPodResources) -> AssignedDevices {
    let mut assigned = AssignedDevices::default();
    for container in &pod.containers {
        let name = ContainerName::from(container.name.as_str());
        let topologies = container.devices.iter().filter_map(|held| held.topology.as_ref());
        let nodes: NodeSet =
            topologies.flat_map(|topology| topology.node_set().iter().collect::<Vec<_>>()).collect();
        if !nodes.is_empty() {
            assigned.nodes.insert(name.clone(), nodes);
        }
        let claimed = container.dynamic_resources.iter().flat_map(|claim| &claim.claim_resources);
        let claimed: Vec<_> = claimed
            .take(MAX_CLAIMED_DEVICES)
            .map(|held| NamedDevice {
                device: ClaimedDevice {
                    driver: held.driver_name.clone(),
                    pool: held.pool_name.clone(),
                    device: held.device_name.clone(),
                },
                cdi_names: held.cdi_devices.clone(),
            })
            .collect();
        if !claimed.is_empty() {
            assigned.claimed.insert(name, claimed);
        }
    }
    assigned
}

/// Returns the nodes of the devices. A device without a known node, such as `/dev/null`, adds none.
pub(super) fn nodes(host_root: &Path, devices: &[Device]) -> NodeSet {
    devices.iter().filter_map(|device| node(host_root, device)).collect()
}

fn node(host_root: &Path, device: &Device) -> Option<NodeId> {
    let kind = match device.kind {
        DeviceKind::Block => "block",
        DeviceKind::Character => "char",
    };
    let link = host_root.join("sys/dev").join(kind).join(format!("{}:{}", device.major, device.minor));
    sysfs::device_node(host_root, &link)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn finds_node_of_nearest_ancestor() {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys");
        let device = |path: &str, node: Option<&str>| {
            let dir = sys.join("devices").join(path);
            fs::create_dir_all(&dir).unwrap();
            if let Some(node) = node {
                fs::write(dir.join("numa_node"), format!("{node}\n")).unwrap();
            }
        };
        device("pci0000:00", Some("0"));
        device("pci0000:00/0000:00:01.0", Some("1"));
        device("pci0000:00/0000:00:01.0/infiniband/uverbs0", None);
        device("pci0000:00/0000:00:02.0/block/sda", Some("-1"));
        device("pci0000:00/0000:00:03.0/drm/card0", Some("x"));
        device("virtual/mem/null", None);
        for (kind, number, path) in [
            ("char", "231:192", "pci0000:00/0000:00:01.0/infiniband/uverbs0"),
            ("block", "8:0", "pci0000:00/0000:00:02.0/block/sda"),
            ("char", "226:0", "pci0000:00/0000:00:03.0/drm/card0"),
            ("char", "1:3", "virtual/mem/null"),
        ] {
            fs::create_dir_all(sys.join("dev").join(kind)).unwrap();
            symlink(sys.join("devices").join(path), sys.join("dev").join(kind).join(number)).unwrap();
        }
        let nodes_of = |kind, major, minor| {
            let path = "/dev/x".to_owned();
            nodes(root.path(), &[Device { path, kind, major, minor }]).to_string()
        };
        assert_eq!(nodes_of(DeviceKind::Character, 231, 192), "1");
        assert_eq!(nodes_of(DeviceKind::Block, 8, 0), "0", "the device has no node, its bus does");
        assert_eq!(nodes_of(DeviceKind::Character, 226, 0), "0");
        assert_eq!(nodes_of(DeviceKind::Character, 1, 3), "");
        assert_eq!(nodes_of(DeviceKind::Block, 231, 192), "", "the device does not exist");
    }
}
