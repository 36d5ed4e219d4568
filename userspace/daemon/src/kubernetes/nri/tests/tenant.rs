//! The largest ledger that a tenant with pods can cause, and a start with it.

use std::{
    env,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    process::Command,
};

use super::*;

/// Pods of the tenant.
const PODS: usize = 40;
/// Bytes of the state directory for each pod of a tenant: the account and its copy in the journal.
const STATE_BYTES_PER_POD: u64 = 128 << 10;
/// Containers of one more pod, of which each has a request.
const CONTAINERS: usize = 200;
/// Maximum number of them with a guarantee: the requests of a pod have at most 32 KiB, and each has its labels.
const MAX_GUARANTEED_CONTAINERS: usize = 8;
/// Bytes of the state directory for that pod.
const STATE_BYTES_OF_LARGE_POD: u64 = 128 << 10;
/// Bytes of the state directory without pods.
const EMPTY_STATE_BYTES: u64 = 4 << 20;
/// Pods on the largest nodes of managed clusters; the kubelet's default is 110.
const PODS_OF_NODE: usize = 250;
/// Bytes of the state directory with that many pods; the size of the journal is a power of two.
const FULL_STATE_BYTES: u64 = 96 << 20;
/// Memory of the daemon's container besides a start: maps of the probes, and threads that start later.
const OTHER_BYTES: u64 = 64 << 20;
/// Manifests with a limit of the memory of the daemon's container, and the text before it.
const LIMITS: [(&str, &str); 2] =
    [("base/daemonset.yaml", "limits: { memory: "), ("helm/numaward/values.yaml", "limits:\n    memory: ")];
/// Resident memory of a start with the largest ledger, for each pod and without pods.
const RESIDENT_BYTES_PER_POD: u64 = 1 << 20;
const RESIDENT_BYTES: u64 = 32 << 20;
/// The variables with the folders of the host on which a start is measured, and of the daemon's state.
const MEASURED_HOST: &str = "NUMAWARD_TEST_TENANT_HOST";
const MEASURED_STATE: &str = "NUMAWARD_TEST_TENANT_STATE";

/// Returns the UID of a pod.
fn uid(number: usize) -> String {
    format!("{number:036}")
}

/// Returns text that contains the number of a pod again and again.
fn text(number: usize, bytes: usize) -> String {
    format!("{number:04}").repeat(bytes / 4)
}

/// Returns the spec of a pod with as much text as a runtime passes on.
fn excessive(bench: &NriBench, number: usize) -> PodSpec {
    let text = |bytes: usize| text(number, bytes);
    let keys: Vec<_> = (0..300).map(|key| format!("example.com/label-{key:04}")).collect();
    // Values beyond the length limit of annotations, and two within it.
    let named = |key: &str| (0..400).map(|number| format!("{key}{number:05}")).collect::<Vec<_>>().join(",");
    let long = ["memory-policy", "resctrl-class", "unknown"].map(|key| (key, text(100_000)));
    let own = long.into_iter().chain([("with", named("with")), ("apart", named("apar"))]);
    PodSpec {
        name: text(252),
        namespace: text(60),
        labels: keys.iter().map(|key| (key.clone(), text(1000))).collect(),
        annotations: own.map(|(key, value)| (format!("numaward.io/{key}"), value)).collect(),
        ..bench.spec(&uid(number), "", &[])
    }
}

/// Returns the bytes of all files below a folder.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
    let size = |entry: fs::DirEntry| match entry.metadata().unwrap() {
        metadata if metadata.is_dir() => bytes_below(&entry.path()),
        metadata => metadata.len(),
    };
    entries.map(size).sum()
}

/// Copies the cgroup of a pod with those of its containers, whose names have the UID of the pod.
fn copy_cgroup(from: &Path, to: &Path, uids: (&str, &str)) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap().replace(uids.0, uids.1);
        if entry.file_type().unwrap().is_dir() {
            copy_cgroup(&entry.path(), &to.join(name), uids);
        } else {
            fs::copy(entry.path(), to.join(name)).unwrap();
        }
    }
}

/// Multiplies the pod with the number [`PODS`] in a stored state and in the cgroups below `root`, so that there are as many pods as a
/// node may have.
fn fill_node(state_directory: &Path, root: &Path) {
    let pods = root.join("kubepods");
    for number in PODS + 1..PODS_OF_NODE {
        let uids = (uid(PODS), uid(number));
        let [from, to] = [&uids.0, &uids.1].map(|uid| pods.join(format!("pod{uid}")));
        copy_cgroup(&from, &to, (&uids.0, &uids.1));
    }
    let id_of = |path: &str| fs::metadata(root.join(path.trim_start_matches('/'))).unwrap().ino();
    fixture::change_stored_state(state_directory, |state| {
        let mut state = serde_json::to_value(state).unwrap();
        let uid_of_pod = uid(PODS);
        for name in ["/ledger/owners", "/guarantees", "/book", "/pods", "/containers"] {
            let map = state.pointer_mut(name).unwrap().as_object_mut().unwrap();
            let entries = map.iter().map(|entry| serde_json::to_string(&entry).unwrap());
            let entries: Vec<_> = entries.filter(|entry| entry.contains(&uid_of_pod)).collect();
            assert!(!entries.is_empty(), "{name}");
            for number in PODS + 1..PODS_OF_NODE {
                let names = (text(PODS, 60), text(number, 60));
                map.extend(entries.iter().map(|entry| {
                    let entry = entry.replace(&uid_of_pod, &uid(number)).replace(&names.0, &names.1);
                    let (key, mut value) =
                        serde_json::from_str::<(String, serde_json::Value)>(&entry).unwrap();
                    match name {
                        "/guarantees" => value["id"] = id_of(value["cgroup"].as_str().unwrap()).into(),
                        "/book" => value["id"] = id_of(&key).into(),
                        _ => {}
                    }
                    (key, value)
                }));
            }
        }
        serde_json::from_value(state).unwrap()
    });
}

