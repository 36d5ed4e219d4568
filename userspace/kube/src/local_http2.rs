//! HTTP/2 over Unix sockets from clients that send a path as the authority.
//!
//! # Problem
//! A gRPC client has no authority for a Unix socket. grpc-go sends the percent-encoded path of the socket unless the client sets an authority,
//! and neither the kubelet's watcher of plugins nor its client of the `PodResources` API does. Other clients send the plain path. RFC 3986
//! allows neither, so the server of h2 resets all streams of such clients with `PROTOCOL_ERROR` (hyperium/h2#487).
//!
//! # Algorithm
//! [`LocalStream`] replaces the value of `:authority` by `localhost` in the bytes that are read. It finds header blocks by the lengths of
//! frames (RFC 9113, section 4.1), and the field in a block by the lengths of strings (RFC 7541, section 6). Nothing is decoded, and no table
//! is kept: the server's dynamic table has the entries of the client's, except for this value. Because the new value is shorter, the server
//! may keep an entry that the client has dropped. The client never refers to such an entry, and the indexes of all others stay the same.
//! Malformed blocks are passed on unchanged, and h2 refuses them.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, BytesMut};
use futures_util::{Stream, stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tonic::transport::server::Connected;

/// Length of the text with which a client begins.
const PREFACE_BYTES: usize = 24;
const FRAME_HEADER_BYTES: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Maximum length of a frame's content that h2 accepts, which is also the initial value of the protocol.
const MAX_FRAME_BYTES: usize = 16 << 10;
/// Maximum number of bytes read at once.
const READ_BYTES: usize = 8 << 10;
/// Index of the name `:authority` in the static table.
const AUTHORITY: usize = 1;
/// The new value: its length, not compressed, and its text.
const LOCALHOST: &[u8] = b"\x09localhost";

/// Maximum number of connections of a listener. Further clients wait.
const MAX_CONNECTIONS: usize = 64;

/// Returns the connections of root and of the daemon's own user. The mode of the socket's file is easily changed.
pub fn connections(listener: UnixListener) -> impl Stream<Item = io::Result<LocalStream>> {
    connections_of(listener, |uid| uid == 0 || uid == rustix::process::geteuid().as_raw())
}

fn connections_of(
    listener: UnixListener,
    is_permitted: fn(u32) -> bool,
) -> impl Stream<Item = io::Result<LocalStream>> {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    stream::unfold((listener, places, false), move |(listener, places, mut is_reported)| async move {
        let place = places.clone().acquire_owned().await.ok()?;
        let accepted = loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => break Err(error),
            };
            match stream.peer_cred() {
                Ok(peer) if is_permitted(peer.uid()) => break Ok(LocalStream::new(stream, place)),
                peer if !is_reported => {
                    is_reported = true;
                    let uid = peer.map(|peer| peer.uid()).ok();
                    tracing::warn!(
                        uid,
                        "connections of other users than root to a socket for the kubelet or its clients are refused"
                    );
                }
                _ => {}
            }
        };
        Some((accepted, (listener, places, is_reported)))
    })
}

/// The server's side of an HTTP/2 connection; all requests have the authority `localhost`.
#[derive(Debug)]
pub struct LocalStream {
    stream: UnixStream,
    filter: AuthorityFilter,
    _place: OwnedSemaphorePermit,
}

impl LocalStream {
    fn new(stream: UnixStream, place: OwnedSemaphorePermit) -> Self {
        Self { stream, filter: AuthorityFilter::new(), _place: place }
    }
}

impl Connected for LocalStream {
    type ConnectInfo = <UnixStream as Connected>::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.stream.connect_info()
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { stream, filter, .. } = &mut *self;
        while filter.output.is_empty() {
            let mut bytes = [0; READ_BYTES];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut *stream).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            filter.take(read.filled());
        }
        let count = filter.output.len().min(buffer.remaining());
        buffer.put_slice(&filter.output[..count]);
        filter.output.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Copies the bytes of a client, with another authority.
#[derive(Debug)]
struct AuthorityFilter {
    /// Number of the next bytes that are copied as they are.
    copied: usize,
    /// The incomplete frame of type `HEADERS`, or the incomplete header of a frame.
    frame: BytesMut,
    output: BytesMut,
}

impl AuthorityFilter {
    fn new() -> Self {
        Self { copied: PREFACE_BYTES, frame: BytesMut::new(), output: BytesMut::new() }
    }

