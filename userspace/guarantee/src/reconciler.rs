//! Client of the reconciler's thread, which is in `numaward_control`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
};

use numaward_api as api;
use numaward_config::enforcement::DeclaredGuarantee;
use numaward_engine::{self as engine, PodId, RebalanceLimits, claims::allocator::Amounts};
use numaward_model::{Settings, SharedMap};
use numaward_topology::{Bytes, NodeId};
use parking_lot::RwLock;
use tokio::sync::{Semaphore, mpsc::UnboundedSender, oneshot};

use crate::{
    claim::{ChangedClaim, PlacedClaim, ReservedClaim},
    command::{AdmissionOutcome, Command, Message, PodCommand, RebalanceCommand},
    error::AdmissionError,
    pod::{ContainerPlacementRequest, MemoryClaim, PodPlacementRequest, SyncResult, UnpinnedReason, Update},
    request::{Request, Resize},
};

/// Maximum number of client commands that wait for an answer.
pub const MAX_WAITING: usize = 1024;

/// Function that returns the current guarantees.
pub type View = Arc<dyn Fn() -> Arc<api::Allocations> + Send + Sync>;

/// A node that is short of memory after all workloads that can be steered away were, and the pods that use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrowdedNode {
    pub node: NodeId,
    /// The largest is first.
    pub pods: Vec<CrowdingPod>,
}

/// A pod with memory on a crowded node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrowdingPod {
    /// The UID as the runtime reports it.
    pub uid: String,
    /// Memory on the node, beyond its guarantees, that cannot be dropped.
    pub memory: Bytes,
    /// True if the pod, one of its containers or a cgroup in it has a guarantee. It is not evicted then.
    pub has_guarantee: bool,
}

/// The latest rebalance, shared with the reconciler's thread; `None` before the first one.
pub type LatestRebalance = Arc<RwLock<Option<Arc<api::Rebalance>>>>;

/// Crowded nodes, shared with the reconciler's thread.
pub type LatestCrowdedNodes = Arc<RwLock<Arc<Vec<CrowdedNode>>>>;

/// State that the reconciler's thread publishes for readers that do not wait for it.
#[derive(Clone, Debug, Default)]
pub struct ReconcilerStatus {
    /// Current guarantees.
    pub allocations: Arc<RwLock<Arc<api::Allocations>>>,
    pub rebalance: LatestRebalance,
    /// Pods that run without the guarantee they request.
    pub unplaced: Arc<RwLock<Vec<PodId>>>,
    /// UIDs of the pods that are admitted, or for which room is being made.
    pub placed_pods: Arc<RwLock<BTreeSet<String>>>,
    /// Nodes from which pods may be evicted.
    pub crowded: LatestCrowdedNodes,
    /// True if enforcement is off and host-wide settings have a pending restore.
    pub has_pending_host_restores: Arc<AtomicBool>,
}

/// Sends commands to the reconciler's thread. Clones share one queue.
#[derive(Clone, Debug)]
pub struct ReconcilerHandle {
    /// Unbounded, but client commands need one of `places`, and the container runtime waits for each answer.
    commands: mpsc::Sender<Message>,
    places: Arc<Semaphore>,
    shown: ReconcilerStatus,
}

impl ReconcilerHandle {
    /// Creates a handle to the thread that receives `commands` and publishes `shown`.
    pub fn new(commands: mpsc::Sender<Message>, shown: ReconcilerStatus) -> Self {
        Self { commands, places: Arc::new(Semaphore::new(MAX_WAITING)), shown }
    }

    /// Admits a request. A dry run only returns the result.
    pub async fn admit(&self, request: Request, dry_run: bool) -> Result<AdmissionOutcome, AdmissionError> {
        self.ask(|answer| Command::Admit { request: Box::new(request), dry_run, answer }).await
    }

    /// Changes a guarantee. A dry run only returns the result.
    pub async fn resize_allocation(
        &self,
        resize: Resize,
        dry_run: bool,
    ) -> Result<AdmissionOutcome, AdmissionError> {
        self.ask(|answer| Command::Resize { resize: Box::new(resize), dry_run, answer }).await
    }

    /// Releases a guarantee.
    pub async fn release(&self, name: String) -> Result<(), AdmissionError> {
        self.ask(|answer| Command::Release { name, answer }).await
    }

