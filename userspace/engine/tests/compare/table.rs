//! Table of sums over many replays, by policy and load.

use std::{collections::BTreeMap, fmt::Write as _};

use numaward_simulation::{quality::per_mille, trace::Sums};

/// Sums of one row.
#[derive(Clone, Debug, Default)]
pub(crate) struct Row {
    /// Number of traces.
    pub(crate) traces: u64,
    /// Offered amounts.
    pub(crate) offered: Sums,
    /// Admitted amounts by column.
    pub(crate) columns: Vec<Sums>,
}

/// Sums by row, ordered by key.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    /// Titles of the columns.
    pub(crate) titles: Vec<String>,
    /// Rows for all traces, by policy, and by policy and load in percent.
    pub(crate) rows: BTreeMap<(Option<String>, Option<u64>), Row>,
}

impl Table {
    pub(crate) fn new(titles: &[&str]) -> Self {
        Self { titles: titles.iter().map(|&title| title.to_owned()).collect(), rows: BTreeMap::new() }
    }

    /// Adds the results of a trace.
    pub(crate) fn add(&mut self, policy: &str, load_percent: u64, offered: &Sums, columns: &[Sums]) {
        let keys = [(None, None), (Some(policy), None), (Some(policy), Some(load_percent))];
        for (policy, load) in keys {
            let row = self.rows.entry((policy.map(str::to_owned), load)).or_default();
            row.traces += 1;
            row.offered.add(offered);
            row.columns.resize(self.titles.len(), Sums::default());
            for (sum, column) in row.columns.iter_mut().zip(columns) {
                sum.add(column);
            }
        }
    }

    /// Returns the table as text: percentages of pods, CPU time and memory time.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        let percent = |part, whole| {
            let share = per_mille(part, whole);
            format!("{}.{}", share / 10, share % 10)
        };
        let width = self.titles.iter().map(String::len).max().unwrap_or(0).max(14);
        let _ = write!(text, "{:<32} {:>6} {:>6}", "% pods/CPU time/memory time", "traces", "pods");
        for title in &self.titles {
            let _ = write!(text, "  {title:>width$}");
        }
        for ((policy, load), row) in &self.rows {
            let name = match (policy, load) {
                (None, _) => "all".to_owned(),
                (Some(policy), None) => policy.clone(),
                (Some(policy), Some(load)) => format!("{policy}, load {load} %"),
            };
            let _ = write!(text, "\n{name:<32} {:>6} {:>6}", row.traces, row.offered.guaranteed);
            for sums in &row.columns {
                let shares = [
                    percent(sums.admitted(), row.offered.guaranteed),
                    percent(sums.cpu_milli_ticks, row.offered.cpu_milli_ticks),
                    percent(sums.memory_mib_ticks, row.offered.memory_mib_ticks),
                ];
                let _ = write!(text, "  {:>width$}", shares.join("/"));
            }
        }
        text
    }
}
