//! The routes of the read-only API, and its OpenAPI document.

mod events;
mod stacks_and_regions;

use std::sync::Arc;

use axum::{
    Extension, Json, Router,
    body::Bytes,
    extract::{FromRequestParts, Path as UrlPath, State},
    http::{Extensions, HeaderMap, StatusCode, Uri, header, request::Parts},
    response::{IntoResponse, Response},
};
use numaward_api as api;
use numaward_api::problem::{CONTENT_TYPE, Problem};
use numaward_model::health::{Heartbeats, Readiness};
use numaward_observe::{Observer, events::Events};
use numaward_telemetry::metrics::{Format, Metrics};
use serde::Serialize;
use serde_json::json;
use tower_http::{
    CompressionLevel,
    compression::{CompressionLayer, DefaultPredicate, Predicate as _},
};
use utoipa::{OpenApi as _, openapi::OpenApi};
use utoipa_axum::{
    router::{OpenApiRouter, UtoipaMethodRouterExt as _},
    routes,
};

use crate::{
    accept::{Offer, choose},
    blocking::BlockingPool,
    joined_reads::JoinedReads,
    peer::Peer,
    problem::Failure,
    samples::Samples,
    scrapes::Scrapes,
    shared_reads::SharedReads,
    streaming_body,
    streams::Streams,
};

/// State of the routes.
#[derive(Debug)]
pub struct App {
    observer: Arc<Observer>,
    metrics: Arc<Metrics>,
    readiness: Readiness,
    heartbeats: Heartbeats,
    /// Places for work that may read files.
    blocking: BlockingPool,
    /// Separate places for reads of events, so that a hung file does not block them.
    event_reads: BlockingPool,
    /// Reads of data of the whole host, in the places of `blocking`.
    joined_reads: JoinedReads,
    /// Reads from inside workloads. A hung workload does not block those of another workload.
    workload_reads: SharedReads,
    /// Places for concurrent scrapes.
    scrapes: Scrapes,
    /// Samples for the clients of the stream.
    pub(crate) samples: Arc<Samples>,
    /// The OpenAPI document as JSON.
    open_api: serde_json::Value,
}

impl App {
    /// Creates the state. `described` is the OpenAPI document of the routes that the daemon adds.
    pub fn new(
        observer: &Arc<Observer>,
        metrics: &Arc<Metrics>,
        readiness: &Readiness,
        heartbeats: &Heartbeats,
        described: OpenApi,
    ) -> Arc<Self> {
        Arc::new(Self {
            samples: Samples::new(observer.clone()),
            observer: observer.clone(),
            metrics: metrics.clone(),
            readiness: readiness.clone(),
            heartbeats: heartbeats.clone(),
            blocking: BlockingPool::default(),
            event_reads: BlockingPool::default(),
            joined_reads: JoinedReads::default(),
            workload_reads: SharedReads::default(),
            scrapes: Scrapes::default(),
            open_api: open_api(described),
        })
    }

    /// Runs a query of the observer on a thread that may block.
    pub(crate) async fn query<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Observer) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let observer = self.observer.clone();
        self.blocking.run(move || work(&observer)).await
    }

    /// Runs a query of the observer and encodes the result as JSON on the same thread. For the workloads of a large
    /// host, the encoding takes long, and would delay the other connections on the runtime's workers. Requests for the
    /// same route that wait share one query.
    async fn query_json<T: Serialize + 'static>(
        &self,
        route: &'static str,
        work: impl FnOnce(&Observer) -> T + Send + 'static,
    ) -> Result<Response, Failure> {
        let observer = self.observer.clone();
        let read = self.joined_reads.run(route, &self.blocking, move || json(&work(&observer))).await;
        read.map(json_response)
    }

    /// Runs a query of the events on a thread that may block.
    pub(crate) async fn query_events<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Events) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let events = self.observer.events().clone();
        self.event_reads.run(move || work(&events)).await
    }

    /// Reads data from inside a workload on a thread that may block. Concurrent requests for the same workload share one read.
    async fn shared_read<T: Serialize>(
        &self,
        route: &str,
        name: String,
        work: impl FnOnce(&Observer, &str) -> Result<T, Failure> + Send + 'static,
    ) -> Result<Response, Failure> {
        let named = name.clone();
        let owner = self.query(move |observer| observer.owner(&named)).await?;
        let owner = owner.map_err(|none| stacks_and_regions::failure(&name, none))?;
        let (key, observer) = (format!("{route} {name}"), self.observer.clone());
        let read = move || json(&work(&observer, &name)?);
        self.workload_reads.run(key, owner, read).await.map(json_response)
    }
}

