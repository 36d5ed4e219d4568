//! Data that other programs read from numaward in a cluster: NodeResourceTopology for the scheduler plugin, the PodResources API
//! for agents, and the kubelet's metrics for dashboards. Each is checked against its reference: the API server with the published
//! resource definition, the kubelet on the same node, and a client that is generated from the API's description.

use std::{collections::BTreeMap, env, fmt::Write as _, fs, path::PathBuf, process::Command};

use numaward_engine::PolicyConfig;
use numaward_simulation::fleet::topology_match::{AlignedRequests, TopologyMatch};
use numaward_topology::{Machine, NodeId, NumaNode};
use serde_json::{Map, Value, json};

use super::{
    Cluster, MACHINE, NODES, ROLLOUT, SHARED, burstable, condition, container, decisions, guaranteed,
    node::{self, Reader},
    pod,
};
use crate::{
    containerd::{nodes, numbers},
    deploy::checkout,
};

/// Name of the variable with the folder of grpcio-tools.
const GRPC_TOOLS: &str = "NUMAWARD_GRPC_TOOLS";
const DEVICE: &str = "test.numaward.io/device";
/// Devices with their nodes, in the order of assignment.
const DEVICES: [(&str, usize); 4] = [("d1a", 1), ("d0a", 0), ("d1b", 1), ("d0b", 0)];
/// Resources that the scheduler plugin compares; lists of amounts have this order.
const RESOURCES: [&str; 3] = ["cpu", "memory", DEVICE];
const HUGEPAGES: u64 = 16;

/// Request of a container: CPUs, MiB and devices.
#[derive(Clone, Copy)]
struct Wants(u64, u64, u64);

impl Wants {
    fn container(self, name: &str) -> Value {
        let Self(cpus, mebibytes, devices) = self;
        let mut amounts = json!({ "cpu": cpus.to_string(), "memory": format!("{mebibytes}Mi") });
        if devices > 0 {
            amounts[DEVICE] = json!(devices.to_string());
        }
        container(name, &json!({ "requests": amounts, "limits": amounts }))
    }

    fn amounts(self) -> Vec<u64> {
        vec![self.0, self.1 << 20, self.2]
    }
}

/// Returns a Guaranteed pod. It names its node, because the scheduler would hold back pods that numaward refuses.
fn candidate(name: &str, containers: &[Wants]) -> Value {
    let made = containers.iter().enumerate().map(|(index, wants)| wants.container(&format!("c{index}")));
    let mut pod = pod(name, &made.collect::<Vec<_>>());
    pod["spec"]["nodeName"] = json!(node::NAME);
    pod
}

#[test]
fn readers_see_what_kubelet_reports() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    give_devices(&cluster);
    let definition = checkout("deploy/components/node-resource-topology-crd/noderesourcetopologies.yaml");
    cluster.kubectl.must(&["apply", "--filename", &definition.display().to_string()]);
    install(&cluster, "enforce", |config| {
        let placed = config.replace("Policy: best-effort", "Policy: single-numa-node");
        assert_ne!(placed, config);
        placed
    });
    let none_yet = wait_for_free(&cluster, [2, 3], [2, 2]);
    is_as_defined(&cluster, &none_yet);
    devices_are_followed(&cluster);
    let topology = wait_for_free(&cluster, [1, 2], [1, 1]);
    is_what_the_kubelet_reports(&cluster);
    keeps_away_what_is_refused(&cluster, &topology);
    are_counted_as_the_kubelet_counts(&cluster);
    cluster.step("done");
}

/// Applies an overlay with the kubelet's metrics and the component that publishes the NodeResourceTopology.
fn install(cluster: &Cluster, overlay: &str, change: impl Fn(&str) -> String) {
    let copy = cluster.folder.path().join(format!("deploy-{overlay}"));
    let status = Command::new("cp").arg("--recursive").arg(checkout("deploy")).arg(&copy).status().unwrap();
    assert!(status.success(), "cp: {status}");
    let folder = copy.join("overlays").join(overlay);
    let edit = |name: &str, change: &dyn Fn(&str) -> String| {
        let path = folder.join(name);
        fs::write(&path, change(&fs::read_to_string(&path).unwrap())).unwrap();
    };
    edit("config.yaml", &|config| change(config) + "\nexportKubeletNames: true\n");
    edit("kustomization.yaml", &|text| {
        text.to_owned() + "components:\n  - ../../components/node-resource-topology\n"
    });
    cluster.kubectl.must(&["apply", "--kustomize", &folder.display().to_string()]);
    cluster.kubectl.must(&ROLLOUT);
    cluster.wait_for("numaward runs", || cluster.daemon());
    cluster.step(&format!("numaward is ready, with the overlay {overlay}"));
}

