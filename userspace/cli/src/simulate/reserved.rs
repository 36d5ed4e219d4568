//! A suggestion for the system's reservation, from its observed use.
//!
//! A node's memory is in use by the kernel and the system if it is neither available ([`Watermarks::obtainable`], which is
//! also the basis of the memory that the daemon withholds), nor in a hugepage pool, nor anonymous memory of a pod's container or of a
//! command of `numaward exec`. Other memory of these (page tables, tmpfs) counts as used by the system: the suggestion is rather too
//! large than too small.
//!
//! [`Watermarks::obtainable`]: numaward_topology::sysfs::Watermarks::obtainable

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use numaward_api::simulation::{SuggestedNode, SuggestedReservation};
use numaward_cgroup::{Hierarchy, WorkloadKind, classify, read::memory_numa_stat};
use numaward_topology::{Bytes, Machine, NodeId, sysfs};

use crate::{
    table::{size, table},
    topology,
};

/// Between two looks.
const PACE: Duration = Duration::from_secs(1);
/// The unit of the reservation.
const GRAIN: u64 = 64 << 20;

/// Watches this host for so long.
pub(crate) fn suggest(observe: Duration) -> anyhow::Result<SuggestedReservation> {
    let root = Path::new("/");
    let machine = topology::machine(root)?;
    let hierarchy =
        Hierarchy::open().context("what pods use cannot be distinguished from what the system uses")?;
    let mut most = BTreeMap::new();
    let start = Instant::now();
    loop {
        for (node, used) in used(root, &machine, &hierarchy)? {
            let most: &mut Bytes = most.entry(node).or_default();
            *most = (*most).max(used);
        }
        let left = observe.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Ok(suggestion(start.elapsed(), &most));
        }
        thread::sleep(left.min(PACE));
    }
}

/// Memory in use by the system that cannot be reclaimed, by node.
fn used(root: &Path, machine: &Machine, hierarchy: &Hierarchy) -> anyhow::Result<BTreeMap<NodeId, Bytes>> {
    let mut of_workloads: BTreeMap<NodeId, u64> = BTreeMap::new();
    for cgroup in hierarchy.walk().context("the cgroups of this host cannot be read")? {
        let workload = classify(&cgroup.path, |_| false);
        let has_guarantee = matches!(workload.kind, WorkloadKind::Container | WorkloadKind::Exec);
        if !has_guarantee || workload.root != cgroup.path {
            continue;
        }
        match memory_numa_stat(&hierarchy.dir(&cgroup.path)) {
            Ok(nodes) => {
                for (node, memory) in nodes {
                    *of_workloads.entry(node).or_default() += memory.anon.0;
                }
            }
            // It has ended meanwhile, or its cgroup does not count memory.
            Err(error) if error.is_gone() || error.is_absent() => {}
            Err(error) => return Err(error.into()),
        }
    }
    let page = Bytes(rustix::param::page_size() as u64);
    let watermarks = sysfs::watermarks(root, page)?;
    let mut used = BTreeMap::new();
    for &id in machine.nodes.keys() {
        let memory = sysfs::node_memory(root, id)?;
        let obtainable = watermarks.get(&id).copied().unwrap_or_default().obtainable(&memory);
        let of_workloads = of_workloads.get(&id).copied().unwrap_or(0);
        let rest = memory.base().0.saturating_sub(obtainable.0).saturating_sub(of_workloads);
        if memory.total.0 > 0 {
            used.insert(id, Bytes(rest));
        }
    }
    Ok(used)
}

/// A quarter more than was seen, in whole grains.
fn suggestion(observed: Duration, most: &BTreeMap<NodeId, Bytes>) -> SuggestedReservation {
    let nodes: Vec<SuggestedNode> = most
        .iter()
        .map(|(node, used)| SuggestedNode {
            node: node.0,
            used_bytes: used.0,
            reserved_bytes: used.0.saturating_add(used.0 / 4).max(1).div_ceil(GRAIN).saturating_mul(GRAIN),
        })
        .collect();
    SuggestedReservation {
        observed_seconds: observed.as_secs(),
        total_bytes: nodes.iter().fold(0, |sum, node| sum.saturating_add(node.reserved_bytes)),
        nodes,
    }
}

/// Formats the observed use and the suggested configuration as text.
pub(crate) fn render(suggested: &SuggestedReservation) -> String {
    let rows = suggested
        .nodes
        .iter()
        .map(|node| vec![node.node.to_string(), size(node.used_bytes), size(node.reserved_bytes)]);
    let mut text = table(["NODE", "MOST IN USE BY THE SYSTEM", "RESERVE"], rows);
    text += "\nFor numaward's configuration, and the kubelet's:\n\nreservedMemory:\n";
    for node in &suggested.nodes {
        let mebibytes = node.reserved_bytes >> 20;
        let _ = writeln!(text, "  - numaNode: {}\n    limits:\n      memory: {mebibytes}Mi", node.node);
    }
    let _ = writeln!(
        text,
        "\nkubeReserved, systemReserved and evictionHard have to add up to {}Mi of memory.\nWatched for {} s: repeat \
         it with a longer --observe while the system is busy.",
        suggested.total_bytes >> 20,
        suggested.observed_seconds
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quarter_more_is_reserved_in_whole_grains() {
        let most = BTreeMap::from([(NodeId(0), Bytes::mib(1024)), (NodeId(2), Bytes(0))]);
        let suggested = suggestion(Duration::from_secs(10), &most);
        let reserved: Vec<_> =
            suggested.nodes.iter().map(|node| (node.node, node.reserved_bytes >> 20)).collect();
        assert_eq!(reserved, [(0, 1280), (2, 64)]);
        assert_eq!(suggested.total_bytes >> 20, 1344);
        let text = render(&suggested);
        assert!(text.contains("  - numaNode: 2\n    limits:\n      memory: 64Mi\n"), "{text}");
    }
}
