//! What a decision works with: what is free, and what is asked for, as numbers.

use std::sync::Arc;

use numaward_topology::{Bytes, ZoneKind};

use super::{
    host::Host,
    rank::{Placement, amounts},
};
use crate::{
    conditions::{Conditions, Withheld},
    decision::Shortfall,
    hint::Resource,
    ledger::Ledger,
    request::ContainerName,
};

/// What is free, by resource and position.
#[derive(Clone, Debug)]
pub(super) struct Room {
    pub(super) free: Vec<Vec<u64>>,
    /// What could be promised on the empty machine.
    pub(super) capacity: Vec<Vec<u64>>,
    /// The number of base memory, where memory is managed.
    pub(super) memory: Option<usize>,
    /// What is free and not offered.
    pub(super) withheld: Arc<[Withheld]>,
    conditions: Arc<Conditions>,
}

impl Room {
    /// What a ledger leaves, as the host is.
    pub(super) fn new(host: &Host, ledger: &Ledger) -> Self {
        let mut free = Vec::with_capacity(host.resources().len());
        for resource in host.resources() {
            free.push(match (resource, &host.cpus) {
                (&Resource::Memory(kind), _) => offered(host, ledger, kind),
                (_, Some(cpus)) => cpus.count(&cpus.available(ledger)),
                (_, None) => vec![0; host.len()],
            });
        }
        Self {
            free,
            capacity: host.capacity().to_vec(),
            memory: host.number_of(ZoneKind::Memory),
            withheld: withheld(host, ledger),
            conditions: ledger.conditions().clone(),
        }
    }

    /// The empty machine.
    pub(super) fn empty(&self) -> Self {
        Self { free: self.capacity.clone(), ..self.clone() }
    }

    /// Takes what a unit needs where a placement says. What was taken from where, by resource.
    pub(super) fn take(&mut self, host: &Host, unit: &Unit, placement: &Placement) -> Shares {
        let mut shares = Vec::with_capacity(unit.need.len());
        for (resource, set) in placement.sets.iter().enumerate() {
            let of = if set.is_empty() {
                Vec::new()
            } else {
                amounts(host, self, resource, set, unit.need[resource])
            };
            for &(at, share) in &of {
                let free = &mut self.free[resource][at];
                *free = free.saturating_sub(share);
            }
            shares.push(of);
        }
        shares
    }

    /// Gives back what was taken.
    pub(super) fn give_back(&mut self, shares: &Shares) {
        for (resource, of) in shares.iter().enumerate() {
            for &(at, share) in of {
                self.free[resource][at] += share;
            }
        }
    }

    /// What each node has free of what a unit needs.
    pub(super) fn shortfalls(&self, host: &Host, unit: &Unit, resources: &[usize]) -> Vec<Shortfall> {
        let mut shortfalls = Vec::new();
        for &number in resources {
            let resource = host.resources()[number];
            let of = |at: usize| {
                let (node, free) = (host.id(at), self.free[number][at]);
                let is_this = |of: &&Withheld| of.node == node && Resource::Memory(of.kind) == resource;
                let withheld = self.withheld.iter().find(is_this).map_or(0, |of| of.bytes.0);
                Shortfall { node, resource, requested: unit.need[number], free, withheld }
            };
            shortfalls.extend((0..host.len()).map(of));
        }
        shortfalls
    }

    /// How much others use the nodes of a set.
    pub(super) fn load(&self, host: &Host, nodes: &[usize]) -> u64 {
        let of = |at: &usize| self.conditions.load.get(&host.id(*at)).copied().unwrap_or(0);
        if self.conditions.load.is_empty() { 0 } else { nodes.iter().map(of).fold(0, u64::saturating_add) }
    }
}

/// What of a kind is free and can be had, by position.
pub(super) fn offered(host: &Host, ledger: &Ledger, kind: ZoneKind) -> Vec<u64> {
    let mut free = host.column(&ledger.nodes, kind, |account| account.free);
    if let Some(withheld) = ledger.conditions().withheld.get(&kind) {
        for (free, node) in free.iter_mut().zip(host.ids()) {
            *free = free.saturating_sub(withheld.get(node).map_or(0, |bytes| bytes.0));
        }
    }
    free
}

/// What is free and not offered.
fn withheld(host: &Host, ledger: &Ledger) -> Arc<[Withheld]> {
    let mut all = Vec::new();
    for &kind in ledger.conditions().withheld.keys() {
        let free = host.column(&ledger.nodes, kind, |account| account.free);
        for ((&node, free), offered) in host.ids().iter().zip(free).zip(offered(host, ledger, kind)) {
            if free > offered {
                all.push(Withheld { node, kind, bytes: Bytes(free - offered) });
            }
        }
    }
    all.into()
}

/// Amounts by resource and position.
pub(super) type Shares = Vec<Vec<(usize, u64)>>;

/// What is placed together: a container, or in pod scope all that run together.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    /// The container; `None` for all of them.
    pub(super) container: Option<ContainerName>,
    /// By resource; zero where nothing is needed.
    pub(super) need: Vec<u64>,
    /// The nodes of its devices.
    pub(super) devices: Vec<usize>,
    /// By position: whether a node is not wished for. Empty where there are no wishes.
    pub(super) unwished: Vec<bool>,
}

impl Unit {
    /// The resources of which it needs something.
    pub(super) fn resources(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.need.len()).filter(|&resource| self.need[resource] > 0)
    }

    /// The largest share of the empty machine that it needs of any resource, in millionths.
    pub(super) fn dominant_share(&self, room: &Room) -> u128 {
        let share = |resource: usize| {
            let all: u128 = room.capacity[resource].iter().map(|&of| u128::from(of)).sum();
            u128::from(self.need[resource]) * 1_000_000 / all.max(1)
        };
        self.resources().map(share).max().unwrap_or(0)
    }
}
