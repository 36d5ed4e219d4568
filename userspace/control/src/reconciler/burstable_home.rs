//! Burstable workloads whose memory is elsewhere than their home.
//!
//! Problem: what a Burstable workload requests is promised on a home node, but it may run and allocate anywhere. When it
//! has moved, a promise where it no longer is protects nobody, and keeps others out.
//!
//! Terms: a workload is *away* while most of its user memory is on one node that is not its home.
//!
//! Algorithm: it is away from the moment when three fifths of its memory are on another node, until that has less than
//! half. When it was away on the same node for the dwell time (`enforcement.homeDwellTime`), its promise moves there,
//! within the ledger: no page is moved for it. Where that node has no room it is tried again after another dwell time.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_api::EventKind;
use numaward_cgroup::CgroupPath;
use numaward_engine::OwnerId;
use numaward_model::EventReport;
use numaward_topology::{Bytes, NodeId, NodeSet, ZoneKind};

use super::drift::Rotation;
use crate::core::{Core, most};

/// Each workload is looked at within this; sooner where the dwell time is short.
const PACE: Duration = Duration::from_secs(10);
/// So little memory says nothing.
const LEAST: Bytes = Bytes::mib(16);

/// Who is away.
#[derive(Debug)]
pub(super) struct BurstableHomes {
    /// Whether others may be Burstable by now.
    pub(super) is_outdated: bool,
    /// The workloads, with the names and cgroups of their guarantees.
    workloads: BTreeMap<OwnerId, Vec<(String, CgroupPath)>>,
    /// They are looked at in turns: the kernel takes its time to say where memory lies.
    round: Rotation<OwnerId>,
    away: BTreeMap<OwnerId, Away>,
}

/// Where most of a workload's memory is, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Away {
    on: NodeId,
    since: Instant,
}

/// Whether a workload is away that has so much of its memory on a node, and was away there before or not.
fn is_away(there: Bytes, total: Bytes, was_away: bool) -> bool {
    let share = |of: u64| u128::from(of);
    if was_away {
        share(there.0) * 2 >= share(total.0)
    } else {
        total >= LEAST && share(there.0) * 5 >= share(total.0) * 3
    }
}

impl BurstableHomes {
    pub(super) fn new(dwell: Duration) -> Self {
        Self {
            is_outdated: true,
            workloads: BTreeMap::new(),
            round: Rotation::new(PACE.min(dwell / 4)),
            away: BTreeMap::new(),
        }
    }

    /// Takes note of who may move now.
    fn follow(&mut self, core: &Core) {
        self.workloads = burstable(core);
        self.round.items = self.workloads.keys().cloned().collect();
        self.away.retain(|owner, _| self.workloads.contains_key(owner));
    }

    pub(super) fn look(&mut self, core: &mut Core, now: Instant) {
        if std::mem::take(&mut self.is_outdated) {
            self.follow(core);
        }
        let dwell = core.config.enforcement.home_dwell_time.0;
        for owner in self.round.next_batch() {
            let Some(cgroups) = self.workloads.get(&owner) else { continue };
            let mut by_node: BTreeMap<NodeId, Bytes> = BTreeMap::new();
            for (node, bytes) in cgroups.iter().flat_map(|(_, cgroup)| core.footprint(cgroup)) {
                let sum = by_node.entry(node).or_default();
                sum.0 = sum.0.saturating_add(bytes.0);
            }
            let total = Bytes(by_node.values().fold(0, |sum, bytes| sum.saturating_add(bytes.0)));
            let home = home_of(core, &owner);
            let before = self.away.remove(&owner);
            let Some((on, there)) = most(by_node).filter(|(node, _)| !home.contains(*node)) else { continue };
            let was_away = before.filter(|away| away.on == on);
            if !is_away(there, total, was_away.is_some()) {
                continue;
            }
            let away = was_away.unwrap_or(Away { on, since: now });
            if now.duration_since(away.since) < dwell {
                self.away.insert(owner, away);
            } else if !move_home(core, &owner, cgroups, &home, (on, there)) {
                self.away.insert(owner, Away { on, since: now });
            }
        }
    }
}

/// The Burstable owners whose promise may move, with the names and cgroups of their guarantees.
fn burstable(core: &Core) -> BTreeMap<OwnerId, Vec<(String, CgroupPath)>> {
    let mut found: BTreeMap<OwnerId, Vec<(String, CgroupPath)>> = BTreeMap::new();
    for (name, guarantee) in &core.store.state.guarantees {
        let owner = OwnerId::from(guarantee.owner(name));
        let account = core.store.state.ledger.owner(&owner);
        let follows = account.is_some_and(|account| account.terms.burstable && !account.terms.immovable);
        let is_kept = !core.store.state.releasing.contains(name);
        if follows && is_kept && !core.store.state.moving.is_moved(&owner) {
            found.entry(owner).or_default().push((name.clone(), guarantee.cgroup.clone()));
        }
    }
    found
}

/// The nodes on which base pages are promised to an owner.
fn home_of(core: &Core, owner: &OwnerId) -> NodeSet {
    let account = core.store.state.ledger.owner(owner);
    let held = account.into_iter().flat_map(|account| account.containers.values());
    let blocks = held.flat_map(|held| &held.blocks).filter(|block| block.kind == ZoneKind::Memory);
    blocks.flat_map(|block| block.affinity.iter()).collect()
}

/// Has the promise of an owner follow it, and reports that; whether it did.
fn move_home(
    core: &mut Core,
    owner: &OwnerId,
    cgroups: &[(String, CgroupPath)],
    from: &NodeSet,
    (to, there): (NodeId, Bytes),
) -> bool {
    let (_, first) = cgroups.first().cloned().unzip();
    match core.move_home(owner, first.as_ref(), to) {
        Ok(true) => {}
        Ok(false) => {
            tracing::debug!(%owner, node = %to, "the promise cannot follow its workload: the node has no room");
            return false;
        }
        Err(error) => {
            tracing::error!(%owner, node = %to, %error, "the promise cannot follow its workload");
            return false;
        }
    }
    for (name, cgroup) in cgroups {
        let message = format!(
            "The home of {name} is now node {to}, where {there} of its memory lie; it was node {from} before."
        );
        let report = EventReport::new(EventKind::HomeMoved, message);
        core.report(Some(cgroup), report.detail("from", from.to_string()).detail("to", to.to_string()));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_more_to_be_away_than_to_stay_so() {
        for (there, total, was_away, expected) in [
            (60, 100, false, true),
            (59, 100, false, false),
            (59, 100, true, true),
            (50, 100, true, true),
            (49, 100, true, false),
            (15, 15, false, false),
            (15, 15, true, true),
        ] {
            assert_eq!(
                is_away(Bytes::mib(there), Bytes::mib(total), was_away),
                expected,
                "{there} of {total}"
            );
        }
    }
}
