//! `numaward get` and `numaward describe`: lists, and the details of one workload.

use std::{collections::BTreeSet, fmt::Write as _, iter, sync::Arc};

use anyhow::bail;
use numaward_api::{
    Allocation, Allocations, Drift, DriftState, Event, EventPage, Node, NodeCapacity, Nodes, ReservedClaim,
    Target, Workload, WorkloadNode, Workloads,
};
use numaward_config::yaml;
use serde::Serialize;

use crate::{
    args::{ListFormat, ListKind},
    client::Server,
    events::{self, EventNames},
    explain, residency,
    table::{columns, or_dash, row, seconds, setting, size, table},
    text::{clean_json, clean_lines, clean_value},
    workload_names::{
        WORKLOADS_PATH, allocation_of, event_names, is_named, is_workload_named, unknown_workload,
    },
};

/// Maximum number of events in the details of a workload.
const MAX_DESCRIBED_EVENTS: u16 = 20;

/// A list in the form of the API, and as a table.
pub(crate) struct Listing {
    document: Document,
    titles: Vec<String>,
    /// Cells of each object; the first one is its name.
    rows: Vec<Vec<String>>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Document {
    Guarantees(Allocations),
    Workloads(Workloads),
    Nodes(Nodes),
    Events(EventPage),
}

impl Listing {
    /// Formats the list.
    pub(crate) fn text(&self, format: ListFormat) -> anyhow::Result<String> {
        Ok(match (format, &self.document) {
            (ListFormat::Json, document) => {
                clean_json(&(serde_json::to_string_pretty(document)? + "\n")).into_owned()
            }
            (ListFormat::Yaml, document) => yaml(&clean_value(serde_json::to_value(document)?)),
            (ListFormat::Name, _) => {
                columns(&self.rows.iter().map(|row| row[..1].to_vec()).collect::<Vec<_>>())
            }
            (_, Document::Guarantees(_)) if self.rows.is_empty() => "there are no guarantees\n".to_owned(),
            _ => columns(&iter::once(&self.titles).chain(&self.rows).cloned().collect::<Vec<_>>()),
        })
    }
}

/// Fetches a list. `names` selects objects.
pub(crate) async fn list(
    server: &Server,
    kind: ListKind,
    names: &[String],
    format: ListFormat,
) -> anyhow::Result<Listing> {
    let wide = format == ListFormat::Wide;
    match kind {
        ListKind::Guarantees => {
            let mut held = server.allocations().await?;
            held.allocations =
                select(held.allocations, names, "guarantee", |held, name| is_named(held, name))?;
            held.claims.retain(|_| names.is_empty());
            // Only the table has the verdict.
            let is_table = matches!(format, ListFormat::Table | ListFormat::Wide);
            let verdicts = if is_table { Verdicts::fetch(server).await } else { Verdicts::default() };
            let mut titles = row(["NAME", "CPUS", "NODES", "MEMORY", "STATE"]);
            if wide {
                titles.extend(row(["TARGET", "POLICY", "DRIFT", "CGROUP"]));
            }
            let mut rows: Vec<_> = held
                .allocations
                .iter()
                .map(|allocation| guarantee_row(allocation, &verdicts, wide))
                .collect();
            // Other commands do not take the name of a claim.
            if is_table && names.is_empty() {
                let unused = held.claims.iter().filter(|claim| !claim.used);
                rows.extend(unused.map(|claim| claim_row(claim, wide)));
            }
            Ok(Listing { document: Document::Guarantees(held), titles, rows })
        }
        ListKind::Workloads => {
            let Workloads { workloads } = server.get(WORKLOADS_PATH).await?;
            // A daemon that only observes has no guarantees.
            let held = server.allocations().await.unwrap_or_default().allocations;
            let is_selected = |workload: &Workload, name: &str| is_workload_named(workload, &held, name);
            let workloads = select(workloads, names, "workload", is_selected)?;
            let mut titles = row(["NAME", "KIND", "RESIDENT", "NODES"]);
            if wide {
                titles.extend(row(["CGROUP"]));
            }
            let rows = workloads.iter().map(|workload| workload_row(workload, &held, wide)).collect();
            Ok(Listing { document: Document::Workloads(Workloads { workloads }), titles, rows })
        }
        ListKind::Nodes => {
            let mut nodes: Nodes = server.get("/api/v1/nodes").await?;
            let held = server.allocations().await.unwrap_or_default().nodes;
            nodes.nodes = select(nodes.nodes, names, "node", |node, name| node.node.to_string() == name)?;
            let rows = nodes.nodes.iter().map(|node| node_row(node, &held)).collect();
            let titles = row(["NODE", "CPUS", "TOTAL", "FREE", "GUARANTEED"]);
            Ok(Listing { document: Document::Nodes(nodes), titles, rows })
        }
        ListKind::Events => {
            let names = EventNames::fetch(server, names.to_vec()).await?;
            let page = events::latest(server, &names, events::DEFAULT_LIMIT).await?;
            let rows = page.events.iter().map(events::event_row).collect();
            Ok(Listing { document: Document::Events(page), titles: row(events::TITLES), rows })
        }
    }
}

/// Selects the objects with one of these names; all without names. Fails if an object is missing.
fn select<T>(
    objects: Vec<T>,
    names: &[String],
    kind: &str,
    is_named: impl Fn(&T, &str) -> bool,
) -> anyhow::Result<Vec<T>> {
    if let Some(missing) = names.iter().find(|name| !objects.iter().any(|object| is_named(object, name))) {
        bail!("there is no {kind} named {missing:?}");
    }
    let is_selected = |object: &T| names.is_empty() || names.iter().any(|name| is_named(object, name));
    Ok(objects.into_iter().filter(is_selected).collect())
}

/// Broken guarantees, by the daemon's verdict.
#[derive(Debug, Default)]
struct Verdicts {
    /// Cgroups of workloads with memory off their guaranteed nodes.
    misplaced: BTreeSet<String>,
    /// Cgroups of workloads with other tasks on their exclusive CPUs within the last minute.
    intruded: BTreeSet<String>,
}

impl Verdicts {
    /// Fetches the verdicts. The guarantees are known without them.
    async fn fetch(server: &Server) -> Self {
        match server.get::<Workloads>(WORKLOADS_PATH).await {
            Ok(Workloads { workloads }) => Self::new(&workloads),
            Err(error) => {
                let message = format!("numaward: whether the guarantees hold is not known: {error}");
                eprintln!("{}", clean_lines(&message));
                Self::default()
            }
        }
    }

