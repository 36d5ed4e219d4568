//! Resource claims beside devices of another driver, beside another node of the cluster, and in spite of crashes and restarts.

use serde_json::{Value, json};

use super::{
    Cluster, ContainerPlace, MACHINE, NODES, ROLLOUT, condition, container,
    dra::{CLASS, DRIVER, create, devices, install, wait_until_on_node},
    node, pod,
};
use crate::containerd::nodes;

/// Name of the other driver, and of the class of its device.
const OTHER_DRIVER: &str = "gpu.example.com";
/// Name of a node of the cluster that has no kubelet.
const OTHER_NODE: &str = "node-2";
/// Where the daemon dies, and true if that is while it prepares a claim.
const FAULTS: [(&str, bool); 4] = [
    // The ledger has the claim, and the container runtime does not know its device.
    ("claim.reserved", true),
    // The runtime knows the device, and the kubelet has no answer.
    ("claim.written", true),
    // The runtime no longer knows the device, and the ledger has the claim.
    ("claim.removed", false),
    // The ledger no longer has the claim, and the kubelet has no answer.
    ("claim.released", false),
];

#[test]
fn claims_survive_crashes() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    install(&cluster);
    other_device_is_near(&cluster);
    claim_is_for_one_pod(&cluster);
    full_host_is_avoided(&cluster);
    for (point, is_preparation) in FAULTS {
        claim_survives_crash(&cluster, point, is_preparation);
    }
    claim_outlives_reboot(&mut cluster);
    cluster.step("done");
}

fn delete_claims(cluster: &Cluster, names: &[&str]) {
    cluster.delete(names);
    cluster.kubectl.must(&[&["delete", "resourceclaim", "--timeout=30m"], names].concat());
}

/// A claim for a device of another driver, too, is on the NUMA node of that device.
fn other_device_is_near(cluster: &Cluster) {
    let log = "/tmp/other-driver.log";
    let serve = format!(
        "numaward-cri dra-driver {OTHER_DRIVER} --pool {} near=gpu </dev/null >{log} 2>&1 &",
        node::NAME
    );
    cluster.node.run(&serve).unwrap();
    cluster.wait_for("the kubelet has registered the other driver", || {
        cluster.node.run(&format!("cat {log}; grep -q '^registered: true' {log}"))
    });
    let near = json!({ "resource.kubernetes.io/numaNode": { "int": 1 } });
    let expression = format!("device.driver == '{OTHER_DRIVER}'");
    let request = |name: &str, class: &str, more: Value| {
        let mut exactly = json!({ "deviceClassName": class });
        exactly["capacity"] = more;
        json!({ "name": name, "exactly": exactly })
    };
    let amounts = json!({ "requests": { "cpu": "1", "memory": "64Mi" } });
    let mut claiming = pod("near", &[container("main", &json!({ "claims": [{ "name": "both" }] }))]);
    claiming["spec"]["resourceClaims"] = json!([{ "name": "both", "resourceClaimName": "near" }]);
    let items = json!([
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": { "name": OTHER_DRIVER },
            "spec": { "selectors": [{ "cel": { "expression": expression } }] },
        },
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": { "name": "other-devices" },
            "spec": {
                "driver": OTHER_DRIVER,
                "nodeName": node::NAME,
                "pool": { "name": node::NAME, "generation": 1, "resourceSliceCount": 1 },
                "devices": [{ "name": "gpu", "attributes": near }],
            },
        },
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": { "name": "near" },
            "spec": { "devices": {
                "requests": [request("numa", CLASS, amounts), request("gpu", OTHER_DRIVER, Value::Null)],
                "constraints": [{ "matchAttribute": "resource.kubernetes.io/numaNode" }],
            } },
        },
        claiming,
    ]);
    cluster.kubectl.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": items }));
    // Without the device, it would be on node 0, which has less room.
    cluster.wait_until_ready("near");
    cluster.wait_for("a pod has a CPU near its other device", || {
        let place = cluster.place("near", "main")?;
        let is_near = place.cpus.len() == 1 && place.cpus.iter().all(|cpu| NODES[1].contains(cpu));
        if is_near && place.nodes.iter().eq([&1]) { Ok(()) } else { Err(format!("{place:?}")) }
    });
    delete_claims(cluster, &["near"]);
    cluster.step("a claim is near the device of another driver");
}

