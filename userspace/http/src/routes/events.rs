//! Events over HTTP: pages of the history, and a stream of what happens (server-sent events).
//!
//! Source: <https://html.spec.whatwg.org/multipage/server-sent-events.html>. Each event is a message with its id and
//! its JSON; a browser that reconnects sends the last id back in `Last-Event-ID` and gets what it missed. A reader
//! that is too slow gets a message of the type `missed` with the number of events that are lost to it; one that
//! takes nothing at all for [`TIME_LIMIT`] is given up.

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
    sync::{Semaphore, mpsc},
    time::{interval_at, sleep, timeout_at},
};
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    accept::Offer,
    limits::TIME_LIMIT,
    peer::Peer,
    peers::Place,
    problem::Failure,
    samples::{COMMENT, Watcher},
    streaming_body::{self, Piece},
};

use super::{App, JSON, accepted};

/// Streams at once of one listener: more than a peer can have connections, so that none has all.
const MAX_STREAMS: usize = 64;

/// Those that a listener has open. What reads on one takes no place on another.
#[derive(Clone, Debug)]
pub(crate) struct Streams(Arc<Semaphore>);

impl Default for Streams {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_STREAMS)))
    }
}

/// Events in a page, where nothing else is asked for.
const PAGE: usize = 100;
/// Silence after which a comment is sent, so that nobody between takes the connection for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Time between attempts to send an event to a peer that has taken too little.
const ROOM_POLL_INTERVAL: Duration = Duration::from_millis(100);

const STREAM: [Offer<()>; 1] = [Offer { media_type: "text/event-stream", version: None, gives: () }];
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

pub(crate) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(events)).routes(routes!(stream))
}

