//! Drawing of the screen at any size.
//!
//! Each view consists of lines of text. A high screen shows all three panes; a lower one shows only the pane that has
//! the focus. Colour alone never carries information.

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
    list::{cell_text, node_bar, node_cell, rate},
    model::{Level, TopModel, WorkloadRow},
    screen::{Pane, PaneCursor, Screen, View},
};
use crate::{
    column::Column,
    text::{clean, cut},
};

/// Number of events at the bottom of a screen with all panes.
const EVENT_LINES: usize = 4;
/// Minimum height of the workload pane beside other panes.
const MIN_WORKLOAD_LINES: usize = 8;

/// Capabilities of the terminal.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Palette {
    pub(crate) colours: bool,
    /// Characters beyond ASCII.
    pub(crate) unicode: bool,
}

impl Palette {
    /// Reads the user's environment (<https://no-color.org>; locale(7)).
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

    /// Returns a node's own colour. Beyond six nodes, the colours repeat, and only the digits differ. No node is red or
    /// light red: red is for broken guarantees.
    fn node(self, node: u32) -> Style {
        const COLOURS: [Color; 6] =
            [Color::Cyan, Color::Magenta, Color::Yellow, Color::Green, Color::Blue, Color::LightMagenta];
        self.colour(COLOURS[node as usize % COLOURS.len()])
    }

