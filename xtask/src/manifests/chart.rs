//! Comparison of the Helm chart with the overlays: it must make the same objects for the same choices, except for names
//! and labels that Helm adds. Helm itself renders it, through its package for Python.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use numaward_vm::Cache;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{ADMISSION, api_version, list, parse, render};
use crate::command;
use crate::setup::PythonTool;

const CHART: &str = "deploy/helm/numaward";
/// Script in the folder of the tests.
const SCRIPT: &str = "helm.py";
/// Labels of objects that only one of both has.
const OWN_LABELS: [&str; 2] = ["app.kubernetes.io/name", "app.kubernetes.io/part-of"];
/// Labels that Helm adds, also in selectors.
const ADDED_LABELS: [&str; 4] = [
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
];
/// File with the configuration in its `ConfigMap`.
const CONFIG: &str = "config.yaml";

/// Returns values, and the overlays with the same result; none if no overlay has it.
fn choices() -> Vec<(&'static str, Value, &'static [&'static str])> {
    let on = json!({ "enabled": true });
    vec![
        ("as it is", json!({}), &["deploy/overlays/try"]),
        ("enforce", json!({ "mode": "enforce" }), &["deploy/overlays/enforce"]),
        ("observe", json!({ "mode": "observe" }), &["deploy/overlays/observe"]),
        ("migrate", json!({ "mode": "migrate" }), &["deploy/overlays/migrate"]),
        (
            "everything",
            json!({
                "mode": "enforce",
                "checkCapabilities": false,
                "kubeletDirectory": "/var/lib/k0s/kubelet/",
                "evictUnpinned": on,
                "evictRefused": { "enabled": false },
                "guardEvict": on,
                "cpuPower": on,
                "resctrl": on,
                "networkPolicy": on,
                "ownNode": on,
                "nodeResourceTopology": { "enabled": true, "crd": { "create": true } },
                "seccompProfile": { "type": "Localhost", "localhostProfile": "numaward.json" },
                "selinux": on,
                "startupTaint": on,
                "kubeletConfiguration": on,
            }),
            &["tests/deploy/everything"],
        ),
        ("claims", json!({ "mode": "enforce", "dra": on }), &["tests/deploy/claims"]),
        (
            "observe with Prometheus",
            json!({
                "mode": "observe",
                "checkCapabilities": false,
                "kubeletDirectory": "/var/lib/k0s/kubelet",
                "podMonitor": on,
                "prometheusRule": on,
                "dashboards": on,
            }),
            &["tests/deploy/k0s-observe", "deploy/overlays/prometheus-operator"],
        ),
        (
            "OpenShift",
            json!({
                "mode": "enforce",
                "checkCapabilities": false,
                "openshift": on,
                "extraCapabilities": ["SYS_PTRACE"],
            }),
            &[],
        ),
        ("other names", renamed(), &[]),
        (
            "a given account",
            json!({ "mode": "enforce", "serviceAccount": { "create": false, "name": "given" } }),
            &[],
        ),
        (
            "GKE",
            json!({
                "mode": "enforce",
                "checkCapabilities": false,
                "resourceQuota": on,
                "podMonitor": {
                    "enabled": true,
                    "labels": { "release": "a" },
                    "interval": "30s",
                    "tlsConfig": {
                        "ca": { "secret": { "name": "tls", "key": "ca.crt" } },
                        "cert": { "secret": { "name": "prometheus", "key": "tls.crt" } },
                        "keySecret": { "name": "prometheus", "key": "tls.key" },
                        "serverName": "numaward",
                    },
                    "authorization": { "credentials": { "name": "numaward", "key": "token" } },
                },
                "prometheusRule": { "enabled": true, "labels": { "release": "a" } },
                "podLabels": { "a": "b" },
                "podAnnotations": { "a": "b" },
                "imagePullSecrets": [{ "name": "a" }],
                "config": {
                    "listen": "[::]:9560",
                    "listenTls": { "certFile": "/tls/tls.crt", "keyFile": "/tls/tls.key" },
                    "listenTokenFile": "/tls/token",
                    "topologyManagerPolicy": "restricted",
                },
                "extraEnv": [{ "name": "SSL_CERT_FILE", "value": "/tls/ca.crt" }],
                "extraVolumes": [{ "name": "tls", "secret": { "secretName": "tls" } }],
                "extraVolumeMounts": [{ "name": "tls", "mountPath": "/tls", "readOnly": true }],
            }),
            &[],
        ),
    ]
}

/// Returns values with names, labels and settings of pods other than the defaults.
fn renamed() -> Value {
    let on = json!({ "enabled": true });
    json!({
        "mode": "migrate",
        "checkCapabilities": false,
        "global": { "imageRegistry": "registry.example/", "imagePullSecrets": [{ "name": "b" }] },
        "fullnameOverride": "other",
        "nameOverride": "another",
        "commonLabels": { "team": "a" },
        "serviceAccount": { "create": true, "name": "account", "annotations": { "a": "b" } },
        "image": { "digest": format!("sha256:{}", "0".repeat(64)) },
        "minReadySeconds": 5,
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "Default",
        "startupProbe": { "failureThreshold": 300 },
        "extraArgs": ["--config", "/etc/numaward/config.yaml"],
        "initContainers": [{ "name": "a", "image": "a" }],
        "ownNode": on,
        "guardEvict": on,
        "resourceQuota": { "enabled": true, "pods": 7 },
        "serviceMonitor": { "enabled": true, "labels": { "release": "a" }, "interval": "30s" },
    })
}

/// Returns the values in the documentation of Kubernetes, line by line. `--reuse-values` keeps those of the line
/// before.
fn documented_values() -> Vec<Value> {
    let page = include_str!("../../../docs/kubernetes.md");
    let (mut values, mut all) = (json!({}), Vec::new());
    for line in page.lines().filter(|line| line.starts_with("helm ") && line.contains(" --set ")) {
        if !line.contains(" --reuse-values ") {
            values = json!({});
        }
        let sets = line.split(" --set ").skip(1).filter_map(|rest| rest.split(' ').next()?.split_once('='));
        for (keys, value) in sets {
            let place = keys.split('.').fold(&mut values, |place, key| &mut place[key]);
            *place = json!(value);
        }
        all.push(values.clone());
    }
    all
}

/// Returns invalid values.
fn wrong_values() -> Vec<Value> {
    let on = json!({ "enabled": true });
    vec![
        // The cluster has no such API.
        json!({ "podMonitor": on }),
        json!({ "openshift": on }),
        json!({ "checkCapabilities": false, "podMonitor": on, "serviceMonitor": on }),
        json!({ "image": { "digest": "latest" } }),
        json!({ "livenessProbe": { "exec": { "command": ["true"] } } }),
        json!({ "terminationGracePeriodSeconds": 1 }),
        json!({ "startupTaint": { "enabled": true, "key": "numaward.io/not-ready:NoSchedule" } }),
        json!({ "mode": "maybe" }),
        json!({ "modus": "try" }),
        json!({ "podMonitor": { "enabled": "yes" } }),
        json!({ "kubeletDirectory": "kubelet" }),
        json!({ "guardEvict": { "enabled": true }, "config": { "guard": "report" } }),
        json!({ "evictUnpinned": { "enabled": true }, "config": { "kubernetes": { "unpinned": "report" } } }),
        json!({ "config": { "kubernetes": { "refused": "wait" } } }),
        json!({ "evictRefused": { "enabled": false }, "config": { "kubernetes": { "refused": "evict" } } }),
    ]
}

/// Returns upgrades: true if the chart allows it, the installed objects, and the new values. An upgrade is refused if the new daemons could
/// not restore the knobs that the present ones wrote.
fn mode_changes() -> Vec<(bool, Value, Value)> {
    let installed = |read_only: bool, files: Value, ready: u32| {
        let mount = json!({ "name": "cgroup", "mountPath": "/sys/fs/cgroup", "readOnly": read_only });
        let container = json!({ "name": "numaward", "volumeMounts": [mount] });
        let status = json!({
            "observedGeneration": 3,
            "desiredNumberScheduled": 2,
            "updatedNumberScheduled": 2,
            "numberReady": ready,
        });
        json!({
            "set": {
                "metadata": { "generation": 3 },
                "spec": { "template": { "spec": { "containers": [container] } } },
                "status": status,
            },
            "config": { "data": files },
        })
    };
    let (on, off) = ("mode: enforce\n", "enforcement:\n  mode: \"off\"\n");
    let enforcing = || installed(false, json!({ "config.yaml": on }), 2);
    let mode = |mode: &str| json!({ "mode": mode });
    let overruled = json!({ "config.yaml": off, "group.gpu.yaml": "enforcement: {mode: \"on\"}" });
    vec![
        (false, enforcing(), mode("try")),
        (false, enforcing(), mode("observe")),
        (true, enforcing(), mode("enforce")),
        (true, enforcing(), mode("migrate")),
        (true, enforcing(), json!({ "mode": "try", "abandonGuarantees": true })),
        (true, installed(true, json!({ "config.yaml": on }), 2), mode("observe")),
        (true, installed(false, json!({ "config.yaml": off }), 2), mode("try")),
        // Not all daemons have started again.
        (false, installed(false, json!({ "config.yaml": off }), 1), mode("try")),
        (false, installed(false, overruled, 2), mode("try")),
        (true, json!({ "set": {}, "config": {} }), mode("try")),
    ]
}

/// Resources, by the description of their values.
type ChartResources = Vec<(String, Vec<Value>)>;

/// Result of rendering values by Helm.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum RenderResult {
    Text(String),
    Refused(String),
}