/// Reads a query of these keys, and whether it asks for samples. Values are percent-encoded.
fn filter(path: &str, query: Option<&str>, keys: &[&str]) -> Result<(EventFilter, bool), Failure> {
    let mut filter = EventFilter { limit: PAGE, ..EventFilter::default() };
    let mut samples = false;
    let wrong = |detail: String| (StatusCode::BAD_REQUEST, detail);
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (key, text) = pair.split_once('=').unwrap_or((pair, ""));
        if !keys.contains(&key) {
            return Err(wrong(format!("unknown parameter {key:?}: {path} takes {}", keys.join(", "))));
        }
        let value = percent_decoded(text)
            .ok_or_else(|| wrong(format!("{key}={text:?} is not percent-encoded UTF-8")))?;
        let number = || {
            value.parse::<u64>().map_err(|_| wrong(format!("{key}={value:?} is not a number of 0 or above")))
        };
        match key {
            "since" => filter.since = Some(number()?),
            "limit" => match usize::try_from(number()?) {
                Ok(limit @ 1..=MAX_EVENTS) => filter.limit = limit,
                _ => return Err(wrong(format!("limit={value} is not from 1 to {MAX_EVENTS}"))),
            },
            "kind" => filter.kind = Some(value.parse().map_err(wrong)?),
            "samples" if pair == "samples" => {}
            "samples" => {
                samples =
                    text.parse().map_err(|_| wrong(format!("samples={text:?} is neither true nor false")))?;
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

/// What happened: misses, kills, drift, and other notable things. The last events, or those since an id.
#[utoipa::path(
    get,
    path = "/api/v1/events",
    tag = "api",
    params(
        ("since" = Option<u64>, Query, format = "uint64", description = "Only events with a greater id, the oldest first"),
        ("limit" = Option<u32>, Query, minimum = 1, maximum = 1024, description = "At most so many, up to 1024; 100 by default"),
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
    let (filter, _) = filter("/api/v1/events", query.as_deref(), &keys)?;
    app.recall(move |events| events.page(&filter)).await.map(Json)
}

/// What happens, as it happens (server-sent events): each message has the id and, as JSON, the event.
#[utoipa::path(
    get,
    path = "/api/v1/stream",
    tag = "api",
    params(
        ("since" = Option<u64>, Query, format = "uint64", description = "First those of the history with a greater id"),
        ("samples" = Option<bool>, Query, description = "Also, once a second, a message of the type `sample`: the nodes, and the workloads that changed (schema Sample)"),
        ("Last-Event-ID" = Option<u64>, Header, format = "uint64", description = "The same, as browsers say it when they reconnect"),
    ),
    responses(
        (status = 200, description = "The stream. A message of the type `missed` says how many events the reader was too slow for", body = String, content_type = "text/event-stream"),
        (status = 400, description = "A parameter is wrong", body = Problem, content_type = CONTENT_TYPE),
        (status = 503, description = "Too many streams are open", body = Problem, content_type = CONTENT_TYPE),
    )
)]
async fn stream(
    State(app): State<Arc<App>>,
    Extension(Streams(streams)): Extension<Streams>,
    peer: Option<Extension<Peer>>,
    headers: HeaderMap,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    accepted(&headers, &STREAM)?;
    let (EventFilter { mut since, .. }, samples) =
        filter("/api/v1/stream", query.as_deref(), &["since", "samples"])?;
    if let Some(last) = headers.get(LAST_EVENT_ID) {
        let id = last.to_str().ok().and_then(|text| text.parse().ok());
        since = Some(id.ok_or_else(|| {
            (StatusCode::BAD_REQUEST, format!("the header Last-Event-ID {last:?} is no event's id"))
        })?);
    }
    let Ok(place) = streams.try_acquire_owned() else {
        let detail = format!("{MAX_STREAMS} streams are open, which is as many as there may be");
        return Err((StatusCode::SERVICE_UNAVAILABLE, detail));
    };
    let (sender, body) = streaming_body::body();
    let subscription = app.recall(move |events| events.subscribe(since)).await?;
    let samples = if samples { Some(app.samples.watch().await) } else { None };
    let account = Account(peer.and_then(|Extension(peer)| peer.place));
    tokio::spawn(async move {
        feed(subscription, samples, &sender, &account).await;
        drop(place);
    });
    let head = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((head, body).into_response())
}

/// Where messages that the client has not taken yet are charged to.
struct Account(Option<Arc<Place>>);

impl Account {
    /// Charges a message, if its peer may have that much more.
    fn charge(&self, message: &Bytes) -> bool {
        self.0.as_ref().is_none_or(|place| place.may_send(message.len()))
    }

    /// Closes the connection, with all that waits on it.
    fn close(&self) {
        if let Some(place) = &self.0 {
            place.close();
        }
    }
}

/// A message, and what becomes of it where its peer has not taken enough of what was sent before.
enum Message {
    /// It waits.
    Event(Bytes),
    /// It is dropped: a newer one follows.
    Sample(Bytes),
    /// It is dropped.
    Comment(Bytes),
}

/// Writes messages until the daemon stops or the reader is gone or given up. One that is given up is closed: what waits for it is freed.
async fn feed(
    mut subscription: Subscription,
    mut samples: Option<Watcher>,
    sender: &mpsc::Sender<Piece>,
    account: &Account,
) {
    let mut ticks = interval_at(tokio::time::Instant::now() + KEEP_ALIVE, KEEP_ALIVE);
    // Says at once that the stream is open.
    let mut message = Message::Comment(Bytes::from_static(b": numaward\n\n"));
    loop {
        let deadline = tokio::time::Instant::now() + TIME_LIMIT;
        let text = match message {
            Message::Sample(text) if !account.charge(&text) => {
                if let Some(samples) = &mut samples {
                    samples.skipped();
                }
                None
            }
            Message::Comment(text) if !account.charge(&text) => None,
            Message::Event(text) => {
                while !account.charge(&text) {
                    if tokio::time::Instant::now() >= deadline {
                        subscription.close_as_hung();
                        return account.close();
                    }
                    sleep(ROOM_POLL_INTERVAL).await;
                }
                Some(text)
            }
            Message::Sample(text) | Message::Comment(text) => Some(text),
        };
        if let Some(text) = text {
            match timeout_at(deadline, sender.send(Piece::Text(text))).await {
                Ok(Ok(())) => {}
                // It went away.
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
                    Ok(json) => Message::Event(format!("id: {}\ndata: {json}\n\n", event.id).into()),
                    Err(_) => Message::Comment(COMMENT),
                },
                StreamItem::Missed(missed) => {
                    Message::Event(format!("event: missed\ndata: {{\"missed\":{missed}}}\n\n").into())
                }
                StreamItem::Closed => {
                    // Who does not take it is gone, or will see that the connection is.
                    let _ = sender.try_send(Piece::End);
                    return;
                }
            },
            sample = sample => Message::Sample(sample),
            _ = ticks.tick() => Message::Comment(COMMENT),
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

    /// A browser that stops reading: a tab in the background, a laptop that sleeps.
    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_nothing_is_given_up_and_holds_nobody_up() {
        let events = Events::default();
        let (sender, mut receiver) = mpsc::channel(4);
        let subscription = events.subscribe(None);
        let start = tokio::time::Instant::now();
        let feeding = tokio::spawn(async move { feed(subscription, None, &sender, &Account(None)).await });
        let mut reads = events.subscribe(None);
        // Who reports does not wait, and who reads gets them.
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
        assert_eq!(messages, 4, "what waited for it, and no more");
        let mut registry = Registry::default();
        events.register(&mut registry);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        let hung =
            text.lines().find_map(|line| line.strip_prefix("event_stream_dropped_total{reason=\"hung\"} "));
        assert!(hung.unwrap().parse::<u64>().unwrap() > 0, "{text}");
    }

    /// The bytes that wait for all streams of a peer are bounded, like those of its other large answers.
    #[tokio::test(start_paused = true)]
    async fn messages_are_charged_to_the_peer_and_one_that_takes_nothing_is_closed() {
        let limits = Limits { unread_of_a_peer: 100, ..Limits::USUAL };
        let peers = Peers::new(limits);
        let enter = || peers.enter(Some(PeerId::of("127.0.0.1".parse().unwrap(), None))).unwrap();
        let (other, place) = (enter(), enter());
        assert!(other.may_send(100));
        let events = Events::default();
        let (sender, mut receiver) = mpsc::channel(4);
        let subscription = events.subscribe(None);
        let account = Account(Some(place.clone()));
        let feeding = tokio::spawn(async move { feed(subscription, None, &sender, &account).await });
        events.report(EventReport::new(EventKind::OomKill, "killed"));
        sleep(TIME_LIMIT / 2).await;
        assert!(receiver.try_recv().is_err(), "nothing is sent where the peer has not read");
        other.took(100);
        sleep(Duration::from_secs(1)).await;
        assert!(matches!(receiver.try_recv(), Ok(Piece::Text(_))));
        assert!(!other.may_send(100), "it counts until it is taken");
        let start = tokio::time::Instant::now();
        events.report(EventReport::new(EventKind::OomKill, "killed"));
        feeding.await.unwrap();
        assert_eq!(start.elapsed().as_secs(), TIME_LIMIT.as_secs());
        place.displaced().await;
    }

    #[test]
    fn a_query_is_read_or_refused_with_what_is_wrong() {
        let keys = ["since", "limit", "kind", "workload"];
        let read = |query| filter("/x", Some(query), &keys).map(|(filter, _)| filter);
        let found = read("since=7&limit=3&kind=oom_kill&workload=a%2Fb+c%C3%A4").unwrap();
        assert_eq!((found.since, found.limit), (Some(7), 3));
        assert_eq!(found.workload.as_deref(), Some("a/b cä"));
        assert_eq!(read("").unwrap().limit, PAGE);
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
