//! The kubelet's plugin for resource claims: two gRPC services on Unix sockets.
//!
//! The kubelet finds the socket of the service `Registration` in its folder `plugins_registry`, and asks it for the path of the other
//! socket. Before it starts a pod, it asks the plugin to prepare the claims of the pod, and after the pod has ended, to unprepare them. It
//! repeats a call until it succeeds, so both are idempotent. It waits 45 s for an answer.
//!
//! An error of one claim does not affect the other claims of the call.
//!
//! Source: `pkg/kubelet/cm/dra/plugin` and `k8s.io/kubelet/pkg/apis/dra` of Kubernetes 1.36.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::ready,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_engine::claims::devices::DRIVER;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status,
    body::Body,
    server::{Grpc, NamedService},
    transport::Server,
};
use tonic_prost::ProstCodec;
use tower::Service;

use super::messages::{
    ClaimId, ClaimsRequest, Device, PluginInfo, PrepareResponse, PreparedDevices, RegistrationStatus,
    UnprepareResponse, UnprepareResult,
};
use crate::{api::Report, local_http2::connections};

/// Path of the socket of the registration, relative to the kubelet's folder.
pub const REGISTRATION_SOCKET: &str = "plugins_registry/numaward.io-reg.sock";
/// Path of the socket for claims, relative to the kubelet's folder.
pub const CLAIMS_SOCKET: &str = "plugins/numaward.io/dra.sock";

/// Kind of plugin.
const KIND: &str = "DRAPlugin";
/// Versions of the service. The newest common one is used.
const VERSIONS: [&str; 2] = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];

const REGISTRATION_SERVICE: &str = "pluginregistration.Registration";
const GET_INFO: &str = "/pluginregistration.Registration/GetInfo";
const NOTIFY: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";
const CLAIMS_SERVICE: &str = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin";
const OLD_CLAIMS_SERVICE: &str = "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin";
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

/// Preparation of claims. An error says what is missing and where; the kubelet shows it as an event of the pod.
pub trait ClaimHandler: Send + Sync + 'static {
    /// Reserves the devices of a claim durably. A repeated call has the same result.
    fn prepare<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<Vec<Device>, String>>;

    /// Releases the devices of a claim. A claim that is not prepared is no error.
    fn unprepare<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<(), String>>;
}

/// The plugin of this host.
#[derive(Clone)]
pub struct Plugin {
    /// Path of the socket for claims, as the kubelet sees it.
    pub endpoint: String,
    pub handler: Arc<dyn ClaimHandler>,
    /// Called with the result of each registration.
    pub report: Report,
}

impl Plugin {
    /// Serves both services until the token is cancelled.
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
            let preparing = server()
                .add_service(ClaimService::<false>(handler.clone()))
                .add_service(ClaimService::<true>(handler))
                .serve_with_incoming_shutdown(connections(claims), stop.clone().cancelled_owned());
            let registering = server()
                .add_service(RegistrationService(self))
                .serve_with_incoming_shutdown(connections(registration), stop.cancelled_owned());
            tokio::try_join!(preparing, registering).map(drop)
        }
        .boxed()
    }

    fn info(&self) -> PluginInfo {
        PluginInfo {
            kind: KIND.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.clone(),
            supported_versions: VERSIONS.map(str::to_owned).into(),
        }
    }

    fn note_registered(&self, RegistrationStatus { is_registered, error }: RegistrationStatus) {
        if is_registered {
            tracing::info!(driver = DRIVER, "the kubelet registered the plugin for resource claims");
            (self.report)(Ok(()));
        } else {
            (self.report)(Err(format!("the kubelet does not register the plugin {DRIVER}: {error}")));
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

fn grpc<A, Q>() -> Grpc<ProstCodec<A, Q>>
where
    A: prost::Message + 'static,
    Q: prost::Message + Default + 'static,
{
    Grpc::new(ProstCodec::default()).max_decoding_message_size(MAX_REQUEST_BYTES)
}

/// The service at the socket that the kubelet looks for.
#[derive(Clone)]
struct RegistrationService(Plugin);

impl NamedService for RegistrationService {
    const NAME: &'static str = REGISTRATION_SERVICE;
}

/// The service for claims; `OLD` for that of `v1beta1`.
#[derive(Clone)]
struct ClaimService<const OLD: bool>(Arc<dyn ClaimHandler>);

impl<const OLD: bool> NamedService for ClaimService<OLD> {
    const NAME: &'static str = if OLD { OLD_CLAIMS_SERVICE } else { CLAIMS_SERVICE };
}

type AnswerFuture = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

fn unknown_method(path: &str) -> http::Response<Body> {
    Status::unimplemented(format!("{path} is not a method of this service")).into_http()
}

impl Service<http::Request<Body>> for RegistrationService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = AnswerFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self(plugin) = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                GET_INFO => {
                    let method = |_: Request<()>| ready(Ok::<_, Status>(Response::new(plugin.info())));
                    grpc().unary(tower::service_fn(method), request).await
                }
                NOTIFY => {
                    let method = |status: Request<_>| {
                        plugin.note_registered(status.into_inner());
                        ready(Ok::<_, Status>(Response::new(())))
                    };
                    grpc().unary(tower::service_fn(method), request).await
                }
                path => unknown_method(path),
            })
        })
    }
}

impl<const OLD: bool> Service<http::Request<Body>> for ClaimService<OLD> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = AnswerFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Self(handler) = self.clone();
        Box::pin(async move {
            let method = request.uri().path().rsplit('/').next().unwrap_or_default();
            Ok(match method {
                PREPARE => {
                    let method = |request| {
                        let handler = handler.clone();
                        async move { Ok::<_, Status>(Response::new(prepare(&*handler, claims(request)?).await)) }
                    };
                    grpc().unary(tower::service_fn(method), request).await
                }
                UNPREPARE => {
                    let method = |request| {
                        let handler = handler.clone();
                        async move { Ok::<_, Status>(Response::new(unprepare(&*handler, claims(request)?).await)) }
                    };
                    grpc().unary(tower::service_fn(method), request).await
                }
                _ => unknown_method(request.uri().path()),
            })
        })
    }
}
