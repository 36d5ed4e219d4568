//! Records the decisions of the real kubelet as conformance vectors: under each topology policy and scope, pods are created and
//! deleted, and each decision is recorded with the state files. The strategy `kubelet` has to repeat the decisions.
//!
//! numaward does not run here. Pods name their node, because the scheduler would hold back pods that the kubelet refuses.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path, process::Command};

use serde_json::{Value, json};

use super::{Cluster, ROLLOUT, condition, container, node, pod};
use crate::{containerd::nodes, deploy::checkout};

/// CPUs and memory of the nodes. Node 0 has additional memory for the system.
const MACHINE: (&str, &str) = ("2,2,2,2", "1536M,512M,512M,640M");
const NODES: usize = 4;
/// The field `note` of the vectors from a cluster.
pub(super) const NOTE: &str =
    "a real cluster; state is recorded after admissions only: a timer of the kubelet removes what is stale";
/// Fields that are recorded and compared for each decision.
pub(super) const COMPARED: [&str; 6] =
    ["admitted", "reason", "message", "state", "machine_state", "default_cpuset"];
const RESERVED_CPUS: &str = "0";
/// Reserved memory on node 0, in MiB: the sum of `kubeReserved` and `evictionHard`.
const RESERVED_MIB: u64 = 192 + EVICTION_MIB;
const EVICTION_MIB: u64 = 64;
const POLICIES: [&str; 4] = ["none", "best-effort", "restricted", "single-numa-node"];
const SCOPES: [&str; 2] = ["container", "pod"];
/// Number of pods that are created under each policy and scope.
const PODS: u32 = 12;
/// Sum of CPUs of all pods. A larger sum would be refused before the managers decide.
const MAX_CPUS: u32 = 7;
const MAX_MIB: u32 = 2600;

/// A deterministic random number generator (Marsaglia's xorshift).
struct Numbers(u32);

impl Numbers {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 % end
    }
}

/// Resources of a container: CPUs in thousandths, and memory in MiB.
#[derive(Clone, Copy)]
struct Wants {
    millis: u32,
    mib: u32,
}

impl Wants {
    fn resources(self) -> Value {
        let cpu = if self.millis.is_multiple_of(1000) {
            (self.millis / 1000).to_string()
        } else {
            format!("{}m", self.millis)
        };
        json!({ "cpu": cpu, "memory": format!("{}Mi", self.mib) })
    }
}

/// A pod that can be created.
struct Candidate {
    name: String,
    init: Option<Wants>,
    sidecar: Option<Wants>,
    containers: Vec<Wants>,
}

impl Candidate {
    fn any(name: String, numbers: &mut Numbers) -> Self {
        let mut wants = |most: u32| Wants {
            millis: if numbers.below(6) == 0 { 500 } else { 1000 * (1 + numbers.below(most)) },
            mib: 32 * (1 + numbers.below(10)),
        };
        let containers = if name.ends_with(['3', '7']) { vec![wants(2), wants(1)] } else { vec![wants(3)] };
        let init = name.ends_with(['4', '7']).then(|| wants(2));
        let sidecar = name.ends_with('5').then(|| wants(1));
        Self { name, init, sidecar, containers }
    }

    /// Returns the pod's effective request, as the scheduler computes it: CPUs in thousandths, and MiB.
    fn sum(&self) -> (u32, u32) {
        let add = |of: fn(&Wants) -> u32| {
            let together: u32 = self.containers.iter().map(of).sum();
            together.max(self.init.as_ref().map_or(0, of)) + self.sidecar.as_ref().map_or(0, of)
        };
        (add(|of| of.millis), add(|of| of.mib))
    }

    /// Returns the pod in the format of the vectors.
    fn vector(&self) -> Value {
        let entry = |name: String, of: Wants, policy: Option<&str>| {
            let mut entry = json!({ "name": name, "resources": of.resources() });
            if let Some(policy) = policy {
                entry["restart_policy"] = json!(policy);
            }
            entry
        };
        let containers = self.containers.iter().enumerate();
        let containers: Vec<_> =
            containers.map(|(index, of)| entry(format!("c{index}"), *of, None)).collect();
        let sidecar = self.sidecar.map(|of| entry("sidecar".to_owned(), of, Some("Always")));
        let init = self.init.map(|of| entry("init".to_owned(), of, None));
        let before: Vec<_> = sidecar.into_iter().chain(init).collect();
        json!({ "name": self.name, "init_containers": before, "containers": containers })
    }

