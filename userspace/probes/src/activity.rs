//! The counters of the secondary probes for each slot: accesses, migrations, stalls, kills.
//!
//! Each counter is a 64-bit number in an array of the kernel, shared by all CPUs. Counters are never reset. A slot's
//! holder gets their growth since it took the slot, computed modulo 2^64, so that a counter may wrap.

use std::{borrow::Cow, time::Duration};

use numaward_abi::{MIGRATE_REASONS, OOM_CONSTRAINTS, STALL_BUCKETS};
use numaward_topology::{Bytes, HugepageSize, NodeId};

use crate::Pages;

/// The counts of a slot, without allocations.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// Sampled accesses by node of the CPU: an entry for every node, or none if accesses are not sampled.
    pub accesses: Vec<NodeAccesses>,
    /// Mappings that NUMA balancing scanned. It scans the same mappings again and again.
    pub scanned: ScannedPages,
    /// Pages moved to another node: an entry for each reason and pair of nodes that has any.
    pub migrated: Vec<MigratedPages>,
    pub stalls: Stalls,
    /// Processes killed by the OOM killer, by `enum oom_constraint` (see [`OOM_CONSTRAINT_NAMES`]).
    pub oom_kills: [u64; OOM_CONSTRAINTS],
    /// Hugepages taken from the pools, by node and size: an entry for every combination.
    pub hugepages: Vec<NodeHugepages>,
    /// Accesses to DRAM by node of the CPU: an entry for every node, or none if the processor does not count them.
    pub dram: Vec<DramAccesses>,
}

/// Hugepages of one size that were taken from the pool of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeHugepages {
    pub node: NodeId,
    /// The size of a page.
    pub size: HugepageSize,
    /// Pages taken by CPUs with this memory node.
    pub local: Bytes,
    /// Pages taken by other CPUs.
    pub remote: Bytes,
    /// Pages, local or remote, outside the nodes that are guaranteed to the workload.
    pub outside: Bytes,
}

/// Accesses to DRAM from the CPUs of one node, counted by the processor: loads or cache lines, see the table of events
/// in `pmu.rs`. The accesses of a task are known once it is switched out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DramAccesses {
    /// The memory node of the CPUs.
    pub node: NodeId,
    /// Accesses to memory of the same node; `None` if the processor does not count them.
    pub local: Option<u64>,
    pub remote: u64,
}

/// Pages moved to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigratedPages {
    /// The reason: one of [`MIGRATION_REASONS`].
    pub reason: &'static str,
    /// The source and the destination. `None` if the probe does not know them: it also counts pages that moved within
    /// their node then.
    pub nodes: Option<(NodeId, NodeId)>,
    pub pages: Pages,
}

/// The names of the migration reasons, by their numbers in the kernel (`include/linux/migrate_mode.h`).
pub const MIGRATION_REASONS: [&str; MIGRATE_REASONS] = [
    "compaction",
    "memory_failure",
    "memory_hotplug",
    "syscall",
    "mempolicy",
    "numa_misplaced",
    "contig_range",
    "longterm_pin",
    "demotion",
    "damon",
    "other",
    "other",
];

/// The names of the constraints of OOM kills, by their numbers in the kernel (`include/linux/oom.h`).
pub const OOM_CONSTRAINT_NAMES: [&str; OOM_CONSTRAINTS] = ["none", "cpuset", "mempolicy", "memcg"];

/// Sampled accesses from the CPUs of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAccesses {
    /// The memory node of the CPUs.
    pub node: NodeId,
    pub local: Pages,
    pub remote: Pages,
    /// The non-zero parts of `remote` by node of the page; `None` if the node is unknown, because the page was migrated
    /// at once.
    pub remote_by_memory: Vec<(Option<NodeId>, Pages)>,
}

/// Pages of mappings that NUMA balancing scanned, by the memory policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScannedPages {
    /// The policy permits sampling.
    pub sampled: Pages,
    /// The policy prevents sampling, such as `MPOL_BIND`.
    pub excluded: Pages,
}

/// The time that tasks were stalled in reclaim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    /// Stalls by duration: bucket `index` counts those of at least 2^(index-1) and less than 2^index microseconds; the
    /// last bucket also counts all longer ones.
    pub buckets: [u64; STALL_BUCKETS],
    pub total: Duration,
}

