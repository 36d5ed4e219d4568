//! Containers that are bound, and those that are placed but not bound yet.
//!
//! # Problem
//! A container may be created and never started, without any event. A container that could not be bound runs nevertheless, maybe on its
//! CPUs: these must not be given to another workload.
//!
//! # Algorithm
//! A failed bind is retried with a growing delay. A container is removed if its cgroup is absent or empty [`START_TIMEOUT`] after its
//! creation: no process uses its resources then.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use numaward_model::Retry;

/// Time after the creation of a container from which on an empty or absent cgroup means that it will not be started.
const START_TIMEOUT: Duration = Duration::from_mins(10);
/// Initial delay of the retry of a failed bind.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Upper bound of that delay.
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);

/// State of a container that is not bound.
struct UnboundContainer {
    /// Time of the creation.
    since: Instant,
    /// The next retry; `None` if no bind has failed.
    retry: Option<Retry>,
}

impl UnboundContainer {
    fn new(since: Instant) -> Self {
        Self { since, retry: None }
    }

    /// Returns true if the container will not be started any more.
    fn is_late(&self, now: Instant) -> bool {
        now.duration_since(self.since) >= START_TIMEOUT
    }

    fn is_due(&self, now: Instant) -> bool {
        self.retry.as_ref().map_or_else(|| self.is_late(now), |retry| retry.is_due(now))
    }

    fn postpone(&mut self, now: Instant) {
        let retry = self.retry.get_or_insert_with(|| Retry::new(now, MIN_RETRY_DELAY, MAX_RETRY_DELAY));
        if retry.is_due(now) {
            retry.postpone(now);
        }
    }
}

/// The bound containers, and the queue of containers to bind. They are not stored.
#[derive(Default)]
pub(crate) struct Bindings {
    bound: BTreeSet<String>,
    /// Containers to bind when the reconciler is idle.
    to_bind: VecDeque<String>,
    unbound: BTreeMap<String, UnboundContainer>,
}

/// Next step for a container that is not bound.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum UnboundStep {
    /// It will not be started any more.
    Release,
    Wait,
}

impl Bindings {
    /// Returns true if the settings of a container are enforced.
    pub(crate) fn is_bound(&self, id: &str) -> bool {
        self.bound.contains(id)
    }

    /// Records a container that was created at this time.
    pub(super) fn note_created(&mut self, id: &str, now: Instant) {
        if !self.is_bound(id) {
            self.unbound.insert(id.to_owned(), UnboundContainer::new(now));
        }
    }

    pub(super) fn note_bound(&mut self, id: &str) {
        self.unbound.remove(id);
        self.bound.insert(id.to_owned());
    }

    /// Records a failed bind, which is retried.
    pub(super) fn note_failed(&mut self, id: &str, now: Instant) {
        self.unbound.entry(id.to_owned()).or_insert_with(|| UnboundContainer::new(now)).postpone(now);
    }

    /// Records that a container has to be bound again; returns false if it was not bound.
    pub(super) fn unbind(&mut self, id: &str) -> bool {
        self.bound.remove(id)
    }

    /// Queues a container that was bound, to be bound again.
    pub(super) fn rebind(&mut self, id: &str) {
        if self.unbind(id) {
            self.to_bind.push_back(id.to_owned());
        }
    }

    /// Queues a container that runs.
    pub(super) fn await_bind(&mut self, id: &str, now: Instant) {
        self.unbound.entry(id.to_owned()).or_insert_with(|| UnboundContainer::new(now));
        self.to_bind.push_back(id.to_owned());
    }

    /// Forgets the retries of a container that has ended.
    pub(super) fn give_up(&mut self, id: &str) {
        self.unbound.remove(id);
    }

    pub(super) fn forget(&mut self, id: &str) {
        self.bound.remove(id);
        self.unbound.remove(id);
    }

    /// Removes and returns the next container to bind.
    pub(super) fn take_next(&mut self) -> Option<String> {
        self.to_bind.pop_front()
    }

    /// Returns true if a container is to be bound.
    pub(crate) fn has_next(&self) -> bool {
        !self.to_bind.is_empty()
    }

    #[cfg(test)]
    pub(super) fn has_unbound(&self) -> bool {
        !self.unbound.is_empty()
    }

    /// Returns the unbound containers that are to be retried or released.
    pub(super) fn due(&self, now: Instant) -> Vec<String> {
        self.unbound.iter().filter(|(_, unbound)| unbound.is_due(now)).map(|(id, _)| id.clone()).collect()
    }

    /// Retries or gives up an unbound container that is due. `is_empty`: its cgroup has no processes.
    pub(super) fn retry(&mut self, id: &str, is_empty: bool, now: Instant) -> UnboundStep {
        let Some(unbound) = self.unbound.get_mut(id) else { return UnboundStep::Wait };
        if is_empty && unbound.is_late(now) {
            return UnboundStep::Release;
        }
        unbound.postpone(now);
        if !is_empty {
            self.to_bind.push_back(id.to_owned());
        }
        UnboundStep::Wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_bind_waits_longer() {
        let (mut bindings, start) = (Bindings::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        bindings.note_created("a", start);
        assert!(bindings.due(after(599)).is_empty(), "it may still be started");
        bindings.note_failed("a", start);
        assert!(bindings.due(start).is_empty());
        assert_eq!(bindings.due(after(1)), ["a"]);
        assert_eq!(bindings.retry("a", false, after(1)), UnboundStep::Wait);
        assert!(bindings.has_next() && bindings.due(after(2)).is_empty());
        bindings.note_bound("a");
        assert!(bindings.is_bound("a") && bindings.due(after(9999)).is_empty());
    }

    #[test]
    fn unstarted_container_is_late() {
        let (mut bindings, start) = (Bindings::default(), Instant::now());
        bindings.note_created("a", start);
        let late = start + START_TIMEOUT;
        assert_eq!(bindings.due(late), ["a"]);
        assert_eq!(bindings.retry("a", false, late), UnboundStep::Wait, "its processes run");
        assert_eq!(bindings.retry("a", true, late), UnboundStep::Release);
        bindings.give_up("a");
        assert_eq!(bindings.retry("a", true, late), UnboundStep::Wait);
    }

    #[test]
    fn rebind_needs_a_bound_container() {
        let mut bindings = Bindings::default();
        bindings.rebind("a");
        assert!(!bindings.has_next());
        bindings.note_bound("a");
        bindings.rebind("a");
        assert!(bindings.has_next() && !bindings.is_bound("a"));
    }
}
