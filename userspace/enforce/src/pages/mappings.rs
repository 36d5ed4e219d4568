//! The mappings of a process that have pages on a node, coldest first: `/proc/PID/maps` and `numa_maps`.
//!
//! The kernels that are supported (6.1, 6.12) have no idle page tracking built in, and `clear_refs` would take from the
//! kernel's own reclaim what it knows. So a mapping is as cold as the kernel's LRU lists say: by the share of its pages
//! that are on the active list (`active=` of `numa_maps`). That is coarse: within a mapping nothing is known.
//!
//! Source: `proc_pid_numa_maps(5)`, `proc_pid_maps(5)`, `fs/proc/task_mmu.c`.

use std::{collections::BTreeMap, ops::Range};

use numaward_topology::{NodeId, NodeSet};

/// A mapping with pages on the node that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    /// Its addresses.
    pub(super) addresses: Range<usize>,
    /// How many of its pages are on the node.
    pub(super) pages: u64,
    /// Of its pages, the share that the kernel has on the active list: 0 to 1000.
    pub(super) active: u32,
    /// Whether its policy names nodes.
    pub(super) is_bound: bool,
}

/// The nodes that a policy names: `default`, `local`, `bind:0-1`, `prefer (many):1`, `interleave=static:0,2`.
pub(super) fn nodes_of(policy: &str) -> Option<NodeSet> {
    policy.rsplit_once(':')?.1.parse().ok()
}

/// Those with pages on `node`, from the text of `maps` and `numa_maps`, coldest first. Pools of huge pages are
/// skipped: they are preallocated, and never move. So are lines that cannot be read.
pub(super) fn on_node(maps: &str, numa_maps: &str, node: NodeId) -> Vec<Mapping> {
    let ends: BTreeMap<usize, usize> = maps.lines().filter_map(range).collect();
    let mut found: Vec<Mapping> = numa_maps.lines().filter_map(|line| mapping(line, node, &ends)).collect();
    found.sort_by_key(|mapping| (mapping.active, mapping.addresses.start));
    found
}

/// The addresses of a line of `maps`.
fn range(line: &str) -> Option<(usize, usize)> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

fn mapping(line: &str, node: NodeId, ends: &BTreeMap<usize, usize>) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let start = usize::from_str_radix(words.next()?, 16).ok()?;
    let (mut here, mut active, mut pages) = (0_u64, None, 0_u64);
    // The policy comes first. That of several preferred nodes has a space in it.
    let mut is_bound = false;
    for word in words {
        is_bound |= !word.contains("file=") && nodes_of(word).is_some();
        match word.split_once('=') {
            None if word == "huge" => return None,
            Some(("active", count)) => active = count.parse().ok(),
            Some((key, count)) => {
                let Some(of) = key.strip_prefix('N').and_then(|of| of.parse().ok()) else { continue };
                let count: u64 = count.parse().ok()?;
                pages = pages.saturating_add(count);
                if NodeId(of) == node {
                    here = count;
                }
            }
            None => {}
        }
    }
    // Where all pages are active, the kernel does not say how many.
    let active: u64 = active.unwrap_or(pages);
    let share = active.saturating_mul(1000).checked_div(pages).unwrap_or(0).min(1000);
    let active = u32::try_from(share).unwrap_or(1000);
    (here > 0)
        .then(|| Some(Mapping { addresses: start..*ends.get(&start)?, pages: here, active, is_bound }))
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
00400000-00500000 r-xp 00000000 08:01 1 /bin/db
7f0000000000-7f0000800000 rw-p 00000000 00:00 0
7f0001000000-7f0001800000 rw-p 00000000 00:00 0
7f0002000000-7f0002200000 rw-p 00000000 00:0f 9 /anon_hugepage (deleted)
7f0003000000-7f0003200000 rw-s 00000000 00:01 7 /memfd:a b (deleted)
nonsense
";
    const NUMA_MAPS: &str = "\
00400000 default file=/bin/db mapped=256 active=200 N0=256 kernelpagesize_kB=4
7f0000000000 default anon=2048 dirty=2048 N0=1024 N1=1024 kernelpagesize_kB=4
7f0001000000 bind:0-1 anon=2048 dirty=2048 active=512 N0=2048 kernelpagesize_kB=4
7f0002000000 default file=/anon_hugepage\\040(deleted) huge anon=1 dirty=1 N0=1 kernelpagesize_kB=2048
7f0003000000 default file=/memfd:a\\040b\\040(deleted) dirty=512 active=0 N1=512 kernelpagesize_kB=4
7f0004000000 default
zzz default N0=1
";

    #[test]
    fn mappings_with_pages_on_the_node_come_coldest_first() {
        let found = on_node(MAPS, NUMA_MAPS, NodeId(0));
        let starts: Vec<_> = found.iter().map(|of| (of.addresses.start, of.active)).collect();
        assert_eq!(starts, [(0x7f00_0100_0000, 250), (0x40_0000, 781), (0x7f00_0000_0000, 1000)]);
        assert_eq!((found[0].addresses.end, found[0].pages), (0x7f00_0180_0000, 2048));
        let found = on_node(MAPS, NUMA_MAPS, NodeId(1));
        let starts: Vec<_> = found.iter().map(|of| (of.addresses.start, of.active)).collect();
        assert_eq!(starts, [(0x7f00_0300_0000, 0), (0x7f00_0000_0000, 1000)]);
        let bound = on_node(MAPS, NUMA_MAPS, NodeId(0)).iter().map(|of| of.is_bound).collect::<Vec<_>>();
        assert_eq!(bound, [true, false, false], "one is bound to nodes 0-1");
        assert!(on_node("", NUMA_MAPS, NodeId(0)).is_empty(), "a mapping that is gone meanwhile");
        assert!(on_node(MAPS, NUMA_MAPS, NodeId(7)).is_empty());
    }
}
