//! Rows and cells of the workload list: selection, order and text, the same on a screen and in a table.

use std::cmp::Ordering;

use clap::ValueEnum as _;
use numaward_api::Node;

use super::{
    accesses::Accesses,
    detail,
    model::{Level, TopModel, WorkloadRow},
};
use crate::{
    args::WorkloadListArgs,
    column::Column,
    table::{or_dash, size},
    text::clean,
};

impl WorkloadListArgs {
    /// Returns the selected workloads in order, each with its key.
    pub(crate) fn rows<'a>(&self, model: &'a TopModel) -> Vec<(&'a str, &'a WorkloadRow)> {
        let filter = self.filter.to_lowercase();
        let words: Vec<&str> = filter.split_whitespace().collect();
        let is_selected = |row: &WorkloadRow| {
            self.key.as_ref().is_none_or(|key| row.workload.key() == key)
                && (!self.guaranteed || row.allocation.is_some())
                && words.iter().all(|word| matches(row, word))
        };
        let rows = model.rows.iter().filter(|(_, row)| is_selected(row));
        // Sort values are computed once per row instead of once per comparison.
        let mut rows: Vec<_> =
            rows.map(|(key, row)| (sort_value(self.sort, row), key.as_str(), row)).collect();
        rows.sort_by(|(a, a_key, a_row), (b, b_key, b_row)| {
            let order = match (a, b) {
                (Some(a), Some(b)) => a.total_cmp(b),
                _ if self.sort == Column::Name => a_row.name().cmp(b_row.name()),
                _ => Ordering::Equal,
            };
            let order = if self.reversed { order.reverse() } else { order };
            // Unknown values come last, in either order.
            a.is_none().cmp(&b.is_none()).then(order).then_with(|| a_key.cmp(b_key))
        });
        rows.into_iter().map(|(_, key, row)| (key, row)).collect()
    }

    /// Selects the next or the previous column to sort by.
    pub(crate) fn sort_by_next(&mut self, back: bool) {
        let all = Column::value_variants();
        let at = all.iter().position(|sort| *sort == self.sort).unwrap_or(0);
        let step = if back { all.len() - 1 } else { 1 };
        self.sort = all[(at + step) % all.len()];
        self.reversed = false;
    }
}

fn matches(row: &WorkloadRow, word: &str) -> bool {
    if let Some(node) = word.strip_prefix("node:").and_then(|node| node.parse().ok()) {
        let nodes = row.totals.resident.as_ref();
        return nodes.and_then(|nodes| nodes.get(&node)).is_some_and(|bytes| *bytes > 0);
    }
    let has = |text: &str| text.to_lowercase().contains(word);
    has(row.name())
        || has(&row.workload.workload)
        || has(&row.workload.kind)
        || row.workload.cgroup.as_deref().is_some_and(has)
}

/// Returns the value that a workload is sorted by, smallest first; `None` for columns that are not numbers.
#[expect(clippy::cast_precision_loss, reason = "workloads that differ by so little may be in any order")]
fn sort_value(sort: Column, row: &WorkloadRow) -> Option<f64> {
    Some(match sort {
        Column::Name | Column::Nodes | Column::Bar => return None,
        Column::Resident => -(row.totals.resident_bytes()? as f64),
        Column::Local => row.local_share()?,
        Column::LocalRate => -row.rates?.local,
        Column::RemoteRate => -row.rates?.remote,
        Column::Accesses => -Accesses::from_workload(&row.workload)?.remote_share()?,
        Column::Missed => -(row.totals.missed? as f64),
    })
}

/// Returns the text of a column for a workload.
pub(crate) fn cell_text(column: Column, row: &WorkloadRow) -> String {
    match column {
        Column::Name => clean(row.name()).into_owned(),
        Column::Nodes => or_dash(row.guaranteed_nodes()),
        Column::Bar => row.totals.resident.as_ref().map_or_else(String::new, |nodes| {
            let bytes: Vec<_> = nodes.iter().map(|(node, bytes)| (*node, *bytes)).collect();
            node_bar(&bytes, column.title_and_width().1).into_iter().map(node_digit).collect()
        }),
        Column::Resident => or_dash(row.totals.resident_bytes().map(size)),
        Column::Local => {
            // The mark repeats the colour for terminals without colours.
            let mark = match row.level() {
                Some(Level::Bad) => "!!",
                Some(Level::Warn) => "! ",
                Some(Level::Good) => "  ",
                None => "",
            };
            or_dash(row.local_share().map(percent)) + mark
        }
        Column::LocalRate => or_dash(row.rates.map(|rates| rate(rates.local))),
        Column::RemoteRate => or_dash(row.rates.map(|rates| rate(rates.remote))),
        Column::Accesses => or_dash(Accesses::from_workload(&row.workload).map(|accesses| accesses.cell())),
        Column::Missed => or_dash(row.totals.missed.filter(|_| row.allocation.is_some()).map(size)),
    }
}

