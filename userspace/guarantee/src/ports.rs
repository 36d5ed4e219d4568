//! What the reconciler asks of the parts around it, and how the daemon starts it.

use std::{sync::Arc, thread::JoinHandle};

use numaward_config::Config;
use numaward_model::{
    health::Heartbeats,
    port::{AccessSource, AssignmentSink, CgroupEvents, EventSink, HeadroomSource, MachineSource},
};
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::{error::StartError, reconciler::ReconcilerHandle};

/// Gives guarantees, when the daemon starts it.
pub trait ReconcilerFactory {
    /// Adds its metrics.
    fn register(&self, registry: &mut Registry);

    /// Adds its metrics under the names that the kubelet gives them.
    fn register_kubelet(&self, registry: &mut Registry);

    /// Does what needs privileges that the daemon gives up. Where this is not called, nothing is promised.
    fn prepare(&mut self, config: &Config);

    /// Starts to give guarantees on this host. None where it has no cgroup v2 hierarchy, its machine is not known, not even
    /// the default policy fits it, or [`prepare`](Self::prepare) was not called.
    ///
    /// A ledger that cannot be used is an error: silence would let go of what is promised. With a policy that does not fit
    /// the machine, guarantees are kept, and no new ones are given.
    fn start(
        self: Box<Self>,
        config: &Config,
        ports: Ports,
        runtime: &Handle,
        stop: &CancellationToken,
    ) -> Result<Option<(ReconcilerHandle, JoinHandle<()>)>, StartError>;
}

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
    pub fn from_part<P>(part: &Arc<P>) -> Self
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
