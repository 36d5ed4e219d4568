//! Tests of `numaward top` in a terminal: keys are pressed, and the screen is read.

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
    fake::{FakeDaemon, HOSTILE_NAME, workload},
};

/// The time limit of operations that take milliseconds on an idle machine.
const WAIT_TIMEOUT: Duration = Duration::from_mins(2);

/// Returns the command in a usual terminal.
fn top(args: &[&str]) -> Command {
    let mut command = numaward(&["top"]);
    command.args(args).env("TERM", "xterm-256color").env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR");
    command
}

struct TopSession {
    fake: FakeDaemon,
    terminal: Terminal,
    turn: u64,
}

impl TopSession {
    fn start(rows: u16, columns: u16) -> Self {
        Self::start_with(rows, columns, |_| {})
    }

    fn start_with(rows: u16, columns: u16, change: impl FnOnce(&mut Command)) -> Self {
        let fake = FakeDaemon::start(workloads(0));
        let mut command = top(&["--server", &format!("http://{}", fake.address)]);
        change(&mut command);
        let terminal = Terminal::start(&command, rows, columns).unwrap();
        Self { fake, terminal, turn: 0 }
    }

    fn tick(&mut self) {
        self.turn += 1;
        self.fake.tick(workloads(self.turn));
    }

    fn wait_for_text(&self, words: &str) {
        self.wait_until(words, |text| text.contains(words));
    }

    #[track_caller]
    fn wait_until(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        if let Err(last) = self.terminal.wait_for(WAIT_TIMEOUT, |screen| is_so(&screen.contents())) {
            panic!("{what:?} does not appear:\n{last}");
        }
    }

    fn press(&mut self, keys: &str) {
        self.terminal.press(keys).unwrap();
    }

    /// Checks that the command ends with this exit code and restores the terminal.
    fn assert_ends(mut self, code: i32) {
        let status = self.terminal.wait(WAIT_TIMEOUT).unwrap();
        let status = status.unwrap_or_else(|| panic!("the command does not end:\n{}", self.terminal.text()));
        assert_eq!(status.code(), Some(code), "{}", self.terminal.text());
        assert_terminal_restored(&self.terminal);
    }
}

/// Checks that the terminal is restored.
fn assert_terminal_restored(terminal: &Terminal) {
    // The last output of the command may arrive late.
    let is_back = |screen: &numaward_terminal::Screen| !screen.alternate_screen() && !screen.hide_cursor();
    terminal
        .wait_for(WAIT_TIMEOUT, is_back)
        .unwrap_or_else(|last| panic!("the screen is not restored:\n{last}"));
    let modes = format!("{:?}", terminal.attributes().unwrap().local_modes);
    assert!(modes.contains("ICANON") && modes.contains("ECHO") && modes.contains("ISIG"), "{modes}");
}

fn workloads(turn: u64) -> Vec<Value> {
    vec![
        workload("database", 3 << 30, 1 << 30, turn),
        workload("small.service", 1 << 20, 0, turn),
        workload(HOSTILE_NAME, 2 << 20, 0, turn),
    ]
}

/// Returns the line of the screen that contains a word.
fn line_of(text: &str, word: &str) -> String {
    text.lines().find(|line| line.contains(word)).unwrap_or_default().to_owned()
}