/// Returns the text of a column of the node table, selected by its title.
pub(crate) fn node_cell(model: &TopModel, node: &Node, title: &str) -> String {
    let base = node.memory.iter().find(|memory| memory.kind == "memory");
    let rates = model.node_rates.get(&node.node);
    match title {
        "NODE" => node.node.to_string(),
        "FREE" => or_dash(base.and_then(|memory| memory.free_bytes).map(size)),
        "TOTAL" => or_dash(base.map(|memory| size(memory.total_bytes))),
        "GUARANTEED" => {
            or_dash(model.node_guarantees(node.node, "memory").map(|memory| size(memory.guaranteed_bytes)))
        }
        "REMOTE/S" => or_dash(rates.map(|rates| rate(rates.remote_bytes_per_second))),
        "LOCAL/S" => or_dash(rates.map(|rates| rate(rates.local_bytes_per_second))),
        "CPUS" if node.cpus.is_empty() => "none".to_owned(),
        "CPUS" => clean(&node.cpus).into_owned(),
        _ => or_dash(model.allocations.as_ref().map(|_| detail::exclusive_cpus(model, node).len())),
    }
}

/// Formats a share of 1 in percent. A share below 1 is never printed as 100 %, and a share above 0 never as 0 %.
pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        p if p > 0.0 && p < 0.1 => "<0.1 %".to_owned(),
        p if (99.0..100.0).contains(&p) => format!("{:.1} %", p.min(99.9)),
        p if p > 0.0 && p < 10.0 => format!("{p:.1} %"),
        p => format!("{p:.0} %"),
    }
}

/// Formats bytes per second. Zero is a plain 0, so that other values stand out.
pub(crate) fn rate(bytes: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is not negative, and one too large is the largest"
    )]
    let bytes = bytes.round() as u64;
    if bytes == 0 { "0".to_owned() } else { format!("{}/s", size(bytes)) }
}

/// Distributes the cells of a bar over nodes in proportion to their bytes. A node with memory gets at least one cell,
/// if there are enough.
pub(crate) fn node_bar(parts: &[(u32, u64)], cells: usize) -> Vec<u32> {
    let all: u128 = parts.iter().map(|(_, bytes)| u128::from(*bytes)).sum();
    if all == 0 {
        return Vec::new();
    }
    let mut lengths: Vec<(u32, u128, usize)> = Vec::new();
    for &(node, bytes) in parts.iter().filter(|(_, bytes)| *bytes > 0) {
        let exact = u128::from(bytes) * cells as u128;
        let whole = usize::try_from(exact / all).unwrap_or(cells).max(1);
        lengths.push((node, exact, whole));
    }
    // After rounding, the cells may be too many or too few: adjust the nodes with the largest rounding error.
    let used = |lengths: &[(u32, u128, usize)]| lengths.iter().map(|(_, _, length)| length).sum::<usize>();
    while used(&lengths) != cells {
        let grow = used(&lengths) < cells;
        let rounding_error = |length: &(u32, u128, usize)| {
            let (exact, has) = (length.1, length.2 as u128 * all);
            if grow { exact.saturating_sub(has) } else { has.saturating_sub(exact) }
        };
        let Some(most) = lengths
            .iter_mut()
            .filter(|length| grow || length.2 > 0)
            .max_by_key(|length| rounding_error(length))
        else {
            break;
        };
        most.2 = if grow { most.2 + 1 } else { most.2 - 1 };
    }
    lengths.into_iter().flat_map(|(node, _, length)| std::iter::repeat_n(node, length)).collect()
}

/// Returns the character for a node: its number, or a letter above 9.
pub(crate) fn node_digit(node: u32) -> char {
    char::from_digit(node % 36, 36).unwrap_or('?')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_rounds_to_0_or_100_only_exactly() {
        for (share, text) in [
            (0.0, "0 %"),
            (0.0001, "<0.1 %"),
            (0.05, "5.0 %"),
            (0.5, "50 %"),
            (0.985, "98 %"),
            (0.9999, "99.9 %"),
            (1.0, "100 %"),
        ] {
            assert_eq!(percent(share), text);
        }
    }

    #[test]
    fn bar_fills_cells_and_shows_each_node() {
        let text = |parts: &[(u32, u64)], cells| {
            node_bar(parts, cells).into_iter().map(node_digit).collect::<String>()
        };
        assert_eq!(text(&[(0, 3), (1, 1)], 8), "00000011");
        assert_eq!(text(&[(0, 1 << 40), (11, 1)], 8), "0000000b");
        assert_eq!(text(&[(0, 1), (1, 1), (2, 1)], 4).len(), 4);
        assert_eq!(text(&[(0, 0)], 8), "");
        assert_eq!(text(&[], 8), "");
        let many: Vec<_> = (0..20).map(|node| (node, 1 + u64::from(node))).collect();
        assert_eq!(text(&many, 16).len(), 16, "more nodes than cells");
        assert_eq!(text(&many, 0), "");
    }

    #[test]
    fn columns_fit_and_include_sort_column() {
        for width in 0..200 {
            for sort in Column::value_variants() {
                let (columns, name) = Column::fitting(width, *sort);
                let taken: usize =
                    columns.iter().map(|column| column.title_and_width().1 + 1).sum::<usize>() - 1;
                assert_eq!(taken + name, width);
                assert_eq!(columns[0], Column::Name);
                if width >= 23 {
                    assert!(columns.contains(sort), "{width}");
                }
            }
        }
        assert_eq!(Column::fitting(80, Column::Resident).1, 26, "a unit's name can be read on 80 columns");
    }
}
