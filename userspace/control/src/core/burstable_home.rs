//! Preferred nodes of Burstable workloads: the memory that they request is guaranteed there, but they are not bound to it.

use numaward_cgroup::{CgroupPath, read};
use numaward_engine::Terms;
use numaward_topology::{Bytes, NodeId, NodeSet};

use super::Core;

/// Returns the node with the most memory in this distribution, and its amount.
pub(crate) fn node_with_most(by_node: impl IntoIterator<Item = (NodeId, Bytes)>) -> Option<(NodeId, Bytes)> {
    // The lowest of equal nodes.
    by_node
        .into_iter()
        .filter(|(_, bytes)| bytes.0 > 0)
        .reduce(|best, next| if next.1 > best.1 { next } else { best })
}

/// Returns the user memory of a cgroup by node; empty if it cannot be read.
pub(crate) fn footprint(core: &Core, path: &CgroupPath) -> Vec<(NodeId, Bytes)> {
    let by_node = read::memory_numa_stat(&core.hierarchy.dir(path)).unwrap_or_default();
    by_node.into_iter().map(|(node, memory)| (node, memory.user())).collect()
}

/// Returns the terms of a request for this cgroup. The preferred node of a running Burstable workload is the node with most of its
/// memory, unless the request names another one.
pub(crate) fn with_preferred_node(core: &Core, terms: &Terms, name: &str, path: &CgroupPath) -> Terms {
    let mut terms = terms.clone();
    if terms.burstable
        && terms.preferences.preferred.is_empty()
        && let Some((home, _)) = node_with_most(footprint(core, path))
    {
        terms.preferences.preferred.insert(name.into(), NodeSet::single(home));
    }
    terms
}
