//! The guard's last step (`guard: evict`): names pods without a guarantee that are in the way on a node.
//!
//! Algorithm: a node is *stuck* while it is short although nobody can be kept off it any more, also not one whose processes the daemon
//! may not read: that one might be. One that has been stuck for a
//! while without a break is *crowded*: then the pods are named that have memory there which cannot be dropped. Others, who
//! know their classes, have one after the other evicted. A node that is no longer short, or that somebody was kept off
//! again, begins anew.
//!
//! Invariants: no pod is named of which a container has a guarantee, or that the configuration exempts, or that is not
//! there any more. Nothing is written.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_guarantee::reconciler::{CrowdedNode, LatestCrowdedNodes};
use numaward_model::{
    EventReport,
    headroom::{Headroom, UnguaranteedWorkload},
};
use numaward_topology::{Bytes, NodeId, NodeSet};

use super::{may_be_steered, pod_of, pods_with_promise};
use crate::{core::Core, page_worker::LEAST};

/// How long a node has to be stuck before pods are named.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);

/// Names pods.
#[derive(Debug, Default)]
pub(super) struct Crowding {
    /// Since when nodes are stuck.
    since: BTreeMap<NodeId, Instant>,
    /// What is in the way on those that are crowded.
    crowded: BTreeMap<NodeId, Vec<(String, Bytes)>>,
    /// What others see of it.
    pub(super) shown: LatestCrowdedNodes,
}

impl Crowding {
    /// Takes note of a look, in which these nodes were short and nobody could be kept off them.
    pub(super) fn follow(&mut self, core: &Core, seen: &Headroom, stuck: &NodeSet, now: Instant) {
        let is_short = |node: NodeId| seen.node(node).is_some_and(|of| of.is_low && of.is_short());
        self.since.retain(|node, _| is_short(*node));
        // Where reading them takes long, not every look has them: then nothing follows.
        if seen.others.iter().any(|other| !other.resident.is_empty()) {
            self.since.retain(|node, _| stuck.contains(*node));
            for node in stuck.iter() {
                let since = *self.since.entry(node).or_insert(now);
                if now.duration_since(since) < PATIENCE {
                    continue;
                }
                let pods = in_the_way(core, seen, node);
                if self.crowded.insert(node, pods.clone()).is_none() {
                    report(core, node, pods.len());
                }
            }
        }
        self.crowded.retain(|node, _| self.since.contains_key(node));
        let crowded = self.crowded.iter().map(|(node, pods)| CrowdedNode { node: *node, pods: pods.clone() });
        let crowded: Vec<CrowdedNode> = crowded.collect();
        let mut shown = self.shown.write();
        if **shown != crowded {
            *shown = Arc::new(crowded);
        }
    }
}

/// The pods without a guarantee that have memory on a node which cannot be dropped.
fn in_the_way(core: &Core, seen: &Headroom, node: NodeId) -> Vec<(String, Bytes)> {
    let kept = pods_with_promise(core);
    let mut found: BTreeMap<String, Bytes> = BTreeMap::new();
    let may_go =
        |other: &&UnguaranteedWorkload| other.on(node) >= LEAST && may_be_steered(core, &kept, other);
    for other in seen.others.iter().filter(may_go) {
        if let Some(uid) = pod_of(&other.cgroup) {
            let sum = found.entry(uid).or_default();
            sum.0 = sum.0.saturating_add(other.on(node).0);
        }
    }
    let mut found: Vec<(String, Bytes)> = found.into_iter().collect();
    found.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    found
}

