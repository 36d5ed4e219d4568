//! Spans: where the time of a decision goes.
//!
//! An admission is a tree: `admit` over `decide` (over `hints`, `merge`, `allocate`), `ledger` and `knobs`. What is
//! written without being asked for (drift, herding, upkeep) is a tree of its own, `reconcile`, and so is what a
//! `release` gives back. Of admissions that wait together, each `admit` is over `decide` alone, and `ledger` and
//! `knobs` are of one tree, `together`; likewise of releases. A look that finds nothing to do is no span.
//!
//! Without a receiver no span is ever made: nobody is interested in them, which `tracing` finds out once.

use std::{cell::RefCell, fmt};

use numaward_engine::{Decision, DecisionStage, Ledger, Request, Strategy, Terms};
use numaward_model::SPAN_TARGET;
use tracing::{Level, field::Empty, span::EnteredSpan};

macro_rules! span {
    ($name:literal $($fields:tt)*) => {
        tracing::span!(target: SPAN_TARGET, Level::INFO, $name $($fields)*)
    };
}

/// An admission. What is done while it is held is part of it.
pub(crate) fn admit(name: &str, dry_run: bool) -> EnteredSpan {
    span!("admit", numaward.workload = name, numaward.dry_run = dry_run).entered()
}

/// So many admissions or releases are stored and carried out as one.
pub(crate) fn batch(what: &str, requests: usize) -> EnteredSpan {
    span!("together", numaward.requests = requests, numaward.what = what).entered()
}

/// Something is about to be written: part of an admission, or a tree of its own.
pub(crate) fn reconcile() -> EnteredSpan {
    let is_part =
        tracing::Span::current().metadata().is_some_and(|metadata| metadata.target() == SPAN_TARGET);
    if is_part { tracing::Span::none().entered() } else { span!("reconcile").entered() }
}

/// An allocation ends.
pub(crate) fn release(name: &str) -> EnteredSpan {
    span!("release", numaward.workload = name).entered()
}

/// The ledger is stored.
pub(crate) fn ledger() -> EnteredSpan {
    span!("ledger").entered()
}

/// Knobs are written.
pub(crate) fn knobs(writes: usize) -> EnteredSpan {
    span!("knobs", numaward.writes = writes, otel.status_code = Empty, otel.status_description = Empty)
        .entered()
}

/// What was done in a span failed.
pub(crate) fn failed(span: &EnteredSpan, error: &dyn fmt::Display) {
    span.record("otel.status_code", "ERROR");
    span.record("otel.status_description", tracing::field::display(error));
}

/// Lets the engine decide, and reports the stages.
pub(crate) fn decide(strategy: &dyn Strategy, ledger: &Ledger, request: &Request, terms: &Terms) -> Decision {
    let span = span!(
        "decide",
        numaward.owner = request.owner.as_str(),
        numaward.outcome = Empty,
        numaward.reason = Empty
    )
    .entered();
    let current = RefCell::new(None);
    let decision = strategy.admit_watched(ledger, request, terms, &|stage| {
        // The one before ends before the next begins.
        current.take();
        current.replace(Some(match stage {
            DecisionStage::Hints => span!("hints").entered(),
            DecisionStage::Merge => span!("merge").entered(),
            DecisionStage::Allocate => span!("allocate").entered(),
        }));
    });
    current.take();
    match &decision.outcome {
        Ok(_) => span.record("numaward.outcome", "admitted"),
        Err(rejection) => span
            .record("numaward.outcome", "rejected")
            .record("numaward.reason", tracing::field::display(&rejection.reason)),
    };
    decision
}
