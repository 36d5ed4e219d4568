//! The memory beside a ring (AUX area) into which a unit writes by itself, shared with the kernel.
//!
//! The first page of a ring says how far the unit has written (`aux_head`) and how far it was read (`aux_tail`), both counted
//! from the start of sampling: the place in the area is the rest of the division by its size. The kernel writes nothing
//! between the two.

#![expect(unsafe_code, reason = "memory that is shared with the kernel, which no crate here offers")]

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr, slice,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Where the fields are in the first page: `struct perf_event_mmap_page` (`linux/perf_event.h`).
const HEAD: usize = 1056;
const TAIL: usize = 1064;
const OFFSET: usize = 1072;
const SIZE: usize = 1080;

/// An area, and the ring beside it. It keeps the event open.
pub(super) struct Area {
    /// The ring, mapped once more for its first page.
    ring: Mapping,
    data: Mapping,
}

impl Area {
    /// Maps an area of some bytes for an event with a ring of some bytes, which is mapped already. Both are powers of two,
    /// and of whole pages.
    pub(super) fn map(event: &impl AsRawFd, ring: usize, bytes: usize) -> io::Result<Self> {
        let offset = rustix::param::page_size() + ring;
        let ring = Mapping::new(event, 0, offset)?;
        ring.field(OFFSET).store(offset as u64, Ordering::Release);
        ring.field(SIZE).store(bytes as u64, Ordering::Release);
        let data = Mapping::new(event, offset as u64, bytes)?;
        Ok(Self { ring, data })
    }

    /// How far the unit has written.
    pub(super) fn head(&self) -> u64 {
        self.ring.field(HEAD).load(Ordering::Acquire)
    }

    /// How far it was read.
    pub(super) fn tail(&self) -> u64 {
        self.ring.field(TAIL).load(Ordering::Relaxed)
    }

    /// Appends bytes to some; `false` if not all of them are between tail and head.
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

    /// Lets the unit write again where it was read, up to `to`. What was copied has been read before.
    pub(super) fn release(&mut self, to: u64) {
        self.ring.field(TAIL).store(to, Ordering::Release);
    }
}

/// Memory of a file, shared with the kernel.
struct Mapping {
    start: *mut u8,
    length: usize,
}

impl Mapping {
    fn new(of: &impl AsRawFd, offset: u64, length: usize) -> io::Result<Self> {
        // SAFETY: it is open as long as `of` is there, which is borrowed.
        let file = unsafe { BorrowedFd::borrow_raw(of.as_raw_fd()) };
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses where it is, so nothing else is there.
        let start = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, file, offset) }?;
        Ok(Self { start: start.cast(), length })
    }

    /// A field of the first page.
    fn field(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: all offsets are within the first page, which is mapped.
        let field = unsafe { self.start.add(offset) };
        // SAFETY: offsets are multiples of 8, and a page begins at one. Both sides access it as a whole. It is mapped as long as
        // `self` is there.
        unsafe { AtomicU64::from_ptr(field.cast()) }
    }

    /// Bytes that the kernel does not write now.
    fn bytes(&self, at: usize, length: usize) -> &[u8] {
        let length = length.min(self.length.saturating_sub(at));
        // SAFETY: at most the end of the mapping.
        let start = unsafe { self.start.add(at.min(self.length)) };
        // SAFETY: they are within the mapping, which lasts as long as `self`. Between tail and head, nothing writes: the tail
        // moves by `release` only, which takes the area for itself.
        unsafe { slice::from_raw_parts(start, length) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped like that, and what was borrowed of it is gone.
        // It cannot fail, as start and length are those of a mapping.
        let _ = unsafe { munmap(self.start.cast(), self.length) };
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::{fs::File, os::unix::fs::FileExt as _};

    use super::*;

    /// A ring and an area of a page each, as the kernel has them, in a file: what the unit has written, from `tail` to `head`.
    pub(in super::super) fn area(tail: u64, head: u64, write: impl Fn(u64) -> u8) -> (File, Area) {
        let page = rustix::param::page_size();
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * page as u64).unwrap();
        for (field, value) in [(HEAD, head), (TAIL, tail)] {
            file.write_all_at(&value.to_ne_bytes(), field as u64).unwrap();
        }
        for at in tail..head {
            file.write_all_at(&[write(at)], 2 * page as u64 + at % page as u64).unwrap();
        }
        let area = Area::map(&file, page, page).unwrap();
        (file, area)
    }

    fn field(file: &File, at: usize) -> u64 {
        let mut value = [0; 8];
        file.read_exact_at(&mut value, at as u64).unwrap();
        u64::from_ne_bytes(value)
    }

    #[test]
    fn what_lies_around_the_end_of_the_area_is_read_in_order() {
        let page = rustix::param::page_size() as u64;
        let (tail, head) = (5 * page - 100, 5 * page + 50);
        let (file, mut area) = area(tail, head, |at| (at % 251) as u8);
        assert_eq!((field(&file, OFFSET), field(&file, SIZE)), (2 * page, page));
        assert_eq!((area.tail(), area.head()), (tail, head));
        let mut bytes = vec![7];
        assert!(area.copy(tail + 10, 130, &mut bytes));
        let expected: Vec<u8> = (tail + 10..tail + 140).map(|at| (at % 251) as u8).collect();
        assert_eq!((bytes[0], &bytes[1..]), (7, expected.as_slice()));
        area.release(head);
        assert_eq!((field(&file, TAIL), area.tail()), (head, head));
    }

    #[test]
    fn only_what_was_written_and_not_yet_released_can_be_read() {
        let page = rustix::param::page_size() as u64;
        let (tail, head) = (page, page + 64);
        let (file, area) = area(tail, head, |_| 1);
        let mut bytes = Vec::new();
        for (from, length) in [(tail - 1, 2), (head - 1, 2), (head + 1, 0), (u64::MAX, 1), (tail, u64::MAX)] {
            assert!(!area.copy(from, length, &mut bytes), "{from} {length}");
        }
        assert!(area.copy(tail, 64, &mut bytes) && area.copy(head, 0, &mut bytes));
        // A head that cannot be: more than the area has, or before the tail.
        for head in [tail + page + 1, tail - 1] {
            file.write_all_at(&head.to_ne_bytes(), HEAD as u64).unwrap();
            assert!(!area.copy(tail, 0, &mut bytes), "{head}");
        }
        assert_eq!(bytes, [1; 64]);
    }
}
