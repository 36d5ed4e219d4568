//! Events over HTTP: pages of the history, and a stream of new events (server-sent events).
//!
//! Each event is a message with its id and its JSON. A browser that reconnects sends the last id in `Last-Event-ID`
//! and gets the events that it missed. A slow client gets a message of the type `missed` with the number of events
//! that it lost; a client that reads nothing for [`TIME_LIMIT`] is disconnected.
//!
//! Source: <https://html.spec.whatwg.org/multipage/server-sent-events.html>.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Json,
    body::Bytes,
    extract::{RawQuery, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
};
use numaward_api::{
    EventFilter, EventPage,
    problem::{CONTENT_TYPE, Problem},
};
use numaward_observe::events::{MAX_EVENTS, StreamItem, Subscription};
use tokio::{
    sync::mpsc,
    time::{interval_at, sleep, timeout_at},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    accept::Offer,
    limits::TIME_LIMIT,
    peer::Peer,
    peers::ConnectionPlace,
    problem::Failure,
    samples::{COMMENT, Watcher},
    streaming_body::{self, Piece},
    streams::Streams,
};

use super::{App, JSON, accepted};

/// Number of events in a page by default.
const DEFAULT_PAGE_SIZE: usize = 100;
/// Interval at which a comment is sent, so that no proxy closes the connection as idle.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

/// Time between attempts to send an event to a peer with too many unread bytes.
const ROOM_POLL_INTERVAL: Duration = Duration::from_millis(100);

const STREAM: [Offer<()>; 1] = [Offer { media_type: "text/event-stream", version: None, value: () }];
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(events)).routes(routes!(stream))
}

/// Parses a query with these keys. Returns the filter, and true if the query requests samples. Values are percent-encoded.
fn parse_query(path: &str, query: Option<&str>, keys: &[&str]) -> Result<(EventFilter, bool), Failure> {
    let mut filter = EventFilter { limit: DEFAULT_PAGE_SIZE, ..EventFilter::default() };
    let mut samples = false;
    let invalid = |detail: String| (StatusCode::BAD_REQUEST, detail);
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (key, text) = pair.split_once('=').unwrap_or((pair, ""));
        if !keys.contains(&key) {
            return Err(invalid(format!("unknown parameter {key:?}: {path} takes {}", keys.join(", "))));
        }
        let value = percent_decoded(text)
            .ok_or_else(|| invalid(format!("{key}={text:?} is not percent-encoded UTF-8")))?;
        let number = || {
            value
                .parse::<u64>()
                .map_err(|_| invalid(format!("{key}={value:?} is not a number of 0 or above")))
        };
        match key {
            "since" => filter.since = Some(number()?),
            "limit" => match usize::try_from(number()?) {
                Ok(limit @ 1..=MAX_EVENTS) => filter.limit = limit,
                _ => return Err(invalid(format!("limit={value} is not from 1 to {MAX_EVENTS}"))),
            },
            "kind" => filter.kind = Some(value.parse().map_err(invalid)?),
            "samples" if pair == "samples" => {}
            "samples" => {
                samples = text
                    .parse()
                    .map_err(|_| invalid(format!("samples={text:?} is neither true nor false")))?;
            }
            _ => filter.workload = Some(value),
        }
    }
    Ok((filter, samples))
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                u8::try_from(digit()? * 16 + digit()?).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

