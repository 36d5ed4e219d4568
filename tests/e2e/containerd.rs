//! Containers that a real runtime creates are placed, isolated, adopted and refused, and their guarantees are released.
//!
//! The programs are Debian's packages. `--containerd` names a folder with a newer containerd, which replaces [`V2`], and `--crio` a
//! folder with CRI-O, which Debian does not have.

mod crio;
mod newer;

use std::{
    collections::BTreeSet,
    env,
    num::ParseIntError,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use numaward_tests::{ScriptReport, TestEnvironment, boot};
use numaward_vm::{Arch, Cache, GuestTopology, Vm};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Name of the variable with the folder of containerd 2.3 or newer.
const CONTAINERD: &str = "NUMAWARD_CONTAINERD";
/// Name of the variable with the folder of CRI-O.
const CRIO: &str = "NUMAWARD_CRIO";
const RUNC: &str = "runc";
const CRUN: &str = "crun";
/// Folder of crun's and conmon's packages in the cache.
const CRUN_PACKAGES: &str = "sid-crun";
const LIBRARIES: [&str; 5] =
    ["libc.so.6", "libdl.so.2", "libpthread.so.0", "libresolv.so.2", "libseccomp.so.2"];
/// More libraries of crun and conmon.
const CRUN_LIBRARIES: [&str; 8] = [
    "libatomic.so.1",
    "libblake3.so.0",
    "libcap.so.2",
    "libglib-2.0.so.0",
    "libjson-c.so.5",
    "libm.so.6",
    "libpcre2-8.so.0",
    "libsystemd.so.0",
];

/// Returns Debian's library folder, relative to `/usr`.
fn library_folder(arch: Arch) -> String {
    format!("lib/{}-linux-gnu", arch.kernel_name())
}

/// Returns the folder and the name of the dynamic loader.
fn loader(arch: Arch) -> (&'static str, &'static str) {
    match arch {
        Arch::Amd64 => ("lib64", "ld-linux-x86-64.so.2"),
        Arch::Arm64 => ("lib", "ld-linux-aarch64.so.1"),
    }
}

/// Program that implements CRI.
#[derive(Clone, Copy)]
enum CriServer {
    Containerd {
        /// Arguments of `ctr images import`.
        import: &'static str,
    },
    Crio,
}

/// A container runtime: a server with an OCI runtime, of a release of Debian.
#[derive(Clone, Copy)]
pub(crate) struct Release {
    name: &'static str,
    server: CriServer,
    /// Configuration of the server in this folder and in the machine.
    config: (&'static str, &'static str),
    oci: &'static str,
}

pub(crate) const V2: Release = Release {
    name: "sid",
    server: CriServer::Containerd { import: "--local --snapshotter native" },
    config: ("2.toml", "/etc/containerd/config.toml"),
    oci: RUNC,
};
const V1: Release = Release {
    name: "trixie",
    server: CriServer::Containerd { import: "--snapshotter native" },
    config: ("1.7.toml", "/etc/containerd/config.toml"),
    oci: RUNC,
};
const V2_CRUN: Release = Release { oci: CRUN, ..V2 };

impl Release {
    /// Returns the folder with the server that replaces Debian's.
    fn folder(&self) -> Option<PathBuf> {
        let variable = match self.server {
            CriServer::Containerd { .. } if self.name == V2.name => CONTAINERD,
            CriServer::Containerd { .. } => return None,
            CriServer::Crio => CRIO,
        };
        env::var_os(variable).map(PathBuf::from)
    }

    /// Returns the programs to copy into the machine with their folders. A program of Debian may be replaced, the others must be in
    /// [`Self::folder`] if there is one.
    fn programs(&self) -> Vec<RuntimeProgram> {
        let own = |name| RuntimeProgram { name, folder: "bin", is_from_debian: false };
        let mut programs = match self.server {
            CriServer::Containerd { .. } => {
                ["containerd", "containerd-shim-runc-v2", "ctr"].map(own).to_vec()
            }
            CriServer::Crio => {
                let monitor = RuntimeProgram { is_from_debian: true, ..own("conmon") };
                vec![own("crio"), own("pinns"), monitor]
            }
        };
        programs.push(RuntimeProgram { name: self.oci, folder: "sbin", is_from_debian: true });
        programs
    }

    fn packages(&self) -> Vec<&'static str> {
        if self.oci == CRUN { vec![self.name, CRUN_PACKAGES] } else { vec![self.name] }
    }

    /// Returns the configuration of the server.
    fn configuration(&self, arch: Arch, driver: Driver) -> String {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("e2e/containerd").join(self.config.0);
        let text = std::fs::read_to_string(path).unwrap();
        let cgroupfs = match self.server {
            CriServer::Containerd { .. } => ("SystemdCgroup = false", "SystemdCgroup = true"),
            CriServer::Crio => (r#"cgroup_manager = "cgroupfs""#, r#"cgroup_manager = "systemd""#),
        };
        assert!(text.contains(cgroupfs.0));
        let text = text.replace("linux/amd64", &format!("linux/{arch}"));
        let text = text.replace("/usr/sbin/runc", &format!("/usr/sbin/{}", self.oci));
        if driver == Driver::Systemd { text.replace(cgroupfs.0, cgroupfs.1) } else { text }
    }
}

/// A program that is copied into the machine.
#[derive(Clone, Copy)]
struct RuntimeProgram {
    name: &'static str,
    /// Folder below `/usr`.
    folder: &'static str,
    is_from_debian: bool,
}

/// Cgroup driver of the container runtime.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Driver {
    Cgroupfs,
    /// systemd creates the cgroups, and is the first process of the machine.
    Systemd,
}

