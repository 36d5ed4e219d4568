//! Storage of the state, and writing of the ledger file.
//!
//! The state is stored in a journal before it is acted upon, while a client waits. The ledger file, which other programs read and which
//! replaces a damaged journal, is written when the reconciler is idle.

use std::{collections::BTreeSet, path::Path};

use numaward_cgroup::{CgroupPath, HierarchyLock};
use numaward_guarantee::{
    decisions::DecisionLog, serialization_cache::SerializationCache, state::State, xattr_backup::XattrBackup,
};
use numaward_store::{Store, StoreError};

use crate::spans;

/// Number of polls after which the file is written although new states keep being stored, or after which a failed write is retried.
const MAX_DELAYED_POLLS: u32 = 40;

/// The state, the states for rollbacks, and their storage.
pub(crate) struct StateStore {
    pub(crate) state: State,
    /// States to which the open transactions roll back.
    pub(super) open: Vec<State>,
    pub(crate) storage: Storage,
    /// True if the ledger could not be read: settings that it does not contain may still be ours.
    pub(crate) is_rebuilt: bool,
    /// Cgroups without written knobs at the start of the daemon: their records are from an earlier boot.
    pub(crate) unwritten: BTreeSet<CgroupPath>,
}

impl StateStore {
    pub(super) fn new(state: State, storage: Storage, is_rebuilt: bool) -> Self {
        let unwritten = state.applied.unwritten().cloned().collect();
        Self { state, open: Vec::new(), storage, is_rebuilt, unwritten }
    }

    pub(super) fn save(&mut self) -> Result<(), StoreError> {
        self.storage.save(&self.state)
    }

    /// Starts a change. Copying the state is cheap: its maps are shared until they are modified.
    pub(super) fn begin(&mut self) {
        self.open.push(self.state.clone());
    }

    /// Ends the latest change: keeps it, or rolls it back.
    pub(super) fn end(&mut self, is_kept: bool) {
        if let Some(before) = self.open.pop().filter(|_| !is_kept) {
            self.state = before;
        }
    }

    /// Returns true if the state differs from the one before the latest change.
    pub(super) fn is_changed(&self) -> bool {
        self.open.last() != Some(&self.state)
    }

    /// Returns the current state and the states for rollbacks.
    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut State> {
        self.open.iter_mut().chain([&mut self.state])
    }
}

/// Storage of the state: the ledger, extended attributes of the cgroups, and the file of decisions.
pub(crate) struct Storage {
    store: Store<State>,
    /// Prevents other daemons from writing extended attributes of the cgroups.
    _lock: Option<HierarchyLock>,
    texts: SerializationCache,
    backup: XattrBackup,
    pub(crate) decisions: DecisionLog,
    ledger_file: LedgerFileState,
}

/// Progress of the ledger file.
#[derive(Debug, Default)]
struct LedgerFileState {
    /// Number of the latest save at the last poll.
    seen: Option<u64>,
    /// Polls since the file was up to date.
    looks: u32,
    has_failed: bool,
}

impl Storage {
    pub(crate) fn new(
        (store, lock): (Store<State>, Option<HierarchyLock>),
        backup: XattrBackup,
        dir: &Path,
        state: &mut State,
    ) -> Self {
        Self {
            store,
            _lock: lock,
            texts: SerializationCache::default(),
            backup,
            decisions: DecisionLog::open(dir, state),
            ledger_file: LedgerFileState::default(),
        }
    }

    fn save(&mut self, state: &State) -> Result<(), StoreError> {
        let _span = spans::ledger();
        let text = self.texts.serialize(state).map_err(StoreError::Serialize)?;
        self.store.save_text(&text)?;
        self.backup.update(state);
        Ok(())
    }

    /// Writes the ledger file if nothing was stored since the last poll, if the file has been behind for long, or if this is the last call.
    pub(crate) fn write_out(&mut self, is_last: bool) {
        let Some(saved) = self.store.pending_write_out() else { return };
        let before = &mut self.ledger_file;
        let is_quiet = before.seen.replace(saved) == Some(saved) && !before.has_failed;
        before.looks += 1;
        if !is_quiet && !is_last && before.looks < MAX_DELAYED_POLLS {
            return;
        }
        let result = self.store.write_out();
        if let (Err(error), false) = (&result, before.has_failed) {
            tracing::warn!(%error, "the ledger file could not be updated; the journal has all guarantees, and nothing is lost");
        }
        *before = LedgerFileState { has_failed: result.is_err(), ..LedgerFileState::default() };
    }
}
