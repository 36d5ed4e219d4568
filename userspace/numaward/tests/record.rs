//! Tests of `numaward record` and `numaward replay`.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;
#[path = "common/fake.rs"]
mod fake;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use numaward_terminal::Terminal;
use serde_json::{Value, json};

use crate::{
    common::{daemon, numaward},
    fake::{FakeDaemon, HOSTILE_NAME, workload},
};

/// The time limit of operations that take milliseconds on an idle machine.
const WAIT_TIMEOUT: Duration = Duration::from_mins(2);
/// Longer than the time between two samples of the recorder.
const TURN_INTERVAL: Duration = Duration::from_millis(700);

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn workloads(turn: u64) -> Vec<Value> {
    vec![workload("database", 3 << 30, 1 << 30, turn), workload(HOSTILE_NAME, 2 << 20, 0, turn)]
}

/// Starts a recording, and waits for its first sample.
fn record(file: &Path, server: &str, args: &[&str]) -> Child {
    let mut command = numaward(&["record", file.to_str().unwrap(), "--server", server]);
    let child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while fs::metadata(file).map_or(0, |file| file.len()) < 100 {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "nothing is recorded");
        sleep(Duration::from_millis(50));
    }
    child
}

fn end_with_signal(mut child: Child, signal: &str) -> Output {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    child.wait().unwrap();
    child.wait_with_output().unwrap()
}

fn replay(file: &Path, args: &[&str]) -> Output {
    numaward(&["replay", file.to_str().unwrap()]).args(args).output().unwrap()
}

fn replay_as_json(file: &Path, args: &[&str]) -> Vec<Value> {
    let output = replay(file, &[&["-o", "json"], args].concat());
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Records a few samples with an event, a workload that ends, and a daemon that is lost and found again.
fn record_session(file: &Path) -> String {
    let fake = FakeDaemon::start(workloads(0));
    let child = record(file, &format!("http://{}", fake.address), &[]);
    for turn in 1..=3 {
        sleep(TURN_INTERVAL);
        fake.tick(workloads(turn));
    }
    sleep(TURN_INTERVAL);
    fake.report(&json!({
        "id": 6, "time": "2026-01-01T07:08:10.000Z", "kind": "oom_kill", "severity": "critical",
        "workload": "database", "message": "a process was killed", "suppressed": 0,
    }));
    fake.tick(workloads(4));
    sleep(TURN_INTERVAL);
    fake.leave();
    sleep(TURN_INTERVAL);
    fake.come_back();
    let size = || fs::metadata(file).unwrap().len();
    let (before, begun) = (size(), Instant::now());
    while size() == before {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "the daemon is not found again");
        sleep(Duration::from_millis(50));
    }
    sleep(TURN_INTERVAL);
    fake.tick(workloads(1));
    sleep(TURN_INTERVAL);
    let output = end_with_signal(child, "-INT");
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout)
}

