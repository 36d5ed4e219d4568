//! What Arm's Statistical Profiling Extension (SPE) writes for each operation that it samples (Arm Architecture Reference
//! Manual, "Statistical Profiling Extension Sample Record Specification").
//!
//! A *record* is a row of *packets*, and ends with the packet *end* or *timestamp*. A packet has a header of a byte or two,
//! then a payload of 1, 2, 4 or 8 bytes, the lowest first: bits 4 and 5 of the header's last byte say how many. Padding lies
//! between packets.
//!
//! Whatever the bytes are, decoding ends and never panics. After bytes that are no packet, nothing counts until a record has
//! ended: the next one is whole again.

use super::source::Source;

const END: u8 = 0x01;
const TIMESTAMP: u8 = 0x71;
/// The index of the address of the data, of the addresses that a record has. Others are of code, or physical.
const DATA: u8 = 2;
/// The class of operations that load or store.
const LOAD_OR_STORE: u8 = 1;
/// The bits of an address that are not a tag, and the one of them that is set in those of the kernel.
const UNTAGGED: u64 = u64::MAX >> 8;
const KERNEL: u64 = 1 << 55;

/// An operation of a program that accessed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operation {
    pub(super) address: u64,
    is_store: bool,
    /// Where the data came from, as a number of the processor's own.
    source: Option<u64>,
}

impl Operation {
    /// Where the data came from, in the numbers that Arm's own cores have in common (Neoverse N1, N2, V1 and V2). They say it
    /// for loads only.
    pub(super) fn source(self) -> Source {
        match self.source.filter(|_| !self.is_store) {
            // The L1 and L2 cache, those of another core, of this cluster, of the system, and of another cluster.
            Some(0 | 8..=0xc) => Source::Cache,
            Some(0xd) => Source::Elsewhere,
            Some(0xe) => Source::LocalMemory,
            _ => Source::Unknown,
        }
    }
}

/// Reads the records in some bytes, which begin at `start` of the buffer. Returns how many could not be read.
pub(super) fn decode(bytes: &[u8], start: u64, mut each: impl FnMut(Operation)) -> u64 {
    let (mut rest, mut at) = (bytes, start);
    let (mut record, mut unreadable) = (Record::default(), 0);
    while !rest.is_empty() {
        let length = match packet(rest, at) {
            None => {
                record.is_broken = true;
                1
            }
            Some((packet, length)) => {
                match packet {
                    Packet::Padding => {}
                    Packet::End => {
                        let ended = std::mem::take(&mut record);
                        unreadable += u64::from(ended.is_broken);
                        if let Some(operation) = ended.operation() {
                            each(operation);
                        }
                    }
                    Packet::Content(content) => record.add(content),
                }
                length
            }
        };
        rest = rest.get(length..).unwrap_or_default();
        at = at.wrapping_add(length as u64);
    }
    // Cut off before its end.
    unreadable + u64::from(record.is_broken || record.has_begun)
}

/// What was read of a record.
#[derive(Debug, Default)]
struct Record {
    has_begun: bool,
    is_broken: bool,
    address: Option<u64>,
    is_store: Option<bool>,
    source: Option<u64>,
}

impl Record {
    fn add(&mut self, content: Content) {
        self.has_begun = true;
        match content {
            Content::Address(address) => self.address = Some(address),
            Content::LoadOrStore(payload) => self.is_store = Some(payload & 1 != 0),
            Content::Source(source) => self.source = Some(source),
            Content::Other => {}
        }
    }

    /// `None` if it does not access memory, or if the kernel does so.
    fn operation(self) -> Option<Operation> {
        let (Some(address), Some(is_store), false) = (self.address, self.is_store, self.is_broken) else {
            return None;
        };
        let address = address & UNTAGGED;
        (address != 0 && address & KERNEL == 0).then_some(Operation {
            address,
            is_store,
            source: self.source,
        })
    }
}

#[derive(Debug)]
enum Packet {
    Padding,
    End,
    Content(Content),
}

#[derive(Clone, Copy, Debug)]
enum Content {
    Address(u64),
    LoadOrStore(u64),
    Source(u64),
    Other,
}

