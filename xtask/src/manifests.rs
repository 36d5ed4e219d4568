//! `cargo xtask test manifests`: checks that Kubernetes and the Prometheus operator accept the files in `deploy/`.
//!
//! kustomize renders each overlay. The result is validated against the schemas of the oldest and the newest supported
//! Kubernetes, which must know all fields, and every reference must have a target. The configurations in them are
//! tested by the daemon. Admission policies are evaluated for requests of daemons.
//!
//! The chart for Helm is compared with the overlays ([`chart`]), the list of system calls with the unit for systemd,
//! and the unit with the exposure that systemd computes ([`hardening`]).
//!
//! The rules for the Prometheus operator are those of `dashboards/prometheus` in an envelope; `cargo xtask dashboards`
//! generates it.

mod chart;
mod hardening;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use numaward_vm::Cache;
use serde::Deserialize as _;
use serde_json::Value;

use crate::setup::{DebianTool, PythonTool};
use crate::{command, dashboards};

/// Rendered overlays. The last three exist for this test only.
const OVERLAYS: [&str; 8] = [
    "deploy/overlays/observe",
    "deploy/overlays/enforce",
    "deploy/overlays/try",
    "deploy/overlays/migrate",
    "deploy/overlays/prometheus-operator",
    "tests/deploy/claims",
    "tests/deploy/everything",
    "tests/deploy/k0s-observe",
];
/// The oldest and the newest supported version of Kubernetes.
const KUBERNETES: [&str; 2] = ["1.26", "1.37"];
/// The API group of admission policies, which are newer than the oldest Kubernetes.
const ADMISSION: &str = "admissionregistration.k8s.io/";
/// The API group of the Prometheus operator.
const MONITORING: &str = "monitoring.coreos.com/";
/// The API group of `OpenShift`, for which there are no schemas here.
const OPENSHIFT: &str = "security.openshift.io/";
/// The default path of the control socket.
const CONTROL_SOCKET: &str = "/run/numaward/control.sock";
const RULES: &str = "dashboards/prometheus/rules.yaml";
/// Address of the runbooks in Kubernetes, where an instance is the name of a node: any daemon after `kubectl
/// port-forward`. The chart has the same.
const RUNBOOKS: &str = "http://localhost:9560/runbooks";
pub(crate) const OPERATOR_RULES: &str = "deploy/overlays/prometheus-operator/prometheusrule.yaml";

/// Renders and checks every overlay, and the chart.
pub(crate) fn check() -> Result<()> {
    let cache = Cache::locate()?;
    let tests = command::root().join("tests/deploy");
    command::run(&mut command::npm_ci(&tests))?;
    let (mut made, mut faults) = chart::check(&cache)?;
    faults.extend(hardening::check()?);
    for overlay in OVERLAYS {
        made.push((overlay.to_owned(), render(&cache, overlay)?));
    }
    for (name, resources) in made {
        println!("{name}: {} resources, against Kubernetes {}", resources.len(), KUBERNETES.join(" and "));
        faults.extend(dangling(&resources).into_iter().map(|fault| format!("{name}: {fault}")));
        let of = |group: &'static str| move |resource: &&Value| api_version(resource).starts_with(group);
        let monitoring: Vec<_> = resources.iter().filter(of(MONITORING)).collect();
        let is_known = |resource: &&Value| !of(MONITORING)(resource) && !of(OPENSHIFT)(resource);
        let (newer, others): (Vec<_>, Vec<_>) = resources.iter().filter(is_known).partition(of(ADMISSION));
        validate(&cache, &KUBERNETES, &others).with_context(|| name.clone())?;
        if !newer.is_empty() {
            validate(&cache, &KUBERNETES[1..], &newer).with_context(|| name.clone())?;
            judge(&tests, "admission.mjs", &resources).with_context(|| name.clone())?;
        }
        if !monitoring.is_empty() {
            judge(&tests, "monitoring.mjs", &monitoring).with_context(|| name.clone())?;
        }
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n  "));
    }
    let mut node = Command::new("node");
    node.arg("dashboards.mjs").args(dashboards::files(command::root())?).current_dir(&tests);
    command::run(&mut node).context("Grafana would not take a dashboard as it is meant: see above")
}

