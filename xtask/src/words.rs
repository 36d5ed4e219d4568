//! Words that this project does not use. `docs/style.md` says why, and what to write instead.
//!
//! Looked at are whole pages, and of programs the comments and texts: help, messages, events and the HELP of metrics are
//! texts of Rust. Names are not looked at: identifiers, what is between backquotes, and texts without a space.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use regex::Regex;

use crate::command;

/// In lower case. Of two words, the second follows the first, also on the next line.
const WORDS: &[(&str, Option<&str>)] = &[
    ("allocated", Some("far")),
    ("allocated", Some("near")),
    ("are", Some("without")),
    ("as", Some("has")),
    ("be", Some("had")),
    ("come", Some("free")),
    ("come", Some("round")),
    ("comes", Some("free")),
    ("comes", Some("round")),
    ("is", Some("without")),
    ("its", Some("like")),
    ("lack", None),
    ("lacked", None),
    ("lacking", None),
    ("lacks", None),
    ("leave", Some("out")),
    ("leaves", Some("out")),
    ("leaving", Some("out")),
    ("left", Some("out")),
    ("lie", Some("wrong")),
    ("lies", Some("wrong")),
    ("mend", None),
    ("mended", None),
    ("mending", None),
    ("mends", None),
    ("said", Some("of")),
    ("say", Some("of")),
    ("says", Some("of")),
    ("shall", None),
    ("tell", None),
    ("telling", None),
    ("tells", None),
    ("the", Some("begin")),
    ("their", Some("like")),
    ("told", None),
    ("want", Some("of")),
    ("what", Some("else")),
    ("whoever", None),
];

/// Comments, and texts with what opens and closes them. A character may be a quotation mark, so it is taken as a whole.
const RUST: &str =
    r###"(?s)//[^\n]*|/\*.*?\*/|r"[^"]*"|r#".*?"#|r##".*?"##|"(?:[^"\\]|\\.)*"|'(?:\\[^']+|\\'|[^'\\])'"###;
const HASH_COMMENT: &str = r"(?m)(?:^|[ \t])#.*$";
const NAME: &str = "`[^`\n]*`";

/// Fails if a file of the checkout has one of the words.
pub(crate) fn check() -> Result<()> {
    let root = command::root();
    let listed = command::read(Command::new("git").args(["ls-files", "-z"]).current_dir(root))
        .context("the words are looked for in the files of a checkout")?;
    let finder = Finder::new()?;
    let (mut files, mut faults) = (0, Vec::new());
    for name in listed.split_terminator('\0') {
        // What is listed and not there was just removed.
        if let Some(kind) = Kind::of(Path::new(name)).filter(|_| root.join(name).is_file()) {
            let text = fs::read_to_string(root.join(name)).with_context(|| format!("cannot read {name}"))?;
            files += 1;
            let found = finder.find(kind, &text).into_iter();
            faults.extend(found.map(|(line, word)| format!("{name}:{line}: {word}")));
        }
    }
    if !faults.is_empty() {
        bail!("words that docs/style.md rules out:\n  {}", faults.join("\n  "));
    }
    println!("{files} files have no word that docs/style.md rules out");
    Ok(())
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Rust,
    /// Comments begin with `#`; the rest is commands.
    Script,
    Page,
    /// Backquotes are part of the language.
    JavaScript,
}

impl Kind {
    /// `None` for data, which nobody reads as text.
    fn of(path: &Path) -> Option<Self> {
        let Some(extension) = path.extension().and_then(|extension| extension.to_str()) else {
            return (path.starts_with(".ci") || path.ends_with("Containerfile")).then_some(Self::Script);
        };
        match extension {
            "rs" => Some(Self::Rust),
            "py" | "sh" => Some(Self::Script),
            "js" | "mjs" => Some(Self::JavaScript),
            "css" | "html" | "md" | "proto" | "service" | "toml" | "tpl" | "txt" | "yaml" => Some(Self::Page),
            _ => None,
        }
    }
}

struct Finder {
    rust: Regex,
    hash_comment: Regex,
    name: Regex,
}

impl Finder {
    fn new() -> Result<Self> {
        Ok(Self { rust: Regex::new(RUST)?, hash_comment: Regex::new(HASH_COMMENT)?, name: Regex::new(NAME)? })
    }

