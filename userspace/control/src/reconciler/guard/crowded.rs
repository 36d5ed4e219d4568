//! Last measure of the headroom guard (`guard: evict`): lists the pods that crowd a node.
//!
//! # Terms
//! - *stuck*: the node is short and no further workload can be steered off it. A node is not stuck if the daemon has no
//!   permission to read the processes of a candidate, because this workload might be steerable.
//! - *crowded*: the node has been stuck for [`STUCK_TIME`] without a break.
//!
//! # Algorithm
//! For each crowded node, this lists the pods that have memory there, beyond their guarantees, which cannot be dropped. The Kubernetes
//! client knows their `QoS` classes and evicts those without a guarantee one by one; the other ones keep smaller pods from being evicted in
//! vain. The time starts again if the node is no longer short or a workload was steered off it.
//!
//! # Invariants
//! - A listed pod exists, and is not exempt by the configuration.
//! - The memory of a pod includes that of ended containers (`emptyDir`).
//! - Nothing is written to the kernel.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_api::{EventKind, Severity};
use numaward_cgroup::CgroupPath;
use numaward_guarantee::reconciler::{CrowdedNode, CrowdingPod, LatestCrowdedNodes};
use numaward_model::{
    EventReport,
    headroom::{Headroom, PodUsage},
};
use numaward_topology::{NodeId, NodeSet};

use super::{guaranteed_pods, pod_of};
use crate::{core::Core, page_worker::MIN_MOVE_SIZE};

/// Time for which a node must be stuck before it is crowded.
pub(super) const STUCK_TIME: Duration = Duration::from_secs(30);

/// Detector of crowded nodes.
#[derive(Debug, Default)]
pub(super) struct Crowding {
    stuck_since: BTreeMap<NodeId, Instant>,
    /// The pods on each crowded node, the largest first.
    crowded: BTreeMap<NodeId, Vec<CrowdingPod>>,
    /// Published copy of `crowded`.
    pub(super) published: LatestCrowdedNodes,
}

impl Crowding {
    /// Processes a new headroom. `stuck` has the short nodes that no workload can be steered off.
    pub(super) fn update(&mut self, core: &Core, headroom: &Headroom, stuck: &NodeSet, now: Instant) {
        let is_short = |node: NodeId| headroom.node(node).is_some_and(|of| of.is_low && of.is_short());
        self.stuck_since.retain(|node, _| is_short(*node));
        // Some checks do not read the memory of workloads, because that takes long. They show only which nodes are short.
        if headroom.others.iter().any(|workload| !workload.resident.is_empty()) {
            self.stuck_since.retain(|node, _| stuck.contains(*node));
            for node in stuck.iter() {
                let since = *self.stuck_since.entry(node).or_insert(now);
                if now.duration_since(since) < STUCK_TIME {
                    continue;
                }
                let pods = crowding_pods(core, headroom, node);
                if !self.crowded.contains_key(&node) {
                    report(core, node, &pods);
                }
                self.crowded.insert(node, pods);
            }
        }
        self.crowded.retain(|node, _| self.stuck_since.contains_key(node));
        let crowded = self.crowded.iter().map(|(node, pods)| CrowdedNode { node: *node, pods: pods.clone() });
        let crowded: Vec<CrowdedNode> = crowded.collect();
        let mut published = self.published.write();
        if **published != crowded {
            *published = Arc::new(crowded);
        }
    }
}

/// Returns the pods with memory on a node, beyond their guarantees, that cannot be dropped, the largest first.
fn crowding_pods(core: &Core, headroom: &Headroom, node: NodeId) -> Vec<CrowdingPod> {
    let guaranteed_pods = guaranteed_pods(core);
    let is_exempt = |cgroup: &CgroupPath| core.config.guard_exempt.iter().any(|of| of.matches(cgroup));
    let exempt_workloads = headroom.others.iter().filter(|workload| is_exempt(&workload.cgroup));
    let exempt_pods: BTreeSet<String> =
        exempt_workloads.filter_map(|workload| pod_of(&workload.cgroup)).collect();
    let is_listed = |pod: &&PodUsage| {
        let exists = |cgroup: &CgroupPath| matches!(core.hierarchy.id_of(cgroup), Ok(Some(_)));
        pod.on(node) >= MIN_MOVE_SIZE
            && !exempt_pods.contains(&pod.uid)
            && !pod.cgroups.iter().any(is_exempt)
            && pod.cgroups.iter().any(exists)
    };
    let crowding = |pod: &PodUsage| CrowdingPod {
        uid: pod.uid.clone(),
        memory: pod.on(node),
        has_guarantee: guaranteed_pods.contains(&pod.uid)
            || pod.cgroups.iter().any(|cgroup| core.store.state.has_guarantee_around(cgroup)),
    };
    let mut pods: Vec<CrowdingPod> = headroom.pods.iter().filter(is_listed).map(crowding).collect();
    pods.sort_by_key(|pod| Reverse(pod.memory));
    pods
}

