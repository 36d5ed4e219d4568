//! On which node a container's devices are.
//!
//! A device file names its driver and device by two numbers; sysfs leads from them to the device, and up from there
//! to the one on a bus that knows its node (`numa_node`, -1 where the platform does not say).
//!
//! The runtime lists device files when a container is created. The kubelet has assigned devices before it runs the
//! pod, and reports them, with the nodes that device plugins gave, by its PodResources API.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_config::Config;
use numaward_engine::ContainerName;
use numaward_kube::{
    nri::types::{Device, DeviceKind},
    pod_resources::{CallError, Client, messages::PodResources},
};
use numaward_topology::{NodeId, NodeSet};
use tokio::{sync::Mutex, time::timeout};

use crate::kubernetes::kubelet::pod_resources_socket;

/// How long the kubelet is waited for: it answers from memory, and the runtime waits for us.
const PATIENCE: Duration = Duration::from_millis(200);

/// Asks the kubelet for the devices of a pod.
#[derive(Debug)]
pub(super) struct Kubelet {
    socket: PathBuf,
    client: Mutex<Option<Client>>,
}

impl Kubelet {
    pub(super) fn new(config: &Config) -> Self {
        Self { socket: pod_resources_socket(config), client: Mutex::new(None) }
    }

    /// The nodes of the devices of each container of a pod; none where they are not reported.
    pub(super) async fn nodes(&self, namespace: &str, pod: &str) -> BTreeMap<ContainerName, NodeSet> {
        if !self.socket.exists() {
            return BTreeMap::new();
        }
        match timeout(PATIENCE, self.ask(namespace, pod)).await {
            Ok(Ok(found)) => return found.as_ref().map(of_pod).unwrap_or_default(),
            Ok(Err(error)) => {
                tracing::debug!(namespace, pod, %error, "the kubelet does not report the pod's devices");
            }
            Err(_) => {
                tracing::debug!(namespace, pod, "the kubelet does not report the pod's devices in time");
            }
        }
        BTreeMap::new()
    }

    async fn ask(&self, namespace: &str, pod: &str) -> Result<Option<PodResources>, CallError> {
        let client = {
            let mut known = self.client.lock().await;
            match &*known {
                Some(client) => client.clone(),
                None => known.insert(Client::connect(&self.socket).await?).clone(),
            }
        };
        match client.get(namespace, pod).await {
            // Older kubelets only list, and some have this call switched off.
            Err(_) => {
                let pods = client.list().await?;
                Ok(pods.into_iter().find(|found| found.namespace == namespace && found.name == pod))
            }
            found => found,
        }
    }
}

fn of_pod(pod: &PodResources) -> BTreeMap<ContainerName, NodeSet> {
    let mut nodes: BTreeMap<ContainerName, NodeSet> = BTreeMap::new();
    for container in &pod.containers {
        let of_container = nodes.entry(container.name.as_str().into()).or_default();
        for topology in container.devices.iter().filter_map(|held| held.topology.as_ref()) {
            of_container.extend(topology.node_set().iter());
        }
    }
    nodes.retain(|_, nodes| !nodes.is_empty());
    nodes
}

/// The nodes of these devices. Devices whose node is not known, such as `/dev/null`, do not count.
pub(super) fn nodes(host_root: &Path, devices: &[Device]) -> NodeSet {
    devices.iter().filter_map(|device| node(host_root, device)).collect()
}

fn node(host_root: &Path, device: &Device) -> Option<NodeId> {
    let kind = match device.kind {
        DeviceKind::Block => "block",
        DeviceKind::Character => "char",
    };
    let sysfs = host_root.join("sys");
    let link = sysfs.join("dev").join(kind).join(format!("{}:{}", device.major, device.minor));
    let root = sysfs.canonicalize().ok()?;
    let found = link.canonicalize().ok()?;
    let above = found.ancestors().take_while(|above| above.starts_with(&root) && **above != root);
    let mut nodes = above.filter_map(|above| std::fs::read_to_string(above.join("numa_node")).ok());
    nodes.find_map(|text| text.trim().parse().ok()).map(NodeId)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn the_nearest_device_that_knows_its_node_tells() {
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
        let of = |kind, major, minor| {
            let path = "/dev/x".to_owned();
            nodes(root.path(), &[Device { path, kind, major, minor }]).to_string()
        };
        assert_eq!(of(DeviceKind::Character, 231, 192), "1");
        assert_eq!(of(DeviceKind::Block, 8, 0), "0", "the bus says where the device does not");
        assert_eq!(of(DeviceKind::Character, 226, 0), "0");
        assert_eq!(of(DeviceKind::Character, 1, 3), "");
        assert_eq!(of(DeviceKind::Block, 231, 192), "", "there is no such device");
    }
}
