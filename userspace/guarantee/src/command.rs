//! Messages to the reconciler's thread: commands of API clients and of the container runtime, and notifications.

use std::{collections::BTreeMap, sync::Arc};

use numaward_api as api;
use numaward_cgroup::CgroupEvent;
use numaward_config::enforcement::DeclaredGuarantee;
use numaward_engine::{self as engine, RebalanceLimits, claims::allocator::Amounts};
use numaward_model::{Settings, SharedMap};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::{
    claim::{ChangedClaim, PlacedClaim, ReservedClaim},
    error::AdmissionError,
    pod::{ContainerPlacementRequest, MemoryClaim, PodPlacementRequest, SyncResult, UnpinnedReason, Update},
    request::{Request, Resize},
};

/// Successful result of an admission or a resize.
#[derive(Debug)]
pub enum AdmissionOutcome {
    /// The guarantee was admitted or changed, and the kernel has its settings.
    Admitted(api::Allocation),
    /// Result of a dry run; nothing was changed.
    Dry(api::DryRun),
}

/// Command to move running workloads so that a request fits.
#[derive(Clone, Debug)]
pub struct RebalanceCommand {
    /// The request that the moves make room for.
    pub request: Request,
    pub limits: RebalanceLimits,
    /// ID of the plan that the client has seen. The command is refused if the plan has changed since.
    pub plan: Option<String>,
    /// True if the request is admitted after the last move.
    pub admit: bool,
}

/// A message to the reconciler's thread.
pub enum Message {
    Runtime(Box<PodCommand>),
    /// Command of an API client, with its place in the bounded queue. The place is free again when the permit is dropped.
    Client(Command, OwnedSemaphorePermit),
    /// Command of another part of the daemon.
    Internal(Command),
    /// A background operation has ended; wakes the thread.
    Completed,
}

/// A command that does not come from the container runtime.
pub enum Command {
    Admit {
        request: Box<Request>,
        dry_run: bool,
        answer: oneshot::Sender<Result<AdmissionOutcome, AdmissionError>>,
    },
    Resize {
        resize: Box<Resize>,
        dry_run: bool,
        answer: oneshot::Sender<Result<AdmissionOutcome, AdmissionError>>,
    },
    Release {
        name: String,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    /// Plans moves that make a request fit, without moving anything.
    Plan {
        request: Box<Request>,
        limits: RebalanceLimits,
        answer: oneshot::Sender<Result<api::MovePlan, AdmissionError>>,
    },
    Rebalance {
        asked: Box<RebalanceCommand>,
        answer: oneshot::Sender<Result<api::Rebalance, AdmissionError>>,
    },
    /// Cancels the rebalance in progress.
    Cancel {
        answer: oneshot::Sender<Result<api::Rebalance, AdmissionError>>,
    },
    /// Exports the guarantees in the format of the kubelet's state files.
    KubeletState {
        answer: oneshot::Sender<Result<api::KubeletState, AdmissionError>>,
    },
    /// Reserves the parts of a resource claim. A repeated request has the same result.
    ReserveClaim {
        uid: String,
        claim: Box<ReservedClaim>,
        /// Requests of the pod, if its claims may not have more.
        requests: Option<Amounts>,
        answer: oneshot::Sender<Result<Arc<ReservedClaim>, AdmissionError>>,
    },
    /// Reserves a claim of the whole host, with moves of running workloads if needed. A repeated request has the same result.
    PlaceClaim {
        uid: String,
        claim: Box<ReservedClaim>,
        /// Requests of the pod, if its claims may not have more.
        requests: Option<Amounts>,
        answer: oneshot::Sender<Result<PlacedClaim, AdmissionError>>,
    },
    /// Limits the claims of a pod to its requests.
    LimitClaims {
        /// UID of the pod, as the API server has it.
        pod: String,
        /// Requests of the pod, if its claims may not have more.
        requests: Option<Amounts>,
        answer: oneshot::Sender<Result<Vec<ChangedClaim>, AdmissionError>>,
    },
    /// Releases the parts of a resource claim, if it is reserved.
    ReleaseClaim {
        uid: String,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    /// Returns the reserved resource claims by UID.
    ReservedClaims {
        answer: oneshot::Sender<Result<SharedMap<String, ReservedClaim>, AdmissionError>>,
    },
    /// Replaces the guarantees that the configuration declares.
    Declare {
        rules: Vec<DeclaredGuarantee>,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    /// Cgroups were created or removed.
    Cgroups(Vec<CgroupEvent>),
    /// Another program may have written knobs of cgroups.
    KnobsChanged,
}

/// A command or a notification of the container runtime.
pub enum PodCommand {
    RunPod {
        ask: Box<PodPlacementRequest>,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    Create {
        ask: Box<ContainerPlacementRequest>,
        answer: oneshot::Sender<Result<(Settings, Option<UnpinnedReason>), AdmissionError>>,
    },
    Bind {
        id: String,
        /// The request of the creation; used if the container is not known because its creation was not answered in time.
        ask: Option<Box<ContainerPlacementRequest>>,
        answer: oneshot::Sender<Option<UnpinnedReason>>,
    },
    Stopped {
        id: String,
        answer: oneshot::Sender<()>,
    },
    PodStopped {
        uid: String,
        sandbox: String,
        answer: oneshot::Sender<()>,
    },
    Synchronize {
        containers: Vec<ContainerPlacementRequest>,
        /// Pod UIDs by sandbox ID.
        sandboxes: BTreeMap<String, String>,
        complete: bool,
        answer: oneshot::Sender<SyncResult>,
    },
    Resize {
        id: String,
        to: engine::Resources,
        memory: Option<MemoryClaim>,
        has: Box<Settings>,
        answer: oneshot::Sender<Result<Option<Settings>, AdmissionError>>,
    },
    /// Changes the share of a pod that its containers without an own guarantee have in common.
    ResizePod {
        uid: String,
        to: engine::Resources,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    /// Sets the channel for settings that the reconciler changes on its own and that the runtime has to know.
    SendUpdates(mpsc::UnboundedSender<Vec<Update>>),
}
