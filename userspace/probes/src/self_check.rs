//! Compares the probe's counts with pages whose node is known.
//!
//! A wrong idea of the kernel's data would book pages to wrong nodes without any error. So after attaching,
//! some pages are allocated on each node and the kernel is asked where they are (`move_pages(2)`). Each
//! node's counter must have grown by at least as much; others may allocate meanwhile, so it may have grown by
//! more. Nodes are preferred, not bound: a node without free memory is left out, and nobody is killed for it.

use numaward_abi::AllocCounters;
use numaward_topology::{NodeId, NodeSet};

use crate::{SelfCheck, sys::Mapping};

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

/// Allocates pages on each node. Returns how many it got, in the order of `nodes`, or why it could not.
pub(crate) fn touch(nodes: &[NodeId]) -> Result<Vec<u64>, String> {
    let mut touched = vec![0; nodes.len()];
    for node in nodes {
        let mut mapping = Mapping::new(PAGES).map_err(|error| format!("mmap: {error}"))?;
        match mapping.prefer_node(node.0) {
            Ok(()) => {}
            // The node has no memory, or not for us (cpuset.mems).
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => continue,
            // Without NUMA in the kernel, all pages are on the one node.
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) && nodes.len() == 1 => {}
            Err(error) => return Err(format!("mbind: {error}")),
        }
        mapping.touch();
        let places = match mapping.nodes() {
            Ok(places) => places,
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) && nodes.len() == 1 => vec![0; PAGES],
            Err(error) => return Err(format!("move_pages: {error}")),
        };
        for place in places {
            let index = nodes.iter().position(|node| i64::from(node.0) == i64::from(place));
            if let Some(count) = index.and_then(|index| touched.get_mut(index)) {
                *count += 1;
            }
        }
    }
    Ok(touched)
}

/// Compares what [`touch`] got with the counters before and after it.
pub(crate) fn compare(
    nodes: &[NodeId],
    touched: Result<Vec<u64>, String>,
    before: &[AllocCounters],
    after: &[AllocCounters],
) -> Result<SelfCheck, Mismatch> {
    let touched = match touched {
        Ok(touched) => touched,
        Err(reason) => return Ok(SelfCheck::Unchecked(reason)),
    };
    let user = |counters: &AllocCounters| counters.user_local + counters.user_remote;
    let mut passed = NodeSet::new();
    for (((&node, &touched), before), after) in nodes.iter().zip(&touched).zip(before).zip(after) {
        let counted = user(after).saturating_sub(user(before));
        if counted < touched {
            return Err(Mismatch { node, touched, counted });
        }
        if touched > 0 {
            passed.insert(node);
        }
    }
    if passed.is_empty() {
        return Ok(SelfCheck::Unchecked("no node has memory for this process".to_owned()));
    }
    Ok(SelfCheck::Passed(passed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_compared_node_by_node() {
        let nodes = [NodeId(0), NodeId(2), NodeId(5)];
        let counters = |pages: [u64; 3]| {
            pages.map(|pages| AllocCounters {
                user_local: pages / 2,
                user_remote: pages - pages / 2,
                ..Default::default()
            })
        };
        let before = counters([1000, 0, 7]);
        let check = |touched: Result<[u64; 3], &str>, after| {
            let touched = touched.map(Vec::from).map_err(str::to_owned);
            compare(&nodes, touched, &before, &counters(after))
        };
        assert_eq!(check(Ok([64, 64, 64]), [1064, 64, 71]), Ok(SelfCheck::Passed("0,2,5".parse().unwrap())));
        assert_eq!(
            check(Ok([128, 64, 0]), [5000, 64, 7]),
            Ok(SelfCheck::Passed("0,2".parse().unwrap())),
            "others allocate as well; node 5 has no memory"
        );
        assert_eq!(
            check(Ok([64, 64, 64]), [1128, 0, 71]),
            Err(Mismatch { node: NodeId(2), touched: 64, counted: 0 }),
            "what is on node 2 was booked to node 0"
        );
        assert!(matches!(check(Ok([0, 0, 0]), [1000, 0, 7]), Ok(SelfCheck::Unchecked(_))));
        assert_eq!(
            check(Err("mbind: not permitted"), [1000, 0, 7]),
            Ok(SelfCheck::Unchecked("mbind: not permitted".to_owned()))
        );
    }
}
