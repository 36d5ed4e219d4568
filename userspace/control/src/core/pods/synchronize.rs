//! What runs, as the container runtime lists it after each connection.

use std::collections::{BTreeMap, BTreeSet};

use numaward_cgroup::knob::Quota;
use numaward_guarantee::pod::{ContainerPlacementRequest, SyncResult, UnpinnedReason, Update};

use crate::core::Core;

impl Core {
    /// Releases what is gone, where the runtime has listed all that runs.
    pub(super) fn drop_gone(
        &mut self,
        containers: &[ContainerPlacementRequest],
        sandboxes: &BTreeMap<String, String>,
        complete: bool,
    ) {
        if !complete {
            return;
        }
        let runs: BTreeSet<&str> = containers.iter().map(|ask| ask.id.as_str()).collect();
        // All of it before anything is released: while that waits, new pods and containers come.
        let gone: Vec<String> =
            self.store.state.containers.keys().filter(|id| !runs.contains(id.as_str())).cloned().collect();
        let pods = self.store.state.pods.values();
        let over = pods.filter(|admitted| !sandboxes.contains_key(&admitted.sandbox));
        let over: BTreeSet<(String, String)> =
            over.map(|admitted| (admitted.pod.uid.clone(), admitted.sandbox.clone())).collect();
        for id in gone {
            self.stopped(&id);
        }
        for (uid, sandbox) in over {
            self.pod_stopped(&uid, &sandbox);
        }
        self.drop_imported(sandboxes);
    }

    /// Compares with what runs: what is gone is released, what is not known is adopted unless somebody else has pinned it,
    /// what has no pins gets them.
    pub(crate) fn synchronize(
        &mut self,
        containers: &[ContainerPlacementRequest],
        sandboxes: &BTreeMap<String, String>,
        complete: bool,
    ) -> SyncResult {
        // What a rebuilt ledger does not know may have its pins from us. Those of a kubelet whose promises were taken over
        // are nobody's any more.
        let is_taken_over = self.store.is_rebuilt || self.imported().next().is_some();
        self.drop_gone(containers, sandboxes, complete);
        let mut result = SyncResult::default();
        let is_theirs = |ask: &&ContainerPlacementRequest| {
            ask.is_placed_by_other_program
                && !is_taken_over
                && !self.store.state.containers.contains_key(&ask.id)
        };
        let (theirs, containers): (Vec<_>, Vec<_>) = containers.iter().partition(is_theirs);
        for ask in theirs {
            let (pod, container) = (&ask.pod.pod.name, &ask.name);
            tracing::info!(pod, container, "somebody else has pinned it: it is left alone");
        }
        let mut placed = Vec::new();
        let mut change = self.begin();
        for &ask in &containers {
            let known = change.store.state.containers.get(&ask.id).cloned();
            placed.push(if let Some(known) = known {
                change.note_known(ask, &known)
            } else {
                let (placed, fits) = change.adopt_container(ask);
                let reason = if fits { UnpinnedReason::Away } else { UnpinnedReason::DoesNotFit };
                // What has no claim was to have nothing of its own.
                if ask.has_claim() {
                    result.unpinned.push((ask.id.clone(), reason));
                }
                placed
            });
        }
        if let Err(error) = change.store() {
            tracing::error!(%error, "what runs is not adopted");
            return SyncResult::default();
        }
        self.note_guarantees_changed();
        // The pool is only known when all have been placed.
        for (ask, placed) in containers.into_iter().zip(&placed) {
            let settings = self.settings_of(placed);
            let has_cpus = settings.cpus.is_none() || settings.cpus == ask.has.cpus;
            let is_throttled = settings.cpu_max == Some(Quota::Max)
                && matches!(ask.has.cpu_max, Some(Quota::Limited { .. }));
            if !has_cpus || is_throttled || (settings.mems.is_some() && settings.mems != ask.has.mems) {
                result.updates.push(Update { id: ask.id.clone(), settings });
            } else {
                result.unpinned.retain(|(id, reason)| *id != ask.id || *reason == UnpinnedReason::DoesNotFit);
            }
            if !self.pods.bound.contains(&ask.id) {
                self.await_bind(&ask.id);
            }
        }
        result
    }
}
