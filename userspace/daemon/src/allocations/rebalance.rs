//! Plans of moves that make a request fit, and carrying them out. Only on the control socket and the control address.

use std::sync::Arc;

use axum::{
    Json, Router,
    body::Bytes,
    extract::{State, rejection::BytesRejection},
    http::{StatusCode, Uri},
    response::Response,
    routing::{get, post},
};
use numaward_api as api;
use numaward_api::problem::CONTENT_TYPE;
use numaward_engine::RebalanceLimits;
use numaward_guarantee::{
    command::RebalanceCommand,
    error::AdmissionError,
    reconciler::ReconcilerHandle,
    request::{FieldError, Request, limits},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{read, refusal, refused, respond};

pub(super) fn routes() -> OpenApiRouter<Arc<ReconcilerHandle>> {
    OpenApiRouter::new().routes(routes!(plan)).routes(routes!(start, progress, cancel))
}

/// What the read-only address answers.
pub(super) fn elsewhere() -> Router {
    let answer = async |uri: Uri| {
        let detail = "this is on the control socket and the control address only".to_owned();
        respond(refusal(StatusCode::NOT_FOUND, detail, uri.path()))
    };
    Router::new()
        .route("/api/v1/rebalance", get(answer))
        .route("/api/v1/plan", post(answer))
        .route("/api/v1/kubelet-state", get(answer))
}

/// A request, and how much may be moved for it.
fn sound(
    request: &api::AllocationRequest,
    moves: Option<u32>,
    bytes: Option<&str>,
) -> Result<(Request, RebalanceLimits), FieldError> {
    Ok((Request::new(request)?, limits(moves, bytes)?))
}

/// Plans the moves of workloads that make a request fit. Nothing is moved. Only on the control socket and the control
/// address.
#[utoipa::path(
    post,
    path = "/api/v1/plan",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    request_body = api::PlanRequest,
    responses(
        (status = 200, description = "The moves, and where the request goes then", body = api::MovePlan),
        (status = 400, description = "No JSON, or a field is missing or unknown", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: neither token nor client certificate, or a wrong token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "Not root, or a client certificate without a name that may control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "No moves within the limits make it fit, or the strategy moves nobody", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 413, description = "The body is too large", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A field is wrong", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The policy does not fit the machine, it took too long, too many requests wait, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn plan(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<api::MovePlan>, Response> {
    let asked: api::PlanRequest = read(body, "PlanRequest", &uri).map_err(|refused| *refused)?;
    let refused = |error: &AdmissionError| refused(error, uri.path());
    let (request, limits) = sound(&asked.request, asked.max_moves, asked.max_bytes.as_deref())
        .map_err(|wrong| refused(&wrong.into()))?;
    reconciler.plan(request, limits).await.map(Json).map_err(|error| refused(&error))
}

/// Begins to carry a plan out. Answers at once; a GET says how far it is. Only on the control socket and the control
/// address.
#[utoipa::path(
    post,
    path = "/api/v1/rebalance",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    request_body = api::RebalanceRequest,
    responses(
        (status = 202, description = "It is begun", body = api::Rebalance),
        (status = 400, description = "No JSON, or a field is missing or unknown", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: neither token nor client certificate, or a wrong token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "Not root, or a client certificate without a name that may control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "No moves within the limits make it fit, the plan is stale, another rebalance is going on, or nothing is enforced", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 413, description = "The body is too large", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A field is wrong", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "The ledger cannot be stored", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The policy does not fit the machine, it took too long, too many requests wait, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn start(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<api::Rebalance>), Response> {
    let asked: api::RebalanceRequest = read(body, "RebalanceRequest", &uri).map_err(|refused| *refused)?;
    let refused = |error: &AdmissionError| refused(error, uri.path());
    let (request, limits) = sound(&asked.request, asked.max_moves, asked.max_bytes.as_deref())
        .map_err(|wrong| refused(&wrong.into()))?;
    let asked = RebalanceCommand { request, limits, plan: asked.plan, admit: asked.admit };
    let begun = reconciler.start_rebalance(asked).await;
    begun.map(|begun| (StatusCode::ACCEPTED, Json(begun))).map_err(|error| refused(&error))
}

/// How far the latest rebalance is, or how it ended. Only on the control socket and the control address.
#[utoipa::path(
    get,
    path = "/api/v1/rebalance",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    responses(
        (status = 200, description = "The latest rebalance", body = api::Rebalance),
        (status = 401, description = "On the control address: neither token nor client certificate, or a wrong token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "Not root, or a client certificate without a name that may control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 404, description = "There was none since the daemon started, or this is the read-only address", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn progress(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
) -> Result<Json<api::Rebalance>, Response> {
    let none = || {
        let detail = "there was no rebalance since the daemon started".to_owned();
        respond(refusal(StatusCode::NOT_FOUND, detail, uri.path()))
    };
    reconciler.rebalance().map(|latest| Json(api::Rebalance::clone(&latest))).ok_or_else(none)
}

/// Cancels the rebalance that goes on: what was moved is moved back. Only on the control socket and the control address.
#[utoipa::path(
    delete,
    path = "/api/v1/rebalance",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    responses(
        (status = 202, description = "It is being rolled back", body = api::Rebalance),
        (status = 401, description = "On the control address: neither token nor client certificate, or a wrong token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "Not root, or a client certificate without a name that may control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "None is going on", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "It took too long, too many requests wait, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn cancel(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
) -> Result<(StatusCode, Json<api::Rebalance>), Response> {
    let cancelled = reconciler.cancel_rebalance().await;
    cancelled.map(|of| (StatusCode::ACCEPTED, Json(of))).map_err(|error| refused(&error, uri.path()))
}
