//! Observed load of each node, as attributes of a published NodeResourceTopology.
//!
//! The load changes all the time, and each published change is a write of the API server. The published figures are therefore multiples
//! of a step, and a figure changes only if the observed one differs by a whole step: a load that alternates between two steps causes no
//! writes.

use std::collections::BTreeMap;

use numaward_api as api;
use numaward_kube::node_topology::NodeTopology;
use numaward_topology::{NodeId, ZoneKind};

/// The step of all figures, in thousandths of the memory of the node, or of the counted allocations or accesses.
const STEP_PERMILLE: u64 = 50;

/// Used memory of the node, including the page cache.
const USED: &str = "numaward.io/memory-used-bytes";
/// Free memory of the node.
const FREE: &str = "numaward.io/memory-free-bytes";
/// The share of the user memory allocated on the node since the last update that CPUs of other nodes allocated.
const REMOTE_ALLOCATION: &str = "numaward.io/remote-allocation-percent";
/// The share of the sampled accesses of the node's CPUs since the last update that went to memory of other nodes.
const REMOTE_ACCESS: &str = "numaward.io/remote-access-percent";

/// Published figures of a node: the total memory in bytes, and shares in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PublishedFigures {
    total: u64,
    used: Option<u64>,
    remote_allocation: Option<u64>,
    remote_access: Option<u64>,
}

/// Local and remote counts since the start, by node.
type Counts = BTreeMap<u32, [u64; 2]>;

/// Observed load of the nodes.
#[derive(Clone, Debug, Default)]
pub struct NodeLoad {
    published: BTreeMap<NodeId, PublishedFigures>,
    allocated: Counts,
    accesses: Counts,
}

/// Returns the share to publish, in thousandths: the published one, unless the share of `part` in `whole` differs by a step. `None` if
/// `whole` is 0.
fn step(published: Option<u64>, part: u64, whole: u64) -> Option<u64> {
    let exact = u128::from(part) * 1000 / u128::from(whole.max(1));
    let exact = u64::try_from(exact).unwrap_or(u64::MAX).min(1000);
    let is_near = |published: &u64| published.abs_diff(exact) < STEP_PERMILLE;
    (whole > 0).then(|| {
        published.filter(is_near).unwrap_or((exact + STEP_PERMILLE / 2) / STEP_PERMILLE * STEP_PERMILLE)
    })
}

/// Returns the remote share of the counts between two updates, to publish; `None` without counts.
fn share(published: Option<u64>, before: Option<&[u64; 2]>, now: Option<&[u64; 2]>) -> Option<u64> {
    let (before, now) = (before?, now?);
    let [local, remote] = [0, 1].map(|which| now[which].saturating_sub(before[which]));
    step(published, remote, local.saturating_add(remote))
}

impl NodeLoad {
    /// Updates the figures from the observed nodes.
    pub fn update(&mut self, observed: &api::Nodes) {
        let allocated = observed.nodes.iter().filter_map(|node| {
            let counted = node.allocated?;
            Some((node.node, [counted.local_bytes, counted.remote_bytes]))
        });
        let allocated: Counts = allocated.collect();
        let accesses = observed.accesses.iter().flatten();
        let accesses: Counts =
            accesses.map(|node| (node.node, [node.local_pages, node.remote_pages])).collect();
        let memory = ZoneKind::Memory.to_string();
        let published = observed.nodes.iter().map(|of_node| {
            let node = NodeId(of_node.node);
            let before = self.published.get(&node).copied().unwrap_or_default();
            let base = of_node.memory.iter().find(|kind| kind.kind == memory);
            let total = base.map_or(0, |base| base.total_bytes);
            let used = base.and_then(|base| Some(total.saturating_sub(base.free_bytes?)));
            let between = |published, before: &Counts, now: &Counts| {
                share(published, before.get(&of_node.node), now.get(&of_node.node))
            };
            let now = PublishedFigures {
                total,
                used: used.and_then(|used| step(before.used, used, total)),
                remote_allocation: between(before.remote_allocation, &self.allocated, &allocated),
                remote_access: between(before.remote_access, &self.accesses, &accesses),
            };
            (node, now)
        });
        self.published = published.collect();
        (self.allocated, self.accesses) = (allocated, accesses);
    }

