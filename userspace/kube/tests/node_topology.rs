//! NodeResourceTopology: the object against the published schema of the resource definition, and the writes to the API server.

#![expect(clippy::panic, clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::http::StatusCode;
use numaward_engine::policy::{TopologyManagerPolicy, TopologyManagerScope};
use numaward_kube::{
    api::{self, ApiMetrics, fake::FakeApiServer},
    node_topology::{NodeTopology, Publisher, Resource, Zone, numa_placement::NumaPlacement},
};
use numaward_topology::{Bytes, NodeId};
use prometheus_client::registry::Registry;
use regex::Regex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Returns the schema of version v1alpha2, after the published resource definition. Unknown fields are invalid.
fn schema() -> Value {
    let quantity = json!({
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
    });
    let attributes = json!({"type": "array", "items": {
        "type": "object", "required": ["name", "value"],
        "properties": {"name": {"type": "string"}, "value": {"type": "string"}}}});
    json!({
        "type": "object",
        "required": ["topologyPolicies", "zones"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "properties": {
                "name": {"type": "string"}, "resourceVersion": {"type": "string"},
                "ownerReferences": {"type": "array", "items": {
                    "type": "object", "required": ["apiVersion", "kind", "name", "uid"],
                    "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"},
                        "name": {"type": "string"}, "uid": {"type": "string"}}}}}},
            "topologyPolicies": {"type": "array", "items": {"type": "string"}},
            "attributes": attributes,
            "zones": {"type": "array", "items": {
                "type": "object", "required": ["name", "type"],
                "properties": {
                    "name": {"type": "string"}, "type": {"type": "string"}, "parent": {"type": "string"},
                    "attributes": attributes,
                    "costs": {"type": "array", "items": {"type": "object", "required": ["name", "value"],
                        "properties": {"name": {"type": "string"}, "value": {"type": "integer"}}}},
                    "resources": {"type": "array", "items": {
                        "type": "object", "required": ["allocatable", "available", "capacity", "name"],
                        "properties": {"name": {"type": "string"}, "capacity": quantity,
                            "allocatable": quantity, "available": quantity}}}}}}}
    })
}

/// Validates a value against the parts of JSON Schema that the resource definition uses. Adds the errors to `found`.
fn misfits(schema: &Value, value: &Value, path: &str, found: &mut Vec<String>) {
    let has_type = |schema: &Value| match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        _ => true,
    };
    let any = schema["anyOf"].as_array();
    if !has_type(schema) || any.is_some_and(|any| !any.iter().any(has_type)) {
        found.push(format!("{path}: {value} is of the wrong type"));
        return;
    }
    if let (Some(pattern), Some(text)) = (schema["pattern"].as_str(), value.as_str())
        && !Regex::new(pattern).unwrap().is_match(text)
    {
        found.push(format!("{path}: {text:?} does not fit the pattern"));
    }
    for required in schema["required"].as_array().into_iter().flatten() {
        if value.get(required.as_str().unwrap()).is_none() {
            found.push(format!("{path}: {required} is missing"));
        }
    }
    for (key, value) in value.as_object().into_iter().flatten() {
        match schema["properties"].get(key) {
            Some(schema) => misfits(schema, value, &format!("{path}.{key}"), found),
            None => found.push(format!("{path}.{key}: unknown")),
        }
    }
    for (index, value) in value.as_array().into_iter().flatten().enumerate() {
        misfits(&schema["items"], value, &format!("{path}[{index}]"), found);
    }
}

fn check(value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    misfits(&schema(), value, "", &mut found);
    found
}

fn topology(available: u64) -> NodeTopology {
    let resource = |name: &str, capacity| {
        let name = name.to_owned();
        Resource { name, capacity, allocatable: capacity - 1, available }
    };
    let zone = |node: u32| Zone {
        node: NodeId(node),
        distances: (0..2).map(|other| (NodeId(other), if other == node { 10 } else { 21 })).collect(),
        resources: vec![
            resource("cpu", 8),
            resource("memory", Bytes::gib(16).0),
            resource("hugepages-2Mi", Bytes::mib(64).0),
            resource("vendor.example/nic", 4),
        ],
        attributes: vec![("numaward.io/memory-used-bytes", node.to_string())],
    };
    NodeTopology {
        policy: TopologyManagerPolicy::SingleNumaNode,
        scope: TopologyManagerScope::Pod,
        zones: vec![zone(0), zone(1)],
        fingerprint: Some("pfp0v0010123456789abcdef".to_owned()),
        placement: Some(NumaPlacement {
            metadata: "npv0v001::ve=leb89::cc=3::nn=2::bn=1".to_owned(),
            vectors: [(NodeId(0), "!".to_owned())].into(),
        }),
    }
}

struct RunningPublisher {
    server: FakeApiServer,
    latest: watch::Sender<Option<Arc<NodeTopology>>>,
    metrics: ApiMetrics,
    problem: Arc<Mutex<Option<String>>>,
    stop: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

async fn run(interval: Duration, server: FakeApiServer) -> RunningPublisher {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(&path, server.kubeconfig()).unwrap();
    let (metrics, problem, stop) =
        (ApiMetrics::default(), Arc::<Mutex<_>>::default(), CancellationToken::new());
    let report = {
        let problem = problem.clone();
        Arc::new(move |result: Result<(), String>| *problem.lock().unwrap() = result.err())
    };
    let publisher = Publisher {
        client: api::connect(Some(&path)).await.unwrap(),
        node: "n1".to_owned(),
        interval,
        metrics: metrics.clone(),
        report,
    };
    let latest = watch::Sender::new(None);
    let task = tokio::spawn(publisher.run(latest.subscribe(), stop.clone()));
    RunningPublisher { server, latest, metrics, problem, stop, task }
}

impl RunningPublisher {
    fn publish(&self, topology: NodeTopology) {
        self.latest.send_replace(Some(Arc::new(topology)));
    }

