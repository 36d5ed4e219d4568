//! Evictions of pods that are in the wrong place, so that their controllers make them anew.
//!
//! Problem: a container that was started without us, and whose CPUs or memory are not there, shares what is nobody's
//! until something becomes free. Where that is worse than a restart, its pod is to go. So is one without a guarantee
//! whose memory is in the way of what is promised on a node, and one that is refused here and may be admitted
//! elsewhere ([`EvictionReason`]).
//!
//! Algorithm: which pods these are is looked at again and again. A pod that stays among them for a while gets an event, and
//! the API server is asked for its eviction, which a `PodDisruptionBudget` can put off: then the next one is tried. After an
//! eviction, the next one waits until that pod is gone, and for a pause after it. A pod that may not be evicted although it
//! runs without what it asks for gets an event that says why.
//!
//! Invariants: one pod at a time; only the pod that was looked at, by its UID; only one that its controller makes
//! again, and may make elsewhere; of pods in the way on a node, none while one that has more there cannot be evicted:
//! it would go in vain, and the owner of the other could choose which pods go; of refused pods, only those without a
//! container that was ever created.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use kube::{Client, core::Status};
use numaward_config::Interval;
use numaward_topology::{Bytes, NodeId};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::{
    ApiMetrics, Cause, EventRecorder, Pods, Report, RequestError, StoredPod,
    metrics::{Eviction, Operation},
};
use crate::pod::{Notice, PodId, PodSource as _};

const STAYS: &str = "NumaPlacementMissing";

/// Why a pod is to be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, derive_more::Display)]
pub enum EvictionReason {
    /// It was started without numaward, and what it asks for is not there.
    #[display(
        "It runs without the CPUs or memory that it asks for: it was started without numaward, and they are not free here"
    )]
    Unplaced,
    /// It has no guarantee, and is in the way of what is promised on a node.
    #[display(
        "Node {node} may soon not have what is promised on it, and nobody else can be kept off it. This pod has no \
         guarantee, and {has} there"
    )]
    NodeShort {
        /// The node.
        node: NodeId,
        /// What it has there that cannot be dropped.
        has: Bytes,
    },
    /// No container of it can be created here.
    #[display("It has been refused on this node for {}", Interval(*after))]
    Refused {
        /// For how long that must have been so.
        after: Duration,
    },
}

impl EvictionReason {
    /// The reason of the event of a pod that is evicted.
    fn event(self) -> &'static str {
        match self {
            Self::Unplaced => "NumaPlacementEviction",
            Self::NodeShort { .. } => "NumaNodeShortEviction",
            Self::Refused { .. } => "NumaRefusalEviction",
        }
    }

    /// The word for labels.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Unplaced => "unplaced",
            Self::NodeShort { .. } => "node_short",
            Self::Refused { .. } => "refused",
        }
    }

    /// What gives the right to evict.
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

    /// How long a pod must have been named for this. The guard has waited before it names one that is in the way.
    fn patience(self, pace: &EvictionTiming) -> Duration {
        match self {
            Self::Unplaced => pace.patience,
            Self::NodeShort { .. } => Duration::ZERO,
            Self::Refused { after } => after,
        }
    }
}

/// How fast pods are evicted.
#[derive(Clone, Copy, Debug)]
pub struct EvictionTiming {
    /// How often pods are looked for.
    pub look: Duration,
    /// How long a pod may run without what it asks for.
    pub patience: Duration,
    /// After a pod is gone.
    pub pause: Duration,
    /// After a request for any pod. Each refusal doubles the wait before the same pod is tried again.
    pub retry: Duration,
    /// The longest wait after a refusal.
    pub longest_retry: Duration,
}

impl Default for EvictionTiming {
    fn default() -> Self {
        Self {
            look: Duration::from_secs(1),
            patience: Duration::from_secs(30),
            pause: Duration::from_secs(30),
            retry: Duration::from_secs(10),
            longest_retry: Duration::from_mins(5),
        }
    }
}

/// Gives the pods that are to be evicted now, those first that are to go first.
pub type EvictionSource = Arc<dyn Fn() -> Vec<(PodId, EvictionReason)> + Send + Sync>;

/// Evicts pods.
pub struct Evictor {
    /// The pods of this Kubernetes node.
    pub pods: Pods,
    /// Those that are to be evicted.
    pub to_evict: EvictionSource,
    /// Namespaces whose pods stay.
    pub spared: BTreeSet<String>,
    /// The UID of the pod that this runs in, if it is known.
    pub own_pod: Option<String>,
    /// How fast.
    pub pace: EvictionTiming,
    /// What is counted.
    pub metrics: ApiMetrics,
    /// Whether it works.
    pub report: Report,
}

