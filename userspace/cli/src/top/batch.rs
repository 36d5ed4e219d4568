//! Output of `top` and `replay` as tables or lines of JSON: for pipes, files and terminals that can only print lines.

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
    feed::FeedUpdate,
    list::{cell_text, node_cell},
    model::{NodeRates, Rates, TopModel},
    replay::Player,
};
use crate::{
    args::{OutputFormat, TopArgs, WorkloadListArgs},
    column::Column,
    table::{self, columns},
    text::{clean_json, clean_lines, clean_value},
};

/// Prints live data until the user ends it. The first output has rates, so it follows the second sample.
pub(crate) async fn run(
    updates: &mut mpsc::Receiver<FeedUpdate>,
    model: &mut TopModel,
    args: &TopArgs,
    format: OutputFormat,
) -> anyhow::Result<()> {
    let count = if args.once { Some(1) } else { args.count };
    // Samples may come up to half a second early.
    let interval = Duration::from_secs(args.interval).saturating_sub(Duration::from_millis(500));
    let mut has_allocations = false;
    let mut printed = 0;
    let mut last: Option<Instant> = None;
    while count.is_none_or(|count| printed < count) {
        let update = updates.recv().await.context("the connection to the daemon has ended")?;
        let is_sample = matches!(update, FeedUpdate::Sample(_));
        has_allocations |= matches!(update, FeedUpdate::Allocations(_));
        if let FeedUpdate::Lost { reason, .. } = &update {
            // With a limited number of tables, the command does not wait for the daemon to return.
            if count.is_some() {
                bail!("{reason}");
            }
            eprintln!("numaward: {}", clean_lines(reason));
        }
        let now = Instant::now();
        model.take(update, now);
        let is_due = last.is_none_or(|last| now.duration_since(last) >= interval);
        if !(is_sample && is_due && has_allocations && model.shows_rates()) {
            continue;
        }
        print(model, &args.list, format, printed == 0, Vec::new())?;
        last = Some(now);
        printed += 1;
    }
    Ok(())
}

/// Prints the moments of a recording, except those without rates (the first moment, and the first one of each later
/// connection) and those at which the daemon was lost.
pub(crate) fn replay(mut player: Player, args: &TopArgs, format: OutputFormat) -> anyhow::Result<()> {
    for warning in &player.recording.warnings {
        eprintln!("numaward: {}", clean_lines(warning));
    }
    let count = if args.once { Some(1) } else { args.count };
    // Moments may come up to half a second early, like samples.
    let interval = (args.interval * 1000).saturating_sub(500);
    let (mut printed, mut last) = (0, None);
    let mut last_event = player.model.events.front().map_or(0, |event| event.id);
    while count.is_none_or(|count| printed < count) {
        let (at, model) = (player.at_millis(), &player.model);
        let is_due = last.is_none_or(|last| at.saturating_sub(last) >= interval);
        if is_due && model.shows_rates() && !model.is_lost() || player.is_single() {
            let mut events: Vec<Event> =
                model.events.iter().take_while(|event| event.id > last_event).cloned().collect();
            events.reverse();
            last_event = events.last().map_or(last_event, |event| event.id);
            print(model, &args.list, format, printed == 0, events)?;
            last = Some(at);
            printed += 1;
        }
        if !player.step()? {
            break;
        }
    }
    Ok(())
}

/// Prints the model as a table, a line or a document. For a recording, adds the time and the events since the previous
/// output.
fn print(
    model: &TopModel,
    list: &WorkloadListArgs,
    format: OutputFormat,
    is_first: bool,
    events: Vec<Event>,
) -> anyhow::Result<()> {
    let text = match format {
        OutputFormat::Json => {
            format!("{}\n", clean_json(&serde_json::to_string(&report(model, list, events))?))
        }
        // One document after another.
        OutputFormat::Yaml => {
            let report = clean_value(serde_json::to_value(report(model, list, events))?);
            format!("---\n{}", numaward_config::yaml(&report))
        }
        OutputFormat::Table => {
            let gap = if is_first { "" } else { "\n" };
            let time = model.recorded.as_ref().map_or_else(String::new, |now| format!("{}\n", now.time));
            format!("{gap}{time}{}", clean_lines(&table(model, list)))
        }
    };
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(())
}

fn table(model: &TopModel, list: &WorkloadListArgs) -> String {
    const NODE_TITLES: [&str; 7] = ["NODE", "CPUS", "TOTAL", "FREE", "GUARANTEED", "LOCAL/S", "REMOTE/S"];
    let nodes =
        model.nodes.iter().map(|node| NODE_TITLES.map(|title| node_cell(model, node, title)).to_vec());
    // The name comes last, as its length is not limited.
    let mut order = Column::BY_PRIORITY.to_vec();
    order.retain(|column| *column != Column::Bar);
    order.sort();
    order.push(Column::Name);
    let titles = order.iter().map(|column| column.title_and_width().0.to_owned()).collect();
    let cells = |row| order.iter().map(|column| cell_text(*column, row).trim_end().to_owned()).collect();
    let rows = list.rows(model).into_iter().map(|(_, row)| cells(row));
    let rows: Vec<_> = iter::once(titles).chain(rows).collect();
    format!("{}\n{}", table::table(NODE_TITLES, nodes), columns(&rows))
}

/// Output as JSON, one line each time.
#[derive(Serialize)]
struct TopReport<'a> {
    /// Time of a recorded moment; absent for live data.
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<&'a str>,
    nodes: Vec<NodeReport<'a>>,
    workloads: Vec<WorkloadReport<'a>>,
    /// Events since the previous report.
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
    /// User memory in bytes per second; absent if it is not counted.
    bytes_per_second: Option<Rates>,
    /// Guaranteed nodes; absent without a guarantee.
    #[serde(rename = "promisedNodes")]
    guaranteed_nodes: Option<String>,
    /// Share of the memory that is local; absent if it is not known.
    local_share: Option<f64>,
}

fn report<'a>(model: &'a TopModel, list: &WorkloadListArgs, events: Vec<Event>) -> TopReport<'a> {
    let rates = |node: &Node| model.node_rates.get(&node.node).copied();
    let nodes = model.nodes.iter().map(|node| NodeReport { node, rates: rates(node) });
    let workloads = list.rows(model).into_iter().map(|(_, found)| WorkloadReport {
        workload: &found.workload,
        bytes_per_second: found.rates,
        guaranteed_nodes: found.guaranteed_nodes().map(|nodes| nodes.to_string()),
        local_share: found.local_share(),
    });
    let time = model.recorded.as_ref().map(|now| now.time.as_str());
    TopReport { time, nodes: nodes.collect(), workloads: workloads.collect(), events }
}
