//! Records of values of the host that the daemon has written, and the writes.

use std::{
    collections::BTreeMap,
    fs::OpenOptions,
    io::{self, Write as _},
    path::Path,
};

use serde::{Deserialize, Serialize};

/// Original and written value of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WrittenValue<V> {
    /// Original value.
    pub found: V,
    pub written: V,
    /// Another value that the file may hold although no other program wrote it: the value before the write, if the
    /// daemon died before it, or the original value, if the file was reset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<V>,
    /// True if another program wrote the value since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_given_up: bool,
}

impl<V: PartialEq> WrittenValue<V> {
    /// Returns whether the daemon left this value.
    pub fn holds(&self, value: &V) -> bool {
        self.written == *value || self.before.as_ref() == Some(value)
    }
}

/// Restores the record that a key had in `before`, because its file was not written.
pub fn revert<K: Ord + Clone, R: Clone>(held: &mut BTreeMap<K, R>, before: &BTreeMap<K, R>, key: &K) {
    match before.get(key) {
        Some(of) => drop(held.insert(key.clone(), of.clone())),
        None => drop(held.remove(key)),
    }
}

/// Replaces the content of a file, which must exist.
pub(crate) fn overwrite(path: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).truncate(true).open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;

    use crate::{interrupts::MovedAffinities, power::PowerRecords, weights::WeightRecords};

    fn round_trip<T: DeserializeOwned + serde::Serialize>(text: &str) -> String {
        serde_json::to_string(&serde_json::from_str::<T>(text).unwrap()).unwrap()
    }

    #[test]
    fn stored_records_keep_their_form() {
        for text in [
            r#"{"f":{"knob":"governor","cpus":"1","found":"a","written":"b"}}"#,
            r#"{"f":{"knob":"governor","cpus":"1","found":"a","written":"b","before":"c","isGivenUp":true}}"#,
        ] {
            assert_eq!(round_trip::<PowerRecords>(text), text);
        }
        for text in [
            r#"{"nodes":{"0":{"found":1,"written":3}}}"#,
            r#"{"nodes":{"0":{"found":1,"written":3,"before":2,"isGivenUp":true}}}"#,
        ] {
            assert_eq!(round_trip::<WeightRecords>(text), text);
        }
        for text in [
            r#"{"affinities":{"f":{"name":"n","found":"0-3","written":"0-1"}}}"#,
            r#"{"affinities":{"f":{"name":"n","found":"0-3","written":"0-1","before":"0-2"}}}"#,
        ] {
            assert_eq!(round_trip::<MovedAffinities>(text), text);
        }
    }
}
