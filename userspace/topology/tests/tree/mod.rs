//! Unpacks the fixtures. `fixtures/README.md` describes their format.

#![expect(clippy::expect_used, clippy::panic, reason = "a fixture that cannot be unpacked fails the test")]

use std::{fs, path::Path};

use numaward_topology::CpuSet;

/// Unpacks a fixture into a new directory, which is removed when the value is dropped.
pub(crate) fn unpack(fixture: &str) -> tempfile::TempDir {
    let root = tempfile::tempdir().expect("a temporary directory");
    let mut lines = fixture.lines().peekable();
    while let Some(line) = lines.next() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (path, content) = if let Some(dir) = line.strip_suffix('/') {
            (dir, None)
        } else {
            let (path, text) = line.split_once(": ").unwrap_or_else(|| panic!("no `PATH: TEXT`: {line:?}"));
            if text == "|" {
                let mut block = String::new();
                while let Some(more) = lines.next_if(|more| more.starts_with("  ")) {
                    block += &more[2..];
                    block.push('\n');
                }
                (path, Some(block))
            } else {
                (path, Some(format!("{}\n", text.trim())))
            }
        };
        for (path, content) in expand(path, content.as_deref()) {
            make(root.path(), &path, content.as_deref());
        }
    }
    root
}

/// Writes a file, or creates a directory if there is no content. The path must not exist yet.
fn make(root: &Path, path: &str, content: Option<&str>) {
    let path = root.join(path);
    assert!(!path.exists(), "{} is in the fixture twice", path.display());
    match content {
        Some(content) => {
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, content).expect("a file");
        }
        None => fs::create_dir_all(path).expect("a directory"),
    }
}

fn expand(path: &str, content: Option<&str>) -> Vec<(String, Option<String>)> {
    let Some((before, list, after)) = braces(path) else {
        return vec![(path.into(), content.map(Into::into))];
    };
    let numbers: CpuSet = list.parse().expect("a list in the braces of a path");
    numbers.iter().map(|n| (format!("{before}{n}{after}"), content.map(|text| relative(text, n.0)))).collect()
}

fn relative(text: &str, number: u32) -> String {
    match braces(text) {
        None => text.into(),
        Some((before, offset, after)) => {
            let offset: i64 = offset.parse().expect("`{+N}` or `{-N}` in a text");
            format!("{before}{}{}", i64::from(number) + offset, relative(after, number))
        }
    }
}

fn braces(text: &str) -> Option<(&str, &str, &str)> {
    let (before, rest) = text.split_once('{')?;
    let (inside, after) = rest.split_once('}')?;
    Some((before, inside, after))
}
