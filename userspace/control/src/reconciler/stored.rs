//! When the state is stored, and when the ledger file is written.
//!
//! The state is stored before anything is done for it, while somebody waits. The file, which others read and which serves
//! when the journal is damaged, is written when there is time.

use numaward_store::StoreError;

use super::ReconcilerLoop;
use crate::spans;

/// After how many looks the file is written although the state keeps being stored, or tried again after it failed.
const PATIENCE: u32 = 40;

/// How far the file is behind.
#[derive(Debug, Default)]
pub(super) struct WrittenOut {
    /// The save that the last look found.
    seen: Option<u64>,
    /// Looks since it was up to date.
    looks: u32,
    has_failed: bool,
}

impl ReconcilerLoop {
    /// Stores the state.
    pub(super) fn save(&mut self) -> Result<(), StoreError> {
        let _span = spans::ledger();
        let text = self.texts.of(&self.state).map_err(StoreError::Serialize)?;
        self.store.save_text(&text)?;
        self.marks.follow(&self.state);
        Ok(())
    }

    /// Writes the ledger file if nothing was stored since the last look, if that goes on for long, or if this is the
    /// last.
    pub(super) fn write_out(&mut self, is_last: bool) {
        let Some(saved) = self.store.behind() else { return };
        let before = &mut self.written_out;
        let is_quiet = before.seen.replace(saved) == Some(saved) && !before.has_failed;
        before.looks += 1;
        if !is_quiet && !is_last && before.looks < PATIENCE {
            return;
        }
        let result = self.store.write_out();
        if let (Err(error), false) = (&result, before.has_failed) {
            tracing::warn!(%error, "the ledger file is not up to date; what is promised is in the journal, and nothing is lost");
        }
        *before = WrittenOut { has_failed: result.is_err(), ..WrittenOut::default() };
    }
}
