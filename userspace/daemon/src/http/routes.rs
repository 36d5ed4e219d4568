//! The routes.

use std::{fmt::Write, sync::Arc};

use axum::{
    Json, Router,
    extract::{FromRequestParts, Path as UrlPath, State},
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use numaward_api as api;
use numaward_api::problem::{CONTENT_TYPE, Problem};
use numaward_model::health::{Heartbeat, Readiness};
use numaward_observe::{Observer, events::Events};
use numaward_telemetry::metrics::{Format, Metrics};
use tokio::sync::Semaphore;
use utoipa::{
    OpenApi,
    openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    accept::{Offer, choose},
    blocking::Blocking,
    problem::Failure,
    samples::Samples,
    scrape,
};

/// What the routes serve from.
#[derive(Debug)]
pub struct App {
    observer: Arc<Observer>,
    metrics: Arc<Metrics>,
    readiness: Readiness,
    heartbeat: Heartbeat,
    /// Runs what may read files.
    pub(super) blocking: Blocking,
    /// Runs what reads the events: a file that hangs does not keep it.
    recalling: Blocking,
    /// Scrapes that are written at once; each takes a thread.
    scrapes: Arc<Semaphore>,
    /// Streams of events that are open at once.
    pub(super) streams: Arc<Semaphore>,
    /// What those who watch are shown.
    pub(super) samples: Samples,
    /// The OpenAPI document as JSON.
    open_api: serde_json::Value,
}

/// Scrapes at once: a Prometheus pair and a person.
const MAX_SCRAPES: usize = 4;

impl App {
    /// Puts the parts together.
    pub fn new(
        observer: Arc<Observer>,
        metrics: Arc<Metrics>,
        readiness: Readiness,
        heartbeat: Heartbeat,
    ) -> Arc<Self> {
        let scrapes = Arc::new(Semaphore::new(MAX_SCRAPES));
        let streams = Arc::new(Semaphore::new(super::events::MAX_STREAMS));
        let samples = Samples::new(observer.clone());
        let (blocking, recalling) = (Blocking::default(), Blocking::default());
        let open_api = open_api();
        Arc::new(Self {
            observer,
            metrics,
            readiness,
            heartbeat,
            blocking,
            recalling,
            scrapes,
            streams,
            samples,
            open_api,
        })
    }

    /// Asks the observer, on a thread that may block.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Observer) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let observer = self.observer.clone();
        self.blocking.run(move || work(&observer)).await
    }

    /// Asks for events, on a thread that may block.
    pub(super) async fn recall<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Events) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let events = self.observer.events().clone();
        self.recalling.run(move || work(&events)).await
    }
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "numaward",
        description = "What numaward sees of this host, and what it promises. Changes are made on the control socket, \
                       and where it is configured on the control address. Errors are problem details (RFC 9457).",
        contact(),
        license(name = "MIT OR Apache-2.0")
    ),
    servers((url = "http://127.0.0.1:9560")),
    components(schemas(Problem, api::Sample))
)]
struct Document;

/// The OpenAPI document of the routes.
pub fn open_api() -> serde_json::Value {
    let mut described = documented().into_openapi();
    described.merge(super::control::open_api());
    described.merge(super::events::open_api());
    let schemes = described.components.get_or_insert_default();
    schemes.add_security_scheme(
        "token",
        SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build()),
    );
    let description = Some("On the control address, by an authority of control.tls.clientCaFile".to_owned());
    schemes.add_security_scheme(
        "certificate",
        SecurityScheme::MutualTls { description, deprecated: None, extensions: None },
    );
    let mut document = serde_json::to_value(described).unwrap_or_default();
    // OpenAPI knows no parameter with slashes in it: there they are percent-encoded.
    if let Some(paths) = document["paths"].as_object_mut() {
        *paths =
            std::mem::take(paths).into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
    }
    // Every route may answer so; said once for all of them.
    if let Some(paths) = document["paths"].as_object_mut() {
        for operation in paths.values_mut().filter_map(|path| path.get_mut("get")) {
            operation["responses"]["default"] = serde_json::json!({
                "description": "An error, as problem details (RFC 9457)",
                "content": { CONTENT_TYPE: { "schema": { "$ref": "#/components/schemas/Problem" } } }
            });
        }
    }
    document
}

fn documented() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(metrics))
        .routes(routes!(livez))
        .routes(routes!(readyz))
        .routes(routes!(topology))
        .routes(routes!(nodes))
        .routes(routes!(workloads))
        .routes(routes!(intruders))
        .routes(routes!(status))
        .routes(routes!(version))
        .routes(routes!(document))
}

pub(super) fn router(app: Arc<App>) -> Router {
    let (router, _) = documented().split_for_parts();
    router.with_state(app)
}

/// The keys of the query that a resource takes; it has no values.
struct Keys<const VERBOSE: bool> {
    verbose: bool,
}
type NoQuery = Keys<false>;

impl<const VERBOSE: bool, S: Sync> FromRequestParts<S> for Keys<VERBOSE> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let mut keys = Self { verbose: false };
        let query = parts.uri.query().unwrap_or_default();
        for key in query.split('&').filter(|key| !key.is_empty()) {
            match key.split('=').next() {
                Some("verbose") if VERBOSE => keys.verbose = true,
                _ => {
                    let path = parts.uri.path();
                    let taken = if VERBOSE { "verbose alone" } else { "none" };
                    let detail = format!("unknown parameter {key:?}: {path} takes {taken}");
                    return Err(Failure(StatusCode::BAD_REQUEST, detail));
                }
            }
        }
        Ok(keys)
    }
}

pub(super) const JSON: [Offer<()>; 1] =
    [Offer { media_type: "application", subtype: "json", version: None, gives: () }];
