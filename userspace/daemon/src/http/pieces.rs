//! A body that somebody else writes, handed to the client piece by piece.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use axum::body::{Body, Bytes};
use http_body::Frame;
use tokio::sync::mpsc;

/// Pieces that wait for a slow client, at most.
const WAITING: usize = 4;

/// A part of a body.
pub(super) enum Piece {
    Text(Bytes),
    /// Without it, the text broke off, and the client is told so.
    End,
}

/// A body, and where to put its pieces.
pub(super) fn body() -> (mpsc::Sender<Piece>, Body) {
    let (sender, receiver) = mpsc::channel(WAITING);
    (sender, Body::new(Pieces(receiver)))
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
            None => Some(Err(io::Error::other("what was to be said could not be said to its end"))),
        })
    }
}
