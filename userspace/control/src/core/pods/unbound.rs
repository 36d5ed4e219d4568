//! Containers that are placed and not bound yet.
//!
//! Problem: a container may be created and never started, and nothing says so. One that could not be bound runs all the
//! same, maybe on its CPUs: nobody else may get them.
//!
//! Algorithm: a bind that failed is tried again, later each time. A container is given up if its cgroup is absent or empty
//! so long after it was created: then nobody runs on what it holds.

use std::time::{Duration, Instant};

use numaward_cgroup::{CgroupPath, read};
use numaward_guarantee::{error::AdmissionError, pod::UnpinnedReason};
use numaward_model::Retry;

use crate::core::Core;

/// A container that was created and in whose cgroup nobody runs for so long will not be started.
const START_TIMEOUT: Duration = Duration::from_mins(10);
/// A bind that failed is tried again after so long at first.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// And after so long in the end.
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);

/// A container that is not bound.
pub(super) struct UnboundContainer {
    /// Since when it has been waited for.
    since: Instant,
    /// When to try again, if it was tried.
    retry: Option<Retry>,
}

impl UnboundContainer {
    /// It is to be started.
    pub(super) fn new(since: Instant) -> Self {
        Self { since, retry: None }
    }

    /// Whether it was waited for so long that nobody will start it.
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

impl Core {
    /// Binds a container as soon as there is time.
    pub(super) fn await_bind(&mut self, id: &str) {
        self.pods.unbound.entry(id.to_owned()).or_insert_with(|| UnboundContainer::new(Instant::now()));
        self.pods.to_bind.push_back(id.to_owned());
    }

    /// Holds a container's cgroup, which exists now, and informs the probes.
    pub(super) fn bind(&mut self, id: &str) -> Option<UnpinnedReason> {
        let placed = self.store.state.containers.get(id)?.clone();
        let unpinned = match self.try_bind(&placed) {
            Ok(()) => {
                self.pods.unbound.remove(id);
                self.pods.bound.insert(id.to_owned());
                // While that waited, others may have been promised CPUs of the pool that it was given.
                let cpus = self.settings_of(&placed).cpus;
                let record = self.store.state.applied.get(&placed.cgroup);
                self.pods.is_behind |= record.is_some_and(|record| record.settings.cpus != cpus);
                self.follow_pool();
                return None;
            }
            Err(AdmissionError::Enforce(error)) if error.is_gone() => {
                tracing::debug!(container = id, cgroup = %placed.cgroup, "has no cgroup yet");
                None
            }
            Err(error) => {
                let name = placed.of.full_name();
                tracing::error!(
                    name, cgroup = %placed.cgroup, %error, "a container is not held to its promise; tried again"
                );
                Some(match error {
                    AdmissionError::Store(_) => UnpinnedReason::Ledger,
                    _ => UnpinnedReason::Enforcement,
                })
            }
        };
        let now = Instant::now();
        self.pods.unbound.entry(id.to_owned()).or_insert_with(|| UnboundContainer::new(now)).postpone(now);
        unpinned
    }

    /// Has those bound that could not be, and gives up those that were never started.
    pub(super) fn maintain_unbound(&mut self, now: Instant) {
        let due = self.pods.unbound.iter().filter(|(_, unbound)| unbound.is_due(now));
        for id in due.map(|(id, _)| id.clone()).collect::<Vec<_>>() {
            let Some(placed) = self.store.state.containers.get(&id) else { continue };
            let is_empty = self.is_empty(&placed.cgroup);
            let Some(unbound) = self.pods.unbound.get_mut(&id) else { continue };
            if is_empty && unbound.is_late(now) {
                tracing::info!(container = id, "was created but never started; what it held is free");
                self.stopped(&id);
                continue;
            }
            unbound.postpone(now);
            if !is_empty {
                self.pods.to_bind.push_back(id);
            }
        }
    }

    /// Whether nobody runs in a cgroup, or it is not there.
    fn is_empty(&self, cgroup: &CgroupPath) -> bool {
        match self.hierarchy.id_of(cgroup) {
            Ok(None) => true,
            Ok(Some(_)) => matches!(read::populated(&self.hierarchy.dir(cgroup)), Ok(false)),
            // It is not known.
            Err(_) => false,
        }
    }

    /// Whether containers wait to be bound.
    pub(crate) fn has_to_bind(&self) -> bool {
        !self.pods.to_bind.is_empty()
    }

    /// Binds one container that waits for it.
    pub(crate) fn bind_next(&mut self) {
        let Some(id) = self.pods.to_bind.pop_front() else { return };
        if !self.pods.bound.contains(&id) && !self.pods.ended.contains(&id) {
            self.bind(&id);
        }
    }
}