    /// Each word that is found, with the number of its line.
    fn find(&self, kind: Kind, text: &str) -> Vec<(usize, String)> {
        let parts: Vec<(usize, &str)> = match kind {
            Kind::Rust => self
                .rust
                .find_iter(text)
                .filter(|part| part.as_str().starts_with('/') || part.as_str().contains(char::is_whitespace))
                .map(|part| (part.start(), part.as_str()))
                .collect(),
            Kind::Script => {
                self.hash_comment.find_iter(text).map(|part| (part.start(), part.as_str())).collect()
            }
            Kind::Page | Kind::JavaScript => vec![(0, text)],
        };
        let mut words = Vec::new();
        for (start, part) in parts {
            let names: Vec<_> = match kind {
                Kind::JavaScript => Vec::new(),
                _ => self.name.find_iter(part).map(|name| name.range()).collect(),
            };
            let is_name = |at: usize| names.iter().any(|name| name.contains(&at));
            let mut at = 0;
            for word in part.split(|c: char| !c.is_alphanumeric() && c != '_') {
                if !word.is_empty() && !is_name(at) {
                    words.push((start + at, word.to_lowercase()));
                }
                // What separates words may take several bytes.
                at += word.len();
                at += part[at..].chars().next().map_or(0, char::len_utf8);
            }
        }
        // The word after this one, if only the end of a line is between them.
        let second = |index: usize| {
            let ((at, word), (next_at, next)) = (words.get(index)?, words.get(index + 1)?);
            let between = text.get(at + word.len()..*next_at)?;
            between.chars().all(|c| c.is_whitespace() || "/!*#".contains(c)).then_some(next.as_str())
        };
        words
            .iter()
            .enumerate()
            .filter_map(|(index, (at, word))| {
                let (first, next) = WORDS
                    .iter()
                    .find(|(first, next)| first == word && (next.is_none() || second(index) == *next))?;
                let line = text[..*at].matches('\n').count() + 1;
                Some((line, next.map_or_else(|| (*first).to_owned(), |next| format!("{first} {next}"))))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found in a text in which signs stand for words that are not used, so that this file has none.
    fn found(path: &str, text: &str) -> Vec<String> {
        let kind = Kind::of(Path::new(path)).unwrap();
        let found = Finder::new().unwrap().find(kind, &text.replace('@', "told").replace('%', "Whoever"));
        found.into_iter().map(|(line, word)| format!("{line}:{}", word.replace(' ', "-"))).collect()
    }

    #[test]
    fn each_word_has_its_place_on_the_page_on_style() {
        let page = include_str!("../../docs/style.md");
        for (first, next) in WORDS {
            let word = next.map_or_else(|| (*first).to_owned(), |next| format!("{first} {next}"));
            assert!(page.contains(&format!("`{word}`")), "{word}");
        }
    }

    #[test]
    fn words_are_found_in_pages_also_over_the_end_of_a_line() {
        let text = "What is *left\nout* is @.\nNot `@`, un@d or left, out of reach.\n";
        assert_eq!(found("docs/a.md", text), ["1:left-out", "2:told"]);
        assert_eq!(found("rules.yaml", "a: @ # %\n"), ["1:told", "1:whoever"]);
    }

    #[test]
    fn of_programs_comments_and_texts_are_looked_at() {
        let rust = r##"
            /// Is @.
            fn @(quote: char) -> bool { // It @ `@`.
                let @ = json["@"] == "was \" @" || quote == '"';
                /* Long: @ */ f::<'_>(r#"not "@" yet"#, "@", @)
            }"##;
        assert_eq!(found("a.rs", rust), ["2:told", "3:told", "4:told", "5:told", "5:told"]);
        let script = "@() { echo @; } # is @\n# @\n";
        assert_eq!(found("a.sh", script), ["1:told", "2:told"]);
        assert_eq!(found(".ci/run", script), ["1:told", "2:told"]);
        assert_eq!(found("a.mjs", "const text = `it was @`;"), ["1:told"]);
    }

    #[test]
    fn data_is_not_looked_at() {
        for path in ["a.json", "Cargo.lock", "a.png", "fuzz/corpus/text/list"] {
            assert!(Kind::of(Path::new(path)).is_none(), "{path}");
        }
    }
}
