//! What follows from a change once it is done.

use std::{path::PathBuf, sync::Arc};

use numaward_cgroup::{CgroupId, CgroupPath};
use numaward_enforce::ThreadMasks;
use numaward_guarantee::request::Request;

/// What others are to do about changes that were made. It adds up until the loop comes to it.
#[derive(Debug, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each follows by itself")]
pub(crate) struct Effects {
    /// What is promised changed: publish it.
    pub(crate) guarantees: bool,
    /// What is shown of it changed, and nothing else.
    pub(crate) view: bool,
    /// Keep others off exclusive CPUs as things stand now.
    pub(crate) isolate: bool,
    /// Try again to give what is declared.
    pub(crate) declared: bool,
    /// See whether a workload is gone.
    pub(crate) gone: bool,
    /// What is declared and was refused: room may be made for it.
    pub(crate) no_room: Vec<Request>,
    /// What holds something else than before, in order.
    pub(crate) held: Vec<HeldChange>,
    /// Cgroups that have got other CPUs: their threads may have kept those that they had.
    pub(crate) widened: Vec<WidenedCgroup>,
}

/// A cgroup that has got other CPUs, and the state of its threads before.
pub(crate) type WidenedCgroup = (CgroupPath, CgroupId, Arc<ThreadMasks>);

/// A cgroup that holds something else than before.
#[derive(Debug)]
pub(crate) enum HeldChange {
    /// A guarantee of this name was given.
    Given(String),
    /// A guarantee was released.
    Released {
        name: String,
        cgroup: CgroupPath,
        /// The cgroup's directory, if it was made for the guarantee: it goes when all know.
        remove: Option<PathBuf>,
    },
    /// The knobs of this cgroup are others' from now on, or get other values.
    Rewritten(CgroupPath),
}

impl Effects {
    /// Whether anything is to be shown.
    pub(crate) fn is_shown(&self) -> bool {
        self.guarantees || self.view || !self.held.is_empty()
    }

    /// Whether anything is to be done.
    pub(crate) fn is_due(&self) -> bool {
        self.is_shown() || self.isolate || self.declared || self.gone
    }
}
