//! Enforcement and the ledger store on a real kernel. `numaward-enforce-check` runs in the machine.

use std::time::Duration;

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::GuestTopology;

/// Names of the checks that must have run.
const CHECKS: [&str; 16] = [
    "knobs",
    "ancestors",
    "migration",
    "migration-first",
    "never-empty-never-wider",
    "partition",
    "partition-nested",
    "partition-refused",
    "sibling-partition",
    "watch",
    "fight",
    "gone",
    "refused",
    "many",
    "ledger-full-disk",
    "ledger-read-only",
];

#[test]
fn enforcement_holds_on_this_kernel() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("2,2"), Some("1G,1G"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(10)), include_str!("enforce.sh"));
    let said = report.section("checks");
    for check in CHECKS {
        assert!(said.lines().any(|line| line.starts_with(&format!("ok {check}: "))), "{check}:\n{said}");
    }
}
