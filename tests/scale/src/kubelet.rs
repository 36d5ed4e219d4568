//! Fake kubelets: they notice bound pods, prepare their claims, report them as running, and release them at the end.
//!
//! All hosts are in this process, and share one watch of pods. A refused pod stays bound, and is tried again when another pod has left the
//! host (`kubernetes.refused: wait`), until its time is over.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::StreamExt as _;
use k8s_openapi::api::{core::v1::Pod, resource::v1::ResourceClaim};
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt as _, watcher},
};
use numaward_engine::OwnerId;
use numaward_guarantee::claim;
use numaward_kube::{
    api::ApiMetrics,
    dra::{
        claim::{AllocationReader, ClaimPart},
        messages::ClaimId,
        slices::PublishedDevices,
    },
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{
    sync::{Notify, Semaphore, watch},
    time::sleep,
};

use crate::{
    host::{DeviceOrder, Host},
    load::{LABEL, LoadPod},
};

/// Namespace of all pods.
pub(crate) const NAMESPACE: &str = "default";
/// Maximum number of requests of the harness at a time.
const MAX_REQUESTS: usize = 32;
/// Maximum number of kept messages of a kind.
const MAX_MESSAGES: usize = 100;

/// State of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodState {
    /// Created, and not bound.
    Pending,
    /// Bound to a host, which has not admitted it.
    Bound,
    Running,
    Ended,
    /// Did not run within its time.
    GivenUp,
}

/// A created pod.
pub(crate) struct TrackedPod {
    pub(crate) pod: Arc<LoadPod>,
    pub(crate) created: Instant,
    pub(crate) bound: Option<Instant>,
    pub(crate) host: Option<usize>,
    pub(crate) state: PodState,
    pub(crate) is_refused: bool,
    /// The scheduler has bound the pod, or has reported that it found no host.
    pub(crate) is_tried: bool,
}

/// A host with its fake kubelet.
pub(crate) struct HostSlot {
    pub(crate) name: String,
    pub(crate) group: usize,
    pub(crate) books: Mutex<Host>,
    /// Notified when a pod has left.
    left: Notify,
    pub(crate) latest: watch::Sender<Option<Arc<PublishedDevices>>>,
    reader: AllocationReader,
}

impl HostSlot {
    pub(crate) fn new((name, group): (String, usize), host: Host, client: Client) -> Self {
        let reader = AllocationReader { client, node: name.clone(), metrics: ApiMetrics::default() };
        let (books, left, latest) = (Mutex::new(host), Notify::new(), watch::Sender::new(None));
        Self { name, group, books, left, latest, reader }
    }

    fn release(&self, owner: &OwnerId) {
        self.books.lock().release(owner);
        self.left.notify_waiters();
    }

    /// Publishes the devices if they have changed.
    pub(crate) fn publish(&self, order: DeviceOrder) {
        let devices = self.books.lock().devices(order);
        let now = Some(Arc::new(PublishedDevices { devices, ..PublishedDevices::default() }));
        self.latest.send_if_modified(|published| std::mem::replace(published, now.clone()) != now);
    }
}

/// Clock of the load, which can be stopped.
#[derive(Default)]
pub(crate) struct Clock {
    is_stopped: watch::Sender<bool>,
}

impl Clock {
    /// Stops or starts the clock.
    pub(crate) fn stop(&self, is_stopped: bool) {
        self.is_stopped.send_replace(is_stopped);
    }

    /// Waits until this time has passed, without the time in which the clock is stopped.
    pub(crate) async fn sleep(&self, mut left: Duration) {
        let mut stopped = self.is_stopped.subscribe();
        loop {
            // The sender lives as long as the clock: no error is possible.
            let _ = stopped.wait_for(|is_stopped| !is_stopped).await;
            let started = tokio::time::Instant::now();
            tokio::select! {
                () = sleep(left) => return,
                _ = stopped.wait_for(|is_stopped| *is_stopped) => left = left.saturating_sub(started.elapsed()),
            }
        }
    }
}

/// State of all fake kubelets.
pub(crate) struct Kubelets {
    pub(crate) client: Client,
    pub(crate) hosts: Vec<HostSlot>,
    pub(crate) by_name: BTreeMap<String, usize>,
    pub(crate) pods: Mutex<BTreeMap<String, TrackedPod>>,
    pub(crate) tick: Duration,
    pub(crate) clock: Clock,
    requests: Semaphore,
    pub(crate) failures: Mutex<Vec<String>>,
    pub(crate) reasons: Mutex<Vec<String>>,
}

impl Kubelets {
    pub(crate) fn new(client: Client, hosts: Vec<HostSlot>, tick: Duration) -> Self {
        let by_name = hosts.iter().enumerate().map(|(number, host)| (host.name.clone(), number)).collect();
        Self {
            client,
            hosts,
            by_name,
            pods: Mutex::default(),
            tick,
            clock: Clock::default(),
            requests: Semaphore::new(MAX_REQUESTS),
            failures: Mutex::default(),
            reasons: Mutex::default(),
        }
    }

