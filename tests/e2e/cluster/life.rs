//! Pods survive maintenance and failures of a node: no running pod is disturbed, no guarantee is lost, and no CPU is given twice.
//!
//! One pod runs from the beginning. Its CPUs, nodes and process are recorded all the time, and must not change until the machine
//! restarts.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    Cluster, MACHINE, Places, ROLLOUT, SHARED, burstable, condition, container, decisions, guaranteed,
    load::{Load, exclusive},
    node, overlay, pod,
};
use crate::{
    containerd::{nodes, numbers},
    deploy::checkout,
};

/// The pod that must not be disturbed, and its expected placement: pod, container, CPUs.
const UNDISTURBED_POD: (&str, &str, usize) = ("two", "main", 2);
/// A pod that is created and deleted repeatedly.
const RECREATED_POD: (&str, &str, usize) = ("one", "main", 1);
/// A pod that is created after numaward has taken over.
const LATE_POD: (&str, &str, usize) = ("late", "main", 2);
/// Memory that the kubelet reserves on node 0: the sum of the following two.
const RESERVED: &str = "256Mi";
const KUBE_RESERVED: &str = "192Mi";
const EVICTION: &str = "64Mi";
/// Folder of the migration's files in the machine.
const FOLDER: &str = "/var/lib";
/// Folder of the exported kubelet state files, with the same path in the container and in the machine.
const EXPORTED: &str = "/var/lib/numaward/kubelet-now";
/// Duration of the API server's outage.
const AWAY: Duration = Duration::from_mins(5);

#[test]
fn pods_survive_node_changes() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    start_with_static_policies(&cluster);
    record(&cluster);
    are_taken_over(&cluster);
    outlive_an_upgrade(&cluster);
    outlive_the_runtime(&cluster);
    come_in_large_numbers(&cluster);
    outlive_the_api_server(&mut cluster);
    are_given_back(&cluster);
    are_taken_over(&cluster);
    outlive_a_reboot(&mut cluster);
    cluster.step("done");
}

/// Returns the configuration fields that the kubelet and numaward have in common.
fn policies() -> Value {
    json!({
        "cpuManagerPolicy": "static",
        "memoryManagerPolicy": "Static",
        "topologyManagerPolicy": "restricted",
        "topologyManagerScope": "container",
        "reservedSystemCPUs": "0",
        "reservedMemory": [{ "numaNode": 0, "limits": { "memory": RESERVED } }],
        "kubeReserved": { "memory": KUBE_RESERVED },
        "evictionHard": { "memory.available": EVICTION },
    })
}

fn wants((name, main, cpus): (&str, &str, usize)) -> Value {
    pod(name, &[container(main, &guaranteed(u32::try_from(cpus).unwrap(), 64))])
}

/// Starts the kubelet with static policies, under which it places pods.
fn start_with_static_policies(cluster: &Cluster) {
    let config = node::kubelet_configuration(&policies());
    let state = "/var/lib/kubelet/cpu_manager_state /var/lib/kubelet/memory_manager_state";
    let write = format!("cat >/var/lib/kubelet/config.yaml <<'END'\n{config}\nEND");
    cluster.node.run(&format!("stop-kubelet\nrm -f {state}\n{write}\nstart-kubelet")).unwrap();
    cluster.wait_for("the kubelet has made its state files", || decisions::state(cluster));
    cluster.run(&[
        wants(UNDISTURBED_POD),
        wants(RECREATED_POD),
        pod(SHARED, &[container("main", &burstable())]),
    ]);
    cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]);
    cluster.step("the kubelet has placed pods");
}

/// Starts to record changes of [`UNDISTURBED_POD`].
fn record(cluster: &Cluster) {
    cluster.in_cgroup(UNDISTURBED_POD.0, UNDISTURBED_POD.1, "record /tmp/kept").unwrap();
}

