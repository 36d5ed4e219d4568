//! A body that somebody else writes, handed to the client piece by piece.

use std::{io, pin::pin, sync::Arc, time::Duration};

use axum::body::{Body, Bytes};
use futures_util::{StreamExt as _, stream};
use numaward_telemetry::metrics::{Format, Metrics};
use tokio::{
    runtime::Handle,
    sync::mpsc,
    time::{Instant, timeout_at},
};

use crate::{blocking, limits::TIME_LIMIT, peers::Place, scrapes::ScrapePlace};

/// Pieces that wait for a slow client, at most.
const WAITING: usize = 4;
/// For so long in total, the client of a scrape may let the kernel wait for it to read while a request waits for a place. The daemon's
/// own time does not count: a slow host makes no client slow.
const MAX_STALLED: Duration = Duration::from_secs(3);
/// How often that is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);

/// A part of a body.
pub(crate) enum Piece {
    Text(Bytes),
    /// Without it, the text broke off, which the client learns.
    End,
}

/// A body, and where to put its pieces.
pub(crate) fn body() -> (mpsc::Sender<Piece>, Body) {
    let (sender, receiver) = mpsc::channel(WAITING);
    let pieces = stream::unfold(receiver, async |mut receiver| {
        let piece = match receiver.recv().await {
            Some(Piece::Text(text)) => Ok(text),
            Some(Piece::End) => return None,
            None => Err(io::Error::other("what was to be said could not be said to its end")),
        };
        Some((piece, receiver))
    });
    // The compressor polls once more after the end.
    (sender, Body::from_stream(pieces.fuse()))
}

/// The body of `/metrics`, written by a thread that may block. `place` is held until it is written. While a request waits for a place,
/// a client that hardly reads is given up.
pub(crate) fn scrape(
    metrics: Arc<Metrics>,
    format: Format,
    place: Option<ScrapePlace>,
    connection: Option<Arc<Place>>,
) -> Body {
    let (sender, written) = body();
    let runtime = Handle::current();
    let deadline = Instant::now() + TIME_LIMIT;
    blocking::spawn(move || {
        let stalled = || connection.as_ref().map_or(Duration::ZERO, |of| of.stalled());
        let before = stalled();
        let may_wait = || {
            let is_wanted = place.as_ref().is_some_and(ScrapePlace::is_wanted);
            !is_wanted || stalled().saturating_sub(before) < MAX_STALLED
        };
        let send = |piece| runtime.block_on(hand_over(&sender, piece, deadline, may_wait));
        if metrics.encode(format, |piece| send(Piece::Text(piece))).is_ok() {
            send(Piece::End);
        }
        drop(place);
    });
    written
}

/// Whether a client takes a piece until the deadline, and as long as it may be waited for.
async fn hand_over(
    sender: &mpsc::Sender<Piece>,
    piece: Piece,
    deadline: Instant,
    may_wait: impl Fn() -> bool,
) -> bool {
    let mut sent = pin!(sender.send(piece));
    loop {
        let until = deadline.min(Instant::now() + LOOK_INTERVAL);
        match timeout_at(until, sent.as_mut()).await {
            Ok(sent) => return sent.is_ok(),
            Err(_) if until < deadline && may_wait() => {}
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
        time::sleep,
    };
    use tokio_util::sync::CancellationToken;
    use tower::ServiceExt as _;
    use tower_http::compression::CompressionLayer;

    use super::*;
    use crate::{
        peer::Peer,
        scrapes::Scrapes,
        server::{serve, tests::Peers},
    };

    #[tokio::test]
    async fn what_broke_off_is_no_whole_body_compressed_or_not() {
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
    async fn who_hardly_reads_is_given_up_where_others_may_be_waiting() {
        let (sender, mut client) = mpsc::channel(1);
        let piece = || Piece::Text(Bytes::new());
        let start = Instant::now();
        let deadline = start + TIME_LIMIT;
        assert!(hand_over(&sender, piece(), deadline, || false).await, "there is room");
        assert!(!hand_over(&sender, piece(), deadline, || false).await);
        assert_eq!(start.elapsed(), LOOK_INTERVAL);
        assert!(!hand_over(&sender, piece(), deadline, || true).await);
        assert_eq!(start.elapsed(), TIME_LIMIT);
        client.recv().await;
        assert!(hand_over(&sender, piece(), deadline, || true).await);
    }

    /// Metrics of some 32 MiB.
    #[derive(Debug)]
    struct Nothing;

    impl SnapshotSource for Nothing {
        fn snapshot(&self) -> Snapshot {
            Snapshot::default()
        }
    }

    fn large() -> Metrics {
        Metrics::new(Arc::new(Nothing)).with(|registry| {
            for number in 0..512 {
                registry.register(format!("a{number}"), "x".repeat(64 << 10), Gauge::<i64>::default());
            }
        })
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn slow_scrapes_of_one_peer_give_way_to_that_of_another() {
        let (metrics, scrapes) = (Arc::new(large()), Scrapes::default());
        let route = get(async move |Extension(peer): Extension<Peer>| {
            let place = scrapes.place(peer.place.as_ref().and_then(|of| of.peer())).await;
            scrape(metrics, Format::Prometheus, place, peer.place)
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/metrics", route);
        tokio::spawn(serve(Peers(listener), router, CancellationToken::new()));
        let ask = async |from: [u8; 4]| {
            let socket = TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from((from, 0))).unwrap();
            let mut stream = socket.connect(address).await.unwrap();
            let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            stream.write_all(request).await.unwrap();
            stream
        };
        // Each reads all the time, and would take minutes.
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
        for of in slow {
            of.abort();
        }
    }
}