    fn api<K>(&self) -> Api<DynamicObject>
    where
        K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>,
    {
        Api::namespaced_with(self.client.clone(), NAMESPACE, &ApiResource::erase::<K>(&()))
    }

    fn note(messages: &Mutex<Vec<String>>, message: String) {
        let mut messages = messages.lock();
        if messages.len() < MAX_MESSAGES {
            messages.push(message);
        }
    }

    /// Waits for the end of a request, of which there is a limited number at a time. A failure is noted.
    async fn request<T>(
        &self,
        what: &str,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Option<T> {
        let _permit = self.requests.acquire().await.ok()?;
        match request.await {
            Ok(answer) => Some(answer),
            Err(error) => {
                Self::note(&self.failures, format!("{what}: {error}"));
                None
            }
        }
    }

    fn ticks(&self, ticks: u64) -> Duration {
        self.tick.saturating_mul(u32::try_from(ticks).unwrap_or(u32::MAX))
    }

    /// Creates a pod, and gives it up if it does not run within its time.
    pub(crate) async fn create(self: Arc<Self>, pod: Arc<LoadPod>, template: Option<String>) {
        let name = pod.name().to_owned();
        let Ok(object) = serde_json::from_value(pod.object(template.as_deref())) else { return };
        let wait = self.ticks(pod.retry_after);
        let tracked = TrackedPod {
            pod,
            created: Instant::now(),
            bound: None,
            host: None,
            state: PodState::Pending,
            is_refused: false,
            is_tried: false,
        };
        self.pods.lock().insert(name.clone(), tracked);
        let api = self.api::<Pod>();
        if self
            .request(&format!("create {name}"), api.create(&PostParams::default(), &object))
            .await
            .is_none()
        {
            self.pods.lock().remove(&name);
            return;
        }
        self.clock.sleep(wait).await;
        let host = {
            let mut pods = self.pods.lock();
            let is_late =
                |tracked: &&mut TrackedPod| matches!(tracked.state, PodState::Pending | PodState::Bound);
            let Some(tracked) = pods.get_mut(&name).filter(is_late) else { return };
            tracked.state = PodState::GivenUp;
            tracked.host
        };
        if let Some(host) = host {
            // This ends its attempts.
            self.hosts[host].left.notify_waiters();
        }
        self.delete(&name).await;
    }

    /// Changes the state of a pod. Returns false if it has another state than `from`.
    fn change(&self, name: &str, from: PodState, to: PodState) -> bool {
        let mut pods = self.pods.lock();
        let tracked = pods.get_mut(name).filter(|tracked| tracked.state == from);
        tracked.map(|tracked| tracked.state = to).is_some()
    }

    async fn delete(&self, name: &str) {
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.request(&format!("delete {name}"), self.api::<Pod>().delete(name, &now)).await;
    }

    async fn report(&self, name: &str, status: Value) {
        let patch = Patch::Merge(json!({ "status": status }));
        let api = self.api::<Pod>();
        let parameters = PatchParams::default();
        let patching = api.patch_status(name, &parameters, &patch);
        self.request(&format!("report {name}"), patching).await;
    }

    /// Follows all pods until the task is dropped.
    pub(crate) async fn follow(self: Arc<Self>) {
        let config = watcher::Config::default().labels(LABEL);
        let events = watcher(self.api::<Pod>(), config).default_backoff();
        let mut events = std::pin::pin!(events);
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => self.notice(&pod),
                Ok(_) => {}
                Err(error) => Self::note(&self.failures, format!("watch of pods: {error}")),
            }
        }
    }

    /// Returns true if the scheduler has not tried all pods.
    pub(crate) fn is_behind(&self) -> bool {
        let is_untried = |tracked: &TrackedPod| tracked.state == PodState::Pending && !tracked.is_tried;
        self.pods.lock().values().any(is_untried)
    }

    /// Starts the work on a pod that has been bound.
    fn notice(self: &Arc<Self>, object: &DynamicObject) {
        let Some(name) = object.metadata.name.clone() else { return };
        let node = object.data["spec"]["nodeName"].as_str();
        let (pod, host) = {
            let mut pods = self.pods.lock();
            let Some(tracked) = pods.get_mut(&name) else { return };
            tracked.is_tried |= is_tried(&object.data);
            let host = node.and_then(|node| self.by_name.get(node)).copied();
            let Some(host) = host.filter(|_| tracked.state == PodState::Pending) else { return };
            (tracked.state, tracked.bound, tracked.host) =
                (PodState::Bound, Some(Instant::now()), Some(host));
            (tracked.pod.clone(), host)
        };
        let claim = object.data["status"]["resourceClaimStatuses"][0]["resourceClaimName"].as_str();
        tokio::spawn(self.clone().run(host, pod, claim.map(str::to_owned)));
    }

    async fn run(self: Arc<Self>, host: usize, pod: Arc<LoadPod>, claim: Option<String>) {
        let name = pod.name();
        let parts = if pod.claim.is_some() {
            let Some(claim) = self.read(&self.hosts[host], name, claim).await else { return };
            Some(claim)
        } else {
            None
        };
        let Some(owner) = self.attempt(&self.hosts[host], &pod, parts).await else { return };
        let ready = json!([{ "type": "Ready", "status": "True" }]);
        self.report(name, json!({ "phase": "Running", "conditions": ready })).await;
        self.clock.sleep(self.ticks(pod.life)).await;
        // The kubelet unprepares the claims of a pod before it reports the end.
        self.hosts[host].release(&owner);
        self.change(name, PodState::Running, PodState::Ended);
        self.report(name, json!({ "phase": "Succeeded" })).await;
        self.delete(name).await;
    }

    /// Reads the allocation of a pod's claim. A claim that cannot be read counts as refused.
    async fn read(
        &self,
        host: &HostSlot,
        pod: &str,
        claim: Option<String>,
    ) -> Option<(String, Vec<ClaimPart>)> {
        let read = async {
            let claim = claim.ok_or_else(|| "the pod has no claim in its status".to_owned())?;
            let api = self.api::<ResourceClaim>();
            let found = self.request(&format!("get {claim}"), api.get(&claim)).await;
            let uid = found.and_then(|found| found.metadata.uid).ok_or("the claim cannot be read")?;
            let id = ClaimId { namespace: NAMESPACE.to_owned(), uid: uid.clone(), name: claim };
            let allocated = host.reader.read(&id).await.map_err(|error| error.to_string())?;
            Ok::<_, String>((uid, allocated.parts))
        };
        match read.await {
            Ok(read) => Some(read),
            Err(reason) => {
                self.refuse(pod, &host.name, &reason);
                None
            }
        }
    }

    /// Notes the first refusal of a pod.
    fn refuse(&self, pod: &str, host: &str, reason: &str) {
        let mut pods = self.pods.lock();
        let tracked = pods.get_mut(pod).filter(|tracked| !tracked.is_refused);
        if let Some(tracked) = tracked {
            tracked.is_refused = true;
            Self::note(&self.reasons, format!("{pod} on {host}: {reason}"));
        }
    }

    /// Has the host decide on a pod, and again each time a pod has left, until the pod runs or is given up. Returns the owner in the books
    /// of a running pod.
    async fn attempt(
        &self,
        host: &HostSlot,
        pod: &LoadPod,
        parts: Option<(String, Vec<ClaimPart>)>,
    ) -> Option<OwnerId> {
        loop {
            let mut left = std::pin::pin!(host.left.notified());
            // Before the decision, so that no pod leaves unnoticed.
            left.as_mut().enable();
            if self.pods.lock().get(pod.name())?.state != PodState::Bound {
                return None;
            }
            let decided = {
                let mut books = host.books.lock();
                match &parts {
                    Some((uid, parts)) => {
                        books.reserve(uid, parts, &pod.requests()).map(|()| claim::owner(uid))
                    }
                    None => books.admit(&pod.request).map(|()| pod.request.owner.clone()),
                }
            };
            match decided {
                Ok(owner) if self.change(pod.name(), PodState::Bound, PodState::Running) => {
                    return Some(owner);
                }
                // It was given up during the decision.
                Ok(owner) => {
                    host.release(&owner);
                    return None;
                }
                Err(reason) => self.refuse(pod.name(), &host.name, &reason),
            }
            left.await;
        }
    }

    /// Returns all claims.
    pub(crate) async fn claims(&self) -> Option<Vec<Value>> {
        let api = self.api::<ResourceClaim>();
        let list = self.request("list claims", api.list(&kube::api::ListParams::default())).await?;
        list.items.into_iter().map(|claim| serde_json::to_value(claim).ok()).collect()
    }
}

