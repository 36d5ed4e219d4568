//! An API server for tests: pods by list and watch and eviction, events, nodes, and server-side apply of NodeResourceTopology.
//!
//! It keeps to the rules that a client can trip over: versions grow; a list has pages; a watch reports what came after
//! its version, and of one that is too old that it is gone; server-side apply takes a field manager and a full
//! object. It can be made to misbehave: to refuse, to be slow, to forget, to hang up, to
//! answer with something else.

use std::{collections::BTreeMap, convert::Infallible, io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, Query, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing,
};
use futures_util::stream;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};

/// By what a client is known.
const BEARER: &str = "Bearer secret";

/// A running server. It ends when this is dropped.
#[derive(Debug)]
pub struct FakeApiServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<Inner>,
    /// Counts changes, for watches.
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// What watches report: version, type, object.
    log: Vec<(u64, &'static str, Value)>,
    /// Versions up to this are not known any more.
    compacted: u64,
    /// Watches begun before this are hung up.
    generation: u64,
    nodes: BTreeMap<String, Value>,
    events: Vec<Value>,
    topologies: BTreeMap<String, Value>,
    /// Method and path with its query.
    asked: Vec<String>,
    /// The next answers: part of the path, status.
    refusals: Vec<(String, StatusCode)>,
    /// All answers, until set otherwise: part of the path, status.
    refusing: Option<(String, StatusCode)>,
    /// Other bodies, until set otherwise: part of the path, body.
    body: Option<(String, fn() -> Body)>,
    delay: Duration,
}

impl Drop for FakeApiServer {
    fn drop(&mut self) {
        self.task.abort();
        self.hang_up();
    }
}

impl FakeApiServer {
    /// Starts one on the loopback address.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let state = Mutex::new(Inner { version: 1, ..Inner::default() });
        let shared = Arc::new(Shared { state, changed: watch::Sender::new(0) });
        let router = Router::new()
            .route("/api/v1/pods", routing::get(pods))
            .route("/api/v1/nodes/{name}", routing::get(node))
            .route("/api/v1/namespaces/{namespace}/pods/{name}/eviction", routing::post(evict))
            .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events", routing::post(create_event))
            .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events/{name}", routing::patch(patch_event))
            .route(
                "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/{name}",
                routing::patch(apply_topology),
            )
            .layer(middleware::from_fn_with_state(shared.clone(), misbehave))
            .with_state(shared.clone());
        let task = tokio::spawn(async move {
            // It serves until it is aborted.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { address, shared, task })
    }

    /// Where it listens: `http://ADDRESS`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A kubeconfig that leads to it.
    pub fn kubeconfig(&self) -> String {
        let url = self.url();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: fake\nclusters:\n- name: fake\n  cluster: {{server: \
             \"{url}\"}}\nusers:\n- name: fake\n  user: {{token: secret}}\ncontexts:\n- name: fake\n  context: \
             {{cluster: fake, user: fake}}\n"
        )
    }

    /// Adds a pod, or changes it. It takes `metadata` with name, namespace and uid, and `spec`.
    pub fn put_pod(&self, mut pod: Value) {
        self.change(|inner| {
            pod["metadata"]["resourceVersion"] = json!(inner.version.to_string());
            let kind = match inner.pods.insert(pod_key(&pod), pod.clone()) {
                None => "ADDED",
                Some(_) => "MODIFIED",
            };
            inner.log.push((inner.version, kind, pod));
        });
    }

    /// Deletes a pod.
    pub fn delete_pod(&self, namespace: &str, name: &str) {
        self.change(|inner| {
            if let Some(mut pod) = inner.pods.remove(&format!("{namespace}/{name}")) {
                pod["metadata"]["resourceVersion"] = json!(inner.version.to_string());
                inner.log.push((inner.version, "DELETED", pod));
            }
        });
    }

    /// Moves the version on and notifies watches.
    pub fn bookmark(&self) {
        self.change(|inner| {
            let object = json!({"kind": "Pod", "apiVersion": "v1",
                "metadata": {"resourceVersion": inner.version.to_string()}});
            inner.log.push((inner.version, "BOOKMARK", object));
        });
    }

    /// Sends watches an error.
    pub fn send_error(&self, status: StatusCode) {
        self.change(|inner| {
            let object = status_object(status, "set by the test");
            inner.log.push((inner.version, "ERROR", object));
        });
    }

    /// Writes a line to all watches that is no JSON.
    pub fn send_garbage(&self) {
        self.change(|inner| inner.log.push((inner.version, "GARBAGE", Value::Null)));
    }

    /// Forgets all that is past: watches from an older version are gone.
    pub fn compact(&self) {
        let mut inner = self.shared.state.lock();
        inner.compacted = inner.version;
        inner.log.clear();
    }

    /// Ends all watches, without a word.
    pub fn hang_up(&self) {
        self.change(|inner| inner.generation += 1);
    }

    /// Adds a Kubernetes node with its UID and the version of its kubelet.
    pub fn put_node(&self, name: &str, uid: &str, kubelet: &str) {
        let node = json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "uid": uid},
            "status": {"nodeInfo": {"kubeletVersion": kubelet}}});
        self.shared.state.lock().nodes.insert(name.to_owned(), node);
    }

    /// Refuses the next request whose path and query contain this.
    pub fn refuse_next(&self, part: &str, status: StatusCode) {
        self.shared.state.lock().refusals.push((part.to_owned(), status));
    }

    /// Refuses each request whose path and query contain this; none: no more.
    pub fn refuse(&self, refusing: Option<(&str, StatusCode)>) {
        self.shared.state.lock().refusing = refusing.map(|(part, status)| (part.to_owned(), status));
    }

    /// Answers each request whose path and query contain this with 200 and such a body; none: no more.
    pub fn answer_with(&self, part: &str, body: Option<fn() -> Body>) {
        self.shared.state.lock().body = body.map(|body| (part.to_owned(), body));
    }

    /// Answers only after this time.
    pub fn delay(&self, delay: Duration) {
        self.shared.state.lock().delay = delay;
    }

    /// What was asked so far: method and path with its query.
    pub fn requests(&self) -> Vec<String> {
        self.shared.state.lock().asked.clone()
    }

    /// The events that were made.
    pub fn events(&self) -> Vec<Value> {
        self.shared.state.lock().events.clone()
    }

    /// The NodeResourceTopology of this name.
    pub fn topology(&self, name: &str) -> Option<Value> {
        self.shared.state.lock().topologies.get(name).cloned()
    }

    fn change(&self, change: impl FnOnce(&mut Inner)) {
        {
            let mut inner = self.shared.state.lock();
            inner.version += 1;
            change(&mut inner);
        }
        self.shared.changed.send_modify(|count| *count += 1);
    }
}

