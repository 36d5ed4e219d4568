//! Draws the screen, whatever its size.
//!
//! Each view is lines of text. The three panes share a screen that is high enough; on a lower one the pane that has the
//! keys is shown alone. Nothing is told by colour alone.

use std::{borrow::Cow, fmt::Write as _, time::Instant};

use numaward_api::{Event, Node, Severity};
use ratatui::{
    Frame,
    layout::Rect,
    style::{Color, Modifier, Style},
    text::{Line, Span},
};

use super::{
    detail,
    list::{Column, bar, rate},
    model::{Level, Model, Row},
    screen::{Pane, Screen, View},
};
use crate::{
    table::size,
    text::{clean, cut, width},
};

/// Events at the bottom of a screen with all panes.
const EVENTS: usize = 4;
/// Lines that the workloads need beside other panes.
const FEW: usize = 8;

/// How the terminal can be drawn on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Paint {
    pub(crate) colours: bool,
    /// Characters beyond ASCII.
    pub(crate) unicode: bool,
}

impl Paint {
    /// As the user's environment has it (<https://no-color.org>; locale(7)).
    pub(crate) fn from_environment() -> Self {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default();
        let locale = locale.to_lowercase();
        Self {
            colours: set("NO_COLOR").is_none(),
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
        }
    }

    pub(crate) fn colour(self, colour: Color) -> Style {
        if self.colours { Style::new().fg(colour) } else { Style::new() }
    }

    fn level(self, level: Level) -> Style {
        self.colour(match level {
            Level::Good => Color::Green,
            Level::Warn => Color::Yellow,
            Level::Bad => Color::Red,
        })
    }

    /// A node's own colour; more than six repeat, and are told apart by their digit.
    fn node(self, node: u32) -> Style {
        const COLOURS: [Color; 6] =
            [Color::Cyan, Color::Magenta, Color::Yellow, Color::Green, Color::Blue, Color::LightRed];
        self.colour(COLOURS[node as usize % COLOURS.len()])
    }

    pub(crate) fn alarm(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }
}

pub(crate) const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const QUIET: Style = Style::new().add_modifier(Modifier::DIM);

/// Draws what is to be seen now.
pub(crate) fn draw(frame: &mut Frame<'_>, screen: &mut Screen, model: &Model, now: Instant) {
    let area = frame.area();
    let (columns, height) = (usize::from(area.width), usize::from(area.height));
    let mut lines = vec![head(screen, model, now, columns)];
    if height > 2 {
        lines.extend(notice(screen, model, now));
    }
    let foot = (height > 4).then(|| foot(screen));
    let room = height.saturating_sub(lines.len() + usize::from(foot.is_some()));
    match screen.view.clone() {
        View::Lists => lines.extend(lists(screen, model, columns, room)),
        View::Workload(key) => {
            let text = detail::workload(model, &key, screen.paint, columns);
            lines.extend(scrolled(screen, text, room));
        }
        View::Node(node) => lines.extend(scrolled(screen, detail::node(model, node), room)),
        View::Help => lines.extend(scrolled(screen, detail::help(screen.paint), room)),
    }
    lines.truncate(height - usize::from(foot.is_some()).min(height));
    for (line, y) in lines.iter().zip(area.y..) {
        frame.render_widget(line, Rect { y, height: 1, ..area });
    }
    if let Some(foot) = foot {
        frame.render_widget(&foot, Rect { y: area.bottom() - 1, height: 1, ..area });
    }
}

