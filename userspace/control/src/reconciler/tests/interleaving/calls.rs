//! Requests of clients and of the container runtime, and the reading of answers.

use numaward_api as api;
use numaward_engine::{PodId, Quantity, Request as EngineRequest, Resources, Terms};
use numaward_guarantee::{
    error::AdmissionError,
    pod::{ContainerPlacementRequest, MemoryClaim, PodClaim, PodPlacementRequest},
    request::Request,
};
use numaward_model::{Settings, pod::GuaranteeSource};
use numaward_topology::Bytes;
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::model::{Call, CallAnswer};
use crate::reconciler;

/// Returns the answer of a call if there is one.
pub(super) type Poll = Box<dyn FnMut() -> Result<Option<CallAnswer>, CallFailure> + Send>;

/// Reason why a call has no answer that the model predicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallFailure {
    /// The operation failed and was undone.
    Failed,
    /// The daemon has ended.
    Closed,
}

/// Returns the admission of a workload whose cgroup has the same name.
pub(super) fn admission(name: &str, cpus: api::Cpus, memory: &str) -> Call {
    let request = api::AllocationRequest {
        cpus: Some(cpus),
        ..api::AllocationRequest::new(name, api::Target::Cgroup(format!("/{name}")), memory)
    };
    Call::Admit(Box::new(Request::new(&request).unwrap()))
}

/// Returns the request for the only container of a pod. The resources are pod-level resources or those of the container.
pub(super) fn container(name: &str, millicpus: u64, is_pod_level: bool) -> ContainerPlacementRequest {
    let resources = Resources::none().with_cpu(Quantity::milli(millicpus));
    let resources = resources.with_memory(Quantity::whole(Bytes::mib(256).0));
    let owner = if is_pod_level { format!("uid-{name}") } else { format!("uid-{name}/c") };
    let mut request = EngineRequest::workload(owner.as_str(), resources);
    request.containers[0].name = "c".into();
    ContainerPlacementRequest {
        pod: PodPlacementRequest {
            pod: PodId { namespace: "default".to_owned(), name: name.to_owned(), uid: format!("uid-{name}") },
            sandbox: format!("sandbox-{name}"),
            asked: if is_pod_level { PodClaim::Pod(request) } else { PodClaim::Container(request) },
            terms: Terms::default(),
            notes: Vec::new(),
        },
        cgroup: format!("/kubepods/pod-{name}/{name}").parse().unwrap(),
        id: name.to_owned(),
        name: "c".to_owned(),
        slice: GuaranteeSource::Own,
        memory: MemoryClaim::default(),
        keeps_pod_quota: false,
        has: Settings::default(),
        claims: numaward_guarantee::pod::ClaimUses::default(),
        is_placed_by_other_program: false,
    }
}

pub(super) fn poll<T: Send + 'static>(
    mut result: oneshot::Receiver<T>,
    answer: impl Fn(T) -> Result<CallAnswer, CallFailure> + Send + 'static,
) -> Poll {
    Box::new(move || match result.try_recv() {
        Ok(result) => answer(result).map(Some),
        Err(TryRecvError::Empty) => Ok(None),
        Err(TryRecvError::Closed) => Err(CallFailure::Closed),
    })
}

pub(super) fn admission_answer(
    result: Result<reconciler::AdmissionOutcome, AdmissionError>,
) -> Result<CallAnswer, CallFailure> {
    match result {
        Ok(reconciler::AdmissionOutcome::Admitted(held)) => Ok(CallAnswer::Admitted(held.cpus, held.nodes)),
        Ok(dry) => panic!("{dry:?}"),
        Err(error) => refusal_answer(error),
    }
}

pub(super) fn refusal_answer(error: AdmissionError) -> Result<CallAnswer, CallFailure> {
    match error {
        AdmissionError::Rejected(..) => Ok(CallAnswer::Refused),
        AdmissionError::Conflict(_) => Ok(CallAnswer::Conflict),
        AdmissionError::Unknown(_) => Ok(CallAnswer::Unknown),
        AdmissionError::Field(error) if error.field == "target.cgroup" => Ok(CallAnswer::NoCgroup),
        AdmissionError::Enforce(_) | AdmissionError::Failed(_) => Err(CallFailure::Failed),
        error => panic!("{error}"),
    }
}