fn json(value: &impl Serialize) -> Result<Bytes, Failure> {
    serde_json::to_vec(value).map(Bytes::from).map_err(|error| {
        tracing::error!(%error, "a response cannot be encoded as JSON");
        (StatusCode::INTERNAL_SERVER_ERROR, "numaward failed; see its log".to_owned())
    })
}

fn json_response(json: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], json).into_response()
}

#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "numaward",
        description = "The state of this host as numaward observes it, and the guarantees of its workloads. Changes are made on the control \
                       socket, and on the control address if that is configured. Errors are problem details (RFC 9457).",
        contact(),
        license(name = "MIT OR Apache-2.0")
    ),
    servers((url = "http://127.0.0.1:9560")),
    components(schemas(Problem, api::Sample))
)]
struct Document;

/// Returns the OpenAPI document of the routes of this crate and of `described`.
pub fn open_api(described: OpenApi) -> serde_json::Value {
    let mut all = documented().into_openapi();
    all.merge(described);
    let mut document = serde_json::to_value(all).unwrap_or_default();
    document["components"]["securitySchemes"] = json!({
        "certificate": {
            "type": "mutualTLS",
            "description": "On the control address, signed by an authority of control.tls.clientCaFile",
        },
        "token": { "type": "http", "scheme": "bearer" },
    });
    if let Some(paths) = document["paths"].as_object_mut() {
        // Every route may return an error.
        for operation in paths.values_mut().filter_map(|path| path.get_mut("get")) {
            operation["responses"]["default"] = json!({
                "description": "An error, as problem details (RFC 9457)",
                "content": { CONTENT_TYPE: { "schema": { "$ref": "#/components/schemas/Problem" } } }
            });
        }
        // A path parameter of OpenAPI cannot contain slashes: they are percent-encoded.
        let named = std::mem::take(paths).into_iter();
        paths.extend(named.map(|(path, item)| (path.replace("{*", "{"), item)));
    }
    document
}

fn documented() -> OpenApiRouter<Arc<App>> {
    // The fastest level: metrics are so repetitive that higher levels save little.
    let is_success = |status: StatusCode, _, _: &HeaderMap, _: &Extensions| status.is_success();
    let compressed = CompressionLayer::new()
        .quality(CompressionLevel::Fastest)
        .compress_when(DefaultPredicate::new().and(is_success));
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(metrics).layer(compressed))
        .routes(routes!(livez))
        .routes(routes!(readyz))
        .routes(routes!(topology))
        .routes(routes!(nodes))
        .routes(routes!(workloads))
        .routes(routes!(intruders))
        .routes(routes!(history))
        .routes(routes!(trends))
        .routes(routes!(usage))
        .routes(routes!(workload_history))
        .routes(routes!(status))
        .routes(routes!(version))
        .routes(routes!(document))
        .merge(events::routes())
        .merge(stacks_and_regions::routes())
}

pub(crate) fn router(app: Arc<App>) -> Router {
    Router::from(documented().with_state(app)).layer(Extension(Streams::default()))
}

/// Returns true if the query has the key `known`. Any other key is an error; values are ignored.
fn has_key(uri: &Uri, known: Option<&str>) -> Result<bool, Failure> {
    let mut is_set = false;
    for key in uri.query().unwrap_or_default().split('&').filter(|key| !key.is_empty()) {
        if key.split('=').next() != known {
            let allowed = known.map_or_else(|| "none".to_owned(), |known| format!("{known} alone"));
            let detail = format!("unknown parameter {key:?}: {} takes {allowed}", uri.path());
            return Err((StatusCode::BAD_REQUEST, detail));
        }
        is_set = true;
    }
    Ok(is_set)
}

pub(crate) const JSON: [Offer<()>; 1] = [Offer { media_type: "application/json", version: None, value: () }];
const TEXT: [Offer<()>; 1] = [Offer { media_type: "text/plain", version: None, value: () }];
const METRICS: [Offer<Format>; 2] = [
    Offer { media_type: "text/plain", version: Some("0.0.4"), value: Format::Prometheus },
    Offer { media_type: "application/openmetrics-text", version: Some("1.0.0"), value: Format::OpenMetrics },
];

pub(crate) fn accepted<'a, T>(headers: &HeaderMap, offers: &'a [Offer<T>]) -> Result<&'a T, Failure> {
    choose(headers, offers).ok_or_else(|| {
        let offered = offers.iter().map(|Offer { media_type, version, .. }| match version {
            Some(version) => format!("{media_type}; version={version}"),
            None => (*media_type).to_owned(),
        });
        let offered = offered.collect::<Vec<_>>().join(", ");
        let detail = format!("the header Accept takes none of what is offered: {offered}");
        (StatusCode::NOT_ACCEPTABLE, detail)
    })
}

