//! An API server for tests: list, watch and eviction of pods, events, nodes, server-side apply of NodeResourceTopology, resource claims with
//! their status, and resource slices.
//!
//! It follows the rules that a client can violate or fail to handle: resource versions grow; a list has pages; a watch reports the
//! changes after its version, or that the version is gone if it is too old; server-side apply requires a field manager and a complete
//! object. A test can make it refuse requests, delay answers, forget old versions, close connections, or answer with other data.

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

/// Kind of the slices.
const SLICE: &str = "ResourceSlice";

/// The only valid authorization header.
const BEARER: &str = "Bearer secret";

/// A running server. It stops when this value is dropped.
#[derive(Debug)]
pub struct FakeApiServer {
    address: SocketAddr,
    shared: Arc<ServerState>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug)]
struct ServerState {
    state: Mutex<Inner>,
    /// Counts changes, for watches.
    changed: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Inner {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// Changes for watches: version, type, object.
    log: Vec<(u64, &'static str, Value)>,
    /// Watches from a version before this one are answered with 410.
    compacted: u64,
    /// Number of calls of `hang_up`. Watches that began before the last one are closed.
    generation: u64,
    nodes: BTreeMap<String, Value>,
    /// Configuration of a kubelet. This server also has the API of that kubelet.
    kubelet_configuration: Value,
    events: Vec<Value>,
    topologies: BTreeMap<String, Value>,
    claims: BTreeMap<String, Value>,
    slices: BTreeMap<String, Value>,
    /// Fields of the devices and capacities of slices without their feature gates.
    dropped_fields: Vec<&'static str>,
    /// Minor version of Kubernetes.
    minor_version: u32,
    /// Received requests: method and path with query.
    requests: Vec<String>,
    /// Refusals of single requests: part of the path, status.
    refusals: Vec<(String, StatusCode)>,
    /// Refusal of all requests: part of the path, status.
    refusing: Option<(String, StatusCode)>,
    /// Body for all requests: part of the path, body.
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
    /// Starts a server on the loopback address.
    pub async fn start() -> io::Result<Self> {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        let state = Mutex::new(Inner { version: 1, minor_version: 36, ..Inner::default() });
        let shared = Arc::new(ServerState { state, changed: watch::Sender::new(0) });
        let router = Router::new()
            .route("/api/v1/pods", routing::get(pods))
            .route("/api/v1/nodes/{name}", routing::get(node).patch(patch_node))
            .route("/configz", routing::get(configz))
            .route("/api/v1/namespaces/{namespace}/pods/{name}/eviction", routing::post(evict))
            .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events", routing::post(create_event))
            .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events/{name}", routing::patch(patch_event))
            .route(
                "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies/{name}",
                routing::patch(apply_topology),
            )
            .route("/version", routing::get(version))
            .route("/apis/resource.k8s.io/v1/resourceslices", routing::get(slices).post(create_slice))
            .route(
                "/apis/resource.k8s.io/v1/resourceslices/{name}",
                routing::get(slice).put(replace_slice).delete(remove_slice),
            )
            .route(
                "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}",
                routing::get(claim),
            )
            .route(
                "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}/status",
                routing::patch(patch_claim),
            )
            .layer(middleware::from_fn_with_state(shared.clone(), misbehave))
            .with_state(shared.clone());
        let task = tokio::spawn(async move {
            // The server runs until the task is aborted.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { address, shared, task })
    }

    /// Returns the URL of the server: `http://ADDRESS`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns a kubeconfig for this server.
    pub fn kubeconfig(&self) -> String {
        let url = self.url();
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: fake\nclusters:\n- name: fake\n  cluster: {{server: \
             \"{url}\"}}\nusers:\n- name: fake\n  user: {{token: secret}}\ncontexts:\n- name: fake\n  context: \
             {{cluster: fake, user: fake}}\n"
        )
    }

    /// Adds or changes a pod. It must have `metadata` with name, namespace and uid, and `spec`.
    pub fn put_pod(&self, mut pod: Value) {
        self.change(|inner| {
            pod["metadata"]["resourceVersion"] = json!(inner.version.to_string());
            let known = inner.pods.insert(pod_key(&pod), pod.clone());
            let kind = if known.is_none() { "ADDED" } else { "MODIFIED" };
            let nominated = |pod: &Value| pod["status"]["nominatedNodeName"].clone();
            if let Some(mut known) = known.filter(|known| nominated(known) != nominated(&pod))
                && known["spec"]["nodeName"].is_null()
            {
                // The pod leaves the watch of nominated pods.
                known["metadata"]["resourceVersion"] = json!(inner.version.to_string());
                inner.log.push((inner.version, "DELETED", known));
            }
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

    /// Increments the resource version and sends watches a bookmark.
    pub fn bookmark(&self) {
        self.change(|inner| {
            let object = json!({"kind": "Pod", "apiVersion": "v1",
                "metadata": {"resourceVersion": inner.version.to_string()}});
            inner.log.push((inner.version, "BOOKMARK", object));
        });
    }

    /// Sends an error to all watches.
    pub fn send_error(&self, status: StatusCode) {
        self.change(|inner| {
            let object = status_object(status, "set by the test");
            inner.log.push((inner.version, "ERROR", object));
        });
    }

    /// Sends a text to all watches.
    pub fn send_garbage(&self, text: String) {
        self.change(|inner| inner.log.push((inner.version, "GARBAGE", Value::String(text))));
    }

    /// Forgets all changes: a watch from an older version is answered with 410.
    pub fn compact(&self) {
        let mut inner = self.shared.state.lock();
        inner.compacted = inner.version;
        inner.log.clear();
    }

    /// Closes all watches without an error.
    pub fn hang_up(&self) {
        self.change(|inner| inner.generation += 1);
    }

    /// Adds a Kubernetes node with a UID and the version of its kubelet.
    pub fn put_node(&self, name: &str, uid: &str, kubelet: &str) {
        let node = json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": name, "uid": uid},
            "status": {"nodeInfo": {"kubeletVersion": kubelet}}});
        self.shared.state.lock().nodes.insert(name.to_owned(), node);
    }

    /// Adds or changes a `ResourceClaim`. It must have `metadata` with name and namespace.
    pub fn put_claim(&self, mut claim: Value) {
        let mut inner = self.shared.state.lock();
        inner.version += 1;
        claim["metadata"]["resourceVersion"] = json!(inner.version.to_string());
        inner.claims.insert(pod_key(&claim), claim);
    }

    /// Deletes a `ResourceClaim`.
    pub fn delete_claim(&self, namespace: &str, name: &str) {
        self.shared.state.lock().claims.remove(&format!("{namespace}/{name}"));
    }

    /// Returns a `ResourceClaim`.
    pub fn claim(&self, namespace: &str, name: &str) -> Option<Value> {
        self.shared.state.lock().claims.get(&format!("{namespace}/{name}")).cloned()
    }

    /// Adds or changes a `ResourceSlice`. It must have `metadata` with a name, and `spec`.
    pub fn put_slice(&self, slice: Value) {
        self.change(|inner| {
            inner.store_slice(slice);
        });
    }

    /// Deletes a `ResourceSlice`.
    pub fn delete_slice(&self, name: &str) {
        self.change(|inner| {
            inner.delete_slice(name);
        });
    }

    /// Returns the `ResourceSlice` with this name.
    pub fn slice(&self, name: &str) -> Option<Value> {
        self.shared.state.lock().slices.get(&format!("/{name}")).cloned()
    }

    /// Drops these fields from the devices and capacities of slices that are written, and reports this minor version of Kubernetes.
    pub fn drop_fields(&self, fields: &[&'static str], minor_version: u32) {
        let mut inner = self.shared.state.lock();
        (inner.dropped_fields, inner.minor_version) = (fields.to_vec(), minor_version);
    }

    /// Gives a Kubernetes node these taints.
    pub fn put_taints(&self, name: &str, taints: &Value) {
        if let Some(node) = self.shared.state.lock().nodes.get_mut(name) {
            node["spec"] = json!({"taints": taints});
        }
    }

    /// Gives a Kubernetes node these labels.
    pub fn put_labels(&self, name: &str, labels: &Value) {
        if let Some(node) = self.shared.state.lock().nodes.get_mut(name) {
            node["metadata"]["labels"] = labels.clone();
        }
    }

    /// Sets capacity and allocatable resources of a Kubernetes node.
    pub fn put_resources(&self, name: &str, capacity: &Value, allocatable: &Value) {
        if let Some(node) = self.shared.state.lock().nodes.get_mut(name) {
            node["status"]["capacity"] = capacity.clone();
            node["status"]["allocatable"] = allocatable.clone();
        }
    }

    /// Returns the address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the configuration that this server reports as that of a kubelet.
    pub fn put_kubelet_configuration(&self, configuration: Value) {
        self.shared.state.lock().kubelet_configuration = configuration;
    }

    /// Returns the taints of a Kubernetes node.
    pub fn taints(&self, name: &str) -> Value {
        self.shared.state.lock().nodes.get(name).map_or(Value::Null, |node| node["spec"]["taints"].clone())
    }

    /// Refuses the next request with `part` in its path or query.
    pub fn refuse_next(&self, part: &str, status: StatusCode) {
        self.shared.state.lock().refusals.push((part.to_owned(), status));
    }

    /// Refuses all requests with this text in their path or query. `None` ends this.
    pub fn refuse(&self, refusing: Option<(&str, StatusCode)>) {
        self.shared.state.lock().refusing = refusing.map(|(part, status)| (part.to_owned(), status));
    }

    /// Answers all requests with `part` in their path or query with status 200 and this body. `None` ends this.
    pub fn answer_with(&self, part: &str, body: Option<fn() -> Body>) {
        self.shared.state.lock().body = body.map(|body| (part.to_owned(), body));
    }

    /// Delays all answers by this time.
    pub fn delay(&self, delay: Duration) {
        self.shared.state.lock().delay = delay;
    }

    /// Returns all received requests: method and path with query.
    pub fn requests(&self) -> Vec<String> {
        self.shared.state.lock().requests.clone()
    }

    /// Returns the created events.
    pub fn events(&self) -> Vec<Value> {
        self.shared.state.lock().events.clone()
    }

    /// Returns the NodeResourceTopology with this name.
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

impl Inner {
    /// Stores a slice with a new resource version, and logs the change.
    fn store_slice(&mut self, mut slice: Value) -> Value {
        slice["kind"] = json!(SLICE);
        slice["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let kind = match self.slices.insert(pod_key(&slice), slice.clone()) {
            None => "ADDED",
            Some(_) => "MODIFIED",
        };
        self.log.push((self.version, kind, slice.clone()));
        slice
    }

    fn delete_slice(&mut self, name: &str) -> Option<Value> {
        let mut slice = self.slices.remove(&format!("/{name}"))?;
        slice["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.log.push((self.version, "DELETED", slice.clone()));
        Some(slice)
    }

    /// Removes the dropped fields of a slice.
    fn drop_slice_fields(&self, slice: &mut Value) {
        let devices = slice["spec"]["devices"].as_array_mut().into_iter().flatten();
        for device in devices.filter_map(Value::as_object_mut) {
            for field in &self.dropped_fields {
                device.remove(*field);
                let capacities = device.get_mut("capacity").and_then(Value::as_object_mut).into_iter();
                for capacity in capacities.flatten().filter_map(|(_, capacity)| capacity.as_object_mut()) {
                    capacity.remove(*field);
                }
            }
        }
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

async fn misbehave(State(shared): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let uri = request.uri().to_string();
    let is_known = request.headers().get(header::AUTHORIZATION).is_some_and(|says| says == BEARER);
    let (delay, refused, body) = {
        let mut inner = shared.state.lock();
        inner.requests.push(format!("{} {uri}", request.method()));
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
        (None, _) if !is_known => refusal(StatusCode::UNAUTHORIZED, "the token is not valid"),
        (None, Some(body)) => Response::new(body()),
        (None, None) => next.run(request).await,
    }
}

/// Lists pods or watches them.
async fn pods(
    State(shared): State<Arc<ServerState>>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    let fields = query.get("fieldSelector").map_or("", String::as_str);
    let bound = fields.strip_prefix("spec.nodeName=").map(|node| ("/spec/nodeName", node));
    let nominated = fields.strip_prefix("status.nominatedNodeName=");
    let nominated = nominated.map(|node| ("/status/nominatedNodeName", node));
    let Some((field, node)) = bound.or(nominated) else {
        return refusal(StatusCode::FORBIDDEN, "only the pods of one Kubernetes node may be read");
    };
    let node = json!(node);
    if query.get("watch").is_some_and(|watch| watch == "true") {
        let version = query.get("resourceVersion").and_then(|version| version.parse().ok());
        return watch_objects(shared, version.unwrap_or(0), move |object| {
            object["kind"] != SLICE && object.pointer(field) == Some(&node)
        });
    }
    let inner = shared.state.lock();
    let after = query.get("continue").cloned().unwrap_or_default();
    let limit = query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    let of_node = |pod: &&Value| pod.pointer(field) == Some(&node);
    let rest: Vec<_> = inner.pods.iter().filter(|(key, _)| **key > after).map(|(_, pod)| pod).collect();
    let items: Vec<_> = rest.iter().copied().filter(of_node).take(limit).cloned().collect();
    let more = rest.iter().copied().filter(of_node).count() > items.len();
    let token = items.last().filter(|_| more).map(pod_key).unwrap_or_default();
    Json(json!({"kind": "PodList", "apiVersion": "v1", "items": items,
        "metadata": {"resourceVersion": inner.version.to_string(), "continue": token}}))
    .into_response()
}

fn watch_objects(
    shared: Arc<ServerState>,
    version: u64,
    is_watched: impl Fn(&Value) -> bool + Clone + Send + 'static,
) -> Response {
    let begun = shared.state.lock().generation;
    let mut changes = shared.changed.subscribe();
    changes.mark_changed();
    let lines = stream::unfold((shared, changes, version), move |(shared, mut changes, version)| {
        let is_watched = is_watched.clone();
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
                            && (matches!(*kind, "BOOKMARK" | "ERROR" | "GARBAGE") || is_watched(object))
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
        "GARBAGE" => object.as_str().unwrap_or_default().to_owned(),
        // The API server writes the type first.
        _ => format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n"),
    }
}

/// Checks an eviction's kind, the pod's name and the UID. Unless this is a dry run, the pod gets a deletion timestamp, and exists until
/// the test deletes it.
async fn evict(
    State(shared): State<Arc<ServerState>>,
    Path((namespace, name)): Path<(String, String)>,
    Query(query): Query<BTreeMap<String, String>>,
    Json(eviction): Json<Value>,
) -> Response {
    let is_eviction = eviction["apiVersion"] == "policy/v1" && eviction["kind"] == "Eviction";
    if !is_eviction || eviction["metadata"] != json!({"name": name, "namespace": namespace}) {
        return refusal(StatusCode::BAD_REQUEST, "the object is not an eviction of this pod");
    }
    {
        let mut inner = shared.state.lock();
        let Some(mut pod) = inner.pods.get(&format!("{namespace}/{name}")).cloned() else {
            return refusal(StatusCode::NOT_FOUND, "there is no such pod");
        };
        if eviction["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"] {
            return refusal(StatusCode::CONFLICT, "the UID in the precondition is another");
        }
        if query.get("dryRun").is_none_or(|dry_run| dry_run != "All") {
            inner.version += 1;
            pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            pod["metadata"]["resourceVersion"] = json!(inner.version.to_string());
            inner.pods.insert(pod_key(&pod), pod.clone());
            let version = inner.version;
            inner.log.push((version, "MODIFIED", pod));
        }
    }
    shared.changed.send_modify(|count| *count += 1);
    let done =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    (StatusCode::CREATED, Json(done)).into_response()
}

async fn node(State(shared): State<Arc<ServerState>>, Path(name): Path<String>) -> Response {
    match shared.state.lock().nodes.get(&name) {
        Some(node) => Json(node).into_response(),
        None => refusal(StatusCode::NOT_FOUND, "there is no such node"),
    }
}

async fn configz(State(shared): State<Arc<ServerState>>) -> Response {
    Json(json!({"kubeletconfig": shared.state.lock().kubelet_configuration})).into_response()
}

async fn claim(
    State(shared): State<Arc<ServerState>>,
    Path((namespace, name)): Path<(String, String)>,
) -> Response {
    match shared.state.lock().claims.get(&format!("{namespace}/{name}")) {
        Some(claim) => Json(claim).into_response(),
        None => refusal(StatusCode::NOT_FOUND, "there is no such claim"),
    }
}

/// Replaces the devices in the status of a claim by a merge patch of the version that was read. A new entry of a device that is not allocated
/// is invalid.
async fn patch_claim(
    State(shared): State<Arc<ServerState>>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let media_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if media_type != Some("application/merge-patch+json") {
        return refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "only a merge patch is supported");
    }
    let mut patch: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut inner = shared.state.lock();
    let Some(mut claim) = inner.claims.get(&format!("{namespace}/{name}")).cloned() else {
        return refusal(StatusCode::NOT_FOUND, "there is no such claim");
    };
    if ["uid", "resourceVersion"].iter().any(|field| patch["metadata"][field] != claim["metadata"][field]) {
        return refusal(StatusCode::CONFLICT, "another client has changed it");
    }
    claim["status"]["devices"] = patch["status"]["devices"].take();
    let key = |of: &Value| ["driver", "pool", "device", "shareID"].map(|field| of[field].clone());
    let allocated: Vec<_> = claim["status"]["allocation"]["devices"]["results"]
        .as_array()
        .into_iter()
        .flatten()
        .map(key)
        .collect();
    let mut states = claim["status"]["devices"].as_array().into_iter().flatten();
    let before =
        inner.claims.get(&format!("{namespace}/{name}")).map(|claim| claim["status"]["devices"].clone());
    let before = before.as_ref().and_then(Value::as_array);
    let is_old = |state: &Value| before.is_some_and(|before| before.contains(state));
    if !states.all(|state| is_old(state) || allocated.contains(&key(state))) {
        return refusal(StatusCode::UNPROCESSABLE_ENTITY, "a device is not allocated");
    }
    inner.version += 1;
    claim["metadata"]["resourceVersion"] = json!(inner.version.to_string());
    inner.claims.insert(format!("{namespace}/{name}"), claim.clone());
    Json(claim).into_response()
}

async fn version(State(shared): State<Arc<ServerState>>) -> Response {
    let minor = shared.state.lock().minor_version.to_string();
    let version = format!("v1.{minor}.0");
    Json(
        json!({"major": "1", "minor": minor, "gitVersion": version, "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "2026-01-01T00:00:00Z", "goVersion": "", "compiler": "", "platform": ""}),
    )
    .into_response()
}

async fn slice(State(shared): State<Arc<ServerState>>, Path(name): Path<String>) -> Response {
    match shared.state.lock().slices.get(&format!("/{name}")) {
        Some(slice) => Json(slice).into_response(),
        None => refusal(StatusCode::NOT_FOUND, "there is no such slice"),
    }
}

async fn create_slice(State(shared): State<Arc<ServerState>>, Json(slice): Json<Value>) -> Response {
    let name = slice["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    write_slice(&shared, &name, slice, true)
}

async fn replace_slice(
    State(shared): State<Arc<ServerState>>,
    Path(name): Path<String>,
    Json(slice): Json<Value>,
) -> Response {
    write_slice(&shared, &name, slice, false)
}

/// Writes a slice without the dropped fields. An existing one is only replaced if its resource version is given.
fn write_slice(shared: &ServerState, name: &str, mut slice: Value, is_new: bool) -> Response {
    let stored = {
        let mut inner = shared.state.lock();
        let known = inner.slices.get(&format!("/{name}"));
        if is_new && known.is_some() {
            return refusal(StatusCode::CONFLICT, "the slice exists");
        }
        let version = known.map(|known| &known["metadata"]["resourceVersion"]);
        if !is_new && version != Some(&slice["metadata"]["resourceVersion"]) {
            return refusal(StatusCode::CONFLICT, "the resource version is another");
        }
        if slice["metadata"]["name"] != json!(name) || slice["spec"]["nodeName"].is_null() {
            return refusal(StatusCode::UNPROCESSABLE_ENTITY, "the slice has another name, or no node");
        }
        inner.version += 1;
        inner.drop_slice_fields(&mut slice);
        inner.store_slice(slice)
    };
    shared.changed.send_modify(|count| *count += 1);
    Json(stored).into_response()
}

async fn remove_slice(State(shared): State<Arc<ServerState>>, Path(name): Path<String>) -> Response {
    let deleted = {
        let mut inner = shared.state.lock();
        inner.version += 1;
        inner.delete_slice(&name)
    };
    shared.changed.send_modify(|count| *count += 1);
    deleted.map_or_else(
        || refusal(StatusCode::NOT_FOUND, "there is no such slice"),
        |slice| Json(slice).into_response(),
    )
}

/// Lists the slices of one Kubernetes node, in pages, or watches them.
async fn slices(
    State(shared): State<Arc<ServerState>>,
    Query(query): Query<BTreeMap<String, String>>,
) -> Response {
    let Some(fields) = query.get("fieldSelector").and_then(|fields| fields.strip_prefix("spec.nodeName="))
    else {
        return refusal(StatusCode::FORBIDDEN, "only the slices of one Kubernetes node may be read");
    };
    let (node, driver) = match fields.split_once(",spec.driver=") {
        Some((node, driver)) => (node.to_owned(), Some(driver.to_owned())),
        None => (fields.to_owned(), None),
    };
    if query.get("watch").is_some_and(|watch| watch == "true") {
        let version = query.get("resourceVersion").and_then(|version| version.parse().ok());
        return watch_objects(shared, version.unwrap_or(0), move |object| {
            object["kind"] == SLICE && object["spec"]["nodeName"] == json!(node)
        });
    }
    let inner = shared.state.lock();
    let after = query.get("continue").cloned().unwrap_or_default();
    let limit = query.get("limit").and_then(|limit| limit.parse().ok()).unwrap_or(usize::MAX);
    let of_node = |(key, slice): &(&String, &Value)| {
        let spec = &slice["spec"];
        let is_of_driver = driver.as_ref().is_none_or(|driver| spec["driver"] == json!(driver));
        **key > after && spec["nodeName"] == json!(node) && is_of_driver
    };
    let rest: Vec<_> = inner.slices.iter().filter(of_node).collect();
    let token = rest.get(limit.wrapping_sub(1)).filter(|_| rest.len() > limit).map(|(key, _)| key.as_str());
    let items: Vec<_> = rest.iter().take(limit).map(|(_, slice)| (*slice).clone()).collect();
    Json(json!({"kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1", "items": items,
        "metadata": {"resourceVersion": inner.version.to_string(), "continue": token.unwrap_or_default()}}))
    .into_response()
}

/// Replaces the taints of a node by a JSON patch that tests the previous ones.
async fn patch_node(
    State(shared): State<Arc<ServerState>>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let media_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if media_type != Some("application/json-patch+json") {
        return refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "only a JSON patch is supported");
    }
    let patch: Value = serde_json::from_slice(&body).unwrap_or_default();
    let is_on_taints = |index: usize, operation: &str| {
        patch[index]["op"] == operation && patch[index]["path"] == "/spec/taints"
    };
    let mut inner = shared.state.lock();
    let Some(node) = inner.nodes.get_mut(&name) else {
        return refusal(StatusCode::NOT_FOUND, "there is no such node");
    };
    let has_two = patch.as_array().is_some_and(|operations| operations.len() == 2);
    if !has_two || !is_on_taints(0, "test") || !is_on_taints(1, "replace") {
        return refusal(StatusCode::BAD_REQUEST, "not a tested replacement of the taints");
    }
    if node["spec"]["taints"] != patch[0]["value"] {
        return refusal(StatusCode::UNPROCESSABLE_ENTITY, "the taints are others");
    }
    node["spec"]["taints"] = patch[1]["value"].clone();
    Json(node.clone()).into_response()
}

/// Checks an event of `events.k8s.io`: required fields, and maximum lengths.
async fn create_event(
    State(shared): State<Arc<ServerState>>,
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

/// Patches an event. Only the series of an event can change.
async fn patch_event(
    State(shared): State<Arc<ServerState>>,
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

/// Checks a server-side apply: media type, field manager, and kind and name of the object.
async fn apply_topology(
    State(shared): State<Arc<ServerState>>,
    Path(name): Path<String>,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let media_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    if media_type != Some("application/apply-patch+yaml") {
        return refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, "only server-side apply is supported");
    }
    if !query.contains_key("fieldManager") {
        return refusal(StatusCode::BAD_REQUEST, "fieldManager is required for apply");
    }
    let Ok(mut object) = serde_json::from_slice::<Value>(&body) else {
        return refusal(StatusCode::BAD_REQUEST, "not JSON");
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