/// Returns the resources of an overlay, a folder of the checkout.
pub(crate) fn render(cache: &Cache, overlay: &str) -> Result<Vec<Value>> {
    let mut build = DebianTool::KUSTOMIZE.command(cache, "kustomize");
    let text = command::read(build.arg("build").arg(overlay).current_dir(command::root()))?;
    parse(&text).with_context(|| format!("cannot read what kustomize makes of {overlay}"))
}

fn parse(text: &str) -> Result<Vec<Value>> {
    let documents = serde_norway::Deserializer::from_str(text).map(Value::deserialize);
    let mut resources = documents.collect::<Result<Vec<_>, _>>()?;
    resources.retain(|resource| !resource.is_null());
    anyhow::ensure!(!resources.is_empty(), "there is nothing in it");
    Ok(resources)
}

fn api_version(resource: &Value) -> &str {
    resource["apiVersion"].as_str().unwrap_or_default()
}

fn validate(cache: &Cache, versions: &[&str], resources: &[&Value]) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("numaward-manifests-").tempdir()?;
    let mut validate = PythonTool::KUBERNETES_VALIDATE.command(cache);
    validate.args(["--strict", "--quiet"]);
    for version in versions {
        validate.args(["-k", version]);
    }
    for resource in resources {
        let name = format!(
            "{}-{}.json",
            resource["kind"].as_str().context("a resource without a kind")?,
            resource["metadata"]["name"].as_str().context("a resource without a name")?
        );
        let path = folder.path().join(name);
        fs::write(&path, resource.to_string())?;
        validate.arg(path);
    }
    command::run(&mut validate)
}

/// Passes resources to a script in `tests/deploy`.
fn judge(tests: &Path, script: &str, resources: &impl serde::Serialize) -> Result<()> {
    let mut node = Command::new("node")
        .arg(script)
        .current_dir(tests)
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot run node")?;
    let input = serde_json::to_vec(resources)?;
    node.stdin.take().context("node takes no input")?.write_all(&input)?;
    anyhow::ensure!(node.wait()?.success(), "{script} has found faults: see above");
    Ok(())
}

/// Returns references without a target or with another version, and unnecessary requests.
fn dangling(resources: &[Value]) -> Vec<String> {
    let mut faults = admission_faults(resources);
    faults.extend(resources.iter().filter_map(socket_fault));
    faults.extend(resources.iter().flat_map(mount_faults));
    let named = |kind: &str| -> BTreeSet<&str> {
        let of_kind = resources.iter().filter(|resource| resource["kind"] == kind);
        of_kind.filter_map(|resource| resource["metadata"]["name"].as_str()).collect()
    };
    for set in resources.iter().filter(|resource| resource["kind"] == "DaemonSet") {
        let pod = &set["spec"]["template"]["spec"];
        let mut refer = |what: &str, name: &Value, known: &BTreeSet<&str>| {
            if !name.as_str().is_some_and(|name| known.contains(name)) {
                faults.push(format!("{what} {name} is not there"));
            }
        };
        refer("service account", &pod["serviceAccountName"], &named("ServiceAccount"));
        let volumes = list(&pod["volumes"]);
        for volume in volumes.iter().filter(|volume| volume.get("configMap").is_some()) {
            refer("ConfigMap", &volume["configMap"]["name"], &named("ConfigMap"));
        }
        let volumes = volumes.iter().filter_map(|volume| volume["name"].as_str()).collect();
        for container in list(&pod["containers"]) {
            for mount in list(&container["volumeMounts"]) {
                refer("volume", &mount["name"], &volumes);
            }
            let ports = list(&container["ports"]).iter().filter_map(|port| port["name"].as_str()).collect();
            for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
                refer("port", &container[probe]["httpGet"]["port"], &ports);
            }
            let image = BTreeSet::from([concat!("numaward:", env!("CARGO_PKG_VERSION"))]);
            // From any registry, with or without a digest.
            let name = container["image"].as_str().and_then(|image| image.rsplit('/').next());
            let name = name.and_then(|name| name.split('@').next());
            refer("this version's image", &name.into(), &image);
        }
        faults.extend(list(&pod["containers"]).iter().filter_map(escalation_fault));
        if pod["hostNetwork"] == true {
            faults.push("the DaemonSet has the host's network, which it does not need".to_owned());
        }
        let selected = set["spec"]["selector"]["matchLabels"].as_object();
        let labels = &set["spec"]["template"]["metadata"]["labels"];
        if !selected.is_some_and(|selected| selected.iter().all(|(key, value)| labels[key] == *value)) {
            faults.push("the DaemonSet does not select its own pods".to_owned());
        }
    }
    faults
}