/// A request for a resource that is JSON and takes no query.
struct PlainJson;

impl<S: Sync> FromRequestParts<S> for PlainJson {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        has_key(&parts.uri, None)?;
        accepted(&parts.headers, &JSON)?;
        Ok(Self)
    }
}

/// Metrics for Prometheus: OpenMetrics 1.0 or Prometheus text 0.0.4, as the header Accept requests.
///
/// They are compressed if the header Accept-Encoding accepts gzip.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "metrics",
    responses(
        (status = 200, description = "The metrics", content(
            (String = "text/plain; version=0.0.4; charset=utf-8"),
            (String = "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        )),
        (status = 406, description = "No format, or no encoding, is accepted", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn metrics(
    State(app): State<Arc<App>>,
    peer: Option<Extension<Peer>>,
    uri: Uri,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    has_key(&uri, None)?;
    let format = *accepted(&headers, &METRICS)?;
    let connection = peer.and_then(|Extension(peer)| peer.place);
    let place = app.scrapes.place(connection.as_ref().and_then(|place| place.peer())).await;
    let body = streaming_body::scrape(app.metrics.clone(), format, place, connection).await?;
    Ok(([(header::CONTENT_TYPE, format.content_type()), (header::VARY, "accept")], body).into_response())
}

/// Liveness of the daemon: none of its core threads hangs. Otherwise the response names the first one that does.
#[utoipa::path(
    get,
    path = "/livez",
    tag = "health",
    responses(
        (status = 200, description = "Alive", body = String, content_type = "text/plain; charset=utf-8"),
        (status = 503, description = "Hung", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn livez(State(app): State<Arc<App>>, uri: Uri, headers: HeaderMap) -> Result<&'static str, Failure> {
    has_key(&uri, None)?;
    accepted(&headers, &TEXT)?;
    match app.heartbeats.late_thread() {
        None => Ok("ok\n"),
        Some(late) => Err((StatusCode::SERVICE_UNAVAILABLE, late.to_string())),
    }
}

/// Readiness of the daemon: every part has completed its start. A part that is impaired, for example because a
/// privilege is missing, does not make the daemon unready: see `/api/v1/status`.
#[utoipa::path(
    get,
    path = "/readyz",
    tag = "health",
    params(("verbose" = Option<String>, Query, description = "Lists each part; takes no value")),
    responses(
        (status = 200, description = "Ready", body = String, content_type = "text/plain; charset=utf-8"),
        (status = 503, description = "Not ready yet", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn readyz(State(app): State<Arc<App>>, uri: Uri, headers: HeaderMap) -> Result<String, Failure> {
    let is_verbose = has_key(&uri, Some("verbose"))?;
    accepted(&headers, &TEXT)?;
    let waiting = app.readiness.parts().filter(|(_, ready)| !ready);
    let waiting: Vec<&str> = waiting.map(|(part, _)| part).collect();
    if !waiting.is_empty() {
        let detail = format!("not ready yet: {}", waiting.join(", "));
        return Err((StatusCode::SERVICE_UNAVAILABLE, detail));
    }
    let parts = app.readiness.parts().filter(|_| is_verbose).map(|(part, _)| format!("[+] {part}\n"));
    Ok(parts.chain(["ok\n".to_owned()]).collect())
}

/// The machine: nodes, distances, CPUs, sockets, caches, hugepages.
#[utoipa::path(
    get,
    path = "/api/v1/topology",
    tag = "api",
    responses((status = 200, description = "The machine", body = api::Topology))
)]
async fn topology(_: PlainJson, State(app): State<Arc<App>>) -> Json<api::Topology> {
    Json(api::Topology::from(&*app.observer.machine()))
}

/// The nodes: their memory by kind, and the guarantees on them.
#[utoipa::path(
    get,
    path = "/api/v1/nodes",
    tag = "api",
    responses((status = 200, description = "The nodes", body = api::Nodes))
)]
async fn nodes(_: PlainJson, State(app): State<Arc<App>>) -> Result<Response, Failure> {
    app.query_json("nodes", Observer::nodes).await
}

/// The workloads: their allocations, the nodes of their memory, and their losses when memory was short.
#[utoipa::path(
    get,
    path = "/api/v1/workloads",
    tag = "api",
    responses((status = 200, description = "The workloads", body = api::Workloads))
)]
async fn workloads(_: PlainJson, State(app): State<Arc<App>>) -> Result<Response, Failure> {
    app.query_json("workloads", Observer::workloads).await
}

/// The other processes that ran on the exclusive CPUs of a workload. A name with slashes is percent-encoded.
#[utoipa::path(
    get,
    path = "/api/v1/workloads/{name}/intruders",
    tag = "api",
    params(("name" = String, Path, description = "The name of the workload")),
    responses(
        (status = 200, description = "The intruders", body = api::Intruders),
        (status = 404, description = "There is no such workload", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn intruders(
    State(app): State<Arc<App>>,
    UrlPath(name): UrlPath<String>,
    _: PlainJson,
) -> Result<Json<api::Intruders>, Failure> {
    let key = name.clone();
    let found = app.query(move |observer| observer.intruders(&key)).await?;
    found.map(Json).ok_or_else(|| no_workload(&name))
}

fn no_workload(name: &str) -> Failure {
    (StatusCode::NOT_FOUND, format!("there is no workload named {name:?}; /api/v1/workloads lists all"))
}

/// The last hour of the host: ten minutes in steps of five seconds, the hour in steps of a minute. It is always recorded, is
/// kept in memory, and begins when the daemon starts.
#[utoipa::path(
    get,
    path = "/api/v1/history",
    tag = "api",
    responses((status = 200, description = "The last hour", body = api::History))
)]
async fn history(_: PlainJson, State(app): State<Arc<App>>) -> Result<Response, Failure> {
    app.query_json("history", Observer::history).await
}

/// The last ten minutes of all workloads in steps of ten seconds, for a list of workloads.
#[utoipa::path(
    get,
    path = "/api/v1/history/workloads",
    tag = "api",
    responses((status = 200, description = "The last ten minutes", body = api::Trends))
)]
async fn trends(_: PlainJson, State(app): State<Arc<App>>) -> Result<Response, Failure> {
    app.query_json("trends", Observer::trends).await
}

