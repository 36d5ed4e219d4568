//! Applies `deploy/overlays/enforce` to a real Kubernetes cluster and checks that pods get their guarantees.
//!
//! The control plane runs on this host ([`numaward_control_plane`]), the only node runs in a machine ([`node`]). `--kubernetes` names the
//! folder with the programs of Kubernetes; without it, the test is skipped.
//!
//! One cluster serves all steps, because its start takes minutes. No step asserts a duration: each wait has a long timeout, and
//! its failure message contains the last observed state.

mod at_once;
mod chart;
mod claim_faults;
mod claims;
mod decisions;
mod dra;
mod evictions;
mod kubectl;
mod life;
mod load;
mod node;
mod readers;
mod refusals;
mod siblings;
mod whole;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    io::{self, Write as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use numaward_control_plane::{
    authority::Authority,
    control_plane::{self, ControlPlane, KUBELET},
};
use numaward_tests::TestEnvironment;
use numaward_vm::{Cache, GuestTopology};
use serde_json::{Value, json};
use tempfile::TempDir;

use self::{
    kubectl::Kubectl,
    load::Load,
    node::{Node, NodeFiles},
};
use crate::{
    containerd::{nodes, try_numbers},
    deploy::checkout,
};

/// Name of the variable with the folder of the Kubernetes programs.
const KUBERNETES: &str = "NUMAWARD_KUBERNETES";
/// Limits of each wait: emulation is slow, and on a busy host the machine gets a part of a CPU. The first is CPU time of the machine.
const WAIT_CPU_TIME: Duration = Duration::from_mins(10);
const WAIT_TIMEOUT: Duration = Duration::from_mins(40);
const PACE: Duration = Duration::from_secs(1);
/// Name of the folder with the unpacked programs.
const PROGRAMS: &str = "programs";
/// Number of lines of each log that are printed if the test fails.
const TAIL_LINES: &str = "40";
/// CPUs and memory of each node of the machine.
const MACHINE: (&str, &str) = ("3,3", "2560M,1536M");
/// CPUs by node; CPU 0 is never exclusive.
const NODES: [&[u64]; 2] = [&[0, 1, 2], &[3, 4, 5]];

/// Name of a pod without exclusive CPUs that runs during all steps.
const SHARED: &str = "shared";
/// Setting that refuses pods that do not fit on one node.
const RESTRICTED: &str = "NUMAWARD_TOPOLOGY_MANAGER_POLICY=restricted";
/// Arguments that wait until the rollout of the `DaemonSet` is complete.
const ROLLOUT: [&str; 5] =
    ["rollout", "status", "daemonset/numaward", "--namespace=numaward", "--timeout=30m"];

/// A wait for the node, with its limits.
struct Wait<'a> {
    node: &'a Node,
    started: Instant,
    cpu_time: Duration,
}

impl<'a> Wait<'a> {
    fn new(node: &'a Node) -> Self {
        Self { node, started: Instant::now(), cpu_time: node.cpu_time() }
    }

    /// Panics with the reason if a limit is reached.
    #[track_caller]
    fn assert_goes_on(&self, reason: impl Fn() -> String) {
        let (waited, used) = (self.started.elapsed(), self.node.cpu_time().saturating_sub(self.cpu_time));
        assert!(
            waited < WAIT_TIMEOUT && used < WAIT_CPU_TIME,
            "{}: not within {} s, in which the machine used {} s of CPU time",
            reason(),
            waited.as_secs(),
            used.as_secs()
        );
    }
}

/// A running cluster. If the test fails, the logs of its parts are printed.
struct Cluster {
    kubectl: Kubectl,
    node: Node,
    plane: ControlPlane,
    folder: TempDir,
    started: Instant,
}

impl Cluster {
    /// Starts a cluster with this machine as its node. If a program is missing, prints the reason and returns `None`.
    fn start(machine: GuestTopology) -> Option<Self> {
        Self::start_with(machine, |_| Vec::new())
    }

