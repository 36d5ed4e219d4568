//! Pods with all their containers in the sandbox: in a virtual machine (Kata), or in one process of the runtime (gVisor).
//!
//! # Problem
//! The cgroups of the containers have no processes, so CPUs and nodes that are set there have no effect. A guarantee for a container would
//! take CPUs from other workloads, and the processes would run elsewhere, also on exclusive CPUs.
//!
//! # Algorithm
//! The cgroup of the pod, which the kubelet creates, contains the sandbox. It is placed like a container, with an id of its own, when the
//! first container of the pod is created. `kubernetes.runtimeHandlers` decides whether it gets a guarantee for the sum of the requests
//! (`sandbox`), or stays on the shared pool (`none`). The containers themselves are not changed.

use numaward_engine::{ContainerRequest, QosClass, Quantity, Request, Resources};
use numaward_guarantee::pod::{MemoryClaim, PodClaim};
use numaward_kube::pod::Pod;
use numaward_model::pod::POD_SHARE;
use numaward_topology::{Bytes, ZoneKind};

use super::annotations::{Annotations, PlacementAnnotation};

/// Prefix of the ids of sandboxes. The runtime does not know these ids, and gets no update for them.
const ID_PREFIX: &str = "sandbox:";

/// Returns the id under which the cgroup of a pod is placed.
pub(super) fn id(sandbox: &str) -> String {
    format!("{ID_PREFIX}{sandbox}")
}

pub(super) fn is_id(id: &str) -> bool {
    id.starts_with(ID_PREFIX)
}

/// Returns the claim of a pod as a whole: the sum of the requests of its containers if it is Guaranteed. The CPUs of the overhead are not
/// added, because only whole CPUs are exclusive: the machine's own threads run on the CPUs of the containers.
pub(super) fn claim(pod: &Pod, annotations: &Annotations) -> PodClaim {
    let is_auto = annotations.for_container(POD_SHARE).placement == PlacementAnnotation::Auto;
    if !is_auto || pod.request().qos() != QosClass::Guaranteed {
        return PodClaim::Nothing;
    }
    let mut amounts = match &pod.resources {
        Some(pod_level) => pod_level.requests.clone(),
        None => sum(pod),
    };
    if let Some(overhead) = pod.overhead.memory.get(&ZoneKind::Memory) {
        let memory = amounts.memory.get(&ZoneKind::Memory).copied().unwrap_or_default();
        let bytes = units(memory).saturating_add(units(*overhead));
        amounts = amounts.with_memory(Quantity::whole(bytes));
    }
    PodClaim::Pod(Request {
        owner: pod.id.uid.as_str().into(),
        init_containers: Vec::new(),
        containers: vec![ContainerRequest::guaranteed(POD_SHARE, amounts)],
        resources: None,
    })
}

/// Returns the amounts that decide the memory protection of a pod with this claim.
pub(super) fn memory(claim: &Request) -> MemoryClaim {
    let amounts = claim.containers.first().and_then(|pod| pod.requests.memory.get(&ZoneKind::Memory));
    let bytes = amounts.map(|amount| Bytes(units(*amount)));
    MemoryClaim { class: Some(QosClass::Guaranteed), request: bytes, limit: bytes, overhead: None }
}

fn units(amount: Quantity) -> u64 {
    amount.units().unwrap_or(u64::MAX)
}

/// Returns the amounts of all containers that run at the same time: those of the containers and sidecars, or of a larger init container.
fn sum(pod: &Pod) -> Resources {
    let sidecars = pod.init_containers.iter().filter(|init| init.restartable);
    let mut total = Total::default();
    sidecars.chain(&pod.containers).for_each(|container| total.add(&container.requests));
    for init in pod.init_containers.iter().filter(|init| !init.restartable) {
        let mut one = Total::default();
        one.add(&init.requests);
        total.raise_to(&one);
    }
    let mut amounts = Resources::none().with_cpu(Quantity::milli(total.milli_cpus));
    amounts.memory.extend(total.memory.into_iter().map(|(kind, units)| (kind, Quantity::whole(units))));
    amounts
}

#[derive(Default)]
struct Total {
    milli_cpus: u64,
    memory: std::collections::BTreeMap<ZoneKind, u64>,
}

impl Total {
    fn add(&mut self, amounts: &Resources) {
        let milli_cpus = amounts.cpu.and_then(Quantity::millis).unwrap_or_default();
        self.milli_cpus = self.milli_cpus.saturating_add(milli_cpus);
        for (&kind, amount) in &amounts.memory {
            let known = self.memory.entry(kind).or_default();
            *known = known.saturating_add(units(*amount));
        }
    }

    fn raise_to(&mut self, other: &Self) {
        self.milli_cpus = self.milli_cpus.max(other.milli_cpus);
        for (&kind, units) in &other.memory {
            let known = self.memory.entry(kind).or_default();
            *known = (*known).max(*units);
        }
    }
}
