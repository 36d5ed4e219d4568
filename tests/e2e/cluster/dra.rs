//! NUMA nodes as devices (`deploy/components/dra`): the default scheduler sends pods to nodes with room, and the kubelet has numaward
//! prepare their claims.

use serde_json::{Value, json};

use super::{
    Cluster, ContainerPlace, MACHINE, NODES, RESTRICTED, ROLLOUT, SHARED, burstable, component_overlay,
    condition, container, guaranteed, leave_one_cpu_on_each_node, node, pod,
};
use crate::containerd::{nodes, try_numbers};

/// Name of numaward's driver.
pub(super) const DRIVER: &str = "numaward.io";
/// Names of the classes of the test.
pub(super) const CLASS: &str = "numa-node";
const HOST_CLASS: &str = "numa-host";
/// Label by which the `DaemonSet` is kept off the node.
const AWAY: &str = r#"{"spec":{"template":{"spec":{"nodeSelector":{"away":"true"}}}}}"#;
const BACK: &str = r#"{"spec":{"template":{"spec":{"nodeSelector":{"away":null}}}}}"#;

#[test]
fn claims_get_nodes_that_the_scheduler_chose() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    install(&cluster);
    parameters_are_followed(&cluster);
    claim_is_on_both_nodes(&cluster);
    claim_is_for_memory_only(&cluster);
    let two = claims_are_placed(&cluster);
    claim_without_room_waits(&cluster, &two);
    claims_outlive_restarts(&cluster);
    missing_plugin_is_waited_for(&cluster);
    written_manifests_are_placed(&cluster);
    host_makes_room_before_the_bind(&cluster);
    host_without_room_is_reported(&cluster);
    cluster.step("done");
}

/// Returns the devices of numaward's slice with the nodes.
pub(super) fn devices(cluster: &Cluster) -> Result<Vec<Value>, String> {
    pool_devices(cluster, node::NAME)
}

/// Returns the devices of numaward's slice of a pool.
fn pool_devices(cluster: &Cluster, pool: &str) -> Result<Vec<Value>, String> {
    let slices = cluster.kubectl.json(&["get", "resourceslices"])?;
    let mut slices = slices["items"].as_array().into_iter().flatten();
    let is_of_pool =
        |slice: &&Value| slice["spec"]["driver"] == DRIVER && slice["spec"]["pool"]["name"] == pool;
    let slice = slices.find(is_of_pool);
    let devices = slice.and_then(|slice| slice["spec"]["devices"].as_array().cloned());
    devices.ok_or_else(|| "there is no slice".to_owned())
}

/// Applies the overlay `enforce` with the component `dra`, and waits until both nodes are published.
pub(super) fn install(cluster: &Cluster) {
    let overlay = component_overlay(cluster, &["dra"]);
    cluster.kubectl.must(&["apply", "--kustomize", &overlay]);
    cluster.kubectl.must(&[
        "set",
        "env",
        "daemonset/numaward",
        "--namespace=numaward",
        "NUMAWARD_STRATEGY=native",
    ]);
    cluster.wait_for("numaward runs", || cluster.daemon());
    cluster.kubectl.must(&ROLLOUT);
    for (name, kind) in [(CLASS, "node"), (HOST_CLASS, "host")] {
        let expression =
            format!("device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].kind == '{kind}'");
        cluster.kubectl.apply(&json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": { "name": name },
            "spec": { "selectors": [{ "cel": { "expression": expression } }] },
        }));
    }
    cluster.run(&[pod(SHARED, &[container("main", &burstable())])]);
    let found = cluster.wait_for("both nodes are devices", || match devices(cluster)? {
        devices if devices.len() == NODES.len() => Ok(devices),
        other => Err(format!("{other:?}")),
    });
    let cpus = |device: &Value| device["capacity"]["cpu"]["value"].as_str().map(str::to_owned);
    let cpus: Vec<_> = found.iter().filter_map(cpus).collect();
    assert_eq!(cpus, ["2", "3"], "CPU 0 is reserved: {found:#?}");
    cluster.step("the nodes are published");
}

