//! A workload or a node in full, and the help: lines that are scrolled through.

use std::collections::BTreeMap;

use numaward_api::{Counters, ExclusiveCpu, Node, Workload};
use numaward_topology::CpuSet;
use ratatui::text::{Line, Span};

use super::{
    accesses,
    draw::{BOLD, Paint, event_line, memory_marks},
    list::{percent, rate},
    model::{HISTORY, Model, Row},
};
use crate::{
    explain::render_allocation,
    table::{columns, row, size},
    text::clean,
};

fn heading(text: &str) -> Line<'static> {
    Line::styled(text.to_owned(), BOLD)
}

/// Lines of text that is made of others' words.
fn text(text: &str) -> impl Iterator<Item = Line<'static>> {
    text.lines().map(|line| Line::raw(clean(line).into_owned())).collect::<Vec<_>>().into_iter()
}

/// A workload: what it has, what is promised to it, why, and what happened.
pub(crate) fn workload(model: &Model, key: &str, paint: Paint, width: usize) -> Vec<Line<'static>> {
    let Some(found) = model.rows.get(key) else {
        return vec![Line::raw(format!("The workload {} is gone.", clean(key)))];
    };
    let workload = &found.workload;
    let mut lines = vec![heading(&clean(&workload.workload))];
    lines.extend(text(&facts(model, found)));
    lines.push(Line::default());
    lines.extend(text(&by_node(workload)));
    lines.push(Line::default());
    lines.extend(history(found, paint, width));
    lines.push(Line::default());
    if let Some((said, table)) = workload.activity.as_ref().and_then(accesses::in_full) {
        lines.push(heading("Accesses"));
        lines.extend(text(&said));
        lines.extend(text(&table));
        lines.push(Line::default());
    }
    match &found.allocation {
        None => lines.push(Line::raw("It has no guarantee: pages on other nodes are remote, not missed.")),
        Some(held) => {
            lines.push(heading("Guarantee"));
            lines.extend(text(&render_allocation(held)));
            if !held.settings.is_empty() {
                let mut rows = vec![row(["KNOB", "WANTED"])];
                rows.extend(held.settings.iter().map(|(knob, value)| row([knob, value])));
                lines.push(Line::default());
                lines.extend(text(&columns(&rows)));
            }
        }
    }
    lines.push(Line::default());
    lines.push(heading("What happened"));
    let name = found.allocation.as_ref().map_or(&workload.workload, |held| &held.name);
    let about = model.events.iter().filter(|event| {
        event.workload.as_ref().is_some_and(|other| other == name || *other == workload.workload)
    });
    let before = lines.len();
    lines.extend(about.map(|event| event_line(paint, event)));
    if lines.len() == before {
        lines.push(Line::raw("nothing, as far as it is remembered"));
    }
    lines
}

fn facts(model: &Model, found: &Row) -> String {
    let workload = &found.workload;
    let mut facts = vec![row(["kind", &workload.kind])];
    if let Some(cgroup) = &workload.cgroup {
        facts.push(row(["cgroup", cgroup]));
    }
    if let Some(container) = &workload.container {
        facts.push(row(["container", &container.id]));
        facts.extend(container.pod_uid.as_ref().map(|uid| row(["pod", uid])));
    }
    let counters = match workload.counters {
        Counters::Own => "its own",
        Counters::Other => "shared with others, for want of a slot: its allocations are not known",
        Counters::None => "none: no probe counts",
        Counters::Removed => "last values: its cgroup was removed",
    };
    facts.push(row(["counters", counters]));
    if let Some(share) = found.local_share() {
        let of = if found.promised_nodes().is_some() {
            "of its memory lies on the promised nodes"
        } else {
            "of what it allocated was local"
        };
        facts.push(row(["local", &format!("{} {of}", percent(share))]));
    }
    if let Some(rates) = found.rates {
        let now = format!("local {}, remote {}", rate(rates.local), rate(rates.remote));
        facts.push(row(["allocates", &now]));
    }
    if let Some(pressure) = workload.pressure {
        let lost = format!(
            "waited {} for memory, all of it {}",
            seconds(pressure.waiting_micros),
            seconds(pressure.stalled_micros)
        );
        facts.push(row(["pressure", &lost]));
    }
    if let Some(kills) = workload.oom_kills.filter(|kills| *kills > 0) {
        facts.push(row(["OOM kills", &kills.to_string()]));
    }
    if let Some(intruders) = intruders(model, found) {
        facts.push(row(["intruders", &intruders]));
    }
    columns(&facts)
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
        "on its exclusive CPUs: workloads {}, host {}, kernel threads {}; itself {}",
        sum(|cpu| cpu.workload_micros),
        sum(|cpu| cpu.host_micros),
        sum(|cpu| cpu.kernel_thread_micros),
        sum(|cpu| cpu.own_micros),
    ))
}

fn seconds(micros: u64) -> String {
    format!("{}.{:03} s", micros / 1_000_000, micros / 1000 % 1000)
}

fn by_node(workload: &Workload) -> String {
    let or_dash = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), size);
    let mut rows = vec![row(["NODE", "ANON", "FILE", "KERNEL", "LOCAL", "REMOTE", "MISSED"])];
    rows.extend(workload.nodes.iter().map(|node| {
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
    }));
    columns(&rows)
}

