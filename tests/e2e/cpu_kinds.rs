//! Requests for kinds of exclusive CPUs, on a kernel with isolated and tickless CPUs and with simulated frequencies; and
//! exclusive CPUs with unused siblings.

use numaward_tests::{TestEnvironment, boot};
use numaward_vm::GuestTopology;

#[test]
fn gives_cpus_of_requested_kind() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("4,4"), Some("512M,512M"), None).unwrap();
    let vm = bench.vm(machine).append("isolcpus=2-3,6 nohz_full=3,5-6");
    let report = boot(&vm, include_str!("cpu_kinds.sh"));

    let topology = report.json("topology");
    assert_eq!((&topology["isolatedCpus"], &topology["nohzFullCpus"]), (&"2-3,6".into(), &"3,5-6".into()));
    assert_eq!(topology["efficiencyCpus"], "", "the emulated cores are alike");
    assert_eq!(topology["lowerFrequencyCpus"], "0,2-3,5-7", "as made up");
    assert!(report.section("topology for people").contains("CPUs without a tick: 3,5-6"), "{report}");

    let allowed =
        |cpus: &str, node: u32| format!("Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{node}\ncode 0");
    assert_eq!(report.section("isolated"), allowed("2-3", 0));
    assert_eq!(report.section("without a tick"), allowed("5-6", 1));
    assert_eq!(report.section("both"), allowed("3", 0));
    assert_eq!(report.section("of the highest frequency"), allowed("4", 1));
    assert!(report.section("explained").contains("terms: CPUs isolated, CPUs nohz-full"), "{report}");
    for (section, words) in [
        ("too many", "node 0: cpu requested 3, free 2, too little"),
        ("too fast", "node 1: cpu requested 2, free 1, too little"),
        ("none of it", "refused: no CPU is of the kind efficiency"),
        ("shared", "--cpu-kind: it is about exclusive CPUs"),
        ("unknown", "[possible values: performance, efficiency, high-frequency, isolated, nohz-full]"),
    ] {
        let refused = report.section(section);
        assert!(refused.contains(words) && !refused.ends_with("code 0"), "{section}: {refused}");
    }
}

#[test]
fn hides_siblings_of_exclusive_cpus() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("4,8"), Some("512M,512M"), None).unwrap();
    let report = boot(&bench.vm(machine.with_threads(2).unwrap()), include_str!("cpu_siblings.sh"));

    let siblings: Vec<_> = report.section("siblings").lines().collect();
    assert_eq!(siblings, ["0-1", "2-3", "4-5", "6-7", "8-9", "10-11"]);
    let held = &report.json("held")["allocations"][0];
    assert_eq!((&held["cpus"], &held["hiddenCpus"]), (&"4,6".into(), &"5,7".into()), "{held}");
    assert_eq!(held["placement"]["hideSiblings"], true);
    assert!(
        report.section("explained").contains("other threads of its cores stay unused: CPUs 5,7"),
        "{report}"
    );
    assert_eq!(report.section("its CPUs"), "4,6");
    assert_eq!(report.section("those of others"), "0-3,8-11");
    for (section, words) in [
        ("too few", "node 1: cpu requested 2, free 1, too little"),
        ("shared", "--hide-siblings: it is about exclusive CPUs"),
    ] {
        let refused = report.section(section);
        assert!(refused.contains(words) && !refused.ends_with("code 0"), "{section}: {refused}");
    }
    let kept = report.json("kept");
    assert!(kept["allocations"].as_array().unwrap().iter().any(|kept| kept["hiddenCpus"] == "5,7"), "{kept}");
    assert_eq!(report.json("released")["allocations"], serde_json::json!([]));
}