/// Renders the chart with all values, and compares. Returns the resources by the description of their values, and the
/// errors.
pub(super) fn check(cache: &Cache) -> Result<(ChartResources, Vec<String>)> {
    let (mut choices, wrong) = (choices(), wrong_values());
    let documented_values = documented_values();
    ensure!(
        !documented_values.is_empty(),
        "docs/kubernetes.md has no line that installs {CHART} with values"
    );
    let none: &[&str] = &[];
    choices
        .extend(documented_values.into_iter().map(|values| ("as docs/kubernetes.md sets it", values, none)));
    let values = choices.iter().map(|(_, values, _)| values).chain(&wrong).collect::<Vec<_>>();
    let changes = mode_changes();
    let items = values.into_iter().map(|values| json!({ "values": values }));
    let items = items.chain(
        changes.iter().map(|(_, installed, values)| json!({ "values": values, "installed": installed })),
    );
    let mut rendered = rendered(cache, &items.collect())?.into_iter();
    let (mut made, mut faults) = (Vec::new(), Vec::new());
    for ((choice, values, overlays), rendered) in choices.iter().zip(rendered.by_ref()) {
        let name = format!("{CHART}, {choice}");
        match rendered {
            RenderResult::Refused(reason) => faults.push(format!("{name}: refused: {reason}")),
            RenderResult::Text(text) => {
                let mut resources = parse(&text).with_context(|| name.clone())?;
                let mut expected = Vec::new();
                for overlay in *overlays {
                    expected.extend(render(cache, overlay)?);
                }
                let differences =
                    if expected.is_empty() { Vec::new() } else { compare(&resources, &expected) };
                faults.extend(differences.into_iter().map(|fault| format!("{name}: {fault}")));
                let others = forbidden(&resources).into_iter().chain(hook_faults(&resources));
                faults.extend(others.map(|fault| format!("{name}: {fault}")));
                if values["serviceAccount"]["create"] == false {
                    if let Some(account) = resources.iter().find(|made| made["kind"] == "ServiceAccount") {
                        faults.push(format!("{name}: makes the account {}", account["metadata"]["name"]));
                    }
                    // It exists already.
                    resources.push(json!({
                        "apiVersion": "v1",
                        "kind": "ServiceAccount",
                        "metadata": { "name": values["serviceAccount"]["name"], "namespace": "numaward" },
                    }));
                }
                made.push((name, resources));
            }
        }
    }
    for (values, rendered) in wrong.iter().zip(rendered.by_ref()) {
        if matches!(rendered, RenderResult::Text(_)) {
            faults.push(format!("{CHART}: takes {values}"));
        }
    }
    for ((is_allowed, installed, values), rendered) in changes.iter().zip(rendered) {
        match rendered {
            RenderResult::Text(_) if *is_allowed => {}
            RenderResult::Refused(reason) if !is_allowed && reason.contains("abandonGuarantees") => {}
            RenderResult::Text(_) => faults.push(format!("{CHART}: {installed} becomes {values}")),
            RenderResult::Refused(reason) => {
                faults.push(format!("{CHART}: {installed} cannot become {values}: {reason}"));
            }
        }
    }
    Ok((made, faults))
}

