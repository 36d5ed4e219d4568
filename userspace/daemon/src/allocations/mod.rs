//! Allocations over HTTP: read by everybody, changed on the control socket and, if configured, the control address.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Bytes,
    extract::{Path as UrlPath, RawQuery, State, rejection::BytesRejection},
    http::{StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use numaward_api as api;
use numaward_api::problem::CONTENT_TYPE;
use numaward_cgroup::knob::KnobError;
use numaward_enforce::EnforceError;
use numaward_guarantee::{
    command::Answer,
    error::AdmissionError,
    reconciler::{ReconcilerHandle, View},
    request::{FieldError, Request, Resize},
};
use numaward_http::{App, BlockingPool, Gate, HostNames};
use serde::de::DeserializeOwned;
use utoipa::openapi::OpenApi;
use utoipa_axum::{router::OpenApiRouter, routes};

mod rebalance;

/// Gives the allocations, where there can be any. No file is read for them, so files that hang do not keep them.
#[derive(Clone)]
struct Reading(Option<View>, BlockingPool);

fn reads() -> OpenApiRouter<Reading> {
    OpenApiRouter::new().routes(routes!(allocations))
}

fn changes() -> OpenApiRouter<Arc<ReconcilerHandle>> {
    let changes = OpenApiRouter::new()
        .routes(routes!(admit))
        .routes(routes!(resize))
        .routes(routes!(release))
        .routes(routes!(kubelet_state));
    changes.merge(rebalance::routes())
}

/// All routes of the read-only address; of allocations only where there can be any. With a gate, for whom it lets through.
pub fn router(app: Arc<App>, view: Option<View>, gate: Option<Arc<Gate>>, names: HostNames) -> Router {
    numaward_http::router(app, reading(view).merge(rebalance::elsewhere()), gate, names)
}

/// All routes of the control socket.
pub fn control_router(app: Arc<App>, reconciler: ReconcilerHandle) -> Router {
    numaward_http::control_router(app, controlling(reconciler))
}

/// The routes of the control socket where nothing can be promised: those that read.
pub fn observing_router(app: Arc<App>, view: Option<View>) -> Router {
    numaward_http::control_router(app, reading(view).merge(rebalance::elsewhere()))
}

/// All routes of the control address.
pub fn remote_router(
    app: Arc<App>,
    reconciler: ReconcilerHandle,
    gate: Arc<Gate>,
    names: HostNames,
) -> Router {
    numaward_http::remote_router(app, controlling(reconciler), gate, names)
}

fn reading(view: Option<View>) -> Router {
    reads().with_state(Reading(view, BlockingPool::default())).into()
}

fn controlling(reconciler: ReconcilerHandle) -> Router {
    let view = reconciler.view();
    let changes: Router = changes().with_state(Arc::new(reconciler)).into();
    reading(Some(view)).merge(changes)
}

/// The description of the routes of allocations.
pub fn open_api() -> OpenApi {
    let mut document = reads().into_openapi();
    document.merge(changes().into_openapi());
    document
}

/// The allocations: what is promised to whom, and what can still be.
#[utoipa::path(
    get,
    path = "/api/v1/allocations",
    tag = "api",
    responses(
        (status = 200, description = "The allocations", body = api::Allocations),
        (status = 503, description = "Nothing can be promised here", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn allocations(
    State(Reading(view, blocking)): State<Reading>,
    uri: Uri,
) -> Result<Json<api::Allocations>, Response> {
    let Some(view) = view else {
        let detail = "nothing can be promised on this host; the log of the daemon says why".to_owned();
        return Err(respond(refusal(StatusCode::SERVICE_UNAVAILABLE, detail, uri.path())));
    };
    blocking.run(move || Json((*view()).clone())).await.map_err(IntoResponse::into_response)
}

/// Asks for an allocation. Answers when the kernel holds it. Only on the control socket and the control address.
#[utoipa::path(
    post,
    path = "/api/v1/allocations",
    tag = "control",
    params(("dryRun" = Option<bool>, Query, description = "Only report what would happen")),
    security((), ("token" = []), ("certificate" = [])),
    request_body = api::AllocationRequest,
    responses(
        (status = 200, description = "What would happen", body = api::DryRun),
        (status = 201, description = "What is held now", body = api::Allocation),
        (status = 400, description = "No JSON, or a field is missing or unknown", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: neither token nor client certificate, or a wrong token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "Not root, or a client certificate without a name that may control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "Refused by the engine, or it conflicts with what is held", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 413, description = "The body is too large", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A field is wrong, or the target cannot be bound", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "The kernel refused, or the ledger cannot be stored", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The policy does not fit the machine, it took too long, too many requests wait, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
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
    let asked: api::AllocationRequest = read(body, "AllocationRequest", &uri).map_err(|refused| *refused)?;
    let request = Request::new(&asked).map_err(wrong)?;
    match reconciler.admit(request, dry_run).await {
        Ok(Answer::Admitted(allocation)) => Ok((StatusCode::CREATED, Json(allocation)).into_response()),
        Ok(Answer::Dry(dry)) => Ok(Json(dry).into_response()),
        Err(error) => Err(refused(&error, uri.path())),
    }
}

/// Whether the query asks only what would happen.
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

/// Reads the JSON of a body, which the `OpenAPI` document describes under this name.
fn read<T: DeserializeOwned>(
    body: Result<Bytes, BytesRejection>,
    name: &str,
    uri: &Uri,
) -> Result<T, Box<Response>> {
    let body = body.map_err(|rejection| Box::new(rejection.into_response()))?;
    let mut json = serde_json::Deserializer::from_slice(&body);
    let asked: Result<T, _> = serde_path_to_error::deserialize(&mut json);
    let asked = asked.map_err(|error| {
        let mut refusal = refusal(StatusCode::BAD_REQUEST, error.inner().to_string(), uri.path());
        refusal.field = Some(error.path().to_string()).filter(|path| path != ".");
        refusal.allowed = Some(format!("a request as /openapi.json describes it ({name})"));
        Box::new(respond(refusal))
    })?;
    json.end().map_err(|error| {
        let detail = format!("after the request: {error}");
        Box::new(respond(refusal(StatusCode::BAD_REQUEST, detail, uri.path())))
    })?;
    Ok(asked)
}

/// Changes what an allocation holds, all of it or nothing. It stays on its nodes. Answers when the kernel holds it. Only
/// on the control socket and the control address.
#[utoipa::path(
    patch,
    path = "/api/v1/allocations/{*name}",
    tag = "control",
    params(
        ("name" = String, Path, description = "The name of the workload; slashes may stay or be percent-encoded"),
        ("dryRun" = Option<bool>, Query, description = "Only report what would happen"),
    ),
    security((), ("token" = []), ("certificate" = [])),
    request_body = api::Resize,
    responses(
        (status = 200, description = "What is held now or, of a dry run, what would happen", body = api::ResizeOutcome),
        (status = 400, description = "No JSON, a field is unknown, or the name is not percent-encoded UTF-8", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: neither token nor client certificate, or a wrong token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "Not root, or a client certificate without a name that may control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 404, description = "There is no such allocation", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "Its nodes do not have what is missing, or it is not to be changed here", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 413, description = "The body is too large", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A field is wrong, or less than is in use", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "The kernel refused, or the ledger cannot be stored", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The policy does not fit the machine, it took too long, too many requests wait, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
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
    let asked: api::Resize = read(body, "Resize", &uri).map_err(|refused| *refused)?;
    let resize = Resize::new(name, &asked).map_err(wrong)?;
    match reconciler.resize_allocation(resize, dry_run).await {
        Ok(Answer::Admitted(allocation)) => Ok(Json(api::ResizeOutcome::Applied(Box::new(allocation)))),
        Ok(Answer::Dry(dry)) => Ok(Json(api::ResizeOutcome::DryRun(Box::new(dry)))),
        Err(error) => Err(refused(&error, uri.path())),
    }
}

/// Ends an allocation. Its cgroup gets back what it held before. Only on the control socket and the control address.
#[utoipa::path(
    delete,
    path = "/api/v1/allocations/{*name}",
    tag = "control",
    params(("name" = String, Path, description = "The name of the workload; slashes may stay or be percent-encoded")),
    security((), ("token" = []), ("certificate" = [])),
    responses(
        (status = 204, description = "It is released"),
        (status = 400, description = "The name is not percent-encoded UTF-8", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: neither token nor client certificate, or a wrong token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "Not root, or a client certificate without a name that may control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 404, description = "There is no such allocation", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "The ledger cannot be stored; or the release was begun, not everything could be given back yet, and that is tried again", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "It took too long, too many requests wait, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
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

/// What is promised, as the state files of a kubelet with the same policies. Only on the control socket and the control
/// address.
#[utoipa::path(
    get,
    path = "/api/v1/kubelet-state",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    responses(
        (status = 200, description = "The content of the files", body = api::KubeletState),
        (status = 401, description = "On the control address: neither token nor client certificate, or a wrong token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "Not root, or a client certificate without a name that may control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 404, description = "This is the read-only address", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "No kubelet can have this configuration, or promise this", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "It took too long, too many requests wait, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
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

/// Where it is the target that cannot be: what can.
fn possible_target(error: &AdmissionError) -> Option<&'static str> {
    let error = match error {
        AdmissionError::Enforce(error) => error,
        AdmissionError::Failed(failure) => &failure.error,
        _ => return None,
    };
    Some(match error {
        EnforceError::Gone { .. } => "a cgroup that exists",
        EnforceError::UnknownUnit { .. } => "a unit that runs on this host",
        EnforceError::Excluded { .. } => {
            "a cgroup whose ancestors leave it the CPUs and nodes that are promised"
        }
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
        | AdmissionError::Store(_) => StatusCode::INTERNAL_SERVER_ERROR,
        AdmissionError::Unfit(_) | AdmissionError::Busy | AdmissionError::Stopping => {
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    let mut refusal = refusal(status, error.to_string(), path);
    (refusal.field, refusal.allowed) = match error {
        AdmissionError::Field(wrong) | AdmissionError::Conflict(wrong) => {
            (Some(wrong.field.clone()), Some(wrong.allowed.clone()))
        }
        _ => (possible.map(|_| "target".to_owned()), possible.map(str::to_owned)),
    };
    match error {
        AdmissionError::Rejected(rejection, explanation) => {
            (refusal.rejection, refusal.explanation) = (Some(rejection.clone()), Some(explanation.clone()));
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
