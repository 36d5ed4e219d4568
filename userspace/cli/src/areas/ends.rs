//! When the user has enough: Ctrl-C and the other signals that end a program.

use anyhow::bail;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end watching. From when this is made on, they do not end the program.
pub(super) struct Ends([Signal; 4]);

impl Ends {
    pub(super) fn new() -> anyhow::Result<Self> {
        let kinds =
            [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt(), SignalKind::quit()];
        let [Ok(terminate), Ok(hangup), Ok(interrupt), Ok(quit)] = kinds.map(signal) else {
            bail!("signals cannot be received");
        };
        Ok(Self([terminate, hangup, interrupt, quit]))
    }

    /// Waits for one of them.
    pub(super) async fn next(&mut self) {
        let [terminate, hangup, interrupt, quit] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
            _ = interrupt.recv() => {}
            _ = quit.recv() => {}
        }
    }
}