fn rendered(cache: &Cache, values: &Value) -> Result<Vec<RenderResult>> {
    let root = command::root();
    let mut helm = PythonTool::HELM.script(cache, &root.join("tests/deploy").join(SCRIPT));
    let mut helm = helm
        .arg(CHART)
        .current_dir(root)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // It reports each link.
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot run python3")?;
    helm.stdin.take().context("python3 takes no input")?.write_all(values.to_string().as_bytes())?;
    let output = helm.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{CHART}: Helm does not take it: {said}");
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("{CHART}: cannot read what Helm makes of it"))
}

/// Returns the differences between the resources of the chart and of the overlays.
fn compare(chart: &[Value], overlays: &[Value]) -> Vec<String> {
    let (chart, overlays) = (comparable(chart), comparable(overlays));
    let names: BTreeSet<&String> = chart.keys().chain(overlays.keys()).collect();
    let difference = |name: &&String| match (chart.get(*name), overlays.get(*name)) {
        (Some(chart), Some(overlay)) => difference(chart, overlay, name),
        (Some(_), None) => Some(format!("{name} is not in the overlay")),
        (None, _) => Some(format!("{name} is missing")),
    };
    names.iter().filter_map(difference).collect()
}

/// Returns resources by kind and name, without the parts that may differ.
fn comparable(resources: &[Value]) -> BTreeMap<String, Value> {
    let is_config =
        |resource: &Value| resource["kind"] == "ConfigMap" && resource["data"][CONFIG].is_string();
    let config =
        resources.iter().find(|resource| is_config(resource)).map(|found| &found["metadata"]["name"]);
    // Helm makes no namespace, and kustomize has no hooks.
    let is_compared = |resource: &&Value| resource["kind"] != "Namespace" && !is_hook(resource);
    let resources = resources.iter().filter(is_compared).cloned();
    let named = resources.map(|mut resource| {
        if let Some(Value::Object(labels)) = resource.pointer_mut("/metadata/labels") {
            labels.retain(|label, _| !OWN_LABELS.contains(&label.as_str()));
        }
        // Kustomize gives a namespace to kinds that it does not know; the API server takes it away from those of the cluster.
        if api_version(&resource).starts_with(ADMISSION) && resource["metadata"]["namespace"].is_string() {
            resource["metadata"]["namespace"].take();
        }
        if let Some(Value::Object(annotations)) = resource.pointer_mut("/spec/template/metadata/annotations")
        {
            annotations.remove("checksum/config");
        }
        if is_config(&resource) {
            resource["metadata"]["name"] = CONFIG.into();
            let text = resource["data"][CONFIG].as_str().unwrap_or_default();
            resource["data"][CONFIG] = serde_norway::from_str(text).unwrap_or_default();
        }
        simplify(&mut resource, config);
        let name = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        (format!("{} {}", name(&resource["kind"]), name(&resource["metadata"]["name"])), resource)
    });
    named.collect()
}

