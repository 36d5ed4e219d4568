//! AUX area of a perf event: memory beside the ring that the unit itself writes to, shared with the kernel.
//!
//! The first page of the ring contains the offsets up to which the unit has written (`aux_head`) and this program has
//! read (`aux_tail`). Both count from the start of sampling; modulo the size, they are positions in the area. The unit
//! does not write between tail and head.

#![expect(unsafe_code, reason = "no dependency offers memory that is shared with the kernel")]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr, slice,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

// Offsets of the fields in the first page: `struct perf_event_mmap_page` (`linux/perf_event.h`).
const HEAD_OFFSET: usize = 1056;
const TAIL_OFFSET: usize = 1064;
const AREA_OFFSET: usize = 1072;
const AREA_SIZE_OFFSET: usize = 1080;

/// An AUX area with the ring beside it. The mappings keep the event open.
pub(super) struct AuxArea {
    /// Second mapping of the ring, for its first page.
    ring: SharedMapping,
    data: SharedMapping,
}

impl AuxArea {
    /// Maps an area of `bytes` bytes for an event with a mapped ring of `ring` bytes. Both are powers of two and
    /// multiples of the page size.
    pub(super) fn map(event: &impl AsRawFd, ring: usize, bytes: usize) -> io::Result<Self> {
        let offset = rustix::param::page_size() + ring;
        let ring = SharedMapping::new(event, 0, offset)?;
        ring.field(AREA_OFFSET).store(offset as u64, Ordering::Release);
        ring.field(AREA_SIZE_OFFSET).store(bytes as u64, Ordering::Release);
        let data = SharedMapping::new(event, offset as u64, bytes)?;
        Ok(Self { ring, data })
    }

    /// Returns the offset up to which the unit has written.
    pub(super) fn head(&self) -> u64 {
        self.ring.field(HEAD_OFFSET).load(Ordering::Acquire)
    }

    /// Returns the offset up to which the area was read.
    pub(super) fn tail(&self) -> u64 {
        self.ring.field(TAIL_OFFSET).load(Ordering::Relaxed)
    }

    /// Appends bytes to `into`; returns `false` if not all of them are between tail and head.
    pub(super) fn copy(&self, from: u64, length: u64, into: &mut Vec<u8>) -> bool {
        let (tail, head) = (self.tail(), self.head());
        let size = self.data.length as u64;
        let fits = from >= tail
            && from.checked_add(length).is_some_and(|end| end <= head)
            && head.checked_sub(tail).is_some_and(|filled| filled <= size);
        let place = usize::try_from(from % size).ok().zip(usize::try_from(length).ok());
        let Some((at, length)) = place.filter(|_| fits) else { return false };
        let first = length.min(self.data.length - at);
        into.extend_from_slice(self.data.bytes(at, first));
        into.extend_from_slice(self.data.bytes(0, length - first));
        true
    }

    /// Lets the unit overwrite the bytes before `to`, which must have been copied.
    pub(super) fn release(&mut self, to: u64) {
        self.ring.field(TAIL_OFFSET).store(to, Ordering::Release);
    }
}

/// A file mapping that is shared with the kernel.
struct SharedMapping {
    start: *mut u8,
    length: usize,
}

impl SharedMapping {
    fn new(file: &impl AsRawFd, offset: u64, length: usize) -> io::Result<Self> {
        // SAFETY: the descriptor is open as long as the borrowed `file` exists.
        let descriptor = unsafe { BorrowedFd::borrow_raw(file.as_raw_fd()) };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an unused range of addresses.
        let start = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, descriptor, offset) }?;
        Ok(Self { start: start.cast(), length })
    }

    /// Returns a field of the first page.
    fn field(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: all offsets are within the first page, which is mapped.
        let field = unsafe { self.start.add(offset) };
        // SAFETY: the offsets are multiples of 8, and a page is aligned to 8. Both sides access the field atomically.
        // The page is mapped as long as `self` exists.
        unsafe { AtomicU64::from_ptr(field.cast()) }
    }

    /// Returns bytes that the unit does not write at the moment.
    fn bytes(&self, at: usize, length: usize) -> &[u8] {
        let length = length.min(self.length.saturating_sub(at));
        // SAFETY: the offset is at most the end of the mapping.
        let start = unsafe { self.start.add(at.min(self.length)) };
        // SAFETY: the bytes are within the mapping, which lasts as long as `self`. The unit does not write between tail
        // and head, and only `release`, which borrows the area mutably, moves the tail.
        unsafe { slice::from_raw_parts(start, length) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: the range is mapped, and all borrows of it have ended. The call cannot fail, as start and length are
        // those of a mapping.
        let _ = unsafe { munmap(self.start.cast(), self.length) };
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fs::File, os::unix::fs::FileExt as _};

    use super::*;

    /// Creates a file with a ring and an area of one page each, in the kernel's layout, with data from `tail` to
    /// `head`.
    pub(in super::super) fn area(tail: u64, head: u64, write: impl Fn(u64) -> u8) -> (File, AuxArea) {
        let page = rustix::param::page_size();
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * page as u64).unwrap();
        for (field, value) in [(HEAD_OFFSET, head), (TAIL_OFFSET, tail)] {
            file.write_all_at(&value.to_ne_bytes(), field as u64).unwrap();
        }
        for at in tail..head {
            file.write_all_at(&[write(at)], 2 * page as u64 + at % page as u64).unwrap();
        }
        let area = AuxArea::map(&file, page, page).unwrap();
        (file, area)
    }

    fn field(file: &File, at: usize) -> u64 {
        let mut value = [0; 8];
        file.read_exact_at(&mut value, at as u64).unwrap();
        u64::from_ne_bytes(value)
    }

    #[test]
    fn reads_in_order_around_end_of_area() {
        let page = rustix::param::page_size() as u64;
        let (tail, head) = (5 * page - 100, 5 * page + 50);
        let (file, mut area) = area(tail, head, |at| (at % 251) as u8);
        assert_eq!((field(&file, AREA_OFFSET), field(&file, AREA_SIZE_OFFSET)), (2 * page, page));
        assert_eq!((area.tail(), area.head()), (tail, head));
        let mut bytes = vec![7];
        assert!(area.copy(tail + 10, 130, &mut bytes));
        let expected: Vec<u8> = (tail + 10..tail + 140).map(|at| (at % 251) as u8).collect();
        assert_eq!((bytes[0], &bytes[1..]), (7, expected.as_slice()));
        area.release(head);
        assert_eq!((field(&file, TAIL_OFFSET), area.tail()), (head, head));
    }

    #[test]
    fn reads_only_between_tail_and_head() {
        let page = rustix::param::page_size() as u64;
        let (tail, head) = (page, page + 64);
        let (file, area) = area(tail, head, |_| 1);
        let mut bytes = Vec::new();
        for (from, length) in [(tail - 1, 2), (head - 1, 2), (head + 1, 0), (u64::MAX, 1), (tail, u64::MAX)] {
            assert!(!area.copy(from, length, &mut bytes), "{from} {length}");
        }
        assert!(area.copy(tail, 64, &mut bytes) && area.copy(head, 0, &mut bytes));
        // Invalid heads: beyond the area, or before the tail.
        for head in [tail + page + 1, tail - 1] {
            file.write_all_at(&head.to_ne_bytes(), HEAD_OFFSET as u64).unwrap();
            assert!(!area.copy(tail, 0, &mut bytes), "{head}");
        }
        assert_eq!(bytes, [1; 64]);
    }
}
