//! Comparison with the running containers, which the container runtime lists after each connection.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Instant,
};

use numaward_cgroup::knob::Quota;
use numaward_guarantee::pod::{ContainerPlacementRequest, SyncResult, UnpinnedReason, Update};

use super::{ending, shared_claims, waiting};
use crate::core::{Core, settings, shared_pool};

/// Releases containers and pods that are not in a complete list of the runtime.
pub(crate) fn release_absent(
    core: &mut Core,
    containers: &[ContainerPlacementRequest],
    sandboxes: &BTreeMap<String, String>,
    complete: bool,
) {
    if !complete {
        return;
    }
    core.pods.refused_for_room.retain_sandboxes(sandboxes);
    let runs: BTreeSet<&str> = containers.iter().map(|ask| ask.id.as_str()).collect();
    // All names are collected before the first release: while that blocks, new pods and containers are admitted.
    let gone: Vec<String> =
        core.store.state.containers.keys().filter(|id| !runs.contains(id.as_str())).cloned().collect();
    let pods = core.store.state.pods.values();
    let over = pods.filter(|admitted| !sandboxes.contains_key(&admitted.sandbox));
    let over: BTreeSet<(String, String)> =
        over.map(|admitted| (admitted.pod.uid.clone(), admitted.sandbox.clone())).collect();
    for id in gone {
        ending::container_stopped(core, &id);
    }
    for (uid, sandbox) in over {
        ending::pod_stopped(core, &uid, &sandbox);
    }
    waiting::drop_imported(core, sandboxes);
}

/// Compares the state with the running containers: releases absent ones, adopts unknown ones unless another program has pinned them,
/// and returns the containers that the runtime must pin.
pub(crate) fn synchronize(
    core: &mut Core,
    containers: &[ContainerPlacementRequest],
    sandboxes: &BTreeMap<String, String>,
    complete: bool,
) -> SyncResult {
    // Containers that a rebuilt ledger does not contain may have been pinned by an earlier run. After an import of a kubelet's state,
    // containers that this kubelet had pinned are ours.
    let is_taken_over = core.store.is_rebuilt || waiting::imported(core).next().is_some();
    release_absent(core, containers, sandboxes, complete);
    let mut result = SyncResult::default();
    let is_theirs = |ask: &&ContainerPlacementRequest| {
        ask.is_placed_by_other_program && !is_taken_over && !core.store.state.containers.contains_key(&ask.id)
    };
    let (theirs, containers): (Vec<_>, Vec<_>) = containers.iter().partition(is_theirs);
    for ask in theirs {
        let (pod, container) = (&ask.pod.pod.name, &ask.name);
        tracing::info!(pod, container, "another program has pinned the container, which is not changed");
        result.foreign.push(ask.id.clone());
    }
    let mut placed = Vec::new();
    let mut change = core.begin();
    for &ask in &containers {
        let known = change.store.state.containers.get(&ask.id).cloned();
        placed.push(if let Some(known) = known {
            waiting::update_known(change.core(), ask, &known)
        } else {
            let (placed, fits) = waiting::adopt_container(change.core(), ask);
            let reason = if fits { UnpinnedReason::Away } else { UnpinnedReason::DoesNotFit };
            // A container without a claim needs no guarantee.
            if ask.has_claim() {
                result.unpinned.push((ask.id.clone(), reason));
            }
            placed
        });
    }
    if let Err(error) = change.store() {
        tracing::error!(%error, "the running containers could not be adopted");
        return SyncResult::default();
    }
    shared_pool::note_guarantees_changed(core);
    shared_claims::note_all_changed(core);
    // The shared pool is final only after all containers have been placed.
    for (ask, placed) in containers.into_iter().zip(&placed) {
        let settings = settings::container_settings(core, placed);
        let has_cpus = settings.cpus.is_none() || settings.cpus == ask.has.cpus;
        let is_throttled =
            settings.cpu_max == Some(Quota::Max) && matches!(ask.has.cpu_max, Some(Quota::Limited { .. }));
        if !has_cpus || is_throttled || (settings.mems.is_some() && settings.mems != ask.has.mems) {
            result.updates.push(Update { id: ask.id.clone(), settings });
        } else {
            result.unpinned.retain(|(id, reason)| *id != ask.id || *reason == UnpinnedReason::DoesNotFit);
        }
        if !core.bindings.is_bound(&ask.id) {
            core.bindings.await_bind(&ask.id, Instant::now());
        }
    }
    result
}