    /// Plans moves that make a request fit. Nothing is moved.
    pub async fn plan(
        &self,
        request: Request,
        limits: RebalanceLimits,
    ) -> Result<api::MovePlan, AdmissionError> {
        self.ask(|answer| Command::Plan { request: Box::new(request), limits, answer }).await
    }

    /// Starts a rebalance; [`ReconcilerHandle::rebalance`] returns its progress.
    pub async fn start_rebalance(&self, asked: RebalanceCommand) -> Result<api::Rebalance, AdmissionError> {
        self.ask(|answer| Command::Rebalance { asked: Box::new(asked), answer }).await
    }

    /// Cancels the rebalance in progress and reverts its moves.
    pub async fn cancel_rebalance(&self) -> Result<api::Rebalance, AdmissionError> {
        self.ask(|answer| Command::Cancel { answer }).await
    }

    /// Returns the guarantees in the format of the kubelet's state files.
    pub async fn kubelet_state(&self) -> Result<api::KubeletState, AdmissionError> {
        self.ask(|answer| Command::KubeletState { answer }).await
    }

    /// Reserves the parts of a resource claim, durably. If the claim has the same parts already, its reservation is returned. `requests` has
    /// the requests of the pod, or `None` if its claims may have more.
    pub async fn reserve_claim(
        &self,
        uid: String,
        claim: ReservedClaim,
        requests: Option<Amounts>,
    ) -> Result<Arc<ReservedClaim>, AdmissionError> {
        self.ask(|answer| Command::ReserveClaim { uid, claim: Box::new(claim), requests, answer }).await
    }

    /// Reserves a claim of the whole host, durably. If it does not fit, running workloads are moved, as far as the configuration permits it.
    /// Releasing the claim ends that.
    pub async fn place_claim(
        &self,
        uid: String,
        claim: ReservedClaim,
        requests: Option<Amounts>,
    ) -> Result<PlacedClaim, AdmissionError> {
        self.ask(|answer| Command::PlaceClaim { uid, claim: Box::new(claim), requests, answer }).await
    }

    /// Limits the claims of a pod to these requests; `None` removes the limit. A claim regains amounts only if they are free. Returns the
    /// claims that changed.
    pub async fn limit_claims(
        &self,
        pod: String,
        requests: Option<Amounts>,
    ) -> Result<Vec<ChangedClaim>, AdmissionError> {
        self.ask(|answer| Command::LimitClaims { pod, requests, answer }).await
    }

    /// Releases the parts of a resource claim. A claim that is not reserved is no error.
    pub async fn release_claim(&self, uid: String) -> Result<(), AdmissionError> {
        self.ask(|answer| Command::ReleaseClaim { uid, answer }).await
    }

    /// Returns the reserved resource claims by UID.
    pub async fn reserved_claims(&self) -> Result<SharedMap<String, ReservedClaim>, AdmissionError> {
        self.ask(|answer| Command::ReservedClaims { answer }).await
    }

    /// Replaces the guarantees that the configuration declares. Guarantees without a declaration are released, those with a changed one are
    /// changed, and workloads with a new one get theirs, as far as they fit. After [`AdmissionError::Declared`], the same call tries again.
    pub async fn declare(&self, rules: Vec<DeclaredGuarantee>) -> Result<(), AdmissionError> {
        self.ask(|answer| Command::Declare { rules, answer }).await
    }

    /// Returns the latest rebalance since the daemon started.
    pub fn rebalance(&self) -> Option<Arc<api::Rebalance>> {
        self.shown.rebalance.read().clone()
    }

    /// Returns the pods that run without the guarantee they request, because it does not fit.
    pub fn unplaced(&self) -> Vec<PodId> {
        self.shown.unplaced.read().clone()
    }

    /// Returns true if a pod is admitted, or if running workloads are being moved to make room for it.
    pub fn has_room_for_pod(&self, uid: &str) -> bool {
        self.shown.placed_pods.read().contains(uid)
    }

    /// Returns the current guarantees.
    pub fn allocations(&self) -> Arc<api::Allocations> {
        self.shown.allocations.read().clone()
    }

    /// Returns nodes that are short of memory and from which pods may be evicted.
    pub fn crowded(&self) -> Arc<Vec<CrowdedNode>> {
        self.shown.crowded.read().clone()
    }

