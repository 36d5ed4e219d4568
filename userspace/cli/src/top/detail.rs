//! Details of a workload or a node, and the help: lines that the user scrolls through.

use std::{cmp::Reverse, collections::BTreeMap, iter};

use numaward_api::{Counters, ExclusiveCpu, Node, Pressure, Tiering, Workload};
use numaward_topology::{CpuId, CpuSet};
use ratatui::text::{Line, Span};

use super::{
    accesses,
    draw::{BOLD, Palette, event_line, memory_marks},
    list::{percent, rate},
    model::{MAX_HISTORY_SAMPLES, Rates, TopModel, WorkloadRow},
};
use crate::{
    explain::render_allocation,
    residency,
    table::{columns, or_dash, row, seconds, setting, size, table},
    text::clean,
};

/// Converts text that can contain names of other programs into lines.
fn lines_of(text: &str) -> Vec<Line<'static>> {
    text.lines().map(|line| Line::raw(clean(line).into_owned())).collect()
}

fn titled(title: &str, lines: impl IntoIterator<Item = Line<'static>>) -> Vec<Line<'static>> {
    iter::once(Line::styled(title.to_owned(), BOLD)).chain(lines).collect()
}

/// Renders a workload: its memory, its guarantee with reasons, and its events.
pub(crate) fn workload(model: &TopModel, key: &str, palette: Palette, width: usize) -> Vec<Line<'static>> {
    let Some(found) = model.rows.get(key) else {
        if model.samples == 0 {
            return vec![Line::raw("waiting for the first sample")];
        }
        return vec![Line::raw(format!("The workload {} no longer exists.", clean(key)))];
    };
    let workload = &found.workload;
    let mut parts = vec![
        titled(&clean(found.name()), lines_of(&facts(model, found))),
        lines_of(&by_node(workload)),
        history(found, model.step_seconds as usize, palette, width),
    ];
    if workload.nodes.iter().any(|node| !node.hugepages.is_empty()) {
        parts.push(titled("Hugepages", lines_of(&hugepages(workload))));
    }
    if let Some((text, table)) = workload.activity.as_ref().and_then(accesses::describe) {
        parts.push(titled("Accesses", lines_of(&format!("{text}\n{table}"))));
    }
    match &found.allocation {
        None => parts.push(lines_of("It has no guarantee: pages on other nodes are remote, not missed.")),
        Some(allocation) => {
            parts.push(titled("Guarantee", lines_of(&render_allocation(allocation))));
            if !workload.residency.is_empty() {
                parts.push(lines_of(&residency::render(&workload.residency)));
            }
            if !allocation.settings.is_empty() {
                let rows = allocation.settings.iter().map(|(knob, value)| row([knob, &setting(knob, value)]));
                parts.push(lines_of(&table(["KNOB", "WANTED"], rows)));
            }
        }
    }
    let events =
        model.events.iter().filter(|event| event.workload.as_ref().is_some_and(|name| found.is_called(name)));
    let mut events: Vec<_> = events.map(|event| event_line(palette, event)).collect();
    if events.is_empty() {
        events.push(Line::raw("no events, as far as they are known"));
    }
    parts.push(titled("Events", events));
    parts.join(&Line::default())
}

fn facts(model: &TopModel, found: &WorkloadRow) -> String {
    let workload = &found.workload;
    let container = workload.container.as_ref();
    let counters = match workload.counters {
        Counters::Own => "its own",
        Counters::Other => "shared with other workloads, as no slot is free: its allocations are not known",
        Counters::None => "none: no probe is active",
        Counters::Removed => "final values: its cgroup was removed",
    };
    let basis = if found.guaranteed_nodes().is_some() {
        "of its user memory is on the guaranteed nodes"
    } else {
        "of its allocated memory was local"
    };
    let allocates = |rates: Rates| format!("local {}, remote {}", rate(rates.local), rate(rates.remote));
    let tiers = |moved: Tiering| {
        format!("{} demoted, {} promoted", size(moved.demoted_bytes), size(moved.promoted_bytes))
    };
    let pressure = |lost: Pressure| {
        let (waiting, stalled) = (seconds(lost.waiting_micros), seconds(lost.stalled_micros));
        format!("waited {waiting} s for memory, all of it {stalled} s")
    };
    let facts = [
        ("kind", Some(workload.kind.clone())),
        ("cgroup", workload.cgroup.clone()),
        ("container", container.map(|container| container.id.clone())),
        ("pod", container.and_then(|container| container.pod_uid.clone())),
        ("counters", Some(counters.to_owned())),
        ("local", found.local_share().map(|share| format!("{} {basis}", percent(share)))),
        ("allocates", found.rates.map(allocates)),
        ("pressure", workload.pressure.map(pressure)),
        ("OOM kills", workload.oom_kills.filter(|kills| *kills > 0).map(|kills| kills.to_string())),
        ("tiers", workload.tiering.map(tiers)),
        ("intruders", intruders(model, found)),
    ];
    let known = facts.into_iter().filter_map(|(name, fact)| Some(row([name, &fact?])));
    columns(&known.collect::<Vec<_>>())
}

