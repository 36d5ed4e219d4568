//! Reservations for resource claims: the CPUs and memory of the nodes that the scheduler chose, or, for a claim of the whole host, of those
//! that the strategy chooses.
//!
//! The reservation is stored before the kubelet gets an answer, and lasts until the kubelet has the claim unprepared, also over a restart of
//! the daemon or the host. If the pod is resized in place, its requests limit the reservation: the claim keeps the allocated amounts, and
//! the ledger has the present ones.

use std::{collections::BTreeSet, sync::Arc, time::Instant};

use numaward_api::{self as api, EnforcementMode};
use numaward_engine::{
    self as engine, Ledger, OwnerId, Quantity, Terms,
    claims::{allocator::Amounts, devices},
};
use numaward_guarantee::{
    claim::{self, ChangedClaim, ReservedClaim, ReservedPart, add, check_pod, requested, take},
    error::AdmissionError,
    explain,
    pod::ContainerPlacementRequest,
    state::State,
};
use numaward_store::fault;
use numaward_topology::{Bytes, CpuSet, NodeId, NodeSet, NumaNode};

use super::{Core, admission, conditions, execution::Transaction, shared_pool};
use crate::spans;

/// Reserves the parts of a claim, or none of them. A claim that is reserved with the same parts keeps its reservation. If `requests` is given,
/// all claims of the pod together get no more than that: a quota counts requests.
pub(crate) fn reserve(
    core: &mut Core,
    uid: &str,
    claim: ReservedClaim,
    requests: Option<&Amounts>,
) -> Result<Arc<ReservedClaim>, AdmissionError> {
    if core.mode() != EnforcementMode::On {
        return Err(AdmissionError::Off);
    }
    let known = core.store.state.claims.get(uid).cloned();
    if let Some(known) = known.as_ref().filter(|known| known.is_same(&claim)) {
        if !known.pending || claim.pending {
            return Ok(known.clone());
        }
        let (claim, mut change) = (Arc::new(claim), core.begin());
        change.state().claims.insert(uid.to_owned(), claim.clone());
        change.store()?;
        return Ok(claim);
    }
    let others = core.store.state.claims.iter().filter(|(of, other)| *of != uid && other.pod == claim.pod);
    let of_pod = others.map(|(of, other)| (of.as_str(), other.as_ref())).chain([(uid, &claim)]);
    check_pod(of_pod, requests).map_err(|rejection| AdmissionError::Rejected(rejection, Box::default()))?;
    core.policy.check_fit()?;
    let _span = spans::admit(&claim.name, false);
    let mut change = core.begin();
    // The scheduler has allocated the claim again.
    if known.is_some_and(|known| known.parts != claim.parts) {
        remove(change.core(), uid);
    }
    if !change.store.state.claims.contains_key(uid) {
        for (number, part) in claim.parts.iter().enumerate() {
            let (request, terms) = part.placement_request(devices::part_owner(uid, number), &part.consumed);
            admission::check_terms(&change, &terms)?;
            let started = Instant::now();
            let ledger = conditions::ledger_for(&change, None, None);
            let decision = spans::decide(&*change.policy.strategy, &ledger, &request, &terms);
            change.metrics.decided(&request, &decision, started.elapsed());
            if let Err(rejection) = &decision.outcome {
                let explanation = explain::explanation(&decision.explanation);
                let rejection = describe_rejection(&change, part, rejection);
                return Err(AdmissionError::Rejected(rejection, explanation.into()));
            }
            let ledger = admission::note_all_started(&change, decision.ledger, &request);
            change.state().ledger = ledger;
        }
        unite(&mut change.state().ledger, uid, &claim, &claim.consumed());
    }
    let claim = Arc::new(claim);
    change.state().claims.insert(uid.to_owned(), claim.clone());
    change.store()?;
    fault::point("claim.reserved");
    core.pods.waiting_claims.remove(uid);
    tracing::info!(claim = claim.name, namespace = claim.namespace, uid, "the resource claim is reserved");
    shared_pool::note_guarantees_changed(core);
    Ok(claim)
}

/// Returns the request of a claim of the whole host to the strategy; `None` if the claim has other parts.
pub(crate) fn host_request(uid: &str, claim: &ReservedClaim) -> Option<(engine::Request, Terms)> {
    match &claim.parts[..] {
        [part] if part.node.is_none() => {
            Some(part.placement_request(devices::part_owner(uid, 0), &part.consumed))
        }
        _ => None,
    }
}

