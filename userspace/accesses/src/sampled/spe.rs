//! Decoder of the records that Arm's Statistical Profiling Extension (SPE) writes for sampled operations (Arm
//! Architecture Reference Manual, "Statistical Profiling Extension Sample Record Specification").
//!
//! A *record* is a sequence of *packets* that ends with the packet *end* or *timestamp*. A packet has a header of one
//! or two bytes and a payload of 1, 2, 4 or 8 bytes in little endian; bits 4 and 5 of the header's last byte have
//! the payload's length. Padding can be between packets.
//!
//! # Invariants
//! For any bytes, decoding ends and does not panic. After bytes that are no packet, nothing is decoded until the end of
//! a record; the next record is complete again.

use super::source::AccessSource;

const END_HEADER: u8 = 0x01;
const TIMESTAMP_HEADER: u8 = 0x71;
/// Index of the data address among the addresses of a record. The other ones are of code, or physical.
const DATA_ADDRESS_INDEX: u8 = 2;
/// Class of operations that load or store.
const LOAD_OR_STORE_CLASS: u8 = 1;
/// Bits of an address without its tag.
const UNTAGGED_MASK: u64 = u64::MAX >> 8;
/// Bit that is set in addresses of the kernel.
const KERNEL_BIT: u64 = 1 << 55;

/// An operation of user space that accessed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Operation {
    pub(super) address: u64,
    is_store: bool,
    /// Source of the data, as a number of the processor.
    source: Option<u64>,
}

impl Operation {
    /// Returns the source of the data by the numbers that Arm's own cores have in common (Neoverse N1, N2, V1 and V2).
    /// They are valid for loads only.
    pub(super) fn source(self) -> AccessSource {
        match self.source.filter(|_| !self.is_store) {
            // The L1 and L2 cache, and the caches of another core, of this cluster, of the system, and of another
            // cluster.
            Some(0 | 8..=0xc) => AccessSource::Cache,
            Some(0xd) => AccessSource::Elsewhere,
            Some(0xe) => AccessSource::LocalMemory,
            _ => AccessSource::Unknown,
        }
    }
}

