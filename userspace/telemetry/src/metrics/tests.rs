use std::time::Duration;

use numaward_model::{snapshot::*, testing::snapshot};
use numaward_topology::{Bytes, NodeId};

use super::*;

#[derive(Debug)]
struct FixedSource(Snapshot);

impl SnapshotSource for FixedSource {
    fn snapshot(&self) -> Snapshot {
        self.0.clone()
    }
}

fn written(snapshot: Snapshot, format: Format) -> String {
    encoded(&Metrics::new(Arc::new(FixedSource(snapshot))), format)
}

fn encoded(metrics: &Metrics, format: Format) -> String {
    let mut text = Vec::new();
    metrics
        .encode(format, |piece| {
            text.extend_from_slice(&piece);
            true
        })
        .unwrap();
    String::from_utf8(text).unwrap()
}

#[test]
fn containers_have_kubernetes_labels() {
    let named = |name: &str| WorkloadFigures { name: name.into(), ..snapshot().workloads.remove(1) };
    let workloads = ["shop/web-0/main", "numaward/bench", "a//b", "a/b/c/d"].map(named).to_vec();
    let allocated = Some(vec![AllocatedFigures::default()]);
    let workloads = workloads.into_iter().map(|of| WorkloadFigures { allocated: allocated.clone(), ..of });
    let workloads = workloads.collect();
    let text = written(Snapshot { workloads, ..snapshot() }, Format::Prometheus);
    let labels = r#"{namespace="shop",pod="web-0",container="main""#;
    for line in [
        format!("numaward_memory_allocated_bytes_total{labels},numa_node=\"2\",locality=\"local\"}} 0"),
        format!("numaward_oom_kills_total{labels},constraint=\"unknown\"}} 3"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    let with = |label: &str| text.lines().filter(|line| line.contains(label)).count();
    assert_eq!(with("namespace="), with("container=\"main\""));
    let doubled = |line: &&str| line.contains("namespace=") && line.contains("workload=");
    assert_eq!(text.lines().find(doubled), None, "the series of a pod have no label workload");
}

/// The sample lines, which are equal in both formats.
const SAMPLES: &str = r#"numaward_build_info{version="VERSION"} 1
numaward_memory_allocated_bytes_total{workload="a\\b\"c\nd.service",numa_node="2",locality="local"} 4096
numaward_memory_allocated_bytes_total{workload="a\\b\"c\nd.service",numa_node="2",locality="remote"} 8192
numaward_kernel_memory_allocated_bytes_total{workload="a\\b\"c\nd.service",numa_node="2"} 0
numaward_unattributed_allocated_bytes_total{numa_node="2",reason="atomic"} 16384
numaward_unattributed_allocated_bytes_total{numa_node="2",reason="reclaim"} 4096
numaward_unknown_node_allocated_bytes_total 0
numaward_cpu_seconds_total{workload="a\\b\"c\nd.service",numa_node="2"} 2.5
numaward_memory_resident_bytes{workload="a\\b\"c\nd.service",numa_node="2",type="anon"} 1
numaward_memory_resident_bytes{workload="a\\b\"c\nd.service",numa_node="2",type="file"} 2
numaward_memory_resident_bytes{workload="a\\b\"c\nd.service",numa_node="2",type="kernel"} 3
numaward_memory_resident_bytes{workload="a\\b\"c\nd.service",numa_node="2",type="hugepages-2Mi"} 2097152
numaward_memory_pressure_waiting_seconds_total{workload="a\\b\"c\nd.service"} 1.5
numaward_memory_pressure_stalled_seconds_total{workload="a\\b\"c\nd.service"} 0.0
numaward_tiering_bytes_total{workload="a\\b\"c\nd.service",direction="demoted"} 4
numaward_tiering_bytes_total{workload="a\\b\"c\nd.service",direction="promoted"} 5
numaward_hugepages_allocated_bytes_total{workload="a\\b\"c\nd.service",numa_node="2",kind="hugepages-2Mi",locality="local"} 2097152
numaward_hugepages_allocated_bytes_total{workload="a\\b\"c\nd.service",numa_node="2",kind="hugepages-2Mi",locality="remote"} 0
numaward_remote_access_pages_total{workload="a\\b\"c\nd.service",numa_node="2",source="hint_fault"} 7
numaward_touched_pages_total{workload="a\\b\"c\nd.service",locality="local",source="hint_fault"} 14
numaward_touched_pages_total{workload="a\\b\"c\nd.service",locality="remote",source="hint_fault"} 7
numaward_node_access_pages_total{numa_node="0",memory_numa_node="2"} 5
numaward_node_access_pages_total{numa_node="0",memory_numa_node="unknown"} 2
numaward_remote_sampling_info{workload="a\\b\"c\nd.service",state="on"} 1
numaward_remote_access_estimated_ratio{workload="a\\b\"c\nd.service"} 0.125
numaward_dram_accesses_total{workload="a\\b\"c\nd.service",numa_node="2",locality="local"} 11
numaward_dram_accesses_total{workload="a\\b\"c\nd.service",numa_node="2",locality="remote"} 12
numaward_migrated_bytes_total{workload="a\\b\"c\nd.service",reason="numa_misplaced",from_numa_node="0",to_numa_node="2"} 8192
numaward_migrated_bytes_total{workload="a\\b\"c\nd.service",reason="syscall",from_numa_node="unknown",to_numa_node="unknown"} 4096
numaward_reclaim_stall_seconds_sum{workload="a\\b\"c\nd.service"} 0.0
numaward_reclaim_stall_seconds_count{workload="a\\b\"c\nd.service"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.000016"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.000064"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.000256"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.001024"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.004096"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.016384"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.065536"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.262144"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="1.048576"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="4.194304"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="+Inf"} 0
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="none"} 0
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="cpuset",elsewhere="free"} 1
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="cpuset",elsewhere="none"} 0
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="mempolicy",elsewhere="free"} 0
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="mempolicy",elsewhere="none"} 0
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="memcg"} 0
numaward_oom_kills_total{workload="blind",constraint="unknown"} 3
numaward_exclusive_cpu_intruder_seconds_total{cpu="3",class="kernel_thread"} 0.0
numaward_exclusive_cpu_intruder_seconds_total{cpu="3",class="host"} 1.5
numaward_exclusive_cpu_intruder_seconds_total{cpu="3",class="workload"} 0.0
numaward_exclusive_cpu_interrupts_total{cpu="3",kind="hard"} 5
numaward_exclusive_cpu_interrupts_total{cpu="3",kind="soft"} 6
numaward_exclusive_cpu_interrupt_seconds_total{cpu="3",kind="hard"} 0.25
numaward_exclusive_cpu_interrupt_seconds_total{cpu="3",kind="soft"} 0.0
numaward_node_memory_bytes{numa_node="2",kind="hugepages-2Mi",state="total"} 4194304
numaward_node_memory_bytes{numa_node="2",kind="memory",state="total"} 1073741824
numaward_node_memory_unused_bytes{numa_node="2",kind="hugepages-2Mi"} 2097152
numaward_workloads{counters="own"} 1
numaward_workloads{counters="other"} 1
numaward_degraded{part="topology"} 1
numaward_degraded{part="cgroups"} 0
numaward_probe_info{probe="alloc",mode="absent",reason="btf"} 1
numaward_probe_runs_total{probe="alloc"} 9
numaward_probe_sampled_ratio{probe="alloc"} 0.25
numaward_probe_events_lost_total{probe="alloc"} 0
numaward_coverage_ratio 0.99
numaward_probe_map_entries{map="LEAF"} 3
numaward_probe_map_memory_bytes{family="alloc"} 4096
numaward_probe_map_capacity{map="LEAF"} 16
"#;

