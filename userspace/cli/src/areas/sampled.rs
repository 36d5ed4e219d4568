//! Text output of the sampled areas.

use std::{collections::BTreeSet, fmt::Write as _};

use numaward_accesses::{
    percent_of,
    sampled::{SampledArea, SampledAreas},
};

use super::{MAX_TABLE_ROWS, format_percent, format_shares};
use crate::{
    table::{columns, or_dash, row, size},
    text::clean,
};

/// Renders the areas with the most samples, and the sums over all areas.
pub(crate) fn render(sampled: &SampledAreas) -> String {
    let mut text = String::new();
    if sampled.areas.is_empty() {
        text.push_str("no access of the workload was sampled\n");
    } else {
        text.push_str(&table(&sampled.areas));
        if let Some(more) = sampled.areas.len().checked_sub(MAX_TABLE_ROWS).filter(|more| *more > 0) {
            let _ = writeln!(text, "{more} more areas have fewer samples: -o json has all");
        }
    }
    let units: Vec<String> = sampled
        .units
        .iter()
        .map(|unit| format!("{} (1 in {} {})", unit.name, unit.period, unit.counts))
        .collect();
    let _ = writeln!(
        text,
        "{} samples in {:.1} s, by {} of {}",
        sampled.samples,
        sampled.seconds,
        units.join(" and "),
        clean(&sampled.processor)
    );
    if let Some(share) = sampled.remote_percent {
        let _ = writeln!(
            text,
            "of the {} samples whose page was found, {} are remote",
            sampled.placed_samples,
            format_percent(share)
        );
    }
    if sampled.samples > 0 {
        let sources = &sampled.sources;
        let shares = [
            ("local memory", Some(sources.local_memory)),
            ("remote memory", Some(sources.remote_memory)),
            ("caches of other nodes", Some(sources.remote_cache)),
            // Only some processors do not distinguish these.
            ("memory or caches of another chip", Some(sources.elsewhere).filter(|count| *count > 0)),
            ("other caches", Some(sources.cache)),
            ("unknown", Some(sources.unknown)),
        ];
        let shares = shares.into_iter().filter_map(|(name, count)| Some((name, count?)));
        let shares: Vec<String> = shares
            .map(|(name, count)| format!("{name} {}", format_percent(percent_of(count, sampled.samples))))
            .collect();
        let _ = writeln!(text, "the data came from: {}", shares.join(", "));
    }
    for process in sampled.processes.iter().take(MAX_TABLE_ROWS) {
        let from = format_shares(&process.from);
        let _ = writeln!(text, "process {} ({}) accessed from: {from}", process.pid, clean(&process.command));
    }
    if let Some(more) = sampled.processes.len().checked_sub(MAX_TABLE_ROWS).filter(|more| *more > 0) {
        let _ = writeln!(text, "{more} more processes have fewer samples: -o json has all");
    }
    let _ =
        writeln!(text, "reading took {} ms of CPU time, without the sampling itself", sampled.reading_millis);
    for note in &sampled.notes {
        let _ = writeln!(text, "{note}");
    }
    text
}

