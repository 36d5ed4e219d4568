//! Dynamic Resource Allocation: the NUMA nodes of this host as devices of resource claims.

pub mod claim;
#[cfg(feature = "testing")]
pub mod fake;
pub mod health;
pub mod messages;
pub mod parameters;
pub mod plugin;
pub mod slices;
pub mod status;