/// The packet that these bytes begin with, which are at `at` of the buffer, and its length, one at least; `None` if there is
/// none, or not all of it.
fn packet(bytes: &[u8], at: u64) -> Option<(Packet, usize)> {
    let first = *bytes.first()?;
    // The same addresses and counters with a longer header, and padding up to a multiple in the buffer.
    let is_extended = first & 0xfc == 0x20;
    let header = if is_extended { *bytes.get(1)? } else { first };
    if is_extended && header == 0 {
        let multiple = 2_u64 << (first & 3);
        return Some((Packet::Padding, usize::try_from(multiple - at % multiple).ok()?));
    }
    match header {
        0 => return Some((Packet::Padding, 1)),
        END if !is_extended => return Some((Packet::End, 1)),
        _ => {}
    }
    let begin = 1 + usize::from(is_extended);
    let length = begin + (1 << (header >> 4 & 3));
    let payload = bytes.get(begin..length)?;
    let payload = payload.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    let content = match header {
        _ if header & 0xf8 == 0xb0 => {
            let high = if is_extended { first & 3 } else { 0 };
            if (high << 3 | header & 7) == DATA { Content::Address(payload) } else { Content::Other }
        }
        // Counters.
        _ if header & 0xf8 == 0x98 => Content::Other,
        _ if is_extended => return None,
        TIMESTAMP => return Some((Packet::End, length)),
        _ if header & 0xfc == 0x48 => {
            if header & 3 == LOAD_OR_STORE {
                Content::LoadOrStore(payload)
            } else {
                Content::Other
            }
        }
        _ if header & 0xcf == 0x43 => Content::Source(payload),
        // Events, and contexts.
        _ if header & 0xcf == 0x42 || header & 0xfc == 0x64 => Content::Other,
        _ => return None,
    };
    Some((Packet::Content(content), length))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As processors write it: the address of the code, context, kind, events, counters, address, source, time.
    fn record(kind: [u8; 2], address: u64, source: u8, end: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0xb0, 0x10, 0x20, 0x30, 0x01, 0, 0, 0, 0x80, 0x64, 7, 0, 0, 0];
        bytes.extend(kind);
        bytes.extend([0x52, 0x16, 0x01, 0x99, 0x04, 0x00, 0x98, 0x10, 0x00, 0xb2]);
        bytes.extend(address.to_le_bytes());
        bytes.extend([0x9a, 0x01, 0x00, 0x43, source]);
        bytes.extend(end);
        bytes
    }

    const LOAD: [u8; 2] = [0x49, 0x00];
    const STORE: [u8; 2] = [0x49, 0x01];
    const TIME: [u8; 9] = [TIMESTAMP, 1, 1, 1, 1, 1, 1, 1, 1];

    fn decoded(bytes: &[u8]) -> (Vec<(u64, Source)>, u64) {
        let mut found = Vec::new();
        let unreadable = decode(bytes, 0, |operation| found.push((operation.address, operation.source())));
        (found, unreadable)
    }

    #[test]
    fn loads_and_stores_have_an_address() {
        let mut bytes = record(LOAD, 0xffff_1234_5678, 0xe, &[END]);
        bytes.extend([0; 13]);
        bytes.extend(record(STORE, 0x1000, 0, &TIME));
        // A branch, which has no address of data, something else, and a load of the kernel.
        bytes.extend([0x4a, 0x01, 0xb1, 1, 2, 3, 4, 5, 6, 7, 8, END]);
        bytes.extend(record([0x48, 0x00], 0x3000, 0, &[END]));
        bytes.extend(record(LOAD, 0xffff_8000_0000_1000, 0, &[END]));
        let expected = vec![(0xffff_1234_5678, Source::LocalMemory), (0x1000, Source::Unknown)];
        assert_eq!(decoded(&bytes), (expected, 0));
    }

    #[test]
    fn a_tag_is_no_part_of_the_address() {
        for (address, expected) in
            [(0xb400_ffff_0000_0010, 0xffff_0000_0010), (0xff0f_ffff_0000_0010, 0xf_ffff_0000_0010)]
        {
            assert_eq!(decoded(&record(LOAD, address, 0, &[END])).0[0].0, expected);
        }
    }

    #[test]
    fn sources_of_loads_are_understood() {
        for (number, expected) in [
            (0x0, Source::Cache),
            (0x1, Source::Unknown),
            (0x8, Source::Cache),
            (0x9, Source::Cache),
            (0xa, Source::Cache),
            (0xb, Source::Cache),
            (0xc, Source::Cache),
            (0xd, Source::Elsewhere),
            (0xe, Source::LocalMemory),
            (0xf, Source::Unknown),
        ] {
            assert_eq!(decoded(&record(LOAD, 16, number, &[END])).0, [(16, expected)], "{number:#x}");
        }
        // Of two bytes, and none.
        let long = [0x49, 0, 0xb2, 16, 0, 0, 0, 0, 0, 0, 0, 0x53, 0x0d, 0x00, END];
        assert_eq!(decoded(&long).0, [(16, Source::Elsewhere)]);
        let none = [0x49, 0, 0xb2, 16, 0, 0, 0, 0, 0, 0, 0, END];
        assert_eq!(decoded(&none).0, [(16, Source::Unknown)]);
    }

    #[test]
    fn long_headers_and_padding_to_a_multiple_are_passed_over() {
        // Address 2 with a long header is the same one; 8 + 2 is another.
        let mut bytes = vec![0x20, 0xb2, 16, 0, 0, 0, 0, 0, 0, 0, 0x49, 0, END];
        bytes.extend([0x21, 0xb2, 32, 0, 0, 0, 0, 0, 0, 0, 0x49, 0, END]);
        assert_eq!(decoded(&bytes), (vec![(16, Source::Unknown)], 0));
        // Up to a multiple of 16, by where it is in the buffer: what is skipped is not looked at.
        let mut bytes = vec![0x23, 0x00, 0xff, 0xff];
        bytes.extend(record(LOAD, 16, 0, &[END]));
        let mut found = 0;
        assert_eq!((decode(&bytes, 12, |_| found += 1), found), (0, 1));
        assert_eq!(decoded(&[0x23, 0x00]), (Vec::new(), 0));
    }

    #[test]
    fn after_garbage_the_next_record_is_whole() {
        let whole = record(LOAD, 0x1000, 0, &[END]);
        let mut bytes = record(LOAD, 0x2000, 0, &[]);
        bytes.extend([0xff, 0xff, END]);
        bytes.extend(&whole);
        assert_eq!(decoded(&bytes), (vec![(0x1000, Source::Cache)], 1));
    }

    #[test]
    fn a_record_that_is_cut_does_not_count() {
        let whole = record(LOAD, 0x1000, 0, &TIME);
        for length in 1..whole.len() {
            let mut bytes = whole.clone();
            bytes.extend(&whole[..length]);
            let (found, unreadable) = decoded(&bytes);
            assert_eq!((found.len(), unreadable > 0), (1, true), "{length}");
        }
        assert_eq!(decoded(&[]), (Vec::new(), 0));
    }

    #[test]
    fn any_bytes_are_read_to_the_end() {
        // Every pair of headers, cut anywhere.
        for (first, second) in
            (0..=u8::MAX).flat_map(|first| (0..=u8::MAX).map(move |second| (first, second)))
        {
            let bytes = [first, second, 0xb2, 0x49, first, second, END, first];
            for length in 0..=bytes.len() {
                decode(&bytes[..length], u64::MAX - 3, |_| {});
            }
        }
        // Bytes that are as good as random, before a record: it is found behind as much padding as a packet can take for its
        // own.
        let whole = record(LOAD, 0xabcd_0000, 0, &[END]);
        let (mut state, mut found) = (1_u64, 0);
        for round in 0..1000 {
            let mut bytes = Vec::new();
            for _ in 0..round {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                bytes.push((state >> 56) as u8);
            }
            bytes.extend([0; 16]);
            bytes.push(END);
            bytes.extend(&whole);
            decode(&bytes, 0, |operation| found += u32::from(operation.address == 0xabcd_0000));
        }
        assert_eq!(found, 1000);
    }
}
