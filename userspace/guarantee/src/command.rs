//! What the thread that gives guarantees is asked, and what it is informed of.

use std::collections::BTreeMap;

use numaward_api as api;
use numaward_cgroup::CgroupEvent;
use numaward_engine::{self as engine, RebalanceLimits};
use numaward_model::Settings;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use crate::{
    error::AdmissionError,
    pod::{ContainerPlacementRequest, MemoryClaim, PodPlacementRequest, SyncResult, UnpinnedReason, Update},
    request::{Request, Resize},
};

/// What a request for an allocation comes to.
#[derive(Debug)]
pub enum Answer {
    /// It was admitted or changed, and the kernel holds it.
    Admitted(api::Allocation),
    /// It was a dry run.
    Dry(api::DryRun),
}

/// A rebalance that is asked for.
#[derive(Clone, Debug)]
pub struct RebalanceCommand {
    /// What room is made for.
    pub request: Request,
    /// What may be moved.
    pub limits: RebalanceLimits,
    /// The plan that the client has seen.
    pub plan: Option<String>,
    /// Whether the request is admitted in the end.
    pub admit: bool,
}

/// What the thread receives.
pub enum Message {
    /// The container runtime asks something, or reports something.
    Runtime(Box<PodCommand>),
    /// A client asks something: it keeps a place while it waits.
    Client(Command, OwnedSemaphorePermit),
    /// Others report something.
    Internal(Command),
    /// What was waited for is done.
    Completed,
}

/// What the reconciler is asked by others than the container runtime.
pub enum Command {
    Admit {
        request: Box<Request>,
        dry_run: bool,
        answer: oneshot::Sender<Result<Answer, AdmissionError>>,
    },
    Resize {
        resize: Box<Resize>,
        dry_run: bool,
        answer: oneshot::Sender<Result<Answer, AdmissionError>>,
    },
    Release {
        name: String,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    /// Moves that make a request fit are asked for.
    Plan {
        request: Box<Request>,
        limits: RebalanceLimits,
        answer: oneshot::Sender<Result<api::MovePlan, AdmissionError>>,
    },
    /// They are to be carried out.
    Rebalance {
        asked: Box<RebalanceCommand>,
        answer: oneshot::Sender<Result<api::Rebalance, AdmissionError>>,
    },
    /// What is being carried out is cancelled.
    Cancel {
        answer: oneshot::Sender<Result<api::Rebalance, AdmissionError>>,
    },
    /// What is promised, as the kubelet's state files.
    KubeletState {
        answer: oneshot::Sender<Result<api::KubeletState, AdmissionError>>,
    },
    /// Cgroups came or went.
    Cgroups(Vec<CgroupEvent>),
    /// Somebody else wrote knobs.
    KnobsChanged,
}

/// What the runtime asks of us, or reports.
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
        /// What to make of it if it is not known: its creation was not answered in time.
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
        /// The UIDs of pods by the ids of their sandboxes.
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
    /// What the containers of a pod share that have nothing of their own.
    ResizePod {
        uid: String,
        to: engine::Resources,
        answer: oneshot::Sender<Result<(), AdmissionError>>,
    },
    /// From now on the runtime is informed of settings that we write ourselves.
    SendUpdates(mpsc::UnboundedSender<Vec<Update>>),
}
