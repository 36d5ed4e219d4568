//! Checks the commands in the documents: the parser must accept each `cargo xtask` command, and each named test must
//! exist. In a pattern (`[--for 10m]`, `NAME…`), each option must exist.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use clap::{Command, CommandFactory as _, Parser as _, error::ErrorKind};

use crate::{Arguments, command, test};

const CALL: &str = "cargo xtask ";
const UNIT_TEST: &str = "cargo test -p ";

/// Returns the documents: those in the root, in the book, and beside the files for deployment and tests.
fn documents() -> Vec<PathBuf> {
    let root = command::root();
    let mut found: Vec<PathBuf> = fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.retain(|path| path.is_file());
    let mut open = ["docs", "deploy", "dashboards", "tests", "fuzz"].map(|folder| root.join(folder)).to_vec();
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            match entry.file_type().unwrap().is_dir() {
                true if path.ends_with("node_modules") => {}
                true => open.push(path),
                false => found.push(path),
            }
        }
    }
    found.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    found.sort();
    found
}

/// Returns the arguments of each such call in a text, with their lines: between backquotes, and in lines of blocks.
fn calls(text: &str, call: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut is_block = false;
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        } else if is_block {
            let commands = line.split('#').next().unwrap_or_default().split(['&', '|', ';']);
            let of_call = commands.filter_map(|command| command.trim().strip_prefix(call));
            found.extend(of_call.map(|arguments| (number, arguments.to_owned())));
        } else {
            let spans = line.split('`').skip(1).step_by(2);
            let of_call = spans.filter_map(|span| span.trim_start_matches("UPDATE=1 ").strip_prefix(call));
            found.extend(of_call.map(|arguments| (number, arguments.to_owned())));
        }
    }
    found
}

/// Returns the error in a command of this program.
fn problem(command: &str) -> Option<String> {
    if command.contains(['[', '|', '…']) {
        return unknown(command);
    }
    match Arguments::try_parse_from(["cargo xtask"].into_iter().chain(command.split_whitespace())) {
        Ok(_) => None,
        Err(error) => match error.kind() {
            // A mentioned command may omit required arguments.
            ErrorKind::DisplayHelp
            | ErrorKind::MissingSubcommand
            | ErrorKind::MissingRequiredArgument
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => None,
            _ => Some(error.to_string()),
        },
    }
}

/// Returns the subcommand or the option of a pattern that does not exist.
fn unknown(pattern: &str) -> Option<String> {
    let mut at: Command = Arguments::command();
    for word in pattern.split([' ', '[', ']']).filter(|word| !word.is_empty()) {
        if let Some(option) = word.strip_prefix("--") {
            if !at.get_arguments().any(|argument| argument.get_long() == Some(option)) {
                return Some(format!("there is no option --{option}"));
            }
            continue;
        }
        // Allowed here are subcommands, or the values of an argument without a name.
        let values = at.get_positionals().flat_map(clap::Arg::get_possible_values);
        let mut known: Vec<String> = values.map(|value| value.get_name().to_owned()).collect();
        known.extend(at.get_subcommands().map(|command| command.get_name().to_owned()));
        for one in word.split('|').map(|one| one.trim_end_matches('\\')) {
            let is_name = one.starts_with(|c: char| c.is_ascii_lowercase());
            if is_name && !known.is_empty() && !known.iter().any(|name| name == one) {
                return Some(format!("there is no {one}"));
            }
        }
        if let Some(next) = at.find_subcommand(word) {
            at = next.clone();
        }
    }
    None
}

/// Returns the names of end-to-end tests: those of `vm test NAME…`, and of `test NAME…` those that are no stage.
fn tests_of(command: &str) -> Vec<&str> {
    let (names, has_stages) = match (command.strip_prefix("vm test "), command.strip_prefix("test ")) {
        (Some(names), _) => (names, false),
        (None, Some(names)) => (names, true),
        (None, None) => return Vec::new(),
    };
    let names = names.split_whitespace().take_while(|name| !name.starts_with(['-', '[']) && *name != "NAME…");
    names.filter(|name| !has_stages || !test::is_stage(name)).collect()
}

/// Returns the folders of the packages, by name.
fn packages() -> BTreeMap<String, PathBuf> {
    let manifests = command::read(
        std::process::Command::new("git")
            .args(["ls-files", "--", "*Cargo.toml"])
            .current_dir(command::root()),
    )
    .unwrap();
    let mut packages = BTreeMap::new();
    for manifest in manifests.lines().map(|line| command::root().join(line)) {
        let text = fs::read_to_string(&manifest).unwrap();
        let name = text.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
        packages.extend(name.map(|name| (name.to_owned(), manifest.parent().unwrap().to_owned())));
    }
    packages
}

/// Adds the tests in the files of a folder, with their files: `src/guard.rs::a_test`.
fn add_tests(folder: &Path, name: &str, found: &mut Vec<String>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.map(Result::unwrap) {
        let below = format!("{name}/{}", entry.file_name().display());
        if entry.file_type().unwrap().is_dir() {
            add_tests(&entry.path(), &below, found);
        } else if entry.path().extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(entry.path()).unwrap();
            found.extend(tests_in(&text).into_iter().map(|test| format!("{below}::{test}")));
        }
    }
}

