//! Reports to the runtime what was written without it, so that it repeats it: the latest of each container, with the
//! next answers.
//!
//! Problem: the runtime writes a container's settings again where it changes it, and so does systemd where a container is a
//! unit of its own. Both have what the runtime was given. It must not be called for that: see [`numaward_kube::nri`].
//!
//! Algorithm: what is written is noted, and goes with the answers to what the runtime asks about other containers. While a
//! runtime changes containers, it does nothing else that concerns us: no pod starts or ends. So each answer changes few.
//! Until then the kernel has what is promised, and what is written over it is written again.
//!
//! Invariant: what waits is no more than one change of each container that exists.

use std::{collections::BTreeMap, sync::Arc};

use numaward_guarantee::pod::Update;
use numaward_kube::nri::types;
use numaward_model::Settings;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::handler;

/// Containers that one answer changes besides the one that was asked about.
const AT_ONCE: usize = 4;

/// What containers have, and the runtime does not know yet. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingUpdates(Arc<Mutex<BTreeMap<String, Settings>>>);

impl PendingUpdates {
    /// Notes what comes through the queue, until that is closed.
    pub(super) async fn follow(self, mut queue: mpsc::UnboundedReceiver<Vec<Update>>) {
        while let Some(updates) = queue.recv().await {
            self.0.lock().extend(updates.into_iter().map(|update| (update.id, update.settings)));
        }
    }

    /// Takes the next few for an answer about this container. What the kernel would refuse by now would spoil the answer, and
    /// is dropped.
    pub(super) fn take(&self, about: &str, online: &types::Online) -> Vec<types::Update> {
        let mut latest = self.0.lock();
        latest.remove(about);
        let mut updates = Vec::new();
        while updates.len() < AT_ONCE
            && let Some((id, settings)) = latest.pop_first()
        {
            let update = handler::update(id, &settings);
            if update.settings.check(online).is_ok() {
                updates.push(update);
            }
        }
        updates
    }

    /// A container is no more.
    pub(super) fn forget(&self, id: &str) {
        self.0.lock().remove(id);
    }

    /// The runtime is about to learn everything.
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use numaward_kube::nri::types::Online;

    use super::*;

    fn update(id: &str, nodes: &str) -> Update {
        Update {
            id: id.to_owned(),
            settings: Settings { mems: Some(nodes.parse().unwrap()), ..Settings::default() },
        }
    }

    #[tokio::test]
    async fn the_latest_of_each_is_reported_once_and_few_at_a_time() {
        let (sender, queue) = mpsc::unbounded_channel();
        let pending = PendingUpdates::default();
        sender.send(["a", "b", "c", "d", "e", "f", "gone", "x"].map(|id| update(id, "0")).to_vec()).unwrap();
        sender.send(vec![update("b", "1"), update("c", "7")]).unwrap();
        drop(sender);
        pending.clone().follow(queue).await;
        pending.forget("gone");
        let online = Online { cpus: "0".parse().unwrap(), mems: "0-1".parse().unwrap() };
        let take = |about: &str| {
            let updates = pending.take(about, &online).into_iter();
            updates.map(|of| format!("{}:{}", of.container, of.settings.mems.unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(take("a"), ["b:1", "d:0", "e:0", "f:0"], "node 7 has gone");
        assert_eq!(take("y"), ["x:0"]);
        assert!(take("y").is_empty());
    }
}
