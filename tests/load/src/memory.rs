//! The memory: mapping, touching, walking, and queries of its nodes.

use std::{
    ffi::c_void,
    fs::{self, OpenOptions},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    ptr,
    sync::atomic::{AtomicU8, Ordering},
};

use rustix::{
    fs::{MemfdFlags, ftruncate, memfd_create},
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap},
};

use crate::{
    arguments::{Arguments, MemoryKind},
    error::Error,
};

const TRANSPARENT_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
/// File with the size of a transparent huge page in bytes: 2 MiB with base pages of 4 KiB.
const TRANSPARENT_SIZE: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
/// Number of pages in a query: enough to be fast, few enough for small buffers.
const QUERY_PAGES: usize = 512;
/// Number of pages between two checks whether a walk is over.
const WALK_CHUNK: usize = 256;

/// A mapping of at least the requested size.
pub(crate) struct Memory {
    mapping: *mut c_void,
    mapped: usize,
    /// Start of the aligned part that is used.
    start: *mut u8,
    size: usize,
    /// Size of the pages that a touch allocates.
    step: usize,
    /// True if a touch may fail by a signal (hugepages or file space run out), so that the kernel has to be asked to
    /// allocate.
    must_populate: bool,
    /// File to remove at the end.
    path: Option<PathBuf>,
}

