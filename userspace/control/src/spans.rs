//! Tracing spans, which show the duration of each step of a decision.
//!
//! The span of an admission is `admit`, with the children `decide` (with the children `hints`, `merge` and `allocate`), `ledger` and
//! `knobs`. Writes without a request (repair of drift, CPU isolation, periodic work) are in a root span `reconcile`, and those of a release
//! in a root span `release`. In a batch of admissions, each `admit` has only the child `decide`, while `ledger` and `knobs` are children of
//! one root span `together`; the same holds for a batch of releases. A check without any change has no span.
//!
//! If no subscriber is interested in the spans, none is created: `tracing` caches that.

use std::{cell::RefCell, fmt};

use numaward_engine::{Decision, DecisionStage, Ledger, Request, Strategy, Terms};
use numaward_model::SPAN_TARGET;
use tracing::{Level, field::Empty, span::EnteredSpan};

macro_rules! span {
    ($name:literal $($fields:tt)*) => {
        tracing::span!(target: SPAN_TARGET, Level::INFO, $name $($fields)*)
    };
}

/// Enters the span of an admission.
pub(crate) fn admit(name: &str, dry_run: bool) -> EnteredSpan {
    span!("admit", numaward.workload = name, numaward.dry_run = dry_run).entered()
}

/// Enters the span of a batch of `requests` admissions or releases.
pub(crate) fn batch(what: &str, requests: usize) -> EnteredSpan {
    span!("together", numaward.requests = requests, numaward.what = what).entered()
}

/// Enters the span of writes without a request, unless they are part of another span of this module.
pub(crate) fn reconcile() -> EnteredSpan {
    let is_part =
        tracing::Span::current().metadata().is_some_and(|metadata| metadata.target() == SPAN_TARGET);
    if is_part { tracing::Span::none().entered() } else { span!("reconcile").entered() }
}

/// Enters the span of a release.
pub(crate) fn release(name: &str) -> EnteredSpan {
    span!("release", numaward.workload = name).entered()
}

/// Enters the span in which the ledger is stored.
pub(crate) fn ledger() -> EnteredSpan {
    span!("ledger").entered()
}

/// Enters the span in which this number of knobs is written.
pub(crate) fn knobs(writes: usize) -> EnteredSpan {
    span!("knobs", numaward.writes = writes, otel.status_code = Empty, otel.status_description = Empty)
        .entered()
}

/// Records a failure in a span.
pub(crate) fn failed(span: &EnteredSpan, error: &dyn fmt::Display) {
    span.record("otel.status_code", "ERROR");
    span.record("otel.status_description", tracing::field::display(error));
}

/// Decides on a request, with a span for each stage.
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
        // The span of the previous stage ends before the next one begins.
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