    /// Starts a cluster like [`Self::start`], with additional files in the machine. `more` takes the folder of the cluster's tools, and
    /// returns files of this host with their paths in the machine.
    fn start_with(
        machine: GuestTopology,
        more: impl FnOnce(&Path) -> Vec<(PathBuf, &'static str)>,
    ) -> Option<Self> {
        let started = Instant::now();
        let Some(release) = env::var_os(KUBERNETES).map(PathBuf::from) else {
            // Skipped also if `CI=true`: Debian has no package of Kubernetes.
            eprintln!(
                "skipped: {KUBERNETES} is not set; run `cargo xtask vm test cluster:: --kubernetes DIR`"
            );
            return None;
        };
        let bench = TestEnvironment::open()?;
        let tools = Cache::locate().unwrap().root().join("tools/cluster");
        assert!(tools.is_dir(), "{} is missing; run `cargo xtask vm test cluster::`", tools.display());
        let folder = tempfile::Builder::new().prefix("numaward-cluster-").tempdir().unwrap();
        let programs = folder.path().join(PROGRAMS);
        fs::create_dir(&programs).unwrap();
        control_plane::unpack(&release, &programs, control_plane::PROGRAMS.into_iter().chain([KUBELET]));
        let authority = Authority::new(folder.path());
        let plane = ControlPlane::start(&programs, &tools.join("etcd"), folder.path(), &authority);
        let kubelet = programs.join(KUBELET);
        let files = NodeFiles { kubelet: &kubelet, cni: &tools, more: more(&tools) };
        let node = Node::start(&bench, machine, files, folder.path(), &authority, plane.port())?;
        let kubectl = Kubectl::new(tools.join("kubectl"), plane.kubeconfig("admin"), folder.path());
        Some(Self { kubectl, node, plane, folder, started })
    }

    /// Waits until the node is ready.
    fn come_up(&mut self) {
        self.step("the machine runs");
        self.wait_for("the API server is ready", || self.kubectl.run(&["get", "--raw=/readyz"]));
        self.plane.complete();
        self.wait_for("the node is ready", || {
            let node = self.kubectl.json(&["get", "node", node::NAME])?;
            if condition(&node, "Ready") { Ok(()) } else { Err(node["status"]["conditions"].to_string()) }
        });
        // The controller manager creates it, and every pod needs one.
        let find = ["get", "serviceaccount", "default"];
        self.wait_for("there is a service account", || self.kubectl.run(&find));
        self.step("the node is ready");
    }

    /// Prints the progress, bypassing the output capture of the test harness.
    fn step(&self, text: &str) {
        let _ = writeln!(io::stderr(), "cluster: {:>4} s: {text}", self.started.elapsed().as_secs());
    }

    /// Calls `look` until it returns `Ok`.
    fn wait_for<T>(&self, what: &str, mut look: impl FnMut() -> Result<T, String>) -> T {
        let wait = Wait::new(&self.node);
        loop {
            match look() {
                Ok(seen) => return seen,
                Err(reason) => {
                    let ended = self.plane.ended().or(self.node.ended().then_some("the machine"));
                    assert_eq!(ended, None, "{what}: a part of the cluster has ended: {reason}");
                    wait.assert_goes_on(|| format!("{what}: {reason}"));
                }
            }
            thread::sleep(PACE);
        }
    }

    fn pod(&self, name: &str) -> Result<Value, String> {
        self.kubectl.json(&["get", "pod", name])
    }

    /// Creates pods and waits until they are ready.
    fn run(&self, pods: &[Value]) {
        self.kubectl.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": pods }));
        for pod in pods {
            self.wait_until_ready(pod["metadata"]["name"].as_str().unwrap());
        }
    }

    fn wait_until_ready(&self, name: &str) {
        self.wait_for(&format!("pod {name} is ready"), || {
            let pod = self.pod(name)?;
            if condition(&pod, "Ready") { Ok(()) } else { Err(pod["status"].to_string()) }
        });
    }

    fn delete(&self, pods: &[&str]) {
        self.kubectl.must(&[&["delete", "pod", "--timeout=30m"], pods].concat());
    }

    /// Returns the output of a script that runs in the cgroup folder of a container.
    fn in_cgroup(&self, pod: &str, container: &str, script: &str) -> Result<String, String> {
        let status = self.pod(pod)?["status"].take();
        let all = ["containerStatuses", "initContainerStatuses"].map(|name| status[name].as_array().cloned());
        let mut all = all.into_iter().flatten().flatten();
        let found = all.find(|status| status["name"] == container);
        let id =
            found.as_ref().and_then(|status| status["containerID"].as_str()?.strip_prefix("containerd://"));
        let id = id.ok_or_else(|| format!("{pod}/{container} has no container: {status}"))?;
        // A container that has ended has no cgroup.
        let find = format!("cgroup=$(find /sys/fs/cgroup/kubepods -name {id} | grep .)");
        self.node.run(&format!("{find} && cd $cgroup && {script}"))
    }

    /// Returns the effective CPUs and memory nodes of a container.
    fn place(&self, pod: &str, container: &str) -> Result<ContainerPlace, String> {
        let text = self.in_cgroup(pod, container, "cat cpuset.cpus.effective cpuset.mems.effective")?;
        let files = text.split_once('\n');
        let place = files.and_then(|(cpus, mems)| Some((try_numbers(cpus).ok()?, try_numbers(mems).ok()?)));
        let (cpus, nodes) = place.ok_or_else(|| format!("{pod}/{container}: {text:?}"))?;
        Ok(ContainerPlace { cpus: cpus.into_iter().collect(), nodes: nodes.into_iter().collect() })
    }

    /// Waits until each container has this number of exclusive CPUs and its memory on one node, and [`SHARED`] has the remaining
    /// CPUs. A container that was created while numaward did not answer gets its CPUs later.
    fn wait_until_placed(&self, expected: &[(&str, &str, usize)]) -> Places {
        self.wait_for(&format!("of CPUs of their own, there are {expected:?}"), || {
            let mut places = Places::new();
            let mut left: BTreeSet<u64> = NODES.iter().flat_map(|cpus| cpus.iter().copied()).collect();
            for &(pod, container, count) in expected {
                let place = self.place(pod, container)?;
                let node = NODES.iter().position(|cpus| place.cpus.iter().all(|cpu| cpus.contains(cpu)));
                let on_node = node.is_some_and(|node| place.nodes == BTreeSet::from([node as u64]));
                let all_free = place.cpus.iter().all(|cpu| *cpu != 0 && left.remove(cpu));
                if !on_node || !all_free || place.cpus.len() != count {
                    return Err(format!("{pod}/{container} has {place:?}, others have {places:?}"));
                }
                places.insert(format!("{pod}/{container}"), place);
            }
            let place = self.place(SHARED, "main")?;
            if place.cpus != left || place.nodes.len() != NODES.len() {
                return Err(format!("{SHARED} has {place:?}, others have {places:?}"));
            }
            Ok(places)
        })
    }

    /// Returns the CPUs, nodes and memory protection of all cgroups of pods and their ancestors, by path below `kubepods`.
    fn knobs(&self) -> Result<Vec<String>, String> {
        let names = ["cpuset.cpus", "cpuset.mems", "memory.min", "memory.low"];
        let names = names.map(|name| format!("-name {name}")).join(" -o ");
        let root = "/sys/fs/cgroup/kubepods";
        let find =
            format!("find {root} \\( {names} \\) -exec grep -H . {{}} + | grep -v 'memory.*:0$' | sort");
        Ok(self.node.run(&find)?.lines().map(|line| line.replacen(root, "", 1)).collect())
    }

    /// Returns the messages of events about a pod, filtered by reason.
    fn events(&self, pod: &str, reason: &str) -> Result<Vec<String>, String> {
        let selector = format!("--field-selector=involvedObject.name={pod},reason={reason}");
        let events = self.kubectl.json(&["get", "events", &selector])?;
        let events = events["items"].as_array().into_iter().flatten();
        Ok(events.filter_map(|event| event["message"].as_str().map(str::to_owned)).collect())
    }

    /// Returns the name of the ready pod of the `DaemonSet`, and the URL of its API.
    fn daemon(&self) -> Result<(String, String), String> {
        let pods = self.kubectl.json(&["get", "pods", "--namespace=numaward"])?;
        let pods = pods["items"].as_array().into_iter().flatten();
        let mut alive = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let pod = alive.find(|pod| condition(pod, "Ready")).ok_or("no pod of numaward is ready")?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let url = format!("http://{}:9560/api/v1", text(&pod["status"]["podIP"]));
        Ok((text(&pod["metadata"]["name"]), url))
    }

    /// Returns a response of numaward's HTTP API.
    fn ask(&self, url: &str, what: &str) -> Result<Value, String> {
        let answer = self.node.run(&format!("wget -q -O - {url}/{what}"))?;
        serde_json::from_str(&answer).map_err(|error| format!("{error}: {answer}"))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        let show = |name: &str, text: Result<String, String>| {
            eprintln!("--- {name}\n{}", text.unwrap_or_else(|error| error));
        };
        show("pods", self.kubectl.run(&["describe", "pods", "--all-namespaces"]));
        show("node", self.kubectl.run(&["describe", "nodes"]));
        let tail = format!("tail -n {TAIL_LINES}");
        for log in ["/var/log/pods/numaward_*/*/*.log", "/tmp/kubelet.log", "/tmp/runtime.log"] {
            show(log, self.node.run(&format!("{tail} {log}")));
        }
        for log in ["node", "etcd", "apiserver", "controller-manager", "scheduler"] {
            let path = self.folder.path().join(format!("{log}.log"));
            let output = Command::new("tail").args(["-n", TAIL_LINES]).arg(path).output();
            let output = output.map_err(|error| error.to_string());
            show(log, output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()));
        }
        // These are large and of no use after a failure.
        let _ = fs::remove_dir_all(self.folder.path().join(PROGRAMS));
        let _ = fs::remove_file(self.folder.path().join(node::DISK));
        self.folder.disable_cleanup(true);
        eprintln!("--- the whole logs of the control plane are in {}", self.folder.path().display());
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ContainerPlace {
    cpus: BTreeSet<u64>,
    nodes: BTreeSet<u64>,
}

/// Places by `POD/CONTAINER`.
type Places = BTreeMap<String, ContainerPlace>;

fn condition(object: &Value, name: &str) -> bool {
    let conditions = object["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|it| it["type"] == name && it["status"] == "True")
}

/// Returns the manifest of a container that sleeps.
fn container(name: &str, resources: &Value) -> Value {
    json!({
        "name": name,
        "image": "localhost/test:1",
        "imagePullPolicy": "Never",
        "command": ["sleep", "1000000"],
        "resources": resources,
    })
}

/// Returns resources that make a pod Guaranteed.
fn guaranteed(cpus: u32, mebibytes: u32) -> Value {
    let amounts = json!({ "cpu": cpus.to_string(), "memory": format!("{mebibytes}Mi") });
    json!({ "requests": amounts, "limits": amounts })
}

fn burstable() -> Value {
    json!({ "requests": { "cpu": "50m", "memory": "16Mi" } })
}

fn pod(name: &str, containers: &[Value]) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name },
        "spec": {
            "containers": containers,
            "automountServiceAccountToken": false,
            // The cluster has no DNS.
            "dnsPolicy": "Default",
            // `sleep` as the first process of a container ignores SIGTERM.
            "terminationGracePeriodSeconds": 1,
        },
    })
}

