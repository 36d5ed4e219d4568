//! Owner of a listening port of this host.
//!
//! Problem: while the daemon does not run, any user can listen on its port and answer root with false figures.
//!
//! Source: `proc_net(5)`, `net/ipv4/tcp_ipv4.c` (`get_tcp4_sock`).

use std::{
    fs::File,
    io::{self, BufReader},
    path::Path,
};

use numaward_cgroup::TruncatedLines;

/// State of a listening socket (`TCP_LISTEN`) in `/proc/net/tcp`.
const LISTEN_STATE: &str = "0A";

/// Returns whether programs of root listen on a port, and no other user's. `proc` is the mount point of procfs.
pub(crate) fn is_owned_by_root(proc: &Path, port: u16) -> io::Result<bool> {
    let mut is_owned_by_root = false;
    for file in ["net/tcp", "net/tcp6"] {
        let file = match File::open(proc.join(file)) {
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && file == "net/tcp6" => continue,
            file => file?,
        };
        let mut lines = TruncatedLines::new(BufReader::new(file));
        while let Some(line) = lines.next_line()? {
            match user_of_listener(&String::from_utf8_lossy(line), port) {
                Some("0") => is_owned_by_root = true,
                Some(_) => return Ok(false),
                None => {}
            }
        }
    }
    Ok(is_owned_by_root)
}

/// Returns the user of a socket that listens on a port, from its line.
fn user_of_listener(line: &str, port: u16) -> Option<&str> {
    // 0: 0100007F:2558 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 …
    let mut words = line.split_ascii_whitespace().skip(1);
    let (_, local) = words.next()?.rsplit_once(':')?;
    let is_listener = u16::from_str_radix(local, 16).ok()? == port && words.nth(1)? == LISTEN_STATE;
    words.nth(3).filter(|_| is_listener)
}

#[cfg(test)]
mod tests {
    use std::{fs, net::TcpListener};

    use super::*;

    const HEAD: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

    #[test]
    fn port_of_root_has_no_other_listener() {
        let proc = tempfile::tempdir().unwrap();
        fs::create_dir(proc.path().join("net")).unwrap();
        let line = |address: &str, state: &str, user: u32| {
            format!(
                "   0: {address} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000  {user}        0 47 1\n"
            )
        };
        let roots = |tcp: &[String], tcp6: Option<String>| {
            fs::write(proc.path().join("net/tcp"), [HEAD, &tcp.concat()].concat()).unwrap();
            let path = proc.path().join("net/tcp6");
            match tcp6 {
                Some(lines) => fs::write(path, [HEAD, &lines].concat()).unwrap(),
                None => drop(fs::remove_file(path)),
            }
            is_owned_by_root(proc.path(), 9560).unwrap()
        };
        let ours = line("0100007F:2558", "0A", 0);
        assert!(roots(std::slice::from_ref(&ours), None));
        assert!(!roots(&[], None), "no program listens");
        assert!(!roots(&[line("0100007F:2558", "0A", 1000)], None));
        assert!(!roots(&[line("0100007F:2559", "0A", 0)], None), "another port");
        assert!(!roots(&[line("0100007F:2558", "01", 0)], None), "a connection");
        let other = line("0100007F:2559", "0A", 1000);
        assert!(roots(&[other, ours.clone(), line("0100007F:2558", "01", 1000)], Some(String::new())));
        let ipv6 = line("00000000000000000000000001000000:2558", "0A", 1000);
        assert!(!roots(&[ours], Some(ipv6)));
        assert!(is_owned_by_root(&proc.path().join("none"), 9560).is_err());
    }

    #[test]
    fn own_listener_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let is_root = rustix::process::geteuid().is_root();
        assert_eq!(is_owned_by_root(Path::new("/proc"), port).unwrap(), is_root);
        drop(listener);
        assert!(!is_owned_by_root(Path::new("/proc"), port).unwrap());
    }
}
