//! The terms of a request: how it wants to be placed, besides how much it wants.
//!
//! They are kept with the owner in the ledger: who changes or moves later what an owner holds does it on the terms on
//! which it was admitted.

use serde::{Deserialize, Serialize};

use crate::{
    policy_names::{TopologyManagerPolicy, TopologyManagerScope},
    preferences::PlacementPreferences,
};

/// How a request wants to be placed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
}

impl Terms {
    /// Whether nothing but the configuration says how to place it.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}
