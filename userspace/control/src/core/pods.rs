//! Containers of pods: they are placed while the runtime creates them, and then enforced like every other guarantee.
//!
//! # Problem
//! The CPUs and nodes of a container must be decided before its cgroup exists, and within the time limit of the runtime. The runtime writes
//! them, but it may fail to, and both the runtime and the daemon may be restarted.
//!
//! # Terms
//! - *owner*: the unit of a decision of the engine: a whole pod if the API server has reported it (the owner is the pod's UID), otherwise
//!   one container (`UID/NAME`).
//! - *placed*: the allocation of the container has been decided and stored.
//! - *bound*: the cgroup of the container exists and its settings are enforced. From then on, the container is a guarantee like any other
//!   if it has an allocation; otherwise it is kept on the shared pool.
//!
//! # Algorithm
//! [`placement::run_pod`] admits whole pods. [`placement::create`] admits a container that is not admitted yet, and returns the settings for the
//! runtime. [`binding::bind`] runs when the process of the container exists but not its program yet: it writes the knobs that the runtime has
//! not written, also of ancestors, and informs the probes. [`synchronize::synchronize`] compares the state with the running containers. When the
//! shared pool changes, containers without exclusive CPUs follow it; the runtime is informed later, so that it does not write the old pool
//! again.
//!
//! [`ending`] releases containers and pods that have ended. [`binding`] retries failed binds, and removes containers that were never
//! started. [`uninstall`] restores the settings that containers would have without the daemon. [`waiting`] has the containers that run
//! without their requested resources, [`shared_claims`] the division of resource claims, and [`settings`](super::settings) the settings of containers.
//!
//! # Invariants
//! - The state is stored before the runtime gets an answer from it.
//! - A running container is never refused, whatever the engine decides.

pub(crate) mod binding;
pub(crate) mod commands;
pub(crate) mod ending;
pub(crate) mod placement;
pub(crate) mod resize;
pub(crate) mod room;
mod shared_claims;
pub(crate) mod synchronize;
#[cfg(test)]
mod tests;
pub(crate) mod uninstall;
pub(crate) mod waiting;

use std::{collections::BTreeSet, time::Instant};

use self::{
    ending::EndedContainers, room::RefusedPods, shared_claims::SharedClaims, waiting::UnplacedContainers,
};
use super::{Core, shared_pool};

/// State of pods that does not survive a restart.
#[derive(Default)]
pub(super) struct Pods {
    ended: EndedContainers,
    waiting: UnplacedContainers,
    /// Owners with a refused latest request.
    refused: BTreeSet<String>,
    refused_for_room: RefusedPods,
    shared_claims: SharedClaims,
    /// UIDs of the resource claims for which room is made.
    pub(super) waiting_claims: BTreeSet<String>,
    /// Containers for which the runtime was asked to restore settings.
    restore_requested: BTreeSet<String>,
}

/// Periodic work: follows the shared pool, retries waiting and unbound containers, continues releases, divides resource claims, and checks
/// the CPUs of a few containers without exclusive ones.
pub(crate) fn maintain(core: &mut Core, now: Instant) {
    shared_pool::follow(core);
    waiting::retry(core);
    binding::maintain(core, now);
    ending::continue_ending(core);
    shared_claims::divide(core, now);
    shared_pool::check_next(core);
}