    /// Takes the next bytes.
    fn take(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.copied > 0 {
                let (copied, rest) = bytes.split_at(self.copied.min(bytes.len()));
                self.output.extend_from_slice(copied);
                self.copied -= copied.len();
                bytes = rest;
                continue;
            }
            let needed = match self.frame.len() {
                header if header < FRAME_HEADER_BYTES => FRAME_HEADER_BYTES,
                _ => FRAME_HEADER_BYTES + content_length(&self.frame),
            };
            let (taken, rest) = bytes.split_at((needed - self.frame.len()).min(bytes.len()));
            self.frame.extend_from_slice(taken);
            bytes = rest;
            self.pass();
        }
    }

    /// Passes the frame on if it is complete, or if its content is of no interest.
    fn pass(&mut self) {
        if self.frame.len() < FRAME_HEADER_BYTES {
            return;
        }
        let length = content_length(&self.frame);
        if self.frame[3] != HEADERS || length > MAX_FRAME_BYTES {
            self.output.extend_from_slice(&self.frame);
            self.frame.clear();
            self.copied = length;
        } else if self.frame.len() == FRAME_HEADER_BYTES + length {
            let frame = self.frame.split();
            match authority(&frame) {
                Some((start, end)) => {
                    let content = length - (end - start) + LOCALHOST.len();
                    let [_, high, middle, low] = u32::try_from(content).unwrap_or_default().to_be_bytes();
                    self.output.extend_from_slice(&[high, middle, low]);
                    self.output.extend_from_slice(&frame[3..start]);
                    self.output.extend_from_slice(LOCALHOST);
                    self.output.extend_from_slice(&frame[end..]);
                }
                None => self.output.extend_from_slice(&frame),
            }
        }
    }
}

/// Returns the length of a frame's content from its header.
fn content_length(header: &[u8]) -> usize {
    header[..3].iter().fold(0, |length, byte| length << 8 | usize::from(*byte))
}

/// Returns the place of the authority's value, with its length, in a frame of type `HEADERS`. A value that is not longer than the new one
/// is left alone: the client's table may have more room than the server's would.
fn authority(frame: &[u8]) -> Option<(usize, usize)> {
    let flags = frame[4];
    let mut block = FRAME_HEADER_BYTES;
    block += usize::from(flags & PADDED != 0);
    block += if flags & PRIORITY == 0 { 0 } else { 5 };
    let mut fields = Fields { bytes: frame, at: block };
    loop {
        let first = *frame.get(fields.at)?;
        // An indexed field, a literal that is added to the table, the size of the table, other literals.
        let (bits, is_literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            0x20.. => (5, false),
            _ => (4, true),
        };
        let name = fields.integer(bits)?;
        if !is_literal {
            continue;
        }
        if name == 0 {
            fields.string()?;
        }
        let start = fields.at;
        fields.string()?;
        if name == AUTHORITY {
            return (fields.at - start > LOCALHOST.len()).then_some((start, fields.at));
        }
    }
}

