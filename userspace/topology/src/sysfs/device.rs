//! NUMA node of a device.

use std::{fs, path::Path};

use crate::NodeId;

/// Returns the node of a device, of the host with this root directory. `link` is a path below `/sys` that leads to the
/// device. The node is that of the nearest ancestor with a file `numa_node`; the value is -1 if the firmware does not
/// report it.
pub fn device_node(root: &Path, link: &Path) -> Option<NodeId> {
    let top = root.join("sys").canonicalize().ok()?;
    let found = link.canonicalize().ok()?;
    let above = found.ancestors().take_while(|above| above.starts_with(&top) && **above != top);
    let mut nodes = above.filter_map(|above| fs::read_to_string(above.join("numa_node")).ok());
    nodes.find_map(|text| text.trim().parse().ok()).map(NodeId)
}
