//! Pending updates: settings that the reconciler wrote itself, and that the runtime gets with its next answers.
//!
//! # Problem
//! When the runtime changes a container, it writes all of its settings again; systemd does so too if the container is a unit. Both write
//! the values that the runtime knows, which are outdated after the reconciler has written new ones. The plugin must not call the runtime
//! to update it: see [`numaward_kube::nri`].
//!
//! # Algorithm
//! Each write is recorded, and sent with the answers to the runtime's calls about other containers. The runtime starts and ends no pod
//! while it updates containers, so each answer has at most [`MAX_UPDATES_PER_ANSWER`]. Until then, the kernel has the new values, and the
//! daemon repairs them if they are overwritten.
//!
//! # Invariant
//! At most one update is pending for each existing container.

use std::{collections::BTreeMap, sync::Arc};

use numaward_guarantee::pod::Update;
use numaward_kube::nri::types;
use numaward_model::Settings;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::{handler, sandbox};

/// The maximum number of other containers that one answer updates.
const MAX_UPDATES_PER_ANSWER: usize = 4;

/// The latest settings of containers that the runtime does not know yet. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingUpdates(Arc<Mutex<BTreeMap<String, Settings>>>);

impl PendingUpdates {
    /// Records the updates in the queue until it is closed.
    pub(super) async fn follow(self, mut queue: mpsc::UnboundedReceiver<Vec<Update>>) {
        while let Some(updates) = queue.recv().await {
            let of_containers = updates.into_iter().filter(|update| !sandbox::is_id(&update.id));
            self.0.lock().extend(of_containers.map(|update| (update.id, update.settings)));
        }
    }

    /// Takes the next updates for the answer about container `about`. Drops updates with CPUs or nodes that are offline now: the runtime
    /// would reject the whole answer.
    pub(super) fn take(&self, about: &str, online: &types::Online) -> Vec<types::Update> {
        let mut latest = self.0.lock();
        latest.remove(about);
        let mut updates = Vec::new();
        while updates.len() < MAX_UPDATES_PER_ANSWER
            && let Some((id, settings)) = latest.pop_first()
        {
            let update = handler::update(id, &settings);
            if update.settings.check(online).is_ok() {
                updates.push(update);
            }
        }
        updates
    }

    /// Drops the update of a removed container.
    pub(super) fn forget(&self, id: &str) {
        self.0.lock().remove(id);
    }

    /// Drops all updates, before an answer that has the settings of all containers.
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
    async fn sends_latest_updates_in_small_batches() {
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
            updates
                .map(|update| format!("{}:{}", update.container, update.settings.mems.unwrap()))
                .collect::<Vec<_>>()
        };
        assert_eq!(take("a"), ["b:1", "d:0", "e:0", "f:0"], "node 7 is offline");
        assert_eq!(take("y"), ["x:0"]);
        assert!(take("y").is_empty());
    }
}
