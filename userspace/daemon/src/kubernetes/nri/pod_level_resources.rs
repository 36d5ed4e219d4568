//! What a pod that the API server has reported asks for, all its containers together.
//!
//! A pod may also have resources as a whole (`spec.resources`, KEP-2837): they alone decide its class of service, and
//! its containers need none of their own. Of a Guaranteed one, containers whose own requests equal their limits get
//! their own slice, as in any pod; what is left of the pod's amounts is one more slice, [`POD_SHARE`], which the others
//! share (KEP-5526). Init containers have what those after them have: they are no part of the sum.

use numaward_engine::{ContainerRequest, PodResources, QosClass, Quantity, Request, Resources};
use numaward_guarantee::pod::{MemoryClaim, PodClaim};
use numaward_kube::pod::Pod;
use numaward_model::pod::{GuaranteeSource, POD_SHARE};
use numaward_topology::{Bytes, ZoneKind};

use super::annotations::{Annotations, Extra, Placement};

/// The class of service.
pub(super) fn class(pod: &Pod) -> QosClass {
    pod.request().qos()
}

/// What is asked for with a pod.
pub(super) fn asked(pod: &Pod, annotations: &Annotations) -> PodClaim {
    let is_guaranteed = class(pod) == QosClass::Guaranteed;
    let of_pod = pod.resources.as_ref().filter(|_| is_guaranteed);
    let wanted = |container: &ContainerRequest| {
        let wishes = annotations.of(container.name.as_str());
        match (wishes.placement, is_guaranteed, wishes.extra) {
            (Placement::Auto, true, _) if of_pod.is_none() || container.is_guaranteed() => {
                Some(container.clone())
            }
            (Placement::Auto, false, Extra::Memory) => memory_only(container),
            // On its terms its requests are promised as they are.
            (Placement::Auto, false, Extra::Burstable) => requests_only(container),
            _ => None,
        }
    };
    let mut request = Request {
        owner: pod.id.uid.as_str().into(),
        init_containers: pod.init_containers.iter().filter_map(wanted).collect(),
        containers: pod.containers.iter().filter_map(wanted).collect(),
        resources: None,
    };
    request.containers.extend(of_pod.and_then(|of_pod| share(pod, of_pod, annotations)));
    if request.containers.is_empty() { PodClaim::Nothing } else { PodClaim::Pod(request) }
}

/// What is asked for with a pod that has resources as a whole, where the kubelet's managers place such pods: all of it, of
/// which its containers get parts.
pub(super) fn asked_as_whole(pod: &Pod, annotations: &Annotations) -> PodClaim {
    if class(pod) != QosClass::Guaranteed {
        return asked(pod, annotations);
    }
    let mut request = pod.request();
    let is_auto = |of: &ContainerRequest| annotations.of(of.name.as_str()).placement == Placement::Auto;
    request.init_containers.retain(is_auto);
    request.containers.retain(is_auto);
    if request.containers.is_empty() { PodClaim::Nothing } else { PodClaim::Pod(request) }
}

/// What the containers of a Guaranteed pod share when it has these amounts as a whole: nothing, where others take it
/// all. None if they share none now.
pub(super) fn share_of(pod: &Pod, annotations: &Annotations, amounts: Resources) -> Option<Resources> {
    let shared = |pod: &Pod| match asked(pod, annotations) {
        PodClaim::Pod(Request { containers, .. }) => {
            containers.into_iter().find(|of| of.name.as_str() == POD_SHARE)
        }
        _ => None,
    };
    shared(pod)?;
    let resources = Some(PodResources { requests: amounts.clone(), limits: amounts });
    let left = shared(&Pod { resources, ..pod.clone() });
    Some(left.map_or_else(|| Resources::none().with_cpu(Quantity::milli(0)), |left| left.requests))
}

