//! Forwards a TCP port to a unix socket, so that a client outside the machine can reach its server.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use clap::Args;
use tokio::{
    io,
    net::{TcpListener, UnixStream},
};

use crate::grpc::CallError;

#[derive(Args)]
pub(crate) struct Relay {
    /// TCP port
    port: u16,
    /// Unix socket
    to: PathBuf,
}

/// Serves until it is killed.
pub(crate) async fn run(Relay { port, to }: &Relay) -> Result<(), CallError> {
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, *port));
    let failed = |source| CallError::Socket { socket: address.to_string().into(), source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    loop {
        let (mut from, _) = listener.accept().await.map_err(failed)?;
        let to = to.clone();
        tokio::spawn(async move {
            // Both clients see the end of the connection.
            if let Ok(mut to) = UnixStream::connect(to).await {
                let _ = io::copy_bidirectional(&mut from, &mut to).await;
            }
        });
    }
}