/// Creates a pod with a claim of its name for CPUs and 64 MiB of one node.
pub(super) fn create(cluster: &Cluster, name: &str, cpus: u32) {
    create_with(cluster, name, cpus, &json!([]));
}

/// Creates a pod with a claim that has parameters.
fn create_with(cluster: &Cluster, name: &str, cpus: u32, config: &Value) {
    create_on(cluster, name, 1, cpus, config);
}

/// Creates a pod with a claim for these CPUs and 64 MiB of each of several nodes.
fn create_on(cluster: &Cluster, name: &str, nodes: u32, cpus: u32, config: &Value) {
    create_of(cluster, name, (CLASS, nodes), cpus, config);
}

/// Creates a pod with a claim for these CPUs and 64 MiB of each of several devices of a class.
fn create_of(cluster: &Cluster, name: &str, (class, count): (&str, u32), cpus: u32, config: &Value) {
    let amounts = json!({ "cpu": cpus.to_string(), "memory": "64Mi" });
    create_for(cluster, name, (class, count), &amounts, config);
}

/// Creates a pod with a claim for these amounts of each of several devices of a class.
fn create_for(cluster: &Cluster, name: &str, (class, count): (&str, u32), amounts: &Value, config: &Value) {
    cluster.kubectl.apply(&json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "name": name },
        "spec": { "devices": { "config": config, "requests": [{
            "name": "node",
            "exactly": { "deviceClassName": class, "count": count, "capacity": { "requests": amounts } },
        }] } },
    }));
    let mut claiming = pod(name, &[container("main", &json!({ "claims": [{ "name": "numa" }] }))]);
    claiming["spec"]["resourceClaims"] = json!([{ "name": "numa", "resourceClaimName": name }]);
    cluster.kubectl.apply(&claiming);
}

/// Returns the number of the node on which the scheduler has allocated the claim of a pod: the one of a template, or that with its name.
fn allocated_node(cluster: &Cluster, name: &str) -> usize {
    let pod = cluster.pod(name).unwrap();
    let claim = pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"].as_str().unwrap_or(name);
    let claim = cluster.kubectl.json(&["get", "resourceclaim", claim]).unwrap();
    let device = &claim["status"]["allocation"]["devices"]["results"][0]["device"];
    let number = device.as_str().and_then(|name| name.strip_prefix("node-")?.parse().ok());
    number.unwrap_or_else(|| panic!("{claim:#}"))
}

/// Waits until a pod runs with this number of exclusive CPUs on the node of its claim, and returns its place.
pub(super) fn wait_until_on_node(cluster: &Cluster, name: &str, cpus: usize) -> ContainerPlace {
    cluster.wait_until_ready(name);
    let node = allocated_node(cluster, name);
    cluster.wait_for("a pod has the CPUs and the node of its claim", || {
        let place = cluster.place(name, "main")?;
        let of_node = place.cpus.iter().all(|cpu| *cpu != 0 && NODES[node].contains(cpu));
        let is_placed = place.cpus.len() == cpus && of_node && place.nodes.iter().eq([&(node as u64)]);
        if is_placed { Ok(place) } else { Err(format!("{name} on node {node}: {place:?}")) }
    })
}

/// Parameters of a claim are followed; a parameter that no device has is refused with an event.
fn parameters_are_followed(cluster: &Cluster) {
    let config = |field: &str, value: Value| {
        let mut parameters = json!({ "apiVersion": "numaward.io/v1alpha1", "kind": "Placement" });
        parameters[field] = value;
        json!([{ "opaque": { "driver": DRIVER, "parameters": parameters } }])
    };
    create_with(cluster, "astray", 1, &config("nodes", json!("0")));
    let message = cluster.wait_for("the parameters are refused", || {
        let events = cluster.events("astray", "FailedPrepareDynamicResources")?;
        events.into_iter().next().ok_or_else(|| "no event".to_owned())
    });
    assert!(message.contains("nodes: a device on one node has no such parameter"), "{message}");
    create_with(cluster, "near", 1, &config("sameCache", json!(true)));
    wait_until_on_node(cluster, "near", 1);
    cluster.delete(&["astray", "near"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "astray", "near", "--timeout=30m"]);
    cluster.step("parameters of claims are followed");
}

