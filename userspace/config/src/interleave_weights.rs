//! Weights of nodes for the memory policy weighted-interleave.

use std::collections::BTreeMap;

use numaward_topology::NodeId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// From where the weights of nodes for the memory policy `weighted-interleave` are. They are those of the host: each workload
/// with that policy has them. What was there comes back with `keep`. Only where guarantees are enforced. Takes Linux 6.9.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct InterleaveWeights {
    /// `keep`, `given` or `bandwidth`.
    pub source: WeightSource,
    /// The weights with `source: given`, 1 to 255, by node. Nodes that are not named here keep what they have.
    #[schemars(with = "BTreeMap<String, Weight>")]
    pub weights: BTreeMap<NodeId, Weight>,
}

/// From where the weights are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WeightSource {
    /// They stay as they are. What an earlier run wrote is given back.
    #[default]
    Keep,
    /// From the configuration: `weights`.
    Given,
    /// From the bandwidth of each node's memory as the firmware reports it.
    Bandwidth,
}

/// The weight of a node: so many pages in turn, 1 to 255.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, derive_more::Display)]
#[serde(try_from = "u64")]
pub struct Weight(pub u8);

impl TryFrom<u64> for Weight {
    type Error = String;

    fn try_from(weight: u64) -> Result<Self, String> {
        let of = u8::try_from(weight).ok().filter(|weight| *weight > 0);
        of.map(Self).ok_or_else(|| format!("{weight} is no weight that the kernel takes; expected 1 to 255"))
    }
}

inline_schema!(Weight, { "type": "integer", "examples": [3] });

/// What is wrong with them together: the key, and the problem.
pub(super) fn problems(of: &InterleaveWeights) -> Option<(&'static str, String)> {
    let problem = match (of.source, of.weights.is_empty()) {
        (WeightSource::Given, true) => "give at least one weight, such as {0: 3}, as the source is given",
        (WeightSource::Bandwidth, false) => "weights are for source: given; with bandwidth, remove them",
        _ => return None,
    };
    Some(("enforcement.interleaveWeights.weights", problem.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_that_the_kernel_takes() {
        let read = |text: &str| serde_json::from_str::<InterleaveWeights>(text);
        let given = read(r#"{"source": "given", "weights": {"0": 3, "2": 255}}"#).unwrap();
        assert_eq!(given.weights, BTreeMap::from([(NodeId(0), Weight(3)), (NodeId(2), Weight(255))]));
        for weight in ["0", "256", "-1", "1.5", "\"3\""] {
            let text = format!(r#"{{"source": "given", "weights": {{"0": {weight}}}}}"#);
            assert!(read(&text).is_err(), "{text}");
        }
        assert!(read(r#"{"weights": {"a": 1}}"#).is_err() && read(r#"{"source": "auto"}"#).is_err());
        assert_eq!(read("{}").unwrap().source, WeightSource::Keep);
    }

    #[test]
    fn weights_come_with_the_source_given() {
        for (text, is_wrong) in [
            ("{}", false),
            (r#"{"weights": {"0": 3}}"#, false),
            (r#"{"source": "given"}"#, true),
            (r#"{"source": "given", "weights": {"0": 3}}"#, false),
            (r#"{"source": "bandwidth"}"#, false),
            (r#"{"source": "bandwidth", "weights": {"0": 3}}"#, true),
        ] {
            assert_eq!(problems(&serde_json::from_str(text).unwrap()).is_some(), is_wrong, "{text}");
        }
    }
}
