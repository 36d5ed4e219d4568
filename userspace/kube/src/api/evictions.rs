//! Evictions of pods that cannot get their resources on this host, or that block the guarantees of other pods.
//!
//! # Problem
//! Three kinds of pods are better off on another host, where their controllers can create them again ([`EvictionReason`]):
//!
//! - A container started without numaward, and its CPUs or memory are not free. It runs in the shared pool until they are.
//! - A pod without a guarantee uses memory on a node that may soon not have enough for its guarantees.
//! - A pod is refused on this host; another host may admit it.
//!
//! # Algorithm
//! The list of such pods is polled. A pod that stays in it for a while gets an event, and the API server is asked for its eviction. A
//! `PodDisruptionBudget` can block the eviction; then the next pod of the list is tried. After an eviction, no further pod is evicted
//! until the evicted one has ended, and for a pause afterwards; the same holds for listed pods that are being deleted. A pod may end
//! slowly (`terminationGracePeriodSeconds`), so ends are awaited for a limited time, together. A pod that runs without its claim and may not be evicted gets an event
//! that gives the reason.
//!
//! # Invariants
//! - At most one pod is being evicted at a time, unless its end takes longer than [`EvictionTiming::max_wait`].
//! - Any number of pods with slow ends delays the next eviction by that time at most.
//! - The eviction names the UID, so a new pod of the same name is never evicted instead.
//! - A pod is evicted only if a controller creates it again, possibly on another host.
//! - On a node that is short of memory, no pod is evicted while a pod that uses more memory there cannot be evicted, whatever the classes
//!   of the two. The eviction would not help, and the owner of the larger pod could choose which other pods are evicted.
//! - A refused pod is evicted only if none of its containers has ever been created.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use kube::{Client, core::Status};
use numaward_config::{Interval, kubernetes::Kubernetes};
use numaward_topology::{Bytes, NodeId};
use serde_json::json;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::{
    ApiMetrics, Cause, EventRecorder, Pods, Report, RequestError, StoredPod,
    metrics::{Eviction, Operation},
};
use crate::pod::{Notice, PodId, PodSource as _};

/// Reason of the event on a pod that runs without its claim and is not evicted.
const NOT_EVICTED: &str = "NumaPlacementMissing";

/// Reason why a pod is to be evicted. The text is the start of the event's message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum EvictionReason {
    /// A container was started without numaward, and its CPUs or memory are not free.
    #[display(
        "It runs without the CPUs or memory that it requests: it was started without numaward, and they are not free here"
    )]
    Unplaced,
    /// The pod has no guarantee, and uses memory on a node that may soon not have enough for its guarantees.
    #[display(
        "Node {node} may soon not have enough memory for its guarantees, and no further workload can be kept off it. \
         This pod has no guarantee and uses {has} there"
    )]
    NodeShort {
        node: NodeId,
        /// Memory of the pod on the node that the kernel cannot drop.
        has: Bytes,
    },
    /// All containers of the pod are refused here.
    #[display("It has been refused on this node for {}", Interval(*after))]
    Refused {
        /// Time for which the pod must have been refused.
        after: Duration,
    },
}

impl EvictionReason {
    /// Returns the reason of the event on the evicted pod.
    fn event(self) -> &'static str {
        match self {
            Self::Unplaced => "NumaPlacementEviction",
            Self::NodeShort { .. } => "NumaNodeShortEviction",
            Self::Refused { .. } => "NumaRefusalEviction",
        }
    }

    /// Returns the value of the label `reason` in metrics.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Unplaced => "unplaced",
            Self::NodeShort { .. } => "node_short",
            Self::Refused { .. } => "refused",
        }
    }

    /// Returns the component of the manifests that grants the right to evict, and the value of the chart that does.
    fn component(self) -> &'static str {
        match self {
            Self::Unplaced => "the component evict-unpinned, or evictUnpinned.enabled of the chart",
            Self::NodeShort { .. } => "the component guard-evict, or guardEvict.enabled of the chart",
            Self::Refused { .. } => {
                "overlays/enforce/rbac.yaml, or evictRefused.enabled of the chart; without the right, set \
                 kubernetes.refused: wait"
            }
        }
    }

    /// Returns the time for which a pod must have been listed. Zero for `NodeShort`, because the guard waits before it lists a pod.
    fn delay(self, timing: &EvictionTiming) -> Duration {
        match self {
            Self::Unplaced => timing.unplaced_delay,
            Self::NodeShort { .. } => Duration::ZERO,
            Self::Refused { after } => after,
        }
    }
}

