//! Draws the screen, whatever its size.
//!
//! Each view is lines of text. The three panes share a screen that is high enough; on a lower one the pane that has the
//! keys is shown alone. Nothing is shown by colour alone.

use std::{fmt::Write as _, ops::Range, time::Instant};

use numaward_api::{Event, Node, Severity};
use ratatui::{
    Frame,
    style::{Color, Modifier, Style},
    text::{Line, Span, Text},
};
use unicode_width::UnicodeWidthStr;

use super::{
    detail,
    list::{bar, node_cell, rate},
    model::{Level, Model, Row},
    screen::{Pane, Place, Screen, View},
};
use crate::{
    column::Column,
    text::{clean, cut},
};

/// Events at the bottom of a screen with all panes.
const EVENTS: usize = 4;
/// Lines that the workloads need beside other panes.
const FEW: usize = 8;

/// How the terminal can be drawn on.
#[derive(Clone, Copy, Debug, Default)]
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

    /// A node's own colour; more than six repeat, and differ in their digit. None is red, not even a light one: that is for what
    /// is broken.
    fn node(self, node: u32) -> Style {
        const COLOURS: [Color; 6] =
            [Color::Cyan, Color::Magenta, Color::Yellow, Color::Green, Color::Blue, Color::LightMagenta];
        self.colour(COLOURS[node as usize % COLOURS.len()])
    }

    /// Something promised is broken.
    pub(crate) fn alarm(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// The figures are old. No promise is broken by that.
    fn stale(self) -> Style {
        self.colour(Color::Yellow).add_modifier(Modifier::BOLD)
    }
}

pub(crate) const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const QUIET: Style = Style::new().add_modifier(Modifier::DIM);
const REVERSED: Style = Style::new().add_modifier(Modifier::REVERSED);

/// Draws what is to be seen now.
pub(crate) fn draw(frame: &mut Frame<'_>, screen: &mut Screen, model: &Model, now: Instant) {
    let area = frame.area();
    let (columns, height) = (usize::from(area.width), usize::from(area.height));
    let mut lines = vec![head(screen, model, now, columns)];
    if height > 2 {
        lines.extend(notice(screen, model, now));
    }
    let foot = (height > 4).then(|| foot(screen, model.recorded.is_some()));
    let room = height.saturating_sub(lines.len() + usize::from(foot.is_some()));
    let text = match &screen.view {
        View::Lists => None,
        View::Workload(key) => Some(detail::workload(model, key, screen.paint, columns)),
        View::Node(node) => Some(detail::node(model, *node)),
        View::Help => Some(detail::help(screen.paint, model.recorded.is_some())),
    };
    lines.extend(match text {
        None => lists(screen, model, columns, room),
        Some(text) => scrolled(screen, text, room),
    });
    if let Some(foot) = foot {
        lines.resize(height - 1, Line::default());
        lines.push(foot);
    }
    frame.render_widget(Text::from(lines), area);
}

/// Who is watched, and whether the figures are of now.
fn head(screen: &Screen, model: &Model, now: Instant, columns: usize) -> Line<'static> {
    let paint = screen.paint;
    let link = match model.samples {
        _ if let Some(now) = &model.recorded => {
            let (date, time) =
                (now.time.get(..10).unwrap_or_default(), now.time.get(11..19).unwrap_or_default());
            let state = if now.is_playing { "playing" } else { "paused" };
            Span::styled(
                format!("{date} {time}  {}/{}  {state}", now.number, now.count),
                paint.colour(Color::Cyan),
            )
        }
        _ if model.staleness(now).is_some() => Span::styled("STALE", paint.stale()),
        0 => Span::raw("waiting"),
        _ => Span::styled("live", paint.colour(Color::Green)),
    };
    let guaranteed = model.rows.values().filter(|row| row.allocation.is_some()).count();
    let rates: Vec<_> = model.rows.values().filter_map(|row| row.rates).collect();
    let mut facts = vec![
        format!("numaward {}", clean(&model.version.version)),
        format!("Linux {}", clean(&model.version.kernel)),
        format!("{} workloads, {guaranteed} guaranteed", model.rows.len()),
    ];
    if !rates.is_empty() {
        facts.push(format!("remote {}", rate(rates.iter().map(|rates| rates.remote).sum())));
        facts.push(format!("missed {}", rate(rates.iter().map(|rates| rates.missed).sum())));
    }
    let room = columns.saturating_sub(link.width() + 2);
    let mut text = String::new();
    for fact in facts {
        let glue = if text.is_empty() { "" } else { "  " };
        // The host's name alone is cut; what does not fit is not drawn.
        if !text.is_empty() && text.width() + glue.len() + fact.width() > room {
            continue;
        }
        text.push_str(glue);
        text.push_str(&fact);
    }
    let text = cut(&text, room).into_owned();
    let gap = columns.saturating_sub(text.width() + link.width());
    Line::from(vec![Span::styled(text, BOLD), Span::raw(" ".repeat(gap)), link])
}

