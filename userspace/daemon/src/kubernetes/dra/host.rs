//! Placement of claims of the whole host, before the scheduler binds their pods.
//!
//! # Problem
//! The scheduler allocates such a claim by the sum of all nodes. Only this host knows whether the request fits on its nodes, and which moves
//! make it fit.
//!
//! # Terms
//! - A pod is *nominated* while the scheduler waits for this host (`status.nominatedNodeName`).
//! - A reservation is *pending* until the kubelet has the claim prepared.
//!
//! # Algorithm
//! The claims of nominated pods are read. One that is allocated to this host, and has no condition yet, is reserved in the ledger, with moves
//! of running workloads if the configuration permits it. Then the lowered devices are published, and then the claim gets the condition
//! [`PLACED`](numaward_engine::claims::devices::PLACED): at no time does the scheduler see room that is reserved. If there is no room, less
//! of the host is published, and the claim gets [`NO_ROOM`](numaward_engine::claims::devices::NO_ROOM); the scheduler then clears the
//! allocation. After an error, the next pass does the same again.
//!
//! A pending reservation ends when its claim is no longer allocated to this host for the same pod. The pod itself is not decisive: the
//! scheduler may start again, and continue with the allocation.
//!
//! # Invariants
//! - A claim with the condition has its reservation, also after a restart of the daemon.
//! - A claim is reserved once, however often the passes repeat.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use numaward_engine::claims::devices::{self, HOST};
use numaward_guarantee::{
    claim::{PlacedClaim, ReservedClaim},
    error::AdmissionError,
    pod::is_for_room,
};
use numaward_kube::{
    api::{Pods, StoredPod},
    dra::{
        claim::{ClaimError, ClaimPart, HostClaim},
        messages::ClaimId,
        slices::Publication,
        status::{AllocatedDevice, DeviceCondition, DeviceStatus, StatusError, StatusWriter},
    },
};
use tokio::time::{Instant, sleep, timeout};

use super::{ClaimPreparer, PreparerState, RefusedRequests, reservation};

/// Interval of passes while a decision is awaited.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of passes while nominated pods or pending reservations exist.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Time for which a new nominated pod is read at the shorter interval: the scheduler nominates a pod before it allocates the claims.
const ALLOCATION_TIMEOUT: Duration = Duration::from_secs(15);
/// Minimum time between two passes.
const MIN_PASS_DISTANCE: Duration = Duration::from_millis(100);
/// Time for which the publication of the devices is awaited.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(20);