    /// Style of a broken guarantee.
    pub(crate) fn alarm(self) -> Style {
        self.colour(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// Style of stale figures, which do not mean that a guarantee is broken.
    fn stale(self) -> Style {
        self.colour(Color::Yellow).add_modifier(Modifier::BOLD)
    }
}

pub(crate) const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const REVERSED: Style = Style::new().add_modifier(Modifier::REVERSED);

/// Draws the screen.
pub(crate) fn draw(frame: &mut Frame<'_>, screen: &mut Screen, model: &TopModel, now: Instant) {
    let area = frame.area();
    let (columns, height) = (usize::from(area.width), usize::from(area.height));
    let mut lines = vec![header(screen, model, now, columns)];
    if height > 2 {
        lines.extend(notice(screen, model, now));
    }
    let footer = (height > 4).then(|| footer(screen, model.recorded.is_some()));
    let room = height.saturating_sub(lines.len() + usize::from(footer.is_some()));
    let text = match &screen.view {
        View::Lists => None,
        View::Workload(key) => Some(detail::workload(model, key, screen.palette, columns)),
        View::Node(node) => Some(detail::node(model, *node)),
        View::Help => Some(detail::help(screen.palette, model.recorded.is_some())),
    };
    lines.extend(match text {
        None => lists(screen, model, columns, room),
        Some(text) => visible_lines(screen, text, room),
    });
    if let Some(footer) = footer {
        lines.resize(height - 1, Line::default());
        lines.push(footer);
    }
    frame.render_widget(Text::from(lines), area);
}

/// Returns the line at the top: the host, and whether the figures are current.
fn header(screen: &Screen, model: &TopModel, now: Instant, columns: usize) -> Line<'static> {
    let palette = screen.palette;
    let link = match model.samples {
        _ if let Some(now) = &model.recorded => {
            let (date, time) =
                (now.time.get(..10).unwrap_or_default(), now.time.get(11..19).unwrap_or_default());
            let state = if now.is_playing { "playing" } else { "paused" };
            Span::styled(
                format!("{date} {time}  {}/{}  {state}", now.number, now.count),
                palette.colour(Color::Cyan),
            )
        }
        _ if model.staleness(now).is_some() => Span::styled("STALE", palette.stale()),
        0 => Span::raw("waiting"),
        _ => Span::styled("live", palette.colour(Color::Green)),
    };
    let count = model.rows.len();
    let rates: Vec<_> = model.rows.values().filter_map(|row| row.rates).collect();
    let mut facts = vec![
        format!("numaward {}", clean(&model.version.version)),
        format!("Linux {}", clean(&model.version.kernel)),
        match &model.allocations {
            Some(_) => {
                let guaranteed = model.rows.values().filter(|row| row.allocation.is_some()).count();
                format!("{count} workloads, {guaranteed} guaranteed")
            }
            // Not fetched yet.
            None => format!("{count} workloads"),
        },
    ];
    if !rates.is_empty() {
        facts.push(format!("remote {}", rate(rates.iter().map(|rates| rates.remote).sum())));
        facts.push(format!("missed {}", rate(rates.iter().map(|rates| rates.missed).sum())));
    }
    let room = columns.saturating_sub(link.width() + 2);
    let mut text = String::new();
    for fact in facts {
        let glue = if text.is_empty() { "" } else { "  " };
        // Only the host's name is cut; other facts that do not fit are omitted.
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

/// Returns the most important problem with the figures, if any.
fn notice(screen: &Screen, model: &TopModel, now: Instant) -> Option<Line<'static>> {
    let palette = screen.palette;
    if let Some(reason) = model.staleness(now) {
        return Some(Line::styled(clean(&reason).into_owned(), palette.stale()));
    }
    let warn = palette.colour(Color::Yellow);
    if let Some((subject, reason)) = model.failures.first_key_value() {
        return Some(Line::styled(format!("{subject}: {}", clean(reason)), warn));
    }
    let status = model.status.as_ref()?;
    let absent = status.probes.iter().find(|probe| probe.probe == "alloc" && probe.mode == "absent");
    let text = match (absent, status.degraded.first()) {
        (Some(probe), _) => {
            let reason = probe.reason.as_deref().unwrap_or("run numaward doctor for possible reasons");
            format!("allocations are not counted: {}", clean(reason))
        }
        (None, Some(degraded)) => format!("{}: {}", clean(&degraded.part), clean(&degraded.reason)),
        (None, None) => return None,
    };
    Some(Line::styled(text, warn))
}

/// Returns the line at the bottom: the keys of the view.
fn footer(screen: &Screen, is_recorded: bool) -> Line<'static> {
    if screen.is_filtering {
        let filter = clean(&screen.list.filter).into_owned();
        return Line::from(vec![
            Span::styled("filter: ", BOLD),
            Span::raw(filter),
            Span::styled(" ", REVERSED),
            Span::styled("  Enter applies it, Esc clears it", DIM),
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
            ("Enter", "open"),
            ("/", "filter"),
        ],
        _ if is_recorded => &[("q", "back"), ("?", "help"), ("Up/Down", "scroll"), ("t T", "step")],
        View::Lists => &[
            ("q", "quit"),
            ("?", "help"),
            ("Enter", "open"),
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
        spans.extend([Span::styled(*key, BOLD), Span::styled(format!(" {does}  "), DIM)]);
    }
    let list = &screen.list;
    if list.guaranteed && screen.view == View::Lists {
        spans.push(Span::raw("only guaranteed  "));
    }
    if !list.filter.is_empty() && screen.view == View::Lists {
        spans.push(Span::raw(format!("filter: {}", clean(&list.filter))));
    }
    Line::from(spans)
}

fn visible_lines(screen: &mut Screen, lines: Vec<Line<'static>>, room: usize) -> Vec<Line<'static>> {
    screen.page = room;
    screen.scrolled = screen.scrolled.min(lines.len().saturating_sub(room));
    lines.into_iter().skip(screen.scrolled).take(room).collect()
}

fn lists(screen: &mut Screen, model: &TopModel, columns: usize, room: usize) -> Vec<Line<'static>> {
    let nodes_room = (model.nodes.len() + 1).min((room / 3).max(3));
    let with_nodes = room >= nodes_room + 1 + MIN_WORKLOAD_LINES;
    let with_events = room >= nodes_room + 1 + MIN_WORKLOAD_LINES + 1 + EVENT_LINES;
    match screen.pane {
        Pane::Workloads if !with_nodes => return workloads(screen, model, columns, room),
        Pane::Nodes if !with_nodes => return nodes(screen, model, columns, room),
        // The focus is on the events, so they are shown even without room for all panes.
        Pane::Events if !with_events => return events(screen, model, room),
        _ => {}
    }
    let above_events = room - if with_events { 1 + EVENT_LINES } else { 0 };
    let mut lines = nodes(screen, model, columns, nodes_room);
    lines.push(Line::default());
    lines.extend(workloads(screen, model, columns, above_events - nodes_room - 1));
    if with_events {
        lines.resize(above_events + 1, Line::default());
        lines.extend(events(screen, model, EVENT_LINES));
    }
    lines
}

/// Pads or cuts a text to the width of its column.
fn pad(text: &str, cells: usize, is_text: bool) -> String {
    let text = cut(text, cells);
    let gap = " ".repeat(cells.saturating_sub(text.width()));
    if is_text { format!("{text}{gap}") } else { format!("{gap}{text}") }
}

fn heading(pane: Pane, screen: &Screen) -> Style {
    if pane == screen.pane { BOLD.add_modifier(Modifier::UNDERLINED) } else { BOLD }
}

/// Marks a line of a pane if it is selected. The selected workload is marked even if another pane has the focus.
fn mark_selected(screen: &Screen, pane: Pane, index: usize, mut line: Line<'static>) -> Line<'static> {
    let is_here = pane == screen.pane;
    let is_selected = index == screen.cursors[pane as usize].at && (is_here || pane == Pane::Workloads);
    line.spans.insert(0, Span::raw(if is_selected { ">" } else { " " }));
    if is_selected && is_here { line.patch_style(REVERSED) } else { line }
}

/// Returns the visible lines of a pane below its title, which include the selected one.
fn visible_range(screen: &mut Screen, pane: Pane, count: usize, room: usize) -> Range<usize> {
    let shown = room.saturating_sub(1);
    if pane == screen.pane {
        screen.page = shown;
    }
    let PaneCursor { at, first_visible } = &mut screen.cursors[pane as usize];
    *at = (*at).min(count.saturating_sub(1));
    let (least, most) = ((*at + 1).saturating_sub(shown.max(1)), count.saturating_sub(shown.max(1)));
    *first_visible = (*first_visible).min(most).min(*at).max(least);
    *first_visible..count.min(*first_visible + shown)
}

fn workloads(screen: &mut Screen, model: &TopModel, columns: usize, room: usize) -> Vec<Line<'static>> {
    let rows = screen.list.rows(model);
    screen.cursors[Pane::Workloads as usize].at = screen.position(&rows);
    let visible = visible_range(screen, Pane::Workloads, rows.len(), room);
    let (chosen, name) = Column::fitting(columns.saturating_sub(1), screen.list.sort);
    let cells = |column: Column| if column == Column::Name { name } else { column.title_and_width().1 };
    let mut titles = String::from(" ");
    for column in &chosen {
        let mark = match (*column == screen.list.sort, screen.palette.unicode) {
            (false, _) => "",
            (true, true) if screen.list.reversed => "▴",
            (true, true) => "▾",
            (true, false) if screen.list.reversed => "^",
            (true, false) => "*",
        };
        let mut title = format!("{}{mark}", column.title_and_width().0);
        if *column == Column::Name {
            let _ = match rows.len() {
                count if count == model.rows.len() => write!(title, " ({count})"),
                count => write!(title, " ({count} of {})", model.rows.len()),
            };
        } else {
            titles.push(' ');
        }
        titles.push_str(&pad(&title, cells(*column), column.is_text()));
    }
    let mut lines = vec![Line::styled(titles, heading(Pane::Workloads, screen))];
    for (index, (_, row)) in visible.clone().zip(&rows[visible]) {
        let mut spans = Vec::new();
        for column in &chosen {
            if *column != Column::Name {
                spans.push(Span::raw(" "));
            }
            spans.extend(workload_cell(screen.palette, row, *column, cells(*column)));
        }
        lines.push(mark_selected(screen, Pane::Workloads, index, Line::from(spans)));
    }
    if rows.is_empty() && room > 1 {
        let text = match () {
            () if model.samples == 0 => " waiting for the first sample",
            () if model.rows.is_empty() => " no workloads",
            () => " no workload matches the filter",
        };
        lines.push(Line::styled(text, DIM));
    }
    lines
}

fn workload_cell(palette: Palette, row: &WorkloadRow, column: Column, cells: usize) -> Vec<Span<'static>> {
    let text = cell_text(column, row);
    let style = match column {
        Column::Bar => return node_digits(palette, &text, cells),
        Column::Local => row.level().map(|level| palette.level(level)).unwrap_or_default(),
        Column::Missed if row.totals.missed.is_some_and(|missed| missed > 0) && row.allocation.is_some() => {
            palette.alarm()
        }
        Column::Name if row.allocation.is_some() => BOLD,
        _ => Style::new(),
    };
    vec![Span::styled(pad(&text, cells, column.is_text()), style)]
}

/// Returns a bar of digits, each in the colour of its node.
fn node_digits(palette: Palette, digits: &str, cells: usize) -> Vec<Span<'static>> {
    let style = |c: char| c.to_digit(36).map(|node| palette.node(node)).unwrap_or_default();
    let mut spans: Vec<_> = digits.chars().map(|c| Span::styled(String::from(c), style(c))).collect();
    spans.push(Span::raw(" ".repeat(cells.saturating_sub(digits.len()))));
    spans
}

/// Columns of the node pane: title, width, and whether the cells are text.
const NODE_COLUMN: (&str, usize, bool) = ("NODE", 4, false);
const NODE_COLUMNS: [(&str, usize, bool); 7] = [
    ("FREE", 10, false),
    ("GUARANTEED", 10, false),
    ("REMOTE/S", 12, false),
    ("CPUS", 9, true),
    ("LOCAL/S", 12, false),
    ("TOTAL", 10, false),
    ("EXCL", 4, false),
];
const MIN_BAR_CELLS: usize = 10;
const MAX_BAR_CELLS: usize = 40;

fn nodes(screen: &mut Screen, model: &TopModel, columns: usize, room: usize) -> Vec<Line<'static>> {
    let visible = visible_range(screen, Pane::Nodes, model.nodes.len(), room);
    let mut left = columns.saturating_sub(1 + NODE_COLUMN.1 + 1);
    let mut chosen = Vec::new();
    for column in NODE_COLUMNS {
        if left >= MIN_BAR_CELLS + 1 + column.1 {
            left -= column.1 + 1;
            chosen.push(column);
        }
    }
    let bar_cells = left.min(MAX_BAR_CELLS);
    let mut titles = format!(" {} {}", NODE_COLUMN.0, pad("MEMORY", bar_cells, true));
    for (title, cells, is_text) in &chosen {
        titles.push(' ');
        titles.push_str(&pad(title, *cells, *is_text));
    }
    let mut lines = vec![Line::styled(titles, heading(Pane::Nodes, screen))];
    for (index, node) in visible.clone().zip(&model.nodes[visible]) {
        let label = pad(&node.node.to_string(), NODE_COLUMN.1, false);
        let mut spans = vec![Span::styled(label, screen.palette.node(node.node)), Span::raw(" ")];
        spans.extend(memory_bar(screen.palette, model, node, bar_cells));
        for (title, cells, is_text) in &chosen {
            spans.push(Span::raw(format!(" {}", pad(&node_cell(model, node, title), *cells, *is_text))));
        }
        lines.push(mark_selected(screen, Pane::Nodes, index, Line::from(spans)));
    }
    lines
}

