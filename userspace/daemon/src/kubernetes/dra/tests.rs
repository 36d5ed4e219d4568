//! A kubelet and an API server that are simulated, and the daemon's reconciler and ledger.

mod host;

use std::{collections::BTreeMap, os::unix::net::UnixListener, sync::Mutex as Lock, thread::JoinHandle};

use numaward_control::testing::{self as fixture, TestHost};
use numaward_guarantee::ports::Ports;
use numaward_kube::{
    api::{self, ApiMetrics, EventWriter, fake::FakeApiServer},
    dra::{
        fake::{FakeKubelet, Version},
        messages::{HealthStatus, PreparedDevices},
        status::StatusWriter,
    },
};
use numaward_model::port::ObservedHost as _;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

const V1: Version = Version::V1;
const PLUGIN: &str = "var/lib/kubelet/plugins/numaward.io/dra.sock";
const REGISTRATION: &str = "var/lib/kubelet/plugins_registry/numaward.io-reg.sock";

/// The shared pool, and the conditions of claims, when devices were published.
type PublishedState = (String, Vec<String>);

/// A host of two nodes with four CPUs each, one of which is reserved, on which the daemon can be started several times.
struct DraBench {
    dir: TempDir,
    server: Arc<FakeApiServer>,
    host: Arc<TestHost>,
    config: Config,
    /// At each publication of the devices: the shared pool, and the conditions of all claims.
    publications: Arc<Lock<Vec<PublishedState>>>,
}

/// A running daemon.
struct RunningDaemon {
    reconciler: ReconcilerHandle,
    preparer: ClaimPreparer,
    refused: RefusedRequests,
    reports: Arc<Lock<Vec<Result<(), String>>>>,
    thread: JoinHandle<()>,
    stop: CancellationToken,
    serving: tokio::task::JoinHandle<()>,
}

impl RunningDaemon {
    async fn stop(self) {
        self.stop.cancel();
        self.serving.await.unwrap();
        spawn_blocking(move || self.thread.join().unwrap()).await.unwrap();
    }

    /// Returns the UIDs of the reserved claims.
    async fn reserved(&self) -> Vec<String> {
        self.reconciler.reserved_claims().await.unwrap().keys().cloned().collect()
    }
}

