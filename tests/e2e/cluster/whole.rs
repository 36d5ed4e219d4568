//! Records the kubelet's decisions about pods with pod-level resources, with the feature gate `PodLevelResourceManagers`, as
//! conformance vectors. The strategy `kubelet` has to repeat the decisions and to write the same state files.
//!
//! The pods are the same under each policy and scope. Each pod tests one rule.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    Cluster, container,
    decisions::{self, COMPARED, NOTE, admit, configure},
    node, pod,
};
use crate::{containerd::nodes, deploy::checkout};

/// Two nodes of four CPUs.
const MACHINE: (&str, &str) = ("4,4", "1536M,1024M");
const POLICIES: [&str; 2] = ["best-effort", "restricted"];
const GATE: &str = "PodLevelResourceManagers";

/// A step of a scenario.
pub(super) enum Step {
    /// Creates a pod.
    Admit(Value),
    /// Deletes a pod.
    Remove(&'static str),
}

/// Returns a container with these requests and limits, or a container without own resources that shares the pod's.
pub(super) fn container_spec(name: &str, amounts: Option<(&str, &str)>) -> Value {
    match amounts {
        Some((cpu, memory)) => json!({ "name": name, "resources": { "cpu": cpu, "memory": memory } }),
        None => json!({ "name": name }),
    }
}

fn sidecar(name: &str, amounts: Option<(&str, &str)>) -> Value {
    let mut sidecar = container_spec(name, amounts);
    sidecar["restart_policy"] = json!("Always");
    sidecar
}

/// Returns a pod in the format of the vectors.
fn whole(name: &str, (cpu, memory): (&str, &str), init: &[Value], containers: &[Value]) -> Value {
    json!({
        "name": name,
        "resources": { "cpu": cpu, "memory": memory },
        "init_containers": init,
        "containers": containers,
    })
}

fn steps() -> Vec<Step> {
    use Step::{Admit, Remove};
    let db = |cpus, memory| container_spec("db", Some((cpus, memory)));
    let log = || container_spec("log", None);
    let one = Some(("1", "32Mi"));
    let mut unequal = container_spec("db", None);
    unequal["requests"] = json!({ "cpu": "1", "memory": "32Mi" });
    unequal["limits"] = json!({ "cpu": "1", "memory": "64Mi" });
    vec![
        Admit(whole("mixed", ("3", "192Mi"), &[], &[db("2", "64Mi"), log()])),
        Admit(whole("no-cpus", ("2", "128Mi"), &[], &[db("2", "64Mi"), log()])),
        Remove("no-cpus"),
        Admit(whole("no-memory", ("3", "128Mi"), &[], &[db("2", "128Mi"), log()])),
        Remove("no-memory"),
        Admit(whole(
            "crew",
            ("3", "160Mi"),
            &[container_spec("first", None), sidecar("proxy", one)],
            &[log()],
        )),
        Remove("mixed"),
        Admit(whole(
            "no-first",
            ("2", "128Mi"),
            &[sidecar("proxy", Some(("2", "64Mi"))), container_spec("first", None)],
            &[log()],
        )),
        Remove("no-first"),
        Admit(whole("part", ("2500m", "128Mi"), &[], &[db("1", "64Mi"), log()])),
        Remove("crew"),
        Admit(whole(
            "apart",
            ("4", "256Mi"),
            &[container_spec("first", one)],
            &[db("2", "64Mi"), container_spec("web", Some(("2", "128Mi")))],
        )),
        Remove("part"),
        Admit(whole("unequal", ("2", "128Mi"), &[], &[unequal, log()])),
    ]
}

/// Returns the resources of a pod or container of a vector in the format of Kubernetes.
fn resources(vector: &Value) -> Value {
    let both = &vector["resources"];
    let amounts = |name: &str| if both.is_null() { vector[name].clone() } else { both.clone() };
    match (amounts("requests"), amounts("limits")) {
        (Value::Null, Value::Null) => json!({}),
        (requests, limits) => json!({ "requests": requests, "limits": limits }),
    }
}

fn manifest(vector: &Value) -> Value {
    let made = |list: &Value| -> Vec<Value> {
        let list = list.as_array().into_iter().flatten().map(|of| {
            let is_init = vector["init_containers"].as_array().is_some_and(|init| init.contains(of));
            let mut made = container(of["name"].as_str().unwrap(), &resources(of));
            match of["restart_policy"].as_str() {
                Some(policy) => made["restartPolicy"] = json!(policy),
                None if is_init => made["command"] = json!(["sleep", "0"]),
                None => {}
            }
            made
        });
        list.collect()
    };
    let mut manifest = pod(vector["name"].as_str().unwrap(), &made(&vector["containers"]));
    manifest["spec"]["initContainers"] = Value::Array(made(&vector["init_containers"]));
    manifest["spec"]["nodeName"] = json!(node::NAME);
    let of_pod = resources(vector);
    if of_pod != json!({}) {
        manifest["spec"]["resources"] = of_pod;
    }
    manifest
}

#[test]
fn repeats_pod_level_decisions() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    let machine = decisions::machine(&cluster);
    let change = json!({ "featureGates": { GATE: true } });
    let (mut scenarios, mut files) = (Vec::new(), Vec::new());
    let folder = checkout("target/kubelet-whole-pods");
    for scope in ["pod", "container"] {
        for policy in POLICIES {
            let terms = Terms { name: "whole-pods", policy, scope, change: &change };
            let note_files = |title: &str| {
                let (cpus, memory) = decisions::files(&cluster).unwrap();
                for (file, content) in [("cpu_manager_state", cpus), ("memory_manager_state", memory)] {
                    let name = format!("{policy}-{scope}-{title}");
                    files.push(json!({ "name": name, "file": file, "content": content }));
                }
            };
            scenarios.push(record(&cluster, &machine, &terms, steps(), note_files));
            decisions::write(&folder, "kubelet-1.36-whole-pods.json", &scenarios);
            decisions::write(&folder, "kubelet-1.36-state-files.json", &files);
            cluster.step(&format!("recorded: {policy}, {scope}"));
        }
    }
    decisions::replay(&folder);
    cluster.step("repeated");
}

