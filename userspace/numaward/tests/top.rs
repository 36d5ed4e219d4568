//! `numaward top` in a terminal, with keys pressed and the screen read.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on fails")]

mod common;
#[path = "common/fake.rs"]
mod fake;

use std::{
    fmt::Write as _,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use numaward_terminal::Terminal;
use numaward_tests_support::Sections;
use serde_json::{Value, json};

use crate::{
    common::{daemon, numaward},
    fake::{EVIL, Fake, workload},
};

/// For what takes milliseconds on a quiet machine.
const LONG: Duration = Duration::from_mins(2);

/// The command, as it is called in a usual terminal.
fn top(args: &[&str]) -> Command {
    let mut command = numaward(&["top"]);
    command.args(args).env("TERM", "xterm-256color").env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR");
    command
}

struct Watched {
    fake: Fake,
    terminal: Terminal,
    turn: u64,
}

impl Watched {
    fn start(rows: u16, columns: u16) -> Self {
        Self::start_with(rows, columns, |_| {})
    }

    fn start_with(rows: u16, columns: u16, change: impl FnOnce(&mut Command)) -> Self {
        let fake = Fake::start(workloads(0));
        let mut command = top(&["--server", &format!("http://{}", fake.address)]);
        change(&mut command);
        let terminal = Terminal::start(&command, rows, columns).unwrap();
        Self { fake, terminal, turn: 0 }
    }

    fn tick(&mut self) {
        self.turn += 1;
        self.fake.tick(workloads(self.turn));
    }

    fn sees(&self, words: &str) {
        self.waits(words, |text| text.contains(words));
    }

    #[track_caller]
    fn waits(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        if let Err(last) = self.terminal.wait_for(LONG, |screen| is_so(&screen.contents())) {
            panic!("{what:?} is not seen:\n{last}");
        }
    }

    fn press(&mut self, keys: &str) {
        self.terminal.press(keys).unwrap();
    }

    /// It ends as it should, and the terminal is as it was.
    fn ends(mut self, code: i32) {
        let status = self.terminal.wait(LONG).unwrap();
        let status = status.unwrap_or_else(|| panic!("it does not end:\n{}", self.terminal.text()));
        assert_eq!(status.code(), Some(code), "{}", self.terminal.text());
        given_back(&self.terminal);
    }
}

/// Nothing of the command is left in the terminal.
fn given_back(terminal: &Terminal) {
    // What it wrote at its end may still be on its way.
    let is_back = |screen: &numaward_terminal::Screen| !screen.alternate_screen() && !screen.hide_cursor();
    terminal.wait_for(LONG, is_back).unwrap_or_else(|last| panic!("the screen is not given back:\n{last}"));
    let modes = format!("{:?}", terminal.attributes().unwrap().local_modes);
    assert!(modes.contains("ICANON") && modes.contains("ECHO") && modes.contains("ISIG"), "{modes}");
}

fn workloads(turn: u64) -> Vec<Value> {
    vec![
        workload("database", 3 << 30, 1 << 30, turn),
        workload("small.service", 1 << 20, 0, turn),
        workload(EVIL, 2 << 20, 0, turn),
    ]
}

/// What stands in the line of the screen with this word.
fn line_of(text: &str, word: &str) -> String {
    text.lines().find(|line| line.contains(word)).unwrap_or_default().to_owned()
}

#[test]
fn nodes_and_workloads_are_seen_on_eighty_by_twenty_four() {
    let mut watched = Watched::start(24, 80);
    watched.sees("database");
    watched.tick();
    watched.waits("rates", |text| line_of(text, "database").contains("512.0 KiB/s"));
    let text = watched.terminal.text();
    let database = line_of(&text, "database");
    for words in ["75 %!!", "4.0 GiB", "1.0 MiB"] {
        assert!(database.contains(words), "{words}: {text}");
    }
    assert!(database.contains("25 %"), "of its sampled accesses: {text}");
    assert!(line_of(&text, "small").contains("cpuset"), "why none are sampled: {text}");
    assert!(line_of(&text, "small").contains("80 %! "), "no guarantee, so of what it allocated: {text}");
    for words in ["3 workloads, 1 guaranteed", "live", "8.0 GiB", "NODE MEMORY", "q quit"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");

    watched.press("q");
    watched.ends(0);
}

#[test]
fn workloads_are_sorted_and_filtered() {
    let mut watched = Watched::start(30, 120);
    watched.sees("small.service");
    let names = |text: &str| -> Vec<&'static str> {
        let line = |name: &str| text.lines().position(|line| line.contains(name)).unwrap_or(usize::MAX);
        let mut names = ["database", "small", "evil"];
        names.sort_by_key(|name| line(name));
        names.into()
    };
    assert_eq!(names(&watched.terminal.text()), ["database", "evil", "small"], "the largest first");
    watched.press("r");
    watched.waits("reversed", |text| names(text) == ["small", "evil", "database"]);
    watched.press("S");
    watched.waits("by name", |text| {
        names(text) == ["database", "evil", "small"] && text.contains("WORKLOAD▾ (3)")
    });
    watched.press("/smal");
    watched.waits("filtered", |text| text.contains("(1 of 3)") && text.contains("filter: smal"));
    watched.press("\x7f\x7f\x7f\x7fnode:1\r");
    watched.waits("by node", |text| {
        text.contains("(1 of 3)") && text.contains("database") && !text.contains("small")
    });
    watched.press("\x1b");
    watched.waits("all", |text| text.contains("(3)"));
    watched.press("g");
    watched.waits("guaranteed", |text| text.contains("(1 of 3)") && text.contains("only guaranteed"));
    // Letters are text while a filter is written, also those that do something else.
    watched.press("g/quit\r");
    watched.sees("none match");
    watched.press("\x03");
    watched.ends(0);
}

#[test]
fn a_workload_a_node_and_the_help_are_looked_into() {
    let mut watched = Watched::start(60, 100);
    // An event that names the workload may be there before the workload is.
    watched.sees("WORKLOAD (3)");
    watched.tick();
    watched.press("\r");
    // What is asked for apart comes when it comes.
    watched.waits("all of it", |text| {
        [
            "best of all",
            "75 % of its memory lies on the promised nodes",
            "cpuset.mems",
            "Result: nodes 0, accepted",
            "pages on node 1 (2 more",
            "host 2.500 s, kernel threads 1.000 s",
            "Allocation in the last 2 s",
            "The kernel samples them.",
            "node 1: 20",
        ]
        .iter()
        .all(|words| text.contains(words))
    });
    watched.fake.report(&json!({
        "id": 6, "time": "2026-01-01T07:08:10.000Z", "kind": "oom_kill", "severity": "critical",
        "workload": "database", "message": "a process was killed", "suppressed": 0,
    }));
    watched.sees("oom kill");
    watched.press("q?");
    watched.sees("where its memory lies");
    watched.press("?\t\x1b[B\r");
    watched.sees("none: memory only");
    let text = watched.terminal.text();
    assert!(
        text.contains("Node 1") && text.contains("17 to node 1") && text.contains("TO PROMISE"),
        "{text}"
    );
    // From an event to its workload.
    watched.press("\x1b");
    watched.sees("WORKLOAD (3)");
    watched.press("\t\r");
    watched.sees("best of all");
    watched.press("qq");
    watched.ends(0);
}

#[test]
fn every_size_is_fine() {
    let mut watched = Watched::start(5, 10);
    watched.sees("database");
    for (rows, columns) in
        [(24, 80), (2, 2), (1, 200), (3, 12), (5, 10), (9, 40), (13, 60), (200, 3), (60, 250)]
    {
        watched.terminal.resize(rows, columns).unwrap();
        // Each pane, what can be looked into, and the help: there and back.
        for keys in ["\t", "\r", "?", "\x1b[6~", "?"] {
            watched.press(keys);
        }
        watched.tick();
    }
    watched.waits("it still draws", |text| text.contains("database") && text.contains("NODE MEMORY"));
    watched.press("\x03");
    watched.ends(0);
}

#[test]
fn colours_and_other_characters_only_where_they_are_wanted() {
    let coloured = |terminal: &Terminal| {
        terminal.with_screen(|screen| {
            let (rows, columns) = screen.size();
            let cells = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
            cells.filter_map(|(row, column)| screen.cell(row, column)).any(|cell| {
                cell.fgcolor() != numaward_terminal::Color::Default
                    || cell.bgcolor() != numaward_terminal::Color::Default
            })
        })
    };
    let usual = Watched::start(24, 80);
    usual.sees("75 %!!");
    assert!(coloured(&usual.terminal) && !usual.terminal.text().is_ascii(), "{}", usual.terminal.text());
    let plain = Watched::start_with(24, 80, |command| {
        command.env("NO_COLOR", "1").env("LC_ALL", "C");
    });
    plain.sees("75 %!!");
    assert!(!coloured(&plain.terminal) && plain.terminal.text().is_ascii(), "{}", plain.terminal.text());
}

#[test]
fn a_name_is_text_whatever_is_in_it() {
    let long = "long".repeat(2560);
    let fake = Fake::start(vec![workload(EVIL, 2, 0, 0), workload(&long, 1, 0, 0)]);
    let server = format!("http://{}", fake.address);
    let mut terminal = Terminal::start(&top(&["--server", &server]), 24, 80).unwrap();
    terminal.wait_for(LONG, |screen| screen.contents().contains("longlong")).unwrap();
    terminal.press("\r").unwrap();
    terminal.wait_for(LONG, |screen| screen.contents().contains("It has no guarantee")).unwrap();
    let wrote = String::from_utf8_lossy(&terminal.raw()).into_owned();
    assert!(
        !wrote.contains("\x1b]0;") && !wrote.contains('\u{9b}') && !wrote.contains('\u{202e}'),
        "{wrote:?}"
    );
    assert!(terminal.text().contains("evil\\x1b[2J\\x1b]0;owned\\x07\\r\\n"), "{}", terminal.text());

    let printer = std::thread::spawn(move || top(&["--once", "--server", &server]).output().unwrap());
    while !printer.is_finished() {
        fake.tick(vec![workload(EVIL, 2, 0, 1), workload(&long, 1, 0, 1)]);
        std::thread::sleep(Duration::from_millis(100));
    }
    let output = printer.join().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    assert!(text.contains("evil\\x1b[2J") && text.contains(&long), "{text}");
}

#[test]
fn a_daemon_that_is_lost_is_told_and_found_again() {
    let mut watched = Watched::start(24, 80);
    watched.sees("live");
    watched.fake.leave();
    watched.sees("STALE");
    watched
        .waits("the reason", |text| text.contains("ended its stream") || text.contains("no numaward daemon"));
    // Red is for a broken promise.
    let (red, yellow) = watched.terminal.with_screen(|screen| {
        let (_, columns) = screen.size();
        let cells = (0..2).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let colours: Vec<_> =
            cells.filter_map(|(row, column)| Some(screen.cell(row, column)?.fgcolor())).collect();
        let any = |indices: [u8; 2]| {
            indices.into_iter().any(|index| colours.contains(&numaward_terminal::Color::Idx(index)))
        };
        (any([1, 9]), any([3, 11]))
    });
    assert!(yellow && !red, "{}", watched.terminal.text());
    watched.sees("database");
    watched.fake.come_back();
    watched.sees("live");
    watched.tick();
    watched.waits("rates", |text| line_of(text, "database").contains("512.0 KiB/s"));
    watched.press("q");
    watched.ends(0);
}

#[test]
fn the_terminal_is_given_back_however_it_ends() {
    for signal in ["-TERM", "-INT", "-HUP"] {
        let watched = Watched::start(24, 80);
        watched.sees("database");
        assert!(watched.terminal.with_screen(numaward_terminal::Screen::alternate_screen));
        let sent = Command::new("kill").args([signal, &watched.terminal.id().to_string()]).status().unwrap();
        assert!(sent.success());
        watched.ends(0);
    }
}

#[test]
fn it_is_stopped_and_goes_on() {
    let fake = Fake::start(workloads(0));
    let mut shell = Command::new("bash");
    shell
        .args(["--norc", "--noprofile", "--noediting", "-i"])
        .env("TERM", "xterm-256color")
        .env("PS1", "ready> ");
    let mut terminal = Terminal::start(&shell, 24, 80).unwrap();
    terminal.wait_for(LONG, |screen| screen.contents().contains("ready>")).unwrap();
    let sees = |terminal: &Terminal, words: &str| {
        let seen = terminal.wait_for(LONG, |screen| screen.contents().contains(words));
        seen.unwrap_or_else(|last| panic!("{words} is not seen:\n{last}"));
    };
    let command = env!("CARGO_BIN_EXE_numaward");
    terminal.press(&format!("{command} top --server http://{}\n", fake.address)).unwrap();
    sees(&terminal, "small.service");
    terminal.press("\x1a").unwrap();
    sees(&terminal, "Stopped");
    given_back_to_shell(&terminal);
    terminal.press("fg\n").unwrap();
    sees(&terminal, "small.service");
    assert!(terminal.with_screen(numaward_terminal::Screen::alternate_screen));
    terminal.press("q").unwrap();
    terminal.wait_for(LONG, |screen| !screen.alternate_screen()).unwrap();
    terminal.press("exit\n").unwrap();
    assert!(terminal.wait(LONG).unwrap().is_some());
}

fn given_back_to_shell(terminal: &Terminal) {
    let is_back = |screen: &numaward_terminal::Screen| !screen.alternate_screen() && !screen.hide_cursor();
    terminal.wait_for(LONG, is_back).unwrap();
}

#[test]
fn where_there_is_no_screen_it_says_what_to_do() {
    let fake = Fake::start(workloads(0));
    let server = format!("http://{}", fake.address);
    let piped = top(&["--server", &server]).stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8(piped.stderr).unwrap();
    assert!(piped.status.code() == Some(1) && error.contains("--batch"), "{error}");
    let mut dumb = Terminal::start(top(&["--server", &server]).env("TERM", "dumb"), 24, 80).unwrap();
    assert_eq!(dumb.wait(LONG).unwrap().unwrap().code(), Some(1));
    dumb.wait_for(LONG, |screen| screen.contents().contains("TERM is dumb")).unwrap();

    drop(fake);
    let nobody = top(&["--once", "--server", "http://127.0.0.1:1"]).output().unwrap();
    assert_eq!(nobody.status.code(), Some(4), "{nobody:?}");
}

#[test]
fn a_real_daemon_is_watched_on_its_address_and_on_its_socket() {
    let daemon = daemon();
    let server = format!("http://{}", daemon.address);
    let once = |args: &[&str]| {
        let output = numaward(&["top"]).args(args).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let table = once(&["--once", "--server", &server]);
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("NODE  CPUS"), "{table}");
    assert!(lines[1].starts_with("0     0-3   2.0 GiB"), "{table}");
    assert!(lines[2].starts_with("2     none  2.0 GiB"), "{table}");
    let json = once(&["--count", "2", "-o", "json", "--server", daemon.socket.to_str().unwrap()]);
    let reports: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(reports.len(), 2);
    assert_eq!(reports[1]["nodes"][1]["node"], 2);

    let mut terminal = Terminal::start(&top(&["--server", &server]), 24, 80).unwrap();
    // Nothing is counted there, and that is said rather than shown as zero.
    terminal
        .wait_for(LONG, |screen| {
            let text = screen.contents();
            text.contains("allocations are not counted") && text.contains("live")
        })
        .unwrap_or_else(|last| panic!("{last}"));
    let text = terminal.text();
    let node = text.lines().nth(3).unwrap();
    assert!(node.contains("2.0 GiB") || node.contains("1.0 KiB"), "{text}");
    terminal.press("q").unwrap();
    assert_eq!(terminal.wait(LONG).unwrap().unwrap().code(), Some(0));
    given_back(&terminal);
}

/// The checked-in texts of a test. `cargo xtask generate` writes them.
fn checked_in(name: &str) -> Sections {
    Sections::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name))
}

