//! Lists of objects, read item by item.
//!
//! # Problem
//! The objects of a page can have 9 MB each as JSON, and the page has no more in common than their sum. Pages that are limited in bytes have
//! one object each, which takes a request for each object of the list.
//!
//! # Algorithm
//! Each item is parsed as soon as its text is complete, and the text is dropped. So a page of any size takes the memory of its largest
//! object. The text around the items is a list without items, and is parsed at the end.

use std::pin::pin;

use futures_util::AsyncBufReadExt as _;
use k8s_openapi::{Resource as _, apimachinery::pkg::apis::meta::v1::ListMeta};
use kube::{Client, api::ListParams, core};
use serde::Deserialize;
use tokio::time::timeout;

use super::{
    REQUEST_TIMEOUT,
    object::{ApiObject, Fields},
};

/// Maximum size of an object in bytes. An object of the API server has 1.5 MiB at most, and up to six times as much as JSON.
pub(super) const MAX_OBJECT_BYTES: usize = 16 << 20;
/// Maximum size of the text around the items in bytes. The rest is ignored, so the text cannot be parsed.
const MAX_LIST_BYTES: usize = 64 << 10;
/// Number of open brackets between two items: that of the list, and that of the items.
const ITEMS_DEPTH: usize = 2;

/// Extension of a request whose answer is read while it is received.
#[derive(Clone, Copy)]
pub(super) struct AnswerStream;

#[derive(Deserialize)]
struct List {
    metadata: ListMeta,
}

/// Requests a page of the objects of a kind in all namespaces, and passes each object. Returns the metadata of the page.
pub(super) async fn read_page<T: Fields>(
    client: &Client,
    page: &ListParams,
    on_object: impl FnMut(ApiObject<T>),
) -> kube::Result<ListMeta> {
    let path = <ApiObject<T> as kube::Resource>::url_path(&(), None);
    let mut request = core::Request::new(path).list(page).map_err(kube::Error::BuildRequest)?;
    request.extensions_mut().insert(AnswerStream);
    let mut body = pin!(client.request_stream(request).await?);
    let read = async {
        let (mut splitter, mut on_object) = (ItemSplitter::default(), on_object);
        loop {
            let text = body.fill_buf().await.map_err(kube::Error::ReadEvents)?;
            if text.is_empty() {
                let list: List = serde_json::from_slice(&splitter.list).map_err(kube::Error::SerdeError)?;
                return Ok(list.metadata);
            }
            splitter.read(text, |item| on_object(object(item)));
            let length = text.len();
            body.consume_unpin(length);
        }
    };
    timeout(REQUEST_TIMEOUT, read).await.map_err(|elapsed| kube::Error::Service(elapsed.into()))?
}

fn object<T: Fields>(item: &[u8]) -> ApiObject<T> {
    if item.len() > MAX_OBJECT_BYTES {
        let kind = <ApiObject<T>>::KIND;
        return ApiObject::unreadable(format!("a {kind} of more than {} MiB", MAX_OBJECT_BYTES >> 20));
    }
    match str::from_utf8(item) {
        Ok(text) => ApiObject::parse(text),
        Err(error) => ApiObject::unreadable(error.to_string()),
    }
}

/// Splitter of the text of a list, which is read in parts.
#[derive(Default)]
struct ItemSplitter {
    /// The text apart from the items, and from the commas between them.
    list: Vec<u8>,
    /// The text of the item in progress.
    item: Vec<u8>,
    /// Number of open brackets.
    depth: usize,
    is_in_items: bool,
    is_in_string: bool,
    /// True after a backslash in a string.
    is_escaped: bool,
}

