//! For a command that does what otherwise the daemon does: `numaward uninstall --restore`.

use std::io;

use numaward_config::{Config, outgoing::Otlp};
use numaward_telemetry::otlp::spans::Traces;
use tokio::runtime::{Builder, Handle};

use crate::logging;

/// Logs as configured, and calls `does` with a runtime whose thread talks to systemd. Call it while the process has one
/// thread. Fails if that thread cannot be started.
pub fn run_one_shot<T>(config: &Config, does: impl FnOnce(&Handle) -> T) -> io::Result<T> {
    logging::start(&config.log, &Traces::new(&Otlp::default()));
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    Ok(does(runtime.handle()))
}