#[test]
fn fits_on_eighty_by_twenty_four() {
    let mut session = TopSession::start(24, 80);
    session.wait_for_text("database");
    session.tick();
    // Allocations are requested separately from the samples.
    session.wait_until("rates and guarantees", |text| {
        line_of(text, "database").contains("512.0 KiB/s") && text.contains("3 workloads, 1 guaranteed")
    });
    let text = session.terminal.text();
    let database = line_of(&text, "database");
    for words in ["75 %!!", "4.0 GiB", "1.0 MiB"] {
        assert!(database.contains(words), "{words}: {text}");
    }
    assert!(database.contains("25 %"), "of its sampled accesses: {text}");
    assert!(line_of(&text, "small").contains("cpuset"), "why none are sampled: {text}");
    assert!(line_of(&text, "small").contains("80 %! "), "no guarantee, so of what it allocated: {text}");
    for words in ["live", "8.0 GiB", "NODE MEMORY", "q quit"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");

    session.press("q");
    session.assert_ends(0);
}

#[test]
fn sorts_and_filters_workloads() {
    let mut session = TopSession::start(30, 120);
    session.wait_for_text("small.service");
    let names = |text: &str| -> Vec<&'static str> {
        let line = |name: &str| text.lines().position(|line| line.contains(name)).unwrap_or(usize::MAX);
        let mut names = ["database", "small", "evil"];
        names.sort_by_key(|name| line(name));
        names.into()
    };
    assert_eq!(names(&session.terminal.text()), ["database", "evil", "small"], "the largest first");
    session.press("r");
    session.wait_until("reversed", |text| names(text) == ["small", "evil", "database"]);
    session.press("S");
    session.wait_until("by name", |text| {
        names(text) == ["database", "evil", "small"] && text.contains("WORKLOAD▾ (3)")
    });
    session.press("/smal");
    session.wait_until("filtered", |text| text.contains("(1 of 3)") && text.contains("filter: smal"));
    session.press("\x7f\x7f\x7f\x7fnode:1\r");
    session.wait_until("by node", |text| {
        text.contains("(1 of 3)") && text.contains("database") && !text.contains("small")
    });
    session.press("\x1b");
    session.wait_until("all", |text| text.contains("(3)"));
    session.press("g");
    session.wait_until("guaranteed", |text| text.contains("(1 of 3)") && text.contains("only guaranteed"));
    // While a filter is entered, letters are text, even those of other commands.
    session.press("g/quit\r");
    session.wait_for_text("no workload matches the filter");
    session.press("\x03");
    session.assert_ends(0);
}

#[test]
fn shows_details_and_help() {
    let mut session = TopSession::start(60, 100);
    // An event with the name of the workload may be shown before the workload.
    session.wait_for_text("WORKLOAD (3)");
    session.tick();
    session.press("\r");
    // Details are requested separately and arrive later.
    session.wait_until("all of it", |text| {
        [
            "best of all",
            "75 % of its user memory is on the guaranteed nodes",
            "cpuset.mems",
            "Result: nodes 0, accepted",
            "pages on node 1 (2 similar",
            "host 2.500 s, kernel threads 1.000 s",
            "Allocation in the last 2 s",
            "Pages touched, by scan: a page counts about once per scan.",
            "node 1: 20",
        ]
        .iter()
        .all(|words| text.contains(words))
    });
    session.fake.report(&json!({
        "id": 6, "time": "2026-01-01T07:08:10.000Z", "kind": "oom_kill", "severity": "critical",
        "workload": "database", "message": "a process was killed", "suppressed": 0,
    }));
    session.wait_for_text("oom kill");
    session.press("q?");
    session.wait_for_text("memory by node");
    session.press("?\t\x1b[B\r");
    session.wait_for_text("none: memory only");
    let text = session.terminal.text();
    assert!(text.contains("Node 1") && text.contains("17 to node 1") && text.contains("AVAILABLE"), "{text}");
    // From an event to its workload.
    session.press("\x1b");
    session.wait_for_text("WORKLOAD (3)");
    session.press("\t\r");
    session.wait_for_text("best of all");
    session.press("qq");
    session.assert_ends(0);
}

#[test]
fn begins_with_the_named_workload() {
    let mut session = TopSession::start_with(60, 100, |command| {
        command.arg("/database");
    });
    session.wait_for_text("best of all");
    session.press("q");
    session.wait_until("all workloads", |text| line_of(text, "database").starts_with('>'));
    session.press("\x03");
    session.assert_ends(0);

    let fake = FakeDaemon::start(workloads(0));
    let server = format!("http://{}", fake.address);
    let nobody = top(&["--once", "nobody", "--server", &server]).output().unwrap();
    let error = String::from_utf8(nobody.stderr).unwrap();
    assert!(nobody.status.code() == Some(1) && error.contains("no workload named \"nobody\""), "{error}");
}