/// Which of its pod's allocations a container is served out of, the pod asking for this.
pub(super) fn slice(
    pod: &Pod,
    asked: &PodClaim,
    annotations: &Annotations,
    container: &str,
) -> GuaranteeSource {
    let PodClaim::Pod(request) = asked else { return GuaranteeSource::Own };
    let wanted = request.all_containers().find(|of| of.name.as_str() == container);
    if request.resources.is_some() && wanted.is_some_and(|of| !has_cpus(of)) {
        return GuaranteeSource::Part;
    }
    if request.has_container(&container.into())
        || !request.has_container(&POD_SHARE.into())
        || annotations.of(container).placement != Placement::Auto
    {
        return GuaranteeSource::Own;
    }
    let is_first =
        pod.init_containers.iter().any(|init| init.name.as_str() == container && !init.restartable);
    if is_first { GuaranteeSource::PodInit } else { GuaranteeSource::Pod }
}

/// Whether the pod's quota of CPU time stays where some of its containers have CPUs of their own: it has one as a whole,
/// and others have no limit but that.
pub(super) fn keeps_quota(pod: &Pod, asked: &PodClaim) -> bool {
    let has_cpus = |name: &str| match asked {
        PodClaim::Pod(request) => {
            request.all_containers().filter(|of| of.name.as_str() == name).any(has_cpus)
        }
        PodClaim::Container(_) | PodClaim::Nothing => false,
    };
    let mut containers = pod.init_containers.iter().chain(&pod.containers);
    pod.resources.is_some() && !containers.all(|of| has_cpus(of.name.as_str()))
}

/// Whether a container of a Guaranteed pod has CPUs for itself.
fn has_cpus(container: &ContainerRequest) -> bool {
    container.is_guaranteed() && container.requests.cpu.and_then(Quantity::whole_cpus).is_some()
}

/// What the protection of a container's memory follows from.
pub(super) fn memory(pod: &Pod, container: &str) -> MemoryClaim {
    let found = pod.init_containers.iter().chain(&pod.containers).find(|of| of.name.as_str() == container);
    let bytes = |resources: &Resources| {
        let amount = resources.memory.get(&ZoneKind::Memory).copied().unwrap_or_default();
        Bytes(amount.units().unwrap_or(u64::MAX))
    };
    MemoryClaim {
        class: Some(class(pod)),
        // One that was put into a running pod to look into it requests nothing.
        request: Some(found.map_or(Bytes(0), |of| bytes(&of.requests))),
        limit: found.map(|of| bytes(&of.limits)).filter(|limit| limit.0 > 0),
        overhead: Some(bytes(&pod.overhead)).filter(|overhead| overhead.0 > 0),
    }
}

/// What is left of the pod's amounts for those that are not served apart; none if there are none, or nothing is.
fn share(pod: &Pod, of_pod: &PodResources, annotations: &Annotations) -> Option<ContainerRequest> {
    let is_auto =
        |container: &ContainerRequest| annotations.of(container.name.as_str()).placement == Placement::Auto;
    let sharing = |container: &&ContainerRequest| is_auto(container) && !container.is_guaranteed();
    pod.init_containers.iter().chain(&pod.containers).find(sharing)?;
    let sidecars = pod.init_containers.iter().filter(|init| init.restartable);
    // Those that keep to what is nobody's need nothing of the share either.
    let others: Vec<_> = sidecars
        .chain(&pod.containers)
        .filter(|container| !sharing(container))
        .map(|of| &of.requests)
        .collect();
    let cpus = others.iter().filter_map(|of| of.cpu?.millis()).fold(0, u64::saturating_add);
    let cpus = of_pod.requests.cpu?.millis()?.saturating_sub(cpus);
    // A part of a CPU is never exclusive.
    let mut left = Resources::none().with_cpu(Quantity::milli(cpus.max(1)));
    for (&kind, amount) in &of_pod.requests.memory {
        let taken = others.iter().filter_map(|of| of.memory.get(&kind)?.units()).fold(0, u64::saturating_add);
        let bytes = amount.units()?.saturating_sub(taken);
        if bytes > 0 {
            left.memory.insert(kind, Quantity::whole(bytes));
        }
    }
    left.memory.contains_key(&ZoneKind::Memory).then(|| ContainerRequest::guaranteed(POD_SHARE, left))
}

