//! The routers of the three addresses: the routes, and around them the limits, problem details, access control and the request log.

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
    limits::{LARGE_RESPONSE, MAX_BODY_BYTES, TIME_LIMIT},
    page,
    peer::Peer,
    problem,
    remote::{self, Gate},
    routes::{self, App},
};

/// Returns the router of the read-only address: the routes of this crate, the web page, and `added`. If there is a gate, it
/// authorizes each request.
pub fn router(app: Arc<App>, added: Router, gate: Option<Arc<Gate>>, names: HostNames) -> Router {
    let routes = routes::router(app).merge(page::router()).merge(added);
    let routes = match gate {
        Some(gate) => routes.layer(middleware::from_fn_with_state(gate, remote::authorize_reading)),
        None => routes,
    };
    layered(routes.layer(middleware::from_fn_with_state(names, browser::check_host)))
}

/// Returns the router of the control socket: the routes of [`router`] without the web page.
pub fn control_router(app: Arc<App>, added: Router) -> Router {
    layered(routes::router(app).merge(added))
}

/// Returns the router of the control address: the routes of [`control_router`], which the gate authorizes.
pub fn remote_router(app: Arc<App>, added: Router, gate: Arc<Gate>, names: HostNames) -> Router {
    let guarded = routes::router(app).merge(added);
    let guarded = guarded.layer(middleware::from_fn_with_state(gate, remote::authorize));
    layered(guarded.layer(middleware::from_fn_with_state(names, browser::check_host)))
}

pub(crate) fn layered(router: Router) -> Router {
    router
        .layer(TimeoutLayer::with_status_code(StatusCode::SERVICE_UNAVAILABLE, TIME_LIMIT))
        .layer(RequestBodyLimitLayer::new(MAX_BODY_BYTES))
        .layer(middleware::from_fn(limit_unread))
        .layer(middleware::from_fn(browser::check_change))
        .layer(middleware::from_fn(problem::layer))
        .layer(middleware::from_fn(log))
}

/// Refuses a large response while the client has not read too much of the previous ones.
async fn limit_unread(request: Request, next: Next) -> Response {
    let place = request.extensions().get::<Peer>().and_then(|peer| peer.place.clone());
    let response = next.run(request).await;
    let size = response.body().size_hint().exact().filter(|size| *size >= LARGE_RESPONSE);
    let Some((size, place)) = size.and_then(|size| usize::try_from(size).ok()).zip(place) else {
        return response;
    };
    if place.reserve_unread(size) {
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