/// The CPU time and memory that workloads used in the last hour: median, 95th percentile and peak. They are read about once a minute.
#[utoipa::path(
    get,
    path = "/api/v1/usage",
    tag = "api",
    responses((status = 200, description = "The usage", body = api::Usage))
)]
async fn usage(_: PlainJson, State(app): State<Arc<App>>) -> Result<Response, Failure> {
    app.query_json("usage", Observer::usage).await
}

/// The last hour of the workload with this cgroup, or of all workloads with this name together. Slashes are percent-encoded.
#[utoipa::path(
    get,
    path = "/api/v1/workloads/{name}/history",
    tag = "api",
    params(("name" = String, Path, description = "The cgroup of the workload, or its name")),
    responses(
        (status = 200, description = "The last hour", body = api::WorkloadHistory),
        (status = 404, description = "There is no history of such a workload", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn workload_history(
    State(app): State<Arc<App>>,
    UrlPath(name): UrlPath<String>,
    _: PlainJson,
) -> Result<Json<api::WorkloadHistory>, Failure> {
    let key = name.clone();
    let found = app.query(move |observer| observer.workload_history(&key)).await?;
    found.map(Json).ok_or_else(|| {
        let detail = format!(
            "there is no history of a workload {name:?}: /api/v1/workloads lists all; a new workload has one after five \
             seconds, and if there are more than {}, idle workloads have none",
            api::MAX_HISTORIES
        );
        (StatusCode::NOT_FOUND, detail)
    })
}

/// The status of numaward itself: its probes, their maps, and the parts that do not work, with the reasons.
#[utoipa::path(
    get,
    path = "/api/v1/status",
    tag = "api",
    responses((status = 200, description = "The status", body = api::Status))
)]
async fn status(_: PlainJson, State(app): State<Arc<App>>) -> Result<Response, Failure> {
    app.query_json("status", Observer::status).await
}

/// The version of the running daemon.
#[utoipa::path(
    get,
    path = "/api/v1/version",
    tag = "api",
    responses((status = 200, description = "The version", body = api::Version))
)]
async fn version(_: PlainJson) -> Json<api::Version> {
    Json(api::Version::on(rustix::system::uname().release().to_string_lossy()))
}

/// This document.
#[utoipa::path(
    get,
    path = "/openapi.json",
    tag = "api",
    responses((status = 200, description = "The OpenAPI document", body = Object))
)]
async fn document(_: PlainJson, State(app): State<Arc<App>>) -> Json<serde_json::Value> {
    Json(app.open_api.clone())
}
