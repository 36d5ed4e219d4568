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
    args::{EventFilterArgs, OutputFormat},
    client::{ClientError, Server},
    control::percent_encode,
    table::{or_dash, row, table},
    text::{clean, clean_json, clean_value},
    top::feed::{EventStream, MissedEvents},
};

/// Number of events that the daemon keeps.
const MAX_KEPT_EVENTS: u16 = 1024;

/// Fetches the past events that match the filter.
pub(crate) async fn page(server: &Server, filter_args: &EventFilterArgs) -> Result<EventPage, ClientError> {
    let mut path = format!("/api/v1/events?limit={}", filter_args.limit);
    for (key, value) in [("workload", &filter_args.workload), ("kind", &filter_args.kind)] {
        if let Some(value) = value {
            let _ = write!(path, "&{key}={}", percent_encode(value));
        }
    }
    if let Some(id) = filter_args.after {
        let _ = write!(path, "&since={id}");
    }
    let mut page: EventPage = server.get(&path).await?;
    if let Some(Interval(span)) = filter_args.since {
        let begin = SystemTime::now().checked_sub(span).unwrap_or(UNIX_EPOCH);
        // Times of events have this form, so that they are ordered like texts.
        let begin = humantime::format_rfc3339_millis(begin).to_string();
        page.events.retain(|event| event.time >= begin);
    }
    Ok(page)
}

/// Fetches the latest events with one of these names; without names, of all workloads.
pub(crate) async fn latest(
    server: &Server,
    names: &BTreeSet<String>,
    limit: u16,
) -> Result<EventPage, ClientError> {
    let mut page = page(server, &EventFilterArgs::latest(None, MAX_KEPT_EVENTS)).await?;
    let is_selected = |event: &Event| event.workload.as_ref().is_some_and(|name| names.contains(name));
    page.events.retain(|event| names.is_empty() || is_selected(event));
    page.events.drain(..page.events.len().saturating_sub(limit.into()));
    Ok(page)
}

/// Prints past events and then new ones, until the daemon ends.
pub(crate) async fn follow(
    server: &Server,
    filter_args: &EventFilterArgs,
    page: EventPage,
    format: OutputFormat,
) -> anyhow::Result<Infallible> {
    for event in &page.events {
        print(event, format)?;
    }
    let last = page.events.last().map(|event| event.id);
    // If the filter matched no past event, every past event is older than any new one.
    let since = last.or(page.latest).or(filter_args.after).unwrap_or(0);
    let filter = EventFilter {
        kind: filter_args.kind.as_deref().and_then(|kind| kind.parse().ok()),
        workload: filter_args.workload.clone(),
        ..EventFilter::default()
    };
    let mut stream = EventStream::open(server, &format!("/api/v1/stream?since={since}")).await?;
    loop {
        let message = stream.next().await?;
        match message.kind.as_str() {
            "message" => {
                let event: Event = serde_json::from_str(&message.data)?;
                if filter.matches(&event) {
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

/// Prints an event: a line, or a document.
fn print(event: &Event, format: OutputFormat) -> anyhow::Result<()> {
    let text = match format {
        OutputFormat::Json => format!("{}\n", clean_json(&serde_json::to_string(event)?)),
        OutputFormat::Yaml => {
            format!("---\n{}", numaward_config::yaml(&clean_value(serde_json::to_value(event)?)))
        }
        OutputFormat::Table => {
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