/// Memory of the two nodes: enough for containerd and the containers of the tests.
pub(crate) const MEMORY: &str = "1536M,1G";

/// Unpacks the packages that `cargo xtask setup --all` has fetched.
fn unpack(arch: Arch, release: &str, into: &Path) -> Result<(), String> {
    let cache = Cache::locate().map_err(|error| error.to_string())?;
    let folder = cache.containerd_dir(arch, release);
    let packages = std::fs::read_dir(&folder)
        .map_err(|error| format!("{}: {error}; run `cargo xtask setup --all`", folder.display()))?;
    for package in packages {
        let package = package.map_err(|error| error.to_string())?.path();
        if package.extension().is_none_or(|extension| extension != "deb") {
            continue;
        }
        let status = Command::new("dpkg-deb").arg("--extract").arg(&package).arg(into).status();
        match status {
            Ok(status) if status.success() => {}
            Ok(status) => return Err(format!("{}: dpkg-deb: {status}", package.display())),
            Err(error) => return Err(format!("dpkg-deb (Debian package dpkg): {error}")),
        }
    }
    Ok(())
}

/// Returns a machine with these CPUs and this memory on its nodes.
pub(crate) fn nodes((cpus, memory): (&str, &str)) -> GuestTopology {
    GuestTopology::parse(None, Some(cpus), Some(memory), None).unwrap()
}

