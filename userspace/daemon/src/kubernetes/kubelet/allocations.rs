//! The kubelet's promises in the form in which allocations are served.

use std::{collections::BTreeMap, path::Path};

use numaward_api as api;
use numaward_cgroup::{CgroupPath, Container};
use numaward_engine::{Allocation, ContainerName, OwnerId};
use numaward_topology::{CpuSet, Machine};

use super::view::Kept;

/// What the kubelet promised, with the cgroups of those that run.
pub fn allocations(
    kept: &Kept,
    containers: &[(CgroupPath, Container)],
    machine: &Machine,
    root: Option<&Path>,
) -> api::Allocations {
    let promised = &kept.promised;
    let pods = promised.pods.iter().flat_map(|(pod, of)| of.iter().map(move |(name, of)| (pod, name, of)));
    let allocations: Vec<_> =
        pods.map(|(pod, name, of)| allocation(kept, containers, root, (pod, name, of)).into()).collect();
    let exclusive: CpuSet = promised
        .ledger
        .allocations()
        .filter_map(|(_, _, of)| of.cpus.as_ref())
        .flat_map(CpuSet::iter)
        .collect();
    let shared = promised.ledger.shared_pool();
    let memory = promised.ledger.memory();
    let nodes = machine.nodes.iter().map(|(id, node)| {
        let free: CpuSet =
            node.cpus.iter().filter(|&cpu| shared.contains(cpu) && !exclusive.contains(cpu)).collect();
        let kinds = memory.get(id).into_iter().flatten();
        api::NodePromises { node: id.0, free_cpus: free.to_string(), memory: kinds.map(Into::into).collect() }
    });
    let nodes = nodes.collect();
    api::Allocations { allocations, shared_cpus: shared.to_string(), nodes, ..api::Allocations::default() }
}

fn allocation(
    kept: &Kept,
    containers: &[(CgroupPath, Container)],
    root: Option<&Path>,
    (uid, name, of): (&OwnerId, &ContainerName, &Allocation),
) -> api::Allocation {
    let (namespace, pod) = kept.names.pod(uid.as_str()).cloned().unwrap_or_default();
    let of_pod: Vec<_> = containers
        .iter()
        .filter(|(_, container)| container.pod_uid.as_deref() == Some(uid.as_str()))
        .collect();
    let named = of_pod.iter().find(|(_, container)| kept.names.container(container) == Some(name.as_str()));
    let cgroup = match (named, of_pod.as_slice()) {
        (Some((path, _)), _) => path.to_string(),
        // Which one it is, is not known; but there is but one.
        (None, [(path, container)]) if kept.names.container(container).is_none() => path.to_string(),
        (None, _) => String::new(),
    };
    let directory = root.filter(|_| !cgroup.is_empty());
    api::Allocation {
        name: format!(
            "{}/{name}",
            if pod.is_empty() { uid.to_string() } else { format!("{namespace}/{pod}") }
        ),
        target: api::Target::Container(api::PodContainer {
            namespace,
            pod,
            container: name.to_string(),
            pod_uid: uid.to_string(),
            shares_pod: false,
        }),
        directory: directory
            .map(|root| root.join(cgroup.trim_start_matches('/')).display().to_string())
            .unwrap_or_default(),
        cgroup,
        cpus: of.cpus.clone().unwrap_or_default().to_string(),
        nodes: of.memory_nodes().to_string(),
        memory: of.blocks.iter().map(Into::into).collect(),
        // The kubelet writes them.
        settings: BTreeMap::new(),
        drift: Vec::new(),
        lack: None,
        stalled: false,
        moved: None,
        enforced: false,
        declared: None,
        explanation: None,
    }
}
