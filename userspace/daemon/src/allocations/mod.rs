//! HTTP routes of guarantees (`/api/v1/allocations`), and of the reload. All addresses serve the reads; only the control socket and, if configured, the
//! control address serve the changes.

use std::{future, sync::Arc};

use axum::{
    Json, Router,
    body::Bytes,
    extract::{Path as UrlPath, RawQuery, State, rejection::BytesRejection},
    http::{StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get, patch, post},
};
use numaward_api as api;
use numaward_api::problem::CONTENT_TYPE;
use numaward_cgroup::knob::KnobError;
use numaward_enforce::EnforceError;
use numaward_guarantee::{
    command::AdmissionOutcome,
    error::AdmissionError,
    reconciler::{ReconcilerHandle, View},
    request::{FieldError, Request, Resize},
};
use numaward_http::{App, BlockingPool, Gate, HostNames};
use serde::de::DeserializeOwned;
use utoipa::openapi::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};

mod rebalance;
mod reload;

pub use self::reload::{ReloadError, ReloadHandle, ReloadRequest};

/// Source of the guarantees, `None` if this host can have none, and the threads that serialize them. A request reads no file, so
/// that a file that hangs does not delay the answer.
#[derive(Clone)]
struct ReadState(Option<View>, BlockingPool);

fn read_routes() -> OpenApiRouter<ReadState> {
    OpenApiRouter::new().routes(routes!(allocations))
}

fn change_routes() -> OpenApiRouter<Arc<ReconcilerHandle>> {
    let routes = OpenApiRouter::new()
        .routes(routes!(admit))
        .routes(routes!(resize))
        .routes(routes!(release))
        .routes(routes!(kubelet_state));
    routes.merge(rebalance::routes())
}

/// Returns all routes of the read-only address. `view` is `None` if this host can have no guarantees; a `gate` checks the credentials
/// of clients.
pub fn router(app: Arc<App>, view: Option<View>, gate: Option<Arc<Gate>>, names: HostNames) -> Router {
    let refusal = "this address is read-only; use the control socket (by default /run/numaward/control.sock) or the address in \
                   control.listen";
    let refusing = refusing_router(view, refusal).route("/api/v1/reload", post(refuse(refusal)));
    numaward_http::router(app, refusing, gate, names)
}

/// Returns all routes of the control socket.
pub fn control_router(app: Arc<App>, reconciler: ReconcilerHandle, reload: ReloadHandle) -> Router {
    numaward_http::control_router(app, full_router(reconciler).merge(reload_router(reload)))
}

/// Returns the routes of the control socket of a daemon that gives no guarantees: the reads, and the reload.
pub fn observing_router(app: Arc<App>, view: Option<View>, reload: ReloadHandle) -> Router {
    let refusal = "this daemon gives no guarantees; its log has the reason (mode: observe, or no cgroup v2)";
    numaward_http::control_router(app, refusing_router(view, refusal).merge(reload_router(reload)))
}

/// Returns all routes of the control address.
pub fn remote_router(
    app: Arc<App>,
    reconciler: ReconcilerHandle,
    gate: Arc<Gate>,
    names: HostNames,
) -> Router {
    let refusal = "the configuration is loaded again on the control socket only";
    let routes = full_router(reconciler).route("/api/v1/reload", post(refuse(refusal)));
    numaward_http::remote_router(app, routes, gate, names)
}

fn read_router(view: Option<View>) -> Router {
    read_routes().with_state(ReadState(view, BlockingPool::default())).into()
}

