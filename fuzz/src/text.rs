//! Targets for short texts: lists, quantities, values of knobs, reserved memory, and records of the probes.

use std::{fmt::Display, fs, str::FromStr};

use numaward_cgroup::{
    CgroupPath, classify,
    knob::{Knob, Limit},
    read,
};
use numaward_engine::{
    Quantity,
    policy::{MemoryTier, Tiers, TopologyManagerPolicy, TopologyManagerScope},
};
use numaward_kube::cgroup_path;
use numaward_probes::{Incident, testing};
use numaward_topology::{Bytes, CpuSet, HugepageSize, NodeSet, ZoneKind};

use crate::files;

/// Parses a text, and asserts that the printed value parses to the same value.
fn round_trip<T: FromStr + Display + PartialEq + std::fmt::Debug>(text: &str) -> Option<T> {
    let value = text.parse::<T>().ok()?;
    let printed = value.to_string();
    assert_eq!(printed.parse::<T>().ok().as_ref(), Some(&value), "{text:?} is printed as {printed:?}");
    Some(value)
}

/// Parses sets of CPUs and nodes, quantities, kinds of memory, cgroup paths and names.
pub(crate) fn lists(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let cpus = round_trip::<CpuSet>(text);
    round_trip::<NodeSet>(text);
    round_trip::<ZoneKind>(text);
    round_trip::<CgroupPath>(text);
    round_trip::<TopologyManagerPolicy>(text);
    round_trip::<TopologyManagerScope>(text);
    round_trip::<Tiers>(text);
    round_trip::<MemoryTier>(text);
    if let Some(cpus) = cpus {
        assert_eq!(cpus.iter().count(), cpus.len());
        assert_eq!(cpus.iter().collect::<CpuSet>(), cpus);
        let same = cpus.clone();
        assert!((&cpus - &same).is_empty() && (&cpus | &same) == cpus && (&cpus & &same) == cpus);
    }
    if let Some(amount) = round_trip::<Quantity>(text) {
        assert!(amount.is_zero() == (amount.units() == Some(0)), "{amount}");
        if let Some(units) = amount.as_int64() {
            assert_eq!(Quantity::whole(units), amount);
        }
        let _ = (amount.millis(), amount.whole_cpus(), amount.checked_add(amount));
    }
    let _ = cgroup_path::pod_path(text);
    let _ = cgroup_path::container_path(text);
    if let Ok(path) = text.parse::<CgroupPath>() {
        let _ = classify(&path, |_| false);
        assert!(path.ancestors().all(|above| above.contains(&path)));
    }
}

/// Parses the values of knobs, and reads the other files of a cgroup.
pub(crate) fn knob(data: &[u8]) {
    const PAGE: Bytes = Bytes(4096);
    let text = String::from_utf8_lossy(data);
    round_trip::<Knob>(&text);
    let huge = Knob::HugetlbMax(HugepageSize(Bytes::mib(2)));
    for knob in Knob::PLAIN.into_iter().chain([huge]) {
        let Ok(value) = knob.parse(&text) else { continue };
        let printed = value.to_string();
        let read = knob.parse(&printed);
        assert_eq!(read.as_ref(), Ok(&value), "{knob}: {text:?} is printed as {printed:?}");
        assert!(knob.holds(&value, &value, PAGE));
    }
    if let Some(limit) = round_trip::<Limit>(&text) {
        let kept = limit.as_stored(PAGE);
        assert_eq!(kept.as_stored(PAGE), kept);
        assert!(limit.saturating_add(limit) >= limit);
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let files = [
        "memory.numa_stat",
        "hugetlb.2MB.numa_stat",
        "memory.events",
        "memory.pressure",
        "memory.stat",
        "cpu.stat",
        "cgroup.events",
        "cgroup.procs",
        "memory.current",
    ];
    // All names are links to the same file.
    fs::write(dir.join(files[0]), data).unwrap();
    for file in &files[1..] {
        fs::hard_link(dir.join(files[0]), dir.join(file)).unwrap();
    }
    let results = [
        read::memory_numa_stat(dir).map(|nodes| {
            for node in nodes.values() {
                let _ = (node.user(), node.undroppable());
            }
        }),
        read::hugetlb_numa_stat(dir, HugepageSize(Bytes::mib(2))).map(drop),
        read::memory_events(dir).map(drop),
        read::memory_pressure(dir).map(drop),
        read::numa_balancing(dir).map(drop),
        read::cpu_time(dir).map(drop),
        read::populated(dir).map(drop),
        read::visit_processes(dir, |_| true),
        read::memory_current(dir).map(drop),
    ];
    for error in results.into_iter().filter_map(Result::err) {
        assert!(!error.is_gone() && !error.is_absent(), "{error}");
    }
}

/// Loads a configuration with an environment variable that contains a map or a list in the syntax of the kubelet's flags. The
/// first byte selects the variable.
pub(crate) fn reserved(data: &[u8]) {
    const VARIABLES: [&str; 6] = [
        "NUMAWARD_RESERVED_MEMORY",
        "NUMAWARD_KUBE_RESERVED",
        "NUMAWARD_EVICTION_HARD",
        "NUMAWARD_FEATURE_GATES",
        "NUMAWARD_CPU_MANAGER_POLICY_OPTIONS",
        "NUMAWARD_TOPOLOGY_MANAGER_POLICY_OPTIONS",
    ];
    let Some((&variable, data)) = data.split_first() else { return };
    let Ok(text) = str::from_utf8(data) else { return };
    let variable = VARIABLES[usize::from(variable) % VARIABLES.len()];
    files::loaded(b"", [(variable.to_owned(), text.to_owned())].into());
}

/// Parses records of the probes' ring buffers, and the kernel's type information (BTF).
pub(crate) fn record(data: &[u8]) {
    for event in testing::parse_events(data).into_iter().flatten() {
        assert!(event.command.chars().count() <= 16, "{}", event.command);
        if let Incident::OomKill { constraint } = event.incident {
            assert!(!constraint.is_empty());
        }
    }
    if let Err(problem) = testing::parse_btf(data) {
        assert!(!problem.is_empty());
    }
}