/// Returns the bytes of a node's base memory: reserved, guaranteed, used beyond that, free.
fn memory_parts(model: &TopModel, node: &Node) -> Option<[u64; 4]> {
    let base = node.memory.iter().find(|memory| memory.kind == "memory")?;
    let kind = model.node_guarantees(node.node, "memory");
    let (reserved, guaranteed) =
        kind.map_or((0, 0), |memory| (memory.reserved_bytes, memory.guaranteed_bytes));
    let free = base.free_bytes.unwrap_or(0);
    let used = base.total_bytes.saturating_sub(free).saturating_sub(reserved).saturating_sub(guaranteed);
    let rest = base.total_bytes.saturating_sub(reserved).saturating_sub(guaranteed).saturating_sub(used);
    Some([reserved, guaranteed, used, rest])
}

/// Returns mark, name and style of the parts of a node's memory: reserved, guaranteed, used beyond that, free.
pub(crate) fn memory_marks(palette: Palette) -> [(&'static str, &'static str, Style); 4] {
    let marks = if palette.unicode { ["▒", "█", "▓", "░"] } else { ["r", "G", "#", "."] };
    let names = ["reserved", "guaranteed", "used, not guaranteed", "free"];
    let styles = [
        palette.colour(Color::DarkGray),
        palette.colour(Color::Blue),
        palette.colour(Color::Yellow),
        palette.colour(Color::DarkGray),
    ];
    std::array::from_fn(|part| (marks[part], names[part], styles[part]))
}

