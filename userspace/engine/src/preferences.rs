//! Where a container should be, besides where its CPUs and memory can be: near its devices, and on the nodes that it
//! prefers.
//!
//! A device cannot be moved: a container on fewer nodes than its devices are on is not aligned, and a strict topology
//! policy refuses it. Preferred nodes are a wish, which is dropped where it cannot be met.

use std::collections::BTreeMap;

use numaward_topology::NodeSet;
use serde::{Deserialize, Serialize};

use crate::request::ContainerName;

/// Nodes on which the containers of a request should be placed, as far as these are known or stated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementPreferences {
    /// The nodes of a container's devices.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<ContainerName, NodeSet>,
    /// The nodes on which a container would like to be.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub preferred: BTreeMap<ContainerName, NodeSet>,
}

impl PlacementPreferences {
    /// Whether no nodes are stated for any container.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty() && self.preferred.is_empty()
    }

    /// Without the wishes; `None` if there are none.
    pub(crate) fn without_preferred_nodes(&self) -> Option<Self> {
        (!self.preferred.is_empty()).then(|| Self { devices: self.devices.clone(), ..Self::default() })
    }
}
