//! Memory accounts of an idle machine: the memory of each node minus the reservation for the system.

use std::collections::{BTreeMap, BTreeSet};

use numaward_topology::{Bytes, Machine, NodeId, NodeSet, NumaNode, ZoneKind};

use crate::{
    ledger::{KindAccount, NodeAccount},
    policy::{MachineProblem, PolicyConfig, StartProblem},
    quantity::Quantity,
};

type ReservedBytes = BTreeMap<ZoneKind, Bytes>;

/// Checks the reservations and makes the accounts.
pub(super) fn make_accounts(
    machine: &Machine,
    config: &PolicyConfig,
) -> Result<BTreeMap<NodeId, NodeAccount>, StartProblem> {
    let sums = sum_reservations(machine, config)?;
    check_sums(&sums, config)?;
    let reserved = by_node(config)?;
    if sums.get(&ZoneKind::Memory).is_none_or(|sum| sum.is_zero()) {
        return Err(StartProblem::NoMemoryReservation);
    }
    let none = ReservedBytes::new();
    let account = |(&id, node): (&NodeId, &NumaNode)| {
        Ok((id, node_account(id, node, reserved.get(&id).unwrap_or(&none))?))
    };
    machine.nodes.iter().map(account).collect()
}

/// Returns the sum of the reservations over all nodes, by kind.
fn sum_reservations(
    machine: &Machine,
    config: &PolicyConfig,
) -> Result<BTreeMap<ZoneKind, Quantity>, StartProblem> {
    let mut sums: BTreeMap<ZoneKind, Quantity> = BTreeMap::new();
    for reservation in &config.reserved_memory {
        if !machine.nodes.contains_key(&reservation.numa_node) {
            return Err(StartProblem::ReservationOnUnknownNode(reservation.numa_node));
        }
        for (&kind, &quantity) in &reservation.limits {
            let sum = sums.entry(kind).or_default();
            *sum = sum.checked_add(quantity).unwrap_or(quantity);
        }
    }
    Ok(sums)
}

/// Checks that the sum of each kind equals the reservation of the whole machine.
fn check_sums(sums: &BTreeMap<ZoneKind, Quantity>, config: &PolicyConfig) -> Result<(), StartProblem> {
    let Some(expected) = &config.node_reservation else { return Ok(()) };
    let kinds: BTreeSet<ZoneKind> = sums.keys().chain(expected.keys()).copied().collect();
    for kind in kinds {
        let [sum, expected] = [sums, expected].map(|of| of.get(&kind).copied().unwrap_or_default());
        if sum != expected {
            let [reserved, node_reservation] =
                [sum, expected].map(|quantity| Bytes(quantity.units().unwrap_or(u64::MAX)));
            return Err(StartProblem::ReservationMismatch { kind, reserved, node_reservation });
        }
    }
    Ok(())
}

/// Returns the reservations by node.
fn by_node(config: &PolicyConfig) -> Result<BTreeMap<NodeId, ReservedBytes>, StartProblem> {
    let mut by_node: BTreeMap<NodeId, ReservedBytes> = BTreeMap::new();
    for reservation in &config.reserved_memory {
        let node = reservation.numa_node;
        for (&kind, &quantity) in &reservation.limits {
            let not_integer = StartProblem::ReservationNotInteger(node, kind, quantity);
            let bytes = Bytes(quantity.as_int64().ok_or(not_integer)?);
            by_node.entry(node).or_default().insert(kind, bytes);
        }
    }
    Ok(by_node)
}

/// Makes the account of a node. Base memory excludes huge page pools.
fn node_account(id: NodeId, node: &NumaNode, reserved: &ReservedBytes) -> Result<NodeAccount, StartProblem> {
    // `check_machine` has verified that each pool and their sum fit 64 bits.
    let pools: BTreeMap<ZoneKind, Bytes> = node
        .hugepages
        .iter()
        .map(|(&size, pool)| (ZoneKind::Hugepages(size), Bytes(pool.total.saturating_mul(size.0.0))))
        .collect();
    let hugepages = Bytes(pools.values().fold(0, |sum, pool| sum.saturating_add(pool.0)));
    let base = node
        .memory
        .0
        .checked_sub(hugepages.0)
        .map(Bytes)
        .ok_or(MachineProblem::HugepagesTooLarge { node: id, hugepages, memory: node.memory })?;
    if let Some(&kind) = reserved.keys().find(|&kind| *kind != ZoneKind::Memory && !pools.contains_key(kind))
    {
        return Err(StartProblem::ReservationOfUnknownKind(id, kind));
    }
    let pools = pools.into_iter().map(|(kind, pool)| (kind, pool, pool));
    let account = |(kind, total, available): (ZoneKind, Bytes, Bytes)| {
        let reserved = reserved.get(&kind).copied().unwrap_or_default();
        let too_large = StartProblem::ReservationTooLarge { node: id, kind, reserved, available };
        let allocatable = Bytes(available.0.checked_sub(reserved.0).ok_or(too_large)?);
        Ok((kind, KindAccount { total, reserved, allocatable, guaranteed: Bytes(0), free: allocatable }))
    };
    let kinds = pools.chain([(ZoneKind::Memory, node.memory, base)]).map(account);
    Ok(NodeAccount {
        assignments: 0,
        group: NodeSet::single(id),
        kinds: kinds.collect::<Result<_, StartProblem>>()?,
    })
}
