//! Feed of the daemon's data, live.
//!
//! One task keeps a stream of server-sent events open. If the stream is lost or silent, the task opens it again, with
//! growing pauses. Two other tasks fetch data that the stream does not contain: the allocations whenever they change,
//! and the status periodically.

use std::{convert::Infallible, sync::Arc, time::Duration};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use numaward_api::{Allocations, Event, EventPage, Sample, Status, Topology, Trends, Version};
use serde::Deserialize;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_util::{
    bytes::BytesMut,
    codec::{AnyDelimiterCodec, Decoder},
};

use crate::client::{ClientError, MAX_ANSWER_BYTES, Server};

/// Time after which a silent stream is given up. Samples come each second.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(20);
const MIN_RETRY_PAUSE: Duration = Duration::from_millis(500);
const MAX_RETRY_PAUSE: Duration = Duration::from_secs(8);
/// Time between two requests for the status.
const STATUS_INTERVAL: Duration = Duration::from_secs(5);

/// An update of the daemon's data, or the loss of the connection.
#[derive(Debug)]
pub(crate) enum FeedUpdate {
    /// A connection was made; the next sample is complete.
    Connected(Box<FeedHost>),
    /// A sample of nodes and workloads.
    Sample(Box<Sample>),
    /// An event.
    Event(Box<Event>),
    /// Number of events that were missed because they came faster than they were read.
    Missed(u64),
    /// The guarantees, or the reason why they are not known.
    Allocations(Result<Box<Allocations>, String>),
    /// The daemon's status, or the reason why it is not known.
    Status(Result<Box<Status>, String>),
    /// The connection was lost.
    Lost {
        /// Reason of the loss.
        reason: String,
        /// Time until the next attempt.
        retry_in: Duration,
    },
}