    /// Adds the figures to the nodes as attributes.
    pub fn add_to(&self, topology: &mut NodeTopology) {
        for zone in &mut topology.zones {
            let Some(figures) = self.published.get(&zone.node) else { continue };
            let bytes = |permille: u64| {
                u64::try_from(u128::from(figures.total) * u128::from(permille) / 1000).unwrap_or(u64::MAX)
            };
            let used = figures.used.map(bytes);
            let attributes = [
                (USED, used),
                (FREE, used.map(|used| figures.total.saturating_sub(used))),
                (REMOTE_ALLOCATION, figures.remote_allocation.map(|permille| permille / 10)),
                (REMOTE_ACCESS, figures.remote_access.map(|permille| permille / 10)),
            ];
            let known = attributes.into_iter().filter_map(|(name, figure)| Some((name, figure?.to_string())));
            zone.attributes.extend(known);
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
    use numaward_kube::node_topology::Zone;

    use super::*;

    fn observed(free: u64, allocated: [u64; 2], accesses: Option<[u64; 2]>) -> api::Nodes {
        let [local_bytes, remote_bytes] = allocated;
        let memory = |kind: &str, total_bytes, free| api::NodeMemory {
            kind: kind.to_owned(),
            total_bytes,
            free_bytes: Some(free),
        };
        let node = api::Node {
            node: 1,
            cpus: "0-3".to_owned(),
            memory: vec![memory("hugepages-2Mi", 64, 64), memory("memory", 2000, free)],
            allocated: Some(api::AllocatedBytes { local_bytes, remote_bytes, kernel_bytes: 7 }),
        };
        let accesses = accesses.map(|[local_pages, remote_pages]| {
            vec![api::NodeAccesses { node: 1, local_pages, remote_pages, remote: Vec::new() }]
        });
        api::Nodes { nodes: vec![node], accesses }
    }

    fn published(load: &NodeLoad) -> Vec<(&'static str, String)> {
        let zone =
            |node| Zone { node: NodeId(node), distances: vec![], resources: vec![], attributes: vec![] };
        let mut topology = NodeTopology {
            policy: TopologyManagerPolicy::None,
            scope: TopologyManagerScope::Container,
            zones: vec![zone(0), zone(1)],
            fingerprint: None,
            placement: None,
        };
        load.add_to(&mut topology);
        assert_eq!(topology.zones[0].attributes, [], "a node that was not observed");
        topology.zones.remove(1).attributes
    }

    fn figures(all: &[(&'static str, u64)]) -> Vec<(&'static str, String)> {
        all.iter().map(|&(name, figure)| (name, figure.to_string())).collect()
    }

    #[test]
    fn figure_changes_by_whole_steps() {
        let mut load = NodeLoad::default();
        let mut used = |free| {
            load.update(&observed(free, [0, 0], None));
            published(&load)[0].1.parse::<u64>().unwrap()
        };
        assert_eq!(used(1500), 500);
        assert_eq!(used(1402), 500, "4.9 % more");
        assert_eq!(used(1598), 500, "4.9 % less");
        assert_eq!(used(1400), 600);
        assert_eq!(used(1401), 600);
        assert_eq!(used(0), 2000);
        assert_eq!(used(2000), 0);
    }

    #[test]
    fn shares_count_since_last_update() {
        let mut load = NodeLoad::default();
        load.update(&observed(1000, [900, 100], Some([70, 30])));
        assert_eq!(
            published(&load),
            figures(&[(USED, 1000), (FREE, 1000)]),
            "the first update has no earlier counts"
        );
        load.update(&observed(1000, [930, 170], Some([70, 40])));
        let both = [(USED, 1000), (FREE, 1000), (REMOTE_ALLOCATION, 70), (REMOTE_ACCESS, 100)];
        assert_eq!(published(&load), figures(&both));
        load.update(&observed(1000, [930, 170], None));
        assert_eq!(published(&load), figures(&both[..2]), "no counts since the last update");
    }
}
