//! Call chains as a profile for `pprof`: `proto/profile.proto` of github.com/google/pprof, compressed by gzip.

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    time::{SystemTime, UNIX_EPOCH},
};

use flate2::{Compression, write::GzEncoder};
use numaward_api::{StackKind, Stacks};
use prost::Message as _;

use crate::text::clean;

#[derive(Clone, PartialEq, prost::Message)]
struct Profile {
    #[prost(message, repeated, tag = "1")]
    sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    /// The strings that the other messages name by index. The first is empty.
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    time_nanos: i64,
    #[prost(int64, repeated, tag = "13")]
    comment: Vec<i64>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ValueType {
    #[prost(int64, tag = "1")]
    r#type: i64,
    #[prost(int64, tag = "2")]
    unit: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Sample {
    /// The locations, innermost first.
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
    #[prost(message, repeated, tag = "3")]
    label: Vec<Label>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Label {
    #[prost(int64, tag = "1")]
    key: i64,
    #[prost(int64, tag = "2")]
    str: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
}

/// The string table of a profile.
struct Strings {
    texts: Vec<String>,
    indexes: BTreeMap<String, i64>,
}

impl Strings {
    fn new() -> Self {
        Self { texts: vec![String::new()], indexes: BTreeMap::from([(String::new(), 0)]) }
    }

    /// Returns the index of a text, without the characters that control a terminal.
    fn index(&mut self, text: &str) -> i64 {
        let text = clean(text).into_owned();
        let Self { texts, indexes } = self;
        *indexes.entry(text).or_insert_with_key(|text| {
            texts.push(text.clone());
            i64::try_from(texts.len() - 1).unwrap_or_default()
        })
    }
}

/// Returns the compressed profile of chains of one kind. The value of a sample is its bytes; its label `numa_node` is the
/// node of the memory. The outermost function of each is the name of the process.
pub(crate) fn encode(stacks: &Stacks, kind: StackKind) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(&profile(stacks, kind, SystemTime::now()).encode_to_vec())?;
    encoder.finish()
}

fn profile(stacks: &Stacks, kind: StackKind, time: SystemTime) -> Profile {
    let mut strings = Strings::new();
    let name = match kind {
        StackKind::Allocations => "remote_allocations",
        StackKind::Accesses => "remote_accesses",
    };
    let sample_type = vec![ValueType { r#type: strings.index(name), unit: strings.index("bytes") }];
    let node_key = strings.index("numa_node");
    // Each function has one location, with the same number. Numbers begin with 1.
    let mut functions = BTreeMap::new();
    let mut sample = Vec::new();
    for stack in &stacks.stacks {
        let mut location = |frame: &String| {
            let next = u64::try_from(functions.len()).unwrap_or(u64::MAX).saturating_add(1);
            *functions.entry(strings.index(frame)).or_insert(next)
        };
        let location_id = stack.frames.iter().rev().map(&mut location).collect();
        let label = |node: u32| Label { key: node_key, str: strings.index(&node.to_string()) };
        let value = vec![i64::try_from(stack.bytes).unwrap_or(i64::MAX)];
        sample.push(Sample { location_id, value, label: stack.node.map(label).into_iter().collect() });
    }
    let location =
        functions.values().map(|id| Location { id: *id, line: vec![Line { function_id: *id }] }).collect();
    let function = functions.iter().map(|(name, id)| Function { id: *id, name: *name }).collect();
    let comment = stacks.notes.iter().map(|note| strings.index(note)).collect();
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let time_nanos = i64::try_from(since.as_nanos()).unwrap_or_default();
    Profile { sample_type, sample, location, function, string_table: strings.texts, time_nanos, comment }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;
    use numaward_api::CallStack;

    use super::*;

    #[test]
    fn profile_has_each_chain_innermost_first() {
        let stack = |node, bytes, frames: &[&str]| CallStack {
            kind: StackKind::Allocations,
            node,
            bytes,
            frames: frames.iter().map(ToString::to_string).collect(),
        };
        let stacks = Stacks {
            notes: vec!["some names are missing".to_owned()],
            stacks: vec![
                stack(Some(1), 4096, &["server", "main", "fill"]),
                stack(None, u64::MAX, &["server", "main", "main", "\u{1b}[31mred"]),
            ],
            ..Stacks::default()
        };
        let mut bytes = Vec::new();
        GzDecoder::new(&*encode(&stacks, StackKind::Allocations).unwrap()).read_to_end(&mut bytes).unwrap();
        let profile = Profile::decode(&*bytes).unwrap();
        assert_eq!(profile.string_table[0], "");
        assert!(profile.time_nanos > 0);
        let text = |index: i64| profile.string_table[usize::try_from(index).unwrap()].as_str();
        let [ValueType { r#type, unit }] = profile.sample_type[..] else { panic!() };
        assert_eq!((text(r#type), text(unit)), ("remote_allocations", "bytes"));
        let names = |sample: &Sample| -> Vec<&str> {
            let function = |location: &u64| {
                let location = profile.location.iter().find(|known| known.id == *location).unwrap();
                let function = profile.function.iter().find(|known| known.id == location.line[0].function_id);
                text(function.unwrap().name)
            };
            sample.location_id.iter().map(function).collect()
        };
        let labels = |sample: &Sample| -> Vec<(&str, &str)> {
            sample.label.iter().map(|label| (text(label.key), text(label.str))).collect()
        };
        let [first, second] = &profile.sample[..] else { panic!() };
        assert_eq!((names(first), &*first.value), (vec!["fill", "main", "server"], &[4096][..]));
        assert_eq!(labels(first), [("numa_node", "1")]);
        let [innermost, rest @ ..] = &names(second)[..] else { panic!() };
        assert_eq!((rest, &*second.value), (&["main", "main", "server"][..], &[i64::MAX][..]));
        assert!(!innermost.contains('\u{1b}') && innermost.contains("red"), "{innermost}");
        assert!(labels(second).is_empty());
        assert_eq!(
            profile.comment.iter().map(|note| text(*note)).collect::<Vec<_>>(),
            ["some names are missing"]
        );
    }
}
