//! Guarantees of Burstable workloads follow the memory of the workload to another node.
//!
//! # Problem
//! The memory request of a Burstable workload is guaranteed on its preferred node, but the workload may run and allocate on any
//! node. After it has moved, a guarantee on the old node is of no use to it and keeps the node from other workloads.
//!
//! # Terms
//! A workload is *away* while most of its user memory is on one node that is not its preferred node.
//!
//! # Algorithm
//! A workload becomes away when three fifths of its memory are on another node, and stays away until that node has less than
//! half. After the dwell time (`enforcement.homeDwellTime`) on the same node, its guarantee moves there in the ledger; no pages
//! are moved. If that node has no room, the guarantee is tried again after another dwell time.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_api::EventKind;
use numaward_cgroup::CgroupPath;
use numaward_engine::OwnerId;
use numaward_guarantee::error::AdmissionError;
use numaward_model::EventReport;
use numaward_topology::{Bytes, NodeId, NodeSet, ZoneKind};

use super::{Controller, ControllerEvent, drift::Rotation};
use crate::core::{Core, burstable_home, conditions, shared_pool};

/// Maximum time between two readings of a workload; less if the dwell time is short.
const MAX_READ_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum user memory of a workload to become away.
const MIN_MEMORY: Bytes = Bytes::mib(16);

/// Controller that moves guarantees of Burstable workloads.
#[derive(Debug)]
pub(super) struct BurstableHomes {
    /// True if guarantees have changed since the last reading.
    pub(super) is_outdated: bool,
    /// Burstable workloads, with the names and cgroups of their guarantees.
    workloads: BTreeMap<OwnerId, Vec<(String, CgroupPath)>>,
    /// Workloads are read in turns, because the kernel needs time to report the nodes of their memory.
    round: Rotation<OwnerId>,
    away: BTreeMap<OwnerId, AwayPeriod>,
}

/// Node that has most of a workload's memory, and the time since which it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AwayPeriod {
    node: NodeId,
    since: Instant,
}

/// Returns true if a workload is away on a node. Leaving requires three fifths of its memory there, staying only half.
fn is_away(on_node: Bytes, total: Bytes, was_away: bool) -> bool {
    let (on_node_bytes, total_bytes) = (u128::from(on_node.0), u128::from(total.0));
    if was_away {
        on_node_bytes * 2 >= total_bytes
    } else {
        total >= MIN_MEMORY && on_node_bytes * 5 >= total_bytes * 3
    }
}

impl BurstableHomes {
    pub(super) fn new(dwell: Duration) -> Self {
        Self {
            is_outdated: true,
            workloads: BTreeMap::new(),
            round: Rotation::new(MAX_READ_INTERVAL.min(dwell / 4)),
            away: BTreeMap::new(),
        }
    }

    /// Updates the list of workloads.
    fn update(&mut self, core: &Core) {
        self.workloads = burstable(core);
        self.round.items = self.workloads.keys().cloned().collect();
        self.away.retain(|owner, _| self.workloads.contains_key(owner));
    }

    pub(super) fn tick(&mut self, core: &mut Core, now: Instant) {
        if std::mem::take(&mut self.is_outdated) {
            self.update(core);
        }
        let dwell = core.config.enforcement.home_dwell_time.0;
        for owner in self.round.next_batch() {
            let Some(cgroups) = self.workloads.get(&owner) else { continue };
            let mut by_node: BTreeMap<NodeId, Bytes> = BTreeMap::new();
            for (node, bytes) in
                cgroups.iter().flat_map(|(_, cgroup)| burstable_home::footprint(core, cgroup))
            {
                let sum = by_node.entry(node).or_default();
                sum.0 = sum.0.saturating_add(bytes.0);
            }
            let total = Bytes(by_node.values().fold(0, |sum, bytes| sum.saturating_add(bytes.0)));
            let preferred = preferred_nodes(core, &owner);
            let before = self.away.remove(&owner);
            let Some((node, on_node)) =
                burstable_home::node_with_most(by_node).filter(|(node, _)| !preferred.contains(*node))
            else {
                continue;
            };
            let was_away = before.filter(|away| away.node == node);
            if !is_away(on_node, total, was_away.is_some()) {
                continue;
            }
            let away = was_away.unwrap_or(AwayPeriod { node, since: now });
            if now.duration_since(away.since) < dwell {
                self.away.insert(owner, away);
            } else if !move_guarantee(core, &owner, cgroups, &preferred, (node, on_node)) {
                self.away.insert(owner, AwayPeriod { node, since: now });
            }
        }
    }
}

