//! The kubelet's plugin for resource claims: gRPC services on two Unix sockets.
//!
//! The kubelet finds the socket of the service `Registration` in its folder `plugins_registry`, and asks it for the path of the other
//! socket. Before it starts a pod, it asks the plugin to prepare the claims of the pod, and after the pod has ended, to unprepare them. It
//! repeats a call until it succeeds, so both are idempotent. It waits 45 s for an answer.
//!
//! An error of one claim does not affect the other claims of the call.
//!
//! Source: `pkg/kubelet/cm/dra/plugin` and `k8s.io/kubelet/pkg/apis/dra` of Kubernetes 1.36.

use std::{collections::BTreeMap, future::ready, sync::Arc, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, body::Body, transport::Server};

use super::{
    health::{self, Health, HealthReporter},
    messages::{
        ClaimId, ClaimsRequest, Device, PluginInfo, PrepareResponse, PreparedDevices, RegistrationStatus,
        UnprepareResponse, UnprepareResult,
    },
};
use crate::{
    api::Report,
    grpc_service::{GrpcMethods, GrpcService, grpc, unknown_method},
    local_http2::connections,
};

/// Path of the socket of the registration, relative to the kubelet's folder.
pub const REGISTRATION_SOCKET: &str = "plugins_registry/numaward.io-reg.sock";
/// Path of the socket for claims, relative to the kubelet's folder.
pub const CLAIMS_SOCKET: &str = "plugins/numaward.io/dra.sock";

/// Kind of plugin.
const KIND: &str = "DRAPlugin";
/// Versions of the services. The newest common one of each service is used.
const VERSIONS: [&str; 3] = ["v1.DRAPlugin", "v1beta1.DRAPlugin", health::VERSION];

const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";
const NOTIFY: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";
const PREPARE: &str = "NodePrepareResources";
const UNPREPARE: &str = "NodeUnprepareResources";

/// Time after which a call fails: less than the kubelet waits.
const CALL_TIMEOUT: Duration = Duration::from_secs(40);
/// Maximum number of concurrent calls of one connection.
const MAX_CALLS: usize = 16;
/// Maximum size of a request. A claim has at most some 400 bytes.
const MAX_REQUEST_BYTES: usize = 64 << 10;
/// Maximum number of claims of a request: twice as many as a pod may have.
const MAX_CLAIMS: usize = 128;
/// Maximum lengths of the parts of a claim's identity.
const MAX_NAMESPACE_LEN: usize = 63;
const MAX_NAME_LEN: usize = 253;
const MAX_UID_LEN: usize = 64;

/// Preparation of claims. An error names the missing resource and its node; the kubelet shows it as an event of the pod.
pub trait ClaimHandler: Send + Sync + 'static {
    /// Reserves the devices of a claim durably. A repeated call has the same result.
    fn prepare<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<Vec<Device>, String>>;

    /// Releases the devices of a claim. A claim that is not prepared is no error.
    fn unprepare<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<(), String>>;
}

/// The plugin of this host.
#[derive(Clone)]
pub struct Plugin {
    /// Name of the driver.
    pub driver: String,
    /// Path of the socket for claims, as the kubelet sees it.
    pub endpoint: String,
    pub handler: Arc<dyn ClaimHandler>,
    pub health: HealthReporter,
    /// Called with the result of each registration.
    pub report: Report,
}

impl Plugin {
    /// Serves all services until the token is cancelled.
    ///
    /// # Errors
    ///
    /// The error of tonic if it cannot serve.
    pub fn serve(
        self,
        registration: UnixListener,
        claims: UnixListener,
        stop: CancellationToken,
    ) -> BoxFuture<'static, Result<(), tonic::transport::Error>> {
        let server = || Server::builder().timeout(CALL_TIMEOUT).concurrency_limit_per_connection(MAX_CALLS);
        async move {
            let handler = self.handler.clone();
            let health = Health { reporter: self.health.clone(), stop: stop.clone() };
            let preparing = server()
                .add_service(GrpcService(Claims::<false>(handler.clone())))
                .add_service(GrpcService(Claims::<true>(handler)))
                .add_service(GrpcService(health))
                .serve_with_incoming_shutdown(connections(claims), stop.clone().cancelled_owned());
            let registering = server()
                .add_service(GrpcService(Registration(self)))
                .serve_with_incoming_shutdown(connections(registration), stop.cancelled_owned());
            tokio::try_join!(preparing, registering).map(drop)
        }
        .boxed()
    }

    fn info(&self) -> PluginInfo {
        PluginInfo {
            kind: KIND.to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.clone(),
            supported_versions: VERSIONS.map(str::to_owned).into(),
        }
    }

    fn note_registered(&self, RegistrationStatus { is_registered, error }: RegistrationStatus) {
        if is_registered {
            tracing::info!(driver = self.driver, "the kubelet registered the plugin for resource claims");
            (self.report)(Ok(()));
        } else {
            (self.report)(Err(format!("the kubelet does not register the plugin {}: {error}", self.driver)));
        }
    }
}

