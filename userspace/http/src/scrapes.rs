//! The limit of concurrent scrapes. Each takes a thread.
//!
//! # Problem
//! A client with many slow scrapes must not keep out other clients.
//!
//! # Algorithm
//! A free place goes to the peer with the fewest places, and among its requests to the oldest. So a peer without a
//! place gets the next one, however many requests of another peer wait before it. Of peers with equally many, a user
//! of this host comes before the network, on which one client may have many addresses. The body of a scrape gives up a
//! slow client while a request waits ([`ScrapePlace::is_wanted`]).
//!
//! # Invariant
//! Dropping a place frees it, also if its request has ended before it got the place.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::peers::PeerId;

/// Maximum number of concurrent scrapes: two Prometheus servers and a person.
const MAX_SCRAPES: usize = 4;

/// The places of scrapes; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Scrapes(Arc<Mutex<Queue>>);

#[derive(Debug, Default)]
struct Queue {
    /// The number of places of each peer.
    held: BTreeMap<Option<PeerId>, usize>,
    waiting: VecDeque<(Option<PeerId>, oneshot::Sender<ScrapePlace>)>,
}

/// The place of one scrape.
#[derive(Debug)]
pub(crate) struct ScrapePlace {
    /// `None` if the request ended before it took the place.
    queue: Option<Arc<Mutex<Queue>>>,
    peer: Option<PeerId>,
}

impl Scrapes {
    /// Waits for a place for this peer.
    pub(crate) async fn place(&self, peer: Option<PeerId>) -> Option<ScrapePlace> {
        let (sender, receiver) = oneshot::channel();
        self.0.lock().waiting.push_back((peer, sender));
        hand_out(&self.0);
        // The sender is dropped only with a place in it.
        receiver.await.ok()
    }
}

impl ScrapePlace {
    /// Returns true if a request waits for a place.
    pub(crate) fn is_wanted(&self) -> bool {
        let is_open = |(_, sender): &(_, oneshot::Sender<Self>)| !sender.is_closed();
        self.queue.as_ref().is_some_and(|queue| queue.lock().waiting.iter().any(is_open))
    }
}

impl Drop for ScrapePlace {
    fn drop(&mut self) {
        let Some(queue) = self.queue.take() else { return };
        queue.lock().remove(self.peer);
        hand_out(&queue);
    }
}

impl Queue {
    fn remove(&mut self, peer: Option<PeerId>) {
        if let Some(held) = self.held.get_mut(&peer) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&peer);
            }
        }
    }

    /// Removes the request that gets the next place from the queue.
    fn next(&mut self) -> Option<(Option<PeerId>, oneshot::Sender<ScrapePlace>)> {
        self.waiting.retain(|(_, sender)| !sender.is_closed());
        if self.held.values().sum::<usize>() >= MAX_SCRAPES {
            return None;
        }
        let held = |peer: &Option<PeerId>| self.held.get(peer).copied().unwrap_or_default();
        let is_remote = |peer: &Option<PeerId>| peer.is_some_and(|peer| !peer.is_local());
        let rank = |peer| (held(peer), is_remote(peer));
        let next = self.waiting.iter().enumerate().min_by_key(|(_, (peer, _))| rank(peer))?.0;
        self.waiting.remove(next)
    }
}

/// Gives free places to waiting requests.
fn hand_out(queue: &Arc<Mutex<Queue>>) {
    let mut all = queue.lock();
    while let Some((peer, sender)) = all.next() {
        *all.held.entry(peer).or_default() += 1;
        // A request that has just ended does not take it.
        if let Err(mut place) = sender.send(ScrapePlace { queue: Some(queue.clone()), peer }) {
            place.queue = None;
            all.remove(peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId::new(std::net::Ipv4Addr::new(10, 0, 0, number).into(), None)
    }

    #[tokio::test]
    async fn peer_without_place_is_next() {
        let scrapes = Scrapes::default();
        let mut held = Vec::new();
        for _ in 0..MAX_SCRAPES {
            held.push(scrapes.place(Some(peer(1))).await.unwrap());
        }
        assert!(!held[0].is_wanted());
        let mut many: Vec<_> = (0..30).map(|_| Box::pin(scrapes.place(Some(peer(1))))).collect();
        assert!(many.iter_mut().all(|request| request.now_or_never().is_none()));
        let mut other = Box::pin(scrapes.place(Some(peer(2))));
        assert!((&mut other).now_or_never().is_none() && held[0].is_wanted());
        held.pop();
        held.push((&mut other).now_or_never().flatten().expect("the peer without a place is first"));
        assert!(many.iter_mut().all(|request| request.now_or_never().is_none()));
        // A single peer gets all places, in the order of its requests.
        held.remove(0);
        assert!(many.remove(0).now_or_never().is_some());
    }

    /// A flood from many addresses: each is a peer with one request.
    #[tokio::test]
    async fn users_of_host_come_first() {
        let scrapes = Scrapes::default();
        let mut held = Vec::new();
        for number in 0..4 {
            held.push(scrapes.place(Some(peer(number))).await.unwrap());
        }
        let mut flood: Vec<_> = (10..40).map(|number| Box::pin(scrapes.place(Some(peer(number))))).collect();
        assert!(flood.iter_mut().all(|request| request.now_or_never().is_none()));
        let user = PeerId::new(std::net::Ipv4Addr::LOCALHOST.into(), Some(0));
        let mut scrape = Box::pin(scrapes.place(Some(user)));
        assert!((&mut scrape).now_or_never().is_none());
        held.pop();
        assert!(scrape.now_or_never().flatten().is_some());
    }

    #[tokio::test]
    async fn ended_request_frees_its_place() {
        let scrapes = Scrapes::default();
        let mut held = Vec::new();
        for _ in 0..MAX_SCRAPES {
            held.push(scrapes.place(Some(peer(1))).await.unwrap());
        }
        let mut gone = Box::pin(scrapes.place(Some(peer(2))));
        let mut given = Box::pin(scrapes.place(Some(peer(3))));
        assert!((&mut gone).now_or_never().is_none() && (&mut given).now_or_never().is_none());
        drop(gone);
        held.pop();
        // This request has been given a place, and ends without using it.
        drop(given);
        assert!(!held[0].is_wanted());
        assert!(scrapes.place(Some(peer(4))).now_or_never().is_some());
        drop(held);
        assert!(scrapes.0.lock().held.is_empty() && scrapes.0.lock().waiting.is_empty());
    }
}
