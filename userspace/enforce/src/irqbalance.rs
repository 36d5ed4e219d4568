//! irqbalance: which CPUs it keeps interrupts off.
//!
//! Problem: it spreads interrupts over all CPUs every ten seconds, and so brings back what was moved off some.
//!
//! Terms: CPUs are *banned* if it moves no interrupts there: as its configuration says (`IRQBALANCE_BANNED_CPULIST`), or as it
//! was last asked to on its socket.
//!
//! Algorithm: each process of it listens on a socket of its own, takes one request on a connection, and heeds it in its next
//! round. What is banned by request replaces what the configuration says, so both are asked for together.
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
/// It answers between two rounds, which take a few milliseconds.
const PATIENCE: Duration = Duration::from_millis(200);

/// One that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Irqbalance {
    socket: PathBuf,
}

impl Irqbalance {
    /// Those that have a socket below this root directory.
    pub fn all(root: &Path) -> Vec<Self> {
        let entries = fs::read_dir(root.join(SOCKETS)).into_iter().flatten().flatten();
        let sockets = entries.map(|entry| entry.path());
        sockets
            .filter(|path| path.extension().is_some_and(|extension| extension == "sock"))
            .map(|socket| Self { socket })
            .collect()
    }

    /// The CPUs that are banned.
    pub fn banned(&self) -> io::Result<CpuSet> {
        let answer = self.ask("setup")?;
        let mask = answer.rsplit_once("BANNED ").and_then(|(_, mask)| parse_mask(mask));
        mask.ok_or_else(|| io::Error::other(format!("{}: it answers {answer:?}", self.socket.display())))
    }

    /// Bans these CPUs and no others; with none, those of its configuration.
    pub fn ban(&self, cpus: &CpuSet) -> io::Result<()> {
        let cpus = if cpus.is_empty() { "NULL".to_owned() } else { cpus.to_string() };
        self.ask(&format!("settings cpus {cpus}")).map(drop)
    }

    /// Sends one request, and reads until it closes the connection.
    fn ask(&self, request: &str) -> io::Result<String> {
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // For the connection too: it has room for one that waits.
        set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        connect(&socket, &SocketAddrUnix::new(&self.socket)?)?;
        let mut stream = UnixStream::from(socket);
        // It takes the end of the text from the length, but reads further where that is not 0.
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
    fn it_is_asked_and_banned_on_its_socket() {
        let root = tempfile::tempdir().unwrap();
        assert!(Irqbalance::all(root.path()).is_empty());
        let folder = root.path().join(SOCKETS);
        fs::create_dir_all(&folder).unwrap();
        let listener = UnixListener::bind(folder.join("irqbalance7.sock")).unwrap();
        // It reads once, as the real one does.
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
        assert!(one.banned().is_err(), "nobody listens any more");
    }
}
