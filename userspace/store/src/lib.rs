//! The ledger store: the only durable state, safe against a crash at any instant.
//!
//! Problem: what is promised must survive a crash, a full disk and a damaged file; a promise is stored before any
//! knob is written for it, so a save has to be durable when it returns, or have changed nothing. And a workload waits
//! for it: a file that is written anew and renamed costs two commits of the file system's own journal.
//!
//! Files, in one directory: `ledger.journal`, the last two saves, each a whole ledger; `ledger.json`, the ledger as it
//! was when last there was time to write it out; `ledger.json.1`, the one before; `*.new`, being written;
//! `ledger.json.damaged-N`, set aside; `ledger.lock`, held as long as the store is open.
//!
//! Algorithm. A save overwrites the older of the two in the journal, in space that is the journal's already, and syncs
//! its data: no commit. A journal that has no room is replaced by one that holds the last save, before anything new goes
//! into it. To write out: write and sync `ledger.json.new`; make `ledger.json.1` another name of `ledger.json`; rename
//! `ledger.json.new` to `ledger.json`; sync the directory. Opening takes the ledger with the highest generation that is
//! whole, and makes durable what it found.
//!
//! Invariants: once saved, there is a whole ledger at every instant, the old one or the new. A save that failed is
//! withdrawn, durably, before the next one. Nothing that cannot be read is deleted, or written over before it is kept
//! elsewhere, but a save that a crash cut off; nor is a save that is newer than ours. A file of a newer version, or that
//! is whole and not understood, is not touched. Tests hold this against a disk that loses what was not synced.
//!
//! The store knows nothing of what it holds but how to serialize it.

#![forbid(unsafe_code)]

mod disk;
mod envelope;
mod error;
pub mod fault;
mod journal;
mod store;

#[cfg(test)]
mod tests;

/// What is stored of a ledger with the save of this number.
#[cfg(feature = "testing")]
pub fn encode_save(generation: u64, ledger: &serde_json::value::RawValue) -> Result<Vec<u8>, StoreError> {
    envelope::seal(generation, ledger).map_err(StoreError::Serialize)
}

pub use self::{
    error::StoreError,
    store::{LoadedLedger, SetAsideFile, Store},
};
