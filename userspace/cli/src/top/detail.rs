//! A workload or a node in full, and the help: lines that are scrolled through.

use std::{cmp::Reverse, collections::BTreeMap, iter};

use numaward_api::{Counters, ExclusiveCpu, Node, Pressure, Tiering, Workload};
use numaward_topology::{CpuId, CpuSet};
use ratatui::text::{Line, Span};

use super::{
    accesses,
    draw::{BOLD, Paint, event_line, memory_marks},
    list::{percent, rate},
    model::{HISTORY, Model, Rates, Row},
};
use crate::{
    explain::render_allocation,
    table::{columns, or_dash, row, seconds, setting, size, table},
    text::clean,
};

/// Lines of text that is made of others' words.
fn text(text: &str) -> Vec<Line<'static>> {
    text.lines().map(|line| Line::raw(clean(line).into_owned())).collect()
}

fn titled(title: &str, lines: impl IntoIterator<Item = Line<'static>>) -> Vec<Line<'static>> {
    iter::once(Line::styled(title.to_owned(), BOLD)).chain(lines).collect()
}

/// A workload: what it has, what is promised to it, why, and what happened.
pub(crate) fn workload(model: &Model, key: &str, paint: Paint, width: usize) -> Vec<Line<'static>> {
    let Some(found) = model.rows.get(key) else {
        return vec![Line::raw(format!("The workload {} is gone.", clean(key)))];
    };
    let workload = &found.workload;
    let mut parts = vec![
        titled(&clean(&workload.workload), text(&facts(model, found))),
        text(&by_node(workload)),
        history(found, model.step_seconds as usize, paint, width),
    ];
    if workload.nodes.iter().any(|node| !node.hugepages.is_empty()) {
        parts.push(titled("Hugepages", text(&hugepages(workload))));
    }
    if let Some((said, table)) = workload.activity.as_ref().and_then(accesses::in_full) {
        parts.push(titled("Accesses", text(&format!("{said}\n{table}"))));
    }
    match &found.allocation {
        None => parts.push(text("It has no guarantee: pages on other nodes are remote, not missed.")),
        Some(held) => {
            parts.push(titled("Guarantee", text(&render_allocation(held))));
            if !held.settings.is_empty() {
                let rows = held.settings.iter().map(|(knob, value)| row([knob, &setting(knob, value)]));
                parts.push(text(&table(["KNOB", "WANTED"], rows)));
            }
        }
    }
    let about =
        model.events.iter().filter(|event| event.workload.as_ref().is_some_and(|of| found.is_called(of)));
    let mut about: Vec<_> = about.map(|event| event_line(paint, event)).collect();
    if about.is_empty() {
        about.push(Line::raw("nothing, as far as it is remembered"));
    }
    parts.push(titled("What happened", about));
    parts.join(&Line::default())
}

fn facts(model: &Model, found: &Row) -> String {
    let workload = &found.workload;
    let container = workload.container.as_ref();
    let counters = match workload.counters {
        Counters::Own => "its own",
        Counters::Other => "shared with others, because no slot is free: its allocations are not known",
        Counters::None => "none: no probe counts",
        Counters::Removed => "last values: its cgroup was removed",
    };
    let of = if found.promised_nodes().is_some() {
        "of its memory lies on the promised nodes"
    } else {
        "of what it allocated was local"
    };
    let allocates = |rates: Rates| format!("local {}, remote {}", rate(rates.local), rate(rates.remote));
    let tiers = |moved: Tiering| {
        format!("{} demoted, {} promoted", size(moved.demoted_bytes), size(moved.promoted_bytes))
    };
    let waited = |lost: Pressure| {
        let (waiting, stalled) = (seconds(lost.waiting_micros), seconds(lost.stalled_micros));
        format!("waited {waiting} s for memory, all of it {stalled} s")
    };
    let facts = [
        ("kind", Some(workload.kind.clone())),
        ("cgroup", workload.cgroup.clone()),
        ("container", container.map(|container| container.id.clone())),
        ("pod", container.and_then(|container| container.pod_uid.clone())),
        ("counters", Some(counters.to_owned())),
        ("local", found.local_share().map(|share| format!("{} {of}", percent(share)))),
        ("allocates", found.rates.map(allocates)),
        ("pressure", workload.pressure.map(waited)),
        ("OOM kills", workload.oom_kills.filter(|kills| *kills > 0).map(|kills| kills.to_string())),
        ("tiers", workload.tiering.map(tiers)),
        ("intruders", intruders(model, found)),
    ];
    let known = facts.into_iter().filter_map(|(name, fact)| Some(row([name, &fact?])));
    columns(&known.collect::<Vec<_>>())
}

