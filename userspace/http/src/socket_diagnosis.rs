//! Users of TCP sockets, by queries to the kernel for single sockets (`sock_diag(7)`), which find one among any number of sockets.
//!
//! # Invariants
//! - A query of a connection whose client is closed finds a socket without an inode, or none. The socket at the daemon's end, or the
//!   listening one, is found by the same query from the other end, unless the kernel answers no queries.
//! - If no such connection exists, the kernel answers with a listening socket of the port. It has other addresses, and is not the client.
//! - A query waits for nothing: the kernel has queued the answer when the request is sent.

use std::{io, net::SocketAddr};

use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::{AF_INET, AF_INET6, IPPROTO_TCP},
    inet::{ExtensionFlags, InetRequest, SocketId, StateFlags},
};
use netlink_sys::{Socket, SocketAddr as NetlinkAddress, protocols::NETLINK_SOCK_DIAG};

/// Size of the buffer for an answer, which has some 130 bytes.
const ANSWER_BYTES: usize = 4 << 10;
/// Index of the loopback interface in each network namespace (`LOOPBACK_IFINDEX`): sockets bound to it are found, and those bound to none.
const LOOPBACK: u32 = 1;
/// `INET_DIAG_NOCOOKIE`: the socket is named by its addresses alone.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// A connection to the kernel's socket diagnosis.
pub(crate) struct SocketDiagnosis(Socket);

impl SocketDiagnosis {
    pub(crate) fn open() -> io::Result<Self> {
        let socket = Socket::new(NETLINK_SOCK_DIAG)?;
        socket.set_non_blocking(true)?;
        Ok(Self(socket))
    }

    /// Returns the user of the process that has the client's end of the connection; `None` if it is closed. The addresses are not
    /// IPv4-mapped.
    ///
    /// # Errors
    /// The kernel answers no queries: it lacks the module `tcp_diag`.
    pub(crate) fn client_user(&self, client: SocketAddr, server: SocketAddr) -> io::Result<Option<u32>> {
        if let Some(socket) = self.find(client, server)?
            && socket.ends == (client, server)
        {
            return Ok((socket.inode != 0).then_some(socket.user));
        }
        match self.find(server, client)? {
            Some(_) => Ok(None),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn find(&self, own: SocketAddr, other: SocketAddr) -> io::Result<Option<FoundSocket>> {
        let family = if own.is_ipv4() { AF_INET } else { AF_INET6 };
        let request = InetRequest {
            family,
            protocol: IPPROTO_TCP,
            extensions: ExtensionFlags::empty(),
            states: StateFlags::all(),
            socket_id: SocketId {
                source_port: own.port(),
                destination_port: other.port(),
                source_address: own.ip(),
                destination_address: other.ip(),
                interface_id: LOOPBACK,
                cookie: NO_COOKIE,
            },
        };
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST;
        let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.0.send_to(&bytes, &NetlinkAddress::new(0, 0), 0)?;
        let mut answer = Vec::with_capacity(ANSWER_BYTES);
        self.0.recv(&mut answer, 0)?;
        let answer = NetlinkMessage::<SockDiagMessage>::deserialize(&answer).map_err(io::Error::other)?;
        match answer.payload {
            NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(socket)) => {
                let id = &socket.header.socket_id;
                let own = SocketAddr::new(id.source_address.to_canonical(), id.source_port);
                let other = SocketAddr::new(id.destination_address.to_canonical(), id.destination_port);
                Ok(Some(FoundSocket {
                    ends: (own, other),
                    user: socket.header.uid,
                    inode: socket.header.inode,
                }))
            }
            NetlinkPayload::Error(error) => match error.to_io() {
                error if error.kind() == io::ErrorKind::NotFound => Ok(None),
                error => Err(error),
            },
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// A socket. One without a process has the inode 0.
struct FoundSocket {
    /// Its own address and that of the other end.
    ends: (SocketAddr, SocketAddr),
    user: u32,
    inode: u32,
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use numaward_tests_support::skip_outside_ci;

    use super::*;

    #[test]
    fn finds_users_of_open_clients_only() {
        let own = rustix::process::geteuid().as_raw();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // A host without IPv6.
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (accepted, from) = listener.accept().unwrap();
            let server = accepted.local_addr().unwrap();
            let diagnosis = SocketDiagnosis::open().unwrap();
            match diagnosis.client_user(from, server) {
                Ok(user) => assert_eq!(user, Some(own), "{address}"),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}");
                    return skip_outside_ci("the kernel lacks the module tcp_diag");
                }
            }
            drop(client);
            assert_eq!(diagnosis.client_user(from, server).unwrap(), None, "{address}: it is closed");
            let listening = TcpListener::bind(address).unwrap();
            let closed = SocketAddr::new(from.ip(), 1);
            assert_eq!(
                diagnosis.client_user(listening.local_addr().unwrap(), closed).ok().flatten(),
                None,
                "{address}: a socket that listens on the client's port is not the client"
            );
            let nowhere = |port| SocketAddr::new(from.ip(), port);
            let error = diagnosis.client_user(nowhere(1), nowhere(2)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{address}: no socket has these ports");
        }
    }
}
