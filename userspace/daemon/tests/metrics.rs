//! Generation of docs/reference/metrics.md from the served metrics.

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
use numaward_model::{
    snapshot::*,
    testing::snapshot,
    verdict::{ResidencySplit, UserMemory},
};
use numaward_observe::events::Events;
use numaward_probes::{MIGRATION_REASONS, Obstacle};
use numaward_telemetry::{
    alerts,
    metrics::{Format, Metrics},
    otlp,
};
use numaward_tests_support::assert_golden;
use numaward_topology::{Bytes, HugepageSize, NodeId, ZoneKind};

/// Parts of the page: title, introduction, and the prefixes of the metrics' names.
const PARTS: &[(&str, &str, &[&str])] = &[
    (
        "Observed",
        "Figures of workloads and nodes from the probes and the kernel's statistics.",
        &[
            "memory_allocated_",
            "memory_resident_",
            "memory_pressure_",
            "kernel_memory_",
            "unattributed_",
            "unknown_node_",
            "numa_miss_",
            "hugepages_",
            "remote_",
            "tiering_",
            "touched_",
            "dram_",
            "migrated_",
            "reclaim_",
            "oom_",
            "cpu_seconds_",
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
        "Guaranteed",
        "Requests for guarantees, given guarantees, and free resources.",
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
        "Writes to the kernel, and drift of the written values.",
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
    ("Sent", "Data sent by OTLP and to the webhook, if that is configured.", &["alert_", "otlp_"]),
    ("numaward itself", "State and costs of the daemon.", &[""]),
];

#[derive(Debug, Default)]
struct FamilyDescription {
    help: String,
    kind: String,
    unit: String,
    labels: Vec<String>,
    has_samples: bool,
}

const CONTAINER: &str = "shop/web-0/main";

#[derive(Debug)]
struct AllFigures;

impl SnapshotSource for AllFigures {
    fn snapshot(&self) -> Snapshot {
        let mut snapshot = snapshot();
        // With a container and another workload, families have all labels of workloads.
        let mut containers = snapshot.workloads.clone();
        for (workload, name) in containers.iter_mut().zip([CONTAINER, "shop/web-0/proxy"]) {
            workload.name = name.into();
        }
        snapshot.workloads.append(&mut containers);
        for probe in &mut snapshot.probes {
            probe.runtime = Some(Duration::from_millis(1));
        }
        snapshot.guarantees = guarantees();
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

/// Returns a figure of a container and of another workload.
fn for_both<T>(figure: impl Fn(Arc<str>) -> T) -> Vec<T> {
    ["web.service", CONTAINER].map(Arc::from).into_iter().map(figure).collect()
}

fn guarantees() -> GuaranteeFigures {
    let (node, kind, bytes) = (NodeId(2), ZoneKind::Memory, Bytes(1));
    let size = HugepageSize(Bytes::mib(2));
    let outside = || for_both(|workload| HugepagesOutside { workload, size, bytes: vec![(node, bytes)] });
    GuaranteeFigures {
        missed: for_both(|workload| MissFigures { workload, bytes: vec![(node, bytes)] }),
        missed_hugepages: outside(),
        misplaced_hugepages: outside(),
        kinds: vec![KindFigures {
            node,
            kind,
            reserved: bytes,
            allocatable: bytes,
            guaranteed: bytes,
            free: bytes,
        }],
        exclusive_cpus: vec![(node, 1)],
        residency: for_both(|workload| GuaranteeResidency {
            workload,
            kind,
            guaranteed: vec![(node, bytes)],
            resident: Some(ResidencySplit { on: UserMemory::hugepages(bytes), ..ResidencySplit::default() }),
            is_broken: false,
        }),
        missing: for_both(|workload| MissingCapacityFigures { workload, offline_cpus: 0, uncovered: bytes }),
        headroom: vec![(node, kind, 1)],
        low: vec![(node, true)],
        over_budget: for_both(|workload| BudgetExcess { workload, bytes: vec![(node, bytes)] }),
        shared_pool_cpus: Some(1),
        free_cpus: 1,
    }
}

/// Source of one workload that has all figures.
#[derive(Clone, Copy, Debug)]
struct OneWorkload {
    nodes: u32,
    has_hugepages: bool,
    has_guarantee: bool,
}

impl SnapshotSource for OneWorkload {
    fn snapshot(&self) -> Snapshot {
        let size = HugepageSize(Bytes::mib(2));
        let nodes = || (0..self.nodes).map(NodeId);
        let each = |bytes| nodes().map(|_| bytes).collect::<Vec<_>>();
        let by_node = || nodes().map(|node| (node, Bytes(1))).collect::<Vec<_>>();
        let mut snapshot = snapshot();
        snapshot.nodes = nodes().map(|node| NodeMemoryFigures { node, kinds: Vec::new() }).collect();
        snapshot.workloads.truncate(1);
        let workload = &mut snapshot.workloads[0];
        workload.name = CONTAINER.into();
        workload.allocated = Some(nodes().map(|_| AllocatedFigures::default()).collect());
        workload.cpu = Some(nodes().map(|_| Duration::ZERO).collect());
        workload.resident = Some(nodes().map(|_| ResidentFigures::default()).collect());
        let hugepages = self.has_hugepages.then(|| (size, each(Bytes(1))));
        workload.hugepages = Arc::new(hugepages.into_iter().collect());
        let activity = workload.activity.as_mut().unwrap();
        activity.remote = Some(nodes().map(|_| 1).collect());
        activity.dram = Some(nodes().map(|_| (Some(1), 1)).collect());
        let reasons: BTreeSet<_> = MIGRATION_REASONS.into_iter().collect();
        activity.migrated = Some(reasons.into_iter().map(migrated).collect());
        let allocated =
            self.has_hugepages.then(|| (size, nodes().map(|_| AllocatedHugepages::default()).collect()));
        activity.hugepages = Some(allocated.into_iter().collect());
        if !self.has_guarantee {
            return snapshot;
        }
        let workload: Arc<str> = CONTAINER.into();
        let resident = Some(ResidencySplit::default());
        let residency = |kind| GuaranteeResidency {
            workload: workload.clone(),
            kind,
            guaranteed: by_node(),
            resident,
            is_broken: false,
        };
        let sizes = || self.has_hugepages.then_some(size);
        let outside = |size| HugepagesOutside { workload: workload.clone(), size, bytes: by_node() };
        snapshot.guarantees = GuaranteeFigures {
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

/// Returns the maximum number of series of a workload: a fixed number, and one for each node.
fn max_series(has_hugepages: bool, has_guarantee: bool) -> [usize; 2] {
    let count = |nodes| {
        let text = encoded(
            &Metrics::new(Arc::new(OneWorkload { nodes, has_hugepages, has_guarantee })),
            Format::Prometheus,
        );
        let is_of_workload = |line: &&str| !line.starts_with('#') && line.contains("container=\"main\"");
        text.lines().filter(is_of_workload).count()
    };
    let (one, two, eight) = (count(1), count(2), count(8));
    assert_eq!(eight - two, 6 * (two - one), "each node adds the same number");
    [2 * one - two, two - one]
}

fn cardinality() -> String {
    let [fixed, per_node] = max_series(false, false);
    let more = |has_hugepages, has_guarantee, [less_fixed, less_per_node]: [usize; 2]| {
        let [fixed, per_node] = max_series(has_hugepages, has_guarantee);
        [fixed - less_fixed, per_node - less_per_node]
    };
    let [guaranteed, guaranteed_per_node] = more(false, true, [fixed, per_node]);
    let [pages, pages_per_node] = more(true, false, [fixed, per_node]);
    let [both, both_per_node] =
        more(true, true, [fixed + guaranteed + pages, per_node + guaranteed_per_node + pages_per_node]);
    assert_eq!(pages, 0);
    let (two, eight) = (fixed + 2 * per_node, fixed + 8 * per_node);
    format!(
        "## How many series\n\n\
         A workload has at most {fixed} series and {per_node} for each NUMA node: {two} with two nodes, {eight} with eight. \
         It has fewer if a probe is absent or switched off. A guarantee adds {guaranteed}, and {guaranteed_per_node} for each \
         node. Each size of hugepages of which the host has a pool adds {pages_per_node} for each node and, if it is guaranteed, \
         {both} and {both_per_node} for each node more. With `resctrl.monitor`, a guarantee adds 3 for each L3 cache. Labels \
         have no ids of cgroups or pods. The series of a workload end with it.\n\n\
         `metrics.families` and `metrics.workloads` in the [configuration](../configuration.md) select the series that `/metrics` \
         and OTLP export:\n\n\
         ```yaml\n\
         metrics:\n  families:\n    deny: [numaward_reclaim_stall_seconds, numaward_kernel_memory_*]\n  \
         workloads:\n    allow: ['shop/*']            # pods of this namespace\n    deny: ['*/istio-proxy']\n\
         ```\n\n\
         Other series are still counted: the API, the page and the daemon's own alerts use them. The rules of \
         `dashboards/prometheus` need `numaward_promise_broken`, `numaward_promise_resident_bytes`, `numaward_numa_miss_bytes_total`, \
         `numaward_oom_kills_total` and `numaward_budget_excess_bytes` of workloads; those of capacity `numaward_promised_bytes`, too.\n"
    )
}

/// Returns the labels of a sample, in order.
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

/// Parses the families in a text of the OpenMetrics format, which has units, by the name of their samples.
fn families(text: &str) -> BTreeMap<String, FamilyDescription> {
    let mut found: BTreeMap<String, FamilyDescription> = BTreeMap::new();
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
    let named = |(name, described): (String, FamilyDescription)| {
        let suffix = match described.kind.as_str() {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        (name + suffix, described)
    };
    found.into_iter().map(named).collect()
}

fn row(name: &str, described: &FamilyDescription) -> String {
    let labels: Vec<String> = described.labels.iter().map(|label| format!("`{label}`")).collect();
    let unit = if described.unit.is_empty() { "" } else { &described.unit };
    let help = described.help.replace('|', "\\|");
    format!("| `{name}` | {} | {unit} | {} | {help} |\n", described.kind, labels.join(", "))
}

const HEAD: &str = "| name | type | unit | labels | meaning |\n|---|---|---|---|---|\n";

fn page(own: &BTreeMap<String, FamilyDescription>, kubelets: &BTreeMap<String, FamilyDescription>) -> String {
    let mut page = String::from(
        "# Metrics\n\n\
         <!-- Generated from the metrics by `cargo xtask generate` -->\n\n\
         `/metrics` serves these metrics in the text format of Prometheus or in that of OpenMetrics, according to the header \
         `Accept`. Counters start at zero when the daemon starts, or when a workload is first observed, and only grow. An \
         absent series means that the value is unknown, not that it is zero.\n\n\
         `numa_node` is the id of a NUMA node (in Kubernetes, `node` is a host), `cpu` that of a CPU, `kind` a kind of \
         memory: `memory` (base pages), `hugepages-2Mi`, `hugepages-1Gi`. A workload that is a container of a pod has the \
         labels `namespace`, `pod` and `container`, any other the label `workload`.\n\n",
    );
    page.push_str(&cardinality());
    let mut left: BTreeMap<&str, &FamilyDescription> =
        own.iter().map(|(name, described)| (name.as_str(), described)).collect();
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
        "\n## Names of the kubelet\n\nWith `exportKubeletNames: true`, for dashboards and alerts that were written \
         for the kubelet. numaward does not decide on pods without requests, so `kubelet_topology_manager_admission_requests_total` \
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

/// Returns all metrics of the daemon, with the figures of a source.
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

/// Returns all metrics by the name of their samples.
fn served() -> BTreeMap<String, FamilyDescription> {
    let mut served = families(&encoded(&all_of(AllFigures), Format::OpenMetrics));
    // The labels of these families have no fixed order.
    for (_, described) in served.iter_mut().filter(|(name, _)| name.starts_with("numaward_resctrl_")) {
        described.labels.sort_by_key(|label| match label.as_str() {
            "workload" => 0,
            "namespace" | "pod" | "container" => 2,
            _ => 1,
        });
    }
    served
}

/// Finds the names of metrics in a text, each with the labels in its matchers. The names of recording rules, `a:numaward_b:c`, are skipped.
fn metrics_in(text: &str) -> Vec<(String, Vec<String>)> {
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
fn dashboards_use_served_metrics() {
    /// Labels that the scraper adds.
    const SCRAPER_LABELS: [&str; 4] = ["cluster", "instance", "job", "tenant"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let served = served();
    let (mut faults, mut names) = (Vec::new(), 0);
    for folder in ["dashboards/grafana", "dashboards/prometheus", "docs/runbooks"] {
        for entry in fs::read_dir(root.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "yaml" && extension != "md") {
                continue;
            }
            for (name, labels) in metrics_in(&fs::read_to_string(&path).unwrap()) {
                names += 1;
                let family = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| {
                    let described = served.get(name.strip_suffix(suffix)?)?;
                    (described.kind == "histogram").then_some(described)
                });
                match served.get(&name).or(family) {
                    None if name.ends_with('_') && served.keys().any(|served| served.starts_with(&name)) => {}
                    None => faults.push(format!("{}: there is no {name}", path.display())),
                    Some(described) => faults.extend(
                        labels
                            .iter()
                            .filter(|label| {
                                !described.labels.contains(label) && !SCRAPER_LABELS.contains(&label.as_str())
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
fn metrics_reference_is_current() {
    let all = served();
    let unknown: Vec<&String> =
        all.iter().filter(|(_, described)| !described.has_samples).map(|(name, _)| name).collect();
    assert!(unknown.is_empty(), "without a sample, the labels are unknown: {unknown:?}");
    let silent: Vec<&String> =
        all.iter().filter(|(_, described)| described.help.is_empty()).map(|(name, _)| name).collect();
    assert!(silent.is_empty(), "without HELP: {silent:?}");
    let (own, kubelets) = all.into_iter().partition(|(name, _)| !name.starts_with("kubelet_"));
    let page = page(&own, &kubelets);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/metrics.md");
    assert_golden(&path, &page);
}

/// Returns a moved page.
fn migrated(reason: &'static str) -> MigratedFigures {
    MigratedFigures { reason, nodes: None, pages: 1 }
}

/// Source with each reason of an absent probe and of a moved page.
#[derive(Debug)]
struct EachReason;

impl SnapshotSource for EachReason {
    fn snapshot(&self) -> Snapshot {
        let mut snapshot = AllFigures.snapshot();
        let of_probe = |probe: &ProbeFigures| {
            let probe = probe.clone();
            Obstacle::LABELS.iter().map(move |reason| ProbeFigures { reason, ..probe.clone() })
        };
        snapshot.probes = snapshot.probes.iter().flat_map(of_probe).collect();
        for activity in snapshot.workloads.iter_mut().filter_map(|workload| workload.activity.as_mut()) {
            activity.migrated = Some(MIGRATION_REASONS.map(migrated).to_vec());
        }
        snapshot
    }
}

type Reasons = BTreeMap<String, BTreeSet<String>>;

/// Returns the served values of the label `reason` by metric.
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

/// Returns the values of the label `reason` in the table of the page.
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
fn documented_reasons_are_served() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/stability.md");
    assert_eq!(reasons_listed(&fs::read_to_string(path).unwrap()), reasons_served());
}

#[derive(Debug)]
struct ExclusiveCpuFigures;

impl SnapshotSource for ExclusiveCpuFigures {
    fn snapshot(&self) -> Snapshot {
        let exclusive_cpus = vec![(NodeId(0), 3), (NodeId(2), 4)];
        let guarantees = GuaranteeFigures {
            exclusive_cpus,
            shared_pool_cpus: Some(6),
            free_cpus: 5,
            ..GuaranteeFigures::default()
        };
        Snapshot { guarantees, ..Snapshot::default() }
    }
}

#[test]
fn serves_kubelet_names_if_configured() {
    let figures = numaward_control::ControlMetrics::default();
    let written = |metrics: Metrics| encoded(&metrics, Format::Prometheus);
    let without =
        written(Metrics::new(Arc::new(ExclusiveCpuFigures)).with(|registry| figures.register(registry)));
    assert!(!without.contains("kubelet_"), "{without}");
    let with = written(
        Metrics::new(Arc::new(ExclusiveCpuFigures))
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

/// The first scrape has all families of guarantees, enforcement and the daemon itself. Counters with bounded labels are 0.
#[test]
fn families_exist_from_the_start() {
    let figures = numaward_control::ControlMetrics::default();
    let metrics = Metrics::new(Arc::new(ExclusiveCpuFigures)).with(|registry| figures.register(registry));
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
    // The labels of these families depend on the host: the families are declared, and samples follow.
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