/// Fields of a header block (RFC 7541, section 5).
struct Fields<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Fields<'_> {
    /// Reads an integer with a prefix of this number of bits.
    fn integer(&mut self, bits: u32) -> Option<usize> {
        let mask = (1 << bits) - 1;
        let mut value = usize::from(self.byte()? & mask);
        if value < usize::from(mask) {
            return Some(value);
        }
        let mut shift = 0;
        loop {
            let byte = self.byte()?;
            value = value.checked_add(usize::from(byte & 0x7f).checked_shl(shift)?)?;
            // No length or index in a frame has more than three such bytes.
            if byte & 0x80 == 0 {
                return Some(value);
            }
            shift += 7;
            if shift > 14 {
                return None;
            }
        }
    }

    /// Skips a string.
    fn string(&mut self) -> Option<()> {
        let length = self.integer(7)?;
        let end = self.at.checked_add(length)?;
        self.at = (end <= self.bytes.len()).then_some(end)?;
        Some(())
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, time::Duration};

    use futures_util::StreamExt as _;
    use proptest::prelude::*;
    use tokio::{io::AsyncReadExt as _, time::timeout};

    use super::*;

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    fn frame(kind: u8, flags: u8, content: &[u8]) -> Vec<u8> {
        let [_, length @ ..] = u32::try_from(content.len()).unwrap().to_be_bytes();
        [&length[..], &[kind, flags, 0, 0, 0, 1], content].concat()
    }

    fn literal(first: u8, value: &[u8]) -> Vec<u8> {
        [&[first, u8::try_from(value.len()).unwrap()], value].concat()
    }

    /// Returns the output for the bytes of a client that arrive in pieces of this size.
    fn filtered(bytes: &[u8], piece: usize) -> Vec<u8> {
        let mut filter = AuthorityFilter::new();
        for piece in bytes.chunks(piece) {
            filter.take(piece);
        }
        filter.output.to_vec()
    }

    #[test]
    fn replaces_paths() {
        // POST, http, a path, then the authority, and a field with a literal name.
        let before = [&[0x83, 0x86][..], &literal(0x44, b"/service/Method")].concat();
        let after = [&[0x40][..], &literal(0, b"te")[1..], &literal(0, b"trailers")[1..]].concat();
        for path in [&b"/run/numaward/kubelet.sock"[..], b"%2Frun%2Fkubelet.sock"] {
            for (first, flags, start, end) in [
                (0x41, 4, &b""[..], &b""[..]),
                (0x01, 4, b"", b""),
                (0x11, 5, b"", b""),
                (0x41, 4 | PADDED, b"\x03", b"\0\0\0"),
                (0x41, 4 | PRIORITY, b"\0\0\0\0\x07", b""),
                (0x41, PADDED | PRIORITY, b"\x01\0\0\0\0\x07", b"\0"),
            ] {
                let with = |value: &[u8]| {
                    let block = [start, &before, &literal(first, value), &after, end].concat();
                    let other = frame(0, 0, b"\x41\x20 is no field");
                    [PREFACE, &frame(4, 0, b""), &frame(HEADERS, flags, &block), &other].concat()
                };
                for piece in [1, 2, 7, 1000] {
                    assert_eq!(filtered(&with(path), piece), with(b"localhost"), "{first:#x} {flags:#x}");
                }
            }
        }
    }

    #[test]
    fn follows_long_integers() {
        let path = [b'a'; 200];
        let value = [&[0x7f, 73][..], &path].concat();
        let with = |value: &[u8]| {
            // The table has 4096 bytes at most; then a field with a high index.
            let block = [&[0x3f, 0xe1, 0x1f, 0xff, 0x80, 0x01, 0x41][..], value].concat();
            [PREFACE, &frame(HEADERS, 4, &block)].concat()
        };
        assert_eq!(filtered(&with(&value), 1000), with(LOCALHOST));
    }

    #[test]
    fn other_authorities_are_not_changed() {
        for value in ["localhost", "", "127.0.0.1"] {
            let bytes = [PREFACE, &frame(HEADERS, 4, &literal(0x41, value.as_bytes()))].concat();
            assert_eq!(filtered(&bytes, 5), bytes);
        }
        // The name is in the static table, so that no client sends it as text; a field of another name.
        let bytes = [PREFACE, &frame(HEADERS, 4, &literal(0x42, b"/run/numaward/kubelet.sock"))].concat();
        assert_eq!(filtered(&bytes, 5), bytes);
    }

    #[test]
    fn broken_blocks_are_passed_on() {
        for block in [&b"\x41"[..], b"\x41\x7f\xff\xff\xff\xff\xff\x01", b"\x41\x50short", b"\x3f", b""] {
            let bytes = [PREFACE, &frame(HEADERS, 4, block), &frame(6, 0, &[0; 8])].concat();
            assert_eq!(filtered(&bytes, 3), bytes);
        }
        // Longer than h2 accepts: not collected.
        let long = frame(HEADERS, 4, &vec![0x41; MAX_FRAME_BYTES + 1]);
        let bytes = [PREFACE, &long].concat();
        assert_eq!(filtered(&bytes, 1000), bytes);
    }

    #[tokio::test(start_paused = true)]
    async fn other_users_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let mut refusing = pin!(connections_of(UnixListener::bind(&socket).unwrap(), |_| false));
        // More than there are places.
        for _ in 0..2 * MAX_CONNECTIONS {
            let mut client = UnixStream::connect(&socket).await.unwrap();
            assert!(timeout(Duration::from_mins(1), refusing.next()).await.is_err());
            assert_eq!(client.read(&mut [0]).await.unwrap(), 0, "it is closed");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn further_clients_wait() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let mut connections = pin!(connections(UnixListener::bind(&socket).unwrap()));
        let mut held = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            let client = UnixStream::connect(&socket).await.unwrap();
            held.push((client, connections.next().await.unwrap().unwrap()));
        }
        let _waits = UnixStream::connect(&socket).await.unwrap();
        let next = timeout(Duration::from_mins(1), connections.next()).await;
        assert!(next.is_err(), "more than {MAX_CONNECTIONS} connections");
        held.pop();
        connections.next().await.unwrap().unwrap();
    }

    proptest! {
        /// Anything is passed on without a panic, and no more is kept than one frame.
        #[test]
        fn any_bytes_are_accepted(bytes in proptest::collection::vec(any::<u8>(), 0..2000), piece in 1_usize..500) {
            let mut filter = AuthorityFilter::new();
            filter.take(PREFACE);
            for piece in bytes.chunks(piece) {
                filter.take(piece);
                prop_assert!(filter.frame.len() < FRAME_HEADER_BYTES + MAX_FRAME_BYTES);
            }
            prop_assert!(filter.output.len() + filter.frame.len() <= PREFACE.len() + bytes.len());
        }
    }
}
