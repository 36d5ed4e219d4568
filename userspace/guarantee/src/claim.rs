//! Reservations for resource claims (Dynamic Resource Allocation).
//!
//! The kubelet has a claim prepared before the containers that use it exist. Until the claim is unprepared, its CPUs and memory are
//! reserved: the claim is an owner in the ledger, [`owner`]. Its parts are decided one by one, each on its node, and then united.
//!
//! A claim of the whole host has one part, for which the strategy chooses the nodes. It is reserved before the scheduler binds the pod, and
//! *pending* until the kubelet has it prepared.

use std::{collections::BTreeMap, sync::Arc};

use numaward_api as api;
use numaward_engine::{
    OwnerId, Quantity, Request, Terms,
    claims::{allocator::Amounts, devices},
};
use numaward_topology::NodeId;
use serde::{Deserialize, Serialize};

use crate::pod::{MAX_POD_BYTES, account_bytes};

/// A claim with reserved parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReservedClaim {
    pub namespace: String,
    pub name: String,
    /// UID of the pod, as the API server has it.
    pub pod: String,
    pub parts: Vec<ReservedPart>,
    /// True if the kubelet has not had the claim prepared yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pending: bool,
}

/// Outcome of the request to place a claim of the whole host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacedClaim {
    Reserved,
    /// Running workloads are moved. The same request later has the outcome.
    MakesRoom,
}

/// Reserved amounts of a node, or of the whole host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedPart {
    /// `None` if the strategy chooses the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<NodeId>,
    pub consumed: Amounts,
    /// Terms by the parameters of the claim: kinds of CPUs, hidden siblings, caches, isolation.
    #[serde(default, skip_serializing_if = "Terms::is_default")]
    pub terms: Terms,
}

impl ReservedPart {
    /// Returns the request for these amounts to the strategy of the host, with its terms.
    pub fn placement_request(&self, owner: OwnerId, amounts: &Amounts) -> (Request, Terms) {
        let (request, terms) = devices::placement_request(owner, self.node, amounts);
        let own = self.terms.clone();
        let terms = Terms {
            isolate: own.isolate,
            resctrl_class: own.resctrl_class,
            cpu_kinds: own.cpu_kinds,
            hide_siblings: own.hide_siblings,
            same_cache: own.same_cache,
            immovable: true,
            ..terms
        };
        (request, terms)
    }
}

/// A claim whose amounts changed with the requests of its pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChangedClaim {
    /// Name of the `ResourceClaim`.
    pub name: String,
    /// The present amounts of all parts together.
    pub given: Amounts,
    /// The amounts that the scheduler allocated.
    pub allocated: Amounts,
}

/// Checks the claims of a pod, by UID, against the requests of the pod and against the limit of a pod's entries in the ledger. `requests`
/// is `None` if the pod may have more than it requests.
///
/// # Errors
///
/// The claims consume more than the pod requests, or their entries have more than 32 KiB.
pub fn check_pod<'a>(
    claims: impl IntoIterator<Item = (&'a str, &'a ReservedClaim)>,
    requests: Option<&Amounts>,
) -> Result<(), api::Rejection> {
    let rejection =
        |reason: &str, message| api::Rejection { reason: reason.to_owned(), message, shortfalls: Vec::new() };
    let (mut bytes, mut consumed) = (0_usize, BTreeMap::new());
    for (uid, claim) in claims {
        bytes = bytes.saturating_add(claim.ledger_bytes(uid));
        for (name, amount) in claim.parts.iter().flat_map(|part| &part.consumed) {
            let sum: &mut Option<Quantity> =
                consumed.entry(name.clone()).or_insert(Some(Quantity::default()));
            *sum = sum.and_then(|sum| sum.checked_add(*amount));
        }
    }
    if bytes > MAX_POD_BYTES {
        let message = format!(
            "the resource claims of the pod take {bytes} bytes to store, and the maximum is {MAX_POD_BYTES}: it has too many"
        );
        return Err(rejection("AccountTooLarge", message));
    }
    for (name, consumed) in consumed.into_iter().filter(|_| requests.is_some()) {
        let requested = requests.and_then(|requests| requests.get(&name)).copied().unwrap_or_default();
        if consumed.is_none_or(|consumed| consumed > requested) {
            let consumed = consumed.map_or_else(|| "too much".to_owned(), |consumed| consumed.to_string());
            let message = format!(
                "the resource claims of the pod have {consumed} of {name}, and its requests, which a quota counts, {requested}: request as \
                 much, or list its namespace in kubernetes.beyondQuotaNamespaces"
            );
            return Err(rejection("BeyondRequests", message));
        }
    }
    Ok(())
}