/// A claim for several devices gives a container CPUs and memory of each node.
fn claim_is_on_both_nodes(cluster: &Cluster) {
    create_on(cluster, "both", 2, 1, &json!([]));
    cluster.wait_until_ready("both");
    cluster.wait_for("a pod has a CPU of each node, and both nodes", || {
        let place = cluster.place("both", "main")?;
        let count = |node: &[u64]| place.cpus.iter().filter(|cpu| node.contains(cpu)).count();
        let is_placed = NODES.iter().all(|node| count(node) == 1) && place.nodes.len() == NODES.len();
        if is_placed { Ok(()) } else { Err(format!("{place:?}")) }
    });
    // Of 128 MiB, 16 MiB may be reclaimed within the pod.
    cluster.wait_for("the memory of both nodes is protected", || {
        let protected = cluster.in_cgroup("both", "main", "cat memory.min ../memory.min")?;
        if protected.lines().eq(["117440512"; 2]) { Ok(()) } else { Err(protected) }
    });
    cluster.delete(&["both"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "both", "--timeout=30m"]);
    cluster.step("a claim is on both nodes");
}

/// A claim without CPUs gives a container memory of its node, and leaves it on the shared CPUs.
fn claim_is_for_memory_only(cluster: &Cluster) {
    create_for(cluster, "memory", (CLASS, 1), &json!({ "memory": "64Mi" }), &json!([]));
    cluster.wait_until_ready("memory");
    let node = allocated_node(cluster, "memory");
    cluster.wait_for("a pod has memory of a node, and no CPUs of its own", || {
        let (place, shared) = (cluster.place("memory", "main")?, cluster.place(SHARED, "main")?);
        let is_placed = place.cpus == shared.cpus && place.nodes.iter().eq([&(node as u64)]);
        if is_placed { Ok(()) } else { Err(format!("{place:?} {shared:?}")) }
    });
    cluster.wait_for("its memory is protected", || {
        let protected = cluster.in_cgroup("memory", "main", "cat memory.min memory.low")?;
        if protected.lines().eq(["50331648", "67108864"]) { Ok(()) } else { Err(protected) }
    });
    cluster.delete(&["memory"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "memory", "--timeout=30m"]);
    cluster.step("a claim is for memory only");
}

/// Pods with claims run on the CPUs and the memory of their nodes; other pods leave these CPUs.
fn claims_are_placed(cluster: &Cluster) -> ContainerPlace {
    create(cluster, "two", 2);
    let two = wait_until_on_node(cluster, "two", 2);
    create(cluster, "three", 3);
    let three = wait_until_on_node(cluster, "three", 3);
    assert!(two.cpus.is_disjoint(&three.cpus), "{two:?} {three:?}");
    assert_ne!(two.nodes, three.nodes);
    // Of 64 MiB, 16 MiB may be reclaimed within the pod.
    cluster.wait_for("the memory of a claim is protected in the container and its pod", || {
        let protected = cluster.in_cgroup("two", "main", "cat memory.min memory.low ../memory.min")?;
        if protected.lines().eq(["50331648", "67108864", "50331648"]) { Ok(()) } else { Err(protected) }
    });
    cluster.wait_for("another pod leaves the CPUs of the claims", || {
        let place = cluster.place(SHARED, "main")?;
        if place.cpus.iter().eq([&0]) { Ok(()) } else { Err(format!("{place:?}")) }
    });
    cluster.step("claims are placed");
    claim_shows_its_state(cluster, "two", &two);
    two
}