/// Who is watched, and whether the figures are of now.
fn head(screen: &Screen, model: &Model, now: Instant, columns: usize) -> Line<'static> {
    let paint = screen.paint;
    let stale = model.staleness(now);
    let link = match (&stale, model.uptime_seconds()) {
        (Some(_), _) => Span::styled("STALE", paint.alarm()),
        (None, None) => Span::raw("waiting"),
        (None, Some(_)) => Span::styled("live", paint.colour(Color::Green)),
    };
    let (mut remote, mut missed, mut guaranteed) = (None, 0.0, 0);
    for row in model.rows.values() {
        if let Some(rates) = row.rates {
            remote = Some(remote.unwrap_or(0.0) + rates.remote);
            missed += rates.missed;
        }
        guaranteed += usize::from(row.allocation.is_some());
    }
    let mut facts = vec![
        format!("numaward {}", clean(&model.version.version)),
        format!("Linux {}", clean(&model.version.kernel)),
        format!("{} workloads, {guaranteed} guaranteed", model.rows.len()),
    ];
    if let Some(remote) = remote {
        facts.push(format!("remote {}", rate(remote)));
        facts.push(format!("missed {}", rate(missed)));
    }
    let room = columns.saturating_sub(link.width() + 2);
    let mut text = String::new();
    for fact in facts {
        let glue = if text.is_empty() { "" } else { "  " };
        // The host's name alone is cut; what does not fit is left out.
        if !text.is_empty() && width(&text) + glue.len() + width(&fact) > room {
            continue;
        }
        text.push_str(glue);
        text.push_str(&fact);
    }
    let text = cut(&text, room).into_owned();
    let gap = columns.saturating_sub(width(&text) + link.width());
    Line::from(vec![Span::styled(text, BOLD), Span::raw(" ".repeat(gap)), link])
}

/// What is wrong with what is shown, if anything: the worst of it.
fn notice(screen: &Screen, model: &Model, now: Instant) -> Option<Line<'static>> {
    let paint = screen.paint;
    if let Some(reason) = model.staleness(now) {
        return Some(Line::styled(clean(&reason).into_owned(), paint.alarm()));
    }
    let warn = paint.colour(Color::Yellow);
    if let Some((what, reason)) = model.troubles.first_key_value() {
        return Some(Line::styled(format!("{what}: {}", clean(reason)), warn));
    }
    let status = model.status.as_ref()?;
    let absent = status.probes.iter().find(|probe| probe.probe == "alloc" && probe.mode == "absent");
    let text = match (absent, status.degraded.first()) {
        (Some(probe), _) => {
            let reason = probe.reason.as_deref().unwrap_or("numaward doctor may know why");
            format!("allocations are not counted: {}", clean(reason))
        }
        (None, Some(degraded)) => format!("{}: {}", clean(&degraded.part), clean(&degraded.reason)),
        (None, None) => return None,
    };
    Some(Line::styled(text, warn))
}

/// What can be done here.
fn foot(screen: &Screen) -> Line<'static> {
    if screen.is_filtering {
        let filter = clean(&screen.choice.filter).into_owned();
        return Line::from(vec![
            Span::styled("filter: ", BOLD),
            Span::raw(filter),
            Span::styled(" ", Style::new().add_modifier(Modifier::REVERSED)),
            Span::styled("  Enter keeps it, Esc drops it", QUIET),
        ]);
    }
    let keys: &[(&str, &str)] = match screen.view {
        View::Lists => &[
            ("q", "quit"),
            ("?", "help"),
            ("Enter", "look into"),
            ("s", "sort"),
            ("r", "reverse"),
            ("/", "filter"),
            ("g", "guaranteed"),
            ("Tab", "pane"),
        ],
        _ => &[("q", "back"), ("?", "help"), ("Up/Down", "scroll")],
    };
    let mut spans = Vec::new();
    for (key, does) in keys {
        spans.extend([Span::styled(*key, BOLD), Span::styled(format!(" {does}  "), QUIET)]);
    }
    let Screen { choice, .. } = screen;
    if choice.guaranteed && screen.view == View::Lists {
        spans.push(Span::raw("only guaranteed  "));
    }
    if !choice.filter.is_empty() && screen.view == View::Lists {
        spans.push(Span::raw(format!("filter: {}", clean(&choice.filter))));
    }
    Line::from(spans)
}

fn scrolled(screen: &mut Screen, lines: Vec<Line<'static>>, room: usize) -> Vec<Line<'static>> {
    screen.page = room;
    screen.scrolled = screen.scrolled.min(lines.len().saturating_sub(room));
    lines.into_iter().skip(screen.scrolled).take(room).collect()
}

fn lists(screen: &mut Screen, model: &Model, columns: usize, room: usize) -> Vec<Line<'static>> {
    let nodes_room = (model.nodes.len() + 1).min((room / 3).max(3));
    let with_nodes = room >= nodes_room + 1 + FEW;
    if !with_nodes {
        return match screen.pane {
            Pane::Workloads => workloads(screen, model, columns, room),
            Pane::Nodes => nodes(screen, model, columns, room),
            Pane::Events => events(screen, model, room),
        };
    }
    let with_events = room >= nodes_room + 1 + FEW + 1 + EVENTS;
    let events_room = match (with_events, screen.pane) {
        (true, _) => EVENTS,
        // Who goes there wants to see them.
        (false, Pane::Events) => return events(screen, model, room),
        (false, _) => 0,
    };
    let events_gap = usize::from(with_events);
    let mut lines = nodes(screen, model, columns, nodes_room);
    lines.push(Line::default());
    let rest = room - nodes_room - 1 - events_room - events_gap;
    let mut table = workloads(screen, model, columns, rest);
    table.resize(rest + events_gap, Line::default());
    lines.append(&mut table);
    if with_events {
        lines.extend(events(screen, model, events_room));
    }
    lines
}

