//! Compares the probe's counts with pages on known nodes.
//!
//! If the probe misinterpreted the kernel's data, it would book pages to wrong nodes without any error. After
//! attaching, some pages are therefore allocated on each node, and the kernel reports their nodes
//! (`/proc/self/numa_maps`). Each node's counter must have grown by at least this number; it may have grown by more,
//! because other processes allocate meanwhile. Nodes are preferred, not bound: a node without free memory is skipped,
//! and no process is killed. If `mbind(2)` is not permitted, as in the seccomp profile of containers, the pages are
//! touched on the node's CPUs.

use std::fs;

use numaward_topology::{
    CpuSet, Machine, NodeId, NodeSet,
    affinity::{affinity, set_affinity},
};

use crate::{NodeCounters, SelfCheck, sys::AnonymousMapping};

/// The number of pages that are touched on each node.
const TOUCHED_PAGES: usize = 64;

/// A count that is too low.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("self-check: {touched} pages were allocated on node {node}, but {counted} were counted there")]
pub(crate) struct Mismatch {
    node: NodeId,
    touched: u64,
    counted: u64,
}

/// Restricts this thread to the CPUs of a node until it is dropped.
struct NodeAffinity(CpuSet);

impl NodeAffinity {
    /// Returns `None` if the thread cannot run there.
    fn new(machine: &Machine, node: NodeId) -> Option<Self> {
        let before = affinity(None).ok()?;
        set_affinity(None, &machine.nodes.get(&node)?.cpus).ok()?;
        Some(Self(before))
    }
}

impl Drop for NodeAffinity {
    fn drop(&mut self) {
        if let Err(error) = set_affinity(None, &self.0) {
            log::warn!(
                "cannot restore the affinity of a thread, which stays on the CPUs of one node: {error}"
            );
        }
    }
}

/// Allocates pages on each node. Returns their number in the order of `nodes`, or the reason why that is impossible.
pub(crate) fn touch(nodes: &[NodeId], machine: &Machine) -> Result<Vec<u64>, String> {
    let mut touched = vec![0; nodes.len()];
    for &node in nodes {
        let mut mapping = AnonymousMapping::new(TOUCHED_PAGES).map_err(|error| format!("mmap: {error}"))?;
        let _on_node = match mapping.prefer_node(node.0) {
            Ok(()) => None,
            Err(error) => match error.raw_os_error() {
                // The node has no memory, or not for this process (cpuset.mems).
                Some(libc::EINVAL) => continue,
                // Without NUMA in the kernel, all pages are on the only node.
                Some(libc::ENOSYS) if nodes.len() == 1 => None,
                Some(libc::EPERM) => match NodeAffinity::new(machine, node) {
                    Some(on_node) => Some(on_node),
                    None => continue,
                },
                _ => return Err(format!("mbind: {error}")),
            },
        };
        mapping.touch();
        let places = match fs::read_to_string("/proc/self/numa_maps") {
            Ok(maps) => pages_by_node(&maps, mapping.start()),
            Err(_) if nodes.len() == 1 => vec![(node, TOUCHED_PAGES as u64)],
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

/// Returns the pages by node of the mapping that begins at this address (`numa(7)`).
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

/// Compares the result of [`touch`] with the counts of the same time.
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
        return Ok(SelfCheck::Unchecked("this process got no memory on any node".to_owned()));
    }
    Ok(SelfCheck::Passed(passed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Counters, Pages};

    #[test]
    fn touches_on_node_beyond_cpu_1024() {
        let test = || {
            let before = affinity(None).unwrap();
            let first = before.first().unwrap();
            let builder = Machine::builder().nodes(2).sockets(2).cores_per_node(1);
            let mut machine = builder.build().unwrap();
            // The kernel ignores CPUs that it does not have.
            let far: CpuSet = "1024-1100,5000".parse().unwrap();
            let cpus = [&CpuSet::single(first) | &far, far];
            for (node, cpus) in machine.nodes.values_mut().zip(cpus) {
                node.cpus = cpus;
            }
            let on_node = NodeAffinity::new(&machine, NodeId(0)).unwrap();
            assert_eq!(affinity(None).unwrap(), CpuSet::single(first));
            drop(on_node);
            assert_eq!(affinity(None).unwrap(), before);
            assert!(NodeAffinity::new(&machine, NodeId(1)).is_none(), "none of its CPUs is there");
        };
        std::thread::spawn(test).join().unwrap();
    }

    #[test]
    fn parses_pages_by_node() {
        let maps = "7f0000000000 default file=/N9=9/libc.so.6 mapped=9 N0=9 kernelpagesize_kB=4\n\
            7f1200a00000 prefer:2 anon=64 dirty=64 N0=4 N2=60 kernelpagesize_kB=4\n\
            7f1300000000 default\n";
        let at = |start| pages_by_node(maps, start);
        assert_eq!(at(0x7f12_00a0_0000), [(NodeId(0), 4), (NodeId(2), 60)]);
        assert_eq!((at(0x7f13_0000_0000), at(0x1000)), (vec![], vec![]));
    }

    #[test]
    fn compares_counts_by_node() {
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
            "other processes allocate too; node 5 has no memory"
        );
        assert_eq!(
            check(Ok([64, 64, 64]), [128, 0, 64]),
            Err(Mismatch { node: NodeId(2), touched: 64, counted: 0 }),
            "pages of node 2 were booked to node 0"
        );
        assert!(matches!(check(Ok([0, 0, 0]), [0, 0, 0]), Ok(SelfCheck::Unchecked(_))));
        assert_eq!(
            check(Err("mbind: not permitted"), [0, 0, 0]),
            Ok(SelfCheck::Unchecked("mbind: not permitted".to_owned()))
        );
    }
}
