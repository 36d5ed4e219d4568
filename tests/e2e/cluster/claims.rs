//! Devices of resource claims: a pod is placed on the NUMA node that a DRA driver publishes for its device.
//!
//! The scheduler allocates the devices, and the kubelet prepares them at a fake driver. The devices do not exist.

use serde_json::{Value, json};

use super::{
    Cluster, ContainerPlace, MACHINE, NODES, ROLLOUT, condition, container, guaranteed, node, overlay, pod,
};
use crate::containerd::nodes;

/// Name of the driver, and of the class of its devices.
const DRIVER: &str = "dra.numaward.io";
/// Pods, which have the name of their claim, with their device and its node, in the order of creation. Without devices, each pod would be on the
/// same node as the one before while that has room.
const PODS: [(&str, &str, Option<usize>); 4] = [
    ("claims-one", "near-one", Some(1)),
    ("claims-zero", "near-zero", Some(0)),
    ("claims-one-again", "also-near-one", Some(1)),
    ("claims-none", "anywhere", None),
];

#[test]
fn claimed_devices_are_followed() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    start_driver(&cluster);
    publish_devices(&cluster);
    let overlay = overlay(&cluster, "enforce", |config| config);
    cluster.kubectl.must(&["apply", "--kustomize", &overlay]);
    cluster.kubectl.must(&ROLLOUT);
    cluster.wait_for("numaward runs", || cluster.daemon());
    cluster.step("numaward is ready");
    for (name, _, node) in PODS {
        cluster.kubectl.apply(&claim(name));
        cluster.run(&[claiming_pod(name)]);
        let place = wait_for_cpu(&cluster, name);
        let of_cpu = NODES.iter().position(|cpus| place.cpus.iter().all(|cpu| cpus.contains(cpu)));
        assert!(place.nodes.iter().map(|of| usize::try_from(*of).ok()).eq([of_cpu]), "{name}: {place:?}");
        assert!(node.is_none() || node == of_cpu, "{name}: {place:?}");
    }
    cluster.step("pods are on the nodes of their devices");
    is_allowed(&cluster);
    // The kubelet unprepares the claims, and the controller removes the reservations: a pod that uses one again follows it again.
    cluster.delete(&["claims-one"]);
    cluster.wait_for("the claim is free", || {
        let claim = cluster.kubectl.json(&["get", "resourceclaim", "claims-one"])?;
        let reserved = claim["status"]["reservedFor"].as_array().is_some_and(|pods| !pods.is_empty());
        if reserved { Err(claim["status"].to_string()) } else { Ok(()) }
    });
    cluster.run(&[claiming_pod("claims-one")]);
    let place = wait_for_cpu(&cluster, "claims-one");
    assert!(place.cpus.iter().all(|cpu| NODES[1].contains(cpu)), "{place:?}");
    cluster.step("a claim that is used again is followed again");
}

/// Starts the driver, and waits until the kubelet knows it.
fn start_driver(cluster: &Cluster) {
    let claims: Vec<_> = PODS.iter().map(|(name, device, _)| format!("{name}={device}")).collect();
    let script = format!(
        "numaward-cri dra-driver {DRIVER} --pool {} {} </dev/null >/tmp/dra-driver.log 2>&1 &",
        node::NAME,
        claims.join(" ")
    );
    cluster.node.run(&script).unwrap();
    cluster.wait_for("the kubelet has registered the driver", || {
        cluster.node.run("cat /tmp/dra-driver.log; grep -q '^registered: true' /tmp/dra-driver.log")
    });
    cluster.step("the kubelet has a DRA driver");
}

/// Creates the class and the slice. The kubelet deletes the slices of a driver that is not registered.
fn publish_devices(cluster: &Cluster) {
    let expression = format!("device.driver == '{DRIVER}'");
    let devices = PODS.iter().map(|(name, device, node)| {
        let mut attributes = json!({ "claim": { "string": name } });
        if let Some(node) = node {
            attributes["resource.kubernetes.io/numaNode"] = json!({ "int": node });
        }
        json!({ "name": device, "attributes": attributes })
    });
    let items = json!([
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": { "name": DRIVER },
            "spec": { "selectors": [{ "cel": { "expression": expression } }] },
        },
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": { "name": "node-1-devices" },
            "spec": {
                "driver": DRIVER,
                "nodeName": node::NAME,
                "pool": { "name": node::NAME, "generation": 1, "resourceSliceCount": 1 },
                "devices": devices.collect::<Vec<_>>(),
            },
        },
    ]);
    cluster.kubectl.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": items }));
}

/// Returns the claim for the device of a pod.
fn claim(name: &str) -> Value {
    let expression = format!("device.attributes['{DRIVER}'].claim == '{name}'");
    let selectors = json!([{ "cel": { "expression": expression } }]);
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "name": name },
        "spec": { "devices": { "requests": [
            { "name": "one", "exactly": { "deviceClassName": DRIVER, "selectors": selectors } }
        ] } },
    })
}

/// Returns a Guaranteed pod with one CPU and the claim of its name.
fn claiming_pod(name: &str) -> Value {
    let mut resources = guaranteed(1, 64);
    resources["claims"] = json!([{ "name": "device" }]);
    let mut pod = pod(name, &[container("main", &resources)]);
    pod["spec"]["resourceClaims"] = json!([{ "name": "device", "resourceClaimName": name }]);
    pod
}

fn wait_for_cpu(cluster: &Cluster, pod: &str) -> ContainerPlace {
    cluster.wait_for("a pod has a CPU of its own", || {
        let place = cluster.place(pod, "main")?;
        if place.cpus.len() == 1 { Ok(place) } else { Err(format!("{place:?}")) }
    })
}

/// Asserts that the rights of the overlay are enough: the daemon has logged no problem with claims and slices.
fn is_allowed(cluster: &Cluster) {
    // `kubectl logs` would have to reach the machine from outside.
    let log = cluster.node.run("cat /var/log/pods/numaward_*/numaward/*.log").unwrap();
    assert!(log.contains("numaward"), "{log}");
    let problems: Vec<_> = log.lines().filter(|line| line.contains("resource claims")).collect();
    assert!(problems.is_empty(), "{problems:#?}");
    let pod = cluster.pod("claims-one").unwrap();
    assert!(condition(&pod, "Ready"), "{pod:#}");
}
