//! The page of the book that lists all metrics is made from what is served, so that it says nothing else.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use numaward_daemon::kubernetes;
use numaward_model::{snapshot::*, testing::snapshot};
use numaward_observe::events::Events;
use numaward_probes::{MIGRATION_REASONS, Obstacle};
use numaward_telemetry::{
    alerts,
    metrics::{Format, Metrics},
    otlp,
};
use numaward_tests_support::assert_golden;
use numaward_topology::{Bytes, HugepageSize, NodeId, ZoneKind};

/// What is counted or measured, in parts of the page: by the beginning of names.
const PARTS: &[(&str, &str, &[&str])] = &[
    (
        "Observed",
        "What the probes and the kernel's books say about workloads and nodes.",
        &[
            "memory_allocated_",
            "memory_resident_",
            "memory_pressure_",
            "kernel_memory_",
            "unknown_node_",
            "numa_miss_",
            "hugepages_",
            "remote_",
            "dram_",
            "migrated_",
            "reclaim_",
            "oom_",
            "exclusive_cpu_",
            "node_memory_unused_",
            "node_headroom_",
            "node_access_",
            "workloads",
            "resctrl_llc_",
            "resctrl_memory_",
        ],
    ),
    (
        "Promised",
        "What was asked for, what was given, and what is left.",
        &[
            "memory_manager_",
            "cpu_manager_",
            "topology_manager_",
            "node_memory_bytes",
            "promised_",
            "promise_",
        ],
    ),
    (
        "Enforced",
        "What was written to the kernel, and whether it stayed.",
        &[
            "enforcement_",
            "drift_",
            "guarantee_",
            "herd_",
            "interrupt_",
            "memory_high_",
            "declared_",
            "resctrl_",
            "budget_",
            "guard_",
            "home_",
            "rebalance",
            "cpu_power_",
            "interleave_",
        ],
    ),
    (
        "Kubernetes",
        "The container runtime and the API server.",
        &["nri_", "containers_", "kubernetes_", "pod_resources_", "node_resource_"],
    ),
    ("Sent", "What is sent by OTLP and to the webhook, where that is configured.", &["alert_", "otlp_"]),
    ("numaward itself", "How it is doing, and what it costs.", &[""]),
];

#[derive(Debug, Default)]
struct Described {
    help: String,
    kind: String,
    unit: String,
    labels: Vec<String>,
    has_samples: bool,
}

const CONTAINER: &str = "shop/web-0/main";

#[derive(Debug)]
struct Everything;

impl SnapshotSource for Everything {
    fn snapshot(&self) -> Snapshot {
        let mut snapshot = snapshot();
        // With one of each kind, families have all labels that a workload can have.
        let mut containers = snapshot.workloads.clone();
        for (workload, name) in containers.iter_mut().zip([CONTAINER, "shop/web-0/proxy"]) {
            workload.name = name.into();
        }
        snapshot.workloads.append(&mut containers);
        for probe in &mut snapshot.probes {
            probe.runtime = Some(Duration::from_millis(1));
        }
        snapshot.promises = promises();
        snapshot.process = Some(ProcessFigures {
            cpu: Duration::from_secs(1),
            virtual_memory: Bytes(2),
            resident_memory: Bytes(1),
            start: Some(SystemTime::UNIX_EPOCH),
            open_fds: Some(3),
            max_fds: Some(4),
        });
        snapshot
    }
}

/// Of a container and of another workload.
fn of_both<T>(of: impl Fn(Arc<str>) -> T) -> Vec<T> {
    ["web.service", CONTAINER].map(Arc::from).into_iter().map(of).collect()
}

