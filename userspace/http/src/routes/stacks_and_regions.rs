//! Data from inside the processes of a workload: the call chains that access memory of other nodes (stacks), and the
//! location of its memory by use (regions).
//!
//! The daemon reads this with its own privileges. One user must not see the data of another, nor delay the processes
//! of another. So the routes serve only the control socket and clients that authenticate. An address on the loopback
//! is no identity: a proxy or another user may be behind it.

use std::sync::Arc;

use axum::{
    Extension,
    extract::{Path as UrlPath, State},
    http::StatusCode,
    response::Response,
};
use numaward_api as api;
use numaward_api::problem::{CONTENT_TYPE, Problem};
use numaward_observe::{InspectError, Observer};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{App, PlainJson, no_workload};
use crate::{
    peer::{Authorization, Peer},
    problem::Failure,
};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(stacks)).routes(routes!(regions))
}

/// The code of a workload that allocates and accesses memory of other nodes, as call chains (`observe.callChains`). Names of
/// functions are looked up at each request. A name with slashes is percent-encoded.
#[utoipa::path(
    get,
    path = "/api/v1/workloads/{name}/stacks",
    tag = "api",
    params(("name" = String, Path, description = "The name of the workload")),
    responses(
        (status = 200, description = "The call chains", body = api::Stacks),
        (
            status = 403,
            description = "The request came neither over the control socket nor with a token or client certificate",
            body = Problem,
            content_type = CONTENT_TYPE,
        ),
        (status = 404, description = "There is no such workload", body = Problem, content_type = CONTENT_TYPE),
        (
            status = 409,
            description = "Call chains are not sampled: `observe.callChains` is off, or this kernel has no probe for it",
            body = Problem,
            content_type = CONTENT_TYPE,
        ),
    )
)]
async fn stacks(
    State(app): State<Arc<App>>,
    UrlPath(name): UrlPath<String>,
    peer: Option<Extension<Peer>>,
    authorized: Option<Extension<Authorization>>,
    _: PlainJson,
) -> Result<Response, Failure> {
    authorize_reader(peer.map(|Extension(peer)| peer).as_ref(), authorized.is_some())?;
    let work = |observer: &Observer, name: &str| observer.stacks(name).map_err(|none| failure(name, none));
    app.shared_read("stacks", name, work).await
}

/// The nodes of a workload's memory, by use: heap, stacks, files. The kernel goes through the page tables of its
/// processes at each request. A name with slashes is percent-encoded.
#[utoipa::path(
    get,
    path = "/api/v1/workloads/{name}/regions",
    tag = "api",
    params(("name" = String, Path, description = "The name of the workload")),
    responses(
        (status = 200, description = "The regions", body = api::Regions),
        (
            status = 403,
            description = "The request came neither over the control socket nor with a token or client certificate",
            body = Problem,
            content_type = CONTENT_TYPE,
        ),
        (status = 404, description = "There is no such workload", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn regions(
    State(app): State<Arc<App>>,
    UrlPath(name): UrlPath<String>,
    peer: Option<Extension<Peer>>,
    authorized: Option<Extension<Authorization>>,
    _: PlainJson,
) -> Result<Response, Failure> {
    authorize_reader(peer.map(|Extension(peer)| peer).as_ref(), authorized.is_some())?;
    let work = |observer: &Observer, name: &str| observer.regions(name).map_err(|none| failure(name, none));
    app.shared_read("regions", name, work).await
}

pub(super) fn failure(name: &str, none: InspectError) -> Failure {
    match none {
        InspectError::UnknownWorkload => no_workload(name),
        InspectError::OtherWorkloads => {
            let detail = format!(
                "{name:?} stands for all processes and memory of no workload: name one of the workloads"
            );
            (StatusCode::NOT_FOUND, detail)
        }
        InspectError::ChainsOff(reason) => (StatusCode::CONFLICT, reason),
    }
}

/// Returns an error unless the client has authenticated or uses the control socket.
fn authorize_reader(peer: Option<&Peer>, authorized: bool) -> Result<(), Failure> {
    if authorized || peer.is_some_and(Peer::is_on_control_socket) {
        return Ok(());
    }
    let detail = "this data comes from inside the processes of workloads: request it as root on this host (`numaward stacks`, `numaward regions`), or with the \
                  token of listenTokenFile or a client certificate of listenTls";
    Err((StatusCode::FORBIDDEN, detail.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_on_any_address_have_to_authenticate() {
        let may = |address: &str, authorized| {
            let peer = Peer { address: Some(address.parse().unwrap()), ..Peer::default() };
            authorize_reader(Some(&peer), authorized).is_ok()
        };
        for address in
            ["127.0.0.1:1000", "[::1]:1000", "[::ffff:127.0.0.1]:1", "10.0.0.1:1000", "[fd00::1]:1000"]
        {
            assert!(!may(address, false) && may(address, true), "{address}");
        }
        assert!(authorize_reader(None, false).is_err());
        assert!(authorize_reader(Some(&Peer::default()), false).is_ok(), "the control socket");
    }
}
