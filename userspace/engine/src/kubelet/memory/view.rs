//! The part of the accounts that one request needs, with the checks for hints and allocations.

use numaward_topology::{Bytes, ZoneKind};

use super::{RequestedBytes, StaticMemoryManager, defects};
use crate::{
    hint::{Mask, positions},
    ledger::{KindAccount, Ledger, NodeAccount},
    request::OwnerId,
};

/// Accounts by node position, limited to the kinds of one request.
pub(super) struct RequestView {
    kinds: Vec<KindView>,
    /// Nodes with at least one block.
    assigned: Mask,
    /// Group by node.
    groups: Vec<Mask>,
}

pub(super) struct KindView {
    requested: u64,
    pub(super) allocatable: Vec<u64>,
    pub(super) free: Vec<u64>,
    /// Reusable bytes of the owner's init containers, by set of nodes.
    reusable: Vec<(Mask, u64)>,
}

impl KindView {
    pub(super) fn reusable(&self, mask: Mask) -> u64 {
        self.reusable.iter().find(|(nodes, _)| *nodes == mask).map_or(0, |(_, bytes)| *bytes)
    }
}

impl RequestView {
    pub(super) fn new(
        memory: &StaticMemoryManager,
        ledger: &Ledger,
        owner: &OwnerId,
        requested: &RequestedBytes,
    ) -> Self {
        let accounts: Vec<_> = memory.nodes.ids().iter().map(|id| ledger.nodes.get(id)).collect();
        let kind_view = |(&kind, &requested): (&ZoneKind, &u64)| {
            // A node has zero bytes of a huge page size that it does not know. (The kubelet crashes.)
            let column = |value: fn(&KindAccount) -> Bytes| {
                let of_node = |account: Option<&NodeAccount>| {
                    account.and_then(|account| account.kinds.get(&kind)).map_or(0, |account| value(account).0)
                };
                accounts.iter().copied().map(of_node).collect()
            };
            KindView {
                requested,
                allocatable: column(|account| account.allocatable),
                free: column(|account| account.free),
                reusable: ledger.notes.reusable_memory.by_set(owner, kind, &memory.nodes),
            }
        };
        let mut assigned = 0;
        let mut groups = Vec::with_capacity(accounts.len());
        for (position, account) in accounts.iter().enumerate() {
            groups.push(account.map_or(1 << position, |account| memory.nodes.mask(&account.group)));
            if account.is_some_and(|account| account.assignments > 0) {
                assigned |= 1 << position;
            }
        }
        Self { kinds: requested.iter().map(kind_view).collect(), assigned, groups }
    }

    /// Returns whether a set of nodes has enough bytes of every kind.
    pub(super) fn enough(
        &self,
        mask: Mask,
        column: impl Fn(&KindView) -> &Vec<u64>,
        extra: impl Fn(&KindView) -> u64,
    ) -> bool {
        self.kinds.iter().all(|kind| {
            let column = column(kind);
            let sum = positions(mask).map(|position| column[position]).fold(0, u64::saturating_add);
            sum >= kind.requested || sum.saturating_add(extra(kind)) >= kind.requested
        })
    }

    /// Returns whether the growth rule permits a set of nodes as a hint.
    pub(super) fn group_allows_hint(&self, mask: Mask) -> bool {
        if mask.is_power_of_two() {
            return self.groups[mask.trailing_zeros() as usize].count_ones() <= 1;
        }
        self.has_no_other_group(mask)
    }

    /// Returns whether no node of the set is used by another group.
    fn has_no_other_group(&self, mask: Mask) -> bool {
        positions(mask & self.assigned).all(|position| self.groups[position] == mask)
    }

    /// Returns whether the growth rule permits an allocation on a set of nodes.
    pub(super) fn group_allows(&self, mask: Mask) -> bool {
        defects::one_node_skips_the_growth_rule(mask) || self.has_no_other_group(mask)
    }
}
