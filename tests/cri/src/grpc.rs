//! Calls of gRPC, one at a time: a request and an answer, each in one message.
//!
//! Source: the gRPC-over-HTTP/2 protocol: a message is a byte 0 (not compressed), its length in four bytes and its
//! content; how the call went is told by the headers after the answer.

use std::{
    io,
    path::{Path, PathBuf},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use http::{HeaderMap, Method, Request, Version};
use prost::Message;
use tokio::net::UnixStream;

const RUNTIME: &str = "runtime.v1.RuntimeService";
/// The byte that says whether a message is compressed, and its length.
const PREFIX: usize = 5;

/// A call failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CallError {
    /// There is nobody at the socket.
    #[error("cannot connect to {}: {source}", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// What is to be asked for cannot be read.
    #[error("{0}")]
    Manifest(String),
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Connection(#[from] h2::Error),
    /// The call cannot be made.
    #[error("the call cannot be made: {0}")]
    Request(#[from] http::Error),
    /// The runtime refuses.
    #[error("{method}: {message} (code {code})")]
    Status {
        /// What was called.
        method: &'static str,
        /// The code.
        code: String,
        /// What the runtime says.
        message: String,
    },
    /// The answer cannot be read.
    #[error("{method}: the answer cannot be read")]
    Unreadable {
        /// What was called.
        method: &'static str,
    },
}

/// A connection.
pub(crate) struct Client {
    send: SendRequest<Bytes>,
}

impl Client {
    /// Connects to a socket.
    pub(crate) async fn connect(socket: &Path) -> Result<Self, CallError> {
        let stream = UnixStream::connect(socket)
            .await
            .map_err(|source| CallError::Connect { socket: socket.to_owned(), source })?;
        let (send, connection) = client::handshake(stream).await?;
        tokio::spawn(connection);
        Ok(Self { send })
    }

    /// Calls a method of the runtime.
    pub(crate) async fn call<Q: Message, A: Message + Default>(
        &mut self,
        method: &'static str,
        request: &Q,
    ) -> Result<A, CallError> {
        self.call_of(RUNTIME, method, request).await
    }

    /// Calls a method of a service.
    pub(crate) async fn call_of<Q: Message, A: Message + Default>(
        &mut self,
        service: &str,
        method: &'static str,
        request: &Q,
    ) -> Result<A, CallError> {
        let head = Request::builder()
            .method(Method::POST)
            .version(Version::HTTP_2)
            .uri(format!("http://localhost/{service}/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())?;
        let unreadable = || CallError::Unreadable { method };
        let content = request.encode_to_vec();
        let mut body = BytesMut::with_capacity(PREFIX + content.len());
        body.put_u8(0);
        body.put_u32(u32::try_from(content.len()).map_err(|_| unreadable())?);
        body.extend(content);
        self.send.clone().ready().await?;
        let (answer, mut stream) = self.send.send_request(head, false)?;
        stream.send_data(body.freeze(), true)?;
        let (head, mut body) = answer.await?.into_parts();
        check(method, &head.headers)?;
        let mut answer = BytesMut::new();
        while let Some(part) = body.data().await {
            let part = part?;
            body.flow_control().release_capacity(part.len())?;
            answer.extend(part);
        }
        if let Some(trailers) = body.trailers().await? {
            check(method, &trailers)?;
        }
        let content = answer.get(PREFIX..).ok_or_else(unreadable)?;
        A::decode(content).map_err(|_| unreadable())
    }
}

/// Whether these headers tell that the call failed.
fn check(method: &'static str, headers: &HeaderMap) -> Result<(), CallError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match text("grpc-status") {
        "" | "0" => Ok(()),
        code => {
            Err(CallError::Status { method, code: code.to_owned(), message: decoded(text("grpc-message")) })
        }
    }
}

/// The text of a message in a header, in which some bytes are written as `%` and two hexadecimal digits.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let escaped = after.get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
        let escaped =
            escaped.filter(|_| first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(escaped.unwrap_or(first));
        rest = if escaped.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_decoded() {
        for (text, expected) in [
            ("plain: text", "plain: text"),
            ("a%0Ab %25", "a\nb %"),
            ("%", "%"),
            ("%4", "%4"),
            ("%zz", "%zz"),
            ("%c3%a4", "ä"),
        ] {
            assert_eq!(decoded(text), expected);
        }
    }

    #[test]
    fn a_status_is_an_error_unless_it_is_zero() {
        let mut headers = HeaderMap::new();
        check("Call", &headers).unwrap();
        headers.insert("grpc-status", "0".parse().unwrap());
        check("Call", &headers).unwrap();
        headers.insert("grpc-status", "9".parse().unwrap());
        headers.insert("grpc-message", "no%20room".parse().unwrap());
        assert_eq!(check("Call", &headers).unwrap_err().to_string(), "Call: no room (code 9)");
    }
}
