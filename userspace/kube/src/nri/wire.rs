//! Wire format between the runtime and a plugin: ttrpc messages in the frames of NRI's multiplexer.
//!
//! # Format
//! One Unix stream carries two connections, one for each direction of calls. A *frame* is `u32 connection | u32 length | payload` (big
//! endian). The concatenated payloads of a connection's frames are its byte stream. A ttrpc *message* on that stream is
//! `u32 length | u32 stream | u8 type | u8 flags | payload`. A message may span many frames, and a frame may contain many messages.
//!
//! # Size of written frames
//! This rule is not documented: the runtime reads the header of a message through a buffer of 4096 bytes, and its multiplexer closes
//! the stream if a frame does not fit the read buffer. Therefore a message is sent as two frames, header and payload; the runtime reads
//! the second one directly into a buffer of the payload's size. Frames of 4 KiB would work, too, but the runtime queues at most 256.
//!
//! # Invariants
//! [`Decoder`] does no I/O. For arbitrary input:
//!
//! - It never panics.
//! - It stores at most one incomplete message per connection, of at most [`MAX_MESSAGE`] bytes.
//! - Memory grows with the received bytes, not with the length in a header.
//! - Frames of unknown connections are skipped without being stored.

/// Maximum size of a ttrpc message's payload in bytes.
pub(crate) const MAX_MESSAGE: usize = 4 << 20;
/// Size of a ttrpc message's header in bytes.
pub(crate) const MESSAGE_HEADER: usize = 10;
/// Maximum size of a frame's payload in bytes.
pub(crate) const MAX_FRAME: usize = MAX_MESSAGE + MESSAGE_HEADER;
/// Size of a frame's header in bytes.
pub(crate) const FRAME_HEADER: usize = 8;

/// A connection within the stream, named after its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connection {
    /// The runtime calls, the plugin answers.
    Plugin = 1,
    /// The plugin calls, the runtime answers.
    Runtime = 2,
}

/// Type of a message with a call.
pub(crate) const REQUEST: u8 = 1;
/// Type of a message with an answer.
pub(crate) const RESPONSE: u8 = 2;
/// Flags of a message. Only streaming calls use flags.
const NO_FLAGS: u8 = 0;

/// A ttrpc message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    /// Id of the call. An answer has the id of its request.
    pub(crate) stream: u32,
    /// [`REQUEST`], [`RESPONSE`], or a type that is not used here.
    pub(crate) kind: u8,
    pub(crate) payload: Vec<u8>,
}

/// Received bytes that are not NRI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The length in a frame's header is over the maximum.
    #[error(
        "a frame for connection {connection} claims {length} bytes, more than the maximum of {MAX_FRAME}: \
         the peer does not speak NRI, or its stream is corrupt"
    )]
    FrameTooLong {
        connection: u32,
        /// The length it claims, in bytes.
        length: u32,
    },
    /// The length in a message's header is over the maximum.
    #[error(
        "a ttrpc message claims {length} bytes, more than the maximum of {MAX_MESSAGE}: \
         the peer does not speak ttrpc, or its stream is corrupt"
    )]
    MessageTooLong {
        /// The length it claims, in bytes.
        length: u32,
    },
}

/// Error for a message that is too long to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message has {length} bytes, more than the {MAX_MESSAGE} that ttrpc allows")]
pub struct TooLong {
    /// Length of the payload in bytes.
    pub length: usize,
}

/// Encodes a message as two frames: one with its header, and one with its payload unless that is empty.
pub(crate) fn encode(connection: Connection, message: &Message) -> Result<Vec<u8>, TooLong> {
    let length = message.payload.len();
    let too_long = TooLong { length };
    let claimed = u32::try_from(length).map_err(|_| too_long)?;
    if length > MAX_MESSAGE {
        return Err(too_long);
    }
    let header =
        [&claimed.to_be_bytes()[..], &message.stream.to_be_bytes(), &[message.kind, NO_FLAGS]].concat();
    let mut bytes = Vec::with_capacity(2 * FRAME_HEADER + MESSAGE_HEADER + length);
    for payload in [&header, &message.payload] {
        if !payload.is_empty() {
            bytes.extend((connection as u32).to_be_bytes());
            bytes.extend(u32::try_from(payload.len()).map_err(|_| too_long)?.to_be_bytes());
            bytes.extend(payload);
        }
    }
    Ok(bytes)
}

/// Decoder of a stream's bytes into messages.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    /// Received part of the next frame's header.
    header: Vec<u8>,
    /// Connection of the current frame.
    connection: u32,
    /// Number of bytes of the current frame's payload that have not been received.
    missing: usize,
    /// Received part of the next message of [`Connection::Plugin`], including the header.
    plugin: Vec<u8>,
    /// Likewise for [`Connection::Runtime`].
    runtime: Vec<u8>,
}

