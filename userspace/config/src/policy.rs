//! What is promised: the kubelet's fields under the kubelet's names, so that a block of a
//! `KubeletConfiguration` can be pasted in.

use std::{collections::BTreeMap, fmt, str::FromStr};

use numaward_engine::Quantity;
pub use numaward_engine::policy::{
    CpuManagerPolicy, KubeletVersion, MemoryManagerPolicy, MemoryTier, Tiers, TopologyManagerPolicy,
    TopologyManagerScope,
};
use numaward_engine::policy::{
    UnknownName,
    gates::{self, FeatureGates, GateCheck},
};
use numaward_topology::{Bytes, CpuSet, ZoneKind};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::{
    config::Config, inline_schema::inline_schema, memory_qos::MemoryReservationPolicy, schema::closest,
};

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

/// A version, in quotes or without.
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

/// The signal whose threshold counts as reserved memory.
pub const MEMORY_AVAILABLE: &str = "memory.available";

/// The signals that the kubelet knows.
const SIGNALS: [&str; 9] = [
    MEMORY_AVAILABLE,
    "allocatableMemory.available",
    "nodefs.available",
    "nodefs.inodesFree",
    "imagefs.available",
    "imagefs.inodesFree",
    "containerfs.available",
    "containerfs.inodesFree",
    "pid.available",
];

/// When Kubernetes evicts: thresholds by signal. Of these, `memory.available` counts.
pub type Thresholds = BTreeMap<String, Threshold>;

/// The threshold of `memory.available` where the kubelet is given none.
pub(super) const DEFAULT_THRESHOLD: Threshold = Threshold::Amount(Quantity::whole(100 << 20));

/// How little is left of something when Kubernetes evicts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// So much.
    Amount(Quantity),
    /// So many percent of what there is. From 0 to 100, so never NaN.
    Percent(f32),
}

impl Eq for Threshold {}

impl Threshold {
    /// How much this is, out of so much. Like the kubelet, which ignores 0% and 100%, and which counts in
    /// floating-point numbers of these sizes.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is what the kubelet does"
    )]
    pub fn of(self, capacity: Bytes) -> Quantity {
        match self {
            Self::Amount(amount) => amount,
            Self::Percent(100.0) => Quantity::default(),
            Self::Percent(percent) => {
                Quantity::whole((capacity.0 as f64 * f64::from(percent / 100.0)) as u64)
            }
        }
    }
}

impl fmt::Display for Threshold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amount(amount) => amount.fmt(f),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl FromStr for Threshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.ends_with('%') {
            let percent: Option<f32> = text.trim_end_matches('%').parse().ok();
            let percent = percent.filter(|percent| (0.0..=100.0).contains(percent));
            let error = || format!("{text:?} is not a share from 0% to 100%");
            return percent.map(Self::Percent).ok_or_else(error);
        }
        let amount =
            text.parse::<Quantity>().map_err(|error| format!("{error}; a share such as 5% will do, too"))?;
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
        #[serde(untagged, expecting = "expected an amount such as 100Mi, or a share such as 5%")]
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

/// What is wrong with what is pasted from a kubelet's configuration, beyond single values: the path of the key, and why.
pub(super) fn problems(config: &Config) -> Vec<(Vec<String>, String)> {
    let signals = config.eviction_hard.iter().flatten().map(|(signal, _)| signal);
    let unknown = signals.filter(|signal| !SIGNALS.contains(&signal.as_str()));
    let problem = |signal: &String| {
        let path = vec!["evictionHard".to_owned(), signal.clone()];
        (path, format!("unsupported eviction signal {signal} (known are {})", SIGNALS.join(", ")))
    };
    let mut problems: Vec<_> = unknown.map(problem).collect();
    // The version of the node is not known yet; what one version refuses, the other may take.
    let versions = match (config.kubelet_version, &config.kubernetes.node_name) {
        (None, Some(_)) => KubeletVersion::ALL,
        (version, _) => &[version.unwrap_or_default()],
    };
    let of_each = versions.iter().rev().map(|&version| gate_problems(config, version));
    problems.extend(of_each.min_by_key(Vec::len).unwrap_or_default());
    problems
}

/// What is wrong with feature gates for this version of the kubelet: the path of the key, and why, in the kubelet's words
/// where it has any.
pub fn gate_problems(config: &Config, version: KubeletVersion) -> Vec<(Vec<String>, String)> {
    let gates = FeatureGates { set: &config.feature_gates, version };
    let at = |gate: &str| vec!["featureGates".to_owned(), gate.to_owned()];
    let known: Vec<String> = FeatureGates::names().map(str::to_owned).collect();
    let refused = |(name, &is_on): (&String, &bool)| match gates.check(name, is_on) {
        GateCheck::Refused(words) => Some((at(name), words)),
        GateCheck::Known => None,
        GateCheck::Other => {
            let meant = closest(name, known.iter())?;
            Some((at(name), format!("unrecognized feature gate: {name} (did you mean {meant:?}?)")))
        }
    };
    let mut problems: Vec<_> = config.feature_gates.iter().filter_map(refused).collect();
    if !gates.is_on(gates::CPU_OPTIONS) && !config.cpu_manager_policy_options.is_empty() {
        let options = config.cpu_manager_policy_options.iter().map(|(name, value)| format!("{name}:{value}"));
        let options = options.collect::<Vec<_>>().join(" ");
        let words = format!(
            "CPU Manager policy options map[{options}] require feature gates \"CPUManager\", \"{}\" enabled",
            gates::CPU_OPTIONS
        );
        problems.push((vec!["cpuManagerPolicyOptions".to_owned()], words));
    }
    let is_off = gates.setting(gates::MEMORY_QOS) == Some(false);
    if is_off && config.memory_reservation_policy == Some(MemoryReservationPolicy::TieredReservation) {
        let words = format!("TieredReservation needs the feature gate {}, which is off", gates::MEMORY_QOS);
        problems.push((vec!["memoryReservationPolicy".to_owned()], words));
    }
    let pod_level = match version {
        KubeletVersion::V1_32 => gates::POD_LEVEL_RESOURCES,
        KubeletVersion::V1_36 => gates::POD_LEVEL_MANAGERS,
    };
    if config.strategy == StrategyKind::Kubelet && gates.is_on(pod_level) {
        let words = format!(
            "{pod_level} is on, and what the kubelet {version} does then is not repeated: switch it off, or use the \
             strategy native, which places containers within what their pod has as a whole"
        );
        let key = if config.feature_gates.contains_key(pod_level) { pod_level } else { "AllAlpha" };
        problems.push((at(key), words));
    }
    problems
}

/// What is odd with feature gates but no error.
pub(super) fn warnings(config: &Config) -> Vec<String> {
    let ignored = |(name, &is_on): (&String, &bool)| {
        let is_ignored = config.gates().check(name, is_on) == GateCheck::Other;
        is_ignored.then(|| format!("featureGates.{name} has no effect here"))
    };
    config.feature_gates.iter().filter_map(ignored).collect()
}

/// CPUs as a list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CpuList(pub CpuSet);

inline_schema!(CpuList, {
    "type": "string",
    "pattern": r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$",
    "examples": ["0-1,8"],
});