/// Asserts that the CPUs, the nodes and the process of [`UNDISTURBED_POD`] have not changed since [`record`].
fn assert_undisturbed(cluster: &Cluster) {
    let now = "echo $(cat cpuset.cpus cpuset.mems; head -n 1 cgroup.procs)";
    let seen =
        cluster.in_cgroup(UNDISTURBED_POD.0, UNDISTURBED_POD.1, &format!("cat /tmp/kept; {now}")).unwrap();
    let seen: Vec<_> = seen.lines().collect();
    assert!(seen.len() == 2 && seen[0] == seen[1], "CPUs, nodes and process were, and are last: {seen:#?}");
}

/// Migrates from the kubelet's static policies to numaward as docs/migration.md describes.
fn are_taken_over(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    let before = cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]);

    // Step 1: observe.
    let observe = checkout("deploy/overlays/observe").display().to_string();
    kubectl.must(&["apply", "--kustomize", &observe]);
    kubectl.must(&ROLLOUT);
    cluster.step("numaward observes");

    // Step 2: copy the policies.
    let fields = policies();
    let mut config = String::new();
    let migrate = overlay(cluster, "migrate", |text| {
        let is_other = |line: &&str| fields.get(line.split(':').next().unwrap_or_default()).is_none();
        let others = text.lines().filter(is_other).map(str::to_owned);
        let set = fields.as_object().unwrap().iter().map(|(field, value)| format!("{field}: {value}"));
        config = others.chain(set).collect::<Vec<_>>().join("\n") + "\n";
        config.clone()
    });
    let write = |name: &str, text: &str| format!("cat >{name} <<'END'\n{text}\nEND\n");
    cluster
        .node
        .run(&format!("cd {FOLDER}\n{}numaward config check config.yaml", write("config.yaml", &config)))
        .unwrap();

    // Step 4, before step 3: apply the migrated configuration.
    kubectl.must(&["apply", "--kustomize", &migrate]);
    kubectl.must(&ROLLOUT);
    assert_eq!(cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]), before);
    cluster.step("numaward observes what it is to take over");

    // Step 3: migrate one host.
    kubectl.must(&["cordon", node::NAME]);
    let state = "/var/lib/kubelet/cpu_manager_state /var/lib/kubelet/memory_manager_state";
    let import = "numaward import-kubelet-state kubelet-before --config config.yaml";
    let script = format!(
        "set -e
        cd {FOLDER}
        stop-kubelet
        mkdir kubelet-before
        cp /var/lib/kubelet/config.yaml {state} kubelet-before/
        {import} --dry-run
        {import}"
    );
    let said = cluster.node.run(&script).unwrap();
    let uids = [UNDISTURBED_POD, RECREATED_POD].map(|(name, ..)| uid(cluster, name));
    for uid in &uids {
        assert_eq!(said.matches(uid).count(), 2, "{uid} in a dry run, and then: {said}");
    }
    let mut kubelet = node::kubelet_configuration(&policies());
    let changed = json!({
        "cpuManagerPolicy": "none",
        "memoryManagerPolicy": "None",
        "topologyManagerPolicy": "none",
    });
    kubelet.as_object_mut().unwrap().remove("reservedMemory");
    kubelet.as_object_mut().unwrap().extend(changed.as_object().unwrap().clone());
    let write = write("/var/lib/kubelet/config.yaml", &kubelet.to_string());
    cluster.node.run(&format!("{write}rm {state}\nstart-kubelet")).unwrap();

    // Step 4 on the migrated host.
    let (observes, _) = cluster.daemon().unwrap();
    let of_host = format!("--field-selector=spec.nodeName={}", node::NAME);
    kubectl.must(&["--namespace=numaward", "delete", "pod", &of_host]);
    kubectl.must(&["uncordon", node::NAME]);
    let (_, url) = cluster.wait_for("numaward is there again", || match cluster.daemon()? {
        (same, _) if same == observes => Err("it is still the one that observes".to_owned()),
        other => Ok(other),
    });
    assert_eq!(cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]), before, "nobody was to move");
    assert_guaranteed(cluster, &url, &before);
    assert_undisturbed(cluster);
    // numaward places a new pod within the capacity that the imported guarantees leave.
    cluster.delete(&[RECREATED_POD.0]);
    cluster.run(&[wants(LATE_POD)]);
    cluster.wait_until_placed(&[UNDISTURBED_POD, LATE_POD]);
    cluster.delete(&[LATE_POD.0]);
    cluster.step("numaward has taken the host over");
}

