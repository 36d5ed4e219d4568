//! Dynamic Resource Allocation: the NUMA nodes of this host as devices that pods can claim.
//!
//! - [`slices`]: the devices, published for the scheduler.

pub mod slices;
