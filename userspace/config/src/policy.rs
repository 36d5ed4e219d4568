//! Resource policies: the kubelet's fields under the kubelet's names, so that a block of a `KubeletConfiguration` can
//! be pasted into the file.

use std::{collections::BTreeMap, fmt, str::FromStr};

pub use numaward_engine::policy::{
    CpuManagerPolicy, KubeletVersion, MemoryManagerPolicy, MemoryPolicy, MemoryTier, Tiers,
    TopologyManagerPolicy, TopologyManagerScope,
};
use numaward_engine::{Quantity, policy::UnknownName};
use numaward_topology::{Bytes, CpuSet, ZoneKind};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::inline_schema::inline_schema;

/// The strategy by which requests are decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StrategyKind {
    /// The decisions of the kubelet's managers; at most 20 nodes.
    Kubelet,
    /// numaward's own decisions under the same policies: they also consider distances, strand less memory, allow
    /// allocations on one and on several nodes to share a node, and have no limit on nodes.
    #[default]
    Native,
}

/// A version, quoted or unquoted.
struct Version<T>(T);

impl<'de, T: FromStr<Err = UnknownName>> Deserialize<'de> for Version<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a version such as \"1.36\"")]
        enum Spelling {
            Text(String),
            Number(f64),
        }
        let text = match Spelling::deserialize(deserializer)? {
            Spelling::Text(text) => text,
            Spelling::Number(number) => number.to_string(),
        };
        text.parse().map(Self).map_err(de::Error::custom)
    }
}

pub(super) fn version<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err = UnknownName>,
{
    Version::deserialize(deserializer).map(|Version(version)| version)
}

pub(super) fn optional_version<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err = UnknownName>,
{
    let version = Option::<Version<T>>::deserialize(deserializer)?;
    Ok(version.map(|Version(version)| version))
}

/// Memory of a node that is reserved for the system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReservedMemory {
    /// The id of the node.
    pub numa_node: u32,
    /// Amounts by kind: `memory`, `hugepages-2Mi`.
    #[schemars(with = "BTreeMap<String, Amount>")]
    pub limits: BTreeMap<ZoneKind, Amount>,
}

/// Resources reserved for Kubernetes or the system: amounts by resource. Only `cpu`, `memory` and `hugepages-*` are
/// used.
pub type Reservation = BTreeMap<String, Amount>;

/// A Kubernetes quantity, also as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount(pub Quantity);

impl Serialize for Amount {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&quantity_text(self.0))
    }
}

/// Formats whole MiB with their unit, as no number of CPUs is that large: `1Gi`.
fn quantity_text(quantity: Quantity) -> String {
    match quantity.units() {
        Some(units) if units > 0 && units % (1 << 20) == 0 && quantity == Quantity::whole(units) => {
            Bytes(units).to_string()
        }
        _ => quantity.to_string(),
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

/// The eviction signal with a threshold that counts as reserved memory.
pub const MEMORY_AVAILABLE: &str = "memory.available";

/// Thresholds at which Kubernetes evicts, by signal. Only `memory.available` is used.
pub type Thresholds = BTreeMap<String, Threshold>;

/// The kubelet's default threshold of `memory.available`.
pub(super) const DEFAULT_THRESHOLD: Threshold = Threshold::Amount(Quantity::whole(100 << 20));

/// A threshold of eviction: the remaining amount of a resource.
#[derive(Clone, Copy, Debug, PartialEq, derive_more::Display)]
pub enum Threshold {
    /// An absolute amount.
    #[display("{}", quantity_text(*_0))]
    Amount(Quantity),
    /// A percentage of the capacity, from 0 to 100, so never NaN.
    #[display("{_0}%")]
    Percent(f32),
}

impl Eq for Threshold {}

impl Threshold {
    /// Returns the amount for a capacity. Like the kubelet, it ignores 0% and 100%, and computes with floating-point
    /// numbers of these sizes.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is what the kubelet does"
    )]
    pub fn resolve(self, capacity: Bytes) -> Quantity {
        match self {
            Self::Amount(amount) => amount,
            Self::Percent(100.0) => Quantity::default(),
            Self::Percent(percent) => {
                Quantity::whole((capacity.0 as f64 * f64::from(percent / 100.0)) as u64)
            }
        }
    }
}

impl FromStr for Threshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.ends_with('%') {
            let percent: Option<f32> = text.trim_end_matches('%').parse().ok();
            let percent = percent.filter(|percent| (0.0..=100.0).contains(percent));
            let error = || format!("{text:?} is not a percentage from 0% to 100%");
            return percent.map(Self::Percent).ok_or_else(error);
        }
        let amount = text
            .parse::<Quantity>()
            .map_err(|error| format!("{error}; a percentage such as 5% is possible as well"))?;
        if amount.is_zero() {
            Err("a threshold must be above 0".to_owned())
        } else {
            Ok(Self::Amount(amount))
        }
    }
}

impl Serialize for Threshold {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Threshold {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected an amount such as 100Mi, or a percentage such as 5%")]
        enum Spelling {
            Text(String),
            Number(Amount),
        }
        let text = match Spelling::deserialize(deserializer)? {
            Spelling::Text(text) => text,
            Spelling::Number(Amount(amount)) => amount.to_string(),
        };
        text.parse().map_err(de::Error::custom)
    }
}

inline_schema!(Threshold, { "type": ["string", "number"], "examples": ["100Mi", "5%"] });

/// A list of CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuList(pub CpuSet);

inline_schema!(CpuList, {
    "type": "string",
    "pattern": r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$",
    "examples": ["0-1,8"],
});
