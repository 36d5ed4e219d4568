//! Who is on the other side.

use std::{net::SocketAddr, sync::Arc};

use crate::{credentials::Credentials, peers::Place};

/// Who is on the other side of a connection, as far as the connection shows.
#[derive(Clone, Debug, Default)]
pub struct Peer {
    pub(crate) address: Option<SocketAddr>,
    pub(crate) certificate: Certificate,
    /// By which the certificate was judged.
    pub(crate) judged_by: Option<Arc<Credentials>>,
    /// What its connection holds.
    pub(crate) place: Option<Arc<Place>>,
}

/// A request that came with a token or a client certificate that is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Authorized;

impl Peer {
    /// Whether it came on the control socket, which only root and the daemon's own user may open: all others have an address.
    pub(crate) fn is_on_control_socket(&self) -> bool {
        self.address.is_none()
    }
}

/// What its client certificate says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Certificate {
    #[default]
    None,
    Taken,
    /// Of the right authority, but with none of the names that may control.
    OtherName,
    /// Taken by credentials that are no longer in force.
    Old,
}