#[test]
fn replay_shows_recording() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("r");
    let said = record_session(&file);
    assert!(said.contains("moments from") && said.contains("KiB"), "{said}");

    // Output as lines: with rates, events and times.
    let all = replay_as_json(&file, &[]);
    assert!((4..=6).contains(&all.len()), "{all:?}");
    let database = |report: &Value| {
        let workloads = report["workloads"].as_array().unwrap();
        workloads.iter().find(|found| found["workload"] == "database").unwrap().clone()
    };
    let first = database(&all[0]);
    assert_eq!(first["promisedNodes"], "0");
    assert_eq!(first["localShare"], 0.75);
    assert_eq!(
        first["bytesPerSecond"]["local"], 1_048_576.0,
        "a MiB a turn, which is a second of the daemon"
    );
    let with_event: Vec<usize> =
        (0..all.len()).filter(|at| all[*at]["events"][0]["kind"] == "oom_kill").collect();
    assert_eq!(with_event.len(), 1, "{all:?}");
    let times: Vec<&str> = all.iter().map(|report| report["time"].as_str().unwrap()).collect();
    assert!(times.is_sorted() && times[0].starts_with("20"), "{times:?}");

    // A part of the recording, a single sample, and tables.
    let from = &times[2][11..19];
    let part = replay_as_json(&file, &["--begin", from]);
    assert!(part[0]["time"].as_str().unwrap() >= times[1] && part.len() < all.len(), "{part:?}");
    let part = replay_as_json(&file, &["--begin", "+0s", "--end", times[1]]);
    assert!(part.len() < all.len(), "{part:?}");
    assert_eq!(replay_as_json(&file, &["--count", "2"]).len(), 2);
    assert!(replay_as_json(&file, &["--interval", "3"]).len() < all.len());
    let table = text(&replay(&file, &["--once", "--begin", times[1]]).stdout);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines[0], times[1]);
    assert!(
        lines[1].starts_with("NODE") && table.contains("1.0 MiB/s") && table.contains("evil\\x1b"),
        "{table}"
    );
    let nothing =
        replay(&file, &["--once", "--begin", "2020-01-01T00:00:00Z", "--end", "2020-01-02T00:00:00Z"]);
    let error = text(&nothing.stderr);
    assert!(
        nothing.status.code() == Some(1) && error.contains("nothing was recorded from 2020-01-01"),
        "{error}"
    );

    // Other users cannot read the file, and it is not overwritten.
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let fake = FakeDaemon::start(workloads(0));
    let again =
        numaward(&["record", file.to_str().unwrap(), "--server", &format!("http://{}", fake.address)]);
    let again = { again }.output().unwrap();
    assert!(again.status.code() == Some(1) && text(&again.stderr).contains("File exists"), "{again:?}");
}

#[test]
fn steps_through_recording_in_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("r");
    record_session(&file);
    let mut command = numaward(&["replay", file.to_str().unwrap()]);
    command.env("TERM", "xterm-256color").env("LC_ALL", "C.UTF-8").env_remove("NO_COLOR");
    let mut terminal = Terminal::start(&command, 60, 100).unwrap();
    let sees = |terminal: &Terminal, words: &[&str]| {
        let seen = terminal.wait_for(WAIT_TIMEOUT, |screen| {
            let text = screen.contents();
            words.iter().all(|word| text.contains(word))
        });
        if let Err(last) = seen {
            panic!("{words:?} does not appear:\n{last}");
        }
    };
    sees(&terminal, &["  1/", "paused", "database", "t T step", "pages on node 1"]);
    let count: usize = terminal.with_screen(|screen| {
        let text = screen.contents();
        text.split("  1/").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
    });
    assert!(!terminal.text().contains("oom kill"), "{}", terminal.text());
    terminal.press("t").unwrap();
    sees(&terminal, &[&format!("  2/{count}"), "1.0 MiB/s", "512.0 KiB/s"]);
    // Step to an event, then into the workload, which can be stepped as well.
    terminal.press("n").unwrap();
    sees(&terminal, &["oom kill"]);
    terminal.press("T").unwrap();
    terminal.wait_for(WAIT_TIMEOUT, |screen| !screen.contents().contains("oom kill")).unwrap();
    terminal.press("n\r").unwrap();
    sees(&terminal, &["75 % of its user memory is on the guaranteed nodes", "a process was killed"]);
    terminal.press("b").unwrap();
    sees(&terminal, &[&format!("  1/{count}"), "Allocation in the last 1 s"]);
    terminal.press("te").unwrap();
    sees(&terminal, &[&format!("  {count}/{count}")]);
    terminal.press("q[?").unwrap();
    sees(&terminal, &[&format!("  1/{count}"), "Keys of a recording"]);
    terminal.press("?p").unwrap();
    sees(&terminal, &["playing"]);
    // The loss of the daemon is shown.
    let is_lost = |text: &str| ["ended its stream", "broke off"].iter().any(|words| text.contains(words));
    terminal.wait_for(WAIT_TIMEOUT, |screen| is_lost(&screen.contents())).unwrap();
    sees(&terminal, &[&format!("  {count}/{count}"), "paused"]);
    // While a filter is entered, letters are text.
    terminal.press("/t\r").unwrap();
    sees(&terminal, &["filter: t", &format!("  {count}/{count}")]);
    terminal.press("q").unwrap();
    assert_eq!(terminal.wait(WAIT_TIMEOUT).unwrap().unwrap().code(), Some(0));
    terminal.wait_for(WAIT_TIMEOUT, |screen| !screen.alternate_screen()).unwrap();

    let piped = replay(&file, &[]);
    assert!(piped.status.code() == Some(1) && text(&piped.stderr).contains("--batch"), "{piped:?}");
}

