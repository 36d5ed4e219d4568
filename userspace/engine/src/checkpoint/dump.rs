//! The text over which a checkpoint's checksum is taken.
//!
//! It is what the Go library *spew* prints for `%#v`: fields of structures carry their type in parentheses,
//! values of maps and elements of lists do not; a pointer below the top is `<*>` and what it points to; maps are
//! sorted by their keys, numbers as numbers and texts as bytes; separators are single spaces.
//!
//! The checksum is the 32-bit FNV-1a hash of that text.

use std::fmt::{Display, Write as _};

/// Writes such a text.
#[derive(Default)]
pub(super) struct Dump {
    text: String,
}

impl Dump {
    /// Begins with a pointer to a structure of the given type, without its fields.
    pub(super) fn pointer_to(type_name: &str) -> Self {
        Self { text: format!("(*{type_name})") }
    }

    /// A value without its type.
    pub(super) fn value(&mut self, value: impl Display) {
        // Writing to a String does not fail.
        let _ = write!(self.text, "{value}");
    }

    /// A pointer within the data.
    pub(super) fn inner_pointer(&mut self) {
        self.text.push_str("<*>");
    }

    /// `{a:… b:…}`
    pub(super) fn fields(&mut self, fields: impl FnOnce(&mut Fields<'_>)) {
        self.text.push('{');
        fields(&mut Fields { dump: self, first: true });
        self.text.push('}');
    }

    /// `map[key:… key:…]`
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

    /// `[… …]`
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

    /// The whole text.
    pub(super) fn text(self) -> String {
        self.text
    }
}

/// Writes the fields of a structure.
pub(super) struct Fields<'a> {
    dump: &'a mut Dump,
    first: bool,
}

impl Fields<'_> {
    /// `name:(type)value`
    pub(super) fn field(&mut self, name: &str, type_name: &str, value: impl FnOnce(&mut Dump)) {
        if !std::mem::take(&mut self.first) {
            self.dump.text.push(' ');
        }
        self.dump.value(format_args!("{name}:({type_name})"));
        value(self.dump);
    }
}

/// The checksum of a text.
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
