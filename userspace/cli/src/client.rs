//! HTTP client of the daemon's API: on its control socket, or on one of its addresses.

use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use numaward_api::GuaranteeRefusal;
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    time::timeout,
};

use crate::{listening, remote::Remote};

/// Maximum duration of a request. Longer than the daemon takes to answer, or to report that it cannot.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(35);
/// Maximum size of an answer: more than the workloads of the largest host take.
pub(crate) const MAX_ANSWER_BYTES: usize = 256 << 20;

/// Address of a daemon.
#[derive(derive_more::Display)]
pub(crate) enum Server {
    /// Daemon of this host, as its configuration says: its control socket. If the socket cannot be opened, or does not
    /// exist because the daemon only observes, reads go to its HTTP address; as root only if programs of root listen
    /// there.
    #[display("on its control socket {}", socket.display())]
    Local { socket: PathBuf, address: SocketAddr },
    /// Control socket that the user named.
    #[display("on its control socket {}", _0.display())]
    Socket(PathBuf),
    /// URL that the user named: of the read-only address or of the control address.
    #[display("at {}", _0.url)]
    Remote(Box<Remote>),
}

/// Failure of a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// The daemon does not answer.
    #[error("no numaward daemon is reachable {server}: {reason}; {hint}")]
    Unreachable {
        server: String,
        reason: String,
        /// Things to check.
        hint: &'static str,
    },
    /// The daemon refused the request.
    #[error("{}", crate::explain::render_refusal(.0))]
    Refused(Box<GuaranteeRefusal>),
    /// The answer is not one of numaward's API.
    #[error(
        "the program that answers {server} sent status {status} and no valid answer of numaward: {reason}; is it of another version?"
    )]
    Malformed { server: String, status: StatusCode, reason: serde_json::Error },
}

impl Server {
    /// Gets the JSON at a path.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.request(Method::GET, path, Bytes::new()).await
    }

    /// Sends a body, and returns the JSON of the answer.
    pub(crate) async fn request<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<T, ClientError> {
        let (status, body) = self.send(method, path, body).await?;
        serde_json::from_slice(&body).map_err(|error| self.malformed(status, error))
    }

    /// Sends a body, and returns the body of a successful answer.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let exchange = async {
            let response = self.start(method, path, "application/json", body).await?;
            Ok((response.status(), read_body(response.into_body()).await?))
        };
        let (status, body) = self.within_timeout(exchange).await?;
        if status.is_success() { Ok((status, body)) } else { Err(self.refused(status, &body)) }
    }

    /// Gets the resource at a path, in the daemon's preferred format.
    pub(crate) async fn fetch(&self, path: &str) -> Result<Bytes, ClientError> {
        let exchange = async {
            let response = self.start(Method::GET, path, "*/*", Bytes::new()).await?;
            Ok((response.status(), read_body(response.into_body()).await?))
        };
        let (status, body) = self.within_timeout(exchange).await?;
        if status.is_success() { Ok(body) } else { Err(self.refused(status, &body)) }
    }

    /// Checks that guarantees can be changed at this address.
    pub(crate) async fn check_changes_allowed(&self) -> Result<(), ClientError> {
        let exchange = async {
            let response =
                self.start(Method::OPTIONS, "/api/v1/allocations", "application/json", Bytes::new());
            let (parts, body) = response.await?.into_parts();
            Ok((parts, read_body(body).await?))
        };
        let (parts, body) = self.within_timeout(exchange).await?;
        // A proxy may answer by itself, without the header: the changes will show whether they are allowed.
        let allowed = parts.headers.get(header::ALLOW).and_then(|methods| methods.to_str().ok());
        let is_allowed = allowed.is_none_or(|methods| methods.contains(Method::POST.as_str()));
        if is_allowed { Ok(()) } else { Err(self.refused(parts.status, &body)) }
    }

    /// Opens a stream of server-sent events.
    pub(crate) async fn open(&self, path: &str) -> Result<Incoming, ClientError> {
        let started = self.start(Method::GET, path, "text/event-stream", Bytes::new());
        let (parts, body) = self.within_timeout(started).await?.into_parts();
        if parts.status.is_success() {
            return Ok(body);
        }
        Err(self.refused(parts.status, &self.within_timeout(read_body(body)).await?))
    }

    /// Waits for an answer until the timeout.
    async fn within_timeout<T>(&self, answer: impl Future<Output = io::Result<T>>) -> Result<T, ClientError> {
        let reason = match timeout(REQUEST_TIMEOUT, answer).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} seconds", REQUEST_TIMEOUT.as_secs()),
        };
        let hint = match self {
            Self::Local { .. } | Self::Socket(_) => {
                "is `numaward run` running, and is this user root? (--server names another daemon)"
            }
            Self::Remote(_) => {
                "is `numaward run` running there, with this listen or control.listen? (--server names another daemon)"
            }
        };
        Err(ClientError::Unreachable { server: self.to_string(), reason, hint })
    }

    fn refused(&self, status: StatusCode, body: &Bytes) -> ClientError {
        match serde_json::from_slice(body) {
            Ok(refusal) => ClientError::Refused(Box::new(refusal)),
            Err(error) => self.malformed(status, error),
        }
    }

    fn malformed(&self, status: StatusCode, reason: serde_json::Error) -> ClientError {
        ClientError::Malformed { server: self.to_string(), status, reason }
    }

    async fn start(
        &self,
        method: Method,
        path: &str,
        accept: &str,
        body: Bytes,
    ) -> io::Result<Response<Incoming>> {
        let is_read = method == Method::GET;
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::ACCEPT, accept)
            .header(header::CONTENT_TYPE, "application/json");
        match self {
            Self::Local { socket, address } => {
                request = request.header(header::HOST, "localhost");
                match UnixStream::connect(socket).await {
                    Ok(stream) => start_on(stream, request, body).await,
                    Err(error) if is_read => {
                        let also =
                            |why: String| io::Error::other(format!("{error}; nor at {address}: {why}"));
                        check_listener(address.port()).map_err(also)?;
                        let stream = TcpStream::connect(address).await;
                        let stream = stream.map_err(|on_address| also(on_address.to_string()))?;
                        start_on(stream, request, body).await
                    }
                    Err(error) => Err(error),
                }
            }
            Self::Socket(socket) => {
                request = request.header(header::HOST, "localhost");
                start_on(UnixStream::connect(socket).await?, request, body).await
            }
            Self::Remote(remote) => {
                request = request.header(header::HOST, remote.authority());
                if let Some(authorization) = &remote.authorization {
                    request = request.header(header::AUTHORIZATION, authorization);
                }
                start_on(remote.connect().await?, request, body).await
            }
        }
    }
}

