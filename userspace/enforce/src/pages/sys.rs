//! `move_pages(2)`, behind a safe function.

#![expect(unsafe_code, reason = "a raw system call that no crate here offers")]

use std::{io, ptr};

use numaward_topology::NodeId;

/// Of each page of a process: the node it lies on, or the kernel's error number (negative).
///
/// With a node in `to`, pages that no other process maps are moved there first (`MPOL_MF_MOVE`), and the answer says
/// what came of each. An address without a page is `-ENOENT`.
pub(super) fn move_pages(
    process: u32,
    addresses: &[usize],
    to: Option<NodeId>,
    answers: &mut Vec<i32>,
) -> io::Result<()> {
    /// `MPOL_MF_MOVE` of linux/mempolicy.h.
    const MOVE: i32 = 2;
    let process = i32::try_from(process).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    answers.clear();
    // What the kernel does not answer, because it gave up before, was not moved.
    answers.resize(addresses.len(), -libc::EAGAIN);
    let nodes: Vec<i32> = match to {
        None => Vec::new(),
        Some(node) => {
            let node = i32::try_from(node.0).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
            vec![node; addresses.len()]
        }
    };
    let wanted = if nodes.is_empty() { ptr::null() } else { nodes.as_ptr() };
    // SAFETY: the kernel reads as many addresses and nodes (or no nodes) as there are, and writes as many answers; all
    // arrays have that length. The addresses are those of another process and are not dereferenced here.
    let result = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            process,
            addresses.len(),
            addresses.as_ptr(),
            wanted,
            answers.as_mut_ptr(),
            MOVE,
        )
    };
    // A positive number is that of pages that were not moved: the answers say which.
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_where_our_own_pages_lie() {
        let memory = vec![1_u8; 64 << 10];
        let page = rustix::param::page_size();
        let first = memory.as_ptr().addr().next_multiple_of(page);
        let mut answers = Vec::new();
        move_pages(std::process::id(), &[first, first + page, 0], None, &mut answers).unwrap();
        assert!(answers[0] >= 0 && answers[1] >= 0, "{answers:?}");
        assert!(answers[2] < 0, "there is no page at 0: {answers:?}");
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = child.id();
        child.wait().unwrap();
        let error = move_pages(process, &[4096], None, &mut Vec::new()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }
}