/// Describes the use of the exclusive CPUs by other programs; `None` if the workload has no such CPUs, or the use is
/// not measured.
fn intruders(model: &TopModel, found: &WorkloadRow) -> Option<String> {
    let cpus: Vec<&ExclusiveCpu> =
        model.status.as_ref()?.exclusive_cpus.iter().filter(|cpu| found.is_called(&cpu.workload)).collect();
    if cpus.is_empty() {
        return None;
    }
    let sum = |time: fn(&ExclusiveCpu) -> u64| seconds(cpus.iter().map(|cpu| time(cpu)).sum());
    Some(format!(
        "on its exclusive CPUs: workloads {} s, host {} s, kernel threads {} s; itself {} s",
        sum(|cpu| cpu.workload_micros),
        sum(|cpu| cpu.host_micros),
        sum(|cpu| cpu.kernel_thread_micros),
        sum(|cpu| cpu.own_micros),
    ))
}

fn by_node(workload: &Workload) -> String {
    let or_dash = |bytes: Option<u64>| or_dash(bytes.map(size));
    let rows = workload.nodes.iter().map(|node| {
        let (resident, allocated) = (node.resident, node.allocated);
        vec![
            node.node.to_string(),
            or_dash(resident.map(|bytes| bytes.anon_bytes)),
            or_dash(resident.map(|bytes| bytes.file_bytes)),
            or_dash(resident.map(|bytes| bytes.kernel_bytes)),
            or_dash(allocated.map(|bytes| bytes.local_bytes)),
            or_dash(allocated.map(|bytes| bytes.remote_bytes)),
            or_dash(node.missed_bytes),
            node.cpu_micros.map_or_else(|| "-".to_owned(), seconds),
        ]
    });
    table(["NODE", "ANON", "FILE", "KERNEL", "LOCAL", "REMOTE", "MISSED", "CPU SECONDS"], rows)
}

fn hugepages(workload: &Workload) -> String {
    let or_dash = |bytes: Option<u64>| or_dash(bytes.map(size));
    let pages =
        workload.nodes.iter().flat_map(|node| node.hugepages.iter().map(move |pages| (node.node, pages)));
    let rows = pages.map(|(node, pages)| {
        vec![
            pages.size.clone(),
            node.to_string(),
            or_dash(pages.resident_bytes),
            or_dash(pages.allocated.map(|bytes| bytes.local_bytes)),
            or_dash(pages.allocated.map(|bytes| bytes.remote_bytes)),
            or_dash(pages.missed_bytes),
        ]
    });
    table(["SIZE", "NODE", "RESIDENT", "LOCAL", "REMOTE", "MISSED"], rows)
}

/// Draws the rates of the latest samples, each relative to the highest one.
fn history(found: &WorkloadRow, step: usize, palette: Palette, width: usize) -> Vec<Line<'static>> {
    if found.totals.allocated.is_none() {
        return vec![Line::raw("Its allocations are not counted.")];
    }
    let cells = width.saturating_sub(30).clamp(1, MAX_HISTORY_SAMPLES);
    let latest: Vec<Rates> = found.history.iter().rev().take(cells).rev().copied().collect();
    let most = latest.iter().fold(1.0, |most: f64, rates| most.max(rates.local).max(rates.remote));
    let marks: &[char] = if palette.unicode {
        &[' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']
    } else {
        &[' ', '.', ':', '-', '=', '+', '*', '#', '@']
    };
    let line = |name: &str, pick: fn(&Rates) -> f64| {
        let highest = latest.iter().map(pick).fold(0.0, f64::max);
        let marks: String = latest.iter().map(|rates| mark(marks, pick(rates) / most)).collect();
        Line::raw(format!("{name:<8}{marks:>cells$}  at most {}", rate(highest)))
    };
    let lines = [line("local", |rates| rates.local), line("remote", |rates| rates.remote)];
    titled(&format!("Allocation in the last {} s", latest.len() * step), lines)
}

