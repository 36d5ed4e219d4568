//! The terms of a request: how it wants to be placed, besides how much it wants.
//!
//! They are kept with the owner in the ledger: who changes or moves later what an owner holds does it on the terms on
//! which it was admitted.

use std::collections::{BTreeMap, BTreeSet};

use numaward_topology::{CpuSet, Machine, NodeSet};
use serde::{Deserialize, Serialize};

use crate::{
    policy_names::{CpuKind, MemoryPolicy, MemoryTier, Tiers, TopologyManagerPolicy, TopologyManagerScope},
    preferences::PlacementPreferences,
};

impl CpuKind {
    /// The CPUs of this kind on a machine; `None` while it is not known which they are.
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

/// How a request wants to be placed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "conditions of which each holds or not, whatever the others are"
)]
pub struct Terms {
    /// Its own topology policy, instead of the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<TopologyManagerPolicy>,
    /// Its own scope of the topology policy, instead of the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<TopologyManagerScope>,
    /// The nodes on which its containers should be placed.
    #[serde(default, skip_serializing_if = "PlacementPreferences::is_empty")]
    pub preferences: PlacementPreferences,
    /// Others are kept off its exclusive CPUs. That is for who carries the decision out; no strategy heeds it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub isolate: bool,
    /// How the kernel is to choose among its nodes for each new page. Like `isolate`, no strategy heeds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_policy: Option<MemoryPolicy>,
    /// Its class of L3 caches and memory bandwidth. Like `isolate`, no strategy heeds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resctrl_class: Option<String>,
    /// The only nodes on which it may be. Empty: any. Only `native` heeds this and all that follows.
    #[serde(default, skip_serializing_if = "NodeSet::is_empty")]
    pub nodes: NodeSet,
    /// Its whole CPUs are exclusive although it requests no memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub without_memory: bool,
    /// How memory-only nodes count for it, instead of as configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiers: Option<Tiers>,
    /// The only sorts of memory that it takes. Empty: any.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub memory_tiers: BTreeSet<MemoryTier>,
    /// Its exclusive CPUs are of all these kinds. Empty: any.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub cpu_kinds: BTreeSet<CpuKind>,
    /// Each of its exclusive CPUs is of a different core, and nobody may use the other threads of these cores.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hide_siblings: bool,
    /// The name by which others know it, if that is not the owner's: of a pod `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What others can name it by, besides its own name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Owners on whose nodes it would like to be: by name, or by a label as `key=value`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub with: BTreeSet<String>,
    /// Owners on whose nodes it would like not to be: by name, or by a label as `key=value`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub apart: BTreeSet<String>,
    /// Its CPUs are to share a last-level cache where possible.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub same_cache: bool,
    /// It must stay where it is placed first.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub immovable: bool,
    /// The memory that it requests is promised although it is Burstable. Its CPUs stay shared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub burstable: bool,
}

impl Terms {
    /// Whether nothing but the configuration says how to place it.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// What is set of that which only the strategy `native` heeds, by the names of the API.
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
