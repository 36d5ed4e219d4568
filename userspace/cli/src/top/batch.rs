//! The same as tables, one after the other, or as lines of JSON: for pipes, files and terminals that can only print.

use std::{
    io::{self, Write},
    iter,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use numaward_api::{Event, Node, Workload};
use serde::Serialize;
use serde_with_macros::skip_serializing_none;
use tokio::sync::mpsc;

use super::{
    feed::Update,
    list::node_cell,
    model::{Model, NodeRates, Rates},
    replay::Player,
};
use crate::{
    args::{Choice, Format, Shown},
    column::Column,
    table::{self, columns},
    text::{clean_json, clean_lines, clean_value},
};

/// Prints until the user has seen enough. What is printed first has rates: two samples were seen.
pub(crate) async fn run(
    updates: &mut mpsc::Receiver<Update>,
    model: &mut Model,
    shown: &Shown,
    format: Format,
) -> anyhow::Result<()> {
    let count = if shown.once { Some(1) } else { shown.count };
    // A sample that comes a little early is not skipped.
    let interval = Duration::from_secs(shown.interval).saturating_sub(Duration::from_millis(500));
    let mut promises_known = false;
    let mut printed = 0;
    let mut last: Option<Instant> = None;
    while count.is_none_or(|count| printed < count) {
        let update = updates.recv().await.context("the daemon is no longer followed")?;
        let is_sample = matches!(update, Update::Sample(_));
        promises_known |= matches!(update, Update::Allocations(_));
        if let Update::Lost { reason, .. } = &update {
            // Who waits for one table does not wait for a daemon to come back.
            if count.is_some() {
                bail!("{reason}");
            }
            eprintln!("numaward: {}", clean_lines(reason));
        }
        let now = Instant::now();
        model.take(update, now);
        let is_due = last.is_none_or(|last| now.duration_since(last) >= interval);
        if !(is_sample && is_due && promises_known && model.shows_rates()) {
            continue;
        }
        print(model, &shown.choice, format, printed == 0, Vec::new())?;
        last = Some(now);
        printed += 1;
    }
    Ok(())
}

/// Prints moments of a recording. Not those without rates (the first one, and the first of a later
/// connection), nor that at which the daemon was lost.
pub(crate) fn replay(mut player: Player, shown: &Shown, format: Format) -> anyhow::Result<()> {
    for warning in &player.recording.warnings {
        eprintln!("numaward: {}", clean_lines(warning));
    }
    let count = if shown.once { Some(1) } else { shown.count };
    // As for samples that come a little early.
    let interval = (shown.interval * 1000).saturating_sub(500);
    let (mut printed, mut last) = (0, None);
    let mut seen = player.model.events.front().map_or(0, |event| event.id);
    while count.is_none_or(|count| printed < count) {
        let (at, model) = (player.at_millis(), &player.model);
        let is_due = last.is_none_or(|last| at.saturating_sub(last) >= interval);
        if is_due && model.shows_rates() && !model.is_lost() || player.is_alone() {
            let mut events: Vec<Event> =
                model.events.iter().take_while(|event| event.id > seen).cloned().collect();
            events.reverse();
            seen = events.last().map_or(seen, |event| event.id);
            print(model, &shown.choice, format, printed == 0, events)?;
            last = Some(at);
            printed += 1;
        }
        if !player.step()? {
            break;
        }
    }
    Ok(())
}

/// Prints what is known: a table, a line or a document. Of a recording also when that was, and what had happened since.
fn print(
    model: &Model,
    choice: &Choice,
    format: Format,
    is_first: bool,
    events: Vec<Event>,
) -> anyhow::Result<()> {
    let text = match format {
        Format::Json => format!("{}\n", clean_json(&serde_json::to_string(&report(model, choice, events))?)),
        // Documents, one after the other.
        Format::Yaml => {
            let report = clean_value(serde_json::to_value(report(model, choice, events))?);
            format!("---\n{}", numaward_config::yaml(&report))
        }
        Format::Table => {
            let gap = if is_first { "" } else { "\n" };
            let time = model.recorded.as_ref().map_or_else(String::new, |now| format!("{}\n", now.time));
            format!("{gap}{time}{}", clean_lines(&table(model, choice)))
        }
    };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

fn table(model: &Model, choice: &Choice) -> String {
    const NODES: [&str; 7] = ["NODE", "CPUS", "TOTAL", "FREE", "PROMISED", "LOCAL/S", "REMOTE/S"];
    let nodes = model.nodes.iter().map(|node| NODES.map(|title| node_cell(model, node, title)).to_vec());
    // The name comes last: only that may be of any length.
    let mut order = Column::BY_WORTH.to_vec();
    order.retain(|column| *column != Column::Bar);
    order.sort();
    order.push(Column::Name);
    let titles = order.iter().map(|column| column.head().0.to_owned()).collect();
    let cells = |row| order.iter().map(|column| column.cell(row).trim_end().to_owned()).collect();
    let rows = choice.rows(model).into_iter().map(|(_, row)| cells(row));
    let rows: Vec<_> = iter::once(titles).chain(rows).collect();
    format!("{}\n{}", table::table(NODES, nodes), columns(&rows))
}

/// What is printed as JSON, a line each time.
#[derive(Serialize)]
struct Report<'a> {
    /// When it was; absent for what is now.
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<&'a str>,
    nodes: Vec<NodeReport<'a>>,
    workloads: Vec<WorkloadReport<'a>>,
    /// What happened since the report before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    events: Vec<Event>,
}

#[derive(Serialize)]
struct NodeReport<'a> {
    #[serde(flatten)]
    node: &'a Node,
    #[serde(flatten)]
    rates: Option<NodeRates>,
}

#[skip_serializing_none]
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WorkloadReport<'a> {
    #[serde(flatten)]
    workload: &'a Workload,
    /// Bytes per second; absent where they are not counted.
    bytes_per_second: Option<Rates>,
    /// The nodes promised to it; absent without a guarantee.
    promised_nodes: Option<String>,
    /// The share of its memory that is near; absent where that is not known.
    local_share: Option<f64>,
}

fn report<'a>(model: &'a Model, choice: &Choice, events: Vec<Event>) -> Report<'a> {
    let rates = |node: &Node| model.node_rates.get(&node.node).copied();
    let nodes = model.nodes.iter().map(|node| NodeReport { node, rates: rates(node) });
    let workloads = choice.rows(model).into_iter().map(|(_, found)| WorkloadReport {
        workload: &found.workload,
        bytes_per_second: found.rates,
        promised_nodes: found.promised_nodes().map(|nodes| nodes.to_string()),
        local_share: found.local_share(),
    });
    let time = model.recorded.as_ref().map(|now| now.time.as_str());
    Report { time, nodes: nodes.collect(), workloads: workloads.collect(), events }
}