fn mark(marks: &[char], share: f64) -> char {
    let highest = marks.len() - 1;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share from 0 to 1 of a handful"
    )]
    let at = (share * highest as f64).ceil() as usize;
    marks[at.min(highest)]
}

/// Returns the exclusive CPUs of a node, each with its workload.
pub(crate) fn exclusive_cpus<'a>(model: &'a TopModel, node: &Node) -> BTreeMap<CpuId, &'a str> {
    let list = |text: &str| text.parse::<CpuSet>().unwrap_or_default();
    let here = list(&node.cpus);
    let allocations = model.allocations.iter().flat_map(|all| &all.allocations);
    let cpus_of =
        |allocation: &numaward_api::Allocation| &list(&allocation.cpus) | &list(&allocation.hidden_cpus);
    allocations
        .flat_map(|allocation| {
            cpus_of(allocation).iter().map(|cpu| (cpu, &*allocation.name)).collect::<Vec<_>>()
        })
        .filter(|(cpu, _)| here.contains(*cpu))
        .collect()
}

/// Renders a node: its CPUs with their workloads, its memory by kind, and the workloads with memory on it.
pub(crate) fn node(model: &TopModel, id: u32) -> Vec<Line<'static>> {
    let Some(node) = model.nodes.iter().find(|node| node.node == id) else {
        return vec![Line::raw(format!("Node {id} no longer exists."))];
    };
    let cpus = if node.cpus.is_empty() { "none: memory only" } else { &node.cpus };
    let mut facts = vec![row(["CPUs", cpus])];
    if let Some(machine) = model.topology.nodes.iter().find(|node| node.node == id) {
        let distances: Vec<String> =
            machine.distances.iter().map(|(node, distance)| format!("{distance} to node {node}")).collect();
        facts.push(row(["distances", &distances.join(", ")]));
    }
    let mut parts = vec![titled(&format!("Node {id}"), lines_of(&columns(&facts)))];

    let mut owners: BTreeMap<&str, CpuSet> = BTreeMap::new();
    for (cpu, owner) in exclusive_cpus(model, node) {
        owners.entry(owner).or_default().insert(cpu);
    }
    if !owners.is_empty() {
        let rows: Vec<_> = owners.iter().map(|(owner, cpus)| row([&cpus.to_string(), owner])).collect();
        parts.push(titled("Exclusive CPUs", lines_of(&columns(&rows))));
    }

    let rows = node.memory.iter().map(|memory| {
        let guarantees = model.node_guarantees(id, &memory.kind);
        let or_dash = |bytes: Option<u64>| or_dash(bytes.map(size));
        vec![
            memory.kind.clone(),
            size(memory.total_bytes),
            or_dash(memory.free_bytes),
            or_dash(guarantees.map(|memory| memory.reserved_bytes)),
            or_dash(guarantees.map(|memory| memory.guaranteed_bytes)),
            or_dash(guarantees.map(|memory| memory.free_bytes)),
        ]
    });
    let memory = table(["KIND", "TOTAL", "NOT IN USE", "RESERVED", "GUARANTEED", "AVAILABLE"], rows);
    parts.push(titled("Memory", lines_of(&memory)));

    let mut here: Vec<(u64, &WorkloadRow)> = model
        .rows
        .values()
        .filter_map(|row| Some((*row.totals.resident.as_ref()?.get(&id)?, row)))
        .filter(|(bytes, _)| *bytes > 0)
        .collect();
    here.sort_by_key(|(bytes, row)| (Reverse(*bytes), row.workload.key()));
    let rows: Vec<_> = here.iter().map(|(bytes, found)| row([&size(*bytes), found.name()])).collect();
    parts.push(titled("Workloads with memory on this node", lines_of(&columns(&rows))));
    parts.join(&Line::default())
}