/// Returns the functions with an attribute of tests.
fn tests_in(text: &str) -> Vec<&str> {
    let (mut tests, mut is_test) = (Vec::new(), false);
    for line in text.lines().map(str::trim_start) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        } else if let Some(function) = line.trim_start_matches("async ").strip_prefix("fn ") {
            let name = function.split('(').next().filter(|_| is_test);
            tests.extend(name);
            is_test = false;
        }
    }
    tests
}

/// Returns the error in the arguments of `cargo test -p`: a package, `--test` with a target, and a part of the names of
/// tests.
fn problem_of_unit_test(arguments: &str, packages: &BTreeMap<String, PathBuf>) -> Option<String> {
    let mut words = arguments.split_whitespace();
    let package = words.next()?;
    let Some(folder) = packages.get(package) else { return Some(format!("there is no package {package}")) };
    let (mut target, mut filter) = (None, None);
    while let Some(word) = words.next() {
        if word == "--test" {
            target = words.next();
        } else {
            filter = Some(word);
        }
    }
    if let Some(target) = target
        && !folder.join(format!("tests/{target}.rs")).is_file()
    {
        return Some(format!("{package} has no test {target}"));
    }
    let filter = filter?;
    let mut tests = Vec::new();
    for part in ["src", "tests"] {
        add_tests(&folder.join(part), part, &mut tests);
    }
    // Modules of a target are in the folder of its name.
    let is_of_target = |test: &str| {
        target.is_none_or(|target| {
            [format!("tests/{target}.rs"), format!("tests/{target}/")].iter().any(|of| test.starts_with(of))
        })
    };
    let is_there = tests.iter().any(|test| is_of_target(test) && test.contains(filter));
    (!is_there).then(|| format!("{package} has no test {filter}"))
}

#[test]
fn documented_commands_are_valid() {
    let end_to_end = command::root().join("tests/e2e");
    let (mut wrong, mut count) = (Vec::new(), 0);
    for path in documents() {
        for (line, command) in calls(&fs::read_to_string(&path).unwrap(), CALL) {
            count += 1;
            let absent = tests_of(&command).into_iter().find_map(|name| {
                let (file, function) = name.split_once("::").unwrap_or((name, ""));
                let Ok(text) = fs::read_to_string(end_to_end.join(format!("{file}.rs"))) else {
                    return Some(format!("there is no end-to-end test {file}"));
                };
                let has =
                    text.contains(&format!("fn {function}")) || text.contains(&format!("mod {function}"));
                (!has).then(|| format!("{file}.rs has no test {function}"))
            });
            if let Some(problem) = problem(&command).or(absent) {
                wrong.push(format!("{}:{line}: {CALL}{command}\n{problem}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 60, "only {count} chores were found: are the documents read?");
}

#[test]
fn finds_invalid_commands() {
    let text = "Say `cargo xtask tset` or `cargo xtask vm test probes`.\n```\n  cargo xtask dist --uot dist   # all\n\
                git checkout X && cargo xtask dist --out again && diff a b\n```\n| `cargo xtask fuzz [TARGET…] [--fro 10m]` |\n\
                `cargo xtask bench probes\\|scarpe`, `cargo xtask bench probes\\|scrape`\n";
    let found: Vec<_> =
        calls(text, CALL).iter().map(|(line, command)| (*line, problem(command).is_some())).collect();
    let expected = [(1, true), (1, false), (3, true), (4, false), (6, true), (7, true), (7, false)];
    assert_eq!(found, expected);
    assert_eq!(tests_of("vm test cluster::life soak --kubernetes DIR"), ["cluster::life", "soak"]);
    assert_eq!(tests_of("test herd:: fuzz fuss --kernel 6.12"), ["herd::", "fuss"]);
    assert!(tests_of("test --repeat N [NAME…]").is_empty());
}

#[test]
fn documented_unit_tests_exist() {
    let (packages, mut wrong, mut count) = (packages(), Vec::new(), 0);
    for path in documents() {
        for (line, arguments) in calls(&fs::read_to_string(&path).unwrap(), UNIT_TEST) {
            count += 1;
            if let Some(problem) = problem_of_unit_test(&arguments, &packages) {
                wrong.push(format!("{}:{line}: {UNIT_TEST}{arguments}: {problem}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 60, "only {count} unit tests were found: are the documents read?");
}

#[test]
fn finds_missing_unit_tests() {
    let packages = packages();
    let problem = |arguments| problem_of_unit_test(arguments, &packages);
    for right in
        ["numaward-http", "numaward-daemon --test http refuses_too_large", "numaward-store power_loss"]
    {
        assert_eq!(problem(right), None);
    }
    for (wrong, words) in [
        ("numaward-htp", "there is no package numaward-htp"),
        ("numaward-daemon --test htp", "numaward-daemon has no test htp"),
        ("numaward-store power_los_s", "numaward-store has no test power_los_s"),
        ("numaward-daemon --test http power_loss", "numaward-daemon has no test power_loss"),
    ] {
        assert_eq!(problem(wrong).as_deref(), Some(words));
    }
}
