//! The `ResourceSlice` of this host: the object, and its writes to the API server.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::http::StatusCode;
use k8s_openapi::api::resource::v1::ResourceSlice;
use numaward_engine::claims::{
    allocator::{Amounts, Device},
    devices::{NodeAmounts, NodeDevices},
};
use numaward_kube::{
    api::{self, ApiMetrics, fake::FakeApiServer},
    dra::slices::{Publication, PublishedDevices, SHORT_TAINT, SlicePublisher},
};
use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const NAME: &str = "00000-numaward.io-n1";

/// Returns the devices of a host with these free CPUs on its two nodes.
fn devices(free: [u64; 2]) -> Vec<Device> {
    let machine = Machine::builder().nodes(2).cores_per_node(4).memory(Bytes::gib(8)).build().unwrap();
    let amounts = |cpus| NodeAmounts { cpus, memory: [(ZoneKind::Memory, 8 << 30)].into() };
    let free = [(NodeId(0), amounts(free[0])), (NodeId(1), amounts(free[1]))].into();
    NodeDevices::new(&machine, &BTreeMap::new(), false).publish(&free, &BTreeMap::<NodeId, Amounts>::new())
}

struct RunningPublisher {
    server: FakeApiServer,
    latest: watch::Sender<Option<Arc<PublishedDevices>>>,
    publication: Publication,
    problem: Arc<Mutex<Option<String>>>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn run(interval: Duration, server: FakeApiServer) -> RunningPublisher {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig()).unwrap();
    let (problem, stop) = (Arc::<Mutex<_>>::default(), CancellationToken::new());
    let report = {
        let problem = problem.clone();
        Arc::new(move |result: Result<(), String>| *problem.lock().unwrap() = result.err())
    };
    let publisher = SlicePublisher {
        client: api::connect(Some(&path)).await.unwrap(),
        node: "n1".to_owned(),
        interval,
        has_node_allocatable: true,
        metrics: ApiMetrics::default(),
        report,
        publication: Publication::default(),
    };
    let publication = publisher.publication.clone();
    let latest = watch::Sender::new(None);
    let task = tokio::spawn(publisher.run(latest.subscribe(), stop.clone()));
    RunningPublisher { server, latest, publication, problem, stop, task }
}

impl RunningPublisher {
    fn publish(&self, free: [u64; 2]) {
        self.publish_short(free, &[]);
    }

    fn publish_short(&self, free: [u64; 2], short: &[&str]) {
        let short_of_memory = short.iter().map(|&name| name.to_owned()).collect();
        let devices = devices(free);
        let published = PublishedDevices { devices, short_of_memory, ..PublishedDevices::default() };
        self.latest.send_replace(Some(Arc::new(published)));
    }

    fn spec(&self) -> Value {
        self.server.slice(NAME).map_or(Value::Null, |slice| slice["spec"].clone())
    }

    fn generation(&self) -> u64 {
        self.spec()["pool"]["generation"].as_u64().unwrap_or(0)
    }

    /// Returns the names of the devices with their CPUs.
    fn cpus(&self) -> Vec<String> {
        let spec = self.spec();
        let devices = spec["devices"].as_array().into_iter().flatten();
        let text = |device: &Value| {
            format!("{} {}", device["name"], device["capacity"]["cpu"]["value"]).replace('"', "")
        };
        devices.map(text).collect()
    }

    fn writes(&self) -> usize {
        let is_write = |asked: &&String| asked.starts_with("POST") || asked.starts_with("PUT");
        self.server.requests().iter().filter(is_write).count()
    }

    fn problem(&self) -> String {
        self.problem.lock().unwrap().clone().unwrap_or_default()
    }
}

async fn wait(what: &str, look: impl Fn() -> bool) {
    let until = async {
        while !look() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), until)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"));
}

