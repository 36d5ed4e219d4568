//! Tests of the documents: this program's parser accepts each command that they show, and the experimental features are
//! those of `docs/evidence.md` everywhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use clap::{CommandFactory as _, Parser as _, error::ErrorKind};
use serde_json::Value;

use crate::args::Cli;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns all documents: the book, the pages in the root, and the files for deployment and import, as their comments
/// and messages contain commands.
fn documents() -> Vec<PathBuf> {
    let pages = ["CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"].map(|page| root().join(page));
    let folders = ["docs", "deploy", "dashboards"].map(|folder| root().join(folder));
    let (mut found, mut open) = (pages.to_vec(), folders.to_vec());
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md" || extension == "yaml") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// Splits a command into words like a shell, up to the next command; `None` if a quote is not closed.
fn words(command: &str) -> Option<Vec<String>> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let mut rest = command.chars().peekable();
    while let Some(c) = rest.next() {
        match c {
            '\'' | '"' => loop {
                match rest.next()? {
                    end if end == c => {
                        word.get_or_insert_default();
                        break;
                    }
                    inside => word.get_or_insert_default().push(inside),
                }
            },
            '#' if word.is_none() => break,
            '|' | ';' | '&' | '>' => break,
            c if c.is_whitespace() => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Some(words)
}

/// Returns the commands of a document, each with its line and whether it is complete: in blocks of a shell, and between
/// backquotes.
fn commands(text: &str) -> Vec<(usize, String, bool)> {
    let mut found = Vec::new();
    let mut block: Option<bool> = None;
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        if let Some(kind) = line.trim_start().strip_prefix("```") {
            block = match block {
                Some(_) => None,
                None => Some(matches!(kind.trim(), "" | "sh" | "bash" | "console" | "shell")),
            };
            continue;
        }
        match block {
            Some(true) => {
                let mut whole = line.to_owned();
                while let Some(begun) = whole.strip_suffix('\\') {
                    let Some((_, next)) = lines.next() else { break };
                    whole = format!("{begun} {}", next.trim());
                }
                found.extend(command_in_line(&whole).map(|command| (number, command, true)));
            }
            Some(false) => {}
            None => {
                let spans = line.split('`').skip(1).step_by(2);
                let ours = spans.filter(|span| span.starts_with("numaward ") && !span.contains(['…', ',']));
                found.extend(ours.map(|span| (number, span.to_owned(), false)));
            }
        }
    }
    found
}

/// Returns the part of a line that is a command of numaward, without the program that runs it. Lines with an arrow are
/// diagrams.
fn command_in_line(line: &str) -> Option<String> {
    let line = Some(line.trim_start()).filter(|line| !line.contains("-->"))?;
    let line = line.strip_prefix("$ ").or_else(|| line.strip_prefix("# ")).unwrap_or(line);
    for before in ["cargo run -q -p numaward -- ", "cargo run -p numaward -- "] {
        if let Some(rest) = line.strip_prefix(before) {
            return Some(format!("numaward {rest}"));
        }
    }
    // A program that runs a command: `sudo`, `kubectl exec … --`, `docker run IMAGE`, or a variable.
    let is_runner = |word: &str| {
        word.contains('=')
            || ["sudo", "kubectl", "watch", "time", "docker", "podman", "systemd-run", "nsenter"]
                .contains(&word)
    };
    let at = line.find("numaward ").filter(|at| *at == 0 || line[..*at].ends_with([' ', '/', '(']))?;
    let runs = line[..at].split_whitespace().next();
    let is_ours = at == 0
        || runs.is_some_and(|word| is_runner(word) || word.ends_with('/') && line[..at].trim() == word);
    // `kubectl -n numaward exec … -- numaward status`: the command is after the last `--`.
    let at = if runs == Some("kubectl") { line.rfind("-- numaward ")? + 3 } else { at };
    is_ours.then(|| line[at..].to_owned())
}

/// Returns whether a command has a placeholder: a word in capitals.
fn has_placeholder(command: &str) -> bool {
    command.split(' ').any(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase()))
}

/// Returns the parser's error for a command. An example between backquotes may omit required arguments.
fn parse_error(command: &str, is_whole: bool) -> Option<String> {
    let Some(words) = words(command) else { return Some("it has an open quote".to_owned()) };
    match Cli::try_parse_from(words) {
        Ok(_) => None,
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => None,
            ErrorKind::MissingRequiredArgument
            | ErrorKind::MissingSubcommand
            | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                if !is_whole =>
            {
                None
            }
            // A placeholder, as in `--cpus N`.
            ErrorKind::ValueValidation if !is_whole && has_placeholder(command) => None,
            _ => Some(error.to_string()),
        },
    }
}

