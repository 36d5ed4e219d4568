//! Ordering faults that a test injects into the core, to show that the search for orders finds such faults.
//!
//! They are compiled for the tests of this crate only, and act on the thread that has injected one.

use std::{cell::Cell, time::Duration};

use super::Core;

/// An ordering fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disorder {
    /// Between the decision on an admission and its entry into the ledger, a command of the container runtime is handled. The
    /// entry replaces what that command has stored.
    StaleDecision,
    /// A command is answered before the ledger is saved: the next save has the change.
    AnswerBeforeSave,
    /// While a write to a knob is waited for, later commands of the container runtime overtake its list of all containers.
    OvertakenList,
}

thread_local! {
    static INJECTED: Cell<Option<Disorder>> = const { Cell::new(None) };
}

/// Injects an ordering fault into the core on this thread, in place of the one before.
pub(crate) fn inject(disorder: Option<Disorder>) {
    INJECTED.set(disorder);
}

/// Returns true if this ordering fault is injected.
pub(super) fn is_injected(disorder: Disorder) -> bool {
    INJECTED.get() == Some(disorder)
}

/// Handles a command of the container runtime, if one waits, in the middle of an admission.
pub(crate) fn handle_between_decision_and_entry(core: &mut Core) {
    if let Some(inbox) = &mut core.execution.inbox {
        inbox.receive(Duration::ZERO);
    }
    if let Some((command, overtakes)) = core.next_meanwhile() {
        core.answer_meanwhile(command, overtakes);
    }
}
