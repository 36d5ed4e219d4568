//! The routes with everything around them: limits, errors as problem details, the log, who may.

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    body::HttpBody as _,
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use tower_http::{limit::RequestBodyLimitLayer, timeout::TimeoutLayer};

use crate::{
    browser::{self, HostNames},
    limits::{LARGE, MAX_BODY_BYTES, TIME_LIMIT},
    page,
    peer::Peer,
    problem,
    remote::{self, Gate},
    routes::{self, App},
};

/// The routes of the read-only address: those of this crate and `added`, with everything around them. With a gate, for whom
/// it lets through.
pub fn router(app: Arc<App>, added: Router, gate: Option<Arc<Gate>>, names: HostNames) -> Router {
    let routes = routes::router(app).merge(page::router()).merge(added);
    let routes = match gate {
        Some(gate) => routes.layer(middleware::from_fn_with_state(gate, remote::authorize_reading)),
        None => routes,
    };
    layered(routes.layer(middleware::from_fn_with_state(names, browser::check_host)))
}

/// The routes of the control socket: those of [`router`] but for people's.
pub fn control_router(app: Arc<App>, added: Router) -> Router {
    layered(routes::router(app).merge(added))
}

/// The routes of the control address: the same, for whom the gate lets through.
pub fn remote_router(app: Arc<App>, added: Router, gate: Arc<Gate>, names: HostNames) -> Router {
    let guarded = routes::router(app).merge(added);
    let guarded = guarded.layer(middleware::from_fn_with_state(gate, remote::authorize));
    layered(guarded.layer(middleware::from_fn_with_state(names, browser::check_host)))
}

pub(crate) fn layered(router: Router) -> Router {
    router
        .layer(TimeoutLayer::with_status_code(StatusCode::SERVICE_UNAVAILABLE, TIME_LIMIT))
        .layer(RequestBodyLimitLayer::new(MAX_BODY_BYTES))
        .layer(middleware::from_fn(hold_back))
        .layer(middleware::from_fn(browser::check_change))
        .layer(middleware::from_fn(problem::layer))
        .layer(middleware::from_fn(log))
}

/// Sends no large response while too much of those before it has not been read.
async fn hold_back(request: Request, next: Next) -> Response {
    let place = request.extensions().get::<Peer>().and_then(|peer| peer.place.clone());
    let response = next.run(request).await;
    let size = response.body().size_hint().exact().filter(|size| *size >= LARGE);
    let Some((size, place)) = size.and_then(|size| usize::try_from(size).ok()).zip(place) else {
        return response;
    };
    if place.may_send(size) {
        return response;
    }
    let detail = "too many large responses wait to be read; read them, or ask again";
    let later = [(header::RETRY_AFTER, HeaderValue::from_static("1"))];
    (StatusCode::SERVICE_UNAVAILABLE, later, detail).into_response()
}

async fn log(request: Request, next: Next) -> Response {
    let start = Instant::now();
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let response = next.run(request).await;
    let status = response.status().as_u16();
    tracing::debug!(%method, %uri, status, elapsed = ?start.elapsed(), "request");
    response
}
