//! When the state is stored, and when the ledger file is written.
//!
//! The state is stored before anything is done for it, while somebody waits. The file, which others read and which serves
//! when the journal is damaged, is written when there is time.

use std::{collections::BTreeSet, path::Path};

use numaward_cgroup::{CgroupPath, HierarchyLock};
use numaward_guarantee::{
    decisions::DecisionLog, error::AdmissionError, serialization_cache::SerializationCache, state::State,
    xattr_backup::XattrBackup,
};
use numaward_store::{Store, StoreError};

use super::Core;
use crate::spans;

/// After how many looks the file is written although the state keeps being stored, or tried again after it failed.
const MAX_DELAYED_POLLS: u32 = 40;

/// The state, what it goes back to, and where it is kept.
pub(crate) struct StateStore {
    pub(crate) state: State,
    /// What the open transactions go back to.
    pub(super) open: Vec<State>,
    pub(crate) storage: Storage,
    /// Whether the ledger could not be read, so that what is not in it may be ours all the same.
    pub(crate) is_rebuilt: bool,
    /// The cgroups of which nothing was written yet when the daemon started: of an earlier boot.
    pub(super) unwritten: BTreeSet<CgroupPath>,
}

impl StateStore {
    pub(super) fn new(state: State, storage: Storage, is_rebuilt: bool) -> Self {
        let unwritten = state.applied.unwritten().cloned().collect();
        Self { state, open: Vec::new(), storage, is_rebuilt, unwritten }
    }

    /// Stores the state.
    pub(super) fn save(&mut self) -> Result<(), StoreError> {
        self.storage.save(&self.state)
    }

    /// Begins a change. It costs a few pointers.
    pub(super) fn begin(&mut self) {
        self.open.push(self.state.clone());
    }

    /// Ends the change that was begun last: keeps it, or goes back to what was before.
    pub(super) fn end(&mut self, is_kept: bool) {
        if let Some(before) = self.open.pop().filter(|_| !is_kept) {
            self.state = before;
        }
    }

    /// Whether anything differs from what the change that was begun last would go back to.
    pub(super) fn is_changed(&self) -> bool {
        self.open.last() != Some(&self.state)
    }

    /// All that is stored now or may be later.
    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = &mut State> {
        self.open.iter_mut().chain([&mut self.state])
    }
}

/// Where the state is kept: the ledger, attributes of the cgroups, and the file of decisions.
pub(crate) struct Storage {
    store: Store<State>,
    /// Keeps other daemons from the marks on the cgroups.
    _lock: Option<HierarchyLock>,
    texts: SerializationCache,
    backup: XattrBackup,
    pub(crate) decisions: DecisionLog,
    ledger_file: LedgerFileState,
}

/// How far the file is behind.
#[derive(Debug, Default)]
struct LedgerFileState {
    /// The save that the last look found.
    seen: Option<u64>,
    /// Looks since it was up to date.
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

    /// Writes the ledger file if nothing was stored since the last look, if that goes on for long, or if this is the
    /// last.
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
            tracing::warn!(%error, "the ledger file is not up to date; what is promised is in the journal, and nothing is lost");
        }
        *before = LedgerFileState { has_failed: result.is_err(), ..LedgerFileState::default() };
    }
}

impl Core {
    /// Stores the state.
    pub(super) fn save(&mut self) -> Result<(), StoreError> {
        self.store.save()
    }

    /// Stores a part of the state, if it changed.
    pub(crate) fn save_part<T: PartialEq>(
        &mut self,
        part: fn(&mut State) -> &mut T,
        now: T,
    ) -> Result<(), AdmissionError> {
        if *part(&mut self.store.state) == now {
            return Ok(());
        }
        let mut change = self.begin();
        *part(&mut change.store.state) = now;
        change.store()
    }
}