/// Returns the memory limit of the daemon's container in a manifest.
fn memory_limit((file, before): (&str, &str)) -> u64 {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
    let manifest = fs::read_to_string(file).unwrap();
    let limit = manifest.split(before).nth(1).unwrap().split_ascii_whitespace().next().unwrap();
    limit.strip_suffix("Mi").unwrap().parse::<u64>().unwrap() << 20
}

/// Returns the peak of the resident memory of a start with this state, in bytes. Other tests would count in this process.
fn start_memory(host: &Path, state: &Path) -> u64 {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "kubernetes::nri::tests::tenant::start_with_ledger_is_measured"])
        .arg("--nocapture")
        .env(MEASURED_HOST, host)
        .env(MEASURED_STATE, state)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let measured = text.lines().find_map(|line| line.split("resident after the start: ").nth(1));
    measured.unwrap_or_else(|| panic!("{text}")).trim().parse().unwrap()
}

/// Returns the highest resident memory of this process, in bytes.
fn peak_resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn largest_ledger_of_a_tenant_is_bounded() {
    let bench = NriBench::new(Arc::new(NoPods), fake::FakeRuntimeConfig::containerd_2_1);
    let daemon = bench.start().await;
    let mut containers = Vec::new();
    for number in 0..PODS {
        let pod = excessive(&bench, number);
        bench.runtime.run_pod(&pod).await.unwrap();
        let mut spec = container(&pod, &"c".repeat(60), 1, Bytes::mib(16));
        // Half a CPU: there are more pods than CPUs.
        spec.cpu_shares = Some(512);
        spec.annotations = [("numaward.io/with".to_owned(), "x".repeat(100_000))].into();
        bench.run(&spec).await.unwrap();
        containers.push(spec);
    }
    assert_eq!(daemon.reconciler.allocations().allocations.len(), PODS);
    let pod = excessive(&bench, PODS);
    bench.runtime.run_pod(&pod).await.unwrap();
    let mut started = 0;
    for number in 0..CONTAINERS {
        let mut spec = container(&pod, &format!("{number:03}{}", "c".repeat(57)), 1, Bytes::mib(1));
        spec.cpu_shares = Some(10);
        // The creation of a container that is refused fails.
        started += usize::from(bench.run(&spec).await.is_ok());
    }
    let guaranteed = daemon.reconciler.allocations().allocations.len();
    println!("of {CONTAINERS} containers, {started} were started, {} with a guarantee", guaranteed - PODS);
    assert!((1..=MAX_GUARANTEED_CONTAINERS).contains(&(guaranteed - PODS)), "{guaranteed}");
    assert_eq!(started, guaranteed - PODS);
    let nodes: Vec<_> = containers.iter().map(|spec| bench.mems(spec)).collect();
    daemon.stop(&bench.runtime).await;

    let bytes = bytes_below(&bench.config.state_directory);
    println!("state: {bytes} bytes");
    let limit = EMPTY_STATE_BYTES + PODS as u64 * STATE_BYTES_PER_POD + STATE_BYTES_OF_LARGE_POD;
    assert!(bytes <= limit, "{bytes} bytes");

    let state = bench.dir.path().join("state of a full node");
    fs::create_dir(&state).unwrap();
    fs::set_permissions(&state, fs::Permissions::from_mode(0o700)).unwrap();
    for entry in fs::read_dir(&bench.config.state_directory).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), state.join(entry.file_name())).unwrap();
    }
    fill_node(&state, &bench.dir.path().join("cgroup"));
    let bytes = bytes_below(&state);
    println!("state of a full node: {bytes} bytes");
    assert!(bytes <= FULL_STATE_BYTES, "{bytes} bytes");
    let resident = start_memory(bench.dir.path(), &bench.config.state_directory);
    println!("resident: {resident} bytes");
    assert!(resident <= RESIDENT_BYTES + (PODS as u64 + 1) * RESIDENT_BYTES_PER_POD, "{resident} bytes");
    let resident = start_memory(bench.dir.path(), &state);
    println!("resident with a full node: {resident} bytes");
    for limit in LIMITS {
        assert!(resident + OTHER_BYTES <= memory_limit(limit), "{limit:?}: {resident} bytes");
    }

    let daemon = bench.start().await;
    assert_eq!(daemon.reconciler.allocations().allocations.len(), guaranteed);
    assert_eq!(containers.iter().map(|spec| bench.mems(spec)).collect::<Vec<_>>(), nodes, "no memory moves");
}

/// Starts the reconciler on a host that another test has filled, and prints the peak of this process's memory.
#[test]
fn start_with_ledger_is_measured() {
    let (Some(folder), Some(state)) = (env::var_os(MEASURED_HOST), env::var_os(MEASURED_STATE)) else {
        return;
    };
    let folder = Path::new(&folder);
    let config = Config { state_directory: state.into(), host_root: folder.to_owned(), ..Config::default() };
    let machine = Machine::builder().nodes(4).sockets(4).cores_per_node(16).memory(Bytes::gib(64));
    let ports = ReconcilerPorts::new(Arc::new(TestHost::new(machine.build().unwrap())));
    let (reconciler, thread, stop) = fixture::reconciler(&config, &folder.join("cgroup"), ports, None, None);
    assert!(reconciler.allocations().allocations.len() > PODS);
    println!("resident after the start: {}", peak_resident_bytes());
    stop.cancel();
    thread.join().unwrap();
}