/// The status of a claim has the conditions of its device, and what the pod has of it.
fn claim_shows_its_state(cluster: &Cluster, name: &str, place: &ContainerPlace) {
    let device = cluster.wait_for("the claim has a status", || {
        let claim = cluster.kubectl.json(&["get", "resourceclaim", name])?;
        let device = claim["status"]["devices"][0].clone();
        if condition(&json!({ "status": device }), "Ready") {
            Ok(device)
        } else {
            Err(claim["status"].to_string())
        }
    });
    assert!(condition(&json!({ "status": device }), "numaward.io/kept"), "{device:#}");
    let data = &device["data"];
    let cpus = try_numbers(data["cpus"].as_str().unwrap_or_default()).unwrap();
    assert!(place.cpus.iter().eq(&cpus), "{device:#} {place:?}");
    let nodes = try_numbers(data["nodes"].as_str().unwrap_or_default()).unwrap();
    assert!(place.nodes.iter().eq(&nodes), "{device:#} {place:?}");
    assert_eq!(data["memoryBytes"], 64 << 20, "{device:#}");
    cluster.step("a claim shows its state");
}

/// A claim for which no node has room is not sent to the host, so that nothing is refused there.
fn claim_without_room_waits(cluster: &Cluster, two: &ContainerPlace) {
    create(cluster, "late", 2);
    let message = cluster.wait_for("the scheduler finds no node", || {
        let pod = cluster.pod("late")?;
        let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let scheduled = conditions.iter().find(|condition| condition["type"] == "PodScheduled");
        let unschedulable = scheduled.filter(|condition| condition["reason"] == "Unschedulable");
        unschedulable
            .map(|condition| condition["message"].to_string())
            .ok_or_else(|| pod["status"].to_string())
    });
    assert!(message.contains("cannot allocate all claims"), "{message}");
    assert_eq!(cluster.events("late", "FailedPrepareDynamicResources").unwrap(), [""; 0]);
    cluster.delete(&["two"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "two", "--timeout=30m"]);
    let late = wait_until_on_node(cluster, "late", 2);
    assert_eq!(late, *two, "it gets what has become free");
    cluster.step("a claim waited for room");
}

/// Restarts of the kubelet, the container runtime and the daemon leave prepared claims as they are.
fn claims_outlive_restarts(cluster: &Cluster) {
    let places = || ["late", "three"].map(|name| cluster.place(name, "main"));
    let before = places();
    // A kubelet that finds no container runtime ends.
    cluster.node.run("restart-containerd; until ctr version; do sleep 1; done").unwrap();
    cluster.node.run("stop-kubelet && start-kubelet").unwrap();
    let (daemon, _) = cluster.daemon().unwrap();
    cluster.kubectl.must(&["delete", "pod", &daemon, "--namespace=numaward", "--timeout=30m"]);
    cluster.wait_for("numaward is back", || match cluster.daemon()? {
        (same, _) if same == daemon => Err("it is still there".to_owned()),
        _ => Ok(()),
    });
    assert_eq!(places(), before, "no pod moves");
    // The kubelet has registered the plugin again.
    cluster.delete(&["late"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "late", "--timeout=30m"]);
    create(cluster, "next", 2);
    wait_until_on_node(cluster, "next", 2);
    cluster.step("claims outlived restarts");
}

