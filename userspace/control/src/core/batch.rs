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

use std::{collections::BTreeSet, sync::Arc};

use numaward_cgroup::CgroupPath;
use numaward_enforce::{EnforcementFailure, SettingsChange, StepError};
use numaward_engine::OwnerId;
use numaward_guarantee::{
    error::AdmissionError,
    request::{Request, Target},
    state::Guarantee,
};
use numaward_model::Settings;
use numaward_store::fault;

use super::{
    Admission, Attempt, Core, HeldChange,
    admission::{AdmissionDecision, log_guarantee},
    execution::Transaction,
};
use crate::spans;

/// A request that was granted, and its place among all.
struct GrantedRequest<'a> {
    place: usize,
    request: &'a Request,
    granted: AdmissionDecision,
}

impl Core {
    /// Asks for allocations that go together ([`batch_key`](super::inbox::batch_key)), in this order. What is answered may
    /// be fewer: the others are to be asked for later.
    pub(crate) fn admit_batch(&mut self, requests: &[&Request]) -> Vec<Result<Admission, AdmissionError>> {
        let (mut results, mut given): (Vec<_>, Vec<GrantedRequest<'_>>) = Default::default();
        let mut change = self.begin();
        for &request in requests {
            // A container runtime goes first.
            if !results.is_empty() && change.execution.is_runtime_waiting() {
                break;
            }
            let path = match change.target_of(request, false) {
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
            let granted = change.grant(request, &path, Attempt::First);
            results.push(granted.map(|granted| {
                // The next requests of the batch are decided without these resources.
                change.store.state.ledger = granted.ledger.clone();
                change.store.state.admitting.insert(request.name.clone());
                given.push(GrantedRequest { place, request, granted });
                Admission::Admitted
            }));
        }
        match &*given {
            [] => return results,
            [one] => {
                drop(change);
                results[one.place] = self.hold_or_undo(one.request, &one.granted);
                return results;
            }
            [..] => {}
        }
        let span = spans::batch("admit", given.len());
        let failed = hold_all(change, &mut given);
        drop(span);
        match failed {
            Ok(failed) => self.note_all(&mut results, given, failed),
            Err(error) => {
                tracing::debug!(%error, "not all can be admitted together: one by one");
                self.effects.isolate = true;
                for GrantedRequest { request, granted, .. } in &given {
                    self.remove_exec_cgroup(request, &granted.path);
                }
                for GrantedRequest { place, request, granted } in given {
                    results[place] = self.admit_at(request, &granted.path, false, Attempt::Counted);
                }
            }
        }
        results
    }

    /// Takes note of what was given; releases what failed.
    fn note_all(
        &mut self,
        results: &mut [Result<Admission, AdmissionError>],
        given: Vec<GrantedRequest<'_>>,
        failed: Vec<Option<Box<EnforcementFailure>>>,
    ) {
        for GrantedRequest { request, .. } in &given {
            self.note_given(request);
        }
        for (GrantedRequest { place, request, granted }, failed) in given.into_iter().zip(failed) {
            let Some(mut failure) = failed else {
                log_guarantee(request, &granted);
                continue;
            };
            // Until its knobs are back, what it was to have stays promised.
            match self.release(&request.name) {
                Ok(()) => {}
                Err(AdmissionError::Releasing(more) | AdmissionError::Failed(more)) => {
                    let EnforcementFailure { error, step, .. } = *more;
                    if let Some(step) = step {
                        failure.undo.push(StepError { error, step });
                    } else {
                        tracing::error!(name = request.name, %error, "is released later");
                    }
                }
                Err(error) => {
                    tracing::error!(name = request.name, %error, "was not admitted, and cannot be released; tried again");
                    self.store.state.releasing.insert(request.name.clone());
                }
            }
            results[place] = Err(AdmissionError::Failed(failure));
        }
        self.note_guarantees_changed();
    }

    /// Ends allocations that were asked for, each of another name.
    pub(crate) fn release_batch(&mut self, names: &[&str]) -> Vec<Result<(), AdmissionError>> {
        let mut results: Vec<_> = names.iter().map(|name| self.check_release(name)).collect();
        let may: Vec<&str> =
            names.iter().zip(&results).filter(|(_, may)| may.is_ok()).map(|(name, _)| *name).collect();
        let done = self.release_all(&may);
        for (result, done) in results.iter_mut().filter(|may| may.is_ok()).zip(done) {
            *result = done;
        }
        results
    }

    /// Ends an allocation.
    pub(crate) fn release(&mut self, name: &str) -> Result<(), AdmissionError> {
        let _span = spans::release(name);
        self.try_release(&[name]).and_then(|results| results.into_iter().collect())
    }

    /// Ends allocations, each of another name.
    fn release_all(&mut self, names: &[&str]) -> Vec<Result<(), AdmissionError>> {
        if let [name] = names {
            return vec![self.release(name)];
        }
        let span = spans::batch("release", names.len());
        let results = self.try_release(names);
        drop(span);
        results.unwrap_or_else(|error| {
            tracing::debug!(%error, "not all can be released together: one by one");
            names.iter().map(|name| self.release(name)).collect()
        })
    }

    /// Likewise. An error is everybody's, and nothing is released then.
    fn try_release(&mut self, names: &[&str]) -> Result<Vec<Result<(), AdmissionError>>, AdmissionError> {
        let mut results: Vec<_> = names.iter().map(|name| self.guarantee_named(name).map(drop)).collect();
        let held = names.iter().enumerate().filter_map(|(place, &name)| {
            self.guarantee_named(name).ok().map(|guarantee| (place, name, guarantee))
        });
        let held: Vec<(usize, &str, Arc<Guarantee>)> = held.collect();
        if held.is_empty() {
            return Ok(results);
        }
        let changes = held.iter().map(|(_, name, guarantee)| {
            let settings = match guarantee.target {
                Target::Exec => None,
                _ => self.settings_after_end(name, &guarantee.cgroup),
            };
            (guarantee.cgroup.clone(), settings)
        });
        let changes = changes.collect();
        let plan = self.plan(SettingsChange::Each(changes))?;
        // The CPUs stay taken until the knobs are given back. After a crash in between, the next start goes on here.
        let begun = self.store.state.releasing.clone();
        self.store.state.releasing.extend(held.iter().map(|(_, name, _)| (*name).to_owned()));
        let done = match self.write(plan) {
            Ok(done) => done,
            Err(refused) => {
                self.store.state.releasing = begun;
                return Err(refused);
            }
        };
        let paths: Vec<&CgroupPath> = held.iter().map(|(_, _, guarantee)| &guarantee.cgroup).collect();
        let failed = match done.result {
            Ok(()) => Vec::new(),
            Err(failure) => failure.split(&paths),
        };
        let mut stays = BTreeSet::new();
        for ((place, name, guarantee), failed) in held.iter().zip(failed) {
            let Some(failure) = failed else { continue };
            // Somebody may run on what it holds.
            if self.is_there(guarantee) {
                self.effects.view = true;
                results[*place] = Err(AdmissionError::Releasing(failure));
                stays.insert(*place);
            } else {
                tracing::warn!(name, error = %failure, "not everything could be given back, and its cgroup is gone");
            }
        }
        let over: Vec<_> = held.iter().filter(|(place, ..)| !stays.contains(place)).collect();
        if over.is_empty() {
            if !done.is_stored {
                self.store_outcome();
            }
            return Ok(results);
        }
        fault::point("guarantee.released");
        let mut change = self.begin();
        for (_, name, _) in &over {
            change.store.state.guarantees.remove(*name);
            change.store.state.releasing.remove(*name);
            change.store.state.ledger =
                change.policy.strategy.release(&change.store.state.ledger, &OwnerId::from(*name));
        }
        if !change.policy.missing.is_empty() {
            // What is given back belongs to those that miss it.
            change.recharge();
        }
        change.store()?;
        for (_, name, guarantee) in over {
            self.execution.migrations.forget(&guarantee.cgroup);
            tracing::info!(name, cgroup = %guarantee.cgroup, "released");
            let directory = self.hierarchy.dir(&guarantee.cgroup);
            self.effects.held.push(HeldChange::Released {
                name: (*name).to_owned(),
                cgroup: guarantee.cgroup.clone(),
                // A client that sees that it is gone finds it released.
                remove: (guarantee.target == Target::Exec).then_some(directory),
            });
        }
        self.note_guarantees_changed();
        Ok(results)
    }

    fn guarantee_named(&self, name: &str) -> Result<Arc<Guarantee>, AdmissionError> {
        let held = self.store.state.guarantees.get(name).cloned();
        held.ok_or_else(|| AdmissionError::Unknown(name.to_owned()))
    }

    /// What the cgroup of this allocation is to hold when that is released, if anything.
    fn settings_after_end(&mut self, name: &str, cgroup: &CgroupPath) -> Option<Settings> {
        // Others that end with it may run on what they hold for as long as it is not given back.
        let after = self.policy.strategy.release(&self.store.state.ledger, &OwnerId::from(name));
        self.settings_after_release(cgroup, &after)
    }
}

/// Stores all that was granted, writes the knobs for it, and says what failed for each. Nothing changes where that cannot be
/// planned or stored.
fn hold_all(
    mut change: Transaction<'_>,
    given: &mut [GrantedRequest<'_>],
) -> Result<Vec<Option<Box<EnforcementFailure>>>, AdmissionError> {
    let paths: Vec<CgroupPath> = given.iter().map(|given| given.granted.path.clone()).collect();
    let paths: Vec<&CgroupPath> = paths.iter().collect();
    change.confine_others(&paths);
    for GrantedRequest { request, granted, .. } in &mut *given {
        // The later ones have left fewer CPUs to share.
        granted.settings = change.settings(request, &granted.allocation);
    }
    let settings =
        given.iter().map(|GrantedRequest { granted, .. }| (granted.path.clone(), granted.settings.clone()));
    let plan = change.plan(SettingsChange::HoldAll(settings.collect()))?;
    for GrantedRequest { request, granted, .. } in given {
        let id = change.id_of(&granted.path)?;
        change.enter(request, granted, id);
    }
    match change.enforce(plan) {
        Ok(()) => Ok(paths.iter().map(|_| None).collect()),
        Err(AdmissionError::Failed(failure)) => Ok(failure.split(&paths)),
        Err(error) => Err(error),
    }
}