fn uid(cluster: &Cluster, name: &str) -> String {
    cluster.pod(name).unwrap()["metadata"]["uid"].as_str().unwrap().to_owned()
}

/// Asserts that numaward's guarantees are exactly the placements of these containers.
fn assert_guaranteed(cluster: &Cluster, url: &str, places: &Places) {
    let expected: BTreeMap<_, _> =
        places.iter().map(|(name, place)| (format!("default/{name}"), place.cpus.clone())).collect();
    cluster.wait_for("the guarantees are the placements of the containers", || {
        let answer = cluster.ask(url, "allocations")?;
        let held = answer["allocations"].as_array().into_iter().flatten();
        let cpus = |of: &Value| numbers(of["cpus"].as_str().unwrap_or_default()).into_iter().collect();
        let held: BTreeMap<String, BTreeSet<u64>> =
            held.map(|of| (of["name"].as_str().unwrap_or_default().to_owned(), cpus(of))).collect();
        if held == expected { Ok(()) } else { Err(format!("{answer}, expected: {expected:?}")) }
    });
}

/// Returns true if only this image of numaward runs.
fn is_rolled_out(cluster: &Cluster, image: &str) -> bool {
    let set = cluster.kubectl.json(&["get", "daemonset", "numaward", "--namespace=numaward"]).unwrap();
    let pods = cluster.kubectl.json(&["get", "pods", "--namespace=numaward"]).unwrap();
    let pods = pods["items"].as_array().cloned().unwrap_or_default();
    let status = &set["status"];
    status["observedGeneration"] == set["metadata"]["generation"]
        && status["updatedNumberScheduled"] == 1
        && status["numberAvailable"] == 1
        && pods.len() == 1
        && pods.iter().all(|pod| pod["spec"]["containers"][0]["image"] == image && condition(pod, "Ready"))
}

/// numaward is upgraded to another image and rolled back, while pods are created and deleted.
fn outlive_an_upgrade(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    let set = kubectl.json(&["get", "daemonset", "numaward", "--namespace=numaward"]).unwrap();
    let image = set["spec"]["template"]["spec"]["containers"][0]["image"].as_str().unwrap();
    let next = "numaward:next";
    let tag = format!("ctr -n k8s.io images tag docker.io/library/{image} docker.io/library/{next}");
    cluster.node.run(&tag).unwrap();
    let mut load = Load::new(cluster);
    load.keep_on("pods come and go", |_| true);
    let change = format!("numaward={next}");
    kubectl.must(&["--namespace=numaward", "set", "image", "daemonset/numaward", &change]);
    load.keep_on("numaward was upgraded", |cluster| is_rolled_out(cluster, next));
    kubectl.must(&["--namespace=numaward", "rollout", "undo", "daemonset/numaward"]);
    load.keep_on("numaward was rolled back", |cluster| is_rolled_out(cluster, image));
    load.end();
    let places = cluster.wait_until_placed(&[UNDISTURBED_POD]);
    let (_, url) = cluster.daemon().unwrap();
    assert_guaranteed(cluster, &url, &places);
    assert_undisturbed(cluster);
    cluster.step("an upgrade and its rollback disturbed nobody");
}

/// containerd is killed and restarted: pods continue to run, and numaward reconnects.
fn outlive_the_runtime(cluster: &Cluster) {
    let daemon = cluster.daemon().unwrap();
    cluster.node.run("restart-containerd").unwrap();
    cluster.run(&[wants(RECREATED_POD)]);
    let places = cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]);
    assert_eq!(cluster.daemon().unwrap(), daemon);
    let pod = cluster.kubectl.json(&["get", "pod", &daemon.0, "--namespace=numaward"]).unwrap();
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "{pod}");
    assert_guaranteed(cluster, &daemon.1, &places);
    assert_undisturbed(cluster);
    cluster.delete(&[RECREATED_POD.0]);
    cluster.step("containerd was killed");
}

