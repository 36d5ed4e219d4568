//! `numaward get` and `numaward describe`: guarantees, and the details of one workload.

use std::{collections::BTreeSet, fmt::Write as _, sync::Arc};

use anyhow::bail;
use numaward_api::{Allocation, Drift, DriftState, Event, Target, Workload, WorkloadNode, Workloads};
use serde::Serialize;

use crate::{
    args::EventFilterArgs,
    client::Server,
    events, explain, residency,
    table::{columns, or_dash, row, setting, size, table},
};

/// Maximum number of events of a workload.
const MAX_EVENTS: u16 = 20;

/// Fetches the cgroups of workloads whose memory is off its guaranteed nodes, by the daemon's verdict.
pub(crate) async fn broken(server: &Server) -> anyhow::Result<BTreeSet<String>> {
    let Workloads { workloads } = server.get("/api/v1/workloads").await?;
    let is_broken = |of: &Workload| of.residency.iter().any(|of| of.broken);
    Ok(workloads.into_iter().filter(is_broken).filter_map(|of| of.cgroup).collect())
}

/// Renders guarantees as a table; `wide` adds target, policy, drift and cgroup. `broken` has the cgroups of workloads whose
/// memory is off its nodes.
pub(crate) fn render(allocations: &[Arc<Allocation>], broken: &BTreeSet<String>, wide: bool) -> String {
    if allocations.is_empty() {
        return "there are no guarantees\n".to_owned();
    }
    let mut titles = row(["NAME", "CPUS", "NODES", "MEMORY", "STATE"]);
    if wide {
        titles.extend(row(["TARGET", "POLICY", "DRIFT", "CGROUP"]));
    }
    let rows = allocations.iter().map(|allocation| {
        let memory: u64 = allocation.memory.iter().map(|block| block.bytes).sum();
        let cpus = if allocation.cpus.is_empty() { "shared" } else { &allocation.cpus };
        let mut cells = row([
            &allocation.name,
            cpus,
            &or_dash(Some(&allocation.nodes).filter(|nodes| !nodes.is_empty())),
            &or_dash((memory > 0).then(|| size(memory))),
            state(allocation, broken.contains(&allocation.cgroup)),
        ]);
        if wide {
            let target = match &allocation.target {
                Target::Exec => "command".to_owned(),
                Target::Cgroup(_) => "cgroup".to_owned(),
                Target::Unit(unit) => format!("unit {unit}"),
                Target::Container(id) => format!("container {}/{}/{}", id.namespace, id.pod, id.container),
            };
            let is_present = |drift: &&Drift| drift.state != DriftState::Repaired;
            let drift: Vec<&str> =
                allocation.drift.iter().filter(is_present).map(|drift| drift.knob.as_str()).collect();
            let drift = if drift.is_empty() { "none".to_owned() } else { drift.join(" ") };
            cells.extend([target, or_dash(allocation.policy), drift, allocation.cgroup.clone()]);
        }
        cells
    });
    columns(&std::iter::once(titles).chain(rows).collect::<Vec<_>>())
}

/// Returns the state of a guarantee in a word.
fn state(allocation: &Allocation, is_broken: bool) -> &'static str {
    match allocation {
        Allocation { releasing: true, .. } => "releasing",
        Allocation { enforced: false, .. } => "not enforced",
        Allocation { stopped: true, .. } => "stopped",
        Allocation { stalled: true, .. } => "stalled",
        Allocation { missing: Some(_), .. } => "incomplete",
        _ if is_broken => "off its nodes",
        _ => "held",
    }
}

/// Details of a workload.
#[derive(Debug, Serialize)]
pub(crate) struct Description {
    #[serde(skip_serializing_if = "Option::is_none")]
    allocation: Option<Arc<Allocation>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    workload: Option<Workload>,
    events: Vec<Event>,
}

/// Fetches the details of a workload.
pub(crate) async fn describe(server: &Server, name: &str) -> anyhow::Result<Description> {
    let Workloads { workloads } = server.get("/api/v1/workloads").await?;
    // A daemon that only observes has no guarantees.
    let allocations = server.allocations().await.ok();
    let allocation =
        allocations.and_then(|all| all.allocations.into_iter().find(|allocation| allocation.name == name));
    // A guarantee can have another name than the workload of its cgroup.
    let is_described = |workload: &Workload| match &allocation {
        Some(allocation) => workload.cgroup.as_deref() == Some(allocation.cgroup.as_str()),
        None => workload.workload == name,
    };
    let workload = workloads.into_iter().find(is_described);
    if allocation.is_none() && workload.is_none() {
        bail!("there is no workload named {name:?}; `numaward get` and `numaward top --once` list them");
    }
    let label = workload.as_ref().map_or(name, |workload| &workload.workload);
    let filter =
        EventFilterArgs { workload: Some(label.to_owned()), kind: None, since: None, limit: MAX_EVENTS };
    let events = events::page(server, &filter).await?.events;
    Ok(Description { allocation, workload, events })
}

/// Renders the details of a workload.
pub(crate) fn render_description(description: &Description) -> String {
    let mut parts = Vec::new();
    parts.push(match &description.allocation {
        Some(allocation) => {
            let mut text = explain::render_allocation(allocation);
            if !allocation.settings.is_empty() {
                let rows = allocation.settings.iter().map(|(knob, value)| row([knob, &setting(knob, value)]));
                let _ = write!(text, "\n{}", table(["KNOB", "VALUE"], rows));
            }
            text
        }
        None => "the workload has no guarantee\n".to_owned(),
    });
    if let Some(workload) = &description.workload {
        let cgroup = workload.cgroup.as_deref().unwrap_or("(removed)");
        let mut text = format!("{}: {}, cgroup {cgroup}\n", workload.workload, workload.kind);
        if !workload.nodes.is_empty() {
            let _ = write!(text, "\n{}", memory(&workload.nodes));
        }
        if !workload.residency.is_empty() {
            let _ = write!(text, "\n{}", residency::render(&workload.residency));
        }
        if let Some(kills) = workload.oom_kills.filter(|kills| *kills > 0) {
            let _ = writeln!(text, "OOM kills: {kills}");
        }
        if let Some(moved) = &workload.tiering {
            let (demoted, promoted) = (size(moved.demoted_bytes), size(moved.promoted_bytes));
            let _ = writeln!(text, "moved to slower memory: {demoted}, to faster memory: {promoted}");
        }
        parts.push(text);
    }
    if !description.events.is_empty() {
        parts.push(events::render(&description.events));
    }
    parts.join("\n")
}

fn memory(nodes: &[WorkloadNode]) -> String {
    let rows = nodes.iter().map(|node| {
        let resident = node.resident.map(|bytes| {
            bytes.anon_bytes.saturating_add(bytes.file_bytes).saturating_add(bytes.kernel_bytes)
        });
        row([
            &node.node.to_string(),
            &or_dash(resident.map(size)),
            &or_dash(node.allocated.map(|bytes| size(bytes.local_bytes))),
            &or_dash(node.allocated.map(|bytes| size(bytes.remote_bytes))),
            &or_dash(node.missed_bytes.map(size)),
        ])
    });
    table(["NODE", "RESIDENT", "ALLOCATED LOCAL", "REMOTE", "MISSED"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_of_misplaced_memory_is_the_daemons_verdict() {
        let held = Allocation { enforced: true, ..Allocation::default() };
        let stopped = Allocation { stopped: true, ..held.clone() };
        for (allocation, is_broken, word) in
            [(&held, false, "held"), (&held, true, "off its nodes"), (&stopped, true, "stopped")]
        {
            assert_eq!(state(allocation, is_broken), word);
        }
    }
}