/// The containers of a pod share a claim; another pod that names it is refused.
fn claim_is_for_one_pod(cluster: &Cluster) {
    create(cluster, "owner", 2);
    let place = wait_until_on_node(cluster, "owner", 2);
    let with_claim = json!({ "claims": [{ "name": "numa" }] });
    let stranger = |name: &str| {
        let mut stranger = pod(name, &[container("main", &with_claim)]);
        stranger["spec"]["resourceClaims"] = json!([{ "name": "numa", "resourceClaimName": "owner" }]);
        stranger
    };
    cluster.kubectl.apply(&stranger("stranger"));
    let message = cluster.wait_for("a container of another pod is refused", || {
        let events = cluster.events("stranger", "Failed")?;
        let found = events.iter().find(|message| message.contains("prepared for another pod"));
        found.cloned().ok_or_else(|| format!("{events:?} {}", cluster.pod("stranger").unwrap()["status"]))
    });
    assert!(message.contains("resource claim default/owner"), "{message}");
    assert_eq!(cluster.place("owner", "main").unwrap(), place, "the claim stays with its pod");
    cluster.delete(&["stranger"]);
    delete_claims(cluster, &["owner"]);

    create(cluster, "unused", 1);
    let mut pair = pod("pair", &[container("one", &with_claim), container("two", &with_claim)]);
    pair["spec"]["resourceClaims"] = json!([{ "name": "numa", "resourceClaimName": "pair" }]);
    let mut claim = cluster.kubectl.json(&["get", "resourceclaim", "unused"]).unwrap();
    claim["metadata"] = json!({ "name": "pair" });
    claim["status"].take();
    cluster.kubectl.apply(&claim);
    cluster.run(&[pair]);
    let both = cluster.wait_for("the containers of a pod share a claim", || {
        let places = ["one", "two"].map(|name| cluster.place("pair", name));
        let [Ok(one), Ok(two)] = &places else { return Err(format!("{places:?}")) };
        if one == two && one.cpus.len() == 1 { Ok(one.clone()) } else { Err(format!("{places:?}")) }
    });
    assert!(!both.cpus.contains(&0), "{both:?}");
    delete_claims(cluster, &["pair", "unused"]);
    cluster.step("a claim is for one pod");
}

/// A pod that has no room on a node of the cluster is bound to another one, and refused by none.
fn full_host_is_avoided(cluster: &Cluster) {
    create(cluster, "full-two", 2);
    wait_until_on_node(cluster, "full-two", 2);
    create(cluster, "full-three", 3);
    wait_until_on_node(cluster, "full-three", 3);
    cluster.wait_for("the devices have no CPU left", || {
        let free = cluster.kubectl.json(&["get", "resourceclaims"])?;
        let allocated = free["items"].as_array().into_iter().flatten();
        let count = allocated.filter(|claim| !claim["status"]["allocation"].is_null()).count();
        if count == 2 { Ok(()) } else { Err(format!("{free} {:?}", devices(cluster)?)) }
    });
    let value = |value: &str| json!({ "value": value });
    let device = json!({
        "name": "node-0",
        "allowMultipleAllocations": true,
        "attributes": { "kind": { "string": "node" } },
        "capacity": { "cpu": value("8"), "memory": value("4Gi") },
    });
    // Without the label of its system, no pod of the DaemonSet is sent there.
    let items = json!([
        { "apiVersion": "v1", "kind": "Node", "metadata": { "name": OTHER_NODE } },
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": { "name": "other-node" },
            "spec": {
                "driver": DRIVER,
                "nodeName": OTHER_NODE,
                "pool": { "name": OTHER_NODE, "generation": 1, "resourceSliceCount": 1 },
                "devices": [device],
            },
        },
    ]);
    cluster.kubectl.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": items }));
    create(cluster, "away", 3);
    let amounts = json!({ "cpu": "8", "memory": "4Gi", "pods": "10" });
    let bound = cluster.wait_for("the pod is bound to the other node", || {
        // The controller takes the time at which it sees a change for a sign of life.
        let heartbeat = time_of_machine(cluster)?;
        let ready = json!({ "type": "Ready", "status": "True", "reason": "Test", "message": "",
            "lastHeartbeatTime": heartbeat, "lastTransitionTime": heartbeat });
        let status =
            json!({ "status": { "capacity": amounts, "allocatable": amounts, "conditions": [ready] } });
        let patch = status.to_string();
        let arguments =
            ["patch", "node", OTHER_NODE, "--subresource=status", "--type=merge", "--patch", &patch];
        cluster.kubectl.run(&arguments)?;
        let pod = cluster.pod("away")?;
        let name = pod["spec"]["nodeName"].as_str().map(str::to_owned);
        name.ok_or_else(|| pod["status"].to_string())
    });
    assert_eq!(bound, OTHER_NODE);
    assert_eq!(cluster.events("away", "FailedPrepareDynamicResources").unwrap(), [""; 0]);
    cluster.kubectl.must(&["delete", "pod", "away", "--force", "--grace-period=0"]);
    cluster.kubectl.must(&["delete", "node", OTHER_NODE]);
    cluster.kubectl.must(&["delete", "resourceslice", "other-node"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "away", "--timeout=30m"]);
    delete_claims(cluster, &["full-two", "full-three"]);
    cluster.step("a full host was avoided");
}