/// Returns the faults of a container's privilege escalation. Kubernetes refuses to forbid it with `SYS_ADMIN`.
fn escalation_fault(container: &Value) -> Option<String> {
    let security = &container["securityContext"];
    let is_admin = list(&security["capabilities"]["add"]).contains(&"SYS_ADMIN".into());
    let is_forbidden = security["allowPrivilegeEscalation"] == false;
    match (is_admin, is_forbidden) {
        (true, true) => Some("allowPrivilegeEscalation is false with SYS_ADMIN".to_owned()),
        (false, false) => {
            Some("allowPrivilegeEscalation is not false, and no capability needs it".to_owned())
        }
        _ => None,
    }
}

/// Returns the fault of the sockets of a configuration: an agent mounts the directory of the PodResources socket, and must not get the
/// control socket with it.
fn socket_fault(resource: &Value) -> Option<String> {
    let config: Value = serde_norway::from_str(resource["data"]["config.yaml"].as_str()?).ok()?;
    let served = Path::new(config["kubernetes"]["podResources"]["socket"].as_str()?).parent()?;
    let control = Path::new(config["controlSocket"].as_str().unwrap_or(CONTROL_SOCKET));
    control.starts_with(served).then(|| {
        format!(
            "the directory of the PodResources socket, {}, has the control socket in or below it",
            served.display()
        )
    })
}

/// Returns the faults of the mounts of a pod: no pod needs a directory above that of the control socket, and only the daemon's pods need
/// that directory.
fn mount_faults(resource: &Value) -> Vec<String> {
    let directory = Path::new(CONTROL_SOCKET).parent().unwrap_or(Path::new(CONTROL_SOCKET));
    let pod =
        if resource["kind"] == "Pod" { &resource["spec"] } else { &resource["spec"]["template"]["spec"] };
    let is_daemon = resource["kind"] == "DaemonSet" && pod["containers"][0]["name"] == "numaward";
    let paths = list(&pod["volumes"]).iter().filter_map(|volume| volume["hostPath"]["path"].as_str());
    let is_fault = |path: &&str| {
        // `/var/run` is a link to `/run`.
        let path = path.strip_prefix("/var").filter(|rest| rest.starts_with("/run")).unwrap_or(path);
        directory.starts_with(path) && !(is_daemon && directory == Path::new(path))
    };
    let fault = |path| format!("a pod mounts {path}, which has the control socket in or below it");
    paths.filter(is_fault).map(fault).collect()
}