    fn manifest(&self) -> Value {
        let vector = self.vector();
        let made = |list: &Value| -> Vec<Value> {
            let made = list.as_array().into_iter().flatten().map(|of| {
                let amounts = json!({ "requests": of["resources"], "limits": of["resources"] });
                let mut made = container(of["name"].as_str().unwrap(), &amounts);
                match of["restart_policy"].as_str() {
                    Some(policy) => made["restartPolicy"] = json!(policy),
                    None if of["name"] == "init" => made["command"] = json!(["sleep", "0"]),
                    None => {}
                }
                made
            });
            made.collect()
        };
        let mut manifest = pod(&self.name, &made(&vector["containers"]));
        manifest["spec"]["initContainers"] = Value::Array(made(&vector["init_containers"]));
        manifest["spec"]["nodeName"] = json!(node::NAME);
        manifest
    }
}

#[test]
fn repeats_kubelet_decisions() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    let machine = machine(&cluster);
    let mut scenarios = Vec::new();
    for (index, (policy, scope)) in
        POLICIES.iter().flat_map(|policy| SCOPES.map(|scope| (*policy, scope))).enumerate()
    {
        let seed = 2_463_534_242 + u32::try_from(index).unwrap();
        scenarios.push(record(&cluster, &machine, policy, scope, Numbers(seed)));
        cluster.step(&format!("recorded: {policy}, {scope}"));
    }
    are_observed(&cluster);
    let folder = checkout("target/kubelet-decisions");
    write(&folder, "kubelet-1.36.json", &scenarios);
    replay(&folder);
    cluster.step("repeated");
}

/// Writes vectors, one per line.
pub(super) fn write(folder: &Path, name: &str, vectors: &[Value]) {
    fs::create_dir_all(folder).unwrap();
    let mut text = "[\n".to_owned();
    for (index, vector) in vectors.iter().enumerate() {
        let end = if index + 1 < vectors.len() { "," } else { "" };
        writeln!(text, "{vector}{end}").unwrap();
    }
    fs::write(folder.join(name), text + "]\n").unwrap();
}

/// `deploy/overlays/observe` beside this kubelet reports the kubelet's guarantees.
fn are_observed(cluster: &Cluster) {
    cluster.kubectl.must(&[
        "apply",
        "--kustomize",
        &checkout("deploy/overlays/observe").display().to_string(),
    ]);
    cluster.wait_for("numaward runs", || cluster.daemon());
    cluster.kubectl.must(&ROLLOUT);
    let mut names = BTreeMap::new();
    let one = |millis, mib| vec![Wants { millis, mib }];
    for (name, containers) in [("seen", one(2000, 64)), ("part", one(500, 32))] {
        let candidate = Candidate { name: name.to_owned(), init: None, sidecar: None, containers };
        assert!(admit(cluster, name, &candidate.manifest(), &mut names).1, "{name}");
    }
    let guaranteed = as_vector(&state(cluster).unwrap(), &names);
    let (_, url) = cluster.daemon().unwrap();
    for name in ["seen", "part"] {
        let cpus = guaranteed["cpu"]["entries"][name]["c0"].as_str().unwrap_or_default();
        let nodes: Vec<_> =
            guaranteed["memory"]["entries"][name]["c0"][0][1].as_array().unwrap().iter().collect();
        let nodes = nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        cluster.wait_for("the kubelet's guarantees are shown", || {
            let shown = cluster.ask(&url, "allocations")?;
            let full_name = format!("default/{name}/c0");
            let mut all = shown["allocations"].as_array().into_iter().flatten();
            match all.find(|of| of["name"] == full_name.as_str()) {
                Some(of) if of["cpus"] == cpus && of["nodes"] == nodes.as_str() && of["cgroup"] != "" => {
                    Ok(())
                }
                _ => Err(format!("{full_name} has CPUs {cpus:?} and nodes {nodes:?}: {shown}")),
            }
        });
    }
    cluster.step("numaward shows the kubelet's guarantees");
    is_seen_where_it_is_broken(cluster, &guaranteed);
}

