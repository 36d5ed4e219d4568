//! The daemon answers a container runtime in time, whatever operation it waits for. `numaward-answers-check` runs in the machine.

use std::{
    io::{self, Write as _},
    time::Duration,
};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde_json::Value;

/// Budget of an answer to `CreateContainer`, whatever the daemon waits for. The machine executes 250 million instructions a second.
const BUDGET_MS: f64 = 100.0;
/// Upper limit of each answer of an idle daemon.
const MAX_IDLE_MS: f64 = 50.0;
/// Budget of an answer while many clients read.
const MAX_READ_MS: f64 = 400.0;
/// A page move takes at least this long, so that a daemon that waits for it exceeds the budget.
const MIN_MOVE_MS: f64 = 1000.0;
/// Minimum number of containers that are created in each phase.
const CALLS: u64 = 50;
/// Number of clients that read concurrently in the last phase.
const CLIENTS: u64 = 50;

fn phase(report: &ScriptReport, name: &str) -> Value {
    let line = report.section("check").lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
    let line = line.unwrap_or_else(|| panic!("no phase {name:?} in\n{report}"));
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
}

fn figure(phase: &Value, name: &str) -> f64 {
    phase[name].as_f64().unwrap_or_else(|| panic!("no {name} in {phase}"))
}

#[test]
fn answers_runtime_while_it_waits() {
    let Some(bench) = TestEnvironment::open() else { return };
    // Node 0 is too small for the guarantee of the load whose pages move: they move to node 1.
    let machine = GuestTopology::parse(None, Some("3,3"), Some("1G,2G"), None).unwrap();
    let vm = bench.vm(machine).limit(Duration::from_mins(10));
    let report = boot(&vm, "section check\nnumaward-answers-check || exit 1");
    // Prints the figures also if all checks pass: `writeln!` bypasses the output capture of the test harness.
    let _ = writeln!(io::stderr(), "{}", report.section("check"));
    for (name, limit) in [
        ("idle", MAX_IDLE_MS),
        ("page move", BUDGET_MS),
        ("silent systemd", BUDGET_MS),
        ("silent bus", BUDGET_MS),
        ("idle with workloads", MAX_IDLE_MS),
        // Up to twelve readers compete for the daemon's only CPU.
        ("scraped", MAX_READ_MS),
    ] {
        let phase = phase(&report, name);
        assert!(phase["calls"].as_u64() >= Some(CALLS), "{name}: {phase}");
        assert!(figure(&phase, "medianMs") < BUDGET_MS, "{name}: {phase}\n{report}");
        assert!(figure(&phase, "maxMs") < limit, "{name}: {phase}, limit {limit} ms\n{report}");
    }
    let moved = figure(&phase(&report, "page move"), "shortestMoveMs");
    assert!(
        moved >= MIN_MOVE_MS,
        "pages moved in {moved} ms: too soon to see whether an answer waits for them"
    );
    // A client gets a whole answer or a refusal, and each gets an answer in the end.
    let scraped = phase(&report, "scraped");
    assert_eq!(scraped["clientsAnswered"], CLIENTS, "{scraped}\n{report}");
    assert!(scraped["answersMeanwhile"].as_u64() >= Some(CLIENTS), "{scraped}\n{report}");
    assert_eq!(scraped["failures"], 0, "{scraped}\n{report}");
}
