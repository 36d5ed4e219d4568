//! Every chore that the documents name is one: the real parser takes it, with these options. Of what is only a pattern
//! (`[--for 10m]`, `NAME…`), each option is looked up.

use std::{fs, path::PathBuf};

use clap::{Command, CommandFactory as _, Parser as _, error::ErrorKind};

use crate::{Arguments, command};

const CALL: &str = "cargo xtask ";

/// The documents: in the root, in the book, and beside what is deployed and tested.
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

/// The chores of a text with their lines: between backquotes, and in lines of blocks.
fn chores(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut is_block = false;
    for (number, line) in (1..).zip(text.lines()) {
        if line.trim_start().starts_with("```") {
            is_block = !is_block;
        } else if is_block {
            let calls = line.split('#').next().unwrap_or_default().split(['&', '|', ';']);
            let chores = calls.filter_map(|call| call.trim().strip_prefix(CALL));
            found.extend(chores.map(|chore| (number, chore.to_owned())));
        } else {
            let spans = line.split('`').skip(1).step_by(2);
            found.extend(
                spans.filter_map(|span| span.strip_prefix(CALL)).map(|chore| (number, chore.to_owned())),
            );
        }
    }
    found
}

/// What is wrong with a chore.
fn problem(chore: &str) -> Option<String> {
    if chore.contains(['[', '|', '…']) {
        return unknown(chore);
    }
    match Arguments::try_parse_from(["cargo xtask"].into_iter().chain(chore.split_whitespace())) {
        Ok(_) => None,
        Err(error) => match error.kind() {
            // What is spoken of may go without what a call needs.
            ErrorKind::DisplayHelp
            | ErrorKind::MissingSubcommand
            | ErrorKind::MissingRequiredArgument
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => None,
            _ => Some(error.to_string()),
        },
    }
}

/// The subcommand or the option of a pattern that there is not.
fn unknown(pattern: &str) -> Option<String> {
    let mut at: Command = Arguments::command();
    for word in pattern.split([' ', '[', ']']).filter(|word| !word.is_empty()) {
        if let Some(option) = word.strip_prefix("--") {
            if !at.get_arguments().any(|argument| argument.get_long() == Some(option)) {
                return Some(format!("there is no option --{option}"));
            }
            continue;
        }
        // What may stand here: subcommands, or the values of an argument without a name.
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

/// The names of end-to-end tests: of `vm test NAME…`.
fn tests_of(chore: &str) -> Vec<&str> {
    let names = chore.strip_prefix("vm test ").unwrap_or_default().split_whitespace();
    names.take_while(|name| !name.starts_with('-') && !name.starts_with('[')).collect()
}

#[test]
fn every_chore_of_the_documents_is_one() {
    let end_to_end = command::root().join("tests/e2e");
    let (mut wrong, mut count) = (Vec::new(), 0);
    for path in documents() {
        for (line, chore) in chores(&fs::read_to_string(&path).unwrap()) {
            count += 1;
            let absent = tests_of(&chore).into_iter().find_map(|name| {
                let (file, function) = name.split_once("::").unwrap_or((name, ""));
                let Ok(text) = fs::read_to_string(end_to_end.join(format!("{file}.rs"))) else {
                    return Some(format!("there is no end-to-end test {file}"));
                };
                let has =
                    text.contains(&format!("fn {function}")) || text.contains(&format!("mod {function}"));
                (!has).then(|| format!("{file}.rs has no test {function}"))
            });
            if let Some(problem) = problem(&chore).or(absent) {
                wrong.push(format!("{}:{line}: {CALL}{chore}\n{problem}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 60, "only {count} chores were found: are the documents read?");
}

#[test]
fn a_wrong_chore_is_found() {
    let text = "Say `cargo xtask tset` or `cargo xtask vm test probes`.\n```\n  cargo xtask dist --uot dist   # all\n\
                git checkout X && cargo xtask dist --out again && diff a b\n```\n| `cargo xtask fuzz [TARGET…] [--fro 10m]` |\n\
                `cargo xtask bench probes\\|scarpe`, `cargo xtask bench probes\\|scrape`\n";
    let found: Vec<_> = chores(text).iter().map(|(line, chore)| (*line, problem(chore).is_some())).collect();
    let expected = [(1, true), (1, false), (3, true), (4, false), (6, true), (7, true), (7, false)];
    assert_eq!(found, expected);
    assert_eq!(tests_of("vm test cluster::life soak --kubernetes DIR"), ["cluster::life", "soak"]);
}
