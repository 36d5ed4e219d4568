//! Posts over HTTP to somebody who may be slow, broken or not there.

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

/// For one post, from the connection to the answer.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Of an answer, that much is read.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// Of an answer, that much is reported.
const MAX_REPORTED_CHARS: usize = 200;
const USER: &str = concat!("numaward/", env!("CARGO_PKG_VERSION"));

/// Why a post was not taken.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Failure {
    /// What it was answered with; none where there was no answer.
    pub(crate) status: Option<StatusCode>,
    /// After which time the receiver wants to be asked again.
    retry_after: Option<Duration>,
    /// The status and the beginning of what the receiver said, or why there was no answer.
    pub(crate) problem: String,
}

impl Failure {
    fn without_answer(problem: String) -> Self {
        Self { problem, ..Self::default() }
    }

    /// How long to wait before the next try: what the receiver asks for counts, up to the longest.
    pub(crate) fn wait(&self, wait: Duration, longest: Duration) -> Duration {
        wait.max(self.retry_after.unwrap_or_default().min(longest))
    }
}

/// Posts to one URL. A redirect is an error: nobody may lead the token elsewhere.
#[derive(Debug)]
pub(crate) struct Poster {
    client: legacy::Client<hyper_rustls::HttpsConnector<HttpConnector>, Full<Bytes>>,
    url: Uri,
    headers: HeaderMap,
    token_file: Option<PathBuf>,
    time_limit: Duration,
}

impl Poster {
    /// Fails where no certificate authorities are found and the URL needs them.
    pub(crate) fn new(
        url: Uri,
        content_type: &'static str,
        mut headers: HeaderMap,
        token_file: Option<PathBuf>,
    ) -> io::Result<Self> {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
        headers.insert(USER_AGENT, HeaderValue::from_static(USER));
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
        Ok(Self { client, url, headers, token_file, time_limit: TIME_LIMIT })
    }

    /// Gives up sooner, or later.
    #[cfg(test)]
    pub(crate) fn with_time_limit(self, time_limit: Duration) -> Self {
        Self { time_limit, ..self }
    }

    /// Scheme, host and port: the rest of a URL may be a secret.
    pub(crate) fn receiver(&self) -> String {
        let authority = self.url.authority().map_or("", |authority| authority.as_str());
        format!("{}://{authority}", self.url.scheme_str().unwrap_or_default())
    }

    /// Posts once; returns the answer.
    pub(crate) async fn post(&self, body: Bytes) -> Result<Bytes, Failure> {
        let request = self.request(body).await.map_err(Failure::without_answer)?;
        let late = |_| Failure::without_answer(format!("no answer within {:?}", self.time_limit));
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
                .map_err(|_| problem("holds characters that no token has".to_owned()))?;
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        Ok(request)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Bytes, Failure> {
        let failed = |error| Failure::without_answer(error_chain(&error));
        let response = self.client.request(request).await.map_err(failed)?;
        let status = response.status();
        let retry_after = response.headers().get(RETRY_AFTER).and_then(retry_after);
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
        // An answer that cannot be read to its end changes nothing.
        let body = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        if status.is_success() {
            return Ok(body);
        }
        let text: String = String::from_utf8_lossy(&body).chars().take(MAX_REPORTED_CHARS).collect();
        Err(Failure { status: Some(status), retry_after, problem: format!("{status}: {text}") })
    }
}

/// RFC 9110, 10.2.3: seconds, or a date.
fn retry_after(value: &HeaderValue) -> Option<Duration> {
    // Dates are for people who write by hand; a receiver that sends one is asked again as if it had sent none.
    value.to_str().ok()?.trim().parse().ok().map(Duration::from_secs)
}

#[cfg(test)]
pub(crate) mod tests {
    //! A receiver of posts, for all who post.

    use std::{
        collections::VecDeque,
        future::pending,
        sync::{Arc, Mutex},
    };

    use axum::{Router, body::Bytes, extract::State, http::HeaderMap, response::IntoResponse as _};
    use tokio::{net::TcpListener, sync::Notify};

    use super::*;

