//! The pods of this Kubernetes node, by list and watch.
//!
//! Algorithm: list all pods with `spec.nodeName` of this node, page by page, and put them in place of what was known;
//! then watch from the version of that list. Each event, and each bookmark, moves the version on. A watch that ends is
//! begun again from the version; one that the server does not know any more (410) is begun with a new list. Whatever
//! fails is counted, told, and tried again after a growing pause; what is known is kept meanwhile.
//!
//! It *is synced* while a watch is open and everything up to it is known.
//!
//! Source: Kubernetes API concepts, "Efficient detection of changes".

use std::{
    fmt,
    pin::pin,
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
    time::Duration,
};

use futures_util::StreamExt as _;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, ListParams, WatchEvent, WatchParams},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    Backoff, Cause, EventWriter, Figures, Report, RequestError, answer,
    convert::{self, StoredPod},
    figures::Operation,
    store::Store,
};
use crate::pod::{Notice, Pod, PodSource};

/// Pods in one answer to a list.
const PAGE: u32 = 250;
/// The server is asked to end a watch after this time, in seconds, so that a connection that died is noticed.
const WATCH_SECONDS: u32 = 290;
/// A watch on which nothing came for so long is dead.
const WATCH_LIMIT: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 10);
/// The first pause after a failure.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// A watch that lasted so long was a good one.
const GOOD_WATCH: Duration = Duration::from_secs(5);

/// The pods that are known. Clones know the same.
#[derive(Clone)]
pub struct Pods {
    shared: Arc<Shared>,
    events: EventWriter,
}

struct Shared {
    store: RwLock<Store>,
    synced: RwLock<bool>,
    /// Counts changes.
    changed: watch::Sender<u64>,
}

impl fmt::Debug for Pods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pods").field("synced", &self.is_synced()).finish_non_exhaustive()
    }
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

impl Pods {
    /// None are known yet. Notices on them are given to `events`.
    pub fn new(events: EventWriter) -> Self {
        let shared =
            Shared { store: RwLock::default(), synced: RwLock::default(), changed: watch::Sender::new(0) };
        Self { shared: Arc::new(shared), events }
    }

    /// The pod with this UID, the UID being that which the runtime tells.
    pub fn by_uid(&self, uid: &str) -> Option<Arc<StoredPod>> {
        read(&self.shared.store).by_uid(uid).cloned()
    }

    /// The pod of this name.
    pub fn by_name(&self, namespace: &str, name: &str) -> Option<Arc<StoredPod>> {
        read(&self.shared.store).by_name(namespace, name).cloned()
    }

    /// All pods, in no order.
    pub fn all(&self) -> Vec<Arc<StoredPod>> {
        read(&self.shared.store).all().cloned().collect()
    }

    /// Tells of changes of what is known.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }

    /// Follows the pods of `node` until the token is cancelled.
    pub async fn follow(
        &self,
        client: kube::Client,
        node: String,
        figures: Figures,
        report: Report,
        stop: CancellationToken,
    ) {
        let resource = ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&());
        let follower = Follower {
            api: Api::all_with(client, &resource),
            selector: format!("spec.nodeName={node}"),
            pods: self,
            figures,
            report,
        };
        tokio::select! {
            () = stop.cancelled() => {}
            never = follower.run() => match never {},
        }
    }

    fn change(&self, figures: &Figures, change: impl FnOnce(&mut Store)) {
        let pods = {
            let mut store = self.shared.store.write().unwrap_or_else(PoisonError::into_inner);
            change(&mut store);
            store.len()
        };
        figures.pods.set(i64::try_from(pods).unwrap_or(i64::MAX));
        self.shared.changed.send_modify(|count| *count += 1);
    }

    fn set_synced(&self, figures: &Figures, synced: bool) {
        let before = {
            let mut value = self.shared.synced.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *value, synced)
        };
        if before != synced {
            figures.synced.set(synced.into());
            self.shared.changed.send_modify(|count| *count += 1);
        }
    }
}

impl PodSource for Pods {
    fn pod(&self, uid: &str) -> Option<Arc<Pod>> {
        self.by_uid(uid).map(|stored| stored.pod.clone())
    }

    fn is_synced(&self) -> bool {
        *read(&self.shared.synced)
    }

    fn notify(&self, notice: Notice) {
        let api_uid = self.by_uid(&notice.pod.uid).map(|stored| stored.pod.api_uid.clone());
        self.events.write(notice, api_uid);
    }
}

/// Why a watch ended.
enum Ended {
    /// As it should, or the connection broke: it is begun again from the version.
    Closed,
    /// The version is not known any more.
    Gone,
    /// It could not be begun, or the server said that something is wrong.
    Failed(RequestError),
}