    /// Returns true if enforcement is off and host-wide settings (interrupts, power settings, weights of nodes) have
    /// a pending restore. It is retried.
    pub fn has_pending_host_restores(&self) -> bool {
        self.shown.has_pending_host_restores.load(Ordering::Relaxed)
    }

    /// Returns a function that returns the current guarantees.
    pub fn view(&self) -> View {
        let reconciler = self.clone();
        Arc::new(move || reconciler.allocations())
    }

    /// Sends a command of an API client and waits for the answer.
    async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<Result<T, AdmissionError>>) -> Command,
    ) -> Result<T, AdmissionError> {
        let place = self.places.clone().try_acquire_owned().map_err(|_| AdmissionError::Busy)?;
        let (answer, result) = oneshot::channel();
        self.send(Message::Client(command(answer), place))?;
        result.await.map_err(|_| AdmissionError::Stopping)?
    }

    fn send(&self, message: Message) -> Result<(), AdmissionError> {
        self.commands.send(message).map_err(|_| AdmissionError::Stopping)
    }
}

/// Commands of the container runtime.
impl ReconcilerHandle {
    /// Sets the channel for settings that the reconciler changes on its own.
    pub fn send_updates(&self, sender: UnboundedSender<Vec<Update>>) {
        // If the reconciler is stopping, there are no more updates.
        let _ = self.send(Message::Runtime(Box::new(PodCommand::SendUpdates(sender))));
    }

    /// Sends a command of the container runtime and waits for the answer.
    async fn runtime<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> PodCommand,
    ) -> Result<T, AdmissionError> {
        let (answer, result) = oneshot::channel();
        self.send(Message::Runtime(Box::new(command(answer))))?;
        result.await.map_err(|_| AdmissionError::Stopping)
    }

    /// Admits a pod as a whole before it runs, or refuses it.
    pub async fn run_pod(&self, ask: PodPlacementRequest) -> Result<(), AdmissionError> {
        self.runtime(|answer| PodCommand::RunPod { ask: Box::new(ask), answer }).await?
    }

    /// Returns the settings for a container that is being created, and the reason if it gets no guarantee.
    pub async fn create(
        &self,
        ask: ContainerPlacementRequest,
    ) -> Result<(Settings, Option<UnpinnedReason>), AdmissionError> {
        self.runtime(|answer| PodCommand::Create { ask: Box::new(ask), answer }).await?
    }

    /// Binds a container to its cgroup, which exists now. `ask` is used if its creation was not answered in time.
    /// Returns the reason if the container runs without its settings.
    pub async fn bind(
        &self,
        id: String,
        ask: Option<Box<ContainerPlacementRequest>>,
    ) -> Result<Option<UnpinnedReason>, AdmissionError> {
        self.runtime(|answer| PodCommand::Bind { id, ask, answer }).await
    }

    /// Reports that a container has ended or was never started.
    pub async fn stopped(&self, id: String) -> Result<(), AdmissionError> {
        self.runtime(|answer| PodCommand::Stopped { id, answer }).await
    }

    /// Reports that the sandbox of a pod was stopped.
    pub async fn pod_stopped(&self, uid: String, sandbox: String) -> Result<(), AdmissionError> {
        self.runtime(|answer| PodCommand::PodStopped { uid, sandbox, answer }).await
    }

    /// Compares the state with the running containers and the pod UIDs of the sandboxes. If `complete`, no other containers run.
    pub async fn synchronize(
        &self,
        containers: Vec<ContainerPlacementRequest>,
        sandboxes: BTreeMap<String, String>,
        complete: bool,
    ) -> Result<SyncResult, AdmissionError> {
        self.runtime(|answer| PodCommand::Synchronize { containers, sandboxes, complete, answer }).await
    }

    /// Changes the resources of a container, for which the runtime was asked to set `has`. Returns the settings to
    /// apply, or `None` if the container is not known.
    pub async fn resize(
        &self,
        id: String,
        to: engine::Resources,
        memory: Option<MemoryClaim>,
        has: Settings,
    ) -> Result<Option<Settings>, AdmissionError> {
        self.runtime(|answer| PodCommand::Resize { id, to, memory, has: Box::new(has), answer }).await?
    }

    /// Changes the share of a pod that its containers without an own guarantee have in common.
    pub async fn resize_pod(&self, uid: String, to: engine::Resources) -> Result<(), AdmissionError> {
        self.runtime(|answer| PodCommand::ResizePod { uid, to, answer }).await?
    }
}
