//! Client of the API server: reads pods, and writes events, evictions and the node's resources.
//!
//! The daemon works without the API server, which may be slow, unreachable or restarted, or refuse requests. The users of this module
//! then keep the data that they have, report the problem ([`Report`], [`ApiMetrics`]), and try again after growing delays.
//!
//! - [`Pods`]: the pods of this Kubernetes node, by list and watch.
//! - [`EventWriter`]: Kubernetes Events on pods.
//! - [`Evictor`]: evictions of pods that cannot get their resources here, or that block the guarantees of other pods.
//! - [`ClaimReader`]: devices of resource claims, and their places.
//! - [`TaintRemover`]: removal of the taint of a new Kubernetes node.
//! - [`kubelet_version`]: version of the kubelet, as its Kubernetes node reports it.
//! - [`node_resources`]: capacity and allocatable resources of a Kubernetes node.
//! - [`kubelet_configuration`]: configuration of a kubelet, from its own API.
//! - [`connect`]: creates the client, which is shared.
//!
//! Required rights, in all namespaces: `pods` list and watch; `events` of `events.k8s.io` create and patch;
//! `nodes` get; for evictions, `pods/eviction` create; for the removal of a taint, `nodes` patch; for devices of DRA drivers,
//! `resourceclaims` get and `resourceslices` list of `resource.k8s.io`; for the configuration of the kubelet, `nodes/configz` get.

pub(crate) mod claims;
mod convert;
mod events;
mod evictions;
#[cfg(feature = "testing")]
pub mod fake;
mod list;
mod metrics;
mod node;
pub(crate) mod object;
mod pods;
mod taint;

use std::{
    fmt, fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture};
use http::{HeaderValue, Request, Response, Uri, header::AUTHORIZATION};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited, StreamBody, combinators::UnsyncBoxBody};
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api,
    api::{ApiResource, DynamicObject},
    client::{AuthError, Body, ClientBuilder},
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tokio::time::{error::Elapsed, timeout};
use tower::{
    BoxError,
    filter::FilterLayer,
    limit::{RateLimit, rate::Rate},
};

pub use self::{
    claims::{ClaimReader, ClaimedDevice, DevicePlace, DevicesByContainer},
    convert::{StoredPod, pod_of_manifest},
    events::{EventQueue, EventWriter},
    evictions::{Controller, EvictionReason, EvictionSource, EvictionTiming, Evictor},
    metrics::ApiMetrics,
    node::{NodeAmounts, NodeResources, kubelet_configuration, node_label, node_resources},
    pods::Pods,
    taint::{TaintRemover, TaintTiming},
};
use self::{
    events::EventRecorder,
    list::{AnswerStream, MAX_OBJECT_BYTES},
};
pub(crate) use self::{metrics::Operation, node::node_uid};

/// Parses a pod of the Kubernetes node `n` from the API server's JSON.
#[cfg(feature = "testing")]
pub fn read_pod(json: &[u8]) -> Result<StoredPod, String> {
    let object = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    convert::pod(object, "n")
}

/// Maximum size of an answer in bytes, except of a watch and a list of pods. While it is parsed, an answer takes some two times its
/// size. An object of the API server has 1.5 MiB at most, and up to six times as much as JSON.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// Timeout of a connection attempt.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a request, up to the end of the answer. For a watch and a list of pods: up to the start of the answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Time without received data after which a connection is closed. Longer than a watch without events stays silent.
const READ_TIMEOUT: Duration = Duration::from_mins(6);

/// Callback for the state of a part: `Ok`, or the problem. Called at every change and after every attempt.
pub type Report = Arc<dyn Fn(Result<(), String>) + Send + Sync>;

/// Error in the configuration of the client.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The configured kubeconfig cannot be used.
    #[error("{path}: cannot be used as a kubeconfig: {1}", path = .0.display())]
    Kubeconfig(PathBuf, #[source] Box<KubeconfigError>),
    /// No kubeconfig is configured, and the process does not run in a pod with a service account.
    #[error(
        "there is no service account here ({0}); name a kubeconfig in kubernetes.kubeconfig, or run numaward as a pod"
    )]
    InCluster(Box<InClusterError>),
    /// The client cannot be created from the configuration.
    #[error("cannot connect with this configuration: {0}")]
    Client(Box<kube::Error>),
}

