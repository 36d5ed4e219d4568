//! Pods that are refused, until a container of them is created or they are gone.
//!
//! A sandbox is never refused: containerd 2.0 to 2.3 keeps its process and its name, and does not start again afterwards. So a
//! pod that is not admitted with its sandbox is refused with its first container, if that is still so then.
//!
//! With `kubernetes.refused: evict`, pods that stay refused are [`Refusals::to_evict`]. A pod of which a container was ever created
//! is none of them: what runs is not ended for room.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use numaward_config::{
    Interval,
    kubernetes::{Kubernetes, WhenRefused},
};
use numaward_kube::{
    nri::types::{Pod, Snapshot},
    pod::PodId,
};
use parking_lot::Mutex;

use super::request::id_of;

/// What becomes of a pod that is refused and waits.
const WAITS: &str = "The kubelet tries again on this node, and the scheduler does not move the pod.";

/// What is known of the pods of this host. Clones share it.
#[derive(Clone, Debug)]
pub struct Refusals {
    pods: Arc<Mutex<BTreeMap<String, Known>>>,
    evicted_after: Option<Duration>,
}

/// What is known of a pod.
#[derive(Debug, Default)]
struct Known {
    /// It has a sandbox, and was not admitted with it.
    is_not_admitted: bool,
    /// A container of it was created, at any time.
    has_containers: bool,
    /// As which of all it was refused first, if another host could have room for it.
    refused: Option<(usize, PodId)>,
}

impl Refusals {
    /// None yet.
    pub fn new(config: &Kubernetes) -> Self {
        let evicted_after = match config.refused {
            WhenRefused::Wait => None,
            WhenRefused::Evict => Some(config.refused_after.0),
        };
        Self { pods: Arc::default(), evicted_after }
    }

    /// The pods that are to be evicted, and how long after they are found here; those first that were refused first.
    pub fn to_evict(&self) -> Vec<(PodId, Duration)> {
        let Some(after) = self.evicted_after else { return Vec::new() };
        let pods = self.pods.lock();
        let refused = pods.values().filter(|known| !known.has_containers);
        let mut refused: Vec<_> = refused.filter_map(|known| known.refused.clone()).collect();
        refused.sort();
        refused.into_iter().map(|(_, id)| (id, after)).collect()
    }

    /// What becomes of a pod that is refused for this reason, in a sentence.
    pub(super) fn outlook(&self, reason: &str) -> String {
        match self.evicted_after.filter(|_| is_for_room(reason)) {
            None => WAITS.to_owned(),
            Some(after) => format!(
                "The kubelet tries again on this node. If that is refused for {}, the pod is evicted, unless nothing would make it \
                 anew elsewhere.",
                Interval(after)
            ),
        }
    }

    /// Whether a pod has a sandbox and was not admitted.
    pub(super) fn is_not_admitted(&self, uid: &str) -> bool {
        self.pods.lock().get(uid).is_some_and(|known| known.is_not_admitted)
    }

    /// A pod has a sandbox, and is not admitted.
    pub(super) fn not_admitted(&self, uid: String) {
        self.pods.lock().entry(uid).or_default().is_not_admitted = true;
    }

    /// A pod is admitted after all.
    pub(super) fn admitted(&self, uid: &str) {
        if let Some(known) = self.pods.lock().get_mut(uid) {
            known.is_not_admitted = false;
        }
    }

    /// A container of a pod is refused, or the pod with its first one.
    pub(super) fn refused(&self, pod: &Pod, reason: &str) {
        if self.evicted_after.is_none() || !is_for_room(reason) {
            return;
        }
        let mut pods = self.pods.lock();
        let latest =
            pods.values().filter_map(|known| known.refused.as_ref()).map(|(number, _)| *number).max();
        let number = latest.map_or(0, |latest| latest.saturating_add(1));
        let known = pods.entry(pod.uid.clone()).or_default();
        known.refused.get_or_insert_with(|| (number, id_of(pod)));
    }

    /// A container of a pod is created.
    pub(super) fn created(&self, uid: String) {
        self.pods.lock().entry(uid).or_default().has_containers = true;
    }

    /// A pod has no sandbox any more.
    pub(super) fn gone(&self, uid: &str) {
        self.pods.lock().remove(uid);
    }

    /// The runtime says what there is.
    pub(super) fn compare(&self, snapshot: &Snapshot) {
        let mut pods = self.pods.lock();
        if snapshot.unreadable == 0 {
            pods.retain(|uid, _| snapshot.pods.values().any(|pod| pod.uid == *uid));
        }
        let created = snapshot.containers.iter().filter_map(|container| snapshot.pods.get(&container.pod_id));
        for pod in created {
            pods.entry(pod.uid.clone()).or_default().has_containers = true;
        }
    }
}

/// Whether a refusal for this reason, one of the kubelet's, is for what is free: another host may have it.
fn is_for_room(reason: &str) -> bool {
    matches!(reason, "TopologyAffinityError" | "UnexpectedAdmissionError")
}
