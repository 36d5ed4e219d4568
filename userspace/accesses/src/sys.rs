//! `move_pages(2)` in its query form, as a safe function.

#![expect(unsafe_code, reason = "a raw system call that no crate here offers")]

use std::{io, ptr};

/// Returns the node of each page of a process by an address in the page; `None` if there is no page, or it is not the
/// process's own.
pub(super) fn nodes_of_pages(process: u32, addresses: &[usize]) -> io::Result<Vec<Option<u32>>> {
    let process = i32::try_from(process).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut answers = vec![-libc::ENOENT; addresses.len()];
    // SAFETY: the kernel reads the addresses, reads no nodes as the pointer is null, and writes one status per address.
    // The addresses belong to another process and are not dereferenced here.
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

    /// Makes the kernel map each page of some memory by a separate fault, where it would otherwise map several at once.
    /// The first and the last page can be shared with other data and keep their setting.
    pub(in super::super) fn map_by_page(memory: &mut [u8]) {
        let page = rustix::param::page_size();
        let skipped = memory.as_ptr().align_offset(page);
        let whole = memory.get_mut(skipped..).unwrap_or_default();
        let length = whole.len() / page * page;
        // SAFETY: the range belongs to `memory`, and the advice does not change its content.
        let advised = unsafe {
            rustix::mm::madvise(whole.as_mut_ptr().cast(), length, rustix::mm::Advice::LinuxNoHugepage)
        };
        // A kernel without huge pages refuses the advice and does not need it.
        assert!(matches!(advised, Ok(()) | Err(rustix::io::Errno::INVAL)), "{advised:?}");
    }

    #[test]
    fn finds_nodes_of_own_pages() {
        let memory = vec![1_u8; 64 << 10];
        let first = memory.as_ptr().addr().next_multiple_of(rustix::param::page_size());
        let found = nodes_of_pages(std::process::id(), &[first, 0]).unwrap();
        assert!(found[0].is_some() && found[1].is_none(), "{found:?}");
        assert!(nodes_of_pages(u32::MAX, &[first]).is_err());
    }
}