/// Who else used its exclusive CPUs; absent where it has none, or where that is not measured.
fn intruders(model: &Model, found: &Row) -> Option<String> {
    let name = found.allocation.as_ref().map_or(&found.workload.workload, |held| &held.name);
    let cpus: Vec<&ExclusiveCpu> =
        model.status.as_ref()?.exclusive_cpus.iter().filter(|cpu| cpu.workload == *name).collect();
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
        let (lies, got) = (node.resident, node.allocated);
        vec![
            node.node.to_string(),
            or_dash(lies.map(|lies| lies.anon_bytes)),
            or_dash(lies.map(|lies| lies.file_bytes)),
            or_dash(lies.map(|lies| lies.kernel_bytes)),
            or_dash(got.map(|got| got.local_bytes)),
            or_dash(got.map(|got| got.remote_bytes)),
            or_dash(node.missed_bytes),
        ]
    });
    table(["NODE", "ANON", "FILE", "KERNEL", "LOCAL", "REMOTE", "MISSED"], rows)
}

fn hugepages(workload: &Workload) -> String {
    let or_dash = |bytes: Option<u64>| or_dash(bytes.map(size));
    let pages = workload.nodes.iter().flat_map(|node| node.hugepages.iter().map(move |of| (node.node, of)));
    let rows = pages.map(|(node, of)| {
        vec![
            of.size.clone(),
            node.to_string(),
            or_dash(of.resident_bytes),
            or_dash(of.allocated.map(|got| got.local_bytes)),
            or_dash(of.allocated.map(|got| got.remote_bytes)),
            or_dash(of.missed_bytes),
        ]
    });
    table(["SIZE", "NODE", "RESIDENT", "LOCAL", "REMOTE", "MISSED"], rows)
}

/// The rates of the last samples, each as high as its share of the highest.
fn history(found: &Row, step: usize, paint: Paint, width: usize) -> Vec<Line<'static>> {
    if found.totals.allocated.is_none() {
        return vec![Line::raw("What it allocates is not counted.")];
    }
    let cells = width.saturating_sub(30).clamp(1, HISTORY);
    let latest: Vec<Rates> = found.history.iter().rev().take(cells).rev().copied().collect();
    let most = latest.iter().fold(1.0, |most: f64, rates| most.max(rates.local).max(rates.remote));
    let marks: &[char] = if paint.unicode {
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

/// The exclusive CPUs of a node, with whom each belongs to.
pub(crate) fn exclusive<'a>(model: &'a Model, node: &Node) -> BTreeMap<CpuId, &'a str> {
    let list = |text: &str| text.parse::<CpuSet>().unwrap_or_default();
    let here = list(&node.cpus);
    let held = model.allocations.iter().flat_map(|held| &held.allocations);
    let all = |held: &numaward_api::Allocation| &list(&held.cpus) | &list(&held.hidden_cpus);
    held.flat_map(|held| all(held).iter().map(|cpu| (cpu, &*held.name)).collect::<Vec<_>>())
        .filter(|(cpu, _)| here.contains(*cpu))
        .collect()
}

/// A node: its CPUs and whose they are, its memory by kind, and who has memory there.
pub(crate) fn node(model: &Model, id: u32) -> Vec<Line<'static>> {
    let Some(node) = model.nodes.iter().find(|node| node.node == id) else {
        return vec![Line::raw(format!("Node {id} is gone."))];
    };
    let cpus = if node.cpus.is_empty() { "none: memory only" } else { &node.cpus };
    let mut facts = vec![row(["CPUs", cpus])];
    if let Some(machine) = model.topology.nodes.iter().find(|node| node.node == id) {
        let distances: Vec<String> =
            machine.distances.iter().map(|(node, distance)| format!("{distance} to node {node}")).collect();
        facts.push(row(["distances", &distances.join(", ")]));
    }
    let mut parts = vec![titled(&format!("Node {id}"), text(&columns(&facts)))];

    let mut owners: BTreeMap<&str, CpuSet> = BTreeMap::new();
    for (cpu, owner) in exclusive(model, node) {
        owners.entry(owner).or_default().insert(cpu);
    }
    if !owners.is_empty() {
        let rows: Vec<_> = owners.iter().map(|(owner, cpus)| row([&cpus.to_string(), owner])).collect();
        parts.push(titled("Exclusive CPUs", text(&columns(&rows))));
    }

    let rows = node.memory.iter().map(|memory| {
        let held = model.promises(id, &memory.kind);
        let or_dash = |bytes: Option<u64>| or_dash(bytes.map(size));
        vec![
            memory.kind.clone(),
            size(memory.total_bytes),
            or_dash(memory.free_bytes),
            or_dash(held.map(|held| held.reserved_bytes)),
            or_dash(held.map(|held| held.promised_bytes)),
            or_dash(held.map(|held| held.free_bytes)),
        ]
    });
    let memory = table(["KIND", "TOTAL", "NOT IN USE", "RESERVED", "PROMISED", "TO PROMISE"], rows);
    parts.push(titled("Memory", text(&memory)));

    let mut here: Vec<(u64, &Row)> = model
        .rows
        .values()
        .filter_map(|row| Some((*row.totals.resident.as_ref()?.get(&id)?, row)))
        .filter(|(bytes, _)| *bytes > 0)
        .collect();
    here.sort_by_key(|(bytes, row)| (Reverse(*bytes), row.workload.key()));
    let rows: Vec<_> =
        here.iter().map(|(bytes, found)| row([&size(*bytes), &found.workload.workload])).collect();
    parts.push(titled("Who has memory here", text(&columns(&rows))));
    parts.join(&Line::default())
}

