//! System calls of memory policies as safe functions.

#![expect(unsafe_code, reason = "raw system calls that no crate here offers")]

use std::{io, ptr};

use numaward_topology::{NodeId, NodeSet};

/// Mode of a memory policy (`linux/mempolicy.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr)]
#[repr(i32)]
pub(crate) enum Mode {
    Default = 0,
    Preferred = 1,
    Bind = 2,
    Interleave = 3,
    Local = 4,
    PreferredMany = 5,
    WeightedInterleave = 6,
}

/// `MPOL_F_NUMA_BALANCING`: NUMA balancing may move pages within the nodes.
const BALANCING_FLAG: i32 = 1 << 13;
/// Mask of the flags in the mode.
const MODE_FLAGS: i32 = 0b111 << 13;
/// Maximum number of nodes of a kernel (`MAX_NUMNODES`), which is the size of mask that it expects.
const MAX_NODES: usize = 1024;

/// Sets the memory policy of this thread. A command that the thread executes inherits it.
pub(crate) fn set_mempolicy(mode: Mode, balancing: bool, nodes: &NodeSet) -> io::Result<()> {
    let words = nodes.words();
    let flags = if balancing { BALANCING_FLAG } else { 0 };
    let (mask, bits) = match words.len() {
        0 => (ptr::null(), 0),
        // The kernel reads one bit less than it is given.
        len => (words.as_ptr(), len * 64 + 1),
    };
    // SAFETY: the kernel reads `bits - 1` bits of the mask, which has them; without nodes it reads none.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode as i32 | flags, mask, bits) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the memory policy of this thread and its nodes; `None` for an unknown mode.
pub(crate) fn mempolicy() -> io::Result<(Option<Mode>, NodeSet)> {
    let mut mode = 0_i32;
    let mut words = [0_u64; MAX_NODES / 64];
    // SAFETY: the kernel writes one number, and at most `MAX_NODES` bits into the array, which has that many.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            ptr::from_mut(&mut mode),
            words.as_mut_ptr(),
            MAX_NODES,
            ptr::null::<u8>(),
            0_i32,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((Mode::from_repr(mode & !MODE_FLAGS), NodeSet::from_words(words.to_vec())))
}

/// Returns the node of this thread's next page under interleaving.
pub(crate) fn next_interleaved() -> Option<NodeId> {
    /// `MPOL_F_NODE`.
    const NODE: i32 = 1;
    let mut node = 0_i32;
    // SAFETY: the kernel writes one number, and no mask as the pointer is null.
    let result = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            ptr::from_mut(&mut node),
            ptr::null_mut::<u64>(),
            0_usize,
            ptr::null::<u8>(),
            NODE,
        )
    };
    u32::try_from(node).ok().filter(|_| result == 0).map(NodeId)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a test in a thread of its own, as the policy belongs to the thread.
    fn in_own_thread<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(test).join().unwrap()
    }

    #[test]
    fn kernel_returns_the_policy_that_was_set() {
        let node: NodeSet = "0".parse().unwrap();
        for mode in [Mode::Preferred, Mode::Bind, Mode::Interleave, Mode::PreferredMany] {
            let nodes = node.clone();
            let found = in_own_thread(move || {
                set_mempolicy(mode, false, &nodes).unwrap();
                mempolicy().unwrap()
            });
            assert_eq!(found, (Some(mode), node.clone()));
        }
        let found = in_own_thread(|| {
            set_mempolicy(Mode::Local, false, &NodeSet::new()).unwrap();
            mempolicy().unwrap().0
        });
        assert_eq!(found, Some(Mode::Local));
        let refused = in_own_thread(|| set_mempolicy(Mode::Bind, false, &NodeSet::new()).unwrap_err());
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
    }
}
