//! The control socket, on which processes of this host change guarantees.
//!
//! The socket has mode 0600. The server also checks the client's user id with `SO_PEERCRED`, because the mode of a file is easily changed.

use std::{io, os::unix::net::UnixListener};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, ready},
};

use crate::{
    denials::Denials,
    peer::Peer,
    server::{Accept, IncomingConnection, OpenedConnection},
};

/// Listener of the control socket. It accepts connections of root and of the daemon's own user.
#[derive(Debug)]
pub struct ControlListener(tokio::net::UnixListener, Denials);

/// The response to a connection of any other user.
const FORBIDDEN: &[u8] = b"HTTP/1.1 403 Forbidden\r\n\
    content-type: application/problem+json\r\n\
    connection: close\r\n\
    content-length: 124\r\n\
    \r\n\
    {\"title\":\"Forbidden\",\"status\":403,\"detail\":\"only root and the user of the daemon may use the control socket\",\"instance\":\"/\"}";

impl ControlListener {
    /// Takes a listener on a file with mode 0600. Must be called in the runtime that will serve.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        Ok(Self(tokio::net::UnixListener::from_std(listener)?, Denials::default()))
    }

    /// Waits for the next connection of an authorized user.
    async fn next(&self) -> io::Result<tokio::net::UnixStream> {
        loop {
            let (stream, _) = self.0.accept().await?;
            match stream.peer_cred() {
                Ok(peer) if may_control(peer.uid()) => return Ok(stream),
                Ok(peer) => {
                    self.1.log(None, &format_args!("user {} on the control socket", peer.uid()));
                    // The buffer of a new socket has room for this.
                    let _ = stream.try_write(FORBIDDEN);
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection to the control socket is refused: its user is not known");
                }
            }
        }
    }
}

impl Accept for ControlListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<IncomingConnection>> {
        async {
            let stream = self.next().await?;
            let opened: OpenedConnection = (Box::new(stream), Peer::default());
            Ok(IncomingConnection { source: None, local: None, open: ready(Ok(opened)).boxed() })
        }
        .boxed()
    }
}

/// Returns true if processes of this user may change guarantees.
fn may_control(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_own_user_may_control() {
        assert!(may_control(0) && may_control(rustix::process::geteuid().as_raw()));
        assert!(!may_control(rustix::process::geteuid().as_raw().wrapping_add(4711)));
    }
}