/// Intervals and delays of evictions.
#[derive(Clone, Copy, Debug)]
pub struct EvictionTiming {
    /// Interval at which the list of pods is polled.
    pub poll_interval: Duration,
    /// Time for which a pod may run without its claim.
    pub unplaced_delay: Duration,
    /// Minimum time between the end of an evicted pod and the next eviction.
    pub pause_after_eviction: Duration,
    /// Maximum time for which the ends of evicted and deleted pods are awaited.
    pub max_wait: Duration,
    /// Minimum time between two requests. For the same pod, each request doubles the delay until the next one.
    pub retry_delay: Duration,
    /// Maximum delay between two requests for the same pod.
    pub max_retry_delay: Duration,
}

impl Default for EvictionTiming {
    fn default() -> Self {
        Self {
            poll_interval: Duration::from_secs(1),
            unplaced_delay: Duration::from_secs(30),
            pause_after_eviction: Duration::from_secs(30),
            max_wait: Duration::from_mins(10),
            retry_delay: Duration::from_secs(10),
            max_retry_delay: Duration::from_mins(5),
        }
    }
}

/// Function that returns the pods to evict, in the order of eviction.
pub type EvictionSource = Arc<dyn Fn() -> Vec<(PodId, EvictionReason)> + Send + Sync>;

/// Evicts the pods that [`to_evict`](Self::to_evict) lists.
pub struct Evictor {
    /// The pods of this Kubernetes node.
    pub pods: Pods,
    pub to_evict: EvictionSource,
    /// The present settings. No pod is evicted in `placement_off_namespaces`.
    pub kubernetes: watch::Receiver<Kubernetes>,
    /// UID of the daemon's own pod, if known.
    pub own_pod: Option<String>,
    pub timing: EvictionTiming,
    pub metrics: ApiMetrics,
    /// Called with the result of each request, and with `Ok` when no pod is listed any more after an error.
    pub report: Report,
}

/// Reason why a pod is not evicted.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
enum KeepReason {
    #[display("it is a static pod, which the kubelet would start here again")]
    Static,
    #[display("the DaemonSet {_0} would start it here again")]
    DaemonSet(String),
    #[display("the Job {_0} would count it as failed")]
    Job(String),
    #[display("no controller would create it again")]
    Bare,
    #[display("it is numaward's own pod")]
    Own,
    #[display("its namespace {_0} is one of kubernetes.placementOffNamespaces")]
    Namespace(String),
    #[display("it has the priority of a pod that is critical for the cluster or the node")]
    Critical,
    #[display("one of its containers has been created before")]
    HasContainers,
}

/// State of a listed pod.
struct ListedPod {
    /// Time of the next request.
    due: Instant,
    /// Delay after the next request.
    retry_delay: Duration,
    /// True if the pod has its event.
    is_announced: bool,
    /// True if no further request is necessary: the pod is gone, or it is not evicted.
    is_done: bool,
    /// True if the last request was blocked, for example by a `PodDisruptionBudget`, or failed.
    is_blocked: bool,
}

