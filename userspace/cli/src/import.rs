//! `numaward import-kubelet-state`: what was taken over, as text.

use numaward_daemon::import::Imported;

use crate::table::{columns, row, size};

/// What was taken over, for people.
pub(crate) fn render(imported: &Imported) -> String {
    let mut rows = vec![row(["POD", "CONTAINER", "CPUS", "NODES", "MEMORY"])];
    rows.extend(imported.containers.iter().map(|container| {
        let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
        let nodes: Vec<&str> = container.memory.iter().map(|block| block.nodes.as_str()).collect();
        let memory: Vec<String> =
            container.memory.iter().map(|block| format!("{} {}", block.kind, size(block.bytes))).collect();
        row([
            &container.pod_uid,
            &container.container,
            &or_dash(&container.cpus),
            &or_dash(&nodes.join(" ")),
            &or_dash(&memory.join(", ")),
        ])
    }));
    let table = if imported.containers.is_empty() { String::new() } else { columns(&rows) + "\n" };
    format!("{table}{} containers; shared CPUs {}\n", imported.containers.len(), imported.shared_cpus)
}
