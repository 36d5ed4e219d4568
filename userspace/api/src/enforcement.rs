//! How far settings are written, who is herded, and which knobs drifted.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, de};
use serde_with_macros::skip_serializing_none;
use utoipa::ToSchema;

/// How much of what is decided is written to the kernel.
///
/// Tools that follow YAML 1.1 turn `on` and `off` into booleans, so these are understood as well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = Mode)]
pub enum EnforcementMode {
    /// Nothing is promised or written; what an earlier run wrote is given back.
    Off,
    /// All is decided, and what would be written is reported; nothing is written.
    DryRun,
    /// What is decided is written.
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

/// How much of what is decided is written to the kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Enforcement {
    /// Whether guarantees are enforced (`enforcement.mode` of the configuration).
    pub mode: EnforcementMode,
    /// Who is kept off exclusive CPUs.
    pub herding: CpuIsolation,
    /// Workloads without a guarantee that have a home (`home` of the configuration).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub homes: Vec<AutoPlacedWorkload>,
    /// Knobs whose old value could not be given back yet. That is tried again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pending_restores: Vec<PendingRestore>,
}

/// A knob whose old value could not be given back yet, although no guarantee asks for the value that was written.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PendingRestore {
    /// The path of its cgroup.
    #[schema(examples("/system.slice/postgresql.service"))]
    pub cgroup: String,
    /// The knob.
    #[schema(examples("memory.max"))]
    pub knob: String,
    /// The value that numaward wrote.
    pub written: String,
    /// The value before, which is to be given back.
    pub found: String,
    /// Why the last try failed. Absent before the first one, and where partitions of other cgroups have the CPUs.
    pub reason: Option<String>,
}

/// A workload without a guarantee that is held to CPUs of one node, as most of its accesses were remote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = AtHome)]
pub struct AutoPlacedWorkload {
    /// The path of its cgroup.
    #[schema(examples("/system.slice/backup.service"))]
    pub cgroup: String,
    /// The node.
    pub node: u32,
    /// Its CPUs there, as a list.
    pub cpus: String,
    /// Whether its remote accesses have fallen since; until that is known it is on trial.
    pub kept: bool,
    /// How many of its accesses were remote before, in percent.
    pub remote_percent_before: u32,
}

/// Who is kept off exclusive CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Herding)]
pub struct CpuIsolation {
    /// Whether others are herded: the lesser of `enforcement.mode` and `enforcement.herding.mode`; on while a workload
    /// asks for it (`isolate`).
    pub mode: EnforcementMode,
    /// The cgroups that are, or cannot be. None while no CPU is exclusive.
    pub cgroups: Vec<ConfinedCgroup>,
    /// Processes in the root cgroup, kernel threads not counted: they cannot be herded. Absent while no CPU is
    /// exclusive.
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
    /// What of the shared pool it is to have, as a list: all of it, or what of it was its own before. Empty if
    /// it cannot be herded.
    pub cpus: String,
    /// What became of it.
    pub state: ConfinementState,
    /// Why it cannot be herded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Knobs that did not hold what was written, as last seen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<Drift>,
}

/// What became of a cgroup without exclusive CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
#[schema(as = HerdState)]
pub enum ConfinementState {
    /// It is on the shared pool.
    #[serde(rename = "herded")]
    Confined,
    /// It would be, if this were no dry run.
    DryRun,
    /// It cannot be herded, and is left as it is.
    Refused,
}

/// A knob that did not hold what was written.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drift {
    /// The cgroup.
    pub cgroup: String,
    /// The knob.
    #[schema(examples("cpuset.cpus"))]
    pub knob: String,
    /// What it is to hold.
    pub wanted: String,
    /// What it was last found to hold; absent if it was not there.
    pub found: Option<String>,
    /// How it is now.
    pub state: DriftState,
    /// How often it was found so.
    pub count: u64,
    /// How it was noticed the last time.
    pub noticed: DriftDetection,
    /// Who wrote it the last time; absent if that is not known.
    pub writer: Option<KnobWriter>,
}

/// How a knob is that drifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub enum DriftState {
    /// It holds again what it should.
    Repaired,
    /// It will be written again: somebody else keeps writing it, or the kernel refused.
    Waiting,
    /// It is left as it is, as somebody else keeps writing it.
    Left,
    /// It holds what it should, and the kernel gives less: a CPU or node is offline, or an ancestor has it no longer.
    Ineffective,
}

/// How it was noticed that a knob drifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Noticed)]
pub enum DriftDetection {
    /// The kernel reported the write.
    Write,
    /// It was looked at.
    #[serde(rename = "look")]
    Check,
}

/// A process that wrote a knob.
#[skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = Writer)]
pub struct KnobWriter {
    /// Its id.
    pub pid: u32,
    /// Its name; absent if it had ended before it could be asked.
    pub command: Option<String>,
    /// The path of its cgroup; absent likewise.
    pub cgroup: Option<String>,
}