/// Copies the overlays, changes the configuration of one, and returns its path.
fn overlay(cluster: &Cluster, name: &str, change: impl FnOnce(String) -> String) -> String {
    let copy = cluster.folder.path().join("deploy");
    if !copy.exists() {
        let status =
            Command::new("cp").arg("--recursive").arg(checkout("deploy")).arg(&copy).status().unwrap();
        assert!(status.success(), "cp: {status}");
    }
    let overlay = copy.join("overlays").join(name);
    let config = overlay.join("config.yaml");
    fs::write(&config, change(fs::read_to_string(&config).unwrap())).unwrap();
    overlay.display().to_string()
}

/// Returns the path of a copy of the overlay `enforce` with components.
fn component_overlay(cluster: &Cluster, components: &[&str]) -> String {
    // The pods of the tests with claims request nothing else.
    let beyond_quota = "kubernetes:\n  beyondQuotaNamespaces: [default]\n";
    overlay(cluster, "enforce", |config| config.replacen("kubernetes:\n", beyond_quota, 1));
    let folder = cluster.folder.path().join("deploy/overlays/components");
    fs::create_dir(&folder).unwrap();
    let components: Vec<_> = components.iter().map(|name| format!("../../components/{name}")).collect();
    let text = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": ["../enforce"],
        "components": components,
    });
    fs::write(folder.join("kustomization.yaml"), text.to_string()).unwrap();
    folder.display().to_string()
}

