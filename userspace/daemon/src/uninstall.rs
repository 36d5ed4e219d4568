//! `numaward uninstall --restore`: gives back what a daemon wrote.

use std::io;

use numaward_api::restore::Restored;
use numaward_config::{Config, outgoing::Otlp};
use numaward_control::restore::{self, RestoreError};
use numaward_telemetry::otlp::spans::Traces;
use numaward_topology::Machine;

use crate::logging;

/// Not all could be given back.
#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    /// The ledger, the cgroups or the machine cannot be used.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// The threads that speak with systemd cannot be started.
    #[error("cannot start: {0}")]
    Runtime(#[from] io::Error),
}

/// Gives back all that a daemon with this configuration wrote on this machine, and logs as configured. Call it while the
/// process has one thread.
pub fn restore(config: &Config, machine: Machine) -> Result<Restored, UninstallError> {
    logging::start(&config.log, &Traces::new(&Otlp::default()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    Ok(restore::restore(config, machine, runtime.handle())?)
}
