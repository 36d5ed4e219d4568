//! NUMA node of a device, from sysfs.
//!
//! The kernel shows it in the file `numa_node` of the device, or of its nearest ancestor on a bus that provides the
//! file (Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-bus-pci). The value is -1 if the firmware does
//! not report the node.

use std::{
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _},
    path::Path,
};

use numaward_topology::{NodeId, sysfs};

/// Reason why the node of a device is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    /// No device has this name.
    #[error(
        "{name:?} is no device of this host: neither a network interface (/sys/class/net), a block device \
         (/sys/class/block) nor a PCI address such as 0000:3b:00.0 (/sys/bus/pci/devices)"
    )]
    Unknown { name: String },
    /// The device is virtual, or the firmware does not report its node.
    #[error(
        "the kernel does not know the NUMA node of {name}: the device is virtual, or the firmware does not report it; name the node itself"
    )]
    NoNode { name: String },
}

/// Returns the node of a network interface, a block device or a PCI address of the host with this root directory.
pub(crate) fn node(root: &Path, name: &str) -> Result<NodeId, DeviceError> {
    let is_name = !name.is_empty() && !name.contains('/') && name != "." && name != "..";
    let name = name.strip_prefix("/dev/").filter(|name| !name.contains('/')).unwrap_or(if is_name {
        name
    } else {
        ""
    });
    let unknown = || DeviceError::Unknown { name: name.to_owned() };
    if name.is_empty() {
        return Err(unknown());
    }
    let sys = root.join("sys");
    // An address without a domain is in the first one.
    let full = format!("0000:{name}");
    let places =
        [("class/net", name), ("class/block", name), ("bus/pci/devices", name), ("bus/pci/devices", &full)];
    let found = places.iter().find_map(|(place, name)| sys.join(place).join(name).canonicalize().ok());
    let node = sysfs::device_node(root, &found.ok_or_else(unknown)?);
    node.ok_or_else(|| DeviceError::NoNode { name: name.to_owned() })
}

/// Returns the node of a block device, or of the one that holds a file.
pub(crate) fn node_of_file(root: &Path, file: &Path) -> Result<NodeId, DeviceError> {
    let name = file.display().to_string();
    let found = fs::metadata(file).map_err(|_| DeviceError::Unknown { name: name.clone() })?;
    let device = if found.file_type().is_block_device() { found.rdev() } else { found.dev() };
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let link = root.join("sys/dev/block").join(numbers);
    sysfs::device_node(root, &link).ok_or(DeviceError::NoNode { name })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn device_has_node_of_nearest_bus() {
        let root = tempfile::tempdir().unwrap();
        let sys = root.path().join("sys");
        let device = |path: &str, node: Option<&str>| {
            let dir = sys.join("devices").join(path);
            fs::create_dir_all(&dir).unwrap();
            if let Some(node) = node {
                fs::write(dir.join("numa_node"), node).unwrap();
            }
        };
        device("pci0000:3a/0000:3b:00.0", Some("1\n"));
        device("pci0000:3a/0000:3b:00.0/net/eth0", None);
        device("pci0000:00/0000:01:00.0", Some("0\n"));
        device("pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1/nvme0n1p1", None);
        device("pci0000:00/0000:02:00.0", Some("-1\n"));
        device("pci0000:00/0000:03:00.0", Some("junk\n"));
        device("virtual/net/lo", None);
        let link = |place: &str, name: &str, target: &str| {
            fs::create_dir_all(sys.join(place)).unwrap();
            symlink(sys.join("devices").join(target), sys.join(place).join(name)).unwrap();
        };
        link("class/net", "eth0", "pci0000:3a/0000:3b:00.0/net/eth0");
        link("class/net", "lo", "virtual/net/lo");
        link("class/block", "nvme0n1p1", "pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1/nvme0n1p1");
        for address in ["0000:3b:00.0", "0000:02:00.0", "0000:03:00.0"] {
            let bus = if address.contains("3b") { "pci0000:3a" } else { "pci0000:00" };
            link("bus/pci/devices", address, &format!("{bus}/{address}"));
        }
        for (name, expected) in
            [("eth0", 1), ("nvme0n1p1", 0), ("/dev/nvme0n1p1", 0), ("0000:3b:00.0", 1), ("3b:00.0", 1)]
        {
            assert_eq!(node(root.path(), name).unwrap(), NodeId(expected), "{name}");
        }
        for (name, words) in [
            ("lo", "does not know the NUMA node of lo"),
            ("0000:02:00.0", "does not know"),
            ("0000:03:00.0", "does not know"),
            ("eth1", "\"eth1\" is no device of this host"),
            ("", "is no device"),
            ("..", "is no device"),
            ("../../devices", "is no device"),
        ] {
            let error = node(root.path(), name).unwrap_err().to_string();
            assert!(error.contains(words), "{name}: {error}");
        }
    }
}
