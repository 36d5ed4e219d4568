//! Client of irqbalance, which is asked to keep interrupts off CPUs.
//!
//! # Problem
//! irqbalance spreads interrupts over all CPUs every ten seconds, and so undoes the moves that the daemon makes.
//!
//! # Terms
//! A CPU is *banned* if irqbalance moves no interrupts to it, by its configuration (`IRQBALANCE_BANNED_CPULIST`) or by
//! a request on its socket.
//!
//! # Algorithm
//! Each irqbalance process listens on a socket of its own, takes one request per connection, and applies it in its next
//! round. Banned CPUs of a request replace those of the configuration, so a request names both.
//!
//! Source: `sock_handle` and `setup_banned_cpus` in irqbalance 1.9.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use numaward_topology::CpuSet;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with,
    sockopt::{Timeout, set_socket_timeout},
};

use crate::interrupts::parse_mask;

const SOCKETS: &str = "run/irqbalance";
/// The time limit of a request. irqbalance answers between two rounds, which take a few milliseconds.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(200);

/// A running irqbalance process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Irqbalance {
    socket: PathBuf,
}

impl Irqbalance {
    /// Returns the processes with a socket below this root directory.
    pub fn all(root: &Path) -> Vec<Self> {
        let entries = fs::read_dir(root.join(SOCKETS)).into_iter().flatten().flatten();
        let sockets = entries.map(|entry| entry.path());
        sockets
            .filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
            .map(|socket| Self { socket })
            .collect()
    }

    /// Returns the banned CPUs.
    pub fn banned(&self) -> io::Result<CpuSet> {
        let answer = self.ask("setup")?;
        let mask = answer.rsplit_once("BANNED ").and_then(|(_, mask)| parse_mask(mask));
        mask.ok_or_else(|| io::Error::other(format!("{}: it answers {answer:?}", self.socket.display())))
    }

    /// Bans exactly these CPUs; with an empty set, those of the configuration.
    pub fn ban(&self, cpus: &CpuSet) -> io::Result<()> {
        let cpus = if cpus.is_empty() { "NULL".to_owned() } else { cpus.to_string() };
        self.ask(&format!("settings cpus {cpus}")).map(drop)
    }

    /// Sends one request, and reads the answer until the connection is closed.
    fn ask(&self, request: &str) -> io::Result<String> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // The timeout also applies to the connection: the backlog is one.
        set_socket_timeout(&socket, Timeout::Send, Some(REQUEST_TIMEOUT))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(REQUEST_TIMEOUT))?;
        connect(&socket, &SocketAddrUnix::new(&self.socket)?)?;
        let mut stream = UnixStream::from(socket);
        // irqbalance finds the end of the text by its length, but reads on if the last byte is not 0.
        stream.write_all(format!("{request}\0").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;

    #[test]
    fn bans_cpus_over_socket() {
        let root = tempfile::tempdir().unwrap();
        assert!(Irqbalance::all(root.path()).is_empty());
        let folder = root.path().join(SOCKETS);
        fs::create_dir_all(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("irqbalance7.sock")).unwrap();
        // The fake reads once, as irqbalance does.
        let answers = thread::spawn(move || {
            let answer = |text: &str| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut buffer = [0; 500];
                let count = stream.read(&mut buffer).unwrap();
                stream.write_all(text.as_bytes()).unwrap();
                String::from_utf8(buffer[..count].to_vec()).unwrap()
            };
            let texts =
                ["SLEEP 10 IRQ 24 LOAD 3 DIFF 1 CLASS 5 BANNED 00000001,0000000c", "SLEEP 10", "", ""];
            texts.map(answer)
        });
        let [one] = Irqbalance::all(root.path()).try_into().unwrap();
        assert_eq!(one.banned().unwrap(), "2-3,32".parse().unwrap());
        assert!(one.banned().unwrap_err().to_string().contains("it answers \"SLEEP 10\""));
        one.ban(&"2-3,8".parse().unwrap()).unwrap();
        one.ban(&CpuSet::new()).unwrap();
        let requests = answers.join().unwrap();
        assert_eq!(requests, ["setup\0", "setup\0", "settings cpus 2-3,8\0", "settings cpus NULL\0"]);
        assert!(one.banned().is_err(), "the server has ended");
    }
}
