//! `mode: observe`: beside a kubelet that pins containers itself, numaward writes no knob and reports broken guarantees of the
//! kubelet.

use numaward_tests::{TestEnvironment, assert_near, boot};
use numaward_vm::GuestTopology;

const MIB: u64 = 1 << 20;

/// Returns the missed bytes on a node, from lines of `/metrics`.
fn missed(section: &str, node: u32) -> Option<u64> {
    let label = format!("numa_node=\"{node}\"}} ");
    section
        .lines()
        .find_map(|line| line.contains("workload=\"pods\"").then(|| line.split_once(&label)).flatten())
        .map(|(_, bytes)| bytes.parse().unwrap())
}

#[test]
fn reports_broken_kubelet_guarantees() {
    let Some(bench) = TestEnvironment::open() else { return };
    let machine = GuestTopology::parse(None, Some("1,1"), Some("512M,512M"), None).unwrap();
    // Recorded from a kubelet: the case single-numa-fit-basic of tests/conformance.
    let files = concat!(env!("CARGO_MANIFEST_DIR"), "/e2e/kubelet");
    let vm = ["cpu_manager_state", "memory_manager_state"]
        .into_iter()
        .fold(bench.vm(machine), |vm, file| vm.file(format!("{files}/{file}"), format!("/kubelet/{file}")));
    let (container, scope) = ("a".repeat(64), format!("cri-containerd-{}.scope", "b".repeat(64)));
    let script = format!("container={container}\nscope={scope}\n{}", include_str!("observe.sh"));
    let report = boot(&vm, &script);

    let refused = report.section("enforce refused");
    for words in [
        "mode: observe",
        "cpuManagerPolicy: static, according to /var/lib/kubelet/cpu_manager_state",
        "set cpuManagerPolicy: none",
        "set memoryManagerPolicy: None",
    ] {
        assert!(refused.contains(words), "{words}: {refused}");
    }
    let doctor = report.json("doctor");
    let kubelet = doctor.as_array().unwrap().iter().find(|check| check["check"] == "kubelet").unwrap();
    assert_eq!(kubelet["verdict"], "warn", "{kubelet}");
    assert!(kubelet["fix"].as_str().unwrap().contains("memoryManagerPolicy: None"), "{kubelet}");

    let allocations = report.json("allocations");
    let of = |uid: &str| {
        let all = allocations["allocations"].as_array().unwrap();
        let found = all.iter().find(|of| of["target"]["container"]["podUid"] == uid);
        found.unwrap_or_else(|| panic!("{uid}: {allocations:#}")).clone()
    };
    let (p1, p3) = (of("p1"), of("p3"));
    assert_eq!((&p1["cpus"], &p1["nodes"]), (&"1,9".into(), &"0".into()));
    assert_eq!((&p3["cpus"], &p3["nodes"]), (&"4,12".into(), &"1".into()));
    assert_eq!(p1["cgroup"], format!("/kubepods/podp1/{container}"));
    assert_eq!(p3["cgroup"], format!("/kubepods.slice/kubepods-podp3.slice/{scope}"));

    let (kept, broken) = (report.section("kept"), report.section("broken"));
    let before = missed(kept, 1).unwrap_or_else(|| panic!("{kept}"));
    let after = missed(broken, 1).unwrap_or_else(|| panic!("{broken}"));
    // Page tables and stacks of the load are not bound to the node.
    assert!(before < MIB, "{before} bytes of a container that lies where it should:\n{kept}");
    assert_near("missed", after - before, 64 * MIB, 64 * MIB, 5);
    assert_eq!(missed(broken, 0).unwrap() - missed(kept, 0).unwrap(), 0, "node 0 is guaranteed");

    let written = report.section("still running");
    assert_eq!(written.lines().next(), Some("same"), "{written}");
    assert_eq!(written.matches("No such file or directory").count(), 2, "{written}");
    assert_eq!(written.lines().nth(1), Some("control.sock"), "the only thing that it makes: {written}");

    let status = report.section("status");
    assert!(status.contains("1,9") && status.contains("4,12"), "{status}");
    let damaged = report.json("damaged");
    let degraded = damaged["degraded"].as_array().unwrap();
    let kubelet = degraded.iter().find(|degraded| degraded["part"] == "kubelet");
    let reason = kubelet.unwrap_or_else(|| panic!("{damaged:#}"))["reason"].as_str().unwrap();
    assert!(reason.contains("memory_manager_state") && reason.contains("corrupted"), "{reason}");
}
