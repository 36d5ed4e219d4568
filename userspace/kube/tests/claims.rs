//! Devices of resource claims against an API server that fails if a test demands it.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{collections::BTreeSet, time::Duration};

use axum::{body::Body, http::StatusCode};
use numaward_kube::{
    api::{self, ApiMetrics, ClaimReader, ClaimedDevice, DevicePlace, fake::FakeApiServer},
    pod::{ClaimUse, Pod, PodId},
};
use numaward_topology::NodeId;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

/// Time that is enough for every list.
const WAIT: Duration = Duration::from_mins(1);

struct RunningClaims {
    server: FakeApiServer,
    reader: ClaimReader,
    metrics: ApiMetrics,
}

async fn run() -> RunningClaims {
    let server = FakeApiServer::start().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig()).unwrap();
    let client = api::connect(Some(&path)).await.unwrap();
    let (reader, metrics) = (ClaimReader::default(), ApiMetrics::default());
    reader.connect(client, "n1".to_owned(), metrics.clone());
    RunningClaims { server, reader, metrics }
}

fn claim(name: &str, pod_uid: &str, results: &Value) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "prod"},
        "status": {"allocation": {"devices": {"results": results}}, "reservedFor": [{"resource": "pods", "name": "db", "uid": pod_uid}]}})
}

fn slice(name: &str, node: &str, generation: i64, devices: &Value) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
        "spec": {"driver": "gpu.example", "nodeName": node, "devices": devices,
            "pool": {"name": "n1", "generation": generation, "resourceSliceCount": 1}}})
}

fn result(request: &str, device: &str) -> Value {
    json!({"request": request, "driver": "gpu.example", "pool": "n1", "device": device})
}

fn used(container: &str, claim: &str, request: Option<&str>) -> ClaimUse {
    ClaimUse { container: container.to_owned(), claim: claim.to_owned(), request: request.map(str::to_owned) }
}

fn pod(claims: Vec<ClaimUse>) -> Pod {
    let id = PodId { namespace: "prod".to_owned(), name: "db".to_owned(), uid: "u1".to_owned() };
    Pod { id, api_uid: "u1".to_owned(), claims, ..Pod::default() }
}

fn device(name: &str) -> ClaimedDevice {
    ClaimedDevice { driver: "gpu.example".to_owned(), pool: "n1".to_owned(), device: name.to_owned() }
}

#[tokio::test]
async fn reads_devices_by_container() {
    let RunningClaims { server, reader, metrics } = run().await;
    let mut admin = result("all", "watched");
    admin["adminAccess"] = json!(true);
    server.put_claim(claim("two", "u1", &json!([result("gpu/large", "a"), result("nic", "b"), admin])));
    server.put_claim(claim("foreign", "u2", &json!([result("gpu", "c")])));
    let mut pending = claim("pending", "u1", &json!([]));
    pending["status"] = json!({});
    server.put_claim(pending);
    server.put_claim(json!({"metadata": {"name": "odd", "namespace": "prod"}, "status": "?"}));
    let pod = pod(vec![
        used("all", "two", None),
        used("gpu", "two", Some("gpu")),
        used("none", "two", Some("other")),
        used("foreign", "foreign", None),
        used("pending", "pending", None),
        used("odd", "odd", None),
        used("gone", "gone", None),
        used("nic", "two", Some("nic")),
    ]);
    let devices = reader.devices(&pod).await;
    let expected = [("all", vec!["a", "b"]), ("gpu", vec!["a"]), ("nic", vec!["b"])];
    let expected =
        expected.map(|(container, names)| (container.to_owned(), names.into_iter().map(device).collect()));
    assert_eq!(devices, expected.into());
    let gets = server.requests().into_iter().filter(|request| request.contains("resourceclaims")).count();
    assert_eq!(gets, 5, "one for each claim");
    let mut registry = Registry::default();
    metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let line = r#"kubernetes_api_errors_total{operation="get_resource_claim",reason="not_found"} 1"#;
    assert!(text.contains(line), "{text}");
    // A pod without claims causes no request.
    assert_eq!(reader.devices(&Pod { claims: Vec::new(), ..pod }).await, [].into());
    assert_eq!(server.requests().len(), 5);
}

