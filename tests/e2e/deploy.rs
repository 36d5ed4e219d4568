//! A real containerd runs the image with the security context of the rendered manifests, once with the runtime's seccomp profile
//! and once with that of the component `seccomp`. The test shows that the privileges are sufficient, and that no unnecessary one
//! remains.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{Arch, Cache};
use serde_json::Value;

use crate::containerd::{Driver, MEMORY, V2, full, machine, nodes};

/// Version of the workspace.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the `DaemonSet` of an overlay.
fn daemon_set(overlay: &str) -> Value {
    let kustomize = Cache::locate().unwrap().root().join("tools/kustomize/kustomize");
    let folder = checkout(&format!("deploy/overlays/{overlay}"));
    let output = Command::new(kustomize).arg("build").arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let document = text.split("\n---\n").find(|document| document.contains("kind: DaemonSet")).unwrap();
    serde_norway::from_str(document).unwrap()
}

pub(crate) fn checkout(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Asserts the capability sets of the process, and that it has a seccomp filter.
fn check_privileges(report: &ScriptReport, section: &str, bounding: u64, effective: u64) {
    let value = |name: &str| {
        let mut lines = report.section(section).lines();
        let line = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
        line.unwrap_or_else(|| panic!("{section}: no {name}:\n{report}"))
    };
    let set = |name: &str| u64::from_str_radix(value(name), 16).unwrap();
    assert_eq!((set("CapBnd"), set("CapEff")), (bounding, effective), "{report}");
    assert_eq!((value("Seccomp"), value("NoNewPrivs")), ("2", "1"), "{report}");
}

/// All probes attach, and only the API server is reported as missing: the machine has none.
fn check_status(report: &ScriptReport, section: &str) {
    let status = report.json(section);
    assert_eq!(status["probes"].as_array().unwrap().len(), 10, "{status}");
    for probe in status["probes"].as_array().unwrap() {
        assert_ne!(probe["mode"], "absent", "{status}");
    }
    // The self check passes under the runtime's seccomp profile.
    assert_eq!(status["probes"][0]["selfCheck"], "passed on nodes 0-1", "{status}");
    for lacking in status["degraded"].as_array().unwrap() {
        assert_eq!(lacking["part"], "kubernetes_api", "{status}");
    }
}

#[test]
fn image_runs_as_manifests_demand() {
    const BPF: u64 = 1 << 39;
    const PERFMON: u64 = 1 << 38;
    const SYS_ADMIN: u64 = 1 << 21;
    const DAC_READ_SEARCH: u64 = 1 << 2;
    const KEPT_CAPABILITIES: u64 = 1 << 1 | 1 << 23;

    let Some(bench) = TestEnvironment::open() else { return };
    let Some((mut vm, _files)) = machine(&bench, nodes(("3,3", MEMORY)), &V2, Driver::Cgroupfs) else {
        return;
    };
    let scratch = tempfile::tempdir().unwrap();
    for overlay in ["observe", "try", "enforce"] {
        let path = scratch.path().join(overlay);
        let mut set = daemon_set(overlay);
        if overlay == "enforce" {
            let component =
                std::fs::read_to_string(checkout("deploy/components/seccomp/daemonset.yaml")).unwrap();
            let component: Value = serde_norway::from_str(&component).unwrap();
            let profile = "/spec/template/spec/containers/0/securityContext/seccompProfile";
            *set.pointer_mut(profile).unwrap() = component.pointer(profile).unwrap().clone();
        }
        std::fs::write(&path, set.to_string()).unwrap();
        vm = vm.file(path, format!("/{overlay}.json"));
        vm = vm.file(checkout(&format!("deploy/overlays/{overlay}/config.yaml")), format!("/{overlay}.yaml"));
    }
    let image = bench.made(&format!("numaward-{VERSION}-oci.tar"));
    let vm = vm.file(image, "/numaward.tar").limit(Duration::from_mins(20));
    let vm = vm.file(checkout("deploy/seccomp/numaward.json"), "/var/lib/kubelet/seccomp/numaward.json");
    let script = concat!(include_str!("calls.sh"), include_str!("deploy.sh"));
    let report = boot(&vm, &full(&V2, Driver::Cgroupfs, script));
    eprintln!("{report}");

    let name = format!("docker.io/library/numaward:{VERSION}");
    assert!(report.section("images").lines().any(|line| line == name), "{report}");

    check_privileges(&report, "observe capabilities", BPF | PERFMON | DAC_READ_SEARCH, DAC_READ_SEARCH);
    check_status(&report, "observe status");

    check_privileges(&report, "try capabilities", BPF | PERFMON | DAC_READ_SEARCH, DAC_READ_SEARCH);
    check_status(&report, "try status");
    assert_eq!(report.section("tried"), "cpus  mems  min 0");
    let decided = report.json("decided");
    let [decided] = decided["events"].as_array().unwrap().as_slice() else { panic!("{decided}") };
    let message = decided["message"].as_str().unwrap();
    let words = "Dry run: container main of pod default/tried would have had CPUs ";
    assert!(message.starts_with(words) && message.contains("64Mi of memory on node "), "{decided}");
    assert_eq!(decided["details"]["reason"], "NumaPlacementDryRun", "{decided}");
    assert_eq!(report.section("try leaves"), "", "nothing of it is on the host");

    check_privileges(
        &report,
        "enforce capabilities",
        BPF | PERFMON | SYS_ADMIN | KEPT_CAPABILITIES,
        KEPT_CAPABILITIES,
    );
    check_status(&report, "enforce status");
    // The container fits on either node.
    assert!(["1-2\n0", "3-4\n1"].contains(&report.section("placed")), "{report}");
    let allocations = report.json("drift");
    let drift = &allocations["allocations"][0]["drift"][0];
    // The pod has the host's process ids and may use fanotify, so the daemon can name the writer. The path is relative to the
    // root of the hierarchy, although the container has its own cgroup namespace.
    let writer = &drift["writer"];
    assert_eq!((&drift["noticed"], &writer["command"]), (&"write".into(), &"sh".into()), "{allocations}");
    assert_eq!(writer["cgroup"], "/", "{allocations}");
    // With the seccomp profile of numaward.
    assert_eq!(report.section("enforce commands"), "");
    // The C library of the programs for Arm (glibc 2.36) does not call clone3(2).
    let refused = if bench.kernel().arch() == Arch::Amd64 { "clone3" } else { "" };
    assert_eq!(report.section("enforce refused calls"), refused);
    assert!(report.section("enforce made calls").lines().any(|call| call == "bpf"), "{report}");
    let sockets: Vec<_> = report.section("enforce sockets").lines().collect();
    assert_eq!(sockets, ["control.sock", "pod-resources", "pod-resources/kubelet.sock"]);
    report.section("end");
}
