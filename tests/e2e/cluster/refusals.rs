//! Eviction of refused pods (`kubernetes.refused: evict`), room for them (`make-room`), and the policy by which a daemon
//! writes for its own node only (`deploy/base/own-node.yaml`).
//!
//! The cluster has a second node without a kubelet: pods can be bound to it, which is all that has to be seen.

use std::{thread, time::Duration};

use serde_json::{Value, json};

use super::{
    Cluster, RESTRICTED, ROLLOUT, component_overlay, container, guaranteed, leave_one_cpu_on_each_node, node,
    pod,
};
use crate::containerd::nodes;

/// Name of the node without a kubelet.
const EMPTY_NODE: &str = "node-2";
/// Time for which a pod must have been refused, here and in the configuration of the daemon.
const EVICTION_DELAY: Duration = Duration::from_secs(5);
/// Label of the pods of the tested controllers.
const APP: &str = "app=late";

#[test]
fn refused_pods_are_evicted() {
    let Some(mut cluster) = Cluster::start(nodes(super::MACHINE)) else { return };
    cluster.come_up();
    install(&cluster);
    events_are_of_the_own_node(&cluster);
    let running = leave_one_cpu_on_each_node(&cluster);
    pod_of_a_job_waits(&cluster);
    add_empty_node(&cluster);
    pod_of_a_replica_set_moves(&cluster);
    assert_eq!(
        cluster.wait_until_placed(&[("one", "main", 1), ("pair", "main", 2)]),
        running,
        "no pod moves"
    );
    a_running_pod_makes_room(&cluster);
    cluster.step("done");
}

/// Applies the overlay `enforce` with the eviction of refused pods and the policy on events.
fn install(cluster: &Cluster) {
    let overlay = component_overlay(cluster, &[]);
    cluster.kubectl.must(&["apply", "--kustomize", &overlay]);
    let delay = format!("NUMAWARD_KUBERNETES_REFUSED_AFTER={}s", EVICTION_DELAY.as_secs());
    cluster.kubectl.must(&["set", "env", "daemonset/numaward", "--namespace=numaward", RESTRICTED, &delay]);
    cluster.wait_for("numaward runs", || cluster.daemon());
    cluster.kubectl.must(&ROLLOUT);
    cluster.run(&[pod(super::SHARED, &[container("main", &super::burstable())])]);
    cluster.step("numaward is ready");
}

/// The API server refuses events that the daemon's account writes in the name of another node, or without a node.
fn events_are_of_the_own_node(cluster: &Cluster) {
    let write = |name: &str, instance: &str, extra: &[&str]| {
        let event = json!({
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": { "name": name, "namespace": "default" },
            "eventTime": "2026-01-01T00:00:00.000000Z",
            "action": "Placing",
            "reason": "Test",
            "type": "Normal",
            "note": "An event of the test.",
            "reportingController": "numaward",
            "reportingInstance": instance,
            "regarding": { "kind": "Pod", "namespace": "default", "name": super::SHARED },
        });
        let path = cluster.folder.path().join(format!("{name}.json"));
        std::fs::write(&path, event.to_string()).unwrap();
        let account = ["--as=system:serviceaccount:numaward:numaward"];
        let create = ["create", "--filename", path.to_str().unwrap()];
        cluster.kubectl.run(&[&create[..], &account, extra].concat())
    };
    let of_node = format!("--as-user-extra=authentication.kubernetes.io/node-name={}", node::NAME);
    // A new policy is enforced some seconds after it was created.
    cluster.wait_for("an event of another node is refused", || {
        let name = "of-another";
        match write(name, EMPTY_NODE, &[&of_node]) {
            Err(error) if error.contains("an event is reported by the daemon's node") => Ok(()),
            Ok(_) => {
                cluster.kubectl.must(&["delete", "events.events.k8s.io", name]);
                Err("it is accepted".to_owned())
            }
            Err(error) => Err(error),
        }
    });
    let error = write("of-none", node::NAME, &[]).unwrap_err();
    assert!(error.contains("the token names no node"), "{error}");
    write("of-own", node::NAME, &[&of_node]).unwrap();
    cluster.step("events are of the daemon's own node");
}