/// Many pods of all classes run at the same time. They are created in waves. The number is limited: with the shims of forty
/// containers, the runtime of an emulated machine no longer answers in time.
fn come_in_large_numbers(cluster: &Cluster) {
    const ALL: usize = 24;
    const WAVE: usize = 8;
    const LAST: usize = ALL - 1;
    let little = json!({ "requests": { "cpu": "5m", "memory": "8Mi" } });
    let part = json!({ "cpu": "100m", "memory": "32Mi" });
    let part = json!({ "requests": part, "limits": part });
    let make = |number: usize| {
        let resources = match number {
            0 | LAST => guaranteed(1, 32),
            1..6 => part.clone(),
            _ if number.is_multiple_of(2) => little.clone(),
            _ => json!({}),
        };
        let mut one = pod(&format!("many-{number}"), &[container("main", &resources)]);
        one["metadata"]["labels"] = json!({ "many": "" });
        one
    };
    let started = Instant::now();
    for first in (0..ALL).step_by(WAVE) {
        let pods: Vec<_> = (first..first + WAVE).map(make).collect();
        cluster.kubectl.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": pods }));
        cluster.wait_for("a wave of pods is ready", || {
            exclusive(cluster);
            let pods = cluster.kubectl.json(&["get", "pods", "--selector=many"])?;
            let pods = pods["items"].as_array().cloned().unwrap_or_default();
            let ready = pods.iter().filter(|pod| condition(pod, "Ready")).count();
            if ready == first + WAVE { Ok(()) } else { Err(format!("{ready} are")) }
        });
    }
    cluster.step(&format!("{ALL} pods are ready after {} s", started.elapsed().as_secs()));
    let last = format!("many-{LAST}");
    let places = cluster.wait_until_placed(&[UNDISTURBED_POD, ("many-0", "main", 1), (&last, "main", 1)]);
    let left = cluster.in_cgroup(SHARED, "main", "cat cpuset.cpus").unwrap();
    cluster.wait_for("all others share the rest", || {
        let mut knobs = cluster.knobs()?;
        knobs.retain(|line| line.contains("/cpuset.cpus:") && line.matches('/').count() >= 3);
        let own = knobs.iter().filter(|line| line.rsplit(':').next() != Some(&left)).count();
        if own == places.len() && knobs.len() > ALL { Ok(()) } else { Err(format!("{knobs:#?}")) }
    });
    let (_, url) = cluster.daemon().unwrap();
    assert_eq!(exclusive(cluster).len(), places.len());
    assert_undisturbed(cluster);
    cluster.kubectl.must(&["delete", "pod", "--selector=many", "--timeout=30m"]);
    let places = cluster.wait_until_placed(&[UNDISTURBED_POD]);
    assert_guaranteed(cluster, &url, &places);
    cluster.step("all of them were placed");
}

/// While the API server is down, a restarted container gets the same CPUs, and no other placement changes.
fn outlive_the_api_server(cluster: &mut Cluster) {
    cluster.run(&[wants(RECREATED_POD)]);
    let places = cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]);
    let cgroup = format!("/sys/fs/cgroup/kubepods/pod{}", uid(cluster, RECREATED_POD.0));
    let (_, url) = cluster.daemon().unwrap();
    let is_degraded = |cluster: &Cluster| {
        let status = cluster.ask(&url, "status")?;
        let mut parts = status["degraded"].as_array().into_iter().flatten();
        Ok::<_, String>(parts.any(|part| part["part"] == "kubernetes_api"))
    };
    let stopped = Instant::now();
    cluster.plane.stop_api_server();
    // Reads the CPUs of the container; the sandbox has none.
    let find = |cluster: &Cluster| cluster.node.run(&format!("cd {cgroup} && grep . */cpuset.cpus"));
    let before = find(cluster).unwrap();
    let (id, cpus) = before.split_once('/').unwrap();
    cluster.node.run(&format!("kill -9 $(cat {cgroup}/{id}/cgroup.procs)")).unwrap();
    cluster.wait_for("a container starts again, with the CPUs that it had", || match find(cluster)? {
        after if after != before && after.ends_with(cpus) && !after.contains('\n') => Ok(()),
        after => Err(after),
    });
    cluster.wait_for("numaward says that it has no API server", || {
        if is_degraded(cluster)? { Ok(()) } else { Err("it does not".to_owned()) }
    });
    thread::sleep(AWAY.saturating_sub(stopped.elapsed()));
    cluster.plane.start_api_server();
    cluster.wait_for("the API server is back", || cluster.kubectl.run(&["get", "--raw=/readyz"]));
    assert_eq!(cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]), places, "nobody was to move");
    cluster.wait_for("numaward has the API server again", || {
        if is_degraded(cluster)? { Err("it has not".to_owned()) } else { Ok(()) }
    });
    assert_undisturbed(cluster);
    cluster.delete(&[RECREATED_POD.0]);
    cluster.step("the API server was away");
}

