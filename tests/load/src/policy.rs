//! Memory policies of a thread: `set_mempolicy(2)`.

use std::{fmt, io, str::FromStr};

use numaward_topology::{NodeId, NodeSet};

use crate::error::Error;

/// The kernel's limit is 1024 nodes (`NODES_SHIFT` 10).
const MAX_NODES: usize = 1024;
/// Flag of linux/mempolicy.h.
const MPOL_F_NUMA_BALANCING: i32 = 1 << 13;

/// Memory policy of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum MemoryPolicy {
    Default,
    Bind(NodeSet),
    /// Like `Bind`, and NUMA balancing samples accesses (since Linux 5.12).
    Sampled(NodeSet),
    Preferred(NodeId),
    Interleave(NodeSet),
}

impl MemoryPolicy {
    /// Returns the nodes that the policy names.
    pub(crate) fn nodes(&self) -> NodeSet {
        match self {
            Self::Default => NodeSet::default(),
            Self::Preferred(node) => NodeSet::single(*node),
            Self::Bind(nodes) | Self::Sampled(nodes) | Self::Interleave(nodes) => nodes.clone(),
        }
    }

    /// Sets the policy of the calling thread. `Default` keeps its present policy.
    pub(crate) fn apply(&self) -> Result<(), Error> {
        let mode = match self {
            Self::Default => return Ok(()),
            Self::Bind(_) => libc::MPOL_BIND,
            Self::Sampled(_) => libc::MPOL_BIND | MPOL_F_NUMA_BALANCING,
            Self::Preferred(_) => libc::MPOL_PREFERRED,
            Self::Interleave(_) => libc::MPOL_INTERLEAVE,
        };
        let mut mask = [0_u64; MAX_NODES / 64];
        for node in self.nodes().iter() {
            let node = usize::try_from(node.0).unwrap_or(usize::MAX);
            // A node beyond the mask does not exist; `check_nodes` has returned an error before.
            if let Some(word) = mask.get_mut(node / 64) {
                *word |= 1 << (node % 64);
            }
        }
        // The kernel reads one bit less than this number.
        let bits = MAX_NODES + 1;
        // SAFETY: `mask` has the `bits - 1` bits that the kernel reads; it keeps no pointer to it.
        let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask.as_ptr(), bits) };
        if result == 0 {
            return Ok(());
        }
        Err(Error::MemoryPolicy { policy: self.to_string(), source: io::Error::last_os_error() })
    }
}

impl fmt::Display for MemoryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Bind(nodes) => write!(f, "bind:{nodes}"),
            Self::Sampled(nodes) => write!(f, "sampled:{nodes}"),
            Self::Preferred(node) => write!(f, "preferred:{node}"),
            Self::Interleave(nodes) => write!(f, "interleave:{nodes}"),
        }
    }
}

impl FromStr for MemoryPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "give default, bind:NODES, sampled:NODES, preferred:NODE or interleave:NODES";
        let (mode, nodes) = match text.split_once(':') {
            None if text == "default" => return Ok(Self::Default),
            None => return Err(EXPECTED.to_owned()),
            Some((mode, nodes)) => (mode, nodes.parse::<NodeSet>().map_err(|error| error.to_string())?),
        };
        let first = nodes.first().ok_or("name at least one node")?;
        match mode {
            "bind" => Ok(Self::Bind(nodes)),
            "sampled" => Ok(Self::Sampled(nodes)),
            "preferred" if nodes.len() == 1 => Ok(Self::Preferred(first)),
            "preferred" => Err("preferred takes one node".to_owned()),
            "interleave" => Ok(Self::Interleave(nodes)),
            _ => Err(EXPECTED.to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_prints_policies() {
        for text in ["default", "bind:0-1,3", "sampled:1", "preferred:2", "interleave:0,2"] {
            assert_eq!(text.parse::<MemoryPolicy>().unwrap().to_string(), text);
        }
        for wrong in ["", "bind", "bind:", "bind:x", "preferred:0-1", "default:0", "local:0"] {
            assert!(wrong.parse::<MemoryPolicy>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn kernel_accepts_policies() {
        // Except for rare ones, every machine has a node 0 with memory. The test sets the policy of a separate thread.
        std::thread::spawn(|| {
            for policy in ["bind:0", "sampled:0", "preferred:0", "interleave:0", "default"] {
                policy.parse::<MemoryPolicy>().unwrap().apply().unwrap();
            }
            let error = "bind:1023".parse::<MemoryPolicy>().unwrap().apply().unwrap_err().to_string();
            assert!(error.contains("bind:1023") && error.contains("cpuset.mems"), "{error}");
        })
        .join()
        .unwrap();
    }
}
