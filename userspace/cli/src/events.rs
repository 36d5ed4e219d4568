//! `numaward events`: past and new events.

use std::{convert::Infallible, fmt::Write as _, io::Write as _};

use numaward_api::{Event, EventFilter, EventPage};

use crate::{
    args::{EventFilterArgs, OutputFormat},
    client::{ClientError, Server},
    control::percent_encode,
    table::{or_dash, row, table},
    text::{clean, clean_json, clean_value},
    top::feed::{EventStream, MissedEvents},
};

/// Fetches the past events that match the filter.
pub(crate) async fn page(server: &Server, filter_args: &EventFilterArgs) -> Result<EventPage, ClientError> {
    let mut path = format!("/api/v1/events?limit={}", filter_args.limit);
    for (key, value) in [("workload", &filter_args.workload), ("kind", &filter_args.kind)] {
        if let Some(value) = value {
            let _ = write!(path, "&{key}={}", percent_encode(value));
        }
    }
    if let Some(since) = filter_args.since {
        let _ = write!(path, "&since={since}");
    }
    server.get(&path).await
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
    let since = last.or(page.latest).or(filter_args.since).unwrap_or(0);
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

/// Renders events as a table.
pub(crate) fn render(events: &[Event]) -> String {
    let rows = events.iter().map(|event| {
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
    });
    table(["ID", "TIME", "KIND", "WORKLOAD", "MESSAGE"], rows)
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