/// Returns a machine with this runtime, and the folder with the files that are copied into it. If packages are missing, prints the
/// reason and returns `None`.
pub(crate) fn machine(
    bench: &TestEnvironment,
    machine: GuestTopology,
    release: &Release,
    driver: Driver,
) -> Option<(Vm, TempDir)> {
    if matches!(release.server, CriServer::Crio) && release.folder().is_none() {
        // Skipped also if `CI=true`: Debian has no package of it.
        eprintln!("skipped: {CRIO} is not set; run `cargo xtask vm test containerd::crio --crio DIR`");
        return None;
    }
    let root = tempfile::tempdir().unwrap();
    let arch = bench.kernel().arch();
    let unpacked = release.packages().into_iter().try_for_each(|name| unpack(arch, name, root.path()));
    if let Err(reason) = unpacked {
        assert!(!numaward_tests_support::is_ci(), "this test cannot run: {reason}");
        eprintln!("skipped: {reason}");
        return None;
    }
    let vm = match driver {
        Driver::Cgroupfs => bench.vm(machine),
        Driver::Systemd => bench.vm_with_systemd(machine),
    };
    let mut vm = vm.limit(Duration::from_mins(15));
    let debian = ["usr/sbin", "usr/bin"].map(|folder| root.path().join(folder));
    let given = release.folder().map(|folder| [folder]);
    for RuntimeProgram { name, folder, is_from_debian } in release.programs() {
        let folders: Vec<_> = match &given {
            Some(folder) if !is_from_debian => folder.iter().collect(),
            _ => given.iter().flatten().chain(&debian).collect(),
        };
        let found: Vec<_> = folders.iter().map(|folder| folder.join(name)).collect();
        let path = found.iter().find(|path| path.is_file());
        let path = path.unwrap_or_else(|| panic!("there is none of {found:?}"));
        vm = vm.file(path, format!("/usr/{folder}/{name}"));
    }
    let library_folder = library_folder(arch);
    let libraries = root.path().join("usr").join(&library_folder);
    match driver {
        Driver::Cgroupfs => {
            let more = if release.oci == CRUN { &CRUN_LIBRARIES[..] } else { &[] };
            for library in LIBRARIES.iter().chain(more) {
                vm = vm.file(libraries.join(library), format!("/{library_folder}/{library}"));
            }
            let (folder, loader) = loader(arch);
            vm = vm.file(libraries.join(loader), format!("/{folder}/{loader}"));
        }
        Driver::Systemd => {
            // containerd needs a newer C library than the root file system has, so all libraries are replaced.
            for library in std::fs::read_dir(&libraries).unwrap() {
                let library = library.unwrap();
                let name = library.file_name().into_string().unwrap();
                if library.path().is_file() {
                    vm = vm.file(library.path(), format!("/usr/{library_folder}/{name}"));
                }
            }
        }
    }
    let config_file = root.path().join("config.toml");
    std::fs::write(&config_file, release.configuration(arch, driver)).unwrap();
    Some((vm.file(config_file, release.config.1), root))
}

/// Boots a machine with this runtime and runs the script. If packages are missing, prints the reason and returns `None`.
fn report(cpus: &str, release: &Release, driver: Driver, script: &str) -> Option<ScriptReport> {
    let (vm, _files) = machine(&TestEnvironment::open()?, nodes((cpus, MEMORY)), release, driver)?;
    Some(boot(&vm, &full(release, driver, script)))
}

/// Returns a script after the prelude that starts the runtime.
pub(crate) fn full(release: &Release, driver: Driver, script: &str) -> String {
    let driver = match driver {
        Driver::Cgroupfs => "cgroupfs",
        Driver::Systemd => "systemd",
    };
    let server = match release.server {
        CriServer::Containerd { import } => {
            format!("IMPORT='{import}'\n{}", include_str!("containerd/containerd.sh"))
        }
        CriServer::Crio => include_str!("containerd/crio.sh").to_owned(),
    };
    let prelude = include_str!("containerd/prelude.sh");
    format!("DRIVER={driver} OCI={}\n{server}\n{prelude}\n{script}", release.oci)
}

/// Protection of a pod with 128Mi: `memory.min` leaves a part to reclaim within the pod.
const MIN: &str = "117440512";
const LOW: &str = "134217728";

/// Asserts the memory protection of a container and of its ancestors, from the inside out. Containers have generated names.
fn assert_protected(report: &ScriptReport, section: &str, expected: &[(&str, &str, &str)]) {
    let found = lines(report, section);
    let found: Vec<_> = found
        .iter()
        .map(|line| {
            let is_container = line[0].len() >= 64;
            (if is_container { "container" } else { line[0] }, line[1], line[2])
        })
        .collect();
    assert_eq!(found, expected, "{section}:\n{report}");
}

/// Parses a list of numbers such as `0,3-5`.
pub(crate) fn numbers(text: &str) -> Vec<u64> {
    try_numbers(text).unwrap_or_else(|error| panic!("{text:?}: {error}"))
}

/// Parses a list of numbers that may be of a cgroup that is being removed, whose files are empty.
pub(crate) fn try_numbers(text: &str) -> Result<Vec<u64>, ParseIntError> {
    let mut numbers = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        numbers.extend(first.parse::<u64>()?..=last.parse()?);
    }
    Ok(numbers)
}

