//! Placement of pods and containers: the decision on their requests, before their cgroups exist.

use std::{sync::Arc, time::Instant};

use numaward_api as api;
use numaward_cgroup::CgroupPath;
use numaward_engine::{
    self as engine, OwnerId, Terms,
    claims::devices,
    policy::{FULL_PCPUS_ONLY, go_bool},
};
use numaward_guarantee::{
    error::AdmissionError,
    explain,
    pod::{
        AdmittedPod, ContainerPlacementRequest, PlacedContainer, PodClaim, PodPlacementRequest,
        UnpinnedReason, check_account,
    },
};
use numaward_model::{
    Settings,
    pod::{GuaranteeSource, PodContainer},
};

use super::uninstall;
use crate::{
    core::{Attempt, Core, admission, claims, conditions, settings, shared_pool},
    metrics::KubeletRules,
    spans,
};

/// Maximum number of remembered refused owners. At this number, all are forgotten, and later refusals are counted again.
const MAX_REFUSED_OWNERS: usize = 1000;

/// A request of a pod, or of one of its containers, on which the engine decides as a whole.
#[derive(Clone, Debug)]
pub(crate) struct OwnerRequest {
    pub(crate) request: engine::Request,
    /// The container, if the request is of a container alone.
    container: Option<String>,
    /// The cgroup of the pod or container, which may run already.
    pub(crate) cgroup: Option<CgroupPath>,
}

impl OwnerRequest {
    /// Returns the request of a pod before its first container; `None` if it has none as a whole.
    pub(crate) fn of_pod(ask: &PodPlacementRequest) -> Option<Self> {
        let PodClaim::Pod(request) = &ask.asked else { return None };
        Some(Self { request: request.clone(), container: None, cgroup: None })
    }

    /// Returns the request with which a container is admitted; `None` if the container requests nothing.
    pub(crate) fn of_container(core: &Core, ask: &ContainerPlacementRequest) -> Option<Self> {
        let alone =
            |request| Self { request, container: Some(ask.name.clone()), cgroup: Some(ask.cgroup.clone()) };
        match &ask.pod.asked {
            // If containers of this pod were admitted one by one, so are the following ones.
            PodClaim::Pod(request) if is_admitted_by_container(core, &ask.pod.pod.uid) => {
                Some(alone(engine::Request {
                    owner: ask.container_owner().into(),
                    init_containers: Vec::new(),
                    containers: request
                        .all_containers()
                        .filter(|asked| asked.name.as_str() == ask.name)
                        .cloned()
                        .collect(),
                    resources: None,
                }))
            }
            PodClaim::Pod(request) => {
                let cgroup = ask.cgroup.parent().filter(|pod| !pod.is_root());
                Some(Self { request: request.clone(), container: None, cgroup })
            }
            PodClaim::Container(request) => Some(alone(request.clone())),
            PodClaim::Nothing => None,
        }
    }
}

/// Admits a whole pod.
pub(crate) fn run_pod(
    core: &mut Core,
    ask: &PodPlacementRequest,
    attempt: Attempt,
) -> Result<(), AdmissionError> {
    let Some(asked) = OwnerRequest::of_pod(ask) else { return Ok(()) };
    if claims::has_pod(core, &ask.pod.uid) {
        return Ok(());
    }
    let _span = spans::admit(asked.request.owner.as_str(), false);
    let mut change = core.begin();
    admit_owner(change.core(), &asked, ask, attempt)?;
    change.store()
}

