//! `numaward import-kubelet-state`: the imported guarantees as text.

use numaward_api::{MemoryBlock, import::ImportReport};

use crate::table::{row, size, table};

/// Renders the imported guarantees.
pub(crate) fn render(imported: &ImportReport) -> String {
    let or_dash = |text: &str| if text.is_empty() { "-".to_owned() } else { text.to_owned() };
    let line = |pod: &str, container: &str, cpus: &str, blocks: &[MemoryBlock]| {
        let nodes: Vec<&str> = blocks.iter().map(|block| block.nodes.as_str()).collect();
        let memory: Vec<String> =
            blocks.iter().map(|block| format!("{} {}", block.kind, size(block.bytes))).collect();
        row([pod, container, &or_dash(cpus), &or_dash(&nodes.join(" ")), &or_dash(&memory.join(", "))])
    };
    let pods = imported.pods.iter().map(|pod| line(&pod.uid, "(pod)", &pod.cpus, &pod.memory));
    let containers = imported
        .containers
        .iter()
        .map(|container| line(&container.pod_uid, &container.container, &container.cpus, &container.memory));
    let table = || table(["POD", "CONTAINER", "CPUS", "NODES", "MEMORY"], pods.chain(containers)) + "\n";
    let table = if imported.containers.is_empty() { String::new() } else { table() };
    let mut lines: Vec<String> =
        imported.warnings.iter().map(|warning| format!("warning: {warning}\n")).collect();
    let count = imported.containers.len();
    lines.extend([table, format!("{count} containers; shared CPUs {}\n", imported.shared_cpus)]);
    lines.concat()
}

#[cfg(test)]
mod tests {
    use numaward_api::import::{Container, Pod};

    use super::*;

    #[test]
    fn renders_imported_guarantees() {
        let block = |kind: &str, nodes: &str| MemoryBlock {
            kind: kind.to_owned(),
            nodes: nodes.to_owned(),
            bytes: 1 << 30,
        };
        let container = |container: &str, cpus: &str, memory| Container {
            pod_uid: "uid".to_owned(),
            container: container.to_owned(),
            cpus: cpus.to_owned(),
            memory,
        };
        let two = vec![block("memory", "0"), block("hugepages-2Mi", "0-1")];
        let containers = vec![container("a", "2-3", two), container("b", "", Vec::new())];
        let imported = ImportReport {
            containers,
            shared_cpus: "0-1".to_owned(),
            pods: vec![Pod { uid: "whole".to_owned(), cpus: "4-7".to_owned(), memory: Vec::new() }],
            warnings: Vec::new(),
        };
        let expected = "\
POD    CONTAINER  CPUS  NODES  MEMORY
whole  (pod)      4-7   -      -
uid    a          2-3   0 0-1  memory 1.0 GiB, hugepages-2Mi 1.0 GiB
uid    b          -     -      -

2 containers; shared CPUs 0-1
";
        assert_eq!(render(&imported), expected);
        let nothing = ImportReport {
            containers: Vec::new(),
            shared_cpus: "0-3".to_owned(),
            pods: Vec::new(),
            warnings: vec!["a: b".to_owned()],
        };
        assert_eq!(render(&nothing), "warning: a: b\n0 containers; shared CPUs 0-3\n");
    }
}
