mod reference;

use std::time::Duration;

use numaward_topology::{Bytes, NodeId, ZoneKind};

use super::*;

#[derive(Debug)]
struct Fixed(Snapshot);

impl Source for Fixed {
    fn snapshot(&self) -> Snapshot {
        self.0.clone()
    }
}

fn written(snapshot: Snapshot, format: Format) -> String {
    encoded(&Metrics::new(Arc::new(Fixed(snapshot))), format)
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

fn snapshot() -> Snapshot {
    let workload = |name: &str| WorkloadFigures {
        name: name.into(),
        allocated: Some(vec![Allocated { local: Bytes(4096), remote: Bytes(8192), kernel: Bytes(0) }]),
        resident: Some(
            [Resident { anon: Bytes(1), file: Bytes(2), kernel: Bytes(3), mapped: Bytes(0) }].into(),
        ),
        pressure: Some(Pressure { waiting: Duration::from_millis(1500), stalled: Duration::ZERO }),
        oom_kills: Some(0),
        activity: Some(WorkloadActivity {
            remote: Some(vec![7]),
            moved: None,
            sampling: vec!["on"],
            estimated_remote_permille: Some(125),
            migrated: Some(vec![("numa_misplaced", 2)]),
            stalls: Some(numaward_probes::Stalls::default()),
            oom_kills: Some([0, 1, 0, 0]),
            dram: Some(vec![(Some(11), 12)]),
        }),
    };
    let blind = WorkloadFigures {
        allocated: None,
        resident: None,
        pressure: None,
        oom_kills: Some(3),
        activity: None,
        ..workload("blind")
    };
    Snapshot {
        nodes: vec![NodeMemory {
            node: NodeId(2),
            kinds: vec![
                ("hugepages-2Mi".parse().unwrap(), Bytes::mib(4), Some(Bytes::mib(2))),
                (ZoneKind::Memory, Bytes::gib(1), None),
            ],
        }],
        workloads: vec![workload("a\\b\"c\nd.service"), blind],
        page_size: Bytes(4096),
        accesses: Some(vec![(NodeId(0), Some(NodeId(2)), 5), (NodeId(0), None, 2)]),
        exclusive_cpus: vec![(
            numaward_topology::CpuId(3),
            CpuFigures {
                used: numaward_probes::CpuUse { host: Duration::from_millis(1500), ..Default::default() },
                interrupts: Some(Interrupts { hard: 5, soft: 6 }),
            },
        )],
        unknown_node: Some(Bytes(0)),
        probes: vec![ProbeFigures {
            probe: "alloc".to_owned(),
            mode: "absent".to_owned(),
            reason: "no BTF".to_owned(),
            runtime: None,
            runs: Some(9),
            sampled_ratio: Some(0.25),
            events_lost: Some(0),
        }],
        maps: vec![MapFigures { map: "LEAF", entries: 3, capacity: 16 }],
        map_memory: vec![("alloc", 4096)],
        workloads_with_slot: 1,
        workloads_without_slot: 1,
        degraded: vec!["topology"],
    }
}

#[test]
fn containers_of_pods_carry_the_labels_of_kubernetes() {
    let named = |name: &str| WorkloadFigures { name: name.into(), ..snapshot().workloads.remove(1) };
    let workloads = ["shop/web-0/main", "numaward/bench", "a//b", "a/b/c/d"].map(named).to_vec();
    let allocated = Some(vec![Allocated::default()]);
    let workloads = workloads.into_iter().map(|of| WorkloadFigures { allocated: allocated.clone(), ..of });
    let workloads = workloads.collect();
    let text = written(Snapshot { workloads, ..snapshot() }, Format::Prometheus);
    let labels = r#"{workload="shop/web-0/main",namespace="shop",pod="web-0",container="main""#;
    for line in [
        format!("numaward_memory_allocated_bytes_total{labels},node=\"2\",locality=\"local\"}} 0"),
        format!("numaward_oom_kills_total{labels},constraint=\"unknown\"}} 3"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    let with = |label: &str| text.lines().filter(|line| line.contains(label)).count();
    assert_eq!(with("namespace="), with("shop/web-0/main"));
}

/// What both formats share: lines of samples.
const SAMPLES: &str = r#"numaward_build_info{version="VERSION"} 1
numaward_memory_allocated_bytes_total{workload="a\\b\"c\nd.service",node="2",locality="local"} 4096
numaward_memory_allocated_bytes_total{workload="a\\b\"c\nd.service",node="2",locality="remote"} 8192
numaward_kernel_memory_allocated_bytes_total{workload="a\\b\"c\nd.service",node="2"} 0
numaward_unknown_node_allocated_bytes_total 0
numaward_memory_resident_bytes{workload="a\\b\"c\nd.service",node="2",type="anon"} 1
numaward_memory_resident_bytes{workload="a\\b\"c\nd.service",node="2",type="file"} 2
numaward_memory_resident_bytes{workload="a\\b\"c\nd.service",node="2",type="kernel"} 3
numaward_memory_pressure_waiting_seconds_total{workload="a\\b\"c\nd.service"} 1.5
numaward_memory_pressure_stalled_seconds_total{workload="a\\b\"c\nd.service"} 0.0
numaward_remote_access_pages_total{workload="a\\b\"c\nd.service",node="2",source="hint_fault"} 7
numaward_node_access_pages_total{node="0",memory_node="2"} 5
numaward_node_access_pages_total{node="0",memory_node="unknown"} 2
numaward_remote_sampling{workload="a\\b\"c\nd.service",state="on"} 1
numaward_remote_access_estimated_ratio{workload="a\\b\"c\nd.service"} 0.125
numaward_dram_accesses_total{workload="a\\b\"c\nd.service",node="2",locality="local"} 11
numaward_dram_accesses_total{workload="a\\b\"c\nd.service",node="2",locality="remote"} 12
numaward_migrated_bytes_total{workload="a\\b\"c\nd.service",reason="numa_misplaced"} 8192
numaward_reclaim_stall_seconds_sum{workload="a\\b\"c\nd.service"} 0.0
numaward_reclaim_stall_seconds_count{workload="a\\b\"c\nd.service"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.000016"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.000256"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.004096"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="0.065536"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="1.048576"} 0
numaward_reclaim_stall_seconds_bucket{workload="a\\b\"c\nd.service",le="+Inf"} 0
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="none"} 0
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="cpuset"} 1
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="mempolicy"} 0
numaward_oom_kills_total{workload="a\\b\"c\nd.service",constraint="memcg"} 0
numaward_oom_kills_total{workload="blind",constraint="unknown"} 3
numaward_exclusive_cpu_intruder_seconds_total{cpu="3",class="kernel_thread"} 0.0
numaward_exclusive_cpu_intruder_seconds_total{cpu="3",class="host"} 1.5
numaward_exclusive_cpu_intruder_seconds_total{cpu="3",class="workload"} 0.0
numaward_exclusive_cpu_interrupts_total{cpu="3",kind="hard"} 5
numaward_exclusive_cpu_interrupts_total{cpu="3",kind="soft"} 6
numaward_node_memory_bytes{node="2",kind="hugepages-2Mi",state="total"} 4194304
numaward_node_memory_bytes{node="2",kind="memory",state="total"} 1073741824
numaward_node_memory_unused_bytes{node="2",kind="hugepages-2Mi"} 2097152
numaward_workloads{counters="own"} 1
numaward_workloads{counters="other"} 1
numaward_degraded{part="topology"} 1
numaward_probe{probe="alloc",mode="absent",reason="no BTF"} 1
numaward_probe_runs_total{probe="alloc"} 9
numaward_probe_sampled_ratio{probe="alloc"} 0.25
numaward_probe_events_lost_total{probe="alloc"} 0
numaward_probe_map_entries{map="LEAF"} 3
numaward_probe_map_memory_bytes{family="alloc"} 4096
numaward_probe_map_capacity{map="LEAF"} 16
"#;

fn samples(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.contains("scrape_duration"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

#[test]
fn both_formats_carry_the_same_samples() {
    let expected = SAMPLES.replace("VERSION", numaward_api::VERSION);
    assert_eq!(samples(&written(snapshot(), Format::OpenMetrics)), expected);
    assert_eq!(samples(&written(snapshot(), Format::Prometheus)), expected);
}

/// Whoever makes a cgroup chooses its name.
#[test]
fn a_name_is_one_label_whatever_is_in_it() {
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
fn open_metrics_names_families_without_suffix_and_ends() {
    let text = written(snapshot(), Format::OpenMetrics);
    assert!(text.contains(
        "# TYPE numaward_memory_allocated_bytes counter\n# UNIT numaward_memory_allocated_bytes bytes\n"
    ));
    assert!(text.contains("# TYPE numaward_build info\n"));
    assert!(text.ends_with("\n# EOF\n"));
}

#[test]
fn prometheus_text_names_families_as_their_samples() {
    let text = written(snapshot(), Format::Prometheus);
    assert!(text.contains(
        "# HELP numaward_oom_kills_total Processes of the workload that the OOM killer took, by what constrained the \
         allocation; `unknown` (memory.events) where no probe tells\n\
         # TYPE numaward_oom_kills_total counter\n\
         numaward_oom_kills_total{"
    ));
    assert!(text.contains("# TYPE numaward_build_info gauge\nnumaward_build_info{"));
    assert!(text.contains("# TYPE numaward_scrape_duration_seconds histogram\n"));
    assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
}

/// Each family is declared once, before its samples, and every sample belongs to the family above it.
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
fn a_reader_that_goes_away_ends_the_writing() {
    let mut pieces = 0;
    let workloads = vec![snapshot().workloads.remove(0); 10_000];
    let metrics = Metrics::new(Arc::new(Fixed(Snapshot { workloads, ..snapshot() })));
    let result = metrics.encode(Format::Prometheus, |_| {
        pieces += 1;
        false
    });
    assert!(result.is_err());
    assert_eq!(pieces, 1);
}

#[test]
fn the_largest_numbers_are_served_as_they_are() {
    let most = Bytes(u64::MAX);
    let mut stalls = numaward_probes::Stalls { total: Duration::MAX, ..Default::default() };
    stalls.buckets[3..].fill(u64::MAX);
    let workload = WorkloadFigures {
        name: "most".into(),
        allocated: Some(vec![Allocated { local: most, remote: most, kernel: most }]),
        resident: None,
        pressure: Some(Pressure { waiting: Duration::MAX, stalled: Duration::ZERO }),
        oom_kills: None,
        activity: Some(WorkloadActivity {
            remote: Some(vec![u64::MAX]),
            migrated: Some(vec![("numa_misplaced", u64::MAX)]),
            stalls: Some(stalls),
            oom_kills: Some([u64::MAX; 4]),
            ..WorkloadActivity::default()
        }),
    };
    for format in [Format::Prometheus, Format::OpenMetrics] {
        let text = written(Snapshot { workloads: vec![workload.clone()], ..snapshot() }, format);
        for line in [
            "memory_allocated_bytes_total{workload=\"most\",node=\"2\",locality=\"local\"}",
            "kernel_memory_allocated_bytes_total{workload=\"most\",node=\"2\"}",
            "remote_access_pages_total{workload=\"most\",node=\"2\",source=\"hint_fault\"}",
            "migrated_bytes_total{workload=\"most\",reason=\"numa_misplaced\"}",
            "reclaim_stall_seconds_count{workload=\"most\"}",
            "reclaim_stall_seconds_bucket{workload=\"most\",le=\"+Inf\"}",
            "oom_kills_total{workload=\"most\",constraint=\"memcg\"}",
        ] {
            assert!(text.contains(&format!("\nnumaward_{line} {}\n", u64::MAX)), "{line}: {text}");
        }
        assert!(samples(&text).lines().all(|line| !line.ends_with("NaN") && !line.ends_with("nf")), "{text}");
    }
}

#[derive(Debug)]
struct Promising;

impl Source for Promising {
    fn snapshot(&self) -> Snapshot {
        snapshot()
    }

    fn promises(&self) -> PromiseFigures {
        let exclusive_cpus = vec![(NodeId(0), 3), (NodeId(2), 4)];
        PromiseFigures { exclusive_cpus, shared_pool_cpus: Some(5), ..PromiseFigures::default() }
    }
}

#[test]
fn the_kubelets_names_are_served_where_they_are_asked_for() {
    let figures = guarantee::Figures::default();
    let written = |metrics: Metrics| encoded(&metrics, Format::Prometheus);
    let without = written(Metrics::new(Arc::new(Promising)).with(&figures));
    assert!(!without.contains("kubelet_"), "{without}");
    let with = written(Metrics::new(Arc::new(Promising)).with(&figures).with_kubelet_names(&figures));
    let kubelets: Vec<&str> = with.lines().filter(|line| line.starts_with("kubelet_")).collect();
    for line in [
        "kubelet_topology_manager_admission_requests_total 0",
        "kubelet_topology_manager_admission_errors_total 0",
        "kubelet_topology_manager_admission_duration_ms_count 0",
        "kubelet_cpu_manager_pinning_requests_total 0",
        "kubelet_cpu_manager_pinning_errors_total 0",
        "kubelet_cpu_manager_shared_pool_size_millicores 5000",
        "kubelet_cpu_manager_exclusive_cpu_allocation_count 7",
        "kubelet_cpu_manager_allocation_per_numa{numa_node=\"0\"} 3",
        "kubelet_cpu_manager_allocation_per_numa{numa_node=\"2\"} 4",
        "kubelet_memory_manager_pinning_requests_total 0",
        "kubelet_memory_manager_pinning_errors_total 0",
    ] {
        assert!(kubelets.contains(&line), "{line}: {kubelets:#?}");
    }
    assert!(with.contains("# TYPE kubelet_cpu_manager_pinning_errors_total counter\n"), "{with}");
}

/// What users build on from the first scrape: every name of the promise, enforced and self families, with a zero
/// where nothing has happened, if the labels are bounded.
#[test]
fn the_families_are_there_from_the_start() {
    let figures = guarantee::Figures::default();
    let metrics = Metrics::new(Arc::new(Promising)).with(&figures);
    let text = encoded(&metrics, Format::Prometheus);
    let reasons = ["UnexpectedAdmissionError", "SMTAlignmentError"];
    let knobs = ["cpuset.cpus", "cpuset.mems", "memory.min", "memory.low", "memory.high", "memory.max"];
    let mut zeros = vec![
        "topology_manager_admission_requests_total".to_owned(),
        "topology_manager_admission_errors_total".to_owned(),
        "topology_manager_admission_duration_seconds_count".to_owned(),
        "memory_manager_pinning_requests_total".to_owned(),
        "cpu_manager_pinning_requests_total".to_owned(),
        "guarantee_migrated_bytes_total".to_owned(),
        "scrape_duration_seconds_count".to_owned(),
    ];
    for manager in ["cpu", "memory"] {
        zeros.extend(
            reasons.map(|reason| format!("{manager}_manager_pinning_errors_total{{reason=\"{reason}\"}}")),
        );
    }
    for knob in knobs {
        for family in ["drift_total", "drift_repaired_total"] {
            zeros.push(format!("{family}{{knob=\"{knob}\"}}"));
        }
        for backend in ["cgroupfs", "systemd"] {
            for result in ["ok", "error"] {
                zeros.push(format!(
                    "enforcement_writes_total{{backend=\"{backend}\",knob=\"{knob}\",result=\"{result}\"}}"
                ));
            }
        }
    }
    for zero in zeros {
        assert!(text.contains(&format!("\nnumaward_{zero} 0\n")), "{zero}: {text}");
    }
    // Their labels are found out on the host: declared, with samples as soon as there are any.
    for family in [
        "build_info",
        "cpu_manager_exclusive_cpus",
        "cpu_manager_shared_pool_cpus",
        "node_memory_bytes",
        "memory_allocated_bytes_total",
        "kernel_memory_allocated_bytes_total",
        "numa_miss_bytes_total",
        "memory_resident_bytes",
        "memory_pressure_stalled_seconds_total",
        "oom_kills_total",
        "probe",
        "probe_runtime_seconds_total",
        "probe_map_entries",
        "probe_map_capacity",
        "probe_events_lost_total",
        "degraded",
    ] {
        assert!(text.contains(&format!("# TYPE numaward_{family} ")), "{family}: {text}");
    }
}