/// The first line of those in sight, so that the selected one is among them.
fn from(from: usize, selected: usize, count: usize, room: usize) -> usize {
    let room = room.max(1);
    let from = from.min(count.saturating_sub(room)).min(selected);
    from.max((selected + 1).saturating_sub(room))
}

/// A cell, as wide as its column.
fn padded(text: &str, cells: usize, is_text: bool) -> String {
    let text = cut(text, cells);
    let gap = " ".repeat(cells.saturating_sub(width(&text)));
    if is_text { format!("{text}{gap}") } else { format!("{gap}{text}") }
}

fn heading(pane: Pane, screen: &Screen) -> Style {
    if pane == screen.pane { BOLD.add_modifier(Modifier::UNDERLINED) } else { BOLD }
}

fn gutter(is_selected: bool) -> Span<'static> {
    Span::raw(if is_selected { ">" } else { " " })
}

fn selected(line: Line<'static>, is_selected: bool) -> Line<'static> {
    if is_selected { line.patch_style(Style::new().add_modifier(Modifier::REVERSED)) } else { line }
}

fn workloads(screen: &mut Screen, model: &Model, columns: usize, room: usize) -> Vec<Line<'static>> {
    let rows = screen.choice.rows(model);
    let at = screen.position(&rows);
    screen.selected_at = at;
    let shown = room.saturating_sub(1);
    screen.workloads_from = from(screen.workloads_from, at, rows.len(), shown);
    if screen.pane == Pane::Workloads {
        screen.page = shown;
    }
    let (chosen, name) = Column::fitting(columns.saturating_sub(1), screen.choice.sort);
    let cells = |column: Column| if column == Column::Name { name } else { column.width() };
    let mut titles = String::from(" ");
    for column in &chosen {
        let mark = match (column.sort() == Some(screen.choice.sort), screen.paint.unicode) {
            (false, _) => "",
            (true, true) if screen.choice.reversed => "▴",
            (true, true) => "▾",
            (true, false) if screen.choice.reversed => "^",
            (true, false) => "*",
        };
        let mut title = format!("{}{mark}", column.title());
        if *column == Column::Name {
            let _ = match rows.len() {
                count if count == model.rows.len() => write!(title, " ({count})"),
                count => write!(title, " ({count} of {})", model.rows.len()),
            };
        } else {
            titles.push(' ');
        }
        titles.push_str(&padded(&title, cells(*column), column.is_text()));
    }
    let mut lines = vec![Line::styled(titles, heading(Pane::Workloads, screen))];
    for (index, (_, row)) in rows.iter().enumerate().skip(screen.workloads_from).take(shown) {
        let mut spans = vec![gutter(index == at)];
        for column in &chosen {
            if *column != Column::Name {
                spans.push(Span::raw(" "));
            }
            spans.extend(workload_cell(screen.paint, row, *column, cells(*column)));
        }
        lines.push(selected(Line::from(spans), index == at && screen.pane == Pane::Workloads));
    }
    if rows.is_empty() && room > 1 {
        let why = match () {
            () if model.samples == 0 => " waiting for the first figures",
            () if model.rows.is_empty() => " no workloads",
            () => " none match",
        };
        lines.push(Line::styled(why, QUIET));
    }
    lines
}

