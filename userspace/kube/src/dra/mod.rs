//! Dynamic Resource Allocation: the NUMA nodes of this host as devices of resource claims.

pub mod claim;
pub mod messages;
pub mod plugin;
pub mod slices;