impl Stalls {
    /// Returns the number of stalls.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }
}

impl Activity {
    /// Adds the counts of another slot.
    pub fn add(&mut self, other: &Self) {
        let plus = |a: &mut Pages, b: Pages| a.0 = a.0.saturating_add(b.0);
        for accesses in &other.accesses {
            let Some(sum) = self.accesses.iter_mut().find(|sum| sum.node == accesses.node) else {
                self.accesses.push(accesses.clone());
                continue;
            };
            plus(&mut sum.local, accesses.local);
            plus(&mut sum.remote, accesses.remote);
            for &(memory, pages) in &accesses.remote_by_memory {
                match sum.remote_by_memory.iter_mut().find(|(node, _)| *node == memory) {
                    Some((_, sum)) => plus(sum, pages),
                    None => sum.remote_by_memory.push((memory, pages)),
                }
            }
        }
        plus(&mut self.scanned.sampled, other.scanned.sampled);
        plus(&mut self.scanned.excluded, other.scanned.excluded);
        for &more in &other.migrated {
            add_migrated(&mut self.migrated, more);
        }
        let buckets = self.stalls.buckets.iter_mut().zip(other.stalls.buckets);
        for (sum, count) in buckets.chain(self.oom_kills.iter_mut().zip(other.oom_kills)) {
            *sum = sum.saturating_add(count);
        }
        self.stalls.total = self.stalls.total.saturating_add(other.stalls.total);
        for more in &other.hugepages {
            let same = |sum: &&mut NodeHugepages| (sum.node, sum.size) == (more.node, more.size);
            let Some(sum) = self.hugepages.iter_mut().find(same) else {
                self.hugepages.push(*more);
                continue;
            };
            let plus = |a: &mut Bytes, b: Bytes| a.0 = a.0.saturating_add(b.0);
            plus(&mut sum.local, more.local);
            plus(&mut sum.remote, more.remote);
            plus(&mut sum.outside, more.outside);
        }
        for more in &other.dram {
            let Some(sum) = self.dram.iter_mut().find(|sum| sum.node == more.node) else {
                self.dram.push(*more);
                continue;
            };
            sum.remote = sum.remote.saturating_add(more.remote);
            sum.local = match (sum.local, more.local) {
                (Some(a), Some(b)) => Some(a.saturating_add(b)),
                (a, b) => a.or(b),
            };
        }
    }
}

/// Adds pages to those with the same reason and nodes.
fn add_migrated(all: &mut Vec<MigratedPages>, more: MigratedPages) {
    match all.iter_mut().find(|sum| (sum.reason, sum.nodes) == (more.reason, more.nodes)) {
        Some(sum) => sum.pages.0 = sum.pages.0.saturating_add(more.pages.0),
        None => all.push(more),
    }
}

/// The pairs of nodes for which a slot counts migrated pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodePairs(u32);

impl NodePairs {
    /// Returns all pairs if the counters of `slots` slots fit into `limit` bytes, else one for all.
    pub(crate) fn new(slots: u32, nodes: u32, limit: u64) -> Self {
        let pairs = nodes.saturating_mul(nodes).max(1);
        let bytes = u64::from(slots)
            .saturating_mul(u64::from(pairs))
            .saturating_mul(size_of::<[u64; MIGRATE_REASONS]>() as u64);
        Self(if bytes <= limit { pairs } else { 1 })
    }

    pub(crate) fn count(self) -> u32 {
        self.0
    }
}

/// Decodes the growth of a slot's counters of migrated pages. `capacity` is the number of nodes for which the counters
/// have room.
pub(crate) fn migrated_pages(nodes: &[NodeId], capacity: u32, counts: &[u64]) -> Vec<MigratedPages> {
    let mut migrated = Vec::new();
    let pairs = counts.as_chunks::<MIGRATE_REASONS>().0;
    for (pair, counts) in pairs.iter().enumerate().filter(|(_, counts)| counts.iter().any(|&count| count > 0))
    {
        let (from, to) = (pair / capacity as usize, pair % capacity as usize);
        let of_pair = nodes.get(from).copied().zip(nodes.get(to).copied()).filter(|(from, to)| from != to);
        for (reason, &pages) in MIGRATION_REASONS.iter().zip(counts).filter(|(_, pages)| **pages > 0) {
            // Several numbers may have the same name.
            add_migrated(&mut migrated, MigratedPages { reason, nodes: of_pair, pages: Pages(pages) });
        }
    }
    migrated
}

