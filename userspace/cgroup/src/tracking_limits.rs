//! Limits for the number of tracked cgroups.
//!
//! # Problem
//! A user with a subtree, such as `user@1000.service` or the root of a container with a user namespace, can create as
//! many cgroups in it as the kernel allows. Each tracked cgroup costs an inotify watch, memory, and time in each sweep.
//!
//! # Terms
//! A *delegation* is a subtree with another owner of its top directory than the root cgroup (cgroups(7), "Cgroups
//! delegation").
//!
//! # Algorithm
//! The number of tracked cgroups is limited for each delegation, for all delegations together, and in total. In a
//! delegation, the length of their paths is limited, too. A cgroup that is not tracked counts as part of its nearest
//! tracked ancestor. A delegation can therefore not use up the limits of other cgroups.

use std::collections::{BTreeMap, BTreeSet};

use crate::CgroupPath;

/// The maximum number of tracked cgroups in one delegation.
pub(crate) const MAX_PER_DELEGATION: usize = 4_096;
/// The maximum number of tracked cgroups in all delegations.
const MAX_IN_DELEGATIONS: usize = 32_768;
/// The maximum number of tracked cgroups.
const MAX_TRACKED: usize = 65_536;
/// The maximum length of a tracked cgroup's path in a delegation, in bytes. Runtimes' paths have some 300.
pub(crate) const MAX_DELEGATED_PATH: usize = 1 << 10;

/// The top of the delegation that contains a cgroup, if there is one.
pub(crate) type Delegation = Option<CgroupPath>;

/// The number of tracked cgroups, in total and by delegation.
#[derive(Debug, Default)]
pub(crate) struct TrackedCounts {
    /// The owner of the root cgroup's directory, once it is known.
    root_owner: Option<u32>,
    all: usize,
    /// The number in all delegations together.
    all_delegated: usize,
    delegated: BTreeMap<CgroupPath, usize>,
    exceeded: BTreeSet<Delegation>,
}

impl TrackedCounts {
    /// Creates counts for a hierarchy with this owner of the root.
    #[cfg(test)]
    pub(crate) fn owned_by(root_owner: u32) -> Self {
        Self { root_owner: Some(root_owner), ..Self::default() }
    }

    /// Creates empty counts for the same hierarchy.
    pub(crate) fn new_counts(&self) -> Self {
        Self { root_owner: self.root_owner, ..Self::default() }
    }

    /// Returns the delegation of a cgroup, from its directory's owner and its parent's delegation.
    pub(crate) fn delegation(&mut self, path: &CgroupPath, owner: u32, parent: &Delegation) -> Delegation {
        let root_owner = *self.root_owner.get_or_insert(owner);
        let is_delegated = owner != root_owner && !path.is_root();
        parent.clone().or_else(|| is_delegated.then(|| path.clone()))
    }

    /// Returns the number of cgroups that may still be added in this delegation, or outside all delegations.
    pub(crate) fn remaining(&self, delegation: &Delegation) -> usize {
        let left = MAX_TRACKED - self.all;
        let Some(delegation) = delegation else { return left };
        let of_all = MAX_IN_DELEGATIONS - self.all_delegated;
        let of_one = MAX_PER_DELEGATION - self.delegated.get(delegation).unwrap_or(&0);
        left.min(of_all).min(of_one)
    }

    /// Returns true if this cgroup may be added. Otherwise notes that cgroups are missing.
    pub(crate) fn has_room(&mut self, path: &CgroupPath, delegation: &Delegation) -> bool {
        let is_short = delegation.is_none() || path.as_str().len() <= MAX_DELEGATED_PATH;
        let has_room = is_short && self.remaining(delegation) > 0;
        if !has_room {
            self.exceeded.insert(delegation.clone());
        }
        has_room
    }

    /// Adds a cgroup if the limits permit it. Returns true if they do.
    pub(crate) fn add(&mut self, path: &CgroupPath, delegation: &Delegation) -> bool {
        if !self.has_room(path, delegation) {
            return false;
        }
        self.all += 1;
        if let Some(delegation) = delegation {
            self.all_delegated += 1;
            *self.delegated.entry(delegation.clone()).or_default() += 1;
        }
        true
    }

    /// Removes a cgroup that is gone.
    pub(crate) fn remove(&mut self, delegation: &Delegation) {
        self.all -= 1;
        if let Some(delegation) = delegation
            && let Some(count) = self.delegated.get_mut(delegation)
        {
            *count -= 1;
            self.all_delegated -= 1;
            if *count == 0 {
                self.delegated.remove(delegation);
            }
        }
    }

    /// Takes over the list of exceeded limits from newer counts.
    pub(crate) fn note_exceeded(&mut self, other: Self) {
        self.exceeded = other.exceeded;
    }

    /// Describes the exceeded limits, if there are any.
    pub(crate) fn limit_problem(&self) -> Option<String> {
        let first = self.exceeded.first()?;
        let place = first.as_ref().map_or_else(|| "on this host".to_owned(), |path| format!("below {path}"));
        let more = match self.exceeded.len() - 1 {
            0 => String::new(),
            more => format!(" and in {more} more places"),
        };
        Some(format!(
            "there are too many cgroups, or too long paths, {place}{more}: {MAX_PER_DELEGATION} are followed of each delegated \
             subtree, with paths of up to {MAX_DELEGATED_PATH} bytes; {MAX_IN_DELEGATIONS} of all of these, {MAX_TRACKED} in total; \
             any other cgroup is counted with its nearest followed ancestor"
        ))
    }
}
