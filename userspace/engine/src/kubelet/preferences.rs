//! Placement preferences as hints, merged with the hints for CPUs and memory.
//!
//! For devices, every set that includes all their nodes is a hint, and the smallest one is preferred. For preferred
//! nodes, every set is a hint, and sets of preferred nodes only are preferred.

use std::collections::BTreeMap;

use numaward_topology::NodeSet;

use crate::{
    hint::{HintList, NodeIndex, Provider, ProviderHints, Resource, Scope, for_each_subset},
    preferences::PlacementPreferences,
    request::{ContainerName, Request},
};

/// Returns the hints for the stated preferences.
pub(super) fn hints(
    preferences: &PlacementPreferences,
    nodes: &NodeIndex,
    request: &Request,
    scope: Scope<'_>,
) -> Vec<(Provider, ProviderHints)> {
    let all = |of: &BTreeMap<ContainerName, NodeSet>| {
        let sets = request.all_containers().filter(|container| match scope {
            Scope::Container(one) => one.name == container.name,
            Scope::Owner => true,
        });
        sets.filter_map(|container| of.get(&container.name)).fold(0, |mask, set| mask | nodes.mask(set))
    };
    let mut hints = Vec::new();
    let mut add = |provider, resource, list| {
        hints.push((provider, ProviderHints::ByResource(vec![(resource, list)])));
    };
    let devices = all(&preferences.devices);
    if devices != 0 {
        let mut masks = Vec::new();
        for_each_subset(nodes.all(), |mask| {
            if mask & devices == devices {
                masks.push(mask);
            }
        });
        let list = HintList::new(nodes, masks, devices.count_ones(), |_| false);
        add(Provider::Devices, Resource::Devices, list);
    }
    let preferred = all(&preferences.preferred);
    if preferred != 0 {
        let mut masks = Vec::new();
        for_each_subset(nodes.all(), |mask| masks.push(mask));
        let list = HintList::new(nodes, masks, 0, |mask| mask & !preferred == 0);
        add(Provider::PreferredNodes, Resource::PreferredNodes, list);
    }
    hints
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use numaward_topology::{Bytes, Machine, NodeId, ZoneKind};

    use super::*;
    use crate::{
        KubeletStrategy, Ledger, PolicyConfig, Quantity, Resources, Strategy as _, Terms,
        policy::{CpuManagerPolicy, MemoryManagerPolicy, MemoryReservation},
    };

    /// Makes a machine of four nodes with 4 CPUs and 4 GiB each.
    fn bench(policy: &str) -> (KubeletStrategy, Ledger) {
        let machine = Machine::builder().nodes(4).sockets(4).cores_per_node(4).memory(Bytes::gib(4));
        let config = PolicyConfig {
            memory_manager_policy: MemoryManagerPolicy::Static,
            reserved_memory: vec![MemoryReservation {
                numa_node: NodeId(0),
                limits: BTreeMap::from([(ZoneKind::Memory, Quantity::whole(Bytes::gib(1).0))]),
            }],
            cpu_manager_policy: CpuManagerPolicy::Static,
            cpu_reservation: Some(Quantity::whole(1)),
            topology_manager_policy: policy.parse().unwrap(),
            ..PolicyConfig::default()
        };
        let strategy = KubeletStrategy::new(&machine.build().unwrap(), &config).unwrap();
        let ledger = strategy.idle();
        (strategy, ledger)
    }

    fn request(cpus: u64) -> Request {
        let resources =
            Resources::none().with_cpu(Quantity::whole(cpus)).with_memory(Quantity::whole(Bytes::gib(1).0));
        Request::workload("a", resources)
    }

    fn preferences(devices: &str, preferred: &str) -> PlacementPreferences {
        let of = |nodes: &str| match nodes {
            "" => BTreeMap::new(),
            nodes => BTreeMap::from([("a".into(), nodes.parse().unwrap())]),
        };
        PlacementPreferences { devices: of(devices), preferred: of(preferred) }
    }

    fn place(policy: &str, cpus: u64, preferences: &PlacementPreferences) -> Option<String> {
        let terms = Terms { preferences: preferences.clone(), ..Terms::default() };
        let (strategy, ledger) = bench(policy);
        let decision = strategy.admit_watched(&ledger, &request(cpus), &terms, &|_| {});
        decision.outcome.ok().map(|grants| grants[0].allocation.memory_nodes().to_string())
    }

    #[test]
    fn preferences_choose_the_node() {
        let at = |node: &str| Some(node.to_owned());
        for policy in ["best-effort", "restricted", "single-numa-node"] {
            assert_eq!(place(policy, 2, &preferences("", "")), at("0"), "{policy}");
            assert_eq!(place(policy, 2, &preferences("2", "")), at("2"), "{policy}");
            assert_eq!(place(policy, 2, &preferences("", "2-3")), at("2"), "{policy}");
            assert_eq!(
                place(policy, 2, &preferences("3", "1-2")),
                at("3"),
                "{policy}: the device is where it is"
            );
            // Node 0 has only three allocatable CPUs.
            assert_eq!(place(policy, 4, &preferences("", "0")), at("1"), "{policy}: a wish is given up");
        }
        // The memory fits on node 0, but one CPU has to come from another node.
        assert_eq!(place("best-effort", 4, &preferences("0", "")), at("0"));
        assert_eq!(place("single-numa-node", 4, &preferences("0", "")), None);
    }
}