/// Returns the error of an identity that is not one of Kubernetes. Paths of files and of the API contain its parts.
fn check(claim: &ClaimId) -> Result<(), String> {
    let is_name = |text: &str, most: usize| {
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
        (1..=most).contains(&text.len()) && text.bytes().all(is_valid) && !text.starts_with('.')
    };
    let ClaimId { namespace, uid, name } = claim;
    for (text, what, most) in
        [(namespace, "namespace", MAX_NAMESPACE_LEN), (name, "name", MAX_NAME_LEN), (uid, "UID", MAX_UID_LEN)]
    {
        if !is_name(text, most) {
            return Err(format!(
                "the {what} of the resource claim is not valid: {} bytes, allowed are 1 to {most} letters, digits, '-' and '.'",
                text.len()
            ));
        }
    }
    Ok(())
}

/// Returns the claims of a request.
fn claims(request: Request<ClaimsRequest>) -> Result<Vec<ClaimId>, Status> {
    let claims = request.into_inner().claims;
    if claims.len() > MAX_CLAIMS {
        let message = format!("{} resource claims in one call, allowed are {MAX_CLAIMS}", claims.len());
        return Err(Status::invalid_argument(message));
    }
    Ok(claims)
}

async fn prepare(handler: &dyn ClaimHandler, claims: Vec<ClaimId>) -> PrepareResponse {
    let mut results = BTreeMap::new();
    for claim in claims {
        let result = match check(&claim) {
            Ok(()) => handler.prepare(&claim).await,
            Err(error) => Err(error),
        };
        let result = match result {
            Ok(devices) => PreparedDevices { devices, error: String::new() },
            Err(error) => {
                tracing::warn!(claim = %claim_name(&claim), error, "the resource claim is not prepared");
                PreparedDevices { devices: Vec::new(), error }
            }
        };
        results.insert(claim.uid, result);
    }
    PrepareResponse { claims: results }
}

async fn unprepare(handler: &dyn ClaimHandler, claims: Vec<ClaimId>) -> UnprepareResponse {
    let mut results = BTreeMap::new();
    for claim in claims {
        let result = match check(&claim) {
            Ok(()) => handler.unprepare(&claim).await,
            Err(error) => Err(error),
        };
        let error = result.err().unwrap_or_default();
        if !error.is_empty() {
            tracing::warn!(claim = %claim_name(&claim), error, "the resource claim is not unprepared");
        }
        results.insert(claim.uid, UnprepareResult { error });
    }
    UnprepareResponse { claims: results }
}

/// Returns the name of a claim for the log.
fn claim_name(ClaimId { namespace, name, .. }: &ClaimId) -> String {
    format!("{}/{}", namespace.escape_debug(), name.escape_debug())
}

/// The service at the socket that the kubelet looks for.
#[derive(Clone)]
struct Registration(Plugin);

impl GrpcMethods for Registration {
    const SERVICE: &'static str = "pluginregistration.Registration";

    fn answer(self, request: http::Request<Body>) -> BoxFuture<'static, http::Response<Body>> {
        let Self(plugin) = self;
        async move {
            match request.uri().path() {
                GET_INFO => {
                    let method = |_: Request<()>| ready(Ok::<_, Status>(Response::new(plugin.info())));
                    grpc(MAX_REQUEST_BYTES).unary(tower::service_fn(method), request).await
                }
                NOTIFY => {
                    let method = |status: Request<_>| {
                        plugin.note_registered(status.into_inner());
                        ready(Ok::<_, Status>(Response::new(())))
                    };
                    grpc(MAX_REQUEST_BYTES).unary(tower::service_fn(method), request).await
                }
                path => unknown_method(path),
            }
        }
        .boxed()
    }
}

/// The service for claims; `OLD` for that of `v1beta1`.
#[derive(Clone)]
struct Claims<const OLD: bool>(Arc<dyn ClaimHandler>);

impl<const OLD: bool> GrpcMethods for Claims<OLD> {
    const SERVICE: &'static str = if OLD {
        "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
    } else {
        "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
    };

    fn answer(self, request: http::Request<Body>) -> BoxFuture<'static, http::Response<Body>> {
        let Self(handler) = self;
        async move {
            match request.uri().path().rsplit('/').next().unwrap_or_default() {
                PREPARE => {
                    let method = |request| {
                        let handler = handler.clone();
                        async move { Ok::<_, Status>(Response::new(prepare(&*handler, claims(request)?).await)) }
                    };
                    grpc(MAX_REQUEST_BYTES).unary(tower::service_fn(method), request).await
                }
                UNPREPARE => {
                    let method = |request| {
                        let handler = handler.clone();
                        async move { Ok::<_, Status>(Response::new(unprepare(&*handler, claims(request)?).await)) }
                    };
                    grpc(MAX_REQUEST_BYTES).unary(tower::service_fn(method), request).await
                }
                _ => unknown_method(request.uri().path()),
            }
        }
        .boxed()
    }
}
