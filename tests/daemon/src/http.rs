//! Minimal HTTP client for the daemon.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
};

use anyhow::{Context as _, Result};

use crate::TIMEOUT;

/// Sends a request to a control socket. Returns status and body; `None` if the answer is incomplete.
pub fn ask(socket: &Path, method: &str, path: &str, body: &str) -> Result<Option<(u16, String)>> {
    let Ok(stream) = UnixStream::connect(socket) else { return Ok(None) };
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(exchange(stream, method, path, body)?.whole())
}

/// Sends a `GET` request over TCP. Returns status and body; `None` if the answer is incomplete.
pub fn get(address: &str, path: &str) -> Result<Option<(u16, String)>> {
    Ok(reply(address, path)?.whole())
}

/// Outcome of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// Status and body.
    Whole(u16, String),
    /// The connection was refused, or closed before the first byte.
    Closed,
    /// The answer is incomplete; its length in bytes.
    CutOff(usize),
}

impl Reply {
    fn whole(self) -> Option<(u16, String)> {
        match self {
            Self::Whole(status, body) => Some((status, body)),
            Self::Closed | Self::CutOff(_) => None,
        }
    }
}

/// Returns the outcome of `GET` over TCP.
pub fn reply(address: &str, path: &str) -> Result<Reply> {
    let Ok(stream) = TcpStream::connect(address) else { return Ok(Reply::Closed) };
    stream.set_read_timeout(Some(TIMEOUT))?;
    exchange(stream, "GET", path, "")
}

fn exchange(mut stream: impl Read + Write, method: &str, path: &str, body: &str) -> Result<Reply> {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut answer = Vec::new();
    let is_read = stream.write_all(request.as_bytes()).is_ok() && stream.read_to_end(&mut answer).is_ok();
    if answer.is_empty() {
        return Ok(Reply::Closed);
    }
    let length = answer.len();
    let whole = if is_read { whole(&String::from_utf8(answer)?)? } else { None };
    Ok(whole.map_or(Reply::CutOff(length), |(status, body)| Reply::Whole(status, body)))
}

/// Parses an answer into status and body; `None` if it is incomplete.
fn whole(answer: &str) -> Result<Option<(u16, String)>> {
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { return Ok(None) };
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no HTTP status")?;
    let field = |name: &str| {
        let mut fields = head.lines().filter_map(|line| line.split_once(':'));
        fields.find_map(|(key, value)| key.eq_ignore_ascii_case(name).then(|| value.trim()))
    };
    if field("transfer-encoding") == Some("chunked") {
        return Ok(unchunked(body).map(|body| (status, body)));
    }
    let length: usize = field("content-length").map_or(Ok(0), str::parse)?;
    Ok((body.len() == length).then(|| (status, body.to_owned())))
}

fn unchunked(mut body: &str) -> Option<String> {
    let mut text = String::new();
    loop {
        let (length, rest) = body.split_once("\r\n")?;
        let length = usize::from_str_radix(length, 16).ok()?;
        text.push_str(rest.get(..length)?);
        body = rest.get(length..)?.strip_prefix("\r\n")?;
        if length == 0 {
            return Some(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// A stream that accepts any request, and gives this answer before it fails or ends.
    struct FakeStream(io::Chain<&'static [u8], FailingReader>);

    struct FailingReader(bool);

    impl Read for FailingReader {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            if self.0 { Err(io::ErrorKind::ConnectionReset.into()) } else { Ok(0) }
        }
    }

    impl Read for FakeStream {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }

    impl Write for FakeStream {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn distinguishes_refusal_from_cut_off() {
        let whole = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
        for (answer, fails, expected) in [
            (whole, false, Reply::Whole(200, "hi".to_owned())),
            (&whole[..20], false, Reply::CutOff(20)),
            (&whole[..20], true, Reply::CutOff(20)),
            ("", false, Reply::Closed),
            ("", true, Reply::Closed),
        ] {
            let stream = FakeStream(answer.as_bytes().chain(FailingReader(fails)));
            assert_eq!(exchange(stream, "GET", "/", "").unwrap(), expected, "{answer:?}");
        }
    }

    #[test]
    fn ignores_incomplete_answers() {
        for (answer, expected) in [
            ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", Some((200, "hi"))),
            ("HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nhi", None),
            ("HTTP/1.1 200 OK\r\nContent-Le", None),
            ("HTTP/1.1 204 No Content\r\n\r\n", Some((204, ""))),
            (
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n",
                Some((200, "hi!")),
            ),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n", None),
            ("", None),
        ] {
            let found = whole(answer).unwrap();
            assert_eq!(found.as_ref().map(|(status, body)| (*status, body.as_str())), expected, "{answer:?}");
        }
        assert!(whole("garbage\r\n\r\n").is_err());
    }
}
