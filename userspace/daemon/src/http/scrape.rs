//! The body of `/metrics`: written by a thread that may block, handed to the client piece by piece.

use std::{sync::Arc, time::Instant};

use axum::body::Body;
use numaward_telemetry::metrics::{Format, Metrics};
use tokio::{runtime::Handle, sync::OwnedSemaphorePermit, time::timeout_at};

use super::{
    TIME_LIMIT,
    pieces::{self, Piece},
};

/// Starts to write the metrics. `place` is held until they are written.
pub(super) fn body(metrics: Arc<Metrics>, format: Format, place: Option<OwnedSemaphorePermit>) -> Body {
    let (sender, body) = pieces::body();
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
    body
}
