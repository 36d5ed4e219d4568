//! What each peer of an address holds, so that none takes the room of the others.
//!
//! Problem: connections, and responses that nobody reads, are bounded for all clients together; one client that opens
//! connections and reads nothing would keep out everybody else, the kubelet's probes among them.
//!
//! Terms: a *peer* is what one party can have of addresses at no cost: an IPv4 address, 64 bits of an IPv6 address, a user of this
//! host on its loopback ([`crate::local_users`]). Clients of a Unix socket are one peer without limits of its own: the file's
//! mode says who they are. A *place* is one connection's; it is *served* once it has one of the limited permits.
//!
//! Algorithm: where all permits are taken, a connection takes that of the oldest place of the peer with the most, if its own
//! peer has fewer; else it waits. So those who open many connections and hardly read keep out themselves alone.
//!
//! Invariants: what a place holds is given back when it is dropped; a peer without a place costs nothing.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::limits::Limits;

/// A peer, unless it is that of a Unix socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PeerId {
    address: IpAddr,
    /// On the loopback: the user, where that is known.
    user: Option<u32>,
}

impl PeerId {
    /// What costs nothing to have more of is one.
    pub(crate) fn of(address: IpAddr, user: Option<u32>) -> Self {
        let address = address.to_canonical();
        if address.is_loopback() {
            return Self { address: Ipv6Addr::LOCALHOST.into(), user };
        }
        let address = match address {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
            IpAddr::V4(_) => address,
        };
        Self { address, user: None }
    }
}

/// What one peer holds.
#[derive(Debug, Default)]
struct Held {
    connections: usize,
    unread: usize,
    /// Its places that are served, by age.
    served: BTreeMap<u64, (OwnedSemaphorePermit, CancellationToken)>,
}

/// The peers of one address.
#[derive(Debug)]
pub(crate) struct Peers {
    limits: Limits,
    held: Mutex<BTreeMap<Option<PeerId>, Held>>,
    entered: AtomicU64,
}

impl Peers {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, held: Mutex::default(), entered: AtomicU64::new(0) })
    }

    /// A place for a connection of this peer; none, where it has as many as it may.
    pub(crate) fn enter(self: &Arc<Self>, peer: Option<PeerId>) -> Option<Arc<Place>> {
        let mut all = self.held.lock();
        let connections: usize = all.values().map(|held| held.connections).sum();
        let most = all.values().map(|held| held.served.len()).max().unwrap_or_default();
        let held = all.entry(peer).or_default();
        let is_crowded = connections >= 2 * self.limits.connections && held.connections + 1 >= most;
        if peer.is_some() && (is_crowded || held.connections >= self.limits.connections_of_a_peer) {
            if held.connections == 0 {
                all.remove(&peer);
            }
            return None;
        }
        held.connections += 1;
        let number = self.entered.fetch_add(1, Ordering::Relaxed);
        let displaced = CancellationToken::new();
        let (unread, stalls) = (AtomicUsize::new(0), Mutex::default());
        Some(Arc::new(Place { peers: self.clone(), peer, number, displaced, unread, stalls }))
    }
}

/// The place of one connection.
#[derive(Debug)]
pub(crate) struct Place {
    peers: Arc<Peers>,
    peer: Option<PeerId>,
    number: u64,
    displaced: CancellationToken,
    /// Bytes of large responses that its client has not taken.
    unread: AtomicUsize,
    stalls: Mutex<Stalls>,
}

/// How long the kernel took nothing more, as the client did not read.
#[derive(Debug, Default)]
struct Stalls {
    ended: Duration,
    since: Option<Instant>,
}

impl Place {
    /// Who has it.
    pub(crate) fn peer(&self) -> Option<PeerId> {
        self.peer
    }

    /// Notes whether the kernel takes nothing more at the moment.
    pub(crate) fn note_stall(&self, is_stalled: bool) {
        let mut stalls = self.stalls.lock();
        match (is_stalled, stalls.since) {
            (true, None) => stalls.since = Some(Instant::now()),
            (false, Some(since)) => {
                stalls.ended += since.elapsed();
                stalls.since = None;
            }
            _ => {}
        }
    }