/// Makes one owner of the parts of a claim, which have these amounts together.
fn unite(ledger: &mut Ledger, uid: &str, claim: &ReservedClaim, amounts: &Amounts) {
    if claim.parts.len() > 1 {
        let parts: Vec<_> = (0..claim.parts.len()).map(|part| devices::part_owner(uid, part)).collect();
        let (request, terms) = claim.placement_request(uid, amounts);
        ledger.unite(&parts, &claim::owner(uid), request, terms);
    }
}

/// Limits the claims of a pod to these requests; `None` removes the limit. A claim regains amounts only if they are free. Returns the
/// claims that changed.
pub(crate) fn limit(
    core: &mut Core,
    pod: &str,
    requests: Option<&Amounts>,
) -> Result<Vec<ChangedClaim>, AdmissionError> {
    if core.mode() != EnforcementMode::On {
        return Ok(Vec::new());
    }
    let claims = core.store.state.claims.iter().filter(|(_, claim)| claim.pod == pod);
    let claims: Vec<_> = claims.map(|(uid, claim)| (uid.clone(), claim.clone())).collect();
    let mut remaining = requests.cloned();
    let (mut changed, mut owners) = (Vec::new(), BTreeSet::new());
    let mut change = core.begin();
    for (uid, claim) in claims {
        let wanted = claim.parts.iter().map(|part| match &mut remaining {
            Some(remaining) => take(remaining, &part.consumed),
            None => part.consumed.clone(),
        });
        let (owner, wanted) = (claim::owner(&uid), wanted.collect::<Vec<_>>());
        let is_changed = match (&claim.parts[..], &wanted[..]) {
            ([part], [wanted]) => change_part(&mut change, &owner, part, wanted.clone()),
            _ => change_parts(&mut change, &uid, &claim, wanted),
        };
        if is_changed {
            let given = present_amounts(&change, &owner);
            changed.push(ChangedClaim { name: claim.name.clone(), given, allocated: claim.consumed() });
            owners.insert(owner.to_string());
        }
    }
    let ledger = change.store.state.ledger.clone();
    drop(change);
    if !changed.is_empty() {
        shared_pool::change_containers(core, Some(ledger), |placed| owners.contains(&placed.of.owner))?;
        tracing::info!(pod, "resource claims follow the changed requests of their pod");
    }
    Ok(changed)
}

/// Changes a part of a claim to these amounts, to larger ones only if they are free. Returns true if it changed.
fn change_part(
    change: &mut Transaction<'_>,
    owner: &OwnerId,
    part: &ReservedPart,
    mut wanted: Amounts,
) -> bool {
    wanted.retain(|_, amount| !amount.is_zero());
    let before = present_amounts(change, owner);
    let mut less = before.clone();
    less.retain(|name, amount| {
        *amount = wanted.get(name).map_or(Quantity::default(), |wanted| (*amount).min(*wanted));
        !amount.is_zero()
    });
    if less != before {
        while let Err(error) = give(change, owner, part, &less, Growth::Less) {
            if let Some(cpus) = less.remove(devices::CPU) {
                // Only whole cores may be given.
                let fewer = cpus.saturating_sub(Quantity::whole(1));
                less.extend((!fewer.is_zero()).then(|| (devices::CPU.into(), fewer)));
            } else if less.is_empty() {
                tracing::error!(%owner, error = error.message, "a part of a resource claim cannot be reduced to the requests of its pod");
                return false;
            } else {
                less.clear();
            }
        }
    }
    if less != wanted
        && let Err(error) = give(change, owner, part, &wanted, Growth::More)
    {
        tracing::debug!(%owner, error = error.message, "a part of a resource claim cannot have all requested amounts");
    }
    present_amounts(change, owner) != before
}

/// Changes the parts of a claim on several devices to these amounts by new decisions on their nodes, to larger ones only if they are free.
/// Returns true if they changed.
fn change_parts(
    change: &mut Transaction<'_>,
    uid: &str,
    claim: &ReservedClaim,
    mut wanted: Vec<Amounts>,
) -> bool {
    let owner = claim::owner(uid);
    let before = present_amounts(change, &owner);
    for amounts in &mut wanted {
        amounts.retain(|_, amount| !amount.is_zero());
    }
    // Amounts that shrink must not wait for others to be free.
    let mut rest = before.clone();
    let less: Vec<Amounts> = wanted.iter().map(|amounts| take(&mut rest, amounts)).collect();
    if sum(&less) != before {
        reduce_parts(change, uid, claim, less);
    }
    if sum(&wanted) != present_amounts(change, &owner) {
        match decide_parts(change, uid, claim, &wanted, false) {
            Ok(ledger) => replace_parts(change, uid, claim, ledger, &wanted),
            Err((_, error)) => tracing::debug!(
                claim = claim.name,
                error = error.message,
                "a resource claim cannot have all requested amounts"
            ),
        }
    }
    present_amounts(change, &owner) != before
}

