//! `numaward get` and `numaward describe`: what is promised, and all about one workload.

use std::{fmt::Write as _, sync::Arc};

use anyhow::bail;
use numaward_api::{Allocation, Drift, DriftState, Event, Target, Workload, WorkloadNode, Workloads};
use serde::Serialize;

use crate::{
    args::EventChoice,
    client::Server,
    events, explain,
    table::{columns, or_dash, row, setting, size, table},
};

/// Events of a workload that are shown.
const EVENTS: u16 = 20;

/// Allocations as a table; with `wide` also how they are held.
pub(crate) fn render(allocations: &[Arc<Allocation>], wide: bool) -> String {
    if allocations.is_empty() {
        return "nothing is promised\n".to_owned();
    }
    let mut titles = row(["NAME", "CPUS", "NODES", "MEMORY", "STATE"]);
    if wide {
        titles.extend(row(["TARGET", "POLICY", "DRIFT", "CGROUP"]));
    }
    let rows = allocations.iter().map(|held| {
        let memory: u64 = held.memory.iter().map(|block| block.bytes).sum();
        let cpus = if held.cpus.is_empty() { "shared" } else { &held.cpus };
        let mut cells = row([
            &held.name,
            cpus,
            &or_dash(Some(&held.nodes).filter(|nodes| !nodes.is_empty())),
            &or_dash((memory > 0).then(|| size(memory))),
            state(held),
        ]);
        if wide {
            let target = match &held.target {
                Target::Exec => "command".to_owned(),
                Target::Cgroup(_) => "cgroup".to_owned(),
                Target::Unit(unit) => format!("unit {unit}"),
                Target::Container(of) => format!("container {}/{}/{}", of.namespace, of.pod, of.container),
            };
            let stands = |drift: &&Drift| drift.state != DriftState::Repaired;
            let drift: Vec<&str> =
                held.drift.iter().filter(stands).map(|drift| drift.knob.as_str()).collect();
            let drift = if drift.is_empty() { "none".to_owned() } else { drift.join(" ") };
            cells.extend([target, or_dash(held.policy), drift, held.cgroup.clone()]);
        }
        cells
    });
    columns(&std::iter::once(titles).chain(rows).collect::<Vec<_>>())
}

/// How an allocation is, in a word.
fn state(held: &Allocation) -> &'static str {
    match held {
        Allocation { releasing: true, .. } => "releasing",
        Allocation { enforced: false, .. } => "dry run",
        Allocation { stopped: true, .. } => "stopped",
        Allocation { stalled: true, .. } => "stalled",
        Allocation { missing: Some(_), .. } => "incomplete",
        _ => "held",
    }
}

/// All that is known of a workload.
#[derive(Debug, Serialize)]
pub(crate) struct Description {
    #[serde(skip_serializing_if = "Option::is_none")]
    allocation: Option<Arc<Allocation>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    workload: Option<Workload>,
    events: Vec<Event>,
}

/// Asks for all that is known of a workload.
pub(crate) async fn describe(server: &Server, name: &str) -> anyhow::Result<Description> {
    let Workloads { workloads } = server.get("/api/v1/workloads").await?;
    // Not every host can promise.
    let held = server.allocations().await.ok();
    let allocation = held.and_then(|held| held.allocations.into_iter().find(|held| held.name == name));
    // An allocation may have another name than the workload that its cgroup is.
    let is_this = |workload: &Workload| match &allocation {
        Some(held) => workload.cgroup.as_deref() == Some(held.cgroup.as_str()),
        None => workload.workload == name,
    };
    let workload = workloads.into_iter().find(is_this);
    if allocation.is_none() && workload.is_none() {
        bail!("there is no workload named {name:?}; `numaward get` and `numaward top --once` list them");
    }
    let label = workload.as_ref().map_or(name, |workload| &workload.workload);
    let choice = EventChoice { workload: Some(label.to_owned()), kind: None, since: None, limit: EVENTS };
    let events = events::page(server, &choice).await?.events;
    Ok(Description { allocation, workload, events })
}

/// A description for people.
pub(crate) fn render_description(of: &Description) -> String {
    let mut parts = Vec::new();
    parts.push(match &of.allocation {
        Some(allocation) => {
            let mut text = explain::render_allocation(allocation);
            if !allocation.settings.is_empty() {
                let rows = allocation.settings.iter().map(|(knob, value)| row([knob, &setting(knob, value)]));
                let _ = write!(text, "\n{}", table(["KNOB", "VALUE"], rows));
            }
            text
        }
        None => "nothing is promised to it\n".to_owned(),
    });
    if let Some(workload) = &of.workload {
        let cgroup = workload.cgroup.as_deref().unwrap_or("(removed)");
        let mut text = format!("{}: {}, cgroup {cgroup}\n", workload.workload, workload.kind);
        if !workload.nodes.is_empty() {
            let _ = write!(text, "\n{}", memory(&workload.nodes));
        }
        if let Some(kills) = workload.oom_kills.filter(|kills| *kills > 0) {
            let _ = writeln!(text, "processes that the OOM killer took: {kills}");
        }
        if let Some(moved) = &workload.tiering {
            let (demoted, promoted) = (size(moved.demoted_bytes), size(moved.promoted_bytes));
            let _ = writeln!(text, "moved to slower memory: {demoted}, to faster memory: {promoted}");
        }
        parts.push(text);
    }
    if !of.events.is_empty() {
        parts.push(events::render(&of.events));
    }
    parts.join("\n")
}

fn memory(nodes: &[WorkloadNode]) -> String {
    let rows = nodes.iter().map(|node| {
        let resident = node
            .resident
            .map(|of| of.anon_bytes.saturating_add(of.file_bytes).saturating_add(of.kernel_bytes));
        row([
            &node.node.to_string(),
            &or_dash(resident.map(size)),
            &or_dash(node.allocated.map(|of| size(of.local_bytes))),
            &or_dash(node.allocated.map(|of| size(of.remote_bytes))),
            &or_dash(node.missed_bytes.map(size)),
        ])
    });
    table(["NODE", "RESIDENT", "ALLOCATED LOCAL", "REMOTE", "MISSED"], rows)
}
