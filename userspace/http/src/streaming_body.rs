//! Response bodies that another task or thread writes piece by piece.

use std::{io, pin::pin, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::StatusCode,
};
use futures_util::{StreamExt as _, stream};
use numaward_telemetry::metrics::{Format, Metrics};
use tokio::{runtime::Handle, sync::mpsc, time::timeout};

use crate::{blocking, limits::TIME_LIMIT, peers::ConnectionPlace, problem::Failure, scrapes::ScrapePlace};

/// Maximum number of pieces that wait for a slow client.
const MAX_QUEUED_PIECES: usize = 4;
/// Total time that the client of a scrape may spend without reading while another request waits for a place. At other times,
/// it is [`TIME_LIMIT`]. Time that the daemon needs itself does not count, so a slow host does not make a client slow.
const MAX_STALLED: Duration = Duration::from_secs(3);
/// Interval at which that time is checked.
const STALL_POLL_INTERVAL: Duration = Duration::from_millis(250);

const NOT_COMPLETED: &str = "the response could not be completed";

/// A part of a body.
pub(crate) enum Piece {
    Text(Bytes),
    /// The end of a complete body. A body without it is aborted, which the client sees as an error.
    End,
}

/// Returns a body and the sender of its pieces.
pub(crate) fn body() -> (mpsc::Sender<Piece>, Body) {
    let (sender, receiver) = mpsc::channel(MAX_QUEUED_PIECES);
    (sender, stream_body(None, receiver))
}

/// Returns a body of the pieces of a channel after `first`, if any.
fn stream_body(first: Option<Piece>, receiver: mpsc::Receiver<Piece>) -> Body {
    let pieces = stream::unfold((first, receiver), async |(mut first, mut receiver)| {
        let next = match first.take() {
            Some(piece) => Some(piece),
            None => receiver.recv().await,
        };
        let piece = match next {
            Some(Piece::Text(text)) => Ok(text),
            Some(Piece::End) => return None,
            None => Err(io::Error::other(NOT_COMPLETED)),
        };
        Some((piece, (first, receiver)))
    });
    // The compressor polls once more after the end.
    Body::from_stream(pieces.fuse())
}

/// Returns the body of `/metrics`, written by a thread that may block, once its first piece is there: a response cannot
/// be refused after its head. `place` is held until it is written. The body of a client that reads too slowly is aborted,
/// and sooner while another request waits for a place.
pub(crate) async fn scrape(
    metrics: Arc<Metrics>,
    format: Format,
    place: Option<ScrapePlace>,
    connection: Option<Arc<ConnectionPlace>>,
) -> Result<Body, Failure> {
    let (sender, mut receiver) = mpsc::channel(MAX_QUEUED_PIECES);
    let runtime = Handle::current();
    let writing = blocking::spawn(move || {
        let stalled = || connection.as_ref().map_or(Duration::ZERO, |place| place.stalled());
        let before = stalled();
        let may_wait = || {
            let is_wanted = place.as_ref().is_some_and(ScrapePlace::is_wanted);
            stalled().saturating_sub(before) < if is_wanted { MAX_STALLED } else { TIME_LIMIT }
        };
        // A client that takes each piece in time may be slow nevertheless.
        let is_slow = || stalled().saturating_sub(before) >= TIME_LIMIT;
        let send = |piece| !is_slow() && runtime.block_on(send_piece(&sender, piece, may_wait));
        if metrics.encode(format, |piece| send(Piece::Text(piece))).is_ok() {
            send(Piece::End);
        }
        drop(place);
    });
    let Some(first) = receiver.recv().await else {
        let failed = (StatusCode::INTERNAL_SERVER_ERROR, NOT_COMPLETED.to_owned());
        return Err(writing.await.err().map_or(failed, |panic| blocking::failed(&panic)));
    };
    Ok(stream_body(Some(first), receiver))
}