    fn new(workloads: &[Workload]) -> Self {
        let cgroups = |is_selected: fn(&&Workload) -> bool| {
            workloads.iter().filter(is_selected).filter_map(|of| of.cgroup.clone()).collect()
        };
        Self {
            misplaced: cgroups(|of| of.residency.iter().any(|of| of.broken)),
            intruded: cgroups(|of| of.intruded_cpus.is_some()),
        }
    }
}

/// Returns the cells of a guarantee; `wide` adds target, policy, drift and cgroup.
fn guarantee_row(allocation: &Allocation, verdicts: &Verdicts, wide: bool) -> Vec<String> {
    let memory: u64 = allocation.memory.iter().map(|block| block.bytes).sum();
    let cpus = if allocation.cpus.is_empty() { "shared" } else { &allocation.cpus };
    let mut cells = row([
        &allocation.name,
        cpus,
        &or_dash(Some(&allocation.nodes).filter(|nodes| !nodes.is_empty())),
        &or_dash((memory > 0).then(|| size(memory))),
        state(allocation, verdicts),
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
}

/// Returns the cells of a reserved claim that no container uses yet.
fn claim_row(claim: &ReservedClaim, wide: bool) -> Vec<String> {
    let memory: u64 = claim.memory.iter().map(|block| block.bytes).sum();
    let cpus = if claim.cpus.is_empty() { "shared" } else { &claim.cpus };
    let mut cells = row([
        &format!("{}/{}", claim.namespace, claim.name),
        cpus,
        &claim.nodes,
        &or_dash((memory > 0).then(|| size(memory))),
        "reserved",
    ]);
    if wide {
        cells.extend(row([&format!("claim of pod {}", claim.pod_uid), "-", "none", "-"]));
    }
    cells
}

/// Returns the cells of a workload: its resident memory, and its guaranteed nodes; `wide` adds the cgroup.
fn workload_row(workload: &Workload, held: &[Arc<Allocation>], wide: bool) -> Vec<String> {
    let allocation = allocation_of(workload, held);
    let resident: Option<u64> = workload.nodes.iter().filter_map(resident).reduce(u64::saturating_add);
    let nodes = allocation.map(|allocation| &allocation.nodes).filter(|nodes| !nodes.is_empty());
    let mut cells = row([
        allocation.map_or(&workload.workload, |allocation| &allocation.name),
        &workload.kind,
        &or_dash(resident.map(size)),
        &or_dash(nodes),
    ]);
    if wide {
        cells.push(or_dash(workload.cgroup.as_ref()));
    }
    cells
}

/// Returns the cells of a node, with its guaranteed memory.
fn node_row(node: &Node, held: &[NodeCapacity]) -> Vec<String> {
    let memory = node.memory.iter().find(|memory| memory.kind == "memory");
    let held = held.iter().find(|held| held.node == node.node);
    let held = held.and_then(|held| held.memory.iter().find(|memory| memory.kind == "memory"));
    row([
        &node.node.to_string(),
        if node.cpus.is_empty() { "none" } else { &node.cpus },
        &or_dash(memory.map(|memory| size(memory.total_bytes))),
        &or_dash(memory.and_then(|memory| memory.free_bytes).map(size)),
        &or_dash(held.map(|memory| size(memory.guaranteed_bytes))),
    ])
}

/// Returns the state of a guarantee in a word.
fn state(allocation: &Allocation, Verdicts { misplaced, intruded }: &Verdicts) -> &'static str {
    match allocation {
        Allocation { releasing: true, .. } => "releasing",
        Allocation { enforced: false, .. } => "not enforced",
        Allocation { stopped: true, .. } => "stopped",
        Allocation { missing: Some(_), .. } => "incomplete",
        Allocation { cgroup, .. } if misplaced.contains(cgroup) => "off its nodes",
        Allocation { cgroup, .. } if intruded.contains(cgroup) => "intruders",
        Allocation { .. } if allocation.present_drift().next().is_some() => "changed",
        Allocation { stalled: true, .. } => "stalled",
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
    let Workloads { workloads } = server.get(WORKLOADS_PATH).await?;
    // A daemon that only observes has no guarantees.
    let held = server.allocations().await.unwrap_or_default().allocations;
    let names = EventNames::known(event_names(&[name.to_owned()], &workloads, &held));
    let workload = workloads.into_iter().find(|workload| is_workload_named(workload, &held, name));
    let of_workload = workload.as_ref().and_then(|workload| allocation_of(workload, &held));
    let allocation = of_workload.or_else(|| held.iter().find(|held| is_named(held, name))).cloned();
    if allocation.is_none() && workload.is_none() {
        return Err(unknown_workload(name));
    }
    let events = events::latest(server, &names, MAX_DESCRIBED_EVENTS).await?.events;
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

/// Returns the resident memory on a node, if it is known.
fn resident(node: &WorkloadNode) -> Option<u64> {
    let bytes = node.resident?;
    Some(bytes.anon_bytes.saturating_add(bytes.file_bytes).saturating_add(bytes.kernel_bytes))
}

fn memory(nodes: &[WorkloadNode]) -> String {
    let rows = nodes.iter().map(|node| {
        row([
            &node.node.to_string(),
            &or_dash(resident(node).map(size)),
            &or_dash(node.allocated.map(|bytes| size(bytes.local_bytes))),
            &or_dash(node.allocated.map(|bytes| size(bytes.remote_bytes))),
            &or_dash(node.missed_bytes.map(size)),
            &or_dash(node.cpu_micros.map(seconds)),
        ])
    });
    table(["NODE", "RESIDENT", "ALLOCATED LOCAL", "REMOTE", "MISSED", "CPU SECONDS"], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_names_broken_guarantee() {
        let held = Allocation {
            name: "guarded".to_owned(),
            cgroup: "/numaward/guarded".to_owned(),
            cpus: "1".to_owned(),
            enforced: true,
            ..Allocation::default()
        };
        let stopped = Allocation { stopped: true, ..held.clone() };
        let stalled = Allocation { stalled: true, ..held.clone() };
        let workload = |is_broken: bool, intruded_cpus: Option<&str>| -> Workload {
            let memory =
                |bytes: u64| serde_json::json!({"anonBytes": bytes, "shmemBytes": 0, "fileBytes": 0});
            let residency =
                serde_json::json!({"kind": "memory", "on": memory(1), "off": memory(1), "broken": is_broken});
            let workload = serde_json::json!({
                "workload": "numaward/guarded", "kind": "command", "cgroup": held.cgroup, "counters": "none",
                "nodes": [], "residency": [residency], "intrudedCpus": intruded_cpus,
            });
            serde_json::from_value(workload).unwrap()
        };
        for (allocation, is_broken, intruded_cpus, word) in [
            (&held, false, None, "held"),
            (&held, false, Some("1"), "intruders"),
            (&stalled, false, None, "stalled"),
            (&stalled, false, Some("1"), "intruders"),
            (&held, true, Some("1"), "off its nodes"),
            (&stopped, true, Some("1"), "stopped"),
        ] {
            let verdicts = Verdicts::new(&[workload(is_broken, intruded_cpus)]);
            assert_eq!(state(allocation, &verdicts), word, "{verdicts:?}");
        }
    }

    #[test]
    fn claim_shows_what_is_reserved() {
        let claim = ReservedClaim {
            namespace: "ns".to_owned(),
            name: "db-main".to_owned(),
            pod_uid: "u1".to_owned(),
            cpus: "2-3".to_owned(),
            nodes: "0".to_owned(),
            memory: Vec::new(),
            used: false,
        };
        assert_eq!(claim_row(&claim, false), ["ns/db-main", "2-3", "0", "-", "reserved"]);
        let shared = ReservedClaim { cpus: String::new(), ..claim };
        assert_eq!(
            claim_row(&shared, true)[1..],
            ["shared", "0", "-", "reserved", "claim of pod u1", "-", "none", "-"]
        );
    }
}