fn promises() -> GuaranteeFigures {
    let (node, kind, bytes) = (NodeId(2), ZoneKind::Memory, Bytes(1));
    let size = HugepageSize(Bytes::mib(2));
    let outside = || of_both(|workload| HugepagesOutside { workload, size, bytes: vec![(node, bytes)] });
    GuaranteeFigures {
        missed: of_both(|workload| MissFigures { workload, bytes: vec![(node, bytes)] }),
        missed_hugepages: outside(),
        misplaced_hugepages: outside(),
        kinds: vec![KindFigures {
            node,
            kind,
            reserved: bytes,
            allocatable: bytes,
            promised: bytes,
            free: bytes,
        }],
        exclusive_cpus: vec![(node, 1)],
        residency: of_both(|workload| GuaranteeResidency {
            workload,
            kind,
            promised: vec![(node, bytes)],
            resident: Some(ResidencySplit { on: bytes, off: bytes }),
        }),
        missing: of_both(|workload| MissingCapacityFigures { workload, offline_cpus: 0, uncovered: bytes }),
        headroom: vec![(node, kind, 1)],
        low: vec![(node, true)],
        over_budget: of_both(|workload| BudgetExcess { workload, bytes: vec![(node, bytes)] }),
        shared_pool_cpus: Some(1),
        free_cpus: 1,
    }
}

/// One workload that has everything, on so many nodes.
#[derive(Clone, Copy, Debug)]
struct Alone {
    nodes: u32,
    has_hugepages: bool,
    is_promised: bool,
}

impl SnapshotSource for Alone {
    fn snapshot(&self) -> Snapshot {
        let size = HugepageSize(Bytes::mib(2));
        let nodes = || (0..self.nodes).map(NodeId);
        let each = |bytes| nodes().map(|_| bytes).collect::<Vec<_>>();
        let by_node = || nodes().map(|node| (node, Bytes(1))).collect::<Vec<_>>();
        let mut snapshot = snapshot();
        snapshot.nodes = nodes().map(|node| NodeMemoryFigures { node, kinds: Vec::new() }).collect();
        snapshot.workloads.truncate(1);
        let of = &mut snapshot.workloads[0];
        of.name = CONTAINER.into();
        of.allocated = Some(nodes().map(|_| AllocatedFigures::default()).collect());
        of.resident = Some(nodes().map(|_| ResidentFigures::default()).collect());
        let hugepages = self.has_hugepages.then(|| (size, each(Bytes(1))));
        of.hugepages = Arc::new(hugepages.into_iter().collect());
        let activity = of.activity.as_mut().unwrap();
        activity.remote = Some(nodes().map(|_| 1).collect());
        activity.dram = Some(nodes().map(|_| (Some(1), 1)).collect());
        let reasons: BTreeSet<_> = MIGRATION_REASONS.into_iter().collect();
        activity.migrated = Some(reasons.into_iter().map(|reason| (reason, 1)).collect());
        let allocated =
            self.has_hugepages.then(|| (size, nodes().map(|_| AllocatedHugepages::default()).collect()));
        activity.hugepages = Some(allocated.into_iter().collect());
        if !self.is_promised {
            return snapshot;
        }
        let workload: Arc<str> = CONTAINER.into();
        let resident = Some(ResidencySplit::default());
        let residency =
            |kind| GuaranteeResidency { workload: workload.clone(), kind, promised: by_node(), resident };
        let sizes = || self.has_hugepages.then_some(size);
        let outside = |size| HugepagesOutside { workload: workload.clone(), size, bytes: by_node() };
        snapshot.promises = GuaranteeFigures {
            missed: vec![MissFigures { workload: workload.clone(), bytes: by_node() }],
            missed_hugepages: sizes().map(outside).into_iter().collect(),
            misplaced_hugepages: sizes().map(outside).into_iter().collect(),
            residency: [ZoneKind::Memory]
                .into_iter()
                .chain(sizes().map(ZoneKind::Hugepages))
                .map(residency)
                .collect(),
            missing: vec![MissingCapacityFigures {
                workload: workload.clone(),
                offline_cpus: 0,
                uncovered: Bytes(0),
            }],
            over_budget: vec![BudgetExcess { workload, bytes: by_node() }],
            ..GuaranteeFigures::default()
        };
        snapshot
    }
}