/// The lines of a screen, and below each how its cells look, where they do not look as usual.
fn picture(screen: &numaward_terminal::Screen) -> String {
    let (_, columns) = screen.size();
    let mut text = String::new();
    for (line, row) in screen.rows(0, columns).zip(0..) {
        let _ = writeln!(text, "|{}", line.trim_end());
        let cells = (0..columns).filter_map(|column| screen.cell(row, column));
        let looks: Vec<String> = cells
            .map(|cell| {
                let marks = [(cell.bold(), "bold "), (cell.dim(), "dim "), (cell.underline(), "underline ")];
                let marks = marks.into_iter().chain([(cell.inverse(), "inverse ")]);
                let marks: String = marks.filter(|(is_so, _)| *is_so).map(|(_, mark)| mark).collect();
                match cell.fgcolor() {
                    numaward_terminal::Color::Default => marks,
                    colour => format!("{marks}{colour:?}"),
                }
            })
            .collect();
        let mut at = 0;
        for run in looks.chunk_by(|a, b| a == b) {
            if !run[0].is_empty() {
                let _ = writeln!(text, "  {at}+{} {}", run.len(), run[0].trim_end());
            }
            at += run.len();
        }
    }
    text
}

#[test]
fn each_screen_looks_as_checked_in() {
    let mut screens = checked_in("screens.txt");
    for (kind, environment) in [("", None), ("plain ", Some([("NO_COLOR", "1"), ("LC_ALL", "C")]))] {
        let mut watched = Watched::start_with(24, 80, |command| {
            command.envs(environment.into_iter().flatten());
        });
        watched.sees("pages on node 1");
        for (name, rows, columns, keys) in [
            ("lists", 24, 80, ""),
            ("nodes", 24, 80, "\t\x1b[B"),
            ("events", 24, 80, "\t"),
            ("all columns, by name", 40, 150, "\tS"),
            ("reversed", 30, 100, "r"),
            ("low", 11, 60, "rs\x1b[B"),
            ("low nodes", 11, 60, "\t"),
            ("low events", 11, 60, "\t"),
            ("tiny", 4, 20, "\t"),
            ("guaranteed", 24, 80, "g"),
            ("filter", 24, 80, "/node:1"),
            ("filtered", 24, 80, "\r"),
            ("none match", 24, 80, "/x\r"),
            // Alone: with the keys after it, it would be another one.
            ("no filter", 24, 80, "\x1b"),
            ("workload", 70, 100, "g\x1b[H\r"),
            ("low workload", 12, 80, ""),
            ("scrolled", 12, 80, "\x1b[6~"),
            ("evil", 50, 80, "q\x1b[B\r"),
            ("node", 40, 80, "q\t\x1b[H\r"),
            ("memory only", 40, 80, "q\x1b[F\r"),
            ("help", 40, 80, "?"),
            ("help scrolled", 10, 80, "\x1b[F"),
        ] {
            watched.terminal.resize(rows, columns).unwrap();
            watched.tick();
            watched.press(keys);
            let name = format!("{kind}{name}");
            // To be written, a screen that differs has to stand still.
            let limit = if Sections::is_update() { Duration::from_secs(2) } else { LONG / 8 };
            let wanted = screens.checked_in(&name);
            let seen = watched.terminal.wait_for(limit, |screen| picture(screen) == wanted);
            let last = seen.map_or_else(|_| watched.terminal.with_screen(picture), |()| wanted.to_owned());
            screens.add(&name, &last);
        }
        watched.press("\x03");
        watched.ends(0);
    }
    screens.finish();
}

