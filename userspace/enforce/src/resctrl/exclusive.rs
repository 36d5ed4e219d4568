//! Exclusive classes: obstacles to them, and the reduction of the default group.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    path::{Path, PathBuf},
};

use super::{
    ResctrlOutcome, TreeUpdate,
    default_group::{obstacle, plan},
    name_of,
    schemata::{Caches, GroupTarget, WayMasks, up_to},
    tree::ResctrlError,
};

/// Refusals by the kernel, by class. The same attempt is not repeated.
pub(super) type Refusals = BTreeMap<String, ClassRefusal>;

/// The masks of the default group, the ways to remove from it, and the kernel's refusal.
#[derive(Debug)]
pub(super) struct ClassRefusal {
    shown: WayMasks,
    ways: u64,
    problem: String,
}

fn has_some(shown: &WayMasks, ways: u64) -> bool {
    shown.iter().flat_map(|(_, masks)| masks.values()).any(|mask| mask & ways != 0)
}

impl TreeUpdate<'_> {
    pub(super) fn is_exclusive(&self, class: &str) -> bool {
        self.wanted.classes.get(class).is_some_and(|share| share.is_exclusive)
    }

    /// Refuses exclusive classes if another program's group has their ways, or that would leave too few ways to the
    /// default group.
    pub(super) fn refuse_exclusive(
        &self,
        targets: &mut BTreeMap<&str, Result<GroupTarget, String>>,
        others: &[PathBuf],
        refusals: &Refusals,
    ) {
        let Some(caches) = &self.info.caches else { return };
        for (name, target) in targets.iter_mut().filter(|(name, _)| self.is_exclusive(name)) {
            let Ok(GroupTarget { mask: Some(ways), .. }) = *target else { continue };
            if let Err(problem) = self.vet(name, ways, caches, others, refusals) {
                *target = Err(problem);
            }
        }
    }

    fn vet(
        &self,
        class: &str,
        ways: u64,
        caches: &Caches,
        others: &[PathBuf],
        refusals: &Refusals,
    ) -> Result<(), String> {
        for group in others {
            let has_some = match self.tree.masks(group, caches) {
                Ok(masks) => has_some(&masks, ways),
                // A group that is being locked has no mask yet.
                Err(ResctrlError::Malformed { .. }) => false,
                Err(ResctrlError::Refused { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    false
                }
                Err(error) => return Err(error.to_string()),
            };
            if has_some {
                let name = name_of(group);
                return Err(format!("the group {name}, which is not numaward's, has some of its ways"));
            }
        }
        let shown = self.tree.masks(&self.tree.root, caches).map_err(|error| error.to_string())?;
        match refusals.get(class) {
            Some(of) if of.ways == ways && of.shown == shown => Err(of.problem.clone()),
            _ => obstacle(&shown, ways, &self.wanted.reduced, caches.least).map_or(Ok(()), Err),
        }
    }

    /// Removes the ways of these exclusive classes from the default group, and restores the other ways. Removes classes from
    /// `ready` if the kernel refuses, or if they have to wait until state is stored; returns the waiting ones.
    pub(super) fn reduce<'a>(
        &self,
        exclusive: &BTreeMap<&'a str, u64>,
        ready: &mut BTreeSet<&'a str>,
        done: &mut ResctrlOutcome,
        refusals: &mut Refusals,
    ) -> BTreeSet<&'a str> {
        let mut waiting = BTreeSet::new();
        if exclusive.is_empty() && self.wanted.reduced.is_empty() {
            return waiting;
        }
        let failed = |error: &dyn std::fmt::Display| {
            format!("cannot restore the ways of resctrl's default group: {error}")
        };
        let Some(caches) = &self.info.caches else {
            done.problems.insert(failed(&"there is no info/L3"));
            return waiting;
        };
        let taken = |of: &BTreeMap<&str, u64>| of.values().fold(0, |taken, ways| taken | up_to(*ways));
        let shown = || self.tree.masks(&self.tree.root, caches);
        if let Err(error) = self.write_default(taken(exclusive), caches, done) {
            let left = shown().ok();
            let is_refused = |ways| left.as_ref().is_none_or(|left| has_some(left, ways));
            let (refused, rest): (BTreeMap<_, _>, BTreeMap<_, _>) = exclusive
                .iter()
                .map(|(class, ways)| (*class, *ways))
                .partition(|(_, ways)| is_refused(*ways));
            if refused.is_empty() {
                done.problems.insert(failed(&error));
            }
            let problem = format!("cannot remove its ways from the default group: {error}");
            for class in refused.keys() {
                ready.remove(class);
                done.problems.insert(format!("class {class}: {problem}"));
                if let Err(error) = self.tree.remove(&self.tree.class(class)) {
                    done.problems.insert(error.to_string());
                }
            }
            if !refused.is_empty()
                && let Err(error) = self.write_default(taken(&rest), caches, done)
            {
                done.problems.insert(failed(&error));
            }
            let shown = shown().unwrap_or_default();
            for (class, ways) in refused {
                let refusal = ClassRefusal { shown: shown.clone(), ways, problem: problem.clone() };
                refusals.insert(class.to_owned(), refusal);
            }
        }
        refusals.retain(|class, _| !ready.contains(class.as_str()));
        if done.waits {
            let now = shown().unwrap_or_default();
            let still_there = exclusive.iter().filter(|(_, ways)| has_some(&now, **ways));
            waiting.extend(still_there.map(|(class, _)| *class).filter(|class| ready.remove(class)));
        }
        waiting
    }

    /// Writes the masks of the default group without these ways, once the original ones are stored.
    fn write_default(
        &self,
        taken: u64,
        caches: &Caches,
        done: &mut ResctrlOutcome,
    ) -> Result<(), ResctrlError> {
        let classes = self.wanted.workloads.values().filter_map(|of| of.class.as_deref());
        let is_any_in_use = classes.into_iter().any(|class| self.is_exclusive(class));
        let root: &Path = &self.tree.root;
        let first = plan(&self.tree.masks(root, caches)?, taken, &self.wanted.reduced, is_any_in_use);
        done.waits = taken != 0 && !first.writes.is_empty() && first.reduced != self.wanted.reduced;
        done.reduced = first.reduced;
        if done.waits {
            return Ok(());
        }
        let mut lines = Vec::new();
        for (resource, masks) in &first.writes {
            let line = self.tree.set_masks(root, resource, masks)?;
            lines.push(format!("the default group ({line})"));
        }
        done.set.append(&mut lines);
        done.reduced = plan(&self.tree.masks(root, caches)?, taken, &done.reduced, is_any_in_use).reduced;
        Ok(())
    }
}
