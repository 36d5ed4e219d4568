//! Controllers that the daemon enables for the children of a cgroup, and disables again.
//!
//! # Problem
//! A knob exists only if its controller is enabled in `cgroup.subtree_control` of the parent. The daemon enables a
//! missing controller, and an uninstallation has to leave the host as it was. The kernel disables a controller even if
//! children have set its knobs; their settings are lost then.
//!
//! # Algorithm
//! The ledger stores the controllers before they are enabled. To restore the host, each is disabled, from the leaves
//! up, unless a child uses it: has it enabled for its own children, or holds a value other than that of a new cgroup.
//!
//! # Invariants
//! Controllers that another program enabled are not disabled. These include controllers that were disabled and enabled
//! again, if [`Enforcer::still_enabled`](crate::Enforcer::still_enabled) was called in between.

use std::{
    collections::BTreeSet,
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

use numaward_cgroup::{
    CgroupId, CgroupPath,
    knob::{Knob, KnobError, KnobValue},
};
use numaward_model::SharedMap;
use serde::{Deserialize, Serialize};

use super::{applied::id_of, error::EnforceError};

/// Time to check the children of one cgroup: in a delegated subtree, their owner chooses their number.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// Controllers that were enabled in one cgroup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupControllers {
    /// Identity of the cgroup, because a new one can have the same path.
    pub id: CgroupId,
    pub controllers: BTreeSet<String>,
}

/// Controllers that the daemon enabled for the children of cgroups. Cheap to copy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EnabledControllers {
    cgroups: SharedMap<CgroupPath, CgroupControllers>,
}

impl EnabledControllers {
    pub fn is_empty(&self) -> bool {
        self.cgroups.is_empty()
    }

    /// Iterates over the cgroups, parents before children.
    pub fn iter(&self) -> impl Iterator<Item = (&CgroupPath, &CgroupControllers)> {
        self.cgroups.iter().map(|(path, enabled)| (path, &**enabled))
    }

    /// Adds the controllers of another record.
    pub fn note(&mut self, others: &Self) {
        for (path, new) in others.iter() {
            match self.cgroups.get_mut(path) {
                Some(known) if known.id == new.id => {
                    known.controllers.extend(new.controllers.iter().cloned());
                }
                _ => self.cgroups.insert(path.clone(), new.clone()),
            }
        }
    }

    /// Adds those of the needed controllers that are not enabled for the children of a cgroup.
    pub(super) fn add_missing(
        &mut self,
        root: &Path,
        cgroup: &CgroupPath,
        needed: &BTreeSet<&str>,
    ) -> Result<(), EnforceError> {
        let dir = cgroup.dir(root);
        let KnobValue::Controllers(enabled) = Knob::SubtreeControl.read(&dir)? else { return Ok(()) };
        let missing = needed.iter().filter(|name| !enabled.contains(**name)).map(|name| (*name).to_owned());
        let controllers: BTreeSet<_> = missing.collect();
        if !controllers.is_empty() {
            let id = id_of(&dir).ok_or_else(|| EnforceError::Gone { cgroup: cgroup.clone() })?;
            self.note(&Self {
                cgroups: [(cgroup.clone(), CgroupControllers { id, controllers })].into_iter().collect(),
            });
        }
        Ok(())
    }

    /// Removes the controllers for which `is_kept` returns false.
    pub(super) fn retain(&mut self, mut is_kept: impl FnMut(&CgroupPath, CgroupId, &str) -> bool) {
        let kept = |(path, enabled): (&CgroupPath, &CgroupControllers)| {
            let mut enabled = enabled.clone();
            enabled.controllers.retain(|controller| is_kept(path, enabled.id, controller));
            (!enabled.controllers.is_empty()).then(|| (path.clone(), enabled))
        };
        self.cgroups = self.iter().filter_map(kept).collect();
    }
}

/// A controller that could not be disabled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StillEnabled {
    /// Cgroup with the children for which it is enabled.
    pub cgroup: CgroupPath,
    pub controller: String,
    pub reason: String,
}