fn workload_cell(paint: Paint, row: &Row, column: Column, cells: usize) -> Vec<Span<'static>> {
    let text = column.cell(row);
    match column {
        Column::Bar => node_digits(paint, &text, cells),
        Column::Local => {
            let style = row.level().map(|level| paint.level(level)).unwrap_or_default();
            vec![Span::styled(padded(&text, cells, false), style)]
        }
        Column::Missed if row.totals.missed.is_some_and(|missed| missed > 0) && row.allocation.is_some() => {
            vec![Span::styled(padded(&text, cells, false), paint.alarm())]
        }
        Column::Name if row.allocation.is_some() => vec![Span::styled(padded(&text, cells, true), BOLD)],
        _ => vec![Span::raw(padded(&text, cells, column.is_text()))],
    }
}

/// A bar of digits, each in the colour of its node.
fn node_digits(paint: Paint, digits: &str, cells: usize) -> Vec<Span<'static>> {
    let mut spans: Vec<Span<'static>> = digits
        .chars()
        .map(|c| {
            Span::styled(String::from(c), c.to_digit(36).map(|node| paint.node(node)).unwrap_or_default())
        })
        .collect();
    spans.push(Span::raw(" ".repeat(cells.saturating_sub(digits.len()))));
    spans
}

/// The columns of nodes: title, width, whether it is text.
const NODE: (&str, usize, bool) = ("NODE", 4, false);
const NODE_COLUMNS: [(&str, usize, bool); 7] = [
    ("FREE", 10, false),
    ("PROMISED", 10, false),
    ("REMOTE/S", 12, false),
    ("CPUS", 9, true),
    ("LOCAL/S", 12, false),
    ("TOTAL", 10, false),
    ("EXCL", 4, false),
];
const LEAST_BAR: usize = 10;
const MOST_BAR: usize = 40;

fn nodes(screen: &mut Screen, model: &Model, columns: usize, room: usize) -> Vec<Line<'static>> {
    let shown = room.saturating_sub(1);
    screen.node = screen.node.min(model.nodes.len().saturating_sub(1));
    screen.nodes_from = from(screen.nodes_from, screen.node, model.nodes.len(), shown);
    if screen.pane == Pane::Nodes {
        screen.page = shown;
    }
    let mut left = columns.saturating_sub(1 + NODE.1 + 1);
    let mut chosen = Vec::new();
    for column in NODE_COLUMNS {
        if left >= LEAST_BAR + 1 + column.1 {
            left -= column.1 + 1;
            chosen.push(column);
        }
    }
    let bar_cells = left.min(MOST_BAR);
    let mut titles = format!(" {} {}", NODE.0, padded("MEMORY", bar_cells, true));
    for (title, cells, is_text) in &chosen {
        titles.push(' ');
        titles.push_str(&padded(title, *cells, *is_text));
    }
    let mut lines = vec![Line::styled(titles, heading(Pane::Nodes, screen))];
    for (index, node) in model.nodes.iter().enumerate().skip(screen.nodes_from).take(shown) {
        let is_selected = index == screen.node && screen.pane == Pane::Nodes;
        let mut spans = vec![gutter(is_selected)];
        let label = padded(&node.node.to_string(), NODE.1, false);
        spans.extend([Span::styled(label, screen.paint.node(node.node)), Span::raw(" ")]);
        spans.extend(memory_bar(screen.paint, model, node, bar_cells));
        for (title, cells, is_text) in &chosen {
            spans.push(Span::raw(format!(" {}", padded(&node_cell(model, node, title), *cells, *is_text))));
        }
        lines.push(selected(Line::from(spans), is_selected));
    }
    lines
}

/// Bytes of a node's base memory: reserved, promised, used beyond that, free.
fn memory_parts(model: &Model, node: &Node) -> Option<[u64; 4]> {
    let base = node.memory.iter().find(|memory| memory.kind == "memory")?;
    let held =
        model.promises(node.node).and_then(|held| held.memory.iter().find(|held| held.kind == "memory"));
    let (reserved, promised) = held.map_or((0, 0), |held| (held.reserved_bytes, held.promised_bytes));
    let free = base.free_bytes.unwrap_or(0);
    let used = base.total_bytes.saturating_sub(free).saturating_sub(reserved).saturating_sub(promised);
    let rest = base.total_bytes.saturating_sub(reserved).saturating_sub(promised).saturating_sub(used);
    Some([reserved, promised, used, rest])
}