#[test]
fn pods_get_their_guarantees() {
    let Some(mut cluster) = Cluster::start(nodes(MACHINE)) else { return };
    cluster.come_up();
    is_tried(&cluster);
    is_installed(&cluster);
    are_placed(&cluster);
    are_refused(&cluster);
    are_resized(&cluster);
    have_several_containers(&cluster);
    outlive_the_kubelet(&cluster);
    are_drained(&cluster);
    is_removed(&cluster);
    cluster.step("done");
}

/// numaward is tried by kustomize, and removed.
fn is_tried(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    let overlay = checkout("deploy/overlays/try").display().to_string();
    kubectl.must(&["apply", "--kustomize", &overlay]);
    cluster.wait_for("numaward runs", || cluster.daemon());
    kubectl.must(&ROLLOUT);
    shows_dry_run(cluster);
    kubectl.must(&["delete", "--kustomize", &overlay, "--timeout=30m"]);
    cluster.step("numaward was tried");
}

/// With `try`, a pod gets an event with its would-be placement, and no knob is written.
fn shows_dry_run(cluster: &Cluster) {
    let before = cluster.knobs().unwrap();
    cluster.run(&[pod("tried", &[container("main", &guaranteed(2, 64))])]);
    let message = cluster.wait_for("a pod has an event of a dry run", || {
        cluster.events("tried", "NumaPlacementDryRun")?.pop().ok_or_else(|| "there is none".to_owned())
    });
    let words = "Dry run: container main of pod default/tried would have had CPUs ";
    assert!(message.starts_with(words) && message.contains("64Mi of memory on node "), "{message}");
    assert_eq!(cluster.knobs().unwrap(), before);
    let place = cluster.place("tried", "main").unwrap();
    assert_eq!((place.cpus.len(), place.nodes.len()), (6, 2), "{place:?}");
    cluster.node.run("! [ -e /var/lib/numaward ] && ! [ -e /run/numaward ]").unwrap();
    cluster.delete(&["tried"]);
}