/// Reduces the parts of a claim to these amounts, or to fewer CPUs, as only whole cores may be given.
fn reduce_parts(change: &mut Transaction<'_>, uid: &str, claim: &ReservedClaim, mut less: Vec<Amounts>) {
    loop {
        let (failed, error) = match decide_parts(change, uid, claim, &less, true) {
            Ok(ledger) => return replace_parts(change, uid, claim, ledger, &less),
            Err(failed) => failed,
        };
        let cpus = less.get_mut(failed).and_then(|amounts| amounts.get_mut(devices::CPU));
        let Some(cpus) = cpus.filter(|cpus| !cpus.is_zero()) else {
            tracing::error!(
                claim = claim.name,
                error = error.message,
                "a resource claim cannot be reduced to the requests of its pod"
            );
            return;
        };
        *cpus = cpus.saturating_sub(Quantity::whole(1));
    }
}

fn replace_parts(
    change: &mut Transaction<'_>,
    uid: &str,
    claim: &ReservedClaim,
    mut ledger: Ledger,
    amounts: &[Amounts],
) {
    unite(&mut ledger, uid, claim, &sum(amounts));
    change.state().ledger = ledger;
}

/// Returns the sums of amounts that are not 0.
fn sum(parts: &[Amounts]) -> Amounts {
    let mut sum = Amounts::new();
    for amounts in parts {
        add(&mut sum, amounts);
    }
    sum.retain(|_, amount| !amount.is_zero());
    sum
}

/// Returns the ledger with new decisions on the parts of a claim, or the number of the part that does not fit. `is_less`: the claim has
/// these amounts, so they need not be free.
fn decide_parts(
    core: &Core,
    uid: &str,
    claim: &ReservedClaim,
    wanted: &[Amounts],
    is_less: bool,
) -> Result<Ledger, (usize, Box<engine::Rejection>)> {
    let (strategy, ledger) = (&core.policy.strategy, &core.store.state.ledger);
    let conditions = ledger.conditions().clone();
    let mut ledger = strategy.release(ledger, &claim::owner(uid));
    if is_less {
        ledger.set_conditions(Arc::default());
    }
    for (number, (part, amounts)) in claim.parts.iter().zip(wanted).enumerate() {
        let (request, terms) = part.placement_request(devices::part_owner(uid, number), amounts);
        let decision = spans::decide(&**strategy, &ledger, &request, &terms);
        decision.outcome.map_err(|error| (number, error))?;
        ledger = admission::note_all_started(core, decision.ledger, &request);
    }
    ledger.set_conditions(conditions);
    Ok(ledger)
}

fn present_amounts(core: &Core, owner: &OwnerId) -> Amounts {
    let request = core.store.state.ledger.owner(owner).and_then(|account| account.request.clone());
    request.map(|request| requested(&request)).unwrap_or_default()
}

/// Direction in which the amounts of a part change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Growth {
    Less,
    More,
}

/// Gives a part of a claim these amounts: in place if only amounts differ, otherwise by a new decision.
fn give(
    change: &mut Transaction<'_>,
    owner: &OwnerId,
    part: &ReservedPart,
    amounts: &Amounts,
    growth: Growth,
) -> Result<(), Box<engine::Rejection>> {
    let (request, terms) = part.placement_request(owner.clone(), amounts);
    let is_like = present_amounts(change, owner).keys().eq(amounts.keys());
    let (strategy, ledger) = (&change.policy.strategy, &change.store.state.ledger);
    if let Some(container) = request.containers.first().filter(|_| is_like)
        && let Ok(ledger) = strategy.resize(ledger, owner, &container.name, &container.requests)
    {
        change.state().ledger = ledger;
        return Ok(());
    }
    let conditions = ledger.conditions().clone();
    let mut ledger = strategy.release(ledger, owner);
    if growth == Growth::Less {
        // The part has these amounts, so they need not be free.
        ledger.set_conditions(Arc::default());
    }
    let decision = spans::decide(&**strategy, &ledger, &request, &terms);
    decision.outcome?;
    let mut ledger = admission::note_all_started(change, decision.ledger, &request);
    ledger.set_conditions(conditions);
    change.state().ledger = ledger;
    Ok(())
}

