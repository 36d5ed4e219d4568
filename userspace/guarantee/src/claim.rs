//! Reservations for resource claims (Dynamic Resource Allocation).
//!
//! The kubelet has a claim prepared before the containers that use it exist. Until the claim is unprepared, its CPUs and memory are
//! reserved: each part of the claim is an owner in the ledger, [`devices::part_owner`].

use std::collections::BTreeMap;

use numaward_api as api;
use numaward_engine::{
    OwnerId, Quantity,
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
}

/// Reserved amounts of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedPart {
    pub node: NodeId,
    pub consumed: Amounts,
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
            "the resource claims of the pod have {bytes} bytes in the ledger, and the maximum is {MAX_POD_BYTES}: it has too many"
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

impl ReservedClaim {
    /// Returns the size of its entries in the ledger.
    fn ledger_bytes(&self, uid: &str) -> usize {
        let accounts = self.owners(uid).zip(&self.parts).map(|(owner, part)| {
            let (request, terms) = devices::placement_request(owner, Some(part.node), &part.consumed);
            account_bytes(Some(&request), &terms)
        });
        let own = serde_json::to_vec(&(uid, self)).map_or(usize::MAX, |claim| claim.len());
        accounts.fold(own, usize::saturating_add)
    }

    /// Returns the owners of the parts in the ledger; `uid` is that of the claim.
    pub fn owners(&self, uid: &str) -> impl Iterator<Item = OwnerId> {
        (0..self.parts.len()).map(move |part| devices::part_owner(uid, part))
    }
}