#[test]
fn draws_at_every_size() {
    let mut session = TopSession::start(5, 10);
    session.wait_for_text("database");
    for (rows, columns) in
        [(24, 80), (2, 2), (1, 200), (3, 12), (5, 10), (9, 40), (13, 60), (200, 3), (60, 250)]
    {
        session.terminal.resize(rows, columns).unwrap();
        // To each pane, the details and the help, and back.
        for keys in ["\t", "\r", "?", "\x1b[6~", "?"] {
            session.press(keys);
        }
        session.tick();
    }
    session.wait_until("it still draws", |text| text.contains("database") && text.contains("NODE MEMORY"));
    session.press("\x03");
    session.assert_ends(0);
}

#[test]
fn no_color_disables_colours() {
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
    let usual = TopSession::start(24, 80);
    usual.wait_for_text("75 %!!");
    assert!(coloured(&usual.terminal) && !usual.terminal.text().is_ascii(), "{}", usual.terminal.text());
    let plain = TopSession::start_with(24, 80, |command| {
        command.env("NO_COLOR", "1").env("LC_ALL", "C");
    });
    plain.wait_for_text("75 %!!");
    assert!(!coloured(&plain.terminal) && plain.terminal.text().is_ascii(), "{}", plain.terminal.text());
}

#[test]
fn escapes_control_characters() {
    let long = "long".repeat(2560);
    let fake = FakeDaemon::start(vec![workload(HOSTILE_NAME, 2, 0, 0), workload(&long, 1, 0, 0)]);
    let server = format!("http://{}", fake.address);
    let mut terminal = Terminal::start(&top(&["--server", &server]), 24, 80).unwrap();
    terminal.wait_for(WAIT_TIMEOUT, |screen| screen.contents().contains("longlong")).unwrap();
    terminal.press("\r").unwrap();
    terminal.wait_for(WAIT_TIMEOUT, |screen| screen.contents().contains("It has no guarantee")).unwrap();
    let wrote = String::from_utf8_lossy(&terminal.raw()).into_owned();
    assert!(
        !wrote.contains("\x1b]0;") && !wrote.contains('\u{9b}') && !wrote.contains('\u{202e}'),
        "{wrote:?}"
    );
    assert!(terminal.text().contains("evil\\x1b[2J\\x1b]0;owned\\x07\\r\\n"), "{}", terminal.text());

    let printer = std::thread::spawn(move || top(&["--once", "--server", &server]).output().unwrap());
    while !printer.is_finished() {
        fake.tick(vec![workload(HOSTILE_NAME, 2, 0, 1), workload(&long, 1, 0, 1)]);
        std::thread::sleep(Duration::from_millis(100));
    }
    let output = printer.join().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    assert!(text.contains("evil\\x1b[2J") && text.contains(&long), "{text}");
}

#[test]
fn reports_lost_daemon_and_reconnects() {
    let mut session = TopSession::start(24, 80);
    session.wait_for_text("live");
    session.fake.leave();
    session.wait_for_text("STALE");
    session.wait_until("the reason", |text| {
        text.contains("ended its stream") || text.contains("no numaward daemon")
    });
    // Red is reserved for violated guarantees.
    let (red, yellow) = session.terminal.with_screen(|screen| {
        let (_, columns) = screen.size();
        let cells = (0..2).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let colours: Vec<_> =
            cells.filter_map(|(row, column)| Some(screen.cell(row, column)?.fgcolor())).collect();
        let any = |indices: [u8; 2]| {
            indices.into_iter().any(|index| colours.contains(&numaward_terminal::Color::Idx(index)))
        };
        (any([1, 9]), any([3, 11]))
    });
    assert!(yellow && !red, "{}", session.terminal.text());
    session.wait_for_text("database");
    session.fake.come_back();
    session.wait_for_text("live");
    session.tick();
    session.wait_until("rates", |text| line_of(text, "database").contains("512.0 KiB/s"));
    session.press("q");
    session.assert_ends(0);
}

#[test]
fn signals_restore_terminal() {
    for signal in ["-TERM", "-INT", "-HUP"] {
        let session = TopSession::start(24, 80);
        session.wait_for_text("database");
        assert!(session.terminal.with_screen(numaward_terminal::Screen::alternate_screen));
        let sent = Command::new("kill").args([signal, &session.terminal.id().to_string()]).status().unwrap();
        assert!(sent.success());
        session.assert_ends(0);
    }
}

