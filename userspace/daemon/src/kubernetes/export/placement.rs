//! NUMA placement of the pods that a published topology includes, for preemption by the scheduler.
//!
//! The scheduler takes the same containers into account, or ignores the placement: regular containers and sidecars that request a device with
//! a known node or, in a Guaranteed pod, whole CPUs or memory. So the placement is only known if each of them has all resources on one node.

use std::{collections::BTreeMap, sync::Arc};

use numaward_engine::{ContainerRequest, QosClass, Quantity};
use numaward_kube::{
    api::StoredPod,
    node_topology::numa_placement::{NumaPlacement, PlacedContainer},
};
use numaward_topology::{Machine, NodeSet};

use super::{
    AssignedResources, HeldResources,
    devices::{Devices, nodes_of},
};

/// Returns the placement of these pods; `None` if a container with exclusive resources does not have all of them on one node.
pub fn placement(
    pods: &[Arc<StoredPod>],
    assigned: &AssignedResources,
    devices: &Devices,
    machine: &Machine,
) -> Option<NumaPlacement> {
    let held: BTreeMap<(&str, &str), &HeldResources> = assigned
        .held
        .iter()
        .filter_map(|held| {
            let container = held.container.as_ref()?;
            Some(((container.pod_uid.as_str(), container.container.as_str()), held))
        })
        .collect();
    let published = devices.resources_on_nodes();
    let mut placed = Vec::new();
    for stored in pods {
        let (pod, id) = (&stored.pod, &stored.pod.id);
        let is_guaranteed = pod.request().qos() == QosClass::Guaranteed;
        let sidecars = pod.init_containers.iter().filter(|container| container.restartable);
        for container in sidecars.chain(&pod.containers) {
            let name = container.name.to_string();
            let key = (id.namespace.clone(), id.name.clone(), name);
            let devices = devices.held.get(&key).into_iter().flatten();
            let mut devices =
                devices.filter(|device| published.contains(device.resource_name.as_str())).peekable();
            if devices.peek().is_none() && !(is_guaranteed && requests_exclusive(container)) {
                continue;
            }
            let mut nodes = NodeSet::new();
            devices.for_each(|device| nodes.extend(nodes_of(device).iter()));
            if let Some(held) = held.get(&(id.uid.as_str(), container.name.as_str())) {
                let of_cpus = machine.nodes.iter().filter(|(_, node)| !(&node.cpus & &held.cpus).is_empty());
                nodes.extend(of_cpus.map(|(node, _)| *node));
                nodes.extend(held.blocks.iter().flat_map(|block| block.affinity.iter()));
            }
            let mut nodes = nodes.iter();
            let (Some(node), None) = (nodes.next(), nodes.next()) else { return None };
            placed.push((id, container, node));
        }
    }
    let placed = placed.iter().map(|(id, container, node)| PlacedContainer {
        namespace: &id.namespace,
        pod: &id.name,
        container: container.name.as_str(),
        node: *node,
    });
    let node_count = machine.nodes.keys().next_back().map_or(0, |last| last.0 + 1);
    Some(NumaPlacement::encode(placed, node_count))
}

/// Returns true if a container of a Guaranteed pod counts as one with exclusive resources.
fn requests_exclusive(container: &ContainerRequest) -> bool {
    let requests = &container.requests;
    let has_whole_cpus =
        requests.cpu.and_then(Quantity::millis).is_some_and(|millis| millis > 0 && millis % 1000 == 0);
    has_whole_cpus || requests.memory.values().any(|bytes| !bytes.is_zero())
}

#[cfg(test)]
mod tests {

    use numaward_api::PodContainer;
    use numaward_engine::MemoryBlock;
    use numaward_kube::{
        api,
        pod_resources::messages::{ContainerDevices, TopologyInfo},
    };
    use numaward_topology::{Bytes, CpuSet, ZoneKind};
    use serde_json::json;

    use super::*;

    fn pod(name: &str, resources: &serde_json::Value) -> Arc<StoredPod> {
        let all = json!({"requests": resources, "limits": resources});
        let pod = json!({"metadata": {"name": name, "namespace": "ns", "uid": name},
            "spec": {"containers": [{"name": "main", "resources": all}]}});
        api::read_pod(pod.to_string().as_bytes()).unwrap().into()
    }

    fn held(pod: &str, cpus: &str, nodes: &str) -> HeldResources {
        let block =
            MemoryBlock { kind: ZoneKind::Memory, affinity: nodes.parse().unwrap(), bytes: Bytes::gib(1) };
        HeldResources {
            container: Some(PodContainer {
                namespace: "ns".to_owned(),
                pod: pod.to_owned(),
                container: "main".to_owned(),
                pod_uid: pod.to_owned(),
                shares_pod: false,
            }),
            cpus: cpus.parse().unwrap(),
            hidden_cpus: CpuSet::new(),
            blocks: vec![block],
        }
    }

    #[test]
    fn placement_needs_one_node_for_each_container() {
        let machine = Machine::builder().nodes(2).cores_per_node(2).memory(Bytes::gib(4)).build().unwrap();
        let amounts = json!({"cpu": "1", "memory": "1Gi"});
        let pods = [pod("a", &amounts), pod("b", &amounts), pod("shared", &json!({}))];
        let metadata = |pods: &[Arc<StoredPod>], held: Vec<HeldResources>, devices: &Devices| {
            let (free_cpus, pod_cpus, memory) = (CpuSet::new(), CpuSet::new(), BTreeMap::new());
            let charged = BTreeMap::new();
            let assigned = AssignedResources {
                held,
                free_cpus,
                pod_cpus,
                memory,
                charged,
                charged_to_host: BTreeMap::new(),
            };
            placement(pods, &assigned, devices, &machine).map(|placement| {
                let nodes = placement.vectors.keys().map(|node| node.0).collect::<Vec<_>>();
                (placement.metadata, nodes)
            })
        };
        let none = Devices::default();
        let text = |counts: &str| format!("npv0v001::ve=leb89::{counts}");
        let both = vec![held("a", "0", "0"), held("b", "2", "1")];
        assert_eq!(metadata(&pods, both.clone(), &none), Some((text("cc=2::nn=2::bn=0"), vec![1])));
        assert_eq!(metadata(&pods, vec![held("a", "0", "0")], &none), None, "b has no guarantee");
        assert_eq!(metadata(&pods, vec![held("a", "0", "0"), held("b", "1", "0-1")], &none), None);
        assert_eq!(metadata(&pods[2..], Vec::new(), &none), Some((text("cc=0::nn=2::bn=0"), vec![])));

        let device = ContainerDevices {
            resource_name: "nic".to_owned(),
            device_ids: vec!["7".to_owned()],
            topology: Some(TopologyInfo { nodes: vec![1] }),
        };
        let holds = |pod: &str| Devices {
            held: [(("ns".to_owned(), pod.to_owned(), "main".to_owned()), vec![device.clone()])].into(),
            all: vec![device.clone()],
            ..Devices::default()
        };
        assert_eq!(
            metadata(&pods[2..], Vec::new(), &holds("shared")),
            Some((text("cc=1::nn=2::bn=1"), vec![]))
        );
        assert_eq!(metadata(&pods, both, &holds("a")), None, "its device is on another node");
    }
}
