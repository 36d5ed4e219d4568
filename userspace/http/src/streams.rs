//! The limit of concurrent streams of events on one listener.
//!
//! # Problem
//! A stream lasts until its client ends it. One client must not hold the places of all.
//!
//! # Algorithm
//! A peer has at most [`MAX_STREAMS_OF_A_PEER`] streams. If all places are taken, a new stream takes that of the oldest
//! stream of the peer with the most streams, if its own peer has fewer. If no peer has more than one, the first
//! stream of a user of this host takes that of the oldest stream of a peer on the network. The connection of a stream
//! that has to go is closed.
//!
//! # Invariants
//! - Dropping a place frees it, unless another stream has taken it.
//! - The clients of a Unix socket have no limit of a peer, and none of them has to go.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

use crate::peers::{ConnectionPlace, PeerId};

/// Maximum number of streams of one listener.
const MAX_STREAMS: usize = 64;
/// Maximum number of streams of one peer: the pages of several browsers behind one proxy.
const MAX_STREAMS_OF_A_PEER: usize = 16;

/// The streams of one listener; clones share them. Each listener has its own, so that clients of one do not use the
/// places of another.
#[derive(Clone, Debug, Default)]
pub(crate) struct Streams(Arc<Mutex<StreamUsage>>);

#[derive(Debug, Default)]
struct StreamUsage {
    /// The number of the next stream.
    next: u64,
    /// The streams of each peer, the oldest first.
    held: BTreeMap<Option<PeerId>, BTreeMap<u64, Option<Arc<ConnectionPlace>>>>,
}

/// The place of one stream.
#[derive(Debug)]
pub(crate) struct StreamPlace {
    streams: Streams,
    peer: Option<PeerId>,
    number: u64,
}

/// Refusal of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TooManyStreams {
    #[error("{MAX_STREAMS} streams are open, which is the limit")]
    All,
    #[error("{MAX_STREAMS_OF_A_PEER} streams of this client or user are open, which is the limit")]
    Peer,
}

impl Streams {
    /// Returns a place for a stream on this connection.
    pub(crate) fn place(
        &self,
        connection: Option<Arc<ConnectionPlace>>,
    ) -> Result<StreamPlace, TooManyStreams> {
        let peer = connection.as_ref().and_then(|connection| connection.peer());
        let mut all = self.0.lock();
        let own = all.held.get(&peer).map_or(0, BTreeMap::len);
        if peer.is_some() && own >= MAX_STREAMS_OF_A_PEER {
            return Err(TooManyStreams::Peer);
        }
        if all.held.values().map(BTreeMap::len).sum::<usize>() >= MAX_STREAMS {
            all.displace(peer.ok_or(TooManyStreams::All)?, own).ok_or(TooManyStreams::All)?;
        }
        let number = all.next;
        all.next += 1;
        all.held.entry(peer).or_default().insert(number, connection);
        Ok(StreamPlace { streams: self.clone(), peer, number })
    }
}

impl StreamUsage {
    /// Ends a stream for one of this peer, which has `own` streams. Returns `None` if no stream has to go.
    fn displace(&mut self, peer: PeerId, own: usize) -> Option<()> {
        let largest = self.held.iter().max_by_key(|(_, streams)| streams.len());
        let largest = largest.filter(|(_, streams)| streams.len() > own + 1).map(|(peer, _)| *peer);
        let oldest_remote = || {
            let remote = self.held.iter().filter(|(peer, _)| peer.is_some_and(|peer| !peer.is_local()));
            remote.min_by_key(|(_, streams)| streams.keys().next().copied()).map(|(peer, _)| *peer)
        };
        let from = largest.or_else(|| if own == 0 && peer.is_local() { oldest_remote() } else { None })?;
        let number = *self.held.get(&from)?.keys().next()?;
        if let Some(connection) = self.remove(from, number) {
            connection.close();
        }
        Some(())
    }

