//! What is promised: the kubelet's fields under the kubelet's names, so that a block of a
//! `KubeletConfiguration` can be pasted in.

use std::{collections::BTreeMap, fmt};

use numaward_engine::Quantity;
pub use numaward_engine::policy::{
    CpuManagerPolicy, MemoryManagerPolicy, MemoryTier, Tiers, TopologyManagerPolicy, TopologyManagerScope,
};
use numaward_topology::{CpuSet, ZoneKind};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::inline_schema::inline_schema;

/// By which rules it is decided who gets what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StrategyKind {
    /// Those of the kubelet's managers: the same decisions, at most 20 nodes.
    Kubelet,
    /// Our own, under the same policies: they also heed distances, leave less memory stranded, let allocations on one
    /// and on several nodes share a node, and know no limit on nodes.
    #[default]
    Native,
}

/// Memory of one node that is kept for the system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReservedMemory {
    /// The node.
    pub numa_node: u32,
    /// Amounts by kind: `memory`, `hugepages-2Mi`.
    #[schemars(with = "BTreeMap<String, Amount>")]
    pub limits: BTreeMap<ZoneKind, Amount>,
}

/// What Kubernetes or the system is kept: amounts by resource. Of these, `cpu`, `memory` and `hugepages-*` count.
pub type Reservation = BTreeMap<String, Amount>;

/// An amount as Kubernetes writes it; a plain number too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount(pub Quantity);

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl de::Visitor<'_> for Text {
            type Value = Amount;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an amount such as 2, 100m or 1Gi")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Amount, E> {
                text.parse().map(Amount).map_err(E::custom)
            }
            fn visit_u64<E: de::Error>(self, amount: u64) -> Result<Amount, E> {
                Ok(Amount(Quantity::whole(amount)))
            }
            fn visit_f64<E: de::Error>(self, amount: f64) -> Result<Amount, E> {
                amount.to_string().parse().map(Amount).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Text)
    }
}

inline_schema!(Amount, { "type": ["string", "number"], "examples": ["1Gi", "500m", 2] });

/// CPUs as a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuList(pub CpuSet);

inline_schema!(CpuList, {
    "type": "string",
    "pattern": r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$",
    "examples": ["0-1,8"],
});
