//! How many cgroups are looked at.
//!
//! Problem: a user with a subtree, such as that of `user@1000.service` or the root of a container with a user namespace,
//! may make as many cgroups in it as the kernel can hold. Each that is followed costs a watch, memory, and time
//! at each sweep.
//!
//! Terms: a *delegation* is a cgroup whose directory does not belong to who owns the root's, with all below it (cgroups(7),
//! "Cgroups delegation").
//!
//! Answer: of each delegation, of all of them and of all cgroups at most so many are looked at. Any other belongs to its
//! nearest ancestor that is looked at. So nobody can crowd out others' cgroups.

use std::collections::{BTreeMap, BTreeSet};

use crate::CgroupPath;

/// Of one delegation.
pub(crate) const MOST_OF_ONE: usize = 4_096;
/// Of all delegations.
const MOST_DELEGATED: usize = 32_768;
/// Of all.
const MOST: usize = 65_536;

/// The delegation that a cgroup is in, if it is in any.
pub(crate) type Delegation = Option<CgroupPath>;

/// Counts cgroups.
#[derive(Debug, Default)]
pub(crate) struct Census {
    /// Who owns the directory of the root, once that is known.
    root_owner: Option<u32>,
    all: usize,
    /// In all delegations, and in each.
    all_delegated: usize,
    delegated: BTreeMap<CgroupPath, usize>,
    crowded: BTreeSet<Delegation>,
}

impl Census {
    /// Of a hierarchy whose root belongs to this user.
    #[cfg(test)]
    pub(crate) fn owned_by(root_owner: u32) -> Self {
        Self { root_owner: Some(root_owner), ..Self::default() }
    }

    /// Another count of the same hierarchy.
    pub(crate) fn anew(&self) -> Self {
        Self { root_owner: self.root_owner, ..Self::default() }
    }

    /// The delegation that a cgroup is in whose directory belongs to this user, and whose parent is in that one.
    pub(crate) fn delegation(&mut self, path: &CgroupPath, owner: u32, parent: &Delegation) -> Delegation {
        let root_owner = *self.root_owner.get_or_insert(owner);
        let is_delegated = owner != root_owner && !path.is_root();
        parent.clone().or_else(|| is_delegated.then(|| path.clone()))
    }

    /// How many more are looked at in this delegation, or outside of any.
    pub(crate) fn room(&self, delegation: &Delegation) -> usize {
        let left = MOST - self.all;
        let Some(delegation) = delegation else { return left };
        let of_all = MOST_DELEGATED - self.all_delegated;
        let of_one = MOST_OF_ONE - self.delegated.get(delegation).unwrap_or(&0);
        left.min(of_all).min(of_one)
    }

    /// Whether there is room for one more.
    pub(crate) fn has_room(&mut self, delegation: &Delegation) -> bool {
        let has_room = self.room(delegation) > 0;
        if !has_room {
            self.crowded.insert(delegation.clone());
        }
        has_room
    }

    /// Counts one, if there is room for it.
    pub(crate) fn take(&mut self, delegation: &Delegation) -> bool {
        if !self.has_room(delegation) {
            return false;
        }
        self.all += 1;
        if let Some(delegation) = delegation {
            self.all_delegated += 1;
            *self.delegated.entry(delegation.clone()).or_default() += 1;
        }
        true
    }

    /// One that was counted is gone.
    pub(crate) fn give_back(&mut self, delegation: &Delegation) {
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

    /// Cgroups are missing where another count, which was made just now, missed some.
    pub(crate) fn note_crowded(&mut self, other: Self) {
        self.crowded = other.crowded;
    }

    /// Where cgroups are missing, if some are.
    pub(crate) fn problem(&self) -> Option<String> {
        let first = self.crowded.first()?;
        let place = first.as_ref().map_or_else(|| "on this host".to_owned(), |path| format!("below {path}"));
        let more = match self.crowded.len() - 1 {
            0 => String::new(),
            more => format!(" and in {more} more places"),
        };
        Some(format!(
            "there are too many cgroups {place}{more}: {MOST_OF_ONE} are followed of each delegated subtree, \
             {MOST_DELEGATED} of all of those, {MOST} in all; the others are counted with the cgroups above them"
        ))
    }
}
