//! Manifests in YAML, with changes that keep the rest of the text as it is.
//!
//! # Algorithm
//! The text is parsed for the positions of its values, and the text of changed values alone is replaced: comments, the order of keys and
//! the spelling of values stay. The result is parsed again, and must be the old content with the changes.
//!
//! Scalars are not interpreted: tools differ in their reading of values such as `0644` and `yes`.

use std::{collections::BTreeSet, ops::Range};

use numaward_config::yaml;
use saphyr_parser::{Event, Marker, Parser, ScalarStyle, Span};
use serde_json::Value as Json;

/// Maximum depth of nesting.
const MAX_DEPTH: usize = 64;

/// A text with its documents.
pub(super) struct Manifest<'a> {
    text: &'a str,
    documents: Vec<Node>,
}

/// A new value for a key of a mapping.
pub(super) struct Change {
    /// Number of the document, from 0 on.
    pub(super) document: usize,
    /// Keys and indices of the mapping.
    pub(super) path: Vec<String>,
    pub(super) key: String,
    /// A mapping or sequence of texts.
    pub(super) value: Json,
}

/// A value with its place in the text.
struct Node {
    content: Content,
    /// Bytes of the text.
    range: Range<usize>,
    line: usize,
}

enum Content {
    Scalar { text: String, is_plain: bool },
    Sequence(Vec<Node>),
    Mapping(Vec<Entry>),
}

struct Entry {
    key: String,
    key_range: Range<usize>,
    column: usize,
    value: Node,
}

/// A collection without its end, which has not been read yet.
struct OpenCollection {
    node: Node,
    /// Key that waits for its value.
    key: Option<(String, Range<usize>, usize)>,
}

impl Node {
    /// Returns the content with scalars as texts; a plain scalar without a value is null.
    fn to_json(&self) -> Json {
        match &self.content {
            Content::Scalar { text, is_plain: true } if matches!(text.as_str(), "" | "~" | "null") => {
                Json::Null
            }
            Content::Scalar { text, .. } => text.as_str().into(),
            Content::Sequence(items) => items.iter().map(Self::to_json).collect(),
            Content::Mapping(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), entry.value.to_json())).collect()
            }
        }
    }

    fn below(&self, key: &str) -> Option<&Self> {
        match &self.content {
            Content::Scalar { .. } => None,
            Content::Sequence(items) => items.get(key.parse::<usize>().ok()?),
            Content::Mapping(entries) => {
                entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value)
            }
        }
    }

    fn repeated_key(&self) -> Option<&str> {
        let Content::Mapping(entries) = &self.content else { return None };
        let mut known = BTreeSet::new();
        entries.iter().map(|entry| entry.key.as_str()).find(|key| !known.insert(*key))
    }

    /// Returns the end of the last value in a block. The end of the block itself is behind the following blank lines and comments.
    fn last_end(&self) -> usize {
        let last = match &self.content {
            Content::Scalar { .. } => None,
            Content::Sequence(items) => items.last(),
            Content::Mapping(entries) => entries.last().map(|entry| &entry.value),
        };
        last.map_or(self.range.start, |last| last.range.end)
    }
}

impl<'a> Manifest<'a> {
    /// Parses a text. An error names the line.
    pub(super) fn parse(text: &'a str) -> Result<Self, String> {
        let mut reader = Reader {
            text,
            offsets: text.char_indices().map(|(offset, _)| offset).collect(),
            open: Vec::new(),
            documents: Vec::new(),
        };
        let mut parser = Parser::new_from_str(text);
        while let Some(event) = parser.next_event() {
            let (event, span) = event
                .map_err(|error| problem(*error.marker(), &format!("not valid YAML: {}", error.info())))?;
            reader.process_event(&event, span)?;
        }
        Ok(Self { text, documents: reader.documents })
    }

    /// Returns the content of each document, and its first line.
    pub(super) fn documents(&self) -> impl Iterator<Item = (Json, usize)> {
        self.documents.iter().map(|document| (document.to_json(), document.line))
    }

    /// Returns the text with changed values.
    pub(super) fn with(&self, changes: &[Change]) -> Result<String, String> {
        let mut expected: Vec<Json> = self.documents().map(|(document, _)| document).collect();
        let mut edits = Vec::new();
        for change in changes {
            let place = || format!("document {}: {}", change.document + 1, change.path.join("."));
            let mapping = self
                .documents
                .get(change.document)
                .and_then(|document| change.path.iter().try_fold(document, |node, key| node.below(key)));
            let edit = mapping.and_then(|mapping| self.edit(mapping, &change.key, &change.value));
            edits.push(edit.ok_or_else(|| format!("{}: it is not a mapping with keys", place()))?);
            let pointer: String = change.path.iter().flat_map(|key| ["/", key.as_str()]).collect();
            if let Some(Json::Object(entries)) =
                expected.get_mut(change.document).and_then(|document| document.pointer_mut(&pointer))
            {
                entries.insert(change.key.clone(), change.value.clone());
            }
        }
        // The order of edits at one place stays.
        edits.sort_by_key(|(range, _)| range.start);
        let (mut text, mut done) = (String::new(), 0);
        for (range, new) in edits {
            text.push_str(self.text.get(done..range.start).unwrap_or_default());
            text.push_str(&new);
            done = range.end;
        }
        text.push_str(self.text.get(done..).unwrap_or_default());
        let is_expected = Manifest::parse(&text)
            .is_ok_and(|parsed| parsed.documents().map(|(document, _)| document).eq(expected));
        if is_expected {
            Ok(text)
        } else {
            Err("the text cannot be changed in place: write it as `kubectl create --dry-run=client -o yaml` does".to_owned())
        }
    }

