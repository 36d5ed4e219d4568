//! Optional features of each kernel: compares `numaward doctor` with the results of direct attempts, with the documented first
//! release of each feature, and with the page of the book that is generated from these results.
//!
//! `UPDATE=1 cargo xtask vm test kernels::` writes the results; `UPDATE=1 cargo test -p numaward-daemon --test kernels` generates
//! the page from them.

use std::{collections::BTreeMap, env, fs, path::PathBuf, time::Duration};

use numaward_tests::{KERNEL, ScriptReport, TestEnvironment, assert_near, boot};
use numaward_vm::{Arch, GuestTopology};
use serde::{Deserialize, Serialize};

const MIB: u64 = 1 << 20;
/// `CAP_SYS_PTRACE` and `CAP_BPF` of linux/capability.h.
const SYS_PTRACE: u64 = 1 << 19;
const BPF: u64 = 1 << 39;

/// Features that Debian backported. 5.10.220 contains the fanotify of later kernels.
const BACKPORTED: [((u32, u32), &str); 1] = [((5, 10), "evictable marks of fanotify")];

/// Features of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct KernelFeatures {
    /// First two numbers of the version. The third changes with each update.
    release: String,
    /// Presence of each optional feature, by name.
    needs: BTreeMap<String, bool>,
    /// Attach mode of each probe.
    probes: BTreeMap<String, String>,
}

/// Results by name of the kernel.
type FeaturesByKernel = BTreeMap<String, KernelFeatures>;

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels/seen.json")
}

fn all() -> FeaturesByKernel {
    serde_json::from_str(&fs::read_to_string(path()).unwrap_or("{}".to_owned())).unwrap()
}

/// Returns doctor's results, and the first release of each feature.
fn seen(report: &ScriptReport) -> (KernelFeatures, BTreeMap<String, (u32, u32)>) {
    let (mut seen, mut since) = (KernelFeatures::default(), BTreeMap::new());
    for check in report.json("doctor").as_array().unwrap() {
        let (name, finding) = (check["check"].as_str().unwrap(), check["finding"].as_str().unwrap());
        if let Some(name) = name.strip_prefix("kernel: ") {
            let is_here = finding.starts_with("available ");
            assert!(is_here || finding.starts_with("missing"), "{name}: {finding}");
            seen.needs.insert(name.to_owned(), is_here);
            // If a missing feature has consequences, the release is in the suggested fix.
            let text = format!("{finding} {}", check["fix"].as_str().unwrap_or_default());
            let (_, release) = text.split_once("Linux ").unwrap_or_else(|| panic!("{name}: {text}"));
            let mut numbers =
                release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap());
            since.insert(name.to_owned(), (numbers.next().unwrap(), numbers.next().unwrap()));
        } else if let Some(probe) = name.strip_prefix("probe ") {
            let on_demand = finding.starts_with("is read on demand").then_some("on_demand");
            let absent = on_demand.unwrap_or("absent");
            let mode = finding.strip_prefix("attaches by ").map_or(absent, |mode| {
                let mode = mode.trim_start_matches("the classic ");
                mode.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap()
            });
            seen.probes.insert(probe.to_owned(), mode.to_owned());
        }
    }
    (seen, since)
}

/// Returns the results of the script's direct attempts.
fn tried(report: &ScriptReport) -> BTreeMap<&str, bool> {
    let lines = report.section("tried").lines();
    lines.filter_map(|line| line.rsplit_once(": ")).map(|(name, answer)| (name, answer == "yes")).collect()
}

/// Pages follow a guarantee on every kernel, and the daemon keeps only the privileges that the kernel requires.
fn guarantee(report: &ScriptReport, seen: &KernelFeatures) {
    let guarantee = report.json("guarantee");
    assert_eq!(guarantee["nodes"], "0", "{guarantee}");
    assert_eq!(report.section("held"), "0");
    let stat = report.numa_stat("held numa_stat");
    assert_near("anon of node 0", stat["anon"][&0], 32 * MIB, 32 * MIB, 3);
    assert_near("anon of node 1", stat["anon"][&1], 0, 32 * MIB, 3);
    let kept = report.section("kept").split_whitespace().last().unwrap();
    let kept = u64::from_str_radix(kept, 16).unwrap();
    // The strategy `native` enforces budgets, which requires CAP_SYS_PTRACE on every kernel.
    assert_eq!(kept & SYS_PTRACE, SYS_PTRACE, "{kept:#x}");
    assert_eq!(kept & BPF != 0, !seen.needs["maps are read without CAP_BPF"], "{kept:#x}");
    let probes = report.json("status")["probes"].as_array().unwrap().clone();
    assert!(probes.len() >= seen.probes.len().max(6), "{probes:#?}");
    for probe in probes {
        if let Some(mode) = seen.probes.get(probe["probe"].as_str().unwrap()).filter(|mode| *mode != "absent")
        {
            assert_eq!(probe["mode"], mode.as_str(), "{probe}");
        }
    }
    assert_eq!(report.section("end"), "0");
}