impl ItemSplitter {
    /// Reads the next part of the text, and passes each complete item. One that is too large is cut.
    fn read(&mut self, text: &[u8], mut on_item: impl FnMut(&[u8])) {
        for &byte in text {
            let is_between = self.is_in_items && self.depth == ITEMS_DEPTH && !self.is_in_string;
            if is_between && matches!(byte, b',' | b']') {
                if !self.item.trim_ascii().is_empty() {
                    on_item(&self.item);
                }
                self.item.clear();
                if byte == b',' {
                    continue;
                }
                self.is_in_items = false;
            }
            let (target, max) = if self.is_in_items {
                (&mut self.item, MAX_OBJECT_BYTES + 1)
            } else {
                (&mut self.list, MAX_LIST_BYTES)
            };
            if target.len() < max {
                target.push(byte);
            }
            match byte {
                _ if self.is_in_string => {
                    self.is_in_string = self.is_escaped || byte != b'"';
                    self.is_escaped = !self.is_escaped && byte == b'\\';
                }
                b'"' => self.is_in_string = true,
                b'{' | b'[' => {
                    self.depth += 1;
                    self.is_in_items |= self.depth == ITEMS_DEPTH && opens_items(&self.list);
                }
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
    }
}

/// Returns true if the text ends with the start of the items of a list.
fn opens_items(list: &[u8]) -> bool {
    let key = list.strip_suffix(b"[").and_then(|text| text.trim_ascii_end().strip_suffix(b":"));
    key.is_some_and(|text| text.trim_ascii_end().ends_with(b"\"items\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Splits a text that is received in parts of this size. Returns the items, and the text around them.
    fn split(text: &str, part: usize) -> (Vec<String>, String) {
        let (mut splitter, mut items) = (ItemSplitter::default(), Vec::new());
        for part in text.as_bytes().chunks(part) {
            splitter.read(part, |item| items.push(String::from_utf8(item.to_vec()).unwrap()));
        }
        (items, String::from_utf8(splitter.list).unwrap())
    }

    #[test]
    fn lists_are_split_at_items() {
        let cases: [(&str, &[&str], &str); 7] = [
            (
                r#"{"items":[{"a":1},{"b":[2,"]"]}],"metadata":{}}"#,
                &[r#"{"a":1}"#, r#"{"b":[2,"]"]}"#],
                r#"{"items":[],"metadata":{}}"#,
            ),
            (
                r#"{"metadata":{"x":["items"]},"items":[{"items":[{}]}]}"#,
                &[r#"{"items":[{}]}"#],
                r#"{"metadata":{"x":["items"]},"items":[]}"#,
            ),
            (r#"{"items":[{"t":"\\\"},{[\\"}, {}]}"#, &[r#"{"t":"\\\"},{[\\"}"#, " {}"], r#"{"items":[]}"#),
            ("{ \"items\" : [ null , \"a,]b\" ] }", &[" null ", " \"a,]b\" "], "{ \"items\" : [] }"),
            (r#"{"items":null,"other":[{},{}]}"#, &[], r#"{"items":null,"other":[{},{}]}"#),
            (r#"{"items":[ ]}"#, &[], r#"{"items":[]}"#),
            (r#"{"items":[{}"#, &[], r#"{"items":["#),
        ];
        for (text, items, around) in cases {
            for part in 1..=text.len() {
                assert_eq!(
                    split(text, part),
                    (items.iter().map(ToString::to_string).collect(), around.to_owned()),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn large_texts_are_cut() {
        let item = "x".repeat(MAX_OBJECT_BYTES + 10);
        let (items, _) = split(&format!(r#"{{"items":["{item}",{{}}]}}"#), 8192);
        assert_eq!(items.iter().map(String::len).collect::<Vec<_>>(), [MAX_OBJECT_BYTES + 1, 2]);
        let (_, list) = split(&"[".repeat(MAX_LIST_BYTES + 10), 8192);
        assert_eq!(list.len(), MAX_LIST_BYTES);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_split(text in r#"[{}\[\]",:\\a i]{0,64}|(\{"items":\[)?[{}\[\]",\\a]{0,32}"#) {
            let whole = split(&text, text.len().max(1));
            proptest::prop_assert_eq!(&split(&text, 1), &whole);
        }

        #[test]
        fn valid_lists_are_split(items in proptest::collection::vec("[^\u{0}]{0,8}", 0..5)) {
            let list = serde_json::json!({"items": items.iter().map(|text| serde_json::json!({"t": text})).collect::<Vec<_>>()});
            let (found, around) = split(&list.to_string(), 3);
            let found = found.iter().map(|item| serde_json::from_str::<serde_json::Value>(item).unwrap()["t"].as_str().unwrap().to_owned());
            proptest::prop_assert_eq!(found.collect::<Vec<_>>(), items);
            proptest::prop_assert_eq!(around, r#"{"items":[]}"#);
        }
    }
}