#[tokio::test(flavor = "multi_thread")]
async fn slice_has_a_device_for_each_node() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_node("n1", "node-uid", "v1.36.2");
    let run = run(Duration::from_millis(1), server).await;
    run.publish([4, 3]);
    wait("the slice", || run.generation() == 1).await;
    let slice = run.server.slice(NAME).unwrap();
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    let spec = &slice["spec"];
    assert_eq!((&spec["driver"], &spec["nodeName"]), (&json!("numaward.io"), &json!("n1")));
    assert_eq!(spec["pool"], json!({"name": "n1", "generation": 1, "resourceSliceCount": 1}));
    let device = &spec["devices"][0];
    assert_eq!(device["name"], "node-0");
    assert_eq!(device["allowMultipleAllocations"], true);
    assert_eq!(device["attributes"]["resource.kubernetes.io/numaNode"], json!({"int": 0}));
    assert_eq!(device["attributes"]["kind"], json!({"string": "node"}));
    let policy = json!({"default": "0", "validRange": {"min": "0", "step": "1"}});
    assert_eq!(device["capacity"]["cpu"], json!({"value": "4", "requestPolicy": policy}));
    assert_eq!(device["capacity"]["hugepages1Gi"], json!({"value": "0", "requestPolicy": {"default": "0"}}));
    assert_eq!(device["nodeAllocatableResourceMappings"]["cpu"], json!({"capacityKey": "cpu"}));
    // The types of the API accept it.
    let typed: ResourceSlice = serde_json::from_value(slice.clone()).unwrap();
    let devices = typed.spec.devices.unwrap();
    let memory = &devices[1].capacity.as_ref().unwrap()["memory"];
    let range = memory.request_policy.as_ref().unwrap().valid_range.as_ref().unwrap();
    assert_eq!(range.step.as_ref().unwrap().0, "1048576");
    run.stop.cancel();
    run.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn device_short_of_memory_is_tainted() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_node("n1", "node-uid", "v1.36.2");
    let run = run(Duration::from_millis(1), server).await;
    let taints = || run.spec()["devices"].as_array().unwrap().iter().map(|of| of["taints"].clone()).collect();
    let short = json!([{"key": SHORT_TAINT, "value": "memory", "effect": "NoSchedule"}]);
    for (generation, names, expected) in [
        (1, &[][..], [Value::Null, Value::Null]),
        (2, &["node-1"], [Value::Null, short]),
        (3, &[], [Value::Null, Value::Null]),
    ] {
        run.publish_short([4, 4], names);
        wait("the slice", || run.generation() == generation).await;
        let taints: Vec<Value> = taints();
        assert_eq!(taints, expected, "{names:?}");
    }
    let typed: Result<ResourceSlice, _> = serde_json::from_value(run.server.slice(NAME).unwrap());
    assert!(typed.is_ok(), "{typed:?}");
    run.stop.cancel();
    run.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn later_versions_have_another_mapping() {
    for (minor, field) in [(35, None), (37, Some("nodeAllocatableResources"))] {
        let server = FakeApiServer::start().await.unwrap();
        server.drop_fields(&[], minor);
        let run = run(Duration::from_millis(1), server).await;
        run.publish([4, 4]);
        wait("the slice", || run.generation() == 1).await;
        let device = run.spec()["devices"][0].clone();
        let fields = ["nodeAllocatableResourceMappings", "nodeAllocatableResources"];
        assert_eq!(fields.into_iter().find(|&field| device.get(field).is_some()), field);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_change_is_one_write() {
    let run = run(Duration::from_millis(1), FakeApiServer::start().await.unwrap()).await;
    run.publish([4, 4]);
    wait("the first", || run.cpus() == ["node-0 4", "node-1 4"]).await;
    assert!(run.server.slice(NAME).unwrap()["metadata"].get("ownerReferences").is_none(), "no such node");
    run.publish([4, 4]);
    run.publish([4, 3]);
    wait("the second", || run.cpus() == ["node-0 4", "node-1 3"]).await;
    assert_eq!((run.generation(), run.writes()), (2, 2));
    drop(run.latest);
    run.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_within_interval_are_one_write() {
    let run = run(Duration::from_millis(500), FakeApiServer::start().await.unwrap()).await;
    run.publish([4, 4]);
    wait("the first", || run.generation() == 1).await;
    for free in 0..4 {
        run.publish([4, free]);
    }
    wait("the last", || run.cpus() == ["node-0 4", "node-1 3"]).await;
    assert_eq!(run.writes(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn slice_comes_back() {
    let run = run(Duration::from_millis(1), FakeApiServer::start().await.unwrap()).await;
    run.publish([4, 4]);
    wait("the slice", || run.generation() == 1).await;
    run.server.delete_slice(NAME);
    wait("a new slice", || run.generation() == 1).await;
    let mut slice = run.server.slice(NAME).unwrap();
    slice["spec"]["devices"] = json!([]);
    run.server.put_slice(slice);
    wait("the devices again", || run.generation() == 2 && run.cpus().len() == 2).await;
    // After a lost watch too.
    run.server.hang_up();
    run.server.compact();
    run.server.delete_slice(NAME);
    wait("another slice", || run.generation() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slice_without_needed_field_is_withdrawn() {
    for field in ["allowMultipleAllocations", "requestPolicy"] {
        let server = FakeApiServer::start().await.unwrap();
        server.drop_fields(&[field], 35);
        let run = run(Duration::from_millis(1), server).await;
        run.publish([4, 4]);
        wait("the report", || run.problem().contains("DRAConsumableCapacity")).await;
        assert!(run.problem().contains(field), "{}", run.problem());
        assert_eq!(run.server.slice(NAME), None);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(run.writes(), 1, "not again at once");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slice_is_published_without_mapping() {
    let server = FakeApiServer::start().await.unwrap();
    server.drop_fields(&["nodeAllocatableResourceMappings"], 36);
    let run = run(Duration::from_millis(1), server).await;
    run.publish([4, 4]);
    wait("the slice", || run.generation() == 1).await;
    run.publish([4, 3]);
    wait("the second", || run.generation() == 2).await;
    assert_eq!(run.problem(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_write_is_repeated() {
    let server = FakeApiServer::start().await.unwrap();
    server.refuse(Some(("/resourceslices", StatusCode::NOT_FOUND)));
    let run = run(Duration::from_millis(1), server).await;
    run.publish([4, 4]);
    wait("the report", || run.problem().contains("Kubernetes 1.34")).await;
    run.server.refuse(None);
    wait("the slice", || run.generation() == 1).await;
    wait("the end of the report", || run.problem().is_empty()).await;
}

/// Returns the device of a host with these free CPUs on its two nodes.
fn host(free: [u64; 2]) -> Device {
    let machine = Machine::builder().nodes(2).cores_per_node(4).memory(Bytes::gib(8)).build().unwrap();
    let amounts = |cpus| NodeAmounts { cpus, memory: [(ZoneKind::Memory, 8 << 30)].into() };
    let free = [(NodeId(0), amounts(free[0])), (NodeId(1), amounts(free[1]))].into();
    NodeDevices::new(&machine, &BTreeMap::new(), false).publish_host(&free, &Amounts::new(), [])
}

const HOST_NAME: &str = "00001-numaward.io-n1";

#[tokio::test(flavor = "multi_thread")]
async fn host_has_a_slice_of_its_own() {
    let run = run(Duration::from_millis(1), FakeApiServer::start().await.unwrap()).await;
    let publish = |host: Option<Device>| {
        let published = PublishedDevices { devices: devices([4, 3]), host, ..PublishedDevices::default() };
        run.latest.send_replace(Some(Arc::new(published)));
    };
    let spec = || run.server.slice(HOST_NAME).map_or(Value::Null, |slice| slice["spec"].clone());
    publish(Some(host([4, 3])));
    wait("both slices", || run.generation() == 1 && spec() != Value::Null).await;
    let of_host = spec();
    assert_eq!(of_host["pool"], json!({"name": "n1/host", "generation": 1, "resourceSliceCount": 1}));
    let device = &of_host["devices"][0];
    assert_eq!((&device["name"], &device["bindsToNode"]), (&json!("host"), &json!(true)));
    assert_eq!(device["attributes"], json!({"kind": {"string": "host"}}));
    assert_eq!(device["bindingConditions"], json!(["numaward.io/placed"]));
    assert_eq!(device["bindingFailureConditions"], json!(["numaward.io/no-room"]));
    assert_eq!(
        (&device["capacity"]["cpu"]["value"], &device["allowMultipleAllocations"]),
        (&json!("7"), &json!(true))
    );
    // The types of the API accept it.
    serde_json::from_value::<ResourceSlice>(run.server.slice(HOST_NAME).unwrap()).unwrap();
    // Each slice is written by itself.
    publish(Some(host([3, 3])));
    wait("the new value", || spec()["devices"][0]["capacity"]["cpu"]["value"] == "6").await;
    assert_eq!((run.generation(), &spec()["pool"]["generation"]), (1, &json!(2)));
    run.server.delete_slice(HOST_NAME);
    wait("the slice is back", || spec() != Value::Null).await;
    publish(None);
    wait("the slice is deleted", || spec() == Value::Null).await;
    assert_eq!((run.generation(), run.problem()), (1, String::new()));
    run.stop.cancel();
    run.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn slice_of_host_is_deleted_after_it_was_switched_off() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_slice(json!({"metadata": {"name": HOST_NAME},
        "spec": {"driver": "numaward.io", "nodeName": "n1", "pool": {"name": "n1/host", "generation": 7}}}));
    let run = run(Duration::from_millis(1), server).await;
    run.publish([4, 3]);
    wait("the slice is deleted", || run.generation() == 1 && run.server.slice(HOST_NAME).is_none()).await;
    run.stop.cancel();
    run.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn host_without_binding_conditions_is_no_device() {
    let server = FakeApiServer::start().await.unwrap();
    server.drop_fields(&["bindingConditions", "bindsToNode", "bindingFailureConditions"], 36);
    let run = run(Duration::from_millis(1), server).await;
    let published = PublishedDevices {
        devices: devices([4, 3]),
        host: Some(host([4, 3])),
        ..PublishedDevices::default()
    };
    run.latest.send_replace(Some(Arc::new(published)));
    wait("the problem", || run.problem().contains("DRADeviceBindingConditions")).await;
    wait("the slice of the nodes", || run.generation() == 1).await;
    assert!(run.server.slice(HOST_NAME).is_none());
    run.stop.cancel();
    run.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn awaited_publication_is_not_delayed() {
    let run = run(Duration::from_mins(10), FakeApiServer::start().await.unwrap()).await;
    run.publish([4, 3]);
    wait("the slice", || run.generation() == 1).await;
    run.publish([3, 3]);
    let requests = run.publication.requests();
    let publication = run.publication.clone();
    let published = tokio::spawn(async move { publication.publish().await });
    wait("the request", || *requests.borrow() == 1).await;
    assert_eq!(
        (run.generation(), published.is_finished()),
        (1, false),
        "the devices are older than the request"
    );
    run.server.refuse_next("resourceslices", StatusCode::SERVICE_UNAVAILABLE);
    let now = PublishedDevices { devices: devices([2, 3]), number: 1, ..PublishedDevices::default() };
    run.latest.send_replace(Some(Arc::new(now.clone())));
    published.await.unwrap();
    assert_eq!(run.cpus(), ["node-0 2", "node-1 3"]);
    // Nothing is written if nothing has changed.
    let writes = run.writes();
    let publication = run.publication.clone();
    let published = tokio::spawn(async move { publication.publish().await });
    wait("the request", || *requests.borrow() == 2).await;
    run.latest.send_replace(Some(Arc::new(PublishedDevices { number: 2, ..now })));
    published.await.unwrap();
    assert_eq!(run.writes(), writes);
    run.stop.cancel();
    run.task.await.unwrap();
}