/// Misses of a workload are the charged pages on other nodes, whichever task asks for the pages. Pages that its tasks ask for on
/// behalf of another workload are not included.
fn misses(report: &ScriptReport) {
    const SIZE: u64 = 64 * MIB;
    let status = report.json("dry status");
    let charge =
        status["probes"].as_array().unwrap().iter().find(|probe| probe["probe"] == "charge").unwrap();
    assert_eq!(charge["mode"], "fexit", "{charge}");
    assert!(charge["selfCheck"].as_str().unwrap().starts_with("passed on nodes 0-1"), "{charge}");
    let missed = |when: &str| {
        let section = report.section(&format!("missed {when}"));
        if section.is_empty() { 0 } else { section.parse::<u64>().unwrap() }
    };
    let charged = |when: &str| {
        let stat = report.numa_stat(&format!("missed {when} numa_stat"));
        stat["anon"][&1] + stat["file"][&1]
    };
    // Linux 5.10 holds back up to 32 pages for each CPU.
    let tolerance = if report.section("release").starts_with("5.10.") { SIZE / 50 } else { SIZE / 200 };
    let check = |what: &str, before: &str, after: &str| {
        let (missed, charged) = (missed(after) - missed(before), charged(after) - charged(before));
        println!("{what}: {missed} bytes missed, {charged} charged");
        assert!(missed.abs_diff(SIZE) <= SIZE / 200, "{what}: {missed} bytes: {report}");
        assert!(missed.abs_diff(charged) <= tolerance, "{what}: {missed}, not {charged} bytes: {report}");
    };
    check("by itself", "before", "by itself");
    check("by another", "before guest", "by guest");
    let own = missed("for guest") - missed("before host");
    println!("for another: {own} bytes missed");
    assert!(own <= 2 * MIB, "{own}: {report}");
    assert!(report.section("miss events").contains("numaward-load"), "{report}");
}

#[test]
fn page_names_features_of_kernel() {
    let Some(bench) = TestEnvironment::open() else { return };
    if bench.kernel().arch() != Arch::Amd64 {
        eprintln!("skipped: the page is about x86-64");
        return;
    }
    let machine = GuestTopology::parse(None, Some("2,2"), Some("768M,512M"), None).unwrap();
    let report = boot(&bench.vm(machine).limit(Duration::from_mins(5)), include_str!("kernels.sh"));
    let (mut seen, since) = seen(&report);
    assert!(seen.needs.len() >= 10, "{report}");

    // Direct attempts confirm doctor's results.
    let tried = tried(&report);
    for (name, answer) in &tried {
        if let Some(said) = seen.needs.get(*name) {
            assert_eq!(said, answer, "{name}: doctor says {said}\n{}", report.section("tried"));
        }
    }
    let known = tried.keys().filter(|name| seen.needs.contains_key(**name));
    assert_eq!(known.count(), 6, "{tried:?}");

    // The documented first releases are right for this kernel.
    let release = report.section("release");
    let mut numbers = release.split('.').map(str::parse::<u32>);
    let release = (numbers.next().unwrap().unwrap(), numbers.next().unwrap().unwrap());
    for (name, since) in since {
        let expected = release >= since || BACKPORTED.contains(&(release, name.as_str()));
        assert_eq!(seen.needs[&name], expected, "{name}: since {since:?}, on {release:?}");
    }
    guarantee(&report, &seen);
    misses(&report);
    seen.release = format!("{}.{}", release.0, release.1);

    let kernel = env::var(KERNEL).unwrap();
    let mut all = all();
    if env::var_os("UPDATE").is_some() {
        assert!(!numaward_tests_support::is_ci(), "UPDATE writes what continuous integration compares");
        all.insert(kernel, seen);
        let text = serde_json::to_string_pretty(&all).unwrap() + "\n";
        fs::create_dir_all(path().parent().unwrap()).unwrap();
        fs::write(path(), text).unwrap();
    } else {
        let mut written = all.remove(&kernel).unwrap_or_default();
        written.release.clone_from(&seen.release);
        assert_eq!(written, seen, "kernels/seen.json is out of date (UPDATE=1 writes it)");
    }
}
