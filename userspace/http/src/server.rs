//! Listens, accepts, and serves each connection.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use hyper::{
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::peer::Peer;

/// Connections that are served at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 128;
/// A client must have sent its request's head within this time.
const HEAD_TIME_LIMIT: Duration = Duration::from_secs(10);
/// Requests under way when the daemon stops may take this long to end.
const STOP_TIME_LIMIT: Duration = Duration::from_secs(5);

/// The address cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody else does. The second is what sets the address.
    #[error(
        "the address {0} is in use, perhaps by another numaward; stop that one, or choose another address with {1}"
    )]
    InUse(SocketAddr, &'static str),
    /// Something else is wrong with it.
    #[error("cannot listen on {0}: {2}; choose another address with {1}")]
    Other(SocketAddr, &'static str, #[source] io::Error),
}

/// Starts to listen on an address that `key` sets. Ports below 1024 need `CAP_NET_BIND_SERVICE`.
pub fn listen(address: SocketAddr, key: &'static str) -> Result<std::net::TcpListener, ListenError> {
    let bound = std::net::TcpListener::bind(address);
    let listening = bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    listening.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse(address, key),
        _ => ListenError::Other(address, key, error),
    })
}

/// Where connections come from.
pub trait Accept: Send + 'static {
    /// A connection as it came.
    type Accepted: Send + 'static;
    /// A connection on which requests can be read.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for one.
    fn accept(&self) -> impl Future<Output = io::Result<Self::Accepted>> + Send;

    /// Does what must be done before requests can be read. Others are accepted meanwhile.
    fn open(accepted: Self::Accepted) -> impl Future<Output = io::Result<(Self::Stream, Peer)>> + Send;
}

impl Accept for TcpListener {
    type Accepted = TcpStream;
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }

    async fn open(stream: TcpStream) -> io::Result<(TcpStream, Peer)> {
        Ok((stream, Peer::default()))
    }
}

/// Serves until the token is cancelled, then lets requests under way end. Requests carry their [`Peer`].
pub async fn serve<A: Accept>(listener: A, router: Router, stop: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME_LIMIT).max_buf_size(64 << 10);
    let service = TowerToHyperService::new(router);
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let accepted = async {
            let place = places.clone().acquire_owned().await;
            (place, listener.accept().await)
        };
        let (place, accepted) = tokio::select! {
            () = stop.cancelled() => break,
            (place, accepted) = accepted => match accepted {
                Ok(accepted) => (place, accepted),
                Err(error) => {
                    // Out of file descriptors, or the client went away again: neither ends the server.
                    tracing::warn!(%error, "cannot accept a connection");
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            },
        };
        let (http, service, watcher, stop) =
            (http.clone(), service.clone(), graceful.watcher(), stop.clone());
        tokio::spawn(async move {
            let _place = place;
            let opened = tokio::select! {
                () = stop.cancelled() => return,
                opened = timeout(HEAD_TIME_LIMIT, A::open(accepted)) => opened,
            };
            let (stream, peer) = match opened.map_err(io::Error::from).flatten() {
                Ok(opened) => opened,
                Err(error) => return tracing::debug!(%error, "connection"),
            };
            let service = service_fn(move |mut request: hyper::Request<Incoming>| {
                request.extensions_mut().insert(peer);
                service.call(request)
            });
            if let Err(error) = watcher.watch(http.serve_connection(TokioIo::new(stream), service)).await {
                tracing::debug!(%error, "connection");
            }
        });
    }
    drop(listener);
    if timeout(STOP_TIME_LIMIT, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests were cut off: they did not end within {STOP_TIME_LIMIT:?}");
    }
}
