//! Refused pods for which moves of running workloads may make room.

use std::collections::{BTreeMap, BTreeSet};

use numaward_config::kubernetes::RefusedPolicy;
use numaward_engine::OwnerId;
use numaward_guarantee::{
    error::AdmissionError,
    pod::{PodPlacementRequest, is_for_room},
};

use super::placement::OwnerRequest;
use crate::core::Core;

/// Maximum number of remembered pods and containers.
const MAX_REFUSED: usize = 1000;

/// A pod or container that was refused for lack of room.
#[derive(Clone, Debug)]
pub(crate) struct RefusedPod {
    pub(crate) asked: OwnerRequest,
    pub(crate) ask: PodPlacementRequest,
}

/// Refused pods and containers by owner, until they are admitted or their sandbox has stopped.
#[derive(Default)]
pub(super) struct RefusedPods {
    refused: BTreeMap<OwnerId, RefusedPod>,
    /// Owners for which no moves were planned since their last refusal.
    pending: BTreeSet<OwnerId>,
}

impl RefusedPods {
    /// Removes the pods of a stopped sandbox.
    pub(super) fn remove_sandbox(&mut self, sandbox: &str) {
        self.refused.retain(|_, pod| pod.ask.sandbox != sandbox);
    }

    /// Removes the pods without one of these sandboxes.
    pub(super) fn retain_sandboxes(&mut self, sandboxes: &BTreeMap<String, String>) {
        self.refused.retain(|_, pod| sandboxes.contains_key(&pod.ask.sandbox));
    }
}

/// Records the outcome of an admission: a refusal for lack of room, if running workloads may be moved for it, replaces an earlier one of
/// the same owner.
pub(super) fn note_outcome(
    core: &mut Core,
    asked: Option<OwnerRequest>,
    ask: &PodPlacementRequest,
    error: Option<&AdmissionError>,
) {
    let Some(asked) = asked.filter(|_| core.config.kubernetes.refused == RefusedPolicy::MakeRoom) else {
        return;
    };
    let RefusedPods { refused, pending } = &mut core.pods.refused_for_room;
    let owner = asked.request.owner.clone();
    match error {
        Some(AdmissionError::Rejected(rejection, _)) if is_for_room(&rejection.reason) => {
            if refused.len() < MAX_REFUSED || refused.contains_key(&owner) {
                refused.insert(owner.clone(), RefusedPod { asked, ask: ask.clone() });
                pending.insert(owner);
            }
        }
        _ => {
            refused.remove(&owner);
        }
    }
}

/// Returns true if moves may be planned for a refused pod.
pub(crate) fn has_next(core: &Core) -> bool {
    !core.pods.refused_for_room.pending.is_empty()
}

/// Returns the next refused pod for which no moves were planned since its last refusal. A plan may take 50 ms, so the caller answers the
/// container runtime between two of them.
pub(crate) fn take_next(core: &mut Core) -> Option<RefusedPod> {
    let RefusedPods { refused, pending } = &mut core.pods.refused_for_room;
    std::iter::from_fn(|| pending.pop_first()).find_map(|owner| refused.get(&owner).cloned())
}

/// Returns the latest request of a refused owner; `None` if it was admitted or its sandbox has stopped.
pub(crate) fn latest<'a>(core: &'a Core, owner: &OwnerId) -> Option<&'a RefusedPod> {
    core.pods.refused_for_room.refused.get(owner)
}