#[tokio::test]
async fn reads_places_of_newest_slices() {
    let RunningClaims { server, reader, .. } = run().await;
    let attributes = |attributes: Value| json!({"name": "x", "attributes": attributes});
    let named = |name: &str, found: Value| {
        let mut device = attributes(found);
        device["name"] = json!(name);
        device
    };
    let node =
        |node: i64| json!({"resource.kubernetes.io/numaNode": {"int": node}, "model": {"string": "A1"}});
    server.put_slice(slice("1-old", "n1", 3, &json!([named("a", node(0)), named("gone", node(0))])));
    server.put_slice(slice(
        "2-new",
        "n1",
        4,
        &json!([
        named("a", node(1)),
        named("root", json!({"resource.kubernetes.io/pcieRoot": {"string": "pci0000:80"}})),
        named("bus", json!({"resource.kubernetes.io/pcieRoot": {"string": "pci0000:80"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:81:00.0"}})),
        named("negative", node(-1)),
        named("text", json!({"resource.kubernetes.io/numaNode": {"string": "1"}})),
        {"name": "plain"}]),
    ));
    server.put_slice(slice("3-other", "n2", 9, &json!([named("far", node(1))])));
    server.put_slice(json!({"metadata": {"name": "4-odd"}, "spec": {"nodeName": "n1", "pool": 7}}));
    for number in 0..40 {
        let mut more = slice(&format!("5-{number:02}"), "n1", 1, &json!([named("p", node(1))]));
        more["spec"]["pool"]["name"] = json!(format!("pool-{number}"));
        server.put_slice(more);
    }
    let all = ["a", "gone", "root", "bus", "negative", "text", "plain", "far"];
    let mut wanted: BTreeSet<_> = all.into_iter().map(device).collect();
    wanted.insert(ClaimedDevice { pool: "pool-39".to_owned(), ..device("p") });
    let places = reader.places(&wanted, WAIT).await;
    assert_eq!(places.len(), 4, "{places:?}");
    assert_eq!(places[&device("a")], DevicePlace::Node(NodeId(1)));
    assert_eq!(places[&device("root")], DevicePlace::PciRoot("pci0000:80".to_owned()));
    assert_eq!(places[&device("bus")], DevicePlace::PciDevice("0000:81:00.0".to_owned()));
    let requests = server.requests().len();
    assert_eq!(requests, 3, "the pages of one list");
    // A missing device does not cause a list at once.
    assert_eq!(reader.places(&wanted, WAIT).await, places);
    assert_eq!(reader.places(&BTreeSet::new(), WAIT).await, [].into());
    assert_eq!(server.requests().len(), requests);
}

#[tokio::test]
async fn failures_leave_places_unknown() {
    for status in [StatusCode::NOT_FOUND, StatusCode::FORBIDDEN, StatusCode::INTERNAL_SERVER_ERROR] {
        let RunningClaims { server, reader, .. } = run().await;
        server.refuse(Some(("resource.k8s.io", status)));
        assert_eq!(reader.places(&[device("a")].into(), WAIT).await, [].into());
        assert_eq!(reader.devices(&pod(vec![used("db", "one", None)])).await, [].into());
    }
    let RunningClaims { server, reader, .. } = run().await;
    server.answer_with("resource.k8s.io", Some(|| Body::from("{\"items\": 7}")));
    assert_eq!(reader.places(&[device("a")].into(), WAIT).await, [].into());
    assert_eq!(reader.devices(&pod(vec![used("db", "one", None)])).await, [].into());
    // Without a client, nothing is read.
    assert_eq!(ClaimReader::default().places(&[device("a")].into(), WAIT).await, [].into());
}

/// Other versions of the group are not read.
#[tokio::test]
async fn reads_version_one_only() {
    let RunningClaims { server, reader, .. } = run().await;
    reader.places(&[device("a")].into(), WAIT).await;
    reader.devices(&pod(vec![used("db", "one", None)])).await;
    let requests = server.requests();
    assert!(requests.iter().all(|request| request.contains("/apis/resource.k8s.io/v1/")), "{requests:?}");
    assert!(requests[0].contains("fieldSelector=spec.nodeName%3Dn1"), "{requests:?}");
}

/// A list that takes longer than one pod may wait is not lost.
#[tokio::test]
async fn slow_list_serves_the_next_pod() {
    let RunningClaims { server, reader, .. } = run().await;
    let attributes = json!({"resource.kubernetes.io/numaNode": {"int": 1}});
    server.put_slice(slice("one", "n1", 1, &json!([{"name": "a", "attributes": attributes}])));
    server.delay(Duration::from_millis(300));
    let wanted = [device("a")].into();
    assert_eq!(reader.places(&wanted, Duration::from_millis(1)).await, [].into());
    let places = reader.places(&wanted, WAIT).await;
    assert_eq!(places, [(device("a"), DevicePlace::Node(NodeId(1)))].into());
    assert_eq!(server.requests().len(), 1);
}