/// How the parts of a node's memory are drawn: reserved, promised, used beyond that, free.
pub(crate) fn memory_marks(paint: Paint) -> [(&'static str, &'static str, Style); 4] {
    let marks = if paint.unicode { ["▒", "█", "▓", "░"] } else { ["r", "P", "#", "."] };
    let names = ["reserved", "promised", "used, not promised", "free"];
    let styles = [
        paint.colour(Color::DarkGray),
        paint.colour(Color::Blue),
        paint.colour(Color::Yellow),
        paint.colour(Color::DarkGray),
    ];
    std::array::from_fn(|part| (marks[part], names[part], styles[part]))
}

fn memory_bar(paint: Paint, model: &Model, node: &Node, cells: usize) -> Vec<Span<'static>> {
    let parts = memory_parts(model, node).unwrap_or_default();
    let parts: Vec<(u32, u64)> = (0..).zip(parts).collect();
    let filled = bar(&parts, cells);
    let marks = memory_marks(paint);
    let mut spans: Vec<Span<'static>> =
        filled.iter().map(|part| Span::styled(marks[*part as usize].0, marks[*part as usize].2)).collect();
    spans.push(Span::raw(" ".repeat(cells - filled.len())));
    spans
}

fn node_cell(model: &Model, node: &Node, title: &str) -> String {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let base = node.memory.iter().find(|memory| memory.kind == "memory");
    let rates = model.node_rates.get(&node.node);
    match title {
        "FREE" => or_dash(base.and_then(|memory| memory.free_bytes).map(size)),
        "TOTAL" => or_dash(base.map(|memory| size(memory.total_bytes))),
        "PROMISED" => or_dash(model.promises(node.node).and_then(|promises| {
            let kind = promises.memory.iter().find(|memory| memory.kind == "memory")?;
            Some(size(kind.promised_bytes))
        })),
        "REMOTE/S" => or_dash(rates.map(|(_, remote)| rate(*remote))),
        "LOCAL/S" => or_dash(rates.map(|(local, _)| rate(*local))),
        "CPUS" if node.cpus.is_empty() => "none".to_owned(),
        "CPUS" => clean(&node.cpus).into_owned(),
        _ => or_dash(model.allocations.as_ref().map(|_| detail::exclusive(model, node).len().to_string())),
    }
}

fn events(screen: &mut Screen, model: &Model, room: usize) -> Vec<Line<'static>> {
    let shown = room.saturating_sub(1);
    screen.event = screen.event.min(model.events.len().saturating_sub(1));
    let is_here = screen.pane == Pane::Events;
    if is_here {
        screen.page = shown;
    }
    let from = if is_here { from(0, screen.event, model.events.len(), shown) } else { 0 };
    let more = match model.missed_events {
        0 => String::new(),
        missed => format!(" ({missed} came too fast to be shown)"),
    };
    let mut lines = vec![Line::styled(format!(" EVENTS{more}"), heading(Pane::Events, screen))];
    for (index, event) in model.events.iter().enumerate().skip(from).take(shown) {
        let is_selected = is_here && index == screen.event;
        let mut line = event_line(screen.paint, event);
        line.spans.insert(0, gutter(is_selected));
        lines.push(selected(line, is_selected));
    }
    if model.events.is_empty() && room > 1 {
        lines.push(Line::styled(" nothing has happened", QUIET));
    }
    lines
}

/// An event in a line.
pub(crate) fn event_line(paint: Paint, event: &Event) -> Line<'static> {
    let style = match event.severity {
        Severity::Info => Style::new(),
        Severity::Warning => paint.colour(Color::Yellow),
        Severity::Critical => paint.alarm(),
    };
    // The time of day; the date is on the page and in the API.
    let time = event.time.get(11..19).unwrap_or(&event.time);
    let kind = event.kind.as_str().replace('_', " ");
    let name = event.workload.as_deref().map(|name| cut(&clean(name), 32).into_owned());
    let node = event.node.map(|node| format!("node {node}"));
    let about: Vec<String> = name.into_iter().chain(node).collect();
    let more: Cow<'_, str> = match event.suppressed {
        0 => "".into(),
        count => format!(" ({count} more like it were not told)").into(),
    };
    Line::from(vec![
        Span::styled(format!("{} ", clean(time)), QUIET),
        Span::styled(kind, style),
        Span::raw(format!(" {}: {}{more}", about.join(", "), clean(&event.message))),
    ])
}
