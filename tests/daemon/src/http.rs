//! As much of an HTTP client as the daemon takes.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
};

use anyhow::{Context as _, Result};

use crate::LIMIT;

/// Status and body of an answer on a control socket; none if there was no whole answer.
pub fn ask(socket: &Path, method: &str, path: &str, body: &str) -> Result<Option<(u16, String)>> {
    let Ok(stream) = UnixStream::connect(socket) else { return Ok(None) };
    stream.set_read_timeout(Some(LIMIT))?;
    exchange(stream, method, path, body)
}

/// Likewise over TCP.
pub fn get(address: &str, path: &str) -> Result<Option<(u16, String)>> {
    let Ok(stream) = TcpStream::connect(address) else { return Ok(None) };
    stream.set_read_timeout(Some(LIMIT))?;
    exchange(stream, "GET", path, "")
}

fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    body: &str,
) -> Result<Option<(u16, String)>> {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut answer = Vec::new();
    if stream.write_all(request.as_bytes()).is_err() || stream.read_to_end(&mut answer).is_err() {
        return Ok(None);
    }
    whole(&String::from_utf8(answer)?)
}

/// Takes an answer apart; none if it is cut off.
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
    use super::*;

    #[test]
    fn only_whole_answers_count() {
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
