//! Why guarantees cannot be given at all.

use std::io;

use numaward_guarantee::{error::listed, policy::PolicyError};
use numaward_store::StoreError;

/// Guarantees cannot be given at all.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The policy does not fit the machine.
    #[error("the policy cannot be applied:{}", listed(.0))]
    Policy(Vec<PolicyError>),
    /// The ledger cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No thread can be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] io::Error),
}
