//! Needs of a request as numbers, and their division into placement groups.

use std::collections::BTreeMap;

use numaward_topology::{NodeId, NodeSet, ZoneKind};

use super::{
    free_capacity::{FreeCapacity, PlacementGroup},
    host::{CPU, HostModel},
    refusal::PlacementRefusal,
};
use crate::{
    hint::Resource,
    ledger::Ledger,
    policy::{MemoryTier, TopologyManagerPolicy, TopologyManagerScope},
    qos::QosClass,
    request::{ContainerName, ContainerRequest, OwnerId, Request},
    terms::Terms,
};

/// Needs of all containers, in the order in which they start.
#[derive(Clone, Debug)]
pub(super) struct RequestNeeds {
    pub(super) containers: Vec<ContainerNeeds>,
}

/// Needs of one container.
#[derive(Clone, Debug)]
pub(super) struct ContainerNeeds {
    pub(super) name: ContainerName,
    /// Amount by resource index.
    pub(super) amounts: Vec<u64>,
    /// True if the container ends before the next one starts.
    pub(super) ends: bool,
}

impl ContainerNeeds {
    pub(super) fn is_nothing(&self) -> bool {
        self.amounts.iter().all(|&amount| amount == 0)
    }
}

impl RequestNeeds {
    pub(super) fn new(host: &HostModel, request: &Request, terms: &Terms) -> Result<Self, PlacementRefusal> {
        let guaranteed = request.qos() == QosClass::Guaranteed || terms.without_memory;
        let ends = |init: &ContainerRequest| !init.restartable;
        let init = request.init_containers.iter().map(|init| (init, ends(init)));
        let all = init.chain(request.containers.iter().map(|container| (container, false)));
        let containers = all.map(|(container, ends)| {
            let mut amounts = vec![0; host.resources.len()];
            if guaranteed || terms.burstable {
                read_amounts(host, container, guaranteed, terms, &mut amounts)?;
            }
            Ok(ContainerNeeds { name: container.name.clone(), amounts, ends })
        });
        Ok(Self { containers: containers.collect::<Result<_, PlacementRefusal>>()? })
    }
}

fn read_amounts(
    host: &HostModel,
    container: &ContainerRequest,
    guaranteed: bool,
    terms: &Terms,
    amounts: &mut [u64],
) -> Result<(), PlacementRefusal> {
    if let (Some(cpus), Some(cpu), true) = (&host.cpus, container.requests.cpu, guaranteed) {
        let whole = cpu.whole_cpus().unwrap_or(0);
        cpus.check_cores(whole, terms).map_err(|error| PlacementRefusal::Cores(error.to_string()))?;
        amounts[CPU] = whole;
    }
    if host.idle.is_empty() {
        return Ok(());
    }
    for (&kind, &quantity) in container.requests.memory.iter().filter(|(_, quantity)| !quantity.is_zero()) {
        let resource = Resource::Memory(kind);
        let number = host.number_of(kind).ok_or(PlacementRefusal::UnknownMemoryKind(kind))?;
        amounts[number] =
            quantity.units().ok_or(PlacementRefusal::TooLarge { resource, amount: quantity })?;
    }
    Ok(())
}

/// Returns the placement groups, largest first, each with the indices of its containers.
pub(super) fn group_containers(
    host: &HostModel,
    free_capacity: &FreeCapacity,
    needs: &RequestNeeds,
    policy: TopologyManagerPolicy,
    scope: TopologyManagerScope,
    wishes: &NodePreferences<'_>,
) -> Result<Vec<(PlacementGroup, Vec<usize>)>, PlacementRefusal> {
    let running: Vec<usize> = (0..needs.containers.len())
        .filter(|&index| !needs.containers[index].ends && !needs.containers[index].is_nothing())
        .collect();
    let together = scope == TopologyManagerScope::Pod && policy != TopologyManagerPolicy::None;
    if together {
        if running.is_empty() {
            return Ok(Vec::new());
        }
        let mut sum = vec![0u64; host.resources.len()];
        for &index in &running {
            for (resource, amount) in needs.containers[index].amounts.iter().enumerate() {
                sum[resource] = sum[resource].checked_add(*amount).ok_or(PlacementRefusal::SumTooLarge)?;
            }
        }
        let names: Vec<&ContainerName> = running.iter().map(|&index| &needs.containers[index].name).collect();
        let container = match names.as_slice() {
            [one] => Some((*one).clone()),
            _ => None,
        };
        return Ok(vec![(wishes.to_group(host, container, sum, &names), running)]);
    }
    let group = |index: usize| {
        let need = &needs.containers[index];
        (wishes.to_group(host, Some(need.name.clone()), need.amounts.clone(), &[&need.name]), vec![index])
    };
    let mut groups: Vec<(PlacementGroup, Vec<usize>)> = running.into_iter().map(group).collect();
    groups.sort_by_cached_key(|(group, of)| (std::cmp::Reverse(group.dominant_share(free_capacity)), of[0]));
    Ok(groups)
}

