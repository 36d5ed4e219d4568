//! Short texts: lists, amounts, knobs, reserved memory, and records of the probes.

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

/// What is read prints as something that reads the same.
fn same<T: FromStr + Display + PartialEq + std::fmt::Debug>(text: &str) -> Option<T> {
    let value = text.parse::<T>().ok()?;
    let printed = value.to_string();
    assert_eq!(printed.parse::<T>().ok().as_ref(), Some(&value), "{text:?} is printed as {printed:?}");
    Some(value)
}

/// Sets of CPUs and nodes, amounts, kinds of memory, paths and names.
pub(crate) fn lists(data: &[u8]) {
    let Ok(text) = str::from_utf8(data) else { return };
    let cpus = same::<CpuSet>(text);
    same::<NodeSet>(text);
    same::<ZoneKind>(text);
    same::<CgroupPath>(text);
    same::<TopologyManagerPolicy>(text);
    same::<TopologyManagerScope>(text);
    same::<Tiers>(text);
    same::<MemoryTier>(text);
    if let Some(cpus) = cpus {
        assert_eq!(cpus.iter().count(), cpus.len());
        assert_eq!(cpus.iter().collect::<CpuSet>(), cpus);
        let same = cpus.clone();
        assert!((&cpus - &same).is_empty() && (&cpus | &same) == cpus && (&cpus & &same) == cpus);
    }
    if let Some(amount) = same::<Quantity>(text) {
        assert!(amount.is_zero() == (amount.units() == Some(0)), "{amount}");
        if let Some(units) = amount.as_int64() {
            assert_eq!(Quantity::whole(units), amount);
        }
        let _ = (amount.millis(), amount.whole_cpus(), amount.checked_add(amount));
    }
    let _ = cgroup_path::of_pod(text);
    let _ = cgroup_path::of_container(text);
    if let Ok(path) = text.parse::<CgroupPath>() {
        let _ = classify(&path, |_| false);
        assert!(path.ancestors().all(|above| above.contains(&path)));
    }
}

/// The values of knobs and the other files of a cgroup.
pub(crate) fn knob(data: &[u8]) {
    const PAGE: Bytes = Bytes(4096);
    let text = String::from_utf8_lossy(data);
    same::<Knob>(&text);
    let huge = Knob::HugetlbMax(HugepageSize(Bytes::mib(2)));
    for knob in Knob::PLAIN.into_iter().chain([huge]) {
        let Ok(value) = knob.parse(&text) else { continue };
        let printed = value.to_string();
        let read = knob.parse(&printed);
        assert_eq!(read.as_ref(), Ok(&value), "{knob}: {text:?} is printed as {printed:?}");
        assert!(knob.holds(&value, &value, PAGE));
    }
    if let Some(limit) = same::<Limit>(&text) {
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
    // One file under all names.
    fs::write(dir.join(files[0]), data).unwrap();
    for file in &files[1..] {
        fs::hard_link(dir.join(files[0]), dir.join(file)).unwrap();
    }
    let said = [
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
        read::processes(dir).map(drop),
        read::memory_current(dir).map(drop),
    ];
    for error in said.into_iter().filter_map(Result::err) {
        assert!(!error.is_gone() && !error.is_absent(), "{error}");
    }
}

/// Reserved memory and the other maps and lists that a variable gives as one text, in the syntax of the kubelet's flags.
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

/// Records in the ring buffers of the probes, and the kernel's description of its types.
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
