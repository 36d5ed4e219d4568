//! What the kernel reports of the cgroups that are held, so that they need not be looked at all the time.

use std::collections::BTreeSet;

use numaward_cgroup::{CgroupPath, Hierarchy, Notice, Notifier, NotifyError, WatchSubject};

/// Watches them; or nothing, where that cannot be done.
#[derive(Debug)]
pub(super) struct Notices {
    notifier: Option<Notifier>,
}

impl Notices {
    pub(super) fn new(hierarchy: Hierarchy) -> Self {
        let mut notices = Self { notifier: None };
        match Notifier::new(hierarchy) {
            Ok(notifier) => notices.notifier = Some(notifier),
            Err(error) => notices.fail(&error),
        }
        notices
    }

    /// Whether what is watched is reported. If not, it has to be looked at.
    pub(super) fn work(&self) -> bool {
        self.notifier.is_some()
    }

    /// Watches this of a cgroup. Doing so again does no harm.
    pub(super) fn watch(&mut self, path: &CgroupPath, subject: WatchSubject) {
        if let Some(Err(error)) = self.notifier.as_mut().map(|notifier| notifier.watch(path, subject)) {
            self.fail(&error);
        }
    }

    pub(super) fn unwatch(&mut self, path: &CgroupPath, subject: WatchSubject) {
        if let Some(notifier) = &mut self.notifier {
            notifier.unwatch(path, subject);
        }
    }

    pub(super) fn read(&mut self) -> BTreeSet<Notice> {
        match self.notifier.as_mut().map(Notifier::read) {
            None => BTreeSet::new(),
            Some(Ok(notices)) => notices,
            Some(Err(error)) => {
                self.fail(&error);
                BTreeSet::from([Notice::Overflow])
            }
        }
    }

    fn fail(&mut self, error: &NotifyError) {
        tracing::warn!(%error, "cgroups with a guarantee are looked at every second instead of watched");
        self.notifier = None;
    }
}