impl DraBench {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("var/lib/kubelet/plugins_registry")).unwrap();
        let mut config = Config {
            state_directory: dir.path().join("state"),
            host_root: dir.path().to_owned(),
            ..Config::default()
        };
        config.kubernetes.beyond_quota_namespaces.insert("ns".to_owned());
        let host = Arc::new(TestHost::small());
        fixture::cgroup(&dir.path().join("cgroup"), &host.machine.lock().unwrap());
        fs::write(dir.path().join("kubeconfig"), "").unwrap();
        let server = FakeApiServer::start().await.unwrap();
        fs::write(dir.path().join("kubeconfig"), server.kubeconfig()).unwrap();
        Self { dir, server: Arc::new(server), host, config, publications: Arc::default() }
    }

    /// Starts the reconciler and the plugin.
    async fn start(&self) -> RunningDaemon {
        let root = self.dir.path().join("cgroup");
        let (reconciler, thread, stop) =
            fixture::reconciler(&self.config, &root, Ports::new(self.host.clone()), None, None);
        let client = api::connect(Some(&self.path("kubeconfig"))).await.unwrap();
        let reader = AllocationReader { client, node: "n1".to_owned(), metrics: ApiMetrics::default() };
        let (events, queue) = EventWriter::new(ApiMetrics::default());
        let (pods, client) = (Pods::new(events), reader.client.clone());
        let (following, until) = (pods.clone(), stop.clone());
        tokio::spawn(queue.run(client.clone(), "n1".to_owned(), ApiMetrics::default(), until.clone()));
        tokio::spawn(async move {
            following.follow(client, "n1".to_owned(), ApiMetrics::default(), Arc::new(|_| ()), until).await;
        });
        let kubernetes = watch::Sender::new(self.config.kubernetes.clone()).subscribe();
        let host = self.host.clone();
        let host: HostReader =
            Arc::new(move || (Arc::new(host.assigned.lock().unwrap().clone()), host.machine()));
        let writer = StatusWriter { client: reader.client.clone(), metrics: ApiMetrics::default() };
        let nominated = pods.other();
        let preparer =
            ClaimPreparer::new((&self.config, kubernetes), reader, pods, (reconciler.clone(), host));
        let refused = RefusedRequests::default();
        self.place(preparer.clone(), (writer, nominated), refused.clone(), &stop);
        let reports = Arc::new(Lock::new(Vec::new()));
        let reported = reports.clone();
        let report: Report = Arc::new(move |result| reported.lock().unwrap().push(result));
        let sockets = PluginSockets::new(&self.config);
        let serving = tokio::spawn(serve(preparer.clone(), sockets, report, stop.clone()));
        RunningDaemon { reconciler, preparer, refused, reports, thread, stop, serving }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    /// Waits for the socket of the registration, registers the plugin, and connects to it.
    async fn register(&self) -> FakeKubelet {
        let registration = until_connected(&self.path(REGISTRATION)).await;
        let info = registration.register("").await.unwrap();
        assert_eq!(info.endpoint, "/var/lib/kubelet/plugins/numaward.io/dra.sock");
        until_connected(&self.path(PLUGIN)).await
    }

    /// Creates a claim with these amounts of `node-N`, allocated to one pod.
    fn allocate(&self, name: &str, node: u32, cpus: u32) -> ClaimId {
        self.allocate_with(name, node, cpus, |_| {})
    }

    fn allocate_with(&self, name: &str, node: u32, cpus: u32, change: impl FnOnce(&mut Value)) -> ClaimId {
        let result = json!({"request": "numa", "driver": "numaward.io", "pool": "n1", "device": format!("node-{node}"),
            "shareID": "s1", "consumedCapacity": {"cpu": cpus.to_string(), "memory": "1Gi"}});
        let uid = format!("uid-{name}");
        let mut claim = json!({"metadata": {"name": name, "namespace": "ns", "uid": uid},
            "status": {"allocation": {"devices": {"results": [result]}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": format!("pod-{name}")}]}});
        change(&mut claim);
        self.server.put_claim(claim);
        ClaimId { namespace: "ns".to_owned(), uid, name: name.to_owned() }
    }

    /// Returns the specifications for the container runtime by file name.
    fn specifications(&self) -> BTreeMap<String, Value> {
        let files = fs::read_dir(self.path("var/run/cdi")).into_iter().flatten().map(Result::unwrap);
        files
            .map(|file| {
                let text = serde_json::from_slice(&fs::read(file.path()).unwrap()).unwrap();
                (file.file_name().into_string().unwrap(), text)
            })
            .collect()
    }

    fn shared_pool(&self) -> String {
        self.host.assigned.lock().unwrap().ledger.shared_pool().to_string()
    }
}

async fn until_connected(socket: &Path) -> FakeKubelet {
    for _ in 0..1000 {
        if let Ok(kubelet) = FakeKubelet::connect(socket).await {
            return kubelet;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("no server listens on {}", socket.display());
}

async fn prepare(kubelet: &FakeKubelet, claim: &ClaimId) -> PreparedDevices {
    let prepared = kubelet.prepare(V1, vec![claim.clone()]).await.unwrap();
    prepared.claims.get(&claim.uid).unwrap().clone()
}

async fn unprepare(kubelet: &FakeKubelet, claim: &ClaimId) -> String {
    let unprepared = kubelet.unprepare(V1, vec![claim.clone()]).await.unwrap();
    unprepared.claims.get(&claim.uid).unwrap().error.clone()
}

#[tokio::test]
async fn claim_is_prepared_and_unprepared() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    let claim = bench.allocate("db", 1, 3);
    let prepared = prepare(&kubelet, &claim).await;
    let [device] = &prepared.devices[..] else { panic!("{prepared:?}") };
    let expected = Device {
        request_names: vec!["numa".to_owned()],
        pool_name: "n1".to_owned(),
        device_name: "node-1".to_owned(),
        cdi_device_ids: vec!["numaward.io/claim=claim-uid-db".to_owned()],
        share_id: Some("s1".to_owned()),
    };
    assert_eq!(*device, expected);
    assert_eq!(
        (bench.shared_pool(), daemon.reserved().await),
        ("0-3,7".to_owned(), vec!["uid-db".to_owned()])
    );
    let specifications = bench.specifications();
    assert!(specifications.keys().eq(["numaward.io-claim_uid-db.json"]));
    // A kubelet of before, and one that starts again.
    for version in [Version::V1Beta1, V1] {
        fs::remove_dir_all(bench.path("var/run/cdi")).unwrap();
        let again = kubelet.prepare(version, vec![claim.clone()]).await.unwrap();
        assert_eq!(again.claims.get("uid-db"), Some(&prepared));
        assert_eq!(bench.specifications(), specifications);
    }
    // The claim may be deleted before it is unprepared.
    let deleted = ClaimId { name: "deleted".to_owned(), ..claim };
    for _ in 0..2 {
        assert_eq!(unprepare(&kubelet, &deleted).await, "");
    }
    assert_eq!((bench.shared_pool(), daemon.reserved().await), ("0-7".to_owned(), Vec::new()));
    assert!(bench.specifications().is_empty());
    let never = ClaimId { uid: "never".to_owned(), ..deleted };
    assert_eq!(unprepare(&kubelet, &never).await, "");
    drop(kubelet);
    daemon.stop().await;
    assert!(!bench.path(REGISTRATION).exists() && !bench.path(PLUGIN).exists());
}

#[tokio::test]
async fn errors_are_of_single_claims() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    let good = bench.allocate("good", 1, 1);
    let large = bench.allocate("large", 1, 4);
    let other = bench.allocate_with("other", 0, 1, |claim| {
        claim["status"]["allocation"]["devices"]["results"][0]["driver"] = json!("gpu.example");
    });
    let recreated = ClaimId { uid: "uid-of-before".to_owned(), ..bench.allocate("recreated", 0, 1) };
    let unknown = ClaimId { name: "unknown".to_owned(), uid: "uid-unknown".to_owned(), ..good.clone() };
    let shared = bench.allocate_with("shared", 0, 1, |claim| {
        claim["status"]["reservedFor"] = json!([{"uid": "a"}, {"uid": "b"}]);
    });
    let claims = vec![good, large, other, recreated, unknown, shared];
    let prepared = kubelet.prepare(V1, claims).await.unwrap().claims;
    assert_eq!((prepared.len(), prepared["uid-good"].error.as_str()), (6, ""));
    for (uid, expected) in [
        ("uid-large", "node 1: cpu requested 4, free 3"),
        ("uid-other", "no device of numaward.io"),
        ("uid-of-before", "has the UID uid-recreated"),
        ("uid-unknown", "was deleted"),
        ("uid-shared", "reserved for 2 consumers"),
    ] {
        let result = &prepared[uid];
        assert!(result.error.contains(expected) && result.devices.is_empty(), "{uid}: {result:?}");
    }
    assert_eq!(daemon.reserved().await, ["uid-good"]);
    assert_eq!(bench.specifications().len(), 1);
    daemon.stop().await;
}

/// A crash may happen after each step. The kubelet then calls again, or the daemon continues at its start.
#[tokio::test]
async fn crash_loses_and_leaks_nothing() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    let claim = bench.allocate("db", 1, 3);
    // After the ledger: the specification cannot be written.
    fs::create_dir_all(bench.path("var/run")).unwrap();
    fs::write(bench.path("var/run/cdi"), "").unwrap();
    let failed = prepare(&kubelet, &claim).await;
    assert!(failed.error.contains("var/run/cdi"), "{failed:?}");
    assert_eq!(daemon.reserved().await, ["uid-db"]);
    fs::remove_file(bench.path("var/run/cdi")).unwrap();
    drop(kubelet);
    daemon.stop().await;

    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    let specifications = bench.specifications();
    assert_eq!(specifications.len(), 1, "before the plugin can be registered");
    assert_eq!(prepare(&kubelet, &claim).await.error, "");
    assert_eq!((bench.specifications(), bench.shared_pool()), (specifications.clone(), "0-3,7".to_owned()));
    drop(kubelet);
    daemon.stop().await;

    // A reboot empties the folder. The kubelet may not call before the containers start.
    fs::remove_dir_all(bench.path("var/run/cdi")).unwrap();
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    assert_eq!(bench.specifications(), specifications);
    // Between the two steps of the end: the specification is gone, and the reservation is not.
    fs::remove_dir_all(bench.path("var/run/cdi")).unwrap();
    assert_eq!(unprepare(&kubelet, &claim).await, "");
    assert_eq!((bench.shared_pool(), daemon.reserved().await), ("0-7".to_owned(), Vec::new()));
    drop(kubelet);
    daemon.stop().await;
    let daemon = bench.start().await;
    bench.register().await;
    assert!(bench.specifications().is_empty() && daemon.reserved().await.is_empty());
    daemon.stop().await;
}

#[tokio::test]
async fn abandoned_call_is_completed() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let claim = bench.allocate("db", 1, 3);
    let call = daemon.preparer.prepare(&claim);
    assert!(timeout(Duration::ZERO, call).await.is_err());
    while bench.specifications().is_empty() {
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(daemon.reserved().await, ["uid-db"]);
    daemon.stop().await;
}

#[tokio::test]
async fn sockets_are_created_again() {
    let bench = DraBench::new().await;
    // A killed daemon leaves its sockets behind.
    let private = bench.path(PLUGIN);
    fs::create_dir_all(private.parent().unwrap()).unwrap();
    for path in [PLUGIN, REGISTRATION] {
        drop(UnixListener::bind(bench.path(path)).unwrap());
    }
    let daemon = bench.start().await;
    drop(bench.register().await);
    // The folders of the kubelet are emptied.
    for path in [REGISTRATION, PLUGIN] {
        fs::remove_file(bench.path(path)).unwrap();
        drop(bench.register().await);
    }
    let claim = bench.allocate("db", 1, 3);
    assert_eq!(prepare(&bench.register().await, &claim).await.error, "");
    let names: Vec<_> = fs::read_dir(bench.path(REGISTRATION).parent().unwrap())
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(names, ["numaward.io-reg.sock"]);
    daemon.stop().await;
}

#[tokio::test]
async fn socket_of_running_daemon_is_kept() {
    let bench = DraBench::new().await;
    fs::create_dir_all(bench.path(PLUGIN).parent().unwrap()).unwrap();
    let other = UnixListener::bind(bench.path(PLUGIN)).unwrap();
    let daemon = bench.start().await;
    while daemon.reports.lock().unwrap().is_empty() {
        sleep(Duration::from_millis(10)).await;
    }
    let report = daemon.reports.lock().unwrap()[0].clone().unwrap_err();
    assert!(report.contains("another process") && report.contains("dra.sock"), "{report}");
    assert!(!bench.path(REGISTRATION).exists(), "a plugin that is not served is not registered");
    daemon.stop().await;
    assert!(bench.path(PLUGIN).exists());
    drop(other);
}

/// Returns a pod that requests 500m more than these CPUs, and 1 GiB.
fn pod(name: &str, cpus: &str) -> Value {
    json!({"metadata": {"name": name, "namespace": "ns", "uid": format!("pod-{name}")}, "spec": {"nodeName": "n1",
        "containers": [{"name": "main", "resources": {"requests": {"cpu": cpus, "memory": "512Mi"}}},
            {"name": "side", "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}}}]}})
}

/// A quota counts the requests of pods, and not their claims.
#[tokio::test]
async fn claim_gets_no_more_than_its_pod_requests() {
    let mut bench = DraBench::new().await;
    bench.config.kubernetes.beyond_quota_namespaces.clear();
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    bench.server.put_pod(pod("small", "1"));
    let error = prepare(&kubelet, &bench.allocate("small", 1, 2)).await.error;
    assert!(error.contains("BeyondRequests") && error.contains("2 of cpu"), "{error}");
    assert!(daemon.reserved().await.is_empty() && bench.specifications().is_empty());
    bench.server.put_pod(pod("large", "1500m"));
    assert_eq!(prepare(&kubelet, &bench.allocate("large", 1, 2)).await.error, "");
    // The kubelet knows the pod earlier.
    let late = bench.allocate("late", 1, 2);
    let (prepared, ()) = tokio::join!(prepare(&kubelet, &late), async {
        sleep(Duration::from_millis(300)).await;
        bench.server.put_pod(pod("late", "1500m"));
    });
    assert_eq!(prepared.error, "");
    drop(kubelet);
    daemon.stop().await;
}

#[tokio::test]
async fn claim_follows_requests_of_its_pod() {
    let mut bench = DraBench::new().await;
    bench.config.kubernetes.beyond_quota_namespaces.clear();
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    bench.server.put_pod(pod("a", "2500m"));
    let claim = bench.allocate("a", 1, 3);
    assert_eq!(prepare(&kubelet, &claim).await.error, "");
    assert_eq!(bench.shared_pool(), "0-3,7");
    for (cpus, pool, reason, note) in [
        (
            "1600m",
            "0-3,6-7",
            "NumaClaimLimited",
            "resource claim a has 2 of 3 cpu, 1073741824 of 1073741824 memory",
        ),
        (
            "100m",
            "0-7",
            "NumaClaimLimited",
            "resource claim a has 0 of 3 cpu, 1073741824 of 1073741824 memory",
        ),
        (
            "2500m",
            "0-3,7",
            "NumaClaimRestored",
            "resource claim a has 3 of 3 cpu, 1073741824 of 1073741824 memory",
        ),
    ] {
        let events = bench.server.events().len();
        bench.server.put_pod(pod("a", cpus));
        until(|| bench.shared_pool() == pool && bench.server.events().len() > events, cpus).await;
        let event = bench.server.events().pop().unwrap();
        assert_eq!(
            (event["reason"].as_str(), event["regarding"]["name"].as_str()),
            (Some(reason), Some("a"))
        );
        assert!(event["note"].as_str().unwrap().starts_with(note), "{event}");
    }
    // The kubelet asks again, and the claim stays limited.
    bench.server.put_pod(pod("a", "500m"));
    until(|| bench.host.assigned.lock().unwrap().ledger.shared_pool().len() == 7, "500m").await;
    let pool = bench.shared_pool();
    assert_eq!(prepare(&kubelet, &claim).await.error, "");
    assert_eq!(bench.shared_pool(), pool);
    assert_eq!(unprepare(&kubelet, &claim).await, "");
    assert_eq!(bench.shared_pool(), "0-7");
    drop(kubelet);
    daemon.stop().await;
}

async fn until(is_reached: impl Fn() -> bool, what: &str) {
    for _ in 0..1000 {
        if is_reached() {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} is not reached in time");
}

/// Sets the parameters of a claim or of its class.
fn set_parameters(claim: &mut Value, source: &str, fields: &Value) {
    let mut parameters = json!({"apiVersion": "numaward.io/v1alpha1", "kind": "Placement"});
    parameters.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    claim["status"]["allocation"]["devices"]["config"] = json!([{"source": source, "requests": [], "opaque": {"driver": "numaward.io", "parameters": parameters}}]);
}

/// A class of L3 caches and hidden siblings are not for everyone: no quota counts them.
#[tokio::test]
async fn parameters_of_a_claim_are_used() {
    let mut bench = DraBench::new().await;
    bench.config.kubernetes.beyond_quota_namespaces.clear();
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    for (name, source, fields, expected) in [
        ("cache", "FromClaim", json!({"sameCache": true, "isolate": true}), ""),
        ("hides", "FromClaim", json!({"hideSiblings": true}), "the resource claim have hideSiblings"),
        ("admin", "FromClass", json!({"hideSiblings": true}), ""),
        (
            "nodes",
            "FromClaim",
            json!({"nodes": "0"}),
            "of the resource claim for numaward.io are refused: nodes:",
        ),
        ("class", "FromClass", json!({"resctrlClass": "none"}), "placement.resctrlClass"),
    ] {
        bench.server.put_pod(pod(name, "500m"));
        let claim = bench.allocate_with(name, 1, 1, |claim| set_parameters(claim, source, &fields));
        let error = prepare(&kubelet, &claim).await.error;
        assert!(error.contains(expected) && error.is_empty() == expected.is_empty(), "{name}: {error}");
        let reserved = daemon.reconciler.reserved_claims().await.unwrap();
        let part = reserved.get(&claim.uid).map(|claim| &claim.parts[0].terms);
        assert_eq!(part.is_some(), expected.is_empty(), "{name}");
        assert!(part.is_none_or(
            |terms| terms.same_cache == (name == "cache") && terms.hide_siblings == (name == "admin")
        ));
    }
    drop(kubelet);
    daemon.stop().await;
}

#[tokio::test]
async fn health_is_that_of_claimed_nodes() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    assert_eq!(prepare(&kubelet, &bench.allocate("db", 1, 3)).await.error, "");
    // A kernel that counts memory errors.
    for (file, pages) in [("failed", "1\n"), ("ignored", "2\n"), ("recovered", "7\n")] {
        let dir = bench.path("sys/devices/system/node/node0/memory_failure");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(file), pages).unwrap();
    }
    let list = kubelet.watch_health().await.unwrap().message().await.unwrap().unwrap();
    let states: Vec<_> = list
        .devices
        .iter()
        .map(|device| {
            let id = device.device.clone().unwrap();
            (id.pool_name, id.device_name, device.health(), device.message.as_str())
        })
        .collect();
    let id = |name: &str| ("n1".to_owned(), name.to_owned());
    let state = |(pool, name), health, message| (pool, name, health, message);
    assert_eq!(
        states,
        [
            state(id("node-0"), HealthStatus::Unhealthy, "3 pages with memory errors are in use"),
            state(id("node-1"), HealthStatus::Healthy, ""),
        ]
    );
    drop(kubelet);
    daemon.stop().await;
}

#[tokio::test]
async fn claim_has_several_devices() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let kubelet = bench.register().await;
    let claim = bench.allocate_with("db", 1, 3, |claim| {
        let results = &mut claim["status"]["allocation"]["devices"]["results"];
        let mut second = results[0].clone();
        (second["device"], second["shareID"]) = (json!("node-0"), json!("s2"));
        second["consumedCapacity"] = json!({"cpu": "1", "memory": "1Gi"});
        results.as_array_mut().unwrap().push(second);
    });
    let prepared = prepare(&kubelet, &claim).await;
    let devices: Vec<_> = prepared
        .devices
        .iter()
        .map(|device| (device.device_name.as_str(), device.share_id.as_deref()))
        .collect();
    assert_eq!(
        (devices, prepared.error.as_str()),
        (vec![("node-1", Some("s1")), ("node-0", Some("s2"))], "")
    );
    assert_eq!(bench.shared_pool(), "0,2-3,7");
    assert_eq!(prepare(&kubelet, &claim).await, prepared, "the kubelet asks again");
    // One of several devices has no room.
    let large = bench.allocate_with("large", 0, 1, |claim| {
        let results = &mut claim["status"]["allocation"]["devices"]["results"];
        let mut second = results[0].clone();
        (second["device"], second["consumedCapacity"]["cpu"]) = (json!("node-1"), json!("2"));
        results.as_array_mut().unwrap().push(second);
    });
    let error = prepare(&kubelet, &large).await.error;
    assert!(error.contains("node 1: cpu requested 2, free 1"), "{error}");
    assert_eq!(
        (bench.shared_pool(), daemon.reserved().await),
        ("0,2-3,7".to_owned(), vec!["uid-db".to_owned()])
    );
    assert_eq!(unprepare(&kubelet, &claim).await, "");
    assert_eq!(bench.shared_pool(), "0-7");
    drop(kubelet);
    daemon.stop().await;
}

#[tokio::test]
async fn claim_shows_what_it_has() {
    let bench = DraBench::new().await;
    let daemon = bench.start().await;
    let claim = bench.allocate("db", 1, 3);
    assert_eq!(prepare(&bench.register().await, &claim).await.error, "");
    let host = bench.host.clone();
    let writer = StatusWriter {
        client: api::connect(Some(&bench.path("kubeconfig"))).await.unwrap(),
        metrics: ApiMetrics::default(),
    };
    let reporter = StatusReporter {
        writer,
        node: "n1".to_owned(),
        reconciler: daemon.reconciler.clone(),
        host: Arc::new(move || (Arc::new(host.assigned.lock().unwrap().clone()), host.machine())),
        workloads: Arc::new(|| numaward_api::Workloads { workloads: Vec::new() }),
    };
    let mut written = BTreeMap::new();
    reporter.report(&mut written).await.unwrap();
    let devices = bench.server.claim("ns", "db").unwrap()["status"]["devices"].take();
    let [device] = devices.as_array().unwrap().as_slice() else { panic!("{devices}") };
    let identity = ["driver", "pool", "device", "shareID"].map(|field| device[field].as_str().unwrap());
    assert_eq!(identity, ["numaward.io", "n1", "node-1", "s1"]);
    let conditions = device["conditions"].as_array().unwrap().iter();
    let conditions: Vec<_> = conditions.map(|of| (&of["type"], &of["status"])).collect();
    assert_eq!(conditions, [(&json!("Ready"), &json!("True")), (&json!("numaward.io/kept"), &json!("True"))]);
    assert_eq!(device["data"], json!({ "nodes": "1", "cpus": "4-6", "memoryBytes": 1 << 30 }));
    let requests = bench.server.requests().len();
    reporter.report(&mut written).await.unwrap();
    assert_eq!(bench.server.requests().len(), requests, "nothing has changed");
    assert_eq!(unprepare(&bench.register().await, &claim).await, "");
    reporter.report(&mut written).await.unwrap();
    assert!(written.is_empty());
    daemon.stop().await;
}
