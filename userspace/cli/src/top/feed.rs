//! What a daemon sends to those who watch, as it comes.
//!
//! One task keeps a stream of server-sent events open and makes it again, less and less often, when it is lost or
//! silent. Beside it, what the stream only announces is asked for: allocations when they changed, the status now and then.

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

use crate::client::{ClientError, MAX_BYTES, Server};

/// Samples come each second; a stream that says nothing for so long is given up.
const SILENCE: Duration = Duration::from_secs(20);
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// Time between two questions for the status.
const STATUS: Duration = Duration::from_secs(5);

/// Something that the daemon sent, or that it sends nothing.
#[derive(Debug)]
pub(crate) enum Update {
    /// A connection was made; the next sample is complete.
    Connected(Box<Host>),
    /// What is seen now.
    Sample(Box<Sample>),
    /// Something happened.
    Event(Box<Event>),
    /// So many events came faster than they were read.
    Missed(u64),
    /// What is promised, or why that is not known.
    Allocations(Result<Box<Allocations>, String>),
    /// How the daemon is doing, or why that is not known.
    Status(Result<Box<Status>, String>),
    /// The connection is gone; it will be tried again.
    Lost {
        /// Why.
        reason: String,
        /// In how long.
        again: Duration,
    },
}

/// What seldom changes, and what happened before.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) topology: Topology,
    pub(crate) version: Version,
    pub(crate) events: Vec<Event>,
    /// The last ten minutes of the workloads; absent where the daemon keeps none.
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
    #[error("the daemon said nothing for {} seconds", SILENCE.as_secs())]
    Silent,
    #[error("the daemon sent a message of more than {} MiB", MAX_BYTES >> 20)]
    TooLarge,
    #[error("the daemon sent what is not numaward's: {0}; is it of another version?")]
    Malformed(#[from] serde_json::Error),
    /// Nobody listens to the updates any more.
    #[error("nobody watches")]
    Unwatched,
}

/// Asks for what seldom changes: whether there is a daemon is known then.
pub(crate) async fn connect(server: &Server) -> Result<Host, ClientError> {
    let topology = server.get("/api/v1/topology").await?;
    let version = server.get("/api/v1/version").await?;
    let events: EventPage = server.get("/api/v1/events").await?;
    let past = server.get("/api/v1/history/workloads").await.ok();
    Ok(Host { topology, version, events: events.events, past })
}

