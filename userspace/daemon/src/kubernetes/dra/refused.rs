//! Requests for the whole host that did not fit, by which less of it is published.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use numaward_engine::claims::{allocator::Amounts, devices::NodeAmounts};
use numaward_topology::NodeId;
use parking_lot::Mutex;

/// Maximum number of remembered requests. Each lowers a published amount, so few are needed before no request fits.
const MAX_REQUESTS: usize = 32;
/// Time after which requests are forgotten, as they may fit after small changes.
const VALIDITY: Duration = Duration::from_mins(1);
/// Part of the free memory by which it has to grow before requests are forgotten: the use by other workloads changes all the time.
const GROWTH_DIVISOR: u64 = 64;

/// Refused requests since the free amounts changed last. Clones share them.
#[derive(Clone, Debug, Default)]
pub(in crate::kubernetes) struct RefusedRequests(Arc<Mutex<Refusals>>);

#[derive(Debug, Default)]
struct Refusals {
    /// Time of the first publication after the refusals, and the free amounts then.
    published: Option<(Instant, BTreeMap<NodeId, NodeAmounts>)>,
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
        let (since, known) = refusals.published.get_or_insert_with(|| (Instant::now(), free.clone()));
        let is_more =
            |(node, amounts)| known.get(node).is_none_or(|known: &NodeAmounts| has_more(amounts, known));
        if since.elapsed() >= VALIDITY || free.iter().any(is_more) {
            *refusals = Refusals::default();
        }
        refusals.requests.clone()
    }
}

fn has_more(amounts: &NodeAmounts, known: &NodeAmounts) -> bool {
    let more = |(kind, bytes): (_, &u64)| {
        known.memory.get(kind).is_none_or(|known| bytes.saturating_sub(*known) > known / GROWTH_DIVISOR)
    };
    amounts.cpus > known.cpus || amounts.memory.iter().any(more)
}

#[cfg(test)]
mod tests {
    use numaward_engine::Quantity;
    use numaward_topology::ZoneKind;

    use super::*;

    #[test]
    fn requests_count_until_amounts_change() {
        let refused = RefusedRequests::default();
        let amounts = |cpus, mib: u64| {
            let memory = [(ZoneKind::Memory, mib << 20)].into();
            [(NodeId(0), NodeAmounts { cpus, memory })].into()
        };
        let free = |cpus| amounts(cpus, 1000);
        let request = |cpus| -> Amounts { [("cpu".into(), Quantity::whole(cpus))].into() };
        assert!(refused.with(&free(4)).is_empty());
        refused.add(request(4));
        refused.add(request(4));
        refused.add(request(3));
        assert_eq!(refused.with(&free(4)), [request(4), request(3)]);
        assert_eq!(refused.with(&free(3)).len(), 2);
        assert_eq!(refused.with(&amounts(4, 1010)).len(), 2, "another workload has freed a little");
        assert!(refused.with(&free(5)).is_empty(), "another pod has ended");
        assert!(refused.with(&free(4)).is_empty());
        refused.add(request(4));
        assert_eq!(refused.with(&free(4)), [request(4)]);
        assert!(refused.with(&amounts(4, 1100)).is_empty());
        for cpus in 0..100 {
            refused.add(request(cpus));
        }
        assert_eq!(refused.with(&free(4)).len(), MAX_REQUESTS);
    }
}
