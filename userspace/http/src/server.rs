//! The accept loop: it listens, accepts connections within the limits of [`Peers`], and serves each of them in its own task.

use std::{
    collections::{HashMap, VecDeque},
    convert::Infallible,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::Router;
use futures_util::{
    FutureExt as _,
    future::{BoxFuture, ready},
};
use hyper::{
    body::{Body, Bytes, Frame, Incoming, SizeHint},
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

use crate::{
    blocking,
    limits::Limits,
    local_users::{Ends, users},
    paced::PacedStream,
    peer::Peer,
    peers::{ActiveRequest, PeerId, Peers},
};

/// Time that requests in progress have to end when the daemon stops.
const STOP_TIME_LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of connections that are accepted together; one lookup finds their users.
const MAX_BATCH: usize = 64;

/// Error of [`listen`]. The fields are the address and the configuration key that sets it.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error(
        "the address {0} is in use, perhaps by another numaward; stop that one, or choose another address with {1}"
    )]
    InUse(SocketAddr, &'static str),
    #[error("cannot listen on {0}: {2}; choose another address with {1}")]
    Other(SocketAddr, &'static str, #[source] io::Error),
}

/// Listens on an address. `key` is the configuration key that sets it, for the error. Ports below 1024 need `CAP_NET_BIND_SERVICE`.
pub fn listen(address: SocketAddr, key: &'static str) -> Result<std::net::TcpListener, ListenError> {
    let bound = std::net::TcpListener::bind(address);
    let listening = bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    listening.map_err(|error| match error.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse(address, key),
        _ => ListenError::Other(address, key, error),
    })
}

/// A source of connections.
pub trait Accept: Send + Sync + 'static {
    /// Waits for the next connection.
    fn accept(&self) -> BoxFuture<'_, io::Result<IncomingConnection>>;
}

/// A connection that was accepted, before its handshake.
pub struct IncomingConnection {
    /// The client's address; `None` on a Unix socket.
    pub source: Option<SocketAddr>,
    /// The local address at which it was accepted, if known.
    pub local: Option<SocketAddr>,
    /// Completes the handshake, after which requests can be read. Runs in the connection's own task.
    pub open: BoxFuture<'static, io::Result<OpenedConnection>>,
}

impl IncomingConnection {
    /// Returns a TCP connection without a handshake.
    pub fn plain(stream: TcpStream, address: SocketAddr) -> Self {
        let local = stream.local_addr().ok();
        let opened: OpenedConnection = (Box::new(stream), Peer { address: Some(address), ..Peer::default() });
        Self { source: Some(address), local, open: ready(Ok(opened)).boxed() }
    }

    /// Returns both addresses of a connection over the loopback.
    fn loopback_ends(&self) -> Option<Ends> {
        self.source.zip(self.local).filter(|(source, _)| source.ip().to_canonical().is_loopback())
    }
}

/// A connection after its handshake, and its client.
pub type OpenedConnection = (Box<dyn Stream>, Peer);

/// A byte stream of requests and responses.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

impl Accept for TcpListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<IncomingConnection>> {
        async {
            let (stream, address) = Self::accept(self).await?;
            Ok(IncomingConnection::plain(stream, address))
        }
        .boxed()
    }
}

/// Serves until the token is cancelled, then waits until requests in progress have ended. Each request has its [`Peer`] as an extension.
pub fn serve(listener: impl Accept, router: Router, stop: CancellationToken) -> BoxFuture<'static, ()> {
    serve_within(Limits::DEFAULT, Box::new(listener), router, stop)
}

/// Serves within other limits. The listener is a trait object, so that the loop is compiled once.
pub(crate) fn serve_within(
    limits: Limits,
    listener: Box<dyn Accept>,
    router: Router,
    stop: CancellationToken,
) -> BoxFuture<'static, ()> {
    accept_all(limits, listener, router, stop).boxed()
}