/// Decides on a request of an owner without an allocation; nothing is stored yet.
pub(crate) fn admit_owner(
    core: &mut Core,
    asked: &OwnerRequest,
    ask: &PodPlacementRequest,
    attempt: Attempt,
) -> Result<(), AdmissionError> {
    let OwnerRequest { request, container, cgroup } = asked;
    let owner = request.owner.as_str();
    if let Some(admitted) = core.store.state.pods.get_mut(owner) {
        admitted.sandbox.clone_from(&ask.sandbox);
        return Ok(());
    }
    if take_over_imported(core, ask) {
        return Ok(());
    }
    core.policy.check_fit()?;
    let mut notes = ask.notes.clone();
    let terms = applicable_terms(core, &ask.terms, &mut notes);
    let state = &core.store.state;
    let siblings = state.pods.iter().filter(|(_, admitted)| admitted.pod.uid == ask.pod.uid);
    let siblings =
        siblings.filter_map(|(owner, _)| state.ledger.owner(&owner.as_str().into())).map(AsRef::as_ref);
    check_account(request, &terms, siblings).map_err(|rejection| {
        AdmissionError::Rejected(
            rejection,
            Box::new(api::Explanation { notes: notes.clone(), ..api::Explanation::default() }),
        )
    })?;
    let started = Instant::now();
    let ledger = conditions::ledger_for(core, cgroup.as_ref(), None);
    let decision = spans::decide(&*core.policy.strategy, &ledger, request, &terms);
    if attempt == Attempt::First || decision.outcome.is_ok() {
        let took = started.elapsed();
        core.metrics.decided(request, &decision, took);
        // The runtime retries a refused pod, but a kubelet would have rejected it once.
        let (refused, is_refused) = (&mut core.pods.refused, decision.outcome.is_err());
        let was_refused = refused.remove(owner);
        if refused.len() >= MAX_REFUSED_OWNERS {
            refused.clear();
        }
        if is_refused {
            refused.insert(owner.to_owned());
        }
        if !(is_refused && was_refused) {
            let options = &core.config.cpu_manager_policy_options;
            let rules = KubeletRules {
                policy: terms.policy.unwrap_or_else(|| core.config.topology_policy()),
                scope: terms.scope.unwrap_or_else(|| core.config.topology_scope()),
                has_whole_cores: options
                    .get(FULL_PCPUS_ONLY)
                    .and_then(|value| go_bool(value))
                    .unwrap_or_default(),
                machine: &core.policy.machine,
            };
            core.metrics.decided_on_pod(request, &decision, &rules, took);
        }
    }
    let mut explanation = explain::explanation(&decision.explanation);
    explanation.notes = notes;
    match decision.outcome {
        Ok(_) => {
            core.store.state.ledger = decision.ledger;
            let admitted = AdmittedPod {
                pod: ask.pod.clone(),
                sandbox: ask.sandbox.clone(),
                container: container.clone(),
                explanation,
            };
            core.store.state.pods.insert(owner.to_owned(), admitted);
            Ok(())
        }
        Err(rejection) => {
            let refused = AdmissionError::Rejected(explain::rejection(&rejection), explanation.into());
            if attempt == Attempt::First {
                let pod = format!("{}/{}", ask.pod.namespace, ask.pod.name);
                tracing::info!(pod, container, reason = %refused, "the pod is refused");
            }
            Err(refused)
        }
    }
}

/// Returns the terms of a pod that this host can apply, and notes the others: they must not prevent the pod from running.
pub(crate) fn applicable_terms(core: &Core, terms: &Terms, notes: &mut Vec<String>) -> Terms {
    let mut terms = terms.clone();
    admission::without_unknown_class(core, &mut terms, notes);
    if let Err(problem) = admission::check_terms(core, &terms) {
        notes.push(format!("the pod's own terms cannot be applied: {problem}"));
        // The preferences may be valid without the policy, or the reverse.
        let (policy, preferences) = (terms.policy, terms.preferences.clone());
        terms.policy = None;
        if admission::check_terms(core, &terms).is_err() {
            terms = Terms { policy, scope: terms.scope, preferences, ..Terms::default() };
            if admission::check_terms(core, &terms).is_err() {
                terms.policy = None;
            }
        }
    }
    terms
}

/// Places a container: decides, stores the decision, removes its exclusive CPUs from containers on the shared pool, and returns the
/// settings for the runtime.
pub(crate) fn create(
    core: &mut Core,
    ask: &ContainerPlacementRequest,
    attempt: Attempt,
) -> Result<(Settings, Option<UnpinnedReason>), AdmissionError> {
    let _span = spans::admit(&ask.id, false);
    let mut change = core.begin();
    let (owner, unpinned) = match place(change.core(), ask, attempt) {
        Ok(owner) => (owner, None),
        Err(refused @ AdmissionError::Rejected(..)) => return Err(refused),
        // The container did not cause this failure.
        Err(error) => {
            tracing::error!(container = ask.id, %error, "a container gets no guarantee");
            (ask.container_owner(), Some(UnpinnedReason::Unfit))
        }
    };
    let placed = note_placed(change.core(), ask, owner);
    let settings = settings::container_settings(&change, &placed);
    match change.store() {
        Ok(()) => {
            core.bindings.note_created(&ask.id, Instant::now());
            shared_pool::follow(core);
            Ok((settings, unpinned))
        }
        Err(error) => {
            // It must not use CPUs of guarantees, even without a guarantee of its own.
            tracing::error!(container = ask.id, %error, "a container gets no guarantee");
            Ok((settings::sharing_settings(core), Some(UnpinnedReason::Ledger)))
        }
    }
}