struct Follower<'a> {
    api: Api<DynamicObject>,
    selector: String,
    pods: &'a Pods,
    figures: Figures,
    report: Report,
}

impl Follower<'_> {
    async fn run(&self) -> std::convert::Infallible {
        let mut backoff = Backoff::new(FIRST_PAUSE);
        loop {
            let mut version = match self.list().await {
                Ok(version) => version,
                Err(error) => {
                    self.failed(Operation::List, &error);
                    sleep(backoff.pause()).await;
                    continue;
                }
            };
            loop {
                let start = Instant::now();
                let ended = self.watch(&mut version).await;
                if start.elapsed() >= GOOD_WATCH {
                    backoff.reset();
                }
                match ended {
                    // A server that closes at once is not asked again at once.
                    Ended::Closed if start.elapsed() >= GOOD_WATCH => {}
                    Ended::Closed => sleep(backoff.pause()).await,
                    Ended::Gone => {
                        tracing::debug!(version, "the API server does not know this version any more");
                        let message = "410: the version is too old".to_owned();
                        let error = RequestError { cause: Cause::Gone, message };
                        self.figures.failed(Operation::Watch, &error);
                        sleep(backoff.pause()).await;
                        break;
                    }
                    Ended::Failed(error) => {
                        self.failed(Operation::Watch, &error);
                        sleep(backoff.pause()).await;
                    }
                }
            }
        }
    }

    fn failed(&self, operation: Operation, error: &RequestError) {
        self.pods.set_synced(&self.figures, false);
        self.figures.failed(operation, error);
        (self.report)(Err(format!("pods cannot be read from the API server: {error}")));
    }

    /// Puts all pods in place of those known; returns the version to watch from.
    async fn list(&self) -> Result<String, RequestError> {
        let mut store = Store::default();
        let mut page = ListParams::default().fields(&self.selector).limit(PAGE);
        loop {
            let list = answer(self.api.list(&page)).await?;
            for object in list.items {
                if let Some(stored) = self.convert(object) {
                    self.put(&mut store, stored);
                }
            }
            if let Some(token) = list.metadata.continue_.filter(|token| !token.is_empty()) {
                page = page.continue_token(&token);
            } else {
                let version = list.metadata.resource_version.unwrap_or_default();
                self.pods.change(&self.figures, |known| *known = store);
                return Ok(version);
            }
        }
    }

    async fn watch(&self, version: &mut String) -> Ended {
        let params = WatchParams::default().fields(&self.selector).timeout(WATCH_SECONDS);
        let stream = match answer(self.api.watch(&params, version)).await {
            Ok(stream) => stream,
            Err(error) if error.cause == Cause::Gone => return Ended::Gone,
            Err(error) => return Ended::Failed(error),
        };
        self.pods.set_synced(&self.figures, true);
        (self.report)(Ok(()));
        let mut stream = pin!(stream);
        loop {
            let event = match timeout(WATCH_LIMIT, stream.next()).await {
                Err(_) => return Ended::Failed(RequestError::timed_out(WATCH_LIMIT)),
                Ok(None) => return Ended::Closed,
                Ok(Some(Err(error))) => match RequestError::from(error) {
                    error if error.cause == Cause::Gone => return Ended::Gone,
                    error if error.cause == Cause::Connection => {
                        tracing::debug!(%error, "the watch of pods broke");
                        return Ended::Closed;
                    }
                    error => return Ended::Failed(error),
                },
                Ok(Some(Ok(event))) => event,
            };
            let (object, is_deleted) = match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, false),
                WatchEvent::Deleted(object) => (object, true),
                WatchEvent::Bookmark(bookmark) => {
                    *version = bookmark.metadata.resource_version;
                    continue;
                }
                WatchEvent::Error(status) if status.code == 410 => return Ended::Gone,
                WatchEvent::Error(status) => return Ended::Failed(RequestError::of_status(&status)),
            };
            if let Some(next) = &object.metadata.resource_version {
                version.clone_from(next);
            }
            if let Some(stored) = self.convert(object) {
                self.pods.change(&self.figures, |known| {
                    if is_deleted { known.remove(&stored) } else { self.put(known, stored) }
                });
            }
        }
    }

    /// A pod that cannot be read is left out; the others are not held up by it.
    fn convert(&self, object: DynamicObject) -> Option<StoredPod> {
        convert::pod(object)
            .map_err(|error| {
                self.figures.left_out.inc();
                tracing::warn!(%error, "a pod from the API server is left out");
            })
            .ok()
    }

    fn put(&self, store: &mut Store, stored: StoredPod) {
        let id = stored.pod.id.clone();
        if !store.put(stored) {
            self.figures.left_out.inc();
            tracing::warn!(pod = %id, "a pod is left out: there are too many");
        }
    }
}
