//! The ledger store: the only durable state of the daemon, safe against a crash at any instant.
//!
//! # Problem
//! Guarantees must survive a crash, a full disk and a damaged file. A guarantee is stored before any knob is written
//! for it, so a save must be durable when it returns, or must have changed nothing. The workload waits for the save:
//! writing a new file and renaming it would cost two commits of the file system's journal.
//!
//! # Files
//! All are in one directory:
//! - `ledger.journal`: the last two saves, each a complete ledger.
//! - `ledger.json`: a copy of the last save, written when there is time.
//! - `ledger.json.1`: the previous copy.
//! - `*.new`: files that are being written.
//! - `ledger.json.damaged-N`: damaged files and slots, set aside.
//! - `ledger.lock`: locked as long as the store is open.
//!
//! # Algorithm
//! - Save: overwrite the older of the two saves in the journal, in space that the file already has, and sync the data.
//!   This needs no commit. If the journal has no room, it is first replaced by a larger one that contains the last
//!   save.
//! - Write out: write and sync `ledger.json.new`; hard-link `ledger.json` to `ledger.json.1`; rename `ledger.json.new`
//!   to `ledger.json`; sync the directory.
//! - Open: use the intact ledger with the highest generation, and sync everything that was found.
//!
//! # Invariants
//! - After the first save, an intact ledger exists at every instant: the old one or the new one.
//! - A failed save is durably withdrawn before the next one.
//! - Damaged data is never deleted or overwritten before it is set aside, except for a save that a crash interrupted.
//! - A save with a generation higher than this process's last one is never overwritten.
//! - A file of a newer version, or an intact file that cannot be decoded, is not changed.
//!
//! Tests check these against a model of a disk that loses everything that was not synced.
//!
//! The store only knows how to serialize its content.

#![forbid(unsafe_code)]

mod disk;
mod envelope;
mod error;
pub mod fault;
mod journal;
mod store;

#[cfg(test)]
mod tests;

/// Returns the stored text of a ledger with this generation.
#[cfg(feature = "testing")]
pub fn encode_save(generation: u64, ledger: &serde_json::value::RawValue) -> Result<Vec<u8>, StoreError> {
    envelope::encode(generation, ledger).map_err(StoreError::Serialize)
}

pub use self::{
    error::StoreError,
    store::{LoadedLedger, SetAsideFile, Store},
};
