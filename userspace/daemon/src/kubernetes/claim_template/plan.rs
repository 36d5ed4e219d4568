//! The claims of a pod, and the resources that its specification keeps.
//!
//! # Recipe
//! `spec.resources` of the pod has the amounts of all claims and of the rest, and containers do not repeat the amounts of their
//! claims. The scheduler then counts them once, with and without the feature gate `DRANodeAllocatableResources`, and a quota counts them.
//! An init container uses the claim of an app container that has at least its amounts, since both do not run at once.

use std::collections::{BTreeMap, BTreeSet};

use numaward_engine::{
    Quantity, Resources,
    claims::{
        allocator::Amounts,
        devices::{self, CPU},
    },
};
use numaward_kube::pod::Pod;
use numaward_topology::ZoneKind;

use crate::kubernetes::nri::PodGuarantee;

/// A claim of a pod. It has the name of the first of its containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlannedClaim {
    pub(super) name: String,
    pub(super) amounts: Amounts,
    pub(super) containers: Vec<String>,
}

/// The claims of a pod, and its resources as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodPlan {
    pub(super) claims: Vec<PlannedClaim>,
    pub(super) resources: Resources,
}

/// Returns the capacity of devices for a resource of containers; `None` if they have none.
pub(super) fn capacity_of(resource: &str) -> Option<&'static str> {
    if resource == CPU { Some(CPU) } else { devices::capacity_name(resource.parse().ok()?) }
}

impl PodPlan {
    /// Plans the claims of a pod with these guarantees. The error names a container.
    pub(super) fn new(pod: &Pod, guarantees: &[PodGuarantee]) -> Result<Self, String> {
        let mut claims = Vec::<PlannedClaim>::new();
        let apps: BTreeSet<_> = pod.containers.iter().map(|container| container.name.as_str()).collect();
        let of_init = |is_of_init| guarantees.iter().filter(move |of| of.is_of_init == is_of_init);
        for guarantee in of_init(false).chain(of_init(true)) {
            let Some(name) = guarantee.containers.first() else { continue };
            let amounts = devices::claim_amounts(&guarantee.resources)
                .map_err(|kind| format!("container {name:?}: devices have no capacity of {kind}"))?;
            let is_enough = |claim: &&mut PlannedClaim| {
                let has = |name: &str| claim.amounts.get(name).copied().unwrap_or_default();
                apps.contains(claim.name.as_str())
                    && amounts.iter().all(|(name, amount)| has(name) >= *amount)
            };
            match claims.iter_mut().filter(|_| guarantee.is_of_init).find(is_enough) {
                Some(claim) => claim.containers.push(name.clone()),
                None => claims.push(PlannedClaim {
                    name: name.clone(),
                    amounts,
                    containers: guarantee.containers.clone(),
                }),
            }
        }
        let resources = pod_resources(pod, &claims);
        Ok(Self { claims, resources })
    }

    /// Returns the claim that a container uses.
    pub(super) fn claim_of(&self, container: &str) -> Option<&PlannedClaim> {
        claim_of(&self.claims, container)
    }
}

fn claim_of<'a>(claims: &'a [PlannedClaim], container: &str) -> Option<&'a PlannedClaim> {
    claims.iter().find(|claim| claim.containers.iter().any(|user| user == container))
}

/// Returns the sum of the claims and of the remaining requests, and at least what the pod has as a whole.
fn pod_resources(pod: &Pod, claims: &[PlannedClaim]) -> Resources {
    let request = pod.request();
    let of_pod = pod.resources.iter().map(|of_pod| &of_pod.requests);
    let all = || request.all_containers().map(|container| &container.requests).chain(of_pod.clone());
    let claimed = claims.iter().flat_map(|claim| claim.amounts.keys());
    let kinds: BTreeSet<ZoneKind> = all()
        .flat_map(|requests| requests.memory.keys().copied())
        .chain(claimed.filter_map(|name| devices::memory_kind(name)))
        .collect();
    let amounts = |requests: &Resources, claim: Option<&PlannedClaim>| -> Vec<u64> {
        let is_claimed = |name: Option<&str>| {
            claim.zip(name).is_some_and(|(claim, name)| claim.amounts.contains_key(name))
        };
        let cpu = requests.cpu.filter(|_| !is_claimed(Some(CPU))).and_then(Quantity::millis).unwrap_or(0);
        let memory = kinds.iter().map(|kind| {
            let amount = requests.memory.get(kind).filter(|_| !is_claimed(devices::capacity_name(*kind)));
            amount.and_then(|amount| amount.units()).unwrap_or(0)
        });
        [cpu].into_iter().chain(memory).collect()
    };
    let mut total = request.effective_amounts(1 + kinds.len(), |container| {
        amounts(&container.requests, claim_of(claims, container.name.as_str()))
    });
    for claim in claims {
        let of_claim = devices::resources(&claim.amounts);
        for (sum, amount) in total.iter_mut().zip(amounts(&of_claim, None)) {
            *sum = sum.saturating_add(amount);
        }
    }
    for of_pod in of_pod {
        for (sum, amount) in total.iter_mut().zip(amounts(of_pod, None)) {
            *sum = (*sum).max(amount);
        }
    }
    let memory = kinds.iter().zip(total.iter().skip(1));
    let memory: BTreeMap<_, _> = memory.map(|(&kind, &bytes)| (kind, Quantity::whole(bytes))).collect();
    Resources { cpu: total.first().copied().map(Quantity::milli), memory }
}