/// Returns the amounts in the request of a part of a claim.
pub fn requested(request: &Request) -> Amounts {
    let resources = request.containers.iter().map(|container| &container.requests);
    let amounts = resources.flat_map(|resources| {
        let memory = resources.memory.iter();
        let memory = memory.filter_map(|(&kind, amount)| Some((devices::capacity_name(kind)?, *amount)));
        resources.cpu.map(|amount| (devices::CPU, amount)).into_iter().chain(memory)
    });
    amounts.map(|(name, amount)| (name.into(), amount)).collect()
}

/// Returns the owner of a claim in the ledger. While its parts are decided, each has an owner of its own; the first one then has all.
pub fn owner(uid: &str) -> OwnerId {
    devices::part_owner(uid, 0)
}

/// Adds amounts to a sum.
pub fn add(sum: &mut Amounts, amounts: &Amounts) {
    for (name, amount) in amounts {
        let sum = sum.entry(name.clone()).or_default();
        *sum = sum.checked_add(*amount).unwrap_or(*sum);
    }
}

/// Takes these amounts from the remaining ones, as far as they last. CPUs are whole. Returns the taken amounts.
pub fn take(remaining: &mut Amounts, wanted: &Amounts) -> Amounts {
    let take = |(name, wanted): (&Arc<str>, &Quantity)| {
        let left = remaining.get_mut(name)?;
        let mut amount = (*wanted).min(*left);
        if **name == *devices::CPU && amount < *wanted {
            let rounded_up = amount.units().unwrap_or(0);
            amount = Quantity::whole(rounded_up - u64::from(Quantity::whole(rounded_up) > amount));
        }
        *left = left.saturating_sub(amount);
        Some((name.clone(), amount))
    };
    wanted.iter().filter_map(take).collect()
}

impl ReservedClaim {
    /// Returns the size of its entries in the ledger.
    fn ledger_bytes(&self, uid: &str) -> usize {
        let (request, terms) = self.placement_request(uid, &self.consumed());
        let own = serde_json::to_vec(&(uid, self)).map_or(usize::MAX, |claim| claim.len());
        own.saturating_add(account_bytes(Some(&request), &terms))
    }

    /// Returns the request for all parts together, with its terms.
    pub fn placement_request(&self, uid: &str, amounts: &Amounts) -> (Request, Terms) {
        let (request, terms) = match self.parts.first() {
            Some(part) => part.placement_request(owner(uid), amounts),
            None => devices::placement_request(owner(uid), None, amounts),
        };
        (request, Terms { nodes: self.parts.iter().filter_map(|part| part.node).collect(), ..terms })
    }

    /// Returns true if the claims differ at most in the progress of their preparation.
    pub fn is_same(&self, other: &Self) -> bool {
        let Self { namespace, name, pod, parts, pending: _ } = self;
        (namespace, name, pod, parts) == (&other.namespace, &other.name, &other.pod, &other.parts)
    }

    /// Returns the amounts of all parts together.
    pub fn consumed(&self) -> Amounts {
        let mut sum = Amounts::new();
        for part in &self.parts {
            add(&mut sum, &part.consumed);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_cpus_are_taken() {
        let amounts = |cpu: u64, memory: u64| -> Amounts {
            [("cpu".into(), Quantity::milli(cpu)), ("memory".into(), Quantity::whole(memory))].into()
        };
        for (remaining, wanted, taken, left) in [
            (amounts(4000, 10), amounts(3000, 4), amounts(3000, 4), amounts(1000, 6)),
            (amounts(2999, 3), amounts(3000, 4), amounts(2000, 3), amounts(999, 0)),
            (amounts(999, 0), amounts(1000, 1), amounts(0, 0), amounts(999, 0)),
            (amounts(0, 5), amounts(1000, 5), amounts(0, 5), amounts(0, 0)),
        ] {
            let mut remaining = remaining;
            assert_eq!((take(&mut remaining, &wanted), remaining), (taken, left));
        }
        assert_eq!(take(&mut Amounts::new(), &amounts(1000, 1)), Amounts::new());
    }
}