/// Returns the present time of the machine, as the API server writes it.
fn time_of_machine(cluster: &Cluster) -> Result<String, String> {
    cluster.node.run("date -u +%Y-%m-%dT%H:%M:%SZ")
}

/// Sets the point at which the daemon dies, and waits until its pod is replaced.
fn set_fault(cluster: &Cluster, change: &str) {
    cluster.kubectl.must(&["set", "env", "daemonset/numaward", "--namespace=numaward", change]);
    cluster.kubectl.must(&ROLLOUT);
}

/// The daemon dies between two steps, again and again. Without the fault, the pod starts or ends as if nothing had happened.
fn claim_survives_crash(cluster: &Cluster, point: &str, is_preparation: bool) {
    if !is_preparation {
        create(cluster, "hit", 2);
        wait_until_on_node(cluster, "hit", 2);
    }
    set_fault(cluster, &format!("NUMAWARD_FAULT={point}"));
    if is_preparation {
        create(cluster, "hit", 2);
    } else {
        cluster.kubectl.must(&["delete", "pod", "hit", "--wait=false"]);
    }
    cluster.wait_for("the daemon dies", || {
        let pods = cluster.kubectl.json(&["get", "pods", "--namespace=numaward"])?;
        let died = |pod: &Value| pod["status"]["containerStatuses"][0]["restartCount"].as_u64() > Some(0);
        if pods["items"].as_array().is_some_and(|pods| pods.iter().any(died)) {
            Ok(())
        } else {
            Err(pods["items"][0]["status"].to_string())
        }
    });
    let log = cluster.node.run("cat /var/log/pods/numaward_*/numaward/*.log").unwrap();
    assert!(log.contains(&format!("fault point {point}")), "{log}");
    set_fault(cluster, "NUMAWARD_FAULT-");
    if is_preparation {
        wait_until_on_node(cluster, "hit", 2);
        delete_claims(cluster, &["hit"]);
    } else {
        cluster.kubectl.must(&["wait", "--for=delete", "pod/hit", "--timeout=30m"]);
        cluster.kubectl.must(&["delete", "resourceclaim", "hit", "--timeout=30m"]);
    }
    cluster.wait_for("nothing of the claim is left", || {
        let (_, url) = cluster.daemon()?;
        let held = cluster.ask(&url, "allocations")?;
        let files = cluster.node.run("ls /var/run/cdi")?;
        let is_free = held["allocations"] == json!([]) && held["claims"].as_array().is_none_or(Vec::is_empty);
        if is_free && files.is_empty() { Ok(()) } else { Err(format!("{held} {files}")) }
    });
    cluster.step(&format!("a claim survived a crash at {point}"));
}

/// After a restart of the machine, which empties the folder of devices for the runtime, a pod has the CPUs of its claim again.
fn claim_outlives_reboot(cluster: &mut Cluster) {
    create(cluster, "rebooted", 2);
    let before: ContainerPlace = wait_until_on_node(cluster, "rebooted", 2);
    cluster.node.reboot();
    cluster.wait_for("the pod runs again", || {
        let pod = cluster.pod("rebooted")?;
        let status = &pod["status"]["containerStatuses"][0];
        let is_new = status["restartCount"].as_u64() > Some(0) && condition(&pod, "Ready");
        if is_new { Ok(()) } else { Err(pod["status"].to_string()) }
    });
    let after =
        cluster.wait_for("the pod has its CPUs again", || match cluster.place("rebooted", "main")? {
            place if place == before => Ok(place),
            other => Err(format!("{other:?}, before: {before:?}")),
        });
    assert_eq!(after.cpus.len(), 2);
    delete_claims(cluster, &["rebooted"]);
    cluster.step("a claim outlived a restart of the machine");
}
