//! Request for all containers of a pod that the API server has reported.
//!
//! A pod may have pod-level resources (`spec.resources`, KEP-2837). They alone decide its `QoS` class, and its containers need no resources
//! of their own. In a Guaranteed pod with pod-level resources, a container whose requests equal its limits gets a guarantee of its own, as
//! in any pod. The rest of the pod-level amounts is one more guarantee, [`POD_SHARE`], which the other containers share (KEP-5526). Init
//! containers get the CPUs and memory of later containers, so that they are not part of the sum.

use std::collections::BTreeMap;

use numaward_engine::{ContainerRequest, PodResources, QosClass, Quantity, Request, Resources};
use numaward_guarantee::pod::{MemoryClaim, PodClaim};
use numaward_kube::pod::Pod;
use numaward_model::pod::{GuaranteeSource, POD_SHARE};
use numaward_topology::{Bytes, ZoneKind};

use super::annotations::{Annotations, ExtraGuarantee, PlacementAnnotation};

/// A guarantee, and the containers of the pod that it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::kubernetes) struct PodGuarantee {
    pub(in crate::kubernetes) resources: Resources,
    pub(in crate::kubernetes) containers: Vec<String>,
    /// True if an init container that ends before the app containers start has it alone.
    pub(in crate::kubernetes) is_of_init: bool,
}

/// Returns the guarantees that the strategy `native` gives to a Guaranteed pod with these annotations.
pub(in crate::kubernetes) fn guarantees(
    pod: &Pod,
    annotations: &BTreeMap<String, String>,
) -> Vec<PodGuarantee> {
    let annotations = Annotations::read(annotations);
    let claim = claim(pod, &annotations);
    let PodClaim::Pod(request) = &claim else { return Vec::new() };
    let is_guaranteed = class(pod) == QosClass::Guaranteed;
    let mut users = BTreeMap::<&str, Vec<String>>::new();
    for user in pod.containers.iter().chain(&pod.init_containers) {
        let name = user.name.as_str();
        let guarantee = match guarantee_source(pod, &claim, &annotations, name) {
            GuaranteeSource::Pod | GuaranteeSource::PodInit => POD_SHARE,
            GuaranteeSource::Own | GuaranteeSource::Part | GuaranteeSource::Claim => name,
        };
        users.entry(guarantee).or_default().push(name.to_owned());
    }
    let guarantee = |of: &ContainerRequest| PodGuarantee {
        resources: of.requests.clone(),
        containers: users.get(of.name.as_str()).cloned().unwrap_or_default(),
        is_of_init: request.is_regular_init(&of.name),
    };
    request.all_containers().filter(|_| is_guaranteed).map(guarantee).collect()
}

pub(super) fn class(pod: &Pod) -> QosClass {
    pod.request().qos()
}

/// Returns the request for a pod.
pub(super) fn claim(pod: &Pod, annotations: &Annotations) -> PodClaim {
    let is_guaranteed = class(pod) == QosClass::Guaranteed;
    let pod_level = pod.resources.as_ref().filter(|_| is_guaranteed);
    let wanted = |container: &ContainerRequest| {
        let wishes = annotations.for_container(container.name.as_str());
        match (wishes.placement, is_guaranteed, wishes.extra) {
            (PlacementAnnotation::Auto, true, _) if pod_level.is_none() || container.is_guaranteed() => {
                Some(container.clone())
            }
            (PlacementAnnotation::Auto, false, ExtraGuarantee::Memory) => memory_only(container),
            // The requests of the container are guaranteed without changes.
            (PlacementAnnotation::Auto, false, ExtraGuarantee::Burstable) => requests_only(container),
            _ => None,
        }
    };
    let mut request = Request {
        owner: pod.id.uid.as_str().into(),
        init_containers: pod.init_containers.iter().filter_map(wanted).collect(),
        containers: pod.containers.iter().filter_map(wanted).collect(),
        resources: None,
    };
    request.containers.extend(pod_level.and_then(|pod_level| share(pod, pod_level, annotations)));
    if request.containers.is_empty() { PodClaim::Nothing } else { PodClaim::Pod(request) }
}

