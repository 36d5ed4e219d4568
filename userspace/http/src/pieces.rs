//! A body that somebody else writes, handed to the client piece by piece.

use std::{io, sync::Arc, time::Instant};

use axum::body::{Body, Bytes};
use futures_util::stream;
use numaward_telemetry::metrics::{Format, Metrics};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, mpsc},
    time::timeout_at,
};

use crate::limits::TIME_LIMIT;

/// Pieces that wait for a slow client, at most.
const WAITING: usize = 4;

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
    (sender, Body::from_stream(pieces))
}

/// The body of `/metrics`, written by a thread that may block. `place` is held until they are written.
pub(crate) fn scrape(metrics: Arc<Metrics>, format: Format, place: Option<OwnedSemaphorePermit>) -> Body {
    let (sender, written) = body();
    let runtime = Handle::current();
    let deadline = Instant::now() + TIME_LIMIT;
    tokio::task::spawn_blocking(move || {
        let send = |piece| {
            let sent = timeout_at(deadline.into(), sender.send(piece));
            runtime.block_on(async { matches!(sent.await, Ok(Ok(()))) })
        };
        if metrics.encode(format, |piece| send(Piece::Text(piece))).is_ok() {
            send(Piece::End);
        }
        drop(place);
    });
    written
}