#[test]
fn documented_commands_parse() {
    let (mut wrong, mut count) = (Vec::new(), 0);
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for (line, command, is_whole) in commands(&text) {
            count += 1;
            if let Some(problem) = parse_error(&command, is_whole) {
                let name = path.strip_prefix(root()).unwrap().display();
                wrong.push(format!("{name}:{line}: {command}\n{problem}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 60, "only {count} commands were found: are the documents read?");
}

#[test]
fn finds_wrong_commands() {
    let text = "Text `numaward status --sideways` and `numaward exec`.\n```yaml\nnumaward nothing here\n```\n```console\n$ numaward topology   # shown\n\
                $ numaward exec --cpus 2 \\\n    -- ./server\nsudo numaward bogus\nkubectl -n numaward exec daemonset/numaward -- numaward top\n\
                curl x | grep numaward_ \n```\n";
    let found = commands(text);
    let found: Vec<_> =
        found.iter().map(|(line, command, whole)| (*line, parse_error(command, *whole).is_some())).collect();
    assert_eq!(found, [(1, true), (1, false), (6, false), (7, false), (9, true), (10, false)]);
    for wrong in [
        "numaward exec",
        "numaward exec --cpus 2 ./server",
        "numaward events --kind nonsense",
        "numaward get 'open",
    ] {
        assert!(parse_error(wrong, true).is_some(), "{wrong}");
    }
}

/// First word of the text of an experimental key, option or command.
const EXPERIMENTAL: &str = "Experimental: ";

/// Returns the part of a page below the heading `Experimental`.
fn experimental_section(page: &str) -> String {
    let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
    let is_heading = |line: &&str| line.starts_with("# ") || line.starts_with("## ");
    let lines = text.lines().skip_while(|line| line.trim_start_matches('#') != " Experimental").skip(1);
    lines.take_while(|line| !is_heading(line)).flat_map(|line| [line, "\n"]).collect()
}

/// Returns the pages that a text links.
fn linked_pages(text: &str) -> BTreeSet<&str> {
    text.split("](").skip(1).filter_map(|link| link.split([')', '#']).next()).collect()
}

/// Adds the keys below `path`, each with its description.
fn collect_keys(path: &str, schema: &Value, keys: &mut Vec<(String, String)>) {
    for part in [schema, &schema["items"], &schema["additionalProperties"]] {
        for (key, schema) in part["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{key}");
            keys.push((path.clone(), schema["description"].as_str().unwrap_or_default().to_owned()));
            collect_keys(&path, schema, keys);
        }
    }
}

/// Adds the options of a command and of those below it, each with its help.
fn collect_options(command: &clap::Command, options: &mut BTreeSet<(String, String)>) {
    for option in command.get_arguments() {
        let help = option.get_help().map(ToString::to_string).unwrap_or_default();
        options.extend(option.get_long().map(|name| (format!("--{name}"), help)));
    }
    command.get_subcommands().for_each(|command| collect_options(command, options));
}

/// `docs/evidence.md` is the list. A name in it stands for each key with that path, also below others (`guarantees[].placement.tiers`).
#[test]
fn experimental_features_are_marked_everywhere() {
    let evidence = experimental_section("evidence.md");
    let cells = evidence.lines().filter(|line| line.starts_with("| ")).skip(1);
    let cells: Vec<&str> = cells.filter_map(|line| line.split(" | ").next()).collect();
    let names: BTreeSet<&str> = cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert!(names.len() > 10, "{names:?}");

    let mut options = BTreeSet::new();
    collect_options(&Cli::command(), &mut options);
    for (option, help) in &options {
        assert_eq!(names.contains(option.as_str()), help.starts_with(EXPERIMENTAL), "{option}: {help}");
    }
    let parser = Cli::command();
    let about = |command: &clap::Command| command.get_about().map(ToString::to_string).unwrap_or_default();
    let commands: BTreeMap<_, _> =
        parser.get_subcommands().map(|command| (command.get_name(), about(command))).collect();
    for (command, about) in &commands {
        assert_eq!(names.contains(command), about.starts_with(EXPERIMENTAL), "{command}: {about}");
    }
    let mut keys = Vec::new();
    collect_keys("", &numaward_config::json_schema(), &mut keys);
    let is_listed = |key: &str| names.iter().any(|name| key.ends_with(&format!(".{name}")));
    for (key, description) in &keys {
        assert_eq!(is_listed(key), description.starts_with(EXPERIMENTAL), "{key}: {description}");
    }
    for name in &names {
        let key = format!(".{name}");
        let exists = options.iter().any(|(option, _)| option == name)
            || commands.contains_key(name)
            || keys.iter().any(|(of, _)| of.ends_with(&key));
        assert!(exists, "there is no key, option or command {name}");
    }

    let summary = experimental_section("SUMMARY.md");
    let cells = cells.concat();
    assert_eq!(linked_pages(&cells), linked_pages(&summary));
    for page in linked_pages(&summary) {
        let text = fs::read_to_string(root().join("docs").join(page)).unwrap();
        assert!(text.lines().nth(2).is_some_and(|line| line.starts_with("**Experimental")), "{page}");
    }
}

/// The figures of `README.md` are those of the table in `docs/fleet.md`.
#[test]
fn headline_is_that_of_fleet_page() {
    let page = fs::read_to_string(root().join("docs/fleet.md")).unwrap();
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let readme = readme.split_whitespace().collect::<Vec<_>>().join(" ");
    let row = |begins: &str| {
        let row = page.lines().find(|line| line.starts_with(begins)).unwrap();
        row.split('|').map(str::trim).collect::<Vec<_>>()
    };
    let (fit, plugin) = ("`NodeResourcesFit`", "`NodeResourceTopologyMatch`");
    let [kubelet, kubelet_plugin] = [fit, plugin].map(|of| row(&format!("| kubelet | {of} | fail |")));
    let [native, native_plugin] =
        [fit, plugin].map(|of| row(&format!("| native | {of} | `evict` (default) |")));
    let (lost, evictions) = (5, 7);
    for words in [
        format!("lose {} of the requested memory time", kubelet[lost]),
        format!("numaward loses {},", native[lost]),
        format!("the losses are {} and {}.", kubelet_plugin[lost], native_plugin[lost]),
        format!("{} evictions for 115,987 pods.", native[evictions]),
    ] {
        assert!(readme.contains(&words), "{words}");
    }
    assert!(page.contains("\n115,987 Guaranteed pods;"));
}
