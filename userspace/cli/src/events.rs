//! `numaward events`: past and new events.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    fmt::Write as _,
    io::Write as _,
    time::{SystemTime, UNIX_EPOCH},
};

use numaward_api::{Event, EventFilter, EventPage};
use numaward_config::Interval;

use crate::{
    args::{EventFilterArgs, ListFormat},
    client::{ClientError, Server},
    control::percent_encode,
    table::{or_dash, row, table},
    text::{clean, clean_json, clean_value},
    top::feed::{EventStream, MissedEvents},
    workload_names,
};

/// Number of events that the daemon keeps.
const MAX_KEPT_EVENTS: u16 = 1024;
/// Maximum number of names of other workloads that are remembered.
const MAX_UNRELATED_NAMES: usize = 4096;
/// Number of listed events by default.
pub(crate) const DEFAULT_LIMIT: u16 = 100;

/// Selection of events by the names of their workloads; without names, all events are selected.
#[derive(Debug, Default)]
pub(crate) struct EventNames {
    /// The names as the user wrote them.
    written: Vec<String>,
    /// These names, and the other names of the same workloads and guarantees.
    all: BTreeSet<String>,
    /// Names of other workloads.
    unrelated: BTreeSet<String>,
}

impl EventNames {
    /// Fetches all names of the workloads with these names.
    pub(crate) async fn fetch(server: &Server, written: Vec<String>) -> Result<Self, ClientError> {
        let all = workload_names::fetch_event_names(server, &written).await?;
        Ok(Self { written, all, unrelated: BTreeSet::new() })
    }

    /// Returns names that are known already.
    pub(crate) fn known(all: BTreeSet<String>) -> Self {
        Self { all, ..Self::default() }
    }

    fn select(&self, event: &Event) -> bool {
        self.written.is_empty() && self.all.is_empty()
            || event.workload.as_ref().is_some_and(|name| self.all.contains(name))
    }

    /// Returns true if a new event is selected. A name that was not seen before may belong to a workload that has
    /// started meanwhile.
    async fn select_new(&mut self, server: &Server, event: &Event) -> bool {
        if self.select(event) {
            return true;
        }
        if self.unrelated.len() >= MAX_UNRELATED_NAMES {
            self.unrelated.clear();
        }
        // A failed request must not end the stream: the known names still count.
        if event.workload.as_ref().is_some_and(|name| self.unrelated.insert(name.clone()))
            && let Ok(mut names) = workload_names::fetch_event_names(server, &self.written).await
        {
            self.all.append(&mut names);
        }
        self.select(event)
    }
}

/// Fetches the past events that match the filter and have one of the names.
pub(crate) async fn page(
    server: &Server,
    filter_args: &EventFilterArgs,
    names: &EventNames,
) -> Result<EventPage, ClientError> {
    let EventFilterArgs { kind, since, after, limit, .. } = filter_args;
    // The daemon knows no filter by time, and one by a single name only: then all that it keeps are fetched.
    let limit = limit.unwrap_or(if since.is_some() { MAX_KEPT_EVENTS } else { DEFAULT_LIMIT });
    let fetched = if since.is_some() || names.all.len() > 1 { MAX_KEPT_EVENTS } else { limit };
    let mut path = format!("/api/v1/events?limit={fetched}");
    let name = names.all.first().filter(|_| names.all.len() == 1);
    for (key, value) in [("workload", name), ("kind", kind.as_ref())] {
        if let Some(value) = value {
            let _ = write!(path, "&{key}={}", percent_encode(value));
        }
    }
    if let Some(id) = after {
        let _ = write!(path, "&since={id}");
    }
    let mut page: EventPage = server.get(&path).await?;
    if let Some(Interval(span)) = since {
        let begin = SystemTime::now().checked_sub(*span).unwrap_or(UNIX_EPOCH);
        // Times of events have this form, so that they are ordered like texts.
        let begin = humantime::format_rfc3339_millis(begin).to_string();
        page.events.retain(|event| event.time >= begin);
    }
    page.events.retain(|event| names.select(event));
    let limit = usize::from(limit);
    // The events after an id begin with the oldest one.
    match after {
        Some(_) => page.events.truncate(limit),
        None => drop(page.events.drain(..page.events.len().saturating_sub(limit))),
    }
    Ok(page)
}

/// Fetches the latest events with one of the names.
pub(crate) async fn latest(
    server: &Server,
    names: &EventNames,
    limit: u16,
) -> Result<EventPage, ClientError> {
    page(server, &EventFilterArgs::latest(limit), names).await
}

/// Prints past events and then new ones, until the daemon ends.
pub(crate) async fn follow(
    server: &Server,
    filter_args: &EventFilterArgs,
    mut names: EventNames,
    format: ListFormat,
) -> anyhow::Result<Infallible> {
    let page = page(server, filter_args, &names).await?;
    for event in &page.events {
        print(event, format)?;
    }
    let last = page.events.last().map(|event| event.id);
    // If the filter matched no past event, every past event is older than any new one.
    let since = last.or(page.latest).or(filter_args.after).unwrap_or(0);
    let filter = EventFilter {
        kind: filter_args.kind.as_deref().and_then(|kind| kind.parse().ok()),
        ..EventFilter::default()
    };
    let mut stream = EventStream::open(server, &format!("/api/v1/stream?since={since}")).await?;
    loop {
        let message = stream.next().await?;
        match message.kind.as_str() {
            "message" => {
                let event: Event = serde_json::from_str(&message.data)?;
                if filter.matches(&event) && names.select_new(server, &event).await {
                    print(&event, format)?;
                }
            }
            "missed" => {
                let MissedEvents { missed } = serde_json::from_str(&message.data)?;
                eprintln!("numaward: {missed} events were missed: they came faster than they were read");
            }
            // A kind of message of a newer daemon.
            _ => {}
        }
    }
}

/// Titles of the columns of [`event_row`].
pub(crate) const TITLES: [&str; 5] = ["ID", "TIME", "KIND", "WORKLOAD", "MESSAGE"];

/// Renders events as a table.
pub(crate) fn render(events: &[Event]) -> String {
    table(TITLES, events.iter().map(event_row))
}

/// Returns the cells of an event.
pub(crate) fn event_row(event: &Event) -> Vec<String> {
    let more = if event.suppressed > 0 {
        format!(" (and {} similar events)", event.suppressed)
    } else {
        String::new()
    };
    row([
        &event.id.to_string(),
        &event.time,
        event.kind.as_str(),
        &or_dash(event.workload.as_ref()),
        &format!("{}{more}", event.message),
    ])
}

/// Prints an event: a line, its id, or a document.
fn print(event: &Event, format: ListFormat) -> anyhow::Result<()> {
    let text = match format {
        ListFormat::Name => format!("{}\n", event.id),
        ListFormat::Json => format!("{}\n", clean_json(&serde_json::to_string(event)?)),
        ListFormat::Yaml => {
            format!("---\n{}", numaward_config::yaml(&clean_value(serde_json::to_value(event)?)))
        }
        ListFormat::Table | ListFormat::Wide => {
            let workload = or_dash(event.workload.as_ref());
            let line = format!("{} {} {workload}: {}", event.time, event.kind.as_str(), event.message);
            clean(&line).into_owned() + "\n"
        }
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}
