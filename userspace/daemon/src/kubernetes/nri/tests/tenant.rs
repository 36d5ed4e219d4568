//! The largest ledger that a tenant with pods can cause, and a start with it.

use std::{env, path::Path, process::Command};

use super::*;

/// Pods of the tenant.
const PODS: usize = 40;
/// Bytes of the state directory for each pod of a tenant: the account and its copy in the journal.
const STATE_BYTES_PER_POD: u64 = 128 << 10;
/// Containers of one more pod, of which each has a request.
const CONTAINERS: usize = 200;
/// Maximum number of them with a guarantee: the requests of a pod have at most 128 KiB, and each has its labels.
const MAX_GUARANTEED_CONTAINERS: usize = 32;
/// Bytes of the state directory for that pod.
const STATE_BYTES_OF_LARGE_POD: u64 = 512 << 10;
/// Bytes of the state directory without pods.
const EMPTY_STATE_BYTES: u64 = 4 << 20;
/// Resident memory of a start with the largest ledger, for each pod and without pods; a pod of the manifests has 256 MiB.
const RESIDENT_BYTES_PER_POD: u64 = 1 << 20;
const RESIDENT_BYTES: u64 = 32 << 20;
/// The variable with the folder of the host on which a start is measured.
const MEASURED_HOST: &str = "NUMAWARD_TEST_TENANT_HOST";

/// Returns the spec of a pod with as much text as a runtime passes on.
fn excessive(bench: &NriBench, number: usize) -> PodSpec {
    let uid = format!("{number:036}");
    let text = |bytes: usize| format!("{number:04}").repeat(bytes / 4);
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
        ..bench.spec(&uid, "", &[])
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

    // Other tests would count in this process.
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", "kubernetes::nri::tests::tenant::start_with_ledger_is_measured"])
        .arg("--nocapture")
        .env(MEASURED_HOST, bench.dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let measured = text.lines().find_map(|line| line.split("resident after the start: ").nth(1));
    let resident: u64 = measured.unwrap_or_else(|| panic!("{text}")).trim().parse().unwrap();
    println!("resident: {resident} bytes");
    assert!(resident <= RESIDENT_BYTES + (PODS as u64 + 1) * RESIDENT_BYTES_PER_POD, "{resident} bytes");

    let daemon = bench.start().await;
    assert_eq!(daemon.reconciler.allocations().allocations.len(), guaranteed);
    assert_eq!(containers.iter().map(|spec| bench.mems(spec)).collect::<Vec<_>>(), nodes, "no memory moves");
}

/// Starts the reconciler on a host that another test has filled, and prints the peak of this process's memory.
#[test]
fn start_with_ledger_is_measured() {
    let Some(folder) = env::var_os(MEASURED_HOST) else { return };
    let folder = Path::new(&folder);
    let config =
        Config { state_directory: folder.join("state"), host_root: folder.to_owned(), ..Config::default() };
    let machine = Machine::builder().nodes(4).sockets(4).cores_per_node(16).memory(Bytes::gib(64));
    let ports = ReconcilerPorts::new(Arc::new(TestHost::new(machine.build().unwrap())));
    let (reconciler, thread, stop) = fixture::reconciler(&config, &folder.join("cgroup"), ports, None, None);
    assert!(reconciler.allocations().allocations.len() > PODS);
    println!("resident after the start: {}", peak_resident_bytes());
    stop.cancel();
    thread.join().unwrap();
}
