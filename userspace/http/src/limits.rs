//! What clients may take.

use std::time::Duration;

/// Largest body that is taken. Only requests for allocations need one, of some hundred bytes.
pub const MAX_BODY_BYTES: usize = 16 << 10;
/// A request is answered, or given up, within this time; a response is taken by the client within it.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);

/// What the clients of one address may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Connections that are served at once; more wait in the kernel's queue.
    pub(crate) connections: usize,
    /// Connections of one peer; more are closed at once.
    pub(crate) connections_of_a_peer: usize,
    /// Bytes of large responses that clients have not taken yet.
    pub(crate) unread: usize,
    /// Those of one peer.
    pub(crate) unread_of_a_peer: usize,
    /// A connection is open for requests, and the head of a request is there, within this time each.
    pub(crate) head: Duration,
    /// A client that does not take a response as fast as it comes has to take [`MIN_TAKEN`] bytes in this time.
    pub(crate) stall: Duration,
}

/// Slower than this a client is not served: it would hold its response and its connection for hours.
pub(crate) const MIN_TAKEN: usize = 64 << 10;
/// A response is large from so many bytes on.
pub(crate) const LARGE: u64 = 256 << 10;

impl Limits {
    pub(crate) const USUAL: Self = Self {
        connections: 128,
        connections_of_a_peer: 32,
        unread: 64 << 20,
        unread_of_a_peer: 16 << 20,
        head: Duration::from_secs(10),
        stall: TIME_LIMIT,
    };
}
