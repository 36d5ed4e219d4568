//! Admissions that wait together are executed as one change, and so are releases.
//!
//! # Problem
//! A change costs one write to the disk and one publication of the state, whether it is for one workload or for thirty. With
//! hundreds of requests in a second, each request would wait for all requests before it.
//!
//! # Algorithm
//! Each request is decided on top of those before it. Then all decisions are stored at once, before the first knob is
//! written, and one plan writes the knobs of all. A failed write fails the request of its cgroup, or all requests if the
//! cgroup is above theirs: the guarantee is released again, and the remaining guarantees stay. If no common plan can be made
//! or stored, each request is executed alone, so that each gets its own error.
//!
//! A release is stored twice: its beginning, before the first knob is restored; and its end, with the outcome of the plan. A
//! start in between continues the release.
//!
//! # Invariants
//! A change is stored before its answer is sent. The answer to a request is the decision on it, in the order of the requests.

use numaward_cgroup::CgroupPath;
use numaward_enforce::{EnforcementFailure, SettingsChange, StepError};
use numaward_guarantee::{error::AdmissionError, request::Request};

use super::{
    Admission, Attempt, Core,
    admission::{self, AdmissionDecision, log_guarantee},
    cpu_isolation,
    execution::Transaction,
    release, settings, shared_pool,
};
use crate::spans;

/// A granted request, and its index in the batch.
struct GrantedRequest<'a> {
    place: usize,
    request: &'a Request,
    granted: AdmissionDecision,
}

/// Admits requests of one batch ([`batch_key`](super::inbox::batch_key)) in this order. The result may be shorter than `requests`; the
/// remaining requests must be admitted later.
pub(crate) fn admit_batch(core: &mut Core, requests: &[&Request]) -> Vec<Result<Admission, AdmissionError>> {
    let (mut results, mut given): (Vec<_>, Vec<GrantedRequest<'_>>) = Default::default();
    let mut change = core.begin();
    for &request in requests {
        // A container runtime goes first.
        if !results.is_empty() && change.core().execution.is_runtime_waiting() {
            break;
        }
        let path = match admission::target_cgroup(change.core(), request, false) {
            Ok(path) => path,
            Err(refused) => {
                results.push(Err(refused));
                continue;
            }
        };
        // An overlap with a cgroup of the same batch is reported only after that guarantee is stored.
        if given.iter().any(|given| path.overlaps(&given.granted.path)) {
            break;
        }
        let _span = spans::admit(&request.name, false);
        let place = results.len();
        let granted = admission::grant(change.core(), request, &path, Attempt::First);
        results.push(granted.map(|granted| {
            // The next requests of the batch are decided without these resources.
            change.state().ledger = granted.ledger.clone();
            change.state().admitting.insert(request.name.clone());
            given.push(GrantedRequest { place, request, granted });
            Admission::Admitted
        }));
    }
    match &*given {
        [] => return results,
        [one] => {
            drop(change);
            results[one.place] = admission::enforce_or_undo(core, one.request, &one.granted);
            return results;
        }
        [..] => {}
    }
    let span = spans::batch("admit", given.len());
    let failed = hold_all(change, &mut given);
    drop(span);
    match failed {
        Ok(failed) => record_admissions(core, &mut results, given, failed),
        Err(error) => {
            tracing::debug!(%error, "the requests cannot be admitted as one batch and are admitted one by one");
            core.effects.isolate = true;
            for GrantedRequest { request, granted, .. } in &given {
                admission::remove_exec_cgroup(core, request, &granted.path);
            }
            for GrantedRequest { place, request, granted } in given {
                results[place] = admission::admit_at(core, request, &granted.path, false, Attempt::Counted);
            }
        }
    }
    results
}

/// Records the effects of the admitted guarantees, and releases those that could not be enforced.
fn record_admissions(
    core: &mut Core,
    results: &mut [Result<Admission, AdmissionError>],
    given: Vec<GrantedRequest<'_>>,
    failed: Vec<Option<Box<EnforcementFailure>>>,
) {
    for GrantedRequest { request, .. } in &given {
        admission::record_admission(core, request);
    }
    for (GrantedRequest { place, request, granted }, failed) in given.into_iter().zip(failed) {
        let Some(mut failure) = failed else {
            log_guarantee(request, &granted);
            continue;
        };
        // The resources stay guaranteed until the knobs are restored.
        match release::release(core, &request.name) {
            Ok(()) => {}
            Err(AdmissionError::Releasing(more) | AdmissionError::Failed(more)) => {
                let EnforcementFailure { error, step, .. } = *more;
                if let Some(step) = step {
                    failure.undo.push(StepError { error, step });
                } else {
                    tracing::error!(name = request.name, %error, "the guarantee could not be released and is released later");
                }
            }
            Err(error) => {
                tracing::error!(name = request.name, %error, "the guarantee could not be enforced, and cannot be released; it is retried");
                core.store.state.releasing.insert(request.name.clone());
            }
        }
        results[place] = Err(AdmissionError::Failed(failure));
    }
    shared_pool::note_guarantees_changed(core);
}

/// Stores all granted requests and writes their knobs; returns the failure of each request, if any. Nothing changes if the writes cannot be
/// planned or the state cannot be stored.
fn hold_all(
    mut change: Transaction<'_>,
    given: &mut [GrantedRequest<'_>],
) -> Result<Vec<Option<Box<EnforcementFailure>>>, AdmissionError> {
    let paths: Vec<CgroupPath> = given.iter().map(|given| given.granted.path.clone()).collect();
    let paths: Vec<&CgroupPath> = paths.iter().collect();
    cpu_isolation::confine_others(change.core(), &paths);
    for GrantedRequest { request, granted, .. } in &mut *given {
        // Later requests of the batch have reduced the shared pool.
        granted.settings = settings::request_settings(&change, request, &granted.allocation);
    }
    let settings =
        given.iter().map(|GrantedRequest { granted, .. }| (granted.path.clone(), granted.settings.clone()));
    let plan = change.plan(SettingsChange::HoldAll(settings.collect()))?;
    for GrantedRequest { request, granted, .. } in given {
        let id = change.id_of(&granted.path)?;
        admission::insert_guarantee(change.core(), request, granted, id);
    }
    match change.enforce(plan) {
        Ok(()) => Ok(paths.iter().map(|_| None).collect()),
        Err(AdmissionError::Failed(failure)) => Ok(failure.split(&paths)),
        Err(error) => Err(error),
    }
}