fn full_name((name, main, _): (&str, &str, usize)) -> String {
    format!("{name}/{main}")
}

/// Exports the guarantees into [`EXPORTED`] from within numaward's container, and returns the messages.
fn export(cluster: &Cluster) -> String {
    let (daemon, _) = cluster.daemon().unwrap();
    let pod = cluster.kubectl.json(&["get", "pod", &daemon, "--namespace=numaward"]).unwrap();
    let id = pod["status"]["containerStatuses"][0]["containerID"].as_str().unwrap();
    let id = id.strip_prefix("containerd://").unwrap();
    let run = format!("ctr -n k8s.io tasks exec --exec-id export {id}");
    cluster.node.run(&format!("{run} numaward export-kubelet-state --into {EXPORTED}")).unwrap()
}

/// Asserts that the kubelet's state files contain exactly the placements of these pods.
fn assert_in_state_files(cluster: &Cluster, pods: &[(&str, &str, usize)], places: &Places) {
    let uids: Vec<_> = pods.iter().map(|of| uid(cluster, of.0)).collect();
    // A timer of the kubelet removes stale entries.
    cluster.wait_for("the kubelet has guarantees for the pods", || {
        let (cpus, memory) = decisions::state(cluster)?;
        let has_others =
            |state: &Value| state["entries"].as_object().map(serde_json::Map::len) != Some(pods.len());
        let is_so = |(of, uid): (&(&str, &str, usize), &String)| {
            let place = &places[&full_name(*of)];
            let held = cpus["entries"][uid][of.1].as_str().map(numbers);
            let nodes = &memory["entries"][uid][of.1][0]["numaAffinity"];
            held.is_some_and(|held| place.cpus.iter().eq(&held)) && *nodes == json!(place.nodes)
        };
        if has_others(&cpus) || has_others(&memory) || !pods.iter().zip(&uids).all(is_so) {
            return Err(format!("{cpus}\n{memory}\nthey have {places:?}"));
        }
        Ok(())
    });
}