/// Renders the help: keys, columns and marks.
pub(crate) fn help(palette: Palette, is_recorded: bool) -> Vec<Line<'static>> {
    let replay = [
        ("t T", "the next moment, the previous one"),
        ("] [", "a minute forward, a minute back"),
        ("n N", "the next moment with an event, the previous one"),
        ("b e", "the beginning, the end"),
        ("p", "play, pause"),
    ];
    let keys = [
        ("Up Down PgUp PgDn Home End", "move; also j and k"),
        ("Tab", "the next pane: workloads, nodes, events"),
        ("Enter", "open the workload or node; of an event, its workload"),
        ("Esc q", "back; q on the first screen and Ctrl-C everywhere: quit"),
        ("s S", "sort by the next column, or the previous one"),
        ("r", "reverse the order"),
        ("/", "filter by name, kind or cgroup; node:1 for memory on node 1"),
        ("g", "only workloads with a guarantee"),
        ("Ctrl-Z", "suspend; fg continues"),
    ];
    let columns_help = [
        ("NODES", "the guaranteed nodes; - without a guarantee"),
        ("BY NODE", "memory by node: each digit is a node's share"),
        ("RESIDENT", "memory that the workload has now (memory.numa_stat)"),
        ("LOCAL", "with a guarantee: share of user memory on its nodes. !! is broken: by"),
        ("", "memory elsewhere, others on its exclusive CPUs, or changed settings;"),
        ("", "without: share of allocated memory that was local. ! needs a look"),
        ("LOCAL/S", "user memory allocated by a CPU of the page's node"),
        ("REMOTE/S", "user memory allocated by a CPU of another node"),
        ("ACCESSES", "other nodes' share of the pages touched, by scan; ~ is an estimate"),
        ("", "of accesses; a word says why there are no scans: off, mode2, cpuset,"),
        ("", "bound"),
        ("MISSED", "user memory placed outside the guaranteed nodes, in all"),
        ("-", "not known: it is not counted, or the first second has not passed"),
    ];
    let table = |rows: &[(&str, &str)]| {
        lines_of(&columns(&rows.iter().map(|(a, b)| row([a, b])).collect::<Vec<_>>()))
    };
    let marks = memory_marks(palette).map(|(mark, name, style)| {
        Line::from(vec![Span::styled(mark, style), Span::raw(format!("  {name}"))])
    });
    let replay = if is_recorded { titled("Keys of a recording", table(&replay)) } else { Vec::new() };
    let mut parts = vec![
        titled("Keys", table(&keys)),
        replay,
        titled("Columns", table(&columns_help)),
        titled("Memory of a node", marks),
    ];
    parts.retain(|part| !part.is_empty());
    parts.join(&Line::default())
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, sync::Arc, time::Instant};

    use numaward_api::{Allocation, Allocations, Topology, Version};

    use super::*;
    use crate::top::{feed::FeedUpdate, model::Totals};

    #[test]
    fn hidden_siblings_belong_to_workload() {
        let topology = Topology::from(&numaward_topology::Machine::default());
        let mut model = TopModel::new(topology, Version::on("6.12"), Instant::now());
        let allocation = Allocation {
            name: "database".to_owned(),
            cpus: "1,5".to_owned(),
            hidden_cpus: "9,13".to_owned(),
            ..Allocation::default()
        };
        let allocations = Allocations { allocations: vec![Arc::new(allocation)], ..Allocations::default() };
        model.take(FeedUpdate::Allocations(Ok(Box::new(allocations))), Instant::now());
        let node = Node { node: 0, cpus: "0-3,8-11".to_owned(), memory: Vec::new(), allocated: None };
        let cpus: Vec<(u32, &str)> =
            exclusive_cpus(&model, &node).into_iter().map(|(cpu, workload)| (cpu.0, workload)).collect();
        assert_eq!(cpus, [(1, "database"), (9, "database")]);
    }

    #[test]
    fn intruders_are_found_by_workload() {
        let topology = Topology::from(&numaward_topology::Machine::default());
        let mut model = TopModel::new(topology, Version::on("6.12"), Instant::now());
        let status = serde_json::json!({
            "version": "1.2.3", "uptimeSeconds": 60, "probes": [], "maps": [],
            "workloads": {"own": 1, "other": 0}, "degraded": [],
            "exclusiveCpus": [{"cpu": 2, "workload": "numaward/guarded", "ownMicros": 0, "kernelThreadMicros": 0,
                               "hostMicros": 2_500_000, "workloadMicros": 0}],
        });
        let status = serde_json::from_value(status).unwrap();
        model.take(FeedUpdate::Status(Ok(Box::new(status))), Instant::now());
        let workload = serde_json::json!({
            "workload": "numaward/guarded", "kind": "command", "cgroup": "/numaward/guarded", "counters": "none",
            "nodes": [],
        });
        let found = WorkloadRow {
            workload: serde_json::from_value(workload).unwrap(),
            totals: Totals::default(),
            rates: None,
            history: VecDeque::new(),
            is_unwritten: false,
            allocation: Some(Arc::new(Allocation { name: "guarded".to_owned(), ..Allocation::default() })),
        };
        let line = intruders(&model, &found).unwrap();
        assert!(line.contains("host 2.500 s"), "{line}");
    }
}
