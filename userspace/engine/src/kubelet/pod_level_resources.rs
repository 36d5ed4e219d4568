//! Pods that have resources as a whole.

use super::KubeletStrategy;
use crate::{
    decision::{Cause, Reason},
    policy::{PodLevelSupport, TopologyManagerScope},
    request::{ContainerRequest, Request},
};

/// The kubelet's sentence for what was wrong; with a pod that has resources as a whole in some scope, or another one.
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

impl KubeletStrategy {
    /// Whether pods are placed that have resources as a whole, and state files say what they hold.
    pub(crate) fn places_pod_level_resources(&self) -> bool {
        self.pod_level_support == PodLevelSupport::Placed
    }

    /// Whether nobody manages what a pod has, as it has resources as a whole.
    pub(super) fn is_unmanaged(&self, request: &Request) -> bool {
        self.pod_level_support == PodLevelSupport::Unmanaged && request.resources.is_some()
    }
}

/// Who of a pod that has resources as a whole would be left with nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EmptyShare {
    /// An init container that ends.
    InitContainer,
    /// A container that stays.
    AppContainer,
}

/// Who would be left with nothing of such an amount of the pod, if containers have `own` of it for themselves, and some
/// `share` what is left.
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
