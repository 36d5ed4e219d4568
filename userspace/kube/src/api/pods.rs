//! The pods of this Kubernetes node. The watcher of the crate `kube` fills its store with the fields that placement needs.
//!
//! The watcher lists the pods with `spec.nodeName` of this node and watches them from the resource version of the list. An
//! interrupted watch resumes from the last version; if the API server does not know the version any more (410), the pods are listed
//! again. This module adds delays that grow while the API server is unreachable, limits, metrics and reports. The known pods are kept
//! meanwhile.
//!
//! The pods are *synced* while a watch is open and all pods up to its start are known.

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
    convert::{self, PodFields, StoredPod},
    limited,
    metrics::Operation,
    object::ApiObject,
};
use crate::pod::{Notice, Pod, PodId, PodSource};

/// Maximum number of pods in one page of a list. If a page is too large, the list is repeated with pages of half the size;
/// the next complete list starts with this size again.
pub(super) const PAGE_SIZE: u32 = 100;
/// Maximum number of stored pods, more than any Kubernetes node runs. Further pods are ignored.
const MAX_PODS: usize = 4096;
/// Rate limit: number of requests, and the period. It bounds the requests to a server that closes each watch at once.
pub(super) const RATE_LIMIT: (u64, Duration) = (20, Duration::from_secs(10));

/// The known pods. Clones share them.
#[derive(Clone)]
pub struct Pods {
    store: Store<StoredPod>,
    writer: Arc<Mutex<Writer<StoredPod>>>,
    /// True while the pods are synced. Notifies of every change of a pod.
    synced: watch::Sender<bool>,
    events: EventWriter,
}

/// The store is keyed by namespace and name: the API server has at most one pod of a name at a time.
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
    /// Creates an empty list of pods. Notices on pods are passed to `events`.
    pub fn new(events: EventWriter) -> Self {
        let writer = Writer::default();
        let (store, synced) = (writer.as_reader(), watch::Sender::new(false));
        Self { store, writer: Arc::new(Mutex::new(writer)), synced, events }
    }

    /// Returns the pod with this namespace, name and UID, as the container runtime reports them.
    pub fn get(&self, id: &PodId) -> Option<Arc<StoredPod>> {
        let stored = self.store.get(&ObjectRef::new(&id.name).within(&id.namespace))?;
        (stored.pod.id.uid == id.uid).then_some(stored)
    }

    /// Returns all pods in no particular order, except mirror pods with the same UID as another pod. The API server assigns the UIDs of
    /// pods, but the author of a mirror pod chooses its hash, so it is unknown which of several mirror pods with the same hash belongs
    /// to the static pod.
    pub fn all(&self) -> Vec<Arc<StoredPod>> {
        let mut pods = self.store.state();
        let is_mirror = |pod: &Pod| pod.id.uid != pod.api_uid;
        let assigned: HashSet<String> = pods.iter().map(|stored| stored.pod.api_uid.clone()).collect();
        let mut claims: HashMap<String, usize> = HashMap::new();
        for stored in pods.iter().filter(|stored| is_mirror(&stored.pod)) {
            *claims.entry(stored.pod.id.uid.clone()).or_default() += 1;
        }
        pods.retain(|stored| {
            let uid = &stored.pod.id.uid;
            !is_mirror(&stored.pod) || !assigned.contains(uid) && claims.get(uid) == Some(&1)
        });
        pods
    }

    /// Returns a receiver that is notified of every change of a pod. Its value is true while the pods are synced.
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
    /// Number of pods received of the list that is in progress; 0 if there is none.
    listed: usize,
}