#[test]
fn survives_stop_and_continue() {
    let fake = FakeDaemon::start(workloads(0));
    let mut shell = Command::new("bash");
    shell
        .args(["--norc", "--noprofile", "--noediting", "-i"])
        .env("TERM", "xterm-256color")
        .env("PS1", "ready> ");
    let mut terminal = Terminal::start(&shell, 24, 80).unwrap();
    terminal.wait_for(WAIT_TIMEOUT, |screen| screen.contents().contains("ready>")).unwrap();
    let sees = |terminal: &Terminal, words: &str| {
        let seen = terminal.wait_for(WAIT_TIMEOUT, |screen| screen.contents().contains(words));
        seen.unwrap_or_else(|last| panic!("{words} does not appear:\n{last}"));
    };
    let command = env!("CARGO_BIN_EXE_numaward");
    terminal.press(&format!("{command} top --server http://{}\n", fake.address)).unwrap();
    sees(&terminal, "small.service");
    terminal.press("\x1a").unwrap();
    sees(&terminal, "Stopped");
    wait_for_main_screen(&terminal);
    terminal.press("fg\n").unwrap();
    sees(&terminal, "small.service");
    assert!(terminal.with_screen(numaward_terminal::Screen::alternate_screen));
    terminal.press("q").unwrap();
    terminal.wait_for(WAIT_TIMEOUT, |screen| !screen.alternate_screen()).unwrap();
    terminal.press("exit\n").unwrap();
    assert!(terminal.wait(WAIT_TIMEOUT).unwrap().is_some());
}

fn wait_for_main_screen(terminal: &Terminal) {
    let is_back = |screen: &numaward_terminal::Screen| !screen.alternate_screen() && !screen.hide_cursor();
    terminal.wait_for(WAIT_TIMEOUT, is_back).unwrap();
}

#[test]
fn suggests_batch_without_screen() {
    let fake = FakeDaemon::start(workloads(0));
    let server = format!("http://{}", fake.address);
    let piped = top(&["--server", &server]).stdin(Stdio::null()).output().unwrap();
    let error = String::from_utf8(piped.stderr).unwrap();
    assert!(piped.status.code() == Some(1) && error.contains("--batch"), "{error}");
    let mut dumb = Terminal::start(top(&["--server", &server]).env("TERM", "dumb"), 24, 80).unwrap();
    assert_eq!(dumb.wait(WAIT_TIMEOUT).unwrap().unwrap().code(), Some(1));
    dumb.wait_for(WAIT_TIMEOUT, |screen| screen.contents().contains("TERM is dumb")).unwrap();

    drop(fake);
    let nobody = top(&["--once", "--server", "http://127.0.0.1:1"]).output().unwrap();
    assert_eq!(nobody.status.code(), Some(4), "{nobody:?}");
}

#[test]
fn connects_by_address_and_socket() {
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
    // Allocations are not counted here, which is shown as text instead of zeros.
    terminal
        .wait_for(WAIT_TIMEOUT, |screen| {
            let text = screen.contents();
            text.contains("allocations are not counted") && text.contains("live")
        })
        .unwrap_or_else(|last| panic!("{last}"));
    let text = terminal.text();
    let node = text.lines().nth(3).unwrap();
    assert!(node.contains("2.0 GiB") || node.contains("1.0 KiB"), "{text}");
    terminal.press("q").unwrap();
    assert_eq!(terminal.wait(WAIT_TIMEOUT).unwrap().unwrap().code(), Some(0));
    assert_terminal_restored(&terminal);
}

/// Reads the expected texts of a test, which `cargo xtask generate` writes.
fn checked_in(name: &str) -> Sections {
    Sections::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name))
}

