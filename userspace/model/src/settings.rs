//! The settings of a cgroup, as a value.

use std::collections::BTreeMap;

use numaward_cgroup::knob::{Knob, KnobValue, Limit, Partition, Quota};
use numaward_topology::{Bytes, CpuSet, HugepageSize, NodeSet};
use serde::{Deserialize, Serialize};

/// The values that numaward writes to a cgroup. `None`: the knob is not managed; it stays unchanged, or the original
/// value is restored.
///
/// Serialized as a map from the name of the knob to the written value, with the further keys `beside` and
/// `lifts_parent`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SerializedSettings", into = "SerializedSettings")]
pub struct Settings {
    /// `cpuset.cpus`. Never empty: the empty set would mean all CPUs of the parent.
    pub cpus: Option<CpuSet>,
    /// `cpuset.mems`. Never empty: the empty set would mean all nodes of the parent.
    pub mems: Option<NodeSet>,
    /// `cpuset.cpus.partition`. Anything but `member` needs `cpus`.
    pub partition: Option<Partition>,
    /// `memory.min`; every ancestor's is raised to match.
    pub memory_min: Option<Limit>,
    /// `memory.low`; every ancestor's is raised to match.
    pub memory_low: Option<Limit>,
    pub memory_high: Option<Limit>,
    pub memory_max: Option<Limit>,
    pub cpu_max: Option<Quota>,
    /// True if the parent's `cpu.max` restricts only this cgroup: if this quota is removed, the parent's is as well.
    pub lifts_parent: bool,
    /// `hugetlb.<size>.max`, by page size.
    pub hugetlb: BTreeMap<HugepageSize, Limit>,
    /// Memory that the parent claims in addition, for each knob of protection that is set here: the overhead of a pod.
    /// It counts once, regardless of the number of children that set it.
    pub beside: Option<Bytes>,
}

impl Settings {
    /// Returns the managed knobs and their values.
    pub fn values(&self) -> Values {
        let limits = [
            (Knob::MemoryMin, self.memory_min),
            (Knob::MemoryLow, self.memory_low),
            (Knob::MemoryHigh, self.memory_high),
            (Knob::MemoryMax, self.memory_max),
        ];
        let mut values: BTreeMap<Knob, KnobValue> = limits
            .into_iter()
            .filter_map(|(knob, limit)| Some((knob, KnobValue::Limit(limit?))))
            .chain(
                self.hugetlb.iter().map(|(&size, &limit)| (Knob::HugetlbMax(size), KnobValue::Limit(limit))),
            )
            .collect();
        values.extend(self.cpu_max.map(|quota| (Knob::CpuMax, KnobValue::Quota(quota))));
        values.extend(self.cpus.clone().map(|cpus| (Knob::CpusetCpus, KnobValue::Cpus(cpus))));
        values.extend(self.mems.clone().map(|mems| (Knob::CpusetMems, KnobValue::Nodes(mems))));
        values.extend(
            self.partition.map(|partition| (Knob::CpusetPartition, KnobValue::Partition(partition.into()))),
        );
        Values(values)
    }

    /// Returns true if no knob is managed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the value of a knob of memory protection.
    pub fn protection(&self, knob: Knob) -> Option<Limit> {
        match knob {
            Knob::MemoryMin => self.memory_min,
            Knob::MemoryLow => self.memory_low,
            _ => None,
        }
    }

    /// Returns the memory that the parent claims in addition for a knob of memory protection.
    pub fn sibling_claim(&self, knob: Knob) -> Option<Limit> {
        let claims = self.protection(knob).is_some_and(|claim| claim > Limit::Bytes(Bytes(0)));
        self.beside.filter(|_| claims).map(Limit::Bytes)
    }

    /// Returns true if the parent's `cpu.max` must be removed.
    pub fn lifts_parent_quota(&self) -> bool {
        self.lifts_parent && self.cpu_max == Some(Quota::Max)
    }

    /// Returns true if the CPUs form a separate scheduling domain.
    pub fn has_partition(&self) -> bool {
        self.partition.is_some_and(|partition| partition != Partition::Member)
    }

    /// Returns an error for settings that the kernel would interpret differently.
    pub fn check(&self) -> Result<(), SettingsError> {
        if self.cpus.as_ref().is_some_and(CpuSet::is_empty) {
            return Err(SettingsError::EmptySet { knob: Knob::CpusetCpus });
        }
        if self.mems.as_ref().is_some_and(NodeSet::is_empty) {
            return Err(SettingsError::EmptySet { knob: Knob::CpusetMems });
        }
        if self.has_partition() && self.cpus.is_none() {
            return Err(SettingsError::PartitionWithoutCpus);
        }
        Ok(())
    }
}

/// Settings that the kernel would interpret differently.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// An empty set, which the kernel interprets as all CPUs or nodes of the parent.
    #[error("{knob}: the set is empty, which would mean all that the parent has; name at least one")]
    EmptySet {
        /// The knob: `cpuset.cpus` or `cpuset.mems`.
        knob: Knob,
    },
    /// A partition without CPUs.
    #[error("a partition needs cpus")]
    PartitionWithoutCpus,
}

