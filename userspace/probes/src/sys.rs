//! The system calls that no crate here offers, each behind a safe function.

#![expect(unsafe_code, reason = "raw system calls")]

use std::{
    fs, io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use libc::{c_int, c_long, c_ulong, c_void};
use rustix::{
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap},
    param::page_size,
    time::{ClockId, clock_gettime},
};

/// Adds, modulo 2^64, the 64-bit numbers of an array that was made with `BPF_F_MMAPABLE`, the first one from place
/// `first`. A hundred thousand take two system calls, and no copy of each by the kernel.
pub(crate) fn add_array(map: BorrowedFd<'_>, first: usize, values: &mut [u64]) -> io::Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    let start = first * size_of::<u64>();
    let before = start % page_size();
    let length = before + size_of_val(values);
    let offset = (start - before) as u64;
    // SAFETY: a mapping at an address that the kernel chooses touches no memory of ours.
    let address = unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, map, offset)? };
    // SAFETY: `before` is within the mapping.
    let numbers = unsafe { address.byte_add(before) }.cast::<AtomicU64>();
    // SAFETY: the mapping has as many numbers, and `before` is a multiple of 8. The probes write to them meanwhile, which
    // atomic loads allow.
    let numbers = unsafe { std::slice::from_raw_parts(numbers, values.len()) };
    for (value, number) in values.iter_mut().zip(numbers) {
        *value = value.wrapping_add(number.load(Ordering::Relaxed));
    }
    // SAFETY: nothing refers to the mapping any more.
    unsafe { munmap(address, length) }.map_err(io::Error::from)
}

/// A value that a probe put into a ring buffer; `None` where there are not as many bytes as a `T` has.
pub(crate) fn read_value<T: aya::Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: there are as many bytes, and any bytes are a `T`.
    (bytes.len() == size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// `BPF_MAP_UPDATE_ELEM` with a descriptor for a value.
pub(crate) fn set_descriptor(map: BorrowedFd<'_>, index: u32, value: &impl AsRawFd) -> io::Result<()> {
    /// The member for elements of `union bpf_attr`, linux/bpf.h.
    #[repr(C)]
    struct Element {
        map_fd: u32,
        padding: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    const BPF_MAP_UPDATE_ELEM: c_int = 2;

    let value = value.as_raw_fd();
    let mut element = Element {
        map_fd: map.as_raw_fd().cast_unsigned(),
        padding: 0,
        key: &raw const index as u64,
        value: &raw const value as u64,
        flags: 0,
    };
    // SAFETY: the kernel reads a key and a value, of 4 bytes each; they outlive the call.
    check(unsafe {
        libc::syscall(libc::SYS_bpf, BPF_MAP_UPDATE_ELEM, &raw mut element, size_of::<Element>())
    })
}

/// What the kernel reports of a map or program, by the name of the line in `fdinfo`. Kernels that do not count something
/// do not write its line.
pub(crate) fn fdinfo(fd: BorrowedFd<'_>) -> io::Result<impl Fn(&str) -> Option<u64>> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    Ok(move |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value?.trim().parse().ok()
    })
}

/// Private anonymous memory, without huge pages.
pub(crate) struct Mapping {
    start: *mut c_void,
    page_size: usize,
    pages: usize,
}

impl Mapping {
    pub(crate) fn new(pages: usize) -> io::Result<Self> {
        let page_size = page_size();
        let length = pages * page_size;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice touches no memory of ours.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), length, access, MapFlags::PRIVATE)? };
        // SAFETY: the range is the mapping's.
        let _refused_where_there_are_none = unsafe { madvise(start, length, Advice::LinuxNoHugepage) };
        Ok(Self { start, page_size, pages })
    }

    /// `mbind(2)` with `MPOL_PREFERRED`: the node is used while it has free memory.
    pub(crate) fn prefer_node(&self, node: u32) -> io::Result<()> {
        const MPOL_PREFERRED: c_int = 1;
        let bits = c_ulong::BITS;
        let mut mask: Vec<c_ulong> = vec![0; (node / bits) as usize + 1];
        mask[(node / bits) as usize] = 1 << (node % bits);
        // The kernel takes one bit less than it is given.
        let max_node = mask.len() * bits as usize + 1;
        let length = self.pages * self.page_size;
        // SAFETY: the range is the mapping's, and `mask` has `max_node - 1` bits.
        let result = unsafe {
            libc::syscall(libc::SYS_mbind, self.start, length, MPOL_PREFERRED, mask.as_ptr(), max_node, 0)
        };
        check(result)
    }

    /// Writes to each page, so that it is allocated.
    pub(crate) fn touch(&mut self) {
        for page in 0..self.pages {
            // SAFETY: the byte is in the mapping.
            let byte = unsafe { self.start.cast::<u8>().add(page * self.page_size) };
            // SAFETY: as above; `&mut self` makes this the only access.
            unsafe { byte.write_volatile(1) };
        }
    }

    pub(crate) fn start(&self) -> usize {
        self.start.addr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing borrows from it any more.
        let _unmapped = unsafe { munmap(self.start, self.pages * self.page_size) };
    }
}

/// The monotonic clock, as `bpf_ktime_get_ns` reads it.
pub(crate) fn monotonic_nanoseconds() -> u64 {
    let since = Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Gives freed memory back to the kernel, which glibc would keep. To be called after work that is done once and takes far more
/// memory than all that follows, such as reading the kernel's types (35 MB).
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it has no preconditions.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn check(result: c_long) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
