//! The envelope of a stored ledger: the version of the format, the number of the save (generation), and a checksum.

use std::path::Path;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::{
    disk::{FileSystem, missing_as_none},
    error::{StoreError, VERSION},
};

/// The highest generation that a save may have. At a million saves per second, it lasts for 290,000 years.
pub(super) const MAX_GENERATION: u64 = u64::MAX / 2;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<L> {
    version: u32,
    /// The number of saves, including this one.
    #[serde(default)]
    generation: u64,
    /// The CRC-32 (IEEE), in hexadecimal, of the generation (little-endian) and the ledger's text.
    checksum: String,
    ledger: L,
}

/// The field that all versions have.
#[derive(Deserialize)]
struct FormatVersion {
    version: u32,
}

/// An intact ledger.
pub(super) struct IntactLedger<T> {
    pub(super) generation: u64,
    pub(super) ledger: T,
    pub(super) text: Vec<u8>,
}

/// The content of a place where a ledger is stored.
pub(super) enum Content<T> {
    Missing,
    Intact(IntactLedger<T>),
    Damaged { text: Vec<u8>, reason: String },
}

impl<T> Content<T> {
    /// Returns the generation of an intact ledger.
    pub(super) fn generation(&self) -> Option<u64> {
        match self {
            Self::Intact(intact) => Some(intact.generation),
            Self::Missing | Self::Damaged { .. } => None,
        }
    }
}

/// Returns the stored text of a ledger, in one line.
pub(super) fn encode(generation: u64, ledger: &RawValue) -> Result<Vec<u8>, serde_json::Error> {
    let checksum = checksum(VERSION, generation, ledger.get());
    let mut text = serde_json::to_vec(&Envelope { version: VERSION, generation, checksum, ledger })?;
    text.push(b'\n');
    Ok(text)
}

/// Reads a file that contains an envelope.
pub(super) fn read<T: DeserializeOwned>(
    disk: &dyn FileSystem,
    path: &Path,
) -> Result<Content<T>, StoreError> {
    match missing_as_none(disk.read(path)).map_err(StoreError::io(path, "read it"))? {
        Some(text) => decode(text, path),
        None => Ok(Content::Missing),
    }
}

/// Decodes an envelope. `path` is used in errors.
pub(super) fn decode<T: DeserializeOwned>(text: Vec<u8>, path: &Path) -> Result<Content<T>, StoreError> {
    let Envelope { generation, ledger, .. } = match decode_envelope(&text) {
        Ok(envelope) => envelope,
        Err(EnvelopeError::Newer(found)) => return Err(StoreError::Newer { path: path.to_owned(), found }),
        Err(EnvelopeError::Damaged(reason)) => return Ok(Content::Damaged { text, reason }),
    };
    match serde_json::from_str(ledger.get()) {
        Ok(ledger) => Ok(Content::Intact(IntactLedger { generation, ledger, text })),
        Err(source) => Err(StoreError::Foreign { path: path.to_owned(), source }),
    }
}

enum EnvelopeError {
    Newer(u32),
    Damaged(String),
}

/// Decodes the envelope and checks its checksum.
fn decode_envelope(text: &[u8]) -> Result<Envelope<&RawValue>, EnvelopeError> {
    let no_ledger = |error| EnvelopeError::Damaged(format!("not a ledger: {error}"));
    let FormatVersion { version } = serde_json::from_slice(text).map_err(no_ledger)?;
    if version > VERSION {
        return Err(EnvelopeError::Newer(version));
    }
    if version == 0 {
        return Err(EnvelopeError::Damaged("there is no version 0 of the format".to_owned()));
    }
    let envelope: Envelope<&RawValue> = serde_json::from_slice(text).map_err(no_ledger)?;
    if envelope.generation > MAX_GENERATION {
        let reason = format!("its save number {} is higher than any store reaches", envelope.generation);
        return Err(EnvelopeError::Damaged(reason));
    }
    let sum = checksum(version, envelope.generation, envelope.ledger.get());
    if sum != envelope.checksum {
        let reason = format!("its checksum is {sum}, the file says {}", envelope.checksum);
        return Err(EnvelopeError::Damaged(reason));
    }
    Ok(envelope)
}

/// Returns the generation of a text if it is intact.
pub(super) fn intact_generation(text: &[u8]) -> Option<u64> {
    decode_envelope(text).ok().map(|envelope| envelope.generation)
}

/// Returns the generation in the beginning of a text, which need not be intact.
pub(super) fn claimed_generation(text: &[u8]) -> Option<u64> {
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