/// Reason why a claim is not decided in this pass.
#[derive(Debug, thiserror::Error)]
enum PlaceError {
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("{0}")]
    Reservation(#[from] AdmissionError),
    #[error(transparent)]
    Status(#[from] StatusError),
    #[error("the changed devices were not published within {} s", PUBLISH_TIMEOUT.as_secs())]
    NotPublished,
}

/// Placement of the claims of this whole host.
pub(in crate::kubernetes) struct HostPlacer {
    pub(in crate::kubernetes) preparer: ClaimPreparer,
    /// Pods that are nominated for this host.
    pub(in crate::kubernetes) nominated: Pods,
    pub(in crate::kubernetes) writer: StatusWriter,
    pub(in crate::kubernetes) publication: Publication,
    pub(in crate::kubernetes) refused: RefusedRequests,
}

/// Knowledge of earlier passes.
#[derive(Default)]
struct Progress {
    /// Times at which nominated pods were first seen, by UID.
    seen: BTreeMap<String, Instant>,
    /// Claims for which room is made, by UID.
    waiting: BTreeMap<String, ReservedClaim>,
}

impl HostPlacer {
    /// Places claims until the future is dropped.
    pub(in crate::kubernetes) async fn run(self) {
        let mut changes = self.nominated.changes();
        let mut progress = Progress::default();
        loop {
            changes.mark_unchanged();
            let next = match self.pass(&mut progress).await {
                Ok(next) => next,
                Err(error) => {
                    tracing::warn!(%error, "claims of the whole host cannot be placed; this is tried again");
                    Some(CHECK_INTERVAL)
                }
            };
            sleep(MIN_PASS_DISTANCE).await;
            let next_change = async {
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            match next {
                Some(delay) => drop(timeout(delay, next_change).await),
                None => next_change.await,
            }
        }
    }

    fn state(&self) -> &PreparerState {
        &self.preparer.0
    }

    /// Decides the claims of all nominated pods, and gives back what is no longer needed. Returns the time until the next pass; `None` if
    /// nothing waits.
    async fn pass(&self, progress: &mut Progress) -> Result<Option<Duration>, PlaceError> {
        let mut next = None;
        let mut earliest =
            |delay: Duration| next = Some(next.map_or(delay, |next: Duration| next.min(delay)));
        let pods: Vec<_> =
            self.nominated.all().into_iter().filter(|stored| !stored.claims.is_empty()).collect();
        let uids: BTreeSet<&str> = pods.iter().map(|stored| stored.pod.api_uid.as_str()).collect();
        progress.seen.retain(|uid, _| uids.contains(uid.as_str()));
        let mut allocated = BTreeSet::new();
        for stored in &pods {
            let seen = progress.seen.entry(stored.pod.api_uid.clone()).or_insert_with(Instant::now);
            let is_new = seen.elapsed() < ALLOCATION_TIMEOUT;
            earliest(CHECK_INTERVAL);
            for name in &stored.claims {
                match self.place(stored, name, progress, &mut allocated).await {
                    Ok(false) if is_new => earliest(POLL_INTERVAL),
                    Ok(_) => {}
                    Err(error) => {
                        tracing::warn!(pod = %stored.pod.id, claim = name, %error, "a claim of the whole host is not decided yet; this is tried again");
                        earliest(POLL_INTERVAL);
                    }
                }
            }
        }
        if self.give_back(progress, &allocated).await? {
            earliest(CHECK_INTERVAL);
        }
        if !progress.waiting.is_empty() {
            earliest(POLL_INTERVAL);
        }
        Ok(next)
    }

    /// Decides a claim of a nominated pod, if it is allocated to this whole host. Returns false if it has to be read again soon. Adds the
    /// claim to `allocated` if its reservation is needed.
    async fn place(
        &self,
        stored: &StoredPod,
        name: &str,
        progress: &mut Progress,
        allocated: &mut BTreeSet<String>,
    ) -> Result<bool, PlaceError> {
        let pod = &stored.pod;
        let Some(claim) = self.state().reader.read_of_host(&pod.id.namespace, name).await? else {
            return Ok(false);
        };
        if claim.outcome == Some(false) {
            return Ok(true);
        }
        let is_decided = claim.outcome.is_some();
        let parts = match &claim.allocated {
            // The pod is being deleted.
            Err(ClaimError::Shared(0)) => return Ok(false),
            Err(error) if is_decided => {
                tracing::debug!(%error, "a placed claim of the whole host cannot be read");
                return Ok(true);
            }
            Err(error) => return self.refuse(&claim, "InvalidClaim", &error.to_string()).await,
            Ok(found) if found.pod != pod.api_uid => return Ok(false),
            Ok(found) => found,
        };
        let reserved = reservation(&claim.id, parts, true);
        let limit = self.state().limit(pod);
        if limit.is_some()
            && let Err(error) = parts.parts.iter().try_for_each(ClaimPart::check_quota)
        {
            return if is_decided {
                Ok(true)
            } else {
                self.refuse(&claim, "BeyondQuota", &error.to_string()).await
            };
        }
        let uid = claim.id.uid.clone();
        let placed = self.state().reconciler.place_claim(uid.clone(), reserved.clone(), limit).await;
        progress.waiting.remove(&uid);
        match placed {
            Ok(PlacedClaim::MakesRoom) => {
                allocated.insert(uid.clone());
                progress.waiting.insert(uid, reserved);
                Ok(false)
            }
            Ok(PlacedClaim::Reserved) => {
                allocated.insert(uid);
                if !is_decided {
                    self.publish().await?;
                    let message = "its CPUs and memory are reserved";
                    self.write(&claim, devices::PLACED, "Placed", message).await?;
                    tracing::info!(pod = %pod.id, claim = name, "a claim of the whole host is placed");
                }
                Ok(true)
            }
            // The scheduler binds the pod, and the kubelet reports the problem.
            Err(AdmissionError::Rejected(..) | AdmissionError::Off) if is_decided => Ok(true),
            Err(error @ AdmissionError::Rejected(..)) => {
                let message = error.to_string();
                let AdmissionError::Rejected(rejection, _) = error else { return Ok(true) };
                if is_for_room(&rejection.reason) {
                    self.refused
                        .add(parts.parts.first().map(|part| part.consumed.clone()).unwrap_or_default());
                    self.publish().await?;
                }
                self.refuse(&claim, &rejection.reason, &message).await
            }
            Err(error @ (AdmissionError::Off | AdmissionError::Unfit(_) | AdmissionError::Field(_))) => {
                self.refuse(&claim, "NotPossible", &error.to_string()).await
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Adds a condition to the host device of this allocation.
    async fn write(
        &self,
        claim: &HostClaim,
        name: &'static str,
        reason: &str,
        message: &str,
    ) -> Result<(), StatusError> {
        let pool = devices::host_pool(&self.state().reader.node);
        let condition =
            DeviceCondition { name, is_true: true, reason: reason.to_owned(), message: message.to_owned() };
        let status = DeviceStatus { conditions: vec![condition], data: None };
        let wanted = AllocatedDevice { pool: &pool, device: HOST, share_id: claim.share_id.as_deref() };
        self.writer.write(&claim.id, &|device| (device == wanted).then(|| status.clone())).await
    }

    async fn refuse(&self, claim: &HostClaim, reason: &str, message: &str) -> Result<bool, PlaceError> {
        self.write(claim, devices::NO_ROOM, reason, message).await?;
        tracing::info!(
            claim = claim.id.name,
            namespace = claim.id.namespace,
            reason,
            message,
            "a claim of the whole host is refused"
        );
        Ok(true)
    }

    /// Publishes the present devices, and waits until the API server has them.
    async fn publish(&self) -> Result<(), PlaceError> {
        timeout(PUBLISH_TIMEOUT, self.publication.publish()).await.map_err(|_| PlaceError::NotPublished)
    }

    /// Releases pending reservations of claims that are not allocated to this host any more, and ends moves for such claims. Claims in
    /// `allocated` were read already. Returns true if pending reservations are left.
    async fn give_back(
        &self,
        progress: &mut Progress,
        allocated: &BTreeSet<String>,
    ) -> Result<bool, PlaceError> {
        let reserved = self.state().reconciler.reserved_claims().await?;
        let pending = reserved.iter().filter(|(_, claim)| claim.pending);
        let pending: BTreeMap<String, ReservedClaim> =
            pending.map(|(uid, claim)| (uid.clone(), (**claim).clone())).collect();
        let mut is_pending = false;
        for (uid, claim) in pending.into_iter().chain(progress.waiting.clone()) {
            if allocated.contains(&uid) || self.is_needed(&uid, &claim).await? {
                is_pending = true;
                continue;
            }
            progress.waiting.remove(&uid);
            let state = self.state();
            let _guard = state.changes.lock().await;
            let now = state.reconciler.reserved_claims().await?;
            if now.get(&uid).is_none_or(|now| now.pending) {
                state.reconciler.release_claim(uid.clone()).await?;
                let (name, namespace) = (&claim.name, &claim.namespace);
                tracing::info!(
                    name,
                    namespace,
                    uid,
                    "a claim of the whole host was not used: it is given back"
                );
            }
        }
        Ok(is_pending)
    }

    /// Returns true if a claim is still allocated to this host for the same pod.
    async fn is_needed(&self, uid: &str, claim: &ReservedClaim) -> Result<bool, PlaceError> {
        let found = self.state().reader.read_of_host(&claim.namespace, &claim.name).await?;
        let is_same = |found: &HostClaim| {
            let ClaimId { uid: now, .. } = &found.id;
            let same =
                |allocated| now == uid && reservation(&found.id, allocated, claim.pending).is_same(claim);
            found.outcome != Some(false) && found.allocated.as_ref().is_ok_and(same)
        };
        Ok(found.as_ref().is_some_and(is_same))
    }
}
