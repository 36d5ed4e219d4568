//! The pods of this Kubernetes node: kube's watcher fills kube's store, with no more of each pod than placement needs.
//!
//! The watcher lists the pods with `spec.nodeName` of this node, watches from there, resumes from the last version, and
//! lists again when that is gone (410). Added here is what it leaves to its user: pauses that grow while the server is
//! away, limits, metrics and reports. What is known is kept meanwhile.
//!
//! The pods *are synced* while a watch is open and everything up to it is known.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, StreamExt as _, future::BoxFuture};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
    runtime::{
        reflector::{Lookup, ObjectRef, Store, store::Writer},
        utils::Backoff as _,
        watcher::{self, DefaultBackoff, Event, watcher},
    },
};
use parking_lot::Mutex;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    ApiMetrics, Cause, EventWriter, Report, RequestError,
    convert::{self, StoredPod},
    limited,
    metrics::Operation,
};
use crate::pod::{Notice, Pod, PodId, PodSource};

/// Pods in one answer to a list.
pub(super) const PAGE: u32 = 250;
/// More pods than any Kubernetes node runs: further ones are ignored.
const MAX_PODS: usize = 4096;
/// Requests in a while, also to a server that closes each watch at once.
pub(super) const REQUESTS: (u64, Duration) = (20, Duration::from_secs(10));

/// The pods that are known. Clones know the same.
#[derive(Clone)]
pub struct Pods {
    store: Store<StoredPod>,
    writer: Arc<Mutex<Writer<StoredPod>>>,
    /// Whether they are synced. Notifies of every change of what is known.
    synced: watch::Sender<bool>,
    events: EventWriter,
}

/// The store keeps one pod of a name: the API server has no two at a time.
impl Lookup for StoredPod {
    type DynamicType = ();

    fn kind((): &()) -> Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "pods".into()
    }

    fn name(&self) -> Option<Cow<'_, str>> {
        Some(self.pod.id.name.as_str().into())
    }

    fn namespace(&self) -> Option<Cow<'_, str>> {
        Some(self.pod.id.namespace.as_str().into())
    }

    fn resource_version(&self) -> Option<Cow<'_, str>> {
        None
    }

    fn uid(&self) -> Option<Cow<'_, str>> {
        Some(self.pod.api_uid.as_str().into())
    }
}

impl Pods {
    /// None are known yet. Notices on them are given to `events`.
    pub fn new(events: EventWriter) -> Self {
        let writer = Writer::default();
        let (store, synced) = (writer.as_reader(), watch::Sender::new(false));
        Self { store, writer: Arc::new(Mutex::new(writer)), synced, events }
    }

    /// The pod that the container runtime knows by this namespace, name and UID.
    pub fn get(&self, id: &PodId) -> Option<Arc<StoredPod>> {
        let stored = self.store.get(&ObjectRef::new(&id.name).within(&id.namespace))?;
        (stored.pod.id.uid == id.uid).then_some(stored)
    }

    /// All pods, in no order, but for mirror pods that claim the UID of another pod, or one that several claim: the API
    /// server gives UIDs, and the hash of a mirror pod is what its author says. Nothing here
    /// says which of several is the static pod.
    pub fn all(&self) -> Vec<Arc<StoredPod>> {
        let mut pods = self.store.state();
        let is_mirror = |pod: &Pod| pod.id.uid != pod.api_uid;
        let given: HashSet<String> = pods.iter().map(|stored| stored.pod.api_uid.clone()).collect();
        let mut claims: HashMap<String, usize> = HashMap::new();
        for stored in pods.iter().filter(|stored| is_mirror(&stored.pod)) {
            *claims.entry(stored.pod.id.uid.clone()).or_default() += 1;
        }
        pods.retain(|stored| {
            let uid = &stored.pod.id.uid;
            !is_mirror(&stored.pod) || !given.contains(uid) && claims.get(uid) == Some(&1)
        });
        pods
    }

    /// Notifies of changes of what is known.
    pub fn changes(&self) -> watch::Receiver<bool> {
        self.synced.subscribe()
    }

    /// Follows the pods of `node` until the token is cancelled.
    pub fn follow(
        &self,
        client: Client,
        node: String,
        metrics: ApiMetrics,
        report: Report,
        stop: CancellationToken,
    ) -> BoxFuture<'_, ()> {
        async move {
            let follower = Follower { pods: self.clone(), node, metrics, report, listed: 0 };
            stop.run_until_cancelled(follower.run(client)).await;
        }
        .boxed()
    }
}

impl PodSource for Pods {
    fn pod(&self, id: &PodId) -> Option<Arc<Pod>> {
        self.get(id).map(|stored| stored.pod.clone())
    }

    fn is_synced(&self) -> bool {
        *self.synced.borrow()
    }

