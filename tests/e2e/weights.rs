//! `enforcement.interleaveWeights`: the kernel's weights follow from the bandwidths that the firmware reports, pages are
//! distributed accordingly, and the original weights are restored.

use std::time::Duration;

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::GuestTopology;
use serde_json::Value;

/// Pages of 128 MiB.
const PAGES: u64 = 128 << 8;

/// Returns the numbers of the first line. The next line may be the shell's message about the killed daemon.
fn numbers(report: &ScriptReport, section: &str) -> [u64; 2] {
    let line = report.section(section).lines().next().unwrap_or_default();
    let numbers: Vec<u64> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{section}: {line:?}\n{report}"))
}

#[test]
fn spreads_pages_by_bandwidth() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine =
        GuestTopology::parse(None, Some("2,0"), Some("1G,1G"), None).unwrap().with_slow(&[1]).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(10)), include_str!("weights.sh"));
    eprintln!("{report}");

    let [fast, slow] = numbers(&report, "bandwidths");
    assert!(fast > slow && slow > 0, "{report}");
    let [found, other] = numbers(&report, "before");
    assert_eq!(other, 2, "{report}");
    let held = numbers(&report, "held");
    // The sum is 32 before rounding, and the weights are as small as possible.
    let [first, second] = [fast, slow].map(|of| ((64 * of + fast + slow) / (2 * (fast + slow))).max(1));
    assert_eq!(held[0] * second, held[1] * first, "{report}");
    assert!((2..=held[1]).all(|by| !(held[0].is_multiple_of(by) && held[1].is_multiple_of(by))), "{report}");
    assert!(report.section("doctor").contains("can be set: "), "{report}");
    let [on_fast, on_slow] = held;
    let says = format!(
        "The weights for weighted-interleave are {on_fast} on node 0 and {on_slow} on node 1, by bandwidth; they were {found} \
         and {other}."
    );
    assert!(report.section("events").contains(&says), "{says}\n{report}");
    let figures = report.section("figures");
    for (node, weight) in [(0, on_fast), (1, on_slow)] {
        let line = format!("numaward_interleave_weight{{numa_node=\"{node}\"}} {weight}");
        assert!(figures.contains(&line), "{line}\n{report}");
    }

    let load: Value =
        serde_json::from_str(report.section("load")).unwrap_or_else(|error| panic!("{error}: {report}"));
    let pages = ["0", "1"].map(|node| load["pages_by_node"][node].as_u64().unwrap_or(0));
    assert_eq!(pages[0] + pages[1], PAGES, "{report}");
    let expected = PAGES * on_slow / (on_fast + on_slow);
    assert!(pages[1].abs_diff(expected) <= expected / 10, "{pages:?}, not {expected} on node 1:\n{report}");

    assert_eq!(numbers(&report, "held again"), held, "the daemon was killed in between");
    assert_eq!(numbers(&report, "of somebody else"), [on_fast, 99], "{report}");
    assert_eq!(numbers(&report, "kept"), [found, 99], "what others write stays");
    assert_eq!(numbers(&report, "held anew"), held, "{report}");
    assert_eq!(numbers(&report, "uninstalled"), [found, other], "{report}");
}