/// Decodes the records in some bytes, which start at offset `start` of the buffer. Returns the number of unreadable
/// records.
pub(super) fn decode(bytes: &[u8], start: u64, mut each: impl FnMut(Operation)) -> u64 {
    let (mut rest, mut at) = (bytes, start);
    let (mut record, mut unreadable) = (Record::default(), 0);
    while !rest.is_empty() {
        let length = match parse_packet(rest, at) {
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
    // The last record is cut off.
    unreadable + u64::from(record.is_broken || record.has_started)
}

/// A record in progress.
#[derive(Debug, Default)]
struct Record {
    has_started: bool,
    is_broken: bool,
    address: Option<u64>,
    is_store: Option<bool>,
    source: Option<u64>,
}

impl Record {
    fn add(&mut self, content: Content) {
        self.has_started = true;
        match content {
            Content::Address(address) => self.address = Some(address),
            Content::LoadOrStore(payload) => self.is_store = Some(payload & 1 != 0),
            Content::AccessSource(source) => self.source = Some(source),
            Content::Other => {}
        }
    }

    /// Returns the operation; `None` if it does not access memory, or if it is one of the kernel.
    fn operation(self) -> Option<Operation> {
        let (Some(address), Some(is_store), false) = (self.address, self.is_store, self.is_broken) else {
            return None;
        };
        let address = address & UNTAGGED_MASK;
        (address != 0 && address & KERNEL_BIT == 0).then_some(Operation {
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
    AccessSource(u64),
    Other,
}

/// Parses the packet at the start of these bytes, which is at offset `at` of the buffer. Returns the packet and its
/// length, at least 1; `None` if there is no packet, or only a part of one.
fn parse_packet(bytes: &[u8], at: u64) -> Option<(Packet, usize)> {
    let first = *bytes.first()?;
    // An extended header: for the same addresses and counters, or padding up to a multiple in the buffer.
    let is_extended = first & 0xfc == 0x20;
    let header = if is_extended { *bytes.get(1)? } else { first };
    if is_extended && header == 0 {
        let multiple = 2_u64 << (first & 3);
        return Some((Packet::Padding, usize::try_from(multiple - at % multiple).ok()?));
    }
    match header {
        0 => return Some((Packet::Padding, 1)),
        END_HEADER if !is_extended => return Some((Packet::End, 1)),
        _ => {}
    }
    let begin = 1 + usize::from(is_extended);
    let length = begin + (1 << (header >> 4 & 3));
    let payload = bytes.get(begin..length)?;
    let payload = payload.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
    let content = match header {
        _ if header & 0xf8 == 0xb0 => {
            let high = if is_extended { first & 3 } else { 0 };
            if (high << 3 | header & 7) == DATA_ADDRESS_INDEX {
                Content::Address(payload)
            } else {
                Content::Other
            }
        }
        // Counters.
        _ if header & 0xf8 == 0x98 => Content::Other,
        _ if is_extended => return None,
        TIMESTAMP_HEADER => return Some((Packet::End, length)),
        _ if header & 0xfc == 0x48 => {
            if header & 3 == LOAD_OR_STORE_CLASS {
                Content::LoadOrStore(payload)
            } else {
                Content::Other
            }
        }
        _ if header & 0xcf == 0x43 => Content::AccessSource(payload),
        // Events and contexts.
        _ if header & 0xcf == 0x42 || header & 0xfc == 0x64 => Content::Other,
        _ => return None,
    };
    Some((Packet::Content(content), length))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds a record like a processor's: address of the code, context, kind, events, counters, address, source, time.
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
    const TIME: [u8; 9] = [TIMESTAMP_HEADER, 1, 1, 1, 1, 1, 1, 1, 1];

    fn decoded(bytes: &[u8]) -> (Vec<(u64, AccessSource)>, u64) {
        let mut found = Vec::new();
        let unreadable = decode(bytes, 0, |operation| found.push((operation.address, operation.source())));
        (found, unreadable)
    }

    #[test]
    fn decodes_loads_and_stores() {
        let mut bytes = record(LOAD, 0xffff_1234_5678, 0xe, &[END_HEADER]);
        bytes.extend([0; 13]);
        bytes.extend(record(STORE, 0x1000, 0, &TIME));
        // A branch, which has no data address, another kind of operation, and a load of the kernel.
        bytes.extend([0x4a, 0x01, 0xb1, 1, 2, 3, 4, 5, 6, 7, 8, END_HEADER]);
        bytes.extend(record([0x48, 0x00], 0x3000, 0, &[END_HEADER]));
        bytes.extend(record(LOAD, 0xffff_8000_0000_1000, 0, &[END_HEADER]));
        let expected = vec![(0xffff_1234_5678, AccessSource::LocalMemory), (0x1000, AccessSource::Unknown)];
        assert_eq!(decoded(&bytes), (expected, 0));
    }

    #[test]
    fn removes_tag_of_address() {
        for (address, expected) in
            [(0xb400_ffff_0000_0010, 0xffff_0000_0010), (0xff0f_ffff_0000_0010, 0xf_ffff_0000_0010)]
        {
            assert_eq!(decoded(&record(LOAD, address, 0, &[END_HEADER])).0[0].0, expected);
        }
    }

    #[test]
    fn decodes_sources_of_loads() {
        for (number, expected) in [
            (0x0, AccessSource::Cache),
            (0x1, AccessSource::Unknown),
            (0x8, AccessSource::Cache),
            (0x9, AccessSource::Cache),
            (0xa, AccessSource::Cache),
            (0xb, AccessSource::Cache),
            (0xc, AccessSource::Cache),
            (0xd, AccessSource::Elsewhere),
            (0xe, AccessSource::LocalMemory),
            (0xf, AccessSource::Unknown),
        ] {
            assert_eq!(decoded(&record(LOAD, 16, number, &[END_HEADER])).0, [(16, expected)], "{number:#x}");
        }
        // A source of two bytes, and none.
        let long = [0x49, 0, 0xb2, 16, 0, 0, 0, 0, 0, 0, 0, 0x53, 0x0d, 0x00, END_HEADER];
        assert_eq!(decoded(&long).0, [(16, AccessSource::Elsewhere)]);
        let none = [0x49, 0, 0xb2, 16, 0, 0, 0, 0, 0, 0, 0, END_HEADER];
        assert_eq!(decoded(&none).0, [(16, AccessSource::Unknown)]);
    }

    #[test]
    fn skips_extended_headers_and_padding() {
        // Address 2 with an extended header is the data address; 8 + 2 is another one.
        let mut bytes = vec![0x20, 0xb2, 16, 0, 0, 0, 0, 0, 0, 0, 0x49, 0, END_HEADER];
        bytes.extend([0x21, 0xb2, 32, 0, 0, 0, 0, 0, 0, 0, 0x49, 0, END_HEADER]);
        assert_eq!(decoded(&bytes), (vec![(16, AccessSource::Unknown)], 0));
        // Padding up to a multiple of 16 in the buffer; the skipped bytes are not read.
        let mut bytes = vec![0x23, 0x00, 0xff, 0xff];
        bytes.extend(record(LOAD, 16, 0, &[END_HEADER]));
        let mut found = 0;
        assert_eq!((decode(&bytes, 12, |_| found += 1), found), (0, 1));
        assert_eq!(decoded(&[0x23, 0x00]), (Vec::new(), 0));
    }

    #[test]
    fn recovers_after_garbage() {
        let whole = record(LOAD, 0x1000, 0, &[END_HEADER]);
        let mut bytes = record(LOAD, 0x2000, 0, &[]);
        bytes.extend([0xff, 0xff, END_HEADER]);
        bytes.extend(&whole);
        assert_eq!(decoded(&bytes), (vec![(0x1000, AccessSource::Cache)], 1));
    }

    #[test]
    fn skips_cut_record() {
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
    fn decodes_any_bytes_to_the_end() {
        // Each pair of headers, cut at each length.
        for (first, second) in
            (0..=u8::MAX).flat_map(|first| (0..=u8::MAX).map(move |second| (first, second)))
        {
            let bytes = [first, second, 0xb2, 0x49, first, second, END_HEADER, first];
            for length in 0..=bytes.len() {
                decode(&bytes[..length], u64::MAX - 3, |_| {});
            }
        }
        // Pseudo-random bytes before a record, which is found after as much padding as a packet can take as its
        // payload.
        let whole = record(LOAD, 0xabcd_0000, 0, &[END_HEADER]);
        let (mut state, mut found) = (1_u64, 0);
        for round in 0..1000 {
            let mut bytes = Vec::new();
            for _ in 0..round {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                bytes.push((state >> 56) as u8);
            }
            bytes.extend([0; 16]);
            bytes.push(END_HEADER);
            bytes.extend(&whole);
            decode(&bytes, 0, |operation| found += u32::from(operation.address == 0xabcd_0000));
        }
        assert_eq!(found, 1000);
    }
}
