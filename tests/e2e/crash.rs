//! The daemon is killed at arbitrary points and recovers. `numaward-crash-check` runs in the machine.

use std::time::Duration;

use numaward_tests::{TestEnvironment, boot, seed};
use numaward_vm::GuestTopology;

#[test]
fn recovers_from_crash_at_any_point() {
    let Some(bench) = TestEnvironment::open() else { return };
    let (kills, minutes) = if bench.is_slow() { (200, 40) } else { (10, 5) };
    let machine = GuestTopology::parse(None, Some("2,1,2,1"), Some("384M,384M,384M,384M"), None).unwrap();
    let seed = seed();
    let script = format!("set -eu\nsection check\nnumaward-crash-check check --kills {kills} --seed {seed}");
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(minutes)), &script);
    let said = report.section("check");
    println!("seed {seed}: {said}");
    assert!(said.starts_with(&format!("ok: {kills} kills")), "seed {seed}: {said}");
}
