//! The API server: pods are read from it, notices and the node's resources are written to it.
//!
//! Everything here is a help and never a need. The API server may be unreachable, slow, restarted, or refuse us; the
//! parts that use it then keep what they know, say what is wrong ([`Report`], [`Figures`]), and try again with
//! growing pauses.
//!
//! - [`Pods`]: the pods of this Kubernetes node, by list and watch.
//! - [`EventWriter`]: Kubernetes Events on pods.
//! - [`connect`]: the client that all of them share.
//!
//! It takes these rights, in all namespaces: `pods` list and watch; `events` of `events.k8s.io` create and patch.

mod convert;
mod events;
#[cfg(feature = "testing")]
pub mod fake;
mod figures;
mod pods;
mod store;
mod token;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use http::{Request, Response};
use kube::{
    client::{Body, ClientBuilder},
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use tower::{
    limit::{RateLimit, rate::Rate},
    util::MapRequestLayer,
};

pub(crate) use self::figures::Operation;
use self::token::TokenFile;
pub use self::{
    convert::{PodError, StoredPod},
    events::{EventQueue, EventWriter},
    figures::Figures,
    pods::Pods,
    token::TokenError,
};

/// How long to wait for a connection, and for the answer to a request.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// A request that is not a watch is given up after this time.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(30);

/// Is told that a part works, or why not, whenever that changes or is tried again.
pub type Report = Arc<dyn Fn(Result<(), String>) + Send + Sync>;

/// It is not known where the API server is, or who we are to it.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file that was named cannot be used.
    #[error("{path}: cannot be used as a kubeconfig: {source}", path = .path.display())]
    Kubeconfig {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<KubeconfigError>,
    },
    /// No file was named, and this is no pod with a service account.
    #[error(
        "there is no service account here ({0}); name a kubeconfig in kubernetes.kubeconfig, or run numaward as a pod"
    )]
    InCluster(Box<InClusterError>),
    /// The token cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The client cannot be made of it.
    #[error("cannot connect with this configuration: {0}")]
    Client(Box<kube::Error>),
}

/// Makes a client from a kubeconfig, or else from the service account of the pod that this runs in. Connects only
/// when it is used. Must be called in a runtime.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<kube::Client, ConfigError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let fail = |source| ConfigError::Kubeconfig { path: path.to_owned(), source: Box::new(source) };
            let file = Kubeconfig::read_from(path).map_err(fail)?;
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(fail)?
        }
        None => kube::Config::incluster().map_err(|error| ConfigError::InCluster(Box::new(error)))?,
    };
    config.connect_timeout = Some(CONNECT_LIMIT);
    // What fails is tried again here, where it is also told.
    config.default_retry = false;
    let token = TokenFile::take(&mut config.auth_info)?;
    let client = ClientBuilder::try_from(config).map_err(|error| ConfigError::Client(Box::new(error)))?;
    let Some(token) = token.map(Arc::new) else { return Ok(client.build()) };
    let with_token = MapRequestLayer::new(move |mut request: Request<Body>| {
        token.add_to(request.headers_mut(), Instant::now());
        request
    });
    Ok(client.with_layer(&with_token).build())
}

/// The same client, for no more than so many requests in this time. `answered` is called with each answer.
fn limited(
    client: kube::Client,
    (requests, time): (u64, Duration),
    answered: impl Fn(&Response<Body>) + Clone + Send + 'static,
) -> kube::Client {
    let send = tower::service_fn(move |request| {
        let (client, answered) = (client.clone(), answered.clone());
        async move { client.send(request).await.inspect(answered) }
    });
    kube::Client::new(RateLimit::new(send, Rate::new(requests, time)), "default")
}

/// What the API server, or the way to it, did to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cause {
    Unauthorized,
    Forbidden,
    NotFound,
    /// The version to continue from is too old.
    Gone,
    Conflict,
    TooMany,
    /// Any other refusal of the request.
    Rejected,
    /// 5xx.
    Server,
    TimedOut,
    /// No connection, or it broke.
    Connection,
    /// The answer is not understood.
    Malformed,
}

impl Cause {
    pub(crate) const ALL: [Self; 11] = [
        Self::Unauthorized,
        Self::Forbidden,
        Self::NotFound,
        Self::Gone,
        Self::Conflict,
        Self::TooMany,
        Self::Rejected,
        Self::Server,
        Self::TimedOut,
        Self::Connection,
        Self::Malformed,
    ];

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::NotFound => "not_found",
            Self::Gone => "gone",
            Self::Conflict => "conflict",
            Self::TooMany => "too_many_requests",
            Self::Rejected => "rejected",
            Self::Server => "server_error",
            Self::TimedOut => "timeout",
            Self::Connection => "connection",
            Self::Malformed => "malformed",
        }
    }

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
    pub(crate) fn timed_out(limit: Duration) -> Self {
        Self { cause: Cause::TimedOut, message: format!("no answer within {limit:?}") }
    }

    pub(crate) fn of_status(status: &kube::core::Status) -> Self {
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

/// Waits for the answer to a request, within limits.
pub(crate) async fn answer<T>(request: impl Future<Output = kube::Result<T>>) -> Result<T, RequestError> {
    match tokio::time::timeout(ANSWER_LIMIT, request).await {
        Err(_) => Err(RequestError::timed_out(ANSWER_LIMIT)),
        Ok(result) => Ok(result?),
    }
}

/// Pauses between attempts: they double from attempt to attempt, and are spread so that not every Kubernetes node
/// comes back at the same moment.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    first: Duration,
}

impl Backoff {
    const MOST: Duration = Duration::from_mins(1);

    pub(crate) const fn new(first: Duration) -> Self {
        Self { next: first, first }
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }

    /// The next pause: between half and all of the doubled one before.
    pub(crate) fn pause(&mut self) -> Duration {
        let most = self.next;
        self.next = (most * 2).min(Self::MOST);
        most.mul_f64(0.5 + fastrand::f64() / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit() {
        let mut backoff = Backoff::new(Duration::from_millis(500));
        let pauses: Vec<_> = (0..12).map(|_| backoff.pause()).collect();
        assert!((250..=500).contains(&pauses[0].as_millis()), "{pauses:?}");
        assert!((4000..=8000).contains(&pauses[4].as_millis()), "{pauses:?}");
        assert!(pauses.iter().all(|pause| *pause <= Backoff::MOST), "{pauses:?}");
        assert!(pauses[11] >= Backoff::MOST / 2, "{pauses:?}");
        backoff.reset();
        assert!(backoff.pause() <= Duration::from_millis(500));
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
        std::fs::write(&path, "clusters: [").unwrap();
        let broken = connect(Some(&path)).await.err().unwrap().to_string();
        assert!(broken.starts_with(&path.display().to_string()), "{broken}");
        std::fs::write(&path, "apiVersion: v1\nkind: Config\ncurrent-context: x\n").unwrap();
        let nowhere = connect(Some(&path)).await.err().unwrap().to_string();
        assert!(nowhere.contains("context"), "{nowhere}");
        if std::env::var_os("KUBERNETES_SERVICE_HOST").is_none() {
            let outside = connect(None).await.err().unwrap().to_string();
            assert!(outside.contains("kubernetes.kubeconfig"), "{outside}");
        }
    }
}
