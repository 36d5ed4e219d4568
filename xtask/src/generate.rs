//! `cargo xtask generate`: regenerates all generated files that are checked in.
//!
//! Some generators are tests: they compare the file with the generated text, and write it instead if `UPDATE` is set
//! (`assert_golden` of `tests/support`). Other generators are tasks of this program.
//!
//! With `--check`, the generators run and must change no file; otherwise the differences are printed and undone. A test
//! in an ordinary run finds an outdated file as well. This check also finds a generator that writes another text than
//! the test compares, and a test that compares nothing.
//!
//! Files that need virtual machines are not included: `tests/kernels/seen.json`, and the pictures of the book.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use numaward_tests_support::{CI, UPDATE, is_ci};

use crate::{build, command, dashboards, evidence, manifests, units};

/// Maximum number of printed lines of the differences.
const MAX_SHOWN_LINES: usize = 60;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Fails if a file changes, and leaves the files as they were
    #[arg(long)]
    check: bool,
}

/// A test that writes files if `UPDATE` is set.
struct Generator {
    /// `--lib`, or the name of an integration test.
    target: &'static str,
    /// Name of the test function, with its modules.
    test: &'static str,
    /// Paths of the files from the root of the checkout.
    files: &'static [&'static str],
}

const GENERATORS: &[Generator] = &[
    Generator {
        target: "http",
        test: "openapi_document_is_current",
        files: &["userspace/daemon/openapi.json"],
    },
    Generator {
        target: "http",
        test: "reference::routes_reference_is_current",
        files: &["docs/reference/http.md"],
    },
    Generator {
        target: "metrics",
        test: "metrics_reference_is_current",
        files: &["docs/reference/metrics.md"],
    },
    Generator { target: "kernels", test: "kernels_page_is_current", files: &["docs/reference/kernels.md"] },
    Generator {
        target: LIBRARIES,
        test: "reference::the_page_has_every_key",
        files: &["docs/configuration.md"],
    },
    Generator {
        target: LIBRARIES,
        test: "kubernetes::claim_template::tests::manifest_keeps_everything_else",
        files: &["userspace/daemon/tests/claim_template/claims.yaml"],
    },
    Generator {
        target: LIBRARIES,
        test: "kubernetes::claim_template::tests::policy_selects_pods_by_label",
        files: &["userspace/daemon/tests/claim_template/policy.yaml"],
    },
    Generator {
        target: "cli",
        test: "the_help_is_checked_in",
        files: &["userspace/numaward/tests/help.txt"],
    },
    Generator {
        target: "top",
        test: "each_screen_looks_as_checked_in",
        files: &["userspace/numaward/tests/screens.txt"],
    },
    Generator {
        target: "top",
        test: "printed_text_is_as_checked_in",
        files: &["userspace/numaward/tests/printed.txt"],
    },
];
/// Option that selects the unit tests in the libraries.
const LIBRARIES: &str = "--lib";
/// Files that tasks of this program write, as patterns of git.
const TASK_FILES: &[&str] = &["dashboards/grafana/*.json", manifests::OPERATOR_RULES, evidence::PAGE];

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    if arguments.check {
        return check();
    }
    ensure!(!is_ci(), "{CI} is set: `cargo xtask generate --check` changes no file");
    generate()
}

/// Fails if a generator changes a file, and restores the file.
pub(crate) fn check() -> Result<()> {
    check_in(command::root(), &patterns(), generate)?;
    println!("all generated files are up to date");
    Ok(())
}

/// Runs the generators of a checkout, which may write files of these patterns, and fails if they change one.
fn check_in(root: &Path, patterns: &[&str], generate: impl FnOnce() -> Result<()>) -> Result<()> {
    let before = changes(root, patterns)?;
    ensure!(
        before.is_empty(),
        "generated files have changes that are not committed, so new ones could not be distinguished from them: {}",
        before.join(", ")
    );
    let generated = generate();
    let changed = changes(root, patterns)?;
    if changed.is_empty() {
        return generated;
    }
    let diff = git(root, &["diff", "--"]).args(&changed).output().context("cannot run git")?;
    restore(root, &changed)?;
    generated?;
    let diff = String::from_utf8_lossy(&diff.stdout);
    for line in diff.lines().take(MAX_SHOWN_LINES) {
        eprintln!("{line}");
    }
    bail!("generated files are out of date; `cargo xtask generate` makes them anew: {}", changed.join(", "))
}

/// Runs all generators.
fn generate() -> Result<()> {
    dashboards::run(command::root())?;
    manifests::write_rules(command::root())?;
    evidence::write(command::root())?;
    let targets: BTreeSet<_> = GENERATORS.iter().map(|generator| generator.target).collect();
    let targets = targets.into_iter().flat_map(|target| match target {
        LIBRARIES => vec![LIBRARIES],
        test => vec!["--test", test],
    });
    let mut text = String::new();
    for test in build::tests(&targets.collect::<Vec<_>>())? {
        let mut program = units::command(&test);
        program.arg("--exact").args(GENERATORS.iter().map(|generator| generator.test));
        // In CI, a test refuses to write; here the files are compared afterwards.
        program.env(UPDATE, "1").env_remove(CI).stdin(Stdio::null()).stderr(Stdio::inherit());
        let output = program.output().with_context(|| format!("cannot run {}", test.path.display()))?;
        let printed = String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            eprintln!("{printed}");
            bail!("the tests that write generated files failed ({})", output.status);
        }
        text.push_str(&printed);
    }
    let missing = not_run(&text);
    ensure!(missing.is_empty(), "tests that write generated files did not run: {}", missing.join(", "));
    Ok(())
}

