//! What `numaward uninstall --restore` gave back.

use std::collections::BTreeMap;

use serde::Serialize;

/// What was given back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Restored {
    /// Cgroups that got back what they had, in the order of their paths.
    pub cgroups: Vec<RestoredCgroup>,
    /// Cgroups that did not, and are still there; interrupts and the like that did not.
    pub left: Vec<String>,
}

/// A cgroup that got back what it had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoredCgroup {
    /// Its path below the root of the hierarchy.
    pub cgroup: String,
    /// What it had before numaward wrote there, by the knob: a file such as `cpuset.cpus`.
    pub knobs: BTreeMap<String, String>,
}
