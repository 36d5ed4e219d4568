//! The client at the other end of a connection.

use std::{net::SocketAddr, sync::Arc};

use crate::{credentials::Credentials, peers::ConnectionPlace};

/// Identity of a client, as far as its connection shows it.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    /// `None` on the control socket.
    pub(crate) address: Option<SocketAddr>,
    pub(crate) certificate: Certificate,
    /// The credentials against which the certificate was checked.
    pub(crate) checked_with: Option<Arc<Credentials>>,
    /// The connection's share of its peer's limits.
    pub(crate) place: Option<Arc<ConnectionPlace>>,
}

/// Marker of a request with a valid token or client certificate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Authorization;

impl Peer {
    /// Returns true on the control socket, which only root and the daemon's own user may open. Any other connection has an address.
    pub(crate) fn is_on_control_socket(&self) -> bool {
        self.address.is_none()
    }
}

/// Result of the check of the client certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Certificate {
    #[default]
    None,
    Accepted,
    /// Signed by a configured authority, but without any of the configured client names.
    OtherName,
    /// Accepted with credentials that have been replaced since.
    Outdated,
}
