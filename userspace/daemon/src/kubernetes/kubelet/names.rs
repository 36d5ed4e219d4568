//! Which container of which pod a cgroup is.
//!
//! A cgroup's path has the pod's UID and the runtime's id of the container, the kubelet's state files the pod's UID and
//! the container's name, its PodResources the pod's name and the container's. What joins them: the API server, where
//! there is one; else that no two containers hold the same exclusive CPUs, and seldom the same memory under one name.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use numaward_cgroup::ContainerIdentity;
use numaward_engine::{Allocation, Ledger};
use numaward_kube::{
    api::StoredPod,
    pod_resources::messages::{ContainerResources, PodResources, cpu_set},
};
use numaward_topology::{CpuSet, NodeSet};

/// A pod's namespace and name.
pub type PodName = (String, String);

/// What is known of pods and containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    /// By the pod's UID.
    pods: HashMap<String, PodName>,
    /// The names of containers by the runtime's ids.
    containers: HashMap<String, String>,
}

impl Names {
    /// What the API server says, and what follows from what the kubelet assigned.
    pub fn new<'a>(
        stored: impl IntoIterator<Item = &'a StoredPod>,
        assigned: &[PodResources],
        promised: &Ledger,
    ) -> Self {
        let mut names = Self { pods: by_assignment(promised, assigned), containers: HashMap::new() };
        for stored in stored {
            let id = &stored.pod.id;
            names.pods.insert(id.uid.clone(), (id.namespace.clone(), id.name.clone()));
            names.containers.extend(stored.container_ids.clone());
        }
        names
    }

    /// The pod with this UID.
    pub fn pod(&self, uid: &str) -> Option<&PodName> {
        self.pods.get(uid)
    }

    /// The name of a container.
    pub fn container(&self, container: &ContainerIdentity) -> Option<&str> {
        self.containers.get(&container.id).map(String::as_str)
    }

    /// Under which name a container is served: `NAMESPACE/POD/CONTAINER`, as far as it is known.
    pub fn label(&self, container: &ContainerIdentity) -> Option<String> {
        let (namespace, pod) = self.pod(container.pod_uid.as_ref()?)?;
        Some(match self.container(container) {
            Some(name) => format!("{namespace}/{pod}/{name}"),
            None => format!("{namespace}/{pod}"),
        })
    }
}

/// What distinguishes a container from others: its name, its exclusive CPUs and its memory.
type Mark = (String, CpuSet, BTreeSet<(String, NodeSet, u64)>);

fn mark_of_promise(name: &str, of: &Allocation) -> Mark {
    let blocks = of.blocks.iter().map(|of| (of.kind.to_string(), of.affinity.clone(), of.bytes.0));
    (name.to_owned(), of.cpus.clone().unwrap_or_default(), blocks.collect())
}

/// On the shared pool, some kubelets report no CPUs and others the pool.
fn mark_of_assignment(of: &ContainerResources, shared_pool: &CpuSet) -> Mark {
    let cpus = cpu_set(&of.cpu_ids);
    let cpus = if cpus.is_subset(shared_pool) { CpuSet::new() } else { cpus };
    let blocks = of.memory.iter().map(|of| (of.memory_type.clone(), of.nodes(), of.size));
    (of.name.clone(), cpus, blocks.collect())
}

/// The names of the promised pods, where what they were assigned leaves no doubt.
fn by_assignment(promised: &Ledger, assigned: &[PodResources]) -> HashMap<String, PodName> {
    let mut marks: BTreeMap<Mark, Vec<&PodResources>> = BTreeMap::new();
    for pod in assigned {
        for container in &pod.containers {
            marks.entry(mark_of_assignment(container, promised.shared_pool())).or_default().push(pod);
        }
    }
    let mut holders: BTreeMap<PodName, Vec<String>> = BTreeMap::new();
    for (uid, account) in promised.owners() {
        let named = account.containers.iter().find_map(|(name, of)| {
            match marks.get(&mark_of_promise(name.as_str(), of)).map(Vec::as_slice) {
                Some([pod]) => Some((pod.namespace.clone(), pod.name.clone())),
                _ => None,
            }
        });
        if let Some(named) = named {
            holders.entry(named).or_default().push(uid.to_string());
        }
    }
    let only = |(named, uids): (PodName, Vec<String>)| match <[String; 1]>::try_from(uids) {
        Ok([uid]) => Some((uid, named)),
        // Two that seem to be one are in doubt both.
        Err(_) => None,
    };
    holders.into_iter().filter_map(only).collect()
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

    /// What is promised: pod, container, exclusive CPUs, nodes and bytes.
    fn promised(rows: &[(&str, &str, &str, &str, u64)]) -> Ledger {
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

    fn pod(name: &str, container: &str, cpus: &str, nodes: &str, bytes: u64) -> PodResources {
        let container = ContainerResources {
            name: container.to_owned(),
            cpu_ids: cpu_ids(&cpus.parse().unwrap()),
            memory: vec![ContainerMemory::new("memory", Bytes(bytes), &nodes.parse().unwrap())],
            ..ContainerResources::default()
        };
        PodResources {
            name: name.to_owned(),
            namespace: "ns".to_owned(),
            containers: vec![container],
            ..PodResources::default()
        }
    }

    #[test]
    fn pods_are_told_by_what_they_were_assigned_unless_it_is_in_doubt() {
        let promised = promised(&[
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
        let names = Names::new([], &assigned, &promised);
        let name = |uid| names.pod(uid).map(|(_, name)| name.as_str());
        assert_eq!(["u1", "u2", "u3", "u4", "u5"].map(name), [Some("a"), Some("b"), None, None, Some("e")]);
        // Of the twins only one is listed yet: it could be either.
        let names = Names::new([], &assigned[2..3], &promised);
        assert_eq!((names.pod("u3"), names.pod("u4")), (None, None));
        let container = |uid: &str| ContainerIdentity {
            id: "x".to_owned(),
            pod_uid: Some(uid.to_owned()),
            runtime: None,
        };
        let names = Names::new([], &assigned, &promised);
        assert_eq!(names.label(&container("u1")).as_deref(), Some("ns/a"));
        assert_eq!(names.label(&container("u3")), None);
    }
}
