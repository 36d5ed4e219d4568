//! A load of pods that are created and deleted while a node changes.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::{Cluster, Wait, condition, container, guaranteed, pod};
use crate::containerd::numbers;

/// Label of these pods.
const LABEL: &str = "load";
/// Number of pods at a time. Each requests one exclusive CPU.
const AT_ONCE: usize = 2;
/// Minimum number of replaced pods in each phase.
const REPLACED: usize = 2;

/// Returns the exclusive CPUs by pod UID. Asserts that no two pods have the same CPU at the same time.
pub(super) fn exclusive(cluster: &Cluster) -> BTreeMap<String, BTreeSet<u64>> {
    // Reads three times: a pod that has the same CPUs before and after another pod was read had them at that moment too. A cgroup
    // without a process is ignored.
    let look = "cd /sys/fs/cgroup/kubepods
        for turn in 1 2 3; do
            for cgroup in pod*/*/; do
                { read -r cpus <${cgroup}cpuset.cpus; } 2>/dev/null
                { read -r process <${cgroup}cgroup.procs; } 2>/dev/null || continue
                [ -z \"$cpus\" ] || echo $turn ${cgroup%%/*} $cpus
            done
        done";
    let seen = cluster.node.run(look).unwrap();
    let mut turns = [(); 3].map(|()| BTreeMap::new());
    for line in seen.lines() {
        let words: Vec<_> = line.split(' ').collect();
        let [turn, pod, cpus] = words[..] else { panic!("{seen}") };
        let cpus: BTreeSet<u64> = numbers(cpus).into_iter().collect();
        // A pod with CPU 0 shares it.
        if !cpus.contains(&0) {
            let turn: usize = turn.parse().unwrap();
            turns[turn - 1].insert(pod.trim_start_matches("pod").to_owned(), cpus);
        }
    }
    for (pod, cpus) in &turns[0] {
        if turns[2].get(pod) == Some(cpus) {
            let both = turns[1].iter().find(|(other, theirs)| *other != pod && !theirs.is_disjoint(cpus));
            assert_eq!(both, None, "{pod} has {cpus:?} too: {seen}");
        }
    }
    turns[2].clone()
}

/// A set of pods in which each pod is replaced as soon as it has an exclusive CPU, or as soon as it runs if numaward is off.
pub(super) struct Load<'a> {
    cluster: &'a Cluster,
    made: usize,
    replaced: usize,
    is_placed: bool,
}

impl<'a> Load<'a> {
    pub(super) fn new(cluster: &'a Cluster) -> Self {
        Self { cluster, made: 0, replaced: 0, is_placed: true }
    }

    /// From now on, pods are expected to run without exclusive CPUs.
    pub(super) fn expect_no_cpus(&mut self) {
        self.is_placed = false;
    }

    /// Checks the pods once, and replaces those that are ready.
    fn replace_ready(&mut self) {
        let held = exclusive(self.cluster);
        let selector = format!("--selector={LABEL}");
        let pods = self.cluster.kubectl.json(&["get", "pods", &selector]).unwrap();
        let mut alive = 0;
        for pod in pods["items"].as_array().into_iter().flatten() {
            let meta = &pod["metadata"];
            if !meta["deletionTimestamp"].is_null() {
                continue;
            }
            assert_ne!(pod["status"]["phase"], "Failed", "{pod}");
            let (name, uid) = (meta["name"].as_str().unwrap(), meta["uid"].as_str().unwrap());
            let is_placed = held.get(uid).is_some_and(|cpus| cpus.len() == 1);
            if is_placed || !self.is_placed && condition(pod, "Ready") {
                self.cluster.kubectl.must(&["delete", "pod", name, "--wait=false"]);
                self.replaced += 1;
            } else {
                alive += 1;
            }
        }
        for _ in alive..AT_ONCE {
            let name = format!("load-{}", self.made);
            let mut one = pod(&name, &[container("main", &guaranteed(1, 64))]);
            one["metadata"]["labels"] = json!({ LABEL: "" });
            self.cluster.kubectl.apply(&one);
            self.made += 1;
        }
    }

    /// Continues until the condition holds and then until more pods were replaced.
    pub(super) fn keep_on(&mut self, what: &str, is_so: impl Fn(&Cluster) -> bool) {
        let (wait, before) = (Wait::new(&self.cluster.node), self.replaced);
        let mut was_so = None;
        while was_so.is_none_or(|replaced| self.replaced < replaced + REPLACED) {
            self.replace_ready();
            if was_so.is_none() && is_so(self.cluster) {
                was_so = Some(self.replaced);
            }
            wait.assert_goes_on(|| format!("{what}: {} replaced, before {before}", self.replaced));
        }
        self.cluster.step(&format!("{what}; {} pods were replaced meanwhile", self.replaced - before));
    }

    /// Deletes all of the pods.
    pub(super) fn end(self) {
        let selector = format!("--selector={LABEL}");
        self.cluster.kubectl.must(&["delete", "pod", &selector, "--timeout=30m"]);
    }
}