/// The number of columns in a row of the matrix of accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MatrixColumns(u32);

impl MatrixColumns {
    /// Returns one column for each node and one for "unknown" if a matrix of that size for `slots` slots fits into
    /// `limit` bytes, else 2.
    pub(crate) fn new(slots: u32, nodes: u32, limit: u64) -> Self {
        let all = nodes.saturating_add(1);
        let bytes = u64::from(slots)
            .saturating_mul(u64::from(nodes))
            .saturating_mul(u64::from(all))
            .saturating_mul(size_of::<u64>() as u64);
        Self(if bytes <= limit { all } else { 2 })
    }

    pub(crate) fn count(self) -> u32 {
        self.0
    }

    /// Decodes the growth of a slot's matrix. `counts` may be empty.
    pub(crate) fn read(self, nodes: &[NodeId], counts: &[u64]) -> Vec<NodeAccesses> {
        let columns = self.0 as usize;
        // Two columns are local and remote, also on a machine with one node, for which they are node 0 and "unknown".
        let row = |(index, (&node, row)): (usize, (&NodeId, &[u64]))| {
            let mut accesses = NodeAccesses { node, ..NodeAccesses::default() };
            for (column, &pages) in row.iter().enumerate() {
                let is_local = if columns == 2 { column == 0 } else { column == index };
                if is_local {
                    accesses.local = Pages(pages);
                    continue;
                }
                accesses.remote.0 = accesses.remote.0.saturating_add(pages);
                let mut memory = if columns == 2 { None } else { nodes.get(column).copied() };
                // On a machine with two nodes, memory that is not on the one is on the other.
                if memory.is_none() && nodes.len() == 2 {
                    memory = nodes.get(1 - index).copied();
                }
                match accesses.remote_by_memory.iter_mut().find(|(node, _)| *node == memory) {
                    _ if pages == 0 => {}
                    Some((_, sum)) => sum.0 = sum.0.saturating_add(pages),
                    None => accesses.remote_by_memory.push((memory, Pages(pages))),
                }
            }
            accesses
        };
        nodes.iter().zip(counts.chunks_exact(columns)).enumerate().map(row).collect()
    }
}

