//! The environment of a command that does work of the daemon itself: `numaward uninstall`.

use std::io;

use numaward_config::{Config, outgoing::Otlp};
use numaward_telemetry::otlp::spans::Traces;
use tokio::runtime::{Builder, Handle};

use crate::logging;

/// Starts the log as configured, and calls `command` with a runtime whose thread talks to systemd. Must be called while the
/// process has one thread. Returns an error if the thread cannot be started.
pub fn run_one_shot<T>(config: &Config, command: impl FnOnce(&Handle) -> T) -> io::Result<T> {
    logging::start(&config.log, &Traces::new(&Otlp::default()));
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    Ok(command(runtime.handle()))
}
