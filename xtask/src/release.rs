//! `cargo xtask release VERSION`: checks that a version can be released, and makes the released files and the tag.
//!
//! All checks are made and their results printed, even after one has failed. Only then are the files built, signed and
//! put beside notes from the changelog, and the commit is tagged. With `--dry-run`, the files are signed with a
//! temporary key, there is no tag, and failed checks stop the release only at its end.
//!
//! Invariant: nothing is pushed or uploaded. The last lines list the remaining steps.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use numaward_vm::Arch;
use regex::Regex;

use crate::command;
use crate::dist::{self, Signer, changelog};
use crate::setup::{self, Part};

/// Tests that a release has to pass. They take hours, so they are not run here.
const TESTS: &str = ".ci/run && .ci/rest";
const NOTES: &str = "release-notes.md";

#[derive(Args)]
pub(crate) struct ReleaseArguments {
    /// The version, as Cargo.toml has it
    version: String,
    /// Makes all files, but no tag, and signs them with a temporary key
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    what: dist::DistOptions,
    #[command(flatten)]
    key: dist::KeyArguments,
}

pub(crate) fn main(arguments: &ReleaseArguments) -> Result<()> {
    let ReleaseArguments { version, dry_run, what, key } = arguments;
    ensure!(
        *dry_run || !what.has_programs(),
        "a release is built from its commit: --program is only for --dry-run"
    );
    let checkout = Checkout { root: command::root(), version };
    let problems = checkout.check(dist::VERSION);
    setup::ensure(&[Part::Gpg])?;
    let signer = if *dry_run {
        println!("dry run: signed with a key that is gone afterwards; no tag is made");
        Signer::throw_away()?
    } else {
        ensure!(problems.is_empty(), "{} failed: nothing was made", count(problems.len()));
        Signer::of_keyring(key.get().context("a release is signed: give --key KEY")?)?
    };
    // The manifests let pods run on both processors.
    let (out, made) = what.make(Some(&signer), &Arch::ALL)?;
    let notes = out.join(NOTES);
    fs::write(&notes, checkout.notes(signer.fingerprint())?)?;
    for file in made.iter().chain([&notes]) {
        println!("{}", file.display());
    }
    println!("{}", out.join("apt").display());
    let tag = checkout.tag();
    if *dry_run {
        println!("would tag {} as {tag}", checkout.commit()?);
        ensure!(
            problems.is_empty(),
            "{} failed: a release would have stopped before it built",
            count(problems.len())
        );
        return Ok(());
    }
    checkout.make_tag(&signer)?;
    println!("tagged {} as {tag}, here and nowhere else. What is left to do:", checkout.commit()?);
    println!("  git push origin {tag}");
    println!(
        "  upload these files, with {NOTES} as the text, and copy the folder apt to where the repository is served"
    );
    println!("  keep apt/pool for the next release: --pool DIR");
    Ok(())
}

fn is_markdown(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "md")
}

fn count(problems: usize) -> String {
    if problems == 1 { "1 check".to_owned() } else { format!("{problems} checks") }
}

/// The checkout to release.
struct Checkout<'a> {
    root: &'a Path,
    version: &'a str,
}