/// Returns true if the scheduler has bound this pod, or has found no host for it.
fn is_tried(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|condition| condition["type"] == "PodScheduled")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tried_pods_have_a_condition() {
        let pod = |conditions: Value| json!({ "status": { "conditions": conditions } });
        assert!(!is_tried(&json!({})));
        assert!(!is_tried(&pod(json!([{ "type": "Ready", "status": "False" }]))));
        assert!(is_tried(&pod(
            json!([{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable" }])
        )));
    }

    #[tokio::test(start_paused = true)]
    async fn stopped_clock_adds_to_no_time() {
        let clock = Arc::new(Clock::default());
        let started = tokio::time::Instant::now();
        let (sleeper, late) = (clock.clone(), clock.clone());
        let sleeping = tokio::spawn(async move { sleeper.sleep(Duration::from_secs(10)).await });
        sleep(Duration::from_secs(4)).await;
        clock.stop(true);
        let late = tokio::spawn(async move { late.sleep(Duration::from_secs(1)).await });
        sleep(Duration::from_secs(100)).await;
        assert!(!sleeping.is_finished() && !late.is_finished());
        clock.stop(false);
        late.await.unwrap();
        assert_eq!(started.elapsed().as_secs(), 105);
        sleeping.await.unwrap();
        assert_eq!(started.elapsed().as_secs(), 110);
    }
}
