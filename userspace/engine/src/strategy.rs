//! The interface of a strategy: how requests become allocations.
//!
//! A strategy is made for a machine and a configuration and does not change. All that changes is in the
//! ledger, which goes in and comes out: every method is a pure function.

use crate::{
    decision::Decision,
    ledger::Ledger,
    request::{ContainerName, OwnerId, Request},
};

/// What a decision goes through, for each container or for all of a pod together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// All providers are asked for hints.
    Hints,
    /// They are merged.
    Merge,
    /// CPUs and memory are taken.
    Allocate,
}

/// Decides who gets which CPUs and memory.
pub trait Strategy {
    /// Decides on a request. It counts as active from now on, until it is rejected or removed.
    fn admit(&self, ledger: &Ledger, request: &Request) -> Decision;

    /// A container of an admitted owner was started. What came before it may have ended.
    fn started(&self, ledger: &Ledger, owner: &OwnerId, container: &ContainerName) -> Ledger;

    /// An owner is gone, with all its containers.
    fn removed(&self, ledger: &Ledger, owner: &OwnerId) -> Ledger;
}
