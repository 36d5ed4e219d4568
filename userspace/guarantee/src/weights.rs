//! Conversion of the configured node weights for weighted-interleave.

use numaward_config::interleave_weights::{InterleaveWeights, WeightSource};
use numaward_enforce::weights::{NodeWeights, WEIGHTS, Weights, by_bandwidth};

/// Returns the weights for the host's nodes and the problems of configured nodes, or the reason why the weights are not known.
pub fn interleave_weights(
    of: &InterleaveWeights,
    host: &Weights,
) -> Result<(NodeWeights, Vec<String>), String> {
    if of.source == WeightSource::Keep {
        return Ok((NodeWeights::new(), Vec::new()));
    }
    if !host.is_here() {
        return Err(format!("there is no /{WEIGHTS}, which Linux 6.9 is the first to have"));
    }
    let nodes = host.nodes()?;
    if of.source == WeightSource::Bandwidth {
        let bandwidths = host.bandwidths(&nodes).map_err(|unknown| {
            let s = if unknown.len() == 1 { "" } else { "s" };
            format!("the firmware reports no bandwidth for the memory of node{s} {unknown}")
        })?;
        return Ok((by_bandwidth(&bandwidths), Vec::new()));
    }
    let (here, absent): (Vec<_>, Vec<_>) = of.weights.iter().partition(|(node, _)| nodes.contains(**node));
    let absent = absent
        .into_iter()
        .map(|(node, _)| format!("there is no node {node} with memory here; nodes with memory are {nodes}"));
    Ok((here.into_iter().map(|(node, weight)| (*node, weight.0)).collect(), absent.collect()))
}
