//! The body of `/metrics`: written by a thread that may block, handed to the client piece by piece.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Instant,
};

use axum::body::Body;
use bytes::Bytes;
use http_body::Frame;
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, mpsc},
    time::timeout_at,
};

use super::TIME_LIMIT;
use crate::metrics::{Format, Metrics};

/// Pieces that wait for a slow client, at most.
const PIECES: usize = 4;

/// Starts to write the metrics. `place` is held until they are written.
pub(super) fn body(metrics: Arc<Metrics>, format: Format, place: Option<OwnedSemaphorePermit>) -> Body {
    let (sender, receiver) = mpsc::channel(PIECES);
    let runtime = Handle::current();
    let deadline = Instant::now() + TIME_LIMIT;
    tokio::task::spawn_blocking(move || {
        let send = |piece| {
            let sent = timeout_at(deadline.into(), sender.send(piece));
            runtime.block_on(async { matches!(sent.await, Ok(Ok(()))) })
        };
        let written = metrics.encode(format, |piece| send(Piece::Text(piece)));
        if written.is_ok() {
            send(Piece::End);
        }
        drop(place);
    });
    Body::new(Pieces(receiver))
}

enum Piece {
    Text(Bytes),
    /// Without it, the text broke off.
    End,
}

struct Pieces(mpsc::Receiver<Piece>);

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(match ready!(self.0.poll_recv(context)) {
            Some(Piece::Text(text)) => Some(Ok(Frame::data(text))),
            Some(Piece::End) => None,
            None => Some(Err(io::Error::other("the metrics could not be written to their end"))),
        })
    }
}
