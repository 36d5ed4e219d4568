//! The format's version.

/// The version of the format that is written. Older ones are read.
///
/// 1 had no generation, and its checksum is that of the ledger's text alone.
pub const VERSION: u32 = 2;
