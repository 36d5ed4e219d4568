//! The state of enforcement: modes, CPU isolation, automatic placement, and knobs that drifted.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// The extent to which decisions are written to the kernel.
///
/// Tools that follow YAML 1.1 turn `on` and `off` into booleans, so booleans are accepted as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = Mode)]
pub enum EnforcementMode {
    /// No guarantees are given and nothing is written; values from an earlier run are restored.
    Off,
    /// Decisions are made and reported, but not written.
    DryRun,
    /// Decisions are written.
    #[default]
    On,
}

impl<'de> Deserialize<'de> for EnforcementMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Word;
        impl de::Visitor<'_> for Word {
            type Value = EnforcementMode;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("off, dry-run or on")
            }
            fn visit_str<E: de::Error>(self, word: &str) -> Result<EnforcementMode, E> {
                match word {
                    "off" => Ok(EnforcementMode::Off),
                    "dry-run" => Ok(EnforcementMode::DryRun),
                    "on" => Ok(EnforcementMode::On),
                    _ => Err(E::unknown_variant(word, &["off", "dry-run", "on"])),
                }
            }
            fn visit_bool<E: de::Error>(self, on: bool) -> Result<EnforcementMode, E> {
                Ok(if on { EnforcementMode::On } else { EnforcementMode::Off })
            }
        }
        deserializer.deserialize_any(Word)
    }
}

impl JsonSchema for EnforcementMode {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> Cow<'static, str> {
        "Mode".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "enum": ["off", "dry-run", "on", false, true] })
    }
}

/// The state of enforcement.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Enforcement {
    /// The mode of enforcement (`enforcement.mode` in the configuration).
    pub mode: EnforcementMode,
    /// The state of CPU isolation.
    pub herding: CpuIsolation,
    /// Workloads without a guarantee that automatic placement has placed on a preferred node (`home` in the
    /// configuration).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub homes: Vec<AutoPlacedWorkload>,
    /// Knobs with an old value that could not be restored yet. The daemon tries again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_restores: Vec<PendingRestore>,
}

/// A knob with an old value that could not be restored yet, although no guarantee needs the written value any more.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PendingRestore {
    /// The path of the cgroup.
    #[schema(examples("/system.slice/postgresql.service"))]
    pub cgroup: String,
    /// The knob.
    #[schema(examples("memory.max"))]
    pub knob: String,
    /// The value that numaward wrote.
    pub written: String,
    /// The value before, which is to be restored.
    pub found: String,
    /// The reason why the last try failed. Absent before the first try, and if partitions of other cgroups own the
    /// CPUs.
    pub reason: Option<String>,
}

/// A workload without a guarantee that runs on the CPUs of one node, because most of its accesses were remote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = AtHome)]
pub struct AutoPlacedWorkload {
    /// The path of its cgroup.
    #[schema(examples("/system.slice/backup.service"))]
    pub cgroup: String,
    /// The preferred node.
    pub node: u32,
    /// The CPUs of the workload on that node, as a list.
    pub cpus: String,
    /// True if its remote accesses have fallen since; false while the placement is on trial.
    pub kept: bool,
    /// The percentage of remote accesses before the placement.
    pub remote_percent_before: u32,
}

/// The state of CPU isolation, which keeps other workloads off exclusive CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Herding)]
pub struct CpuIsolation {
    /// The mode of CPU isolation: the lesser of `enforcement.mode` and `enforcement.herding.mode`; `on` while a
    /// workload requests it (`isolate`).
    pub mode: EnforcementMode,
    /// Confined cgroups, and those that cannot be confined. Empty while no CPU is exclusive.
    pub cgroups: Vec<ConfinedCgroup>,
    /// The number of processes in the root cgroup, without kernel threads; they cannot be confined. Absent while no CPU
    /// is exclusive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes_in_root: Option<u64>,
}

/// A cgroup without exclusive CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Herded)]
pub struct ConfinedCgroup {
    /// The path of the cgroup.
    #[schema(examples("/system.slice"))]
    pub cgroup: String,
    /// The CPUs of the shared pool that the cgroup gets, as a list: all, or those that it had before. Empty if it
    /// cannot be confined.
    pub cpus: String,
    /// The state of the cgroup.
    pub state: ConfinementState,
    /// The reason why the cgroup cannot be confined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Knobs that no longer have the written value, at the last check.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<Drift>,
}

/// The state of a cgroup without exclusive CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = HerdState)]
pub enum ConfinementState {
    /// The cgroup is confined to the shared pool.
    #[serde(rename = "herded")]
    Confined,
    /// The cgroup would be confined if this were not a dry run.
    DryRun,
    /// The cgroup cannot be confined and is unchanged.
    Refused,
}

/// A knob that was found with another value than the written one.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drift {
    /// The cgroup.
    pub cgroup: String,
    /// The knob.
    #[schema(examples("cpuset.cpus"))]
    pub knob: String,
    /// The value that numaward wrote.
    pub wanted: String,
    /// The value at the last check; absent if the knob did not exist.
    pub found: Option<String>,
    /// The current state.
    pub state: DriftState,
    /// The number of times that another value was found.
    pub count: u64,
    /// The way in which the last change was noticed.
    pub noticed: DriftDetection,
    /// The process that made the last change; absent if unknown.
    pub writer: Option<KnobWriter>,
}

/// The state of a knob that drifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum DriftState {
    /// The knob has the right value again.
    Repaired,
    /// The knob will be written again: another program keeps writing it, or the kernel refused the write.
    Waiting,
    /// The knob is no longer written, because another program keeps writing it.
    Left,
    /// The knob has the right value, but the kernel grants less: a CPU or node is offline, or an ancestor does not have
    /// it any more.
    Ineffective,
}

/// The way in which a drift was noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Noticed)]
pub enum DriftDetection {
    /// The kernel reported the write.
    Write,
    /// A periodic check found the difference.
    #[serde(rename = "look")]
    Check,
}

/// A process that wrote a knob.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Writer)]
pub struct KnobWriter {
    /// The process id.
    pub pid: u32,
    /// The name of the process; absent if the process ended before it could be read.
    pub command: Option<String>,
    /// The path of its cgroup; absent for the same reason.
    pub cgroup: Option<String>,
}