/// Returns the template of a pod that fits in sum and on no NUMA node, and prefers the empty node.
fn template(restart_policy: &str) -> Value {
    json!({
        "metadata": { "labels": { "app": "late" } },
        "spec": {
            "containers": [container("main", &guaranteed(2, 64))],
            "restartPolicy": restart_policy,
            "automountServiceAccountToken": false,
            "dnsPolicy": "Default",
            "terminationGracePeriodSeconds": 1,
            // The empty node does not report, so that it gets taints.
            "tolerations": [{ "operator": "Exists" }],
            "affinity": { "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{
                "weight": 100,
                "preference": { "matchExpressions": [
                    { "key": "kubernetes.io/hostname", "operator": "In", "values": [EMPTY_NODE] },
                ] },
            }] } },
        },
    })
}

/// Returns the pods of the tested controllers that are not about to end: name, UID and node.
fn pods(cluster: &Cluster) -> Result<Vec<[String; 3]>, String> {
    let pods = cluster.kubectl.json(&["get", "pods", "--selector", APP])?;
    let pods = pods["items"].as_array().into_iter().flatten();
    let alive = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let of =
        |pod: &Value| [&pod["metadata"]["name"], &pod["metadata"]["uid"], &pod["spec"]["nodeName"]].map(text);
    Ok(alive.map(of).collect())
}

/// Waits until the only pod of the tested controllers is refused, and returns it.
fn refused_pod(cluster: &Cluster) -> [String; 3] {
    cluster.wait_for("the pod is refused", || match &pods(cluster)?[..] {
        [of] => match cluster.events(&of[0], "NumaPlacementRefused")?.pop() {
            Some(message) if message.contains("TopologyAffinityError") => Ok(of.clone()),
            other => Err(format!("{of:?}: {other:?}")),
        },
        other => Err(format!("{other:?}")),
    })
}

/// A Job counts an evicted pod as failed, so that its pod is not evicted.
fn pod_of_a_job_waits(cluster: &Cluster) {
    cluster.kubectl.apply(&json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": { "name": "late" },
        "spec": { "template": template("Never") },
    }));
    let refused = refused_pod(cluster);
    // Three times the delay, and the time between two evictions.
    thread::sleep(EVICTION_DELAY * 3 + Duration::from_secs(30));
    assert_eq!(pods(cluster).unwrap(), [refused], "the pod of a Job is not evicted");
    let job = cluster.kubectl.json(&["get", "job", "late"]).unwrap();
    assert!(job["status"]["failed"].is_null(), "{job}");
    cluster.kubectl.must(&["delete", "job", "late", "--timeout=30m"]);
    cluster.wait_for("the pod of the Job is gone", || match pods(cluster)? {
        none if none.is_empty() => Ok(()),
        some => Err(format!("{some:?}")),
    });
    cluster.step("the pod of a Job was not evicted");
}

/// Creates a node to which pods can be bound.
fn add_empty_node(cluster: &Cluster) {
    cluster.kubectl.apply(&json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": EMPTY_NODE, "labels": { "kubernetes.io/hostname": EMPTY_NODE } },
    }));
    let amounts = json!({ "cpu": "6", "memory": "4Gi", "pods": "10" });
    let patch = json!({ "status": { "capacity": amounts, "allocatable": amounts } }).to_string();
    cluster.kubectl.must(&["patch", "node", EMPTY_NODE, "--subresource=status", "--patch", &patch]);
    // The first pod must be bound to the node with the kubelet.
    cluster.kubectl.must(&["cordon", EMPTY_NODE]);
}