    /// Returns the bytes to replace for a value of a mapping, and their replacement.
    fn edit(&self, mapping: &Node, key: &str, value: &Json) -> Option<(Range<usize>, String)> {
        let Content::Mapping(entries) = &mapping.content else { return None };
        let is_flow = self.text.get(mapping.range.start..)?.starts_with('{');
        let first = entries.first()?;
        let indentation = " ".repeat(first.column);
        let block = || {
            let text = yaml(value);
            text.lines().flat_map(|line| ["\n", &indentation, "  ", line]).collect::<String>()
        };
        let Some(entry) = entries.iter().find(|entry| entry.key == key) else {
            let at = first.key_range.start;
            let text = if is_flow {
                format!("{}: {value}, ", Json::from(key))
            } else {
                format!("{key}:{}\n{indentation}", block())
            };
            return Some((at..at, text));
        };
        let colon = entry.key_range.end + self.text.get(entry.key_range.end..)?.find(':')? + 1;
        let end = entry.value.range.end.max(colon);
        Some((colon..end, if is_flow { format!(" {value}") } else { block() }))
    }
}

/// Reader of the parser's events.
struct Reader<'a> {
    text: &'a str,
    /// Offset of each character in bytes.
    offsets: Vec<usize>,
    open: Vec<OpenCollection>,
    documents: Vec<Node>,
}

impl Reader<'_> {
    fn process_event(&mut self, event: &Event<'_>, span: Span) -> Result<(), String> {
        let at = span.start;
        match event {
            Event::Alias(_) => return Err(problem(at, "aliases are not supported: write the value out")),
            Event::Scalar(_, _, anchor, tag)
            | Event::SequenceStart(anchor, tag)
            | Event::MappingStart(anchor, tag)
                if *anchor != 0 || tag.is_some() =>
            {
                return Err(problem(at, "anchors and tags are not supported"));
            }
            Event::Scalar(text, style, ..) => {
                let range = self.trimmed(self.offset(span.start)..self.offset(span.end));
                if let Some(OpenCollection {
                    node: Node { content: Content::Mapping(_), .. },
                    key: key @ None,
                }) = self.open.last_mut()
                {
                    *key = Some((text.to_string(), range, at.col()));
                } else {
                    let content =
                        Content::Scalar { text: text.to_string(), is_plain: *style == ScalarStyle::Plain };
                    self.add(Node { content, range, line: at.line() });
                }
            }
            Event::SequenceStart(..) | Event::MappingStart(..) => {
                if self.open.len() == MAX_DEPTH {
                    return Err(problem(at, &format!("nested deeper than {MAX_DEPTH} levels")));
                }
                if let Some(OpenCollection { node: Node { content: Content::Mapping(_), .. }, key: None }) =
                    self.open.last()
                {
                    return Err(problem(at, "a key must be a plain word"));
                }
                let content = match event {
                    Event::SequenceStart(..) => Content::Sequence(Vec::new()),
                    _ => Content::Mapping(Vec::new()),
                };
                let start = self.offset(at);
                let node = Node { content, range: start..start, line: at.line() };
                self.open.push(OpenCollection { node, key: None });
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(OpenCollection { mut node, .. }) = self.open.pop() {
                    if let Some(key) = node.repeated_key() {
                        return Err(format!("line {}: the key {key:?} is given twice", node.line));
                    }
                    let is_flow =
                        self.text.get(node.range.start..).is_some_and(|text| text.starts_with(['{', '[']));
                    node.range.end = if is_flow { self.offset(span.end) } else { node.last_end() };
                    self.add(node);
                }
            }
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd => {}
        }
        Ok(())
    }

    fn add(&mut self, node: Node) {
        let Some(parent) = self.open.last_mut() else {
            self.documents.push(node);
            return;
        };
        match (&mut parent.node.content, parent.key.take()) {
            (Content::Sequence(items), _) => items.push(node),
            (Content::Mapping(entries), Some((key, key_range, column))) => {
                let mut value = node;
                // The parser puts an absent value behind its line.
                if matches!(&value.content, Content::Scalar { text, is_plain: true } if text.is_empty()) {
                    value.range = key_range.end..key_range.end;
                }
                entries.push(Entry { key, key_range, column, value });
            }
            (Content::Mapping(_) | Content::Scalar { .. }, _) => {}
        }
    }

    fn offset(&self, at: Marker) -> usize {
        self.offsets.get(at.index()).copied().unwrap_or(self.text.len())
    }

    fn trimmed(&self, range: Range<usize>) -> Range<usize> {
        let text = self.text.get(range.clone()).unwrap_or_default();
        range.start..range.start + text.trim_end().len()
    }
}

fn problem(at: Marker, message: &str) -> String {
    format!("line {}: {message}", at.line())
}
