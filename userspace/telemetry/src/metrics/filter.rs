//! What is exported of all metrics (`metrics` in the configuration).

use numaward_config::exported::{ExportedMetrics, MetricFilter};
use numaward_model::snapshot::{GuaranteeFigures, Snapshot};

use super::family::Kind;

/// Drops what is not exported of workloads.
pub(super) fn keep_workloads(filter: &MetricFilter, snapshot: &mut Snapshot) {
    if filter.is_open() {
        return;
    }
    let Snapshot { workloads, promises, .. } = snapshot;
    let GuaranteeFigures {
        missed,
        missed_hugepages,
        misplaced_hugepages,
        residency,
        missing,
        over_budget,
        ..
    } = promises;
    workloads.retain(|of| filter.admits(&of.name));
    missed.retain(|of| filter.admits(&of.workload));
    missed_hugepages.retain(|of| filter.admits(&of.workload));
    misplaced_hugepages.retain(|of| filter.admits(&of.workload));
    residency.retain(|of| filter.admits(&of.workload));
    missing.retain(|of| filter.admits(&of.workload));
    over_budget.retain(|of| filter.admits(&of.workload));
}

/// Drops families that are not exported from text in the format of OpenMetrics. Each begins with its help.
pub(super) fn keep_families(exported: &ExportedMetrics, text: String) -> String {
    const BEGINNING: &str = "# HELP ";
    if exported.families.is_open() {
        return text;
    }
    let mut kept = String::new();
    for family in
        text.split_inclusive('\n').collect::<Vec<_>>().chunk_by(|_, line| !line.starts_with(BEGINNING))
    {
        let declared =
            family.iter().find_map(|line| line.strip_prefix("# TYPE ")?.trim_end().split_once(' '));
        let is_kept = declared.is_none_or(|(name, kind)| {
            let kind: Kind = kind.parse().unwrap_or_default();
            exported.families.admits(&format!("{name}{}", kind.suffix()))
        });
        if is_kept {
            kept.extend(family.iter().copied());
        }
    }
    kept
}