/// Sends a piece. Returns false if the client has ended its request, or when `may_wait` returns false.
async fn send_piece(sender: &mpsc::Sender<Piece>, piece: Piece, may_wait: impl Fn() -> bool) -> bool {
    let mut sent = pin!(sender.send(piece));
    loop {
        match timeout(STALL_POLL_INTERVAL, sent.as_mut()).await {
            Ok(sent) => return sent.is_ok(),
            Err(_) if may_wait() => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::{
        Extension, Router,
        body::to_bytes,
        http::{Request, header},
        routing::get,
    };
    use numaward_model::snapshot::{Snapshot, SnapshotSource};
    use prometheus_client::metrics::gauge::Gauge;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::{TcpListener, TcpSocket},
        time::{Instant, sleep},
    };
    use tokio_util::sync::CancellationToken;
    use tower::ServiceExt as _;
    use tower_http::compression::CompressionLayer;

    use super::*;
    use crate::{
        peer::Peer,
        scrapes::Scrapes,
        server::{serve, tests::SeparatePeers},
    };

    #[tokio::test]
    async fn aborted_body_is_an_error() {
        let broken = get(async || {
            let (sender, body) = body();
            sender.send(Piece::Text(Bytes::from_static(&[b'a'; 100]))).await.unwrap();
            body
        });
        let whole = get(async || {
            let (sender, body) = body();
            sender.send(Piece::Text(Bytes::from_static(&[b'a'; 100]))).await.unwrap();
            sender.send(Piece::End).await.unwrap();
            body
        });
        let router = Router::new().route("/broken", broken).route("/whole", whole);
        let router = router.layer(CompressionLayer::new());
        for encoding in ["gzip", "identity"] {
            for (path, is_whole) in [("/broken", false), ("/whole", true)] {
                let request = Request::get(path).header(header::ACCEPT_ENCODING, encoding);
                let response = router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
                assert_eq!(response.headers().contains_key(header::CONTENT_ENCODING), encoding == "gzip");
                let read = to_bytes(response.into_body(), usize::MAX).await;
                assert_eq!(read.is_ok(), is_whole, "{path} {encoding}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn slow_client_is_aborted_if_needed() {
        let (sender, mut client) = mpsc::channel(1);
        let piece = || Piece::Text(Bytes::new());
        let start = Instant::now();
        assert!(send_piece(&sender, piece(), || false).await, "there is room");
        assert!(!send_piece(&sender, piece(), || false).await);
        assert_eq!(start.elapsed(), STALL_POLL_INTERVAL);
        let sent = send_piece(&sender, piece(), || true);
        let reading = async {
            sleep(2 * TIME_LIMIT).await;
            client.recv().await
        };
        assert!(tokio::join!(sent, reading).0, "the client has read");
        drop(client);
        assert!(!send_piece(&sender, piece(), || true).await, "the client has closed the connection");
    }

    /// Source of an empty snapshot.
    #[derive(Debug)]
    struct EmptySource;

    impl SnapshotSource for EmptySource {
        fn snapshot(&self) -> Snapshot {
            Snapshot::default()
        }
    }

    /// Returns metrics of some 32 MiB.
    fn large() -> Metrics {
        Metrics::new(Arc::new(EmptySource)).with(|registry| {
            for number in 0..512 {
                registry.register(format!("a{number}"), "x".repeat(64 << 10), Gauge::<i64>::default());
            }
        })
    }

    /// Source that fails.
    #[derive(Debug)]
    struct FailingSource;

    impl SnapshotSource for FailingSource {
        fn snapshot(&self) -> Snapshot {
            panic!("the snapshot fails")
        }
    }

    /// The status of a response can be an error only before its head is sent.
    #[tokio::test]
    async fn failed_scrape_has_error_status() {
        let metrics = Arc::new(Metrics::new(Arc::new(FailingSource)));
        let (status, _) = scrape(metrics, Format::Prometheus, None, None).await.unwrap_err();
        assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn scrape_of_other_peer_comes_first() {
        let (metrics, scrapes) = (Arc::new(large()), Scrapes::default());
        let route = get(async move |Extension(peer): Extension<Peer>| {
            let place = scrapes.place(peer.place.as_ref().and_then(|place| place.peer())).await;
            scrape(metrics, Format::Prometheus, place, peer.place).await
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/metrics", route);
        tokio::spawn(serve(SeparatePeers(listener), router, CancellationToken::new()));
        let ask = async |from: [u8; 4]| {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from((from, 0))).unwrap();
            let mut stream = socket.connect(address).await.unwrap();
            let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            stream.write_all(request).await.unwrap();
            stream
        };
        // Each of them reads steadily, and would need minutes.
        let mut slow = Vec::new();
        for _ in 0..20 {
            let mut stream = ask([127, 0, 0, 2]).await;
            slow.push(tokio::spawn(async move {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(1..) = stream.read(&mut buffer).await {
                    sleep(Duration::from_millis(500)).await;
                }
            }));
        }
        sleep(Duration::from_secs(1)).await;
        let start = Instant::now();
        let mut answer = Vec::new();
        ask([127, 0, 0, 3]).await.read_to_end(&mut answer).await.unwrap();
        assert!(answer.ends_with(b"0\r\n\r\n") && answer.len() > 32 << 20, "{}", answer.len());
        let time = start.elapsed();
        assert!(time < TIME_LIMIT / 2, "{time:?}");
        for client in slow {
            client.abort();
        }
    }
}