/// Asserts that the PodResources API reports the same CPUs and nodes as numaward itself.
fn assert_assigned(assigned: &Value, allocations: &Value) {
    let own = allocations["allocations"].as_array().unwrap().iter().map(|held| {
        let memory: u64 =
            held["memory"].as_array().unwrap().iter().map(|of| of["bytes"].as_u64().unwrap()).sum();
        let nodes = numbers(held["nodes"].as_str().unwrap());
        let memory = json!([{"type": "memory", "size": memory, "nodes": nodes}]);
        json!({"name": held["name"], "cpus": numbers(held["cpus"].as_str().unwrap()), "memory": memory})
    });
    let own: Vec<_> = own.collect();
    assert_eq!(assigned.as_array().unwrap(), &own);
}

/// Asserts that no page of a container is outside its guaranteed nodes.
fn assert_no_misses(report: &ScriptReport, section: &str) {
    let misses = report.samples(section, "numaward_numa_miss_bytes_total");
    assert!(misses.len() >= 2 && misses.values().all(|bytes| *bytes == 0.0), "{misses:#?}");
}

/// Asserts the number of containers that started unpinned: `away` while the daemon did not run, and none for other reasons.
fn assert_all_pinned(report: &ScriptReport, section: &str, away: u32) {
    let unpinned = report.samples(section, "numaward_containers_started_unpinned_total");
    let expected = |reason: &str| if reason == "reason=\"away\"" { f64::from(away) } else { 0.0 };
    let is_expected = unpinned.iter().all(|(reason, count)| (count - expected(reason)).abs() < 0.5);
    assert!(unpinned.contains_key("reason=\"late\"") && is_expected, "{unpinned:#?}");
}

/// Returns the lines of a section as words.
fn lines<'a>(report: &'a ScriptReport, section: &str) -> Vec<Vec<&'a str>> {
    report.section(section).lines().map(|line| line.split_whitespace().collect()).collect()
}

/// Returns the expected lines of a cgroup and its process on these CPUs and this node.
fn pinned(cpus: &'static str, node: &'static str) -> Vec<Vec<&'static str>> {
    vec![
        vec!["cpus", cpus],
        vec!["mems", node],
        vec!["Cpus_allowed_list:", cpus],
        vec!["Mems_allowed_list:", node],
    ]
}

