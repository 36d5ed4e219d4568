//! Guarantees: from a request to what the kernel holds, through crashes and drift.
//!
//! Problem: CPUs and memory are promised to workloads that come, run and go, while the daemon restarts, others
//! write the same knobs, and the machine changes. No CPU and no byte may be promised twice, nothing may be
//! half-applied, and what runs must not be disturbed.
//!
//! Terms: those of [`numaward_guarantee`].
//!
//! Algorithm: one thread (`reconciler`) owns the state and takes commands one by one. To admit: the engine
//! decides; the state is stored; the knobs are written; the probes are informed. What fails undoes what was done
//! before. To release: the knobs are given back; the state is stored. In between it looks after what it
//! holds: a workload that is gone is released, a knob that drifted is written again, a machine that changed is
//! charged anew with what is promised.
//!
//! Invariants: the stored state is never behind what the kernel holds; an answer is given only when both agree.

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

/// The cgroup v2 hierarchy of this configuration.
pub fn hierarchy(config: &Config) -> Result<Hierarchy, OpenError> {
    match &config.cgroup_mount {
        Some(path) => Hierarchy::open_at(path),
        None => Hierarchy::open(),
    }
}

/// The reconciler, as a part of a daemon.
#[derive(Debug, Default)]
pub struct Control {
    metrics: ControlMetrics,
    prepared: Option<Prepared>,
}

/// What only a daemon with all its privileges can make.
#[derive(Debug, Default)]
struct Prepared {
    /// Reports who writes knobs, where the kernel has it.
    watch: Option<KnobWatch>,
}

impl ReconcilerFactory for Control {
    fn register(&self, registry: &mut Registry) {
        self.metrics.register(registry);
    }

    fn register_kubelet(&self, registry: &mut Registry) {
        self.metrics.register_kubelet(registry);
    }

    /// Makes the cgroup in which those of commands are made, as the root of the hierarchy is read-only even for its
    /// owner, and the watch that reports who writes knobs.
    fn prepare(&mut self, config: &Config) {
        // `start_on_this_host` reports it.
        let Ok(hierarchy) = hierarchy(config) else {
            self.prepared = Some(Prepared::default());
            return;
        };
        let made = CgroupPath::root().child(EXEC_PARENT).map_err(io::Error::other).and_then(|parent| {
            match fs::create_dir(hierarchy.dir(&parent)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                made => made,
            }
        });
        if let Err(error) = made {
            tracing::warn!(%error, "commands cannot be given guarantees: no cgroup can be made for them");
        }
        let watch = KnobWatch::new(hierarchy.root());
        if let Err(error) = &watch {
            tracing::warn!(%error, "knobs are looked at every second instead, and who wrote them stays unknown");
        }
        self.prepared = Some(Prepared { watch: watch.ok() });
    }

    fn start(
        self: Box<Self>,
        config: &Config,
        ports: Ports,
        runtime: &Handle,
        stop: &CancellationToken,
    ) -> Result<Option<(ReconcilerHandle, JoinHandle<()>)>, StartError> {
        let Some(Prepared { watch }) = self.prepared else { return Ok(None) };
        start_on_this_host(config, ports, self.metrics, watch, runtime, stop)
    }
}

/// Starts to give guarantees on this host, unless it has no cgroup v2 hierarchy, its machine is not known, or not
/// even the default policy fits it.
fn start_on_this_host(
    config: &Config,
    ports: Ports,
    metrics: ControlMetrics,
    watch: Option<KnobWatch>,
    runtime: &Handle,
    stop: &CancellationToken,
) -> Result<Option<(ReconcilerHandle, JoinHandle<()>)>, StartError> {
    let machine = ports.machine.machine();
    if machine.nodes.is_empty() {
        tracing::warn!("nothing can be promised: the machine is not known");
        return Ok(None);
    }
    let hierarchy = match hierarchy(config) {
        Ok(hierarchy) => hierarchy,
        Err(error) => {
            tracing::warn!(%error, "nothing can be promised without cgroup v2");
            return Ok(None);
        }
    };
    let systemd =
        systemd::is_init(&config.host_root).then(|| Systemd::new(runtime.clone(), &config.host_root));
    // Nodes and CPUs that come later are for all cgroups that are not bound.
    let options = EnforcerOptions::new(machine.possible_cpus.clone(), machine.possible_nodes.clone());
    let enforcer = Enforcer::new(hierarchy.root().to_owned(), systemd, options);
    match start(config, hierarchy, enforcer, ports, metrics, watch, stop.clone()) {
        Err(StartError::Policy(problems)) => {
            tracing::error!(
                problems = policy::join_problems(&problems),
                "nothing can be promised on this machine, nor given back"
            );
            Ok(None)
        }
        started => started.map(Some),
    }
}

#[cfg(test)]
mod tests;