    fn remove(&mut self, peer: Option<PeerId>, number: u64) -> Option<Arc<ConnectionPlace>> {
        let streams = self.held.get_mut(&peer)?;
        let connection = streams.remove(&number);
        if streams.is_empty() {
            self.held.remove(&peer);
        }
        connection.flatten()
    }
}

impl Drop for StreamPlace {
    fn drop(&mut self) {
        let removed = self.streams.0.lock().remove(self.peer, self.number);
        // Dropping a connection's place takes another lock.
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::{limits::Limits, peers::Peers};

    /// Opens streams of one client; each on a connection of its own.
    fn open(
        streams: &Streams,
        peers: &Arc<Peers>,
        address: &str,
        count: usize,
    ) -> Vec<(Arc<ConnectionPlace>, StreamPlace)> {
        let one = |_| {
            let place = peers.enter(Some(PeerId::new(address.parse().unwrap(), None))).unwrap();
            (place.clone(), streams.place(Some(place)).unwrap_or_else(|error| panic!("{address}: {error}")))
        };
        (0..count).map(one).collect()
    }

    fn refusal(streams: &Streams, peers: &Arc<Peers>, address: &str) -> Option<TooManyStreams> {
        let place = peers.enter(Some(PeerId::new(address.parse().unwrap(), None))).unwrap();
        streams.place(Some(place)).err()
    }

    fn is_closed(of: &(Arc<ConnectionPlace>, StreamPlace)) -> bool {
        of.0.displaced().now_or_never().is_some()
    }

    #[test]
    fn one_peer_holds_a_share() {
        let (streams, peers) = (Streams::default(), Peers::new(Limits::DEFAULT));
        let mut held = open(&streams, &peers, "10.0.0.1", MAX_STREAMS_OF_A_PEER);
        assert_eq!(refusal(&streams, &peers, "10.0.0.1"), Some(TooManyStreams::Peer));
        held.pop();
        assert_eq!(refusal(&streams, &peers, "10.0.0.1"), None, "an ended stream frees its place");
        drop(held);
        assert!(streams.0.lock().held.is_empty());
        let local: Vec<_> = (0..MAX_STREAMS).map(|_| streams.place(None).unwrap()).collect();
        assert_eq!(streams.place(None).err(), Some(TooManyStreams::All), "a Unix socket has the total limit");
        drop(local);
    }

    #[test]
    fn peer_with_fewer_is_served() {
        let (streams, peers) = (Streams::default(), Peers::new(Limits::DEFAULT));
        let mut held = Vec::new();
        for host in 1..=MAX_STREAMS / MAX_STREAMS_OF_A_PEER {
            held.push(open(&streams, &peers, &format!("10.0.0.{host}"), MAX_STREAMS_OF_A_PEER));
        }
        let late = open(&streams, &peers, "10.0.1.1", 3);
        let closed: Vec<_> = held.iter().map(|of| of.iter().filter(|one| is_closed(one)).count()).collect();
        assert_eq!(closed.iter().sum::<usize>(), 3, "{closed:?}");
        assert!(held.iter().all(|of| !of.last().is_some_and(is_closed)), "the oldest have to go");
        assert!(!late.iter().any(is_closed));
        // A closed stream ends later, and frees no place of another one.
        drop(held);
        assert_eq!(streams.0.lock().held.values().map(BTreeMap::len).sum::<usize>(), 3);
    }

    /// A flood from many addresses: each is a peer with one stream.
    #[test]
    fn users_of_host_precede_network() {
        let (streams, peers) = (Streams::default(), Peers::new(Limits::DEFAULT));
        let flood: Vec<_> =
            (0..MAX_STREAMS).flat_map(|host| open(&streams, &peers, &format!("10.0.0.{host}"), 1)).collect();
        assert_eq!(refusal(&streams, &peers, "10.0.1.1"), Some(TooManyStreams::All));
        let user = open(&streams, &peers, "127.0.0.1", 1);
        assert!(is_closed(&flood[0]) && !is_closed(&user[0]));
        assert_eq!(refusal(&streams, &peers, "127.0.0.1"), Some(TooManyStreams::All), "it has one");
    }
}