fn check(release: &Release) {
    let script = include_str!("containerd/containers.sh");
    let Some(report) = report("3,3", release, Driver::Cgroupfs, script) else { return };
    eprintln!("{report}");

    // CPU 0 is reserved for the system; the first container gets the first free CPU of node 0.
    assert_eq!(lines(&report, "before")[0], ["cpus"]);
    assert_eq!(lines(&report, "adopted"), pinned("1", "0"));
    assert_eq!(lines(&report, "adopted shared")[0], ["cpus", "0,2-5"]);
    let metrics = report.section("adopted metrics");
    assert!(metrics.contains("numaward_nri_connected 1"), "{metrics}");
    assert!(metrics.contains(r#"containers_started_unpinned_total{reason="away"} 1"#), "{metrics}");

    if release.folder().is_none() {
        assert_eq!(report.section("policies missing"), "numaward_nri_memory_policies_missing_total 1");
    }
    // Only node 1 has two free CPUs.
    assert_eq!(lines(&report, "placed"), pinned("3-4", "1"));
    let first: Vec<_> = pinned("3-4", "1").split_off(2);
    assert_eq!(lines(&report, "placed first instruction"), first);
    let anon = &report.numa_stat("placed memory")["anon"];
    assert_eq!(anon[&0], 0, "{anon:?}");
    assert!(anon[&1] >= 48 << 20, "{anon:?}");
    assert_no_misses(&report, "placed misses");
    assert_eq!(lines(&report, "placed shared")[0], ["cpus", "0,2,5"]);
    // Includes the protection of `early`: 48Mi of `memory.min` and 64Mi of `memory.low`.
    let all = [("container", MIN, LOW), ("poddb", MIN, LOW), ("kubepods", "167772160", "201326592")];
    assert_protected(&report, "placed protection", &all);
    let names = report.section("placed names");
    for labels in [
        r#"namespace="default",pod="db",container="main",numa_node="1",type="anon""#,
        r#"namespace="default",pod="web",container="main",numa_node="0",type="anon""#,
    ] {
        assert!(names.contains(labels), "{labels}:\n{names}");
    }
    let allocations = report.json("placed allocations");
    let names: Vec<_> = allocations["allocations"].as_array().unwrap().iter().map(|a| &a["name"]).collect();
    assert_eq!(names, ["default/db/main", "default/early/main"]);
    assert_assigned(&report.json("placed assigned"), &allocations);

    // Containers without exclusive CPUs leave the CPUs of the resize. A resize beyond the free CPUs is refused and changes
    // nothing.
    assert_eq!(lines(&report, "resized"), pinned("3-5", "1"));
    assert_eq!(lines(&report, "resized shared")[0], ["cpus", "0,2"]);
    let all = [
        ("container", "150994944", "167772160"),
        ("poddb", "150994944", "167772160"),
        ("kubepods", "201326592", "234881024"),
    ];
    assert_protected(&report, "resized protection", &all);
    let refused = report.section("resize refused");
    assert!(refused.contains("numaward cannot resize container main of pod default/db"), "{refused}");
    assert!(refused.contains("node 1: cpu requested 1, free 0"), "{refused}");
    assert!(refused.contains("cpus 3-5\nmems 1"), "{refused}");
    assert_eq!(lines(&report, "resized back"), pinned("3-4", "1"));

    let refused = report.section("refused");
    assert!(refused.contains("numaward cannot place container main of pod default/big"), "{refused}");
    assert!(refused.contains("node 0: cpu requested 5, free 1"), "{refused}");
    assert_eq!(lines(&report, "after refused"), pinned("2", "0"));

    // The CPU of the removed pod `small` is given to the next container.
    assert_eq!(lines(&report, "meanwhile")[0], ["cpus"]);
    assert_eq!(lines(&report, "back"), pinned("2", "0"));
    assert_eq!(lines(&report, "back undisturbed"), pinned("3-4", "1"));
    let back = report.json("back allocations");
    let held: Vec<_> =
        back["allocations"].as_array().unwrap().iter().map(|a| (&a["name"], &a["cpus"])).collect();
    let expected = [("default/db/main", "3-4"), ("default/early/main", "1"), ("default/meanwhile/main", "2")];
    assert!(held.iter().zip(&expected).all(|((n, c), (en, ec))| *n == en && *c == ec), "{held:?}");
    assert_eq!(held.len(), expected.len());

    assert_eq!(lines(&report, "runtime back"), pinned("3-4", "1"));
    for section in ["back", "runtime back"] {
        assert_eq!(lines(&report, &format!("{section} early")), pinned("1", "0"), "{section}");
        let metrics = report.section(&format!("{section} metrics"));
        assert!(metrics.lines().count() > 3 && metrics.lines().all(|line| line.ends_with(" 0")), "{metrics}");
    }
    let mut at_once: Vec<_> = report.section("at once").lines().collect();
    at_once.sort_unstable();
    assert_eq!(at_once, ["2", "5", "refused"], "two CPUs are free for three");

    // The second daemon found `meanwhile` unpinned.
    assert_all_pinned(&report, "unpinned in the end", 1);
    let removed = report.json("removed");
    assert_eq!(removed["allocations"].as_array().unwrap().len(), 1);
    assert_eq!(removed["sharedCpus"], "0,2-5");
    assert_eq!(lines(&report, "removed shared")[0], ["cpus", "0,2-5"]);
    let early = [("poddb", "0", "0"), ("kubepods", "50331648", "67108864")];
    assert_protected(&report, "removed protection", &early);
    report.section("end");
}

#[test]
fn containerd_2() {
    check(&V2);
}

#[test]
fn containerd_1_7() {
    check(&V1);
}

#[test]
fn containerd_2_with_crun() {
    check(&V2_CRUN);
}

#[test]
fn forty_containers_share_no_cpu() {
    check_forty(&V2);
}

/// Of forty containers that are created at the same time, each has a CPU of its own or is refused.
fn check_forty(release: &Release) {
    let script = include_str!("containerd/forty.sh");
    let Some(report) = report("6,6", release, Driver::Cgroupfs, script) else { return };
    eprintln!("{report}");
    let mut taken = BTreeSet::new();
    for line in lines(&report, "cpus") {
        let [cpu, allowed] = line[..] else { panic!("started unpinned: {line:?}") };
        assert_eq!(cpu, allowed);
        assert!(taken.insert(cpu.parse::<u64>().unwrap()), "{cpu} twice");
    }
    // CPU 0 is reserved for the system.
    assert_eq!(taken, (1..12).collect());
    let refused: Vec<_> = report.section("refused").lines().collect();
    for line in &refused {
        assert!(line.contains("numaward cannot place container c") && line.contains("free 0"), "{line}");
    }
    assert_eq!(taken.len() + refused.len(), 40);
    let allocations = report.json("allocations");
    let held = allocations["allocations"].as_array().unwrap().iter();
    let held: BTreeSet<u64> = held.flat_map(|held| numbers(held["cpus"].as_str().unwrap())).collect();
    assert_eq!(held, taken);
    assert_all_pinned(&report, "metrics", 0);
    report.section("end");
}

/// Returns the lines after a heading `== HEADING` of a section.
fn tried<'a>(report: &'a ScriptReport, section: &str, heading: &str) -> Vec<&'a str> {
    let heading = format!("== {heading}");
    let lines = report.section(section).lines().skip_while(move |line| *line != heading).skip(1);
    lines.take_while(|line| !line.starts_with("== ")).collect()
}

