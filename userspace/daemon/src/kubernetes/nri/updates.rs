//! Reports to the runtime what was written without it, so that it repeats it: the latest of each container.
//!
//! While a runtime changes containers, it does nothing else that concerns us: no pod starts or ends. So few are changed at a
//! time.
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
/// Containers that are changed by one call.
const AT_ONCE: usize = 4;

/// Sends the runtime what comes through the queue, until that is closed.
pub(super) async fn send(handle: Handle, mut queue: mpsc::UnboundedReceiver<Vec<Update>>) {
    let mut latest = Latest::new();
    while gather(&mut latest, &mut queue).await {
        let mut round = std::mem::take(&mut latest);
        // A runtime that connects gets everything.
        while !round.is_empty() && handle.status().borrow().phase == Phase::Connected {
            let updates: Vec<types::Update> =
                next(&mut round, &mut latest).map(|(id, settings)| handler::update(id, &settings)).collect();
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
}

/// Takes the next few of a round, as they are by now.
fn next(round: &mut Latest, latest: &mut Latest) -> impl Iterator<Item = (String, Settings)> {
    let after = round.keys().nth(AT_ONCE).cloned();
    let rest = after.map(|id| round.split_off(&id)).unwrap_or_default();
    let few = std::mem::replace(round, rest).into_iter();
    few.map(|(id, settings)| latest.remove_entry(&id).unwrap_or((id, settings)))
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

    #[test]
    fn a_round_is_sent_in_parts_and_what_changed_meanwhile_as_it_is() {
        let of = |names: &[&str], nodes: &str| {
            let mut latest = Latest::new();
            note(&mut latest, names.iter().map(|id| update(id, nodes)).collect());
            latest
        };
        let (mut round, mut latest) = (of(&["a", "b", "c", "d", "e"], "0"), of(&["b", "e", "f"], "1"));
        let mut part = || {
            let part =
                next(&mut round, &mut latest).map(|(id, of)| (id, of.mems.unwrap_or_default().to_string()));
            part.collect::<Vec<_>>()
        };
        let expected = [[("a", "0"), ("b", "1"), ("c", "0"), ("d", "0")].as_slice(), &[("e", "1")], &[]];
        for expected in expected {
            let expected: Vec<_> =
                expected.iter().map(|(id, nodes)| (id.to_string(), nodes.to_string())).collect();
            assert_eq!(part(), expected);
        }
        assert_eq!(latest.into_keys().collect::<Vec<_>>(), ["f"]);
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