/// Admits the request of a container, and returns its owner; nothing is stored yet.
pub(crate) fn place(
    core: &mut Core,
    ask: &ContainerPlacementRequest,
    attempt: Attempt,
) -> Result<String, AdmissionError> {
    let uid = &ask.pod.pod.uid;
    if let Some(owner) = claims::owner_for(core, ask)? {
        return Ok(owner);
    }
    if claims::has_pod(core, uid) {
        return Ok(ask.container_owner());
    }
    // Imported guarantees of a kubelet belong to the whole pod.
    if matches!(ask.pod.asked, PodClaim::Container(_))
        && (take_over_imported(core, &ask.pod) || is_admitted_as_pod(core, uid))
    {
        return Ok(uid.clone());
    }
    let Some(asked) = OwnerRequest::of_container(core, ask) else { return Ok(ask.container_owner()) };
    if asked.container.is_none() || !asked.request.containers.is_empty() {
        admit_owner(core, &asked, &ask.pod, attempt)?;
    }
    Ok(asked.request.owner.to_string())
}

/// Returns true if containers of this pod were admitted one by one.
fn is_admitted_by_container(core: &Core, uid: &str) -> bool {
    let of_pod = |admitted: &Arc<AdmittedPod>| admitted.pod.uid == uid && admitted.container.is_some();
    core.store.state.pods.values().any(of_pod)
}

/// Returns true if this pod was admitted as a whole.
fn is_admitted_as_pod(core: &Core, uid: &str) -> bool {
    core.store.state.pods.get(uid).is_some_and(|admitted| admitted.container.is_none())
}

pub(crate) fn note_placed(
    core: &mut Core,
    ask: &ContainerPlacementRequest,
    owner: String,
) -> PlacedContainer {
    let of = PodContainer {
        pod: ask.pod.pod.clone(),
        container: ask.name.clone(),
        id: ask.id.clone(),
        sandbox: ask.pod.sandbox.clone(),
        slice: match OwnerId::from(owner.as_str()) {
            of_claim if devices::is_part(&of_claim) => GuaranteeSource::Claim,
            of_pod if of_pod.as_str() == ask.pod.pod.uid => ask.slice,
            _ => GuaranteeSource::Own,
        },
        owner,
    };
    let known = core.store.state.containers.get(&ask.id).and_then(|known| known.without_us.clone());
    let without_us = known.or_else(|| uninstall::original_settings(core, &ask.has));
    let (cgroup, memory, keeps_pod_quota) = (ask.cgroup.clone(), ask.memory, ask.keeps_pod_quota);
    let placed = PlacedContainer { of, cgroup, memory, keeps_pod_quota, without_us };
    if placed.of.slice == GuaranteeSource::Claim {
        core.pods.shared_claims.note_changed(&placed.of.owner);
    }
    core.store.state.containers.insert(ask.id.clone(), placed.clone());
    placed
}

/// Takes over the imported guarantee of a pod; returns false if it has none.
pub(crate) fn take_over_imported(core: &mut Core, ask: &PodPlacementRequest) -> bool {
    let uid = ask.pod.uid.as_str();
    if core.store.state.pods.contains_key(uid) || core.store.state.ledger.owner(&OwnerId::from(uid)).is_none()
    {
        return false;
    }
    let mut notes = ask.notes.clone();
    notes.push("imported from the state of the kubelet, which placed the pod".to_owned());
    let admitted = AdmittedPod {
        pod: ask.pod.clone(),
        sandbox: ask.sandbox.clone(),
        container: None,
        explanation: api::Explanation { notes, ..api::Explanation::default() },
    };
    tracing::info!(pod = ask.pod.name, uid, "the pod keeps the guarantee that was imported from the kubelet");
    core.store.state.pods.insert(uid.to_owned(), admitted);
    true
}