/// A pod of a `ReplicaSet` is evicted, and the new one is bound to the empty node.
fn pod_of_a_replica_set_moves(cluster: &Cluster) {
    let mut template = template("Always");
    // All taints but that of a cordoned node.
    let tolerated = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];
    template["spec"]["tolerations"] = tolerated.map(|key| json!({ "key": key, "operator": "Exists" })).into();
    cluster.kubectl.apply(&json!({
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": { "name": "late" },
        "spec": {
            "replicas": 1,
            "selector": { "matchLabels": { "app": "late" } },
            "template": template,
        },
    }));
    let [name, uid, host] = refused_pod(cluster);
    assert_eq!(host, node::NAME);
    cluster.kubectl.must(&["uncordon", EMPTY_NODE]);
    cluster.wait_for("a new pod is bound to the empty node", || match &pods(cluster)?[..] {
        [[_, new, host]] if *new != uid && host == EMPTY_NODE => Ok(()),
        other => Err(format!("{other:?}")),
    });
    let messages = cluster.events(&name, "NumaRefusalEviction").unwrap();
    assert!(matches!(&messages[..], [message] if message.contains("ReplicaSet late")), "{messages:?}");
    let (_, url) = cluster.daemon().unwrap();
    let metrics = url.replace("/api/v1", "/metrics");
    cluster.wait_for("the eviction is counted", || {
        let text = cluster.node.run(&format!("wget -q -O - {metrics}"))?;
        let lines: Vec<_> = text.lines().filter(|line| line.contains("evictions_total{")).collect();
        let counted = lines.iter().any(|line| {
            line.contains("reason=\"refused\"") && line.contains("result=\"evicted\"") && line.ends_with(" 1")
        });
        if counted { Ok(()) } else { Err(lines.join("\n")) }
    });
    cluster.step("a refused pod was evicted");
}

/// With `make-room`, the pod `one` moves to the other node while it runs, so that a refused pod starts.
fn a_running_pod_makes_room(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    kubectl.must(&["delete", "replicaset", "late", "--timeout=30m"]);
    // Its pods are gone with it: there is no kubelet that could end them.
    kubectl.must(&["delete", "node", EMPTY_NODE, "--timeout=30m"]);
    kubectl.must(&["delete", "pods", "--selector", APP, "--force", "--grace-period=0", "--timeout=30m"]);
    let settings = ["NUMAWARD_KUBERNETES_REFUSED=make-room", "NUMAWARD_STRATEGY=native"];
    kubectl.must(&[&["set", "env", "daemonset/numaward", "--namespace=numaward"][..], &settings].concat());
    kubectl.must(&ROLLOUT);
    cluster.wait_for("numaward runs", || cluster.daemon());
    let before = cluster.wait_until_placed(&[("one", "main", 1), ("pair", "main", 2)]);
    let first_process = || cluster.in_cgroup("one", "main", "head -n 1 cgroup.procs").unwrap();
    let process = first_process();
    cluster.run(&[pod("late", &[container("main", &guaranteed(2, 64))])]);
    let after = cluster.wait_until_placed(&[("late", "main", 2), ("one", "main", 1), ("pair", "main", 2)]);
    assert_eq!(after["pair/main"], before["pair/main"]);
    assert_eq!(after["late/main"].nodes, before["one/main"].nodes, "{before:?}: {after:?}");
    assert_eq!(after["one/main"].nodes, before["pair/main"].nodes, "{before:?}: {after:?}");
    assert_eq!(first_process(), process, "the container that moved goes on");
    for (pod, reason) in [("one", "NumaMoved"), ("late", "NumaRoomMade")] {
        cluster.wait_for(&format!("the pod {pod} has the event {reason}"), || {
            let events = cluster.events(pod, reason)?;
            events.into_iter().next().ok_or_else(|| "no event".to_owned())
        });
    }
    cluster.step("a running pod has made room for a refused one");
}