fn report(core: &Core, node: NodeId, pods: &[CrowdingPod]) {
    let seconds = STUCK_TIME.as_secs();
    let guaranteed = pods.iter().filter(|pod| pod.has_guarantee).count();
    let candidates = match pods.len() - guaranteed {
        0 => "no pod without a guarantee uses memory there".to_owned(),
        1 => "one pod without a guarantee uses memory there and may be evicted".to_owned(),
        pods => {
            format!("{pods} pods without a guarantee use memory there and may be evicted one by one")
        }
    };
    let others = match guaranteed {
        0 => String::new(),
        pods => format!(
            " Pods that use more memory there than they are guaranteed: {pods}. They stay, and so do smaller pods."
        ),
    };
    let message = format!(
        "Node {node} has been short for {seconds} s although no further workload can be kept off it: {candidates}.{others}"
    );
    core.report(None, EventReport::new(EventKind::Steered, message).severity(Severity::Warning).node(node));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reconciler::guard::{
        SETTLE_TIME,
        tests::{GuardBench, guarantee, pod_container},
    };

    fn container(pod: &str, first: char) -> String {
        pod_container(&format!("besteffort/pod{pod}"), first)
    }

    fn crowded(bench: &GuardBench) -> Vec<(u32, Vec<(String, u64)>)> {
        let published = bench.guard().crowding.published.read().clone();
        let pods =
            |of: &CrowdedNode| of.pods.iter().map(|pod| (pod.uid.clone(), pod.memory.0 >> 20)).collect();
        published.iter().map(|of| (of.node.0, pods(of))).collect()
    }

    fn pods(pods: &[(&str, u64)]) -> Vec<(u32, Vec<(String, u64)>)> {
        vec![(1, pods.iter().map(|(uid, mib)| ((*uid).to_owned(), *mib)).collect())]
    }

    /// Checks the nodes for this time: node 1 is short, and node 0 has no room for workloads.
    fn stay_short(bench: &mut GuardBench, time: Duration, workloads: &[(&str, u64)]) {
        for _ in 0..time.as_secs() / SETTLE_TIME.as_secs() {
            bench.check(true, [-10, 10], workloads);
        }
    }

    #[test]
    fn lists_pods_of_crowded_node() {
        let (a, b, more, exempt) =
            (container("a", 'a'), container("b", 'b'), container("b", 'c'), container("e", 'e'));
        let mut bench = GuardBench::evicting(&[&a, &b, &more, &exempt, "batch"], &format!("/{exempt}"));
        let workloads = [
            (a.as_str(), 300),
            (b.as_str(), 200),
            (more.as_str(), 200),
            (exempt.as_str(), 900),
            ("batch", 500),
            ("kept", 900),
        ];
        // The time begins with the first check.
        stay_short(&mut bench, STUCK_TIME, &workloads);
        assert_eq!(crowded(&bench), []);
        assert!(!bench.reported().contains("evicted"));
        bench.check(true, [-10, 10], &workloads);
        assert_eq!(crowded(&bench), pods(&[("b", 400), ("a", 300)]));
        let message = "Node 1 has been short for 30 s although no further workload can be kept off it: 2 pods without a \
            guarantee use memory there and may be evicted one by one.";
        assert_eq!(bench.reported().matches(message).count(), 1, "{}", bench.reported());

        // A check that reads no workloads changes nothing. The message is reported once.
        bench.check(true, [-10, 10], &[]);
        assert_eq!(crowded(&bench), pods(&[("b", 400), ("a", 300)]));
        bench.check(true, [-10, 10], &workloads[..1]);
        assert_eq!(crowded(&bench), pods(&[("a", 300)]), "the other pod has ended");
        assert_eq!(bench.reported().matches(message).count(), 1);

        // The time starts again after a check with enough memory, and after a workload was steered.
        bench.check(true, [10, 10], &workloads);
        assert_eq!(crowded(&bench), []);
        stay_short(&mut bench, STUCK_TIME, &workloads);
        assert_eq!(crowded(&bench), []);
        bench.check(true, [-10, 600], &workloads);
        assert_eq!(bench.mems("batch"), "0", "the workload was steered");
        stay_short(&mut bench, STUCK_TIME, &workloads);
        assert_eq!(crowded(&bench), []);
        bench.check(true, [-10, 10], &workloads);
        assert_eq!(crowded(&bench), pods(&[("b", 400), ("a", 300)]));
        bench.check(false, [500, 500], &[]);
        assert_eq!(crowded(&bench), []);
    }

    #[test]
    fn unreadable_processes_prevent_listing() {
        let a = container("a", 'a');
        let mut bench = GuardBench::evicting(&[&a, "batch"], "/exempt");
        // Processes of another PID namespace have the id 0.
        std::fs::write(bench.root().join("batch/cgroup.procs"), "0\n").unwrap();
        for _ in 0..STUCK_TIME.as_secs() {
            bench.check(true, [-10, 200], &[(&a, 300), ("batch", 100)]);
        }
        assert_eq!(crowded(&bench), []);
        assert!(bench.reported().contains("/batch cannot be kept off node 1"), "{}", bench.reported());
        std::fs::write(bench.root().join("batch/cgroup.procs"), "").unwrap();
        bench.check(false, [500, 200], &[]);
        bench.check(true, [-10, 200], &[(&a, 300), ("batch", 100)]);
        assert_eq!(bench.mems("batch"), "0");
    }

    /// Its memory is in a container without a guarantee.
    #[test]
    fn pod_with_small_guarantee_is_listed() {
        let (plain, kept, other) = (container("p", 'a'), container("p", 'b'), container("o", 'c'));
        let above =
            ["kubepods", "kubepods/besteffort", "kubepods/besteffort/podp", "kubepods/besteffort/podo"];
        let mut bench = GuardBench::evicting(&[&above[..], &[&plain, &kept, &other]].concat(), "/exempt");
        let workloads = [(plain.as_str(), 300), (other.as_str(), 200)];
        guarantee(&mut bench, "pod", &format!("/{kept}"));
        stay_short(&mut bench, STUCK_TIME * 2, &workloads);
        assert_eq!(crowded(&bench), pods(&[("p", 300), ("o", 200)]));
        let published = bench.guard().crowding.published.read().clone();
        let has_guarantee: Vec<bool> = published[0].pods.iter().map(|pod| pod.has_guarantee).collect();
        assert_eq!(has_guarantee, [true, false]);
        let message = "one pod without a guarantee uses memory there and may be evicted. Pods that use more memory \
            there than they are guaranteed: 1.";
        assert!(bench.reported().contains(message), "{}", bench.reported());
    }

    #[test]
    fn pod_with_many_small_containers_is_listed() {
        let containers = ['a', 'b', 'c'].map(|first| container("p", first));
        let names: Vec<&str> = containers.iter().map(String::as_str).collect();
        let mut bench = GuardBench::evicting(&names, "/exempt");
        let workloads: Vec<(&str, u64)> = names.iter().map(|name| (*name, 1)).collect();
        stay_short(&mut bench, STUCK_TIME * 2, &workloads);
        assert_eq!(crowded(&bench), pods(&[("p", 3)]));
    }

    #[test]
    fn act_mode_lists_no_pods() {
        let a = container("a", 'a');
        let mut bench = GuardBench::new(&[&a]);
        stay_short(&mut bench, STUCK_TIME * 2, &[(&a, 300)]);
        assert_eq!(crowded(&bench), []);
        assert!(bench.reported().contains("cannot be kept off node 1"), "{}", bench.reported());
    }
}
