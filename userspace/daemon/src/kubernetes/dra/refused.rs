//! Requests for the whole host that did not fit, by which less of it is published.

use std::{collections::BTreeMap, sync::Arc};

use numaward_engine::claims::{allocator::Amounts, devices::NodeAmounts};
use numaward_topology::NodeId;
use parking_lot::Mutex;

/// Maximum number of remembered requests. Each lowers a published amount, so few are needed before no request fits.
const MAX_REQUESTS: usize = 32;

/// Refused requests since the free amounts changed last. Clones share them.
#[derive(Clone, Debug, Default)]
pub(in crate::kubernetes) struct RefusedRequests(Arc<Mutex<Refusals>>);

#[derive(Debug, Default)]
struct Refusals {
    /// Free amounts at the time of the first publication after the refusals.
    free: Option<BTreeMap<NodeId, NodeAmounts>>,
    requests: Vec<Amounts>,
}

impl RefusedRequests {
    /// Adds a request that the host has refused.
    pub(super) fn add(&self, request: Amounts) {
        let mut refusals = self.0.lock();
        if refusals.requests.len() < MAX_REQUESTS && !refusals.requests.contains(&request) {
            refusals.requests.push(request);
        }
    }

    /// Returns the refused requests. If more is free than after the refusals, they may fit and are forgotten.
    pub(in crate::kubernetes) fn with(&self, free: &BTreeMap<NodeId, NodeAmounts>) -> Vec<Amounts> {
        let mut refusals = self.0.lock();
        if refusals.requests.is_empty() {
            return Vec::new();
        }
        let known = refusals.free.get_or_insert_with(|| free.clone());
        if free.iter().any(|(node, amounts)| known.get(node).is_none_or(|known| has_more(amounts, known))) {
            *refusals = Refusals::default();
        }
        refusals.requests.clone()
    }
}

fn has_more(amounts: &NodeAmounts, known: &NodeAmounts) -> bool {
    let more = |(kind, bytes)| known.memory.get(kind).is_none_or(|known| bytes > known);
    amounts.cpus > known.cpus || amounts.memory.iter().any(more)
}

#[cfg(test)]
mod tests {
    use numaward_engine::Quantity;

    use super::*;

    #[test]
    fn requests_count_until_amounts_change() {
        let refused = RefusedRequests::default();
        let free = |cpus| [(NodeId(0), NodeAmounts { cpus, memory: BTreeMap::new() })].into();
        let request = |cpus| -> Amounts { [("cpu".into(), Quantity::whole(cpus))].into() };
        assert!(refused.with(&free(4)).is_empty());
        refused.add(request(4));
        refused.add(request(4));
        refused.add(request(3));
        assert_eq!(refused.with(&free(4)), [request(4), request(3)]);
        assert_eq!(refused.with(&free(3)).len(), 2);
        assert!(refused.with(&free(5)).is_empty(), "another pod has ended");
        assert!(refused.with(&free(4)).is_empty());
        for cpus in 0..100 {
            refused.add(request(cpus));
        }
        assert_eq!(refused.with(&free(4)).len(), MAX_REQUESTS);
    }
}