/// What the keys do and what the columns mean.
pub(crate) fn help(paint: Paint, is_recorded: bool) -> Vec<Line<'static>> {
    let replay = [
        ("t T", "the next moment, the one before"),
        ("] [", "a minute on, a minute back"),
        ("n N", "the next moment with an event, the one before"),
        ("b e", "the beginning, the end"),
        ("p", "play, pause"),
    ];
    let keys = [
        ("Up Down PgUp PgDn Home End", "move; also j and k"),
        ("Tab", "the next pane: workloads, nodes, events"),
        ("Enter", "look into the workload or node; of an event, into its workload"),
        ("Esc q", "back; q on the first screen and Ctrl-C everywhere: quit"),
        ("s S", "sort by the next column, or the one before"),
        ("r", "reverse the order"),
        ("/", "filter by name, kind or cgroup; node:1 for memory on node 1"),
        ("g", "only workloads with a guarantee"),
        ("Ctrl-Z", "stop; fg goes on"),
    ];
    let words = [
        ("NODES", "the nodes promised to a workload; - without a guarantee"),
        ("BY NODE", "where its memory lies: each digit is that node's share"),
        ("RESIDENT", "memory that it has now (memory.numa_stat)"),
        ("LOCAL", "with a guarantee: how much of it is on the promised nodes, !! is bad;"),
        ("", "without: how much of what it allocated was local. ! is low"),
        ("LOCAL/S", "user memory allocated by a CPU of the page's node"),
        ("REMOTE/S", "user memory allocated by a CPU of another node"),
        ("ACCESSES", "how many of its sampled accesses go to other nodes; ~ is an estimate;"),
        ("", "a word says why the kernel samples none: off, mode2, cpuset, bound"),
        ("MISSED", "user memory placed outside the promised nodes, in all"),
        ("-", "not known: it is not counted, or the first second is not over"),
    ];
    let table =
        |rows: &[(&str, &str)]| text(&columns(&rows.iter().map(|(a, b)| row([a, b])).collect::<Vec<_>>()));
    let marks = memory_marks(paint).map(|(mark, name, style)| {
        Line::from(vec![Span::styled(mark, style), Span::raw(format!("  {name}"))])
    });
    let replay = if is_recorded { titled("Keys of a recording", table(&replay)) } else { Vec::new() };
    let mut parts = vec![
        titled("Keys", table(&keys)),
        replay,
        titled("Words", table(&words)),
        titled("A node's memory", marks),
    ];
    parts.retain(|part| !part.is_empty());
    parts.join(&Line::default())
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Instant};

    use numaward_api::{Allocation, Allocations, Topology, Version};

    use super::*;
    use crate::top::feed::Update;

    #[test]
    fn hidden_siblings_belong_to_who_hides_them() {
        let topology = Topology::from(&numaward_topology::Machine::default());
        let mut model = Model::new(topology, Version::on("6.12"), Instant::now());
        let held = Allocation {
            name: "database".to_owned(),
            cpus: "1,5".to_owned(),
            hidden_cpus: "9,13".to_owned(),
            ..Allocation::default()
        };
        let allocations = Allocations { allocations: vec![Arc::new(held)], ..Allocations::default() };
        model.take(Update::Allocations(Ok(Box::new(allocations))), Instant::now());
        let node = Node { node: 0, cpus: "0-3,8-11".to_owned(), memory: Vec::new(), allocated: None };
        let of: Vec<(u32, &str)> =
            exclusive(&model, &node).into_iter().map(|(cpu, of)| (cpu.0, of)).collect();
        assert_eq!(of, [(1, "database"), (9, "database")]);
    }
}
