//! What is asked, and how an answer is read.

use numaward_api as api;
use numaward_engine::{Quantity, Request as EngineRequest, Resources, Terms};
use numaward_guarantee::{
    error::AdmissionError,
    pod::{ContainerPlacementRequest, MemoryClaim, PodClaim, PodPlacementRequest},
    request::Request,
};
use numaward_model::{
    Settings,
    pod::{GuaranteeSource, PodName},
};
use numaward_topology::Bytes;
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::model::{Answer, Call};
use crate::reconciler;

/// Looks whether there is an answer.
pub(super) type Poll = Box<dyn FnMut() -> Result<Option<Answer>, Lost> + Send>;

/// Nobody will answer, or only that it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    /// It was undone.
    Failed,
    /// The daemon is gone.
    Closed,
}

/// A request for a cgroup of the same name.
pub(super) fn admission(name: &str, cpus: api::Cpus, memory: &str) -> Call {
    let asked = api::AllocationRequest {
        cpus: Some(cpus),
        ..api::AllocationRequest::new(name, api::Target::Cgroup(format!("/{name}")), memory)
    };
    Call::Admit(Box::new(Request::new(&asked).unwrap()))
}

/// The only container of a pod, which asks for this as a whole or by itself.
pub(super) fn container(name: &str, millicpus: u64, is_whole: bool) -> ContainerPlacementRequest {
    let resources = Resources::none().with_cpu(Quantity::milli(millicpus));
    let resources = resources.with_memory(Quantity::whole(Bytes::mib(256).0));
    let owner = if is_whole { format!("uid-{name}") } else { format!("uid-{name}/c") };
    let mut request = EngineRequest::workload(owner.as_str(), resources);
    request.containers[0].name = "c".into();
    ContainerPlacementRequest {
        pod: PodPlacementRequest {
            pod: PodName {
                namespace: "default".to_owned(),
                name: name.to_owned(),
                uid: format!("uid-{name}"),
            },
            sandbox: format!("sandbox-{name}"),
            asked: if is_whole { PodClaim::Pod(request) } else { PodClaim::Container(request) },
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
        is_placed_by_other_program: false,
    }
}

pub(super) fn poll<T: Send + 'static>(
    mut result: oneshot::Receiver<T>,
    answer: impl Fn(T) -> Result<Answer, Lost> + Send + 'static,
) -> Poll {
    Box::new(move || match result.try_recv() {
        Ok(result) => answer(result).map(Some),
        Err(TryRecvError::Empty) => Ok(None),
        Err(TryRecvError::Closed) => Err(Lost::Closed),
    })
}

pub(super) fn given(result: Result<reconciler::Answer, AdmissionError>) -> Result<Answer, Lost> {
    match result {
        Ok(reconciler::Answer::Admitted(held)) => Ok(Answer::Given(held.cpus, held.nodes)),
        Ok(dry) => panic!("{dry:?}"),
        Err(error) => refused(error),
    }
}

pub(super) fn refused(error: AdmissionError) -> Result<Answer, Lost> {
    match error {
        AdmissionError::Rejected(..) => Ok(Answer::Refused),
        AdmissionError::Conflict(_) => Ok(Answer::Conflict),
        AdmissionError::Unknown(_) => Ok(Answer::Unknown),
        AdmissionError::Field(error) if error.field == "target.cgroup" => Ok(Answer::NoCgroup),
        AdmissionError::Enforce(_) | AdmissionError::Failed(_) => Err(Lost::Failed),
        error => panic!("{error}"),
    }
}
