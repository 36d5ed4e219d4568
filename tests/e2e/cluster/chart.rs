//! The chart, with Helm, as docs/kubernetes.md has it: `install`, `test`, `upgrade` and `uninstall`, a startup taint, the configuration of a group of nodes, a
//! kubelet that gets static policies while numaward runs, and one with Memory `QoS`.

use std::{
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::{
    Cluster, MACHINE, ROLLOUT, SHARED, burstable, container, guaranteed, node, pod, run_two_and_three,
    shows_dry_run,
};
use crate::{containerd::nodes, deploy::checkout};

/// Name of the variable with the folder of the Helm library.
const HELM: &str = "NUMAWARD_HELM";
/// Path of kubectl in the machine.
const KUBECTL: &str = "/kubectl/bin/kubectl";
/// Taint that numaward removes.
const TAINT: &str = "numaward.io/not-ready";
/// Options with which the kubelet gets static policies that its configuration file does not have. With less than a reserved CPU, all
/// running pods still fit: the kubelet ends others at its start.
const STATIC: &str = "--cpu-manager-policy=static --kube-reserved=cpu=100m";
const PLACED: [(&str, &str, usize); 2] = [("two", "main", 2), ("three", "main", 3)];

#[test]
fn chart_is_installed_and_uninstalled() {
    let more = |tools: &Path| vec![(tools.join("kubectl"), KUBECTL)];
    let Some(mut cluster) = Cluster::start_with(nodes(MACHINE), more) else { return };
    cluster.come_up();
    import_kubectl(&cluster);
    is_tried(&cluster);
    enforces(&cluster);
    follows_its_group(&cluster);
    reports_static_kubelet(&cluster);
    protection_outlives_memory_qos(&cluster);
    is_uninstalled(&cluster);
    cluster.step("done");
}

/// Makes the image of the chart's hooks.
fn import_kubectl(cluster: &Cluster) {
    let script = r#"
        cd /kubectl
        # Of the container runtime, which is of the same release.
        for file in lib64/ld-linux-x86-64.so.2 lib/x86_64-linux-gnu/libc.so.6; do
            mkdir -p ${file%/*}
            cp /$file $file
        done
        tar -cf layer.tar bin lib lib64
        layer=$(sha256sum layer.tar | cut -d' ' -f1)
        cat >config.json <<END
{"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/bin"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$layer"]}}
END
        echo '[{"Config": "config.json", "RepoTags": ["localhost/kubectl:1"], "Layers": ["layer.tar"]}]' >manifest.json
        tar -cf image.tar manifest.json config.json layer.tar
        rm -r bin lib lib64 layer.tar
        ctr -n k8s.io images import --local --snapshotter native image.tar
        rm image.tar"#;
    cluster.node.run(&format!("set -e\n{script}")).unwrap();
    cluster.step("the node has the image of the hooks");
}

/// Runs an action of Helm; values are for `install` and `upgrade`.
fn helm(cluster: &Cluster, action: &str, values: Option<&Value>) {
    let library = std::env::var_os(HELM);
    let library = library.unwrap_or_else(|| panic!("{HELM} is not set; run `cargo xtask vm test cluster::`"));
    let mut helm = Command::new("python3");
    helm.arg("-B").arg(checkout("tests/deploy/release.py")).arg(action).env("PYTHONPATH", library);
    helm.arg(cluster.plane.kubeconfig("admin"));
    if values.is_some() {
        helm.arg(checkout("deploy/helm/numaward"));
    }
    let helm = helm.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut helm = helm.unwrap_or_else(|error| panic!("python3: {error}"));
    let values = values.map_or_else(String::new, Value::to_string);
    // The values fit into the pipe. Dropping the handle closes it.
    helm.stdin.take().unwrap().write_all(values.as_bytes()).unwrap();
    let output = helm.wait_with_output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    cluster.step(&format!("helm {action} has ended"));
}

/// Returns the image of the hooks.
fn hook_image() -> Value {
    json!({ "image": { "registry": "localhost", "repository": "kubectl", "tag": "1" } })
}

/// Returns the values of the release with this configuration of the group `gpu`.
fn values(group: &Value) -> Value {
    json!({
        "mode": "enforce",
        "config": { "topologyManagerPolicy": "restricted" },
        "configGroups": { "gpu": group },
        "startupTaint": { "enabled": true },
        "kubeletConfiguration": { "enabled": true },
        "ownNode": { "enabled": true },
        "kubectl": hook_image(),
    })
}

/// A new user's first commands: the chart is installed with `mode=try`.
fn is_tried(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    kubectl.must(&["create", "namespace", "numaward"]);
    kubectl.must(&["label", "namespace", "numaward", "pod-security.kubernetes.io/enforce=privileged"]);
    helm(cluster, "install", Some(&json!({ "mode": "try", "kubectl": hook_image() })));
    kubectl.must(&ROLLOUT);
    helm(cluster, "test", None);
    cluster.wait_for("numaward runs", || cluster.daemon());
    for (command, words) in
        [("status", "PROBE"), ("topology", "2 nodes"), ("explain --cpus 2 --memory 64Mi", "would hold CPUs ")]
    {
        let said = run_in_daemon(cluster, &format!("numaward {command}")).unwrap();
        assert!(said.contains(words), "{command}: {said}");
    }
    shows_dry_run(cluster);
    cluster.step("numaward was tried");
}

/// The release changes to `mode: enforce`. Its daemon removes the taint of the node, and pods are placed.
fn enforces(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    kubectl.must(&["label", "node", node::NAME, "numaward.io/group=gpu"]);
    kubectl.must(&["taint", "node", node::NAME, &format!("{TAINT}=:NoSchedule")]);
    helm(cluster, "upgrade", Some(&values(&json!({ "log": { "level": "info" } }))));
    kubectl.must(&ROLLOUT);
    cluster.wait_for("numaward runs", || cluster.daemon());
    cluster.wait_for("the node has no startup taint", || {
        let taints = kubectl.json(&["get", "node", node::NAME])?["spec"]["taints"].take();
        if taints.to_string().contains(TAINT) { Err(taints.to_string()) } else { Ok(()) }
    });
    cluster.step("the startup taint is removed");
    helm(cluster, "test", None);
    run_pods(cluster);
    cluster.step("pods are placed");
}

/// Runs a pod on shared CPUs and two with a guarantee.
fn run_pods(cluster: &Cluster) {
    cluster.run(&[pod(SHARED, &[container("main", &burstable())])]);
    run_two_and_three(cluster);
}

/// Returns the reason for which a part of the daemon is degraded.
fn degraded(cluster: &Cluster, part: &str) -> Result<Option<String>, String> {
    let (_, url) = cluster.daemon()?;
    let status = cluster.ask(&url, "status")?;
    let parts = status["degraded"].as_array().ok_or_else(|| status.to_string())?;
    let of_part = parts.iter().find(|degraded| degraded["part"] == part);
    Ok(of_part.map(ToString::to_string))
}

/// Runs a command in the daemon's container. `kubectl exec` would have to reach the machine from outside.
fn run_in_daemon(cluster: &Cluster, command: &str) -> Result<String, String> {
    cluster.node.run(&format!("nsenter -t $(pidof numaward) -m -p env PATH=/usr/bin {command}"))
}

/// Returns the lines of `numaward config view --origins` in the daemon's container that contain a key.
fn view(cluster: &Cluster, key: &str) -> Result<String, String> {
    let view = "numaward config view --config /etc/numaward/config.yaml --origins";
    run_in_daemon(cluster, &format!("{view} | grep {key}"))
}

/// A changed group of nodes replaces no daemon. What cannot change while the daemon runs is reported, and takes effect at its start.
fn follows_its_group(cluster: &Cluster) {
    let (daemon, _) = cluster.daemon().unwrap();
    let level_changes = || {
        let log = cluster.node.run(&format!("cat /var/log/pods/numaward_{daemon}_*/*/*.log")).unwrap();
        log.matches("the level of the log has changed").count()
    };
    let before = level_changes();
    // The default in a pod is JSON.
    let log = json!({ "level": "debug", "format": "text" });
    let group = json!({ "log": log, "kubernetes": { "refusedAfter": "17s" } });
    helm(cluster, "upgrade", Some(&values(&group)));
    let reason = cluster.wait_for("a change waits for the next start", || {
        degraded(cluster, "pending_configuration")?.ok_or_else(|| "nothing waits".to_owned())
    });
    assert!(reason.contains("log.format"), "{reason}");
    for live in ["log.level", "kubernetes.refusedAfter"] {
        assert!(!reason.contains(live), "{live} changes at once: {reason}");
    }
    assert_eq!(degraded(cluster, "configuration").unwrap(), None);
    assert_eq!(level_changes(), before + 1, "the level of the log has changed");
    assert_eq!(cluster.daemon().unwrap().0, daemon, "the daemon is not replaced");
    cluster.step("a change of the group waits");
    cluster.kubectl.must(&["delete", "pod", &daemon, "--namespace=numaward", "--timeout=30m"]);
    cluster.wait_for("the change is in effect", || match degraded(cluster, "pending_configuration")? {
        Some(reason) => Err(reason),
        None if cluster.daemon()?.0 == daemon => Err("the daemon is still there".to_owned()),
        None => Ok(()),
    });
    let line = view(cluster, "refusedAfter").unwrap();
    assert!(line.contains("17s") && line.contains("group.gpu.yaml"), "{line}");
    cluster.wait_until_placed(&PLACED);
    cluster.step("the configuration of the group is in effect");
}

/// Restarts the kubelet with these options.
fn restart_kubelet(cluster: &Cluster, options: &str) {
    // The policies of the state files must be those of the kubelet.
    let state = "/var/lib/kubelet/cpu_manager_state";
    let edit =
        format!("sed -i 's/--node-ip 10.0.2.15.*>>/--node-ip 10.0.2.15 {options} >>/' /bin/start-kubelet");
    cluster.node.run(&format!("stop-kubelet\nrm -f {state}\n{edit}\nstart-kubelet")).unwrap();
}

/// The kubelet's configuration comes from its own API. A kubelet that gets static policies by its command line is reported.
fn reports_static_kubelet(cluster: &Cluster) {
    let (_, url) = cluster.daemon().unwrap();
    let reservations = cluster.ask(&url, "status").unwrap()["reservations"].to_string();
    assert!(reservations.contains("/configz"), "{reservations}");
    // The emulated kubelet may be slow to answer.
    cluster.wait_for("the kubelet's API answers", || match degraded(cluster, "kubelet_configuration")? {
        Some(reason) => Err(reason),
        None => Ok(()),
    });
    assert_eq!(degraded(cluster, "kubelet").unwrap(), None);
    restart_kubelet(cluster, STATIC);
    let reason = cluster.wait_for("the kubelet's static policies are reported", || {
        degraded(cluster, "kubelet")?.ok_or_else(|| "the part is not degraded".to_owned())
    });
    assert!(reason.contains("cpuManagerPolicy: static"), "{reason}");
    cluster.step("a kubelet with static policies is reported");
    restart_kubelet(cluster, "");
    cluster.wait_for("the kubelet's policies are as before", || match degraded(cluster, "kubelet")? {
        Some(reason) => Err(reason),
        None => Ok(()),
    });
    cluster.wait_until_placed(&PLACED);
    // The kubelet may have set the CPUs of running containers, which keep them.
    cluster.delete(&[SHARED, "two", "three"]);
    run_pods(cluster);
    cluster.step("the kubelet is as before");
}

/// A kubelet with Memory `QoS` and no reservations resets the protection of all pods once a minute, which numaward repairs each time.
fn protection_outlives_memory_qos(cluster: &Cluster) {
    let (_, url) = cluster.daemon().unwrap();
    let metrics = url.replace("/api/v1", "/metrics");
    let counted = |name: &str| -> Result<u64, String> {
        let text = cluster.node.run(&format!("wget -q -O - {metrics}"))?;
        let series = format!("numaward_{name}_total{{knob=\"memory.min\"}} ");
        let value = text.lines().find_map(|line| line.strip_prefix(series.as_str())).ok_or(text.as_str())?;
        value.parse().map_err(|_| value.to_owned())
    };
    let protection = || cluster.node.run("cat /sys/fs/cgroup/kubepods/memory.min").unwrap();
    let (before, drifts, repairs) =
        (protection(), counted("drift").unwrap(), counted("drift_repaired").unwrap());
    assert_ne!(before.trim(), "0");
    restart_kubelet(cluster, "--feature-gates=MemoryQoS=true");
    cluster.wait_for("three resets are repaired", || match counted("drift_repaired")? - repairs {
        found @ 0..3 => Err(format!("{found} repairs")),
        _ => Ok(()),
    });
    cluster.wait_for("the memory of the pods is protected", || match protection() {
        now if now == before => Ok(()),
        now => Err(now),
    });
    assert_eq!(counted("drift").unwrap(), drifts, "they are no drift that an alert counts");
    cluster.wait_until_placed(&PLACED);
    restart_kubelet(cluster, "");
    cluster.step("the kubelet's Memory QoS ends no protection");
}

/// The hook before `helm uninstall` lets the daemon restore all knobs; nothing of the release is left.
fn is_uninstalled(cluster: &Cluster) {
    helm(cluster, "uninstall", None);
    let mut left = cluster.knobs().unwrap();
    // The kubelet writes all CPUs and nodes to its cgroups; the set of a cgroup with processes cannot be emptied again.
    left.retain(|line| !line.ends_with("/cpuset.cpus:0-5") && !line.ends_with("/cpuset.mems:0-1"));
    assert!(left.is_empty(), "{left:#?}");
    let kinds = "daemonsets,jobs,serviceaccounts,roles,rolebindings,configmaps,secrets,validatingadmissionpolicies,\
                 validatingadmissionpolicybindings,clusterroles,clusterrolebindings";
    let list = ["get", kinds, "--namespace=numaward", "--output=name"];
    cluster.wait_for("no object of the release is left", || {
        let objects = cluster.kubectl.run(&list)?;
        let left: Vec<_> = objects.lines().filter(|name| name.contains("numaward")).collect();
        if left.is_empty() { Ok(()) } else { Err(left.join("\n")) }
    });
    // The cluster has no CPUs for a third pod.
    cluster.delete(&["three"]);
    cluster.run(&[pod("new", &[container("main", &guaranteed(2, 64))])]);
    for name in ["two", "new"] {
        let place = cluster.place(name, "main").unwrap();
        assert_eq!((place.cpus.len(), place.nodes.len()), (6, 2), "{name}: {place:?}");
    }
    cluster.step("the chart was uninstalled");
}
