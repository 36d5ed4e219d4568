//! The configuration as a tree with the source of each value.
//!
//! The YAML file, the variables and the flags are merged into one tree before they are interpreted, so that each later
//! error can name a line and column, a variable or a flag. YAML is parsed by the core schema of YAML 1.2, in which
//! `yes` and `0777` are not what they are in YAML 1.1. Aliases and tags are refused.

use std::path::Path;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Span};

use super::problem::{Origin, Position, Problem};

/// A value and its source.
#[derive(Clone, Debug)]
pub(super) struct TreeNode {
    pub(super) origin: Origin,
    pub(super) value: Value,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Scalar(serde_json::Value),
    Sequence(Vec<TreeNode>),
    Mapping(Vec<MappingEntry>),
    /// A removed element of a sequence: later elements keep their numbers.
    Removed,
}

/// A key of a mapping, with the source of the key (not of the value).
#[derive(Clone, Debug)]
pub(super) struct MappingEntry {
    pub(super) key: String,
    pub(super) origin: Origin,
    pub(super) node: TreeNode,
}

impl TreeNode {
    /// Converts the value to JSON. A key without a value counts as absent.
    pub(super) fn to_json(&self) -> serde_json::Value {
        match &self.value {
            Value::Scalar(scalar) => scalar.clone(),
            Value::Removed => serde_json::Value::Null,
            Value::Sequence(nodes) => {
                nodes.iter().filter(|node| !node.is_removed()).map(Self::to_json).collect()
            }
            Value::Mapping(entries) => entries
                .iter()
                .filter(|entry| !matches!(entry.node.value, Value::Scalar(serde_json::Value::Null)))
                .map(|entry| (entry.key.clone(), entry.node.to_json()))
                .collect(),
        }
    }

    /// Creates a node with the same source for all its values.
    fn from_json(value: serde_json::Value, origin: &Origin) -> Self {
        let value = match value {
            serde_json::Value::Array(items) => {
                Value::Sequence(items.into_iter().map(|item| Self::from_json(item, origin)).collect())
            }
            serde_json::Value::Object(entries) => {
                let entry = |(key, value)| MappingEntry {
                    key,
                    origin: origin.clone(),
                    node: Self::from_json(value, origin),
                };
                Value::Mapping(entries.into_iter().map(entry).collect())
            }
            scalar => Value::Scalar(scalar),
        };
        Self { origin: origin.clone(), value }
    }

    /// Sets the value at a path. Replaces an existing value, and adds missing mappings.
    pub(super) fn set(&mut self, path: &[&str], value: serde_json::Value, origin: &Origin) {
        let Some((&key, rest)) = path.split_first() else {
            *self = Self::from_json(value, origin);
            return;
        };
        if !matches!(self.value, Value::Mapping(_)) {
            self.value = Value::Mapping(Vec::new());
        }
        let Value::Mapping(entries) = &mut self.value else { return };
        let index = entries.iter().position(|entry| entry.key == key).unwrap_or_else(|| {
            let node = Self { origin: origin.clone(), value: Value::Mapping(Vec::new()) };
            entries.push(MappingEntry { key: key.to_owned(), origin: origin.clone(), node });
            entries.len() - 1
        });
        entries[index].node.set(rest, value, origin);
    }

    /// Merges a tree of higher precedence into this one: mappings by key, and each other value replaces the old one. A key without a value
    /// removes the old value.
    pub(super) fn merge(&mut self, other: Self) {
        match (&mut self.value, other.value) {
            (Value::Mapping(entries), Value::Mapping(others)) => {
                for mut other in others {
                    // The parser puts an absent value behind its line.
                    if matches!(other.node.value, Value::Scalar(serde_json::Value::Null)) {
                        other.node.origin.clone_from(&other.origin);
                    }
                    match entries.iter_mut().find(|entry| entry.key == other.key) {
                        Some(entry) => entry.node.merge(other.node),
                        None => entries.push(other),
                    }
                }
            }
            (_, value) => *self = Self { origin: other.origin, value },
        }
    }

