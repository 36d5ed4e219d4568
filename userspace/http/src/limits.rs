//! Limits on the resources that clients may use.

use std::time::Duration;

/// Maximum size of a request body. Only requests for guarantees have one, of some hundred bytes.
pub const MAX_BODY_BYTES: usize = 16 << 10;
/// Time after which a request fails without a response, and after which a response that the client does not read is aborted.
pub const TIME_LIMIT: Duration = Duration::from_secs(30);

/// The limits of one address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of connections that are served at once; further ones wait.
    pub(crate) connections: usize,
    /// Maximum number of connections of one peer; a further one takes the place of an idle one, or is closed.
    pub(crate) connections_of_a_peer: usize,
    /// Maximum number of bytes of large responses that clients have not read yet.
    pub(crate) unread: usize,
    /// The same for the clients of one peer.
    pub(crate) unread_of_a_peer: usize,
    /// Time limit of the handshake of a connection, and of each request's head.
    pub(crate) head: Duration,
    /// Time in which a client that blocks a response has to read [`MIN_TAKEN`] bytes.
    pub(crate) stall: Duration,
}

/// Minimum number of bytes that a slow client has to read in [`Limits::stall`]. A slower one would hold its response
/// and its connection for hours.
pub(crate) const MIN_TAKEN: usize = 64 << 10;
/// Minimum size in bytes of a large response.
pub(crate) const LARGE_RESPONSE: u64 = 256 << 10;

impl Limits {
    pub(crate) const DEFAULT: Self = Self {
        connections: 128,
        connections_of_a_peer: 32,
        unread: 64 << 20,
        unread_of_a_peer: 16 << 20,
        head: Duration::from_secs(10),
        stall: TIME_LIMIT,
    };
}