/// Node preferences of an owner.
pub(super) struct NodePreferences<'a> {
    terms: &'a Terms,
    /// Nodes of the owners to be near to, and of those to be apart from.
    with: NodeSet,
    apart: NodeSet,
}

impl<'a> NodePreferences<'a> {
    pub(super) fn new(ledger: &Ledger, owner: &OwnerId, terms: &'a Terms, host: &HostModel) -> Self {
        let nodes_of = |selectors: &std::collections::BTreeSet<String>| {
            let mut nodes = NodeSet::new();
            if selectors.is_empty() {
                return nodes;
            }
            for (other, account) in ledger.owners().filter(|(other, _)| *other != owner) {
                let named = |selector: &String| match selector.split_once('=') {
                    Some((key, value)) => account.terms.labels.get(key).is_some_and(|of| of == value),
                    None => selector == other.as_str() || account.terms.name.as_ref() == Some(selector),
                };
                if !selectors.iter().any(named) {
                    continue;
                }
                for held in account.containers.values() {
                    nodes.extend(held.memory_nodes().iter());
                    if let (Some(cpus), Some(manager)) = (&held.cpus, &host.cpus) {
                        nodes.extend(host.set(&manager.nodes_of(cpus)).iter());
                    }
                }
            }
            nodes
        };
        Self { terms, with: nodes_of(&terms.with), apart: nodes_of(&terms.apart) }
    }

    fn to_group(
        &self,
        host: &HostModel,
        container: Option<ContainerName>,
        need: Vec<u64>,
        names: &[&ContainerName],
    ) -> PlacementGroup {
        let all = |of: &BTreeMap<ContainerName, NodeSet>| -> NodeSet {
            names.iter().filter_map(|name| of.get(*name)).flat_map(NodeSet::iter).collect()
        };
        let devices = host.positions(&all(&self.terms.preferences.devices));
        let mut preferred = all(&self.terms.preferences.preferred);
        preferred.extend(self.with.iter());
        let mut not_preferred = Vec::new();
        if !preferred.is_empty() || !self.apart.is_empty() {
            let is_unwished = |&node: &NodeId| {
                !preferred.is_empty() && !preferred.contains(node) || self.apart.contains(node)
            };
            not_preferred = host.ids.iter().map(is_unwished).collect();
        }
        let all = self.terms.preferences.devices.values().chain(self.terms.preferences.preferred.values());
        let all = all.chain([&self.with, &self.apart]).flat_map(NodeSet::iter).collect();
        PlacementGroup { container, need, devices, not_preferred, named: host.positions(&all) }
    }
}

/// Returns the type of a node's memory. That of a node without CPUs is unknown unless it is configured.
pub(super) fn memory_tier(
    host: &HostModel,
    tiers: &BTreeMap<NodeId, MemoryTier>,
    at: usize,
) -> Option<MemoryTier> {
    let default = host.has_cpus(at).then_some(MemoryTier::Dram);
    tiers.get(&host.id(at)).copied().or(default)
}

/// Excludes nodes that the terms do not permit, and memory of other types.
pub(super) fn close_unwanted_nodes(
    host: &HostModel,
    free_capacity: &mut FreeCapacity,
    terms: &Terms,
    tiers: &BTreeMap<NodeId, MemoryTier>,
) {
    for at in (0..host.len()).filter(|&at| !terms.nodes.is_empty() && !terms.nodes.contains(host.id(at))) {
        for number in 0..host.resources.len() {
            free_capacity.exclude(number, at);
            free_capacity.capacity[number][at] = 0;
        }
    }
    if terms.memory_tiers.is_empty() {
        return;
    }
    for at in 0..host.len() {
        if memory_tier(host, tiers, at).is_some_and(|tier| terms.memory_tiers.contains(&tier)) {
            continue;
        }
        for (number, resource) in host.resources.iter().enumerate() {
            if matches!(resource, Resource::Memory(ZoneKind::Memory | ZoneKind::Hugepages(_))) {
                free_capacity.exclude(number, at);
                free_capacity.capacity[number][at] = 0;
            }
        }
    }
}