/// Events: misses, kills, drift, and other notable things. The last ones, or those since an id.
#[utoipa::path(
    get,
    path = "/api/v1/events",
    tag = "api",
    params(
        ("since" = Option<u64>, Query, format = "uint64", description = "Only events with a greater id, the oldest first"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 1024, description = "Maximum number of events, up to 1024; 100 by default"),
        ("kind" = Option<numaward_api::EventKind>, Query, description = "Only events of this kind"),
        ("workload" = Option<String>, Query, description = "Only events about this workload"),
    ),
    responses(
        (status = 200, description = "The events", body = EventPage),
        (status = 400, description = "A parameter is wrong", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn events(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Result<Json<EventPage>, Failure> {
    accepted(&headers, &JSON)?;
    let keys = ["since", "limit", "kind", "workload"];
    let (filter, _) = parse_query("/api/v1/events", query.as_deref(), &keys)?;
    app.query_events(move |events| events.page(&filter)).await.map(Json)
}

/// A stream of new events (server-sent events): each message has the id and, as JSON, the event.
#[utoipa::path(
    get,
    path = "/api/v1/stream",
    tag = "api",
    params(
        ("since" = Option<u64>, Query, format = "uint64", description = "Begins with the events of the history that have a greater id"),
        ("samples" = Option<bool>, Query, description = "Also, once a second, a message of the type `sample`: the nodes, and the workloads that changed (schema Sample)"),
        ("Last-Event-ID" = Option<u64>, Header, format = "uint64", description = "The same as since; browsers send it when they reconnect"),
    ),
    responses(
        (status = 200, description = "The stream. A message of the type `missed` has the number of events that a slow client lost", body = String, content_type = "text/event-stream"),
        (status = 400, description = "A parameter is wrong", body = Problem, content_type = CONTENT_TYPE),
        (status = 503, description = "Too many streams are open", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn stream(
    State(app): State<Arc<App>>,
    Extension(streams): Extension<Streams>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    accepted(&headers, &STREAM)?;
    let (EventFilter { mut since, .. }, samples) =
        parse_query("/api/v1/stream", query.as_deref(), &["since", "samples"])?;
    if let Some(last) = headers.get(LAST_EVENT_ID) {
        let id = last.to_str().ok().and_then(|text| text.parse().ok());
        since = Some(id.ok_or_else(|| {
            (StatusCode::BAD_REQUEST, format!("the header Last-Event-ID {last:?} is no event's id"))
        })?);
    }
    let connection = peer.and_then(|Extension(peer)| peer.place);
    let place = streams
        .place(connection.clone())
        .map_err(|refusal| (StatusCode::SERVICE_UNAVAILABLE, refusal.to_string()))?;
    let (sender, body) = streaming_body::body();
    let subscription = app.query_events(move |events| events.subscribe(since)).await?;
    let samples = if samples { Some(app.samples.watch().await) } else { None };
    let account = UnreadAccount(connection);
    tokio::spawn(async move {
        write_messages(subscription, samples, &sender, &account).await;
        drop(place);
    });
    let head = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((head, body).into_response())
}

/// Counter of the bytes of messages that the client has not read yet.
struct UnreadAccount(Option<Arc<ConnectionPlace>>);

impl UnreadAccount {
    /// Counts a message. Returns false if it exceeds the limit of its peer.
    fn charge(&self, message: &Bytes) -> bool {
        self.0.as_ref().is_none_or(|place| place.reserve_unread(message.len()))
    }

    /// Closes the connection. Messages that wait to be written are dropped.
    fn close(&self) {
        if let Some(place) = &self.0 {
            place.close();
        }
    }
}

/// A message. Its kind determines the handling if the peer has too many unread bytes.
enum StreamMessage {
    /// Waits until the peer has read enough.
    Event(Bytes),
    /// Is dropped: a newer one follows.
    Sample(Bytes),
    /// Is dropped.
    Comment(Bytes),
}

/// Writes messages until the daemon stops or the client disconnects. Closes the connection of a client that reads too slowly.
async fn write_messages(
    mut subscription: Subscription,
    mut samples: Option<Watcher>,
    sender: &mpsc::Sender<Piece>,
    account: &UnreadAccount,
) {
    let mut ticks = interval_at(tokio::time::Instant::now() + KEEP_ALIVE_INTERVAL, KEEP_ALIVE_INTERVAL);
    // Shows the client at once that the stream is open.
    let mut message = StreamMessage::Comment(Bytes::from_static(b": numaward\n\n"));
    loop {
        let deadline = tokio::time::Instant::now() + TIME_LIMIT;
        let text = match message {
            StreamMessage::Sample(text) if !account.charge(&text) => {
                if let Some(samples) = &mut samples {
                    samples.skip();
                }
                None
            }
            StreamMessage::Comment(text) if !account.charge(&text) => None,
            StreamMessage::Event(text) => {
                while !account.charge(&text) {
                    if tokio::time::Instant::now() >= deadline {
                        subscription.close_as_hung();
                        return account.close();
                    }
                    sleep(ROOM_POLL_INTERVAL).await;
                }
                Some(text)
            }
            StreamMessage::Sample(text) | StreamMessage::Comment(text) => Some(text),
        };
        if let Some(text) = text {
            match timeout_at(deadline, sender.send(Piece::Text(text))).await {
                Ok(Ok(())) => {}
                // The client has disconnected.
                Ok(Err(_)) => return,
                Err(_) => {
                    subscription.close_as_hung();
                    return account.close();
                }
            }
        }
        let sample = async {
            match &mut samples {
                Some(samples) => samples.next().await,
                None => std::future::pending().await,
            }
        };
        message = tokio::select! {
            next = subscription.next() => match next {
                StreamItem::Event(event) => match serde_json::to_string(&*event) {
                    Ok(json) => StreamMessage::Event(format!("id: {}\ndata: {json}\n\n", event.id).into()),
                    Err(_) => StreamMessage::Comment(COMMENT),
                },
                StreamItem::Missed(missed) => {
                    StreamMessage::Event(format!("event: missed\ndata: {{\"missed\":{missed}}}\n\n").into())
                }
                StreamItem::Closed => {
                    // If the queue is full, the client sees the connection close instead.
                    let _ = sender.try_send(Piece::End);
                    return;
                }
            },
            sample = sample => StreamMessage::Sample(sample),
            _ = ticks.tick() => StreamMessage::Comment(COMMENT),
            () = sender.closed() => return,
        };
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;
    use crate::{
        limits::Limits,
        peers::{PeerId, Peers},
    };
    use numaward_api::EventKind;
    use numaward_model::EventReport;
    use numaward_observe::events::Events;

    /// A browser stops reading, for example in a tab in the background or on a sleeping laptop.
    #[tokio::test(start_paused = true)]
    async fn stalled_client_is_disconnected() {
        let events = Events::default();
        let (sender, mut receiver) = mpsc::channel(4);
        let subscription = events.subscribe(None);
        let start = tokio::time::Instant::now();
        let feeding =
            tokio::spawn(
                async move { write_messages(subscription, None, &sender, &UnreadAccount(None)).await },
            );
        let mut reads = events.subscribe(None);
        // Reports do not wait for the stalled client, and the other client gets all events.
        for turn in 0..500 {
            events
                .report(EventReport::new(EventKind::OomKill, "killed").workload(format!("workload-{turn}")));
            assert!(matches!(reads.next().await, StreamItem::Event(_)), "{turn}");
        }
        feeding.await.unwrap();
        assert_eq!(start.elapsed(), TIME_LIMIT);
        let mut messages = 0;
        while receiver.recv().await.is_some() {
            messages += 1;
        }
        assert_eq!(messages, 4, "only the messages in the queue");
        let mut registry = Registry::default();
        events.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let hung =
            text.lines().find_map(|line| line.strip_prefix("event_stream_dropped_total{reason=\"hung\"} "));
        assert!(hung.unwrap().parse::<u64>().unwrap() > 0, "{text}");
    }

    /// The unread bytes of all streams of a peer are limited, like those of its other large responses.
    #[tokio::test(start_paused = true)]
    async fn unread_messages_count_for_the_peer() {
        let limits = Limits { unread_of_a_peer: 100, ..Limits::DEFAULT };
        let peers = Peers::new(limits);
        let enter = || peers.enter(Some(PeerId::new("127.0.0.1".parse().unwrap(), None))).unwrap();
        let (other, place) = (enter(), enter());
        assert!(other.reserve_unread(100));
        let events = Events::default();
        let (sender, mut receiver) = mpsc::channel(4);
        let subscription = events.subscribe(None);
        let account = UnreadAccount(Some(place.clone()));
        let feeding =
            tokio::spawn(async move { write_messages(subscription, None, &sender, &account).await });
        events.report(EventReport::new(EventKind::OomKill, "killed"));
        sleep(TIME_LIMIT / 2).await;
        assert!(receiver.try_recv().is_err(), "nothing is sent while the peer has unread bytes");
        other.release_unread(100);
        sleep(Duration::from_secs(1)).await;
        assert!(matches!(receiver.try_recv(), Ok(Piece::Text(_))));
        assert!(!other.reserve_unread(100), "the message counts until it is read");
        let start = tokio::time::Instant::now();
        events.report(EventReport::new(EventKind::OomKill, "killed"));
        feeding.await.unwrap();
        assert_eq!(start.elapsed().as_secs(), TIME_LIMIT.as_secs());
        place.displaced().await;
    }

    #[test]
    fn refuses_invalid_queries() {
        let keys = ["since", "limit", "kind", "workload"];
        let read = |query| parse_query("/x", Some(query), &keys).map(|(filter, _)| filter);
        let found = read("since=7&limit=3&kind=oom_kill&workload=a%2Fb+c%C3%A4").unwrap();
        assert_eq!((found.since, found.limit), (Some(7), 3));
        assert_eq!(found.workload.as_deref(), Some("a/b cä"));
        assert_eq!(read("").unwrap().limit, DEFAULT_PAGE_SIZE);
        for (query, part) in [
            ("sinc=7", "unknown parameter \"sinc\": /x takes since, limit, kind, workload"),
            ("since=-1", "since=\"-1\" is not a number"),
            ("since", "since=\"\" is not a number"),
            ("limit=0", "limit=0 is not from 1 to 1024"),
            ("limit=1025", "limit=1025 is not from 1 to 1024"),
            ("kind=oops", "\"oops\" is not a kind of event; known kinds are miss, oom_kill"),
            ("workload=%ff", "is not percent-encoded UTF-8"),
            ("workload=%f", "is not percent-encoded UTF-8"),
        ] {
            let (status, detail) = read(query).unwrap_err();
            assert_eq!(status, StatusCode::BAD_REQUEST, "{query}");
            assert!(detail.contains(part), "{query}: {detail}");
        }
    }
}
