//! The control socket: who may change allocations from this host.
//!
//! The socket belongs to its owner alone (0600). Who it is on the other side is asked of the kernel all the
//! same: the mode of a file is easily changed.

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

/// Accepts connections on the control socket from those who may change allocations.
#[derive(Debug)]
pub struct ControlListener(tokio::net::UnixListener, Denials);

/// The answer to everybody else.
const FORBIDDEN: &[u8] = b"HTTP/1.1 403 Forbidden\r\n\
    content-type: application/problem+json\r\n\
    connection: close\r\n\
    content-length: 124\r\n\
    \r\n\
    {\"title\":\"Forbidden\",\"status\":403,\"detail\":\"only root and the user of the daemon may use the control socket\",\"instance\":\"/\"}";

impl ControlListener {
    /// Takes a listener of which nobody else may open the file. Call it in the runtime that is to serve.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        Ok(Self(tokio::net::UnixListener::from_std(listener)?, Denials::default()))
    }

    /// The next connection of one who may change allocations.
    async fn next(&self) -> io::Result<tokio::net::UnixStream> {
        loop {
            let (stream, _) = self.0.accept().await?;
            match stream.peer_cred() {
                Ok(peer) if may_control(peer.uid()) => return Ok(stream),
                Ok(peer) => {
                    self.1.log(None, &format_args!("user {} on the control socket", peer.uid()));
                    // A new socket has room for this; a client that does not read it learns nothing.
                    let _ = stream.try_write(FORBIDDEN);
                }
                Err(error) => tracing::warn!(%error, "it is not known who came to the control socket"),
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

/// Whether a process of this user may change allocations.
fn may_control(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_and_the_daemons_own_user_may_control() {
        assert!(may_control(0) && may_control(rustix::process::geteuid().as_raw()));
        assert!(!may_control(rustix::process::geteuid().as_raw().wrapping_add(4711)));
    }
}
