//! The reconciler: admits guarantees, enforces them, and keeps them through crashes and drift.
//!
//! # Problem
//! Workloads with guaranteed CPUs and memory start, run and end while the daemon restarts, other programs write the
//! same knobs, and the machine changes. No CPU and no byte may be guaranteed twice, no change may stay half-applied,
//! and running workloads must not be disturbed.
//!
//! # Terms
//! See [`numaward_guarantee`].
//!
//! # Algorithm
//! One thread (`reconciler`) owns the state and handles commands one by one. To admit a request, the engine decides,
//! the state is stored, the knobs are written, and the probes are informed. A failure undoes the earlier steps. To
//! release a guarantee, the knobs are restored, then the state is stored. Between commands, the thread releases
//! guarantees of workloads that ended, repairs knobs that drifted, and charges a changed machine again with all
//! guarantees.
//!
//! # Invariants
//! - The stored state is never behind the kernel's.
//! - A command is answered only when both agree.

#![forbid(unsafe_code)]

use std::{fs, io, thread::JoinHandle};

use numaward_cgroup::{CgroupPath, EXEC_PARENT, Hierarchy, KnobWatch, OpenError};
use numaward_config::Config;
use numaward_enforce::{Enforcer, EnforcerOptions, Systemd, systemd};
use numaward_guarantee::{
    error::StartError,
    policy,
    ports::{Ports, ReconcilerFactory},
    reconciler::ReconcilerHandle,
};
use prometheus_client::registry::Registry;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

mod auto_placement_worker;
mod core;
pub mod metrics;
mod page_worker;
mod policy_worker;
mod reconciler;
pub mod restore;
mod spans;
#[cfg(any(test, feature = "testing"))]
#[expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a host for tests")]
pub mod testing;
mod worker;
mod write_monitor;

pub use metrics::ControlMetrics;
use reconciler::start;

/// Opens the cgroup v2 hierarchy of this configuration.
pub fn hierarchy(config: &Config) -> Result<Hierarchy, OpenError> {
    match &config.cgroup_mount {
        Some(path) => Hierarchy::open_at(path),
        None => Hierarchy::open(),
    }
}

/// Factory of the reconciler, for the daemon.
#[derive(Debug, Default)]
pub struct Control {
    metrics: ControlMetrics,
    prepared: Option<KnobWatchSetup>,
}

/// Resources that can be created only before the daemon drops its privileges.
#[derive(Debug, Default)]
struct KnobWatchSetup {
    /// Reports the writers of knobs, if the kernel supports it.
    watch: Option<KnobWatch>,
}

impl ReconcilerFactory for Control {
    fn register(&self, registry: &mut Registry) {
        self.metrics.register(registry);
    }

    fn register_kubelet(&self, registry: &mut Registry) {
        self.metrics.register_kubelet(registry);
    }

    /// Creates the parent cgroup of commands, because the root of the hierarchy is read-only after the daemon drops its
    /// privileges, and the watch that reports the writers of knobs.
    fn prepare(&mut self, config: &Config) {
        // `start_on_this_host` reports the error.
        let Ok(hierarchy) = hierarchy(config) else {
            self.prepared = Some(KnobWatchSetup::default());
            return;
        };
        let made = CgroupPath::root().child(EXEC_PARENT).map_err(io::Error::other).and_then(|parent| {
            match fs::create_dir(hierarchy.dir(&parent)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                made => made,
            }
        });
        if let Err(error) = made {
            tracing::warn!(%error, "commands cannot get guarantees: the parent of their cgroups could not be created");
        }
        let watch = KnobWatch::new(hierarchy.root());
        if let Err(error) = &watch {
            tracing::warn!(%error, "knobs cannot be watched: they are checked every second, and their writers remain unknown");
        }
        self.prepared = Some(KnobWatchSetup { watch: watch.ok() });
    }

    fn start(
        self: Box<Self>,
        config: &Config,
        ports: Ports,
        runtime: &Handle,
        stop: &CancellationToken,
    ) -> Result<Option<(ReconcilerHandle, JoinHandle<()>)>, StartError> {
        let Some(KnobWatchSetup { watch }) = self.prepared else { return Ok(None) };
        start_on_this_host(config, ports, self.metrics, watch, runtime, stop)
    }
}

/// Starts the reconciler. Returns `None` if the host has no cgroup v2 hierarchy, if the machine is unknown, or if even
/// the default policy does not fit it.
fn start_on_this_host(
    config: &Config,
    ports: Ports,
    metrics: ControlMetrics,
    watch: Option<KnobWatch>,
    runtime: &Handle,
    stop: &CancellationToken,
) -> Result<Option<(ReconcilerHandle, JoinHandle<()>)>, StartError> {
    let machine = ports.host.machine();
    if machine.nodes.is_empty() {
        tracing::warn!("guarantees are not available: the machine could not be read");
        return Ok(None);
    }
    let hierarchy = match hierarchy(config) {
        Ok(hierarchy) => hierarchy,
        Err(error) => {
            tracing::warn!(%error, "guarantees are not available without cgroup v2");
            return Ok(None);
        }
    };
    let systemd =
        systemd::is_init(&config.host_root).then(|| Systemd::new(runtime.clone(), &config.host_root));
    // Nodes and CPUs that are added later are available to all unbound cgroups.
    let mut options = EnforcerOptions::new(machine.possible_cpus.clone(), machine.possible_nodes.clone());
    options.proc = config.host_root.join("proc");
    let enforcer = Enforcer::new(hierarchy.root().to_owned(), systemd, options);
    match start(config, hierarchy, enforcer, ports, metrics, watch, stop.clone()) {
        Err(StartError::Policy(problems)) => {
            tracing::error!(
                problems = policy::join_problems(&problems),
                "guarantees can be neither given nor released on this machine"
            );
            Ok(None)
        }
        started => started.map(Some),
    }
}

#[cfg(test)]
mod tests;
