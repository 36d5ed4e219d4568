//! The memory of a workload on and off its guaranteed nodes.

use numaward_api::GuaranteeResidency;

use crate::table::{row, size, table};

/// Renders the memory on and off the guaranteed nodes, with the verdict.
pub(crate) fn render(residency: &[GuaranteeResidency]) -> String {
    let rows = residency.iter().map(|of| {
        row([
            &of.kind,
            &size(of.on.total_bytes()),
            &size(of.off.anon_bytes),
            &size(of.off.shmem_bytes),
            &size(of.off.file_bytes),
            if of.broken { "broken" } else { "kept" },
        ])
    });
    table(["KIND", "ON ITS NODES", "OFF: ANON", "SHMEM", "FILE", "GUARANTEE"], rows)
}