/// While numaward is away, a pod with a claim waits with an event, and starts as soon as numaward is back.
fn missing_plugin_is_waited_for(cluster: &Cluster) {
    cluster.delete(&["next"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "next", "--timeout=30m"]);
    let patch = |change| {
        cluster.kubectl.must(&["patch", "daemonset", "numaward", "--namespace=numaward", "--patch", change]);
    };
    patch(AWAY);
    cluster.wait_for("numaward is away", || {
        let pods = cluster.kubectl.run(&["get", "pods", "--namespace=numaward", "--output=name"])?;
        if pods.is_empty() { Ok(()) } else { Err(pods) }
    });
    create(cluster, "waits", 2);
    cluster.wait_for("the kubelet cannot prepare the claim", || {
        let pod = cluster.pod("waits")?;
        let is_bound = pod["spec"]["nodeName"] == node::NAME;
        let events = cluster.events("waits", "FailedPrepareDynamicResources")?;
        match (&events[..], condition(&pod, "Ready")) {
            ([first, ..], false) if is_bound => Ok(first.clone()),
            _ => Err(pod["status"].to_string()),
        }
    });
    patch(BACK);
    cluster.kubectl.must(&ROLLOUT);
    wait_until_on_node(cluster, "waits", 2);
    cluster.step("a pod waited for the plugin");
    cluster.delete(&["waits", "three"]);
    let (_, url) = cluster.daemon().unwrap();
    cluster.wait_for("everything is free", || {
        let status = devices(cluster)?;
        let held = cluster.ask(&url, "allocations")?;
        let place = cluster.place(SHARED, "main")?;
        let is_free = held["allocations"] == json!([]) && place.cpus.len() == 6;
        if is_free { Ok(()) } else { Err(format!("{held} {place:?} {status:?}")) }
    });
}

/// The manifests of `numaward claim-template`, and the admission policy, give pods the claims for their requests.
fn written_manifests_are_placed(cluster: &Cluster) {
    let labelled = |name: &str| {
        let mut pod = pod(name, &[container("main", &guaranteed(2, 64))]);
        pod["metadata"]["labels"] = json!({ "claims": "true" });
        pod["metadata"]["namespace"] = json!("default");
        pod
    };
    let write = |name: &str, arguments: &str| {
        let command = format!("numaward claim-template {arguments} <<'END'\n{}\nEND", labelled(name));
        let text = cluster.node.run(&command).unwrap();
        cluster.kubectl.apply_text(&text);
    };
    write("written", "");
    let written = wait_until_on_node(cluster, "written", 2);
    let requests = cluster.pod("written").unwrap()["spec"]["resources"]["requests"].take();
    assert_eq!(requests, json!({ "cpu": "2", "memory": "64Mi" }));
    write("attached", "--admission-policy claims=true");
    // The API server uses a policy some time after it was created.
    let attached = cluster.wait_for("the policy attaches the claim", || {
        cluster.kubectl.apply(&labelled("attached"));
        let pod = cluster.pod("attached")?;
        if pod["spec"]["resourceClaims"].is_array() {
            return Ok(wait_until_on_node(cluster, "attached", 2));
        }
        cluster.delete(&["attached"]);
        Err(pod["spec"].to_string())
    });
    assert!(attached.cpus.is_disjoint(&written.cpus), "{attached:?} {written:?}");
    cluster.delete(&["written", "attached"]);
    cluster.step("written manifests are placed");
}

/// Returns the types of the conditions of a claim's devices that are true.
fn claim_conditions(cluster: &Cluster, name: &str) -> Result<Vec<String>, String> {
    let claim = cluster.kubectl.json(&["get", "resourceclaim", name])?;
    let states = claim["status"]["devices"].as_array().into_iter().flatten();
    let conditions = states.flat_map(|state| state["conditions"].as_array().into_iter().flatten());
    let is_true = conditions.filter(|condition| condition["status"] == "True");
    Ok(is_true.filter_map(|condition| condition["type"].as_str().map(str::to_owned)).collect())
}

