//! The routes with everything around them: limits, errors as problem details, the log, who may.

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    extract::Request,
    http::StatusCode,
    middleware::{self, Next},
    response::Response,
};
use tower_http::{limit::RequestBodyLimitLayer, timeout::TimeoutLayer};

use crate::{
    limits::{MAX_BODY_BYTES, TIME_LIMIT},
    page, problem,
    remote::{self, Gate},
    routes::{self, App},
};

/// The routes of the read-only address: those of this crate and `added`, with everything around them. With a gate, for whom
/// it lets through.
pub fn router(app: Arc<App>, added: Router, gate: Option<Arc<Gate>>) -> Router {
    let routes = routes::router(app).merge(page::router()).merge(added);
    layered(match gate {
        Some(gate) => routes.layer(middleware::from_fn_with_state(gate, remote::authorize_reading)),
        None => routes,
    })
}

/// The routes of the control socket: those of [`router`] but for people's.
pub fn control_router(app: Arc<App>, added: Router) -> Router {
    layered(routes::router(app).merge(added))
}

/// The routes of the control address: the same, for whom the gate lets through.
pub fn remote_router(app: Arc<App>, added: Router, gate: Arc<Gate>) -> Router {
    let guarded = routes::router(app).merge(added);
    layered(guarded.layer(middleware::from_fn_with_state(gate, remote::authorize)))
}

fn layered(router: Router) -> Router {
    router
        .layer(TimeoutLayer::with_status_code(StatusCode::SERVICE_UNAVAILABLE, TIME_LIMIT))
        .layer(RequestBodyLimitLayer::new(MAX_BODY_BYTES))
        .layer(middleware::from_fn(problem::layer))
        .layer(middleware::from_fn(log))
}

async fn log(request: Request, next: Next) -> Response {
    let start = Instant::now();
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let response = next.run(request).await;
    let status = response.status().as_u16();
    tracing::debug!(%method, %uri, status, elapsed = ?start.elapsed(), "request");
    response
}