/// Returns the generators that are not reported as passed, by the names of their tests.
fn not_run(output: &str) -> Vec<&'static str> {
    let passed: BTreeSet<_> =
        output.lines().filter_map(|line| line.strip_prefix("test ")?.strip_suffix(" ... ok")).collect();
    let tests = GENERATORS.iter().map(|generator| generator.test);
    tests.filter(|test| !passed.contains(test)).collect()
}

/// Returns all generated files, as patterns of git.
fn patterns() -> Vec<&'static str> {
    let files = GENERATORS.iter().flat_map(|generator| generator.files);
    files.chain(TASK_FILES).copied().collect()
}

fn git(root: &Path, arguments: &[&str]) -> Command {
    let mut git = Command::new("git");
    git.args(arguments).current_dir(root);
    git
}

/// Returns the files among these that differ from the last commit, including new ones.
fn changes(root: &Path, patterns: &[&str]) -> Result<Vec<String>> {
    let mut status =
        git(root, &["status", "--porcelain", "--no-renames", "-z", "--untracked-files=all", "--"]);
    let text = command::read(status.args(patterns))?;
    // Two letters and a space precede each name.
    Ok(text.split_terminator('\0').filter_map(|entry| entry.get(3..)).map(str::to_owned).collect())
}

/// Restores files that were as committed.
fn restore(root: &Path, files: &[String]) -> Result<()> {
    let tracked = command::read(git(root, &["ls-files", "-z", "--"]).args(files))?;
    let tracked: BTreeSet<_> = tracked.split_terminator('\0').collect();
    if !tracked.is_empty() {
        command::read(git(root, &["restore", "--worktree", "--"]).args(&tracked))?;
    }
    for new in files.iter().filter(|file| !tracked.contains(file.as_str())) {
        fs::remove_file(root.join(new)).with_context(|| format!("cannot remove {new}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_files_are_documented() {
        let table = fs::read_to_string(command::root().join("CONTRIBUTING.md")).unwrap();
        for pattern in patterns() {
            let files = command::read(git(command::root(), &["ls-files", "--"]).arg(pattern)).unwrap();
            assert!(!files.is_empty(), "{pattern}");
            assert!(table.contains(&format!("`{pattern}`")), "CONTRIBUTING.md does not name {pattern}");
        }
    }

    #[test]
    fn golden_tests_are_generators() {
        let mut grep =
            git(command::root(), &["grep", "--count", "-e", "assert_golden(", "-e", "Sections::read("]);
        let written = command::read(grep.args(["--", "userspace"])).unwrap();
        let count = |line: &str| line.rsplit_once(':').unwrap().1.parse::<usize>().unwrap();
        let calls: usize = written.lines().map(count).sum();
        // One call reads both files of `top`.
        assert_eq!(calls, GENERATORS.len() - 1, "{written}");
    }

    #[test]
    fn finds_generators_without_run() {
        let all = |verdict: &str| {
            let lines = GENERATORS.iter().map(|generator| format!("test {} ... {verdict}", generator.test));
            lines.collect::<Vec<_>>().join("\n")
        };
        assert!(not_run(&all("ok")).is_empty());
        assert_eq!(not_run(&all("ignored")).len(), GENERATORS.len());
        let first = GENERATORS[0].test;
        assert_eq!(not_run(&all("ok").replace(first, "renamed")), [first]);
    }

    /// Creates a checkout with two generated files and another one.
    fn checkout() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in ["a.json", "b.json", "own.txt"] {
            fs::write(dir.path().join(file), file).unwrap();
        }
        for arguments in [
            &["init", "--quiet"][..],
            &["add", "."],
            &["-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", "m"],
        ] {
            command::read(&mut git(dir.path(), arguments)).unwrap();
        }
        dir
    }

    #[test]
    fn check_undoes_changes() {
        let dir = checkout();
        let root = dir.path();
        let check = |generate: &dyn Fn() -> Result<()>| {
            let result = check_in(root, &["*.json"], generate);
            let all = changes(root, &["."]).unwrap();
            assert!(all.is_empty() || all == ["own.txt"], "{all:?}");
            result.map_err(|error| format!("{error:#}"))
        };
        let write = |name: &str, text: &str| Ok(fs::write(root.join(name), text)?);
        assert_eq!(check(&|| Ok(())), Ok(()));
        assert_eq!(check(&|| write("a.json", "a.json")), Ok(()), "the same text");
        assert_eq!(check(&|| write("own.txt", "other")), Ok(()), "no generated file");
        let changed = check(&|| write("b.json", "other")).unwrap_err();
        assert!(changed.ends_with("makes them anew: b.json"), "{changed}");
        let new = check(&|| write("c.json", "new")).unwrap_err();
        assert!(new.ends_with("makes them anew: c.json"), "{new}");
        let deleted = check(&|| Ok(fs::remove_file(root.join("a.json"))?)).unwrap_err();
        assert!(deleted.ends_with("makes them anew: a.json"), "{deleted}");
        let failed = check(&|| write("a.json", "half").and_then(|()| bail!("no room"))).unwrap_err();
        assert_eq!(failed, "no room");
    }

    #[test]
    fn keeps_changes_of_user() {
        let dir = checkout();
        fs::write(dir.path().join("a.json"), "edited").unwrap();
        let refused =
            check_in(dir.path(), &["*.json"], || panic!("the generators must not run")).unwrap_err();
        assert!(refused.to_string().ends_with("distinguished from them: a.json"), "{refused}");
        assert_eq!(fs::read_to_string(dir.path().join("a.json")).unwrap(), "edited");
    }
}
