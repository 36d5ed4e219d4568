//! What the reconciler asks of the parts around it, and what it gives them.

use std::sync::Arc;

use numaward_api as api;
use numaward_model::{
    health::Heartbeats,
    port::{AccessSource, AssignmentSink, CgroupEvents, EventSink, HeadroomSource, MachineSource},
};

/// Gives what is assigned now.
pub type View = Arc<dyn Fn() -> Arc<api::Allocations> + Send + Sync>;

/// The parts around the reconciler.
#[derive(Clone)]
pub struct Ports {
    /// Knows the machine.
    pub machine: Arc<dyn MachineSource>,
    /// Learns what is assigned, on the reconciler's thread.
    pub assignments: Arc<dyn AssignmentSink>,
    /// Takes events.
    pub events: Arc<dyn EventSink>,
    /// Knows which cgroups come and go.
    pub cgroups: Arc<dyn CgroupEvents>,
    /// Knows whether the nodes can keep what is promised on them.
    pub headroom: Arc<dyn HeadroomSource>,
    /// Knows which memory workloads use.
    pub accesses: Arc<dyn AccessSource>,
    /// Sees whether the threads get on.
    pub heartbeats: Heartbeats,
}

impl Ports {
    /// Where all of them are one part.
    pub fn of<P>(part: &Arc<P>) -> Self
    where
        P: MachineSource
            + AssignmentSink
            + EventSink
            + CgroupEvents
            + HeadroomSource
            + AccessSource
            + 'static,
    {
        Self {
            machine: part.clone(),
            assignments: part.clone(),
            events: part.clone(),
            cgroups: part.clone(),
            headroom: part.clone(),
            accesses: part.clone(),
            heartbeats: Heartbeats::default(),
        }
    }
}