/// The rates of the last samples, each as high as its share of the highest.
fn history(found: &Row, paint: Paint, width: usize) -> Vec<Line<'static>> {
    if found.totals.allocated.is_none() {
        return vec![Line::raw("What it allocates is not counted.")];
    }
    let cells = width.saturating_sub(30).clamp(1, HISTORY);
    let latest: Vec<(f64, f64)> = found.history.iter().rev().take(cells).rev().copied().collect();
    let most = latest.iter().fold(1.0, |most: f64, (local, remote)| most.max(*local).max(*remote));
    let marks: &[char] = if paint.unicode {
        &[' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█']
    } else {
        &[' ', '.', ':', '-', '=', '+', '*', '#', '@']
    };
    let line = |name: &str, pick: fn(&(f64, f64)) -> f64| {
        let highest = latest.iter().map(pick).fold(0.0, f64::max);
        let marks: String = latest.iter().map(|rates| mark(marks, pick(rates) / most)).collect();
        Line::from(vec![
            Span::raw(format!("{name:<8}")),
            Span::raw(format!("{marks:>cells$}")),
            Span::raw(format!("  at most {}", rate(highest))),
        ])
    };
    vec![
        heading(&format!("Allocation in the last {} s", latest.len())),
        line("local", |rates| rates.0),
        line("remote", |rates| rates.1),
    ]
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
pub(crate) fn exclusive<'a>(model: &'a Model, node: &Node) -> BTreeMap<u32, &'a str> {
    let list = |text: &str| text.parse::<CpuSet>().unwrap_or_default();
    let here = list(&node.cpus);
    let held = model.allocations.iter().flat_map(|held| &held.allocations);
    held.flat_map(|held| list(&held.cpus).iter().map(|cpu| (cpu, &*held.name)).collect::<Vec<_>>())
        .filter(|(cpu, _)| here.contains(*cpu))
        .map(|(cpu, name)| (cpu.0, name))
        .collect()
}

/// A node: its CPUs and whose they are, its memory by kind, and who has memory there.
pub(crate) fn node(model: &Model, id: u32) -> Vec<Line<'static>> {
    let Some(node) = model.nodes.iter().find(|node| node.node == id) else {
        return vec![Line::raw(format!("Node {id} is gone."))];
    };
    let mut lines = vec![heading(&format!("Node {id}"))];
    let cpus = if node.cpus.is_empty() { "none: memory only" } else { &node.cpus };
    let mut facts = vec![row(["CPUs", cpus])];
    let machine = model.topology.nodes.iter().find(|node| node.node == id);
    if let Some(machine) = machine {
        let distances: Vec<String> =
            machine.distances.iter().map(|(node, distance)| format!("{distance} to node {node}")).collect();
        facts.push(row(["distances", &distances.join(", ")]));
    }
    lines.extend(text(&columns(&facts)));

    let mut owners: BTreeMap<&str, CpuSet> = BTreeMap::new();
    for (cpu, owner) in exclusive(model, node) {
        owners.entry(owner).or_default().insert(numaward_topology::CpuId(cpu));
    }
    if !owners.is_empty() {
        lines.extend([Line::default(), heading("Exclusive CPUs")]);
        let rows: Vec<_> = owners.iter().map(|(owner, cpus)| row([&cpus.to_string(), owner])).collect();
        lines.extend(text(&columns(&rows)));
    }

    lines.extend([Line::default(), heading("Memory")]);
    let mut rows = vec![row(["KIND", "TOTAL", "NOT IN USE", "RESERVED", "PROMISED", "TO PROMISE"])];
    let promises = model.promises(id);
    rows.extend(node.memory.iter().map(|memory| {
        let held = promises.and_then(|held| held.memory.iter().find(|held| held.kind == memory.kind));
        let or_dash = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), size);
        vec![
            memory.kind.clone(),
            size(memory.total_bytes),
            or_dash(memory.free_bytes),
            or_dash(held.map(|held| held.reserved_bytes)),
            or_dash(held.map(|held| held.promised_bytes)),
            or_dash(held.map(|held| held.free_bytes)),
        ]
    }));
    lines.extend(text(&columns(&rows)));

    lines.extend([Line::default(), heading("Who has memory here")]);
    let mut here: Vec<(u64, &Row)> = model
        .rows
        .values()
        .filter_map(|row| Some((*row.totals.resident.as_ref()?.get(&id)?, row)))
        .filter(|(bytes, _)| *bytes > 0)
        .collect();
    here.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.workload.key().cmp(b.1.workload.key())));
    let rows: Vec<_> =
        here.iter().map(|(bytes, found)| row([&size(*bytes), &found.workload.workload])).collect();
    lines.extend(text(&columns(&rows)));
    lines
}

/// What the keys do and what the columns mean.
pub(crate) fn help(paint: Paint) -> Vec<Line<'static>> {
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
        ("LOCAL", "with a guarantee: how much of it lies on the promised nodes;"),
        ("", "without: how much of what it allocated was local. ! is low, !! is bad"),
        ("LOCAL/S", "user memory allocated by a CPU of the page's node"),
        ("REMOTE/S", "user memory allocated by a CPU of another node"),
        ("ACCESSES", "how many of its sampled accesses go to other nodes; ~ is an estimate;"),
        ("", "a word says why the kernel samples none: off, mode2, cpuset, bound"),
        ("MISSED", "user memory placed outside the promised nodes, in all"),
        ("-", "not known: it is not counted, or the first second is not over"),
    ];
    let table = |rows: &[(&str, &str)]| columns(&rows.iter().map(|(a, b)| row([a, b])).collect::<Vec<_>>());
    let mut lines = vec![heading("Keys")];
    lines.extend(text(&table(&keys)));
    lines.extend([Line::default(), heading("Words")]);
    lines.extend(text(&table(&words)));
    lines.extend([Line::default(), heading("A node's memory")]);
    lines.extend(memory_marks(paint).map(|(mark, name, style)| {
        Line::from(vec![Span::styled(mark, style), Span::raw(format!("  {name}"))])
    }));
    lines
}
