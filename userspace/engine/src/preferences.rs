//! Where a container should be besides where its CPUs and memory can be: at its devices, and where it would like to.
//!
//! Both are hints like those of CPUs and memory, and merged with them. A device is where it is: on fewer nodes than its
//! devices are on, a container is never preferred, and a strict topology policy refuses it. A wish is given up where
//! nothing comes of it.

use std::collections::BTreeMap;

use numaward_topology::NodeSet;
use serde::{Deserialize, Serialize};

use crate::request::ContainerName;

/// Nodes that containers of a request should be near to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Near {
    /// The nodes of a container's devices.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub devices: BTreeMap<ContainerName, NodeSet>,
    /// The nodes on which a container would like to be.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub preferred: BTreeMap<ContainerName, NodeSet>,
}

impl Near {
    /// Whether no container should be near to anything.
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty() && self.preferred.is_empty()
    }

    /// Without the wishes; `None` if there are none.
    pub(crate) fn without_wishes(&self) -> Option<Self> {
        (!self.preferred.is_empty()).then(|| Self { devices: self.devices.clone(), ..Self::default() })
    }
}
