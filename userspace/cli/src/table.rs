//! Plain text output: aligned columns, wrapped text, sizes.

use std::{borrow::Cow, fmt::Write, iter};

use numaward_topology::Bytes;
use unicode_width::UnicodeWidthStr;

use crate::text::clean;

/// Width of wrapped text, in characters.
const WRAP_WIDTH: usize = 80;

/// Renders rows, each column as wide as its widest cell. The last column is not padded. Control characters are escaped,
/// so that each cell fits in one line.
pub(crate) fn columns(rows: &[Vec<String>]) -> String {
    let cells: Vec<Vec<Cow<'_, str>>> =
        rows.iter().map(|row| row.iter().map(|cell| clean(cell)).collect()).collect();
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widest =
        |column| cells.iter().filter_map(|row| row.get(column)).map(|cell: &Cow<'_, str>| cell.width()).max();
    let widths: Vec<usize> = (0..count).map(|column| widest(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in &cells {
        let line = row.iter().zip(&widths).fold(String::new(), |mut line, (cell, widest)| {
            let gap = widest - cell.width() + 2;
            let _ = write!(line, "{cell}{:gap$}", "");
            line
        });
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Renders rows below the titles of their columns.
pub(crate) fn table<const N: usize>(
    titles: [&str; N],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    columns(&iter::once(row(titles)).chain(rows).collect::<Vec<_>>())
}

/// Returns a row of owned cells.
pub(crate) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

/// Returns a cell, `-` if the value is not known.
pub(crate) fn or_dash(cell: Option<impl ToString>) -> String {
    cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string())
}

/// Wraps text into lines of at most [`WRAP_WIDTH`] characters, all but the first one indented.
pub(crate) fn wrap(text: &str, first_column: usize, indent: usize) -> String {
    let mut wrapped = String::new();
    let mut column = first_column;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > indent.max(first_column) && column + 1 + length > WRAP_WIDTH {
            let _ = write!(wrapped, "\n{:indent$}", "");
            column = indent;
        } else if !wrapped.is_empty() {
            wrapped.push(' ');
            column += 1;
        }
        wrapped.push_str(word);
        column += length;
    }
    wrapped
}

/// Formats bytes with one decimal in the largest possible unit: `23.5 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    Bytes(bytes).rounded()
}

/// Formats the value of a cgroup knob: bytes get a unit, other values stay.
pub(crate) fn setting(knob: &str, value: &str) -> String {
    let is_size = knob.starts_with("memory.") || knob.starts_with("hugetlb.");
    match value.parse() {
        Ok(bytes) if is_size => size(bytes),
        _ => value.to_owned(),
    }
}

/// Formats seconds with milliseconds, as short times count on an exclusive CPU.
pub(crate) fn seconds(micros: u64) -> String {
    format!("{}.{:03}", micros / 1_000_000, micros / 1000 % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_settings_have_a_unit() {
        assert_eq!(setting("memory.max", "167772160"), "160.0 MiB");
        assert_eq!(setting("memory.max", "max"), "max");
        assert_eq!(setting("hugetlb.2MB.max", "4194304"), "4.0 MiB");
        assert_eq!(setting("cpuset.mems", "1"), "1");
    }

    #[test]
    fn aligns_columns_and_trims_lines() {
        let rows = [row(["NODE", "CPUS"]), row(["0", "0-3"]), row(["10", ""])];
        assert_eq!(columns(&rows), "NODE  CPUS\n0     0-3\n10\n");
        assert_eq!(columns(&[]), "");
        let rows = [row(["漢字", "a\n\x1b[2J"]), row(["x", "b"])];
        assert_eq!(
            columns(&rows),
            "漢字  a\\n\\x1b[2J\nx     b\n",
            "aligned by terminal cells, each row in one line"
        );
    }

    #[test]
    fn wraps_and_indents_long_text() {
        let text = wrap(&"word ".repeat(30), 10, 4);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].len() <= 70 && lines[1].len() <= 80, "{text}");
        assert!(lines[1].starts_with("    word"), "{text}");
        let long = "x".repeat(100);
        assert_eq!(wrap(&long, 10, 10), long, "a word longer than a line is not broken");
    }
}