/// Returns whether the directory belongs to this cgroup, and the cgroup has a controller enabled for its children.
pub(super) fn is_enabled(dir: &Path, id: CgroupId, controller: &str) -> Result<bool, KnobError> {
    if id_of(dir) != Some(id) {
        return Ok(false);
    }
    match Knob::SubtreeControl.read(dir) {
        Ok(KnobValue::Controllers(enabled)) => Ok(enabled.contains(controller)),
        Ok(_) => Ok(false),
        Err(error) if error.is_gone() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Disables controllers in the hierarchy mounted at `root`, and removes the disabled ones from `controllers`. Returns
/// those that a child uses, that cannot be checked within a second, or that the kernel does not disable.
pub fn disable(root: &Path, controllers: &mut EnabledControllers) -> Vec<StillEnabled> {
    disable_within(root, controllers, CHECK_TIMEOUT)
}

pub(super) fn disable_within(
    root: &Path,
    controllers: &mut EnabledControllers,
    timeout: Duration,
) -> Vec<StillEnabled> {
    let mut left = Vec::new();
    let deepest_first: Vec<_> = {
        let mut all: Vec<_> =
            controllers.iter().map(|(path, enabled)| (path.clone(), enabled.clone())).collect();
        all.sort_by_key(|(path, _)| std::cmp::Reverse(path.components().count()));
        all
    };
    for (cgroup, CgroupControllers { id, controllers }) in deepest_first {
        let deadline = Instant::now() + timeout;
        for controller in controllers {
            if let Err(reason) = disable_one(root, &cgroup, id, &controller, deadline) {
                left.push(StillEnabled { cgroup: cgroup.clone(), controller, reason });
            }
        }
    }
    controllers.retain(|path, _, controller| {
        left.iter().any(|left| left.cgroup == *path && left.controller == controller)
    });
    left
}

/// Disables one controller; the error is the reason why it stays enabled.
fn disable_one(
    root: &Path,
    cgroup: &CgroupPath,
    id: CgroupId,
    controller: &str,
    deadline: Instant,
) -> Result<(), String> {
    let dir = cgroup.dir(root);
    if !is_enabled(&dir, id, controller).map_err(|error| error.to_string())? {
        return Ok(());
    }
    if let Some(used) = used_below(&dir, cgroup, controller, deadline).map_err(|error| error.to_string())? {
        return Err(used);
    }
    match Knob::SubtreeControl.write(&dir, &format!("-{controller}")) {
        Err(error) if !error.is_gone() => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// Describes the first child of a cgroup that uses a controller, or may use it because it cannot be checked in time.
fn used_below(
    dir: &Path,
    cgroup: &CgroupPath,
    controller: &str,
    deadline: Instant,
) -> io::Result<Option<String>> {
    let is_over = || Instant::now() >= deadline;
    let unknown = || Ok(Some(format!("{cgroup} has too many children to check that none uses it")));
    for entry in fs::read_dir(dir)? {
        if is_over() {
            return unknown();
        }
        let entry = entry?;
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let child = entry.path();
        let name = cgroup.child(&entry.file_name().to_string_lossy()).map_err(io::Error::other)?;
        if is_enabled(&child, id_of(&child).unwrap_or(CgroupId::NONE), controller)
            .map_err(io::Error::other)?
        {
            return Ok(Some(format!("{name} has it enabled for its own children")));
        }
        for file in fs::read_dir(&child).into_iter().flatten().flatten() {
            if is_over() {
                return unknown();
            }
            let file_name = file.file_name();
            let Some(knob) = file_name.to_str().filter(|knob| knob.split('.').next() == Some(controller))
            else {
                continue;
            };
            let Some(is_unset) = unset(knob) else { continue };
            // A knob that cannot be read has gone.
            let Ok(text) = fs::read_to_string(file.path()) else { continue };
            let value = text.lines().next().unwrap_or_default().trim();
            if !is_unset(value) && !has_all(dir, knob, value) {
                return Ok(Some(format!("{name} has {knob} {value}")));
            }
        }
    }
    Ok(None)
}

/// Returns the check whether a knob holds the value of a new cgroup; `None` for knobs that cannot be set or have no
/// effect by themselves.
///
/// Source: `Documentation/admin-guide/cgroup-v2.rst`.
fn unset(knob: &str) -> Option<fn(&str) -> bool> {
    Some(match knob {
        "cpuset.cpus" | "cpuset.mems" | "cpuset.cpus.exclusive" => str::is_empty,
        "cpuset.cpus.partition" => |value| value == "member",
        "memory.min" | "memory.low" | "memory.oom.group" | "cpu.idle" | "cpu.max.burst" => {
            |value| value == "0"
        }
        "memory.high" | "memory.max" | "memory.swap.high" | "memory.swap.max" | "memory.zswap.max"
        | "cpu.uclamp.max" => |value| value == "max",
        "cpu.max" => |value| value == "max" || value.starts_with("max "),
        "cpu.weight" => |value| value == "100",
        "cpu.uclamp.min" => |value| value == "0.00",
        _ if knob.strip_prefix("hugetlb.").and_then(|size| size.strip_suffix(".max")).is_some() => {
            |value| value == "max"
        }
        _ => return None,
    })
}

/// Returns whether the set of a child does not limit it. The kernel does not let a set with running processes become
/// empty, so a restored set may name everything that the parent has.
fn has_all(dir: &Path, knob: &str, value: &str) -> bool {
    let read = |knob: Knob| knob.read(dir).ok();
    match knob {
        "cpuset.cpus" => match (Knob::CpusetCpus.parse(value), read(Knob::CpusetCpusEffective)) {
            (Ok(KnobValue::Cpus(cpus)), Some(KnobValue::Cpus(all))) => all.is_subset(&cpus),
            _ => false,
        },
        "cpuset.mems" => match (Knob::CpusetMems.parse(value), read(Knob::CpusetMemsEffective)) {
            (Ok(KnobValue::Nodes(nodes)), Some(KnobValue::Nodes(all))) => all.is_subset(&nodes),
            _ => false,
        },
        _ => false,
    }
}