/// Creates a client from a kubeconfig, or else from the service account of the daemon's pod. The client connects with its first
/// request. Must be called within a Tokio runtime.
pub fn connect(kubeconfig: Option<&Path>) -> BoxFuture<'_, Result<kube::Client, ConfigError>> {
    connect_to(kubeconfig, None)
}

/// Creates a client of a kubelet's own API, with the credentials for the API server. The kubelet's certificate must be of the cluster's
/// authority: otherwise another process on its port would get the token.
pub fn connect_to_kubelet(
    kubeconfig: Option<&Path>,
    address: SocketAddr,
) -> BoxFuture<'_, Result<kube::Client, ConfigError>> {
    connect_to(kubeconfig, Some(address))
}

fn connect_to(
    kubeconfig: Option<&Path>,
    kubelet: Option<SocketAddr>,
) -> BoxFuture<'_, Result<kube::Client, ConfigError>> {
    async move {
        let mut config = match kubeconfig {
            Some(path) => {
                let fail = |source| ConfigError::Kubeconfig(path.to_owned(), Box::new(source));
                let file = Kubeconfig::read_from(path).map_err(fail)?;
                kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                    .await
                    .map_err(fail)?
            }
            None => kube::Config::incluster().map_err(|error| ConfigError::InCluster(Box::new(error)))?,
        };
        if let Some(address) = kubelet {
            // A kubelet has no other scheme than HTTPS; a test server has that of its API server.
            let scheme = config.cluster_url.scheme_str().unwrap_or("https");
            let url = Uri::try_from(format!("{scheme}://{address}"));
            config.cluster_url =
                url.map_err(|error| ConfigError::Client(Box::new(kube::Error::HttpError(error.into()))))?;
            (config.tls_server_name, config.proxy_url) = (None, None);
            config.accept_invalid_certs = false;
        }
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        config.reset_reader_on_write = true;
        // The callers repeat failed requests, because they report and count them.
        config.default_retry = false;
        // A token file takes precedence over `exec`, and any other credential over the token file.
        let auth = &mut config.auth_info;
        let has_other = auth.auth_provider.is_some()
            || auth.token.is_some()
            || (auth.username.is_some() && auth.password.is_some());
        let token_file = auth.token_file.take_if(|_| !has_other).map(PathBuf::from);
        if token_file.is_some() {
            auth.exec = None;
        }
        let client = ClientBuilder::try_from(config).map_err(|error| ConfigError::Client(Box::new(error)))?;
        let mut last = None;
        let with_token = FilterLayer::new(move |mut request: Request<Body>| -> kube::Result<_> {
            if let Some(path) = &token_file {
                match bearer(path) {
                    Ok(header) => last = Some(header),
                    Err(error) if last.is_none() => return Err(kube::Error::Auth(error)),
                    Err(error) => {
                        tracing::warn!(%error, "the token file cannot be read; the previous token is used");
                    }
                }
                request.headers_mut().extend(last.clone().map(|header| (AUTHORIZATION, header)));
            }
            Ok(request)
        });
        let client = client.with_layer(&with_token).build();
        Ok(kube::Client::new(tower::service_fn(move |request| answer(client.clone(), request)), "default"))
    }
    .boxed()
}

/// Returns the kubelet's version that a Kubernetes node reports, such as `v1.34.2`.
pub fn kubelet_version(client: kube::Client, node: &str) -> BoxFuture<'_, Result<String, String>> {
    async move {
        let api: Api<DynamicObject> = Api::all_with(client, &ApiResource::erase::<Node>(&()));
        let node = api.get(node).await.map_err(|error| RequestError::from(error).to_string())?;
        let version = node.data["status"]["nodeInfo"]["kubeletVersion"].as_str();
        version
            .map(str::to_owned)
            .ok_or_else(|| "the node reports no status.nodeInfo.kubeletVersion".to_owned())
    }
    .boxed()
}