fn is_installed(cluster: &Cluster) {
    let kubectl = &cluster.kubectl;
    let overlay = checkout("deploy/overlays/enforce");
    kubectl.must(&["apply", "--kustomize", &overlay.display().to_string()]);
    // The unchanged configuration refuses no pod.
    kubectl.must(&["set", "env", "daemonset/numaward", "--namespace=numaward", RESTRICTED]);
    cluster.wait_for("numaward runs", || cluster.daemon());
    kubectl.must(&ROLLOUT);
    cluster.step("numaward is ready");
}

/// Runs pods with two and three exclusive CPUs. Only node 1 has three, so the larger pod is created first.
fn run_two_and_three(cluster: &Cluster) {
    let mut expected = Vec::new();
    for (name, cpus) in [("three", 3_u8), ("two", 2)] {
        cluster.run(&[pod(name, &[container("main", &guaranteed(cpus.into(), 64))])]);
        expected.push((name, "main", cpus.into()));
        cluster.wait_until_placed(&expected);
    }
}

/// Guaranteed pods have exclusive CPUs, and keep them when the pod of numaward is replaced.
fn are_placed(cluster: &Cluster) {
    cluster.run(&[pod(SHARED, &[container("main", &burstable())])]);
    is_protected_on_request(cluster);
    run_two_and_three(cluster);
    let expected = [("two", "main", 2), ("three", "main", 3)];
    let places = cluster.wait_until_placed(&expected);
    cluster.step("pods are placed");
    cluster.wait_for("who has CPUs to itself has no quota of CPU time", || {
        let quotas = cluster.in_cgroup("two", "main", "cat cpu.max ../cpu.max")?;
        if quotas == "max 100000\nmax 100000" { Ok(()) } else { Err(quotas) }
    });
    let (daemon, _) = cluster.daemon().unwrap();
    cluster.kubectl.must(&["delete", "pod", &daemon, "--namespace=numaward", "--timeout=30m"]);
    cluster.wait_for("numaward is back", || match cluster.daemon()? {
        (same, _) if same == daemon => Err("it is still there".to_owned()),
        _ => Ok(()),
    });
    assert_eq!(cluster.wait_until_placed(&expected), places, "nobody was to move");
    cluster.delete(&["two", "three"]);
    cluster.step("numaward was replaced");
}

