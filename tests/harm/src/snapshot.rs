//! Snapshots of the settings of cgroups, units and processes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use crate::bystander::{Bystanders, CGROUPS, UNIT, output};

/// The knobs that numaward may write.
const KNOBS: &[&str] = &[
    "cgroup.subtree_control",
    "cpuset.cpus",
    "cpuset.mems",
    "cpuset.cpus.exclusive",
    "cpuset.cpus.partition",
    "memory.min",
    "memory.low",
    "memory.high",
    "memory.max",
    "memory.swap.max",
    "cpu.max",
    "cpu.weight",
];
/// The properties of a unit that numaward may set, and the files that they come from.
const PROPERTIES: &str = "AllowedCPUs,AllowedMemoryNodes,MemoryMin,MemoryLow,MemoryHigh,MemoryMax,MemorySwapMax,CPUWeight,\
                          CPUQuotaPerSecUSec,DropInPaths";

/// The values of all settings, by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostSnapshot(BTreeMap<String, String>);

impl HostSnapshot {
    /// Takes a snapshot. Fails if a bystander has ended.
    pub(crate) fn take(bystanders: &mut Bystanders) -> Result<Self> {
        let mut found = BTreeMap::new();
        let cpus = [
            line("/sys/devices/system/cpu/online")?,
            line(Path::new(CGROUPS).join("cpuset.cpus.effective"))?,
        ];
        let nodes = line("/sys/devices/system/node/online")?;
        for cgroup in cgroups() {
            let name = cgroup.strip_prefix(CGROUPS).unwrap_or(&cgroup).display().to_string();
            for knob in KNOBS {
                let Ok(text) = fs::read_to_string(cgroup.join(knob)) else { continue };
                let mut text = text.trim().to_owned();
                // The kernel does not accept an empty set while processes run there. All CPUs stand for it, or all that are not in a
                // partition of the bystanders.
                let is_all = match *knob {
                    "cpuset.cpus" => cpus.contains(&text),
                    "cpuset.mems" => text == nodes,
                    _ => false,
                };
                if is_all {
                    text.clear();
                }
                found.insert(format!("/{name} {knob}"), text);
            }
            let events = fs::read_to_string(cgroup.join("memory.events.local")).unwrap_or_default();
            if let Some(kills) = events.lines().find(|line| line.starts_with("oom_kill ")) {
                found.insert(format!("/{name} memory.events.local"), kills.to_owned());
            }
        }
        for (name, pid) in bystanders.processes()? {
            found.insert(format!("{name} process"), pid.to_string());
            let policies = policies(pid).with_context(|| format!("the policies of {name}"))?;
            found.insert(format!("{name} policies"), policies);
            let masks = masks(pid).with_context(|| format!("the masks of {name}"))?;
            found.insert(format!("{name} masks"), masks);
        }
        let unit = output(Command::new("systemctl").args(["show", "-p", PROPERTIES, UNIT]))?;
        found.extend(unit.lines().filter_map(|line| {
            let (property, value) = line.split_once('=')?;
            // systemd names files that are gone until its next `daemon-reload`.
            let is_there = |path: &&str| property != "DropInPaths" || Path::new(path).exists();
            let there: Vec<&str> = value.split(' ').filter(is_there).collect();
            Some((format!("{UNIT} {property}"), there.join(" ")))
        }));
        Ok(Self(found))
    }

    /// Returns the differences between this and a later snapshot, one line each. A cgroup that is gone is no difference, and neither is
    /// one that systemd has made for a further unit.
    pub(crate) fn differences(&self, later: &Self) -> Vec<String> {
        let (before, after) = (self.cgroups(), later.cgroups());
        let is_gone = |name: &str| cgroup_of(name).is_some_and(|cgroup| !after.contains(cgroup));
        let is_of_new_unit = |name: &str| {
            cgroup_of(name).is_some_and(|cgroup| !before.contains(cgroup) && is_of_systemd(cgroup))
        };
        let names: BTreeSet<&String> = self.0.keys().chain(later.0.keys()).collect();
        let differing = names.into_iter().filter_map(|name| match (self.0.get(name), later.0.get(name)) {
            (Some(before), Some(after)) if after == before => None,
            (Some(before), Some(after)) => Some(format!("{name}: {before:?} became {after:?}")),
            (Some(_), None) if is_gone(name) => None,
            (Some(before), None) => Some(format!("{name}: {before:?} is gone")),
            (None, Some(_)) if is_of_new_unit(name) => None,
            (None, after) => Some(format!("{name}: {:?} is new", after.map_or("", String::as_str))),
        });
        differing.collect()
    }

    /// Returns the paths of all cgroups with a setting.
    fn cgroups(&self) -> BTreeSet<&str> {
        self.0.keys().filter_map(|name| cgroup_of(name)).collect()
    }
}

/// Returns the path of the cgroup if a setting belongs to one.
fn cgroup_of(name: &str) -> Option<&str> {
    name.split(' ').next().filter(|path| path.starts_with('/'))
}

/// Returns true if systemd makes the cgroups there.
fn is_of_systemd(cgroup: &str) -> bool {
    ["/system.slice/", "/user.slice/"].iter().any(|slice| cgroup.starts_with(slice))
}

/// Returns the folders of all cgroups.
fn cgroups() -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![PathBuf::from(CGROUPS)]);
    while let Some(folder) = folders.pop() {
        let below = fs::read_dir(&folder).into_iter().flatten().flatten();
        folders.extend(below.filter(|of| of.file_type().is_ok_and(|of| of.is_dir())).map(|of| of.path()));
        found.push(folder);
    }
    found
}

/// Returns the memory policies of a process, each once.
fn policies(pid: u32) -> Result<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/numa_maps"))?;
    let mut policies: Vec<&str> = text.lines().filter_map(|line| line.split(' ').nth(1)).collect();
    policies.sort_unstable();
    policies.dedup();
    Ok(policies.join(" "))
}

/// Returns the affinity masks of the threads of a process.
fn masks(pid: u32) -> Result<String> {
    let mut masks = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = fs::read_to_string(task?.path().join("status"))?;
        masks.extend(
            status.lines().find_map(|line| Some(line.strip_prefix("Cpus_allowed_list:\t")?.to_owned())),
        );
    }
    masks.sort();
    Ok(masks.join(" "))
}

fn line(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    Ok(fs::read_to_string(path).with_context(|| path.display().to_string())?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(settings: &[(&str, &str)]) -> HostSnapshot {
        let setting = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        HostSnapshot(settings.iter().map(setting).collect())
    }

    #[test]
    fn new_settings_are_differences() {
        let before =
            snapshot(&[("/a memory.max", "max"), ("/a cpu.max", "max 100000"), ("/b memory.max", "1")]);
        assert_eq!(before.differences(&before), [""; 0]);
        let after = snapshot(&[
            ("/a memory.max", "4096"),
            ("/a cpuset.cpus", ""),
            ("/numaward memory.max", "max"),
            ("/system.slice/new.service memory.max", "max"),
            ("db.service DropInPaths", "/run/50.conf"),
        ]);
        assert_eq!(
            before.differences(&after),
            [
                "/a cpu.max: \"max 100000\" is gone",
                "/a cpuset.cpus: \"\" is new",
                "/a memory.max: \"max\" became \"4096\"",
                "/numaward memory.max: \"max\" is new",
                "db.service DropInPaths: \"/run/50.conf\" is new",
            ]
        );
    }
}