/// Boots a machine with this runtime and an API server, and runs the script. Returns `None` if packages are missing.
fn report_with_api_server(release: &Release, script: &str) -> Option<ScriptReport> {
    let bench = TestEnvironment::open()?;
    let (vm, files) = machine(&bench, nodes(("3,3", MEMORY)), release, Driver::Cgroupfs)?;
    let authority = files.path().join("authority.pem");
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(&authority, certified.cert.pem()).unwrap();
    let vm = vm.file(authority, "/authority.pem").limit(Duration::from_mins(25));
    let report = boot(&vm, &full(release, Driver::Cgroupfs, script));
    eprintln!("{report}");
    Some(report)
}

/// A refused pod leaves nothing in the runtime, which can restart afterwards.
fn check_refusals(release: &Release) {
    let script = include_str!("containerd/refused.sh");
    let Some(report) = report_with_api_server(release, script) else { return };
    for section in ["refused", "runtime was killed"] {
        let said = report.section(section);
        assert!(said.contains("numaward cannot place pod default/big"), "{section}: {report}");
    }
    let refused = report.section("refused").matches("numaward cannot place pod default/big").count();
    assert!(refused >= 6, "each time: {report}");
    assert_eq!(report.section("the other pod"), "lives", "{report}");
    assert_eq!(report.json("event")["regarding"]["name"], "big", "{report}");
    report.section("end");
}

#[test]
fn refused_pod_leaves_nothing_in_1_7() {
    check_refusals(&V1);
}

#[test]
fn refused_pod_leaves_nothing_in_2() {
    check_refusals(&V2);
}

#[test]
fn running_pod_makes_room() {
    check_room(&V2);
}

/// With `kubernetes.refused: make-room`, a running pod that writes to its memory is moved, without a miss.
fn check_room(release: &Release) {
    let Some(report) = report_with_api_server(release, include_str!("containerd/room.sh")) else { return };
    assert_eq!(lines(&report, "moved before"), pinned("1", "0"), "{report}");
    assert_eq!(lines(&report, "other before"), pinned("3-4", "1"), "{report}");
    let resident = |section: &str| -> Vec<u64> {
        let anon = report.section(section).lines().find_map(|line| line.strip_prefix("anon ")).unwrap();
        anon.split(' ').map(|of| of.split_once('=').unwrap().1.parse().unwrap()).collect()
    };
    let size = 256 << 20;
    assert!(resident("memory before")[0] >= size, "{report}");
    assert!(report.section("refused").trim().parse::<u64>().unwrap() > 0, "{report}");
    assert_eq!(lines(&report, "big"), pinned("1-2", "0"), "{report}");
    assert_eq!(lines(&report, "moved"), pinned("5", "1"), "{report}");
    assert_eq!(lines(&report, "other"), pinned("3-4", "1"), "{report}");
    let [left, arrived] = resident("memory")[..] else { panic!("{report}") };
    assert!(left < 1 << 20 && arrived >= size, "{report}");
    assert_eq!(report.section("writes"), "goes on");
    assert_no_misses(&report, "misses");
    let rebalances = report.section("rebalances");
    assert!(rebalances.contains("outcome=\"done\"} 1"), "{rebalances}");
    let events = report.section("events");
    assert!(events.contains("There is room for default/big."), "{events}");
    assert_eq!(report.json("allocations")["allocations"].as_array().unwrap().len(), 3, "{report}");
    assert_all_pinned(&report, "unpinned", 0);
    report.section("end");
}