/// Returns the authorization header with the token of a service account, or of a kubeconfig's `tokenFile`. The kubelet replaces the
/// file before the token expires, so it is read for each request; there are few. Whitespace around the token is removed, as in the
/// clients of Kubernetes: a file that was written by hand ends with a newline, which is invalid in a header. The crate `kube` does not
/// remove it.
fn bearer(file: &Path) -> Result<HeaderValue, AuthError> {
    let fail = |error| AuthError::ReadTokenFile(error, file.to_owned());
    let text = fs::read_to_string(file).map_err(fail)?;
    if text.trim().is_empty() {
        return Err(fail(io::Error::new(io::ErrorKind::InvalidData, "it is empty")));
    }
    let header = HeaderValue::try_from(format!("Bearer {}", text.trim()));
    let mut header = header.map_err(AuthError::InvalidBearerToken)?;
    header.set_sensitive(true);
    Ok(header)
}

/// Returns true if the request opens a watch, which has an endless answer.
fn is_watch(request: &Request<Body>) -> bool {
    request.uri().query().is_some_and(|query| query.contains("watch="))
}

type AnswerBody = UnsyncBoxBody<Bytes, BoxError>;

/// Sends a request and waits for the whole answer. For a watch and an [`AnswerStream`]: for the start of the answer.
async fn answer(client: kube::Client, request: Request<Body>) -> Result<Response<AnswerBody>, BoxError> {
    let (is_watch, is_streamed) = (is_watch(&request), request.extensions().get::<AnswerStream>().is_some());
    let answer = async {
        let (head, body) = client.send(request).await?.into_parts();
        let body = if !head.status.is_success() || !(is_watch || is_streamed) {
            let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await.map_err(kube::Error::Service)?;
            Full::from(body.to_bytes()).map_err(|never| match never {}).boxed_unsync()
        } else if is_watch {
            with_limited_lines(body)
        } else {
            body.map_err(BoxError::from).boxed_unsync()
        };
        Ok::<_, kube::Error>(Response::from_parts(head, body))
    };
    Ok(timeout(REQUEST_TIMEOUT, answer).await??)
}

/// Error of a line in a watch that is longer than any event.
#[derive(Debug, thiserror::Error)]
#[error("a line of the watch has more than {} MiB", MAX_OBJECT_BYTES >> 20)]
struct LineLengthError;

/// Returns the body of a watch, which fails at a line that is larger than any event.
fn with_limited_lines(body: Body) -> AnswerBody {
    let mut length = 0;
    let limited = body.into_data_stream().map(move |data| {
        let data = data?;
        for part in data.split_inclusive(|&byte| byte == b'\n') {
            length += part.len();
            if length > MAX_OBJECT_BYTES {
                return Err(BoxError::from(LineLengthError));
            }
            if part.ends_with(b"\n") {
                length = 0;
            }
        }
        Ok(Frame::data(data))
    });
    StreamBody::new(limited).boxed_unsync()
}

/// Returns the client with a rate limit: at most `requests` in each `period`.
fn limited(client: kube::Client, (requests, period): (u64, Duration)) -> kube::Client {
    let send = tower::service_fn(move |request| {
        let client = client.clone();
        async move { client.send(request).await }
    });
    kube::Client::new(RateLimit::new(send, Rate::new(requests, period)), "default")
}

/// Class of an error of a request. The names are values of a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Cause {
    Unauthorized,
    Forbidden,
    NotFound,
    /// The resource version from which a watch continues is too old.
    Gone,
    Conflict,
    #[strum(serialize = "too_many_requests")]
    TooMany,
    /// Any other status 4xx.
    Rejected,
    /// Status 5xx.
    #[strum(serialize = "server_error")]
    Server,
    #[strum(serialize = "timeout")]
    TimedOut,
    /// The connection failed or was interrupted.
    Connection,
    /// The answer cannot be parsed.
    Malformed,
    /// The answer has more than [`MAX_ANSWER_BYTES`], or an event of a watch more than [`MAX_OBJECT_BYTES`].
    TooLarge,
}