/// Values by knob.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<Knob, String>", into = "BTreeMap<Knob, String>")]
pub struct Values(pub BTreeMap<Knob, KnobValue>);

impl Values {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Values> for BTreeMap<Knob, String> {
    fn from(values: Values) -> Self {
        values.0.into_iter().map(|(knob, value)| (knob, value.to_string())).collect()
    }
}

impl TryFrom<BTreeMap<Knob, String>> for Values {
    type Error = ValueError;

    fn try_from(texts: BTreeMap<Knob, String>) -> Result<Self, ValueError> {
        texts
            .into_iter()
            .map(|(knob, text)| match knob.parse(&text) {
                Ok(value) => Ok((knob, value)),
                Err(expected) => Err(ValueError { knob, text, expected }),
            })
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

/// A text that is not a value of its knob.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{knob}: {text:?} is not {expected}")]
pub struct ValueError {
    knob: Knob,
    text: String,
    expected: &'static str,
}

/// The serialized form of [`Settings`].
#[derive(Serialize, Deserialize)]
struct SerializedSettings {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    beside: Option<Bytes>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    lifts_parent: bool,
    #[serde(flatten)]
    values: Values,
}

impl From<Settings> for SerializedSettings {
    fn from(settings: Settings) -> Self {
        Self { beside: settings.beside, lifts_parent: settings.lifts_parent, values: settings.values() }
    }
}

impl TryFrom<SerializedSettings> for Settings {
    type Error = ValueError;

    fn try_from(
        SerializedSettings { beside, lifts_parent, values }: SerializedSettings,
    ) -> Result<Self, ValueError> {
        let mut settings = Self { lifts_parent, beside, ..Self::default() };
        for (knob, value) in values.0 {
            match (knob, value) {
                (Knob::CpusetCpus, KnobValue::Cpus(cpus)) => settings.cpus = Some(cpus),
                (Knob::CpusetMems, KnobValue::Nodes(mems)) => settings.mems = Some(mems),
                (Knob::CpusetPartition, KnobValue::Partition(state)) if state.invalid.is_none() => {
                    settings.partition = Some(state.partition);
                }
                (Knob::MemoryMin, KnobValue::Limit(limit)) => settings.memory_min = Some(limit),
                (Knob::MemoryLow, KnobValue::Limit(limit)) => settings.memory_low = Some(limit),
                (Knob::MemoryHigh, KnobValue::Limit(limit)) => settings.memory_high = Some(limit),
                (Knob::MemoryMax, KnobValue::Limit(limit)) => settings.memory_max = Some(limit),
                (Knob::CpuMax, KnobValue::Quota(quota)) => settings.cpu_max = Some(quota),
                (Knob::HugetlbMax(size), KnobValue::Limit(limit)) => {
                    settings.hugetlb.insert(size, limit);
                }
                (knob, value) => {
                    return Err(ValueError { knob, text: value.to_string(), expected: "a setting" });
                }
            }
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_serialize_as_knobs() {
        let settings = Settings {
            cpus: Some("2-3".parse().unwrap()),
            mems: Some("1".parse().unwrap()),
            partition: Some(Partition::Root),
            memory_min: Some(Limit::Bytes(Bytes::mib(256))),
            memory_max: Some(Limit::Max),
            hugetlb: [(HugepageSize(Bytes::mib(2)), Limit::Bytes(Bytes::mib(64)))].into(),
            ..Settings::default()
        };
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(
            text,
            r#"{"cpuset.cpus":"2-3","cpuset.cpus.partition":"root","cpuset.mems":"1","memory.min":"268435456","memory.max":"max","hugetlb.2MB.max":"67108864"}"#
        );
        assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings);
        let settings = Settings {
            beside: Some(Bytes::mib(1)),
            lifts_parent: true,
            cpu_max: Some(Quota::Max),
            mems: settings.mems,
            ..Settings::default()
        };
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(text, r#"{"beside":1048576,"lifts_parent":true,"cpuset.mems":"1","cpu.max":"max"}"#);
        assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), settings);
    }

    #[test]
    fn refuses_unknown_settings() {
        for (text, words) in [
            (r#"{"cpuset.cpus":"x"}"#, "cpuset.cpus: \"x\" is not a CPU list"),
            (r#"{"cpuset.cpu":"1"}"#, "\"cpuset.cpu\" is not a knob"),
            (r#"{"cgroup.procs":"1"}"#, "cgroup.procs: \"1\" is not a setting"),
            (r#"{"cpuset.cpus.partition":"root invalid"}"#, "is not a setting"),
        ] {
            let error = serde_json::from_str::<Settings>(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn refuses_empty_sets() {
        let empty = Settings { cpus: Some(CpuSet::new()), ..Settings::default() };
        assert!(matches!(empty.check(), Err(SettingsError::EmptySet { knob: Knob::CpusetCpus })));
        let empty = Settings { mems: Some(NodeSet::new()), ..Settings::default() };
        assert!(matches!(empty.check(), Err(SettingsError::EmptySet { knob: Knob::CpusetMems })));
        let alone = Settings { partition: Some(Partition::Isolated), ..Settings::default() };
        assert!(matches!(alone.check(), Err(SettingsError::PartitionWithoutCpus)));
        Settings::default().check().unwrap();
    }
}
