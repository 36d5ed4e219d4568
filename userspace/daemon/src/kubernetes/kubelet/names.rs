//! Names of the pods and containers of cgroups.
//!
//! # Problem
//! The path of a cgroup has the UID of the pod and the container id of the runtime. The state files of the kubelet have the UID of the pod
//! and the name of the container. The PodResources API has the names of both.
//!
//! # Algorithm
//! The API server, if it is configured, has all of them. Without it, containers of the state files and of the PodResources API are matched
//! by name and resources: no two containers have the same exclusive CPUs, and few have the same name and the same memory. A pod with
//! an ambiguous match gets no name.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use numaward_cgroup::ContainerIdentity;
use numaward_engine::{Allocation, Ledger};
use numaward_kube::{
    api::StoredPod,
    pod_resources::messages::{AssignedPodResources, ContainerResources, cpu_set},
};
use numaward_topology::{CpuSet, NodeSet};

/// A pod's namespace and name.
pub type PodName = (String, String);

/// Names of pods and containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// Names of pods by UID.
    pods: HashMap<String, PodName>,
    /// Names of containers by the id of the runtime.
    containers: HashMap<String, String>,
}

impl Names {
    /// Collects the names from the API server (`stored`), and from the match of the kubelet's `assigned` resources with its `guarantees`.
    pub fn new<'a>(
        stored: impl IntoIterator<Item = &'a StoredPod>,
        assigned: &[AssignedPodResources],
        guarantees: &Ledger,
    ) -> Self {
        let mut names = Self { pods: names_by_assignment(guarantees, assigned), containers: HashMap::new() };
        for stored in stored {
            let id = &stored.pod.id;
            names.pods.insert(id.uid.clone(), (id.namespace.clone(), id.name.clone()));
            names.containers.extend(stored.container_ids.clone());
        }
        names
    }

    /// Returns the name of the pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<&PodName> {
        self.pods.get(uid)
    }

    pub fn container(&self, container: &ContainerIdentity) -> Option<&str> {
        self.containers.get(&container.id).map(String::as_str)
    }

    /// Returns the label of a container in metrics and the API: `NAMESPACE/POD/CONTAINER`, or `NAMESPACE/POD` if only its pod is known.
    pub fn label(&self, container: &ContainerIdentity) -> Option<String> {
        let (namespace, pod) = self.pod(container.pod_uid.as_ref()?)?;
        Some(match self.container(container) {
            Some(name) => format!("{namespace}/{pod}/{name}"),
            None => format!("{namespace}/{pod}"),
        })
    }
}

/// Properties by which containers are matched: the name, the exclusive CPUs and the memory.
type ContainerSignature = (String, CpuSet, BTreeSet<(String, NodeSet, u64)>);

fn signature_of_guarantee(name: &str, allocation: &Allocation) -> ContainerSignature {
    let blocks = allocation.blocks.iter();
    let blocks = blocks.map(|block| (block.kind.to_string(), block.affinity.clone(), block.bytes.0));
    (name.to_owned(), allocation.cpus.clone().unwrap_or_default(), blocks.collect())
}

/// Returns the signature of a container in the PodResources API. For a container in the shared pool, some versions of the kubelet report
/// no CPUs, and some the CPUs of the pool.
fn signature_of_assignment(container: &ContainerResources, shared_pool: &CpuSet) -> ContainerSignature {
    let cpus = cpu_set(&container.cpu_ids);
    let cpus = if cpus.is_subset(shared_pool) { CpuSet::new() } else { cpus };
    let blocks = container.memory.iter();
    let blocks = blocks.map(|memory| (memory.memory_type.clone(), memory.nodes(), memory.size));
    (container.name.clone(), cpus, blocks.collect())
}

/// Returns the names of pods with guarantees, by UID, if their match with the assigned resources is unambiguous.
fn names_by_assignment(guarantees: &Ledger, assigned: &[AssignedPodResources]) -> HashMap<String, PodName> {
    let mut by_signature: BTreeMap<ContainerSignature, Vec<&AssignedPodResources>> = BTreeMap::new();
    for pod in assigned {
        for container in &pod.containers {
            let signature = signature_of_assignment(container, guarantees.shared_pool());
            by_signature.entry(signature).or_default().push(pod);
        }
    }
    let mut holders: BTreeMap<PodName, Vec<String>> = BTreeMap::new();
    for (uid, account) in guarantees.owners() {
        let name = account.containers.iter().find_map(|(name, allocation)| {
            match by_signature.get(&signature_of_guarantee(name.as_str(), allocation)).map(Vec::as_slice) {
                Some([pod]) => Some((pod.namespace.clone(), pod.name.clone())),
                _ => None,
            }
        });
        if let Some(name) = name {
            holders.entry(name).or_default().push(uid.to_string());
        }
    }
    let unambiguous = |(name, uids): (PodName, Vec<String>)| match <[String; 1]>::try_from(uids) {
        Ok([uid]) => Some((uid, name)),
        // Several UIDs match one pod: none of them gets its name.
        Err(_) => None,
    };
    holders.into_iter().filter_map(unambiguous).collect()
}

