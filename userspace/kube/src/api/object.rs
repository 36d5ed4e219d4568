//! Objects of the API server, reduced to the needed fields while they are read.
//!
//! # Problem
//! The author of an object chooses the lists in it, and texts such as the kind of an owner. A list of numbers takes sixteen times the size
//! of its text as a tree of values, and an object has up to 1.5 MiB.
//!
//! # Algorithm
//! An object is parsed from its text, one after the other: the values of unknown fields are skipped, and lists and texts are cut. If one cannot be
//! parsed, the others of the list are not affected.

use std::{fmt, marker::PhantomData};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, SeqAccess, Visitor},
};
use serde_json::value::RawValue;

/// The needed fields of a kind of objects.
pub(crate) trait Fields: Clone + fmt::Debug + Sized {
    type Kind: k8s_openapi::Resource;

    /// Returns the fields in the JSON text of an object, or the problem.
    fn parse(text: &str) -> Result<Self, String>;
}

/// An object of the API server.
#[derive(Clone, Debug)]
pub(crate) struct ApiObject<T> {
    /// Name, namespace, UID and version.
    pub(crate) identity: ObjectMeta,
    /// The needed fields, or the reason why they cannot be parsed.
    pub(crate) fields: Result<T, String>,
}

#[derive(Default, Deserialize)]
struct Object {
    #[serde(default)]
    metadata: Identity,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Identity {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
}

impl<'de, T: Fields> Deserialize<'de> for ApiObject<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        Ok(Self::parse(text.get()))
    }
}

impl<T: Fields> ApiObject<T> {
    /// Parses the JSON text of an object.
    pub(crate) fn parse(text: &str) -> Self {
        let Object { metadata } = serde_json::from_str(text).unwrap_or_default();
        let Identity { name, namespace, uid, resource_version } = metadata;
        let identity = ObjectMeta { name, namespace, uid, resource_version, ..ObjectMeta::default() };
        Self { identity, fields: T::parse(text) }
    }

    /// Returns an object that cannot be parsed, with the reason.
    pub(crate) fn unreadable(reason: String) -> Self {
        Self { identity: ObjectMeta::default(), fields: Err(reason) }
    }
}

impl<T: Fields> k8s_openapi::Resource for ApiObject<T> {
    const API_VERSION: &'static str = T::Kind::API_VERSION;
    const GROUP: &'static str = T::Kind::GROUP;
    const KIND: &'static str = T::Kind::KIND;
    const VERSION: &'static str = T::Kind::VERSION;
    const URL_PATH_SEGMENT: &'static str = T::Kind::URL_PATH_SEGMENT;
    type Scope = <T::Kind as k8s_openapi::Resource>::Scope;
}

impl<T: Fields> k8s_openapi::Metadata for ApiObject<T> {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.identity
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.identity
    }
}

/// The first `N` entries of a list; the other ones are only counted. No entries if the value is null.
#[derive(Clone, Debug)]
pub(crate) struct AtMost<T, const N: usize> {
    pub(crate) items: Vec<T>,
    /// The number of entries in the text.
    pub(crate) count: usize,
}

impl<T, const N: usize> Default for AtMost<T, N> {
    fn default() -> Self {
        Self { items: Vec::new(), count: 0 }
    }
}

impl<T, const N: usize> IntoIterator for AtMost<T, N> {
    type IntoIter = std::vec::IntoIter<T>;
    type Item = T;

    fn into_iter(self) -> Self::IntoIter {
        self.items.into_iter()
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for AtMost<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListVisitor(PhantomData))
    }
}

struct ListVisitor<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for ListVisitor<T, N> {
    type Value = AtMost<T, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(AtMost::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut items = Vec::new();
        while items.len() < N {
            match list.next_element()? {
                Some(item) => items.push(item),
                None => return Ok(AtMost { count: items.len(), items }),
            }
        }
        let mut count = items.len();
        while list.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(AtMost { items, count })
    }
}

/// The first [`ShortText::MAX_BYTES`] of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShortText(pub(crate) String);

impl ShortText {
    /// Maximum length of the name of an object.
    const MAX_BYTES: usize = 253;
}

impl<'de> Deserialize<'de> for ShortText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl Visitor<'_> for TextVisitor {
    type Value = ShortText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E>(self, text: &str) -> Result<ShortText, E> {
        let end = text.floor_char_boundary(ShortText::MAX_BYTES);
        Ok(ShortText(text.get(..end).unwrap_or_default().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut() {
        let read =
            |text: &str| serde_json::from_str::<AtMost<u8, 2>>(text).map(|list| (list.items, list.count));
        assert_eq!(read("null").unwrap(), (vec![], 0));
        assert_eq!(read("[1]").unwrap(), (vec![1], 1));
        assert_eq!(read("[1, 2]").unwrap(), (vec![1, 2], 2));
        assert_eq!(read(r#"[1, 2, "x", {}]"#).unwrap(), (vec![1, 2], 4));
        assert!(read(r#"[1, "x"]"#).is_err() && read("{}").is_err() && read("[1, 2").is_err());
    }

    #[test]
    fn texts_are_cut() {
        let read = |text: &str| serde_json::from_str::<ShortText>(text).map(|text| text.0);
        assert_eq!(read(r#""a\nb""#).unwrap(), "a\nb");
        assert_eq!(read(&format!("\"{}\"", "x".repeat(300))).unwrap(), "x".repeat(253));
        assert_eq!(read(&format!("\"{}\"", "ä".repeat(300))).unwrap(), "ä".repeat(126));
        assert!(read("1").is_err() && read("null").is_err());
    }
}
