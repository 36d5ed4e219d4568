//! Calls to the runtime and answers to its calls, over one stream.
//!
//! One task owns the writing half of the stream and takes whole messages from a queue, so a cancelled sender never leaves an
//! incomplete frame. A sender is notified when its message has been passed to the kernel; only then does an answer count as sent.

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
    messages::{TtrpcRequest, TtrpcResponse},
    wire::{self, Connection, Message, TooLong},
};

/// Maximum number of messages that are queued for writing.
const MAX_QUEUED: usize = 64;

/// Error of a call to the runtime.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The stream was closed before the answer arrived.
    #[error("the connection was closed before the answer arrived")]
    Closed,
    /// No answer arrived in time.
    #[error("there was no answer within {0:?}")]
    Timeout(Duration),
    /// The runtime answered with an error.
    #[error("the runtime refused: {message} (code {code})")]
    Status {
        /// Code of `google.rpc.Code`.
        code: i32,
        /// Message of the runtime.
        message: String,
    },
    /// The answer could not be decoded.
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

/// Encodes a message as frames of a connection.
pub(crate) type Encode = fn(Connection, &Message) -> Result<Vec<u8>, TooLong>;

/// Sender of messages on one stream, which also matches answers to calls.
#[derive(Debug)]
pub(crate) struct Link {
    queue: mpsc::Sender<Outgoing>,
    calls: Mutex<Calls>,
    /// Connection of outgoing calls.
    outbound: Connection,
    encode: Encode,
    /// Cancelled when the link is closed.
    pub(crate) closed: CancellationToken,
}

#[derive(Debug)]
struct Calls {
    next: u32,
    pending: HashMap<u32, oneshot::Sender<Vec<u8>>>,
}

impl Link {
    /// Creates a link, and the future that writes its messages to `writer` until the link is dropped or writing fails.
    pub(crate) fn new<W: AsyncWrite + Unpin>(
        outbound: Connection,
        encode: Encode,
        writer: W,
    ) -> (Self, impl Future<Output = std::io::Result<()>>) {
        let (queue, messages) = mpsc::channel(MAX_QUEUED);
        // In ttrpc, the streams that a client opens have odd numbers.
        let calls = Mutex::new(Calls { next: 1, pending: HashMap::new() });
        let link = Self { queue, calls, outbound, encode, closed: CancellationToken::new() };
        (link, write(writer, messages))
    }

    /// Closes the link. All pending calls fail with [`CallError::Closed`].
    pub(crate) fn close(&self) {
        self.closed.cancel();
        self.calls.lock().pending.clear();
    }

    /// Sends unchanged bytes, and returns when they have been written.
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

    /// Answers a call, and returns when the answer has been written. An answer that is too long is replaced by an error.
    pub(crate) async fn answer(
        &self,
        inbound: Connection,
        stream: u32,
        response: &TtrpcResponse,
    ) -> Result<(), CallError> {
        let message = Message { stream, kind: wire::RESPONSE, payload: response.encode_to_vec() };
        let bytes = (self.encode)(inbound, &message).or_else(|too_long| {
            let response = super::status(Code::ResourceExhausted, &too_long.to_string());
            (self.encode)(inbound, &Message { payload: response.encode_to_vec(), ..message })
        });
        self.send(bytes?).await
    }

    /// Calls a method of the peer.
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

    /// Calls a method of the peer with an encoded request, and returns the encoded answer.
    pub(crate) async fn call_encoded(
        &self,
        service: &str,
        method: &str,
        payload: Vec<u8>,
        timeout: Duration,
    ) -> Result<Vec<u8>, CallError> {
        let deadline = Instant::now() + timeout;
        let request = TtrpcRequest {
            service: service.to_owned(),
            method: method.to_owned(),
            payload,
            timeout_nano: i64::try_from(timeout.as_nanos()).unwrap_or(i64::MAX),
        };
        let (answer, answered) = oneshot::channel();
        let pending = self.register(answer);
        let message =
            Message { stream: pending.stream, kind: wire::REQUEST, payload: request.encode_to_vec() };
        let bytes = (self.encode)(self.outbound, &message)?;
        let exchange = async {
            self.send(bytes).await?;
            answered.await.map_err(|_| CallError::Closed)
        };
        let answer =
            tokio::time::timeout_at(deadline, exchange).await.map_err(|_| CallError::Timeout(timeout))??;
        let response = TtrpcResponse::decode(&*answer)?;
        match response.status {
            Some(status) if status.code != Code::Ok as i32 => {
                Err(CallError::Status { code: status.code, message: status.message })
            }
            _ => Ok(response.payload),
        }
    }

    /// Returns the number of calls without an answer.
    #[cfg(test)]
    pub(crate) fn pending(&self) -> usize {
        self.calls.lock().pending.len()
    }

    fn register(&self, answer: oneshot::Sender<Vec<u8>>) -> PendingCall<'_> {
        let mut calls = self.calls.lock();
        let stream = calls.next;
        // Odd numbers stay odd when they wrap, after 2^31 calls.
        calls.next = stream.wrapping_add(2);
        if !self.closed.is_cancelled() {
            calls.pending.insert(stream, answer);
        }
        PendingCall { link: self, stream }
    }

    /// Passes an answer to its pending call. An answer without a pending call is dropped.
    pub(crate) fn answered(&self, message: Message) {
        match self.calls.lock().pending.remove(&message.stream) {
            Some(call) if message.kind == wire::RESPONSE => drop(call.send(message.payload)),
            _ => {
                tracing::debug!(
                    stream = message.stream,
                    kind = message.kind,
                    "an answer without a pending call is ignored"
                );
            }
        }
    }
}

/// A call without an answer. Its entry is removed when it is dropped, so that entries of cancelled calls do not accumulate.
struct PendingCall<'a> {
    link: &'a Link,
    stream: u32,
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        self.link.calls.lock().pending.remove(&self.stream);
    }
}

async fn write<W: AsyncWrite + Unpin>(
    mut writer: W,
    mut messages: mpsc::Receiver<Outgoing>,
) -> std::io::Result<()> {
    while let Some(message) = messages.recv().await {
        writer.write_all(&message.bytes).await?;
        writer.flush().await?;
        // Fails if the sender was cancelled.
        let _ = message.written.send(());
    }
    Ok(())
}
