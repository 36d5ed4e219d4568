//! Errors of admissions, resizes, rebalances and of the start.

use std::{fmt::Write as _, io, path::PathBuf};

use numaward_api as api;
use numaward_cgroup::LockError;
use numaward_enforce::{EnforceError, EnforcementFailure};
use numaward_engine::ResizeError;
use numaward_store::StoreError;
use numaward_topology::Bytes;

use crate::{policy::PolicyError, private_directory::DirectoryError, request::FieldError};

/// Reason why a command was not executed. Unless a variant says otherwise, nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// A field is invalid.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// The request conflicts with an existing guarantee.
    #[error("{0}")]
    Conflict(FieldError),
    /// The engine rejected the request.
    #[error("{}", describe_rejection(.0))]
    Rejected(api::Rejection, Box<api::Explanation>),
    /// No permitted sequence of moves makes the request fit.
    #[error("{reason}: {}", describe_rejection(.rejection))]
    NoPlan {
        reason: &'static str,
        /// Reason why the request does not fit without moves.
        rejection: api::Rejection,
    },
    /// The plan no longer matches the ledger.
    #[error("the plan is stale: {0}; ask for another one")]
    Stale(#[from] numaward_engine::in_flight::MoveConflict),
    /// Enforcement is off.
    #[error("enforcement.mode is off in the configuration: no guarantees are given")]
    Off,
    /// The engine cannot resize the guarantee.
    #[error(transparent)]
    Resize(#[from] ResizeError),
    #[error("there is no guarantee named {0:?}")]
    Unknown(String),
    /// The settings cannot be enforced; nothing was written.
    #[error("the settings cannot be enforced, and nothing was changed: {0}")]
    Enforce(#[from] EnforceError),
    /// The kernel refused some of the settings.
    #[error("the settings cannot be enforced: {0}")]
    Failed(#[from] Box<EnforcementFailure>),
    /// The release has begun, but some settings could not be restored: the workload may still use its CPUs and memory.
    #[error(
        "the guarantee is being released, but not all settings could be restored: {0}; the release is retried, and until \
         then its CPUs and memory are not available to other workloads"
    )]
    Releasing(#[source] Box<EnforcementFailure>),
    /// A cgroup could not be created.
    #[error("{path}: cannot create this cgroup: {source}", path = .path.display())]
    Make {
        /// Directory of the cgroup.
        path: PathBuf,
        source: io::Error,
    },
    /// The ledger could not be stored.
    #[error("the ledger cannot be stored, and nothing was changed: {0}")]
    Store(#[from] StoreError),
    /// The new rules for declared guarantees are known, but some could not be applied.
    #[error("not all declared guarantees could be applied: {0}; the next reload tries again")]
    Declared(String),
    /// The policy does not fit the machine.
    #[error("the policy does not fit the machine ({0}): no new guarantees are given until it does")]
    Unfit(String),
    /// The guarantees cannot be expressed as state files of a kubelet.
    #[error(
        "a kubelet cannot have this configuration or these guarantees, so there are no state files to export: {0}"
    )]
    NoKubelet(String),
    /// The queue of client commands is full.
    #[error(
        "too many requests are waiting, so this one was refused and nothing was changed: retry in a few seconds, with \
         fewer requests at a time"
    )]
    Busy,
    #[error("the daemon is stopping")]
    Stopping,
}

impl AdmissionError {
    /// Returns a conflict of a field with an existing guarantee.
    pub fn conflict(field: &str, problem: impl Into<String>, allowed: &str) -> Self {
        Self::Conflict(FieldError::new(field, problem, allowed))
    }
}

/// Maximum number of shortfalls in a message.
const MAX_SHORTFALLS_IN_MESSAGE: usize = 16;

/// Formats a rejection and its shortfalls on one line.
pub fn describe_rejection(rejection: &api::Rejection) -> String {
    let mut text = format!("{} ({})", rejection.message, rejection.reason);
    for shortfall in rejection.shortfalls.iter().take(MAX_SHORTFALLS_IN_MESSAGE) {
        let api::Shortfall { node, resource, requested, free, withheld } = shortfall;
        let amount = |amount: u64| match resource.as_str() {
            "cpu" => amount.to_string(),
            _ => Bytes(amount).rounded(),
        };
        let (requested, free) = (amount(*requested), amount(*free));
        // Writing to a String cannot fail.
        let _ = write!(text, "; node {node}: {resource} requested {requested}, free {free}");
        if *withheld > 0 {
            let _ = write!(text, " ({} more are used by workloads without a guarantee)", amount(*withheld));
        }
    }
    let omitted = rejection.shortfalls.len().saturating_sub(MAX_SHORTFALLS_IN_MESSAGE);
    if omitted > 0 {
        let _ = write!(text, "; and {omitted} more");
    }
    text
}

/// Formats a list of problems: a line break and two spaces before each.
pub fn list_problems(problems: &[PolicyError]) -> String {
    problems.iter().fold(String::new(), |text, problem| text + "\n  " + &problem.to_string())
}

/// Reasons why the reconciler cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the policy cannot be applied:{}", list_problems(.0))]
    Policy(Vec<PolicyError>),
    /// The state directory cannot be created, or other users can write to it.
    #[error(transparent)]
    StateDirectory(#[from] DirectoryError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another daemon manages the same cgroups.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}
