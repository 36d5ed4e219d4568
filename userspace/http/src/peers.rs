//! The resources that each peer of an address holds, limited so that one peer cannot use those of all.
//!
//! # Problem
//! The numbers of connections and of unread responses are limited for all clients together. One client that opens
//! connections and reads nothing would block all other clients, including the kubelet's probes.
//!
//! # Terms
//! - A *peer* is the set of addresses that one client can use at no cost: an IPv4 address, 64 bits of an IPv6
//!   address, or a user of this host on its loopback ([`crate::local_users`]). All clients of a Unix socket are one
//!   peer without limits of its own: the mode of the file decides which users they are.
//! - A *place* is the share of one connection. It is *served* while it holds one of a limited number of permits.
//!
//! # Algorithm
//! A peer that has reached its limit of places gives up its oldest idle place for its next connection. So idle connections
//! of one program do not lock out others of its address, such as the kubelet beside the processes of its host. If no place is
//! idle, the connection is refused: requests in progress go on, however many clients ask again and again.
//!
//! If no permit is free, a connection takes that of the oldest place of the peer with the most served places, if its
//! own peer has fewer connections. So a peer that opens many connections and reads slowly blocks only itself.
//!
//! A client with many addresses is as many peers, each with few connections. So the only connection of a peer then
//! takes the permit of the oldest idle place; one on the loopback, if no place is idle, that of the oldest place of a
//! peer on the network. A place is idle while no request is handled and all responses are written to the socket, or if the
//! client has not read for [`MAX_IDLE_STALL`]. Otherwise the connection waits.
//!
//! # Invariants
//! - The resources of a place are released when it is dropped.
//! - A peer without places and unread bytes has no entry.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::limits::Limits;

/// Time without reading after which the client of a response counts as idle.
const MAX_IDLE_STALL: Duration = Duration::from_secs(3);

/// Identity of a peer. A Unix socket has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PeerId {
    address: IpAddr,
    /// The user of a client on the loopback, if known.
    user: Option<u32>,
}

impl PeerId {
    /// Returns the peer of a client address. All addresses of the loopback, and the low 64 bits of an IPv6 address, are ignored.
    pub(crate) fn new(address: IpAddr, user: Option<u32>) -> Self {
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

    /// Returns true for a user of this host.
    pub(crate) fn is_local(self) -> bool {
        self.address.is_loopback()
    }
}

/// The resources of one peer.
#[derive(Debug, Default)]
struct PeerUsage {
    /// Bytes of large responses that its clients have not read.
    unread: usize,
    /// The places that were not displaced, the oldest first.
    places: BTreeMap<u64, HeldPlace>,
}

#[derive(Debug)]
struct HeldPlace {
    /// `None` while the connection waits.
    permit: Option<OwnedSemaphorePermit>,
    activity: Arc<Activity>,
}

impl PeerUsage {
    fn served(&self) -> impl Iterator<Item = (u64, &HeldPlace)> {
        self.places.iter().filter(|(_, place)| place.permit.is_some()).map(|(number, place)| (*number, place))
    }

    /// Returns the oldest idle place.
    fn oldest_idle(&self) -> Option<u64> {
        self.places.iter().find(|(_, place)| place.activity.is_idle()).map(|(number, _)| *number)
    }

