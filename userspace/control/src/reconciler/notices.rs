//! Kernel notifications of changed cgroups, which replace polling.

use std::collections::BTreeSet;

use numaward_cgroup::{CgroupPath, Hierarchy, Notice, Notifier, NotifyError, WatchSubject};

/// Watches cgroups. Without a notifier, nothing is watched.
#[derive(Debug)]
pub(super) struct Notices {
    notifier: Option<Notifier>,
}

impl Notices {
    pub(super) fn new(hierarchy: Hierarchy) -> Self {
        let mut notices = Self { notifier: None };
        match Notifier::new(hierarchy) {
            Ok(notifier) => notices.notifier = Some(notifier),
            Err(error) => notices.stop_watching(&error),
        }
        notices
    }

    /// Returns true if changes are reported. Otherwise the cgroups have to be polled.
    pub(super) fn is_working(&self) -> bool {
        self.notifier.is_some()
    }

    /// Watches one aspect of a cgroup. Repeating it has no effect.
    pub(super) fn watch(&mut self, path: &CgroupPath, subject: WatchSubject) {
        if let Some(Err(error)) = self.notifier.as_mut().map(|notifier| notifier.watch(path, subject)) {
            self.stop_watching(&error);
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
                self.stop_watching(&error);
                BTreeSet::from([Notice::Overflow])
            }
        }
    }

    fn stop_watching(&mut self, error: &NotifyError) {
        tracing::warn!(%error, "cgroups cannot be watched for changes: those with a guarantee are checked every second instead");
        self.notifier = None;
    }
}
