//! The way to the thread that gives guarantees. The thread itself is `numaward_control`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
};

use numaward_api as api;
use numaward_engine::{self as engine, RebalanceLimits};
use numaward_model::{Settings, pod::PodName};
use numaward_topology::{Bytes, NodeId};
use parking_lot::RwLock;
use tokio::sync::{Semaphore, mpsc::UnboundedSender, oneshot};

use crate::{
    command::{Answer, Command, Message, PodCommand, RebalanceCommand},
    error::AdmissionError,
    pod::{ContainerPlacementRequest, MemoryClaim, PodPlacementRequest, SyncResult, UnpinnedReason, Update},
    request::{Request, Resize},
};

/// What clients ask may wait in this many commands.
pub const MAX_WAITING: usize = 1024;

/// Gives what is assigned now.
pub type View = Arc<dyn Fn() -> Arc<api::Allocations> + Send + Sync>;

/// A node that is short although nobody can be kept off it any more, and the pods in the way there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CrowdedNode {
    /// The node.
    pub node: NodeId,
    /// Pods without a guarantee, by UID as the runtime knows it, and what each has there that cannot be dropped: the one
    /// with the most first.
    pub pods: Vec<(String, Bytes)>,
}

/// What is shown of the latest rebalance, if there was one.
pub type LatestRebalance = Arc<RwLock<Option<Arc<api::Rebalance>>>>;

/// What is shown of crowded nodes.
pub type LatestCrowdedNodes = Arc<RwLock<Arc<Vec<CrowdedNode>>>>;

/// What the thread shows of its work, to those who do not wait for it.
#[derive(Clone, Debug, Default)]
pub struct ReconcilerStatus {
    /// What is held.
    pub allocations: Arc<RwLock<Arc<api::Allocations>>>,
    /// The latest rebalance.
    pub rebalance: LatestRebalance,
    /// Pods that run without what they ask for.
    pub unplaced: Arc<RwLock<Vec<PodName>>>,
    /// Nodes from which pods may be evicted.
    pub crowded: LatestCrowdedNodes,
    /// Whether enforcement is off, and what was written for the host as a whole is not all given back.
    pub has_pending_host_restores: Arc<AtomicBool>,
}

/// Asks the thread. Clones ask the same one.
#[derive(Clone, Debug)]
pub struct ReconcilerHandle {
    /// What clients ask waits in it only as far as there are `places`, and the container runtime waits for each answer.
    commands: mpsc::Sender<Message>,
    places: Arc<Semaphore>,
    shown: ReconcilerStatus,
}

impl ReconcilerHandle {
    /// The way to the thread that receives these commands and shows this.
    pub fn new(commands: mpsc::Sender<Message>, shown: ReconcilerStatus) -> Self {
        Self { commands, places: Arc::new(Semaphore::new(MAX_WAITING)), shown }
    }

    /// Asks for an allocation; a dry run only shows what would happen.
    pub async fn admit(&self, request: Request, dry_run: bool) -> Result<Answer, AdmissionError> {
        self.ask(|answer| Command::Admit { request: Box::new(request), dry_run, answer }).await
    }

    /// Changes an allocation; a dry run only shows what would happen.
    pub async fn resize_allocation(&self, resize: Resize, dry_run: bool) -> Result<Answer, AdmissionError> {
        self.ask(|answer| Command::Resize { resize: Box::new(resize), dry_run, answer }).await
    }

    /// Ends an allocation.
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

    /// Begins to carry moves out that make a request fit; [`ReconcilerHandle::rebalance`] says how far it is.
    pub async fn start_rebalance(&self, asked: RebalanceCommand) -> Result<api::Rebalance, AdmissionError> {
        self.ask(|answer| Command::Rebalance { asked: Box::new(asked), answer }).await
    }

    /// Cancels the rebalance that goes on: what was moved is moved back.
    pub async fn cancel_rebalance(&self) -> Result<api::Rebalance, AdmissionError> {
        self.ask(|answer| Command::Cancel { answer }).await
    }

    /// What is promised, as the kubelet's state files.
    pub async fn kubelet_state(&self) -> Result<api::KubeletState, AdmissionError> {
        self.ask(|answer| Command::KubeletState { answer }).await
    }

    /// The latest rebalance since the daemon started, if there was one.
    pub fn rebalance(&self) -> Option<Arc<api::Rebalance>> {
        self.shown.rebalance.read().clone()
    }