/// Policies that are bound to nothing, or are for another service account than that of the daemon.
fn admission_faults(resources: &[Value]) -> Vec<String> {
    let of_kind = |kind: &'static str| resources.iter().filter(move |resource| resource["kind"] == kind);
    let is_bound = |policy: &Value| {
        of_kind("ValidatingAdmissionPolicyBinding")
            .any(|binding| binding["spec"]["policyName"] == policy["metadata"]["name"])
    };
    let accounts: Vec<String> = of_kind("ServiceAccount")
        .filter_map(|account| {
            account["metadata"]["namespace"].as_str().zip(account["metadata"]["name"].as_str())
        })
        .map(|(namespace, name)| {
            format!("request.userInfo.username == \"system:serviceaccount:{namespace}:{name}\"")
        })
        .collect();
    let mut faults = Vec::new();
    for policy in of_kind("ValidatingAdmissionPolicy") {
        let conditions = list(&policy["spec"]["matchConditions"]);
        let is_daemons =
            |condition: &Value| accounts.iter().any(|account| condition["expression"] == **account);
        if !conditions.iter().all(is_daemons) || conditions.is_empty() {
            faults.push("a policy is not for the service account of the daemon".to_owned());
        }
        if !is_bound(policy) {
            faults.push("a policy is bound to nothing".to_owned());
        }
    }
    faults
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Writes the rules in the format of the Prometheus operator.
pub(crate) fn write_rules(root: &Path) -> Result<()> {
    let path = root.join(OPERATOR_RULES);
    fs::write(&path, operator_rules(root)?).with_context(|| format!("cannot write {}", path.display()))?;
    println!("dashboards: {}", path.display());
    Ok(())
}

fn operator_rules(root: &Path) -> Result<String> {
    let path = root.join(RULES);
    let rules = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut text = format!(
        "# Made of {RULES} by `cargo xtask dashboards`.\n\
         apiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\nmetadata:\n  name: numaward\nspec:\n"
    );
    for line in rules.lines().skip_while(|line| line.starts_with('#')) {
        if !line.is_empty() {
            text.push_str("  ");
            text.push_str(&with_runbooks(line));
        }
        text.push('\n');
    }
    Ok(text)
}

/// Returns a line of the rules with its link to a runbook, if there is one, replaced by one to [`RUNBOOKS`].
fn with_runbooks(line: &str) -> Cow<'_, str> {
    match (line.split_once("http://"), line.rsplit_once("/runbooks/")) {
        (Some((before, _)), Some((_, alert))) => format!("{before}{RUNBOOKS}/{alert}").into(),
        _ => line.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operator_rules_match_prometheus() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let made = operator_rules(&root).unwrap();
        let kept = fs::read_to_string(root.join(OPERATOR_RULES)).unwrap_or_default();
        assert!(kept == made, "{OPERATOR_RULES} is old: run `cargo xtask dashboards`");
        let read = |text: &str| serde_norway::from_str::<Value>(text).unwrap();
        let mut rules = read(&fs::read_to_string(root.join(RULES)).unwrap());
        for rule in
            rules["groups"].as_array_mut().unwrap().iter_mut().flat_map(|group| list_mut(&mut group["rules"]))
        {
            if let Some(alert) = rule["alert"].as_str().map(str::to_owned) {
                rule["annotations"]["runbook_url"] = format!("http://localhost:9560/runbooks/{alert}").into();
            }
        }
        assert_eq!(read(&made)["spec"], rules);
    }

    fn list_mut(value: &mut Value) -> &mut Vec<Value> {
        value.as_array_mut().unwrap()
    }

    #[test]
    fn config_map_has_every_dashboard() {
        let dashboards = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dashboards");
        let text = fs::read_to_string(dashboards.join("kustomization.yaml")).unwrap();
        let kustomization: Value = serde_norway::from_str(&text).unwrap();
        let listed = kustomization["configMapGenerator"][0]["files"].as_array().unwrap();
        let listed: BTreeSet<_> = listed.iter().map(|file| file.as_str().unwrap().to_owned()).collect();
        let there = fs::read_dir(dashboards.join("grafana")).unwrap();
        let there = there.map(|entry| format!("grafana/{}", entry.unwrap().file_name().to_string_lossy()));
        let is_json = |path: &String| Path::new(path).extension().is_some_and(|it| it == "json");
        assert_eq!(listed, there.filter(is_json).collect());
    }

    /// Returns the errors of a `DaemonSet` with valid references after `change`.
    fn faults(change: impl FnOnce(&mut Value)) -> Vec<String> {
        let text = format!(
            "kind: ServiceAccount\nmetadata: {{name: a}}\n---\nkind: ConfigMap\nmetadata: {{name: c}}\n---\n\
             kind: DaemonSet\nspec:\n  selector: {{matchLabels: {{x: y}}}}\n  template:\n    metadata: {{labels: {{x: y}}}}\n\
             \x20   spec:\n      serviceAccountName: a\n      volumes: [{{name: v, configMap: {{name: c}}}}]\n      \
             containers:\n      - image: numaward:{}\n        securityContext: {{allowPrivilegeEscalation: false}}\n        ports: [{{name: p}}]\n        volumeMounts: [{{name: v}}]\n\
             \x20       startupProbe: &probe {{httpGet: {{port: p}}}}\n        readinessProbe: *probe\n        \
             livenessProbe: *probe\n",
            env!("CARGO_PKG_VERSION")
        );
        let mut resources = parse(&text).unwrap();
        change(&mut resources[2]["spec"]);
        dangling(&resources)
    }

    #[test]
    fn finds_dangling_references() {
        assert_eq!(faults(|_| {}), [""; 0]);
        let pod = |path: &str, value: &str| {
            faults(|spec| *spec.pointer_mut(&format!("/template/spec/{path}")).unwrap() = value.into())
        };
        for (path, fault) in [
            ("serviceAccountName", "service account \"z\""),
            ("volumes/0/configMap/name", "ConfigMap \"z\""),
            ("containers/0/volumeMounts/0/name", "volume \"z\""),
            ("containers/0/livenessProbe/httpGet/port", "port \"z\""),
            ("containers/0/image", "this version's image \"z\""),
        ] {
            let faults = pod(path, "z");
            assert!(faults.len() == 1 && faults[0].starts_with(fault), "{path}: {faults:?}");
        }
        let faults = faults(|spec| spec["template"]["metadata"]["labels"]["x"] = "z".into());
        assert_eq!(faults, ["the DaemonSet does not select its own pods"]);
        let admin = self::faults(|spec| {
            let security = &mut spec["template"]["spec"]["containers"][0]["securityContext"];
            security["capabilities"]["add"] = serde_json::json!(["SYS_ADMIN"]);
        });
        assert_eq!(admin, ["allowPrivilegeEscalation is false with SYS_ADMIN"]);
        let escalation = self::faults(|spec| {
            spec["template"]["spec"]["containers"][0]["securityContext"] = Value::Null;
        });
        assert_eq!(escalation, ["allowPrivilegeEscalation is not false, and no capability needs it"]);
        let network = self::faults(|spec| spec["template"]["spec"]["hostNetwork"] = true.into());
        assert_eq!(network, ["the DaemonSet has the host's network, which it does not need"]);
    }

    #[test]
    fn control_socket_has_own_directory() {
        let fault = |config: &str| socket_fault(&serde_json::json!({ "data": { "config.yaml": config } }));
        let served = |path: &str| format!("kubernetes: {{podResources: {{socket: {path}}}}}");
        assert!(fault(&served("/run/numaward/pod-resources.sock")).is_some());
        assert!(fault(&served("/run/kubelet.sock")).is_some(), "above it");
        assert!(fault(&(served("/run/a/b.sock") + "\ncontrolSocket: /run/a/control.sock")).is_some());
        assert_eq!(fault(&served("/run/numaward/pod-resources/kubelet.sock")), None);
        assert_eq!(fault("mode: observe"), None);
    }

    #[test]
    fn only_daemon_mounts_control_socket() {
        let faults = |kind: &str, name: &str, path: &str| {
            let volumes = [serde_json::json!({ "name": "a", "hostPath": { "path": path } })];
            let spec = serde_json::json!({ "containers": [{ "name": name }], "volumes": volumes });
            let spec = if kind == "Pod" { spec } else { serde_json::json!({ "template": { "spec": spec } }) };
            mount_faults(&serde_json::json!({ "kind": kind, "spec": spec })).len()
        };
        for (path, of_daemon, of_agent) in [
            ("/", 1, 1),
            ("/run", 1, 1),
            ("/var/run", 1, 1),
            ("/run/numaward", 0, 1),
            ("/var/run/numaward/", 0, 1),
            ("/run/numaward/pod-resources", 0, 0),
            ("/run/numa", 0, 0),
            ("/var", 0, 0),
        ] {
            let found = [("DaemonSet", "numaward"), ("DaemonSet", "agent"), ("Pod", "numaward")];
            let found = found.map(|(kind, name)| faults(kind, name, path));
            assert_eq!(found, [of_daemon, of_agent, of_agent], "{path}");
        }
    }

    #[test]
    fn policies_are_bound_to_daemon() {
        let resources = |account: &str, policy: &str| {
            vec![
                serde_json::json!({ "kind": "ServiceAccount", "metadata": { "namespace": "a", "name": "b" } }),
                serde_json::json!({ "kind": "ValidatingAdmissionPolicy", "metadata": { "name": "p" }, "spec": {
                    "matchConditions": [{ "expression": format!("request.userInfo.username == \"{account}\"") }]
                } }),
                serde_json::json!({ "kind": "ValidatingAdmissionPolicyBinding", "spec": { "policyName": policy } }),
            ]
        };
        assert_eq!(admission_faults(&resources("system:serviceaccount:a:b", "p")), [""; 0]);
        assert_eq!(admission_faults(&resources("system:serviceaccount:a:c", "q")).len(), 2);
    }

    #[test]
    fn refuses_empty_overlay() {
        assert!(parse("").is_err());
        assert!(parse("a: [").is_err());
    }
}