fn pod_key(pod: &Value) -> String {
    let text = |key: &str| pod["metadata"][key].as_str().unwrap_or_default().to_owned();
    format!("{}/{}", text("namespace"), text("name"))
}

fn status_object(status: StatusCode, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "code": status.as_u16()})
}

fn refusal(status: StatusCode, message: &str) -> Response {
    (status, Json(status_object(status, message))).into_response()
}

async fn misbehave(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    let uri = request.uri().to_string();
    let is_known = request.headers().get(header::AUTHORIZATION).is_some_and(|says| says == BEARER);
    let (delay, refused, body) = {
        let mut inner = shared.state.lock();
        inner.asked.push(format!("{} {uri}", request.method()));
        let next = inner.refusals.iter().position(|(part, _)| uri.contains(part));
        let refused = match (next, &inner.refusing) {
            (Some(next), _) => Some(inner.refusals.remove(next).1),
            (None, Some((part, status))) if uri.contains(part) => Some(*status),
            (None, _) => None,
        };
        let body = inner.body.as_ref().filter(|(part, _)| uri.contains(part)).map(|(_, body)| *body);
        (inner.delay, refused, body)
    };
    tokio::time::sleep(delay).await;
    match (refused, body) {
        (Some(status), _) => refusal(status, "refused by the test"),
        (None, _) if !is_known => refusal(StatusCode::UNAUTHORIZED, "nobody is known by this"),
        (None, Some(body)) => Response::new(body()),
        (None, None) => next.run(request).await,
    }
}

/// Lists pods or watches them.
async fn pods(State(shared): State<Arc<Shared>>, Query(query): Query<BTreeMap<String, String>>) -> Response {
    let Some(node) = query.get("fieldSelector").and_then(|fields| fields.strip_prefix("spec.nodeName="))
    else {
        return refusal(StatusCode::FORBIDDEN, "only the pods of one Kubernetes node may be seen");
    };
    let node = node.to_owned();
    if query.get("watch").is_some_and(|watch| watch == "true") {
        let version = query.get("resourceVersion").and_then(|version| version.parse().ok());
        return watch_pods(shared, node, version.unwrap_or(0));
    }
    let inner = shared.state.lock();
    let after = query.get("continue").cloned().unwrap_or_default();
    let limit = query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    let of_node = |pod: &&Value| pod["spec"]["nodeName"] == json!(node);
    let rest: Vec<_> = inner.pods.iter().filter(|(key, _)| **key > after).map(|(_, pod)| pod).collect();
    let items: Vec<_> = rest.iter().copied().filter(of_node).take(limit).cloned().collect();
    let more = rest.iter().copied().filter(of_node).count() > items.len();
    let token = items.last().filter(|_| more).map(pod_key).unwrap_or_default();
    Json(json!({"kind": "PodList", "apiVersion": "v1", "items": items,
        "metadata": {"resourceVersion": inner.version.to_string(), "continue": token}}))
    .into_response()
}

