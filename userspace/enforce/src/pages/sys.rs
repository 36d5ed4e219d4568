//! `move_pages(2)` and `migrate_pages(2)`, behind safe functions.

#![expect(unsafe_code, reason = "a raw system call that no crate here offers")]

use std::{io, ptr};

use numaward_topology::{NodeId, NodeSet};

/// Queries the node of each page of a process: the answer is the node, or the kernel's error number (negative).
///
/// With a node in `to`, first moves pages there that no other process maps (`MPOL_MF_MOVE`); the answer is the result
/// of each. The answer for an address without a page is `-ENOENT`.
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
    // Pages without an answer, because the kernel gave up before, were not moved.
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
    // A positive number is that of pages that were not moved; the answers have the details.
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Moves all pages of a process between nodes. Returns the number of pages that could not be moved.
///
/// With `CAP_SYS_NICE`, this includes pages that other processes map as well.
pub(super) fn migrate_pages(process: u32, from: &NodeSet, to: &NodeSet) -> io::Result<u64> {
    let process = i32::try_from(process).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let highest = from.iter().chain(to.iter()).map(|node| node.0 as usize).max().unwrap_or(0);
    let mask = |nodes: &NodeSet| {
        let mut words = vec![0_u64; highest / 64 + 1];
        for node in nodes.iter() {
            if let Some(word) = words.get_mut(node.0 as usize / 64) {
                *word |= 1 << (node.0 % 64);
            }
        }
        words
    };
    let (from, to) = (mask(from), mask(to));
    // The kernel reads one bit less than this number.
    let bits = from.len() * 64 + 1;
    // SAFETY: the kernel reads this number of bits, rounded up to words, of both masks, which have as many words.
    let result = unsafe { libc::syscall(libc::SYS_migrate_pages, process, bits, from.as_ptr(), to.as_ptr()) };
    u64::try_from(result).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_nodes_of_own_pages() {
        let memory = vec![1_u8; 64 << 10];
        let page = rustix::param::page_size();
        let first = memory.as_ptr().addr().next_multiple_of(page);
        let mut answers = Vec::new();
        move_pages(std::process::id(), &[first, first + page, 0], None, &mut answers).unwrap();
        assert!(answers[0] >= 0 && answers[1] >= 0, "{answers:?}");
        assert!(answers[2] < 0, "there is no page at 0: {answers:?}");
    }

    #[test]
    fn moves_nothing_without_source_node() {
        let there = NodeSet::single(NodeId(0));
        assert_eq!(migrate_pages(std::process::id(), &NodeSet::new(), &there).unwrap(), 0);
    }

    #[test]
    fn missing_process_is_error() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = child.id();
        child.wait().unwrap();
        let nodes = NodeSet::single(NodeId(0));
        for error in [
            move_pages(process, &[4096], None, &mut Vec::new()).unwrap_err(),
            migrate_pages(process, &nodes, &nodes).unwrap_err(),
        ] {
            assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
        }
    }
}