/// Data that rarely changes, and the events so far.
#[derive(Debug)]
pub(crate) struct FeedHost {
    pub(crate) topology: Topology,
    pub(crate) version: Version,
    pub(crate) events: Vec<Event>,
    /// History of the workloads in the last ten minutes; absent if the daemon keeps none.
    pub(crate) past: Option<Trends>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum FeedError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the daemon's stream broke off: {0}")]
    Broken(#[from] hyper::Error),
    #[error("the daemon ended its stream")]
    Ended,
    #[error("the daemon sent nothing for {} seconds", SILENCE_TIMEOUT.as_secs())]
    Silent,
    #[error("the daemon sent a message of more than {} MiB", MAX_ANSWER_BYTES >> 20)]
    TooLarge,
    #[error("the daemon sent a message that is not one of numaward: {0}; is it of another version?")]
    Malformed(#[from] serde_json::Error),
    /// The receiver of the updates has ended.
    #[error("the receiver of the updates has ended")]
    ReceiverClosed,
}

/// Fetches the data that rarely changes. Fails if no daemon is reachable.
pub(crate) async fn connect(server: &Server) -> Result<FeedHost, ClientError> {
    let topology = server.get("/api/v1/topology").await?;
    let version = server.get("/api/v1/version").await?;
    let events: EventPage = server.get("/api/v1/events").await?;
    let past = server.get("/api/v1/history/workloads").await.ok();
    Ok(FeedHost { topology, version, events: events.events, past })
}

/// Sends updates until the receiver is closed. The first connection was made by [`connect`].
pub(crate) async fn follow(server: Arc<Server>, host: FeedHost, updates: mpsc::Sender<FeedUpdate>) {
    let mut pause = MIN_RETRY_PAUSE;
    let mut connected = Ok(host);
    loop {
        let ended = match connected {
            Ok(host) => {
                let Err(error) = run_session(&server, host, &updates, &mut pause).await;
                error
            }
            Err(error) => FeedError::Client(error),
        };
        let lost = FeedUpdate::Lost { reason: ended.to_string(), retry_in: pause };
        if matches!(ended, FeedError::ReceiverClosed) || updates.send(lost).await.is_err() {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(MAX_RETRY_PAUSE);
        connected = connect(&server).await;
    }
}

/// Sends the updates of one connection. The first sample resets the pause before the next attempt.
async fn run_session(
    server: &Arc<Server>,
    host: FeedHost,
    updates: &mpsc::Sender<FeedUpdate>,
    pause: &mut Duration,
) -> Result<Infallible, FeedError> {
    let last = host.events.last().map_or(0, |event| event.id);
    let mut stream = EventStream::open(server, &format!("/api/v1/stream?samples=true&since={last}")).await?;
    let send = async |update| updates.send(update).await.map_err(|_| FeedError::ReceiverClosed);
    send(FeedUpdate::Connected(Box::new(host))).await?;
    let (revision, changes) = watch::channel(None);
    // Both tasks end with the session.
    let mut fetchers = JoinSet::new();
    fetchers.spawn(fetch_allocations(server.clone(), changes, updates.clone()));
    fetchers.spawn(fetch_status(server.clone(), updates.clone()));
    loop {
        let message = stream.next().await?;
        match message.kind.as_str() {
            "sample" => {
                let sample: Sample = serde_json::from_str(&message.data)?;
                *pause = MIN_RETRY_PAUSE;
                revision.send_if_modified(|known| {
                    known.replace(sample.guarantee_revision) != Some(sample.guarantee_revision)
                });
                send(FeedUpdate::Sample(Box::new(sample))).await?;
            }
            "missed" => {
                let MissedEvents { missed } = serde_json::from_str(&message.data)?;
                send(FeedUpdate::Missed(missed)).await?;
            }
            "message" => send(FeedUpdate::Event(serde_json::from_str(&message.data)?)).await?,
            // A kind of message of a newer daemon.
            _ => {}
        }
    }
}

#[derive(Deserialize)]
pub(crate) struct MissedEvents {
    pub(crate) missed: u64,
}

/// A stream of server-sent events.
pub(crate) struct EventStream {
    body: Incoming,
    messages: MessageParser,
}

impl EventStream {
    /// Opens the stream at a path.
    pub(crate) async fn open(server: &Server, path: &str) -> Result<Self, ClientError> {
        Ok(Self { body: server.open(path).await?, messages: MessageParser::new(MAX_ANSWER_BYTES) })
    }

    /// Waits for the next message.
    pub(crate) async fn next(&mut self) -> Result<StreamMessage, FeedError> {
        loop {
            if let Some(message) = self.messages.next() {
                return Ok(message);
            }
            self.messages.push(&read_chunk(&mut self.body).await?)?;
        }
    }
}

async fn read_chunk(body: &mut Incoming) -> Result<hyper::body::Bytes, FeedError> {
    loop {
        let frame = timeout(SILENCE_TIMEOUT, body.frame()).await.map_err(|_| FeedError::Silent)?;
        if let Ok(data) = frame.ok_or(FeedError::Ended)??.into_data() {
            return Ok(data);
        }
    }
}

async fn fetch_allocations(
    server: Arc<Server>,
    mut changes: watch::Receiver<Option<u64>>,
    updates: mpsc::Sender<FeedUpdate>,
) {
    while changes.changed().await.is_ok() {
        let answer = server.get("/api/v1/allocations").await.map_err(|error| error.to_string());
        if updates.send(FeedUpdate::Allocations(answer)).await.is_err() {
            return;
        }
    }
}

async fn fetch_status(server: Arc<Server>, updates: mpsc::Sender<FeedUpdate>) {
    loop {
        let answer = server.get("/api/v1/status").await.map_err(|error| error.to_string());
        if updates.send(FeedUpdate::Status(answer)).await.is_err() {
            return;
        }
        sleep(STATUS_INTERVAL).await;
    }
}

/// A server-sent event.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StreamMessage {
    pub(crate) kind: String,
    pub(crate) data: String,
}

/// Splits a stream into its messages
/// (<https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation>).
struct MessageParser {
    /// Maximum size of a message.
    limit: usize,
    lines: AnyDelimiterCodec,
    bytes: BytesMut,
    kind: String,
    data: String,
}

impl MessageParser {
    fn new(limit: usize) -> Self {
        let lines = AnyDelimiterCodec::new(b"\n".to_vec(), Vec::new());
        Self { limit, lines, bytes: BytesMut::new(), kind: String::new(), data: String::new() }
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), FeedError> {
        if self.bytes.len() + self.data.len() + bytes.len() > self.limit {
            return Err(FeedError::TooLarge);
        }
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    fn next(&mut self) -> Option<StreamMessage> {
        while let Ok(Some(line)) = self.lines.decode(&mut self.bytes) {
            let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(&line));
            if line.is_empty() {
                let kind = std::mem::take(&mut self.kind);
                let mut data = std::mem::take(&mut self.data);
                // Comments alone are no message.
                if data.pop().is_some() {
                    return Some(StreamMessage {
                        kind: if kind.is_empty() { "message".to_owned() } else { kind },
                        data,
                    });
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => value.clone_into(&mut self.kind),
                "data" => {
                    self.data.push_str(value);
                    self.data.push('\n');
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&str]) -> Vec<(String, String)> {
        let mut messages = MessageParser::new(100);
        let mut found = Vec::new();
        for piece in pieces {
            messages.push(piece.as_bytes()).unwrap();
            while let Some(StreamMessage { kind, data }) = messages.next() {
                found.push((kind, data));
            }
        }
        found
    }

    #[test]
    fn splits_stream_at_any_chunk_boundary() {
        let text = ": hello\n\nevent: sample\ndata: {\"a\":\ndata: 1}\n\nid: 7\ndata:x\r\n\r\nevent: lonely\n\n:\n\ndata: ä\n\n";
        let expected = [("sample", "{\"a\":\n1}"), ("message", "x"), ("message", "ä")];
        let expected = expected.map(|(kind, data)| (kind.to_owned(), data.to_owned()));
        assert_eq!(read(&[text]), expected);
        for at in text.char_indices().map(|(at, _)| at) {
            assert_eq!(read(&[&text[..at], &text[at..]]), expected, "{at}");
        }
        let single: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(read(&single.iter().map(String::as_str).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn refuses_endless_message() {
        let mut messages = MessageParser::new(100);
        let mut pushed = 0;
        let error = std::iter::repeat_with(|| {
            let refused = messages.push(b"data: 12345\n").err();
            let _ = messages.next();
            pushed += 1;
            refused
        });
        let error = error.take(100).flatten().next();
        assert!((8..20).contains(&pushed), "{pushed}");
        assert!(matches!(error, Some(FeedError::TooLarge)), "{error:?}");
    }
}
