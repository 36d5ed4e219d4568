//! A connection with a minimum read rate of its client.
//!
//! # Problem
//! A client that sends a request and does not read the response would hold its connection and the response for ever:
//! the server's timers apply to requests only.
//!
//! # Algorithm
//! When the kernel's send buffer is full, the client has a time limit in which to read [`MIN_TAKEN`] bytes, or all
//! pending bytes if they are fewer. Otherwise the connection fails.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

use crate::{limits::MIN_TAKEN, peers::ConnectionPlace};

/// A stream with a minimum pace of the client's reads.
#[derive(Debug)]
pub(crate) struct PacedStream<S> {
    stream: S,
    place: Arc<ConnectionPlace>,
    limit: Duration,
    stall: Option<Stall>,
}

/// A period in which the client does not read fast enough.
#[derive(Debug)]
struct Stall {
    /// The time limit.
    ends: Pin<Box<Sleep>>,
    /// Number of bytes that the client has to read until then.
    left: usize,
}

impl<S> PacedStream<S> {
    pub(crate) fn new(stream: S, place: Arc<ConnectionPlace>, limit: Duration) -> Self {
        Self { stream, place, limit, stall: None }
    }

    /// Updates the stall after an attempt to write `wanted` bytes. Turns a pending write into an error when the time limit has passed.
    fn check_pace(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        wanted: usize,
    ) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Ok(bytes)) => {
                self.place.release_unread(bytes);
                self.place.note_stall(false);
                self.stall = self.stall.take().filter(|_| bytes < wanted).and_then(|stall| {
                    let left = stall.left.checked_sub(bytes).filter(|left| *left > 0)?;
                    Some(Stall { left, ..stall })
                });
                Poll::Ready(Ok(bytes))
            }
            Poll::Pending => {
                self.place.note_stall(true);
                let start = || Stall { ends: Box::pin(sleep(self.limit)), left: MIN_TAKEN };
                let stall = self.stall.get_or_insert_with(start);
                ready!(stall.ends.as_mut().poll(context));
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
            }
            failed @ Poll::Ready(_) => failed,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PacedStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PacedStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.check_pace(context, written, bytes.len())
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, pieces);
        this.check_pace(context, written, pieces.iter().map(|piece| piece.len()).sum())
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(context).map_ok(|()| 0);
        // hyper flushes the stream once its own buffer is empty.
        this.check_pace(context, flushed, 0).map_ok(|_| this.place.note_flush())
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let closed = Pin::new(&mut this.stream).poll_shutdown(context).map_ok(|()| 0);
        this.check_pace(context, closed, 0).map_ok(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        time::Instant,
    };

    use super::*;
    use crate::{limits::Limits, peers::Peers};

    const STALL_LIMIT: Duration = Duration::from_secs(30);

    fn pair() -> (PacedStream<DuplexStream>, DuplexStream) {
        let (server, client) = duplex(4096);
        let place = Peers::new(Limits::DEFAULT).enter(None).unwrap();
        (PacedStream::new(server, place, STALL_LIMIT), client)
    }

    #[tokio::test(start_paused = true)]
    async fn fails_only_below_minimum_pace() {
        // The bytes that the client reads in each second, and whether that is fast enough.
        for (pace, is_enough) in [(0, false), (1024, false), (4096, true)] {
            let (mut server, mut client) = pair();
            let place = server.place.clone();
            tokio::spawn(async move {
                let mut buffer = vec![0; pace];
                loop {
                    sleep(Duration::from_secs(1)).await;
                    if pace > 0 && client.read_exact(&mut buffer).await.is_err() {
                        return;
                    }
                }
            });
            let start = Instant::now();
            let written = server.write_all(&vec![0; 1 << 20]).await;
            if is_enough {
                written.unwrap();
                assert!(start.elapsed() > STALL_LIMIT * 5, "{pace}");
            } else {
                assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut, "{pace}");
                assert_eq!(start.elapsed(), STALL_LIMIT, "{pace}");
            }
            // Nearly all of the time is stalled: the server waits for the client.
            let stalled = place.stalled();
            assert!(
                stalled <= start.elapsed() && stalled + Duration::from_secs(2) > start.elapsed(),
                "{stalled:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_client_stays_connected() {
        let (mut server, mut client) = pair();
        for _ in 0..5 {
            let (written, read) = tokio::join!(server.write_all(&[0; 8192]), async {
                let mut buffer = [0; 8192];
                sleep(STALL_LIMIT / 2).await;
                client.read_exact(&mut buffer).await
            });
            written.unwrap();
            read.unwrap();
            sleep(STALL_LIMIT * 2).await;
        }
    }
}
