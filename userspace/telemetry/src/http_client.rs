//! A client for HTTP posts to receivers that may be slow, faulty or unreachable.

use std::{io, path::PathBuf, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    HeaderMap, Request, StatusCode, Uri,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER, USER_AGENT},
};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use numaward_model::error_chain;
use tokio::time::timeout;
use tokio_rustls::rustls::crypto::ring;

/// The time limit of a post, from the connection to the end of the answer.
const POST_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum size of an answer that is read.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// The maximum length of an answer in an error message.
const MAX_REPORTED_CHARS: usize = 200;
const USER_AGENT_TEXT: &str = concat!("numaward/", env!("CARGO_PKG_VERSION"));

/// The error of a post.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PostError {
    /// The HTTP status; `None` without an answer.
    pub(crate) status: Option<StatusCode>,
    /// The time after which the receiver allows a retry.
    retry_after: Option<Duration>,
    /// The status with the beginning of the answer, or the reason for which there was no answer.
    pub(crate) problem: String,
}

impl PostError {
    fn without_answer(problem: String) -> Self {
        Self { problem, ..Self::default() }
    }

    /// Returns the wait before the next try: at least `wait`, and at least the time that the receiver asks for, limited
    /// to `longest`.
    pub(crate) fn retry_wait(&self, wait: Duration, longest: Duration) -> Duration {
        wait.max(self.retry_after.unwrap_or_default().min(longest))
    }
}

/// A client that posts to one URL. Redirects are errors, so that the token is never sent to another address.
#[derive(Debug)]
pub(crate) struct Poster {
    client: legacy::Client<hyper_rustls::HttpsConnector<HttpConnector>, Full<Bytes>>,
    url: Uri,
    headers: HeaderMap,
    token_file: Option<PathBuf>,
    time_limit: Duration,
}