fn memory_bar(palette: Palette, model: &TopModel, node: &Node, cells: usize) -> Vec<Span<'static>> {
    let parts = memory_parts(model, node).unwrap_or_default();
    let parts: Vec<(u32, u64)> = (0..).zip(parts).collect();
    let filled = node_bar(&parts, cells);
    let marks = memory_marks(palette);
    let filling = filled.iter().map(|part| marks[*part as usize]);
    let mut spans: Vec<_> = filling.map(|(mark, _, style)| Span::styled(mark, style)).collect();
    spans.push(Span::raw(" ".repeat(cells - filled.len())));
    spans
}

fn events(screen: &mut Screen, model: &TopModel, room: usize) -> Vec<Line<'static>> {
    screen.cursors[Pane::Events as usize].first_visible = 0;
    let mut visible = visible_range(screen, Pane::Events, model.events.len(), room);
    if screen.pane != Pane::Events {
        visible = 0..visible.len();
    }
    let more = match model.missed_events {
        0 => String::new(),
        missed => format!(" ({missed} events came too fast to be shown)"),
    };
    let mut lines = vec![Line::styled(format!(" EVENTS{more}"), heading(Pane::Events, screen))];
    for (index, event) in visible.clone().zip(model.events.range(visible)) {
        lines.push(mark_selected(screen, Pane::Events, index, event_line(screen.palette, event)));
    }
    if model.events.is_empty() && room > 1 {
        lines.push(Line::styled(" no events", DIM));
    }
    lines
}

