//! Division of claims: the containers that share a resource claim have equal parts of its memory.
//!
//! When a container comes or goes, the remaining containers get larger or smaller parts. The runtime must not wait for that, so it follows the answer. A failed
//! change is retried with a growing delay; until then, the parts stay as before.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use numaward_model::{Retry, pod::GuaranteeSource};

use crate::core::{Core, shared_pool};

/// Bounds of the delay of a retry.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// Claims with a changed set of containers. Not stored: after a start, all claims are divided again.
#[derive(Default)]
pub(super) struct SharedClaims {
    /// Owners of the claims' parts in the ledger.
    changed: BTreeSet<String>,
    /// The next retry; `None` if the last division did not fail.
    retry: Option<Retry>,
}

impl SharedClaims {
    pub(super) fn note_changed(&mut self, owner: &str) {
        self.changed.insert(owner.to_owned());
    }
}

/// Records that all claims are to be divided again.
pub(super) fn note_all_changed(core: &mut Core) {
    let containers = core.store.state.containers.values().map(|placed| &placed.of);
    let of_claims = containers.filter(|of| of.slice == GuaranteeSource::Claim);
    core.pods.shared_claims.changed.extend(of_claims.map(|of| of.owner.clone()));
}

/// Divides the changed claims among their present containers. While another operation blocks, nothing is changed.
pub(super) fn divide(core: &mut Core, now: Instant) {
    let SharedClaims { changed, retry } = &core.pods.shared_claims;
    let is_due = retry.as_ref().is_none_or(|retry| retry.is_due(now));
    if changed.is_empty() || !is_due || core.execution.is_busy() {
        return;
    }
    let owners = std::mem::take(&mut core.pods.shared_claims.changed);
    let divided = shared_pool::change_containers(core, None, |placed| owners.contains(&placed.of.owner));
    let of = &mut core.pods.shared_claims;
    match divided {
        Ok(_) => of.retry = None,
        Err(error) => {
            tracing::error!(%error, "the memory of resource claims could not be divided among their containers; it is retried");
            of.changed.extend(owners);
            let (first, longest) = RETRY_DELAYS;
            of.retry.get_or_insert_with(|| Retry::new(now, first, longest)).postpone(now);
        }
    }
}