/// Returns a rejection with the amounts of the part's node.
fn describe_rejection(core: &Core, part: &ReservedPart, rejection: &engine::Rejection) -> api::Rejection {
    let reason = rejection.reason.to_string();
    let Some(node) = part.node else { return describe_full_host(core, part, rejection) };
    let Some(of_node) = core.policy.machine.nodes.get(&node) else {
        let message = format!("this host has no node {node}");
        return api::Rejection { reason, message, shortfalls: Vec::new() };
    };
    let shortfalls = part.consumed.iter().filter_map(|(name, amount)| {
        let (free, withheld) = free_amount(core, (node, of_node), name);
        let requested = amount.units().unwrap_or(u64::MAX);
        let resource = name.to_string();
        (requested > free).then_some(api::Shortfall { node: node.0, resource, requested, free, withheld })
    });
    let shortfalls: Vec<_> = shortfalls.collect();
    let message = match shortfalls.as_slice() {
        [] => rejection.message.clone(),
        _ => format!("node {node}, on which the scheduler allocated the resource claim, has too little free"),
    };
    api::Rejection { reason, message, shortfalls }
}

/// Returns the free amount of a capacity on a node, and the withheld one.
fn free_amount(core: &Core, (node, data): (NodeId, &NumaNode), name: &str) -> (u64, u64) {
    let ledger = &core.store.state.ledger;
    let Some(kind) = devices::memory_kind(name) else {
        return ((&core.free_cpus() & &data.cpus).len() as u64, 0);
    };
    let withheld = ledger.conditions().withheld_on(kind, node).0;
    let memory = ledger.memory();
    let free = memory.get(&node).and_then(|kinds| kinds.get(&kind)).map_or(0, |account| account.free.0);
    (free.saturating_sub(withheld), withheld)
}

/// Returns a rejection with the amounts of the whole host.
fn describe_full_host(core: &Core, part: &ReservedPart, rejection: &engine::Rejection) -> api::Rejection {
    let amount = |name: &str, units: u64| match devices::memory_kind(name) {
        Some(_) => Bytes(units).rounded(),
        None => units.to_string(),
    };
    let nodes = &core.policy.machine.nodes;
    let of_each = part.consumed.iter().filter(|(_, amount)| !amount.is_zero()).map(|(name, requested)| {
        let free = nodes.iter().filter_map(|(node, data)| {
            let (free, _) = free_amount(core, (*node, data), name);
            (free > 0).then(|| format!("{} on node {node}", amount(name, free)))
        });
        let free = free.collect::<Vec<_>>().join(", ");
        let free = if free.is_empty() { "none".to_owned() } else { free };
        format!("{name} requested {}, free {free}", amount(name, requested.units().unwrap_or(u64::MAX)))
    });
    let of_each = of_each.collect::<Vec<_>>().join("; ");
    let message = format!("{}: {of_each}", rejection.message);
    api::Rejection { reason: rejection.reason.to_string(), message, shortfalls: Vec::new() }
}

/// Notes whether room is made for a claim.
pub(crate) fn note_waiting(core: &mut Core, uid: &str, is_waiting: bool) {
    if is_waiting {
        core.pods.waiting_claims.insert(uid.to_owned());
    } else {
        core.pods.waiting_claims.remove(uid);
    }
}

/// Returns true if room is made for a claim.
pub(crate) fn is_waiting(core: &Core, uid: &str) -> bool {
    core.pods.waiting_claims.contains(uid)
}

/// Returns true if a claim is reserved for this pod. Its containers get the CPUs and memory of its claims, and nothing for their own
/// requests.
pub(super) fn has_pod(core: &Core, uid: &str) -> bool {
    core.store.state.claims.values().any(|claim| claim.pod == uid)
}