/// Returns true for an object that Helm makes for an uninstallation or a test only.
fn is_hook(resource: &Value) -> bool {
    resource["metadata"]["annotations"]["helm.sh/hook"].is_string()
}

/// Returns the faults of the hooks of a chart: the `DaemonSet` that they change, and their rights to change it.
fn hook_faults(resources: &[Value]) -> Vec<String> {
    let find = |kind: &str| {
        let of_kind = |resource: &&Value| resource["kind"] == kind && is_hook(resource);
        resources.iter().find(of_kind)
    };
    let mut faults = Vec::new();
    let Some(set) = resources.iter().find(|resource| resource["kind"] == "DaemonSet") else { return faults };
    let name = &set["metadata"]["name"];
    let labels = &set["spec"]["selector"]["matchLabels"];
    let is_selected = |pod: &Value| {
        let selected = labels.as_object().into_iter().flatten();
        selected.into_iter().all(|(label, value)| pod["metadata"]["labels"][label] == *value)
    };
    let rules = find("Role").map_or(&[][..], |role| list(&role["rules"]));
    let may = |verb: &str| {
        rules.iter().any(|rule| {
            list(&rule["resourceNames"]).contains(name) && list(&rule["verbs"]).contains(&verb.into())
        })
    };
    let account = find("RoleBinding").map(|binding| &binding["subjects"][0]["name"]);
    let pods = [find("Pod"), find("Job").map(|job| &job["spec"]["template"])];
    for pod in pods.into_iter().flatten() {
        if is_selected(pod) {
            faults.push("the DaemonSet selects the pod of a hook".to_owned());
        }
        if Some(&pod["spec"]["serviceAccountName"]) != account {
            faults.push("a hook runs with an account that has no rights".to_owned());
        }
        for container in list(&pod["spec"]["initContainers"]).iter().chain(list(&pod["spec"]["containers"])) {
            let arguments: Vec<&str> = list(&container["args"]).iter().filter_map(Value::as_str).collect();
            let (verb, target) = match arguments[..] {
                ["patch", "daemonset", target, ..] => ("patch", target),
                ["rollout", "status", target, ..] => ("watch", target.trim_start_matches("daemonset/")),
                _ => ("", ""),
            };
            if *name != *target || !may(verb) {
                faults.push(format!("a hook may not {verb:?} the DaemonSet {name}"));
            }
            for patch in arguments.iter().filter_map(|argument| argument.strip_prefix("--patch=")) {
                let patch: Value = serde_json::from_str(patch).unwrap_or_default();
                let changed = &patch["spec"]["template"]["spec"]["containers"][0];
                let target = &set["spec"]["template"]["spec"]["containers"][0]["name"];
                if changed["name"] != *target || changed["env"][0]["value"] != "off" {
                    faults.push(format!("the hook before an uninstall does not switch {target} off"));
                }
            }
        }
    }
    faults
}