/// A Burstable pod that requests it by annotation gets a memory guarantee on one node, with protection up to the root of all
/// pods.
fn is_protected_on_request(cluster: &Cluster) {
    let amounts = |mebibytes| json!({ "cpu": "50m", "memory": format!("{mebibytes}Mi") });
    let resources = json!({ "requests": amounts(64), "limits": amounts(128) });
    let mut asks = pod("asks", &[container("main", &resources)]);
    asks["metadata"]["annotations"] = json!({ "numaward.io/guarantee": "memory" });
    cluster.run(&[asks]);
    let protected = || -> Result<Vec<String>, String> {
        let knobs = cluster.knobs()?;
        Ok(knobs.into_iter().filter(|line| line.contains("/memory.")).collect())
    };
    cluster.wait_for("the guaranteed memory of a Burstable pod is protected", || {
        let all = protected()?;
        // Only `memory.low` of the root, the class, the pod and the container is set; no `memory.min`.
        let are_low = all.iter().all(|line| line.ends_with("/memory.low:67108864"));
        let are_of_class = all.iter().filter(|line| line.starts_with("/burstable/")).count();
        if are_low && all.len() == 4 && are_of_class == 3 { Ok(()) } else { Err(format!("{all:#?}")) }
    });
    let place = cluster.place("asks", "main").unwrap();
    assert_eq!(place.nodes.len(), 1, "{place:?}");
    cluster.delete(&["asks"]);
    cluster.wait_for("nothing is protected any more", || match protected()? {
        none if none.is_empty() => Ok(()),
        some => Err(format!("{some:#?}")),
    });
    cluster.step("a Burstable pod had its memory protected");
}