/// How many series a workload has at most: a number, and one for each node.
fn series_of_a_workload(has_hugepages: bool, is_promised: bool) -> [usize; 2] {
    let count = |nodes| {
        let text =
            encoded(&Metrics::new(Arc::new(Alone { nodes, has_hugepages, is_promised })), Format::Prometheus);
        let is_of = |line: &&str| !line.starts_with('#') && line.contains("container=\"main\"");
        text.lines().filter(is_of).count()
    };
    let (one, two, eight) = (count(1), count(2), count(8));
    assert_eq!(eight - two, 6 * (two - one), "one more node adds as many each time");
    [2 * one - two, two - one]
}

fn cardinality() -> String {
    let [fixed, per_node] = series_of_a_workload(false, false);
    let more = |has_hugepages, is_promised, [less_fixed, less_per_node]: [usize; 2]| {
        let [fixed, per_node] = series_of_a_workload(has_hugepages, is_promised);
        [fixed - less_fixed, per_node - less_per_node]
    };
    let [promised, promised_per_node] = more(false, true, [fixed, per_node]);
    let [pages, pages_per_node] = more(true, false, [fixed, per_node]);
    let [both, both_per_node] =
        more(true, true, [fixed + promised + pages, per_node + promised_per_node + pages_per_node]);
    assert_eq!(pages, 0);
    let (two, eight) = (fixed + 2 * per_node, fixed + 8 * per_node);
    format!(
        "## How many series\n\n\
         A workload has at most {fixed} series and {per_node} for each NUMA node: {two} with two nodes, {eight} with eight. \
         It has fewer where a probe is absent or switched off. A promise adds {promised} and {promised_per_node} for each \
         node; each size of hugepages of which the host has a pool {pages_per_node} for each node, and where it is promised \
         as well, {both} and {both_per_node} for each node more. With `resctrl.monitor`, a promise adds 3 for each L3 cache. Labels have no ids of cgroups or pods. A workload that ends \
         takes its series with it.\n\n\
         `metrics.families` and `metrics.workloads` in the [configuration](../configuration.md) say which are exported, by \
         `/metrics` and by OTLP:\n\n\
         ```yaml\n\
         metrics:\n  families:\n    deny: [numaward_reclaim_stall_seconds, numaward_kernel_memory_*]\n  \
         workloads:\n    allow: ['shop/*']            # pods of this namespace\n    deny: ['*/istio-proxy']\n\
         ```\n\n\
         What is not exported is still counted, and seen by the API, the page and the daemon's own alerts. The rules of \
         `dashboards/prometheus` need `numaward_promise_resident_bytes`, `numaward_numa_miss_bytes_total`, \
         `numaward_oom_kills_total` and `numaward_budget_excess_bytes` of workloads.\n"
    )
}

/// The labels of a sample, in order.
fn labels(sample: &str) -> Vec<String> {
    let Some((_, rest)) = sample.split_once('{') else { return Vec::new() };
    let mut names = Vec::new();
    let (mut name, mut is_quoted, mut is_escaped) = (String::new(), false, false);
    for c in rest.chars() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_quoted => is_escaped = true,
            '"' => is_quoted = !is_quoted,
            _ if is_quoted => {}
            '}' => break,
            ',' => name.clear(),
            '=' => names.push(std::mem::take(&mut name)),
            c => name.push(c),
        }
    }
    names.retain(|name| name != "le");
    names
}

