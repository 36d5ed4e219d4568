//! Holds `docs/architecture.md` against the code: every name and every path between backquotes has to be there.
//!
//! A *name* is an identifier, or several joined by `::` or `.`; each of them has to occur in a file of the checkout that is
//! no page. A *path* ends with `.rs` or `.sh`; where it names a crate of `userspace`, that folder is omitted.

use std::{collections::BTreeSet, fs, process::Command};

use anyhow::{Context as _, Result, bail};
use regex::Regex;

use crate::command;

const PAGE: &str = "docs/architecture.md";
/// Calls of the system that are made by the standard library.
const OF_OTHERS: &[&str] = &["fdatasync"];

pub(crate) fn check() -> Result<()> {
    let root = command::root();
    let page = fs::read_to_string(root.join(PAGE)).with_context(|| format!("cannot read {PAGE}"))?;
    let mut git = Command::new("git");
    let listed = command::read(git.args(["ls-files", "-z"]).current_dir(root))
        .context("the names are looked for in the files of a checkout")?;
    let files: Vec<_> = listed.split_terminator('\0').collect();
    let is_code = |file: &&&str| [".rs", ".sh", ".toml", ".yaml"].iter().any(|end| file.ends_with(end));
    let mut names = BTreeSet::new();
    for file in files.iter().filter(is_code).filter(|file| root.join(file).is_file()) {
        let text = fs::read_to_string(root.join(file)).with_context(|| format!("cannot read {file}"))?;
        names.extend(words(&text).map(str::to_owned));
    }
    let missing = missing(&page, &files, &names)?;
    if !missing.is_empty() {
        bail!("{PAGE} names what is not there (any more):\n{}", missing.join("\n"));
    }
    println!("{PAGE}: all names and paths are there");
    Ok(())
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|character: char| !character.is_alphanumeric() && character != '_')
}

/// What the page names and is neither a file nor a name of the code, with its line.
fn missing(page: &str, files: &[&str], names: &BTreeSet<String>) -> Result<Vec<String>> {
    let quoted = Regex::new("`([^`\n]+)`")?;
    let name = Regex::new("^[A-Za-z_][A-Za-z0-9_]*(?:(?:::|[.])[A-Za-z_][A-Za-z0-9_]*)*$")?;
    let path = Regex::new("^[A-Za-z0-9_/-]+[.](?:rs|sh)$")?;
    let is_there = |text: &str| {
        if path.is_match(text) {
            let of_userspace = format!("userspace/{text}");
            return files
                .iter()
                .any(|file| *file == text || *file == of_userspace || file.ends_with(&format!("/{text}")));
        }
        !name.is_match(text)
            || OF_OTHERS.contains(&text)
            || words(text).all(|word| word.is_empty() || names.contains(word))
    };
    let mut missing = Vec::new();
    for (line, text) in page.lines().enumerate() {
        let texts = quoted.captures_iter(text).filter_map(|found| Some(found.get(1)?.as_str()));
        missing.extend(texts.filter(|text| !is_there(text)).map(|text| format!("{}: {text}", line + 1)));
    }
    Ok(missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_found_with_its_line() {
        let names = ["Core", "state", "wait_for"].map(str::to_owned).into();
        let files = ["userspace/guarantee/src/state.rs", "tests/e2e/answers.rs"];
        let page = "`Core.state` waits in `wait_for`,\n`Core::gone`, `guarantee/src/state.rs` `state.rs`\n`tests/e2e/no.rs` \
                    and `GET /metrics`";
        assert_eq!(missing(page, &files, &names).unwrap(), ["2: Core::gone", "3: tests/e2e/no.rs"]);
    }
}
