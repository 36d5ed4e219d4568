//! Quality-of-service class of a request, as Kubernetes derives it.
//!
//! - *Guaranteed*: every container has limits of CPU and memory, and the sums of requests and limits over all
//!   containers are equal. Only Guaranteed requests get exclusive CPUs or memory on NUMA nodes from the kubelet.
//! - *Best effort*: neither requests nor limits are set.
//! - *Burstable*: all other requests.
//!
//! Pod-level resources replace those of the containers. Amounts of zero count as not set. Huge pages are ignored.
//!
//! Source: `ComputePodQOS` in k8s.io/kubernetes, package `apis/core/v1/helper/qos`.

use numaward_topology::ZoneKind;
use serde::{Deserialize, Serialize};

use crate::{
    quantity::Quantity,
    request::{ContainerRequest, Request, Resources},
};

#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, derive_more::Display,
)]
pub enum QosClass {
    /// Requests equal limits.
    Guaranteed,
    /// Some requests or limits are set.
    Burstable,
    /// No requests or limits are set.
    BestEffort,
}

/// Returns CPU and base memory, if set and not zero. Only these resources determine the class.
fn class_resources(resources: &Resources) -> [Option<Quantity>; 2] {
    [resources.cpu, resources.memory.get(&ZoneKind::Memory).copied()]
        .map(|amount| amount.filter(|amount| !amount.is_zero()))
}

/// Adds to a sum. Returns `false` if the sum overflows.
fn add(sum: &mut Option<Quantity>, amount: Option<Quantity>) -> bool {
    let Some(amount) = amount else { return true };
    let total = sum.unwrap_or_default().checked_add(amount);
    *sum = Some(total.unwrap_or(amount));
    total.is_some()
}

impl ContainerRequest {
    /// Returns whether the container would be Guaranteed alone: it requests CPU and memory, and both equal its
    /// limits.
    pub fn is_guaranteed(&self) -> bool {
        let [requests, limits] = [&self.requests, &self.limits].map(class_resources);
        requests == limits && requests.iter().all(Option::is_some)
    }
}

impl Request {
    pub fn qos(&self) -> QosClass {
        let (mut requested, mut limited) = ([None; 2], [None; 2]);
        let mut guaranteed = true;
        let of_containers = self.all_containers().map(|container| (&container.requests, &container.limits));
        let as_whole = self.resources.iter().map(|of| (&of.requests, &of.limits));
        let counted: Vec<_> =
            if self.resources.is_some() { as_whole.collect() } else { of_containers.collect() };
        for (requests, limits) in counted {
            let (requests, limits) = (class_resources(requests), class_resources(limits));
            guaranteed &= limits.iter().all(Option::is_some);
            for index in 0..2 {
                // A request is not Guaranteed if its sums overflow.
                guaranteed &= add(&mut requested[index], requests[index]);
                guaranteed &= add(&mut limited[index], limits[index]);
            }
        }
        if requested.iter().chain(&limited).all(Option::is_none) {
            QosClass::BestEffort
        } else if guaranteed && requested == limited {
            QosClass::Guaranteed
        } else {
            QosClass::Burstable
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resources(cpu: &str, memory: &str) -> Resources {
        let mut resources = Resources::none();
        if !cpu.is_empty() {
            resources = resources.with_cpu(cpu.parse().unwrap());
        }
        if !memory.is_empty() {
            resources = resources.with_memory(memory.parse().unwrap());
        }
        resources
    }

    #[test]
    fn class_follows_requests_and_limits() {
        let cases: &[(&[[&str; 4]], QosClass)] = &[
            (&[["1", "1Gi", "1", "1Gi"]], QosClass::Guaranteed),
            (&[["1", "1Gi", "1000m", "1024Mi"]], QosClass::Guaranteed),
            (&[["1", "1Gi", "1", "2Gi"]], QosClass::Burstable),
            (&[["1", "1Gi", "1", ""]], QosClass::Burstable),
            (&[["", "", "1", "1Gi"]], QosClass::Burstable),
            (&[["", "", "", ""]], QosClass::BestEffort),
            (&[["0", "0", "0", "0"]], QosClass::BestEffort),
            (&[["1", "1Gi", "1", "1Gi"], ["", "", "", ""]], QosClass::Burstable),
            (&[["1", "1Gi", "1", "1Gi"], ["2", "1Gi", "2", "1Gi"]], QosClass::Guaranteed),
            (&[], QosClass::BestEffort),
        ];
        for (containers, class) in cases {
            let containers =
                containers.iter().enumerate().map(|(index, [cpu, memory, max_cpu, max_memory])| {
                    ContainerRequest {
                        name: format!("c{index}").into(),
                        restartable: false,
                        requests: resources(cpu, memory),
                        limits: resources(max_cpu, max_memory),
                    }
                });
            let request = Request {
                owner: "p".into(),
                init_containers: vec![],
                containers: containers.collect(),
                resources: None,
            };
            assert_eq!(request.qos(), *class, "{request:?}");
        }
    }

    #[test]
    fn init_containers_affect_the_class() {
        let full = ContainerRequest::guaranteed("c", resources("1", "1Gi"));
        let mut init = full.clone();
        init.limits = Resources::none();
        let request = Request {
            owner: "p".into(),
            init_containers: vec![init],
            containers: vec![full],
            resources: None,
        };
        assert_eq!(request.qos(), QosClass::Burstable);
    }
}
