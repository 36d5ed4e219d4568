//! Features of containerd 2.2 or 2.3 and newer. Debian's version is older, so the programs come from a folder.

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use serde_json::{Value, json};

use super::{CONTAINERD, Driver, MEMORY, Release, V2, V2_CRUN, full, lines, machine, nodes, numbers};

/// Boots a machine with these CPUs and this memory and with the folder's runtime, and runs the script. If programs are missing,
/// prints the reason and returns `None`.
fn run(release: &Release, of: (&str, &str), script: &str) -> Option<ScriptReport> {
    if release.folder().is_none() {
        // Skipped also if `CI=true`: Debian's version is older.
        eprintln!(
            "skipped: {CONTAINERD} is not set; run `cargo xtask vm test containerd::newer --containerd DIR`"
        );
        return None;
    }
    let (vm, _files) = machine(&TestEnvironment::open()?, nodes(of), release, Driver::Cgroupfs)?;
    let report = boot(&vm, &full(release, Driver::Cgroupfs, script));
    eprintln!("{report}");
    Some(report)
}

/// Returns the pages of the 256 MiB load on each node.
fn pages(report: &ScriptReport, section: &str) -> [u64; 2] {
    let pages = ["0", "1"].map(|node| report.json(section)["pages_by_node"][node].as_u64().unwrap_or(0));
    assert_eq!(pages[0] + pages[1], 256 << 8, "{section}: {report}");
    pages
}

#[test]
fn containers_get_memory_policy() {
    check_memory_policy(&V2);
}

#[test]
fn crun_sets_memory_policy() {
    check_memory_policy(&V2_CRUN);
}

/// From its first instruction, a container has the memory policy of its pod, which the OCI runtime sets.
fn check_memory_policy(release: &Release) {
    let script = include_str!("memory_policy.sh");
    let Some(report) = run(release, ("3,3", "1280M,1280M"), script) else { return };
    for (policy, shown) in [
        ("none", "default"),
        ("bind", "bind=static:0-1"),
        ("preferred-many", "prefer (many)=static:0-1"),
        ("interleave", "interleave=static:0-1"),
        ("weighted-interleave", "weighted interleave=static:0-1"),
    ] {
        assert_eq!(report.section(&format!("nodes of {policy}")), "0-1", "{policy}");
        assert_eq!(report.section(&format!("policy of {policy}")), shown, "{policy}");
        let held = &report.json(&format!("allocation of {policy}"))["allocations"][0]["placement"];
        let expected = if policy == "none" { Value::Null } else { json!(policy) };
        assert_eq!(held["memoryPolicy"], expected, "{policy}: {held}");
    }
    let [first, second] = pages(&report, "load of interleave");
    assert!(first.abs_diff(second) < 256, "{first} and {second} pages");
    let [first, second] = pages(&report, "load of none");
    assert!(first.min(second) < 256, "{first} and {second} pages: without a policy, they are local");
    assert_eq!(report.section("policy of shared"), "interleave=static:0-1");
    let metrics = report.section("metrics");
    assert_eq!(metrics, "numaward_nri_memory_policies_missing_total 0");
    assert!(!report.section("log").contains("cannot be seen"), "{report}");
    report.section("end");
}

/// Message of the runtime's validator if numaward is not connected.
const NOT_PRESENT: &str = r#"required plugin "numaward" not present"#;

#[test]
fn required_plugin_stops_pods() {
    check_required_plugin(&V2);
}

/// A pod that requires numaward does not start without it. The pod or the runtime's configuration declares the requirement.
pub(super) fn check_required_plugin(release: &Release) {
    let Some(report) = run(release, ("3,3", MEMORY), include_str!("required.sh")) else { return };
    let is_refused = |section: &str| {
        let text = report.section(section);
        assert!(text.contains("CreateContainer: ") && text.contains(NOT_PRESENT), "{section}: {text}");
    };
    let is_unpinned =
        |section: &str| assert_eq!(lines(&report, section)[..2], [["cpus"], ["mems"]], "{section}");
    let is_pinned = |section: &str| {
        let found = lines(&report, section);
        let [cpus, mems, allowed_cpus, allowed_mems] = &found[..] else { panic!("{section}: {found:?}") };
        assert_eq!((numbers(cpus[1]).len(), numbers(mems[1]).len()), (1, 1), "{section}: {found:?}");
        assert_eq!((cpus[1], mems[1]), (allowed_cpus[1], allowed_mems[1]), "{section}");
    };

    is_unpinned("not asked");
    is_refused("asked");
    is_refused("asked for a container");
    is_refused("missing");
    is_unpinned("tolerated");
    is_pinned("placed");
    let text = report.section("another is missing");
    assert!(text.contains(r#"required plugin "other" not present"#), "{text}");
    let held = report.json("given back");
    let held: Vec<_> = held["allocations"].as_array().unwrap().iter().map(|held| &held["name"]).collect();
    assert_eq!(held, ["default/placed/main"]);

    // The runtime counts a plugin as present even if its last request timed out, so it creates one more container.
    is_unpinned("silent");
    is_refused("after silent");
    is_pinned("adopted");
    is_refused("gone");
    report.section("end");
}
