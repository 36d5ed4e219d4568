//! Asks a daemon: on its control socket, or on one of its addresses.

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

/// Longer than the daemon takes to answer, or to say that it cannot.
const TIME_LIMIT: Duration = Duration::from_secs(35);
/// More than the largest host's workloads take.
pub(crate) const MAX_BYTES: usize = 256 << 20;

/// A daemon, by the way to it.
#[derive(derive_more::Display)]
pub(crate) enum Server {
    /// That of this host, as its configuration says: on the control socket. Who may not open it, and where there is
    /// none as the daemon only observes, may still read on its address. Root does so only where root's programs listen there.
    #[display("on its control socket {}", socket.display())]
    Local { socket: PathBuf, address: SocketAddr },
    /// The control socket that was named.
    #[display("on its control socket {}", _0.display())]
    Socket(PathBuf),
    /// The address that was named: the read-only one, or the control address.
    #[display("at {}", _0.url)]
    Remote(Box<Remote>),
}

/// The daemon did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// Nobody answers.
    #[error("no numaward daemon is reachable {server}: {reason}; {hint}")]
    Unreachable {
        server: String,
        reason: String,
        /// What to look at.
        hint: &'static str,
    },
    /// It refuses.
    #[error("{}", crate::explain::refused(.0))]
    Refused(Box<GuaranteeRefusal>),
    /// The answer makes no sense.
    #[error(
        "who answers {server} said {status} and what is not numaward's: {reason}; is it of another version?"
    )]
    Malformed { server: String, status: StatusCode, reason: serde_json::Error },
}

impl Server {
    /// Gets the JSON at a path.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        self.ask(Method::GET, path, Bytes::new()).await
    }

    /// Sends a body, gets JSON.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<T, ClientError> {
        let (status, body) = self.send(method, path, body).await?;
        serde_json::from_slice(&body).map_err(|error| self.malformed(status, error))
    }

    /// Sends a body, gets the body of a success.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(StatusCode, Bytes), ClientError> {
        let exchange = async {
            let response = self.begin(method, path, "application/json", body).await?;
            Ok((response.status(), whole(response.into_body()).await?))
        };
        let (status, body) = self.in_time(exchange).await?;
        if status.is_success() { Ok((status, body)) } else { Err(self.refused(status, &body)) }
    }

    /// Gets what is at a path, in the form that the daemon likes best.
    pub(crate) async fn fetch(&self, path: &str) -> Result<Bytes, ClientError> {
        let exchange = async {
            let response = self.begin(Method::GET, path, "*/*", Bytes::new()).await?;
            Ok((response.status(), whole(response.into_body()).await?))
        };
        let (status, body) = self.in_time(exchange).await?;
        if status.is_success() { Ok(body) } else { Err(self.refused(status, &body)) }
    }

    /// Opens a stream of server-sent events.
    pub(crate) async fn open(&self, path: &str) -> Result<Incoming, ClientError> {
        let begun = self.begin(Method::GET, path, "text/event-stream", Bytes::new());
        let (parts, body) = self.in_time(begun).await?.into_parts();
        if parts.status.is_success() {
            return Ok(body);
        }
        Err(self.refused(parts.status, &self.in_time(whole(body)).await?))
    }

    /// What comes within the time limit.
    async fn in_time<T>(&self, answer: impl Future<Output = io::Result<T>>) -> Result<T, ClientError> {
        let reason = match timeout(TIME_LIMIT, answer).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} seconds", TIME_LIMIT.as_secs()),
        };
        let hint = match self {
            Self::Local { .. } | Self::Socket(_) => {
                "does `numaward run` run, and is this root? (--server names another)"
            }
            Self::Remote(_) => {
                "does `numaward run` run there, with this listen or control.listen? (--server names another)"
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

    async fn begin(
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
                    Ok(stream) => begin_on(stream, request, body).await,
                    Err(error) if is_read => {
                        let also =
                            |why: String| io::Error::other(format!("{error}; nor at {address}: {why}"));
                        check_listener(address.port()).map_err(also)?;
                        let stream = TcpStream::connect(address).await;
                        let stream = stream.map_err(|on_address| also(on_address.to_string()))?;
                        begin_on(stream, request, body).await
                    }
                    Err(error) => Err(error),
                }
            }
            Self::Socket(socket) => {
                request = request.header(header::HOST, "localhost");
                begin_on(UnixStream::connect(socket).await?, request, body).await
            }
            Self::Remote(remote) => {
                request = request.header(header::HOST, remote.authority());
                if let Some(authorization) = &remote.authorization {
                    request = request.header(header::AUTHORIZATION, authorization);
                }
                begin_on(remote.connect().await?, request, body).await
            }
        }
    }
}

/// Whether root may take what a port of this host says for the daemon's: any user can listen there while no daemon does.
fn check_listener(port: u16) -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    match listening::is_roots(Path::new("/proc"), port) {
        Ok(true) => Ok(()),
        Ok(false) => Err("no program of root, or not only of root, listens there".to_owned()),
        Err(error) => Err(format!("it is not known which program listens there: {error}")),
    }
}

async fn begin_on(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: hyper::http::request::Builder,
    body: Bytes,
) -> io::Result<Response<Incoming>> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // What ends the connection is an error of the request too.
    tokio::spawn(connection);
    let request = request.body(Full::new(body)).map_err(io::Error::other)?;
    sender.send_request(request).await.map_err(io::Error::other)
}

async fn whole(body: Incoming) -> io::Result<Bytes> {
    Ok(Limited::new(body, MAX_BYTES).collect().await.map_err(io::Error::other)?.to_bytes())
}