/// Why a pod stays.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
enum Stays {
    #[display("it is a static pod, which the kubelet starts here again")]
    Static,
    #[display("the DaemonSet {_0} would start it here again")]
    DaemonSet(String),
    #[display("the Job {_0} would count it as failed")]
    Job(String),
    #[display("no controller would make it again")]
    Bare,
    #[display("it is numaward's own")]
    Own,
    #[display("its namespace {_0} is one of kubernetes.placementOffNamespaces")]
    Spared(String),
    #[display("its priority is that of what the cluster needs")]
    Critical,
    #[display("a container of it was created before")]
    HasContainers,
}

/// A pod that is to be evicted.
struct Candidate {
    /// When to ask for its eviction.
    due: Instant,
    /// How long to wait after the next refusal.
    retry: Duration,
    /// Whether it has had its event.
    is_announced: bool,
    /// Whether it is settled: it is gone, or it stays.
    is_done: bool,
    /// Whether its eviction was refused the last time, as by a `PodDisruptionBudget`.
    is_refused: bool,
}

impl Evictor {
    /// Evicts pods until the token is cancelled. `node` is the name of this Kubernetes node.
    pub fn run(self, client: Client, node: String, stop: CancellationToken) -> BoxFuture<'static, ()> {
        async move {
            let recorder = EventRecorder::new(client.clone(), &node, self.metrics.clone());
            let evicting = Evicting {
                evictor: self,
                client,
                recorder,
                candidates: BTreeMap::new(),
                leaving: None,
                next: Instant::now(),
                is_failing: false,
            };
            stop.run_until_cancelled(evicting.run()).await;
        }
        .boxed()
    }

    /// Why a pod stays, if it does.
    fn stays(&self, stored: &StoredPod, why: EvictionReason) -> Option<Stays> {
        let pod = &stored.pod;
        // Made anew, it would have what it asks for; in the way of others, it is worth more than they are.
        if stored.is_critical && matches!(why, EvictionReason::NodeShort { .. }) {
            return Some(Stays::Critical);
        }
        if matches!(why, EvictionReason::Refused { .. })
            && (stored.is_running || !stored.container_ids.is_empty())
        {
            return Some(Stays::HasContainers);
        }
        if self.own_pod.as_ref() == Some(&pod.id.uid) {
            return Some(Stays::Own);
        }
        if self.spared.contains(&pod.id.namespace) {
            return Some(Stays::Spared(pod.id.namespace.clone()));
        }
        match &stored.controller {
            _ if pod.id.uid != pod.api_uid => Some(Stays::Static),
            None => Some(Stays::Bare),
            Some(controller) if controller.kind == "Node" => Some(Stays::Static),
            Some(controller) if controller.kind == "DaemonSet" => {
                Some(Stays::DaemonSet(controller.name.clone()))
            }
            // A Job fails after `backoffLimit` of them, where a pod that waits would have started later.
            Some(controller) if controller.kind == "Job" && matches!(why, EvictionReason::Refused { .. }) => {
                Some(Stays::Job(controller.name.clone()))
            }
            Some(_) => None,
        }
    }
}

struct Evicting {
    evictor: Evictor,
    client: Client,
    recorder: EventRecorder,
    /// By UID.
    candidates: BTreeMap<String, Candidate>,
    /// The pod that was evicted last, until it is gone.
    leaving: Option<PodId>,
    /// No pod is evicted before.
    next: Instant,
    /// Whether an eviction failed, which was reported.
    is_failing: bool,
}

impl Evicting {
    async fn run(mut self) {
        loop {
            sleep(self.evictor.pace.look).await;
            let listed = (self.evictor.to_evict)();
            self.candidates.retain(|uid, _| listed.iter().any(|(id, _)| id.uid == *uid));
            let Evictor { pods, pace, report, .. } = &self.evictor;
            // A pod that could not be evicted may have gone by itself.
            if self.candidates.is_empty() && std::mem::take(&mut self.is_failing) {
                report(Ok(()));
            }
            let now = Instant::now();
            for (id, why) in &listed {
                let due = now + why.patience(pace);
                self.candidates.entry(id.uid.clone()).or_insert(Candidate {
                    due,
                    retry: pace.retry,
                    is_announced: false,
                    is_done: false,
                    is_refused: false,
                });
            }
            // A pod that is leaving makes room, whatever the reason why it goes.
            let is_leaving = |id: &PodId| pods.get(id).is_some_and(|stored| stored.is_leaving);
            if self.leaving.as_ref().is_some_and(|id| pods.get(id).is_some())
                || listed.iter().any(|(id, _)| is_leaving(id))
            {
                self.next = now + pace.pause;
                continue;
            }
            self.leaving = None;
            // What is not known to be there may be gone already.
            if now < self.next || !pods.is_synced() {
                continue;
            }
            for (id, why) in &listed {
                if let Some(larger) = self.larger_that_stays(&listed, *why) {
                    tracing::debug!(pod = %id, %larger, "it is not evicted: a larger pod in the way cannot be evicted");
                } else if self.look_at(id, *why).await {
                    break;
                }
            }
        }
    }

