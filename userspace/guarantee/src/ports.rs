//! Interfaces between the reconciler and the daemon.

use std::{sync::Arc, thread::JoinHandle};

use numaward_config::Config;
use numaward_model::{health::Heartbeats, port::ObservedHost};
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use crate::{error::StartError, reconciler::ReconcilerHandle};

/// Creates the reconciler. Implemented in `numaward_control`, used by the daemon.
pub trait ReconcilerFactory {
    /// Registers the reconciler's metrics.
    fn register(&self, registry: &mut Registry);

    /// Registers metrics under the names of the kubelet's metrics.
    fn register_kubelet(&self, registry: &mut Registry);

    /// Performs the steps that need privileges which the daemon drops afterwards. Without this call,
    /// [`start`](Self::start) returns `None`.
    fn prepare(&mut self, config: &Config);

    /// Starts the reconciler. Returns `None` if the host has no cgroup v2 hierarchy, the machine is not known, not
    /// even the default policy fits it, or [`prepare`](Self::prepare) was not called.
    ///
    /// If the policy does not fit the machine, existing guarantees are kept and no new ones are given.
    ///
    /// # Errors
    ///
    /// Returns an error if the ledger cannot be used: without it, existing guarantees would be lost silently.
    fn start(
        self: Box<Self>,
        config: &Config,
        ports: Ports,
        runtime: &Handle,
        stop: &CancellationToken,
    ) -> Result<Option<(ReconcilerHandle, JoinHandle<()>)>, StartError>;
}

/// The services that the reconciler uses.
#[derive(Clone)]
pub struct Ports {
    pub host: Arc<dyn ObservedHost>,
    /// Liveness of the daemon's threads.
    pub heartbeats: Heartbeats,
}

impl Ports {
    /// Returns the ports of this host, with threads whose liveness is not observed.
    pub fn new(host: Arc<dyn ObservedHost>) -> Self {
        Self { host, heartbeats: Heartbeats::default() }
    }
}