/// Removes the labels that Helm adds, and the name of the configuration, which has a hash in one of both; sorts lists
/// of named items.
fn simplify(value: &mut Value, config: Option<&Value>) {
    match value {
        Value::Object(fields) => {
            for (key, field) in fields.iter_mut() {
                match field {
                    Value::Object(labels) if ["labels", "matchLabels"].contains(&key.as_str()) => {
                        labels.retain(|label, _| !ADDED_LABELS.contains(&label.as_str()));
                    }
                    Value::Object(volume) if key == "configMap" && volume.get("name") == config => {
                        volume.remove("name");
                    }
                    _ => simplify(field, config),
                }
            }
            // An empty or a default field equals a missing one.
            fields.retain(|key, field| {
                !(key == "labels" && *field == json!({}) || key == "scheme" && field == "HTTP")
            });
        }
        Value::Array(items) => {
            for item in items.iter_mut() {
                simplify(item, config);
            }
            if items.iter().all(|item| item["name"].is_string()) {
                items.sort_by_key(Value::to_string);
            }
        }
        _ => {}
    }
}

/// Returns the place and the description of the first difference.
fn difference(chart: &Value, overlay: &Value, path: &str) -> Option<String> {
    match (chart, overlay) {
        (Value::Object(of_chart), Value::Object(of_overlay)) => {
            let keys: BTreeSet<&String> = of_chart.keys().chain(of_overlay.keys()).collect();
            keys.into_iter().find_map(|key| difference(&chart[key], &overlay[key], &format!("{path}.{key}")))
        }
        (Value::Array(of_chart), Value::Array(of_overlay)) if of_chart.len() == of_overlay.len() => {
            let mut pairs = of_chart.iter().zip(of_overlay).enumerate();
            pairs
                .find_map(|(index, (chart, overlay))| difference(chart, overlay, &format!("{path}[{index}]")))
        }
        _ => (chart != overlay).then(|| format!("{path} is {chart}, in the overlay {overlay}")),
    }
}