fn samples(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.contains("scrape_duration"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

#[test]
fn both_formats_have_same_samples() {
    let expected = SAMPLES.replace("VERSION", numaward_api::VERSION);
    assert_eq!(samples(&written(snapshot(), Format::OpenMetrics)), expected);
    assert_eq!(samples(&written(snapshot(), Format::Prometheus)), expected);
}

/// Visited samples are equal to the text.
#[test]
fn visited_samples_equal_text() {
    let mut lines = String::new();
    let visit = |family: &FamilyDescription, sample: &MetricSample<'_>| {
        let name = &family.sample_name;
        // Both sides escape these characters alike.
        let labels = sample.labels().map(|(name, value)| format!("{name}={value:?}"));
        let labels = labels.collect::<Vec<_>>().join(",");
        let mut line = |suffix: &str, more: &str, value: String| {
            let labels = [labels.as_str(), more].into_iter().filter(|labels| !labels.is_empty());
            let labels = labels.collect::<Vec<_>>().join(",");
            let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
            lines.extend([name, suffix, &labels, " ", &value, "\n"]);
        };
        match sample.value {
            SampleValue::Number(Number::Unsigned(number)) => line("", "", number.to_string()),
            SampleValue::Number(Number::Signed(number)) => line("", "", number.to_string()),
            SampleValue::Number(Number::Real(number)) => line("", "", format!("{number:?}")),
            SampleValue::Histogram { sum, up_to } => {
                line("_sum", "", format!("{sum:?}"));
                line("_count", "", up_to.last().unwrap().1.to_string());
                for (bound, count) in up_to {
                    let bound = bound.to_string().replace("inf", "+Inf");
                    line("_bucket", &format!("le=\"{bound}\""), count.to_string());
                }
            }
        }
    };
    Metrics::new(Arc::new(FixedSource(snapshot()))).visit(visit).unwrap();
    assert_eq!(samples(&lines), SAMPLES.replace("VERSION", numaward_api::VERSION));
}

/// Any process can choose the name of a cgroup.
#[test]
fn escapes_names_of_workloads() {
    let name = format!("a\"}} 1\nfake_metric{{x=\"\\\u{1b}[2J\u{202e}{}", "long".repeat(2560));
    let mut evil = snapshot();
    evil.workloads.truncate(1);
    evil.workloads[0].name = name.as_str().into();
    let escaped = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let usual = |text: &str| text.replace(&format!("workload=\"{escaped}\""), "workload=\"plain\"");
    let mut plain = evil.clone();
    plain.workloads[0].name = "plain".into();
    for format in [Format::OpenMetrics, Format::Prometheus] {
        let (found, expected) =
            (samples(&written(evil.clone(), format)), samples(&written(plain.clone(), format)));
        assert!(found.contains(&escaped));
        assert_eq!(usual(&found), expected);
    }
}

#[test]
fn open_metrics_has_no_suffix_and_ends() {
    let text = written(snapshot(), Format::OpenMetrics);
    assert!(text.contains(
        "# TYPE numaward_memory_allocated_bytes counter\n# UNIT numaward_memory_allocated_bytes bytes\n"
    ));
    assert!(text.contains("# TYPE numaward_build info\n"));
    assert!(text.ends_with("\n# EOF\n"));
}

#[test]
fn prometheus_families_have_suffix() {
    let text = written(snapshot(), Format::Prometheus);
    assert!(text.contains(
        "# HELP numaward_oom_kills_total Kills of the workload's processes by the OOM killer, by the constraint of the \
         allocation: cpuset and mempolicy come from pinning, with `elsewhere`: free if other nodes had free memory, none if \
         the whole host was full. With memory.oom.group, all processes that are killed at once count as one; `unknown` \
         (from memory.events, if no probe reports it) counts each process\n\
         # TYPE numaward_oom_kills_total counter\n\
         numaward_oom_kills_total{"
    ));
    assert!(text.contains("# TYPE numaward_build_info gauge\nnumaward_build_info{"));
    assert!(text.contains("# TYPE numaward_scrape_duration_seconds histogram\n"));
    assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
}

/// Each family is declared once, before its samples.
#[test]
fn samples_follow_their_family() {
    for format in [Format::Prometheus, Format::OpenMetrics] {
        let text = written(snapshot(), format);
        let mut families = Vec::new();
        for line in text.lines() {
            if let Some(declared) = line.strip_prefix("# TYPE ") {
                let name = declared.split(' ').next().unwrap().to_owned();
                assert!(!families.contains(&name), "{name} twice");
                families.push(name);
            } else if !line.starts_with('#') {
                assert!(line.starts_with(families.last().unwrap()), "{line}");
            }
        }
        assert!(families.iter().all(|name| name.starts_with("numaward_")), "{families:?}");
    }
}

#[test]
fn closed_connection_stops_writing() {
    let mut pieces = 0;
    let workloads = vec![snapshot().workloads.remove(0); 10_000];
    let metrics = Metrics::new(Arc::new(FixedSource(Snapshot { workloads, ..snapshot() })));
    let result = metrics.encode(Format::Prometheus, |_| {
        pieces += 1;
        false
    });
    assert!(result.is_err());
    assert_eq!(pieces, 1);
}

#[test]
fn writes_largest_numbers() {
    let most = Bytes(u64::MAX);
    let mut stalls = StallFigures { total: Duration::MAX, ..Default::default() };
    stalls.buckets[3..].fill(u64::MAX);
    let workload = WorkloadFigures {
        name: "most".into(),
        start: None,
        allocated: Some(vec![AllocatedFigures { local: most, remote: most, kernel: most }]),
        cpu: Some(vec![Duration::MAX]),
        resident: None,
        hugepages: Arc::default(),
        pressure: Some(PressureFigures { waiting: Duration::MAX, stalled: Duration::ZERO }),
        oom_kills: None,
        tiering: None,
        activity: Some(WorkloadActivity {
            remote: Some(vec![u64::MAX]),
            migrated: Some(vec![MigratedFigures {
                reason: "numa_misplaced",
                nodes: Some((NodeId(0), NodeId(2))),
                pages: u64::MAX,
            }]),
            stalls: Some(stalls),
            oom_kills: Some(
                ["none", "cpuset", "mempolicy", "memcg"]
                    .map(|constraint| OomKillFigures::new(constraint, u64::MAX)),
            ),
            ..WorkloadActivity::default()
        }),
    };
    for format in [Format::Prometheus, Format::OpenMetrics] {
        let text = written(Snapshot { workloads: vec![workload.clone()], ..snapshot() }, format);
        for line in [
            "memory_allocated_bytes_total{workload=\"most\",numa_node=\"2\",locality=\"local\"}",
            "kernel_memory_allocated_bytes_total{workload=\"most\",numa_node=\"2\"}",
            "remote_access_pages_total{workload=\"most\",numa_node=\"2\",source=\"hint_fault\"}",
            "migrated_bytes_total{workload=\"most\",reason=\"numa_misplaced\",from_numa_node=\"0\",to_numa_node=\"2\"}",
            "reclaim_stall_seconds_count{workload=\"most\"}",
            "reclaim_stall_seconds_bucket{workload=\"most\",le=\"+Inf\"}",
            "oom_kills_total{workload=\"most\",constraint=\"memcg\"}",
            "oom_kills_total{workload=\"most\",constraint=\"cpuset\",elsewhere=\"free\"}",
        ] {
            assert!(text.contains(&format!("\nnumaward_{line} {}\n", u64::MAX)), "{line}: {text}");
        }
        assert!(samples(&text).lines().all(|line| !line.ends_with("NaN") && !line.ends_with("nf")), "{text}");
    }
}

/// Returns the names without duplicates.
fn names(text: &str) -> Vec<&str> {
    let mut names: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    for line in &mut names {
        *line = line.split(['{', ' ']).next().unwrap();
    }
    names.dedup();
    names
}

#[test]
fn filter_spares_alerts() {
    let exported = |json: &str| serde_json::from_str::<ExportedMetrics>(json).unwrap();
    let metrics = |json| {
        let counter = prometheus_client::metrics::counter::Counter::<u64>::default();
        let metrics = Metrics::new(Arc::new(FixedSource(snapshot()))).exporting(exported(json));
        metrics.with(|registry| registry.register("refusals", "Refusals", counter))
    };
    let families = r#"{"families": {"allow": ["numaward_*_total"], "deny": ["*_pages_*", "numaward_d*"]}}"#;
    for format in [Format::Prometheus, Format::OpenMetrics] {
        let text = encoded(&metrics(families), format);
        let found = names(&text);
        assert!(
            found.contains(&"numaward_refusals_total") && found.contains(&"numaward_oom_kills_total"),
            "{text}"
        );
        let is_wanted = |name: &&str| {
            name.ends_with("_total") && !name.contains("_pages_") && !name.starts_with("numaward_d")
        };
        assert!(found.iter().all(is_wanted), "{found:?}");
        assert!(!text.contains("scrape_duration") && !text.contains("numaward_build"), "{text}");
        assert_eq!(format == Format::OpenMetrics, text.ends_with("# EOF\n"));
    }
    let workloads = metrics(r#"{"workloads": {"allow": ["*"], "deny": ["*.service"]}}"#);
    let text = encoded(&workloads, Format::Prometheus);
    assert!(text.contains("workload=\"blind\"") && !text.contains(".service"), "{text}");
    let series = |visit: fn(&Metrics, &mut dyn FnMut(String)) -> fmt::Result| {
        let mut found = Vec::new();
        visit(&workloads, &mut |series| found.push(series)).unwrap();
        found.iter().filter(|series| series.contains(".service")).count()
    };
    assert_eq!(series(|metrics, found| metrics.visit_exported(|of, sample| found(text_of(of, sample)))), 0);
    assert!(series(|metrics, found| metrics.visit(|of, sample| found(text_of(of, sample)))) > 10);
}

fn text_of(family: &FamilyDescription, sample: &MetricSample<'_>) -> String {
    format!("{} {:?}", family.sample_name, sample.labels().collect::<Vec<_>>())
}
