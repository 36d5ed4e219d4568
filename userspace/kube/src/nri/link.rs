//! A stream to the runtime as a pair of services: calls that go out, and answers to those that come in.
//!
//! One task owns the writing half and takes whole messages from a queue, so that an answer that is cut short
//! by cancellation never leaves half a frame behind. A sender learns when its message was handed to the
//! kernel: an answer counts only then.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt as _},
    sync::{mpsc, oneshot},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use super::{
    messages::{Request, Response},
    wire::{self, Connection, Message, TooLong},
};

/// Messages that wait to be written.
const QUEUE: usize = 64;

/// A call of the runtime's services failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The stream was closed before the answer came.
    #[error("the connection was closed before the answer came")]
    Closed,
    /// No answer came in time.
    #[error("there was no answer within {0:?}")]
    Timeout(Duration),
    /// The runtime answered with an error.
    #[error("the runtime refused: {message} (code {code})")]
    Status {
        /// Code of `google.rpc.Code`.
        code: i32,
        /// The runtime's words.
        message: String,
    },
    /// The answer could not be read.
    #[error("the answer could not be read: {0}")]
    Unreadable(#[from] prost::DecodeError),
    /// The call is too long to be sent.
    #[error(transparent)]
    TooLong(#[from] TooLong),
}

#[derive(Debug)]
struct Outgoing {
    bytes: Vec<u8>,
    written: oneshot::Sender<()>,
}

/// Makes a message into the frames that carry it.
pub(crate) type Encode = fn(Connection, &Message) -> Result<Vec<u8>, TooLong>;

/// Sends messages on one stream, and matches answers to calls.
#[derive(Debug)]
pub(crate) struct Link {
    queue: mpsc::Sender<Outgoing>,
    calls: Mutex<Calls>,
    /// The connection that our calls go out on.
    outbound: Connection,
    encode: Encode,
    /// Cancelled when the stream is of no more use.
    pub(crate) closed: CancellationToken,
}

#[derive(Debug)]
struct Calls {
    next: u32,
    waiting: HashMap<u32, oneshot::Sender<Vec<u8>>>,
}

impl Link {
    /// A link, and the future that writes its messages to `writer` until the link is closed.
    pub(crate) fn new<W: AsyncWrite + Unpin>(
        outbound: Connection,
        encode: Encode,
        writer: W,
    ) -> (Self, impl Future<Output = std::io::Result<()>>) {
        let (queue, messages) = mpsc::channel(QUEUE);
        // Streams that a client opens have odd numbers.
        let calls = Mutex::new(Calls { next: 1, waiting: HashMap::new() });
        let link = Self { queue, calls, outbound, encode, closed: CancellationToken::new() };
        (link, write(writer, messages))
    }

    /// Ends all calls that wait.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        self.calls.lock().waiting.clear();
    }

    /// Sends bytes as they are; returns when they were written.
    pub(crate) async fn send(&self, bytes: Vec<u8>) -> Result<(), CallError> {
        let (written, done) = oneshot::channel();
        let sending = async {
            self.queue.send(Outgoing { bytes, written }).await.map_err(|_| CallError::Closed)?;
            done.await.map_err(|_| CallError::Closed)
        };
        tokio::select! {
            biased;
            result = sending => result,
            () = self.closed.cancelled() => Err(CallError::Closed),
        }
    }

    /// Answers a call that came in; returns when the answer was written.
    pub(crate) async fn answer(
        &self,
        inbound: Connection,
        stream: u32,
        response: &Response,
    ) -> Result<(), CallError> {
        let message = Message { stream, kind: wire::RESPONSE, payload: response.encode_to_vec() };
        let bytes = (self.encode)(inbound, &message).or_else(|too_long| {
            let response = super::status(Code::ResourceExhausted, &too_long.to_string());
            (self.encode)(inbound, &Message { payload: response.encode_to_vec(), ..message })
        });
        self.send(bytes?).await
    }

    /// Calls the other side.
    pub(crate) async fn call<Q: prost::Message, P: prost::Message + Default>(
        &self,
        service: &str,
        method: &str,
        request: &Q,
        timeout: Duration,
    ) -> Result<P, CallError> {
        let answer = self.call_encoded(service, method, request.encode_to_vec(), timeout).await?;
        Ok(P::decode(&*answer)?)
    }

    /// Calls the other side with a message that is encoded already, and returns one that still is.
    pub(crate) async fn call_encoded(
        &self,
        service: &str,
        method: &str,
        payload: Vec<u8>,
        timeout: Duration,
    ) -> Result<Vec<u8>, CallError> {
        let deadline = Instant::now() + timeout;
        let request = Request {
            service: service.to_owned(),
            method: method.to_owned(),
            payload,
            timeout_nano: i64::try_from(timeout.as_nanos()).unwrap_or(i64::MAX),
        };
        let (answer, answered) = oneshot::channel();
        let waiting = self.enter(answer);
        let message =
            Message { stream: waiting.stream, kind: wire::REQUEST, payload: request.encode_to_vec() };
        let bytes = (self.encode)(self.outbound, &message)?;
        let exchange = async {
            self.send(bytes).await?;
            answered.await.map_err(|_| CallError::Closed)
        };
        let answer =
            tokio::time::timeout_at(deadline, exchange).await.map_err(|_| CallError::Timeout(timeout))??;
        let response = Response::decode(&*answer)?;
        match response.status {
            Some(status) if status.code != Code::Ok as i32 => {
                Err(CallError::Status { code: status.code, message: status.message })
            }
            _ => Ok(response.payload),
        }
    }

    /// How many calls wait for their answer.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.calls.lock().waiting.len()
    }

    fn enter(&self, answer: oneshot::Sender<Vec<u8>>) -> Waiting<'_> {
        let mut calls = self.calls.lock();
        let stream = calls.next;
        // Odd numbers stay odd when they wrap, after two thousand million calls.
        calls.next = stream.wrapping_add(2);
        if !self.closed.is_cancelled() {
            calls.waiting.insert(stream, answer);
        }
        Waiting { link: self, stream }
    }

    /// Hands an answer to the call that waits for it; late and unknown ones are dropped.
    pub(crate) fn answered(&self, message: Message) {
        match self.calls.lock().waiting.remove(&message.stream) {
            Some(call) if message.kind == wire::RESPONSE => drop(call.send(message.payload)),
            _ => {
                tracing::debug!(stream = message.stream, kind = message.kind, "an answer that nobody awaits");
            }
        }
    }
}

/// A call that waits. It stops to when dropped, so that calls given up do not pile up.
struct Waiting<'a> {
    link: &'a Link,
    stream: u32,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.link.calls.lock().waiting.remove(&self.stream);
    }
}

async fn write<W: AsyncWrite + Unpin>(
    mut writer: W,
    mut messages: mpsc::Receiver<Outgoing>,
) -> std::io::Result<()> {
    while let Some(message) = messages.recv().await {
        writer.write_all(&message.bytes).await?;
        writer.flush().await?;
        // Nobody listens any more where the sender gave up.
        let _ = message.written.send(());
    }
    Ok(())
}