#[cfg(test)]
mod tests {
    use numaward_engine::{
        MemoryBlock,
        checkpoint::{CpuCheckpoint, MemoryCheckpoint},
        kubelet::Checkpoints,
    };
    use numaward_kube::pod_resources::messages::{ContainerMemory, cpu_ids};
    use numaward_topology::{Bytes, ZoneKind};

    use super::*;

    /// Returns guarantees from rows of pod, container, exclusive CPUs, nodes and bytes.
    fn guarantees(rows: &[(&str, &str, &str, &str, u64)]) -> Ledger {
        let exclusive = rows.iter().filter(|(_, _, cpus, ..)| !cpus.is_empty());
        let cpus = exclusive.map(|&(uid, container, cpus, ..)| {
            (uid.into(), BTreeMap::from([(container.into(), cpus.parse().unwrap())]))
        });
        let memory = rows.iter().map(|&(uid, container, _, nodes, bytes)| {
            let affinity = nodes.parse().unwrap();
            let block = MemoryBlock { kind: ZoneKind::Memory, affinity, bytes: Bytes(bytes) };
            (uid.into(), BTreeMap::from([(container.into(), vec![block])]))
        });
        let cpus = CpuCheckpoint {
            policy: String::new(),
            shared_pool: CpuSet::new(),
            entries: cpus.collect(),
            pods: None,
        };
        let memory = MemoryCheckpoint {
            policy: String::new(),
            nodes: BTreeMap::new(),
            entries: memory.collect(),
            pods: None,
        };
        Checkpoints { cpus: Some(cpus), memory: Some(memory) }.ledger()
    }

    fn pod(name: &str, container: &str, cpus: &str, nodes: &str, bytes: u64) -> AssignedPodResources {
        let container = ContainerResources {
            name: container.to_owned(),
            cpu_ids: cpu_ids(&cpus.parse().unwrap()),
            memory: vec![ContainerMemory::new("memory", Bytes(bytes), &nodes.parse().unwrap())],
            ..ContainerResources::default()
        };
        AssignedPodResources {
            name: name.to_owned(),
            namespace: "ns".to_owned(),
            containers: vec![container],
            ..AssignedPodResources::default()
        }
    }

    #[test]
    fn names_pods_by_unambiguous_resources() {
        let guarantees = guarantees(&[
            ("u1", "main", "2-3", "0", 8),
            ("u2", "main", "4-5", "1", 8),
            ("u3", "twin", "", "1", 9),
            ("u4", "twin", "", "1", 9),
            ("u5", "single", "", "0", 7),
        ]);
        let assigned = [
            pod("a", "main", "2-3", "0", 8),
            pod("b", "main", "4-5", "1", 8),
            pod("c", "twin", "", "1", 9),
            pod("d", "twin", "", "1", 9),
            pod("e", "single", "", "0", 7),
            pod("f", "other", "", "0", 7),
        ];
        let names = Names::new([], &assigned, &guarantees);
        let name = |uid| names.pod(uid).map(|(_, name)| name.as_str());
        assert_eq!(["u1", "u2", "u3", "u4", "u5"].map(name), [Some("a"), Some("b"), None, None, Some("e")]);
        // The kubelet lists only one of the two equal containers yet: it could be either.
        let names = Names::new([], &assigned[2..3], &guarantees);
        assert_eq!((names.pod("u3"), names.pod("u4")), (None, None));
        let container = |uid: &str| ContainerIdentity {
            id: "x".to_owned(),
            pod_uid: Some(uid.to_owned()),
            runtime: None,
            name_keeper: None,
        };
        let names = Names::new([], &assigned, &guarantees);
        assert_eq!(names.label(&container("u1")).as_deref(), Some("ns/a"));
        assert_eq!(names.label(&container("u3")), None);
    }
}