    /// The time that its client has let pass without reading.
    pub(crate) fn stalled(&self) -> Duration {
        let stalls = self.stalls.lock();
        stalls.ended + stalls.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// It is served from now on.
    pub(crate) fn serve(&self, permit: OwnedSemaphorePermit) {
        if let Some(held) = self.peers.held.lock().get_mut(&self.peer) {
            held.served.insert(self.number, (permit, self.displaced.clone()));
        }
    }

    /// Takes the permit of the oldest place of the peer that has the most, if it has more than this one's peer.
    pub(crate) fn displace(&self) -> Option<OwnedSemaphorePermit> {
        let mut all = self.peers.held.lock();
        let own = all.get(&self.peer).filter(|_| self.peer.is_some())?.connections;
        let most = all.values_mut().max_by_key(|held| held.served.len())?;
        if most.served.len() <= own {
            return None;
        }
        let (_, (permit, displaced)) = most.served.pop_first()?;
        displaced.cancel();
        Some(permit)
    }

    /// Has the connection closed, with all that waits to be written to it.
    pub(crate) fn close(&self) {
        self.displaced.cancel();
    }

    /// Until another one takes its permit, or it is closed.
    pub(crate) async fn displaced(&self) {
        self.displaced.cancelled().await;
    }

    /// Whether a large response may be sent; if so, its bytes count until they are [taken](Self::took). The
    /// first of a peer, and the first of all, may always be.
    pub(crate) fn may_send(&self, bytes: usize) -> bool {
        let mut all = self.peers.held.lock();
        let total: usize = all.values().map(|held| held.unread).sum();
        let Limits { unread, unread_of_a_peer, .. } = self.peers.limits;
        let Some(held) = all.get_mut(&self.peer) else { return false };
        let exceeds = |has: usize, limit: usize| has > 0 && has.saturating_add(bytes) > limit;
        if exceeds(total, unread) || (self.peer.is_some() && exceeds(held.unread, unread_of_a_peer)) {
            return false;
        }
        held.unread += bytes;
        self.unread.fetch_add(bytes, Ordering::Relaxed);
        true
    }

    /// Notes that the client has taken so many bytes.
    pub(crate) fn took(&self, bytes: usize) {
        let mut freed = 0;
        // One task writes to a connection and adds to this.
        let _ = self.unread.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |unread| {
            freed = bytes.min(unread);
            (freed > 0).then(|| unread - freed)
        });
        if freed > 0
            && let Some(held) = self.peers.held.lock().get_mut(&self.peer)
        {
            held.unread -= freed;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut all = self.peers.held.lock();
        let Some(held) = all.get_mut(&self.peer) else { return };
        held.connections -= 1;
        held.served.remove(&self.number);
        held.unread -= *self.unread.get_mut();
        if held.connections == 0 {
            all.remove(&self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    const LIMITS: Limits =
        Limits { connections_of_a_peer: 2, unread: 100, unread_of_a_peer: 40, ..Limits::USUAL };

    fn enter(peers: &Arc<Peers>, address: &str) -> Option<Arc<Place>> {
        peers.enter(Some(PeerId::of(address.parse().unwrap(), None)))
    }

    #[test]
    fn a_peer_has_so_many_connections_whatever_address_it_takes() {
        for (addresses, other) in [
            (["127.0.0.1", "127.3.2.1", "::1"], "10.0.0.1"),
            (["10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1"], "10.0.0.2"),
            (["2001:db8::1", "2001:db8::2", "2001:db8::ffff:0:0:3"], "2001:db8:0:1::1"),
        ] {
            let peers = Peers::new(LIMITS);
            let [first, second, third] = addresses.map(|address| enter(&peers, address));
            assert!(first.is_some() && second.is_some() && third.is_none(), "{addresses:?}");
            assert!(enter(&peers, other).is_some(), "{other}");
            drop(first);
            assert!(enter(&peers, addresses[2]).is_some(), "{addresses:?}");
            drop(second);
            assert!(peers.held.lock().is_empty(), "{addresses:?}");
        }
        let peers = Peers::new(LIMITS);
        let of_user = |user| peers.enter(Some(PeerId::of("127.0.0.1".parse().unwrap(), user)));
        let [first, second, third] = [0; 3].map(|user| of_user(Some(user)));
        assert!(first.is_some() && second.is_some() && third.is_none());
        assert!(of_user(Some(1000)).is_some() && of_user(None).is_some(), "each user is a peer");
        let peers = Peers::new(LIMITS);
        let places: Vec<_> = (0..9).map(|_| peers.enter(None)).collect();
        assert!(places.iter().all(Option::is_some), "a Unix socket has no limit of a peer");
    }

    #[test]
    fn where_there_is_no_permit_who_has_fewer_takes_one_of_who_has_most() {
        let limits = Limits { connections: 3, ..LIMITS };
        let (peers, permits) = (Peers::new(limits), Arc::new(Semaphore::new(3)));
        let served: Vec<_> = ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
            .map(|address| {
                let place = enter(&peers, address).unwrap();
                assert!(place.displace().is_none(), "there are others");
                place.serve(permits.clone().try_acquire_owned().unwrap());
                place
            })
            .into();
        let late = enter(&peers, "10.0.0.3").unwrap();
        late.serve(late.displace().unwrap());
        let displaced: Vec<_> = served.iter().map(|place| place.displaced.is_cancelled()).collect();
        assert_eq!(displaced, [false, true, false]);
        let more = enter(&peers, "10.0.0.4").unwrap();
        assert!(more.displace().is_none(), "nobody has more than one");
        let crowd: Vec<_> = ["10.0.0.5", "10.0.0.6", "10.0.0.7"].map(|peer| enter(&peers, peer)).into();
        assert!(crowd[0].is_some() && crowd[1].is_none(), "only so many wait");
        drop((served, late, more, crowd));
        assert!(peers.held.lock().is_empty());
        assert_eq!(permits.available_permits(), 3);
    }

    #[test]
    fn what_is_not_taken_counts_until_it_is_or_the_connection_ends() {
        let peers = Peers::new(LIMITS);
        let [a, b, c, d] =
            ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"].map(|address| enter(&peers, address).unwrap());
        assert!(a.may_send(30));
        assert!(!a.may_send(11), "more than a peer may have");
        assert!(a.may_send(10) && b.may_send(40));
        assert!(c.may_send(20));
        assert!(!c.may_send(1), "more than all may have");
        // Heads and small responses pass by as well.
        b.took(25);
        assert!(c.may_send(20));
        a.took(4096);
        assert!(a.may_send(1) && !a.may_send(40));
        drop(b);
        drop(c);
        assert!(a.may_send(39));
        drop(a);
        assert!(d.may_send(1000), "the first may always be sent");
        drop(d);
        assert!(peers.held.lock().is_empty());
    }
}
