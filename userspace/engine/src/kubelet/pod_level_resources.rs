//! Pods with pod-level resources (`spec.resources`).

use crate::{
    decision::{Cause, Reason},
    policy::TopologyManagerScope,
    request::{ContainerRequest, Request},
};

/// Returns the kubelet's message for a cause. `whole` is the topology scope if the pod has pod-level resources.
pub(super) fn message(cause: &Cause, whole: Option<TopologyManagerScope>) -> String {
    match cause.reason() {
        Reason::TopologyAffinityError if whole == Some(TopologyManagerScope::Pod) => {
            "Pod Scope pod with pod-level resources failed admission under pod-scope topology manager"
                .to_owned()
        }
        Reason::TopologyAffinityError if whole == Some(TopologyManagerScope::Container) => {
            "Pod Scope pod with pod-level resources failed admission with a container-level topology manager"
                .to_owned()
        }
        Reason::TopologyAffinityError => "Resources cannot be allocated with Topology locality".to_owned(),
        Reason::UnexpectedAdmissionError => format!("Allocate failed due to {cause}, which is unexpected"),
        Reason::SmtAlignmentError | Reason::EmptyPodSharedPoolError | Reason::InvalidRequest => {
            cause.to_string()
        }
    }
}

/// Kind of container that would get no part of the pod-level resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmptyShare {
    /// Init container that is not a sidecar.
    InitContainer,
    /// Sidecar or app container.
    AppContainer,
}

/// Returns the kind of container that would get nothing of an amount of the pod. `own` returns the amount that a
/// container has for itself, `shares` whether it uses the shared rest.
pub(super) fn find_empty_share(
    request: &Request,
    whole: u64,
    own: impl Fn(&ContainerRequest) -> u64,
    shares: impl Fn(&ContainerRequest) -> bool,
) -> Option<EmptyShare> {
    let mut taken = 0u64;
    let mut is_shared = false;
    for (index, container) in request.all_containers().enumerate() {
        if index < request.init_containers.len() && !container.restartable {
            if shares(container) && taken >= whole {
                return Some(EmptyShare::InitContainer);
            }
        } else if shares(container) {
            is_shared = true;
        } else {
            taken = taken.saturating_add(own(container));
        }
    }
    (is_shared && taken >= whole).then_some(EmptyShare::AppContainer)
}