/// Checks that root can trust a port of this host: any user can listen there while the daemon does not run.
fn check_listener(port: u16) -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    match listening::is_owned_by_root(Path::new("/proc"), port) {
        Ok(true) => Ok(()),
        Ok(false) => Err("a program of another user than root may listen there, or none at all".to_owned()),
        Err(error) => Err(format!("the owner of the port cannot be determined: {error}")),
    }
}

async fn start_on(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: hyper::http::request::Builder,
    body: Bytes,
) -> io::Result<Response<Incoming>> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // An error of the connection is also an error of the request.
    tokio::spawn(connection);
    let request = request.body(Full::new(body)).map_err(io::Error::other)?;
    sender.send_request(request).await.map_err(io::Error::other)
}

async fn read_body(body: Incoming) -> io::Result<Bytes> {
    Ok(Limited::new(body, MAX_ANSWER_BYTES).collect().await.map_err(io::Error::other)?.to_bytes())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpListener,
        os::unix::fs::fchown,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    use numaward_tests_support::skip_outside_ci;

    use super::*;

    /// Answers each request, and counts them.
    fn answer_all(listener: &TcpListener) -> Arc<AtomicUsize> {
        let (listener, asked) = (listener.try_clone().unwrap(), Arc::<AtomicUsize>::default());
        let count = asked.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                count.fetch_add(1, Ordering::SeqCst);
                let _ = stream.read(&mut [0; 4096]);
                let answer = "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\ntrue";
                let _ = stream.write_all(answer.as_bytes());
            }
        });
        asked
    }

    /// Any user can listen on the daemon's port while the daemon does not run.
    #[tokio::test]
    async fn root_reads_no_port_of_a_user() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let asked = answer_all(&listener);
        let folder = tempfile::tempdir().unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::Local { socket: folder.path().join("control.sock"), address };
        // Only root can give the socket to another user.
        if rustix::process::geteuid().is_root() {
            fchown(&listener, Some(65534), None).unwrap();
            let error = server.get::<bool>("/api/v1/version").await.unwrap_err().to_string();
            assert!(error.contains("a program of another user than root"), "{error}");
            let error = server.open("/api/v1/stream").await.unwrap_err().to_string();
            assert!(error.contains("a program of another user than root"), "{error}");
            assert_eq!(asked.load(Ordering::SeqCst), 0, "it was not even connected to");
            fchown(&listener, Some(0), None).unwrap();
        } else {
            skip_outside_ci("in part: only root can give a socket to another user");
        }
        assert!(server.get::<bool>("/api/v1/version").await.unwrap());
        let change = server.request::<bool>(Method::POST, "/api/v1/allocations", Bytes::new()).await;
        assert!(change.is_err(), "changes need the control socket");
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }
}