/// Migrates back to the kubelet's static policies as docs/migration.md describes: first with a pod that was created under
/// numaward, then without numaward.
fn are_given_back(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    cluster.run(&[wants(LATE_POD)]);
    let before = cluster.wait_until_placed(&[UNDISTURBED_POD, LATE_POD]);
    let process = || cluster.in_cgroup(LATE_POD.0, LATE_POD.1, "head -n 1 cgroup.procs").unwrap();
    let late = process();
    kubectl.must(&["cordon", node::NAME]);
    let said = export(cluster);
    assert_eq!(said, "", "a kubelet takes it all over");
    let script = format!(
        "cd {FOLDER}
        stop-kubelet
        kill $(pidof numaward)
        while pidof numaward; do sleep 1; done
        NUMAWARD_ENFORCEMENT_MODE=off timeout 60 numaward run --config config.yaml
        cp kubelet-before/* /var/lib/kubelet/
        cp {EXPORTED}/* /var/lib/kubelet/
        start-kubelet"
    );
    let said = cluster.node.run(&script).unwrap();
    let mut left = cluster.knobs().unwrap();
    left.retain(|line| line.contains("/memory."));
    assert!(left.is_empty(), "protection is left: {left:#?}\n{said}");
    kubectl.must(&["uncordon", node::NAME]);
    cluster.wait_for("the kubelet gives a pod the CPUs that numaward gave it", || {
        // The kubelet writes `cpuset.mems` only when a container starts.
        match cluster.place(LATE_POD.0, LATE_POD.1)? {
            place if place.cpus == before[&full_name(LATE_POD)].cpus => Ok(()),
            place => Err(format!("{place:?}, before: {before:?}")),
        }
    });
    assert_eq!(process(), late, "{} was started again", LATE_POD.0);
    assert_undisturbed(cluster);
    assert_in_state_files(cluster, &[UNDISTURBED_POD, LATE_POD], &before);
    cluster.step("the kubelet has taken over the guarantees of numaward");

    cluster.delete(&[LATE_POD.0]);
    cluster.run(&[wants(RECREATED_POD)]);
    kubectl.must(&ROLLOUT);
    let places = cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]);
    assert_undisturbed(cluster);
    assert_in_state_files(cluster, &[UNDISTURBED_POD, RECREATED_POD], &places);
    cluster.step("the kubelet places again");

    let migrate = overlay(cluster, "migrate", |text| text);
    kubectl.must(&["delete", "--kustomize", &migrate, "--timeout=30m"]);
    cluster.node.run(&format!("rm -r /var/lib/numaward /run/numaward {FOLDER}/kubelet-before")).unwrap();
    assert_eq!(cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]), places);
    assert_undisturbed(cluster);
    cluster.step("numaward is gone, and nobody was moved");
}

/// Returns the memory protection of all pods, without container ids.
fn protection(cluster: &Cluster) -> Result<Vec<String>, String> {
    let mut knobs = cluster.knobs()?;
    knobs.retain(|line| line.contains("/memory."));
    for line in &mut knobs {
        let parts: Vec<_> = line.split('/').filter(|part| part.len() < 64).collect();
        *line = parts.join("/");
    }
    knobs.sort();
    Ok(knobs)
}

/// The machine restarts with the same disk.
fn outlive_a_reboot(cluster: &mut Cluster) {
    cluster.run(&[wants(RECREATED_POD)]);
    let before = cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]);
    let (_, url) = cluster.daemon().unwrap();
    assert_guaranteed(cluster, &url, &before);
    let boot = |cluster: &Cluster| {
        let node = cluster.kubectl.json(&["get", "node", node::NAME])?;
        let id = node["status"]["nodeInfo"]["bootID"].as_str().unwrap_or_default().to_owned();
        Ok::<_, String>((id, condition(&node, "Ready")))
    };
    let (first, _) = boot(cluster).unwrap();
    let protected = protection(cluster).unwrap();
    assert!(!protected.is_empty());
    cluster.node.reboot();
    cluster.step("the machine runs again");
    cluster.wait_for("the node is ready again", || match boot(cluster)? {
        (id, true) if id != first => Ok(()),
        other => Err(format!("{other:?}")),
    });
    for (name, ..) in [UNDISTURBED_POD, RECREATED_POD] {
        cluster.wait_for("a pod runs again", || {
            let pod = cluster.pod(name)?;
            let status = &pod["status"]["containerStatuses"][0];
            let is_new = status["restartCount"].as_u64() > Some(0) && condition(&pod, "Ready");
            if is_new { Ok(()) } else { Err(pod["status"].to_string()) }
        });
    }
    let after = cluster.wait_until_placed(&[UNDISTURBED_POD, RECREATED_POD]);
    exclusive(cluster);
    let (_, url) = cluster.wait_for("numaward runs again", || cluster.daemon());
    assert_guaranteed(cluster, &url, &after);
    cluster.wait_for("memory is protected as before", || match protection(cluster)? {
        now if now == protected => Ok(()),
        now => Err(format!("{now:#?}, before: {protected:#?}")),
    });
    cluster.step("the machine was restarted");
}
