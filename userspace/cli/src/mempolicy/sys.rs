//! The system calls of memory policies, behind safe functions.

#![expect(unsafe_code, reason = "raw system calls that no crate here offers")]

use std::{io, ptr};

use numaward_topology::{NodeId, NodeSet};

/// A policy of linux/mempolicy.h.
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

/// `MPOL_F_NUMA_BALANCING`: pages may still be moved towards the CPUs, within the nodes.
const BALANCING: i32 = 1 << 13;
/// The flags beside the mode.
const FLAGS: i32 = 0b111 << 13;
/// Nodes that the kernel can have at most (`MAX_NUMNODES`), which is how many it wants to be asked for.
const MAX_NODES: usize = 1024;

/// Sets the memory policy of this thread, which a command that it becomes goes on with.
pub(crate) fn set_mempolicy(mode: Mode, balancing: bool, nodes: &NodeSet) -> io::Result<()> {
    let words = nodes.words();
    let flags = if balancing { BALANCING } else { 0 };
    let (mask, bits) = match words.len() {
        0 => (ptr::null(), 0),
        // The kernel reads one bit less.
        len => (words.as_ptr(), len * 64 + 1),
    };
    // SAFETY: the kernel reads `bits - 1` bits of the mask, which has them; without nodes it reads none.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode as i32 | flags, mask, bits) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The memory policy of this thread and its nodes; `None` for a mode that is not known here.
pub(crate) fn mempolicy() -> io::Result<(Option<Mode>, NodeSet)> {
    let mut mode = 0_i32;
    let mut words = [0_u64; MAX_NODES / 64];
    // SAFETY: the kernel writes one number, and at most so many bits into the array, which has them.
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
    Ok((Mode::from_repr(mode & !FLAGS), NodeSet::from_words(words.to_vec())))
}

/// The node on which this thread would get its next page by interleaving.
pub(crate) fn next_interleaved() -> Option<NodeId> {
    /// `MPOL_F_NODE`.
    const NODE: i32 = 1;
    let mut node = 0_i32;
    // SAFETY: the kernel writes one number, and no mask as there is none.
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

    /// In a thread of its own, as the policy is the thread's.
    fn apart<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
        std::thread::spawn(test).join().unwrap()
    }

    #[test]
    fn what_is_set_is_what_the_kernel_has() {
        let node: NodeSet = "0".parse().unwrap();
        for mode in [Mode::Preferred, Mode::Bind, Mode::Interleave, Mode::PreferredMany] {
            let nodes = node.clone();
            let found = apart(move || {
                set_mempolicy(mode, false, &nodes).unwrap();
                mempolicy().unwrap()
            });
            assert_eq!(found, (Some(mode), node.clone()));
        }
        let found = apart(|| {
            set_mempolicy(Mode::Local, false, &NodeSet::new()).unwrap();
            mempolicy().unwrap().0
        });
        assert_eq!(found, Some(Mode::Local));
        let refused = apart(|| set_mempolicy(Mode::Bind, false, &NodeSet::new()).unwrap_err());
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
    }
}