    fn notify(&self, notice: Notice) {
        let api_uid = self.get(&notice.pod).map(|stored| stored.pod.api_uid.clone());
        self.events.write(notice, api_uid);
    }
}

#[derive(Clone)]
struct Follower {
    pods: Pods,
    node: String,
    metrics: ApiMetrics,
    report: Report,
    /// How many pods the list that is being read has had.
    listed: usize,
}

impl Follower {
    async fn run(mut self, client: Client) {
        // The watcher does not say when a watch is open. It opens one only when the list before is complete.
        let follower = self.clone();
        let watching = move || {
            follower.set_synced(true);
            (follower.report)(Ok(()));
        };
        let resource = ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&());
        let api: Api<DynamicObject> = Api::all_with(limited(client, REQUESTS, watching), &resource);
        let config =
            watcher::Config::default().fields(&format!("spec.nodeName={}", self.node)).page_size(PAGE);
        let mut backoff = DefaultBackoff::default();
        loop {
            let mut events = pin!(watcher(api.clone(), config.clone()));
            while let Some(event) = events.next().await {
                match event {
                    Ok(event) => {
                        // A list that could be read does not make a good watch.
                        if matches!(event, Event::Apply(_) | Event::Delete(_)) {
                            backoff.reset();
                        }
                        self.apply(event);
                    }
                    Err(error) => {
                        let can_resume = self.failed(error);
                        sleep(backoff.next().unwrap_or_default()).await;
                        if !can_resume {
                            break;
                        }
                    }
                }
            }
        }
    }

    fn set_synced(&self, synced: bool) {
        self.metrics.synced.set(synced.into());
        self.pods.synced.send_if_modified(|now| std::mem::replace(now, synced) != synced);
    }

    /// Whether the watcher can go on from the last version. It would itself after any error, also from a version that
    /// is gone, and past an event that could not be read.
    fn failed(&self, error: watcher::Error) -> bool {
        use watcher::Error::{
            InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed,
        };
        let (is_start, is_open) = (matches!(error, WatchStartFailed(_)), matches!(error, WatchFailed(_)));
        let (operation, error) = match error {
            InitialListFailed(error) => (Operation::List, error.into()),
            WatchStartFailed(error) | WatchFailed(error) => (Operation::Watch, RequestError::from(error)),
            WatchError(status) => (Operation::Watch, RequestError::of_status(&status)),
            NoResourceVersion => {
                let message = "a list or a pod without a version".to_owned();
                (Operation::Watch, RequestError { cause: Cause::Malformed, message })
            }
        };
        match error.cause {
            Cause::Connection if is_open => {
                // It is opened again; if that fails, it is worth a report.
                tracing::debug!(%error, "the watch of pods broke");
                return true;
            }
            Cause::Gone => self.metrics.failed(operation, &error),
            _ => {
                self.set_synced(false);
                self.metrics.failed(operation, &error);
                (self.report)(Err(format!("pods cannot be read from the API server: {error}")));
            }
        }
        is_start && error.cause != Cause::Gone
    }

    fn apply(&mut self, event: Event<DynamicObject>) {
        self.listed = if matches!(event, Event::InitApply(_)) { self.listed + 1 } else { 0 };
        let event = match event {
            Event::Init => Some(Event::Init),
            Event::InitApply(object) => self.with_room(object).map(Event::InitApply),
            Event::InitDone => Some(Event::InitDone),
            Event::Apply(object) => self.with_room(object).map(Event::Apply),
            Event::Delete(object) => self.convert(object).map(Event::Delete),
        };
        let Some(event) = event else { return };
        self.pods.writer.lock().apply_watcher_event(&event);
        // A list changes nothing until it is complete.
        if !matches!(event, Event::Init | Event::InitApply(_)) {
            self.metrics.pods.set(i64::try_from(self.pods.store.len()).unwrap_or(i64::MAX));
            self.pods.synced.send_modify(|_| {});
        }
    }

    /// A pod that cannot be read is ignored; the others are not held up by it.
    fn convert(&self, object: DynamicObject) -> Option<StoredPod> {
        let stored = convert::pod(object, &self.node);
        let stored = stored.inspect_err(|error| {
            tracing::warn!(%error, "a pod from the API server is ignored");
            self.metrics.ignored.inc();
        });
        stored.ok()
    }

    /// So is one for which there is no room.
    fn with_room(&self, object: DynamicObject) -> Option<StoredPod> {
        let stored = self.convert(object)?;
        let before = self.listed.checked_sub(1).unwrap_or_else(|| self.pods.store.len());
        if before < MAX_PODS || self.pods.store.get(&stored.to_object_ref(())).is_some() {
            return Some(stored);
        }
        tracing::warn!(pod = %stored.pod.id, "a pod is ignored: there are too many");
        self.metrics.ignored.inc();
        None
    }
}