impl Evictor {
    /// Evicts pods until the token is cancelled. `node` is the name of this Kubernetes node.
    pub fn run(self, client: Client, node: String, stop: CancellationToken) -> BoxFuture<'static, ()> {
        async move {
            let recorder = EventRecorder::new(client.clone(), &node, self.metrics.clone());
            let eviction_loop = EvictionLoop {
                evictor: self,
                client,
                recorder,
                candidates: BTreeMap::new(),
                evicted: None,
                waits_since: None,
                overdue: BTreeSet::new(),
                next: Instant::now(),
                is_failing: false,
            };
            stop.run_until_cancelled(eviction_loop.run()).await;
        }
        .boxed()
    }

    /// Returns the reason why the pod is not evicted, if there is one.
    fn keep_reason(&self, stored: &StoredPod, why: EvictionReason) -> Option<KeepReason> {
        let pod = &stored.pod;
        // A critical pod takes precedence over guarantees. Without its own claim, it is better off if it is created again.
        if stored.is_critical && matches!(why, EvictionReason::NodeShort { .. }) {
            return Some(KeepReason::Critical);
        }
        if matches!(why, EvictionReason::Refused { .. })
            && (stored.is_running || !stored.container_ids.is_empty())
        {
            return Some(KeepReason::HasContainers);
        }
        if self.own_pod.as_ref() == Some(&pod.id.uid) {
            return Some(KeepReason::Own);
        }
        if self.kubernetes.borrow().placement_off_namespaces.contains(&pod.id.namespace) {
            return Some(KeepReason::Namespace(pod.id.namespace.clone()));
        }
        match &stored.controller {
            _ if pod.id.uid != pod.api_uid => Some(KeepReason::Static),
            None => Some(KeepReason::Bare),
            Some(controller) if controller.kind == "Node" => Some(KeepReason::Static),
            Some(controller) if controller.kind == "DaemonSet" => {
                Some(KeepReason::DaemonSet(controller.name.clone()))
            }
            // A Job counts evicted pods as failed, and fails after `backoffLimit` of them. A pod that stays may still start later.
            Some(controller) if controller.kind == "Job" && matches!(why, EvictionReason::Refused { .. }) => {
                Some(KeepReason::Job(controller.name.clone()))
            }
            Some(_) => None,
        }
    }
}

struct EvictionLoop {
    evictor: Evictor,
    client: Client,
    recorder: EventRecorder,
    /// State of the listed pods, by UID.
    candidates: BTreeMap<String, ListedPod>,
    /// The pod that was evicted last, until it has ended.
    evicted: Option<PodId>,
    /// The time since which the ends of pods are awaited and no pod is evicted.
    waits_since: Option<Instant>,
    /// Pods with slow ends, which are not awaited any more.
    overdue: BTreeSet<PodId>,
    /// Earliest time of the next request.
    next: Instant,
    /// True if the last request failed, and the error was reported.
    is_failing: bool,
}

impl EvictionLoop {
    async fn run(mut self) {
        loop {
            sleep(self.evictor.timing.poll_interval).await;
            let listed = (self.evictor.to_evict)();
            self.candidates.retain(|uid, _| listed.iter().any(|(id, _)| id.uid == *uid));
            let Evictor { timing, report, .. } = &self.evictor;
            // The pods that could not be evicted are not listed any more, so the error is over.
            if self.candidates.is_empty() && std::mem::take(&mut self.is_failing) {
                report(Ok(()));
            }
            let now = Instant::now();
            for (id, why) in &listed {
                let due = now + why.delay(timing);
                self.candidates.entry(id.uid.clone()).or_insert(ListedPod {
                    due,
                    retry_delay: timing.retry_delay,
                    is_announced: false,
                    is_done: false,
                    is_blocked: false,
                });
            }
            if self.waits(&listed) {
                self.next = now + self.evictor.timing.pause_after_eviction;
                continue;
            }
            self.evicted = None;
            // Without a current list from the API server, the pods may be gone already.
            if now < self.next || !self.evictor.pods.is_synced() {
                continue;
            }
            self.waits_since = None;
            let mut evictable = BTreeSet::new();
            for (id, why) in &listed {
                // A request of this round has failed.
                if Instant::now() < self.next {
                    break;
                }
                if !self.is_due(id) {
                    continue;
                }
                if let Some(larger) = self.larger_kept_pod(&listed, *why, &mut evictable).await {
                    tracing::debug!(pod = %id, %larger, "a pod is not evicted: a larger pod on the same node cannot be evicted");
                } else if self.try_evict(id, *why).await {
                    break;
                }
            }
        }
    }