/// A pod with a claim of the whole host fits on no node. A running pod is moved, and then the pod is bound.
fn host_makes_room_before_the_bind(cluster: &Cluster) {
    let settings =
        ["NUMAWARD_KUBERNETES_DRA_HOST_DEVICE=on", "NUMAWARD_KUBERNETES_REFUSED=make-room", RESTRICTED];
    let set = ["set", "env", "daemonset/numaward", "--namespace=numaward"];
    cluster.kubectl.must(&[&set[..], &settings].concat());
    cluster.kubectl.must(&ROLLOUT);
    cluster.wait_for("numaward runs", || cluster.daemon());
    let before = leave_one_cpu_on_each_node(cluster);
    cluster.wait_for("the host is a device with the free CPUs of both nodes", || {
        let devices = pool_devices(cluster, &format!("{}/host", node::NAME))?;
        let is_published = devices.len() == 1 && devices[0]["capacity"]["cpu"]["value"] == "2";
        if is_published { Ok(()) } else { Err(format!("{devices:#?}")) }
    });
    let first_process = || cluster.in_cgroup("one", "main", "head -n 1 cgroup.procs").unwrap();
    let process = first_process();
    create_of(cluster, "room", (HOST_CLASS, 1), 2, &json!([]));
    cluster.wait_until_ready("room");
    let after = cluster.wait_until_placed(&[("one", "main", 1), ("pair", "main", 2), ("room", "main", 2)]);
    assert_eq!(after["pair/main"], before["pair/main"]);
    assert_eq!(after["room/main"].nodes, before["one/main"].nodes, "{before:?}: {after:?}");
    assert_eq!(after["one/main"].nodes, before["pair/main"].nodes, "{before:?}: {after:?}");
    assert_eq!(first_process(), process, "the container that moved goes on");
    let conditions = claim_conditions(cluster, "room").unwrap();
    assert!(conditions.iter().any(|name| name == "numaward.io/placed"), "{conditions:?}");
    cluster.wait_for("the moved pod has an event", || {
        cluster.events("one", "NumaMoved")?.into_iter().next().ok_or_else(|| "no event".to_owned())
    });
    cluster.step("the host made room before a pod was bound");
}

/// A pod with a claim of the whole host waits while its request fits in sum only, and no move makes room. It starts when there is room.
fn host_without_room_is_reported(cluster: &Cluster) {
    cluster.delete(&["room"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "room", "--timeout=30m"]);
    // A claim of a node is not moved. Only node 0 has a free CPU.
    create(cluster, "fixed", 1);
    wait_until_on_node(cluster, "fixed", 1);
    cluster.delete(&["one"]);
    cluster.wait_for("the host has a free CPU on each node", || {
        let devices = pool_devices(cluster, &format!("{}/host", node::NAME))?;
        let is_published = devices.len() == 1 && devices[0]["capacity"]["cpu"]["value"] == "2";
        if is_published { Ok(()) } else { Err(format!("{devices:#?}")) }
    });
    create_of(cluster, "large", (HOST_CLASS, 1), 2, &json!([]));
    let message = cluster.wait_for("the scheduler reports the refusal of the host", || {
        let events = cluster.events("large", "FailedScheduling")?;
        let of_host =
            events.iter().find(|message| message.contains("cpu requested 2, free 1 on node 0, 1 on node 1"));
        of_host.cloned().ok_or_else(|| format!("{events:?}"))
    });
    cluster.step(&format!("the host reported: {message}"));
    let waiting = cluster.pod("large").unwrap();
    assert_eq!(
        (&waiting["status"]["phase"], &waiting["spec"]["nodeName"]),
        (&json!("Pending"), &Value::Null)
    );
    cluster.wait_for("less of the host is published", || {
        let devices = pool_devices(cluster, &format!("{}/host", node::NAME))?;
        let is_lower = devices[0]["capacity"]["cpu"]["value"] == "1";
        if is_lower { Ok(()) } else { Err(format!("{devices:#?}")) }
    });
    let (_, url) = cluster.daemon().unwrap();
    let held = cluster.ask(&url, "allocations").unwrap();
    assert_eq!(held["claims"].as_array().map(Vec::len), Some(1), "nothing is reserved for it: {held:#}");
    cluster.delete(&["fixed"]);
    cluster.kubectl.must(&["delete", "resourceclaim", "fixed", "--timeout=30m"]);
    cluster.wait_until_ready("large");
    cluster.wait_until_placed(&[("large", "main", 2), ("pair", "main", 2)]);
    cluster.delete(&["large", "pair"]);
    cluster.step("a claim of the host waited for room");
}
