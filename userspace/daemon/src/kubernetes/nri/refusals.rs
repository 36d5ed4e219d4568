//! Refused pods, until a container of them is created or they are gone.
//!
//! A sandbox is never refused: containerd 2.0 to 2.3 keeps its process and its name, and does not start again afterwards. A
//! pod that is not admitted with its sandbox is refused with its first container, unless it is admitted by then.
//!
//! With `kubernetes.refused: evict` or `make-room`, [`Refusals::to_evict`] returns the pods that stay refused. It never returns a pod with a
//! container that was ever created: a running workload is not ended to make room.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use numaward_config::{
    Interval,
    kubernetes::{Kubernetes, RefusedPolicy},
};
use numaward_guarantee::pod::is_for_room;
use numaward_kube::{
    nri::types::{Pod, Snapshot},
    pod::PodId,
};
use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::watch;

use super::request::id_of;

/// The part of a message about a refused pod that is not evicted.
const WAITING_NOTE: &str = "The kubelet tries again on this node, and the scheduler does not move the pod.";

/// The refused pods of this host; clones share them.
#[derive(Clone, Debug)]
pub struct Refusals {
    pods: Arc<Mutex<BTreeMap<String, PodRefusal>>>,
    /// The present settings.
    config: watch::Receiver<Kubernetes>,
    evicts: bool,
    makes_room: bool,
    /// The number of refused pods without a container.
    waiting: Gauge<u64, AtomicU64>,
}

/// The state of a pod.
#[derive(Debug, Default)]
struct PodRefusal {
    /// True if the pod has a sandbox and was not admitted with it.
    is_not_admitted: bool,
    /// True if a container was created at any time.
    has_containers: bool,
    /// True if a container was refused at any time.
    is_refused: bool,
    /// The position in the order of first refusals, if another host could have room for the pod.
    refused: Option<(usize, PodId)>,
}

impl Refusals {
    /// `is_native`: true if the strategy of this host is `native`, which can move workloads.
    pub fn new(config: watch::Receiver<Kubernetes>, is_native: bool) -> Self {
        let (policy, has_node) = {
            let config = config.borrow();
            (config.refused, config.node_name.is_some())
        };
        // Without the API server, no pod can be evicted.
        let evicts = policy != RefusedPolicy::Wait && has_node;
        let makes_room = policy == RefusedPolicy::MakeRoom && is_native;
        Self { pods: Arc::default(), config, evicts, makes_room, waiting: Gauge::default() }
    }

    /// Returns the same store, with this metric for the number of refused pods without a container.
    #[must_use]
    pub(super) fn counted_by(self, waiting: Gauge<u64, AtomicU64>) -> Self {
        Self { waiting, ..self }
    }

    fn count(&self, pods: &BTreeMap<String, PodRefusal>) {
        let waiting = pods.values().filter(|known| known.is_refused && !known.has_containers).count();
        self.waiting.set(waiting as u64);
    }

    pub fn evicts(&self) -> bool {
        self.evicts
    }

    /// Returns the time for which a pod must have been refused before it is evicted; `None` if no refused pod is evicted.
    fn evicted_after(&self) -> Option<Duration> {
        self.evicts.then(|| self.config.borrow().refused_after.0)
    }

    /// Returns the pods to evict, with the delay of the eviction, in the order of their first refusals.
    pub fn to_evict(&self) -> Vec<(PodId, Duration)> {
        let Some(after) = self.evicted_after() else { return Vec::new() };
        let pods = self.pods.lock();
        let refused = pods.values().filter(|known| !known.has_containers);
        let mut refused: Vec<_> = refused.filter_map(|known| known.refused.clone()).collect();
        refused.sort();
        refused.into_iter().map(|(_, id)| (id, after)).collect()
    }

    /// Returns a sentence on the future of a pod that is refused for this reason.
    pub(super) fn outlook(&self, reason: &str) -> String {
        let waiting = match self.evicted_after().filter(|_| is_for_room(reason)) {
            None => WAITING_NOTE.to_owned(),
            Some(after) => format!(
                "The kubelet tries again on this node. If that is refused for {}, the pod is evicted, unless it belongs \
                 to a Job or has no controller that would create it elsewhere.",
                Interval(after)
            ),
        };
        if self.makes_room && is_for_room(reason) {
            return format!(
                "Running workloads are moved to other nodes of this host if that makes room. {waiting}"
            );
        }
        waiting
    }

    /// Returns true if a pod has a sandbox and was not admitted.
    pub(super) fn is_not_admitted(&self, uid: &str) -> bool {
        self.pods.lock().get(uid).is_some_and(|known| known.is_not_admitted)
    }

    /// Records a pod with a sandbox that is not admitted.
    pub(super) fn not_admitted(&self, uid: String) {
        self.pods.lock().entry(uid).or_default().is_not_admitted = true;
    }

    /// Records that a pod is admitted after all.
    pub(super) fn admitted(&self, uid: &str) {
        if let Some(known) = self.pods.lock().get_mut(uid) {
            known.is_not_admitted = false;
        }
    }

    /// Records the refusal of a container, or of a pod with its first container.
    pub(super) fn refused(&self, pod: &Pod, reason: &str) {
        let mut pods = self.pods.lock();
        pods.entry(pod.uid.clone()).or_default().is_refused = true;
        self.count(&pods);
        if !self.evicts || !is_for_room(reason) {
            return;
        }
        let latest =
            pods.values().filter_map(|known| known.refused.as_ref()).map(|(number, _)| *number).max();
        let number = latest.map_or(0, |latest| latest.saturating_add(1));
        let known = pods.entry(pod.uid.clone()).or_default();
        known.refused.get_or_insert_with(|| (number, id_of(pod)));
    }

    /// Records the creation of a container.
    pub(super) fn created(&self, uid: String) {
        let mut pods = self.pods.lock();
        pods.entry(uid).or_default().has_containers = true;
        self.count(&pods);
    }

    /// Forgets a pod without a sandbox.
    pub(super) fn gone(&self, uid: &str) {
        let mut pods = self.pods.lock();
        pods.remove(uid);
        self.count(&pods);
    }

    /// Compares the records with the runtime's pods and containers.
    pub(super) fn compare(&self, snapshot: &Snapshot) {
        let mut pods = self.pods.lock();
        if snapshot.unreadable == 0 {
            pods.retain(|uid, _| snapshot.pods.values().any(|pod| pod.uid == *uid));
        }
        let created = snapshot.containers.iter().filter_map(|container| snapshot.pods.get(&container.pod_id));
        for pod in created {
            pods.entry(pod.uid.clone()).or_default().has_containers = true;
        }
        self.count(&pods);
    }
}
