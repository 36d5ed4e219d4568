//! How much a decision may look at: the one bound of its time.
//!
//! Everything that is looked at is charged, in about the time that it takes to look at one node for one resource (5 ns). A
//! search may use one [`SEARCH_DIVISOR`] of what is left, so that those after it have enough, and takes the best that it has found by
//! then. When nothing is left, the request is refused if it is not placed, and the explanation says so.

use std::cell::Cell;

/// As much as a decision may look at, besides what is linear in the machine, the ledger and the request, and up to what is
/// being looked at when it is reached: about 10 ms.
pub const MAX_WORK: u64 = 2_000_000;
/// A search may use one part of so many of what is left.
const SEARCH_DIVISOR: u64 = 8;

/// What a decision has looked at.
#[derive(Debug)]
pub(super) struct WorkBudget {
    limit: u64,
    done: Cell<u64>,
}

impl Default for WorkBudget {
    fn default() -> Self {
        Self::up_to(MAX_WORK)
    }
}

impl WorkBudget {
    /// What something else than a decision may look at.
    pub(super) fn up_to(limit: u64) -> Self {
        Self { limit, done: Cell::new(0) }
    }

    /// Charges for what is looked at.
    pub(super) fn charge(&self, of: usize) {
        self.done.set(self.done.get().saturating_add(of as u64));
    }

    /// How much was looked at.
    pub(super) fn done(&self) -> u64 {
        self.done.get()
    }

    /// Whether nothing is left.
    pub(super) fn is_spent(&self) -> bool {
        self.done.get() >= self.limit
    }

    /// What one search may use.
    pub(super) fn share(&self) -> WorkShare<'_> {
        let left = self.limit.saturating_sub(self.done.get());
        WorkShare { work: self, until: self.done.get() + left / SEARCH_DIVISOR }
    }

    /// All that is left.
    pub(super) fn all(&self) -> WorkShare<'_> {
        WorkShare { work: self, until: self.limit }
    }
}

/// What one search may still look at.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkShare<'a> {
    work: &'a WorkBudget,
    /// It ends when so much has been done in all.
    until: u64,
}

impl WorkShare<'_> {
    /// Charges for what is looked at.
    pub(super) fn charge(&self, of: usize) {
        self.work.charge(of);
    }

    /// Whether nothing is left of it.
    pub(super) fn is_spent(&self) -> bool {
        self.work.done.get() >= self.until
    }

    /// How much is left of it.
    pub(super) fn left(&self) -> u64 {
        self.until.saturating_sub(self.work.done.get())
    }

    /// The first half of what is left of it.
    pub(super) fn half(&self) -> Self {
        Self { work: self.work, until: self.work.done.get() + self.left() / 2 }
    }
}