/// Returns a handler that refuses each request with this detail.
fn refuse(detail: &'static str) -> impl Fn(Uri) -> future::Ready<Response> + Copy + Send + Sync + 'static {
    move |uri| future::ready(respond(refusal(StatusCode::NOT_FOUND, detail.to_owned(), uri.path())))
}

fn reload_router(handle: ReloadHandle) -> Router {
    reload::routes().with_state(handle).into()
}

/// Returns the read routes. All other routes answer with a refusal with this detail.
fn refusing_router(view: Option<View>, detail: &'static str) -> Router {
    let refuse = refuse(detail);
    let refuse_change = move |uri: Uri| async move {
        let refusal = refusal(StatusCode::METHOD_NOT_ALLOWED, detail.to_owned(), uri.path());
        ([(header::ALLOW, "GET,HEAD")], respond(refusal))
    };
    read_router(view)
        .route("/api/v1/allocations", MethodRouter::new().fallback(refuse_change))
        .route("/api/v1/allocations/{*name}", patch(refuse).delete(refuse))
        .route("/api/v1/plan", post(refuse))
        .route("/api/v1/rebalance", get(refuse).post(refuse).delete(refuse))
        .route("/api/v1/kubelet-state", get(refuse))
}

fn full_router(reconciler: ReconcilerHandle) -> Router {
    let view = reconciler.view();
    let changes: Router = change_routes().with_state(Arc::new(reconciler)).into();
    read_router(Some(view)).merge(changes)
}

/// Returns the OpenAPI description of the routes of this module.
pub fn open_api() -> OpenApi {
    let mut document = read_routes().into_openapi();
    document.merge(change_routes().into_openapi());
    document.merge(reload::routes().into_openapi());
    document
}

/// Returns the guarantees of all workloads, and the resources that are still free.
#[utoipa::path(
    get,
    path = "/api/v1/allocations",
    tag = "api",
    responses(
        (status = 200, description = "The guarantees", body = api::Allocations),
        (status = 503, description = "This host can have no guarantees", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn allocations(
    State(ReadState(view, blocking)): State<ReadState>,
    uri: Uri,
) -> Result<Json<api::Allocations>, Response> {
    let Some(view) = view else {
        let detail = "the daemon cannot give guarantees on this host; its log has the reason".to_owned();
        return Err(respond(refusal(StatusCode::SERVICE_UNAVAILABLE, detail, uri.path())));
    };
    blocking.run(move || Json((*view()).clone())).await.map_err(IntoResponse::into_response)
}

/// Requests a guarantee. The answer comes when the kernel enforces it. Only on the control socket and the control address.
#[utoipa::path(
    post,
    path = "/api/v1/allocations",
    tag = "control",
    params(("dryRun" = Option<bool>, Query, description = "Report the result without applying it")),
    security((), ("token" = []), ("certificate" = [])),
    request_body = api::AllocationRequest,
    responses(
        (status = 200, description = "The result of the dry run", body = api::DryRun),
        (status = 201, description = "The guarantee", body = api::Allocation),
        (status = 400, description = "The body is not JSON, or a field is missing or unknown", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: no token and no client certificate, or an invalid token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "The client is not root, or its certificate has no name that is allowed to control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "The engine refuses the request, or the request conflicts with an existing guarantee", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 413, description = "The body is too large", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A field has an invalid value, or the target cannot be bound to CPUs and nodes", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "The kernel refuses a write, or the ledger cannot be stored", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The policy does not fit the machine, the request timed out, too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn admit(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
    RawQuery(query): RawQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Response> {
    let wrong = |error: FieldError| refused(&AdmissionError::Field(error), uri.path());
    let dry_run = dry_run(query.as_deref()).map_err(wrong)?;
    let body: api::AllocationRequest = read(body, "AllocationRequest", &uri).map_err(|refused| *refused)?;
    let request = Request::new(&body).map_err(wrong)?;
    match reconciler.admit(request, dry_run).await {
        Ok(AdmissionOutcome::Admitted(allocation)) => {
            Ok((StatusCode::CREATED, Json(allocation)).into_response())
        }
        Ok(AdmissionOutcome::Dry(dry)) => Ok(Json(dry).into_response()),
        Err(error) => Err(refused(&error, uri.path())),
    }
}

/// Returns true if the query requests a dry run.
fn dry_run(query: Option<&str>) -> Result<bool, FieldError> {
    match query.unwrap_or_default() {
        "" | "dryRun=false" => Ok(false),
        "dryRun=true" => Ok(true),
        other => {
            let problem = format!("unknown parameters {other:?}");
            Err(FieldError::new("dryRun", problem, "dryRun=true or dryRun=false, once"))
        }
    }
}

/// Parses the JSON of a body. `name` is the name of its schema in the OpenAPI document.
fn read<T: DeserializeOwned>(
    body: Result<Bytes, BytesRejection>,
    name: &str,
    uri: &Uri,
) -> Result<T, Box<Response>> {
    let body = body.map_err(|rejection| Box::new(rejection.into_response()))?;
    let mut json = serde_json::Deserializer::from_slice(&body);
    let value: Result<T, _> = serde_path_to_error::deserialize(&mut json);
    let value = value.map_err(|error| {
        let mut refusal = refusal(StatusCode::BAD_REQUEST, error.inner().to_string(), uri.path());
        refusal.field = Some(error.path().to_string()).filter(|path| path != ".");
        refusal.allowed = Some(format!("a request as /openapi.json describes it ({name})"));
        Box::new(respond(refusal))
    })?;
    json.end().map_err(|error| {
        let detail = format!("after the request: {error}");
        Box::new(respond(refusal(StatusCode::BAD_REQUEST, detail, uri.path())))
    })?;
    Ok(value)
}

/// Changes the amounts of a guarantee: all of the change or nothing is applied, on the nodes that the guarantee has. The answer comes
/// when the kernel enforces it. Only on the control socket and the control address.
#[utoipa::path(
    patch,
    path = "/api/v1/allocations/{*name}",
    tag = "control",
    params(
        ("name" = String, Path, description = "The name of the workload; slashes may stay or be percent-encoded"),
        ("dryRun" = Option<bool>, Query, description = "Report the result without applying it"),
    ),
    security((), ("token" = []), ("certificate" = [])),
    request_body = api::Resize,
    responses(
        (status = 200, description = "The changed guarantee, or the result of the dry run", body = api::ResizeOutcome),
        (status = 400, description = "The body is not JSON, a field is unknown, or the name is not percent-encoded UTF-8", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: no token and no client certificate, or an invalid token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "The client is not root, or its certificate has no name that is allowed to control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 404, description = "No workload of this name has a guarantee", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "The nodes of the guarantee have too little free, or it cannot be changed over HTTP", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 413, description = "The body is too large", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A field has an invalid value, or the workload uses more memory than requested", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "The kernel refuses a write, or the ledger cannot be stored", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The policy does not fit the machine, the request timed out, too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn resize(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
    UrlPath(name): UrlPath<String>,
    RawQuery(query): RawQuery,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<api::ResizeOutcome>, Response> {
    let wrong = |error: FieldError| refused(&AdmissionError::Field(error), uri.path());
    let dry_run = dry_run(query.as_deref()).map_err(wrong)?;
    let body: api::Resize = read(body, "Resize", &uri).map_err(|refused| *refused)?;
    let resize = Resize::new(name, &body).map_err(wrong)?;
    match reconciler.resize_allocation(resize, dry_run).await {
        Ok(AdmissionOutcome::Admitted(allocation)) => {
            Ok(Json(api::ResizeOutcome::Applied(Box::new(allocation))))
        }
        Ok(AdmissionOutcome::Dry(dry)) => Ok(Json(api::ResizeOutcome::DryRun(Box::new(dry)))),
        Err(error) => Err(refused(&error, uri.path())),
    }
}

/// Releases a guarantee and restores the original settings of its cgroup. Only on the control socket and the control address.
#[utoipa::path(
    delete,
    path = "/api/v1/allocations/{*name}",
    tag = "control",
    params(("name" = String, Path, description = "The name of the workload; slashes may stay or be percent-encoded")),
    security((), ("token" = []), ("certificate" = [])),
    responses(
        (status = 204, description = "The guarantee is released"),
        (status = 400, description = "The name is not percent-encoded UTF-8", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: no token and no client certificate, or an invalid token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "The client is not root, or its certificate has no name that is allowed to control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 404, description = "No workload of this name has a guarantee", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "The ledger cannot be stored; or the release has begun and some settings could not be restored yet, which the daemon retries", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The request timed out, too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn release(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
    UrlPath(name): UrlPath<String>,
) -> Result<StatusCode, Response> {
    let released = reconciler.release(name).await;
    released.map(|()| StatusCode::NO_CONTENT).map_err(|error| refused(&error, uri.path()))
}

/// Returns the guarantees as the state files of a kubelet with the same policies. Only on the control socket and the control
/// address.
#[utoipa::path(
    get,
    path = "/api/v1/kubelet-state",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    responses(
        (status = 200, description = "The content of the files", body = api::KubeletState),
        (status = 401, description = "On the control address: no token and no client certificate, or an invalid token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "The client is not root, or its certificate has no name that is allowed to control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 404, description = "This is the read-only address", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "No kubelet can have this configuration or these guarantees", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The request timed out, too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn kubelet_state(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
) -> Result<Json<api::KubeletState>, Response> {
    reconciler.kubelet_state().await.map(Json).map_err(|error| refused(&error, uri.path()))
}

fn refusal(status: StatusCode, detail: String, path: &str) -> api::GuaranteeRefusal {
    api::GuaranteeRefusal {
        title: status.canonical_reason().unwrap_or("Error").to_owned(),
        status: status.as_u16(),
        detail,
        instance: path.to_owned(),
        field: None,
        allowed: None,
        rejection: None,
        explanation: None,
    }
}

/// Returns the description of an acceptable target if the error concerns the target of the request.
fn possible_target(error: &AdmissionError) -> Option<&'static str> {
    let error = match error {
        AdmissionError::Enforce(error) => error,
        AdmissionError::Failed(failure) => &failure.error,
        _ => return None,
    };
    Some(match error {
        EnforceError::Gone { .. } => "a cgroup that exists",
        EnforceError::UnknownUnit { .. } => "a unit that runs on this host",
        EnforceError::Excluded { .. } => "a cgroup whose ancestors allow the guaranteed CPUs and nodes",
        EnforceError::Knob(KnobError::Missing { .. }) => {
            "a cgroup of v2 whose ancestors have cpuset and memory in cgroup.subtree_control"
        }
        _ => return None,
    })
}

fn refused(error: &AdmissionError, path: &str) -> Response {
    let possible = possible_target(error);
    let status = match error {
        AdmissionError::Field(_) => StatusCode::UNPROCESSABLE_ENTITY,
        _ if possible.is_some() => StatusCode::UNPROCESSABLE_ENTITY,
        AdmissionError::Conflict(_)
        | AdmissionError::Rejected(..)
        | AdmissionError::NoPlan { .. }
        | AdmissionError::Stale(_)
        | AdmissionError::Resize(_)
        | AdmissionError::NoKubelet(_)
        | AdmissionError::Off => StatusCode::CONFLICT,
        AdmissionError::Unknown(_) => StatusCode::NOT_FOUND,
        AdmissionError::Enforce(_)
        | AdmissionError::Failed(_)
        | AdmissionError::Releasing(_)
        | AdmissionError::Make { .. }
        | AdmissionError::Declared(_)
        | AdmissionError::Store(_) => StatusCode::INTERNAL_SERVER_ERROR,
        AdmissionError::Unfit(_) | AdmissionError::Busy | AdmissionError::Stopping => {
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    let mut refusal = refusal(status, error.to_string(), path);
    (refusal.field, refusal.allowed) = match error {
        AdmissionError::Field(error) | AdmissionError::Conflict(error) => {
            (Some(error.field.clone()), Some(error.allowed.clone()))
        }
        _ => (possible.map(|_| "target".to_owned()), possible.map(str::to_owned)),
    };
    match error {
        AdmissionError::Rejected(rejection, explanation) => {
            (refusal.rejection, refusal.explanation) =
                (Some(rejection.clone()), Some((**explanation).clone()));
        }
        AdmissionError::NoPlan { reason, rejection } => {
            let message = format!("{reason}: {}", rejection.message);
            refusal.rejection = Some(api::Rejection { message, ..rejection.clone() });
        }
        _ => {}
    }
    respond(refusal)
}

fn respond(refusal: api::GuaranteeRefusal) -> Response {
    let status = StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, [(header::CONTENT_TYPE, CONTENT_TYPE)], Json(refusal)).into_response()
}