// SAFETY: the pointers are those of the mapping, which lives as long as this value; its bytes are only accessed as
// atomics.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn map(arguments: &Arguments) -> Result<Self, Error> {
        let step = match arguments.kind {
            MemoryKind::Hugetlb => usize::try_from(arguments.huge_page).unwrap_or(usize::MAX),
            _ => page(),
        };
        let unaligned = || Error::Unaligned { size: arguments.size, page: step as u64 };
        let size = usize::try_from(arguments.size).map_err(|_| unaligned())?;
        if !size.is_multiple_of(step) {
            return Err(unaligned());
        }
        let alignment = if arguments.kind == MemoryKind::Thp { transparent_huge_page()? } else { step };
        // Includes space for the alignment.
        let mapped = size.checked_add(alignment - step).ok_or_else(unaligned)?;
        let (file, path) = match arguments.kind {
            MemoryKind::Anon | MemoryKind::Thp | MemoryKind::Hugetlb => (None, None),
            MemoryKind::Tmpfs => (Some(memfd(arguments.size)?), None),
            MemoryKind::File => {
                let path = arguments.path.clone().unwrap_or_default();
                (Some(create(&path, arguments.size)?), Some(path))
            }
        };
        let flags = match (arguments.kind, arguments.huge_page) {
            (MemoryKind::Hugetlb, 0x4000_0000) => MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_1GB,
            (MemoryKind::Hugetlb, _) => MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
            (MemoryKind::Anon | MemoryKind::Thp, _) => MapFlags::PRIVATE | MapFlags::NORESERVE,
            (MemoryKind::Tmpfs | MemoryKind::File, _) => MapFlags::SHARED,
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let result = match &file {
            // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
            Some(file) => unsafe { mmap(ptr::null_mut(), mapped, protection, flags, file, 0) },
            // SAFETY: as above.
            None => unsafe { mmap_anonymous(ptr::null_mut(), mapped, protection, flags) },
        };
        let hint = if arguments.kind == MemoryKind::Hugetlb {
            " (not enough free hugepages of this size: see /sys/kernel/mm/hugepages)"
        } else {
            ""
        };
        let mapping =
            result.map_err(|errno| Error::Map { size: arguments.size, source: errno.into(), hint })?;
        let mut memory = Self {
            mapping,
            mapped,
            start: mapping.cast(),
            size,
            step,
            must_populate: !matches!(arguments.kind, MemoryKind::Anon | MemoryKind::Thp),
            path,
        };
        let skip = memory.start.align_offset(alignment);
        memory.start = memory.start.wrapping_add(skip);
        memory.advise(arguments.kind)?;
        Ok(memory)
    }

    /// Requests or forbids huge pages, so that the system's default does not matter.
    fn advise(&self, kind: MemoryKind) -> Result<(), Error> {
        let advice = match kind {
            MemoryKind::Thp => {
                let path = Path::new(TRANSPARENT_ENABLED);
                let value = fs::read_to_string(path).map_err(Error::file(path))?;
                if value.contains("[never]") {
                    return Err(Error::TransparentOff {
                        path: path.to_owned(),
                        value: value.trim().to_owned(),
                    });
                }
                Advice::LinuxHugepage
            }
            MemoryKind::Anon => Advice::LinuxNoHugepage,
            MemoryKind::Hugetlb | MemoryKind::Tmpfs | MemoryKind::File => return Ok(()),
        };
        // SAFETY: the range is within the mapping, and the advice does not change its contents.
        match unsafe { madvise(self.start.cast(), self.size, advice) } {
            // A kernel without transparent huge pages uses none anyway.
            Err(Errno::INVAL) if kind == MemoryKind::Anon => Ok(()),
            result => result.map_err(|errno| Error::Map {
                size: self.size as u64,
                source: errno.into(),
                hint: " (advising on huge pages)",
            }),
        }
    }

    /// Touches the share of thread `index` of `threads`, page by page.
    pub(crate) fn touch(&self, index: usize, threads: usize) -> Result<(), Error> {
        for step in self.share(index, threads) {
            if self.must_populate {
                let address = self.start.wrapping_add(step * self.step).cast();
                // SAFETY: the range is within the mapping; populating leaves its contents as they are.
                match unsafe { madvise(address, self.step, Advice::LinuxPopulateWrite) } {
                    // Before Linux 5.14, the kernel cannot be asked: without a free page, it kills this process.
                    Err(Errno::INVAL) => Ok(()),
                    asked => asked.map_err(|errno| Error::Touch {
                        page: step,
                        source: errno.into(),
                        hint: " (the pool of hugepages, the file system or the policy's nodes are full)",
                    }),
                }?;
            }
            self.byte(step * self.step).store(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Writes to each page of the share repeatedly; of all memory, or of its first bytes.
    pub(crate) fn walk(&self, bytes: Option<u64>, index: usize, threads: usize, is_over: impl Fn() -> bool) {
        let size = page();
        let pages = bytes.map_or(usize::MAX, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX) / size);
        let share = share(pages.min(self.pages()), index, threads);
        let mut chunks = share.clone().step_by(WALK_CHUNK).cycle();
        while let Some(first) = chunks.next().filter(|_| !is_over()) {
            for page in first..(first + WALK_CHUNK).min(share.end) {
                self.byte(page * size).fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn pages(&self) -> usize {
        self.size / page()
    }

    /// Returns the start of the memory.
    pub(crate) fn address(&self) -> usize {
        self.start.addr()
    }

    /// Returns the node of each base page; `None` for a page that is not in memory.
    pub(crate) fn nodes_of_pages(&self) -> Result<Vec<Option<u32>>, Error> {
        let mut nodes = Vec::with_capacity(self.pages());
        let mut first = 0;
        while first < self.pages() {
            let count = QUERY_PAGES.min(self.pages() - first);
            let mut addresses = [ptr::null_mut::<u8>(); QUERY_PAGES];
            for (index, address) in addresses.iter_mut().enumerate().take(count) {
                *address = self.start.wrapping_add((first + index) * page());
            }
            let mut answers = [0_i32; QUERY_PAGES];
            // SAFETY: the kernel reads `count` addresses and writes `count` answers; both arrays have as many. Without
            // a list of nodes nothing moves.
            let result = unsafe {
                libc::syscall(
                    libc::SYS_move_pages,
                    0,
                    count,
                    addresses.as_ptr(),
                    ptr::null::<i32>(),
                    answers.as_mut_ptr(),
                    0,
                )
            };
            if result != 0 {
                return Err(Error::MovePages(io::Error::last_os_error()));
            }
            nodes.extend(answers.iter().take(count).map(|&answer| u32::try_from(answer).ok()));
            first += count;
        }
        Ok(nodes)
    }

    /// Returns the amount of the mapping in transparent huge pages, by `smaps` (`proc_pid_smaps(5)`).
    pub(crate) fn transparent_huge_bytes(&self, smaps: &Path) -> Result<u64, Error> {
        let text = fs::read_to_string(smaps).map_err(Error::file(smaps))?;
        Ok(huge_bytes(&text, self.start.addr(), self.start.addr() + self.size))
    }

    fn share(&self, index: usize, threads: usize) -> std::ops::Range<usize> {
        share(self.size / self.step, index, threads)
    }

    fn byte(&self, offset: usize) -> &AtomicU8 {
        debug_assert!(offset < self.size);
        // SAFETY: the byte is within the mapping, which lives as long as `self` and is accessed only through atomics.
        unsafe { AtomicU8::from_ptr(self.start.wrapping_add(offset)) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: this is the mapping that `map` made; nothing borrows from it any more.
        let _ = unsafe { munmap(self.mapping, self.mapped) };
        if let Some(path) = &self.path
            && let Err(error) = fs::remove_file(path)
        {
            eprintln!("warning: cannot remove {}: {error}", path.display());
        }
    }
}

/// Returns the size of a base page in bytes.
pub(crate) fn page() -> usize {
    rustix::param::page_size()
}

fn transparent_huge_page() -> Result<usize, Error> {
    let path = Path::new(TRANSPARENT_SIZE);
    let text = fs::read_to_string(path).map_err(Error::file(path))?;
    text.trim().parse().map_err(|_| Error::file(path)(io::ErrorKind::InvalidData.into()))
}

/// Divides `0..count` into `parts` parts, with sizes that differ by one at most, and returns the part `index`.
fn share(count: usize, index: usize, parts: usize) -> std::ops::Range<usize> {
    let bound = |index: usize| count / parts * index + (count % parts).min(index);
    bound(index)..bound(index + 1)
}

fn memfd(size: u64) -> Result<OwnedFd, Error> {
    let path = Path::new("a memfd");
    let file = memfd_create("numaward-load", MemfdFlags::CLOEXEC)
        .map_err(|errno| Error::file(path)(errno.into()))?;
    ftruncate(&file, size).map_err(|errno| Error::file(path)(errno.into()))?;
    Ok(file)
}

/// Creates a file, which must not exist: the pages of an existing file may be in memory already, and the file will be
/// removed.
fn create(path: &Path, size: u64) -> Result<OwnedFd, Error> {
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).open(path).map_err(Error::file(path))?;
    file.set_len(size).map_err(Error::file(path))?;
    Ok(file.into())
}

/// Returns the sum of `AnonHugePages` and `ShmemPmdMapped` of the mappings that overlap with `start..end`.
fn huge_bytes(smaps: &str, start: usize, end: usize) -> u64 {
    let mut inside = false;
    let mut sum = 0;
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), second) = (words.next(), words.next()) else { continue };
        if let Some((from, to)) = first.split_once('-') {
            let bound = |text: &str| usize::from_str_radix(text, 16).unwrap_or_default();
            inside = bound(from) < end && bound(to) > start;
        } else if inside && ["AnonHugePages:", "ShmemPmdMapped:"].contains(&first) {
            sum += second.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or_default() * 1024;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn map(options: &str) -> Result<Memory, Error> {
        let words = ["numaward-load"].into_iter().chain(options.split_whitespace());
        Memory::map(&Arguments::try_parse_from(words).unwrap())
    }

    #[test]
    fn shares_are_even_and_complete() {
        for (count, parts) in [(10, 3), (2, 4), (0, 2), (16384, 7)] {
            let shares: Vec<_> = (0..parts).map(|index| share(count, index, parts)).collect();
            assert_eq!(shares.iter().map(ExactSizeIterator::len).sum::<usize>(), count);
            assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(shares.iter().all(|share| share.len().abs_diff(count / parts) <= 1));
        }
    }

    #[test]
    fn touch_allocates_pages() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = format!("--size 1M --kind file --path {}", path.display());
        for options in ["--size 1M", "--size 1M --kind tmpfs", &file] {
            let memory = map(options).unwrap();
            assert!(memory.nodes_of_pages().unwrap().iter().all(Option::is_none), "{options}");
            for index in 0..3 {
                memory.touch(index, 3).unwrap();
            }
            let nodes = memory.nodes_of_pages().unwrap();
            assert_eq!((nodes.len(), nodes.iter().flatten().count()), (256, 256), "{options}");
        }
        assert!(!path.exists(), "the file is removed");
    }

    #[test]
    fn walk_touches_share_until_over() {
        let memory = map("--size 4M").unwrap();
        let looks = std::cell::Cell::new(0);
        memory.walk(None, 1, 2, || looks.replace(looks.get() + 1) >= 4);
        let nodes = memory.nodes_of_pages().unwrap();
        assert!(nodes[..512].iter().all(Option::is_none) && nodes[512..].iter().all(Option::is_some));
        assert_eq!(memory.byte(512 * page()).load(Ordering::Relaxed), 2, "two rounds of two chunks");

        let memory = map("--size 4M").unwrap();
        looks.set(0);
        memory.walk(Some(2 << 20), 0, 1, || looks.replace(looks.get() + 1) >= 4);
        let nodes = memory.nodes_of_pages().unwrap();
        assert!(nodes[..512].iter().all(Option::is_some) && nodes[512..].iter().all(Option::is_none));
    }

    #[test]
    fn refuses_invalid_requests() {
        let folder = tempfile::tempdir().unwrap();
        let taken = folder.path().join("taken");
        fs::write(&taken, "precious").unwrap();
        let table = [
            ("--size 4097".to_owned(), "--size 4097 is not a multiple of the page size 4096"),
            ("--size 1M --kind hugetlb".to_owned(), "not a multiple of the page size 2097152"),
            ("--size 1024G --kind hugetlb".to_owned(), "not enough free hugepages"),
            (format!("--kind file --path {}", taken.display()), "File exists"),
            ("--kind file --path /no/such/folder/file".to_owned(), "No such file"),
        ];
        for (options, message) in table {
            let error = map(&options).err().unwrap().to_string();
            assert!(error.contains(message), "{error}");
        }
        assert_eq!(fs::read_to_string(taken).unwrap(), "precious");
    }

    #[test]
    fn counts_huge_pages_of_mapping() {
        let smaps = "1000-3000 rw-p 0 00:00 0\nSize: 8 kB\nAnonHugePages: 4 kB\nShmemPmdMapped: 2 kB\n\
                     3000-5000 rw-p 0 00:00 0\nAnonHugePages: 16 kB\n";
        assert_eq!(huge_bytes(smaps, 0x2000, 0x3000), 6 * 1024);
        assert_eq!(huge_bytes(smaps, 0x2000, 0x4000), 22 * 1024);
        assert_eq!(huge_bytes(smaps, 0x6000, 0x7000), 0);
        assert_eq!(huge_bytes("AnonHugePages: x kB\n\nz-z\nAnonHugePages:", 0, usize::MAX), 0);
    }
}
