//! Evictions of pods that run without what they ask for, so that their controllers make them anew.
//!
//! Problem: a container that was started without us, and whose CPUs or memory are not there, shares what is nobody's until
//! something becomes free. Where that is worse than a restart, its pod is to go.
//!
//! Algorithm: what runs so is looked at again and again. A pod that stays so for a while gets an event, and the API server
//! is asked for its eviction, which a `PodDisruptionBudget` can put off. The next one waits until it is gone, and for a
//! pause after it. A pod that may not be evicted gets an event that says why.
//!
//! Invariants: one pod at a time; only the pod that was looked at, by its UID; only one that its controller makes again,
//! and may make elsewhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
    time::Duration,
};

use kube::{Client, core::Status};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::{
    ApiMetrics, Cause, EventRecorder, Pods, Report, RequestError, StoredPod,
    metrics::{Eviction, Operation},
};
use crate::pod::{Notice, PodId, PodSource as _};

const EVICTED: &str = "NumaPlacementEviction";
const STAYS: &str = "NumaPlacementMissing";
/// What is the matter with such a pod.
const WHY: &str = "It runs without the CPUs or memory that it asks for: it was started without numaward, and they are not free here";

/// How fast pods are evicted.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
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

impl Default for Pace {
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

/// Gives the pods that run without what they ask for.
pub type Unplaced = Arc<dyn Fn() -> Vec<PodId> + Send + Sync>;

/// Evicts pods.
pub struct Evictor {
    /// The pods of this Kubernetes node.
    pub pods: Pods,
    /// Those that run without what they ask for, now.
    pub unplaced: Unplaced,
    /// Namespaces whose pods stay.
    pub spared: BTreeSet<String>,
    /// The name of the pod that this runs in.
    pub own_pod: String,
    /// How fast.
    pub pace: Pace,
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
    #[display("no controller would make it again")]
    Bare,
    #[display("it is numaward's own")]
    Own,
    #[display("its namespace {_0} is one of kubernetes.placementOffNamespaces")]
    Spared(String),
}

/// A pod that runs without what it asks for.
struct Candidate {
    /// When to ask for its eviction.
    due: Instant,
    /// How long to wait after the next refusal.
    retry: Duration,
    /// Whether it has had its event.
    is_announced: bool,
    /// Whether it is settled: it is gone, or it stays.
    is_done: bool,
}

impl Evictor {
    /// Evicts pods until the token is cancelled. `node` is the name of this Kubernetes node.
    pub async fn run(self, client: Client, node: String, stop: CancellationToken) {
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

    /// Why a pod stays, if it does.
    fn stays(&self, stored: &StoredPod) -> Option<Stays> {
        let pod = &stored.pod;
        if pod.id.name == self.own_pod {
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
            let unplaced = (self.evictor.unplaced)();
            self.candidates.retain(|uid, _| unplaced.iter().any(|id| id.uid == *uid));
            let Evictor { pods, pace, report, .. } = &self.evictor;
            // A pod that could not be evicted may have gone by itself.
            if self.candidates.is_empty() && std::mem::take(&mut self.is_failing) {
                report(Ok(()));
            }
            let now = Instant::now();
            for id in &unplaced {
                let due = now + pace.patience;
                self.candidates.entry(id.uid.clone()).or_insert(Candidate {
                    due,
                    retry: pace.retry,
                    is_announced: false,
                    is_done: false,
                });
            }
            // A pod that is leaving makes room, whatever the reason why it goes.
            let is_leaving = |id: &PodId| pods.get(id).is_some_and(|stored| stored.is_leaving);
            if self.leaving.as_ref().is_some_and(|id| pods.get(id).is_some())
                || unplaced.iter().any(is_leaving)
            {
                self.next = now + pace.pause;
                continue;
            }
            self.leaving = None;
            // What is not known to be there may be gone already.
            if now < self.next || !pods.is_synced() {
                continue;
            }
            for id in &unplaced {
                if self.look_at(id).await {
                    break;
                }
            }
        }
    }

    /// Evicts a pod, if it is to be evicted and its time has come; whether that was tried.
    async fn look_at(&mut self, id: &PodId) -> bool {
        let Some(stored) = self.evictor.pods.get(id).filter(|stored| !stored.pod.is_terminal) else {
            return false;
        };
        let Some(candidate) = self.candidates.get_mut(&id.uid) else { return false };
        if candidate.is_done || Instant::now() < candidate.due {
            return false;
        }
        if let Some(why) = self.evictor.stays(&stored) {
            candidate.is_done = true;
            self.announce(&stored, STAYS, format!("{WHY}. It is not evicted: {why}.")).await;
            return false;
        }
        if !std::mem::replace(&mut candidate.is_announced, true) {
            let controller = stored.controller.as_ref().map(ToString::to_string).unwrap_or_default();
            let message = format!("{WHY}. It is evicted, so that {controller} makes it anew.");
            self.announce(&stored, EVICTED, message).await;
        }
        let answer = self.evict(&stored).await;
        self.note(id, answer);
        true
    }

    async fn announce(&self, stored: &StoredPod, reason: &str, message: String) {
        let id = stored.pod.id.clone();
        tracing::warn!(pod = %id, reason, note = message, "a pod runs without what it asks for");
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
    fn note(&mut self, id: &PodId, answer: Result<(), RequestError>) {
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
        metrics.evicted(result);
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
                report(Err(
                    "pods cannot be evicted: the service account needs the verb create of the resource pods/eviction \
                     (the component evict-unpinned, or evictUnpinned.enabled of the chart)"
                        .to_owned(),
                ));
            }
            Eviction::Failed => {
                let problem = answer.err().map(|error| error.to_string()).unwrap_or_default();
                report(Err(format!("pod {id} cannot be evicted: {problem}")));
            }
        }
    }
}

/// Who makes a pod anew.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Controller {
    /// Its kind.
    pub kind: String,
    /// Its name.
    pub name: String,
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} {}", self.kind, self.name)
    }
}
