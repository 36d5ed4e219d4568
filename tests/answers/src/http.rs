//! As much of an HTTP client as is needed here.

use std::io::{Read, Write};

use anyhow::{Context as _, Result};

/// Asks once; status and body as they came, chunks and all.
pub(crate) fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    body: &str,
) -> Result<(u16, String)> {
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: numaward\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8(answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no whole answer")?;
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).context("no HTTP status")?;
    Ok((status, body.to_owned()))
}
