//! What commands do beside the daemon, as it would.

use std::io;

use numaward_config::{Config, outgoing::Otlp};
use numaward_telemetry::otlp::spans::Traces;
use tokio::runtime::{Builder, Handle};

use crate::logging;

/// Logs as configured, and does something beside the threads that speak with systemd. Call it while the process has one
/// thread.
pub fn once<T>(config: &Config, does: impl FnOnce(&Handle) -> T) -> io::Result<T> {
    logging::start(&config.log, &Traces::new(&Otlp::default()));
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    Ok(does(runtime.handle()))
}