async fn accept_all(limits: Limits, listener: Box<dyn Accept>, router: Router, stop: CancellationToken) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(64 << 10);
    let service = TowerToHyperService::new(router);
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(limits.connections));
    let peers = Peers::new(limits);
    // Connections that were accepted together, each with its peer.
    let mut accepted = VecDeque::new();
    loop {
        let Some((peer, IncomingConnection { source, open, .. })) = accepted.pop_front() else {
            accepted = tokio::select! {
                () = stop.cancelled() => break,
                batch = accept_batch(&*listener) => match batch {
                    Ok(batch) => batch,
                    Err(error) => {
                        // No free file descriptor, or the client has disconnected: the server continues.
                        tracing::warn!(%error, "cannot accept a connection");
                        sleep(Duration::from_millis(100)).await;
                        continue;
                    }
                },
            };
            continue;
        };
        let Some(place) = peers.enter(peer) else {
            tracing::debug!(peer = ?source, "connection closed: all connections of this peer are busy, or very many wait and this peer has the most");
            continue;
        };
        // Done here and not in the task: the next connection may displace this one before the task has run.
        if !place.is_served() {
            let mut permit = permits.clone().try_acquire_owned().ok().or_else(|| place.displace());
            if permit.is_none() && source.is_none() {
                // On a Unix socket, further connections wait in the kernel's queue.
                permit = tokio::select! {
                    () = stop.cancelled() => break,
                    permit = permits.clone().acquire_owned() => permit.ok(),
                };
            }
            if let Some(permit) = permit {
                place.serve(permit);
            }
        }
        let (http, service, watcher, stop) =
            (http.clone(), service.clone(), graceful.watcher(), stop.clone());
        let (permits, served_place) = (permits.clone(), place.clone());
        let serving = async move {
            if !served_place.is_served() {
                let permit = tokio::select! {
                    () = stop.cancelled() => return,
                    permit = timeout(limits.head, permits.acquire_owned()) => permit.ok().and_then(Result::ok),
                };
                let Some(permit) = permit else {
                    return tracing::debug!(
                        "connection closed: the server has reached its limit of connections"
                    );
                };
                served_place.serve(permit);
            }
            let opened = tokio::select! {
                () = stop.cancelled() => return,
                opened = timeout(limits.head, open) => opened,
            };
            let (stream, peer) = match opened.map_err(io::Error::from).flatten() {
                Ok(opened) => opened,
                Err(error) => return tracing::debug!(%error, "connection"),
            };
            let peer = Peer { place: Some(served_place.clone()), ..peer };
            let stream = TokioIo::new(PacedStream::new(stream, served_place.clone(), limits.stall));
            let service = service_fn(move |mut request: hyper::Request<Incoming>| {
                request.extensions_mut().insert(peer.clone());
                let active = served_place.begin_request();
                let answer = service.call(request);
                async move { Ok::<_, Infallible>(answer.await?.map(|body| ActiveBody { body, _active: active })) }
            });
            if let Err(error) = watcher.watch(http.serve_connection(stream, service)).await {
                tracing::debug!(%error, "connection");
            }
        };
        let served = async move {
            tokio::select! {
                // First, so that a request that has arrived is answered even if its connection is displaced already.
                biased;
                () = serving => {}
                () = place.displaced() => tracing::debug!("connection closed: another one takes its place"),
            }
        };
        tokio::spawn(served.boxed());
    }
    drop(listener);
    if timeout(STOP_TIME_LIMIT, graceful.shutdown()).await.is_err() {
        tracing::warn!("requests were cut off because they did not end within {STOP_TIME_LIMIT:?}");
    }
}

/// A response body that keeps its connection from being idle until it is written.
struct ActiveBody {
    body: axum::body::Body,
    _active: ActiveRequest,
}

