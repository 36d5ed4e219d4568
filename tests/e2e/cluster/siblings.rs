//! A node with two CPUs in each core. With `full-pcpus-only`, numaward refuses requests for parts of cores, as the kubelet
//! does. The decisions of the real kubelet under its policy options become conformance vectors, which the strategy `kubelet` has
//! to repeat.

use serde_json::{Value, json};

use super::{
    Cluster, container, decisions, guaranteed, is_installed, pod,
    whole::{Step, Terms, container_spec, record},
};
use crate::{
    containerd::{nodes, numbers},
    deploy::checkout,
};

/// Two nodes of two cores.
const MACHINE: (&str, &str) = ("4,4", "1536M,1024M");
const THREADS: u32 = 2;
const FULL: &str = "full-pcpus-only";
/// Name of the scenario, policy options, topology policy and scope.
const OPTIONS: [(&str, &[&str], &str, &str); 6] = [
    ("whole-cores", &[FULL], "restricted", "container"),
    ("whole-cores", &[FULL], "single-numa-node", "pod"),
    ("whole-cores-spread", &[FULL, "distribute-cpus-across-numa"], "best-effort", "container"),
    ("sockets", &["align-by-socket"], "best-effort", "container"),
    ("cores-spread", &["distribute-cpus-across-cores"], "none", "container"),
    (
        "strict-caches",
        &["strict-cpu-reservation", "prefer-align-cpus-by-uncorecache"],
        "restricted",
        "container",
    ),
];

/// Returns a pod in the format of the vectors, with containers that request these CPUs.
fn vector(name: &str, cpus: &[&str]) -> Value {
    let containers = cpus.iter().enumerate();
    let containers: Vec<_> =
        containers.map(|(index, cpus)| container_spec(&format!("c{index}"), Some((*cpus, "32Mi")))).collect();
    json!({ "name": name, "init_containers": [], "containers": containers })
}

/// Seven CPUs are available to pods; CPU 0 is reserved, but its sibling is not.
fn steps() -> Vec<Step> {
    use Step::{Admit, Remove};
    vec![
        Admit(vector("odd", &["3"])),
        Admit(vector("core", &["2"])),
        Remove("odd"),
        Admit(vector("unlike", &["2", "1"])),
        Remove("unlike"),
        Admit(vector("part", &["500m"])),
        Admit(vector("node", &["4"])),
        Remove("core"),
        Admit(vector("half", &["1"])),
        Remove("half"),
        Remove("node"),
        Admit(vector("pair", &["2", "2"])),
        Remove("part"),
        Admit(vector("many", &["6"])),
    ]
}

#[test]
fn gives_whole_cores_if_configured() {
    let machine = nodes(MACHINE).with_threads(THREADS).unwrap();
    let Some(mut cluster) = Cluster::start(machine) else { return };
    cluster.come_up();
    are_whole(&cluster);
    let machine = decisions::machine(&cluster);
    let folder = checkout("target/kubelet-siblings");
    let mut scenarios = Vec::new();
    for (name, options, policy, scope) in OPTIONS {
        let options: Value = options.iter().map(|option| ((*option).to_owned(), json!("true"))).collect();
        // Some options require feature gates.
        let gates = json!({ "CPUManagerPolicyAlphaOptions": true, "CPUManagerPolicyBetaOptions": true });
        let change = json!({ "cpuManagerPolicyOptions": options, "featureGates": gates });
        let terms = Terms { name, policy, scope, change: &change };
        scenarios.push(record(&cluster, &machine, &terms, steps(), |_| {}));
        decisions::write(&folder, "kubelet-1.36-siblings.json", &scenarios);
        cluster.step(&format!("recorded: {name}, {policy}, {scope}"));
    }
    decisions::replay(&folder);
    cluster.step("repeated");
}

/// numaward assigns whole cores, and reports the reason when it refuses a pod.
fn are_whole(cluster: &Cluster) {
    is_installed(cluster);
    let options = format!("NUMAWARD_CPU_MANAGER_POLICY_OPTIONS={FULL}=true");
    let kubectl = &cluster.kubectl;
    let (before, _) = cluster.daemon().unwrap();
    kubectl.must(&["set", "env", "daemonset/numaward", "--namespace=numaward", &options]);
    cluster.wait_for("numaward has the option", || match cluster.daemon()? {
        (same, _) if same == before => Err("it is still the one without".to_owned()),
        _ => Ok(()),
    });
    let wants = |name, cpus| pod(name, &[container("main", &guaranteed(cpus, 64))]);
    cluster.run(&[wants("core", 2)]);
    cluster.wait_for("a pod has a core to itself", || {
        let cpus = cluster.in_cgroup("core", "main", "cat cpuset.cpus.effective")?;
        match numbers(&cpus).as_slice() {
            [first, second] if first.is_multiple_of(2) && *second == first + 1 && *first > 0 => Ok(()),
            _ => Err(cpus),
        }
    });
    kubectl.apply(&wants("odd", 3));
    let message = cluster.wait_for("a pod is refused", || {
        cluster.events("odd", "NumaPlacementRefused")?.pop().ok_or_else(|| "there is no event".to_owned())
    });
    for words in ["SMTAlignmentError", "numaward cannot place pod default/odd: "] {
        assert!(message.contains(words), "{words}: {message}");
    }
    cluster.step(&format!("a pod was refused: {message}"));
    cluster.delete(&["odd", "core"]);
    let overlay = checkout("deploy/overlays/enforce").display().to_string();
    kubectl.must(&["delete", "--kustomize", &overlay, "--timeout=30m"]);
}
