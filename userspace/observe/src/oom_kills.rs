//! Classification of OOM kills by pinned allocations: whether another node had free memory.
//!
//! # Problem
//! The probe counts kills by the constraint of the allocation. A kill with the constraint `cpuset` or `mempolicy` is the
//! fault of the pinning only if memory was free on other nodes; on a full host, it would have come anyway.
//!
//! # Algorithm
//! The free memory of the nodes is read when a kill is noticed: at its event, or at the next reading of the counters if
//! the event was lost. A kill frees memory on the pinned nodes only, so the other nodes are as they were.

use std::{collections::BTreeMap, sync::Arc};

use numaward_model::snapshot::is_pinned;
use numaward_probes::OOM_CONSTRAINT_NAMES;
use numaward_topology::{Bytes, NodeId, NodeSet};
use parking_lot::Mutex;

use crate::{naming::OTHER, reading::CounterReading};

/// Minimum free memory of other nodes for which a kill is attributed to the pinning.
pub(crate) const MIN_FREE_ELSEWHERE: Bytes = Bytes::mib(64);

/// Kills by constraint, in the order of [`OOM_CONSTRAINT_NAMES`].
pub(crate) type Kills = [u64; OOM_CONSTRAINT_NAMES.len()];

/// Classified kills of the workloads of a name.
#[derive(Clone, Copy, Debug, Default)]
struct ClassifiedKills {
    all: Kills,
    /// The part of `all` at which no other node had free memory.
    without_room: Kills,
}

/// Kills by name of the workload.
#[derive(Debug, Default)]
pub(crate) struct KillClassifier(Mutex<BTreeMap<Arc<str>, ClassifiedKills>>);

impl KillClassifier {
    /// Classifies the kills that are new since the last call. Returns the kills so far at which no other node had free
    /// memory. `has_room` is called only if there are new kills by pinned allocations.
    fn classify(&self, name: &Arc<str>, kills: Kills, has_room: impl FnOnce() -> bool) -> Kills {
        if is_without_pins(&kills) {
            return Kills::default();
        }
        let before = self.0.lock().get(name).copied().unwrap_or_default();
        // Fewer kills than before are those of a new workload with the same name.
        let is_reset = kills.iter().zip(before.all).any(|(now, before)| *now < before);
        let before = if is_reset { ClassifiedKills::default() } else { before };
        if kills == before.all {
            return before.without_room;
        }
        // Files are read without the lock.
        let without_room = if has_room() {
            before.without_room
        } else {
            let new = |index: usize| {
                let is_by_pin = is_pinned(OOM_CONSTRAINT_NAMES[index]);
                if is_by_pin { kills[index].saturating_sub(before.all[index]) } else { 0 }
            };
            std::array::from_fn(|index| before.without_room[index].saturating_add(new(index)))
        };
        self.0.lock().insert(name.clone(), ClassifiedKills { all: kills, without_room });
        without_room
    }

    /// Classifies the kills of all workloads. Returns those of each name at which no other node had free memory. `free` reads the free
    /// memory of the nodes.
    pub(crate) fn without_room(
        &self,
        read: &CounterReading,
        free: impl Fn() -> Vec<(NodeId, Bytes)>,
    ) -> BTreeMap<Arc<str>, Kills> {
        let has_room = |nodes: Option<NodeSet>| free_elsewhere(&free(), nodes.as_ref()) >= MIN_FREE_ELSEWHERE;
        let other: Arc<str> = OTHER.into();
        let of_other = self.classify(&other, read.activity_counts.other.oom_kills, || has_room(None));
        let mut found = BTreeMap::from([(other, of_other)]);
        for (name, series) in read.table.series() {
            let kills = series.activity(|slot| read.activity_counts.slots.get(slot)).oom_kills;
            let without_room = self.classify(name, kills, || {
                let nodes = series.members.keys().filter_map(|&id| read.guarantees.nodes_of(id)).cloned();
                has_room(nodes.reduce(|all, more| &all | &more))
            });
            if without_room != Kills::default() {
                found.insert(name.clone(), without_room);
            }
        }
        self.retain(|name| name == OTHER || read.table.series().any(|(used, _)| **used == *name));
        found
    }

    /// Forgets names that are not in use any more.
    fn retain(&self, is_used: impl Fn(&str) -> bool) {
        self.0.lock().retain(|name, _| is_used(name));
    }
}

/// Returns true if no kill has a constraint that comes from pinning.
fn is_without_pins(kills: &Kills) -> bool {
    let mut by_name = OOM_CONSTRAINT_NAMES.iter().zip(kills);
    by_name.all(|(name, count)| *count == 0 || !is_pinned(name))
}

/// Returns the free memory on the nodes outside `guaranteed`; without a guarantee, that of the node with the most.
pub(crate) fn free_elsewhere(free: &[(NodeId, Bytes)], guaranteed: Option<&NodeSet>) -> Bytes {
    match guaranteed {
        Some(guaranteed) => {
            let elsewhere = free.iter().filter(|(node, _)| !guaranteed.contains(*node));
            Bytes(elsewhere.map(|(_, free)| free.0).sum())
        }
        None => free.iter().map(|(_, free)| *free).max().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kill_is_classified_once() {
        let kills = KillClassifier::default();
        let name: Arc<str> = "db".into();
        // Kills so far (none, cpuset, mempolicy, memcg), room elsewhere, and those without room so far.
        for (so_far, has_room, expected) in [
            ([1, 0, 0, 5], None, [0; 4]),
            ([1, 1, 0, 5], Some(true), [0; 4]),
            ([1, 1, 0, 5], None, [0; 4]),
            ([1, 3, 0, 5], Some(false), [0, 2, 0, 0]),
            ([1, 4, 1, 5], Some(true), [0, 2, 0, 0]),
            ([1, 4, 2, 5], Some(false), [0, 2, 1, 0]),
            ([0, 1, 0, 0], Some(true), [0; 4]),
        ] {
            let mut asked = false;
            let found = kills.classify(&name, so_far, || {
                asked = true;
                has_room.unwrap_or_default()
            });
            assert_eq!((found, asked), (expected, has_room.is_some()), "{so_far:?}");
        }
        assert_eq!(kills.classify(&"other".into(), [0, 1, 0, 0], || false), [0, 1, 0, 0]);
        kills.retain(|name| name == "db");
        assert_eq!(kills.0.lock().len(), 1);
    }
}