    /// Appends a list to that of a key, which is added if it is absent. A value that is no list stays, and is reported later.
    pub(super) fn append(&mut self, key: &str, list: Self) {
        let Value::Mapping(entries) = &mut self.value else { return };
        let is_absent = |node: &Self| matches!(node.value, Value::Scalar(serde_json::Value::Null));
        match entries.iter_mut().find(|entry| entry.key == key && !is_absent(&entry.node)) {
            None => {
                entries.retain(|entry| entry.key != key);
                entries.push(MappingEntry { key: key.to_owned(), origin: list.origin.clone(), node: list });
            }
            Some(MappingEntry { node: Self { value: Value::Sequence(nodes), .. }, .. }) => {
                if let Value::Sequence(added) = list.value {
                    nodes.extend(added);
                }
            }
            Some(_) => {}
        }
    }

    /// Removes the value at a path of [`Self::to_json`], and returns its source. Changes the path to the original one,
    /// in which removed elements count.
    pub(super) fn remove(&mut self, path: &mut [String]) -> Option<Origin> {
        let (key, rest) = path.split_first_mut()?;
        match &mut self.value {
            Value::Scalar(_) | Value::Removed => None,
            Value::Sequence(nodes) => {
                let mut left = nodes.iter_mut().enumerate().filter(|(_, node)| !node.is_removed());
                let (index, node) = left.nth(key.parse().ok()?)?;
                *key = index.to_string();
                if rest.is_empty() {
                    node.value = Value::Removed;
                    return Some(node.origin.clone());
                }
                node.remove(rest)
            }
            Value::Mapping(entries) => {
                let index = entries.iter().position(|entry| &entry.key == key)?;
                if rest.is_empty() {
                    Some(entries.remove(index).node.origin)
                } else {
                    entries[index].node.remove(rest)
                }
            }
        }
    }

    /// Returns the source of the value at a path; the error is the source of the nearest existing ancestor.
    pub(super) fn origin_at(&self, path: &[String]) -> Result<&Origin, &Origin> {
        let Some((key, rest)) = path.split_first() else { return Ok(&self.origin) };
        let below = match &self.value {
            Value::Scalar(_) | Value::Removed => None,
            Value::Sequence(nodes) => key.parse::<usize>().ok().and_then(|index| nodes.get(index)),
            Value::Mapping(entries) => {
                entries.iter().find(|entry| &entry.key == key).map(|entry| &entry.node)
            }
        };
        below.map_or(Err(&self.origin), |node| node.origin_at(rest))
    }

    /// Returns the original numbers of the elements that remain in the sequence with this key.
    pub(super) fn remaining_indices(&self, key: &str) -> Vec<usize> {
        let Value::Mapping(entries) = &self.value else { return Vec::new() };
        let nodes = entries.iter().find(|entry| entry.key == key).map(|entry| &entry.node.value);
        let Some(Value::Sequence(nodes)) = nodes else { return Vec::new() };
        nodes.iter().enumerate().filter(|(_, node)| !node.is_removed()).map(|(index, _)| index).collect()
    }

    fn is_removed(&self) -> bool {
        matches!(self.value, Value::Removed)
    }
}

/// Sources of the values that were given. All other values are defaults.
#[derive(Clone, Debug)]
pub struct Origins(pub(super) TreeNode);

impl Origins {
    /// Returns the source of the value at a key, or of the element of a list; `None` for a default.
    pub(super) fn origin(&self, path: &[&str]) -> Option<&Origin> {
        let path: Vec<_> = path.iter().map(|&key| key.to_owned()).collect();
        self.0.origin_at(&path).ok()
    }
}

/// Parses a YAML file. Adds problems to `problems`, and returns the valid part.
pub(super) fn parse(text: &str, file: &Path, problems: &mut Vec<Problem>) -> TreeNode {
    let mut reader = Reader { file, problems, open: Vec::new(), root: None };
    let mut parser = Parser::new_from_str(text);
    while let Some(event) = parser.next_event() {
        match event {
            Ok((event, span)) => {
                if !reader.process_event(&event, span) {
                    break;
                }
            }
            Err(error) => {
                reader.problem(*error.marker(), format!("not valid YAML: {}", error.info()));
                break;
            }
        }
    }
    // Open collections belong to a text with a syntax error: their content is kept.
    while !reader.open.is_empty() {
        reader.close();
    }
    reader.root.unwrap_or_else(|| empty(file))
}