impl Decoder {
    /// Consumes bytes of `input` up to the end of the next message, which is returned. Consumes all bytes if no message is complete.
    pub(crate) fn next(&mut self, input: &mut &[u8]) -> Result<Option<(Connection, Message)>, WireError> {
        loop {
            if self.missing == 0 {
                if !fill(&mut self.header, FRAME_HEADER, input) {
                    return Ok(None);
                }
                let (connection, length) = (be_u32(&self.header, 0), be_u32(&self.header, 4));
                self.header.clear();
                self.missing = usize::try_from(length)
                    .ok()
                    .filter(|&length| length <= MAX_FRAME)
                    .ok_or(WireError::FrameTooLong { connection, length })?;
                self.connection = connection;
                continue;
            }
            if input.is_empty() {
                return Ok(None);
            }
            let mut part = &input[..self.missing.min(input.len())];
            let offered = part.len();
            let message = match self.connection {
                1 => next_message(&mut self.plugin, &mut part)?.map(|it| (Connection::Plugin, it)),
                2 => next_message(&mut self.runtime, &mut part)?.map(|it| (Connection::Runtime, it)),
                _ => {
                    part = &[];
                    None
                }
            };
            let taken = offered - part.len();
            *input = &input[taken..];
            self.missing -= taken;
            if message.is_some() {
                return Ok(message);
            }
        }
    }

    /// Returns true if neither a frame nor a message is incomplete, so that the stream may end.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.missing == 0
            && [&self.header, &self.plugin, &self.runtime].iter().all(|partial| partial.is_empty())
    }

    /// Returns the bytes allocated for incomplete messages.
    #[cfg(test)]
    fn allocated(&self) -> usize {
        self.plugin.capacity() + self.runtime.capacity()
    }
}

/// Consumes bytes of `input` up to the end of the message that begins with `partial`. Returns the message if it is complete.
fn next_message(partial: &mut Vec<u8>, input: &mut &[u8]) -> Result<Option<Message>, WireError> {
    if !fill(partial, MESSAGE_HEADER, input) {
        return Ok(None);
    }
    let (claimed, stream, kind) = (be_u32(partial, 0), be_u32(partial, 4), partial[8]);
    let length = usize::try_from(claimed)
        .ok()
        .filter(|&length| length <= MAX_MESSAGE)
        .ok_or(WireError::MessageTooLong { length: claimed })?;
    if !fill(partial, MESSAGE_HEADER + length, input) {
        return Ok(None);
    }
    let mut payload = std::mem::take(partial);
    payload.drain(..MESSAGE_HEADER);
    Ok(Some(Message { stream, kind, payload }))
}

/// Moves bytes of `input` to `partial` until it has this length. Returns true if it has.
fn fill(partial: &mut Vec<u8>, length: usize, input: &mut &[u8]) -> bool {
    let (now, later) = input.split_at(input.len().min(length.saturating_sub(partial.len())));
    partial.extend_from_slice(now);
    *input = later;
    partial.len() >= length
}

