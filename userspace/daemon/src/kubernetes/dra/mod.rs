//! Preparation of resource claims for the kubelet.
//!
//! # Algorithm
//! The kubelet has the claims of a pod prepared before it starts the pod. The allocation of a claim is read from the API server, its CPUs and
//! memory are reserved in the ledger, then the specification for the container runtime is written ([`cdi`]), and then the kubelet is
//! answered. After a crash in between, the kubelet asks again, and the claim keeps its reservation. When a claim is unprepared, its
//! specification is removed before its reservation, so that no specification remains without one.
//!
//! The claims of a pod get no more than the pod requests. If it is resized in place, its claims follow while its containers run: CPUs
//! and memory beyond its requests are released, and given back when the pod requests them again and they are free.
//!
//! Claims of the whole host are reserved before their pods are bound, see [`host`].
//!
//! A restart of the daemon writes the specifications of all reserved claims again, and only then creates the socket that the kubelet looks
//! for. The kubelet looks for it when it starts, too. If a socket is removed, both are created again.

mod cdi;
mod health;
mod host;
mod refused;
mod status;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use numaward_config::{Config, kubernetes::Kubernetes};
use numaward_engine::{
    Quantity, Resources,
    claims::{
        allocator::Amounts,
        devices::{self, DRIVER},
    },
};
use numaward_guarantee::{
    claim::{ChangedClaim, ReservedClaim, ReservedPart},
    error::AdmissionError,
    reconciler::ReconcilerHandle,
};
use numaward_kube::{
    api::{Pods, Report, StoredPod},
    dra::{
        claim::{AllocatedClaim, AllocationReader, ClaimError, ClaimPart},
        health::{HealthReporter, INTERVAL as HEALTH_INTERVAL},
        messages::{ClaimId, Device},
        plugin::{CLAIMS_SOCKET, ClaimHandler, Plugin, REGISTRATION_SOCKET},
    },
    pod::{Notice, Pod, PodSource as _},
};
use numaward_store::fault;
use tokio::{
    sync::{Mutex, watch},
    task::{JoinError, spawn_blocking},
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use self::cdi::{CdiDirectory, CdiError};
pub(super) use self::{
    health::HostReader, host::HostPlacer, refused::RefusedRequests, status::StatusReporter,
};
use super::kubelet;
use crate::socket::{self, SocketError};

/// Configuration key that sets the folder of the sockets.
const SOCKETS_KEY: &str = "kubernetes.kubelet.directory";
/// Interval at which the sockets are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// Interval of attempts to serve.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Time for which a claim waits for its pod: less than the kubelet waits for an answer.
const POD_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum time between two passes over the requests of pods.
const LIMIT_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which claims try to regain CPUs and memory that were not free.
const RETURN_INTERVAL: Duration = Duration::from_mins(1);
/// Time for calls in progress when the sockets are closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Reason why a claim is not prepared or unprepared.
#[derive(Debug, thiserror::Error)]
enum PrepareError {
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("{0}")]
    Reservation(#[from] AdmissionError),
    #[error(transparent)]
    Cdi(#[from] CdiError),
    #[error("the API server has not reported the pod of the resource claim yet; the kubelet tries again")]
    UnknownPod,
    #[error("the preparation of the resource claim failed: {0}")]
    Task(#[from] JoinError),
}

/// Reason why the plugin cannot be served.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error(transparent)]
    Prepare(#[from] PrepareError),
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error("{path}: cannot {1}: {2}", path = .0.display())]
    Io(PathBuf, &'static str, #[source] io::Error),
    #[error("the kubelet's calls for resource claims cannot be served: {0}")]
    Grpc(String),
}

/// Preparation of the claims of this host. Clones share the state.
#[derive(Clone)]
pub(super) struct ClaimPreparer(Arc<PreparerState>);

struct PreparerState {
    reader: AllocationReader,
    pods: Pods,
    /// The present settings. In `beyond_quota_namespaces`, claims may have more than their pods request.
    kubernetes: watch::Receiver<Kubernetes>,
    reconciler: ReconcilerHandle,
    cdi: CdiDirectory,
    host: HostReader,
    host_root: PathBuf,
    /// Locked while a reservation and its specification change.
    changes: Mutex<()>,
}

impl ClaimPreparer {
    pub(super) fn new(
        (config, kubernetes): (&Config, watch::Receiver<Kubernetes>),
        reader: AllocationReader,
        pods: Pods,
        (reconciler, host): (ReconcilerHandle, HostReader),
    ) -> Self {
        let cdi_directory = kubelet::below(&config.host_root, &config.kubernetes.dra.cdi_directory);
        Self(Arc::new(PreparerState {
            reader,
            pods,
            kubernetes,
            reconciler,
            cdi: CdiDirectory(cdi_directory),
            host,
            host_root: config.host_root.clone(),
            changes: Mutex::default(),
        }))
    }

    /// Writes the specifications of all prepared claims.
    async fn restore(&self) -> Result<(), PrepareError> {
        let _guard = self.0.changes.lock().await;
        for (uid, claim) in &self.0.reconciler.reserved_claims().await? {
            if claim.pending {
                continue;
            }
            self.0.write(uid, claim).await?;
        }
        Ok(())
    }
}

impl PreparerState {
    async fn prepare(&self, claim: &ClaimId) -> Result<Vec<Device>, PrepareError> {
        let allocated = self.reader.read(claim).await?;
        let reserved = reservation(claim, &allocated, false);
        let known = self.reconciler.reserved_claims().await?;
        let is_known = known.get(&claim.uid).is_some_and(|known| known.is_same(&reserved));
        let may_have_more = self.kubernetes.borrow().beyond_quota_namespaces.contains(&claim.namespace);
        let requests = if is_known || may_have_more {
            None
        } else {
            allocated.parts.iter().try_for_each(ClaimPart::check_quota)?;
            let pod = self.pod(&claim.namespace, &allocated.pod);
            let pod = timeout(POD_TIMEOUT, pod).await.map_err(|_| PrepareError::UnknownPod)?;
            self.limit(&pod.pod)
        };
        let _guard = self.changes.lock().await;
        let reserved = self.reconciler.reserve_claim(claim.uid.clone(), reserved, requests).await?;
        self.write(&claim.uid, &reserved).await?;
        fault::point("claim.written");
        let (node, cdi_name) = (&self.reader.node, cdi::device_id(&claim.uid));
        Ok(allocated.parts.iter().map(|part| part.prepared(node, &cdi_name)).collect())
    }

    /// Waits for a pod by its UID in the API server: the kubelet may know it earlier.
    async fn pod(&self, namespace: &str, uid: &str) -> Arc<StoredPod> {
        let mut changes = self.pods.changes();
        loop {
            let mut pods = self.pods.all().into_iter();
            let is_wanted =
                |stored: &Arc<StoredPod>| stored.pod.api_uid == uid && stored.pod.id.namespace == namespace;
            if let Some(found) = pods.find(is_wanted) {
                return found;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns the amounts that the claims of a pod may have; `None` if there is no limit.
    fn limit(&self, pod: &Pod) -> Option<Amounts> {
        (!self.kubernetes.borrow().beyond_quota_namespaces.contains(&pod.id.namespace)).then(|| requests(pod))
    }

    /// Has the claims follow the requests of their pods.
    async fn follow_requests(&self) {
        let mut changes = self.pods.changes();
        loop {
            let mut applied = BTreeMap::new();
            let until = Instant::now() + RETURN_INTERVAL;
            loop {
                if let Err(error) = self.limit_claims(&mut applied).await {
                    tracing::warn!(%error, "resource claims cannot follow the requests of their pods; this is tried again");
                    break;
                }
                sleep(LIMIT_INTERVAL).await;
                if timeout_at(until, changes.changed()).await.is_err() {
                    break;
                }
            }
        }
    }

    /// Limits the claims of pods to their requests. `applied`: the limits by pod that need not be applied again.
    async fn limit_claims(
        &self,
        applied: &mut BTreeMap<String, Option<Amounts>>,
    ) -> Result<(), AdmissionError> {
        let claims = self.reconciler.reserved_claims().await?;
        let pods: BTreeSet<&str> = claims.values().map(|claim| claim.pod.as_str()).collect();
        applied.retain(|pod, _| pods.contains(pod.as_str()));
        for pod in self.pods.all().iter().map(|stored| &stored.pod) {
            let limit = self.limit(pod);
            if !pods.contains(pod.api_uid.as_str()) || applied.get(&pod.api_uid) == Some(&limit) {
                continue;
            }
            for claim in self.reconciler.limit_claims(pod.api_uid.clone(), limit.clone()).await? {
                self.pods.notify(notice(pod, &claim));
            }
            applied.insert(pod.api_uid.clone(), limit);
        }
        Ok(())
    }

    async fn unprepare(&self, uid: &str) -> Result<(), PrepareError> {
        let _guard = self.changes.lock().await;
        let (cdi, of) = (self.cdi.clone(), uid.to_owned());
        spawn_blocking(move || cdi.remove(&of)).await??;
        fault::point("claim.removed");
        Ok(self.reconciler.release_claim(uid.to_owned()).await?)
    }

    async fn write(&self, uid: &str, claim: &ReservedClaim) -> Result<(), PrepareError> {
        let (cdi, uid) = (self.cdi.clone(), uid.to_owned());
        let name = format!("{}/{}", claim.namespace, claim.name);
        Ok(spawn_blocking(move || cdi.write(&uid, &name)).await??)
    }
}

/// Returns the reservation for an allocated claim.
fn reservation(claim: &ClaimId, allocated: &AllocatedClaim, pending: bool) -> ReservedClaim {
    let parts = allocated.parts.iter().map(|part| ReservedPart {
        node: part.node,
        consumed: part.consumed.clone(),
        terms: part.terms.clone(),
    });
    ReservedClaim {
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        pod: allocated.pod.clone(),
        parts: parts.collect(),
        pending,
    }
}

/// Returns the requests of a pod for which devices have capacities: at most what a quota counts.
pub(super) fn requests(pod: &Pod) -> Amounts {
    let sidecars = pod.init_containers.iter().filter(|container| container.restartable);
    let containers = || pod.containers.iter().chain(sidecars.clone()).map(|container| &container.requests);
    let of_pod = pod.resources.as_ref().map(|resources| &resources.requests);
    let total = |amount: &dyn Fn(&Resources) -> Option<Quantity>| {
        let sum = |sum: Quantity, more: Quantity| sum.checked_add(more).unwrap_or(sum);
        of_pod
            .and_then(amount)
            .unwrap_or_else(|| containers().filter_map(amount).fold(Quantity::default(), sum))
    };
    let amount = |name: &'static str| match devices::memory_kind(name) {
        Some(kind) => total(&|resources| resources.memory.get(&kind).copied()),
        None => total(&|resources| resources.cpu),
    };
    devices::CAPACITIES.into_iter().map(|name| (name.into(), amount(name))).collect()
}

/// Returns the event on a claim that follows the requests of its pod.
fn notice(pod: &Pod, claim: &ChangedClaim) -> Notice {
    let given = |name: &str| claim.given.get(name).copied().unwrap_or_default();
    let amounts = claim.allocated.iter();
    let amounts = amounts.map(|(name, allocated)| format!("{} of {allocated} {name}", given(name)));
    let amounts = amounts.collect::<Vec<_>>().join(", ");
    let is_whole = claim.allocated.iter().all(|(name, allocated)| given(name) == *allocated);
    let (reason, rest) = if is_whole {
        ("NumaClaimRestored", "the pod requests as much again")
    } else {
        ("NumaClaimLimited", "the pod requests no more, or the rest is not free")
    };
    let message = format!("resource claim {} has {amounts}: {rest}", claim.name);
    Notice { pod: pod.id.clone(), reason: reason.to_owned(), message, is_warning: !is_whole }
}

/// Returns the UID of a claim by its name in the container runtime; `None` for another device.
pub(super) fn claim_uid(cdi_name: &str) -> Option<&str> {
    cdi::claim_uid(cdi_name)
}

/// Runs a change to its end, also if the caller does not wait for it.
async fn complete<T: Send + 'static>(
    change: impl Future<Output = Result<T, PrepareError>> + Send + 'static,
) -> Result<T, String> {
    let result = tokio::spawn(change).await.unwrap_or_else(|error| Err(error.into()));
    result.map_err(|error| error.to_string())
}

impl ClaimHandler for ClaimPreparer {
    fn prepare<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<Vec<Device>, String>> {
        let (state, claim) = (self.0.clone(), claim.clone());
        complete(async move { state.prepare(&claim).await }).boxed()
    }

    fn unprepare<'a>(&'a self, claim: &'a ClaimId) -> BoxFuture<'a, Result<(), String>> {
        let (state, uid) = (self.0.clone(), claim.uid.clone());
        complete(async move { state.unprepare(&uid).await }).boxed()
    }
}

/// Paths of the plugin's sockets.
#[derive(Clone, Debug)]
pub(super) struct PluginSockets {
    registration: PathBuf,
    claims: PathBuf,
    /// Path of the socket for claims, as the kubelet sees it.
    endpoint: String,
}

impl PluginSockets {
    pub(super) fn new(config: &Config) -> Self {
        let directory = kubelet::directory(config);
        let endpoint = config.kubernetes.kubelet.directory.join(CLAIMS_SOCKET);
        Self {
            registration: directory.join(REGISTRATION_SOCKET),
            claims: directory.join(CLAIMS_SOCKET),
            endpoint: endpoint.display().to_string(),
        }
    }
}

/// A socket that this process has created.
struct OwnSocket {
    path: PathBuf,
    id: (u64, u64),
}

impl OwnSocket {
    fn new(path: &Path) -> Result<Self, ServeError> {
        let found = fs::symlink_metadata(path)
            .map_err(|error| ServeError::Io(path.to_owned(), "read its metadata", error))?;
        Ok(Self { path: path.to_owned(), id: (found.dev(), found.ino()) })
    }

    fn exists(&self) -> bool {
        fs::symlink_metadata(&self.path).is_ok_and(|found| (found.dev(), found.ino()) == self.id)
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        if self.exists()
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::debug!(path = %self.path.display(), %error, "the socket cannot be removed");
        }
    }
}

/// Serves the kubelet's plugin, and has claims follow the requests of their pods, until the token is cancelled.
pub(super) async fn serve(
    preparer: ClaimPreparer,
    sockets: PluginSockets,
    report: Report,
    stop: CancellationToken,
) {
    let state = preparer.0.clone();
    let following = stop.run_until_cancelled(state.follow_requests());
    tokio::join!(serve_plugin(preparer, sockets, report, &stop), following);
}

async fn serve_plugin(
    preparer: ClaimPreparer,
    sockets: PluginSockets,
    report: Report,
    stop: &CancellationToken,
) {
    while !stop.is_cancelled() {
        match serve_once(&preparer, &sockets, &report, stop).await {
            Ok(()) if !stop.is_cancelled() => {
                tracing::warn!(path = %sockets.registration.display(), "a socket of the plugin was removed: both are created again");
            }
            Ok(()) => {}
            Err(error) => {
                report(Err(error.to_string()));
                let _ = stop.run_until_cancelled(sleep(RETRY_INTERVAL)).await;
            }
        }
    }
}

/// Creates the sockets and serves until the token is cancelled or one of them is gone.
async fn serve_once(
    preparer: &ClaimPreparer,
    sockets: &PluginSockets,
    report: &Report,
    stop: &CancellationToken,
) -> Result<(), ServeError> {
    let fail = |path: &Path| {
        let path = path.to_owned();
        move |error| ServeError::Io(path, "listen on it", error)
    };
    preparer.restore().await?;
    let claims = socket::listen(&sockets.claims, SOCKETS_KEY)?;
    let own_claims = OwnSocket::new(&sockets.claims)?;
    let claims = tokio::net::UnixListener::from_std(claims).map_err(fail(&sockets.claims))?;
    // The kubelet connects as soon as it sees this socket.
    let registration = socket::listen_in_place(&sockets.registration, SOCKETS_KEY)?;
    let own_registration = OwnSocket::new(&sockets.registration)?;
    let registration =
        tokio::net::UnixListener::from_std(registration).map_err(fail(&sockets.registration))?;
    let plugin = Plugin {
        driver: DRIVER.to_owned(),
        endpoint: sockets.endpoint.clone(),
        handler: Arc::new(preparer.clone()),
        health: HealthReporter {
            source: Arc::new(preparer.clone()),
            pool: preparer.0.reader.node.clone(),
            interval: HEALTH_INTERVAL,
        },
        report: report.clone(),
    };
    let until = stop.child_token();
    let mut serving = plugin.serve(registration, claims, until.clone());
    report(Ok(()));
    let removed = async {
        while own_claims.exists() && own_registration.exists() {
            sleep(CHECK_INTERVAL).await;
        }
    };
    tokio::select! {
        served = &mut serving => return served.map_err(|error| ServeError::Grpc(error.to_string())),
        () = stop.cancelled() => {}
        () = removed => {}
    }
    until.cancel();
    // Without the socket, the kubelet does not connect again before the plugin is back.
    drop(own_registration);
    let _ = timeout(CLOSE_TIMEOUT, serving).await;
    Ok(())
}