/// Parses a YAML file with keys and values. Returns the tree of an empty file if it has another content.
pub(super) fn parse_mapping(text: &str, file: &Path, problems: &mut Vec<Problem>) -> TreeNode {
    let tree = parse(text, file, problems);
    match tree.value {
        Value::Mapping(_) => return tree,
        Value::Scalar(serde_json::Value::Null) => {}
        _ => problems.push(Problem {
            origin: tree.origin,
            path: String::new(),
            message: "expected keys and values, such as \"listen: 127.0.0.1:9560\"".to_owned(),
        }),
    }
    empty(file)
}

/// Returns the tree of an empty file.
pub(super) fn empty(file: &Path) -> TreeNode {
    TreeNode {
        origin: Origin::File { file: file.to_owned(), position: None },
        value: Value::Mapping(Vec::new()),
    }
}

/// The maximum depth of nesting. It protects the stack from hostile files.
const MAX_DEPTH: usize = 32;

struct Reader<'a> {
    file: &'a Path,
    problems: &'a mut Vec<Problem>,
    open: Vec<OpenCollection>,
    root: Option<TreeNode>,
}

/// A collection with an end that has not been read yet. `key`: the key that waits for its value.
struct OpenCollection {
    node: TreeNode,
    key: Option<(String, Origin)>,
}

impl Reader<'_> {
    /// Processes an event; returns `false` if parsing cannot continue.
    fn process_event(&mut self, event: &Event<'_>, span: Span) -> bool {
        let at = span.start;
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                if *anchor != 0 || tag.is_some() {
                    self.problem(at, "anchors and tags are not supported".to_owned());
                }
                if let Some(OpenCollection {
                    node: TreeNode { value: Value::Mapping(_), .. },
                    key: key @ None,
                }) = self.open.last_mut()
                {
                    *key = Some((text.to_string(), place(self.file, at)));
                } else {
                    let plain = *style == ScalarStyle::Plain;
                    let scalar = if plain { resolve(text) } else { text.as_ref().into() };
                    self.add(TreeNode { origin: place(self.file, at), value: Value::Scalar(scalar) });
                }
                true
            }
            Event::SequenceStart(anchor, tag) | Event::MappingStart(anchor, tag) => {
                if *anchor != 0 || tag.is_some() {
                    self.problem(at, "anchors and tags are not supported".to_owned());
                }
                if self.open.len() == MAX_DEPTH {
                    self.problem(at, format!("nested deeper than {MAX_DEPTH} levels"));
                    return false;
                }
                if let Some(OpenCollection { node: TreeNode { value: Value::Mapping(_), .. }, key: None }) =
                    self.open.last()
                {
                    self.problem(at, "a key must be a plain word".to_owned());
                    return false;
                }
                let value = match event {
                    Event::SequenceStart(..) => Value::Sequence(Vec::new()),
                    _ => Value::Mapping(Vec::new()),
                };
                self.open.push(OpenCollection {
                    node: TreeNode { origin: place(self.file, at), value },
                    key: None,
                });
                true
            }
            Event::SequenceEnd | Event::MappingEnd => {
                self.close();
                true
            }
            Event::Alias(_) => {
                self.problem(at, "aliases are not supported: write the value out".to_owned());
                false
            }
            Event::DocumentStart(_) if self.root.is_some() => {
                self.problem(at, "a second document: the file holds one configuration".to_owned());
                false
            }
            _ => true,
        }
    }

    fn close(&mut self) {
        if let Some(OpenCollection { node, .. }) = self.open.pop() {
            self.add(node);
        }
    }

    fn add(&mut self, node: TreeNode) {
        let Some(parent) = self.open.last_mut() else {
            self.root = Some(node);
            return;
        };
        match (&mut parent.node.value, parent.key.take()) {
            (Value::Sequence(nodes), _) => nodes.push(node),
            (Value::Mapping(entries), Some((key, origin))) => {
                if let Some(first) = entries.iter().find(|entry| entry.key == key) {
                    let message = format!("the key {key:?} was given before, at {}", first.origin);
                    self.problems.push(Problem { origin, path: key, message });
                } else {
                    entries.push(MappingEntry { key, origin, node });
                }
            }
            (Value::Mapping(_) | Value::Scalar(_) | Value::Removed, _) => {}
        }
    }

    fn problem(&mut self, at: Marker, message: String) {
        let origin = place(self.file, at);
        self.problems.push(Problem { origin, path: String::new(), message });
    }
}