/// Returns the lines of a screen, each followed by the attributes of its cells.
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
        let mut session = TopSession::start_with(24, 80, |command| {
            command.envs(environment.into_iter().flatten());
        });
        session.wait_for_text("pages on node 1");
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
            ("no workload matches the filter", 24, 80, "/x\r"),
            // Without further keys, because the escape sequence would be a different one.
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
            session.terminal.resize(rows, columns).unwrap();
            session.tick();
            session.press(keys);
            let name = format!("{kind}{name}");
            // In an update, the screen must be stable before it is written.
            let limit = if Sections::is_update() { Duration::from_secs(2) } else { WAIT_TIMEOUT / 8 };
            let wanted = screens.checked_in(&name);
            let seen = session.terminal.wait_for(limit, |screen| picture(screen) == wanted);
            let last = seen.map_or_else(|_| session.terminal.with_screen(picture), |()| wanted.to_owned());
            screens.add(&name, &last);
        }
        session.press("\x03");
        session.assert_ends(0);
    }
    screens.finish();
}

#[test]
fn release_all_needs_confirmation() {
    let fake = FakeDaemon::start(Vec::new());
    let server = format!("http://{}", fake.address);
    let piped = numaward(&["release", "--all", "--server", &server]).stdin(Stdio::null()).output();
    let piped = piped.unwrap();
    assert!(
        piped.status.code() == Some(1) && String::from_utf8_lossy(&piped.stderr).contains("add --yes"),
        "{piped:?}"
    );
    // The command asks for confirmation on a terminal.
    let ask = |answer: &str, says: &str| {
        let command = numaward(&["release", "--all", "--server", &server]);
        let mut terminal = Terminal::start(&command, 24, 80).unwrap();
        terminal
            .wait_for(WAIT_TIMEOUT, |screen| screen.contents().contains("End this guarantee? [y/N]"))
            .unwrap();
        terminal.press(answer).unwrap();
        let code = terminal.wait(WAIT_TIMEOUT).unwrap().unwrap().code();
        // The last output may arrive after the end.
        terminal.wait_for(WAIT_TIMEOUT, |screen| screen.contents().contains(says)).unwrap();
        code
    };
    assert_eq!(ask("n\n", "nothing is released"), Some(1));
    // The fake daemon does not know the guarantee any more, which counts as success.
    assert_eq!(ask("y\n", "[y/N] y"), Some(0));
    assert!(numaward(&["release", "--all", "--yes", "--server", &server]).status().unwrap().success());
}

#[test]
fn printed_text_is_as_checked_in() {
    let mut printed = checked_in("printed.txt");
    let fake = FakeDaemon::start(workloads(1));
    let server = format!("http://{}", fake.address);
    let commands: [&[&str]; 18] = [
        &["status", "--server", &server],
        &["status", "-o", "json", "--server", &server],
        &["explain", "database", "--server", &server],
        &["explain", "database", "-o", "json", "--server", &server],
        &["explain", "nobody", "--server", &server],
        &["topology", "--server", &server],
        &["get", "--server", &server],
        &["get", "guarantees", "database", "-o", "wide", "--server", &server],
        &["get", "guarantees", "-o", "name", "--server", &server],
        &["get", "workloads", "-o", "wide", "--server", &server],
        &["get", "-o", "yaml", "--server", &server],
        &["describe", "database", "--server", &server],
        &["describe", "small.service", "--server", &server],
        &["events", "--server", &server],
        &["top", "--once", "--server", &server],
        &["top", "database", "--once", "--server", &server],
        &["top", "--once", "--sort", "local", "--filter", "a", "--server", &server],
        &["top", "--once", "-o", "json", "--guaranteed", "--server", &server],
    ];
    for args in commands {
        let mut command = numaward(args);
        let thread = std::thread::spawn(move || command.output().unwrap());
        while !thread.is_finished() {
            // The same sample is repeated, so that the output does not depend on the time.
            fake.tick(workloads(1));
            std::thread::sleep(Duration::from_millis(100));
        }
        let output = thread.join().unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        // The amount of allocations depends on the time and is removed.
        let mut parts = text.split("\"localBytes\":");
        let mut steady = parts.next().unwrap().to_owned();
        parts.for_each(|part| steady.extend(["\"localBytes\":", part.trim_start_matches(char::is_numeric)]));
        let name =
            args.iter().filter(|arg| !arg.contains("127.0.0.1")).copied().collect::<Vec<_>>().join(" ");
        printed.add(&name, &format!("{steady}exit code {:?}\n", output.status.code()));
    }
    printed.finish();
}