impl Body for ActiveBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Waits for a connection and accepts all that are pending, up to [`MAX_BATCH`]. Returns each with its peer.
async fn accept_batch(listener: &dyn Accept) -> io::Result<VecDeque<(Option<PeerId>, IncomingConnection)>> {
    let mut batch = vec![listener.accept().await?];
    while batch.len() < MAX_BATCH
        && let Some(Ok(accepted)) = listener.accept().now_or_never()
    {
        batch.push(accepted);
    }
    let ends: Vec<Ends> = batch.iter().filter_map(IncomingConnection::loopback_ends).collect();
    let users = if ends.is_empty() {
        HashMap::new()
    } else {
        // If the lookup fails, all clients on the loopback are one peer.
        blocking::spawn(move || users(&ends)).await.unwrap_or_default()
    };
    let peer = |accepted: &IncomingConnection| {
        let user = accepted.loopback_ends().and_then(|ends| users.get(&ends).copied());
        accepted.source.map(|source| PeerId::new(source.ip(), user))
    };
    Ok(batch.into_iter().map(|accepted| (peer(&accepted), accepted)).collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{net::IpAddr, os::unix::process::CommandExt as _};

    use axum::{extract::Request, routing::get};
    use futures_util::StreamExt as _;
    use numaward_tests_support::skip_outside_ci;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        time::Instant,
    };

    use super::*;
    use crate::router::layered;

    /// Size of a response of a large host.
    const LARGE: usize = 8 << 20;
    const STALL: Duration = Duration::from_millis(300);
    /// Time limit of all waits, also on a slow machine.
    pub(crate) const TEST_TIMEOUT: Duration = Duration::from_mins(1);

    /// Serves a large and a small response on 127.0.0.1. All clients on it are one peer.
    async fn start_server(limits: Limits) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let large = |_: Request| async { vec![b'x'; LARGE] };
        let staying = |_: Request| async {
            let start = futures_util::stream::once(ready(Ok::<_, Infallible>("start")));
            axum::body::Body::from_stream(start.chain(futures_util::stream::pending()))
        };
        let router = Router::new()
            .route("/large", get(large))
            .route("/staying", get(staying))
            .route("/livez", get(|| async { "ok\n" }));
        tokio::spawn(serve_within(limits, Box::new(listener), layered(router), CancellationToken::new()));
        address
    }

    async fn send(address: SocketAddr, path: &str, times: usize) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        // The server may close the connection at once.
        let _ = stream.write_all(request.repeat(times).as_bytes()).await;
        stream
    }

    /// Returns the first bytes of a response; `None` if the connection was closed.
    pub(crate) async fn head(stream: &mut (impl AsyncRead + Unpin)) -> Option<String> {
        let mut buffer = vec![0; 4096];
        let read =
            timeout(TEST_TIMEOUT, stream.read(&mut buffer)).await.unwrap().ok().filter(|read| *read > 0)?;
        Some(String::from_utf8_lossy(&buffer[..read]).into_owned())
    }

    /// Repeats a request until the status is 200.
    async fn wait_for(address: SocketAddr, path: &str) {
        let start = Instant::now();
        loop {
            let answer = head(&mut send(address, path, 1).await).await;
            if answer.as_ref().is_some_and(|answer| answer.starts_with("HTTP/1.1 200")) {
                return;
            }
            assert!(start.elapsed() < TEST_TIMEOUT, "{path}: {answer:?}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn closes_clients_that_never_read() {
        let limits = Limits { connections: 16, stall: STALL, ..Limits::DEFAULT };
        let address = start_server(limits).await;
        let mut silent = Vec::new();
        for _ in 0..limits.connections {
            silent.push(send(address, "/large", 20).await);
        }
        // They hold all connections until the server closes them.
        let mut served = Vec::new();
        for _ in 0..limits.connections {
            let mut stream = send(address, "/livez", 1).await;
            let answer = head(&mut stream).await;
            assert!(answer.as_ref().is_some_and(|answer| answer.starts_with("HTTP/1.1 200")), "{answer:?}");
            served.push(stream);
        }
        for mut stream in silent {
            let mut taken = 0;
            let mut buffer = vec![0; 1 << 20];
            while let Ok(Ok(read @ 1..)) = timeout(TEST_TIMEOUT, stream.read(&mut buffer)).await {
                taken += read;
            }
            assert!(taken < 20 * LARGE, "{taken} bytes were sent to a client that did not read");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn full_peer_replaces_its_oldest_idle_connection() {
        let limits = Limits { connections: 16, connections_of_a_peer: 4, ..Limits::DEFAULT };
        let address = start_server(limits).await;
        let mut held = Vec::new();
        for number in 0..limits.connections_of_a_peer + 2 {
            let mut stream = send(address, "/livez", 1).await;
            let answer = head(&mut stream).await;
            assert!(answer.is_some_and(|answer| answer.starts_with("HTTP/1.1 200")), "{number}");
            held.push(stream);
        }
        for (number, stream) in held.iter_mut().enumerate() {
            let _ = stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
            assert_eq!(head(stream).await.is_some(), number >= 2, "{number}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn full_peer_keeps_responses_that_are_read() {
        let limits = Limits { connections_of_a_peer: 4, unread_of_a_peer: 64 << 20, ..Limits::DEFAULT };
        let address = start_server(limits).await;
        let mut reading = Vec::new();
        for _ in 0..limits.connections_of_a_peer {
            let mut stream = send(address, "/large", 1).await;
            assert!(head(&mut stream).await.is_some_and(|answer| answer.starts_with("HTTP/1.1 200")));
            reading.push(stream);
        }
        // More than fits into the buffers of the kernel is left.
        assert_eq!(head(&mut send(address, "/livez", 1).await).await, None, "all are busy");
        for stream in &mut reading {
            let mut read = 0;
            let mut buffer = vec![0; 1 << 20];
            while read < LARGE / 2 {
                match timeout(TEST_TIMEOUT, stream.read(&mut buffer)).await.unwrap() {
                    Ok(more @ 1..) => read += more,
                    ended => panic!("cut off after {read} bytes: {ended:?}"),
                }
            }
        }
    }

    /// Programs behind one address, such as the kubelet and a process of the same host.
    #[tokio::test(flavor = "multi_thread")]
    async fn reconnecting_client_locks_out_no_other_of_its_peer() {
        let address = start_server(Limits::DEFAULT).await;
        let mut staying = send(address, "/staying", 1).await;
        assert!(head(&mut staying).await.is_some_and(|answer| answer.starts_with("HTTP/1.1 200")));
        let stop = CancellationToken::new();
        let flooding = stop.clone();
        let flood = std::thread::spawn(move || {
            let mut open = VecDeque::new();
            let mut connected = 0;
            while !flooding.is_cancelled() {
                if let Ok(stream) = std::net::TcpStream::connect(address) {
                    open.push_back(stream);
                    connected += 1;
                }
                if open.len() > 2 * Limits::DEFAULT.connections_of_a_peer {
                    open.pop_front();
                }
                std::thread::sleep(Duration::from_micros(500));
            }
            connected
        });
        sleep(Duration::from_millis(500)).await;
        for number in 0..20 {
            let start = Instant::now();
            let answer = head(&mut send(address, "/livez", 1).await).await;
            assert!(
                answer.as_ref().is_some_and(|answer| answer.starts_with("HTTP/1.1 200")),
                "{number}: {answer:?}"
            );
            assert!(start.elapsed() < Duration::from_secs(1), "{number}: {:?}", start.elapsed());
        }
        stop.cancel();
        assert!(flood.join().unwrap() > 2 * Limits::DEFAULT.connections_of_a_peer, "there was no flood");
        let mut more = [0; 64];
        let read = staying.try_read(&mut more).map_err(|error| error.kind());
        assert_eq!(read, Err(io::ErrorKind::WouldBlock), "a response in progress is not cut off");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn local_users_have_separate_limits() {
        if !rustix::process::geteuid().is_root() {
            return skip_outside_ci("only root can start a process of another user");
        }
        let limits = Limits { connections: 16, connections_of_a_peer: 4, ..Limits::DEFAULT };
        let address = start_server(limits).await;
        let script = "for i in 1 2 3 4 5 6 7 8; do exec {fd}<>/dev/tcp/127.0.0.1/$0 || exit; done; echo; exec sleep 300";
        let flood = std::process::Command::new("bash")
            .args(["-c", script, &address.port().to_string()])
            .uid(65534)
            .stdout(std::process::Stdio::piped())
            .spawn();
        let mut flood = match flood {
            Ok(flood) => flood,
            Err(error) => return skip_outside_ci(format!("bash cannot be started: {error}")),
        };
        io::Read::read_exact(flood.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let mut held = Vec::new();
        for number in 0..limits.connections_of_a_peer {
            let mut stream = send(address, "/livez", 1).await;
            let answer = head(&mut stream).await;
            assert!(answer.is_some_and(|answer| answer.starts_with("HTTP/1.1 200")), "{number}");
            held.push(stream);
        }
        assert!(head(&mut send(address, "/livez", 1).await).await.is_some());
        assert_eq!(head(&mut held[0]).await, None, "the limit of this user");
        flood.kill().unwrap();
        flood.wait().unwrap();
    }

    /// Listener on the loopback that makes each client address a separate peer.
    pub(crate) struct SeparatePeers<A>(pub(crate) A);

    impl<A: Accept> Accept for SeparatePeers<A> {
        fn accept(&self) -> BoxFuture<'_, io::Result<IncomingConnection>> {
            async {
                let accepted = self.0.accept().await?;
                let source = accepted.source.and_then(|source| {
                    let IpAddr::V4(ip) = source.ip() else { return None };
                    let ip = std::net::Ipv4Addr::from_bits(ip.to_bits() & 0x00ff_ffff | 10 << 24);
                    Some((ip, source.port()).into())
                });
                Ok(IncomingConnection { source, ..accepted })
            }
            .boxed()
        }
    }

    #[tokio::test]
    async fn simultaneous_peer_blocks_no_other() {
        let forever = 10 * TEST_TIMEOUT;
        let limits = Limits { connections: 8, connections_of_a_peer: 8, head: forever, ..Limits::DEFAULT };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connect = async |peer: [u8; 4]| {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from((peer, 0))).unwrap();
            socket.connect(address).await.unwrap()
        };
        // All connections are pending when the server starts, and the runtime has one thread.
        let mut silent = Vec::new();
        for _ in 0..limits.connections {
            silent.push(connect([127, 0, 0, 2]).await);
        }
        let mut other = connect([127, 0, 0, 3]).await;
        other.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let router = Router::new().route("/livez", get(|| async { "ok\n" }));
        let stop = CancellationToken::new();
        tokio::spawn(serve_within(limits, Box::new(SeparatePeers(listener)), layered(router), stop));
        let answer = timeout(TEST_TIMEOUT, head(&mut other)).await.expect("there is no response");
        assert!(answer.is_some_and(|answer| answer.starts_with("HTTP/1.1 200")));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn full_server_admits_new_peers() {
        let limits = Limits { connections: 16, connections_of_a_peer: 8, ..Limits::DEFAULT };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/livez", get(|| async { "ok\n" }));
        tokio::spawn(serve_within(
            limits,
            Box::new(SeparatePeers(listener)),
            layered(router),
            CancellationToken::new(),
        ));
        let from = |peer: [u8; 4]| async move {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from((peer, 0))).unwrap();
            let mut stream = socket.connect(address).await.unwrap();
            let _ = stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
            stream
        };
        // All stay connected and send no further request.
        let mut held = Vec::new();
        for peer in [[127, 0, 1, 1], [127, 0, 1, 2]] {
            for _ in 0..limits.connections_of_a_peer {
                let mut stream = from(peer).await;
                assert!(head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200"));
                held.push(stream);
            }
        }
        let start = Instant::now();
        for peer in 1..=4 {
            let mut stream = from([127, 0, 2, peer]).await;
            assert!(head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200"), "{peer}");
        }
        assert!(start.elapsed() < limits.head, "the other connections had timed out");
        // Now each connection is of a peer of its own, and idle.
        let start = Instant::now();
        for peer in 1..=40 {
            let mut stream = from([127, 0, 3, peer]).await;
            assert!(head(&mut stream).await.unwrap().starts_with("HTTP/1.1 200"), "{peer}");
            held.push(stream);
        }
        assert!(start.elapsed() < limits.head, "idle connections had timed out");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn limits_unread_responses() {
        let limits = Limits { unread_of_a_peer: 2 * LARGE, stall: STALL, ..Limits::DEFAULT };
        let address = start_server(limits).await;
        let mut held = Vec::new();
        for _ in 0..2 {
            let stream = send(address, "/large", 1).await;
            stream.readable().await.unwrap();
            held.push(stream);
        }
        let refused = head(&mut send(address, "/large", 1).await).await.unwrap();
        assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("retry-after: 1"), "{refused}");
        assert!(refused.contains("wait to be read"), "{refused}");
        wait_for(address, "/livez").await;
        // One response is read to its end, which allows another.
        let mut left = LARGE;
        let mut buffer = vec![0; 1 << 20];
        let stream = &mut held[0];
        while left > 0 {
            let read = timeout(TEST_TIMEOUT, stream.read(&mut buffer)).await.unwrap().unwrap();
            assert!(read > 0, "cut off with {left} bytes left");
            left = left.saturating_sub(read);
        }
        wait_for(address, "/large").await;
    }
}