/// What a container requests, without limits: so it is Burstable also where those around it are not asked for.
fn requests_only(container: &ContainerRequest) -> Option<ContainerRequest> {
    let memory = container.requests.memory.get(&ZoneKind::Memory).copied().unwrap_or_default();
    (!memory.is_zero()).then(|| ContainerRequest { limits: Resources::none(), ..container.clone() })
}

/// The memory that a container requests, as a request of its own. A part of a CPU is never exclusive.
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

    /// A pod with 4 CPUs and 8Gi as a whole.
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

    /// Who gets what, in CPUs and Gi.
    fn slices(pod: &Pod, annotations: &Annotations) -> Vec<(String, u64, u64)> {
        let PodClaim::Pod(request) = asked(pod, annotations) else { return Vec::new() };
        assert_eq!(request.qos(), QosClass::Guaranteed);
        let of = |container: &ContainerRequest| {
            let memory = container.requests.memory[&ZoneKind::Memory].units().unwrap();
            (
                container.name.to_string(),
                container.requests.cpu.unwrap().whole_cpus().unwrap_or(0),
                memory >> 30,
            )
        };
        request.all_containers().map(of).collect()
    }

    #[test]
    fn what_is_left_of_the_pods_amounts_is_shared() {
        let own = |name: &str| ContainerRequest::guaranteed(name, resources("2", "4Gi"));
        let share = |cpus, gib| (POD_SHARE.to_owned(), cpus, gib);
        let db = || ("db".to_owned(), 2, 4);
        assert_eq!(class(&pod(vec![], vec![plain("web")])), QosClass::Guaranteed);
        assert_eq!(slices(&pod(vec![], vec![plain("web"), plain("log")]), &none()), [share(4, 8)]);
        let mixed = pod(vec![plain("init")], vec![own("db"), plain("log")]);
        assert_eq!(slices(&mixed, &none()), [db(), share(2, 4)]);
        let slice = |name| slice(&mixed, &asked(&mixed, &none()), &none(), name);
        assert_eq!(
            [slice("db"), slice("log"), slice("init"), slice("debugger")],
            [GuaranteeSource::Own, GuaranteeSource::Pod, GuaranteeSource::PodInit, GuaranteeSource::Pod]
        );
        // All of it is given to containers, or to those that want nothing exclusive.
        let full = pod(vec![], vec![own("db"), own("cache")]);
        assert_eq!(slices(&full, &none()), [db(), ("cache".to_owned(), 2, 4)]);
        let full = pod(vec![], vec![own("db"), own("cache"), plain("log")]);
        assert_eq!(slices(&full, &none()), [db(), ("cache".to_owned(), 2, 4)], "nothing is left to share");
        let shared =
            Annotations::read(&[("db.numaward.io/placement".to_owned(), "shared".to_owned())].into());
        assert_eq!(slices(&mixed, &shared), [share(2, 4)]);
        // Parts of CPUs are not exclusive; an init container's own amounts are no part of the sum.
        let odd = ContainerRequest::guaranteed("db", resources("2500m", "4Gi"));
        let odd = pod(vec![own("init")], vec![odd, plain("log")]);
        assert_eq!(slices(&odd, &none()), [("init".to_owned(), 2, 4), ("db".to_owned(), 0, 4), share(0, 4)]);
    }

    #[test]
    fn more_for_the_pod_is_more_for_those_that_share() {
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
    fn the_pods_amounts_decide_its_class() {
        let mut burstable = pod(vec![], vec![ContainerRequest::guaranteed("db", resources("2", "4Gi"))]);
        burstable.resources =
            Some(PodResources { requests: resources("2", "4Gi"), limits: Resources::none() });
        assert_eq!(class(&burstable), QosClass::Burstable);
        assert_eq!(asked(&burstable, &none()), PodClaim::Nothing);
        let memory = memory(&burstable, "db");
        assert_eq!((memory.class, memory.request), (Some(QosClass::Burstable), Some(Bytes::gib(4))));
        let unknown = super::memory(&pod(vec![], vec![]), "debugger");
        assert_eq!((unknown.request, unknown.limit), (Some(Bytes(0)), None));
    }
}
