//! The home nodes of Burstable workloads: where what they request is promised, without being bound to it.

use numaward_cgroup::{CgroupPath, read};
use numaward_engine::{OwnerId, Terms};
use numaward_guarantee::error::AdmissionError;
use numaward_topology::{Bytes, NodeId, NodeSet, ZoneKind};

use super::Core;

/// The node with most of some memory, and how much that is.
pub(crate) fn node_with_most(by_node: impl IntoIterator<Item = (NodeId, Bytes)>) -> Option<(NodeId, Bytes)> {
    // Of equals the lowest.
    by_node
        .into_iter()
        .filter(|(_, bytes)| bytes.0 > 0)
        .reduce(|best, next| if next.1 > best.1 { next } else { best })
}

impl Core {
    /// Where the user memory of a cgroup is; nowhere if that cannot be read.
    pub(crate) fn footprint(&self, path: &CgroupPath) -> Vec<(NodeId, Bytes)> {
        let by_node = read::memory_numa_stat(&self.hierarchy.dir(path)).unwrap_or_default();
        by_node.into_iter().map(|(node, memory)| (node, memory.user())).collect()
    }

    /// The terms of a request for this cgroup: a Burstable workload that runs has its home where its memory is, unless it
    /// names another place.
    pub(super) fn with_home(&self, terms: &Terms, name: &str, path: &CgroupPath) -> Terms {
        let mut terms = terms.clone();
        if terms.burstable
            && terms.preferences.preferred.is_empty()
            && let Some((home, _)) = node_with_most(self.footprint(path))
        {
            terms.preferences.preferred.insert(name.into(), NodeSet::single(home));
        }
        terms
    }

    /// Promises the memory of a Burstable owner with this cgroup on this node instead; `false` where that has no room.
    pub(crate) fn move_home(
        &mut self,
        owner: &OwnerId,
        cgroup: Option<&CgroupPath>,
        to: NodeId,
    ) -> Result<bool, AdmissionError> {
        let Some(account) = self.store.state.ledger.owner(owner).cloned() else { return Ok(false) };
        let Some(request) = account.request.as_deref() else { return Ok(false) };
        let home = NodeSet::single(to);
        let mut terms = account.terms.clone();
        let names = account.containers.keys();
        terms.preferences.preferred = names.map(|name| (name.clone(), home.clone())).collect();
        let strategy = &*self.policy.strategy;
        // What it has there already is no other's.
        let without = strategy.release(&self.ledger_for(cgroup, None), owner);
        let decision = strategy.admit_watched(&without, request, &terms, &|_| {});
        let Ok(grants) = decision.outcome else { return Ok(false) };
        let mut blocks = grants.iter().flat_map(|grant| &grant.allocation.blocks);
        if blocks.any(|block| block.kind == ZoneKind::Memory && block.affinity != home) {
            return Ok(false);
        }
        let started = account.started.iter();
        let ledger = started
            .fold(decision.ledger, |ledger, container| strategy.note_started(&ledger, owner, container));
        let mut change = self.begin();
        change.store.state.ledger = ledger;
        change.store()?;
        self.note_guarantees_changed();
        Ok(true)
    }
}