    /// Removes a place, whose connection then closes, and returns its permit.
    fn displace(&mut self, number: u64) -> Option<OwnedSemaphorePermit> {
        let HeldPlace { permit, activity } = self.places.remove(&number)?;
        activity.displaced.cancel();
        permit
    }
}

/// The activity of a connection.
#[derive(Debug, Default)]
struct Activity {
    displaced: CancellationToken,
    /// The number of requests whose responses are not complete.
    requests: AtomicUsize,
    /// True from the end of a response until its last byte is written to the socket.
    is_writing: AtomicBool,
    stalls: Mutex<BufferStalls>,
}

impl Activity {
    fn is_idle(&self) -> bool {
        let is_stalled = || self.stalls.lock().since.is_some_and(|since| since.elapsed() >= MAX_IDLE_STALL);
        let is_answering =
            self.requests.load(Ordering::Relaxed) > 0 || self.is_writing.load(Ordering::Relaxed);
        !is_answering || is_stalled()
    }
}

/// Guard of a request in progress: its connection is not idle.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<Activity>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.is_writing.store(true, Ordering::Relaxed);
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The peers of one address.
#[derive(Debug)]
pub(crate) struct Peers {
    limits: Limits,
    usage: Mutex<BTreeMap<Option<PeerId>, PeerUsage>>,
    entered: AtomicU64,
}

impl Peers {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, usage: Mutex::default(), entered: AtomicU64::new(0) })
    }

    /// Returns a place for a connection of this peer; `None` if the peer has reached its limit and no place of it is idle, or
    /// if very many connections wait and the peer has the most. The first connection of a user of this host always gets
    /// one. If an idle place is displaced, the new one takes its permit.
    pub(crate) fn enter(self: &Arc<Self>, peer: Option<PeerId>) -> Option<Arc<ConnectionPlace>> {
        let mut all = self.usage.lock();
        let connections: usize = all.values().map(|held| held.places.len()).sum();
        let most = all.values().map(|held| held.served().count()).max().unwrap_or_default();
        let own = all.get(&peer).map_or(0, |held| held.places.len());
        let is_full = peer.is_some() && own >= self.limits.connections_of_a_peer;
        let is_first_of_user = own == 0 && peer.is_some_and(PeerId::is_local);
        let is_crowded = connections >= 2 * self.limits.connections && own + 1 >= most && !is_first_of_user;
        if peer.is_some() && is_crowded && !is_full {
            return None;
        }
        let held = all.entry(peer).or_default();
        let permit = if is_full { held.displace(held.oldest_idle()?) } else { None };
        let number = self.entered.fetch_add(1, Ordering::Relaxed);
        let activity = Arc::<Activity>::default();
        held.places.insert(number, HeldPlace { permit, activity: activity.clone() });
        let (peers, unread) = (self.clone(), AtomicUsize::new(0));
        Some(Arc::new(ConnectionPlace { peers, peer, number, activity, unread }))
    }
}

/// The share of one connection in the limits of its peer. Dropping it releases its resources.
#[derive(Debug)]
pub(crate) struct ConnectionPlace {
    peers: Arc<Peers>,
    peer: Option<PeerId>,
    number: u64,
    activity: Arc<Activity>,
    /// Bytes of large responses that its client has not read.
    unread: AtomicUsize,
}

/// Time in which the send buffer was full because the client did not read.
#[derive(Debug, Default)]
struct BufferStalls {
    ended: Duration,
    since: Option<Instant>,
}

impl ConnectionPlace {
    pub(crate) fn peer(&self) -> Option<PeerId> {
        self.peer
    }

    /// Notes that a request is in progress, until the guard is dropped.
    pub(crate) fn begin_request(&self) -> ActiveRequest {
        self.activity.requests.fetch_add(1, Ordering::Relaxed);
        ActiveRequest(self.activity.clone())
    }

    /// Notes that all bytes of the responses so far are written to the socket.
    pub(crate) fn note_flush(&self) {
        self.activity.is_writing.store(false, Ordering::Relaxed);
    }

    /// Notes that the send buffer is full, or that it has room again.
    pub(crate) fn note_stall(&self, is_stalled: bool) {
        let mut stalls = self.activity.stalls.lock();
        match (is_stalled, stalls.since) {
            (true, None) => stalls.since = Some(Instant::now()),
            (false, Some(since)) => {
                stalls.ended += since.elapsed();
                stalls.since = None;
            }
            _ => {}
        }
    }

