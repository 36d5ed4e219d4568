//! Screens as SVG images: a few kilobytes of text, sharp at every size.

use std::fmt::Write as _;

use vt100::{Cell, Color, Screen};

const CELL_WIDTH: usize = 8;
const CELL_HEIGHT: usize = 17;
const MARGIN: usize = 12;
const PAPER: &str = "#16181d";
const INK: &str = "#d8dbe0";
const QUIET: &str = "#8b919c";
/// The sixteen colors of a terminal.
const COLORS: [&str; 16] = [
    "#30343c", "#ef6b6b", "#7ecb7b", "#e8c260", "#6aa7f0", "#c792ea", "#5fc9c9", "#d8dbe0", "#7a808c",
    "#ff8f8f", "#a0e29c", "#ffdd88", "#93c4ff", "#dfb4ff", "#8be5e5", "#ffffff",
];

/// Style of a run of cells.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CellStyle {
    ink: String,
    paper: Option<String>,
    bold: bool,
    underlined: bool,
}

fn color(color: Color) -> Option<String> {
    match color {
        Color::Default => None,
        Color::Idx(index) => COLORS.get(usize::from(index)).map(|color| (*color).to_owned()),
        Color::Rgb(red, green, blue) => Some(format!("#{red:02x}{green:02x}{blue:02x}")),
    }
}

fn style(cell: &Cell) -> CellStyle {
    let ink = color(cell.fgcolor()).unwrap_or_else(|| if cell.dim() { QUIET } else { INK }.to_owned());
    let paper = color(cell.bgcolor());
    let (bold, underlined) = (cell.bold(), cell.underline());
    if cell.inverse() {
        CellStyle { ink: paper.unwrap_or_else(|| PAPER.to_owned()), paper: Some(ink), bold, underlined }
    } else {
        CellStyle { ink, paper, bold, underlined }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

pub(crate) fn draw(screen: &Screen, title: &str) -> String {
    let (rows, columns) = screen.size();
    let (width, height) =
        (usize::from(columns) * CELL_WIDTH + 2 * MARGIN, usize::from(rows) * CELL_HEIGHT + 2 * MARGIN);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" role=\"img\" aria-label=\"{}\" font-family=\"ui-monospace, 'DejaVu Sans Mono', monospace\" \
         font-size=\"13\" xml:space=\"preserve\">\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{PAPER}\"/>\n",
        escaped(title)
    );
    for row in 0..rows {
        let mut column = 0;
        while column < columns {
            let Some(first) = screen.cell(row, column) else { break };
            let (start, same) = (column, style(first));
            let mut text = String::new();
            while let Some(cell) =
                screen.cell(row, column).filter(|cell| column < columns && style(cell) == same)
            {
                if !cell.is_wide_continuation() {
                    text.push_str(if cell.has_contents() { cell.contents() } else { " " });
                }
                column += 1;
            }
            run(&mut svg, usize::from(row), usize::from(start), usize::from(column - start), &same, &text);
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// Draws cells of one style.
fn run(svg: &mut String, row: usize, column: usize, cells: usize, style: &CellStyle, text: &str) {
    let (x, y) = (MARGIN + column * CELL_WIDTH, MARGIN + row * CELL_HEIGHT);
    if let Some(paper) = &style.paper {
        let width = cells * CELL_WIDTH;
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{CELL_HEIGHT}\" fill=\"{paper}\"/>"
        );
    }
    // Each word is a separate element, so that blanks need no text and every word has its exact position.
    let mut at = 0;
    for word in text.split_inclusive(' ').collect::<Vec<_>>() {
        let length = word.chars().count();
        let word = word.trim_end();
        if !word.is_empty() {
            let (x, y) = (x + at * CELL_WIDTH, y + CELL_HEIGHT - 4);
            let weight = if style.bold { " font-weight=\"bold\"" } else { "" };
            let line = if style.underlined { " text-decoration=\"underline\"" } else { "" };
            let width = word.chars().count() * CELL_WIDTH;
            let _ = writeln!(
                svg,
                "<text x=\"{x}\" y=\"{y}\" fill=\"{}\"{weight}{line} textLength=\"{width}\">{}</text>",
                style.ink,
                escaped(word)
            );
        }
        at += length;
    }
}
