//! Which workloads are shown, in which order, and what their cells say: the same on a screen and in a table.

use std::cmp::Ordering;

use clap::ValueEnum;

use super::{
    accesses::Accesses,
    model::{Level, Model, Row},
};
use crate::{
    args::{Shown, Sort},
    table::size,
    text::clean,
};

/// What the user wants to see.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    pub(crate) sort: Sort,
    /// Against the order that the sort has by itself.
    pub(crate) reversed: bool,
    /// Words that must all be in a workload's name, kind or cgroup; `node:N` asks for memory on that node.
    pub(crate) filter: String,
    /// Only workloads with a guarantee.
    pub(crate) guaranteed: bool,
}

impl From<&Shown> for Choice {
    fn from(shown: &Shown) -> Self {
        let Shown { sort, filter, guaranteed, .. } = shown;
        Self { sort: *sort, reversed: false, filter: filter.clone(), guaranteed: *guaranteed }
    }
}

impl Choice {
    /// The workloads that are shown, in order, with their keys.
    pub(crate) fn rows<'a>(&self, model: &'a Model) -> Vec<(&'a str, &'a Row)> {
        let filter = self.filter.to_lowercase();
        let words: Vec<&str> = filter.split_whitespace().collect();
        let shown = |row: &Row| {
            (!self.guaranteed || row.allocation.is_some()) && words.iter().all(|word| matches(row, word))
        };
        let rows = model.rows.iter().filter(|(_, row)| shown(row));
        // What is compared is made once for each, not once for each comparison.
        let mut rows: Vec<_> =
            rows.map(|(key, row)| (sort_value(self.sort, row), key.as_str(), row)).collect();
        rows.sort_by(|(a, a_key, a_row), (b, b_key, b_row)| {
            let order = match (a, b) {
                // What is not known comes last, in either order.
                (Some(_), None) => return Ordering::Less,
                (None, Some(_)) => return Ordering::Greater,
                (Some(a), Some(b)) => a.total_cmp(b),
                (None, None) if self.sort == Sort::Name => {
                    a_row.workload.workload.cmp(&b_row.workload.workload)
                }
                (None, None) => Ordering::Equal,
            };
            let order = if self.reversed { order.reverse() } else { order };
            order.then_with(|| a_key.cmp(b_key))
        });
        rows.into_iter().map(|(_, key, row)| (key, row)).collect()
    }

    /// The next or the previous column to sort by.
    pub(crate) fn sort_by_next(&mut self, back: bool) {
        let all = Sort::value_variants();
        let at = all.iter().position(|sort| *sort == self.sort).unwrap_or(0);
        let step = if back { all.len() - 1 } else { 1 };
        self.sort = all[(at + step) % all.len()];
        self.reversed = false;
    }
}

fn matches(row: &Row, word: &str) -> bool {
    if let Some(node) = word.strip_prefix("node:").and_then(|node| node.parse().ok()) {
        return row
            .totals
            .resident
            .as_ref()
            .and_then(|nodes| nodes.get(&node))
            .is_some_and(|bytes| *bytes > 0);
    }
    let has = |text: &str| text.to_lowercase().contains(word);
    has(&row.workload.workload) || has(&row.workload.kind) || row.workload.cgroup.as_deref().is_some_and(has)
}

/// What a workload is sorted by, the smallest first. Names are compared as they are.
#[expect(clippy::cast_precision_loss, reason = "workloads that differ by so little may be in any order")]
fn sort_value(sort: Sort, row: &Row) -> Option<f64> {
    Some(match sort {
        Sort::Name => return None,
        Sort::Resident => -(row.totals.resident_bytes()? as f64),
        Sort::Local => row.local_share()?,
        Sort::LocalRate => -row.rates?.local,
        Sort::RemoteRate => -row.rates?.remote,
        Sort::Accesses => -Accesses::of(&row.workload)?.remote_share()?,
        Sort::Missed => -(row.totals.missed? as f64),
    })
}

/// A column of the workloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Name,
    /// The promised nodes.
    Nodes,
    /// Where its memory lies.
    Bar,
    Resident,
    Local,
    LocalRate,
    RemoteRate,
    /// How many of its accesses go to other nodes.
    Accesses,
    Missed,
}