#[test]
fn torn_recording_is_shown_in_part() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("r");
    record_session(&file);
    let whole = fs::read(&file).unwrap();
    let all = replay_as_json(&file, &[]);

    fs::write(&file, &whole[..whole.len() - 3]).unwrap();
    let torn = replay(&file, &["-o", "json"]);
    assert!(torn.status.success(), "{torn:?}");
    assert_eq!(text(&torn.stdout).lines().count(), all.len() - 1);
    let warning = text(&torn.stderr);
    assert!(warning.contains("breaks off at byte") && warning.contains("are lost"), "{warning}");

    let mut newer = whole.clone();
    newer[16] = 7;
    for (bytes, says) in [
        (&b""[..], "is empty: nothing was recorded"),
        (&newer, "version 7 of the format, but this numaward reads versions up to 1"),
        (b"{}\n", "is not a recording; `numaward record` makes one"),
        (&whole[..20], "has no moment"),
        (&whole[..60], "breaks off at byte 20"),
    ] {
        fs::write(&file, bytes).unwrap();
        for args in [&["--once"][..], &["-o", "json"]] {
            let refused = replay(&file, args);
            let error = text(&refused.stderr);
            assert!(refused.status.code() == Some(1) && error.contains(says), "{says}: {error}");
            assert!(error.contains(file.to_str().unwrap()) && error.lines().count() == 1, "{error}");
        }
    }
    let absent = replay(&dir.path().join("absent"), &["--once"]);
    assert!(text(&absent.stderr).contains("No such file"), "{absent:?}");
    for wrong in [&["--begin", "noon"][..], &["--begin", "+"], &["--end", "25:00"]] {
        let refused = replay(&file, wrong);
        assert!(refused.status.code() == Some(2) && text(&refused.stderr).contains("such as"), "{refused:?}");
    }
}

#[test]
fn recording_obeys_time_and_size_limit() {
    let daemon = daemon();
    let dir = tempfile::tempdir().unwrap();
    let socket = daemon.socket.to_str().unwrap();
    let file = dir.path().join("r");
    let child = record(&file, socket, &["--for", "4s"]);
    let output = child.wait_with_output().unwrap();
    let said = text(&output.stdout);
    assert!(output.status.success() && said.contains("moments from"), "{output:?}");
    let all = replay_as_json(&file, &[]);
    assert!(!all.is_empty(), "{said}");
    assert_eq!(all[0]["nodes"][1]["node"], 2);
    let status = replay(&file, &["--once"]);
    assert!(text(&status.stdout).contains("0     0-3   2.0 GiB"), "{status:?}");

    let small = dir.path().join("small");
    let server = format!("http://{}", daemon.address);
    let output = numaward(&["record", small.to_str().unwrap(), "--max-size", "2Ki", "--server", &server]);
    let output = { output }.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stderr).contains("has reached --max-size"), "{output:?}");
    assert!(fs::metadata(&small).unwrap().len() <= 2048);
    assert!(!replay_as_json(&small, &[]).is_empty());

    for (args, says) in [
        (&["--every", "100ms"][..], "must be at least one second"),
        (&["--for", "0s"], "above zero"),
        (&["--max-size", "much"], "much"),
    ] {
        let wrong = numaward(&["record"]).args(args).output().unwrap();
        assert!(wrong.status.code() == Some(2) && text(&wrong.stderr).contains(says), "{wrong:?}");
    }
    let nobody = numaward(&["record", "--server", "http://127.0.0.1:1"]).current_dir(&dir).output().unwrap();
    assert_eq!(nobody.status.code(), Some(4), "{nobody:?}");
    let left: Vec<_> = fs::read_dir(&dir).unwrap().collect();
    assert_eq!(left.len(), 2, "nothing is left where nothing is recorded");
}
