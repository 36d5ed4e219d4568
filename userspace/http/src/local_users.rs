//! The local user of a connection over the loopback.
//!
//! # Problem
//! All clients on the loopback have the same address. If they shared one peer's limits, any user could take all of them, and a
//! Prometheus on this host would get no connection and no scrape.
//!
//! # Algorithm
//! The kernel finds the client's socket by the addresses of the accepted connection ([`SocketDiagnosis`]). Where it lacks the module for
//! that, `/proc/net/tcp` and `tcp6` have a line for each socket: its address, that of the other end, and the user that created it. The
//! client's own line has the addresses of the accepted connection in reverse order. One read, limited in size, serves all connections
//! that are accepted together. A flood of connections leaves thousands of closed ones in these files for a minute, and makes
//! each read slow.
//!
//! # Invariants
//! - A client that is not found (it is closed already, or the files have too many sockets) has no known user. All of these share one
//!   peer's limits.
//! - A user may have any number of ids from [`FIRST_SUBORDINATE`] on, by a user namespace. They count as one.
//!
//! Source: `Documentation/networking/proc_net_tcp.rst`.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufRead as _, BufReader, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use crate::socket_diagnosis::SocketDiagnosis;

/// Maximum number of bytes that are read of a file: some 50,000 sockets, about 1 µs each.
const MAX_BYTES: u64 = 8 << 20;
/// First id of user namespaces (`/etc/subuid`), which has some 65,536 for each user.
pub(crate) const FIRST_SUBORDINATE: u32 = 1 << 16;

/// A connection: the client's address and the accepting address.
pub(crate) type Ends = (SocketAddr, SocketAddr);

/// The folder with the socket tables of the daemon's own network namespace.
const NETWORK_DIR: &str = "/proc/self/net";

/// Returns the users of the connections that are found.
pub(crate) fn users(connections: &[Ends]) -> HashMap<Ends, u32> {
    diagnosed_users(connections).unwrap_or_else(|_| listed_users(Path::new(NETWORK_DIR), connections))
}

fn diagnosed_users(connections: &[Ends]) -> io::Result<HashMap<Ends, u32>> {
    let diagnosis = SocketDiagnosis::open()?;
    let mut found = HashMap::new();
    for &(client, server) in connections {
        if let Some(user) = diagnosis.client_user(canonical(client), canonical(server))? {
            found.insert((client, server), user.min(FIRST_SUBORDINATE));
        }
    }
    Ok(found)
}

fn listed_users(net: &Path, connections: &[Ends]) -> HashMap<Ends, u32> {
    let wanted: HashMap<Ends, Ends> = connections
        .iter()
        .map(|&(client, server)| ((canonical(client), canonical(server)), (client, server)))
        .collect();
    let mut found = HashMap::new();
    for file in ["tcp", "tcp6"] {
        let Ok(file) = File::open(net.join(file)) else { continue };
        let mut lines = BufReader::with_capacity(64 << 10, file.take(MAX_BYTES));
        let mut line = String::new();
        while found.len() < wanted.len() && matches!(lines.read_line(&mut line), Ok(1..)) {
            if let Some((ends, user)) = parse(&line)
                && let Some(&connection) = wanted.get(&ends)
            {
                found.insert(connection, user.min(FIRST_SUBORDINATE));
            }
            line.clear();
        }
    }
    found
}

/// Returns the ends of the socket of a line, its own end first, and its user. A socket without a process has no inode and no user.
fn parse(line: &str) -> Option<(Ends, u32)> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (own, other) = (address(fields.next()?)?, address(fields.next()?)?);
    // State, queues, timer, retransmits.
    let user = fields.nth(4)?.parse().ok()?;
    let inode = fields.nth(1)?;
    (inode != "0").then_some(((own, other), user))
}

/// Parses an address in the kernel's notation: words in the processor's byte order as hexadecimal digits, and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let word = |from: usize| {
        let digits = ip.get(from..from + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip: IpAddr = match ip.len() {
        8 => Ipv4Addr::from(word(0)?).into(),
        32 => {
            let mut bytes = [0; 16];
            for (at, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(8 * at)?);
            }
            Ipv6Addr::from(bytes).into()
        }
        _ => return None,
    };
    Some(canonical(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?)))
}

/// Returns the address with an IPv4-mapped IPv6 address converted to IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use std::{
        fmt::Write as _,
        fs,
        net::{TcpListener, TcpStream},
    };

    use super::*;

    #[test]
    fn finds_user_of_client() {
        let own = rustix::process::geteuid().as_raw().min(FIRST_SUBORDINATE);
        for (listen, connect) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "127.0.0.1")] {
            // A host without IPv6.
            let Ok(listener) = TcpListener::bind(listen) else { continue };
            let port = listener.local_addr().unwrap().port();
            let client = TcpStream::connect((connect.parse::<IpAddr>().unwrap(), port)).unwrap();
            let (stream, address) = listener.accept().unwrap();
            let ends = (address, stream.local_addr().unwrap());
            let listed = |ends: &[Ends]| listed_users(Path::new(NETWORK_DIR), ends);
            for found in [users(&[ends]), listed(&[ends])] {
                assert_eq!(found, HashMap::from([(ends, own)]), "{listen}");
            }
            drop(client);
            for found in [users(&[ends]), listed(&[ends])] {
                assert_eq!(found, HashMap::new(), "a closed connection has no user");
            }
        }
    }

    #[test]
    fn reads_files_up_to_limit() {
        let net = tempfile::tempdir().unwrap();
        let bytes = |word: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(word));
        let loopback = bytes([127, 0, 0, 1]);
        let line = |port: u16, user: u32, inode: u32| {
            format!(
                "   1: {loopback}:{port:04X} {loopback}:2558 01 00000000:00000000 00:00000000 00000000 {user:5} 0 {inode} 1 0 20 4\n"
            )
        };
        let ends = |port: u16| (SocketAddr::from(([127, 0, 0, 1], port)), "127.0.0.1:9560".parse().unwrap());
        let mut text = "  sl  local_address rem_address   st\nodd\n   1: 0:1 0:2\n".to_owned();
        // The server's own end, a user, an id of a user namespace, and a socket without a process.
        writeln!(text, "   0: {loopback}:2558 {loopback}:0001 01 0:0 0:0 0 0 0 5 1").unwrap();
        text += &(line(1, 1000, 5) + &line(2, 165_536, 6) + &line(3, 0, 0));
        fs::write(net.path().join("tcp"), &text).unwrap();
        let wanted = [ends(1), ends(2), ends(3), ends(4)];
        assert_eq!(
            listed_users(net.path(), &wanted),
            HashMap::from([(ends(1), 1000), (ends(2), FIRST_SUBORDINATE)])
        );
        let flood = line(9, 1000, 7).repeat(usize::try_from(MAX_BYTES).unwrap() / 80);
        fs::write(net.path().join("tcp"), flood + &text).unwrap();
        assert_eq!(listed_users(net.path(), &wanted), HashMap::new());
        assert_eq!(listed_users(Path::new("/nonexistent"), &wanted), HashMap::new());
    }
}
