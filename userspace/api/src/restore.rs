//! Output of `numaward uninstall`.

use std::collections::BTreeMap;

use serde::Serialize;

/// The values that were restored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoreReport {
    /// Cgroups with restored values, in the order of their paths.
    pub cgroups: Vec<RestoredCgroup>,
    /// Items that were not restored.
    pub left: Vec<UnrestoredItem>,
}

/// An item that still has a value of numaward.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnrestoredItem {
    /// The name: an existing cgroup, an interrupt or a similar item.
    pub name: String,
    /// The reason; if absent, the log has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A cgroup with restored values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoredCgroup {
    /// The path of the cgroup below the root of the hierarchy.
    pub cgroup: String,
    /// The values from before numaward wrote to the cgroup, by knob (a file such as `cpuset.cpus`). For
    /// `cgroup.subtree_control`, the current value: other programs enable controllers there too.
    pub knobs: BTreeMap<String, String>,
}
