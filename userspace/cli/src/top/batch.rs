//! The same as tables, one after the other, or as lines of JSON: for pipes, files and terminals that can only print.

use std::{
    io::{self, Write},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use numaward_api::{Node, Workload};
use serde::Serialize;
use tokio::sync::mpsc;

use super::{
    feed::Update,
    list::{Choice, Column, rate},
    model::{Model, Rates},
};
use crate::{
    args::{Format, Shown},
    table::{columns, row, size},
    text::clean_lines,
};

/// Prints until the user has seen enough. What is printed first has rates: two samples were seen.
pub(crate) async fn run(
    updates: &mut mpsc::Receiver<Update>,
    model: &mut Model,
    choice: &Choice,
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
        if !(is_sample && is_due && promises_known && model.has_rates()) {
            continue;
        }
        let text = match format {
            Format::Json => serde_json::to_string(&report(model, choice))? + "\n",
            Format::Table => {
                let gap = if printed > 0 { "\n" } else { "" };
                format!("{gap}{}", clean_lines(&table(model, choice)))
            }
        };
        let mut out = io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        last = Some(now);
        printed += 1;
    }
    Ok(())
}

fn table(model: &Model, choice: &Choice) -> String {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let mut rows = vec![row(["NODE", "CPUS", "TOTAL", "FREE", "PROMISED", "LOCAL/S", "REMOTE/S"])];
    for node in &model.nodes {
        let base = node.memory.iter().find(|memory| memory.kind == "memory");
        let promised = model.promises(node.node).and_then(|held| {
            held.memory.iter().find(|memory| memory.kind == "memory").map(|memory| memory.promised_bytes)
        });
        let rates = model.node_rates.get(&node.node);
        rows.push(vec![
            node.node.to_string(),
            if node.cpus.is_empty() { "none".to_owned() } else { node.cpus.clone() },
            or_dash(base.map(|memory| size(memory.total_bytes))),
            or_dash(base.and_then(|memory| memory.free_bytes).map(size)),
            or_dash(promised.map(size)),
            or_dash(rates.map(|(local, _)| rate(*local))),
            or_dash(rates.map(|(_, remote)| rate(*remote))),
        ]);
    }
    let mut text = columns(&rows);
    // The name comes last: only that may be of any length.
    let mut order: Vec<Column> =
        Column::ALL.into_iter().filter(|column| !matches!(column, Column::Name | Column::Bar)).collect();
    order.push(Column::Name);
    let mut rows = vec![order.iter().map(|column| column.title().to_owned()).collect::<Vec<_>>()];
    for (_, found) in choice.rows(model) {
        rows.push(order.iter().map(|column| column.cell(found).trim_end().to_owned()).collect());
    }
    text.push('\n');
    text.push_str(&columns(&rows));
    text
}

/// What is printed as JSON, a line each time.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report<'a> {
    nodes: Vec<NodeReport<'a>>,
    workloads: Vec<WorkloadReport<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeReport<'a> {
    #[serde(flatten)]
    node: &'a Node,
    #[serde(skip_serializing_if = "Option::is_none")]
    local_bytes_per_second: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_bytes_per_second: Option<f64>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WorkloadReport<'a> {
    #[serde(flatten)]
    workload: &'a Workload,
    /// Bytes per second; absent where they are not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_per_second: Option<Rates>,
    /// The nodes promised to it; absent without a guarantee.
    #[serde(skip_serializing_if = "Option::is_none")]
    promised_nodes: Option<String>,
    /// The share of its memory that is near; absent where that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    local_share: Option<f64>,
}

fn report<'a>(model: &'a Model, choice: &Choice) -> Report<'a> {
    let nodes = model.nodes.iter().map(|node| {
        let rates = model.node_rates.get(&node.node);
        NodeReport {
            node,
            local_bytes_per_second: rates.map(|(local, _)| *local),
            remote_bytes_per_second: rates.map(|(_, remote)| *remote),
        }
    });
    let workloads = choice.rows(model).into_iter().map(|(_, found)| WorkloadReport {
        workload: &found.workload,
        bytes_per_second: found.rates,
        promised_nodes: found.promised_nodes().map(|nodes| nodes.to_string()),
        local_share: found.local_share(),
    });
    Report { nodes: nodes.collect(), workloads: workloads.collect() }
}
