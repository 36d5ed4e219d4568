//! What is around a ledger where it is stored: the version of the format, which save it is, and a checksum.

use std::path::Path;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::{
    disk::{Disk, unless_missing},
    error::{StoreError, VERSION},
};

/// The highest number of a save: a million saves a second for longer than there will be computers.
pub(super) const MOST_SAVES: u64 = u64::MAX / 2;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<L> {
    version: u32,
    /// How many saves there were, this one included.
    #[serde(default)]
    generation: u64,
    /// CRC-32 (IEEE) of the generation, little-endian, and the ledger's text; in hexadecimal.
    checksum: String,
    ledger: L,
}

/// The part that every version has.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// A ledger that is as it was saved.
pub(super) struct Whole<T> {
    pub(super) generation: u64,
    pub(super) ledger: T,
    pub(super) text: Vec<u8>,
}

/// What is found where a ledger is stored.
pub(super) enum Content<T> {
    Missing,
    Whole(Whole<T>),
    Damaged { text: Vec<u8>, reason: String },
}

impl<T> Content<T> {
    /// Which save it is, if it is whole.
    pub(super) fn generation(&self) -> Option<u64> {
        match self {
            Self::Whole(whole) => Some(whole.generation),
            Self::Missing | Self::Damaged { .. } => None,
        }
    }
}

/// The text that is stored of a ledger, in one line.
pub(super) fn seal(generation: u64, ledger: &RawValue) -> Result<Vec<u8>, serde_json::Error> {
    let checksum = checksum(VERSION, generation, ledger.get());
    let mut text = serde_json::to_vec(&Envelope { version: VERSION, generation, checksum, ledger })?;
    text.push(b'\n');
    Ok(text)
}

/// Reads a file that holds one.
pub(super) fn read<T: DeserializeOwned>(disk: &dyn Disk, path: &Path) -> Result<Content<T>, StoreError> {
    match unless_missing(disk.read(path)).map_err(StoreError::io(path, "read it"))? {
        Some(text) => open(text, path),
        None => Ok(Content::Missing),
    }
}

/// Takes a ledger out of its text, which was found at this path.
pub(super) fn open<T: DeserializeOwned>(text: Vec<u8>, path: &Path) -> Result<Content<T>, StoreError> {
    let Envelope { generation, ledger, .. } = match unseal(&text) {
        Ok(envelope) => envelope,
        Err(Unreadable::Newer(found)) => return Err(StoreError::Newer { path: path.to_owned(), found }),
        Err(Unreadable::Damaged(reason)) => return Ok(Content::Damaged { text, reason }),
    };
    match serde_json::from_str(ledger.get()) {
        Ok(ledger) => Ok(Content::Whole(Whole { generation, ledger, text })),
        Err(source) => Err(StoreError::Foreign { path: path.to_owned(), source }),
    }
}

enum Unreadable {
    Newer(u32),
    Damaged(String),
}

/// What is in a text, if its checksum is right.
fn unseal(text: &[u8]) -> Result<Envelope<&RawValue>, Unreadable> {
    let no_ledger = |error| Unreadable::Damaged(format!("not a ledger: {error}"));
    let Version { version } = serde_json::from_slice(text).map_err(no_ledger)?;
    if version > VERSION {
        return Err(Unreadable::Newer(version));
    }
    if version == 0 {
        return Err(Unreadable::Damaged("there is no version 0 of the format".to_owned()));
    }
    let envelope: Envelope<&RawValue> = serde_json::from_slice(text).map_err(no_ledger)?;
    if envelope.generation > MOST_SAVES {
        let reason = format!("save {}: no store has saved so often", envelope.generation);
        return Err(Unreadable::Damaged(reason));
    }
    let sum = checksum(version, envelope.generation, envelope.ledger.get());
    if sum != envelope.checksum {
        let reason = format!("its checksum is {sum}, the file says {}", envelope.checksum);
        return Err(Unreadable::Damaged(reason));
    }
    Ok(envelope)
}

/// Which save a text is, if it is whole.
pub(super) fn whole(text: &[u8]) -> Option<u64> {
    unseal(text).ok().map(|envelope| envelope.generation)
}

/// Which save a text says it is, however it goes on.
pub(super) fn claimed(text: &[u8]) -> Option<u64> {
    let text = text.strip_prefix(format!("{{\"version\":{VERSION},\"generation\":").as_bytes())?;
    let digits = text.split(|byte| *byte == b',').next()?;
    str::from_utf8(digits).ok()?.parse().ok()
}

fn checksum(version: u32, generation: u64, ledger: &str) -> String {
    let mut hasher = crc32fast::Hasher::new();
    if version > 1 {
        hasher.update(&generation.to_le_bytes());
    }
    hasher.update(ledger.as_bytes());
    format!("crc32:{:08x}", hasher.finalize())
}
