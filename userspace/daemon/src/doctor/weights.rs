//! Check of the weights of nodes for the memory policy weighted interleave.

use std::path::Path;

use numaward_config::interleave_weights::InterleaveWeights;
use numaward_enforce::weights::{NodeWeights, Weights};
use numaward_guarantee::weights::interleave_weights;

use super::{Outcome, ok, warn};

/// Checks that the configured weights of nodes can be written.
pub(super) fn examine_weights(root: &Path, config: &InterleaveWeights) -> Outcome {
    let (wanted, mut problems) = interleave_weights(config, &Weights::new(root))
        .unwrap_or_else(|problem| (NodeWeights::new(), vec![problem]));
    problems.extend(wanted.keys().filter_map(|node| {
        let path = Weights::file(*node);
        let error = rustix::fs::access(root.join(&path), rustix::fs::Access::WRITE_OK).err()?;
        Some(format!("/{path} cannot be written ({error})"))
    }));
    if problems.is_empty() {
        let weights: Vec<String> =
            wanted.iter().map(|(node, weight)| format!("{weight} on node {node}")).collect();
        return ok(format!("can be set: {}", weights.join(", ")));
    }
    warn(
        format!("{}: these weights keep their values", problems.join("; ")),
        "use Linux 6.9 or newer; configure weights for nodes that have memory, with source: given if the firmware reports no \
         bandwidth; let the daemon write /sys/kernel/mm/mempolicy: ProtectKernelTunables=no in its unit",
    )
}

#[cfg(test)]
mod tests {
    use numaward_api::doctor::CheckResult;

    use super::{super::tests::tree, *};

    const WEIGHT: &str = "sys/kernel/mm/mempolicy/weighted_interleave/node0";
    const MEMORY: (&str, &str) = ("sys/devices/system/node/has_memory", "0\n");

    #[test]
    fn reports_weights_that_cannot_be_set() {
        let read = |text: &str| serde_json::from_str::<InterleaveWeights>(text).unwrap();
        let (given, by_bandwidth) =
            (read(r#"{"source": "given", "weights": {"0": 3}}"#), read(r#"{"source": "bandwidth"}"#));
        let file = |kind: &str| format!("sys/devices/system/node/node0/access0/initiators/{kind}_bandwidth");
        let bandwidths = ["read", "write"].map(file);
        let files = [(WEIGHT, "1\n"), MEMORY, (&bandwidths[0], "20480\n"), (&bandwidths[1], "20480\n")];
        let full = tree(&files);
        assert_eq!(examine_weights(full.path(), &given), ok("can be set: 3 on node 0"));
        assert_eq!(examine_weights(full.path(), &by_bandwidth), ok("can be set: 1 on node 0"));
        let warning = |files: &[(&str, &str)], config: &InterleaveWeights| {
            let dir = tree(files);
            let (verdict, finding, _) = examine_weights(dir.path(), config);
            assert_eq!(verdict, CheckResult::Warn, "{finding}");
            finding
        };
        let finding = warning(&files[..3], &by_bandwidth);
        assert!(
            finding.starts_with("the firmware reports no bandwidth for the memory of node 0: "),
            "{finding}"
        );
        let finding = warning(&files, &read(r#"{"source": "given", "weights": {"7": 3}}"#));
        assert!(finding.starts_with("there is no node 7 with memory here"), "{finding}");
        let finding = warning(&[MEMORY], &given);
        assert!(finding.contains("Linux 6.9 is the first"), "{finding}");
        let other = WEIGHT.replace("node0", "node1");
        let finding = warning(&[MEMORY, (&other, "1\n")], &given);
        assert!(finding.starts_with(&format!("/{WEIGHT} cannot be written (No such file")), "{finding}");
    }
}