impl Controller for BurstableHomes {
    fn handle(&mut self, core: &mut Core, event: &ControllerEvent<'_>) {
        match *event {
            ControllerEvent::Tick(now) => self.tick(core, now),
            ControllerEvent::StateChanged => self.is_outdated = true,
            _ => {}
        }
    }
}

/// Returns the Burstable owners with movable guarantees, and the names and cgroups of these guarantees.
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

/// Returns the nodes on which base pages are guaranteed to an owner.
fn preferred_nodes(core: &Core, owner: &OwnerId) -> NodeSet {
    let account = core.store.state.ledger.owner(owner);
    let held = account.into_iter().flat_map(|account| account.containers.values());
    let blocks = held.flat_map(|held| &held.blocks).filter(|block| block.kind == ZoneKind::Memory);
    blocks.flat_map(|block| block.affinity.iter()).collect()
}

/// Moves the guarantee of an owner to a node and reports that. Returns false if the guarantee was not moved.
fn move_guarantee(
    core: &mut Core,
    owner: &OwnerId,
    cgroups: &[(String, CgroupPath)],
    from: &NodeSet,
    (to, on_node): (NodeId, Bytes),
) -> bool {
    let (_, first) = cgroups.first().cloned().unzip();
    match move_preferred_node(core, owner, first.as_ref(), to) {
        Ok(true) => {}
        Ok(false) => {
            tracing::debug!(%owner, node = %to, "the guarantee cannot follow its workload: the node has no room");
            return false;
        }
        Err(error) => {
            tracing::error!(%owner, node = %to, %error, "the guarantee cannot follow its workload");
            return false;
        }
    }
    for (name, cgroup) in cgroups {
        let message = format!(
            "The preferred node of {name} is now node {to}, which has {on_node} of its memory; before, it was node {from}."
        );
        let report = EventReport::new(EventKind::HomeMoved, message);
        core.report(Some(cgroup), report.detail("from", from.to_string()).detail("to", to.to_string()));
    }
    true
}

/// Moves the guaranteed memory of a Burstable owner with this cgroup to this node; returns false if the node has too little free
/// memory.
pub(crate) fn move_preferred_node(
    core: &mut Core,
    owner: &OwnerId,
    cgroup: Option<&CgroupPath>,
    to: NodeId,
) -> Result<bool, AdmissionError> {
    let Some(account) = core.store.state.ledger.owner(owner).cloned() else { return Ok(false) };
    let Some(request) = account.request.as_deref() else { return Ok(false) };
    let home = NodeSet::single(to);
    let mut terms = account.terms.clone();
    let names = account.containers.keys();
    terms.preferences.preferred = names.map(|name| (name.clone(), home.clone())).collect();
    let strategy = &*core.policy.strategy;
    // Memory that the cgroup already uses there counts as free for it.
    let without = strategy.release(&conditions::ledger_for(core, cgroup, None), owner);
    let decision = strategy.admit_watched(&without, request, &terms, &|_| {});
    let Ok(grants) = decision.outcome else { return Ok(false) };
    let mut blocks = grants.iter().flat_map(|grant| &grant.allocation.blocks);
    if blocks.any(|block| block.kind == ZoneKind::Memory && block.affinity != home) {
        return Ok(false);
    }
    let started = account.started.iter();
    let ledger =
        started.fold(decision.ledger, |ledger, container| strategy.note_started(&ledger, owner, container));
    let mut change = core.begin();
    change.state().ledger = ledger;
    change.store()?;
    shared_pool::note_guarantees_changed(core);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaving_needs_more_memory_than_staying() {
        for (on_node, total, was_away, expected) in [
            (60, 100, false, true),
            (59, 100, false, false),
            (59, 100, true, true),
            (50, 100, true, true),
            (49, 100, true, false),
            (15, 15, false, false),
            (15, 15, true, true),
        ] {
            assert_eq!(
                is_away(Bytes::mib(on_node), Bytes::mib(total), was_away),
                expected,
                "{on_node} of {total}"
            );
        }
    }
}