    /// Returns the total time in which the send buffer was full.
    pub(crate) fn stalled(&self) -> Duration {
        let stalls = self.activity.stalls.lock();
        stalls.ended + stalls.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Returns true if the connection has a permit.
    pub(crate) fn is_served(&self) -> bool {
        let all = self.peers.usage.lock();
        let place = all.get(&self.peer).and_then(|held| held.places.get(&self.number));
        place.is_some_and(|place| place.permit.is_some())
    }

    /// Serves the connection with this permit from now on, unless it was displaced while it waited.
    pub(crate) fn serve(&self, permit: OwnedSemaphorePermit) {
        let mut all = self.peers.usage.lock();
        if let Some(place) = all.get_mut(&self.peer).and_then(|held| held.places.get_mut(&self.number)) {
            place.permit = Some(permit);
        }
    }

    /// Takes the permit of another place, as the module describes; `None` if this connection has to wait.
    pub(crate) fn displace(&self) -> Option<OwnedSemaphorePermit> {
        let mut all = self.peers.usage.lock();
        let own = all.get(&self.peer).filter(|_| self.peer.is_some())?.places.len();
        let largest = all.iter().max_by_key(|(_, held)| held.served().count());
        let (peer, number) = largest
            .filter(|(_, held)| held.served().count() > own)
            .and_then(|(peer, held)| Some((*peer, held.served().next()?.0)))
            .or_else(|| if own == 1 { self.least_useful(&all) } else { None })?;
        all.get_mut(&peer)?.displace(number)
    }

    /// Returns the oldest idle place, or else, for a user of this host, the oldest place of a peer on the network.
    fn least_useful(&self, all: &BTreeMap<Option<PeerId>, PeerUsage>) -> Option<(Option<PeerId>, u64)> {
        let served = all.iter().flat_map(|(peer, held)| {
            held.served().map(|(number, place)| (number, *peer, place.activity.is_idle()))
        });
        let is_user = self.peer.is_some_and(PeerId::is_local);
        let is_remote = |peer: Option<PeerId>| peer.is_some_and(|peer| !peer.is_local());
        let may_go = served.filter(|&(_, peer, is_idle)| is_idle || is_user && is_remote(peer));
        let (_, number, peer) = may_go.map(|(number, peer, is_idle)| (!is_idle, number, peer)).min()?;
        Some((peer, number))
    }

    /// Closes the connection. Data that waits to be written to it is dropped.
    pub(crate) fn close(&self) {
        self.activity.displaced.cancel();
    }

    /// Waits until another connection takes the permit, or until [`close`](Self::close) is called.
    pub(crate) async fn displaced(&self) {
        self.activity.displaced.cancelled().await;
    }

    /// Counts the bytes of a large response until they are [released](Self::release_unread). Returns false, and
    /// counts nothing, if they exceed a limit. A response is always allowed if no other one is unread.
    pub(crate) fn reserve_unread(&self, bytes: usize) -> bool {
        let mut all = self.peers.usage.lock();
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

    /// Notes that the client has read so many bytes.
    pub(crate) fn release_unread(&self, bytes: usize) {
        let mut freed = 0;
        // Only one task writes to a connection and changes this.
        let _ = self.unread.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |unread| {
            freed = bytes.min(unread);
            (freed > 0).then(|| unread - freed)
        });
        if freed > 0
            && let Some(held) = self.peers.usage.lock().get_mut(&self.peer)
        {
            held.unread -= freed;
        }
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut all = self.peers.usage.lock();
        let Some(held) = all.get_mut(&self.peer) else { return };
        held.places.remove(&self.number);
        held.unread -= *self.unread.get_mut();
        // Places that were displaced may still have unread bytes.
        if held.places.is_empty() && held.unread == 0 {
            all.remove(&self.peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    const SMALL_LIMITS: Limits =
        Limits { connections_of_a_peer: 2, unread: 100, unread_of_a_peer: 40, ..Limits::DEFAULT };

    fn enter(peers: &Arc<Peers>, address: &str) -> Option<Arc<ConnectionPlace>> {
        peers.enter(Some(PeerId::new(address.parse().unwrap(), None)))
    }

    fn displaced<const N: usize>(places: &[Arc<ConnectionPlace>; N]) -> [bool; N] {
        places.each_ref().map(|place| place.activity.displaced.is_cancelled())
    }

    #[test]
    fn limit_holds_for_all_peer_addresses() {
        for (addresses, other) in [
            (["127.0.0.1", "127.3.2.1", "::1"], "10.0.0.1"),
            (["10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1"], "10.0.0.2"),
            (["2001:db8::1", "2001:db8::2", "2001:db8::ffff:0:0:3"], "2001:db8:0:1::1"),
        ] {
            let peers = Peers::new(SMALL_LIMITS);
            let places = addresses.map(|address| enter(&peers, address).unwrap());
            assert_eq!(displaced(&places), [true, false, false], "{addresses:?}");
            let other_place = enter(&peers, other);
            assert_eq!(displaced(&places), [true, false, false], "{other}");
            let [_, second, third] = places;
            drop(second);
            let places = [third, enter(&peers, addresses[2]).unwrap()];
            assert_eq!(displaced(&places), [false, false], "{addresses:?}");
            drop((places, other_place));
            assert!(peers.usage.lock().is_empty(), "{addresses:?}");
        }
        let peers = Peers::new(SMALL_LIMITS);
        let of_user = |user| peers.enter(Some(PeerId::new("127.0.0.1".parse().unwrap(), user))).unwrap();
        let places = [Some(0), Some(1000), None, Some(0), Some(0)].map(of_user);
        assert_eq!(displaced(&places), [true, false, false, false, false], "each user is a peer");
        let peers = Peers::new(SMALL_LIMITS);
        let places = [(); 9].map(|()| peers.enter(None).unwrap());
        assert_eq!(displaced(&places), [false; 9], "a Unix socket has no limit of a peer");
    }

    /// Two programs of one peer: one has responses in progress, the other opens connections again and again.
    #[test]
    fn full_peer_gives_up_idle_place() {
        let limits = Limits { connections_of_a_peer: 4, ..SMALL_LIMITS };
        let (peers, permits) = (Peers::new(limits), Arc::new(Semaphore::new(3)));
        let places = [(); 4].map(|()| enter(&peers, "10.0.0.1").unwrap());
        let requests = [places[0].begin_request(), places[2].begin_request()];
        for place in &places[..3] {
            place.serve(permits.clone().try_acquire_owned().unwrap());
        }
        let first = enter(&peers, "10.0.0.1").unwrap();
        assert_eq!(displaced(&places), [false, true, false, false], "the oldest idle one");
        assert!(first.is_served(), "with its permit");
        let second = enter(&peers, "10.0.0.1").unwrap();
        assert_eq!(displaced(&places), [false, true, false, true]);
        assert!(!second.is_served(), "the one before had no permit");
        let more = [first.begin_request(), second.begin_request()];
        assert!(enter(&peers, "10.0.0.1").is_none(), "all are busy");
        assert_eq!(displaced(&places), [false, true, false, true], "requests in progress go on");
        assert_eq!(displaced(&[first.clone(), second.clone()]), [false, false]);
        drop((requests, more, places, first, second));
        assert!(peers.usage.lock().is_empty());
        assert_eq!(permits.available_permits(), 3);
    }

    #[test]
    fn displaced_place_keeps_its_unread_bytes() {
        let peers = Peers::new(SMALL_LIMITS);
        let places = [(); 2].map(|()| enter(&peers, "10.0.0.1").unwrap());
        assert!(places[0].reserve_unread(40));
        let [first, second] = places;
        let later = [(); 2].map(|()| enter(&peers, "10.0.0.1").unwrap());
        assert!(!later[0].reserve_unread(1), "more than the limit of a peer");
        drop((second, later));
        assert!(!enter(&peers, "10.0.0.1").unwrap().reserve_unread(1), "the same without a place");
        drop(first);
        assert!(peers.usage.lock().is_empty());
    }

    #[test]
    fn peer_with_fewer_displaces_one() {
        let limits = Limits { connections: 3, ..SMALL_LIMITS };
        let (peers, permits) = (Peers::new(limits), Arc::new(Semaphore::new(3)));
        let served: Vec<_> = ["10.0.0.1", "10.0.0.2", "10.0.0.2"]
            .map(|address| {
                let place = enter(&peers, address).unwrap();
                assert!(place.displace().is_none(), "no peer has more");
                place.serve(permits.clone().try_acquire_owned().unwrap());
                (place.begin_request(), place)
            })
            .into();
        let late = enter(&peers, "10.0.0.3").unwrap();
        late.serve(late.displace().unwrap());
        let displaced: Vec<_> =
            served.iter().map(|(_, place)| place.activity.displaced.is_cancelled()).collect();
        assert_eq!(displaced, [false, true, false]);
        let request = late.begin_request();
        let more = enter(&peers, "10.0.0.4").unwrap();
        assert!(more.displace().is_none(), "no peer has more than one");
        let crowd: Vec<_> = ["10.0.0.5", "10.0.0.6", "10.0.0.7"].map(|peer| enter(&peers, peer)).into();
        assert!(crowd[1].is_some() && crowd[2].is_none(), "the number of waiting connections is limited");
        drop((served, request, late, more, crowd));
        assert!(peers.usage.lock().is_empty());
        assert_eq!(permits.available_permits(), 3);
    }

    /// A flood from many addresses: each is a peer with one connection.
    #[tokio::test(start_paused = true)]
    async fn many_addresses_lock_out_no_peer() {
        let limits = Limits { connections: 3, ..SMALL_LIMITS };
        let (peers, permits) = (Peers::new(limits), Arc::new(Semaphore::new(3)));
        let flood = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|address| enter(&peers, address).unwrap());
        let mut requests: Vec<_> = flood.iter().map(|place| Some(place.begin_request())).collect();
        for place in &flood {
            place.serve(permits.clone().try_acquire_owned().unwrap());
        }
        let displaced = || displaced(&flood);
        let late = enter(&peers, "10.0.0.4").unwrap();
        assert!(late.displace().is_none(), "all places are in use");
        requests[1] = None;
        assert!(late.displace().is_none(), "a response is not written yet");
        flood[1].note_flush();
        let second = enter(&peers, "10.0.0.4").unwrap();
        assert!(second.displace().is_none(), "its peer has another connection");
        drop(second);
        late.serve(late.displace().expect("a place is idle"));
        let request = late.begin_request();
        assert_eq!(displaced(), [false, true, false]);
        flood[2].note_stall(true);
        tokio::time::advance(MAX_IDLE_STALL).await;
        let more = enter(&peers, "10.0.0.5").unwrap();
        more.serve(more.displace().expect("a client does not read"));
        let more_request = more.begin_request();
        assert_eq!(displaced(), [false, true, true]);
        // Further connections of the flood wait, and none is idle.
        let waiting: Vec<_> = (6..99).map_while(|host| enter(&peers, &format!("10.0.0.{host}"))).collect();
        assert!(!waiting.is_empty() && waiting.len() < 93);
        let user = enter(&peers, "127.0.0.1").expect("a user of this host may enter");
        user.serve(user.displace().expect("a peer on the network goes first"));
        assert_eq!(displaced(), [true, true, true]);
        drop((request, more_request));
    }

    #[test]
    fn unread_bytes_count_until_released() {
        let peers = Peers::new(SMALL_LIMITS);
        let [a, b, c, d] =
            ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"].map(|address| enter(&peers, address).unwrap());
        assert!(a.reserve_unread(30));
        assert!(!a.reserve_unread(11), "more than the limit of a peer");
        assert!(a.reserve_unread(10) && b.reserve_unread(40));
        assert!(c.reserve_unread(20));
        assert!(!c.reserve_unread(1), "more than the limit of all");
        // Heads and small responses are released, too, although they were not counted.
        b.release_unread(25);
        assert!(c.reserve_unread(20));
        a.release_unread(4096);
        assert!(a.reserve_unread(1) && !a.reserve_unread(40));
        drop(b);
        drop(c);
        assert!(a.reserve_unread(39));
        drop(a);
        assert!(d.reserve_unread(1000), "a single response may always be sent");
        drop(d);
        assert!(peers.usage.lock().is_empty());
    }
}
