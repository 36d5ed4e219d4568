//! Node weights of the memory policy weighted-interleave.

use std::collections::BTreeMap;

use numaward_topology::NodeId;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::inline_schema::inline_schema;

/// Node weights of the memory policy `weighted-interleave`, which apply to all workloads of the host with that policy.
/// With `keep`, the old values are restored. Only if guarantees are enforced. Needs Linux 6.9.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct InterleaveWeights {
    /// The source of the weights: `keep`, `given` or `bandwidth`.
    pub source: WeightSource,
    /// The weights with `source: given`, 1 to 255, by node. Other nodes keep their weight.
    #[schemars(with = "BTreeMap<String, Weight>")]
    pub weights: BTreeMap<NodeId, Weight>,
}

/// The source of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum WeightSource {
    /// The weights stay unchanged. Values that an earlier run wrote are restored.
    #[default]
    Keep,
    /// The weights are given in the configuration: `weights`.
    Given,
    /// The weights are computed from the memory bandwidth of each node that the firmware reports.
    Bandwidth,
}

/// The weight of a node, 1 to 255: the number of consecutive pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, derive_more::Display)]
#[serde(try_from = "u64")]
pub struct Weight(pub u8);

impl TryFrom<u64> for Weight {
    type Error = String;

    fn try_from(weight: u64) -> Result<Self, String> {
        let of = u8::try_from(weight).ok().filter(|weight| *weight > 0);
        of.map(Self).ok_or_else(|| format!("{weight} is not a weight; expected 1 to 255"))
    }
}

inline_schema!(Weight, { "type": "integer", "examples": [3] });

/// Returns a contradiction between the settings: the key, and the problem.
pub(super) fn problems(of: &InterleaveWeights) -> Option<(&'static str, String)> {
    let problem = match (of.source, of.weights.is_empty()) {
        (WeightSource::Given, true) => "source: given needs at least one weight, such as {0: 3}",
        (WeightSource::Bandwidth, false) => "source: bandwidth uses no given weights; remove them",
        _ => return None,
    };
    Some(("enforcement.interleaveWeights.weights", problem.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_invalid_weights() {
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
    fn weights_need_source_given() {
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
