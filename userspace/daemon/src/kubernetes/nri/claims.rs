//! Nodes of the devices of resource claims.
//!
//! The kubelet names the devices of a pod's containers; if it does not, the claims do, by the API server. The place of a device comes from
//! its `ResourceSlice`: the node, or a PCI address or root, for which sysfs has the node. If the driver publishes no place, the device may
//! have device files in its CDI specification, see [`cdi`](super::cdi).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_engine::ContainerName;
use numaward_kube::{
    api::{ClaimReader, DevicePlace},
    pod,
};
use numaward_topology::{NodeId, NodeSet};
use tokio::time::timeout;

use super::{
    cdi,
    devices::{DeviceTimeouts, NamedDevice},
};

/// The maximum number of devices below a PCI root that are read.
const MAX_PCI_DEVICES: usize = 256;
/// The maximum number of notes on devices without a known node.
const MAX_NOTES: usize = 4;

/// Devices of resource claims by container.
pub(super) type ClaimedDevices = BTreeMap<ContainerName, Vec<NamedDevice>>;

/// Returns the devices of a pod's claims, as the API server reports them in time.
pub(super) async fn devices(reader: &ClaimReader, known: &pod::Pod, limit: Duration) -> ClaimedDevices {
    let Ok(devices) = timeout(limit, reader.devices(known)).await else {
        tracing::warn!(pod = %known.id, "the API server did not report the pod's resource claims in time; the pod is placed without the nodes of its claimed devices");
        return ClaimedDevices::new();
    };
    let named = |device| NamedDevice { device, cdi_names: Vec::new() };
    devices
        .into_iter()
        .map(|(container, devices)| (container.into(), devices.into_iter().map(named).collect()))
        .collect()
}

/// Returns the nodes of the devices by container, and notes on devices without a known node.
pub(super) async fn nodes(
    reader: &ClaimReader,
    host_root: &Path,
    devices: &ClaimedDevices,
    timeouts: &DeviceTimeouts,
) -> (BTreeMap<ContainerName, NodeSet>, Vec<String>) {
    let all: BTreeSet<_> = devices.values().flatten().map(|named| named.device.clone()).collect();
    let places = reader.places(&all, timeouts.api_server).await;
    let published: BTreeMap<_, _> =
        places.iter().map(|(device, place)| (device, place_nodes(host_root, place))).collect();
    let published_nodes =
        |named: &NamedDevice| published.get(&named.device).filter(|nodes| !nodes.is_empty());
    let unknown = devices.values().flatten().filter(|named| published_nodes(named).is_none());
    let names = unknown.flat_map(|named| named.cdi_names.clone()).collect();
    let by_name = cdi_nodes(host_root, names, timeouts.files).await;
    let (mut found, mut notes) = (BTreeMap::<_, NodeSet>::new(), Vec::new());
    for (container, devices) in devices {
        for named in devices {
            let by_cdi =
                || named.cdi_names.iter().filter_map(|name| by_name.get(name)).flatten().copied().collect();
            let known: NodeSet = published_nodes(named).cloned().unwrap_or_else(by_cdi);
            if !known.is_empty() {
                found.entry(container.clone()).or_default().extend(known.iter());
            } else if notes.len() < MAX_NOTES {
                notes.push(format!(
                    "the NUMA node of the device {} of {container} is unknown: no known ResourceSlice or CDI file has it",
                    named.device
                ));
            }
        }
    }
    (found, notes)
}

/// Returns the nodes of devices by their CDI names, if the files can be read in time.
pub(super) async fn cdi_nodes(
    host_root: &Path,
    names: BTreeSet<String>,
    limit: Duration,
) -> BTreeMap<String, Vec<NodeId>> {
    if names.is_empty() {
        return BTreeMap::new();
    }
    let host_root: PathBuf = host_root.to_owned();
    let reading = tokio::task::spawn_blocking(move || cdi::nodes(&host_root, &names));
    let Ok(Ok(nodes)) = timeout(limit, reading).await else {
        tracing::warn!(
            "the CDI files could not be read in time; pods are placed without the nodes that these files have"
        );
        return BTreeMap::new();
    };
    nodes
}

/// Returns the nodes of a place; empty if sysfs has none.
fn place_nodes(host_root: &Path, place: &DevicePlace) -> NodeSet {
    let node = |device: &Path| -> Option<NodeId> {
        fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok().map(NodeId)
    };
    match place {
        DevicePlace::Node(node) => [*node].into_iter().collect(),
        DevicePlace::PciDevice(address) if is_pci_address(address) => {
            node(&host_root.join("sys/bus/pci/devices").join(address)).into_iter().collect()
        }
        DevicePlace::PciRoot(root) if is_pci_root(root) => {
            let devices = fs::read_dir(host_root.join("sys/devices").join(root));
            let devices = devices.into_iter().flatten().flatten().map(|entry| entry.path());
            let devices = devices
                .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(is_pci_address));
            devices.take(MAX_PCI_DEVICES).filter_map(|path| node(&path)).collect()
        }
        DevicePlace::PciDevice(_) | DevicePlace::PciRoot(_) => NodeSet::new(),
    }
}

/// Returns true if the parts of a text between `separators` are hexadecimal numbers with these lengths.
fn is_hexadecimal(text: &str, separators: [char; 2], lengths: &[usize]) -> bool {
    let parts: Vec<&str> = text.split(separators).collect();
    parts.len() == lengths.len()
        && parts.iter().zip(lengths).all(|(part, length)| {
            part.len() == *length && part.bytes().all(|digit| digit.is_ascii_hexdigit())
        })
}

/// Returns true for the name of a PCI device, such as `0000:81:00.0`.
fn is_pci_address(name: &str) -> bool {
    is_hexadecimal(name, [':', '.'], &[4, 2, 2, 1])
}

/// Returns true for the name of a PCI root, such as `pci0000:80`.
fn is_pci_root(name: &str) -> bool {
    name.strip_prefix("pci").is_some_and(|number| is_hexadecimal(number, [':', ':'], &[4, 2]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_nodes_of_pci_devices() {
        let root = tempfile::tempdir().unwrap();
        let device = |path: &str, node: &str| {
            let dir = root.path().join("sys").join(path);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("numa_node"), format!("{node}\n")).unwrap();
        };
        device("devices/pci0000:80/0000:80:01.0", "1");
        device("devices/pci0000:80/0000:80:02.0", "1");
        device("devices/pci0000:80/0000:80:03.0", "-1");
        device("devices/pci0000:80/power", "0");
        device("devices/pci0000:c0/0000:c0:01.0", "-1");
        device("bus/pci/devices/0000:81:00.0", "3");
        device("elsewhere", "2");
        let pci = |address: &str| DevicePlace::PciDevice(address.to_owned());
        let below = |root: &str| DevicePlace::PciRoot(root.to_owned());
        for (place, nodes) in [
            (DevicePlace::Node(NodeId(2)), "2"),
            (below("pci0000:80"), "1"),
            (below("pci0000:c0"), ""),
            (below("pci0000:00"), ""),
            (below("pci0000:80/../../elsewhere"), ""),
            (below("../elsewhere"), ""),
            (pci("0000:81:00.0"), "3"),
            (pci("0000:81:00.1"), ""),
            (pci("../../../elsewhere"), ""),
            (pci(""), ""),
        ] {
            assert_eq!(place_nodes(root.path(), &place).to_string(), nodes, "{place:?}");
        }
    }
}
