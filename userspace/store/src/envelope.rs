//! What is around a ledger where it is stored: the version of the format, which save it is, and a checksum.

use std::{fs, io, path::Path};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::error::{StoreError, VERSION};

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
}

/// What is found where a ledger is stored.
pub(super) enum Content<T> {
    Missing,
    Whole(Whole<T>),
    Damaged(String),
}

/// The text that is stored of a ledger, in one line.
pub(super) fn seal(generation: u64, ledger: &RawValue) -> Result<Vec<u8>, serde_json::Error> {
    let checksum = checksum(VERSION, generation, ledger.get());
    let mut text = serde_json::to_vec(&Envelope { version: VERSION, generation, checksum, ledger })?;
    text.push(b'\n');
    Ok(text)
}

/// Reads a file that holds one.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Result<Content<T>, StoreError> {
    match fs::read(path) {
        Ok(text) => open(&text, path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Content::Missing),
        Err(error) => Err(StoreError::io(path, "read it")(error)),
    }
}

/// Takes a ledger out of its text, which was found at this path.
pub(super) fn open<T: DeserializeOwned>(text: &[u8], path: &Path) -> Result<Content<T>, StoreError> {
    let damaged = |what: String| Ok(Content::Damaged(what));
    let Version { version } = match serde_json::from_slice(text) {
        Ok(version) => version,
        Err(error) => return damaged(format!("not a ledger: {error}")),
    };
    if version > VERSION {
        return Err(StoreError::Newer { path: path.to_owned(), found: version });
    }
    if version == 0 {
        return damaged("there is no version 0 of the format".to_owned());
    }
    let Envelope { generation, checksum: said, ledger, .. }: Envelope<&RawValue> =
        match serde_json::from_slice(text) {
            Ok(envelope) => envelope,
            Err(error) => return damaged(format!("not a ledger: {error}")),
        };
    let sum = checksum(version, generation, ledger.get());
    if sum != said {
        return damaged(format!("its checksum is {sum}, the file says {said}"));
    }
    match serde_json::from_str(ledger.get()) {
        Ok(ledger) => Ok(Content::Whole(Whole { generation, ledger })),
        Err(error) => damaged(format!("whole, but not a ledger of this program: {error}")),
    }
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
