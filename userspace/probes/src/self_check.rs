//! Compares the probe's counts with pages whose node is known.
//!
//! A wrong idea of the kernel's data would book pages to wrong nodes without any error. So after attaching,
//! some pages are allocated on each node and the kernel is asked where they are (`/proc/self/numa_maps`). Each
//! node's counter must have grown by at least as much; others may allocate meanwhile, so it may have grown by
//! more. Nodes are preferred, not bound: a node without free memory is skipped, and nobody is killed for it.
//! Where `mbind(2)` is not allowed, as by the seccomp profile of containers, pages are touched on the node's CPUs.

use std::fs;

use numaward_topology::{
    CpuSet, Machine, NodeId, NodeSet,
    affinity::{affinity, set_affinity},
};

use crate::{NodeCounters, SelfCheck, sys::Mapping};

/// Pages touched for each node.
const PAGES: usize = 64;

/// The probe counts wrongly.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("self-check: {touched} pages were allocated on node {node}, but {counted} were counted there")]
pub(crate) struct Mismatch {
    node: NodeId,
    touched: u64,
    counted: u64,
}

/// This thread runs on the CPUs of a node as long as this lives.
struct OnNode(CpuSet);

impl OnNode {
    /// None if it cannot run there.
    fn new(machine: &Machine, node: NodeId) -> Option<Self> {
        let before = affinity(None).ok()?;
        set_affinity(None, &machine.nodes.get(&node)?.cpus).ok()?;
        Some(Self(before))
    }
}

impl Drop for OnNode {
    fn drop(&mut self) {
        if let Err(error) = set_affinity(None, &self.0) {
            log::warn!("a thread stays on the CPUs of one node: {error}");
        }
    }
}

/// Allocates pages on each node. Returns how many it got, in the order of `nodes`, or why it could not.
pub(crate) fn touch(nodes: &[NodeId], machine: &Machine) -> Result<Vec<u64>, String> {
    let mut touched = vec![0; nodes.len()];
    for &node in nodes {
        let mut mapping = Mapping::new(PAGES).map_err(|error| format!("mmap: {error}"))?;
        let _on_node = match mapping.prefer_node(node.0) {
            Ok(()) => None,
            Err(error) => match error.raw_os_error() {
                // The node has no memory, or not for us (cpuset.mems).
                Some(libc::EINVAL) => continue,
                // Without NUMA in the kernel, all pages are on the one node.
                Some(libc::ENOSYS) if nodes.len() == 1 => None,
                Some(libc::EPERM) => match OnNode::new(machine, node) {
                    Some(on_node) => Some(on_node),
                    None => continue,
                },
                _ => return Err(format!("mbind: {error}")),
            },
        };
        mapping.touch();
        let places = match fs::read_to_string("/proc/self/numa_maps") {
            Ok(maps) => pages_by_node(&maps, mapping.start()),
            Err(_) if nodes.len() == 1 => vec![(node, PAGES as u64)],
            Err(error) => return Err(format!("/proc/self/numa_maps: {error}")),
        };
        for (place, pages) in places {
            let index = nodes.iter().position(|&node| node == place);
            if let Some(count) = index.and_then(|index| touched.get_mut(index)) {
                *count += pages;
            }
        }
    }
    Ok(touched)
}

/// Where the pages of the mapping are that begins at this address (`numa(7)`).
fn pages_by_node(maps: &str, start: usize) -> Vec<(NodeId, u64)> {
    let mapping = maps.lines().find_map(|line| {
        let (address, about) = line.split_once(' ')?;
        (usize::from_str_radix(address, 16) == Ok(start)).then_some(about)
    });
    let pages = |word: &str| {
        let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
        Some((NodeId(node.parse().ok()?), pages.parse().ok()?))
    };
    mapping.into_iter().flat_map(|about| about.split(' ')).filter_map(pages).collect()
}

/// Compares what [`touch`] got with what was counted meanwhile.
pub(crate) fn compare(
    nodes: &[NodeId],
    touched: Result<Vec<u64>, String>,
    counted: &NodeCounters,
) -> Result<SelfCheck, Mismatch> {
    let touched = match touched {
        Ok(touched) => touched,
        Err(reason) => return Ok(SelfCheck::Unchecked(reason)),
    };
    let mut passed = NodeSet::new();
    for (&node, touched) in nodes.iter().zip(touched) {
        let counted = counted.get(node).map_or(0, |of| of.user_local.0 + of.user_remote.0);
        if counted < touched {
            return Err(Mismatch { node, touched, counted });
        }
        if touched > 0 {
            passed.insert(node);
        }
    }
    if passed.is_empty() {
        return Ok(SelfCheck::Unchecked("no node gave memory to this process".to_owned()));
    }
    Ok(SelfCheck::Passed(passed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Counters, Pages};

    #[test]
    fn the_kernel_tells_where_pages_are() {
        let maps = "7f0000000000 default file=/N9=9/libc.so.6 mapped=9 N0=9 kernelpagesize_kB=4\n\
            7f1200a00000 prefer:2 anon=64 dirty=64 N0=4 N2=60 kernelpagesize_kB=4\n\
            7f1300000000 default\n";
        let at = |start| pages_by_node(maps, start);
        assert_eq!(at(0x7f12_00a0_0000), [(NodeId(0), 4), (NodeId(2), 60)]);
        assert_eq!((at(0x7f13_0000_0000), at(0x1000)), (vec![], vec![]));
    }

    #[test]
    fn counts_are_compared_node_by_node() {
        let nodes = [NodeId(0), NodeId(2), NodeId(5)];
        let counters = |pages: u64| {
            let (user_local, user_remote) = (Pages(pages / 2), Pages(pages - pages / 2));
            Counters { user_local, user_remote, ..Counters::default() }
        };
        let check = |touched: Result<[u64; 3], &str>, counted: [u64; 3]| {
            let touched = touched.map(Vec::from).map_err(str::to_owned);
            compare(&nodes, touched, &nodes.into_iter().zip(counted.map(counters)).collect())
        };
        assert_eq!(check(Ok([64, 64, 64]), [64, 64, 64]), Ok(SelfCheck::Passed("0,2,5".parse().unwrap())));
        assert_eq!(
            check(Ok([128, 64, 0]), [4000, 64, 0]),
            Ok(SelfCheck::Passed("0,2".parse().unwrap())),
            "others allocate as well; node 5 has no memory"
        );
        assert_eq!(
            check(Ok([64, 64, 64]), [128, 0, 64]),
            Err(Mismatch { node: NodeId(2), touched: 64, counted: 0 }),
            "what is on node 2 was booked to node 0"
        );
        assert!(matches!(check(Ok([0, 0, 0]), [0, 0, 0]), Ok(SelfCheck::Unchecked(_))));
        assert_eq!(
            check(Err("mbind: not permitted"), [0, 0, 0]),
            Ok(SelfCheck::Unchecked("mbind: not permitted".to_owned()))
        );
    }
}
