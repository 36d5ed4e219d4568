//! What `numaward uninstall --restore` gave back.

use std::collections::BTreeMap;

use serde::Serialize;

/// What was given back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoreReport {
    /// Cgroups that got back what they had, in the order of their paths.
    pub cgroups: Vec<RestoredCgroup>,
    /// What did not.
    pub left: Vec<UnrestoredItem>,
}

/// Something that did not get back what it had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnrestoredItem {
    /// A cgroup that is still there, an interrupt or the like.
    pub name: String,
    /// Why; without it, the log says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A cgroup that got back what it had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoredCgroup {
    /// Its path below the root of the hierarchy.
    pub cgroup: String,
    /// What it had before numaward wrote there, by the knob: a file such as `cpuset.cpus`. For `cgroup.subtree_control`, what
    /// it has now: others enable controllers there too.
    pub knobs: BTreeMap<String, String>,
}