/// Configuration of a kubelet.
pub(super) struct Terms<'a> {
    /// First part of the scenario's name.
    pub(super) name: &'a str,
    pub(super) policy: &'a str,
    pub(super) scope: &'a str,
    /// Changed fields of the configuration.
    pub(super) change: &'a Value,
}

/// Starts the kubelet with this configuration and without state files, creates and deletes pods, and returns the scenario. Calls
/// `note_files` before the first step and after each admitted pod.
pub(super) fn record(
    cluster: &Cluster,
    machine: &Value,
    terms: &Terms<'_>,
    planned: Vec<Step>,
    mut note_files: impl FnMut(&str),
) -> Value {
    let Terms { name: title, policy, scope, change } = *terms;
    configure(cluster, policy, scope, "7", change);
    note_files("empty");
    let initial = decisions::state(cluster).unwrap();
    let mut names = BTreeMap::new();
    let mut steps = Vec::new();
    let mut running: Vec<String> = Vec::new();
    for step in planned {
        match step {
            Step::Remove(name) if !running.iter().any(|of| of == name) => {}
            Step::Remove(name) => {
                running.retain(|of| of != name);
                cluster.delete(&[name]);
                steps.push(json!({ "op": "remove", "pod_name": name, "expect": {} }));
            }
            Step::Admit(vector) => {
                let name = vector["name"].as_str().unwrap().to_owned();
                let (expect, is_admitted) = admit(cluster, &name, &manifest(&vector), &mut names);
                cluster.step(&format!("{title}, {policy}, {scope}, {name}: {}", expect["message"]));
                steps.push(json!({ "op": "admit", "pod": vector, "expect": expect }));
                if is_admitted {
                    note_files(&name);
                    running.push(name);
                } else {
                    cluster.delete(&[&name]);
                }
            }
        }
    }
    if !running.is_empty() {
        cluster.delete(&running.iter().map(String::as_str).collect::<Vec<_>>());
    }
    json!({
        "name": format!("{title}-{policy}-{scope}"),
        "source": "kubelet v1.36.2",
        "note": NOTE,
        "compared": COMPARED,
        "machine": machine,
        "config": decisions::config(policy, scope, change),
        "initial": { "machine_state": initial.1["machineState"], "default_cpuset": initial.0["defaultCpuSet"] },
        "steps": steps,
    })
}