#[test]
fn all_ends_only_when_it_is_confirmed() {
    let fake = Fake::start(Vec::new());
    let server = format!("http://{}", fake.address);
    let piped = numaward(&["release", "--all", "--server", &server]).stdin(Stdio::null()).output();
    let piped = piped.unwrap();
    assert!(
        piped.status.code() == Some(1) && String::from_utf8_lossy(&piped.stderr).contains("add --yes"),
        "{piped:?}"
    );
    // On a terminal it asks.
    let ask = |answer: &str, says: &str| {
        let command = numaward(&["release", "--all", "--server", &server]);
        let mut terminal = Terminal::start(&command, 24, 80).unwrap();
        terminal
            .wait_for(LONG, |screen| screen.contents().contains("End these 1 guarantees? [y/N]"))
            .unwrap();
        terminal.press(answer).unwrap();
        let code = terminal.wait(LONG).unwrap().unwrap().code();
        // What it printed last may come later than its end.
        terminal.wait_for(LONG, |screen| screen.contents().contains(says)).unwrap();
        code
    };
    assert_eq!(ask("n\n", "nothing is released"), Some(1));
    // The fake daemon does not know it any more: that is as good.
    assert_eq!(ask("y\n", "[y/N] y"), Some(0));
    assert!(numaward(&["release", "--all", "--yes", "--server", &server]).status().unwrap().success());
}