/// Returns the request for a pod with pod-level resources in the way of a kubelet with managers that place such pods: one request for the
/// pod-level amounts, of which the containers get parts.
pub(super) fn pod_level_claim(pod: &Pod, annotations: &Annotations) -> PodClaim {
    if class(pod) != QosClass::Guaranteed {
        return claim(pod, annotations);
    }
    let mut request = pod.request();
    let is_auto = |container: &ContainerRequest| {
        annotations.for_container(container.name.as_str()).placement == PlacementAnnotation::Auto
    };
    request.init_containers.retain(is_auto);
    request.containers.retain(is_auto);
    if request.containers.is_empty() { PodClaim::Nothing } else { PodClaim::Pod(request) }
}

/// Returns the amounts that the containers of a Guaranteed pod share if the pod-level resources are `amounts`: 0 CPUs if guarantees of
/// single containers use all. `None` if the containers share nothing with the present pod-level resources.
pub(super) fn share_of(pod: &Pod, annotations: &Annotations, amounts: Resources) -> Option<Resources> {
    let shared = |pod: &Pod| match claim(pod, annotations) {
        PodClaim::Pod(Request { containers, .. }) => {
            containers.into_iter().find(|container| container.name.as_str() == POD_SHARE)
        }
        _ => None,
    };
    shared(pod)?;
    let resources = Some(PodResources { requests: amounts.clone(), limits: amounts });
    let left = shared(&Pod { resources, ..pod.clone() });
    Some(left.map_or_else(|| Resources::none().with_cpu(Quantity::milli(0)), |left| left.requests))
}

/// Returns the source of the guarantee of a container, for this request of its pod.
pub(super) fn guarantee_source(
    pod: &Pod,
    claim: &PodClaim,
    annotations: &Annotations,
    container: &str,
) -> GuaranteeSource {
    let PodClaim::Pod(request) = claim else { return GuaranteeSource::Own };
    let wanted = request.all_containers().find(|candidate| candidate.name.as_str() == container);
    if request.resources.is_some() && wanted.is_some_and(|container| !has_cpus(container)) {
        return GuaranteeSource::Part;
    }
    if request.has_container(&container.into())
        || !request.has_container(&POD_SHARE.into())
        || annotations.for_container(container).placement != PlacementAnnotation::Auto
    {
        return GuaranteeSource::Own;
    }
    let is_first =
        pod.init_containers.iter().any(|init| init.name.as_str() == container && !init.restartable);
    if is_first { GuaranteeSource::PodInit } else { GuaranteeSource::Pod }
}

/// Returns true if the CPU quota of the pod's cgroup must stay: the pod has pod-level resources, and a container without exclusive CPUs,
/// which no other quota limits.
pub(super) fn keeps_quota(pod: &Pod, claim: &PodClaim) -> bool {
    let has_cpus = |name: &str| match claim {
        PodClaim::Pod(request) => {
            request.all_containers().filter(|container| container.name.as_str() == name).any(has_cpus)
        }
        PodClaim::Container(_) | PodClaim::Nothing => false,
    };
    let mut containers = pod.init_containers.iter().chain(&pod.containers);
    pod.resources.is_some() && !containers.all(|container| has_cpus(container.name.as_str()))
}

/// Returns true if a container of a Guaranteed pod gets exclusive CPUs.
fn has_cpus(container: &ContainerRequest) -> bool {
    container.is_guaranteed() && container.requests.cpu.and_then(Quantity::whole_cpus).is_some()
}

/// Returns the amounts that decide the memory protection of a container.
pub(super) fn memory(pod: &Pod, container: &str) -> MemoryClaim {
    let mut containers = pod.init_containers.iter().chain(&pod.containers);
    let found = containers.find(|candidate| candidate.name.as_str() == container);
    let bytes = |resources: &Resources| {
        let amount = resources.memory.get(&ZoneKind::Memory).copied().unwrap_or_default();
        Bytes(amount.units().unwrap_or(u64::MAX))
    };
    MemoryClaim {
        class: Some(class(pod)),
        // An ephemeral container, for debugging, requests nothing.
        request: Some(found.map_or(Bytes(0), |found| bytes(&found.requests))),
        limit: found.map(|found| bytes(&found.limits)).filter(|limit| limit.0 > 0),
        overhead: Some(bytes(&pod.overhead)).filter(|overhead| overhead.0 > 0),
    }
}

