//! On which node a container's devices are.
//!
//! A device file names its driver and device by two numbers; sysfs leads from them to the device, and up from there
//! to the one on a bus that knows its node (`numa_node`, -1 where the platform does not tell).

use std::path::Path;

use numaward_kube::nri::types::{Device, DeviceKind};
use numaward_topology::{NodeId, NodeSet};

/// The nodes of these devices. Devices whose node is not told, such as `/dev/null`, do not count.
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
    let mut told = above.filter_map(|above| std::fs::read_to_string(above.join("numa_node")).ok());
    told.find_map(|text| text.trim().parse().ok()).map(NodeId)
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
        assert_eq!(of(DeviceKind::Block, 8, 0), "0", "the bus tells where the device does not");
        assert_eq!(of(DeviceKind::Character, 226, 0), "0");
        assert_eq!(of(DeviceKind::Character, 1, 3), "");
        assert_eq!(of(DeviceKind::Block, 231, 192), "", "there is no such device");
    }
}
