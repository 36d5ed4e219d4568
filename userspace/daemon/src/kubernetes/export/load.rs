//! What is observed on each node, for those who read more than what is promised.
//!
//! It moves all the time, and each change would be a write of the API server. So the figures move in steps, and a figure
//! stays where it is until it is a whole step away: one that swings about the middle between two does not move.

use std::collections::BTreeMap;

use numaward_api as api;
use numaward_kube::node_topology::NodeTopology;
use numaward_topology::{NodeId, ZoneKind};

/// The step of all figures, in thousandths: of a node's memory, or of what was counted.
const STEP: u64 = 50;

/// Memory that is in use on the node, page cache included.
const USED: &str = "numaward.io/memory-used-bytes";
/// Memory of the node that nobody uses.
const FREE: &str = "numaward.io/memory-free-bytes";
/// Of the user memory that was allocated on the node since the last look, what CPUs of other nodes allocated.
const REMOTE_ALLOCATION: &str = "numaward.io/remote-allocation-percent";
/// Of the sampled accesses by the node's CPUs since the last look, those to memory of other nodes.
const REMOTE_ACCESS: &str = "numaward.io/remote-access-percent";

/// What is shown of a node, in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Shown {
    total: u64,
    used: Option<u64>,
    remote_allocation: Option<u64>,
    remote_access: Option<u64>,
}

/// Local and remote, counted since the start.
type Counts = BTreeMap<u32, [u64; 2]>;

/// What is observed on the nodes.
#[derive(Clone, Debug, Default)]
pub struct Load {
    shown: BTreeMap<NodeId, Shown>,
    allocated: Counts,
    accesses: Counts,
}

/// The figure to show: what was shown, unless it is a step away.
fn step(shown: Option<u64>, part: u64, whole: u64) -> Option<u64> {
    let exact = u128::from(part) * 1000 / u128::from(whole.max(1));
    let exact = u64::try_from(exact).unwrap_or(u64::MAX).min(1000);
    let is_near = |shown: &u64| shown.abs_diff(exact) < STEP;
    (whole > 0).then(|| shown.filter(is_near).unwrap_or((exact + STEP / 2) / STEP * STEP))
}

/// What share of what was counted between two looks is remote; none where nothing was.
fn share(shown: Option<u64>, before: Option<&[u64; 2]>, now: Option<&[u64; 2]>) -> Option<u64> {
    let (before, now) = (before?, now?);
    let [local, remote] = [0, 1].map(|which| now[which].saturating_sub(before[which]));
    step(shown, remote, local.saturating_add(remote))
}

impl Load {
    /// Takes a look at the nodes.
    pub fn look(&mut self, seen: &api::Nodes) {
        let allocated = seen.nodes.iter().filter_map(|of| {
            let counted = of.allocated?;
            Some((of.node, [counted.local_bytes, counted.remote_bytes]))
        });
        let allocated: Counts = allocated.collect();
        let accesses = seen.accesses.iter().flatten();
        let accesses: Counts = accesses.map(|of| (of.node, [of.local_pages, of.remote_pages])).collect();
        let memory = ZoneKind::Memory.to_string();
        let shown = seen.nodes.iter().map(|of| {
            let node = NodeId(of.node);
            let before = self.shown.get(&node).copied().unwrap_or_default();
            let base = of.memory.iter().find(|kind| kind.kind == memory);
            let total = base.map_or(0, |base| base.total_bytes);
            let used = base.and_then(|base| Some(total.saturating_sub(base.free_bytes?)));
            let between =
                |shown, before: &Counts, now: &Counts| share(shown, before.get(&of.node), now.get(&of.node));
            let now = Shown {
                total,
                used: used.and_then(|used| step(before.used, used, total)),
                remote_allocation: between(before.remote_allocation, &self.allocated, &allocated),
                remote_access: between(before.remote_access, &self.accesses, &accesses),
            };
            (node, now)
        });
        self.shown = shown.collect();
        (self.allocated, self.accesses) = (allocated, accesses);
    }

    /// Adds it to the nodes.
    pub fn add_to(&self, topology: &mut NodeTopology) {
        for zone in &mut topology.zones {
            let Some(of) = self.shown.get(&zone.node) else { continue };
            let bytes = |permille: u64| {
                u64::try_from(u128::from(of.total) * u128::from(permille) / 1000).unwrap_or(u64::MAX)
            };
            let used = of.used.map(bytes);
            let figures = [
                (USED, used),
                (FREE, used.map(|used| of.total.saturating_sub(used))),
                (REMOTE_ALLOCATION, of.remote_allocation.map(|permille| permille / 10)),
                (REMOTE_ACCESS, of.remote_access.map(|permille| permille / 10)),
            ];
            let known = figures.into_iter().filter_map(|(name, figure)| Some((name, figure?.to_string())));
            zone.attributes.extend(known);
        }
    }
}

#[cfg(test)]
mod tests {
    use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
    use numaward_kube::node_topology::Zone;

    use super::*;

    fn seen(free: u64, allocated: [u64; 2], accesses: Option<[u64; 2]>) -> api::Nodes {
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

    fn shown(load: &Load) -> Vec<(&'static str, String)> {
        let zone =
            |node| Zone { node: NodeId(node), distances: vec![], resources: vec![], attributes: vec![] };
        let mut topology = NodeTopology {
            policy: TopologyManagerPolicy::None,
            scope: TopologyManagerScope::Container,
            zones: vec![zone(0), zone(1)],
            fingerprint: None,
        };
        load.add_to(&mut topology);
        assert_eq!(topology.zones[0].attributes, [], "a node that was not seen");
        topology.zones.remove(1).attributes
    }

    fn figures(of: &[(&'static str, u64)]) -> Vec<(&'static str, String)> {
        of.iter().map(|&(name, figure)| (name, figure.to_string())).collect()
    }

    #[test]
    fn a_figure_moves_by_whole_steps() {
        let mut load = Load::default();
        let mut used = |free| {
            load.look(&seen(free, [0, 0], None));
            shown(&load)[0].1.parse::<u64>().unwrap()
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
    fn shares_are_of_what_came_since_the_last_look() {
        let mut load = Load::default();
        load.look(&seen(1000, [900, 100], Some([70, 30])));
        assert_eq!(shown(&load), figures(&[(USED, 1000), (FREE, 1000)]), "nothing to compare with");
        load.look(&seen(1000, [930, 170], Some([70, 40])));
        let both = [(USED, 1000), (FREE, 1000), (REMOTE_ALLOCATION, 70), (REMOTE_ACCESS, 100)];
        assert_eq!(shown(&load), figures(&both));
        load.look(&seen(1000, [930, 170], None));
        assert_eq!(shown(&load), figures(&both[..2]), "nothing was counted");
    }
}
