//! Terms of a request: requirements and preferences for its placement, besides the amounts.
//!
//! The ledger stores the terms with the owner. Later resizes and moves of the owner respect them.

use std::collections::{BTreeMap, BTreeSet};

use numaward_topology::{CpuSet, Machine, NodeSet};
use serde::{Deserialize, Serialize};

use crate::{
    policy_names::{CpuKind, MemoryPolicy, MemoryTier, Tiers, TopologyManagerPolicy, TopologyManagerScope},
    preferences::PlacementPreferences,
};

impl CpuKind {
    /// Returns the CPUs of this kind; `None` if it is unknown which they are.
    pub fn cpus_of(self, machine: &Machine) -> Option<CpuSet> {
        Some(match self {
            Self::Performance => &machine.cpu_ids() - &machine.efficiency_cpus,
            Self::Efficiency => machine.efficiency_cpus.clone(),
            Self::HighFrequency => &machine.cpu_ids() - machine.lower_frequency_cpus.as_ref()?,
            Self::Isolated => machine.isolated_cpus.clone(),
            Self::NohzFull => machine.nohz_full_cpus.clone(),
        })
    }
}

/// Requirements and preferences for the placement of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "conditions of which each holds or not, whatever the others are"
)]
pub struct Terms {
    /// Topology policy instead of the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<TopologyManagerPolicy>,
    /// Scope of the topology policy instead of the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<TopologyManagerScope>,
    /// Nodes on which the containers should be placed.
    #[serde(default, skip_serializing_if = "PlacementPreferences::is_empty")]
    pub preferences: PlacementPreferences,
    /// True if other processes are kept off the exclusive CPUs. Strategies ignore it; the caller enforces it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub isolate: bool,
    /// Method by which the kernel selects a node for each new page. Strategies ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_policy: Option<MemoryPolicy>,
    /// Class of L3 caches and memory bandwidth. Strategies ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resctrl_class: Option<String>,
    /// The only permitted nodes; any if empty. Only `native` supports this and all following fields.
    #[serde(default, skip_serializing_if = "NodeSet::is_empty")]
    pub nodes: NodeSet,
    /// True if whole CPUs are exclusive although no memory is requested.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_memory: bool,
    /// Treatment of memory-only nodes instead of the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiers: Option<Tiers>,
    /// The only permitted types of memory; any if empty.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub memory_tiers: BTreeSet<MemoryTier>,
    /// Kinds that each exclusive CPU must have; any if empty.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub cpu_kinds: BTreeSet<CpuKind>,
    /// True if each exclusive CPU is on a different core, and no workload may use the sibling threads.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hide_siblings: bool,
    /// Name that selectors of other owners use, if it differs from the owner's: for a pod `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Labels that selectors of other owners can use.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Owners to be near to: their nodes are preferred. By name or by a label as `key=value`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub with: BTreeSet<String>,
    /// Owners to be apart from: their nodes are avoided. By name or by a label as `key=value`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub apart: BTreeSet<String>,
    /// True if the CPUs should share a last-level cache.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub same_cache: bool,
    /// True if the workload must not move after its first placement.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub immovable: bool,
    /// True if the requested memory of a Burstable request is guaranteed. Its CPUs stay shared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub burstable: bool,
}

impl Terms {
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the API names of set fields that only the strategy `native` supports.
    pub fn native_only(&self) -> Vec<&'static str> {
        let set = [
            ("nodes", !self.nodes.is_empty()),
            ("CPUs without memory", self.without_memory),
            ("tiers", self.tiers.is_some()),
            ("memoryTiers", !self.memory_tiers.is_empty()),
            ("cpuKinds", !self.cpu_kinds.is_empty()),
            ("hideSiblings", self.hide_siblings),
            ("labels", !self.labels.is_empty()),
            ("with", !self.with.is_empty()),
            ("apart", !self.apart.is_empty()),
            ("sameCache", self.same_cache),
            ("immovable", self.immovable),
            ("burstable", self.burstable),
        ];
        set.into_iter().filter(|(_, is_set)| *is_set).map(|(name, _)| name).collect()
    }
}
