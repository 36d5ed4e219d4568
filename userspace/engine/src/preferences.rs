//! Placement preferences: the nodes of a container's devices, and nodes that it prefers.
//!
//! A device cannot move: a container that does not use all nodes of its devices is not aligned, and a strict topology
//! policy refuses it. Preferred nodes are dropped if they cannot be satisfied.

use std::collections::BTreeMap;

use numaward_topology::NodeSet;
use serde::{Deserialize, Serialize};

use crate::request::ContainerName;

/// Nodes on which the containers of a request should be placed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementPreferences {
    /// Nodes of the devices, by container.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<ContainerName, NodeSet>,
    /// Preferred nodes, by container.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub preferred: BTreeMap<ContainerName, NodeSet>,
}

impl PlacementPreferences {
    /// Returns whether no preferences are stated.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty() && self.preferred.is_empty()
    }

    /// Returns the preferences without preferred nodes; `None` if there are none.
    pub(crate) fn without_preferred_nodes(&self) -> Option<Self> {
        (!self.preferred.is_empty()).then(|| Self { devices: self.devices.clone(), ..Self::default() })
    }
}