impl Column {
    /// In the order of the screen.
    pub(crate) const ALL: [Self; 9] = [
        Self::Name,
        Self::Nodes,
        Self::Bar,
        Self::Resident,
        Self::Local,
        Self::LocalRate,
        Self::RemoteRate,
        Self::Accesses,
        Self::Missed,
    ];

    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Name => "WORKLOAD",
            Self::Nodes => "NODES",
            Self::Bar => "BY NODE",
            Self::Resident => "RESIDENT",
            Self::Local => "LOCAL",
            Self::LocalRate => "LOCAL/S",
            Self::RemoteRate => "REMOTE/S",
            Self::Accesses => "ACCESSES",
            Self::Missed => "MISSED",
        }
    }

    /// Cells of a terminal, but for the name, which takes what is left.
    pub(crate) const fn width(self) -> usize {
        match self {
            Self::Name => 0,
            Self::Nodes => 7,
            Self::Bar => 16,
            Self::Resident | Self::Missed => 10,
            Self::Local => 8,
            Self::Accesses => 9,
            Self::LocalRate | Self::RemoteRate => 12,
        }
    }

    pub(crate) const fn is_text(self) -> bool {
        matches!(self, Self::Name | Self::Nodes | Self::Bar)
    }

    pub(crate) const fn sort(self) -> Option<Sort> {
        match self {
            Self::Name => Some(Sort::Name),
            Self::Nodes | Self::Bar => None,
            Self::Resident => Some(Sort::Resident),
            Self::Local => Some(Sort::Local),
            Self::LocalRate => Some(Sort::LocalRate),
            Self::RemoteRate => Some(Sort::RemoteRate),
            Self::Accesses => Some(Sort::Accesses),
            Self::Missed => Some(Sort::Missed),
        }
    }

    /// Those that a screen of this width has room for, in order, and the width of the name.
    pub(crate) fn fitting(width: usize, sort: Sort) -> (Vec<Self>, usize) {
        let least = if width < 60 { 10 } else { 24 };
        let sorted = Self::ALL.into_iter().filter(|column| column.sort() == Some(sort));
        let rest = [
            Self::Resident,
            Self::Local,
            Self::RemoteRate,
            Self::Missed,
            Self::Accesses,
            Self::Nodes,
            Self::LocalRate,
            Self::Bar,
        ];
        let (mut chosen, mut left) = (vec![Self::Name], width);
        for column in sorted.chain(rest) {
            let takes = column.width() + 1;
            if !chosen.contains(&column) && left >= takes + least {
                left -= takes;
                chosen.push(column);
            }
        }
        chosen.sort_by_key(|column| Self::ALL.iter().position(|other| other == column));
        (chosen, left)
    }

    /// What it says of a workload.
    pub(crate) fn cell(self, row: &Row) -> String {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        match self {
            Self::Name => clean(&row.workload.workload).into_owned(),
            Self::Nodes => or_dash(row.promised_nodes().map(|nodes| nodes.to_string())),
            Self::Bar => row.totals.resident.as_ref().map_or_else(String::new, |nodes| {
                let bytes: Vec<_> = nodes.iter().map(|(node, bytes)| (*node, *bytes)).collect();
                bar(&bytes, Self::Bar.width()).into_iter().map(digit).collect()
            }),
            Self::Resident => or_dash(row.totals.resident_bytes().map(size)),
            Self::Local => {
                // Seen without colours too.
                let mark = match row.level() {
                    Some(Level::Bad) => "!!",
                    Some(Level::Warn) => "! ",
                    Some(Level::Good) => "  ",
                    None => "",
                };
                or_dash(row.local_share().map(|share| percent(share) + mark))
            }
            Self::LocalRate => or_dash(row.rates.map(|rates| rate(rates.local))),
            Self::RemoteRate => or_dash(row.rates.map(|rates| rate(rates.remote))),
            Self::Accesses => or_dash(Accesses::of(&row.workload).map(|accesses| accesses.cell())),
            Self::Missed => or_dash(row.totals.missed.filter(|_| row.allocation.is_some()).map(size)),
        }
    }
}

/// A share of 1 in percent. What is not all does not read as all, and what is not nothing not as nothing.
pub(crate) fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        p if p > 0.0 && p < 0.1 => "<0.1 %".to_owned(),
        p if (99.0..100.0).contains(&p) => format!("{:.1} %", p.min(99.9)),
        p if p > 0.0 && p < 10.0 => format!("{p:.1} %"),
        p => format!("{p:.0} %"),
    }
}

/// Bytes per second; a plain 0 for none, so that what moves stands out.
pub(crate) fn rate(bytes: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is not negative, and one too large is the largest"
    )]
    let bytes = bytes.round() as u64;
    if bytes == 0 { "0".to_owned() } else { format!("{}/s", size(bytes)) }
}

/// Cells of a bar, each with the node whose memory it stands for. Whoever has anything has a cell, if there are enough.
pub(crate) fn bar(parts: &[(u32, u64)], cells: usize) -> Vec<u32> {
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
    // Rounding left too many or too few: who is furthest from what is due takes or gives.
    let used = |lengths: &[(u32, u128, usize)]| lengths.iter().map(|(_, _, length)| length).sum::<usize>();
    while used(&lengths) != cells {
        let grow = used(&lengths) < cells;
        let lack = |length: &(u32, u128, usize)| {
            let (due, has) = (length.1, length.2 as u128 * all);
            if grow { due.saturating_sub(has) } else { has.saturating_sub(due) }
        };
        let Some(most) =
            lengths.iter_mut().filter(|length| grow || length.2 > 0).max_by_key(|length| lack(length))
        else {
            break;
        };
        most.2 = if grow { most.2 + 1 } else { most.2 - 1 };
    }
    lengths.into_iter().flat_map(|(node, _, length)| std::iter::repeat_n(node, length)).collect()
}

/// A node in one cell: its number, beyond 9 its letter.
pub(crate) fn digit(node: u32) -> char {
    char::from_digit(node % 36, 36).unwrap_or('?')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_do_not_read_as_all_or_nothing_unless_they_are() {
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
    fn a_bar_is_as_long_as_asked_and_shows_the_smallest() {
        let text = |parts: &[(u32, u64)], cells| bar(parts, cells).into_iter().map(digit).collect::<String>();
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
    fn columns_fit_every_width_and_hold_what_is_sorted_by() {
        for width in 0..200 {
            for sort in Sort::value_variants() {
                let (columns, name) = Column::fitting(width, *sort);
                let taken: usize = columns.iter().map(|column| column.width() + 1).sum::<usize>() - 1;
                assert_eq!(taken + name, width);
                assert_eq!(columns[0], Column::Name);
                if width >= 23 {
                    assert!(columns.iter().any(|column| column.sort() == Some(*sort)), "{width}");
                }
            }
        }
        assert_eq!(Column::fitting(80, Sort::Resident).1, 26, "a unit's name can be read on 80 columns");
    }
}