/// All families of a text in the format of OpenMetrics, which has units, by the name of their samples.
fn families(text: &str) -> BTreeMap<String, Described> {
    let mut found: BTreeMap<String, Described> = BTreeMap::new();
    let mut family = String::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(declared) = line.strip_prefix("# ") {
            let (word, rest) = declared.split_once(' ').unwrap_or((declared, ""));
            let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
            name.clone_into(&mut family);
            let described = found.entry(family.clone()).or_default();
            match word {
                "HELP" => value.trim_end_matches('.').clone_into(&mut described.help),
                "TYPE" => value.clone_into(&mut described.kind),
                "UNIT" => value.clone_into(&mut described.unit),
                _ => {}
            }
        } else if let Some(described) = found.get_mut(&family) {
            described.has_samples = true;
            for label in labels(line) {
                if !described.labels.contains(&label) {
                    described.labels.push(label);
                }
            }
        }
    }
    let named = |(name, described): (String, Described)| {
        let suffix = match described.kind.as_str() {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        (name + suffix, described)
    };
    found.into_iter().map(named).collect()
}

fn row(name: &str, described: &Described) -> String {
    let labels: Vec<String> = described.labels.iter().map(|label| format!("`{label}`")).collect();
    let unit = if described.unit.is_empty() { "" } else { &described.unit };
    let help = described.help.replace('|', "\\|");
    format!("| `{name}` | {} | {unit} | {} | {help} |\n", described.kind, labels.join(", "))
}

const HEAD: &str = "| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n";

fn page(own: &BTreeMap<String, Described>, kubelets: &BTreeMap<String, Described>) -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         <!-- Generated from the metrics by `cargo xtask generate` -->\n\n\
         `/metrics` serves these for Prometheus, in its own text format or that of OpenMetrics, as the header `Accept` \
         asks. Counters start at zero when the daemon starts, or when a workload is seen first, and only grow. A series \
         that is not there is not known, which is not the same as zero.\n\n\
         `numa_node` is the id of a NUMA node (in Kubernetes, `node` is a host), `cpu` that of a CPU, `kind` a kind of \
         memory: `memory` (base pages), `hugepages-2Mi`, `hugepages-1Gi`. A workload that is a container of a pod has the \
         labels `namespace`, `pod` and `container`, any other the label `workload`.\n\n",
    );
    page.push_str(&cardinality());
    let mut left: BTreeMap<&str, &Described> = own.iter().map(|(name, of)| (name.as_str(), of)).collect();
    let mut parts: Vec<(&str, &str, String)> = Vec::new();
    for (title, about, beginnings) in PARTS {
        let mut rows = String::new();
        left.retain(|name, described| {
            let short = name.strip_prefix("numaward_").unwrap_or(name);
            let is_here = beginnings.iter().any(|beginning| short.starts_with(beginning));
            if is_here {
                rows.push_str(&row(name, described));
            }
            !is_here
        });
        parts.push((title, about, rows));
    }
    for (title, about, rows) in parts {
        assert!(!rows.is_empty(), "{title} has no metric");
        let _ = write!(page, "\n## {title}\n\n{about}\n\n{HEAD}{rows}");
    }
    let _ = write!(
        page,
        "\n## Under the kubelet's names\n\nWith `exportKubeletNames: true`, for dashboards and alerts that were made \
         for the kubelet. numaward decides about no pod that asks for nothing, so `kubelet_topology_manager_admission_requests_total` \
         counts fewer pods than the kubelet, which counts every pod.\n\n{HEAD}"
    );
    page.extend(kubelets.iter().map(|(name, described)| row(name, described)));
    page
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

/// All metrics of the daemon, with the figures of this source.
fn all_of(source: impl SnapshotSource + 'static) -> Metrics {
    let figures = numaward_control::ControlMetrics::default();
    figures.show_caches();
    figures.show_homes();
    figures.show_reclaimed();
    figures.show_interleave_weights();
    Metrics::new(Arc::new(source))
        .with(|registry| {
            figures.register(registry);
            Events::default().register(registry);
            kubernetes::nri::NriMetrics::default().register(registry);
            kubernetes::cluster::ClusterMetrics::default().register(registry);
            alerts::AlertMetrics::default().register(registry);
            otlp::OtlpMetrics::default().register(registry);
        })
        .with_kubelet_names(|registry| figures.register_kubelet(registry))
}