/// Runs the pods `one` and `pair` so that both nodes of the machine have one free CPU, and returns their places.
fn leave_one_cpu_on_each_node(cluster: &Cluster) -> Places {
    let wants = |name, cpus| pod(name, &[container("main", &guaranteed(cpus, 64))]);
    // Only node 1 has three CPUs; then only node 0 has one; then only node 1 has two.
    cluster.run(&[wants("trio", 3)]);
    cluster.wait_until_placed(&[("trio", "main", 3)]);
    cluster.run(&[wants("one", 1)]);
    cluster.wait_until_placed(&[("one", "main", 1), ("trio", "main", 3)]);
    cluster.delete(&["trio"]);
    cluster.run(&[wants("pair", 2)]);
    cluster.wait_until_placed(&[("one", "main", 1), ("pair", "main", 2)])
}

/// A pod requests two CPUs of one node while no node has two free. It starts as soon as they are free.
fn are_refused(cluster: &Cluster) {
    let expected = [("one", "main", 1), ("pair", "main", 2)];
    let places = leave_one_cpu_on_each_node(cluster);
    cluster.kubectl.apply(&pod("late", &[container("main", &guaranteed(2, 64))]));
    for (reason, word) in [("NumaPlacementRefused", "TopologyAffinityError"), ("Failed", "numaward")] {
        let message = cluster.wait_for(&format!("a pod has the event {reason}"), || {
            cluster.events("late", reason)?.pop().ok_or_else(|| "there is none".to_owned())
        });
        for words in [
            word,
            "numaward cannot place pod default/late: ",
            "node 0: cpu requested 2, free 1",
            "node 1: cpu requested 2, free 1",
        ] {
            assert!(message.contains(words), "{words}: {message}");
        }
    }
    assert_eq!(cluster.pod("late").unwrap()["status"]["phase"], "Pending");
    assert_eq!(cluster.wait_until_placed(&expected), places, "nobody was to move");
    cluster.step("a pod was refused");
    cluster.delete(&["one"]);
    cluster.wait_until_ready("late");
    cluster.wait_until_placed(&[("late", "main", 2), ("pair", "main", 2)]);
    cluster.delete(&["late"]);
    cluster.step("it runs where there is room");
}

/// The pod `pair` is resized to more and fewer CPUs while it runs. A resize beyond the capacity of its node fails.
fn are_resized(cluster: &Cluster) {
    let resize = |cpus: u32| {
        let containers = json!([{ "name": "main", "resources": guaranteed(cpus, 96) }]);
        let patch = json!({ "spec": { "containers": containers } }).to_string();
        cluster.kubectl.must(&["patch", "pod", "pair", "--subresource=resize", "--patch", &patch]);
    };
    let before = cluster.wait_until_placed(&[("pair", "main", 2)]);
    resize(3);
    cluster.wait_until_placed(&[("pair", "main", 3)]);
    resize(2);
    assert_eq!(cluster.wait_until_placed(&[("pair", "main", 2)]), before);
    resize(4);
    let message = cluster.wait_for("a resize fails", || {
        cluster.events("pair", "ResizeError")?.pop().ok_or_else(|| "there is no event".to_owned())
    });
    let words = "numaward cannot resize container main of pod default/pair: its nodes have too little free capacity: \
                 node 1: cpu requested 2, free 1";
    assert!(message.contains(words), "{message}");
    assert_eq!(cluster.wait_until_placed(&[("pair", "main", 2)]), before);
    cluster.delete(&["pair"]);
    cluster.step("a pod was resized");
}