fn watch_pods(shared: Arc<Shared>, node: String, version: u64) -> Response {
    let begun = shared.state.lock().generation;
    let mut changes = shared.changed.subscribe();
    changes.mark_changed();
    let lines = stream::unfold((shared, changes, version), move |(shared, mut changes, version)| {
        let node = node.clone();
        async move {
            changes.changed().await.ok()?;
            let (text, version) = {
                let inner = shared.state.lock();
                if inner.generation != begun {
                    return None;
                }
                if version < inner.compacted {
                    let gone = status_object(StatusCode::GONE, "too old resource version");
                    (line("ERROR", &gone), inner.version)
                } else {
                    let news = inner.log.iter().filter(|(at, kind, object)| {
                        *at > version
                            && (matches!(*kind, "BOOKMARK" | "ERROR" | "GARBAGE")
                                || object["spec"]["nodeName"] == json!(node))
                    });
                    (news.map(|(_, kind, object)| line(kind, object)).collect(), inner.version)
                }
            };
            Some((Ok::<_, Infallible>(text), (shared, changes, version)))
        }
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(lines)).into_response()
}

fn line(kind: &str, object: &Value) -> String {
    match kind {
        "GARBAGE" => "no JSON\n".to_owned(),
        _ => format!("{}\n", json!({"type": kind, "object": object})),
    }
}

/// The rules for an eviction: what it is, whose, and of which UID. The pod is marked, and goes when the test deletes it.
async fn evict(
    State(shared): State<Arc<Shared>>,
    Path((namespace, name)): Path<(String, String)>,
    Json(eviction): Json<Value>,
) -> Response {
    let is_eviction = eviction["apiVersion"] == "policy/v1" && eviction["kind"] == "Eviction";
    if !is_eviction || eviction["metadata"] != json!({"name": name, "namespace": namespace}) {
        return refusal(StatusCode::BAD_REQUEST, "this is no eviction of this pod");
    }
    {
        let mut inner = shared.state.lock();
        let Some(mut pod) = inner.pods.get(&format!("{namespace}/{name}")).cloned() else {
            return refusal(StatusCode::NOT_FOUND, "there is no such pod");
        };
        if eviction["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"] {
            return refusal(StatusCode::CONFLICT, "the UID in the precondition is another");
        }
        inner.version += 1;
        pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        pod["metadata"]["resourceVersion"] = json!(inner.version.to_string());
        inner.pods.insert(pod_key(&pod), pod.clone());
        let version = inner.version;
        inner.log.push((version, "MODIFIED", pod));
    }
    shared.changed.send_modify(|count| *count += 1);
    let done =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    (StatusCode::CREATED, Json(done)).into_response()
}

async fn node(State(shared): State<Arc<Shared>>, Path(name): Path<String>) -> Response {
    match shared.state.lock().nodes.get(&name) {
        Some(node) => Json(node).into_response(),
        None => refusal(StatusCode::NOT_FOUND, "there is no such node"),
    }
}

/// The rules for events of `events.k8s.io`: a time, an action, who reports, and what is not too long.
async fn create_event(
    State(shared): State<Arc<Shared>>,
    Path(namespace): Path<String>,
    Json(event): Json<Value>,
) -> Response {
    let has =
        |key: &str, most: usize| event[key].as_str().is_some_and(|text| (1..=most).contains(&text.len()));
    let is_complete = event["eventTime"].is_string()
        && has("action", 128)
        && has("reason", 128)
        && has("reportingController", 63)
        && has("reportingInstance", 128)
        && has("note", 1024);
    if !is_complete || event["regarding"]["namespace"] != json!(namespace) {
        return refusal(StatusCode::UNPROCESSABLE_ENTITY, "the event is not valid");
    }
    shared.state.lock().events.push(event.clone());
    (StatusCode::CREATED, Json(event)).into_response()
}

/// Only the series of an event can change.
async fn patch_event(
    State(shared): State<Arc<Shared>>,
    Path((_, name)): Path<(String, String)>,
    Json(patch): Json<Value>,
) -> Response {
    let mut inner = shared.state.lock();
    let Some(event) = inner.events.iter_mut().find(|event| event["metadata"]["name"] == json!(name)) else {
        return refusal(StatusCode::NOT_FOUND, "there is no such event");
    };
    event["series"] = patch["series"].clone();
    if *event != patch {
        return refusal(StatusCode::UNPROCESSABLE_ENTITY, "only the series of an event can change");
    }
    Json(patch).into_response()
}

/// Server-side apply: the media type, a field manager, and an object that says what it is.
async fn apply_topology(
    State(shared): State<Arc<Shared>>,
    Path(name): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let media_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if media_type != Some("application/apply-patch+yaml") {
        return refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "only server-side apply is known here");
    }
    if !query.contains_key("fieldManager") {
        return refusal(StatusCode::BAD_REQUEST, "fieldManager is required for apply");
    }
    let Ok(mut object) = serde_json::from_slice::<Value>(&body) else {
        return refusal(StatusCode::BAD_REQUEST, "no JSON");
    };
    if object["kind"] != "NodeResourceTopology" || object["metadata"]["name"] != json!(name) {
        return refusal(StatusCode::BAD_REQUEST, "kind or name does not fit the path");
    }
    let mut inner = shared.state.lock();
    inner.version += 1;
    object["metadata"]["resourceVersion"] = json!(inner.version.to_string());
    inner.topologies.insert(name, object.clone());
    Json(object).into_response()
}