fn place(file: &Path, at: Marker) -> Origin {
    let position = Some(Position { line: at.line(), column: at.col() + 1 });
    Origin::File { file: file.to_owned(), position }
}

/// Interprets a plain scalar by the core schema of YAML 1.2 (section 10.3.2).
pub(super) fn resolve(text: &str) -> serde_json::Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return serde_json::Value::Null,
        "true" | "True" | "TRUE" => return true.into(),
        "false" | "False" | "FALSE" => return false.into(),
        _ => {}
    }
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let radix = |digits: &str, radix| u64::from_str_radix(digits, radix).ok().map(serde_json::Value::from);
    let number = if let Some(octal) = text.strip_prefix("0o") {
        radix(octal, 8)
    } else if let Some(hex) = text.strip_prefix("0x") {
        radix(hex, 16)
    } else if digits.starts_with(|c: char| c.is_ascii_digit() || c == '.')
        && digits.contains(|c: char| c.is_ascii_digit())
    {
        let text = text.strip_prefix('+').unwrap_or(text);
        text.parse::<u64>()
            .map(Into::into)
            .or_else(|_| text.parse::<i64>().map(Into::into))
            .ok()
            .or_else(|| text.parse::<f64>().ok().map(Into::into))
    } else {
        None
    };
    number.unwrap_or_else(|| text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> (serde_json::Value, Vec<String>) {
        let mut problems = Vec::new();
        let node = parse(text, Path::new("f.yaml"), &mut problems);
        (node.to_json(), problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn scalars_follow_core_schema() {
        for (text, expected) in [
            ("a: 1", serde_json::json!({"a": 1})),
            ("a: -1", serde_json::json!({"a": -1})),
            ("a: 0x10", serde_json::json!({"a": 16})),
            ("a: 0o17", serde_json::json!({"a": 15})),
            ("a: 1.5", serde_json::json!({"a": 1.5})),
            ("a: yes", serde_json::json!({"a": "yes"})),
            ("a: '1'", serde_json::json!({"a": "1"})),
            ("a: True", serde_json::json!({"a": true})),
            ("a: 127.0.0.1:1", serde_json::json!({"a": "127.0.0.1:1"})),
            ("a: ~\nb: [x, 2]", serde_json::json!({"b": ["x", 2]})),
            ("# nothing", serde_json::json!({})),
        ] {
            assert_eq!(read(text), (expected, vec![]), "{text}");
        }
    }

    #[test]
    fn refuses_invalid_yaml_with_place() {
        for (text, expected) in [
            ("a: 1\na: 2", "f.yaml:2:1: the key \"a\" was given before, at f.yaml:1:1"),
            ("a: &x 1\nb: *x", "f.yaml:1:4: anchors and tags are not supported"),
            ("a: !!str 1", "f.yaml:1:4: anchors and tags are not supported"),
            ("? [a]\n: 1", "f.yaml:1:3: a key must be a plain word"),
            ("a: 1\n---\nb: 1", "f.yaml:2:1: a second document: the file holds one configuration"),
            ("a: 1\nb: [1", "not valid YAML"),
            ("a:\n\t- 1", "f.yaml:2:"),
        ] {
            let problems = read(text).1;
            assert!(problems.first().is_some_and(|first| first.contains(expected)), "{text}: {problems:?}");
        }
        assert!(read(&"- ".repeat(100_000)).1[0].contains("nested deeper"));
        assert_eq!(read(&"[".repeat(100_000)).1.len(), 1);
    }

    #[test]
    fn keeps_text_before_syntax_error() {
        assert_eq!(read("a: 1\nb: {c: 2\n").0, serde_json::json!({"a": 1, "b": {"c": 2}}));
    }
}