/// All metrics, by the name of their samples.
fn served() -> BTreeMap<String, Described> {
    let mut served = families(&encoded(&all_of(Everything), Format::OpenMetrics));
    // Those with two sets of labels come in any order.
    for (_, of) in served.iter_mut().filter(|(name, _)| name.starts_with("numaward_resctrl_")) {
        of.labels.sort_by_key(|label| match label.as_str() {
            "workload" => 0,
            "namespace" | "pod" | "container" => 2,
            _ => 1,
        });
    }
    served
}

/// The names of metrics in a text, each with the labels that are matched beside it. Of recorded ones, `a:numaward_b:c`,
/// only the rules know.
fn named(text: &str) -> Vec<(String, Vec<String>)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let mut found = Vec::new();
    for (start, _) in text.match_indices("numaward_") {
        if text[..start].ends_with(is_part) {
            continue;
        }
        let rest = &text[start..];
        let (name, rest) = rest.split_at(rest.find(|c| !is_part(c)).unwrap_or(rest.len()));
        let matchers =
            rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(inside, _)| inside);
        let labels = matchers.split(',').filter_map(|matcher| {
            let (label, _) = matcher.split_once('=')?;
            Some(label.trim().trim_end_matches('!').to_owned())
        });
        found.push((name.to_owned(), labels.collect()));
    }
    found
}

#[test]
fn dashboards_rules_and_runbooks_name_what_is_served() {
    /// What the scraper adds.
    const OUTER: [&str; 3] = ["cluster", "instance", "job"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let served = served();
    let (mut faults, mut names) = (Vec::new(), 0);
    for folder in ["dashboards/grafana", "dashboards/prometheus", "docs/runbooks"] {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "yaml" && extension != "md") {
                continue;
            }
            for (name, labels) in named(&fs::read_to_string(&path).unwrap()) {
                names += 1;
                let family = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| {
                    let of = served.get(name.strip_suffix(suffix)?)?;
                    (of.kind == "histogram").then_some(of)
                });
                match served.get(&name).or(family) {
                    None if name.ends_with('_') && served.keys().any(|served| served.starts_with(&name)) => {}
                    None => faults.push(format!("{}: there is no {name}", path.display())),
                    Some(described) => faults.extend(
                        labels
                            .iter()
                            .filter(|label| {
                                !described.labels.contains(label) && !OUTER.contains(&label.as_str())
                            })
                            .map(|label| format!("{}: {name} has no label {label}", path.display())),
                    ),
                }
            }
        }
    }
    assert!(faults.is_empty(), "{faults:#?}");
    assert!(names > 50, "only {names} names were found");
}

/// `cargo xtask generate` writes it.
#[test]
fn the_reference_of_metrics_is_checked_in() {
    let all = served();
    let unknown: Vec<&String> = all.iter().filter(|(_, of)| !of.has_samples).map(|(name, _)| name).collect();
    assert!(unknown.is_empty(), "without a sample, so that its labels are not known: {unknown:?}");
    let silent: Vec<&String> =
        all.iter().filter(|(_, of)| of.help.is_empty()).map(|(name, _)| name).collect();
    assert!(silent.is_empty(), "without a meaning: {silent:?}");
    let (own, kubelets) = all.into_iter().partition(|(name, _)| !name.starts_with("kubelet_"));
    let page = page(&own, &kubelets);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/metrics.md");
    assert_golden(&path, &page);
}

/// Each probe is absent for each reason, and pages have moved for each.
#[derive(Debug)]
struct EachReason;

