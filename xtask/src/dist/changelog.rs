//! `CHANGELOG.md`, and its conversion for packages and releases.
//!
//! The format is that of Keep a Changelog: a heading `## [VERSION] - DATE` for each version, the newest first, with
//! `unreleased` for an unknown date; below it text, and lists of changes.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::MAINTAINER;
use crate::command;

const FILE: &str = "CHANGELOG.md";
const UNRELEASED: &str = "unreleased";
/// Maximum number of characters in a line of Debian's changelogs.
const WIDTH: usize = 80;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ChangelogRelease {
    pub(crate) version: String,
    /// Date as `YYYY-MM-DD`; `None` before the release.
    pub(crate) date: Option<String>,
    /// Text below the heading.
    pub(crate) body: String,
}

/// Returns all versions in this checkout, the newest first.
pub(super) fn read() -> Result<Vec<ChangelogRelease>> {
    read_from(command::root())
}

/// Returns all versions in the checkout at `root`, the newest first.
pub(crate) fn read_from(root: &Path) -> Result<Vec<ChangelogRelease>> {
    let text = fs::read_to_string(root.join(FILE)).map_err(anyhow::Error::from);
    text.and_then(|text| parse(&text)).with_context(|| format!("cannot read {FILE}"))
}

fn parse(text: &str) -> Result<Vec<ChangelogRelease>> {
    let mut releases: Vec<ChangelogRelease> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(heading) = line.strip_prefix("## ") {
            let wanted = "`## [VERSION] - YYYY-MM-DD` or `## [VERSION] - unreleased`";
            let (version, date) = heading
                .strip_prefix('[')
                .and_then(|rest| rest.split_once("] - "))
                .filter(|(_, date)| *date == UNRELEASED || is_date(date))
                .with_context(|| format!("line {number} is {line:?}, not {wanted}"))?;
            let date = (date != UNRELEASED).then(|| date.to_owned());
            releases.push(ChangelogRelease { version: version.to_owned(), date, body: String::new() });
        } else if let Some(release) = releases.last_mut() {
            release.body.push_str(line);
            release.body.push('\n');
        }
    }
    for release in &mut releases {
        release.body = release.body.trim().to_owned();
    }
    anyhow::ensure!(!releases.is_empty(), "it has no version");
    Ok(releases)
}

fn is_date(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() == 10
        && bytes.iter().enumerate().all(|(at, byte)| match at {
            4 | 7 => *byte == b'-',
            _ => byte.is_ascii_digit(),
        })
}

impl ChangelogRelease {
    /// Returns the changes, each as one line without links.
    pub(crate) fn changes(&self) -> Vec<String> {
        let mut changes: Vec<String> = Vec::new();
        let mut is_open = false;
        for line in self.body.lines() {
            if let Some(change) = line.strip_prefix("- ") {
                changes.push(change.trim().to_owned());
                is_open = true;
            } else if line.starts_with("  ") && is_open {
                if let Some(change) = changes.last_mut() {
                    change.push(' ');
                    change.push_str(line.trim());
                }
            } else {
                is_open = false;
            }
        }
        changes.iter().map(|change| without_links(change)).collect()
    }

    /// Returns the time of the release in seconds since 1970; `epoch` before it.
    pub(crate) fn time(&self, epoch: u64) -> Result<u64> {
        let Some(date) = &self.date else { return Ok(epoch) };
        let seconds = command::read(Command::new("date").args(["--utc", "+%s", "--date", date]))?;
        seconds.trim().parse().with_context(|| format!("{FILE}: {date} is no day"))
    }
}

/// Replaces `[text](address)` by `text`.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('[') {
        let link = after.split_once("](").and_then(|(name, after)| Some((name, after.split_once(')')?.1)));
        plain.push_str(before);
        let (name, after) = link.unwrap_or(("[", after));
        plain.push_str(name);
        rest = after;
    }
    plain + rest
}

/// Formats all versions as in Debian's policy (section 4.4).
pub(crate) fn debian(releases: &[ChangelogRelease], epoch: u64) -> Result<String> {
    let mut text = String::new();
    for release in releases {
        writeln!(text, "numaward ({}) stable; urgency=medium\n", release.version)?;
        for change in release.changes() {
            text.push_str(&wrapped(&change));
        }
        writeln!(text, "\n -- {MAINTAINER}  {}\n", rfc5322(release.time(epoch)?)?)?;
    }
    Ok(text)
}

/// Formats a time as in mail.
pub(crate) fn rfc5322(epoch: u64) -> Result<String> {
    let mut date = Command::new("date");
    date.env("LC_ALL", "C").args(["--utc", "+%a, %d %b %Y %H:%M:%S +0000", "--date"]);
    Ok(command::read(date.arg(format!("@{epoch}")))?.trim().to_owned())
}

fn wrapped(change: &str) -> String {
    let mut text = String::new();
    let mut line = String::from("  *");
    for word in change.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > WIDTH {
            text.push_str(&line);
            text.push('\n');
            line.replace_range(.., "   ");
        }
        line.push(' ');
        line.push_str(word);
    }
    text + &line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Changelog\n\nWhat it is.\n\n## [0.2.0] - unreleased\n\n### Added\n\nNews:\n\n\
        - One thing, which takes\n  two lines: [why](docs/why.md).\n- Another [thing].\n\nMore.\n  no change\n\n\
        ## [0.1.0] - 2023-11-14\n\nThe first.\n";

    #[test]
    fn reads_versions_with_changes() {
        let [new, old] = &parse(TEXT).unwrap()[..] else { panic!("two versions") };
        assert_eq!((new.version.as_str(), &new.date), ("0.2.0", &None));
        assert!(new.body.starts_with("### Added\n") && new.body.ends_with("no change"), "{}", new.body);
        assert_eq!(new.changes(), ["One thing, which takes two lines: why.", "Another [thing]."]);
        assert_eq!((old.date.as_deref(), old.body.as_str()), (Some("2023-11-14"), "The first."));
        assert_eq!((new.time(7).unwrap(), old.time(7).unwrap()), (7, 1_699_920_000));
    }

    #[test]
    fn refuses_malformed_heading() {
        for (heading, named) in [
            ("## 0.1.0", "line 1"),
            ("## [0.1.0] - soon", "soon"),
            ("## [0.1.0] - 2023/11/14", "YYYY-MM-DD"),
            ("none", "no version"),
        ] {
            let error = format!("{:#}", parse(heading).unwrap_err());
            assert!(error.contains(named), "{heading}: {error}");
        }
    }

    #[test]
    fn formats_changelog_for_debian() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("changelog");
        for releases in [parse(TEXT).unwrap(), read().unwrap()] {
            let text = debian(&releases, 1_700_000_000).unwrap();
            let mut changes = text.lines().filter(|line| !line.starts_with(" -- "));
            assert!(changes.all(|line| line.chars().count() <= WIDTH), "{text}");
            fs::write(&path, &text).unwrap();
            let mut parse = Command::new("dpkg-parsechangelog");
            if command::find("dpkg-parsechangelog").is_none() {
                return numaward_tests_support::skip_outside_ci(
                    "dpkg-parsechangelog (Debian package dpkg-dev) is missing",
                );
            }
            let read = command::read(parse.args(["--all", "--file"]).arg(&path)).unwrap();
            assert!(read.contains(&format!("Version: {}\n", releases[0].version)), "{read}");
            assert!(read.contains("Date: Tue, 14 Nov 2023 22:13:20 +0000\n"), "{read}");
        }
    }
}