/// A tenant that may create pods cannot change guarantees of other pods: SECURITY.md, "From a tenant with pods".
#[test]
fn tenant_cannot_harm_other_pods() {
    const VICTIM: &str = "default/victim/main";

    let script = include_str!("containerd/tenant.sh");
    let Some(report) = report_with_api_server(&V2, script) else { return };
    let victim = pinned("1", "0");
    // Returns name, CPUs and notes of each guarantee.
    let held = |section: &str| -> Vec<(String, String, String)> {
        let all = report.json(section);
        let of = |of: &Value| {
            let notes = of["explanation"]["notes"].as_array().into_iter().flatten();
            let notes: Vec<_> = notes.map(|note| note.as_str().unwrap()).collect();
            let [name, cpus] = ["name", "cpus"].map(|key| of[key].as_str().unwrap().to_owned());
            (name, cpus, notes.join("; "))
        };
        all["allocations"].as_array().unwrap().iter().map(of).collect()
    };
    let cpus_of = |held: &[(String, String, String)], name: &str| {
        let found = held.iter().find(|(of, ..)| of == name).unwrap_or_else(|| panic!("{name}: {report}"));
        found.1.clone()
    };
    let before = held("victim before");
    assert_eq!(lines(&report, "victim"), victim);
    assert_eq!((before.len(), cpus_of(&before, VICTIM).as_str()), (1, "1"), "{report}");
    let is_from_the_api_server = |held: &[(String, String, String)], name: &str| {
        !held.iter().find(|(of, ..)| of == name).unwrap().2.contains("one container at a time")
    };
    assert!(is_from_the_api_server(&before, VICTIM), "{before:?}");

    // The annotation value `off` has an effect only in the listed namespaces; there the container runs on all CPUs.
    assert_eq!(lines(&report, "off, where it is allowed")[2], ["Cpus_allowed_list:", "0-5"]);
    assert_eq!(lines(&report, "off")[2], ["Cpus_allowed_list:", "0,2-5"]);
    let event = report.json("off: event");
    let regarding = &event["regarding"];
    assert_eq!((&regarding["namespace"], &regarding["name"]), (&"tenant".into(), &"off".into()), "{event}");
    assert_eq!(event["type"], "Warning", "{event}");
    assert_eq!(report.section("off: log").lines().count(), 1, "{report}");

    let tried = |heading: &str| tried(&report, "tried", heading);
    assert_eq!(tried("who"), ["0", "code 0"], "root, and the host's");
    for (heading, times, words) in
        [("files", 4, "No such file or directory"), ("signals", 1, "No such process"), ("knobs", 5, "")]
    {
        let said = tried(heading);
        let codes: Vec<_> = said.iter().filter(|line| line.starts_with("code ")).collect();
        assert!(codes.len() == times && !codes.contains(&&"code 0"), "{heading}: {said:?}");
        assert_eq!(
            said.iter().filter(|line| line.contains(words) && !line.starts_with("code ")).count(),
            times,
            "{said:?}"
        );
    }
    assert_eq!(report.section("off: knobs"), "0,2-5");
    let cpus = tried("CPUs");
    assert!(cpus.iter().any(|line| line.ends_with("\t0,2-5")), "those that it was given: {cpus:?}");
    assert_eq!(tried("figures"), ["code 0"]);
    let changes = tried("changes").concat();
    assert!(changes.contains(" 405 ") && changes.contains("HTTP/1.0 404"), "{changes}");

    // The victim keeps its known resources, and a pod that claims the victim's UID is not trusted.
    assert_eq!(lines(&report, "forged"), pinned("2", "0"));
    let forged = held("forged: allocations");
    assert_eq!((forged.len(), cpus_of(&forged, VICTIM)), (2, "1".to_owned()), "{forged:?}");
    assert_eq!(cpus_of(&forged, "tenant/forged/main"), "2", "{forged:?}");
    assert!(is_from_the_api_server(&forged, VICTIM), "{forged:?}");
    assert!(!is_from_the_api_server(&forged, "tenant/forged/main"), "the API server says nothing about it");
    assert_assigned(&report.json("forged: assigned"), &report.json("forged: allocations"));
    assert_eq!(held("forged: removed"), before, "who goes takes nothing along");

    // An unreadable annotation is ignored, with a short note.
    let sections = std::iter::once("long".to_owned()).chain((1..=4).map(|number| format!("broken {number}")));
    for section in sections {
        let (name, now) = (section.replace(' ', ""), held(&format!("{section}: allocations")));
        let (_, cpus, notes) = now.iter().find(|(of, ..)| *of == format!("tenant/{name}/main")).unwrap();
        assert_eq!((cpus.as_str(), now.len()), ("2", 2), "{section}: {now:?}");
        assert_eq!(lines(&report, &section), pinned("2", "0"), "{section}");
        assert!(notes.contains("is ignored (expected"), "{section}: {notes}");
        assert!(notes.len() < 600 && !notes.contains(['\u{1b}', '\n']), "{section}: {notes}");
        assert_eq!(cpus_of(&now, VICTIM), "1", "{section}");
    }
    assert_all_pinned(&report, "unpinned", 0);
    assert_eq!(lines(&report, "victim at the end"), victim);
    assert_eq!(held("allocations at the end"), before);
    report.section("end");
}

