//! Resource claims (Dynamic Resource Allocation): the devices that a host offers for them, and the scheduler's choice.

pub mod allocator;
pub mod devices;
