//! How messages travel between the runtime and a plugin: ttrpc messages in the frames of NRI's multiplexer.
//!
//! One Unix stream carries two connections, one for each direction of calls. A *frame* is
//! `u32 connection | u32 length | payload` (big endian); the payloads of a connection's frames, joined, are its
//! byte stream. A ttrpc *message* on that stream is `u32 length | u32 stream | u8 type | u8 flags | payload`;
//! it may be spread over many frames, and a frame may hold many messages.
//!
//! Writing has one rule that no document mentions. The runtime reads a message's header through a buffer of
//! 4096 bytes, and its multiplexer closes everything when a frame does not fit the buffer it is read into.
//! So a message is sent as two frames, header and payload: the payload's frame is then read straight into a
//! buffer of the payload's size. Frames of 4 KiB would do too, but the runtime queues at most 256.
//!
//! [`Decoder`] does no I/O. Invariants, whatever bytes arrive: no panic; it never holds more than one
//! incomplete message per connection, each at most [`MAX_MESSAGE`] long; memory grows with the bytes that
//! came, not with the length that a header claims; frames of unknown connections are skipped, not stored.

/// The longest payload of a ttrpc message, in bytes.
pub(crate) const MAX_MESSAGE: usize = 4 << 20;
/// The length of a ttrpc message's header, in bytes.
pub(crate) const MESSAGE_HEADER: usize = 10;
/// The longest payload of a frame that the runtime sends, in bytes.
pub(crate) const MAX_FRAME: usize = MAX_MESSAGE + MESSAGE_HEADER;
/// The length of a frame's header, in bytes.
pub(crate) const FRAME_HEADER: usize = 8;

/// A connection within the stream, named after who serves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Connection {
    /// The runtime calls, the plugin answers.
    Plugin = 1,
    /// The plugin calls, the runtime answers.
    Runtime = 2,
}

/// The type of a message.
pub(crate) const REQUEST: u8 = 1;
/// The type of an answer to a request.
pub(crate) const RESPONSE: u8 = 2;
/// Flags are for calls that stream.
const NO_FLAGS: u8 = 0;

/// A ttrpc message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    /// Distinguishes calls. An answer carries its request's.
    pub(crate) stream: u32,
    /// [`REQUEST`], [`RESPONSE`] or something that is not used here.
    pub(crate) kind: u8,
    pub(crate) payload: Vec<u8>,
}

/// What arrived is not NRI.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A frame claims to be longer than any frame may be.
    #[error(
        "a frame for connection {connection} claims {length} bytes, more than the {MAX_FRAME} allowed: \
         the other side does not speak NRI, or lost its place"
    )]
    FrameTooLong {
        /// The frame's connection.
        connection: u32,
        /// The length it claims, in bytes.
        length: u32,
    },
    /// A message claims to be longer than any message may be.
    #[error(
        "a ttrpc message claims {length} bytes, more than the {MAX_MESSAGE} allowed: \
         the other side does not speak ttrpc, or lost its place"
    )]
    MessageTooLong {
        /// The length it claims, in bytes.
        length: u32,
    },
}

/// A message is too long to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the message has {length} bytes, more than the {MAX_MESSAGE} that ttrpc allows")]
pub struct TooLong {
    /// Its length in bytes.
    pub length: usize,
}

/// The frames that carry a message: one with its header, one with its payload.
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

/// Makes messages of the bytes of a stream.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    /// The next frame's header, as far as it has come.
    header: Vec<u8>,
    /// The present frame's connection.
    connection: u32,
    /// Bytes of the present frame's payload that have not come yet.
    rest: usize,
    /// The next message of each connection, header included, as far as it has come.
    plugin: Vec<u8>,
    runtime: Vec<u8>,
}

impl Decoder {
    /// Takes bytes from the front of `input` until they complete a message, or all.
    pub(crate) fn next(&mut self, input: &mut &[u8]) -> Result<Option<(Connection, Message)>, WireError> {
        loop {
            if self.rest == 0 {
                if !fill(&mut self.header, FRAME_HEADER, input) {
                    return Ok(None);
                }
                let (connection, length) = (be_u32(&self.header, 0), be_u32(&self.header, 4));
                self.header.clear();
                self.rest = usize::try_from(length)
                    .ok()
                    .filter(|&length| length <= MAX_FRAME)
                    .ok_or(WireError::FrameTooLong { connection, length })?;
                self.connection = connection;
                continue;
            }
            if input.is_empty() {
                return Ok(None);
            }
            let mut part = &input[..self.rest.min(input.len())];
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
            self.rest -= taken;
            if message.is_some() {
                return Ok(message);
            }
        }
    }

    /// Whether the stream may end here: no frame and no message is incomplete.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.rest == 0 && [&self.header, &self.plugin, &self.runtime].iter().all(|begun| begun.is_empty())
    }

    /// Bytes held for incomplete messages.
    #[cfg(test)]
    fn allocated(&self) -> usize {
        self.plugin.capacity() + self.runtime.capacity()
    }
}

/// Takes bytes from the front of `input` until they complete the message that has `begun`, or all.
fn next_message(begun: &mut Vec<u8>, input: &mut &[u8]) -> Result<Option<Message>, WireError> {
    if !fill(begun, MESSAGE_HEADER, input) {
        return Ok(None);
    }
    let (claimed, stream, kind) = (be_u32(begun, 0), be_u32(begun, 4), begun[8]);
    let length = usize::try_from(claimed)
        .ok()
        .filter(|&length| length <= MAX_MESSAGE)
        .ok_or(WireError::MessageTooLong { length: claimed })?;
    if !fill(begun, MESSAGE_HEADER + length, input) {
        return Ok(None);
    }
    let mut payload = std::mem::take(begun);
    payload.drain(..MESSAGE_HEADER);
    Ok(Some(Message { stream, kind, payload }))
}

/// Moves bytes from the front of `input` until `begun` is so long; whether it is.
fn fill(begun: &mut Vec<u8>, length: usize, input: &mut &[u8]) -> bool {
    let (now, later) = input.split_at(input.len().min(length.saturating_sub(begun.len())));
    begun.extend_from_slice(now);
    *input = later;
    begun.len() >= length
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
    fn a_message_is_two_frames_and_an_empty_one_is_one() {
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
    fn messages_may_share_a_frame_or_span_many() {
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
    fn the_longest_message_passes_and_a_longer_claim_does_not() {
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
    fn a_claim_allocates_little() {
        let mut decoder = Decoder::default();
        let header =
            [&u32::try_from(MAX_MESSAGE).unwrap().to_be_bytes()[..], &[0, 0, 0, 1, 1, 0, 42]].concat();
        assert_eq!(decode(&mut decoder, &frame(1, &header)), Ok(vec![]));
        assert!(decoder.allocated() <= 64, "{}", decoder.allocated());
        assert!(!decoder.is_at_boundary());
    }

    proptest! {
        /// Bytes that look like frames often enough to get deep into the decoder.
        #[test]
        fn any_bytes_neither_panic_nor_grow_memory(
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
                // Vectors double, and begin with some bytes.
                prop_assert!(decoder.allocated() <= 2 * fed + 64);
            }
        }

        #[test]
        fn what_is_encoded_is_decoded_whatever_the_reads(
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
