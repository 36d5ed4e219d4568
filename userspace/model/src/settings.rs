//! What a cgroup is to hold, as a value.

use std::collections::BTreeMap;

use numaward_cgroup::knob::{Knob, KnobValue, Limit, Partition, Quota};
use numaward_topology::{Bytes, CpuSet, HugepageSize, NodeSet};
use serde::{Deserialize, Serialize};

/// What one cgroup is to hold. `None` is not managed: it stays as it is, or goes back to what was found.
///
/// Serialized as a map from the knob's name to what is written to it, with `beside` and `lifts_parent`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored", into = "Stored")]
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
    /// `memory.high`.
    pub memory_high: Option<Limit>,
    /// `memory.max`.
    pub memory_max: Option<Limit>,
    /// `cpu.max`.
    pub cpu_max: Option<Quota>,
    /// Whether the parent's `cpu.max` holds it no more than its own: where that is lifted, the parent's is, too.
    pub lifts_parent: bool,
    /// `hugetlb.<size>.max` by page size.
    pub hugetlb: BTreeMap<HugepageSize, Limit>,
    /// What the parent claims besides, by each knob of protection that is claimed here, for what runs beside it: the
    /// overhead of a pod. It counts once, however many children say so.
    pub beside: Option<Bytes>,
}

impl Settings {
    /// The knobs that are managed, and what each is to hold.
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

    /// Whether nothing is managed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What is claimed by this knob of protection.
    pub fn protection(&self, knob: Knob) -> Option<Limit> {
        match knob {
            Knob::MemoryMin => self.memory_min,
            Knob::MemoryLow => self.memory_low,
            _ => None,
        }
    }

    /// What the parent claims besides by this knob of protection.
    pub fn sibling_claim(&self, knob: Knob) -> Option<Limit> {
        let claims = self.protection(knob).is_some_and(|claim| claim > Limit::Bytes(Bytes(0)));
        self.beside.filter(|_| claims).map(Limit::Bytes)
    }

    /// Whether the parent's `cpu.max` is lifted.
    pub fn lifts_parent_quota(&self) -> bool {
        self.lifts_parent && self.cpu_max == Some(Quota::Max)
    }

    /// Whether the CPUs are to be a scheduling domain of their own.
    pub fn has_partition(&self) -> bool {
        self.partition.is_some_and(|partition| partition != Partition::Member)
    }

    /// Refuses settings that cannot mean what they say.
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

/// Settings cannot mean what they say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// An empty set would mean every CPU or node of the parent.
    #[error("{knob}: the set is empty, which would mean all that the parent has; name at least one")]
    EmptySet {
        /// `cpuset.cpus` or `cpuset.mems`.
        knob: Knob,
    },
    /// A partition is made of CPUs.
    #[error("a partition needs cpus")]
    PartitionWithoutCpus,
}

/// Values of knobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<Knob, String>", into = "BTreeMap<Knob, String>")]
pub struct Values(pub BTreeMap<Knob, KnobValue>);

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

/// A text is no value of its knob.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{knob}: {text:?} is not {expected}")]
pub struct ValueError {
    knob: Knob,
    text: String,
    expected: &'static str,
}

/// Settings as they are serialized.
#[derive(Serialize, Deserialize)]
struct Stored {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    beside: Option<Bytes>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    lifts_parent: bool,
    #[serde(flatten)]
    values: Values,
}

impl From<Settings> for Stored {
    fn from(settings: Settings) -> Self {
        Self { beside: settings.beside, lifts_parent: settings.lifts_parent, values: settings.values() }
    }
}

impl TryFrom<Stored> for Settings {
    type Error = ValueError;

    fn try_from(Stored { beside, lifts_parent, values }: Stored) -> Result<Self, ValueError> {
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
    fn settings_are_written_as_the_knobs_they_set() {
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
    fn what_is_no_setting_is_refused() {
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
    fn sets_that_would_mean_everything_are_refused() {
        let empty = Settings { cpus: Some(CpuSet::new()), ..Settings::default() };
        assert!(matches!(empty.check(), Err(SettingsError::EmptySet { knob: Knob::CpusetCpus })));
        let empty = Settings { mems: Some(NodeSet::new()), ..Settings::default() };
        assert!(matches!(empty.check(), Err(SettingsError::EmptySet { knob: Knob::CpusetMems })));
        let alone = Settings { partition: Some(Partition::Isolated), ..Settings::default() };
        assert!(matches!(alone.check(), Err(SettingsError::PartitionWithoutCpus)));
        Settings::default().check().unwrap();
    }
}
