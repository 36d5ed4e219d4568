//! A connection whose client has to read.
//!
//! Problem: a client that asks and does not read holds its connection and its response for ever: the server's timers
//! look at requests only.
//!
//! Algorithm: from the moment at which the kernel takes no more, the client has a time limit to make room for
//! [`MIN_TAKEN`] bytes, or for all there is. Then the connection fails.

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

use crate::{limits::MIN_TAKEN, peers::Place};

/// The connection.
#[derive(Debug)]
pub(crate) struct Paced<S> {
    stream: S,
    place: Arc<Place>,
    limit: Duration,
    stall: Option<Stall>,
}

/// What the client has to take until when.
#[derive(Debug)]
struct Stall {
    ends: Pin<Box<Sleep>>,
    left: usize,
}

impl<S> Paced<S> {
    pub(crate) fn new(stream: S, place: Arc<Place>, limit: Duration) -> Self {
        Self { stream, place, limit, stall: None }
    }

    /// What becomes of an attempt to write `wanted` bytes.
    fn judge(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        wanted: usize,
    ) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Ok(bytes)) => {
                self.place.took(bytes);
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

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.judge(context, written, bytes.len())
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, pieces);
        this.judge(context, written, pieces.iter().map(|piece| piece.len()).sum())
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let flushed = Pin::new(&mut this.stream).poll_flush(context).map_ok(|()| 0);
        this.judge(context, flushed, 0).map_ok(|_| ())
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let closed = Pin::new(&mut this.stream).poll_shutdown(context).map_ok(|()| 0);
        this.judge(context, closed, 0).map_ok(|_| ())
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

    const LIMIT: Duration = Duration::from_secs(30);

    fn pair() -> (Paced<DuplexStream>, DuplexStream) {
        let (server, client) = duplex(4096);
        let place = Peers::new(Limits::USUAL).enter(None).unwrap();
        (Paced::new(server, place, LIMIT), client)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_given_up_and_one_that_reads_slowly_is_not() {
        // Bytes that it reads in each second, and whether that is enough.
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
                assert!(start.elapsed() > LIMIT * 5, "{pace}");
            } else {
                assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut, "{pace}");
                assert_eq!(start.elapsed(), LIMIT, "{pace}");
            }
            // The client's time, all but that in which the connection takes what there is.
            let stalled = place.stalled();
            assert!(
                stalled <= start.elapsed() && stalled + Duration::from_secs(2) > start.elapsed(),
                "{stalled:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_has_read_all_may_be_silent() {
        let (mut server, mut client) = pair();
        for _ in 0..5 {
            let (written, read) = tokio::join!(server.write_all(&[0; 8192]), async {
                let mut buffer = [0; 8192];
                sleep(LIMIT / 2).await;
                client.read_exact(&mut buffer).await
            });
            written.unwrap();
            read.unwrap();
            sleep(LIMIT * 2).await;
        }
    }
}