/// Sends updates until nobody receives them. The first connection was made by [`connect`].
pub(crate) async fn follow(server: Arc<Server>, host: Host, updates: mpsc::Sender<Update>) {
    let mut pause = SHORTEST_PAUSE;
    let mut connected = Ok(host);
    loop {
        let ended = match connected {
            Ok(host) => {
                let Err(error) = session(&server, host, &updates, &mut pause).await;
                error
            }
            Err(error) => FeedError::Client(error),
        };
        let lost = Update::Lost { reason: ended.to_string(), again: pause };
        if matches!(ended, FeedError::Unwatched) || updates.send(lost).await.is_err() {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        connected = connect(&server).await;
    }
}

/// Sends what one connection brings. With the first sample, the next pause is a short one again.
async fn session(
    server: &Arc<Server>,
    host: Host,
    updates: &mpsc::Sender<Update>,
    pause: &mut Duration,
) -> Result<Infallible, FeedError> {
    let last = host.events.last().map_or(0, |event| event.id);
    let mut stream = Stream::open(server, &format!("/api/v1/stream?samples=true&since={last}")).await?;
    let send = async |update| updates.send(update).await.map_err(|_| FeedError::Unwatched);
    send(Update::Connected(Box::new(host))).await?;
    let (revision, changes) = watch::channel(None);
    // Both end with the session.
    let mut beside = JoinSet::new();
    beside.spawn(fetch_allocations(server.clone(), changes, updates.clone()));
    beside.spawn(fetch_status(server.clone(), updates.clone()));
    loop {
        let message = stream.next().await?;
        match message.kind.as_str() {
            "sample" => {
                let sample: Sample = serde_json::from_str(&message.data)?;
                *pause = SHORTEST_PAUSE;
                revision.send_if_modified(|known| known.replace(sample.promises) != Some(sample.promises));
                send(Update::Sample(Box::new(sample))).await?;
            }
            "missed" => {
                let Missed { missed } = serde_json::from_str(&message.data)?;
                send(Update::Missed(missed)).await?;
            }
            "message" => send(Update::Event(serde_json::from_str(&message.data)?)).await?,
            // Of a newer daemon.
            _ => {}
        }
    }
}

#[derive(Deserialize)]
pub(crate) struct Missed {
    pub(crate) missed: u64,
}

/// A stream that the daemon holds open, message by message.
pub(crate) struct Stream {
    body: Incoming,
    messages: Messages,
}

impl Stream {
    /// Opens the one at a path.
    pub(crate) async fn open(server: &Server, path: &str) -> Result<Self, ClientError> {
        Ok(Self { body: server.open(path).await?, messages: Messages::new(MAX_BYTES) })
    }

    /// Waits for the next message.
    pub(crate) async fn next(&mut self) -> Result<Message, FeedError> {
        loop {
            if let Some(message) = self.messages.next() {
                return Ok(message);
            }
            self.messages.push(&more(&mut self.body).await?)?;
        }
    }
}

async fn more(body: &mut Incoming) -> Result<hyper::body::Bytes, FeedError> {
    loop {
        let frame = timeout(SILENCE, body.frame()).await.map_err(|_| FeedError::Silent)?;
        if let Ok(data) = frame.ok_or(FeedError::Ended)??.into_data() {
            return Ok(data);
        }
    }
}

async fn fetch_allocations(
    server: Arc<Server>,
    mut changes: watch::Receiver<Option<u64>>,
    updates: mpsc::Sender<Update>,
) {
    while changes.changed().await.is_ok() {
        let answer = server.get("/api/v1/allocations").await.map_err(|error| error.to_string());
        if updates.send(Update::Allocations(answer)).await.is_err() {
            return;
        }
    }
}

async fn fetch_status(server: Arc<Server>, updates: mpsc::Sender<Update>) {
    loop {
        let answer = server.get("/api/v1/status").await.map_err(|error| error.to_string());
        if updates.send(Update::Status(answer)).await.is_err() {
            return;
        }
        sleep(STATUS).await;
    }
}

/// A message of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) kind: String,
    pub(crate) data: String,
}

/// Cuts a stream into its messages
/// (<https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation>).
struct Messages {
    /// The most that a message may take.
    limit: usize,
    lines: AnyDelimiterCodec,
    bytes: BytesMut,
    kind: String,
    data: String,
}

impl Messages {
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

    fn next(&mut self) -> Option<Message> {
        while let Ok(Some(line)) = self.lines.decode(&mut self.bytes) {
            let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(&line));
            if line.is_empty() {
                let kind = std::mem::take(&mut self.kind);
                let mut data = std::mem::take(&mut self.data);
                // Comments alone make no message.
                if data.pop().is_some() {
                    return Some(Message {
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
        let mut messages = Messages::new(100);
        let mut found = Vec::new();
        for piece in pieces {
            messages.push(piece.as_bytes()).unwrap();
            while let Some(Message { kind, data }) = messages.next() {
                found.push((kind, data));
            }
        }
        found
    }

    #[test]
    fn a_stream_is_cut_into_messages_wherever_it_breaks() {
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
    fn a_message_without_an_end_is_given_up() {
        let mut messages = Messages::new(100);
        let mut pushed = 0;
        let given_up = std::iter::repeat_with(|| {
            let refused = messages.push(b"data: 12345\n").err();
            let _ = messages.next();
            pushed += 1;
            refused
        });
        let given_up = given_up.take(100).flatten().next();
        assert!((8..20).contains(&pushed), "{pushed}");
        assert!(matches!(given_up, Some(FeedError::TooLarge)), "{given_up:?}");
    }
}