fn table(areas: &[SampledArea]) -> String {
    let visible = areas.get(..MAX_TABLE_ROWS).unwrap_or(areas);
    let nodes: BTreeSet<u32> =
        visible.iter().flat_map(|area| area.nodes.iter().map(|share| share.node)).collect();
    let mut titles = row(["PID", "ADDRESS", "SIZE", "REGION", "SAMPLES", "REMOTE", "DRAM"]);
    titles.extend(nodes.iter().map(|node| format!("NODE {node}")));
    let cells = |area: &SampledArea| {
        let mut cells = row([&area.pid.to_string(), &area.start, &size(area.bytes), &area.region]);
        cells.push(area.samples.to_string());
        cells.push(or_dash(area.remote_percent.map(format_percent)));
        cells.push(or_dash(area.dram_percent.map(format_percent)));
        let on = |node: &u32| {
            area.nodes.iter().find(|share| share.node == *node).map_or(0.0, |share| share.percent)
        };
        cells.extend(nodes.iter().map(|node| format_percent(on(node))));
        cells
    };
    columns(&std::iter::once(titles).chain(visible.iter().map(cells)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use numaward_accesses::{
        NodeShare,
        sampled::{SampledProcess, SourceCounts, UsedUnit},
    };

    use super::*;

    fn area(start: u64, samples: u64) -> SampledArea {
        SampledArea {
            pid: 7,
            region: "/a\nb".to_owned(),
            start: format!("{start:#x}"),
            end: format!("{:#x}", start + (2 << 20)),
            bytes: 2 << 20,
            samples,
            placed_samples: samples,
            remote_percent: Some(98.4),
            dram_percent: None,
            nodes: vec![NodeShare { node: 1, percent: 100.0 }],
            sources: SourceCounts { unknown: samples, ..SourceCounts::default() },
        }
    }

    fn sampled(areas: Vec<SampledArea>) -> SampledAreas {
        SampledAreas {
            seconds: 10.0,
            processor: "AMD EPYC\n".to_owned(),
            units: vec![UsedUnit {
                name: "ibs_op".to_owned(),
                cpus: "0-3".to_owned(),
                period: 1_048_560,
                counts: "micro-ops".to_owned(),
            }],
            samples: 200,
            placed_samples: 150,
            remote_percent: Some(98.4),
            sources: SourceCounts {
                local_memory: 20,
                remote_memory: 100,
                cache: 60,
                unknown: 20,
                ..SourceCounts::default()
            },
            reading_millis: 12,
            processes: vec![SampledProcess {
                pid: 7,
                command: "db\n".to_owned(),
                samples: 200,
                from: vec![NodeShare { node: 0, percent: 75.0 }, NodeShare { node: 1, percent: 25.0 }],
            }],
            notes: vec!["something is missing".to_owned()],
            areas,
        }
    }

    #[test]
    fn renders_areas_and_sources() {
        let text = render(&sampled((0..22).map(|at| area(at << 22, 100 - at)).collect()));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["PID", "ADDRESS", "SIZE", "REGION", "SAMPLES", "REMOTE", "DRAM", "NODE", "1"]);
        assert_eq!(lines[1].join(" "), "7 0x0 2.0 MiB /a\\nb 100 98 % - 100 %");
        assert_eq!(lines[21].join(" "), "2 more areas have fewer samples: -o json has all");
        for expected in [
            "200 samples in 10.0 s, by ibs_op (1 in 1048560 micro-ops) of AMD EPYC\\n\n",
            "\nof the 150 samples whose page was found, 98 % are remote\n",
            "local memory 10 %, remote memory 50 %, caches of other nodes 0 %, other caches 30 %, unknown 10 %\n",
            "process 7 (db\\n) accessed from: node 0 75 %, node 1 25 %\n",
            "reading took 12 ms of CPU time, without the sampling itself\nsomething is missing\n",
        ] {
            assert!(text.contains(expected), "{text}");
        }
        let mut on_arm = sampled(vec![area(0, 1)]);
        on_arm.sources.elsewhere = 50;
        let text = render(&on_arm);
        assert!(
            text.contains("caches of other nodes 0 %, memory or caches of another chip 25 %, other"),
            "{text}"
        );
        let nothing = render(&SampledAreas::default());
        assert!(nothing.starts_with("no access of the workload was sampled\n0 samples"), "{nothing}");
        assert!(!nothing.contains("remote"), "{nothing}");
    }

    #[test]
    fn json_has_all_areas() {
        let json = serde_json::to_value(sampled(vec![area(4096, 3)])).unwrap();
        assert_eq!(json["placedSamples"], 150);
        assert_eq!(json["units"][0]["counts"], "micro-ops");
        assert_eq!(json["sources"]["remoteMemory"], 100);
        let area = &json["areas"][0];
        assert_eq!((&area["start"], &area["samples"]), (&"0x1000".into(), &3.into()));
        assert!(area.get("dramPercent").is_none(), "an unknown value is absent: {area}");
    }
}