    /// Returns the evicted pod, and listed pods that are being deleted for any reason, until they have ended. They free resources, so no
    /// further eviction may be necessary.
    fn ending(&self, listed: &[(PodId, EvictionReason)]) -> BTreeSet<PodId> {
        let is_ending = |id: &PodId| {
            let stored = self.evictor.pods.get(id).filter(|stored| !stored.pod.is_terminal);
            stored.is_some_and(|stored| stored.is_leaving || self.evicted.as_ref() == Some(id))
        };
        let pods = listed.iter().map(|(id, _)| id).chain(&self.evicted);
        pods.filter(|id| is_ending(id)).cloned().collect()
    }

    /// Returns true while the end of a pod is awaited.
    fn waits(&mut self, listed: &[(PodId, EvictionReason)]) -> bool {
        // A pod may be listed again.
        let pods = &self.evictor.pods;
        self.overdue.retain(|id| pods.get(id).is_some());
        let ending = self.ending(listed);
        if ending.is_subset(&self.overdue) {
            return false;
        }
        let limit = self.evictor.timing.max_wait;
        if self.waits_since.get_or_insert_with(Instant::now).elapsed() < limit {
            return true;
        }
        for pod in ending.difference(&self.overdue) {
            tracing::warn!(%pod, "a pod that is being deleted has not ended; other pods are evicted meanwhile");
        }
        self.overdue.extend(ending);
        false
    }

    /// Returns whether a pod is to be evicted, and the time for the next request has come.
    fn is_due(&self, id: &PodId) -> bool {
        let candidate = self.candidates.get(&id.uid);
        candidate.is_some_and(|candidate| !candidate.is_done && Instant::now() >= candidate.due)
    }

    /// Returns a pod that uses more memory on the node than `why` says, and cannot be evicted. Pods that may be evicted later than smaller
    /// ones, because of their class, are asked for as a dry run, once in a round: `evictable` has the UIDs of those that passed.
    async fn larger_kept_pod(
        &mut self,
        listed: &[(PodId, EvictionReason)],
        why: EvictionReason,
        evictable: &mut BTreeSet<String>,
    ) -> Option<PodId> {
        let EvictionReason::NodeShort { node, has } = why else { return None };
        let is_larger = |other: EvictionReason| matches!(other, EvictionReason::NodeShort { node: at, has: more } if at == node && more > has);
        let mut larger = Vec::new();
        for (id, other) in listed.iter().filter(|(_, other)| is_larger(*other)) {
            let Some(stored) = self.evictor.pods.get(id).filter(|stored| !stored.pod.is_terminal) else {
                continue;
            };
            let Some(candidate) = self.candidates.get(&id.uid) else { continue };
            let is_delayed = candidate.is_blocked && Instant::now() < candidate.due;
            if is_delayed || stored.is_leaving || self.evictor.keep_reason(&stored, *other).is_some() {
                return Some(id.clone());
            }
            larger.push((id, *other, stored));
        }
        for (id, other, stored) in larger {
            if evictable.contains(&id.uid) {
                continue;
            }
            match self.evict(&stored, "?dryRun=All").await {
                Err(error) if !matches!(error.cause, Cause::NotFound | Cause::Conflict) => {
                    self.record_result(id, other, Err(error));
                    return Some(id.clone());
                }
                _ => evictable.insert(id.uid.clone()),
            };
        }
        None
    }

    /// Requests the eviction of a pod that is due. Returns true if no further pod may be tried in this round.
    async fn try_evict(&mut self, id: &PodId, why: EvictionReason) -> bool {
        let may_go = |stored: &Arc<StoredPod>| !stored.pod.is_terminal && !stored.is_leaving;
        let Some(stored) = self.evictor.pods.get(id).filter(may_go) else { return false };
        let Some(candidate) = self.candidates.get_mut(&id.uid) else { return false };
        if let Some(keep) = self.evictor.keep_reason(&stored, why) {
            candidate.is_done = true;
            if why == EvictionReason::Unplaced {
                self.announce(&stored, NOT_EVICTED, format!("{why}. It is not evicted: {keep}.")).await;
            } else {
                tracing::info!(pod = %id, %why, reason = %keep, "a pod is not evicted");
            }
            return false;
        }
        if !std::mem::replace(&mut candidate.is_announced, true) {
            let controller = stored.controller.as_ref().map(ToString::to_string).unwrap_or_default();
            let message = format!("{why}. It is evicted, so that {controller} creates it again.");
            self.announce(&stored, why.event(), message).await;
        }
        // The API server may have taken long to answer the requests of this round. The pod may have got its resources meanwhile, the
        // node its memory, or another pod may have begun to leave.
        let listed = (self.evictor.to_evict)();
        if !listed.iter().any(|(listed, _)| listed == id) || !self.ending(&listed).is_subset(&self.overdue) {
            return true;
        }
        let answer = self.evict(&stored, "").await;
        self.record_result(id, why, answer);
        true
    }

