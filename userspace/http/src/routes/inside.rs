//! What is looked up inside of a workload: which code reaches across nodes, and where which part of its memory lies. It shows
//! what programs do inside, by the daemon's privileges: a user must not see that of another, nor hold up the other's processes. So it
//! is for the control socket, and for clients that authenticate. An address on the loopback is no identity: a proxy or another user
//! may be behind it.

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
    peer::{Authorized, Peer},
    problem::Failure,
};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(stacks)).routes(routes!(regions))
}

/// Which code of a workload allocates and accesses memory of other nodes, as call chains (`observe.callChains`). Names of
/// functions are looked up when this is asked. A name with slashes is percent-encoded.
#[utoipa::path(
    get,
    path = "/api/v1/workloads/{name}/stacks",
    tag = "api",
    params(("name" = String, Path, description = "The name of the workload")),
    responses(
        (status = 200, description = "The call chains", body = api::Stacks),
        (
            status = 403,
            description = "Asked neither on the control socket nor with a token or client certificate",
            body = Problem,
            content_type = CONTENT_TYPE,
        ),
        (status = 404, description = "There is no such workload", body = Problem, content_type = CONTENT_TYPE),
        (
            status = 409,
            description = "Call chains are not taken: `observe.callChains` is off, or this kernel has no probe for it",
            body = Problem,
            content_type = CONTENT_TYPE,
        ),
    )
)]
async fn stacks(
    State(app): State<Arc<App>>,
    UrlPath(name): UrlPath<String>,
    peer: Option<Extension<Peer>>,
    authorized: Option<Extension<Authorized>>,
    _: PlainJson,
) -> Result<Response, Failure> {
    check_reader(peer.map(|Extension(peer)| peer).as_ref(), authorized.is_some())?;
    let work = |observer: &Observer, name: &str| observer.stacks(name).map_err(|none| failure(name, none));
    app.look_inside("stacks", name, work).await
}

/// Where the memory of a workload lies, by what it is for: heap, stacks, files. The kernel goes through the page tables of its
/// processes when this is asked. A name with slashes is percent-encoded.
#[utoipa::path(
    get,
    path = "/api/v1/workloads/{name}/regions",
    tag = "api",
    params(("name" = String, Path, description = "The name of the workload")),
    responses(
        (status = 200, description = "The regions", body = api::Regions),
        (
            status = 403,
            description = "Asked neither on the control socket nor with a token or client certificate",
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
    authorized: Option<Extension<Authorized>>,
    _: PlainJson,
) -> Result<Response, Failure> {
    check_reader(peer.map(|Extension(peer)| peer).as_ref(), authorized.is_some())?;
    let work = |observer: &Observer, name: &str| observer.regions(name).map_err(|none| failure(name, none));
    app.look_inside("regions", name, work).await
}

fn failure(name: &str, none: InspectError) -> Failure {
    match none {
        InspectError::UnknownWorkload => no_workload(name),
        InspectError::OtherWorkloads => {
            let detail =
                format!("{name:?} stands for all that belongs to no workload: name one of the workloads");
            (StatusCode::NOT_FOUND, detail)
        }
        InspectError::ChainsOff(reason) => (StatusCode::CONFLICT, reason),
    }
}

/// Whether a client may see what programs of workloads do inside.
fn check_reader(peer: Option<&Peer>, authorized: bool) -> Result<(), Failure> {
    if authorized || peer.is_some_and(Peer::is_on_control_socket) {
        return Ok(());
    }
    let detail = "this shows what programs do inside: ask as root on this host (`numaward stacks`, `numaward regions`), or with the \
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
            check_reader(Some(&peer), authorized).is_ok()
        };
        for address in
            ["127.0.0.1:1000", "[::1]:1000", "[::ffff:127.0.0.1]:1", "10.0.0.1:1000", "[fd00::1]:1000"]
        {
            assert!(!may(address, false) && may(address, true), "{address}");
        }
        assert!(check_reader(None, false).is_err());
        assert!(check_reader(Some(&Peer::default()), false).is_ok(), "the control socket");
    }
}
