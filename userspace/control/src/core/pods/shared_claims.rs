//! Division of claims: the containers that share a resource claim have equal parts of its memory.
//!
//! When a container comes or goes, the remaining containers get larger or smaller parts. The runtime must not wait for that, so it follows the answer. A failed
//! change is retried with a growing delay; until then, the parts stay as before.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use numaward_model::{Retry, pod::GuaranteeSource};

use crate::core::{Core, shared_pool};

/// Bounds of the delay of a retry.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// Claims with a changed set of containers, by their owner in the ledger, with the next retry of those that failed. Not stored: after a
/// start, all claims are divided again.
#[derive(Default)]
pub(super) struct SharedClaims(BTreeMap<String, Option<Retry>>);

impl SharedClaims {
    pub(super) fn note_changed(&mut self, owner: &str) {
        self.0.insert(owner.to_owned(), None);
    }
}

/// Records that all claims are to be divided again.
pub(super) fn note_all_changed(core: &mut Core) {
    let containers = core.store.state.containers.values().map(|placed| &placed.of);
    for of in containers.filter(|of| of.slice == GuaranteeSource::Claim) {
        core.pods.shared_claims.note_changed(&of.owner);
    }
}

/// Divides the changed claims among their present containers, each by itself. While another operation blocks, nothing is changed.
pub(super) fn divide(core: &mut Core, now: Instant) {
    let is_due = |retry: &Option<Retry>| retry.as_ref().is_none_or(|retry| retry.is_due(now));
    let changed = core.pods.shared_claims.0.iter();
    let due: Vec<String> =
        changed.filter(|(_, retry)| is_due(retry)).map(|(owner, _)| owner.clone()).collect();
    for owner in due {
        if core.execution.is_busy() {
            return;
        }
        let divided = shared_pool::change_containers(core, None, |placed| placed.of.owner == owner);
        let claims = &mut core.pods.shared_claims.0;
        match divided {
            Ok(_) => drop(claims.remove(&owner)),
            Err(error) => {
                tracing::error!(owner, %error, "the memory of a resource claim could not be divided among its containers; it is retried");
                let (first, longest) = RETRY_DELAYS;
                let retry = claims.entry(owner).or_default();
                retry.get_or_insert_with(|| Retry::new(now, first, longest)).postpone(now);
            }
        }
    }
}