impl Follower {
    async fn run(mut self, client: Client) {
        // The watcher does not report that a watch is open. It opens a watch only after a complete list.
        let follower = self.clone();
        let on_watch = move || {
            follower.set_synced(true);
            (follower.report)(Ok(()));
        };
        let api: Api<ApiObject<PodFields>> = Api::all(limited(client, RATE_LIMIT, on_watch));
        let mut page_size = PAGE_SIZE;
        let mut backoff = DefaultBackoff::default();
        loop {
            let fields = format!("spec.nodeName={}", self.node);
            let config = watcher::Config::default().fields(&fields).page_size(page_size);
            let mut events = pin!(watcher(api.clone(), config));
            let mut is_listed = false;
            while let Some(event) = events.next().await {
                match event {
                    Ok(event) => {
                        // A successful list does not imply a working watch.
                        if matches!(event, Event::Apply(_) | Event::Delete(_)) {
                            backoff.reset();
                        }
                        if matches!(event, Event::InitDone) {
                            (is_listed, page_size) = (true, PAGE_SIZE);
                        }
                        self.apply(event);
                    }
                    Err(error) => {
                        let (can_resume, cause) = self.failed(error);
                        if cause == Cause::TooLarge && page_size > 1 && !is_listed {
                            page_size /= 2;
                            break;
                        }
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

    /// Counts and reports an error. Returns its cause, and true if the watcher can continue from the last version. By itself it would
    /// continue after any error, even from a version that is gone, or past an event that could not be parsed.
    fn failed(&self, error: watcher::Error) -> (bool, Cause) {
        use watcher::Error::{
            InitialListFailed, NoResourceVersion, WatchError, WatchFailed, WatchStartFailed,
        };
        let (is_start, is_open) = (matches!(error, WatchStartFailed(_)), matches!(error, WatchFailed(_)));
        let (operation, error) = match error {
            InitialListFailed(error) => (Operation::List, error.into()),
            WatchStartFailed(error) | WatchFailed(error) => (Operation::Watch, RequestError::from(error)),
            WatchError(status) => (Operation::Watch, RequestError::from_status(&status)),
            NoResourceVersion => {
                let message = "a list or a pod without a version".to_owned();
                (Operation::Watch, RequestError { cause: Cause::Malformed, message })
            }
        };
        match error.cause {
            Cause::Connection if is_open => {
                // The watch is opened again. If that fails, the error is reported.
                tracing::debug!(%error, "the watch of pods was interrupted");
                return (true, error.cause);
            }
            Cause::Gone => self.metrics.failed(operation, &error),
            _ => {
                self.set_synced(false);
                self.metrics.failed(operation, &error);
                (self.report)(Err(format!("pods cannot be read from the API server: {error}")));
            }
        }
        (is_start && error.cause != Cause::Gone, error.cause)
    }

    fn apply(&mut self, event: Event<ApiObject<PodFields>>) {
        self.listed = if matches!(event, Event::InitApply(_)) { self.listed + 1 } else { 0 };
        let event = match event {
            Event::Init => Some(Event::Init),
            Event::InitApply(object) => self.convert_if_not_full(object).map(Event::InitApply),
            Event::InitDone => Some(Event::InitDone),
            Event::Apply(object) => self.convert_if_not_full(object).map(Event::Apply),
            Event::Delete(object) => self.convert(object).map(Event::Delete),
        };
        let Some(event) = event else { return };
        self.pods.writer.lock().apply_watcher_event(&event);
        // A list changes the store only when it is complete.
        if !matches!(event, Event::Init | Event::InitApply(_)) {
            self.metrics.pods.set(i64::try_from(self.pods.store.len()).unwrap_or(i64::MAX));
            self.pods.synced.send_modify(|_| {});
        }
    }

    /// Converts a pod. A pod that cannot be parsed is ignored, so that the remaining pods are still stored.
    fn convert(&self, object: ApiObject<PodFields>) -> Option<StoredPod> {
        let stored = convert::pod(object, &self.node);
        let stored = stored.inspect_err(|error| {
            tracing::warn!(%error, "a pod from the API server is ignored");
            self.metrics.ignored.inc();
        });
        stored.ok()
    }

    /// Converts a pod if it is stored already, or the store is not full.
    fn convert_if_not_full(&self, object: ApiObject<PodFields>) -> Option<StoredPod> {
        let stored = self.convert(object)?;
        let before = self.listed.checked_sub(1).unwrap_or_else(|| self.pods.store.len());
        if before < MAX_PODS || self.pods.store.get(&stored.to_object_ref(())).is_some() {
            return Some(stored);
        }
        tracing::warn!(pod = %stored.pod.id, "a pod is ignored: {MAX_PODS} pods are stored already");
        self.metrics.ignored.inc();
        None
    }
}