    fn available(&self) -> Option<Value> {
        Some(self.server.topology("n1")?["zones"][0]["resources"][0]["available"].clone())
    }

    fn patches(&self) -> usize {
        self.server.requests().iter().filter(|asked| asked.starts_with("PATCH")).count()
    }

    fn errors(&self, reason: &str) -> u64 {
        let mut registry = Registry::default();
        self.metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let line = format!(
            "kubernetes_api_errors_total{{operation=\"apply_node_resource_topology\",reason=\"{reason}\"}} "
        );
        text.lines().find_map(|found| found.strip_prefix(&line)).unwrap().parse().unwrap()
    }
}

async fn wait(what: &str, look: impl Fn() -> bool) {
    let until = async {
        while !look() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(2), until)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"));
}

#[test]
fn schema_check_finds_faults() {
    let faults = check(&json!({"zones": [{"name": "node-0", "type": 1, "odd": 1,
        "resources": [{"name": "cpu", "capacity": "8 cores", "allocatable": 1, "available": []}]}]}));
    for fault in [
        ": \"topologyPolicies\" is missing",
        ".zones[0].odd: unknown",
        ".zones[0].type: 1 is of the wrong type",
        ".zones[0].resources[0].capacity: \"8 cores\" does not fit the pattern",
        ".zones[0].resources[0].available: [] is of the wrong type",
    ] {
        assert!(faults.iter().any(|found| found == fault), "{fault}: {faults:?}");
    }
    assert_eq!(faults.len(), 5, "{faults:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn object_matches_schema() {
    let server = FakeApiServer::start().await.unwrap();
    server.put_node("n1", "node-uid", "v1.36.2");
    let run = run(Duration::from_millis(1), server).await;
    run.publish(topology(3));
    wait("the object", || run.available().is_some()).await;
    let object = run.server.topology("n1").unwrap();
    assert_eq!(check(&object), Vec::<String>::new(), "{object:#}");
    assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    let attribute = |name: &str| {
        let attributes = object["attributes"].as_array().unwrap();
        attributes.iter().find(|attribute| attribute["name"] == name).unwrap()["value"].clone()
    };
    assert_eq!(attribute("topologyManagerPolicy"), "single-numa-node");
    assert_eq!(attribute("topologyManagerScope"), "pod");
    assert_eq!(attribute("nodeTopologyPodsFingerprint"), "pfp0v0010123456789abcdef");
    assert_eq!(attribute("nodeTopologyPodsFingerprintMethod"), "all");
    assert_eq!(object["topologyPolicies"], json!(["SingleNUMANodePodLevel"]));
    let zone = &object["zones"][1];
    assert_eq!((zone["name"].as_str(), zone["type"].as_str()), (Some("node-1"), Some("Node")));
    assert_eq!(zone["costs"], json!([{"name": "node-0", "value": 21}, {"name": "node-1", "value": 10}]));
    assert_eq!(
        zone["resources"][2],
        json!({"name": "hugepages-2Mi", "capacity": "67108864", "allocatable": "67108863", "available": "3"})
    );
    assert_eq!(
        zone["resources"][3],
        json!({"name": "vendor.example/nic", "capacity": "4", "allocatable": "3", "available": "3"})
    );
    assert_eq!(zone["attributes"], json!([{"name": "numaward.io/memory-used-bytes", "value": "1"}]));
    run.stop.cancel();
    run.task.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_only_changes() {
    let run = run(Duration::from_millis(1), FakeApiServer::start().await.unwrap()).await;
    run.publish(topology(3));
    wait("the first", || run.available() == Some(json!("3"))).await;
    assert!(run.server.topology("n1").unwrap()["metadata"].get("ownerReferences").is_none(), "no such node");
    run.publish(topology(3));
    run.publish(topology(2));
    wait("the second", || run.available() == Some(json!("2"))).await;
    assert_eq!(run.patches(), 2);
    // Without a sender, the publisher stops.
    drop(run.latest);
    run.task.await.unwrap();
}

/// Time is simulated: it advances while all tasks are idle.
#[tokio::test(start_paused = true)]
async fn limits_and_repeats_writes() {
    let run = run(Duration::from_secs(10), FakeApiServer::start().await.unwrap()).await;
    run.publish(topology(1));
    wait("the first", || run.patches() == 1).await;
    let start = tokio::time::Instant::now();
    for available in 2..50 {
        run.publish(topology(available));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    wait("the last", || run.available() == Some(json!("49"))).await;
    assert!(start.elapsed() >= Duration::from_secs(9), "{:?}", start.elapsed());
    assert_eq!(run.patches(), 2, "what changed in between was written at once");
    tokio::time::sleep(Duration::from_mins(6)).await;
    wait("the repetition", || run.patches() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn refused_write_is_retried() {
    let server = FakeApiServer::start().await.unwrap();
    server.refuse(Some(("noderesourcetopologies", StatusCode::NOT_FOUND)));
    let run = run(Duration::from_secs(1), server).await;
    run.publish(topology(1));
    let problem = || run.problem.lock().unwrap().clone();
    wait("the problem", || problem().is_some()).await;
    let text = problem().unwrap();
    assert!(text.contains("noderesourcetopologies.topology.node.k8s.io with version v1alpha2"), "{text}");
    tokio::time::sleep(Duration::from_mins(10)).await;
    let refused = run.errors("not_found");
    assert!((5..60).contains(&refused), "pauses grow: {refused}");
    run.publish(topology(7));
    run.server.refuse(None);
    wait("the object", || run.available() == Some(json!("7"))).await;
    assert_eq!(problem(), None);
}