/// What is wrong with what is shown, if anything: the worst of it.
fn notice(screen: &Screen, model: &Model, now: Instant) -> Option<Line<'static>> {
    let paint = screen.paint;
    if let Some(reason) = model.staleness(now) {
        return Some(Line::styled(clean(&reason).into_owned(), paint.stale()));
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
fn foot(screen: &Screen, is_recorded: bool) -> Line<'static> {
    if screen.is_filtering {
        let filter = clean(&screen.choice.filter).into_owned();
        return Line::from(vec![
            Span::styled("filter: ", BOLD),
            Span::raw(filter),
            Span::styled(" ", REVERSED),
            Span::styled("  Enter keeps it, Esc drops it", QUIET),
        ]);
    }
    let keys: &[(&str, &str)] = match screen.view {
        View::Lists if is_recorded => &[
            ("q", "quit"),
            ("?", "help"),
            ("t T", "step"),
            ("] [", "minute"),
            ("n N", "event"),
            ("p", "play"),
            ("Enter", "look into"),
            ("/", "filter"),
        ],
        _ if is_recorded => &[("q", "back"), ("?", "help"), ("Up/Down", "scroll"), ("t T", "step")],
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
    let choice = &screen.choice;
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
    let with_events = room >= nodes_room + 1 + FEW + 1 + EVENTS;
    match screen.pane {
        Pane::Workloads if !with_nodes => return workloads(screen, model, columns, room),
        Pane::Nodes if !with_nodes => return nodes(screen, model, columns, room),
        // A user who goes there wants to see them.
        Pane::Events if !with_events => return events(screen, model, room),
        _ => {}
    }
    let above_events = room - if with_events { 1 + EVENTS } else { 0 };
    let mut lines = nodes(screen, model, columns, nodes_room);
    lines.push(Line::default());
    lines.extend(workloads(screen, model, columns, above_events - nodes_room - 1));
    if with_events {
        lines.resize(above_events + 1, Line::default());
        lines.extend(events(screen, model, EVENTS));
    }
    lines
}

/// A cell, as wide as its column.
fn padded(text: &str, cells: usize, is_text: bool) -> String {
    let text = cut(text, cells);
    let gap = " ".repeat(cells.saturating_sub(text.width()));
    if is_text { format!("{text}{gap}") } else { format!("{gap}{text}") }
}

fn heading(pane: Pane, screen: &Screen) -> Style {
    if pane == screen.pane { BOLD.add_modifier(Modifier::UNDERLINED) } else { BOLD }
}

/// A line of a pane, with a mark in front where it is the selected one. Of the workloads it is marked from everywhere.
fn marked(screen: &Screen, pane: Pane, index: usize, mut line: Line<'static>) -> Line<'static> {
    let is_here = pane == screen.pane;
    let is_selected = index == screen.places[pane as usize].at && (is_here || pane == Pane::Workloads);
    line.spans.insert(0, Span::raw(if is_selected { ">" } else { " " }));
    if is_selected && is_here { line.patch_style(REVERSED) } else { line }
}

/// Which lines of a pane are in sight below its title, the selected one among them.
fn in_sight(screen: &mut Screen, pane: Pane, count: usize, room: usize) -> Range<usize> {
    let shown = room.saturating_sub(1);
    if pane == screen.pane {
        screen.page = shown;
    }
    let Place { at, from } = &mut screen.places[pane as usize];
    *at = (*at).min(count.saturating_sub(1));
    let (least, most) = ((*at + 1).saturating_sub(shown.max(1)), count.saturating_sub(shown.max(1)));
    *from = (*from).min(most).min(*at).max(least);
    *from..count.min(*from + shown)
}

fn workloads(screen: &mut Screen, model: &Model, columns: usize, room: usize) -> Vec<Line<'static>> {
    let rows = screen.choice.rows(model);
    screen.places[Pane::Workloads as usize].at = screen.position(&rows);
    let sight = in_sight(screen, Pane::Workloads, rows.len(), room);
    let (chosen, name) = Column::fitting(columns.saturating_sub(1), screen.choice.sort);
    let cells = |column: Column| if column == Column::Name { name } else { column.head().1 };
    let mut titles = String::from(" ");
    for column in &chosen {
        let mark = match (*column == screen.choice.sort, screen.paint.unicode) {
            (false, _) => "",
            (true, true) if screen.choice.reversed => "▴",
            (true, true) => "▾",
            (true, false) if screen.choice.reversed => "^",
            (true, false) => "*",
        };
        let mut title = format!("{}{mark}", column.head().0);
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
    for (index, (_, row)) in sight.clone().zip(&rows[sight]) {
        let mut spans = Vec::new();
        for column in &chosen {
            if *column != Column::Name {
                spans.push(Span::raw(" "));
            }
            spans.extend(workload_cell(screen.paint, row, *column, cells(*column)));
        }
        lines.push(marked(screen, Pane::Workloads, index, Line::from(spans)));
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
    let style = match column {
        Column::Bar => return node_digits(paint, &text, cells),
        Column::Local => row.level().map(|level| paint.level(level)).unwrap_or_default(),
        Column::Missed if row.totals.missed.is_some_and(|missed| missed > 0) && row.allocation.is_some() => {
            paint.alarm()
        }
        Column::Name if row.allocation.is_some() => BOLD,
        _ => Style::new(),
    };
    vec![Span::styled(padded(&text, cells, column.is_text()), style)]
}

/// A bar of digits, each in the colour of its node.
fn node_digits(paint: Paint, digits: &str, cells: usize) -> Vec<Span<'static>> {
    let style = |c: char| c.to_digit(36).map(|node| paint.node(node)).unwrap_or_default();
    let mut spans: Vec<_> = digits.chars().map(|c| Span::styled(String::from(c), style(c))).collect();
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
    let sight = in_sight(screen, Pane::Nodes, model.nodes.len(), room);
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
    for (index, node) in sight.clone().zip(&model.nodes[sight]) {
        let label = padded(&node.node.to_string(), NODE.1, false);
        let mut spans = vec![Span::styled(label, screen.paint.node(node.node)), Span::raw(" ")];
        spans.extend(memory_bar(screen.paint, model, node, bar_cells));
        for (title, cells, is_text) in &chosen {
            spans.push(Span::raw(format!(" {}", padded(&node_cell(model, node, title), *cells, *is_text))));
        }
        lines.push(marked(screen, Pane::Nodes, index, Line::from(spans)));
    }
    lines
}

/// Bytes of a node's base memory: reserved, promised, used beyond that, free.
fn memory_parts(model: &Model, node: &Node) -> Option<[u64; 4]> {
    let base = node.memory.iter().find(|memory| memory.kind == "memory")?;
    let held = model.promises(node.node, "memory");
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
    let filling = filled.iter().map(|part| marks[*part as usize]);
    let mut spans: Vec<_> = filling.map(|(mark, _, style)| Span::styled(mark, style)).collect();
    spans.push(Span::raw(" ".repeat(cells - filled.len())));
    spans
}

fn events(screen: &mut Screen, model: &Model, room: usize) -> Vec<Line<'static>> {
    screen.places[Pane::Events as usize].from = 0;
    let mut sight = in_sight(screen, Pane::Events, model.events.len(), room);
    if screen.pane != Pane::Events {
        sight = 0..sight.len();
    }
    let more = match model.missed_events {
        0 => String::new(),
        missed => format!(" ({missed} came too fast to be shown)"),
    };
    let mut lines = vec![Line::styled(format!(" EVENTS{more}"), heading(Pane::Events, screen))];
    for (index, event) in sight.clone().zip(model.events.range(sight)) {
        lines.push(marked(screen, Pane::Events, index, event_line(screen.paint, event)));
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
    let more = match event.suppressed {
        0 => String::new(),
        count => format!(" ({count} more like it were not reported)"),
    };
    Line::from(vec![
        Span::styled(format!("{} ", clean(time)), QUIET),
        Span::styled(kind, style),
        Span::raw(format!(" {}: {}{more}", about.join(", "), clean(&event.message))),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_node_is_red() {
        let paint = Paint { colours: true, unicode: true };
        for node in 0..36 {
            let colour = paint.node(node).fg;
            assert!(!matches!(colour, None | Some(Color::Red | Color::LightRed)), "node {node}: {colour:?}");
        }
    }
}
