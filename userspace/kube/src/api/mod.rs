//! The API server: pods are read from it, notices and the node's resources are written to it.
//!
//! Everything here is a help and never a need. The API server may be unreachable, slow, restarted, or refuse us; the
//! parts that use it then keep what they know, report what is wrong ([`Report`], [`ApiMetrics`]), and try again with
//! growing pauses.
//!
//! - [`Pods`]: the pods of this Kubernetes node, by list and watch.
//! - [`EventWriter`]: Kubernetes Events on pods.
//! - [`Evictor`]: evictions of pods that run without what they ask for, or are in the way of what is promised.
//! - [`kubelet_version`]: what the Kubernetes node reports of its kubelet.
//! - [`connect`]: the client that all of them share.
//!
//! It takes these rights, in all namespaces: `pods` list and watch; `events` of `events.k8s.io` create and patch;
//! `nodes` get; for evictions, `pods/eviction` create.

mod convert;
mod events;
mod evictions;
#[cfg(feature = "testing")]
pub mod fake;
mod metrics;
mod pods;

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use http::{HeaderValue, Request, Response, header::AUTHORIZATION};
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

use self::events::EventRecorder;
pub(crate) use self::metrics::Operation;
pub use self::{
    convert::StoredPod,
    events::{EventQueue, EventWriter},
    evictions::{Controller, EvictionReason, EvictionSource, EvictionTiming, Evictor},
    metrics::ApiMetrics,
    pods::Pods,
};

/// What is kept of a pod of the Kubernetes node `n`, from the API server's JSON.
#[cfg(feature = "testing")]
pub fn read_pod(json: &[u8]) -> Result<StoredPod, String> {
    let object = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    convert::pod(object, "n")
}

/// How long to wait for a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long to wait for the answer to a request: for all of it, or for a watch to be open.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// A connection on which nothing came for so long is dead. Longer than a watch is quiet.
const SILENCE_LIMIT: Duration = Duration::from_mins(6);

/// Called with whether a part works, or why not, whenever that changes or is tried again.
pub type Report = Arc<dyn Fn(Result<(), String>) + Send + Sync>;

/// It is not known where the API server is, or who we are to it.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file that was named cannot be used.
    #[error("{path}: cannot be used as a kubeconfig: {1}", path = .0.display())]
    Kubeconfig(PathBuf, #[source] Box<KubeconfigError>),
    /// No file was named, and this is no pod with a service account.
    #[error(
        "there is no service account here ({0}); name a kubeconfig in kubernetes.kubeconfig, or run numaward as a pod"
    )]
    InCluster(Box<InClusterError>),
    /// The client cannot be made of it.
    #[error("cannot connect with this configuration: {0}")]
    Client(Box<kube::Error>),
}

/// Makes a client from a kubeconfig, or else from the service account of the pod that this runs in. Connects only
/// when it is used. Must be called in a runtime.
pub fn connect(kubeconfig: Option<&Path>) -> BoxFuture<'_, Result<kube::Client, ConfigError>> {
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
        config.connect_timeout = Some(CONNECT_LIMIT);
        config.read_timeout = Some(SILENCE_LIMIT);
        config.reset_reader_on_write = true;
        // What fails is tried again here, where it is also reported.
        config.default_retry = false;
        // A token file wins over `exec`; any other credential wins over the token file.
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
                    Err(error) => tracing::warn!(%error, "the token that was read last is used"),
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

/// The version of its kubelet that a Kubernetes node reports: `v1.34.2`. The error says why it is not known.
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

/// The token of a service account, or of a kubeconfig's `tokenFile`, as a header. The kubelet replaces it before it
/// expires, so it is read for each of the few requests. As in Kubernetes' own clients, but not in kube, what is around
/// the token does not belong to it: a file that was made by hand ends with a newline, which no header may hold.
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

/// Whether this asks for a watch, whose answer does not end.
fn is_watch(request: &Request<Body>) -> bool {
    request.uri().query().is_some_and(|query| query.contains("watch="))
}

/// Waits for the whole answer; of a watch, for its beginning.
async fn answer(client: kube::Client, request: Request<Body>) -> Result<Response<Body>, BoxError> {
    let is_watch = is_watch(&request);
    let answer = async {
        let answer = client.send(request).await?;
        if is_watch {
            return Ok(answer);
        }
        let (head, body) = answer.into_parts();
        Ok::<_, kube::Error>(Response::from_parts(head, Body::from(body.collect_bytes().await?)))
    };
    Ok(timeout(ANSWER_LIMIT, answer).await??)
}

/// The same client, for no more than so many requests in this time. `watching` is called when a watch is open.
fn limited(
    client: kube::Client,
    (requests, time): (u64, Duration),
    watching: impl Fn() + Clone + Send + 'static,
) -> kube::Client {
    let send = tower::service_fn(move |request| {
        let (client, watching) = (client.clone(), watching.clone());
        async move {
            let is_watch = is_watch(&request);
            let answer = client.send(request).await?;
            if is_watch && answer.status().is_success() {
                watching();
            }
            Ok::<_, kube::Error>(answer)
        }
    });
    kube::Client::new(RateLimit::new(send, Rate::new(requests, time)), "default")
}

/// What the API server, or the way to it, did to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Cause {
    Unauthorized,
    Forbidden,
    NotFound,
    /// The version to continue from is too old.
    Gone,
    Conflict,
    #[strum(serialize = "too_many_requests")]
    TooMany,
    /// Any other refusal of the request.
    Rejected,
    /// 5xx.
    #[strum(serialize = "server_error")]
    Server,
    #[strum(serialize = "timeout")]
    TimedOut,
    /// No connection, or it broke.
    Connection,
    /// The answer is not understood.
    Malformed,
}

impl Cause {
    const fn of_code(code: u16) -> Self {
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

/// A request failed.
#[derive(Clone, Debug)]
pub(crate) struct RequestError {
    pub(crate) cause: Cause,
    message: String,
}

impl RequestError {
    fn of_status(status: &kube::core::Status) -> Self {
        Self { cause: Cause::of_code(status.code), message: format!("{}: {}", status.code, status.message) }
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
        let cause = match &error {
            kube::Error::Api(status) => return Self::of_status(status),
            kube::Error::SerdeError(_) | kube::Error::FromUtf8(_) => Cause::Malformed,
            kube::Error::Auth(_) => Cause::Unauthorized,
            kube::Error::Service(error) if error.is::<Elapsed>() => {
                return Self {
                    cause: Cause::TimedOut,
                    message: format!("no answer within {ANSWER_LIMIT:?}"),
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
            source = error.source();
        }
        Self { cause, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of docs/kubernetes.md is derived from these.
    #[test]
    fn the_limits_are_those_that_the_book_names() {
        let page = include_str!("../../../../docs/kubernetes.md");
        let of = |what: &str, (requests, time): (u64, Duration)| {
            let line = page.lines().find(|line| line.starts_with(what)).expect("it has its line");
            let limit = format!("At most {requests} in {} s |", time.as_secs());
            assert!(line.contains(&limit), "{limit}: {line}");
            let all = format!("| {},000 requests a second |", requests * 5 / time.as_secs());
            assert!(line.contains(&all), "{all}: {line}");
        };
        of("| pods: watch", pods::REQUESTS);
        of("| events:", events::REQUESTS);
        assert!(page.contains(&format!("{} pods a page", pods::PAGE)));
    }

    #[tokio::test]
    async fn a_configuration_that_cannot_be_used_says_where_and_why() {
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