impl SnapshotSource for EachReason {
    fn snapshot(&self) -> Snapshot {
        let mut snapshot = Everything.snapshot();
        let of_probe = |probe: &ProbeFigures| {
            let probe = probe.clone();
            Obstacle::LABELS.iter().map(move |reason| ProbeFigures { reason, ..probe.clone() })
        };
        snapshot.probes = snapshot.probes.iter().flat_map(of_probe).collect();
        for activity in snapshot.workloads.iter_mut().filter_map(|of| of.activity.as_mut()) {
            activity.migrated = Some(MIGRATION_REASONS.map(|reason| (reason, 1)).to_vec());
        }
        snapshot
    }
}

type Reasons = BTreeMap<String, BTreeSet<String>>;

/// The values of the label `reason` by metric: those that are served.
fn reasons_served() -> Reasons {
    let mut found = Reasons::new();
    for line in encoded(&all_of(EachReason), Format::Prometheus).lines() {
        let Some((name, labels)) = line.split_once('{').filter(|_| !line.starts_with('#')) else { continue };
        let value = labels.split("reason=\"").nth(1).and_then(|rest| rest.split('"').next());
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            found.entry(name.to_owned()).or_default().insert(value.to_owned());
        }
    }
    found
}

/// The same of the table of the page.
fn reasons_listed(page: &str) -> Reasons {
    let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>();
    let (_, section) = page.split_once("\n### Reasons\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" | "));
    rows.flat_map(|(metrics, words)| {
        let words: BTreeSet<String> = quoted(words).into_iter().collect();
        quoted(&format!("`{metrics}")).into_iter().map(move |metric| (metric, words.clone()))
    })
    .collect()
}

#[test]
fn the_reasons_are_those_that_are_promised() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/stability.md");
    assert_eq!(reasons_listed(&fs::read_to_string(path).unwrap()), reasons_served());
}

#[derive(Debug)]
struct Promising;

impl SnapshotSource for Promising {
    fn snapshot(&self) -> Snapshot {
        let exclusive_cpus = vec![(NodeId(0), 3), (NodeId(2), 4)];
        let promises = GuaranteeFigures {
            exclusive_cpus,
            shared_pool_cpus: Some(6),
            free_cpus: 5,
            ..GuaranteeFigures::default()
        };
        Snapshot { promises, ..Snapshot::default() }
    }
}

#[test]
fn the_kubelets_names_are_served_where_they_are_asked_for() {
    let figures = numaward_control::ControlMetrics::default();
    let written = |metrics: Metrics| encoded(&metrics, Format::Prometheus);
    let without = written(Metrics::new(Arc::new(Promising)).with(|registry| figures.register(registry)));
    assert!(!without.contains("kubelet_"), "{without}");
    let with = written(
        Metrics::new(Arc::new(Promising))
            .with(|registry| figures.register(registry))
            .with_kubelet_names(|registry| figures.register_kubelet(registry)),
    );
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
        "kubelet_container_aligned_compute_resources_count{boundary=\"numa_node\",scope=\"pod\"} 0",
        "kubelet_container_aligned_compute_resources_failure_count{boundary=\"physical_cpu\",scope=\"container\"} 0",
    ] {
        assert!(kubelets.contains(&line), "{line}: {kubelets:#?}");
    }
    assert!(with.contains("# TYPE kubelet_cpu_manager_pinning_errors_total counter\n"), "{with}");
}

/// What users build on from the first scrape: every name of the promise, enforced and self families, with a zero
/// where nothing has happened, if the labels are bounded.
#[test]
fn the_families_are_there_from_the_start() {
    let figures = numaward_control::ControlMetrics::default();
    let metrics = Metrics::new(Arc::new(Promising)).with(|registry| figures.register(registry));
    let text = encoded(&metrics, Format::Prometheus);
    let reasons = ["UnexpectedAdmissionError", "SMTAlignmentError", "EmptyPodSharedPoolError"];
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
        "probe_info",
        "probe_runtime_seconds_total",
        "probe_map_entries",
        "probe_map_capacity",
        "probe_events_lost_total",
        "degraded",
    ] {
        assert!(text.contains(&format!("# TYPE numaward_{family} ")), "{family}: {text}");
    }
}