impl Checkout<'_> {
    /// Makes all checks and prints their results; returns the problems.
    fn check(&self, built: &str) -> Vec<String> {
        let mut problems = Vec::new();
        for (what, result) in [
            ("Cargo.toml has this version", self.is_built(built)),
            ("no other file names another one", self.versions()),
            ("the changelog has it, with a date", self.changelog()),
            ("all changes are committed", self.is_clean()),
            ("the tag is new", self.is_new()),
        ] {
            match result {
                Ok(()) => println!("ok      {what}"),
                Err(error) => {
                    println!("FAILED  {what}: {error:#}");
                    problems.push(format!("{error:#}"));
                }
            }
        }
        println!("to be checked by you: `{TESTS}` passes on this commit");
        problems
    }

    fn is_built(&self, built: &str) -> Result<()> {
        ensure!(
            self.version == built,
            "it has {built}: change workspace.package.version, then run cargo check"
        );
        Ok(())
    }

    /// Checks the versions in names of files, tags of images, the chart, and the API's document.
    fn versions(&self) -> Result<()> {
        let in_text = Regex::new(r"numaward[-_:]([0-9]+\.[0-9]+\.[0-9]+)")?;
        let in_manifests = Regex::new(r"(?m)^ *(?:version|appVersion|newTag): ([0-9]+\.[0-9]+\.[0-9]+)$")?;
        let in_document = Regex::new(r#""version": "([0-9]+\.[0-9]+\.[0-9]+)""#)?;
        let mut wrong = Vec::new();
        for path in self.git(&["ls-files"])?.lines() {
            let is_page = is_markdown(path) && !path.starts_with("tests/") && path != "CHANGELOG.md";
            let patterns: &[&Regex] = match path {
                _ if path.starts_with("deploy/") => &[&in_text, &in_manifests],
                _ if path.ends_with("/openapi.json") => &[&in_document],
                _ if is_page => &[&in_text],
                _ => &[],
            };
            let file = self.root.join(path);
            // The chart has links to folders.
            if patterns.is_empty() || !file.is_file() {
                continue;
            }
            let text = fs::read_to_string(&file).with_context(|| format!("cannot read {path}"))?;
            for found in patterns.iter().flat_map(|pattern| pattern.captures_iter(&text)) {
                let version = found.get(1).context("each pattern has a version")?;
                if version.as_str() != self.version {
                    let line = text[..version.start()].matches('\n').count() + 1;
                    wrong.push(format!("{path}:{line} has {}", version.as_str()));
                }
            }
        }
        ensure!(wrong.is_empty(), "{}", wrong.join(", "));
        Ok(())
    }

    fn changelog(&self) -> Result<()> {
        let newest =
            changelog::read_from(self.root)?.into_iter().next().context("CHANGELOG.md has no version")?;
        ensure!(newest.version == self.version, "the newest version in CHANGELOG.md is {}", newest.version);
        ensure!(
            newest.date.is_some(),
            "CHANGELOG.md has no day for it: write the day instead of `unreleased`"
        );
        Ok(())
    }

    fn is_clean(&self) -> Result<()> {
        let changed = self.git(&["status", "--porcelain"])?;
        let Some(first) = changed.lines().next() else { return Ok(()) };
        bail!("`git status` shows {} changed files, the first is {}", changed.lines().count(), first.trim());
    }

    fn is_new(&self) -> Result<()> {
        let tag = self.tag();
        ensure!(self.git(&["tag", "--list", &tag])?.is_empty(), "{tag} is there already");
        Ok(())
    }

    fn tag(&self) -> String {
        format!("v{}", self.version)
    }

    fn commit(&self) -> Result<String> {
        Ok(self.git(&["rev-parse", "--short", "HEAD"])?.trim().to_owned())
    }

    /// Returns the text of the release: the changes, and how to verify a download.
    fn notes(&self, fingerprint: &str) -> Result<String> {
        let version = self.version;
        let release = changelog::read_from(self.root)?.into_iter().find(|release| release.version == version);
        let body = release.with_context(|| format!("CHANGELOG.md has no version {version}"))?.body;
        Ok(format!(
            "# numaward {version}\n\n{body}\n\n## Verify a download\n\nThe key is `{fingerprint}`.\n\n```\n\
             gpg --import numaward.asc\ngpg --verify SHA256SUMS.asc SHA256SUMS\n\
             sha256sum --check --ignore-missing SHA256SUMS\n```\n"
        ))
    }

    fn make_tag(&self, signer: &Signer) -> Result<()> {
        let message = format!("numaward {}", self.version);
        self.git(&["tag", "--local-user", signer.fingerprint(), "--message", &message, &self.tag()]).map(drop)
    }

    fn git(&self, arguments: &[&str]) -> Result<String> {
        command::read(Command::new("git").args(arguments).current_dir(self.root))
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    const FILES: &[(&str, &str)] = &[
        (
            "CHANGELOG.md",
            "# Changelog\n\n## [0.2.0] - 2026-12-01\n\n- New.\n\n## [0.1.0] - 2026-11-01\n\n- First.\n",
        ),
        ("README.md", "`apt install ./numaward_0.2.0_amd64.deb`, and Kubernetes 1.36.0\n"),
        ("deploy/chart.yaml", "version: 0.2.0\nappVersion: 0.2.0\nkubeVersion: 1.26.0\n"),
        ("daemon/openapi.json", "{\"version\": \"0.2.0\"}\n"),
        ("tests/old/README.md", "numaward-0.1.0 wrote this\n"),
    ];

    /// Creates a repository with these files, committed.
    fn repository() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in FILES {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let checkout = Checkout { root: folder.path(), version: "0.2.0" };
        checkout.git(&["init", "--quiet"]).unwrap();
        commit(&checkout);
        folder
    }

    fn commit(checkout: &Checkout<'_>) {
        checkout.git(&["add", "--all"]).unwrap();
        let who = ["-c", "user.name=x", "-c", "user.email=x@numaward.invalid", "-c", "commit.gpgsign=false"];
        checkout.git(&[&who[..], &["commit", "--quiet", "--message", "x"]].concat()).unwrap();
    }

    fn write(folder: &TempDir, path: &str, text: &str) {
        fs::write(folder.path().join(path), text).unwrap();
    }

    #[test]
    fn ready_commit_has_no_problem() {
        let folder = repository();
        let checkout = Checkout { root: folder.path(), version: "0.2.0" };
        assert_eq!(checkout.check("0.2.0"), <Vec<String>>::new());
        let notes = checkout.notes("FINGERPRINT").unwrap();
        assert!(notes.starts_with("# numaward 0.2.0\n\n- New.\n\n## Verify"), "{notes}");
        assert!(notes.contains("FINGERPRINT") && !notes.contains("First"), "{notes}");
    }

    #[test]
    fn each_check_can_fail() {
        type CheckoutChange = fn(&TempDir, &Checkout<'_>);
        let cases: [(&str, CheckoutChange); 7] = [
            ("README.md:1 has 0.1.0", |folder, checkout| {
                write(folder, "README.md", "numaward_0.1.0_amd64.deb\n");
                commit(checkout);
            }),
            ("deploy/chart.yaml:2 has 0.1.9", |folder, checkout| {
                write(folder, "deploy/chart.yaml", "version: 0.2.0\nappVersion: 0.1.9\n");
                commit(checkout);
            }),
            ("daemon/openapi.json:1 has 0.1.0", |folder, checkout| {
                write(folder, "daemon/openapi.json", "{\"version\": \"0.1.0\"}\n");
                commit(checkout);
            }),
            ("write the day", |folder, checkout| {
                write(folder, "CHANGELOG.md", "## [0.2.0] - unreleased\n");
                commit(checkout);
            }),
            ("the newest version in CHANGELOG.md is 0.3.0", |folder, checkout| {
                write(folder, "CHANGELOG.md", "## [0.3.0] - 2026-12-02\n\n## [0.2.0] - 2026-12-01\n");
                commit(checkout);
            }),
            ("the first is ?? new", |folder, _| write(folder, "new", "")),
            ("v0.2.0 is there already", |_, checkout| {
                checkout.git(&["-c", "tag.gpgsign=false", "tag", "v0.2.0"]).unwrap();
            }),
        ];
        for (problem, change) in cases {
            let folder = repository();
            let checkout = Checkout { root: folder.path(), version: "0.2.0" };
            change(&folder, &checkout);
            let problems = checkout.check("0.2.0");
            assert!(problems.len() == 1 && problems[0].contains(problem), "{problem}: {problems:?}");
        }
        let folder = repository();
        let checkout = Checkout { root: folder.path(), version: "0.2.0" };
        assert!(checkout.check("0.1.0")[0].contains("it has 0.1.0"));
    }

    #[test]
    fn checkout_names_one_version() {
        Checkout { root: command::root(), version: dist::VERSION }.versions().unwrap();
    }
}