/// CPUs of an init container are reused, a sidecar keeps its own CPUs, and a pod may have pod-level resources.
fn have_several_containers(cluster: &Cluster) {
    let mut crew = pod("crew", &[container("main", &guaranteed(2, 64))]);
    let mut init = container("init", &guaranteed(1, 32));
    init["command"] = json!(["sleep", "1"]);
    let mut sidecar = container("sidecar", &guaranteed(1, 32));
    sidecar["restartPolicy"] = json!("Always");
    crew["spec"]["initContainers"] = json!([init, sidecar]);
    cluster.run(&[crew]);
    cluster.wait_until_placed(&[("crew", "sidecar", 1), ("crew", "main", 2)]);
    cluster.delete(&["crew"]);
    cluster.step("a pod with an init container and a sidecar was placed");

    let mut whole = pod("whole", &[container("main", &guaranteed(2, 64)), container("helper", &json!({}))]);
    whole["spec"]["resources"] = guaranteed(3, 128);
    cluster.run(&[whole]);
    cluster.wait_until_placed(&[("whole", "main", 2), ("whole", "helper", 1)]);
    cluster.delete(&["whole"]);
    cluster.step("a pod with resources as a whole was placed");
}

/// The kubelet restarts and reconciles the cgroups of all pods; no placement changes.
fn outlive_the_kubelet(cluster: &Cluster) {
    run_two_and_three(cluster);
    let before = cluster.knobs().unwrap();
    assert!(before.iter().any(|line| line == "/memory.min:100663296"), "{before:#?}");
    cluster.node.run("stop-kubelet && start-kubelet").unwrap();
    // If the kubelet starts a new pod, it has reconciled the existing ones.
    cluster.run(&[pod("next", &[container("main", &burstable())])]);
    cluster.delete(&["next"]);
    cluster.wait_for("all is as before", || match cluster.knobs()? {
        after if after == before => Ok(()),
        after => Err(format!("{after:#?}\nbefore: {before:#?}")),
    });
    cluster.step("the kubelet was restarted");
}

/// After the drain, no guarantee is left.
fn are_drained(cluster: &Cluster) {
    cluster.kubectl.must(&["drain", node::NAME, "--ignore-daemonsets", "--force", "--timeout=30m"]);
    let (_, url) = cluster.daemon().unwrap();
    cluster.wait_for("there are no guarantees", || match cluster.ask(&url, "allocations")? {
        held if held["allocations"] == json!([]) => Ok(()),
        held => Err(held.to_string()),
    });
    cluster.kubectl.must(&["uncordon", node::NAME]);
    cluster.step("the node was drained");
}

/// Removes numaward as docs/kubernetes.md describes, while pods are created and deleted: numaward restores all knobs, and places
/// no pod afterwards.
fn is_removed(cluster: &Cluster) {
    let wants = |name| pod(name, &[container("main", &guaranteed(2, 64))]);
    cluster.run(&[wants("two"), pod(SHARED, &[container("main", &burstable())])]);
    cluster.wait_until_placed(&[("two", "main", 2)]);
    let overlay = overlay(cluster, "enforce", |config| config + "\nenforcement: {mode: off}\n");
    let mut load = Load::new(cluster);
    load.keep_on("pods come and go", |_| true);
    load.expect_no_cpus();
    cluster.kubectl.must(&["apply", "--kustomize", &overlay]);
    load.keep_on("numaward has given all back", |cluster| {
        cluster.knobs().is_ok_and(|mut left| {
            // The kubelet writes all CPUs and nodes to its cgroups; the set of a cgroup with processes cannot be emptied again.
            left.retain(|line| !line.ends_with("/cpuset.cpus:0-5") && !line.ends_with("/cpuset.mems:0-1"));
            left.is_empty()
        })
    });
    cluster.kubectl.must(&ROLLOUT);
    cluster.kubectl.must(&["delete", "--kustomize", &overlay, "--wait=false"]);
    load.keep_on("numaward was removed", |cluster| {
        let found = cluster.kubectl.run(&["get", "namespace", "numaward", "--ignore-not-found"]);
        found.is_ok_and(|found| found.is_empty())
    });
    load.end();
    cluster.run(&[wants("new")]);
    for name in ["two", "new"] {
        let place = cluster.place(name, "main").unwrap();
        assert_eq!((place.cpus.len(), place.nodes.len()), (6, 2), "{name}: {place:?}");
    }
    cluster.step("pods are placed no longer");
}
