//! The filter for exported metrics (`metrics` in the configuration).

use numaward_config::exported::{ExportedMetrics, MetricFilter};
use numaward_model::snapshot::{GuaranteeFigures, Snapshot};

use super::family::FamilyKind;

/// Removes workloads that are not exported.
pub(super) fn keep_workloads(filter: &MetricFilter, snapshot: &mut Snapshot) {
    if filter.is_open() {
        return;
    }
    let Snapshot { workloads, guarantees, .. } = snapshot;
    let GuaranteeFigures {
        missed,
        missed_hugepages,
        misplaced_hugepages,
        residency,
        missing,
        over_budget,
        ..
    } = guarantees;
    workloads.retain(|of| filter.admits(&of.name));
    missed.retain(|of| filter.admits(&of.workload));
    missed_hugepages.retain(|of| filter.admits(&of.workload));
    misplaced_hugepages.retain(|of| filter.admits(&of.workload));
    residency.retain(|of| filter.admits(&of.workload));
    missing.retain(|of| filter.admits(&of.workload));
    over_budget.retain(|of| filter.admits(&of.workload));
}

/// Removes families that are not exported from a text in the OpenMetrics format, in which each family begins with its
/// help line.
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
            let kind: FamilyKind = kind.parse().unwrap_or_default();
            exported.families.admits(&format!("{name}{}", kind.suffix()))
        });
        if is_kept {
            kept.extend(family.iter().copied());
        }
    }
    kept
}