pub(super) fn be_u32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(stream: u32, length: usize) -> Message {
        let payload = (0..length).map(|i| u8::try_from(i % 251).unwrap()).collect();
        Message { stream, kind: REQUEST, payload }
    }

    fn frame(connection: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap();
        [&connection.to_be_bytes()[..], &length.to_be_bytes(), payload].concat()
    }

    fn decode(decoder: &mut Decoder, mut input: &[u8]) -> Result<Vec<(Connection, Message)>, WireError> {
        std::iter::from_fn(|| decoder.next(&mut input).transpose()).collect()
    }

    #[test]
    fn encodes_header_and_payload_frames() {
        let bytes = encode(Connection::Plugin, &message(7, 3)).unwrap();
        assert_eq!(
            bytes,
            [
                0, 0, 0, 1, 0, 0, 0, 10, // connection 1, ten bytes
                0, 0, 0, 3, 0, 0, 0, 7, 1, 0, // three bytes, stream 7, request
                0, 0, 0, 1, 0, 0, 0, 3, 0, 1, 2,
            ]
        );
        assert_eq!(encode(Connection::Runtime, &message(7, 0)).unwrap().len(), FRAME_HEADER + MESSAGE_HEADER);
        assert_eq!(
            encode(Connection::Plugin, &message(1, MAX_MESSAGE + 1)),
            Err(TooLong { length: MAX_MESSAGE + 1 })
        );
    }

    #[test]
    fn decodes_any_frame_boundaries() {
        let stream: Vec<u8> = (1..=3)
            .flat_map(|stream| {
                let bytes = encode(Connection::Plugin, &message(stream, 100)).unwrap();
                [&bytes[8..18], &bytes[26..]].concat()
            })
            .collect();
        for size in [1, 7, 4096] {
            let bytes: Vec<u8> = stream
                .chunks(size)
                .enumerate()
                .flat_map(|(i, part)| {
                    // Frames of other connections in between are skipped.
                    let other = frame(if i % 2 == 0 { 0 } else { 77 }, &[9; 13]);
                    [other, frame(1, part)].concat()
                })
                .collect();
            let mut decoder = Decoder::default();
            let got = decode(&mut decoder, &bytes).unwrap();
            assert_eq!(
                got,
                (1..=3).map(|stream| (Connection::Plugin, message(stream, 100))).collect::<Vec<_>>(),
                "frames of {size} bytes"
            );
            assert!(decoder.is_at_boundary());
        }
    }

    #[test]
    fn refuses_messages_over_limit() {
        let longest = message(1, MAX_MESSAGE);
        let bytes = encode(Connection::Runtime, &longest).unwrap();
        let got = decode(&mut Decoder::default(), &bytes).unwrap();
        assert_eq!(got, [(Connection::Runtime, longest)]);

        for (bytes, error) in [
            (
                [1u32.to_be_bytes(), u32::MAX.to_be_bytes()].concat(),
                WireError::FrameTooLong { connection: 1, length: u32::MAX },
            ),
            (
                [9u32.to_be_bytes(), u32::try_from(MAX_FRAME + 1).unwrap().to_be_bytes()].concat(),
                WireError::FrameTooLong { connection: 9, length: 4 * 1024 * 1024 + 11 },
            ),
            (
                frame(2, &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 2, 0]),
                WireError::MessageTooLong { length: u32::MAX },
            ),
        ] {
            assert_eq!(decode(&mut Decoder::default(), &bytes), Err(error));
        }
    }

    #[test]
    fn claimed_length_is_not_allocated() {
        let mut decoder = Decoder::default();
        let header =
            [&u32::try_from(MAX_MESSAGE).unwrap().to_be_bytes()[..], &[0, 0, 0, 1, 1, 0, 42]].concat();
        assert_eq!(decode(&mut decoder, &frame(1, &header)), Ok(vec![]));
        assert!(decoder.allocated() <= 64, "{}", decoder.allocated());
        assert!(!decoder.is_at_boundary());
    }

    proptest! {
        /// The bytes resemble frames often enough to reach all states of the decoder.
        #[test]
        fn survives_arbitrary_bytes(
            parts in proptest::collection::vec(
                prop_oneof![
                    proptest::collection::vec(any::<u8>(), 0..64),
                    (0u32..4, proptest::collection::vec(any::<u8>(), 0..64)).prop_map(|(c, p)| frame(c, &p)),
                    (0u32..4, 0u32..200_000, any::<u32>()).prop_map(|(c, length, stream)| {
                        let header = [length.to_be_bytes(), stream.to_be_bytes(), [1, 0, 0, 0]].concat();
                        frame(c, &header[..MESSAGE_HEADER])
                    }),
                    (0u32..4, 0usize..100_000).prop_map(|(c, length)| frame(c, &vec![0; length])),
                ],
                0..32,
            ),
            chunk in 1usize..9000,
        ) {
            let bytes = parts.concat();
            let mut decoder = Decoder::default();
            let mut fed = 0;
            for part in bytes.chunks(chunk) {
                fed += part.len();
                match decode(&mut decoder, part) {
                    Ok(messages) => prop_assert!(messages.iter().all(|(_, m)| m.payload.len() <= fed)),
                    Err(_) => break,
                }
                // The capacity of a vector doubles, from a small minimum.
                prop_assert!(decoder.allocated() <= 2 * fed + 64);
            }
        }

        #[test]
        fn decodes_encoded_messages(
            messages in proptest::collection::vec(
                (any::<bool>(), any::<u32>(), any::<u8>(), proptest::collection::vec(any::<u8>(), 0..6000)),
                0..8,
            ),
            chunk in 1usize..9000,
        ) {
            let messages: Vec<(Connection, Message)> = messages
                .into_iter()
                .map(|(plugin, stream, kind, payload)| {
                    let connection = if plugin { Connection::Plugin } else { Connection::Runtime };
                    (connection, Message { stream, kind, payload })
                })
                .collect();
            let bytes: Vec<u8> = messages.iter().flat_map(|(c, m)| encode(*c, m).unwrap()).collect();
            let mut decoder = Decoder::default();
            let mut got = Vec::new();
            for part in bytes.chunks(chunk) {
                got.extend(decode(&mut decoder, part).unwrap());
            }
            prop_assert_eq!(got, messages);
            prop_assert!(decoder.is_at_boundary());
        }
    }
}