/// Renders an event in a line.
pub(crate) fn event_line(palette: Palette, event: &Event) -> Line<'static> {
    let style = match event.severity {
        Severity::Info => Style::new(),
        Severity::Warning => palette.colour(Color::Yellow),
        Severity::Critical => palette.alarm(),
    };
    // Only the time of day; the web page and the API have the date.
    let time = event.time.get(11..19).unwrap_or(&event.time);
    let kind = event.kind.as_str().replace('_', " ");
    let name = event.workload.as_deref().map(|name| cut(&clean(name), 32).into_owned());
    let node = event.node.map(|node| format!("node {node}"));
    let about: Vec<String> = name.into_iter().chain(node).collect();
    let more = match event.suppressed {
        0 => String::new(),
        count => format!(" ({count} similar events were not reported)"),
    };
    Line::from(vec![
        Span::styled(format!("{} ", clean(time)), DIM),
        Span::styled(kind, style),
        Span::raw(format!(" {}: {}{more}", about.join(", "), clean(&event.message))),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_node_is_red() {
        let palette = Palette { colours: true, unicode: true };
        for node in 0..36 {
            let colour = palette.node(node).fg;
            assert!(!matches!(colour, None | Some(Color::Red | Color::LightRed)), "node {node}: {colour:?}");
        }
    }
}
