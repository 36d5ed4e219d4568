//! Reports to the runtime what was written without it, so that it repeats it: the latest of each container.
//!
//! Invariant: what waits to be sent is no more than one change of each container, however slow the runtime is.

use std::{collections::BTreeMap, time::Duration};

use numaward_control::pod::Update;
use numaward_kube::nri::{Handle, Phase, types};
use numaward_model::Settings;
use tokio::sync::mpsc;

use super::handler;

/// Changes within this time are sent together.
const GATHER: Duration = Duration::from_millis(200);

/// Sends the runtime what comes through the queue, until that is closed.
pub(super) async fn send(handle: Handle, mut queue: mpsc::UnboundedReceiver<Vec<Update>>) {
    let mut latest = Latest::new();
    while gather(&mut latest, &mut queue).await {
        // A runtime that connects gets everything.
        let updates = std::mem::take(&mut latest);
        if handle.status().borrow().phase != Phase::Connected {
            continue;
        }
        let updates: Vec<types::Update> =
            updates.into_iter().map(|(id, settings)| handler::update(id, &settings)).collect();
        let sending = handle.update_containers(&updates);
        // Nothing piles up behind a runtime that is slow.
        match beside(sending, &mut latest, &mut queue).await {
            Ok(failed) if failed.is_empty() => {
                tracing::debug!(containers = updates.len(), "the runtime follows");
            }
            Ok(failed) => tracing::warn!(?failed, "the runtime cannot change these containers"),
            Err(error) => tracing::warn!(%error, "changed containers cannot be reported to the runtime"),
        }
    }
}

/// What containers are to have, by their ids.
type Latest = BTreeMap<String, Settings>;

fn note(latest: &mut Latest, updates: Vec<Update>) {
    latest.extend(updates.into_iter().map(|update| (update.id, update.settings)));
}

/// Waits for changes, and for those that follow closely. `false` if there will be none.
async fn gather(latest: &mut Latest, queue: &mut mpsc::UnboundedReceiver<Vec<Update>>) -> bool {
    if latest.is_empty() {
        match queue.recv().await {
            Some(updates) => note(latest, updates),
            None => return false,
        }
    }
    beside(tokio::time::sleep(GATHER), latest, queue).await;
    true
}

/// Notes what comes until something else is done.
async fn beside<T>(
    other: impl Future<Output = T>,
    latest: &mut Latest,
    queue: &mut mpsc::UnboundedReceiver<Vec<Update>>,
) -> T {
    tokio::pin!(other);
    loop {
        tokio::select! {
            done = &mut other => return done,
            Some(updates) = queue.recv() => note(latest, updates),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{Instant, sleep, timeout};

    use super::*;

    fn update(id: &str, nodes: &str) -> Update {
        Update {
            id: id.to_owned(),
            settings: Settings { mems: Some(nodes.parse().unwrap()), ..Settings::default() },
        }
    }

    #[tokio::test(start_paused = true)]
    async fn changes_that_do_not_end_are_sent_all_the_same() {
        let (sender, mut queue) = mpsc::unbounded_channel();
        let start = Instant::now();
        tokio::spawn(async move {
            for round in 0..100 {
                sender.send(vec![update("a", &(round % 2).to_string()), update("b", "1")]).unwrap();
                sleep(GATHER / 4).await;
            }
        });
        let mut latest = Latest::new();
        assert!(timeout(Duration::from_mins(1), gather(&mut latest, &mut queue)).await.unwrap());
        assert_eq!((start.elapsed(), latest.len()), (GATHER, 2));
        // While it is sent, the latest is noted.
        latest.clear();
        beside(sleep(GATHER), &mut latest, &mut queue).await;
        assert_eq!(latest.len(), 2);
        assert_eq!(latest["b"], update("b", "1").settings);
        while !queue.is_closed() || !queue.is_empty() {
            latest.clear();
            gather(&mut latest, &mut queue).await;
        }
        latest.clear();
        assert!(!gather(&mut latest, &mut queue).await, "there will be none");
    }
}
