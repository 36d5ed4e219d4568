//! The pods of this Kubernetes node, with the fields that placement needs.
//!
//! The pods with `spec.nodeName` of this node are listed, and watched from the resource version of the list. An interrupted watch
//! resumes from the last version; if the API server does not know the version any more (410), the pods are listed again. The delays grow
//! while the API server is unreachable, and the known pods are kept meanwhile. The watcher of the crate `kube` is not used, because it
//! keeps the text of a whole page.
//!
//! The pods are *synced* while a watch is open and all pods up to its start are known.
//!
//! Pods that the scheduler is about to bind to this Kubernetes node (`status.nominatedNodeName`) are followed in the same way.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, Stream, StreamExt as _, future::BoxFuture};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::{
    Api, Client,
    api::{ListParams, WatchEvent, WatchParams},
    runtime::{
        reflector::{Lookup, ObjectRef, Store, store::Writer},
        utils::Backoff as _,
        watcher::{DefaultBackoff, Event},
    },
};
use parking_lot::Mutex;
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{
    ApiMetrics, Cause, EventWriter, Report, RequestError,
    convert::{self, PodFields, StoredPod},
    limited,
    list::read_page,
    metrics::Operation,
    object::ApiObject,
};
use crate::pod::{Notice, Pod, PodId, PodSource};

/// Maximum number of pods in one page of a list. If a page takes too long, the list is repeated with pages of half the size; after a
/// complete list, pages have this size again.
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

    /// Returns an empty list of pods, with the same recipient of notices.
    #[must_use]
    pub fn other(&self) -> Self {
        Self::new(self.events.clone())
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
        let selected = format!("spec.nodeName={node}");
        self.follow_selected(client, (node, selected), metrics, report, stop)
    }

    /// Follows the pods that the scheduler has nominated for `node`, and has not bound yet, until the token is cancelled.
    pub fn follow_nominated(
        &self,
        client: Client,
        node: String,
        report: Report,
        stop: CancellationToken,
    ) -> BoxFuture<'_, ()> {
        let selected = format!("status.nominatedNodeName={node}");
        // The metrics count the pods of the node.
        self.follow_selected(client, (node, selected), ApiMetrics::default(), report, stop)
    }

    fn follow_selected(
        &self,
        client: Client,
        (node, selected): (String, String),
        metrics: ApiMetrics,
        report: Report,
        stop: CancellationToken,
    ) -> BoxFuture<'_, ()> {
        async move {
            let follower = Follower { pods: self.clone(), node, selected, metrics, report, listed: 0 };
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
    /// Field selector of the pods.
    selected: String,
    metrics: ApiMetrics,
    report: Report,
    /// Number of pods received of the list that is in progress; 0 if there is none.
    listed: usize,
}

impl Follower {
    async fn run(mut self, client: Client) {
        let client = limited(client, RATE_LIMIT);
        let pods: Api<ApiObject<PodFields>> = Api::all(client.clone());
        let of_node = self.selected.clone();
        let watch = WatchParams::default().fields(&of_node);
        let mut page_size = PAGE_SIZE;
        let mut backoff = DefaultBackoff::default();
        // The version from which to watch; `None` if the pods have to be listed.
        let mut version: Option<String> = None;
        loop {
            let Some(from) = &mut version else {
                let page = ListParams::default().fields(&of_node).limit(page_size);
                match self.list(&client, page).await {
                    Ok(listed) => (version, page_size) = (Some(listed), PAGE_SIZE),
                    Err(error) => {
                        self.failed(Operation::List, &error);
                        if error.cause == Cause::TimedOut {
                            page_size = (page_size / 2).max(1);
                        }
                        sleep(backoff.next().unwrap_or_default()).await;
                    }
                }
                continue;
            };
            let can_resume = match pods.watch(&watch, from).await.map_err(RequestError::from) {
                Ok(events) => {
                    self.set_synced(true);
                    (self.report)(Ok(()));
                    match self.read(events, from, &mut backoff).await {
                        Ok(()) => continue,
                        Err(error) if error.cause == Cause::Connection => {
                            // The watch is opened again. If that fails, the error is reported.
                            tracing::debug!(%error, "the watch of pods was interrupted");
                            true
                        }
                        Err(error) => {
                            self.failed(Operation::Watch, &error);
                            false
                        }
                    }
                }
                Err(error) => {
                    self.failed(Operation::Watch, &error);
                    error.cause != Cause::Gone
                }
            };
            version.take_if(|_| !can_resume);
            sleep(backoff.next().unwrap_or_default()).await;
        }
    }

    /// Lists all pods. Returns the version of the list.
    async fn list(&mut self, client: &Client, mut page: ListParams) -> Result<String, RequestError> {
        self.apply(Event::Init);
        loop {
            let ListMeta { continue_, resource_version, .. } =
                read_page(client, &page, |object| self.apply(Event::InitApply(object))).await?;
            if let Some(token) = continue_.filter(|token| !token.is_empty()) {
                page.continue_token = Some(token);
                continue;
            }
            let version = resource_version.filter(|version| !version.is_empty());
            let version = version.ok_or_else(|| RequestError::without_version("list"))?;
            self.apply(Event::InitDone);
            return Ok(version);
        }
    }

    /// Applies the events of a watch up to its end. `version` becomes that of the last event.
    async fn read(
        &mut self,
        events: impl Stream<Item = kube::Result<WatchEvent<ApiObject<PodFields>>>>,
        version: &mut String,
        backoff: &mut DefaultBackoff,
    ) -> Result<(), RequestError> {
        let mut events = pin!(events);
        while let Some(event) = events.next().await {
            let event = match event? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => Event::Apply(object),
                WatchEvent::Deleted(object) => Event::Delete(object),
                WatchEvent::Bookmark(bookmark) => {
                    *version = bookmark.metadata.resource_version;
                    continue;
                }
                WatchEvent::Error(status) => return Err(RequestError::from_status(&status)),
            };
            // A successful list does not imply a working watch.
            backoff.reset();
            if let Event::Apply(object) | Event::Delete(object) = &event {
                let found = object.identity.resource_version.clone();
                *version = found.ok_or_else(|| RequestError::without_version("pod"))?;
            }
            self.apply(event);
        }
        Ok(())
    }

    fn set_synced(&self, synced: bool) {
        self.metrics.synced.set(synced.into());
        self.pods.synced.send_if_modified(|now| std::mem::replace(now, synced) != synced);
    }

    /// Counts and reports an error.
    fn failed(&self, operation: Operation, error: &RequestError) {
        self.metrics.failed(operation, error);
        if error.cause != Cause::Gone {
            self.set_synced(false);
            (self.report)(Err(format!("pods cannot be read from the API server: {error}")));
        }
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