/// Returns the rest of the pod-level amounts as a request for the containers without a guarantee of their own; `None` if no container
/// shares, or no memory is left.
fn share(pod: &Pod, pod_level: &PodResources, annotations: &Annotations) -> Option<ContainerRequest> {
    let is_auto = |container: &ContainerRequest| {
        annotations.for_container(container.name.as_str()).placement == PlacementAnnotation::Auto
    };
    let sharing = |container: &&ContainerRequest| is_auto(container) && !container.is_guaranteed();
    pod.init_containers.iter().chain(&pod.containers).find(sharing)?;
    let sidecars = pod.init_containers.iter().filter(|init| init.restartable);
    // The requests of containers with `placement: shared` are subtracted too: they run in the shared pool.
    let not_sharing: Vec<_> = sidecars
        .chain(&pod.containers)
        .filter(|container| !sharing(container))
        .map(|container| &container.requests)
        .collect();
    let cpus = not_sharing.iter().filter_map(|requests| requests.cpu?.millis()).fold(0, u64::saturating_add);
    let cpus = pod_level.requests.cpu?.millis()?.saturating_sub(cpus);
    // At least 1 m: a fraction of a CPU is never exclusive.
    let mut left = Resources::none().with_cpu(Quantity::milli(cpus.max(1)));
    for (&kind, amount) in &pod_level.requests.memory {
        let taken = not_sharing.iter().filter_map(|requests| requests.memory.get(&kind)?.units());
        let taken = taken.fold(0, u64::saturating_add);
        let bytes = amount.units()?.saturating_sub(taken);
        if bytes > 0 {
            left.memory.insert(kind, Quantity::whole(bytes));
        }
    }
    left.memory.contains_key(&ZoneKind::Memory).then(|| ContainerRequest::guaranteed(POD_SHARE, left))
}

/// Returns the requests of a container without limits, so that the request is Burstable even without the other containers of the pod.
fn requests_only(container: &ContainerRequest) -> Option<ContainerRequest> {
    let memory = container.requests.memory.get(&ZoneKind::Memory).copied().unwrap_or_default();
    (!memory.is_zero()).then(|| ContainerRequest { limits: Resources::none(), ..container.clone() })
}

/// Returns the memory request of a container as a Guaranteed request with 1 m of CPU, which is never exclusive.
fn memory_only(container: &ContainerRequest) -> Option<ContainerRequest> {
    let memory = container.requests.memory.iter().filter(|(_, amount)| !amount.is_zero());
    let resources = Resources {
        cpu: Some(Quantity::milli(1)),
        memory: memory.map(|(&kind, &amount)| (kind, amount)).collect(),
    };
    resources.memory.contains_key(&ZoneKind::Memory).then(|| ContainerRequest {
        requests: resources.clone(),
        limits: resources,
        ..container.clone()
    })
}

#[cfg(test)]
mod tests {
    use numaward_kube::pod::PodId;

    use super::*;

    fn resources(cpu: &str, memory: &str) -> Resources {
        Resources::none().with_cpu(cpu.parse().unwrap()).with_memory(memory.parse().unwrap())
    }

    fn plain(name: &str) -> ContainerRequest {
        ContainerRequest {
            name: name.into(),
            restartable: false,
            requests: Resources::none(),
            limits: Resources::none(),
        }
    }

    /// A pod with the pod-level resources 4 CPUs and 8Gi.
    fn pod(init_containers: Vec<ContainerRequest>, containers: Vec<ContainerRequest>) -> Pod {
        let all = resources("4", "8Gi");
        Pod {
            id: PodId { namespace: "ns".to_owned(), name: "web".to_owned(), uid: "u1".to_owned() },
            init_containers,
            containers,
            resources: Some(PodResources { requests: all.clone(), limits: all }),
            ..Pod::default()
        }
    }

    fn none() -> Annotations {
        Annotations::default()
    }

    /// Returns the requested CPUs and Gi by container.
    fn requested(pod: &Pod, annotations: &Annotations) -> Vec<(String, u64, u64)> {
        let PodClaim::Pod(request) = claim(pod, annotations) else { return Vec::new() };
        assert_eq!(request.qos(), QosClass::Guaranteed);
        let row = |container: &ContainerRequest| {
            let memory = container.requests.memory[&ZoneKind::Memory].units().unwrap();
            (
                container.name.to_string(),
                container.requests.cpu.unwrap().whole_cpus().unwrap_or(0),
                memory >> 30,
            )
        };
        request.all_containers().map(row).collect()
    }

