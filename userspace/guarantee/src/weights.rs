//! What is configured of the weights of nodes for weighted-interleave.

use numaward_config::interleave_weights::{InterleaveWeights, WeightSource};
use numaward_enforce::weights::{WEIGHTS, Wanted, Weights, by_bandwidth};

/// The weights that a host's nodes are to have, and why some do not get what is configured.
pub fn interleave_weights(of: &InterleaveWeights, host: &Weights) -> (Wanted, Vec<String>) {
    if of.source == WeightSource::Keep {
        return (Wanted::new(), Vec::new());
    }
    if !host.is_here() {
        return (
            Wanted::new(),
            vec![format!("there is no /{WEIGHTS}, which Linux 6.9 is the first to have")],
        );
    }
    let nodes = match host.nodes() {
        Ok(nodes) => nodes,
        Err(problem) => return (Wanted::new(), vec![problem]),
    };
    if of.source == WeightSource::Bandwidth {
        return match host.bandwidths(&nodes) {
            Ok(bandwidths) => (by_bandwidth(&bandwidths), Vec::new()),
            Err(unknown) => {
                let s = if unknown.len() == 1 { "" } else { "s" };
                let problem =
                    format!("the firmware reports no bandwidth for the memory of node{s} {unknown}");
                (Wanted::new(), vec![problem])
            }
        };
    }
    let (here, absent): (Vec<_>, Vec<_>) = of.weights.iter().partition(|(node, _)| nodes.contains(**node));
    let absent = absent
        .into_iter()
        .map(|(node, _)| format!("there is no node {node} with memory here; nodes with memory are {nodes}"));
    (here.into_iter().map(|(node, weight)| (*node, weight.0)).collect(), absent.collect())
}
