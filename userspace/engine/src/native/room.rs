//! What a decision works with: what is free, and what is asked for, as numbers.

use numaward_topology::{NodeId, ZoneKind};

use super::{
    host::Host,
    rank::{Placement, amounts},
};
use crate::{decision::Shortfall, ledger::Ledger, request::ContainerName};

/// What is free, by resource and position.
#[derive(Clone, Debug)]
pub(super) struct Room {
    pub(super) free: Vec<Vec<u64>>,
    /// What could be promised on the empty machine.
    pub(super) capacity: Vec<Vec<u64>>,
    /// The number of base memory, where memory is managed.
    pub(super) memory: Option<usize>,
}

impl Room {
    /// What a ledger leaves.
    pub(super) fn new(host: &Host, ledger: &Ledger) -> Self {
        let mut free = Vec::with_capacity(host.resources().len());
        for resource in host.resources() {
            free.push(match (resource, &host.cpus) {
                (&crate::hint::Resource::Memory(kind), _) => {
                    host.column(&ledger.nodes, kind, |account| account.free)
                }
                (_, Some(cpus)) => cpus.count(&cpus.available(ledger)),
                (_, None) => vec![0; host.len()],
            });
        }
        Self { free, capacity: host.capacity().to_vec(), memory: host.number_of(ZoneKind::Memory) }
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
            let of = |(&node, &free): (&NodeId, &u64)| Shortfall {
                node,
                resource: host.resources()[number],
                requested: unit.need[number],
                free,
            };
            shortfalls.extend(host.ids().iter().zip(&self.free[number]).map(of));
        }
        shortfalls
    }
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
