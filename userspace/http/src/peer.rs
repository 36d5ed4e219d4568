//! Who is on the other side.

use std::net::SocketAddr;

/// Who is on the other side of a connection, as far as the connection shows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Peer {
    pub(crate) address: Option<SocketAddr>,
    pub(crate) certificate: Certificate,
}

/// What its client certificate says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Certificate {
    #[default]
    None,
    Taken,
    /// Of the right authority, but with none of the names that may control.
    OtherName,
}