/// A container is moved to a node outside its guarantee and allocates memory there: numaward counts the misses, and writes no
/// knob.
fn is_seen_where_it_is_broken(cluster: &Cluster, guaranteed: &Value) {
    let nodes = guaranteed["memory"]["entries"]["seen"]["c0"][0][1].as_array().unwrap();
    let other = (0..NODES).find(|node| !nodes.contains(&json!(node))).unwrap();
    cluster.in_cgroup("seen", "c0", &format!("echo {other} >cpuset.mems")).unwrap();
    let before = cluster.knobs().unwrap();
    cluster.in_cgroup("seen", "c0", "numaward-load --size 16M --hold 0 --cgroup $cgroup").unwrap();
    let (_, url) = cluster.daemon().unwrap();
    let url = url.replace("/api/v1", "/metrics");
    let name = "numaward_numa_miss_bytes_total";
    let labels = format!("namespace=\"default\",pod=\"seen\",container=\"c0\",numa_node=\"{other}\"");
    let series = format!("{name}{{{labels}}} ");
    cluster.wait_for("a broken guarantee is counted", || {
        let all = cluster.node.run(&format!("wget -q -O - {url} | grep ^{name}"))?;
        let missed = all.lines().find_map(|line| line.strip_prefix(&series)?.parse::<u64>().ok());
        if missed.is_some_and(|bytes| bytes >= 16 << 20) { Ok(()) } else { Err(all) }
    });
    assert_eq!(cluster.knobs().unwrap(), before, "numaward was to write nothing");
    cluster.step("numaward shows a broken guarantee");
}

/// Asserts that `cargo xtask conformance DIR` repeats the recorded decisions.
pub(super) fn replay(folder: &Path) {
    let mut command = Command::new(env!("CARGO"));
    command.args(["xtask", "conformance"]).arg(folder).current_dir(checkout(""));
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(output.status.success(), "{}{}", text[0], text[1]);
}