    #[test]
    fn rest_of_pod_level_amounts_is_shared() {
        let own = |name: &str| ContainerRequest::guaranteed(name, resources("2", "4Gi"));
        let share = |cpus, gib| (POD_SHARE.to_owned(), cpus, gib);
        let db = || ("db".to_owned(), 2, 4);
        assert_eq!(class(&pod(vec![], vec![plain("web")])), QosClass::Guaranteed);
        assert_eq!(requested(&pod(vec![], vec![plain("web"), plain("log")]), &none()), [share(4, 8)]);
        let mixed = pod(vec![plain("init")], vec![own("db"), plain("log")]);
        assert_eq!(requested(&mixed, &none()), [db(), share(2, 4)]);
        let source = |name| guarantee_source(&mixed, &claim(&mixed, &none()), &none(), name);
        assert_eq!(
            [source("db"), source("log"), source("init"), source("debugger")],
            [GuaranteeSource::Own, GuaranteeSource::Pod, GuaranteeSource::PodInit, GuaranteeSource::Pod]
        );
        // Containers with guarantees of their own use all of it.
        let full = pod(vec![], vec![own("db"), own("cache")]);
        assert_eq!(requested(&full, &none()), [db(), ("cache".to_owned(), 2, 4)]);
        let full = pod(vec![], vec![own("db"), own("cache"), plain("log")]);
        assert_eq!(requested(&full, &none()), [db(), ("cache".to_owned(), 2, 4)], "nothing is left to share");
        let shared =
            Annotations::read(&[("db.numaward.io/placement".to_owned(), "shared".to_owned())].into());
        assert_eq!(requested(&mixed, &shared), [share(2, 4)]);
        // Fractions of CPUs are not exclusive; the amounts of an init container are not part of the sum.
        let odd = ContainerRequest::guaranteed("db", resources("2500m", "4Gi"));
        let odd = pod(vec![own("init")], vec![odd, plain("log")]);
        assert_eq!(
            requested(&odd, &none()),
            [("init".to_owned(), 2, 4), ("db".to_owned(), 0, 4), share(0, 4)]
        );
    }

    #[test]
    fn pod_level_resize_changes_the_share() {
        let own = |name: &str| ContainerRequest::guaranteed(name, resources("2", "4Gi"));
        let share = |pod: &Pod, cpu, memory| {
            let left = share_of(pod, &none(), resources(cpu, memory))?;
            let bytes = left.memory.get(&ZoneKind::Memory).and_then(|bytes| bytes.units()).unwrap_or(0);
            Some((left.cpu.unwrap().whole_cpus(), bytes >> 30))
        };
        let mixed = pod(vec![], vec![own("db"), plain("log")]);
        assert_eq!(share(&mixed, "6", "12Gi"), Some((Some(4), 8)));
        assert_eq!(share(&mixed, "3", "5Gi"), Some((Some(1), 1)));
        assert_eq!(share(&mixed, "2", "4Gi"), Some((Some(0), 0)), "nothing is left");
        assert_eq!(share(&pod(vec![], vec![own("db")]), "6", "12Gi"), None);
        assert_eq!(share(&Pod { resources: None, ..mixed }, "6", "12Gi"), None);
    }

    #[test]
    fn pod_level_amounts_decide_the_class() {
        let mut burstable = pod(vec![], vec![ContainerRequest::guaranteed("db", resources("2", "4Gi"))]);
        burstable.resources =
            Some(PodResources { requests: resources("2", "4Gi"), limits: Resources::none() });
        assert_eq!(class(&burstable), QosClass::Burstable);
        assert_eq!(claim(&burstable, &none()), PodClaim::Nothing);
        let memory = memory(&burstable, "db");
        assert_eq!((memory.class, memory.request), (Some(QosClass::Burstable), Some(Bytes::gib(4))));
        let unknown = super::memory(&pod(vec![], vec![]), "debugger");
        assert_eq!((unknown.request, unknown.limit), (Some(Bytes(0)), None));
    }
}
