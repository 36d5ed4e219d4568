//! `move_pages(2)` as a question, behind a safe function.

#![expect(unsafe_code, reason = "a raw system call that no crate here offers")]

use std::{io, ptr};

/// The node of each page of a process by an address in it; `None` where there is no page, or none of the process's own.
pub(super) fn nodes(process: u32, addresses: &[usize]) -> io::Result<Vec<Option<u32>>> {
    let process = i32::try_from(process).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut answers = vec![-libc::ENOENT; addresses.len()];
    // SAFETY: the kernel reads as many addresses as there are, no nodes as there are none, and writes as many answers. The
    // addresses are those of another process and are not dereferenced here.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            process,
            addresses.len(),
            addresses.as_ptr(),
            ptr::null::<i32>(),
            answers.as_mut_ptr(),
            0_i32,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(answers.into_iter().map(|answer| u32::try_from(answer).ok()).collect())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Makes the kernel map each page of some memory by a fault of its own, where it would map many at once. The pages at
    /// the ends, which are shared with others, stay as they are.
    pub(in super::super) fn map_by_page(memory: &mut [u8]) {
        let page = rustix::param::page_size();
        let skipped = memory.as_ptr().align_offset(page);
        let whole = memory.get_mut(skipped..).unwrap_or_default();
        let length = whole.len() / page * page;
        // SAFETY: the range is ours, and the advice changes nothing of what is in it.
        let advised = unsafe {
            rustix::mm::madvise(whole.as_mut_ptr().cast(), length, rustix::mm::Advice::LinuxNoHugepage)
        };
        // A kernel without huge pages refuses that, and has no need of it.
        assert!(matches!(advised, Ok(()) | Err(rustix::io::Errno::INVAL)), "{advised:?}");
    }

    #[test]
    fn the_kernel_says_where_our_own_pages_lie() {
        let memory = vec![1_u8; 64 << 10];
        let first = memory.as_ptr().addr().next_multiple_of(rustix::param::page_size());
        let found = nodes(std::process::id(), &[first, 0]).unwrap();
        assert!(found[0].is_some() && found[1].is_none(), "{found:?}");
        assert!(nodes(u32::MAX, &[first]).is_err());
    }
}