/// Returns the machine in the format of the vectors.
pub(super) fn machine(cluster: &Cluster) -> Value {
    let lines = cluster.node.run(
        "cd /sys/devices/system
        for node in node/node[0-9]*; do
            echo node ${node#node/node} $(awk '/MemTotal/ { print $4 }' $node/meminfo) $(cat $node/distance)
            echo pages ${node#node/node} $(ls $node/hugepages | sed 's/[^0-9]//g')
        done
        for cpu in $(ls -d cpu/cpu[0-9]* | sort -V); do
            echo cpu ${cpu#cpu/cpu} $(echo $cpu/node* | sed 's/.*node//') $(cat $cpu/topology/core_id) \
                $(cat $cpu/topology/physical_package_id) $(cat $cpu/cache/index3/id 2>/dev/null)
        done",
    );
    let lines = lines.unwrap();
    let mut nodes: BTreeMap<u64, Value> = BTreeMap::new();
    // The kubelet uses the cache of a core's first CPU; the emulator reports a separate cache for each sibling.
    let mut caches = BTreeMap::new();
    for line in lines.lines() {
        let (kind, rest) = line.split_once(' ').unwrap();
        let values: Vec<u64> = rest.split(' ').map(|value| value.parse().unwrap()).collect();
        match (kind, values.as_slice()) {
            ("node", [id, kibibytes, distances @ ..]) => {
                let node = json!({
                    "id": id,
                    "memory_bytes": kibibytes << 10,
                    "hugepages": {},
                    "distances": distances,
                    "cpus": [],
                });
                nodes.insert(*id, node);
            }
            // No hugepages are reserved.
            ("pages", [node, sizes @ ..]) => {
                let name = |size: &u64| if *size == 2048 { "2Mi" } else { "1Gi" }.to_owned();
                let pools = sizes.iter().map(|size| (name(size), json!(0)));
                nodes.get_mut(node).unwrap()["hugepages"] = Value::Object(pools.collect());
            }
            ("cpu", [cpu, node, core, socket, cache @ ..]) => {
                let cpus = nodes.get_mut(node).unwrap()["cpus"].as_array_mut().unwrap();
                let core = socket * 1000 + core;
                let cache = *caches.entry(core).or_insert(cache.first().copied());
                cpus.push(json!([cpu, core, socket, cache]));
            }
            _ => panic!("{line}"),
        }
    }
    json!({ "nodes": nodes.into_values().collect::<Vec<_>>() })
}

/// Starts the kubelet under a policy without state files, creates and deletes pods, and returns the scenario.
fn record(cluster: &Cluster, machine: &Value, policy: &str, scope: &str, mut numbers: Numbers) -> Value {
    configure(cluster, policy, scope, "7", &json!({}));
    let files = state(cluster).unwrap();
    let mut names = BTreeMap::new();
    let mut steps = Vec::new();
    let mut running: Vec<Candidate> = Vec::new();
    for number in 0..PODS {
        let candidate = Candidate::any(format!("p{number}"), &mut numbers);
        let (millis, mib) = candidate.sum();
        while !fits(&running, millis, mib) {
            let oldest = running.remove(0);
            cluster.delete(&[&oldest.name]);
            steps.push(json!({ "op": "remove", "pod_name": oldest.name, "expect": {} }));
        }
        let (expect, is_admitted) = admit(cluster, &candidate.name, &candidate.manifest(), &mut names);
        steps.push(json!({ "op": "admit", "pod": candidate.vector(), "expect": expect }));
        if is_admitted {
            running.push(candidate);
        } else {
            cluster.delete(&[&candidate.name]);
        }
    }
    let left: Vec<&str> = running.iter().map(|of| of.name.as_str()).collect();
    if !left.is_empty() {
        cluster.delete(&left);
    }
    json!({
        "name": format!("{policy}-{scope}"),
        "source": "kubelet v1.36.2",
        "note": NOTE,
        "compared": COMPARED,
        "machine": machine,
        "config": config(policy, scope, &Value::Null),
        "initial": { "machine_state": files.1["machineState"], "default_cpuset": files.0["defaultCpuSet"] },
        "steps": steps,
    })
}

/// Returns the kubelet's configuration with these changes, in the format of the vectors.
pub(super) fn config(policy: &str, scope: &str, change: &Value) -> Value {
    let mut config = json!({
        "kubelet_version": "1.36",
        "memory_manager_policy": "Static",
        "reserved_memory": [{ "node": 0, "limits": { "memory": RESERVED_MIB << 20 } }],
        "cpu_manager_policy": "static",
        "cpu_manager_policy_options": {},
        "reserved_cpus": RESERVED_CPUS,
        "topology_manager_policy": policy,
        "topology_manager_scope": scope,
        "topology_manager_policy_options": {},
    });
    for (field, name) in [
        ("cpuManagerPolicyOptions", "cpu_manager_policy_options"),
        ("topologyManagerPolicyOptions", "topology_manager_policy_options"),
        ("featureGates", "feature_gates"),
    ] {
        if let Some(value) = change.get(field) {
            config[name] = value.clone();
        }
    }
    config
}

/// Returns true if the node has capacity for this request in addition to these pods.
fn fits(running: &[Candidate], millis: u32, mib: u32) -> bool {
    let used = running.iter().map(Candidate::sum);
    let used = used.fold((millis, mib), |sum, of| (sum.0 + of.0, sum.1 + of.1));
    used.0 <= 1000 * MAX_CPUS && used.1 <= MAX_MIB
}

/// Restarts the kubelet without state files under a policy, with this number of CPUs for pods, and with these changes of its
/// configuration.
pub(super) fn configure(cluster: &Cluster, policy: &str, scope: &str, cpus: &str, change: &Value) {
    let mut fields = json!({
        "cpuManagerPolicy": "static",
        "memoryManagerPolicy": "Static",
        "topologyManagerPolicy": policy,
        "topologyManagerScope": scope,
        "reservedSystemCPUs": RESERVED_CPUS,
        "kubeReserved": { "memory": format!("{}Mi", RESERVED_MIB - EVICTION_MIB) },
        "reservedMemory": [{ "numaNode": 0, "limits": { "memory": format!("{RESERVED_MIB}Mi") } }],
        // Serves the metrics.
        "readOnlyPort": 10255,
    });
    for (field, value) in change.as_object().into_iter().flatten() {
        fields[field] = value.clone();
    }
    let config = node::kubelet_configuration(&fields);
    let script = format!(
        "stop-kubelet
        rm -f /var/lib/kubelet/cpu_manager_state /var/lib/kubelet/memory_manager_state
        cat >/var/lib/kubelet/config.yaml <<'END'\n{config}\nEND
        start-kubelet"
    );
    cluster.node.run(&script).unwrap();
    cluster.wait_for("the kubelet has made its state files", || state(cluster));
    cluster.wait_for("the node has what its managers leave", || {
        let node = cluster.kubectl.json(&["get", "node", node::NAME])?;
        match &node["status"]["allocatable"]["cpu"] {
            cpu if cpu == cpus && condition(&node, "Ready") => Ok(()),
            _ => Err(node["status"].to_string()),
        }
    });
}

/// Returns the parsed state files of the CPU manager and the memory manager.
pub(super) fn state(cluster: &Cluster) -> Result<(Value, Value), String> {
    let (cpus, memory) = &files(cluster)?;
    let read = |text: &str| serde_json::from_str::<Value>(text).map_err(|error| format!("{error}: {text}"));
    let (cpus, memory) = (read(cpus)?, read(memory)?);
    if cpus["policyName"] != "static" || memory["policyName"] != "Static" {
        return Err(format!("{cpus}\n{memory}"));
    }
    Ok((cpus, memory))
}

/// Returns the unparsed state files.
pub(super) fn files(cluster: &Cluster) -> Result<(String, String), String> {
    let text = cluster
        .node
        .run("cd /var/lib/kubelet && cat cpu_manager_state && echo && cat memory_manager_state")?;
    let (cpus, memory) = text.split_once('\n').ok_or_else(|| format!("two files are missing: {text}"))?;
    Ok((cpus.to_owned(), memory.to_owned()))
}

/// Creates a pod and waits for the kubelet's decision. Returns the decision as a vector, and true if the pod was admitted.
pub(super) fn admit(
    cluster: &Cluster,
    name: &str,
    manifest: &Value,
    names: &mut BTreeMap<String, String>,
) -> (Value, bool) {
    cluster.kubectl.apply(manifest);
    let status = cluster.wait_for("the kubelet decides about a pod", || {
        let found = cluster.pod(name)?;
        if condition(&found, "Ready") || found["status"]["phase"] == "Failed" {
            return Ok(found);
        }
        Err(found["status"].to_string())
    });
    let uid = status["metadata"]["uid"].as_str().unwrap().to_owned();
    names.insert(uid, name.to_owned());
    let status = &status["status"];
    if status["phase"] != "Failed" {
        return (json!({ "admitted": true, "state": as_vector(&state(cluster).unwrap(), names) }), true);
    }
    let message = status["message"].as_str().unwrap_or_default();
    let message = message.strip_prefix("Pod was rejected: ").unwrap_or(message);
    (json!({ "admitted": false, "reason": status["reason"], "message": message }), false)
}

/// Returns the state files in the format of the vectors, with the names of pods in place of their UIDs.
fn as_vector((cpus, memory): &(Value, Value), names: &BTreeMap<String, String>) -> Value {
    let by_pod = |entries: &Value, value: &dyn Fn(&Value) -> Value| -> Value {
        let entries = entries.as_object().into_iter().flatten();
        let entries = entries.map(|(uid, containers)| {
            let name = names.get(uid).unwrap_or(uid).clone();
            let containers = containers.as_object().into_iter().flatten();
            (name, Value::Object(containers.map(|(name, of)| (name.clone(), value(of))).collect()))
        });
        Value::Object(entries.collect())
    };
    let blocks = |list: &Value| {
        let list = list.as_array().into_iter().flatten();
        let mut blocks: Vec<Value> =
            list.map(|block| json!([block["type"], block["numaAffinity"], block["size"]])).collect();
        blocks.sort_by_key(Value::to_string);
        Value::Array(blocks)
    };
    let nodes = memory["machineState"].as_object().into_iter().flatten().map(|(node, state)| {
        let of_kinds = |member: &str| -> Value {
            let kinds = state["memoryMap"].as_object().into_iter().flatten();
            Value::Object(kinds.map(|(kind, of)| (kind.clone(), of[member].clone())).collect())
        };
        let state = json!({
            "n": state["numberOfAssignments"],
            "cells": state["cells"],
            "free": of_kinds("free"),
            "reserved": of_kinds("reserved"),
        });
        (node.clone(), state)
    });
    let mut state = json!({
        "memory": { "numa": Value::Object(nodes.collect()), "entries": by_pod(&memory["entries"], &blocks) },
        "cpu": { "default": cpus["defaultCpuSet"], "entries": by_pod(&cpus["entries"], &Value::clone) },
    });
    // Pod-level resources.
    let of_uid = |uid: &String| names.get(uid).unwrap_or(uid).clone();
    if let Some(pods) = memory["podEntries"].as_object() {
        let pods = pods.iter().map(|(uid, of)| (of_uid(uid), blocks(&of["memoryBlocks"])));
        state["memory"]["pods"] = Value::Object(pods.collect());
    }
    if let Some(pods) = cpus["podEntries"].as_object() {
        let pods = pods.iter().map(|(uid, of)| (of_uid(uid), of["cpuSet"].clone()));
        state["cpu"]["pods"] = Value::Object(pods.collect());
    }
    state
}