impl Poster {
    /// Fails if the URL needs TLS and no certificate authorities are found.
    pub(crate) fn new(
        url: Uri,
        content_type: &'static str,
        mut headers: HeaderMap,
        token_file: Option<PathBuf>,
    ) -> io::Result<Self> {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_TEXT));
        let provider = ring::default_provider();
        let builder = hyper_rustls::HttpsConnectorBuilder::new();
        let connector = if url.scheme_str() == Some("https") {
            builder.with_provider_and_native_roots(provider)?
        } else {
            let config = tokio_rustls::rustls::ClientConfig::builder_with_provider(provider.into())
                .with_safe_default_protocol_versions()
                .map_err(io::Error::other)?;
            let roots = tokio_rustls::rustls::RootCertStore::empty();
            builder.with_tls_config(config.with_root_certificates(roots).with_no_client_auth())
        };
        let connector = connector.https_or_http().enable_http1().build();
        let client = legacy::Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { client, url, headers, token_file, time_limit: POST_TIMEOUT })
    }

    /// Replaces the time limit of a post.
    #[cfg(test)]
    pub(crate) fn with_time_limit(self, time_limit: Duration) -> Self {
        Self { time_limit, ..self }
    }

    /// Returns scheme, host and port, without the other parts of the URL, which may be secret.
    pub(crate) fn receiver(&self) -> String {
        let authority = self.url.authority().map_or("", |authority| authority.as_str());
        format!("{}://{authority}", self.url.scheme_str().unwrap_or_default())
    }

    /// Posts a body, and returns the answer.
    pub(crate) async fn post(&self, body: Bytes) -> Result<Bytes, PostError> {
        let request = self.request(body).await.map_err(PostError::without_answer)?;
        let late = |_| PostError::without_answer(format!("no answer within {:?}", self.time_limit));
        timeout(self.time_limit, self.exchange(request)).await.map_err(late)?
    }

    async fn request(&self, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
        let mut request =
            Request::post(self.url.clone()).body(Full::new(body)).map_err(|error| error.to_string())?;
        *request.headers_mut() = self.headers.clone();
        if let Some(path) = &self.token_file {
            let problem = |problem: String| format!("{}: {problem}", path.display());
            let read = tokio::task::spawn_blocking({
                let path = path.clone();
                move || std::fs::read_to_string(path)
            });
            let text = read.await.map_err(io::Error::other).and_then(|text| text);
            let text = text.map_err(|error| problem(error.to_string()))?;
            let mut value = HeaderValue::try_from(format!("Bearer {}", text.trim()))
                .map_err(|_| problem("contains characters that a token cannot have".to_owned()))?;
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        Ok(request)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Bytes, PostError> {
        let failed = |error| PostError::without_answer(error_chain(&error));
        let response = self.client.request(request).await.map_err(failed)?;
        let status = response.status();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(retry_after);
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
        // An unreadable body does not change the result.
        let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        if status.is_success() {
            return Ok(body);
        }
        let text: String = String::from_utf8_lossy(&body).chars().take(MAX_REPORTED_CHARS).collect();
        Err(PostError { status: Some(status), retry_after, problem: format!("{status}: {text}") })
    }
}

/// Parses `Retry-After` (RFC 9110, 10.2.3) in seconds.
fn retry_after(value: &HeaderValue) -> Option<Duration> {
    // Dates are not supported: the receiver is then retried as without this header.
    value.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
pub(crate) mod tests {
    //! A receiver of posts for tests.

    use std::{
        collections::VecDeque,
        future::pending,
        sync::{Arc, Mutex},
    };

    use axum::{Router, body::Bytes, extract::State, http::HeaderMap, response::IntoResponse as _};
    use tokio::{net::TcpListener, sync::Notify};

    use super::*;

    /// The answer of the receiver to a post.
    #[derive(Clone, Debug)]
    pub(crate) enum ReceiverAnswer {
        Status(u16),
        /// The status `503` with `Retry-After` in seconds.
        Later(u64),
        /// No answer.
        Silence,
    }

    /// A received post: path, headers, body.
    pub(crate) type ReceivedPost = (String, HeaderMap, Bytes);

    #[derive(Debug, Default)]
    struct ReceiverState {
        posted: Mutex<Vec<ReceivedPost>>,
        /// The answers to the next posts; later posts get status 200.
        answers: Mutex<VecDeque<ReceiverAnswer>>,
        changed: Notify,
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Receiver {
        inner: Arc<ReceiverState>,
        pub(crate) url: String,
    }

    impl Receiver {
        pub(crate) async fn start(answers: impl IntoIterator<Item = ReceiverAnswer>) -> Self {
            let inner = Arc::new(ReceiverState {
                answers: Mutex::new(answers.into_iter().collect()),
                ..ReceiverState::default()
            });
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let router = Router::new().fallback(take).with_state(inner.clone());
            tokio::spawn(async move { axum::serve(listener, router).await });
            Self { inner, url }
        }

        pub(crate) fn posted(&self) -> Vec<ReceivedPost> {
            self.inner.posted.lock().unwrap().clone()
        }

        /// Waits until the received posts are sufficient.
        pub(crate) async fn until(&self, enough: impl Fn(&[ReceivedPost]) -> bool) -> Vec<ReceivedPost> {
            let wait = async {
                loop {
                    let changed = self.inner.changed.notified();
                    let posted = self.posted();
                    if enough(&posted) {
                        return posted;
                    }
                    changed.await;
                }
            };
            timeout(Duration::from_mins(1), wait).await.expect("nothing more was posted")
        }
    }

    async fn take(
        State(inner): State<Arc<ReceiverState>>,
        uri: Uri,
        headers: HeaderMap,
        body: Bytes,
    ) -> axum::response::Response {
        inner.posted.lock().unwrap().push((uri.path().to_owned(), headers, body));
        inner.changed.notify_waiters();
        let answer = inner.answers.lock().unwrap().pop_front();
        match answer {
            None => StatusCode::OK.into_response(),
            Some(ReceiverAnswer::Status(status)) => {
                (StatusCode::from_u16(status).unwrap(), "no\n".repeat(1000)).into_response()
            }
            Some(ReceiverAnswer::Later(seconds)) => {
                (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, seconds.to_string())]).into_response()
            }
            Some(ReceiverAnswer::Silence) => pending().await,
        }
    }

    fn poster(url: &str) -> Poster {
        Poster::new(url.parse().unwrap(), "application/json", HeaderMap::new(), None).unwrap()
    }

    #[tokio::test]
    async fn reports_answer_of_receiver() {
        let receiver = Receiver::start([
            ReceiverAnswer::Status(200),
            ReceiverAnswer::Status(400),
            ReceiverAnswer::Later(7),
            ReceiverAnswer::Silence,
        ])
        .await;
        let patient =
            poster(&format!("{}/secret?key=1", receiver.url)).with_time_limit(Duration::from_mins(1));
        assert_eq!(patient.receiver(), receiver.url);
        assert!(patient.post(Bytes::from_static(b"{}")).await.is_ok());
        let refused = patient.post(Bytes::new()).await.unwrap_err();
        assert_eq!(refused.status, Some(StatusCode::BAD_REQUEST));
        assert_eq!(refused.problem.chars().count(), "400 Bad Request: ".len() + MAX_REPORTED_CHARS);
        let later = patient.post(Bytes::new()).await.unwrap_err();
        assert_eq!(later.status, Some(StatusCode::SERVICE_UNAVAILABLE));
        let waits =
            [1, 20].map(|wait| later.retry_wait(Duration::from_secs(wait), Duration::from_mins(1)).as_secs());
        assert_eq!(waits, [7, 20]);
        assert_eq!(later.retry_wait(Duration::ZERO, Duration::from_secs(5)), Duration::from_secs(5));
        let hurried = patient.with_time_limit(Duration::from_millis(50));
        let problem = hurried.post(Bytes::new()).await.unwrap_err().problem;
        assert_eq!(problem, "no answer within 50ms");
        let (path, headers, body) = receiver.posted().swap_remove(0);
        assert_eq!((path.as_str(), &body[..]), ("/secret", &b"{}"[..]));
        assert_eq!(headers[CONTENT_TYPE], "application/json");
    }

    #[tokio::test]
    async fn reads_token_for_each_post() {
        let receiver = Receiver::start([]).await;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("token");
        let poster = Poster { token_file: Some(file.clone()), ..poster(&receiver.url) };
        let problem = poster.post(Bytes::new()).await.unwrap_err().problem;
        assert!(problem.contains("token: No such file"), "{problem}");
        for token in ["one", "two"] {
            std::fs::write(&file, format!("{token}\n")).unwrap();
            assert_eq!(poster.post(Bytes::new()).await, Ok(Bytes::new()));
            assert_eq!(receiver.posted().last().unwrap().1[AUTHORIZATION], format!("Bearer {token}"));
        }
        std::fs::write(&file, "a\nb").unwrap();
        let problem = poster.post(Bytes::new()).await.unwrap_err().problem;
        assert!(problem.ends_with("contains characters that a token cannot have"), "{problem}");
    }

    #[tokio::test]
    async fn reports_unreachable_receiver() {
        let url = {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            format!("http://{}", listener.local_addr().unwrap())
        };
        let problem = poster(&url).post(Bytes::new()).await.unwrap_err().problem;
        assert!(problem.contains("Connection refused"), "{problem}");
    }
}
