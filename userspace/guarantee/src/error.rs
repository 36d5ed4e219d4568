//! Why something is not done.

use std::{fmt::Write as _, io, path::PathBuf};

use numaward_api as api;
use numaward_cgroup::LockError;
use numaward_enforce::{EnforceError, EnforcementFailure};
use numaward_engine::ResizeError;
use numaward_store::StoreError;
use numaward_topology::Bytes;

use crate::{policy::PolicyError, private_directory::DirectoryError, request::FieldError};

/// Why something asked for was not done. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum AdmissionError {
    /// A field is wrong.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// It conflicts with what is held.
    #[error("{0}")]
    Conflict(FieldError),
    /// The engine says no.
    #[error("{}", describe_rejection(.0))]
    Rejected(api::Rejection, api::Explanation),
    /// Nobody can be moved so that it fits.
    #[error("{reason}: {}", describe_rejection(.rejection))]
    NoPlan {
        /// Why nobody is moved.
        reason: &'static str,
        /// Why it does not fit as things are.
        rejection: api::Rejection,
    },
    /// The plan does not go with what is held by now.
    #[error("the plan is stale: {0}; ask for another one")]
    Stale(#[from] numaward_engine::in_flight::MoveConflict),
    /// Nothing is promised at all.
    #[error("enforcement.mode is off in the configuration: nothing is promised")]
    Off,
    /// The resources of a container cannot be changed within its promise.
    #[error(transparent)]
    Resize(#[from] ResizeError),
    /// There is no such allocation.
    #[error("there is no allocation named {0:?}")]
    Unknown(String),
    /// The kernel does not take the settings.
    #[error("the settings cannot be enforced, and nothing was changed: {0}")]
    Enforce(#[from] EnforceError),
    /// The kernel did not take all settings.
    #[error("the settings cannot be enforced: {0}")]
    Failed(#[from] Box<EnforcementFailure>),
    /// A release was begun, and its workload may still run on what it holds.
    #[error(
        "it is being released, and not everything could be given back yet: {0}; this is tried again, and until then \
         nothing of it is promised to others"
    )]
    Releasing(#[source] Box<EnforcementFailure>),
    /// A cgroup could not be made.
    #[error("{path}: cannot make this cgroup: {source}", path = .path.display())]
    Make {
        /// Its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The ledger could not be stored.
    #[error("the ledger cannot be stored, and nothing was changed: {0}")]
    Store(#[from] StoreError),
    /// The policy does not fit the machine.
    #[error("the policy does not fit the machine ({0}): nothing new is promised until it does")]
    Unfit(String),
    /// There are no state files of a kubelet for what is promised.
    #[error(
        "a kubelet cannot be configured like this, or cannot promise this, so there are no state files of one: {0}"
    )]
    NoKubelet(String),
    /// Too much was asked that is not answered yet.
    #[error(
        "too many requests wait for an answer, so this one was not taken, and nothing was changed: ask again in a few \
         seconds, and fewer at a time"
    )]
    Busy,
    /// The daemon is ending.
    #[error("the daemon is stopping")]
    Stopping,
}

impl AdmissionError {
    /// What is asked for goes against what is held.
    pub fn conflict(field: &str, problem: impl Into<String>, allowed: &str) -> Self {
        Self::Conflict(FieldError::new(field, problem, allowed))
    }
}

/// What a rejection says, on one line.
pub fn describe_rejection(rejection: &api::Rejection) -> String {
    let mut text = format!("{}: {}", rejection.reason, rejection.message);
    for shortfall in &rejection.shortfalls {
        let amount = |amount: u64| match shortfall.resource.as_str() {
            "cpu" => amount.to_string(),
            _ => Bytes(amount).to_string(),
        };
        let (requested, free) = (amount(shortfall.requested), amount(shortfall.free));
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "; node {}: {} requested {requested}, free {free}",
            shortfall.node, shortfall.resource
        );
    }
    text
}

/// Each problem on a line of its own, each begun with a newline.
pub fn list_problems(problems: &[PolicyError]) -> String {
    problems.iter().fold(String::new(), |text, problem| text + "\n  " + &problem.to_string())
}

/// Guarantees cannot be given at all.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The policy does not fit the machine.
    #[error("the policy cannot be applied:{}", list_problems(.0))]
    Policy(Vec<PolicyError>),
    /// The state directory cannot be made, or other users can change what is in it.
    #[error(transparent)]
    StateDirectory(#[from] DirectoryError),
    /// The ledger cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Another daemon gives guarantees to the same cgroups.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// No thread can be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}
