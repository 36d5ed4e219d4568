//! Safe wrappers of system calls that no used crate provides.

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

/// Adds the 64-bit numbers of an array map with `BPF_F_MMAPABLE`, from index `first` on, to `values`, modulo 2^64. A
/// hundred thousand numbers take two system calls, and the kernel does not copy them one by one.
pub(crate) fn add_array(map: BorrowedFd<'_>, first: usize, values: &mut [u64]) -> io::Result<()> {
    if values.is_empty() {
        return Ok(());
    }
    let start = first * size_of::<u64>();
    let before = start % page_size();
    let length = before + size_of_val(values);
    let offset = (start - before) as u64;
    // SAFETY: a mapping at an address that the kernel chooses does not affect existing memory.
    let address = unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, map, offset)? };
    // SAFETY: `before` is within the mapping.
    let numbers = unsafe { address.byte_add(before) }.cast::<AtomicU64>();
    // SAFETY: the mapping has `values.len()` numbers from there on, and `before` is a multiple of 8. The probes write
    // to them meanwhile, which atomic loads permit.
    let numbers = unsafe { std::slice::from_raw_parts(numbers, values.len()) };
    for (value, number) in values.iter_mut().zip(numbers) {
        *value = value.wrapping_add(number.load(Ordering::Relaxed));
    }
    // SAFETY: nothing refers to the mapping any more.
    unsafe { munmap(address, length) }.map_err(io::Error::from)
}

/// The memory of an array map with `BPF_F_MMAPABLE`, for repeated readings.
pub(crate) struct MappedArray {
    start: *mut c_void,
    numbers: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread.
unsafe impl Send for MappedArray {}

impl MappedArray {
    /// Maps the first 64-bit numbers of a map that has at least so many.
    pub(crate) fn new(map: BorrowedFd<'_>, numbers: usize) -> io::Result<Self> {
        let length = numbers * size_of::<u64>();
        // SAFETY: a mapping at an address that the kernel chooses does not affect existing memory.
        let start = unsafe { mmap(ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, map, 0)? };
        Ok(Self { start, numbers })
    }

    /// Returns the present numbers.
    pub(crate) fn read(&self) -> impl Iterator<Item = u64> + '_ {
        // SAFETY: the mapping has so many numbers. Programs write to them meanwhile, which atomic loads permit.
        let numbers = unsafe { std::slice::from_raw_parts(self.start.cast::<AtomicU64>(), self.numbers) };
        numbers.iter().map(|number| number.load(Ordering::Relaxed))
    }
}

impl Drop for MappedArray {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing borrows from it any more.
        let _unmapped = unsafe { munmap(self.start, self.numbers * size_of::<u64>()) };
    }
}

/// Decodes a value from a ring buffer; `None` if its size is not that of `T`.
pub(crate) fn read_value<T: aya::Pod>(bytes: &[u8]) -> Option<T> {
    // SAFETY: the size is checked, and any bytes are a valid `T`.
    (bytes.len() == size_of::<T>()).then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// Calls `BPF_MAP_UPDATE_ELEM` with a descriptor as value.
pub(crate) fn set_descriptor(map: BorrowedFd<'_>, index: u32, value: &impl AsRawFd) -> io::Result<()> {
    /// The member of `union bpf_attr` for elements (linux/bpf.h).
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

/// Reads the kernel's figures for a map or program, by the name of the line in `fdinfo`. The kernel omits lines that it
/// does not support.
pub(crate) fn fdinfo(fd: BorrowedFd<'_>) -> io::Result<impl Fn(&str) -> Option<u64>> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()))?;
    Ok(move |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        value?.trim().parse().ok()
    })
}

/// Private anonymous memory, without huge pages.
pub(crate) struct AnonymousMapping {
    start: *mut c_void,
    page_size: usize,
    pages: usize,
}

impl AnonymousMapping {
    pub(crate) fn new(pages: usize) -> io::Result<Self> {
        let page_size = page_size();
        let length = pages * page_size;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a mapping at an address that the kernel chooses does not affect existing memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), length, access, MapFlags::PRIVATE)? };
        // SAFETY: the range is the mapping's.
        let _refused_where_there_are_none = unsafe { madvise(start, length, Advice::LinuxNoHugepage) };
        Ok(Self { start, page_size, pages })
    }

    /// Calls `mbind(2)` with `MPOL_PREFERRED`: the node is used while it has free memory.
    pub(crate) fn prefer_node(&self, node: u32) -> io::Result<()> {
        const MPOL_PREFERRED: c_int = 1;
        let bits = c_ulong::BITS;
        let mut mask: Vec<c_ulong> = vec![0; (node / bits) as usize + 1];
        mask[(node / bits) as usize] = 1 << (node % bits);
        // The kernel uses one bit less than this number.
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

impl Drop for AnonymousMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing borrows from it any more.
        let _unmapped = unsafe { munmap(self.start, self.pages * self.page_size) };
    }
}

/// Reads the monotonic clock, like `bpf_ktime_get_ns`.
pub(crate) fn monotonic_nanoseconds() -> u64 {
    let since = Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// Returns freed memory, which glibc would keep, to the kernel. Useful after a one-time task that needs far more memory
/// than all later ones, such as reading the kernel's types (35 MB).
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
