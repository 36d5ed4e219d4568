//! The kubelet's promises in the forms in which others are told of them.

use std::{collections::BTreeMap, path::Path};

use numaward_api::{self as api, PodContainer, Target};
use numaward_cgroup::{CgroupPath, Container};
use numaward_topology::{CpuSet, Machine, NodeSet};

use super::view::Kept;
use crate::kubernetes::export::{Assigned, Held};

/// What the kubelet promised.
pub(super) fn assigned(kept: &Kept, machine: &Machine) -> Assigned {
    let ledger = &kept.ledger;
    let exclusive = ledger.allocations().filter_map(|(_, _, of)| of.cpus.as_ref());
    let exclusive = exclusive.fold(CpuSet::new(), |all, cpus| &all | cpus);
    let held = ledger.allocations().map(|(uid, container, of)| {
        let (namespace, pod) = kept.names.pod(uid.as_str()).cloned().unwrap_or_default();
        let (container, pod_uid) = (container.to_string(), uid.to_string());
        Held {
            container: Some(PodContainer { namespace, pod, container, pod_uid, shares_pod: false }),
            cpus: of.cpus.clone().unwrap_or_default(),
            blocks: of.blocks.clone(),
        }
    });
    Assigned::new(held.collect(), &(ledger.shared_pool() - &exclusive), ledger, machine)
}

/// The same as it is served, with the cgroups of those that run.
pub(super) fn allocations(
    kept: &Kept,
    containers: &[(CgroupPath, Container)],
    machine: &Machine,
    root: Option<&Path>,
) -> api::Allocations {
    let Assigned { held, free_cpus, memory, .. } = assigned(kept, machine);
    let nodes = machine.nodes.iter().map(|(id, node)| api::NodePromises {
        node: id.0,
        free_cpus: (&free_cpus & &node.cpus).to_string(),
        memory: memory.get(id).into_iter().flatten().map(Into::into).collect(),
    });
    let held = held.into_iter().filter_map(|held| allocation(kept, containers, root, held));
    api::Allocations {
        allocations: held.map(Into::into).collect(),
        shared_cpus: kept.ledger.shared_pool().to_string(),
        nodes: nodes.collect(),
        ..api::Allocations::default()
    }
}

fn allocation(
    kept: &Kept,
    containers: &[(CgroupPath, Container)],
    root: Option<&Path>,
    Held { container, cpus, blocks }: Held,
) -> Option<api::Allocation> {
    let of = container?;
    let of_pod = containers.iter().filter(|(_, found)| found.pod_uid.as_ref() == Some(&of.pod_uid));
    let of_pod: Vec<_> = of_pod.map(|(path, found)| (path, kept.names.container(found))).collect();
    let named = of_pod.iter().find(|(_, name)| *name == Some(&of.container));
    let cgroup = match (named, of_pod.as_slice()) {
        // Which one it is, is not known; but there is but one.
        (Some((path, _)), _) | (None, [(path, None)]) => path.to_string(),
        (None, _) => String::new(),
    };
    let directory = root.filter(|_| !cgroup.is_empty());
    let directory = directory.map(|root| root.join(cgroup.trim_start_matches('/')).display().to_string());
    let pod = if of.pod.is_empty() { of.pod_uid.clone() } else { format!("{}/{}", of.namespace, of.pod) };
    Some(api::Allocation {
        name: format!("{pod}/{}", of.container),
        target: Target::Container(of),
        directory: directory.unwrap_or_default(),
        cgroup,
        cpus: cpus.to_string(),
        nodes: blocks.iter().flat_map(|block| block.affinity.iter()).collect::<NodeSet>().to_string(),
        memory: blocks.iter().map(Into::into).collect(),
        // The kubelet writes them.
        settings: BTreeMap::new(),
        drift: Vec::new(),
        lack: None,
        stalled: false,
        moved: None,
        enforced: false,
        declared: None,
        explanation: None,
    })
}