    /// How the receiver answers.
    #[derive(Clone, Debug)]
    pub(crate) enum Answer {
        Status(u16),
        /// `503`, and when to come again.
        Later(u64),
        /// None at all.
        Silence,
    }

    /// What was posted: path, headers, body.
    pub(crate) type Posted = (String, HeaderMap, Bytes);

    #[derive(Debug, Default)]
    struct Inner {
        posted: Mutex<Vec<Posted>>,
        /// For the next posts; then all are taken.
        answers: Mutex<VecDeque<Answer>>,
        news: Notify,
    }

    #[derive(Clone, Debug)]
    pub(crate) struct Receiver {
        inner: Arc<Inner>,
        pub(crate) url: String,
    }

    impl Receiver {
        pub(crate) async fn start(answers: impl IntoIterator<Item = Answer>) -> Self {
            let inner =
                Arc::new(Inner { answers: Mutex::new(answers.into_iter().collect()), ..Inner::default() });
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let router = Router::new().fallback(take).with_state(inner.clone());
            tokio::spawn(async move { axum::serve(listener, router).await });
            Self { inner, url }
        }

        pub(crate) fn posted(&self) -> Vec<Posted> {
            self.inner.posted.lock().unwrap().clone()
        }

        /// Waits until what was posted is enough.
        pub(crate) async fn until(&self, enough: impl Fn(&[Posted]) -> bool) -> Vec<Posted> {
            let wait = async {
                loop {
                    let news = self.inner.news.notified();
                    let posted = self.posted();
                    if enough(&posted) {
                        return posted;
                    }
                    news.await;
                }
            };
            timeout(Duration::from_mins(1), wait).await.expect("nothing more was posted")
        }
    }

    async fn take(
        State(inner): State<Arc<Inner>>,
        uri: Uri,
        headers: HeaderMap,
        body: Bytes,
    ) -> axum::response::Response {
        inner.posted.lock().unwrap().push((uri.path().to_owned(), headers, body));
        inner.news.notify_waiters();
        let answer = inner.answers.lock().unwrap().pop_front();
        match answer {
            None => StatusCode::OK.into_response(),
            Some(Answer::Status(status)) => {
                (StatusCode::from_u16(status).unwrap(), "no\n".repeat(1000)).into_response()
            }
            Some(Answer::Later(seconds)) => {
                (StatusCode::SERVICE_UNAVAILABLE, [(RETRY_AFTER, seconds.to_string())]).into_response()
            }
            Some(Answer::Silence) => pending().await,
        }
    }

    fn poster(url: &str) -> Poster {
        Poster::new(url.parse().unwrap(), "application/json", HeaderMap::new(), None).unwrap()
    }

    #[tokio::test]
    async fn what_the_receiver_says_is_reported() {
        let receiver =
            Receiver::start([Answer::Status(200), Answer::Status(400), Answer::Later(7), Answer::Silence])
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
            [1, 20].map(|wait| later.wait(Duration::from_secs(wait), Duration::from_mins(1)).as_secs());
        assert_eq!(waits, [7, 20]);
        assert_eq!(later.wait(Duration::ZERO, Duration::from_secs(5)), Duration::from_secs(5));
        let hurried = patient.with_time_limit(Duration::from_millis(50));
        let problem = hurried.post(Bytes::new()).await.unwrap_err().problem;
        assert_eq!(problem, "no answer within 50ms");
        let (path, headers, body) = receiver.posted().swap_remove(0);
        assert_eq!((path.as_str(), &body[..]), ("/secret", &b"{}"[..]));
        assert_eq!(headers[CONTENT_TYPE], "application/json");
    }

    #[tokio::test]
    async fn the_token_is_read_for_each_post_and_reported_when_missing() {
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
        assert!(problem.ends_with("holds characters that no token has"), "{problem}");
    }

    #[tokio::test]
    async fn a_receiver_that_is_not_there_is_reported() {
        let url = {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            format!("http://{}", listener.local_addr().unwrap())
        };
        let problem = poster(&url).post(Bytes::new()).await.unwrap_err().problem;
        assert!(problem.contains("Connection refused"), "{problem}");
    }
}