impl Cause {
    const fn from_status_code(code: u16) -> Self {
        match code {
            401 => Self::Unauthorized,
            403 => Self::Forbidden,
            404 => Self::NotFound,
            409 => Self::Conflict,
            410 => Self::Gone,
            429 => Self::TooMany,
            500.. => Self::Server,
            _ => Self::Rejected,
        }
    }
}

/// Error of a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestError {
    pub(crate) cause: Cause,
    message: String,
}

impl RequestError {
    fn from_status(status: &kube::core::Status) -> Self {
        Self {
            cause: Cause::from_status_code(status.code),
            message: format!("{}: {}", status.code, status.message),
        }
    }

    /// Returns the error of an answer of this kind without a resource version.
    fn without_version(kind: &str) -> Self {
        Self { cause: Cause::Malformed, message: format!("a {kind} without a resource version") }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match self.cause {
            Cause::Unauthorized => f.write_str(" (the token or certificate is not valid for this cluster)"),
            Cause::Forbidden => f.write_str(" (give the service account this right)"),
            _ => Ok(()),
        }
    }
}

impl From<kube::Error> for RequestError {
    fn from(error: kube::Error) -> Self {
        let mut cause = match &error {
            kube::Error::Api(status) => return Self::from_status(status),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => Cause::Malformed,
            kube::Error::Auth(_) => Cause::Unauthorized,
            kube::Error::Service(error) if error.is::<LengthLimitError>() => {
                return Self {
                    cause: Cause::TooLarge,
                    message: format!("the answer has more than {} MiB", MAX_ANSWER_BYTES >> 20),
                };
            }
            kube::Error::Service(error) if error.is::<Elapsed>() => {
                return Self {
                    cause: Cause::TimedOut,
                    message: format!("no answer within {REQUEST_TIMEOUT:?}"),
                };
            }
            _ => Cause::Connection,
        };
        let mut message = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(error) = source {
            let text = error.to_string();
            if !message.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
            }
            if error.is::<LineLengthError>() {
                cause = Cause::TooLarge;
            }
            source = error.source();
        }
        Self { cause, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table in docs/kubernetes.md is derived from these limits.
    #[test]
    fn docs_name_request_limits() {
        let page = include_str!("../../../../docs/kubernetes.md");
        let check_line = |start: &str, (requests, time): (u64, Duration)| {
            let line = page.lines().find(|line| line.starts_with(start)).expect("the table has the line");
            let limit = format!("At most {requests} in {} s |", time.as_secs());
            assert!(line.contains(&limit), "{limit}: {line}");
            let all = format!("| {},000 requests a second |", requests * 5 / time.as_secs());
            assert!(line.contains(&all), "{all}: {line}");
        };
        check_line("| pods: watch", pods::RATE_LIMIT);
        check_line("| events:", events::RATE_LIMIT);
        assert!(page.contains(&format!("{} pods a page", pods::PAGE_SIZE)));
    }

    #[tokio::test]
    async fn config_error_names_file_and_cause() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kubeconfig");
        let missing = connect(Some(&path)).await.err().unwrap().to_string();
        assert!(
            missing.contains("kubeconfig: cannot be used") && missing.contains("No such file"),
            "{missing}"
        );
        fs::write(&path, "clusters: [").unwrap();
        let broken = connect(Some(&path)).await.err().unwrap().to_string();
        assert!(broken.starts_with(&path.display().to_string()), "{broken}");
        fs::write(&path, "apiVersion: v1\nkind: Config\ncurrent-context: x\n").unwrap();
        let nowhere = connect(Some(&path)).await.err().unwrap().to_string();
        assert!(nowhere.contains("context"), "{nowhere}");
        if std::env::var_os("KUBERNETES_SERVICE_HOST").is_none() {
            let outside = connect(None).await.err().unwrap().to_string();
            assert!(outside.contains("kubernetes.kubeconfig"), "{outside}");
        }
    }
}
