//! `numaward events`: what happened, and what happens.

use std::{convert::Infallible, fmt::Write as _, io::Write as _};

use numaward_api::{Event, EventFilter, EventPage};

use crate::{
    args::{EventChoice, Format},
    client::{ClientError, Server},
    control::encoded,
    table::{or_dash, row, table},
    text::{clean, clean_json, clean_value},
    top::feed::{Missed, Stream},
};

/// What happened, as far as the choice wants it.
pub(crate) async fn page(server: &Server, choice: &EventChoice) -> Result<EventPage, ClientError> {
    let mut path = format!("/api/v1/events?limit={}", choice.limit);
    for (key, value) in [("workload", &choice.workload), ("kind", &choice.kind)] {
        if let Some(value) = value {
            let _ = write!(path, "&{key}={}", encoded(value));
        }
    }
    if let Some(since) = choice.since {
        let _ = write!(path, "&since={since}");
    }
    server.get(&path).await
}

/// Prints what happened and then what happens, until the daemon ends.
pub(crate) async fn follow(
    server: &Server,
    choice: &EventChoice,
    page: EventPage,
    format: Format,
) -> anyhow::Result<Infallible> {
    for event in &page.events {
        print(event, format)?;
    }
    let last = page.events.last().map(|event| event.id);
    // Where the choice has none yet: what came before is older than all that may come.
    let since = last.or(page.latest).or(choice.since).unwrap_or(0);
    let filter = EventFilter {
        kind: choice.kind.as_deref().and_then(|kind| kind.parse().ok()),
        workload: choice.workload.clone(),
        ..EventFilter::default()
    };
    let mut stream = Stream::open(server, &format!("/api/v1/stream?since={since}")).await?;
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
                let Missed { missed } = serde_json::from_str(&message.data)?;
                eprintln!("numaward: {missed} events came faster than they were read");
            }
            // Of a newer daemon.
            _ => {}
        }
    }
}

/// Events as a table.
pub(crate) fn render(events: &[Event]) -> String {
    let rows = events.iter().map(|event| {
        let more =
            if event.suppressed > 0 { format!(" (and {} like it)", event.suppressed) } else { String::new() };
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

/// One event, as it comes: a line, or a document.
fn print(event: &Event, format: Format) -> anyhow::Result<()> {
    let text = match format {
        Format::Json => format!("{}\n", clean_json(&serde_json::to_string(event)?)),
        Format::Yaml => format!("---\n{}", numaward_config::yaml(&clean_value(serde_json::to_value(event)?))),
        Format::Table => {
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
