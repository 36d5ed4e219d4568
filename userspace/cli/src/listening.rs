//! Whose programs listen on a port of this host.
//!
//! Problem: while the daemon is not there, any user can listen on its port, and answer root with figures that are made up.
//!
//! Source: `proc_net(5)`, `net/ipv4/tcp_ipv4.c` (`get_tcp4_sock`).

use std::{
    fs::File,
    io::{self, BufReader},
    path::Path,
};

use numaward_cgroup::TruncatedLines;

/// The state of a socket that listens (`TCP_LISTEN`).
const LISTENS: &str = "0A";

/// Whether programs of root listen on this port, and of no other user. `proc` is where procfs is.
pub(crate) fn is_roots(proc: &Path, port: u16) -> io::Result<bool> {
    let mut is_roots = false;
    for file in ["net/tcp", "net/tcp6"] {
        let file = match File::open(proc.join(file)) {
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && file == "net/tcp6" => continue,
            file => file?,
        };
        let mut lines = TruncatedLines::new(BufReader::new(file));
        while let Some(line) = lines.next_line()? {
            match listener(&String::from_utf8_lossy(line), port) {
                Some("0") => is_roots = true,
                Some(_) => return Ok(false),
                None => {}
            }
        }
    }
    Ok(is_roots)
}

/// The user of a socket that listens on this port, from its line.
fn listener(line: &str, port: u16) -> Option<&str> {
    // 0: 0100007F:2558 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 4711 …
    let mut words = line.split_ascii_whitespace().skip(1);
    let (_, local) = words.next()?.rsplit_once(':')?;
    let is_it = u16::from_str_radix(local, 16).ok()? == port && words.nth(1)? == LISTENS;
    words.nth(3).filter(|_| is_it)
}

#[cfg(test)]
mod tests {
    use std::{fs, net::TcpListener};

    use super::*;

    const HEAD: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

    #[test]
    fn port_is_roots_if_no_other_user_listens_on_it() {
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
            is_roots(proc.path(), 9560).unwrap()
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
        assert!(is_roots(&proc.path().join("none"), 9560).is_err());
    }

    #[test]
    fn own_listener_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let is_root = rustix::process::geteuid().is_root();
        assert_eq!(is_roots(Path::new("/proc"), port).unwrap(), is_root);
        drop(listener);
        assert!(!is_roots(Path::new("/proc"), port).unwrap());
    }
}
