//! A body that somebody else writes, handed to the client piece by piece.

use std::{io, pin::pin, sync::Arc, time::Duration};

use axum::body::{Body, Bytes};
use futures_util::{StreamExt as _, stream};
use numaward_telemetry::metrics::{Format, Metrics};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, mpsc},
    time::{Instant, timeout_at},
};

use crate::{blocking, limits::TIME_LIMIT};

/// Pieces that wait for a slow client, at most.
const WAITING: usize = 4;
/// Within this, the client of a scrape has to take a piece where others may be waiting for a scrape.
const PATIENCE: Duration = Duration::from_secs(1);

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

/// The body of `/metrics`, written by a thread that may block. `place` is held until it is written. Where no other place is
/// free, a client that hardly reads is given up.
pub(crate) fn scrape(metrics: Arc<Metrics>, format: Format, place: Option<OwnedSemaphorePermit>) -> Body {
    let (sender, written) = body();
    let runtime = Handle::current();
    let deadline = Instant::now() + TIME_LIMIT;
    blocking::spawn(move || {
        let may_wait = || place.as_ref().is_some_and(|place| place.semaphore().available_permits() > 0);
        let send = |piece| runtime.block_on(hand_over(&sender, piece, deadline, may_wait));
        if metrics.encode(format, |piece| send(Piece::Text(piece))).is_ok() {
            send(Piece::End);
        }
        drop(place);
    });
    written
}

/// Whether a client takes a piece until then; within [`PATIENCE`] where it may not keep others waiting.
async fn hand_over(
    sender: &mpsc::Sender<Piece>,
    piece: Piece,
    deadline: Instant,
    may_wait: impl Fn() -> bool,
) -> bool {
    let mut sent = pin!(sender.send(piece));
    loop {
        let until = deadline.min(Instant::now() + PATIENCE);
        match timeout_at(until, sent.as_mut()).await {
            Ok(sent) => return sent.is_ok(),
            Err(_) if until < deadline && may_wait() => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::{
        Router,
        body::to_bytes,
        http::{Request, header},
        routing::get,
    };
    use tower::ServiceExt as _;
    use tower_http::compression::CompressionLayer;

    use super::*;

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
        assert_eq!(start.elapsed(), PATIENCE);
        assert!(!hand_over(&sender, piece(), deadline, || true).await);
        assert_eq!(start.elapsed(), TIME_LIMIT);
        client.recv().await;
        assert!(hand_over(&sender, piece(), deadline, || true).await);
    }
}