const TEXT: [Offer<()>; 1] = [Offer { media_type: "text", subtype: "plain", version: None, gives: () }];
const METRICS: [Offer<Format>; 2] = [
    Offer { media_type: "text", subtype: "plain", version: Some("0.0.4"), gives: Format::Prometheus },
    Offer {
        media_type: "application",
        subtype: "openmetrics-text",
        version: Some("1.0.0"),
        gives: Format::OpenMetrics,
    },
];

pub(super) fn accepted<'a, T>(headers: &HeaderMap, offers: &'a [Offer<T>]) -> Result<&'a T, Failure> {
    choose(headers, offers).ok_or_else(|| {
        let offered: Vec<String> = offers
            .iter()
            .map(|offer| match offer.version {
                Some(version) => format!("{}/{}; version={version}", offer.media_type, offer.subtype),
                None => format!("{}/{}", offer.media_type, offer.subtype),
            })
            .collect();
        let detail = format!("the header Accept takes none of what is offered: {}", offered.join(", "));
        Failure(StatusCode::NOT_ACCEPTABLE, detail)
    })
}

/// A request for a resource that is JSON and takes no query.
struct PlainJson;

impl<S: Sync> FromRequestParts<S> for PlainJson {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        NoQuery::from_request_parts(parts, state).await?;
        accepted(&parts.headers, &JSON)?;
        Ok(Self)
    }
}

/// Metrics for Prometheus: OpenMetrics 1.0 or Prometheus text 0.0.4, as the header Accept asks.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "metrics",
    responses(
        (status = 200, description = "The metrics", content(
            (String = "text/plain; version=0.0.4; charset=utf-8"),
            (String = "application/openmetrics-text; version=1.0.0; charset=utf-8"),
        )),
        (status = 406, description = "Neither format is accepted", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap, _: NoQuery) -> Result<Response, Failure> {
    let format = *accepted(&headers, &METRICS)?;
    // The semaphore is never closed; without a place, the scrape would merely not be counted.
    let place = app.scrapes.clone().acquire_owned().await.ok();
    let body = scrape::body(app.metrics.clone(), format, place);
    Ok(([(header::CONTENT_TYPE, format.content_type()), (header::VARY, "accept")], body).into_response())
}

/// Whether the daemon is alive: its observing loop comes round.
#[utoipa::path(
    get,
    path = "/livez",
    tag = "health",
    responses(
        (status = 200, description = "Alive", body = String, content_type = "text/plain; charset=utf-8"),
        (status = 503, description = "Hung", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn livez(State(app): State<Arc<App>>, headers: HeaderMap, _: NoQuery) -> Result<&'static str, Failure> {
    accepted(&headers, &TEXT)?;
    if app.heartbeat.is_alive() {
        return Ok("ok\n");
    }
    let detail = format!("the observing loop has not come round for {} s", app.heartbeat.age().as_secs());
    Err(Failure(StatusCode::SERVICE_UNAVAILABLE, detail))
}

/// Whether the daemon is ready: every part has done what it could. A part that works less well than it
/// could, for want of a privilege for one, does not make the daemon unready: see `/api/v1/status`.
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
async fn readyz(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    query: Keys<true>,
) -> Result<String, Failure> {
    accepted(&headers, &TEXT)?;
    let waiting: Vec<&str> =
        app.readiness.parts().filter(|(_, ready)| !ready).map(|(part, _)| part).collect();
    if !waiting.is_empty() {
        let detail = format!("not ready yet: {}", waiting.join(", "));
        return Err(Failure(StatusCode::SERVICE_UNAVAILABLE, detail));
    }
    let mut text = String::new();
    if query.verbose {
        for (part, _) in app.readiness.parts() {
            let _ = writeln!(text, "[+] {part}");
        }
    }
    text.push_str("ok\n");
    Ok(text)
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

/// The nodes: their memory by kind, and what is allocated on them.
#[utoipa::path(
    get,
    path = "/api/v1/nodes",
    tag = "api",
    responses((status = 200, description = "The nodes", body = api::Nodes))
)]
async fn nodes(_: PlainJson, State(app): State<Arc<App>>) -> Result<Json<api::Nodes>, Failure> {
    app.ask(Observer::nodes).await.map(Json)
}

/// The workloads: what they allocated, where their memory lies, what they lost for want of it.
#[utoipa::path(
    get,
    path = "/api/v1/workloads",
    tag = "api",
    responses((status = 200, description = "The workloads", body = api::Workloads))
)]
async fn workloads(_: PlainJson, State(app): State<Arc<App>>) -> Result<Json<api::Workloads>, Failure> {
    app.ask(Observer::workloads).await.map(Json)
}

/// Who ran on the exclusive CPUs of a workload. A name with slashes is percent-encoded.
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
    headers: HeaderMap,
    UrlPath(name): UrlPath<String>,
    _: NoQuery,
) -> Result<Json<api::Intruders>, Failure> {
    accepted(&headers, &JSON)?;
    let asked = name.clone();
    let found = app.ask(move |observer| observer.intruders(&asked)).await?;
    found.map(Json).ok_or_else(|| {
        let detail = format!("there is no workload named {name:?}; /api/v1/workloads lists all");
        Failure(StatusCode::NOT_FOUND, detail)
    })
}

/// How numaward itself is doing: its probes, their maps, what does not work and why.
#[utoipa::path(
    get,
    path = "/api/v1/status",
    tag = "api",
    responses((status = 200, description = "The status", body = api::Status))
)]
async fn status(_: PlainJson, State(app): State<Arc<App>>) -> Result<Json<api::Status>, Failure> {
    app.ask(Observer::status).await.map(Json)
}

/// The version that runs.
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
