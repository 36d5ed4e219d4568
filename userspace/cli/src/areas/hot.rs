//! Text output of the accessed areas.

use std::{collections::BTreeSet, fmt::Write as _};

use numaward_accesses::hot::{HotArea, HotAreas};

use super::{MAX_TABLE_ROWS, format_percent, format_shares};
use crate::{
    table::{columns, or_dash, row, size},
    text::clean,
};

/// Renders the areas that are accessed most, and the sum of the remaining ones.
pub(crate) fn render(hot: &HotAreas) -> String {
    let nodes: BTreeSet<u32> =
        hot.areas.iter().flat_map(|area| area.nodes.iter().map(|on| on.node)).collect();
    let accessed: Vec<&HotArea> = hot.areas.iter().filter(|area| area.accessed_percent > 0.0).collect();
    let mut text = String::new();
    if accessed.is_empty() {
        text.push_str("none of the monitored memory was accessed\n");
    } else {
        let mut titles = row(["PID", "ADDRESS", "REGION", "ACCESSED", "FOR"]);
        titles.extend(nodes.iter().map(|node| format!("NODE {node}")));
        titles.push("REMOTE".to_owned());
        let cells = |area: &&HotArea| {
            let mut cells = row([&area.pid.to_string(), &area.start, &area.region]);
            cells.push(format_percent(area.accessed_percent));
            cells.push(format!("{:.1} s", area.age_seconds));
            let on = |node: &u32| area.nodes.iter().find(|on| on.node == *node).map_or(0, |on| on.bytes);
            cells.extend(nodes.iter().map(|node| size(on(node))));
            cells.push(or_dash(area.remote_percent.map(format_percent)));
            cells
        };
        let rows = accessed.iter().take(MAX_TABLE_ROWS).map(cells);
        text.push_str(&columns(&std::iter::once(titles).chain(rows).collect::<Vec<_>>()));
        if accessed.len() > MAX_TABLE_ROWS {
            let _ = writeln!(
                text,
                "{} more areas are accessed less: -o json has all",
                accessed.len() - MAX_TABLE_ROWS
            );
        }
    }
    let all: u64 = hot.areas.iter().map(HotArea::bytes).sum();
    let of_accessed: u64 = accessed.iter().map(|area| area.bytes()).sum();
    let _ = writeln!(text, "not accessed: {} of {}", size(all - of_accessed), size(all));
    for process in &hot.processes {
        let shares = format_shares(&process.ran_on);
        let ran_on = if shares.is_empty() { "not known, as it used too little CPU time" } else { &shares };
        let _ = writeln!(text, "process {} ({}) ran on: {ran_on}", process.pid, clean(&process.command));
    }
    let cost = hot.processes.iter().map(|process| process.monitor_millis).sum::<Option<u64>>();
    if let Some(millis) = cost {
        let _ = writeln!(text, "monitoring took {millis} ms of CPU time in {:.1} s", hot.seconds);
    }
    for note in &hot.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}

#[cfg(test)]
mod tests {
    use numaward_accesses::{NodeShare, hot::MonitoredProcess};
    use numaward_api::RegionNode;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn on(node: u32, bytes: u64) -> RegionNode {
        RegionNode { node, bytes }
    }

    fn area(accessed_percent: f64, nodes: Vec<RegionNode>) -> HotArea {
        HotArea {
            pid: 7,
            region: "[heap]".to_owned(),
            start: "0x1000".to_owned(),
            end: "0x2000".to_owned(),
            accessed_percent,
            age_seconds: 2.5,
            remote_percent: Some(75.0),
            nodes,
        }
    }

    #[test]
    fn renders_accessed_and_other_memory() {
        let hot = HotAreas {
            seconds: 10.0,
            processes: vec![MonitoredProcess {
                pid: 7,
                command: "db\n".to_owned(),
                ran_on: vec![NodeShare { node: 0, percent: 100.0 }],
                monitor_millis: Some(12),
            }],
            notes: vec!["something is missing".to_owned()],
            areas: vec![area(95.0, vec![on(1, 2 * MIB)]), area(0.0, vec![on(0, 6 * MIB)])],
        };
        let text = render(&hot);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[0],
            ["PID", "ADDRESS", "REGION", "ACCESSED", "FOR", "NODE", "0", "NODE", "1", "REMOTE"]
        );
        assert_eq!(lines[1].join(" "), "7 0x1000 [heap] 95 % 2.5 s 0 B 2.0 MiB 75 %");
        assert!(text.contains("\nnot accessed: 6.0 MiB of 8.0 MiB\n"), "{text}");
        assert!(text.contains("\nprocess 7 (db\\n) ran on: node 0 100 %\n"), "{text}");
        assert!(
            text.contains("monitoring took 12 ms of CPU time in 10.0 s\nsomething is missing\n"),
            "{text}"
        );
        let nothing = render(&HotAreas::default());
        assert!(nothing.starts_with("none of the monitored memory was accessed\n"), "{nothing}");
    }
}