/// Returns the owner of the reservation that a container uses; `None` if it uses none.
///
/// The kubelet does not ask again for a claim that it has prepared, if another pod uses it, too. So a pod takes over the claim that it
/// names from one without containers; while that has some, the pod is refused.
pub(super) fn owner_for(
    core: &mut Core,
    ask: &ContainerPlacementRequest,
) -> Result<Option<String>, AdmissionError> {
    let pod = &ask.pod.pod;
    let State { claims, containers, .. } = &core.store.state;
    let is_named =
        |claim: &ReservedClaim| claim.namespace == pod.namespace && ask.claims.names.contains(&claim.name);
    // A claim that was deleted may have the name of a later one until the kubelet has it unprepared.
    let is_used = |(uid, claim): &(&String, &Arc<ReservedClaim>)| {
        let is_own = claim.pod == pod.uid || ask.claims.uids.is_empty();
        ask.claims.uids.contains(*uid) || is_own && is_named(claim)
    };
    let refuse = |reason: &str, message: String| {
        let rejection = api::Rejection { reason: reason.to_owned(), message, shortfalls: Vec::new() };
        Err(AdmissionError::Rejected(rejection, Box::default()))
    };
    let (used, of_others): (Vec<_>, Vec<_>) =
        claims.iter().filter(is_used).partition(|(_, claim)| claim.pod == pod.uid);
    match (used.as_slice(), of_others.as_slice()) {
        ([], []) => Ok(None),
        ([(uid, _)], _) => Ok(Some(claim::owner(uid).to_string())),
        ([], [(uid, claim), ..]) => {
            let has_containers = containers.values().any(|placed| placed.of.pod.uid == claim.pod);
            if has_containers || !is_named(claim) {
                let message = format!(
                    "container {} uses the resource claim {}/{}, which is prepared for another pod: a claim is for one pod (a \
                     ResourceClaimTemplate makes one for each)",
                    ask.name, claim.namespace, claim.name
                );
                return refuse("ClaimOfAnotherPod", message);
            }
            let (uid, taken) =
                ((*uid).clone(), ReservedClaim { pod: pod.uid.clone(), ..ReservedClaim::clone(claim) });
            tracing::info!(
                claim = taken.name,
                namespace = taken.namespace,
                pod = pod.name,
                "the pod takes over a resource claim"
            );
            let owner = claim::owner(&uid).to_string();
            core.store.state.claims.insert(uid, Arc::new(taken));
            Ok(Some(owner))
        }
        (several, _) => {
            let message = format!(
                "container {} uses {} resource claims of {}, and one is supported",
                ask.name,
                several.len(),
                devices::DRIVER
            );
            refuse("SeveralClaims", message)
        }
    }
}

/// Returns the reserved claims for the API.
pub(crate) fn describe(core: &Core) -> Vec<api::ReservedClaim> {
    let State { claims, containers, ledger, .. } = &core.store.state;
    if claims.is_empty() {
        return Vec::new();
    }
    let used: BTreeSet<&str> = containers.values().map(|placed| placed.of.owner.as_str()).collect();
    let describe = |(uid, claim): (&String, &Arc<ReservedClaim>)| {
        let owner = claim::owner(uid);
        let held = ledger.owner(&owner).into_iter();
        let held: Vec<_> = held.flat_map(|account| account.containers.values()).collect();
        let cpus: CpuSet = held.iter().filter_map(|held| held.cpus.as_ref()).flat_map(CpuSet::iter).collect();
        let is_on = |cpus: &CpuSet| {
            let nodes = core.policy.machine.nodes.iter().filter(|(_, of)| !(&of.cpus & cpus).is_empty());
            nodes.map(|(node, _)| *node).collect::<Vec<_>>()
        };
        let mut nodes: NodeSet = claim.parts.iter().filter_map(|part| part.node).collect();
        if nodes.is_empty() {
            let of_memory = held.iter().flat_map(|held| held.memory_nodes().iter().collect::<Vec<_>>());
            nodes = of_memory.chain(is_on(&cpus)).collect();
        }
        api::ReservedClaim {
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            pod_uid: claim.pod.clone(),
            cpus: cpus.to_string(),
            nodes: nodes.to_string(),
            memory: held.iter().flat_map(|held| &held.blocks).map(Into::into).collect(),
            used: used.contains(owner.as_str()),
        }
    };
    claims.iter().map(describe).collect()
}

/// Releases the parts of a claim, if it is reserved.
pub(crate) fn release(core: &mut Core, uid: &str) -> Result<(), AdmissionError> {
    core.pods.waiting_claims.remove(uid);
    let Some(claim) = core.store.state.claims.get(uid).cloned() else { return Ok(()) };
    let mut change = core.begin();
    remove(change.core(), uid);
    change.store()?;
    fault::point("claim.released");
    tracing::info!(claim = claim.name, namespace = claim.namespace, uid, "the resource claim is released");
    shared_pool::note_guarantees_changed(core);
    Ok(())
}

fn remove(core: &mut Core, uid: &str) {
    let Core { policy, store, ports, .. } = core;
    let state: &mut State = &mut store.state;
    if state.claims.get(uid).is_none() {
        return;
    }
    state.claims.remove(uid);
    state.release_owner(&claim::owner(uid), &*policy.strategy);
    policy.replace_missing(state, &*ports.host);
}