/// With the systemd driver, the guarantees are properties of units.
fn check_with_systemd(release: &Release) {
    let script = include_str!("containerd/systemd.sh");
    let Some(report) = report("3,3", release, Driver::Systemd, script) else { return };
    eprintln!("{report}");
    assert_eq!(lines(&report, "first instruction"), pinned("1-2", "0").split_off(2));
    for section in ["placed", "reloaded"] {
        assert_eq!(lines(&report, section), pinned("1-2", "0"), "{section}");
    }
    assert_eq!(lines(&report, "shared")[0], ["cpus", "0,3-5"]);
    let levels = [("container", MIN, LOW), ("kubepods-poddb.slice", MIN, LOW), ("kubepods.slice", MIN, LOW)];
    assert_protected(&report, "protection", &levels);
    assert_protected(&report, "reloaded protection", &levels);
    let properties: Vec<_> = report.section("properties").lines().collect();
    let memory = [format!("MemoryLow={LOW}"), format!("MemoryMin={MIN}")];
    let expected =
        ["AllowedCPUs=1-2", "AllowedMemoryNodes=0", &memory[0], &memory[1], &memory[0], &memory[1]];
    assert_eq!(properties, expected);
    assert_no_misses(&report, "misses");
    assert_all_pinned(&report, "unpinned", 0);
    let removed = report.json("removed");
    assert_eq!(removed["allocations"].as_array().map(Vec::len), Some(0), "{removed}");
    assert_eq!(lines(&report, "removed shared")[0], ["cpus", "0-5"]);
    // The kubelet, which does not run here, would stop the pod's slice.
    let removed = [("kubepods-poddb.slice", "0", "0"), ("kubepods.slice", "0", "0")];
    assert_protected(&report, "removed protection", &removed);
    report.section("end");
}

#[test]
fn containerd_2_with_systemd() {
    check_with_systemd(&V2);
}

#[test]
fn containerd_2_with_crun_and_systemd() {
    check_with_systemd(&V2_CRUN);
}

#[test]
fn containerd_with_systemd() {
    check_with_systemd(&V1);
}