    /// Pods that run without what they ask for, because it is not there.
    pub fn unplaced(&self) -> Vec<PodName> {
        self.shown.unplaced.read().clone()
    }

    /// What is held.
    pub fn allocations(&self) -> Arc<api::Allocations> {
        self.shown.allocations.read().clone()
    }

    /// Nodes that are short although nobody can be kept off them any more, where the guard may have pods evicted.
    pub fn crowded(&self) -> Arc<Vec<CrowdedNode>> {
        self.shown.crowded.read().clone()
    }

    /// Whether enforcement is off, and what was written for the host as a whole (interrupts, power settings, weights of nodes) is
    /// not all given back: it is tried again.
    pub fn has_pending_host_restores(&self) -> bool {
        self.shown.has_pending_host_restores.load(Ordering::Relaxed)
    }

    /// Gives what is held.
    pub fn view(&self) -> View {
        let reconciler = self.clone();
        Arc::new(move || reconciler.allocations())
    }

    /// Asks on behalf of a client, and waits for the answer.
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

/// What the container runtime asks.
impl ReconcilerHandle {
    /// From now on what we write ourselves to containers is reported.
    pub fn send_updates(&self, sender: UnboundedSender<Vec<Update>>) {
        // If the reconciler ends already, there is nothing to send.
        let _ = self.send(Message::Runtime(Box::new(PodCommand::SendUpdates(sender))));
    }

    /// Asks on behalf of the container runtime, and waits for the answer.
    async fn runtime<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> PodCommand,
    ) -> Result<T, AdmissionError> {
        let (answer, result) = oneshot::channel();
        self.send(Message::Runtime(Box::new(command(answer))))?;
        result.await.map_err(|_| AdmissionError::Stopping)
    }

    /// A pod is to run: what it asks for as a whole is admitted, or refused.
    pub async fn run_pod(&self, ask: PodPlacementRequest) -> Result<(), AdmissionError> {
        self.runtime(|answer| PodCommand::RunPod { ask: Box::new(ask), answer }).await?
    }

    /// A container is to be created: what the runtime is to set, and why it goes without a guarantee if it does.
    pub async fn create(
        &self,
        ask: ContainerPlacementRequest,
    ) -> Result<(Settings, Option<UnpinnedReason>), AdmissionError> {
        self.runtime(|answer| PodCommand::Create { ask: Box::new(ask), answer }).await?
    }

    /// The container's process exists, and its cgroup; `ask` is what to make of it if its creation was not answered in
    /// time. Why it runs without what it should have, if it does.
    pub async fn bind(
        &self,
        id: String,
        ask: Option<Box<ContainerPlacementRequest>>,
    ) -> Result<Option<UnpinnedReason>, AdmissionError> {
        self.runtime(|answer| PodCommand::Bind { id, ask, answer }).await
    }

    /// A container ended, or was never started.
    pub async fn stopped(&self, id: String) -> Result<(), AdmissionError> {
        self.runtime(|answer| PodCommand::Stopped { id, answer }).await
    }

    /// The sandbox of a pod was stopped.
    pub async fn pod_stopped(&self, uid: String, sandbox: String) -> Result<(), AdmissionError> {
        self.runtime(|answer| PodCommand::PodStopped { uid, sandbox, answer }).await
    }

    /// These containers run, in these sandboxes with their pods' UIDs; no others, where this is `complete`.
    pub async fn synchronize(
        &self,
        containers: Vec<ContainerPlacementRequest>,
        sandboxes: BTreeMap<String, String>,
        complete: bool,
    ) -> Result<SyncResult, AdmissionError> {
        self.runtime(|answer| PodCommand::Synchronize { containers, sandboxes, complete, answer }).await
    }

    /// A container's requests are to change, and the runtime is asked to set `has`. What it is to hold then; none if it is
    /// not known.
    pub async fn resize(
        &self,
        id: String,
        to: engine::Resources,
        memory: Option<MemoryClaim>,
        has: Settings,
    ) -> Result<Option<Settings>, AdmissionError> {
        self.runtime(|answer| PodCommand::Resize { id, to, memory, has: Box::new(has), answer }).await?
    }

    /// What the containers of a pod share that have nothing of their own is to change.
    pub async fn resize_pod(&self, uid: String, to: engine::Resources) -> Result<(), AdmissionError> {
        self.runtime(|answer| PodCommand::ResizePod { uid, to, answer }).await?
    }
}