/// Registers devices with the kubelet, and allocates hugepages on node 1.
fn give_devices(cluster: &Cluster) {
    let devices = DEVICES.iter().fold(String::new(), |mut all, (id, node)| {
        write!(all, " {id}={node}").unwrap();
        all
    });
    let script = format!(
        "echo {HUGEPAGES} >/sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages
        numaward-cri device-plugin {DEVICE}{devices} </dev/null >/tmp/device-plugin.log 2>&1 &"
    );
    cluster.node.run(&script).unwrap();
    cluster.wait_for("the kubelet has the devices", || {
        let node = cluster.kubectl.json(&["get", "node", node::NAME])?;
        match &node["status"]["allocatable"][DEVICE] {
            count if count.as_str() == Some(&*DEVICES.len().to_string()) => Ok(()),
            count => Err(format!("{count}: {:?}", cluster.node.run("cat /tmp/device-plugin.log"))),
        }
    });
    cluster.step("the kubelet has devices");
}

fn topology(cluster: &Cluster) -> Result<Value, String> {
    cluster.kubectl.json(&["get", "noderesourcetopologies", node::NAME])
}

fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let mut list = list.as_array().into_iter().flatten();
    list.find(|of| of["name"] == name).unwrap_or(&Value::Null)
}

fn amount(zone: &Value, resource: &str, which: &str) -> u64 {
    let text = named(&zone["resources"], resource)[which].as_str();
    text.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{which} {resource}: {zone:#}"))
}

/// Returns the available amounts of each node.
fn available(topology: &Value) -> Vec<u64> {
    let zones = topology["zones"].as_array().into_iter().flatten();
    zones.flat_map(|zone| RESOURCES.map(|resource| amount(zone, resource, "available"))).collect()
}

/// Waits until these CPUs and devices are published as available on the two nodes.
fn wait_for_free(cluster: &Cluster, cpus: [u64; 2], devices: [u64; 2]) -> Value {
    cluster.wait_for(&format!("free are {cpus:?} CPUs and {devices:?} devices"), || {
        let topology = topology(cluster)?;
        let zones: Vec<_> = topology["zones"].as_array().into_iter().flatten().collect();
        let has = |resource: &str, expected: [u64; 2]| {
            let found = zones.iter().map(|zone| named(&zone["resources"], resource)["available"].as_str());
            found.eq(expected.map(|of| of.to_string()).iter().map(|of| Some(of.as_str())))
        };
        if has("cpu", cpus) && has(DEVICE, devices) { Ok(topology) } else { Err(format!("{topology:#}")) }
    })
}

/// Asserts that the published object conforms to the resource definition and describes the machine.
fn is_as_defined(cluster: &Cluster, topology: &Value) {
    // The API server drops unknown fields; with strict validation it reports them.
    let mut same = topology.clone();
    same["metadata"] = json!({ "name": node::NAME });
    cluster.kubectl.check(&same);
    let value = |name: &str| named(&topology["attributes"], name)["value"].clone();
    assert_eq!(value("topologyManagerPolicy"), "single-numa-node");
    assert_eq!(value("topologyManagerScope"), "container");
    // It is published as soon as numaward knows all pods of the node.
    cluster.wait_for("there is a fingerprint of the pods", || {
        let topology = self::topology(cluster)?;
        let value = named(&topology["attributes"], "nodeTopologyPodsFingerprint")["value"].as_str();
        let is_there = value.is_some_and(|value| value.starts_with("pfp0v001"));
        if is_there { Ok(()) } else { Err(format!("{topology:#}")) }
    });
    let of_node = cluster.kubectl.json(&["get", "node", node::NAME]).unwrap();
    assert_eq!(topology["metadata"]["ownerReferences"][0]["uid"], of_node["metadata"]["uid"]);
    let zones = topology["zones"].as_array().unwrap();
    for (node, (zone, cpus)) in zones.iter().zip(NODES).enumerate() {
        assert_eq!((&zone["name"], &zone["type"]), (&json!(format!("node-{node}")), &json!("Node")));
        assert_eq!(named(&zone["costs"], &format!("node-{node}"))["value"], 10);
        assert_eq!(named(&zone["costs"], &format!("node-{}", 1 - node))["value"], 20);
        let of =
            |resource| ["capacity", "allocatable", "available"].map(|which| amount(zone, resource, which));
        // CPU 0 is never exclusive.
        let all = cpus.len() as u64;
        let exclusive = cpus.iter().filter(|cpu| **cpu != 0).count() as u64;
        assert_eq!(of("cpu"), [all, exclusive, exclusive]);
        assert_eq!(of(DEVICE), [2; 3]);
        let hugepages = if node == 1 { HUGEPAGES << 21 } else { 0 };
        assert_eq!(of("hugepages-2Mi"), [hugepages; 3]);
        let [total, allocatable, free] = of("memory");
        assert!(0 < free && free <= allocatable && allocatable <= total, "{zone:#}");
        let observed = |name: &str| -> u64 {
            let value = named(&zone["attributes"], name)["value"].as_str();
            value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name}: {zone:#}"))
        };
        let used = observed("numaward.io/memory-used-bytes");
        // The total includes hugepages, as the kubelet's capacity does.
        let free = observed("numaward.io/memory-free-bytes");
        assert_eq!(used + free + hugepages, total, "{zone:#}");
        assert!(used > 0, "{zone:#}");
    }
    cluster.wait_for("it is shown what CPUs of other nodes allocate", || {
        let topology = self::topology(cluster)?;
        let zones = topology["zones"].as_array().into_iter().flatten();
        let name = "numaward.io/remote-allocation-percent";
        let shares: Vec<_> = zones.map(|zone| named(&zone["attributes"], name)["value"].as_str()).collect();
        let is_share = |share: Option<&str>| {
            share.and_then(|share| share.parse::<u64>().ok()).is_some_and(|share| share <= 100)
        };
        if shares.len() == NODES.len() && shares.into_iter().all(is_share) {
            Ok(())
        } else {
            Err(format!("{topology:#}"))
        }
    });
    cluster.step("a NodeResourceTopology is published");
}

/// A Guaranteed pod is placed on the node of its device.
fn devices_are_followed(cluster: &Cluster) {
    for (name, (_, node)) in ["near-one", "near-zero"].into_iter().zip(DEVICES) {
        cluster.run(&[candidate(name, &[Wants(1, 64, 1)])]);
        let place = cluster.wait_for("a pod has a CPU of its own", || {
            let place = cluster.place(name, "c0")?;
            if place.cpus.len() == 1 { Ok(place) } else { Err(format!("{place:?}")) }
        });
        assert!(place.cpus.iter().all(|cpu| NODES[node].contains(cpu)), "{name}: {place:?}");
        assert!(place.nodes.iter().eq([&(node as u64)]), "{name}: {place:?}");
    }
    cluster.run(&[pod(SHARED, &[container("main", &burstable()), container("helper", &json!({}))])]);
    cluster.step("pods are on the nodes of their devices");
}

/// Returns the PodResources that a client reads from the socket of this reader.
fn read(cluster: &Cluster, reader: Reader, pods: &[&str]) -> Result<Value, String> {
    let tools = env::var_os(GRPC_TOOLS).map(PathBuf::from);
    let tools =
        tools.unwrap_or_else(|| panic!("{GRPC_TOOLS} is not set; run `cargo xtask vm test cluster::`"));
    let output = Command::new("python3")
        .arg("-B")
        .arg(checkout("tests/e2e/cluster/pod_resources.py"))
        .arg(cluster.node.address(reader))
        .args(pods)
        .env("PYTHONPATH", tools)
        .output()
        .map_err(|error| format!("python3: {error}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).map_err(|_| format!("{}: {error}", output.status))
}

/// Returns one field of each container.
fn part<'a>(list: &'a Value, part: &str) -> BTreeMap<&'a str, &'a Value> {
    let list = list.as_object().into_iter().flatten();
    list.map(|(name, of)| (name.as_str(), &of[part])).collect()
}

/// numaward and the kubelet report the same pods, containers and devices, also for pods without resources. CPUs and memory are
/// checked against numaward's placement.
fn is_what_the_kubelet_reports(cluster: &Cluster) {
    for (reader, socket) in [
        (Reader::Numaward, "/run/numaward/pod-resources/kubelet.sock"),
        (Reader::Kubelet, "/var/lib/kubelet/pod-resources/kubelet.sock"),
    ] {
        let port = reader.port();
        cluster
            .node
            .run(&format!("numaward-cri relay {port} {socket} </dev/null >/tmp/relay-{port}.log 2>&1 &"))
            .unwrap();
    }
    let asked = ["near-one", SHARED, "nobody"];
    let ours = cluster.wait_for("numaward reports the pods and devices that the kubelet reports", || {
        let ours = read(cluster, Reader::Numaward, &asked)?;
        let theirs = read(cluster, Reader::Kubelet, &asked)?;
        let is_same = part(&ours["list"], "devices") == part(&theirs["list"], "devices")
            && ours["allocatable"]["devices"] == theirs["allocatable"]["devices"]
            && asked.iter().all(|pod| {
                let [ours, theirs] = [&ours, &theirs].map(|of| &of["get"][pod]);
                part(ours, "devices") == part(theirs, "devices") && ours.is_string() == theirs.is_string()
            });
        if is_same { Ok(ours) } else { Err(format!("{ours:#}\nthe kubelet: {theirs:#}")) }
    });
    let list = &ours["list"];
    for (name, (id, node)) in ["near-one", "near-zero"].into_iter().zip(DEVICES) {
        let of = &list[format!("default/{name}/c0")];
        assert_eq!(of["devices"], json!([[DEVICE, id, [node]]]), "{ours:#}");
        let place = cluster.place(name, "c0").unwrap();
        assert_eq!(of["cpus"], json!(place.cpus), "{ours:#}");
        assert_eq!(of["memory"], json!([["memory", 64_u64 << 20, [node]]]), "{ours:#}");
    }
    for container in ["main", "helper"] {
        let nothing = json!({ "devices": [], "cpus": [], "memory": [] });
        assert_eq!(list[format!("default/{SHARED}/{container}")], nothing, "{ours:#}");
    }
    assert!(list.as_object().unwrap().keys().any(|name| name.starts_with("numaward/numaward-")), "{ours:#}");
    assert_eq!(ours["get"]["near-one"]["default/near-one/c0"], list["default/near-one/c0"]);
    assert_eq!(ours["get"]["nobody"], "NOT_FOUND");
    assert_eq!(ours["allocatable"]["cpus"], json!(numbers("1-5")), "{ours:#}");
    let memory = ours["allocatable"]["memory"].as_array().unwrap();
    for node in 0..NODES.len() {
        assert!(memory.iter().any(|of| of[0] == "memory" && of[2] == json!([node])), "{ours:#}");
    }
    cluster.step("numaward reports the pods and devices that the kubelet reports");
}

/// Returns the scheduler plugin with the published topology.
fn plugin(topology: &Value) -> TopologyMatch {
    let zones = topology["zones"].as_array().into_iter().flatten();
    let id = |of: &Value| -> NodeId {
        let name = of["name"].as_str().and_then(|name| name.strip_prefix("node-"));
        NodeId(name.and_then(|id| id.parse().ok()).unwrap_or_else(|| panic!("{of}")))
    };
    let nodes = zones.map(|zone| {
        let costs = zone["costs"].as_array().into_iter().flatten();
        let distance = |of: &Value| u32::try_from(of["value"].as_u64().unwrap()).unwrap();
        let distances = costs.map(|of| (id(of), distance(of))).collect();
        (id(zone), NumaNode { distances, ..NumaNode::default() })
    });
    let machine = Machine { nodes: nodes.collect(), ..Machine::default() };
    let word = |name: &str| named(&topology["attributes"], name)["value"].as_str().unwrap();
    let policy = PolicyConfig {
        topology_manager_policy: word("topologyManagerPolicy").parse().unwrap(),
        topology_manager_scope: word("topologyManagerScope").parse().unwrap(),
        ..PolicyConfig::default()
    };
    TopologyMatch::new(&machine, &policy, RESOURCES.len()).unwrap()
}

/// The scheduler plugin holds back exactly the pods that numaward refuses.
fn keeps_away_what_is_refused(cluster: &Cluster, topology: &Value) {
    let (plugin, free) = (plugin(topology), available(topology));
    let most = free.chunks(RESOURCES.len()).map(|of| of[1] >> 20).max().unwrap();
    // The candidates fit into the sum of free CPUs, because otherwise the kubelet refuses them, and request devices of one node
    // only, because devices of several nodes are no reason to refuse a pod.
    let candidates: [(&str, &[Wants], bool); 5] = [
        ("pair-and-device", &[Wants(2, 64, 1)], true),
        ("spread", &[Wants(2, 64, 0), Wants(1, 64, 0)], true),
        ("large", &[Wants(1, most - 64, 0)], true),
        ("wide", &[Wants(3, 64, 0)], false),
        ("too-large", &[Wants(1, most + 64, 0)], false),
    ];
    for (name, containers, fits) in candidates {
        let amounts: Vec<_> = containers.iter().map(|wants| wants.amounts()).collect();
        let pod = amounts
            .iter()
            .fold(vec![0; RESOURCES.len()], |sum, of| sum.iter().zip(of).map(|(sum, of)| sum + of).collect());
        let asked = AlignedRequests { init_containers: Vec::new(), containers: amounts, pod };
        assert_eq!(plugin.fits(&free, &asked), fits, "{name}: {topology:#}");
    }
    let (let_through, kept_away): (Vec<_>, Vec<_>) = candidates.into_iter().partition(|(.., fits)| *fits);
    // One at a time: the kubelet counts a pod that cannot start until it is deleted.
    for (name, containers, _) in kept_away {
        cluster.kubectl.apply(&candidate(name, containers));
        wait_until_refused(cluster, name);
        cluster.delete(&[name]);
    }
    cluster.step("what the scheduler keeps away is refused");
    // The available memory changes with other processes.
    let resources = |topology: &Value| -> Vec<Value> {
        let zones = topology["zones"].as_array().into_iter().flatten();
        let resources = zones.flat_map(|zone| zone["resources"].as_array().into_iter().flatten());
        resources.filter(|resource| resource["name"] != "memory").cloned().collect()
    };
    for (name, containers, _) in let_through {
        cluster.run(&[candidate(name, containers)]);
        assert_eq!(cluster.events(name, "NumaPlacementRefused"), Ok(Vec::new()), "{name}");
        cluster.delete(&[name]);
        cluster.wait_for("what is published is as before", || match self::topology(cluster)? {
            now if resources(&now) == resources(topology) => Ok(()),
            now => Err(format!("{now:#}\nbefore: {topology:#}")),
        });
    }
    cluster.step("what the scheduler lets through is placed");
}

fn wait_until_refused(cluster: &Cluster, name: &str) {
    cluster.wait_for(&format!("pod {name} is refused"), || {
        let refused = !cluster.events(name, "NumaPlacementRefused")?.is_empty();
        let status = cluster.pod(name)?["status"].take();
        // The reason in the kubelet's own status.
        let refused = refused || status["reason"] == "TopologyAffinityError";
        if refused && status["phase"] != "Running" { Ok(()) } else { Err(status.to_string()) }
    });
}

/// Counters that both numaward and the kubelet have.
const COUNTERS: [&str; 10] = [
    "kubelet_cpu_manager_pinning_requests_total",
    "kubelet_cpu_manager_pinning_errors_total",
    "kubelet_memory_manager_pinning_requests_total",
    "kubelet_memory_manager_pinning_errors_total",
    "kubelet_topology_manager_admission_errors_total",
    "kubelet_container_aligned_compute_resources_count{boundary=\"physical_cpu\",scope=\"container\"}",
    "kubelet_container_aligned_compute_resources_count{boundary=\"uncore_cache\",scope=\"container\"}",
    "kubelet_container_aligned_compute_resources_failure_count{boundary=\"numa_node\",scope=\"container\"}",
    "kubelet_container_aligned_compute_resources_failure_count{boundary=\"numa_node\",scope=\"pod\"}",
    "kubelet_container_aligned_compute_resources_failure_count{boundary=\"physical_cpu\",scope=\"container\"}",
];
/// Counters of pods and containers, including those without requests.
const REQUESTS: [&str; 2] = [
    "kubelet_topology_manager_admission_requests_total",
    "kubelet_container_aligned_compute_resources_count{boundary=\"numa_node\",scope=\"container\"}",
];
const GAUGES: [&str; 2] =
    ["kubelet_cpu_manager_shared_pool_size_millicores", "kubelet_cpu_manager_exclusive_cpu_allocation_count"];
/// Gauge of CPUs by node.
const BY_NODE: &str = "kubelet_cpu_manager_allocation_per_numa";
const KUBELETS_METRICS: &str = "http://127.0.0.1:10255/metrics";

/// Returns the `kubelet_` series of an address.
fn series(cluster: &Cluster, url: &str) -> Result<BTreeMap<String, f64>, String> {
    let text = cluster.node.run(&format!("wget -q -O - {url} | grep ^kubelet_"))?;
    let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
    Ok(lines.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect())
}

/// Creates pods, one of which is refused and deleted, and returns the increase of each counter.
fn count(cluster: &Cluster, url: &str) -> Map<String, Value> {
    let read = || cluster.wait_for("metrics are served", || series(cluster, url));
    let before = read();
    cluster.kubectl.apply(&candidate("wide", &[Wants(4, 64, 0)]));
    wait_until_refused(cluster, "wide");
    cluster.delete(&["wide"]);
    let main = |cpus| container("main", &guaranteed(cpus, 64));
    let part = |name: &str| {
        let amounts = json!({ "cpu": "500m", "memory": "32Mi" });
        container(name, &json!({ "requests": amounts, "limits": amounts }))
    };
    let mut several = pod("several", &[main(1), part("helper")]);
    let mut init = container("init", &guaranteed(1, 32));
    init["command"] = json!(["sleep", "0"]);
    several["spec"]["initContainers"] = json!([init]);
    let loose = pod("loose", &[container("main", &burstable())]);
    cluster.run(&[pod("whole", &[main(2)]), several, pod("part", &[part("main")]), loose]);
    let after = read();
    let grown = COUNTERS.into_iter().chain(REQUESTS).map(|name| {
        // The kubelet creates a series with labels with its first increment.
        let is_optional = url == KUBELETS_METRICS && name.contains('{');
        let of = |all: &BTreeMap<String, f64>| match all.get(name) {
            Some(value) => *value,
            None if is_optional => 0.0,
            None => panic!("{name}: {all:?}"),
        };
        (name.to_owned(), json!(of(&after) - of(&before)))
    });
    grown.collect()
}

/// numaward counts the same as a kubelet with static policies for the same pods. Beside such a kubelet, it reports the same CPUs.
fn are_counted_as_the_kubelet_counts(cluster: &Cluster) {
    cluster.delete(&["near-one", "near-zero", SHARED]);
    wait_for_free(cluster, [2, 3], [2, 2]);
    let metrics = || {
        let (_, url) = cluster.daemon().unwrap();
        url.replace("/api/v1", "/metrics")
    };
    let mut ours = count(cluster, &metrics());
    let pods = ["whole", "several", "part", "loose"];
    cluster.delete(&pods);
    cluster.step("numaward has counted");
    cluster.kubectl.must(&["delete", "daemonset", "numaward", "--namespace=numaward", "--timeout=30m"]);
    decisions::configure(cluster, "single-numa-node", "container", "5", &json!({}));
    install(cluster, "observe", str::to_owned);
    let mut theirs = count(cluster, KUBELETS_METRICS);
    // numaward does not decide on pods without requests, such as the pod `loose`.
    let [of_us, of_them] =
        [&mut ours, &mut theirs].map(|of| REQUESTS.map(|name| of.remove(name).unwrap().as_f64().unwrap()));
    assert_eq!((of_us, of_them), ([4.0, 5.0], [5.0, 6.0]));
    assert_eq!(ours, theirs);
    cluster.step("the kubelet has counted the same");

    // The kubelet's gauges count a reused CPU of an init container twice, and once after the pod is deleted, until the kubelet
    // restarts.
    cluster.delete(&["several"]);
    cluster.node.run("stop-kubelet && start-kubelet").unwrap();
    let url = metrics();
    cluster.wait_for("numaward shows the CPUs that the kubelet shows", || {
        let (ours, theirs) = (series(cluster, &url)?, series(cluster, KUBELETS_METRICS)?);
        let counted = ours.keys().find(|name| name.contains("_pinning_"));
        assert_eq!(counted, None, "the kubelet's own to count");
        // For a node without exclusive CPUs, one of the two has no series, and the other has zero or a previous value.
        let has_any = |name: &str| name.starts_with(BY_NODE) && ours[name] > 0.0;
        let by_node = ours.keys().map(String::as_str).filter(|name| has_any(name));
        let is_same = |name: &str| ours.get(name).is_some_and(|of| theirs.get(name) == Some(of));
        let mut names = GAUGES.into_iter().chain(by_node);
        if names.all(is_same) && ours[GAUGES[1]] > 0.0 {
            Ok(())
        } else {
            Err(format!("{ours:?}\n{theirs:?}"))
        }
    });
    let node = cluster.kubectl.json(&["get", "node", node::NAME]).unwrap();
    assert!(condition(&node, "Ready"));
    cluster.delete(&["whole", "part", "loose"]);
    cluster.step("numaward shows the CPUs that the kubelet shows");
}
