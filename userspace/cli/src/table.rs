//! Plain text for people: aligned columns, wrapped text, sizes.

use std::{borrow::Cow, fmt::Write, iter};

use unicode_width::UnicodeWidthStr;

use crate::text::clean;

/// Width that text is wrapped to.
const WIDTH: usize = 80;

/// Rows of cells, each column as wide as its widest cell. The last column is not padded. A cell is a line, whatever is
/// in it.
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

/// Rows below the titles of their columns.
pub(crate) fn table<const N: usize>(
    titles: [&str; N],
    rows: impl IntoIterator<Item = Vec<String>>,
) -> String {
    columns(&iter::once(row(titles)).chain(rows).collect::<Vec<_>>())
}

/// A row of owned cells.
pub(crate) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

/// A cell for what may not be known.
pub(crate) fn or_dash(cell: Option<impl ToString>) -> String {
    cell.map_or_else(|| "-".to_owned(), |cell| cell.to_string())
}

/// Text in lines of at most [`WIDTH`] characters, all but the first indented.
pub(crate) fn wrap(text: &str, first_column: usize, indent: usize) -> String {
    let mut wrapped = String::new();
    let mut column = first_column;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > indent.max(first_column) && column + 1 + length > WIDTH {
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

/// Bytes with one decimal in the largest unit that is not above them: `23.5 GiB`.
pub(crate) fn size(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => {
            // Tenths, rounded; 128 bits hold ten times any size.
            let tenths = (u128::from(bytes) * 10 + (1 << (shift - 1))) >> shift;
            format!("{}.{} {unit}", tenths / 10, tenths % 10)
        }
        None => format!("{bytes} B"),
    }
}

/// What a knob of a cgroup is set to, for people: bytes have a unit, all else is as it is.
pub(crate) fn setting(knob: &str, value: &str) -> String {
    let is_size = knob.starts_with("memory.") || knob.starts_with("hugetlb.");
    match value.parse() {
        Ok(bytes) if is_size => size(bytes),
        _ => value.to_owned(),
    }
}

/// Seconds with milliseconds, which matter where a CPU should be clean.
pub(crate) fn seconds(micros: u64) -> String {
    format!("{}.{:03}", micros / 1_000_000, micros / 1000 % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_are_sizes_have_a_unit() {
        assert_eq!(setting("memory.max", "167772160"), "160.0 MiB");
        assert_eq!(setting("memory.max", "max"), "max");
        assert_eq!(setting("hugetlb.2MB.max", "4194304"), "4.0 MiB");
        assert_eq!(setting("cpuset.mems", "1"), "1");
    }

    #[test]
    fn sizes_have_one_decimal() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1_572_864, "1.5 MiB"),
            (25_199_882_240, "23.5 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn columns_are_aligned_and_lines_end_without_blanks() {
        let rows = [row(["NODE", "CPUS"]), row(["0", "0-3"]), row(["10", ""])];
        assert_eq!(columns(&rows), "NODE  CPUS\n0     0-3\n10\n");
        assert_eq!(columns(&[]), "");
        let rows = [row(["漢字", "a\n\x1b[2J"]), row(["x", "b"])];
        assert_eq!(
            columns(&rows),
            "漢字  a\\n\\x1b[2J\nx     b\n",
            "by cells of a terminal, and in one line"
        );
    }

    #[test]
    fn long_text_is_wrapped_and_indented() {
        let text = wrap(&"word ".repeat(30), 10, 4);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].len() <= 70 && lines[1].len() <= 80, "{text}");
        assert!(lines[1].starts_with("    word"), "{text}");
        let long = "x".repeat(100);
        assert_eq!(wrap(&long, 10, 10), long, "a word longer than a line stands alone");
    }
}