/// Returns the requests of a `DaemonSet` that `OpenShift` does not allow.
fn forbidden(resources: &[Value]) -> Vec<String> {
    let of_kind = |kind: &'static str| resources.iter().find(move |resource| resource["kind"] == kind);
    let (Some(allowed), Some(set)) = (of_kind("SecurityContextConstraints"), of_kind("DaemonSet")) else {
        return Vec::new();
    };
    let pod = &set["spec"]["template"]["spec"];
    let mut faults = Vec::new();
    let mut needs = |what: &str, needed: &[&Value], allowed: &Value| {
        let missing = needed.iter().filter(|needed| !list(allowed).contains(needed));
        faults.extend(missing.map(|missing| format!("OpenShift does not allow the {what} {missing}")));
    };
    for container in list(&pod["containers"]) {
        let added = list(&container["securityContext"]["capabilities"]["add"]).iter();
        needs("capability", &added.collect::<Vec<_>>(), &allowed["allowedCapabilities"]);
    }
    let kinds = list(&pod["volumes"]).iter().filter_map(Value::as_object).flat_map(|volume| volume.keys());
    let kinds: Vec<Value> = kinds.filter(|key| *key != "name").map(|key| json!(key)).collect();
    needs("volume", &kinds.iter().collect::<Vec<_>>(), &allowed["volumes"]);
    let names = &allowed["metadata"]["name"];
    let uses = |rule: &Value| {
        list(&rule["verbs"]).contains(&json!("use")) && list(&rule["resourceNames"]).contains(names)
    };
    let is_used = resources.iter().filter(|resource| resource["kind"] == "ClusterRole");
    if !is_used.flat_map(|role| list(&role["rules"])).any(uses) {
        faults.push("no role lets the daemon use the SecurityContextConstraints".to_owned());
    }
    if pod["hostPID"] == true && allowed["allowHostPID"] != true {
        faults.push("OpenShift does not allow the host's process ids".to_owned());
    }
    faults
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn chart_has_program_version() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(CHART).join("Chart.yaml");
        let chart: Value = serde_norway::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        for field in ["version", "appVersion"] {
            assert_eq!(chart[field], env!("CARGO_PKG_VERSION"), "{field}");
        }
    }

    fn daemon_set(labels: &Value, config: &str, path: &str) -> Value {
        json!({
            "kind": "DaemonSet",
            "metadata": { "name": "a", "labels": labels },
            "spec": {
                "selector": { "matchLabels": labels },
                "volumes": [{ "name": "x", "hostPath": { "path": path } }, { "name": "c", "configMap": { "name": config } }],
            },
        })
    }

    fn config_map(name: &str, text: &str) -> Value {
        json!({ "kind": "ConfigMap", "metadata": { "name": name }, "data": { CONFIG: text } })
    }

    #[test]
    fn ignores_labels_order_and_hash() {
        let plain = json!({ "app.kubernetes.io/name": "a" });
        let helms = json!({ "app.kubernetes.io/name": "a", "app.kubernetes.io/instance": "b" });
        let overlay = [
            daemon_set(&plain, "c-123", "/x"),
            config_map("c-123", "# A comment.\na: 1\n"),
            json!({ "kind": "Namespace" }),
        ];
        let mut chart = [config_map("c", "a: 1\n"), daemon_set(&helms, "c", "/x")];
        chart[1]["spec"]["volumes"].as_array_mut().unwrap().reverse();
        assert_eq!(compare(&chart, &overlay), [""; 0]);

        for (changed, fault) in [
            (
                [config_map("c", "a: 2"), daemon_set(&helms, "c", "/x")],
                "ConfigMap config.yaml.data.config.yaml.a is 2, in the overlay 1",
            ),
            (
                [config_map("c", "a: 1"), daemon_set(&helms, "c", "/y")],
                "DaemonSet a.spec.volumes[1].hostPath.path is \"/y\", in the overlay \"/x\"",
            ),
            ([config_map("c", "a: 1"), config_map("c", "a: 1")], "DaemonSet a is missing"),
        ] {
            assert_eq!(compare(&changed, &overlay), [fault]);
        }
        assert_eq!(compare(&overlay, &chart[..1]), ["DaemonSet a is not in the overlay"]);
    }

    #[test]
    fn finds_requests_openshift_refuses() {
        let mut resources = [
            json!({
                "kind": "SecurityContextConstraints",
                "metadata": { "name": "a" },
                "allowedCapabilities": ["BPF"],
                "volumes": ["hostPath"],
                "allowHostPID": false,
            }),
            json!({ "kind": "DaemonSet", "spec": { "template": { "spec": {
                "hostPID": true,
                "containers": [{ "securityContext": { "capabilities": { "add": ["BPF", "PERFMON"] } } }],
                "volumes": [{ "name": "a", "hostPath": {} }, { "name": "b", "emptyDir": {} }],
            } } } }),
            json!({ "kind": "ClusterRole", "rules": [{ "resourceNames": ["b"], "verbs": ["use"] }] }),
        ];
        let faults = forbidden(&resources);
        assert_eq!(faults.len(), 4, "{faults:?}");
        resources[2] = json!({
            "kind": "ClusterRole",
            "rules": [{ "resourceNames": ["a"], "verbs": ["use"] }],
        });
        resources[0] = json!({
            "kind": "SecurityContextConstraints",
            "metadata": { "name": "a" },
            "allowedCapabilities": ["BPF", "PERFMON"],
            "volumes": ["hostPath", "emptyDir"],
            "allowHostPID": true,
        });
        assert_eq!(forbidden(&resources), [""; 0]);
    }
    #[test]
    fn finds_hooks_without_rights() {
        let hook = |event: &str| json!({ "helm.sh/hook": event });
        let patch =
            r#"--patch={"spec":{"template":{"spec":{"containers":[{"name":"c","env":[{"value":"off"}]}]}}}}"#;
        let mut resources = [
            json!({ "kind": "DaemonSet", "metadata": { "name": "a" }, "spec": {
                "selector": { "matchLabels": { "x": "y" } },
                "template": { "spec": { "containers": [{ "name": "c" }] } },
            } }),
            json!({ "kind": "Role", "metadata": { "annotations": hook("pre-delete,test") },
                "rules": [{ "resourceNames": ["a"], "verbs": ["watch", "patch"] }] }),
            json!({ "kind": "Job", "metadata": { "annotations": hook("pre-delete") }, "spec": { "template": { "spec": {
                "serviceAccountName": "hooks",
                "initContainers": [{ "args": ["patch", "daemonset", "a", patch] }],
                "containers": [{ "args": ["rollout", "status", "daemonset/a"] }],
            } } } }),
            json!({ "kind": "RoleBinding", "metadata": { "annotations": hook("pre-delete,test") },
                "subjects": [{ "name": "hooks" }] }),
        ];
        assert_eq!(hook_faults(&resources), [""; 0]);
        resources[1]["rules"][0]["verbs"] = json!(["watch"]);
        resources[0]["spec"]["template"]["spec"]["containers"][0]["name"] = "d".into();
        resources[2]["spec"]["template"]["metadata"] = json!({ "labels": { "x": "y" } });
        let faults = hook_faults(&resources);
        assert_eq!(faults.len(), 3, "{faults:?}");
    }
}