    async fn announce(&self, stored: &StoredPod, reason: &str, message: String) {
        let id = stored.pod.id.clone();
        tracing::warn!(pod = %id, reason, note = message, "a pod cannot get its resources here, or blocks other pods");
        let notice = Notice { pod: id, reason: reason.to_owned(), message, is_warning: true };
        self.recorder.publish(&notice, Some(stored.pod.api_uid.clone())).await;
    }

    /// Requests the eviction of the pod with this UID. The function of the crate `kube` misspells `deleteOptions`, so that the API
    /// server would ignore the UID.
    async fn evict(&self, stored: &StoredPod, query: &str) -> Result<(), RequestError> {
        let PodId { namespace, name, .. } = &stored.pod.id;
        let body = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": stored.pod.api_uid}},
        });
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction{query}");
        let request = http::Request::post(path)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(body.to_string().into_bytes())
            .map_err(|error| RequestError::from(kube::Error::HttpError(error)))?;
        self.client.request::<Status>(request).await.map(drop).map_err(RequestError::from)
    }

    /// Counts and reports the result of a request, and schedules the next one.
    fn record_result(&mut self, id: &PodId, why: EvictionReason, answer: Result<(), RequestError>) {
        let Evictor { metrics, report, timing, .. } = &self.evictor;
        let Some(candidate) = self.candidates.get_mut(&id.uid) else { return };
        let now = Instant::now();
        self.next = now + timing.retry_delay;
        candidate.due = now + candidate.retry_delay;
        candidate.retry_delay = (candidate.retry_delay * 2).min(timing.max_retry_delay);
        let result = match &answer {
            Ok(()) => Eviction::Evicted,
            Err(error) => match error.cause {
                Cause::TooMany => Eviction::Blocked,
                // A conflict means that a pod of this name has another UID.
                Cause::NotFound | Cause::Conflict => Eviction::Gone,
                Cause::Forbidden => Eviction::Forbidden,
                _ => Eviction::Failed,
            },
        };
        metrics.evicted(why, result);
        candidate.is_blocked = matches!(result, Eviction::Blocked | Eviction::Forbidden | Eviction::Failed);
        self.is_failing = matches!(result, Eviction::Forbidden | Eviction::Failed);
        if let Err(error) = &answer
            && self.is_failing
        {
            metrics.failed(Operation::Evict, error);
        }
        match result {
            Eviction::Evicted => {
                (self.evicted, self.next) = (Some(id.clone()), now + timing.pause_after_eviction);
                candidate.due = now + timing.max_retry_delay;
                report(Ok(()));
            }
            Eviction::Gone => {
                candidate.is_done = true;
                report(Ok(()));
            }
            Eviction::Blocked => {
                report(Ok(()));
                tracing::info!(pod = %id, "the eviction of a pod is blocked, for example by a PodDisruptionBudget; it is tried again");
            }
            Eviction::Forbidden => {
                // The right is missing for all pods.
                self.next = now + timing.max_retry_delay;
                report(Err(format!(
                    "pods cannot be evicted: the service account needs the verb create of the resource pods/eviction ({})",
                    why.component()
                )));
            }
            Eviction::Failed => {
                let problem = answer.err().map(|error| error.to_string()).unwrap_or_default();
                report(Err(format!("pod {id} cannot be evicted: {problem}")));
            }
        }
    }
}

/// Controller that creates a pod again after its end.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("the {kind} {name}")]
pub struct Controller {
    pub kind: String,
    pub name: String,
}
