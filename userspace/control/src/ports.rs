//! What the reconciler asks of the parts around it, and what it gives them.

use std::sync::Arc;

use numaward_api as api;
use numaward_model::port::{AssignmentSink, CgroupEvents, EventSink, MachineSource};

/// Gives what is assigned now.
pub type View = Arc<dyn Fn() -> Arc<api::Allocations> + Send + Sync>;

/// The parts around the reconciler.
#[derive(Clone)]
pub struct Ports {
    /// Knows the machine.
    pub machine: Arc<dyn MachineSource>,
    /// Is told what is assigned, on the reconciler's thread.
    pub assignments: Arc<dyn AssignmentSink>,
    /// Takes events.
    pub events: Arc<dyn EventSink>,
    /// Knows which cgroups come and go.
    pub cgroups: Arc<dyn CgroupEvents>,
}

impl Ports {
    /// Where all of them are one part.
    pub fn of<P: MachineSource + AssignmentSink + EventSink + CgroupEvents + 'static>(part: &Arc<P>) -> Self {
        Self { machine: part.clone(), assignments: part.clone(), events: part.clone(), cgroups: part.clone() }
    }
}
