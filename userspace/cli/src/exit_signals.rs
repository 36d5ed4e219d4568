//! Ctrl-C and the other signals by which the user ends a command.

use anyhow::bail;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Signals that end a command. Once this value exists, they no longer end the program.
pub(crate) struct ExitSignals([Signal; 4]);

impl ExitSignals {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let kinds =
            [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit()];
        let [Ok(terminate), Ok(hangup), Ok(interrupt), Ok(quit)] = kinds.map(signal) else {
            bail!("signals cannot be received");
        };
        Ok(Self([terminate, hangup, interrupt, quit]))
    }

    /// Waits for one of the signals.
    pub(crate) async fn next(&mut self) {
        let [terminate, hangup, interrupt, quit] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
        }
    }
}
