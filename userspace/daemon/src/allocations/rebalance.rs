//! HTTP routes that plan and run a rebalance: moves of workloads that make room for a request. Only on the control socket and the
//! control address.

use std::sync::Arc;

use axum::{
    Json,
    body::Bytes,
    extract::{State, rejection::BytesRejection},
    http::{StatusCode, Uri},
    response::Response,
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

/// Parses a request and the limits of the moves for it.
fn parse_request(
    request: &api::AllocationRequest,
    moves: Option<u32>,
    bytes: Option<&str>,
) -> Result<(Request, RebalanceLimits), FieldError> {
    Ok((Request::new(request)?, limits(moves, bytes)?))
}

/// Plans the moves of workloads that make a request fit, without moving anything. Only on the control socket and the control
/// address.
#[utoipa::path(
    post,
    path = "/api/v1/plan",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    request_body = api::PlanRequest,
    responses(
        (status = 200, description = "The moves, and the placement of the request after them", body = api::MovePlan),
        (status = 400, description = "The body is not JSON, or a field is missing or unknown", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: no token and no client certificate, or an invalid token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "The client is not root, or its certificate has no name that is allowed to control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "No moves within the limits make the request fit, or the strategy does not move workloads", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 413, description = "The body is too large", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A field has an invalid value", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The policy does not fit the machine, the request timed out, too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn plan(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<api::MovePlan>, Response> {
    let body: api::PlanRequest = read(body, "PlanRequest", &uri).map_err(|refused| *refused)?;
    let refused = |error: &AdmissionError| refused(error, uri.path());
    let (request, limits) = parse_request(&body.request, body.max_moves, body.max_bytes.as_deref())
        .map_err(|error| refused(&error.into()))?;
    reconciler.plan(request, limits).await.map(Json).map_err(|error| refused(&error))
}

/// Starts to apply a plan. The answer comes at once; a GET returns the progress. Only on the control socket and the control
/// address.
#[utoipa::path(
    post,
    path = "/api/v1/rebalance",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    request_body = api::RebalanceRequest,
    responses(
        (status = 202, description = "The rebalance has started", body = api::Rebalance),
        (status = 400, description = "The body is not JSON, or a field is missing or unknown", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 401, description = "On the control address: no token and no client certificate, or an invalid token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "The client is not root, or its certificate has no name that is allowed to control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "No moves within the limits make the request fit, the plan is stale, another rebalance is running, or guarantees are not enforced", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 413, description = "The body is too large", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 422, description = "A field has an invalid value", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 500, description = "The ledger cannot be stored", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The policy does not fit the machine, the request timed out, too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn start(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
    body: Result<Bytes, BytesRejection>,
) -> Result<(StatusCode, Json<api::Rebalance>), Response> {
    let body: api::RebalanceRequest = read(body, "RebalanceRequest", &uri).map_err(|refused| *refused)?;
    let refused = |error: &AdmissionError| refused(error, uri.path());
    let (request, limits) = parse_request(&body.request, body.max_moves, body.max_bytes.as_deref())
        .map_err(|error| refused(&error.into()))?;
    let command = RebalanceCommand { request, limits, plan: body.plan, admit: body.admit };
    let started = reconciler.start_rebalance(command).await;
    started.map(|rebalance| (StatusCode::ACCEPTED, Json(rebalance))).map_err(|error| refused(&error))
}

/// Returns the progress or the outcome of the latest rebalance. Only on the control socket and the control address.
#[utoipa::path(
    get,
    path = "/api/v1/rebalance",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    responses(
        (status = 200, description = "The latest rebalance", body = api::Rebalance),
        (status = 401, description = "On the control address: no token and no client certificate, or an invalid token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "The client is not root, or its certificate has no name that is allowed to control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 404, description = "No rebalance has started since the daemon did, or this is the read-only address", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn progress(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
) -> Result<Json<api::Rebalance>, Response> {
    let none = || {
        let detail = "no rebalance has started since the daemon did".to_owned();
        respond(refusal(StatusCode::NOT_FOUND, detail, uri.path()))
    };
    reconciler.rebalance().map(|latest| Json(api::Rebalance::clone(&latest))).ok_or_else(none)
}

/// Cancels the running rebalance: its moves are reversed. Only on the control socket and the control address.
#[utoipa::path(
    delete,
    path = "/api/v1/rebalance",
    tag = "control",
    security((), ("token" = []), ("certificate" = [])),
    responses(
        (status = 202, description = "The rebalance is being rolled back", body = api::Rebalance),
        (status = 401, description = "On the control address: no token and no client certificate, or an invalid token", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 403, description = "The client is not root, or its certificate has no name that is allowed to control", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 409, description = "No rebalance is running", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
        (status = 503, description = "The request timed out, too many requests are pending, or the daemon is stopping", body = api::GuaranteeRefusal, content_type = CONTENT_TYPE),
    )
)]
async fn cancel(
    State(reconciler): State<Arc<ReconcilerHandle>>,
    uri: Uri,
) -> Result<(StatusCode, Json<api::Rebalance>), Response> {
    let cancelled = reconciler.cancel_rebalance().await;
    cancelled
        .map(|rebalance| (StatusCode::ACCEPTED, Json(rebalance)))
        .map_err(|error| refused(&error, uri.path()))
}