    /// A pod that has more on the node than the one that is in the way there for this reason, and cannot be evicted.
    fn larger_that_stays<'a>(
        &self,
        listed: &'a [(PodId, EvictionReason)],
        why: EvictionReason,
    ) -> Option<&'a PodId> {
        let EvictionReason::NodeShort { node, has } = why else { return None };
        let is_larger = |other: EvictionReason| matches!(other, EvictionReason::NodeShort { node: at, has: more } if at == node && more > has);
        let stays = |id: &PodId, other: EvictionReason| {
            let known = self.evictor.pods.get(id).filter(|stored| !stored.pod.is_terminal);
            let is_refused = self.candidates.get(&id.uid).is_some_and(|of| of.is_refused);
            known.is_some_and(|stored| is_refused || self.evictor.stays(&stored, other).is_some())
        };
        listed.iter().find(|(id, other)| is_larger(*other) && stays(id, *other)).map(|(id, _)| id)
    }

    /// Evicts a pod, if it is to be evicted and its time has come; whether that was tried.
    async fn look_at(&mut self, id: &PodId, why: EvictionReason) -> bool {
        let Some(stored) = self.evictor.pods.get(id).filter(|stored| !stored.pod.is_terminal) else {
            return false;
        };
        let Some(candidate) = self.candidates.get_mut(&id.uid) else { return false };
        if candidate.is_done || Instant::now() < candidate.due {
            return false;
        }
        if let Some(stays) = self.evictor.stays(&stored, why) {
            candidate.is_done = true;
            if why == EvictionReason::Unplaced {
                self.announce(&stored, STAYS, format!("{why}. It is not evicted: {stays}.")).await;
            } else {
                tracing::info!(pod = %id, %why, reason = %stays, "it is not evicted");
            }
            return false;
        }
        if !std::mem::replace(&mut candidate.is_announced, true) {
            let controller = stored.controller.as_ref().map(ToString::to_string).unwrap_or_default();
            let message = format!("{why}. It is evicted, so that {controller} makes it anew.");
            self.announce(&stored, why.event(), message).await;
            // It may have got what it asks for meanwhile.
            if !(self.evictor.to_evict)().iter().any(|(listed, _)| listed == id) {
                return true;
            }
        }
        let answer = self.evict(&stored).await;
        self.note(id, why, answer);
        true
    }

    async fn announce(&self, stored: &StoredPod, reason: &str, message: String) {
        let id = stored.pod.id.clone();
        tracing::warn!(pod = %id, reason, note = message, "a pod is in the wrong place");
        let notice = Notice { pod: id, reason: reason.to_owned(), message, is_warning: true };
        self.recorder.publish(&notice, Some(stored.pod.api_uid.clone())).await;
    }

    /// Not by kube's own function, which spells `deleteOptions` wrong: the UID would be ignored.
    async fn evict(&self, stored: &StoredPod) -> Result<(), RequestError> {
        let PodId { namespace, name, .. } = &stored.pod.id;
        let body = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": stored.pod.api_uid}},
        });
        let request = http::Request::post(format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction"))
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(body.to_string().into_bytes())
            .map_err(|error| RequestError::from(kube::Error::HttpError(error)))?;
        self.client.request::<Status>(request).await.map(drop).map_err(RequestError::from)
    }

    /// Takes note of what came of it.
    fn note(&mut self, id: &PodId, why: EvictionReason, answer: Result<(), RequestError>) {
        let Evictor { metrics, report, pace, .. } = &self.evictor;
        let Some(candidate) = self.candidates.get_mut(&id.uid) else { return };
        let now = Instant::now();
        self.next = now + pace.retry;
        candidate.due = now + candidate.retry;
        candidate.retry = (candidate.retry * 2).min(pace.longest_retry);
        let result = match &answer {
            Ok(()) => Eviction::Evicted,
            Err(error) => match error.cause {
                Cause::TooMany => Eviction::Blocked,
                // In its place there may be another pod of this name.
                Cause::NotFound | Cause::Conflict => Eviction::Gone,
                Cause::Forbidden => Eviction::Forbidden,
                _ => Eviction::Failed,
            },
        };
        metrics.evicted(why, result);
        candidate.is_refused = matches!(result, Eviction::Blocked);
        self.is_failing = matches!(result, Eviction::Forbidden | Eviction::Failed);
        if let Err(error) = &answer
            && self.is_failing
        {
            metrics.failed(Operation::Evict, error);
        }
        match result {
            Eviction::Evicted => {
                (self.leaving, self.next) = (Some(id.clone()), now + pace.pause);
                candidate.due = now + pace.longest_retry;
                report(Ok(()));
            }
            Eviction::Gone => {
                candidate.is_done = true;
                report(Ok(()));
            }
            Eviction::Blocked => {
                report(Ok(()));
                tracing::info!(pod = %id, "its eviction is put off, as by a PodDisruptionBudget");
            }
            Eviction::Forbidden => {
                // Nor will another pod's be allowed.
                self.next = now + pace.longest_retry;
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

/// Who makes a pod anew.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("the {kind} {name}")]
pub struct Controller {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
}
