//! `deploy/components/evict-unpinned`: a pod that started without numaward, with a claim that no longer fits, is
//! evicted through the API server, which respects disruption budgets.

use std::{collections::BTreeSet, thread, time::Duration};

use serde_json::json;

use super::{Cluster, RESTRICTED, ROLLOUT, component_overlay, condition, container, guaranteed};
use crate::containerd::nodes;

/// CPU 0 is never exclusive, so only node 1 has three exclusive CPUs, and only for one pod.
const MACHINE: (&str, &str) = ("3,4", "2560M,1536M");
const WANTED: usize = 3;
/// Time until an eviction is certain: a pod is evicted after 30 s without its claim.
const EVICTED_BY_THEN: Duration = Duration::from_mins(1);

/// UIDs of the running pods with their CPUs; `None` for a pod that has not started yet.
type RunningPods = Vec<(String, Option<BTreeSet<u64>>)>;

#[test]
fn evicts_pods_without_their_claim() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    let pod = json!({
        "metadata": { "labels": { "app": "pair" } },
        "spec": {
            "containers": [container("main", &guaranteed(3, 64))],
            "automountServiceAccountToken": false,
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
        },
    });
    let selector = json!({ "matchLabels": { "app": "pair" } });
    cluster.kubectl.apply(&json!({
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": { "name": "pair" },
        "spec": { "replicas": 2, "selector": selector, "template": pod },
    }));
    cluster.kubectl.apply(&json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": { "name": "pair" },
        "spec": { "minAvailable": 2, "selector": selector },
    }));
    let before = cluster.wait_for("two pods run, with no CPUs of their own", || {
        let running = running(&cluster)?;
        let all = running.iter().filter(|(_, cpus)| cpus.as_ref().is_some_and(|cpus| cpus.len() == 7));
        if all.count() == 2 { Ok(running) } else { Err(format!("{running:?}")) }
    });
    is_installed(&cluster);
    let pinned = cluster.wait_for("one of them has three CPUs, the other has to wait", || {
        let running = running(&cluster)?;
        let mut own = running.iter().filter(|(_, cpus)| has_own(cpus.as_ref()));
        match (own.next(), own.next()) {
            (Some((uid, _)), None) => Ok(uid.clone()),
            _ => Err(format!("{running:?}")),
        }
    });
    cluster.step("one pod has its claim");
    // A disruption budget forbids the eviction.
    thread::sleep(EVICTED_BY_THEN);
    cluster.wait_for("the pod was to be evicted", || events(&cluster, "NumaPlacementEviction"));
    let uids = |running: RunningPods| running.into_iter().map(|(uid, _)| uid).collect::<BTreeSet<_>>();
    assert_eq!(uids(running(&cluster).unwrap()), uids(before.clone()), "the budget allows no eviction");
    cluster.step("a disruption budget keeps the other");
    cluster.kubectl.must(&["delete", "poddisruptionbudget", "pair"]);
    cluster.wait_for("the other is evicted, and the new one is refused", || {
        let running = running(&cluster)?;
        let is_new = |uid: &String| before.iter().all(|(old, _)| old != uid);
        if running.len() != 2 || !running.iter().any(|(uid, cpus)| is_new(uid) && cpus.is_none()) {
            return Err(format!("{running:?}"));
        }
        events(&cluster, "NumaPlacementRefused")
    });
    let now = running(&cluster).unwrap();
    assert!(
        now.iter().any(|(uid, cpus)| *uid == pinned && has_own(cpus.as_ref())),
        "{pinned} was to stay: {now:?}"
    );
    cluster.step("the other was evicted");
}

fn has_own(cpus: Option<&BTreeSet<u64>>) -> bool {
    cpus.is_some_and(|cpus| cpus.len() == WANTED)
}

fn is_installed(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    let overlay = component_overlay(cluster, &["evict-unpinned"]);
    kubectl.must(&["apply", "--kustomize", &overlay]);
    kubectl.must(&["set", "env", "daemonset/numaward", "--namespace=numaward", RESTRICTED]);
    cluster.wait_for("numaward runs", || cluster.daemon());
    kubectl.must(&ROLLOUT);
}

/// Returns the pods that are not being deleted.
fn running(cluster: &Cluster) -> Result<RunningPods, String> {
    let pods = cluster.kubectl.json(&["get", "pods", "--selector=app=pair"])?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let alive = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    let of_pod = alive.map(|pod| {
        let text = |name: &str| pod["metadata"][name].as_str().unwrap_or_default().to_owned();
        let is_ready = condition(pod, "Ready");
        let cpus = if is_ready { Some(cluster.place(&text("name"), "main")?.cpus) } else { None };
        Ok((text("uid"), cpus))
    });
    of_pod.collect()
}

/// Returns `Ok` if there are events with this reason.
fn events(cluster: &Cluster, reason: &str) -> Result<(), String> {
    let found = cluster.kubectl.json(&["get", "events", &format!("--field-selector=reason={reason}")])?;
    match found["items"].as_array() {
        Some(all) if !all.is_empty() => Ok(()),
        _ => Err(format!("there is no {reason}")),
    }
}