/// Returns the growth of a slot's counters since `base`. An empty `base` stands for zeros.
pub(crate) fn growth<'a>(base: &[u64], now: &'a [u64]) -> Cow<'a, [u64]> {
    if base.is_empty() {
        return now.into();
    }
    let base = base.iter().copied().chain(std::iter::repeat(0));
    now.iter().zip(base).map(|(now, base)| now.wrapping_sub(base)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrated_pages_have_source_and_destination() {
        let bytes = 10 * 9 * size_of::<[u64; MIGRATE_REASONS]>() as u64;
        let nodes = [NodeId(0), NodeId(4)];
        // There is room for a third node.
        let pairs = NodePairs::new(10, 3, bytes);
        assert_eq!(pairs.count(), 9);
        let mut counts = vec![0; 9 * MIGRATE_REASONS];
        let mut set = |pair: usize, reason: usize, count| counts[pair * MIGRATE_REASONS + reason] = count;
        set(0, 5, 1);
        set(1, 5, 20);
        set(3, 10, 300);
        set(3, 11, 4000);
        set(5, 3, 50_000);
        let moved = |reason, nodes, pages| MigratedPages { reason, nodes, pages: Pages(pages) };
        let expected = [
            moved("numa_misplaced", None, 1),
            moved("numa_misplaced", Some((nodes[0], nodes[1])), 20),
            moved("other", Some((nodes[1], nodes[0])), 4300),
            moved("syscall", None, 50_000),
        ];
        assert_eq!(migrated_pages(&nodes, 3, &counts), expected);
        assert_eq!(migrated_pages(&nodes, 3, &[]), []);

        let one = NodePairs::new(10, 3, bytes - 1);
        assert_eq!(one.count(), 1);
        assert_eq!(migrated_pages(&nodes, 3, &counts[..MIGRATE_REASONS]), [moved("numa_misplaced", None, 1)]);

        let mut sum = Activity { migrated: expected.to_vec(), ..Activity::default() };
        sum.add(&Activity { migrated: vec![expected[1], moved("damon", None, 7)], ..Activity::default() });
        assert_eq!(sum.migrated[1].pages, Pages(40));
        assert_eq!(sum.migrated[4], moved("damon", None, 7));
    }

    #[test]
    fn counter_growth_survives_overflow() {
        assert_eq!(*growth(&[], &[3, u64::MAX]), [3, u64::MAX]);
        assert_eq!(*growth(&[1, u64::MAX - 1], &[3, 5]), [2, 7], "the second one wrapped");
    }

    #[test]
    fn sums_saturate() {
        let dram = |local, remote| vec![DramAccesses { node: NodeId(1), local, remote }];
        let most = Activity {
            dram: dram(Some(u64::MAX), 7),
            scanned: ScannedPages { sampled: Pages(u64::MAX), excluded: Pages(1) },
            oom_kills: [u64::MAX, 0, 0, 1],
            ..Activity::default()
        };
        let mut sum = most.clone();
        sum.add(&most);
        assert_eq!(sum.scanned, ScannedPages { sampled: Pages(u64::MAX), excluded: Pages(2) });
        assert_eq!(sum.oom_kills, [u64::MAX, 0, 0, 2]);
        assert_eq!(sum.dram, dram(Some(u64::MAX), 14));
        let mut none = Activity { dram: dram(None, 1), ..Activity::default() };
        none.add(&Activity { dram: dram(Some(3), 1), ..Activity::default() });
        assert_eq!(none.dram, dram(Some(3), 2));
    }

    #[test]
    fn matrix_is_used_if_it_fits() {
        assert_eq!(MatrixColumns::new(513, 8, 64 << 20), MatrixColumns(9));
        assert_eq!(MatrixColumns::new(10_001, 8, 64 << 20), MatrixColumns(9));
        assert_eq!(MatrixColumns::new(10_001, 64, 64 << 20), MatrixColumns(2));
        assert_eq!(MatrixColumns::new(u32::MAX, u32::MAX, 64 << 20), MatrixColumns(2));
    }

    #[test]
    fn decodes_accesses_by_both_nodes() {
        let nodes = [NodeId(0), NodeId(4), NodeId(5)];
        let counts = [1, 2, 0, 3, /**/ 4, 5, 6, 0, /**/ 0, 0, 7, 0];
        let read = MatrixColumns(4).read(&nodes, &counts);
        let accesses = |node, local, remote, by: &[(Option<u32>, u64)]| NodeAccesses {
            node: NodeId(node),
            local: Pages(local),
            remote: Pages(remote),
            remote_by_memory: by.iter().map(|&(node, pages)| (node.map(NodeId), Pages(pages))).collect(),
        };
        assert_eq!(
            read,
            [
                accesses(0, 1, 5, &[(Some(4), 2), (None, 3)]),
                accesses(4, 5, 10, &[(Some(0), 4), (Some(5), 6)]),
                accesses(5, 7, 0, &[]),
            ]
        );
        // A page that was migrated at once came from the other one of two nodes.
        let two = MatrixColumns(3).read(&nodes[..2], &[1, 2, 3, 0, 4, 5]);
        assert_eq!(two, [accesses(0, 1, 5, &[(Some(4), 5)]), accesses(4, 4, 5, &[(Some(0), 5)])]);
        // Two columns: local and remote.
        let coarse = MatrixColumns(2).read(&nodes, &[1, 2, 3, 4, 5, 0]);
        assert_eq!(
            coarse,
            [accesses(0, 1, 2, &[(None, 2)]), accesses(4, 3, 4, &[(None, 4)]), accesses(5, 5, 0, &[])]
        );
        let mut sum = Activity { accesses: read.clone(), ..Activity::default() };
        sum.add(&Activity { accesses: read, ..Activity::default() });
        assert_eq!(sum.accesses[1], accesses(4, 10, 20, &[(Some(0), 8), (Some(5), 12)]));
    }
}
