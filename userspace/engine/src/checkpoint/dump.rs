//! The text that a checkpoint's checksum covers.
//!
//! The kubelet dumps the data with the Go library *spew* in the format `%#v` and hashes the dump:
//!
//! - A field of a structure is followed by its type in parentheses; a map value or list element is not.
//! - A pointer below the top level is written as `<*>` and the value.
//! - Maps are sorted by key: numbers by value, text by bytes.
//! - Separators are single spaces.
//!
//! The checksum is the 32-bit FNV-1a hash of that text.

use std::fmt::{Display, Write as _};

/// Writer of a dump.
#[derive(Default)]
pub(super) struct Dump {
    text: String,
}

impl Dump {
    /// Starts a dump with a pointer to a structure of this type; the fields follow.
    pub(super) fn pointer_to(type_name: &str) -> Self {
        Self { text: format!("(*{type_name})") }
    }

    /// Writes a value without its type.
    pub(super) fn value(&mut self, value: impl Display) {
        // Writing to a String does not fail.
        let _ = write!(self.text, "{value}");
    }

    /// Writes the mark of a pointer below the top level.
    pub(super) fn inner_pointer(&mut self) {
        self.text.push_str("<*>");
    }

    /// Writes `{a:… b:…}`.
    pub(super) fn fields(&mut self, fields: impl FnOnce(&mut Fields<'_>)) {
        self.text.push('{');
        fields(&mut Fields { dump: self, first: true });
        self.text.push('}');
    }

    /// Writes `map[key:… key:…]`.
    pub(super) fn map<K: Display, V>(
        &mut self,
        entries: impl IntoIterator<Item = (K, V)>,
        mut value: impl FnMut(&mut Self, V),
    ) {
        self.text.push_str("map[");
        for (index, (key, entry)) in entries.into_iter().enumerate() {
            if index > 0 {
                self.text.push(' ');
            }
            self.value(key);
            self.text.push(':');
            value(self, entry);
        }
        self.text.push(']');
    }

    /// Writes `[… …]`.
    pub(super) fn list<V>(
        &mut self,
        items: impl IntoIterator<Item = V>,
        mut value: impl FnMut(&mut Self, V),
    ) {
        self.text.push('[');
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.text.push(' ');
            }
            value(self, item);
        }
        self.text.push(']');
    }

    pub(super) fn text(self) -> String {
        self.text
    }
}

/// Writer of the fields of a structure.
pub(super) struct Fields<'a> {
    dump: &'a mut Dump,
    first: bool,
}

impl Fields<'_> {
    /// Writes `name:(type)value`.
    pub(super) fn field(&mut self, name: &str, type_name: &str, value: impl FnOnce(&mut Dump)) {
        if !std::mem::take(&mut self.first) {
            self.dump.text.push(' ');
        }
        self.dump.value(format_args!("{name}:({type_name})"));
        value(self.dump);
    }
}

/// Returns the FNV-1a hash of a dump.
pub(super) fn checksum(text: &str) -> u64 {
    const OFFSET: u32 = 0x811c_9dc5;
    const PRIME: u32 = 0x0100_0193;
    u64::from(text.bytes().fold(OFFSET, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(PRIME)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_matches_known_values() {
        assert_eq!(checksum(""), 0x811c_9dc5);
        assert_eq!(checksum("a"), 0xe40c_292c);
        assert_eq!(checksum("foobar"), 0xbf9c_f968);
    }
}
