//! Limit of the work of a decision, which bounds its duration.
//!
//! Each operation is charged. One unit is about the time to look at one node for one resource (5 ns). A search may
//! use the remaining work divided by [`SEARCH_DIVISOR`] or, if it is larger, by the number of expected searches, so
//! that later searches have enough. It then returns its best result so far. When the work is exhausted, an unplaced
//! request is refused, and the explanation mentions it.

use std::cell::Cell;

/// Maximum work of a decision, about 10 ms. Excludes work that is linear in the sizes of machine, ledger and request,
/// and the operation in progress when the limit is reached.
pub const MAX_WORK: u64 = 2_000_000;
/// Smallest divisor of the remaining work for one search.
const SEARCH_DIVISOR: u64 = 8;

/// Work of a decision.
#[derive(Debug)]
pub(super) struct WorkBudget {
    limit: u64,
    done: Cell<u64>,
    /// Divisor of the remaining work for one search.
    divisor: Cell<u64>,
}

impl Default for WorkBudget {
    fn default() -> Self {
        Self::up_to(MAX_WORK)
    }
}

impl WorkBudget {
    /// Makes a budget with another limit.
    pub(super) fn up_to(limit: u64) -> Self {
        Self { limit, done: Cell::new(0), divisor: Cell::new(SEARCH_DIVISOR) }
    }

    /// Charges an amount of work.
    pub(super) fn charge(&self, of: usize) {
        self.done.set(self.done.get().saturating_add(of as u64));
    }

    /// Returns the work so far.
    pub(super) fn done(&self) -> u64 {
        self.done.get()
    }

    /// Returns whether the budget is exhausted.
    pub(super) fn is_spent(&self) -> bool {
        self.done.get() >= self.limit
    }

    /// Sets the number of expected searches.
    pub(super) fn expect_searches(&self, count: usize) {
        self.divisor.set(SEARCH_DIVISOR.max(count as u64));
    }

    /// Returns the share of one search.
    pub(super) fn share(&self) -> WorkShare<'_> {
        self.all().search_share()
    }

    /// Returns the whole remaining budget.
    pub(super) fn all(&self) -> WorkShare<'_> {
        WorkShare { work: self, until: self.limit }
    }
}

/// Part of a budget.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkShare<'a> {
    work: &'a WorkBudget,
    /// Total work at which this share is exhausted.
    until: u64,
}

impl WorkShare<'_> {
    /// Charges an amount of work.
    pub(super) fn charge(&self, of: usize) {
        self.work.charge(of);
    }

    /// Returns whether this share is exhausted.
    pub(super) fn is_spent(&self) -> bool {
        self.work.done.get() >= self.until
    }

    /// Returns the remaining work of this share.
    pub(super) fn left(&self) -> u64 {
        self.until.saturating_sub(self.work.done.get())
    }

    /// Returns the part of the remaining share that one search may use.
    pub(super) fn search_share(&self) -> Self {
        Self { work: self.work, until: self.work.done.get() + self.left() / self.work.divisor.get() }
    }

    /// Returns the first half of the remaining share.
    pub(super) fn half(&self) -> Self {
        Self { work: self.work, until: self.work.done.get() + self.left() / 2 }
    }
}
