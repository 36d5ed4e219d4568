//! Consequences of a change of the state, which the reconciler's loop processes after the change.

use std::path::PathBuf;

use numaward_cgroup::CgroupPath;
use numaward_enforce::PendingReset;
use numaward_guarantee::request::Request;

/// Consequences that are not processed yet. Those of several changes add up.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each follows by itself")]
pub(crate) struct Effects {
    /// Publish the guarantees, which have changed.
    pub(crate) guarantees: bool,
    /// Publish the view of the guarantees; the guarantees themselves are unchanged.
    pub(crate) view: bool,
    /// Confine cgroups off the present exclusive CPUs.
    pub(crate) isolate: bool,
    /// Retry declared guarantees.
    pub(crate) declared: bool,
    /// Check for workloads that have ended.
    pub(crate) gone: bool,
    /// Declared guarantees that were refused; a rebalance may make room for them.
    pub(crate) refused_declared: Vec<Request>,
    /// Changes of applied settings, in order.
    pub(crate) held: Vec<HeldChange>,
    /// Cgroups with restored CPUs. Their threads may still have the narrower affinity.
    pub(crate) widened: Vec<(CgroupPath, PendingReset)>,
}

/// A change of the settings that are applied to a cgroup.
#[derive(Debug)]
pub(crate) enum HeldChange {
    /// A guarantee of this name was given.
    Given(String),
    /// A guarantee was released.
    Released {
        name: String,
        cgroup: CgroupPath,
        /// The cgroup's directory, if it was created for the guarantee. It is removed after all controllers have seen the release.
        remove: Option<PathBuf>,
    },
    /// The settings of this cgroup were replaced or removed without a release.
    Rewritten(CgroupPath),
}

impl Effects {
    /// Returns true if there is a change to publish.
    pub(crate) fn is_shown(&self) -> bool {
        self.guarantees || self.view || !self.held.is_empty()
    }

    /// Returns true if there is a consequence to process.
    pub(crate) fn is_due(&self) -> bool {
        self.is_shown() || self.isolate || self.declared || self.gone
    }
}