#[test]
fn what_is_printed_is_as_checked_in() {
    let mut printed = checked_in("printed.txt");
    let fake = Fake::start(workloads(1));
    let server = format!("http://{}", fake.address);
    let commands: [&[&str]; 15] = [
        &["status", "--server", &server],
        &["status", "-o", "json", "--server", &server],
        &["explain", "database", "--server", &server],
        &["explain", "database", "-o", "json", "--server", &server],
        &["explain", "nobody", "--server", &server],
        &["topology", "--server", &server],
        &["get", "--server", &server],
        &["get", "-o", "wide", "database", "--server", &server],
        &["get", "-o", "yaml", "--server", &server],
        &["describe", "database", "--server", &server],
        &["describe", "small.service", "--server", &server],
        &["events", "--server", &server],
        &["top", "--once", "--server", &server],
        &["top", "--once", "--sort", "local", "--filter", "a", "--server", &server],
        &["top", "--once", "-o", "json", "--guaranteed", "--server", &server],
    ];
    for args in commands {
        let mut command = numaward(args);
        let thread = std::thread::spawn(move || command.output().unwrap());
        while !thread.is_finished() {
            // The same again: what it prints does not depend on when.
            fake.tick(workloads(1));
            std::thread::sleep(Duration::from_millis(100));
        }
        let output = thread.join().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        // But for what a node allocated.
        let mut parts = text.split("\"localBytes\":");
        let mut steady = parts.next().unwrap().to_owned();
        parts.for_each(|part| steady.extend(["\"localBytes\":", part.trim_start_matches(char::is_numeric)]));
        let name =
            args.iter().filter(|arg| !arg.contains("127.0.0.1")).copied().collect::<Vec<_>>().join(" ");
        printed.add(&name, &format!("{steady}exit code {:?}\n", output.status.code()));
    }
    printed.finish();
}