fn report(core: &Core, node: NodeId, pods: usize) {
    let seconds = PATIENCE.as_secs();
    let what = match pods {
        0 => "no pod without a guarantee is in the way there".to_owned(),
        1 => "one pod without a guarantee is in the way there, and may be evicted".to_owned(),
        pods => {
            format!("{pods} pods without a guarantee are in the way there, and may be evicted one by one")
        }
    };
    let message = format!(
        "Node {node} has been short for {seconds} s although nobody else can be kept off it: {what}."
    );
    core.report(None, EventReport::new(EventKind::Steered, message).severity(Severity::Warning).node(node));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reconciler::guard::{
        SETTLE,
        tests::{Bench, guarantee, pod_container},
    };

    fn container(pod: &str, first: char) -> String {
        pod_container(&format!("besteffort/pod{pod}"), first)
    }

    fn crowded(bench: &Bench) -> Vec<(u32, Vec<(String, u64)>)> {
        let shown = bench.guard().crowding.shown.read().clone();
        let pods = |of: &CrowdedNode| of.pods.iter().map(|(uid, has)| (uid.clone(), has.0 >> 20)).collect();
        shown.iter().map(|of| (of.node.0, pods(of))).collect()
    }

    fn pods(pods: &[(&str, u64)]) -> Vec<(u32, Vec<(String, u64)>)> {
        vec![(1, pods.iter().map(|(uid, mib)| ((*uid).to_owned(), *mib)).collect())]
    }

    /// Looks for that long: node 1 is short, and node 0 has no room for anybody.
    fn stay_short(bench: &mut Bench, time: Duration, others: &[(&str, u64)]) {
        for _ in 0..time.as_secs() / SETTLE.as_secs() {
            bench.see(true, [-10, 10], others);
        }
    }

    #[test]
    fn pods_are_named_when_nobody_can_be_kept_off_for_a_while() {
        let (a, b, more, exempt) =
            (container("a", 'a'), container("b", 'b'), container("b", 'c'), container("e", 'e'));
        let mut bench = Bench::evicting(&[&a, &b, &more, &exempt, "batch"], &format!("/{exempt}"));
        let others = [
            (a.as_str(), 300),
            (b.as_str(), 200),
            (more.as_str(), 200),
            (exempt.as_str(), 900),
            ("batch", 500),
            ("kept", 900),
        ];
        // The first look finds the node stuck.
        stay_short(&mut bench, PATIENCE, &others);
        assert_eq!(crowded(&bench), []);
        assert!(!bench.reported().contains("evicted"));
        bench.see(true, [-10, 10], &others);
        assert_eq!(crowded(&bench), pods(&[("b", 400), ("a", 300)]));
        let message = "Node 1 has been short for 30 s although nobody else can be kept off it: 2 pods without a guarantee \
            are in the way there, and may be evicted one by one.";
        assert_eq!(bench.reported().matches(message).count(), 1, "{}", bench.reported());

        // A look for which nothing was read changes nothing, and it is said once.
        bench.see(true, [-10, 10], &[]);
        assert_eq!(crowded(&bench), pods(&[("b", 400), ("a", 300)]));
        bench.see(true, [-10, 10], &others[..1]);
        assert_eq!(crowded(&bench), pods(&[("a", 300)]), "the other is gone");
        assert_eq!(bench.reported().matches(message).count(), 1);

        // It begins anew with each break: enough for once, or somebody who could be kept off.
        bench.see(true, [10, 10], &others);
        assert_eq!(crowded(&bench), []);
        stay_short(&mut bench, PATIENCE, &others);
        assert_eq!(crowded(&bench), []);
        bench.see(true, [-10, 600], &others);
        assert_eq!(bench.mems("batch"), "0", "it could be kept off");
        stay_short(&mut bench, PATIENCE, &others);
        assert_eq!(crowded(&bench), []);
        bench.see(true, [-10, 10], &others);
        assert_eq!(crowded(&bench), pods(&[("b", 400), ("a", 300)]));
        bench.see(false, [500, 500], &[]);
        assert_eq!(crowded(&bench), []);
    }

    #[test]
    fn no_pod_is_named_while_the_daemon_may_not_read_what_keeps_workloads_on_a_node() {
        let a = container("a", 'a');
        let mut bench = Bench::evicting(&[&a, "batch"], "/exempt");
        // Its processes are of another PID namespace.
        std::fs::write(bench.root().join("batch/cgroup.procs"), "0\n").unwrap();
        for _ in 0..PATIENCE.as_secs() {
            bench.see(true, [-10, 200], &[(&a, 300), ("batch", 100)]);
        }
        assert_eq!(crowded(&bench), []);
        assert!(bench.reported().contains("/batch cannot be kept off node 1"), "{}", bench.reported());
        std::fs::write(bench.root().join("batch/cgroup.procs"), "").unwrap();
        bench.see(false, [500, 200], &[]);
        bench.see(true, [-10, 200], &[(&a, 300), ("batch", 100)]);
        assert_eq!(bench.mems("batch"), "0");
    }

    #[test]
    fn a_pod_with_a_guarantee_in_it_is_not_named() {
        let (plain, kept) = (container("p", 'a'), container("p", 'b'));
        let above = ["kubepods", "kubepods/besteffort", "kubepods/besteffort/podp"];
        let mut bench = Bench::evicting(&[&above[..], &[&plain, &kept]].concat(), "/exempt");
        let others = [(plain.as_str(), 300)];
        guarantee(&mut bench, "pod", &format!("/{kept}"));
        stay_short(&mut bench, PATIENCE * 2, &others);
        assert_eq!(crowded(&bench), pods(&[]));
        assert!(
            bench.reported().contains("no pod without a guarantee is in the way"),
            "{}",
            bench.reported()
        );
    }

    #[test]
    fn nobody_is_named_unless_that_is_configured() {
        let a = container("a", 'a');
        let mut bench = Bench::new(&[&a]);
        stay_short(&mut bench, PATIENCE * 2, &[(&a, 300)]);
        assert_eq!(crowded(&bench), []);
        assert!(bench.reported().contains("cannot be kept off node 1"), "{}", bench.reported());
    }
}
